"""The command ``fit``: the largest size that fits a memory."""

import sys
from pathlib import Path
from typing import Any

from memonger.cli.output import Screen, print_json, print_notes, progress_bar
from memonger.cli.planning import source_and_options
from memonger.planner import fit as planner
from memonger.report.fit import fit_lines, fit_record, sizes_table

STOPPED = 130
"""The exit status of what Ctrl-C ended, as shells have it."""


def fit(
    model: Path,
    memory: int,
    vary: str,
    frontier: int,
    output: Path | None,
    as_json: bool,
    quiet: bool,
    train_mode: bool,
    lora: tuple[int, str] | None,
    **flags: Any,
) -> None:
    """Find the largest size that fits, write what is asked for, and print the answer. The exit status is 1 if none, and
    `STOPPED` after Ctrl-C, which leaves the largest that was found by then."""
    _, options = source_and_options(model, flags)
    with progress_bar(quiet, f"Fitting {model.name}") as report_progress:
        fitted = planner.fit(
            model, memory, vary, train_mode=train_mode, lora=lora, frontier=frontier, options=options,
            progress=report_progress,
        )  # fmt: skip
        written = None
        if fitted.plan is not None and output is not None:
            report_progress("writing")
            fitted.plan.save(output)
            written = output
    if fitted.plan is not None:
        print_notes(fitted.plan.notes)
    if as_json:
        print_json(fit_record(fitted, str(model), None if written is None else str(written)))
    else:
        console = Screen()
        for line in fit_lines(fitted, str(model)):
            console.print(line, soft_wrap=True)
        if fitted.frontier:
            console.print(sizes_table(fitted))
        console.print(
            f"Took {fitted.seconds:.1f} s. Planned at {fitted.vary} {', '.join(map(str, fitted.tried))}.",
            soft_wrap=True,
        )
        if written is not None:
            console.print(f"Wrote {written}.", soft_wrap=True)
    if fitted.is_stopped:
        sys.exit(STOPPED)
    if not fitted.fits:
        sys.exit(1)
