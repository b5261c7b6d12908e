"""One node of every operator with an axis rule, and the axes along which each of its inputs may be cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from tests.support.aliasing_runs import ML, MS, NCHWC, Arrays, Example

_RANDOM = np.random.default_rng(0)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A node and its inputs.

    Attributes:
        axes: For each input, separated by ``/``, the axes along which it may be cut, one digit each.
        rounded: Why slices may differ from the whole in the last bits; empty: they don't.
    """

    op: str
    inputs: Arrays
    axes: str
    domain: str = ""
    opset: int = 20
    attributes: Mapping[str, object] = field(default_factory=dict)
    outputs: tuple[int, ...] = (0,)
    constants: tuple[int, ...] = ()
    rounded: str = ""

    def __str__(self) -> str:
        dims = "-".join("x".join(map(str, a.shape)) for a in self.inputs if a is not None)
        settings = "-".join(f"{k}={v}" for k, v in self.attributes.items() if not isinstance(v, onnx.TensorProto))
        return "-".join(part for part in (self.domain, self.op, str(self.opset), dims, settings) if part)

    @property
    def model(self) -> onnx.ModelProto:
        """The node alone."""
        example = Example(
            self.op, lambda _: self.inputs, self.domain, self.opset, (), self.outputs, self.constants, self.attributes
        )
        return example.model([None if each is None else np.asarray(each) for each in self.inputs])

    def accepts(self, index: int) -> set[int]:
        """The axes along which an input may be cut."""
        parts = self.axes.split("/")
        return set(map(int, parts[index])) if index < len(parts) else set()


def _each(names: str, inputs: Arrays, axes: str, domain: str = "", **others: Any) -> Iterator[Case]:
    """The same for several operators."""
    return (Case(op, inputs, axes, domain, **others) for op in names.split())


def normal(*dims: int) -> np.ndarray:
    return _RANDOM.standard_normal(dims).astype(np.float32)


def positive(*dims: int) -> np.ndarray:
    return (_RANDOM.random(dims) + 0.1).astype(np.float32)


def flags(*dims: int) -> np.ndarray:
    return _RANDOM.random(dims) < 0.5


def below(limit: int, *dims: int, dtype: str = "int64") -> np.ndarray:
    return _RANDOM.integers(0, limit, dims).astype(dtype)


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def _pointwise() -> Iterator[Case]:
    vectors = "kernels compute vectors of elements, and what remains of them, in two ways"
    yield from _each(
        "Abs Ceil Floor HardSigmoid HardSwish LeakyRelu Neg Relu Round Sign Identity IsNaN Shrink", [normal(4, 3)], "01"
    )
    yield from _each(
        "Atan Celu Cos Elu Erf Exp Gelu Mish Selu Sigmoid Sin Softplus Softsign Tan Tanh",
        [normal(4, 3)],
        "01",
        rounded=vectors,
    )
    yield from _each(
        "Acosh Asinh Cosh IsInf Reciprocal Sinh Sqrt ThresholdedRelu", [1 + positive(4, 3)], "01", rounded=vectors
    )
    yield from _each("Acos Asin Atanh Log", [positive(4, 3) / 2], "01", rounded=vectors)
    yield from _each(
        "Add Sub Mul Div Min Max Equal Greater GreaterOrEqual Less LessOrEqual",
        [normal(4, 1, 5), normal(3, 5)],
        "02/01",
    )
    yield Case("Pow", [positive(4, 3), positive(3)], "01/0", rounded=vectors)
    yield Case("Mod", [below(9, 4, 3), 1 + below(5, 4, 1)], "01/0")
    yield Case("PRelu", [normal(4, 3, 5), normal(3, 1)], "012/0")
    yield Case("Add", [normal(4, 3, 5), normal(1, 3, 5)], "012", constants=(1,))
    yield Case("Max", [normal(4, 3), normal(3), normal(4, 1)], "01/0/0")
    yield from _each("Sum Mean", [normal(4, 3), normal(3), normal(4, 1)], "01/0/0")
    yield from _each("And Or Xor", [flags(4, 3), flags(4, 3)], "01/01")
    yield Case("Not", [flags(4, 3)], "01")
    yield from _each("BitwiseAnd BitwiseOr BitwiseXor", [below(9, 4, 3), below(9, 3)], "01/0")
    yield Case("BitwiseNot", [below(9, 4, 3)], "01")
    yield Case(
        "BitShift",
        [below(9, 4, 3, dtype="uint8"), below(3, 3, dtype="uint8")],
        "01/0",
        attributes={"direction": "LEFT"},
    )
    yield Case("Clip", [normal(4, 3), np.float32(-0.5), np.float32(0.5)], "01")
    yield Case("Clip", [normal(4, 3)], "01", opset=6, attributes={"min": -0.5, "max": 0.5})
    yield Case("Cast", [normal(4, 3)], "01", attributes={"to": onnx.TensorProto.INT32})
    yield Case("CastLike", [normal(4, 3), below(3, 4, 3)], "01")
    yield Case("Where", [flags(4, 1), normal(4, 3), normal(3)], "0/01/0")
    yield Case("Dropout", [normal(4, 3)], "01", outputs=(0, 1))
    yield Case("Expand", [normal(4, 1, 3), ints(2, 4, 5, 3)], "02", constants=(1,))
    yield from _each("Gelu QuickGelu", [normal(4, 3)], "01", MS, rounded=vectors)
    yield from _each("FastGelu BiasGelu", [normal(4, 3), normal(3)], "01/0", MS, rounded=vectors)
    yield Case("Binarizer", [normal(4, 3)], "01", ML)
    channels = [normal(3), normal(3), normal(3), positive(3)]
    yield Case("BatchNormalization", [normal(4, 3, 5, 2), *channels], "0123")
    yield from _quantized()


