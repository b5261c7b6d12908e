"""The rematerialization problem on integers, and what a schedule of it costs: bytes at every step, peak, time.

The memory model is that of Jain et al. 2020, "Checkmate", and Bartan et al. 2023, "Moccasin": in memory at a step are
the values it writes and every value that a later step reads before it is computed again.
"""

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Self

from memonger.errors import PlanError


@dataclass(frozen=True, slots=True)
class Problem:
    """Nodes 0 … n-1 in a topological order; what they read and write, as integers.

    Attributes:
        costs: Cost of one run of each node, ≥ 0, in any unit.
        reads: Values each node reads, without repeats. A value that no node writes is always in memory and counts in
            ``base`` only.
        writes: Values each node writes; each value has one writer, and its readers come after it.
        sizes: Bytes of each value, ≥ 0.
        recomputable: Whether each node may run more than once. The others run exactly once, and in the given order
            among themselves. Empty: all nodes may.
        pinned: Values whose first copy stays in memory to the end, such as a model's outputs. Other values that nobody
            reads live for their own step only.
        workspace: Bytes that the kernel of each node needs during its step. Empty: none.
        base: Bytes in use at every step: parameters, inputs.
        deadline: For each node another node, which is not recomputable, before which all its runs must be; or n. It is
            for nodes that read what is updated in place. Empty: none.
        inplace: For each node, values that it reads and of which it may overwrite one if nobody reads that copy later.
            Its step then takes that many bytes less. A pinned first copy is not overwritten. Empty: none.
        forward: Whether each node belongs to the forward pass; see `memonger.schedule.on_demand.forward_pass`. Empty:
            all do, as in inference.
        names: What errors call the nodes. Empty: their numbers.

    Raises:
        PlanError: there is no node; or a cost or size is negative; or the order isn't topological. The message names
            the node.
    """

    costs: tuple[float, ...]
    reads: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    recomputable: tuple[bool, ...] = ()
    pinned: tuple[int, ...] = ()
    workspace: tuple[int, ...] = ()
    base: int = 0
    deadline: tuple[int, ...] = ()
    inplace: tuple[tuple[int, ...], ...] = ()
    forward: tuple[bool, ...] = ()
    names: tuple[object, ...] = ()
    producer: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        n = len(self.costs)
        if not n:
            raise PlanError("the graph is empty: there is nothing to plan.")
        defaults = {
            "recomputable": (True,) * n,
            "workspace": (0,) * n,
            "deadline": (n,) * n,
            "inplace": ((),) * n,
            "forward": (True,) * n,
            "names": tuple(range(n)),
        }
        for name, default in defaults.items():
            if not getattr(self, name):
                object.__setattr__(self, name, default)
            if len(getattr(self, name)) != n:
                raise PlanError(f"there are {n} nodes, but {len(getattr(self, name))} entries in '{name}'.")
        producer = [-1] * len(self.sizes)
        for node, writes in enumerate(self.writes):
            for value in writes:
                if producer[value] >= 0:
                    raise PlanError(f"nodes {self.names[producer[value]]!r} and {self.names[node]!r} write one value.")
                producer[value] = node
        object.__setattr__(self, "producer", tuple(producer))
        for node, label in enumerate(self.names):
            if not 0 <= self.costs[node] < math.inf:
                raise PlanError(f"the cost of node {label!r} is {self.costs[node]}: it has to be finite and ≥ 0.")
            if self.workspace[node] < 0:
                raise PlanError(f"the workspace of node {label!r} is {self.workspace[node]} bytes: it has to be ≥ 0.")
            for value in self.writes[node]:
                if self.sizes[value] < 0:
                    raise PlanError(f"node {label!r} writes {self.sizes[value]} bytes: that has to be ≥ 0.")
            for value in self.reads[node]:
                if self.producer[value] >= node:
                    raise PlanError(f"node {label!r} comes before one whose value it reads.")
            for value in self.inplace[node]:
                if value not in self.reads[node] or self.producer[value] < 0:
                    raise PlanError(
                        f"node {label!r} may overwrite value {value}: it has to read it, and a node to write it."
                    )

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.costs)

    @property
    def schedule(self) -> tuple[int, ...]:
        """The schedule in which nothing is recomputed."""
        return tuple(range(len(self.costs)))

    @property
    def lower_bound(self) -> int:
        """Bytes that the step of some node needs in every schedule: no smaller budget is feasible."""
        sizes = self.sizes
        needed = (
            sum(sizes[v] for v in self.writes[node])
            + sum(sizes[v] for v in self.reads[node] if self.producer[v] >= 0)
            + self.workspace[node]
            - max((sizes[v] for v in self.inplace[node]), default=0)
            for node in range(self.nodes)
        )
        return self.base + max(max(needed), sum(sizes[v] for v in self.pinned))

    @classmethod
    def from_edges(
        cls,
        costs: Sequence[float],
        sizes: Sequence[int],
        edges: Iterable[tuple[int, int]],
        names: Sequence[object] = (),
        forward: Sequence[bool] = (),
    ) -> Self:
        """A problem in which node i writes value i, and an edge (a, b) says that b reads the value of a."""
        reads: list[dict[int, None]] = [{} for _ in costs]
        for source, target in edges:
            reads[target][source] = None
        every = range(len(costs))
        return cls(
            costs=tuple(costs),
            reads=tuple(tuple(sorted(r)) for r in reads),
            writes=tuple((i,) for i in every),
            sizes=tuple(sizes),
            forward=tuple(forward),
            names=tuple(names),
        )

    @classmethod
    def from_networkx(cls, graph: Any) -> Self:
        """A problem from a ``networkx.DiGraph`` whose nodes carry ``bytes`` and ``cost``; edges lead to readers.

        Nodes of a backward pass carry ``forward=False`` as well.

        The nodes are numbered in the topological order that is closest to the one they were added in; ``names`` has
        the graph's own. Sinks live to the end of their own step only.

        Raises:
            PlanError: there is a cycle, or no node, or a node without ``bytes`` or ``cost``, or with bad ones.
        """
        order = _topological(graph)
        number = {name: i for i, name in enumerate(order)}
        return cls.from_edges(
            [_attribute(graph, name, "cost", float) for name in order],
            [_attribute(graph, name, "bytes", operator.index) for name in order],
            [(number[a], number[b]) for a, b in graph.edges()],
            order,
            [bool(graph.nodes[name].get("forward", True)) for name in order],
        )


