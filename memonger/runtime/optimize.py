"""The device form: what onnxruntime's own optimizer makes of a model for one machine, measured in one run.

The optimizer's output is loaded again with every optimization off, and has to run as it stands, node for node and in
file order: only then may its values be given addresses.
"""

import heapq
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from memonger import aliasing, shapes
from memonger.device import Device
from memonger.errors import LoadError, MemongerError, PlanError, SessionError
from memonger.graph import read_values
from memonger.load import Model
from memonger.lower import Calibration, Lowered, Stamp, name_nodes
from memonger.runtime import feeds as feeding
from memonger.runtime import ort, profile
from memonger.scratch import ScratchFolder

LEVELS = {
    "disable": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}
ROUNDS = 3  # reloads until the runtime leaves the model as it is; two were enough for every model seen


@dataclass(frozen=True, slots=True)
class Settings:
    """How a model is lowered for a device.

    Attributes:
        level: One of `LEVELS`.
        threads: Threads within a node; 0 leaves it to onnxruntime.
        inputs: What the calibrating run is fed; random numbers if None.
        source_order: Put the nodes into the order of the model given. onnxruntime writes them in one of its own, in
            which parts of a backward pass come far too early.
    """

    level: str = "all"
    threads: int = 0
    inputs: feeding.Feeds | None = None
    source_order: bool = False


def device_form(model: Model, device: Device, settings: Settings | None = None) -> Lowered:
    """Lower a model for a device and calibrate it.

    Raises:
        PlanError: the runtime refuses the model or its inputs.
        RuntimeUnavailableError: no runtime, or no such device.
    """
    settings = settings or Settings()
    ort.check_device(device)
    if settings.level not in LEVELS:
        raise PlanError(f"{settings.level!r} is not an optimization level: there are {', '.join(LEVELS)}.")
    folder = ScratchFolder()
    try:
        lowered, calibration = _lower(model, device, settings, folder.path)
    except SessionError as error:
        raise PlanError(f"{model.name}: {error}") from error
    except OSError as error:
        raise PlanError(f"{model.name}: lowering needs room in {tempfile.gettempdir()}: {error}.") from error
    stamp = Stamp(ort.runtime_name(), device.provider, ort.machine_digest(), settings.level)
    return Lowered(lowered, stamp, calibration, files=folder)


def _lower(model: Model, device: Device, settings: Settings, folder: Path) -> tuple[ir.Model, Calibration]:
    source, level = model.ir, LEVELS[settings.level]
    for number in range(ROUNDS):
        path = folder / f"optimized{number}.onnx"
        options = ort.Options(level=level, optimized=path, entries=_entries(path), lend_weights=True)
        ort.make_session(source, device, options)
        lowered = _reload(path, model)
        if settings.source_order:
            in_source_order(lowered, model.ir)
        run = _run(lowered, device, settings, folder)
        if _as_written(lowered, run.executed):
            return _with_sizes(lowered, run), Calibration(run.seconds, run.workspace)
        source, level = lowered, "ORT_DISABLE_ALL"
    raise PlanError(f"{model.name}: onnxruntime doesn't run its own optimized model as written; it can't be planned.")


def _entries(path: Path) -> dict[str, str]:
    """Weights go into a file beside the optimized model: they are memory-mapped from there, never parsed."""
    return {
        "session.disable_prepacking": "1",  # this session never runs
        "session.optimized_model_external_initializers_file_name": path.name + ".data",
        "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
    }


def _reload(path: Path, original: Model) -> ir.Model:
    """The optimizer's model, with the names and the declared inputs and outputs of the original."""
    if not path.is_file():
        raise SessionError(f"onnxruntime wrote no optimized model to {path.parent}: is the disk full?")
    lowered = ir.load(path)
    lowered.graph.name = original.ir.graph.name
    lowered.metadata_props.clear()
    lowered.metadata_props.update(original.ir.metadata_props)
    lowered.ir_version = max(lowered.ir_version or 0, original.ir.ir_version or 0)
    name_nodes(lowered)
    return lowered


def in_source_order(model: ir.Model, source: ir.Model) -> None:
    """Put the nodes into the order of the model they were made from: onnxruntime writes them in another.

    Values keep their names. A node none of whose outputs the source has comes right before its first reader.
    """
    nodes = list(model.graph)
    written = {value.name: step for step, node in enumerate(source.graph) for value in node.outputs if value.name}
    producer = {value: number for number, node in enumerate(nodes) for value in node.outputs}
    read = [sorted({producer[v] for v in read_values(node) if v in producer}) for node in nodes]
    readers: list[list[int]] = [[] for _ in nodes]
    for number, sources in enumerate(read):
        for before in sources:
            readers[before].append(number)
    rank = [len(written)] * len(nodes)
    for number in reversed(range(len(nodes))):
        known = [written[v.name] for v in nodes[number].outputs if v.name in written]
        rank[number] = min(known) if known else min((rank[r] for r in readers[number]), default=len(written))
    missing = [len(sources) for sources in read]
    ready = [(rank[number], number) for number, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    model.graph.remove(nodes)
    while ready:
        _, number = heapq.heappop(ready)
        model.graph.append(nodes[number])
        for reader in readers[number]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, (rank[reader], reader))


