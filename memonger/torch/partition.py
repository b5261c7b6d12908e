"""A training step that PyTorch traced, in a budget: its joint graph split into a forward and a backward pass.

AOTAutograd traces both passes into one graph and lets a partition function say what the forward pass saves, and what
the backward pass computes again. Here the whole step is one graph to schedule: the forward pass, what is done with its
outputs as a node that stays where it is, and the backward pass. The schedule is written back as two graphs, in its
order; what runs again is a copy of its node, as often as it runs.

What takes memory is a *storage*, not a tensor: views are made anew where they are read, and take nothing.
"""

import operator
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch._functorch.partitioners import _extract_fwd_bwd_modules
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch.utils._pytree import tree_leaves

from memonger.graph.graph import Graph
from memonger.torch import operators
from memonger.torch.fused import Fused, fused

OUTSIDE = "what becomes of the outputs"
"""The node between the passes: the loss, where the module doesn't compute it, and the call of ``backward``."""

STATE = "state of the generator"
"""Nodes at which it is kept, for draws that run again."""

_STATISTICS = 3
"""Outputs of a batch normalization from which on they are new running statistics."""


_MOST_COPIES = 256
"""Of what isn't stored each reader has a copy of its own, for the compiler would store what two of them read, up to so
many copies for one node."""

_Run: TypeAlias = tuple[fx.Node | None, tuple[int, ...], tuple[int, ...]]
"""A node of the joint graph, and the values that it reads and writes."""

_Stored: TypeAlias = tuple[fx.Node, Mapping[int, int], Mapping[int, int]]
"""A node of the joint graph, and the storages that it reads and makes, with their bytes."""


@dataclass(frozen=True, slots=True)
class JointStep:
    """A joint graph as a graph to schedule.

    Attributes:
        joint: AOTAutograd's graph.
        graph: What computes something, in the joint graph's order, and `OUTSIDE`. Values are storages.
        nodes: What each node of the graph is in the joint graph; None: `OUTSIDE`, or one of ``states``.
        states: Nodes that stand for keeping the state of a random generator, and the node that draws from it next,
            which draws the same again from the state.
        once: Nodes that run once: they write into what they are given, wait for others, or keep a state.
        given: Bytes that count all the time: of parameters, buffers, inputs, and new contents of buffers.
        gradients: Bytes of what the backward pass returns.
        returned: How many of the joint graph's outputs the forward pass returns.
        fuses: See `step_of`.
        kernels: What the compiler's kernels store, if it fuses.
    """

    joint: fx.Graph
    graph: Graph
    nodes: tuple[fx.Node | None, ...]
    states: Mapping[int, int]
    once: frozenset[int]
    given: int
    gradients: int
    returned: int
    fuses: bool
    kernels: Fused


