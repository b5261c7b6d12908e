"""memonger's contestants: training sessions of plans."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.training.side_by_side.job import Job


class PlannedRunner:
    """A plan that trains; on a GPU inputs lie there."""

    def __init__(self, job: Job, arrays: Mapping[str, np.ndarray]) -> None:
        import memonger

        device: dict[str, Any] = {"device": job.device} if job.cuda else {}
        self.feeds = {name: _on_device(arrays[name], job) for name in ("x", "labels")}
        self.trainer = memonger.TrainingSession(
            Path(job.model), intra_op_threads=job.threads, check_order=False, **device
        )

    def step(self) -> float:
        """Train on the batch and return the loss; done when this returns."""
        return self.trainer.step(self.feeds)

    def resting_bytes(self) -> int:
        """Bytes of tensors that are there between steps, weights aside: outputs lie in the arena."""
        return 0


def _on_device(array: np.ndarray, job: Job) -> Any:
    """The array itself on the CPU; on a GPU a copy there, which sessions read where it lies."""
    if not job.cuda:
        return array
    import onnxruntime

    return onnxruntime.OrtValue.ortvalue_from_numpy(array, "cuda", job.index)
