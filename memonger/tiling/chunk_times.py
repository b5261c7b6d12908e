"""How long nodes take whole and in slices, by constants: so what runs in chunks doesn't depend on what else runs.

A roofline (Williams, Waterman, Patterson 2009, see `memonger.graph.costs`) with a cache: of what is alive at a step
`CACHE` bytes lie there, and the rest of what it reads and writes comes from memory. The constants are of two cores of
an AMD EPYC (AVX-512, 32 MiB of third-level cache) with onnxruntime 1.31.1. How much longer or shorter thirteen CNNs at
batch 16 take in chunks they give within 6 % in the root of the mean square, with most told of EfficientNet (14 % too
fast) and least of MobileNet-v2 (11 % too slow); not of GoogLeNet, whose normalizations take half of its time. ``python
-m benchmarks.chunks`` measures it. A processor without AVX-512 has other rates of products and of weights that are read
again (`memonger.graph.costs.Rates`): products take three times as long there, so that caches save less.
"""

import itertools
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from memonger.graph import aliasing
from memonger.graph.costs import flops, rates
from memonger.graph.session_memory import packed_bytes, shares_sessions
from memonger.ir.extract import is_fed
from memonger.ir.marks import WINDOW, before_chunks, chunk_of
from memonger.ir.operators import facts
from memonger.ir.values import nbytes
from memonger.units import MiB

LAUNCH_SECONDS = (1.2e-6, 2.5e-6)
"""A node's fixed cost on one thread, and on several."""

RUN_SECONDS, WAKE_SECONDS = 10e-6, 3e-4
"""A run of one of several sessions: what Python and onnxruntime do around its nodes; and on several threads until its
own are awake, as those of the session before fall asleep. Measured: 0.1 to 1.3 ms."""

MEMORY_BYTES, CACHE_BYTES, WEIGHT_BYTES = 2.5e10, 6e10, 2e10
"""What two cores do in a second: bytes of values that are read or written in memory and in the cache, and of weights
that are read."""

MOVING_SECONDS = 1e-10
"""What a Concat or Slice of 1.32.0 takes for each byte that it gives, on one core: by it is judged which rows are kept.
What slices take in all counts them as if they came from the cache: so the constants together fit what was measured."""

CACHE = 16 * MiB
"""Bytes alive that lie in the cache, which weights and what else the machine does have a part of."""


@dataclass(frozen=True, slots=True)
class NodeWork:
    """What a node does.

    Attributes:
        flops: Operations of its products.
        weights: Bytes of constants that it reads; each slice reads them again.
        packed: Bytes of those that onnxruntime packs for it.
        values: Bytes of the other values that it reads or writes; none of a view, which moves nothing.
    """

    flops: int
    weights: int
    packed: int
    values: int

    @property
    def waits(self) -> bool:
        """Whether the products of its half are over before its weights are read, so that slices take longer."""
        return self.weights / WEIGHT_BYTES - self.flops / rates().flops / 2 > LAUNCH_SECONDS[-1]

    def seconds(self, cores: int, alive: float, slices: int = 1, is_first: bool = True) -> float:
        """About the time that all of it takes on so many cores, in so many slices one after the other.

        Unless the first of them is the first to read its weights, that is reading them again, too.

        Args:
            cores: How many there are.
            alive: Bytes alive while it runs.
            slices: Into how many it is cut.
            is_first: Whether nobody has read its weights before.
        """
        moved = self._moved(alive) + (self.weights / WEIGHT_BYTES if is_first else 0.0)
        again = self.weights * (slices - is_first) / rates().again
        return slices * launch_seconds(cores) + max(self.flops / rates().flops, moved) * 2 / cores + again

    def more_seconds(self, cores: int, alive: float, within: float, slices: int) -> float:
        """How much longer it takes in so many slices, with so many bytes alive whole, and within a slice."""
        return self.seconds(cores, within, slices) - self.seconds(cores, alive)

    def _moved(self, alive: float) -> float:
        """Seconds in which two cores move the values, where so many bytes are alive."""
        hit_ratio = min(1.0, CACHE / alive) if alive else 1.0
        return self.values * (hit_ratio / CACHE_BYTES + (1 - hit_ratio) / MEMORY_BYTES)

    def product_seconds(self, cores: int) -> float:
        """About what its products take on so many cores, which all are busy."""
        return self.flops / rates().flops * 2 / cores

    def hidden_seconds(self, cores: int, alive: float) -> float:
        """What `seconds` takes to be hidden: the shorter of the time of products and of values that are moved."""
        return min(self.flops / rates().flops, self._moved(alive)) * 2 / cores


