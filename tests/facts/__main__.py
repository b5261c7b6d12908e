"""What stock onnxruntime does with CUDA: ``python -m tests.facts [--device cuda:0]``.

Compares what docs/CUDA.md and docs/decisions/onnxruntime.md say of onnxruntime with onnxruntime-gpu, one row a claim:
what was seen, and whether the claim holds. Writes tests/facts/cuda_facts.txt after every check; ``--only NAME`` runs
some checks and prints them. `test_facts.py` compares each check with that table.

Without a GPU it runs on the stand-in (``python -m tests.support.fake_cuda python -m tests.facts``): placement, order,
addresses, allocation and errors are onnxruntime's own there, computed values mean nothing, and rows that need them say
so. The table's head says which it was, and for which versions it holds.
"""

import json
import time
from dataclasses import asdict
from pathlib import Path

import click

from memonger.devices import Device, parse_device
from tests.facts.checks import CHECKS, in_process
from tests.facts.fact import written

HERE = Path(__file__).parent


def _child(name: str, device: Device) -> None:
    """Print a check's facts, one line of JSON each."""
    from tests.facts.device import prepare

    prepare()
    for fact in CHECKS[name].facts(device):
        click.echo(json.dumps(asdict(fact)))


def head(device: Device) -> str:
    """What the table was made on."""
    from benchmarks.machine import machine
    from tests.facts.device import driver

    unit = driver(device)
    real = (
        "a real device"
        if unit.is_real
        else "A STAND-IN (tests/support/fake_cuda): kernels do nothing, values mean nothing"
    )
    package = "onnxruntime-gpu"
    return f"What onnxruntime does with CUDA. {device}: {unit.name}, {real}.\n{machine([package, 'onnx', 'numpy'])}\n"


@click.command()
@click.option("--device", default="cuda:0", show_default=True)
@click.option("--only", multiple=True, type=click.Choice(list(CHECKS)), help="Checks to run; printed, not kept.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), default=HERE / "cuda_facts.txt")
@click.option("--child", hidden=True, type=click.Choice(list(CHECKS)))
def main(device: str, only: tuple[str, ...], output: Path, child: str | None) -> None:
    """Check what stock onnxruntime does with CUDA, and write the table."""
    unit = parse_device(device)
    if child:
        _child(child, unit)
        return
    try:
        text = head(unit)
    except Exception as error:  # no driver, no device: each with an error of its own
        raise click.ClickException(
            f"{device}: {error}. It needs an NVIDIA driver, a device and onnxruntime-gpu "
            "(pip install 'memonger[gpu]'); without one: python -m tests.support.fake_cuda "
            "python -m tests.facts"
        ) from error
    for name in only or CHECKS:
        begin = time.perf_counter()
        section = f"\n{CHECKS[name].title}\n{'-' * len(CHECKS[name].title)}\n{written(in_process(name, unit))}"
        click.echo(f"{name}: {time.perf_counter() - begin:.0f} s", err=True)
        text += section
        if only:
            click.echo(section)
        else:
            output.write_text(text)


if __name__ == "__main__":
    main()
