"""The largest size that fits a memory, and what a run takes: ``python -m benchmarks.planning.fit [NAME ...]``.

For each network `memonger.fit` answers on the CPU, and the planned file is then run in a process of its own, whose
memory is measured beside the loaded model: arena, workspace and what a run takes besides. Weights and inputs are added
as counted. One size more is proven not to fit, or it is said how far the smallest plan found is above the memory.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import memonger
import models
from benchmarks.machine import MIB, Table, chosen, keep, stamp
from memonger.cli import measure_steps
from memonger.cli.measure_steps import MeasuredTrainer
from memonger.runtime import feeds as feeding
from memonger.runtime.measure import MeasuredSession, RunJob
from memonger.runtime.program import inputs_of
from memonger.runtime.trainer import Trainer

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
TABLE = Table(
    "network<17", "mode<11", "vary<7", "nodes>6", "memory MiB>11.0f", "size>7", "total MiB>10.1f", "measured MiB>13.1f",
    "extra cost>11.1%", "bound MiB>10.1f", "one more<8", "over by>9.2%", "s>7.1f",
    missing="-",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A network and the memory it is to fit.

    Attributes:
        make: Makes the model, its dimension open.
        memory: Bytes.
        vary: The dimension.
        options: Of the plan.
    """

    make: Callable[[], onnx.ModelProto]
    memory: int
    vary: str = "batch"
    options: dict[str, Any] = field(default_factory=dict)


def network(name: str, **settings: object) -> Callable[[], onnx.ModelProto]:
    """A network of `models` with an open batch."""
    return lambda: models.build(name, batch=None, **settings)


def light(name: str) -> Callable[[], onnx.ModelProto]:
    """One of onnx's light models, its first dimension opened."""

    def make() -> onnx.ModelProto:
        model = onnx.load(LIGHT / f"light_{name}.onnx")
        weights = {tensor.name for tensor in model.graph.initializer}
        for value in (*model.graph.input, *model.graph.output):
            if value.name not in weights:
                value.type.tensor_type.shape.dim[0].dim_param = "batch"
        return model

    return make


def attention() -> onnx.ModelProto:
    """Four heads of self-attention over an open sequence, whose scores grow with its square."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]>
        attention (float[1,seq,256] x) => (float[1,seq,256] y) {
            shape = Constant<value = int64[4] {0, 0, 4, 64}>()
            flat = Constant<value = int64[3] {0, 0, 256}>()
            q0 = MatMul(x, q)  q1 = Reshape(q0, shape)  q2 = Transpose<perm=[0,2,1,3]>(q1)
            k0 = MatMul(x, k)  k1 = Reshape(k0, shape)  k2 = Transpose<perm=[0,2,3,1]>(k1)
            v0 = MatMul(x, v)  v1 = Reshape(v0, shape)  v2 = Transpose<perm=[0,2,1,3]>(v1)
            s0 = MatMul(q2, k2)  s1 = Softmax(s0)  s2 = MatMul(s1, v2)
            m0 = Transpose<perm=[0,2,1,3]>(s2)  m1 = Reshape(m0, flat)  m2 = MatMul(m1, o)  y = Add(m2, x)
        }"""
    )
    generator = np.random.default_rng(0)
    for name in "qkvo":
        array = generator.standard_normal((256, 256)).astype(np.float32) / 16
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


