"""Weights as a product's kernel reads them, kept in a plan's data file beside the weights as the model has them.

onnxruntime's kernels for products of float32 matrices copy a constant right operand into panels of 16 columns when a
session is made: memory of the process, as much as the weight has. Where the file of a weight holds such a copy as well
(``prepacked_0`` of its ``external_data``), the kernel packs the weight, compares a hash of that with the one in the
file, and where they are equal reads the file's copy in its place: pages of a file, which processes share and the system
takes back when it must. So nothing can differ in a bit, and elsewhere the weight is packed as ever.

Only such weights are taken whose packed size is known from their shape (`packed_size`): what a kernel reads then lies
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
"""In the ``meta`` of an external tensor: its `Packed`."""

SMALLEST = 4096
"""Bytes of a weight that is packed in the file: what is smaller fills no page."""

_PANEL = 16  # columns of a panel of MLAS: mlasi.h, MLAS_SGEMM_STRIDEN_THREAD_ALIGN
PRODUCTS = frozenset({"Gemm", "MatMul", "com.microsoft::FusedGemm", "com.microsoft::FusedMatMul"})
"""Operators whose kernels pack their right operand, where it is constant."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Where a weight's packed copy lies in the file that the weight is in.

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
    """A weight's packed copy that was just made: an initializer, the copy's key, and the bytes of a file it lies in."""

    weight: ir.Value
    key: str
    file: Path
    offset: int
    length: int


def packed_size(value: ir.Value) -> int | None:
    """Bytes of a weight's packed copy; None where no product multiplies by it, or some by it and others transposed.

    Args:
        value: An initializer. Others than products may read it as well: they read it as it is.
    """
    tensor = value.const_value
    if tensor is None or tensor.dtype != ir.DataType.FLOAT or len(tensor.shape) != 2:
        return None
    attributes = [node.attributes.get("transB") for node, index in value.uses() if is_packing(node, index)]
    transposed = {bool(one is not None and not one.is_ref() and one.as_int()) for one in attributes}
    if len(transposed) != 1:
        return None
    rows, columns = (int(dim) for dim in tensor.shape.numpy())
    if transposed == {True}:
        rows, columns = columns, rows
    return -(-columns // _PANEL) * _PANEL * rows * 4


def is_packing(node: ir.Node, index: int) -> bool:
    """Whether a node is a product, and an input its right operand."""
    return index == 1 and operator_name(node) in PRODUCTS


def packed_of(tensor: ir.TensorProtocol | None) -> Packed | None:
    """Where the packed copy of a weight lies; None where the file has none."""
    return tensor.meta.get(META) if isinstance(tensor, ir.ExternalTensor) else None


def all_packed(model: ir.Model) -> Iterator[tuple[ir.ExternalTensor, Packed]]:
    """The weights of which the file has a packed copy, and where."""
    for value in model.graph.initializers.values():
        packed = packed_of(value.const_value)
        if packed is not None and isinstance(value.const_value, ir.ExternalTensor):
            yield value.const_value, packed


def tell(message: onnx.ModelProto, weights: Mapping[str, ir.TensorProtocol | None]) -> None:
    """Say in a model's message where packed copies lie, in onnxruntime's words. ``weights``: its own, by name."""
    for tensor in message.graph.initializer:
        packed = packed_of(weights.get(tensor.name))
        if packed is not None and tensor.external_data:
            tensor.external_data.add(key="prepacked_0", value=f"{packed.key}|{packed.offset};{packed.length};0")


AT_ONCE = 64 * MiB
"""Bytes of weights that are packed in one session when a plan is written: it has all of them in memory."""
