"""Small values that together are most of what a pass writes are decided about as large ones are."""

import itertools

import pytest

from memonger.graph.graph import Alias, Graph
from memonger.schedule.reduction import reduce


@pytest.mark.parametrize(("count", "is_folded"), [(4, True), (400, False)])
def test_small_values_are_folded_where_they_are_few(count: int, is_folded: bool) -> None:
    sizes = (1 << 20, *[1 << 10] * count)
    nodes = len(sizes)
    graph = Graph(
        nodes=tuple(f"n{n}" for n in range(nodes)),
        ops=("Tanh",) * nodes,
        values=tuple(f"v{n}" for n in range(nodes)),
        sizes=sizes,
        planned=(True,) * nodes,
        reads=((), *((n,) for n in range(nodes - 1))),
        writes=tuple((n,) for n in range(nodes)),
        outputs=(nodes - 1,),
        forward=(True,) * nodes,
        costs=(1.0,) * nodes,
        workspace=(0,) * nodes,
    )
    members = reduce(graph).members
    assert len(members) == (3 if is_folded else nodes)  # a group touches no more than the largest node


def test_what_a_view_reads_beside_its_source_comes_before_whoever_reads_the_view() -> None:
    """A shape that nodes compute: every order that the problem allows is one of the graph."""
    writers = {
        "a": ("Exp", ()), "half": ("Div", ()), "shape": ("Concat", ("half",)), "b": ("Reshape", ("a", "shape")),
        "c": ("Exp", ("b",)), "other": ("Cast", ("half",)), "d": ("Reshape", ("c", "other")), "e": ("Exp", ("d",)),
    }  # fmt: skip
    values, count = list(writers), len(writers)
    reads = tuple(tuple(map(values.index, read)) for _, read in writers.values())
    graph = Graph(
        nodes=tuple(f"write {value}" for value in values),
        ops=tuple(op for op, _ in writers.values()),
        values=tuple(values),
        sizes=(1 << 14,) * count,
        planned=(True,) * count,
        reads=reads,
        writes=tuple((n,) for n in range(count)),
        outputs=(count - 1,),
        forward=(True,) * count,
        costs=(1.0,) * count,
        workspace=(0,) * count,
        aliases=tuple(
            (Alias("view", read[0], n),) if op == "Reshape" else ()
            for n, (read, op) in enumerate(zip(reads, (op for op, _ in writers.values()), strict=True))
        ),
    )
    reduced, tried = reduce(graph), 0
    assert sum(node >= 0 for node in reduced.viewing) == 2
    problem = reduced.problem
    for order in itertools.permutations(range(problem.nodes)):
        at = {node: step for step, node in enumerate(order)}
        if any(at[problem.producer[v]] >= at[node] for node in order for v in problem.reads[node]):
            continue
        tried, ran = tried + 1, set[int]()
        for node in reduced.expand(order):
            assert ran.issuperset(graph.producer[v] for v in graph.reads[node])
            ran.add(node)
    assert tried > 1
