"""From a model to its plan through all stages: `search_plan`, `pareto`, `make_mirror_plan` and `get_cost`."""

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

from memonger.allocation import EFFORT
from memonger.allocation.onnxruntime_arena import UNIT
from memonger.devices import Device, parse_device
from memonger.errors import BudgetError, PlanError
from memonger.graph import schedule, stock
from memonger.graph.graph import Graph
from memonger.graph.liveness import ALIGNMENT, run_time_bytes
from memonger.graph.weight_window import choose_window, largest_at_once, weight_reads, why_kept
from memonger.ir import marks as marks
from memonger.ir import training_roles
from memonger.ir.emitter import collecting_later
from memonger.ir.marks import CHUNK, STRIP, count_marked, lost
from memonger.ir.model import Model
from memonger.ir.operators import operator_name
from memonger.ir.passes import run_passes
from memonger.ir.save import MAPPED_LIMIT
from memonger.ir.training_roles import Training
from memonger.lowering.lowered import Lowered, portable
from memonger.model import original_model
from memonger.model.kept_state import check_state, state_of, with_state
from memonger.model.load import Source, load_open, load_twice
from memonger.option_names import Mode, Strategy
from memonger.options import (
    ForGraph,
    Keywords,
    Options,
    bytes_of_budgets,
    check_graph_options,
    combine,
    takes_options,
)
from memonger.plan import (
    LIMIT_MARGIN,
    BasePlan,
    GraphPlan,
    Plan,
    estimated_costs,
    graph_of,
    input_bytes,
    is_sized_at_run_time,
    parameter_bytes,
    state_bytes,
)
from memonger.plan_file import ChunkedBand
from memonger.planner import cache, networkx_graph
from memonger.runtime.packing import packs_here
from memonger.schedule import Request
from memonger.schedule.decide import decide
from memonger.schedule.marks import Marks, annotate, place
from memonger.schedule.on_demand import forward_pass
from memonger.schedule.solution import IN_SLICES, Solution, total_bytes, total_lower_bound
from memonger.shapes import open_dims
from memonger.shapes.ranges import DimRange
from memonger.tiling import chunking
from memonger.units import MOST_POINTS, exactly, format_size, shown, whole
from memonger.words import FILE, call, option, quoted

if TYPE_CHECKING:
    import networkx

    from memonger.tiling import both

COARSER = 3
"""Plans in chunks that are timed, each with at most half of the copies of nodes of the one before."""

WINDOWS = 3
"""Searches with a part of the weights in a file, each for as many bytes fewer as the window of the one before grew."""


@overload
def search_plan(source: Source | Model, *, options: Options | None = None, **keywords: Unpack[Keywords]) -> Plan: ...


@overload
def search_plan(
    source: "networkx.DiGraph[Any]", *, options: Options | None = None, **keywords: Unpack[ForGraph]
) -> GraphPlan: ...


@takes_options()
def search_plan(source: Any, *, options: Options | None = None, **keywords: Unpack[Keywords]) -> Plan | GraphPlan:
    """Plan a model: load, differentiate, lower, decide what is recomputed, lay out, verify, rewrite.

    Args:
        source: What `memonger.load` takes or gives; or a ``networkx.DiGraph`` whose nodes carry ``bytes`` and ``cost``
            (and ``forward``, False for those of a backward pass): then the plan has no model.
        options: A record of all options to start from; keywords given beside it replace its fields.
        keywords: The fields of `Options`.

    Where the environment variable ``MEMONGER_CACHE`` names a folder, the plan of a model is kept there, or that no plan
    holds the budget, and the same model with the same options, versions and machine gives it again; see
    `memonger.planner.cache`.

    Raises:
        LoadError: the model can't be read or its shapes can't be made static.
        PlanError: it can't be planned; the message says what would work: the smallest budget that was found, say.
        RuntimeUnavailableError: the device isn't there.
        TypeError: a keyword is no option.
    """
    chosen = combine(options, keywords)
    chosen.check_budget()
    report_progress = chosen.progress or _silent
    if networkx_graph.is_networkx(source):
        report_progress("search")
        graph, names = _without_model(source, chosen)
        return networkx_graph.plan_graph(names, _request(chosen, graph, alignment=1), chosen.strategy, chosen.order)
    begin = time.perf_counter()
    kept = None if isinstance(source, BasePlan) else cache.entry(source, chosen, device_of(chosen.device))
    found = kept.read() if kept is not None else None
    if found is not None:
        own, _ = _loaded(source, chosen)
        return dataclasses.replace(found, source=own, planning_seconds=time.perf_counter() - begin)
    refused = kept.read_refusal() if kept is not None else None
    if refused is not None:
        raise refused
    try:
        with collecting_later():
            made = _search_plan(source, chosen, begin)
    except BudgetError as error:
        if kept is not None and chosen.time_limit is None:  # with more time there may be one
            kept.write_refusal(error)
        raise
    if kept is not None:
        kept.write(made)
    return made


