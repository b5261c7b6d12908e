"""Whether runs of one contestant take longer than they may beside another's, told by pairs that follow each other.

A machine that others use, too, has fast and slow phases that last for some runs, and the fastest runs of two
contestants need not be of like phases. Two runs that follow each other are, nearly always: so their ratio counts. But
one of several is off by a tenth and more, and the median of a few likewise (two equal sessions: 0.97 to 1.06). Who is
compared was estimated to be fast enough, and that is evidence, too. So a sign test decides, and asks for more where it
is to overrule the estimate: what chance alone may have done doesn't.
"""

import math
import statistics
from dataclasses import dataclass, field

FAST, SLOW = 0.13, 0.04
"""How likely chance alone may put so many pairs on one side of the limit, where they say that the first contestant is
fast enough, as three of three do, and where they say that it is too slow, as five of five, or nine of eleven."""


@dataclass(slots=True)
class Pairs:
    """Pairs of runs.

    Attributes:
        limit: What the ratio may be.
        ratios: Of each pair the seconds of the first contestant over those of the second.
    """

    limit: float
    ratios: list[float] = field(default_factory=list)

    def add(self, seconds: float, other_seconds: float) -> None:
        """One more pair."""
        self.ratios.append(seconds / other_seconds)

    @property
    def ratio(self) -> float:
        """The median."""
        return statistics.median(self.ratios)

    @property
    def is_clear(self) -> bool:
        """Whether no more pairs are needed."""
        return self.is_too_slow or self._chance(len(self.ratios) - self._above) <= FAST

    @property
    def is_too_slow(self) -> bool:
        """Whether the first contestant takes longer than it may, and not by chance."""
        return self._chance(self._above) <= SLOW

    @property
    def _above(self) -> int:
        return sum(ratio > self.limit for ratio in self.ratios)

    def _chance(self, side: int) -> float:
        """How likely at least so many of the pairs lie on one side of the limit if either is as likely."""
        count = len(self.ratios)
        return math.fsum(math.comb(count, number) for number in range(side, count + 1)) / float(2**count)
