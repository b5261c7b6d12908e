"""An evolutionary search for problems on which lowest-offset-first leaves a gap.

Lowest-offset-first lays out the buffer with the lowest possible offset next. Here each buffer has a bias in bytes,
which is added to its offset in that comparison only. With all biases 0 this is plain lowest-offset-first; with large
biases the buffers are laid out in any order whatever, so some biases give an optimal layout. A (1 + λ) evolution
strategy searches for them: each round makes λ children of the best biases so far by changing a few of them a little,
lays out all children at the same time as one batch of vectors, and continues from the smallest arena. It ends in local
optima: on MiniMalloc's challenging instances ten times the effort makes the arena less than one percentage point
smaller, and seeds differ by more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from memonger.layout.buffers import Buffer, Layout
from memonger.layout.columns import Ints
from memonger.layout.lower_bound import lower_bound
from memonger.layout.lowest_offset import lowest_offset_first
from memonger.layout.orders import ORDERS
from memonger.layout.rows import Rows

_LAID_OUT = 2**62
"""Key of a buffer that is laid out already: larger than every offset with its bias."""


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Settings of the search.

    Attributes:
        effort: How many vector elements may be visited in all; 10^8 take about half a second. Laying out one child
            visits n² of them, so with the default effort problems of more than about 1,700 buffers are not searched.
        patience: Rounds without a smaller arena after which the search ends.
        order: What breaks ties between buffers, from ``ORDERS``, and so where the search begins.
        children: λ.
        changes: How many buffers' biases a child changes, on average.
        deviation: Standard deviation of a change, as a fraction of the lower bound.
        seed: Of the random numbers.
    """

    effort: int = 100_000_000
    patience: int = 30
    order: str = "start"
    children: int = 32
    changes: int = 5
    deviation: float = 0.01
    seed: int = 1


def search(buffers: Sequence[Buffer], options: SearchOptions | None = None) -> Layout:
    """The best layout found within the effort, or plain lowest-offset-first if the effort is too small for one round.

    The same buffers and options give the same offsets. The search ends early within less than one alignment of the
    lower bound. It takes O(n²) bytes of memory, and some 50 n bytes for each child.

    Raises:
        LayoutError: The problem is malformed (see ``validate``).
    """
    options = options or SearchOptions()
    rounds = options.effort // (options.children * max(1, len(buffers)) ** 2)
    if not rounds or not buffers:
        return lowest_offset_first(buffers, options.order)
    rows = Rows.of(buffers)
    return _evolve(_Batch.of(rows, ORDERS[options.order](rows)), lower_bound(buffers), rounds, options)


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Columns of a problem in the order that breaks ties, and which buffers overlap: for many children at once."""

    rows: Rows
    order: NDArray[np.intp]
    occupied: Ints
    floor: Ints
    alignment: Ints
    overlaps: NDArray[np.bool_]

    @classmethod
    def of(cls, rows: Rows, order: NDArray[np.intp]) -> Self:
        start, stop = rows.start[order], rows.stop[order]
        overlaps = (start[:, None] < stop) & (start < stop[:, None])
        return cls(rows, order, rows.occupied[order], rows.floor[order], rows.alignment[order], overlaps)

    def depths_for(self, biases: Ints) -> Ints:
        """Depths in bytes of shape (children, buffers), for biases in bytes of the same shape."""
        children, count = biases.shape
        every = np.arange(children)
        least = np.tile(self.floor, (children, 1))
        key, depths = least + biases, np.empty_like(least)
        for _ in range(count):
            chosen = key.argmin(axis=1)
            depths[every, chosen] = depth = least[every, chosen]
            raised = (depth + self.occupied[chosen])[:, None]
            if not self.rows.uniform:
                raised = (raised + self.alignment - 1) & -self.alignment
            growth = np.where(self.overlaps[chosen], raised - least, 0)
            np.maximum(growth, 0, out=growth)
            least += growth
            key += growth
            key[every, chosen] = _LAID_OUT
        return depths

    def layout(self, depths: Ints) -> Layout:
        """The layout of one child, from the depths of its buffers."""
        by_row = np.empty_like(depths)
        by_row[self.order] = depths
        return self.rows.layout(by_row)


def _evolve(batch: _Batch, bound: int, rounds: int, options: SearchOptions) -> Layout:
    """The best layout after at most this many rounds. The search starts with all biases 0."""
    random = np.random.RandomState(options.seed)  # its stream is the same in every version of numpy
    shape = (options.children, len(batch.order))
    biases = np.zeros((1, shape[1]), dtype=np.int64)
    depths = batch.depths_for(biases)[0]
    improved = 0
    for turn in range(rounds):
        height = (depths + batch.occupied).max()
        if height - batch.rows.unit < bound or turn - improved > options.patience:
            break
        changed = random.random_sample(shape) < options.changes / shape[1]
        change = random.normal(0.0, options.deviation * bound, shape)
        children = biases + np.where(changed, change, 0.0).astype(np.int64)
        depths_of = batch.depths_for(children)
        heights = (depths_of + batch.occupied).max(axis=1)
        winner = int(heights.argmin())
        if heights[winner] < height:
            improved = turn
        if heights[winner] <= height:
            biases, depths = children[winner : winner + 1], depths_of[winner]
    return batch.layout(depths)
