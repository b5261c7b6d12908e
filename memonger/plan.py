"""plan: the decision for one model, and the one function that goes through all the stages to it."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from memonger import file, rewrite, shapes, training, verify
from memonger.allocate import allocate, lower_bound
from memonger.device import Device, parse_device
from memonger.differentiate import differentiate
from memonger.errors import PlanError
from memonger.graph import Graph, from_model
from memonger.liveness import ALIGNMENT, Sharing, Storage, assign_storage, peak_bytes
from memonger.load import Model, Source, load
from memonger.losses import Loss
from memonger.lower import Lowered, Stamp, portable
from memonger.optimizers import Optimizer
from memonger.recompute import STRATEGIES, Strategy
from memonger.search import ORDERS
from memonger.training import Training

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The order a model's nodes run in and the byte of one arena at which every planned value lies.

    Attributes:
        model: The model, its nodes in the planned order. Not to be edited.
        graph: The same as integers.
        offsets: Byte offset of each planned value, by value number of ``graph``.
        arena_bytes: Size of the arena.
        alignment: Every offset is a multiple of it.
        mode: ``inference`` or ``training``.
        device: What the plan was made for.
        stamp: The machine and runtime it is bound to; None for a portable plan.
        threads: Threads within a node the scratch was measured with; 0 is onnxruntime's default.
        workspace: Scratch bytes of each node by name, where measured and above zero; None if never measured.
        batch: The batch size asked for, if any.
        peak_before_bytes: The peak in the file's own order; None for a plan from a file.
        planning_seconds: Wall time planning took; None for a plan from a file.
        files: Keeps temporary files alive that the model's tensors lie in.
    """

    model: ir.Model
    graph: Graph
    offsets: Mapping[int, int]
    arena_bytes: int
    alignment: int
    mode: str
    device: str
    stamp: Stamp | None
    threads: int
    workspace: Mapping[str, int] | None
    batch: int | None = None
    peak_before_bytes: int | None = None
    planning_seconds: float | None = None
    files: object = None

    @property
    def storage(self) -> Storage:
        """The buffers behind the offsets, read off the offsets themselves."""
        return assign_storage(self.graph, alignment=self.alignment, offsets=self.offsets)

    @property
    def peak_bytes(self) -> int:
        """Live bytes of the arena at the worst step."""
        return peak_bytes(self.storage.buffers, len(self.graph.nodes))

    @property
    def lower_bound_bytes(self) -> int:
        """No layout of this order and sharing is smaller, alignment counted."""
        return lower_bound(self.storage.buffers)

    @property
    def activation_bytes(self) -> int:
        """All planned values at once."""
        return sum(size for size, planned in zip(self.graph.sizes, self.graph.planned, strict=True) if planned)

    @property
    def training(self) -> Training | None:
        """What a training model says of itself; None for any other."""
        return training.read(self.model, str(self.model.graph.name))

    @property
    def parameter_bytes(self) -> int:
        """Initializers of the model; of a training model all that persists, optimizer state included."""
        graph, known = self.model.graph, self.training
        tensors = (value.const_value for value in graph.initializers.values())
        stateful = [
            v for v in graph.inputs if known and v.name in known.persistent and v.name not in graph.initializers
        ]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None) + sum(
            shapes.nbytes(value) or 0 for value in stateful
        )

    @property
    def workspace_bytes(self) -> int | None:
        """Most scratch any step takes beside the arena; None if never measured."""
        return None if self.workspace is None else max(self.workspace.values(), default=0)

    @property
    def predicted_bytes(self) -> int | None:
        """What a run takes over the loaded model: arena and scratch. None if the scratch was never measured."""
        return None if self.workspace_bytes is None else self.arena_bytes + self.workspace_bytes

    @property
    def overhead(self) -> float:
        """Cost of what is recomputed over the cost of one pass with nothing recomputed."""
        copies = sum(self.graph.costs[node] for node in self.recomputed)
        once = sum(self.graph.costs) - copies
        return copies / once if once else 0.0

    @property
    def recomputed(self) -> tuple[int, ...]:
        """Steps that compute something again."""
        return tuple(step for step, name in enumerate(self.graph.nodes) if rewrite.is_copy(name))

    def verify(self) -> None:
        """Run the independent checker.

        Raises:
            VerificationError: the plan is wrong.
        """
        verify.verify(self.graph, self.offsets, self.arena_bytes, self.alignment)

    def save(self, path: str | Path) -> None:
        """Write the planned model; whole or not at all, checked first.

        Raises:
            PlanFileError: the file can't be written.
        """
        self.verify()
        offsets = {self.graph.values[value]: offset for value, offset in self.offsets.items()}
        header = file.Header(
            mode=self.mode, device=self.device, alignment=self.alignment, arena_bytes=self.arena_bytes, offsets=offsets,
            stamp=self.stamp, threads=self.threads, workspace=self.workspace, batch=self.batch,
        )  # fmt: skip
        file.save(self.model, header, Path(path))

    @staticmethod
    def load(path: str | Path) -> "Plan":
        """Read a planned model and check it.

        Raises:
            PlanFileError: not a planned model, malformed, of a newer format, or its graph was changed.
            VerificationError: its layout is wrong.
        """
        model, header = file.load(Path(path))
        graph = _graph(model, None, header.workspace)
        number = {name: value for value, name in enumerate(graph.values)}
        unknown = [name for name in header.offsets if name not in number]
        if unknown:
            raise file.PlanFileError(
                f"{path}: the plan gives '{unknown[0]}' an offset, but the model has no such value."
            )
        plan = Plan(
            model=model,
            graph=graph,
            offsets={number[name]: offset for name, offset in header.offsets.items()},
            arena_bytes=header.arena_bytes,
            alignment=header.alignment,
            mode=header.mode,
            device=header.device,
            stamp=header.stamp,
            threads=header.threads,
            workspace=header.workspace,
            batch=header.batch,
        )
        plan.verify()
        return plan


