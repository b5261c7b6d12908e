"""Weights beside a planned file: packed as kernels read them, mapped, checked; and what a process then takes."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

import memonger
from memonger import plan_file
from memonger.ir import packed, save, tensors
from memonger.ir.tensors import read_bytes
from memonger.plan_file import KEY, graph_digest
from memonger.runtime import process_memory
from tests.support.networks import model_of
from tests.support.stock import normal, run_stock

MIB = 1 << 20
WIDTH, LAYERS = 820, 2


def _model(width: int = WIDTH, layers: int = LAYERS) -> onnx.ModelProto:
    """Products with a weight each; every second one reads it transposed. 820 columns are no whole panels of 16."""
    nodes, weights = [], {}
    for layer in range(layers):
        rows = (width, width - 8) if layer % 2 else (width - 8, width)
        weights[f"w{layer}"] = normal(layer, *rows) / np.float32(width)
        weights[f"b{layer}"] = normal(layer + 9, width)
        attributes = {"transB": 1} if layer % 2 else {}
        ends = [f"v{layer}", f"w{layer}", f"b{layer}"]
        if layer % 2:
            nodes.append(
                helper.make_node("Slice", [f"v{layer}", "begin", "end", "axis"], [f"s{layer}"], name=f"cut{layer}")
            )
            ends[0] = f"s{layer}"
        nodes.append(helper.make_node("Gemm", ends, [f"v{layer + 1}"], name=f"gemm{layer}", **attributes))
    integers = {"begin": np.array([0]), "end": np.array([width - 8]), "axis": np.array([1])}
    return model_of(nodes, {"v0": [4, width - 8]}, {f"v{layers}": [4, width]}, **weights, **integers)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mapped")
    memonger.search_plan(_model(), device="cpu", mode="inference").save(folder / "planned.onnx")
    return folder / "planned.onnx"


def _record(path: Path) -> dict[str, Any]:
    model = onnx.load(path, load_external_data=False)
    found: dict[str, Any] = json.loads(next(entry.value for entry in model.metadata_props if entry.key == KEY))
    return found


def _with_record(path: Path, folder: Path, changes: Mapping[str, Any], data: bytes | None = None) -> Path:
    """A copy of a planned file and its weights, with another record, and other weights."""
    model = onnx.load(path, load_external_data=False)
    for entry in model.metadata_props:
        if entry.key == KEY:
            entry.value = json.dumps({**json.loads(entry.value), **changes})
    (beside,) = path.parent.glob("*.data")
    (folder / beside.name).write_bytes(beside.read_bytes() if data is None else data)
    (folder / path.name).write_bytes(model.SerializeToString())
    return folder / path.name


def test_each_weight_is_read_once_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(_model(), tmp_path / "model.onnx", save_as_external_data=True, location="weights")
    plan, read = memonger.search_plan(tmp_path / "model.onnx", device="cpu", mode="inference"), Counter[str]()

    def counted(path: Any, offset: int, length: int, name: str) -> Iterator[bytes]:
        read[name] += "packed.data" not in str(path)
        return read_bytes(path, offset, length, name)

    for module in (tensors, save):
        monkeypatch.setattr(module, "read_bytes", counted)
    plan.save(tmp_path / "planned.onnx")
    assert {name: read[name] for name in ("w0", "w1")} == {"w0": 1, "w1": 1}
    assert memonger.Plan.load(tmp_path / "planned.onnx").weight_digests == plan_file.weight_digests(plan.model)


def test_small_weights_from_a_file_of_another_folder_are_written(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    ir.save(
        ir.serde.deserialize_model(_model()),
        tmp_path / "source" / "model.onnx",
        external_data="weights",
        size_threshold_bytes=0,
    )
    model = ir.load(tmp_path / "source" / "model.onnx")
    assert isinstance(model.graph.initializers["begin"].const_value, ir.ExternalTensor)
    save.save_model(model, tmp_path / "model.onnx", limit=MIB)
    (tmp_path / "source" / "weights").unlink()
    written = onnx.load(tmp_path / "model.onnx").graph.initializer
    found = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in written}
    assert found["end"] == [WIDTH - 8]


def test_packed_weights_lie_in_the_file_and_give_stocks_bits(planned: Path, tmp_path: Path) -> None:
    (data,) = planned.parent.glob("*.data")
    copies = _record(planned)["packed"]
    assert set(copies) == {"w0", "w1"}
    assert all(each["offset"] % 4096 == 0 and each["length"] == 812 * 832 * 4 for each in copies.values())
    assert data.stat().st_size == max(each["offset"] + each["length"] for each in copies.values())
    feed = {"v0": normal(5, 4, WIDTH - 8)}
    expected = run_stock(_model(), feed, "ORT_ENABLE_ALL")[f"v{LAYERS}"]
    assert np.array_equal(memonger.Session(planned).run(feed)[f"v{LAYERS}"], expected)
    again = memonger.Plan.load(planned)
    again.save(tmp_path / "again.onnx")
    assert set(_record(tmp_path / "again.onnx")["packed"]) == {"w0", "w1"}
    assert np.array_equal(memonger.Session(tmp_path / "again.onnx").run(feed)[f"v{LAYERS}"], expected)


def test_the_same_model_gives_the_same_files(planned: Path, tmp_path: Path) -> None:
    memonger.search_plan(_model(), device="cpu", mode="inference").save(tmp_path / "planned.onnx")
    (one,), (other,) = planned.parent.glob("*.data"), tmp_path.glob("*.data")
    assert one.name == other.name
    assert one.read_bytes() == other.read_bytes()


def test_a_portable_plan_holds_no_packed_weights(tmp_path: Path) -> None:
    memonger.search_plan(_model(), device="none", mode="inference").save(tmp_path / "planned.onnx")
    assert "packed" not in _record(tmp_path / "planned.onnx")
    model = onnx.load(tmp_path / "planned.onnx")
    onnx.checker.check_model(model)


def test_packed_weights_that_were_changed_are_refused(planned: Path, tmp_path: Path) -> None:
    copies = _record(planned)["packed"]
    (beside,) = planned.parent.glob("*.data")
    data = bytearray(beside.read_bytes())
    data[copies["w1"]["offset"] + 7] ^= 1
    changed = _with_record(planned, tmp_path, {}, bytes(data))
    with pytest.raises(memonger.PlanFileError, match=r"packed copy of its weight 'w1' was changed.*digests differ"):
        memonger.Session(changed)
    cut = _with_record(planned, tmp_path, {}, bytes(data[:-8192]))
    with pytest.raises(memonger.PlanFileError, match=r"packed copy of weight 'w1' isn't in .*cut short"):
        memonger.Session(cut)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"length": 4096}, "packed copy of 'w0' that none reads"),
        ({"length": 1 << 40}, "packed copy of 'w0' that none reads"),
        ({"offset": 1 << 50}, "cut short"),
        ({"offset": -4096}, "malformed"),
        ({"key": "Gemm+1|0;9;0"}, "cut short"),
    ],
)
def test_a_strangers_packed_weights_stay_in_the_file(
    planned: Path, tmp_path: Path, change: Mapping[str, Any], words: str
) -> None:
    """A kernel reads as many bytes as the weight's shape says, so a copy has that many, and all are in the file."""
    copies = _record(planned)["packed"]
    path = _with_record(planned, tmp_path, {"packed": {**copies, "w0": {**copies["w0"], **change}}})
    with pytest.raises(memonger.PlanFileError, match=words):
        memonger.Session(path, check_weights=False)


