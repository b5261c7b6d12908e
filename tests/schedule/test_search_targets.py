"""Targets of a search, until what is found holds the budget, beside trying every target there is; and what is kept."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memonger
from memonger.errors import BudgetError
from memonger.planner.search_plan import prepare
from memonger.schedule import budget as budgets
from memonger.schedule.budget import ATTEMPTS, Allocated, cheapest_within
from memonger.schedule.decide import decide
from memonger.schedule.recompute import Budgets
from memonger.schedule.strategy import Request
from tests.support.planning_models import LOSS, chain

Way = tuple[int, int, int]
"""Bytes that the search counts, bytes that are needed, and the cost."""


class Searched:
    """A search among some ways, which notes its targets."""

    def __init__(self, ways: list[Way]) -> None:
        self.ways, self.targets = ways, list[int]()

    def __call__(self, target: int, attempt: int) -> tuple[int, list[Way]]:
        assert attempt == len(self.targets)
        self.targets.append(target)
        within = sorted((way for way in self.ways if way[0] <= target), key=lambda way: way[2])[:2] or [min(self.ways)]
        return within[0][0], within


def allocated(way: Way) -> Allocated[Way]:
    return Allocated(way[1], way[2], way)


def ways_with_gaps(seed: int, gap: int, spread: int) -> list[Way]:
    """The fewer bytes are counted, the dearer; all need ``gap`` more and up to ``spread`` beyond."""
    rng = random.Random(seed)
    counted = sorted(rng.sample(range(100, 1000), 30))
    return [(each, each + gap + rng.randint(0, spread), 1000 - each) for each in counted]


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(-80, 200), st.sampled_from([0, 20, 200]), st.integers(50, 1200))
def test_what_is_returned_fits_and_nothing_is_given_up_that_the_least_holds(
    seed: int, gap: int, spread: int, budget: int
) -> None:
    searched = Searched(ways_with_gaps(seed, gap, spread))
    found = cheapest_within(budget, searched, allocated)
    assert len(searched.targets) <= ATTEMPTS
    fitting = [each for each in searched.ways if each[1] <= budget]
    if found is None:
        assert min(searched.ways)[1] > budget
        assert len(searched.targets) <= 3
    else:
        assert found.item in fitting
        assert found.cost <= min(searched.ways)[2]


def test_where_all_need_as_much_more_the_cheapest_is_mostly_found() -> None:
    best = 0
    for seed in range(200):
        searched = Searched(ways_with_gaps(seed, gap=90, spread=0))
        fitting = [each for each in searched.ways if each[1] <= 600]
        found = cheapest_within(600, searched, allocated)
        best += found is not None and found.item == min(fitting, key=lambda each: each[2])
    assert best >= 170


def test_proposals_that_cost_too_much_end_the_search() -> None:
    """What proposes nothing is asked no more, and from another start than the budget the first target is that."""
    targets = list[int]()

    def propose(target: int, attempt: int) -> tuple[int, list[Way]]:
        targets.append(target)
        return target, [(target, 700, 1)] if not attempt else []

    assert cheapest_within(600, propose, allocated, start=900, attempts=3) is None
    assert targets == [900, 0]


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The targets of all searches of reduced problems from now on."""
    targets, search = list[int](), budgets.search

    def counted(problem, target, **settings):  # type: ignore[no-untyped-def]
        targets.append(target)
        return search(problem, target, **settings)

    monkeypatch.setattr(budgets, "search", counted)
    return targets


def _request(mode: str) -> Request:
    options = {"loss": LOSS} if mode == "training" else {}
    asked = memonger.Options(mode=mode, device="none", effort=1000, **options)
    return prepare(chain(), asked, times=True).request


def test_below_a_budget_that_was_refused_nothing_is_searched(searches: list[int]) -> None:
    found = Budgets(_request("training"), "budget", ["file"])
    smallest = found.total(found.smallest)
    assert len(searches) == 1
    for budget in (smallest - 1, smallest - 2, 0, smallest - 1):
        assert found.within(budget) is None
    assert len(searches) <= 3
    held = found.within(smallest)
    assert held is not None
    assert found.total(held) <= smallest
    tried = len(searches)
    assert found.within(smallest) is held
    assert len(searches) == tried


def test_inference_below_the_bound_is_refused_without_a_search(searches: list[int]) -> None:
    request = _request("inference")
    plain = request.base + decide(request, "none", "best").total_bytes
    with pytest.raises(BudgetError) as refused:
        decide(replace(request, budget=plain - 1), "budget", "best")
    assert refused.value.lower_bound == refused.value.smallest == plain
    assert not searches
