"""Cases drawn at random that have to be refused, or give the right numbers: ``python -m benchmarks.trust.fuzzing``.

``--kind KIND --seed N`` replays one case; FUZZING_LOUD=1 shows what it writes to standard error.
"""

import gc
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from benchmarks.machine import machine
from tests.support.fuzzing import BAD, OUTCOMES, Outcome, corpus, judge
from tests.support.fuzzing.cases import KINDS

EXAMPLES = 3  # replays shown of each signature
MANY = 2000  # cases from which it pays to make all models first


def table(outcomes: Iterable[Outcome], stamp: str) -> str:
    """Counts of every kind, and the bad outcomes by signature."""
    counts, bad = defaultdict[str, Counter[str]](Counter), defaultdict[tuple[str, str, str], list[Outcome]](list)
    for one in outcomes:
        counts[one.kind][one.result] += 1
        if one.result in BAD:
            bad[one.kind, one.result, one.signature].append(one)
    lines = [stamp, "", *(f"{name}: {text}" for name, text in OUTCOMES.items()), ""]
    lines.append(f"{'kind':<10} {'cases':>7}" + "".join(f"{name:>11}" for name in OUTCOMES))
    total = Counter[str]()
    for kind, counted in counts.items():
        total += counted
        lines.append(_row(kind, counted))
    lines.append(_row("all", total))
    for (kind, result, signature), cases in sorted(bad.items(), key=lambda item: (item[0][0], -len(item[1]))):
        lines += ["", f"{kind}: {len(cases)} x {result}: {signature}"]
        lines += [f"  --seed {case.seed}: {ascii(case.mutation)[1:-1][:160]}" for case in cases[:EXAMPLES]]
    return "\n".join(lines) + "\n"


def _row(name: str, counted: Counter[str]) -> str:
    return f"{name:<10} {counted.total():>7}" + "".join(f"{counted[result]:>11}" for result in OUTCOMES)


def _stamp() -> str:
    here = machine(("memonger", "onnx", "onnx-ir", "onnxruntime", "numpy", "protobuf", "click"))
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    return f"command: python -m benchmarks.trust.fuzzing {' '.join(sys.argv[1:])}\nmachine: {here}\nload: {load}"


def judged(kinds: Sequence[str], seeds: Sequence[int], processes: int, show: bool) -> list[Outcome]:
    """All cases, in the order in which they are done."""
    done = []
    if len(seeds) * len(kinds) >= MANY:
        corpus.preload()
    gc.collect()
    gc.freeze()  # forked processes need not look through what the imports made
    for kind in kinds:
        for outcome in judge(kind, seeds, processes):
            done.append(outcome)
            if not show:
                print(json.dumps(asdict(outcome)), flush=True)
            elif outcome.result in BAD:
                print(
                    f"{kind} --seed {outcome.seed}: {outcome.result} {outcome.signature}", file=sys.stderr, flush=True
                )
    return done


@click.command()
@click.option("--cases", type=click.IntRange(1), default=20_000, show_default=True, help="Of all kinds together.")
@click.option("--first", type=int, default=0, show_default=True, help="The first seed of each kind.")
@click.option(
    "--kind", "kinds", multiple=True, type=click.Choice(list(KINDS)), help="May be repeated; all if left out."
)
@click.option("--seed", type=int, help="Replay this case alone.")
@click.option("--processes", type=click.IntRange(1), default=2, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="A line for each case.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the table here.")
def main(
    cases: int, first: int, kinds: tuple[str, ...], seed: int | None, processes: int, as_json: bool, output: Path | None
) -> None:
    """Judge cases and count how they ended."""
    os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"
    kinds = kinds or tuple(KINDS)
    seeds = [seed] if seed is not None else range(first, first + -(-cases // len(kinds)))
    as_json |= seed is not None
    done = judged(kinds, seeds, processes, show=not as_json)
    if as_json:
        return
    text = table(done, _stamp())
    print(text, end="")
    if output is not None:
        output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
