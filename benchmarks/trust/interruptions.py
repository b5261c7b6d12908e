"""Kills and full disks while files are saved, Ctrl-C while a model trains and runs: is what is left whole?

python -m benchmarks.trust.interruptions [--times 100] [-o benchmarks/trust/interruptions.txt]
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

from benchmarks.machine import Table, keep, stamp
from tests.support.interruptions import INTERRUPTED, KINDS, fill_while_saving, interrupt, kill_while_saving


def _lines(times: int) -> Iterator[str]:
    yield from stamp(f"trust.interruptions --times {times}", ["memonger", "onnx", "onnxruntime"])
    table = Table("what<36", "times>7d", "afterwards<60")
    yield table.heading
    for name, attack in (("kill -9", kill_while_saving), ("no room", fill_while_saving)):
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as folder:
                results = attack(kind, Path(folder) / "saved", times)
            what = "; ".join(f"{count} {result}" for result, count in results.items())
            yield table.row(f"{name}, saving: {kind}", times, what)
    for kind in INTERRUPTED:
        count = interrupt(kind, times)
        yield table.row(f"Ctrl-C: {kind}", times, f"as without ({count} done)")


@click.command()
@click.option("--times", type=click.IntRange(1), default=100, show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the table here.")
def main(times: int, output: Path | None) -> None:
    """Interrupt each kind so many times."""
    keep(_lines(times), output)


if __name__ == "__main__":
    main()
