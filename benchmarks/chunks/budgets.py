"""GPT-2 in ever smaller budgets, with chunks, recomputing, and both: the table of ``benchmarks.chunks --budgets``."""

import statistics
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from benchmarks.chunks.plans import Planner, Wish, slices
from benchmarks.machine import MIB, Record, Table, progress, stamp
from benchmarks.networks import write
from benchmarks.turns import race, session_of
from memonger.cli.differences import difference
from memonger.cli.measure_steps import MeasuredTrainer, StepsJob
from memonger.runtime.measure import MeasuredSession, RunJob, read_arrays
from memonger.runtime.worker import WorkerError, reason

LAYERS = 2
NAMES, BATCHES = ("gpt2_step", "gpt2", "gpt2_scores"), (1, 4)
TRAINS = "gpt2_step"
SHARES = (0.5, 0.3, 0.2, 0.1)
WAYS: dict[str, dict[str, Any]] = {"chunks": {"chunks": "auto"}}
STEP_WAYS: dict[str, dict[str, Any]] = {"recomputing": {"chunks": "off"}, "both": {"chunks": "auto"}}
LEAST: dict[str, Any] = {"chunks": "auto", "strategy": "none", "max_overhead": 1e6}  # of steps that recompute nothing
ROUNDS, TURN_SECONDS = 3, 1.0
COLUMNS = Table(
    "network<13", "batch>5", "budget>8", "MiB>9.1f", "way<13", "planned>9.1f", "run>9.1f", "ms>9.1f", "time>7.3f",
    "bits<7", "plan s>7.1f", "nodes>7", "again>6", "slices<20",
)  # fmt: skip


def budget_lines(record: Record, threads: int) -> Iterator[str]:
    """The table of what was measured."""
    yield "Inference and training in ever smaller budgets: GPT-2 with 1,024 tokens and 50,257 words"
    yield from stamp("chunks --budgets", ("onnxruntime", "onnx", "numpy", "torch"))
    yield f"{LAYERS} layers instead of 12: budgets are of arena and workspace, which hardly grow with layers; gpt2"
    yield "gives all logits, gpt2_scores one number for each token, gpt2_step is a training step with AdamW, whose"
    yield "chunks alone are those that take least memory, for whatever budget they fit. Inference recomputes nothing."
    yield "budget: of arena and workspace of the plan without chunks and budget, in MiB; run: what a run takes over the"
    yield f"loaded model; time: over that plan's, both taking turns, {threads} threads; bits: against that plan; plan"
    yield "s: preparing the model included; again: nodes that run again; refused: the smallest that was found."
    yield from ("", COLUMNS.heading)
    for name in (name for name in _row_names() if name in record.rows):
        yield from _lines(name, record.rows)


def measure_budgets(record: Record, threads: int, untimed: bool) -> None:
    """Measure the rows that aren't there, failed, or weren't timed but are to be."""

    def is_done(name: str) -> bool:
        row = record.rows.get(name, {"failed": "missing"})
        return not row.get("failed") and (untimed or "raced" not in row or "seconds" in row["raced"])

    with ExitStack() as stack:
        group: _Group | None = None
        for row_name in progress(_row_names(), record, is_done):
            name, batch, share, way = row_name.split()
            try:
                if group is None or group.key != (name, int(batch)):
                    stack.pop_all().close()
                    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                    group = stack.enter_context(_Group(name, int(batch), threads, folder, untimed))
                record.add(row_name, group.row(float(share), way))
            except Exception as error:  # the next row goes on
                record.add(row_name, {"budget": 0, "failed": reason(error)})
            print("\n".join(_lines(row_name, record.rows)), flush=True)


def _row_names() -> list[str]:
    """Of all rows, in order: the network, the batch, the part of the plain plan's memory, and the way to hold it."""
    names = list[str]()
    for name in NAMES:
        for batch in BATCHES:
            names.append(f"{name} {batch} 1 plain")
            names += [f"{name} {batch} 1 least"] if name == TRAINS else []
            ways = STEP_WAYS if name == TRAINS else WAYS
            names += [f"{name} {batch} {share} {way}" for share in SHARES for way in ways]
    return names


