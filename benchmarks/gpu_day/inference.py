"""A network at a batch: planned, with CUDA graphs and without, beside stock onnxruntime of the same build."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx

import memonger
import models
from benchmarks.gpu_day.contest import Feeds, Planned, Stock, apart, contest, feeds_of, same_bits
from benchmarks.gpu_day.stages import INFERENCE, TINY, Settings
from memonger.devices import Cuda

TOKENS = 50  # words and labels lie below it
ON_THE_HOST = 16  # samples at most: more take the CPU too long


def measure(item: str, settings: Settings, seconds: float) -> dict[str, Any]:
    """The row of ``network:batch``."""
    name, batch = item.rsplit(":", 1)
    options = (TINY if settings.rehearse else INFERENCE)[name]
    path, planned = (Path(settings.folder) / f"{name}-{batch}{kind}.onnx" for kind in ("", ".planned"))
    onnx.save(models.build(name, batch=int(batch), **options), path)
    feeds, cuda = feeds_of(path, TOKENS), Cuda(tf32=settings.tf32)
    plan = memonger.search_plan(path, mode="inference", device=settings.device, cuda=cuda)
    plan.save(planned)
    same = Stock(path, feeds, settings.device, cuda=cuda)
    same.run()
    tf32 = {"use_tf32": str(int(settings.tf32))}
    makers: dict[str, Callable[[], Any]] = {
        "planned": lambda: Planned(planned, feeds, settings.device, "off"),
        "graph": lambda: Planned(planned, feeds, settings.device, "on"),
        "requested": lambda: Stock(path, feeds, settings.device, {**tf32, "arena_extend_strategy": "kSameAsRequested"}),
        "default": lambda: Stock(path, feeds, settings.device, tf32),
    }
    sessions, rows = contest(makers, settings.device)
    expected, host = same.outputs(), _on_the_cpu(path, feeds) if int(batch) <= ON_THE_HOST else None
    for key, session in sessions.items():
        found = session.outputs()
        rows[key] |= {"same_bits": same_bits(found, expected), "apart": None if host is None else apart(found, host)}
    assert plan.predicted_bytes is not None
    return {
        "predicted": plan.predicted_bytes + plan.parameter_bytes,
        "arena": plan.arena_bytes,
        "workspace": plan.workspace_bytes,
        "parameters": plan.parameter_bytes,
        "planning_seconds": plan.planning_seconds,
        "nodes": len(plan.graph.nodes),
        "on_the_host": len(plan.host),
        "contestants": rows,
    }


def _on_the_cpu(path: Path, feeds: Feeds) -> list[Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feeds)))
