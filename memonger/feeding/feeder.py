"""Batches for a model: read by identity, kept and read ahead within a limit of memory."""

import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Literal, Self, get_args

from memonger.errors import FeedError
from memonger.feeding.background import Background, Inline, locked, patience
from memonger.feeding.config import HELD_BATCHES, FeederConfig, Room, whole
from memonger.feeding.memory import Lender, Stop
from memonger.feeding.reading import Reader, Reading
from memonger.feeding.samples import SampleTensor, filling
from memonger.feeding.sources import FromLoader, FromReader, Made, Maker, Source
from memonger.units import MOST_BATCH, format_size
from memonger.words import check_choice, quoted

Hook = Callable[[dict[str, Any]], Mapping[str, Any]]
LastBatch = Literal["keep", "drop", "pad"]


class Batch(dict[str, Any]):
    """The feeds of a step by name, and whose they are.

    Attributes:
        identities: Of each sample, padding left out; empty where a loader made the batch.
        size: Samples, padding left out.
        epoch: Number of the epoch.
        number: Number of the batch in its epoch.
    """

    __slots__ = ("epoch", "identities", "number", "size")

    def __init__(self, feeds: Mapping[str, Any], identities: list[Any], size: int, epoch: int, number: int) -> None:
        super().__init__(feeds)
        self.identities, self.size, self.epoch, self.number = identities, size, epoch, number


@dataclasses.dataclass(eq=False, slots=True)
class _IdentitySpan:
    """Epochs that are asked for one after another: the last one's number, and whether somebody still asks."""

    last: int
    is_going: bool = True


