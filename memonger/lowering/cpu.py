"""The CPU form of a training model: what onnxruntime's CPU has faster kernels for than for what the rules write.

**Products of transposed stacks of matrices.** The standard has a flag for that in Gemm alone, which takes no stacks;
onnxruntime has it in its own FusedMatMul. The same bits come out with two exceptions (measured on 1.31.1): a product
with one row or column goes through another kernel, and one that reads its left operand transposed sums in blocks of
`BLOCK`. One matrix that all of a stack are multiplied by stays transposed: read so for each of them it takes 1.1 to 1.5
times as long on one thread.

onnxruntime's Transpose shares out each matrix of a stack among the threads: with two, 0.1 to 1.8 µs a matrix however
small. A product with the unit matrix takes less for small ones. It gives the same numbers, where all are finite.

**A weight turned and flipped** is a product whose left operand has its first two axes changed. FusedMatMul reads it as
it stands (``transBatchA``), for the same bits: 0.6 to 0.8 of the time of both from `TURNED` rows on, more below. Of a
weight in groups it leaves the groups behind the matrices: whole matrices are moved then, instead of their rows (0.4 to
1.0 of the time, 32 groups of 4 to 32 channels).

**A function of a product's result** is a part of the product as a FusedGemm: the same bits, a node less.

**Rows added up where indices say.** ScatterElements goes through them element by element, ScatterND row by row in the
same order, 27 times as fast; but its threads write over each other where rows with one index are shared out among them.
No kernel shares out what takes less than starting a thread: here from 210,000 elements (1.31.1). So rows are added in
portions of `PORTION` elements.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import onnx_ir as ir

from memonger.ir.emitter import Emitter
from memonger.ir.marks import COMPOSITE
from memonger.ir.model import Model
from memonger.ir.rewrite import Replacer
from memonger.ir.values import is_swapped, static_shape

logger = logging.getLogger(__name__)

BLOCK = 128  # the inner size up to which a product with its left operand transposed is one sum

DOMAIN = "com.microsoft"

STACK = 16  # matrices from which, and
SMALL = 1024  # elements of each up to which a stack is transposed by a product

TURNED = 64  # rows of a matrix from which a product that reads its stack with the first axes changed costs less

PORTION = 16384  # elements of rows that one ScatterND adds

FUSED = ("Relu", "Sigmoid", "Tanh")  # functions that FusedGemm computes by the same code as their own kernels


def fuse_products(model: Model, *, exact: bool = True) -> bool:
    """A pass: what is faster in onnxruntime's own operators is in them, and there are no Transposes nobody reads.

    Inference is left to onnxruntime's own optimizer.

    Args:
        model: A training step.
        exact: Only what has the same bits; else also what differs in the last ones.
    """
    written = Counter[str]()

    def replaced(op: Emitter, node: ir.Node) -> tuple[ir.Value] | None:
        write = _writer(node, exact)
        if write is None:
            return None
        written[getattr(write, "func", write).__name__] += 1
        return (write(op, node),)

    if not Replacer(model.graph, Emitter(model.ir)).replace_each(replaced):
        return False
    model.ir.opset_imports.setdefault(DOMAIN, 1)
    logger.info("%s: %s.", model.name, ", ".join(f"{count} by {name[1:]}" for name, count in written.items()))
    return True


def _writer(node: ir.Node, exact: bool) -> Callable[[Emitter, ir.Node], ir.Value] | None:
    """What writes a node otherwise, if anything does."""
    if _is_turned(node):
        return _turned_product
    if _flags(node, exact):
        return partial(_transposed_product, exact=exact)
    if node.op_type == "ScatterElements" and node.metadata_props.get(COMPOSITE) == "AddedRows":
        return _added_rows if _portion(node) else None
    return _fused_product if _product_behind(node) is not None else None


def _is_turned(node: ir.Node) -> bool:
    """Whether a node multiplies a stack, whose matrices' rows and place in the stack change places, by a constant."""
    if node.op_type != "MatMul" or node.domain or node.outputs[0].dtype != ir.DataType.FLOAT:
        return False
    stack, matrix = node.inputs
    turn = None if stack is None or len(stack.uses()) > 1 or stack.is_graph_output() else stack.producer()
    shape = static_shape(node.outputs[0])
    if turn is None or turn.op_type != "Transpose" or turn.domain or shape is None or matrix is None:
        return False
    if matrix.const_value is None or matrix.is_graph_input() or len(static_shape(matrix) or ()) != 2:
        return False
    perm = list(turn.attributes.get_ints("perm") or ())
    return perm == [0, 2, 1, 3] or (perm == [1, 0, 2] and shape[1] >= TURNED)


