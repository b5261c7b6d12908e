"""The figures of a plan: as one flat record, which ``--json`` prints and tables are made from; and in two sentences.

They say what it takes, beside what stock onnxruntime and no plan at all would take.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import PurePath
from typing import Any

from rich.table import Table

from memonger.devices import parse_device
from memonger.plan import Plan
from memonger.report.chunks import chunk_records
from memonger.report.makeup import makeup
from memonger.report.memory_count import count_memory
from memonger.shapes.ranges import DimRange, described, own
from memonger.units import GiB, KiB, MiB, format_size


def plan_record(plan: Plan, model: str, output: str | None) -> dict[str, Any]:
    """Every figure of a plan, with its memory counted by kind and what it is made of; see `plan_figures`."""
    figures = plan_figures(plan, model, output)
    return {**figures, "memory": count_memory(plan).to_dict(), **asdict(makeup(plan))}


def plan_figures(plan: Plan, model: str, output: str | None) -> dict[str, Any]:
    """The figures of a plan that take no time; sizes are bytes.

    Args:
        plan: The plan.
        model: Where the model came from.
        output: Where the planned model was written, if it was.
    """
    spent = plan.spent
    return {
        "model": model,
        "mode": plan.mode,
        "device": plan.device,
        "batch": plan.batch,
        "nodes": len(plan.graph.nodes),
        **weight_figures(plan),
        "activation_bytes": plan.activation_bytes,
        "peak_before_bytes": plan.peak_before_bytes,
        "peak_bytes": plan.peak_bytes,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "arena_bytes": plan.arena_bytes,
        "workspace_bytes": plan.workspace_bytes,
        "run_time_bytes": plan.run_time_bytes,
        "limit_bytes": plan.limit,
        "predicted_bytes": plan.predicted_bytes,
        "input_bytes": plan.input_bytes,
        "state_bytes": plan.state_bytes,
        "state": [
            {"input": old, "output": new, "why_swapped": plan.why_swapped.get(old)} for old, new in plan.state.items()
        ],
        "total_bytes": plan.total_bytes,
        "session_bytes": plan.session_bytes,
        "process_bytes": plan.process_bytes,
        "mapped_bytes": plan.mapped_bytes,
        "unplanned_bytes": plan.unplanned_bytes,
        "peer": plan.peer,
        "stock_bytes": plan.stock_bytes,
        "budget_bytes": plan.budget,
        "strategy": plan.strategy,
        "overhead": plan.overhead,
        "segments": 1 if plan.outcome is None else plan.outcome.segments,
        "recomputed_nodes": len(plan.recomputed),
        "chunks": chunk_records(plan),
        "ranges": {name: [one.least, one.most, one.step] for name, one in own(plan.ranges).items()},
        "unplanned_values": unplanned_values(plan),
        "notes": list(plan.notes),
        "planning_seconds": plan.planning_seconds,
        "passes": [asdict(each) for each in plan.passes],
        "planning_runs": None if spent is None else spent.runs,
        "planning_run_seconds": None if spent is None else spent.seconds,
        "planning_node_seconds": None if spent is None else spent.alone,
        "chunks_time_ratio": None if spent is None else spent.ratio,
        "output": output,
    }


def weight_figures(plan: Plan) -> dict[str, Any]:
    """How many bytes of weights there are and are in memory, and what passes through memory of those in the file."""
    window = plan.window
    return {
        "parameter_bytes": plan.parameter_bytes,
        "resident_parameter_bytes": plan.resident_parameter_bytes,
        "host_weights": plan.host_weights
        and {
            "weights": len(plan.host_weights),
            "read_bytes": plan.read_bytes,
            "ahead_bytes": plan.ahead_bytes,
            "staging_bytes": plan.staging_bytes,
        },
        "window": window
        and {
            "bytes": window.nbytes,
            "weights": len(window.weights),
            "read_bytes": plan.read_bytes,
            "written_bytes": plan.written_bytes,
            "state": list(plan.state_in_file),
            "state_bytes": sum(plan.state_in_file.values()),
            "values": list(plan.values_in_file),
            "values_bytes": sum(plan.values_in_file.values()),
        },
    }


def unplanned_values(plan: Plan) -> list[str]:
    """Values that the runtime allocates itself: their size is unknown before the run, or their type has none.

    The few elements that shapes are computed from in a plan for ranges of sizes are left out.
    """
    graph = plan.graph
    unplanned = (value for writes in graph.writes for value in writes if not graph.planned[value])
    of_shapes = {value for value, size in enumerate(graph.sizes) if plan.ranges and size > 0}
    found = (graph.values[value] for value in unplanned if value not in graph.persistent | of_shapes)
    return [name for name in found if name not in plan.values_in_file]


STATE = "weights and training state"


def headline(record: Mapping[str, Any]) -> tuple[str, str]:
    """The two sentences for a plan's figures, see `memonger.report.summary.plan_record`."""
    total = " ".join([_total(record), *window_line(record)])
    if record.get("ranges"):
        ranges = {name: DimRange(*sizes) for name, sizes in record["ranges"].items()}
        total += f" That holds for every size: {described(ranges)}."
    return total, _comparison(record)


