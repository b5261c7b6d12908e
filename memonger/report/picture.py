"""A plan as a picture: the map of the arena over the curve of live bytes, drawn by matplotlib."""

import io
from typing import Any

import numpy as np

from memonger.errors import RuntimeUnavailableError
from memonger.report.view import COMPUTED, KEPT, RECOMPUTED, SHARED, View
from memonger.units import format_size, shown

COLOURS = {KEPT: "#0072b2", RECOMPUTED: "#d55e00", SHARED: "#009e73", COMPUTED: "#56b4e9"}
"""After Okabe and Ito: told apart with any kind of colour vision."""


def picture(view: View, kind: str) -> bytes:
    """The picture in a file format that matplotlib writes: ``svg``, ``png``, ``pdf``.

    Raises:
        RuntimeUnavailableError: matplotlib isn't installed.
        ValueError: matplotlib doesn't write that format.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeUnavailableError("a picture needs matplotlib: pip install 'memonger[plot]'.") from error
    figure = Figure(figsize=(12, 7), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    _map(upper, view)
    steps = np.arange(len(view.live) + 1)
    lower.stairs(view.live, steps, fill=True, color=COLOURS[KEPT], label="in use")
    lower.axhline(view.plan.lower_bound_bytes, color=COLOURS[SHARED], linestyle=":", label="lower bound")
    lower.set_ylim(0, max(view.plan.arena_bytes * 1.05, 1))
    lower.set_xlabel("step")
    _in_bytes(lower, view.plan.arena_bytes)
    lower.legend(loc="upper right", fontsize="small")
    plan = view.plan
    sizes = f"{format_size(plan.total_bytes)} in all, {format_size(plan.arena_bytes)} of arena"
    figure.suptitle(f"{shown(view.title)}: {sizes}", parse_math=False)
    target = io.BytesIO()
    figure.savefig(target, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return target.getvalue()


def _map(axes: Any, view: View) -> None:
    from matplotlib.collections import PolyCollection

    for kind, colour in COLOURS.items():
        corners = [
            [(r.start, r.offset), (r.stop, r.offset), (r.stop, r.offset + r.size), (r.start, r.offset + r.size)]
            for r in view.arena if r.kind == kind
        ]  # fmt: skip
        if corners:
            axes.add_collection(PolyCollection(corners, facecolors=colour, edgecolors="w", linewidths=0.2, label=kind))
    axes.set_xlim(0, max(len(view.steps), 1))
    axes.set_ylim(0, max(view.plan.arena_bytes, 1))
    axes.set_ylabel("address")
    _in_bytes(axes, view.plan.arena_bytes)
    if view.arena:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(COLOURS), frameon=False, fontsize="small")


def _in_bytes(axes: Any, most: int) -> None:
    """Four to eight round sizes at the axis."""
    from matplotlib.ticker import MultipleLocator

    axes.yaxis.set_major_locator(MultipleLocator(2 ** max(most.bit_length() - 3, 0)))
    axes.yaxis.set_major_formatter(lambda value, position: format_size(int(value)))
