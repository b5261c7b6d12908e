"""The memory-efficient DenseNet (Pleiss et al. 2017) on handwritten digits, of any depth and growth rate.

    python examples/densenet.py --depth 40 --growth-rate 12 --dropout 0.1 --efficient

With --efficient the outputs of Concat, BatchNormalization and ReLU are computed again in the backward pass instead of
being kept; with --no-efficient all are kept. The losses are the same bit for bit, the arena isn't.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
from rich.progress import Progress
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import memonger
from memonger.units import format_size

sys.path.insert(0, str(Path(__file__).parent.parent))
from models import layers
from models.builder import Builder, static_dim


def densenet(depth: int, growth: int, dropout: float, batch: int) -> ir.Model:
    """DenseNet-BC of three blocks for 8 × 8 images ("small inputs": a 3 × 3 stem, no pooling) and ten classes.

    Each layer reads the concatenation of all before it, as one Concat: that is what makes dropping it cheap.
    """
    count = (depth - 4) // 6  # a layer is two convolutions; stem, two transitions and classifier are four more
    if depth < 10 or (depth - 4) % 6:
        raise SystemExit(f"a depth of {depth} can't be: 4 and a multiple of 6, such as 22, 40 or 100")
    net = Builder("densenet", batch=batch, training=True, seed=0)
    x = layers.conv(net, layers.image_input(net, 1, 8), "stem", 2 * growth, 3)
    for block in (1, 2, 3):
        features = [x]
        for layer in range(1, count + 1):
            with net.scope(f"block{block}/layer{layer}"):
                y = layers.concat(net, features, "concat") if len(features) > 1 else x
                y = layers.relu(net, layers.batch_norm(net, y, "bn1"), "relu1")
                y = layers.conv(net, y, "conv1", 4 * growth, 1)
                y = layers.relu(net, layers.batch_norm(net, y, "bn2"), "relu2")
                features.append(layers.dropout(net, layers.conv(net, y, "conv2", growth, 3), "dropout", dropout))
        with net.scope(f"block{block}/end"):
            x = layers.relu(net, layers.batch_norm(net, layers.concat(net, features, "concat"), "bn"), "relu")
            if block < 3:
                x = layers.conv(net, x, "conv", static_dim(x, 1) // 2, 1)
                x = layers.average_pool(net, x, "pool", 2)
    x = layers.global_pool(net, x, "pool")
    layers.classify(net, layers.linear(net, x, "classifier", 10))
    return net.model()


def main() -> None:
    """Plan, train, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depth", type=int, default=22)
    parser.add_argument("--growth-rate", type=int, default=12)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--efficient", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    train, _, labels, _ = train_test_split(images, labels.astype(np.int64), test_size=0.2, random_state=0)

    forward = densenet(options.depth, options.growth_rate, options.dropout, options.batch)
    optimizer = memonger.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    training = memonger.differentiate(forward, loss="loss", optimizer=optimizer)
    plan = memonger.search_plan(training, strategy="cheap" if options.efficient else "none")
    print(
        f"DenseNet-BC, depth {options.depth}, growth rate {options.growth_rate}: arena {format_size(plan.arena_bytes)} "
        f"(with all kept {format_size(plan.peak_before_bytes or 0)}), {len(plan.recomputed)} steps recomputed, "
        f"parameters and state {format_size(plan.parameter_bytes)}"
    )

    trainer = memonger.TrainingSession(plan)
    generator, losses = np.random.default_rng(0), []
    steps = len(train) // options.batch
    with Progress() as progress:
        task = progress.add_task("training", total=options.epochs * steps)
        for _ in range(options.epochs):
            order = generator.permutation(len(train))
            for step in range(steps):
                part = order[step * options.batch : (step + 1) * options.batch]
                losses.append(trainer.step({"image": train[part], "labels": labels[part]}))
                progress.update(task, advance=1, description=f"loss {losses[-1]:.3f}")
    print(f"mean loss of the first epoch {np.mean(losses[:steps]):.4f}, of the last {np.mean(losses[-steps:]):.4f}")


if __name__ == "__main__":
    main()
