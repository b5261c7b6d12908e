"""The record as pictures."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import pyplot
from benchmarks.training.side_by_side.results import Record, Result, Row

Figure = Callable[[Result], float | None]


def plot(record: Record, stem: Path) -> list[Path]:
    """Write one picture for each kind that has rows, beside the table: ``<stem>_<kind>.png``."""
    written = []
    for kind, panels in PANELS.items():
        rows = [row for row in record.rows if row.kind == kind]
        if not rows:
            continue
        figure, axes = pyplot().subplots(
            len(panels), 1, figsize=(max(12, len(rows)), 4 * len(panels)), layout="constrained"
        )
        for axis, (title, of) in zip(np.atleast_1d(axes), panels.items(), strict=True):
            _bars(axis, rows, of)
            axis.set_title(f"{kind}: {title}, {rows[0].results[0].title} = 1")
        np.atleast_1d(axes)[0].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        written.append(stem.with_name(f"{stem.name}_{kind}.png"))
        figure.savefig(written[-1], dpi=100)
        pyplot().close(figure)
    return written


def _bars(axis: Any, rows: Sequence[Row], of: Figure) -> None:
    """A group for each network, a bar for each contestant; none for one that failed."""
    keys = list(dict.fromkeys(result.contestant for row in rows for result in row.results))
    titles = {result.contestant: result.title for row in rows for result in row.results}
    width, places = 0.85 / len(keys), np.arange(len(rows))
    for index, key in enumerate(keys):
        heights = [_height(row, key, of) for row in rows]
        axis.bar(places + (index - (len(keys) - 1) / 2) * width, heights, width, label=titles[key])
    axis.axhline(1.0, color="black", linewidth=0.6)
    axis.set_xticks(places, [f"{row.network}\nbatch {row.batch}" if row.batch else row.network for row in rows])
    axis.tick_params("x", labelsize=8)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)


def _height(row: Row, key: str, of: Figure) -> float:
    first, mine = row.results[0], next((r for r in row.results if r.contestant == key), None)
    if mine is None or mine.failed or first.failed:
        return 0.0
    one, other = of(mine), of(first)
    return max(0.0, one / other) if one is not None and other else 0.0


PANELS: dict[str, dict[str, Figure]] = {
    "training": {"memory beside weights and momentum": lambda r: r.net, "time of a step": lambda r: r.seconds},
    "largest": {
        "largest batch": lambda r: r.batch,
        "time of a sample": lambda r: None if r.seconds is None else r.seconds / r.batch,
    },
}
