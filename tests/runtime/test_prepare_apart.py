"""Who runs planned files loads nothing of onnx: another process reads and checks them, and says what is wrong."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

import memonger
from memonger.ir.element_types import ElementType
from memonger.plan_file import KEY
from tests.support import networks
from tests.support.stock import normal, run_stock, same

WIDTH, STEPS = 6000, 3  # so wide that copies of the products would pack too much for one session

RUNS = """
import json, sys, time
from pathlib import Path
import numpy as np
from memonger import Session
from memonger.runtime import loaded_model, prepare_apart

folder, found = Path(sys.argv[1]), {}
given = dict(np.load(folder / "inputs.npz"))
for name, files in (
    *((one, [one]) for one in ("plain", "chunked", "kept")), ("several", ["plain", "larger"]), ("spilled", ["plain"])
):
    if name == "spilled":  # weights go to temporary files of the other process, as those of large files do
        spills = "from memonger.ir import wire; wire.SPILLED = 0; serve()"
        prepare_apart._CHILD = prepare_apart._CHILD.replace("serve()", spills)
        Engine = loaded_model.Engine
        loaded_model.Engine = lambda *given, **options: (time.sleep(0.3), Engine(*given, **options))[1]
    with Session([folder / f"{file}.onnx" for file in files]) as session:
        for number, feeds in enumerate(json.loads((folder / f"{name}.json").read_text())):
            results = session.run({key: given[place] for key, place in feeds.items()})
            found |= {f"{name}/{number}/{key}": value for key, value in results.items()}
        found[f"{name}/steps"] = len(session._model._loaded[0].plan.steps)
        found |= {f"{name}/state/{key}": value for key, value in session.state_dict().items()}
    loaded = sorted(one for one in sys.modules if one.split(".")[0] in ("onnx", "onnx_ir", "google", "ml_dtypes"))
    assert not loaded, (name, loaded)
from memonger import Fleet
from memonger.runtime import ort

assert ort.texts(np.array(["a"])).numpy().tolist() == ["a"]
starts, start = [], prepare_apart._Child.start
prepare_apart._Child.start = lambda: (starts.append(1), start())[1]
with Fleet({name: folder / f"{name}.onnx" for name in ("plain", "chunked")}) as fleet:
    for name in fleet:
        (feeds,) = json.loads((folder / f"{name}.json").read_text())
        found[f"fleet {name}/y"] = fleet[name].run({key: given[place] for key, place in feeds.items()})["y"]
assert len(starts) == 1
try:
    Fleet({"plain": folder / "plain.onnx", "missing": folder / "missing.onnx"})
except Exception as error:
    wrong = error
assert type(wrong).__name__ == "PlanFileError"
assert not {"onnx", "onnx_ir", "google"}.intersection(sys.modules)
np.savez(folder / "results.npz", **found)
"""

ERRORS = """
import json, sys
import memonger
from memonger.runtime import prepare_apart

found = []
for path in json.loads(sys.argv[1]):
    try:
        memonger.Session(path)
    except Exception as error:
        found.append([type(error).__name__, str(error)])
assert "onnx" not in sys.modules
prepare_apart._CHILD = "import os; os.write(1, b'memonger prepares\\\\n'); os.kill(os.getpid(), 9)"
try:
    memonger.Session(sys.argv[2])
except memonger.SessionError as error:
    found.append([type(error).__name__, str(error)])
assert "onnx" not in sys.modules
sys.executable = "/bin/false"  # which is no Python: this process does it itself
memonger.Session(sys.argv[2])
found.append("onnx" in sys.modules)
print(json.dumps(found))
"""


def _model(batch: int) -> onnx.ModelProto:
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["a"], name="product"),
        helper.make_node("Tanh", ["a"], ["b"], name="tanh"),
        helper.make_node("MatMul", ["b", "w1"], ["c"], name="back"),
        helper.make_node("ReduceSum", ["c", "axes"], ["y"], name="sum"),
    ]
    weights = {"w0": normal(0, 8, WIDTH), "w1": normal(1, WIDTH, 8), "axes": np.array([1])}
    return networks.model_of(nodes, {"x": [batch, 8]}, {"y": [batch, 1]}, **weights)


def _kept() -> onnx.ModelProto:
    nodes = [
        helper.make_node("MatMul", ["h", "u"], ["a"], name="again"),
        helper.make_node("Add", ["a", "x"], ["b"], name="add"),
        helper.make_node("Tanh", ["b"], ["h_next"], name="tanh"),
        helper.make_node("Neg", ["h_next"], ["y"], name="neg"),
    ]
    return networks.model_of(nodes, {"x": [2, 8], "h": [2, 8]}, {"y": [2, 8], "h_next": [2, 8]}, u=normal(2, 8, 8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Planned files, portable and for this device."""
    made = tmp_path_factory.mktemp("planned")
    memonger.search_plan(_model(4), mode="inference", device="cpu").save(made / "plain.onnx")
    memonger.search_plan(_model(16), mode="inference", device="cpu").save(made / "larger.onnx")
    memonger.search_plan(_model(64), mode="inference", device="cpu", threads=1, chunks=4).save(made / "chunked.onnx")
    memonger.search_plan(_kept(), mode="inference", device="none", state={"h": "h_next"}).save(made / "kept.onnx")
    return made


