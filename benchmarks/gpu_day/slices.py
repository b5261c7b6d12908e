"""A batch in slices, one after the other: as nodes written out for each slice, planned; and as a `Loop`, stock."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import memonger
import models
from benchmarks.gpu_day.contest import Planned, Stock, apart, contest, feeds_of, same_bits
from benchmarks.gpu_day.inference import TOKENS
from benchmarks.gpu_day.stages import INFERENCE, TINY, Settings
from memonger.devices import Cuda


def measure(item: str, settings: Settings, seconds: float) -> dict[str, Any]:
    """The row of ``network:batch:rows of a slice``."""
    name, batch, rows = item.split(":")
    options, folder = (TINY if settings.rehearse else INFERENCE)[name], Path(settings.folder)
    whole = models.build(name, batch=int(batch), **options)
    slice_ = models.build(name, batch=int(rows), **options)
    count = int(batch) // int(rows)
    paths = {form: folder / f"{name}-{batch}-{rows}-{form}.onnx" for form in ("whole", "unrolled", "loop")}
    onnx.save(whole, paths["whole"])
    onnx.save(unrolled(slice_, count), paths["unrolled"])
    onnx.save(looped(slice_, count), paths["loop"])
    feeds, cuda = feeds_of(paths["whole"], TOKENS), Cuda(tf32=settings.tf32)
    figures = {}
    for form in ("whole", "unrolled"):
        plan = memonger.search_plan(paths[form], mode="inference", device=settings.device, cuda=cuda)
        plan.save(folder / f"{form}.planned.onnx")
        figures[form] = {"arena": plan.arena_bytes, "workspace": plan.workspace_bytes}
    makers: dict[str, Callable[[], Any]] = {
        "planned, whole": lambda: Planned(folder / "whole.planned.onnx", feeds, settings.device, "off"),
        "planned, slices": lambda: Planned(folder / "unrolled.planned.onnx", feeds, settings.device, "off"),
        "stock, Loop": lambda: Stock(paths["loop"], feeds, settings.device, cuda=cuda),
        "stock, whole": lambda: Stock(paths["whole"], feeds, settings.device, cuda=cuda),
    }
    sessions, found = contest(makers, settings.device)
    expected = sessions["stock, whole"].outputs() if "stock, whole" in sessions else None
    for key, session in sessions.items():
        if expected is not None:
            mine = session.outputs()
            found[key] |= {"same_bits": same_bits(mine, expected), "apart": apart(mine, expected)}
    return {"plans": figures, "contestants": found}


def unrolled(model: onnx.ModelProto, count: int) -> onnx.ModelProto:
    """The nodes once for each slice, weights shared; ``model`` is for one slice."""
    graph, nodes = model.graph, list[onnx.NodeProto]()
    given, result = graph.input[0].name, graph.output[0].name
    shared = {tensor.name for tensor in graph.initializer} | {""}
    parts = [f"slice{index}/{given}" for index in range(count)]
    nodes.append(helper.make_node("Split", [given], parts, axis=0, num_outputs=count, name="cut"))
    for index in range(count):
        for node in graph.node:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            copy.name = f"slice{index}/{node.name}"
            copy.input[:] = [name if name in shared else f"slice{index}/{name}" for name in node.input]
            copy.output[:] = [f"slice{index}/{name}" if name else "" for name in node.output]
            nodes.append(copy)
    ends = [f"slice{index}/{result}" for index in range(count)]
    nodes.append(helper.make_node("Concat", ends, [result], axis=0, name="join"))
    return _around(model, nodes, count, graph.initializer)


def looped(model: onnx.ModelProto, count: int) -> onnx.ModelProto:
    """The nodes as the body of a `Loop`, weights in it; ``model`` is for one slice."""
    inner = onnx.ModelProto()
    inner.CopyFrom(model)
    body, (given, result) = inner.graph, (model.graph.input[0], model.graph.output[0])
    rows, *rest = (dim.dim_value for dim in result.type.tensor_type.shape.dim)
    for node in body.node:  # the names outside are the model's own
        for names in (node.input, node.output):
            names[:] = [f"slice/{name}" if name in (given.name, result.name) else name for name in names]
    body.output[0].name = f"slice/{result.name}"
    body.output.insert(0, helper.make_tensor_value_info("slice/next", TensorProto.BOOL, []))
    del body.input[:]
    body.input.extend([
        helper.make_tensor_value_info("slice/index", TensorProto.INT64, []),
        helper.make_tensor_value_info("slice/on", TensorProto.BOOL, []),
    ])  # fmt: skip
    cut = [
        helper.make_node("Mul", ["slice/index", "slice/rows"], ["slice/begin"]),
        helper.make_node("Add", ["slice/begin", "slice/rows"], ["slice/end"]),
        helper.make_node("Slice", [given.name, "slice/begin", "slice/end", "slice/axis"], [f"slice/{given.name}"]),
        helper.make_node("Identity", ["slice/on"], ["slice/next"]),
    ]
    nodes = [*cut, *body.node]
    del body.node[:]
    body.node.extend(nodes)
    numbers = {"slice/rows": [rows], "slice/axis": [0], "slice/count": count, "slice/shape": [count * rows, *rest]}
    constants = [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in numbers.items()]
    around = [
        helper.make_node("Loop", ["slice/count", ""], ["slice/stacked"], body=body, name="slices"),
        helper.make_node("Reshape", ["slice/stacked", "slice/shape"], [result.name]),
    ]
    return _around(model, around, count, constants)


def _around(model: onnx.ModelProto, nodes: list[Any], count: int, weights: Iterable[Any]) -> onnx.ModelProto:
    """A model of these nodes and weights whose input and output have ``count`` times the rows."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    weights = list(weights)
    del graph.node[:], graph.value_info[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(weights)
    for value in (graph.input[0], graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_value *= count
    return made
