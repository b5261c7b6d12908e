"""The independent checker: random plans pass, and every kind of fault in them is caught and named."""

import dataclasses
import itertools
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memonger.allocation import allocate, lower_bound
from memonger.errors import PlanError, VerificationError
from memonger.graph.graph import Alias, Graph
from memonger.graph.liveness import Sharing, assign_storage, peak_bytes, storages
from memonger.graph.schedule import schedule_graph
from memonger.graph.verify import verify
from memonger.schedule.every_schedule import least_arena
from memonger.schedule.orders import ORDERS
from memonger.schedule.solution import _offsets


@st.composite
def graphs(draw: st.DrawFn, most: int = 12, windows: bool = True) -> Graph:
    """Random graphs with views, in-place pairs, windows and several outputs a node. Value 0 is the input."""
    count = draw(st.integers(1, most))
    sizes, planned = [64], [False]
    reads, writes, views, inplace, inside = [], [], [], [], []
    for _ in range(count):
        sources = draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=3, unique=True))
        kind = draw(st.integers(0, 5 if windows else 2))
        parts = (
            _parts(draw, kind, len(sizes), [(v, sizes[v]) for v in sources])
            if all(map(planned.__getitem__, sources))
            else None
        )
        made = []
        for number in range(len(parts[0]) if parts else draw(st.integers(1, 2))):
            made.append(len(sizes))
            sizes.append(parts[0][number] if parts else draw(st.sampled_from([64, 128, 192, 100, sizes[sources[0]]])))
            planned.append(parts is not None or draw(st.integers(0, 9)) > 0)
        pairs = [(a, b) for a in sources for b in made if sizes[a] == sizes[b] and planned[a] and planned[b]]
        reads.append(tuple(sources))
        writes.append(tuple(made))
        views.append(tuple(pairs[:1]) if kind == 1 else ())
        inplace.append(tuple(pairs) if kind == 2 else ())
        inside.append(parts[1] if parts else ())
    read = {v for r in reads for v in r}
    outputs = tuple(v for v in range(1, len(sizes)) if v not in read) or (len(sizes) - 1,)
    ties = tuple(
        tuple((a, b) for a in r for b in w if not planned[b]) if draw(st.booleans()) else ()
        for r, w in zip(reads, writes, strict=True)
    )
    is_optional = [draw(st.booleans()) for _ in range(count)]
    graph = Graph(
        nodes=tuple(f"n{i}" for i in range(count)), ops=("Op",) * count,
        values=tuple(f"v{i}" for i in range(len(sizes))),
        sizes=tuple(sizes), planned=tuple(planned), reads=tuple(reads), writes=tuple(writes), outputs=outputs,
        forward=(True,) * count, costs=(1.0,) * count, workspace=(0,) * count,
    )  # fmt: skip
    return graph.with_aliases(
        view=views, inplace=inplace, runtime=ties,
        subview=[() if choice else each for each, choice in zip(inside, is_optional, strict=True)],
        optional=[each if choice else () for each, choice in zip(inside, is_optional, strict=True)],
    )  # fmt: skip


