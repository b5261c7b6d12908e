"""One-node examples of operators: those that memonger's training models are made of, and many around them.

`EXAMPLES` holds one for each way an operator's kernel is chosen (dimensions, pads, reductions), with the element types
its main input is tried in. Shapes are small: what is asked is where a node runs, not how fast.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Arrays = Sequence[np.ndarray | None]

OPSET = 20  # memonger's training models are written at it
MS = "com.microsoft"
TYPES = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f64": np.dtype(np.float64),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "u32": np.dtype(np.uint32),
    "u64": np.dtype(np.uint64),
    "i8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8),
    "bool": np.dtype(np.bool_),
}
FLOATS = ("f32", "f16", "bf16", "f64")
INTEGERS = ("i32", "i64", "u32", "u64", "i8", "u8")
NUMBERS = FLOATS + INTEGERS
ALL = (*NUMBERS, "bool")


class Draw:
    """Seeded values of one element type."""

    def __init__(self, dtype: np.dtype) -> None:
        self.dtype, self._random = dtype, np.random.default_rng(7)

    def __call__(self, *shape: int) -> np.ndarray:
        """Values in (0.1, 1.1) of a floating type, else from 1 to 6: good for a logarithm, a divisor or a shift."""
        if self.dtype == np.bool_:
            return self._random.random(shape) < 0.5
        if self.dtype.kind in "iu":
            return self._random.integers(1, 7, size=shape).astype(self.dtype)
        return (self._random.random(shape) + 0.1).astype(self.dtype)

    def flags(self, *shape: int) -> np.ndarray:
        return self._random.random(shape) < 0.5


@dataclass(frozen=True, slots=True)
class Example:
    """One node. `inputs` draws them from a `Draw` of the element type; `constants` are indices of initializers."""

    op: str
    inputs: Callable[[Draw], Arrays]
    types: tuple[str, ...] = FLOATS
    note: str = ""
    attributes: Mapping[str, object] = field(default_factory=dict)
    opset: int = OPSET
    domain: str = ""
    outputs: int = 1
    constants: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """As it stands in the table: ``ConvTranspose 3-D``."""
        return f"{self.domain + '.' if self.domain else ''}{self.op}{' ' + self.note if self.note else ''}"

    def arrays(self, dtype: str) -> list[np.ndarray | None]:
        return list(self.inputs(Draw(TYPES[dtype])))

    def feeds(self, arrays: Arrays) -> dict[str, np.ndarray]:
        return {f"i{i}": a for i, a in enumerate(arrays) if a is not None and i not in self.constants}

    def model(self, arrays: Arrays, opset: int | None = None) -> onnx.ModelProto:
        """The node alone, named ``node``; every output is a graph output."""
        outputs = [f"o{i}" for i in range(self.outputs)]
        names = ["" if array is None else f"i{i}" for i, array in enumerate(arrays)]
        node = helper.make_node(self.op, names, outputs, name="node", domain=self.domain, **self.attributes)
        feeds = self.feeds(arrays).items()
        graph = helper.make_graph(
            [node],
            "example",
            [helper.make_tensor_value_info(name, element_type(a), a.shape) for name, a in feeds],
            [onnx.ValueInfoProto(name=name) for name in outputs],
            [numpy_helper.from_array(a, f"i{i}") for i, a in enumerate(arrays) if i in self.constants],
        )
        opsets = [helper.make_opsetid("", opset or self.opset), helper.make_opsetid(MS, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def element_type(array: np.ndarray) -> int:
    """The ONNX number of an array's type."""
    return int(helper.np_dtype_to_tensor_dtype(array.dtype))


def _int64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def _drawn(inputs: Callable[[Draw], Arrays]) -> Callable[[Draw], Arrays]:
    """The function itself: a name and a type for what several examples draw."""
    return inputs


_ONE, _TWO = _drawn(lambda d: [d(4, 6)]), _drawn(lambda d: [d(4, 6), d(4, 6)])
_CUBE, _IMAGE = _drawn(lambda d: [d(2, 3, 4)]), _drawn(lambda d: [d(2, 4, 8, 8)])


