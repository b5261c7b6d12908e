"""A training step within a budget: by chunks, recomputation, or both, whichever holds it in the least time."""

import math
from contextlib import suppress
from functools import cached_property

from memonger.devices import Device
from memonger.errors import BudgetError
from memonger.lowering.lowered import Lowered
from memonger.options import Options
from memonger.schedule import Request
from memonger.schedule.decide import Budgets, Solution, orders_of, total_bytes
from memonger.tiling import chunk_times, chunking
from memonger.tiling.rewritten import InSlices

MINOR = 0.25
"""Part of the missing bytes below which chunks are looked at only where recomputation can't hold the budget."""

ATTEMPTS = 3
"""Budgets of which a schedule with recomputations is then cut into chunks."""


Way = Solution | chunking.Way


def for_budget(
    lowered: Lowered,
    request: Request,
    options: Options,
    device: Device,
    strategy: str,
) -> Way:
    """Of the ways that hold the budget the one that takes least time: what no budget gives is always among them.

    Chunks that cost next to nothing are taken before anything is recomputed. Else recomputing alone is looked at, and
    chunks of what was recomputed for larger budgets: the one that is estimated to take least.

    Args:
        lowered: The training step.
        request: With the budget.
        options: How to plan.
        device: The plan's.
        strategy: What decides what is recomputed.

    Raises:
        BudgetError: none was found. Planning succeeds with the budget that the error names.
        PlanError: see `memonger.tiling.chunking.choose`.
    """
    search = _WithinBudget(lowered, request, options, device, strategy)
    try:
        found = _searched(search, request.budget or 0)
    except BudgetError:
        if search.fits(search.usual):
            return search.usual
        raise
    cost = search.cost(found)
    if cost <= 0 or cost <= search.cost(search.budgets.usual) or not search.fits(search.usual):
        return found
    return min(found, search.usual, key=search.cost)


def _searched(search: "_WithinBudget", budget: int) -> Way:
    """The cheapest of the ways that are looked for within a budget.

    Raises:
        BudgetError: none was found.
    """
    plain = search.budgets.plain
    if search.total(plain) <= budget:
        return plain
    way = search.chunked(plain)
    if way is None:  # it can't run in chunks
        return search.budgets.cheapest(budget)
    if search.fits(way) and search.cost(way) <= search.options.max_overhead * search.once:
        return way
    if search.is_minor(plain, way):
        with suppress(BudgetError):
            return search.budgets.cheapest(budget)
    ways: list[Way] = [way, search.recomputed(budget)]
    ways += search.both(plain, way, ways)
    fitting = [one for one in ways if search.fits(one)]
    if not fitting:
        again: list[Way] = [way, search.budgets.least]  # what doesn't depend on times
        again += [search.least_in_chunks] if search.least_in_chunks else []
        raise BudgetError(budget, min(map(search.total, again)), search.request.base)
    return min(fitting, key=lambda one: (search.cost(one), search.total(one)))


class _WithinBudget:
    """What all ways of one training step have in common."""

    def __init__(self, lowered: Lowered, request: Request, options: Options, device: Device, strategy: str) -> None:
        self.lowered, self.request, self.options, self.device = lowered, request, options, device
        self.budgets = Budgets(request, strategy, orders_of(options.order, request.graph))
        self._searches: dict[tuple[int, ...], chunking.ChunkSearch] = {}
        self.once = math.fsum(request.graph.costs)
        cores = chunk_times.cores_of(options.threads)
        self.pace = self.once / chunk_times.seconds_of(lowered.model, request.live_bytes.tolist(), cores, True)

    def total(self, one: Way) -> int:
        """What has to fit."""
        return self.request.base + one.total if isinstance(one, InSlices) else total_bytes(self.request, one)

    def fits(self, one: Way) -> bool:
        """Whether it holds the budget."""
        return self.total(one) <= (self.request.budget or 0)

    def is_minor(self, plain: Solution, way: chunking.Way) -> bool:
        """Whether chunks take off so little of what is too much that they don't pay a search beside recomputation."""
        missing = self.total(plain) - (self.request.budget or 0)
        return self.total(plain) - self.total(way) < MINOR * missing

    def cost(self, one: Way) -> float:
        """Seconds beyond those of nothing recomputed: those of chunks are estimated, at the pace that was measured."""
        return one.extra * self.pace + one.recomputed if isinstance(one, InSlices) else one.cost - self.once

    def recomputed(self, budget: int) -> Solution:
        """The cheapest schedule within a budget, or else the smallest."""
        try:
            return self.budgets.cheapest(budget)
        except BudgetError:
            return self.budgets.least

    def chunked(self, solution: Solution) -> chunking.Way | None:
        """A schedule in chunks: the cheapest that fit, or the smallest."""
        assert self.request.budget is not None
        room = self.request.budget - self.request.base
        return None if solution.total_bytes <= room else self._chunks_of(solution).within(float(room))

    def _chunks_of(self, solution: Solution) -> chunking.ChunkSearch:
        """What looks for chunks of a schedule; of those that are looked at twice it is kept."""
        found = self._searches.get(solution.schedule)
        if found is None:
            found = chunking.search_of(self.lowered, self.request, self.options, self.device, None, solution)
        if any(solution is one for one in (self.budgets.plain, self.budgets.usual)):
            self._searches[solution.schedule] = found
        return found

    def both(self, plain: Solution, way: chunking.Way, ways: list[Way]) -> list[chunking.Way]:
        """Chunks of schedules that were found for larger budgets, by about what chunks take off."""
        assert self.request.budget is not None
        budget, made = self.request.budget, list[chunking.Way]()
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
            # the worst step of what was searched may be one without slices
            made += filter(None, (self.chunked(self.budgets.usual), self.least_in_chunks))
        return made

    @cached_property
    def least_in_chunks(self) -> chunking.Way | None:
        """Chunks of the smallest schedule."""
        return self.chunked(self.budgets.least)

    @cached_property
    def usual(self) -> Way:
        """What is planned where nobody gives a budget."""
        kept = self.budgets.usual
        return kept if kept.total_bytes <= chunking.SMALL else self._chunks_of(kept).quick() or kept
