"""package: what is exported, checked, and what serving it takes."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from memonger.errors import PlanError, SessionError
from memonger.ir.values import required_inputs
from memonger.lowering import calibrate
from memonger.plan import Plan
from memonger.runtime import onnxruntime, program
from memonger.runtime.as_written import check_as_written
from memonger.runtime.prepare import device_of
from memonger.serving.fleet_memory import memory_of
from memonger.serving.fleet_plans import need_of
from memonger.serving.order import stock_bytes
from memonger.shapes.ranges import DimRange, described
from memonger.units import MOST_INSTANCES, MiB, in_full, whole
from memonger.words import either, option

STANDARD = ("", "ai.onnx", "ai.onnx.ml")
FLEETS = ("triton-python", "kserve", "ray", "bentoml")
"""Targets whose processes hold a fleet of memonger's: they take several models."""
PROCESS_BYTES = 512 * MiB  # Python, numpy, onnxruntime, a server: measured below that (benchmarks/serving/servers.txt)
WAIT = 30
"""Seconds that a request waits for an arena at most, where nothing is said."""
STOCK_NOTE = (
    "Stock onnxruntime lays values out itself: over 8 networks it took 1.4 to 1.7 times the predicted activations and "
    "workspace, a session of memonger 1.05 times (docs/EXPORT.md)."
)

CHUNKS_NOTE = (
    "The plan runs in chunks, and so it has a node more than once. Stock onnxruntime packs weights anew for each of "
    "them, which the figure leaves out: a plan without chunks ({chunks}) takes less for large weights."
)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output of the model: ``dims`` has -1 where a request or only a run can tell, ``sizes`` says more."""

    name: str
    dtype: ir.DataType
    dims: tuple[int, ...]
    sizes: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Estimate:
    """What serving takes, in bytes, beside the processes themselves.

    Attributes:
        parameters: Weights, once for each copy that is loaded.
        inputs: Inputs of one request.
        activations: Intermediate values and outputs at the worst step, or the arena that holds them.
        workspace: Workspace of kernels beside that.
        instances: How many requests run at a time.
        shared: Whether all instances read one copy of the weights.
    """

    parameters: int
    inputs: int
    activations: int
    workspace: int
    instances: int
    shared: bool = False

    @property
    def instance_bytes(self) -> int:
        """One instance alone."""
        return self.parameters + self.inputs + self.activations + self.workspace

    @property
    def total_bytes(self) -> int:
        """All instances."""
        shared = self.parameters if self.shared else 0
        return shared + self.instances * (self.instance_bytes - shared)

    @property
    def request_bytes(self) -> int:
        """What a process with one instance takes once it runs, in whole MiB, for schedulers that ask."""
        return -(-(self.instance_bytes + PROCESS_BYTES) // MiB) * MiB

    @property
    def limit_bytes(self) -> int:
        """What it takes at most: while it loads, the file and copies of the weights are there as well."""
        return -(-(self.request_bytes + 2 * self.parameters) // MiB) * MiB

    def record(self) -> dict[str, int]:
        """For JSON."""
        return {
            "parameter_bytes": self.parameters, "input_bytes": self.inputs, "activation_bytes": self.activations,
            "scratch_bytes": self.workspace, "instance_bytes": self.instance_bytes, "total_bytes": self.total_bytes,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class ArenaSharing:
    """How the models of one process share its memory.

    Attributes:
        arenas: How many requests run at a time.
        limit: Most bytes of the fleet, see `memonger.Fleet`; None for no limit.
        wait: Seconds that a request waits for an arena at most.
    """

    arenas: int = 1
    limit: int | None = None
    wait: float = WAIT


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model to be served.

    Attributes:
        name: By which requests ask for it.
        plans: Plans for different input shapes, by rising batch.
    """

    name: str
    plans: tuple[Plan, ...]

    @property
    def largest(self) -> Plan:
        """The plan for the largest inputs."""
        return self.plans[-1]

    @property
    def batches(self) -> tuple[int, ...] | None:
        """The batch of each plan; None if they have none: the first size of every input and output."""
        if any(plan.ranges for plan in self.plans) or (len(self.plans) == 1 and self.largest.batch is None):
            return None
        sizes: list[int] = []
        for plan in self.plans:
            first = {one.dims[0] if one.dims else -1 for one in (*inputs_of(plan), *outputs_of(plan))}
            if len(first) != 1 or min(first) < 1:
                return None
            sizes += first
        return tuple(sizes) if len(set(sizes)) == len(sizes) else None


