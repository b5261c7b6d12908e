"""What pictures are drawn from: each value of the arena once, at its place, and all that the total counts."""

import dataclasses

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import memonger
from memonger.ir.marks import AGAIN, own_node
from memonger.ir.modules import SCOPES
from memonger.report.view import (
    BODIES,
    COMPUTED,
    INPUT,
    KEPT,
    RECOMPUTED,
    SHARED,
    WEIGHT,
    WINDOW,
    WORKSPACE,
    Modules,
    View,
)  # fmt: skip
from tests.support.planning_models import plan
from tests.support.stock import normal, parse


def test_rectangles_are_the_values_of_the_plan(training: memonger.Plan) -> None:
    view, graph = View("chain", training), training.graph
    number = {name: value for value, name in enumerate(graph.values)}
    placed = {name: each for each in view.arena for name in (each.name, *each.others)}
    assert sorted(number[name] for name in placed) == sorted(training.offsets)
    for name, each in placed.items():
        value = number[name]
        assert (each.offset, each.size) == (training.offsets[value], graph.sizes[value])
        used = [step for step, reads in enumerate(graph.reads) if value in reads] + [graph.producer[value]]
        assert each.start <= min(used) <= max(used) < each.stop
        assert graph.producer[number[each.name]] == each.start


def test_no_two_rectangles_overlap_and_all_lie_within_the_total(training: memonger.Plan) -> None:
    view = View("chain", training)
    drawn = np.zeros((len(view.steps), training.total_bytes), bool)
    for each in view.rectangles:
        cells = drawn[each.start : each.stop, each.offset : each.offset + each.size]
        assert not cells.any()
        cells[:] = True
    of_kind = {kind: sum(each.size for each in view.rectangles if each.kind == kind) for kind in (INPUT, WEIGHT)}
    assert of_kind == {INPUT: training.input_bytes, WEIGHT: training.parameter_bytes}
    assert max(each.offset + each.size for each in view.rectangles) == training.total_bytes


def test_weights_that_stay_in_the_file_are_the_window_that_they_pass_through() -> None:
    """And weights of bodies, which have no name of their own in the plan, count as well."""
    pytest.importorskip("onnxruntime")
    width = 400
    products = " ".join(f"v{n + 1} = MatMul(v{n}, w{n})" for n in range(4))
    model = parse(
        f"g (bool c, float[4,400] v0) => (float[4,400] y) {{ {products} y = If(c) <"
        "then_branch = a () => (float[4,400] t) { t = MatMul(v4, inner) }, "
        "else_branch = b () => (float[4,400] u) { u = Neg(v4) }> }"
    )
    for name in (*(f"w{n}" for n in range(4)), "inner"):
        model.graph.initializer.append(numpy_helper.from_array(normal(len(name), width, width), name))
    branch = next(a.g for a in model.graph.node[-1].attribute if a.name == "then_branch")
    branch.initializer.append(model.graph.initializer.pop())
    whole = memonger.search_plan(model, device="cpu", mode="inference")
    with pytest.raises(memonger.BudgetError) as refused:
        memonger.search_plan(model, device="cpu", mode="inference", budget="1MiB")
    below = memonger.search_plan(model, device="cpu", mode="inference", budget=refused.value.smallest)
    assert below.window is not None
    for one in (whole, below):
        weights = {each.name: each.size for each in View("", one).rectangles if each.kind == WEIGHT}
        assert sum(weights.values()) == one.resident_parameter_bytes
        assert weights[BODIES] == 4 * width * width
        assert weights.get(WINDOW, 0) == (one.window.nbytes if one.window else 0)
        assert max(each.offset + each.size for each in View("", one).rectangles) == one.total_bytes


def test_workspace_stands_above_the_arena_at_its_step(training: memonger.Plan) -> None:
    graph = training.graph
    graph = dataclasses.replace(graph, workspace=tuple(64 * (step % 3) for step in range(len(graph.nodes))))
    made = dataclasses.replace(training, graph=graph, workspace={"any": 128})
    found = [each for each in View("chain", made).rectangles if each.kind == WORKSPACE]
    assert [(each.start, each.stop, each.size) for each in found] == [
        (step, step + 1, size) for step, size in enumerate(graph.workspace) if size
    ]
    assert {each.offset for each in found} == {made.arena_bytes}


