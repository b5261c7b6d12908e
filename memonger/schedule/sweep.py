"""The strategy ``sweep``: the threshold with the smallest peak, of several around the square root of what is kept.

After ``search_plan`` of MXNet's memonger: three guesses, then a grid.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from memonger.errors import PlanError
from memonger.schedule import problem as problems
from memonger.schedule.checkpoints import ForwardWalk, Mirror, MirrorStage, StagedProblem
from memonger.schedule.on_demand import recompute_on_demand
from memonger.schedule.problem import Problem
from memonger.schedule.strategy import Outcome, Request, SweepPoint
from memonger.units import format_size

_GUESSES = 3

_NOTHING = 0.9
"""Marked stages that leave more than this part of the peak are not used where the graph's structure gives others."""

_MUCH = 0.5
"""Stages are much better than others where they leave less than this part of their peak."""

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a sweep returns.

    Attributes:
        schedule: The best schedule: node ids; every occurrence of a node after its first is a recomputation.
        mirror: What that schedule keeps and drops.
        candidates: All thresholds tried, in that order.
    """

    schedule: tuple[int, ...]
    mirror: Mirror
    candidates: tuple[SweepPoint, ...]


def sweep(
    problem: Problem,
    stage_sets: Mapping[str, Sequence[MirrorStage]],
    trials: int = 6,
    forced: Mapping[int, bool] | None = None,
    progress: Callable[[float], None] | None = None,
    time_limit: float | None = None,
) -> Sweep:
    """The schedule with the smallest peak, of equals the cheapest, among several thresholds for each set of stages.

    To recompute only what is forced is tried first. Then, for each set, the threshold 0; two more guesses, each
    sqrt(kept bytes × largest segment / 2) of the one before; and a grid from the smallest of these largest segments to
    sqrt(2) × the next guess.

    Args:
        problem: What is planned.
        stage_sets: Candidates for checkpoints, by the name of the set in the table of candidates.
        trials: Thresholds of the grid.
        forced: Node → True if it is recomputed, False if it is kept, whatever its stage.
        progress: Called with the fraction that is done.
        time_limit: Seconds after which no more thresholds are tried.

    Raises:
        PlanError: ``trials`` is negative, or ``forced`` names a node that can't run again.
    """
    if trials < 0:
        raise PlanError(f"{trials} trials: it has to be at least 0.")
    until = math.inf if time_limit is None else time.monotonic() + time_limit
    walk, peak_of, once = ForwardWalk(problem, forced), PeakOf(problem), problems.cost(problem, problem.schedule)
    expected, candidates = 1 + len(stage_sets) * (_GUESSES + trials), list[SweepPoint]()
    figures, best = dict[tuple[int, ...], tuple[int, float]](), (math.inf, math.inf)  # peak and overhead, by what drops
    for source, threshold, mirror in _thresholds(walk, stage_sets, trials):
        if candidates and time.monotonic() >= until:
            break
        if mirror.dropped not in figures:
            schedule = recompute_on_demand(problem, mirror.dropped)
            overhead = problems.cost(problem, schedule) / once - 1 if once else 0.0
            figures[mirror.dropped] = peak_of(schedule), overhead
            if figures[mirror.dropped] < best:
                best, found = figures[mirror.dropped], (schedule, mirror)
        candidates.append(SweepPoint(source, threshold, mirror.segments, mirror.saved, *figures[mirror.dropped]))
        if progress is not None:
            progress(min(1.0, len(candidates) / expected))
    if progress is not None:
        progress(1.0)
    problems.check(problem, found[0])
    return Sweep(*found, tuple(candidates))


def _thresholds(
    walk: ForwardWalk, stage_sets: Mapping[str, Sequence[MirrorStage]], trials: int
) -> Iterator[tuple[str, int, Mirror]]:
    """What is tried, each with what it keeps and drops: what is forced alone, then of each set guesses and a grid."""
    yield "none", 0, walk.all_kept()
    for source, stages in stage_sets.items():
        threshold, smallest = 0, -1
        for _ in range(_GUESSES):
            mirror = walk.mirror(stages, threshold)
            yield source, threshold, mirror
            smallest = mirror.largest if smallest < 0 else min(smallest, mirror.largest)
            threshold = math.isqrt(mirror.saved * mirror.largest // 2)
        step = (threshold * math.sqrt(2) - smallest) / trials if trials else 0
        for trial in range(1, trials + 1) if step > 0 else ():
            threshold = int(smallest + trial * step)
            yield source, threshold, walk.mirror(stages, threshold)


class PeakOf:
    """`problem.peak` of many valid schedules of one problem, about ten times as fast, with numpy."""

    def __init__(self, problem: Problem) -> None:
        self.sizes = np.array(problem.sizes, dtype=np.int64)
        self.workspace = np.array(problem.workspace, dtype=np.int64)
        self.pinned = np.array(problem.pinned, dtype=np.int64)
        self.base = problem.base
        self.writes = _SweepRows([list(values) for values in problem.writes])
        written = [value >= 0 for value in problem.producer]
        self.reads = _SweepRows([[v for v in values if written[v]] for values in problem.reads])
        self.inplace = _SweepRows([[v for v in values if written[v]] for values in problem.inplace])

    def __call__(self, schedule: Sequence[int]) -> int:
        """Bytes at the worst step."""
        nodes = np.array(schedule, dtype=np.int64)
        steps = len(nodes)
        value, begin = self.writes.of(nodes)
        order = np.argsort(value, kind="stable")
        value, begin = value[order], begin[order]
        copies = value * steps + begin  # ascending; a step reads the last copy before it
        wanted, when = self.reads.of(nodes)
        end = begin.copy()
        np.maximum.at(end, np.searchsorted(copies, wanted * steps + when) - 1, when)
        end[np.searchsorted(value, self.pinned)] = steps
        change = np.zeros(steps + 2, dtype=np.int64)
        np.add.at(change, begin, self.sizes[value])
        np.subtract.at(change, end + 1, self.sizes[value])
        wanted, when = self.inplace.of(nodes)
        dies = end[np.searchsorted(copies, wanted * steps + when) - 1] == when
        overwritten = np.zeros(steps, dtype=np.int64)
        np.maximum.at(overwritten, when, self.sizes[wanted] * dies)
        return self.base + int((np.cumsum(change[:steps]) + self.workspace[nodes] - overwritten).max())


class _SweepRows:
    """Rows of integers of different lengths."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.lengths = np.array([len(row) for row in rows], dtype=np.int64)
        self.starts = np.concatenate(([0], np.cumsum(self.lengths)))[:-1]
        self.items = np.array([item for row in rows for item in row], dtype=np.int64)

    def of(self, picked: Indices) -> tuple[Indices, Indices]:
        """The items of the picked rows, and for each item the index of its row in ``picked``."""
        lengths = self.lengths[picked]
        row = np.repeat(np.arange(len(picked)), lengths)
        before = np.cumsum(lengths) - lengths
        return self.items[np.arange(len(row)) - np.repeat(before - self.starts[picked], lengths)], row


