"""Tensors that keep their addresses, one after the other in memory of a device."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from memonger.devices import CPU, Device
from memonger.runtime.arena import Arena, ArenaTensor, one_after_another
from memonger.runtime.backend import backend
from memonger.units import ALIGNMENT


class Store:
    """Tensors one after the other, zero at first.

    Args:
        tensors: What is stored; their offsets don't count.
        device: Where.
        alignment: What each begins at a multiple of, in bytes.
        arena: Memory to use, at least as large as all together; None to allocate as much as they need.

    Attributes:
        tensors: By name, in the order given.
        nbytes: Bytes of all.
    """

    def __init__(
        self,
        tensors: Iterable[ArenaTensor],
        device: Device = CPU,
        alignment: int = ALIGNMENT,
        arena: Arena | None = None,
    ) -> None:
        self.tensors, self.nbytes = one_after_another(tensors, alignment)
        self.arena = arena if arena is not None else backend(device).arena(self.nbytes)

    def parts(self, tensors: Iterable[ArenaTensor]) -> "Store":
        """Parts of these tensors under names of their own, at their offsets here."""
        found = Store.__new__(Store)  # a fourth of what copy() takes: a state that grows asks for it at every run
        found.arena, found.nbytes = self.arena, self.nbytes
        found.tensors = {tensor.name: tensor for tensor in tensors}
        return found

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def address(self, name: str) -> int:
        """Where the tensor lies in memory; it stays there."""
        return self.arena.address + self.tensors[name].offset

    def array(self, name: str) -> np.ndarray:
        """The tensor itself where it lies on the host, else a copy. Not to be written to."""
        tensor = self.tensors[name]
        return self.arena.read(tensor.offset, tensor.dtype.numpy(), tensor.shape, copy=False)

    def fill(self, name: str, array: Any) -> None:
        """Write a tensor's content: an array of its shape, or one number."""
        tensor = self.tensors[name]
        self.arena.write(tensor.offset, np.broadcast_to(np.asarray(array, tensor.dtype.numpy()), tensor.shape))

    def copy_in(self, name: str, source: int) -> None:
        """Copy a tensor's content from an address of the same device."""
        tensor = self.tensors[name]
        self.arena.copy_in(tensor.offset, source, tensor.nbytes)
