"""What stock onnxruntime takes for a graph on the CPU, worked out without running it.

Learned from onnxruntime's source (``allocation_planner.cc``, ``graph_viewer.cc``): it frees a value after its last
reader, and at the end of the run what nobody reads; an output takes the memory of an input where its kernel says that
it may and nobody else reads it, else that of a dead value of the same shape, which is held until then, else new memory.
Outputs of the model are new memory always.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence, Set
from dataclasses import replace
from types import MappingProxyType

import onnx_ir as ir

from memonger.allocation.buffers import Buffer
from memonger.allocation.onnxruntime_arena import Frame, onnxruntime_bytes
from memonger.graph import aliasing, kernels
from memonger.graph.schedule import default_order, sources_of
from memonger.ir.operators import operator_name
from memonger.ir.values import dense, graphs, inner_graphs, nbytes, read_values, static_shape, subgraphs

_TAKES_INPUT = frozenset(
    {
        "Cast", "Celu", "Clip", "Elu", "Gemm", "HardSigmoid", "LeakyRelu", "LogSoftmax", "Relu", "Scatter",
        "ScatterElements", "Selu", "Shrink", "Sigmoid", "Softmax", "Softplus", "Softsign", "Tanh", "TensorScatter",
        "ThresholdedRelu", "Trilu", "com.microsoft::FusedConv", "com.microsoft::FusedGemm", "com.microsoft::Trilu",
        "com.microsoft.nchwc::Conv",
    }
)  # fmt: skip
"""Operators whose kernel onnxruntime 1.31.1 was seen to give an input's memory, of those that may run in place."""


_MOST_PIECES = 1000  # of one node's workspace

_WINDOWS = frozenset({
    "AveragePool", "Conv", "MaxPool", "com.microsoft::FusedConv", "com.microsoft.nchwc::AveragePool",
    "com.microsoft.nchwc::Conv", "com.microsoft.nchwc::MaxPool",
})  # fmt: skip
_POOLS = frozenset({"com.microsoft.nchwc::GlobalAveragePool", "com.microsoft.nchwc::GlobalMaxPool"})
_SCALED = frozenset({"Resize", "Upsample", "com.microsoft.nchwc::Upsample"})
_AS_READ = frozenset({
    "Add", "BatchNormalization", "Clip", "Div", "Gelu", "GroupNormalization", "HardSigmoid", "HardSwish",
    "InstanceNormalization", "LeakyRelu", "Mul", "Relu", "Sigmoid", "Sub", "Tanh", "com.microsoft::Gelu",
    "com.microsoft::QuickGelu", "com.microsoft.nchwc::ReorderInput", "com.microsoft.nchwc::ReorderOutput",
})  # fmt: skip
"""Operators whose output has the dimensions of what they read, but for what is broadcast."""

Dims = Sequence[int | str | None]
"""A shape in a file: lengths, names of those that are open, None for one without a name."""


def dims_in_file(graph: ir.Graph) -> dict[str, Dims]:
    """The shapes of values, as a file has them, by name."""
    given = [*graph.inputs, *(value for body in inner_graphs(graph) for value in body.outputs)]
    made = (value for each in (graph, *inner_graphs(graph)) for node in each for value in node.outputs)
    values = [*given, *made]
    shapes = {str(value.name): value.shape for value in values if value.shape is not None}
    return {name: [dim if isinstance(dim, int) else dim.value for dim in shape.dims] for name, shape in shapes.items()}


def allocated_bytes(
    model: ir.Model, workspace: Mapping[str, int] | None, *, as_written: bool,
    in_file: Mapping[str, Dims] = MappingProxyType({}),
) -> int:  # fmt: skip
    """Bytes that stock onnxruntime takes beside weights and inputs, its second run included: later ones take no more.

    The arguments are those of `request_frame`.
    """
    frame, freed = request_frame(model, workspace, as_written=as_written, in_file=in_file)
    return onnxruntime_bytes(frame, freed=freed)


