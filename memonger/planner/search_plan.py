"""From a model to its plan through all stages: `search_plan`, `pareto`, `make_mirror_plan` and `get_cost`."""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

import onnx_ir as ir

from memonger.devices import Device
from memonger.errors import BudgetError, LoadError, MemongerError, PlanError
from memonger.graph import schedule, stock
from memonger.graph.graph import Graph
from memonger.graph.liveness import run_time_bytes
from memonger.ir import marks as marks
from memonger.ir import training_roles
from memonger.ir.emitter import collecting_later
from memonger.ir.maps import maps_of
from memonger.ir.marks import CHUNK, STRIP, count_marked, lost
from memonger.ir.model import Model
from memonger.ir.operators import operator_name
from memonger.ir.passes import run_passes
from memonger.ir.training_roles import Training
from memonger.ir.values import nbytes, static_shape
from memonger.lowering.growth import FEW, GrownRuns, ran_nodes, smaller
from memonger.lowering.lowered import Lowered, in_16_bits, portable
from memonger.model.kept_state import check_state, state_of, with_state
from memonger.model.load import Source, load_as_is, load_open, load_twice
from memonger.option_names import Strategy
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
from memonger.planner import cache, networkx_graph
from memonger.planner.attempts import as_asked, least, may_wait, why_all_are_kept, with_window, within
from memonger.planner.job import Job, decided, device_of, finish, may_run_in_chunks, with_search
from memonger.runtime import process_memory
from memonger.runtime.arena import host_memory
from memonger.runtime.feeds import shapes_of, with_tables
from memonger.runtime.program import inputs_of
from memonger.schedule import Request
from memonger.schedule.marks import Marks, annotate, place
from memonger.schedule.solution import Solution, total_bytes
from memonger.shapes import open_dims
from memonger.shapes.ranges import DimRange
from memonger.units import MOST_POINTS, GiB, format_size, whole
from memonger.words import FILE, NAME, option, quoted

if TYPE_CHECKING:
    import networkx

ROOM = 0.8
"""What a run shows that would take more than so much of the memory there is, follows from runs of smaller sizes."""

MOST_OF_RUNS = GiB
"""Bytes of all values together in the largest of these runs, if smaller sizes take as few."""

COARSER = 3
"""Plans in chunks that are timed, each with at most half of the copies of nodes of the one before."""


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
    made, plan = within(job, begin)
    return _within_overhead(as_asked(job), made, plan, begin) if made.chunks and chosen.budget is None else plan


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
    smaller nodes are estimated to take (`memonger.Plan.chunks`). Behind these stand, where there are any, plans for
    smaller budgets, which leave weights, or what a training step updates or makes, in files (`memonger.Plan.window`);
    on a CUDA device weights in the host's memory (`memonger.Plan.host_weights`).

    Args:
        source: What `memonger.load` takes or gives; or a ``networkx.DiGraph``, as for `memonger.search_plan`.
        points: How many budgets are tried, between the total with nothing recomputed and the smallest one found that
            leaves nothing in files; below that half as many, of inference: searches for a step take long.
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
    job = as_asked(prepare(source, chosen, times=True))
    report_progress("search")
    if chosen.chunks != "off" and may_run_in_chunks(job):
        made = _frontier(job, points, sizes, begin, strategy)
    else:
        job = dataclasses.replace(job, strategy=strategy)
        from memonger.schedule.recompute import frontier

        made = [(job.copy(), one) for one in frontier(job.request, points, chosen.order, sizes, strategy)]
    report_progress("verify")
    plans, job = list[Plan](), dataclasses.replace(job, strategy=strategy)
    for plan in (finish(*one, begin) for one in made):
        if all(plan.total_bytes < other.total_bytes for other in plans):  # else its window is larger
            plans.append(plan)
    return (*plans, *_with_files(job, plans[-1].total_bytes, points, sizes, begin))


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