@dataclass(frozen=True, slots=True)
class Choices:
    """Keyword options of `search_plan`.

    Attributes:
        mode: ``inference`` or ``training``; None: training where a loss or an optimizer is given or the model is a
            training model, else inference.
        loss: See `memonger.differentiate`; for a model that isn't a training model yet.
        optimizer: See `memonger.differentiate`.
        device: ``none``, ``cpu``, ``cuda:N``; None: the CPU where onnxruntime is installed, else none.
        sharing: What may share an address.
        strategy: One of `memonger.recompute.STRATEGIES`: what is recomputed instead of kept.
        order: One of `memonger.search.ORDERS`, or ``best``: all of them, the smallest arena kept.
        level: onnxruntime's optimization level for device plans: disable, basic, extended or all. None: all for
            inference; disable for training, whose weights aren't constants, so that nothing of weight could be fused.
        threads: Threads within a node; 0 leaves it to onnxruntime.
        inputs: Input arrays for the calibrating run, random numbers if None. Their shapes also give the sizes of
            dimensions that are still open.
    """

    mode: str | None = None
    loss: str | Loss | None = None
    optimizer: Optimizer | None = None
    device: str | Device | None = None
    sharing: Sharing = dataclasses.field(default_factory=Sharing)
    strategy: str = "none"
    order: str = "best"
    level: str | None = None
    threads: int = 0
    inputs: Mapping[str, Any] | None = None


def search_plan(
    source: Source | Model,
    *,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    progress: Progress | None = None,
    **choices: Any,
) -> Plan:
    """Plan a model: load, lower, order, lay out, verify, rewrite.

    Args:
        source: What `memonger.load` takes or gives.
        batch: See `memonger.load`.
        dims: See `memonger.load`.
        progress: Called with the name of each stage as it begins.
        choices: The fields of `Choices`.

    Raises:
        LoadError: the model can't be read or its shapes can't be made static.
        PlanError: it can't be planned; the message says what would work.
        RuntimeUnavailableError: the device isn't there.
    """
    begin, tell = time.perf_counter(), progress or (lambda stage: None)
    options = Choices(**choices)
    device = _device(options.device)
    tell("load")
    model = load(source, batch=batch, dims=dims, input_shapes=_shapes_of(options.inputs))
    mode = _mode(model, options)
    if mode == "training" and not _is_differentiated(model):
        tell("differentiate")
        model = differentiate(model, loss=options.loss, optimizer=options.optimizer)
    tell("lower")
    lowered = _lower(model, device, options, mode)
    calibration = lowered.calibration
    tell("graph")
    graph = _graph(
        lowered.model,
        calibration.seconds if calibration else None,
        calibration.workspace if calibration else None,
    )
    before = assign_storage(graph, options.sharing)
    tell("order and layout")
    runs = _strategy(options)(graph)
    again = rewrite.schedule_graph(graph, runs)
    schedule, offsets, arena = _arrange(again, options)
    planned = rewrite.schedule_graph(again, schedule)
    plan = Plan(
        model=rewrite.schedule_model(rewrite.schedule_model(lowered.model, runs, again), schedule, planned),
        graph=planned,
        offsets=offsets,
        arena_bytes=arena,
        alignment=ALIGNMENT,
        mode=mode,
        device=str(device),
        stamp=lowered.stamp,
        threads=options.threads,
        workspace=calibration.workspace if calibration else None,
        batch=model.batch,
        peak_before_bytes=peak_bytes(before.buffers, len(graph.nodes)),
        planning_seconds=time.perf_counter() - begin,
        files=lowered.files,
    )
    tell("verify")
    plan.verify()
    return plan