def test_a_process_that_runs_plans_loads_nothing_of_onnx(folder: Path) -> None:
    runs: dict[str, list[dict[str, Any]]] = {
        "plain": [{"x": normal(3, 4, 8)}],
        "chunked": [{"x": normal(4, 64, 8)}],
        "kept": [{"x": normal(10 + step, 2, 8)} for step in range(STEPS)],
        "several": [{"x": normal(5, 16, 8)}, {"x": normal(6, 4, 8)}],
        "spilled": [{"x": normal(7, 4, 8)}],
    }
    given = {
        f"{name}/{n}/{key}": one
        for name, each in runs.items()
        for n, feeds in enumerate(each)
        for key, one in feeds.items()
    }
    np.savez(folder / "inputs.npz", **given)
    for name, each in runs.items():
        places = [{key: f"{name}/{n}/{key}" for key in feeds} for n, feeds in enumerate(each)]
        (folder / f"{name}.json").write_text(json.dumps(places))
    subprocess.run([sys.executable, "-c", RUNS, folder], check=True)
    results, h = dict(np.load(folder / "results.npz")), np.zeros((2, 8), np.float32)
    for name, batch in (("plain", 4), ("chunked", 64), ("spilled", 4)):
        (feeds,) = runs[name]
        assert (results[f"{name}/steps"] > 1) == (name == "chunked")
        assert name == "spilled" or same(results[f"fleet {name}/y"], results[f"{name}/0/y"])
        assert same(results[f"{name}/0/y"], run_stock(_model(batch), feeds, "ORT_ENABLE_ALL")["y"])
    for number, feeds in enumerate(runs["several"]):
        assert same(results[f"several/{number}/y"], run_stock(_model(len(feeds["x"])), feeds, "ORT_ENABLE_ALL")["y"])
    for number, feeds in enumerate(runs["kept"]):
        stock = run_stock(_kept(), {**feeds, "h": h}, "ORT_DISABLE_ALL")
        h = stock["h_next"]
        assert same(results[f"kept/{number}/y"], stock["y"])
    assert same(results["kept/state/h"], h)


def _overlapping(source: Path, target: Path) -> Path:
    """A plan all of whose values lie at one place."""
    model = onnx.load(source)
    entry = next(one for one in model.metadata_props if one.key == KEY)
    record = json.loads(entry.value)
    assert len(set(record["offsets"].values())) > 1
    record["offsets"] = dict.fromkeys(record["offsets"], 0)
    entry.value = json.dumps(record)
    onnx.save(model, target)
    return target


def _with_another_weight(source: Path, target: Path) -> Path:
    model = onnx.load(source)
    weight = max(model.graph.initializer, key=lambda one: len(one.raw_data))
    weight.raw_data = bytes([weight.raw_data[0] ^ 1]) + weight.raw_data[1:]
    onnx.save(model, target)
    return target


def test_what_is_wrong_with_a_file_is_said_as_this_process_would(folder: Path, tmp_path: Path) -> None:
    source = folder / "plain.onnx"
    wrong = [
        _overlapping(source, tmp_path / "overlapping.onnx"), _with_another_weight(source, tmp_path / "weight.onnx"),
        tmp_path / "missing.onnx",
    ]  # fmt: skip
    here = []
    for path in wrong:
        with pytest.raises(memonger.MemongerError) as caught:
            memonger.Session(path)
        here.append([caught.type.__name__, str(caught.value)])
    assert [kind for kind, _ in here] == ["VerificationError", "PlanFileError", "PlanFileError"]
    paths = json.dumps(list(map(str, wrong)))
    done = subprocess.run([sys.executable, "-c", ERRORS, paths, source], capture_output=True, check=True)
    *there, dead, is_loaded = json.loads(done.stdout)
    assert there == here
    assert dead[0] == "SessionError"
    assert "plain.onnx" in dead[1]
    assert "SIGKILL. Memory may have run out" in dead[1]
    assert is_loaded


@pytest.mark.parametrize("kind", list(ir.DataType), ids=str)
def test_element_types_are_onnxs(kind: ir.DataType) -> None:
    """Every type that onnx-ir knows, by its name, size and type of arrays."""
    ours = ElementType(kind)
    assert (int(ours), ours.name, ours.is_floating_point()) == (int(kind), kind.name, kind.is_floating_point())
    for ask in (lambda one: one.bitwidth, lambda one: one.numpy()):
        try:
            expected = ask(kind)
        except TypeError:
            with pytest.raises(TypeError):
                ask(ours)
        else:
            assert ask(ours) == expected
    if kind != ir.DataType.UNDEFINED:
        assert ElementType.from_numpy(kind.numpy()) == kind


def test_arrays_that_onnx_has_no_type_for() -> None:
    for dtype in (">f4", "datetime64[s]", "V2", np.dtype([("a", "f4")])):
        with pytest.raises(TypeError, match="no element type"):
            ElementType.from_numpy(np.dtype(dtype))
    assert ElementType.from_numpy(np.dtype("U3")) == ElementType.STRING


def test_the_model_written_by_hand_is_one() -> None:
    from memonger.runtime.ort import COPYING_MODEL

    model = onnx.ModelProto.FromString(COPYING_MODEL.data)
    onnx.checker.check_model(model, full_check=True)
    x = np.ones(1, np.float32)
    assert same(run_stock(model, {"x": x}, "ORT_DISABLE_ALL")["y"], x)
