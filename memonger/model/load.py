"""A model from anywhere → a model with static input shapes, one graph, and every shape inference can tell.

Tensors stay where they are: external data is memory-mapped and never read here.
"""

import dataclasses
import logging
import os
import reprlib
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx.serialization
import onnx.version_converter
import onnx_ir as ir
from google.protobuf import json_format, text_format
from google.protobuf.message import DecodeError
from onnx_ir.passes import common as passes

from memonger.errors import LoadError
from memonger.files import instead
from memonger.ir import checks, onnx_process, wire
from memonger.ir.checks import root_cause
from memonger.ir.maps import without_maps
from memonger.ir.marks import inline, nodes_when_inlined
from memonger.ir.model import Model
from memonger.ir.passes import run_passes
from memonger.ir.sparse import without_sparse
from memonger.ir.tensors import FILES, UNSIZED, DataFile, external_tensors, replace_external
from memonger.ir.values import dense, graphs, static_shape, tensor_shape
from memonger.model import bind_dims
from memonger.model.branches import has_branches, open_branches
from memonger.shapes.inference import infer_shapes
from memonger.shapes.ranges import DimRange
from memonger.units import in_full
from memonger.words import did_you_mean, quoted

logger = logging.getLogger(__name__)

MIN_IR_VERSION = 10  # the first in which nodes carry metadata_props
MIN_OPSET = 7  # the first that onnxruntime has kernels for

MOST_NODES = 100_000
"""Nodes that functions are written out to at most."""

MOST_BYTES = 1 << 31
"""A protobuf message is smaller: weights beyond that lie in files beside it."""

_PART = 1 << 24  # bytes read at a time

NOT_A_GRAPH = (
    ValueError, TypeError, KeyError, AttributeError, IndexError, NotImplementedError, RecursionError,
    ir.serde.SerdeError,
)  # fmt: skip
"""What onnx_ir raises for a message that is no graph."""

NOWHERE = (
    "{} refers to external data files, but not where they lie: give the model's path instead, or their bytes beside it "
    "(model, {{'FILE': bytes}})."
)

FOREIGN = "memonger.foreign"
"""In the ``meta`` of the graph of an ``onnx_ir.Model``: it was read from bytes that came from outside."""

InMemory = bytes | onnx.ModelProto

Source = str | Path | InMemory | ir.Model | tuple[InMemory, Mapping[str, bytes]]


def load(
    source: Source | Model,
    *,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
) -> Model:
    """Read a model and make its shapes static.

    Args:
        source: A path, the bytes of a file, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; the second and third also
            with the files beside it, by their names in it: ``(model, {"model.onnx_data": data})``. None is changed.
        batch: The first dimension of every input where that is symbolic. None: 1 where it has no size yet, which
            ``notes`` of the result say.
        dims: Sizes of the other symbolic dimensions, by name, or by place: ``{"x[1]": 128}``.
        input_shapes: Whole shapes of inputs, by name, for what ``batch`` and ``dims`` leave open.

    Raises:
        LoadError: not an ONNX model; external data missing, cut short or outside the model's folder; an
            operator nobody knows; a dimension without a size; shapes that contradict each other.
    """
    return load_twice(source, batch=batch, dims=dims, input_shapes=input_shapes)[0]


def load_twice(
    source: Source | Model,
    *,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
) -> tuple[Model, Model | None]:
    """Read a model with its shapes static as `load` does, and with the sizes that its file leaves open.

    The second is how stock onnxruntime's optimizer sees it. Both share their tensors.

    Returns: None for the second where the file leaves no size open, where its operator set is too old for onnxruntime,
        and for a `Model`, whose sizes are bound.
    """
    if isinstance(source, Model):
        is_bound = all(static_shape(v) is not None for v in source.ir.graph.inputs if dense(v))
        if batch is None and not dims and not input_shapes and is_bound:
            return source, None
        foreign, source = source.foreign, source.ir
        source.graph.meta[FOREIGN] = foreign
    try:
        return _load(source, batch, dims or {}, input_shapes or {})
    except MemoryError as error:
        raise LoadError(
            f"there is not enough memory to read the model: {str(error) or 'allocation failed'}."
        ) from error


