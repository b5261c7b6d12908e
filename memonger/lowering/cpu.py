"""The CPU form of a training model: products that read stacks of matrices transposed.

The standard has a flag for that in Gemm alone, which takes no stacks; onnxruntime has it in its own FusedMatMul. The
same bits come out with two exceptions (measured on 1.31.1): a product with one row or column goes through another
kernel, and one that reads its left operand transposed sums in blocks of `BLOCK`. One matrix that all of a stack are
multiplied by stays transposed: read so for each of them it takes 1.1 to 1.5 times as long on one thread.

onnxruntime's Transpose shares out each matrix of a stack among the threads: with two, 0.1 to 1.8 µs a matrix however
small. A product with the unit matrix takes less for small ones. It gives the same numbers, where all are finite.
"""

import logging
import math

import numpy as np
import onnx_ir as ir

from memonger.model.emitter import Emitter
from memonger.model.marks import COMPOSITE
from memonger.model.model import Model
from memonger.model.replacing import Replacer
from memonger.model.values import is_swapped, static_shape

logger = logging.getLogger(__name__)

BLOCK = 128  # the inner size up to which a product with its left operand transposed is one sum

DOMAIN = "com.microsoft"

STACK = 16  # matrices from which, and
SMALL = 1024  # elements of each up to which a stack is transposed by a product


def write_out(model: Model, *, exact: bool = True) -> Model:
    """Write each product of transposed stacks of matrices as a FusedMatMul, and leave out Transposes nobody reads.

    Inference is left to onnxruntime's own optimizer.

    Args:
        model: Not changed. Where nothing is written, it is what is returned.
        exact: Only what has the same bits; else also what differs in the last ones.
    """
    if not model.is_differentiated or not any(_flags(node, exact) for node in model.ir.graph):
        return model
    copy = model.clone()
    into = Replacer(copy.graph, Emitter(copy.ir))
    written = 0
    for node in list(copy.graph):
        flags = _flags(node, exact)
        if flags:
            into.op.nodes.append(_fused(into.op, node, flags))
            into.replace(node, (into.op.nodes[0].outputs[0],))
            written += 1
    into.finish()
    copy.ir.opset_imports.setdefault(DOMAIN, 1)
    logger.info("%s: %d products read transposed matrices.", model.name, written)
    return copy


def _flags(node: ir.Node, exact: bool) -> dict[str, int]:
    """Which operands a product is to read transposed: ``transA``, ``transB``; empty where none."""
    if node.domain or node.op_type not in ("MatMul", "Transpose") or node.outputs[0].dtype != ir.DataType.FLOAT:
        return {}
    shapes = [None if v is None else static_shape(v) for v in (*node.inputs, *node.outputs)]
    if any(shape is None or len(shape) < 2 for shape in shapes):
        return {}
    inner, result = (shapes[0] or ())[-1], (shapes[-1] or ())
    if node.op_type == "Transpose":
        swapped = not exact and node.metadata_props.get(COMPOSITE) == "SwappedMatrices"
        many = swapped and result[0] >= STACK and math.prod(result[-2:]) <= SMALL
        return {"transA" if result[-1] < result[-2] else "transB": 1} if many else {}
    if min(result[-2:]) < 2:
        return {}
    left = len(shapes[0] or ()) > 2 and (not exact or inner <= BLOCK)
    found = {"transA": left and _is_read_swapped(node.inputs[0]), "transB": _is_read_swapped(node.inputs[1])}
    return {name: 1 for name, transposed in found.items() if transposed}


def _is_read_swapped(value: ir.Value | None) -> bool:
    """Whether a value is another one with every matrix transposed, which nothing but products reads."""
    if value is None or not is_swapped(value) or value.is_graph_output():
        return False
    return all(user.op_type == "MatMul" for user, _ in value.uses())


def _fused(op: Emitter, node: ir.Node, flags: dict[str, int]) -> ir.Node:
    inputs, y = list(node.inputs), node.outputs[0]
    if node.op_type == "Transpose":
        one = op.constant(np.eye(min(op.dims(y)[-2:])).tolist(), y.dtype)
        inputs = [inputs[0], one] if "transA" in flags else [one, inputs[0]]
    for name, index in (("transA", 0), ("transB", 1)):
        transposed = inputs[index]
        if node.op_type == "MatMul" and name in flags and transposed is not None:
            producer = transposed.producer()
            inputs[index] = None if producer is None else producer.inputs[0]
    result = ir.Value(name=op.fresh(f"{y.name}.fused"), type=y.type, shape=y.shape)
    return ir.node("FusedMatMul", inputs, flags, domain=DOMAIN, outputs=[result], name=node.name)
