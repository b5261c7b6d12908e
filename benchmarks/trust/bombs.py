"""Small files that ask for much, each planned or refused: ``python -m benchmarks.trust.bombs`` writes bombs.txt.

Each file is given to ``memonger plan`` without a device and on the CPU; what was planned is verified and run. Beside it
stands what stock onnxruntime does with the file: a session with its default options, and one run. Every command has a
process of its own, which is ended after `LONGEST` seconds of processors, and gets at most `MEMORY` bytes of addresses.
Memory is the peak resident size of the command's largest process.
"""

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from benchmarks.machine import Table, keep, stamp
from tests.support.bombs import NETWORKS

LONGEST, MEMORY = 100, 6 << 30
SAID = 110  # characters shown of what a command said
STOCK = """
import sys, numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
(x,) = session.get_inputs()
session.run(None, {x.name: numpy.zeros(x.shape, {"tensor(float)": "f4", "tensor(int64)": "i8"}[x.type])})
"""
TABLE = Table("network<28", "command<19", "seconds>8.1f", "CPU s>8.1f", "MiB>7d", "what happened<10")


def _command(arguments: Sequence[str]) -> tuple[float, float, int, str]:
    """Run Python: seconds by the clock and of processors, MiB at its peak, and what happened."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (LONGEST, LONGEST + 5))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    with tempfile.TemporaryFile() as said:
        begin = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=said, preexec_fn=limit
        )
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.monotonic() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()
    return seconds, used.ru_utime + used.ru_stime, used.ru_maxrss >> 10, _happened(process.returncode, lines)


def _happened(status: int, lines: Sequence[str]) -> str:
    notes = [line for line in lines if not line.startswith("memonger: note: ")]
    last = lines[-1] if lines else ""
    if not status:
        return "done"
    if status == 1 and len(notes) == 1 and last.startswith("memonger: "):
        what = "refused: " + last.removeprefix("memonger: ").removeprefix("error: ")
    elif status < 0:
        name = signal.Signals(-status).name
        return f"still ran after {LONGEST} s of processors" if name == "SIGXCPU" else f"DIED of {name}"
    else:
        what = f"STATUS {status}: {last}"
    return what if len(what) <= SAID else what[: SAID - 4] + " ..."


def _rows(name: str, source: Path, folder: Path) -> Iterator[str]:
    """What each command does with a file."""

    def row(title: str, arguments: Sequence[str]) -> str:
        *figures, happened = _command(arguments)
        return TABLE.row(name, title, *figures, happened.replace(f"{folder}/", ""))

    for device in ("none", "cpu"):
        planned = folder / f"{device}.onnx"
        plan = ["plan", source, "--mode", "inference", "--device", device, "--threads", "1", "-o", planned, "--quiet"]
        yield row(f"plan, device {device}", ["-m", "memonger", *map(str, plan)])
        if planned.is_file():
            yield row("  verify", ["-m", "memonger", "verify", str(planned)])
            yield row("  run", ["-m", "memonger", "run", str(planned), "--runs", "1", "--quiet"])
            planned.unlink()
    if source.is_file():
        yield row("stock onnxruntime", ["-c", STOCK, str(source)])


def _table(names: Sequence[str]) -> Iterator[str]:
    yield from stamp("trust.bombs", ["memonger", "onnx", "onnx-ir", "onnxruntime", "numpy"])
    yield TABLE.heading
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            path = Path(folder) / "model.onnx"
            path.write_bytes(NETWORKS[name]().SerializeToString())
            yield from _rows(name, path, Path(folder))
        yield from _rows("/dev/zero", Path("/dev/zero"), Path(folder))


@click.command()
@click.option("--network", "names", multiple=True, type=click.Choice(list(NETWORKS)), help="All if left out.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the table here.")
def main(names: tuple[str, ...], output: Path | None) -> None:
    """Plan, verify and run."""
    keep(_table(names or tuple(NETWORKS)), output)


if __name__ == "__main__":
    main()
