"""load: a model from anywhere → a model with static input shapes, one graph, and every shape inference can tell.

Tensors stay where they are: external data is memory-mapped and never read here.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from google.protobuf import json_format, text_format
from google.protobuf.message import DecodeError
from onnx_ir import external_data
from onnx_ir.passes import common as passes

from memonger import shapes
from memonger.errors import LoadError

logger = logging.getLogger(__name__)

MIN_IR_VERSION = 10  # the first in which nodes carry metadata_props
MIN_OPSET = 7  # the first that onnxruntime has kernels for
RUNTIME_DOMAINS = ("com.microsoft", "com.microsoft.nchwc", "com.ms.internal.nhwc", "com.microsoft.experimental")

Source = str | Path | bytes | onnx.ModelProto | ir.Model


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model.

    Attributes:
        ir: The model; every graph input has a static shape. Not to be edited: clone it.
        name: Where it came from, for messages: a path, or ``<bytes>`` and the like.
        batch: The batch size asked for, if any.
    """

    ir: ir.Model
    name: str
    batch: int | None = None


def load(
    source: Source | Model,
    *,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
) -> Model:
    """Read a model and make its shapes static.

    Args:
        source: A path, the bytes of a file, an ``onnx.ModelProto`` or an ``onnx_ir.Model``. None is changed.
        batch: The first dimension of every input where that is symbolic.
        dims: Sizes of the other symbolic dimensions, by name, or by place: ``{"x[1]": 128}``.
        input_shapes: Whole shapes of inputs, by name, for what ``batch`` and ``dims`` leave open.

    Raises:
        LoadError: not an ONNX model; external data missing, cut short or outside the model's folder; an
            operator nobody knows; a dimension without a size; shapes that contradict each other.
    """
    if isinstance(source, Model):
        if batch is None and not dims and not input_shapes:
            return source
        source = source.ir
    model, name = _read(source)
    check_external_data(model, name)
    _inline(model, name)
    model = _raise_versions(model, name)
    check_operators(model, name)
    lift_constants(model, name)
    _bind(model, name, batch, _with_given(model, name, dims or {}, input_shapes or {}))
    shapes.infer(model, name)
    return Model(model, name, batch)


def _read(source: Source) -> tuple[ir.Model, str]:
    match source:
        case ir.Model():
            return source.clone(), source.graph.name or "<onnx_ir.Model>"
        case onnx.ModelProto():
            return _from_proto(source, "<onnx.ModelProto>", None)
        case bytes():
            return _from_proto(_parse(source, "<bytes>"), "<bytes>", None)
    path = Path(source)
    if path.is_dir():
        raise LoadError(f"{path} is a folder: name the .onnx file in it.")
    try:
        proto = onnx.load(path, load_external_data=False)
    except FileNotFoundError:
        raise LoadError(f"{path}: no such file.") from None
    except OSError as error:
        raise LoadError(f"{path} can't be read: {error.strerror or error}.") from error
    except (DecodeError, json_format.Error, text_format.ParseError, ValueError) as error:
        raise LoadError(f"{path} is not an ONNX model, or is cut short: {error}.") from error
    return _from_proto(proto, str(path), path.parent)


def _parse(data: bytes, name: str) -> onnx.ModelProto:
    try:
        return onnx.ModelProto.FromString(data)
    except DecodeError as error:
        raise LoadError(f"{name} are not an ONNX model, or are cut short: {error}.") from error


def _from_proto(proto: onnx.ModelProto, name: str, folder: Path | None) -> tuple[ir.Model, str]:
    if not proto.HasField("graph") or proto.ir_version < 1:
        raise LoadError(f"{name} is not an ONNX model: it has no graph or no IR version.")
    if not proto.graph.node and not proto.graph.output:
        raise LoadError(f"{name} has an empty graph: no nodes and no outputs, so there is nothing to plan.")
    if not proto.opset_import:
        raise LoadError(f"{name} is not a valid ONNX model: it imports no operator set (opset_import is empty).")
    uses_files = any(t.data_location == onnx.TensorProto.EXTERNAL for t in proto.graph.initializer)
    if folder is None and uses_files:
        raise LoadError(f"{name} refers to external data files, but not where they lie: give the model's path instead.")
    try:
        model = ir.serde.deserialize_model(proto)
    except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError, ir.serde.SerdeError) as error:
        raise LoadError(f"{name} is not a valid ONNX model: {_root_cause(error)}.") from error
    if folder is not None:
        external_data.set_base_dir(model.graph, folder)
    return model, name


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().rstrip(".")


