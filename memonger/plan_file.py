"""A planned model on disk: an ordinary ONNX file whose node order is the schedule, the layout one metadata string.

A plan file is untrusted input. What is read here is checked for form; `memonger.graph.verify` checks what it means.
"""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import onnx_ir as ir

from memonger.devices import Stamp
from memonger.errors import LoadError, PlanFileError, memory_checked
from memonger.graph.weight_window import WeightWindow, weight_reads
from memonger.ir.checks import check_operators, check_versions
from memonger.ir.decoding import LARGEST, AtLeast, DecodingError, OneOf, decode
from memonger.ir.fields import PLAN, plan_in
from memonger.ir.packed import META, Packed, all_packed, packed_buffers, packed_of
from memonger.ir.save import DIGESTED, MAPPED_LIMIT, SMALLER, Pack, mentions, refer_to, save_model
from memonger.ir.tensors import content, external_tensors, read_bytes
from memonger.ir.values import graphs, static_shape
from memonger.model.load import load_as_is
from memonger.shapes.ranges import DimRange
from memonger.units import MOST_BATCH, MOST_THREADS
from memonger.words import either

KEY = PLAN

ROWS = 2
"""The axis of an image's rows."""

FORMAT = 1

DIGEST = 32  # hexadecimal digits of a SHA-256

_KEY = re.compile(r"\w+\+\d+")  # of a packed copy: the operator, and a hash

Size = Annotated[int, AtLeast(0)]

Alignment = Annotated[int, OneOf((64, 128, 256, 512, 1024, 2048, 4096))]  # bytes; an arena begins at a page


@dataclass(frozen=True, slots=True)
class ChunkedBand:
    """Consecutive nodes that run in chunks, and what that saves and costs.

    Attributes:
        axis: The axis of the model's inputs along which they are cut: 0 is the batch, 2 the rows of images. Of a
            training step that of ``value``.
        first: Name of the first node.
        last: Name of the last node.
        nodes: How many nodes that run in chunks there are between them.
        slices: Of each stage, in order, the number of slices.
        runs: How many nodes they have become.
        bytes_before: Most bytes of the arena alive at one of them, if they run as they are.
        bytes_after: The same in chunks.
        seconds: What more nodes are estimated to take.
        value: Of a training step the largest value that is cut, or if there is one the largest parameter; else empty.
    """

    axis: Annotated[int, AtLeast(0)]
    first: str
    last: str
    nodes: Annotated[int, AtLeast(0)]
    slices: tuple[Annotated[int, AtLeast(1)], ...]
    runs: Annotated[int, AtLeast(0)]
    bytes_before: Size
    bytes_after: Size
    seconds: float
    value: str = ""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """The file that a model was planned from.

    Attributes:
        path: As it was given.
        digest: Of its bytes and of those of its external data, see `file_digest`.
    """

    path: str
    digest: str

    @staticmethod
    def of(source: Path) -> "SourceFile | None":
        """The file as a plan refers to it; None where it can't be read any more."""
        digest = file_digest(source)
        return None if digest is None else SourceFile(str(source), digest)

    def found(self, folder: Path) -> Path | None:
        """The file where it was, or in the planned file's folder, if it has not changed since."""
        places = (Path(self.path), folder / Path(self.path).name)
        return next((path for path in places if path.is_file() and file_digest(path) == self.digest), None)


def file_digest(path: Path) -> str | None:
    """A digest of a model's file and of the files that its external data lies in; None where they can't be read."""
    whole, own = hashlib.sha256(), hashlib.sha256()
    try:
        path.stat()
        is_alone = not mentions(path, "location", own)  # what names a file of external data is called so
        whole.update(own.digest())
        files = () if is_alone else dict.fromkeys(str(one.path) for one in external_tensors(load_as_is(path).ir))
        for file in map(Path, files):
            with file.open("rb") as content:
                whole.update(hashlib.file_digest(content, "sha256").digest())
    except (OSError, LoadError):
        return None
    return whole.hexdigest()[:DIGEST]