def prepare(
    source: Source | Model, options: Options, *, times: bool = False, grown: GrownRuns | None = None
) -> Job:  # fmt: skip
    """Load, differentiate, lower, and make the graph.

    Args:
        source: What `search_plan` takes.
        options: How to plan.
        times: What nodes take decides something, though the options ask for nothing to be computed again.
        grown: What runs at smaller sizes showed, in place of one at this size.
    """
    report_progress, device = options.progress or _silent, device_of(options.device)
    report_progress("load")
    own, open_in_file = _loaded(source, options)
    if options.inputs and (maps := maps_of(own.ir, own.name)):
        options = dataclasses.replace(options, inputs=with_tables(options.inputs, maps, inputs_of(own.ir.graph)))
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
    if grown is None and mode == "inference":
        grown = _grown_runs(source, options, own, open_in_file, device)
    report_progress("lower")
    timed = times or options.chosen_strategy != "none"
    lowered, ranges = _lower(source, model, device, options, open_in_file, timed, grown)
    report_progress("graph")
    notes = (*own.notes, *said, *_sized_at_run_time(lowered, options))
    if grown is not None and not lowered.spent.runs:
        notes += (grown.note,)
    if ranges:
        from memonger.lowering.ranged import not_all_run

        notes += not_all_run(lowered.model, ranges)
    if mode == "inference" and device.facts.is_portable:
        notes += in_16_bits(lowered.model)
    if options.state:
        with_state(lowered.model, options.state, own.name)
    state = state_of(lowered.model, own.name)
    check_state(lowered.model, state, ranges, own.name)
    if state:
        schedule.put_in_order(lowered.model, state)
    recorded = place(model.ir, lowered.model, model.name)
    if options.chosen_strategy != "none":
        notes += (*lost(selected.ir, model.ir), *recorded.moved)
    roles = training_roles.read(lowered.model, model.name)
    request, measured = _request_of(lowered, roles, device, options, ranges, recorded), lowered.calibration
    stock_bytes = None  # known on the CPU alone, and for what really runs there
    if measured is not None and device.is_host and not ranges:  # values that a run sizes are in the base
        in_file = stock.dims_in_file((open_in_file or own).graph)
        allocated = stock.allocated_bytes(
            lowered.model, measured.workspace, as_written=mode == "inference", in_file=in_file
        )
        stock_bytes = request.base + allocated
    job = Job(
        own, lowered, request, options.chosen_strategy, mode, device, options, notes, marks.origins(model.ir),
        stock_bytes, ranges=ranges,
    )  # fmt: skip
    why = why_all_are_kept(job) if options.weights == "mapped" else ""
    return dataclasses.replace(job, notes=(*job.notes, why)) if why else job


def _grown_runs(
    source: Source | Model, options: Options, own: Model, unbound: Model | None, device: Device
) -> GrownRuns | None:
    """What runs of smaller sizes showed, where one of these would take more than there is; None where it runs.

    That is of a batch, of all dimensions of an image or a sequence that the model leaves open, or of images whose sides
    it fixes.

    Raises:
        PlanError: it would take more than there is, and smaller sizes don't tell.
    """
    is_measured, room = device.is_host and not device.facts.is_portable, process_memory.room()
    taken = [nbytes(value) or 0 for node in own.graph for value in node.outputs]
    if not is_measured or options.ranges or room is None or sum(taken) <= ROOM * room:
        return None
    if max(taken) > (host_memory() or math.inf):  # `device_form` refuses it before onnxruntime makes anything of it
        return None
    from memonger.lowering.as_stock import expected

    shapes = {str(v.name): shape for v in own.graph.inputs if (shape := static_shape(v)) is not None}
    alone = expected(own.ir, shapes, options.threads)
    if alone is not None and alone.run_bytes <= ROOM * room:
        return None
    sizes, is_batch = options.sizes, options.batch is not None and (options.batch > FEW[-1] or not options.sizes)
    if is_batch and options.batch is not None:
        sizes = {"batch": options.batch}
    if unbound is None:
        sizes = {f"{name}[{axis}]": shape[axis] for name, shape in shapes.items() if len(shape) == 4 for axis in (2, 3)}
    report_progress, ran = options.progress or _silent, dict[tuple[int, ...], Any]()
    three = smaller(sizes, MOST_OF_RUNS / sum(taken), is_batch) if sizes and options.inputs is None else []
    for few in three:
        report_progress(f"run at {' and '.join(f'{name} {size}' for name, size in few.items())}")
        given: dict[str, Any] = few if is_batch else {"dims": {**sizes, **few}} if unbound is not None else {}
        with suppress(LoadError, PlanError):
            own_source = source if unbound is not None else _with_sides(source, few)
            found = ran_nodes(prepare(own_source, dataclasses.replace(options, progress=None, **given)).lowered)
            ran |= {} if found is None else {tuple(few.values()): found}
    names = list(three[0]) if three else []
    grown = GrownRuns.of(ran, names, [sizes[name] for name in names])
    if alone is None or alone.without_arena <= room:
        return grown
    why_not = (
        f"measuring it takes a run, of about {format_size(alone.without_arena)}, and this machine has "
        f"{format_size(room)} available. Plan smaller sizes, or without a run ({option('device', 'none')})."
    )
    if grown is None:
        raise PlanError(f"{own.name}: {why_not}")
    return dataclasses.replace(grown, why_not_run=why_not)


