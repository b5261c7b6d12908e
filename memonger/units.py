"""Sizes in bytes: units to multiply with, and sizes as people read them."""

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
