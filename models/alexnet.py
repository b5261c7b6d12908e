"""AlexNet (Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks"): one column of five
convolutions and three linear layers, 61,100,840 parameters, as torchvision has it. At image sizes other than 224 the
first linear layer is as wide as the features are."""

from models import layers
from models.builder import Builder


def alexnet(net: Builder, *, image: int = 224, classes: int = 1000, width: float = 1.0, dropout: float = 0.5) -> None:
    """Write the network; `width` multiplies all hidden channels."""
    c64, c192, c256, c384, c4096 = (max(1, round(c * width)) for c in (64, 192, 256, 384, 4096))
    x = layers.image_input(net, 3, image)
    x = layers.conv(net, x, "conv1", c64, 11, stride=4, pad=2, bias=True)
    x = layers.relu(net, x, "conv1.relu")
    x = net.mark(layers.max_pool(net, x, "pool1", 3, 2))
    x = layers.conv_relu(net, x, "conv2", c192, 5)
    x = net.mark(layers.max_pool(net, x, "pool2", 3, 2))
    x = layers.conv_relu(net, x, "conv3", c384, 3)
    x = layers.conv_relu(net, x, "conv4", c256, 3)
    x = layers.conv_relu(net, x, "conv5", c256, 3)
    x = net.mark(layers.max_pool(net, x, "pool5", 3, 2))
    x = net.op("Flatten", [x], "flatten", axis=1)
    for name in ("fc6", "fc7"):
        x = layers.dropout(net, x, f"{name}.dropout", dropout)
        x = layers.linear(net, x, name, c4096, gain=layers.RELU_GAIN)
        x = net.mark(layers.relu(net, x, f"{name}.relu"))
    layers.classify(net, layers.linear(net, x, "fc8", classes))
