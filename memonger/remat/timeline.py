"""A schedule that can be changed step by step, with the bytes at every step kept up to date.

Steps stand on a line of integers: each has a label, and there is room for further ones between any two, so a change
renames nothing (order maintenance with labels so long that they hardly ever have to be spread anew).

A change costs O(d log n) for the d values the node reads and writes, and as many vector operations on the steps by
which their lifetimes change; whoever changes something can go back to an earlier state.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from memonger.remat.problem import Problem, usage

_SPACE = 1 << 1024
"""Between two labels of a schedule just loaded: room for some hundred insertions at the worst place in a row."""


class CrowdedError(Exception):
    """There is no room for a step between two others. The timeline is as before; load its schedule anew and go on."""


class Timeline:
    """The steps of a schedule by label, and the bytes at each.

    Attributes:
        labels: Of all steps, ascending.
        node: The node that runs at each label.
        copies: For each node the labels of its runs, ascending.
        reads: For each value the labels of the steps that read it, ascending.
        cost: Of all steps.
        journal: (label, node) of every step added, and (inverted label, node) of every step removed.
        moving: Whether a first run may vanish that nobody reads any more.
        over: For each node the values it may overwrite; see `Problem.inplace`.
        work: Additions and removals, also those taken back, and what else callers count: some 10 µs each.
    """

    def __init__(self, problem: Problem, schedule: Iterable[int] = ()) -> None:
        self.problem = problem
        self.n = n = problem.nodes
        self.sizes = problem.sizes
        self.inputs = [[v for v in reads if problem.producer[v] >= 0] for reads in problem.reads]
        self.own = [problem.workspace[i] + sum(problem.sizes[v] for v in problem.writes[i]) for i in range(n)]
        self.pinned = [False] * len(problem.sizes)
        for value in problem.pinned:
            self.pinned[value] = True
        self.over = problem.inplace
        self._overwritten = [False] * len(problem.sizes)
        for values in problem.inplace:
            for value in values:
                self._overwritten[value] = self.sizes[value] > 0
        self.fixed = [not problem.recomputable[i] or any(self.pinned[v] for v in problem.writes[i]) for i in range(n)]
        self.work = 0
        self.moving = True
        self.load(schedule or problem.schedule)

    def load(self, schedule: Iterable[int]) -> None:
        """Start again from this schedule."""
        steps = list(schedule)
        self.labels = [place * _SPACE for place in range(1, len(steps) + 1)]
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
        self._credit: dict[int, int] = {}  # bytes of the value that the step at a label overwrites, where there are any
        self._changed: list[int] = []  # labels whose credit may be another now
        self._held = np.zeros(max(16, 2 * len(steps)), np.int64)
        held, credit = usage(self.problem, steps)
        self._held[: len(steps)] = np.array(held, np.int64)
        self._credit.update((label, less) for label, less in zip(self.labels, credit, strict=True) if less)

    def _settle(self) -> None:
        """Bring the credits of changed steps up to date."""
        changed, credit = self._changed, self._credit
        while changed:
            label = changed.pop()
            now = 0
            for value in self.over[self.node[label]]:
                size = self.sizes[value]
                if size > now and self._dies(value, label):
                    now = size
            less = now - credit.get(label, 0)
            if less:
                self._held[bisect_left(self.labels, label)] -= less
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
    def held(self) -> NDArray[np.int64]:
        """Bytes at each step, as a view."""
        return self._held[: len(self.labels)]

    def schedule(self) -> tuple[int, ...]:
        """The steps as node ids."""
        return tuple(self.node[label] for label in self.labels)

    def between(self, anchor: int, count: int) -> list[int]:
        """So many new labels right before this one, ascending.

        Raises:
            CrowdedError: no room.
        """
        at = bisect_left(self.labels, anchor)
        before = self.labels[at - 1] if at else 0
        width = (anchor - before) // (count + 1)
        if not width:
            raise CrowdedError
        return [before + width * (i + 1) for i in range(count)]

    def limit(self, node: int) -> int:
        """The label before which the node has to run."""
        deadline = self.problem.deadline[node]
        return self.copies[deadline][0] if deadline < self.n else self.end

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

    def add(self, label: int, node: int) -> None:
        """Run the node at this label. What it reads lives on until then; its readers after it read this copy.

        There is a copy of each value it reads before that, and no step at the label.
        """
        labels, count = self.labels, len(self.labels)
        at = bisect_left(labels, label)
        if count == len(self._held):
            self._held = np.concatenate((self._held, np.zeros_like(self._held)))
        held, own = self._held, self.own
        if at < count:
            next_ = labels[at]
            here = int(held[at]) + self._credit.get(next_, 0) - own[self.node[next_]] + own[node]
            held[at + 1 : count + 1] = held[at:count]
        else:
            here = self.problem.base + sum(self.sizes[v] for v in self.problem.pinned) + own[node]
        held[at] = here
        labels.insert(at, label)
        self.node[label] = node
        self._add_copy(node, label, at)
        for value in self.inputs[node]:
            self._add_read(value, label, at)
        if self.over[node]:
            self._changed.append(label)
        if self._changed:
            self._settle()
        self.cost += self.problem.costs[node]
        self.work += 1 + len(self.inputs[node]) // 4
        self.journal.append((label, node))

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
                self._note(value, last)
            elif size and place == 1 and self.pinned[value]:
                held[at + 1 : bisect_right(self.labels, self.until(value, label))] += size
                self._note(value, self.until(value, label))

    def _add_read(self, value: int, label: int, at: int) -> None:
        reads, size = self.reads[value], self.sizes[value]
        i = bisect_left(reads, label)
        self._hold_for_read(value, label, at, i, size)
        reads.insert(i, label)

    def _hold_for_read(self, value: int, label: int, at: int, i: int, size: int) -> None:
        """Add ``size`` to the steps that hold the value for this read alone; ``i`` is its place among the others."""
        reads, copies = self.reads[value], self.copies[self.problem.producer[value]]
        c = bisect_left(copies, label)
        if size and not (c == 1 and self.pinned[value]):
            after = copies[c] if c < len(copies) else self.end
            if not (i < len(reads) and reads[i] < after):
                before = copies[c - 1]
                last = reads[i - 1] if i and reads[i - 1] > before else before
                self._held[bisect_right(self.labels, last) : at + 1] += size
                self._note(value, last)

    def _note(self, value: int, label: int) -> None:
        """The step at this label has become, or is no more, the last that reads a copy of the value."""
        if self._overwritten[value] and value in self.over[self.node[label]]:
            self._changed.append(label)

    def remove(self, label: int) -> None:
        """Take this step out: its readers read the copy before it, which there has to be if there are any."""
        node, labels, held = self.node[label], self.labels, self._held
        at = bisect_left(labels, label)
        for value in self.inputs[node]:
            self._remove_read(value, label, at)
        self._remove_copy(node, label, at)
        count = len(labels)
        held[at : count - 1] = held[at + 1 : count]
        del labels[at], self.node[label]
        self._credit.pop(label, None)
        if self._changed:
            self._settle()
        self.cost -= self.problem.costs[node]
        self.work += 1 + len(self.inputs[node]) // 4
        self.journal.append((~label, node))

    def _remove_read(self, value: int, label: int, at: int) -> None:
        reads, size = self.reads[value], self.sizes[value]
        i = bisect_left(reads, label)
        del reads[i]
        self._hold_for_read(value, label, at, i, -size)

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
                self._note(value, last)
            elif size and place == 1 and self.pinned[value]:
                held[at + 1 : bisect_right(self.labels, self.until(value, label))] -= size
                self._note(value, self.until(value, label))
        del copies[place]

    def rollback(self, mark: int) -> None:
        """Take back every change after the journal was of this length."""
        while len(self.journal) > mark:
            label, node = self.journal.pop()
            if label >= 0:
                self.remove(label)
            else:
                self.add(~label, node)
            self.journal.pop()

    def unread(self, label: int) -> bool:
        """Whether the node runs elsewhere, too, and nobody reads the copies it writes here."""
        node = self.node[label]
        copies = self.copies[node]
        if len(copies) < 2 or (copies[0] == label and (self.fixed[node] or not self.moving)):
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
            if label not in self.node or not self.unread(label):
                continue
            sources = [self.source(value, label) for value in self.inputs[self.node[label]]]
            self.remove(label)
            pending.extend(source for source in sources if source >= 0)
