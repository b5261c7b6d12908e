"""The search under a budget beside the plain greedy algorithm, on random graphs of several densities.

Run from the repository's root: ``python -m benchmarks.random_graphs [--nodes N ...] [--resume] [--minutes N]``, some 20
minutes on two cores. Rows are kept in a JSON file as they are measured, and ``--resume`` goes on where a run ended. The
table is printed once all rows are there, and written to benchmarks/random_graphs.txt or to another file (``-o``).
A node reads up to so many in a window before it. The plain greedy is the search's own simplest variant, by itself and
run to its end. Of each graph of which a budget isn't held there follow the least peak that was found and a bound on
every schedule's, by `memonger.schedule.every_schedule` with ten times its effort.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import networkx as nx

from benchmarks.machine import HERE, Table, keep, stamp
from benchmarks.record import Record, progress
from benchmarks.remat import Case, greedy_overhead
from memonger.planner.networkx_graph import from_networkx
from memonger.schedule.every_schedule import EFFORT, least_arena
from memonger.schedule.portfolio import search
from memonger.schedule.problem import Problem, peak

SHAPES = ((1.0, 1), (1.0, 3), (0.3, 3), (0.1, 2), (0.1, 4), (0.03, 2), (0.03, 4))
"""Windows as fractions of the nodes, and the most that a node reads."""

SIZES = (250, 500, 1000, 2000)
PERCENT = (90, 80, 70, 60)
COLUMNS = Table("nodes>6", "window>7", "reads>6", "seed>5", "budget %>9", "greedy>9", "ours>11", "cpu s>7.1f", "<6")
LEAST = Table("nodes>6", "window>7", "reads>6", "seed>5", "bound %>9.1f", "least found %>14.1f")


def random_graph(nodes: int, window: int, most: int, seed: int) -> Problem:
    """Every node but the first reads up to ``most`` of the ``window`` nodes before it."""
    rng = random.Random(seed)
    edges = [(rng.randrange(max(0, i - window), i), i) for i in range(1, nodes) for _ in range(rng.randint(1, most))]
    costs = [float(rng.randint(1, 100)) for _ in range(nodes)]
    return Problem.from_edges(costs, [rng.randint(1, 1000) for _ in range(nodes)], sorted(set(edges)))


def measured(name: str) -> dict[str, Any]:
    """One row; without figures for budgets that no schedule can hold."""
    *graph, percent = map(int, name.split("/"))
    problem = random_graph(*graph)
    budget = peak(problem, problem.schedule) * percent // 100
    if budget < problem.lower_bound:
        return {}
    begin = time.process_time()
    found = search(problem, budget)
    seconds = time.process_time() - begin
    mine = f"{100 * found.overhead:.3f}" if found.peak <= budget else "none"
    return {"greedy": greedy_overhead(Case("", problem, budget)), "ours": mine, "seconds": seconds}


def least(name: str) -> dict[str, float]:
    """The least peak found, and a bound on every schedule's, in percent of the peak without recomputation."""
    problem = random_graph(*map(int, name.split("/")))
    full = peak(problem, problem.schedule)
    drawn = nx.DiGraph((problem.producer[value], node) for node, reads in enumerate(problem.reads) for value in reads)
    drawn.add_nodes_from((node, {"bytes": size, "cost": 1.0}) for node, size in enumerate(problem.sizes))
    bound = least_arena(from_networkx(drawn)[0], effort=10 * EFFORT)
    return {"bound": 100 * bound / full, "least": 100 * search(problem, 0).peak / full}


def line(name: str, row: Mapping[str, Any]) -> str:
    """One line of the tables."""
    if "least" in row:
        return LEAST.row(*name.split("/"), row["bound"], row["least"])
    greedy, mine = row["greedy"], row["ours"]
    worse = greedy != "none" and (mine == "none" or float(mine) > float(greedy))
    return COLUMNS.row(*name.split("/"), greedy, mine, row["seconds"], "worse" if worse else "")


def names_of(sizes: Sequence[int], seeds: int) -> list[str]:
    """Rows by what is measured: ``nodes/window/reads/seed/percent``."""
    shapes = [(nodes, max(4, int(share * nodes)), most) for nodes in sizes for share, most in SHAPES]
    return [f"{n}/{w}/{m}/{s}/{p}" for n, w, m in shapes for s in range(1, seeds + 1) for p in PERCENT]


def measure(row: Callable[[str], dict[str, Any]], names: list[str], record: Record, jobs: int) -> None:
    """Measure what is missing, so many rows at a time."""
    with ProcessPoolExecutor(jobs) as pool:
        todo, running = progress(names, record, record.rows.__contains__), dict[str, Any]()
        for name in todo:
            running[name] = pool.submit(row, name)
            while len(running) >= jobs:
                _collect(running, record)
        while running:
            _collect(running, record)


def not_held(names: Sequence[str], record: Record) -> list[str]:
    """Graphs of which a budget isn't held."""
    rows = {name: record.rows.get(name, {}) for name in names}
    return list(dict.fromkeys(name.rpartition("/")[0] for name, row in rows.items() if row.get("ours") == "none"))


def _collect(running: dict[str, Any], record: Record) -> None:
    """Keep the rows that are done, after waiting for one."""
    wait(running.values(), return_when=FIRST_COMPLETED)
    for name in [name for name, row in running.items() if row.done()]:
        record.add(name, row := running.pop(name).result())
        print(line(name, row) if row else f"{name}: no schedule holds this budget", flush=True)


def table(names: Sequence[str], record: Record, command: str) -> Iterator[str]:
    """The lines of the table."""
    yield from stamp(command, ["numpy"])
    yield "overheads in percent of the cost of one pass; worse: the plain greedy's is smaller"
    yield COLUMNS.heading
    yield from (line(name, record.rows[name]) for name in names if record.rows.get(name))
    yield ""
    yield "where a budget isn't held: a bound on every schedule's peak, and the least found, in percent of the peak"
    yield LEAST.heading
    yield from (line(name, record.rows[name]) for name in not_held(names, record))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", nargs="+", type=int, metavar="N", default=SIZES, help="sizes of graphs")
    parser.add_argument("--seeds", type=int, default=2, help="graphs of each shape")
    parser.add_argument("--jobs", type=int, default=2, help="searches at a time")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no row after so many")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the last run")
    parser.add_argument("--rows", type=Path, default=Path(tempfile.gettempdir(), "random_graphs.json"),
                        help="where rows are kept")  # fmt: skip
    parser.add_argument("-o", dest="output", type=Path, default=HERE / "random_graphs.txt", help="write the table here")
    options = parser.parse_args()
    names = names_of(options.nodes, options.seeds)
    record = Record(options.rows, options.resume, options.minutes)
    measure(measured, names, record, options.jobs)
    measure(least, graphs := not_held(names, record), record, options.jobs)
    if all(name in record.rows for name in [*names, *graphs]):
        command = f"random_graphs --nodes {' '.join(map(str, options.nodes))} --seeds {options.seeds}"
        keep(table(names, record, command), options.output)


if __name__ == "__main__":
    main()
