"""Training steps in chunks: the same bits as whole ones, in less memory, whole or not at all."""

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import memonger
from memonger.errors import VerificationError
from memonger.graph.verify import verify
from memonger.tiling.both import StepSearch
from memonger.tiling.chunk_regions import regions_of
from tests.support import networks
from tests.support.one_node_executor import run_poisoned
from tests.support.stock import normal

ROWS, WIDTH, WORDS = 256, 32, 4096


@cache
def scores() -> onnx.ModelProto:
    """A layer, and scores of 4,096 words, 4 MiB: their softmax, and the mean of what the labels pick."""
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["a"], name="layer"),
        helper.make_node("Relu", ["a"], ["b"], name="relu"),
        helper.make_node("MatMul", ["b", "w1"], ["scores"], name="head"),
        helper.make_node("LogSoftmax", ["scores"], ["logs"], name="softmax", axis=-1),
        helper.make_node("GatherElements", ["logs", "labels"], ["picked"], name="pick", axis=1),
        helper.make_node("ReduceMean", ["picked"], ["mean"], name="mean", keepdims=0),
        helper.make_node("Neg", ["mean"], ["loss"], name="loss"),
    ]
    weights = {"w0": normal(0, WIDTH, WIDTH) / 8, "w1": normal(1, WIDTH, WORDS) / 8}
    made = networks.model_of(nodes, {"x": [ROWS, WIDTH]}, {"loss": []}, **weights)
    made.graph.input.append(helper.make_tensor_value_info("labels", onnx.TensorProto.INT64, [ROWS, 1]))
    return made


