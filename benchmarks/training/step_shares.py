"""Which operators a training step spends its time in: ``python -m benchmarks.training.step_shares [--rows NAME ...]``.

The networks of `training.peers` with nothing recomputed. Node times are medians of onnxruntime's profiler in steps
5 to 8: the first steps have the page faults of fresh memory in them. Shares are of the time of all nodes. Cores that
share no cache move what Transpose writes at half the speed, so steps are profiled again until they share one (see
`benchmarks.training.side_by_side.cores`). Written to step_shares.txt where no network is left out.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import memonger
from benchmarks.machine import Table, keep, stamp
from benchmarks.training.side_by_side import cores, networks
from benchmarks.training.side_by_side.export import export
from benchmarks.training.side_by_side.planning import Planner, Wish
from memonger.runtime.feeds import Feeds
from memonger.runtime.profile import NodeRun, read_profile

STEPS = 8  # the second half counts
LISTED = 10
TRIES = 2  # sessions that are profiled, until the cores share a cache before and after
LAYOUT = ("Where", "Transpose")  # what a step does beside the mathematics
TABLE = Table(
    "network<16", "batch>6", "nodes>7", "cores<7", "step ms>9.1f", "nodes ms>9.1f", f"{' + '.join(LAYOUT)}>18.1%",
    "operators, % of the nodes' time<1",
)  # fmt: skip


def profiles(session: memonger.TrainingSession, feeds: Feeds) -> tuple[list[tuple[NodeRun, ...]], float]:
    """The node runs of `STEPS` steps, a profile for each runtime session of a step, and seconds of a later step.

    A runtime session writes a profile because the order of its first run is to be checked, which ends it: here it isn't
    checked, and the profile goes on.
    """
    engines = session.engines
    folders = [engine._folder for engine in engines]
    for engine in engines:
        engine._folder = None
    seconds = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        session.step(feeds)
        seconds.append(time.perf_counter() - begin)
    found = [read_profile(Path(engine.session.end_profiling())) for engine in engines]
    for folder in folders:
        folder.remove()
    return found, statistics.median(seconds[STEPS // 2 :])


def by_operator(runs: Sequence[NodeRun]) -> Counter[str]:
    """Seconds of a later step in each operator's nodes."""
    each, totals = defaultdict(list), Counter[str]()
    for run in runs:
        each[run.name, run.op].append(run.seconds)
    for (_, operator), times in each.items():
        totals[operator] += statistics.median(times[len(times) // 2 :]) * len(times) / STEPS
    return totals


def row(name: str, size: networks.Size, threads: int) -> str:
    """Export, plan and train one network."""
    with tempfile.TemporaryDirectory() as folder:
        export(name, size, Path(folder))
        planned = Planner(Path(folder), "cpu", threads).plan(Wish("none", size.batch)).path
        feeds = networks.data(networks.NETWORKS[name], size, size.batch)
        for _ in range(TRIES):
            before = cores.share_a_cache()
            found, seconds = profiles(memonger.TrainingSession(planned, intra_op_threads=threads), feeds)
            if together := before is not False and cores.share_a_cache() is not False:
                break
    totals = sum(map(by_operator, found), Counter[str]())
    nodes = sum(len({run.name for run in runs}) for runs in found)
    listed = ", ".join(f"{op} {100 * took / totals.total():.1f}" for op, took in totals.most_common(LISTED))
    share = sum(totals[op] for op in LAYOUT) / totals.total()
    near = "near" if together else "far"
    return TABLE.row(name, size.batch, nodes, near, 1e3 * seconds, 1e3 * totals.total(), share, listed)


def lines(names: Sequence[str], times: Sequence[int], threads: int, command: str) -> Iterator[str]:
    """The table as it grows."""
    yield "Shares of a training step by operator, nothing recomputed, SGD with momentum"
    yield from stamp(command, ("onnxruntime", "torch", "transformers", "onnx", "numpy"))
    steps = f"steps {STEPS // 2 + 1} to {STEPS}"
    yield f"medians of each node in {steps}, profiled; {threads} threads; the first {LISTED} operators"
    yield f"cores: near where they shared a cache before and after; far where they did in none of {TRIES} tries"
    yield from ("", TABLE.heading)
    for name in names:
        for count in times:
            yield row(name, networks.size_of(name, "cpu", count * networks.size_of(name, "cpu").batch), threads)


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    every = tuple(networks.NETWORKS)
    parser.add_argument("--rows", nargs="*", choices=every, default=every, metavar="NAME")
    parser.add_argument("--times", nargs="*", type=int, default=[1], help="batches, as multiples of the networks' own")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    output = asked.output or (Path(__file__).with_suffix(".txt") if tuple(asked.rows) == every else None)
    rows = "" if tuple(asked.rows) == every else f"--rows {' '.join(asked.rows)} "
    command = f"training.step_shares {rows}--times {' '.join(map(str, asked.times))} --threads {asked.threads}"
    keep(lines(asked.rows, asked.times, asked.threads, command), output)


if __name__ == "__main__":
    main()
