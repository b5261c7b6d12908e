"""The greedy algorithm: recompute values until a timeline is within its budget, then remove what is redundant.

At the step with the most bytes, every value that lies there unread may be dropped and computed again before its next
use, together with those of its inputs that are dead by then. Of these moves the one is made that takes away the most
bytes × steps above the budget for the cost it adds, and so on until the timeline is within the budget. At the end every
recomputation that the budget does not need is removed, the most expensive first.

Beyond this plain algorithm, a recomputation may also run earlier, where its inputs die anyway; a dead input is kept
instead of recomputed where there is room; nodes move (a first run that nobody reads any more is removed, a last reader
may run earlier); and scores may be perturbed.
"""

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from memonger.schedule.timeline import Timeline

_LONGEST = 400
"""Most nodes that one recomputation may run, its inputs included."""
_EPSILON = 1e-9
"""Stands for a cost of 0 where a score is divided by a cost."""
_MANY = 4
"""Nodes of a recomputation from which on it is looked at whether it can lower the excess, before it is tried."""
_NEARLY = 0.8
"""A move is made at once if its score is at least this fraction of the best score still estimated."""


@dataclass(frozen=True, slots=True)
class GreedyOptions:
    """Settings of `fit_budget`.

    Attributes:
        plain: Only what the plain algorithm does.
        noise: Returns a random factor for the score of one candidate.
        pick_step: Given the number of steps above the budget, returns which of them is worked on next. None: the step
            with the most bytes.
        cost_limit: Gives up as soon as the schedule costs more than this.
        bulk: Makes several moves at a step before it looks for candidates again; for large problems.
        tried: How many of the candidates with the best estimates are tried.
    """

    plain: bool = False
    noise: Callable[[], float] | None = None
    pick_step: Callable[[int], int] | None = None
    cost_limit: float = inf
    bulk: bool = False
    tried: int = 12


Move = tuple[int, int, int]
"""A node, the label of the step before which it is to run, and the label of a run to remove or -1."""


def excess(timeline: Timeline, budget: int) -> int:
    """Bytes above the budget, summed over all steps."""
    return int(np.maximum(timeline.memory - budget, 0).sum())


def fit_budget(timeline: Timeline, budget: int, options: GreedyOptions, expired: Callable[[], bool]) -> bool:
    """Recompute until the timeline is within the budget.

    Args:
        timeline: Changed.
        budget: Bytes.
        options: Settings.
        expired: Whether to give up.

    Returns:
        Whether it is. It is not if no single move lowers the excess any more, or it gave up.
    """
    above = excess(timeline, budget)
    while above:
        if timeline.cost > options.cost_limit or expired():
            return False
        turn = _apply_in_bulk if options.bulk else _apply_best
        chosen = turn(timeline, budget, above, _worst(timeline, budget, options), options)
        if chosen is None:
            return False
        above = chosen
    return True


def _worst(timeline: Timeline, budget: int, options: GreedyOptions) -> int:
    """Index of the step to work on."""
    memory = timeline.memory
    if options.pick_step is None:
        return int(memory.argmax())
    over = np.flatnonzero(memory > budget)
    return int(over[options.pick_step(len(over))])


def _apply_best(timeline: Timeline, budget: int, above: int, at: int, options: GreedyOptions) -> int | None:
    """Make the best move at this step. Returns the excess in bytes after it, or None if no move lowers the excess."""
    candidates = list(_promising(timeline, budget, at, options))
    candidates.sort(key=lambda c: (-c[0], c[1]))
    timeline.work += 5 + len(candidates) + len(timeline.sizes) // 20
    best: tuple[float, Move] | None = None
    for index, (promise, move, saved) in enumerate(candidates):
        if best is not None and (promise <= best[0] or (not options.plain and index >= options.tried)):
            break
        nodes = chain(timeline, move, budget, keep=not options.plain)
        if _is_vain(timeline, move, nodes, budget, min(above, saved)) or (
            best is not None
            and options.noise is None  # which is drawn for each move that is tried
            and saved <= best[0] * sum(timeline.problem.costs[each] for each in nodes)
        ):
            _charge(timeline, nodes)
            continue
        mark, before = timeline.mark(), timeline.cost
        apply(timeline, move, nodes)
        gain = above - excess(timeline, budget)
        added = timeline.cost - before
        timeline.rollback(mark)
        if gain <= 0:
            continue
        score = gain / max(added, _EPSILON)
        if options.noise is not None:
            score *= options.noise()
        if best is None or score > best[0]:
            best = score, move
    if best is None:
        return None
    changes = len(timeline.journal)
    apply(timeline, best[1], chain(timeline, best[1], budget, keep=not options.plain))
    return excess(timeline, budget) if options.plain else _merge(timeline, budget, changes)


