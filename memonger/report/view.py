"""What every picture of a plan is drawn from: its steps, and the rectangles of steps × addresses that they fill."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir

from memonger.devices import parse_device
from memonger.graph import schedule
from memonger.graph.graph import Graph
from memonger.graph.liveness import assign_storage, live_bytes, worst_step
from memonger.graph.weight_window import weight_reads
from memonger.ir import marks
from memonger.ir.modules import is_optimizers, module_of, source_name
from memonger.ir.tensors import inner_bytes
from memonger.plan import Plan, input_sizes, parameter_sizes, state_sizes

KEPT = "kept"
RECOMPUTED = "recomputed"
SHARED = "shared"
COMPUTED = "computed"
WORKSPACE = "workspace"
INPUT = "input"
WEIGHT = "weight"

KINDS = {
    KEPT: "kept for the backward pass",
    RECOMPUTED: "computed again",
    SHARED: "several values in one place: views, parts, or written over each other",
    COMPUTED: "any other value of the arena",
    WORKSPACE: "workspace: what a kernel takes while it runs",
    INPUT: "inputs of a run",
    WEIGHT: "weights, and what stays from one run to the next",
}
"""What a rectangle may be, with what that means."""

WINDOW, BODIES = "window of weights", "weights of bodies"
"""Names of what has none: the window that weights in a file pass through, and what bodies (If, Loop) have."""


Path = tuple[str, ...]
"""The modules around a step: the exporter's where it left them, else as the node's name has them."""

MOST_OTHERS = 20
"""Most names that are listed of the values that share a place."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One run of a node.

    Attributes:
        node: Its name.
        operator: What it computes.
        module: The modules around it, outermost first.
        workspace: Bytes its kernel takes beside the arena.
    """

    node: str
    operator: str
    module: Path
    workspace: int


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Bytes that are in use from one step to another.

    Attributes:
        name: The value that is there first, of those as large; of a workspace the node; of weights that onnxruntime's
            optimizer named what reads them.
        kind: One of `KINDS`.
        offset: First byte. Of the arena from 0; workspace, inputs and weights lie behind it, in this order.
        size: Bytes.
        start: The step that first writes it; 0 for inputs and weights.
        stop: One after the last step that needs it.
        shape: Type and shape, as ``float32[8,3]``; empty where unknown.
        others: The other values at the same place, parts of it included, in the order they are written.
    """

    name: str
    kind: str
    offset: int
    size: int
    start: int
    stop: int
    shape: str = ""
    others: tuple[str, ...] = ()

    @property
    def in_arena(self) -> bool:
        """Whether it is a part of the arena."""
        return self.kind in (KEPT, RECOMPUTED, SHARED, COMPUTED)


