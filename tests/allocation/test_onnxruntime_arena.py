"""The replay of onnxruntime's allocator, by hand; against measured memory see tests/runtime/test_process_memory.py."""

import pytest

from memonger.allocation.buffers import Buffer
from memonger.allocation.onnxruntime_arena import Frame, best_first_piece, onnxruntime_bytes

MIB = 1 << 20


def _buffers(*rows: tuple[float, int, int]) -> list[Buffer]:
    return [Buffer(number, int(size * MIB), start, stop) for number, (size, start, stop) in enumerate(rows)]


def test_nothing_takes_nothing() -> None:
    assert onnxruntime_bytes(Frame([])) == 0


def test_a_block_that_fits_what_the_first_run_left_takes_nothing_more() -> None:
    """One region of 1 MiB, and a 32nd of it for the arena's own account of it."""
    assert onnxruntime_bytes(Frame(_buffers((1, 0, 1)))) == MIB + MIB // 32


def test_small_buffers_count_by_the_page() -> None:
    assert onnxruntime_bytes(Frame(_buffers((1 / 1024, 0, 1)))) == 4096 + MIB // 32


def test_the_second_runs_block_comes_on_top_of_the_first_runs_pieces() -> None:
    """A chain of 3 MiB: two regions of 4, uncut as less than 3 would be left, the third value in the first; then 8.

    Of the regions 3 + 3 and the block of 6 are written, and a 32nd of 4 + 4 + 8.
    """
    assert onnxruntime_bytes(Frame(_buffers((3, 0, 2), (3, 1, 3), (3, 2, 4)))) == 12 * MIB + 16 * MIB // 32


def test_what_is_asked_for_one_by_one_takes_no_part_in_the_block() -> None:
    """A value in a region of 1 MiB, an output in half of one of 2. A block of 1 finds the first, of 2 the second."""
    value, output = _buffers((1, 0, 2), (1, 1, 3))
    assert onnxruntime_bytes(Frame([value], [output])) == 2 * MIB + (1 + 2) * MIB // 32
    assert onnxruntime_bytes(Frame([value, output])) == 3 * MIB + (1 + 2) * MIB // 32


def test_the_smallest_free_piece_is_taken_and_neighbours_join() -> None:
    """1, 1 and 2 MiB in a region of 4 by a first one of 4: what they leave is one piece again, and holds the block."""
    rows = (4, 0, 1), (1, 1, 3), (1, 1, 2), (2, 2, 3)
    assert onnxruntime_bytes(Frame(_buffers(*rows))) == 4 * MIB + 4 * MIB // 32


def test_of_equal_pieces_the_system_lays_the_later_one_lower() -> None:
    """Regions of 64 MiB by 49 and by 12. The second run's block of 61 finds both, and takes the one with 24 written."""
    rows = (49, 0, 2), (12, 1, 3), (12, 2, 4)
    assert onnxruntime_bytes(Frame(_buffers(*rows))) == (49 + 61 + 2 * 64 / 32) * MIB


def test_a_body_takes_a_block_again_each_turn() -> None:
    """The first turn two values and the second one block of both, in what these left; the loop's output stays."""
    body = Frame(_buffers((1, 0, 2), (1, 1, 2)))
    turns = {1: [(body, 8)]}
    loop = Frame([], _buffers((4, 1, 3)), turns)
    once, often = (onnxruntime_bytes(Frame([], loop.single, {1: [(body, count)]})) for count in (1, 100))
    assert once <= often == onnxruntime_bytes(loop)
    assert onnxruntime_bytes(loop, arena=False) == (4 + 2) * MIB


def test_without_the_arena_what_is_given_back_counts_no_more() -> None:
    """A block of 6 MiB and an output of 3, after a first run whose values were two at a time."""
    planned, single = _buffers((3, 0, 2), (3, 1, 3)), [Buffer(9, 3 * MIB, 2, 4)]
    assert onnxruntime_bytes(Frame(planned, single), arena=False) == 9 * MIB


@pytest.mark.parametrize(("turn", "most"), [(0, 8192 + 2000), (2, 8192 + 1000)])
def test_a_loops_turns_leave_pieces_and_each_runs_its_branch(turn: int, most: int) -> None:
    """Three turns, one of which takes 4 KiB and each other 8; each leaves 1,000 bytes until they are joined."""
    branches = [(Frame([], [Buffer(0, size, 0, 2)]), 1) for size in (4096, 8192)]
    body = Frame([], bodies={0: branches}, first_at={0: turn})
    frame = Frame([], [Buffer(0, 3000, 2, 4)], {0: [(body, 3)]}, {0: [(3000, 4)]})
    assert onnxruntime_bytes(frame, arena=False) == most


def test_a_piece_that_is_asked_for_first_has_one_region_hold_what_would_lie_in_three() -> None:
    """3, 3 and 6 MiB of regions of 4, 4 and 8; or one of 8 at once, for a piece of a little more than 4."""
    frame = Frame([], _buffers((3, 0, 2), (3, 1, 3), (6, 3, 4)))
    assert onnxruntime_bytes(frame) == (3 + 3 + 6) * MIB + (4 + 4 + 8) * MIB // 32
    assert best_first_piece(frame, onnxruntime_bytes(frame)) == (4 * MIB + 256, 6 * MIB + 4096 + (1 + 8) * MIB // 32)


def test_no_piece_is_asked_for_first_where_that_takes_no_less() -> None:
    frame = Frame([], _buffers((3, 0, 1)))
    assert best_first_piece(frame, onnxruntime_bytes(frame)) == (0, onnxruntime_bytes(frame))
