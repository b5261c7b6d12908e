"""How many bytes are what: forward values, gradients, workspace, parameters, optimizer state, inputs.

The kinds are those of OptNet's ``countUsedMemory`` (https://github.com/fmassa/optimize-net, countUsedMemory.lua), which
counts every storage once, under the first kind that uses it; here the bytes of an arena are counted that way.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Unpack

import onnx_ir as ir

from memonger.devices import Device, parse_device
from memonger.errors import LoadError
from memonger.graph.graph import Graph
from memonger.graph.liveness import run_time_bytes, worst_step
from memonger.ir.model import Model
from memonger.ir.training_roles import Training
from memonger.ir.values import nbytes
from memonger.model.load import Source, load_as_is
from memonger.options import Keywords, Options, combine, takes_options
from memonger.plan import BasePlan, GraphPlan, Plan, input_bytes, parameter_bytes
from memonger.plan_file import is_planned
from memonger.planner.search_plan import prepare
from memonger.schedule.on_demand import forward_pass

IN_ARENA = ("outputs", "output_gradients", "parameter_gradients", "temporaries")
"""The kinds of planned values; `value_kinds` gives indexes into it."""

_OUTPUTS, _OUTPUT_GRADIENTS, _PARAMETER_GRADIENTS, _TEMPORARIES = range(4)

_SCALAR = 8  # bytes; what is no larger carries no gradient of a tensor

KIND_NAMES = {
    "outputs": "values of the forward pass",
    "output_gradients": "their gradients",
    "parameter_gradients": "gradients of parameters",
    "temporaries": "temporaries of the backward pass",
    "workspace": "workspace of kernels",
    "run_time": "values sized at run time",
    "parameters": "parameters",
    "optimizer_state": "optimizer state",
    "inputs": "inputs",
    "unused": "gaps in the arena",
    "total": "total",
}
"""What people read for each key of `KindBytes.to_dict`."""

COUNT_NOTE = (
    "Without reuse: every value in memory of its own. Planned: each byte of the arena counts once, for what lies there "
    "first. At the peak: what is alive at the worst step."
)
"""What the columns of a table of kinds are."""

_MANY = -2
"""In place of a parameter: more than one."""


@dataclass(frozen=True, slots=True)
class KindBytes:
    """Bytes by kind.

    Attributes:
        outputs: What the nodes of the forward pass write.
        output_gradients: Gradients of what the forward pass writes, and of its inputs: OptNet's ``gradInputs``.
        parameter_gradients: Gradients of parameters, and accumulated ones.
        temporaries: What the backward pass and the updates compute on the way to gradients and new contents.
        workspace: The most that any kernel takes besides; None where it was never measured, which counts as none.
        run_time: Values whose size only a run can tell, as the calibrating run showed them.
        parameters: Weights and constants, of a training model its running statistics, too.
        optimizer_state: Momentum and the like.
        inputs: What each run is given.
        unused: Bytes of an arena that no value ever holds: gaps and alignment.
    """

    outputs: int = 0
    output_gradients: int = 0
    parameter_gradients: int = 0
    temporaries: int = 0
    workspace: int | None = None
    run_time: int = 0
    parameters: int = 0
    optimizer_state: int = 0
    inputs: int = 0
    unused: int = 0

    @property
    def total(self) -> int:
        """All kinds."""
        return sum(size or 0 for size in asdict(self).values())

    @property
    def optnet(self) -> dict[str, int]:
        """OptNet's four kinds and their sum, under the names that its ``countUsedMemory`` gives them."""
        four = {
            "outputs": self.outputs,
            "gradInputs": self.output_gradients,
            "buffers": self.temporaries + (self.workspace or 0),
            "params": self.parameters + self.parameter_gradients,
        }
        return {**four, "total_size": sum(four.values())}

    def to_dict(self) -> dict[str, int | None]:
        """Every kind, and ``total``."""
        return {**asdict(self), "total": self.total}


@dataclass(frozen=True, slots=True)
class MemoryCount:
    """Bytes by kind without a plan, and with it.

    Attributes:
        before: Every value in memory of its own; nothing is recomputed, and an update is written over what it replaces.
            Its total is `memonger.Plan.unplanned_bytes`.
        after: As planned. Each byte of the arena counts once, under the kind of the first value that lies there. Its
            total is the plan's. None without a plan.
        at_peak: What is alive at the worst step, each value under the kind that it is there. None without a plan.
    """

    before: KindBytes
    after: KindBytes | None = None
    at_peak: KindBytes | None = None

    def to_dict(self) -> dict[str, dict[str, int | None] | None]:
        """For JSON: ``before``, ``after`` and ``at_peak``, each by kind."""
        counted = {"before": self.before, "after": self.after, "at_peak": self.at_peak}
        return {when: None if kinds is None else kinds.to_dict() for when, kinds in counted.items()}


