"""Marks on a model's nodes: obeyed to the letter, followed through lowering, written back as a decision."""

import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import memonger
import models
from memonger.errors import PlanError
from memonger.ir.marks import FORCE, STAGE
from memonger.schedule.marks import place
from memonger.units import format_size
from tests.support.planning_models import LOSS, ROWS, WIDTH, again, chain, marked, network, plan


def _forced(**decisions: str) -> onnx.ModelProto:
    return marked(chain(), FORCE, decisions)


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_exactly_the_marked_nodes_run_again(device: str) -> None:
    if device == "cpu":
        pytest.importorskip("onnxruntime")
    model = _forced(fc2="True", relu2="True", relu5="True", relu6="False")
    found = plan(model, strategy="marks", device=device)
    assert again(found) == ["relu5", "fc2", "relu2"]
    assert found.notes == ()
    assert again(plan(chain(), strategy="marks", device=device)) == []


def test_a_marked_node_that_no_backward_step_needs_runs_once() -> None:
    assert again(plan(_forced(fc4="True"), strategy="marks")) == []
    assert again(plan(_forced(scores="True"), strategy="marks")) == []


def test_what_comes_back_is_read_by_the_backward_pass() -> None:
    graph = plan(_forced(fc2="True", relu2="True"), strategy="marks").graph
    copy = graph.values.index("r2.recompute1")
    readers = [node for node, reads in enumerate(graph.reads) if copy in reads]
    assert readers
    assert not any(graph.forward[node] for node in readers)
    first = graph.values.index("r2")
    assert all(graph.forward[node] for node, reads in enumerate(graph.reads) if first in reads)


@pytest.mark.parametrize("text", ["true", "1", "", "yes"])
@pytest.mark.parametrize("strategy", ["marks", "sweep"])
def test_a_decision_that_is_neither_names_the_node(text: str, strategy: str) -> None:
    with pytest.raises(PlanError, match=r"node 'relu3' \(Relu\) has force_mirroring=.*'True' \(recompute\)"):
        plan(_forced(relu3=text), strategy=strategy)


def test_stages_are_the_candidates() -> None:
    model = marked(chain(), STAGE, {"relu2": "True", "relu5": "True"})
    found = plan(model, strategy="block")
    assert set(again(found)) == {"fc0", "relu0", "fc1", "relu1", "fc3", "relu3", "fc4", "relu4"}
    assert plan(model).outcome.candidates[1].source == "marks"
    assert plan(chain()).outcome.candidates[1].source == "dominators"


def test_nodes_of_one_stage_are_kept_together_or_not_at_all() -> None:
    model = marked(chain(), STAGE, {"relu1": "a", "relu3": "a", "relu5": "b"})
    values = [f"r{i}" for i in range(9)]

    def kept(found: memonger.Model) -> set[str]:
        return {v.name for n in found.ir.graph if n.metadata_props[FORCE] == "False" for v in n.outputs} & set(values)

    size = ROWS * WIDTH * 4
    late = {"r6", "r7", "r8"}  # after the last stage: the backward pass begins there
    assert kept(memonger.make_mirror_plan(model, 0, loss=LOSS)) == {"r1", "r3", "r5"} | late
    both = [kept(memonger.make_mirror_plan(model, size * part, loss=LOSS)) for part in (1, 3, 7, 9, 13)]
    assert all(("r1" in found) == ("r3" in found) for found in both)
    assert any("r1" not in found for found in both)


def test_a_stage_called_false_is_none() -> None:
    model = marked(chain(), STAGE, {"relu2": "False", "relu5": ""})
    assert plan(model).outcome.candidates[1].source == "dominators"


