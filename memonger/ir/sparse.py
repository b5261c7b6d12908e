"""Sparse weights and constants: stock onnxruntime makes them dense as it loads a model, and so does a model here."""

import math
from collections.abc import Iterator

import numpy as np
import onnx
from onnx import numpy_helper

from memonger.errors import LoadError
from memonger.units import in_full

MOST_BYTES = 2 << 30
"""Of one tensor when it is dense: what a file holds of one that isn't sparse, too."""
_GRAPHS = ("If", "Loop", "Scan", "SequenceMap")  # operators with graphs in their attributes


def without_sparse(proto: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """The model with every sparse initializer and constant written out: onnx-ir leaves the first out.

    Returns: the same where there are none, else a copy.

    Raises:
        LoadError: one is malformed, too large, or lies in another file.
    """
    constants = (node for graph in _graphs(proto) for node in graph.node if node.op_type == "Constant")
    kinds = {attribute.type for node in constants for attribute in node.attribute}
    if onnx.AttributeProto.SPARSE_TENSOR not in kinds and not any(g.sparse_initializer for g in _graphs(proto)):
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for graph in _graphs(copy):
        graph.initializer.extend(_dense(each, name) for each in graph.sparse_initializer)
        del graph.sparse_initializer[:]
        for node in graph.node:
            for attribute in node.attribute:
                if node.op_type == "Constant" and attribute.type == onnx.AttributeProto.SPARSE_TENSOR:
                    dense = _dense(attribute.sparse_tensor, name)
                    attribute.CopyFrom(onnx.helper.make_attribute("value", dense))
    return copy


def _graphs(proto: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    graphs = [proto.graph]
    for graph in graphs:
        yield graph
        for node in graph.node:
            if node.op_type in _GRAPHS:
                graphs += [attribute.g for attribute in node.attribute if attribute.HasField("g")]


def _dense(sparse: onnx.SparseTensorProto, name: str) -> onnx.TensorProto:
    tensor, dims = sparse.values, tuple(sparse.dims)
    where = f"{name}: sparse tensor '{tensor.name}' of shape {list(dims)}"
    if onnx.TensorProto.EXTERNAL in (tensor.data_location, sparse.indices.data_location):
        raise LoadError(f"{where} lies in another file: write it dense, or into the model.")
    try:
        values, indices = numpy_helper.to_array(tensor).reshape(-1), numpy_helper.to_array(sparse.indices)
    except (ValueError, TypeError, KeyError) as error:
        raise LoadError(f"{where} can't be read: {error}.") from error
    if min(dims, default=0) < 0 or values.dtype.kind in "OSU" or indices.dtype != np.int64:
        raise LoadError(f"{where} is no valid one: it needs sizes, numbers, and indices of int64.")
    count = math.prod(dims)
    if (size := count * values.itemsize) > MOST_BYTES:
        raise LoadError(f"{where} takes {in_full(size)} when it is dense: the most is {in_full(MOST_BYTES)}.")
    if len(values) and indices.shape not in ((len(values),), (len(values), len(dims))):
        raise LoadError(f"{where} has {len(values)} values, and indices of shape {list(indices.shape)}.")
    array = np.zeros(count, values.dtype)
    if len(values):
        by_axis = tuple(indices.reshape(len(values), -1).T)
        try:
            array[np.ravel_multi_index(by_axis, dims if indices.ndim == 2 else (count,))] = values
        except ValueError as error:
            raise LoadError(f"{where} has an index outside of it.") from error
    dense = numpy_helper.from_array(array.reshape(dims), tensor.name)
    dense.data_type = tensor.data_type
    return dense
