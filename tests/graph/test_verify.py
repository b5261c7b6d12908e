"""The independent checker: random plans pass, and every kind of fault in them is caught and named."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memonger.errors import VerificationError
from memonger.graph.graph import Graph
from memonger.graph.liveness import Sharing, assign_storage, peak_bytes
from memonger.graph.schedule import schedule_graph
from memonger.graph.verify import verify
from memonger.layout import allocate
from memonger.remat.orders import ORDERS


@st.composite
def graphs(draw: st.DrawFn, most: int = 12) -> Graph:
    """Random graphs with views, in-place pairs and several outputs a node. Value 0 is the input."""
    count = draw(st.integers(1, most))
    sizes, planned = [64], [False]
    reads, writes, views, inplace = [], [], [], []
    for _ in range(count):
        sources = draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=3, unique=True))
        made = []
        for _ in range(draw(st.integers(1, 2))):
            made.append(len(sizes))
            sizes.append(draw(st.sampled_from([64, 64, 128, 192, 100])))
            planned.append(draw(st.integers(0, 9)) > 0)
        pairs = [(a, b) for a in sources for b in made if sizes[a] == sizes[b] and planned[a] and planned[b]]
        kind = draw(st.integers(0, 2))
        reads.append(tuple(sources))
        writes.append(tuple(made))
        views.append(tuple(pairs[:1]) if kind == 1 else ())
        inplace.append(tuple(pairs) if kind == 2 else ())
    read = {v for r in reads for v in r}
    outputs = tuple(v for v in range(1, len(sizes)) if v not in read) or (len(sizes) - 1,)
    ties = tuple(
        tuple((a, b) for a in r for b in w if not planned[b]) if draw(st.booleans()) else ()
        for r, w in zip(reads, writes, strict=True)
    )
    return Graph(
        nodes=tuple(f"n{i}" for i in range(count)), ops=("Op",) * count,
        values=tuple(f"v{i}" for i in range(len(sizes))),
        sizes=tuple(sizes), planned=tuple(planned), reads=tuple(reads), writes=tuple(writes), outputs=outputs,
        views=tuple(views), inplace=tuple(inplace), ties=ties, updates=((),) * count, forward=(True,) * count,
        costs=(1.0,) * count, workspace=(0,) * count,
    )  # fmt: skip


def _layout(graph: Graph, sharing: Sharing | None = None) -> tuple[dict[int, int], int]:
    storage = assign_storage(graph, sharing)
    layout = allocate(storage.buffers)
    return {v: layout.offsets[n] for v, n in enumerate(storage.of_value) if n >= 0}, layout.size


def _simulate(graph: Graph, offsets: dict[int, int], arena: int) -> bool:
    """Run the graph on numbers: every node writes a hash of what it reads into its bytes; compare with plain Python.

    A view keeps its input's bytes; an output in place is computed before it is written. What is not planned is kept
    apart, as the runtime does, but where it is tied to an input it is that input's bytes.
    """
    memory = np.zeros(arena, np.uint8)
    apart: dict[int, int] = {0: 17}
    truth: dict[int, int] = {0: 17}

    def read(value: int) -> int:
        tied = [source for ties in graph.ties for source, target in ties if target == value]
        if not graph.planned[value]:
            return apart[value] * 31 % 251 if not tied else hash((apart[value], *map(read, tied))) % 251
        return int(memory[offsets[value]]) if _whole(value) else -1

    def _whole(value: int) -> bool:
        part = memory[offsets[value] : offsets[value] + graph.sizes[value]]
        return bool((part == part[0]).all())

    def expected(value: int) -> int:
        tied = [source for ties in graph.ties for source, target in ties if target == value]
        if not graph.planned[value]:
            return truth[value] * 31 % 251 if not tied else hash((truth[value], *map(expected, tied))) % 251
        return truth[value]

    for node, (reads, writes) in enumerate(zip(graph.reads, graph.writes, strict=True)):
        if [read(v) for v in reads] != [expected(v) for v in reads]:
            return False
        for value in writes:
            result = hash((node, value, *(expected(v) for v in reads))) % 251
            for source, target in graph.views[node]:
                if target == value and offsets[source] == offsets[value]:
                    result = truth[source]
            truth[value] = result
            if graph.planned[value]:
                memory[offsets[value] : offsets[value] + graph.sizes[value]] = result
            else:
                apart[value] = result
    return [read(v) for v in graph.outputs] == [expected(v) for v in graph.outputs]


@given(graphs())
@settings(max_examples=300, deadline=None)
def test_every_layout_we_make_passes_and_computes_the_right_thing(graph: Graph) -> None:
    for sharing in (Sharing(), Sharing(inplace=False), Sharing(views=False), Sharing(reuse=False)):
        offsets, arena = _layout(graph, sharing)
        verify(graph, offsets, arena, 64)
        assert _simulate(graph, offsets, arena)


@given(graphs(), st.data())
@settings(max_examples=300, deadline=None)
def test_what_passes_computes_the_right_thing_whatever_made_it(graph: Graph, data: st.DataObject) -> None:
    """Move one value somewhere at random: where the checker still says yes, the numbers are right too."""
    offsets, arena = _layout(graph)
    if not offsets:
        return
    moved = data.draw(st.sampled_from(sorted(offsets)))
    offsets[moved] = 64 * data.draw(st.integers(0, arena // 64))
    try:
        verify(graph, offsets, arena, 64)
    except VerificationError:
        return
    assert _simulate(graph, offsets, arena)


@given(graphs())
@settings(max_examples=200, deadline=None)
def test_orders_are_schedules_and_sharing_never_costs(graph: Graph) -> None:
    for order in ORDERS.values():
        schedule = order(graph)
        assert sorted(schedule) == list(range(len(graph.nodes)))
        ordered = schedule_graph(graph, schedule)
        offsets, arena = _layout(ordered)
        verify(ordered, offsets, arena, 64)
        shared = peak_bytes(assign_storage(ordered).buffers, len(graph.nodes))
        assert shared <= peak_bytes(assign_storage(ordered, Sharing(False, False)).buffers, len(graph.nodes))


@given(graphs(most=6))
@settings(max_examples=60, deadline=None)
def test_no_order_beats_brute_force(graph: Graph) -> None:
    def peak(schedule: tuple[int, ...]) -> int:
        return peak_bytes(assign_storage(schedule_graph(graph, schedule)).buffers, len(schedule))

    def possible(schedule: tuple[int, ...]) -> bool:
        made = {0}
        for node in schedule:
            if not made.issuperset(graph.reads[node]):
                return False
            made.update(graph.writes[node])
        return True

    best = min(peak(s) for s in itertools.permutations(range(len(graph.nodes))) if possible(s))
    ours = min(peak(order(graph)) for order in ORDERS.values())
    assert best <= ours <= peak(tuple(range(len(graph.nodes))))


def _chain(**changes: object) -> tuple[Graph, dict[int, int]]:
    """x → a → b → y = a + b, each 64 bytes at an offset of its own."""
    graph = Graph(
        nodes=("first", "second", "third"), ops=("Op",) * 3, values=("x", "a", "b", "y"), sizes=(64,) * 4,
        planned=(False, True, True, True), reads=((0,), (1,), (1, 2)), writes=((1,), (2,), (3,)), outputs=(3,),
        views=((), (), ()), inplace=((), (), ((1, 3),)), ties=((), (), ()), updates=((), (), ()), forward=(True,) * 3,
        costs=(1.0,) * 3, workspace=(0,) * 3,
    )  # fmt: skip
    return dataclasses.replace(graph, **changes), {1: 0, 2: 64, 3: 128}  # type: ignore[arg-type]


def test_a_sound_layout_passes() -> None:
    graph, offsets = _chain()
    verify(graph, offsets, 192, 64)
    verify(graph, {**offsets, 3: 0}, 128, 64)  # in place, as the node allows


@pytest.mark.parametrize(
    ("offsets", "arena", "words"),
    [
        ({1: 0, 2: 0, 3: 128}, 192, "'second'.*writes 'b'.*over 'a'.*reads"),
        ({1: 0, 2: 64, 3: 64}, 192, "'third'.*writes 'y'.*over 'b'.*reads"),
        ({1: 0, 2: 64, 3: 128}, 191, r"'y' at bytes \[128, 192\) leaves the arena of 191 bytes"),
        ({1: -64, 2: 64, 3: 128}, 192, "'a'.*leaves the arena"),
        ({1: 0, 2: 32, 3: 128}, 192, "'b' at byte 32 is not aligned to 64"),
        ({1: 0, 2: 64}, 192, "'y' has no offset"),
        ({0: 0, 1: 64, 2: 128, 3: 192}, 256, "'x' has an offset, but isn't kept"),
    ],
)
def test_a_fault_is_named(offsets: dict[int, int], arena: int, words: str) -> None:
    graph, _ = _chain()
    with pytest.raises(VerificationError, match=words):
        verify(graph, offsets, arena, 64)


def test_bytes_overwritten_before_they_are_read_are_named() -> None:
    graph, offsets = _chain(reads=((0,), (0,), (1, 2)))
    with pytest.raises(VerificationError, match=r"'third'.*needs 'a', whose bytes 'b' has overwritten"):
        verify(graph, {**offsets, 2: 0}, 192, 64)


def test_an_output_overwritten_before_the_end_is_named() -> None:
    graph, offsets = _chain(outputs=(1, 3))
    with pytest.raises(VerificationError, match=r"end of the run.*'a'.*'y' has overwritten"):
        verify(graph, {**offsets, 3: 0}, 192, 64)


def test_a_read_before_the_write_is_named() -> None:
    graph, offsets = _chain(reads=((3,), (1,), (1, 2)))
    with pytest.raises(VerificationError, match=r"'first'.*needs 'y' before anything has written it"):
        verify(graph, offsets, 192, 64)


def test_what_the_runtime_may_alias_keeps_the_bytes_behind_it() -> None:
    """b is held by the runtime, perhaps as a view of a: y may not overwrite a while b is still to be read."""
    graph, offsets = _chain(planned=(False, True, False, True), ties=((), ((1, 2),), ()), inplace=((),) * 3)
    del offsets[2]
    verify(graph, offsets, 192, 64)
    outputs_b = dataclasses.replace(graph, outputs=(2, 3), inplace=((), (), ((1, 3),)))
    with pytest.raises(VerificationError, match=r"needs 'a'|over 'a'|needs 'b'"):
        verify(outputs_b, {**offsets, 3: 0}, 192, 64)
