"""A schedule that can be changed step by step, with the bytes at every step kept up to date.

Time is a grid: n stages of n slots, and a run of node i in stage j stands at label ``j * n + i``. In the given order
node i runs in stage i; a recomputation of i for the sake of step j stands in stage j, where ids order the steps, so a
label says which node runs, and every reader in a stage comes after what it reads there. (Checkmate's and Moccasin's
stages are the same, but hold no node whose number is above the stage's; here nodes move to earlier stages, too.) Left
out: the same node twice in a stage.

A change costs O(d log n) for the d values the node reads and writes, and as many vector operations on the steps by
which their lifetimes change; whoever changes something can go back to an earlier state.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from memonger.recompute.problem import Problem


class Timeline:
    """The steps of a schedule by label, and the bytes at each.

    Attributes:
        labels: Of all steps, ascending.
        copies: For each node the labels of its runs, ascending.
        reads: For each value the labels of the steps that read it, ascending.
        cost: Of all steps.
        journal: Labels added (as they are) and removed (inverted), since the beginning.
        changes: How many additions and removals there have been, also those taken back: the effort.
    """

    def __init__(self, problem: Problem, labels: Iterable[int] = ()) -> None:
        self.problem = problem
        self.n = n = problem.nodes
        self.end = n * n
        self.sizes = problem.sizes
        self.inputs = [[v for v in reads if problem.producer[v] >= 0] for reads in problem.reads]
        self.own = [
            problem.workspace[i] + sum(problem.sizes[v] for v in problem.writes[i]) for i in range(n)
        ]
        self.pinned = [False] * len(problem.sizes)
        for value in problem.pinned:
            self.pinned[value] = True
        self.fixed = [not problem.recomputable[i] or any(self.pinned[v] for v in problem.writes[i]) for i in range(n)]
        self.latest = [d * n + d if d < n else n * n for d in problem.deadline]
        self.changes = 0
        self.load(labels or [i * n + i for i in range(n)])

    def load(self, labels: Iterable[int]) -> None:
        """Start again from these steps."""
        self.labels = sorted(labels)
        self.copies: list[list[int]] = [[] for _ in range(self.n)]
        self.reads: list[list[int]] = [[] for _ in self.sizes]
        for label in self.labels:
            node = label % self.n
            self.copies[node].append(label)
            for value in self.inputs[node]:
                self.reads[value].append(label)
        self.cost = sum(self.problem.costs[label % self.n] for label in self.labels)
        self.journal: list[int] = []
        self._held = np.zeros(max(16, 2 * len(self.labels)), np.int64)
        self._measure()

    def _measure(self) -> None:
        count = len(self.labels)
        change = [0] * (count + 1)
        place = {label: i for i, label in enumerate(self.labels)}
        for value, size in enumerate(self.sizes):
            node = self.problem.producer[value]
            for turn, label in enumerate(self.copies[node] if node >= 0 else ()):
                stop = place[self.until(value, label)] if turn or not self.pinned[value] else count - 1
                change[place[label]] += size
                change[stop + 1] -= size
        scratch = [self.problem.workspace[label % self.n] for label in self.labels]
        self._held[:count] = np.cumsum(np.array(change[:count], np.int64)) + np.array(scratch, np.int64)
        self._held[:count] += self.problem.base

    @property
    def held(self) -> NDArray[np.int64]:
        """Bytes at each step, as a view."""
        return self._held[: len(self.labels)]

    def schedule(self) -> tuple[int, ...]:
        """The steps as node ids."""
        return tuple(label % self.n for label in self.labels)

    def next_copy(self, node: int, label: int) -> int:
        """Label of the node's next run after this label, or `end`."""
        copies = self.copies[node]
        at = bisect_right(copies, label)
        return copies[at] if at < len(copies) else self.end

    def source(self, value: int, label: int) -> int:
        """Label of the copy that a step at this label reads, or -1."""
        copies = self.copies[self.problem.producer[value]]
        at = bisect_left(copies, label)
        return copies[at - 1] if at else -1

    def until(self, value: int, copy: int) -> int:
        """Label of the last step that needs this copy of the value: the copy's own label if nobody reads it."""
        reads = self.reads[value]
        at = bisect_left(reads, self.next_copy(self.problem.producer[value], copy))
        return reads[at - 1] if at and reads[at - 1] > copy else copy

    def add(self, label: int) -> None:
        """Run the node of this label there. What it reads lives on until then; its readers after it read this copy.

        There is a copy of each value it reads before that, and no step at the label.
        """
        node, labels, count = label % self.n, self.labels, len(self.labels)
        at = bisect_left(labels, label)
        if count == len(self._held):
            self._held = np.concatenate((self._held, np.zeros_like(self._held)))
        held, own = self._held, self.own
        if at < count:
            here = int(held[at]) - own[labels[at] % self.n] + own[node]
            held[at + 1 : count + 1] = held[at:count]
        else:
            here = self.problem.base + sum(self.sizes[v] for v in self.problem.pinned) + own[node]
        held[at] = here
        labels.insert(at, label)
        self._add_copy(node, label, at)
        for value in self.inputs[node]:
            self._add_read(value, label, at)
        self.cost += self.problem.costs[node]
        self.changes += 1
        self.journal.append(label)

    def _add_copy(self, node: int, label: int, at: int) -> None:
        copies, held = self.copies[node], self._held
        place = bisect_left(copies, label)
        before = copies[place - 1] if place else -1
        after = copies[place] if place < len(copies) else self.end
        copies.insert(place, label)
        for value in self.problem.writes[node]:
            reads, size = self.reads[value], self.sizes[value]
            i = bisect_left(reads, label)
            if size and i < len(reads) and reads[i] < after and not (place == 1 and self.pinned[value]):
                last = reads[i - 1] if i and reads[i - 1] > before else before
                held[bisect_right(self.labels, last) : at + 1] -= size
            elif size and place == 1 and self.pinned[value]:
                held[at + 1 : bisect_right(self.labels, self.until(value, label))] += size

    def _add_read(self, value: int, label: int, at: int) -> None:
        reads, size = self.reads[value], self.sizes[value]
        i = bisect_left(reads, label)
        copies = self.copies[self.problem.producer[value]]
        c = bisect_left(copies, label)
        if size and not (c == 1 and self.pinned[value]):
            after = copies[c] if c < len(copies) else self.end
            if not (i < len(reads) and reads[i] < after):
                before = copies[c - 1]
                last = reads[i - 1] if i and reads[i - 1] > before else before
                self._held[bisect_right(self.labels, last) : at + 1] += size
        reads.insert(i, label)

    def remove(self, label: int) -> None:
        """Take this step out: its readers read the copy before it, which there has to be if there are any."""
        node, labels, held = label % self.n, self.labels, self._held
        at = bisect_left(labels, label)
        for value in self.inputs[node]:
            self._remove_read(value, label, at)
        self._remove_copy(node, label, at)
        count = len(labels)
        held[at : count - 1] = held[at + 1 : count]
        del labels[at]
        self.cost -= self.problem.costs[node]
        self.changes += 1
        self.journal.append(~label)

    def _remove_read(self, value: int, label: int, at: int) -> None:
        reads, size = self.reads[value], self.sizes[value]
        i = bisect_left(reads, label)
        del reads[i]
        copies = self.copies[self.problem.producer[value]]
        c = bisect_left(copies, label)
        if size and not (c == 1 and self.pinned[value]):
            after = copies[c] if c < len(copies) else self.end
            if not (i < len(reads) and reads[i] < after):
                before = copies[c - 1]
                last = reads[i - 1] if i and reads[i - 1] > before else before
                self._held[bisect_right(self.labels, last) : at + 1] -= size

    def _remove_copy(self, node: int, label: int, at: int) -> None:
        copies, held = self.copies[node], self._held
        place = bisect_left(copies, label)
        before = copies[place - 1] if place else -1
        after = copies[place + 1] if place + 1 < len(copies) else self.end
        for value in self.problem.writes[node]:
            reads, size = self.reads[value], self.sizes[value]
            i = bisect_left(reads, label)
            if size and i < len(reads) and reads[i] < after and not (place == 1 and self.pinned[value]):
                last = reads[i - 1] if i and reads[i - 1] > before else before
                held[bisect_right(self.labels, last) : at + 1] += size
            elif size and place == 1 and self.pinned[value]:
                held[at + 1 : bisect_right(self.labels, self.until(value, label))] -= size
        del copies[place]

    def rollback(self, mark: int) -> None:
        """Take back every change after the journal was of this length."""
        while len(self.journal) > mark:
            entry = self.journal.pop()
            if entry >= 0:
                self.remove(entry)
            else:
                self.add(~entry)
            self.journal.pop()

    def unread(self, label: int) -> bool:
        """Whether the node runs elsewhere, too, and nobody reads the copies it writes here."""
        node = label % self.n
        copies = self.copies[node]
        if len(copies) < 2 or self.fixed[node] and copies[0] == label:
            return False
        after = self.next_copy(node, label)
        for value in self.problem.writes[node]:
            reads = self.reads[value]
            i = bisect_left(reads, label)
            if i < len(reads) and reads[i] < after:
                return False
        return True

    def prune(self, pending: list[int]) -> None:
        """Remove those of these steps that are unread, and then those that only they read."""
        while pending:
            label = pending.pop()
            node = label % self.n
            copies = self.copies[node]
            i = bisect_left(copies, label)
            if i == len(copies) or copies[i] != label or not self.unread(label):
                continue
            sources = [self.source(value, label) for value in self.inputs[node]]
            self.remove(label)
            pending.extend(source for source in sources if source >= 0)
