"""The largest size of a dimension that fits a memory where the model may run in chunks: what `fit` looks for last."""

import dataclasses
from dataclasses import dataclass, field

from memonger.errors import BudgetError, LoadError, PlanError
from memonger.plan import Plan
from memonger.planning.search_plan import Job, finish, in_chunks, solve
from memonger.planning.sizing import Beyond, Sizing
from memonger.units import MOST_BATCH


@dataclass(slots=True)
class InChunks:
    """Sizes planned as `memonger.search_plan` does with the memory as its budget.

    Attributes:
        sizing: The search without chunks, which is over.
        size: The largest size that fits.
        job: Of that size; None where it is the one found without chunks.
        beyond: What is known of one size more.
        tried: Every size that was planned, with its total, or the smallest found.
    """

    sizing: Sizing
    size: int = 0
    job: Job | None = None
    beyond: Beyond | None = None
    tried: dict[int, int] = field(default_factory=dict)

    def run(self) -> None:
        """Double the size that fits without chunks as long as that fits with them; then halve what is open."""
        sizing = self.sizing
        self.size = sizing.best.size if sizing.best is not None else 0
        assert sizing.smallest is not None
        high, size = MOST_BATCH + 1, 2 * self.size or sizing.smallest[0]
        while self.size < size < high:
            if self._fits(size):
                self.size = size
            else:
                high = size
            size = min(2 * self.size, high - 1) if high > MOST_BATCH else (self.size + high) // 2

    def _fits(self, size: int) -> bool:
        """Plan a size; its job is kept where it fits, else what is known of it."""
        sizing, total = self.sizing, None
        reason = sizing.too_large_to_measure(size)
        if reason is not None:
            self.beyond = Beyond(size, "refused", reason=reason)
            return False
        try:
            job = sizing.lower(size)
        except (LoadError, PlanError) as error:
            self.beyond = Beyond(size, "refused", reason=str(error))
            return False
        budget, base = sizing.memory if job.mode == "inference" else job.request.budget, job.request.base
        job = dataclasses.replace(job, request=dataclasses.replace(job.request, budget=budget))
        with sizing.course.doing("search", f"{sizing.vary} {size}: chunks"):
            try:
                job = in_chunks(job)
                solution = solve(job)
                total = job.request.base + solution.total_bytes
            except BudgetError as error:
                total = error.smallest
        self.tried[size] = total
        if total <= sizing.memory:
            self.job = dataclasses.replace(job, solution=solution)
            return True
        self.beyond = Beyond(size, "proven" if base > sizing.memory else "open", total, base)
        return False

    def plan(self) -> Plan | None:
        """The plan of the largest size; None where it is the one found without chunks."""
        if self.job is None:
            return None
        return finish(self.job, solve(self.job), self.sizing.begin)
