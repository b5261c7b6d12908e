"""Candidates for checkpoints, and which of them are kept at a threshold. What lies between them is recomputed.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", and MXNet's memonger: stages are marked by hand, and
a stage is kept as soon as the nodes since the last kept one wrote as many bytes as the threshold. For graphs without
marks the candidates are found by their structure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from memonger.errors import PlanError
from memonger.schedule.on_demand import in_time
from memonger.schedule.problem import Problem
from memonger.schedule.strategy import Request

SMALL = 1 / 1024
"""Nodes that write less than this fraction of the largest forward value are always kept."""
_MENTIONS = 16
"""Limit on the nodes of all narrow stages together, for each node of the forward pass."""


@dataclass(frozen=True, slots=True)
class MirrorStage:
    """A candidate for a checkpoint.

    Attributes:
        nodes: Nodes that are kept together or not at all, ascending.
        name: Its mark, or the name of its last node.
    """

    nodes: tuple[int, ...]
    name: str


@dataclass(frozen=True, slots=True)
class Mirror:
    """What is kept and what is recomputed.

    Attributes:
        kept: Forward nodes whose values stay for the backward pass, ascending.
        dropped: Forward nodes that run again where the backward pass needs them, ascending.
        segments: Number of stretches of the forward pass between kept stages.
        largest: Bytes that the largest segment writes, including the stage at its end.
        saved: Bytes that the kept stages write.
    """

    kept: tuple[int, ...]
    dropped: tuple[int, ...]
    segments: int
    largest: int
    saved: int


def marked(marks: Mapping[int, str]) -> tuple[MirrorStage, ...]:
    """The stages of ``mirror_stage`` marks by node, in the order of their last nodes.

    Each node marked "True" is a stage of its own; nodes with the same other mark are one stage.
    """
    groups: dict[tuple[str, int], list[int]] = {}
    for node, name in sorted(marks.items()):
        groups.setdefault((name, node if name == "True" else -1), []).append(node)
    stages = [
        MirrorStage(tuple(nodes), str(nodes[0]) if name == "True" else name) for (name, _), nodes in groups.items()
    ]
    return tuple(sorted(stages, key=lambda stage: stage.nodes[-1]))


def structural(problem: Problem) -> tuple[MirrorStage, ...]:
    """A stage for every node on all paths from the first to the last node of the forward pass's longest path.

    These nodes dominate the last node. Side inputs (masks, transposed weights) are on no such path. Of the subgraph
    between the first and the last node, they are the nodes that no edge passes over in file order.
    """
    before = _before(problem, leading_nodes(problem))
    path = _longest_path(before)
    if not path:
        return ()
    first, last = path[0], path[-1]
    reached = [False] * problem.nodes
    reached[first] = True
    for node in range(first + 1, last + 1):
        reached[node] = any(reached[each] for each in before[node])
    leads = [False] * problem.nodes
    leads[last] = True
    leaps = [0] * (problem.nodes + 1)
    for node in range(last, first, -1):
        if not (leads[node] and reached[node]):
            continue
        for each in before[node]:
            if reached[each]:
                leads[each] = True
                leaps[each + 1] += 1
                leaps[node] -= 1
    over = list(accumulate(leaps))
    cuts = (node for node in range(first, last + 1) if leads[node] and reached[node] and not over[node])
    return tuple(MirrorStage((node,), str(problem.names[node])) for node in cuts)


def leading_nodes(problem: Problem) -> list[bool]:
    """Whether each node is of the forward pass and may run again, or leads to one that may or to the backward pass.

    The others make new running statistics: they read each layer's mean after the loss, which is no path that the
    layer's values take.
    """
    leading, wanted = [False] * problem.nodes, [False] * len(problem.sizes)
    for node in reversed(range(problem.nodes)):
        needed = problem.recomputable[node] or any(wanted[value] for value in problem.writes[node])
        leading[node] = problem.forward[node] and needed
        if leading[node] or not problem.forward[node]:
            for value in problem.reads[node]:
                wanted[value] = True
    return leading


def _before(problem: Problem, leading: Sequence[bool]) -> list[list[int]]:
    """For each of these nodes those whose values it reads."""
    return [
        [problem.producer[v] for v in reads if problem.producer[v] >= 0 and leading[problem.producer[v]]] if of else []
        for reads, of in zip(problem.reads, leading, strict=True)
    ]


def _longest_path(before: Sequence[Sequence[int]]) -> list[int]:
    """The nodes of the longest path, ascending; of equal paths the first. Empty if there is no edge."""
    length = [0] * len(before)
    previous = [-1] * len(before)
    for node, nodes in enumerate(before):
        for each in nodes:
            if length[each] + 1 > length[node]:
                length[node], previous[node] = length[each] + 1, each
    node = max(range(len(before)), key=lambda each: (length[each], -each))
    path = []
    while length[node]:
        path.append(node)
        node = previous[node]
    return [node, *reversed(path)] if path else []


def narrow(problem: Problem) -> tuple[MirrorStage, ...]:
    """A stage for every place in the forward pass where the bytes that later forward nodes read are locally smallest.

    The nodes of a stage are those that wrote these bytes. Such stages suit graphs whose dominators are few or far
    apart: U-Nets, dense blocks, unrolled recurrent layers. Values of nodes that are always kept do not count. If the
    stages together have too many nodes, the widest are left out.
    """
    free, leading = droppable(problem), leading_nodes(problem)
    last = [-1] * problem.nodes  # for each node its last forward reader
    for node, nodes in enumerate(_before(problem, leading)):
        for each in nodes:
            last[each] = node
    ends: dict[int, list[int]] = {}
    change, count = [0] * (problem.nodes + 1), [0] * (problem.nodes + 1)
    for node, end in enumerate(last):
        if free[node] and end >= 0:
            ends.setdefault(end, []).append(node)
            for sums, amount in ((change, written(problem, node)), (count, 1)):
                sums[node] += amount
                sums[end] -= amount
    own = [node for node in range(problem.nodes) if leading[node]]
    crossing, width = list(accumulate(change)), list(accumulate(count))
    # The nodes with no more bytes crossing after them than after their neighbours, but some
    minima = []
    for index, node in enumerate(own):
        around = [crossing[near] for near in own[max(0, index - 1) : index + 2]]
        if 0 < crossing[node] == min(around):
            minima.append(node)
    # The narrowest stages, by their last nodes: as many as have at most ``most`` nodes together
    most = _MENTIONS * len(own)
    chosen: set[int] = set()
    for node in sorted(minima, key=lambda each: (width[each], each)):
        most -= width[node]
        if most < 0:
            break
        chosen.add(node)
    stages = []
    alive: dict[int, None] = {}
    for node in own:
        for each in ends.get(node, ()):
            del alive[each]
        if free[node] and last[node] >= 0:
            alive[node] = None
        if node in chosen:
            stages.append(MirrorStage(tuple(alive), str(problem.names[node])))
    return tuple(stages)


def written(problem: Problem, node: int) -> int:
    """Bytes that a node writes."""
    return sum(problem.sizes[value] for value in problem.writes[node])


def droppable(problem: Problem, forced: Mapping[int, bool] | None = None) -> list[bool]:
    """Whether each node belongs to the forward pass, may run again, and writes enough to be worth recomputing.

    Args:
        problem: What is planned.
        forced: Node → True if it is recomputed however little it writes, False if it is kept.

    Raises:
        PlanError: ``forced`` names a node that can't run again. The message names it.
    """
    own = [node for node in range(problem.nodes) if problem.forward[node]]
    limit = SMALL * max((problem.sizes[value] for node in own for value in problem.writes[node]), default=0)
    droppable = [False] * problem.nodes
    for node in own:
        droppable[node] = problem.recomputable[node] and written(problem, node) > limit
    for node, recomputed in (forced or {}).items():
        if not 0 <= node < problem.nodes or (recomputed and not (problem.forward[node] and problem.recomputable[node])):
            name = problem.names[node] if 0 <= node < problem.nodes else node
            raise PlanError(
                f"node {name!r} is to be recomputed or kept, but the forward pass has no such node that may run "
                "again: take that decision off it."
            )
        droppable[node] = recomputed
    return droppable


class ForwardWalk:
    """What is kept and dropped at any number of thresholds.

    Nodes that can't run again, or not before their deadline, are always kept, and so are nodes that write next to
    nothing. What comes after the last kept stage is also kept, since the backward pass begins there.

    Args:
        problem: What is planned.
        forced: Node → True if it is recomputed, False if it is kept, whatever its stage.

    Raises:
        PlanError: see `droppable`.
    """

    def __init__(self, problem: Problem, forced: Mapping[int, bool] | None = None) -> None:
        self.problem = problem
        free = droppable(problem, forced)
        self.free = [node for node, may in enumerate(free) if may]
        self.bytes = {node: written(problem, node) for node in self.free}
        self.again = {node for node, recomputed in (forced or {}).items() if recomputed}

    def mirror(self, stages: Sequence[MirrorStage], threshold: float) -> Mirror:
        """Keep a stage as soon as the nodes since the last kept one wrote ``threshold`` bytes, and drop the others.

        Args:
            stages: The candidates.
            threshold: Bytes. 0 keeps every candidate, infinity none.

        Raises:
            PlanError: the threshold is negative or not a number.
        """
        if math.isnan(threshold) or threshold < 0:
            raise PlanError(f"the threshold is {threshold} bytes: it has to be at least 0.")
        ends: dict[int, list[MirrorStage]] = {}
        for stage in stages:
            ends.setdefault(stage.nodes[-1], []).append(stage)
        kept: set[int] = set()
        since = largest = segments = 0
        final = self.problem.nodes  # the last kept stage's end
        for node in sorted(ends.keys() | self.bytes.keys()):
            since += self.bytes.get(node, 0)
            if node in ends and since >= threshold:
                kept.update(each for stage in ends[node] for each in stage.nodes)
                segments, largest, since, final = segments + 1, max(largest, since), 0, node
        return self._mirror(kept, final, segments + (since > 0), max(largest, since))

    def all_kept(self) -> Mirror:
        """Only what is forced is dropped."""
        return self._mirror(set(self.free), self.problem.nodes, 1, sum(self.bytes.values()))

    def _mirror(self, kept: set[int], final: int, segments: int, largest: int) -> Mirror:
        problem = self.problem
        wanted = [node for node in self.free if node in self.again or not (node in kept or node > final)]
        dropped = in_time(problem, problem.deadline, wanted)
        gone = set(dropped)
        return Mirror(
            kept=tuple(node for node, early in enumerate(problem.forward) if early and node not in gone),
            dropped=tuple(dropped),
            segments=segments,
            largest=largest,
            saved=sum(self.bytes.get(node, 0) for node in kept),
        )


_FEW_DOMINATORS = 8
"""With fewer dominators than this, `mirror_plan` chooses from the narrow cuts."""


class StagedProblem:
    """A request as the strategies with stages see it: the reduced problem, and what may be kept in it.

    Attributes:
        reduced: The problem, and how its schedules become schedules of the graph.
        problem: The reduced problem.
        forced: Node of the problem → True: it is recomputed; False: it is kept.
    """

    def __init__(self, request: Request) -> None:
        self.reduced = request.reduced()
        self.problem = self.reduced.problem
        group_of = self.reduced.groups
        # A view by itself can only be kept, for it runs whenever it is needed
        problem, reduced = self.problem, self.reduced
        forced = dict.fromkeys((group_of[node] for node in request.kept if group_of[node] >= 0), False)
        for node, recomputed in sorted(request.forced.items()):
            group = group_of[node]
            may = group >= 0 and problem.forward[group] and problem.recomputable[group]
            if recomputed and may and node in reduced.members[group]:
                forced[group] = True
        self.forced = forced
        self._marks = {group_of[node]: stage for node, stage in request.stages.items() if group_of[node] >= 0}

    @property
    def kept(self) -> dict[int, bool]:
        """The part of ``forced`` that is kept."""
        return {node: False for node, recomputed in self.forced.items() if not recomputed}

    @cached_property
    def stage_sets(self) -> Mapping[str, Sequence[MirrorStage]]:
        """Candidates for checkpoints: the marked stages, or where none is marked two sets of the graph's structure."""
        return {"marks": marked(self._marks)} if self.is_marked else self.structure

    @property
    def is_marked(self) -> bool:
        """Whether the user has marked stages."""
        return bool(self._marks)

    @cached_property
    def structure(self) -> Mapping[str, Sequence[MirrorStage]]:
        """Candidates that follow from the graph's structure alone."""
        return {"dominators": structural(self.problem), "narrow cuts": narrow(self.problem)}


def mirror_plan(request: Request, threshold: float) -> tuple[int, ...]:
    """Nodes of the graph that are dropped at a threshold in bytes, and the views of what they write."""
    staged = StagedProblem(request)
    first, *others = staged.stage_sets.values()
    stages = first if len(first) >= _FEW_DOMINATORS or not others else others[0]
    dropped = set(ForwardWalk(staged.problem, staged.forced).mirror(stages, threshold).dropped)
    return tuple(node for node, group in enumerate(staged.reduced.groups) if group in dropped)
