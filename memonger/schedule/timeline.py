"""A schedule that can be changed step by step, with the bytes at every step kept up to date.

Each step has an integer label, and steps run in the order of their labels. There is room for further labels between any
two, so that adding a step changes no other label (order maintenance, with labels so long that relabelling is rare, and
short enough that they are looked up quickly).

A change takes O(d log n) time for the d values that the node reads and writes, and one vector operation on the steps by
which the live range of each of them changes. Changes can be rolled back.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memonger.schedule.problem import Problem, usage

_SPACE = 1 << 240
"""Distance of two labels in a schedule just loaded: room for some two hundred insertions in a row at one index."""


_FEW = 16
"""Spans that are added one by one; of more, the bytes at which each begins and ends are summed up."""

Span = tuple[int, int, int]
"""Index of the first step, of the one after the last, and bytes."""


class CrowdedError(Exception):
    """There is no label left between two steps. The timeline has not changed: load its schedule anew and go on."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A state of a timeline: what was in its journals by then, the labels of its steps, and the bytes at each."""

    changes: int
    credits: int
    labels: list[int]
    memory: NDArray[np.int64]


class Timeline:
    """The steps of a schedule by label, and the bytes at each.

    Attributes:
        labels: Of all steps, ascending.
        node: The node that runs at each label.
        copies: For each node the labels of its runs, ascending.
        reads: For each value the labels of the steps that read it, ascending.
        cost: Of all steps.
        journal: (label, node) of every step added, and (inverted label, node) of every step removed.
        first_runs_move: Whether the first run of a node is removed when nobody reads it any more.
        weight: Of each node, what `work` grows by where a step of it is added or removed.
        overwrites: For each node the values it may overwrite; see `Problem.inplace`.
        work: Number of steps added and removed, rollbacks included, and what else callers add. One takes some 10 µs.
    """

    def __init__(self, problem: Problem, schedule: Iterable[int] = ()) -> None:
        self.problem = problem
        self.n = n = problem.nodes
        self.sizes = problem.sizes
        self.inputs = [[v for v in reads if problem.producer[v] >= 0] for reads in problem.reads]
        self.own = [problem.workspace[i] + sum(problem.sizes[v] for v in problem.writes[i]) for i in range(n)]
        self.weight = [1 + len(values) // 4 for values in self.inputs]
        self.pinned = [False] * len(problem.sizes)
        for value in problem.pinned:
            self.pinned[value] = True
        self.overwrites = problem.inplace
        self._overwritten = [False] * len(problem.sizes)
        for values in problem.inplace:
            for value in values:
                self._overwritten[value] = self.sizes[value] > 0
        self.fixed = [not problem.recomputable[i] or any(self.pinned[v] for v in problem.writes[i]) for i in range(n)]
        self.work = 0
        self.first_runs_move = True
        self.load(schedule or problem.schedule)

    def load(self, schedule: Iterable[int]) -> None:
        """Start again from this schedule."""
        steps = list(schedule)
        self.labels = [index * _SPACE for index in range(1, len(steps) + 1)]
        self.node = dict(zip(self.labels, steps, strict=True))
        self.end = (len(steps) + 1) * _SPACE
        self.copies: list[list[int]] = [[] for _ in range(self.n)]
        self.reads: list[list[int]] = [[] for _ in self.sizes]
        for label, node in self.node.items():
            self.copies[node].append(label)
            for value in self.inputs[node]:
                self.reads[value].append(label)
        self.cost = sum(self.problem.costs[node] for node in steps)
        self.journal: list[tuple[int, int]] = []
        self._credit: dict[int, int] = {}  # label → bytes that its step overwrites, if any
        self._credits: list[tuple[int, int]] = []  # (label, its credit before), of every change of that
        self._changed: list[int] = []  # labels whose credit may have changed
        self._memory = np.zeros(max(16, 2 * len(steps)), np.int64)
        memory, credit = usage(self.problem, steps)
        self._memory[: len(steps)] = np.array(memory, np.int64)
        self._credit.update((label, less) for label, less in zip(self.labels, credit, strict=True) if less)

    def _settle(self) -> None:
        """Update the bytes that changed steps overwrite."""
        changed, credit = self._changed, self._credit
        while changed:
            label = changed.pop()
            now = 0
            for value in self.overwrites[self.node[label]]:
                size = self.sizes[value]
                if size > now and self._dies(value, label):
                    now = size
            less = now - credit.get(label, 0)
            if less:
                self._memory[bisect_left(self.labels, label)] -= less
                self._credits.append((label, credit.get(label, 0)))
                credit[label] = now

    def _dies(self, value: int, label: int) -> bool:
        """Whether the step at this label is the last that needs the copy of the value it reads."""
        reads, copies = self.reads[value], self.copies[self.problem.producer[value]]
        copy = bisect_left(copies, label)
        if copy == 1 and self.pinned[value]:
            return False
        i = bisect_right(reads, label)
        return i == len(reads) or (copy < len(copies) and copies[copy] < reads[i])

    @property
    def memory(self) -> NDArray[np.int64]:
        """Bytes at each step, as a view."""
        return self._memory[: len(self.labels)]

    def schedule(self) -> tuple[int, ...]:
        """The node ids of all steps in order."""
        return tuple(map(self.node.__getitem__, self.labels))

    def between(self, anchor: int, count: int) -> list[int]:
        """New labels right before this one, ascending.

        Raises:
            CrowdedError: there is no room for so many.
        """
        at = bisect_left(self.labels, anchor)
        before = self.labels[at - 1] if at else 0
        width = (anchor - before) // (count + 1)
        if not width:
            raise CrowdedError
        return [before + width * (i + 1) for i in range(count)]

    def limit(self, node: int) -> int:
        """The label before which the node must run."""
        deadline = self.problem.deadline[node]
        return self.copies[deadline][0] if deadline < self.n else self.end

    def next_copy(self, node: int, label: int) -> int:
        """Label of the node's next run after this label, or `end`."""
        copies = self.copies[node]
        at = bisect_right(copies, label)
        return copies[at] if at < len(copies) else self.end

    def source(self, value: int, label: int) -> int:
        """Label of the run whose copy of the value a step at this label reads, or -1."""
        copies = self.copies[self.problem.producer[value]]
        at = bisect_left(copies, label)
        return copies[at - 1] if at else -1

    def until(self, value: int, copy: int) -> int:
        """Label of the last step that needs this copy of the value: the copy's own label if nobody reads it."""
        reads = self.reads[value]
        at = bisect_left(reads, self.next_copy(self.problem.producer[value], copy))
        return reads[at - 1] if at and reads[at - 1] > copy else copy

    def last_use(self, value: int, label: int) -> int:
        """`until` of the copy that a step at this label reads, or would read."""
        copies, reads = self.copies[self.problem.producer[value]], self.reads[value]
        turn = bisect_left(copies, label)
        copy = copies[turn - 1] if turn else -1
        at = bisect_left(reads, copies[turn] if turn < len(copies) else self.end)
        return reads[at - 1] if at and reads[at - 1] > copy else copy

    def before(self, anchor: int) -> int:
        """Bytes in memory right before the step at the anchor."""
        at = bisect_left(self.labels, anchor)
        return int(self._memory[at]) + self._credit.get(anchor, 0) - self.own[self.node[anchor]]

    def add(self, anchor: int, nodes: Sequence[int]) -> list[int]:
        """Run these nodes one after the other right before the step at the anchor, and return their labels.

        What they read stays in memory until then, and later readers read the new copies. Every value that one of them
        reads must have a copy before it.

        Raises:
            CrowdedError: there is no room for so many. Nothing has changed.
        """
        added, at, count = self.between(anchor, len(nodes)), bisect_left(self.labels, anchor), len(self.labels)
        while count + len(added) > len(self._memory):
            self._memory = np.concatenate((self._memory, np.zeros_like(self._memory)))
        memory, own, stop = self._memory, self.own, at + len(added)
        before = self.before(anchor)
        memory[stop : count + len(added)] = memory[at:count]
        memory[at:stop] = [before + own[node] for node in nodes]
        self.labels[at:at] = added
        spans: list[Span] = []
        for turn, (label, node) in enumerate(zip(added, nodes, strict=True), at + 1):
            self.node[label] = node
            copies = self.copies[node]
            index = bisect_left(copies, label)
            copies.insert(index, label)
            self._spans_of_copy(node, index, turn, spans)
            for value in self.inputs[node]:
                reads = self.reads[value]
                i = bisect_left(reads, label)
                self._span_of_read(value, label, turn, i, spans)
                reads.insert(i, label)
            if self.overwrites[node]:
                self._changed.append(label)
            self.cost += self.problem.costs[node]
            self.work += self.weight[node]
            self.journal.append((label, node))
        self._spread(spans, 1)
        if self._changed:
            self._settle()
        return added

    def _spans_of_copy(self, node: int, index: int, stop: int, spans: list[Span]) -> None:
        """How a node's index-th copy changes the bytes: steps before it needn't keep the copy before for its readers.

        A first copy that is pinned is kept all the same.
        """
        copies = self.copies[node]
        label, before = copies[index], copies[index - 1] if index else -1
        after = copies[index + 1] if index + 1 < len(copies) else self.end
        for value in self.problem.writes[node]:
            reads, size = self.reads[value], self.sizes[value]
            if not size:
                continue
            if index == 1 and self.pinned[value]:
                last = self.until(value, label)
                spans.append((stop, bisect_right(self.labels, last), size))
                self._note(value, last)
                continue
            i = bisect_left(reads, label)
            if i < len(reads) and reads[i] < after:
                last = reads[i - 1] if i and reads[i - 1] > before else before
                spans.append((bisect_right(self.labels, last), stop, -size))
                self._note(value, last)

    def _span_of_read(self, value: int, label: int, stop: int, i: int, spans: list[Span]) -> None:
        """The steps that keep the value for the read at this label only; ``i`` is its index among the other reads."""
        reads, copies = self.reads[value], self.copies[self.problem.producer[value]]
        c = bisect_left(copies, label)
        if i < len(reads) and (c == len(copies) or reads[i] < copies[c]):
            return
        size = self.sizes[value]
        if size and not (c == 1 and self.pinned[value]):
            before = copies[c - 1]
            last = reads[i - 1] if i and reads[i - 1] > before else before
            spans.append((bisect_right(self.labels, last), stop, size))
            self._note(value, last)

    def _spread(self, spans: list[Span], sign: int) -> None:
        """Add the bytes of each span to its steps, or take them away."""
        memory = self._memory
        if len(spans) < _FEW:
            for start, stop, size in spans:
                memory[start:stop] += sign * size
            return
        starts, stops, sizes = np.array(spans, np.int64).T
        first, end = int(starts.min()), int(stops.max())
        change = np.zeros(end - first + 1, np.int64)
        np.add.at(change, starts - first, sizes)
        np.subtract.at(change, stops - first, sizes)
        memory[first:end] += sign * np.cumsum(change[:-1])

    def _note(self, value: int, label: int) -> None:
        """Remember that the step at this label began or ceased to be the last reader of a copy of the value."""
        if self._overwritten[value] and value in self.overwrites[self.node[label]]:
            self._changed.append(label)

    def remove(self, label: int) -> None:
        """Remove this step. Its readers read the copy before it; if it has readers, there must be one."""
        node, labels, memory = self.node[label], self.labels, self._memory
        at = bisect_left(labels, label)
        spans: list[Span] = []
        for value in self.inputs[node]:
            reads = self.reads[value]
            i = bisect_left(reads, label)
            del reads[i]
            self._span_of_read(value, label, at + 1, i, spans)
        copies = self.copies[node]
        index = bisect_left(copies, label)
        self._spans_of_copy(node, index, at + 1, spans)
        del copies[index]
        self._spread(spans, -1)
        count = len(labels)
        memory[at : count - 1] = memory[at + 1 : count]
        del labels[at], self.node[label]
        if label in self._credit:
            self._credits.append((label, self._credit.pop(label)))
        if self._changed:
            self._settle()
        self.cost -= self.problem.costs[node]
        self.work += self.weight[node]
        self.journal.append((~label, node))

    def mark(self) -> Mark:
        """What `rollback` needs to come back to this state. It holds until the next `load`."""
        return Mark(len(self.journal), len(self._credits), self.labels.copy(), self.memory.copy())

    def rollback(self, mark: Mark) -> None:
        """Undo every change since this mark, which is several times as fast as to make them backwards."""
        while len(self.journal) > mark.changes:
            label, node = self.journal.pop()
            if label >= 0:
                # Undo the addition of a step, all but its bytes
                del self.node[label]
                copies = self.copies[node]
                del copies[bisect_left(copies, label)]
                for value in self.inputs[node]:
                    reads = self.reads[value]
                    del reads[bisect_left(reads, label)]
                self.cost -= self.problem.costs[node]
            else:
                # Undo the removal of a step, all but its bytes
                self.node[~label] = node
                for labels in (self.copies[node], *(self.reads[value] for value in self.inputs[node])):
                    insort(labels, ~label)
                self.cost += self.problem.costs[node]
            self.work += self.weight[node]
        while len(self._credits) > mark.credits:
            label, credit = self._credits.pop()
            self._credit[label] = credit
        self.labels[:] = mark.labels
        self._memory[: len(mark.labels)] = mark.memory

    def unread(self, label: int) -> bool:
        """Whether the node also runs elsewhere and nobody reads the copies it writes at this label."""
        node = self.node[label]
        copies = self.copies[node]
        if len(copies) < 2 or (copies[0] == label and (self.fixed[node] or not self.first_runs_move)):
            return False
        after = self.next_copy(node, label)
        for value in self.problem.writes[node]:
            reads = self.reads[value]
            i = bisect_left(reads, label)
            if i < len(reads) and reads[i] < after:
                return False
        return True

    def prune(self, pending: list[int]) -> None:
        """Remove those of these steps that nobody reads, then the steps that only these read, and so on."""
        while pending:
            label = pending.pop()
            if label not in self.node or not self.unread(label):
                continue
            sources = [self.source(value, label) for value in self.inputs[self.node[label]]]
            self.remove(label)
            pending.extend(source for source in sources if source >= 0)
