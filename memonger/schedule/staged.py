"""A request as the strategies with stages see it: the reduced problem, candidates for checkpoints, and the marks."""

from collections.abc import Mapping, Sequence
from functools import cached_property

from memonger.schedule.checkpoints import MirrorStage, make_mirror, marked, narrow, structural
from memonger.schedule.strategy import Request

_FEW_DOMINATORS = 8
"""With fewer dominators than this, `mirror_plan` chooses from the narrow cuts."""


class StagedProblem:
    """The reduced problem of a request and what may be kept in it.

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
    """Nodes of the graph that `make_mirror` drops at a threshold in bytes, and the views of what they write."""
    staged = StagedProblem(request)
    first, *others = staged.stage_sets.values()
    stages = first if len(first) >= _FEW_DOMINATORS or not others else others[0]
    mirror = make_mirror(staged.problem, stages, threshold, staged.forced)
    dropped = set(mirror.dropped)
    return tuple(node for node, group in enumerate(staged.reduced.groups) if group in dropped)