@pytest.mark.parametrize("strategy", ["sweep", "sqrt", "block", "log", "cheap", "budget"])
def test_what_is_to_be_kept_is_kept_by_every_strategy(strategy: str) -> None:
    plain = plan(chain(), strategy="none")
    budget = {"budget": plain.total_bytes - plain.peak_bytes // 4, "effort": 5000} if strategy == "budget" else {}
    free = again(plan(chain(), strategy=strategy, **budget))
    if strategy in ("sqrt", "block"):
        free = again(plan(marked(chain(), STAGE, {"relu6": "True"}), strategy=strategy))
    assert free
    pick = next(name for name in sorted(free) if name.startswith("relu"))
    model = marked(_forced(**{pick: "False"}), STAGE, {"relu6": "True"})
    kept = again(plan(model, strategy=strategy, **budget))
    assert pick not in kept
    assert kept


def test_patterns_name_nodes_operators_and_outputs() -> None:
    for pattern, expected in [
        ("relu3", {"relu3"}),
        ("r3", {"relu3"}),
        ("relu[23]", {"relu2", "relu3"}),
        ("Relu", {f"relu{i}" for i in range(9)}),
        ("relu?", {f"relu{i}" for i in range(9)}),
    ]:
        assert set(again(plan(chain(), strategy="marks", mirror=[pattern]))) == expected, pattern
    assert set(again(plan(chain(), strategy="marks", mirror="relu3"))) == {"relu3"}
    assert set(again(plan(chain(), strategy="marks", mirror=["Relu"], keep=["relu[0-6]"]))) == {"relu7", "relu8"}


def test_a_name_with_brackets_is_a_name_first() -> None:
    model = chain()
    model.graph.node[3].name = "block[0]/relu"
    assert again(plan(model, strategy="marks", mirror=["block[0]/relu"])) == ["block[0]/relu"]


@pytest.mark.parametrize("option", ["mirror", "keep"])
def test_a_pattern_that_names_no_node_is_refused(option: str) -> None:
    with pytest.raises(PlanError, match=r"'gelu\*' names no node: .*MatMul, Relu"):
        plan(chain(), **{option: ["relu1", "gelu*"]})


def test_what_recomputes_nothing_takes_no_mirror() -> None:
    for options in ({"strategy": "none"}, {"mode": "inference"}):
        with pytest.raises(PlanError, match="nor with strategy='none'"):
            memonger.search_plan(chain(), mirror=["Relu"], **options)


@pytest.mark.parametrize(("strategy", "part"), [("cheap", 1), ("budget", 1), ("budget", 0.8), ("exact", 1)])
def test_strategies_that_decide_by_themselves_recompute_the_marked_nodes_as_well(strategy: str, part: float) -> None:
    """Whether they are marked by the option or in the model; and what they recompute besides still pays."""
    options: dict[str, Any] = {"strategy": strategy, "effort": 5000}
    if strategy != "cheap":
        options["budget"] = int(plan(chain(), strategy="none").total_bytes * part)
    found = plan(chain(), mirror=["relu[23]"], **options)
    marked_in_file = plan(_forced(relu2="True", relu3="True"), **options)
    assert {"relu2", "relu3"} <= set(again(found))
    assert again(marked_in_file) == again(found)
    assert marked_in_file.notes == ()
    if "budget" in options:
        assert found.total_bytes <= options["budget"]
        assert found.overhead >= plan(chain(), **options).overhead
        assert (set(again(found)) == {"relu2", "relu3"}) == (part == 1)


def test_the_marks_of_a_plan_hold_within_a_budget() -> None:
    """A model annotated with all that a plan recomputes, and keeps, gives that plan where the budget holds it."""
    found = plan(chain(), strategy="sqrt")
    asked: dict[str, Any] = {"device": "none", "loss": LOSS, "effort": 100}
    under_budget = memonger.search_plan(found.annotated, budget=found.total_bytes, **asked)
    assert sorted(again(under_budget)) == sorted(again(found))
    with pytest.raises(memonger.BudgetError, match=r"nodes are kept because they are marked so"):
        memonger.search_plan(found.annotated, budget=found.total_bytes - 64, **asked)


def test_a_frontier_recomputes_the_marked_nodes_in_each_of_its_plans() -> None:
    plans = memonger.pareto(chain(), loss=LOSS, device="none", mirror=["relu[23]"], points=2, effort=2000)
    assert set(again(plans[0])) == {"relu2", "relu3"}
    assert len(plans) > 1
    assert all({"relu2", "relu3"} <= set(again(each)) for each in plans)
    assert [each.overhead for each in plans] == sorted(each.overhead for each in plans)


def test_the_largest_batch_that_fits_is_found_with_the_marked_nodes_recomputed() -> None:
    model = chain()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "n"
    found = memonger.fit(model, "22KiB", loss=LOSS, device="none", mirror=["relu[23]"], effort=50)
    assert found.plan is not None
    assert {"relu2", "relu3"} <= set(again(found.plan))
    assert found.plan.total_bytes <= 22 * 1024


# What can't run again


def test_a_marked_output_cannot_run_again_where_it_is_needed() -> None:
    model = _forced(relu8="True")
    model.graph.output.append(onnx.helper.make_tensor_value_info("r8", onnx.TensorProto.FLOAT, (ROWS, WIDTH)))
    training = memonger.differentiate(model, loss=memonger.SoftmaxCrossEntropy(output="y"))
    with pytest.raises(PlanError, match=r"'relu8' \(Relu\) is to be recomputed .* it writes an output of the model"):
        memonger.search_plan(training, device="none", strategy="marks")


def _dropout(**decisions: str) -> onnx.ModelProto:
    """A chain with Dropout behind the third layer."""
    model = chain()
    nodes = list(model.graph.node)
    nodes[5].output[0] = "before"
    nodes.insert(6, onnx.helper.make_node("Dropout", ["before", "ratio", "on"], ["r2"], name="drop"))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    for name, array in (("ratio", np.float32(0.3)), ("on", np.bool_(True))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(array), name))
    return marked(model, FORCE, decisions)