@cache
def table() -> onnx.ModelProto:
    """Few rows of a large table: its update takes more than all else."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="head", domain=""),
        helper.make_node("ReduceSumSquare", ["a"], ["loss"], name="loss", keepdims=0),
    ]
    return networks.model_of(nodes, {"x": [4, 4096]}, {"loss": []}, w=normal(0, 4096, 128) / 64)


def plan(model: onnx.ModelProto, **options: Any) -> memonger.Plan:
    given = {"loss": "loss", "optimizer": memonger.AdamW(0.01), "max_overhead": 1e9, "device": "cpu", "threads": 1}
    return memonger.search_plan(model, **{**given, **options})


@cache
def planned(name: str, chunks: str = "auto") -> memonger.Plan:
    return plan({"scores": scores, "table": table}[name](), chunks=chunks)


def feeds(name: str, seed: int = 3) -> dict[str, np.ndarray]:
    if name == "table":
        return {"x": normal(seed, 4, 4096)}
    labels = np.random.default_rng(seed).integers(0, WORDS, (ROWS, 1))
    return {"x": normal(seed, ROWS, WIDTH), "labels": labels}


def bits(trainer: memonger.TrainingSession) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in trainer.state_dict().items()}


@pytest.mark.parametrize(("name", "share"), [("scores", 0.6), ("table", 0.6)])
def test_steps_in_chunks_are_whole_steps_to_the_bit_in_less_memory(name: str, share: float, tmp_path: Path) -> None:
    made, whole = planned(name), planned(name, "off")
    assert made.chunks
    assert made.total_bytes - made.parameter_bytes < share * (whole.total_bytes - whole.parameter_bytes)
    made.save(tmp_path / "plan.onnx")
    loaded = memonger.Plan.load(tmp_path / "plan.onnx")
    assert loaded.graph.updates == made.graph.updates
    trainers = [memonger.TrainingSession(one) for one in (whole, made, loaded)]
    for seed in (3, 4, 5):
        losses = {trainer.step(feeds(name, seed)) for trainer in trainers}
        assert len(losses) == 1
    assert bits(trainers[0]) == bits(trainers[1]) == bits(trainers[2])


def test_what_is_dead_is_not_read() -> None:
    made, weights = planned("scores"), {v.name: onnx.numpy_helper.to_array(v) for v in scores().graph.initializer}
    roles = made.training
    assert roles is not None
    state = {name: np.zeros_like(weights[name.split(".")[0]]) for name in roles.state}
    scalars = {"learning_rate": np.float32(0.01), "step": np.int64(0)}
    given = {roles.scalars[role]: np.asarray(number) for role, number in scalars.items()}
    found = run_poisoned(made, {**feeds("scores"), **weights, **state, **given})
    trainer = memonger.TrainingSession(planned("scores", "off"))
    loss = trainer.step(feeds("scores"), learning_rate=0.01)
    assert found["loss"] == np.float32(loss)
    assert all(found[roles.updates[name]].tobytes() == content for name, content in bits(trainer).items())


def test_a_loss_that_is_not_finite_changes_no_bit() -> None:
    trainer = memonger.TrainingSession(planned("table"))
    trainer.step(feeds("table"))
    before = bits(trainer)
    bad = feeds("table")
    bad["x"][1, 7] = np.nan
    assert not np.isfinite(trainer.step(bad))
    assert bits(trainer) == before


def test_parts_of_a_parameter_are_updated_where_it_lies() -> None:
    """Neither they nor the whole have an address in the arena, and nothing reads it once a part is overwritten."""
    made = planned("table")
    graph, roles = made.graph, made.training
    assert roles is not None
    values = {name: number for number, name in enumerate(graph.values)}
    assert not {values[new] for new in roles.updates.values()}.intersection(made.offsets)
    steps = [step for step, pairs in enumerate(graph.updates) if pairs]
    assert len(steps) > 2 * len(roles.updates)
    for name in ("w", graph.values[graph.updates[steps[0]][0][0]]):  # the whole, and the part that is written over
        reads = list(graph.reads)
        reads[steps[-1]] = (*reads[steps[-1]], values[name])
        with pytest.raises(VerificationError, match="has overwritten"):
            verify(dataclasses.replace(graph, reads=tuple(reads)), made.offsets, made.arena_bytes, made.alignment)


def test_products_are_summed_up_over_as_many_elements_as_a_whole_one_is() -> None:
    """onnxruntime adds 128 products at a time to the result: so the bits are the same."""
    whole = planned("scores", "off")
    order, _, ranges = regions_of(whole.model, whole.graph, {})
    summed = [part for part in ranges if part.stride]
    assert summed
    assert all(bound % 128 == 0 for part in summed for level in part.levels for bound in level)
    assert sorted(order) == list(range(len(whole.graph.nodes)))


def test_chunks_and_recomputation_share_a_budget() -> None:
    whole = planned("scores", "off")
    base = whole.parameter_bytes + whole.input_bytes
    budget = base + (whole.total_bytes - base) * 6 // 10
    made = plan(scores(), budget=budget, effort=100)
    assert made.total_bytes <= budget
    assert made.chunks
    with pytest.raises(memonger.BudgetError) as error:
        plan(scores(), budget=base + 1000, effort=100)
    assert plan(scores(), budget=error.value.smallest, effort=100).total_bytes <= error.value.smallest


@pytest.mark.parametrize("name", ["scores", "table"])
@pytest.mark.parametrize("search", ["finds nothing", "finds something dearer"])
def test_what_no_budget_gives_is_taken_where_the_search_does_worse(
    name: str, search: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How chunks are found hangs on the budget: nodes that gave other bits in slices too fine stay whole in all."""
    model = {"scores": scores, "table": table}[name]()
    usual = planned(name)
    tried = []

    def worse(step: StepSearch, plain: Any, sliced: Any, budget: int) -> list[Any]:
        tried.append(budget)
        if search == "finds nothing":
            return []
        monkeypatch.setattr(StepSearch, "total", lambda self, one: budget if one is plain else total(self, one))
        monkeypatch.setattr(StepSearch, "cost", lambda self, one: 2.0 if one is plain else 1.0)
        return [plain]

    total = StepSearch.total
    monkeypatch.setattr(StepSearch, "_searched", worse)
    found = plan(model, budget=usual.total_bytes)
    assert tried == [usual.total_bytes]
    assert found.total_bytes == usual.total_bytes
    assert (found.graph.nodes, found.offsets) == (usual.graph.nodes, usual.offsets)
    if (name, search) == ("scores", "finds nothing"):  # how chunks are refused doesn't hang on what they are of
        monkeypatch.setattr(StepSearch, "total", lambda self, one: usual.total_bytes + 1)
        with pytest.raises(memonger.BudgetError):
            plan(model, budget=usual.total_bytes)