def _merge(timeline: Timeline, budget: int, changes: int) -> int:
    """Keep what was added after so many changes until a later run, and remove that, if it adds no excess.

    Returns:
        The excess in bytes.
    """
    above = excess(timeline, budget)
    for label, node in timeline.journal[changes:]:
        later = timeline.next_copy(node, label) if label in timeline.node else timeline.end
        if later == timeline.end:
            continue
        before = timeline.mark()
        remove_recomputation(timeline, later)
        after = excess(timeline, budget)
        if after > above:
            timeline.rollback(before)
        else:
            above = after
    return above


def _apply_in_bulk(timeline: Timeline, budget: int, above: int, at: int, options: GreedyOptions) -> int | None:
    """Make moves at this step until it is within the budget, the best first. Returns what `_apply_best` returns.

    Scores fall as moves are made, so the first of the heap is scored anew, and made if it is still the first (Minoux
    1978, "Accelerated greedy algorithms for maximizing submodular set functions").
    """
    worst, begin = timeline.labels[at], above
    noise = options.noise or (lambda: 1.0)
    heap = [
        (-promise * (factor := noise()), move, factor) for promise, move, _ in _promising(timeline, budget, at, options)
    ]
    heapq.heapify(heap)
    timeline.work += len(heap)
    while heap and timeline.memory[bisect_left(timeline.labels, worst)] > budget:
        _, move, factor = heapq.heappop(heap)
        if not _current(timeline, worst, move):
            continue
        nodes = chain(timeline, move, budget, keep=True)
        if _is_vain(timeline, move, nodes, budget, above):
            _charge(timeline, nodes)
            continue
        mark, before = timeline.mark(), timeline.cost
        apply(timeline, move, nodes)
        gain = above - excess(timeline, budget)
        score = factor * gain / max(timeline.cost - before, _EPSILON)
        if gain > 0 and (not heap or -score <= _NEARLY * heap[0][0]):
            above = _merge(timeline, budget, mark.changes)
            continue
        timeline.rollback(mark)
        if gain > 0:
            heapq.heappush(heap, (-score, move, factor))
    return above if above < begin else None


def _current(timeline: Timeline, worst: int, move: Move) -> bool:
    """Whether a move is still possible and useful after other moves were made."""
    node, anchor, gone = move
    if worst not in timeline.node or anchor not in timeline.node:
        return False
    if gone >= 0:
        if gone not in timeline.node or len(timeline.copies[node]) > 1 or anchor > worst:
            return False
        return 0 <= _earliest(timeline, gone) <= anchor  # what it reads may have moved behind the anchor
    turn = bisect_left(timeline.copies[node], anchor)
    return turn > 0 and timeline.copies[node][turn - 1] < worst


def _promising(timeline: Timeline, budget: int, at: int, options: GreedyOptions) -> Iterator[tuple[float, Move, float]]:
    """Moves at this step, each with upper bounds on the bytes × steps it takes away: per cost, and in all.

    The latter is infinite where another run may become superfluous, as the move may then cost less than what it runs.
    """
    above = np.maximum(timeline.memory - budget, 0)
    bytes_to = [0, *np.cumsum(above).tolist()]
    steps_to = [0, *np.cumsum(above > 0).tolist()]
    costs, sizes, labels, copies = timeline.problem.costs, timeline.sizes, timeline.labels, timeline.copies
    for value, begin, stop in idle_values(timeline, labels[at]):
        node = timeline.problem.producer[value]
        low, high = bisect_right(labels, begin), bisect_left(labels, stop)
        low -= value in timeline.overwrites[timeline.node[begin]]  # that step then overwrites it
        saved = min(bytes_to[high] - bytes_to[low], sizes[value] * (steps_to[high] - steps_to[low]))
        movable = begin == copies[node][0]  # then a first run may just move, for free
        price = _EPSILON if movable else max(costs[node], _EPSILON)
        most = inf if begin in copies[node] else saved
        if not timeline.fixed[node]:
            for anchor in _anchors(timeline, node, at, stop, options.plain):
                yield saved / price, (node, anchor, -1), most
        if not options.plain and timeline.last_use(value, stop) == stop:
            anchor = _earliest(timeline, stop)
            if 0 <= anchor <= labels[at]:
                yield saved / _EPSILON, (timeline.node[stop], anchor, stop), inf


