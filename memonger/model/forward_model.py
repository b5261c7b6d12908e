"""The forward model inside a training model: what is evaluated, and exported once it is trained.

It stands in ``metadata_props["memonger.forward"]`` without the weights that the training model has under the same name.
"""

import base64
import binascii
import logging
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir

from memonger.errors import LoadError, PlanError, SessionError
from memonger.files import ScratchFolder
from memonger.ir import save
from memonger.ir.checks import root_cause
from memonger.ir.model import Model
from memonger.ir.rewrite import remove_unused
from memonger.ir.tensors import FILES, DataFile, is_large
from memonger.ir.training_roles import Training
from memonger.ir.values import input_at, tensor_shape
from memonger.model import load
from memonger.units import MiB

logger = logging.getLogger(__name__)

KEY = "memonger.forward"
SMALL = 64  # elements; up to that many stay with the forward model
LARGEST = 1 << 30  # bytes of a forward model without its weights: what is larger when unpacked is refused
_MANY = MiB  # bytes of large weights from which on they wait in a file for evaluation and export


def to_text(model: ir.Model) -> str:
    """A model as text for another one's metadata: its message, packed."""
    return base64.b64encode(zlib.compress(ir.to_proto(model).SerializeToString(deterministic=True), 9)).decode()


def from_text(text: str) -> bytes:
    """The message that `to_text` packed.

    Raises:
        ValueError: the text is malformed, or what it unpacks to is too large.
    """
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(text, validate=True), LARGEST)
    except (binascii.Error, zlib.error, MemoryError) as error:
        raise ValueError(str(error)) from error
    if not unpacker.eof:
        raise ValueError("cut short, or too large")
    return data


def embed(model: ir.Model, forward: ir.Model, roles: Training) -> None:
    """Put ``forward`` into the metadata of ``model``, which is made from it. Weights both have are left out.

    Args:
        model: A training model.
        forward: Not changed.
        roles: Those of the training model's inputs and outputs.
    """
    copy = forward.clone()
    copy.metadata_props.pop(KEY, None)
    persistent = set(roles.persistent)
    theirs = {str(v.name): v for v in model.graph.initializers.values()}
    for name, value in list(copy.graph.initializers.items()):
        tensor, other = value.const_value, theirs.get(name)
        large = tensor is not None and other is not None and tensor.size > SMALL
        if tensor is not None and (name in persistent or large):
            value.type, value.shape = ir.TensorType(tensor.dtype), tensor_shape(tensor)
            del copy.graph.initializers[name]
            value.const_value = None
            if not value.is_graph_input():
                copy.graph.inputs.append(value)
    save.read_in(copy)
    model.metadata_props[KEY] = to_text(copy)


def extract(model: ir.Model, name: str, *, trained: bool = False) -> ir.Model | None:
    """The forward model in a training model; None where there is none.

    Weights that the training model holds as plain initializers are taken from there: the same tensors, which are in
    memory or in a file. What it has as inputs (trained parameters, running statistics) is an input here too, or with
    ``trained`` an initializer: the input's default. Then all of them are copies in memory.

    Raises:
        PlanError: it is malformed.
    """
    text = model.metadata_props.get(KEY)
    if text is None:
        return None
    try:
        forward = load.load_as_is(from_text(text)).ir
    except (ValueError, LoadError) as error:
        raise PlanError(f"{name}: the forward model in its metadata '{KEY}' is malformed: {error}.") from error
    forward.graph.meta[load.FOREIGN] = True
    for value in list(forward.graph.inputs):
        other = model.graph.initializers.get(str(value.name))
        if other is not None and other.const_value is not None and (trained or not other.is_graph_input()):
            value.const_value = other.const_value
            if trained:  # the tensor itself may be part of a message, and would keep all of it, weights included
                value.const_value = ir.tensor(other.const_value.numpy().copy(), name=value.name)
            forward.graph.inputs.remove(value)
            forward.graph.register_initializer(value)
    return forward


