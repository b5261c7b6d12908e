"""Every allocator, and what tries them. To add one, see `ALLOCATORS`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import numpy as np

from memonger.allocation.buffers import Allocator, Buffer, Layout
from memonger.allocation.lower_bound import lower_bound
from memonger.allocation.lowest_offset import lowest_offset_first, relaid
from memonger.allocation.skyline import skyline
from memonger.errors import LayoutError

ALLOCATORS: Mapping[str, Allocator] = MappingProxyType(
    {
        "lowest-offset-conflict": partial(lowest_offset_first, order="conflict"),
        "lowest-offset-duration": partial(lowest_offset_first, order="duration"),
        "lowest-offset-start": partial(lowest_offset_first, order="start"),
        "lowest-offset-area": partial(lowest_offset_first, order="area"),
        "lowest-offset-size": partial(lowest_offset_first, order="size"),
        "skyline": skyline,
    }
)
"""Every allocator by name, in the order in which ``allocate`` tries them.

To add one, write a file with a function from buffers to a layout, and name it in this table.
"""

EFFORT = 40_000_000
"""How many loop turns the search after the allocators may take by default: some five seconds, or 0.1 with numba."""

_TURNS = 200
"""Turns that laying out one buffer again is worth."""

_FEW_BUFFERS = 1_000
"""Up to so many buffers all allocators together take a tenth of a second."""

_MANY_BUFFERS = 20_000
"""From so many buffers on an allocator takes seconds, and by default ``_FOR_MANY`` are tried."""

_FOR_MANY = ("skyline", "lowest-offset-conflict", "lowest-offset-duration")


def allocate(
    buffers: Sequence[Buffer],
    strategies: Sequence[str] | None = None,
    *,
    capacity: int | None = None,
    effort: int = EFFORT,
) -> Layout:
    """A layout with a small arena: the smallest that several allocators give, and then a search.

    The allocators are tried in order, until one reaches the lower bound; of many buffers, until one comes within less
    than the smallest alignment of it. Buffers whose lifetimes don't overlap, not through others either, are laid out by
    themselves: only what is still too large goes on to the next allocator, then, without a capacity, again and again
    to lowest-offset-first with what came out too high put first, and then to the search. The same buffers in the same
    order give the same offsets, whatever their ids, how fast the machine is, and whether numba is installed, with which
    the search takes a fiftieth of the time.

    Args:
        buffers: What to lay out. No buffers give the empty layout.
        strategies: Names from ``ALLOCATORS``, tried in this order, without a search. By default those but the last, or
            from 20,000 buffers on the last and the first two.
        capacity: Bytes that are enough: what fits into them is not made smaller. The layout may still be larger.
        effort: Turns of loops that the search may take for each part whose lifetimes overlap no other's. 0: no search.

    Returns:
        The layout, with ``proven`` where no layout is smaller.

    Raises:
        LayoutError: The problem is malformed (the message names the buffer), a buffer is larger than the capacity, or
            there is no allocator of that name.
    """
    defaults = _FOR_MANY if len(buffers) >= _MANY_BUFFERS else tuple(ALLOCATORS)[:-1]
    names = defaults if strategies is None else tuple(strategies)
    unknown = [name for name in names if name not in ALLOCATORS]
    if unknown or not names:
        raise LayoutError(f"no allocator named {unknown or '(none given)'}; there are {', '.join(ALLOCATORS)}")
    bound = lower_bound(buffers)
    for buffer in buffers:
        if capacity is not None and buffer.size > capacity:
            raise LayoutError(
                f"buffer {buffer.id} of {buffer.size} bytes is larger than the capacity of {capacity} bytes."
            )
    slack = min((buffer.alignment for buffer in buffers), default=1) - 1
    enough = bound + slack if capacity is None else max(bound, capacity)
    goal = enough if len(buffers) > _FEW_BUFFERS or capacity is not None else bound
    allocators = [ALLOCATORS[name] for name in names]
    first = allocators[0](buffers)
    if first.size <= goal:
        return replace(first, proven=first.size <= bound)
    effort = 0 if strategies is not None else effort
    offsets, proven = np.zeros(len(buffers), np.int64), bound
    for part in _parts(buffers):
        members = [buffers[position] for position in part]
        layout, low = allocators[0](members), lower_bound(members)
        for allocator in allocators[1:]:
            if layout.size > goal:
                layout = min(layout, allocator(members), key=lambda each: each.size)
        if layout.size > enough and effort and capacity is None and len(members) < _MANY_BUFFERS:
            layout = relaid(members, layout, enough, effort // _TURNS)
        for target, turns in ((enough, effort), (goal, effort // 100)):
            if layout.size > target and turns:
                from memonger.allocation.placement_search import improve  # here: most layouts are at their bound before

                layout, low = improve(members, layout, low, target, turns, direct=capacity is not None)
        offsets[part], proven = layout.offsets, max(proven, low)
    size = max(offset + buffer.size for offset, buffer in zip(offsets.tolist(), buffers, strict=True))
    return Layout(tuple(offsets.tolist()), size, size <= proven)


def _parts(buffers: Sequence[Buffer]) -> list[list[int]]:
    """Positions of buffers, in groups whose lifetimes overlap no other group's."""
    parts: list[list[int]] = []
    end = None
    for position in sorted(range(len(buffers)), key=lambda position: buffers[position].start):
        if end is None or buffers[position].start >= end:
            parts.append([])
            end = buffers[position].stop
        parts[-1].append(position)
        end = max(end, buffers[position].stop)
    return [sorted(part) for part in parts]
