"""planning: the one function that goes through all the stages from a model to its plan, and its relatives."""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from memonger.autodiff.differentiate import differentiate
from memonger.devices import Device, parse_device
from memonger.errors import BudgetError, PlanError
from memonger.graph import schedule
from memonger.graph.graph import Graph
from memonger.graph.liveness import ALIGNMENT
from memonger.lowering.lowered import Lowered, portable
from memonger.model import marks as marks
from memonger.model import training_roles
from memonger.model.emitter import collecting_later
from memonger.model.load import Source, load
from memonger.model.marks import lost, select
from memonger.model.model import Model
from memonger.plan import GraphPlan, Plan, graph_of, input_bytes, parameter_bytes
from memonger.planning import decide, networkx_graph
from memonger.planning.decide import Decision
from memonger.planning.options import Choices, check, check_bare, strategy_for
from memonger.remat import STRATEGIES, Request, mirror_plan
from memonger.remat.marks import annotate, place
from memonger.remat.on_demand import forward_pass
from memonger.units import format_size

if TYPE_CHECKING:
    import networkx

Progress = Callable[[str], None]


@overload
def search_plan(
    source: Source | Model,
    *,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    progress: Progress | None = None,
    **choices: Any,
) -> Plan: ...


@overload
def search_plan(source: "networkx.DiGraph[Any]", **choices: Any) -> GraphPlan: ...


def search_plan(
    source: Any,
    *,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    progress: Progress | None = None,
    **choices: Any,
) -> Plan | GraphPlan:
    """Plan a model: load, differentiate, lower, decide what is recomputed, lay out, verify, rewrite.

    Args:
        source: What `memonger.load` takes or gives; or a ``networkx.DiGraph`` whose nodes carry ``bytes`` and ``cost``
            (and ``forward``, False for those of a backward pass): then the plan has no model.
        batch: See `memonger.load`.
        dims: See `memonger.load`.
        progress: Called with the name of each stage as it begins.
        choices: The fields of `Choices`.

    Raises:
        LoadError: the model can't be read or its shapes can't be made static.
        PlanError: it can't be planned; the message says what would work: the smallest budget that was found, say.
        RuntimeUnavailableError: the device isn't there.
    """
    options, tell = Choices(**choices), progress or _silent
    if networkx_graph.is_networkx(source):
        tell("search")
        check_bare(options, batch, dims)
        graph, names = networkx_graph.from_networkx(source)
        return networkx_graph.plan_graph(names, _bare_request(options, graph), options.strategy, options.order)
    begin = time.perf_counter()
    with collecting_later():
        job = _prepare(source, batch, dims, tell, options)
        if job.is_uncalibrated:
            tell("rehearse")
            job = _rehearsed(job, begin)
        tell("search")
        found = _decided(job)
        tell("verify")
        return _finish(job, found, begin)


def pareto(
    source: "Source | Model | networkx.DiGraph[Any]",
    *,
    points: int = 8,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    progress: Progress | None = None,
    **choices: Any,
) -> tuple[Plan, ...] | tuple[GraphPlan, ...]:
    """The frontier: plans of which none is better than another in both peak and extra cost, by falling peak.

    Args:
        source: What `memonger.load` takes or gives.
        points: How many budgets are tried, between the peak with nothing recomputed and the smallest one found.
        batch: See `memonger.load`.
        dims: See `memonger.load`.
        progress: Called with the name of each stage as it begins.
        choices: The fields of `Choices` but ``budget``, ``strategy`` and ``mirror``.

    Raises:
        LoadError, PlanError, RuntimeUnavailableError: as `search_plan`.
    """
    options = Choices(**choices)
    if points < 1:
        raise PlanError(f"points={points} can't be: at least 1.")
    if options.budget is not None or options.strategy is not None or options.mirror:
        raise PlanError("pareto tries budgets of its own: leave budget, strategy and mirror out.")
    begin, tell = time.perf_counter(), progress or _silent
    if networkx_graph.is_networkx(source):
        check_bare(options, batch, dims)
        graph, names = networkx_graph.from_networkx(source)
        return networkx_graph.pareto_of_graph(names, _bare_request(options, graph), points, options.order)
    job = dataclasses.replace(_prepare(source, batch, dims, tell, options), strategy="budget")
    if job.is_uncalibrated:
        raise PlanError(
            f"{job.source.name} doesn't fit {job.device} without a plan, so its scratch can't be measured for a whole "
            "frontier: plan it for a budget (--budget), or for no device (--device none)."
        )
    tell("search")
    found = decide.frontier(job.request, points, options.order)
    tell("verify")
    return tuple(_finish(job.copy() if one is not found[-1] else job, one, begin) for one in found)