def _parts(
    draw: st.DrawFn, kind: int, value: int, sources: list[tuple[int, int]]
) -> tuple[tuple[int, ...], tuple[tuple[int, int, int], ...]] | None:
    """Bytes of a slice of the first source (kind 3), of all sources joined (4), of two parts (5), and their windows."""
    if kind == 5 and len(sources) == 1 and sources[0][1] > 64:
        whole, size = sources[0]
        return (64, size - 64), ((value, whole, 0), (value + 1, whole, 64))
    if kind == 3 and len(sources) == 1:
        whole, size = sources[0]
        begin = draw(st.sampled_from([byte for byte in (0, 32, 64, 128) if byte < size]))
        return (size - begin - draw(st.sampled_from([0, (size - begin) // 2])),), ((value, whole, begin),)
    if kind == 4 and len(sources) > 1:
        begins = itertools.accumulate((size for _, size in sources), initial=0)
        return (sum(s for _, s in sources),), tuple((v, value, at) for (v, _), at in zip(sources, begins, strict=False))
    return None


def _layout(
    graph: Graph, sharing: Sharing | None = None, windows: Sequence[int] = (), groups: Sequence[Sequence[int]] = ()
) -> tuple[dict[int, int], int]:
    storage = assign_storage(graph, sharing, subviews=windows, groups=groups)
    layout = allocate(storage.buffers)
    return _offsets(storage, layout), layout.size


def _simulate(graph: Graph, offsets: dict[int, int], arena: int) -> bool:
    """Run the graph on bytes: every node fills its outputs with a hash of what it reads; compare with plain Python.

    A view keeps its input's bytes; an output in place is computed before it is written; parts are copied one by one.
    What is not planned is kept apart, as the runtime does, but where it is tied to an input it is that input's bytes.
    """
    memory = np.zeros(arena, np.uint8)
    truth: dict[int, bytes] = {0: b"*" * 64}
    behind: dict[int, list[int]] = {}
    for source, target in (pair for ties in graph.runtime_aliases for pair in ties):
        behind.setdefault(target, []).append(source)

    def span(value: int) -> slice:
        return slice(offsets[value], offsets[value] + graph.sizes[value])

    def is_right(value: int) -> bool:
        own = not graph.planned[value] or memory[span(value)].tobytes() == truth[value]
        return own and all(map(is_right, behind.get(value, ())))

    for node, (reads, writes) in enumerate(zip(graph.reads, graph.writes, strict=True)):
        if not all(map(is_right, reads)):
            return False
        for value in writes:
            truth[value] = bytes([hash((node, value, *(truth[v] for v in reads))) % 251]) * graph.sizes[value]
            for source, target in graph.views[node]:
                if target == value and offsets[source] == offsets[value]:
                    truth[value] = truth[source]
            if not graph.subviews[node]:
                if graph.planned[value]:
                    memory[span(value)] = np.frombuffer(truth[value], np.uint8)
                continue
            truth[value] = b"".join(truth[v] for v in reads)
            for part, whole, byte in graph.subviews[node]:
                inside = slice(offsets[whole] + byte, offsets[whole] + byte + graph.sizes[part])
                if part == value:
                    truth[value] = truth[whole][byte : byte + graph.sizes[part]]
                    memory[span(part)] = memory[inside].copy()
                elif whole == value:
                    memory[inside] = memory[span(part)].copy()
    return all(map(is_right, graph.outputs))


@given(graphs())
@settings(max_examples=60, deadline=None)
def test_every_layout_we_make_passes_and_computes_the_right_thing(graph: Graph) -> None:
    for sharing in (Sharing(), Sharing(inplace=False), Sharing(views=False), Sharing(reuse=False)):
        for windows in ((), range(len(graph.nodes))) if sharing == Sharing() else ((),):
            offsets, arena = _layout(graph, sharing, windows)
            verify(graph, offsets, arena, 64)
            assert _simulate(graph, offsets, arena)
            assert least_arena(graph, sharing) <= arena


@given(graphs(), st.data())
@settings(max_examples=60, deadline=None)
def test_groups_are_side_by_side_and_compute_the_right_thing(graph: Graph, data: st.DataObject) -> None:
    planned = [v for v in range(len(graph.values)) if graph.planned[v]]
    members = data.draw(st.lists(st.sampled_from(planned), min_size=1, max_size=4, unique=True)) if planned else []
    groups = [group for group in (members[:2], members[2:]) if group]
    try:
        offsets, arena = _layout(graph, groups=groups)
    except PlanError:  # a view, or a window, of what another group has
        shared = {v for pair in chain.from_iterable(chain(graph.views, graph.subviews)) for v in pair[:2]}
        assert shared.intersection(members)
        return
    verify(graph, offsets, arena, 64, groups)
    assert _simulate(graph, offsets, arena)


@given(graphs())
@settings(max_examples=60, deadline=None)
def test_windows_are_taken_only_where_that_is_smaller(graph: Graph) -> None:
    plain, *others = storages(graph, Sharing())
    assert plain == assign_storage(graph)
    for storage in others:
        assert peak_bytes(storage.buffers, len(graph.nodes)) <= peak_bytes(plain.buffers, len(graph.nodes))
        layout = allocate(storage.buffers)
        offsets = _offsets(storage, layout)
        verify(graph, offsets, layout.size, 64)
        assert _simulate(graph, offsets, layout.size)
        assert least_arena(graph) <= layout.size
        read = assign_storage(graph, offsets=offsets)
        assert lower_bound(read.buffers) <= layout.size


@given(graphs(most=8), st.data())
@settings(max_examples=60, deadline=None)
def test_layouts_of_schedules_with_recomputation_pass_and_compute_the_right_thing(
    graph: Graph, data: st.DataObject
) -> None:
    schedule = list(range(len(graph.nodes)))
    for at in data.draw(st.lists(st.integers(1, len(schedule)), max_size=4)):
        schedule.insert(at, data.draw(st.sampled_from(schedule[:at])))
    scheduled = schedule_graph(graph, schedule)
    for windows in ((), range(len(schedule))):
        offsets, arena = _layout(scheduled, windows=windows)
        verify(scheduled, offsets, arena, 64)
        assert _simulate(scheduled, offsets, arena)


@given(graphs(), st.data())
@settings(max_examples=60, deadline=None)
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


@given(graphs(windows=False))
@settings(max_examples=60, deadline=None)
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
@settings(max_examples=40, deadline=None)
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
    assert least_arena(graph, again=False) <= best <= ours <= peak(tuple(range(len(graph.nodes))))
    if not any(graph.subviews):  # else what the search counts is an estimate
        assert ours == best


def _chain(**changes: object) -> tuple[Graph, dict[int, int]]:
    """x → a → b → y = a + b, each 64 bytes at an offset of its own."""
    graph = Graph(
        nodes=("first", "second", "third"), ops=("Op",) * 3, values=("x", "a", "b", "y"), sizes=(64,) * 4,
        planned=(False, True, True, True), reads=((0,), (1,), (1, 2)), writes=((1,), (2,), (3,)), outputs=(3,),
        forward=(True,) * 3, costs=(1.0,) * 3, workspace=(0,) * 3,
        aliases=((), (), (Alias("inplace", 1, 3),)),
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
    graph, offsets = _chain(planned=(False, True, False, True), aliases=((), (Alias("runtime", 1, 2),), ()))
    del offsets[2]
    verify(graph, offsets, 192, 64)
    outputs_b = dataclasses.replace(graph, outputs=(2, 3)).with_aliases(inplace=((), (), ((1, 3),)))
    with pytest.raises(VerificationError, match=r"needs 'a'|over 'a'|needs 'b'"):
        verify(outputs_b, {**offsets, 3: 0}, 192, 64)


def _halves() -> tuple[Graph, dict[int, int]]:
    """x → a, b, joined to j, whose second half s is c; y = j + c. a and b lie inside j, and so does s."""
    graph = Graph(
        nodes=("first", "second", "join", "cut", "third", "fourth"), ops=("Op",) * 6,
        values=("x", "a", "b", "j", "s", "c", "y"), sizes=(64, 64, 64, 128, 64, 64, 128),
        planned=(False, *(True,) * 6),
        reads=((0,), (0,), (1, 2), (3,), (4,), (3, 5)), writes=((1,), (2,), (3,), (4,), (5,), (6,)), outputs=(6,),
        forward=(True,) * 6, costs=(1.0,) * 6, workspace=(0,) * 6,
    ).with_aliases(
        inplace=((), (), (), (), ((4, 5),), ()), subview=((), (), ((1, 3, 0), (2, 3, 64)), ((4, 3, 64),), (), ()),
    )  # fmt: skip
    return graph, {1: 0, 2: 64, 3: 0, 4: 64, 5: 128, 6: 192}


def test_parts_inside_their_whole_pass_wholly_or_in_part() -> None:
    graph, offsets = _halves()
    verify(graph, offsets, 320, 64)
    verify(graph, {**offsets, 2: 256}, 320, 64)  # b is copied
    storage = assign_storage(graph)
    assert [storage.of_value[v] for v in (1, 2, 3, 4)] == [storage.of_value[3]] * 4
    assert storage.within == (0, 0, 64, 0, 64, 0, 0)
    assert [(b.size, b.start, b.stop) for b in storage.buffers] == [(128, 0, 6), (64, 4, 6), (128, 5, 6)]


def test_a_part_may_be_overwritten_once_its_whole_is_dead_and_other_parts_stay() -> None:
    """c lies over s, the second half of w, while r, the first half, is still to be read."""
    graph = Graph(
        nodes=("whole", "left", "right", "third", "fourth"), ops=("Op",) * 5, values=("x", "w", "r", "s", "c", "y"),
        sizes=(64, 128, 64, 64, 64, 64), planned=(False, *(True,) * 5), reads=((0,), (1,), (1,), (3,), (2, 4)),
        writes=((1,), (2,), (3,), (4,), (5,)), outputs=(5,), forward=(True,) * 5, costs=(1.0,) * 5,
        workspace=(0,) * 5,
    ).with_aliases(inplace=((), (), (), ((3, 4),), ()), subview=((), ((2, 1, 0),), ((3, 1, 64),), (), ()))  # fmt: skip
    offsets = {1: 0, 2: 0, 3: 64, 4: 64, 5: 128}
    verify(graph, offsets, 192, 64)
    with pytest.raises(VerificationError, match=r"'fourth'.*needs 'w', whose bytes 'c' has overwritten"):
        verify(dataclasses.replace(graph, reads=(*graph.reads[:4], (1, 4))), offsets, 192, 64)


def test_a_part_that_outlives_its_whole_is_copied() -> None:
    """a is read after j: as a part of j it keeps y from being written over j; where it is copied y may be."""
    graph = Graph(
        nodes=("first", "second", "join", "third", "fourth"), ops=("Op",) * 5, values=("x", "a", "b", "j", "y", "z"),
        sizes=(64, 64, 64, 128, 128, 64), planned=(False, *(True,) * 5), reads=((0,), (0,), (1, 2), (3,), (1, 4)),
        writes=((1,), (2,), (3,), (4,), (5,)), outputs=(5,), forward=(True,) * 5, costs=(1.0,) * 5,
        workspace=(0,) * 5,
    ).with_aliases(inplace=((), (), (), ((3, 4),), ()), subview=((), (), ((1, 3, 0), (2, 3, 64)), (), ()))  # fmt: skip
    storage = assign_storage(graph)
    assert len({storage.of_value[v] for v in (1, 2, 3)}) == 1 < len({storage.of_value[v] for v in (3, 4)})
    verify(graph, *_layout(graph), 64)
    offered = graph.with_aliases(subview=((),) * 5, optional=graph.subviews)
    assert len(storages(offered, Sharing())) == 1  # without windows y lies over j, which saves more
    verify(graph, {1: 0, 2: 128, 3: 64, 4: 64, 5: 192}, 256, 64)
    with pytest.raises(VerificationError, match=r"'fourth'.*needs 'a', whose bytes 'y' has overwritten"):
        verify(graph, {1: 0, 2: 64, 3: 0, 4: 0, 5: 128}, 192, 64)


@pytest.mark.parametrize(
    ("changes", "moved", "words"),
    [
        ({}, {2: 0, 1: 64}, "'join'.*writes 'j'.*over 'a'.*reads"),
        ({}, {3: 64, 6: 256}, "'join'.*writes 'j'.*over 'b'.*reads"),
        ({}, {4: 0}, "'cut'.*writes 's'.*over 'j'.*reads"),
        ({}, {2: 0}, "'join'.*needs 'a', whose bytes 'b' has overwritten"),
        ({}, {5: 64}, "'fourth'.*needs 'j', whose bytes 'c' has overwritten"),
        ({"subview": ((),) * 6}, {}, "'join'.*writes 'j'.*over 'a'.*reads"),
        ({"subview": ((), (), ((1, 3, 0), (2, 3, 64)), (), (), ())}, {}, "'cut'.*writes 's'.*over 'j'.*reads"),
        ({"subview": ((), (), ((1, 3, 0), (2, 3, 0)), ((4, 3, 64),), (), ())}, {}, "'join'.*over 'b'.*reads"),
    ],
)  # fmt: skip
def test_a_fault_of_a_part_is_named(changes: dict[str, Any], moved: dict[int, int], words: str) -> None:
    graph, offsets = _halves()
    with pytest.raises(VerificationError, match=words):
        verify(graph.with_aliases(**changes), {**offsets, **moved}, 384, 64)
