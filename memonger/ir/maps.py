"""Outputs that are lists of dictionaries: what ``ZipMap`` makes of a classifier's table of scores.

A dictionary has no bytes that could be planned, and no place in a model that is served. So the node is taken out when a
model is read, the table is the output in its place, and what the columns are called stands in
``metadata_props["memonger.maps"]``. `memonger.Session` gives the dictionaries that stock onnxruntime gives.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from memonger.errors import LoadError
from memonger.ir.decoding import DecodingError, decode

KEY = "memonger.maps"

_STANDARD, _VERSION = ("", "ai.onnx"), 13
"""The domain of ONNX's own operators as files write it, and a version of it: the `Identity` of today."""

Keys = tuple[int, ...] | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Maps:
    """What the metadata holds: by output the columns' names, numbers of classes or texts."""

    numbers: Mapping[str, tuple[int, ...]]
    texts: Mapping[str, tuple[str, ...]]


def without_maps(proto: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """The model without the nodes that make dictionaries of the outputs: onnx-ir has no type for them.

    Returns: the same where there are none, else a copy.

    Raises:
        LoadError: other nodes read dictionaries, or an input is one; the message says what to do.
    """
    graph = proto.graph
    given = next((value.name for value in graph.input if _is_map(value.type)), None)
    if given is not None:
        raise LoadError(
            f"{name}: input '{given}' is a dictionary, which has no bytes to plan. Give the model the tensor that is "
            "made of it, and cut the nodes before it out."
        )
    if not any(_is_zip(node) for node in graph.node):
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    graph, outputs = copy.graph, {value.name for value in proto.graph.output}
    domains = {each.domain for each in copy.opset_import} | {each.domain for each in graph.node}
    if domains.isdisjoint(_STANDARD):
        copy.opset_import.add(version=_VERSION)  # CatBoost's trees and dictionaries are of ai.onnx.ml alone
    numbers, texts = dict[str, tuple[int, ...]](), dict[str, tuple[str, ...]]()
    for node in filter(_is_zip, graph.node):
        table, made = node.input[0], node.output[0]
        if any(made in other.input for other in graph.node):
            raise LoadError(
                f"{name}: a node reads '{made}' (ZipMap), a list of dictionaries: export the model without it "
                "(skl2onnx: options={'zipmap': False})."
            )
        attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        if strings := attributes.get("classlabels_strings"):
            texts[made] = tuple(each.decode(errors="replace") for each in strings)
        else:
            numbers[made] = tuple(attributes.get("classlabels_int64s", ()))
        node.CopyFrom(onnx.helper.make_node("Identity", [table], [made], node.name))
    for value in (*graph.output, *graph.value_info):
        if value.name in numbers or value.name in texts or _is_map(value.type):
            value.ClearField("type")
    record = {
        "numbers": {made: keys for made, keys in numbers.items() if made in outputs},
        "texts": {made: keys for made, keys in texts.items() if made in outputs},
    }
    copy.metadata_props.add(key=KEY, value=json.dumps(record))
    return copy


def _is_zip(node: onnx.NodeProto) -> bool:
    return node.domain == "ai.onnx.ml" and node.op_type == "ZipMap" and len(node.input) == len(node.output) == 1


def _is_map(kind: onnx.TypeProto) -> bool:
    while kind.WhichOneof("value") in ("sequence_type", "optional_type"):
        kind = getattr(kind, str(kind.WhichOneof("value"))).elem_type
    return bool(kind.HasField("map_type"))


def maps_of(model: ir.Model, name: str) -> dict[str, Keys]:
    """The outputs that stock onnxruntime gives as lists of dictionaries, and what their columns are called.

    Raises:
        LoadError: what the model says of it is malformed.
    """
    text = model.metadata_props.get(KEY)
    if text is None:
        return {}
    try:
        found = decode(_Maps, json.loads(text))
    except (ValueError, RecursionError, DecodingError) as error:
        raise LoadError(f"{name}: its metadata '{KEY}' is malformed: {error}.") from error
    return {**found.numbers, **found.texts}
