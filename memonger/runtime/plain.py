"""Runs of the plain kind, nearly all: what can be prepared for them once, so that small models aren't slowed down."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np

from memonger.runtime import feeds as feeding
from memonger.runtime.arena import Arena, ArenaTensor

SMALL = 1 << 12
"""Bytes up to which an input is copied to where it is bound for good: that takes less time than to bind it anew."""


class PlainRuns:
    """Runs on the host that are given an array of the planned type and shape for each input, and no outputs.

    Args:
        inputs: All that are fed, each of a known type and shape.
        outputs: All that are returned, in the model's order, each at an offset of the arena.
        arena: Where.

    Attributes:
        copied: Inputs that are copied, and where to.
        bound: Inputs that are read where the caller has them.
    """

    def __init__(self, inputs: Sequence[feeding.Input], outputs: Iterable[ArenaTensor], arena: Arena) -> None:
        self._wanted = tuple((value.name, value.shape, value.numpy) for value in inputs)
        self.copied = {
            name: np.empty(shape or (), dtype)
            for name, shape, dtype in self._wanted
            if dtype is not None and math.prod(shape or ()) * dtype.itemsize <= SMALL
        }
        self.bound = [value.name for value in inputs if value.name not in self.copied]
        self._copied, self._count = tuple(self.copied.items()), len(inputs)
        self._begin, self._end = arena.address, arena.address + arena.size
        self._outputs = tuple(
            (each.name, arena.read(each.offset, each.dtype.numpy(), each.shape, copy=False)) for each in outputs
        )

    @classmethod
    def of(
        cls, inputs: Sequence[feeding.Input], outputs: Sequence[str], planned: dict[str, ArenaTensor], arena: Arena
    ) -> Self | None:
        """The same; None where an input or output isn't of the plain kind."""
        tensors = [planned.get(name) for name in outputs]
        if not arena.device.is_host or not all(map(_is_plain, inputs)) or not all(map(_is_readable, tensors)):
            return None
        return cls(inputs, [tensor for tensor in tensors if tensor is not None], arena)

    def takes(self, inputs: Any) -> bool:
        """Whether these inputs are of the plain kind, and right."""
        if type(inputs) is not dict or len(inputs) != self._count:
            return False
        for name, shape, dtype in self._wanted:
            feed = inputs.get(name)
            if type(feed) is not np.ndarray or feed.shape != shape or feed.dtype != dtype:
                return False
            if name in self.bound and not feed.flags.c_contiguous:
                return False
        return True

    def copy_in(self, inputs: feeding.Feeds) -> None:
        """Copy the small inputs to where they are bound."""
        for name, place in self._copied:
            place[...] = inputs[name]

    def large(self, inputs: feeding.Feeds) -> list[tuple[str, np.ndarray]]:
        """The other inputs: as the caller gave them, or copies of those that lie in the arena, as results may."""
        pairs = []
        for name in self.bound:
            feed = inputs[name]
            if feed.base is not None:
                begin = feeding.address_of(feed)
                feed = feed.copy() if begin < self._end and self._begin < begin + feed.nbytes else feed
            pairs.append((name, feed))
        return pairs

    def results(self, copy: bool) -> dict[str, np.ndarray]:
        """The outputs of a run that is over."""
        if copy:
            return {name: view.copy() for name, view in self._outputs}
        return {name: view.view() for name, view in self._outputs}


def _is_plain(value: feeding.Input) -> bool:
    if value.shape is None or value.numpy is None or not value.required:
        return False
    return value.numpy.kind in "biuf" and value.numpy.isbuiltin == 1


def _is_readable(tensor: ArenaTensor | None) -> bool:
    return tensor is not None and tensor.dtype.bitwidth >= 8