def request_frame(
    model: ir.Model, workspace: Mapping[str, int] | None, *, as_written: bool, threads: int = 1,
    in_file: Mapping[str, Dims] = MappingProxyType({}),
) -> tuple[Frame, int]:  # fmt: skip
    """What a run in stock onnxruntime asks its memory for; and of what loading gave back the bytes of the largest.

    Args:
        model: Lowered, in the order it was made in, every size known.
        workspace: Bytes of workspace of each node, by name, those that its bodies took included; None: what kernels
            are known to ask for, and bodies are replayed.
        as_written: Its nodes run in file order; else in the order that onnxruntime would run that file in.
        threads: Threads within a node, for workspace that isn't given.
        in_file: What `dims_in_file` gives of the file that runs, where it leaves sizes open.
    """
    weights = (value.const_value for graph in graphs(model) for value in graph.initializers.values())
    largest = max((weight.nbytes for weight in weights if weight is not None), default=0)  # loading copied it
    given = [value for body in inner_graphs(model.graph) for value in body.outputs]
    late = {value for value in given if not all(isinstance(dim, int) for dim in in_file.get(str(value.name), ()))}
    nameless = _nameless(model.graph, in_file)
    return _frame(model.graph, workspace, as_written, threads, late, nameless), largest


def _frame(
    graph: ir.Graph, workspace: Mapping[str, int] | None, as_written: bool, threads: int, late: Set[ir.Value],
    nameless: Set[ir.Value], around: str = "", *, in_loop: bool = False,
) -> Frame:  # fmt: skip
    """What a run of a graph asks for, the body of a node of that type or the model.

    What a Scan's body or a branch writes, the node around it has asked for; but a branch asks itself, when it makes it,
    for what it gives ``late``, of a size that is open in the file. A Loop can't ask, as sizes may change: its body
    asks, or a branch of that when it begins; and the node holds what is carried from turn to turn, and pieces of
    sequences that are joined behind it. A body that reads anything but tensors gets no block.
    """
    nodes = list(graph)
    if not as_written:
        nodes = [nodes[n] for n in default_order([*map(sorted, sources_of(nodes))], range(len(nodes)))]
    in_loop = around == "Loop" or (around == "If" and in_loop)
    branched = {value for node in nodes if node.op_type == "If" for value in node.outputs}
    given = set(graph.outputs) & branched if in_loop else set(graph.outputs) if around else set[ir.Value]()
    given -= set(late) if around == "If" else set()
    planned, single = _Allocations(graph, nodes, given, late, nameless).buffers()
    if around == "If" and in_loop:
        single = [replace(each, start=0) for each in single]
    bodies, left = dict[int, list[tuple[Frame, int]]](), dict[int, list[tuple[int, int]]]()
    first_at = dict[int, int]()
    made = {value for node in nodes for value in node.outputs}
    if around and not all(isinstance(v.type, ir.TensorType) for n in nodes for v in read_values(n) if v not in made):
        planned, single = [], [*planned, *single]
    for step, node in enumerate(nodes):
        if workspace is None:
            pieces = kernels.workspace(node, threads)
            inside = [
                _frame(body, None, as_written, threads, late, nameless, node.op_type, in_loop=in_loop)
                for body in _bodies(node)
            ]
            if inside:
                bodies[2 * step] = [(body, kernels.turns(node)) for body in inside]
        else:  # only its sum was measured, so that it counts as one piece; of LRN squares, and their sums
            count = 2 if node.op_type == "LRN" else 1
            pieces = [workspace.get(str(node.name), 0) // count] * count
        pieces = [*(nbytes(value) or 0 for value in kernels.transposed(node)), *pieces]
        single += [Buffer(-1 - _MOST_PIECES * step - i, size, 2 * step, 2 * step + 2) for i, size in enumerate(pieces)]
        is_turn = None if node.op_type != "If" or node.inputs[0] is None else node.inputs[0].producer()
        if in_loop and is_turn is not None and is_turn.op_type == "Equal":
            turn, number = is_turn.inputs
            if turn is not None and turn.is_graph_input() and number is not None and number.const_value is not None:
                first_at[2 * step] = int(number.const_value.numpy())
        if node.op_type == "Loop":
            joined = [(end, n) for end, n in enumerate(nodes) if n.op_type == "ConcatFromSequence"]
            ends = [(end, n) for end, n in joined if n.inputs[0] is not None and n.inputs[0].producer() is node]
            left[2 * step] = [(nbytes(each.outputs[0]) or 0, 2 * end + 2) for end, each in ends]
    return Frame(planned, single, bodies, left, first_at)


def _bodies(node: ir.Node) -> list[ir.Graph]:
    """The bodies of a node; of two branches that one first that runs if it is so, and alone where it always is."""
    if node.op_type != "If":
        return subgraphs(node)
    then, other = (node.attributes[name].as_graph() for name in ("then_branch", "else_branch"))
    return [then] if _is_always(node) else [then, other]


_ASKS_IF_EMPTY = ["Equal", "SequenceLength", "SequenceEmpty"]
"""What says whether a sequence that is made empty is empty."""


def _is_always(node: ir.Node) -> bool:
    """Whether a node always runs its first branch, as `memonger.loops.branch` has it: a sequence that is made empty is
    asked whether it is empty, or what a node gives that asks so."""
    operators, value = list[str](), node.inputs[0]
    while value is not None and (producer := value.producer()) is not None and len(operators) < 2 + len(_ASKS_IF_EMPTY):
        operators.append(producer.op_type)
        value = producer.inputs[0] if producer.inputs else None
    return operators in (_ASKS_IF_EMPTY, ["Equal", "If", *_ASKS_IF_EMPTY])


def _nameless(graph: ir.Graph, in_file: Mapping[str, Dims]) -> set[ir.Value]:
    """Values whose shapes are known here and not to onnxruntime, so that none takes another's memory.

    What windows and scaling make of a length that a file leaves open has no name (``convPoolShapeInference`` of
    ONNX, ``nchwc_schema_defs.cc`` of onnxruntime), and two shapes without one are never the same.
    """
    nodes = [node for each in (graph, *inner_graphs(graph)) for node in each]
    values = [*graph.inputs, *(value for node in nodes for value in node.outputs)]
    dims: dict[ir.Value, Dims] = {v: in_file[str(v.name)] for v in values if str(v.name) in in_file}
    for node in nodes:
        read = [dims[value] for value in node.inputs if value in dims]
        if not read or node.outputs[0] in dims:
            continue
        own, operator, made = max(read, key=len), operator_name(node), node.outputs[0]
        if operator in _WINDOWS and node.inputs[0] in dims:
            own = dims[node.inputs[0]]
            dims[made] = [own[0], 0, *(dim if isinstance(dim, int) else None for dim in own[2:])]
        elif operator in _SCALED:
            dims[made] = [dim if isinstance(dim, int) else None for dim in own]
        elif operator in _POOLS:
            dims[made] = [own[0], *(1 for _ in own[1:])]
        elif operator == "Concat" and own:
            axis = node.attributes.get_int("axis", 0) % len(own)
            sides = list(zip(*(each for each in read if len(each) == len(own)), strict=True))
            dims[made] = [
                None if (any if place == axis else all)(dim is None for dim in side) else side[0] or 0
                for place, side in enumerate(sides)
            ]
        elif operator in _AS_READ:
            are_open = {place - len(each) for each in read for place, dim in enumerate(each) if dim is None}
            dims[made] = [None if place - len(own) in are_open else dim for place, dim in enumerate(own)]
    return {value for value, own in dims.items() if None in own}


class _Allocations:
    """The memory that onnxruntime plans for the nodes' outputs: which share one, from which step to which.

    What is given by another graph has none; what is given ``late`` by a branch has it once that is over. Those that are
    ``nameless`` share none.
    """

    def __init__(
        self, graph: ir.Graph, nodes: list[ir.Node], given: Collection[ir.Value], late: Set[ir.Value],
        nameless: Collection[ir.Value],
    ) -> None:  # fmt: skip
        self.nodes, self.given, self.late, self.nameless = nodes, given, late, nameless
        self.results = set(graph.outputs)
        made = {value for node in nodes for value in node.outputs}
        # Left, by the value that owns the memory. What comes from outside is never overwritten
        self.uses = {value: 1 for node in nodes for value in read_values(node) if value not in made}
        for value in (*self.results, *(value for node in nodes for value in read_values(node))):
            self.uses[value] = self.uses.get(value, 0) + 1
        self.owner: dict[ir.Value, ir.Value] = {}
        self.dead: dict[Hashable, list[ir.Value]] = {}
        self.start: dict[ir.Value, int] = {}
        self.stop: dict[ir.Value, int] = {}

    def buffers(self) -> tuple[list[Buffer], list[Buffer]]:
        """Of the values inside the model, and of its outputs. A node takes two steps: its bodies run in the first."""
        late = set[ir.Value]()
        for step, node in enumerate(self.nodes):
            for index, value in enumerate(node.outputs):
                if not (value.name and dense(value)) or value in self.given:
                    continue
                shared = None if value in self.results else self._reused(node, index, value)
                if shared is None:  # memory of its own
                    self.start[value] = step
                else:
                    self.owner[value] = shared
                    self.uses[shared] = self.uses.get(shared, 0) + self.uses.get(value, 0)
            late.update(kernels.transposed(node))
            branches = [branch.outputs for branch in subgraphs(node)] if node.op_type == "If" else []
            late.update(v for v, *ends in zip(node.outputs, *branches, strict=True) if not self.late.isdisjoint(ends))
            for value in node.outputs:
                if not self.uses.get(value) and value in self.start:  # held, but for others to take
                    self.dead.setdefault(self._kind(value), []).append(value)
            for value in read_values(node):
                owner = self.owner.get(value, value)
                left = self.uses[owner] = self.uses.get(owner, 0) - 1
                if left <= 0 and owner in self.start:
                    self.stop[owner] = step + 1
                    self.dead.setdefault(self._kind(owner), []).append(owner)
        planned: list[Buffer] = []
        single: list[Buffer] = []
        for number, (value, start) in enumerate(self.start.items()):
            kind = single if value in self.results else planned
            begin, end = 2 * start + (value in late), 2 * self.stop.get(value, len(self.nodes))
            kind.append(Buffer(number, nbytes(value) or 0, begin, end))
        return planned, single

    def _reused(self, node: ir.Node, index: int, value: ir.Value) -> ir.Value | None:
        for source, target in aliasing.view_pairs(node):
            given = node.inputs[source]
            if target == index and given is not None and aliasing.is_declared_view(node):
                return self.owner.get(given, given)
        for source, target in aliasing.inplace_pairs(node) if operator_name(node) in _TAKES_INPUT else ():
            given = node.inputs[source]
            if target == index and given is not None and self._kind(given) == self._kind(value) is not None:
                owner = self.owner.get(given, given)
                if self.uses.get(owner) == 1:
                    return owner
        kind = self._kind(value) if value.shape else None
        waiting = None if kind is None else self.dead.get(kind)
        return waiting.pop() if waiting else None

    def _kind(self, value: ir.Value) -> Hashable:
        """What two values must have in common for one to take the other's memory; None for one of unknown shape."""
        dims, dtype = static_shape(value), value.dtype
        if dims is None or dtype is None or not dense(value) or value in self.nameless:
            return None
        return dims, dtype.bitwidth