def recompute_swept(request: Request) -> Outcome:
    """The strategy."""
    staged = StagedProblem(request)
    best = _swept(request, staged, staged.stage_sets)
    candidates, notes, plain = best.candidates, tuple[str, ...](), best.candidates[0].peak - request.base
    if staged.is_marked and _peak(request, best) > _MUCH * plain:
        other = _swept(request, staged, staged.structure)
        candidates += other.candidates[1:]
        if _peak(request, other) < _MUCH * _peak(request, best):
            used = _peak(request, best) > _NOTHING * plain
            notes = (_no_cuts(request, staged, best, other, used),)
            best = other if used else best
    below = tuple(replace(one, peak=one.peak - request.base) for one in candidates)
    return Outcome(staged.reduced.expand(best.schedule), best.mirror.segments, below, notes=notes)


def _swept(request: Request, staged: StagedProblem, stage_sets: Mapping[str, Sequence[MirrorStage]]) -> Sweep:
    report_progress = request.progress
    report = None if report_progress is None else lambda done: report_progress(f"{done:.0%} of the sweep")
    return sweep(staged.problem, stage_sets, request.trials, staged.forced, report, request.time_limit)


def _peak(request: Request, swept: Sweep) -> int:
    """Live bytes of the arena at the worst step of the best schedule."""
    return min(candidate.peak for candidate in swept.candidates) - request.base


def _no_cuts(request: Request, staged: StagedProblem, marked: Sweep, other: Sweep, used: bool) -> str:
    """What is to be said where the graph's structure gives much better stages than the marks."""
    graph = request.graph
    best = min(other.candidates, key=lambda each: (each.peak, each.overhead))
    ends = {stage.nodes[-1] for stage in staged.structure[best.source]}.intersection(other.mirror.kept)
    kept = [staged.reduced.members[group][-1] for group in sorted(ends)]
    here, there = (_commonest(graph.ops[node] for node in nodes) for nodes in (request.stages, kept))
    least, instead = (format_size(_peak(request, each)) for each in (marked, other))
    return (
        f"the {len(request.stages)} nodes marked mirror_stage ({here}) are no good cuts of the graph: with them the "
        f"peak is {least}. {len(kept)} other stages ({there}; the first ends at '{graph.nodes[kept[0]]}') "
        + (f"give {instead} and are used: mark those." if used else f"would give {instead}: mark those, or none.")
    )


def _commonest(operators: Iterable[str]) -> str:
    first, *others = Counter(operators).most_common()
    return f"most are {first[0]}" if others else first[0]