def test_a_packed_copy_of_what_no_product_reads_is_refused(planned: Path, tmp_path: Path) -> None:
    copies = _record(planned)["packed"]
    for name in ("b0", "begin", "absent"):
        path = _with_record(planned, tmp_path, {"packed": {name: copies["w0"]}})
        words = "weight 'begin' lies in the model" if name == "begin" else f"packed copy of '{name}' that none reads"
        with pytest.raises(memonger.PlanFileError, match=words):
            memonger.Plan.load(path)


def test_what_cannot_be_packed_is_left_to_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memonger.runtime.packing.packed_buffers", lambda value: {False: (4,)})
    memonger.search_plan(_model(), device="cpu", mode="inference").save(tmp_path / "planned.onnx")
    assert "packed" not in _record(tmp_path / "planned.onnx")
    feed = {"v0": normal(5, 4, WIDTH - 8)}
    assert np.array_equal(
        memonger.Session(tmp_path / "planned.onnx").run(feed)[f"v{LAYERS}"],
        run_stock(_model(), feed, "ORT_ENABLE_ALL")[f"v{LAYERS}"],
    )


def test_weights_that_products_read_two_ways_have_two_copies(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="a"),
        helper.make_node("Gemm", ["a", "w"], ["b"], name="b", transB=1),
        helper.make_node("MatMul", ["b", "u"], ["c"], name="c"),
        helper.make_node("MatMul", ["c", "v"], ["y"], name="y"),
    ]
    arrays = {"w": normal(0, 64, 40), "u": normal(1, 64, 64), "v": normal(2, 64, 1 << 14)}
    model = model_of(nodes, {"x": [8, 64]}, {"y": [8, 1 << 14]}, **arrays)
    plan = memonger.search_plan(model, device="cpu", mode="inference", chunks="off")
    weights = plan.model.graph.initializers
    assert [packed.packed_sizes(weights[name]) for name in "wu"] == [
        {False: 64 * 48 * 4, True: 40 * 64 * 4}, {False: 64 * 64 * 4}
    ]  # fmt: skip
    plan.save(tmp_path / "planned.onnx")
    record = _record(tmp_path / "planned.onnx")
    assert (set(record["packed"]), set(record["packed_again"])) == ({"w", "u", "v"}, {"w"})
    expected = run_stock(model, feed := {"x": normal(3, 8, 64)}, "ORT_ENABLE_ALL")["y"]
    assert np.array_equal(memonger.Session(tmp_path / "planned.onnx").run(feed)["y"], expected)
    wrong = {"w": {**record["packed_again"]["w"], "length": 4}}
    path = _with_record(tmp_path / "planned.onnx", tmp_path, {"packed_again": wrong})
    with pytest.raises(memonger.PlanFileError, match="packed copy of 'w' that none reads"):
        memonger.Plan.load(path)


