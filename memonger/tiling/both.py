"""A training step within a budget: by chunks, recomputation, or both, whichever holds it in the least time."""

import math
from functools import cached_property

from memonger.devices import Device
from memonger.errors import BudgetError
from memonger.lowering.lowered import Lowered
from memonger.options import Options
from memonger.schedule import Request
from memonger.schedule.budget import Allocated, cheapest_within
from memonger.schedule.recompute import Budgets
from memonger.schedule.solution import Solution, orders_of, total_bytes
from memonger.tiling import chunk_times, chunking
from memonger.tiling.candidates import InSlices

MINOR = 0.25
"""Part of the missing bytes below which chunks are looked at only where recomputation can't hold the budget."""

ATTEMPTS = 3
"""Targets for schedules that are then cut into chunks."""

Candidate = Solution | InSlices


class StepSearch:
    """Candidates of one training step for any number of budgets: recomputed, in chunks, and both.

    Args:
        lowered: The training step.
        request: What is asked of it. Its own budget is not looked at.
        options: How to plan.
        device: The plan's.
        strategy: What decides what is recomputed.
    """

    def __init__(self, lowered: Lowered, request: Request, options: Options, device: Device, strategy: str) -> None:
        self.lowered, self.request, self.options, self.device = lowered, request, options, device
        self.budgets = Budgets(request, strategy, orders_of(options.order, request.graph))
        self.once = math.fsum(request.graph.costs)
        self._searches: dict[tuple[int, ...], chunking.ChunkSearch] = {}
        self._sliced: dict[tuple[tuple[int, ...], int], InSlices | None] = {}

    def total(self, candidate: Candidate) -> int:
        """What has to fit."""
        if isinstance(candidate, InSlices):
            return self.request.base + candidate.total
        return total_bytes(self.request, candidate)

    def cost(self, candidate: Candidate) -> float:
        """Seconds beyond those of nothing recomputed: those of chunks are estimated, at the pace that was measured."""
        if isinstance(candidate, InSlices):
            return candidate.extra * self._pace + candidate.recomputed
        return candidate.cost - self.once

    @cached_property
    def _pace(self) -> float:
        cores, live = chunk_times.cores_of(self.options.threads), self.request.live_bytes.tolist()
        return self.once / chunk_times.seconds_of(self.lowered.model, live, cores, True)

    @cached_property
    def usual(self) -> Candidate:
        """What is planned where nobody gives a budget."""
        kept = self.budgets.usual
        return kept if kept.total_bytes <= chunking.SMALL else self._chunks_of(kept).quick() or kept

    def cheapest(self, budget: int) -> Candidate:
        """Of the candidates that hold a budget the one that takes least time; one of them is what no budget gives.

        Chunks that cost next to nothing are taken before anything is recomputed. Else recomputing alone is looked at,
        and chunks of what was recomputed for larger budgets.

        Raises:
            BudgetError: none was found. Planning succeeds with the budget that the error names.
            PlanError: see `memonger.tiling.chunking.ChunkSearch.chosen`.
        """
        plain = self.budgets.plain
        if self.total(plain) <= budget:
            return plain
        sliced = self._in_chunks(plain, budget)
        found = self._searched(plain, sliced, budget)
        fitting = [one for one in found if self.total(one) <= budget]
        best = min(fitting, key=lambda one: (self.cost(one), self.total(one)), default=None)
        if best is not None and (self.cost(best) <= 0 or self.cost(best) <= self.cost(self.budgets.usual)):
            return best
        if self.total(self.usual) <= budget and (best is None or self.cost(self.usual) < self.cost(best)):
            return self.usual
        if best is not None:
            return best
        if sliced is None:
            return self.budgets.cheapest(budget)  # which raises
        least = self.budgets.smallest
        smallest = min(self.total(one) for one in (sliced, least, self._in_chunks(least, budget)) if one is not None)
        raise BudgetError(budget, smallest, self.request.base)

    def _searched(self, plain: Solution, sliced: InSlices | None, budget: int) -> list[Candidate]:
        """Candidates that are looked for within a budget, which may be above it."""
        free = self.options.max_overhead * self.once
        if sliced is not None and self.total(sliced) <= budget and self.cost(sliced) <= free:
            return [sliced]
        recomputed = self.budgets.within(budget)
        if sliced is None:  # it can't run in chunks
            return [] if recomputed is None else [recomputed]
        saved = self.total(plain) - self.total(sliced)
        if recomputed is not None and saved < MINOR * (self.total(plain) - budget):
            return [recomputed]
        found: list[Candidate] = [sliced, *([] if recomputed is None else [recomputed])]
        limit = min((self.cost(one) for one in found if self.total(one) <= budget), default=math.inf)

        def propose(target: int, _: int) -> tuple[int, list[Solution]]:
            solution = self.budgets.within(target) or self.budgets.smallest
            proposed = solution.cost - self.once < limit and self.total(solution) > budget
            return self.total(solution), [solution] if proposed else []

        def allocate(solution: Solution) -> Allocated[Candidate]:
            candidate = self._in_chunks(solution, budget) or solution
            return Allocated(self.total(candidate), self.cost(candidate), candidate)

        start = budget + saved  # about what chunks take off
        both = cheapest_within(budget, propose, allocate, start=start, attempts=ATTEMPTS)
        if both is not None:
            found.append(both.item)
        elif limit == math.inf:  # the worst step of what was searched may be one without slices
            found += filter(None, [self._in_chunks(self.budgets.usual, budget)])
        return found

    def _in_chunks(self, solution: Solution, budget: int) -> InSlices | None:
        """A schedule in chunks: the cheapest that fit, or the smallest; None where it can't run in chunks."""
        key = solution.schedule, budget
        if key not in self._sliced:
            self._sliced[key] = self._chunks_of(solution).within(float(budget - self.request.base))
        return self._sliced[key]

    def _chunks_of(self, solution: Solution) -> chunking.ChunkSearch:
        """What looks for chunks of a schedule; of those that are looked at for every budget it is kept."""
        found = self._searches.get(solution.schedule) or chunking.ChunkSearch(
            self.lowered, self.request, self.options, self.device, None, solution
        )
        if any(solution is one for one in (self.budgets.plain, self.budgets.usual)):
            self._searches[solution.schedule] = found
        return found
