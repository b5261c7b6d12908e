"""Allocators: what they return is right, deterministic, and as small as claimed."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planning.packing import training_like
from memonger.allocation import (
    ALLOCATORS,
    Buffer,
    Layout,
    allocate,
    allocators,
    check_layout,
    lower_bound,
    placement_search,
)
from memonger.allocation.lowest_offset import relaid
from memonger.allocation.minimalloc_csv import read_problem
from memonger.allocation.placement_search import improve
from memonger.allocation.shrunk import CompactLayout
from memonger.errors import LayoutError

PACKING = sorted((Path(__file__).parents[1] / "data" / "packing").glob("*.csv"))
BRIEFLY = 20_000


@st.composite
def problems(draw: st.DrawFn, most: int = 24) -> list[Buffer]:
    """Random problems: crowded or sparse, one alignment or many."""
    alignments = draw(st.sampled_from([[1], [16], [64], [1, 2, 16, 64]]))
    horizon = draw(st.sampled_from([3, 12, 200]))
    lifetimes = st.tuples(st.integers(-horizon, horizon), st.integers(1, horizon))
    drawn = draw(st.lists(st.tuples(st.integers(1, 300), lifetimes, st.sampled_from(alignments)), max_size=most))
    return [Buffer(i, size, start, start + steps, align) for i, (size, (start, steps), align) in enumerate(drawn)]


def smallest_arena(buffers: Sequence[Buffer]) -> int:
    """The optimum, by trying every order in which buffers could be dropped from below onto their lowest free place.

    An optimal layout can be pushed down until every buffer rests on another or on the ground; taken by offset, each
    buffer then lies at the lowest place above those taken before.
    """
    best = sum(b.size + b.alignment for b in buffers)
    for order in itertools.permutations(buffers):
        placed: list[tuple[Buffer, int]] = []
        for buffer in order:
            below = [o + b.size for b, o in placed if b.start < buffer.stop and buffer.start < b.stop]
            placed.append((buffer, -(-max(below, default=0) // buffer.alignment) * buffer.alignment))
        best = min(best, max((offset + b.size for b, offset in placed), default=0))
    return best


@pytest.mark.parametrize("name", ALLOCATORS)
@settings(max_examples=40, deadline=None)
@given(buffers=problems())
def test_every_allocator_returns_a_right_layout_no_smaller_than_the_bound(name: str, buffers: list[Buffer]) -> None:
    layout = ALLOCATORS[name](buffers)
    check_layout(buffers, layout)
    assert layout.size >= lower_bound(buffers)
    assert layout.size == max((o + b.size for b, o in zip(buffers, layout.offsets, strict=True)), default=0)


def test_an_allocator_is_one_function_and_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_top_of_each_other(buffers: Sequence[Buffer]) -> Layout:
        ends = list(itertools.accumulate(b.size for b in buffers))
        return Layout(tuple(end - b.size for end, b in zip(ends, buffers, strict=True)), ends[-1])

    monkeypatch.setattr(allocators, "ALLOCATORS", {**ALLOCATORS, "stack": on_top_of_each_other})
    buffers = [Buffer(i, 10 + i, i, i + 2, alignment=1) for i in range(3)]
    assert allocate(buffers, ["stack"]) == Layout((0, 10, 21), 33)
    assert allocate(buffers, ["stack", "lowest-offset-size"]).size == 12 + 11
    with pytest.raises(LayoutError, match="stack"):
        allocate(buffers, ["none such"])


def test_of_equal_arenas_the_first_allocator_gives_the_layout() -> None:
    buffers = [Buffer(0, 64, 0, 2), Buffer(1, 32, 1, 3, alignment=32), Buffer(2, 96, 3, 4)]
    layouts = {name: ALLOCATORS[name](buffers) for name in ("lowest-offset-start", "lowest-offset-size", "skyline")}
    smallest = min(layout.size for layout in layouts.values())
    first = next(layout for layout in layouts.values() if layout.size == smallest)
    assert allocate(buffers, list(layouts)) == first


@settings(max_examples=40, deadline=None)
@given(buffers=problems(most=6))
def test_bound_is_at_most_the_optimum_and_allocate_at_least(buffers: list[Buffer]) -> None:
    optimum = smallest_arena(buffers)
    assert lower_bound(buffers) <= optimum <= allocate(buffers, effort=BRIEFLY).size


@settings(max_examples=40, deadline=None)
@given(buffers=problems(), data=st.data())
def test_same_buffers_give_same_offsets_whatever_their_ids(buffers: list[Buffer], data: st.DataObject) -> None:
    ids = data.draw(st.permutations([7 * b.id - 3 for b in buffers]))
    renamed = [replace(b, id=new) for b, new in zip(buffers, ids, strict=True)]
    layouts = [allocate(same, effort=BRIEFLY) for same in (buffers, tuple(buffers), renamed)]
    assert layouts[0] == layouts[1] == layouts[2]


@settings(max_examples=40, deadline=None)
@given(buffers=problems(), shift=st.integers(-1000, 1000))
def test_only_relative_time_matters(buffers: list[Buffer], shift: int) -> None:
    shifted = [replace(b, start=b.start + shift, stop=b.stop + shift) for b in buffers]
    assert allocate(shifted, effort=BRIEFLY) == allocate(buffers, effort=BRIEFLY)
    assert lower_bound(shifted) == lower_bound(buffers)


@settings(max_examples=40, deadline=None)
@given(buffers=problems())
def test_skyline_is_lowest_offset_first_by_start(buffers: list[Buffer]) -> None:
    aligned = [replace(b, size=64 * b.size, alignment=64) for b in buffers]
    assert ALLOCATORS["skyline"](aligned).size == ALLOCATORS["lowest-offset-start"](aligned).size


@pytest.mark.parametrize("count", [2000, 5000])
@pytest.mark.parametrize("seed", [1, 2])
def test_training_like_problems_reach_the_lower_bound(count: int, seed: int) -> None:
    buffers = training_like(count, seed)
    layout = allocate(buffers)
    check_layout(buffers, layout)
    assert layout.size == lower_bound(buffers)


def test_many_short_lived_buffers_and_a_few_that_stay_are_packed_closely() -> None:
    rng = random.Random(0)
    buffers = [Buffer(i, 64 * rng.randint(1, 99), i, i + rng.randint(2, 4)) for i in range(20_000)]
    buffers += [Buffer(20_000 + i, 640, i, 20_000) for i in range(50)]
    layout = allocate(buffers, ["lowest-offset-area"])
    check_layout(buffers, layout)
    assert layout.size <= 1.1 * lower_bound(buffers)


def test_a_hard_instance_is_packed_into_its_capacity() -> None:
    buffers, capacity = read_problem(PACKING[2]).buffers, 1_048_576
    layout = allocate(buffers, capacity=capacity, effort=2_000_000)
    check_layout(buffers, layout)
    assert layout.size <= capacity


@pytest.mark.parametrize("path", PACKING, ids=lambda path: path.name[0])
def test_blame_makes_smaller_layouts_than_any_order_alone(path: Path) -> None:
    buffers = read_problem(path).buffers
    best = min((allocator(buffers) for allocator in ALLOCATORS.values()), key=lambda layout: layout.size)
    layout = relaid(buffers, best, lower_bound(buffers), 50 * len(buffers))
    check_layout(buffers, layout)
    assert layout.size < best.size
    assert relaid(buffers, best, best.size, 50 * len(buffers)).size <= best.size
    assert relaid(buffers, best, lower_bound(buffers), len(buffers) - 1) is best


@settings(max_examples=40, deadline=None)
@given(buffers=problems(most=6))
def test_search_proves_what_trying_every_order_finds(buffers: list[Buffer]) -> None:
    if not buffers:
        return
    stacked = ALLOCATORS["lowest-offset-size"](buffers)
    layout, low = improve(buffers, stacked, lower_bound(buffers), 0, 10_000_000)
    check_layout(buffers, layout)
    assert layout.size == low == smallest_arena(buffers)


def test_search_gives_the_same_offsets_compiled_and_not(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    buffers = read_problem(PACKING[0]).buffers
    layouts = []
    for compiled in (True, False):
        placement_search.compiled_explore.cache_clear()
        monkeypatch.setattr(placement_search, "has_numba", lambda compiled=compiled: compiled)
        layouts.append(allocate(buffers, effort=500_000))
    placement_search.compiled_explore.cache_clear()
    assert layouts[0].offsets == layouts[1].offsets


def test_more_effort_never_gives_a_larger_arena() -> None:
    buffers = read_problem(PACKING[2]).buffers
    layouts = [allocate(buffers, effort=effort) for effort in (0, 100_000, 2_000_000)]
    sizes = [layout.size for layout in layouts]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0]


def test_parts_that_never_meet_are_laid_out_alone() -> None:
    # Three buffers of 5, 4 and 3 bytes that overlap in pairs only pack badly lowest first, here once and once with
    # other sizes; a third part needs most, and decides the arena.
    tangle = [(3, 0, 4), (5, 0, 2), (4, 3, 6), (3, 5, 8), (5, 5, 7)]
    buffers = [Buffer(i, size, start, stop, 1) for i, (size, start, stop) in enumerate(tangle)]
    buffers += [Buffer(5 + i, 2 * size, 10 + start, 10 + stop, 1) for i, (size, start, stop) in enumerate(tangle)]
    layout = allocate(buffers)
    check_layout(buffers, layout)
    alone = allocate(buffers[5:])
    assert layout.size == alone.size


def test_a_capacity_is_enough_and_a_larger_buffer_is_refused() -> None:
    buffers = read_problem(PACKING[1]).buffers
    roomy = 2 * lower_bound(buffers)
    layout = allocate(buffers, capacity=roomy)
    assert layout == ALLOCATORS["lowest-offset-conflict"](buffers)
    assert not layout.proven
    with pytest.raises(LayoutError, match="buffer 3 of 700 bytes is larger than the capacity of 699"):
        allocate([Buffer(1, 5, 0, 1), Buffer(3, 700, 0, 1)], capacity=699)


def test_sizes_beyond_double_precision_are_exact() -> None:
    size = 2**53 + 1
    buffers = [Buffer(0, size, 0, 2, 1), Buffer(1, size, 1, 3, 1), Buffer(2, size, 2, 4, 1)]
    assert allocate(buffers).size == allocate(buffers, ["skyline"]).size == 2 * size
    assert allocate(buffers).proven


def test_lower_bound_of_a_small_problem_by_hand() -> None:
    # Steps 0 and 1 hold 100 + 30; step 2 holds 30 + 64. Rounded up to 64: 128 + 64, less the slack of one, 34.
    buffers = [Buffer(0, 100, 0, 2), Buffer(1, 30, 0, 3), Buffer(2, 64, 2, 3)]
    assert lower_bound(buffers) == 128 + 64 - 34
    assert lower_bound([replace(b, alignment=1) for b in buffers]) == 130
    assert smallest_arena(buffers) == allocate(buffers).size == 158


def test_lower_bound_may_round_up_to_the_smallest_alignment_only() -> None:
    buffers = [Buffer(0, 1, 0, 1, alignment=2), Buffer(1, 1, 0, 1, alignment=64)]
    assert lower_bound(buffers) == 3
    assert allocate(buffers).size == smallest_arena(buffers) == 3


def test_size_that_is_no_multiple_of_the_alignment_saves_its_slack_at_the_top() -> None:
    buffers = [Buffer(0, 128, 0, 1), Buffer(1, 65, 0, 1), Buffer(2, 127, 0, 1)]
    layout = allocate(buffers, ["lowest-offset-area"])
    assert layout.size == lower_bound(buffers) == 128 + 128 + 65


def test_empty_problem_has_the_empty_layout() -> None:
    assert allocate([]) == Layout((), 0)
    assert lower_bound([]) == 0
    assert all(allocator([]) == Layout((), 0) for allocator in ALLOCATORS.values())


def test_buffers_that_never_meet_share_one_place() -> None:
    assert allocate([Buffer(0, 10, 0, 1), Buffer(1, 20, 1, 2)]) == Layout((0, 0), 20)


def test_best_of_the_given_strategies_wins() -> None:
    buffers = read_problem(PACKING[0]).buffers
    sizes = {name: ALLOCATORS[name](buffers).size for name in ("lowest-offset-start", "lowest-offset-size")}
    assert allocate(buffers, ["lowest-offset-start", "lowest-offset-size"]).size == min(sizes.values())


def test_unknown_strategy_is_named() -> None:
    with pytest.raises(LayoutError, match="nonesuch"):
        allocate([Buffer(0, 1, 0, 1)], ["lowest-offset-size", "nonesuch"])
    with pytest.raises(LayoutError, match="lowest-offset-size"):
        allocate([Buffer(0, 1, 0, 1)], [])


@pytest.mark.parametrize(
    "wrong",
    [
        Buffer(42, 0, 0, 1),
        Buffer(42, -5, 0, 1),
        Buffer(42, 1, 3, 3),
        Buffer(42, 1, 3, 2),
        Buffer(42, 1, 0, 1, alignment=0),
        Buffer(42, 1, 0, 1, alignment=48),
        Buffer(42, 1, 0, 1, alignment=-64),
        Buffer(42, 1, 0, 2**63),
        Buffer(42, 2**62, 0, 1),
    ],
)
def test_malformed_buffer_is_refused_by_id(wrong: Buffer) -> None:
    for function in (allocate, lower_bound, *ALLOCATORS.values()):
        with pytest.raises(LayoutError, match="buffer 42 "):
            function([Buffer(7, 1, 0, 1), wrong])


def test_an_id_given_twice_is_refused() -> None:
    with pytest.raises(LayoutError, match="id 7"):
        allocate([Buffer(7, 1, 0, 1), Buffer(7, 2, 1, 2)])


def test_a_residual_chain_reaches_the_lower_bound_by_search() -> None:
    """Large values that overlap one after the other, with small ones over each seam: no one-sided order gets there."""
    buffers: list[Buffer] = []
    for block in range(60):
        step = 10 * block
        for size, start, stop in ((8192, 0, 12), (8192, 2, 5), (2048, 4, 8), (2048, 7, 11)):
            buffers.append(Buffer(len(buffers), size, step + start, step + stop))
    layout = allocate(buffers)
    check_layout(buffers, layout)
    assert layout.size == lower_bound(buffers)
    assert all(allocator(buffers).size > layout.size for allocator in ALLOCATORS.values())


@given(buffers=problems(), data=st.data())
def test_buffers_that_became_smaller_move_down_and_stay_apart(buffers: list[Buffer], data: st.DataObject) -> None:
    layout = allocate(buffers, effort=0)
    sizes = [data.draw(st.integers(1, buffer.size)) for buffer in buffers]
    moved = CompactLayout(buffers, layout.offsets).offsets(sizes)
    assert moved is not None
    assert all(new <= old for new, old in zip(moved, layout.offsets, strict=True))
    smaller = [replace(buffer, size=size) for buffer, size in zip(buffers, sizes, strict=True)]
    size = max((o + b.size for o, b in zip(moved, smaller, strict=True)), default=0)
    check_layout(smaller, Layout(tuple(moved), size))


def test_smaller_buffers_lie_on_those_below_them() -> None:
    buffers = [Buffer(0, 640, 0, 3), Buffer(1, 640, 1, 4), Buffer(2, 640, 2, 5), Buffer(3, 640, 3, 6)]
    shrunk = CompactLayout(buffers, [0, 640, 1280, 0])
    assert shrunk.offsets([64, 128, 64, 192]) == [0, 192, 320, 0]  # the last lies below the second, too
    assert shrunk.offsets([640, 640, 640, 704]) is None  # the second would have to move up