def idle_values(timeline: Timeline, label: int) -> Iterator[tuple[int, int, int]]:
    """Values alive at a step that neither reads nor writes them, as (value, label of last use, label of next use).

    Values that the step reads but could overwrite, if they were not used later, count as well.
    """
    over = timeline.overwrites[timeline.node[label]]
    copies, reads, producer = timeline.copies, timeline.reads, timeline.problem.producer
    for value, size in enumerate(timeline.sizes):
        if not size or not reads[value] or reads[value][-1] <= label or timeline.pinned[value]:
            continue
        uses = reads[value]
        after = bisect_left(uses, label)
        if uses[after] == label:
            after += 1
            if value not in over:
                continue
        runs = copies[producer[value]]
        turn = bisect_right(runs, label)
        if not turn or runs[turn - 1] == label or (turn < len(runs) and runs[turn] < uses[after]):
            continue
        source = runs[turn - 1]
        begin = uses[after - 1] if after and uses[after - 1] > source else source
        yield value, begin, uses[after]


def _anchors(timeline: Timeline, node: int, worst: int, stop: int, plain: bool) -> Iterator[int]:
    """Labels before which the node may run again for the reader at ``stop``, all of them after the worst step."""
    labels, limit = timeline.labels, timeline.limit(node)
    if stop <= limit:
        yield stop
    if plain:
        return
    seen = {stop}
    anchors = [_before_larger(timeline, node, stop)]
    for value in timeline.inputs[node]:
        dies = timeline.last_use(value, stop)
        anchors.append(labels[bisect_right(labels, dies)] if dies < stop else stop)
    for anchor in anchors:
        if anchor not in seen and labels[worst] < anchor < stop and anchor <= limit:
            seen.add(anchor)
            yield anchor


def _before_larger(timeline: Timeline, node: int, stop: int) -> int:
    """The first label of the uninterrupted recomputations of larger ids than the node's right before ``stop``."""
    labels = timeline.labels
    at = bisect_left(labels, stop)
    while at:
        other = timeline.node[labels[at - 1]]
        if other < node or timeline.copies[other][0] == labels[at - 1]:
            break
        at -= 1
    return labels[at]


def _earliest(timeline: Timeline, label: int) -> int:
    """The label before which the only run of a node may run at the earliest, or -1."""
    node = timeline.node[label]
    if timeline.fixed[node] or len(timeline.copies[node]) > 1:
        return -1
    first = max((timeline.source(value, label) for value in timeline.inputs[node]), default=-1)
    return timeline.labels[bisect_right(timeline.labels, first)] if first >= 0 else -1


def apply(timeline: Timeline, move: Move, nodes: Sequence[int]) -> None:
    """Make a move: run these nodes, which `chain` returns for it, then remove the runs that nobody reads any more."""
    _, anchor, gone = move
    for label, each in zip(
        timeline.add(anchor, nodes), nodes, strict=True
    ):  # only now: a run that nobody reads any more may be what the next of them reads
        copies = timeline.copies[each]
        turn = bisect_left(copies, label)
        if turn and timeline.unread(copies[turn - 1]):
            timeline.prune([copies[turn - 1]])
    if gone >= 0:
        remove_recomputation(timeline, gone)


def _charge(timeline: Timeline, nodes: Sequence[int]) -> None:
    """Count a move that isn't tried as much as if it were: so the same moves are made with the same effort."""
    timeline.work += 2 * sum(timeline.weight[each] for each in nodes)


def _is_vain(timeline: Timeline, move: Move, nodes: Sequence[int], budget: int, saved: float) -> bool:
    """Whether what a move runs takes as much above the budget as the move may save: then it lowers no excess.

    Looked at where it runs many nodes, as to try them takes long. In memory at these steps is what is there right
    before the anchor, but for what they compute again, and what they read of one another.
    """
    node, anchor, gone = move
    if len(nodes) < _MANY or gone >= 0:
        return False
    sizes, own, inputs, writes = timeline.sizes, timeline.own, timeline.inputs, timeline.problem.writes
    again = sum(own[each] for each in nodes if each == node or len(writes[each]) > 1)
    live, dying = timeline.before(anchor) - again - budget, dict[int, int]()
    step_of = {value: step for step, each in enumerate(nodes) for value in inputs[each]}  # the last that reads it
    for step, each in enumerate(nodes):
        less = max((sizes[value] for value in timeline.overwrites[each]), default=0)
        saved -= max(0, live + own[each] - less)
        if saved <= 0:
            return True
        for value in writes[each]:
            if value in step_of:
                live += sizes[value]
                dying[step_of[value]] = dying.get(step_of[value], 0) + sizes[value]
        live -= dying.pop(step, 0)
    return False


