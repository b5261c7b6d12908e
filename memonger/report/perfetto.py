"""A plan as Chrome's JSON trace, which ui.perfetto.dev and chrome://tracing open: one microsecond a step."""

import json
from collections.abc import Iterator
from typing import Any

from memonger.report.view import View

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
