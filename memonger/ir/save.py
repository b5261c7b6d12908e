"""Models on disk: one file, or a file and its weights beside it."""

import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import onnx
import onnx_ir as ir

from memonger.errors import PlanFileError, memory_checked
from memonger.files import folder_beside, locked, write_whole
from memonger.ir.packed import META, Copy, Packed
from memonger.ir.tensors import (
    DataFile,
    content,
    external_tensors,
    in_memory,
    read_bytes,
    replace_external,
    sizes_of_parts,
)
from memonger.ir.values import graphs, tensor_shape
from memonger.units import MiB, in_full
from memonger.words import option

SMALL = 256  # bytes of a weight that stays in the model when others go into a file of their own
INLINE_LIMIT = 1_500_000_000
"""Bytes of weights from which they go into a file of their own: nearly what one message of protobuf holds."""
MAPPED_LIMIT = MiB
"""The same of a planned model: onnxruntime maps such a file, where it copies what lies in the model's own."""
PAGE = 4096  # bytes; what weights of a page or more begin at a multiple of, and others at one of _ALIGNED
_ALIGNED = 64
PRODUCER = "memonger"
"""Of models that don't say."""
MESSAGE_LIMIT = 2**31 - 2**20  # bytes of weights that one message of protobuf holds, beside the graph
BESIDE = "Its save(path) writes large weights into a file beside the model."
SMALLER = (
    "Nothing was left behind. Keep the weights in a file beside the model (onnx.save with save_as_external_data=True), "
    "in the folder that is written to."
)
DIGEST = 16  # hexadecimal digits of their SHA-256 in that file's name


DIGESTED = "memonger.digest"
"""In the ``meta`` of an external tensor that was just written: a digest of its content."""

Kept = Collection[ir.TensorProtocol]
"""Tensors that stay where they are."""

Pack = Callable[[ir.Model, Collection[ir.Value]], Iterable[Copy]]
"""Gives packed copies of weights: see `memonger.runtime.packing.packed_weights`."""


def save_model(
    planned: ir.Model,
    path: Path,
    *,
    limit: int | None = None,
    own: bool = False,
    pack: Pack | None = None,
    finish: Callable[[ir.Model], object] = lambda model: None,
) -> None:
    """Write a model, and where its weights are large a data file beside it. Whole or not at all.

    Args:
        planned: The model; it may be changed, and is spent.
        path: The file.
        limit: Bytes of weights from which they go into a file of their own; None: `INLINE_LIMIT`.
        own: Write weights, too, that lie in files of that folder: else the model refers to these, where all do.
        pack: What packs weights for that file; None: nothing is packed.
        finish: Called with the model once all of it has its place, before it is written.

    Raises:
        PlanFileError: the folder isn't there or can't be written, or the disk is full; the file holds weights of the
            model itself.
    """
    check_not_its_weights(planned, path)
    planned.producer_name = planned.producer_name or PRODUCER
    with memory_checked(PlanFileError, f"{path} can't be written", SMALLER):
        _save(planned, path, INLINE_LIMIT if limit is None else min(limit, INLINE_LIMIT), own, pack, finish)


def as_proto(model: ir.Model, name: str) -> onnx.ModelProto:
    """A model as one message of its own, all weights in it.

    Args:
        model: Not changed.
        name: What messages call it.

    Raises:
        PlanFileError: its weights are more than one message holds; memory ran out.
    """
    with memory_checked(PlanFileError, f"{name} can't be one message", BESIDE):
        size = sum(tensor.nbytes for tensor in _weights(model))
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


def _save(
    planned: ir.Model, path: Path, limit: int, own: bool, pack: Pack | None, finish: Callable[[ir.Model], object]
) -> None:
    try:
        # External data that can be referred to, as it lies in the folder the model is written to: all of it, or none
        tensors = list(external_tensors(planned))
        there = frozenset(tensor for tensor in tensors if Path(tensor.base_dir).resolve() == path.parent.resolve())
        referred = frozenset(tensor for tensor in there if REFERRED in tensor.meta)
        kept = there if len(there) == len(set(tensors)) and not own else referred
        read_in(planned, {*kept, *_weights(planned)})
        if sum(tensor.nbytes for tensor in _weights(planned) if tensor not in kept) < limit:
            read_in(planned, kept)
            finish(planned)
            data = ir.serde.serialize_model(planned).SerializeToString()
            write_whole(path, lambda target: target.write(data))
        else:
            _write_with_data(planned, path, kept, pack, finish)
    except OSError as error:
        why = error.strerror or error if path.parent.is_dir() else f"there is no folder {path.parent}"
        raise PlanFileError(f"{path} can't be written: {why}. Nothing was left behind.") from error
    except ValueError as error:  # protobuf's own word for a message over 2 GiB
        raise PlanFileError(f"{path} can't be written: {error}.") from error


