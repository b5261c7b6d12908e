"""Memory of batches and of samples that stay: how much of it there is, and whose it is."""

import mmap
import weakref
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue

import numpy as np

from memonger.errors import FeedError
from memonger.feeding.samples import Arrays, SampleTensor
from memonger.units import in_full

_MAPPED = 1 << 16
"""From so many bytes on, an array has pages of its own, which the system gets back when the array dies."""


def new_arrays(tensors: Sequence[SampleTensor], rows: int) -> Arrays:
    """An array of so many rows for each tensor, its content open.

    Raises:
        FeedError: the memory can't be had.
    """
    return {tensor.name: _array(tensor, rows) for tensor in tensors}


def _array(tensor: SampleTensor, rows: int) -> np.ndarray:
    shape, size = (rows, *tensor.shape), rows * tensor.nbytes
    try:
        if size < _MAPPED:
            return np.empty(shape, tensor.dtype)
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, MemoryError, ValueError) as error:
        raise FeedError(f"{in_full(size)} for '{tensor.name}' can't be allocated: {error}. Lower cpu_limit.") from error
    return np.ndarray(shape, tensor.dtype, buffer=pages)  # views of it hold this array


class StoppedError(Exception):
    """Nobody wants further batches."""


class Loan:
    """The memory of one batch. It is returned when the last of its arrays has died."""

    def __init__(self, arrays: Arrays, lender: "Lender") -> None:
        self.nbytes = sum(array.nbytes for array in arrays.values())
        self._lender = lender
        self._arrays = [weakref.ref(array, self._died) for array in arrays.values()]

    def _died(self, _: object) -> None:
        if all(array() is None for array in self._arrays):
            self._lender.take_back(self)


class Lender:
    """Lends memory for at most so many batches at a time.

    What happens when an array dies may happen in any thread, in the middle of anything: so there are no locks here,
    only a queue that may be used within itself.
    """

    def __init__(self, tensors: Sequence[SampleTensor], most: int) -> None:
        self._tensors = tensors
        self._free: SimpleQueue[bool] = SimpleQueue()
        for _ in range(most):
            self._free.put(True)
        self._lent = set[Loan]()
        self._handed = deque[Loan]()

    @property
    def lent_bytes(self) -> int:
        """Of all loans."""
        return sum(loan.nbytes for loan in self._lent.copy())

    def lend(self, rows: int, stopped: "Stop") -> tuple[Arrays, Loan]:
        """Arrays for a batch, as soon as fewer than the most are lent.

        Raises:
            StoppedError: nobody wants the batch any more.
            FeedError: the memory can't be had.
        """
        while not self._free.get():  # False: somebody wants to be heard
            stopped.check()
        if stopped.is_set:
            self._free.put(True)  # the permit that was just taken
            raise StoppedError
        try:
            arrays = new_arrays(self._tensors, rows)
        except BaseException:
            self._free.put(True)
            raise
        loan = Loan(arrays, self)
        self._lent.add(loan)
        return arrays, loan

    def take_back(self, loan: Loan) -> None:
        """The loan's memory is free, or not ours to count any more."""
        try:
            self._lent.remove(loan)
        except KeyError:  # it was returned before
            return
        self._free.put(True)

    def hand_out(self, loan: Loan) -> None:
        """The caller gets this batch. Those before it, if they are still alive, are the caller's own from now on."""
        self._handed.append(loan)

    def next_is_wanted(self) -> None:
        """The caller asks for another: it may hold the last one; what it kept of earlier ones is its own."""
        while len(self._handed) > 1:
            self.take_back(self._handed.popleft())

    def wake(self) -> None:
        """Let whoever waits for memory see that it should stop."""
        self._free.put(False)


class Stop:
    """Whether batches are still wanted."""

    def __init__(self) -> None:
        self.is_set = False

    def check(self) -> None:
        """
        Raises:
            StoppedError: they aren't.
        """
        if self.is_set:
            raise StoppedError


class Cache:
    """Samples that stay: those of the first identities, as many as there is room for.

    Always the same ones: where an epoch reads everything once, no other choice saves more reads, and none is thrown
    out for another.

    Args:
        tensors: Of a sample.
        identities: How many identities' samples there is room for.
        each: Samples of an identity.
    """

    def __init__(self, tensors: Sequence[SampleTensor], identities: int, each: int) -> None:
        self._each, self._row_bytes = each, sum(tensor.nbytes for tensor in tensors)
        self._rows = new_arrays(tensors, identities * each) if identities else {}
        self._is_filled = np.zeros(identities, np.bool_)
        self._filled = 0

    @property
    def nbytes(self) -> int:
        """Bytes of what was put in, and of what tells which identities' samples are here."""
        return self._filled * self._each * self._row_bytes + self._is_filled.nbytes

    def is_complete(self, identities: int) -> bool:
        """Whether the samples of so many identities are all here."""
        return self._filled >= identities

    def has_room(self, position: int) -> bool:
        """Whether this identity's samples are among those that stay."""
        return position < len(self._is_filled)

    def has(self, position: int) -> bool:
        """Whether this identity's samples are here."""
        return self.has_room(position) and bool(self._is_filled[position])

    def sample(self, position: int, number: int) -> Arrays:
        """A sample of an identity, as views."""
        row = position * self._each + number
        return {name: rows[row] for name, rows in self._rows.items()}

    def put(self, position: int, number: int, sample: Arrays) -> None:
        """Copy a sample in. An identity's samples come in order; with the last one they count as here."""
        row = position * self._each + number
        for name, array in sample.items():
            self._rows[name][row] = array
        if number == self._each - 1:
            self._is_filled[position] = True
            self._filled += 1

    def take(self, rows: np.ndarray, target: Arrays) -> None:
        """Copy many samples out at once, by their rows (identity × samples of each + number)."""
        for name, array in target.items():
            np.take(self._rows[name], rows, axis=0, out=array[: len(rows)], mode="clip")
