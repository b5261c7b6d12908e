"""Collectives of a training step as nodes: which gradients ranks add up together, where that begins and where it ends.

The gradients of a *bucket* lie side by side. Two nodes stand for its all-reduce. ``Begin`` reads them when the last
one is written. ``Wait`` reads them again and gives each as it is after the sum, in the same bytes, to whoever updates.
From the one to the other the bytes belong to the collective, which `memonger.graph.verify` checks; they are in the
arena, and in the budget, until the updates have read them. Both are functions of the model that hand their inputs on,
so that stock onnxruntime runs the step as one rank alone would. A session runs neither: see `expanded`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from memonger.errors import PlanError
from memonger.graph import aliasing
from memonger.graph.graph import Graph, needed_by
from memonger.graph.liveness import in_buckets
from memonger.graph.schedule import put_in_order
from memonger.ir.names import fresh
from memonger.ir.operators import BEGIN, MEAN, RANKS, WAIT
from memonger.ir.training_roles import Training
from memonger.units import MiB, in_bytes
from memonger.words import check_choice, option

LEAST_OPSET = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """How gradients are put together for the all-reduce between ranks.

    Attributes:
        first: Bytes after which the first bucket is full, or a text such as ``1MiB``: a small one is sent early.
        rest: Bytes after which each later one is.
        wait: When the updates of a bucket begin: ``next``, once the bucket after it is whole, so that at most about two
            buckets are held; or ``last``, once all are whole, as PyTorch has it: more time for the collectives, and all
            gradients are held at once.

    Raises:
        PlanError: a size or a word that can't be.
    """

    first: int | str = MiB
    rest: int | str = 25 * MiB
    wait: str = "next"

    def __post_init__(self) -> None:
        for name in ("first", "rest"):
            object.__setattr__(self, name, in_bytes(f"the {name} bucket", getattr(self, name), PlanError))
        check_choice("wait", self.wait, ("next", "last"), PlanError)


def with_collectives(model: ir.Model, graph: Graph, roles: Training | None, buckets: Buckets, name: str) -> None:
    """Put the collectives of a training step into a lowered model.

    Args:
        model: Changed.
        graph: Of the model as it is.
        roles: The model's.
        buckets: How large.
        name: What messages call the model.

    Raises:
        PlanError: the model updates nothing; lowering has taken a gradient apart, or it has no address in the arena.
    """
    if roles is None or not roles.whole_gradients:
        raise PlanError(
            f"{name}: ranks add up gradients of a step that updates parameters: give a loss and an optimizer "
            f"({option('loss', 'softmax_cross_entropy')}), and no accumulate='add'."
        )
    values = {str(v.name): v for node in model.graph for v in node.outputs}
    gone = [(parameter, one) for parameter, one in roles.whole_gradients.items() if one not in values]
    if gone:
        parameter, one = gone[0]
        raise PlanError(
            f"{name}: lowering has left out '{one}', the gradient of '{parameter}', which ranks add up: plan it with "
            f"{option('level', 'rewrite')}."
        )
    gradients = list(dict.fromkeys(values[one] for one in roles.whole_gradients.values()))
    number = {one: index for index, one in enumerate(graph.values)}
    loose = next((v for v in gradients if not graph.planned[number[str(v.name)]]), None)
    if loose is not None:
        raise PlanError(f"{name}: the gradient '{loose.name}' has no address in the arena, so ranks can't add it up.")
    means = [values[one] for one in roles.means_over_ranks if one in values]
    if len(means) < len(roles.means_over_ranks):
        raise PlanError(
            f"{name}: lowering has left out a mean over the ranks: plan it with {option('level', 'rewrite')}."
        )
    writer = _CollectiveWriter(model, roles, gradients)
    # Buckets of one type each, in the order in which they are full
    assert isinstance(buckets.first, int)
    assert isinstance(buckets.rest, int)
    value_of = {number[str(value.name)]: value for value in gradients}
    types = dict.fromkeys(value.dtype for value in gradients)
    of_type = ({n for n, value in value_of.items() if value.dtype == dtype} for dtype in types)
    found = [each for members in of_type for each in in_buckets(graph, members, buckets.first, buckets.rest)]
    found.sort(key=lambda members: max(graph.producer[value] for value in members))
    writer.write([[value_of[value] for value in members] for members in found], buckets.wait)
    writer.write_means(means)


class _CollectiveWriter:
    """Writes the nodes of collectives into a model."""

    def __init__(self, model: ir.Model, roles: Training, gradients: Sequence[ir.Value]) -> None:
        self.model, self.graph = model, model.graph
        self.names = {str(v.name) for node in model.graph for v in node.outputs} | {str(n.name) for n in model.graph}
        results = [v for v in model.graph.outputs if v.name in (*roles.outputs, roles.loss)]
        self.backward = needed_by([*gradients, *results])
        model.opset_imports[RANKS] = 1

    def write(self, buckets: Sequence[Sequence[ir.Value]], wait: str) -> None:
        """The nodes of all buckets."""
        sent = [[self._apart(value) for value in members] for members in buckets]
        begins: list[ir.Node] = []
        for number, members in enumerate(sent):
            before = [begins[-1].outputs[0]] if begins else []
            begins.append(self._node(BEGIN, number, [*members, *before], []))
            self.graph.insert_after(_last(self.graph, begins[-1]), begins[-1])
        previous: list[ir.Value] = []
        for number, (members, old) in enumerate(zip(sent, buckets, strict=True)):
            until = begins[-1 if wait == "last" else min(number + 1, len(begins) - 1)]
            node = self._node(WAIT, number, [*members, until.outputs[0], *previous], members)
            self.graph.insert_after(_last(self.graph, node), node)
            previous = [node.outputs[-1]]
            for value, own, new in zip(old, members, node.outputs, strict=False):
                for reader, index in value.uses():  # what updates read is the sum
                    if reader not in self.backward and reader.domain != RANKS and reader is not own.producer():
                        reader.replace_input_with(index, new)
        put_in_order(self.model)

    def write_means(self, means: Sequence[ir.Value]) -> None:
        """The nodes of means amid the step: each is waited for where it begins."""
        for number, old in enumerate(means):
            mark = old.producer()
            assert mark is not None
            own = self._apart(mark.inputs[0])  # type: ignore[arg-type]
            begin = self._node(f"{BEGIN}{MEAN}", number, [own], [])
            wait = self._node(f"{WAIT}{MEAN}", number, [own, begin.outputs[0]], [own])
            self.graph.insert_before(mark, [begin, wait])
            new = wait.outputs[0]
            old.replace_all_uses_with(new)
            self.graph.remove(mark, safe=True)
            new.name = old.name
        put_in_order(self.model)

    def _apart(self, value: ir.Value) -> ir.Value:
        """The value, or a copy of it where something but the updates reads its bytes."""
        if self._is_alone(value):
            return value
        one = ir.Value(name=fresh(f"{value.name}.one", self.names), type=value.type, shape=ir.Shape(()))
        assert value.dtype is not None
        one.const_value = ir.tensor(1, dtype=value.dtype, name=one.name)
        self.graph.register_initializer(one)
        name = fresh(f"{value.name}.sent", self.names)
        copy = ir.Node("", "Mul", [value, one], name=name, num_outputs=1)
        copy.outputs[0].name, copy.outputs[0].type, copy.outputs[0].shape = name, value.type, value.shape
        maker = value.producer()
        assert maker is not None
        self.graph.insert_after(maker, copy)
        return copy.outputs[0]

    def _is_alone(self, value: ir.Value) -> bool:
        """Whether only updates read the value, and no other value has bytes of it."""
        if any(node in self.backward for node, _ in value.uses()) or value.is_graph_output():
            return False
        while True:
            maker = value.producer()
            assert maker is not None
            if aliasing.windows(maker):
                return False
            views = [maker.inputs[source] for source, _ in aliasing.view_pairs(maker)]
            if not views or views[0] is None:
                return True
            value = views[0]
            if value.producer() is None or len(value.uses()) > 1 or value.is_graph_output():
                return False

    def _node(self, kind: str, number: int, inputs: Sequence[ir.Value], given: Sequence[ir.Value]) -> ir.Node:
        """A node, and the function it calls: its first outputs are its first inputs, the last one tells the order."""
        name = fresh(f"ranks/{kind.lower()}{number}", self.names)
        node = ir.Node(RANKS, f"{kind}{number}", inputs, name=name, num_outputs=len(given) + 1, version=1)
        for value, new in zip(given, node.outputs, strict=False):
            new.name, new.type, new.shape = fresh(f"{value.name}.reduced", self.names), value.type, value.shape
        node.outputs[-1].name, node.outputs[-1].shape = fresh(f"{name}/done", self.names), ir.Shape((0,))
        node.outputs[-1].type = ir.TensorType(ir.DataType.INT64)
        self.model.functions[node.op_identifier()] = _handing_on(node, len(given), self.model)
        return node


def _last(graph: ir.Graph, node: ir.Node) -> ir.Node:
    """The last of the nodes that a node reads from."""
    makers = {value.producer() for value in node.inputs if value is not None}
    return [one for one in graph if one in makers][-1]


def _handing_on(node: ir.Node, given: int, model: ir.Model) -> ir.Function:
    """The function of a collective's node, as one rank alone runs it."""
    inputs = [ir.Value(name=f"in{index}") for index in range(len(node.inputs))]
    nodes = [ir.Node("", "Identity", [value], num_outputs=1) for value in inputs[:given]]
    empty = ir.tensor([], dtype=ir.DataType.INT64)
    nodes.append(ir.Node("", "Constant", [], [ir.AttrTensor("value", empty)], num_outputs=1))
    for index, each in enumerate(nodes):
        each.outputs[0].name = f"out{index}"
    version = model.opset_imports.get("", LEAST_OPSET)
    body = ir.Graph(inputs, [each.outputs[0] for each in nodes], nodes=nodes, opset_imports={"": version})
    return ir.Function(RANKS, node.op_type, graph=body, attributes=[])


