"""Weights as kernels read them, kept in a plan's data file beside the weights as the model has them.

Many of onnxruntime's kernels lay a constant operand out anew when a session is made, those for products of float32
matrices in panels of 16 columns: memory of the process, as much as the weight has. Where the file of a weight holds
such a copy as well (``prepacked_0`` of its ``external_data``), the kernel packs the weight, compares a hash of that
with the one in the file, and where they are equal reads the file's copy in its place: pages of a file, which processes
share and the system takes back when it must. So nothing can differ in a bit, and elsewhere the weight is packed as
ever. A weight that is read in two ways, as a frozen one in a training step both as it is and transposed, has two
copies.

Only such weights are taken of which the size of a packed copy is known from their shape
(`memonger.ir.packing`): what a kernel reads then lies in the file, whoever wrote it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import onnx
import onnx_ir as ir

from memonger.ir.decoding import LARGEST, AtLeast
from memonger.ir.packing import number, packing
from memonger.units import MiB

META = "memonger.packed"
"""In the ``meta`` of an external tensor: a `Packed` for each of its copies."""

SMALLEST = 4096
"""Bytes of a weight that is packed in the file: what is smaller fills no page."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Where a packed copy of a weight lies in the file that the weight is in.

    Attributes:
        key: What onnxruntime knows it by: the operator, and a hash of its content.
        offset: Its first byte in the file.
        length: Its bytes.
        digest: Of its content, as `memonger.plan_file.tensor_digest`.
        parts: Bytes of each of its buffers, one behind the other, where there are several.
    """

    key: str
    offset: Annotated[int, AtLeast(0, LARGEST)]
    length: Annotated[int, AtLeast(1, LARGEST)]
    digest: str
    parts: tuple[Annotated[int, AtLeast(1, LARGEST)], ...] = ()

    def buffers(self) -> Iterator[tuple[int, int]]:
        """The first byte of each buffer in the file, and its bytes."""
        begin = self.offset
        for length in self.parts or (self.length,):
            yield begin, length
            begin += length


class Copy(NamedTuple):
    """A weight's packed copy that was just made: an initializer, the copy's key, and the bytes of a file it lies in.

    Of each of its ``buffers`` that is the first byte in the file, and how many there are. Of a weight with two copies
    the one for kernels that read it as it is comes first, and then that for those that read it transposed.
    """

    weight: ir.Value
    key: str
    file: Path
    buffers: tuple[tuple[int, int], ...]


def packed_buffers(value: ir.Value) -> dict[bool, tuple[int, ...]]:
    """Of each packed copy of a weight the bytes of its buffers: of the one for kernels that read it as it is, by False,
    and of the one for those that read it transposed, by True, in this order; of each only where there are such kernels.

    Args:
        value: An initializer. Others than those that pack it may read it as well: they read it as it is.

    Returns: Nothing where none packs it, or they differ in what they make of it.
    """
    found = {(reads_transposed(node), buffers) for node, index in value.uses() if (buffers := packing(node, index))}
    ways = dict(sorted(found))
    return ways if len(ways) == len(found) else {}


def packed_sizes(value: ir.Value) -> dict[bool, int]:
    """Bytes of a weight's packed copies: see `packed_buffers`."""
    return {way: sum(buffers) for way, buffers in packed_buffers(value).items()}


def second_copies(model: ir.Model) -> dict[str, int]:
    """Bytes that weights take because products read them both as they are and transposed, by name, where they do.

    On the CPU each of these has two packed copies: in the plan's file, or in memory where that holds none.
    """
    twice = (value for value in model.graph.initializers.values() if len(packed_sizes(value)) > 1)
    return {str(value.name): value.const_value.nbytes for value in twice if value.const_value is not None}


def is_packing(node: ir.Node, index: int) -> bool:
    """Whether a node's kernel packs an input, and the file can hold what it packs."""
    return bool(packing(node, index))


def reads_transposed(node: ir.Node) -> bool:
    """Whether a product multiplies by its right operand transposed."""
    return bool(number(node, "transB", 0))


def packed_of(tensor: ir.TensorProtocol | None) -> tuple[Packed, ...]:
    """Where the packed copies of a weight lie that its file has, in the order of `packed_sizes`."""
    return tensor.meta.get(META, ()) if isinstance(tensor, ir.ExternalTensor) else ()


def packed_by_way(value: ir.Value) -> dict[bool, Packed]:
    """The same by whether products read them transposed; none where the file hasn't all that products read."""
    ways, there = packed_sizes(value), packed_of(value.const_value)
    return dict(zip(ways, there, strict=True)) if len(ways) == len(there) else {}


def all_packed(model: ir.Model) -> Iterator[tuple[ir.ExternalTensor, Packed]]:
    """The weights of which the file has packed copies, and each of these."""
    for value in model.graph.initializers.values():
        for packed in packed_of(value.const_value):
            assert isinstance(value.const_value, ir.ExternalTensor)
            yield value.const_value, packed


def tell(message: onnx.ModelProto, weights: Mapping[str, ir.TensorProtocol | None]) -> None:
    """Say in a model's message where packed copies lie, in onnxruntime's words. ``weights``: its own, by name."""
    for tensor in message.graph.initializer:
        for count, packed in enumerate(packed_of(weights.get(tensor.name)) if tensor.external_data else ()):
            where = "|".join((packed.key, *(f"{begin};{length};0" for begin, length in packed.buffers())))
            tensor.external_data.add(key=f"prepacked_{count}", value=where)


AT_ONCE = 64 * MiB
"""Bytes of weights that are packed in one session when a plan is written: it has all of them in memory."""
