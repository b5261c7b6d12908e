"""Buffers with sizes and lifetimes → an offset for each in one arena. To add an allocator, see `ALLOCATORS`.

Allocators are imported when one is asked for: who runs a plan has no use for them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memonger.allocation.buffers import Allocator, Buffer, Layout
from memonger.allocation.lower_bound import lower_bound

if TYPE_CHECKING:
    from memonger.allocation.allocators import ALLOCATORS, EFFORT, allocate
    from memonger.allocation.checker import check_layout

__all__ = ["ALLOCATORS", "EFFORT", "Allocator", "Buffer", "Layout", "allocate", "check_layout", "lower_bound"]

_LAZY = {"ALLOCATORS": "allocators", "EFFORT": "allocators", "allocate": "allocators", "check_layout": "checker"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
