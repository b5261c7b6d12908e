"""Triton's Python backend: runs a memonger.Fleet."""

import json
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from memonger.errors import BusyError, MemongerError
from memonger.serving.protocol import message
from memonger.serving.serving import PlannedFleet

PLANS = Path(__file__).resolve().parent / "plans.json"


class TritonPythonModel:
    """One instance, a process of its own."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Load the plans."""
        self.fleet = PlannedFleet.load(PLANS)
        self.batched = json.loads(PLANS.read_text())["batched"]
        self.metrics = []  # Triton drops what nobody refers to
        self.fleet.report_to(self._metric)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer requests, in as few runs as the plans allow where batches are formed. A bad one gets its error."""
        feeds = [{tensor.name(): tensor.as_numpy() for tensor in request.inputs()} for request in requests]
        return [_response(answer) for answer in self.fleet.answer(feeds, together=self.batched)]

    def _metric(self, figure: Any) -> Any:
        """A metric of Triton for a figure of the fleet."""
        kind = pb_utils.MetricFamily.COUNTER if figure.is_counter else pb_utils.MetricFamily.GAUGE
        family = pb_utils.MetricFamily(name=figure.name, description=figure.about, kind=kind)
        made = {key: family.Metric(labels={figure.label: key} if figure.label else {}) for key in figure.values}
        self.metrics.append((family, made))
        return lambda key, value, more: made[key].increment(more) if figure.is_counter else made[key].set(value)


def _response(answer: Any) -> Any:
    if isinstance(answer, MemongerError):
        kinds = pb_utils.TritonError
        error = kinds(message(answer), kinds.UNAVAILABLE if isinstance(answer, BusyError) else kinds.INVALID_ARG)
        return pb_utils.InferenceResponse(output_tensors=[], error=error)
    return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor(*item) for item in answer.items()])
