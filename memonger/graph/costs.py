"""What one run of a node costs where nothing was measured: a roofline on bytes moved and FLOPs.

Williams, Waterman, Patterson 2009, "Roofline: An Insightful Visual Performance Model". The cost is in units of bytes:
as many as a machine moves in the time the node takes, either for what it reads and writes or for its arithmetic.

Left out are elementwise operators' FLOPs, those of transcendental ones too: some 10 an element are a byte's time beside
the 8 bytes an element that are moved. onnxruntime 1.31.1 on one core (AVX-512) took for one pass over 64 MiB, as a
multiple of Relu's time: Sqrt 1.2, Tanh 1.6, Exp, Sigmoid, Softmax 1.7, Erf 2.1, LayerNormalization 2.1, Gelu 3.2, while
its convolutions did 2 to 4 FLOPs in the time of a byte, so that both are as much dearer than the estimate. Far off are
only kernels that aren't vectorized: Log 5, Sin 6, Pow 12 to 16, Softplus 39. A measured graph knows them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx_ir as ir

from memonger.graph import aliasing
from memonger.ir.operators import facts, operator_name
from memonger.ir.values import nbytes, static_shape, subgraphs

INTENSITY = 10
"""FLOPs a machine does in the time of moving a byte from memory, in single precision.

By the vendors' data sheets (FLOP/s without tensor cores, bytes/s): NVIDIA A100 19.5 T / 2.04 T = 10, V100 15.7 T /
0.90 T = 17, H100 SXM 67 T / 3.35 T = 20; AMD EPYC 9654 (96 cores, 2.4 GHz, 32 FLOPs a cycle) 7.4 T / 0.46 T = 16.
Kernels reach less of the FLOPs than of the bytes: onnxruntime 1.31.1 on one core did 87 GFLOP/s in a product of
matrices of 1024 by 1024, 37 to 81 in convolutions, and moved 19 GB/s: 2 to 5.
"""


APART = 60
"""Bytes a device moves in its own memory in the time of one between it and the host.

By the vendors' data sheets: NVIDIA A100 2.04 TB/s and 31.5 GB/s (PCI Express 4.0 x16), H100 SXM 3.35 TB/s and 63 GB/s.
"""

_TRANSFERS = {"MemcpyFromHost", "MemcpyToHost"}


@dataclass(frozen=True, slots=True)
class Rates:
    """What a kind of processor does in a second.

    Attributes:
        flops: Operations of products, on two cores.
        again: Bytes of weights that slices read again, on however many cores: each slice waits for them. ResNet-50's
            convolutions in eight slices took 4.5 ms longer with AVX-512 and read 320 MiB more; that smaller values lie
            in the cache made up for a part. ResNet-18's in sixteen took 32 ms longer without, and read 700 MiB more.
    """

    flops: float
    again: float


WITH_AVX512, WITHOUT_AVX512 = Rates(4.5e11, 1e11), Rates(1.4e11, 5e10)
"""Measured: VGG-16's and ResNet-50's products at batch 16; weights of ResNets, AlexNet, GoogLeNet and DenseNet-121."""


@cache
def rates() -> Rates:
    """Those of this processor."""
    extensions = np.show_config(mode="dicts").get("SIMD Extensions", {}).get("found", ())
    return WITH_AVX512 if {"X86_V4", "AVX512F"} & set(extensions) else WITHOUT_AVX512


Dims = tuple[int, ...]


class _UnknownShapeError(LookupError):
    """A shape that the count needs isn't static, or the operand is left out."""


@dataclass(frozen=True, slots=True)
class _Operands:
    """Shapes of a node's inputs and of its first output."""

    node: ir.Node

    def __getitem__(self, index: int) -> Dims:
        value = self.node.inputs[index] if index < len(self.node.inputs) else None
        return _known(value)

    @property
    def result(self) -> Dims:
        return _known(self.node.outputs[0] if self.node.outputs else None)

    def transposed(self, name: str) -> bool:
        return bool(self.node.attributes.get_int(name, 0))


def _known(value: ir.Value | None) -> Dims:
    dims = None if value is None else static_shape(value)
    if dims is None:
        raise _UnknownShapeError
    return dims


_Rule = Callable[[_Operands], int]


def _convolution(weight: int) -> _Rule:
    """Each element of the output: a product and a sum for each weight of its channel. Weights: (outputs, inputs, …)."""
    return lambda of: 2 * math.prod(of.result) * math.prod(of[weight][1:])


def _transposed_convolution(of: _Operands) -> int:
    """Each element of the input, with each weight of its channel. Weights: (inputs, outputs, …)."""
    return 2 * math.prod(of[0]) * math.prod(of[1][1:])


def _product(of: _Operands) -> int:
    """Matrices, stacks of them and vectors: the summed axis is the first factor's last one, or the one before."""
    dims = of[0]
    summed = dims[-2] if of.transposed("transA") and len(dims) > 1 else dims[-1]
    return 2 * math.prod(of.result) * summed


def _packed_product(of: _Operands) -> int:
    """MatMulNBits: the second factor is packed, an attribute has the length of the summed axis."""
    return 2 * math.prod(of.result) * of.node.attributes.get_int("K", 0)


