"""Nodes that copy from memory of the host, which no CUDA graph may: in most it is gone when a captured run is replayed.

onnxruntime's kernels for them build arrays of addresses or sizes on the host, copy them to the device, and give the
host's memory back at the run's end. A CUDA graph holds the copy, and would read there again. Which do was seen on a
stand-in for CUDA that records copies (1.31.1, 228 examples of nodes).
"""

import math
from collections.abc import Iterable

import onnx_ir as ir

from memonger.ir.values import static_shape

MANY = 32  # inputs; a Concat of no more is told its addresses in the launch itself

_RECURRENT = ("GRU", "LSTM", "RNN")


def copies_from_host(nodes: Iterable[ir.Node]) -> ir.Node | None:
    """The first node that does; None if none is known to."""
    return next((node for node in nodes if _copies(node)), None)


def _copies(node: ir.Node) -> bool:
    if node.op_type == "MemcpyFromHost":  # onnxruntime refuses to capture a model with one
        return True
    if node.op_type in ("MatMul", "FusedMatMul"):
        return not _has_strides(node)
    if node.op_type == "Split":
        return not _is_even_or_last(node)
    return node.op_type in _RECURRENT or (node.op_type == "Concat" and len(node.inputs) > MANY)


def _has_strides(node: ir.Node) -> bool:
    """Whether the matrices of both sides lie at equal distances: as many of each, or one from the right."""
    left, right = (None if value is None else static_shape(value) for value in node.inputs[:2])
    if left is None or right is None:
        return False
    if len(right) <= 2 or len(left) <= 2:
        return len(right) <= 2
    return math.prod(right[:-2]) == 1 or left[:-2] == right[:-2]


def _is_even_or_last(node: ir.Node) -> bool:
    source = node.inputs[0]
    rank = None if source is None or source.shape is None else len(source.shape)
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    if axis == -1 or (rank is not None and axis == rank - 1):
        return True
    parts = [static_shape(value) for value in node.outputs]
    return len(set(parts)) == 1 and None not in parts
