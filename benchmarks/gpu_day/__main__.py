"""Measure on a GPU what is to be measured there: ``python -m benchmarks.gpu_day --minutes 10 --out DIR``.

Rows go to DIR/rows.jsonl as they come; the table (table.txt), plots and sentences are made of them at the end, and
``--print`` makes them alone. Rows that are there are kept: the next call goes on with what is missing.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from benchmarks.gpu_day import record, report
from benchmarks.gpu_day.stages import BY_KEY, STAGES, Settings, Stage
from memonger.runtime.worker import Worker, WorkerError

HERE = Path(__file__).parent
TEN_MINUTES = 600.0
FOR_ABOUT, FOR_REPORT = 60.0, 5.0  # seconds
FREE_TO_REHEARSE = 64 << 20


@dataclass(frozen=True, slots=True)
class Job:
    """An item of a stage, with the seconds it has."""

    stage: Stage
    item: str
    seconds: float


class Program:
    """What is measured until the time is over."""

    def __init__(self, settings: Settings, path: Path, end: float) -> None:
        self.settings, self.path, self.end = settings, path, end

    def left(self) -> float:
        """Seconds left for measuring."""
        return self.end - FOR_REPORT - time.monotonic()

    def run(self, jobs: Iterable[Job]) -> None:
        """Measure one after another; a process serves its stage until one of its items fails."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            worker, of = None, ""
            for job in jobs:
                if worker is None or of != job.stage.key:
                    if worker is not None:
                        worker.end()
                    worker, of = self._worker(job.stage.key, folder), job.stage.key
                begin = time.monotonic()
                try:
                    row = worker.ask({"item": job.item, "seconds": job.seconds}, job.seconds)
                except WorkerError as error:
                    row = {"failed": str(error)}
                    worker.end(parting=0.5)
                    worker = None
                seconds = round(time.monotonic() - begin, 1)
                record.append(self.path, {"stage": job.stage.key, "item": job.item, "seconds": seconds, **row})
                click.echo(f"{job.stage.key} {job.item}: {seconds} s {row.get('failed', '')}", err=True)
            if worker is not None:
                worker.end()

    def about(self, needed: int) -> dict[str, Any]:
        """What there is; ``missing`` where nothing can be measured."""
        with tempfile.TemporaryDirectory() as folder, self._worker("about", Path(folder)) as worker:
            try:
                return worker.ask({"item": str(needed), "seconds": FOR_ABOUT}, FOR_ABOUT)
            except WorkerError as error:
                return {"missing": [f"{self.settings.device} can't be used: {error}"]}

    def _worker(self, stage: str, folder: Path) -> Worker:
        settings = folder / "settings.json"
        settings.write_text(json.dumps(asdict(replace(self.settings, folder=str(folder)))))
        return Worker("benchmarks.gpu_day.work", [stage, str(settings)], folder / f"{stage}.err")

    def jobs(self, stages: Iterable[Stage], share: float) -> Iterator[Job]:
        """What is missing, in order of worth: each stage within its share first, then what is left of all of them.

        Args:
            stages: Those to measure.
            share: The time there is, over ten minutes.
        """
        stages = list(stages)
        for within_share in (True, False):
            for stage in stages:
                until = time.monotonic() + stage.share * share if within_share else self.end
                for item in self._missing(stage):
                    seconds = min(stage.limit, self.left())
                    if min(until - time.monotonic(), self.left()) < (0.0 if self.settings.rehearse else stage.each):
                        break
                    yield Job(stage, item, seconds)

    def _missing(self, stage: Stage) -> list[str]:
        there = {row["item"] for row in record.load(self.path) if row["stage"] == stage.key}
        return [item for item in stage.of(self.settings.rehearse) if item not in there]


def _stages(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[Stage, ...]:
    keys = [key.strip() for key in text.split(",")] if text else list(BY_KEY)
    unknown = [key for key in keys if key not in BY_KEY]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r} is no stage: {', '.join(BY_KEY)}")
    return tuple(stage for stage in STAGES if stage.key in keys)


def _estimate(stages: Iterable[Stage], rehearse: bool) -> list[str]:
    """Minutes by stage, as they are expected."""
    lines = [
        f"  {stage.key:10}{len(stage.of(rehearse)):3} rows of about {stage.each:3.0f} s, {stage.share / 60:4.1f} of the"
        f" first ten minutes: {stage.title}"
        for stage in stages
    ]
    total = sum(len(stage.of(rehearse)) * stage.each for stage in stages)
    return ["Rows, as they are expected to take:", *lines, f"  all of them: {total / 60:.0f} minutes"]


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--minutes", type=click.FloatRange(0.1, 120), default=10.0, show_default=True, help="In all.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=HERE / "measured", help="Where rows go."
)
@click.option("--device", default="cuda:0", show_default=True)
@click.option("--stages", callback=_stages, help=f"Some of {','.join(BY_KEY)}, with commas between.")
@click.option("--again", is_flag=True, help="Measure rows that failed once more.")
@click.option("--rehearse", is_flag=True, help="Tiny networks, PyTorch on the CPU: figures mean nothing.")
@click.option("--print", "only_print", is_flag=True, help="Table, plots and sentences from the rows alone.")
@click.option("--no-torch", is_flag=True, help="Without the stages that measure PyTorch, too.")
@click.option("--no-tf32", is_flag=True, help="Products of float32 in float32, on all sides.")
def main(
    minutes: float, out: Path, device: str, stages: tuple[Stage, ...], again: bool, rehearse: bool, only_print: bool,
    no_torch: bool, no_tf32: bool,
) -> None:  # fmt: skip
    """Measure, or print what was measured."""
    end = time.monotonic() + minutes * 60
    path = out / "rows.jsonl"
    if only_print:
        report.write(record.load(path), out)
        return
    stages = tuple(stage for stage in stages if not (no_torch and stage.torch))
    out.mkdir(parents=True, exist_ok=True)
    for line in _estimate(stages, rehearse):
        click.echo(line, err=True)
    settings = Settings(device=device, rehearse=rehearse, torch=not no_torch, tf32=not no_tf32)
    needed = FREE_TO_REHEARSE if rehearse else max(stage.needs for stage in stages)
    found = Program(settings, path, end).about(needed)
    if "missing" in found or "failed" in found:
        for line in found.get("missing", [found.get("failed")]):
            click.echo(f"{line}.".replace("..", "."), err=True)
        sys.exit(1)
    rows = record.load(path)
    before = record.head(rows)
    if before is not None and (before["device"], before["machine"]) != (found["device"], found["machine"]):
        raise click.ClickException(
            f"{path} holds rows of {before['device']}; {before['machine']}; this is {found['device']}; "
            f"{found['machine']}: name another folder (--out)"
        )
    if again:
        kept = [row for row in rows if not row.get("failed")]
        path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    record.append(path, {"stage": "about", "item": "versions", "seconds": 0.0, "tf32": not no_tf32, **found})
    program = Program(replace(settings, context=found["context"]), path, end)
    program.run(program.jobs(stages, minutes * 60 / TEN_MINUTES))
    report.write(record.load(path), out)


if __name__ == "__main__":
    main()