def window_line(record: Mapping[str, Any]) -> Iterator[str]:
    """A sentence on weights that stay in the plan's file, or in the host's memory, where some do."""
    window, host = record.get("window"), record.get("host_weights")
    if host:
        yield (
            f"Of {format_size(record['parameter_bytes'])} of weights {format_size(record['resident_parameter_bytes'])} "
            f"are kept in the device's memory; the others lie in the host's, and a run copies "
            f"{format_size(host['read_bytes'])} of them to the arena, each right before the steps that read it"
            + (
                f", but for {format_size(host['ahead_bytes'])}, which are copied while the steps before run, through "
                f"{format_size(host['staging_bytes'])} of the host's memory that is locked for the device."
                if host["ahead_bytes"]
                else "."
            )
        )
    if window is None:
        return
    kept, state = record["resident_parameter_bytes"] - window["bytes"], window["state_bytes"]
    values = len(window.get("values", ()))
    if values == window["weights"]:
        yield (
            f"{values} value{'s' if values > 1 else ''} of {format_size(window['values_bytes'])} "
            f"wait{'' if values > 1 else 's'} in a file of the session's for steps much later: a step writes "
            f"{format_size(window['written_bytes'])} and reads {format_size(window['read_bytes'])} through a window of "
            f"{format_size(window['bytes'])}."
        )
        return
    own, where = "a file of the session's", "the plan's file"
    if state:
        where = (
            own
            if len(window["state"]) + values == window["weights"]
            else f"{where}, {format_size(state)} of them in {own}"
        )
    yield (
        f"Of {format_size(record['parameter_bytes'])} of {STATE if state else 'weights'} {format_size(kept)} are kept "
        f"in memory; the others stay in {where}, and a run reads {format_size(window['read_bytes'])} of them through a "
        f"window of {format_size(window['bytes'])}"
        + (f", and writes {format_size(window['written_bytes'])} back." if state else ".")
    )


def _total(record: Mapping[str, Any]) -> str:
    total, workspace = record["total_bytes"], record["workspace_bytes"]
    parts = {
        weights_word(record): record["resident_parameter_bytes"], "arena": record["arena_bytes"],
        "workspace": workspace,
        "sized at run time": record["run_time_bytes"] or None,
        "inputs": record["input_bytes"], "state": record["state_bytes"] or None,
    }  # fmt: skip
    sizes = " + ".join(f"{name} {_amount(size, total)}" for name, size in parts.items() if size is not None)
    unknown = "" if workspace is not None else " Workspace, what kernels take besides, was not measured."
    return f"{PurePath(record['model']).name} takes {format_size(total)}: {sizes} {_unit(total)[1]}.{unknown}"