def _topological(graph: Any) -> list[Any]:
    """The graph's nodes in topological order, ties by the order in which they were added."""
    import networkx

    added = {name: number for number, name in enumerate(graph)}
    try:
        return list(networkx.lexicographical_topological_sort(graph, key=added.__getitem__))
    except networkx.NetworkXUnfeasible:
        (first, *_), *_ = networkx.find_cycle(graph)
        raise PlanError(f"the graph has a cycle through node {first!r}: a schedule needs a graph without.") from None


def _attribute(graph: Any, name: Any, key: str, convert: Any) -> Any:
    value = graph.nodes[name].get(key)
    try:
        return convert(value)
    except (TypeError, ValueError):
        what = "no" if value is None else f"a bad ({value!r})"
        needed = "its bytes as an integer" if key == "bytes" else "a number"
        raise PlanError(f"node {name!r} has {what} '{key}' attribute: give it {needed}.") from None


def weighed_by_bytes(problem: Problem) -> Problem:
    """The problem in which the cost of a node is the number of bytes that it reads and writes, and 1."""
    sizes, pairs = problem.sizes, zip(problem.reads, problem.writes, strict=True)
    return replace(problem, costs=tuple(1.0 + sum(sizes[v] for v in (*reads, *writes)) for reads, writes in pairs))


def cost(problem: Problem, schedule: Sequence[int]) -> float:
    """Sum of the costs of all steps."""
    return math.fsum(problem.costs[node] for node in schedule)


