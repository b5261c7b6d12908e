"""Models on disk: one file, or a file and its weights beside it."""

import hashlib
import mmap
import os
import re
from pathlib import Path

import onnx
import onnx_ir as ir

from memonger.errors import PlanFileError, memory_checked
from memonger.files import folder_beside, locked, write_whole
from memonger.model.tensors import external_tensors, in_memory, replace_external, sizes_of_parts
from memonger.units import in_full

SMALL = 256  # bytes of a weight that stays in the model when others go into a file of their own
INLINE_LIMIT = 1_500_000_000  # bytes of weights from which they go into a file of their own
PRODUCER = "memonger"
"""Of models that don't say."""
MESSAGE_LIMIT = 2**31 - 2**20  # bytes of weights that one message of protobuf holds, beside the graph
BESIDE = "Its save(path) writes large weights into a file beside the model."
SMALLER = (
    "Nothing was left behind. Keep the weights in a file beside the model (onnx.save with save_as_external_data=True), "
    "in the folder that is written to."
)
DIGEST = 16  # hexadecimal digits of their SHA-256 in that file's name


def save_model(planned: ir.Model, path: Path) -> None:
    """Write a model, and where its weights are large a data file beside it. Whole or not at all.

    Args:
        planned: The model; it may be changed, and is spent.
        path: The file.

    Raises:
        PlanFileError: the folder isn't there or can't be written, or the disk is full; the file holds weights of the
            model itself.
    """
    check_not_its_weights(planned, path)
    planned.producer_name = planned.producer_name or PRODUCER
    with memory_checked(PlanFileError, f"{path} can't be written", SMALLER):
        _save(planned, path)


def as_proto(model: ir.Model, name: str) -> onnx.ModelProto:
    """A model as one message of its own, all weights in it.

    Args:
        model: Not changed.
        name: What messages call it.

    Raises:
        PlanFileError: its weights are more than one message holds; memory ran out.
    """
    with memory_checked(PlanFileError, f"{name} can't be one message", BESIDE):
        size = _weights(model)
        if size >= MESSAGE_LIMIT:
            raise PlanFileError(f"{name} has {in_full(size)} of weights, and one message holds 2 GiB. {BESIDE}")
        copy = model.clone()
        copy.producer_name = copy.producer_name or PRODUCER
        read_in(copy)
        return ir.serde.serialize_model(copy)


def check_not_its_weights(model: ir.Model, path: Path) -> None:
    """Check that a file to write isn't one that a model's weights are in.

    Raises:
        PlanFileError: it is.
    """
    files = {tensor.path for tensor in external_tensors(model)} if path.is_file() else set()
    if any(os.path.exists(file) and os.path.samefile(path, file) for file in files):
        raise PlanFileError(f"{path} holds weights of the model: name another file.")


def _save(planned: ir.Model, path: Path) -> None:
    try:
        if _keeps_data_in_place(planned, path.parent) or _weights(planned) < INLINE_LIMIT:
            write_whole(path, lambda target: target.write(_serialized(planned, path.parent)))
        else:
            _write_with_data(planned, path)
    except OSError as error:
        why = error.strerror or error if path.parent.is_dir() else f"there is no folder {path.parent}"
        raise PlanFileError(f"{path} can't be written: {why}. Nothing was left behind.") from error
    except ValueError as error:  # protobuf's own word for a message over 2 GiB
        raise PlanFileError(f"{path} can't be written: {error}.") from error


def _write_with_data(model: ir.Model, path: Path) -> None:
    """Write weights to ``<name>.<digest>.data``, then the model that refers to them: one rename makes both count."""
    data = f"{path.name}.{_digest(model)}.data"
    inside = [SMALL, *(each.nbytes for graph in model.graphs() for each in sizes_of_parts(graph).values())]
    with folder_beside(path) as folder:
        ir.save(model, folder / path.name, external_data=data, size_threshold_bytes=1 + max(inside))
        for name in (data, path.name):
            with (folder / name).open("rb") as written:
                os.fsync(written.fileno())
        with locked(path.parent):
            os.replace(folder / data, path.parent / data)
            os.replace(folder / path.name, path)
            _sweep(path, data)


def _digest(model: ir.Model) -> str:
    digest = hashlib.sha256()
    for graph in model.graphs():
        for name, value in graph.initializers.items():
            digest.update(name.encode())
            if value.const_value is not None:
                digest.update(value.const_value.tobytes())
    return digest.hexdigest()[:DIGEST]


def _sweep(path: Path, data: str) -> None:
    """Remove earlier weights of a model, where no model in the folder refers to them any more."""
    old = re.compile(re.escape(path.name) + rf"\.[0-9a-f]{{{DIGEST}}}\.data")
    for entry in list(path.parent.iterdir()):
        is_old = entry.name != data and old.fullmatch(entry.name)
        if is_old and not any(_mentions(other, entry.name) for other in path.parent.glob("*.onnx")):
            entry.unlink(missing_ok=True)


def _mentions(file: Path, name: str) -> bool:
    if not file.is_file() or not file.stat().st_size:
        return False
    with file.open("rb") as content, mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        return mapped.find(name.encode()) >= 0


def _serialized(model: ir.Model, folder: Path) -> bytes:
    if not _keeps_data_in_place(model, folder):
        read_in(model)
    return ir.serde.serialize_model(model).SerializeToString()


def read_in(model: ir.Model) -> None:
    """Put external data into a model, in place."""
    replace_external(model, in_memory)


def _keeps_data_in_place(model: ir.Model, folder: Path) -> bool:
    """Whether all external data lies in the folder the model is written to, so that it can be referred to."""
    tensors = list(external_tensors(model))
    return bool(tensors) and all(Path(tensor.base_dir).resolve() == folder.resolve() for tensor in tensors)


def _weights(model: ir.Model) -> int:
    return sum(
        v.const_value.nbytes for g in model.graphs() for v in g.initializers.values() if v.const_value is not None
    )