def _unit(total: int) -> tuple[int, str]:
    return next((unit for unit in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")) if total >= unit[0]), (1, "B"))


def _amount(size: int, total: int) -> str:
    """A part in the unit of the total."""
    amount = size / _unit(total)[0]
    return "<0.01" if 0 < amount < 0.01 else f"{amount:.0f}" if amount >= 100 else f"{amount:.3g}"


def weights_word(record: Mapping[str, Any]) -> str:
    """What persists from run to run, in a word or two."""
    return STATE if record["mode"] == "training" else "weights"


def _comparison(record: Mapping[str, Any]) -> str:
    total, stock = record["total_bytes"], record["stock_bytes"]
    unplanned = f"ithout any reuse of memory it would take {format_size(record['unplanned_bytes'])}."
    if stock is None:
        return f"W{unplanned} {_why_unknown(record['device'], record.get('ranges'))}"
    peer = record["peer"][:1].upper() + record["peer"][1:]
    return f"{peer} is expected to take about {format_size(stock)}: {_percentage(total, stock)}. W{unplanned}"


def _percentage(total: int, stock: int) -> str:
    percent = round(100 * (stock - total) / stock) if stock else 0
    if not percent:
        return "as much as this plan"
    return f"this plan takes {abs(percent)} % {'less' if percent > 0 else 'more'}"


def _why_unknown(device: str, ranges: object) -> str:
    if ranges:
        return "What stock onnxruntime takes depends on the shapes that it has run before."
    if device == "none":
        return "A portable plan is made without a run, so what stock onnxruntime takes isn't known."
    if not parse_device(device).is_host:
        return "What stock onnxruntime takes there is measured by memonger run --compare."
    return "What stock onnxruntime would take isn't in this file: plan the model again."


def details_table(record: Mapping[str, Any], lower_bound: int) -> Table:
    """The headline's figures one a row, and those behind them."""
    where = "portable, for any runtime" if record["device"] == "none" else f"on {record['device']}"
    table = Table(title=f"{record['model']}: {record['mode']}, {where}", title_justify="left")
    table.add_column("")
    table.add_column("size", justify="right")
    table.add_column("", style="dim")
    for name, size, meaning in _rows(record, lower_bound):
        if size is not None:
            table.add_row(name, size if isinstance(size, str) else format_size(size), meaning)
    return table


def _rows(record: Mapping[str, Any], lower_bound: int) -> Sequence[tuple[str, int | str | None, str]]:
    workspace = "not measured" if record["workspace_bytes"] is None else record["workspace_bytes"]
    apart = record["parameter_bytes"] - record["resident_parameter_bytes"]
    return (
        (weights_word(record), record["resident_parameter_bytes"], "what persists from run to run"),
        (
            f"weights {'on the host' if record.get('host_weights') else 'in the file'}",
            apart or None,
            "what of them isn't in memory at once",
        ),
        ("arena", record["arena_bytes"], "one region that holds every computed value"),
        ("workspace", workspace, "the most that a kernel takes besides, measured"),
        ("sized at run time", record["run_time_bytes"] or None, "values of a size that the inputs decide, measured"),
        ("limit", record["limit_bytes"], "the most that a run may take for these and for workspace"),
        ("inputs", record["input_bytes"], "what each run is given"),
        ("state", record["state_bytes"] or None, "what a session keeps for the next run"),
        ("total", record["total_bytes"], "all of these: what a budget holds"),
        ("budget", record["budget_bytes"], "the most that the total may be"),
        ("beside the total", record["session_bytes"], "about what a session takes for its nodes, by their number"),
        (
            "process",
            record["process_bytes"],
            "about what a process grows by, in memory of its own, that loads and runs the saved plan",
        ),
        ("mapped weights", record["mapped_bytes"], "beside it: pages of the plan's file, which processes share"),
        ("stock onnxruntime", record["stock_bytes"], "expected total, by its own allocator's rules"),
        ("without reuse", record["unplanned_bytes"], "total with memory of its own for every value"),
        ("smallest arena", lower_bound, "no layout of this order is smaller"),
        ("in file order", record["peak_before_bytes"], "smallest arena in the file's own order"),
    )
