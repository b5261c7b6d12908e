"""The CPU form of a training step's convolutions: in onnxruntime's blocked layout (com.microsoft.nchwc).

In that layout the channels of an image lie in blocks of 8 or 16, as many as fit a vector register. onnxruntime's
optimizer writes convolutions so only where their weights are constants, which trained ones aren't. Without it, its CPU
kernel copies the windows of an image and multiplies matrices, for each channel of each image where it is depthwise.
Reordered before and after, the weight too, a depthwise convolution takes 0.02 to 0.6 of that time, its weight's
gradient 0.07 to 0.9 (3×3 to 7×7, images of 2×2 to 80×80, 32 to 960 channels, on AVX-512). One of all channels takes
0.18 to 0.97 (3×3, strides 1 and 2, images of 3×3 to 40×40, 16 to 512 channels, 4 and 16 images) unless its weight is
large beside the images (`_pays`), and one of 1×1 gains nothing.
"""

import json
import logging
import math
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import onnx_ir as ir

from memonger.devices import CPU
from memonger.files import ScratchFolder
from memonger.ir.decoding import DecodingError, decode
from memonger.ir.emitter import Emitter, as_attributes
from memonger.ir.marks import COMPOSITE, TURNED_WEIGHT, DepthwiseWeight
from memonger.ir.model import Model
from memonger.ir.rewrite import Replacer
from memonger.ir.values import all_values, static_shape
from memonger.ir.windows import Windows, windows_of
from memonger.runtime import ort
from memonger.runtime.weights import session_of

logger = logging.getLogger(__name__)

DOMAIN = "com.microsoft.nchwc"

WINDOWS_OF_OUTPUT = 4  # a convolution in blocks pays where an output has more than a quarter of a window of all images,
MANY_WINDOWS = 128  # and where outputs are more than twice the channels, so many windows
LARGE_IMAGE = 300  # elements of a channel, for each of its kernel, above which ConvTranspose costs less than the zeros


def block_convolutions(model: Model) -> bool:
    """A pass: a step's convolutions are in the blocked layout where that pays; transposed ones are products, too."""
    if not any(_kind(node) for node in model.graph):
        return False
    model.ir.opset_imports.setdefault(DOMAIN, 1)
    into = Replacer(model.graph, Emitter(model.ir))
    form = _Form(into, block_size(), {str(v.name): v for v in all_values(model.graph)})

    def write(_: Emitter, node: ir.Node) -> list[ir.Value] | None:
        kind = _kind(node)
        made = _WRITERS[kind](form, node) if kind else None
        if made is None:
            return None
        form.values[str(node.outputs[0].name)] = made
        return [made]

    count = into.replace_each(write)
    logger.info("%s: %d convolutions written out for the CPU, in blocks of %d channels.", model.name, count, form.block)
    return True


def _kind(node: ir.Node) -> str:
    """What a node is written out as; empty: it stays."""
    kind = node.metadata_props.get(COMPOSITE, node.op_type)
    return kind if node.domain == "" and kind in _WRITERS else ""


