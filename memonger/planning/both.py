"""A training step within a budget: by chunks, recomputation, or both, whichever holds it in the least time."""

import dataclasses
import math
from collections.abc import Callable
from contextlib import suppress

from memonger.devices import Device
from memonger.errors import BudgetError
from memonger.lowering.lowered import Lowered
from memonger.planning import chunking
from memonger.planning.chunking import Chunking
from memonger.planning.decide import Budgets, Solution, decide, orders_of, total_bytes
from memonger.planning.options import Options
from memonger.remat import Request

MINOR = 0.25
"""Part of the missing bytes below which chunks are looked at only where recomputation can't hold the budget."""

ATTEMPTS = 3
"""Budgets of which a schedule with recomputations is then cut into chunks."""


Way = Solution | Chunking


def seconds_of(one: Way, once: float) -> float:
    """About how long a way takes, of a model that takes so long with nothing recomputed."""
    return once + one.extra + one.recomputed if isinstance(one, Chunking) else one.cost


def for_budget(
    lowered: Lowered,
    request: Request,
    options: Options,
    device: Device,
    strategy: str,
    time_ratio: Callable[[Way, Way], float],
) -> Way:
    """Of the ways that hold the budget the one that takes least time.

    Chunks that cost next to nothing are taken before anything is recomputed. Else recomputing alone is looked at, and
    chunks of what was recomputed for larger budgets: of each kind the one that is estimated to take least, and of these
    two the faster one.

    Args:
        lowered: The training step.
        request: With the budget.
        options: How to plan.
        device: The plan's.
        strategy: What decides what is recomputed.
        time_ratio: Measures the time that the second way takes, as a multiple of the first one's.

    Raises:
        BudgetError: none was found. Planning succeeds with the budget that the error names.
        PlanError: see `memonger.planning.chunking.choose`.
    """
    assert request.budget is not None
    search = _Search(lowered, request, options, device, strategy)
    plain = search.budgets.plain
    if total_bytes(request, plain) <= request.budget:
        return plain
    way = search.chunked(plain)
    is_cheap = way is not None and search.fits(way) and way.extra <= options.max_overhead * search.once
    if way is not None and is_cheap and time_ratio(plain, way) - 1 <= options.max_overhead:
        return way
    if way is None:  # it can't run in chunks
        return search.budgets.cheapest(request.budget)
    if search.is_minor(plain, way):
        with suppress(BudgetError):
            return search.budgets.cheapest(request.budget)
    ways: list[Way] = [way, search.recomputed(request.budget)]
    ways += search.both(plain, way, ways)
    fitting = [one for one in ways if search.fits(one)]
    if not fitting:
        raise BudgetError(request.budget, min(map(search.total, ways)), request.base)
    best = {type(one): one for one in sorted(fitting, key=lambda one: (-search.cost(one), -search.total(one)))}
    first, *others = sorted(best.values(), key=lambda one: isinstance(one, Chunking))
    return others[0] if others and time_ratio(first, others[0]) < 1 else first


class _Search:
    """What all ways of one training step have in common."""

    def __init__(self, lowered: Lowered, request: Request, options: Options, device: Device, strategy: str) -> None:
        self.lowered, self.request, self.options, self.device = lowered, request, options, device
        self.budgets = Budgets(request, strategy, orders_of(options.order, len(request.graph.nodes)))
        self.once = math.fsum(request.graph.costs)

    def total(self, one: Way) -> int:
        """What has to fit."""
        return self.request.base + one.total if isinstance(one, Chunking) else total_bytes(self.request, one)

    def fits(self, one: Way) -> bool:
        """Whether it holds the budget."""
        return self.total(one) <= (self.request.budget or 0)

    def is_minor(self, plain: Solution, way: Chunking) -> bool:
        """Whether chunks take off so little of what is too much that they don't pay a search beside recomputation."""
        missing = self.total(plain) - (self.request.budget or 0)
        return self.total(plain) - self.total(way) < MINOR * missing

    def cost(self, one: Way) -> float:
        """Estimated seconds beyond those of nothing recomputed."""
        return seconds_of(one, self.once) - self.once

    def recomputed(self, budget: int) -> Solution:
        """The cheapest schedule within a budget, or else the smallest."""
        try:
            return self.budgets.cheapest(budget)
        except BudgetError:
            return self.budgets.least()

    def chunked(self, solution: Solution) -> Chunking | None:
        """A schedule in chunks: the cheapest that fit, or the smallest."""
        return chunking.choose(
            self.lowered, self.request, self.options, self.device, None, lambda _: math.inf, solution
        )

    def both(self, plain: Solution, way: Chunking, ways: list[Way]) -> list[Chunking]:
        """Chunks of schedules that were found for larger budgets, by about what chunks take off."""
        assert self.request.budget is not None
        budget, made = self.request.budget, list[Chunking]()
        target = budget + total_bytes(self.request, plain) - self.total(way)
        cheapest = min((self.cost(one) for one in ways if self.fits(one)), default=math.inf)
        for attempt in range(ATTEMPTS):
            solution = self.recomputed(target)
            if solution.cost - self.once >= cheapest:
                break
            tried = self.chunked(solution)
            if tried is None:
                break
            made.append(tried)
            if self.fits(tried):
                return made
            target -= (self.total(tried) - budget) << attempt
        if not any(map(self.fits, (*ways, *made))):
            made += filter(None, map(self.chunked, (self.swept(), self.budgets.least())))
        return made

    def swept(self) -> Solution:
        """The default's schedule without a budget: the worst step of what was searched may be one without slices."""
        return decide(dataclasses.replace(self.request, budget=None), "sweep", self.options.order)
