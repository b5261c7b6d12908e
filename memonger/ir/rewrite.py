"""Nodes in another node's place: the one way in which a pass replaces nodes; and without those that nothing reads."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir
from onnx_ir.passes import common as passes

from memonger.ir.emitter import Emitter
from memonger.ir.marks import spread
from memonger.ir.model import Model

Write = Callable[[Emitter, ir.Node], Sequence[ir.Value | None] | None]
"""Emits what stands for a node, and returns a value for each of its outputs; or returns None: the node stays."""


def insert_for(node: ir.Node, made: Sequence[ir.Node], results: Sequence[ir.Value | None]) -> None:
    """Insert nodes before a node, and let all that read its outputs read theirs. The node itself is not removed.

    Args:
        node: Its outputs' names, and its metadata, pass to what stands for them.
        made: Nodes that are in no graph yet.
        results: A value for each output of the node; None where nobody uses it. One that ``made`` doesn't write keeps
            the name it has.
    """
    assert node.graph is not None
    spread(node, made, [each for each in made if results[0] in each.outputs])
    node.graph.insert_before(node, made)
    written = {value for each in made for value in each.outputs}
    for old, new in zip(node.outputs, results, strict=False):
        if new is None:
            continue
        if new in written:
            old.name, new.name = None, old.name
        outputs = node.graph.outputs
        for _ in range(outputs.count(old)):  # onnx-ir would look at each of a step's thousands of outputs in Python
            outputs[outputs.index(old)] = new
        old.replace_all_uses_with(new)


@dataclass(slots=True)
class Replacer:
    """Replaces nodes of a graph by what was emitted.

    Attributes:
        graph: The graph that is changed.
        op: What was emitted is taken from it.
        gone: Nodes that are out of use. They read nothing, and are removed together at the end: for each call of
            ``remove``, onnx-ir looks at every output of the graph.
    """

    graph: ir.Graph
    op: Emitter
    gone: dict[ir.Node, None] = field(default_factory=dict)
    _read: dict[ir.Value, None] = field(default_factory=dict)

    def replace_each(self, write: Write) -> int:
        """Go once through the nodes, put in their place what is written for them, and `finish`. Returns how many."""
        count = 0
        for node in list(self.graph):
            if node in self.gone:
                continue
            with self.op.at(str(node.name)):
                results = write(self.op, node)
            if results is not None:
                self.replace(node, results)
                count += 1
        self.finish()
        return count

    def insert(self, before: ir.Node) -> None:
        """Put what was emitted before a node."""
        self.graph.insert_before(before, self._emitted())

    def replace(self, node: ir.Node, results: Sequence[ir.Value | None]) -> None:
        """Put what was emitted in a node's place, and drop what only that node needed; see `insert_for`."""
        insert_for(node, self._emitted(), results)
        read = [v for v in node.inputs if v is not None]
        self._retire(node)
        self.drop_unread(read)

    def _emitted(self) -> list[ir.Node]:
        made, self.op.nodes = self.op.nodes, []
        return made

    def drop_unread(self, values: Iterable[ir.Value]) -> None:
        """Retire the nodes that compute what nobody reads, and then what only those read."""
        pending = list(values)
        while pending:
            node = pending.pop().producer()
            if node is None or node.graph is not self.graph or node in self.gone:
                continue
            if any(v.uses() or v.is_graph_output() for v in node.outputs):
                continue
            pending.extend(v for v in node.inputs if v is not None)
            self._retire(node)

    def _retire(self, node: ir.Node) -> None:
        self._read.update((v, None) for v in node.inputs if v is not None)
        for index in range(len(node.inputs)):
            node.replace_input_with(index, None)
        self.gone[node] = None

    def finish(self) -> None:
        """Remove what is out of use, constants that only such nodes read with them."""
        self.graph.remove(self.gone)
        for value in self._read:
            if value.is_initializer() and not (value.uses() or value.is_graph_input() or value.is_graph_output()):
                del self.graph.initializers[str(value.name)]


def remove_unused(model: Model) -> bool:
    """A pass: no nodes and initializers that nothing reads, and no outputs of nodes that may be left out.

    onnx-ir's pass removes one node after the other, and reads all the graph's outputs for each: a step with 7,000 of
    them spends most of its time there. So the nodes go at once first, and the pass does the rest.
    """
    outputs, unread = set(model.graph.outputs), set[ir.Node]()
    for node in reversed(model.graph):
        if not any(value in outputs or any(use.node not in unread for use in value.uses()) for value in node.outputs):
            unread.add(node)
    model.graph.remove(unread, safe=True)
    modified = passes.RemoveUnusedNodesPass()(model.ir).modified
    for node in model.graph.all_nodes():
        if node.op_type == "Loop" and not node.domain and len(node.inputs) < _LEAST_OF_LOOP:
            node.resize_inputs(_LEAST_OF_LOOP)  # onnx-ir drops inputs that are left out at the end
    return modified or bool(unread)


_LEAST_OF_LOOP = 2
"""Inputs of a ``Loop``, both of which may be left out, and are written all the same."""
