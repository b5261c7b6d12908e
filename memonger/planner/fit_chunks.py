"""The largest size of a dimension that fits a memory where the model may run in chunks: what `fit` looks for last."""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from memonger.errors import BudgetError, LoadError, PlanError
from memonger.plan import Plan
from memonger.planner.schedules import largest
from memonger.planner.search_plan import Job, decided, finish
from memonger.planner.sizing import Beyond, Sizing
from memonger.schedule import Request
from memonger.schedule.decide import Solution, least_total, total_bytes
from memonger.units import MOST_BATCH

_TRUSTED = 3
"""Sizes too large that are told from what others take, before halves are tried."""


@dataclass(slots=True)
class InChunks:
    """Sizes planned as `memonger.search_plan` does with the memory as its budget.

    Attributes:
        sizing: The search without chunks, which is over.
        size: The largest size that fits.
        made: Of that size; None where it is the one found without chunks.
        bound: No plan of that size takes less; None where none fits.
        beyond: What is known of one size more.
        tried: Every size that was planned, with its total, or the smallest found.
    """

    sizing: Sizing
    size: int = 0
    made: tuple[Job, Solution] | None = None
    bound: int | None = None
    beyond: Beyond | None = None
    tried: dict[int, int] = field(default_factory=dict)

    def run(self) -> None:
        """Plan one size more than fits without chunks, then four times as much as long as that fits; then close in.

        What a size takes at least tells about how large one would fit, as what isn't weights grows with the size.
        """
        sizing = self.sizing
        assert sizing.smallest is not None
        if sizing.best is not None and sizing.best.job is not None:
            self.size, self.bound = sizing.best.size, least_total(sizing.best.job.request, whole=False)
        high, failures, step = self._ceiling(), 0, 1
        size = min(high - 1, max(self.size + 1, sizing.smallest[0]))
        while self.size < size < high:
            if self._fits(size):
                self.size, size, step = size, size + step if failures else 4 * size, 2 * step
            else:
                high, failures, step = size, failures + 1, 1
                size = self._scaled(size) if failures <= _TRUSTED else (self.size + high) // 2
            size = min(max(size, self.size + 1), high - 1)
        if high <= MOST_BATCH and (self.beyond is None or self.beyond.size != high) and self._fits(high):
            self.size, self.beyond = high, None

    def _ceiling(self) -> int:
        """The smallest size that is known not to fit, or not to be measurable here, without lowering the model."""
        family, sizing = self.sizing.family, self.sizing
        if family is None:
            return MOST_BATCH + 1

        def is_possible(size: int) -> bool:
            least = least_total(family.request(size), whole=False)
            return least <= sizing.memory and sizing.too_large_to_measure(size) is None

        low = max(self.size, family.sizes[-1])
        return largest(low, is_possible, MOST_BATCH) + 1 if is_possible(low) else MOST_BATCH + 1

    def _scaled(self, size: int) -> int:
        """About the largest size that fits, from the least that a larger one was found to take."""
        sizing, total = self.sizing, self.tried.get(size)
        if total is None or sizing.smallest is None:
            return (self.size + size) // 2
        fixed = sizing.smallest[1].base
        return size * max(0, sizing.memory - fixed) // max(1, total - fixed)

    def _fits(self, size: int) -> bool:
        """Plan a size; what was made is kept where it fits, else what is known of it."""
        sizing = self.sizing
        reason = sizing.too_large_to_measure(size)
        if reason is not None:
            self.beyond = Beyond(size, "refused", reason=reason)
            return False
        try:
            job = sizing.lower(size)
        except (LoadError, PlanError) as error:
            self.beyond = Beyond(size, "refused", reason=str(error))
            return False
        asked = self._asked(job)
        with sizing.course.doing("search", f"{sizing.vary} {size}: chunks"):
            try:
                made = decided(dataclasses.replace(job, request=asked))
                total = total_bytes(made[0].request, made[1])
            except BudgetError as error:
                total = error.smallest
        self.tried[size] = total
        bound = least_total(asked, whole=False)
        if total <= sizing.memory:
            self.made, self.bound = made, bound
            return True
        whole = least_total(asked, again=sizing.strategy != "none")
        status: Literal["proven", "open"] = "proven" if bound > sizing.memory else "open"
        self.beyond = Beyond(size, status, total, bound, max(bound, whole), asked.run_time or 0)
        return False

    def _asked(self, job: Job) -> Request:
        """What is asked of a size: inference in chunks takes a budget whatever decides what it recomputes."""
        budget = self.sizing.memory if job.mode == "inference" else job.request.budget
        return dataclasses.replace(job.request, budget=budget)

    def made_at(self, size: int) -> tuple[Job, Solution] | None:
        """A size that fits in chunks, planned; None where it doesn't."""
        if size == self.size and self.made is not None:
            return self.made
        try:
            job = self.sizing.lower(size)
            return decided(dataclasses.replace(job, request=self._asked(job)))
        except (LoadError, PlanError):
            return None

    def plan(self) -> Plan | None:
        """The plan of the largest size; None where it is the one found without chunks."""
        return None if self.made is None else finish(*self.made, self.sizing.begin)