@dataclass(frozen=True, slots=True)
class Package:
    """What is exported: one model, or several that share the memory of a process.

    Attributes:
        name: Of the whole, for the server; of a single model that as well.
        models: By name.
        instances: How many processes are served.
        sharing: How models share the memory of each.
        notes: What the user should know, one sentence each.
    """

    name: str
    models: tuple[ServedModel, ...]
    instances: int = 1
    sharing: ArenaSharing = ArenaSharing()
    notes: tuple[str, ...] = ()

    def only(self, target: str) -> ServedModel:
        """The model, for a target that takes one.

        Raises:
            PlanError: there are several.
        """
        if len(self.models) > 1:
            raise PlanError(
                f"{target} takes one model, and there are {', '.join(one.name for one in self.models)}: export each on "
                f"its own, or all of them for one of {', '.join(FLEETS)}."
            )
        return self.models[0]

    def as_planned(self) -> Estimate:
        """What processes that hold a `memonger.Fleet` take: as many arenas each as large as the largest plan needs."""
        arenas, limit = self.sharing.arenas, self.sharing.limit
        memory = memory_of([need_of(model.plans) for model in self.models], arenas)
        room = memory.weights if limit is None else limit - memory.arenas - memory.workspace
        return Estimate(
            parameters=max(0, min(memory.weights, room)),
            inputs=arenas * max(plan.input_bytes for model in self.models for plan in model.plans),
            activations=memory.arenas,
            workspace=memory.workspace,
            instances=self.instances,
        )

    def as_stock(self, plan: Plan, executed: Sequence[int], *, shared: bool = False) -> Estimate:
        """What stock onnxruntime takes for a plan, its nodes run in an order, without an arena of its own."""
        live = stock_bytes(dataclasses.replace(plan.graph, workspace=(0,) * len(plan.graph.nodes)), executed)
        most = stock_bytes(plan.graph, executed)
        return Estimate(plan.parameter_bytes, plan.input_bytes, live, most - live, self.instances, shared)


def inputs_of(plan: Plan) -> tuple[TensorSpec, ...]:
    """The inputs a request gives."""
    return tuple(_tensor(value, "input", plan) for value in required_inputs(plan.open_model.graph))


def outputs_of(plan: Plan) -> tuple[TensorSpec, ...]:
    """The outputs, each once."""
    return tuple(_tensor(value, "output", plan) for value in dict.fromkeys(plan.open_model.graph.outputs))


def _tensor(value: ir.Value, kind: str, plan: Plan) -> TensorSpec:
    if not isinstance(value.type, ir.TensorType) or value.shape is None:
        raise PlanError(
            f"{kind} '{value.name}' is {value.type or 'of an unknown type'}: only tensors of known rank can be served."
        )
    dims = tuple(int(dim) if isinstance(dim, int) else -1 for dim in value.shape)
    sizes = tuple(dim if isinstance(dim, int) else plan.ranges.get(str(dim), "any") for dim in value.shape)
    return TensorSpec(str(value.name), value.type.dtype, dims, sizes)


