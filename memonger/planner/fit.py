"""Whether a model fits a memory, and the largest size of one of its dimensions with which it does: `fit`.

The model is lowered at a few small sizes, and between and beyond them it is interpolated
(`memonger.planner.interpolate`). Schedules are searched and tried there: one that was found at a size is valid at all.
What is answered was planned from the model itself, lowered at that size and at one more. Where the model may run in
chunks, larger sizes are then planned as `memonger.search_plan` plans them; and where no size fits with all weights in
memory, all sizes are, with its means.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Unpack

import onnx_ir as ir

from memonger.errors import BudgetError, LoadError, PlanError
from memonger.graph import schedule
from memonger.graph.liveness import assign_storage, needed_bytes
from memonger.ir.emitter import collecting_later
from memonger.ir.model import Model
from memonger.ir.values import required_inputs
from memonger.lowering.growth import POINTS, GrownRuns, ran_nodes
from memonger.model.load import Source, load_as_is
from memonger.option_names import Mode, Strategy
from memonger.options import Keywords, Options, combine, takes_options
from memonger.plan import Plan, parameter_bytes
from memonger.planner.attempts import least, may_wait, with_window, within
from memonger.planner.changes import Changes
from memonger.planner.interpolate import Interpolation, Schedules, largest, structure
from memonger.planner.job import Job, decided, device_of, finish, may_run_in_chunks, with_search
from memonger.planner.search_plan import prepare
from memonger.runtime import process_memory
from memonger.schedule import STRATEGIES, Request
from memonger.schedule.decide import decide
from memonger.schedule.every_schedule import EFFORT as BOUND_EFFORT
from memonger.schedule.solution import Solution, orders_of, total_bytes, total_lower_bound
from memonger.units import MOST_BATCH, MOST_POINTS, GiB, format_size, in_bytes, in_full, whole
from memonger.words import NAME, SIZE, N, did_you_mean, either, option, quoted

DEFAULT_MEMORY = 8 * GiB

_FIRST = 4096
"""The model's smallest size is looked for up to this one."""

_SAMPLED = 64
"""Sizes up to this one are lowered to interpolate between."""

_SEARCHES = 6
"""Searches on interpolated sizes, each at a larger one than before."""

_RUN_SECONDS, _RUN_BYTES = 3.0, GiB
"""Once three sizes ran, larger ones run where that takes so many seconds at most, and so many bytes or the memory that
is asked for; of others the runs of those three tell."""

_COPIES = 8192
"""Copies of nodes that slices of one plan may make here: more let little more fit, and take minutes at each size."""

_NEAR = 64
"""In slices, sizes aren't looked at that are less than such a part of the largest that fits above it."""

_MEASURED = 4, 5
"""Of memory that the machine has available a size is measured that takes so many parts of so many: other programs take
some meanwhile, and a process that wants more than there is is killed."""

_TRUSTED = 3
"""Sizes that were guessed and that don't fit, before halves are tried."""


