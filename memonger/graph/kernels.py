"""What onnxruntime's kernels on the CPU ask for beside their outputs, worked out without running them.

Learned from onnxruntime's source (``mlas/lib/convolve.cpp``, ``scan_utils.cc``, ``lrn.cc``, ``conv_transpose.cc``).
What isn't here was seen to take nothing that counts, or isn't known: recurrent operators and attention.
"""

import math
from collections.abc import Sequence

import onnx_ir as ir

from memonger.ir.operators import operator_name
from memonger.ir.values import input_at, nbytes, static_shape, subgraphs

_BUFFER = 128 * 128  # elements that a convolution expands at a time
_WORTH_A_THREAD, _MOST_THREADS, _ALIGNED = 64 * 1024, 16, 16  # multiplications; threads; outputs


def workspace(node: ir.Node, threads: int) -> list[int]:
    """Bytes of each piece of workspace of a node whose shapes are known, on so many threads."""
    name = operator_name(node)
    first = input_at(node, 0)
    if name in ("Conv", "com.microsoft::FusedConv"):
        return [4 * _expanded(node, threads)] if first is not None and first.dtype == ir.DataType.FLOAT else []
    if name == "ConvTranspose" and first is not None:
        x, weight = static_shape(first), static_shape(node.inputs[1]) if node.inputs[1] is not None else None
        return [4 * math.prod(weight[1:]) * math.prod(x[2:])] if x and weight else []
    if name == "LRN" and first is not None:
        x, size = static_shape(first), node.attributes.get_int("size", 1)
        return [4 * math.prod(x), 4 * (x[1] + size - 1) * math.prod(x[2:])] if x else []  # sums of squares, and squares
    if name == "Scan":
        return [size for size in _carried(node) for _ in range(min(2, turns(node) - 1))]
    if name == "Loop":
        return _carried(node)
    return []


def turns(node: ir.Node) -> int:
    """How often a node with bodies runs them; 2 where that isn't known: more take no more."""
    if node.op_type == "Scan":
        sequences = node.attributes.get_int("num_scan_inputs", 0)
        dims = static_shape(given) if sequences and (given := node.inputs[-sequences]) is not None else None
        axes = node.attributes.get_ints("scan_input_axes") or [0]
        return dims[axes[0]] if dims else 2
    most = input_at(node, 0) if node.op_type == "Loop" else None
    if most is not None and most.const_value is not None:
        return int(most.const_value.numpy())
    return 1 if node.op_type == "If" else 2


def _carried(node: ir.Node) -> list[int]:
    """Bytes of each value that one run of a body hands to the next: a Loop's may grow."""
    given = node.inputs[2:] if node.op_type == "Loop" else node.inputs
    count = len(given) - node.attributes.get_int("num_scan_inputs", 0)
    if node.op_type == "Loop":
        (body,) = subgraphs(node)
        return [nbytes(value) or 0 for value in body.outputs[1 : 1 + count]]
    return [nbytes(value) or 0 for value in given[:count] if value is not None]


def transposed(node: ir.Node) -> list[ir.Value]:
    """The results that a Scan stacks along another axis than the first: they are written when all turns are over, from
    a stack of slices as they came."""
    axes = (node.attributes.get_ints("scan_output_axes") or ()) if node.op_type == "Scan" else ()
    return [value for value, axis in zip(node.outputs[len(_carried(node)) :], axes, strict=False) if axis]


def _expanded(node: ir.Node, threads: int) -> int:
    """Elements of the buffer into which a convolution of plain layout expands its input for a product of matrices."""
    x, weight, y = (
        None if value is None else static_shape(value) for value in (node.inputs[0], node.inputs[1], node.outputs[0])
    )
    if x is None or weight is None or y is None:
        return 0
    groups, strides = node.attributes.get_int("group", 1), node.attributes.get_ints("strides") or [1]
    filters, channels, kernel = weight[0] // max(1, groups), weight[1], weight[2:]
    outputs, depth = math.prod(y[2:]), channels * math.prod(kernel)
    is_dense = all(stride == 1 for stride in strides)
    is_plain = is_dense and _is_unpadded(x[2:], y[2:], kernel, node.attributes.get_ints("dilations"))
    if is_plain and (depth == channels or _is_whole_side(node, x, kernel, channels)):
        return 0
    if filters > outputs:
        return outputs * depth
    work = filters * outputs * depth
    used = min(threads, work // _WORTH_A_THREAD + 1 if work < _WORTH_A_THREAD * _MOST_THREADS else _MOST_THREADS)
    if x[0] > 1 or groups > 1:
        return min(threads, x[0] * groups) * _BUFFER
    if used > 1:
        stride = -(-outputs // (used * _ALIGNED)) * _ALIGNED
        used = 1 if stride >= outputs else used - (stride * (used - 1) >= outputs)
    return used * _BUFFER


def _is_unpadded(
    sizes: Sequence[int], outputs: Sequence[int], kernel: Sequence[int], dilations: Sequence[int] | None
) -> bool:
    """Whether a convolution with strides of 1 has outputs at the places alone where its whole kernel lies inside."""
    reach = [(width - 1) * step for width, step in zip(kernel, dilations or [1] * len(kernel), strict=True)]
    return all(size - more == output for size, output, more in zip(sizes, outputs, reach, strict=True))


def _is_whole_side(node: ir.Node, x: Sequence[int], kernel: Sequence[int], channels: int) -> bool:
    """Whether a kernel of one channel is as wide as the image, or as high and one wide: then nothing is expanded."""
    if len(kernel) != 2 or channels != 1 or any(step != 1 for step in node.attributes.get_ints("dilations") or ()):
        return False
    return kernel[1] == x[3] or (kernel[0] == x[2] and kernel[1] == 1)
