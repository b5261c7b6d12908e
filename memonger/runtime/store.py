"""Tensors that persist from one training step to the next, each at an address of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from memonger.devices import CPU, Device
from memonger.errors import SessionError
from memonger.graph.liveness import ALIGNMENT
from memonger.model.values import nbytes as bytes_of
from memonger.model.values import static_shape
from memonger.runtime.arena import make_arena


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor lies: ``offset`` in bytes from the store's beginning."""

    dtype: ir.DataType
    shape: tuple[int, ...]
    offset: int


class Store:
    """Tensors one after the other in one stretch of memory, zero at first.

    Args:
        values: What is stored, by name.
        device: Where.

    Attributes:
        slots: By name, in the order given.
    """

    def __init__(self, values: Mapping[str, ir.Value], device: Device = CPU) -> None:
        self.slots: dict[str, Slot] = {}
        end = 0
        for name, value in values.items():
            dims, size = static_shape(value), bytes_of(value)
            if dims is None or size is None or value.dtype is None:
                raise SessionError(f"'{name}' persists, but its size is unknown: differentiate the model again.")
            self.slots[name] = Slot(value.dtype, dims, end)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self.arena = make_arena(end, device)

    def __contains__(self, name: str) -> bool:
        return name in self.slots

    def address(self, name: str) -> int:
        """Where the tensor lies in memory; it stays there."""
        return self.arena.address + self.slots[name].offset

    def array(self, name: str) -> np.ndarray:
        """The tensor itself where it lies on the host, else a copy. Not to be written to."""
        slot = self.slots[name]
        return self.arena.read(slot.offset, slot.dtype.numpy(), slot.shape, copy=False)

    def fill(self, name: str, content: Any) -> None:
        """Write a tensor's content: an array of its shape, or one number."""
        slot = self.slots[name]
        self.arena.write(slot.offset, np.broadcast_to(np.asarray(content, slot.dtype.numpy()), slot.shape))

    def copy_in(self, name: str, source: int) -> None:
        """Copy a tensor's content from an address of the same device."""
        slot = self.slots[name]
        bits = slot.dtype.bitwidth * int(np.prod(slot.shape, dtype=np.int64))
        self.arena.copy_in(slot.offset, source, -(-bits // 8))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole store."""
        return self.arena.size