@dataclass(frozen=True, slots=True)
class SizePoint:
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
        in_memory_bound_bytes: No plan that leaves neither weights nor what a training step updates or makes in files
            takes less; None if refused, or where that says no more.
        run_time_bytes: Of ``total_bytes`` what the inputs decide, as a run showed it.
        reason: Why it is refused, in words.
    """

    size: int
    status: Literal["proven", "open", "refused"]
    total_bytes: int | None = None
    lower_bound_bytes: int | None = None
    whole_bound_bytes: int | None = None
    in_memory_bound_bytes: int | None = None
    run_time_bytes: int = 0
    reason: str = ""


@dataclass(frozen=True, eq=False, kw_only=True)
class Fit:
    """The largest size of a dimension with which a model fits a memory.

    Attributes:
        memory: Bytes for everything: arena, workspace, parameters (of a training model with their state) and inputs.
        vary: The dimension: ``batch``, its name or its place.
        size: The largest size that was found to fit; 0 if none was.
        plan: The plan of that size; None if there is none.
        lower_bound_bytes: No plan of that size takes less, whatever its order and whatever it recomputes, under the
            switches that ``bound_holds_for`` names.
        beyond: What is known of one size more; of the smallest size if none fits; None if there is no larger size.
        tried: Every size that was planned from the model itself, with the smallest total found.
        frontier: Plans of several sizes, the largest last.
        seconds: What all this took.
        strategy: What decided what is recomputed. With ``none`` the bounds are for plans that recompute nothing.
        options: The options of the plan.
        is_stopped: Whether Ctrl-C ended the search: sizes between this one and ``beyond`` weren't looked at.
    """

    memory: int
    vary: str
    size: int
    plan: Plan | None
    lower_bound_bytes: int | None
    beyond: Beyond | None
    tried: Mapping[int, int]
    frontier: tuple[SizePoint, ...] = ()
    seconds: float
    strategy: Strategy
    options: Options = field(repr=False)
    is_stopped: bool = False

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

    @property
    def recomputes(self) -> bool:
        """Whether the bounds are for plans in which nodes may run again, too."""
        return self.strategy != "none"

    @property
    def bound_holds_for(self) -> tuple[str, ...]:
        """Switches of the options that the lower bounds are for: another choice may take less."""
        sharing = self.options.sharing
        off = [each.name for each in dataclasses.fields(sharing) if not getattr(sharing, each.name)]
        return (
            *([option("chunks", "off")] if self.options.chunks == "off" else ()),
            *(() if self.recomputes else [option("strategy", "none")]),
            *(either(f"Sharing({name}=False)", f"--no-{name}") for name in off),
        )


@takes_options()
def fit(
    source: Source | Model,
    memory: float | str | None = None,
    vary: str = "batch",
    *,
    train_mode: bool = False,
    lora: tuple[int, str] | None = None,
    frontier: int = 0,
    options: Options | None = None,
    **keywords: Unpack[Keywords],
) -> Fit:
    """The largest size of a dimension with which a model fits into a memory, with its plan.

    Sizes above the largest that fits without chunks are planned as `memonger.search_plan` plans them, chunks among its
    means, each from the model itself. What no plan takes less than is then what is there beside the arena and the
    outputs, and a second bound, of plans without chunks, is larger. ``chunks="off"`` takes less time. Once a size was
    found to fit, Ctrl-C ends the search with the largest that was.

    Args:
        source: What `memonger.load` takes, with a dimension that is open.
        memory: Bytes for everything, or a text such as ``8GiB``: arena, workspace, parameters, optimizer state, inputs.
            None: the option ``budget``, which is the same, or 8 GiB where that isn't given either.
        vary: ``batch``, or the name or place of another open dimension: ``seq``, ``x[1]``.
        train_mode: Turn BatchNormalization and Dropout into their training form first; see
            `memonger.to_training_mode`.
        lora: Rank and pattern of adapters that alone are trained: see `memonger.add_lora`. None: there are none.
        frontier: How many sizes, up to the largest one, are planned for `Fit.frontier`.
        options: A record of options to start from; keywords given beside it replace its fields.
        keywords: The fields of `Options`.

    Raises:
        LoadError: the model can't be read, or another dimension has no size.
        PlanError: there is no such dimension, or it has a size; parameters alone take more than the memory; memory and
            ``budget`` differ; or as `memonger.search_plan`.
        RuntimeUnavailableError: the device isn't there.
        TypeError: a keyword is no option.
    """
    chosen = combine(options, keywords)
    limit = in_bytes("memory", memory, PlanError) if memory is not None else chosen.budget_bytes or DEFAULT_MEMORY
    if chosen.budget_bytes not in (None, limit):
        raise PlanError(
            f"what fits a memory has that as its budget: memory is {memory!r}, budget {chosen.budget!r}. Give one."
        )
    chosen = dataclasses.replace(chosen, budget=None) if chosen.strategy is None else chosen
    if chosen.axis_and_chunks is not None:
        raise PlanError(f"fit takes {option('chunks', 'auto')} or {option('chunks', 'off')}, not {chosen.chunks!r}.")
    frontier = whole("frontier", frontier, 0, MOST_POINTS, PlanError)
    changes = Changes(train_mode, *(lora or ()))
    with collecting_later():
        search = _SizeSearch(source, limit, vary, changes, chosen)
        found = search.found(frontier)
        if found.plan is None and search.may_have_window and not search.has_window:
            found = _SizeSearch(source, limit, vary, changes, chosen, has_window=True).found(frontier)
        return found


@dataclass(slots=True)
class _Attempt:
    """One size, planned from the model itself.

    Attributes:
        size: The size.
        total: Of the plan that fits, or the smallest found; None if the model can't have this size.
        bound: No plan takes less; None likewise.
        made: The lowered model and its solution or plan, where that fits and is still needed.
        beyond: What is known if no plan fits.
        least: Of a plan with weights in its file: the total with as few of them in memory as there can be.
    """

    size: int
    total: int | None = None
    bound: int | None = None
    made: tuple[Job, Solution | Plan] | None = None
    beyond: Beyond | None = None
    least: int | None = None


class _SizeSearch:
    """One search for the largest size that fits.

    Args:
        source: What `memonger.load` takes.
        memory: Bytes for everything.
        vary: The dimension's name.
        changes: What is done to the model before it is planned.
        options: The options of the plan.
        has_window: Whether weights may stay in the plan's file: then each size is planned as `memonger.search_plan`
            plans it, and what is interpolated says where to begin.
    """

    def __init__(
        self,
        source: Source | Model,
        memory: int,
        vary: str,
        changes: Changes,
        options: Options,
        has_window: bool = False,
    ) -> None:
        self.has_window, self.may_have_window, self.may_chunk = has_window, False, False
        self.source, self.memory, self.vary, self.changes = source, memory, vary, changes
        self.begin, self.report = time.perf_counter(), options.progress
        self.dimension = _open_dimension(source, vary, options)
        self.strategy: Strategy = options.strategy or "budget"
        budget = memory if STRATEGIES[self.strategy].takes_budget else None
        self.options = dataclasses.replace(
            options, strategy=self.strategy, budget=budget, device=str(device_of(options.device)), progress=None
        )
        self.mode: Mode | None = None
        self.searches = self.strategy == "budget"  # else the strategy gives one schedule at each size
        self.smallest: tuple[int, Request] | None = None
        self.weights = 0  # bytes that no size changes
        self.stock: tuple[int, int] | None = None  # a lowered size and what stock onnxruntime takes at it: inference
        self.orders: list[str] = []
        self.lowered: dict[int, Request] = {}
        self.ran: dict[tuple[int, ...], Any] = {}  # what calibrating runs showed, by size
        self.in_files: dict[int, tuple[int, bool]] = {}  # bytes that no window needs; whether values may be in a file
        self.between: Interpolation | None = None
        self.schedules: Schedules | None = None  # of the structure that is interpolated
        self.in_vain: set[int] = set()  # interpolated sizes for which a search found nothing
        self.followed = False
        self.attempts: dict[int, _Attempt] = {}
        self.tried: dict[int, int] = {}
        self.whole: int | None = None  # the largest size that fits without chunks, where larger ones may run in chunks

    def found(self, points: int) -> Fit:
        """Look for the largest size, and plan so many sizes up to it."""
        is_stopped = False
        try:
            self._search()
        except KeyboardInterrupt:
            if self.best is None:
                raise
            is_stopped, points = True, 0
        best, plan, bound = self.best, None, None
        low = 0 if best is None else best.size
        sizes = sorted({max(1, low * number // points) for number in range(1, points + 1)}) if low else []
        frontier = tuple(filter(None, map(self._point, sizes)))
        if best is not None:
            (job, found), bound = self._cheapest(best), best.bound
            self._report_progress(f"{self.vary} {low}: verifying its plan")
            plan = found if isinstance(found, Plan) else finish(job, found, self.begin)
            if plan.total_bytes > self.memory:
                raise PlanError(f"{plan.name}: its plan takes {plan.total_bytes} bytes, more than foreseen.")
        above = [each.beyond for each in self.attempts.values() if each.beyond and each.size > low]
        return Fit(
            memory=self.memory,
            vary=self.vary,
            size=low,
            plan=plan,
            lower_bound_bytes=bound,
            beyond=min(above, key=lambda beyond: beyond.size, default=None),
            tried=dict(sorted(self.tried.items())),
            frontier=frontier,
            seconds=time.perf_counter() - self.begin,
            strategy=self.strategy,
            options=dataclasses.replace(self.options, mode=self.mode, progress=self.report),
            is_stopped=is_stopped,
        )

    def _search(self) -> None:
        """Plan sizes until one fits and one more doesn't: as they are, then in chunks."""
        size, job = self._first()
        self.may_chunk = self.options.chunks != "off" and may_run_in_chunks(job)
        if self.attempt(size, job).beyond is None:
            self._interpolate(size)
            low, size = size, self._estimate(size)
            if not (self.may_chunk and self.has_window):
                self._close_in(low, MOST_BATCH + 1, size, self._reached, 0)
        if self.may_chunk:
            self.whole = 0 if self.best is None else self.best.size
            self.attempts = {size: each for size, each in self.attempts.items() if each.beyond is None}
            low, high = self.whole, self._ceiling(self.whole)
            self._close_in(low, high, max(size, low + 1), self._scaled, 1 / _NEAR)
            while high <= MOST_BATCH and not any(each.beyond for each in self.attempts.values()):
                if self.attempt(high).beyond is None:  # what can be measured is known better by then
                    low, high = high, self._ceiling(high)
                    self._close_in(low, high, low + 1, self._scaled, 1 / _NEAR)

    @property
    def best(self) -> _Attempt | None:
        """The largest size that fits, of all that were planned."""
        fitting = (each for each in self.attempts.values() if each.beyond is None)
        return max(fitting, key=lambda each: each.size, default=None)

    # The model at a size

    def lower(self, size: int) -> Job:
        """The model lowered at a size.

        Raises:
            LoadError, PlanError, RuntimeUnavailableError: as `memonger.search_plan`.
        """
        self._report_progress(f"{self.vary} {size}: lowering")
        options, source = self.options, self.source
        if self.dimension is None:
            options = dataclasses.replace(options, batch=size)
        else:
            options = dataclasses.replace(options, dims={**(options.dims or {}), self.dimension: size})
        if self.changes:
            source = self.changes.made(source, options.batch, options.dims)
            options = dataclasses.replace(options, batch=None, dims=None)
        grown = self._grown(size)
        job = prepare(source, options, times=True, grown=grown)
        if (ran := ran_nodes(job.lowered)) is not None and (grown is None or job.lowered.spent.runs):
            self.ran[size,] = ran
        if job.stock_bytes is not None and job.mode == "inference":
            self.stock = (size, job.stock_bytes)
        return dataclasses.replace(job, request=self._reporting(job.request, size))

    def asked(self, size: int, job: Job) -> Job:
        """The job with a window where weights stay in the file; what that spares every plan of the size is noted."""
        windowed = (with_window(job, any_order=True) or job) if self.has_window else job
        self.in_files[size] = windowed.request.base - least(job), may_wait(job)
        return windowed

    def _bound_with_files(self, size: int, request: Request, bound: int) -> int:
        """Bytes that every plan of a size takes, whatever stays in files, where those as requested take ``bound``."""
        spared, values_wait = self.in_files[size]
        return request.base - (request.run_time or 0) - spared if values_wait else bound - spared

    def _report_progress(self, what: str) -> None:
        if self.report is not None:
            self.report(f"fit: {what}")

    def _reporting(self, request: Request, size: int) -> Request:
        """The request of a size, whose searches say how far they are."""
        return dataclasses.replace(
            request, progress=lambda state: self._report_progress(f"{self.vary} {size}: {state}")
        )

    def _first(self) -> tuple[int, Job]:
        """The smallest size that the model can have."""
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
        weights = parameter_bytes(job.lowered.model, job.lowered.roles, job.device)
        is_mapped = self.options.weights == "mapped"
        self.may_have_window = (self.options.budget is not None or is_mapped) and with_window(job) is not None
        if self.may_have_window and (weights > self.memory or is_mapped):
            self.has_window = True
        elif weights > self.memory:
            what = "weights" if job.mode == "inference" else "parameters with what training keeps of them"
            raise PlanError(
                f"{job.source.name}: its {what} alone take {in_full(weights)}, more than the memory of "
                f"{in_full(self.memory)}: it fits at no {self.vary}."
            )
        self.mode, self.smallest, self.weights = job.mode, (size, self.asked(size, job).request), weights
        self.searches = self.searches and not job.request.recomputes_marked
        self.orders = orders_of(self.options.order, job.request.graph)
        return size, job

    def _grown(self, size: int) -> GrownRuns | None:
        """What smaller sizes tell of a run at this one; None where it is to run."""
        if not self._is_measured or self.options.inputs is not None or self.options.ranges:
            return None
        found = GrownRuns.of(self.ran, (self.vary,), (size,))
        if found is None:
            return None
        seconds = math.fsum((found.runs[-1].seconds or {}).values()) * found.bytes.ratio
        if seconds <= _RUN_SECONDS and self._unplanned_bytes(size) <= max(self.memory, _RUN_BYTES):
            return None
        return dataclasses.replace(found, why_not_run=self._too_large_to_run(size) or "")

    @property
    def _is_measured(self) -> bool:
        """Whether the model runs here to be planned."""
        device = device_of(self.options.device)
        return device.is_host and not device.facts.is_portable

    def _unplanned_bytes(self, size: int) -> int:
        """About what a calibrating run of a size takes, which has no plan yet."""
        assert self.smallest is not None
        nearest, request = self.smallest if self.between is None else (size, self.between.request(size))
        arena = needed_bytes(request.graph, assign_storage(request.graph, request.sharing))
        fixed = min(self.weights + (request.run_time or 0), request.base)
        needed = fixed + (request.base - fixed + arena) * size // nearest
        if self.stock is not None:  # its allocator rounds up, and doesn't use every gap
            needed = max(needed, self.stock[1] * size // self.stock[0])
        return needed

    def _too_large_to_measure(self, size: int) -> str | None:
        """Why a size can't be lowered here, if so: it has to run for that, and takes more than there is."""
        return None if self._grown(size) is not None else self._too_large_to_run(size)

    def _too_large_to_run(self, size: int) -> str | None:
        """Why a size can't run here without a plan, if so."""
        available = process_memory.room() if self._is_measured else None
        if available is None or self.smallest is None:
            return None
        device, needed = device_of(self.options.device), self._unplanned_bytes(size)
        taken, parts = _MEASURED
        if needed * parts <= available * taken:
            return None
        return (
            f"measuring it on {device} takes a run without a plan, of about {format_size(needed)}, and this machine "
            f"has {format_size(available)} available, of which {parts - taken} of {parts} parts are left to others. "
            f"{option('device', 'none')} measures nothing."
        )

    # Between sizes

    def _interpolate(self, first: int) -> None:
        """Lower at growing sizes until three in a row have one structure; at one more where the last two have one.

        Of anything but a batch a fourth has to be as the three tell.
        """
        size, most = first * 2, max(_SAMPLED, 4 * first)
        while self.between is None and self._too_large_to_measure(size) is None:
            if size > most:
                last, *before = (structure(self.lowered[each].graph) for each in sorted(self.lowered)[-2:])
                if before != [last]:
                    return
            try:
                self._learn(size, self.asked(size, self.lower(size)).request)
            except (LoadError, PlanError):
                return
            size *= 2

    def _learn(self, size: int, request: Request) -> None:
        """Learn from a size at which the model was lowered; the largest sizes decide."""
        self.lowered[size] = request
        between = Interpolation.of(self.lowered, POINTS if self.dimension is None else POINTS + 1)
        if between is None:
            return
        if self.between is None or between.structure != self.between.structure:
            self.schedules = Schedules(self.memory, self.orders)
            self.schedules.add_orders(request)
        self.between = between

    def _estimate(self, low: int) -> int:
        """The largest size that fits by interpolation, from ``low``, which does."""
        if self.between is None or self.schedules is None:
            return low
        at, schedules = self.between.request, self.schedules
        if not self.searches:
            return largest(low, lambda size: self._by_strategy(at(size))[1] <= self.memory)
        best = schedules.reach(low, at, MOST_BATCH, schedules.found)
        if best == MOST_BATCH or self._bound(at(best + 1)) > self.memory:
            return best
        high = target = largest(best, lambda size: self._bound(at(size), effort=0) <= self.memory)
        best = schedules.reach(best, at, high, schedules.add_usual(at(high)))
        for _ in range(_SEARCHES):
            if best == high or best + 1 in self.in_vain:
                break
            self._report_progress(f"{self.vary} {target}: searching, {best} fits")
            found = schedules.search(self._reporting(at(target), target), any_cost=True)
            reached = schedules.reach(best, at, high, found)
            if reached == best and target == best + 1:
                self.in_vain.add(target)
            best, target = reached, min(high, reached + max(1, reached // 16) if reached > best else reached + 1)
        return best

    def _bound(self, request: Request, effort: int = BOUND_EFFORT) -> int:
        return total_lower_bound(request, again=self.strategy != "none", effort=effort)

    def _ceiling(self, low: int) -> int:
        """The smallest size that is known not to fit in chunks, or not to be measurable here, without lowering it."""
        between = self.between
        if between is None:
            return MOST_BATCH + 1

        def is_possible(size: int) -> bool:
            bound = total_lower_bound(between.request(size), whole=False)
            return bound <= self.memory and self._too_large_to_measure(size) is None

        low = max(low, between.sizes[-1])
        return largest(low, is_possible) + 1 if is_possible(low) else MOST_BATCH + 1

    # Sizes planned from the model itself

    def _close_in(
        self, low: int, high: int, size: int, guess: Callable[[_Attempt, int, int], int | None], near: float
    ) -> None:
        """Plan sizes from ``size`` on until one fits and one more doesn't, or one that is nearly as small.

        Args:
            low: A size that fits, or 0.
            high: A size that doesn't, or one more than there are.
            size: Where to begin.
            guess: Given the last attempt and the two sizes, about the largest that fits; None where it can't be told.
            near: What part of the size that fits is between the two then, at most.
        """
        step, refused = 1, 0
        while high - low > max(1, near * low):
            attempt = self.attempt(min(max(size, low + 1), high - 1))
            if attempt.beyond is None:
                low = attempt.size
            else:
                high, step, refused = attempt.size, 1, refused + 1
            guessed = guess(attempt, low, high) if refused <= _TRUSTED else None
            if guessed is None and high <= MOST_BATCH:
                size = (low + high) // 2
            elif guessed is not None and guessed > low:
                size = guessed
            else:
                size, step = low + step, 2 * step

    def _reached(self, attempt: _Attempt, low: int, high: int) -> int | None:
        """What the schedules reach by interpolation, now that more is known of larger sizes."""
        is_refused = attempt.beyond is not None and attempt.beyond.status == "refused"
        if is_refused or self.between is None or self.schedules is None or not self.searches:
            return None
        if not self.between.has(self.lowered[max(self.lowered)].graph):
            return None
        return self.schedules.reach(low, self.between.request, high - 1, self.schedules.found)

    def _scaled(self, attempt: _Attempt, low: int, high: int) -> int | None:
        """In chunks: four times as much while all fits, then what follows from the smallest plan of what doesn't.

        Between a size that fits and one that doesn't totals are taken to grow evenly.
        """
        if attempt.beyond is None:
            above = min((each for each in self.attempts.values() if each.beyond), key=lambda e: e.size, default=None)
            if above is None:
                return 4 * low
            total = attempt.least or attempt.total
            if above.total is None or total is None:
                return low
            grown, room = above.total - total, self.memory - total
            return low + (above.size - low) * room // max(1, grown)
        if attempt.total is None or self.smallest is None:
            return None
        fixed = self.smallest[1].base
        reached = attempt.size * max(0, self.memory - fixed) // max(1, attempt.total - fixed)
        return reached - reached // _NEAR

    def attempt(self, size: int, job: Job | None = None) -> _Attempt:
        """One size planned from the model itself. Only the largest that fits keeps its lowered model."""
        made = self.attempts.get(size)
        if made is None or (made.beyond is None and made.made is None):
            made = self.attempts[size] = self._attempt(size, job)
            self.tried |= {} if made.total is None else {size: made.total}
        for each in self.attempts.values():
            if each is not made and each is not self.best:
                each.made = None
        return made

    def _attempt(self, size: int, job: Job | None) -> _Attempt:
        reason = self._too_large_to_measure(size) if job is None else None
        if reason is None:
            try:
                own = job or self.lower(size)
                job = self.asked(size, own)
                if self.whole is not None and size > self.whole and not self.has_window:
                    return self._in_chunks(size, job)
                self._learn(size, job.request)
                self._follow(size, job.request)
                bound = self._bound(job.request)
                if self.has_window:
                    return self._in_window(size, own, job.request, bound)
                solution, total = self._solved(size, job.request, bound)
                if solution is not None:
                    return _Attempt(size, total, self._every(size, job.request, bound), (job, solution))
                return self._beyond(size, job.request, total, bound, None)
            except (LoadError, PlanError) as error:
                reason = str(error)
        return _Attempt(size, beyond=Beyond(size, "refused", reason=reason))

    def _in_chunks(self, size: int, job: Job) -> _Attempt:
        """A size planned as `memonger.search_plan` does. Inference has a budget by any strategy: where that takes none,
        nothing is computed again."""
        self._report_progress(f"{self.vary} {size}: looking for slices")
        is_inference = job.mode == "inference"
        budget, made = self.memory if is_inference else job.request.budget, None
        strategy: Strategy = "none" if is_inference and job.request.budget is None else job.strategy
        request = dataclasses.replace(job.request, budget=budget)
        asked = dataclasses.replace(job, request=request, strategy=strategy)
        if is_inference:
            asked = with_search(asked)
            assert asked.search is not None
            asked.search.most_copies = _COPIES
        try:
            made = decided(asked)
            total = total_bytes(made[0].request, made[1])
        except BudgetError as error:
            total = error.smallest
        bound = total_lower_bound(request, whole=False)
        if total <= self.memory:
            return _Attempt(size, total, self._bound_with_files(size, request, bound), made)
        whole = max(bound, total_lower_bound(request, again=self.strategy != "none"))
        return self._beyond(size, request, total, bound, whole)

    def _in_window(self, size: int, job: Job, request: Request, whole: int) -> _Attempt:
        """A size planned as `memonger.search_plan` does, whatever it leaves in files.

        Args:
            size: The size.
            job: The model, with all weights in memory.
            request: What is asked of it with as few of them there as there can be.
            whole: No plan of that request takes less without chunks.
        """
        bound = self._every(size, request, whole)
        if bound > self.memory:
            total = self._solved(size, request, whole)[1]
        else:
            try:
                made = within(job, self.begin)
                total, weights = made[1].total_bytes, made[1].parameter_bytes + request.base - job.request.base
                if total <= self.memory:
                    least = total - made[1].resident_parameter_bytes + weights
                    return _Attempt(size, total, bound, made, least=least)
            except BudgetError as error:
                total = error.smallest
        if self.may_chunk:
            return self._beyond(size, request, total, total_lower_bound(request, whole=False), whole)
        return self._beyond(size, request, total, whole, None)

    def _every(self, size: int, request: Request, whole: int) -> int:
        """Bytes that every plan of a size takes, where those as requested, without chunks, take ``whole``."""
        bound = total_lower_bound(request, whole=False) if self.may_chunk else whole
        return self._bound_with_files(size, request, bound)

    def _beyond(self, size: int, request: Request, total: int, bound: int, whole: int | None) -> _Attempt:
        in_files, in_memory = self._bound_with_files(size, request, bound), None
        whole = None if whole is None else self._bound_with_files(size, request, whole)
        if in_files < bound and not self.has_window:
            in_memory = bound
        status: Literal["proven", "open"] = "proven" if in_files > self.memory else "open"
        beyond = Beyond(size, status, total, in_files, whole, in_memory, request.run_time or 0)
        return _Attempt(size, total, in_files, None, beyond)

    def _follow(self, size: int, request: Request) -> None:
        """Where a size has another structure than what is interpolated, interpolate that, once."""
        if self.followed or self.between is None or self.between.has(request.graph):
            return
        self.followed = True
        for near in (size // 2, size * 3 // 4):
            if near > 0 and near not in self.lowered:
                self._learn(near, self.asked(near, self.lower(near)).request)
        if self.between.has(request.graph) and self.best is not None:
            self._estimate(self.best.size)

    def _solved(self, size: int, request: Request, bound: int) -> tuple[Solution | None, int]:
        """A solution that fits, if one is found, and the smallest total that was."""
        if not self.searches:
            return self._by_strategy(request)
        schedules = self._schedules_of(request)
        solution = schedules.fitting(request)
        hopeless = bound > self.memory or (schedules is self.schedules and size in self.in_vain)
        if solution is None and not hopeless:
            schedules.search(request, any_cost=True)
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

    def _schedules_of(self, request: Request) -> Schedules:
        """Those of the structure that is interpolated, or where a request has another its own."""
        if self.between is not None and self.schedules is not None and self.between.has(request.graph):
            return self.schedules
        own = Schedules(self.memory, self.orders)
        own.add_orders(request)
        if own.fitting(request) is None:
            own.add_usual(request)
        return own

    # What is made of it

    def _cheapest(self, attempt: _Attempt) -> tuple[Job, Solution | Plan]:
        """What was planned of a size that fits, or, where no chunks were looked for, the cheapest that is found."""
        assert attempt.made is not None
        job, solution = attempt.made
        if isinstance(solution, Plan):
            return attempt.made
        is_whole = self.whole is None or attempt.size <= self.whole
        if self.searches and is_whole and solution.cost > math.fsum(job.request.graph.costs):
            self._report_progress(f"{self.vary} {attempt.size} fits: searching for less extra cost")
            schedules = self._schedules_of(job.request)
            schedules.search(job.request, any_cost=False)
            solution = schedules.fitting(job.request) or solution
            attempt.made, attempt.total = (job, solution), total_bytes(job.request, solution)
            self.tried[attempt.size] = attempt.total
        return job, solution

    def _point(self, size: int) -> SizePoint | None:
        """A plan of a size; None where none fits."""
        attempt = self.attempt(size)
        if attempt.made is None:
            return None
        job, found = self._cheapest(attempt)
        graph, calibration = found.graph, job.lowered.calibration
        cost = math.fsum(graph.costs) + math.fsum(band.seconds for band in job.chunks)
        seconds = cost if calibration is not None and calibration.seconds is not None else None
        total = found.total_bytes if isinstance(found, Plan) else total_bytes(job.request, found)
        overhead = schedule.overhead(graph.again, graph.costs)
        batch = size if self.dimension is None else self.options.batch
        return SizePoint(size, total, overhead, seconds, batch / seconds if batch and seconds else None)


def _open_dimension(source: Source | Model, vary: str, options: Options) -> str | None:
    """The dimension that a user calls ``vary``, as it is given to ``dims``; None: the batch, given as ``batch``.

    Raises:
        LoadError: the model can't be read.
        PlanError: there is none of that name that is open, or the options give it a size.
    """
    if not isinstance(vary, str):
        raise PlanError(f"vary must be 'batch' or the name of a dimension, not {vary!r}.")
    model = source if isinstance(source, Model) else load_as_is(source)
    inputs = required_inputs(model.graph)
    places = [(v, axis, dim) for v in inputs for axis, dim in enumerate(v.shape or ()) if not isinstance(dim, int)]
    named = (dim.value for _, _, dim in places if isinstance(dim, ir.SymbolicDim) and dim.value)
    known = list(dict.fromkeys([*named, *(f"{v.name}[{axis}]" for v, axis, _ in places)]))
    if vary == "batch" and any(axis == 0 for _, axis, _ in places):
        if options.batch is not None:
            other = f"vary another dimension ({option('vary', NAME)})"
            raise PlanError(f"the batch is what varies: leave {option('batch')} out, or {other}.")
        return None
    if vary in known:
        if vary in (options.dims or {}):
            raise PlanError(f"dimension '{vary}' is what varies: leave its size ({option('dims', {vary: N})}) out.")
        return vary

    def shown(dim: object) -> str:
        return str(dim) if isinstance(dim, int) else str(getattr(dim, "value", None) or "?")

    shapes = (f"'{v.name}' is [{', '.join(map(shown, v.shape or ()))}]" for v in inputs)
    listed = ", ".join(shapes) or "there is no input"
    if not known:
        raise PlanError(
            f"{model.name}: no dimension of its inputs is open, so none can vary ({listed}). Export it with a dynamic "
            f"dimension; whether it fits as it is, a plan with that budget says ({option('budget', SIZE)})."
        )
    what = "open first dimension to be its batch" if vary == "batch" else f"open dimension '{vary}'"
    hint = did_you_mean(vary, known) or f" {option('vary')} takes {quoted(known)}."
    raise PlanError(f"{model.name} has no {what} ({listed}).{hint}")
