"""A training step of PyTorch's as a plan that `memonger.report` draws: what lives when, and what runs again."""

import re
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import onnx_ir as ir
import torch
from torch import fx, nn

from memonger.allocation.allocators import allocate
from memonger.errors import PlanError
from memonger.graph.graph import Graph
from memonger.graph.liveness import ALIGNMENT, assign_storage, live_bytes, peak_bytes
from memonger.graph.schedule import OF_NODE, overhead, schedule_graph
from memonger.ir.modules import SCOPES
from memonger.ir.names import fresh
from memonger.plan import Plan
from memonger.torch import operators
from memonger.torch.budget import StepPlan, planned, state_bytes, traced
from memonger.torch.eager import checkpointed, step_plan
from memonger.torch.example import examples_of
from memonger.torch.partition import OUTSIDE, JointStep
from memonger.torch.recorded import PLAN, Call, RecordedStep, recorded, without_memory
from memonger.units import in_bytes

_SELF = re.compile(r"^L\['\w+'\]\.?")
"""What Dynamo writes before the path of a module."""

_TYPES = {
    torch.float32: ir.DataType.FLOAT, torch.float64: ir.DataType.DOUBLE, torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16, torch.int64: ir.DataType.INT64, torch.int32: ir.DataType.INT32,
    torch.int16: ir.DataType.INT16, torch.int8: ir.DataType.INT8, torch.uint8: ir.DataType.UINT8,
    torch.bool: ir.DataType.BOOL,
}  # fmt: skip


_Kind: TypeAlias = tuple[torch.dtype, Sequence[int]]
"""Type and shape of a tensor."""


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class _Step(Plan):
    """A step whose operators are PyTorch's: what they cost stands in the graph alone."""

    @property
    def overhead(self) -> float:
        """Cost of what runs again over the cost of one step."""
        return overhead(self.graph.again, self.graph.costs)

    @property
    def peer(self) -> str:
        """Who would run the step without a plan."""
        return "PyTorch"


@dataclass(frozen=True, slots=True)
class _Shown:
    """What is shown of a step.

    Attributes:
        graph: A node for each run of an operator, in order.
        before: The same where nothing runs again.
        kinds: Of values of the graph what they are; others aren't known.
        paths: Of each node the module around it; empty where none is.
        alignment: Bytes of which each value takes a multiple, as its plan counts them.
    """

    graph: Graph
    before: Graph
    kinds: Mapping[int, _Kind]
    paths: Sequence[str]
    alignment: int


def report(
    module: nn.Module,
    example: torch.Tensor | Sequence[torch.Tensor],
    path: str | Path,
    budget: str | int | None = None,
    optimizer: torch.optim.Optimizer | int | None = None,
    *,
    format: str = "html",
    title: str | None = None,
) -> StepPlan:
    """Write the page of a module's training step; nothing is run.

    Of a module that `memonger.torch.checkpoint` returned it is the eager step with its checkpoints, as planned there;
    of any other the step in a budget, as `memonger.torch.backend` runs it. The page shows at which operator each
    storage is made and freed, what the forward pass keeps, what runs again, the modules around each operator, and where
    all would lie in one arena; beside it parameters, inputs, and the optimizer's state.

    Args:
        module: See `memonger.torch.fit`.
        example: See `memonger.torch.fit`.
        path: What is written.
        budget: Bytes, as a number or as ``4GiB``; None: nothing runs again, but for what `checkpoint` planned.
        optimizer: See `memonger.torch.partitioner`; `checkpoint` was told its own.
        format: ``html``, or one of the other viewers of `memonger.Plan.report`, but for ``netron``.
        title: Of the page; None: the module's class.

    Returns: what the step takes.

    Raises:
        BudgetError: the budget can't be held.
        PlanError: the module can't be traced as one graph, or has a plan already where a budget or an optimizer is
            given; there is no such format, or folder; a size is none.
    """
    if format == "netron":
        raise PlanError("format 'netron' is an ONNX file, which a step of PyTorch's is not: 'html' shows it.")
    if not Path(path).absolute().parent.is_dir():
        raise PlanError(f"{path} can't be written: there is no folder {Path(path).parent}.")
    inputs = examples_of(module, example)
    if PLAN in module.__dict__:
        if budget is not None or optimizer is not None:
            raise PlanError(
                "this module has its plan from memonger.torch.checkpoint, which the page shows: leave out budget and "
                "optimizer, or give a module without checkpoints."
            )
        plan, shown = _eager(module, inputs)
    else:
        state = state_bytes(optimizer)
        limit = None if budget is None else in_bytes("budget", budget, PlanError)
        step = traced(module, inputs)
        plan, schedule = planned(step, limit, state)
        shown = _compiled(step, schedule)
    _drawn(module, inputs, shown, plan, title or type(module).__name__).report(path, format=format)
    return plan