def test_frozen_weights_of_a_training_step_stay_in_the_file(tmp_path: Path) -> None:
    """Products of the backward pass read them transposed; what is trained isn't constant, and is packed nowhere."""
    nodes = [
        helper.make_node("MatMul", ["x", "v"], ["a"], name="a"),
        helper.make_node("MatMul", ["a", "w"], ["b"], name="b"),
        helper.make_node("MatMul", ["b", "u"], ["y"], name="y"),
    ]
    wide = 1 << 10
    arrays = {"v": normal(0, 64, wide), "w": normal(1, wide, wide), "u": normal(2, wide, 8)}
    model = model_of(nodes, {"x": [4, 64]}, {"y": [4, 8]}, **arrays)
    trained = memonger.differentiate(model, loss="mean_squared_error", optimizer=memonger.SGD(), wrt=["v", "u"])
    plan = memonger.search_plan(trained, device="cpu", threads=1)
    feeds = {"x": normal(3, 4, 64), "target": normal(4, 4, 8)}
    in_memory = memonger.TrainingSession(plan)
    plan.save(tmp_path / "planned.onnx")
    record = _record(tmp_path / "planned.onnx")
    assert (set(record["packed"]), set(record["packed_again"])) == ({"w"}, {"w"})
    (data,) = tmp_path.glob("*.data")
    for entry, panel in (("packed", arrays["w"][0, :16]), ("packed_again", arrays["w"][:16, 0])):  # which is which
        assert np.array_equal(np.fromfile(data, np.float32, 16, offset=record[entry]["w"]["offset"]), panel)
    saved = memonger.Plan.load(tmp_path / "planned.onnx")
    assert saved.mapped_bytes == plan.mapped_bytes == 2 * 4 * wide * wide
    assert saved.process_bytes == plan.process_bytes
    session = memonger.TrainingSession(tmp_path / "planned.onnx")
    names = [value.name for value in session.inputs]
    given = {name: feeds.get(name, feeds["target"]) for name in names}
    assert [session.step(given) for _ in range(3)] == [in_memory.step(given) for _ in range(3)]


def _beside(folder: Path) -> Path:
    """The model with its weights in a file of their own."""
    folder.mkdir(exist_ok=True)
    onnx.save(_model(), folder / "model.onnx", save_as_external_data=True, location="model.bin", size_threshold=1024)
    return folder / "model.onnx"


@pytest.mark.parametrize("device", ["cpu", "none"])
def test_a_plan_may_refer_to_its_sources_weights(device: str, tmp_path: Path) -> None:
    source, feed = _beside(tmp_path), {"v0": normal(5, 4, WIDTH - 8)}
    plan = memonger.search_plan(source, device=device, mode="inference")
    plan.save(tmp_path / "planned.onnx", weights="source")
    beside = sum(each.stat().st_size for each in tmp_path.iterdir() if each.suffix not in (".onnx", ".bin"))
    assert (tmp_path / "planned.onnx").stat().st_size + beside < 100_000
    expected = run_stock(_model(), feed, "ORT_ENABLE_ALL" if device == "cpu" else "ORT_DISABLE_ALL")[f"v{LAYERS}"]
    assert np.array_equal(memonger.Session(tmp_path / "planned.onnx").run(feed)[f"v{LAYERS}"], expected)
    data = bytearray((tmp_path / "model.bin").read_bytes())
    data[40] ^= 1
    (tmp_path / "model.bin").write_bytes(data)
    with pytest.raises(memonger.PlanFileError, match=r"weight 'w0' was changed since the plan was saved"):
        memonger.Session(tmp_path / "planned.onnx")
    (tmp_path / "model.bin").rename(tmp_path / "moved.bin")
    with pytest.raises(memonger.PlanFileError, match=r"external data of tensor 'w\d' is missing: no file .*model.bin"):
        memonger.Session(tmp_path / "planned.onnx")


