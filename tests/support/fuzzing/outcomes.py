"""How a case ended."""

import traceback
from dataclasses import dataclass
from pathlib import Path

OUTCOMES = {
    "refused": "an error of memonger's own; on the command line one line and status 1 or 2",
    "right": "it ran, and the numbers are the reference's, bit for bit",
    "alone": "it ran, and there is nothing to compare with: stock onnxruntime refuses the model, say",
    "stock": "the process died or hung, and with stock onnxruntime alone it does so too",
    "traceback": "another error",
    "crash": "the process died",
    "hang": "not done in time",
    "wrong": "other numbers, a file read that is none of the model's, or a state changed by what was refused",
}
BAD = ("traceback", "crash", "hang", "wrong")


class Wrong(Exception):  # noqa: N818  (a verdict)
    """A case gave what it must not give."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the case (kind, seed) ended.

    Attributes:
        kind: One of `tests.support.fuzzing.cases.KINDS`.
        seed: What the case is drawn from.
        result: One of `OUTCOMES`.
        signature: What cases with one cause have in common: where it stopped, and with what.
        mutation: What was changed.
    """

    kind: str
    seed: int
    result: str
    signature: str = ""
    mutation: str = ""


def signature(error: BaseException) -> str:
    """The type of an error, the last line of memonger it passed, and how its text begins."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if "/memonger/" in frame.filename and "/tests/" not in frame.filename]
    last = (inside or frames)[-1]
    place = f"{last.filename.rpartition('/memonger/')[2]}:{last.lineno} {last.name}" if inside else ""
    place = place or f"outside: {Path(last.filename).name}:{last.lineno} {last.name}"
    words = " ".join(ascii(str(error))[1:-1].split())
    return f"{type(error).__name__} at {place}: {words[:90]}"
