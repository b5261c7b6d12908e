"""form: a model without a plan → the plans that a target serves."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from memonger.errors import MemongerError, PlanError
from memonger.ir.model import Model
from memonger.model.bind_dims import has_open_batch
from memonger.model.load import Source, load_as_is
from memonger.options import Options
from memonger.plan import Plan
from memonger.plan_file import is_planned
from memonger.planner.job import device_of
from memonger.planner.search_plan import search_plan
from memonger.runtime.process_memory import available_memory
from memonger.serving.package import FLEETS, Package, ServedModel, check_ranges
from memonger.shapes.ranges import described
from memonger.units import MOST_BATCH
from memonger.words import option

MOST_BATCHES = 64

ELSEWHERE = ("onnxruntime", "triton", "openvino")
"""Targets whose model another runtime runs, in memory that it lays out itself: nodes run whole."""

PORTABLE = (*ELSEWHERE, "kserve")
"""Targets whose model another runtime runs, or another machine: standard operators, bound to nothing. What the others
serve is planned for the device, as it runs there."""

BATCHES: Mapping[str, tuple[int, ...]] = {
    "triton": (8,), "triton-python": (1, 2, 4, 8), "ray": (1, 2, 4, 8), "bentoml": (1, 2, 4, 8), "kserve": (1, 2, 4, 8),
}  # fmt: skip
"""What a model with an open batch is planned for where nothing is said; of targets not named here for 1. Triton's own
backend has one file for every batch up to the largest."""


def has_plan(source: object) -> bool:
    """Whether a source is a plan, or a file with one."""
    if isinstance(source, Plan) or not isinstance(source, str | Path):
        return isinstance(source, Plan)
    return is_planned(load_as_is(source).ir)


def options_for(target: str, source: Source | Model, batches: Sequence[int], options: Options) -> list[Options]:
    """The options of each plan that a target serves of a model.

    Args:
        target: One of `memonger.serving.TARGETS`.
        source: The model.
        batches: Batches to plan for; none: `BATCHES`, for a model whose batch is open.
        options: The others. ``mode`` is inference; ``device`` is chosen where it is None, see `PORTABLE`, and chunks
            that aren't asked for are left out where they would be another runtime's, see `ELSEWHERE`.

    Raises:
        PlanError: batches are given twice, or wrong; ranges of sizes for a target that takes none.
        LoadError: the model can't be read.
    """
    check_ranges(options.ranges, target in FLEETS, "the model")
    if batches and options.batch is not None:
        raise PlanError(f"{option('batch')} and {option('batches')} contradict each other: leave one out.")
    if len(batches) > MOST_BATCHES or any(type(one) is not int or not 1 <= one <= MOST_BATCH for one in batches):
        raise PlanError(f"{option('batches')} must be at most {MOST_BATCHES} whole numbers from 1 on, as 1, 4 and 16.")
    sizes: Sequence[int | None] = sorted(set(batches)) or [options.batch]
    if sizes == [None] and options.inputs is None:
        model = source if isinstance(source, Model) else load_as_is(source)
        sizes = BATCHES.get(target, (1,)) if has_open_batch(model.ir, options.sizes) else sizes
    device = "none" if options.device is None and target in PORTABLE else options.device
    chunks = "off" if options.chunks == "auto" and target in ELSEWHERE else options.chunks
    return [replace(options, batch=size, device=device, chunks=chunks, mode="inference") for size in sizes]


def plans_for(target: str, source: Source | Model, batches: Sequence[int], options: Options) -> tuple[Plan, ...]:
    """The plans that a target serves of a model, by rising batch. Arguments and errors are those of `options_for`.

    Raises:
        PlanError: also as `memonger.search_plan`.
    """
    chosen = options_for(target, source, batches, options)
    plans = smaller(source, tuple(search_plan(source, options=one) for one in chosen), chosen)
    is_ours = not batches and options.batch is None and chosen[-1].batch not in (None, 1)
    if is_ours and ServedModel("", plans).batches is None:  # no request could be put together with another
        return (search_plan(source, options=replace(chosen[0], batch=1)),)
    return plans


def smaller(source: Source | Model, plans: tuple[Plan, ...], chosen: Sequence[Options]) -> tuple[Plan, ...]:
    """The plans, or the same without chunks where those take less in all: plans in chunks can't share their weights.

    Args:
        source: The model.
        plans: By rising batch.
        chosen: What each was made with.
    """
    is_free = all(one.chunks == "auto" and one.budget is None for one in chosen)
    if len(plans) < 2 or not is_free or not any(plan.chunks for plan in plans):
        return plans
    whole = tuple(search_plan(source, options=replace(one, chunks="off")) for one in chosen)
    return min(plans, whole, key=lambda each: Package("", (ServedModel("", each),)).as_planned().instance_bytes)


def own_plan(target: str, source: Source | Model, plans: Sequence[Plan], options: Options) -> Plan | None:
    """The plan in chunks that memonger's own sessions would run here, where what a target serves can't have chunks.

    Args:
        target: One of `memonger.serving.TARGETS`.
        source: The model.
        plans: What the target serves of it.
        options: As they were given.

    Returns: None where plans of that target may have chunks, where none pays, or where it can't be measured here.
    """
    largest = plans[-1]
    is_free = target in ELSEWHERE and options.device is None and options.chunks == "auto"
    if not is_free or device_of(None).facts.is_portable or largest.unplanned_bytes > (available_memory() or 0):
        return None
    with suppress(MemongerError):
        plan = search_plan(source, options=replace(options, batch=largest.batch, device="cpu", mode="inference"))
        return plan if plan.chunks else None
    return None


def notes_for(target: str, plans: Sequence[Plan]) -> tuple[str, ...]:
    """What was chosen for a model that came without a plan."""
    batches, device = ", ".join(str(plan.batch) for plan in plans), plans[0].device
    what = "its own shapes" if plans[0].batch is None else f"a batch of {batches}"
    if plans[0].ranges:
        what = described(plans[0].ranges) + (f", each for a batch of {batches}" if len(plans) > 1 else "")
    elif len(plans) > 1:
        what = f"batches of {batches}"
    elif target in BATCHES and plans[0].batch not in (None, 1):
        what = f"batches of up to {batches}"
    form = f"in standard operators ({option('device', 'none')})" if device == "none" else f"for this machine's {device}"
    others = "" if plans[0].batch is None else f"; {option('batches')} names others"
    return (f"The model had no plan: it was planned for {target}, {form}, for {what}{others}.",)