def test_random_state_cannot_run_again() -> None:
    training = memonger.differentiate(_dropout(drop="True"), loss=LOSS, keep_random=True)
    with pytest.raises(PlanError, match=r"'drop' \(Dropout\) .*draws random numbers"):
        memonger.search_plan(training, device="none", strategy="marks")


# Nodes that are written out as others


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_all_that_a_node_is_written_out_as_runs_again(device: str) -> None:
    if device == "cpu":
        pytest.importorskip("onnxruntime")
    found = plan(_dropout(drop="True"), strategy="marks", device=device)
    parts = again(found)
    assert parts
    assert all(name.startswith("drop/") for name in parts)
    by_name = dict(zip(found.graph.nodes, range(len(found.graph.nodes)), strict=True))
    forward = [
        n for n in by_name if n.startswith("drop/") and found.graph.forward[by_name[n]] and ".recompute" not in n
    ]
    planned = {n for n in forward if any(found.graph.planned[v] for v in found.graph.writes[by_name[n]])}
    assert set(parts) == planned, "of the mask and its hash all has to run again"
    assert again(plan(_dropout(), strategy="marks", device=device)) == []


def test_the_stage_of_a_node_written_out_is_where_its_output_is() -> None:
    for model, output in ((marked(_dropout(), STAGE, {"drop": "True"}), "r2"), (_norm(STAGE), "n")):
        training = memonger.differentiate(model, loss=LOSS)
        found = [node for node in training.ir.graph if STAGE in node.metadata_props]
        assert [[v.name for v in node.outputs][:1] for node in found] == [[output]]


def _norm(key: str) -> onnx.ModelProto:
    """A chain whose third layer is a function of the standard without a rule: it is written out as its body."""
    model = chain()
    nodes = list(model.graph.node)
    nodes[4].output[0] = "before"
    nodes.insert(5, onnx.helper.make_node("MeanVarianceNormalization", ["before"], ["n"], axes=[1], name="norm"))
    nodes[6].input[0] = "n"
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return marked(model, key, {"norm": "True"})


def test_the_body_of_a_function_runs_again_as_a_whole() -> None:
    training = memonger.differentiate(_norm(FORCE), loss=LOSS)
    marked_nodes = [node for node in training.ir.graph if FORCE in node.metadata_props]
    assert len(marked_nodes) > 3
    found = memonger.search_plan(training, device="none", strategy="marks")
    names = set(again(found))
    assert names
    assert names <= {str(node.name) for node in marked_nodes}


def test_the_marks_of_a_models_own_function_reach_its_body() -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20, "own": 1]>
        g (float[{ROWS},{WIDTH}] x) => (float[{ROWS},{WIDTH}] y) {{
            a = own.twice(x, w)
            y = own.twice(a, w)
        }}
        <domain: "own", opset_import: ["": 20]>
        twice (x, w) => (y) {{ h = MatMul(x, w)  r = Relu(h)  k = MatMul(r, w)  y = Relu(k) }}"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(WIDTH, dtype=np.float32), "w"))
    model.graph.node[0].metadata_props.add(key=FORCE, value="True")
    model.graph.node[0].metadata_props.add(key=STAGE, value="first")
    loaded = memonger.load(model)
    stages = [(n.outputs[0].name, n.metadata_props[STAGE]) for n in loaded.ir.graph if STAGE in n.metadata_props]
    assert stages == [("a", "first")]
    assert Counter(n.op_type for n in loaded.ir.graph if FORCE in n.metadata_props) == {"MatMul": 2, "Relu": 2}
    found = plan(model, loss="mean_squared_error", strategy="marks")
    assert Counter(found.graph.ops[step] for step in found.recomputed) == {"MatMul": 2, "Relu": 2}


@pytest.mark.parametrize("name", ["resnet18", "gpt"])
def test_statistics_are_updated_once_however_their_layer_is_marked(name: str) -> None:
    pattern = "BatchNormalization" if name == "resnet18" else "Dropout"
    found = plan(network(name), strategy="marks", mirror=[pattern], optimizer=memonger.SGD(lr=0.1))
    assert found.recomputed
    assert not any(found.graph.updates[step] for step in found.recomputed)


# Marks that are no cuts


@cache
def _bare() -> tuple[ir.Model, memonger.Plan]:
    """A transformer without marks, and its plan."""
    model = models.build_ir("vit", batch=8, num_layers=3, training=True)
    for node in model.graph:
        node.metadata_props.pop(STAGE, None)
    return model, plan(model, loss="loss")


