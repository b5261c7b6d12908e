"""A model ready for the search, and what becomes of it: `decided` finds a schedule and its layout, `finish` a plan."""

import dataclasses
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memonger.allocation import EFFORT
from memonger.allocation.onnxruntime_arena import UNIT
from memonger.devices import Device, parse_device
from memonger.errors import BudgetError, PlanError
from memonger.graph import schedule
from memonger.graph.liveness import ALIGNMENT
from memonger.graph.weight_window import choose_window, least_bytes, weight_reads
from memonger.ir.model import Model
from memonger.ir.save import MAPPED_LIMIT
from memonger.lowering.lowered import Lowered
from memonger.model import original_model
from memonger.option_names import HeldWeights, Mode, Strategy
from memonger.options import Options
from memonger.plan import LIMIT_MARGIN, Plan, input_bytes, is_sized_at_run_time
from memonger.plan_file import ChunkedBand
from memonger.schedule import Request
from memonger.schedule.decide import decide
from memonger.schedule.on_demand import forward_pass
from memonger.schedule.solution import IN_SLICES, Solution, total_bytes, total_lower_bound
from memonger.shapes.ranges import DimRange
from memonger.tiling import chunking
from memonger.units import exactly, format_size, shown
from memonger.words import call, option

if TYPE_CHECKING:
    from memonger.tiling import both


@dataclass(frozen=True, slots=True)
class Job:
    """A model ready for the search.

    Attributes:
        source: The user's own model, loaded.
        lowered: The model that will run.
        request: What the strategy is asked.
        strategy: The strategy's name.
        mode: ``training`` or ``inference``.
        device: The device the plan is for.
        options: The caller's options.
        notes: What the user should know.
        origins: See `memonger.ir.marks.origins`.
        stock_bytes: See `memonger.plan_file.Header`.
        chunks: See there.
        ranges: See there.
        solution: A schedule and its layout that were found before the search: of inference with nothing recomputed, of
            a training step what is left to do.
        search: What looks for chunks of this model, whatever the budget; None: nothing does yet.
        has_window: Whether weights may stay in the plan's file: as many as the options' budget then needs, or say. The
            base of the request has as few of them as there can be in memory. For a CUDA device: whether some lie in the
            host's.
        copies_ahead: Where those are to be copied while other steps run (`memonger.planner.ahead`) the bytes that would
            be copied in order; else 0.
    """

    source: Model
    lowered: Lowered
    request: Request
    strategy: Strategy
    mode: Mode
    device: Device
    options: Options
    notes: tuple[str, ...]
    origins: Mapping[str, str]
    stock_bytes: int | None
    chunks: tuple[ChunkedBand, ...] = ()
    ranges: Mapping[str, DimRange] = field(default_factory=dict)
    solution: Solution | None = None
    search: chunking.ChunkSearch | None = None
    has_window: bool = False
    copies_ahead: int = 0

    def copy(self) -> "Job":
        """The same job with a lowered model of its own, as finishing a plan changes that."""
        return dataclasses.replace(self, lowered=dataclasses.replace(self.lowered, model=self.lowered.model.clone()))

    def at(self, budget: int) -> "Job":
        """The job with another budget."""
        request = dataclasses.replace(self.request, budget=budget)
        return dataclasses.replace(self, options=dataclasses.replace(self.options, budget=budget), request=request)

    def report_progress(self, stage: str) -> None:
        """Say which stage begins to whom the options name."""
        if self.options.progress is not None:
            self.options.progress(stage)


def decided(job: Job, step: "both.StepSearch | None" = None) -> tuple[Job, Solution]:
    """A prepared model with all that a plan may do with it: products joined, chunks, an order, what runs again.

    Args:
        job: The model.
        step: What looks for candidates of this training step, where it is planned for several budgets.

    Raises:
        BudgetError: nothing was found that holds the request's budget.
        PlanError: what is asked for can't be.
    """
    measured = job.lowered.calibration
    if job.mode == "training" and job.device.is_host and measured is not None and not job.options.buckets:
        from memonger.tiling.joining import with_joined_products

        joined = with_joined_products(job.lowered, job.request, job.options, job.device, job.strategy)
        if joined is not None:
            lowered, request, solution = joined
            job = dataclasses.replace(job, lowered=lowered, request=request, solution=solution)
    job = in_chunks(job, step)
    solution = solve(job)
    return (job if job.search is None or not job.chunks else job.copy()), solution  # others may get this candidate


def may_run_in_chunks(job: Job) -> bool:
    """Whether chunks are among what plans of a model can do, whatever the options say of them."""
    return not job.options.buckets and not chunking.why_not(job.lowered, job.options, job.device)


