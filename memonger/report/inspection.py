"""What a model's file says of it: versions, sizes, operators, inputs and outputs; as a record and for the terminal."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import onnx_ir as ir
from rich.table import Column, Table

from memonger.ir.operators import operator_name
from memonger.ir.tensors import inner_bytes, inner_tensors
from memonger.units import format_size


def model_record(model: ir.Model, name: str) -> dict[str, Any]:
    """Versions, producer, parameters (elements and bytes of the weights), operators, inputs and outputs."""
    initializers = (value.const_value for value in model.graph.initializers.values())
    tensors = [tensor for tensor in initializers if tensor is not None]
    inner = list(inner_tensors(model))
    is_old = (model.ir_version or 0) < 4  # its initializers are listed among the inputs, which no caller gives
    given = [value for value in model.graph.inputs if not (is_old and value.name in model.graph.initializers)]
    return {
        "model": name,
        "ir_version": model.ir_version,
        "opsets": {domain or "ai.onnx": version for domain, version in sorted(model.opset_imports.items())},
        "producer": " ".join(filter(None, (model.producer_name, model.producer_version))) or None,
        "nodes": model.graph.num_nodes(),
        "functions": len(model.functions),
        "parameters": sum(math.prod(tensor.shape.numpy()) for tensor in (*tensors, *inner)),
        "parameter_bytes": sum(tensor.nbytes for tensor in tensors) + inner_bytes(model),
        "operators": operators(model),
        "inputs": [_described(value) for value in given],
        "outputs": [_described(value) for value in model.graph.outputs],
    }


def operators(model: ir.Model) -> dict[str, int]:
    """How often each operator occurs in the main graph, the commonest first."""
    counts = Counter(operator_name(node) for node in model.graph)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _described(value: ir.Value) -> dict[str, Any]:
    dims = None
    if value.shape is not None:  # a dimension without a size has a name, or a question mark
        dims = [dim if isinstance(dim, int) else str(getattr(dim, "value", None) or "?") for dim in value.shape]
    return {"name": value.name, "type": None if value.dtype is None else value.dtype.name, "shape": dims}


def shape_text(dims: Sequence[int | str] | None) -> str:
    """A shape such as ``[batch, 3, 224, 224]``."""
    return "?" if dims is None else f"[{', '.join(map(str, dims))}]"


def dims_of(value: ir.Value) -> list[int | str] | None:
    """The sizes of a value's dimensions; names where they have none; None where even their number isn't known."""
    shape: list[int | str] | None = _described(value)["shape"]
    return shape


def model_lines(record: Mapping[str, Any]) -> Iterator[str]:
    """The model in a few sentences, from `model_record`."""
    size = format_size(record["parameter_bytes"])
    producer = f", by {record['producer']}" if record["producer"] else ""
    functions = f" and {record['functions']} functions" if record["functions"] else ""
    name, parameters = PurePath(record["model"]).name, f"{record['parameters']:,} parameters ({size})"
    nodes = "1 node" if record["nodes"] == 1 else f"{record['nodes']} nodes"
    yield f"{name}: {nodes}{functions}, {parameters}."
    domains = {"ai.onnx", *(op.rpartition("::")[0] for op in record["operators"])}  # a file may list many it never uses
    opsets = ", ".join(f"{name} {version}" for name, version in record["opsets"].items() if name in domains)
    yield f"Operator sets: {opsets}; IR version {record['ir_version']}{producer}."


def model_table(record: Mapping[str, Any], count: int = 20) -> Table:
    """Inputs and outputs of a model with their types and shapes, the first ``count`` of each."""
    table = Table("", "name", "type", "shape")
    for kind in ("input", "output"):
        values = record[f"{kind}s"]
        for value in values[:count]:
            table.add_row(kind, str(value["name"]), (value["type"] or "?").lower(), shape_text(value["shape"]))
        if len(values) > count:
            table.add_row("", f"and {len(values) - count} more", "", "")
    return table


def operator_table(counts: Mapping[str, int]) -> Table:
    """How often each operator occurs, the commonest first."""
    table = Table("operator", Column("nodes", justify="right"))
    for key, number in counts.items():
        table.add_row(key, str(number))
    return table
