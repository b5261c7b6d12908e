"""Triton's Python backend: runs a memonger.Session."""

import json
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from memonger.errors import MemongerError
from memonger.export.protocol import message
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
        """Answer requests, in as few runs as the plans allow where batches are formed. A bad one gets its error."""
        feeds = [{tensor.name(): tensor.as_numpy() for tensor in request.inputs()} for request in requests]
        return [_response(answer) for answer in self.model.answer(feeds, together=self.batched)]


def _response(answer: Any) -> Any:
    if isinstance(answer, MemongerError):
        return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(message(answer)))
    return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor(*item) for item in answer.items()])