def pack(
    models: Mapping[str, Sequence[Plan | str | Path]],
    name: str,
    instances: int,
    sharing: ArenaSharing | None = None,
    *,
    ranges: bool = True,
) -> Package:
    """Read and check what is to be exported.

    Args:
        models: The plans of each model by its name.
        name: Of the whole.
        ranges: Whether the target takes plans for ranges of sizes.
        instances: How many processes.
        sharing: How models share the memory of each.

    Raises:
        PlanError: no plan, a training plan, plans of different models under one name, fewer than one instance, a value
            that servers have no type for, a model that never fits the limit, or several of which one isn't for the CPU.
        PlanFileError, VerificationError: as `Plan.load`.
    """
    if not models or not all(models.values()):
        raise PlanError("nothing to export: name at least one planned file.")
    instances = whole("instances", instances, 1, MOST_INSTANCES, PlanError)
    served = tuple(_served(one, plans, ranges) for one, plans in models.items())
    if len(models) > 1 or sharing is not None:
        _check_sharing(served, sharing or ArenaSharing())
    notes = list[str]()
    if any(plan.workspace is None for model in served for plan in model.plans):
        notes.append(
            "Workspace is not in the figures: it was never measured, and onnxruntime isn't here to measure it."
        )
    needed = memory_of([need_of(model.plans) for model in served], (sharing or ArenaSharing()).arenas).total
    if sharing is not None and sharing.limit is not None and needed > sharing.limit:
        notes.append(
            f"All models together take {in_full(needed)}, and the limit is {in_full(sharing.limit)}: they take turns, "
            "and one that isn't loaded is read again for the first request that asks for it."
        )
    return Package(name, served, instances, sharing or ArenaSharing(), tuple(notes))


def _served(name: str, plans: Sequence[Plan | str | Path], ranges: bool) -> ServedModel:
    """A model with its plans, read and checked."""
    loaded = []
    for number, one in enumerate(plans):
        plan, origin = (one, f"plan {number}") if isinstance(one, Plan) else (Plan.load(one), str(one))
        if plan.mode == "training" or plan.training is not None:
            inference = either(
                "memonger.search_plan(model, mode='inference')", "memonger plan MODEL --mode inference -o PLANNED.onnx"
            )
            raise PlanError(
                f"{origin} is a plan for training, which can't be served: plan the forward model "
                f"({inference}). trainer.export writes trained weights into it."
            )
        check_ranges(plan.ranges, ranges, origin)
        if plan.state:
            raise PlanError(
                f"{origin} keeps a state between runs, and a server runs anybody's requests: plan without it."
            )
        loaded.append(plan)
    try:
        program.check_family(loaded)
    except SessionError as error:
        raise PlanError(f"these plans can't be served as one model: {error}") from error
    loaded.sort(key=lambda plan: plan.input_bytes)
    return ServedModel(name, tuple(_with_workspace(plan) for plan in loaded))


def check_ranges(ranges: Mapping[str, DimRange], are_taken: bool, origin: str) -> None:
    """Check that a target takes what is planned for ranges of sizes.

    Raises:
        PlanError: it doesn't; those that do are named.
    """
    if ranges and not are_taken:
        raise PlanError(
            f"{origin} is planned for ranges of sizes ({described(ranges)}), which {', '.join(FLEETS)} serve: for "
            "others plan the model for single sizes."
        )


def _check_sharing(models: Sequence[ServedModel], sharing: ArenaSharing) -> None:
    """Check that the models can share memory, and that each fits its limit alone."""
    for model in models:
        device = device_of(model.largest, None)
        if not device.is_host:
            raise PlanError(
                f"'{model.name}' is planned for {device}, and models share memory on the CPU alone: plan it with "
                f"{option('device', 'cpu')}, or export it on its own."
            )
        needed = memory_of([need_of(model.plans)], sharing.arenas).total
        if sharing.limit is not None and needed > sharing.limit:
            raise PlanError(
                f"'{model.name}' alone takes {in_full(needed)} with {sharing.arenas} "
                f"arena{'' if sharing.arenas == 1 else 's'}, and the limit is {in_full(sharing.limit)}: "
                f"{option('limit')} has to be at least that."
            )


