"""Names come from strangers: none steers a terminal, is taken as markup, or passes for a line of the program's own."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import memonger
from memonger.serving import export
from memonger.units import shown
from tests.support.command_line import invoke

STRANGE = "\x1b[31m\nmemonger: fine\u202e\u2028\x07[bold]:smile:\x9b"
ESCAPED = "\\x1b[31m\\nmemonger: fine\\u202e\\u2028\\x07[bold]:smile:\\x9b"


def _model() -> onnx.ModelProto:
    """Every name in it is a strange one."""
    names = {one: f"{STRANGE}{one}" for one in ("x", "a", "y", "relu", "neg", "graph")}
    nodes = [
        helper.make_node("Relu", [names["x"]], [names["a"]], name=names["relu"]),
        helper.make_node("Neg", [names["a"]], [names["y"]], name=names["neg"]),
    ]
    given = helper.make_tensor_value_info(names["x"], TensorProto.FLOAT, ["N", 8])
    result = helper.make_tensor_value_info(names["y"], TensorProto.FLOAT, ["N", 8])
    graph = helper.make_graph(nodes, names["graph"], [given], [result])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def _printed(*arguments: object) -> str:
    result = invoke(*arguments)
    assert all(sign.isprintable() or sign == "\n" for sign in result.output)
    return result.output


def test_what_is_not_printable_is_escaped_once() -> None:
    assert shown("naïve 名前 [x]") == "naïve 名前 [x]"
    assert shown(STRANGE) == shown(shown(STRANGE)) == ESCAPED
    assert shown("\udcff") == "\\udcff"


def test_errors_escape_the_names_in_them() -> None:
    assert str(memonger.PlanError(f"no '{STRANGE}'.")) == f"no '{ESCAPED}'."
    assert "\n" not in str(memonger.BudgetError(1, 2, 3, STRANGE))


def test_tables_and_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.chdir(tmp_path)
    onnx.save(_model(), tmp_path / "m[red].onnx")
    planned = tmp_path / "p[red].onnx"
    assert ESCAPED in _printed("inspect", "m[red].onnx")
    assert "p[red].onnx" in _printed("plan", "m[red].onnx", "--mode", "inference", "--batch", 2, "-o", "p[red].onnx")
    assert ESCAPED in _printed("inspect", planned)
    assert "correct" in _printed("verify", planned)
    assert ESCAPED in _printed("run", planned, "--quiet")
    assert ESCAPED in _printed("plan", "m[red].onnx", "--dim", f"{STRANGE}x[1]=9")
    assert "\\x1b" in _printed("plan", "\x1b[31m.onnx")
    assert "\\x1b" in _printed("plan", "m[red].onnx", "--order", "\x1b[31m")
    assert "\\x1b" in _printed("\x1b[31m")
    assert "\\x1b" in _printed("pack", "\x1b[31m.csv")


def test_what_is_logged_is_a_note(tmp_path: Path) -> None:
    path = tmp_path / "\x1b\n.onnx"
    onnx.save(_model(), path)
    lines = _printed("differentiate", path, "--batch", 2, "--train-mode", "-o", tmp_path / "new.onnx").splitlines()
    assert lines[0].startswith("memonger: note: ")
    assert all(line.startswith("memonger: ") for line in lines)


def test_scratch_of_nodes_with_strange_names() -> None:
    names = ["#conv", 'a,b"c', "line\nbreak", "tab\tx", "back\\slash", STRANGE, "plain_1,2,3,4"]
    nodes, last = [], "x"
    for number, name in enumerate(names):
        nodes.append(helper.make_node("Conv", [last, "w"], [f"y{number}"], name=name, pads=[1, 1, 1, 1]))
        last = f"y{number}"
    weight = onnx.numpy_helper.from_array(np.ones((8, 8, 3, 3), np.float32), "w")
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8, 32, 32])
    result = helper.make_tensor_value_info(last, TensorProto.FLOAT, [1, 8, 32, 32])
    graph = helper.make_graph(nodes, "g", [given], [result], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    plan = memonger.search_plan(model, mode="inference", device="cpu", level="disable", threads=1)
    assert plan.workspace is not None
    scratch = [plan.workspace.get(name) for name in names]
    assert len(set(scratch)) == 1, scratch
    assert scratch[0]
    memonger.Session(plan).run({"x": np.ones((1, 8, 32, 32), np.float32)})


MARKED = '](http://example.com)`<b>|"\n# '


def test_names_in_an_exported_readme_are_neither_links_nor_lines(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 18]> g (float[2] x) => (float[2] y) { y = Relu(x) }'
    )
    model.graph.name = model.graph.input[0].name = model.graph.node[0].input[0] = f"x{MARKED}"
    plan = memonger.search_plan(model, mode="inference", device="none")
    for target in ("onnxruntime", "openvino"):
        export(plan, target, tmp_path / target)
        lines = (tmp_path / target / "README.md").read_text().splitlines()
        assert lines[0] == '# x\\](http://example.com)\\`\\<b\\>\\|"\\\\n# '
        (call,) = (line for line in lines if "outputs = " in line)
        assert 'x](http://example.com)`<b>|\\"\\n# ": ...' in call
