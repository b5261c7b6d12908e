"""What runs gave and took, as tables for the terminal. To be printed without markup, as those of `report.text`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from memonger.units import format_size


def format_seconds(seconds: float) -> str:
    """A time for people, three digits: ``22.0 ms``, ``1.24 s``, ``850 µs``."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        amount = seconds / unit
        if amount >= 0.9995 or name == "µs":
            digits = 2 if amount < 9.995 else 1 if amount < 99.95 else 0
            return f"{amount:.{digits}f} {name}"
    raise AssertionError("not reached")


def comparison_table(rows: Sequence[Mapping[str, Any]], unit: str, compared: str) -> Table:
    """Time and memory of the planned run beside stock runs, and how far apart (Δ) is what they gave.

    Args:
        rows: Of each session ``session``, ``latency_seconds``, ``latency_p95_seconds``, ``peak_bytes``; of stock ones
            also ``latency_ratio``, ``peak_ratio``, ``bitwise_equal``, ``max_abs_diff``.
        unit: What was timed: "run" or "step".
        compared: What the last column is about.
    """
    table = Table(title="Planned against stock onnxruntime", title_justify="left")
    table.add_column("session", no_wrap=True)
    for name in (unit, "p95", "ratio", "memory", "ratio", compared):
        table.add_column(name, justify="right", no_wrap=name not in ("memory", compared))
    for row in rows:
        memory = "not measured" if row["peak_bytes"] is None else format_size(row["peak_bytes"])
        table.add_row(
            row["session"], format_seconds(row["latency_seconds"]), format_seconds(row["latency_p95_seconds"]),
            _ratio(row.get("latency_ratio")), memory, _ratio(row.get("peak_ratio")), _outcome(row),
        )  # fmt: skip
    return table


def comparison_note(unit: str, loaded: str) -> str:
    """What its columns are; ``unit`` is what was timed, ``loaded`` what memory is counted above."""
    return (
        f"Ratios are planned ÷ stock: below 1 the plan is better. p95: 95 of 100 {unit}s took no longer. Memory is the "
        f"most a {unit} takes above the loaded {loaded}."
    )


def _outcome(row: Mapping[str, Any]) -> str:
    if "bitwise_equal" not in row:
        return ""
    if row["bitwise_equal"]:
        return "identical"
    return "other values" if row["max_abs_diff"] is None else f"Δ {row['max_abs_diff']:.1e}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def outputs_table(outputs: Mapping[str, Any]) -> Table:
    """Name, type, shape, mean and spread (standard deviation) of each output."""
    table = Table("name", "type", "shape", "mean", "spread", title="Outputs", title_justify="left")
    for name, value in outputs.items():
        if isinstance(value, np.ndarray) and value.dtype.kind in "fiu" and value.size:
            numbers = value.astype(np.float64)
            row = (str(value.dtype), str(list(value.shape)), f"{numbers.mean():.5g}", f"{numbers.std():.5g}")
        elif isinstance(value, np.ndarray):
            row = (str(value.dtype), str(list(value.shape)), "", "")
        else:
            row = (type(value).__name__, "", "", "")
        table.add_row(name, *row)
    return table
