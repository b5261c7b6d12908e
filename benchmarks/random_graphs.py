"""The search under a budget beside the plain greedy algorithm, on random graphs of several densities.

Run from the repository's root: ``python -m benchmarks.random_graphs [--nodes N ...]``. Prints the table, and writes it
to benchmarks/random_graphs.txt unless numbers of nodes are given. A node reads up to so many in a window before it.
The plain greedy is the search's own simplest variant, by itself and run to its end.
"""

import argparse
import random
import time
from collections.abc import Iterator, Sequence

from benchmarks.machine import HERE, Table, keep, stamp
from benchmarks.remat import Case, greedy_overhead
from memonger.remat.portfolio import search_best
from memonger.remat.problem import Problem, peak

SHAPES = ((1.0, 1), (1.0, 3), (0.3, 3), (0.1, 2), (0.1, 4), (0.03, 2), (0.03, 4))
"""Windows as fractions of the nodes, and the most that a node reads."""

PERCENT = (90, 80, 70, 60)
COLUMNS = Table("nodes>6", "window>7", "reads>6", "seed>5", "budget %>9", "greedy>9", "ours>11", "cpu s>7.1f", "<6")


def random_graph(nodes: int, window: int, most: int, seed: int) -> Problem:
    """Every node but the first reads up to ``most`` of the ``window`` nodes before it."""
    rng = random.Random(seed)
    edges = [(rng.randrange(max(0, i - window), i), i) for i in range(1, nodes) for _ in range(rng.randint(1, most))]
    costs = [float(rng.randint(1, 100)) for _ in range(nodes)]
    return Problem.from_edges(costs, [rng.randint(1, 1000) for _ in range(nodes)], sorted(set(edges)))


def line(problem: Problem, percent: int, head: Sequence[int]) -> str | None:
    """One line of the table; None for budgets that no schedule can hold."""
    budget = peak(problem, problem.schedule) * percent // 100
    if budget < problem.lower_bound:
        return None
    begin = time.process_time()
    found = search_best(problem, budget)
    seconds = time.process_time() - begin
    greedy = greedy_overhead(Case("", problem, budget))
    mine = f"{100 * found.overhead:.3f}" if found.peak <= budget else "none"
    worse = greedy != "none" and (mine == "none" or float(mine) > float(greedy))
    return COLUMNS.row(*head, percent, greedy, mine, seconds, "worse" if worse else "")


def table(sizes: Sequence[int], seeds: int) -> Iterator[str]:
    """Lines of the table, as they are measured."""
    yield from stamp("random_graphs", ["numpy"])
    yield "overheads in percent of the cost of one pass; worse: the plain greedy's is smaller"
    yield COLUMNS.heading
    for nodes in sizes:
        for share, most in SHAPES:
            for seed in range(1, seeds + 1):
                window = max(4, int(share * nodes))
                problem = random_graph(nodes, window, most, seed)
                lines = (line(problem, percent, (nodes, window, most, seed)) for percent in PERCENT)
                yield from (text for text in lines if text is not None)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", nargs="*", type=int, metavar="N", help="only these; no table is written")
    parser.add_argument("--seeds", type=int, default=2, help="graphs of each shape")
    options = parser.parse_args()
    lines = table(options.nodes or (250, 500, 1000, 2000), options.seeds)
    keep(lines, None if options.nodes else HERE / "random_graphs.txt")


if __name__ == "__main__":
    main()
