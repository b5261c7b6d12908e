"""One contestant in a process of its own: ``python -m benchmarks.training.side_by_side.worker JOB.json``.

Its first answer is what it took until it was ready, then it takes as many steps as it is asked for (see
`memonger.runtime.worker`). What fails is said in a line, too.
"""

import gc
import importlib
import json
import sys
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.training.side_by_side import networks
from benchmarks.training.side_by_side.job import STEPS, WARM, Job, load_cuda_libraries
from memonger.runtime.worker import reason, say, serve_times


class Runner(Protocol):
    """A contestant."""

    def step(self) -> float: ...

    def resting_bytes(self) -> int: ...


def runner(job: Job, arrays: dict[str, np.ndarray]) -> Runner:
    """The contestant's network, loaded."""
    if job.library == "torch":
        from benchmarks.training.side_by_side.torch_peer import TorchRunner

        return TorchRunner(job, arrays)
    from benchmarks.training.side_by_side.onnx_peer import PlannedRunner

    return PlannedRunner(job, arrays)


def _import(job: Job) -> None:
    """What is resident before the network is made: the libraries themselves aren't counted."""
    if job.library == "torch":
        import torch

        with torch.device("meta"):
            networks.build(job.network, job.options)  # what it imports
        if job.mode == "compile":
            importlib.import_module("torch._inductor.compile_fx")

        torch.set_num_threads(job.threads)
        return
    if job.cuda:
        load_cuda_libraries()
    import onnxruntime  # noqa: F401

    import memonger.training_session  # noqa: F401


def ready(job: Job) -> tuple[Runner, dict[str, Any]]:
    """Load, step `WARM` times, then `STEPS` times with the peak watched.

    Returns: the contestant, and its figures: ``peak``, most bytes of this process's own over what was resident before
    the network was made; ``rest``, of these what stayed between the warm steps without being a tensor. Both are None
    where the system doesn't tell.
    """
    from memonger.runtime import process_memory

    known = process_memory.is_measurable()
    with np.load(job.inputs) as archive:
        arrays = {name: archive[name] for name in archive.files}
    _import(job)
    gc.collect()
    gc.freeze()  # imports are a million objects, and each look at the memory collects garbage first
    before = process_memory.settle() if known else 0
    contestant = runner(job, arrays)
    loaded = process_memory.settle() if known else 0
    losses = [contestant.step() for _ in range(WARM)]
    rest: int | None = loaded - before - job.weight_bytes  # momentum is zero pages until the first step
    settled = process_memory.settle() if known else 0
    if job.library == "torch":
        rest = settled - before - contestant.resting_bytes()
    if known:
        process_memory.reset_peak()
    losses += [contestant.step() for _ in range(STEPS)]
    peak = process_memory.resident().peak - before if known else None
    np.savez(job.results, values=np.array(losses))
    return contestant, {"peak": peak, "rest": rest if known else None}


def main() -> None:
    """Serve one job."""
    try:
        contestant, figures = ready(Job(**json.loads(Path(sys.argv[1]).read_text())))
        say(figures)
        serve_times(contestant.step)
    except Exception as error:  # whatever a contestant dies of is its row in the table
        say({"failed": reason(error)})


if __name__ == "__main__":
    main()
