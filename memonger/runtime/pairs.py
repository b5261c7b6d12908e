"""Whether runs of one contestant take longer than they may beside another's, told by pairs that follow each other.

A machine that others use, too, has fast and slow phases that last for some runs, and the fastest runs of two
contestants need not be of like phases. Two runs that follow each other are, nearly always. Single pairs are off by a
tenth and more all the same, so that the median of their ratios counts (of a dozen pairs of equal sessions: 0.97 to
1.04). A sign test says when enough pairs were run; who is compared was estimated to be fast enough, and that is
evidence, too, so that it asks for more where it is to overrule the estimate.
"""

import math
import statistics
from dataclasses import dataclass, field

FAST, SLOW = 0.13, 0.04
"""How likely chance alone may put so many pairs on one side of the limit where they end it: they say that the first
contestant is fast enough, as three of three do, or that it is too slow, as five of five do, or nine of eleven."""


@dataclass(slots=True)
class Pairs:
    """Pairs of runs.

    Attributes:
        limit: What the ratio may be.
        most: How many there are at most.
        ratios: Of each pair the seconds of the first contestant over those of the second.
    """

    limit: float
    most: int
    ratios: list[float] = field(default_factory=list)

    def add(self, seconds: float, other_seconds: float) -> None:
        """One more pair."""
        self.ratios.append(seconds / other_seconds)

    @property
    def ratio(self) -> float:
        """The median."""
        return statistics.median(self.ratios)

    @property
    def is_too_slow(self) -> bool:
        """Whether the first contestant takes longer than it may."""
        return self.ratio > self.limit

    @property
    def are_enough(self) -> bool:
        """Whether more pairs would hardly move the median to the other side of the limit, or can't."""
        count, above = len(self.ratios), sum(ratio > self.limit for ratio in self.ratios)
        return max(above, count - above) > self.most / 2 or count >= self.most or self._ends(above, count)

    def _ends(self, above: int, count: int) -> bool:
        """Whether chance alone would hardly put so many pairs above the limit, or so few."""
        for side, chance in ((above, SLOW), (count - above, FAST)):
            if sum(math.comb(count, number) for number in range(side, count + 1)) <= chance * 2**count:
                return True
        return False