def memory(problem: Problem, schedule: Sequence[int]) -> list[int]:
    """Bytes at every step of the schedule, workspace and `Problem.base` included. Linear in its reads and writes.

    Raises:
        PlanError: the schedule isn't valid; see `check`.
    """
    check(problem, schedule)
    return usage(problem, schedule)[0]


def usage(problem: Problem, schedule: Sequence[int]) -> tuple[list[int], list[int]]:
    """`memory` of a valid schedule, and for each step the bytes it overwrites, which `memory` does not count."""
    steps = len(schedule)
    sizes, inplace = problem.sizes, problem.inplace
    change = [0] * (steps + 1)
    credit = [0] * steps
    begin = [-1] * len(sizes)
    end = [-1] * len(sizes)
    first = set(problem.pinned)

    def close(value: int) -> None:
        start, stop, size = begin[value], end[value], sizes[value]
        change[start] += size
        change[stop + 1] -= size
        if stop > start and value in inplace[schedule[stop]]:
            credit[stop] = max(credit[stop], size)

    for step, node in enumerate(schedule):
        for value in problem.reads[node]:
            if end[value] < step:
                end[value] = step
        for value in problem.writes[node]:
            if value in first and begin[value] < 0:
                change[step] += sizes[value]
                begin[value], end[value] = steps, steps
                continue
            if 0 <= begin[value] < steps:
                close(value)
            begin[value] = end[value] = step
    for value in range(len(sizes)):
        if 0 <= begin[value] < steps:
            close(value)
    live = accumulate(change[:steps], initial=problem.base)
    next(live)
    workspace = (problem.workspace[node] for node in schedule)
    return [alive + more - less for alive, more, less in zip(live, workspace, credit, strict=True)], credit


def peak(problem: Problem, schedule: Sequence[int]) -> int:
    """Bytes at the worst step."""
    return max(memory(problem, schedule))


def check(problem: Problem, schedule: Sequence[int]) -> None:
    """Check that a schedule runs every node after those it reads from, and only recomputable nodes more than once.

    Raises:
        PlanError: it is not valid. The message names the step and the node.
    """
    runs = [0] * problem.nodes
    last = -1
    for step, node in enumerate(schedule):
        name = problem.names[node]
        for value in problem.reads[node]:
            source = problem.producer[value]
            if source >= 0 and not runs[source]:
                raise PlanError(
                    f"step {step}, node {name!r}, reads what node {problem.names[source]!r} hasn't written."
                )
        if runs[node] and not problem.recomputable[node]:
            raise PlanError(f"step {step} runs node {name!r} again, which may run only once.")
        if not problem.recomputable[node]:
            if node < last:
                raise PlanError(f"step {step} runs node {name!r} after node {problem.names[last]!r}.")
            last = node
        if problem.deadline[node] < problem.nodes and runs[problem.deadline[node]]:
            raise PlanError(f"step {step} runs node {name!r} after node {problem.names[problem.deadline[node]]!r}.")
        runs[node] += 1
    if 0 in runs:
        raise PlanError(f"node {problem.names[runs.index(0)]!r} doesn't run.")


@dataclass(frozen=True, slots=True)
class ScheduleFigures:
    """A valid schedule, and what it costs.

    Attributes:
        schedule: Node ids; every occurrence of a node after its first is a recomputation.
        peak: Bytes at the worst step.
        cost: Sum over all steps.
        overhead: Cost beyond that of running each node once, as a fraction of it.
        others: Schedules within the same budget that were found on the way, the cheapest first.
    """

    schedule: tuple[int, ...]
    peak: int
    cost: float
    overhead: float
    others: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, problem: Problem, schedule: tuple[int, ...]) -> Self:
        """What a schedule takes.

        Raises:
            PlanError: it isn't valid.
        """
        once, total = cost(problem, problem.schedule), cost(problem, schedule)
        return cls(schedule, peak(problem, schedule), total, total / once - 1 if once else 0.0)
