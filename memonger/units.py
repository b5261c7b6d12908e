"""Sizes in bytes: units to multiply with, and sizes as people write them."""

import re

from memonger.errors import PlanError

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB

_UNITS = {"b": 1, "kb": 1000, "mb": 1000**2, "gb": 1000**3, "kib": KiB, "mib": MiB, "gib": GiB}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*$")


def parse_size(text: str) -> int:
    """Bytes in a size such as ``4GiB``, ``512 MB`` or ``100B``.

    Raises:
        PlanError: the text isn't a positive number with one of the units B, kB, MB, GB, KiB, MiB, GiB.
    """
    match = _SIZE.match(text)
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None or float(match.group(1)) <= 0:
        raise PlanError(f"{text!r} is not a size: write a positive number and a unit, such as 4GiB, 512MB or 100B.")
    return int(float(match.group(1)) * unit)


def format_size(size: int) -> str:
    """A size for people, three digits or so: ``0 B``, ``14.2 MiB``, ``1.50 GiB``."""
    for unit, name in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if abs(size) >= unit:
            amount = size / unit
            digits = 2 if amount < 10 else 1 if amount < 100 else 0
            return f"{amount:.{digits}f} {name}"
    return f"{size} B"
