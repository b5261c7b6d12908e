"""Plan files are untrusted input, and disks fill up: what is refused, and with which words."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest

import memonger
from tests.support.bad_input import KEY, PLAN, Place, contents, invoke, plan_of, with_plan
from tests.support.stock import normal, parse

TEXT = "g (float[N, 8] x) => (float[N, 8] y) { a = Relu(x)  b = Sigmoid(x)  c = MatMul(a, w)  y = Add(b, c) }"


def _model(width: int = 8) -> onnx.ModelProto:
    model = parse(TEXT.replace("8", str(width)))
    model.graph.initializer.append(onnx.numpy_helper.from_array(normal(0, width, width), "w"))
    return model


@pytest.fixture
def planned(place: Place) -> Path:
    """A portable plan whose values are a, b, c and y, 512 bytes each."""
    path = place.folder / "planned.onnx"
    memonger.search_plan(_model(), batch=16, device="none", mode="inference").save(path)
    assert set(plan_of(path)["offsets"]) == set("abcy")
    return path


def _refused(place: Place, path: Path, *words: str) -> None:
    for command in (("verify", path), ("inspect", path), ("run", path, "--quiet"), ("run", path, "--compare")):
        place.fails(*command, words=words)


def _moved(planned: Path, **offsets: Any) -> Path:
    return with_plan(planned, {"offsets": {**plan_of(planned)["offsets"], **offsets}})


def test_the_plan_itself_holds(planned: Path) -> None:
    assert invoke("verify", planned) == (0, "")


def test_offsets_that_overlap(place: Place, planned: Path) -> None:
    offsets = plan_of(planned)["offsets"]
    _refused(place, _moved(planned, b=offsets["c"]), "'b'", "'c'", "overwritten")
    _refused(place, _moved(planned, b=abs(offsets["c"] - 64)), "'b'", "'c'", "overwritten")


def test_an_output_over_what_its_node_still_reads(place: Place, planned: Path) -> None:
    offsets = plan_of(planned)["offsets"]
    _refused(place, _moved(planned, c=offsets["a"]), "'a'", "'c'", "MatMul")


def test_offsets_outside_the_arena(place: Place, planned: Path) -> None:
    arena = plan_of(planned)["arena_bytes"]
    _refused(place, _moved(planned, b=arena), "'b'", "leaves the arena")
    _refused(place, _moved(planned, b=arena - 64), "'b'", "leaves the arena")
    _refused(place, _moved(planned, b=-64), "'b'", "-64", "leaves the arena")
    _refused(place, with_plan(planned, {"arena_bytes": 64}), "leaves the arena of 64 bytes")
    _refused(place, _moved(planned, b=2**61), "'b'", "leaves the arena")


def test_offsets_that_are_misaligned(place: Place, planned: Path) -> None:
    wide = with_plan(planned, {"arena_bytes": 10**6}).rename(planned.with_name("wide.onnx"))
    _refused(place, _moved(wide, b=100_001), "'b'", "100001", "not aligned to 64")
    _refused(place, with_plan(planned, {"alignment": 1}), "malformed", "'alignment' is 1")
    _refused(place, with_plan(planned, {"alignment": 96}), "malformed", "'alignment' is 96")


def test_values_missing_and_unknown(place: Place, planned: Path) -> None:
    offsets = plan_of(planned)["offsets"]
    _refused(place, with_plan(planned, {"offsets": {k: v for k, v in offsets.items() if k != "b"}}), "'b'", "no offset")
    _refused(place, _moved(planned, ghost=0), "'ghost'", "no such value")
    _refused(place, _moved(planned, x=0), "'x'", "isn't kept in the arena")
    _refused(place, with_plan(planned, {"offsets": {}}), "no offset")


@pytest.mark.parametrize(
    "text", ["", "{", "no JSON", '{"format": 1', "[" * 100_000, "NaN" * 2, '{"format": ' + "9" * 5000 + "}"]
)
def test_malformed_json(place: Place, planned: Path, text: str) -> None:
    place.fails("verify", with_plan(planned, text), words=("changed.onnx", "not valid JSON"))


@pytest.mark.parametrize("text", ["null", "3", "[]", '"plan"', "{}", '{"format": "1"}', '{"format": true}'])
def test_json_that_is_no_plan(place: Place, planned: Path, text: str) -> None:
    place.fails("verify", with_plan(planned, text), words=("malformed", "no format number"))


WRONG: list[tuple[str, Any]] = [
    ("mode", 3), ("device", None), ("alignment", "64"), ("alignment", 64.0), ("alignment", None), ("arena_bytes", "x"),
    ("arena_bytes", -1), ("arena_bytes", 1e6), ("arena_bytes", 10**30), ("arena_bytes", True), ("offsets", []),
    ("offsets", None), ("offsets", {"a": "0"}), ("offsets", {"a": 0.5}), ("offsets", {"a": None}),
    ("offsets", {"a": 10**40}), ("offsets", {"a": -(10**40)}), ("threads", -1), ("threads", None), ("batch", 0),
    ("batch", "2"), ("workspace", 5), ("workspace", {"a": -1}), ("stamp", 5), ("stamp", {}), ("graph_digest", 7),
    ("graph_digest", None), ("mode", "Training"), ("mode", ""), ("threads", 100_000), ("threads", 2**61),
    ("batch", 10**12), ("weight_digests", 3), ("weight_digests", {"w": 3}), ("workspace", {"a": 2**62}),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), WRONG, ids=str)
def test_wrong_types_and_sizes(place: Place, planned: Path, key: str, value: Any) -> None:
    culprit = "runtime" if value == {} else key
    place.fails("verify", with_plan(planned, {key: value}), words=("malformed", f"'{culprit}'"))


def test_an_arena_no_machine_has(place: Place, planned: Path) -> None:
    path = with_plan(planned, {"arena_bytes": 2**61})
    place.fails("run", path, words=(str(2**61), "can't be allocated"))


def test_scratch_no_machine_has(place: Place, planned: Path) -> None:
    path = with_plan(planned, {"workspace": {"a": 2**61}})
    place.fails("run", path, words=("workspace", str(2**61), "can't be allocated", "this machine has"))


@pytest.mark.parametrize("device", ["cuda:99999999999999999999", "cuda:٣", "CPU", "cpu:0", "", "\x1b[2J"])
def test_devices_of_nonsense(place: Place, planned: Path, device: str) -> None:
    place.fails("verify", with_plan(planned, {"device": device}), words=("malformed", "is not a device"))


def _flipped(planned: Path, byte: int) -> Path:
    model = onnx.load(planned)
    data = bytearray(model.graph.initializer[0].raw_data)
    data[byte] ^= 1
    model.graph.initializer[0].raw_data = bytes(data)
    changed = planned.with_name("flipped.onnx")
    onnx.save(model, changed)
    return changed


@pytest.mark.parametrize("byte", [3, 103, 255])
def test_a_weight_of_which_a_bit_was_flipped(place: Place, planned: Path, byte: int) -> None:
    flipped = _flipped(planned, byte)
    _refused(place, flipped, "'w'", "digests differ")
    with pytest.raises(memonger.PlanFileError, match="digests differ"):
        memonger.Session(flipped)
    with pytest.raises(memonger.PlanFileError, match="digests differ"):
        memonger.Plan.load(flipped)
    unchecked = memonger.Plan.load(flipped, check_weights=False)
    with pytest.raises(memonger.PlanFileError, match="digests differ"):
        unchecked.verify()
    x = normal(1, 16, 8)
    outputs = [memonger.Session(one, check_weights=False).run({"x": x})["y"] for one in (planned, flipped)]
    assert (outputs[0] != outputs[1]).any()


def test_weights_without_and_with_other_digests(place: Place, planned: Path) -> None:
    older = with_plan(planned, {"weight_digests": None})
    assert "weight_digests" not in plan_of(older)
    assert invoke("verify", older) == (0, "")
    place.fails("verify", with_plan(planned, {"weight_digests": {}}), words=("'w'", "digests differ"))
    more = {**plan_of(planned)["weight_digests"], "ghost": "0"}
    place.fails("verify", with_plan(planned, {"weight_digests": more}), words=("digests differ",))


def test_a_plan_saved_again_is_the_same_file(planned: Path) -> None:
    again = planned.with_name("again.onnx")
    memonger.Plan.load(planned).save(again)
    assert again.read_bytes() == planned.read_bytes()


def test_digests_of_weights_in_files_in_subgraphs_and_of_odd_types(tmp_path: Path) -> None:
    """Each is read back as it was saved."""
    tensors = [
        onnx.helper.make_tensor("four", onnx.TensorProto.INT4, [3], [1, -2, 3]),
        onnx.helper.make_tensor("half", onnx.TensorProto.BFLOAT16, [2], [0.5, 2.0]),
        onnx.helper.make_tensor("text", onnx.TensorProto.STRING, [2], ["a", "b"]),
        onnx.helper.make_tensor("none", onnx.TensorProto.FLOAT, [0], []),
        onnx.helper.make_tensor("one", onnx.TensorProto.FLOAT, [], [1.0]),
    ]
    model = parse("g (float[4, 16] x) => (float[4, 16] y) { a = MatMul(x, w)  y = Relu(a) }", opset=21)
    model.graph.initializer.extend([onnx.numpy_helper.from_array(normal(0, 16, 16), "w"), *tensors])
    model.ir_version = 10
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    plan = memonger.search_plan(tmp_path / "m.onnx", mode="inference", device="none")
    plan.save(tmp_path / "planned.onnx")
    loaded = memonger.Plan.load(tmp_path / "planned.onnx")
    assert loaded.weight_digests is not None
    assert set(loaded.weight_digests) >= {"w"}
    data = bytearray((tmp_path / "weights.bin").read_bytes())
    data[-1 if len(data) < 1024 else 5] ^= 1
    (tmp_path / "weights.bin").write_bytes(bytes(data))
    with pytest.raises(memonger.PlanFileError, match="digests differ"):
        memonger.Plan.load(tmp_path / "planned.onnx")


def test_out_of_memory_is_told(planned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError

    plan = memonger.Plan.load(planned)
    with monkeypatch.context() as patch:
        patch.setattr("memonger.ir.save.read_in", fails)
        with pytest.raises(memonger.PlanFileError, match="memory ran out"):
            plan.save(planned.with_name("again.onnx"))
    assert not planned.with_name("again.onnx").exists()
    monkeypatch.setattr("memonger.planner.search_plan._lower", fails)
    with pytest.raises(memonger.PlanError, match="can't be planned: memory ran out"):
        memonger.search_plan(_model(), batch=16, device="none", mode="inference")


def test_newer_and_unknown_formats(place: Place, planned: Path) -> None:
    _refused(place, with_plan(planned, {"format": 99}), "format 99", "newer", "Upgrade memonger")
    _refused(place, with_plan(planned, {"format": 0}), "format 0", "unknown")


def test_a_device_there_is_not(place: Place, planned: Path) -> None:
    place.fails("run", with_plan(planned, {"device": "abacus"}), words=("'abacus' is not a device",))


def test_no_plan_at_all(place: Place) -> None:
    place.fails("verify", place.write("bare.onnx", _model()), words=("no plan in it", "memonger plan"))


def _with_plan_of(planned: Path, model: onnx.ModelProto) -> bytes:
    source = onnx.load(planned)
    del model.metadata_props[:]
    model.metadata_props.extend(source.metadata_props)
    return model.SerializeToString()


def test_the_plan_of_another_model(place: Place, planned: Path) -> None:
    other = onnx.load(planned)
    other.graph.node[1].op_type = "Tanh"
    path = place.write("other.onnx", _with_plan_of(planned, other))
    _refused(place, path, "another model", "digests differ", "Plan it again")


@pytest.mark.parametrize("change", ["attribute", "shape", "order", "input", "weight", "name", "opset"])
def test_a_graph_that_was_changed(place: Place, planned: Path, change: str) -> None:
    model = onnx.load(planned)
    nodes = model.graph.node
    if change == "attribute":
        nodes[0].attribute.add(name="alpha", f=1.0, type=onnx.AttributeProto.FLOAT)
    elif change == "shape":
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 17
    elif change == "order":
        nodes.insert(0, nodes.pop(1))
    elif change == "input":
        nodes[0].input[0] = "b"
    elif change == "weight":
        model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(normal(0, 8, 9), "w"))
    elif change == "name":
        nodes[0].name += "x"
    else:
        model.opset_import[0].version = 11
    path = place.write("other.onnx", model)
    place.fails("verify", path, words=("digests differ",))
    place.fails("run", path, words=("digests differ",))


@pytest.mark.parametrize(
    ("key", "value"), [("machine", "0" * 16), ("runtime", "onnxruntime 0.1"), ("provider", "AbacusExecutionProvider")]
)
def test_a_plan_bound_to_another_machine_runtime_or_provider(place: Place, key: str, value: str) -> None:
    path = place.folder / "planned.onnx"
    memonger.search_plan(_model(), batch=2, device="cpu", mode="inference").save(path)
    changed = with_plan(path, {"stamp": {**plan_of(path)["stamp"], key: value}})
    words = (f"bound to another {key}", value, "Plan the model again here", "--device none")
    place.fails("run", changed, words=words)
    assert invoke("verify", changed) == (0, "")


def test_sizes_that_lie_are_caught_by_the_runtime(place: Place, planned: Path) -> None:
    """Whoever writes a plan can compute a digest: declared sizes that are too small must not let a kernel overrun."""
    model = onnx.load(planned)
    for info in [*model.graph.value_info, *model.graph.output]:
        info.type.tensor_type.shape.dim[0].dim_value = 1
    offsets = {name: 64 * number for number, name in enumerate("abcy")}
    entry = next(entry for entry in model.metadata_props if entry.key == KEY)
    content = {**json.loads(entry.value), "offsets": offsets, "arena_bytes": 256}
    entry.value = json.dumps(content)
    lying = place.write("lying.onnx", model)
    content["graph_digest"] = _digest(lying)
    entry.value = json.dumps(content)
    lying.write_bytes(model.SerializeToString())
    status, message = invoke("run", lying)
    assert status == 1, message
    assert "shape" in message


def _digest(path: Path) -> str:
    from memonger.model.load import load_as_is
    from memonger.plan_file import graph_digest

    return graph_digest(load_as_is(path).ir)


def _signed(planned: Path, model: onnx.ModelProto) -> Path:
    """A changed model with its plan, signed again."""
    entry = next(entry for entry in model.metadata_props if entry.key == KEY)
    content = json.loads(entry.value)
    path = planned.with_name("signed.onnx")
    path.write_bytes(model.SerializeToString())
    content["graph_digest"] = _digest(path)
    entry.value = json.dumps(content)
    path.write_bytes(model.SerializeToString())
    return path


def test_dimensions_below_zero(place: Place, planned: Path) -> None:
    model = onnx.load(planned)
    model.graph.value_info[0].type.tensor_type.shape.dim[0].dim_value = -1
    _refused(place, _signed(planned, model), f"'{model.graph.value_info[0].name}'", "below 0")


@pytest.mark.parametrize("perm", [[0, 2**62], [0], "text"])
def test_attributes_no_inference_has_seen(place: Place, perm: Any) -> None:
    path = place.folder / "planned.onnx"
    turned = parse("g (float[1, 8] x) => (float[8, 1] y) { a = Relu(x)  b = Transpose<perm = [1, 0]>(a)  y = Neg(b) }")
    memonger.search_plan(turned, device="none", mode="inference").save(path)
    model = onnx.load(path)
    (node,) = (node for node in model.graph.node if node.op_type == "Transpose")
    node.attribute[0].CopyFrom(onnx.helper.make_attribute("perm", perm))
    signed = _signed(path, model)
    with pytest.raises(memonger.MemongerError):
        memonger.Session(signed).run({"x": normal(0, 1, 8)})
    place.fails("run", signed, words=())


def test_an_attribute_without_a_type(place: Place, planned: Path) -> None:
    model = onnx.load(planned)
    model.graph.node[0].attribute.add(name="axis", i=1)
    path = place.write("untyped.onnx", model)
    for command in ("verify", "run", "inspect"):
        place.fails(command, path, words=("'axis'",))


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
from memonger.cli.commands import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("device", ["none", "cpu"])
@pytest.mark.parametrize("existing", [False, True])
def test_a_size_limit_leaves_nothing_behind(place: Place, device: str, existing: bool) -> None:
    path, out = place.write("model.onnx", _model(512)), place.folder / "out.onnx"
    if existing:
        place.write("out.onnx", b"what was there")
    before = contents(place.folder)
    command = [sys.executable, "-c", LIMITED, *PLAN, path, "--batch", "2", "--device", device, "-o", out]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env={**os.environ, "TMPDIR": str(place.temporary)}
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith("memonger: ")
    assert "Traceback" not in done.stderr
    assert contents(place.folder) == before
    assert place.leftovers() == []


@pytest.mark.parametrize("arguments", [("inspect",), ("verify", "--json")])
def test_results_that_nobody_can_take(place: Place, planned: Path, arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "memonger", *arguments, str(planned)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "memonger: the output: No space left on device.\n"
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)
