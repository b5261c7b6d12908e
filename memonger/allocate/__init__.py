"""Offsets for buffers: every allocator by name, the one function that tries them, and the checks around them."""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

from memonger.allocate.checker import check_layout
from memonger.allocate.greedy import greedy
from memonger.allocate.lower_bound import lower_bound
from memonger.allocate.lowest_offset import lowest_offset_first
from memonger.allocate.types import Allocator, Buffer, Layout
from memonger.errors import LayoutError

__all__ = ["ALLOCATORS", "Allocator", "Buffer", "Layout", "allocate", "check_layout", "lower_bound"]

ALLOCATORS: Mapping[str, Allocator] = MappingProxyType(
    {
        "lowest-offset-area": partial(lowest_offset_first, order="area"),
        "lowest-offset-size": partial(lowest_offset_first, order="size"),
        "lowest-offset-duration": partial(lowest_offset_first, order="duration"),
        "greedy-size": partial(greedy, order="size"),
        "greedy-area": partial(greedy, order="area"),
        "greedy-duration": partial(greedy, order="duration"),
        "greedy-conflict": partial(greedy, order="conflict"),
        "greedy-start": partial(greedy, order="start", fit="first"),
    }
)
"""Every allocator by name, in the order in which ``allocate`` tries them."""


def allocate(buffers: Sequence[Buffer], strategies: Sequence[str] | None = None) -> Layout:
    """Lay buffers out with the best of several allocators: the smallest arena, the first of equals.

    Tries them in order and stops at the first that reaches the lower bound. The same buffers in the same order give the
    same offsets, whatever their ids.

    Args:
        buffers: The problem; empty gives the empty layout.
        strategies: Names from ``ALLOCATORS``, tried in this order; all of them by default.

    Raises:
        LayoutError: The problem is malformed (the message names the buffer), or a strategy is unknown.
    """
    names = tuple(ALLOCATORS) if strategies is None else tuple(strategies)
    unknown = [name for name in names if name not in ALLOCATORS]
    if unknown or not names:
        raise LayoutError(
            f"no allocator named {', '.join(unknown) or '(none given)'}; there are {', '.join(ALLOCATORS)}"
        )
    bound = lower_bound(buffers)
    best: Layout | None = None
    for name in names:
        layout = ALLOCATORS[name](buffers)
        if best is None or layout.size < best.size:
            best = layout
        if best.size <= bound:
            break
    assert best is not None
    return best
