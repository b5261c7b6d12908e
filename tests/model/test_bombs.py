"""Small files that ask for much: each is planned or refused in seconds, and never ends the process."""

import json
import os
import threading
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

import memonger
from memonger import plan_file
from memonger.errors import LoadError, MemongerError, PlanFileError
from memonger.ir import checks
from memonger.lowering import calibrate
from memonger.model import load
from memonger.schedule import orders
from tests.support import bombs
from tests.support.stock import parse


def test_functions_are_counted_before_they_are_written_out() -> None:
    with pytest.raises(LoadError, match=f"written out they are {2**40} nodes"):
        memonger.load(bombs.calls().SerializeToString())
    read = memonger.load(bombs.calls(11).SerializeToString())
    nodes = list(read.ir.graph)
    assert len(nodes) == 2**11
    assert {node.op_type for node in nodes} == {"Relu"}
    names = [value.name for node in nodes for value in node.outputs]
    assert len(set(names)) == len(names)


def test_functions_that_call_each_other_are_refused() -> None:
    made = bombs.calls(2)
    made.functions[1].node[0].op_type = "f2"
    with pytest.raises(LoadError, match="can't be inlined: Cyclic"):
        memonger.load(made.SerializeToString())


def test_vectors_that_double_are_not_followed() -> None:
    """As values of 8 TiB, inference would compute them; their sizes it knows all the same."""
    model = bombs.doubling()
    read = memonger.load(model.SerializeToString())
    assert list(read.ir.graph.outputs[0].shape or ()) == [2**40]
    with pytest.raises(MemongerError, match=r"takes .* of memory, so no run can measure the model"):
        memonger.search_plan(model, mode="inference", device="cpu")


def test_what_is_no_file_or_never_ends_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LoadError, match="/dev/zero is a device"):
        memonger.load("/dev/zero")
    data = parse("g (float[4] x) => (float[4] y) { y = Relu(x) }", opset=21).SerializeToString()
    pipe = tmp_path / "pipe.onnx"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(data,))
    writer.start()
    assert [node.op_type for node in memonger.load(pipe).ir.graph] == ["Relu"]
    writer.join()
    monkeypatch.setattr(load, "MOST_BYTES", 1000)
    (tmp_path / "large.onnx").write_bytes(bytes(1000))
    with pytest.raises(LoadError, match=r"large\.onnx is not an ONNX model: it has 1000 bytes or more"):
        memonger.load(tmp_path / "large.onnx")
    writer = threading.Thread(target=pipe.write_bytes, args=(b"\x08\x0a" * 600,))
    writer.start()
    with pytest.raises(LoadError, match="or more, and a model has less"):
        memonger.load(pipe)
    writer.join()


def test_a_loop_without_an_end_ends_in_the_calibrating_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "LONGEST_LOOP", 0.2)
    with pytest.raises(MemongerError, match=r"hadn't ended after 0 s, and so may never: .*Loop"):
        memonger.search_plan(bombs.loop(), mode="inference", device="cpu", threads=1)


def test_a_node_with_thousands_of_parts_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bombs.parts(300)
    asked = list[int]()
    growth = orders._ReadyNodes.growth
    monkeypatch.setattr(orders._ReadyNodes, "growth", lambda self, node: asked.append(node) or growth(self, node))  # type: ignore[func-returns-value]
    plan = memonger.search_plan(model, mode="inference", device="none")
    assert len(asked) < 20
    x = np.arange(300, dtype=np.float32)
    assert (memonger.Session(plan).run({"x": x})["y"] == x).all()


SPLIT = "g (float[4,8] x) => (float[2,8] b, float[4,8] s) { a, b = Split <axis = 0, num_outputs = 2> (x)\n s = Neg(x) }"


def test_a_split_with_fewer_parts_than_outputs_is_refused(tmp_path: Path) -> None:
    """Of which onnxruntime's kernel ends the process: in a model, and in a planned file that is signed again."""
    model = parse(SPLIT, opset=18)
    path = tmp_path / "planned.onnx"
    memonger.search_plan(model, mode="inference", device="none").save(path)
    planned = onnx.load(path)
    for proto in (model, planned):
        (node,) = (node for node in proto.graph.node if node.op_type == "Split")
        (parts,) = (one for one in node.attribute if one.name == "num_outputs")
        parts.i = 1
    with pytest.raises(LoadError, match="has 2 outputs, and its num_outputs is 1"):
        memonger.load(model.SerializeToString())
    (entry,) = (entry for entry in planned.metadata_props if entry.key == plan_file.KEY)
    content = json.loads(entry.value)
    content["graph_digest"] = plan_file.graph_digest(ir.from_proto(planned))
    entry.value = json.dumps(content)
    onnx.save(planned, path)
    for _ in range(2):
        with pytest.raises(PlanFileError, match="has 2 outputs, and its num_outputs is 1"):
            memonger.Plan.load(path)
        checks._signature.cache_clear()  # as in a process that only runs plans, whose operators another looks at


@pytest.mark.parametrize("op", ["Relu", "CumSum"], ids=["well known", "in the other process"])
def test_onnx_checks_what_comes_from_strangers(op: str) -> None:
    inputs = "x" if op == "Relu" else "x, axis"
    model = parse(f"g (float[4] x) => (float[4] y) <int64 axis = {{0}}> {{ y = {op} ({inputs}) }}", opset=18)
    assert memonger.load(model.SerializeToString()).ir.graph.num_nodes() == 1
    model.graph.node[0].attribute.append(helper.make_attribute("surprise", 1))
    with pytest.raises(LoadError, match="Unrecognized attribute: surprise"):
        memonger.load(model.SerializeToString())


def test_operators_of_onnxruntime_and_subgraphs_pass_its_checker() -> None:
    text = (
        "g (float[4,4] x, bool c) => (float[4,4] y) { a = com.microsoft.FusedMatMul <alpha = 0.5> (x, x)"
        "\n y = If (c) <then_branch = t () => (float[4,4] u) { u = Neg(a) }, else_branch = e () => (float[4,4] v)"
        " { v = com.microsoft.Gelu(a) }> }"
    )
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 18, "com.microsoft": 1]> {text}')
    plan = memonger.search_plan(model.SerializeToString(), mode="inference", device="cpu", threads=1)
    assert memonger.Session(plan).run({"x": np.eye(4, dtype=np.float32), "c": np.array(True)})["y"][0, 0] == -0.5