def test_weights_the_source_has_not_are_the_plans_own(tmp_path: Path) -> None:
    """A convolution's weight is laid out anew for the processor."""
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node("Flatten", ["c"], ["f"], name="flat"),
        helper.make_node("Gemm", ["f", "w"], ["y"], name="gemm"),
    ]
    weights = {"k": normal(0, 512, 256, 3, 3), "w": normal(1, 512 * 16, 64)}
    model = model_of(nodes, {"x": [1, 256, 4, 4]}, {"y": [1, 64]}, **weights)
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="model.bin", size_threshold=1024)
    plan = memonger.search_plan(tmp_path / "model.onnx", device="cpu", mode="inference")
    plan.save(tmp_path / "planned.onnx", weights="source")
    whole = onnx.load(tmp_path / "planned.onnx", load_external_data=False)
    where = {each.name: each.external_data[0].value for each in whole.graph.initializer if each.external_data}
    assert where.pop("w") == "model.bin"
    assert [name.endswith(".data") for name in where.values()] == [True]
    feed = {"x": normal(2, 1, 256, 4, 4)}
    expected = run_stock(onnx.load(tmp_path / "model.onnx"), feed, "ORT_ENABLE_ALL")["y"]
    assert np.array_equal(memonger.Session(tmp_path / "planned.onnx").run(feed)["y"], expected)


def test_what_cannot_be_referred_to_is_told(tmp_path: Path) -> None:
    plan = memonger.search_plan(_model(), device="cpu", mode="inference")
    with pytest.raises(memonger.PlanFileError, match=r"has no weights in files of .*save_as_external_data"):
        plan.save(tmp_path / "planned.onnx", weights="source")
    elsewhere = memonger.search_plan(_beside(tmp_path / "there"), device="cpu", mode="inference")
    with pytest.raises(memonger.PlanFileError, match="has no weights in files of"):
        elsewhere.save(tmp_path / "planned.onnx", weights="source")
    with pytest.raises(memonger.PlanFileError, match="'own' or 'source'"):
        elsewhere.save(tmp_path / "planned.onnx", weights="none")
    elsewhere.save(tmp_path / "planned.onnx")
    with pytest.raises(memonger.PlanFileError, match="read from a file"):
        memonger.Plan.load(tmp_path / "planned.onnx").save(tmp_path / "again.onnx", weights="source")
    assert not (tmp_path / "again.onnx").exists()


GROWTH = """
import json, sys
import numpy as np
from pathlib import Path
def own():
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))
before = own()
import memonger
session = memonger.Session(sys.argv[1])
for _ in range(2):
    session.run({"v0": np.ones((4, 2000 - 8), np.float32)})
print(own() - before)
"""


@pytest.mark.skipif(not process_memory.is_measurable(), reason="this system doesn't account for memory")
def test_a_process_takes_what_was_said(tmp_path: Path) -> None:
    """30 MiB of weights: not once are they in memory of the process's own."""
    memonger.search_plan(_model(2000), device="cpu", mode="inference").save(tmp_path / "planned.onnx")
    plan = memonger.Plan.load(tmp_path / "planned.onnx")
    done = subprocess.run([sys.executable, "-c", GROWTH, tmp_path / "planned.onnx"], capture_output=True, check=True)
    assert plan.process_bytes is not None
    assert plan.mapped_bytes is not None
    assert plan.mapped_bytes > 30 * MIB
    assert abs(int(done.stdout) - plan.process_bytes) < 5 * MIB


SERVER = """
import json, sys
import memonger
from memonger.ir import checks, onnx_process

found = []
for path in sys.argv[1:]:
    try:
        memonger.Session(path)
        found.append(None)
    except memonger.MemongerError as error:
        found.append(str(error))
    child = onnx_process._CHILD
    found.append([checks._signature.cache_info().currsize > 0, child is not None and child[1].poll() is None])
print(json.dumps(found))
"""


def test_a_process_that_runs_a_plan_keeps_neither_onnxs_definitions_nor_another_process(
    planned: Path, tmp_path: Path
) -> None:
    """The file has a Slice, which isn't looked at where it could do harm; one with an attribute too many is refused."""
    model = onnx.load(planned, load_external_data=False)
    cut = next(node for node in model.graph.node if node.op_type == "Slice")
    cut.attribute.append(helper.make_attribute("depth", 3))
    other = _with_record(planned, tmp_path, {"graph_digest": graph_digest(ir.from_proto(model))})
    changed = onnx.load(other, load_external_data=False)
    changed.graph.CopyFrom(model.graph)
    other.write_bytes(changed.SerializeToString())
    done = subprocess.run([sys.executable, "-c", SERVER, planned, other], capture_output=True, check=True)
    right, kept, wrong, _ = json.loads(done.stdout)
    assert right is None
    assert kept == [False, False]
    assert "Slice" in wrong
    assert "depth" in wrong
