"""Where batches come from: a reader of identities, or a loader that makes batches itself."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memonger.errors import FeedError
from memonger.feeding.config import FeederConfig, Room
from memonger.feeding.memory import Cache, Lender, Loan, Stop
from memonger.feeding.reading import Reading, Watch
from memonger.feeding.samples import Arrays, by_name, checked


@dataclass(slots=True)
class Made:
    """A batch that was made: its arrays, and whose samples they are."""

    arrays: Arrays
    loan: Loan
    identities: list[Any]
    size: int
    epoch: int
    number: int


class Maker:
    """Memory for batches, and what becomes of the last one.

    Args:
        batch: Samples of a batch.
        last: ``keep``, ``drop`` or ``pad`` a batch of fewer.
        padding: What fills up a padded batch, by tensor; of others its last sample is repeated.

    Attributes:
        peak_bytes: The most that was held so far, by batches and beside them.
    """

    def __init__(self, lender: Lender, batch: int, last: str, padding: Arrays) -> None:
        self._lender, self.batch, self._last, self._padding, self.peak_bytes = lender, batch, last, padding, 0

    def note(self, beside: int) -> None:
        """More may be held now than before: the batches, and so many bytes beside them."""
        self.peak_bytes = max(self.peak_bytes, beside + self._lender.lent_bytes)

    def rows(self, size: int) -> int:
        """Rows of a batch with so many samples; 0: it is left out."""
        return size if size == self.batch or self._last == "keep" else 0 if self._last == "drop" else self.batch

    def make(self, size: int, stop: Stop, fill: Callable[[Arrays], None]) -> tuple[Arrays, Loan]:
        """A batch of so many samples, filled and padded.

        Raises:
            StoppedError: nobody wants it.
            FeedError: as ``fill``, or the memory can't be had.
        """
        arrays, loan = self._lender.lend(self.rows(size), stop)
        try:
            fill(arrays)
            self._pad(arrays, size)
        except BaseException:
            arrays.clear()  # the error's traceback would keep them
            self._lender.take_back(loan)
            raise
        return arrays, loan

    def _pad(self, arrays: Arrays, size: int) -> None:
        for name, array in arrays.items():
            if len(array) > size:
                array[size:] = self._padding.get(name, array[size - 1])


class FromReader:
    """Batches of samples that are read by their identities, in the order given or shuffled, each once an epoch."""

    def __init__(
        self,
        config: FeederConfig,
        room: Room,
        reading: Reading,
        identities: Sequence[Any],
        maker: Maker,
        seed: int | None,
    ) -> None:
        self._each = config.one_read_count
        self._cache = Cache(config.tensors, room.cached_samples // self._each, self._each)
        self._is_reading = False
        self.reading, self._identities, self._maker, self._seed = reading, identities, maker, seed
        self._sample_bytes, self._in_hand, self._order_bytes = config.sample_bytes, 0, 0

    @property
    def held_bytes(self) -> int:
        """The order of the epoch, the samples that stay, and the sample just read."""
        return self._order_bytes + self._cache.nbytes + self._in_hand

    @property
    def count(self) -> int:
        """Samples of an epoch."""
        return len(self._identities) * self._each

    def __len__(self) -> int:
        whole, rest = divmod(self.count, self._maker.batch)
        return whole + bool(rest and self._maker.rows(rest))

    def batches(self, epoch: int, stop: Stop) -> Iterator[Made]:
        """The batches of an epoch.

        Raises:
            FeedError: a sample can't be read.
            StoppedError: nobody wants more.
        """
        order = np.arange(len(self._identities))
        if self._seed is not None:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(order))
        self._order_bytes = order.nbytes
        with contextlib.closing(self._samples(order, stop)) as samples:
            for number in range(len(self)):
                begin = number * self._maker.batch
                places = np.arange(begin, min(begin + self._maker.batch, self.count))
                positions = order[places // self._each]
                fill = functools.partial(self._fill, positions * self._each + places % self._each, samples)
                arrays, loan = self._maker.make(len(places), stop, fill)
                identities = [self._identities[position] for position in positions.tolist()]
                made = Made(arrays, loan, identities, len(places), epoch, number)
                del arrays, fill
                yield made
                del made

    def drop(self) -> None:
        """Forget the samples that stay."""
        self._cache = Cache((), 0, self._each)

    def _fill(self, rows: np.ndarray, samples: Iterator[Arrays], target: Arrays) -> None:
        self._maker.note(self.held_bytes)
        if self._cache.is_complete(len(self._identities)) and not self._is_reading:
            self._cache.take(rows, target)
            return
        for row in range(len(rows)):
            for name, array in next(samples).items():
                target[name][row] = array

    def _samples(self, order: np.ndarray, stop: Stop) -> Generator[Arrays]:
        """The samples of an epoch in order, each valid until the next is asked for."""
        self._is_reading = True
        together = self.reading.together or 1
        try:
            for begin in range(0, len(order), together):
                positions = order[begin : begin + together].tolist()
                missing = dict.fromkeys(position for position in positions if not self._cache.has(position))
                with contextlib.closing(self.reading.read([self._identities[each] for each in missing])) as read:
                    for position in positions:
                        fresh = read if position in missing else None
                        for number in range(self._each):
                            stop.check()
                            yield self._sample(position, number, fresh)
        finally:
            self._is_reading, self._in_hand, self._order_bytes = False, 0, 0

    def _sample(self, position: int, number: int, read: Iterator[Arrays] | None) -> Arrays:
        if read is None:
            return self._cache.sample(position, number)
        self._in_hand = 0
        sample = next(read)
        self._in_hand = self._sample_bytes
        if self._cache.has_room(position):
            self._cache.put(position, number, sample)
        self._maker.note(self.held_bytes)
        return sample


class FromLoader:
    """Batches of an iterable of batches, such as a ``torch.utils.data.DataLoader``; an epoch goes through it once."""

    def __init__(self, config: FeederConfig, room: Room, loader: Iterable[Any], maker: Maker) -> None:
        self._tensors, self._loader, self._maker = config.tensors, loader, maker
        self.reading = Reading((), 1, None)
        self.held_bytes = 0
        self._most = room.batch

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def batches(self, epoch: int, stop: Stop) -> Iterator[Made]:
        """The batches of an epoch.

        Raises:
            FeedError: the loader failed, or a batch is too large, or of other tensors.
            StoppedError: nobody wants more.
        """
        for owner in (self._loader, *(getattr(self._loader, name, None) for name in ("sampler", "batch_sampler"))):
            if callable(set_epoch := getattr(owner, "set_epoch", None)):
                set_epoch(epoch)
        with Watch(self.reading, 0, "the loader's batch"):
            loaded = iter(self._loader)
        number = 0
        while (given := self._next(loaded, number)) is not None:
            stop.check()
            size = len(next(iter(given.values())))
            if self._maker.rows(size):
                arrays, loan = self._maker.make(size, stop, functools.partial(self._copy, given))
                del given
                self.held_bytes = 0
                made = Made(arrays, loan, [], size, epoch, number)
                del arrays
                yield made
                del made
            number += 1

    def drop(self) -> None:
        """There is nothing to forget."""

    def _next(self, loaded: Iterator[Any], number: int) -> Arrays | None:
        with Watch(self.reading, number, "the loader's batch"):
            given = next(loaded, None)
            if given is None:
                return None
            named = by_name(given, self._tensors)
            size = len(named[self._tensors[0].name])
            if not 0 < size <= self._most:
                problem = f"it has {size} samples, and {self._most} are allowed: raise preferred_batch or cpu_limit"
                raise FeedError(f"{problem} of the configuration, or give smaller ones.")
            batched = [dataclasses.replace(tensor, shape=(size, *tensor.shape)) for tensor in self._tensors]
            arrays = checked(named, batched)
        self.held_bytes = sum(array.nbytes for array in arrays.values())
        self._maker.note(self.held_bytes)
        return arrays

    def _copy(self, given: Arrays, target: Arrays) -> None:
        self._maker.note(self.held_bytes)
        for name, array in given.items():
            target[name][: len(array)] = array


Source = FromReader | FromLoader
"""Makes the batches of an epoch; beside those it says what it holds, and what it reads with."""
