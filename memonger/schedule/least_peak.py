"""The evaluation order with the smallest peak: exact where that can be had, else the best that a bounded search finds.

What is alive between two steps depends on which nodes have run, not on their order. So an order is a path through sets
of nodes, and the path whose worst step is smallest is found as Dijkstra's algorithm finds shortest ones. It is the
dynamic programming of Ahn et al. 2020, "Ordering Chaos: Memory-Aware Scheduling of Irregularly Wired Neural Networks
for Edge Devices", kept small in three ways: no set above the best order known is visited; a node that leaves no more
alive than there was, and needs no more than the peak so far, runs at once, as no order gains by waiting with it; and
the search also goes from the last node to the first, which is the same problem and often a thousand times shorter.

An order is cut at nodes that come before or after every other one in all orders, and its parts are ordered by
themselves, the worst first. Where the search of a part doesn't end, spans of the order around its worst step are
ordered exactly instead, as long as that makes it better, from several orders. Left out: the gaps of a layout.
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from memonger.graph.graph import Graph
from memonger.graph.liveness import roots


@dataclass(frozen=True, slots=True)
class OrderingProblem:
    """What nodes need of the arena. A storage is the values that are always in the same bytes.

    Attributes:
        before: For each node those that must run before it.
        sizes: Bytes of each storage.
        kept: Whether it is there when the run ends.
        uses: The storages that each node reads or writes; one is alive from the first to the last such node.
        used_by: The nodes that read or write each storage.
        may_overwrite: For each node pairs of storages: the first, written there, may lie over the second, read there.
        workspace: Bytes of each node.
    """

    before: Sequence[Sequence[int]]
    sizes: Sequence[int]
    kept: Sequence[bool]
    uses: Sequence[Sequence[int]]
    used_by: Sequence[Sequence[int]]
    may_overwrite: Sequence[Sequence[tuple[int, int]]]
    workspace: Sequence[int]

    @classmethod
    def of(cls, graph: Graph) -> "OrderingProblem":
        """What a graph needs where all shares bytes that may; what subviews save is estimated."""
        root = roots(graph)
        sizes: dict[int, int] = {}
        for value, planned in enumerate(graph.planned):
            if planned:
                sizes[root[value]] = max(sizes.get(root[value], 0), graph.sizes[value])
        number = {value: index for index, value in enumerate(sizes)}
        storage = [number.get(each, -1) for each in root]
        held = [(each,) if each >= 0 else () for each in storage]
        for source, target in chain.from_iterable(graph.runtime_aliases):
            held[target] = (*held[target], *held[source])
        outputs = {each for value in graph.outputs for each in held[value]}
        uses = [
            tuple(dict.fromkeys(each for value in (*reads, *writes) for each in held[value]))
            for reads, writes in zip(graph.reads, graph.writes, strict=True)
        ]
        bytes_of = tuple(sizes.values())
        used_by: list[list[int]] = [[] for _ in range(len(sizes))]
        for node, storages in enumerate(uses):
            for each in storages:
                used_by[each].append(node)
        return cls(
            before=graph.before,
            sizes=bytes_of,
            kept=tuple(each in outputs for each in range(len(sizes))),
            uses=uses,
            used_by=used_by,
            may_overwrite=[tuple(_over(graph, storage, node, bytes_of)) for node in range(len(graph.nodes))],
            workspace=graph.workspace,
        )

    def at(self, node: int, others: Sequence[int]) -> int:
        """Bytes at the step of a node while these other storages, which it doesn't touch, are alive."""
        own = sum(self.sizes[each] for each in self.uses[node])
        inside = {under: self.sizes[over] for over, under in self.may_overwrite[node]}
        return own + self.workspace[node] - sum(inside.values()) + sum(self.sizes[each] for each in others)


