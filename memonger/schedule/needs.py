"""What nodes need of the arena, whatever their order: the problem that `memonger.schedule.least_peak` searches."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from memonger.graph.graph import Graph
from memonger.graph.liveness import roots


@dataclass(frozen=True, slots=True)
class Needs:
    """What nodes need of the arena. A storage is the values that are always in the same bytes.

    Attributes:
        before: For each node those that must run before it.
        sizes: Bytes of each storage.
        kept: Whether it is there when the run ends.
        touched: The storages that each node reads or writes; one is alive from the first to the last such node.
        touching: The nodes that read or write each storage.
        over: For each node pairs of storages of which the first, written there, may lie over the second, read there.
        workspace: Bytes of each node.
    """

    before: Sequence[Sequence[int]]
    sizes: Sequence[int]
    kept: Sequence[bool]
    touched: Sequence[Sequence[int]]
    touching: Sequence[Sequence[int]]
    over: Sequence[Sequence[tuple[int, int]]]
    workspace: Sequence[int]

    @classmethod
    def of(cls, graph: Graph) -> "Needs":
        """What a graph needs where all shares bytes that may; what windows save is estimated."""
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
        touched = [
            tuple(dict.fromkeys(each for value in (*reads, *writes) for each in held[value]))
            for reads, writes in zip(graph.reads, graph.writes, strict=True)
        ]
        bytes_of = tuple(sizes.values())
        touching: list[list[int]] = [[] for _ in range(len(sizes))]
        for node, storages in enumerate(touched):
            for each in storages:
                touching[each].append(node)
        # For each node those it reads from and, if it overwrites something, the other readers of that
        before = [list(sources) for sources in graph.sources]
        for update, overwritten in enumerate(graph.overwritten):
            for old in overwritten:
                before[update].extend(reader for reader in graph.readers[old] if reader != update)
        return cls(
            before=[tuple(dict.fromkeys(each)) for each in before],
            sizes=bytes_of,
            kept=tuple(each in outputs for each in range(len(sizes))),
            touched=touched,
            touching=touching,
            over=[tuple(_over(graph, storage, node, bytes_of)) for node in range(len(graph.nodes))],
            workspace=graph.workspace,
        )

    def at(self, node: int, others: Sequence[int]) -> int:
        """Bytes at the step of a node while these other storages, which it doesn't touch, are alive."""
        own = sum(self.sizes[each] for each in self.touched[node])
        inside = {under: self.sizes[over] for over, under in self.over[node]}
        return own + self.workspace[node] - sum(inside.values()) + sum(self.sizes[each] for each in others)


def _over(graph: Graph, storage: Sequence[int], node: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    reads = Counter(storage[value] for value in graph.reads[node]) if graph.inplace[node] else Counter[int]()
    for source, target in graph.inplace[node]:
        under, over = storage[source], storage[target]
        if under >= 0 and over not in (-1, under) and reads[under] == 1 and sizes[under] == graph.sizes[source]:
            yield over, under