def _drawn(module: nn.Module, inputs: Sequence[torch.Tensor], shown: _Shown, plan: StepPlan, name: str) -> Plan:
    """A plan of the step: its graph laid out in one arena."""
    graph = shown.graph
    storage = assign_storage(graph, alignment=shown.alignment)
    before = assign_storage(shown.before, alignment=shown.alignment).buffers
    layout = allocate(storage.buffers)
    weights = dict([*module.named_parameters(), *module.named_buffers()])
    rest = {"the optimizer's state": plan.state_bytes, "new contents of buffers": plan.given_bytes}
    rest["new contents of buffers"] -= sum(operators.storages([*weights.values(), *inputs]).values())
    model = _model(shown, name)
    for key, one in weights.items():
        model.graph.register_initializer(_without_data(_value(key, (one.dtype, one.shape))))
    for key, size in rest.items():
        if size > 0:
            model.graph.register_initializer(_without_data(_value(key, (torch.uint8, [size]))))
    model.graph.inputs.extend(_value(f"input {number}", (one.dtype, one.shape)) for number, one in enumerate(inputs))
    return _Step(
        model=model, graph=graph, arena_bytes=layout.size, alignment=shown.alignment, mode="training", device="none",
        offsets={value: layout.offsets[number] for value, number in enumerate(storage.of_value) if number >= 0},
        threads=0, budget=plan.budget, stock_bytes=plan.peak_before_bytes, workspace={},
        peak_before_bytes=peak_bytes(before, len(shown.before.nodes)),
        live_before=live_bytes(before, len(shown.before.nodes)), planning_seconds=plan.seconds,
    )  # fmt: skip


def _model(shown: _Shown, name: str) -> ir.Model:
    """The graph as a model, which has the names, types, shapes and modules that are shown."""
    graph, nodes = shown.graph, list[ir.Node]()
    values = {v: _value(graph.values[v], shown.kinds.get(v)) for writes in graph.writes for v in writes}
    for node, op, path, reads, writes in zip(
        graph.nodes, graph.ops, shown.paths, graph.reads, graph.writes, strict=True
    ):
        nodes.append(ir.Node(
            "aten", op.removeprefix("aten.") or OUTSIDE, [values[v] for v in reads if v in values],
            outputs=[values[v] for v in writes], name=node,
            metadata_props={SCOPES: repr([path, node])} if path else {},
        ))  # fmt: skip
    outputs = [values[value] for value in graph.outputs]
    return ir.Model(ir.Graph([], outputs, nodes=nodes, name=name), ir_version=10)


def _compiled(step: JointStep, schedule: Sequence[int]) -> _Shown:
    """What is shown of a joint graph in a schedule."""
    once, kinds = step.graph, dict[int, _Kind]()
    for number, (node, writes) in enumerate(zip(step.nodes, once.writes, strict=True)):
        tensors = [] if node is None else operators.tensors_in(node.meta.get("val"))
        made: list[Any] = list({key: one for one in tensors for key in operators.storages([one])}.values())
        made += [None] * (number in step.states.values())  # the next draw's turn
        if len(made) == len(writes):
            kinds |= {v: _kind(one) for v, one in zip(writes, made, strict=True) if one is not None}
    makers = {value: n for n, writes in enumerate(once.writes) for value in writes}
    taken, ends = set[str](), {OUTSIDE: "gradient of an output"}
    made_by = [once.nodes[makers[v]] if v in makers else name for v, name in enumerate(once.values)]  # or left out
    once = replace(once, values=tuple(fresh(ends.get(one, one), taken) for one in made_by))
    graph, of_node = schedule_graph(once, schedule), _paths(step)
    kinds |= {v: kinds[first] for v, first in enumerate(graph.firsts) if first in kinds}
    paths = [of_node.get(node, "") if (node := step.nodes[source]) is not None else "" for source in schedule]
    return _Shown(graph, once, kinds, paths, ALIGNMENT)


