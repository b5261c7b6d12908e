"""What every group of formulations needs: a graph emitter, a session bound to fixed memory, an interleaved clock.

Everything runs as memonger runs it: ORT_DISABLE_ALL, every tensor static, weights as inputs, outputs bound to
memory that was touched before the clock starts. PyTorch runs in the same process with as many threads.
"""

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import helper, numpy_helper

THREADS = int(__import__("os").environ.get("TH", "2"))
TURNS, TURN_SECONDS = 5, 0.003  # the least turns a runner takes, and about how long each is
CASE_SECONDS = 4.0  # the longest that a case is measured
CONFIRM = 4  # so many least times of a runner agree within 5%
HOPELESS = 6.0  # a runner this many times slower than the fastest is timed once

VIEWS = {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"}
Array = np.ndarray
Tensors = tuple[torch.Tensor, ...]
Run = Callable[[], object]


class Emitter:
    """Writes nodes: ``op("Conv", x, w, pads=...)`` returns the name of the output, or a tuple of ``outputs`` names."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def __call__(self, kind: str, *inputs: str, outputs: int = 1, **attributes: object) -> str:
        return self.many(kind, *inputs, outputs=outputs, **attributes)[0]

    def many(self, kind: str, *inputs: str, outputs: int, **attributes: object) -> tuple[str, ...]:
        """A node with several outputs."""
        names = tuple(f"v{len(self.nodes)}_{index}" for index in range(outputs))
        self.nodes.append(helper.make_node(kind, inputs, names, f"n{len(self.nodes)}", **attributes))
        return names

    def constant(self, value: object, dtype: object = np.int64) -> str:
        """An initializer: shapes, axes and scalars, never weights."""
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def scalar(self, value: float) -> str:
        """A float32 scalar."""
        return self.constant(value, np.float32)

    def reshape(self, x: str, *shape: int) -> str:
        """A view."""
        return self("Reshape", x, self.constant(shape))

    def transpose(self, x: str, *perm: int) -> str:
        """A transposed copy."""
        return self("Transpose", x, perm=perm)

    def sum(self, x: str, *axes: int, keep: bool = False) -> str:
        """ReduceSum."""
        return self("ReduceSum", x, self.constant(axes), keepdims=int(keep))

    def slice(self, x: str, starts: Sequence[int], ends: Sequence[int], axes: Sequence[int], steps: Sequence[int] = ()) -> str:
        """Slice."""
        steps = steps or [1] * len(axes)
        return self("Slice", x, *(self.constant(part) for part in (starts, ends, axes, steps)))


Formulation = Callable[..., "str | tuple[str, ...]"]  # (emitter, *input names) -> output names


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to compute: its inputs, PyTorch's own kernel for it, and ways to write it."""

    group: str
    name: str
    inputs: Mapping[str, Array]
    torch: Callable[..., object]  # (*input tensors) -> tensors
    candidates: Mapping[str, Formulation]
    tolerance: float = 2e-4  # of the reference's root mean square


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds of PyTorch and of each candidate; candidates that onnxruntime refused have a message instead."""

    case: Case
    reference: float
    seconds: Mapping[str, float]
    refused: Mapping[str, str]

    @property
    def best(self) -> str:
        """The fastest candidate."""
        return min(self.seconds, key=lambda name: self.seconds[name])


def as_tensors(outputs: object) -> Tensors:
    """PyTorch's outputs as a tuple, without the Nones."""
    several = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    return tuple(each for each in several if each is not None)


def model_of(formulation: Formulation, inputs: Mapping[str, Array], constants: bool = False) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """The model of one candidate, with every value an output, and the names of the outputs asked for."""
    op = Emitter()
    made = formulation(op, *inputs)
    names = (made,) if isinstance(made, str) else made
    described = [helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for k, v in inputs.items()]
    graph = helper.make_graph(op.nodes, "candidate", described, [helper.make_empty_tensor_value_info(n) for n in names], op.constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True).graph
    values = {value.name: value for value in (*inferred.value_info, *inferred.output)}
    del model.graph.output[:]
    model.graph.output.extend(values[name] for node in op.nodes for name in node.output if name)
    return model, names


def session_options(entries: Mapping[str, str]) -> ort.SessionOptions:
    """memonger's options."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = THREADS
    options.log_severity_level = 3
    options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    for key, value in {"session.force_spinning_stop": "1", **entries}.items():
        options.add_session_config_entry(key, value)
    return options


def bound(formulation: Formulation, inputs: Mapping[str, Array], entries: Mapping[str, str]) -> tuple[Run, list[Array]]:
    """A run on fixed memory, and the arrays it writes. As in memonger every value has its address, a view its source's."""
    model, names = model_of(formulation, inputs)
    session = ort.InferenceSession(model.SerializeToString(), session_options(entries), providers=["CPUExecutionProvider"])
    arrays = dict(inputs)
    sources = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type in VIEWS}
    last = {name: step for step, node in enumerate(model.graph.node) for name in node.input}
    roots: dict[str, str] = {}
    for node in model.graph.node:
        if node.op_type in VIEWS:
            source = node.input[0]
            roots[node.output[0]] = roots.get(source, source)
    described = {value.name: value for value in model.graph.output}
    pool: dict[int, list[Array]] = {}
    buffers: dict[str, Array] = {}
    alive = {name: max([last.get(name, 0)] + [last.get(k, 0) for k, v in roots.items() if v == name]) for name in described}
    keep = {roots.get(name, name) for name in names}
    for step, node in enumerate(model.graph.node):
        for name in filter(None, node.output):
            value = described[name]
            shape = [each.dim_value for each in value.type.tensor_type.shape.dim]
            dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            if name in roots and roots[name] in arrays:
                arrays[name] = arrays[roots[name]].reshape(shape)
                continue
            size = math.prod(shape) * np.dtype(dtype).itemsize
            free = pool.get(size, [])
            buffers[name] = free.pop() if free else np.ones(size + 64, np.uint8)
            start = -buffers[name].ctypes.data % 64
            arrays[name] = buffers[name][start : start + size].view(dtype).reshape(shape)
        for name in [name for name, until in alive.items() if until <= step and name in buffers and name not in keep]:
            pool.setdefault(arrays[name].nbytes, []).append(buffers.pop(name))
    for value in ():
        shape = [each.dim_value for each in value.type.tensor_type.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        source = arrays.get(sources.get(value.name, ""))
        arrays[value.name] = np.ones(shape, dtype) if source is None else source.reshape(shape)
    binding = session.io_binding()
    for value in session.get_inputs():
        array = arrays[value.name]
        binding.bind_input(value.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    for value in session.get_outputs():
        array = arrays[value.name]
        binding.bind_output(value.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

    def run(_keep: object = (arrays, buffers, pool)) -> None:  # the binding holds addresses only
        session.run_with_iobinding(binding)

    return run, [arrays[name] for name in names]


def check(name: str, outputs: Sequence[Array], expected: Sequence[Array], tolerance: float) -> None:
    """Raise where a candidate is wrong."""
    for index, (got, want) in enumerate(zip(outputs, expected, strict=True)):
        error = float(np.abs(got.ravel() - want.ravel()).max()) / (float(np.sqrt(np.mean(np.square(want, dtype=np.float64)))) + 1e-30)
        if not error < tolerance:
            raise AssertionError(f"{name}: output {index} differs from PyTorch's by {error:.2g} of its root mean square")


def clock(runners: Mapping[str, Run], seconds: float) -> dict[str, float]:
    """The least seconds of each runner. They take short turns, so that a busy machine slows all of them alike, until
    the least of each agree; each turn starts with a run that is not counted."""
    best = {name: [math.inf] * CONFIRM for name in runners}
    stop = time.perf_counter() + seconds
    for turn in itertools.count():
        limit = HOPELESS * min(least[0] for least in best.values())
        if turn >= TURNS and (time.perf_counter() > stop or all(_settled(least, limit) for least in best.values())):
            return {name: least[0] for name, least in best.items()}
        for name, run in runners.items():
            if turn > 1 and best[name][0] > limit:
                continue
            run()
            until = time.perf_counter() + TURN_SECONDS
            while True:
                start = time.perf_counter()
                run()
                end = time.perf_counter()
                best[name] = sorted([*best[name], end - start])[:CONFIRM]
                if end > until:
                    break
    raise AssertionError


def _settled(least: Sequence[float], limit: float) -> bool:
    return least[0] > limit or least[-1] < 1.05 * least[0]


def measure(case: Case, entries: Mapping[str, str] | None = None, seconds: float = CASE_SECONDS) -> Result:
    """Check and time every candidate of a case."""
    tensors = [torch.from_numpy(array) for array in case.inputs.values()]
    expected = [each.numpy().copy() for each in as_tensors(case.torch(*tensors))]
    runners: dict[str, Run] = {"torch": lambda: case.torch(*tensors)}
    refused = {}
    for name, formulation in case.candidates.items():
        try:
            run, outputs = bound(formulation, case.inputs, entries or {})
            run()
        except Exception as error:  # onnxruntime raises its own kinds
            refused[name] = str(error).splitlines()[0][:300]
            continue
        check(f"{case.group} {case.name} {name}", outputs, expected, case.tolerance)
        runners[name] = run
    best = clock(runners, seconds)
    reference = best.pop("torch")
    return Result(case, reference, best, refused)


def row(result: Result) -> str:
    """One line of the table."""
    ratios = sorted(result.seconds.items(), key=lambda item: item[1])
    text = "  ".join(f"{name} {seconds / result.reference:.2f}" for name, seconds in ratios)
    refused = "".join(f"  {name} refused" for name in result.refused)
    return f"{result.case.group:10}{result.case.name:34}{result.reference * 1e3:>9.3f}  {text}{refused}"
