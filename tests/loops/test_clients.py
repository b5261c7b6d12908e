"""A model in loops gives in other languages what the same language's onnxruntime gives for the model as it was.

Each client is skipped where it isn't there, with what it needs.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from benchmarks import browser
from benchmarks.inference import clients
from memonger.ir.save import as_proto, save_model
from memonger.loops.branch import in_branch
from memonger.loops.rows import with_row_loops
from memonger.loops.writer import with_loops
from memonger.model.load import load
from memonger.tiling.axes import axes_of
from memonger.tiling.slices import Band, SliceStage
from tests.support.image_networks import rows_of_all
from tests.support.stock import normal, parse

UPSCALER = """g (float[4, 3, 24, 24] x) => (float[4, 3, 48, 48] y) {
    a = Conv <pads = [1, 1, 1, 1]> (x, w0)  b = Relu (a)  c = Conv <pads = [1, 1, 1, 1]> (b, w1)
    d = DepthToSpace <blocksize = 2> (c)  y = Sigmoid (d)
}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image network as it was; in a loop of four slices: weights beside it, inside, in a branch; in two loops; its
    rows as turns of one."""
    folder = tmp_path_factory.mktemp("clients")
    model = parse(UPSCALER, opset=17)
    weights = {"w0": normal(0, 16, 3, 3, 3), "w1": normal(1, 12, 16, 3, 3)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    onnx.save(model, folder / "before.onnx")
    loaded = load(model).ir
    axes = axes_of(loaded, {"x": 0})
    made = with_loops(loaded, axes, [Band((SliceStage(0, len(axes.nodes), (0, 1, 2, 3, 4)),))])
    assert [node.op_type for node in made.graph] == ["Reshape", "Scan"]
    (folder / "inside.onnx").write_bytes(as_proto(made, "inside").SerializeToString())
    save_model(made, folder / "beside.onnx", limit=0)
    save_model(in_branch(made), folder / "branch.onnx", limit=0)
    rows = with_row_loops(loaded, [rows_of_all(loaded, 4)], "turns")
    save_model(in_branch(rows), folder / "turns.onnx", limit=0)
    stages = SliceStage(0, 2, (0, 1, 2, 3, 4)), SliceStage(2, len(axes.nodes), (0, 2, 4))
    save_model(with_loops(loaded, axes, [Band(stages)]), folder / "nested.onnx")
    return folder


@pytest.mark.parametrize("make", clients.CLIENTS, ids=["cpp", "node", "web", "chromium"])
def test_outputs_are_the_same_in_another_language(make: object, folder: Path, tmp_path: Path) -> None:
    assert callable(make)
    client = make(tmp_path)
    if isinstance(client, str):
        pytest.skip(client)
    feeds = {"x": normal(2, 4, 3, 24, 24)}
    was, want = client.run(folder / "before.onnx", feeds, tmp_path / "before")
    if client.name != "Chromium":  # whose page gives digests
        assert np.frombuffer(want[0], np.float32).size == 4 * 3 * 48 * 48
    for name in (client.weights, *(["branch", "turns"] if client.weights == "beside" else [])):
        now, got = client.run(folder / f"{name}.onnx", feeds, tmp_path / name)
        assert want == got
        assert was.keys() - {"version"} == now.keys() - {"version"} == {"loaded_bytes", "run_bytes", "seconds"}
    with pytest.raises((RuntimeError, FileNotFoundError), match=r"nothing\.onnx|can't be|exist"):
        client.run(folder / "nothing.onnx", feeds, tmp_path / "nothing")


@pytest.fixture
def page(folder: Path, tmp_path: Path) -> Iterator[browser.Page]:
    """The page of examples/clients, with the two models."""
    web = clients.node(tmp_path, "onnxruntime-web")
    if isinstance(web, str) or browser.found() is None:
        pytest.skip(web if isinstance(web, str) else "needs Chromium")
    package = tmp_path / "node_modules" / "onnxruntime-web" / "dist"
    site = tmp_path / "site"
    shutil.copytree(clients.PROGRAMS / "page", site)
    for file in (*package.glob("ort.wasm.min.mjs"), *package.glob("ort-wasm-simd-threaded.[mw]*"), *folder.iterdir()):
        shutil.copy(file, site)
    with browser.served(site) as address:
        asked = f"{address}/index.html?model=before.onnx&model=inside.onnx"
        with browser.opened(asked) as page:
            yield page


def test_a_page_shows_both_pictures_and_what_they_took(page: browser.Page) -> None:
    page.wait("['done', 'failed'].includes(document.title)", 60)
    assert page.evaluate("document.querySelector('#verdict').textContent") == "The outputs are the same bit for bit."
    assert page.evaluate("document.querySelectorAll('canvas').length") == 3
    assert page.evaluate("document.querySelectorAll('canvas')[2].width") == 96
    assert page.evaluate("results.every((result) => result.most > 0 && result.seconds > 0)")


def test_openvino_gives_its_own_outputs_and_takes_no_loop_in_a_loop(folder: Path) -> None:
    openvino = pytest.importorskip("openvino", reason="needs openvino")
    core, feed = openvino.Core(), normal(2, 4, 3, 24, 24)
    results = []
    for name in ("before.onnx", "beside.onnx"):
        compiled = core.compile_model(folder / name, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        results.append(compiled({0: feed})[0].tobytes())
    assert results[0] == results[1]
    with pytest.raises(RuntimeError, match="No nested TensorIterator"):
        core.read_model(folder / "nested.onnx")
