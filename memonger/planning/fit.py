"""Whether a model fits a memory, and the largest size of one of its dimensions with which it does: `fit`."""

import dataclasses
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Unpack

from memonger.errors import PlanError
from memonger.model.emitter import collecting_later
from memonger.model.load import Source
from memonger.model.model import Model
from memonger.plan import Plan
from memonger.planning.at_size import Changes
from memonger.planning.fit_chunks import InChunks
from memonger.planning.names import Strategy
from memonger.planning.options import Keywords, Options, combine, takes_options, without_ranges
from memonger.planning.search_plan import device_of
from memonger.planning.sizing import Attempt, Beyond, Sizing
from memonger.units import MOST_POINTS, in_bytes, whole
from memonger.words import either, option


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
    frontier: tuple[Point, ...] = ()
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


@takes_options("budget", chunks="off")
def fit(
    source: Source | Model,
    memory: float | str = "8GiB",
    vary: str = "batch",
    *,
    train_mode: bool = False,
    lora: tuple[int, str] | None = None,
    frontier: int = 0,
    options: Options | None = None,
    **keywords: Unpack[Keywords],
) -> Fit:
    """The largest size of a dimension with which a model fits into a memory, with its plan.

    With ``chunks="auto"`` sizes above the largest that fits without chunks are planned with them, each from the model
    itself, as `memonger.search_plan` does. What no plan takes less than is known for nodes that run whole alone.

    Args:
        source: What `memonger.load` takes, with a dimension that is open.
        memory: Bytes for everything, or a text such as ``8GiB``: arena, workspace, parameters, optimizer state, inputs.
        vary: ``batch``, or the name or place of another open dimension: ``seq``, ``x[1]``.
        train_mode: Turn BatchNormalization and Dropout into their training form first; see
            `memonger.to_training_mode`.
        lora: Rank and pattern of adapters that alone are trained: see `memonger.add_lora`. None: there are none.
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
    chosen = without_ranges(combine(options, keywords), "fit")
    if chosen.budget is not None:
        raise PlanError("fit takes the memory as its budget: leave budget out.")
    if chosen.axis_and_chunks is not None:
        raise PlanError(f"fit takes {option('chunks', 'auto')} or {option('chunks', 'off')}, not {chosen.chunks!r}.")
    frontier = whole("frontier", frontier, 0, MOST_POINTS, PlanError)
    device = device_of(chosen.device)
    if not device.is_host or device.facts.is_portable:
        chosen = dataclasses.replace(chosen, chunks="off")
    with collecting_later():
        sizing = Sizing(source, in_bytes("memory", memory, PlanError), vary, Changes(train_mode, *(lora or ())), chosen)
        sizing.run()
        answer = _answer(sizing, frontier)
        return answer if chosen.chunks == "off" else _in_chunks(answer, sizing)


def _in_chunks(answer: Fit, sizing: Sizing) -> Fit:
    """The answer where the model may run in chunks."""
    search = InChunks(sizing)
    search.run()
    plan, seconds = search.plan(), time.perf_counter() - sizing.begin
    tried = dict(sorted({**answer.tried, **search.tried}.items()))
    if plan is not None:
        bound = plan.parameter_bytes + plan.input_bytes
        answer = dataclasses.replace(answer, size=search.size, plan=plan, lower_bound_bytes=bound)
    return dataclasses.replace(answer, beyond=search.beyond, tried=tried, seconds=seconds)


def _answer(sizing: Sizing, frontier: int) -> Fit:
    points = _frontier(sizing, frontier) if frontier else ()
    best = sizing.best
    plan = None if best is None else sizing.plan(best)
    return Fit(
        memory=sizing.memory,
        vary=sizing.vary,
        size=best.size if best else 0,
        plan=plan,
        lower_bound_bytes=best.bound if best else None,
        beyond=sizing.beyond,
        tried={size: each.total for size, each in sorted(sizing.attempts.items()) if each.total is not None},
        frontier=points,
        seconds=time.perf_counter() - sizing.begin,
        strategy=sizing.strategy,
        options=dataclasses.replace(sizing.options, mode=sizing.mode),
    )


def _frontier(sizing: Sizing, points: int) -> tuple[Point, ...]:
    """Plans of so many sizes up to the largest."""
    best = sizing.best
    if best is None:
        return ()
    sizes = sorted({max(1, best.size * number // points) for number in range(1, points + 1)})
    made = (sizing.attempt(size) for size in sizes)
    return tuple(_point(sizing, each) for each in made if each.fits)


def _point(sizing: Sizing, attempt: Attempt) -> Point:
    solution, job = sizing.cheaper(attempt), attempt.job
    assert job is not None
    assert attempt.total is not None
    once, cost = math.fsum(job.request.graph.costs), solution.cost
    calibration = job.lowered.calibration
    seconds = cost if calibration is not None and calibration.seconds is not None else None
    batch = attempt.size if sizing.dimension.is_batch else sizing.options.batch
    rate = batch / seconds if batch and seconds else None
    return Point(attempt.size, attempt.total, cost / once - 1 if once else 0.0, seconds, rate)
