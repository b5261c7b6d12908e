"""A small trainable model and data for it, for tests of planning and training."""

import numpy as np
import onnx

import memonger

BATCH, FEATURES, HIDDEN, CLASSES = 16, 12, 24, 5


def classifier(seed: int = 0) -> onnx.ModelProto:
    """Two layers of weights on rows of numbers, one bias used at both ends; class scores ``y``."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]>
        classifier (float[{BATCH},{FEATURES}] x) => (float[{BATCH},{CLASSES}] y) {{
            h = Gemm<transB=1>(x, "first.weight", "first.bias")
            r = Relu(h)
            z = Gemm<transB=1>(r, "hidden.weight", "first.bias")
            s = Relu(z)
            y = Gemm<transB=1>(s, "last.weight")
        }}"""
    )
    generator = np.random.default_rng(seed)
    shapes = {
        "first.weight": (HIDDEN, FEATURES),
        "first.bias": (HIDDEN,),
        "hidden.weight": (HIDDEN, HIDDEN),
        "last.weight": (CLASSES, HIDDEN),
    }
    for name, shape in shapes.items():
        array = generator.standard_normal(shape).astype(np.float32) * 0.3
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs and labels that can be learned: the class is the largest of the first features."""
    x = np.random.default_rng(seed).standard_normal((BATCH, FEATURES)).astype(np.float32)
    return {"x": x, "labels": x[:, :CLASSES].argmax(1).astype(np.int64)}


def plan(optimizer: object = None, **options: object) -> memonger.Plan:
    """The classifier's training plan."""
    chosen = optimizer or memonger.SGD(lr=0.2, momentum=0.9)
    training = memonger.differentiate(classifier(), loss="softmax_cross_entropy", optimizer=chosen, **options)
    return memonger.search_plan(training)


def trained(plan: memonger.Plan, steps: int) -> tuple[tuple[float, ...], dict[str, np.ndarray]]:
    """Losses of so many steps on one thread, on the same random numbers each time, and the state after them."""
    trainer = memonger.TrainingSession(plan, intra_op_threads=1, random_key=7)
    losses = tuple(trainer.step(_feeds(trainer, seed)) for seed in range(steps))
    return losses, trainer.state_dict()


def _feeds(trainer: memonger.TrainingSession, seed: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    feeds = {}
    for value in trainer.inputs:
        shape = tuple(int(dim) for dim in value.shape)
        kind = value.dtype.numpy()
        feeds[value.name] = (
            generator.integers(0, 2, shape).astype(kind) if kind.kind == "i" else generator.random(shape).astype(kind)
        )
    return feeds