def _paths(step: JointStep) -> dict[fx.Node, str]:
    """The module of each operator: of the backward pass that whose gradient it computes."""
    found, of_sequence = dict[fx.Node, str](), dict[int, str]()
    for node in step.joint.nodes:
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        sequence = node.meta.get("seq_nr")
        path = _SELF.sub("", str(stack[-1][0])) if stack else of_sequence.get(sequence, "")
        if stack and sequence is not None:
            of_sequence.setdefault(sequence, path)
        if path:
            found[node] = path
    return found


def _eager(module: nn.Module, inputs: Sequence[torch.Tensor]) -> tuple[StepPlan, _Shown]:
    """What the eager step of a module with checkpoints takes, and what is shown of it."""
    begin = time.perf_counter()
    made, put_on, in_backward = module.__dict__[PLAN]
    copy, given, mode = without_memory(module, inputs)
    whole = recorded(copy, given, mode, in_backward)
    step = checkpointed(copy, given, mode, put_on.checkpoints, in_backward)
    plan = step_plan(whole, step, made.budget, made.state_bytes, time.perf_counter() - begin)
    (before, _), (graph, calls) = _without_views(whole), _without_views(step)
    of_sequence = dict[int, str]()
    for call in step.modules:  # those inside come later
        of_sequence.update(dict.fromkeys(range(call.first, call.last), call.path))

    def path(call: Call) -> str:
        if call.again >= 0:
            return path(step.calls[call.again])
        return of_sequence.get(call.sequence, "") if call.is_backward else step.modules[call.module].path

    return plan, _Shown(graph, before, dict(enumerate(step.tensors)), [path(step.calls[one]) for one in calls], 1)


def _without_views(step: RecordedStep) -> tuple[Graph, list[int]]:
    """The graph of a step as it ran, but for views, under names that tell what computes what; and the calls in it."""
    graph, calls = step.graph, [n for n, call in enumerate(step.calls) if call.makes or call.changes]
    reads = [dict.fromkeys(graph.reads[n]) for n in calls]
    for storage, last in step.freed.items():
        at = bisect_right(calls, last) - 1
        if at >= 0 and storage not in graph.writes[calls[at]]:
            reads[at][storage] = None  # what is freed behind a view is there until then
    names, values, taken, called = dict[int, str](), list(graph.values), set[str](), set[str]()
    for n in calls:
        first = step.calls[n].again
        base = f"{names[first]}.recompute1" if first in names else str(step.calls[n].target).split(".")[1]
        names[n] = fresh(base, called)
        for value in graph.writes[n]:
            values[value] = fresh(names[n], taken)
    once: dict[str, Any] = {key: tuple(getattr(graph, key)[n] for n in calls) for key in ("writes", *OF_NODE)}
    once |= {"reads": tuple(map(tuple, reads)), "nodes": tuple(names.values()), "values": tuple(values)}
    once["again"] = tuple(names.get(step.calls[n].again, "") for n in calls)
    return replace(graph, aliases=(), **once), calls


def _kind(tensor: torch.Tensor) -> _Kind:
    return tensor.dtype, [operators.expected(size) for size in tensor.shape]


def _value(name: str, kind: _Kind | None) -> ir.Value:
    if kind is None:
        return ir.Value(name=name)
    dtype, shape = kind
    return ir.Value(name=name, type=ir.TensorType(_TYPES.get(dtype, ir.DataType.UNDEFINED)), shape=ir.Shape(shape))


def _without_data(value: ir.Value) -> ir.Value:
    """A weight whose numbers nobody asks for: only its bytes are counted."""
    value.const_value = ir.LazyTensor(_no_data, dtype=value.dtype, shape=value.shape, name=value.name)  # type: ignore[arg-type]
    return value


def _no_data() -> Any:
    raise PlanError("a step of PyTorch's is planned without its weights' numbers.")
