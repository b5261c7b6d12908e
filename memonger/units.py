"""Sizes and texts as people read and write them, and the largest numbers that make sense in what they write."""

import math
import numbers
import re
import reprlib
from fractions import Fraction
from typing import Any


class Unit(int):
    """Bytes of a unit, which makes sizes when it is multiplied or called: ``GiB * 4``, ``GiB(1.5)``."""

    __slots__ = ()

    def __call__(self, amount: float) -> int:
        """So many of it in bytes; of a fraction the whole part."""
        return int(Fraction(amount) * self)


KiB = Unit(1024)
MiB = Unit(1024 * KiB)
GiB = Unit(1024 * MiB)

ALIGNMENT = 64
"""Bytes: a cache line, and what onnxruntime's own allocator gives."""

MOST_THREADS = 1024
"""A larger number is refused: onnxruntime would begin to start as many threads, and neither fail nor end."""

MOST_BATCH = 2**31 - 1
"""Of every dimension that a caller gives a size to."""

MOST_TRIALS = 10_000
"""Of a sweep's thresholds."""

MOST_POINTS = 1_000
"""Of budgets on a frontier."""

MOST_INSTANCES = 100_000
"""Of a server, and of timed runs."""

MOST_ARENAS = 1024
"""Of one process."""

MOST_BUDGET = 2**62 - 1
"""In bytes: the sum of two such sizes still fits 64 bits."""


def shown(text: str) -> str:
    """A text for people to read, in which no name can steer a terminal or pretend to be another line.

    What isn't printable (control characters, line breaks, marks that turn the direction of writing) is written as in a
    Python string, as ``\\x1b`` or ``\\u202e``.
    """
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def format_size(size: int) -> str:
    """A size for people, three digits or so: ``0 B``, ``14.2 MiB``, ``1.50 GiB``."""
    for unit, name in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if abs(size) >= unit:
            amount = size / unit
            digits = 2 if amount < 10 else 1 if amount < 100 else 0
            return f"{amount:.{digits}f} {name}"
    return f"{size} B"


def exactly(size: int) -> str:
    """A size to the byte, as `parse_size` reads it: ``4GiB``, ``1500MiB``, ``1001B``."""
    unit, name = next(pair for pair in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB"), (1, "B")) if size % pair[0] == 0)
    return f"{size // unit}{name}"


def in_full(size: int) -> str:
    """A size for people, and to the byte: ``416 MiB (436743697 bytes)``."""
    return f"{size} bytes" if abs(size) < KiB else f"{format_size(size)} ({size} bytes)"


_UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": KiB, "MIB": MiB, "GIB": GiB, "TIB": 1024 * GiB,
}  # fmt: skip
_SIZE = re.compile(r"\s*(-?[0-9]{1,40}(?:\.[0-9]{0,40})?|-?\.[0-9]{1,40})\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """Bytes from a text such as ``4GiB``, ``1.5 GB``, ``800 MiB`` or ``65536``; letters of either case.

    Raises:
        ValueError: no number, a fraction of a byte, an unknown unit, or a negative size.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match[2].upper() not in _UNITS or ("." in match[1] and not match[2]):
        raise ValueError(
            f"{text!r} is no size: write bytes as a whole number, or a number and its unit (B, KB, MB, GB, TB, KiB, "
            "MiB, GiB, TiB), as in 4GiB."
        )
    if match[1].startswith("-"):
        raise ValueError(f"{text!r} is negative: a size is at least 0.")
    return int(Fraction(match[1]) * _UNITS[match[2].upper()])


def in_bytes(option: str, size: Any, error: type[Exception]) -> int:
    """Bytes from a number of them, of a fraction the whole part, or from a text such as ``4GiB``.

    Args:
        option: What the message calls it.
        size: What was given.
        error: Raised if that is neither, or out of range.
    """
    if isinstance(size, str):
        try:
            return in_bytes(option, parse_size(size), ValueError)
        except ValueError as cause:
            raise error(f"{option}: {cause}") from cause
    is_number = isinstance(size, numbers.Real) and not isinstance(size, bool)
    if not is_number or not -math.inf < size < math.inf:
        raise error(f"{option} must be a number of bytes (memonger.GiB * 4) or a text such as '4GiB', not {size!r}.")
    if not 0 <= size <= MOST_BUDGET:
        end = "at least 0" if size < 0 else f"at most {MOST_BUDGET}"
        raise error(f"{option} must be {end} bytes, not {reprlib.repr(size)}.")
    rounded: int = math.floor(size)
    return rounded


def whole(option: str, value: Any, least: int, most: int, error: type[Exception]) -> int:
    """A whole number within bounds.

    Args:
        option: What the message calls it.
        value: What was given.
        least: The least that it may be.
        most: The largest.
        error: Raised if it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not least <= int(value) <= most:
        raise error(f"{option} must be a whole number from {least} to {most}, not {reprlib.repr(value)}.")
    return int(value)
