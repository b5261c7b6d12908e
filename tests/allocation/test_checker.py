"""The layout checker accepts what is right and names what is wrong."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memonger.allocation import Buffer, Layout, check_layout
from memonger.errors import VerificationError

BUFFERS = (Buffer(10, 100, 0, 4), Buffer(11, 64, 2, 6), Buffer(12, 64, 4, 8), Buffer(13, 1, 0, 8))
GOOD = Layout((64, 0, 64, 192), 193)


def moved(position: int, offset: int) -> Layout:
    offsets = list(GOOD.offsets)
    offsets[position] = offset
    return replace(GOOD, offsets=tuple(offsets))


def test_good_layout_passes() -> None:
    check_layout(BUFFERS, GOOD)
    check_layout(BUFFERS, replace(GOOD, size=1000))
    check_layout((), Layout((), 0))


def test_collision_names_both_buffers_their_lifetimes_and_the_bytes() -> None:
    with pytest.raises(VerificationError) as caught:
        check_layout(BUFFERS, moved(1, 128))
    message = str(caught.value)
    for part in ("buffer 10 ", "[0, 4)", "buffer 11 ", "[2, 6)", "36 bytes", "[128, 164)"):
        assert part in message


def test_collision_in_a_single_step_is_found() -> None:
    buffers = (Buffer(1, 8, 0, 5, 1), Buffer(2, 8, 4, 9, 1))
    check_layout((buffers[0], replace(buffers[1], start=5)), Layout((0, 0), 8))
    with pytest.raises(VerificationError, match="1 bytes"):
        check_layout(buffers, Layout((0, 7), 15))


def test_buffer_enclosed_by_another_is_found() -> None:
    for first, second in ((0, 1), (1, 0)):
        buffers = (Buffer(0, 100, first, 9, 1), Buffer(1, 10, second, 9, 1))
        with pytest.raises(VerificationError, match="10 bytes"):
            check_layout(buffers, Layout((0, 50), 100))


def test_identical_places_are_found() -> None:
    with pytest.raises(VerificationError, match="8 bytes"):
        check_layout((Buffer(0, 8, 0, 1), Buffer(1, 8, 0, 1)), Layout((0, 0), 8))


def test_misaligned_offset_is_found() -> None:
    with pytest.raises(VerificationError, match=r"buffer 13 .*not aligned to 64"):
        check_layout(BUFFERS, replace(moved(3, 200), size=201))


def test_negative_offset_is_found() -> None:
    with pytest.raises(VerificationError, match=r"buffer 11 .*negative offset -64"):
        check_layout(BUFFERS, moved(1, -64))


def test_buffer_that_leaves_the_arena_is_found() -> None:
    with pytest.raises(VerificationError, match=r"buffer 13 ends at byte 193, 1 beyond the arena of 192"):
        check_layout(BUFFERS, replace(GOOD, size=192))


@pytest.mark.parametrize("offsets", [(), (64, 0, 64), (64, 0, 64, 192, 0)])
def test_wrong_number_of_offsets_is_found(offsets: tuple[int, ...]) -> None:
    with pytest.raises(VerificationError, match=f"{len(offsets)} offsets for 4 buffers"):
        check_layout(BUFFERS, Layout(offsets, 193))


@pytest.mark.parametrize(
    "wrong", [Buffer(5, 0, 0, 1), Buffer(5, -64, 0, 1), Buffer(5, 1, 2, 2), Buffer(5, 1, 0, 1, alignment=0)]
)
def test_what_is_no_buffer_is_refused(wrong: Buffer) -> None:
    with pytest.raises(VerificationError, match="id=5"):
        check_layout((wrong,), Layout((0,), 64))


def collides(one: Buffer, two: Buffer, at: int, other: int) -> bool:
    return one.start < two.stop and two.start < one.stop and at < other + two.size and other < at + one.size


@settings(max_examples=150, deadline=None)
@given(
    drawn=st.lists(
        st.tuples(st.integers(1, 6), st.integers(0, 8), st.integers(1, 5), st.integers(0, 30)), min_size=1, max_size=8
    )
)
def test_checker_agrees_with_comparing_every_pair(drawn: list[tuple[int, int, int, int]]) -> None:
    buffers = [Buffer(i, size, start, start + steps, 1) for i, (size, start, steps, _) in enumerate(drawn)]
    offsets = tuple(offset for _, _, _, offset in drawn)
    layout = Layout(offsets, 36)
    pairs = itertools.combinations(zip(buffers, offsets, strict=True), 2)
    if any(collides(one, two, at, other) for (one, at), (two, other) in pairs):
        with pytest.raises(VerificationError, match="share"):
            check_layout(buffers, layout)
    else:
        check_layout(buffers, layout)