def _load(
    source: Source, batch: int | None, dims: Mapping[str, int], shapes: Mapping[str, Sequence[int]]
) -> tuple[Model, Model | None]:
    model = _inlined(source)
    sizes = {value.name: value.shape for value in model.graph.inputs if dense(value) and static_shape(value) is None}
    if model.ir.opset_imports.get("", MIN_OPSET) < MIN_OPSET:
        sizes = {}
    model = _prepared(bind_dims.bind(model, batch, dims, shapes))
    unbound = model.clone() if sizes else None
    for value in unbound.graph.inputs if unbound is not None else ():
        value.shape = sizes.get(value.name, value.shape)
    before = model.clone() if has_branches(model) else None
    try:
        return run_passes(model, "load", infer_shapes), unbound
    except LoadError:
        if before is None:
            raise
        with suppress(LoadError):  # it isn't a branch for other sizes: what was said first counts
            return run_passes(before, "load", open_branches, infer_shapes), unbound
        raise


def load_open(
    source: Source | Model,
    ranges: Mapping[str, DimRange],
    *,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
) -> tuple[Model, dict[str, DimRange]]:
    """Read a model and leave some dimensions of its inputs symbolic; values in between are as the file declares them.

    Args:
        source: As for `load`.
        ranges: By name or by place, as ``dims``: the dimensions that stay open.
        batch: As for `load`.
        dims: As for `load`, for the others.
        input_shapes: As for `load`.

    Returns: the model, and the ranges with the places they stand at.

    Raises:
        LoadError: as `load`; a range for a dimension that isn't open; an opset that would have to be raised.
    """
    if isinstance(source, Model):
        foreign, source = source.foreign, source.ir
        source.graph.meta[FOREIGN] = foreign
    model = _inlined(source)
    opset = model.ir.opset_imports.get("", MIN_OPSET)
    if opset < MIN_OPSET:
        raise LoadError(
            f"{model.name} is in opset {opset}: a range of sizes needs {MIN_OPSET} or newer. Export it again, or plan "
            "it for single sizes."
        )
    model, placed = bind_dims.bind_open(model, batch, dims or {}, ranges, input_shapes or {})
    return _prepared(model), placed


def _inlined(source: Source) -> Model:
    return run_passes(load_as_is(source), "load", inline_functions, checks.check_versions, drop_listed_initializers)


def _prepared(model: Model) -> Model:
    return run_passes(model, "load", checks.check_operators, raise_old_opset, checks.sort_nodes, lift_constants)


def load_as_is(source: Source) -> Model:
    """Read a model: nothing is inlined, raised, sorted, bound or inferred.

    Raises:
        LoadError: not an ONNX model, or its external data isn't there.
    """
    return run_passes(
        _copy(source), "load", checks.check_structure, open_unsized, describe_initializers, checks.check_external_data,
        map_external_data, checks.check_tensors,
    )  # fmt: skip


def map_external_data(model: Model) -> None:
    """A pass: tensors of other files are read as `DataFile` does; they are the same."""
    replace_external(model.ir, DataFile.of)


def open_unsized(model: Model) -> bool:
    """A pass: a dimension of -1 has no size, as the runtime reads it: Paddle's and Keras' exporters write it so."""
    found = False
    for graph in graphs(model.ir):
        for value in (*graph.inputs, *(v for node in graph for v in node.outputs)):
            if value.shape is not None and any(isinstance(dim, int) and dim == -1 for dim in value.shape):
                dims = (ir.SymbolicDim(None) if isinstance(dim, int) and dim == -1 else dim for dim in value.shape)
                value.shape, found = ir.Shape(list(dims)), True
    return found


