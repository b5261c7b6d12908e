"""The search for a layout within a capacity: many short attempts of `memonger.allocation.canonical`.

How long a depth-first search takes varies by orders of magnitude with the order in which it tries buffers. So no
attempt gets much, and each ranks the buffers anew: first by fixed orders, then by where the attempts so far failed, as
in Boussemart, Hemery, Lecoutre and Sais, "Boosting systematic search by weighting constraints" (2004), with noise. The
limits grow from one attempt to the next, so that in the end a problem is solved or proved to have no solution.

Effort is counted in turns of the innermost loops, the same with numba and without, where it takes some fifty times as
long.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from memonger.allocation import canonical
from memonger.allocation.buffers import Buffer, Layout
from memonger.allocation.canonical import EXHAUSTED, SOLVED, Instance, PlacementState
from memonger.allocation.lower_bound import Columns, Ints

_MOST_OVERLAPS = 2_000_000
"""Problems with more pairs of buffers alive at the same time aren't searched: they would take hundreds of megabytes."""

_FIRST_PLACEMENTS = 2_000
"""What the first attempts may try."""

_GROWTH = 1.02
"""Factor on the placements from one attempt to the next."""

_SEED = 4

_MEMORY = 0.7
"""What is left of an attempt's failures in the weights after the next one."""

_FIXED_ORDERS = (("total", "overlaps"), ("total", "duration"), ("duration", "total"))
"""What the first attempts rank by."""

_TIE_BREAKS = (("duration",), ("overlaps",), ("duration", "size"), ("size",))
"""What later attempts rank by in turn, where failures are equal."""


@dataclass(frozen=True, eq=False)
class PlacementProblem:
    """Buffers in the caller's order, as columns.

    Attributes:
        columns: Sizes, alignments, lifetimes.
        start: First step, among those that count: where the set of buffers alive is not part of another step's.
        stop: The step after the last.
        alive: Bytes alive at each such step.
        overlaps: Whether two buffers are alive at one step.
    """

    columns: Columns
    start: Ints
    stop: Ints
    alive: Ints
    overlaps: NDArray[np.bool_]

    @classmethod
    def of(cls, buffers: Sequence[Buffer]) -> Self:
        """The columns of at least one buffer."""
        columns = Columns.of(buffers)
        # A step counts if a buffer stops right after it, and one has started since the last step that counts.
        starts, stops = np.zeros(columns.steps, np.bool_), np.zeros(columns.steps, np.bool_)
        starts[columns.start] = stops[columns.stop] = True
        counted = [0]
        started = False
        for step in range(columns.steps - 1):
            started = started or bool(starts[step])
            if started and stops[step + 1]:
                counted.append(step)
                started = False
        steps = np.array(counted[1:], np.int64)
        start, stop = np.searchsorted(steps, columns.start), np.searchsorted(steps, columns.stop)
        change = np.zeros(len(steps) + 1, np.int64)
        np.add.at(change, start, columns.size + columns.slack)
        np.subtract.at(change, stop, columns.size + columns.slack)
        overlaps = (start[:, None] < stop) & (start < stop[:, None])
        np.fill_diagonal(overlaps, False)
        return cls(columns, start, stop, np.cumsum(change)[:-1], overlaps)

    @cached_property
    def partners(self) -> Ints:
        """With how many buffers each overlaps."""
        count: Ints = np.count_nonzero(self.overlaps, axis=1)
        return count

    @cached_property
    def keys(self) -> dict[str, NDArray[np.float64]]:
        """What buffers are ranked by, the largest first."""
        size, duration = self.columns.size, (self.columns.stop - self.columns.start).astype(np.float64)
        return {
            "size": size.astype(np.float64),
            "duration": duration,
            "area": size * duration,
            "overlaps": self.partners.astype(np.float64),
            "total": self.largest(self.alive),
        }

    def largest(self, of_steps: NDArray[Any]) -> NDArray[np.float64]:
        """For each buffer the largest number of its steps."""
        ends = np.column_stack((self.start, self.stop)).ravel()
        largest: NDArray[np.float64] = np.maximum.reduceat(np.append(of_steps, 0).astype(np.float64), ends)[::2]
        return largest


