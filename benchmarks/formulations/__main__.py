"""Measure the formulations and print one table: ``python -m benchmarks.formulations [GROUP]...`` (see --help)."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import torch

from benchmarks.formulations import conv, depthwise, matmul, norm, optimizer, pointwise, pool, rows
from benchmarks.formulations.harness import Case, Result, measure
from benchmarks.machine import machine

GROUPS: dict[str, Callable[[int], Iterator[Case]]] = {
    "conv": conv.cases,
    "depthwise": depthwise.cases,
    "norm": norm.cases,
    "pointwise": pointwise.cases,
    "pool": pool.cases,
    "rows": rows.cases,
    "matmul": matmul.cases,
    "optimizer": optimizer.cases,
}


def line(result: Result) -> str:
    """One row: PyTorch's milliseconds, the rule's ratio, then every candidate's, the rule's choice in brackets."""
    case = result.case
    if result.stalled:
        return f"{case.group:11}{case.name:38}{result.reference * 1e3:>9.3f}{'-':>7}  PyTorch's threads stalled"
    ratios = {name: seconds / result.reference for name, seconds in result.seconds.items()}
    shown = [
        f"[{name} {ratio:.2f}]" if name == case.rule else f"{name} {ratio:.2f}"
        for name, ratio in sorted(ratios.items(), key=lambda item: item[1])
    ]
    shown += [f"{name} refused" for name in result.refused]
    rule = ratios.get(case.rule, math.nan)
    return f"{case.group:11}{case.name:38}{result.reference * 1e3:>9.3f}{rule:>7.2f}  {'  '.join(shown)}"


@click.command()
@click.argument("groups", nargs=-1, type=click.Choice(list(GROUPS)))
@click.option("--batch", default=8, show_default=True, help="Images, or sequences.")
@click.option("--threads", default=2, show_default=True, help="Threads of PyTorch and of onnxruntime.")
@click.option("--seconds", default=4.0, show_default=True, help="The longest that a case is measured.")
@click.option("--match", default="", help="Only cases whose name contains this.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the table here as well.")
def main(groups: tuple[str, ...], batch: int, threads: int, seconds: float, match: str, output: Path | None) -> None:
    """Measure GROUPS, or all of them."""
    torch.set_num_threads(threads)
    command = f"python -m benchmarks.formulations {' '.join(groups)} --batch {batch} --threads {threads}"
    lines: list[str] = []

    def show(text: str) -> None:
        print(text, flush=True)
        lines.append(text)

    show(
        "Gradients in standard ONNX operators: time over that of PyTorch eager's kernel, least of many interleaved runs"
    )
    show(machine(("onnxruntime", "torch", "onnx", "numpy")))
    show(f"command: {' '.join(command.split())}")
    show(f"clock: {'processor time of one thread' if threads == 1 else 'wall time'}\n")
    show("y: forward; dx, dw: gradient of the input, of the weight; [..]: what the rule by shape picks")
    show("a row where PyTorch's threads gain nothing over one thread (the machine was busy) shows no ratios")
    show(f"{'group':11}{'case':38}{'torch ms':>9}{'rule':>7}  candidates over torch, fastest first")
    for group in groups or GROUPS:
        for case in GROUPS[group](batch):
            if match in case.name:
                show(line(measure(case, threads, seconds)))
    if output is not None:
        output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
