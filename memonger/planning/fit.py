"""Whether a model fits a memory, and the largest size of one of its dimensions with which it does: `fit`.

The model is lowered at a few small sizes, and between and beyond them its sizes in bytes are interpolated
(`memonger.planning.family`). Schedules are searched and tried there (`memonger.planning.schedules`). What is answered was
planned from the model itself, lowered at that size and at one more.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Unpack

from memonger.autodiff.training_mode import to_training_mode
from memonger.errors import BudgetError, LoadError, PlanError
from memonger.model import training_roles
from memonger.model.emitter import collecting_later
from memonger.model.load import Source
from memonger.model.model import Model
from memonger.plan import Plan, parameter_bytes
from memonger.planning import search_plan as planner
from memonger.planning.decide import Solution, decide
from memonger.planning.dimension import Dimension, open_dimension
from memonger.planning.family import Family
from memonger.planning.names import Strategy
from memonger.planning.options import Keywords, Options, combine, in_bytes, takes_options
from memonger.planning.schedules import Schedules, total_bytes
from memonger.remat import STRATEGIES, Request
from memonger.remat.every_schedule import least_arena
from memonger.remat.orders import ORDERS
from memonger.units import MOST_BATCH, in_full

Status = Literal["proven", "open", "refused"]

_FIRST = 4096
"""The model's smallest size is looked for up to this one."""

_SAMPLED = 64
"""Sizes up to this one are lowered to find a family."""

_SEARCHES = 4
"""Searches on the family, each at a larger size than the one before."""


@dataclass(frozen=True, slots=True)
class Beyond:
    """What is known of the smallest size that wasn't found to fit.

    Attributes:
        size: The size.
        status: ``proven``: it doesn't fit, whatever the schedule. ``open``: no plan that fits was found. ``refused``:
            the model can't have this size, whatever the memory.
        total_bytes: The smallest total of a plan that was found; None if refused.
        lower_bound_bytes: No plan of this size takes less; None if refused.
        reason: Why it is refused, in words.
    """

    size: int
    status: Status
    total_bytes: int | None = None
    lower_bound_bytes: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Point:
    """A plan of one size within the memory.

    Attributes:
        size: The size.
        total_bytes: Its total.
        overhead: Cost of what is recomputed over the cost of one pass.
        seconds: Estimated time of one run; None where no device measured it.
        samples_per_second: The batch over ``seconds``; None where either isn't known.
    """

    size: int
    total_bytes: int
    overhead: float
    seconds: float | None = None
    samples_per_second: float | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Fit:
    """The largest size of a dimension with which a model fits a memory.

    Attributes:
        model: The model's name.
        memory: Bytes for everything: arena, workspace, parameters (of a training model with their state) and inputs.
        vary: The dimension: ``batch``, its name or its place.
        size: The largest size that was found to fit; 0 if none was.
        plan: The plan of that size; None if there is none.
        lower_bound_bytes: No plan of that size takes less, whatever its order and whatever it recomputes.
        beyond: What is known of one size more; of the smallest size if none fits; None if there is no larger size.
        tried: Every size that was planned from the model itself → the smallest total found.
        frontier: Plans of several sizes, the largest last.
        seconds: What all this took.
        strategy: What decided what is recomputed. With ``none`` the bounds are for plans that recompute nothing.
        source: Where the model came from.
        options: The options of the plan.
        train_mode: Whether BatchNormalization and Dropout were turned into training form first.
    """

    model: str
    memory: int
    vary: str
    size: int
    plan: Plan | None
    lower_bound_bytes: int | None
    beyond: Beyond | None
    tried: dict[int, int]
    frontier: tuple[Point, ...] = ()
    seconds: float
    strategy: Strategy
    source: Source | Model = field(repr=False)
    options: Options = field(repr=False)
    train_mode: bool = False

    @property
    def fits(self) -> bool:
        """Whether any size fits."""
        return self.plan is not None

    @property
    def total_bytes(self) -> int | None:
        """Total of the plan; see `Plan.total_bytes`."""
        return None if self.plan is None else self.plan.total_bytes

    @property
    def overhead(self) -> float | None:
        """The plan's extra cost: see `Plan.overhead`."""
        return None if self.plan is None else self.plan.overhead

    def save_certificate(self, path: str | Path, planned: str | Path | None) -> None:
        """Write what `memonger verify` needs to check this answer by itself.

        Args:
            path: The file to write.
            planned: Where the plan was saved; None if there is none, because nothing fits.

        Raises:
            PlanError: the model didn't come from a file, or an option can't be written down.
            PlanFileError: the planned file isn't this plan's.
        """
        from memonger.planning.certificate import write

        write(self, Path(path), None if planned is None else Path(planned))


