"""Tables for the terminal, made with rich. To be printed without markup: names in them are as the model has them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from memonger.graph.liveness import live_bytes
from memonger.model.model import Model
from memonger.plan import Plan
from memonger.remat import Candidate
from memonger.report.memory_count import MemoryCount
from memonger.units import format_size

WIDTH = 60  # columns of the memory curve
LEVELS = " ▁▂▃▄▅▆▇█"


def plan_table(record: Mapping[str, Any]) -> Table:
    """A plan's figures, one a row, each with what it means."""
    where = "portable, for any runtime" if record["device"] == "none" else f"on {record['device']}"
    table = Table(title=f"{record['model']}: {record['mode']}, {where}", title_justify="left")
    table.add_column("figure")
    table.add_column("size", justify="right")
    table.add_column("", style="dim")
    for key, figure, meaning in _ROWS:
        if record.get(key) is not None:
            table.add_row(figure, format_size(record[key]), meaning)
    if record["workspace_bytes"] is None:
        table.add_row("workspace", "not measured", "what kernels take beside; --device cpu measures it")
    return table


_ROWS = (
    ("parameter_bytes", "parameters", "weights, beside the arena"),
    ("activation_bytes", "activations", "every intermediate value at once"),
    ("peak_before_bytes", "peak before", "most alive at one step, in the file's own order"),
    ("peak_bytes", "peak", "most alive at one step, in the planned order"),
    ("lower_bound_bytes", "lower bound", "no layout of this order is smaller"),
    ("arena_bytes", "arena", "what the plan allocates"),
    ("workspace_bytes", "workspace", "most a kernel takes beside the arena, measured"),
    ("input_bytes", "inputs", "what each run is given, beside the arena"),
    ("required_bytes", "required", "peak with workspace, parameters and inputs"),
    ("budget_bytes", "budget", "the most that required may be"),
)


def recomputation_line(record: Mapping[str, Any]) -> str:
    """What is recomputed and at what cost, in a sentence."""
    segments = f" in {record['segments']} segments" if record["segments"] > 1 else ""
    return (
        f"{record['recomputed_nodes']} nodes run again{segments} (strategy {record['strategy']}): "
        f"{record['overhead']:+.1%} of the cost of one pass."
    )


def frontier_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """Plans by falling memory, one a row, each with what it takes and costs."""
    table = Table(title="Memory against extra cost", title_justify="left")
    for name in ("required", "peak", "of the most", "arena", "run again", "extra cost"):
        table.add_column(name, justify="right")
    most = max((record["peak_bytes"] for record in records), default=0) or 1
    for record in records:
        table.add_row(
            format_size(record["required_bytes"]), format_size(record["peak_bytes"]),
            f"{record['peak_bytes'] / most:.0%}", format_size(record["arena_bytes"]), str(record["recomputed_nodes"]),
            f"{record['overhead']:+.1%}",
        )  # fmt: skip
    return table


def candidates_table(candidates: Sequence[Candidate]) -> Table:
    """What a sweep tried, a threshold a row; the best one is marked."""
    table = Table(title="Sweep: a stage is kept once the threshold was written since the last", title_justify="left")
    for name in ("stages", "threshold", "segments", "kept", "peak", "extra cost", ""):
        table.add_column(name, justify="left" if name in ("stages", "") else "right")
    best = min(range(len(candidates)), key=lambda i: (candidates[i].peak, candidates[i].overhead, i))
    for index, one in enumerate(candidates):
        all_kept = one.source == "none"
        table.add_row(
            "all kept" if all_kept else one.source, "" if all_kept else format_size(one.threshold), str(one.segments),
            "" if all_kept else format_size(one.kept_bytes), format_size(one.peak), f"{one.overhead:+.1%}",
            "best" if index == best else "",
        )  # fmt: skip
    return table


def memory_curve(plan: Plan) -> str:
    """Live bytes over the steps, as one line of block characters whose full height is the arena."""
    live = live_bytes(plan.storage.buffers, len(plan.graph.nodes))
    if not len(live) or not plan.arena_bytes:
        return ""
    bins = np.array_split(live, min(WIDTH, len(live)))
    heights = [int(np.ceil(part.max() / plan.arena_bytes * (len(LEVELS) - 1))) for part in bins]
    return "".join(LEVELS[min(height, len(LEVELS) - 1)] for height in heights)