def _with_sides(source: Source | Model, sizes: Mapping[str, int]) -> ir.Model:
    """A model with other sizes of its inputs' dimensions, as ``x[2]``, and none that it declares of what follows."""
    model = source.clone().ir if isinstance(source, Model) else load_as_is(source).ir
    for value in model.graph.inputs:
        if value.shape is not None:
            own = [sizes.get(f"{value.name}[{axis}]", dim) for axis, dim in enumerate(value.shape)]
            value.shape = ir.Shape(own)
    for value in (value for node in model.graph for value in node.outputs):
        value.shape = None
    return model


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
        "planned for inference, as the model has no gradients and no loss is given: "
        f"{option('loss', NAME)} plans its training step."
    )
    return dataclasses.replace(options, mode="inference"), (note,)


def _loaded(source: Source | Model, options: Options) -> tuple[Model, Model | None]:
    """The user's own model, loaded, and with the sizes that its file leaves open: see `load_twice`."""
    if isinstance(source, BasePlan):
        raise PlanError("this is a plan already, which memonger.Session runs: to plan again, give the model itself.")
    shapes = shapes_of(options.inputs)
    try:
        own, unbound = load_twice(source, batch=options.batch, dims=options.sizes, input_shapes=shapes)
    except LoadError as error:
        raise LoadError(" ".join(filter(None, (str(error), _sizes_that_run(source, options))))) from error
    path = Path(source) if isinstance(source, str | Path) else None
    return dataclasses.replace(own, path=path), unbound


def _sizes_that_run(source: Source | Model, options: Options) -> str:
    """Of a model whose shapes contradict each other: at which of its sizes they don't; nothing where nothing tells."""
    asked, ranges = options.sizes, options.ranges
    larger = {name: DimRange(size, size + 2 * open_dims.MOST_STEP) for name, size in asked.items()}
    with suppress(MemongerError):
        model, placed = load_open(source, {**larger, **ranges}, batch=options.batch)
        found = open_dims.sizes_that_run(model.ir, placed) or {}
        nearest = {n: one if n in ranges else dataclasses.replace(one, most=one.least) for n, one in found.items()}
        return open_dims.in_words(nearest) if nearest else ""
    return ""


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


def _frontier(
    job: Job, points: int, budgets: Sequence[int], begin: float, strategy: Strategy
) -> list[tuple[Job, Solution]]:
    """Jobs with their solutions, by falling total: with nothing done, as by default, for budgets, and the least."""
    from memonger.schedule.recompute import undominated
    from memonger.tiling import both

    job = with_search(job) if job.mode == "inference" else job
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


