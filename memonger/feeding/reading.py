"""Samples of identities, by the caller's reader: called, counted, checked, and its errors told with the identity."""

import contextlib
import os
import reprlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from memonger.errors import FeedError
from memonger.feeding.samples import Arrays, SampleTensor, checked

Reader = Callable[[Any], Iterable[Any]]

_END = object()

_NAMES = reprlib.Repr()
_NAMES.maxstring = _NAMES.maxother = 200  # paths are long


class Reading:
    """Calls readers.

    Args:
        readers: Each with the tensors it gives. Together they give all of a sample's.
        each: Samples that a read of one identity gives.
        together: Identities in one call, as a list; None: one, as it is.

    Attributes:
        under_way: What is being read; None if nothing is.
    """

    def __init__(
        self, readers: Sequence[tuple[Reader, Sequence[SampleTensor]]], each: int, together: int | None
    ) -> None:
        self._readers, self._each, self.together = readers, each, together
        self.under_way: Watch | None = None

    def read(self, identities: Sequence[Any]) -> Generator[Arrays]:
        """The samples of identities that are read in one call, each as it comes.

        Raises:
            FeedError: a reader failed, or gave something else than it should; the identity is named.
        """
        last = len(identities) * self._each - 1
        with contextlib.ExitStack() as open_readers:
            parts = [self._part(reader, tensors, identities, open_readers) for reader, tensors in self._readers]
            for row in range(last + 1):
                identity = identities[row // self._each]
                sample = self._sample(parts, identity, row % self._each)
                if row == last:
                    for part in parts:
                        with Watch(self, identity):
                            if next(part, _END) is not _END:
                                raise FeedError(f"the reader gave more samples than one_read_count, {self._each}.")
                yield sample
                del sample

    def _part(
        self,
        reader: Reader,
        tensors: Sequence[SampleTensor],
        identities: Sequence[Any],
        open_readers: contextlib.ExitStack,
    ) -> Iterator[Any]:
        identity = identities[0] if self.together is None else list(identities)
        with Watch(self, identities[0]):
            given: Any = reader(identity)
            if self.together is None and self._each == 1 and _is_sample(given, tensors):
                given = [given]
            if not isinstance(given, Iterable):
                raise FeedError(f"the reader returned {reprlib.repr(given)}; it has to yield samples.")
            part = iter(given)
            if callable(close := getattr(part, "close", None)):
                open_readers.callback(close)
            return part

    def _sample(self, parts: Sequence[Iterator[Any]], identity: Any, number: int) -> Arrays:
        sample: Arrays = {}
        for part, (_, tensors) in zip(parts, self._readers, strict=True):
            with Watch(self, identity):
                given = next(part, _END)
                if given is _END:
                    raise FeedError(f"the reader gave {number} samples, and one_read_count is {self._each}.")
                sample |= checked(given, tensors)
        return sample


class Watch:
    """While a reader is at work: what is being read, since when, and what it raises told with its name.

    Args:
        reading: Whose reader.
        identity: What is read.
        kind: What that is, in messages.

    Raises:
        FeedError: the reader raised something, which is the error's cause.
    """

    __slots__ = ("_kind", "_reading", "begin", "identity")

    def __init__(self, reading: Reading, identity: object, kind: str = "sample") -> None:
        self._reading, self.identity, self._kind = reading, identity, kind

    def __str__(self) -> str:
        identity = os.fspath(self.identity) if isinstance(self.identity, os.PathLike) else self.identity
        return f"{self._kind} {_NAMES.repr(identity)}"

    def __enter__(self) -> None:
        self.begin = time.monotonic()
        self._reading.under_way = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reading.under_way = None
        if isinstance(error, FeedError):
            raise FeedError(f"{self}: {error}", self.identity) from error.__cause__
        if isinstance(error, Exception):
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise FeedError(f"{self} can't be read: {reason}", self.identity) from error


def _is_sample(given: object, tensors: Sequence[SampleTensor]) -> bool:
    """Whether it is a sample itself, of a reader that gives one, and not an iterator of samples."""
    if isinstance(given, tuple):
        return len(given) == len(tensors) > 1
    return isinstance(given, Mapping) or hasattr(given, "__array__")