def _search_plan(source: Source | Model, chosen: Options, begin: float) -> Plan:
    """The plan of a model, made anew."""
    job = prepare(source, chosen)
    made, plan = _first_within(job, begin)
    return _within_overhead(job, made, plan, begin) if made.chunks and chosen.budget is None else plan


@overload
def pareto(
    source: Source | Model,
    *,
    points: int = 8,
    budgets: Sequence[float | str] = (),
    options: Options | None = None,
    **keywords: Unpack[Keywords],
) -> tuple[Plan, ...]: ...


@overload
def pareto(
    source: "networkx.DiGraph[Any]",
    *,
    points: int = 8,
    budgets: Sequence[float | str] = (),
    options: Options | None = None,
    **keywords: Unpack[ForGraph],
) -> tuple[GraphPlan, ...]: ...


@takes_options()
def pareto(
    source: Any,
    *,
    points: int = 8,
    budgets: Sequence[float | str] = (),
    options: Options | None = None,
    **keywords: Unpack[Keywords],
) -> tuple[Plan, ...] | tuple[GraphPlan, ...]:
    """The frontier: plans of which none is better than another in both total and extra cost, by falling total.

    The first recomputes nothing but what is marked so (``mirror``, ``force_mirroring``), as all of them do, and has no
    chunks; the last takes the least memory that was found. The others are what `memonger.search_plan` gives without a
    budget, and for budgets in between. The plan for a budget is the first that fits it: of two budgets the smaller
    never has the larger total, nor the cheaper plan. The extra cost is that of what is recomputed, and what more and
    smaller nodes are estimated to take (`memonger.Plan.chunks`).

    Args:
        source: What `memonger.load` takes or gives; or a ``networkx.DiGraph``, as for `memonger.search_plan`.
        points: How many budgets are tried, between the total with nothing recomputed and the smallest one found.
        budgets: The budgets to try instead, as `memonger.search_plan` takes one; ``budget`` is one of them.
        options: A record of options to start from; keywords given beside it replace its fields.
        keywords: The fields of `Options`. A strategy has to be one that takes a budget.

    Raises:
        LoadError, PlanError, RuntimeUnavailableError, TypeError: as `search_plan`.
    """
    chosen = combine(options, keywords)
    points = whole("points", points, 1, MOST_POINTS, PlanError)
    sizes = bytes_of_budgets(budgets) + ([] if chosen.budget_bytes is None else [chosen.budget_bytes])
    strategy = chosen.for_budgets().chosen_strategy
    chosen = dataclasses.replace(chosen, budget=None, strategy=None)
    if chosen.axis_and_chunks is not None:
        raise PlanError(f"pareto takes {option('chunks', 'auto')} or {option('chunks', 'off')}, not {chosen.chunks!r}.")
    begin, report_progress = time.perf_counter(), chosen.progress or _silent
    if networkx_graph.is_networkx(source):
        graph, names = _without_model(source, chosen)
        request = _request(chosen, graph, alignment=1)  # sizes aren't rounded up, as aligned addresses would need
        return networkx_graph.pareto_of_graph(names, request, points, chosen.order, sizes, strategy)
    job = prepare(source, chosen, times=True)
    report_progress("search")
    if chosen.chunks != "off" and may_run_in_chunks(job):
        made = _frontier(job, points, sizes, begin, strategy)
    else:
        job = dataclasses.replace(job, strategy=strategy)
        from memonger.schedule.recompute import frontier

        made = [(job.copy(), one) for one in frontier(job.request, points, chosen.order, sizes, strategy)]
    report_progress("verify")
    return tuple(finish(*one, begin) for one in made)


@takes_options(device="none", mode="training")
def make_mirror_plan(
    source: Source | Model, threshold: float, *, options: Options | None = None, **keywords: Unpack[Keywords]
) -> Model:
    """The model with ``force_mirroring`` on every node, as memonger's of that name: no search, one threshold.

    The nodes marked ``mirror_stage`` (without marks: the nodes that every path through the model passes) are
    candidates for keeping. One is kept as soon as the bytes written since the last one kept reach the threshold; all
    else is recomputed.

    Args:
        source: What `memonger.load` takes or gives.
        threshold: Bytes; 0 keeps every candidate.
        options: A record of options to start from; keywords given beside it replace its fields.
        keywords: The fields of `Options`.

    Raises:
        LoadError, PlanError, TypeError: as `search_plan`; the threshold is negative.
    """
    from memonger.schedule.checkpoints import mirror_plan

    job = prepare(source, combine(options, keywords))
    dropped = mirror_plan(job.request, threshold)
    return dataclasses.replace(job.source, ir=annotate(job.source.ir, job.request.graph, dropped, job.origins))


