"""Sizes in bytes: units to multiply with, and sizes as people read and write them."""

import re
from fractions import Fraction

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB


def format_size(size: int) -> str:
    """A size for people, three digits or so: ``0 B``, ``14.2 MiB``, ``1.50 GiB``."""
    for unit, name in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if abs(size) >= unit:
            amount = size / unit
            digits = 2 if amount < 10 else 1 if amount < 100 else 0
            return f"{amount:.{digits}f} {name}"
    return f"{size} B"


def in_full(size: int) -> str:
    """A size for people, and to the byte: ``416 MiB (436743697 bytes)``."""
    return f"{size} bytes" if abs(size) < KiB else f"{format_size(size)} ({size} bytes)"


_UNITS = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": KiB, "MIB": MiB, "GIB": GiB, "TIB": 1024 * GiB,
}  # fmt: skip
_SIZE = re.compile(r"\s*(-?[0-9]{1,40}(?:\.[0-9]{0,40})?|-?\.[0-9]{1,40})\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """Bytes from a text such as ``4GiB``, ``1.5 GB``, ``800 MiB`` or ``65536B``; letters of either case.

    Raises:
        ValueError: no number, no unit, an unknown one, or a negative size.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(
            f"{text!r} is no size: write a number and its unit (B, KB, MB, GB, TB, KiB, MiB, GiB, TiB), as in 4GiB."
        )
    if match[1].startswith("-"):
        raise ValueError(f"{text!r} is negative: a size is at least 0.")
    return int(Fraction(match[1]) * _UNITS[match[2].upper()])