def describe_initializers(model: Model) -> bool:
    """A pass: initializers that no caller may replace have their tensors' types and shapes, whatever a file declares.

    onnxruntime's converter to float16 leaves the weights of operators that it is to spare as they are, and declares
    them to be float16.
    """
    found = False
    for graph in graphs(model.ir):
        for value in graph.initializers.values():
            tensor = value.const_value
            if tensor is None or value.is_graph_input() or value.dtype in (None, tensor.dtype):
                continue
            value.type, value.shape, found = ir.TensorType(tensor.dtype), tensor_shape(tensor), True
    return found


def _copy(source: Source) -> Model:
    match source:
        case ir.Model():
            name = source.graph.name or "<onnx_ir.Model>"
            model = Model(source, name, foreign=bool(source.graph.meta.get(FOREIGN)))
            if source.functions and any(not str(tensor.base_dir) for tensor in external_tensors(source)):
                raise LoadError(NOWHERE.format(name))  # `onnx_ir.load` leaves out the tensors of functions
            checks.check_structure(model)  # what nothing writes can't be cloned
            in_order = all(checks.is_sorted(graph) for graph in graphs(source))
            try:
                copy = source.clone() if in_order else _from_proto_of(source, ir.serde.serialize_model(source))
            except RuntimeError as error:
                raise LoadError(f"{name} is not a valid ONNX model: {checks.root_cause(error)}.") from error
            return dataclasses.replace(model, ir=copy)
        case onnx.ModelProto():
            return _from_proto(source, "<onnx.ModelProto>", None)
        case bytes():
            return dataclasses.replace(_from_proto(_parse(source, "<bytes>"), "<bytes>", None), foreign=True)
        case (bytes() as data, Mapping() as files):
            return dataclasses.replace(_from_proto(_parse(data, "<bytes>"), "<bytes>", None, files), foreign=True)
        case (onnx.ModelProto() as proto, Mapping() as files):
            return _from_proto(proto, "<onnx.ModelProto>", None, files)
    if not isinstance(source, str | os.PathLike):
        raise LoadError(_no_source(source))
    path = Path(source)
    if path.is_dir():
        raise LoadError(f"{path} is a folder: name the .onnx file in it.")
    spilled = None
    try:
        form = onnx.serialization.registry.get_format_from_file_extension(path.suffix) or "protobuf"
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISFIFO(mode):
            raise LoadError(f"{path} is a device or socket: a model is read from a file or a pipe.")
        spilled = wire.read_spilled(path) if form == "protobuf" else None
        if spilled is not None:
            proto = spilled[0]
        else:
            data = _content(path)
            proto = onnx_process.parse_text(data) if form == "onnxtxt" else onnx.load_from_string(data, form)
    except FileNotFoundError:
        beside = list[str]()
        with suppress(OSError, ValueError):
            beside = [str(path.with_name(each.name)) for each in path.parent.iterdir() if each.suffix == ".onnx"]
        raise LoadError(f"{path}: no such file.{did_you_mean(str(path), beside)}") from None
    except OSError as error:
        raise LoadError(f"{path} can't be read: {error.strerror or error}.") from error
    except (
        DecodeError, json_format.Error, text_format.ParseError, onnx.parser.ParseError, ValueError, TypeError,
        AttributeError, RecursionError, RuntimeError,
    ) as error:  # fmt: skip
        hint = instead(path) or _HINTS.get(path.suffix.lower(), " Give the file that an export wrote, whole.")
        raise LoadError(f"{path} is not an ONNX model, or is cut short: {root_cause(error)}.{hint}") from error
    model = dataclasses.replace(_from_proto(proto, str(path), path.parent.resolve()), foreign=True)
    if spilled is not None:
        wire.bind(model.ir, spilled[1])
    _follow_links(model.ir, path.parent.resolve(), path.resolve().parent)
    return model