def _turned_product(op: Emitter, node: ir.Node) -> ir.Value:
    y, matrix, turn = node.outputs[0], op.content(node.inputs[1]), op.given(node, 0).producer()
    assert turn is not None
    assert matrix is not None
    x, (*groups, count, rows, width) = op.given(turn, 0), op.dims(y)
    group = math.prod(groups)
    stack, flags = op.reshape(x, (group * rows, count, op.dims(x)[-1])), [ir.AttrInt64("transBatchA", 1)]
    made = _fused_node(op, node, "FusedMatMul", [stack, op.constant(matrix[None])], flags)
    if not groups:
        return made
    made.shape = ir.Shape([count, group * rows, width])
    return op.reshape(op.transpose(op.reshape(made, (count, group, rows * width)), (1, 0, 2)), op.dims(y))


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


def _transposed_product(op: Emitter, node: ir.Node, exact: bool) -> ir.Value:
    inputs, y, flags = list(node.inputs), node.outputs[0], _flags(node, exact)
    if node.op_type == "Transpose":
        one = op.constant(np.eye(min(op.dims(y)[-2:])).tolist(), y.dtype)
        inputs = [inputs[0], one] if "transA" in flags else [one, inputs[0]]
    for name, index in (("transA", 0), ("transB", 1)):
        transposed = inputs[index]
        if node.op_type == "MatMul" and name in flags and transposed is not None:
            producer = transposed.producer()
            inputs[index] = None if producer is None else producer.inputs[0]
    return _fused_node(op, node, "FusedMatMul", inputs, [ir.AttrInt64(name, flag) for name, flag in flags.items()])


def _fused_node(
    op: Emitter, node: ir.Node, op_type: str, inputs: Sequence[ir.Value | None], attributes: Sequence[ir.Attr]
) -> ir.Value:
    """A node of onnxruntime's own in another one's place."""
    y = node.outputs[0]
    result = ir.Value(name=op.fresh(f"{y.name}.fused"), type=y.type, shape=y.shape)
    op.nodes.append(ir.Node(DOMAIN, op_type, inputs, attributes, outputs=[result], name=node.name))
    return result


def _product_behind(node: ir.Node) -> ir.Node | None:
    """The product whose result a node is a function of, and nothing else reads."""
    if node.op_type not in FUSED or node.domain or node.outputs[0].dtype != ir.DataType.FLOAT:
        return None
    value = node.inputs[0]
    if value is None or len(value.uses()) != 1 or value.is_graph_output():
        return None
    product = value.producer()
    return product if product is not None and product.op_type == "Gemm" and not product.domain else None


def _fused_product(op: Emitter, node: ir.Node) -> ir.Value:
    product = _product_behind(node)
    assert product is not None
    attributes = [*product.attributes.values(), ir.AttrString("activation", node.op_type)]
    return _fused_node(op, node, "FusedGemm", product.inputs, attributes)


def _portion(node: ir.Node) -> int:
    """How many rows one ScatterND of an ``AddedRows`` adds; 0 where it isn't one matrix of float32."""
    shape = static_shape(node.inputs[2]) if node.inputs[2] is not None else None
    if shape is None or shape[0] != 1 or shape[2] < 2 or node.outputs[0].dtype != ir.DataType.FLOAT:
        return 0
    return PORTION // shape[2]


def _added_rows(op: Emitter, node: ir.Node) -> ir.Value:
    data, indices, rows = (op.given(node, k) for k in range(3))
    _, count, width = op.dims(rows)
    expand, portion = indices.producer(), _portion(node)
    assert expand is not None
    numbers = op.cast(op.reshape(op.given(expand, 0), (count, 1)), ir.DataType.INT64)
    sizes = [min(portion, count - start) for start in range(0, count, portion)]
    total = op.reshape(data, op.dims(data)[1:])
    parts = [[x] if len(sizes) == 1 else op.several("Split", len(sizes), x, op.ints(*sizes), axis=0)
             for x in (numbers, op.reshape(rows, (count, width)))]  # fmt: skip
    for at, part in zip(*parts, strict=True):
        total = op.ScatterND(total, at, part, reduction="add")
    return op.reshape(total, op.dims(data))