def make_mirror_plan(source: Source | Model, threshold: float, **options: Any) -> Model:
    """The model with ``force_mirroring`` on every node, as memonger's of that name: no search, one threshold.

    The nodes marked ``mirror_stage`` (without marks: those every way through the model leads over) are candidates for
    keeping. One is kept as soon as what was written since the last one kept comes to the threshold; all else is
    recomputed.

    Args:
        source: What `memonger.load` takes or gives.
        threshold: Bytes; 0 keeps every candidate.
        options: ``batch``, ``dims``, and fields of `Choices`.

    Raises:
        LoadError, PlanError: as `search_plan`; the threshold is negative.
    """
    batch, dims = options.pop("batch", None), options.pop("dims", None)
    job = _prepare(source, batch, dims, _silent, Choices(**{"device": "none", **options}))
    dropped = mirror_plan(job.request, threshold)
    return dataclasses.replace(job.source, ir=annotate(job.source.ir, job.request.graph, dropped, job.origins))


def get_cost(source: Source | Model, **options: Any) -> int:
    """Peak of the training schedule in bytes, with what ``force_mirroring`` says recomputed: memonger's of that name.

    Args:
        source: What `memonger.load` takes or gives.
        options: ``batch``, ``dims``, and fields of `Choices`.

    Raises:
        LoadError, PlanError: as `search_plan`.
    """
    plan: Plan = search_plan(source, **{"device": "none", "strategy": "marks", **options})
    return plan.peak_bytes


def _silent(stage: str) -> None:
    """No progress is shown."""


@dataclass(frozen=True, slots=True)
class _Job:
    """A model ready for the search.

    Attributes:
        source: The user's own, loaded.
        lowered: What will run.
        request: What a strategy is asked.
        strategy: Its name.
        mode: ``training`` or ``inference``.
        device: What is planned for.
        options: The caller's.
        notes: What the user should know.
        origins: See `memonger.model.marks.origins`.
    """

    source: Model
    lowered: Lowered
    request: Request
    strategy: str
    mode: str
    device: Device
    options: Choices
    notes: tuple[str, ...]
    origins: Mapping[str, str]

    @property
    def is_uncalibrated(self) -> bool:
        """Whether the model didn't fit its device unplanned, so that its plan has to be calibrated."""
        return self.lowered.calibration is not None and self.lowered.calibration.workspace is None

    def copy(self) -> "_Job":
        """One with a lowered model of its own: finishing a plan changes it."""
        return dataclasses.replace(self, lowered=dataclasses.replace(self.lowered, model=self.lowered.model.clone()))


def _prepare(
    source: Source | Model, batch: int | None, dims: Mapping[str, int] | None, tell: Progress, options: Choices
) -> _Job:
    """Load, differentiate, lower, and make the graph."""
    check(options)
    device = _device(options.device)
    tell("load")
    own = load(source, batch=batch, dims=dims, input_shapes=_shapes_of(options.inputs))
    mode = _mode(own, options)
    strategy = strategy_for(options, mode)
    model = selected = select(own, options.mirror, options.keep)
    if mode == "training" and not _is_differentiated(model):
        tell("differentiate")
        model = _differentiate(model, options)
    tell("lower")
    lowered = _lower(model, device, options, mode)
    calibration = lowered.calibration
    tell("graph")
    graph = graph_of(
        lowered.model,
        calibration.seconds if calibration else None,
        calibration.workspace if calibration else None,
        calibration.host if calibration else (),
        device,
    )
    placed = place(model.ir, lowered.model, model.name)
    known = training_roles.read(lowered.model, model.name)
    base = parameter_bytes(lowered.model, known) + input_bytes(lowered.model, known)
    request = dataclasses.replace(
        _request(options, graph, base),
        stages=placed.stages,
        forced=placed.forced,
        parts=placed.parts,
        progress=lambda state: tell(f"search: {state}"),
    )
    notes = () if strategy == "none" else (*lost(selected.ir, model.ir), *placed.moved)
    return _Job(own, lowered, request, strategy, mode, device, options, notes, marks.origins(model.ir))


def _decided(job: _Job) -> Decision:
    try:
        return decide.decide(job.request, job.strategy, job.options.order)
    except BudgetError as error:
        kept = sum(not recomputed for recomputed in job.request.forced.values())
        if not kept:
            raise
        hint = f" {kept} nodes are kept because they are marked so (force_mirroring 'False', --keep)."
        raise BudgetError(error.budget, error.smallest, error.lower_bound, hint) from error


def _rehearsed(job: _Job, begin: float) -> _Job:
    """The job with the scratch that a run under a first plan took: one that leaves room for scratch not known yet."""
    from memonger.planning.rehearse import rehearse

    request = job.request
    if request.budget is None:
        found = _decided(job)
    else:
        less = request.base + max(0, request.budget - request.base) * 3 // 4
        try:
            found = _decided(dataclasses.replace(job, request=dataclasses.replace(request, budget=less)))
        except BudgetError as error:
            least = min(error.smallest, request.budget)
            found = _decided(dataclasses.replace(job, request=dataclasses.replace(request, budget=least)))
    workspace = rehearse(_finish(job.copy(), found, begin), job.options.inputs)
    graph = dataclasses.replace(
        job.request.graph, workspace=tuple(workspace.get(name, 0) for name in job.request.graph.nodes)
    )
    assert job.lowered.calibration is not None
    calibration = dataclasses.replace(job.lowered.calibration, workspace=workspace)
    lowered = dataclasses.replace(job.lowered, calibration=calibration)
    return dataclasses.replace(job, lowered=lowered, request=dataclasses.replace(job.request, graph=graph))