_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Max", "Min", "Sum", "Mean")
_COMPARISONS = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
_ACTIVATIONS = "Celu Elu Erf Gelu HardSigmoid HardSwish LeakyRelu Mish Relu Selu Shrink Sigmoid Softplus Softsign"
_FUNCTIONS = "Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Exp Floor IsInf IsNaN Log Reciprocal Round Sin Sinh Sqrt"
_UNARY = (*_ACTIVATIONS.split(), *_FUNCTIONS.split(), "Tan", "Tanh", "ThresholdedRelu")


def _elementwise() -> Iterator[Example]:
    for name in _ARITHMETIC + _COMPARISONS:
        yield Example(name, _TWO, INTEGERS if name == "Mod" else NUMBERS)
    yield Example("Mod", _TWO, FLOATS, "fmod", {"fmod": 1})
    yield Example("Equal", _TWO, ("bool",), "of bool")
    for name in ["And", "Or", "Xor"]:
        yield Example(name, _TWO, ("bool",))
    yield Example("Not", _ONE, ("bool",))
    for direction in ("LEFT", "RIGHT"):
        yield Example("BitShift", _TWO, ("u8", "u32", "u64"), direction.lower(), {"direction": direction})
    for name in ["BitwiseAnd", "BitwiseOr", "BitwiseXor"]:
        yield Example(name, _TWO, INTEGERS)
    yield Example("BitwiseNot", _ONE, INTEGERS)
    yield Example("Where", lambda d: [d.flags(4, 6), d(4, 6), d(4, 6)], ALL)
    yield Example("Clip", lambda d: [d(4, 6), d(), d()], NUMBERS)
    yield Example("Clip", lambda d: [d(4, 6), d(), d()], ("f32", "f16"), "constant limits", constants=(1, 2))
    yield Example("PRelu", _TWO)
    for name in ["Abs", "Neg", "Sign"]:
        yield Example(name, _ONE, NUMBERS)
    for name in _UNARY:
        yield Example(name, _ONE)
    yield Example("Gelu", _ONE, FLOATS, "tanh", {"approximate": "tanh"})
    yield Example("Relu", _ONE, ("i32", "i8"), "of integers")
    yield Example("Swish", _ONE, FLOATS, opset=24)
    for to in ("FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE", "INT64", "UINT32", "BOOL"):
        yield Example("Cast", _ONE, ALL, f"to {to.lower()}", {"to": getattr(TensorProto, to)})
    yield Example("CastLike", _TWO, FLOATS)


def _reductions() -> Iterator[Example]:
    for name in ["Sum", "Mean", "Max", "Min", "Prod", "SumSquare", "L1", "L2", "LogSum", "LogSumExp"]:
        yield Example(f"Reduce{name}", lambda d: [d(2, 3, 4), _int64(1)], (*FLOATS, "i32", "i64"), constants=(1,))
    yield Example("ReduceSum", lambda d: [d(2, 3, 4), _int64(1)], ("f32", "i64"), "axes not constant")
    yield Example("ReduceMax", lambda d: [d(2, 3, 4), _int64(1)], ("u8", "i8", "bool"), "narrow", constants=(1,))
    for name in ("ArgMax", "ArgMin"):
        yield Example(name, _CUBE, (*FLOATS, "i32", "i64"), attributes={"axis": 1})
    for note, settings in (("", {}), ("reverse", {"reverse": 1}), ("exclusive", {"exclusive": 1})):
        yield Example("CumSum", lambda d: [d(4, 6), np.array(1)], (*FLOATS, "i32", "i64"), note, settings)
    yield Example("CumProd", lambda d: [d(4, 6), np.array(1)], FLOATS, opset=26)
    for name in ("Softmax", "LogSoftmax", "Hardmax", "LpNormalization"):
        yield Example(name, _CUBE)
    yield Example("TopK", lambda d: [d(4, 6), _int64(2)], (*FLOATS, "i32", "i64"), outputs=2)
    yield Example("TopK", lambda d: [d(4, 6), _int64(2)], ("f32", "f16"), "constant k", outputs=2, constants=(1,))
    yield Example("Einsum", lambda d: [d(4, 6), d(6, 3)], FLOATS, "ij,jk->ik", {"equation": "ij,jk->ik"})
    yield Example("Einsum", lambda d: [d(2, 3, 4), d(2, 5, 4)], ("f32",), "bij,bkj->bik", {"equation": "bij,bkj->bik"})