@takes_options(device="none", mode="training", strategy="marks")
def get_cost(source: Source | Model, *, options: Options | None = None, **keywords: Unpack[Keywords]) -> int:
    """Peak of the training schedule in bytes, with what ``force_mirroring`` says recomputed: memonger's of that name.

    Args:
        source: What `memonger.load` takes or gives.
        options: A record of options to start from; keywords given beside it replace its fields.
        keywords: The fields of `Options`.

    Raises:
        LoadError, PlanError, TypeError: as `search_plan`.
    """
    return search_plan(source, options=combine(options, keywords)).peak_bytes


def _without_model(source: Any, options: Options) -> tuple[Graph, tuple[object, ...]]:
    """The planner's graph of a ``networkx.DiGraph``, and that graph's own names of the nodes."""
    check_graph_options(options)
    return networkx_graph.from_networkx(source)


def _silent(stage: str) -> None:
    """No progress is shown."""


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
        search: What has looked for chunks; None: nothing has.
        has_window: Whether weights may stay in the plan's file: as many as the options' budget then needs. The base of
            the request has as few of them as there can be in memory.
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

    def copy(self) -> "Job":
        """The same job with a lowered model of its own, as finishing a plan changes that."""
        return dataclasses.replace(self, lowered=dataclasses.replace(self.lowered, model=self.lowered.model.clone()))


def prepare(source: Source | Model, options: Options, *, times: bool = False) -> Job:
    """Load, differentiate, lower, and make the graph.

    Args:
        source: What `search_plan` takes.
        options: How to plan.
        times: What nodes take decides something, though the options ask for nothing to be computed again.
    """
    report_progress, device = options.progress or _silent, device_of(options.device)
    report_progress("load")
    own, open_in_file = _loaded(source, options)
    if options.trains and own.is_differentiated:
        raise PlanError(
            f"{own.name} is differentiated already: leave loss and optimizer out, or give the forward model."
        )
    asked, (options, said) = options, infer_mode(own, options)
    if options.precision is not None and own.is_differentiated:
        given = option("precision", options.precision)
        raise PlanError(f"{own.name} is differentiated already: {given} is for training a forward model.")
    mode = options.chosen_mode
    model = selected = own
    if options.mirror or options.keep:
        mark = partial(marks.mark_nodes, mirror=options.mirror, keep=options.keep)
        model = selected = run_passes(own.clone(), "load", mark)
    if mode == "training" and not model.is_differentiated:
        report_progress("differentiate")
        model, notes = _differentiate(model, asked)
        said += notes
    report_progress("lower")
    lowered, ranges = _lower(source, model, device, options, open_in_file, times or options.chosen_strategy != "none")
    report_progress("graph")
    notes = (*own.notes, *said, *_sized_at_run_time(lowered, options))
    if options.state:
        with_state(lowered.model, options.state, own.name)
    state = state_of(lowered.model, own.name)
    check_state(lowered.model, state, ranges, own.name)
    if state:
        schedule.state_last(lowered.model, state)
    recorded = place(model.ir, lowered.model, model.name)
    if options.chosen_strategy != "none":
        notes += (*lost(selected.ir, model.ir), *recorded.moved)
    roles = training_roles.read(lowered.model, model.name)
    request, measured = _request_of(lowered, roles, device, options, ranges, recorded), lowered.calibration
    stock_bytes = None  # known on the CPU alone, and for what really runs there
    if measured is not None and device.is_host and not ranges:  # values that a run sizes are in the base
        allocated = stock.allocated_bytes(lowered.model, measured.workspace, as_written=mode == "inference")
        stock_bytes = request.base + allocated
    return Job(
        own, lowered, request, options.chosen_strategy, mode, device, options, notes, marks.origins(model.ir),
        stock_bytes, ranges=ranges,
    )  # fmt: skip


