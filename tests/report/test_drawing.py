"""`memonger.draw` and ``memonger draw``: colours, hooks, escaping, what is left out, and graphviz' part."""

import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import networkx
import onnx
import pytest

import memonger
from memonger.report.drawing import DrawnNode, _Colors, rendered
from tests.support import planning_models
from tests.support.command_line import invoke
from tests.support.training_models import classifier

STRING = r'"((?:[^"\\]|\\.)*)"'
BOX = re.compile(rf"    ((?:before|after)\d+) \[((?:{STRING}={STRING}(?:, )?)+)\];")
NASTY = 'a "b" \\ <i>c</i> {d|e}; -> \\N'


@pytest.fixture(scope="module")
def plan() -> memonger.Plan:
    plan = planning_models.plan(planning_models.chain(5), strategy="sqrt")
    assert plan.recomputed
    return plan


def _boxes(text: str, side: str) -> dict[int, dict[str, str]]:
    """Attributes of the boxes of one side, by step."""
    found = (BOX.fullmatch(line) for line in text.splitlines() if line.startswith(f"    {side}"))
    return {
        int(box[1].removeprefix(side)): dict(re.findall(f"{STRING}={STRING}", box[2]))
        for box in found
        if box is not None
    }


def _by_color(plan: memonger.Plan, text: str) -> dict[str, set[int]]:
    """What has one colour: the numbers of planned values."""
    found: dict[str, set[int]] = {}
    for step, box in _boxes(text, "after").items():
        planned = [value for value in plan.graph.writes[step] if value in plan.offsets]
        if len(planned) == 1:
            found.setdefault(box["fillcolor"], set()).update(planned)
    return found


def test_equal_colors_are_equal_addresses(plan: memonger.Plan) -> None:
    colors = _by_color(plan, memonger.draw(plan))
    offsets = [{plan.offsets[value] for value in values} for values in colors.values()]
    assert all(len(one) == 1 for one in offsets)
    assert len({min(one) for one in offsets}) == len(colors) > 1
    assert any(len(values) > 1 for values in colors.values())


def test_equal_colors_are_equal_storages_if_asked(plan: memonger.Plan) -> None:
    colors = _by_color(plan, memonger.draw(plan, color_by="storage"))
    storages = [{plan.storage.of_value[value] for value in values} for values in colors.values()]
    assert all(len(one) == 1 for one in storages)
    assert len({min(one) for one in storages}) == len(colors)


def test_before_every_value_has_a_color_of_its_own_and_nothing_runs_again(plan: memonger.Plan) -> None:
    text = memonger.draw(plan)
    before, after = _boxes(text, "before"), _boxes(text, "after")
    assert len(after) == len(plan.graph.nodes)
    assert len(before) == len(after) - len(plan.recomputed)
    fills = [box["fillcolor"] for box in before.values() if box["fillcolor"] != "white"]
    assert len(set(fills)) == len(fills)
    assert set(fills).isdisjoint(box["fillcolor"] for box in after.values())
    assert [step for step, box in after.items() if "dashed" in box["style"]] == list(plan.recomputed)


def test_colors_never_run_out() -> None:
    colors = _Colors()
    made = [colors.of(place) for place in range(30_000)]
    assert len(set(made)) == len(made)
    assert made == [colors.of(place) for place in range(30_000)]


def test_boxes_say_where_and_how_much(plan: memonger.Plan) -> None:
    step = plan.graph.nodes.index("fc2")
    (value,) = plan.graph.writes[step]
    label = _boxes(memonger.draw(plan), "after")[step]["label"]
    assert label == f"MatMul\\nfc2\\n@{plan.offsets[value]:,} · 4.00 KiB [64, 16]"


def test_edges_lead_to_what_reads(plan: memonger.Plan) -> None:
    graph, text = plan.graph, memonger.draw(plan)
    edges = {tuple(map(int, edge)) for edge in re.findall(r"^    after(\d+) -> after(\d+);$", text, re.MULTILINE)}
    assert edges == {(source, step) for step, sources in enumerate(graph.sources) for source in sources}


def test_the_same_plan_is_the_same_picture(plan: memonger.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "planned.onnx")
    assert memonger.draw(tmp_path / "planned.onnx") == memonger.draw(plan)