def _write_with_data(
    model: ir.Model, path: Path, kept: Kept, pack: Pack | None, finish: Callable[[ir.Model], object]
) -> None:
    """Write weights to ``<name>.<digest>.data``, then the model that refers to them: one rename makes both count.

    Of weights with the same bytes, as two graphs of a model may have them, the file has one.
    """
    with folder_beside(path) as folder:
        with (folder / "data").open("wb") as target:
            writer, weights = _FileWriter(target), dict(_weights_in_order(model, kept))
            packed = pack(model, weights.keys()) if pack is not None else ()  # meanwhile
            placed = {value: writer.weight(tensor) for value, tensor in weights.items()}
            copies = dict[ir.Value, tuple[Packed, ...]]()
            for copy in packed:
                copies[copy.weight] = (*copies.get(copy.weight, ()), writer.copy(copy))
            target.flush()
            os.fsync(target.fileno())
        data = f"{path.name}.{writer.digest.hexdigest()[:DIGEST]}.data"
        for value, (offset, digest) in placed.items():
            tensor = value.const_value
            assert tensor is not None
            value.const_value = ir.ExternalTensor(
                data, offset, tensor.nbytes, tensor.dtype, shape=tensor_shape(tensor), name=str(value.name),
                base_dir=path.parent,
            )  # fmt: skip
            value.const_value.meta[DIGESTED] = digest
            if value in copies:
                value.const_value.meta[META] = copies[value]
        read_in(model, {*kept, *(value.const_value for value in placed if value.const_value is not None)})  # small ones
        finish(model)
        with (folder / path.name).open("wb") as target:
            target.write(ir.serde.serialize_model(model).SerializeToString())
            target.flush()
            os.fsync(target.fileno())
        with locked(path.parent):
            if placed:
                os.replace(folder / "data", path.parent / data)
            os.replace(folder / path.name, path)
            # Remove earlier weights of a model, where no model in the folder refers to them any more
            old = re.compile(re.escape(path.name) + rf"\.[0-9a-f]{{{DIGEST}}}\.data")
            for entry in list(path.parent.iterdir()):
                is_old = entry.name != data and old.fullmatch(entry.name)
                if is_old and not any(mentions(other, entry.name) for other in path.parent.glob("*.onnx")):
                    entry.unlink(missing_ok=True)


class _FileWriter:
    """Writes a data file from front to back.

    Attributes:
        digest: Of the digests of all that was written.
    """

    def __init__(self, target: BinaryIO) -> None:
        self._target, self.digest = target, hashlib.sha256()
        self._there, self._digester = dict[str, int](), ThreadPoolExecutor(1)

    def weight(self, tensor: ir.TensorProtocol) -> tuple[int, str]:
        """Write a tensor, unless the same bytes are there already; returns where they begin, and a digest of them."""
        self.digest.update(str(tensor.name).encode())
        return self._write_once(content(tensor), tensor.nbytes)

    def copy(self, copy: Copy) -> Packed:
        """Write a packed copy, likewise: onnxruntime reads one of those that are equal."""
        name, sizes = str(copy.weight.name), tuple(length for _, length in copy.buffers)
        parts = chain.from_iterable(read_bytes(copy.file, begin, length, name) for begin, length in copy.buffers)
        begin, digest = self._write_once(parts, sum(sizes))
        return Packed(copy.key, begin, sum(sizes), digest, sizes if len(sizes) > 1 else ())

    def _write_once(self, parts: Iterator[Any], length: int) -> tuple[int, str]:
        end = self._target.tell()
        begin, digest = self._write(parts, length)
        there = self._there.setdefault(digest, begin)
        if there != begin:
            self._target.seek(end)
            self._target.truncate()
        return there, digest

    def _write(self, parts: Iterator[Any], length: int) -> tuple[int, str]:
        at, own = self._target.tell(), hashlib.sha256()
        self._target.write(bytes(-at % (PAGE if length >= PAGE else _ALIGNED)))
        begin = self._target.tell()
        for part in parts:
            digested = self._digester.submit(own.update, part)
            self._target.write(part)
            digested.result()
        self.digest.update(own.digest())
        if self._target.tell() != begin + length:
            raise OSError(0, f"a weight has {self._target.tell() - begin} bytes where {length} were expected")
        return begin, own.hexdigest()[: 2 * DIGEST]