def step_of(joint: fx.Graph, returned: int, fuses: bool = False) -> JointStep:
    """The graph to schedule of a joint graph; dead code is taken out of that.

    Args:
        joint: As AOTAutograd traced it.
        returned: How many of its outputs the forward pass returns.
        fuses: Whether what runs it computes operators by element inside what reads them; see `memonger.torch.fused`.
    """
    joint.eliminate_dead_code()
    results, roles = _results(joint), joint.output_node().meta.get("desc", ())[:returned]
    outputs, gradients = _nodes(results[:returned]), _nodes(results[returned:])
    replaced = {n: role.mutated_input for n, role in enumerate(roles) if isinstance(role, InputMutationAOTOutput)}
    news = _nodes(results[number] for number in replaced)
    kept = [one for one in outputs if one not in news]
    inputs = joint.find_nodes(op="placeholder")
    changed = _storages_of(one for one in inputs if one.meta.get("desc") in replaced.values())
    tangents = [one for one in inputs if _is_tangent(one)]
    given = _storages_of(one for one in inputs if not _is_tangent(one))
    number, sizes = dict[int, int](), list[int]()

    def values(storages: Mapping[int, int]) -> tuple[int, ...]:
        """Numbers of storages, but for those that are given."""
        for storage, size in storages.items():
            if storage not in given and storage not in number:
                number[storage] = len(sizes)
                sizes.append(size)
        return tuple(number[storage] for storage in storages if storage in number)

    early = {one for one in joint.nodes if _reads_old(one, changed) or operators.runs_once(one.target) or _draws(one)}
    backward = _behind(joint, {*outputs, *early})
    behind = set(backward)
    kernels = fused(joint, _storages_of([*outputs, *gradients]), behind, early) if fuses else Fused({}, (), {}, {}, {})
    written = set(given) | set(_storages_of(tangents)) | set(kernels.inner)
    passes: tuple[list[_Stored], ...] = [], []
    for node in (*(node for node in joint.nodes if node not in behind), *backward):
        if node.op != "call_function":
            continue
        operators.check_sizes(node.target, _given_to(node)[0], node.meta.get("val"))
        new = {storage: size for storage, size in _storages_of([node]).items() if storage not in written}
        written |= new.keys()
        if new or operators.runs_once(node.target):  # else it is a view, or a number
            given_to = _storages_of(node.all_input_nodes).items()
            sources = {key: size for one, own in given_to for key, size in kernels.inner.get(one, {one: own}).items()}
            passes[node in behind].append((node, sources, new))

    def run_of(node: fx.Node, read: Mapping[int, int], new: Mapping[int, int]) -> _Run:
        """The run of a node, which makes what it copies for itself alone, too."""
        copied, made = kernels.copies.get(node, 0), values(new)
        if copied:
            made += (len(sizes),)
            sizes.append(copied)
        return node, values(read), made

    own = _storages_of(gradients)
    steps: list[_Run] = []
    steps += [run_of(*each) for each in passes[0]]
    seen, read = set(number.values()), values(_storages_of(outputs))
    old = [v for one, _, new in passes[0] if _reads_old(one, changed) for v in values(new)]
    steps.append((None, (*read, *old), tuple(v for v in values(_storages_of(tangents)) if v not in seen)))
    steps += [run_of(*each) for each in _large_last(passes[1], given, own)]
    steps, states = _with_states(steps, sizes)
    turn = next(number for number, (node, _, _) in enumerate(steps) if node is None and number not in states)
    computed = {value for _, _, new in steps for value in new}
    ends = tuple(v for v in dict.fromkeys(values(_storages_of([*kept, *gradients]))) if v in computed)
    graph = Graph(
        nodes=tuple(
            node.name if node is not None else f"{STATE} of {steps[states[n]][0]}" if n in states else OUTSIDE
            for n, (node, _, _) in enumerate(steps)
        ),
        ops=tuple(str(node.target) if node else STATE if n in states else "" for n, (node, _, _) in enumerate(steps)),
        values=tuple(f"s{value}" for value in range(len(sizes))),
        sizes=tuple(sizes),
        planned=tuple(size > 0 for size in sizes),
        reads=tuple(tuple(dict.fromkeys(v for v in read if v in computed)) for _, read, _ in steps),
        writes=tuple(new for _, _, new in steps),
        outputs=ends,
        forward=tuple(number <= turn for number in range(len(steps))),
        costs=tuple(
            0.0 if node is None else _cost(node) + (_cost(kernels.sums[node]) if node in kernels.sums else 0.0)
            for node, _, _ in steps
        ),
        workspace=(0,) * len(steps),
    )
    over = [
        [number[one] for one in kernels.over.get(node, ()) if one in number] if node else [] for node, _, _ in steps
    ]
    graph = graph.with_aliases(
        inplace=[
            [(source, new[0]) for source in sources if source in computed]
            for sources, (_, _, new) in zip(over, steps, strict=True)
        ]
    )
    again = set(states.values())
    once = frozenset(
        number for number, (node, _, _) in enumerate(steps)
        if node is None or operators.runs_once(node.target) or _reads_old(node, changed)
        or (_draws(node) and number not in again) or node in kernels.drawn
    )  # fmt: skip
    there = sum(given.values()) + sum(_storages_of(news).values())  # autograd holds new contents to the end
    return JointStep(
        joint, graph, tuple(node for node, _, _ in steps), states, once, there,
        sum(size for storage, size in own.items() if storage not in given), returned, fuses, kernels,
    )  # fmt: skip


