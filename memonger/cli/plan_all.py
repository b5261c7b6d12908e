"""The command ``plan-all``: plans of many models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memonger.cli.output import Screen, print_json, print_line, print_notes, print_wide, progress_bar
from memonger.cli.planning import options_of, wrong_usage
from memonger.errors import PlanError
from memonger.option_names import Engine
from memonger.planner import plan_all as planner
from memonger.planner.plan_all import Row, row_record
from memonger.report import text


def plan_all(
    models: tuple[Path, ...], output: Path | None, force: bool, jobs: int | None, engine: Engine,
    batches: tuple[int, ...], budgets: Sequence[str], devices: Sequence[str], train_mode: bool, as_json: bool,
    quiet: bool, **flags: Any,
) -> None:  # fmt: skip
    """Plan models, write what is asked for, and print a table. The exit status is 1 if there isn't a plan for each."""
    chosen = options_of({**flags, "budget": 0 if budgets else None}, *models)
    with wrong_usage():
        chosen.check_budget()
    count = len(models) * (len(batches) or 1) * (len(devices) or 1)
    steps = count * ((len(budgets) or 1) + any(budget.endswith("%") for budget in budgets))
    with progress_bar(quiet, f"Planning {len(models)} models", steps) as report_progress:
        rows = planner.plan_all(
            models, batches=batches, budgets=budgets, devices=devices, jobs=jobs, engine=engine, output=output,
            force=force, train_mode=train_mode, options=chosen, progress=report_progress,
        )  # fmt: skip
    print_notes([f"{row.name}: {note}" for row in rows for note in row.notes])
    failed = [row for row in rows if row.error is not None]
    if as_json:
        print_json({
            "plans": [row_record(row) for row in rows], "failed": len(failed),
            "output": None if output is None else str(output),
        })  # fmt: skip
    else:
        print_wide(Screen(), text.fleet_table(rows))
        alike = dict[tuple[str, str | None], list[Row]]()  # those of one model with one error are said together
        for row in failed:
            alike.setdefault((row.name, row.error), []).append(row)
        for same in alike.values():
            row, more = same[0], f" (and {len(same) - 1} more)" if len(same) > 1 else ""
            settings = (None if row.batch is None else f"batch {row.batch}", row.device, row.budget)
            print_line(f"No plan of {', '.join([row.name, *filter(None, settings)])}{more}: {row.error}")
        if output is not None:
            print_line(f"Wrote {output}: {len(rows) - len(failed)} planned files, and memonger.json with this table.")
    if failed:
        raise PlanError(f"{len(failed)} of {len(rows)} plans failed: {failed[0].name}: {failed[0].error}")
