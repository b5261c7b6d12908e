"""Triton's Python backend: runs a memonger.Session."""

import json
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from memonger.export.serving import PlannedModel

HERE = Path(__file__).resolve().parent


class TritonPythonModel:
    """One instance of the model, a process of its own."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Load the plans."""
        settings = json.loads((HERE / "plans.json").read_text())
        self.model = PlannedModel([HERE / name for name in settings["plans"]])
        self.batched = settings["batched"]

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer requests; where batches are formed, all in as few runs as the plans allow."""
        try:
            feeds = [{tensor.name(): tensor.as_numpy() for tensor in request.inputs()} for request in requests]
            found = self.model.run_together(feeds) if self.batched else [self.model.run(one) for one in feeds]
        except Exception as error:
            message = pb_utils.TritonError(str(error))
            return [pb_utils.InferenceResponse(output_tensors=[], error=message) for _ in requests]
        return [
            pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor(*item) for item in outputs.items()])
            for outputs in found
        ]
