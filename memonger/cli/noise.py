"""How far a ratio of two latencies can be trusted on this machine, now."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

QUIET = 0.1
"""From turn to turn the ratio may move by so much of itself before a warning is due."""


@dataclass(frozen=True, slots=True)
class Load:
    """What else the machine was doing before anything was timed.

    Attributes:
        average: Processes that ran or wanted to, over the last minute; None where the system doesn't say.
        cores: Processors that this process may use.
    """

    average: float | None
    cores: int

    @property
    def is_high(self) -> bool:
        """Whether there was more to do than there are processors for."""
        return self.average is not None and self.average > self.cores


def load() -> Load:
    """The load of the machine now."""
    average = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Load(average, cores)


def ratio_range(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """The smallest and the largest ratio of the medians of one turn.

    The sessions' turns follow each other, so what slows the machine for longer than a turn slows both. Of five turns
    the two hold the ratio's median with 94 % confidence: it lies beyond all five in 2 of 2⁵ cases.
    """
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    return min(ratios), max(ratios)


def warning(ratio: float, within: tuple[float, float], before: Load, other: str) -> str:
    """What to tell of a ratio that the machine's noise could have made; empty where it is to be trusted.

    Args:
        ratio: Our time over the other's.
        within: The smallest and the largest ratio of a turn.
        before: What the machine did before.
        other: What the other is.
    """
    low, high = within
    moved = (high - low) / ratio
    if moved <= QUIET and not before.is_high:
        return ""
    busy = f"load average {before.average:.1f} on {before.cores} cores" if before.is_high else ""
    range_of = f"the ratio of times to {other} moved by {moved:.0%} between turns, from {low:.3f} to {high:.3f}"
    said = " and ".join(filter(None, (busy, range_of if moved else "")))
    return f"the machine is noisy: {said}. Trust times no further than that; more --runs on an idle machine say more."