def external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """Every tensor of the model that lies in a file of its own, subgraphs included."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                yield value.const_value


def check_external_data(model: ir.Model, name: str) -> None:
    """Every external tensor lies whole in a file inside the model's own folder."""
    for tensor in external_tensors(model):
        folder, path = Path(tensor.base_dir).resolve(), Path(tensor.path).resolve()
        if Path(tensor.location).is_absolute() or not path.is_relative_to(folder):
            raise LoadError(
                f"{name}: tensor '{tensor.name}' points to {tensor.location}, outside the model's folder {folder}. "
                "Files elsewhere are not read; move the data beside the model."
            )
        if not path.is_file():
            raise LoadError(f"{name}: the external data of tensor '{tensor.name}' is missing: no file {path}.")
        end = (tensor.offset or 0) + (tensor.length if tensor.length is not None else tensor.nbytes)
        if path.stat().st_size < end or (tensor.length is not None and tensor.length < tensor.nbytes):
            raise LoadError(
                f"{name}: the external data of tensor '{tensor.name}' is cut short: {path} has {path.stat().st_size} "
                f"bytes, the tensor needs {tensor.nbytes} from byte {tensor.offset or 0}."
            )


def _inline(model: ir.Model, name: str) -> None:
    if not model.functions:
        return
    try:
        passes.InlinePass()(model)
    except (ValueError, RuntimeError, ir.passes.PassError) as error:
        raise LoadError(f"{name}: its functions can't be inlined: {_root_cause(error)}.") from error


def _raise_versions(model: ir.Model, name: str) -> ir.Model:
    opset = model.opset_imports.get("", None)
    if opset is not None and opset < MIN_OPSET:
        logger.info("%s: opset %d raised to %d", name, opset, MIN_OPSET)
        model.ir_version = max(model.ir_version or 0, 4)
        try:
            proto = onnx.version_converter.convert_version(ir.to_proto(model), MIN_OPSET)
        except (RuntimeError, ValueError) as error:
            raise LoadError(
                f"{name} is in opset {opset} and can't be raised to {MIN_OPSET}, the oldest onnxruntime runs: "
                f"{_root_cause(error)}. Export it again with a newer opset."
            ) from error
        model = ir.serde.deserialize_model(proto)
    old = model.ir_version or 0
    if old < 4:
        for value in model.graph.initializers.values():
            _remove_input(model.graph, value)
    model.ir_version = max(old, MIN_IR_VERSION)
    return model


def _remove_input(graph: ir.Graph, value: ir.Value) -> None:
    if value.is_graph_input():
        graph.inputs.remove(value)


def check_operators(model: ir.Model, name: str) -> None:
    """Every operator is one that ONNX defines, or lies in a domain of onnxruntime's own."""
    known = {schema.domain for schema in onnx.defs.get_all_schemas()}
    for node in model.graph.all_nodes():
        if node.domain in RUNTIME_DOMAINS:
            continue
        where = f"node '{node.name}' ({node.op_type})"
        if node.domain not in known:
            raise LoadError(
                f"{name}: {where} is in the domain '{node.domain}', which neither ONNX nor onnxruntime defines. "
                "Give the operator a function body in the model, or cut it out."
            )
        opset = model.opset_imports.get(node.domain)
        if opset is None or not onnx.defs.has(node.op_type, opset, node.domain):
            raise LoadError(
                f"{name}: {where} is an unknown operator: domain '{node.domain or 'ai.onnx'}' has no "
                f"'{node.op_type}' in opset {opset}."
            )


def lift_constants(model: ir.Model, name: str) -> None:
    """Turn Constant nodes into initializers, which is what a runtime does with them."""
    for node in [n for n in model.graph if n.op_type == "Constant" and n.outputs[0].is_graph_output()]:
        _lift_output_constant(model.graph, node)
    try:
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    except ValueError as error:
        raise LoadError(f"{name}: {error}. Write it as a dense constant.") from error


def _lift_output_constant(graph: ir.Graph, node: ir.Node) -> None:
    tensor = ir.convenience.get_const_tensor(node.outputs[0])
    if tensor is None:
        return
    old = node.outputs[0]
    new = ir.Value(name=old.name, shape=shapes.tensor_shape(tensor), type=ir.TensorType(tensor.dtype))
    new.const_value = tensor
    graph.outputs[:] = [new if value is old else value for value in graph.outputs]
    old.replace_all_uses_with(new)
    graph.remove(node, safe=True)
    graph.register_initializer(new)