def _quantized() -> Iterator[Case]:
    x = below(200, 4, 3, 6, dtype="uint8")
    zero = np.uint8(3)
    yield Case("QuantizeLinear", [normal(4, 3, 6), np.float32(0.1), zero], "012")
    yield Case("DequantizeLinear", [x, np.float32(0.1), zero], "012")
    yield Case("QuantizeLinear", [normal(4, 3, 6), np.float32(0.1), np.uint16(3)], "012", MS)
    yield Case("DequantizeLinear", [x.astype(np.uint16), np.float32(0.1), np.uint16(3)], "012", MS)
    yield Case("QuantizeLinear", [normal(4, 3, 6), positive(3), below(9, 3, dtype="uint8")], "012")
    yield Case("DequantizeLinear", [x, positive(6)], "012", attributes={"axis": 2})
    blocks = positive(4, 3, 2)
    yield Case("DequantizeLinear", [x, blocks], "01/01", opset=21, attributes={"axis": 2, "block_size": 3})
    scale = [np.float32(0.1), zero]
    yield from _each(
        "QLinearAdd QLinearMul", [x, *scale, x[:1], *scale, *scale], "012///12", MS, constants=(1, 2, 4, 5, 6, 7)
    )
    yield from _each("QLinearSigmoid QLinearLeakyRelu", [x, *scale, *scale], "012", MS, constants=(1, 2, 3, 4))
    yield Case("QLinearSoftmax", [x, *scale, *scale], "01", MS, attributes={"opset": 13}, constants=(1, 2, 3, 4))


