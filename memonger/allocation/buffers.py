"""The packing problem as plain data: buffers in, offsets out."""

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from memonger.errors import LayoutError
from memonger.units import format_size


@dataclass(frozen=True, slots=True)
class Buffer:
    """The bytes of one value over its lifetime.

    Attributes:
        id: The caller's number of the buffer, unique in a problem.
        size: Bytes, at least 1.
        start: First step at which the bytes are in use.
        stop: First step at which the bytes are free again: lifetimes are half-open, ``[start, stop)``.
        alignment: The offset must be a multiple of this many bytes.
    """

    id: int
    size: int
    start: int
    stop: int
    alignment: int = 64


@dataclass(frozen=True, slots=True, repr=False)
class Layout:
    """An offset for every buffer, in the order the buffers were given, and the arena's size, all in bytes.

    Attributes:
        offsets: In bytes.
        size: Of the arena, in bytes.
        proven: Whether it is known that no layout of these buffers is smaller. Equal layouts may differ in it.
    """

    offsets: tuple[int, ...]
    size: int
    proven: bool = field(default=False, compare=False)

    def __repr__(self) -> str:
        """As ``<Layout: 120 buffers in 1.20 MiB>``."""
        count = len(self.offsets)
        return f"<Layout: {count} buffer{'' if count == 1 else 's'} in {format_size(self.size)}>"


Allocator = Callable[[Sequence[Buffer]], Layout]
"""The one signature of all allocators: a pure function, whose result does not depend on the ids."""


_INT64 = 2**63
"""Limit on offset times number of buffers, by which allocators sort in 64-bit integers. Offsets stay below 2^62."""

_FARTHEST = 2**62
"""Limit on the absolute value of a step: the duration of a buffer must be a 64-bit integer."""


def validate(buffers: Sequence[Buffer]) -> None:
    """Check that the problem is well formed.

    Raises:
        LayoutError: A size below 1, an empty or backward lifetime, an alignment that is not a positive power of two,
            an id given twice, or sizes whose sum can't be computed with. The message names the buffer's id.
    """
    seen: set[int] = set()
    total = 0
    for buffer in buffers:
        if not isinstance(buffer, Buffer):
            raise LayoutError(f"{reprlib.repr(buffer)} is no memonger.Buffer(id=0, size=4096, start=0, stop=3).")
        if buffer.id in seen:
            raise LayoutError(f"two buffers have the id {buffer.id}; ids must be unique.")
        seen.add(buffer.id)
        validate_buffer(buffer)
        total += buffer.size + buffer.alignment
    if (total + 1) * max(len(buffers), 4) >= _INT64:
        largest = max(buffers, key=lambda buffer: buffer.size)
        raise LayoutError(
            f"{len(buffers)} buffers of {total} bytes in all are beyond 64-bit arithmetic; "
            f"the largest is buffer {largest.id} of {largest.size} bytes"
        )


def validate_buffer(buffer: Buffer) -> None:
    """Check one buffer by itself, as ``validate`` does.

    Raises:
        LayoutError: As for ``validate``.
    """
    if buffer.size < 1:
        raise LayoutError(f"buffer {buffer.id} has size {buffer.size}; a buffer has at least 1 byte.")
    if buffer.start >= buffer.stop:
        raise LayoutError(
            f"buffer {buffer.id} lives in [{buffer.start}, {buffer.stop}); its start must be before its stop."
        )
    if not -_FARTHEST < buffer.start < buffer.stop < _FARTHEST:
        raise LayoutError(f"buffer {buffer.id} lives in [{buffer.start}, {buffer.stop}): beyond 64-bit arithmetic")
    if buffer.alignment < 1 or buffer.alignment & (buffer.alignment - 1):
        raise LayoutError(f"buffer {buffer.id} has alignment {buffer.alignment}; it must be a positive power of two")
