"""A training step of PyTorch's as a plan that `memonger.report` draws: what lives when, and what runs again."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import fx, nn

from memonger.allocation.allocators import allocate
from memonger.errors import PlanError
from memonger.graph.graph import Graph
from memonger.graph.liveness import ALIGNMENT, assign_storage, live_bytes, peak_bytes
from memonger.graph.schedule import overhead, schedule_graph
from memonger.ir.modules import SCOPES
from memonger.ir.names import fresh
from memonger.plan import Plan
from memonger.torch import operators
from memonger.torch.budget import StepPlan, planned, state_bytes, traced
from memonger.torch.example import examples_of
from memonger.torch.partition import OUTSIDE, JointStep
from memonger.units import in_bytes

_SELF = re.compile(r"^L\['\w+'\]\.?")
"""What Dynamo writes before the path of a module."""

_TYPES = {
    torch.float32: ir.DataType.FLOAT, torch.float64: ir.DataType.DOUBLE, torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16, torch.int64: ir.DataType.INT64, torch.int32: ir.DataType.INT32,
    torch.int16: ir.DataType.INT16, torch.int8: ir.DataType.INT8, torch.uint8: ir.DataType.UINT8,
    torch.bool: ir.DataType.BOOL,
}  # fmt: skip


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
    """Write the page of a module's training step in a budget, as `memonger.torch.backend` runs it; nothing is run.

    The page shows at which operator each storage is made and freed, what the forward pass keeps, what runs again, the
    modules around each operator, and where all would lie in one arena; beside it parameters, inputs, and the
    optimizer's state.

    Args:
        module: See `memonger.torch.fit`.
        example: See `memonger.torch.fit`.
        path: What is written.
        budget: Bytes, as a number or as ``4GiB``; None: nothing runs again.
        optimizer: See `memonger.torch.partitioner`.
        format: ``html``, or one of the other viewers of `memonger.Plan.report`, but for ``netron``.
        title: Of the page; None: the module's class.

    Returns: what the step takes.

    Raises:
        BudgetError: the budget can't be held.
        PlanError: the module can't be traced as one graph; there is no such format, or folder; a size is none.
    """
    if format == "netron":
        raise PlanError("format 'netron' is an ONNX file, which a step of PyTorch's is not: 'html' shows it.")
    if not Path(path).absolute().parent.is_dir():
        raise PlanError(f"{path} can't be written: there is no folder {Path(path).parent}.")
    inputs, state = examples_of(module, example), state_bytes(optimizer)
    limit = None if budget is None else in_bytes("budget", budget, PlanError)
    step = traced(module, inputs)
    plan, schedule = planned(step, limit, state)
    drawn = _drawn(module, inputs, step, schedule, plan, title or type(module).__name__)
    drawn.report(path, format=format)
    return plan


def _drawn(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    step: JointStep,
    schedule: Sequence[int],
    plan: StepPlan,
    name: str,
) -> Plan:
    """A plan of the step: its graph's nodes in the scheduled order, laid out in one arena."""
    taken, makers = set[str](), {value: n for n, writes in enumerate(step.graph.writes) for value in writes}
    ends = {OUTSIDE: "gradient of an output"}
    nodes = step.graph.nodes
    made_by = [nodes[makers[v]] if v in makers else name for v, name in enumerate(step.graph.values)]  # or left out
    names = tuple(fresh(ends.get(one, one), taken) for one in made_by)
    once = replace(step.graph, values=names)
    graph = schedule_graph(once, schedule)
    storage, before = assign_storage(graph), assign_storage(once).buffers
    layout = allocate(storage.buffers)
    weights = dict([*module.named_parameters(), *module.named_buffers()])
    rest = {"the optimizer's state": plan.state_bytes, "new contents of buffers": plan.given_bytes}
    rest["new contents of buffers"] -= sum(operators.storages([*weights.values(), *inputs]).values())
    model = _model(step, graph, schedule, name)
    for key, one in weights.items():
        model.graph.register_initializer(_without_data(_value(key, one)))
    for key, size in rest.items():
        if size > 0:
            value = ir.Value(name=key, type=ir.TensorType(ir.DataType.UINT8), shape=ir.Shape([size]))
            model.graph.register_initializer(_without_data(value))
    model.graph.inputs.extend(_value(f"input {number}", one) for number, one in enumerate(inputs))
    return _Step(
        model=model, graph=graph, arena_bytes=layout.size, alignment=ALIGNMENT, mode="training", device="none",
        offsets={value: layout.offsets[number] for value, number in enumerate(storage.of_value) if number >= 0},
        threads=0, budget=plan.budget, stock_bytes=plan.peak_before_bytes, workspace={},
        peak_before_bytes=peak_bytes(before, len(once.nodes)),
        live_before=live_bytes(before, len(once.nodes)), planning_seconds=plan.seconds,
    )  # fmt: skip


def _model(step: JointStep, graph: Graph, schedule: Sequence[int], name: str) -> ir.Model:
    """The scheduled graph as a model, which has the names, types, shapes and modules that are shown."""
    paths, values, nodes = _paths(step), dict[int, ir.Value](), list[ir.Node]()
    for number, source in enumerate(schedule):
        node, writes = step.nodes[source], graph.writes[number]
        tensors = [] if node is None else operators.tensors_in(node.meta.get("val"))
        made: list[Any] = list({key: one for one in tensors for key in operators.storages([one])}.values())
        made += [None] * (source in step.states.values())  # the next draw's turn
        for value, one in zip(writes, made if len(made) == len(writes) else [None] * len(writes), strict=True):
            values[value] = _value(graph.values[value], one)
        scope = {SCOPES: repr([paths[node], node.name])} if node is not None and node in paths else {}
        nodes.append(ir.Node(
            "aten", graph.ops[number].removeprefix("aten.") or OUTSIDE, [values[v] for v in graph.reads[number]],
            outputs=[values[v] for v in writes], name=graph.nodes[number], metadata_props=scope,
        ))  # fmt: skip
    outputs = [values[value] for value in graph.outputs]
    return ir.Model(ir.Graph([], outputs, nodes=nodes, name=name), ir_version=10)


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


def _value(name: str, tensor: torch.Tensor | None) -> ir.Value:
    if tensor is None:
        return ir.Value(name=name)
    shape = ir.Shape([operators.expected(size) for size in tensor.shape])
    return ir.Value(name=name, type=ir.TensorType(_TYPES.get(tensor.dtype, ir.DataType.UNDEFINED)), shape=shape)


def _without_data(value: ir.Value) -> ir.Value:
    """A weight whose numbers nobody asks for: only its bytes are counted."""
    value.const_value = ir.LazyTensor(_no_data, dtype=value.dtype, shape=value.shape, name=value.name)  # type: ignore[arg-type]
    return value


def _no_data() -> Any:
    raise PlanError("a step of PyTorch's is planned without its weights' numbers.")