def _images() -> Iterator[Case]:
    x = normal(5, 4, 6, 7)
    yield Case("Conv", [x, normal(3, 4, 3, 3), normal(3)], "0/0", attributes={"pads": [1] * 4}, rounded=_PRODUCT)
    yield Case("Conv", [x, normal(4, 1, 3, 3)], "0", attributes={"group": 4})
    yield Case("ConvTranspose", [x, normal(4, 3, 3, 3)], "0", attributes={"strides": [2, 2]})
    yield Case("ConvInteger", [below(9, 5, 4, 6, 7, dtype="uint8"), below(9, 3, 4, 3, 3, dtype="uint8")], "0")
    yield from _each("AveragePool MaxPool LpPool", [x], "0", attributes={"kernel_shape": [3, 2]})
    yield Case("MaxPool", [x], "", attributes={"kernel_shape": [3, 2]}, outputs=(0, 1))
    yield from _each("GlobalAveragePool GlobalMaxPool GlobalLpPool", [x], "0")
    yield from _each("DepthToSpace SpaceToDepth", [normal(5, 4, 6, 8)], "0", attributes={"blocksize": 2})
    yield Case("InstanceNormalization", [x, normal(4), normal(4)], "0")
    yield Case("GroupNormalization", [x, normal(4), normal(4)], "0", opset=21, attributes={"num_groups": 2})
    yield Case("LRN", [x], "0", attributes={"size": 3})
    yield Case("Col2Im", [normal(5, 12, 6), ints(3, 4), ints(2, 2)], "0", constants=(1, 2))
    yield Case("GridSample", [x, normal(5, 3, 2, 2)], "0/0")
    yield Case("DeformConv", [x, normal(3, 4, 2, 2), normal(5, 8, 5, 6)], "0//0", opset=19)
    scales = np.array([1, 1, 2, 2], np.float32)
    yield Case("Resize", [x, None, scales], "0", constants=(2,))
    yield Case("Resize", [x, None, None, ints(5, 4, 3, 9)], "0", constants=(3,), attributes={"mode": "linear"})
    yield Case("Resize", [x, None, None, ints(3, 9)], "0", constants=(3,), attributes={"axes": [2, 3]})
    yield Case("Upsample", [x, scales], "0", opset=9, constants=(1,))
    relu = {"activation": "Relu"}
    yield Case("FusedConv", [x, normal(3, 4, 1, 1), normal(3), normal(5, 3, 6, 7)], "0///0", MS, attributes=relu)
    blocked, kernel = normal(5, 16, 6, 7), normal(16, 16, 1, 1)
    yield Case("ReorderInput", [x], "0", NCHWC)
    yield Case("ReorderOutput", [blocked], "0", NCHWC, attributes={"channels": 12})
    yield Case("Conv", [blocked, kernel, normal(16), blocked], "0///0", NCHWC, attributes=relu, constants=(1, 2))
    yield from _each("MaxPool AveragePool", [blocked], "0", NCHWC, attributes={"kernel_shape": [3, 2]})
    yield from _each("GlobalAveragePool GlobalMaxPool", [blocked], "0", NCHWC)
    yield Case("Upsample", [blocked], "0", NCHWC, attributes={"scales": [1, 1, 2, 2]})
    u8, scale = below(200, 5, 4, 6, 7, dtype="uint8"), [np.float32(0.1), np.uint8(3)]
    weight = below(9, 3, 4, 3, 3, dtype="uint8")
    yield Case("QLinearConv", [u8, *scale, weight, *scale, *scale], "0", constants=(1, 2, 3, 4, 5, 6, 7))
    yield Case("QLinearConv", [u8, *scale, weight, *scale, *scale], "0", MS, constants=(1, 2, 3, 4, 5, 6, 7))
    yield Case("QLinearGlobalAveragePool", [u8, *scale, *scale], "0", MS, constants=(1, 2, 3, 4))
    pool = {"kernel_shape": [3, 2]}
    yield Case("QLinearAveragePool", [u8, *scale, *scale], "0", MS, attributes=pool, constants=(1, 2, 3, 4))
    yield Case("NhwcMaxPool", [u8], "0", MS, attributes=pool)


_SUMS = "kernels add up in another order where fewer rows are reduced"

_PRODUCT = "kernels take other paths for few rows or columns"