def _recurrent(of: _Operands) -> int:
    """At each step of each sequence every weight once, of both directions where there are two."""
    return 2 * math.prod(of[0][:2]) * (math.prod(of[1]) + math.prod(of[2]))


def _attention(of: _Operands) -> int:
    """Scores, and values weighted with them; 3-D or 4-D, the axis before the last is the sequence."""
    keys = of[1][-2]
    if len(of.node.inputs) > 4 and of.node.inputs[4] is not None and not of.node.domain:  # past keys
        keys += of[4][-2]
    return 2 * keys * (math.prod(of[0]) + math.prod(of.result))


def _projected_attention(of: _Operands) -> int:
    """com.microsoft's Attention, without a past: one product makes queries, keys and values."""
    projection = 2 * math.prod(of[0]) * of[1][-1]
    return projection + 4 * of[0][-2] * math.prod(of.result)


def _einsum(of: _Operands) -> int:
    """Two or more operands: a product and a sum for each combination of indices."""
    equation = of.node.attributes.get_string("equation", "").replace(" ", "")
    terms = equation.partition("->")[0].split(",")
    if len(terms) < 2:
        return 0
    sizes: dict[object, int] = {}
    for place, term in enumerate(terms):
        dims = of[place]
        head, dots, tail = term.partition("...")
        inner = len(dims) - len(head) - len(tail)  # axes the dots stand for, counted from the last
        labels: list[object] = [*head, *(range(-inner, 0) if dots else ()), *tail]
        for label, dim in zip(labels, dims, strict=False):
            sizes[label] = max(dim, sizes.get(label, 0))
    return 2 * math.prod(sizes.values())


_PRODUCTS = (
    "MatMul", "MatMulInteger", "QLinearMatMul", "Gemm", "com.microsoft::FusedMatMul", "com.microsoft::FusedGemm",
    "com.microsoft::QGemm", "com.microsoft::MatMulIntegerToFloat", "com.microsoft::DynamicQuantizeMatMul",
)  # fmt: skip
_CONVOLUTIONS = ("Conv", "ConvInteger", "DeformConv", "com.microsoft::FusedConv", "com.microsoft.nchwc::Conv")
_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(_CONVOLUTIONS, _convolution(1)),  # channels filled up to whole blocks count: they are computed
    "QLinearConv": _convolution(3),
    "ConvTranspose": _transposed_convolution,
    **dict.fromkeys(_PRODUCTS, _product),
    "com.microsoft::MatMulNBits": _packed_product,
    "Einsum": _einsum,
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
    **dict.fromkeys(("Attention", "com.microsoft::MultiHeadAttention"), _attention),
    "com.microsoft::Attention": _projected_attention,
}


def flops(node: ir.Node) -> int:
    """Floating-point (or integer) operations of the products in one run of a node; a multiply-add is two.

    Bodies count once, however often they run; of branches all. Operators without products count nothing, nor do those
    with a shape that isn't static.
    """
    return sum(_own_flops(each) or 0 for each in (node, *_inner_nodes(node)))


def _own_flops(node: ir.Node) -> int | None:
    """The same without bodies; None of an operator without products."""
    rule = _RULES.get(operator_name(node))
    try:
        return None if rule is None else rule(_Operands(node))
    except _UnknownShapeError:
        return 0


def _inner_nodes(node: ir.Node) -> list[ir.Node]:
    """Nodes of the bodies, of their bodies and so on."""
    nodes: list[ir.Node] = []
    pending = subgraphs(node)
    while pending:
        for inner in pending.pop():
            nodes.append(inner)
            pending.extend(subgraphs(inner))
    return nodes


def estimate(node: ir.Node, read: Sequence[int], written: Sequence[int]) -> float:
    """Cost of one run of a node: bytes moved, or its FLOPs in the bytes a machine moves meanwhile, if that is more.

    Args:
        node: Not a view: those move nothing, and are the caller's.
        read: Bytes of each value it reads, in the order of its inputs.
        written: Bytes of each value it writes.
    """
    moved = float(_moved(node, read, written))
    products = _own_flops(node)
    if products is not None:
        return max(moved, products / INTENSITY)
    inner = _inner_nodes(node)
    return max(moved, sum(map(_inner_cost, inner))) if inner else moved


def _moved(node: ir.Node, read: Sequence[int], written: Sequence[int]) -> int:
    total = sum(written)
    if node.op_type in _TRANSFERS:
        return APART * total
    operator = facts(node)
    if operator.reads_part:
        return total + min(read[0], total) + sum(read[1:]) if read else total
    if operator.shape_only:
        return total
    return total + sum(read)


def _inner_cost(node: ir.Node) -> float:
    """Of a node in a body; values without a static shape count nothing, nor do nodes with bodies of their own."""
    if aliasing.view_pairs(node) or subgraphs(node):
        return 0.0
    read = [nbytes(v) or 0 for v in dict.fromkeys(node.inputs) if v is not None]
    written = [nbytes(v) or 0 for v in node.outputs]
    return max(float(_moved(node, read, written)), (_own_flops(node) or 0) / INTENSITY)