def _movement() -> Iterator[Example]:
    yield Example("Identity", _ONE, ALL)
    yield Example("Reshape", lambda d: [d(4, 6), _int64(3, 8)], ALL)
    yield Example("Reshape", lambda d: [d(4, 6), _int64(3, 8)], ("f32",), "constant shape", constants=(1,))
    yield Example("Flatten", _CUBE, ALL)
    yield Example("Squeeze", lambda d: [d(4, 1, 6), _int64(1)], ALL)
    yield Example("Unsqueeze", lambda d: [d(4, 6), _int64(0)], ALL)
    yield Example("Transpose", _CUBE, ALL, attributes={"perm": [2, 0, 1]})
    yield Example("Concat", _TWO, ALL, attributes={"axis": 1})
    yield Example("Split", lambda d: [d(4, 6), _int64(2, 4)], ALL, attributes={"axis": 1}, outputs=2)
    yield Example("Slice", lambda d: [d(4, 6), _int64(1), _int64(3), _int64(0)], ALL, constants=(1, 2, 3))
    backwards = _drawn(lambda d: [d(4, 6), _int64(-1), _int64(-(2**62)), _int64(1), _int64(-2)])
    yield Example("Slice", backwards, ("f32", "f16", "i64"), "steps -2", constants=(1, 2, 3, 4))
    yield Example("Slice", lambda d: [d(4, 6), _int64(1), _int64(3), _int64(0)], ("f32",), "starts not constant")
    for mode in ("constant", "reflect", "edge", "wrap"):
        pads = _drawn(lambda d: [d(4, 6), _int64(1, 1, 1, 1)])
        yield Example("Pad", pads, ALL if mode == "constant" else FLOATS, mode, {"mode": mode}, constants=(1,))
    yield Example("Pad", lambda d: [d(4, 6), _int64(-1, 0, 0, -1)], ("f32",), "negative", constants=(1,))
    yield Example("Expand", lambda d: [d(1, 6), _int64(4, 6)], ALL)
    yield Example("Tile", lambda d: [d(4, 6), _int64(2, 1)], ALL)
    yield Example("DepthToSpace", _IMAGE, (*FLOATS, "u8"), attributes={"blocksize": 2})
    yield Example("SpaceToDepth", _IMAGE, (*FLOATS, "u8"), attributes={"blocksize": 2})
    yield Example("ReverseSequence", lambda d: [d(3, 2, 4), _int64(2, 3)], ALL)
    for upper in (0, 1):
        note = "upper" if upper else "lower"
        yield Example("Trilu", lambda d: [d(4, 6), np.array(0)], (*FLOATS, "i64", "bool"), note, {"upper": upper})
    yield Example("Col2Im", lambda d: [d(1, 20, 9), _int64(4, 4), _int64(2, 2)], FLOATS, constants=(1, 2))
    for mode in ("nearest", "linear", "cubic"):
        scales = _drawn(lambda d: [d(2, 4, 8, 8), None, np.array([1, 1, 2, 2], np.float32)])
        yield Example("Resize", scales, (*FLOATS, "u8"), mode, {"mode": mode}, constants=(2,))
    yield Example("Upsample", lambda d: [d(2, 4, 8, 8), np.array([1, 1, 2, 2], np.float32)], opset=9, constants=(1,))


def _indexing() -> Iterator[Example]:
    rows, cells = np.array([[0, 2], [1, 0]]), _int64(1, 0, 1).reshape(3, 1)
    yield Example("Gather", lambda d: [d(4, 6), rows], ALL)
    yield Example("GatherElements", lambda d: [d(4, 6), rows], ALL, attributes={"axis": 1})
    yield Example("GatherElements", lambda d: [d(4, 6), rows.astype(np.int32)], ("f32",), "int32 indices", {"axis": 1})
    yield Example("GatherND", lambda d: [d(4, 6), cells], ALL)
    for reduction in ("none", "add", "mul", "max", "min"):
        types, settings = ALL if reduction in ("none", "add") else FLOATS, {"reduction": reduction}
        yield Example("ScatterElements", lambda d: [d(4, 6), rows, d(2, 2)], types, reduction, settings)
        yield Example("ScatterND", lambda d: [d(4, 6), cells, d(3, 6)], types, reduction, settings)
    one_hot = _drawn(lambda d: [_int64(0, 2, 1), _int64(4), d(2)])
    yield Example("OneHot", one_hot, (*FLOATS, "i64"))
    yield Example("OneHot", one_hot, ("f32", "f16"), "constant depth", constants=(1,))
    yield Example("Compress", lambda d: [d(4, 6), d.flags(4)], ALL, attributes={"axis": 0})
    yield Example("NonZero", _ONE, ALL)
    yield Example("Unique", lambda d: [d(6)], ("f32", "i64"), outputs=4)
    yield Example("Shape", _ONE, ALL)
    yield Example("Size", _ONE, ALL)
    yield Example("ConstantOfShape", lambda d: [_int64(4, 6)], ("i64",))
    yield Example("ConstantOfShape", lambda d: [_int64(4, 6)], ("i64",), "constant shape", constants=(0,))
    yield Example("Range", lambda d: [np.array(0, d.dtype), np.array(5, d.dtype), np.array(1, d.dtype)], FLOATS[:1])
    yield Example("Range", lambda d: [np.array(0), np.array(5), np.array(1)], ("i64",), "of int64")
    yield Example("EyeLike", _ONE, ("f32", "f16", "i64"))
    yield Example("TensorScatter", lambda d: [d(2, 4, 6), d(2, 1, 6), _int64(0, 1)], opset=24)