def _products() -> Iterator[Case]:
    yield Case("MatMul", [normal(4, 6), normal(6, 5)], "0/1", rounded=_PRODUCT)
    yield Case("MatMul", [normal(3, 4, 6), normal(6, 5)], "01/1", rounded=_PRODUCT)
    yield Case("MatMul", [normal(2, 3, 4, 6), normal(3, 6, 5)], "012/02", rounded=_PRODUCT)
    yield Case("MatMul", [normal(4, 6), normal(2, 3, 6, 5)], "0/013", rounded=_PRODUCT)
    yield Case("MatMul", [normal(1, 4, 6), normal(3, 6, 5)], "1/02", rounded=_PRODUCT)
    yield Case("MatMul", [normal(3, 4, 6), normal(6)], "01", rounded=_PRODUCT)
    yield Case("MatMul", [normal(6), normal(3, 6, 5)], "/02", rounded=_PRODUCT)
    for a, b, c in ((0, 0, normal(5)), (1, 0, normal(4, 5)), (0, 1, normal(4, 1)), (1, 1, np.float32(2))):
        left, right = normal(*((6, 4) if a else (4, 6))), normal(*((5, 6) if b else (6, 5)))
        flags_of = {"transA": a, "transB": b}
        yield Case("Gemm", [left, right, c], f"{a}/{1 - b}", attributes=flags_of, rounded=_PRODUCT)
        fused = {**flags_of, "activation": "Relu"}
        yield Case("FusedGemm", [left, right, c], f"{a}/{1 - b}", MS, attributes=fused, rounded=_PRODUCT)
    for a, b in ((0, 0), (1, 0), (0, 1), (1, 1)):
        left, right = normal(2, 3, *((6, 4) if a else (4, 6))), normal(2, 3, *((5, 6) if b else (6, 5)))
        fused = {"transA": a, "transB": b, "alpha": 0.5}
        axes = f"01{3 if a else 2}/01{2 if b else 3}"
        yield Case("FusedMatMul", [left, right], axes, MS, attributes=fused, rounded=_PRODUCT)
    first = {"transBatchA": 1, "transBatchB": 1}
    yield Case(
        "FusedMatMul", [normal(4, 2, 3, 6), normal(6, 2, 3, 5)], "012/123", MS, attributes=first, rounded=_PRODUCT
    )
    both = {"transBatchA": 1, "transA": 1}
    yield Case(
        "FusedMatMul", [normal(6, 2, 3, 4), normal(2, 3, 6, 5)], "123/013", MS, attributes=both, rounded=_PRODUCT
    )
    u8, s8 = below(200, 3, 4, 6, dtype="uint8"), below(90, 6, 5, dtype="int8")
    yield Case("MatMulInteger", [u8, s8, np.uint8(3), np.int8(1)], "01/1", constants=(2, 3))
    one, scale = [np.float32(0.1), np.uint8(3)], [np.float32(0.1), np.int8(3)]
    settings = (1, 2, 4, 5, 6, 7)
    yield Case("QLinearMatMul", [u8, *one, s8, *scale, *one], "01///1", constants=settings)
    columns = [positive(5), np.zeros(5, np.int8)]
    yield Case("QLinearMatMul", [u8, *one, s8, *columns, *one], "01", constants=(*settings, 3))
    yield Case(
        "MatMulIntegerToFloat", [u8, s8, np.float32(0.1), positive(5), np.uint8(3)], "01", MS, constants=(1, 2, 3, 4)
    )
    packed = [below(255, 5, 2, 8, dtype="uint8"), positive(10)]
    bits = {"K": 32, "N": 5, "bits": 4, "block_size": 16}
    yield Case(
        "MatMulNBits", [normal(3, 4, 32), *packed], "01", MS, attributes=bits, constants=(1, 2), rounded=_PRODUCT
    )
    yield Case(
        "Einsum", [normal(4, 3, 6), normal(4, 6, 5)], "01/02", attributes={"equation": "bij,bjk->bik"}, rounded=_PRODUCT
    )
    yield Case("Einsum", [normal(4, 3, 3)], "0", attributes={"equation": "bii->b"})


def _reductions() -> Iterator[Case]:
    x = normal(4, 3, 5)
    yield from _each("Softmax LogSoftmax Hardmax", [x], "02", attributes={"axis": 1})
    yield from _each("Softmax LogSoftmax Hardmax", [x], "0", opset=11)
    scale = [normal(5), normal(5)]
    yield Case("LayerNormalization", [x, *scale], "01", outputs=(0, 1, 2))
    yield Case("LayerNormalization", [x, normal(3, 5)], "0", attributes={"axis": 1})
    yield Case("RMSNormalization", [x, normal(5)], "01", opset=23)
    yield Case("SimplifiedLayerNormalization", [x, normal(5)], "01", outputs=(0, 1))
    yield Case("SkipLayerNormalization", [x, x, *scale, normal(5)], "01/01", MS, outputs=(0, 3))
    yield Case("SkipLayerNormalization", [x, normal(3, 5), *scale], "01/0", MS)
    yield Case("SkipSimplifiedLayerNormalization", [x, x, normal(5)], "01/01", MS, outputs=(0, 3))
    yield Case("LpNormalization", [x], "01")
    yield Case("MeanVarianceNormalization", [normal(4, 3, 5, 2)], "1")
    yield Case("MeanVarianceNormalization", [normal(4, 3, 5, 2)], "01", attributes={"axes": [2, 3]}, rounded=_SUMS)
    yield from _each("ReduceMax ReduceMin", [x, ints(1)], "02", constants=(1,))
    sums = "ReduceL1 ReduceL2 ReduceLogSumExp ReduceMean ReduceProd ReduceSum"
    yield from _each(sums, [x, ints(1)], "02", constants=(1,), rounded=_SUMS)
    flat = {"keepdims": 0}
    yield from _each(sums, [x, ints(0, -1)], "1", attributes=flat, constants=(1,), rounded=_SUMS)
    yield Case("ReduceSumSquare", [x], "12", opset=12, attributes={"axes": [0]})
    yield Case("ReduceLogSum", [positive(4, 3)], "01", attributes={"noop_with_empty_axes": 1})
    yield Case("ReduceMean", [x], "")
    yield from _each("ArgMax ArgMin", [x], "02", attributes={"axis": 1, "keepdims": 0})
    yield Case("CumSum", [x, np.int64(1)], "02", constants=(1,))
    yield Case("TopK", [x, ints(2)], "02", attributes={"axis": 1}, outputs=(0, 1), constants=(1,))
    yield Case("Trilu", [normal(3, 4, 5)], "0")


