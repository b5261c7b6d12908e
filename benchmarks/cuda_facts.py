"""What stock onnxruntime does with CUDA: ``python -m benchmarks.cuda_facts [--device cuda:0]``.

Holds what DESIGN.md and docs/ARCHITECTURE.md say of onnxruntime (on the CPU) against onnxruntime-gpu, one row a claim:
what was seen, and whether it holds. Each check runs in a process of its own, so that one that fails or crashes is a row
and not the end. Writes cuda_facts.txt after every check; ``--only NAME`` runs some and prints them.

Without a GPU it runs on the stand-in (``python -m tests.support.fake_cuda python -m benchmarks.cuda_facts``):
placement, order, addresses, allocation and errors are onnxruntime's own there, computed values mean nothing, and rows
that need them say so. The table's head says which it was.
"""

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from benchmarks.facts.fact import LOST, Fact, written
from memonger.devices import Device, parse_device

HERE = Path(__file__).parent
TIMEOUT = 900.0  # seconds for one check


@dataclass(frozen=True, slots=True)
class Check:
    """A section of the table: a generator of facts in benchmarks.facts."""

    title: str
    module: str
    function: str

    def facts(self, device: Device) -> Iterator[Fact]:
        yield from getattr(importlib.import_module(f"benchmarks.facts.{self.module}"), self.function)(device)


CHECKS: Mapping[str, Check] = {
    "order": Check("Order", "order", "check_order"),
    "any-order": Check("Order: a plan's instead of onnxruntime's", "order", "check_any_order"),
    "inference": Check("Networks reloaded: inference", "order", "check_reload_inference"),
    "training": Check("Networks reloaded: training steps", "order", "check_reload_training"),
    "bound": Check("Addresses: bound outputs", "addresses", "check_bound_outputs"),
    "special": Check("Addresses: inputs, views, subgraphs, many", "addresses", "check_special_outputs"),
    "in-place": Check("Addresses: in place", "values", "check_in_place"),
    "host": Check("Values on the host", "tables", "check_host_values"),
    "allocator": Check("Memory: external allocator, statistics", "memory", "check_external_allocator"),
    "scratch": Check("Memory: scratch by cuDNN option", "memory", "check_fixed_region"),
    "arena": Check("Memory: the provider's own arena", "memory", "check_provider_arena"),
    "loading": Check("Memory: weights while loading", "memory", "check_loading"),
    "replay": Check("CUDA graphs: replay", "graphs", "check_replay"),
    "executions": Check("CUDA graphs: executions of a run", "graphs", "check_executions"),
    "graph-ids": Check("CUDA graphs: several in a session", "graphs", "check_several_graphs"),
    "graph-refusals": Check("CUDA graphs: what is refused", "graphs", "check_refusals"),
    "graph-allocation": Check("CUDA graphs: allocation under capture", "graphs", "check_allocation"),
    "graph-unbound": Check("CUDA graphs: session.run", "graphs", "check_unbound"),
    "times": Check("Profile", "values", "check_times"),
    "scatter": Check("Determinism: scattered sums", "values", "check_scatter"),
    "repeat": Check("Determinism: training steps by cudnn_conv_algo_search", "values", "check_repeatable"),
    "opsets": Check("Operators: kernels by opset", "tables", "check_opsets"),
    "operators": Check("Operators: kernels by element type", "tables", "check_operators"),
}


def in_process(name: str, device: Device) -> Iterator[Fact]:
    """A check's facts, from a process of its own; what it dies of is one more."""
    command = [sys.executable, "-m", "benchmarks.cuda_facts", "--device", str(device), "--child", name]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        output, words, code = result.stdout, result.stderr, result.returncode
    except subprocess.TimeoutExpired as late:
        output, words, code = _text(late.stdout), f"no end after {TIMEOUT:.0f} s", -1
    yield from (Fact(**json.loads(line)) for line in output.splitlines() if line.startswith('{"claim"'))
    if code:
        last = [line for line in words.splitlines() if line.strip()][-1:]
        yield Fact(f"the check {name!r} runs to its end", f"exit status {code}: {' '.join(last)[:400]}", LOST)


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _child(name: str, device: Device) -> None:
    """Print a check's facts, one line of JSON each."""
    from benchmarks.facts.device import prepare

    prepare()
    for fact in CHECKS[name].facts(device):
        print(json.dumps(asdict(fact)), flush=True)


def head(device: Device) -> str:
    """What the table was made on."""
    from benchmarks.facts.device import driver
    from benchmarks.machine import machine

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
            "python -m benchmarks.cuda_facts"
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
