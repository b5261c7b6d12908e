"""Loads the planned model beside this file so that onnxruntime runs it as planned. Needs onnxruntime alone."""

import json
from pathlib import Path
from typing import Any

import onnxruntime

HERE = Path(__file__).resolve().parent
NAMED = {
    "graph_optimization_level": onnxruntime.GraphOptimizationLevel,
    "execution_mode": onnxruntime.ExecutionMode,
    "execution_order": onnxruntime.ExecutionOrder,
}


def options() -> onnxruntime.SessionOptions:
    """The session options of session_options.json."""
    made = onnxruntime.SessionOptions()
    for key, value in json.loads((HERE / "session_options.json").read_text()).items():
        setattr(made, key, getattr(NAMED[key], value) if key in NAMED else value)
    return made


def session(level: str | None = None, **arguments: Any) -> onnxruntime.InferenceSession:
    """A session of the planned model, on the CPU if nothing else is asked for.

    With a level, ``ORT_ENABLE_ALL`` say, onnxruntime optimizes the model first: then it may run another order.
    """
    made = options()
    if level is not None:
        made.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    arguments.setdefault("providers", ["CPUExecutionProvider"])
    return onnxruntime.InferenceSession(HERE / "model.planned.onnx", made, **arguments)
