"""Examples of every operator in the aliasing lists, in each way its kernel takes, and of those that must stay out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from onnx import TensorProto

from tests.support.aliasing_runs import ML, MS, NCHWC, Arrays, Draw, Example, Pair

_FLOATS = ("float32", "float64")
_TYPES = (*_FLOATS, "int32", "int64", "int8", "uint8")
_SMALL = (1, 1031, 50_021)


def _drawn(inputs: Callable[..., Arrays]) -> Callable[[Draw], Arrays]:
    """The function itself: a name and a type for what several examples draw."""
    return inputs


def _int64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def _flat(names: str, dtypes: tuple[str, ...] = ("float32",), inputs: int = 1, opset: int = 20) -> Iterator[Example]:
    for name in names.split():
        yield Example(name, lambda d: [d.flat() for _ in range(inputs)], opset=opset, dtypes=dtypes)


def _unary() -> Iterator[Example]:
    yield from _flat("Acos Acosh Asin Asinh Atan Atanh Celu Cosh Elu Erf HardSigmoid LeakyRelu Selu Sinh Softplus")
    yield from _flat("Softsign Tan ThresholdedRelu")
    yield from _flat("Ceil Cos Exp Floor Log Reciprocal Round Sigmoid Sin Sqrt Tanh", _FLOATS)
    yield from _flat("Abs Shrink Sign", _TYPES)
    yield from _flat("Neg", (*_FLOATS, "int32", "int64", "int8"))
    yield from _flat("Relu", (*_FLOATS, "int32", "int8"))
    yield from _flat("Round", ("float16",))
    yield from _flat("Not", ("bool",))
    yield from _flat("BitwiseNot", ("int8", "int32", "uint64"))
    limits = _drawn(lambda d: [d.flat(), np.asarray(0, d.dtype), np.asarray(1, d.dtype)])
    yield Example("Clip", limits, dtypes=(*_TYPES, "float16"))
    yield Example("Clip", lambda d: [d.flat()], opset=6, attributes={"min": -0.5, "max": 0.5})
    for source, target in _CASTS:
        yield Example("Cast", lambda d: [d.positive(d.n)], opset=19, dtypes=(source,), attributes={"to": target})


_CASTS = (
    ("float32", TensorProto.INT32),
    ("float32", TensorProto.UINT32),
    ("int32", TensorProto.FLOAT),
    ("uint32", TensorProto.FLOAT),
    ("int32", TensorProto.UINT32),
    ("float64", TensorProto.INT64),
    ("int64", TensorProto.DOUBLE),
    ("uint64", TensorProto.INT64),
    ("float16", TensorProto.INT16),
    ("int16", TensorProto.FLOAT16),
    ("uint8", TensorProto.BOOL),
    ("int8", TensorProto.UINT8),
)


def _binary() -> Iterator[Example]:
    yield from _flat("Add Div Mul Sub", _TYPES, 2)
    yield from _flat("Pow", _FLOATS, 2)
    yield from _flat("PRelu", inputs=2)
    yield from _flat("And Or Xor", ("bool",), 2)
    yield from _flat("BitwiseAnd BitwiseOr BitwiseXor", ("int8", "uint32"), 2)
    yield from _flat("Greater GreaterOrEqual Less LessOrEqual", ("int8", "uint8"), 2)
    yield from _flat("Equal", ("bool", "int8", "uint8"), 2)
    two = _drawn(lambda d: [d.real(d.n), d.positive(d.n)])
    yield Example("Mod", two, dtypes=_TYPES[2:])
    yield Example("Mod", two, dtypes=(*_FLOATS, "float16"), attributes={"fmod": 1})
    yield Example("Pow", two, dtypes=("int32", "int64"))
    for exponent in (0.5, 2, 3):
        yield Example("Pow", lambda d, e=exponent: [d.positive(d.n), np.array([e], d.dtype)], dtypes=_FLOATS)
    yield Example("Pow", lambda d: [d.positive(d.n), d.positive(d.n).astype(np.int32)])
    for direction in ("LEFT", "RIGHT"):
        shift = {"direction": direction}
        yield Example("BitShift", two, dtypes=("uint8", "uint32", "uint64"), attributes=shift)
    yield from _broadcasts("Add Div Mul Sub Mod Pow Max Mean Min PRelu Sum")
    yield from _broadcasts("And", "bool")


def _broadcasts(names: str, dtype: str = "float32") -> Iterator[Example]:
    for name in names.split():
        attributes = {"fmod": 1} if name == "Mod" else {}
        for shape in ((1,), (17,), (1, 17), (5, 1, 1)):
            for first in (True,) if name == "PRelu" else (True, False):  # PRelu's slope may not be the larger
                draw = _large_and_small(shape, first)
                yield Example(name, draw, dtypes=(dtype,), attributes=attributes, sizes=(85, 50_021))


def _large_and_small(shape: tuple[int, ...], first: bool) -> Callable[[Draw], Arrays]:
    def draw(d: Draw) -> Arrays:
        large, small = d.real(5, max(1, d.n // 85), 17), d.real(*shape)
        return [large, small] if first else [small, large]

    return draw


def _variadic() -> Iterator[Example]:
    for name in ("Max", "Mean", "Min", "Sum"):
        for opset in (8, 13):
            for inputs in (1, 2, 3, 5):
                yield from _flat(name, inputs=inputs, opset=opset)
        yield Example(name, lambda d: [d.rows(17), d.real(17), d.rows(17)], sizes=_SMALL)
        yield Example(name, lambda d: [d.real(17), d.rows(17), d.rows(17)], sizes=_SMALL)
    yield from _flat("Max Min", ("float64", "int32", "float16"), 3)
    choice = _drawn(lambda d: [d.flags(d.n), d.flat(), d.flat()])
    yield Example("Where", choice, dtypes=_TYPES)
    yield Example("Where", lambda d: [d.flags(17), d.rows(17), d.real(1)], dtypes=_TYPES, sizes=_SMALL)
    yield Example("Where", lambda d: [d.flags(max(1, d.n // 17), 1), d.real(17), d.rows(17)], sizes=_SMALL)


def _rowwise() -> Iterator[Example]:
    for opset in (9, 11, 13):
        for axis in (0, 1, 2):
            yield Example("Softmax", lambda d: [d.cube()], opset=opset, dtypes=_FLOATS, attributes={"axis": axis})
            yield Example("LogSoftmax", lambda d: [d.cube()], opset=opset, attributes={"axis": axis})
    for width in (1, 5, 16, 1031):
        row = _drawn(lambda d, w=width: [d.rows(w)])
        scale = _drawn(lambda d, w=width: [d.rows(w), d.real(w)])
        shift = _drawn(lambda d, w=width: [d.rows(w), d.real(w), d.real(w)])
        yield Example("Softmax", row, dtypes=_FLOATS)
        yield Example("LogSoftmax", row)
        yield Example("LayerNormalization", shift, dtypes=(*_FLOATS, "float16"))
        yield Example("LayerNormalization", shift, outputs=(0, 1, 2))
        yield Example("RMSNormalization", scale, opset=23, dtypes=(*_FLOATS, "float16"))
        yield Example("SimplifiedLayerNormalization", scale, dtypes=(*_FLOATS, "float16"))
        yield Example("BiasGelu", scale, MS)
        yield Example("FastGelu", scale, MS)
        yield from _skips(width)
    for axis in (0, 1, 2):
        yield Example("LayerNormalization", lambda d: [d.cube(), d.real(1)], attributes={"axis": axis})
        for p in (1, 2):
            settings = {"axis": axis, "p": p}
            yield Example("LpNormalization", lambda d: [d.cube()], dtypes=_FLOATS, attributes=settings, sizes=_SMALL)


def _skips(width: int) -> Iterator[Example]:
    def draw(d: Draw) -> Arrays:
        return [d.tokens(width), d.tokens(width), d.real(width), d.real(width)]

    for name in ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"):
        yield Example(name, draw, MS, outputs=(0, 3))
        yield Example(name, draw, MS, dtypes=("float16",))


def _images() -> Iterator[Example]:
    def statistics(channels: int) -> Callable[[Draw], Arrays]:
        return lambda d: [d.image(channels), *(d.real(channels) for _ in range(3)), d.positive(channels)]

    for channels in (1, 3, 16):
        image = _drawn(lambda d, c=channels: [d.image(c)])
        yield Example("InstanceNormalization", lambda d, c=channels: [d.image(c), d.real(c), d.real(c)])
        yield Example("MeanVarianceNormalization", image)
        yield Example("MeanVarianceNormalization", image, attributes={"axes": [1]})
        for size in (1, 5):
            yield Example("LRN", image, attributes={"size": size})
        for opset in (7, 9, 14, 15):
            yield Example("BatchNormalization", statistics(channels), opset=opset, dtypes=_FLOATS)


def _indexed() -> Iterator[Example]:
    for name, opset in (("CumSum", 14), ("CumProd", 26)):
        for axis in (0, 1, 2):
            for reverse in (0, 1):
                draw = _drawn(lambda d, a=axis: [d.cube(), np.array(a)])
                settings = {"reverse": reverse}
                yield Example(name, draw, opset=opset, dtypes=(*_FLOATS, "int32"), attributes=settings, sizes=_SMALL)
    rows = _drawn(lambda d: [d.rows(17), np.zeros((1, 17), np.int64), d.real(1, 17)])
    slices = _drawn(lambda d: [d.rows(17), _int64(0).reshape(1, 1), d.real(1, 17)])
    yield Example("Scatter", rows, opset=9)
    for reduction in ("none", "add", "mul", "max", "min"):
        settings = {"reduction": reduction}
        yield Example("ScatterElements", rows, opset=18, dtypes=_TYPES, attributes=settings, sizes=_SMALL)
        yield Example("ScatterND", slices, opset=18, dtypes=_FLOATS, attributes=settings, sizes=_SMALL)
    cache = _drawn(lambda d: [d.real(2, max(2, d.n // 34), 17), d.real(2, 2, 17), _int64(0, 0)])
    for mode in ("linear", "circular"):
        yield Example("TensorScatter", cache, opset=24, attributes={"mode": mode})
    for upper in (0, 1):
        corner = _drawn(lambda d: [d.real(2, max(1, d.n // 40), 20), np.array(-1)])
        yield Example("Trilu", corner, dtypes=(*_FLOATS, "int64", "bool"), attributes={"upper": upper})
        yield Example("Trilu", corner, MS, attributes={"upper": upper})


def _sums() -> Iterator[Example]:
    """Products and convolutions that are accumulated onto an addend."""
    for m in (1, 5, 64, 300):
        for transposed in (0, 1):
            factors = _drawn(
                lambda d, m=m, t=transposed: [d.real(m, 33), d.real(*((m, 33) if t else (33, m))), d.real(m, m)]
            )
            settings = {"transB": transposed, "beta": 0.5}
            yield Example("Gemm", factors, dtypes=_FLOATS, attributes=settings, sizes=(1,))
            yield Example("FusedGemm", factors, MS, attributes={**settings, "activation": "Relu"}, sizes=(1,))
        yield Example("Gemm", lambda d, m=m: [d.real(m, 33), d.real(33, m), d.real(m, m)], constants=(1,), sizes=(1,))
        yield Example("Gemm", lambda d, m=m: [d.real(1, 33), d.real(33, m), d.real(m)], sizes=(1,))
    for channels, group, kernel in ((16, 1, 1), (64, 1, 1), (32, 1, 3), (32, 32, 3), (64, 2, 3)):
        for side in (1, 7, 28, 56):
            for name, domain in (("FusedConv", MS), ("Conv", NCHWC)):
                for settings in ({}, {"activation": "Relu"}, {"activation": "Sigmoid"}):
                    yield _convolution(name, domain, channels, group, kernel, side, settings)


def _convolution(
    name: str, domain: str, channels: int, group: int, kernel: int, side: int, settings: dict[str, object]
) -> Example:
    def draw(d: Draw) -> Arrays:
        image = (2, channels, side, side)
        return [
            d.real(*image),
            d.real(channels, channels // group, kernel, kernel),
            d.real(channels),
            d.real(*image),
        ]

    attributes = {"kernel_shape": [kernel] * 2, "pads": [kernel // 2] * 4, "group": group, **settings}
    return Example(name, draw, domain, constants=(1, 2), attributes=attributes, sizes=(1,))


def _quantized() -> Iterator[Example]:
    def scales(d: Draw, value: float) -> list[np.ndarray]:
        return [np.array(value, np.float32), np.array(3, d.dtype)]

    def two(d: Draw) -> Arrays:
        return [d.flat(), *scales(d, 0.1), d.flat(), *scales(d, 0.2), *scales(d, 0.3)]

    types = ("uint8", "int8")
    yield Example("QLinearAdd", two, MS, dtypes=types)
    yield Example("QLinearMul", two, MS, dtypes=types)
    for name in ("QLinearLeakyRelu", "QLinearSigmoid"):
        yield Example(name, lambda d: [d.flat(), *scales(d, 0.1), *scales(d, 0.02)], MS, dtypes=types)
    yield Example("QLinearWhere", lambda d: [d.flags(d.n), *two(d)], MS, dtypes=types)
    for axis in (0, 1, 2):
        settings = {"axis": axis, "opset": 13}
        probability = _drawn(lambda d: [d.cube(), *scales(d, 0.1), np.array(1 / 256, np.float32), np.array(0, d.dtype)])
        yield Example("QLinearSoftmax", probability, MS, dtypes=types[:1], constants=(1, 2, 3, 4), attributes=settings)
    rows = _drawn(lambda d: [d.rows(16)])
    yield Example("Binarizer", rows, ML, attributes={"threshold": 0.5})
    yield Example("Imputer", rows, ML, attributes={"imputed_value_floats": [0.5], "replaced_value_float": 0.0})
    for width in (1, 16):
        yield Example("Scaler", rows, ML, attributes={"offset": [0.5] * width, "scale": [2.0] * width})


def _views() -> Iterator[Example]:
    yield from _flat("Identity", (*_TYPES, "bool", "float16"))
    yield Example("Reshape", lambda d: [d.flat(), _int64(1, -1)])
    yield Example("Flatten", lambda d: [d.cube()])
    yield Example("Squeeze", lambda d: [d.real(1, d.n, 1), _int64(0)])
    yield Example("Squeeze", lambda d: [d.real(1, d.n, 1)])
    yield Example("Unsqueeze", lambda d: [d.flat(), _int64(0)])
    yield Example("ExpandDims", lambda d: [d.flat(), np.array([0], np.int32)], MS, constants=(1,))
    yield Example("BitCast", lambda d: [d.flat()], opset=26, attributes={"to": TensorProto.INT32})
    yield Example("Expand", lambda d: [d.flat(), _int64(1, 1)])
    yield Example("Tile", lambda d: [d.flat(), _int64(1)])
    yield Example("Cast", lambda d: [d.flat()], attributes={"to": TensorProto.FLOAT})
    yield Example("Concat", lambda d: [d.flat()], attributes={"axis": 0})
    yield Example("Dropout", lambda d: [d.flat()], opset=7)
    yield Example("Dropout", lambda d: [d.flat()], opset=10)
    yield Example("Dropout", lambda d: [d.flat()], opset=13, dtypes=_FLOATS, outputs=(0, 1))
    off = _drawn(lambda d: [d.flat(), np.array(0.5, np.float32), np.array(False)])
    yield Example("Dropout", off, opset=22, constants=(1, 2))
    yield Example("Transpose", lambda d: [d.real(1, d.n, 1, 3)], attributes={"perm": [1, 3, 0, 2]})
    yield Example("Transpose", lambda d: [d.real(1, d.n)])


EXAMPLES: tuple[Example, ...] = (
    *_unary(),
    *_binary(),
    *_variadic(),
    *_rowwise(),
    *_images(),
    *_indexed(),
    *_sums(),
    *_quantized(),
    *_views(),
)
"""Each holds every pair the lists give for its node."""


def _window(name: str, *weights: int) -> Example:
    settings = {"pads": [1] * 4, "kernel_shape": [3, 3]}
    image = _drawn(lambda d: [d.real(1, 16, 28, 28), *([d.real(*weights)] if weights else [])])
    return Example(name, image, attributes=settings)


_CUBE = _drawn(lambda d: [d.cube(), np.array(1)])
_FACTORS = _drawn(lambda d: [d.real(512, 512), d.real(512, 512)])
_BACKWARDS = _drawn(lambda d: [d.flat(), _int64(-1), _int64(-(2**62)), _int64(0), _int64(-1)])

CORRUPTED: tuple[tuple[Example, Pair], ...] = (
    (_window("AveragePool"), (0, 0)),
    (Example("CumProd", _CUBE, opset=26, attributes={"exclusive": 1}), (0, 0)),
    (Example("CumSum", _CUBE, opset=14, attributes={"exclusive": 1}), (0, 0)),
    (_window("Conv", 16, 16, 3, 3), (0, 0)),
    (Example("DepthToSpace", lambda d: [d.real(1, 16, 9, 9)], attributes={"blocksize": 2}), (0, 0)),
    (Example("FastGelu", lambda d: [d.flat()], MS), (0, 0)),
    (Example("FusedMatMul", _FACTORS, MS), (0, 0)),
    (Example("Gather", lambda d: [d.real(9, 7), np.arange(9)[::-1].copy()]), (0, 0)),
    (Example("Gelu", lambda d: [d.flat()], opset=20, attributes={"approximate": "tanh"}), (0, 0)),
    (Example("Gemm", _FACTORS), (0, 0)),
    (Example("Hardmax", lambda d: [d.cube()]), (0, 0)),
    (Example("LogSoftmax", lambda d: [d.cube()], dtypes=("float64",)), (0, 0)),
    (Example("MatMul", _FACTORS), (0, 0)),
    (Example("MatMul", _FACTORS), (1, 0)),
    (_window("MaxPool"), (0, 0)),
    (Example("Mean", lambda d: [d.flat()] * 3, opset=6), (2, 0)),
    (Example("Normalizer", lambda d: [d.rows(16)], ML, attributes={"norm": "L2"}), (0, 0)),
    (Example("QuickGelu", lambda d: [d.flat()], MS), (0, 0)),
    (Example("ReverseSequence", lambda d: [d.real(9, 5, 7), _int64(9, 9, 9, 9, 9)]), (0, 0)),
    (Example("Slice", _BACKWARDS), (0, 0)),
    (Example("SpaceToDepth", lambda d: [d.real(1, 4, 18, 18)], attributes={"blocksize": 2}), (0, 0)),
    (Example("Sum", lambda d: [d.flat()] * 3, opset=6), (2, 0)),
    (Example("Transpose", lambda d: [d.real(64, 64)]), (0, 0)),
)
"""(example, pair) that give wrong results at a shared address."""
