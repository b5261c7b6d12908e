"""onnxruntime's contestants: stock sessions, and memonger's plans."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.side_by_side.job import Job

Arrays = Mapping[str, np.ndarray]


class StockRunner:
    """Stock onnxruntime in inference on the CPU."""

    def __init__(self, job: Job, arrays: Arrays) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = job.threads
        options.add_free_dimension_override_by_name("batch", len(arrays["x"]))
        if job.mode == "requested":
            options.enable_cpu_mem_arena = False
        self.session = onnxruntime.InferenceSession(job.model, options, providers=["CPUExecutionProvider"])
        self.feeds, self.found = {"x": arrays["x"]}, np.empty(0)

    def step(self) -> float | None:
        """Infer the batch; done when this returns."""
        self.found = np.empty(0)  # or the last run's would be there beside this one's
        self.found = self.session.run(["scores"], self.feeds)[0]
        return None

    def outputs(self) -> np.ndarray:
        """What the last run computed."""
        return self.found

    def resting_bytes(self) -> int:
        """Bytes of tensors that are there between steps, weights aside."""
        return self.found.nbytes


class PlannedRunner:
    """A plan; on a GPU it trains, and inputs lie there."""

    def __init__(self, job: Job, arrays: Arrays) -> None:
        import memonger

        options: dict[str, Any] = {"intra_op_threads": job.threads, "check_order": False}
        if job.cuda:
            options["device"] = job.device
        self.training, self.found = job.training, np.empty(0)
        names = ("x", "labels") if job.training else ("x",)
        self.feeds = {name: _on_device(arrays[name], job) for name in names}
        if job.training:
            trainer = memonger.TrainingSession(Path(job.model), **options)
            self.call: Any = lambda: trainer.step(self.feeds)
        else:
            session = memonger.Session(Path(job.model), **options)
            self.call = lambda: session.run(self.feeds, copy=False)

    def step(self) -> float | None:
        """Train on the batch and return the loss, or infer it; done when this returns."""
        found = self.call()
        if self.training:
            return float(found)
        self.found = found["scores"]
        return None

    def outputs(self) -> np.ndarray:
        """What the last run in inference computed."""
        return self.found

    def resting_bytes(self) -> int:
        """Bytes of tensors that are there between steps, weights aside: outputs lie in the arena."""
        return 0


def _on_device(array: np.ndarray, job: Job) -> Any:
    """The array itself on the CPU; on a GPU a copy there, which sessions read where it lies."""
    if not job.cuda:
        return array
    import onnxruntime

    return onnxruntime.OrtValue.ortvalue_from_numpy(array, "cuda", job.index)