def test_text_and_attributes_are_the_callers(plan: memonger.Plan) -> None:
    def text(old: str, node: DrawnNode) -> str:
        return f"{old}\n{node.step}: {NASTY}" if node.planned else ""

    drawn = memonger.draw(plan, node_text=text, node_attributes=lambda node: {"URL": node.name, "fontsize": 14})
    box = _boxes(drawn, "after")[0]
    assert box["label"].endswith('0: a \\"b\\" \\\\ <i>c</i> {d|e}; -> \\\\N')
    assert (box["URL"], box["fontsize"]) == (plan.graph.nodes[0], "14")
    assert {box["label"] for box in _boxes(drawn, "before").values()} == {""}
    assert _boxes(memonger.draw(plan, node_attributes={"shape": "ellipse"}), "after")[0]["shape"] == "ellipse"


def _nasty() -> onnx.ModelProto:
    model = classifier()
    for number, node in enumerate(model.graph.node):
        node.name = f"{NASTY}\n\x1b[31m{number}"
    return model


def test_names_are_letters_and_nothing_else() -> None:
    text = memonger.draw(memonger.load(_nasty()))
    assert len(_boxes(text, "before")) == 5
    assert all(line.isprintable() for line in text.splitlines())


@pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz isn't installed")
def test_graphviz_draws_it() -> None:
    drawn = ElementTree.fromstring(rendered(memonger.draw(memonger.load(_nasty())), "svg"))
    texts = {"".join(text.itertext()) for text in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert any('a "b" \\ <i>c</i>' in text.replace("\xa0", " ") for text in texts)


def test_of_a_large_graph_the_worst_step_is_drawn(plan: memonger.Plan) -> None:
    after = _boxes(memonger.draw(plan, max_nodes=7), "after")
    assert len(after) == 7
    assert [box["penwidth"] for box in after.values() if "penwidth" in box] == ["3"]


def test_what_is_near_a_node_is_drawn(plan: memonger.Plan) -> None:
    graph = plan.graph
    middle = graph.nodes.index("relu2")
    beside = {middle, *graph.sources[middle], *graph.readers[graph.writes[middle][0]]}
    assert set(_boxes(memonger.draw(plan, around="relu2", depth=1), "after")) == beside
    assert set(_boxes(memonger.draw(plan, around=["relu2"], depth=9, max_nodes=1), "after")) == {middle}
    with pytest.raises(memonger.PlanError, match="'nix' names no node to draw around"):
        memonger.draw(plan, around="nix")


@pytest.mark.parametrize("wrong", [{"max_nodes": 0}, {"depth": -1}, {"color_by": "size"}])
def test_settings_that_make_no_sense_are_refused(plan: memonger.Plan, wrong: dict[str, Any]) -> None:
    with pytest.raises(memonger.PlanError, match=next(iter(wrong))):
        memonger.draw(plan, **wrong)


def test_a_graph_without_a_model_is_drawn() -> None:
    graph = networkx.DiGraph([("a", "b")])
    for name in graph:
        graph.add_node(name, bytes=64, cost=1.0)
    assert len(_boxes(memonger.draw(memonger.search_plan(graph, strategy="none")), "after")) == 2


def test_the_command_writes_dot_and_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(classifier(), "model.onnx")
    text = invoke("draw", "model.onnx").stdout
    assert text.startswith('digraph "model.onnx" {')
    record = json.loads(invoke("draw", "model.onnx", "-o", "graph.dot", "--json").stdout)
    assert (record["steps"], record["drawn"], record["format"]) == (5, 5, "dot")
    assert Path("graph.dot").read_text() == text
    assert "5 of 5 steps" in invoke("draw", "model.onnx", "-o", "graph.txt", "--dot").stdout
    assert Path("graph.txt").read_text() == text
    assert invoke("draw", "model.onnx", "-o", "graph.jpg").exit_code == 2


def test_graphviz_is_named_where_it_is_missing_and_where_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    onnx.save(classifier(), "model.onnx")
    missing = invoke("draw", "model.onnx", "-o", "graph.svg")
    assert missing.exit_code == 1
    assert "apt install graphviz" in missing.stderr
    program = tmp_path / "dot"
    program.write_text("#!/bin/sh\necho no room >&2\nexit 3\n")
    program.chmod(0o755)
    assert "refuses the graph: no room" in invoke("draw", "model.onnx", "-o", "graph.svg").stderr
    assert not Path("graph.svg").exists()
    program.write_text("#!/bin/sh\necho $1\nexec /bin/cat\n")
    assert invoke("draw", "model.onnx", "-o", "graph.svg").exit_code == 0
    assert Path("graph.svg").read_text().startswith("-Tsvg\ndigraph")