def _first_within(job: Job, begin: float) -> tuple[Job, Plan]:
    """The first of `attempts` that holds the budget, with its plan.

    Raises:
        BudgetError: none does. It names the smallest budget that some attempt found to work.
    """
    refusals, waiting = list[BudgetError](), list[BudgetError]()
    found = _with_values_in_file(job, begin, _tried(job, begin, refusals), waiting)
    if found is not None:
        return found
    error, reads = _refusal(job, begin, refusals), weight_reads(job.lowered.model, job.request.graph)
    if waiting:
        smallest = min(error.smallest for error in waiting)
        if smallest >= error.smallest or _with_values_in_file(_at(job, smallest), begin, None, []) is None:
            smallest = error.smallest
        bound = job.request.base
        if with_window(job) is not None:
            bound += sum(read.own - read.nbytes for read in reads) + max(read.resident for read in reads)
        error = BudgetError(error.budget, smallest, min(error.lower_bound, bound), error.hint)
    raise error


def _at(job: Job, budget: int) -> Job:
    """The job with another budget."""
    options, request = dataclasses.replace(job.options, budget=budget), dataclasses.replace(job.request, budget=budget)
    return dataclasses.replace(job, options=options, request=request)


def _refusal(job: Job, begin: float, refusals: list[BudgetError]) -> BudgetError:
    """Of what `attempts` ended with the one that names the smallest budget that works."""
    if len(refusals) > 1:  # in another order two weights that follow each other may take less, but each is read
        reads = weight_reads(job.lowered.model, job.request.graph)
        largest = max(read.resident for read in reads)
        bound = min(error.lower_bound for error in refusals) + largest - largest_at_once(reads)
        bound = max(bound, job.request.base + sum(read.own - read.nbytes for read in reads) + largest)
        refusals = [BudgetError(error.budget, error.smallest, bound, error.hint) for error in refusals]
    if job.mode == "inference" and packs_here(job.lowered.stamp) and (why := why_kept(job.lowered.model)):
        refusals = [BudgetError(e.budget, e.smallest, e.lower_bound, e.hint + why) for e in refusals]
    refusals = sorted(refusals, key=lambda error: error.smallest)
    for error in refusals[:-1]:  # in slices weights are read in another order, which may need a larger window
        if _tried(_at(job, error.smallest), begin, []) is not None:
            return error
    return refusals[-1]


def _with_values_in_file(
    job: Job, begin: float, found: tuple[Job, Plan] | None, refusals: list[BudgetError]
) -> tuple[Job, Plan] | None:
    """What was found, or a plan that leaves values of a step in a file, where that takes fewer seconds, or is the only
    one; see `memonger.planner.waiting`. What tries end with is added to ``refusals``."""
    measured, options = job.lowered.calibration, job.options
    report_progress = options.progress or _silent
    is_timed = measured is not None and bool(measured.seconds) and packs_here(job.lowered.stamp)
    is_plain = options.buckets is None and options.axis_and_chunks is None and not job.ranges
    if job.mode != "training" or job.request.budget is None or not (is_timed and is_plain):
        return found
    from memonger.planner import waiting  # here: without a budget for a step none of it is needed

    best, least, usual = found, math.inf, None
    if found is not None:
        least = usual = waiting.seconds_of(job.request, found[1])
        if least <= 0 or options.time_limit is not None:
            return found
    for nodes in waiting.choices(job.request, usual):
        report_progress("search")
        lowered, request = waiting.marked(job.lowered, job.request, job.device, nodes)
        apart = dataclasses.replace(
            job, lowered=lowered, request=request, options=dataclasses.replace(options, chunks="off"), has_window=True
        )
        unwindowed = dataclasses.replace(apart, request=dataclasses.replace(request, base=job.request.base))
        for attempt in (apart, with_window(unwindowed) if found is None else None):
            if attempt is None:
                continue
            try:
                made, solution = decided(attempt.copy())  # the next one begins with the same model
                plan = finish(made, solution, begin)
            except BudgetError as error:
                refusals.append(error)
                continue
            seconds = waiting.seconds_of(job.request, plan)
            if seconds < least and plan.values_in_file:
                said = waiting.note(job.request, plan, usual)
                best, least = (made, dataclasses.replace(plan, notes=(*plan.notes, said))), seconds
            break
    return best


def _tried(job: Job, begin: float, refusals: list[BudgetError]) -> tuple[Job, Plan] | None:
    """The first attempt that holds the budget; what the others say is added to ``refusals``."""
    report_progress = job.options.progress or _silent
    for attempt in attempts(job):
        wanted = attempt.request
        for _ in range(WINDOWS if attempt.has_window else 1):
            report_progress("search")
            try:
                made, solution = decided(attempt.copy() if attempt.has_window else attempt)
            except BudgetError as error:
                refusals.append(error)
                break
            report_progress("verify")
            try:
                return made, finish(made, solution, begin)
            except BudgetError as error:  # weights that are read again come next to others: the window is larger
                refusals.append(error)
                wanted = dataclasses.replace(wanted, base=wanted.base + error.smallest - error.budget)
                if wanted.budget is None or wanted.base >= wanted.budget:
                    break
                attempt = dataclasses.replace(attempt, request=wanted)
    return None