def _movement() -> Iterator[Case]:
    x = normal(4, 3, 6)
    targets = {(4, 18): "01", (12, 6): "02", (4, 3, 2, 3): "01", (2, 2, 18): "1", (1, 4, 3, 6): "012"}
    for target, axes in targets.items():
        yield Case("Reshape", [x, ints(*target)], axes, constants=(1,))
    yield Case("Reshape", [x, ints(0, -1, 2)], "01", constants=(1,))
    yield Case("Flatten", [x], "01")
    yield Case("Flatten", [x], "02", attributes={"axis": 2})
    yield Case("Squeeze", [normal(4, 1, 3)], "02")
    yield Case("Squeeze", [normal(4, 1, 3)], "02", opset=11)
    yield Case("Squeeze", [normal(4, 1, 3), ints(1)], "02", constants=(1,))
    yield Case("Unsqueeze", [normal(4, 3), ints(0, 2)], "01", constants=(1,))
    yield Case("Transpose", [x], "012", attributes={"perm": [1, 2, 0]})
    yield Case("Transpose", [x], "012")
    yield Case("Concat", [x, normal(4, 2, 6)], "02/02", attributes={"axis": -2})
    yield Case("Split", [x, ints(2, 4)], "01", attributes={"axis": 2}, outputs=(0, 1), constants=(1,))
    yield Case("Slice", [x, ints(1, 0), ints(3, 2**60), ints(1, 0)], "02", constants=(1, 2, 3))
    yield Case("Slice", [x, ints(-1, 5), ints(-9, 0), ints(1, 2), ints(-1, -2)], "0", constants=(1, 2, 3, 4))
    yield Case("Slice", [x], "12", opset=9, attributes={"starts": [1], "ends": [3]})
    yield Case("Pad", [x, ints(0, 1, 0, 0, 0, 2), np.float32(1)], "0", constants=(1, 2))
    yield Case("Pad", [x, ints(0, 1, 0, 0, 0, 2), np.float32(1)], "0", MS, constants=(1, 2))
    yield Case("Pad", [x, ints(1, -1), None, ints(1)], "02", constants=(1, 3))
    yield Case("Pad", [x], "02", opset=10, attributes={"pads": [0, 1, 0, 0, 1, 0], "mode": "reflect"})
    yield Case("Tile", [x, ints(1, 2, 1)], "02", constants=(1,))
    lengths = ints(1, 2, 6, 3)
    yield Case("ReverseSequence", [normal(4, 6, 3), lengths], "02/0", attributes={"batch_axis": 0, "time_axis": 1})
    yield Case("ReverseSequence", [normal(6, 4, 3), lengths], "12/0")
    u8, scale = below(9, 4, 3, dtype="uint8"), [np.float32(0.1), np.uint8(3)]
    yield Case(
        "QLinearConcat",
        [*scale, u8, *scale, u8, *scale],
        "//0///0",
        MS,
        attributes={"axis": 1},
        constants=(0, 1, 3, 4, 6, 7),
    )


