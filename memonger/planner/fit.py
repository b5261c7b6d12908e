"""Whether a model fits a memory, and the largest size of one of its dimensions with which it does: `fit`."""

import dataclasses
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Unpack

from memonger.errors import PlanError
from memonger.ir.emitter import collecting_later
from memonger.ir.model import Model
from memonger.model.load import Source
from memonger.option_names import Strategy
from memonger.options import Keywords, Options, combine, takes_options
from memonger.plan import Plan
from memonger.planner.at_size import Changes
from memonger.planner.fit_chunks import InChunks
from memonger.planner.search_plan import Job
from memonger.planner.sizing import Beyond, Sizing
from memonger.schedule.decide import Solution, total_bytes
from memonger.units import MOST_POINTS, GiB, in_bytes, whole
from memonger.words import either, option

DEFAULT_MEMORY = 8 * GiB


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
    outputs, and a second bound, of plans without chunks, is larger. ``chunks="off"`` takes less time.

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
    room = in_bytes("memory", memory, PlanError) if memory is not None else chosen.budget_bytes or DEFAULT_MEMORY
    if chosen.budget_bytes not in (None, room):
        raise PlanError(
            f"what fits a memory has that as its budget: memory is {memory!r}, budget {chosen.budget!r}. Give one."
        )
    chosen = dataclasses.replace(chosen, budget=None) if chosen.strategy is None else chosen
    if chosen.axis_and_chunks is not None:
        raise PlanError(f"fit takes {option('chunks', 'auto')} or {option('chunks', 'off')}, not {chosen.chunks!r}.")
    frontier = whole("frontier", frontier, 0, MOST_POINTS, PlanError)
    with collecting_later():
        sizing = Sizing(source, room, vary, Changes(train_mode, *(lora or ())), chosen)
        sizing.run()
        search = InChunks(sizing) if sizing.chunks else None
        if search is not None:
            search.run()
        return _answer(sizing, search, frontier)


def _answer(sizing: Sizing, search: InChunks | None, frontier: int) -> Fit:
    """What the search without chunks found, and the one with them where there was one."""
    points = _frontier(sizing, search, frontier) if frontier else ()
    best, tried = sizing.best, {size: each.total for size, each in sizing.attempts.items() if each.total is not None}
    plan = None if search is None else search.plan()
    if plan is None and best is not None:
        plan = sizing.plan(best)
    bound = best.bound if best else None
    return Fit(
        memory=sizing.memory,
        vary=sizing.vary,
        size=search.size if search is not None else best.size if best else 0,
        plan=plan,
        lower_bound_bytes=bound if search is None else search.bound,
        beyond=sizing.beyond if search is None else search.beyond,
        tried=dict(sorted({**tried, **({} if search is None else search.tried)}.items())),
        frontier=points,
        seconds=time.perf_counter() - sizing.begin,
        strategy=sizing.strategy,
        options=dataclasses.replace(sizing.options, mode=sizing.mode),
    )


def _frontier(sizing: Sizing, search: InChunks | None, points: int) -> tuple[SizePoint, ...]:
    """Plans of so many sizes up to the largest."""
    whole = sizing.best.size if sizing.best is not None else 0
    most = whole if search is None else search.size
    made = list[SizePoint]()
    for size in sorted({max(1, most * number // points) for number in range(1, points + 1)}) if most else ():
        if size > whole and search is not None:
            found = search.made_at(size)
            made += [_point(sizing, size, *found)] if found is not None else []
        elif (attempt := sizing.attempt(size)).fits and attempt.job is not None:
            made.append(_point(sizing, size, attempt.job, sizing.cheaper(attempt)))
    return tuple(made)


def _point(sizing: Sizing, size: int, job: Job, solution: Solution) -> SizePoint:
    once = math.fsum(job.request.graph.costs)
    calibration = job.lowered.calibration
    cost = solution.cost + math.fsum(band.seconds for band in job.chunks)
    seconds = cost if calibration is not None and calibration.seconds is not None else None
    batch = size if sizing.dimension.is_batch else sizing.options.batch
    rate = batch / seconds if batch and seconds else None
    return SizePoint(size, total_bytes(job.request, solution), solution.cost / once - 1 if once else 0.0, seconds, rate)
