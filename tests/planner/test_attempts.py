"""What a budget is searched with: a budget above one that holds is held, whatever stays in files."""

import random
from functools import lru_cache
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from onnx import helper

import memonger
from memonger.options import Options
from memonger.planner import attempts
from memonger.planner.attempts import within
from memonger.planner.job import Job, decided
from memonger.planner.search_plan import prepare
from memonger.runtime import disk
from memonger.schedule.solution import Solution
from tests.support.networks import model_of
from tests.support.stock import normal


def _step(seed: int) -> memonger.Model:
    """Products with activations behind them and sums around some, and their updates: weights of 0.2 to 7 MiB."""
    drawn, nodes, weights, value = random.Random(seed), [], {}, "v0"
    rows, widths = (
        drawn.choice([256, 512, 1024]),
        [drawn.choice([128, 256, 384, 512]) for _ in range(drawn.randint(3, 6))],
    )
    widths.append(widths[0])
    latest = {widths[0]: value}
    for n, (read, made) in enumerate(pairwise(widths)):
        weights[f"w{n}"] = normal(n, read, made) / np.float32(read**0.5)
        nodes.append(helper.make_node("MatMul", [value, f"w{n}"], [f"p{n}"]))
        nodes.append(helper.make_node(drawn.choice(["Tanh", "Relu", "Sigmoid"]), [f"p{n}"], [f"t{n}"]))
        value = f"t{n}"
        if made in latest and drawn.random() < 0.6:
            nodes.append(helper.make_node("Add", [value, latest[made]], [f"s{n}"]))
            value = f"s{n}"
        latest[made] = value
    nodes.append(helper.make_node("Identity", [value], ["out"]))
    model = model_of(nodes, {"v0": [rows, widths[0]]}, {"out": [rows, widths[-1]]}, **weights)
    optimizer = drawn.choice([memonger.SGD(lr=0.01), memonger.AdamW(lr=0.01)])
    return memonger.differentiate(model, loss="mean_squared_error", optimizer=optimizer)


@lru_cache(1)
def _job(seed: int) -> Job:
    return prepare(_step(seed), Options(mode="training", device="cpu", threads=1, effort=20, budget=1, chunks="off"))


@pytest.mark.parametrize("values_in_files", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_a_budget_above_one_that_holds_is_held(
    seed: int, values_in_files: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not values_in_files:
        monkeypatch.setattr(disk, "seconds_a_byte", lambda folder: None)
    job = _job(seed)
    with pytest.raises(memonger.BudgetError) as refused:
        within(job.copy(), 0.0)
    smallest, whole = refused.value.smallest, job.request.needed(range(len(job.request.graph.nodes)))
    assert refused.value.lower_bound <= smallest <= whole
    for number in range(5):
        budget = smallest + (whole - smallest) * number // 4
        _, plan = within(job.at(budget).copy(), 0.0)
        assert plan.total_bytes <= budget
        assert plan.budget == budget


def test_a_refusal_is_said_after_what_holds_less_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for a budget may fail where one for less doesn't: it takes steps that lead nowhere."""
    monkeypatch.setattr(disk, "seconds_a_byte", lambda folder: None)
    job = _job(3)
    with pytest.raises(memonger.BudgetError) as refused:
        within(job.copy(), 0.0)
    smallest = refused.value.smallest
    budget = smallest + 4096

    def failing(asked: Job) -> tuple[Job, Solution]:
        if asked.request.budget in (budget, None):
            raise memonger.BudgetError(budget, 2 * budget, 0)
        return decided(asked)

    monkeypatch.setattr(attempts, "decided", failing)
    _, plan = within(job.at(budget).copy(), 0.0)
    assert plan.total_bytes <= smallest
    assert plan.budget == budget


def test_a_refusal_goes_on_with_what_plans_turn_out_to_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a search names may fail, as a window is larger than was counted: the plan says then what it needs."""
    monkeypatch.setattr(disk, "seconds_a_byte", lambda folder: None)
    job = _job(3)
    named, needed, whole = (attempts.least(job) + more for more in (1000, 2000, 9000))

    def searched(asked: Job, begin: float, refusals: list[memonger.BudgetError]) -> tuple[Job, SimpleNamespace] | None:
        budget = asked.options.budget_bytes
        assert budget is not None
        if budget >= needed:
            return asked, SimpleNamespace(total_bytes=needed)
        next_one = named if budget < named else needed
        refusals += [memonger.BudgetError(budget, size, 0) for size in (whole, next_one)]
        return None

    monkeypatch.setattr(attempts, "_fastest", searched)
    with pytest.raises(memonger.BudgetError) as refused:
        within(job.copy(), 0.0)
    assert refused.value.smallest == needed


def test_a_frontier_has_what_a_budget_below_weights_and_state_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "seconds_a_byte", lambda folder: None)
    with pytest.raises(memonger.BudgetError) as refused:
        within(_job(3).copy(), 0.0)
    budget, asked = refused.value.smallest, {"device": "cpu", "threads": 1, "effort": 20, "chunks": "off"}
    *whole, last = memonger.pareto(_step(3), budgets=[budget], **asked)
    assert all(plan.window is None and plan.total_bytes > budget for plan in whole)
    assert last.window is not None
    assert last.total_bytes <= budget