def _graph(model: ir.Model, seconds: Mapping[str, float] | None, workspace: Mapping[str, int] | None) -> Graph:
    known = training.read(model, str(model.graph.name))
    results = {*known.outputs, *([known.loss] if known.loss else [])} if known else None
    updates = known.updates if known else None
    return from_model(model, seconds=seconds, workspace=workspace, updates=updates, results=results)


def _shapes_of(inputs: Mapping[str, Any] | None) -> dict[str, tuple[int, ...]]:
    return {name: tuple(feed.shape) for name, feed in (inputs or {}).items() if hasattr(feed, "shape")}


def _device(device: str | Device | None) -> Device:
    if device is not None:
        return parse_device(device)
    from memonger.runtime import module

    return parse_device("cpu" if module.is_available() else "none")


def _mode(model: Model, options: Choices) -> str:
    """The mode asked for, or what the model and the other options say."""
    differentiated = _is_differentiated(model)
    wanted = options.loss is not None or options.optimizer is not None
    if options.mode not in (None, "inference", "training"):
        raise PlanError(f"mode {options.mode!r} can't be: inference or training.")
    mode = options.mode or ("training" if wanted or differentiated else "inference")
    if wanted and mode == "inference":
        raise PlanError("a loss or an optimizer is for training: leave mode out, or say mode='training'.")
    if wanted and differentiated:
        raise PlanError(f"{model.name} is differentiated already: a loss or an optimizer can't be added to it.")
    return mode


def _is_differentiated(model: Model) -> bool:
    known = training.read(model.ir, model.name)
    return known is not None and known.is_differentiated


def _lower(model: Model, device: Device, options: Choices, mode: str) -> Lowered:
    if device.kind == "none":
        return portable(model)
    from memonger.runtime import optimize

    level = options.level or ("all" if mode == "inference" else "disable")
    return optimize.device_form(model, device, optimize.Settings(level, options.threads, options.inputs))


def _strategy(options: Choices) -> Strategy:
    if options.strategy not in STRATEGIES:
        raise PlanError(f"{options.strategy!r} is not a strategy: there are {', '.join(STRATEGIES)}.")
    return STRATEGIES[options.strategy]


def _arrange(graph: Graph, options: Choices) -> tuple[tuple[int, ...], dict[int, int], int]:
    """The order with the smallest arena, the first of equals: ``(schedule, offsets by value, arena bytes)``."""
    if options.order != "best" and options.order not in ORDERS:
        raise PlanError(f"{options.order!r} is not an order: there are best, {', '.join(ORDERS)}.")
    names = [options.order] if options.order != "best" else list(ORDERS)
    schedules = dict.fromkeys(ORDERS[name](graph) for name in names)
    candidates: list[tuple[int, int, tuple[int, ...], Storage]] = []
    for schedule in schedules:
        storage = assign_storage(rewrite.schedule_graph(graph, schedule), options.sharing)
        candidates.append((lower_bound(storage.buffers), len(candidates), schedule, storage))
    best: tuple[tuple[int, ...], Storage, Any] | None = None
    for bound, _, schedule, storage in sorted(candidates, key=lambda candidate: candidate[:2]):
        if best is not None and best[2].size <= bound:
            break
        layout = allocate(storage.buffers)
        if best is None or layout.size < best[2].size:
            best = (schedule, storage, layout)
    assert best is not None
    schedule, storage, layout = best
    offsets = {value: layout.offsets[number] for value, number in enumerate(storage.of_value) if number >= 0}
    return schedule, offsets, layout.size
