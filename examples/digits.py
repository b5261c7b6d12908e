"""Train a small convolutional network on scikit-learn's handwritten digits, and serve it with stock onnxruntime.

    pip install 'memonger[cpu,examples]'
    python examples/digits.py --output digits

Writes the planned training model, the trained network and the loss curve into the folder, if one is named.
"""

import argparse
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import onnx
import onnxruntime
from rich.progress import Progress
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import memonger

BATCH = 64
NETWORK = """<ir_version: 10, opset_import: ["": 20]>
digits (float[N,1,8,8] image) => (float[N,10] scores) {
    a = Conv<pads=[1,1,1,1]>(image, conv1)
    b = BatchNormalization(a, scale1, shift1, mean1, variance1)
    c = Relu(b)
    d = Conv<pads=[1,1,1,1]>(c, conv2)
    e = BatchNormalization(d, scale2, shift2, mean2, variance2)
    f = Relu(e)
    g = MaxPool<kernel_shape=[2,2], strides=[2,2]>(f)
    h = Conv<pads=[1,1,1,1]>(g, conv3)
    i = BatchNormalization(h, scale3, shift3, mean3, variance3)
    j = Relu(i)
    k = GlobalAveragePool(j)
    l = Flatten(k)
    m = Dropout(l, ratio)
    scores = Gemm<transB=1>(m, weight, bias)
}"""


def network(seed: int = 0) -> onnx.ModelProto:
    """Three convolutions, 16 to 64 channels, in inference form as any exporter would write it."""
    model = onnx.parser.parse_model(NETWORK)
    generator = np.random.default_rng(seed)
    weights = {"weight": generator.normal(0, 64**-0.5, (10, 64)), "bias": np.zeros(10), "ratio": np.array(0.2)}
    channels = (1, 16, 32, 64)
    for layer in (1, 2, 3):
        shape = (channels[layer], channels[layer - 1], 3, 3)
        weights[f"conv{layer}"] = generator.normal(0, (2 / (9 * shape[1])) ** 0.5, shape)
        ones, zeros = np.ones(shape[0]), np.zeros(shape[0])
        weights |= {f"scale{layer}": ones, f"shift{layer}": zeros, f"mean{layer}": zeros, f"variance{layer}": ones}
    tensors = [onnx.numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()]
    model.graph.initializer.extend(tensors)
    return model


def batches(images: np.ndarray, labels: np.ndarray, generator: np.random.Generator) -> list[dict[str, np.ndarray]]:
    """One epoch in random order, the incomplete batch left out."""
    order = generator.permutation(len(images))
    parts = [order[at : at + BATCH] for at in range(0, len(order) - BATCH + 1, BATCH)]
    return [{"image": images[part], "labels": labels[part]} for part in parts]


def main() -> None:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--output", type=Path, help="a folder for what is made")
    options = parser.parse_args()
    if options.output is not None:
        options.output.mkdir(exist_ok=True)
        train(options.epochs, options.output)
        print(f"wrote training.onnx, digits.onnx and loss.png to {options.output}")
    else:
        with tempfile.TemporaryDirectory() as scratch:
            train(options.epochs, Path(scratch))


def train(epochs: int, folder: Path) -> None:
    """Train, save, serve, and draw the loss."""

    digits = load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    seen, test, labels, truth = train_test_split(images, digits.target.astype(np.int64), test_size=0.2, random_state=0)

    forward = network()
    training = memonger.differentiate(
        memonger.to_training_mode(forward, batch=BATCH),
        loss="softmax_cross_entropy",
        optimizer=memonger.SGD(lr=0.1, momentum=0.9, weight_decay=1e-4),
    )
    plan = memonger.search_plan(training)
    plan.save(folder / "training.onnx")
    print(f"a step takes {plan.arena_bytes:,} bytes of arena beside {plan.parameter_bytes:,} of parameters and state")

    trainer = memonger.TrainingSession(plan)
    generator, losses = np.random.default_rng(0), []
    with Progress() as progress:
        task = progress.add_task("training", total=epochs)
        for epoch in range(epochs):
            rate = 0.1 * 0.5 * (1 + np.cos(np.pi * epoch / epochs))
            losses += [trainer.step(batch, learning_rate=rate) for batch in batches(seen, labels, generator)]
            progress.update(task, advance=1, description=f"loss {losses[-1]:.3f}")

    trainer.export(folder / "digits.onnx", forward)
    session = onnxruntime.InferenceSession(folder / "digits.onnx")
    scores = session.run(None, {"image": test})[0]
    print(f"test accuracy {np.mean(scores.argmax(1) == truth):.2%} on {len(test)} digits, served by stock onnxruntime")

    plt.plot(losses)
    plt.xlabel("step")
    plt.ylabel("loss")
    plt.yscale("log")
    plt.title("Softmax cross-entropy on handwritten digits")
    plt.savefig(folder / "loss.png", dpi=120)


if __name__ == "__main__":
    main()
