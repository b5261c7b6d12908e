"""An answer of `memonger.fit` in words, as a table of sizes, and as the record that ``--json`` prints."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from memonger.planner.fit import Beyond, Fit
from memonger.report.chunks import chunks_lines
from memonger.report.summary import plan_record, weight_figures, window_line
from memonger.report.text import table_of
from memonger.units import format_size, in_full


def fit_record(fit: Fit, model: str, output: str | None) -> dict[str, Any]:
    """Every figure of an answer; sizes are bytes.

    Args:
        fit: The answer.
        model: Where the model came from.
        output: Where the planned model was written, if it was.
    """
    return {
        "model": model,
        "memory": fit.memory,
        "vary": fit.vary,
        "fits": fit.fits,
        "size": fit.size,
        "total_bytes": fit.total_bytes,
        "lower_bound_bytes": fit.lower_bound_bytes,
        "overhead": fit.overhead,
        "strategy": fit.strategy,
        "bound_holds_for": list(fit.bound_holds_for),
        "stopped": fit.is_stopped,
        "beyond": None if fit.beyond is None else dataclasses.asdict(fit.beyond),
        "tried": [{"size": size, "total_bytes": total} for size, total in fit.tried.items()],
        "frontier": [dataclasses.asdict(point) for point in fit.frontier],
        "seconds": fit.seconds,
        "plan": None if fit.plan is None else plan_record(fit.plan, model, output),
        "output": output,
    }


def fit_lines(fit: Fit, model: str) -> Iterator[str]:
    """The answer in sentences: what fits, at what cost, and what is known of one size more."""
    plan, memory = fit.plan, format_size(fit.memory)
    if plan is None:
        yield f"{model} doesn't fit {memory}: no plan was found that does, at any {fit.vary}."
    else:
        where = "portable, workspace not counted" if plan.device == "none" else f"on {plan.device}"
        yield (
            f"{fit.vary} {fit.size} fits {memory} ({plan.mode}, {where}): {format_size(plan.total_bytes)} in all, "
            + (f"{plan.overhead:+.1%} extra cost." if plan.recomputed else "nothing is recomputed.")
        )
        yield "  " + " + ".join(f"{name} {format_size(size)}" for name, size in plan.parts.items() if size)
        yield from window_line(weight_figures(plan))
        yield from chunks_lines(plan)
    if fit.is_stopped:
        in_slices = plan is not None and not plan.chunks and fit.options.chunks != "off" and plan.mode == "inference"
        often = " In slices, which weren't looked at, often several times as much does." if in_slices else ""
        larger = f"what is larger than {fit.vary} {fit.size}"
        yield f"Stopped: {larger} wasn't looked at to the end, and may fit, too.{often}"
    if fit.beyond is not None or not fit.is_stopped:
        yield _beyond(fit)


def _beyond(fit: Fit) -> str:
    beyond = fit.beyond
    if beyond is None:
        return f"No larger {fit.vary} can be planned."
    what = f"{fit.vary} {beyond.size}"
    if beyond.status == "refused":
        return f"{what} is more than the model itself takes: {beyond.reason}"
    assert beyond.lower_bound_bytes is not None
    least = f"takes at least {format_size(beyond.lower_bound_bytes)}"
    if beyond.status == "proven":
        over = in_full(beyond.lower_bound_bytes - fit.memory)
        return f"{what} doesn't, proven: {_every(fit, beyond)} {least}, {over} too much.{_not_counted(beyond)}"
    assert beyond.total_bytes is not None
    whole = beyond.whole_bound_bytes
    without = "" if whole is None else f", without chunks at least {format_size(whole)}"
    if (in_memory := beyond.in_memory_bound_bytes) is not None:
        where = "with nothing in files" if fit.options.device == "cpu" else "with all weights in the device's memory"
        without += f", {where} at least {format_size(in_memory)}"
    return (
        f"{what} is open: the smallest plan found takes {format_size(beyond.total_bytes)}, "
        f"{in_full(beyond.total_bytes - fit.memory)} too much; {_every(fit, beyond)} {least}{without}."
        f"{_not_counted(beyond)}"
        + (" Sizes between weren't looked at." if beyond.size > fit.size + 1 and not fit.is_stopped else "")
    )


def _every(fit: Fit, beyond: Beyond) -> str:
    """What a lower bound is said of."""
    switches = f" with {', '.join(fit.bound_holds_for)}" if fit.bound_holds_for else ""
    again = "whatever it recomputes" if fit.recomputes else "recomputing nothing"
    chunks = "" if beyond.whole_bound_bytes is None else ", in chunks or not"
    return f"every plan{switches}, in any order, {again}{chunks},"


def _not_counted(beyond: Beyond) -> str:
    """What isn't in a lower bound."""
    if not beyond.run_time_bytes:
        return ""
    size = format_size(beyond.run_time_bytes)
    return f" Of the smallest plan {size} are for what the inputs decide the size of; no bound counts these."


def sizes_table(fit: Fit) -> Table:
    """Plans of several sizes within the memory."""
    table = table_of(f"Within {format_size(fit.memory)}", fit.vary, "total", "extra cost", "a run", "samples/s")
    for point in fit.frontier:
        seconds, rate = point.seconds, point.samples_per_second
        table.add_row(
            str(point.size), format_size(point.total_bytes), f"{point.overhead:+.1%}",
            "not measured" if seconds is None else f"{seconds * 1e3:.1f} ms", "" if rate is None else f"{rate:.1f}",
        )  # fmt: skip
    return table
