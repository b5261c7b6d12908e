"""Training beside what a user would pick instead, on the CPU: ``python -m benchmarks.training.peers [--resume]``.

Writes peers.txt, .json and _<kind>.png. PyTorch eager, with its memory kept (MALLOC_MMAP_MAX_=0: fresh pages are slow
on virtual machines), with checkpoints, compiled, and in three budgets; memonger with nothing recomputed and in three
budgets. ``--kinds largest``: the largest batch that 2 GB train. `side_by_side.networks` has the sizes, and how they
differ from a GPU's.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.machine import machine
from benchmarks.training.side_by_side import largest, plots, results, rows
from benchmarks.training.side_by_side.contestants import KINDS
from benchmarks.training.side_by_side.devices import Device
from benchmarks.training.side_by_side.networks import NETWORKS, size_of
from benchmarks.training.side_by_side.table import table
from benchmarks.training.side_by_side.turns import Clock, OutOfTime, Settings
from memonger.errors import PlanError
from memonger.units import parse_size

OUTPUT = Path(__file__).with_suffix(".json")
TITLE = "On the CPU, beside what a user would pick instead: memory and time of training steps"
ORDER = tuple((kind, name) for kind in KINDS for name in NETWORKS)
LARGEST = ("densenet_bc100", "mobilenet_v2", "resnet50")  # networks whose largest batch is sought where none are named


def parser() -> argparse.ArgumentParser:
    """The command line."""
    keys = dict.fromkeys(one.key for of in KINDS.values() for one in of("cpu"))
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--rows", type=_among(*NETWORKS), default=(), help="networks, with commas between")
    made.add_argument("--kinds", type=_among(*KINDS), default=("training",), help="training, largest")
    made.add_argument("--without", type=_among(*keys), default=(), help="contestants to leave out, such as compile")
    made.add_argument("--times", type=_counts, default=(1, 4), help="batches, as multiples of the networks' own")
    made.add_argument("--resume", action="store_true", help="keep the rows that are there, measure what is missing")
    made.add_argument("--minutes", type=float, help="stop after so many, between rows or within one")
    made.add_argument("--memory", type=_bytes, default=parse_size("2GB"), help="for the largest batch")
    made.add_argument("--patience", type=float, default=150.0, help="seconds a contestant has to get ready")
    made.add_argument("--rounds", type=int, default=5, help="turns each contestant takes")
    made.add_argument("--seconds", type=float, default=0.5, help="about how long a turn is")
    made.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    made.add_argument("--folder", type=Path, help="where exports and plans are kept for the next call")
    made.add_argument("--output", type=Path, help="the record, a .json; table and plots go beside it")
    made.add_argument("--print", action="store_true", help="table and plots from the record alone")
    return made


def _bytes(text: str) -> int:
    try:
        return parse_size(text)
    except PlanError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _counts(text: str) -> tuple[int, ...]:
    """Whole numbers above 0 with commas between."""
    found = tuple(int(part) for part in text.split(","))
    if min(found) < 1:
        raise ValueError(text)
    return found


def _among(*known: str) -> Callable[[str], tuple[str, ...]]:
    """What reads names with commas between, each of which has to be one of these."""
    return partial(_chosen, known=known)


def _chosen(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    unknown = [part for part in found if part not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} isn't one of {', '.join(known)}")
    return found


def wanted(asked: argparse.Namespace, device: Device) -> list[tuple[str, str, int]]:
    """Kind, network and batch of each row to measure, in the order they are measured; 0 for the largest batch."""
    found = []
    for kind, name in ORDER:
        names, times = asked.rows or tuple(NETWORKS), asked.times
        if kind == "largest":
            names, times = asked.rows or LARGEST, (0,)
        if kind in asked.kinds and name in names:
            found += [(kind, name, count * size_of(name, device.name).batch) for count in times]
    return found


def run(asked: argparse.Namespace, device: Device, output: Path) -> int:
    """Measure what is asked for; the record is written after every row, table and plots at the end.

    Returns: the exit status, 0 also when the time was over first.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or the contestants would outlive this
    end = None if asked.minutes is None else time.monotonic() + asked.minutes * 60
    earlier = results.load(output) if asked.resume and output.exists() else results.Record((), asked.memory)
    record = results.Record(_head(asked, device, earlier.head), asked.memory, earlier.rows)
    left = [key for key in wanted(asked, device) if not record.has(*key)]
    with ExitStack() as stack:
        folder = asked.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = Settings(
            device=device,
            threads=asked.threads,
            clock=Clock(end),
            patience=asked.patience,
            rounds=asked.rounds,
            seconds=asked.seconds,
            tf32=False,
            tuned=False,
            memory=asked.memory,
            without=asked.without,
            folder=folder.resolve(),
        )
        while left:
            try:
                row = _measured(*left[0], settings)
            except OutOfTime:
                names = ", ".join(" ".join(map(str, key)) for key in left)
                _tell(f"out of time; not measured: {names} (--resume continues)")
                break
            record = results.merged(record, row, ORDER)
            results.save(record, output)
            left = left[1:]
    show(record, output)
    return 0


def _measured(kind: str, name: str, batch: int, settings: Settings) -> results.Row:
    begin, size = time.monotonic(), size_of(name, settings.device.name, batch)
    settings.clock.left()
    row = largest.measure(name, size, settings) if kind == "largest" else rows.measure(kind, name, size, settings)
    row = replace(row, load=round(os.getloadavg()[0], 1))
    _tell(f"{kind} {name} {batch}: {time.monotonic() - begin:.0f} s")
    for result in row.results:
        _tell(f"  {result.title}: {result.failed or result.seconds}")
    return row


def show(record: results.Record, output: Path) -> None:
    """Print the table, and keep it and the plots beside the record."""
    text = table(record, cuda=False)
    output.with_suffix(".txt").write_text(text)
    plots.plot(record, output.with_suffix(""))
    print(text, end="")


def _head(asked: argparse.Namespace, device: Device, earlier: Sequence[str]) -> tuple[str, ...]:
    """What was measured where, by which calls, and how."""
    mine = " ".join(["command: python -m benchmarks.training.peers", *_telling(sys.argv[1:])])
    calls = [line for line in earlier if line.startswith("command: ") and line != mine]
    return (*device.head, *calls, mine, _how(asked))


def _telling(arguments: Sequence[str]) -> list[str]:
    """The arguments that figures depend on: all but where files go."""
    places = ("--folder", "--output")
    pairs = zip(["", *arguments], arguments, strict=False)
    return [one for before, one in pairs if one.partition("=")[0] not in places and before not in places]


def _how(asked: argparse.Namespace) -> str:
    turns = f"{asked.rounds} turns of {asked.seconds:g} s, two steps at least"
    return f"float32; {turns}; {asked.threads} threads; {asked.patience:g} s to get ready"


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Measure, or print what was measured; returns the exit status."""
    asked = parser().parse_args()
    output = asked.output or OUTPUT
    if asked.print:
        show(results.load(output), output)
        return 0
    device = Device("cpu", (TITLE, machine(("onnxruntime", "torch", "onnx", "onnx-ir", "numpy"))))
    return run(asked, device, output)


if __name__ == "__main__":
    sys.exit(main())
