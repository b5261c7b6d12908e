"""Dictionaries: inputs that ``DictVectorizer`` makes a table of, and outputs that ``ZipMap`` makes of one.

A dictionary has no bytes that could be planned, and no place in a model that is served. So the node is taken out when a
model is read, the table is the input or output in its place, and what the columns are called stands in
``metadata_props["memonger.maps"]``. `memonger.Session` takes and gives the dictionaries that stock onnxruntime does.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from memonger.errors import LoadError
from memonger.ir.decoding import decode_metadata

KEY = "memonger.maps"

_STANDARD, _VERSION = ("", "ai.onnx"), 13
"""The domain of ONNX's own operators as files write it, and a version of it: the `Identity` of today."""

Keys = tuple[int, ...] | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Maps:
    """What the metadata holds: by input or output the columns' names, numbers of classes or texts."""

    numbers: Mapping[str, tuple[int, ...]]
    texts: Mapping[str, tuple[str, ...]]


def without_maps(proto: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """The model with tables in place of the dictionaries among inputs and outputs: onnx-ir has no type for them.

    Returns: the same where there are none, else a copy.

    Raises:
        LoadError: other nodes read dictionaries; the message says what to do.
    """
    if not any(map(_is_zip, proto.graph.node)) and not any(_is_map(value.type) for value in proto.graph.input):
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    domains = {each.domain for each in copy.opset_import} | {each.domain for each in copy.graph.node}
    if domains.isdisjoint(_STANDARD):
        copy.opset_import.add(version=_VERSION)  # CatBoost's trees and dictionaries are of ai.onnx.ml alone
    given, made = _give_tables(copy.graph, name), _return_tables(copy.graph, name)
    outer = {value.name for value in proto.graph.output} | given.keys()
    record = dict[str, dict[str, Keys]](numbers={}, texts={})
    for value, keys in (given | made).items():
        if value in outer:
            record["texts" if keys and isinstance(keys[0], str) else "numbers"][value] = keys
    copy.metadata_props.add(key=KEY, value=json.dumps(record))
    return copy


def _give_tables(graph: onnx.GraphProto, name: str) -> dict[str, Keys]:
    """Make tables of inputs that are dictionaries, one row each. Returns what the columns are called, by input."""
    found = dict[str, Keys]()
    for value in graph.input:
        if not _is_map(value.type):
            continue
        readers = [node for node in graph.node if value.name in node.input]
        keys = {_keys(node, "string_vocabulary", "int64_vocabulary") for node in readers}
        if len(keys) != 1 or () in keys or not all(_is(node, "DictVectorizer") for node in readers):
            raise LoadError(
                f"{name}: input '{value.name}' is a dictionary, which has no bytes to plan, and no DictVectorizer says "
                "what its keys are. Give the model the tensor that is made of it, and cut the nodes before it out."
            )
        (found[value.name],) = keys
        kind = value.type.map_type.value_type.tensor_type.elem_type
        value.type.CopyFrom(onnx.helper.make_tensor_type_proto(kind, [1, len(found[value.name])]))
        for node in readers:
            node.CopyFrom(onnx.helper.make_node("Identity", [value.name], [node.output[0]], node.name))
    return found


def _return_tables(graph: onnx.GraphProto, name: str) -> dict[str, Keys]:
    """Make tables of lists of dictionaries. Returns what the columns are called, by the list."""
    found = dict[str, Keys]()
    for node in filter(_is_zip, graph.node):
        table, made = node.input[0], node.output[0]
        if any(made in other.input for other in graph.node):
            raise LoadError(
                f"{name}: a node reads '{made}' (ZipMap), a list of dictionaries: export the model without it "
                "(skl2onnx: options={'zipmap': False})."
            )
        found[made] = _keys(node, "classlabels_strings", "classlabels_int64s")
        node.CopyFrom(onnx.helper.make_node("Identity", [table], [made], node.name))
    for value in (*graph.output, *graph.value_info):
        if value.name in found or _is_map(value.type):
            value.ClearField("type")
    return found


def _keys(node: onnx.NodeProto, texts: str, numbers: str) -> Keys:
    """What a node calls the columns of its table: texts, or numbers where it has none."""
    attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    if strings := attributes.get(texts):
        return tuple(each.decode(errors="replace") for each in strings)
    return tuple(attributes.get(numbers, ()))


def _is(node: onnx.NodeProto, operator: str) -> bool:
    return node.domain == "ai.onnx.ml" and node.op_type == operator and len(node.input) == len(node.output) == 1


def _is_zip(node: onnx.NodeProto) -> bool:
    return _is(node, "ZipMap")


def _is_map(kind: onnx.TypeProto) -> bool:
    while kind.WhichOneof("value") in ("sequence_type", "optional_type"):
        kind = getattr(kind, str(kind.WhichOneof("value"))).elem_type
    return bool(kind.HasField("map_type"))


def maps_of(model: ir.Model, name: str) -> dict[str, Keys]:
    """What stock onnxruntime takes as a dictionary, or gives as a list of them, and what the columns are called.

    Raises:
        LoadError: what the model says of it is malformed.
    """
    found = decode_metadata(_Maps, model.metadata_props, KEY, name, LoadError)
    return {} if found is None else {**found.numbers, **found.texts}
