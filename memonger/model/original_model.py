"""The model that another one was written from, kept in that one's file: a model in loops knows what it was.

It stands in ``metadata_props["memonger.original"]``. Weights that the model holds under any name, in a body, say, are
left out, and found again by their content; so are matrices that it holds transposed.
"""

import hashlib
from collections.abc import Collection
from functools import cached_property

import onnx
import onnx_ir as ir

from memonger.errors import LoadError, PlanError
from memonger.ir.checks import root_cause
from memonger.ir.tensors import all_tensors, in_memory, replace_external, replace_tensors, transposed
from memonger.ir.values import graphs, tensor_shape
from memonger.model import load
from memonger.model.forward_model import from_text, to_text
from memonger.units import KiB, MiB

KEY = "memonger.original"
SMALL = KiB  # bytes; up to that many stay with the original
MOST = MiB  # bytes of others that the model doesn't hold: with more of them it doesn't keep its original
_HELD = "memonger:"  # before the digest of a weight that the model holds


def embed(model: ir.Model, original: ir.Model) -> None:
    """Put ``original`` into the metadata of ``model``, which is made from it. Weights both have are left out.

    Args:
        model: Changed in place, where it holds the weights of the original.
        original: As it was read. It is spent.
    """
    sizes = {tensor.nbytes for tensor in all_tensors(original) if _is_large(tensor)}
    held, left = _Held(model, sizes), 0

    def kept(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        nonlocal left
        if not _is_large(tensor):
            return in_memory(tensor) if isinstance(tensor, ir.ExternalTensor) else tensor
        digest = _digest(tensor)
        if held.find(digest) is not None:
            place = _HELD + digest
            shape = tensor_shape(tensor)
            return ir.ExternalTensor(place, 0, tensor.nbytes, tensor.dtype, shape=shape, name=tensor.name or "")
        left += tensor.nbytes
        return in_memory(tensor)

    replace_tensors(original, kept)
    if left <= MOST:
        model.metadata_props[KEY] = to_text(original)


def extract(model: ir.Model, name: str) -> ir.Model | None:
    """The original of a model; None where it keeps none. Weights are the model's own tensors.

    Raises:
        PlanError: it is malformed, or a weight is gone.
    """
    text = model.metadata_props.get(KEY)
    if text is None:
        return None
    try:
        original = ir.from_proto(onnx.ModelProto.FromString(from_text(text)))
        wanted = {one.length or 0 for one in all_tensors(original) if isinstance(one, ir.ExternalTensor)}
        held = _Held(model, wanted)

        def found(tensor: ir.ExternalTensor) -> ir.TensorProtocol:
            weight = held.find(str(tensor.location).removeprefix(_HELD))
            if weight is None or weight.nbytes != tensor.nbytes:
                raise LoadError(f"the file holds weight '{tensor.name}' no more")
            if weight.dtype == tensor.dtype:
                return ir.Tensor(weight.numpy().reshape(tensor.shape.numpy()), dtype=tensor.dtype, name=tensor.name)
            message = onnx.TensorProto(
                data_type=tensor.dtype.value, dims=tensor.shape.numpy(), raw_data=weight.tobytes()
            )
            return ir.Tensor(ir.serde.deserialize_tensor(message).numpy(), dtype=tensor.dtype, name=tensor.name)

        replace_external(original, found)
        return load.load_as_is(original).ir
    except (ValueError, TypeError, RuntimeError, ir.serde.SerdeError, LoadError) as error:
        raise PlanError(f"{name}: the model in its metadata '{KEY}' is malformed: {root_cause(error)}.") from error


class _Held:
    """The weights of a model, bodies included, that have one of some sizes in bytes, by what they hold."""

    def __init__(self, model: ir.Model, sizes: Collection[int]) -> None:
        weights = (value.const_value for graph in graphs(model) for value in graph.initializers.values())
        self._as_they_are = {_digest(one): one for one in weights if one is not None and one.nbytes in sizes}

    @cached_property
    def _transposed(self) -> dict[str, ir.TensorProtocol]:
        matrices = (transposed(one) for one in self._as_they_are.values() if len(one.shape) == 2)
        return {_digest(one): one for one in matrices}

    def find(self, digest: str) -> ir.TensorProtocol | None:
        """The weight with this digest, a matrix that is the transposed of one if none is so as it is."""
        found = self._as_they_are.get(digest)
        return self._transposed.get(digest) if found is None else found


def _is_large(tensor: ir.TensorProtocol) -> bool:
    return tensor.dtype != ir.DataType.STRING and tensor.nbytes > SMALL


def _digest(tensor: ir.TensorProtocol) -> str:
    return hashlib.sha256(tensor.tobytes()).hexdigest()
