"""Updates alone beside PyTorch's optimizers: ``python -m benchmarks.updates [--rows NAME ...] [-o FILE]``.

The nodes of a planned training step that update parameters are cut out as a model of their own: gradients are its
inputs, and new contents are bound over the old ones, as in a session; what lies between is in memory of onnxruntime's,
not in an arena. PyTorch's optimizers update the same parameters by the same gradients one by one, with ``foreach`` and
``fused``. Each contestant runs in a process of its own; they take turns. Written to updates.txt where no network is
left out.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx_ir as ir

import memonger
from benchmarks.machine import HERE, MIB, Table, keep, stamp
from benchmarks.side_by_side import networks
from benchmarks.side_by_side.export import export
from benchmarks.side_by_side.turns import apart
from memonger.cli.worker import Worker, reason, say, serve_times
from memonger.devices import CPU
from memonger.ir.extract import extract
from memonger.runtime import ort

ROWS = ("resnet50", "convnext_tiny", "swin_tiny", "bert", "llama")
RATE, MOMENTUM = 1e-3, 0.9
OPTIMIZERS: dict[str, Any] = {"SGD": memonger.SGD(RATE, momentum=MOMENTUM), "AdamW": memonger.AdamW(RATE)}
TORCH = {"one by one": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
CONTESTANTS = (*TORCH, "memonger")
WARM, ROUNDS, RUNS = 3, 9, 3
TABLE = Table(
    "network<16", "optimizer<10", "tensors>8", "MiB>7.1f", "nodes>7", *(f"{name}>11.2f" for name in CONTESTANTS),
    "/ foreach>10.3f", "/ fused>9.3f", "apart>9.1e",
)  # fmt: skip


def write_job(name: str, optimizer: str, folder: Path) -> dict[str, int]:
    """Write the updates of a network's step as a model, and numbers for parameters and gradients; returns counts."""
    size = networks.size_of(name, "cpu")
    export(name, size, folder)
    forward: Any = folder / "forward.onnx"
    plan = memonger.search_plan(
        forward, mode="training", batch=size.batch, loss=memonger.SoftmaxCrossEntropy(), strategy="none",
        optimizer=OPTIMIZERS[optimizer], device="cpu",
    )  # fmt: skip
    roles = plan.training
    assert roles is not None
    nodes = [node for node in plan.model.graph if str(node.name).startswith("update/")]
    new = [value for node in nodes for value in node.outputs if value.name in roles.updates.values()]
    alone = extract(plan.model, nodes, new)
    ir.save(alone, folder / "updates.onnx")
    old_of, gradient_of = {new: old for old, new in roles.updates.items()}, dict(roles.whole_gradients)
    rng = np.random.default_rng(0)
    arrays = {
        str(v.name): rng.standard_normal(v.shape.numpy()).astype(np.float32)
        for v in alone.graph.inputs
        if v.shape is not None and v.name in {*roles.parameters, *gradient_of.values()}
    }
    np.savez(folder / "arrays.npz", **arrays)
    parameters = [name for name in roles.parameters if name in arrays]
    (folder / "job.json").write_text(
        json.dumps(
            {
                "parameters": parameters,
                "gradients": [gradient_of[name] for name in parameters],
                "old_of": {str(v.name): old_of[str(v.name)] for v in new},
                "scalars": {name: role for role, name in roles.scalars.items()},
                "optimizer": optimizer,
            }
        )
    )
    sizes = [arrays[name].nbytes for name in parameters]
    return {"tensors": len(sizes), "bytes": sum(sizes), "nodes": len(nodes)}


Step = tuple[Callable[[], object], Callable[[], list[np.ndarray]]]


def torch_step(job: Any, arrays: dict[str, np.ndarray], how: dict[str, bool]) -> Step:
    """PyTorch's update of all parameters, and what they are."""
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    parameters = [torch.nn.Parameter(torch.from_numpy(arrays[name])) for name in job["parameters"]]
    for parameter, name in zip(parameters, job["gradients"], strict=True):
        parameter.grad = torch.from_numpy(arrays[name])
    settings: dict[str, Any] = {"lr": RATE, **({"momentum": MOMENTUM} if job["optimizer"] == "SGD" else {}), **how}
    optimizer = getattr(torch.optim, job["optimizer"])(parameters, **settings)
    return optimizer.step, lambda: [p.detach().numpy() for p in parameters]


