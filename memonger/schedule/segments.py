"""The strategies ``block``, ``sqrt`` and ``log``, without search: all stages, sqrt(n) of them, recursive O(log n).

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import accumulate

from memonger.schedule.checkpoints import ForwardWalk, MirrorStage, StagedProblem, droppable, leading_nodes, written
from memonger.schedule.on_demand import in_time, needed_again, recompute_on_demand
from memonger.schedule.problem import Problem
from memonger.schedule.strategy import Outcome, Request
from memonger.schedule.sweep import PeakOf

Segmentation = Callable[[Problem, Sequence[MirrorStage], Mapping[int, bool]], tuple[int, ...]]


def block(problem: Problem, stages: Sequence[MirrorStage], forced: Mapping[int, bool] | None = None) -> tuple[int, ...]:
    """Keep every stage, and recompute the segment between two when the backward pass gets there.

    Without stages everything is kept.

    Args:
        problem: What is planned.
        stages: The candidates.
        forced: Node → True if it is recomputed, False if it is kept, whatever its stage.

    Raises:
        PlanError: ``forced`` names a node that can't run again.
    """
    walk = ForwardWalk(problem, forced)
    mirror = walk.mirror(stages, 0) if stages else walk.all_kept()
    return recompute_on_demand(problem, mirror.dropped)


def square_root(
    problem: Problem, stages: Sequence[MirrorStage], forced: Mapping[int, bool] | None = None
) -> tuple[int, ...]:
    """Keep sqrt(m) of the m stages, spaced evenly by the bytes that the forward pass writes. See `block`."""
    free = droppable(problem, forced)
    total = list(accumulate(written(problem, node) if free[node] else 0 for node in range(problem.nodes)))
    ordered = sorted(stages, key=lambda stage: stage.nodes[-1])
    reached = [total[stage.nodes[-1]] for stage in ordered]
    count = round(math.sqrt(len(ordered)))
    chosen = sorted({bisect_left(reached, total[-1] * part / (count + 1)) for part in range(1, count + 1)})
    return block(problem, [ordered[index] for index in chosen if index < len(ordered)], forced)


def logarithmic(
    problem: Problem, stages: Sequence[MirrorStage], forced: Mapping[int, bool] | None = None
) -> tuple[int, ...]:
    """Keep O(log m) checkpoints at a time and recompute O(m log m) segments, recursively. See `block`.

    The stages cut the forward pass into m segments. The values that cross the cuts at m/2, 3m/4, 7m/8 … stay. Before
    the backward steps of a segment the nodes from the nearest checkpoint on run again, what crosses the cut in their
    middle becomes the next checkpoint, and so on. What a backward step reads itself stays until its last reader, and
    so does what already ran again log2(m) times.
    """
    free = droppable(problem, forced)
    pick = (node for node in range(problem.nodes) if free[node])
    dropped = in_time(problem, problem.deadline, list(pick), every_reader=True)
    cuts = _Cuts(problem, stages, dropped)
    source = {value: node for node in dropped for value in problem.writes[node]}
    often = max(1, math.ceil(math.log2(max(1, cuts.count))))
    again = [0] * problem.nodes
    missing = set(dropped) - cuts.checkpoints(dropped, {cuts.segment[node] for node in dropped[-1:]})
    missing |= {node for node in dropped if (forced or {}).get(node)}
    schedule: list[int] = []
    for node, reads in enumerate(problem.reads):
        if missing and not problem.forward[node]:
            needed = needed_again(problem, reads, source, missing)
            schedule.extend(needed)
            missing.difference_update(source[value] for value in reads if value in source)
            if needed:
                targets = {cuts.segment[source[value]] for value in reads if value in source}
                missing -= cuts.checkpoints(needed, targets)
                for each in needed:
                    again[each] += 1
                missing.difference_update(each for each in needed if again[each] >= often)
        schedule.append(node)
    return tuple(schedule)


class _Cuts:
    """The forward pass in segments, each of which ends with a stage."""

    def __init__(self, problem: Problem, stages: Sequence[MirrorStage], dropped: Collection[int]) -> None:
        ends = sorted({stage.nodes[-1] for stage in stages})
        self.segment = [bisect_left(ends, node) for node in range(problem.nodes)]
        self.count = len({self.segment[node] for node in dropped})
        self.reach = [-1] * problem.nodes  # the last segment with a forward reader of the node
        leading = leading_nodes(problem)
        for node, reads in enumerate(problem.reads):
            for value in reads if leading[node] else ():
                if problem.producer[value] >= 0:
                    self.reach[problem.producer[value]] = self.segment[node]

    def checkpoints(self, ran: Sequence[int], targets: Collection[int]) -> set[int]:
        """Those of the nodes that just ran whose values stay: all of a target segment, and what crosses a cut.

        The cuts are in the middle of the segments that ran, in the middle of those after it, and so on to the last.
        """
        segments = sorted({self.segment[node] for node in ran})
        low, high = 0, len(segments) - 1
        middles = []
        while low < high:
            low = (low + high + 1) // 2
            middles.append(segments[low])
        stay = set()
        for node in ran:
            following = bisect_right(middles, self.segment[node])
            crosses = following < len(middles) and middles[following] <= self.reach[node]
            if crosses or self.segment[node] in targets:
                stay.add(node)
        return stay


def _run(segmentation: Segmentation, request: Request) -> Outcome:
    """The schedule with the smallest peak, from whichever set of stages gives it; the first of equals."""
    staged = StagedProblem(request)
    peak = PeakOf(staged.problem)
    schedules = {
        name: segmentation(staged.problem, stages, staged.forced) for name, stages in staged.stage_sets.items()
    }
    name, schedule = min(schedules.items(), key=lambda item: peak(item[1]))
    segments = len(staged.stage_sets[name]) + 1 if segmentation is block else 1
    return Outcome(staged.reduced.expand(schedule), segments)


recompute_blocks = partial(_run, block)
recompute_square_root = partial(_run, square_root)
recompute_logarithmic = partial(_run, logarithmic)
