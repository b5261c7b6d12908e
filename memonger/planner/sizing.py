"""The search for the largest size of a dimension with which a model fits a memory.

The model is lowered at a few small sizes, and between and beyond them its sizes in bytes are interpolated
(`memonger.planner.family`). Schedules are searched and tried there (`memonger.planner.schedules`). What is answered
was planned from the model itself, lowered at that size and at one more.
"""

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from memonger.errors import BudgetError, LoadError, PlanError
from memonger.graph.liveness import assign_storage, needed_bytes
from memonger.ir import training_roles
from memonger.ir.model import Model
from memonger.model.load import Source
from memonger.option_names import Mode, Strategy
from memonger.options import Options
from memonger.plan import Plan, parameter_bytes
from memonger.planner.at_size import Changes, lower
from memonger.planner.course import Course
from memonger.planner.dimension import open_dimension
from memonger.planner.family import Family
from memonger.planner.schedules import Schedules, largest
from memonger.planner.search_plan import Job, device_of, finish, may_run_in_chunks, rehearsed
from memonger.schedule import STRATEGIES, Request
from memonger.schedule.decide import BOUND_EFFORT, Solution, decide, least_total, orders_of, total_bytes
from memonger.units import MOST_BATCH, format_size, in_full
from memonger.words import option

_FIRST = 4096
"""The model's smallest size is looked for up to this one."""

_SAMPLED = 64
"""Sizes up to this one are lowered to find a family."""

_SEARCHES = 6
"""Searches on the family, each at a larger size than the one before."""

_TRUSTED = 3
"""Sizes that the family told and that don't fit, before halves are tried."""

_USUAL = {"lower": 6, "search": 4}
"""How often each kind of step is done for an answer."""


@dataclass(frozen=True, slots=True)
class Beyond:
    """What is known of the smallest size that wasn't found to fit.

    Attributes:
        size: The size.
        status: ``proven``: it doesn't fit, whatever the schedule. ``open``: no plan that fits was found. ``refused``:
            the model can't have this size, or this machine can't measure it, whatever the memory.
        total_bytes: The smallest total of a plan that was found; None if refused.
        lower_bound_bytes: No plan of this size takes less, under the switches that `Fit.bound_holds_for` names; None if
            refused. What the inputs decide the size of isn't in it.
        whole_bound_bytes: No plan without chunks takes less; None if refused, or where no plan of the model can run in
            chunks, or none was to.
        run_time_bytes: Of ``total_bytes`` what the inputs decide, as a run showed it.
        reason: Why it is refused, in words.
    """

    size: int
    status: Literal["proven", "open", "refused"]
    total_bytes: int | None = None
    lower_bound_bytes: int | None = None
    whole_bound_bytes: int | None = None
    run_time_bytes: int = 0
    reason: str = ""


@dataclass(slots=True)
class Attempt:
    """One size, planned from the model itself.

    Attributes:
        size: The size.
        total: Of the plan that fits, or the smallest found; None if the model can't have this size.
        bound: No plan takes less; None likewise.
        job: The lowered model, and ``solution``, its plan that fits; None where there is none, or where it isn't needed
            any more.
        beyond: What is known if no plan fits.
    """

    size: int
    total: int | None = None
    bound: int | None = None
    job: Job | None = None
    solution: Solution | None = None
    beyond: Beyond | None = None

    @property
    def fits(self) -> bool:
        """Whether a plan that fits was found."""
        return self.beyond is None


