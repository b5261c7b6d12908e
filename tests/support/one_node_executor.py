"""A test executor that knows nothing of lifetimes but what it can see: one session a node, over one arena.

After each node, every byte of the arena that holds no value somebody still needs is overwritten with 0xFF. A plan that
lets a needed value die gives wrong outputs here, whatever the checker says.
"""

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from memonger.ir.values import nbytes
from memonger.plan import Plan


def run_poisoned(plan: Plan, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run a plan node by node; returns the outputs by name."""
    model = plan.model
    arena = np.full(plan.arena_bytes + 64, 0xFF, np.uint8)
    arena = arena[(-arena.ctypes.data) % 64 :]
    at = {plan.graph.values[number]: offset for number, offset in plan.offsets.items()}
    readers: dict[str, int] = {}
    for node in model.graph:
        for value in node.inputs:
            if value is not None:
                readers[str(value.name)] = readers.get(str(value.name), 0) + 1
    for value in model.graph.outputs:
        readers[str(value.name)] = readers.get(str(value.name), 0) + 1
    alive: dict[str, tuple[int, int]] = {}
    feeds = dict(feeds)
    for node in model.graph:
        feeds.update(_run_node(model, node, feeds, arena, at))
        for value in (v for v in node.outputs if str(v.name) in at):
            alive[str(value.name)] = (at[str(value.name)], _bytes(value))
        for value in node.inputs:
            if value is not None:
                readers[str(value.name)] -= 1
        alive = {name: place for name, place in alive.items() if readers.get(name, 0) > 0}
        free = 0
        for offset, size in sorted(alive.values()):
            arena[free:offset] = 0xFF
            free = max(free, offset + size)
        arena[free : plan.arena_bytes] = 0xFF
    return {
        str(value.name): _read(arena, at, value).copy() if str(value.name) in at else feeds[str(value.name)]
        for value in model.graph.outputs
    }


def _bytes(value: ir.Value) -> int:
    size = nbytes(value)
    assert size is not None
    return size


def _read(arena: np.ndarray, at: dict[str, int], value: ir.Value) -> np.ndarray:
    assert value.dtype is not None
    assert value.shape is not None
    offset = at[str(value.name)]
    return arena[offset : offset + _bytes(value)].view(value.dtype.numpy()).reshape([int(dim) for dim in value.shape])


def _run_node(
    model: ir.Model, node: ir.Node, feeds: dict[str, np.ndarray], arena: np.ndarray, at: dict[str, int]
) -> dict[str, np.ndarray]:
    """Run one node in a session of its own, inputs and outputs where the plan has them; returns unplanned outputs."""
    inputs: dict[str, Any] = {}
    for value in node.inputs:
        if value is None or str(value.name) in inputs:
            continue
        name = str(value.name)
        if name in at:
            inputs[name] = _read(arena, at, value)
        elif name in feeds:
            inputs[name] = feeds[name]
        else:
            assert value.const_value is not None, name
            inputs[name] = value.const_value.numpy()
    constants = {name for name in inputs if name not in at and name not in feeds}
    session = onnxruntime.InferenceSession(_single(model, node, inputs, constants), _options())
    binding = session.io_binding()
    for name, array in inputs.items():
        if name in constants:
            continue
        value = next(v for v in node.inputs if v is not None and v.name == name)
        binding.bind_input(name, "cpu", 0, int(value.dtype), list(array.shape), array.ctypes.data)  # type: ignore[arg-type]
    held = [str(value.name) for value in node.outputs if str(value.name) not in at]
    for name in held:
        binding.bind_output(name)
    for value in (v for v in node.outputs if str(v.name) in at):
        array = _read(arena, at, value)
        binding.bind_output(str(value.name), "cpu", 0, int(value.dtype), list(array.shape), array.ctypes.data)  # type: ignore[arg-type]
    session.run_with_iobinding(binding)
    return {name: value.numpy().copy() for name, value in zip(held, binding.get_outputs(), strict=False)}


def _single(model: ir.Model, node: ir.Node, inputs: dict[str, np.ndarray], constants: set[str]) -> bytes:
    def fresh(value: ir.Value, array: np.ndarray | None = None) -> ir.Value:
        dims = array.shape if array is not None else tuple(value.shape or ())
        made = ir.Value(name=value.name, shape=ir.Shape(list(dims)), type=value.type)
        if str(value.name) in constants:
            assert value.const_value is not None
            tensor = value.const_value
            made.type = ir.TensorType(tensor.dtype)
            made.const_value = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=value.name)
        return made

    values = {str(v.name): fresh(v, inputs[str(v.name)]) for v in node.inputs if v is not None}
    outputs = [fresh(value) for value in node.outputs]
    copy = ir.Node(
        node.domain,
        node.op_type,
        [None if v is None else values[str(v.name)] for v in node.inputs],
        list(node.attributes.values()),
        outputs=outputs,
        name=node.name,
    )
    graph = ir.Graph(
        [v for name, v in values.items() if name not in constants],
        outputs,
        nodes=[copy],
        initializers=[values[name] for name in values if name in constants],
        opset_imports=dict(model.opset_imports),
        name="one",
    )
    return ir.to_proto(ir.Model(graph, ir_version=model.ir_version or 10)).SerializeToString()


def _options() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options
