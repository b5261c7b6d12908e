"""A plan as one page of HTML that opens without a network: a map of the arena with everything that is known of it.

``page.html``, ``page.css`` and the scripts are put together with the data, which are compressed JSON in base64: no name
in it can end a script. The page may load nothing and run no script but its own (a Content-Security-Policy with the
digests of both).
"""

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from math import isfinite
from string import Template
from typing import Any

import numpy as np

from memonger.report.chunks import CHUNKS_NOTE, axis_words, chunks_lines
from memonger.report.memory_count import COUNT_NOTE, KIND_NAMES
from memonger.report.summary import headline, plan_record
from memonger.report.view import KINDS, MOST_OTHERS, View
from memonger.units import shown

SCRIPTS = ("data", "map", "page")

POINTS = 2000
"""Most points of the curve before planning: of each of as many stretches of steps the highest."""

_SESSION = ("latency_seconds", "peak_bytes", "bitwise_equal", "max_abs_diff")


def page(view: View, frontier: Sequence[Mapping[str, Any]] = (), measured: Mapping[str, Any] | None = None) -> bytes:
    """The page, in UTF-8.

    Args:
        view: The plan.
        frontier: Records of other plans of the model, as of ``memonger pareto --json``.
        measured: What a run was measured to take: the record of ``memonger run --compare --json``.
    """
    data = record(view, frontier, measured)
    files = resources.files(__name__)
    style, frame = (files.joinpath(f"page.{kind}").read_text("utf-8") for kind in ("css", "html"))
    script = "\n".join(files.joinpath(f"{part}.js").read_text("utf-8") for part in SCRIPTS)
    text = Template(frame).substitute(
        title=html.escape(shown(view.title)),
        summary=html.escape(shown(" ".join((*headline(data["plan"]), *chunks_lines(view.plan))))),
        style=style,
        script=script,
        style_digest=_digest(style),
        script_digest=_digest(script),
        data=encode(data),
    )
    return text.encode()


def encode(data: Any) -> str:
    """Data as compressed JSON in base64; the same data give the same text."""
    return base64.b64encode(gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0)).decode()


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def record(view: View, frontier: Sequence[Mapping[str, Any]], measured: Mapping[str, Any] | None) -> dict[str, Any]:
    """All that the page shows: figures, and steps and rectangles in columns. What recurs is a number into a table."""
    plan, before = view.plan, view.live_before
    outcome = plan.outcome
    return {
        "title": shown(view.title),
        "plan": plan_record(plan, view.title, None),
        "memory": {"kinds": KIND_NAMES, "note": COUNT_NOTE},
        "chunks": {"note": CHUNKS_NOTE, "axes": [axis_words(band) for band in plan.chunks]},
        "trains": plan.training is not None,
        "kinds": [{"name": name, "meaning": meaning} for name, meaning in KINDS.items()],
        "steps": _step_columns(view),
        "rectangles": _rectangle_columns(view),
        "before": None if before is None else {"steps": len(before), "bytes": _thinned(before)},
        "candidates": [asdict(each) for each in (outcome.candidates if outcome else ())],
        "frontier": [_figures(each, ("total_bytes", "peak_bytes", "overhead")) for each in frontier],
        "measured": None if measured is None else _measured(measured),
    }


def _measured(run: Mapping[str, Any]) -> dict[str, Any]:
    others = ("stock_session", "default_session")
    return _figures(run, _SESSION) | {name: _figures(run[name], _SESSION) if run.get(name) else None for name in others}


def _figures(given: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Of a record what the page shows; None in place of what is no number, for which JSON has no form."""
    figures = {key: given.get(key) for key in keys}
    return {key: None if isinstance(value, float) and not isfinite(value) else value for key, value in figures.items()}


def _step_columns(view: View) -> dict[str, Any]:
    operators, modules = _Numbers(), _Numbers()
    return {
        "node": [shown(step.node) for step in view.steps],
        "operator": [operators[shown(step.operator)] for step in view.steps],
        "module": [modules[tuple(map(shown, step.module))] for step in view.steps],
        "operators": list(operators),
        "modules": list(modules),
    }


def _rectangle_columns(view: View) -> dict[str, Any]:
    shapes, kinds, rectangles = _Numbers(), list(KINDS), view.rectangles
    nodes = [step.node for step in view.steps]
    named = [each.in_arena and each.name == nodes[each.start] for each in rectangles]
    return {
        "name": ["" if is_node else shown(each.name) for each, is_node in zip(rectangles, named, strict=True)],
        "kind": [kinds.index(each.kind) for each in rectangles],
        "offset": [each.offset for each in rectangles],
        "bytes": [each.size for each in rectangles],
        "start": [each.start for each in rectangles],
        "stop": [each.stop for each in rectangles],
        "shape": [shapes[each.shape] for each in rectangles],
        "shapes": list(shapes),
        "others": {
            str(index): [len(each.others), *map(shown, each.others[:MOST_OTHERS])]
            for index, each in enumerate(rectangles) if each.others
        },
    }  # fmt: skip


class _Numbers(dict[Any, int]):
    """Things that recur, each once, with their numbers: one that is asked for first gets the next."""

    def __missing__(self, thing: Any) -> int:
        return self.setdefault(thing, len(self))


def _thinned(curve: np.ndarray) -> list[int]:
    parts: Iterable[np.ndarray] = np.array_split(curve, min(POINTS, len(curve))) if len(curve) else ()
    return [int(part.max()) for part in parts]
