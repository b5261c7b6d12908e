"""Buffers with sizes and lifetimes → an offset for each in one arena. To add an allocator, see `ALLOCATORS`."""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

from memonger.errors import LayoutError
from memonger.layout.buffers import Allocator, Buffer, Layout
from memonger.layout.checker import check_layout
from memonger.layout.evolution import SearchOptions, search
from memonger.layout.greedy import greedy
from memonger.layout.lower_bound import lower_bound
from memonger.layout.lowest_offset import lowest_offset_first

__all__ = ["ALLOCATORS", "Allocator", "Buffer", "Layout", "SearchOptions", "allocate", "check_layout", "lower_bound"]

ALLOCATORS: Mapping[str, Allocator] = MappingProxyType(
    {
        "lowest-offset-area": partial(lowest_offset_first, order="area"),
        "lowest-offset-duration": partial(lowest_offset_first, order="duration"),
        "lowest-offset-start": partial(lowest_offset_first, order="start"),
        "lowest-offset-conflict": partial(lowest_offset_first, order="conflict"),
        "lowest-offset-size": partial(lowest_offset_first, order="size"),
        "ends-duration": partial(greedy, order="duration", fit="ends"),
        "ends-size": partial(greedy, order="size", fit="ends"),
        "ends-area": partial(greedy, order="area", fit="ends"),
        "greedy-duration": partial(greedy, order="duration"),
        "greedy-conflict": partial(greedy, order="conflict"),
        "greedy-size": partial(greedy, order="size"),
        "greedy-area": partial(greedy, order="area"),
        "greedy-start": partial(greedy, order="start", fit="first"),
        "search": search,
    }
)
"""Every allocator by name, in the order in which ``allocate`` tries them.

To add one, write a file with a function from buffers to a layout, and name it in this table.
"""

_MANY_BUFFERS = 20_000
"""From so many buffers on an allocator takes seconds, so that by default only the first few are tried."""

_FIRST_FEW = 3
"""How many allocators are tried by default for many buffers."""


def allocate(
    buffers: Sequence[Buffer],
    strategies: Sequence[str] | None = None,
    search_options: SearchOptions | None = None,
) -> Layout:
    """The layout with the smallest arena that several allocators give; of equals the first.

    The allocators are tried in order, until one comes within less than the smallest alignment of the lower bound. The
    same buffers in the same order give the same offsets, whatever their ids.

    Args:
        buffers: What to lay out. No buffers give the empty layout.
        strategies: Names from ``ALLOCATORS``, tried in this order. By default all of them, or the first three from
            20,000 buffers on.
        search_options: Settings of the allocator ``search``.

    Raises:
        LayoutError: The problem is malformed (the message names the buffer), or there is no allocator of that name.
    """
    names = _defaults(len(buffers)) if strategies is None else tuple(strategies)
    unknown = [name for name in names if name not in ALLOCATORS]
    if unknown or not names:
        raise LayoutError(f"no allocator named {unknown or '(none given)'}; there are {', '.join(ALLOCATORS)}")
    allocators: dict[str, Allocator] = {**ALLOCATORS, "search": partial(search, options=search_options)}
    enough = lower_bound(buffers) + min((buffer.alignment for buffer in buffers), default=1)
    best = allocators[names[0]](buffers)
    for name in names[1:]:
        if best.size < enough:
            break
        best = min(best, allocators[name](buffers), key=lambda layout: layout.size)
    return best


def _defaults(count: int) -> tuple[str, ...]:
    return tuple(ALLOCATORS)[: _FIRST_FEW if count >= _MANY_BUFFERS else None]
