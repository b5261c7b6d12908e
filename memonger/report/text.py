"""Tables for the terminal, made with rich. To be printed without markup: names in them are as the model has them."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Column, Table

from memonger.graph.liveness import live_bytes, worst_step
from memonger.plan import Plan
from memonger.report.chunks import slices_words
from memonger.report.memory_count import KIND_NAMES, MemoryCount
from memonger.units import format_size

if TYPE_CHECKING:
    from memonger.planner.plan_all import Row
    from memonger.schedule import SweepPoint

WIDTH = 60  # columns of the memory curve
LEVELS = " ▁▂▃▄▅▆▇█"


def recomputation_line(record: Mapping[str, Any]) -> str:
    """What is recomputed and at what cost, in a sentence."""
    if not record["recomputed_nodes"]:
        return "No node runs twice."
    segments = f" in {record['segments']} segments" if record["segments"] > 1 else ""
    strategy = f" (strategy {record['strategy']})" if record["strategy"] else ""
    return (
        f"{record['recomputed_nodes']} of {record['nodes']} steps compute again what was dropped{segments}{strategy}: "
        f"{record['overhead']:+.1%} of the cost of one pass."
    )


def planned_line(record: Mapping[str, Any], details: bool) -> str:
    """How long planning took; with details, of that runs of the model and of its nodes."""
    took = f"Planned in {record['planning_seconds']:.2f} s"
    if not details:
        return f"{took}. More figures: --details."
    runs, seconds, alone = (record[f"planning_{name}"] for name in ("runs", "run_seconds", "node_seconds"))
    if not runs:
        return f"{took}."
    times = "1 run" if runs == 1 else f"{runs} runs"
    nodes = f", nodes alone {alone:.2f} s" if alone else ""
    ratio = record["chunks_time_ratio"]
    chunks = "" if ratio is None else f" A run in chunks was measured to take {ratio:.2f} times as long as one without."
    return f"{took}: {times} of the model took {seconds:.2f} s{nodes}.{chunks}"


def passes_table(passes: Sequence[Mapping[str, Any]]) -> Table:
    """The passes that changed a model before it was planned, in order, each with the nodes there were after it."""
    table = table_of("Passes that changed the model", "stage", "pass", "nodes", words=("stage", "pass"))
    for number, each in enumerate(passes):
        is_first = not number or passes[number - 1]["stage"] != each["stage"]
        table.add_row(each["stage"] if is_first else "", each["name"], str(each["nodes"]))
    return table


def table_of(title: str, *names: str, words: Collection[str] = ()) -> Table:
    """A table without rows; its columns have numbers in them, but for those that are named as having words."""
    columns = (Column(name, justify="left" if name in words else "right") for name in names)
    return Table(*columns, title=title, title_justify="left")


def frontier_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """Plans by falling memory, one a row, each with what it takes and costs."""
    chunked = any(record["chunks"] for record in records)
    moved = [record["window"] or record["host_weights"] for record in records]
    source = "the host" if any(record["host_weights"] for record in records) else "files"
    names = (
        "total",
        "of the most",
        "arena",
        "run again",
        "extra cost",
        *(("in chunks", "more time") if chunked else ()),
        *((f"from {source} a run",) if any(moved) else ()),
    )
    table = table_of("Memory against extra cost", *names, words=("in chunks",))
    most = max((record["total_bytes"] for record in records), default=0) or 1
    for record, passing in zip(records, moved, strict=True):
        more = math.fsum(band["seconds"] for band in record["chunks"])
        table.add_row(
            format_size(record["total_bytes"]), f"{record['total_bytes'] / most:.0%}",
            format_size(record["arena_bytes"]), str(record["recomputed_nodes"]), f"{record['overhead']:+.1%}",
            *((slices_words(record["chunks"]), f"{more * 1e3:.2f} ms" if more else "") if chunked else ()),
            *((format_size(passing["read_bytes"]) if passing else "",) if any(moved) else ()),
        )  # fmt: skip
    return table


def fleet_table(rows: "Sequence[Row]") -> Table:
    """Plans of many models, one a row; what nothing was asked of is no column."""
    settings = [key for key in ("batch", "device", "budget") if any(getattr(row, key) is not None for row in rows)]
    names = ("model", *settings, "total", "arena", "run again", "extra cost", "seconds")
    table = table_of("Plans", *names, words=("model", "device"))
    for row in rows:
        cells = [str(getattr(row, key) or "") for key in settings]
        if row.total_bytes is None or row.arena_bytes is None or row.overhead is None:
            figures = ["no plan", "", "", ""]
        else:
            figures = [
                format_size(row.total_bytes), format_size(row.arena_bytes), str(row.recomputed_nodes),
                f"{row.overhead:+.1%}",
            ]  # fmt: skip
        table.add_row(row.name, *cells, *figures, f"{row.seconds:.2f}")
    return table


def candidates_table(candidates: "Sequence[SweepPoint]") -> Table:
    """What a sweep tried, a threshold a row; the best one is marked."""
    title = "Sweep: a stage is kept once the threshold was written since the last"
    names = ("stages", "threshold", "segments", "kept", "peak", "extra cost", "")
    table = table_of(title, *names, words=("stages", ""))
    best = min(range(len(candidates)), key=lambda i: (candidates[i].peak, candidates[i].overhead, i))
    for index, one in enumerate(candidates):
        all_kept = one.source == "none"
        table.add_row(
            "all kept" if all_kept else one.source, "" if all_kept else format_size(one.threshold), str(one.segments),
            "" if all_kept else format_size(one.kept_bytes), format_size(one.peak), f"{one.overhead:+.1%}",
            "best" if index == best else "",
        )  # fmt: skip
    return table


def memory_picture(plan: Plan) -> tuple[str, str]:
    """Live bytes over the steps, as a line of block characters whose full height is the arena; before it what it is."""
    live, curve = live_bytes(plan.storage.buffers, len(plan.graph.nodes)), ""
    if len(live) and plan.arena_bytes:
        bins = np.array_split(live, min(WIDTH, len(live)))
        heights = [int(np.ceil(part.max() / plan.arena_bytes * (len(LEVELS) - 1))) for part in bins]
        curve = "".join(LEVELS[min(height, len(LEVELS) - 1)] for height in heights)
    return f"Live bytes over the {len(plan.graph.nodes)} steps, up to the arena's size:", f"[{curve}]"


def largest_table(plan: Plan, count: int = 8) -> Table:
    """The values alive at the worst step, largest first: what there is to gain, and from what."""
    graph, storage = plan.graph, plan.storage
    worst = worst_step(storage.buffers, len(graph.nodes))
    title = f"Alive at the worst step, {worst} ({graph.nodes[worst]})" if graph.nodes else "No steps"
    table = table_of(title, "value", "bytes", "offset", "steps", words=("value",))
    filling = {
        number: value
        for value, number in reversed(list(enumerate(storage.of_value)))
        if number >= 0 and graph.sizes[value] == storage.buffers[number].size
    }
    alive = [buffer for buffer in storage.buffers if buffer.start <= worst < buffer.stop]
    for buffer in sorted(alive, key=lambda b: (-b.size, b.id))[:count]:
        value = filling[buffer.id]
        steps = f"{buffer.start} to {buffer.stop - 1}"
        table.add_row(graph.values[value], format_size(buffer.size), str(plan.offsets[value]), steps)
    return table


def memory_count_table(count: MemoryCount) -> Table:
    """What the bytes are for, a kind a row; kinds without any are left out."""
    names = ("kind", "without reuse", "planned", "at the peak")
    table = table_of("What the memory is for", *names, words=("kind",))
    columns = [kinds.to_dict() for kinds in (count.before, count.after, count.at_peak) if kinds is not None]
    for key, name in KIND_NAMES.items():
        if any(column[key] for column in columns):
            table.add_row(name, *(format_size(column[key] or 0) for column in columns))
    return table
