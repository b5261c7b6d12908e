"""Candidates for keeping, and which of them are kept at a threshold: what lies between is recomputed.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", and MXNet's memonger: candidates are marked by hand,
and one is kept as soon as the nodes since the last one wrote as many bytes as the threshold. Graphs without marks have
candidates by their structure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from memonger.errors import PlanError
from memonger.remat.on_demand import in_time
from memonger.remat.problem import Problem

SMALL = 1 / 1024
"""A node that writes less than this part of the largest forward value is kept always."""
_MENTIONS = 16
"""Nodes in all narrow stages together, for each node of the forward pass: so many at most."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A candidate for keeping.

    Attributes:
        nodes: They are kept together or not at all; ascending.
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
        segments: Stretches of the forward pass between kept stages.
        largest: Bytes that the largest segment writes, the stage at its end included.
        saved: Bytes that the kept stages write.
    """

    kept: tuple[int, ...]
    dropped: tuple[int, ...]
    segments: int
    largest: int
    saved: int


def marked(marks: Mapping[int, str]) -> tuple[Stage, ...]:
    """Stages of ``mirror_stage`` marks by node: each "True" is a stage, nodes of one other name share one.

    In the order of their last nodes.
    """
    groups: dict[tuple[str, int], list[int]] = {}
    for node, name in sorted(marks.items()):
        groups.setdefault((name, node if name == "True" else -1), []).append(node)
    stages = [Stage(tuple(nodes), str(nodes[0]) if name == "True" else name) for (name, _), nodes in groups.items()]
    return tuple(sorted(stages, key=lambda stage: stage.nodes[-1]))


def structural(problem: Problem, forward: Sequence[bool]) -> tuple[Stage, ...]:
    """Nodes on every path from the first to the last node of the longest path of the forward pass.

    They dominate the last node. What hangs in from the side (masks, transposed weights) is no path of its own.
    Without the edges that nobody passes from the first to the last node, such a node is one that no edge leaps over in
    file order.
    """
    before = _before(problem, forward)
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
    return tuple(Stage((node,), str(problem.names[node])) for node in cuts)


def _before(problem: Problem, forward: Sequence[bool]) -> list[list[int]]:
    """For each forward node the forward nodes whose values it reads."""
    return [
        [problem.producer[v] for v in reads if problem.producer[v] >= 0 and forward[problem.producer[v]]] if of else []
        for reads, of in zip(problem.reads, forward, strict=True)
    ]


def _longest_path(before: Sequence[Sequence[int]]) -> list[int]:
    """The nodes of the longest path, by their number; the first such among equals. Empty: there is no edge."""
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


def narrow(problem: Problem, forward: Sequence[bool]) -> tuple[Stage, ...]:
    """Where the bytes that cross from one forward node to later ones are locally smallest: who wrote these.

    For graphs whose dominators are few or far apart: U-Nets, dense blocks, unrolled recurrent layers. Values of nodes
    that are kept always don't count. Of many wide stages the widest are left out.
    """
    free = droppable(problem, forward)
    last = [-1] * problem.nodes  # for each node its last forward reader
    for node, nodes in enumerate(_before(problem, forward)):
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
    places = [node for node in range(problem.nodes) if forward[node]]
    crossing, width = list(accumulate(change)), list(accumulate(count))
    chosen = _thinned(_local_minima(places, crossing), width, _MENTIONS * len(places))
    stages = []
    alive: dict[int, None] = {}
    for node in places:
        for each in ends.get(node, ()):
            del alive[each]
        if free[node] and last[node] >= 0:
            alive[node] = None
        if node in chosen:
            stages.append(Stage(tuple(alive), str(problem.names[node])))
    return tuple(stages)


def _local_minima(places: Sequence[int], crossing: Sequence[int]) -> list[int]:
    found = []
    for index, node in enumerate(places):
        around = [crossing[near] for near in places[max(0, index - 1) : index + 2]]
        if 0 < crossing[node] == min(around):
            found.append(node)
    return found


def _thinned(places: Sequence[int], width: Sequence[int], most: int) -> set[int]:
    """The narrowest places, as many as have no more than ``most`` nodes together."""
    chosen: set[int] = set()
    for node in sorted(places, key=lambda each: (width[each], each)):
        most -= width[node]
        if most < 0:
            break
        chosen.add(node)
    return chosen


def written(problem: Problem, node: int) -> int:
    """Bytes that a node writes."""
    return sum(problem.sizes[value] for value in problem.writes[node])


def droppable(problem: Problem, forward: Sequence[bool], forced: Mapping[int, bool] | None = None) -> list[bool]:
    """Whether each node belongs to the forward pass, may run again, and writes more than next to nothing.

    Args:
        problem: What is planned.
        forward: Whether each node belongs to the forward pass.
        forced: Node → True: it is recomputed however little it writes; False: it is kept.

    Raises:
        PlanError: a node is to be recomputed that can't be. It names the node.
    """
    own = [node for node in range(problem.nodes) if forward[node]]
    limit = SMALL * max((problem.sizes[value] for node in own for value in problem.writes[node]), default=0)
    found = [False] * problem.nodes
    for node in own:
        found[node] = problem.recomputable[node] and written(problem, node) > limit
    for node, recomputed in (forced or {}).items():
        if not 0 <= node < problem.nodes or (recomputed and not (forward[node] and problem.recomputable[node])):
            name = problem.names[node] if 0 <= node < problem.nodes else node
            raise PlanError(
                f"node {name!r} is to be recomputed or kept, but the forward pass has no such node that may run "
                "again: take that decision off it."
            )
        found[node] = recomputed
    return found


def make_mirror(
    problem: Problem,
    forward: Sequence[bool],
    stages: Sequence[Stage],
    threshold: float,
    forced: Mapping[int, bool] | None = None,
) -> Mirror:
    """Keep a stage as soon as the nodes since the last kept one wrote ``threshold`` bytes; drop what lies between.

    Always kept are nodes that may not run again or not in time, and those that write next to nothing. What comes after
    the last kept stage is kept as well: the backward pass begins there.

    Args:
        problem: What is planned.
        forward: Whether each node belongs to the forward pass.
        stages: The candidates.
        threshold: Bytes. 0 keeps every candidate, infinity none.
        forced: Node → True: it is recomputed; False: it is kept, whatever its stage.

    Raises:
        PlanError: the threshold is negative or no number, or a node is to be recomputed that can't be.
    """
    return ForwardWalk(problem, forward, forced).mirror(stages, threshold)


class ForwardWalk:
    """What `make_mirror` needs of a problem, for many thresholds.

    Raises:
        PlanError: see `droppable`.
    """

    def __init__(self, problem: Problem, forward: Sequence[bool], forced: Mapping[int, bool] | None = None) -> None:
        self.problem, self.forward = problem, forward
        free = droppable(problem, forward, forced)
        self.free = [node for node, may in enumerate(free) if may]
        self.bytes = {node: written(problem, node) for node in self.free}
        self.again = {node for node, recomputed in (forced or {}).items() if recomputed}

    def mirror(self, stages: Sequence[Stage], threshold: float) -> Mirror:
        """See `make_mirror`."""
        if math.isnan(threshold) or threshold < 0:
            raise PlanError(f"the threshold is {threshold} bytes: it has to be at least 0.")
        ends: dict[int, list[Stage]] = {}
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
        """Nothing is dropped but what is forced."""
        return self._mirror(set(self.free), self.problem.nodes, 1, sum(self.bytes.values()))

    def _mirror(self, kept: set[int], final: int, segments: int, largest: int) -> Mirror:
        problem = self.problem
        loose = [node for node in self.free if node in self.again or not (node in kept or node > final)]
        dropped = in_time(problem.reads, problem.writes, self.forward, problem.deadline, loose)
        gone = set(dropped)
        return Mirror(
            kept=tuple(node for node, early in enumerate(self.forward) if early and node not in gone),
            dropped=tuple(dropped),
            segments=segments,
            largest=largest,
            saved=sum(self.bytes.get(node, 0) for node in kept),
        )
