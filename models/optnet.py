"""OptNet's networks as its models.lua has them (https://github.com/fmassa/optimize-net at d380df0).

They differ from those of `models`: two columns in AlexNet, an Inception of 3×3 convolutions with an auxiliary head, and
a ResNet-110 whose shortcuts are convolutions and whose normalizations are multiplications by one. What OptNet's
networks compute in place before they are optimized is named ``.inplace``.
"""

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from models import layers
from models.builder import Builder, static_dim

IN_PLACE = ".inplace"


def _relu(net: Builder, x: ir.Value, name: str) -> ir.Value:
    return layers.relu(net, x, f"{name}{IN_PLACE}")


def _conv(net: Builder, x: ir.Value, name: str, channels: int, kernel: int, stride: int = 1, pad: int = 0) -> ir.Value:
    return layers.conv(net, x, name, channels, kernel, stride=stride, pad=pad, bias=True)


def _conv_relu(net: Builder, x: ir.Value, name: str, *settings: int) -> ir.Value:
    return _relu(net, _conv(net, x, name, *settings), f"{name}.relu")


def _pool(net: Builder, x: ir.Value, name: str, kernel: int, stride: int, kind: str = "Max") -> ir.Value:
    return net.op(f"{kind}Pool", [x], name, kernel_shape=[kernel] * 2, strides=[stride] * 2, ceil_mode=1)


def _rows(net: Builder, x: ir.Value, name: str) -> ir.Value:
    return net.op("Flatten", [x], f"{name}{IN_PLACE}", axis=1)


def _log_softmax(net: Builder, x: ir.Value, name: str) -> ir.Value:
    return net.op("LogSoftmax", [x], name, axis=1)


def _perceptron(net: Builder, x: ir.Value) -> ir.Value:
    """Three linear layers; OptNet's Threshold between them isn't in place."""
    x = _rows(net, x, "view")
    for name in ("fc6", "fc7"):
        x = layers.relu(net, layers.linear(net, x, name, 4096), f"{name}.threshold")
    return _log_softmax(net, layers.linear(net, x, "fc8", 1000), "scores")


def alexnet(net: Builder) -> ir.Value:
    """Two columns, joined before the linear layers."""
    image = layers.image_input(net, 3, 224)
    columns = []
    for column in ("left", "right"):
        with net.scope(column):
            x = _conv_relu(net, image, "conv1", 48, 11, 4, 2)
            x = _conv_relu(net, _pool(net, x, "pool1", 3, 2), "conv2", 128, 5, 1, 2)
            x = _conv_relu(net, _pool(net, x, "pool2", 3, 2), "conv3", 192, 3, 1, 1)
            x = _conv_relu(net, x, "conv4", 192, 3, 1, 1)
            x = _conv_relu(net, x, "conv5", 128, 3, 1, 1)
            columns.append(_pool(net, x, "pool5", 3, 2))
    return _perceptron(net, layers.concat(net, columns, "join"))


def vgg_a(net: Builder) -> ir.Value:
    """Eight convolutions."""
    x = layers.image_input(net, 3, 224)
    for stage, widths in enumerate(((64,), (128,), (256, 256), (512, 512), (512, 512)), 1):
        for unit, channels in enumerate(widths, 1):
            x = _conv_relu(net, x, f"conv{stage}_{unit}", channels, 3, 1, 1)
        x = _pool(net, x, f"pool{stage}", 2, 2)
    return _perceptron(net, x)


_INCEPTIONS = {
    "3a": (64, 64, 64, 64, 96, "Average", 32),
    "3b": (64, 64, 96, 64, 96, "Average", 64),
    "3c": (0, 128, 160, 64, 96, "Max", 0),
    "4a": (224, 64, 96, 96, 128, "Average", 128),
    "4b": (192, 96, 128, 96, 128, "Average", 128),
    "4c": (160, 128, 160, 128, 160, "Average", 96),
    "4d": (96, 128, 192, 160, 192, "Average", 96),
    "4e": (0, 128, 192, 192, 256, "Max", 0),
    "5a": (352, 192, 320, 160, 224, "Average", 128),
    "5b": (352, 192, 320, 192, 224, "Max", 128),
}


def _inception(net: Builder, x: ir.Value, name: str) -> ir.Value:
    direct, reduce3, wide3, reduce5, wide5, pooling, projection = _INCEPTIONS[name]
    with net.scope(name):
        branches = [_conv_relu(net, x, "1x1", direct, 1)] if direct else []
        branches.append(_conv_relu(net, _conv_relu(net, x, "3x3.reduce", reduce3, 1), "3x3", wide3, 3, 1, 1))
        y = _conv_relu(net, _conv_relu(net, x, "double.reduce", reduce5, 1), "double1", wide5, 3, 1, 1)
        branches.append(_conv_relu(net, y, "double2", wide5, 3, 1, 1))
        pads = net.constant(np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64), "pads")
        y = _pool(net, net.op("Pad", [x, pads], "pad"), "pool", 3, 1, pooling)
        branches.append(_conv_relu(net, y, "projection", projection, 1) if projection else y)
        return layers.concat(net, branches, "join")


