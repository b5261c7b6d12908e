"""Calibration: runs of a lowered model, for what no inference knows: order, sizes, times, workspace, locations.

One run shows all but times. The first of a session touches memory for the first time: the system's work for that, up to
half of a run, is in the times of the nodes that happen to write there. A planned run doesn't have it, so where times
decide anything (what is recomputed) they are those of later runs, unless the first is long and has little of it.
"""

import hashlib
import math
import os
import statistics
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from memonger.devices import CPU, Cuda, Device
from memonger.errors import MemongerError, SessionError
from memonger.files import ScratchFolder
from memonger.graph.liveness import ALIGNMENT
from memonger.ir import checks, training_roles
from memonger.ir.element_types import ElementType
from memonger.ir.names import inner_names
from memonger.ir.values import dense, nbytes, static_shape, subgraphs
from memonger.lowering.first_plan import FirstPlan
from memonger.plan_records import Spent
from memonger.runtime import feeds as feeding
from memonger.runtime import onnxruntime, ort, profile
from memonger.runtime.arena import Arena, ArenaTensor
from memonger.runtime.backend import backend
from memonger.runtime.prepared import Input
from memonger.runtime.profile import workspace_of
from memonger.runtime.program import inputs_of, kind_of
from memonger.runtime.weights import LEND_ALL, session_of
from memonger.units import MiB
from memonger.words import FILE, NAME, N, option

LATER_RUNS, LATER_SECONDS, LATER_NODES = 2, 1.0, 8192
"""Nodes are timed in so many runs at most; in more than one only as far as all of them end within so many seconds, and
run so many nodes: of each the profiler keeps 2.5 KB until the end."""

SYSTEM = 0.05
"""Of the processor's time of a first run, the part that is the system's up to which its own times are good: it takes
longer than all later runs together may, and touching memory for the first time is little of it."""

LONGEST_LOOP = 10.0
"""Seconds after which the run of a model with a Loop is ended."""


_CACHES = 64 * MiB
"""Bytes of memory that a calibrating run reads and writes what persists in: caches don't hold it."""


class NoRoomError(SessionError):
    """The device hasn't the room for what is to run."""


class RunFailedError(SessionError):
    """The runtime took the model, and a run of it failed."""


Results = tuple[tuple[object, ...], ...]

FEW = 32
"""Different numbers in what a model gives below which nothing follows from two forms giving the same."""

_Places = tuple[Sequence[ArenaTensor], Arena]
"""Outputs that a run writes to memory of ours."""