TRAINING = {"loss": "loss", "optimizer": memonger.SGD(lr=0.1, momentum=0.9)}
CASES = {
    "resnet18": Case(network("resnet18"), 256 * MIB),
    "resnet50": Case(network("resnet50"), 512 * MIB),
    "densenet121": Case(network("densenet121"), 256 * MIB),
    "mobilenet_v2": Case(network("mobilenet_v2"), 256 * MIB),
    "googlenet": Case(network("googlenet"), 256 * MIB),
    "gpt": Case(network("gpt"), 256 * MIB),
    "light squeezenet": Case(light("squeezenet"), 128 * MIB),
    "light shufflenet": Case(light("shufflenet"), 128 * MIB),
    "attention": Case(attention, 256 * MIB, "seq"),
    "resnet50 sliced": Case(network("resnet50"), 256 * MIB, options={"chunks": "auto"}),
    "mobilenet sliced": Case(network("mobilenet_v2"), 256 * MIB, options={"chunks": "auto"}),
    "gpt sliced": Case(network("gpt"), 256 * MIB, options={"chunks": "auto"}),
    "vit": Case(network("vit", training=True), 128 * MIB, options=TRAINING),
    "resnet18 small": Case(network("resnet18", training=True, image=32, width=0.5), 128 * MIB, options=TRAINING),
    "gpt training": Case(network("gpt", training=True), 128 * MIB, options=TRAINING),
}


def row(name: str, case: Case, folder: Path) -> str:
    """A network's row."""
    path, planned = folder / "model.onnx", folder / "planned.onnx"
    onnx.save(case.make(), path)
    begin = time.perf_counter()
    options = {"chunks": "off", "mode": "training" if "loss" in case.options else "inference", **case.options}
    found = memonger.fit(path, case.memory, case.vary, device="cpu", **options)
    seconds = time.perf_counter() - begin
    plan, beyond = found.plan, found.beyond
    assert plan is not None
    plan.save(planned)
    taken = (measured if plan.training is None else measured_steps)(plan, planned, folder)
    over = None if beyond is None or beyond.total_bytes is None else beyond.total_bytes / found.memory - 1
    return TABLE.row(
        name, plan.mode, case.vary, len(plan.graph.nodes), found.memory / MIB, found.size, plan.total_bytes / MIB,
        taken, plan.overhead, (found.lower_bound_bytes or 0) / MIB,
        "-" if beyond is None else beyond.status, over, seconds,
    )  # fmt: skip


def measured(plan: memonger.Plan, planned: Path, folder: Path) -> float | None:
    """MiB that a run takes: measured beside the loaded model, with weights and inputs as counted. None: not known."""
    np.savez(folder / "inputs.npz", **feeding.random_feeds(inputs_of(plan.model.graph)))
    job = (str(planned), str(folder / "inputs.npz"), str(folder / "outputs.npz"))
    with MeasuredSession(RunJob(*job, planned=True), folder, "fit") as session:
        return _in_all(plan, session.loaded["peak_bytes"])


def _in_all(plan: memonger.Plan, peak: int | None) -> float | None:
    return None if peak is None else (peak + plan.parameter_bytes + plan.input_bytes) / MIB


def measured_steps(plan: memonger.Plan, planned: Path, folder: Path) -> float | None:
    """The same of training steps."""
    np.savez(folder / "inputs.npz", **feeding.random_feeds(Trainer(plan).inputs))
    job = (str(planned), str(folder / "inputs.npz"), str(folder / "outputs.npz"))
    with MeasuredTrainer(measure_steps.StepsJob(*job, planned=True, untimed=2), folder, "fit") as trainer:
        return _in_all(plan, trainer.loaded["peak_bytes"])


def table(names: Sequence[str]) -> Iterator[str]:
    """Lines of the table, as they are measured."""
    yield from stamp("planning.fit", ["onnxruntime", "onnx", "numpy"])
    yield "\nThe largest size within a memory: total as predicted, and measured in a run of that size; of one size more"
    yield "(sliced: of the next that was looked at) whether it is proven not to fit, how far the smallest plan that"
    yield "was found is above the memory; seconds in all. Sliced: larger batches run in slices; others in none.\n"
    yield TABLE.heading
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            yield row(name, CASES[name], Path(folder))


def main() -> None:
    """Measure; the table is kept where nothing was left out."""
    names, whole = chosen(__doc__, CASES)
    keep(table(names), Path(__file__).with_suffix(".txt") if whole else None)


if __name__ == "__main__":
    main()
