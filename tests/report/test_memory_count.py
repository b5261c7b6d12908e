"""`memonger.count_memory`: bytes by kind, by hand, against a walk over single bytes, and against the plan's figures."""

from collections import Counter
from pathlib import Path

import networkx
import numpy as np
import onnx
import pytest

import memonger
from memonger.report.memory_count import IN_ARENA, value_kinds
from tests.support import planning_models
from tests.support.stock import normal, parse
from tests.support.training_models import BATCH, CLASSES, FEATURES, HIDDEN, classifier

FLOAT = 4
WEIGHTS = FLOAT * (HIDDEN * FEATURES + HIDDEN + HIDDEN * HIDDEN + CLASSES * HIDDEN)
LAYER = FLOAT * BATCH * HIDDEN
SCORES = FLOAT * BATCH * CLASSES


@pytest.fixture(scope="module")
def recomputing() -> memonger.Plan:
    plan = planning_models.plan(planning_models.chain(), strategy="sqrt", optimizer=memonger.Adam(lr=0.1))
    assert plan.recomputed
    return plan


def test_a_training_model_by_hand() -> None:
    count = memonger.count_memory(classifier(), mode="training")  # no loss: the gradient of y is an input
    assert count.after is count.at_peak is None
    before = count.before
    assert before.outputs == 4 * LAYER + SCORES
    assert before.output_gradients == 4 * LAYER
    assert before.parameter_gradients == WEIGHTS + FLOAT * HIDDEN  # the bias read twice has a part of its gradient
    assert before.temporaries == 2 * LAYER + 3 * FLOAT * HIDDEN  # a mask for each Relu, the other part, both as rows
    assert 0 <= before.parameters - WEIGHTS < 128  # a one for each sample, shapes and the like
    assert before.inputs == FLOAT * BATCH * FEATURES + SCORES
    assert (before.workspace, before.optimizer_state, before.unused) == (None, 0, 0)


@pytest.mark.parametrize(("optimizer", "tensors"), [(memonger.SGD(lr=0.1), 0), (memonger.Adam(lr=0.1), 2)])
def test_a_training_step_has_one_gradient_a_parameter_and_the_optimizers_state(
    optimizer: memonger.SGD | memonger.Adam, tensors: int
) -> None:
    before = memonger.count_memory(classifier(), loss=planning_models.LOSS, optimizer=optimizer).before
    assert before.parameter_gradients == WEIGHTS + FLOAT * HIDDEN
    assert before.optimizer_state == tensors * WEIGHTS


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_normalization_has_a_gradient_a_parameter(clip_norm: float | None) -> None:
    model = parse(
        "g (float[4,3,8,8] x) => (float[4,5] y) { c = Conv<pads = [1,1,1,1]>(x, weight)"
        "  n = BatchNormalization(c, scale, bias, mean, variance)  r = Relu(n)"
        "  p = GlobalAveragePool(r)  y = Flatten(p) }"
    )
    ones = {name: np.ones(5, np.float32) for name in ("scale", "bias", "mean", "variance")}
    for name, array in {"weight": normal(0, 5, 3, 3, 3), **ones}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    training = memonger.differentiate(
        memonger.to_training_mode(model), loss=planning_models.LOSS, optimizer=memonger.SGD(lr=0.1), clip_norm=clip_norm
    )
    before = memonger.count_memory(training).before
    assert before.parameter_gradients == FLOAT * (5 * 3 * 3 * 3 + 2 * 5)  # the bias's is also part of the input's


def test_accumulated_gradients_are_gradients_of_parameters() -> None:
    training = memonger.differentiate(
        classifier(), loss=planning_models.LOSS, optimizer=memonger.SGD(lr=0.1), accumulate="apply", clip_norm=1.0
    )
    before = memonger.count_memory(training).before
    assert before.parameter_gradients >= 2 * WEIGHTS
    assert (before.parameters - WEIGHTS, before.optimizer_state) == (pytest.approx(0, abs=200), 0)  # and constants


def test_inference_has_outputs_alone() -> None:
    count = memonger.count_memory(memonger.search_plan(classifier(), mode="inference", device="none"))
    assert count.before.outputs == 4 * LAYER + SCORES
    assert count.after is not None
    assert count.after.outputs == 2 * LAYER
    assert count.after.optnet == {
        "outputs": 2 * LAYER, "gradInputs": 0, "buffers": 0, "params": WEIGHTS, "total_size": 2 * LAYER + WEIGHTS,
    }  # fmt: skip


def test_the_kinds_add_up_to_the_plans_own_figures(recomputing: memonger.Plan) -> None:
    count = memonger.count_memory(recomputing)
    assert count.after is not None
    assert count.at_peak is not None
    assert count.after.total == recomputing.total_bytes
    assert count.before.total == recomputing.unplanned_bytes
    assert sum(getattr(count.after, kind) for kind in (*IN_ARENA, "unused")) == recomputing.arena_bytes
    assert sum(getattr(count.at_peak, kind) for kind in IN_ARENA) == recomputing.peak_bytes
    assert sum(getattr(count.before, kind) for kind in IN_ARENA) == recomputing.activation_bytes
    assert (
        count.before
        == memonger.count_memory(recomputing.source, loss=planning_models.LOSS, optimizer=memonger.Adam(lr=0.1)).before
    )


def test_each_byte_of_the_arena_counts_for_what_lies_there_first(recomputing: memonger.Plan) -> None:
    plan, graph = recomputing, recomputing.graph
    kinds, owner = value_kinds(graph, plan.training), np.full(plan.arena_bytes, -1)
    for writes in graph.writes:
        for value in writes:
            if value in plan.offsets:
                part = owner[plan.offsets[value] :][: graph.sizes[value]]
                part[part < 0] = kinds[value]
    sizes = Counter(owner.tolist())
    after = memonger.count_memory(plan).after
    assert after is not None
    assert {kind: getattr(after, kind) for kind in IN_ARENA} == {kind: sizes[i] for i, kind in enumerate(IN_ARENA)}
    assert after.unused == sizes[-1]


def test_a_file_counts_as_the_plan_in_it(recomputing: memonger.Plan, tmp_path: Path) -> None:
    recomputing.save(tmp_path / "planned.onnx")
    assert memonger.count_memory(tmp_path / "planned.onnx") == memonger.count_memory(recomputing)


def test_workspace_is_the_largest() -> None:
    plan = memonger.search_plan(_with_workspace(), mode="inference", device="cpu")
    count = memonger.count_memory(plan)
    assert count.after is not None
    assert count.before.workspace == count.after.workspace == plan.workspace_bytes
    assert plan.workspace_bytes
    assert count.before.total == plan.unplanned_bytes
    assert count.after.total == plan.total_bytes


def _with_workspace() -> onnx.ModelProto:
    return parse("g (float[2,3,32,32] x) => (float[2,3,32,32] y) { y = LRN<size = 3>(x) }")


def test_a_graph_without_a_model_has_outputs_and_gradients() -> None:
    graph = networkx.DiGraph([("a", "b"), ("b", "c"), ("a", "c")])
    for name, size in (("a", 64), ("b", 128), ("c", 256)):
        graph.add_node(name, bytes=size, cost=1.0, forward=name != "c")
    count = memonger.count_memory(memonger.search_plan(graph, strategy="none"))
    assert (count.before.outputs, count.before.output_gradients, count.before.total) == (192, 256, 448)
    assert count.after is not None
    assert count.after.total == 448