def _conv(note: str, x: tuple[int, ...], w: tuple[int, ...], types: tuple[str, ...], **settings: object) -> Example:
    return Example("Conv", lambda d: [d(*x), d(*w)], types, note, settings)


def _up(note: str, x: tuple[int, ...], w: tuple[int, ...], types: tuple[str, ...], **settings: object) -> Example:
    return Example("ConvTranspose", lambda d: [d(*x), d(*w)], types, note, settings)


def _convolutions() -> Iterator[Example]:
    x, w, f = (2, 4, 8, 8), (4, 4, 3, 3), ("f32", "f16", "bf16")
    yield _conv("1-D", (2, 4, 8), (4, 4, 3), FLOATS, pads=[1, 1])
    yield _conv("2-D", x, w, FLOATS, pads=[1, 1, 1, 1])
    yield _conv("2-D strided", x, w, f, pads=[1, 1, 1, 1], strides=[2, 2])
    yield _conv("2-D dilated", x, w, f, pads=[2, 2, 2, 2], dilations=[2, 2])
    yield _conv("2-D depthwise", x, (4, 1, 3, 3), f, pads=[1, 1, 1, 1], group=4)
    yield _conv("2-D asymmetric pads", x, w, f, pads=[0, 0, 1, 1])
    yield _conv("2-D SAME_UPPER", x, w, f, auto_pad="SAME_UPPER")
    yield _conv("3-D", (2, 4, 8, 8, 8), (4, 4, 3, 3, 3), FLOATS, pads=[1] * 6)
    yield _conv("3-D weight gradient", (1, 2, 4, 8, 8), (4, 2, 1, 8, 8), FLOATS, pads=[0, 1, 1, 0, 1, 1])
    yield _conv("3-D weight gradient dilated", (1, 2, 4, 9, 9), (4, 2, 1, 4, 4), f, dilations=[1, 2, 2])
    yield _up("1-D", (2, 4, 8), (4, 4, 3), FLOATS, pads=[1, 1])
    yield _up("2-D", x, w, FLOATS, pads=[1, 1, 1, 1])
    yield _up("2-D strided", x, w, f, pads=[1, 1, 1, 1], strides=[2, 2])
    yield _up("2-D output_padding", x, w, f, pads=[1, 1, 1, 1], strides=[2, 2], output_padding=[1, 1])
    yield _up("2-D dilated", x, w, f, dilations=[2, 2])
    yield _up("2-D depthwise", x, (4, 1, 3, 3), f, pads=[1, 1, 1, 1], group=4)
    yield _up("2-D asymmetric pads", x, w, f, pads=[0, 0, 1, 1])
    yield _up("2-D asymmetric pads, strided", x, w, f, pads=[0, 0, 1, 1], strides=[2, 2])
    yield _up("2-D output_shape", x, w, f, strides=[2, 2], output_shape=[16, 16])
    yield _up("2-D SAME_UPPER", x, w, f, strides=[2, 2], auto_pad="SAME_UPPER")
    yield _up("2-D 1x1 strided", x, (4, 4, 1, 1), f, strides=[2, 2])
    yield _up("2-D 1x1 strided, output_padding", x, (4, 4, 1, 1), f, strides=[2, 2], output_padding=[1, 1])
    yield _up("3-D", (2, 4, 8, 8, 8), (4, 4, 3, 3, 3), FLOATS, pads=[1] * 6)
    yield _up("3-D output_padding", (2, 4, 4, 4, 4), (4, 4, 3, 3, 3), f, strides=[2] * 3, output_padding=[1] * 3)
    yield Example("DeformConv", lambda d: [d(1, 4, 8, 8), d(4, 4, 3, 3), d(1, 18, 6, 6)], f)