def _no_source(given: object) -> str:
    """What to say of what is no model in any form."""
    kind = given if isinstance(given, type) else type(given)
    if any(f"{base.__module__}.{base.__name__}" == "torch.nn.modules.module.Module" for base in kind.__mro__):
        return (
            f"{kind.__name__} is a PyTorch module: memonger.from_torch(module, example) makes a model of it, as in "
            "memonger.search_plan(memonger.from_torch(module, torch.zeros(1, 3, 224, 224)))."
        )
    return (
        "a model is given as a path, as bytes, or as an onnx.ModelProto, onnx_ir.Model or memonger.Model, not as "
        f"{reprlib.repr(given)}."
    )


def _follow_links(model: ir.Model, folder: Path, home: Path) -> None:
    """Where a model's path is a link into another folder, as in a hub's cache, links beside it go there too.

    Only those that end beside the file that the model itself is: no other folder is read.
    """

    def followed(tensor: ir.ExternalTensor) -> ir.TensorProtocol:
        try:
            end = (folder / tensor.location).resolve()
        except (OSError, ValueError):
            return tensor  # `checks.check_external_data` says what it is
        is_link = not Path(tensor.location).is_absolute() and ".." not in Path(tensor.location).parts
        return DataFile.of(tensor, location=end.name, base_dir=home) if is_link and end.parent == home else tensor

    if home != folder:
        replace_external(model, followed)


def _content(path: Path) -> bytes:
    """The bytes of a file or pipe, whole; a pipe may never end.

    Raises:
        LoadError: it is too large for a model.
        OSError: it can't be read.
    """
    status = path.stat()
    is_file = stat.S_ISREG(status.st_mode)
    with path.open("rb") as file:
        parts, left = list[bytes](), MOST_BYTES if not is_file or status.st_size < MOST_BYTES else 0
        while left > 0 and (part := file.read(min(left, _PART))):
            parts.append(part)
            left -= len(part)
    if left <= 0:
        raise LoadError(
            f"{path} is not an ONNX model: it has {in_full(MOST_BYTES)} or more, and a model has less. Weights beyond "
            "that lie in files beside it, as external data."
        )
    return b"".join(parts)


_FROM_TORCH = " memonger.from_torch(module, example) makes a model of a PyTorch module."
_HINTS = {
    ".pt": _FROM_TORCH, ".pth": _FROM_TORCH, ".ckpt": _FROM_TORCH, ".safetensors": _FROM_TORCH,
    ".h5": " tf2onnx makes one of a Keras model.", ".keras": " tf2onnx makes one of a Keras model.",
    ".tflite": " tf2onnx makes one of a TFLite model.", ".pb": " tf2onnx makes one of a TensorFlow graph.",
    ".ort": " It is in onnxruntime's own format: onnxruntime.InferenceSession writes it as ONNX where its options have "
            "optimized_model_filepath='model.onnx' and graph_optimization_level=ORT_DISABLE_ALL.",
}  # fmt: skip
"""What to say of other tools' files, by how their names end."""


def _parse(data: bytes, name: str) -> onnx.ModelProto:
    try:
        return onnx.ModelProto.FromString(data)
    except DecodeError as error:
        raise LoadError(f"{name} are not an ONNX model, or are cut short: {root_cause(error)}.") from error