def _weights_in_order(model: ir.Model, kept: Kept) -> list[tuple[ir.Value, ir.TensorProtocol]]:
    """The weights that go into a file of their own, in the order in which nodes read them."""
    found = dict[ir.Value, ir.TensorProtocol]()
    for graph in graphs(model):
        inside, own = sizes_of_parts(graph), dict.fromkeys(graph.initializers.values())
        read = (v for node in graph for v in node.inputs if v is not None and v in own)
        for value in dict.fromkeys((*read, *own)):
            tensor = value.const_value if value not in inside else None
            if tensor is None or tensor in kept:
                continue
            if tensor.dtype != ir.DataType.STRING and tensor.nbytes > SMALL:
                found[value] = tensor
    return list(found.items())


def mentions(file: Path, name: str, digest: Any = None) -> bool:
    """Whether a name stands in a file; read, not mapped, as mapped pages would count as this process's memory.

    Args:
        file: The file; none is there that has no such name.
        name: The name.
        digest: A hash that takes all bytes of the file meanwhile; None: it is read up to the name.
    """
    wanted, before, found = name.encode(), b"", False
    if not file.is_file():
        return False
    with file.open("rb") as content:
        while (part := content.read(1 << 20)) and not (found and digest is None):
            found = found or wanted in part or wanted in before + part[: len(wanted)]
            before = part[-len(wanted) :]
            if digest is not None:
                digest.update(part)
    return found


def read_in(model: ir.Model, kept: Kept = ()) -> None:
    """Put external data into a model, in place, but for what is kept where it is."""
    replace_external(model, lambda tensor: tensor if tensor in kept else in_memory(tensor))


REFERRED = "memonger.referred"
"""In the ``meta`` of an external tensor: the user has asked that a file refers to it."""


def refer_to(model: ir.Model, source: ir.Model, folder: Path, name: str) -> None:
    """Let weights of a model lie where another model of the same folder has them, where they are the same, bit for bit.

    Args:
        model: Is changed.
        source: The model whose weights are in files of their own.
        folder: Where ``model`` is to be written.
        name: What messages call the source.

    Raises:
        PlanFileError: none of the source's weights lie in files of that folder.
    """
    theirs: dict[tuple[object, ...], ir.ExternalTensor] = {}
    beside = [t for t in external_tensors(source) if Path(t.base_dir).resolve() == folder.resolve()]
    for tensor in beside:
        theirs.setdefault(_identity(tensor), tensor)
    if not theirs:
        raise PlanFileError(
            f"{name} has no weights in files of {folder}, which a plan there could refer to: store them beside the "
            "model (onnx.save with save_as_external_data=True), and save the plan in that folder. Or leave "
            f"{option('weights', 'source')} out: then it holds its own."
        )
    sizes = {tensor.nbytes for tensor in beside}
    for value in model.graph.initializers.values():
        own = value.const_value
        found = theirs.get(_identity(own)) if own is not None and own.nbytes in sizes and own.nbytes > SMALL else None
        if found is not None:
            value.const_value = DataFile(
                found.location, found.offset, found.nbytes, found.dtype, shape=tensor_shape(found),
                name=str(value.name), base_dir=folder,
            )  # fmt: skip
            value.const_value.meta[REFERRED] = True


def _identity(tensor: ir.TensorProtocol) -> tuple[object, ...]:
    """Equal for tensors of the same bytes, type and shape."""
    digest = hashlib.sha256()
    for part in content(tensor):
        digest.update(part)
    return tensor.dtype, tensor_shape(tensor).numpy(), digest.digest()


def _weights(model: ir.Model) -> list[ir.TensorProtocol]:
    return [v.const_value for g in graphs(model) for v in g.initializers.values() if v.const_value is not None]