@takes_options("budget")
def fit(
    source: Source | Model,
    memory: float | str = "8GiB",
    vary: str = "batch",
    *,
    train_mode: bool = False,
    frontier: int = 0,
    options: Options | None = None,
    **keywords: Unpack[Keywords],
) -> Fit:
    """The largest size of a dimension with which a model fits into a memory, with its plan.

    Args:
        source: What `memonger.load` takes, with a dimension that is open.
        memory: Bytes for everything, or a text such as ``8GiB``: arena, workspace, parameters, optimizer state, inputs.
        vary: ``batch``, or the name or place of another open dimension: ``seq``, ``x[1]``.
        train_mode: Turn BatchNormalization and Dropout into their training form first; see
            `memonger.to_training_mode`.
        frontier: How many sizes, up to the largest one, are planned for `Fit.frontier`.
        options: A record of options to start from; keywords given beside it replace its fields.
        keywords: The fields of `Options`.

    Raises:
        LoadError: the model can't be read, or another dimension has no size.
        PlanError: there is no such dimension, or it has a size; parameters alone take more than the memory; or as
            `memonger.search_plan`.
        RuntimeUnavailableError: the device isn't there.
        TypeError: a keyword is no option.
    """
    chosen = combine(options, keywords)
    if chosen.budget is not None:
        raise PlanError("fit takes the memory as its budget: leave budget out.")
    with collecting_later():
        return _Fitting(source, in_bytes("memory", memory), vary, train_mode, chosen).answer(frontier)


def lower(
    source: Source | Model, dimension: Dimension, size: int, options: Options, train_mode: bool
) -> "planner._Job":
    """The model with this size of the dimension, lowered for the search.

    Raises:
        LoadError, PlanError, RuntimeUnavailableError: as `memonger.search_plan`.
    """
    batch, dims = dimension.at(size, options)
    options = dataclasses.replace(options, batch=batch, dims=dims, progress=None)
    if train_mode:
        source = to_training_mode(source, batch=batch, dims=dims)
        options = dataclasses.replace(options, batch=None, dims=None)
    return planner._prepare(source, options)


def lower_bound(request: Request, *, recomputes: bool, **effort: int) -> int:
    """No plan has a smaller total: what is there at every step, the largest workspace, and the least arena.

    Args:
        request: The graph, what is there beside it, and what may share bytes.
        recomputes: Whether nodes may run more than once.
        effort: See `least_arena`.
    """
    graph = request.graph
    arena = least_arena(graph, request.sharing, again=recomputes, **effort)
    return request.base + max(graph.workspace, default=0) + arena


@dataclass(slots=True)
class _Attempt:
    """One size, planned from the model itself.

    Attributes:
        size: The size.
        job: The model lowered at this size; None where it can't be.
        solution: A plan that fits.
        beyond: What is known if there is none.
        bound: No plan takes less.
    """

    size: int
    job: "planner._Job | None" = None
    solution: Solution | None = None
    beyond: Beyond | None = None
    bound: int | None = None