class _Group:
    """The rows of one network at one batch: planned in one process, and measured beside one plain plan."""

    def __init__(self, name: str, batch: int, threads: int, folder: Path, untimed: bool) -> None:
        self.key = name, batch
        self._folder, self._threads, self._untimed, self._trains = folder, threads, untimed, name == TRAINS
        write(name, folder / "model.onnx", num_layers=LAYERS)
        self._planner, self._race = Planner(folder), Race(folder, threads, self._trains)
        try:
            self._plain = self._planned("plain", chunks="off", strategy="none" if self._trains else "")
        except BaseException:
            self._planner.end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._planner.end()
        self._race.end()

    def _planned(self, kind: str, **options: Any) -> dict[str, Any]:
        batch = self.key[1]
        keep, model = str(self._folder / f"{kind}.onnx"), str(self._folder / "model.onnx")
        return self._planner.plan(
            Wish(model, batch, self._threads, keep=keep, prepared=True, trains=self._trains, **options)
        )

    def row(self, share: float, way: str) -> dict[str, Any]:
        """What was planned and measured; or why not."""
        budget = round(share * self._plain["peak"])
        row: dict[str, Any] = {"budget": budget, "failed": ""}
        try:
            if way == "plain":
                return row | {"plan": self._plain, "raced": self._race.against("plain", self._untimed)}
            if way == "least":
                plan = self._planned("way", **LEAST)
            else:
                ways = STEP_WAYS if self._trains else WAYS
                plan = self._planned("way", budget=self._plain["base"] + budget, **ways[way])
            if "smallest" in plan or plan["peak"] > budget:
                return row | {"smallest": plan.get("smallest", 0) - self._plain["base"]}
            return row | {"plan": plan, "raced": self._race.against("way", self._untimed)}
        except WorkerError as error:
            return row | {"failed": str(error)}
        except Exception as error:  # the next row goes on
            return row | {"failed": reason(error)}


class Race:
    """A plan, ``plain.onnx`` in a folder, beside which others of the folder are measured, each in a process of its own.

    Used in a ``with`` statement, which ends the process that runs it.
    """

    def __init__(self, folder: Path, threads: int, trains: bool = False) -> None:
        self._folder, self._threads, self._trains = folder, threads, trains
        self._plain: MeasuredSession | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the process."""
        if self._plain is not None:
            self._plain.end()

    def against(self, kind: str, untimed: bool = False) -> Mapping[str, Any]:
        """A plan beside the plain one: bytes of a run, seconds, their ratio to the plain one's, how the bits are.

        Args:
            kind: The plan's file, without its ending.
            untimed: Leave seconds and their ratio out.
        """
        if self._plain is None:
            self._plain = self._worker("plain")
        if kind == "plain":
            return _timed(self._plain, self._plain, untimed)
        with self._worker(kind) as worker:
            mine, plain = (read_arrays(self._outputs(one)) for one in (kind, "plain"))
            bits = "same" if difference(mine, plain).bitwise_equal else "DIFFER"
            return {**_timed(self._plain, worker, untimed), "bits": bits}

    def _outputs(self, kind: str) -> Path:
        return self._folder / f"{kind}.outputs.npz"

    def _worker(self, kind: str) -> MeasuredSession:
        """A process whose first outputs, or state after two steps, are written."""
        files = str(self._folder / f"{kind}.onnx"), str(self._folder / "plain.npz"), str(self._outputs(kind))
        if not self._trains:
            return session_of(RunJob(*files, planned=True, threads=self._threads), self._folder, kind)
        trainer = MeasuredTrainer(StepsJob(*files, planned=True, untimed=2, threads=self._threads), self._folder, kind)
        trainer.save()
        return trainer


def _timed(plain: MeasuredSession, worker: MeasuredSession, untimed: bool) -> dict[str, Any]:
    result: dict[str, Any] = {"peak": worker.loaded["peak_bytes"] or 0, "bits": "same"}
    if untimed:
        return result
    race(list(dict.fromkeys((plain, worker))), ROUNDS, TURN_SECONDS)
    seconds, once = (statistics.median(one.seconds) for one in (worker, plain))
    return result | {"seconds": seconds, "ratio": seconds / once}


def _lines(row_name: str, rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A row of the table; of the least chunks of a step one for each budget that they fit."""
    name, batch, share, way = row_name.split()
    row = rows[row_name]
    if way == "least":
        plain = rows[f"{name} {batch} 1 plain"]["budget"]  # 0 where that failed
        for part in (1.0, *SHARES):
            fits = row["failed"] or ("plan" in row and row["plan"]["peak"] <= part * plain)
            smallest = row["plan"]["peak"] if "plan" in row else row.get("smallest")
            shown = row if fits else {"smallest": smallest, "failed": ""}
            yield _line(name, batch, part, "chunks", shown, round(part * plain))
    else:
        yield _line(name, batch, float(share), way, row, row["budget"])


def _line(name: str, batch: str, share: float, way: str, row: Mapping[str, Any], budget: int) -> str:
    begin = name, batch, f"{share:.0%}", budget / MIB, way
    if row["failed"]:
        return COLUMNS.row(*begin, f"failed: {row['failed']}")
    if "plan" not in row:
        return COLUMNS.row(*begin, f"refused: {row['smallest'] / MIB:.1f}")
    plan, raced = row["plan"], row["raced"]
    seconds, ratio = (raced["seconds"] * 1e3, raced["ratio"]) if "seconds" in raced else (None, None)
    return COLUMNS.row(
        *begin, plan["peak"] / MIB, raced["peak"] / MIB, seconds, ratio, raced["bits"], plan["seconds"], plan["nodes"],
        plan["recomputed"], slices(plan),
    )  # fmt: skip