def googlenet(net: Builder) -> ir.Value:
    """Its scores and those of the auxiliary head, joined."""
    x = _conv_relu(net, layers.image_input(net, 3, 224), "conv1", 64, 7, 2, 3)
    x = _conv_relu(net, _pool(net, x, "pool1", 3, 2), "conv2.reduce", 64, 1)
    x = _pool(net, _conv_relu(net, x, "conv2", 192, 3, 1, 1), "pool2", 3, 2)
    for name in ("3a", "3b", "3c"):
        x = _inception(net, x, name)
    x = _conv(net, x, "half3", 576, 2, 2)
    for name in ("4a", "4b", "4c", "4d"):
        x = _inception(net, x, name)
    y = _conv(net, _inception(net, x, "4e"), "half4", 1024, 2, 2)
    y = _inception(net, _inception(net, y, "5a"), "5b")
    y = _rows(net, _pool(net, y, "pool5", 7, 1, "Average"), "view")
    scores = _log_softmax(net, layers.linear(net, y, "classifier", 1000), "scores")
    with net.scope("auxiliary"):
        z = _conv(net, _pool(net, x, "pool", 5, 3, "Average"), "conv", 128, 1)
        z = layers.relu(net, layers.linear(net, _rows(net, z, "view"), "fc", 768), "relu")
        z = _log_softmax(net, layers.linear(net, z, "classifier", 1000), "scores")
    return layers.concat(net, [scores, z], "join")


def resnet110(net: Builder) -> ir.Value:
    """Shortcuts of 1×1 convolutions where the shape changes."""
    x = _convolved(net, layers.image_input(net, 3, 32), "conv", 16, 3, 1, 1)
    x = _relu(net, x, "relu")
    for stage, channels in enumerate((16, 32, 64)):
        for unit in range(18):
            with net.scope(f"stage{stage + 1}/unit{unit + 1}"):
                x = _basic_block(net, x, channels, 2 if stage and not unit else 1)
    x = _rows(net, _pool(net, x, "pool", 8, 1, "Average"), "view")
    return layers.linear(net, x, "classifier", 10)


def _convolved(net: Builder, x: ir.Value, name: str, *settings: int) -> ir.Value:
    """A convolution, and what stands for its normalization."""
    one = net.constant(np.array(1, np.float32), "one")
    return net.op("Mul", [_conv(net, x, name, *settings), one], f"{name}.norm")


def _basic_block(net: Builder, x: ir.Value, channels: int, stride: int) -> ir.Value:
    y = _relu(net, _convolved(net, x, "conv1", channels, 3, stride, 1), "relu1")
    y = _convolved(net, y, "conv2", channels, 3, 1, 1)
    if static_dim(x, 1) != channels:
        x = _convolved(net, x, "shortcut", channels, 1, stride)
    return _relu(net, layers.add(net, y, x, f"add{IN_PLACE}"), "relu2")


NETWORKS: Mapping[str, Callable[[Builder], ir.Value]] = {
    "alexnet": alexnet,
    "vgg-A": vgg_a,
    "googlenet": googlenet,
    "resnet 110 (cifar)": resnet110,
}


def build(name: str, batch: int) -> ir.Model:
    """One of `NETWORKS` in float32, weights drawn when read."""
    net = Builder(name, batch=batch, training=False, seed=0)
    net.output(NETWORKS[name](net), "result")
    return net.model()


def as_double(model: ir.Model) -> ir.Model:
    """The model in float64, in place."""
    graph = model.graph
    for value in (*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs)):
        if value.dtype == ir.DataType.FLOAT:
            value.type = ir.TensorType(ir.DataType.DOUBLE)
    for value in graph.initializers.values():
        value.const_value = _doubled(value.const_value)
    for node in graph:
        if node.op_type == "Constant":
            node.attributes.add(ir.AttrTensor("value", _doubled(node.attributes["value"].as_tensor())))
    return model


def _doubled(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    if tensor.dtype != ir.DataType.FLOAT:
        return tensor
    return ir.LazyTensor(
        lambda: ir.tensor(tensor.numpy().astype(np.float64)),
        dtype=ir.DataType.DOUBLE, shape=tensor.shape, name=tensor.name,
    )  # fmt: skip


def unplanned_outputs(model: ir.Model, sizes: Mapping[str, int]) -> int:
    """Bytes of what nodes write, each in memory of its own but for what OptNet's networks compute in place.

    Args:
        model: One of `build`.
        sizes: Of values, in bytes by name.
    """
    return sum(
        sizes[str(v.name)] for node in model.graph if not _in_place(node) for v in node.outputs if v.name in sizes
    )


def _in_place(node: ir.Node) -> bool:
    return str(node.name).endswith(IN_PLACE)