def largest_table(plan: Plan, count: int = 8) -> Table:
    """The values alive at the worst step, largest first: what there is to gain, and from what."""
    graph, storage = plan.graph, plan.storage
    live = live_bytes(storage.buffers, len(graph.nodes))
    worst = int(live.argmax()) if len(live) else 0
    title = f"Alive at the worst step, {worst} ({graph.nodes[worst]})" if graph.nodes else "No steps"
    table = Table(title=title, title_justify="left")
    for name in ("value", "bytes", "offset", "steps"):
        table.add_column(name, justify="left" if name == "value" else "right")
    first = {number: value for value, number in reversed(list(enumerate(storage.of_value))) if number >= 0}
    alive = [buffer for buffer in storage.buffers if buffer.start <= worst < buffer.stop]
    for buffer in sorted(alive, key=lambda b: (-b.size, b.id))[:count]:
        value = first[buffer.id]
        steps = f"{buffer.start} to {buffer.stop - 1}"
        table.add_row(graph.values[value], format_size(buffer.size), str(plan.offsets[value]), steps)
    return table


def memory_count_table(count: MemoryCount) -> Table:
    """What the bytes are for, a kind a row; kinds without any are left out."""
    table = Table(title="What the memory is for", title_justify="left")
    table.add_column("kind")
    for name in ("unplanned", "planned", "at the peak"):
        table.add_column(name, justify="right")
    columns = [kinds.to_dict() for kinds in (count.before, count.after, count.at_peak) if kinds is not None]
    for key, name in _KINDS.items():
        if any(column[key] for column in columns):
            table.add_row(name, *(format_size(column[key] or 0) for column in columns))
    return table


_KINDS = {
    "outputs": "values of the forward pass",
    "output_gradients": "their gradients",
    "parameter_gradients": "gradients of parameters",
    "temporaries": "temporaries of the backward pass",
    "workspace": "workspace of kernels",
    "parameters": "parameters",
    "optimizer_state": "optimizer state",
    "inputs": "inputs",
    "unused": "gaps in the arena",
    "total": "total",
}

COUNT_NOTE = (
    "Unplanned: every value and workspace in memory of its own. Planned: bytes of the arena count once, for what lies "
    "there first."
)


def model_table(model: Any, name: str, count: int = 20) -> Table:
    """Inputs and outputs of a model with their types and shapes, the first ``count`` of each."""
    table = Table(title=name, title_justify="left")
    for column in ("", "name", "type", "shape"):
        table.add_column(column)
    for kind, values in (("input", given_inputs(model)), ("output", model.graph.outputs)):
        for value in values[:count]:
            dims = "?" if value.shape is None else "[" + ", ".join(str(dim) for dim in value.shape) + "]"
            dtype = value.dtype.name.lower() if value.dtype is not None else str(value.type)
            table.add_row(kind, str(value.name), dtype, dims)
        if len(values) > count:
            table.add_row("", f"and {len(values) - count} more", "", "")
    return table


def given_inputs(model: Any) -> list[Any]:
    """The inputs a caller gives: in old files the initializers are listed among them."""
    old = (model.ir_version or 0) < 4
    return [value for value in model.graph.inputs if not (old and value.name in model.graph.initializers)]


def operator_table(model: Model | Any, count: int = 10) -> Table:
    """How often each operator occurs, the commonest first."""
    graph = model.ir.graph if isinstance(model, Model) else model.graph
    counts: dict[str, int] = {}
    for node in graph:
        key = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        counts[key] = counts.get(key, 0) + 1
    table = Table(title="Operators", title_justify="left")
    table.add_column("operator")
    table.add_column("nodes", justify="right")
    for key, number in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:count]:
        table.add_row(key, str(number))
    return table


def model_record(model: Any, name: str) -> dict[str, Any]:
    """Inputs, outputs and node count of a model, for ``--json``."""

    def described(value: Any) -> dict[str, Any]:
        dims = None if value.shape is None else [d if isinstance(d, int) else str(d) for d in value.shape]
        return {"name": value.name, "type": None if value.dtype is None else value.dtype.name, "shape": dims}

    return {
        "model": name,
        "nodes": model.graph.num_nodes(),
        "inputs": [described(value) for value in given_inputs(model)],
        "outputs": [described(value) for value in model.graph.outputs],
    }