@dataclass(frozen=True, slots=True)
class _Run:
    executed: tuple[str, ...]
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    seconds: dict[str, float]
    workspace: dict[str, int]


def _run(model: ir.Model, device: Device, settings: Settings, folder: Path) -> _Run:
    """Run the model once, in file order, with the profiler and the memory statistics on."""
    memory = folder / "memory.csv"
    memory.unlink(missing_ok=True)
    options = ort.Options(
        in_order=True,
        threads=settings.threads,
        profile=folder / "calibration",
        pattern=False,  # the statistics are exact only without
        lend_weights=True,
        entries={"session.collect_node_memory_stats_to_file": str(memory)},
    )
    session = ort.make_session(model, device, options)
    inputs = feeding.inputs_of(model.graph)
    given = settings.inputs if settings.inputs is not None else feeding.random_feeds(inputs)
    feeding.check_feeds(inputs, given, "the model")
    _run_once(session, model, given, settings.inputs is None)
    runs = profile.read_profile(Path(session.end_profiling()))
    inner = inner_names(model)
    outer = [run for run in runs if run.name not in inner]
    names = {str(node.name): node for node in model.graph}
    return _Run(
        executed=profile.executed_order(runs, inner),
        tensors={k: v for run in outer if run.name in names for k, v in _outputs_of(names[run.name], run).items()},
        seconds={run.name: run.seconds for run in outer},
        workspace=profile.read_workspace(memory) if memory.is_file() else {},
    )


def _run_once(session: Any, model: ir.Model, given: feeding.Feeds, generated: bool) -> None:
    types = {str(value.name): value.type for value in model.graph.inputs}
    binding = session.io_binding()
    try:
        for name, feed in given.items():
            binding.bind_ortvalue_input(name, feeding.to_ortvalue(feed, types.get(name)))
        for name in dict.fromkeys(str(value.name) for value in model.graph.outputs):
            binding.bind_output(name)
        session.run_with_iobinding(binding)
    except MemongerError:
        raise
    except Exception as error:  # pybind exceptions share no base class
        hint = " It was fed random numbers: give real inputs (--inputs FILE.npz)." if generated else ""
        raise SessionError(f"the calibrating run failed: {str(error).strip()}.{hint}") from error


def inner_names(model: ir.Model) -> set[str]:
    """Names of the nodes inside subgraphs."""
    return {str(node.name) for graph in model.graphs() if graph is not model.graph for node in graph}


def _outputs_of(node: ir.Node, run: profile.NodeRun) -> dict[str, tuple[str, tuple[int, ...]]]:
    tensors = [v for v in node.outputs if v.name and (v.type is None or isinstance(v.type, ir.TensorType))]
    if len(tensors) != len(run.outputs):
        return {}
    return {str(value.name): output for value, output in zip(tensors, run.outputs, strict=True)}


def floating_names(model: ir.Model) -> set[str]:
    """Names of the nodes that the runtime runs as soon as it can, wherever they stand."""
    return {str(node.name) for node in model.graph if aliasing.held_by_runtime(node)}


def _as_written(model: ir.Model, executed: tuple[str, ...]) -> bool:
    """Whether the runtime ran exactly the file's nodes, in the file's order."""
    floating = floating_names(model)
    written = [str(node.name) for node in model.graph]
    if sorted(written) != sorted(executed):
        return False
    return [n for n in written if n not in floating] == [n for n in executed if n not in floating]


def _with_sizes(model: ir.Model, run: _Run) -> ir.Model:
    """The model with the sizes the run showed, left out where another run could show others."""
    try:
        shapes.infer_once(model, "the optimized model")
    except LoadError:
        shapes.forget_symbolic(model)  # onnxruntime's own operators can be beyond ONNX's inference
    dynamic = shapes.run_time_sized(model)
    for value in (v for node in model.graph for v in node.outputs):
        seen = run.tensors.get(str(value.name))
        if seen is None or value in dynamic:
            continue
        kind, dims = seen
        dtype = value.dtype if value.dtype is not None else profile.DTYPES.get(kind)
        known = shapes.static_shape(value)
        if dtype is not None and (known is None or known == dims):
            value.type, value.shape = ir.TensorType(dtype), ir.Shape(list(dims))
        elif known is not None:
            value.shape = None
    return model