def attempts(job: Job) -> Iterator[Job]:
    """What a budget is searched with, in turn: the job as it is; then with a part of its weights in the plan's file.

    With all else as large as it is without a budget more of the weights are left there, and with all else as small as
    the budget makes it fewer: the first computes nothing again but what is computed again anyway. What a training step
    computes again reads its weights again, next to any other: last there is room for the two largest.
    """
    budget = job.request.budget
    in_file = None if budget is None else with_window(job)
    if budget is None or in_file is None:
        yield job
        return
    if job.request.base < budget:
        yield job.copy()
    unlimited = dataclasses.replace(in_file.request, budget=None)
    usual = dataclasses.replace(job.options, strategy=None, budget=None).chosen_strategy
    yield dataclasses.replace(in_file, request=unlimited, strategy=usual)
    yield in_file
    roomy = with_window(job, any_order=True) if job.mode == "training" else None
    if roomy is not None and roomy.request.base > in_file.request.base:
        yield roomy


def with_window(job: Job, *, any_order: bool = False) -> Job | None:
    """The job with as few weights in memory as there can be; None where none of them may stay in the plan's file.

    That is on this machine's processor: the file has the weights as its kernels read them. Of a training step those may
    stay there that are frozen; what it updates stays in a file of the session's.

    Args:
        job: The job, with all weights in memory.
        any_order: Whether a training step has room for its two largest, whichever come next to each other.
    """
    model, request = job.lowered.model, job.request
    tensors = (value.const_value for value in model.graph.initializers.values())
    if not packs_here(job.lowered.stamp) or sum(one.nbytes for one in tensors if one is not None) < MAPPED_LIMIT:
        return None
    reads = weight_reads(model, request.graph)
    if not reads:
        return None
    window = largest_at_once(reads)
    if any_order and job.mode == "training":
        window = max(window, sum(sorted(read.resident for read in reads)[-2:]))
    base = request.base + sum(read.own - read.nbytes for read in reads) + window
    return dataclasses.replace(job, has_window=True, request=dataclasses.replace(request, base=base))


def infer_mode(model: Model, options: Options) -> tuple[Options, tuple[str, ...]]:
    """The options with a mode, and where nobody gave one a sentence that says which, why, and how to get the other.

    Args:
        model: The user's own model, loaded.
        options: What the user asks for.

    Raises:
        PlanError: the other options don't go with the mode.
    """
    if options.mode is not None:
        return options, ()
    why, other, marked = "", "without it the model is planned for inference", 0
    if options.trains:
        why = "a loss is given"
    elif model.is_differentiated:
        why, other = "the model has gradients already", "for inference, plan the model that it was made from"
    elif training_roles.KEY in model.ir.metadata_props:
        why, other = "the model is in training form", "for inference, plan the model as it was exported"
    elif options.recomputes_for_training:
        why = f"{option('mirror')} is given" if options.mirror else f"strategy {options.strategy!r} is for training"
    elif marked := count_marked(model.ir):
        carry = "carries" if marked == 1 else "carry"
        why = f"{marked} of its nodes {carry} marks (mirror_stage, force_mirroring)"
        other = f"{option('mode', 'inference')} plans it for inference"
    if why:
        return dataclasses.replace(options, mode="training"), (f"planned for training, as {why}: {other}.",)
    note = (
        "planned for inference, as the model has no gradients and no marks (mirror_stage, force_mirroring), and no "
        f"loss is given: {option('mode', 'training')} plans its training step."
    )
    return dataclasses.replace(options, mode="inference"), (note,)


def _loaded(source: Source | Model, options: Options) -> tuple[Model, Model | None]:
    """The user's own model, loaded, and with the sizes that its file leaves open: see `load_twice`."""
    if isinstance(source, BasePlan):
        raise PlanError("this is a plan already, which memonger.Session runs: to plan again, give the model itself.")
    own, unbound = load_twice(source, batch=options.batch, dims=options.sizes, input_shapes=_shapes_of(options.inputs))
    path = Path(source) if isinstance(source, str | Path) else None
    return dataclasses.replace(own, path=path), unbound