def _large_last(runs: Sequence[_Stored], given: Collection[int], results: Collection[int]) -> list[_Stored]:
    """Runs of the backward pass in order, but for those last that make nothing but results, if these take more than
    what is kept for them meanwhile: gradients of large weights that few samples went through.

    Args:
        runs: In the order in which they were traced.
        given: Storages that are there in any case.
        results: Storages that the pass returns.
    """
    reads = Counter(storage for _, read, _ in runs for storage in read)
    kept, last = set(given), set[fx.Node]()
    for node, read, new in runs:
        waits = {storage: size for storage, size in read.items() if storage not in kept}
        is_alone = all(one in results and not reads[one] for one in new) and not operators.runs_once(node.target)
        if is_alone and sum(waits.values()) < sum(new.values()):
            kept |= waits.keys()
            last.add(node)
    return sorted(runs, key=lambda run: run[0] in last)


def _behind(joint: fx.Graph, early: Collection[fx.Node]) -> list[fx.Node]:
    """Nodes of the backward pass, in order: what depends on gradients of outputs, and what nothing of the forward pass
    reads. This runs right before the first that reads it: as it was traced it may come long before.

    Args:
        joint: As AOTAutograd traced it.
        early: Nodes that are of the forward pass, unless they depend on gradients.
    """
    late = {one for one in joint.nodes if _is_tangent(one)}
    for node in joint.nodes:
        if not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    turns = {node: (turn, 1) for turn, node in enumerate(joint.nodes) if node in late}
    for node in reversed(joint.nodes):
        if node.op == "call_function" and node not in turns and node not in early and turns.keys() >= node.users.keys():
            turns[node] = min(turns[user] for user in node.users)[0], 0
    return sorted((node for node in joint.nodes if node in turns), key=turns.__getitem__)


def _with_states(steps: Sequence[_Run], sizes: list[int]) -> tuple[list[_Run], dict[int, int]]:
    """Steps with one before each that draws random numbers, at which the generator's state is kept.

    First draws stay in their order, though what has a state may be moved and run again: each step that keeps one, and
    the end of the forward pass, waits for the draw before, which gives a value of one byte for that.

    Args:
        steps: As they are.
        sizes: Bytes of each value; those of what is added are added.

    Returns: the steps, and `JointStep.states`.
    """
    found, states = list[_Run](), dict[int, int]()
    before: tuple[int, ...] = ()
    for node, reads, writes in steps:
        if node is None:
            found.append((node, (*reads, *before), writes))
        elif not _draws(node):
            found.append((node, reads, writes))
        elif (size := operators.generator_state(*_given_to(node))) is None:
            found.append((node, (*reads, *before), writes))
        else:
            state, turn = len(sizes), len(sizes) + 1
            sizes += [size, 1]
            states[len(found)] = len(found) + 1
            found += [(None, before, (state,)), (node, (*reads, state), (*writes, turn))]
            before = (turn,)
    return found, states