@dataclass(frozen=True, eq=False, kw_only=True)
class Header:
    """What a plan was made for, and what was measured there.

    Attributes:
        mode: ``inference`` or ``training``.
        device: What the plan was made for.
        stamp: The machine and runtime it is bound to; None for a portable plan.
        threads: Threads within a node that the workspace was measured with; 0 is onnxruntime's default.
        workspace: Bytes of workspace of each node by name, where measured and above zero; None if never measured.
        batch: The batch size asked for, or 1 where nobody gave the open batch a size; None where it isn't open.
        host: Names of values that lie in the host's memory although the model runs on another device: not planned.
        stock_bytes: What stock onnxruntime is expected to take for the model, weights and inputs included; None where
            that isn't known: without a device, on CUDA devices, and in files of earlier versions.
        chunks: What runs in chunks, in order.
        run_time: Bytes of each value whose size only a run can tell, by name, as the calibrating run showed them; they
            aren't in the arena.
        limit: The most bytes that onnxruntime may take by itself for such values and for workspace, so that the budget
            holds; None for no limit.
        ranges: Dimensions of the inputs with a range of sizes, all of which the layout holds for, by name. The model
            then has the shapes of the largest sizes, in its file symbolic ones.
        source_file: What was planned, where that was a file; None where it wasn't, and in files of earlier versions.
        window: Weights that stay in the file, as the budget is smaller than all of them; None where none has to.
    """

    mode: Annotated[str, OneOf(("training", "inference"))]
    device: str
    threads: Annotated[int, AtLeast(0, MOST_THREADS)]
    stamp: Stamp | None = None
    workspace: Mapping[str, Size] | None = None
    batch: Annotated[int, AtLeast(1, MOST_BATCH)] | None = None
    host: frozenset[str] = frozenset()
    stock_bytes: Size | None = None
    chunks: tuple[ChunkedBand, ...] = ()
    ranges: Mapping[str, DimRange] = field(default_factory=dict)
    run_time: Mapping[str, Size] = field(default_factory=dict)
    limit: Size | None = None
    source_file: SourceFile | None = None
    window: WeightWindow | None = None

    def header(self) -> dict[str, Any]:
        """These fields by name, to make another record that has them, too."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(Header)}


@dataclass(frozen=True, eq=False, kw_only=True)
class Record(Header):
    """The plan in a file: one JSON object in the model's metadata. Sizes are bytes; ``offsets`` are by value name.

    ``weight_digests`` are by tensor, see `weight_digests`; files of earlier versions have none. ``packed`` has by the
    weight's name where its packed copy lies, and ``packed_again`` where the second one does: see `memonger.ir.packed`.
    """

    format: int = FORMAT
    alignment: Alignment
    arena_bytes: Size
    graph_digest: str
    offsets: Mapping[str, Annotated[int, AtLeast(-LARGEST)]]  # the checker says whether they lie in the arena
    weight_digests: Mapping[str, str] | None = None
    packed: Mapping[str, Packed] = field(default_factory=dict)
    packed_again: Mapping[str, Packed] = field(default_factory=dict)


_ORDER = (
    "format", "mode", "device", "alignment", "arena_bytes", "batch", "threads", "graph_digest", "offsets", "workspace",
    "stamp", "host", "stock_bytes", "chunks", "ranges", "run_time", "limit", "source_file", "window",
    "weight_digests", "packed", "packed_again",
)  # fmt: skip
"""Order of the entries in a file, so that a plan is the same file byte for byte."""


def graph_digest(model: ir.Model) -> str:
    """A digest of the graph: opsets, nodes, attributes, names, types and shapes; of the weights all but their data."""
    digest = hashlib.sha256()
    digest.update(f"{sorted(model.opset_imports.items())};".encode())
    for graph in graphs(model):
        for value in (*graph.inputs, *graph.outputs, *graph.initializers.values()):
            digest.update(f"{value.name}:{_described(value)};".encode())
        for node in graph:
            digest.update(f"{node.op_identifier()}{node.name}".encode())
            digest.update(",".join(str(v.name) if v is not None else "" for v in node.inputs).encode())
            # An output that is left out has no type in a file
            digest.update(",".join(f"{v.name}:{_described(v)}" if v.name else "" for v in node.outputs).encode())
            for name in sorted(node.attributes):
                digest.update(attribute_bytes(node.attributes[name]))
    return digest.hexdigest()[:DIGEST]


def weight_digests(model: ir.Model) -> dict[str, str]:
    """A digest of every tensor's bytes, by name; tensors of subgraphs have the subgraph's number before their name."""
    found, at = dict[str, str](), dict[tuple[object, ...], str]()
    for number, graph in enumerate(graphs(model)):
        for name, value in graph.initializers.items():
            tensor = value.const_value
            if tensor is None:
                continue
            place: tuple[object, ...] = (id(tensor),)  # weights may be in one
            if isinstance(tensor, ir.ExternalTensor):
                place = str(tensor.path), tensor.offset, tensor.nbytes
            if place not in at:
                at[place] = tensor_digest(tensor)
            found[f"{number}/{name}" if number else name] = at[place]
    return found


def tensor_digest(tensor: ir.TensorProtocol) -> str:
    """A digest of a tensor's bytes: as they were written, where they just were.

    Raises:
        PlanFileError: it lies in a file that can't be read.
    """
    return tensor.meta.get(DIGESTED) or _digest(content(tensor))


def _digest(parts: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:DIGEST]


def _described(value: ir.Value) -> str:
    tensor = value.const_value
    if tensor is not None:
        return f"{tensor.dtype.name}{list(tensor.shape)}"
    return f"{value.dtype.name if value.dtype is not None else value.type}{static_shape(value)}"


def attribute_bytes(attribute: ir.Attr) -> bytes:
    """An attribute to make a digest of; of graphs the name alone."""
    if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        return attribute.name.encode()  # its graphs are walked on their own
    try:
        serialize = ir.serde.serialize_reference_attribute if attribute.is_ref() else ir.serde.serialize_attribute
        return serialize(attribute).SerializeToString(deterministic=True)
    except Exception as error:  # of a file from outside onnx_ir raises several kinds
        raise PlanFileError(f"attribute '{attribute.name}' is malformed: {error}.") from error


def _to_json(record: Record) -> str:
    content = {name: getattr(record, name) for name in _ORDER}
    if record.stamp is not None:
        content["stamp"] = dataclasses.asdict(record.stamp)
        if record.stamp.cuda is None:
            del content["stamp"]["cuda"]
    content["host"] = sorted(record.host)
    if not record.host:
        del content["host"]
    content["chunks"] = [dataclasses.asdict(band) for band in record.chunks]
    content["ranges"] = {name: dataclasses.asdict(one) for name, one in record.ranges.items()}
    content["source_file"] = None if record.source_file is None else dataclasses.asdict(record.source_file)
    content["window"] = None if record.window is None else dataclasses.asdict(record.window)
    for key in ("packed", "packed_again"):
        content[key] = {
            name: {what: given for what, given in dataclasses.asdict(one).items() if what != "parts" or given}
            for name, one in getattr(record, key).items()
        }
    optionals = (
        "stock_bytes", "chunks", "ranges", "run_time", "limit", "source_file", "window", "weight_digests", "packed",
        "packed_again",
    )  # fmt: skip
    for optional in optionals:
        if content[optional] in (None, {}, []):
            del content[optional]
    return json.dumps(content, separators=(",", ":"))


def is_planned(model: ir.Model) -> bool:
    """Whether a model has a plan in it."""
    return KEY in model.metadata_props


def without_plan(model: ir.Model) -> ir.Model:
    """A copy of a model without the plan that may be in it; its nodes are as they are."""
    copy = model.clone()
    copy.metadata_props.pop(KEY, None)
    return copy


def load(path: Path) -> tuple[ir.Model, Record]:
    """Read a planned file.

    Raises:
        PlanFileError: no plan in it, a malformed one, a newer format, or a model that isn't the one planned.
    """
    try:
        with memory_checked(PlanFileError, f"{path} can't be read", "The model needs a machine with more of it."):
            read = load_as_is(path)
        model, name = read.ir, read.name
    except LoadError as error:
        raise PlanFileError(str(error)) from error
    text = model.metadata_props.get(KEY)
    if text is None:
        how = either(f"memonger.search_plan({str(path)!r})", f"`memonger plan {path} -o PLANNED.onnx`")
        raise PlanFileError(f"{path} has no plan in it: make one with {how}.")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanFileError(f"{name}: its plan is not valid JSON: {error}.") from error
    record = _parse(content, name)
    for graph in graphs(model):
        for each in (*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs)):
            if any(isinstance(dim, int) and dim < 0 for dim in each.shape or ()):
                raise PlanFileError(f"{name}: '{each.name}' has a dimension below 0: {each.shape}.")
    if record.graph_digest != graph_digest(model):
        raise PlanFileError(
            f"{name}: its plan was made for another model, or the graph was changed since (the digests differ). "
            "Plan it again."
        )
    try:
        check_versions(read)
        check_operators(read, is_planned=True)
    except LoadError as error:
        raise PlanFileError(str(error)) from error
    # Note of weights where their packed copies lie, which have to be what a kernel reads, and inside the file
    for weight, one in (*record.packed.items(), *record.packed_again.items()):
        value = model.graph.initializers.get(weight)
        tensor = None if value is None else value.const_value
        if tensor is not None and not isinstance(tensor, ir.ExternalTensor):
            raise PlanFileError(
                f"{name}: its weight '{weight}' lies in the model, where its plan has it in a file: plan it again."
            )
        if value is None or not isinstance(tensor, ir.ExternalTensor) or not _is_read(one, value):
            raise PlanFileError(f"{name}: its plan is malformed: it has a packed copy of '{weight}' that none reads.")
        if not _KEY.fullmatch(one.key) or one.offset + one.length > os.path.getsize(tensor.path):
            raise PlanFileError(
                f"{name}: the packed copy of weight '{weight}' isn't in {tensor.path}: it was cut short. Plan it again."
            )
        tensor.meta[META] = (*packed_of(tensor), one)
    return model, record


def _is_read(packed: Packed, value: ir.Value) -> bool:
    """Whether a packed copy of a weight has as many bytes in each buffer as kernels may read."""
    parts = packed.parts or (packed.length,)
    return parts in packed_buffers(value).values() and sum(parts) == packed.length


def check_packed(model: ir.Model, name: str) -> None:
    """Compare packed copies of weights with their digests.

    Raises:
        PlanFileError: one isn't what it was when the plan was saved.
    """
    for tensor, packed in all_packed(model):
        if _digest(read_bytes(tensor.path, packed.offset, packed.length, str(tensor.name))) != packed.digest:
            raise PlanFileError(
                f"{name}: the packed copy of its weight '{tensor.name}' was changed since the plan was saved (the "
                "digests differ). Plan it again."
            )


def device_in(path: Path) -> str | None:
    """The device that the plan in a file was made for, read without the model; None where there is no such plan."""
    device = (plan_in(path) or {}).get("device")
    return None if device is None else str(device)


def _parse(content: Any, name: str) -> Record:
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        raise PlanFileError(f"{name}: its plan is malformed: it has no format number.")
    if content["format"] != FORMAT:
        newer = "newer" if content["format"] > FORMAT else "unknown"
        raise PlanFileError(
            f"{name}: its plan is in format {content['format']}, {newer} than this memonger's {FORMAT}. "
            "Upgrade memonger, or plan the model again."
        )
    try:
        return decode(Record, content, ignore_unknown=True)
    except DecodingError as error:
        raise PlanFileError(f"{name}: its plan is malformed: {error}.") from error


def save(
    model: ir.Model, record: Record, path: Path, pack: Pack | None = None, source: tuple[ir.Model, str] | None = None
) -> None:
    """Write a planned file, with digests of the model's weights, which lie beside it if they are many.

    Args:
        model: The planned model.
        record: Its plan.
        path: The file.
        pack: See `memonger.ir.save.save_model`.
        source: A model and its name, whose weights the file is to refer to where it has them; None: it has its own.

    Raises:
        PlanFileError: see `save_model`, and `memonger.ir.save.refer_to`.
    """
    with memory_checked(PlanFileError, f"{path} can't be written", SMALLER):

        def finish(written: ir.Model) -> None:
            packed, again = dict[str, Packed](), dict[str, Packed]()
            for tensor, one in all_packed(written):
                (again if str(tensor.name) in packed else packed)[str(tensor.name)] = one
            digests = weight_digests(written)
            # What is to stay in the file, and kernels pack, has a packed copy there
            named, there = set(record.window.weights if record.window else ()), {digests[name] for name in packed}
            for read in weight_reads(written) if named else ():
                if read.transposed is not None and read.name in named and digests[read.name] not in there:
                    raise PlanFileError(
                        f"{path} can't hold weight '{read.name}' as its kernel packs it on this processor, in a way "
                        "that isn't known: it would be in memory, and the budget wouldn't hold. Plan with a budget "
                        "above the weights."
                    )
            signed = dataclasses.replace(record, weight_digests=digests, packed=packed, packed_again=again)
            written.metadata_props[KEY] = _to_json(signed)

        planned = model.clone()
        if source is not None:
            refer_to(planned, source[0], path.parent, source[1])
        save_model(planned, path, limit=MAPPED_LIMIT, pack=pack, finish=finish)


def with_record(model: ir.Model, record: Record) -> ir.Model:
    """A copy of the model with its plan, and digests of its weights, in its metadata."""
    planned = model.clone()
    signed = dataclasses.replace(record, weight_digests=weight_digests(model))
    planned.metadata_props[KEY] = _to_json(signed)
    return planned