@dataclass(frozen=True, slots=True)
class Collective:
    """A bucket's all-reduce in a schedule.

    Attributes:
        begin: Step of the node that begins it.
        wait: Step of the node that waits for it.
        members: Numbers of the gradients, in the order in which they lie.
        is_mean: Whether it is no bucket of gradients, but a mean that the step itself needs.
    """

    begin: int
    wait: int
    members: tuple[int, ...]
    is_mean: bool


def collectives_of(graph: Graph) -> tuple[Collective, ...]:
    """The collectives in a graph that `memonger.graph.verify` has checked, in the order in which they begin."""
    steps = {op: step for step, op in enumerate(graph.ops)}
    found = [
        Collective(
            steps[graph.ops[wait].replace(f"::{WAIT}", f"::{BEGIN}")],
            wait,
            members,
            f"::{WAIT}{MEAN}" in graph.ops[wait],
        )
        for wait, members in graph.collectives
    ]
    return tuple(sorted(found, key=lambda each: each.begin))


def expanded(model: ir.Model) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Take the collectives' nodes out of a model that a session runs.

    What `WAIT` gives is computed by Identity nodes, which copy nothing where both are bound to one address.

    Returns: the names of nodes that stand for each node taken out; names of values that are there no more.
    """
    places: dict[str, tuple[str, ...]] = {}
    gone: list[str] = []
    graph = model.graph
    for node in [each for each in graph if each.domain == RANKS]:
        made: list[ir.Node] = []
        for value, new in zip(node.inputs, node.outputs[:-1], strict=False):
            copy = ir.Node("", "Identity", [value], name=f"{node.name}/{len(made)}", num_outputs=1)
            name, copy.outputs[0].type, copy.outputs[0].shape = new.name, new.type, new.shape
            new.name = f"{name}.old"
            copy.outputs[0].name = name
            new.replace_all_uses_with(copy.outputs[0], replace_graph_outputs=True)
            made.append(copy)
        graph.insert_before(node, made)
        places[str(node.name)] = tuple(str(copy.name) for copy in made)
        gone.append(str(node.outputs[-1].name))
    for node in [each for each in graph if each.domain == RANKS][::-1]:
        graph.remove(node, safe=True)
    for key in [key for key in model.functions if key[0] == RANKS]:
        del model.functions[key]
    model.opset_imports.pop(RANKS, None)
    return places, gone