@dataclass(slots=True)
class Attempts:
    """A row of attempts on one problem, which learn from each other.

    Attributes:
        problem: What to lay out.
        effort: Turns left.
        number: Attempts so far.
        weights: For each step how much of the failures were there, lately.
        random: Noise; its stream is the same in every version of numpy.
    """

    problem: PlacementProblem
    effort: int
    number: int
    weights: NDArray[np.float64]
    random: np.random.RandomState

    @classmethod
    def of(cls, problem: PlacementProblem, effort: int) -> Self:
        """No attempts so far."""
        return cls(problem, effort, 0, np.zeros(len(problem.alive)), np.random.RandomState(_SEED))

    def next(self, capacity: int) -> tuple[int, Layout | None]:
        """One more attempt: what `canonical.explore` returns, and the layout if one was found."""
        # The ranks for the next attempt: the position of each rank's buffer
        noisy = self.weights / (0.05 + self.random.random_sample(len(self.weights)))
        keys = self.problem.keys | {"weight": self.problem.largest(noisy)}
        if self.number < len(_FIXED_ORDERS):
            names = _FIXED_ORDERS[self.number]
        else:
            names = ("weight", *_TIE_BREAKS[self.number % len(_TIE_BREAKS)])
        order = np.lexsort(tuple(-keys[name] for name in reversed(names)))
        task, state = _prepared(self.problem, order, capacity)
        placements = int(_FIRST_PLACEMENTS * _GROWTH**self.number)
        result = compiled_explore()(task, state, placements, self.effort)
        self.number += 1
        self.effort -= int(state.spent[1])
        failures = np.array(state.failures, np.float64)
        self.weights = _MEMORY * self.weights + failures / max(1.0, failures.sum())
        if result != SOLVED:
            return result, None
        offsets = np.empty(len(order), np.int64)
        offsets[order] = state.offset
        return result, Layout(tuple(offsets.tolist()), int((offsets + self.problem.columns.size).max()))


def improve(
    buffers: Sequence[Buffer], best: Layout, low: int, enough: int, effort: int, direct: bool = False
) -> tuple[Layout, int]:
    """A layout smaller than ``best``, and a size below which no layout is.

    Args:
        buffers: What to lay out; at least one.
        best: A layout.
        low: Bytes that every layout needs.
        enough: Bytes with which the search ends.
        effort: Turns.
        direct: Whether only layouts of ``enough`` bytes are looked for, and none between.
    """
    # How many ordered pairs of buffers are alive at the same time
    starts = np.sort(np.array([buffer.start for buffer in buffers], np.int64))
    stops = np.sort(np.array([buffer.stop for buffer in buffers], np.int64))
    if 2 * int((np.searchsorted(starts, stops) - np.arange(1, len(buffers) + 1)).sum()) > _MOST_OVERLAPS:
        return best, low
    problem = PlacementProblem.of(buffers)
    attempts, unit = Attempts.of(problem, effort), problem.columns.unit
    step = max(1, (best.size - max(low, enough)) // 4)
    while best.size > max(low, enough) and attempts.effort > 0:
        careful = attempts.number % 2 == 1 and not direct
        target = max(low, enough, best.size - step) if careful else max(low, enough)
        result, layout = attempts.next(target)
        if layout is not None:
            best, step = layout, 2 * step
        elif result == EXHAUSTED:
            low = target + 1
        elif careful:
            step = max(unit, step // 2)
    return best, low


def _prepared(problem: PlacementProblem, order: NDArray[np.intp], capacity: int) -> tuple[Instance, PlacementState]:
    """The problem by rank, in lists or arrays as `compiled_explore` wants them, and a fresh state."""
    columns, start = problem.columns, problem.start[order]
    pairs, count, steps = np.nonzero(problem.overlaps[order][:, order])[1], len(order), len(problem.alive)
    alignment, unit = columns.alignment[order], columns.unit
    as_wanted = _as_array if has_numba() else _as_list
    by_start = np.argsort(start, kind="stable")
    task = Instance(
        size=as_wanted((columns.size + columns.slack)[order]),
        alignment=as_wanted(alignment),
        limit=as_wanted((capacity - columns.size[order]) // alignment * alignment),
        start=as_wanted(start),
        stop=as_wanted(problem.stop[order]),
        by_start=as_wanted(by_start),
        first_at=as_wanted(np.searchsorted(start[by_start], np.arange(steps + 1))),
        overlap_at=as_wanted(np.concatenate(([0], np.cumsum(problem.partners[order])))),
        overlaps=as_wanted(pairs),
        steps=steps,
        top=-(-capacity // unit) * unit,
    )
    lengths = [count] * 2 + [count + 2] * 6 + [len(pairs) + 1] * 2 + [count] * 2 + [steps] * 2 + [2]
    state = PlacementState(*(as_wanted(np.zeros(length, np.int64)) for length in lengths))
    return task, state._replace(offset=as_wanted(np.full(count, -1)), by_least=as_wanted(np.arange(count)))


def _as_list(values: NDArray[Any]) -> list[int]:
    numbers: list[int] = values.tolist()
    return numbers


def _as_array(values: NDArray[Any]) -> Any:
    return np.ascontiguousarray(values, np.int64)


@cache
def has_numba() -> bool:
    """Whether the search can be compiled."""
    spec = importlib.util.find_spec("numba")
    return spec is not None and spec.origin is not None  # not a folder that happens to have the name


@cache
def compiled_explore() -> Callable[[Instance, PlacementState, int, int], int]:
    """`canonical.explore`, compiled where numba is installed; the compiled code is kept beside the module."""
    if not has_numba():
        return canonical.explore
    import numba
    from numba.extending import register_jitable

    for helper in canonical.HELPERS:
        register_jitable(helper)
    compiled: Callable[[Instance, PlacementState, int, int], int] = numba.njit(cache=True)(canonical.explore)
    return compiled
