"""Weights as a product's kernel reads them, kept in a plan's data file beside the weights as the model has them.

onnxruntime's kernels for products of float32 matrices copy a constant right operand into panels of 16 columns when a
session is made: memory of the process, as much as the weight has. Where the file of a weight holds such a copy as well
(``prepacked_0`` of its ``external_data``), the kernel packs the weight, compares a hash of that with the one in the
file, and where they are equal reads the file's copy in its place: pages of a file, which processes share and the system
takes back when it must. So nothing can differ in a bit, and elsewhere the weight is packed as ever. A weight that
products read both as it is and transposed, as a frozen one in a training step, has two copies.

Only such weights are taken whose packed size is known from their shape (`packed_sizes`): what a kernel reads then lies
in the file, whoever wrote it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import onnx
import onnx_ir as ir

from memonger.ir.decoding import LARGEST, AtLeast
from memonger.ir.operators import operator_name
from memonger.units import MiB

META = "memonger.packed"
"""In the ``meta`` of an external tensor: a `Packed` for each of its copies."""

SMALLEST = 4096
"""Bytes of a weight that is packed in the file: what is smaller fills no page."""

_PANEL = 16  # columns of a panel of MLAS: mlasi.h, MLAS_SGEMM_STRIDEN_THREAD_ALIGN
PRODUCTS = frozenset({"Gemm", "MatMul", "com.microsoft::FusedGemm", "com.microsoft::FusedMatMul"})
"""Operators whose kernels pack their right operand, where it is constant."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Where a packed copy of a weight lies in the file that the weight is in.

    Attributes:
        key: What onnxruntime knows it by: the operator, and a hash of its content.
        offset: Its first byte in the file.
        length: Its bytes.
        digest: Of its content, as `memonger.plan_file.tensor_digest`.
    """

    key: str
    offset: Annotated[int, AtLeast(0, LARGEST)]
    length: Annotated[int, AtLeast(1, LARGEST)]
    digest: str


class Copy(NamedTuple):
    """A weight's packed copy that was just made: an initializer, the copy's key, and the bytes of a file it lies in.

    Of a weight with two that for products by it as it is comes first, and then that for products by it transposed.
    """

    weight: ir.Value
    key: str
    file: Path
    offset: int
    length: int


def packed_sizes(value: ir.Value) -> dict[bool, int]:
    """Bytes of a weight's packed copies: of the one for products that multiply by it, by False, and of the one for
    those by it transposed, by True, in this order; of each only where there are such products.

    Args:
        value: An initializer. Others than products may read it as well: they read it as it is.
    """
    tensor = value.const_value
    if tensor is None or tensor.dtype != ir.DataType.FLOAT or len(tensor.shape) != 2 or value.is_graph_input():
        return {}
    rows, columns = (int(dim) for dim in tensor.shape.numpy())
    ways = {reads_transposed(node) for node, index in value.uses() if is_packing(node, index)}
    shapes = {way: (columns, rows) if way else (rows, columns) for way in sorted(ways)}
    return {way: -(-width // _PANEL) * _PANEL * depth * 4 for way, (depth, width) in shapes.items()}


def second_copies(model: ir.Model) -> dict[str, int]:
    """Bytes that weights take because products read them both as they are and transposed, by name, where they do.

    On the CPU each of these has two packed copies: in the plan's file, or in memory where that holds none.
    """
    twice = (value for value in model.graph.initializers.values() if len(packed_sizes(value)) > 1)
    return {str(value.name): value.const_value.nbytes for value in twice if value.const_value is not None}


def is_packing(node: ir.Node, index: int) -> bool:
    """Whether a node is a product, and an input its right operand."""
    return index == 1 and operator_name(node) in PRODUCTS


def reads_transposed(node: ir.Node) -> bool:
    """Whether a product multiplies by its right operand transposed."""
    attribute = node.attributes.get("transB")
    return bool(attribute is not None and not attribute.is_ref() and attribute.as_int())


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
        for number, packed in enumerate(packed_of(weights.get(tensor.name)) if tensor.external_data else ()):
            where = f"{packed.key}|{packed.offset};{packed.length};0"
            tensor.external_data.add(key=f"prepacked_{number}", value=where)


AT_ONCE = 64 * MiB
"""Bytes of weights that are packed in one session when a plan is written: it has all of them in memory."""