def in_chunks(job: Job, step: "both.StepSearch | None" = None) -> Job:
    """The job with the model in chunks, where that is worth it or asked for; see `memonger.tiling.chunking`.

    Raises:
        PlanError: a number of chunks is asked for, and the model can't run in any, or not in that many.
    """
    lowered, request, options, device = job.lowered, job.request, job.options, job.device
    why_not = chunking.why_not(lowered, options, device)
    if why_not and options.axis_and_chunks is not None and not options.buckets:
        raise PlanError(f"the model can't run in chunks: {why_not}.")
    if options.buckets or why_not or options.chunks == "off":
        return job
    if job.mode == "training" and request.budget is not None:
        if job.solution is not None:
            return job
        if step is None:
            from memonger.tiling.both import StepSearch  # here: inference needs none of it

            step = StepSearch(lowered, request, options, device, job.strategy)
        try:
            candidate: both.Candidate = step.cheapest(request.budget)
        except BudgetError as error:
            raise _explained(job, error) from error
    else:
        job = job if job.search is not None else with_search(job)
        assert job.search is not None
        room = None if request.budget is None else request.budget - request.base
        candidate = job.search.chosen(room) or job.search.plain
    if isinstance(candidate, Solution):
        return dataclasses.replace(job, solution=candidate)
    base = candidate.request.base + (0 if job.search is None else request.base - job.search.base)
    asked = dataclasses.replace(candidate.request, budget=request.budget, base=base)
    return dataclasses.replace(
        job, lowered=candidate.lowered, request=asked,
        options=dataclasses.replace(options, order="file"), notes=(*job.notes, *candidate.notes),
        chunks=candidate.described(), solution=candidate.solution,
    )  # fmt: skip


def with_search(job: Job) -> Job:
    """The job with what looks for chunks of it: jobs that are made of this one look at each candidate once together."""
    strategy = job.strategy if job.mode == "training" else "none"
    plain = job.solution or decide(dataclasses.replace(job.request, budget=None), strategy, job.options.order)
    search = chunking.ChunkSearch(
        job.lowered, job.request, job.options, job.device, job.source.batch, plain, job.ranges
    )
    return dataclasses.replace(job, search=search)


def solve(job: Job) -> Solution:
    """Order, recompute, lay out; see `memonger.schedule.decide`."""
    solution, budget = job.solution, job.request.budget
    is_final = job.mode == "training" or job.strategy == "none"
    if solution is not None and (is_final or (budget and total_bytes(job.request, solution) <= budget)):
        return solution
    try:
        effort = IN_SLICES if job.chunks else EFFORT
        return decide(job.request, job.strategy, job.options.order, effort, None if is_final else solution)
    except BudgetError as error:
        raise _explained(job, error) from error