@dataclass(slots=True)
class _Form:
    """What the writers share.

    Attributes:
        into: The model that is changed.
        block: Channels of a block.
        values: By name; what was written out, as it is now.
        reordered: Values that a depthwise convolution read, in blocks: the gradient of its weight reads the same.
    """

    into: Replacer
    block: int
    values: dict[str, ir.Value]
    reordered: dict[ir.Value, ir.Value] = field(default_factory=dict)

    @property
    def op(self) -> Emitter:
        """Where nodes go."""
        return self.into.op

    def emit(self, kind: str, inputs: list[ir.Value], dims: tuple[int, ...], **attributes: int | list[int]) -> ir.Value:
        """Append a node of the blocked layout's domain."""
        name = self.op.fresh(f"{self.op.where}/{kind}")
        value = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(list(dims)))
        given = as_attributes(attributes)
        self.op.nodes.append(ir.node(kind, inputs, given, domain=DOMAIN, outputs=[value], name=name))
        return value

    def blocks(self, x: ir.Value) -> ir.Value:
        """An image in blocks."""
        return self.emit("ReorderInput", [x], self.op.dims(x))

    def weight(self, w: ir.Value) -> ir.Value:
        """A depthwise weight ``[C, 1, h, w]`` in blocks: what an image of so many channels is."""
        channels, _, *kernel = self.op.dims(w)
        return self.op.reshape(self.blocks(self.op.reshape(w, (1, channels, *kernel))), (channels, 1, *kernel))

    def full_weight(self, w: ir.Value) -> ir.Value:
        """A weight ``[K, C, h, w]`` of all channels in blocks of both, the outputs' innermost.

        ``[K/b, C/b, h·w, b, b]``: outputs are moved as an image's channels are, then whole rows of them. An image of
        fewer channels than a block isn't in blocks, and the weight only in those of outputs.
        """
        outputs, channels, *kernel = dims = self.op.dims(w)
        size, rows = math.prod(kernel), channels * math.prod(kernel)
        made = self.blocks(self.op.reshape(w, (outputs // self.block, self.block, rows, 1)))
        if size > 1 and channels >= self.block:
            order = np.arange(rows, dtype=np.int32).reshape(-1, self.block, size).swapaxes(1, 2).ravel()
            made = self.op.reshape(made, (outputs // self.block, rows, self.block))
            made = self.op.Gather(made, self.op.constant(order), axis=1)
        return self.op.reshape(made, dims)

    def turned_weight(self, w: ir.Value) -> ir.Value:
        """The weight ``[K, C, h, w]`` in blocks for an image's gradient: its channels exchanged, its kernel flipped."""
        outputs, channels, *kernel = self.op.dims(w)
        size, b = math.prod(kernel), self.block
        made = self.blocks(self.op.reshape(w, (outputs * channels // b, b, size, 1)))
        rows = np.arange(outputs * channels // b * size, dtype=np.int32).reshape(outputs // b, b, channels // b, size)
        order = rows[..., ::-1].transpose(2, 0, 3, 1).ravel()
        made = self.op.Gather(self.op.reshape(made, (len(order), b)), self.op.constant(order), axis=0)
        return self.op.reshape(made, (channels, outputs, *kernel))

    def plain(self, x: ir.Value) -> ir.Value:
        """An image out of its blocks."""
        dims = self.op.dims(x)
        return self.emit("ReorderOutput", [x], dims, channels=dims[1])

    def convolved(
        self, x: ir.Value, w: ir.Value, pads: list[int], strides: list[int], dilations: list[int], *bias: ir.Value
    ) -> ir.Value:
        """A convolution of what is in blocks: depthwise, or of all channels where the weight has them."""
        (batch, channels, *image), (outputs, inner, *kernel) = self.op.dims(x), self.op.dims(w)
        count = [
            (n + pads[a] + pads[a + 2] - (kernel[a] - 1) * dilations[a] - 1) // strides[a] + 1
            for a, n in enumerate(image)
        ]
        return self.emit(
            "Conv", [x, w, *bias], (batch, outputs, *count), group=channels // inner, kernel_shape=kernel, pads=pads,
            strides=strides, dilations=dilations,
        )  # fmt: skip


def _is_depthwise(form: _Form, node: ir.Node) -> bool:
    """Whether a node convolves images of float32, each channel alone, by a weight that isn't constant."""
    values = [v for v in (*node.inputs, *node.outputs) if v is not None]
    if any(v.dtype != ir.DataType.FLOAT or static_shape(v) is None for v in values):
        return False
    x, w = form.op.dims(node.inputs[0]), form.op.dims(node.inputs[1])
    channels = x[1] if len(x) == 4 else 0
    fits = form.block > 1 and channels > 0 and channels % form.block == 0
    fits = fits and w[:2] == (channels, 1) and math.prod(w) > channels
    return fits and form.op.attribute(node, "group", 1) == channels and form.op.content(node.inputs[1]) is None


def _conv(form: _Form, node: ir.Node) -> ir.Value | None:
    depthwise = _is_depthwise(form, node)
    if not depthwise and not _pays(form, node):
        return None
    x, w, *bias = (v for v in node.inputs if v is not None)
    image, count, kernel = (form.op.dims(v)[2:] for v in (x, node.outputs[0], w))
    at = windows_of(node, image, count, kernel)
    blocks = form.blocks(x) if form.op.dims(x)[1] >= form.block else x
    if depthwise:
        form.reordered[x], weight = blocks, form.weight(w)
    else:
        weight = _full_weight(form, node, w)
    pads = [*at.begin, *at.end]
    return form.plain(form.convolved(blocks, weight, pads, list(at.strides), list(at.dilations), *bias))


def _full_weight(form: _Form, node: ir.Node, w: ir.Value) -> ir.Value:
    """The weight of all channels in blocks: where a gradient rule turned it, made from the weight before that."""
    outputs, channels, *kernel = form.op.dims(w)
    given = form.values.get(node.metadata_props.get(TURNED_WEIGHT, ""))
    fits = given is not None and given.dtype == w.dtype and static_shape(given) == (channels, outputs, *kernel)
    return form.turned_weight(given) if given is not None and fits and channels >= form.block else form.full_weight(w)


def _pays(form: _Form, node: ir.Node) -> bool:
    """Whether a convolution of all channels by a weight that isn't constant takes less time in blocks.

    Not of 1×1, which is a product of matrices as it is; nor where few windows of all images stand against a large
    weight, which is moved first.
    """
    op, block = form.op, form.block
    values = [v for v in (*node.inputs, *node.outputs) if v is not None]
    if (
        any(v.dtype != ir.DataType.FLOAT or static_shape(v) is None for v in values)
        or op.attribute(node, "group", 1) > 1
    ):
        return False
    x, w, y = (op.dims(v) for v in (node.inputs[0], node.inputs[1], node.outputs[0]))
    if len(x) != 4 or block == 1 or w[0] % block or (w[1] % block and w[1] >= block) or math.prod(w[2:]) == 1:
        return False
    windows = y[0] * math.prod(y[2:])
    small = w[0] > 2 * w[1] and windows < MANY_WINDOWS
    return windows * WINDOWS_OF_OUTPUT > w[0] and not small and op.content(node.inputs[1]) is None


def _conv_transpose(form: _Form, node: ir.Node) -> ir.Value | None:
    return _depthwise_transposed(form, node) if _is_depthwise(form, node) else _by_products(form, node)


def _by_products(form: _Form, node: ir.Node) -> ir.Value | None:
    """Products of matrices, and their columns added up at their places: the same in two nodes.

    onnxruntime's ConvTranspose transposes the weight at each run: where that is larger than the image, this takes 0.2
    to 0.8 of its time. Else it takes 0.9, and more memory.
    """
    from memonger.autodiff.rules.convolution import SMALL_BATCH, pointwise_image  # here: inference needs no rules

    op, x, w, y = form.op, form.op.given(node, 0), form.op.given(node, 1), node.outputs[0]
    if op.attribute(node, "group", 1) > 1 or len(node.inputs) > 2 or x.dtype != ir.DataType.FLOAT:
        return None
    if any(static_shape(v) is None or len(op.dims(v)) != 4 for v in (x, w, y)):
        return None
    (batch, channels, *count), (_, outputs, *kernel), image = op.dims(x), op.dims(w), op.dims(y)[2:]
    if channels < SMALL_BATCH * batch * math.prod(count):
        return None
    at = windows_of(node, image, count, kernel, up=True)
    if any(excess <= -stride for excess, stride in zip(at.excess, at.strides, strict=True)):
        return None  # Col2Im would look for another window
    columns = pointwise_image(op, x, op.reshape(w, (channels, outputs * math.prod(kernel))))
    pads = [*at.begin, *(max(0, excess) for excess in at.excess)]
    settings = {"strides": at.strides, "dilations": at.dilations, "pads": pads}
    return op.Col2Im(columns, op.ints(*image), op.ints(*kernel), **settings)


def _depthwise_transposed(form: _Form, node: ir.Node) -> ir.Value | None:
    """A convolution by the flipped weight, with zeros between the elements of the image."""
    if len(node.inputs) > 2:
        return None
    op, x, w, y = form.op, form.op.given(node, 0), form.op.given(node, 1), node.outputs[0]
    at = windows_of(node, op.dims(y)[2:], op.dims(x)[2:], op.dims(w)[2:], up=True)
    (batch, channels, *count), strides = op.dims(x), at.strides
    begin = [k - 1 - b for k, b in zip(at.kernel, at.begin, strict=True)]
    spread = [c * s for c, s in zip(count, strides, strict=True)]
    end = [n - m - b + k - 1 for n, m, b, k in zip(at.image, spread, begin, at.kernel, strict=True)]
    is_large = math.prod(at.image) > LARGE_IMAGE * math.prod(at.kernel)
    if is_large or min(*begin, *end) < 0 or any(d > 1 for d in at.dilations):
        return None
    form.reordered[x] = image = form.blocks(x)
    if math.prod(strides) > 1:
        parts = op.reshape(image, (batch, channels // form.block, count[0], 1, count[1], 1, form.block))
        ends = op.ints(*[0] * 10, strides[0] - 1, 0, strides[1] - 1, 0)
        image = op.reshape(op.Pad(parts, ends), (batch, channels, *spread))
    axes = [a for a in (2, 3) if op.dims(w)[a] > 1]
    back = op.ints(*[-1] * len(axes))
    flipped = op.Slice(w, back, op.ints(*[-op.dims(w)[a] - 1 for a in axes]), op.ints(*axes), back)
    return form.plain(form.convolved(image, form.weight(flipped), [*begin, *end], [1, 1], [1, 1]))


def _depthwise_weight(form: _Form, node: ir.Node) -> ir.Value | None:
    """A convolution of x by dy, every channel of every image a group; strides are dilations and dilations strides."""
    found = _operands(form, node)
    if found is None:
        return None
    op, (x, dy, at) = form.op, found
    batch, channels = op.dims(x)[:2]
    both = batch * channels
    whole = (batch, channels) if channels % form.block == 0 else (1, both)
    image = form.blocks(op.reshape(x, (*whole, *at.image)))
    weight = form.reordered.get(dy)
    weight = form.blocks(op.reshape(dy, (*whole, *at.count))) if weight is None else weight
    image, weight = op.reshape(image, (1, both, *at.image)), op.reshape(weight, (both, 1, *at.count))
    pads = [*at.begin, *(max(0, excess) for excess in at.excess)]
    made = form.plain(form.convolved(image, weight, pads, list(at.dilations), list(at.strides)))
    axes = [a for a in (2, 3) if op.dims(made)[a] > at.kernel[a - 2]]
    if axes:
        made = op.Slice(made, op.ints(*[0 for _ in axes]), op.ints(*[at.kernel[a - 2] for a in axes]), op.ints(*axes))
    made = op.reshape(made, (batch, channels, *at.kernel))
    return op.reshape(made if batch == 1 else op.sum(made, [0]), (channels, 1, *at.kernel))


def _operands(form: _Form, node: ir.Node) -> tuple[ir.Value, ir.Value, Windows] | None:
    """What a gradient rule wrote on the last node of a depthwise weight's gradient; None where it doesn't fit."""
    op, y = form.op, node.outputs[0]
    try:
        mark = decode(DepthwiseWeight, json.loads(node.metadata_props.get(DepthwiseWeight.KEY, "")))
    except (ValueError, DecodingError):
        return None
    x, dy = form.values.get(mark.x), form.values.get(mark.dy)
    if x is None or dy is None or any(v.dtype != ir.DataType.FLOAT or len(op.dims(v)) != 4 for v in (x, dy, y)):
        return None
    (batch, channels, *image), (*same, height, width) = op.dims(x), op.dims(dy)
    at = Windows(tuple(image), (height, width), op.dims(y)[2:], mark.strides, mark.dilations, mark.begin, (0, 0))
    fits = same == [batch, channels] and op.dims(y)[:2] == (channels, 1) and batch * channels % form.block == 0
    fits = fits and form.block > 1
    return (x, dy, at) if fits else None


_WRITERS = {"Conv": _conv, "ConvTranspose": _conv_transpose, DepthwiseWeight.NAME: _depthwise_weight}


@cache
def block_size() -> int:
    """How many channels onnxruntime puts into a block on this machine; 1 where it has no such layout.

    Told by what its optimizer makes of one depthwise convolution.
    """
    weight = np.arange(128 * 9, dtype=np.float32).reshape(128, 1, 3, 3)
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1, 128, 3, 3]))
    y = ir.Value(name="y", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1, 128, 1, 1]))
    w = ir.Value(name="w", const_value=ir.tensor(weight, name="w"))
    graph = ir.Graph(
        [x], [y], nodes=[ir.node("Conv", [x, w], {"group": 128, "kernel_shape": [3, 3]}, outputs=[y])],
        initializers=[w], opset_imports={"": 20}, name="block",
    )  # fmt: skip
    folder = ScratchFolder()
    try:
        path = folder.path / "block.onnx"
        options = ort.SessionSettings(level="ORT_ENABLE_ALL", threads=1, optimized=path)
        session_of(ir.Model(graph, ir_version=10), CPU, options)
        made = ir.load(path)
    finally:
        folder.remove()
    node = next((node for node in made.graph if node.domain == DOMAIN and node.op_type == "Conv"), None)
    if node is None or node.inputs[1] is None or node.inputs[1].const_value is None:
        return 1
    order = node.inputs[1].const_value.numpy().ravel()
    return int(np.argmax(order == 1.0))  # the second tap of the first channel is behind the first taps of its block
