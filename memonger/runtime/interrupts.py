"""Ctrl-C between steps, not in the middle of one."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_later() -> Iterator[list[Any]]:
    """Let Ctrl-C wait until the end of the block, where the handler that was there before is called.

    Python calls handlers in the main thread only, between any two instructions: between the run that updates the
    parameters and the line that counts the step, say. Other threads are never interrupted.

    Yields: the interrupts so far, empty while there was none: a long block can look, and end early.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield []
        return
    pending: list[Any] = []
    try:
        signal.signal(signal.SIGINT, lambda *call: pending.append(call))
        yield pending
    finally:
        signal.signal(signal.SIGINT, handler)
        if pending:
            handler(*pending[0])