def chain(timeline: Timeline, move: Move, budget: int, keep: bool) -> list[int]:
    """What a move runs: the node and the producers of its dead inputs, and of theirs, in the order they must run in.

    Args:
        timeline: Only its work changes.
        move: What is to be done.
        budget: Bytes.
        keep: Whether a dead input that fits into the budget until then is kept, rather than computed again.
    """
    node, anchor, _ = move
    producer, at = timeline.problem.producer, bisect_left(timeline.labels, anchor)
    most = np.maximum.accumulate(timeline.memory[:at][::-1]) if keep else None  # of the last steps before the anchor
    seen = {node}
    pending, order = [(node, iter(timeline.inputs[node]))], list[int]()
    while pending:
        current, left = pending[-1]
        for value in left if len(seen) < _LONGEST else ():
            source = producer[value]
            if source not in seen and _dead(timeline, value, anchor, budget, most):
                seen.add(source)
                pending.append((source, iter(timeline.inputs[source])))
                break
        else:
            order.append(current)
            pending.pop()
    timeline.work += len(order) // 2
    return order


def _dead(timeline: Timeline, value: int, anchor: int, budget: int, most: NDArray[np.int64] | None) -> bool:
    """Whether the value has to be computed again to be read right before the anchor.

    Given the most bytes of the last steps before the anchor, it needn't if it fits into the budget from its last use
    on.
    """
    node = timeline.problem.producer[value]
    if timeline.fixed[node]:
        return False
    last = timeline.last_use(value, anchor)
    if last >= anchor or anchor > timeline.limit(node):
        return False
    if most is None:
        return True
    steps = len(most) - bisect_right(timeline.labels, last)
    return steps > 0 and bool(most[steps - 1] + timeline.sizes[value] > budget)


def remove_redundant(timeline: Timeline, budget: int, expired: Callable[[], bool]) -> None:
    """Remove every recomputation without which the timeline is still within the budget, the most expensive first."""
    costs, node = timeline.problem.costs, timeline.node
    again = True
    while again and not expired():
        again = False
        extra = [label for copies in timeline.copies for label in copies[1:]]
        timeline.work += len(extra) + len(timeline.sizes) // 20
        for label in sorted(extra, key=lambda label: (-costs[node[label]], label)):
            again |= label in node and remove_if_redundant(timeline, label, budget)


def remove_if_redundant(timeline: Timeline, label: int, budget: int) -> bool:
    """Remove a run other than the node's first if the budget does not need it. Returns whether it was removed."""
    node = timeline.node[label]
    if timeline.copies[node][0] == label or not _may_fit(timeline, label, budget):
        return False
    mark = timeline.mark()
    remove_recomputation(timeline, label)
    if int(timeline.memory.max()) > budget:
        timeline.rollback(mark)
        return False
    return True


def remove_recomputation(timeline: Timeline, label: int) -> None:
    """Remove a run other than the node's first, and the runs that only it reads."""
    sources = [timeline.source(value, label) for value in timeline.inputs[timeline.node[label]]]
    timeline.remove(label)
    timeline.prune(sources)


def _may_fit(timeline: Timeline, label: int, budget: int) -> bool:
    """A quick necessary condition for `remove_if_redundant`: its values must be kept until then, its inputs not."""
    node = timeline.node[label]
    freed = sum(timeline.sizes[value] for value in timeline.inputs[node])
    longest, needed = label, 0
    for value in timeline.problem.writes[node]:
        if timeline.until(value, label) > label:
            longest = min(longest, timeline.last_use(value, label))
            needed = max(needed, timeline.sizes[value])
    low, high = bisect_right(timeline.labels, longest), bisect_left(timeline.labels, label)
    return high <= low or int(timeline.memory[low:high].max()) + needed - freed <= budget
