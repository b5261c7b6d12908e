"""Nodes of 16 bits for the CPU: kept in 16 bits, computed in float32.

onnxruntime's CPU provider has next to no kernels of 16 bits (1.31.1). Of float16 it puts Casts around nodes, and leaves
out those to float16 and back again that then follow each other: everything is computed and kept in float32, with none
of the roundings that the model says. A model in bfloat16 it refuses. Here such a node becomes one of float32 between
Casts of its own, each input cast for each reader: what lives on between nodes, above all from the forward to the
backward pass, is 16 bits, and every result is rounded as the model says. Nodes that only move elements stay, where
there is a kernel.
"""

import logging

import onnx_ir as ir

from memonger.ir.emitter import Emitter
from memonger.ir.model import Model
from memonger.ir.rewrite import Replacer
from memonger.ir.values import NARROW
from memonger.words import option

logger = logging.getLogger(__name__)

_FLOAT = ir.DataType.FLOAT

_VIEWS = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Shape", "Size", "Squeeze", "Unsqueeze"})

MOVES = {
    ir.DataType.FLOAT16: _VIEWS | {"Concat", "ConstantOfShape", "Expand", "Gather", "Slice", "Split", "Transpose"},
    ir.DataType.BFLOAT16: _VIEWS | {"Concat", "ConstantOfShape", "Gather", "Slice", "Split", "Transpose"},
}
"""Operators with kernels of that type."""


def widen_narrow_nodes(model: Model) -> bool:
    """A pass: what the CPU has no kernels of 16 bits for is in float32, between Casts."""
    if not any(_is_widened(node) for node in model.graph):
        return False
    into = Replacer(model.graph, Emitter(model.ir))
    count = into.replace_each(lambda op, node: _wide(op, node) if _is_widened(node) else None)
    logger.info("%s: %d nodes of 16 bits in float32 between casts.", model.name, count)
    return True


def hint(model: Model) -> str:
    """What to do about a model that onnxruntime refuses on the CPU, where that may be for want of bfloat16 kernels."""
    if not any(v.dtype == ir.DataType.BFLOAT16 for node in model.graph for v in node.outputs):
        return ""
    level, none = option("level", "rewrite"), option("device", "none")
    return f" The CPU has next to no kernels in bfloat16: {level} computes in float32; {none} is for other runtimes."


def _is_widened(node: ir.Node) -> bool:
    """Whether a node has to be written in float32."""
    found = {v.dtype for v in (*node.inputs, *node.outputs) if v is not None and v.dtype in NARROW}
    return not node.domain and any(node.op_type not in MOVES[dtype] for dtype in found if dtype is not None)


def _wide(op: Emitter, node: ir.Node) -> list[ir.Value | None]:
    """The node in float32; returns what stands for its outputs."""
    wide = {v: _as_float(op, v) for v in dict.fromkeys(node.inputs) if v is not None}
    results = [ir.Value(name=v.name and op.fresh(f"{v.name}.wide"), type=v.type, shape=v.shape) for v in node.outputs]
    for value in results:
        if value.dtype in NARROW:
            value.type = ir.TensorType(_FLOAT)
    inputs = [None if v is None else wide[v] for v in node.inputs]
    op.nodes.append(ir.Node("", node.op_type, inputs, list(node.attributes.values()), outputs=results, name=node.name))
    return [op.cast(new, old.dtype) if old.name else None for new, old in zip(results, node.outputs, strict=True)]


def _as_float(op: Emitter, value: ir.Value) -> ir.Value:
    """A value in float32.

    What is transposed is cast before: products then read it as it lies (`memonger.lowering.cpu`), and onnxruntime's own
    fusion of a Transpose, a Cast and a MatMul ends the process (1.31.1).
    """
    if value.dtype not in NARROW:
        return value
    node = value.producer()
    if node is not None and node.op_type == "Transpose" and not node.domain:
        return op.Transpose(_as_float(op, op.given(node, 0)), perm=node.attributes.get_ints("perm"))
    content = op.content(value)
    return op.cast(value, _FLOAT) if content is None else op.constant(content.astype("float32"))
