"""The planner's frozen, integer view of a model. Searches and allocators see this and no ONNX object."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import onnx_ir as ir

from memonger.errors import PlanError
from memonger.graph import aliasing, costs
from memonger.ir.marks import AGAIN
from memonger.ir.operators import RANKS, WAIT, facts, operator_name
from memonger.ir.parts import is_marked
from memonger.ir.values import LARGEST, all_values, dense, nbytes, read_values, subgraphs
from memonger.shapes.inference import run_time_sized
from memonger.units import ALIGNMENT as ALIGNMENT

Pair = tuple[int, int]

Part = tuple[int, int, int]

Kind = Literal["view", "inplace", "runtime", "update", "append", "subview", "optional"]


class Alias(NamedTuple):
    """Two values that a node lets share bytes.

    Attributes:
        kind: How; what each means is said where the values lie:

            - ``view``: the same bytes where they have one address. Nothing is computed.
            - ``inplace``: the target may overwrite the source, which dies there.
            - ``runtime``: the target isn't planned, and the runtime may make it the source's bytes: the source stays
              alive as long as the target.
            - ``update``: the target is the new content of a persistent input of the model, or of a part of one, and is
              written over it: after that nothing may read the old one. Such targets aren't planned.
            - ``append``: the target is a persistent input with more behind it, and lies where that does: the old
              content stays. Neither is planned.
            - ``subview``: the source lies inside the target, from a byte of it on: what the node reads inside what it
              writes, or the other way round. A part or a view of a persistent input always lies inside it, and neither
              is planned. So do parts that chunks mark, wherever they can.
            - ``optional``: a subview that is a choice of who lays out.
        source: The value that the node reads, or the part.
        target: The value that it writes, or the whole.
        byte: Of a subview the part's first byte in the whole.
    """

    kind: Kind
    source: int
    target: int
    byte: int = 0


LARGEST_COST = 1e100
"""Of all nodes together: costs are added and multiplied, which must not overflow."""


@dataclass(frozen=True)  # without slots, as it keeps its indexes once they are made
class Graph:
    """Nodes, values, sizes and costs of a model with static shapes, as dense integers.

    Values are numbered: first what is there before the run (inputs, initializers), then the outputs of the nodes
    in file order. Nodes are numbered in file order, which is a topological order.

    Attributes:
        nodes: A unique name for every node.
        ops: The operator of every node, as ``domain::op`` or ``op``.
        values: A unique name for every value.
        sizes: Bytes of every value; 0 where only the runtime knows.
        planned: Whether the value gets an address in the arena. What the runtime holds itself isn't planned:
            inputs, initializers, strings, sequences, empty tensors, sizes only the run can tell, and shapes.
        reads: Values each node reads, those its subgraphs capture included, without repeats; of a node that updates
            also what it has to come after (see `from_model`).
        writes: Values each node writes.
        outputs: Values that have to be there when the run ends.
        aliases: Which values of each node may share bytes. Empty: none.
        forward: Whether the node computes the model's own outputs or the loss; the others are the backward pass and
            updates.
        costs: Cost of one run of each node: seconds where measured, else an estimate in bytes (`costs`).
        workspace: Bytes of workspace each node's kernel takes beside the arena; 0 where not measured.
        again: Of each node that computes something again the name of the node that it is a copy of; empty of all
            others. Empty: of all.
    """

    nodes: tuple[str, ...]
    ops: tuple[str, ...]
    values: tuple[str, ...]
    sizes: tuple[int, ...]
    planned: tuple[bool, ...]
    reads: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]
    forward: tuple[bool, ...]
    costs: tuple[float, ...]
    workspace: tuple[int, ...]
    aliases: tuple[tuple[Alias, ...], ...] = ()
    again: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check that bytes and costs can be added up: layouts count in 64 bits.

        Raises:
            PlanError: they can't.
        """
        for name, nothing in (("aliases", ()), ("again", "")):
            if not getattr(self, name):
                object.__setattr__(self, name, (nothing,) * len(self.nodes))
        total = sum(self.sizes) + sum(self.workspace)
        if min((0, *self.sizes, *self.workspace)) < 0 or total >= LARGEST:
            bad = min(range(len(self.sizes)), key=lambda v: (self.sizes[v] >= 0, -self.sizes[v]), default=0)
            raise PlanError(
                f"all values together take {total} bytes, and at most 2**62 can be planned: "
                f"'{self.values[bad]}' has {self.sizes[bad]}."
            )
        if not sum(self.costs) <= LARGEST_COST:
            bad = max(range(len(self.costs)), key=lambda node: self.costs[node])
            raise PlanError(
                f"the costs of all nodes add up to {sum(self.costs):g}, and at most {LARGEST_COST:g} can be compared: "
                f"'{self.nodes[bad]}' costs {self.costs[bad]:g}."
            )

    def with_aliases(self, **of_kind: Sequence[Sequence[tuple[int, ...]]]) -> "Graph":
        """The graph with others of some kinds, by kind: of each node (source, target), or (source, target, byte).

        Those of kinds that aren't named stay.
        """
        nodes = range(len(self.nodes))
        kept = [tuple(alias for alias in aliases if alias.kind not in of_kind) for aliases in self.aliases]
        given = [tuple(Alias(kind, *one) for kind, each in of_kind.items() for one in each[n]) for n in nodes]  # type: ignore[arg-type]
        return replace(self, aliases=tuple((*one, *other) for one, other in zip(kept, given, strict=True)))

    def _pairs(self, kind: Kind) -> tuple[tuple[Pair, ...], ...]:
        return tuple(tuple(alias[1:3] for alias in own if alias.kind == kind) if own else () for own in self.aliases)

    @cached_property
    def views(self) -> tuple[tuple[Pair, ...], ...]:
        """The (source, target) pairs of each node that are the same bytes where they have one address."""
        return self._pairs("view")

    @cached_property
    def inplace(self) -> tuple[tuple[Pair, ...], ...]:
        """The pairs of each node where the target may overwrite the source."""
        return self._pairs("inplace")

    @cached_property
    def runtime_aliases(self) -> tuple[tuple[Pair, ...], ...]:
        """The pairs of each node where the runtime may make the target the source's bytes."""
        return self._pairs("runtime")

    @cached_property
    def updates(self) -> tuple[tuple[Pair, ...], ...]:
        """The pairs of each node where the target is written over a persistent input, as its new content."""
        return self._pairs("update")

    @cached_property
    def appends(self) -> tuple[tuple[Pair, ...], ...]:
        """The pairs of each node where the target is a persistent input with more behind it."""
        return self._pairs("append")

    @cached_property
    def subviews(self) -> tuple[tuple[Part, ...], ...]:
        """Of each node (part, whole, byte) where one may lie inside the other, optional or not."""
        inside = ("subview", "optional")
        return tuple(tuple(alias[1:] for alias in own if alias.kind in inside) if own else () for own in self.aliases)

    @cached_property
    def optional(self) -> tuple[bool, ...]:
        """Whether a node's subviews are a choice of who lays out."""
        return tuple(any(alias.kind == "optional" for alias in own) for own in self.aliases)

    @cached_property
    def producer(self) -> tuple[int, ...]:
        """The node that writes each value; -1 for what is there before the run."""
        producers = [-1] * len(self.values)
        for node, writes in enumerate(self.writes):
            for value in writes:
                producers[value] = node
        return tuple(producers)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """The nodes that read each value, in file order."""
        readers: list[list[int]] = [[] for _ in self.values]
        for node, reads in enumerate(self.reads):
            for value in reads:
                readers[value].append(node)
        return tuple(map(tuple, readers))

    @cached_property
    def runs(self) -> tuple[str, ...]:
        """Of each node its name, or that of the node which it computes again."""
        return tuple(again or name for name, again in zip(self.nodes, self.again, strict=True))

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """Of each value the one that it is a copy of, where the graph has that; else itself."""
        number, firsts = {name: node for node, name in enumerate(self.nodes)}, list(range(len(self.values)))
        for name, writes in zip(self.again, self.writes, strict=True):
            of_first = self.writes[number[name]] if name in number else ()
            if len(of_first) == len(writes):
                for value, first in zip(writes, of_first, strict=True):
                    firsts[value] = first
        return tuple(firsts)

    @cached_property
    def copies(self) -> frozenset[int]:
        """Values that nodes compute again."""
        written = (writes for again, writes in zip(self.again, self.writes, strict=True) if again)
        return frozenset(value for writes in written for value in writes)

    @cached_property
    def parts(self) -> frozenset[int]:
        """Values that chunks made a part of another planned one."""
        taken = (alias for own in self.aliases for alias in own if alias.kind == "subview")
        return frozenset(alias.source for alias in taken if self.planned[alias.target])

    @cached_property
    def collectives(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Nodes that wait for a collective, each with the values it adds up, which lie side by side."""
        nodes = (node for node, op in enumerate(self.ops) if op.startswith(f"{RANKS}::{WAIT}"))
        return tuple((node, tuple(source for source, _ in self.inplace[node])) for node in nodes)

    @cached_property
    def kept(self) -> tuple[Part, ...]:
        """Parts and views of persistent inputs, each with its input and its first byte there: no node has to run."""
        return tuple(sorted({part for parts in self.subviews for part in parts if not self.planned[part[0]]}))

    @cached_property
    def persistent(self) -> frozenset[int]:
        """Values that nodes write and that lie with persistent inputs: new contents, and parts and views of these."""
        return frozenset((*(new for pairs in self.updates for _, new in pairs), *(part for part, *_ in self.kept)))

    @cached_property
    def overwritten(self) -> tuple[tuple[int, ...], ...]:
        """For each node the values whose bytes its updates write over: persistent inputs, parts and views of these.

        A part that has an update of its own is written over by that.
        """
        own = {old for pairs in self.updates for old, _ in pairs}
        parts: dict[int, list[int]] = {}
        for part, whole, _ in self.kept:
            if part not in own:
                parts.setdefault(whole, []).append(part)
        return tuple(tuple(v for old, _ in pairs for v in (old, *parts.get(old, ()))) for pairs in self.updates)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Values that lie side by side: those that a collective adds up."""
        return tuple(members for _, members in self.collectives)

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """The nodes that each node reads from, each once, in the order of its inputs."""
        return tuple(_unique(self.producer[v] for v in reads if self.producer[v] >= 0) for reads in self.reads)

    @cached_property
    def before(self) -> tuple[tuple[int, ...], ...]:
        """The nodes that must run before each: those it reads from, and the other readers of what it writes over."""
        first = ((reader for old in each for reader in self.readers[old]) for each in self.overwritten)
        return tuple(
            _unique((*sources, *(reader for reader in readers if reader != node)))
            for node, (sources, readers) in enumerate(zip(self.sources, first, strict=True))
        )


def from_model(
    model: ir.Model,
    *,
    seconds: Mapping[str, float] | None = None,
    workspace: Mapping[str, int] | None = None,
    updates: Mapping[str, str] | None = None,
    apart: Collection[str] = (),
    after: Collection[str] = (),
    results: Collection[str] | None = None,
    host: Collection[str] = (),
    provider: str = aliasing.CPU,
) -> Graph:
    """The graph of a lowered model.

    Args:
        model: Every node and value named. What has no size is the runtime's.
        seconds: Measured time of each node, by name.
        workspace: Measured workspace of each node in bytes, by name.
        updates: Persistent input → the output that is its new content, by name. Outputs that can't be written over
            their input where they are computed are planned as any other.
        apart: Names of values with memory of their own: they aren't planned.
        after: Names of the outputs that say whether a step may update anything: every node that writes over a
            persistent input reads them too, so that it comes after them in any schedule.
        results: Names of the outputs of the forward pass; None: all outputs.
        host: Names of values that lie elsewhere than on the device: they aren't planned.
        provider: Whose kernels run the model: onnxruntime's name for it.

    Raises:
        PlanError: as `Graph`.
    """
    values, nodes = list(dict.fromkeys(v for v in all_values(model.graph) if v.name)), list(model.graph)
    number = {value: index for index, value in enumerate(values)}
    cuts = _parts_of_inputs(model, updates or {}, provider, is_step=bool(after))
    known_sizes = [nbytes(v) for v in values]
    unplanned = {*run_time_sized(model), *cuts, *(v for v in values if v.name in host or not dense(v))}
    computed = [(v, size, v.producer()) for v, size in zip(values, known_sizes, strict=True) if v not in unplanned]
    in_arena = {v for v, size, node in computed if size and node is not None and not facts(node).shape_only}
    waited_for = [v for v in model.graph.outputs if v.name in after and v.producer() is not None]
    replaced = _in_place_updates(model, updates or {}, in_arena, provider, needed_by(waited_for), cuts)
    elsewhere = {new for pairs in replaced.values() for _, new in pairs} | {v for v in values if v.name in apart}
    planned = tuple(v in in_arena and v not in elsewhere for v in values)
    own = tuple(_unique(number[v] for v in read_values(node) if v in number) for node in nodes)
    writes = tuple(tuple(number[v] for v in node.outputs if v.name) for node in nodes)
    late = [number[v] for v in waited_for]
    sizes = tuple(size or 0 for size in known_sizes)
    rules = _PairFinder(number, sizes, planned, values, elsewhere, cuts)
    growing = _growths(model, updates or {}, elsewhere, provider)
    aliases, views = list[tuple[Alias, ...]](), list[tuple[Pair, ...]]()
    for node, read in zip(nodes, own, strict=True):
        is_taken = is_marked(node) or not cuts.keys().isdisjoint(node.outputs)
        views.append(rules.pairs(node, aliasing.view_pairs(node, provider)))
        of_kind: tuple[tuple[Kind, Iterable[tuple[int, ...]]], ...] = (
            ("view", views[-1]),
            ("inplace", rules.pairs(node, aliasing.inplace_pairs(node, provider))),
            ("runtime", rules.runtime_aliases(node, read)),
            ("update", ((number[a], number[b]) for a, b in replaced.get(node, ()))),
            ("append", ((number[a], number[b]) for a, b in growing.get(node, ()))),
            ("subview" if is_taken else "optional", rules.subviews(node, aliasing.windows(node, provider))),
        )
        aliases.append(tuple(Alias(kind, *one) for kind, found in of_kind for one in found))
    forward = needed_by(v for v in model.graph.outputs if results is None or v.name in results)
    return Graph(
        nodes=tuple(str(node.name) for node in nodes),
        ops=tuple(map(operator_name, nodes)),
        values=tuple(str(v.name) for v in values),
        sizes=sizes,
        planned=planned,
        reads=tuple(_unique((*r, *late)) if node in replaced else r for node, r in zip(nodes, own, strict=True)),
        writes=writes,
        outputs=_unique(number[v] for v in model.graph.outputs),
        aliases=tuple(aliases),
        forward=tuple(node in forward for node in nodes),
        costs=_costs(nodes, seconds, sizes, own, writes, views),
        workspace=tuple((workspace or {}).get(str(node.name), 0) for node in nodes),
        again=tuple(node.metadata_props.get(AGAIN, "") for node in nodes),
    )


def _growths(
    model: ir.Model, updates: Mapping[str, str], apart: set[ir.Value], provider: str
) -> dict[ir.Node, list[tuple[ir.Value, ir.Value]]]:
    """The updates that only write behind their input, which therefore may lie where that does, by their node."""
    inputs, outputs = ({str(v.name): v for v in values} for values in (model.graph.inputs, model.graph.outputs))
    found: dict[ir.Node, list[tuple[ir.Value, ir.Value]]] = {}
    for old, new in ((inputs[source], outputs[target]) for source, target in updates.items()):
        node = new.producer()
        if node is not None and new in apart and not aliasing.why_not_appended(old, new, provider):
            found.setdefault(node, []).append((old, new))
    return found


def _unique(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(numbers))


def needed_by(values: Iterable[ir.Value]) -> set[ir.Node]:
    """The nodes that these values depend on."""
    nodes: set[ir.Node] = set()
    pending = list(values)
    while pending:
        node = pending.pop().producer()
        if node is not None and node not in nodes:
            nodes.add(node)
            pending.extend(read_values(node))
    return nodes


def _parts_of_inputs(
    model: ir.Model, persistent: Collection[str], provider: str, is_step: bool
) -> dict[ir.Value, tuple[ir.Value, int]]:
    """Parts of persistent inputs that are read where these lie: each with its input and its first byte there.

    Those that a model in chunks marks; and in a training step, which is run in segments, views of a whole input.
    """
    parts = {}
    for value in (v for v in model.graph.inputs if v.name in persistent):
        for node in value.consumers():
            subviews = aliasing.windows(node, provider) if is_marked(node) else ()
            if is_step and provider == aliasing.CPU and len(node.outputs) == 1:
                subviews = (*subviews, *((node.outputs[0], value, 0) for _ in aliasing.view_pairs(node)))
            for part, whole, byte in subviews:
                size, most = nbytes(part), nbytes(whole)
                fits = size is not None and most is not None and size <= most and part.dtype == whole.dtype
                if whole is value and byte % ALIGNMENT == 0 and fits and not part.is_graph_output():
                    parts[part] = value, byte
    return parts


_Write = tuple[ir.Node, ir.Value, ir.Value]


def _in_place_updates(
    model: ir.Model, updates: Mapping[str, str], planned: set[ir.Value], provider: str, earlier: set[ir.Node],
    cuts: Mapping[ir.Value, tuple[ir.Value, int]],
) -> dict[ir.Node, list[tuple[ir.Value, ir.Value]]]:  # fmt: skip
    """The updates that are written over their input by the node that computes them, or part by part by several.

    A node may read the old content only where its kernel may run in place; every other reader has to come first, and
    may leave no alias of it that the runtime holds. None of the nodes in ``earlier`` may write over anything.
    """
    inputs = {str(v.name): v for v in model.graph.inputs}
    outputs = {str(v.name): v for v in model.graph.outputs}
    step = {node: index for index, node in enumerate(model.graph)}
    replaced: dict[ir.Node, list[tuple[ir.Value, ir.Value]]] = {}
    bound, parts_of = planned | cuts.keys(), dict[ir.Value, dict[ir.Value, int]]()
    for part, (whole, byte) in cuts.items():
        parts_of.setdefault(whole, {})[part] = byte

    def read_until(value: ir.Value, last: int) -> bool:
        readers = value.consumers()
        kept = any(aliasing.may_alias_unbound(reader) and not bound.issuperset(reader.outputs) for reader in readers)
        return not kept and all(step.get(reader, len(step)) <= last for reader in readers)

    for source, target in updates.items():
        old, new = inputs[source], outputs[target]
        own = parts_of.get(old, {})
        writes = _writes(old, new, own, provider)
        if not writes or old.is_graph_output() or any(node in earlier for node, _, _ in writes):
            continue
        if nbytes(old) != nbytes(new):  # at one of several sizes
            continue
        late = {value: _last_read(value, own, writes, step) for value in (old, *own)}
        if all(_may_replace(*write, provider) for write in writes) and all(read_until(*one) for one in late.items()):
            for node, before, after in writes:
                replaced.setdefault(node, []).append((before, after))
    return replaced


def _writes(old: ir.Value, new: ir.Value, cuts: Mapping[ir.Value, int], provider: str) -> list[_Write]:
    """The nodes that write a new content, and over what: parts, and what joins them, where it is computed in chunks."""
    node = new.producer()
    if node is None:
        return []
    subviews = aliasing.windows(node, provider) if is_marked(node) else ()
    joined = [(part, byte) for part, whole, byte in subviews if whole is new]
    if not joined:
        return [(node, old, new)]
    own = {(byte, nbytes(part)): part for part, byte in cuts.items()}
    candidates = [(part.producer(), own.get((byte, nbytes(part))), part) for part, byte in joined]
    parts = [(a, b, c) for a, b, c in candidates if a is not None and b is not None and not c.is_graph_output()]
    return [*parts, (node, old, new)] if len(parts) == len(node.inputs) else []


def _last_read(
    value: ir.Value, cuts: Mapping[ir.Value, int], writes: Sequence[_Write], step: Mapping[ir.Node, int]
) -> int:
    """The last step that may read a persistent input or a part of it: none after bytes of it are written over."""

    def place(one: ir.Value) -> tuple[int, int]:
        begin = cuts.get(one, 0)
        return begin, begin + (nbytes(one) or 0)

    (begin, end), reads = place(value), []
    for node, before, _ in writes:
        start, stop = place(before)
        if begin < stop and start < end:
            reads.append(step[node] - (before is not value))
    return min(reads, default=len(step))


def _may_replace(node: ir.Node, old: ir.Value, new: ir.Value, provider: str) -> bool:
    read_at = [index for index, value in enumerate(node.inputs) if value is old]
    target = list(node.outputs).index(new)
    allowed = (*aliasing.inplace_pairs(node, provider), *aliasing.cache_pairs(node, provider))
    return not subgraphs(node) and all((index, target) in allowed for index in read_at)


@dataclass(frozen=True, slots=True)
class _PairFinder:
    number: Mapping[ir.Value, int]
    sizes: tuple[int, ...]
    planned: tuple[bool, ...]
    values: list[ir.Value]
    elsewhere: set[ir.Value]
    cuts: Mapping[ir.Value, tuple[ir.Value, int]]

    def pairs(self, node: ir.Node, allowed: tuple[Pair, ...]) -> tuple[Pair, ...]:
        """Of (input, output) pairs those with both planned, of one size and one element type's width: as numbers."""
        pairs = []
        for source, target in allowed:
            before, after = node.inputs[source], node.outputs[target]
            if before is None or not after.name or before not in self.number:
                continue
            pair = (self.number[before], self.number[after])
            if not all(self.planned[v] for v in pair) or self.sizes[pair[0]] != self.sizes[pair[1]]:
                continue
            widths = [v.dtype.bitwidth for v in (before, after) if v.dtype is not None]
            if widths[0] == widths[1]:
                pairs.append(pair)
        return tuple(dict.fromkeys(pairs))

    def subviews(self, node: ir.Node, allowed: Iterable[tuple[ir.Value, ir.Value, int]]) -> tuple[Part, ...]:
        """Of (part, whole, byte offset) those with both planned, and parts and views of persistent inputs.

        A part that the model returns lies for itself.
        """
        views = [(v, *self.cuts[v]) for v in node.outputs if v in self.cuts]
        parts = dict.fromkeys([*(each for each in allowed if not each[0].is_graph_output()), *views])
        numbers = {(self.number[a], self.number[b], byte): a in self.cuts for a, b, byte in parts}
        return tuple(n for n, is_cut in numbers.items() if is_cut or (self.planned[n[0]] and self.planned[n[1]]))

    def runtime_aliases(self, node: ir.Node, reads: tuple[int, ...]) -> tuple[Pair, ...]:
        unplanned = [
            self.number[v]
            for v in node.outputs
            if v.name and not self.planned[self.number[v]] and v not in self.elsewhere
        ]
        if not unplanned or not (aliasing.may_alias_unbound(node) or node.outputs[0] in self.cuts):
            return ()
        return tuple((source, target) for source in reads for target in unplanned)


def _costs(
    nodes: list[ir.Node],
    seconds: Mapping[str, float] | None,
    sizes: tuple[int, ...],
    reads: tuple[tuple[int, ...], ...],
    writes: tuple[tuple[int, ...], ...],
    views: Sequence[tuple[Pair, ...]],
) -> tuple[float, ...]:
    """Seconds where measured, else estimates; a node whose only output is a view moves nothing."""
    if seconds is not None:
        return tuple(seconds.get(str(node.name), 0.0) for node in nodes)
    estimates = []
    for node, read, written, pairs in zip(nodes, reads, writes, views, strict=True):
        is_view = pairs and len(written) == 1
        moved = [sizes[v] for v in read], [sizes[v] for v in written]
        estimates.append(0.0 if is_view else costs.estimate(node, *moved))
    return tuple(estimates)