def _indexing() -> Iterator[Case]:
    x = normal(4, 3, 6)
    yield Case("Gather", [x, below(3, 2, 5)], "02/01", attributes={"axis": 1})
    yield Case("Gather", [x, np.int64(2)], "02", attributes={"axis": 1})
    yield Case("GatherElements", [x, below(3, 4, 2, 6)], "02/012", attributes={"axis": 1})
    yield Case("GatherElements", [x, below(4, 4, 2, 3)], "0/02", attributes={"axis": 2})
    yield Case("GatherND", [x, below(3, 5, 2)], "2/0")
    yield Case("GatherND", [x, below(3, 4, 2, 1)], "02/01", attributes={"batch_dims": 1})
    picked = np.tile(ints(0, 2)[None, :, None], (4, 1, 6))
    yield Case("ScatterElements", [x, picked, normal(4, 2, 6)], "02/02/02", attributes={"axis": 1})
    yield Case("OneHot", [below(5, 4, 3), np.int64(5), ints(0, 1)], "01", attributes={"axis": 1}, constants=(1, 2))


def _sequences() -> Iterator[Case]:
    x, mask = normal(4, 5, 8), np.tile(np.arange(5) < 3, (4, 1)).astype(np.int32)
    two = {"num_heads": 2}
    yield Case("Attention", [x, normal(8, 24), normal(24), mask], "0///0", MS, attributes=two)
    yield Case("Attention", [x, normal(8, 24), normal(24), mask[:, 0] + 2], "0///0", MS, attributes=two)
    past = normal(2, 4, 2, 3, 4)
    yield Case("Attention", [x, normal(8, 24), normal(24), None, past], "0////1", MS, attributes=two, outputs=(0, 1))
    yield Case(
        "MultiHeadAttention",
        [x, x, x, normal(24), mask, normal(4, 2, 5, 5)],
        "01/0/0//0/0",
        MS,
        attributes=two,
        rounded=_PRODUCT,
    )
    causal = two | {"unidirectional": 1}
    yield Case(
        "MultiHeadAttention", [x, normal(4, 3, 8), normal(4, 3, 8)], "01/0/0", MS, attributes=two, rounded=_PRODUCT
    )
    yield Case("MultiHeadAttention", [x, x, x], "0/0/0", MS, attributes=causal)
    heads = [normal(4, 2, 5, 4) for _ in range(3)]
    yield Case("Attention", [*heads, normal(4, 1, 5, 5)], "012/01/01/0", opset=23, rounded=_PRODUCT)
    yield Case("Attention", [*heads, normal(5, 5)], "012/01/01", opset=23, rounded=_PRODUCT)
    groups = {"q_num_heads": 4, "kv_num_heads": 2}
    yield Case(
        "Attention", [x, normal(4, 6, 4), normal(4, 6, 4)], "01/0/0", opset=23, attributes=groups, rounded=_PRODUCT
    )
    yield Case("Attention", heads, "01/01/01", opset=23, attributes={"is_causal": 1})
    words, table = below(9, 4, 5, dtype="int32"), normal(9, 8)
    embedded = [words, words, table, normal(5, 8), table, normal(8), normal(8), mask]
    yield Case("EmbedLayerNormalization", embedded, "0/0//////0", MS, outputs=(0, 1))
    cache = [normal(9, 2), normal(9, 2)]
    yield Case("RotaryEmbedding", [heads[0], *cache, below(9, 4, 5)], "0///0", opset=23)
    yield Case("RotaryEmbedding", [heads[0], normal(4, 5, 2), normal(4, 5, 2)], "0/0/0", opset=23)
    yield Case("RotaryEmbedding", [heads[0], below(9, 4, 5), *cache], "0/0", MS)
    yield Case("RotaryEmbedding", [heads[0], ints(1), *cache], "0", MS)
    for op, gates, states in (("LSTM", 4, 2), ("GRU", 3, 1), ("RNN", 1, 1)):
        lengths = ints(5, 2, 3, 4).astype(np.int32)
        inputs = [normal(5, 4, 3), normal(1, gates * 6, 3), normal(1, gates * 6, 6), None, lengths]
        inputs += [normal(1, 4, 6)] * states
        axes = "1////0" + "/1" * states
        yield Case(op, inputs, axes, attributes={"hidden_size": 6}, outputs=tuple(range(1 + states)), rounded=_PRODUCT)


CASES = (
    *_pointwise(),
    *_images(),
    *_products(),
    *_reductions(),
    *_movement(),
    *_indexing(),
    *_sequences(),
)
