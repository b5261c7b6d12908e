"""Compiles the planned model beside this file with OpenVINO."""

import json
from pathlib import Path
from typing import Any

import openvino

HERE = Path(__file__).resolve().parent


def compiled(device: str = "CPU", **options: Any) -> openvino.CompiledModel:
    """The model, compiled: one stream an instance, in the model's own precision."""
    settings = json.loads((HERE / "memonger.json").read_text())
    chosen: dict[str, Any] = {"NUM_STREAMS": str(settings["instances"]), "INFERENCE_PRECISION_HINT": "f32"}
    if settings["threads"]:
        chosen["INFERENCE_NUM_THREADS"] = settings["threads"]
    return openvino.Core().compile_model(HERE / "model.onnx", device, {**chosen, **options})
