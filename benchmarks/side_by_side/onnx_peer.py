"""onnxruntime's contestants: stock sessions, and memonger's plans."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.side_by_side.job import Job

Arrays = Mapping[str, np.ndarray]


def stock_providers(job: Job) -> list[Any]:
    """Execution providers of a stock session: float32 as it is, memory as it comes or as requested."""
    if not job.cuda:
        return ["CPUExecutionProvider"]
    options = {"device_id": str(job.index), "use_tf32": str(int(job.tf32))}
    if job.mode == "requested":
        options["arena_extend_strategy"] = "kSameAsRequested"
    return [("CUDAExecutionProvider", options), "CPUExecutionProvider"]


class StockRunner:
    """Stock onnxruntime in inference; on a GPU inputs and outputs lie there."""

    def __init__(self, job: Job, arrays: Arrays) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = job.threads
        options.add_free_dimension_override_by_name("batch", len(arrays["x"]))
        if job.mode == "requested" and not job.cuda:
            options.enable_cpu_mem_arena = False
        self.session = onnxruntime.InferenceSession(job.model, options, providers=stock_providers(job))
        if job.cuda and "CUDAExecutionProvider" not in self.session.get_providers():
            raise RuntimeError("onnxruntime fell back to the CPU: its CUDA provider couldn't be loaded")
        self.feeds, self.found = {"x": arrays["x"]}, np.empty(0)
        self.binding = self._bound(job) if job.cuda else None

    def _bound(self, job: Job) -> Any:
        import onnxruntime

        binding = self.session.io_binding()
        value = onnxruntime.OrtValue.ortvalue_from_numpy(self.feeds["x"], "cuda", job.index)
        binding.bind_ortvalue_input("x", value)
        binding.bind_output("scores", "cuda", job.index)
        return binding

    def step(self) -> float | None:
        """Infer the batch; done when this returns."""
        if self.binding is not None:
            self.session.run_with_iobinding(self.binding)
            self.binding.synchronize_outputs()
        else:
            self.found = np.empty(0)  # or the last run's would be there beside this one's
            self.found = self.session.run(["scores"], self.feeds)[0]
        return None

    def outputs(self) -> np.ndarray:
        """What the last run computed."""
        return self.found if self.binding is None else self.binding.copy_outputs_to_cpu()[0]

    def resting_bytes(self) -> int:
        """Bytes of tensors that are there between steps, weights aside."""
        return self.found.nbytes


class PlannedRunner:
    """A plan; on a GPU inputs and outputs lie there."""

    def __init__(self, job: Job, arrays: Arrays) -> None:
        import memonger

        options: dict[str, Any] = {"intra_op_threads": job.threads, "check_order": False}
        if job.cuda:
            alone = "on" if job.mode == "graph" else "off"
            options |= {"device": job.device, "cuda_graph": "auto" if job.training else alone}
        self.training, self.found = job.training, None
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
        found: Any = self.found
        if isinstance(found, np.ndarray):
            return found
        if hasattr(found, "numpy"):  # an OrtValue, which copies from the device
            return np.asarray(found.numpy())
        import torch

        return torch.from_dlpack(found).cpu().numpy()

    def resting_bytes(self) -> int:
        """Bytes of tensors that are there between steps, weights aside: outputs lie in the arena."""
        return 0


def _on_device(array: np.ndarray, job: Job) -> Any:
    """The array itself on the CPU; on a GPU a copy there, which sessions read where it lies."""
    if not job.cuda:
        return array
    import onnxruntime

    return onnxruntime.OrtValue.ortvalue_from_numpy(array, "cuda", job.index)
