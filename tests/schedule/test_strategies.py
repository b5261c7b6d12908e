"""The registry of strategies: what every record promises holds for every strategy."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import onnx_ir as ir
import pytest

import memonger
import models
from memonger.errors import PlanError
from memonger.graph.graph import Graph
from memonger.ir import training_roles
from memonger.lowering.lowered import portable
from memonger.plan import graph_of
from memonger.schedule import STRATEGIES, Outcome, Request, Strategy
from memonger.schedule.marks import place
from memonger.schedule.problem import check
from tests.support.recompute_problems import chain

LAYERS = 12


def graph(op: str = "Relu") -> Graph:
    """A training chain; every value takes 1000 bytes, and the last gradient is the output."""
    problem = chain(LAYERS)
    n = problem.nodes
    names = tuple(f"n{node}" for node in range(n))
    return Graph(
        nodes=names, ops=(op,) * n, values=names, sizes=problem.sizes, planned=(True,) * n, reads=problem.reads,
        writes=problem.writes, outputs=(n - 1,),
        forward=problem.forward, costs=problem.costs, workspace=(0,) * n,
    )  # fmt: skip


def request_for(strategy: Strategy, op: str = "Relu", **settings: object) -> Request:
    request = Request(graph(op), alignment=1, effort=2000, time_limit=5, **settings)  # type: ignore[arg-type]
    return replace(request, budget=9000) if strategy.takes_budget else request


def outcome_of(strategy: Strategy, request: Request) -> Outcome:
    if strategy.name == "exact":
        pytest.importorskip("ortools")
    return strategy.run(request)


every = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))


@every
def test_a_strategy_is_listed_under_its_name_and_says_what_it_does(strategy: Strategy) -> None:
    assert STRATEGIES[strategy.name] is strategy
    assert strategy.help.endswith(".")
    assert "\n" not in strategy.help


@every
def test_every_schedule_is_valid(strategy: Strategy) -> None:
    outcome = outcome_of(strategy, request_for(strategy))
    check(chain(LAYERS), outcome.schedule)


@every
def test_strategies_that_take_a_budget_need_one(strategy: Strategy) -> None:
    if strategy.takes_budget:
        with pytest.raises(PlanError, match="needs a budget"):
            strategy.run(Request(graph()))


@every
def test_marks_to_recompute_are_heeded_or_not_as_the_record_says(strategy: Strategy) -> None:
    request = request_for(strategy, "Conv", forced={LAYERS - 1: True})  # no strategy recomputes the last one by itself
    assert (outcome_of(strategy, request).schedule.count(LAYERS - 1) > 1) == strategy.heeds_marks


@every
def test_marks_to_keep_are_always_heeded(strategy: Strategy) -> None:
    request = request_for(strategy, forced={3: False, 5: False})
    schedule = outcome_of(strategy, request).schedule
    assert schedule.count(3) == schedule.count(5) == 1


@every
def test_a_strategy_that_needs_a_model_does_nothing_for_a_graph_without_one(strategy: Strategy) -> None:
    if strategy.needs_model:
        bare = Request(graph("node"), alignment=1)
        assert strategy.run(bare).schedule == tuple(range(2 * LAYERS))


class _Folded(Request):
    """Needs more than its reduced problem says, as where what runs inside of folded nodes takes room."""

    def needed(self, schedule: Sequence[int]) -> int:
        return super().needed(schedule) + 700


def test_a_budget_is_held_where_the_reduced_problem_says_too_little() -> None:
    request = _Folded(graph(), alignment=1, effort=2000, budget=9000)
    schedule = STRATEGIES["budget"].run(request).schedule
    check(chain(LAYERS), schedule)
    assert request.needed(schedule) <= 9000
    assert Request(graph(), alignment=1, effort=2000, budget=9000).needed(schedule) > 9000 - 1700  # one value's bytes


@cache
def _deep() -> tuple[memonger.Model, ir.Model]:
    network = models.build_ir("resnet34", batch=32, training=True)
    step = memonger.differentiate(network, loss="loss", optimizer=memonger.SGD(lr=0.1))
    return step, portable(step).model


@pytest.mark.parametrize("is_marked", [True, False])
def test_running_statistics_do_not_keep_what_they_were_made_of(is_marked: bool) -> None:
    """They are updated after the loss, all in a row, and read a mean of every layer."""
    step, model = _deep()
    stages = place(step.ir, model, "resnet34").stages if is_marked else {}
    request = Request(graph_of(model, training_roles.read(model, "resnet34"), None, None), stages=stages)
    assert bool(stages) == is_marked
    kept, *lowered = (
        request.needed(STRATEGIES[name].run(request).schedule) for name in ("none", "sweep", "block", "sqrt", "log")
    )
    assert max(lowered) < 0.5 * kept