class Feeder:
    """Makes batches of samples that a reader reads, and never holds more than its configuration says.

    The samples that fit stay in memory; the others are read again every epoch. A thread reads ahead. The same
    identities, seed and epoch give the same batches, whatever fits and however fast anything is. Not for several
    threads at once.

    Args:
        config: The limit, and what a sample consists of.
        reader: Called with an identity, gives the samples of it: a generator that yields ``config.one_read_count`` of
            them, each a dict of arrays by name (or a tuple in the order of ``config.samples``; or the array, if there
            is one). One sample may also be returned. Called in the thread that reads ahead, never twice at a time.
        identities: One of each sample to read, such as file names, in the order of an epoch that isn't shuffled.
        output_reader: Reads ``config.outputs`` by the same identities; ``reader`` then gives the other tensors only.
        apply_on_input_batch: Changes the inputs of each batch before you get it: takes and returns a dict of arrays.
            Called in your thread; what it makes is yours, and not counted.
        apply_on_output_batch: The same for ``config.outputs``.
        shuffle: Whether each epoch has an order of its own. Samples of one identity stay together.
        seed: What the order derives from, with the epoch's number.
        last_batch: What becomes of the samples left over at the end: a smaller batch (``keep``), none (``drop``), or
            one filled up (``pad``).
        padding: What fills it up, by tensor, such as ``{"labels": -100}``. Others repeat the last sample.
        tensors: ``numpy``, or ``torch``: tensors over the same memory.
        read_together: Call the reader with a list of up to so many identities; it gives the samples of all, in order.
        timeout: Seconds that the reader may take for a sample; then the wait ends with an error.

    Raises:
        FeedError: an argument has a value it can't take; not even one sample fits.
    """

    _source: Source

    def __init__(
        self,
        config: FeederConfig,
        reader: Reader,
        identities: Iterable[Any],
        *,
        output_reader: Reader | None = None,
        apply_on_input_batch: Hook | None = None,
        apply_on_output_batch: Hook | None = None,
        shuffle: bool = False,
        seed: int = 0,
        last_batch: LastBatch = "keep",
        padding: Mapping[str, Any] | None = None,
        tensors: Literal["numpy", "torch"] = "numpy",
        read_together: int | None = None,
        timeout: float | None = None,
    ) -> None:
        names = _in_order(identities)
        config = dataclasses.replace(config, sample_count=_count(config, len(names)))
        together = None if read_together is None else whole("read_together", read_together, 1)
        reading = Reading(_readers(config, reader, output_reader), config.one_read_count, together)
        self._set_up(config, config.room(), (apply_on_input_batch, apply_on_output_batch), tensors, timeout)
        maker = self._new_maker(last_batch, padding)
        chosen = whole("seed", seed, 0)
        self._source = FromReader(config, self.room, reading, names, maker, chosen if shuffle else None)

    @classmethod
    def from_loader(
        cls,
        config: FeederConfig,
        loader: Iterable[Any],
        *,
        apply_on_input_batch: Hook | None = None,
        apply_on_output_batch: Hook | None = None,
        last_batch: LastBatch = "keep",
        padding: Mapping[str, Any] | None = None,
        tensors: Literal["numpy", "torch"] = "numpy",
        timeout: float | None = None,
    ) -> Self:
        """A feeder of the batches of a ``torch.utils.data.DataLoader``, or of any iterable of batches.

        Each epoch goes through the loader once, ahead of you; ``set_epoch`` of it or of its sampler is called first.
        What the loader's own workers hold is not counted.

        Args:
            config: The limit, and what a sample consists of; ``preferred_batch`` is the most
                samples of the loader's batches (of a `DataLoader`, its own if None).
            loader: Its batches are dicts of arrays by name, or tuples in the order of ``config.samples``.
            apply_on_input_batch: See `Feeder`, as for all others.
            apply_on_output_batch: See `Feeder`.
            last_batch: What becomes of batches with fewer samples.
            padding: See `Feeder`.
            tensors: See `Feeder`.
            timeout: Seconds that the loader may take for a batch.

        Raises:
            FeedError: an argument has a value it can't take; not even one sample fits.
        """
        if not isinstance(loader, Iterable) or isinstance(loader, Iterator):
            raise FeedError(
                f"the loader is a {type(loader).__name__}, which can't be gone through once an epoch: give what makes "
                "the batches, such as a DataLoader or a list."
            )
        if config.preferred_batch is None and (batch := getattr(loader, "batch_size", None)) is not None:
            config = dataclasses.replace(config, preferred_batch=batch)
        feeder = cls.__new__(cls)
        room = config.room(whole_batches=True)
        feeder._set_up(config, room, (apply_on_input_batch, apply_on_output_batch), tensors, timeout)
        feeder._source = FromLoader(config, room, loader, feeder._new_maker(last_batch, padding))
        return feeder

    def _set_up(
        self,
        config: FeederConfig,
        room: Room,
        hooks: tuple[Hook | None, Hook | None],
        tensors: str,
        timeout: float | None,
    ) -> None:
        for name, hook in zip(("apply_on_input_batch", "apply_on_output_batch"), hooks, strict=True):
            if hook is not None and not callable(hook):
                raise FeedError(f"{name} must be a function of a dict of arrays, not {hook!r}.")
        check_choice("tensors", tensors, ("numpy", "torch"), FeedError)
        if timeout is not None and (
            isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0
        ):
            raise FeedError(f"timeout must be a number of seconds above 0, not {timeout!r}.")
        self.config, self.room = config, room
        self._hooks, self._form, self._timeout = hooks, tensors, timeout
        self._lender = Lender(config.tensors, HELD_BATCHES + room.read_ahead)
        self._process = os.getpid()
        self._lock = threading.Lock()  # held while an epoch is read: readers are never called side by side
        self._run: Background[Made | int] | Inline[Made | int] | None = None
        self._next_epoch, self._span = 0, _IdentitySpan(0)
        self._is_closed = False

    def _new_maker(self, last_batch: str, padding: Mapping[str, Any] | None) -> Maker:
        check_choice("last_batch", last_batch, get_args(LastBatch), FeedError)
        unknown = [name for name in padding or {} if name not in self.config.samples]
        if unknown or (padding and last_batch != "pad"):
            problem = f"names {quoted(unknown)}" if unknown else "is for last_batch='pad'"
            raise FeedError(f"padding {problem}; a sample has {quoted(list(self.config.samples))}.")
        tensors = {tensor.name: tensor for tensor in self.config.tensors}
        fillings = {name: filling(value, tensors[name]) for name, value in (padding or {}).items()}
        self._maker = Maker(self._lender, self.room.batch, last_batch, fillings)
        return self._maker

    @property
    def batch(self) -> int:
        """Samples of a batch."""
        return self.room.batch

    @property
    def held_bytes(self) -> int:
        """What is held now: samples that stay, batches that wait, are being made or were handed out last.

        A batch counts until it is dropped, or until the next but one is asked for: what you keep longer is yours.
        """
        return self._source.held_bytes + self._lender.lent_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was held so far. `Room.total_bytes` says beforehand what it can't exceed."""
        return self._maker.peak_bytes

    def __repr__(self) -> str:
        held = f"{format_size(self.held_bytes)} of {format_size(self.room.total_bytes)} held"
        return f"<Feeder of batches of {self.batch}: {held}{', closed' if self._is_closed else ''}>"

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self._source)

    def epoch(self, number: int = 0) -> Iterator[Batch]:
        """The batches of one epoch.

        Args:
            number: Of the epoch; the order of shuffled samples derives from it.

        Raises:
            FeedError: while the batches are taken: a sample can't be read, which is named; the feeder was closed, or
                another epoch was begun meanwhile. The next epoch can be begun all the same.
        """
        number = whole("the number of the epoch", number, 0)
        return self._taken(number, _IdentitySpan(number, is_going=False))

    def epochs(self, count: int | None = None, first: int = 0) -> Iterator[Iterator[Batch]]:
        """Epochs one after another, each an iterator of its batches. Reading ahead goes on from one to the next.

        Args:
            count: How many; None: without end.
            first: Number of the first one: where a training that goes on had come to.

        Raises:
            FeedError: see `epoch`.
        """
        first = whole("first", first, 0)
        return self._epochs(first, MOST_BATCH if count is None else first + whole("count", count, 0))

    def _epochs(self, first: int, end: int) -> Iterator[Iterator[Batch]]:
        span = _IdentitySpan(end - 1)
        try:
            for number in range(first, end):
                yield self._taken(number, span)
        finally:
            span.is_going = False
            if self._run is not None and self._span is span:
                self._run.close()

    def _taken(self, number: int, span: "_IdentitySpan") -> Iterator[Batch]:
        """The batches of an epoch; those of later ones of the span are made ahead."""
        run = self._running(number, span)
        is_whole = False
        try:
            while True:
                if run.is_closed:
                    raise FeedError(f"epoch {number} was ended: the feeder was closed, or another epoch begun.")
                self._lender.next_is_wanted()
                made = run.next()
                if isinstance(made, int):
                    self._next_epoch, is_whole = number + 1, True
                    return
                yield self._delivered(made)
        finally:
            if not is_whole or number == span.last or not span.is_going:
                run.close()

    def _running(self, number: int, span: "_IdentitySpan") -> "Background[Made | int] | Inline[Made | int]":
        """What makes the batches of an epoch: what made those of the one before in the same span; else anew."""
        if self._is_closed:
            raise FeedError("the feeder is closed.")
        if self._run is not None:
            if self._span is span and self._next_epoch == number and not self._run.is_closed:
                return self._run
            self._run.close()
        if self._process != os.getpid():
            if self._lock.locked():
                raise FeedError(
                    "this process was forked while the feeder read an epoch, and the thread that reads isn't here: "
                    "make a feeder in each process."
                )
            self._process = os.getpid()
        self._next_epoch, self._span = number, span
        numbers = range(number, (span.last if span.is_going else number) + 1)
        items = functools.partial(_items, self._lock, self._source, numbers)
        if self.room.read_ahead or self._timeout is not None:
            check = functools.partial(patience, self._source.reading, self._timeout)
            self._run = Background(items, self._lender.wake, check)
        else:
            self._run = Inline(items)
        return self._run

    def _delivered(self, made: Made) -> Batch:
        self._lender.hand_out(made.loan)
        feeds: dict[str, Any] = dict(made.arrays)
        made.arrays.clear()
        if self._form == "torch":
            import torch

            feeds = {name: torch.from_numpy(array) for name, array in feeds.items()}
        outputs = {name: feeds.pop(name) for name in self.config.outputs}
        inputs = _applied("apply_on_input_batch", self._hooks[0], feeds)
        given = _applied("apply_on_output_batch", self._hooks[1], outputs) if outputs else outputs
        return Batch({**inputs, **given}, made.identities, made.size, made.epoch, made.number)

    def close(self) -> None:
        """End reading, and drop what is held. What was handed out stays valid."""
        self._is_closed = True
        if self._run is not None:
            self._run.close()
        self._source.drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _items(lock: threading.Lock, source: Source, numbers: range, stop: Stop) -> Iterator[Made | int]:
    """The batches of epochs; after each epoch its number."""
    locked(lock, stop)
    try:
        for number in numbers:
            yield from source.batches(number, stop)
            yield number
    finally:
        lock.release()


