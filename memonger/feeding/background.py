"""An iterator that a thread of its own runs ahead, or nobody's thread but the caller's."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from memonger.errors import FeedError
from memonger.feeding.memory import Stop, StoppedError
from memonger.feeding.reading import Reading

T = TypeVar("T")

_LOOK = 0.5
"""Seconds after which one who waits looks whether there is still something to wait for."""

_GRACE = 0.25
"""Seconds that closing waits for a thread; one whose reader takes longer ends when that does."""


class Inline(Generic[T]):
    """The iterator as it is."""

    def __init__(self, items: Callable[[Stop], Iterator[T]]) -> None:
        self._items = items(Stop())
        self.is_closed = False

    def next(self) -> T:
        """The next item; there has to be one."""
        return next(self._items)

    def close(self) -> None:
        """Take no more."""
        self.is_closed = True
        close: Any = getattr(self._items, "close", None)
        if close is not None:
            close()


class Background(Generic[T]):
    """The iterator, run ahead by a daemon thread. How far is the iterator's business: it waits where it has to.

    Args:
        items: Makes the iterator; it looks at the `Stop` now and then.
        wake: Called when it should stop, so that it looks.
        check: Called now and then while an item is waited for: says when to call it again, in seconds; what it raises
            ends the waiting.
    """

    def __init__(
        self, items: Callable[[Stop], Iterator[T]], wake: Callable[[], None], check: Callable[[], float]
    ) -> None:
        self._stop, self._wake, self._check = Stop(), wake, check
        self._done: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()
        self.is_closed = False
        self._thread = threading.Thread(
            target=_run, args=(items, self._stop, self._done), name="memonger feeder", daemon=True
        )
        self._thread.start()

    def next(self) -> T:
        """The next item, in order; there has to be one. What the iterator raised comes after everything before it."""
        while True:
            try:
                patience = min(self._check(), _LOOK) if self._done.empty() else 0
                item, error = self._done.get(timeout=patience)
            except Empty:
                if not self._thread.is_alive() and self._done.empty():
                    raise FeedError(
                        "the thread that reads ahead isn't there: an epoch can't go on in a forked process."
                    ) from None
                continue
            if error is None:
                assert item is not None
                return item
            try:
                raise error
            finally:
                del error  # else this frame and its traceback keep each other, and all that the frames above hold

    def close(self) -> None:
        """End the thread, and drop what it made."""
        if self.is_closed:
            return
        self.is_closed = self._stop.is_set = True
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join(_GRACE)
        while not self._done.empty():
            self._done.get()


def _run(
    items: Callable[[Stop], Iterator[T]], stop: Stop, done: "SimpleQueue[tuple[T | None, BaseException | None]]"
) -> None:
    try:
        for item in items(stop):
            if stop.is_set:
                break
            done.put((item, None))
            del item
    except StoppedError:
        pass
    except BaseException as error:  # the caller's to hear, whatever it is
        done.put((None, error))


def locked(lock: threading.Lock, stop: Stop) -> None:
    """Wait for a lock as long as somebody wants what comes after it.

    Raises:
        StoppedError: nobody does.
    """
    while not lock.acquire(timeout=_LOOK):
        stop.check()


def patience(reading: Reading, timeout: float | None) -> float:
    """Seconds to wait for a reader until this is to be asked again.

    Args:
        reading: What reads.
        timeout: Seconds that it may take for a sample; None: as long as it likes.

    Raises:
        FeedError: the reader takes longer than it may.
    """
    if timeout is None:
        return math.inf
    if (under_way := reading.under_way) is None:
        return timeout
    took = time.monotonic() - under_way.begin
    if took > timeout:
        problem = f"{under_way} has been read for {took:.1f} s, and timeout is {timeout} s."
        raise FeedError(problem, under_way.identity)
    return timeout - took
