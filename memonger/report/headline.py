"""A plan in two sentences: what it takes, beside what stock onnxruntime and no plan at all would take."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from rich.table import Table

from memonger.devices import parse_device
from memonger.shapes.ranges import DimRange, described
from memonger.units import GiB, KiB, MiB, format_size

STATE = "weights and training state"


def headline(record: Mapping[str, Any]) -> tuple[str, str]:
    """The two sentences for a plan's figures, see `memonger.report.summary.plan_record`."""
    total = " ".join([_total(record), *window_line(record)])
    total += f" That holds for every size: {_ranges(record)}." if record.get("ranges") else ""
    return total, _comparison(record)


def window_line(record: Mapping[str, Any]) -> Iterator[str]:
    """A sentence on weights that stay in the plan's file, where some do."""
    window = record.get("window")
    if window is None:
        return
    kept = record["resident_parameter_bytes"] - window["bytes"]
    yield (
        f"Of {format_size(record['parameter_bytes'])} of weights {format_size(kept)} are kept in memory; the others "
        f"stay in the plan's file, and a run reads {format_size(window['read_bytes'])} of them through a window of "
        f"{format_size(window['bytes'])}."
    )


def _ranges(record: Mapping[str, Any]) -> str:
    return described({name: DimRange(*sizes) for name, sizes in record["ranges"].items()})


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


def _left_out(record: Mapping[str, Any]) -> int | None:
    return record["parameter_bytes"] - record["resident_parameter_bytes"] or None


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
    return (
        (weights_word(record), record["resident_parameter_bytes"], "what persists from run to run"),
        ("weights in the file", _left_out(record), "what of them isn't in memory at once"),
        ("arena", record["arena_bytes"], "one region that holds every computed value"),
        ("workspace", workspace, "the most that a kernel takes besides, measured"),
        ("sized at run time", record["run_time_bytes"] or None, "values of a size that the inputs decide, measured"),
        ("limit", record["limit_bytes"], "the most that a run may take for these and for workspace"),
        ("inputs", record["input_bytes"], "what each run is given"),
        ("state", record["state_bytes"] or None, "what a session keeps for the next run"),
        ("total", record["total_bytes"], "all of these: what a budget holds"),
        ("budget", record["budget_bytes"], "the most that the total may be"),
        ("beside the total", record["session_bytes"], "about what a session takes for its nodes, by their number"),
        ("process", record["process_bytes"], "about all memory of its own of a process that runs the saved plan"),
        ("mapped weights", record["mapped_bytes"], "beside it: pages of the plan's file, which processes share"),
        ("stock onnxruntime", record["stock_bytes"], "expected total, by its own allocator's rules"),
        ("without reuse", record["unplanned_bytes"], "total with memory of its own for every value"),
        ("smallest arena", lower_bound, "no layout of this order is smaller"),
        ("in file order", record["peak_before_bytes"], "smallest arena in the file's own order"),
    )