@takes_options(device="none")
def count_memory(
    source: Source | Model | Plan | GraphPlan, *, options: Options | None = None, **keywords: Unpack[Keywords]
) -> MemoryCount:
    """Count the bytes of a plan, or of a model without one, by what they are for.

    Args:
        source: A plan, or a planned file: counted before and after. A model, or what `memonger.load` takes: counted
            before, as the options would have it planned (the whole training step with ``mode="training"`` or a
            ``loss``); nothing is searched.
        options: A record of options to start from; keywords given beside it replace its fields. A plan needs none.
        keywords: The fields of `Options`.

    Raises:
        LoadError, PlanError, PlanFileError, TypeError: as `memonger.search_plan` and `memonger.Plan.load`.
    """
    loaded = planned_file(source) if isinstance(source, str | Path) else source
    if isinstance(loaded, BasePlan):
        return count_plan(loaded)
    job = prepare(loaded, combine(options, keywords))
    graph, roles = job.request.graph, job.lowered.roles
    measured = job.lowered.calibration
    held = 0 if measured is None else run_time_bytes(graph, measured.run_time)
    beside = _persistent(job.lowered.model, roles, job.device)
    rest = replace(beside, workspace=max(graph.workspace, default=0) or None, run_time=held)
    return MemoryCount(_before(graph, value_kinds(graph, roles), rest))


def planned_file(path: str | Path) -> Plan | str | Path:
    """The plan in a file; the path itself where it holds none."""
    try:
        has_plan = is_planned(load_as_is(path).ir)
    except LoadError:
        has_plan = False  # loading it says what is wrong
    return Plan.load(path, check_weights=False) if has_plan else path


def count_plan(plan: BasePlan) -> MemoryCount:
    """Count the bytes of a plan, see `MemoryCount`."""
    graph = plan.graph
    if isinstance(plan, Plan):
        kinds = value_kinds(graph, plan.training)
        own = _persistent(plan.model, plan.training, parse_device(plan.device))
        of_optimizer = set() if plan.training is None else set(plan.training.state)
        state = sum(size for name, size in plan.state_in_file.items() if name in of_optimizer)
        in_file = plan.parameter_bytes - plan.resident_parameter_bytes - state
        own = replace(own, parameters=own.parameters - in_file, optimizer_state=own.optimizer_state - state)
        rest = replace(own, workspace=plan.workspace_bytes, run_time=plan.run_time_bytes)
    else:
        kinds, rest = _kinds(graph, {}), KindBytes()
    return MemoryCount(_before(graph, kinds, rest), _added(rest, _first_held(plan, kinds)), _at_peak(plan, kinds, rest))


def value_kinds(graph: Graph, roles: Training | None) -> list[int]:
    """The kind of each value that a node writes, as an index into `IN_ARENA`; -1 for inputs and weights.

    What the forward pass writes is an output, also when it is recomputed. What the backward pass writes is a temporary
    if only nodes read it that stand for the same forward node, or if an update writes it. Else it is a gradient: a
    parameter's, if it is as large as that and changes nothing else; or one of outputs.

    Args:
        graph: Of a model or a plan.
        roles: Those of a training model's inputs and outputs; without gradients among them all is forward.
    """
    if roles is None or not roles.is_differentiated:
        return [-1 if node < 0 else _OUTPUTS for node in graph.producer]
    return _kinds(graph, _parameter_of(graph, roles))


def _kinds(graph: Graph, parameter_of: Mapping[int, int]) -> list[int]:
    forward, inner = forward_pass(_CopiesAsOriginals(graph)), _temporaries(graph)
    kinds = [-1] * len(graph.values)
    for node, writes in enumerate(graph.writes):
        for value in writes:
            parameter = parameter_of.get(value)
            if forward[node]:
                kinds[value] = _OUTPUTS
            elif value in inner:
                kinds[value] = _TEMPORARIES
            elif parameter is not None and graph.sizes[parameter] == graph.sizes[value]:
                kinds[value] = _PARAMETER_GRADIENTS
            else:
                kinds[value] = _OUTPUT_GRADIENTS
    return kinds


def _temporaries(graph: Graph) -> set[int]:
    """Values of updates, and those that aren't read but for the gradient of the same forward node.

    `memonger.autodiff` names nodes ``grad/<forward node>/<operator>`` and ``update/<parameter>/<operator>``.
    """
    groups = [name.rpartition("/")[0] for name in graph.runs]
    outputs = set(graph.outputs)
    inner = set[int]()
    for value, (node, readers) in enumerate(zip(graph.producer, graph.readers, strict=True)):
        group = groups[node] if node >= 0 else ""
        inside = group.startswith("grad/") and {groups[reader] for reader in readers} == {group}
        if (inside and value not in outputs) or group.partition("/")[0] == "update":
            inner.add(value)
    return inner


class _CopiesAsOriginals:
    """A graph in which recomputed nodes are of the pass of what they are copies of: a plan's file doesn't say it."""

    def __init__(self, graph: Graph) -> None:
        self.reads, self.writes = graph.reads, graph.writes
        marked = {name for name, forward in zip(graph.runs, graph.forward, strict=True) if forward}
        self.forward = tuple(name in marked for name in graph.runs)