@dataclass(frozen=True)  # without slots, as it keeps what is derived once it is made
class View:
    """A plan, ready to be drawn.

    Attributes:
        title: What to call it.
        plan: The plan.
    """

    title: str
    plan: Plan

    @cached_property
    def steps(self) -> tuple[PlannedStep, ...]:
        """What runs, in the planned order."""
        graph = self.plan.graph
        modules = Modules(self.plan.model)
        return tuple(
            PlannedStep(
                name, graph.ops[step], modules.path(name, (graph.values[v] for v in graph.writes[step])), workspace
            )
            for step, (name, workspace) in enumerate(zip(graph.nodes, graph.workspace, strict=True))
        )

    @cached_property
    def arena(self) -> tuple[Rectangle, ...]:
        """The arena's buffers by the step that first writes them, then by offset."""
        plan, graph, storage = self.plan, self.plan.graph, self.plan.storage
        members: list[list[int]] = [[] for _ in storage.buffers]
        for value, number in enumerate(storage.of_value):
            if number >= 0:
                members[number].append(value)
        kept, shapes = _kept(self.plan), self._shapes
        rectangles = []
        for buffer, values in zip(storage.buffers, members, strict=True):
            values.sort(key=lambda value: (graph.producer[value], value))
            values.sort(key=lambda value: graph.sizes[value] < buffer.size)  # what fills it gives it its name
            names = [graph.values[value] for value in values]
            kind = _kind(len(names), values[0] in graph.copies, not kept.isdisjoint(values))
            offset, shape = plan.offsets[values[0]], shapes.get(names[0], "")
            rectangles.append(
                Rectangle(names[0], kind, offset, buffer.size, buffer.start, buffer.stop, shape, tuple(names[1:]))
            )
        return tuple(sorted(rectangles, key=lambda each: (each.start, each.offset)))

    @cached_property
    def rectangles(self) -> tuple[Rectangle, ...]:
        """The arena's buffers, then workspace, inputs and weights behind the arena: `Plan.total_bytes` in all."""
        return (*self.arena, *self._beside())

    def _beside(self) -> Iterator[Rectangle]:
        plan, end = self.plan, len(self.steps)
        for step, each in enumerate(self.steps):
            if each.workspace:
                yield Rectangle(each.node, WORKSPACE, plan.arena_bytes, each.workspace, step, step + 1)
        offset = plan.arena_bytes + (plan.workspace_bytes or 0)
        if plan.run_time_bytes:
            yield Rectangle("values sized at run time", WORKSPACE, offset, plan.run_time_bytes, 0, end)
        offset += plan.run_time_bytes
        stays = _weights(plan) | state_sizes(plan.model, plan.graph)
        for kind, tensors in ((INPUT, input_sizes(plan.model, plan.training)), (WEIGHT, stays)):
            for name, size in tensors.items():
                reader = self.readers.get(name) if kind == WEIGHT and is_optimizers(name) else None
                known = name if reader is None else f"weights of {self.around(reader)}"
                yield Rectangle(known, kind, offset, size, 0, end, self._shapes.get(name, ""))
                offset += size

    @cached_property
    def readers(self) -> dict[str, int]:
        """The first step that reads each value."""
        graph, found = self.plan.graph, dict[str, int]()
        for step, reads in enumerate(graph.reads):
            for value in reads:
                found.setdefault(graph.values[value], step)
        return found

    def around(self, step: int) -> str:
        """The modules around a step, or its node where none are known, as in the user's own model."""
        return source_name("/".join(self.steps[step].module) or self.steps[step].node)

    @cached_property
    def _shapes(self) -> dict[str, str]:
        """Type and shape of every value by its name."""
        graph = self.plan.model.graph
        values = [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
        return {str(value.name): _shape(value) for value in values if value.name}

    @cached_property
    def live(self) -> np.ndarray:
        """Bytes of the arena that are in use at each step: ``int64[steps]``."""
        return live_bytes(self.plan.storage.buffers, len(self.steps))

    @cached_property
    def peak_step(self) -> int:
        """The first step at which the most bytes are in use."""
        return worst_step(self.plan.storage.buffers, len(self.steps))

    @cached_property
    def live_before(self) -> np.ndarray | None:
        """Live bytes at each step of the file's own order with nothing recomputed; of a plan from a file, which doesn't
        say that order, of the planned one. None where that would be the plan itself.
        """
        plan = self.plan
        if plan.live_before is not None:
            return plan.live_before
        if not plan.recomputed:
            return None
        once = _without_recomputation(plan)
        return live_bytes(assign_storage(once, alignment=plan.alignment).buffers, len(once.nodes))


def _kind(values: int, is_copy: bool, is_kept: bool) -> str:
    if is_copy:
        return RECOMPUTED
    if is_kept:
        return KEPT
    return SHARED if values > 1 else COMPUTED


def _kept(plan: Plan) -> set[int]:
    """Values of the forward pass that a step of the backward pass reads, or one that computes something again."""
    graph, again = plan.graph, set(plan.recomputed)
    forward = [is_forward and step not in again for step, is_forward in enumerate(graph.forward)]
    if all(graph.forward):
        return set()
    return {
        value
        for step, reads in enumerate(graph.reads) if not forward[step]
        for value in reads if graph.producer[value] >= 0 and forward[graph.producer[value]]
    }  # fmt: skip


def _without_recomputation(plan: Plan) -> Graph:
    """The plan's graph with every node once: who reads a copy reads what it is a copy of."""
    graph, again = plan.graph, set(plan.recomputed)
    first = graph.firsts
    once = [step for step in range(len(graph.nodes)) if step not in again]
    same = ("nodes", "writes", *schedule.OF_NODE)
    changes: dict[str, Any] = {key: tuple(getattr(graph, key)[step] for step in once) for key in same}
    changes["aliases"] = tuple(schedule.renumbered(graph.aliases[step], first) for step in once)
    changes["reads"] = tuple(tuple(dict.fromkeys(first[v] for v in graph.reads[step])) for step in once)
    return replace(graph, **changes)


def _weights(plan: Plan) -> dict[str, int]:
    """What is in memory of weights, and of what a training step updates: `Plan.resident_parameter_bytes` in all.

    Those that stay in a file are the window that they pass through.
    """
    sizes = parameter_sizes(plan.model, plan.training, parse_device(plan.device))
    inner = inner_bytes(plan.model)
    sizes |= {BODIES: inner} if inner else {}
    if plan.window is None:
        return {name: size for name, size in sizes.items() if name not in plan.host_weights}
    for read in weight_reads(plan.model, plan.graph):
        if not read.made:
            sizes[read.name] += read.own - read.nbytes + (0 if read.name in plan.window.weights else read.kept)
    return {name: size for name, size in sizes.items() if size} | {WINDOW: plan.window.nbytes}


def _shape(value: ir.Value) -> str:
    dtype = "" if value.dtype is None else value.dtype.name.lower()
    return dtype if value.shape is None else f"{dtype}[{','.join(map(str, value.shape))}]"


class Modules:
    """The modules of nodes, by the nodes' names.

    What differentiation makes (``grad/<node>/...``, ``update/<parameter>/...``) belongs to the module of the node or
    parameter; a recomputation, or a node's copy for a chunk, to that of its node.

    Args:
        model: The planned model.
    """

    def __init__(self, model: ir.Model) -> None:
        self._of_name: dict[str, Path] = {}
        self._own: dict[str, str] = {}
        for node in model.graph:
            own = marks.own_node(node)
            if own != node.name:
                self._own[str(node.name)] = own
            module = module_of(node)
            if module:
                names = (node.name, *(value.name for value in node.outputs))
                self._of_name.update((name, tuple(module.split("."))) for name in names if name)

    def path(self, node: str, writes: Iterable[str] = ()) -> Path:
        """The modules around a node, outermost first; empty where nothing is known."""
        node = self._own.get(node, node)
        for name in (node, *writes):
            modules = self._of_name.get(name)
            if modules:
                return modules
        kind, _, rest = node.partition("/")
        if kind not in ("grad", "update", "loss") or not rest:
            return _parts(node)
        around = rest.rpartition("/")[0]
        if kind == "update":
            return _parts(around or rest)[:-1] or (kind,)
        return self._by_prefix(around) or (kind,)

    def _by_prefix(self, name: str) -> Path:
        """The path of the node whose name this one begins with, else the name as a path."""
        parts = name.split("/")
        for end in range(len(parts), 0, -1):
            modules = self._of_name.get("/".join(parts[:end]))
            if modules:
                return modules
        return _parts(name)


def _parts(name: str) -> Path:
    """A name as a path: parts between slashes, else between dots."""
    return tuple(part for part in name.split("/" if "/" in name else ".") if part)