def _from_proto(
    proto: onnx.ModelProto, name: str, folder: Path | None, files: Mapping[str, bytes] | None = None
) -> Model:
    if not proto.HasField("graph") or proto.ir_version < 1:
        raise LoadError(f"{name} is not an ONNX model: it has no graph or no IR version.")
    if not proto.graph.node and not proto.graph.output:
        raise LoadError(f"{name} has an empty graph: no nodes and no outputs, so there is nothing to plan.")
    if not proto.opset_import:
        raise LoadError(f"{name} is not a valid ONNX model: it imports no operator set (opset_import is empty).")
    proto = without_sparse(without_maps(proto, name), name)
    try:
        model = ir.serde.deserialize_model(proto)
        external = list(external_tensors(model))
    except NOT_A_GRAPH as error:
        raise LoadError(f"{name} is not a valid ONNX model: {root_cause(error)}.") from error
    if "ai.onnx" in model.opset_imports:  # another way to write the default domain
        model.opset_imports.setdefault("", model.opset_imports.pop("ai.onnx"))
    if external and files is not None:
        replace_external(model, lambda tensor: _out_of(files, tensor, name))
        external = []
    if external and folder is None:
        raise LoadError(NOWHERE.format(name))
    for tensor in external:
        tensor.base_dir = folder or ""
    return Model(model, name)


def _out_of(files: Mapping[str, bytes], tensor: ir.ExternalTensor, name: str) -> ir.TensorProtocol:
    """A tensor whose bytes lie in one of the files that were given in memory; they are not copied."""
    data, start = files.get(str(tensor.location)), tensor.offset or 0
    dims = [int(dim) for dim in tensor.shape.numpy()]
    if data is None:
        raise LoadError(
            f"{name}: the external data of tensor '{tensor.name}' is missing: {tensor.location} isn't among the files "
            f"given ({quoted(files, 3)})."
        )
    if tensor.dtype in UNSIZED or min(dims, default=0) < 0:
        raise LoadError(f"{name} is not a valid ONNX model: tensor '{tensor.name}' ({tensor.dtype.name}{dims}).")
    if start < 0 or len(data) < start + tensor.nbytes:
        raise LoadError(
            f"{name}: the external data of tensor '{tensor.name}' is cut short: {tensor.location} has {len(data)} "
            f"bytes, the tensor needs {tensor.nbytes} from byte {start}."
        )
    content = memoryview(data)[start : start + tensor.nbytes]
    if tensor.dtype.bitwidth < 8:
        packed = onnx.TensorProto(name=tensor.name, data_type=int(tensor.dtype), dims=dims, raw_data=bytes(content))
        return ir.serde.deserialize_tensor(packed)
    array = np.frombuffer(content, tensor.dtype.numpy()).reshape(dims)
    return ir.Tensor(array, dtype=tensor.dtype, name=tensor.name)


def inline_functions(model: Model) -> bool:
    """A pass: functions of the model's own are written out.

    Raises:
        LoadError: they call themselves, or one another without an end, or too many nodes come of them; a node has an
            attribute that its operator has lost until the model's operator set, as onnxruntime finds, too.
    """
    if not model.ir.functions:
        return False
    count = nodes_when_inlined(model.ir)
    if count > MOST_NODES:
        raise LoadError(
            f"{model.name}: its functions call one another so often that written out they are {count} nodes, and "
            f"{MOST_NODES} are the most that is read."
        )
    # They have the operator sets of the model: whatever they import, onnxruntime runs their nodes in these
    for function in model.ir.functions.values():
        for domain, version in function.opset_imports.items():
            whole = function.opset_imports[domain] = model.ir.opset_imports.setdefault(domain, version)
            for node in function.all_nodes() if version != whole else ():
                if node.domain != domain or not onnx.defs.has(node.op_type, whole, domain):
                    continue
                lost = node.attributes.keys() - onnx.defs.get_schema(node.op_type, whole, domain).attributes.keys()
                if lost:
                    raise LoadError(
                        f"{model.name}: its functions can't be inlined: '{function.name}' is in version {version} of "
                        f"'{domain or 'ai.onnx'}', the model in {whole}, where {node.op_type} has no "
                        f"{quoted(sorted(lost))}. Export the function in the model's."
                    )
    try:
        inline(model.ir)
    except (ValueError, RuntimeError, ir.passes.PassError, ir.passes.InvariantError) as error:
        raise LoadError(f"{model.name}: its functions can't be inlined: {root_cause(error)}.") from error
    return True


