"""What is in memory at the peak, as speedscope.app reads it: a stack is a path of modules, its weight bytes."""

import json
from typing import Any

from memonger.report.view import KINDS, View

SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def profile(view: View) -> bytes:
    """The profile in UTF-8: one sample a tensor that is in use at the peak, workspace included."""
    frames: dict[tuple[str, str], int] = {}
    samples: list[list[int]] = []
    weights: list[int] = []
    for each in view.rectangles:
        if not (each.start <= view.peak_step < each.stop and each.kind not in ("input", "weight")):
            continue
        step = view.steps[each.start]
        modules = [(name, "/".join(step.module[: depth + 1])) for depth, name in enumerate(step.module)]
        stack = [*modules, (f"{step.operator} {each.name} {each.shape}".rstrip(), KINDS[each.kind])]
        samples.append([frames.setdefault(frame, len(frames)) for frame in stack])
        weights.append(each.size)
    node = view.steps[view.peak_step].node if view.steps else ""
    one: dict[str, Any] = {
        "type": "sampled", "name": f"in memory at the peak, step {view.peak_step} ({node})", "unit": "bytes",
        "startValue": 0, "endValue": sum(weights), "samples": samples, "weights": weights,
    }  # fmt: skip
    return json.dumps({
        "$schema": SCHEMA, "name": view.title, "exporter": "memonger", "activeProfileIndex": 0,
        "shared": {"frames": [{"name": name, "file": file} for name, file in frames]}, "profiles": [one],
    }).encode()  # fmt: skip
