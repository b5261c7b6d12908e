"""About what a session takes of the process's memory beside the tensors: onnxruntime's nodes and kernels, and Python's.

No part of a plan decides on it, and it isn't known to the byte: the C library and Python keep pieces of what loading
took. So it is no part of a plan's total, which is exact; it stands beside it.

From the growth of processes with one session each (onnxruntime 1.32.0, Python 3.11, Linux). Inference, 13 to 353
nodes: 2 to 9 MiB; a node is a whole fused layer, whose kernel keeps more. Training, 688 to 12,780 nodes: 13 to 115 MiB.
Of a training node onnxruntime keeps 6 to 9 KiB, its binding 0.5. The rest is Python's: arenas of 1 MiB in which a few
small objects are left of all that reading a plan made. How many these are differs from run to run, of EfficientNet's
4,200 nodes by 11 MiB once. Total and this together were within 2.5 % for 14 networks, with recomputation as well.

Left out is the check of the first run's order (``check_order``), whose profile keeps 2.5 KB a node more.

Chunks whose products pack their weights have sessions for the nodes of each structure, which run at more than one
address. Four CNNs at batch 16, 302 to 1,366 steps in 4 to 5 sessions: total and this were within 2 % of what processes
grew by. A GPT-2 with tied embeddings grew by 12 % more than that, and by 10 % more without chunks. Other chunks run in
one session: of MobileNet-v2, ResNet-50 and DenseNet-121 it took 4, 8 and 11 MiB more than sessions of their structures.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple

import onnx_ir as ir

from memonger.graph.ranged import idle_nodes
from memonger.ir.marks import CHUNK, STRIP, WINDOW, Chunk, before_chunks, chunk_of
from memonger.ir.operators import operator_name
from memonger.ir.packed import SMALLEST, all_packed, is_packing, packed_of, packed_sizes
from memonger.ir.save import MAPPED_LIMIT, SMALL
from memonger.ir.tensors import inner_bytes, list_bytes
from memonger.ir.values import static_shape
from memonger.model import kept_state
from memonger.shapes.ranges import DimRange
from memonger.units import KiB, MiB

_TRAINING = (9 * MiB, 8.5 * KiB)
_INFERENCE = (1.5 * MiB, 20 * KiB)
_CHUNKS = (1.5 * MiB, 4 * KiB)  # beside those of inference: for each step its addresses

_PROCESS = (13.2 * MiB, 11.4 * KiB)
"""What a process takes for inference beside tensors, modules included, and for each node: importing onnxruntime takes
8.4 MiB, and what runs a planned file 4. A line through what 167 files took, of 1 to 3,066 nodes."""

_QUANTIZED = 40 * KiB
"""The same for each convolution of integers more: what its kernel packs beside its weight."""

_INNER = 6 * KiB
"""The same for each node of a body (`If`, `Loop`), whose values have no addresses."""

_WITH_ONNX = (25.5 * MiB, 16 * KiB)
"""The same with ranges of sizes, where onnx and what knows graphs are loaded: their modules stay, and pieces of memory
with a few objects left of all that reading a plan made."""

_MODULES = 24 * MiB
"""What modules take in training: all of these."""

_CHECKED = 2.5 * KiB
"""What the profile of the first run keeps of a node, by which its order is checked."""

_LISTS = 2.85
"""How often long lists of numbers in attributes count, as of trees: as they are, and what kernels make of them. Of six
ensembles of 0.2 to 2.6 MiB of lists that was what processes grew by, within 0.4 MiB."""

PACKED = MiB
"""So much may copies of a node for chunks pack again before they share a session."""

MANY_STRIPS = 1000
"""So many nodes of strips, with what cuts and joins them, may be in one session: those of strips of one form share."""

_PACKS_NOTHING = frozenset(
    ["Add", "Conv", "Div", "Gather", "Mul", "Sub", "Where", "com.microsoft.nchwc::Conv", "com.microsoft::FusedConv"]
)
"""Operators whose kernels read weights as they lie; others are taken to pack them, as products of matrices do."""


def packed_bytes(node: ir.Node) -> int:
    """Bytes of weights that onnxruntime packs for a node, for itself."""
    if operator_name(node) in _PACKS_NOTHING:
        return 0
    weights = (value.const_value for value in node.inputs if value is not None)
    return sum(weight.nbytes for weight in weights if weight is not None)


def shares_sessions(model: ir.Model) -> bool:
    """Whether chunks of one structure are to share a session, as their copies would pack weights again, or are many.

    Else all run in one session. Each session has threads of its own, which sleep until it runs. A model that keeps a
    state runs in one: that is bound to what is kept by the names of the model.
    """
    if kept_state.KEY in model.metadata_props:
        return False
    first, packed, strips = set[str](), 0, 0
    for node in model.graph:
        if CHUNK in node.metadata_props:
            packed += packed_bytes(node) if before_chunks(node) in first else 0
            first.add(before_chunks(node))
            strips += STRIP in node.metadata_props
    return packed > PACKED or strips > MANY_STRIPS


def session_bytes(model: ir.Model, is_training: bool, ranges: Mapping[str, DimRange] = MappingProxyType({})) -> int:
    """About what a process grows by with a loaded session on the CPU, less the bytes of tensors.

    Args:
        model: The planned model, recomputations included.
        is_training: Whether it is a training session, which has two onnxruntime sessions.
        ranges: Dimensions with a range of sizes: small ones may have a session of their own.
    """
    nodes = steps = model.graph.num_nodes()
    if ranges:
        nodes = _nodes_for_ranges(model, ranges)
    elif not is_training and shares_sessions(model):  # chunks of one stage and length are taken to share one
        nodes = sum(1 for _ in _in_sessions(model, lambda chunk, own: (chunk.end - chunk.begin, len(own))))
    return bytes_of(nodes, steps, is_training)


def _nodes_for_ranges(model: ir.Model, ranges: Mapping[str, DimRange]) -> int:
    """The nodes of all sessions of a plan for ranges of sizes."""
    idle = idle_nodes(model, ranges)
    return model.graph.num_nodes() * (1 + bool(idle)) - len(idle)


def bytes_of(nodes: int, steps: int, is_training: bool) -> int:
    """The same for so many nodes in all sessions, which run so many steps."""
    base, each = _TRAINING if is_training else _INFERENCE
    if nodes < steps:
        base += _CHUNKS[0] + _CHUNKS[1] * steps
    return round(base + each * nodes)


def _in_sessions(model: ir.Model, form: Callable[[Chunk, Sequence[ir.Node]], object]) -> Iterator[ir.Node]:
    """The nodes of all sessions: chunks of one stage and form share one, and what joins them is in none."""
    seen = set[object]()
    for chunk, group in groupby(model.graph, chunk_of):
        nodes = [node for node in group if WINDOW not in node.metadata_props]
        if chunk is not None:
            key = chunk.band, chunk.stage, form(chunk, nodes)
            if key in seen:
                continue
            seen.add(key)
        yield from nodes


def _shapes(chunk: Chunk, nodes: Sequence[ir.Node]) -> object:
    """What chunks have in common that do share a session: operators and sizes. Those along rows differ at the ends."""
    return tuple((operator_name(node), tuple(map(static_shape, node.outputs))) for node in nodes)


class Weights(NamedTuple):
    """Bytes of weights in a process that runs a plan from its file: in memory of its own, and in pages of the file."""

    own: int
    mapped: int


_PACKED_FOR_ITSELF = frozenset(
    [
        "QLinearConv",
        *(f"com.microsoft::{name}" for name in ("DynamicQuantizeLSTM", "MatMulFpQ4", "QLinearConv", "QMoE")),
    ]
)
"""Operators whose kernels may pack a constant of two dimensions or more, and never read a packed one from a file."""


def weights_in_process(
    model: ir.Model, persistent: Collection[str], *, packs: bool, digests: Mapping[str, str] | None = None
) -> Weights:
    """Where weights lie in a process that runs a plan from its file, as it is there or as it would be written.

    Args:
        model: The planned model.
        persistent: Of a training model what persists: memory of the session's own, and not counted here.
        packs: Whether the file of a plan that isn't in one yet would hold packed copies.
        digests: Of weights, by name: onnxruntime finds packed copies by content, so that equal weights share one.
    """
    digests = digests or {}
    found = {digests.get(str(tensor.name), "") for tensor, _ in all_packed(model)} - {""}
    tensors = {v: v.const_value for v in model.graph.initializers.values() if v.const_value is not None}
    whole, mapped = sum(tensor.nbytes for tensor in tensors.values()), 0
    own = round(_LISTS * list_bytes(model)) + inner_bytes(model) - list_bytes(model)  # of bodies: in no file of its own
    packers = Counter[ir.Value | None]()  # kernels that pack it
    for node in _in_sessions(model, _shapes) if shares_sessions(model) else model.graph:
        packers.update(
            value
            for index, value in enumerate(node.inputs)
            if is_packing(node, index) or _packs_for_itself(node, index)
        )
    for value, tensor in tensors.items():
        if value.name in persistent:
            continue
        apart = tensor.nbytes > SMALL and (isinstance(tensor, ir.ExternalTensor) or whole >= MAPPED_LIMIT)
        if not apart:
            own += tensor.nbytes
            continue
        in_file = packed_of(tensor)
        size = sum(one.length for one in in_file) or sum(packed_sizes(value).values())
        if not in_file and digests.get(str(value.name)) in found:
            continue
        stays = size and packs and packers[value] and tensor.nbytes >= SMALLEST  # what only bodies pack, no file has
        if not in_file and not stays and is_packed_at_load(value):
            own += tensor.nbytes * max(1, packers[value])
        else:
            read = not all(is_packing(node, index) for node, index in value.uses())
            mapped += (tensor.nbytes if not size or read else 0) + size
    return Weights(own, mapped)


def is_packed_at_load(value: ir.Value) -> bool:
    """Whether some kernel packs a weight for itself, where the file has no packed copy."""
    return any(is_packing(node, index) for node, index in value.uses()) or packer_of(value) is not None


def packer_of(value: ir.Value) -> ir.Node | None:
    """A node whose kernel packs a weight for itself whatever the file has; None where there is none."""
    if value.const_value is None or len(value.const_value.shape) < 2:
        return None
    return next((node for node, index in value.uses() if _packs_for_itself(node, index)), None)


def _packs_for_itself(node: ir.Node, index: int) -> bool:
    return index > 0 and operator_name(node) in _PACKED_FOR_ITSELF


def beside_tensors(model: ir.Model, is_training: bool, ranges: Mapping[str, DimRange] = MappingProxyType({})) -> int:
    """About what a process takes beside tensors that loads one plan and runs it, modules included, on the CPU."""
    steps = model.graph.num_nodes()
    if is_training:
        return round(_MODULES + session_bytes(model, is_training) + _CHECKED * steps)
    nodes = sum(1 for _ in _in_sessions(model, _shapes)) if not ranges and shares_sessions(model) else steps
    nodes = _nodes_for_ranges(model, ranges) if ranges else nodes
    base, each = _WITH_ONNX if ranges else _PROCESS
    base += 0 if ranges else _INNER * (sum(1 for _ in model.graph.all_nodes()) - steps)
    base += _QUANTIZED * sum(node.op_type == "QLinearConv" for node in model.graph)
    return round(base + each * nodes + (_CHUNKS[0] + _CHUNKS[1] * steps if nodes < steps else 0))