def to_inference_form(forward: ir.Model) -> None:
    """Turn a forward model into inference form, in place: what a user exported for training is evaluated as well.

    BatchNormalization normalizes by the running statistics, and Dropout drops nothing, in branches and loops too. The
    model's outputs that were the statistics' new content are gone; a node that reads it reads the statistics. A Dropout
    that an input of the model tells whether to drop does as told.
    """
    turned = False
    for node in list(ir.traversal.RecursiveGraphIterator(forward.graph)):
        if node.domain != "":
            continue
        if node.op_type == "BatchNormalization" and node.attributes.get_int("training_mode", 0) == 1:
            del node.attributes["training_mode"]
            # Leave a BatchNormalization its first output alone
            for old, new in zip(node.inputs[3:5], node.outputs[1:3], strict=False):
                if new in forward.graph.outputs:
                    forward.graph.outputs.remove(new)
                if node.graph is not None and (new.uses() or new.is_graph_output()):
                    same = ir.node("Identity", [old], name=f"{node.name}.{new.name}")
                    node.graph.insert_before(node, same)
                    new.replace_all_uses_with(same.outputs[0], replace_graph_outputs=True)
            node.resize_outputs(1)
        elif node.op_type == "Dropout" and (drops := input_at(node, 2)) is not None:
            if drops.producer() is None and drops.is_graph_input() and drops.const_value is None:
                continue  # it is fed
            node.resize_inputs(2)
        else:
            continue
        turned = True
    if turned:
        remove_unused(Model(forward, str(forward.graph.name)))


@dataclass(frozen=True, slots=True)
class FrozenWeights:
    """Where large weights of a forward model wait that aren't trained, until it is evaluated or exported.

    Attributes:
        files: What keeps temporary files alive that they lie in.
        folders: The folder of each, by its name.
        stamps: Size and time of change (ns) of the files that others may change, by path.
    """

    files: tuple[object, ...]
    folders: Mapping[str, str]
    stamps: Mapping[str, tuple[int, int]]

    def check(self) -> None:
        """Check that the files are as they were.

        Raises:
            SessionError: one isn't.
        """
        for path, stamp in self.stamps.items():
            if _stamp(path) != stamp:
                what = "changed" if os.path.exists(path) else "removed"
                raise SessionError(
                    f"{path} was {what} since the session was made, and frozen weights lie in it that evaluate() and "
                    "export() need. Save the state, save the plan again, and make a new session."
                )


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def packed(forward: ir.Model | None, files: object = None) -> tuple[onnx.ModelProto | None, FrozenWeights | None]:
    """The model as a message, which takes a fraction of its memory, and where its large weights are if these are many.

    These aren't trained: onnxruntime has them, and only evaluation and export read them again. Those in a file stay
    there, as in that of the plan; the others are written to one. `unpacked` undoes it.

    Args:
        forward: The model; None where there is none.
        files: What keeps temporary files alive that its weights lie in, if any.

    Raises:
        PlanError: the model can't be written as a message, for an attribute without a type, say.
    """
    if forward is None:
        return None, None
    tensors = {name: value.const_value for name, value in forward.graph.initializers.items()}
    there = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, ir.ExternalTensor)}
    rest = {name: tensor for name, tensor in tensors.items() if tensor is not None and name not in there}
    inside = {name: tensor for name, tensor in rest.items() if is_large(tensor)}
    scratch = None
    if sum(tensor.nbytes for tensor in inside.values()) >= _MANY:
        try:
            scratch = ScratchFolder()
            written = ir.external_data.convert_tensors_to_external([*inside.values()], scratch.path, "weights")
            for name, tensor in zip(inside, written, strict=True):
                forward.graph.initializers[name].const_value = tensor
        except OSError as error:
            logger.warning("frozen weights stay in memory for evaluation, as no folder takes them: %s.", error)
            scratch = None
    folders = {name: os.path.abspath(tensor.base_dir) for name, tensor in there.items()}
    stamps = {str(Path(tensor.path).resolve()): (0, 0) for tensor in there.values()}
    stamps = {path: stamp for path in stamps if (stamp := _stamp(path)) is not None}
    folders |= dict.fromkeys(inside, str(scratch.path)) if scratch is not None else {}
    kept = [scratch, files, *(tensor.meta.get(FILES) for tensor in there.values())]
    frozen = FrozenWeights(tuple({id(one): one for one in kept if one is not None}.values()), folders, stamps)
    try:
        return ir.to_proto(forward), frozen if folders else None
    except ir.serde.SerdeError as error:
        raise PlanError(
            f"{forward.graph.name}: the forward model in its metadata '{KEY}' is malformed: {root_cause(error)}."
        ) from error


def unpacked(message: onnx.ModelProto | None, frozen: FrozenWeights | None) -> ir.Model | None:
    """The model that `packed` was given.

    Raises:
        SessionError: a file of its weights was changed or removed meanwhile.
    """
    if message is None:
        return None
    forward = ir.from_proto(message)
    if frozen is not None:
        frozen.check()
        for name, folder in frozen.folders.items():
            value = forward.graph.initializers[name]
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = DataFile.of(value.const_value, base_dir=folder)
    forward.graph.meta[load.FOREIGN] = True
    return forward