def _bare_request(options: Choices, graph: Graph) -> Request:
    """Sizes of a graph without a model are taken as they are: whoever wants aligned addresses gives aligned sizes."""
    return dataclasses.replace(_request(options, graph, 0), alignment=1)


def _request(options: Choices, graph: Graph, base: int) -> Request:
    return Request(
        graph=graph,
        base=base,
        budget=check(options),
        sharing=options.sharing,
        trials=options.trials,
        effort=options.effort,
        time_limit=options.time_limit,
    )


def _finish(job: _Job, found: Decision, begin: float) -> Plan:
    """The plan, checked. The lowered model becomes the planned one."""
    request, calibration = job.request, job.lowered.calibration
    schedule.schedule_model(job.lowered.model, found.schedule, found.graph)
    plan = Plan(
        model=job.lowered.model,
        graph=found.graph,
        offsets=found.offsets,
        arena_bytes=found.arena_bytes,
        alignment=ALIGNMENT,
        mode=job.mode,
        device=str(job.device),
        stamp=job.lowered.stamp,
        threads=job.options.threads,
        workspace=_scratch(calibration.workspace, found) if calibration and calibration.workspace is not None else None,
        batch=job.source.batch,
        budget=request.budget,
        strategy=job.strategy,
        outcome=found.outcome,
        source=job.source,
        origins=job.origins,
        notes=(*job.notes, *_unheeded(job, found), *_overrun(request, found)),
        peak_before_bytes=request.peak_bytes,
        planning_seconds=time.perf_counter() - begin,
        files=job.lowered.files,
        host=_held_on_host(calibration.host, found) if calibration else frozenset(),
    )
    plan.verify()
    return plan


def _scratch(measured: Mapping[str, int], found: Decision) -> dict[str, int]:
    """Scratch of every step by its node's name: a copy takes what the first one took."""
    names, workspace = found.graph.nodes, found.graph.workspace
    return {**measured, **{name: size for name, size in zip(names, workspace, strict=True) if size}}


def _held_on_host(host: frozenset[str], found: Decision) -> frozenset[str]:
    """Names of the values on the host, copies included."""
    return frozenset(name for name in found.graph.values if schedule.original(name) in host) if host else host


def _unheeded(job: _Job, found: Decision) -> tuple[str, ...]:
    """What is marked to be recomputed, but kept for the backward pass."""
    request, graph, runs = job.request, job.request.graph, Counter(found.schedule)
    if not any(request.forced.values()) or job.strategy in ("none", "marks"):
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
    why = f"strategy '{job.strategy}' decides by itself what is recomputed"
    if STRATEGIES[job.strategy].heeds_marks:
        why = "what writes next to nothing, or can't run again, isn't recomputed"
    return (
        f"marked to be recomputed, but kept: {names}; {why}. strategy='marks' (--strategy marks) obeys every mark.",
    )


def _overrun(request: Request, found: Decision) -> tuple[str, ...]:
    over = found.over(request)
    if not over:
        return ()
    return (
        f"live bytes, scratch, parameters and inputs hold the budget at every step, but the arena is "
        f"{format_size(over)} larger than that leaves room for: no layout without gaps was found.",
    )


def _shapes_of(inputs: Mapping[str, Any] | None) -> dict[str, tuple[int, ...]]:
    return {name: tuple(feed.shape) for name, feed in (inputs or {}).items() if hasattr(feed, "shape")}


def _device(device: str | Device | None) -> Device:
    if device is not None:
        return parse_device(device)
    from memonger.runtime import onnxruntime

    return parse_device("cpu" if onnxruntime.is_available() else "none")


def _mode(model: Model, options: Choices) -> str:
    """The mode asked for; it has to go with the model and the other options."""
    wanted = options.loss is not None or options.optimizer is not None
    mode = options.mode or "training"
    if wanted and mode == "inference":
        raise PlanError("a loss or an optimizer is for training: leave mode out, or say mode='training'.")
    if wanted and _is_differentiated(model):
        raise PlanError(f"{model.name} is differentiated already: a loss or an optimizer can't be added to it.")
    return mode


def _is_differentiated(model: Model) -> bool:
    known = training_roles.read(model.ir, model.name)
    return known is not None and known.is_differentiated


def _differentiate(model: Model, options: Choices) -> Model:
    try:
        return differentiate(model, loss=options.loss, optimizer=options.optimizer)
    except PlanError as error:
        if options.mode is None and options.loss is None and options.optimizer is None:
            raise PlanError(f"{error} To plan the model for inference: mode='inference' (--mode inference).") from error
        raise


def _lower(model: Model, device: Device, options: Choices, mode: str) -> Lowered:
    if device.kind == "none":
        return portable(model)
    from memonger.lowering.device_form import Settings, device_form

    level = options.level or ("all" if mode == "inference" else "disable")
    settings = Settings(level, options.threads, options.inputs, source_order=mode == "training", cuda=options.cuda)
    return device_form(model, device, settings)
