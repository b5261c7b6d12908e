"""Recomputation under a budget on published and generated graphs: plain greedy, the search, the best known.

``python -m benchmarks.planning.remat [--exact SECONDS] [--note TEXT]`` prints the table and writes remat.txt. The best
schedule's overhead ever found for a case stands in remat.json,
with what the exact strategy proved, and for which number of runs a node: in the given order of first runs, while the
search also reorders, so it may be below that optimum. ``--exact`` runs that strategy again on the cases that aren't
proven.
Budgets are percentages of the peak without recomputation; cases below the lower bound of every schedule are left out.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, Table, keep, stamp
from memonger.schedule.cp_sat import ExactOptions, solve
from memonger.schedule.greedy import GreedyOptions, fit_budget, remove_redundant
from memonger.schedule.portfolio import search
from memonger.schedule.problem import Problem, cost, peak
from memonger.schedule.timeline import Timeline

KNOWN = Path(__file__).with_suffix(".json")
PERCENT = (90, 80, 60, 50, 40, 30, 20)
COLUMNS = Table("graph<12", "nodes>7", "budget %>10", "greedy>9", "ours>11.3f", "wall>7.1f", "cpu>7.1f", "best known<1")
_SMALL = 200
"""Nodes up to which the exact strategy is tried."""


@dataclass(frozen=True, slots=True)
class Case:
    """A graph and a budget in bytes."""

    name: str
    problem: Problem
    budget: int

    @property
    def key(self) -> str:
        """Names the case in remat.json."""
        return f"{self.name} {self.budget}"


def training_chain(layers: int, skips: bool, seed: int = 1) -> Problem:
    """A chain with its backward pass; with ``skips`` a U-Net's connections."""
    rng = random.Random(seed)
    costs = [float(rng.randint(1, 20)) for _ in range(layers)]
    sizes = [rng.randint(1, 50) * 1000 for _ in range(layers)]
    edges = [(i, i + 1) for i in range(layers - 1)]
    edges += [(i, layers - 1 - i) for i in range(1, layers // 2 - 1, 2)] if skips else []
    for i in reversed(range(layers)):
        node = 2 * layers - 1 - i
        costs.append(2 * costs[i])
        sizes.append(sizes[i])
        edges += [(node - 1, node), (i, node)] + ([(i - 1, node)] if i else [])
    return Problem.from_edges(costs, sizes, sorted(set(edges)))


def transformer(layers: int) -> Problem:
    """Layers of attention and of a wide product with their backward pass: every gradient reads what its node read."""
    sizes, costs, edges = [64], [1.0], list[tuple[int, int]]()

    def node(size: int, cost: float, *sources: int) -> int:
        edges.extend((source, len(sizes)) for source in dict.fromkeys(sources))
        sizes.append(size)
        costs.append(cost)
        return len(sizes) - 1

    x, forward = 0, list[tuple[int, tuple[int, ...]]]()

    def step(size: int, cost: float, *sources: int) -> int:
        forward.append((node(size, cost, *sources), sources))
        return forward[-1][0]

    for _ in range(layers):
        normed = step(64, 4, x)
        query, key, value = (step(64, 40, normed) for _ in range(3))
        weights = step(256, 12, step(256, 30, query, key))
        x = step(64, 1, x, step(64, 40, step(64, 30, weights, value)))
        hidden = step(256, 160, step(64, 4, x))
        x = step(64, 1, x, step(64, 160, step(256, 8, hidden)))
    begin = len(sizes)
    gradient = {x: node(64, 4, x)}
    for name, sources in reversed(forward):
        for source in sources:
            part = node(sizes[source], costs[name], gradient[name], *sources)
            gradient[source] = node(sizes[source], 1, part, gradient[source]) if source in gradient else part
    return Problem.from_edges(costs, sizes, edges, forward=[number < begin for number in range(len(sizes))])


def random_graph(nodes: int, seed: int = 1) -> Problem:
    """Every node reads up to four of the thirty before it."""
    rng = random.Random(seed)
    edges = [(rng.randrange(max(0, i - 30), i), i) for i in range(1, nodes) for _ in range(rng.randint(1, 4))]
    return Problem.from_edges(
        [float(rng.randint(1, 100)) for _ in range(nodes)],
        [rng.randint(1, 1000) for _ in range(nodes)],
        sorted(set(edges)),
    )


def problem_of(path: Path) -> Problem:
    """The problem in a file of tests/data/remat: ``nodes`` with ``id``, ``cost`` and ``bytes``, and ``edges``."""
    data = json.loads(path.read_text(encoding="utf-8"))
    nodes, number = data["nodes"], {node["id"]: i for i, node in enumerate(data["nodes"])}
    costs, sizes = [float(node["cost"]) for node in nodes], [int(node["bytes"]) for node in nodes]
    return Problem.from_edges(costs, sizes, [(number[a], number[b]) for a, b in data["edges"]], [*number])


def graphs() -> Iterator[tuple[str, Problem]]:
    """Names and problems."""
    for path in sorted((ROOT / "tests" / "data" / "remat").glob("*.json")):
        yield path.stem, problem_of(path)
    yield "chain-60", training_chain(60, skips=False)
    yield "u-net-40", training_chain(40, skips=True)
    yield "random-150", random_graph(150)
    yield "chain-2000", training_chain(2000, skips=False)
    yield "layers-100", transformer(100)


def greedy_overhead(case: Case) -> str:
    """Percent of the plain greedy, or none."""
    timeline = Timeline(case.problem)
    timeline.first_runs_move = False
    if not fit_budget(timeline, case.budget, GreedyOptions(plain=True), lambda: timeline.work > 300_000):
        return "none"
    remove_redundant(timeline, case.budget, lambda: False)
    return f"{100 * (timeline.cost / cost(case.problem, case.problem.schedule) - 1):.3f}"


def known(case: Case, schedule: tuple[int, ...], overhead: float, entries: dict[str, Any], seconds: float) -> str:
    """Update the best known of the case; returns its overhead in percent, and what is proven."""
    entry = entries.setdefault(case.key, {"overhead": overhead, "by": "search", "proof": "not run"})
    if overhead < entry["overhead"] - 1e-12:
        entry.update(overhead=overhead, by="search")
    if seconds and case.problem.nodes <= _SMALL and not entry["proof"].startswith("optimal"):
        found = solve(case.problem, case.budget, ExactOptions(copies=2, time_limit=seconds), schedule)
        if found.result is not None and found.result.overhead < entry["overhead"] - 1e-12:
            entry.update(overhead=found.result.overhead, by="exact")
        if found.proven:
            entry["proof"] = "optimal, 2 runs, given order" if found.result else "infeasible, 2 runs, given order"
        else:
            bound = found.bound / cost(case.problem, case.problem.schedule) - 1
            entry["proof"] = f"≥ {100 * max(0.0, bound):.3f}, 2 runs, given order, {seconds:.0f} s"
    return f"{100 * entry['overhead']:.3f}  {entry['by']}; {entry['proof']}"


def line(case: Case, label: str, entries: dict[str, Any], seconds: float) -> str:
    """One line of the table."""
    head = case.name, case.problem.nodes, label, greedy_overhead(case)
    begin, used = time.perf_counter(), time.process_time()
    found = search(case.problem, case.budget)
    took, cpu = time.perf_counter() - begin, time.process_time() - used
    if found.peak > case.budget:
        return COLUMNS.row(*head, "none found")
    best = known(case, found.schedule, found.overhead, entries, seconds)
    return COLUMNS.row(*head, 100 * found.overhead, took, cpu, best)


def table(entries: dict[str, Any], seconds: float, note: str, names: Sequence[str]) -> Iterator[str]:
    """Lines of the table, as they are measured."""
    yield from stamp("planning.remat", ["numpy", "ortools"])
    yield from [note] if note else []
    yield "overheads in percent of the cost of one pass; seconds: wall, processor"
    yield COLUMNS.heading
    for name, problem in graphs():
        if names and name not in names:
            continue
        full = peak(problem, problem.schedule)
        for percent in PERCENT if problem.nodes < 1000 else (50, 20):
            budget = full * percent // 100
            if budget >= problem.lower_bound:
                yield line(Case(name, problem, budget), str(percent), entries, seconds)
        if problem.nodes < 1000:
            least = search(problem, 0).peak
            yield line(Case(name, problem, least), f"min {100 * least / full:.2f}", entries, seconds)


def recorded(entries: dict[str, Any], seconds: float, note: str, names: Sequence[str]) -> Iterator[str]:
    """The lines of the table; the best known is written after each."""
    for text in table(entries, seconds, note, names):
        yield text
        KNOWN.write_text(json.dumps(entries, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--exact", type=float, default=0.0, metavar="SECONDS", help="for each case not yet proven")
    parser.add_argument("--note", default="", metavar="TEXT", help="a line for the header: what ran beside")
    parser.add_argument("--graphs", nargs="*", default=[], metavar="NAME", help="only these; no table is written")
    options = parser.parse_args()
    entries = json.loads(KNOWN.read_text(encoding="utf-8")) if KNOWN.exists() else {}
    lines = recorded(entries, options.exact, options.note, options.graphs)
    keep(lines, None if options.graphs else Path(__file__).with_suffix(".txt"))


if __name__ == "__main__":
    main()