def test_kinds_say_what_became_of_a_value(training: memonger.Plan) -> None:
    view, graph = View("chain", training), training.graph
    again = set(training.recomputed)
    of_name = {name: each for each in view.arena for name in (each.name, *each.others)}
    assert all(of_name[graph.values[value]].kind == RECOMPUTED for step in again for value in graph.writes[step])
    kept = {each.name for each in view.arena if each.kind == KEPT}
    after = [step for step in range(len(graph.nodes)) if not graph.forward[step] or step in again]
    late = {value for step in after for value in graph.reads[step]}
    first = {v for step, writes in enumerate(graph.writes) if graph.forward[step] and step not in again for v in writes}
    names = {graph.values[value] for value in late & first}
    assert kept == {each.name for each in view.arena if names & {each.name, *each.others} and each.kind != RECOMPUTED}
    assert kept
    assert {each.kind for each in view.arena if each.others} <= {SHARED, KEPT, RECOMPUTED}
    assert all(not each.others for each in view.arena if each.kind == COMPUTED)


def test_curves_are_those_of_the_plan_and_of_the_model_without_recomputation(training: memonger.Plan) -> None:
    view = View("chain", training)
    assert view.live.max() == training.peak_bytes == view.live[view.peak_step]
    assert view.live_before is not None
    assert view.live_before.max() == training.peak_before_bytes
    from_file = dataclasses.replace(training, live_before=None)
    once = View("chain", from_file).live_before
    assert once is not None
    assert len(once) == len(view.live) - len(training.recomputed)
    assert training.peak_bytes < once.max()
    plain = plan(training.source, device="none", strategy="none")
    assert View("chain", dataclasses.replace(plain, live_before=None)).live_before is None


def test_modules_are_those_of_the_exporter_else_read_off_names() -> None:
    one = helper.make_node("Relu", ["x"], ["h"], name="node_relu")
    one.metadata_props.add(key=SCOPES, value="['', 'layer1', 'layer1.0', 'relu']")
    two = helper.make_node("Neg", ["h"], ["y"], name="/layer2/layer2.0/Neg")
    two.metadata_props.add(key=SCOPES, value="__import__('os').abort()")
    copy = helper.make_node("Relu", ["x"], ["h2"], name="another")
    copy.metadata_props.add(key=AGAIN, value="node_relu")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy"]
    model = helper.make_model(helper.make_graph([one, two, copy], "g", ends[:1], ends[1:]), ir_version=10)
    modules = Modules(ir.from_proto(model))
    assert modules.path("node_relu") == modules.path("fused", ["h"]) == ("layer1", "0")
    assert modules.path("another") == modules.path("grad/node_relu/Mul") == ("layer1", "0")
    assert own_node(ir.Node("", "Relu", [], name="mine.chunk0_1")) == "mine.chunk0_1"  # only named like a slice
    slice_again = ir.Node("", "Relu", [], name="a.recompute1.chunk0_1", metadata_props={AGAIN: "a.chunk0_1"})
    assert own_node(slice_again) == "a"
    assert modules.path("/layer2/layer2.0/Neg") == ("layer2", "layer2.0", "Neg")
    assert modules.path("grad/block/conv/Mul#2") == ("block", "conv")
    assert modules.path("update/block/conv.weight/Sub") == ("block",)
    assert modules.path("update/fc.weight/Sub") == ("fc",)
    assert modules.path("loss/Mul") == ("loss",)
    assert modules.path("") == ()


@pytest.mark.parametrize("shape", [[0], [1]])
def test_a_plan_with_next_to_nothing_in_it(shape: list[int]) -> None:
    node = helper.make_node("Relu", ["x"], ["y"], name="relu")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy"]
    model: onnx.ModelProto = helper.make_model(helper.make_graph([node], "g", ends[:1], ends[1:]), ir_version=10)
    view = View("g", memonger.search_plan(model, mode="inference", device="none"))
    assert [each.name for each in view.arena] == ["y"] * shape[0]
    assert view.peak_step == 0