def check_runs(package: Package) -> None:
    """Check that a session follows each plan, where onnxruntime is here to say so: a server would refuse every request.

    Raises:
        PlanError: it doesn't; the message says what would work.
    """
    for model in package.models if onnxruntime.is_available() else ():
        for plan in model.plans:
            try:
                check_as_written(plan, device_of(plan, None))
            except SessionError as error:
                raise PlanError(f"'{model.name}' can't be served: {error}") from error


def stock_notes(plan: Plan) -> list[str]:
    """What to say of the figure where stock onnxruntime runs the plan."""
    chunks = CHUNKS_NOTE.format(chunks=option("chunks", "off"))
    return [STOCK_NOTE, chunks] if plan.chunks else [STOCK_NOTE]


def binding_notes(package: Package) -> tuple[str, ...]:
    """What to say of plans that a session elsewhere would refuse."""
    bound = [model for model in package.models if model.largest.stamp is not None]
    if not bound:
        return ()
    stamp = bound[0].largest.stamp
    assert stamp is not None
    what = "The plan" if len(package.models) == 1 else f"The plan of '{bound[0].name}'"
    return (
        f"{what} is bound to {stamp.runtime} and this kind of processor: a session elsewhere refuses it. A plan "
        f"made with {option('device', 'none')} runs everywhere.",
    )


def _with_workspace(plan: Plan) -> Plan:
    """The plan with its kernels' workspace measured, where that can be done and wasn't."""
    if plan.workspace is not None:
        return plan
    workspace = calibrate.measured(plan.model, plan.threads)
    if workspace is None:
        return plan
    measured = tuple(workspace.get(name, 0) for name in plan.graph.nodes)  # offsets go by this graph's numbers
    return dataclasses.replace(plan, workspace=workspace, graph=dataclasses.replace(plan.graph, workspace=measured))


def name_of(plan: object) -> str:
    """What a server calls a model that isn't given a name: as its file, or as the model calls itself."""
    if isinstance(plan, Plan):
        return str(plan.model.graph.name or "model")
    if not isinstance(plan, str | Path):
        graph = getattr(plan, "graph", None)
        return str(getattr(graph, "name", "") or "model")
    return Path(plan).name.removesuffix(".onnx").removesuffix(".planned") or "model"


@dataclass(frozen=True, slots=True)
class Naming:
    """Which names of models a server takes.

    Attributes:
        pattern: A regular expression of the whole name.
        words: The same in words.
    """

    pattern: str
    words: str

    def check(self, name: str) -> None:
        """Check a name.

        Raises:
            PlanError: the server doesn't take it.
        """
        if not re.fullmatch(self.pattern, name):
            raise PlanError(f"{name!r} can't be the model's name: {self.words}. Give another ({option('name')}).")


def check_standard(plan: Plan, target: str, *, own: bool) -> None:
    """The model's operators are there wherever it is served.

    Args:
        plan: The plan.
        target: The target's name.
        own: Whether onnxruntime's own operators are there as well; those of blocked layouts never are: they are
            bound to the processor, and nothing there would check it.

    Raises:
        PlanError: an operator isn't; it names the node.
    """
    for node in plan.model.graph:
        if node.domain in STANDARD or (own and node.domain == "com.microsoft"):
            continue
        extended = option("level", "extended")
        instead = (
            f"plan the model with {option('device', 'none')}{f' or {extended}' if own else ''}"
            if plan.stamp is not None
            else "it is the model's own operator, so export it for another target: "
            f"{', '.join(('onnxruntime', 'triton', *FLEETS))}"
        )
        raise PlanError(
            f"node '{node.name}' is {node.domain}::{node.op_type}, which {target} can't be relied on to run: {instead}."
        )


def describe(estimate: Estimate) -> str:
    """The estimate in one line."""
    parts = {
        "weights": estimate.parameters, "activations": estimate.activations, "workspace": estimate.workspace,
        "inputs": estimate.inputs,
    }  # fmt: skip
    return ", ".join(f"{what} {in_full(size)}" for what, size in parts.items())
