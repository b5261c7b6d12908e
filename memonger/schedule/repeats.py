"""Repeated blocks, such as a transformer's layers: few of them are solved, and what these recompute, all recompute.

A block is a stretch of forward nodes, repeated one right after the other with the same bytes read and written, and the
backward nodes that belong to it. A large problem is *contracted* to the first and the last few of its blocks. Bytes and
costs of what isn't repeated stay as they are, so the contracted problem has to save as much in each block as the whole.
What its solution recomputes in a block is recomputed in the blocks of the whole around the same place: a schedule to
start from, which may be above the budget.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np

from memonger.schedule.on_demand import in_time, recompute_on_demand
from memonger.schedule.problem import Problem, peak

KEPT = 8
"""Blocks of a repetition that a contracted problem has."""

_SHORTEST = 3
"""Nodes of a block, at least."""

_PERIODS = 64
"""Most lengths of a block that are tried for one repetition."""

_TRIES = 2
"""Contracted problems that are solved for one budget: the second where what follows from the first is above it."""

Solve = Callable[[Problem, int], Sequence[int]]
"""A schedule of a problem within a budget, or with the smallest peak that was found."""


class Repetition(NamedTuple):
    """A stretch of a sequence in which a block of some length comes several times, one right after the other."""

    start: int
    length: int
    blocks: int


class BlockPlace(NamedTuple):
    """Where a node stands: in which repetition, in which of its blocks, and as which of the nodes of that block."""

    repetition: int
    block: int
    member: int


def broadcast(problem: Problem, budget: int, solve: Solve) -> list[tuple[int, ...]]:
    """Schedules in which all blocks recompute what those of a contracted problem do.

    There are none where the contracted problem has more than half of the nodes.

    Args:
        problem: A forward and a backward pass.
        budget: Bytes for everything.
        solve: Solves the contracted problem.
    """
    contraction = Contraction(problem)
    if 2 * len(contraction.nodes) > problem.nodes:
        return []
    schedules = list[tuple[int, ...]]()
    target = contraction.budget(budget)
    while len(schedules) < _TRIES:
        small = contraction.problem
        schedules.append(contraction.expand(solve(small, max(target, small.lower_bound))))
        above = peak(problem, schedules[-1]) - budget
        if above <= 0:
            break
        target -= int(above * contraction.share)
    return schedules


class Contraction:
    """A problem without the middle of each repetition: of the blocks that are alike `KEPT` stay.

    Args:
        problem: The whole. Its forward nodes are searched for repetitions.
    """

    def __init__(self, problem: Problem) -> None:
        self.whole = problem
        self.places, self.alike = places(problem)
        half = KEPT // 2
        self.removed = {each: blocks[half : len(blocks) - KEPT + half] for each, blocks in self.alike.items()}
        """Of each repetition."""
        self.nodes = [node for node in range(problem.nodes) if not self._is_removed(self.places.get(node))]
        """Those of the whole that the contracted problem has, in its order."""
        self._at = {place: node for node, place in self.places.items()}

    def _is_removed(self, place: BlockPlace | None) -> bool:
        return place is not None and place.block in self.removed[place.repetition]

    @cached_property
    def share(self) -> float:
        """Part of the bytes written by forward nodes of blocks that the contracted problem has."""
        whole = self._written(self.places)
        return self._written(node for node in self.nodes if node in self.places) / whole if whole else 0.0

    def _written(self, nodes: Iterable[int]) -> int:
        problem = self.whole
        return sum(problem.sizes[value] for node in nodes if problem.forward[node] for value in problem.writes[node])

    def budget(self, budget: int) -> int:
        """Bytes for the contracted problem: each of its blocks has to save as much as one of the whole."""
        saved = peak(self.whole, self.whole.schedule) - budget
        return peak(self.problem, self.problem.schedule) - int(saved * self.share)

    @cached_property
    def problem(self) -> Problem:
        """The contracted problem. A node reads from the blocks that are as far from its own as in the whole."""
        whole, nodes = self.whole, self.nodes
        number = {node: index for index, node in enumerate(nodes)}
        values = [value for node in nodes for value in whole.writes[node]]
        renamed = {value: index for index, value in enumerate(values)}

        def moved(node: int, of: Sequence[int]) -> tuple[int, ...]:
            sources = (self._source(node, value) for value in of if whole.producer[value] >= 0)
            read = [value for value in sources if value in renamed and number[whole.producer[value]] < number[node]]
            return tuple(renamed[value] for value in dict.fromkeys(read))

        return Problem(
            costs=tuple(whole.costs[node] for node in nodes),
            reads=tuple(moved(node, whole.reads[node]) for node in nodes),
            writes=tuple(tuple(renamed[value] for value in whole.writes[node]) for node in nodes),
            sizes=tuple(whole.sizes[value] for value in values),
            recomputable=tuple(whole.recomputable[node] for node in nodes),
            pinned=tuple(renamed[value] for value in whole.pinned if value in renamed),
            workspace=tuple(whole.workspace[node] for node in nodes),
            base=whole.base,
            deadline=tuple(number.get(whole.deadline[node], len(nodes)) for node in nodes),
            inplace=tuple(moved(node, whole.inplace[node]) for node in nodes),
            forward=tuple(whole.forward[node] for node in nodes),
            names=tuple(whole.names[node] for node in nodes),
        )

    def _source(self, node: int, value: int) -> int | None:
        """The value that a node of the contracted problem reads in place of one of the whole."""
        source = self.whole.producer[value]
        place, reader = self.places.get(source), self.places.get(node)
        if place is None:
            return value
        removed, block = self.removed[place.repetition], place.block
        if reader is not None and reader.repetition == place.repetition:
            if reader.block < removed.start <= block:
                block += len(removed)
            elif block < removed.stop <= reader.block:
                block -= len(removed)
        elif block in removed:
            block = removed.stop
        like = self._at.get(place._replace(block=block))
        return None if like is None else self.whole.writes[like][self.whole.writes[source].index(value)]

    def expand(self, schedule: Sequence[int]) -> tuple[int, ...]:
        """The schedule of the whole in which every forward node runs again whose like in the contracted one does."""
        whole = self.whole
        runs = Counter(schedule)
        again = {node for index, node in enumerate(self.nodes) if runs[index] > 1}
        may = (node for node in range(whole.nodes) if whole.forward[node] and whole.recomputable[node])
        dropped = [node for node in may if self._like(node) in again]
        return recompute_on_demand(whole, in_time(whole, whole.deadline, dropped))

    def _like(self, node: int) -> int:
        """The node of the contracted problem at the same part of the way through the blocks that are alike."""
        place = self.places.get(node)
        if place is None or not self._is_removed(place):
            return node
        alike, removed = self.alike[place.repetition], self.removed[place.repetition]
        kept = [block for block in alike if block not in removed]
        way = (place.block - alike.start) / (len(alike) - 1)
        return self._at[place._replace(block=kept[round(way * (KEPT - 1))])]


def places(problem: Problem) -> tuple[dict[int, BlockPlace], dict[int, range]]:
    """Where the nodes of blocks stand, and of each repetition the blocks that are alike, backward nodes too.

    Backward nodes of the other blocks, the first and the last of a repetition as a rule, stand nowhere.
    """
    # A number for every node: the same for nodes that read and write the same bytes and may do the same
    numbers = dict[object, int]()
    sizes = problem.sizes
    kinds = [
        numbers.setdefault(
            (
                problem.forward[node],
                problem.recomputable[node],
                problem.workspace[node],
                tuple(sizes[value] for value in problem.writes[node]),
                tuple(sizes[value] for value in problem.reads[node]),
            ),
            len(numbers),
        )
        for node in range(problem.nodes)
    ]
    forward = [node for node in range(problem.nodes) if problem.forward[node]]
    result, alike = dict[int, BlockPlace](), dict[int, range]()
    for repetition, (start, length, count) in enumerate(sorted(repetitions([kinds[node] for node in forward]))):
        for position in range(length * count):
            result[forward[start + position]] = BlockPlace(repetition, *divmod(position, length))
    members = defaultdict[tuple[int, int], list[int]](list)
    for node, owner in sorted(_owners(problem, result).items()):
        members[owner].append(node)
    counts = Counter[int](place.repetition for place in result.values() if not place.member)
    for repetition, count in counts.items():
        alike[repetition] = _longest_alike(
            [tuple(kinds[node] for node in members[repetition, b]) for b in range(count)]
        )
        for block in alike[repetition]:
            for member, node in enumerate(members[repetition, block]):
                result[node] = BlockPlace(repetition, block, -1 - member)
    return result, alike


def repetitions(sequence: Sequence[int]) -> Iterator[Repetition]:
    """Where blocks repeat in a sequence: the repetition that saves most first, then those before and behind it."""
    stack = [(0, len(sequence))]
    whole = np.asarray(sequence, np.int64)
    while stack:
        begin, end = stack.pop()
        part = whole[begin:end]
        best = max((_longest(part, length) for length in _lengths(part)), key=_saved, default=None)
        if best is not None and best.blocks > KEPT:
            start = begin + best.start
            yield Repetition(start, best.length, best.blocks)
            stack += [(begin, start), (start + best.length * best.blocks, end)]


def _saved(repetition: Repetition) -> tuple[int, int]:
    return (repetition.blocks - KEPT) * repetition.length, -repetition.length


def _lengths(sequence: np.ndarray) -> list[int]:
    """Lengths that blocks may have: the most frequent distances from an item to the next and second next like it."""
    places = defaultdict[int, list[int]](list)
    for place, item in enumerate(sequence.tolist()):
        places[item].append(place)
    distances = Counter(b - a for each in places.values() for far in (1, 2) for a, b in zip(each, each[far:]))  # noqa: B905
    frequent = sorted(distances, key=lambda length: (-distances[length], length))
    return [length for length in frequent if length >= _SHORTEST][:_PERIODS]


def _longest(sequence: np.ndarray, length: int) -> Repetition:
    """The longest repetition of a block of this length."""
    differs = np.flatnonzero(sequence[length:] != sequence[:-length])
    ends = np.concatenate([[-1], differs, [len(sequence) - length]])
    gaps = np.diff(ends) - 1
    index = int(gaps.argmax())
    return Repetition(int(ends[index]) + 1, length, int(gaps[index]) // length + 1)


def _owners(problem: Problem, forward: Mapping[int, BlockPlace]) -> dict[int, tuple[int, int]]:
    """The repetition and block that each backward node belongs to.

    It is the last that it reads a forward value of, else the first that it reads a backward value of. What is made of
    weights alone belongs to the first of its readers'.
    """
    owners, ownerless = dict[int, tuple[int, int]](), dict[int, None]()
    readers = defaultdict[int, list[int]](list)
    for node in range(problem.nodes):
        if problem.forward[node]:
            continue
        sources = [problem.producer[value] for value in problem.reads[node] if problem.producer[value] >= 0]
        for source in sources:
            readers[source].append(node)
        direct = [forward[source][:2] for source in sources if source in forward]
        indirect = [owners[source] for source in sources if source in owners]
        if direct or indirect:
            owners[node] = max(direct) if direct else min(indirect)
        elif ownerless.keys() >= set(sources):
            ownerless[node] = None
    for node in reversed(ownerless):
        late = [owners[reader] for reader in readers[node] if reader in owners]
        if late:
            owners[node] = min(late)
    return owners


def _longest_alike(blocks: Sequence[object]) -> range:
    """The longest stretch of blocks that are all as most are."""
    (most, _), *_ = Counter(blocks).most_common(1)
    stretches = [
        list(group) for alike, group in groupby(range(len(blocks)), lambda block: blocks[block] == most) if alike
    ]
    longest = max(stretches, key=len)
    return range(longest[0], longest[-1] + 1)
