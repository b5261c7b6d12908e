"""What onnxruntime's thread pools remember of runs once one of them was profiled, and how it is forgotten.

The pool of a session notes the size of each parallel section of a profiled run, in the calling thread. It isn't told
that the profile has ended, and notes those of all later runs (onnxruntime 1.31.1): 8 bytes each, without end. The next
profiled run in that thread, of whatever session with a pool, empties the notes.
"""

import threading

import numpy as np

from memonger.devices import CPU
from memonger.files import ScratchFolder
from memonger.runtime import ort

MOST = 1 << 15
"""Nodes run between two times that a thread's notes are emptied, which takes about a millisecond."""


class _ThreadNotes(threading.local):
    """Nodes run in this thread since its notes were emptied."""

    nodes = 0


_NOTES = _ThreadNotes()


def count(nodes: int) -> None:
    """Say that a session which was profiled has run as many nodes in this thread; now and then empty its notes."""
    _NOTES.nodes += nodes
    if _NOTES.nodes > MOST:
        _NOTES.nodes = 0
        empty()


def empty() -> None:
    """Empty this thread's notes: by a profiled run of a model of one node with a pool of two threads."""
    folder = ScratchFolder()
    try:
        session = ort.make_session(
            ort.copying_model(), CPU, ort.SessionSettings(threads=2, profile=folder.path / "notes")
        )
        session.run(None, {"x": np.zeros(1, np.float32)})
        session.end_profiling()
    finally:
        folder.remove()
