"""The packing problem as plain data: buffers in, offsets out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Buffer:
    """The bytes of one value over its lifetime.

    Attributes:
        id: The caller's number for it; unique in a problem.
        size: Bytes, at least 1.
        start: First step at which the bytes are in use.
        stop: First step at which they are free again; lifetimes are half-open, ``[start, stop)``.
        alignment: The offset is a multiple of this many bytes.
    """

    id: int
    size: int
    start: int
    stop: int
    alignment: int = 64


@dataclass(frozen=True, slots=True)
class Layout:
    """An offset for every buffer, in the order the buffers were given, and the arena's size, all in bytes."""

    offsets: tuple[int, ...]
    size: int


Allocator = Callable[[Sequence[Buffer]], Layout]
