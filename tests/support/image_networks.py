"""Random networks of operators on images, and what a plan of one in strips of rows gives beside the whole."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

import memonger
from memonger.errors import PlanError, SessionError
from memonger.tiling.axes import row_rules
from memonger.tiling.cutting import Slicing
from memonger.tiling.slices import Band, row_band
from tests.support import networks
from tests.support.one_node_executor import run_poisoned
from tests.support.stock import normal

Choose = Callable[[Sequence[Any]], Any]
"""One of several."""

LARGEST = 60
"""Rows and columns of an image that nothing more is put behind."""


class ImageNetwork:
    """A network that grows by a random operator on an image at a time, with sums and joins across it.

    Args:
        choose: Takes every decision.
        height: Rows of the input.
        batch: Its images.
    """

    def __init__(self, choose: Choose, height: int, batch: int = 1) -> None:
        self.choose, self.nodes, self.constants = choose, list[onnx.NodeProto](), dict[str, np.ndarray]()
        self.infos = {"x": helper.make_tensor_value_info("x", TensorProto.FLOAT, (batch, 4, height, 6))}
        self.images = ["x"]

    def pick(self, *choices: Any) -> Any:
        """One of these."""
        return self.choose(choices)

    def dims(self, name: str) -> tuple[int, ...]:
        """The shape of a value."""
        return tuple(dim.dim_value for dim in self.infos[name].type.tensor_type.shape.dim)

    def weight(self, *dims: int) -> str:
        """A constant of random numbers."""
        name = f"w{len(self.constants)}"
        self.constants[name] = normal(len(self.constants), *dims)
        return name

    def constant(self, numbers: Sequence[float] | float, kind: Any = np.int64) -> str:
        """A constant of these numbers."""
        name = f"n{len(self.constants)}"
        self.constants[name] = np.array(numbers, kind)
        return name

    def emit(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Append a node, if onnx takes it and something is left of the image; what it gives, or else nothing."""
        name = f"v{len(self.nodes)}"
        if any(each not in self.infos and each not in self.constants for each in filter(None, inputs)):
            return ""
        node = helper.make_node(op, inputs, [name], name=name, **attributes)
        read = [self.infos[each] for each in dict.fromkeys(inputs) if each in self.infos]
        constants = [
            numpy_helper.from_array(self.constants[n], n) for n in dict.fromkeys(inputs) if n in self.constants
        ]
        graph = helper.make_graph([node], "g", read, [helper.make_empty_tensor_value_info(name)], constants)
        try:
            inferred = onnx.shape_inference.infer_shapes(_model(graph), strict_mode=True, data_prop=True)
        except onnx.shape_inference.InferenceError:
            return ""
        info = inferred.graph.output[0]
        dims = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        if not dims or min(dims) < 1 or (len(dims) == 4 and max(dims[2:]) > LARGEST):
            return ""
        self.nodes.append(node)
        self.infos[name] = info
        return name

    def grow(self, kind: str | None = None) -> None:
        """Append one of all kinds of operators, or of that one, to an image drawn from the last few."""
        x = self.images[-min(len(self.images), self.pick(1, 1, 1, 2, 3))]
        made = getattr(self, f"_{kind or self.pick(*KINDS)}")(x, self.dims(x)[1])
        if made and len(self.dims(made)) == 4 and self.infos[made].type.tensor_type.elem_type == TensorProto.FLOAT:
            self.images.append(made)

    def _window(self) -> dict[str, Any]:
        kernel, stride = self.pick(1, 2, 3, 5), self.pick(1, 1, 2, 3)
        top, bottom = (min(kernel - 1, self.pick(0, 1, 2)) for _ in range(2))
        pads = [top, self.pick(0, 1), bottom, self.pick(0, 1)]
        return {"kernel_shape": [kernel, 2], "strides": [stride, 1], "pads": pads}

    def _conv(self, x: str, channels: int) -> str:
        window, group = self._window(), self.pick(1, 1, 2, channels)
        kernel, group = window["kernel_shape"][0], group if channels % group == 0 else 1
        if self.pick(False, False, True):
            window = {key: value for key, value in window.items() if key != "pads"} | {"auto_pad": "SAME_LOWER"}
        else:
            window["dilations"] = [self.pick(1, 1, 2), 1]
        made = group if 4 % group else 4
        return self.emit(
            "Conv", x, self.weight(made, channels // group, kernel, 2), self.weight(made), group=group, **window
        )

    def _max_pool(self, x: str, _: int) -> str:
        window = self._window()
        ceiling = self.pick(0, 1) if window["kernel_shape"][0] >= window["strides"][0] else 0  # else onnx counts more
        return self.emit("MaxPool", x, **window, dilations=[self.pick(1, 1, 2), 1], ceil_mode=ceiling)

    def _average_pool(self, x: str, _: int) -> str:
        window = self._window()
        ceiling = self.pick(0, 1) if window["kernel_shape"][0] >= window["strides"][0] else 0
        return self.emit("AveragePool", x, **window, count_include_pad=self.pick(0, 1), ceil_mode=ceiling)

    def _lp_pool(self, x: str, _: int) -> str:
        return self.emit("LpPool", x, kernel_shape=[self.pick(1, 2, 3), 2], strides=[self.pick(1, 2), 1])

    def _transposed(self, x: str, channels: int) -> str:
        window, group = self._window(), self.pick(1, 2)
        extra = [self.pick(*range(window["strides"][0])), 0]
        weight = self.weight(channels, 2, window["kernel_shape"][0], 2)
        dilations = [self.pick(1, 1, 2), 1]
        return self.emit("ConvTranspose", x, weight, **window, dilations=dilations, output_padding=extra, group=group)

    def _resize(self, x: str, _: int) -> str:
        height, width = self.dims(x)[2:]
        attributes = {
            "mode": self.pick("nearest", "linear", "cubic"),
            "coordinate_transformation_mode": self.pick(
                "asymmetric", "half_pixel", "pytorch_half_pixel", "align_corners"
            ),
            "nearest_mode": self.pick("floor", "ceil", "round_prefer_floor"),
        }
        if self.pick(False, True):
            sizes = self.pick(2 * height, 3 * height, max(1, height // 2), 2 * height - 1, 3 * height // 2)
            return self.emit("Resize", x, "", "", self.constant([*self.dims(x)[:2], sizes, width]), **attributes)
        scales = self.constant([1, 1, self.pick(2, 3, 4, 0.5, 1.5, 0.25, 0.75), 1], np.float32)
        antialias = self.pick(0, 0, 1) if attributes["mode"] != "nearest" else 0
        return self.emit("Resize", x, "", scales, antialias=antialias, **attributes)

    def _relu(self, x: str, _: int) -> str:
        return self.emit(self.pick("Relu", "Sigmoid", "HardSwish"), x)

    def _depth_to_space(self, x: str, channels: int) -> str:
        return "" if channels % 4 else self.emit("DepthToSpace", x, blocksize=2, mode=self.pick("DCR", "CRD"))

    def _space_to_depth(self, x: str, _: int) -> str:
        return "" if any(dim % 2 for dim in self.dims(x)[2:]) else self.emit("SpaceToDepth", x, blocksize=2)

    def _pad(self, x: str, _: int) -> str:
        pads = self.constant([0, 0, self.pick(0, 1, 2), 1, 0, 0, self.pick(0, 1, 3), 0])
        return self.emit("Pad", x, pads, mode=self.pick("constant", "reflect", "edge", "wrap"))

    def _slice(self, x: str, _: int) -> str:
        last, step = self.pick(1, 2, 1000), self.pick(1, 1, 2, 3)
        ends = self.constant([-last if last < 1000 else last, 1000])
        starts = self.constant([self.pick(0, 1, 2), 0])
        return self.emit("Slice", x, starts, ends, self.constant([2, 1]), self.constant([step, 1]))

    def _gather(self, x: str, channels: int) -> str:
        height = self.dims(x)[2]
        if self.pick(False, True):
            return self.emit("Gather", x, self.constant([*range(0, channels, 2), channels - 1]), axis=1)
        rows = [min(row, height - 1) for row in (0, *range(-2, height - 2), 1)]
        return self.emit("Gather", x, self.constant(rows), axis=2)

    def _batch_norm(self, x: str, channels: int) -> str:
        scale, mean = self.weight(channels), self.weight(channels)
        return self.emit("BatchNormalization", x, scale, mean, mean, self.constant([2.0] * channels, np.float32))

    def _lrn(self, x: str, _: int) -> str:
        return self.emit("LRN", x, size=3)

    def _instance_norm(self, x: str, channels: int) -> str:
        return self.emit("InstanceNormalization", x, self.weight(channels), self.weight(channels))

    def _channel_norm(self, x: str, channels: int) -> str:
        """Layers as ConvNeXt has them: channels last, normalized, multiplied."""
        last = self.emit("Transpose", x, perm=[0, 2, 3, 1])
        normed = self.emit("LayerNormalization", last, self.weight(channels), self.weight(channels), axis=-1)
        product = self.emit("MatMul", normed, self.weight(channels, channels))
        return self.emit("Transpose", self.emit("Relu", product), perm=[0, 3, 1, 2])

    def _shuffle(self, x: str, channels: int) -> str:
        """Channels in another order, as ShuffleNet has them."""
        if channels % 2:
            return ""
        batch, _, height, width = self.dims(x)
        apart = self.emit("Reshape", x, self.constant([batch, 2, channels // 2, height, width]))
        turned = self.emit("Transpose", apart, perm=[0, 2, 1, 3, 4])
        return self.emit("Reshape", turned, self.constant([batch, channels, height, width]))

    def _gate(self, x: str, channels: int) -> str:
        """Channels weighed by what all of the image says, as squeeze and excitation has them."""
        pooled = self.emit("GlobalAveragePool", x)
        weighed = self.emit("Conv", pooled, self.weight(channels, channels, 1, 1), kernel_shape=[1, 1])
        return self.emit("Mul", x, self.emit("Sigmoid", weighed))

    def _softmax(self, x: str, _: int) -> str:
        return self.emit("Softmax", x, axis=self.pick(1, 3, 2))

    def _mean(self, x: str, _: int) -> str:
        mean = self.emit("ReduceMean", x, self.constant([self.pick(1, 3, 2)]), keepdims=1)
        return self.emit("Sub", x, mean)

    def _where(self, x: str, _: int) -> str:
        above = self.emit("Greater", x, self.constant([0.5], np.float32))
        return self.emit("Where", above, x, self.weight(self.dims(x)[3]))

    def _spread(self, x: str, channels: int) -> str:
        one = self.emit("ReduceMax", x, self.constant([1]), keepdims=1)
        if self.pick(False, True):
            return self.emit("Expand", one, self.constant([self.dims(x)[0], channels, *self.dims(x)[2:]]))
        return self.emit("Tile", one, self.constant([1, channels, 1, 1]))

    def _attention(self, x: str, channels: int) -> str:
        """All places attend to all places."""
        batch, _, height, width = self.dims(x)
        if height * width > 400:
            return ""
        flat = self.emit("Reshape", x, self.constant([batch, channels, height * width]))
        tokens = self.emit("Transpose", flat, perm=[0, 2, 1])
        query, key, value = (self.emit("MatMul", tokens, self.weight(channels, channels)) for _ in range(3))
        scores = self.emit("Softmax", self.emit("MatMul", query, self.emit("Transpose", key, perm=[0, 2, 1])), axis=-1)
        back = self.emit("Transpose", self.emit("MatMul", scores, value), perm=[0, 2, 1])
        return self.emit("Reshape", back, self.constant([batch, channels, height, width]))

    def _sample(self, x: str, _: int) -> str:
        """The image at other places, which are told for each."""
        batch, _, height, width = self.dims(x)
        places = np.tanh(normal(len(self.constants), batch, height + 1, width, 2))
        self.constants[name := f"g{len(self.constants)}"] = places
        return self.emit("GridSample", x, name, mode=self.pick("linear", "nearest"))

    def _quantized(self, x: str, channels: int) -> str:
        """A convolution of bytes."""
        scale, zero = self.constant(0.05, np.float32), self.constant(128, np.uint8)
        small, none = self.constant(0.02, np.float32), self.constant(0, np.int8)
        self.constants[weight := f"q{len(self.constants)}"] = np.clip(
            np.round(30 * normal(len(self.constants), 4, channels, 3, 3)), -127, 127
        ).astype(np.int8)
        as_bytes = self.emit("QuantizeLinear", x, scale, zero)
        window = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [self.pick(1, 2), 1]}
        made = self.emit("QLinearConv", as_bytes, scale, zero, weight, small, none, scale, zero, **window)
        return self.emit("DequantizeLinear", made, scale, zero)

    def _half(self, x: str, channels: int) -> str:
        """A convolution of half precision."""
        self.constants[weight := f"h{len(self.constants)}"] = (
            0.1 * normal(len(self.constants), 4, channels, 3, 3)
        ).astype(np.float16)
        small = self.emit("Cast", x, to=TensorProto.FLOAT16)
        made = self.emit("Conv", small, weight, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
        return self.emit("Cast", made, to=TensorProto.FLOAT)

    def _others(self, x: str) -> str:
        alike = [name for name in self.images if self.dims(name)[2:] == self.dims(x)[2:]]
        return str(self.choose(alike))

    def _concat(self, x: str, _: int) -> str:
        return self.emit("Concat", x, self._others(x), axis=1)

    def _stack(self, x: str, channels: int) -> str:
        """Rows of one below those of another."""
        alike = [name for name in self.images if self.dims(name)[1::2] == (channels, self.dims(x)[3])]
        return self.emit("Concat", x, self.choose(alike), axis=2)

    def _add(self, x: str, _: int) -> str:
        other = self._others(x)
        if self.dims(other) == self.dims(x):
            return self.emit("Add", x, other)
        return self.emit("Mul", x, self.weight(*self.dims(x)[2:]))

    def model(self) -> onnx.ModelProto:
        """What was drawn. Outputs are what nobody reads, and of an even number of nodes one value more."""
        read = {name for node in self.nodes for name in node.input}
        count = len(self.nodes)
        results = [n.name for n in self.nodes if n.name not in read or n.name == f"v{count / 2:g}"]
        constants = [numpy_helper.from_array(array, key) for key, array in self.constants.items() if key in read]
        outputs = [self.infos[name] for name in results]
        return _model(helper.make_graph(self.nodes, "g", [self.infos["x"]], outputs, constants))

    @property
    def feeds(self) -> dict[str, np.ndarray]:
        """Random inputs."""
        return {"x": normal(9, *self.dims("x"))}


KINDS = tuple(
    name[1:]
    for name, method in vars(ImageNetwork).items()
    if name[0] == "_" and name[1] != "_" and name not in ("_window", "_others") and callable(method)
)
"""What networks grow by."""


def _model(graph: onnx.GraphProto) -> onnx.ModelProto:
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def judge(network: ImageNetwork, strips: int, device: str) -> tuple[str, str]:
    """What a plan in strips gives: ``same`` bits as stock onnxruntime, ``refused``, or else what is wrong.

    Returns: the verdict, and what there is to say of it.
    """
    model, feeds = network.model(), network.feeds
    try:
        stock = networks.stock(model, "ORT_DISABLE_ALL" if device == "none" else "ORT_ENABLE_ALL")
        expected = networks.run_stock(stock, feeds)
    except Exception as error:  # pybind exceptions share no base class
        return "stock fails", str(error)[:120]
    try:
        plan = memonger.search_plan(model, mode="inference", device=device, threads=1, chunks=f"strips:{strips}")
    except PlanError as error:
        return "refused", str(error)
    whole = memonger.search_plan(model, mode="inference", device=device, threads=1, chunks="off")
    try:
        of_whole = memonger.Session(whole).run(feeds)
    except SessionError as error:
        return "refused", f"without strips, too: {str(error)[:60]}"
    ours = memonger.Session(plan).run(feeds)
    if not networks.same_bits(ours, of_whole):
        most = max(float(np.abs(ours[k] - of_whole[k]).max()) for k in expected)
        return "differs", f"by up to {most}"
    if not networks.same_bits(of_whole, expected):
        return "stock differs", "the plan without strips gives other bits than stock onnxruntime, and strips these"
    poisoned = run_poisoned(plan, feeds) if device == "cpu" else ours  # whose values lie at other addresses
    if not all(np.allclose(poisoned[name], ours[name], 1e-3, 1e-3) for name in ours):
        return "dies early", "a value that is still needed is written over"
    return "same", f"{sum(band.runs for band in plan.chunks)} nodes"


def rows_of_all(model: ir.Model, rows: int, begin: int = 0, end: int | None = None) -> Band:
    """Some nodes of a model, or all, in slices of so many rows."""
    rules, stop = row_rules(model), len(model.graph) if end is None else end
    own = list(zip(model.graph, rules, strict=True))[begin:stop]
    return row_band(begin, stop, {node: rule for node, rule in own if isinstance(rule, Slicing)}, rows)


def needs_own(nodes: Mapping[ir.Node, Slicing]) -> bool:
    """Whether one of the nodes reads whole what others of them compute in rows: they can't be one band."""
    whole = (node.inputs[index] for node, rule in nodes.items() for index in rule.whole)
    return any(value is not None and value.producer() in nodes for value in whole)