def _parameter_of(graph: Graph, roles: Training) -> dict[int, int]:
    """Values that change one parameter alone, each with that parameter: by value number.

    Nodes are followed from last to first, from the new content of each parameter, its gradient or accumulated gradient.
    A gradient that a normalization's input gradient is computed from as well still counts: what an update reads. Single
    numbers (the gradients' norm, whether the loss is finite) are left out: they change all.
    """
    number = {name: value for value, name in enumerate(graph.values)}
    reached: dict[int, int] = {}
    for parameter in roles.parameters:
        summed = roles.accumulated.get(parameter, "")
        for name in (roles.updates.get(parameter), roles.gradients.get(parameter), roles.updates.get(summed)):
            if name in number and parameter in number:
                reached[number[name]] = number[parameter]
    settled = set(reached)
    for step in reversed(range(len(graph.nodes))):
        ends = {reached[value] for value in graph.writes[step] if value in reached}
        if not ends:
            continue
        end = ends.pop() if len(ends) == 1 else _MANY
        updates = end != _MANY and graph.nodes[step].startswith("update/")
        for value in graph.reads[step]:
            if updates and graph.sizes[value] == graph.sizes[end]:
                settled.add(value)
                reached[value] = end
            elif graph.sizes[value] > _SCALAR and value not in settled:
                reached[value] = end if reached.get(value, end) == end else _MANY
    return {value: parameter for value, parameter in reached.items() if parameter != _MANY}


def _persistent(model: ir.Model, roles: Training | None, device: Device) -> KindBytes:
    """What lies beside the arena: parameters, optimizer state, accumulated gradients, inputs."""
    inputs = {str(value.name): nbytes(value) or 0 for value in model.graph.inputs}
    state = sum(inputs.get(name, 0) for name in roles.state) if roles else 0
    summed = sum(inputs.get(name, 0) for name in roles.accumulated.values()) if roles else 0
    return KindBytes(
        parameter_gradients=summed,
        parameters=parameter_bytes(model, roles, device) - state - summed,
        optimizer_state=state,
        inputs=input_bytes(model, roles),
    )


def _before(graph: Graph, kinds: Sequence[int], rest: KindBytes) -> KindBytes:
    sums, parts = dict.fromkeys(IN_ARENA, 0), graph.parts
    for writes in graph.writes:
        for value in writes:
            if graph.planned[value] and value not in parts and value not in graph.copies:
                sums[IN_ARENA[kinds[value]]] += graph.sizes[value]
    return _added(rest, sums)


def _added(kinds: KindBytes, sizes: Mapping[str, int]) -> KindBytes:
    return replace(kinds, **{name: getattr(kinds, name) + size for name, size in sizes.items()})


def _written(plan: BasePlan) -> Iterator[tuple[int, int, int]]:
    """Planned values in the order they are written: step, value, storage."""
    of_value = plan.storage.of_value
    for step, writes in enumerate(plan.graph.writes):
        for value in writes:
            if of_value[value] >= 0:
                yield step, value, of_value[value]


def _first_held(plan: BasePlan, kinds: Sequence[int]) -> dict[str, int]:
    """Bytes of the arena by the kind of the first value that lies there, and those where none ever does."""
    buffers, first = plan.storage.buffers, dict[int, int]()
    for _, value, storage in _written(plan):
        first.setdefault(storage, value)
    begins = {s: plan.offsets[v] - plan.storage.within[v] for s, v in first.items()}
    spans = [(begins[s], begins[s] + buffers[s].size, kinds[v]) for s, v in first.items()]
    edges = sorted({0, plan.arena_bytes, *(edge for begin, end, _ in spans for edge in (begin, end))})
    number = {edge: index for index, edge in enumerate(edges)}
    free = list(range(len(edges)))  # from each edge the way to the next one where the arena isn't anyone's yet
    sums = dict.fromkeys(IN_ARENA, 0)
    for begin, end, kind in spans:
        part, last = _next_free(free, number[begin]), number[end]
        while part < last:
            sums[IN_ARENA[kind]] += edges[part + 1] - edges[part]
            free[part] = part + 1
            part = _next_free(free, part)
    return {**sums, "unused": plan.arena_bytes - sum(sums.values())}


def _next_free(free: list[int], part: int) -> int:
    """The first part from this one on that is free; ways there become shorter (as in a union-find)."""
    while free[part] != part:
        free[part] = free[free[part]]
        part = free[part]
    return part


def _at_peak(plan: BasePlan, kinds: Sequence[int], rest: KindBytes) -> KindBytes:
    if not plan.graph.nodes:
        return rest
    worst, latest = worst_step(plan.storage.buffers, len(plan.graph.nodes)), dict[int, int]()
    for step, value, storage in _written(plan):
        if step <= worst:
            latest[storage] = kinds[value]
    sums = dict.fromkeys(IN_ARENA, 0)
    for buffer in plan.storage.buffers:
        if buffer.start <= worst < buffer.stop:
            sums[IN_ARENA[latest[buffer.id]]] += buffer.size
    workspace = None if rest.workspace is None else plan.graph.workspace[worst]
    return _added(replace(rest, workspace=workspace), sums)