def _pools() -> Iterator[Example]:
    shapes = {"1-D": (2, 4, 8), "2-D": (2, 4, 8, 8), "3-D": (2, 4, 8, 8, 8)}
    for note, shape in shapes.items():
        kernel, draw = [3] * (len(shape) - 2), _drawn(lambda d, s=shape: [d(*s)])
        for name in ("MaxPool", "AveragePool", "LpPool"):
            yield Example(name, draw, FLOATS, note, {"kernel_shape": kernel, "strides": [2] * len(kernel)})
        settings = {"kernel_shape": kernel, "pads": [1] * 2 * len(kernel)}
        yield Example("MaxPool", draw, FLOATS, f"{note} with indices", settings, outputs=2)
        yield Example("AveragePool", draw, FLOATS, f"{note} padded", {**settings, "count_include_pad": 1})
    ceil = {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}
    yield Example("MaxPool", _IMAGE, FLOATS, "ceil_mode", ceil)
    yield Example("MaxPool", _IMAGE, ("f32", "f16"), "ceil_mode, with indices", ceil, outputs=2)
    yield Example("AveragePool", _IMAGE, FLOATS, "ceil_mode", ceil)
    yield Example("MaxPool", _IMAGE, FLOATS, "dilated", {"kernel_shape": [3, 3], "dilations": [2, 2]})
    yield Example("AveragePool", _IMAGE, FLOATS, "dilated", {"kernel_shape": [3, 3], "dilations": [2, 2]})
    yield Example("MaxPool", _IMAGE, ("f32",), "asymmetric pads", {"kernel_shape": [3, 3], "pads": [0, 0, 1, 1]})
    yield Example("AveragePool", _IMAGE, ("f32",), "asymmetric pads", {"kernel_shape": [3, 3], "pads": [0, 0, 1, 1]})
    unpool = _drawn(lambda d: [d(1, 1, 2, 2), _int64(0, 2, 8, 10).reshape(1, 1, 2, 2)])
    yield Example("MaxUnpool", unpool, ("f32", "f16"), attributes={"kernel_shape": [2, 2], "strides": [2, 2]})
    for name in ("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"):
        yield Example(name, _IMAGE)
    boxes = np.array([[0, 0, 4, 4]], np.float32)
    yield Example("RoiAlign", lambda d: [d(1, 4, 8, 8), boxes.astype(d.dtype), _int64(0)], ("f32", "f16", "f64"))
    yield Example("GridSample", lambda d: [d(1, 4, 8, 8), d(1, 4, 4, 2)], ("f32", "f16"))


def _normalizations() -> Iterator[Example]:
    statistics = _drawn(lambda d: [d(2, 4, 8, 8), d(4), d(4), d(4), d(4)])
    yield Example("BatchNormalization", statistics, FLOATS)
    for opset in (14, 15):
        training = {"training_mode": 1}
        yield Example("BatchNormalization", statistics, FLOATS, f"training, opset {opset}", training, opset, outputs=3)
    affine = _drawn(lambda d: [d(2, 4, 8), d(8), d(8)])
    yield Example("LayerNormalization", affine)
    yield Example("LayerNormalization", affine, FLOATS, "with mean", outputs=3)
    yield Example("RMSNormalization", lambda d: [d(2, 4, 8), d(8)], opset=23)
    yield Example("InstanceNormalization", lambda d: [d(2, 4, 8, 8), d(4), d(4)])
    yield Example("GroupNormalization", lambda d: [d(2, 4, 8, 8), d(4), d(4)], attributes={"num_groups": 2}, opset=21)
    yield Example("MeanVarianceNormalization", _IMAGE)
    yield Example("LRN", _IMAGE, attributes={"size": 3})


