"""The cheapest schedule within a budget, by Dijkstra's algorithm over (what has run, what is alive)."""

import heapq
from collections.abc import Iterator

from memonger.schedule.problem import Problem

State = tuple[int, int, int]
"""Nodes that have run and values that are alive, as bits; the last node that ran again in this stage, or -1."""


def slow_memory(problem: Problem, schedule: tuple[int, ...]) -> list[int]:
    """Bytes at every step, straight from the definition: a value is alive if a later step reads that very copy."""

    def read_later(value: int, copy: int, step: int) -> bool:
        if value in problem.pinned and problem.producer[value] not in schedule[:copy]:
            return True
        for later in range(step, len(schedule)):
            if later > copy and value in problem.reads[schedule[later]]:
                return True
            if later > step and value in problem.writes[schedule[later]]:
                return False
        return False

    def later(step: int) -> range:
        return range(step + 1, len(schedule))

    found = []
    for step, node in enumerate(schedule):
        held = problem.base + problem.workspace[node]
        sources = {v: max(s for s in range(step) if v in problem.writes[schedule[s]]) for v in problem.inplace[node]}
        dying = [
            v
            for v, copy in sources.items()
            if not any(
                v in problem.reads[schedule[s]] and _latest(problem, schedule, v, s) == copy for s in later(step)
            )
            and not (v in problem.pinned and problem.producer[v] not in schedule[:copy])
        ]
        held -= max((problem.sizes[v] for v in dying), default=0)
        for copy in range(step + 1):
            for value in problem.writes[schedule[copy]]:
                again = any(value in problem.writes[schedule[s]] for s in range(copy + 1, step + 1))
                pinned = value in problem.pinned and schedule[copy] not in schedule[:copy]
                if copy == step or pinned or (not again and read_later(value, copy, step)):
                    held += problem.sizes[value]
        found.append(held)
    return found


def _latest(problem: Problem, schedule: tuple[int, ...], value: int, step: int) -> int:
    return max(s for s in range(step) if value in problem.writes[schedule[s]])


def cheapest(problem: Problem, budget: int, given_order: bool) -> tuple[int, ...] | None:
    """The cheapest schedule, or None.

    Args:
        problem: Small.
        budget: Bytes.
        given_order: First runs are in the given order, and between two of them nodes run again by ascending id.
    """
    done = (1 << problem.nodes) - 1
    heap: list[tuple[float, State, tuple[int, ...]]] = [(0.0, (0, 0, -1), ())]
    seen: set[State] = set()
    while heap:
        cost, state, schedule = heapq.heappop(heap)
        if state in seen:
            continue
        seen.add(state)
        if state[0] == done:
            return schedule
        for node, following in _steps(problem, budget, state, given_order):
            if following not in seen:
                more = () if node < 0 else (node,)
                added = 0.0 if node < 0 else problem.costs[node]
                heapq.heappush(heap, (cost + added, following, schedule + more))
    return None


def _steps(problem: Problem, budget: int, state: State, given_order: bool) -> Iterator[tuple[int, State]]:
    run, alive, last = state
    for value in range(len(problem.sizes)):
        if alive >> value & 1 and value not in problem.pinned:
            yield -1, (run, alive & ~(1 << value), last)
    fixed = [node for node, free in enumerate(problem.recomputable) if not free]
    for node in range(problem.nodes):
        again = bool(run >> node & 1)
        if not all(alive >> v & 1 or problem.producer[v] < 0 for v in problem.reads[node]):
            continue
        if not problem.recomputable[node] and (again or any(not run >> f & 1 for f in fixed if f < node)):
            continue
        if problem.deadline[node] < problem.nodes and run >> problem.deadline[node] & 1:
            continue
        if given_order and (node <= last if again else run != (1 << node) - 1):
            continue
        after = alive
        twice = 0
        for value in problem.writes[node]:
            twice += problem.sizes[value] if again and value in problem.pinned else 0
            after |= 1 << value
        for gone in (-1, *(v for v in problem.inplace[node] if v not in problem.pinned)):
            left = after if gone < 0 else after & ~(1 << gone)
            held = sum(size for value, size in enumerate(problem.sizes) if left >> value & 1) + twice
            if problem.base + held + problem.workspace[node] <= budget:
                yield node, (run | 1 << node, left, (node if again else -1) if given_order else -1)
