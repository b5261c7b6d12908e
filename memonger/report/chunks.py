"""What of a plan runs in chunks: in a sentence, and as a table."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Column, Table

from memonger.ir.marks import CHUNK, STRIP, WINDOW
from memonger.plan import Plan
from memonger.plan_file import ROWS, ChunkedBand
from memonger.units import format_size
from memonger.words import listed


def chunk_records(plan: Plan) -> list[dict[str, Any]]:
    """What runs in chunks as plain data, a record for each band: see `memonger.plan_file.ChunkedBand`."""
    return [asdict(band) for band in plan.chunks]


def chunks_lines(plan: Plan) -> tuple[str, ...]:
    """What runs in chunks, and what that saves, in a sentence; none where nothing does."""
    bands = plan.chunks
    if not bands:
        return ()
    whole = sum(not {CHUNK, WINDOW, STRIP}.intersection(node.metadata_props) for node in plan.model.graph)
    count = sum(band.nodes for band in bands)
    before, after = (max(getattr(band, f"bytes_{when}") for band in bands) for when in ("before", "after"))
    return (
        f"{count} of {count + whole} nodes run in chunks{_of_axis(bands, ' of')}, in {_slices(bands)}: they "
        f"need {format_size(after)} of the arena at most, {format_size(before)} without chunks.",
    )


def chunks_words(records: Sequence[Mapping[str, Any]]) -> str:
    """What runs in chunks in a few words, from `chunk_records`."""
    bands = [ChunkedBand(**record) for record in records]
    if not bands:
        return "nothing"
    return f"{sum(band.nodes for band in bands)} nodes{_of_axis(bands, ' along')}, in {_slices(bands)}"


def slices_words(records: Sequence[Mapping[str, Any]]) -> str:
    """How many slices what runs in chunks has, from `chunk_records`; empty where nothing does."""
    return _slices([ChunkedBand(**record) for record in records]) if records else ""


def axis_words(band: ChunkedBand) -> str:
    """The axis that a band is cut along, as people call it."""
    if band.value:
        return f"axis {band.axis} of '{band.value}'"
    if band.axis == ROWS:
        return "the image's rows"
    return f"axis {band.axis} of the inputs" if band.axis else "the batch"


def _of_axis(bands: Sequence[ChunkedBand], before: str) -> str:
    """The axis that all bands are cut along; empty where each has its own."""
    words = {axis_words(band) for band in bands}
    return f"{before} {words.pop()}" if len(words) == 1 else ""


def _slices(bands: Sequence[ChunkedBand]) -> str:
    """How many slices the stages of all bands have, as ``16, then 8, 4 and 2 slices``."""
    parts = "" if len(bands) == 1 else f"{len(bands)} bands of "
    if len({band.slices for band in bands}) > 1:
        counts = [count for band in bands for count in band.slices]
        return f"{parts}{min(counts)} to {max(counts)} slices"
    first, *others = map(str, bands[0].slices)
    then = f", then {listed(others)}" if others else ""
    return f"{parts}{first}{then} slices"


def chunks_table(records: Sequence[Mapping[str, Any]], count: int = 20) -> Table:
    """A row for each band, the first ``count``."""
    nodes, *figures = (Column(name, justify="right") for name in ("nodes", "before", "in chunks", "more time"))
    ends = Column("first … last", overflow="fold")
    table = Table(nodes, ends, "axis", "slices", *figures, title="What runs in chunks", title_justify="left")
    for band in records[:count]:
        table.add_row(
            str(band["nodes"]), f"{band['first']} … {band['last']}", axis_words(ChunkedBand(**band)),
            ", ".join(map(str, band["slices"])), format_size(band["bytes_before"]), format_size(band["bytes_after"]),
            f"{band['seconds'] * 1e3:.2f} ms",
        )  # fmt: skip
    if len(records) > count:
        table.add_row("", f"and {len(records) - count} more bands")
    return table


CHUNKS_NOTE = (
    "Before and in chunks: the most of the arena that is alive at one of these nodes. More time: what running more, "
    "smaller nodes is estimated to take; values that then fit the caches often make up for it."
)
"""What the columns of the table are."""
