"""Schedules for those who want no search: one segment a stage, sqrt(n), and recursive O(log n).

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

from memonger.remat.checkpoints import ForwardWalk, Stage, droppable, written
from memonger.remat.on_demand import in_time, needed_again, recompute_on_demand
from memonger.remat.problem import Problem


def block(
    problem: Problem, forward: Sequence[bool], stages: Sequence[Stage], forced: Mapping[int, bool] | None = None
) -> tuple[int, ...]:
    """Keep every stage: one segment a stage, recomputed when the backward pass gets there. Without stages keep all.

    Args:
        problem: What is planned.
        forward: Whether each node belongs to the forward pass.
        stages: The candidates.
        forced: Node → True: it is recomputed; False: it is kept, whatever its stage.

    Raises:
        PlanError: a node is to be recomputed that can't be.
    """
    walk = ForwardWalk(problem, forward, forced)
    mirror = walk.mirror(stages, 0) if stages else walk.all_kept()
    return recompute_on_demand(problem.reads, problem.writes, forward, mirror.dropped)


def square_root(
    problem: Problem, forward: Sequence[bool], stages: Sequence[Stage], forced: Mapping[int, bool] | None = None
) -> tuple[int, ...]:
    """Keep sqrt(m) of the m stages, evenly by the bytes that the forward pass writes. See `block`."""
    free = droppable(problem, forward, forced)
    total = list(accumulate(written(problem, node) if free[node] else 0 for node in range(problem.nodes)))
    ordered = sorted(stages, key=lambda stage: stage.nodes[-1])
    reached = [total[stage.nodes[-1]] for stage in ordered]
    count = round(math.sqrt(len(ordered)))
    chosen = sorted({bisect_left(reached, total[-1] * part / (count + 1)) for part in range(1, count + 1)})
    return block(problem, forward, [ordered[index] for index in chosen if index < len(ordered)], forced)


def logarithmic(
    problem: Problem, forward: Sequence[bool], stages: Sequence[Stage], forced: Mapping[int, bool] | None = None
) -> tuple[int, ...]:
    """Keep O(log m) checkpoints at a time and recompute O(m log m) segments, recursively. See `block`.

    The stages cut the forward pass into m segments. It keeps what crosses the cuts at m/2, 3m/4, 7m/8 …; before the
    backward steps of a segment the nodes from the nearest checkpoint on run again, and what crosses the cut in the
    middle of them is the next checkpoint, and so on. What a backward step reads itself stays until its last reader, and
    so does what ran more often than a segment has to.
    """
    free = droppable(problem, forward, forced)
    pick = (node for node in range(problem.nodes) if free[node])
    dropped = in_time(problem.reads, problem.writes, forward, problem.deadline, list(pick), often=True)
    cuts = _Cuts(problem, forward, stages, dropped)
    source = {value: node for node in dropped for value in problem.writes[node]}
    often = max(1, math.ceil(math.log2(max(1, cuts.count))))
    again = [0] * problem.nodes
    gone = set(dropped) - cuts.checkpoints(dropped, {cuts.segment[node] for node in dropped[-1:]})
    gone |= {node for node in dropped if (forced or {}).get(node)}
    schedule: list[int] = []
    for node, reads in enumerate(problem.reads):
        if gone and not forward[node]:
            needed = needed_again(reads, problem.reads, source, gone)
            schedule.extend(needed)
            gone.difference_update(source[value] for value in reads if value in source)
            if needed:
                targets = {cuts.segment[source[value]] for value in reads if value in source}
                gone -= cuts.checkpoints(needed, targets)
                for each in needed:
                    again[each] += 1
                gone.difference_update(each for each in needed if again[each] >= often)
        schedule.append(node)
    return tuple(schedule)


class _Cuts:
    """The forward pass in segments, each to the end of a stage."""

    def __init__(
        self, problem: Problem, forward: Sequence[bool], stages: Sequence[Stage], dropped: Collection[int]
    ) -> None:
        ends = sorted({stage.nodes[-1] for stage in stages})
        self.segment = [bisect_left(ends, node) for node in range(problem.nodes)]
        self.count = len({self.segment[node] for node in dropped})
        self.reach = [-1] * problem.nodes  # the last segment with a forward reader of the node
        for node, reads in enumerate(problem.reads):
            for value in reads if forward[node] else ():
                if problem.producer[value] >= 0:
                    self.reach[problem.producer[value]] = self.segment[node]

    def checkpoints(self, ran: Sequence[int], targets: Collection[int]) -> set[int]:
        """Of the nodes that ran one after another those that stay: all of a target segment, and what crosses a cut.

        Cuts are in the middle of the segments that ran, in the middle of the rest, and so on to the last target.
        """
        segments = sorted({self.segment[node] for node in ran})
        low, high = 0, len(segments) - 1
        middles = []
        while low < high:
            low = (low + high + 1) // 2
            middles.append(segments[low])
        found = set()
        for node in ran:
            following = bisect_right(middles, self.segment[node])
            crosses = following < len(middles) and middles[following] <= self.reach[node]
            if crosses or self.segment[node] in targets:
                found.add(node)
        return found
