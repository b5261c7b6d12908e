"""What every group of formulations needs: a graph emitter, sessions on fixed memory, an interleaved clock.

Sessions are those of `benchmarks.formulations.binding`; PyTorch runs in the same process with as many threads.
"""

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper

from benchmarks.formulations.binding import Array, Memory, Run, bind, expose, session_of

TURNS, TURN_SECONDS = 5, 0.003  # the least turns a runner takes, and about how long each is
CONFIRM, AGREE = 4, 1.05  # measuring ends when so many least times of each runner lie within this factor
STALLED = 1.1  # PyTorch slower by this than with one thread: the row counts for nothing
HOPELESS = 8.0  # a runner so many times slower than the fastest takes two turns

Formulation = Callable[..., str | tuple[str, ...]]  # (emitter, *input names) -> output names


class Emitter:
    """Writes nodes: ``op("Conv", x, w, pads=...)`` returns the name of the output."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def __call__(self, kind: str, *inputs: str, **attributes: object) -> str:
        return self.many(1, kind, *inputs, **attributes)[0]

    def many(self, outputs: int, kind: str, *inputs: str, **attributes: object) -> tuple[str, ...]:
        """A node with several outputs."""
        names = tuple(f"v{len(self.nodes)}_{index}" for index in range(outputs))
        self.nodes.append(helper.make_node(kind, inputs, names, f"n{len(self.nodes)}", **attributes))
        return names

    def constant(self, value: object, dtype: object = np.int64) -> str:
        """An initializer: shapes, axes, scalars and matrices of zeros and ones; never weights."""
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def floats(self, value: object) -> str:
        """A float32 constant."""
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

    def scale(self, x: str, factor: float) -> str:
        """Multiply by a number."""
        return self("Mul", x, self.floats(factor))

    def pad(self, x: str, *pads: int) -> str:
        """Zeros around x: the starts of all axes, then the ends."""
        return self("Pad", x, self.constant(pads))

    def slice(self, x: str, axes: Sequence[int], starts: Sequence[int], stops: Sequence[int], step: int = 1) -> str:
        """Slice with one step for all axes."""
        return self("Slice", x, *map(self.constant, (starts, stops, axes, [step] * len(axes))))


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to compute: its inputs, PyTorch's own kernel for it, ways to write it, and the one the rule picks."""

    group: str
    name: str
    inputs: Mapping[str, Array]
    torch: Callable[..., object]  # (*input tensors) -> tensors; what is timed
    candidates: Mapping[str, Formulation]
    rule: str
    tolerance: float = 5e-4  # largest error over the reference's root mean square
    expected: Callable[..., object] | None = None  # what to compare with, where ``torch`` works in place


@dataclass(frozen=True, slots=True)
class Result:
    """Least seconds of PyTorch and of each candidate; of those onnxruntime refused, what it said."""

    case: Case
    reference: float
    seconds: Mapping[str, float]
    refused: Mapping[str, str] = field(default_factory=dict)
    stalled: bool = False  # PyTorch was slower than with one thread: its threads wait for a processor, not for work


def model_of(formulation: Formulation, inputs: Mapping[str, Array]) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """The model of one candidate, every value an output, and the names of the outputs asked for."""
    op = Emitter()
    made = formulation(op, *inputs)
    names = (made,) if isinstance(made, str) else made
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in inputs.items()
    ]
    wanted = [helper.make_empty_tensor_value_info(name) for name in names]
    graph = helper.make_graph(op.nodes, "candidate", infos, wanted, op.constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    expose(model)
    return model, names


def bound(formulation: Formulation, inputs: Mapping[str, Array], threads: int) -> tuple[Run, list[Array]]:
    """A run on fixed memory, and the arrays it writes."""
    model, names = model_of(formulation, inputs)
    memory = Memory()
    given = {name: memory.put(array) for name, array in inputs.items()}
    ready = bind(session_of(model, threads), model.graph, given, names, memory)
    return ready.run, [read() for read in ready.outputs]


def check(name: str, outputs: Sequence[Array], expected: Sequence[Array], tolerance: float) -> None:
    """Raise where a candidate is wrong."""
    for index, (got, want) in enumerate(zip(outputs, expected, strict=True)):
        scale = float(np.sqrt(np.mean(np.square(want, dtype=np.float64)))) + 1e-30
        error = float(np.abs(got.ravel() - want.ravel()).max()) / scale
        if not error < tolerance:
            raise AssertionError(
                f"{name}: output {index} differs from PyTorch's by {error:.2g} of its root mean square"
            )


def clock(runners: Mapping[str, Run], seconds: float, threads: int) -> dict[str, float]:
    """The least seconds of each runner. They take short turns, so that a busy machine slows all alike, until the least
    times of each agree; each turn starts with a run that is not counted. With one thread the time is the processor's,
    which leaves out what other programs took."""
    timer = time.thread_time if threads == 1 else time.perf_counter
    best = {name: [math.inf] * CONFIRM for name in runners}
    stop = time.perf_counter() + seconds
    for turn in itertools.count():
        limit = HOPELESS * min(least[0] for least in best.values())
        settled = all(least[0] > limit or least[-1] < AGREE * least[0] for least in best.values())
        if turn >= TURNS and (settled or time.perf_counter() > stop):
            break
        for name, run in runners.items():
            if turn < 2 or best[name][0] <= limit:
                best[name] = sorted([*best[name], *_turn(run, timer)])[:CONFIRM]
    return {name: least[0] for name, least in best.items()}


def _turn(run: Run, timer: Callable[[], float]) -> list[float]:
    run()
    times = []
    while sum(times) < TURN_SECONDS:
        start = timer()
        run()
        times.append(timer() - start)
    return times


def measure(case: Case, threads: int, seconds: float) -> Result:
    """Check and time every candidate of a case."""
    tensors = [torch.from_numpy(array) for array in case.inputs.values()]
    expected = _arrays((case.expected or case.torch)(*tensors))
    runners: dict[str, Run] = {"torch": lambda: case.torch(*tensors)}
    refused = {}
    for name, formulation in case.candidates.items():
        try:
            run, outputs = bound(formulation, case.inputs, threads)
            run()
        except Exception as error:  # onnxruntime raises kinds of its own
            refused[name] = str(error)
            continue
        check(f"{case.group} {case.name} {name}", outputs, expected, case.tolerance)
        runners[name] = run
    best = clock(runners, seconds, threads)
    reference = best.pop("torch")
    return Result(
        case, reference, best, refused, threads > 1 and reference > STALLED * alone(runners["torch"], threads)
    )


def alone(run: Run, threads: int) -> float:
    """The least seconds of PyTorch with one thread."""
    torch.set_num_threads(1)
    try:
        return clock({"torch": run}, 0.2, threads)["torch"]
    finally:
        torch.set_num_threads(threads)


def _arrays(outputs: object) -> list[Array]:
    several = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    return [each.detach().numpy() for each in several if each is not None]