def _applied(name: str, hook: Hook | None, part: dict[str, Any]) -> Mapping[str, Any]:
    """What a hook makes of a part of a batch.

    Raises:
        FeedError: it gives no tensors by name.
    """
    if hook is None:
        return part
    made = hook(part)
    if not isinstance(made, Mapping):
        raise FeedError(f"{name} gave a {type(made).__name__}; it has to give the arrays by name, as it gets them.")
    return made


def _readers(
    config: FeederConfig, reader: Reader, output_reader: Reader | None
) -> list[tuple[Reader, list[SampleTensor]]]:
    for name, each in (("reader", reader), ("output_reader", output_reader)):
        if not callable(each) and (name == "reader" or each is not None):
            raise FeedError(f"{name} must be a function of an identity that yields samples, not {each!r}.")
    if output_reader is None:
        return [(reader, list(config.tensors))]
    inputs = [tensor for tensor in config.tensors if tensor.name not in config.outputs]
    outputs = [tensor for tensor in config.tensors if tensor.name in config.outputs]
    if not inputs or not outputs:
        raise FeedError("output_reader reads the configuration's outputs, and reader the others: name some, not all.")
    return [(reader, inputs), (output_reader, outputs)]


def _in_order(identities: Iterable[Any]) -> Sequence[Any]:
    if isinstance(identities, str | bytes | Set) or not isinstance(identities, Iterable):
        raise FeedError(
            f"identities must be in an order, as a list of file names, not a {type(identities).__name__}."
            f"{' Sort it.' if isinstance(identities, Set) else ''}"
        )
    sequence = identities if isinstance(identities, Sequence) else list(identities)
    if not len(sequence):
        raise FeedError("there are no identities: nothing to feed.")
    return sequence


def _count(config: FeederConfig, identities: int) -> int:
    count = identities * config.one_read_count
    if config.sample_count not in (None, count):
        reads = f", read {config.one_read_count} at a time" if config.one_read_count > 1 else ""
        raise FeedError(
            f"sample_count is {config.sample_count}, and {identities} identities{reads} give {count} samples."
        )
    return count
