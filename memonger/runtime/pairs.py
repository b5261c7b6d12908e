"""Whether runs of one contestant take longer than they may beside another's, told by pairs that follow each other.

A machine that others use, too, has fast and slow phases that last for some runs, and the fastest runs of two
contestants need not be of like phases. Two runs that follow each other are, nearly always. So the median of their
ratios is what counts, and a sign test says when enough pairs were run: as soon as chance alone would hardly put so many
of them on one side of the limit.
"""

import math
import statistics
from dataclasses import dataclass, field

CHANCE = 0.01
"""What chance may be left that the median lies on the other side: seven pairs at least, if all are on one side."""


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
        """Whether more pairs would hardly move the median to the other side of the limit."""
        count = len(self.ratios)
        above = sum(ratio > self.limit for ratio in self.ratios)
        fewer = min(above, count - above)
        return bool(sum(math.comb(count, number) for number in range(fewer + 1)) <= CHANCE * 2**count)