def _dim_key(value: ir.Value, axis: int) -> str:
    return f"{value.name}[{axis}]"


def _symbol(dim: int | ir.SymbolicDim) -> str | None:
    return dim.value if isinstance(dim, ir.SymbolicDim) else None


def _bind(model: ir.Model, name: str, batch: int | None, dims: Mapping[str, int]) -> None:
    """Give every symbolic dimension of the inputs its size, and forget the symbolic shapes of all else."""
    for key, size in (*dims.items(), *([("batch", batch)] if batch is not None else [])):
        if size < 0:
            raise LoadError(f"dimension '{key}' can't be {size}.")
    sizes, unused = dict(dims), set(dims)
    if batch is not None:
        sizes = {**_batch_symbols(model, name, batch), **sizes}
    for value in model.graph.inputs:
        if value.shape is None or not isinstance(value.type, ir.TensorType):
            continue
        bound: list[int] = []
        for axis, dim in enumerate(value.shape):
            keys = [key for key in (_dim_key(value, axis), _symbol(dim)) if key is not None and key in sizes]
            if isinstance(dim, int):
                if keys and sizes[keys[0]] != dim:
                    raise LoadError(f"{name}: dimension {keys[0]} is {dim} in the model and can't be {sizes[keys[0]]}.")
                unused.difference_update(keys)
                bound.append(dim)
                continue
            if not keys:
                raise LoadError(_unbound_message(name, value, axis, dim))
            unused.difference_update(keys)
            bound.append(sizes[keys[0]])
        value.shape = ir.Shape(bound)
    if unused:
        known = sorted(shapes.symbols(model))
        raise LoadError(
            f"{name} has no dimension named {', '.join(sorted(map(repr, unused)))}; "
            + (f"it has {', '.join(known)}." if known else "all of its dimensions are fixed.")
        )
    shapes.forget_symbolic(model)


def _with_given(
    model: ir.Model, name: str, dims: Mapping[str, int], given: Mapping[str, Sequence[int]]
) -> dict[str, int]:
    """The sizes in ``dims`` and those that whole input shapes give besides, by place."""
    sizes = dict(dims)
    for value in model.graph.inputs:
        shape = given.get(str(value.name))
        if shape is None or not isinstance(value.type, ir.TensorType):
            continue
        if value.shape is None:
            value.shape = ir.Shape(list(shape))
        if len(value.shape) != len(shape):
            raise LoadError(f"{name}: input '{value.name}' has {len(value.shape)} dimensions; {list(shape)} was given.")
        for axis, (dim, size) in enumerate(zip(value.shape, shape, strict=True)):
            if not isinstance(dim, int) and _symbol(dim) not in dims:
                sizes.setdefault(_dim_key(value, axis), size)
    return sizes


def _batch_symbols(model: ir.Model, name: str, batch: int) -> dict[str, int]:
    sizes: dict[str, int] = {}
    fixed = []
    for value in model.graph.inputs:
        if value.shape is None or len(value.shape) == 0:
            continue
        first = value.shape[0]
        if isinstance(first, int):
            fixed.append((value.name, first))
        else:
            sizes[_symbol(first) or _dim_key(value, 0)] = batch
    if not sizes and all(first != batch for _, first in fixed):
        which = ", ".join(f"'{input_name}' has {first}" for input_name, first in fixed) or "the model has no inputs"
        raise LoadError(
            f"{name}: the batch can't be {batch}, its inputs' first dimensions are fixed ({which}). "
            "Export the model with a dynamic batch dimension, or leave --batch out."
        )
    return sizes


def _unbound_message(name: str, value: ir.Value, axis: int, dim: Any) -> str:
    symbol = _symbol(dim)
    flag = f"--dim {symbol}=N" if symbol else f"--dim '{_dim_key(value, axis)}=N'"
    called = f"'{symbol}'" if symbol else "without a name"
    also = " or --batch N" if axis == 0 else ""
    return (
        f"{name}: dimension {axis} of input '{value.name}' ({called}) has no size. "
        f"Plans need static shapes: give it one with {flag}{also}."
    )


def load_as_is(path: Path) -> tuple[ir.Model, str]:
    """Read a planned file: nothing is inlined, raised, bound or inferred.

    Raises:
        LoadError: not an ONNX model, or its external data isn't there.
    """
    model, name = _read(path)
    check_external_data(model, name)
    return model, name
