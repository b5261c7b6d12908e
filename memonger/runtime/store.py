"""Tensors that persist from one training step to the next, each at an address of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from memonger import shapes
from memonger.errors import SessionError
from memonger.liveness import ALIGNMENT
from memonger.runtime.arena import HostArena


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor lies: ``offset`` in bytes from the store's beginning."""

    dtype: ir.DataType
    shape: tuple[int, ...]
    offset: int


class Store:
    """Tensors one after the other in one stretch of memory, zero at first.

    Attributes:
        slots: By name, in the order given.
    """

    def __init__(self, values: Mapping[str, ir.Value]) -> None:
        self.slots: dict[str, Slot] = {}
        end = 0
        for name, value in values.items():
            dims, size = shapes.static_shape(value), shapes.nbytes(value)
            if dims is None or size is None or value.dtype is None:
                raise SessionError(f"'{name}' persists, but its size is unknown: differentiate the model again.")
            self.slots[name] = Slot(value.dtype, dims, end)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self.arena = HostArena(end)

    def __contains__(self, name: str) -> bool:
        return name in self.slots

    def address(self, name: str) -> int:
        """Where the tensor lies in memory; it stays there."""
        return self.arena.address + self.slots[name].offset

    def array(self, name: str) -> np.ndarray:
        """The tensor itself, not a copy."""
        slot = self.slots[name]
        return self.arena.view(slot.offset, slot.dtype.numpy(), slot.shape)

    def arrays(self) -> dict[str, np.ndarray]:
        """All tensors themselves."""
        return {name: self.array(name) for name in self.slots}

    def fill(self, name: str, content: Any) -> None:
        """Write a tensor's content."""
        self.array(name)[...] = content

    @property
    def nbytes(self) -> int:
        """Bytes of the whole store."""
        return self.arena.size
