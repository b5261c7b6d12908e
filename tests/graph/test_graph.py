"""The planner's graph: its indexes, and orders of its nodes."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

import memonger
from memonger.graph.graph import from_model
from memonger.graph.schedule import readers_of, topological_order
from tests.support.networks import light


def test_indexes_are_what_reads_and_writes_say() -> None:
    graph = from_model(memonger.load(light("squeezenet")).ir)
    for value in range(len(graph.values)):
        assert [graph.producer[value]] == ([n for n, w in enumerate(graph.writes) if value in w] or [-1])
        assert graph.readers[value] == tuple(n for n, r in enumerate(graph.reads) if value in r)
    for node, sources in enumerate(graph.sources):
        assert len(set(sources)) == len(sources)
        assert set(sources) == {graph.producer[v] for v in graph.reads[node]} - {-1}


def test_indexes_belong_to_one_graph_alone() -> None:
    graph = from_model(memonger.load(light("squeezenet")).ir)
    assert graph.producer is graph.producer
    assert graph == replace(graph)
    last = replace(graph, reads=((), *graph.reads[1:]))
    assert last.readers[graph.reads[0][0]] != graph.readers[graph.reads[0][0]]


@st.composite
def _sources(draw: st.DrawFn) -> list[list[int]]:
    """For each node some nodes before it; then nodes take other numbers."""
    count = draw(st.integers(1, 8))
    sources = [draw(st.lists(st.integers(0, n - 1), unique=True)) if n else [] for n in range(count)]
    number = draw(st.permutations(range(count)))
    renumbered: list[list[int]] = [[] for _ in range(count)]
    for node, found in enumerate(sources):
        renumbered[number[node]] = [number[source] for source in found]
    return renumbered


@given(_sources(), st.data())
def test_the_next_node_is_the_ready_one_with_the_least_key(sources: list[list[int]], data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.integers(0, 3), min_size=len(sources), max_size=len(sources)))
    left, expected = set(range(len(sources))), []
    while left:
        ready = [node for node in left if not left & set(sources[node])]
        expected.append(min(ready, key=lambda node: (keys[node], node)))
        left.remove(expected[-1])
    assert topological_order(sources, keys) == tuple(expected)


def test_nodes_on_a_cycle_and_behind_it_are_left_out() -> None:
    assert topological_order([[], [0, 2], [1], [2]], [0] * 4) == (0,)


def test_readers_are_sources_the_other_way_round() -> None:
    assert readers_of([[], [0], [0, 1]]) == [[1, 2], [2], []]