def drop_listed_initializers(model: Model) -> bool:
    """A pass: no initializers among the inputs of a model up to IR version 3, which has them there, and are none."""
    if (model.ir.ir_version or 0) >= 4:
        return False
    model.ir.ir_version = 4
    return passes.RemoveInitializersFromInputsPass()(model.ir).modified


def raise_old_opset(model: Model) -> bool:
    """A pass: no operator set that onnxruntime has no kernels for. onnx's converter needs static shapes.

    Raises:
        LoadError: onnx's converter can't raise it.
    """
    opset = model.ir.opset_imports.get("")
    is_old = opset is not None and opset < MIN_OPSET
    if is_old:
        logger.info("%s: opset %d raised to %d", model.name, opset, MIN_OPSET)
        try:
            convert(model, MIN_OPSET)
        except CONVERSION_ERRORS as error:
            raise LoadError(
                f"{model.name} is in opset {opset} and can't be raised to {MIN_OPSET}, the oldest onnxruntime runs: "
                f"{root_cause(error)}. Export it again with a newer opset."
            ) from error
    model.ir.ir_version = max(model.ir.ir_version or 0, MIN_IR_VERSION)
    return is_old


CONVERSION_ERRORS = (RuntimeError, ValueError, TypeError, onnx.version_converter.ConvertError, ir.serde.SerdeError)


def convert(model: Model, opset: int) -> None:
    """Write the model in another operator set, by onnx's own converter.

    Raises:
        CONVERSION_ERRORS: it can't be converted.
    """
    proto = ir.serde.serialize_model(model.ir)
    if model.foreign:
        converted = onnx_process.call("convert_version", proto, target_version=opset)
    else:
        converted = onnx.version_converter.convert_version(proto, opset)
    made = _from_proto_of(model.ir, converted)
    model.ir.graph, model.ir.ir_version = made.graph, made.ir_version


def _from_proto_of(model: ir.Model, proto: onnx.ModelProto) -> ir.Model:
    """A model from a proto made of another model: its external data is where it was."""
    made = ir.serde.deserialize_model(proto)
    folders: dict[str, Any] = {}
    for tensor in external_tensors(model):
        if folders.setdefault(str(tensor.location), tensor).base_dir != tensor.base_dir:
            raise LoadError(f"two folders hold external data of the model under the name {tensor.location}.")
    for tensor in external_tensors(made):
        before = folders[str(tensor.location)]
        tensor.base_dir = before.base_dir
        if FILES in before.meta:
            tensor.meta[FILES] = before.meta[FILES]
    return made


def lift_constants(model: Model) -> bool:
    """A pass: Constant nodes are initializers, as which a runtime has them. They are marked in ``meta``.

    Raises:
        LoadError: one is sparse, of a model that was given as onnx-ir's.
    """
    before = set(model.graph.initializers)
    for node in [n for n in model.graph if n.op_type == "Constant" and n.outputs[0].is_graph_output()]:
        _lift_output_constant(model.graph, node)
    try:
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model.ir)
    except (ValueError, TypeError) as error:
        raise LoadError(f"{model.name}: {error}. Write it as a dense constant.") from error
    for key, value in model.graph.initializers.items():
        if key not in before:
            value.meta["constant"] = True  # no parameter, whatever its type
    return len(model.graph.initializers) > len(before)


def _lift_output_constant(graph: ir.Graph, node: ir.Node) -> None:
    tensor = ir.convenience.get_const_tensor(node.outputs[0])
    if tensor is None:
        return
    old = node.outputs[0]
    new = ir.Value(name=old.name, shape=tensor_shape(tensor), type=ir.TensorType(tensor.dtype))
    new.const_value = tensor
    graph.outputs[:] = [new if value is old else value for value in graph.outputs]
    old.replace_all_uses_with(new)
    graph.remove(node, safe=True)
    graph.register_initializer(new)
