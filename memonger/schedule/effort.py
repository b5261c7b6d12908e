"""How much a search may do, how much it has done, and what it reports meanwhile."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memonger.schedule.timeline import Timeline

EFFORT = 400_000
"""Changes of a schedule that a search may try by default: about 4 s, at some 10 µs each."""

_NODES_OF_DOUBLE_EFFORT = 2_500
"""In a problem of so many nodes a change takes about twice as long as in a small one, and so counts twice."""


def _weight(timeline: "Timeline") -> float:
    return 1 + timeline.n / _NODES_OF_DOUBLE_EFFORT


_TICK = 1.0
"""Seconds after which progress is reported again though nothing better was found."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a search is.

    Attributes:
        done: Fraction of the whole search that is done, with all the parts that will be needed as far as is known.
        excess: Bytes above the budget, summed over the steps, of the last schedule reported.
        cost: Of that schedule.
        lowering: Whether the search looks for the smallest budget: ``excess`` is above what it tries just now.
    """

    done: float
    excess: int
    cost: float
    lowering: bool = False


@dataclass(slots=True)
class Effort:
    """What a part of a search may spend, and what it has spent on timelines it no longer uses.

    Attributes:
        limit: Changes of a schedule that may be tried, weighted by the number of nodes.
        time_limit: Seconds from ``begin`` after which everything counts as spent. None: no limit.
        report: Called with the progress.
        begin: When the search began, on the monotonic clock.
        used: Changes tried on timelines that were charged.
        share: This part's effort in that of the first part.
        before: Sum of the shares of the parts before it.
        whole: Sum of the shares of all parts.
        lowering: Whether this part looks for the smallest budget.
        last: What was reported last, and when.
    """

    limit: float
    time_limit: float | None = None
    report: Callable[[Progress], None] | None = None
    begin: float = field(default_factory=time.monotonic)
    used: float = 0
    share: float = 1.0
    before: float = 0.0
    whole: float = 1.0
    lowering: bool = False
    last: tuple[int, float, float] | None = None

    def spent(self, timeline: "Timeline") -> float:
        """Fraction of the effort or time spent, with a timeline in use that was not charged yet."""
        used = _weight(timeline) * (self.used + timeline.work) / max(1.0, self.limit)
        if self.time_limit is None:
            return used
        return max(used, (time.monotonic() - self.begin) / self.time_limit if self.time_limit > 0 else 1.0)

    @property
    def is_late(self) -> bool:
        """Whether the time is up."""
        return self.time_limit is not None and time.monotonic() - self.begin > self.time_limit

    def charge(self, timeline: "Timeline", most: float = math.inf) -> None:
        """Count the work on a timeline that is no longer used, and of it this fraction of the whole effort at most."""
        self.used += min(timeline.work, most * self.limit / _weight(timeline))

    def portion(self, timeline: "Timeline", share: float, stop: float = 1.0) -> Callable[[], float]:
        """A function that returns how much of a share of the effort is spent from now on; at least 1 ends the portion.

        Args:
            timeline: The timeline in use.
            share: Fraction of the whole effort.
            stop: The portion also ends as soon as this fraction of the whole effort is spent.
        """
        begin = self.spent(timeline)

        def done() -> float:
            spent = self.spent(timeline)
            if self.last is not None and time.monotonic() > self.last[2] + _TICK:
                self.report_progress(timeline, *self.last[:2])
            return 1.0 if spent >= stop else (spent - begin) / share

        return done

    def part(self, share: float, before: float, *, lowering: bool = False) -> "Effort":
        """A later part's effort, a share of this one's; the time limit is still counted from the same beginning."""
        return Effort(
            self.limit * share, self.time_limit, self.report, self.begin, share=share, before=before,
            whole=self.whole, lowering=lowering,
        )  # fmt: skip

    def report_progress(self, timeline: "Timeline", excess: int, cost: float) -> None:
        """Report a schedule just found."""
        if self.report is None:
            return
        if not excess and not self.before:
            self.whole = self.share  # no other part is needed
        self.last = excess, cost, time.monotonic()
        done = (self.before + self.share * min(1.0, self.spent(timeline))) / self.whole
        self.report(Progress(done, excess, cost, self.lowering))