def launch_seconds(cores: int) -> float:
    """What a node takes on so many cores, however little it does."""
    return LAUNCH_SECONDS[cores > 1]


def run_seconds(shares: bool, cores: int) -> float:
    """What a run of a stage's chunk takes beside its nodes, where those of one structure share a session, or not."""
    return (WAKE_SECONDS if cores > 1 else RUN_SECONDS) if shares else 0.0


def cores_of(threads: int) -> int:
    """Cores that are used with so many threads within a node; 0: all that there are."""
    return threads or os.cpu_count() or 1


def work_of(node: ir.Node, cut: Collection[int] = ()) -> NodeWork:
    """What a node of a model does whose shapes are known; of the inputs that are cut a constant is a value, too."""
    if aliasing.view_pairs(node):
        return NodeWork(0, 0, 0, 0)
    if facts(node).reads_part or facts(node).shape_only:
        return NodeWork(0, 0, 0, 2 * sum(nbytes(value) or 0 for value in node.outputs))
    read = {value: index for index, value in enumerate(node.inputs) if value is not None}
    weights = [value for value, index in read.items() if not is_fed(value) and index not in cut]
    values = [value for value in (*read, *node.outputs) if value not in weights]
    tensors = (value.const_value for value in weights)
    nbytes_of_weights = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    packed = packed_bytes(node) if nbytes_of_weights else 0
    return NodeWork(flops(node), nbytes_of_weights, packed, sum(nbytes(value) or 0 for value in values))


def seconds_of(
    model: ir.Model, alive: Sequence[float], cores: int, trains: bool, works: Mapping[str, NodeWork] | None = None
) -> float:
    """About the time of a run on so many cores, or of a training step, all of which runs in one session.

    A model in chunks has a copy of a node for each, and only the first reads weights for the first time.

    Args:
        model: Its nodes are the schedule.
        alive: Bytes alive at each of them.
        cores: How many there are.
        trains: Whether it is a training step.
        works: What nodes that are known already do, by name.
    """
    shares, seconds, seen = not trains and shares_sessions(model), 0.0, dict[str, dict[int, NodeWork]]()

    def is_left_out(node: ir.Node) -> bool:
        """Of what cuts and joins, whether it has nothing to do: parts lie in the whole; of a step, in what persists."""
        if WINDOW not in node.metadata_props:
            return False
        if not trains:
            return shares and bool(aliasing.windows(node))
        is_computed = node.inputs[0] is not None and node.inputs[0].producer() is not None
        return node.outputs[0].is_graph_output() or not (node.op_type == "Concat" or is_computed)

    steps = [(node, size) for node, size in zip(model.graph, alive, strict=True) if not is_left_out(node)]
    chunks = [chunk_of(node) for node, _ in steps]
    for (node, size), chunk in zip(steps, chunks, strict=True):
        name, length = before_chunks(node), 0 if chunk is None else chunk.end - chunk.begin
        alike = seen.setdefault(name, {})
        is_first = not alike
        if length not in alike or chunk is None:
            alike[length] = (works or {}).get(str(node.name)) or work_of(node)
        seconds += alike[length].seconds(cores, size, is_first=is_first)
    return seconds + run_seconds(shares, cores) * sum(1 for _ in itertools.groupby(chunks))