def _explained(job: Job, error: BudgetError) -> BudgetError:
    """The error with what keeps nodes, and with what finds the size that fits where the model was given one."""
    kept, hint = sum(not recomputed for recomputed in job.request.forced.values()), ""
    if kept:
        hint = f" {kept} nodes are kept because they are marked so (force_mirroring 'False', {option('keep')})."
    weights = sum(read.nbytes for read in weight_reads(job.lowered.model))
    if job.device.facts.is_portable and weights >= max(MAPPED_LIMIT, error.smallest // 2):
        hint += f" With {option('device', 'cpu')} weights may stay in the plan's file."
    dims = list(job.options.dims or ())
    fed = input_bytes(job.lowered.model, job.lowered.roles)
    if job.mode == "training":
        parts = f"parameters, with what training keeps of them, {format_size(job.request.base - fed)}"
        hint += (
            f" {format_size(job.request.base)} are there whatever runs again: {parts}, and inputs {format_size(fed)}."
        )
    some_may_fit = error.budget > job.request.base - fed
    batch = job.source.batch or 1
    if some_may_fit and (batch > 1 or dims):
        besides: dict[str, object] = {} if batch > 1 else {"vary": dims[0]}
        size = besides.get("vary", "batch")
        if others := {name: value for name, value in (job.options.dims or {}).items() if name != size}:
            besides["dims"] = others
        if job.device != device_of(None):
            besides["device"] = str(job.device)
        example = call("fit", job.source.name, memory=exactly(error.budget), **besides)
        hint += f" The largest {size} that fits: {example}"
        hint += ", with the other options of this plan." if job.mode == "training" else ""
    hint += "".join(f" {note[:1].upper()}{note[1:]}" for note in job.source.notes)
    bound = error.lower_bound
    if may_run_in_chunks(job):
        bound = min(bound, total_lower_bound(job.request, whole=False))
    return BudgetError(error.budget, error.smallest, bound, hint)


def finish(job: Job, solution: Solution, begin: float) -> Plan:
    """The plan, checked. The lowered model becomes the planned one."""
    request, calibration = job.request, job.lowered.calibration
    before, graph, workspace, host = request.live_bytes, solution.graph, None, frozenset[str]()
    if calibration is not None:  # a recomputation takes as much as the first run
        steps = dict(zip(graph.nodes, graph.workspace, strict=True))
        workspace = {name: size for name, size in calibration.workspace.items() if name in steps}  # others were cut
        workspace |= {name: size for name, size in steps.items() if size}
    if calibration is not None and calibration.host:  # copies included
        firsts = zip(graph.values, graph.firsts, strict=True)
        host = frozenset(name for name, first in firsts if graph.values[first] in calibration.host)
    schedule.schedule_model(job.lowered.model, solution.schedule, solution.graph)
    if job.chunks and job.device.facts.is_portable:  # such plans can be undone
        original_model.embed(job.lowered.model, job.source.ir.clone())
    plan = Plan(
        model=job.lowered.model,
        graph=solution.graph,
        offsets=solution.offsets,
        arena_bytes=solution.arena_bytes,
        alignment=ALIGNMENT,
        mode=job.mode,
        device=str(job.device),
        stamp=job.lowered.stamp,
        threads=job.options.threads,
        workspace=workspace,
        batch=job.source.batch,
        budget=job.options.budget_bytes if job.has_window else request.budget,
        strategy=job.strategy,
        outcome=solution.outcome,
        source=job.source,
        origins=job.origins,
        notes=tuple(map(shown, (*job.notes, *solution.outcome.notes, *_unheeded(job, solution)))),
        peak_before_bytes=int(before.max(initial=0)),
        live_before=before,
        planning_seconds=time.perf_counter() - begin,
        files=job.lowered.files,
        host=host,
        stock_bytes=job.stock_bytes,
        chunks=job.chunks,
        ranges=job.ranges,
        run_time=dict(sorted(calibration.run_time.items())) if calibration else {},
        spent=job.lowered.spent,
        passes=job.lowered.passes,
    )
    if job.has_window:
        plan = _with_window(plan, job.options.weights)
    plan = _limited(plan, job.device)
    plan.verify()
    return dataclasses.replace(plan, notes=(*plan.notes, *map(shown, plan.state_notes)))


def _with_window(plan: Plan, weights: HeldWeights) -> Plan:
    """The plan with as many weights in its file as its budget needs, or as there can be where they are to be mapped.

    Raises:
        BudgetError: it can't be held by that.
    """
    budget = plan.budget
    if not parse_device(plan.device).is_host:
        if budget is not None and plan.total_bytes > budget:
            raise BudgetError(budget, plan.total_bytes, plan.total_bytes - plan.arena_bytes)
        return plan
    reads = weight_reads(plan.model, plan.graph)
    if weights == "packed":  # values of a step may wait in a file all the same
        reads = [read for read in reads if read.made]
    spare = LIMIT_MARGIN if budget is not None and is_sized_at_run_time(plan.model) else 0
    fixed = plan.total_bytes - sum(read.nbytes for read in reads) + spare
    least = least_bytes(reads)
    if budget is not None and fixed + least > budget:
        raise BudgetError(budget, fixed + least, fixed + least - plan.arena_bytes)
    room = least if budget is None or weights == "mapped" else budget - fixed
    return dataclasses.replace(plan, window=choose_window(reads, room))


def _limited(plan: Plan, device: Device) -> Plan:
    """The plan with a limit for what onnxruntime allocates by itself, where the inputs decide that and a budget is set.

    Raises:
        BudgetError: as scheduled it takes more than the budget.
    """
    if plan.budget is None or not is_sized_at_run_time(plan.model):
        return plan
    by_itself = (plan.workspace_bytes or 0) + plan.run_time_bytes
    limit = (plan.budget - plan.total_bytes + by_itself) // UNIT * UNIT
    if limit < by_itself:  # the order that was found holds more of them at once than the one it was searched for
        needed = plan.total_bytes + LIMIT_MARGIN
        raise BudgetError(plan.budget, needed, needed - plan.arena_bytes)
    measured = "what the inputs decide the size of isn't measured."
    if plan.workspace is not None:
        measured = (
            "the budget holds for inputs like those that were measured, which took "
            f"{format_size(by_itself)} for what they decide and for workspace."
        )
    if not device.is_host:
        said = f"{measured} On {device} nothing holds a run that needs more to it."
        return dataclasses.replace(plan, notes=(*plan.notes, said))
    said = f"{measured} A run that needs more than {format_size(limit)} for it and for workspace ends in an error."
    return dataclasses.replace(plan, limit=limit, notes=(*plan.notes, said))


def _unheeded(job: Job, solution: Solution) -> tuple[str, ...]:
    """A note on nodes that are marked to be recomputed, but kept for the backward pass."""
    request, graph, runs = job.request, job.request.graph, Counter(solution.schedule)
    if not request.recomputes_marked or job.strategy in ("none", "marks"):
        return ()
    forward = forward_pass(graph)
    read = {value for node, reads in enumerate(graph.reads) if not forward[node] for value in reads}
    kept = [
        node
        for node, recomputed in sorted(request.forced.items())
        if recomputed and runs[node] == 1 and node not in request.parts and not graph.views[node]
        if forward[node] and not read.isdisjoint(graph.writes[node])
    ]
    if not kept:
        return ()
    names = f"'{graph.nodes[kept[0]]}'" + (f" and {len(kept) - 1} more" if len(kept) > 1 else "")
    why = "what writes next to nothing, or can't run again, isn't recomputed"
    return (f"marked to be recomputed, but kept: {names}; {why}. {option('strategy', 'marks')} obeys every mark.",)


def device_of(device: str | Device | None) -> Device:
    """The device asked for; where none is, the CPU if onnxruntime is installed, else none."""
    if device is not None:
        return parse_device(device)
    from memonger.runtime import onnxruntime

    return parse_device("cpu" if onnxruntime.is_available() else "none")