def planned_step(job: Any, arrays: dict[str, np.ndarray], folder: Path) -> Step:
    """The planned update of all parameters, and what they are."""
    import onnxruntime

    session = ort.make_session(folder / "updates.onnx", CPU, ort.SessionSettings(threads=os.cpu_count() or 1))
    roles, kinds = job["scalars"], {"tensor(float)": np.float32, "tensor(int64)": np.int64}
    held = {value.name: np.zeros(value.shape, kinds[value.type]) for value in session.get_inputs()} | arrays
    steps = [held[name] for name in held if roles.get(name) == "step"]
    for name in (name for name in held if roles.get(name) == "learning_rate"):
        held[name][...] = RATE
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in held.items()}
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for new, old in job["old_of"].items():
        binding.bind_ortvalue_output(new, values[old])

    def step() -> None:
        session.run_with_iobinding(binding)
        for count in steps:
            count += 1

    return step, lambda: [held[name] for name in job["parameters"]]


def work(contestant: str, folder: Path) -> None:
    """Serve one contestant, after a few steps whose result is written."""
    job = json.loads((folder / "job.json").read_text())
    with np.load(folder / "arrays.npz") as archive:
        arrays = {name: archive[name] for name in archive.files}
    how = TORCH.get(contestant)
    step, numbers = planned_step(job, arrays, folder) if how is None else torch_step(job, arrays, how)
    for _ in range(WARM):
        step()
    np.save(folder / f"{contestant}.npy", np.concatenate([array.ravel() for array in numbers()]))
    say({"ready": contestant})
    serve_times(step)


def row(name: str, optimizer: str) -> str:
    """Measure one network's updates."""
    with tempfile.TemporaryDirectory() as text, ExitStack() as stack:
        folder = Path(text)
        figures = write_job(name, optimizer, folder)
        times: dict[str, list[float]] = {contestant: [] for contestant in CONTESTANTS}
        workers = {}
        for contestant in CONTESTANTS:
            arguments = ["--work", contestant, str(folder)]
            worker = stack.enter_context(Worker("benchmarks.updates", arguments, folder / f"{contestant}.err"))
            worker.read()
            workers[contestant] = worker
        for _ in range(ROUNDS):
            for contestant, worker in workers.items():
                times[contestant].append(median(worker.times(RUNS)))
        took = {contestant: 1e3 * median(each) for contestant, each in times.items()}
        ours = took["memonger"]
        difference = apart(*(np.load(folder / f"{name}.npy") for name in ("memonger", "one by one")))
    return TABLE.row(
        name, optimizer, figures["tensors"], figures["bytes"] / MIB, figures["nodes"], *took.values(),
        ours / took["foreach"], ours / took["fused"], difference,
    )  # fmt: skip


def lines(names: Sequence[str], command: str) -> Iterator[str]:
    """The table as it grows."""
    yield "Updates of all parameters alone: milliseconds, beside PyTorch's optimizers"
    yield from stamp(command, ("onnxruntime", "torch", "transformers", "numpy"))
    yield f"{os.cpu_count()} threads; medians of {ROUNDS} turns of {RUNS} updates; MiB: of the parameters"
    yield f"apart: the largest difference of parameters after {WARM} updates, over the largest of them"
    yield from ("", TABLE.heading)
    for name in names:
        for optimizer in OPTIMIZERS:
            yield row(name, optimizer)


def main() -> None:
    """Measure, or work for whoever does."""
    if sys.argv[1:2] == ["--work"]:
        try:
            work(sys.argv[2], Path(sys.argv[3]))
        except Exception as error:
            say({"failed": reason(error)})
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", nargs="*", choices=tuple(networks.NETWORKS), default=ROWS, metavar="NAME")
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    whole = tuple(asked.rows) == ROWS
    named = "" if whole else f" --rows {' '.join(asked.rows)}"
    keep(lines(asked.rows, f"updates{named}"), asked.output or (HERE / "updates.txt" if whole else None))


if __name__ == "__main__":
    main()
