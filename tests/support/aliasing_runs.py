"""One-node models, and the runs that compare shared with separate memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import helper, numpy_helper

Arrays = Sequence[np.ndarray | None]
Pair = tuple[int, int]
"""(input index, output index)"""

MS = "com.microsoft"
NCHWC = "com.microsoft.nchwc"
ML = "ai.onnx.ml"


class Draw:
    """Random inputs of about `n` elements and of type `dtype`, the same for the same seed."""

    def __init__(self, n: int, dtype: str) -> None:
        self.n, self.dtype, self.random = n, np.dtype(dtype), np.random.default_rng(n)

    def real(self, *shape: int) -> np.ndarray:
        """Any values: of both signs if the type has them."""
        if self.dtype.kind == "b":
            return self.flags(*shape)
        if self.dtype.kind == "f":
            return self.random.normal(size=shape).astype(self.dtype)
        return self.random.integers(1, 100, size=shape).astype(self.dtype)

    def positive(self, *shape: int) -> np.ndarray:
        """Values that may be a divisor, an exponent or a shift."""
        if self.dtype.kind == "f":
            return (self.random.random(shape) + 0.1).astype(self.dtype)
        return self.random.integers(1, 7, size=shape).astype(self.dtype)

    def flags(self, *shape: int) -> np.ndarray:
        return self.random.random(shape) < 0.5

    def flat(self) -> np.ndarray:
        return self.real(self.n)

    def rows(self, columns: int) -> np.ndarray:
        return self.real(max(1, self.n // columns), columns)

    def cube(self) -> np.ndarray:
        return self.real(max(1, self.n // 60), 12, 5)

    def tokens(self, width: int) -> np.ndarray:
        return self.real(1, max(1, self.n // width), width)

    def image(self, channels: int) -> np.ndarray:
        return self.real(2, channels, max(1, self.n // channels // 14), 7)


@dataclass(frozen=True, slots=True)
class Example:
    """One node: the operator, how to draw its inputs, and what else it takes."""

    op: str
    inputs: Callable[[Draw], Arrays]
    domain: str = ""
    opset: int = 17
    dtypes: tuple[str, ...] = ("float32",)
    outputs: tuple[int, ...] = (0,)
    """Indices of the outputs that exist."""
    constants: tuple[int, ...] = ()
    """Indices of the inputs that are initializers."""
    attributes: Mapping[str, object] = field(default_factory=dict)
    sizes: tuple[int, ...] = (1, 1031, 150_011)
    """Elements, about."""

    def __str__(self) -> str:
        settings = "-".join(f"{name}={value}" for name, value in self.attributes.items())
        return "-".join(part for part in (self.domain, self.op, str(self.opset), settings) if part)

    def model(self, arrays: Arrays) -> onnx.ModelProto:
        """The node alone; every output is a graph output."""
        names = ["" if array is None else f"i{i}" for i, array in enumerate(arrays)]
        outputs = [f"o{i}" if i in self.outputs else "" for i in range(max(self.outputs) + 1)]
        present = [(i, array) for i, array in enumerate(arrays) if array is not None]
        graph = helper.make_graph(
            [helper.make_node(self.op, names, outputs, domain=self.domain, **self.attributes)],
            "example",
            [
                helper.make_tensor_value_info(f"i{i}", onnx_type(a), a.shape)
                for i, a in present
                if i not in self.constants
            ],
            [onnx.ValueInfoProto(name=name) for name in outputs if name],
            [numpy_helper.from_array(a, f"i{i}") for i, a in present if i in self.constants],
        )
        versions = [("", self.opset), (MS, 1), (NCHWC, 1), (ML, 3)]
        opsets = [helper.make_opsetid(domain, version) for domain, version in versions]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def node(self, arrays: Arrays) -> ir.Node:
        """The node as the aliasing functions see it."""
        return next(iter(ir.serde.deserialize_model(self.model(arrays)).graph))


def onnx_type(array: np.ndarray) -> int:
    return int(helper.np_dtype_to_tensor_dtype(array.dtype))


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at a multiple of 64 bytes, as in an arena."""
    raw = np.zeros(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def open_session(model: onnx.ModelProto, threads: int = 1) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run_bound(
    session: onnxruntime.InferenceSession,
    inputs: Mapping[str, np.ndarray],
    outputs: Mapping[str, tuple[np.ndarray, int]],
) -> None:
    """Runs once; an output is given as an array of its shape and type, and the address it is written to."""
    binding = session.io_binding()
    for name, array in inputs.items():
        binding.bind_input(name, "cpu", 0, onnx_type(array), array.shape, array.ctypes.data)
    for name, (like, address) in outputs.items():
        binding.bind_output(name, "cpu", 0, onnx_type(like), like.shape, address)
    session.run_with_iobinding(binding)


def outputs_of(example: Example, arrays: Arrays) -> dict[int, np.ndarray]:
    """What the node computes in memory of onnxruntime's own, by output index."""
    session = open_session(example.model(arrays))
    return dict(zip(example.outputs, session.run(None, _live(example, arrays)), strict=True))


def mismatches(
    example: Example, arrays: Arrays, pair: Pair, threads: int, repeats: int = 2, one_value: bool = False
) -> list[str]:
    """Names of the values that differ from a run in separate memory when the pair has one address.

    Outputs must be bit for bit the same, and inputs outside the pair unchanged. With `one_value` all inputs, of one
    shape and type, are the pair's input.
    """
    if one_value:
        arrays = [arrays[pair[0]]] * len(arrays)
    model, live = example.model(arrays), _live(example, arrays)
    names = [f"o{i}" for i in example.outputs]
    session = open_session(model, threads)
    source, target = f"i{pair[0]}", f"o{pair[1]}"
    expected = dict(zip(names, session.run(names, live), strict=True))
    for _ in range(repeats):
        inputs = {name: aligned(array) for name, array in live.items()}
        if one_value:
            inputs = dict.fromkeys(inputs, inputs[source])
        found = {name: aligned(np.zeros_like(array)) for name, array in expected.items()}
        found[target] = inputs[source]
        run_bound(session, inputs, {name: (array, found[name].ctypes.data) for name, array in expected.items()})
        wrong = [name for name, array in expected.items() if found[name].tobytes() != array.tobytes()]
        if not one_value:
            wrong += [i for i in live if i != source and inputs[i].tobytes() != live[i].tobytes()]
        if wrong:
            return wrong
    return []


def _live(example: Example, arrays: Arrays) -> dict[str, np.ndarray]:
    return {f"i{i}": a for i, a in enumerate(arrays) if a is not None and i not in example.constants}


def outlives_its_inputs(example: Example, arrays: Arrays) -> bool:
    """Whether the node's outputs, left unbound, keep their values when its inputs' bytes are overwritten afterwards.

    The inputs are intermediate values here, bound to addresses where other values are written once the node has run.
    """
    expected, live = outputs_of(example, arrays), _live(example, arrays)
    model = example.model(arrays)
    node = model.graph.node[0]
    node.input[:] = [f"v_{name}" if name in live else name for name in node.input]
    before = [helper.make_node("Identity", [name], [f"v_{name}"]) for name in live]
    after = [helper.make_node("Identity", [f"other_{name}"], [f"w_{name}"]) for name in live]
    results = [helper.make_node("Identity", [f"o{i}"], [f"r{i}"]) for i in expected]
    del model.graph.node[:], model.graph.output[:]
    model.graph.node.extend([*before, node, *after, *results])
    others = {f"other_{name}": np.zeros_like(array) for name, array in live.items()}
    for name, array in others.items():
        model.graph.input.append(helper.make_tensor_value_info(name, onnx_type(array), array.shape))
    memory = {name: aligned(array) for name, array in live.items()}
    found = {f"r{i}": aligned(np.zeros_like(array)) for i, array in expected.items()}
    outputs = {f"{prefix}_{n}": (a, a.ctypes.data) for n, a in memory.items() for prefix in "vw"}
    outputs |= {name: (array, array.ctypes.data) for name, array in found.items()}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    run_bound(open_session(model), {name: aligned(array) for name, array in (live | others).items()}, outputs)
    return all(found[f"r{i}"].tobytes() == array.tobytes() for i, array in expected.items())


def parts_model(op: str, whole: np.ndarray, rows: Sequence[int]) -> onnx.ModelProto:
    """A Concat of parts along axis 1 into `whole`, a Split of it, or a Slice of the second part."""
    value = helper.make_tensor_value_info("whole", onnx_type(whole), whole.shape)
    names = [f"part{number}" for number in range(len(rows))]
    parts = [
        helper.make_tensor_value_info(name, onnx_type(whole), (1, count, *whole.shape[2:]))
        for name, count in zip(names, rows, strict=True)
    ]
    bounds: dict[str, list[int]] = {}
    if op == "Slice":
        bounds = {"begin": [rows[0]], "end": [rows[0] + rows[1]], "axes": [1]}
        parts, names = parts[1:2], names[1:2]
    elif op == "Split":
        bounds = {"sizes": list(rows)}
    made = (names, ["whole"]) if op == "Concat" else (["whole", *bounds], names)
    node = helper.make_node(op, *made, **({} if op == "Slice" else {"axis": 1}))
    constants = [numpy_helper.from_array(np.array(numbers, np.int64), name) for name, numbers in bounds.items()]
    read, written = (parts, [value]) if op == "Concat" else ([value], parts)
    graph = helper.make_graph([node], "parts", read, written, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