def _over(graph: Graph, storage: Sequence[int], node: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    reads = Counter(storage[value] for value in graph.reads[node]) if graph.inplace[node] else Counter[int]()
    for source, target in graph.inplace[node]:
        under, over = storage[source], storage[target]
        if under >= 0 and over not in (-1, under) and reads[under] == 1 and sizes[under] == graph.sizes[source]:
            yield over, under


EFFORT = 2_000_000
"""Steps tried in one search: a few seconds."""

_EFFORT_OF_NODE = 1_000
"""Steps tried for each node, where that is less."""

_EXACT = 30_000
"""Steps tried by the exact search of a part, in each direction."""

_LONGEST = 1_000
"""Nodes of a part. Longer ones aren't searched as a whole."""

_SHORT, _LONG = ((16, 64), 2_000), ((32, 128, 256), 10_000)
"""Lengths of the spans around the worst step, and the steps tried for one: first of all orders, then of the best."""

_AROUND = (0.5, 0.2, 0.8)
"""Where the worst step lies in such a span."""

_NEAR = 1.25
"""Orders that need more than this many times what the best needs aren't made better."""

Order = tuple[int, ...]


def least_peak(problem: OrderingProblem, starts: Sequence[Order], effort: int = EFFORT) -> Order:
    """The order found with the smallest peak, workspace included; the first of ``starts`` with it, if none has less.

    Args:
        problem: Of the nodes.
        starts: Valid orders, at least one.
        effort: Steps that the search may try.
    """
    left = [min(effort, _EFFORT_OF_NODE * len(problem.before))]
    found = sorted((_OrderSteps(problem, order) for order in dict.fromkeys(starts)), key=lambda steps: steps.peak)
    if _is_least(problem, found[0]) or _by_parts(found[0], left):
        return tuple(found[0].order)
    near = [steps for steps in found if steps.peak <= found[0].peak * _NEAR]
    share = left[0] // (2 * len(near))
    for steps in near:
        _by_spans(steps, *_SHORT, left, share)
    best = min(near, key=lambda steps: steps.peak)
    _by_spans(best, *_LONG, left, left[0])
    return tuple(best.order)


class _OrderSteps:
    """An order, and for each of its steps the bytes needed there and the bytes alive after it."""

    def __init__(self, problem: OrderingProblem, order: Sequence[int]) -> None:
        self.problem, self.order = problem, list(order)
        self.step_of = [0] * len(order)
        for step, node in enumerate(order):
            self.step_of[node] = step
        self.need, self.alive = [0] * len(order), [0] * len(order)
        first = [min(self.step_of[node] for node in nodes) for nodes in problem.used_by]
        last = [max(self.step_of[node] for node in nodes) for nodes in problem.used_by]
        live = 0
        for step, node in enumerate(order):
            begun = sum(problem.sizes[each] for each in problem.uses[node] if first[each] == step)
            ended = sum(problem.sizes[e] for e in problem.uses[node] if last[e] == step and not problem.kept[e])
            reused: dict[int, int] = {}
            for over, under in problem.may_overwrite[node]:
                free = first[under] < step == last[under] and not problem.kept[under]
                if free and first[over] == step and under not in reused.values():
                    reused.setdefault(over, under)
            self.need[step] = live + begun - sum(problem.sizes[each] for each in reused) + problem.workspace[node]
            live += begun - ended
            self.alive[step] = live

    @property
    def peak(self) -> int:
        return max(self.need, default=0)

    def replace(self, begin: int, span: "_Span", order: Sequence[int]) -> None:
        """Put the nodes of a span that begins at this step into another order."""
        nodes, live, done = self.order[begin : begin + len(order)], span.live, 0
        for step, number in enumerate(order, begin):
            self.order[step] = nodes[number]
            self.step_of[nodes[number]] = step
            self.need[step], live = span.step(done, number, live)
            self.alive[step] = live
            done |= 1 << number


_Storage = tuple[int, int, bool, bool]
"""Bytes; the nodes of the span that touch it, as bits; whether others do before it, and behind it."""


@dataclass(frozen=True, slots=True)
class _Span:
    """Nodes that may be put into another order, all others staying before or behind them.

    Attributes:
        before: For each node those that must run before it, as bits.
        after: For each node those that must run after it, as bits.
        uses: The storages that each node touches, but for what is alive in the whole span.
        may_overwrite: For each node pairs of storages of which the first may lie over the second.
        workspace: Bytes of each node.
        live: Bytes alive before the span.
        live_after: Bytes alive behind it.
    """

    before: Sequence[int]
    after: Sequence[int]
    uses: Sequence[Sequence[_Storage]]
    may_overwrite: Sequence[Sequence[tuple[_Storage, _Storage]]]
    workspace: Sequence[int]
    live: int
    live_after: int

    @classmethod
    def of(cls, steps: _OrderSteps, begin: int, end: int) -> "_Span":
        """The problem of putting some consecutive steps into another order."""
        problem, nodes, step_of = steps.problem, steps.order[begin:end], steps.step_of
        before, after = [0] * len(nodes), [0] * len(nodes)
        for number, node in enumerate(nodes):
            for source in problem.before[node]:
                if step_of[source] >= begin:
                    before[number] |= 1 << (step_of[source] - begin)
                    after[step_of[source] - begin] |= 1 << number
        storages: dict[int, _Storage] = {}
        for each in dict.fromkeys(each for node in nodes for each in problem.uses[node]):
            at = [step_of[node] - begin for node in problem.used_by[each]]
            bits = sum(1 << step for step in at if 0 <= step < len(nodes))
            storages[each] = problem.sizes[each], bits, min(at) < 0, max(at) >= len(nodes) or problem.kept[each]
        return cls(
            before, after,
            [[s for s in map(storages.__getitem__, problem.uses[node]) if not (s[2] and s[3])] for node in nodes],
            [[(storages[a], storages[b]) for a, b in problem.may_overwrite[node]
              if not storages[a][2] and not storages[b][3]] for node in nodes],
            [problem.workspace[node] for node in nodes],
            steps.alive[begin - 1] if begin else 0,
            steps.alive[end - 1],
        )  # fmt: skip

    def backwards(self) -> "_Span":
        """The same problem from its end: what begins ends, and what lies over another lies under it."""

        def turned(storage: _Storage) -> _Storage:
            size, bits, before, behind = storage
            return size, bits, behind, before

        return _Span(
            self.after,
            self.before,
            [list(map(turned, uses)) for uses in self.uses],
            [[(turned(under), turned(over)) for over, under in pairs] for pairs in self.may_overwrite],
            self.workspace,
            self.live_after,
            self.live,
        )

    def step(self, done: int, node: int, live: int) -> tuple[int, int]:
        """Bytes at a node's step and bytes alive after it, when these nodes have run, as bits."""
        left = ~(done | 1 << node)
        begun = ended = reused = 0
        for size, bits, before, behind in self.uses[node]:
            if not before and not bits & done:
                begun += size
            if not behind and not bits & left:
                ended += size
        if self.may_overwrite[node]:
            used: list[int] = []
            for (size, over, _, _), (_, under, before, _) in self.may_overwrite[node]:
                free = not under & left and (before or under & done)
                if free and not over & done and over not in used and under not in used:
                    reused += size
                    used += [over, under]
        return live + begun - reused + self.workspace[node], live + begun - ended

    def search(self, floor: int, below: int, effort: int) -> tuple[list[int] | None, bool, int]:
        """An order that needs less than ``below``, and among these least, or ``floor`` at most.

        Returns:
            The order, if there is one; whether that is certain; steps tried.
        """
        everything, tried = (1 << len(self.before)) - 1, 0
        ready = sum(1 << node for node, before in enumerate(self.before) if not before)
        heap = [(max(floor, self.live), 0, self.live, 0, ready)]
        came_from: dict[int, tuple[int, int]] = {}
        least = {0: heap[0][0]}
        while heap:
            peak, left, live, done, ready = heapq.heappop(heap)
            if done == everything:
                return self._path(came_from, done), True, tried
            if peak > least[done]:
                continue
            if tried > effort:
                return None, False, tried
            steps = list(self._steps(done, ready, live, peak, below))
            tried += max(1, len(steps))
            for node, need, after in steps:
                following, need = done | 1 << node, max(peak, need)
                if need < least.get(following, below):
                    least[following], came_from[following] = need, (done, node)
                    heapq.heappush(heap, (need, left - 1, after, following, self._ready(ready, following, node)))
        return None, True, tried

    def _steps(self, done: int, ready: int, live: int, peak: int, below: int) -> Iterator[tuple[int, int, int]]:
        """The nodes that may run next, bytes needed and alive after; only one, if no order gains by its waiting."""
        found = []
        while ready:
            lowest = ready & -ready
            ready ^= lowest
            need, after = self.step(done, node := lowest.bit_length() - 1, live)
            if need <= peak and after <= live:
                return iter([(node, need, after)])
            if need < below:
                found.append((node, need, after))
        return iter(found)

    def _ready(self, ready: int, done: int, node: int) -> int:
        ready &= ~(1 << node)
        after = self.after[node]
        while after:
            lowest = after & -after
            after ^= lowest
            if not self.before[lowest.bit_length() - 1] & ~done:
                ready |= lowest
        return ready

    @staticmethod
    def _path(came_from: dict[int, tuple[int, int]], done: int) -> list[int]:
        order = []
        while done:
            done, node = came_from[done]
            order.append(node)
        return order[::-1]


def _is_least(problem: OrderingProblem, steps: _OrderSteps) -> bool:
    """Whether every order needs as much at the node of the worst step: for what is written before it in all of them,
    and read after it in all.
    """
    worst = max(range(len(steps.order)), key=steps.need.__getitem__, default=-1)
    if worst < 0:
        return True
    node, count = steps.order[worst], len(steps.order)
    early, late = [False] * count, [False] * count
    early[node] = late[node] = True
    for each in reversed(steps.order[: worst + 1]):
        if early[each]:
            for source in problem.before[each]:
                early[source] = True
    for each in steps.order[worst:]:
        late[each] = late[each] or any(late[source] for source in problem.before[each])
    early[node] = late[node] = False
    own = set(problem.uses[node])
    others = [
        each
        for each, nodes in enumerate(problem.used_by)
        if each not in own
        and any(early[other] for other in nodes)
        and (problem.kept[each] or any(late[other] for other in nodes))
    ]
    return problem.at(node, others) >= steps.peak


def _by_parts(steps: _OrderSteps, left: list[int]) -> bool:
    """Order parts exactly, the worst first. Returns whether no order has a smaller peak."""
    ends = [0, *(step + 1 for step in _cuts(steps)), len(steps.order)]
    parts = sorted({(a, b) for a, b in pairwise(ends) if a < b},
                   key=lambda part: (-max(steps.need[part[0] : part[1]]), part))  # fmt: skip
    floor = max(steps.problem.at(node, ()) for node in range(len(steps.order)))
    for begin, end in parts:
        peak = max(steps.need[begin:end])
        if peak <= floor:
            return True
        if end - begin > _LONGEST or left[0] <= 0:
            return False
        if not _improve(steps, begin, end, floor, _EXACT, left):
            return False
        floor = max(floor, *steps.need[begin:end])
    return True


def _improve(steps: _OrderSteps, begin: int, end: int, floor: int, effort: int, left: list[int]) -> bool:
    """Put consecutive steps into the order with the smallest peak. Returns whether the search came to its end."""
    span = _Span.of(steps, begin, end)
    for turned in (True, False):
        one = span.backwards() if turned else span
        order, certain, tried = one.search(floor, max(steps.need[begin:end]), effort)
        left[0] -= tried
        if order:
            steps.replace(begin, span, order[::-1] if turned else order)
        if certain:
            return True
    return False


def _by_spans(steps: _OrderSteps, lengths: Sequence[int], effort: int, left: list[int], share: int) -> None:
    """Make the span around the worst step better, as long as one of these lengths helps and the share isn't spent."""
    count, better, reserve = len(steps.order), True, left[0] - share
    while better:
        better, peak = False, steps.peak
        worst = steps.need.index(peak)
        for length in lengths:
            for part in _AROUND:
                begin = max(0, worst - int(length * part))
                if better or left[0] <= reserve:
                    break
                end = min(count, begin + length)
                _improve(steps, begin, end, 0, effort, left)
                better = max(steps.need[begin:end]) < peak


def _cuts(steps: _OrderSteps) -> list[int]:
    """The steps whose nodes come before or after every other node in all orders.

    Before it there must be no node whose first reader stands behind it, and behind it none whose last source stands
    before it.
    """
    count = len(steps.order)
    first, last = [count] * count, [-1] * count
    for step, node in enumerate(steps.order):
        for source in steps.problem.before[node]:
            first[steps.step_of[source]] = min(first[steps.step_of[source]], step)
            last[step] = max(last[step], steps.step_of[source])
    reach, low = -1, [count] * (count + 1)
    for step in reversed(range(count)):
        low[step] = min(low[step + 1], last[step])
    found = []
    for step in range(count):
        if reach <= step <= low[step + 1]:
            found.append(step)
        reach = max(reach, first[step])
    return found
