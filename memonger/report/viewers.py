"""A plan as files that other viewers open.

- Chrome's JSON trace, for ui.perfetto.dev and chrome://tracing: one microsecond a step.
- What is in memory at the peak, for speedscope.app: a stack is a path of modules, its weight bytes.
- A copy of the planned model for Netron, with the plan in the metadata of nodes and values.
"""

import json
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir

from memonger.ir.marks import AGAIN
from memonger.plan_file import without_plan
from memonger.report.view import KINDS, MOST_OTHERS, Rectangle, View

Event = dict[str, Any]

PROCESS = 1
STEPS, ARENA = 1, 2
"""Threads: of the steps, and of the live ranges."""


def trace(view: View) -> bytes:
    """The trace in UTF-8."""
    return json.dumps({"displayTimeUnit": "ns", "traceEvents": list(_events(view))}, separators=(",", ":")).encode()


def _events(view: View) -> Iterator[Event]:
    yield _event("M", 0, "process_name", args={"name": view.title})
    yield _event("M", 0, "thread_name", args={"name": "steps"}, tid=STEPS)
    yield _event("M", 0, "thread_name", args={"name": "live ranges"}, tid=ARENA)
    yield from sorted((*_steps(view), *_counters(view), *_ranges(view)), key=lambda event: event["ts"])


def _steps(view: View) -> Iterator[Event]:
    for number, step in enumerate(view.steps):
        args = {"node": step.node, "module": "/".join(step.module), "workspace_bytes": step.workspace}
        yield _event("X", number, step.operator, dur=1, tid=STEPS, cat="step", args=args)


def _counters(view: View) -> Iterator[Event]:
    for number, (step, live) in enumerate(zip(view.steps, view.live.tolist(), strict=True)):
        yield _event("C", number, "bytes in use", args={"arena": live, "workspace": step.workspace})
    yield _event("C", len(view.steps), "bytes in use", args={"arena": 0, "workspace": 0})
    for number in (0, len(view.steps)):
        yield _event("C", number, "arena", args={"bytes": view.plan.arena_bytes})


def _ranges(view: View) -> Iterator[Event]:
    """Live ranges as asynchronous events: they overlap. Those that end at a step come before those that begin there."""
    for number, each in enumerate(view.arena):
        args = {"kind": each.kind, "offset": each.offset, "bytes": each.size, "shape": each.shape, "also": each.others}
        common = {"cat": "tensor", "id": number, "tid": ARENA}
        yield _event("b", each.start, each.name, args=args, **common)
        yield _event("e", each.stop, each.name, **common)


def _event(phase: str, at: int, name: str, **others: Any) -> Event:
    return {"ph": phase, "ts": at, "name": name, "pid": PROCESS, "tid": STEPS, **others}


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


IR_VERSION = 10
"""The first in which values carry metadata."""


def annotated(view: View) -> ir.Model:
    """The copy: an ordinary model, without a plan in it.

    Keys begin with ``memonger.``. A node has ``step``, ``recomputed``, ``workspace_bytes``, ``module``; a value of the
    arena ``offset``, ``bytes``, ``steps``, ``kind``, and ``shared_with`` where others lie at the same place.
    """
    model = without_plan(view.plan.model)
    model.ir_version = max(model.ir_version or 0, IR_VERSION)
    lies = {name: each for each in view.arena for name in (each.name, *each.others)}
    for number, (node, step) in enumerate(zip(model.graph, view.steps, strict=True)):
        node.metadata_props["memonger.step"] = str(number)
        node.metadata_props["memonger.recomputed"] = str(bool(node.metadata_props.pop(AGAIN, "")))
        if step.workspace:
            node.metadata_props["memonger.workspace_bytes"] = str(step.workspace)
        if step.module:
            node.metadata_props["memonger.module"] = "/".join(step.module)
        for value in node.outputs:
            if value.name in lies:
                value.metadata_props.update(_described(value.name, lies[value.name]))
    return model


def _described(name: str, place: Rectangle) -> dict[str, str]:
    facts = {
        "memonger.offset": str(place.offset), "memonger.bytes": str(place.size),
        "memonger.steps": f"{place.start} to {place.stop - 1}", "memonger.kind": place.kind,
    }  # fmt: skip
    if not place.others:
        return facts
    others = [other for other in (place.name, *place.others) if other != name]
    more = f" and {len(others) - MOST_OTHERS} more" if len(others) > MOST_OTHERS else ""
    return facts | {"memonger.shared_with": ", ".join(others[:MOST_OTHERS]) + more}