@dataclass(frozen=True, slots=True)
class CalibratingRun:
    """What the runs showed.

    Attributes:
        orders: Names of the main graph's nodes in the order they ran: of runs that differ, each of them.
        foreign: Names of those the device's provider didn't run: they run beside the others, in no order with them.
        tensors: Type and shape of each value.
        seconds: Of each node, the median of the runs after the first, or what the only one took; None on a device that
            isn't the host, where only launches are timed.
        workspace: Bytes of workspace each node's kernel took, where above zero; of one with a body (Loop) all that the
            nodes in there took.
        grown: Bytes that each node left the session with more than before, where that is above zero.
        results: What the model gave, of each output what tells apart other bits; None where nobody asked.
    """

    orders: frozenset[tuple[str, ...]]
    foreign: frozenset[str]
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    seconds: dict[str, float] | None
    workspace: dict[str, int]
    grown: dict[str, int] = field(default_factory=dict)
    results: Results | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a calibration is for, and so how often the model runs.

    Attributes:
        times: Times decide something: nodes are timed in runs after the first.
        results: What the model gives is asked for.
        other: What another form of the model gave. Where this one gives the same, nothing more is wanted of it.
        if_same: Nothing more is wanted where it gives something else.
    """

    times: bool = True
    results: bool = False
    other: Results | None = None
    if_same: bool = False

    def is_over(self, results: Results) -> bool:
        """Whether nothing more is wanted of a form that gives these."""
        return self.other is not None and (results == self.other) is not self.if_same


@contextmanager
def session(model: ir.Model, device: Device, options: ort.SessionSettings) -> Iterator[tuple[Any, Any]]:
    """A session for a short while, to which weights are lent, and the pool of its device memory (None on the CPU)."""
    ort.check_device(device)
    pool = backend(device).pool()
    try:
        yield session_of(model, device, options, LEND_ALL, pool=pool), pool
    finally:
        if pool is not None:
            pool.close()


def run(
    model: ir.Model, device: Device, folder: Path, cuda: Cuda, threads: int, inputs: Iterable[feeding.Feeds | None],
    wanted: Wanted | None = None, spent: Spent | None = None, first: FirstPlan | None = None,
    begins: Callable[[int], object] = lambda number: None,
) -> tuple[CalibratingRun, ...]:  # fmt: skip
    """Run the model in file order, with the profiler on and workspace accounted for.

    Args:
        model: Lowered, every node named.
        device: Where to run.
        folder: For what the runtime writes.
        cuda: How the CUDA provider is set up.
        threads: Threads within a node.
        inputs: What it is fed, on the host one after the other in one session; random numbers for None. They are all
            taken before the session is made: each as the model's inputs have sizes at that moment.
        wanted: What for; None: for all but results.
        spent: Where runs are counted.
        first: What runs in its place, in an arena. Of nodes that run again there the order alone is told.
        begins: Called with the number of each before it runs.

    Returns: a record of each, all with the most workspace of each node; times are of the first alone.

    Raises:
        SessionError: the runtime refuses the model or its inputs.
        NoRoomError: a device that isn't the host hasn't the room.
    """
    wanted, spent, limit = wanted or Wanted(), spent or Spent(), ort.Limit(None)
    memory = folder / "memory.csv"
    memory.unlink(missing_ok=True)
    options = ort.SessionSettings(
        in_order=True,
        threads=threads,
        profile=folder / "calibration",
        pattern=False,  # the statistics are exact only without
        entries={"session.collect_node_memory_stats_to_file": str(memory)},
        cuda=cuda,
        limit=limit if device.is_host else None,  # a session's own allocator doubles what it takes
    )
    persisting, written = _PersistentFeeds(model, device), (model if first is None else first.model)
    places, runs = list[_Places](), list[Callable[[Any], Any]]()
    for own in inputs:
        inputs_of_model = inputs_of(model.graph)
        given = {**persisting.inputs, **(own if own is not None else persisting.random_feeds(inputs_of_model))}
        feeding.check_feeds(inputs_of_model, given, "the model")
        runs.append(partial(_run_once, model=written, given=given, generated=own is None, spent=spent, places=places))
    try:
        if device.is_host or first is not None:
            places.append(persisting.updates(device))
        if first is not None:
            places.append((first.planned, backend(device).arena(first.arena_bytes)))
    except SessionError as error:
        raise NoRoomError(str(error)) from error
    if not device.is_host:
        with session(written, device, options) as (made, pool):
            nodes, workspace = _run_on_cuda(made, pool, runs[0])
            return (_calibrating_run(model, device, (nodes,), workspace, first),)
    try:
        profiled, results, count = _run_on_host(written, options, wanted, runs, begins)
    finally:
        ort.drop(limit)
    workspace = _at_once(model, profile.read_workspace(memory)) if memory.is_file() else {}
    ran = profile.read_runs(profiled)
    parts = [ran[:count], *([one] for one in ran[count:])]
    found = [_calibrating_run(model, device, part, workspace, first) for part in parts]
    return (replace(found[0], results=results), *found[1:])


class _PersistentFeeds:
    """What persists of a training model, in a calibrating run: it would be there twice, as inputs and as outputs.

    Nobody reads what such a run updates, so all of it lies in one piece of memory, round and round: what has no content
    of its own (an optimizer's state), and what is written over any of it. Where nodes are timed, on the host, it is
    larger than caches, so that updates take the time they take.

    Attributes:
        inputs: Those that the model has no content for, by name.
    """

    def __init__(self, model: ir.Model, device: Device) -> None:
        roles = training_roles.read(model, str(model.graph.name))
        own = set(roles.persistent) if roles is not None else set()
        inputs = {str(v.name): v for v in model.graph.inputs if v.name in own and _is_plain(v)}
        self.inputs, self._updates = dict[str, np.ndarray](), list[ArenaTensor]()
        sizes = [-(-(nbytes(value) or 0) // ALIGNMENT) * ALIGNMENT for value in inputs.values()]
        self._memory, self._at = Arena(0), 0
        if roles is None or not sizes:
            return
        self._memory = Arena(max(*sizes, min(_CACHES if device.is_host else 0, sum(sizes))))
        self._memory.read(0, np.dtype(np.float32), (self._memory.size // 4,), copy=False)[...] = 1  # in any format
        places = dict[str, ArenaTensor]()
        for name, value in inputs.items():
            if value.const_value is None:
                places[name] = at = self._piece(value)
                self.inputs[name] = self._memory.read(at.offset, at.dtype.numpy(), at.shape, copy=False)
        written = {str(v.name): v for v in model.graph.outputs}
        for old, new in roles.updates.items():
            if old in inputs and new in written and static_shape(written[new]) == static_shape(inputs[old]):
                place = places.get(old) or self._piece(inputs[old])
                self._updates.append(place._replace(name=new))

    def _piece(self, value: ir.Value) -> ArenaTensor:
        """A value at the next piece of the memory."""
        size, dims = nbytes(value) or 0, static_shape(value) or ()
        assert value.dtype is not None
        if self._at + size > self._memory.size:
            self._at = 0
        begin, self._at = self._at, self._at + -(-size // ALIGNMENT) * ALIGNMENT
        return ArenaTensor(str(value.name), ElementType(value.dtype), dims, begin)

    def random_feeds(self, inputs: Sequence[Input]) -> feeding.Feeds:
        """Random numbers for all other inputs."""
        return feeding.random_feeds([each for each in inputs if each.name not in self.inputs])

    def updates(self, device: Device) -> tuple[Sequence[ArenaTensor], Arena]:
        """Where a run is to write its updates; on a device in as much memory of it."""
        at = self._memory if device.is_host or not self._updates else backend(device).arena(self._memory.size)
        return self._updates, at


def _is_plain(value: ir.Value) -> bool:
    """Whether a value is a tensor of floating-point numbers that numpy has, of a known size above 0."""
    return value.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE) and bool(nbytes(value))


def _run_on_host(
    model: ir.Model, options: ort.SessionSettings, wanted: Wanted, runs: Sequence[Callable[[Any], Any]],
    begins: Callable[[int], object],
) -> tuple[Path, Results | None, int]:  # fmt: skip
    """Runs of a session; after the first another one of these, or a few where they are short, if they are wanted.

    Returns: the profile of all of them, the results of the first, and how often that was made.
    """
    most = min(1 if wanted.other is not None or wanted.results else LATER_RUNS, LATER_NODES // max(1, len(model.graph)))
    with session(model, CPU, options) as (made, _):
        begins(0)
        before, once = os.times(), runs[0]
        binding, results, count = once(made), None, 1
        user, system, *_, elapsed = (now - then for now, then in zip(os.times(), before, strict=True))
        is_timed = elapsed > LATER_SECONDS and system <= SYSTEM * (user + system)
        if wanted.results or wanted.other is not None:
            results = _results(model, binding)
        if wanted.times and not is_timed and (results is None or not wanted.is_over(results)):
            begin = time.perf_counter()
            while count == 1 or (count <= most and count / (count - 1) * (time.perf_counter() - begin) < LATER_SECONDS):
                once(made)
                count += 1
        del binding
        for number, one in enumerate(runs[1:], 1):
            begins(number)
            one(made)
        return Path(made.end_profiling()), results, count


def _run_on_cuda(
    made: Any, pool: Any, once: Callable[[Any], Any]
) -> tuple[tuple[profile.NodeRun, ...], dict[str, int]]:
    """The second of two runs (in the first algorithms are chosen), and its workspace.

    The runtime's own statistics leave out what CUDA kernels take, so requests are matched with the times of nodes.
    """
    try:
        once(made)
        with pool.recording() as events:
            once(made)
    except SessionError as error:
        if pool.refused:
            raise NoRoomError(str(pool.refused)) from error
        raise
    start = made.get_profiling_start_time_ns()
    runs = profile.read_profile(Path(made.end_profiling()), last_run=True)
    last = tuple({run.name: run for run in runs}.values())  # of those in subgraphs one of several
    return tuple(sorted(last, key=lambda run: run.begin)), workspace_of(last, start, events)


def _calibrating_run(
    model: ir.Model, device: Device, runs: Sequence[Sequence[profile.NodeRun]], workspace: dict[str, int],
    first: FirstPlan | None,
) -> CalibratingRun:  # fmt: skip
    inner = inner_names(model)
    orders = frozenset(tuple(node.name for node in run if node.name not in inner) for run in runs)
    if first is not None:
        runs = [[run for run in one if run.name not in first.again] for one in runs]
        workspace = {name: size for name, size in workspace.items() if name not in first.again}
    last = [run for run in runs[-1] if run.name not in inner]
    names = {str(node.name): node for node in model.graph}
    tensors = {k: v for run in last if run.name in names for k, v in _outputs_of(names[run.name], run).items()}
    return CalibratingRun(
        orders=orders,
        foreign=frozenset(run.name for run in last if run.provider not in ("", device.provider)),
        tensors=tensors,
        seconds=_seconds(runs[1:] or runs, inner) if device.is_host else None,
        workspace=_with_bodies(model, runs, _with_copied_indices(model, tensors, workspace))
        if device.is_host
        else workspace,
        grown={run.name: run.grown for run in last if run.grown > 0},
    )


def _with_bodies(
    model: ir.Model, runs: Sequence[Sequence[profile.NodeRun]], workspace: Mapping[str, int]
) -> dict[str, int]:
    """The workspace of each node, and of those with a body what its nodes had of the allocator at once, at most.

    What the last of them left may be copied into the node's outputs, which count as values.
    """
    found, with_body = dict(workspace), {str(node.name) for node in model.graph if subgraphs(node)}
    for run in runs if with_body else ():
        begins = [each.begin for each in run]
        for each in run:
            if each.name not in with_body:
                continue
            first, stop = bisect_left(begins, each.begin), bisect_right(begins, each.begin + each.seconds * 1e6)
            inside = [one for one in run[first:stop] if one is not each]
            most = [one.in_use + workspace.get(one.name, 0) for one in inside]
            taken = max(most, default=0) - (each.in_use - each.grown)
            found[each.name] = max(found.get(each.name, 0), taken)
    return {name: size for name, size in found.items() if size > 0}


def run_time_bytes(model: ir.Model, runs: Sequence[CalibratingRun]) -> dict[str, int]:
    """Bytes of each value whose size only a run can tell, the most that these runs showed; by name.

    Of what is no tensor of numbers it is what its node left the session with.
    """
    found: dict[str, int] = {}
    for node in model.graph:
        for value in node.outputs:
            if value.name and nbytes(value) is None:
                found[value.name] = max((_shown(value.name, str(node.name), run) for run in runs), default=0)
    return found


def _shown(name: str, node: str, run: CalibratingRun) -> int:
    kind, shape = run.tensors.get(name, ("", ()))
    dtype = profile.DTYPES.get(kind)
    if dtype is None or dtype == ElementType.STRING:
        return run.grown.get(node, 0)
    return -(-math.prod(shape) * dtype.bitwidth // 8)


def _seconds(runs: Sequence[Sequence[profile.NodeRun]], inner: Collection[str]) -> dict[str, float]:
    """Each node's median."""
    times: dict[str, list[float]] = {}
    for run in (run for one in runs for run in one if run.name not in inner):
        times.setdefault(run.name, []).append(run.seconds)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def _at_once(model: ir.Model, workspace: Mapping[str, int]) -> dict[str, int]:
    """The same, where a kernel takes memory for one frame after the other (``STFT``): what it has at once.

    The statistics add up all of it. There are up to four pieces as large as a frame's: what all frames share is beside.
    """
    found = dict(workspace)
    for node in model.graph:
        shape = static_shape(node.outputs[0]) if node.op_type == "STFT" and not node.domain else None
        if shape and node.name in found:
            found[node.name] = min(found[node.name], 4 * -(-found[node.name] // max(1, shape[0] * shape[1])))
    return found


def _with_copied_indices(
    model: ir.Model, tensors: Mapping[str, tuple[str, tuple[int, ...]]], workspace: Mapping[str, int]
) -> dict[str, int]:
    """The workspace of each node with what ``ScatterElements`` and ``NonZero`` take past onnxruntime's allocator.

    One copies its indices, as int64, to memory of the C library (`GetIndices` in scatter.cc), the other collects there
    what it writes. The allocator's statistics don't know of that, while the allocator keeps its own region of the
    largest workspace.
    """
    most, copied = max(workspace.values(), default=0), dict[str, int]()
    for node in model.graph:
        if node.op_type not in ("ScatterElements", "NonZero") or node.domain:
            continue
        indices = node.inputs[1] if node.op_type == "ScatterElements" else node.outputs[0]
        assert indices is not None
        _, shape = tensors.get(str(indices.name), ("", static_shape(indices)))
        if shape:
            copied[str(node.name)] = most + 8 * math.prod(shape)
    return {**workspace, **copied}


def _run_once(
    made: Any, model: ir.Model, given: feeding.Feeds, generated: bool, spent: Spent, places: Sequence[_Places] = (),
) -> Any:  # fmt: skip
    """Run, and return the binding, which has the outputs."""
    types = {str(value.name): kind_of(value.type) for value in model.graph.inputs}
    binding = made.io_binding()
    with _ended_in_time(model) as (options, is_over):
        try:
            for name, feed in given.items():
                binding.bind_ortvalue_input(name, feeding.to_ortvalue(feed, types.get(name)))
            for tensors, arena in places:
                ort.bind_outputs(binding, tensors, arena.address, arena.device)
            bound = {tensor.name for tensors, _ in places for tensor in tensors}
            for name in dict.fromkeys(str(value.name) for value in model.graph.outputs):
                if name not in bound:
                    binding.bind_output(name)
            begin = time.perf_counter()
            made.run_with_iobinding(binding, options)
            spent.count(time.perf_counter() - begin)
            return binding
        except MemongerError:
            raise
        except Exception as error:  # pybind exceptions share no base class
            inputs = option("inputs", FILE)
            if is_over():
                loops = ", ".join(checks.described(node) for node in _loops(model)[:3])
                raise SessionError(
                    f"the calibrating run hadn't ended after {LONGEST_LOOP:.0f} s, and so may never: {loops} says "
                    f"itself how often it runs. Give inputs with which it ends ({inputs}), or plan without a run "
                    f"({option('device', 'none')})."
                ) from error
            sizes = option("dims", {NAME: N})
            hint = f" It was fed random numbers: give other sizes ({sizes}) or real inputs ({inputs})."
            raise RunFailedError(f"the calibrating run failed: {str(error).strip()}.{hint * generated}") from error


def _loops(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph.all_nodes() if node.op_type == "Loop"]


@contextmanager
def _ended_in_time(model: ir.Model) -> Iterator[tuple[Any, Callable[[], bool]]]:
    """Options of a run that is ended where a Loop doesn't; and whether it was."""
    options = onnxruntime.onnxruntime().RunOptions()
    if not _loops(model):
        yield options, lambda: False
        return

    def end() -> None:
        options.terminate = True

    timer = threading.Timer(LONGEST_LOOP, end)
    timer.daemon = True
    timer.start()
    try:
        yield options, lambda: bool(options.terminate)
    finally:
        timer.cancel()


def _results(model: ir.Model, binding: Any) -> Results:
    """What a run gave: of each output what tells apart other bits."""
    kinds = {str(value.name): kind_of(value.type) for value in model.graph.outputs}
    results = [feeding.to_python(value, kinds[name]) for name, value in zip(kinds, binding.get_outputs(), strict=True)]
    floating = [each for each in results if isinstance(each, np.ndarray) and each.dtype.kind == "f"]
    if floating and sum(len(np.unique(each.reshape(-1)[: FEW**2])) for each in floating) < FEW:
        return ((float("nan"),),)  # equal to none: other forms may well give the same few numbers
    return tuple(_fingerprint(each) for each in results)


def _fingerprint(result: Any) -> tuple[object, ...]:
    if not isinstance(result, np.ndarray):
        return (repr(result),)
    if result.dtype.kind == "O":
        return (result.shape, *result.ravel().tolist())
    if result.dtype.kind == "f" and np.isnan(result).any():
        return (float("nan"),)  # equal to none, its own among them: where no numbers come out nothing tells bits apart
    content = np.ascontiguousarray(result).reshape(-1).view(np.uint8)
    return (result.shape, str(result.dtype), hashlib.sha256(content.data).hexdigest())


def _outputs_of(node: ir.Node, run: profile.NodeRun) -> dict[str, tuple[str, tuple[int, ...]]]:
    tensors = [v for v in node.outputs if v.name and (v.type is None or isinstance(v.type, ir.TensorType))]
    if len(tensors) != len(run.outputs):
        return {}
    return {str(value.name): output for value, output in zip(tensors, run.outputs, strict=True)}


def hosted(model: ir.Model, device: Device, cuda: Cuda) -> frozenset[str]:
    """Names of the values that lie in the host's memory although the model runs on another device."""
    if device.is_host:
        return frozenset()
    copy = model.clone()
    outputs = {value.name for value in copy.graph.outputs}
    values = [v for node in copy.graph for v in node.outputs if v.name and v.name not in outputs]
    copy.graph.outputs.extend(v for v in values if v.type is None or dense(v))
    with session(copy, device, ort.SessionSettings(in_order=True, threads=1, cuda=cuda)) as (made, _):
        outputs_and_places = zip(made.get_outputs(), made.get_output_memory_infos(), strict=True)
        return frozenset(value.name for value, where in outputs_and_places if not device.owns(where.name))


def measured(model: ir.Model, threads: int) -> Mapping[str, int] | None:
    """Bytes of workspace by node, where above zero.

    Returns: None where there is no onnxruntime, or it can't run the model on random inputs.
    """
    if not onnxruntime.is_available():
        return None
    folder = ScratchFolder()
    statistics = folder.path / "memory.csv"
    options = ort.SessionSettings(
        in_order=True,
        threads=threads,
        pattern=False,  # the statistics are exact only without
        entries={**ort.RUN_ONCE, "session.collect_node_memory_stats_to_file": str(statistics)},
    )
    try:
        session = session_of(model, CPU, options, LEND_ALL)
        with _ended_in_time(model) as (run_options, _):
            session.run(None, feeding.random_feeds(inputs_of(model.graph)), run_options)
    except Exception:  # pybind exceptions share no base class; what can't be measured is said to be unknown
        return None
    else:
        return _at_once(model, profile.read_workspace(statistics)) if statistics.is_file() else {}
    finally:
        folder.remove()