def _products() -> Iterator[Example]:
    yield Example("MatMul", lambda d: [d(4, 6), d(6, 3)], (*FLOATS, "i32", "i64", "u32"))
    yield Example("MatMul", lambda d: [d(2, 4, 6), d(2, 6, 3)], FLOATS, "batched")
    for a in (0, 1):
        for b in (0, 1):
            shapes = (6, 4) if a else (4, 6), (3, 6) if b else (6, 3)
            draw = _drawn(lambda d, s=shapes: [d(*s[0]), d(*s[1]), d(3)])
            yield Example("Gemm", draw, FLOATS, f"transA={a} transB={b}", {"transA": a, "transB": b})
    yield Example("Gemm", lambda d: [d(4, 6), d(6, 3)], FLOATS, "no addend")
    yield Example("Gemm", lambda d: [d(4, 6), d(6, 3), d(4, 3)], FLOATS, "full addend", {"beta": 0.5})
    yield Example("Attention", lambda d: [d(1, 2, 4, 8), d(1, 2, 4, 8), d(1, 2, 4, 8)], FLOATS[:3], opset=23)
    yield Example("RotaryEmbedding", lambda d: [d(1, 2, 4, 8), d(1, 4, 4), d(1, 4, 4)], FLOATS[:3], opset=23)


def _recurrent() -> Iterator[Example]:
    for name, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1)):
        for direction, d_ in (("forward", 1), ("bidirectional", 2)):
            draw = _drawn(
                lambda d, g=gates, k=d_: [d(5, 2, 3), d(k, g * 4, 3), d(k, g * 4, 4), d(k, 2 * g * 4)],
            )
            settings = {"hidden_size": 4, "direction": direction}
            yield Example(name, draw, ("f32", "f16", "f64"), direction, settings, outputs=2, constants=(1, 2, 3))
            yield Example(name, draw, ("f32",), f"{direction}, weights not constant", settings, outputs=2)


def _random() -> Iterator[Example]:
    off = _drawn(lambda d: [d(4, 6), np.array(0.5, np.float32), np.array(True)])
    yield Example("Dropout", off, FLOATS, "training", outputs=2)
    yield Example("Dropout", off, FLOATS, "training, constant ratio", outputs=2, constants=(1, 2))
    yield Example("Dropout", _ONE, FLOATS, "inference")
    yield Example("RandomUniformLike", _ONE, FLOATS)
    yield Example("RandomNormalLike", _ONE, FLOATS)
    yield Example("RandomUniform", lambda d: [], ("f32",), attributes={"shape": [4, 6]})
    yield Example("RandomNormal", lambda d: [], ("f32",), attributes={"shape": [4, 6]})
    yield Example("Bernoulli", _ONE, ("f32", "f64"))
    yield Example("Multinomial", _ONE, ("f32", "f16"), attributes={"sample_size": 2})


def _losses() -> Iterator[Example]:
    yield Example("SoftmaxCrossEntropyLoss", lambda d: [d(4, 6), _int64(0, 1, 2, 3)], FLOATS)
    yield Example("SoftmaxCrossEntropyLoss", lambda d: [d(4, 6), _int64(0, 1, 2, 3)], FLOATS, "with log", outputs=2)
    yield Example("NegativeLogLikelihoodLoss", lambda d: [d(4, 6), _int64(0, 1, 2, 3)], FLOATS)


def _fused() -> Iterator[Example]:
    f = ("f32", "f16", "bf16")
    for name in ("Gelu", "FastGelu", "QuickGelu"):
        yield Example(name, _ONE, f, domain=MS)
    yield Example("BiasGelu", lambda d: [d(4, 6), d(6)], f, domain=MS)
    yield Example("FusedMatMul", lambda d: [d(4, 6), d(3, 6)], f, domain=MS, attributes={"transB": 1})
    norm = _drawn(lambda d: [d(1, 4, 8), d(1, 4, 8), d(8), d(8)])
    yield Example("SkipLayerNormalization", norm, f, domain=MS)
    yield Example(
        "FusedConv", lambda d: [d(2, 4, 8, 8), d(4, 4, 3, 3)], f, domain=MS, attributes={"activation": "Relu"}
    )


EXAMPLES: tuple[Example, ...] = (
    *_elementwise(),
    *_reductions(),
    *_movement(),
    *_indexing(),
    *_convolutions(),
    *_pools(),
    *_normalizations(),
    *_products(),
    *_recurrent(),
    *_random(),
    *_losses(),
    *_fused(),
)
