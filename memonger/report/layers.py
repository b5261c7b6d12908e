"""A model node by node: what each writes and costs, whether it runs again, and the PyTorch module it comes from."""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir
from rich.table import Table

from memonger.graph import costs
from memonger.ir import marks
from memonger.ir.modules import module_of
from memonger.ir.operators import operator_name
from memonger.ir.values import nbytes, static_shape
from memonger.plan import Plan
from memonger.report.inspection import dims_of, shape_text
from memonger.units import format_size


@dataclass(frozen=True, slots=True)
class Layer:
    """A node of a model, or a step of a plan.

    Attributes:
        node: Its name; in a file without names that of its first output.
        op: Its operator.
        shapes: Of each output; names stand for dimensions without a size, None for an unknown shape.
        bytes: Of all outputs; None where a size isn't known.
        flops: Of its products, a multiply-add being two; None where a size isn't known.
        seconds: Of one run, where it was measured.
        runs: Of a planned training model's forward pass: ``kept``, ``recomputed`` (its output is dropped, and another
            step computes it again) or ``again`` (that step). Of a model with marks what they say. Else None.
        offset: The byte of the arena at which its first output lies; None without a plan, or if it isn't there.
        module: Where PyTorch's exporter left it, the path of the module.
    """

    node: str
    op: str
    shapes: tuple[tuple[int | str, ...] | None, ...]
    bytes: int | None
    flops: int | None
    seconds: float | None
    runs: str | None
    offset: int | None
    module: str | None


def layers_of(model: ir.Model, plan: Plan | None, seconds: Mapping[str, float]) -> tuple[Layer, ...]:
    """The nodes of a model's main graph in the order they stand.

    Args:
        model: The model; a planned one's is ``plan.model``.
        plan: Its plan, if it has one.
        seconds: Measured times by node name.
    """
    state = {} if plan is None or plan.mode != "training" else _states(plan)
    offsets = {} if plan is None else {plan.graph.values[value]: offset for value, offset in plan.offsets.items()}
    layers = list[Layer]()
    for node in model.graph:
        written = [value for value in node.outputs if value.name]
        sizes, first = [nbytes(value) for value in written], str(written[0].name) if written else ""
        name, forced = node.name or first, _MARKS.get(node.metadata_props.get(marks.FORCE, ""))
        layers.append(
            Layer(
                node=name, op=operator_name(node),
                shapes=tuple(None if (dims := dims_of(value)) is None else tuple(dims) for value in written),
                bytes=None if None in sizes else sum(size for size in sizes if size is not None),
                flops=_flops(node), seconds=seconds.get(name), runs=state.get(name, forced), offset=offsets.get(first),
                module=module_of(node),
            )
        )  # fmt: skip
    return tuple(layers)


_MARKS = {"True": "to recompute", "False": "to keep"}


def _states(plan: Plan) -> dict[str, str]:
    """Whether each node of the forward pass is kept, recomputed or the recomputation."""
    names, forward = plan.graph.nodes, plan.graph.forward
    again = {names[step] for step in plan.recomputed}
    dropped = {plan.graph.again[step] for step in plan.recomputed}
    return {
        name: "again" if name in again else "recomputed" if name in dropped else "kept"
        for name, is_forward in zip(names, forward, strict=True)
        if is_forward or name in again
    }


def _flops(node: ir.Node) -> int | None:
    try:
        flops = costs.flops(node)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return None  # no inference has seen this file: its attributes can be of any type and its shapes of any rank
    values = [value for value in (*node.inputs, *node.outputs) if value is not None and value.name]
    return flops if flops or all(static_shape(value) is not None for value in values) else None


def layers_table(layers: tuple[Layer, ...]) -> Table:
    """One row a node; a column that says nothing of any is left out."""
    table = Table()
    columns = {
        "node": [layer.node for layer in layers],
        "operator": [layer.op for layer in layers],
        "output": [", ".join(map(shape_text, layer.shapes)) for layer in layers],
        "size": ["?" if layer.bytes is None else format_size(layer.bytes) for layer in layers],
        "MFLOPs": ["?" if layer.flops is None else f"{layer.flops / 1e6:.3g}" for layer in layers],
        "ms": ["" if layer.seconds is None else f"{layer.seconds * 1e3:.3f}" for layer in layers],
        "runs": [layer.runs or "" for layer in layers],
        "module": [layer.module or "" for layer in layers],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    for name in shown:
        table.add_column(name, justify="right" if name in ("size", "MFLOPs", "ms") else "left", overflow="fold")
    for row in zip(*shown.values(), strict=True):
        table.add_row(*row)
    return table