@pytest.mark.parametrize(
    ("operator", "words"),
    [("LayerNormalization", r"and are used: mark those\.$"), ("Gelu", r"mark those, or none\.$")],
)
def test_marks_that_gain_little_are_compared_with_the_structure_of_the_graph(operator: str, words: str) -> None:
    bare, free = _bare()
    model = bare.clone()
    nodes = [node for node in model.graph if node.op_type == operator]
    for node in nodes:
        node.metadata_props[STAGE] = "True"
    found = plan(model, loss="loss")
    (note,) = found.notes
    assert note.startswith(f"the {len(nodes)} nodes marked mirror_stage ({operator}) are no good cuts of the graph")
    assert re.search(words, note)
    assert format_size(free.peak_bytes) in note
    used = "are used" in note
    assert found.peak_bytes == free.peak_bytes if used else free.peak_bytes < found.peak_bytes < found.peak_before_bytes


# Marks whose value is gone


def test_a_mark_whose_node_is_left_out_is_told() -> None:
    model = chain()
    model.graph.node.append(onnx.helper.make_node("Relu", ["r3"], ["unused"], name="idle"))
    found = plan(marked(model, STAGE, {"idle": "True"}))
    assert any("'idle' (Relu) is lost" in note for note in found.notes)


def test_a_mark_moves_downstream_where_a_runtime_takes_its_value_away() -> None:
    pytest.importorskip("onnxruntime")
    model = marked(chain(), STAGE, {"fc3": "True"})  # MatMul and Relu become one node
    lowered = memonger.load(chain()).ir.clone()
    node = next(n for n in lowered.graph if n.name == "relu3")
    gone = node.inputs[0].producer()
    node.replace_input_with(0, gone.inputs[0])
    lowered.graph.remove(gone, safe=True)
    found = place(memonger.load(model).ir, lowered, "m")
    number = [n.name for n in lowered.graph].index("relu3")
    assert found.stages == {number: "True"}
    assert found.moved == (
        "the mark on node 'fc3' (MatMul) moved to 'r3': the model that will run computes no such value.",
    )


# The decision written back


def _planned_again(first: memonger.Plan, folder: Path, loss: str) -> memonger.Plan:
    """The plan of the annotated model, read from a file, by its marks."""
    annotated = first.annotated
    assert all(node.metadata_props[FORCE] in ("True", "False") for node in annotated.graph)
    annotated.save(folder / "annotated.onnx")
    onnx.checker.check_model(folder / "annotated.onnx", full_check=True)
    return plan(folder / "annotated.onnx", strategy="marks", loss=loss)


@pytest.mark.parametrize("strategy", ["sweep", "sqrt", "block"])
@pytest.mark.parametrize("stages", [{}, {"relu2": "True", "relu5": "True"}, {"relu1": "a", "relu6": "a", "relu4": "b"}])
def test_the_annotated_model_gives_the_plan_again(stages: dict[str, str], strategy: str, tmp_path: Path) -> None:
    first = plan(marked(chain(), STAGE, stages), strategy=strategy)
    assert [n.name for n in first.annotated.graph] == [n.name for n in chain().graph.node]
    second = _planned_again(first, tmp_path, LOSS)
    assert second.peak_bytes == first.peak_bytes
    ours = [name for name in again(first) if not name.startswith("loss/")]  # the user's model has no loss to mark
    assert again(second) == ours
    assert ours or (not stages and strategy == "block")


@pytest.mark.parametrize(("name", "strategy"), [("resnet18", "sweep"), ("unet", "block"), ("gpt", "sqrt")])
def test_the_annotated_network_gives_the_peak_again(name: str, strategy: str, tmp_path: Path) -> None:
    first = plan(network(name), strategy=strategy)
    assert first.recomputed
    second = _planned_again(first, tmp_path, "loss")
    assert second.peak_bytes <= first.peak_bytes * 1.01  # a node that is written out as several has one decision
    assert second.peak_bytes < first.peak_before_bytes or first.peak_bytes >= first.peak_before_bytes


def test_annotating_leaves_the_users_model_alone() -> None:
    model = memonger.load(chain())
    first = plan(model, loss=LOSS, strategy="cheap")
    assert any(node.metadata_props[FORCE] == "True" for node in first.annotated.graph)
    assert not any(node.metadata_props for node in model.ir.graph)


def test_a_plan_from_a_file_has_no_annotated_model(tmp_path: Path) -> None:
    plan(chain(), strategy="cheap").save(tmp_path / "planned.onnx")
    with pytest.raises(PlanError, match="read from a file"):
        _ = memonger.Plan.load(tmp_path / "planned.onnx").annotated