def _request_of(
    lowered: Lowered, roles: Training | None, device: Device, options: Options, ranges: Mapping[str, DimRange],
    recorded: Marks,
) -> Request:  # fmt: skip
    """What is asked of a lowered model, with what its marks say of it."""
    model, report_progress, measured = lowered.model, options.progress or _silent, lowered.calibration
    seconds, workspace, host = (measured.seconds, measured.workspace, measured.host) if measured else (None, None, ())
    graph = graph_of(model, roles, seconds, workspace, host, device, ranges)
    if options.buckets is not None:
        from memonger.graph.collectives import with_collectives

        with_collectives(model, graph, roles, options.buckets, str(model.graph.name))
        graph = graph_of(model, roles, seconds, workspace, host, device, ranges)
    beside = parameter_bytes(model, roles, device) + input_bytes(model, roles) + state_bytes(model, graph)
    at_run_time = 0 if measured is None else run_time_bytes(graph, measured.run_time)
    if options.budget is not None and is_sized_at_run_time(model):
        at_run_time += LIMIT_MARGIN
    estimates = None
    if options.chosen_mode == "training" and seconds is not None:
        estimates = estimated_costs(model, roles, device)
    return _request(
        options,
        graph,
        base=beside + at_run_time,
        estimates=estimates,
        run_time=at_run_time if is_sized_at_run_time(model) else None,
        stages=recorded.stages,
        forced=recorded.forced,
        parts=recorded.parts,
        progress=lambda state: report_progress(f"search: {state}"),
    )


def _request(options: Options, graph: Graph, **fields: Any) -> Request:
    return Request(
        graph=graph,
        budget=options.budget_bytes,
        sharing=options.sharing,
        trials=options.trials,
        effort=options.effort,
        time_limit=options.time_limit,
        **fields,
    )


def _sized_at_run_time(lowered: Lowered, options: Options) -> tuple[str, ...]:
    """A note on values whose size only a run can tell, so that no layout holds them: which, and how they count."""
    names = set(open_dims.unknown(lowered.model))
    if not names:
        return ()
    writers = [node for node in lowered.model.graph if any(value.name in names for value in node.outputs)]
    first = [node for node in writers if not any(v is not None and v.name in names for v in node.inputs)] or writers[:1]
    listed = ", ".join(f"'{node.name}' ({operator_name(node)})" for node in first[:3]) + (", ..." if first[3:] else "")
    values = f"{len(names)} values, which" if len(names) > 1 else f"'{min(names)}', which"
    what = f"only a run can tell the size of {values} {listed} decide{'s' if len(first) == 1 else ''}"
    if lowered.calibration is None:
        return (f"{what}: onnxruntime allocates them beside the arena, and they aren't counted.",)
    more = "" if options.inputs else f" With inputs of yours ({option('inputs', FILE)}) they count as with those."
    return (
        f"{what}: onnxruntime allocates them beside the arena, and they count as the calibrating run showed.{more}",
    )


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
    return job, solve(job)