def _with_files(job: Job, whole: int, points: int, budgets: Sequence[int], begin: float) -> list[Plan]:
    """Plans for budgets below ``whole`` that leave something in files, by falling total. Of two plans the smaller moves
    more bytes, or computes more again."""
    found, floor, limit = list[Plan](), least(job), job.request.time_limit

    def at(budget: int) -> Plan:
        return within(job.at(budget), begin)[1]

    if with_window(job) is None and not may_wait(job.at(floor)):
        return found
    if not budgets and job.mode == "inference":
        try:
            lowest = at(floor).total_bytes
        except BudgetError as error:
            lowest = error.smallest
        half = -(-points // 2)
        budgets = [lowest + (whole - 1 - lowest) * point // half for point in range(half)]
    for budget in sorted((each for each in budgets if each < whole), reverse=True):
        if limit is not None and time.perf_counter() - begin > limit:
            break
        with suppress(BudgetError):
            plan = at(budget)
            has_files = plan.window is not None or bool(plan.host_weights)
            if has_files and plan.total_bytes < min([whole, *(each.total_bytes for each in found)]):
                found = [each for each in found if _cost_of_files(each) < _cost_of_files(plan)] + [plan]
    return found


def _cost_of_files(plan: Plan) -> tuple[int, float]:
    """What plans with something in files are compared by: bytes that a run moves, and what it computes again."""
    return plan.read_bytes + plan.written_bytes, plan.overhead


def _figures(one: tuple[Job, Solution]) -> tuple[int, float]:
    """Total, and estimated seconds of what is recomputed and of what chunks take longer."""
    job, solution = one
    graph, model = solution.graph, job.lowered.model
    roles = training_roles.read(model, str(model.graph.name))
    of_node = dict(zip(job.request.graph.nodes, estimated_costs(model, roles, job.device), strict=True))
    costs = [of_node[n if n in of_node else again] for n, again in zip(graph.nodes, graph.again, strict=True)]
    recomputed = schedule.overhead(graph.again, costs) * math.fsum(job.request.graph.costs)
    return total_bytes(job.request, solution), recomputed + math.fsum(band.seconds for band in job.chunks)


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
    if not job.lowered.spent.runs or not can_be_timed(seconds, parameter_bytes(model, roles, job.device)):
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
            if made.chunks in ((), plan.chunks):
                break
            plan = finish(made, solution, begin)
        report_progress("compare")
        pairs = timer.pairs(plan)
        spent.ratio = spent.ratio if pairs is None else pairs.ratio
        if pairs is None or not pairs.is_too_slow:
            return dataclasses.replace(plan, planning_seconds=time.perf_counter() - begin)
    given = option("max_overhead", options.max_overhead)
    said = f"nothing runs in chunks: they were measured to take longer than {given} allows."
    return dataclasses.replace(whole, notes=(*whole.notes, said), planning_seconds=time.perf_counter() - begin)


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
    source: Source | Model, model: Model, device: Device, options: Options, unbound: Model | None, times: bool,
    grown: GrownRuns | None,
) -> tuple[Lowered, Mapping[str, DimRange]]:  # fmt: skip
    """The lowered model, and for ranges of sizes these with their places: then it is read anew, with its sizes open."""
    ranges: Mapping[str, DimRange] = {}
    if options.ranges:
        single = {name: size for name, size in options.sizes.items() if name not in options.ranges}
        shapes = shapes_of(options.inputs)
        model, ranges = load_open(source, options.ranges, batch=options.batch, dims=single, input_shapes=shapes)
    if device.facts.is_portable:
        from memonger.lowering import ranged

        return (ranged.portable_form(model, ranges) if options.ranges else portable(model)), ranges
    from memonger.lowering.calibrate import RunFailedError
    from memonger.lowering.device_form import LoweringSettings, device_form

    training = options.chosen_mode == "training"
    level = options.level or (("rewrite" if device.is_host else "disable") if training else "all")
    settings = LoweringSettings(
        level, options.threads, options.inputs, source_order=training, cuda=options.cuda, ranges=ranges,
        times=options.chosen_strategy != "none" if options.ranges else times, grown=grown,
    )  # fmt: skip
    try:
        return device_form(model, device, settings, None if training else unbound), ranges
    except PlanError as error:
        if ranges or not options.sizes or not isinstance(error.__cause__, RunFailedError):
            raise
        raise PlanError(" ".join(filter(None, (str(error), _sizes_that_run(source, options))))) from error