def split(module: fx.GraphModule, step: JointStep, schedule: Sequence[int]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward pass that run a schedule of ``step.graph``, each in its order.

    Args:
        module: Holds what the joint graph refers to by name.
        step: The joint graph.
        schedule: Node numbers; one that occurs again runs again.
    """
    rewriter = _Rewriter(step)
    returned: list[Any] = []
    results = _results(step.joint)
    runs = Counter(schedule)
    again = {node for node in step.states.values() if runs[node] > 1}
    before: fx.Node | None = None
    for number in schedule:
        node = step.nodes[number]
        if node is not None:
            rewriter.run(node, before, keeps_state=number in again)
        elif number not in step.states:
            returned = rewriter.outputs(results[: step.returned])
            rewriter.turn()
        before = node
    gradients = rewriter.outputs(results[step.returned :])
    end = rewriter.graph.output((*returned, *gradients))
    end.meta = step.joint.output_node().meta
    saved = rewriter.saved_for(gradients)
    return _extract_fwd_bwd_modules(
        fx.GraphModule(module, rewriter.graph), [one for one in saved if _tensors(one)],
        [one for one in saved if not _tensors(one)], num_fwd_outputs=step.returned,
    )  # fmt: skip


class _Rewriter:
    """Writes a schedule of a joint graph as another joint graph, in which no node of the backward pass reads a view
    that the forward pass made: it reads the storage's own tensor, and makes the view itself.

    Attributes:
        graph: What is written.
    """

    def __init__(self, step: JointStep) -> None:
        self.graph = fx.Graph()
        self._fixed = dict[fx.Node, fx.Node]()  # what is given
        for node in step.joint.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._fixed[node] = self.graph.node_copy(node, self._fixed.__getitem__)
        self._latest, self._first = dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()
        self._views = dict[fx.Node, tuple[tuple[fx.Node, ...], fx.Node]]()  # with what each copy views
        self._before = set[fx.Node]()  # what the forward pass runs
        self._saved = dict[fx.Node, None]()
        self._states = dict[fx.Node, fx.Node]()  # of generators, before nodes draw
        self._is_behind, self._fuses, self._kernels = False, step.fuses, step.kernels
        self._copies = 0  # made for what is written now

    def run(self, node: fx.Node, before: fx.Node | None, keeps_state: bool) -> None:
        """Write one more run of a node, and take its outputs apart at once.

        Args:
            node: Of the joint graph.
            before: What ran before it; None: no operator.
            keeps_state: Whether it draws random numbers, and does so again after its first run.
        """
        if self._fuses:
            self._views.clear()
            self._copies = 0
        items = [user for user in node.users if user.target is operator.getitem]
        if self._is_behind and _is_batch_norm(node):
            items = [item for item in items if item.args[1] in range(_STATISTICS)]
            made = self._without_statistics(node)
        elif keeps_state:
            made = self._drawn(node)
        else:
            sources = {one: self._at(one, self._latest) for one in node.all_input_nodes}
            made = self._computed(node, sources, before)
        for one, copy in ((node, made), *((item, self._copy(item, {node: made})) for item in items)):
            self._latest[one] = copy
            self._first.setdefault(one, copy)

    def _computed(self, node: fx.Node, sources: Mapping[fx.Node, fx.Node], before: fx.Node | None) -> fx.Node:
        """A copy of a node; of a sum of products from long before one written as ``x - -y``, which has the same bits,
        and which the compiler knows no larger operator for.
        """
        if not (self._fuses and self._kernels.adds_late(node, before)):
            return self._copy(node, sources)
        x, y = sources.values()
        negated = self.graph.call_function(torch.ops.aten.neg.default, (y,))
        negated.meta = dict(y.meta)
        made = self.graph.call_function(torch.ops.aten.sub.Tensor, (x, self._noted(negated)))
        made.meta = dict(node.meta)
        return self._noted(made)

    def _without_statistics(self, node: fx.Node) -> fx.Node:
        """A batch normalization that runs again, which mustn't read the statistics: the forward pass changed them."""
        x, weight, bias, _, _, *settings = node.args
        sources = (self._at(one, self._latest) if isinstance(one, fx.Node) else one for one in (x, weight, bias))
        made = self.graph.call_function(torch.ops.aten._native_batch_norm_legit.no_stats, (*sources, *settings))
        made.meta = dict(node.meta, val=node.meta["val"][:_STATISTICS])
        return self._noted(made)

    def _drawn(self, node: fx.Node) -> fx.Node:
        """A run of a node that draws random numbers: the first keeps the generator's state, others draw from that and
        leave the generator as it is.
        """
        sources = {one: self._at(one, self._latest) for one in node.all_input_nodes}
        args, kwargs = fx.map_arg((node.args, node.kwargs), sources.__getitem__)
        target: Any = node.target  # an argument of these operators
        if node in self._states:
            made = self.graph.call_function(run_with_rng_state, (self._states[node], target, *args), kwargs)
            made.meta = dict(node.meta)
            return self._noted(made)
        both = self.graph.call_function(run_and_save_rng_state, (target, *args), kwargs)
        with _tensors(node)[0].fake_mode:  # type: ignore[attr-defined]
            state = torch.empty(operators.generator_state(*_given_to(node)) or 0, dtype=torch.uint8)
        both.meta = dict(node.meta, val=(state, node.meta["val"]))
        kept, made = (self.graph.call_function(operator.getitem, (self._noted(both), item)) for item in range(2))
        kept.meta, made.meta = {"val": state}, dict(node.meta)
        self._states[node] = self._noted(kept)
        return self._noted(made)

    def turn(self) -> None:
        """What is written from here on is the backward pass."""
        self._views.clear()
        self._is_behind = True

    def outputs(self, results: Sequence[Any]) -> list[Any]:
        """Results of the joint graph: what the first run of each node gave."""
        return [self._at(one, self._first) if isinstance(one, fx.Node) else one for one in results]

    def saved_for(self, gradients: Sequence[Any]) -> list[fx.Node]:
        """What the backward pass reads of the forward pass, and of what that was given."""
        own = {one: None for one in _nodes(gradients) if self._is_saved(one)}
        return list(self._saved | own)

    def _is_saved(self, one: fx.Node) -> bool:
        return one in self._before or (one.op == "placeholder" and not _is_tangent(one))

    def _copy(self, node: fx.Node, sources: Mapping[fx.Node, fx.Node]) -> fx.Node:
        return self._noted(self.graph.node_copy(node, sources.__getitem__))

    def _noted(self, made: fx.Node) -> fx.Node:
        """A node that was written, with what it is to the backward pass."""
        if self._is_behind:
            self._saved |= {one: None for one in made.all_input_nodes if self._is_saved(one)}
        else:
            self._before.add(made)
        return made

    def _at(self, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """The copy of a node that is read now; of a view one of what it views now, and so of what isn't stored."""
        known = self._fixed.get(node) or copies.get(node)
        if known is not None:
            return known
        sources = {one: self._at(one, copies) for one in node.all_input_nodes}
        viewed = tuple(sources.values())
        is_apart = self._fuses and self._copies < _MOST_COPIES
        if is_apart or node not in self._views or self._views[node][0] != viewed:
            self._copies += 1
            self._views[node] = viewed, self._computed(node, sources, None)
        return self._views[node][1]


def _reads_old(node: fx.Node, changed: Mapping[int, int]) -> bool:
    """Whether a node reads storages that the forward pass gives new contents, and so can't run after that."""
    return not changed.keys().isdisjoint(_storages_of(node.all_input_nodes)) and not _is_batch_norm(node)


def _is_batch_norm(node: fx.Node) -> bool:
    """Whether a node normalizes by its own batch, and beside that updates running statistics."""
    return node.target is torch.ops.aten._native_batch_norm_legit_functional.default and node.args[5] is True


def _results(joint: fx.Graph) -> list[Any]:
    return tree_leaves(joint.output_node().args[0], is_leaf=lambda one: isinstance(one, fx.Node))


def _nodes(results: Iterable[Any]) -> list[fx.Node]:
    return [one for one in results if isinstance(one, fx.Node)]


def _is_tangent(node: fx.Node) -> bool:
    return node.op == "placeholder" and "tangents" in str(node.target)


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return operators.tensors_in(node.meta.get("val"))


def _storages_of(nodes: Iterable[fx.Node]) -> dict[int, int]:
    return operators.storages(one for node in nodes for one in _tensors(node))


def _given_to(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What an operator is given, on tensors without memory."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: one.meta.get("val"))
    return args, kwargs


def _draws(node: fx.Node) -> bool:
    return operators.draws(node.target, *_given_to(node))


def _cost(node: fx.Node) -> float:
    return operators.cost(node.target, *_given_to(node), node.meta.get("val"))
