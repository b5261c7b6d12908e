"""Samples of identities, by the caller's reader: called, counted, checked, and its errors told with the identity."""

import contextlib
import reprlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from memonger.errors import FeedError
from memonger.feeding.samples import Arrays, Tensor, checked

Reader = Callable[[Any], Iterable[Any]]

_END = object()


class Reading:
    """Calls readers.

    Args:
        readers: Each with the tensors it gives. Together they give all of a sample's.
        each: Samples that a read of one identity gives.
        together: Identities in one call, as a list; None: one, as it is.

    Attributes:
        under_way: What is being read, in words and its identity, and since when (`time.monotonic`); None if nothing is.
    """

    def __init__(self, readers: Sequence[tuple[Reader, Sequence[Tensor]]], each: int, together: int | None) -> None:
        self._readers, self._each, self.together = readers, each, together
        self.under_way: tuple[str, object, float] | None = None

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
                    self._check_end(parts, identity)
                yield sample
                del sample

    def _part(
        self, reader: Reader, tensors: Sequence[Tensor], identities: Sequence[Any], open_readers: contextlib.ExitStack
    ) -> Iterator[Any]:
        identity = identities[0] if self.together is None else list(identities)
        with self.watched(named(identities[0]), identities[0]):
            given: Any = reader(identity)
            if self.together is None and self._each == 1 and _is_sample(given, tensors):
                given = [given]
            if not isinstance(given, Iterable):
                kind = type(given).__name__
                raise FeedError(f"{named(identities[0])}: the reader gave a {kind}; it has to yield samples.")
            part = iter(given)
            if callable(close := getattr(part, "close", None)):
                open_readers.callback(close)
            return part

    def _sample(self, parts: Sequence[Iterator[Any]], identity: Any, number: int) -> Arrays:
        sample: Arrays = {}
        for part, (_, tensors) in zip(parts, self._readers, strict=True):
            with self.watched(named(identity), identity):
                given = next(part, _END)
                if given is _END:
                    raise FeedError(
                        f"{named(identity)}: the reader gave {number} samples, and one_read_count is {self._each}."
                    )
                sample |= checked(given, tensors, named(identity))
        return sample

    def _check_end(self, parts: Sequence[Iterator[Any]], identity: Any) -> None:
        for part in parts:
            with self.watched(named(identity), identity):
                if next(part, _END) is not _END:
                    raise FeedError(
                        f"{named(identity)}: the reader gave more samples than one_read_count, {self._each}."
                    )

    @contextlib.contextmanager
    def watched(self, where: str, identity: object) -> Iterator[None]:
        """A reader is at work: what it raises is told with the identity.

        Raises:
            FeedError: it raised something, which is the error's cause.
        """
        self.under_way = where, identity, time.monotonic()
        try:
            yield
        except FeedError as error:
            error.identity = identity
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise FeedError(f"{where} can't be read: {reason}", identity) from error
        finally:
            self.under_way = None


def _is_sample(given: object, tensors: Sequence[Tensor]) -> bool:
    """Whether it is a sample itself, of a reader that gives one, and not an iterator of samples."""
    if isinstance(given, tuple):
        return len(given) == len(tensors) > 1
    return isinstance(given, Mapping) or hasattr(given, "__array__")


def named(identity: object) -> str:
    """A sample as messages name it."""
    return f"sample {reprlib.repr(identity)}"
