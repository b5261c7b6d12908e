"""An independent check that a layout is valid. It shares no code with the allocators."""

from bisect import bisect_left, insort
from collections.abc import Sequence

from memonger.allocation.buffers import Buffer, Layout
from memonger.errors import VerificationError

Span = tuple[int, int, int]
"""First byte, byte after the last, and the buffer's position in the sequence."""


def check_layout(buffers: Sequence[Buffer], layout: Layout) -> None:
    """Check that no two buffers alive at the same step share a byte, and that all lie aligned within the arena.

    Goes through the steps in order with a sorted list of the bytes in use. As long as nothing collided the buffers in
    use are disjoint, so a new buffer that collides with any of them collides with the one just below or just above it.
    Alignment is checked on the offset; the session aligns the address of the arena.

    Raises:
        VerificationError: A wrong number of offsets, a negative or misaligned offset, a buffer that leaves the arena,
            or two buffers that collide; the message names them, their lifetimes, and the bytes they share.
    """
    if len(layout.offsets) != len(buffers):
        raise VerificationError(f"the layout has {len(layout.offsets)} offsets for {len(buffers)} buffers")
    for buffer, offset in zip(buffers, layout.offsets, strict=True):
        if buffer.size < 1 or buffer.start >= buffer.stop or buffer.alignment < 1:
            raise VerificationError(f"{buffer} is no buffer: its size, lifetime or alignment is empty")
        if offset < 0:
            raise VerificationError(f"buffer {buffer.id} has the negative offset {offset}")
        if offset % buffer.alignment:
            raise VerificationError(f"buffer {buffer.id} at offset {offset} is not aligned to {buffer.alignment} bytes")
        if offset + buffer.size > layout.size:
            raise VerificationError(
                f"buffer {buffer.id} ends at byte {offset + buffer.size}, "
                f"{offset + buffer.size - layout.size} beyond the arena of {layout.size}"
            )
    events = [(buffer.start, 1, position) for position, buffer in enumerate(buffers)]
    events += [(buffer.stop, 0, position) for position, buffer in enumerate(buffers)]
    events.sort()  # at one step, what ends there is free before what starts there needs room
    in_use: list[Span] = []
    for _, starts, position in events:
        span = (layout.offsets[position], layout.offsets[position] + buffers[position].size, position)
        index = bisect_left(in_use, span)
        if not starts:
            del in_use[index]
            continue
        for other in in_use[max(0, index - 1) : index + 1]:
            low, high = max(other[0], span[0]), min(other[1], span[1])
            if low < high:
                raise VerificationError(
                    f"{_describe(buffers, other)} and {_describe(buffers, span)} share {high - low} bytes, "
                    f"[{low}, {high})"
                )
        insort(in_use, span)


def _describe(buffers: Sequence[Buffer], span: Span) -> str:
    buffer = buffers[span[2]]
    return f"buffer {buffer.id} (steps [{buffer.start}, {buffer.stop}), bytes [{span[0]}, {span[1]}))"
