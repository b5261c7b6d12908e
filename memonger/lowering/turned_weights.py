"""Weights that products read transposed, as exporters of PyTorch write every linear layer: written so beforehand.

onnxruntime's optimizer transposes them too, each time it sees a model: it reads all weights for that, and writes them.
Of weights that lie in a file it keeps the place.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from memonger.errors import LoadError
from memonger.files import copy_part
from memonger.ir.model import Model
from memonger.ir.operators import operator_name
from memonger.ir.tensors import is_large
from memonger.ir.values import tensor_shape
from memonger.units import MiB

MUCH = 64 * MiB
"""Bytes of weights from which how they are written takes time."""

_NAME = "weights.data"
_ALIGNED = 4096
_TILE = 256  # rows and columns that are transposed at a time: the processor's own cache holds them
_PIECE = 1 << 17  # bytes written at a time; see `memonger.files.in_small_writes`


def turn_weights(models: Sequence[Model], folder: Path) -> list[Model] | None:
    """Models whose weights lie in one file, those transposed that products read so; None unless these are much.

    Args:
        models: Forms of one model. What they share is written once.
        folder: Where the file is made.

    Raises:
        LoadError: a file that weights lie in is too short.
        OSError: there is no room.
    """
    read = [weight for model in models for node in model.graph if (weight := _turned(node)) is not None]
    if sum({_place(weight): weight.nbytes for weight in read}.values()) < MUCH:
        return None
    made, written = [model.clone() for model in models], dict[tuple[object, ...], int]()
    with (folder / _NAME).open("wb") as file:

        def moved(tensor: ir.ExternalTensor, name: str | None, is_turned: bool) -> ir.ExternalTensor:
            key = (*_place(tensor), is_turned)
            if key not in written:
                file.write(bytes(-file.tell() % _ALIGNED))
                begin, written[key] = tensor.offset or 0, file.tell()
                with Path(tensor.path).open("rb") as source:
                    if source.seek(0, os.SEEK_END) < begin + tensor.nbytes:
                        raise LoadError(f"{tensor.path} ends before the {tensor.nbytes} bytes of '{tensor.name}' do.")
                    if not is_turned:
                        copy_part(source, begin, tensor.nbytes, file)
                for piece in _transposed(tensor) if is_turned else ():
                    file.write(piece)
            dims = tensor_shape(tensor).numpy()
            shape = ir.Shape(dims[::-1] if is_turned else dims)
            return ir.ExternalTensor(
                _NAME, written[key], tensor.nbytes, tensor.dtype, shape=shape, name=name or "", base_dir=folder
            )

        for model in made:
            for node in list(model.graph):
                if (matrix := _turned(node)) is None:
                    continue
                (turned,) = node.outputs
                weight = moved(matrix, turned.name, is_turned=True)
                kind, shape = ir.TensorType(weight.dtype), tensor_shape(weight)
                value = ir.Value(name=turned.name, type=kind, shape=shape, const_value=weight)
                turned.replace_all_uses_with(value)
                model.graph.remove(node, safe=True)
                model.graph.register_initializer(value)
            for value in model.graph.initializers.values():
                tensor = value.const_value
                if not isinstance(tensor, ir.ExternalTensor) or Path(tensor.base_dir) == folder:
                    continue
                if value.uses() and is_large(tensor):
                    value.const_value = moved(tensor, value.name, is_turned=False)
    return made


def _turned(node: ir.Node) -> ir.ExternalTensor | None:
    """The matrix in a file that a node transposes, where only products read it so."""
    source = node.inputs[0] if operator_name(node) == "Transpose" else None
    weight = None if source is None or source.is_graph_input() else source.const_value
    if not isinstance(weight, ir.ExternalTensor) or node.outputs[0].is_graph_output():
        return None
    is_matrix = len(weight.shape) == 2 and tuple(node.attributes.get_ints("perm") or (1, 0)) == (1, 0)
    is_plain = weight.dtype != ir.DataType.STRING and weight.dtype.bitwidth >= 8 and is_large(weight)
    readers = node.outputs[0].uses()
    are_products = bool(readers) and all(operator_name(user) == "MatMul" for user, _ in readers)
    return weight if is_matrix and is_plain and are_products else None


def _place(tensor: ir.ExternalTensor) -> tuple[object, ...]:
    return str(tensor.path), tensor.offset or 0, tensor.nbytes, tensor.dtype, tuple(tensor_shape(tensor).numpy())


def _transposed(tensor: ir.ExternalTensor) -> Iterator[memoryview]:
    """The bytes of a matrix, transposed, in pieces. It is mapped for that alone: pages that stay mapped would count."""
    height, width = tensor_shape(tensor).numpy()
    matrix = np.memmap(tensor.path, tensor.dtype.numpy(), "r", tensor.offset or 0, (height, width))
    for left in range(0, width, _TILE):
        band = np.empty((min(_TILE, width - left), height), matrix.dtype)
        for top in range(0, height, _TILE):
            band[:, top : top + _TILE] = matrix[top : top + _TILE, left : left + _TILE].T
        content = band.reshape(-1).view(np.uint8).data
        for begin in range(0, len(content), _PIECE):
            yield content[begin : begin + _PIECE]