class _Fitting:
    """The search for one answer."""

    def __init__(self, source: Source | Model, memory: int, vary: str, train_mode: bool, options: Options) -> None:
        self.source, self.memory, self.vary, self.train_mode = source, memory, vary, train_mode
        self.dimension = open_dimension(source, vary, options)
        strategy: Strategy = options.strategy or "budget"
        device = str(planner._device(options.device))
        self.options = dataclasses.replace(options, strategy=None, budget=None, device=device)
        self.strategy = strategy
        self.begin, self.course = time.perf_counter(), _Course(options.progress)
        names = list(ORDERS) if options.order == "best" else [options.order]
        self.schedules = Schedules(memory, names)
        self.family: Family | None = None
        self.failed: set[int] = set()  # sizes for which a search on the family found nothing
        self.attempts: dict[int, _Attempt] = {}

    @property
    def searches(self) -> bool:
        """Whether schedules are searched for the memory; else the strategy gives one whatever the memory."""
        return self.strategy == "budget"

    # What is lowered

    @functools.cache  # noqa: B019 - as long as the search
    def job(self, size: int) -> "planner._Job":
        """The model lowered at a size, with the memory as its budget."""
        with self.course.doing("lower", f"{self.vary} {size}: lowering"):
            job = lower(self.source, self.dimension, size, self.options, self.train_mode)
            return dataclasses.replace(
                job, strategy=self.strategy, request=dataclasses.replace(job.request, budget=self.memory)
            )

    # The answer

    def answer(self, frontier: int) -> Fit:
        """The answer, with so many points of the frontier."""
        first = self._first()
        if first.solution is not None:
            self._find_family(first.size)
            self._settle(first.size, self._estimate(first.size))
        best = max((each for each in self.attempts.values() if each.solution), key=lambda each: each.size, default=None)
        over = [each.beyond for each in self.attempts.values() if each.beyond and (not best or each.size > best.size)]
        points = () if best is None else self._frontier(best, frontier)
        return Fit(
            model=first.job.source.name if first.job else str(self.source),
            memory=self.memory,
            vary=self.vary,
            size=best.size if best else 0,
            plan=self._plan(best) if best else None,
            lower_bound_bytes=best.bound if best else None,
            beyond=min(over, key=lambda beyond: beyond.size, default=None),
            tried={size: total for size, each in sorted(self.attempts.items()) if (total := _total(each)) is not None},
            frontier=points,
            seconds=time.perf_counter() - self.begin,
            source=self.source,
            strategy=self.strategy,
            options=dataclasses.replace(self.options, mode=first.job.mode if first.job else None),
            train_mode=self.train_mode,
        )

    def _first(self) -> _Attempt:
        """The smallest size that the model can have, planned."""
        size, complaint = 1, None
        while size <= _FIRST:
            try:
                job = self.job(size)
                break
            except (LoadError, PlanError) as error:
                complaint, size = complaint or error, size * 2
        else:
            assert complaint is not None
            raise complaint
        self._check_weights(job)
        return self._attempt(size)

    def _check_weights(self, job: "planner._Job") -> None:
        roles = training_roles.read(job.lowered.model, job.source.name)
        weights = parameter_bytes(job.lowered.model, roles)
        if weights > self.memory:
            what = "weights" if roles is None else "parameters, gradients kept and optimizer state"
            raise PlanError(
                f"{job.source.name}: its {what} alone take {in_full(weights)}, more than the memory of "
                f"{in_full(self.memory)}: it fits at no size."
            )

    def _find_family(self, first: int) -> None:
        """Lower at growing sizes until three in a row have one structure."""
        requests, size = {first: self.job(first).request}, first * 2
        while size <= max(_SAMPLED, 4 * first) and (self.family is None):
            try:
                requests[size] = self.job(size).request
            except (LoadError, PlanError):
                return
            self.family, size = Family.of(requests), size * 2

    def _estimate(self, first: int) -> int:
        """The largest size that fits as far as the family tells, from ``first``, which does."""
        if self.family is None:
            return first + 1
        if not self.searches:
            return _largest(first, self._strategy_fits)
        self.schedules.add_plain(self.family.requests[-1])
        best = _largest(first, self._fits)
        if self._bound(self.family.request(best + 1)) > self.memory:
            return best
        high = _largest(best, self._may_fit)
        self.schedules.add_swept(self.family.request(high))
        best = _largest(best, self._fits, high)
        target = min(high, best + max(1, best // 4))
        for _ in range(_SEARCHES):
            if best >= high:
                break
            with self.course.doing("search", f"{self.vary} {target}: searching, {best} fits"):
                self.schedules.search(self.family.request(target), self.options.effort)
            found = _largest(best, self._fits, high)
            if found == best and target == best + 1:
                self.failed.add(target)
                break
            best, target = found, found + 1
        return best

    def _fits(self, size: int) -> bool:
        assert self.family is not None
        return self.schedules.fitting(self.family.request(size)) is not None

    def _strategy_fits(self, size: int) -> bool:
        assert self.family is not None
        request = dataclasses.replace(self.family.request(size), budget=None)
        return total_bytes(request, decide(request, self.strategy, self.options.order)) <= self.memory

    def _may_fit(self, size: int) -> bool:
        assert self.family is not None
        request = self.family.request(size)
        return self._bound(request, effort=0) <= self.memory

    def _bound(self, request: Request, **effort: int) -> int:
        return lower_bound(request, recomputes=self.strategy != "none", **effort)

    # Sizes planned from the model itself

    def _settle(self, low: int, guess: int) -> None:
        """Plan at the guess and around it until a size fits and one more doesn't."""
        high, step, size = MOST_BATCH + 1, 1, guess
        while high - low > 1:
            size = min(max(size, low + 1), high - 1)
            attempt = self._attempt(size)
            if attempt.solution is None:
                size, high = self._below(attempt, low, high), size
            elif high > MOST_BATCH:
                low, size, step = size, size + step, step * 2
            else:
                low, size = size, (size + high) // 2

    def _below(self, failed: _Attempt, low: int, high: int) -> int:
        """The size to try after one that failed: by the first one's total where that was above the memory, or halfway."""
        total = failed.beyond.total_bytes if failed.beyond else None
        if high <= MOST_BATCH or failed.job is None or total is None:
            return (low + failed.size) // 2
        return failed.size * self.memory // total

    def _attempt(self, size: int) -> _Attempt:
        if size not in self.attempts:
            self.attempts[size] = self._tried(size)
        return self.attempts[size]

    def _tried(self, size: int) -> _Attempt:
        try:
            job = self.job(size)
        except (LoadError, PlanError) as error:
            return _Attempt(size, beyond=Beyond(size, "refused", reason=str(error)))
        bound = self._bound(job.request)
        solution, total = self._solved(size, job, bound)
        if solution is not None:
            return _Attempt(size, job, solution, bound=bound)
        status: Status = "proven" if bound > self.memory else "open"
        return _Attempt(size, job, beyond=Beyond(size, status, total, bound), bound=bound)

    def _solved(self, size: int, job: "planner._Job", bound: int) -> tuple[Solution | None, int]:
        """A solution that fits, if one is found, and the smallest total that was."""
        request = job.request
        if not self.searches:
            return self._by_strategy(request)
        schedules = self._schedules_of(job)
        solution = schedules.fitting(request)
        hopeless = bound > self.memory or (schedules is self.schedules and size in self.failed)
        if solution is None and not hopeless:
            with self.course.doing("search", f"{self.vary} {size}: searching"):
                schedules.search(request, self.options.effort)
            solution = schedules.fitting(request)
        if solution is not None:
            return solution, total_bytes(request, solution)
        least = schedules.smallest(request)
        assert least is not None
        return None, total_bytes(request, least)

    def _by_strategy(self, request: Request) -> tuple[Solution | None, int]:
        takes_budget = STRATEGIES[self.strategy].takes_budget
        asked = request if takes_budget else dataclasses.replace(request, budget=None)
        try:
            solution = decide(asked, self.strategy, self.options.order)
        except BudgetError as error:
            return None, error.smallest
        total = total_bytes(request, solution)
        return (solution if total <= self.memory else None), total

    def _schedules_of(self, job: "planner._Job") -> Schedules:
        """Those of the family, or of the job alone if it isn't one of them."""
        if self.family is not None and self.family.has(job.request.graph):
            return self.schedules
        own = Schedules(self.memory, self.schedules.orders)
        own.add_plain(job.request)
        own.add_swept(job.request)
        return own

    # What is made of it

    def _plan(self, best: _Attempt) -> Plan:
        assert best.job is not None
        assert best.solution is not None
        solution, job = self._cheaper(best), best.job
        plan = planner._finish(job, solution, self.begin)
        if plan.total_bytes > self.memory:
            raise PlanError(f"{plan.model.graph.name}: the plan takes {plan.total_bytes} bytes, more than was counted.")
        return plan

    def _cheaper(self, attempt: _Attempt) -> Solution:
        assert attempt.job is not None
        assert attempt.solution is not None
        if not self.searches:
            return attempt.solution
        with self.course.doing("search", f"{self.vary} {attempt.size} fits: searching for less extra cost"):
            schedules = self._schedules_of(attempt.job)
            return schedules.cheaper(attempt.job.request, attempt.solution, self.options.effort)

    def _frontier(self, best: _Attempt, points: int) -> tuple[Point, ...]:
        sizes = sorted({max(1, best.size * (number + 1) // points) for number in range(points)})
        attempts = [self._attempt(size) for size in sizes]
        return tuple(self._point(each) for each in attempts if each.job is not None and each.solution is not None)

    def _point(self, attempt: _Attempt) -> Point:
        assert attempt.job is not None
        job, solution = attempt.job, self._cheaper(attempt)
        once, cost = sum(job.request.graph.costs), sum(solution.graph.costs)
        calibration = job.lowered.calibration
        seconds = cost if calibration is not None and calibration.seconds is not None else None
        batch = attempt.size if self.dimension.is_batch else self.options.batch
        return Point(
            attempt.size,
            total_bytes(job.request, solution),
            cost / once - 1 if once else 0.0,
            seconds,
            batch / seconds if batch and seconds else None,
        )


def _total(attempt: _Attempt) -> int | None:
    if attempt.solution is not None:
        assert attempt.job is not None
        return total_bytes(attempt.job.request, attempt.solution)
    return attempt.beyond.total_bytes if attempt.beyond is not None else None


def _largest(low: int, fits: Callable[[int], bool], high: int = MOST_BATCH) -> int:
    """The largest size from ``low``, which fits, to ``high``, as if all below one that fits did."""
    step = max(1, low)
    while low + step <= high and fits(low + step):
        low, step = low + step, step * 2
    high = min(high, low + step - 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


class _Course:
    """What is done, and about how long the rest takes, told to who asks for progress."""

    _USUAL = {"lower": 6, "search": 4}  # how often each is done for an answer

    def __init__(self, progress: Callable[[str], None] | None) -> None:
        self.progress = progress
        self.taken: dict[str, list[float]] = {kind: [] for kind in self._USUAL}

    @contextmanager
    def doing(self, kind: str, what: str) -> Iterator[None]:
        """Tell what begins now, and learn from how long it takes."""
        begin = time.perf_counter()
        if self.progress is not None:
            left = self._left()
            self.progress(f"fit: {what}" + (f", about {left:.0f} s left" if left >= 1 else ""))
        try:
            yield
        finally:
            self.taken[kind].append(time.perf_counter() - begin)

    def _left(self) -> float:
        """Seconds for what is still to do, if it is as often and takes as long as usual."""
        rest = 0.0
        for kind, taken in self.taken.items():
            if taken:
                rest += max(0, self._USUAL[kind] - len(taken)) * taken[-1]
        return rest


__all__ = ["Beyond", "Fit", "Point", "Status", "fit", "lower", "lower_bound"]