def _frontier(
    job: Job, points: int, budgets: Sequence[int], begin: float, strategy: Strategy
) -> list[tuple[Job, Solution]]:
    """Jobs with their solutions, by falling total: with nothing done, as by default, for budgets, and the least."""
    from memonger.schedule.recompute import undominated
    from memonger.tiling import both

    request, report_progress = dataclasses.replace(job.request, progress=None), job.options.progress or _silent
    step = both.StepSearch(job.lowered, request, job.options, job.device, strategy)
    plain = step.budgets.plain
    kept: Strategy = "marks" if request.recomputes_marked else "none"
    made = [(dataclasses.replace(job.copy(), strategy=kept), plain), decided(job.copy())]

    def at(budget: int) -> tuple[Job, Solution]:
        asked = dataclasses.replace(request, budget=budget)
        known = plain if job.mode == "inference" else None
        return decided(dataclasses.replace(job.copy(), request=asked, strategy=strategy, solution=known), step)

    with suppress(BudgetError):
        try:
            made.append(at(0))
        except BudgetError as error:
            made.append(at(error.smallest))
    totals = [total_bytes(one.request, solution) for one, solution in made]
    lowest, span = min(totals), totals[0] - min(totals)
    tried = sorted(budgets) or [lowest + span * point // points for point in range(1, points)]
    for number, budget in enumerate(tried):
        if request.time_limit is not None and time.perf_counter() - begin > request.time_limit:
            break
        with suppress(BudgetError):
            made.append(at(budget))
            total = total_bytes(made[-1][0].request, made[-1][1])
            report_progress(f"search: found point {number + 1} of {len(tried)}: {format_size(total)} in total")
    return undominated(made, _figures)


def _figures(one: tuple[Job, Solution]) -> tuple[int, float]:
    """Total, and estimated seconds of what is recomputed and of what chunks take longer."""
    job, solution = one
    graph, model = solution.graph, job.lowered.model
    roles = training_roles.read(model, str(model.graph.name))
    of_node = dict(zip(job.request.graph.nodes, estimated_costs(model, roles, job.device), strict=True))
    costs = [of_node[n if n in of_node else again] for n, again in zip(graph.nodes, graph.again, strict=True)]
    recomputed = schedule.overhead(graph.again, costs) * math.fsum(job.request.graph.costs)
    return total_bytes(job.request, solution), recomputed + math.fsum(band.seconds for band in job.chunks)


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
        strategy = job.strategy if job.mode == "training" else "none"
        plain = job.solution or decide(dataclasses.replace(request, budget=None), strategy, options.order)
        search = job.search or chunking.ChunkSearch(
            lowered, request, options, device, job.source.batch, plain, job.ranges
        )
        job, candidate = dataclasses.replace(job, search=search), search.chosen() or plain
    if isinstance(candidate, Solution):
        return dataclasses.replace(job, solution=candidate)
    return dataclasses.replace(
        job, lowered=candidate.lowered, request=dataclasses.replace(candidate.request, budget=request.budget),
        options=dataclasses.replace(options, order="file"), notes=(*job.notes, *candidate.notes),
        chunks=candidate.described(), solution=candidate.solution,
    )  # fmt: skip


def solve(job: Job) -> Solution:
    """Order, recompute, lay out; see `memonger.schedule.decide`."""
    solution, budget = job.solution, job.request.budget
    is_final = job.mode == "training" or job.strategy == "none"
    if solution is not None and (is_final or (budget and total_bytes(job.request, solution) <= budget)):
        return solution
    try:
        effort = IN_SLICES if job.chunks else EFFORT
        return decide(job.request, job.strategy, job.options.order, effort)
    except BudgetError as error:
        raise _explained(job, error) from error


def _explained(job: Job, error: BudgetError) -> BudgetError:
    """The error with what keeps nodes, and with what finds the size that fits where the model was given one."""
    kept, hint = sum(not recomputed for recomputed in job.request.forced.values()), ""
    if kept:
        hint = f" {kept} nodes are kept because they are marked so (force_mirroring 'False', {option('keep')})."
    dims = list(job.options.dims or ())
    if job.source.batch is not None or dims:
        besides: dict[str, object] = {} if job.source.batch is not None else {"vary": dims[0]}
        size = besides.get("vary", "batch")
        if others := {name: value for name, value in (job.options.dims or {}).items() if name != size}:
            besides["dims"] = others
        if job.device != device_of(None):
            besides["device"] = str(job.device)
        example = call("fit", job.source.name, memory=exactly(error.budget), **besides)
        hint += f" The largest {size} that fits: {example}"
    weights = sum(read.nbytes for read in weight_reads(job.lowered.model))
    if job.device.facts.is_portable and weights >= max(MAPPED_LIMIT, error.smallest // 2):
        hint += f" With {option('device', 'cpu')} weights may stay in the plan's file."
    bound = error.lower_bound
    if may_run_in_chunks(job):
        bound = min(bound, total_lower_bound(job.request, whole=False))
    return BudgetError(error.budget, error.smallest, bound, hint)


def _within_overhead(job: Job, made: Job, plan: Plan, begin: float) -> Plan:
    """The plan, or one with fewer chunks, or none, where those were measured to take longer than the options allow.

    Args:
        job: The model without chunks.
        made: The job that the plan was made of.
        plan: The plan in chunks.
        begin: When planning began.
    """
    from memonger.planner.chunk_timing import NOISE, ChunkTimer, can_be_timed  # here: it imports sessions and trainers

    options, measured, report_progress = job.options, job.lowered.calibration, job.options.progress or _silent
    if options.chunks != "auto" or measured is None or measured.seconds is None:
        return plan
    model, seconds = job.lowered.model, math.fsum(measured.seconds.values())
    roles = training_roles.read(model, str(model.graph.name))
    if not can_be_timed(seconds, parameter_bytes(model, roles, job.device)):
        return plan
    off = dataclasses.replace(job.copy(), options=dataclasses.replace(options, chunks="off"))
    whole, spent = finish(*decided(off), begin), job.lowered.spent
    limit = 1 + options.max_overhead + NOISE
    timer = ChunkTimer(whole, seconds, limit, options.inputs)
    for attempt in range(COARSER):
        if attempt:
            copies = sum(CHUNK in node.metadata_props or STRIP in node.metadata_props for node in plan.model.graph)
            assert made.search is not None
            made.search.most_copies = copies // 2
            made, solution = decided(dataclasses.replace(job.copy(), search=made.search))
            if not made.chunks or made.lowered.model is plan.model:
                break
            plan = finish(made, solution, begin)
        report_progress("compare")
        ratio = timer.ratio(plan)
        spent.ratio = ratio if ratio is not None else spent.ratio
        if ratio is None or ratio <= limit:
            return dataclasses.replace(plan, planning_seconds=time.perf_counter() - begin)
    given = option("max_overhead", options.max_overhead)
    said = f"nothing runs in chunks: they were measured to take longer than {given} allows."
    return dataclasses.replace(whole, notes=(*whole.notes, said), planning_seconds=time.perf_counter() - begin)


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
        plan = _with_window(plan)
    plan = _limited(plan, job.device)
    plan.verify()
    return dataclasses.replace(plan, notes=(*plan.notes, *map(shown, plan.state_notes)))


def _with_window(plan: Plan) -> Plan:
    """The plan with as many weights in its file as its budget needs.

    Raises:
        BudgetError: it can't be held by that.
    """
    budget, reads = plan.budget, weight_reads(plan.model, plan.graph)
    assert budget is not None
    spare = LIMIT_MARGIN if is_sized_at_run_time(plan.model) else 0
    fixed = plan.total_bytes - sum(read.nbytes for read in reads) + spare
    try:
        return dataclasses.replace(plan, window=choose_window(reads, budget - fixed))
    except ValueError:
        needed = fixed + sum(read.own for read in reads) + largest_at_once(reads)
        raise BudgetError(budget, needed, needed - plan.arena_bytes) from None


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
    if not (device.is_host or device.facts.is_portable):
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


def _shapes_of(inputs: Mapping[str, Any] | None) -> dict[str, tuple[int, ...]]:
    return {name: tuple(feed.shape) for name, feed in (inputs or {}).items() if hasattr(feed, "shape")}


def device_of(device: str | Device | None) -> Device:
    """The device asked for; where none is, the CPU if onnxruntime is installed, else none."""
    if device is not None:
        return parse_device(device)
    from memonger.runtime import onnxruntime

    return parse_device("cpu" if onnxruntime.is_available() else "none")


def _differentiate(model: Model, options: Options) -> tuple[Model, tuple[str, ...]]:
    """The training model, with notes on what its losses aren't, and on gradients that became inputs."""
    from memonger.autodiff.differentiate import differentiate  # here: inference needs no rules
    from memonger.autodiff.mixed_precision import to_mixed_precision

    notes = list[str]()
    try:
        if options.precision is not None:
            model = to_mixed_precision(model, options.precision)
        model = differentiate(model, loss=options.loss, optimizer=options.optimizer)
    except PlanError as error:
        if options.mode is None and not options.trains:
            raise PlanError(f"{error} To plan the model for inference: {option('mode', 'inference')}.") from error
        raise
    if model.training is not None and model.training.output_gradients:
        notes.append(
            "no loss is given, so the gradients of the outputs became inputs "
            f"({quoted(tuple(model.training.output_gradients.values()), 3)}): "
            f"{option('loss', 'softmax_cross_entropy')} puts a loss into the model."
        )
    if options.precision is not None:
        notes.append(f"products are rounded to {options.precision}: losses and weights are not float32's.")
    return model, tuple(notes)


def _lower(
    source: Source | Model, model: Model, device: Device, options: Options, unbound: Model | None, times: bool
) -> tuple[Lowered, Mapping[str, DimRange]]:
    """The lowered model, and for ranges of sizes these with their places: then it is read anew, with its sizes open."""
    ranges: Mapping[str, DimRange] = {}
    if options.ranges:
        single = {name: size for name, size in options.sizes.items() if name not in options.ranges}
        shapes = _shapes_of(options.inputs)
        model, ranges = load_open(source, options.ranges, batch=options.batch, dims=single, input_shapes=shapes)
    if device.facts.is_portable:
        from memonger.lowering import ranged

        return (ranged.portable_form(model, ranges) if options.ranges else portable(model)), ranges
    from memonger.lowering.device_form import LoweringSettings, device_form

    training = options.chosen_mode == "training"
    level = options.level or (("rewrite" if device.is_host else "disable") if training else "all")
    settings = LoweringSettings(
        level, options.threads, options.inputs, source_order=training, cuda=options.cuda, ranges=ranges,
        times=options.chosen_strategy != "none" if options.ranges else times,
    )  # fmt: skip
    return device_form(model, device, settings, None if training or options.ranges else unbound), ranges