class Sizing:
    """One search. `run` fills ``attempts``, from which all else is read.

    Args:
        source: What `memonger.load` takes.
        memory: Bytes for everything.
        vary: The dimension's name.
        changes: What is done to the model before it is planned.
        options: The options of the plan.
    """

    def __init__(self, source: Source | Model, memory: int, vary: str, changes: Changes, options: Options) -> None:
        self.source, self.memory, self.vary, self.changes = source, memory, vary, changes
        self.begin, self.course = time.perf_counter(), Course(options.progress, _USUAL)
        self.dimension = open_dimension(source, vary, options)
        self.strategy: Strategy = options.strategy or "budget"
        budget = memory if STRATEGIES[self.strategy].takes_budget else None
        self.options = dataclasses.replace(
            options, strategy=self.strategy, budget=budget, device=str(device_of(options.device))
        )
        self.mode: Mode | None = None
        self.chunks = False  # whether plans may run in chunks
        self.smallest: tuple[int, Request] | None = None
        self.orders: list[str] = []
        self.schedules: Schedules | None = None
        self.family: Family | None = None
        self.samples: dict[int, Request] = {}
        self.followed = False
        self.failed: set[int] = set()  # sizes for which a search on the family found nothing
        self.attempts: dict[int, Attempt] = {}

    @property
    def searches(self) -> bool:
        """Whether schedules of the family are searched; else the strategy gives one at each size."""
        return self.strategy == "budget" and not (self.smallest and self.smallest[1].recomputes_marked)

    def run(self) -> None:
        """Look for the largest size that fits."""
        first = self._first()
        if first.fits:
            self._find_family(first.size)
            self._settle(first.size)

    @property
    def best(self) -> Attempt | None:
        """The largest size that fits, of all that were planned."""
        return max((each for each in self.attempts.values() if each.fits), key=lambda each: each.size, default=None)

    @property
    def beyond(self) -> Beyond | None:
        """What is known of the smallest size above that; None if there is none."""
        low = self.best.size if self.best else 0
        above = [each.beyond for each in self.attempts.values() if each.beyond and each.size > low]
        return min(above, key=lambda beyond: beyond.size, default=None)

    def lower(self, size: int) -> Job:
        """The model lowered at a size."""
        with self.course.doing("lower", f"{self.vary} {size}: lowering"):
            job = lower(self.source, self.dimension, size, self.options, self.changes)
            return rehearsed(job, self.begin) if job.is_uncalibrated else job

    # Estimates, of the family

    def _first(self) -> Attempt:
        """The smallest size that the model can have, planned."""
        size, complaint = 1, None
        while size <= _FIRST:
            try:
                job = self.lower(size)
                break
            except (LoadError, PlanError) as error:
                complaint, size = complaint or error, size * 2
        else:
            assert complaint is not None
            raise complaint
        self._check_weights(job)
        self.mode, self.smallest = job.mode, (size, job.request)
        self.chunks = self.options.chunks != "off" and may_run_in_chunks(job)
        self.orders = orders_of(self.options.order, job.request.graph)
        self.samples[size] = job.request
        self.attempts[size] = self._planned(size, job)
        return self.attempts[size]

    def _check_weights(self, job: Job) -> None:
        roles = training_roles.read(job.lowered.model, job.source.name)
        weights = parameter_bytes(job.lowered.model, roles)
        if weights > self.memory:
            what = "weights" if job.mode == "inference" else "parameters with what training keeps of them"
            raise PlanError(
                f"{job.source.name}: its {what} alone take {in_full(weights)}, more than the memory of "
                f"{in_full(self.memory)}: it fits at no {self.vary}."
            )

    def _find_family(self, first: int) -> None:
        """Lower at growing sizes until three in a row have one structure."""
        size = first * 2
        while size <= max(_SAMPLED, 4 * first) and self.family is None and self.too_large_to_measure(size) is None:
            try:
                self._sample(size, self.lower(size).request)
            except (LoadError, PlanError):
                return
            size *= 2

    def _sample(self, size: int, request: Request) -> None:
        """Learn from a size at which the model was lowered; the family follows the largest sizes."""
        self.samples[size] = request
        family = Family.of(self.samples)
        if family is None:
            return
        if self.family is None or family.structure != self.family.structure:
            self.schedules = Schedules(self.memory, self.orders, self.options.effort)
            self.schedules.add_plain(request)
        self.family = family

    def _estimate(self, low: int, high: int = MOST_BATCH) -> int:
        """The largest size up to ``high`` that fits as far as the family tells, from ``low``, which does."""
        if self.family is None or self.schedules is None:
            return low
        if not self.searches:
            return largest(low, self._strategy_fits, high)
        at, reach = self.family.request, self.schedules.reach
        best = reach(low, at, high)
        if best == high or self._bound(at(best + 1)) > self.memory:
            return best
        high = largest(best, self._may_fit, high)
        self.schedules.add_swept(at(high))
        best, target = reach(best, at, high), high
        for _ in range(_SEARCHES):
            if best == high or best + 1 in self.failed:
                break
            with self.course.doing("search", f"{self.vary} {target}: searching, {best} fits") as tell:
                self.schedules.search(at(target), tell)
            reached = reach(best, at, high)
            if reached == best and target == best + 1:
                self.failed.add(target)
            best, target = reached, min(high, reached + max(1, reached // 16) if reached > best else reached + 1)
        return best

    def _strategy_fits(self, size: int) -> bool:
        assert self.family is not None
        return self._by_strategy(self.family.request(size))[1] <= self.memory

    def _may_fit(self, size: int) -> bool:
        assert self.family is not None
        return self._bound(self.family.request(size), effort=0) <= self.memory

    def _bound(self, request: Request, effort: int = BOUND_EFFORT) -> int:
        return least_total(request, again=self.strategy != "none", effort=effort)

    # Sizes planned from the model itself

    def _settle(self, low: int) -> None:
        """Plan at the size that the family tells, and around it, until a size fits and one more doesn't."""
        high, step, failures = MOST_BATCH + 1, 1, 0
        size = max(low + 1, self._estimate(low))
        while high - low > 1:
            attempt = self.attempt(size)
            low, high = (size, high) if attempt.fits else (low, size)
            failures += not attempt.fits
            trusted = failures <= _TRUSTED and (attempt.beyond is None or attempt.beyond.status != "refused")
            guess = self._again(low, high - 1) if trusted else None
            if guess is not None:
                size = max(low + 1, guess)
            elif high > MOST_BATCH:
                size, step = low + step, step * 2
            else:
                size = (low + high) // 2

    def _again(self, low: int, high: int) -> int | None:
        """What the family tells of sizes from ``low`` to ``high``, now that more is known of it; None if nothing."""
        if self.family is None or self.schedules is None or not self.searches:
            return None
        last = max(self.samples)
        if not self.family.has(self.samples[last].graph):
            return None
        self.schedules.untried.extend(self.schedules.found)
        return self.schedules.reach(low, self.family.request, high)

    def attempt(self, size: int) -> Attempt:
        """One size planned from the model itself. Only the largest that fits keeps its lowered model."""
        made = self.attempts.get(size)
        if made is None or (made.fits and made.job is None):
            made = self.attempts[size] = self._attempt(size)
        for each in self.attempts.values():
            if each is not made and each is not self.best:
                each.job = each.solution = None
        return made

    def _attempt(self, size: int) -> Attempt:
        reason = self.too_large_to_measure(size)
        if reason is None:
            try:
                job = self.lower(size)
                self._sample(size, job.request)
                self._follow(size, job.request)
                return self._planned(size, job)
            except (LoadError, PlanError) as error:
                reason = str(error)
        return Attempt(size, beyond=Beyond(size, "refused", reason=reason))

    def _follow(self, size: int, request: Request) -> None:
        """Where a size has another structure than the family's, look for the family of that, once."""
        if self.followed or self.family is None or self.family.has(request.graph):
            return
        self.followed = True
        for near in (size // 2, size * 3 // 4):
            if near > 0 and near not in self.samples:
                self._sample(near, self.lower(near).request)
        if self.family.has(request.graph) and self.best is not None:
            self._estimate(self.best.size)

    def _planned(self, size: int, job: Job) -> Attempt:
        bound = self._bound(job.request)
        solution, total = self._solved(size, job, bound)
        if solution is not None:
            return Attempt(size, total, bound, job, solution)
        run_time = job.request.run_time or 0
        beyond = Beyond(size, "proven" if bound > self.memory else "open", total, bound, run_time_bytes=run_time)
        return Attempt(size, total, bound, beyond=beyond)

    def _solved(self, size: int, job: Job, bound: int) -> tuple[Solution | None, int]:
        """A solution that fits, if one is found, and the smallest total that was."""
        request = job.request
        if not self.searches:
            return self._by_strategy(request)
        schedules = self._schedules_of(job)
        solution = schedules.fitting(request)
        hopeless = bound > self.memory or (schedules is self.schedules and size in self.failed)
        if solution is None and not hopeless:
            with self.course.doing("search", f"{self.vary} {size}: searching") as tell:
                schedules.search(request, tell)
            solution = schedules.fitting(request)
        return solution, total_bytes(request, solution or schedules.smallest(request))

    def _by_strategy(self, request: Request) -> tuple[Solution | None, int]:
        """What a strategy without a search of its own gives, if it fits, and its total."""
        try:
            solution = decide(request, self.strategy, self.options.order)
        except BudgetError as error:
            return None, error.smallest
        total = total_bytes(request, solution)
        return (solution if total <= self.memory else None), total

    def _schedules_of(self, job: Job) -> Schedules:
        """Those of the family, or of the job alone if it isn't one of them."""
        if self.family is not None and self.schedules is not None and self.family.has(job.request.graph):
            return self.schedules
        own = Schedules(self.memory, self.orders, self.options.effort)
        own.add_plain(job.request)
        if own.fitting(job.request) is None:
            own.add_swept(job.request)
        return own

    def too_large_to_measure(self, size: int) -> str | None:
        """Why a size can't be lowered here, if so: the calibrating run has no plan yet, and takes what it takes."""
        device = device_of(self.options.device)
        room = available_memory() if device.is_host and not device.facts.is_portable else None
        if room is None or self.smallest is None or (needs := self._unplanned(size)) <= room:
            return None
        return (
            f"measuring it on {device} takes a run without a plan, of about {format_size(needs)}, and this machine has "
            f"{format_size(room)} available. {option('device', 'none')} measures nothing."
        )

    def _unplanned(self, size: int) -> int:
        """About what a run at a size takes in the model's own order with nothing recomputed."""
        assert self.smallest is not None
        nearest, request = (size, self.family.request(size)) if self.family is not None else self.smallest
        needs = needed_bytes(request.graph, assign_storage(request.graph, request.sharing))
        return request.base + needs * size // nearest

    # What is made of it

    def plan(self, attempt: Attempt) -> Plan:
        """The plan of an attempt that fits. Its lowered model becomes the planned one."""
        assert attempt.job is not None
        plan = finish(attempt.job, self.cheaper(attempt), self.begin)
        if plan.total_bytes > self.memory:
            raise PlanError(f"{attempt.job.source.name}: its plan takes {plan.total_bytes} bytes, more than foreseen.")
        return plan

    def cheaper(self, attempt: Attempt) -> Solution:
        """The solution of an attempt that fits, or a cheaper one."""
        assert attempt.job is not None
        assert attempt.solution is not None
        if self.searches:
            with self.course.doing("search", f"{self.vary} {attempt.size} fits: searching for less extra cost") as tell:
                schedules = self._schedules_of(attempt.job)
                attempt.solution = schedules.cheaper(attempt.job.request, attempt.solution, tell)
                attempt.total = total_bytes(attempt.job.request, attempt.solution)
        return attempt.solution


def available_memory() -> int | None:
    """Bytes of memory that this machine could give a process now; None where the system doesn't tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None
