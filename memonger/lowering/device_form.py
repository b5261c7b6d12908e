"""The device form: what onnxruntime's own optimizer makes of a model for one machine, measured in a few runs.

The optimizer's output is loaded again with every optimization off, and has to run as it stands, node for node and in
file order: only then may its values be given addresses.
"""

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from memonger.devices import Cuda, Device, Stamp
from memonger.errors import LoadError, PlanError, SessionError
from memonger.files import ScratchFolder, in_small_writes
from memonger.graph.aliasing import floating_names, in_inference_form
from memonger.graph.schedule import depth_first, put_updates_last, sources_of, topological_order
from memonger.ir.checks import root_cause
from memonger.ir.model import Model
from memonger.ir.modules import carry_modules
from memonger.ir.names import name_nodes, tell_bodies_apart
from memonger.ir.operators import facts, operator_name
from memonger.ir.passes import Pass, run_passes
from memonger.ir.tensors import external_tensors, in_memory, sizes_of_parts
from memonger.ir.values import all_values, graphs, nbytes, static_shape, tensor_shape
from memonger.lowering import calibrate, cpu_narrow, ranged
from memonger.lowering.cpu import fuse_products
from memonger.lowering.cpu_blocks import join_in_blocks
from memonger.lowering.cpu_convolutions import block_convolutions
from memonger.lowering.cpu_narrow import widen_narrow_nodes
from memonger.lowering.first_plan import first_plan, plan_if_well_over
from memonger.lowering.growth import GrownRuns
from memonger.lowering.lowered import Calibration, Lowered
from memonger.lowering.turned_weights import MUCH, turn_weights
from memonger.model.branches import has_branches, open_branches
from memonger.plan_records import Spent
from memonger.runtime import feeds as feeding
from memonger.runtime import ort, process_memory, profile
from memonger.runtime.arena import host_memory
from memonger.runtime.backend import backend
from memonger.runtime.prepared import Input
from memonger.runtime.program import inputs_of
from memonger.shapes import open_dims
from memonger.shapes.inference import forget_symbolic, give_sizes, infer_types, run_time_sized
from memonger.shapes.ranges import DimRange
from memonger.units import MiB, in_full
from memonger.words import option

LEVELS = {
    "disable": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
    "rewrite": "ORT_DISABLE_ALL",
}
"""By name: what onnxruntime is asked for. ``rewrite`` has `cpu_convolutions` before it, which changes last bits."""


def forms(model: Model, device: Device, level: str) -> tuple[Pass, ...]:
    """The passes that write a model in operators that a device has kernels for, before its optimizer runs."""
    if device.provider == "CUDAExecutionProvider":
        from memonger.lowering.cuda import write_out_for_cuda  # here: its rules are for that device alone

        return (write_out_for_cuda,)
    if not device.is_host:
        return ()
    steps = (fuse_products,) if model.is_differentiated else ()
    if level != "rewrite":
        return steps
    inexact = (block_convolutions, partial(fuse_products, exact=False)) if model.is_differentiated else ()
    return (widen_narrow_nodes, *steps, *inexact)


Weights = Mapping[str, ir.ExternalTensor]
"""Weights in files, by name."""

_LARGE = MiB
"""Bytes of a weight that the optimizer isn't asked to write twice."""

ROUNDS = 3  # reloads until the runtime leaves the model as it is; two were enough for every model seen


@dataclass(frozen=True, slots=True)
class LoweringSettings:
    """How a model is lowered for a device.

    Attributes:
        level: One of `LEVELS`.
        threads: Threads within a node; 0 leaves it to onnxruntime.
        inputs: What the calibrating run is fed; random numbers if None.
        cuda: How the CUDA provider is set up.
        source_order: Put the nodes into the order of the model given. onnxruntime writes them in one of its own, in
            which parts of a backward pass come far too early.
        ranges: Dimensions that are symbolic in the model, and stay so; on the CPU alone.
        times: Whether what nodes take decides anything, so that the model runs again after it has run once.
        grown: What runs at smaller sizes showed, on the CPU: where the same nodes come out, the model doesn't run.
    """

    level: str = "all"
    threads: int = 0
    inputs: feeding.Feeds | None = None
    source_order: bool = False
    cuda: Cuda = field(default_factory=Cuda)
    ranges: Mapping[str, DimRange] = field(default_factory=dict)
    times: bool = True
    grown: GrownRuns | None = None


def device_form(
    model: Model, device: Device, settings: LoweringSettings | None = None, unbound: Model | None = None
) -> Lowered:
    """Lower a model for a device and calibrate it.

    Args:
        model: The model, its sizes fixed.
        device: Where it will run.
        settings: How.
        unbound: The same with the sizes that its file leaves open. What onnxruntime makes of that is taken where it
            computes other bits: they are those of a stock session, which isn't told the sizes. None where none is open.

    Raises:
        PlanError: the runtime refuses the model or its inputs.
        RuntimeUnavailableError: no runtime, or no such device.
    """
    settings = settings or LoweringSettings()
    ort.check_device(device)
    if settings.level not in LEVELS:
        raise PlanError(f"{settings.level!r} is not an optimization level: there are {', '.join(LEVELS)}.")
    room = host_memory() if device.is_host else 0  # checked before onnxruntime makes anything of the model
    for value in all_values(model.graph) if room else ():
        size = nbytes(value) or 0
        if size > room:
            raise PlanError(
                f"{model.name}: '{value.name}' takes {in_full(size)}, and this machine has {in_full(room)} of memory, "
                f"so no run can measure the model. Plan smaller sizes, or without a run ({option('device', 'none')})."
            )
    folder, spent = ScratchFolder(), Spent()
    try:
        passes = forms(model, device, settings.level)
        written = run_passes(model.clone(), "lower", *passes) if passes else model
        keeps_files = False
        if not device.is_host or LEVELS[settings.level] == LEVELS["disable"]:
            unbound = None
        else:
            turned = turn_weights([each for each in (written, unbound) if each is not None], folder.path)
            if keeps_files := turned is not None:
                written, unbound = turned[0], (*turned, None)[1]
        lowering = _Lowering(device, settings, folder.path, spent, keeps_files)
        made = lowering.lower_or_open(written, unbound)
        process_memory.give_back()  # sessions of the whole model took as much as its weights
    except SessionError as error:
        hint = cpu_narrow.hint(model) if device.is_host and settings.level != "rewrite" else ""
        raise PlanError(f"{model.name}: {error}{hint}") from error
    except OSError as error:
        raise PlanError(f"{model.name}: lowering needs room in {tempfile.gettempdir()}: {error}.") from error
    cuda = settings.cuda if device.facts.has_settings else None
    stamp = Stamp(ort.runtime_name(), device.provider, backend(device).machine_name(), settings.level, cuda)
    return Lowered(made.lowered.ir, stamp, made.calibration, folder, spent, made.lowered.passes, made.run)


_EXACT = frozenset({
    "Cast", "Concat", "ConstantOfShape", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Pad",
    "Range", "Reshape", "Shape", "Size", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze", "Where",
})  # fmt: skip
"""Operators that move elements, as shape arithmetic is made of: however many there are, no bit is another."""


def _compute_alike(one: Model, other: Model) -> bool:
    """Whether forms of a model have the same operators of those that can round: with whole numbers none does."""
    if _computing(one.ir) == _computing(other.ir):
        return True
    one, other = one.clone(), other.clone()
    for form in (one, other):
        with suppress(LoadError):
            infer_types(form)
    return _computing(one.ir) == _computing(other.ir)


def _computing(model: ir.Model) -> Counter[str]:
    """How often each operator occurs that computes anything but whole numbers, or numbers whose type isn't known."""
    found = Counter[str]()
    for node in model.graph:
        dtypes = {value.dtype for value in (*node.inputs, *node.outputs) if value is not None}
        is_whole = all(dtype is not None and (dtype.is_integer() or dtype == ir.DataType.BOOL) for dtype in dtypes)
        if not is_whole and operator_name(node) not in _EXACT:
            found[operator_name(node)] += 1
    return found


def _varied(feeds: Mapping[str, np.ndarray], inputs: Sequence[Input]) -> dict[str, np.ndarray]:
    """The feeds, with zeros and ones where integers are all zeros: rows that are alike tell little of a form's bits."""
    rng, found = np.random.default_rng(0), dict(feeds)
    for each in inputs:
        array = feeds.get(each.name)
        if array is not None and array.dtype.kind in "iub" and array.size > 1 and not each.fill:
            found[each.name] = rng.integers(0, 2, array.shape).astype(array.dtype)
    return found


class _Calibrated(NamedTuple):
    """A lowered model as it ran, what was measured, and what it gave; nothing measured where its bits were enough."""

    lowered: Model
    calibration: Calibration | None
    results: calibrate.Results | None = None
    run: calibrate.CalibratingRun | None = None


@dataclass(frozen=True, slots=True)
class _Lowering:
    """What a model is lowered with; see `device_form`. Files lie in ``folder``, runs are counted in ``spent``.

    With ``keeps_files`` all large weights do from the beginning: what the optimizer leaves as it is stays there.
    """

    device: Device
    settings: LoweringSettings
    folder: Path
    spent: Spent
    keeps_files: bool = False

    def lower_or_open(self, model: Model, unbound: Model | None) -> _Calibrated:
        """`as_stock`; a model that the runtime refuses, but for sizes that are fixed in branches, with these open."""
        try:
            return self.as_stock(model, unbound)
        except SessionError:
            if not has_branches(model):
                raise
            opened = run_passes(model.clone(), "lower", open_branches)
            try:
                return self.as_stock(opened, unbound)
            except calibrate.RunFailedError:
                raise  # it was that, and is something else now
            except SessionError:
                pass  # it isn't that: what was said first counts
            raise

    def as_stock(self, model: Model, unbound: Model | None) -> _Calibrated:
        """The model that the optimizer makes, calibrated.

        With sizes fixed it computes more of a model beforehand, and fuses otherwise. So where the operators differ that
        it makes of the model with its sizes open, both are run on the same inputs, and where bits differ the other is
        taken. With ranges, for which several sizes would have to be compared, the other is taken at once.
        """
        settings = self.settings
        first = self.optimized(model, model, "optimized.onnx")
        if (grown := self.grown(model, first)) is not None:
            return grown
        other = None if unbound is None else self.computing_otherwise(unbound, model, first)
        if settings.grown is not None:
            if other is not None and (grown := self.grown(model, other[1](), "sizes_open")) is not None:
                return grown
            if settings.grown.why_not_run:
                raise PlanError(f"{model.name}: {settings.grown.why_not_run}")
        if other is None:
            return self.calibrated(model, first, calibrate.Wanted(settings.times))
        if settings.ranges:
            with suppress(SessionError):
                return self.calibrated(model, other[1](), calibrate.Wanted(settings.times), "sizes_open")
        elif settings.inputs is not None:
            with suppress(SessionError):
                return self.of_two(model, first, other)
        else:
            inputs = inputs_of(first.graph)
            zeros = feeding.random_feeds(inputs)
            for given in (_varied(zeros, inputs), zeros):
                with suppress(SessionError):  # it doesn't run on these inputs: nothing is known of its bits
                    return replace(self, settings=replace(settings, inputs=given)).of_two(model, first, other)
        return self.calibrated(model, first, calibrate.Wanted(settings.times))

    def of_two(self, model: Model, first: Model, other: tuple[Model | None, Callable[[], Model]]) -> _Calibrated:
        """The first form, or what `computing_otherwise` gives where its bits differ; both run on the inputs given.

        Raises:
            SessionError: one doesn't run on them.
        """
        (borrowing, in_full), wanted = other, calibrate.Wanted(self.settings.times, results=True)
        if borrowing is not None:  # it isn't what is planned: it runs once, and before times are taken of the first
            seen = self.calibrated(model, borrowing, replace(wanted, times=False), "sizes_open")
            wanted = replace(wanted, other=seen.results, if_same=True)
        found = self.calibrated(model, first, wanted)
        if borrowing is not None and found.calibration is not None:
            return found
        with suppress(SessionError):
            wanted = calibrate.Wanted(self.settings.times, other=found.results)
            stock = self.calibrated(model, in_full(), wanted, "sizes_open")
            if stock.calibration is not None:
                return stock
        if found.calibration is not None:
            return found
        return self.calibrated(model, first, calibrate.Wanted(self.settings.times))

    def optimized(
        self, source: Model, original: Model, name: str, level: str | None = None, known: Weights | None = None
    ) -> Model:
        """What the optimizer makes of a model, by way of a file of that name; modules are as in the original."""
        level = LEVELS[self.settings.level] if level is None else level
        writes_new = partial(OptimizeWithOnnxruntime, self.device, level, self.folder / name, self.settings.cuda)
        carry = partial(carry_modules, source=original.ir)
        passes = (
            tell_bodies_apart, forget_below_zero, join_in_blocks, settle_reorders, copy_where_nothing_drops, name_nodes,
            carry,
        )  # fmt: skip
        if self.keeps_files:
            with suppress(SessionError):  # what it makes anew may be more than a model's message holds
                return run_passes(source, "lower", writes_new(keeps_files=True), *passes)
        return run_passes(source, "lower", writes_new(known), *passes)

    def computing_otherwise(
        self, unbound: Model, model: Model, lowered: Model
    ) -> tuple[Model | None, Callable[[], Model]] | None:
        """What the optimizer makes of a model whose sizes are open, at these sizes; None where it has the operators.

        None too where it is refused, or what the model gives isn't told by its inputs.

        Returns: With large weights of the same names of ``lowered``, which aren't written another time, where it has
            such: if that gives the same bits, that is enough. What makes it with its own.
        """
        if any(
            facts(node).random and not (node.op_type == "Dropout" and in_inference_form(node)) for node in model.graph
        ):
            return None
        known = None if self.keeps_files else {str(tensor.name): tensor for tensor in external_tensors(lowered.ir)}
        try:
            found = self.optimized(unbound, unbound, "sizes_open.onnx", known=known)
        except SessionError:
            return None
        if _compute_alike(found, lowered):
            return None

        def with_sizes(other: Model) -> Model:
            shapes = {value.name: value.shape for value in model.graph.inputs}
            for value in other.graph.inputs:
                value.shape = shapes.get(value.name, value.shape)
            forget_symbolic(other.ir)
            return other

        def in_full() -> Model:
            return with_sizes(self.optimized(unbound, unbound, "sizes_open_in_full.onnx"))

        has_all = all(Path(tensor.path).is_file() for tensor in external_tensors(found.ir))
        is_own = has_all and set(external_tensors(lowered.ir)).isdisjoint(external_tensors(found.ir))
        if is_own:
            return None, lambda: with_sizes(found)
        return with_sizes(found) if has_all else None, in_full

    def calibrated(
        self, model: Model, optimized: Model, wanted: calibrate.Wanted, name: str = "optimized"
    ) -> _Calibrated:
        """What the optimizer made of a model as it runs, with what it gives; files are of that name."""
        settings, device = self.settings, self.device
        for lowered in self.reloads(model, optimized, name):
            if settings.ranges:
                open_dims.forget(lowered.ir)
                whole, runs = ranged.run(
                    lowered.ir, model.name, settings.ranges, self.folder, settings.threads, settings.inputs, wanted,
                    self.spent,
                )  # fmt: skip
                if _as_written(lowered.ir, whole):
                    ranged.with_sizes(lowered.ir, settings.ranges, runs)
                    held = calibrate.run_time_bytes(lowered.ir, runs)
                    return _Calibrated(lowered, Calibration(whole.seconds, whole.workspace, run_time=held))
                continue
            ran, run = self.run(model, lowered, wanted)
            if run.results is not None and wanted.is_over(run.results):
                return _Calibrated(lowered, None, run.results)
            if _as_written(ran, run):
                host = calibrate.hosted(lowered.ir, device, settings.cuda)
                _give_sizes(lowered.ir, run)
                held = calibrate.run_time_bytes(lowered.ir, [run])
                return _Calibrated(lowered, Calibration(run.seconds, run.workspace, host, held), run.results, run)
        raise PlanError(
            f"{model.name}: onnxruntime doesn't run its own optimized model as written; it can't be planned."
        )

    def grown(self, model: Model, optimized: Model, name: str = "optimized") -> _Calibrated | None:
        """What the optimizer made of a model with what a run of it would show; None where smaller sizes don't tell."""
        if self.settings.grown is None:
            return None
        for lowered in self.reloads(model, optimized, name):
            run = self.settings.grown.of_model(lowered.ir)
            if run is not None and _agree(lowered.ir, run):
                _give_sizes(lowered.ir, run)
                if not run_time_sized(lowered.ir):
                    return _Calibrated(lowered, Calibration(run.seconds, run.workspace), run=run)
        return None

    def reloads(self, model: Model, lowered: Model, name: str) -> Iterator[Model]:
        """What the optimizer made of a model, then what the runtime makes of that, until it leaves it as it is."""
        for number in range(ROUNDS):
            if number:
                lowered = self.optimized(lowered, model, f"{name}{number}.onnx", "ORT_DISABLE_ALL")
            if self.settings.source_order:
                lowered = run_passes(lowered, "lower", partial(order_as_source, source=model.ir), put_updates_last)
            yield lowered

    def run(
        self, model: Model, lowered: Model, wanted: calibrate.Wanted
    ) -> tuple[ir.Model, calibrate.CalibratingRun]:  # fmt: skip
        """What ran to calibrate what the optimizer made of a model: that, or its first plan where it takes far less.

        On a device that isn't the host what runs without one is tried first, as its kernels take memory of their own.
        """
        settings, device = self.settings, self.device
        under = partial(
            calibrate.run, lowered.ir, device, self.folder, settings.cuda, settings.threads, (settings.inputs,), wanted,
            self.spent,
        )  # fmt: skip
        planned = plan_if_well_over(model, lowered, device) if device.is_host else None
        if planned is not None:
            with suppress(SessionError):  # inferred sizes may be others than a run's
                return planned.model, under(planned)[0]
        try:
            return lowered.ir, under(None)[0]
        except calibrate.NoRoomError as error:
            complaint = str(error)  # alone: with the error goes what the run has left of the device's memory
        try:
            planned = first_plan(model, lowered, device, calibrate.hosted(lowered.ir, device, settings.cuda))
        except LoadError as error:
            raise PlanError(
                f"{model.name}: it doesn't fit {device} without a plan ({complaint}), and so can't be calibrated, "
                f"which its sizes need: {error} Plan it for a smaller batch, or at {option('level', 'disable')}."
            ) from error
        try:
            return planned.model, under(planned)[0]
        except calibrate.NoRoomError as error:
            complaint = str(error)
        raise PlanError(f"{model.name}: it doesn't fit {device}, not even with a plan: {complaint}")


class OptimizeWithOnnxruntime(ir.passes.FunctionalPass):
    """What onnxruntime's optimizer makes of a model, as it writes it when a session is made. That never runs.

    Weights go into a file beside the optimized model: they are memory-mapped from there, never parsed. With ``known``
    those of `_LARGE` bytes and more go nowhere, where the system has such a file: tensors of the same name, type and
    shape among these are in their place. Of others there is no file then. With ``keeps_files`` those that lie in a file
    beside it stay there, and others are in the model.

    Raises:
        SessionError: the runtime refuses the model, or what it made of it can't be read; or much is to be in the model.
    """

    def __init__(
        self, device: Device, level: str, path: Path, cuda: Cuda, known: Weights | None = None,
        *, keeps_files: bool = False,
    ) -> None:  # fmt: skip
        self._device, self._path, self._known, self._keeps_files = device, path, known, keeps_files
        entries = {"session.disable_prepacking": "1"}
        if not keeps_files:
            least = 1024 if known is None else _LARGE
            entries["session.optimized_model_external_initializers_file_name"] = path.name + ".data"
            entries["session.optimized_model_external_initializers_min_size_in_bytes"] = str(least)
        self._settings = ort.SessionSettings(level=level, threads=1, optimized=path, entries=entries, cuda=cuda)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """The optimizer's model, with the graph's name and the metadata of the original."""
        data = self._path.with_name(self._path.name + ".data")
        if self._known is not None:
            with suppress(OSError):
                data.symlink_to(os.devnull)
        weights = (value.const_value for value in model.graph.initializers.values())
        is_much = sum(tensor.nbytes for tensor in weights if tensor is not None) >= MUCH
        is_written = is_much and not data.is_symlink() and not self._keeps_files
        with (
            in_small_writes(data) if is_written else nullcontext(),
            calibrate.session(model, self._device, self._settings),
        ):
            pass
        if data.is_symlink():
            data.unlink()
        if not self._path.is_file():
            raise SessionError(f"onnxruntime wrote no optimized model to {self._path.parent}: is the disk full?")
        try:
            made = ir.load(self._path)
        except (ValueError, RuntimeError, ir.serde.SerdeError) as error:
            raise SessionError(f"the model that onnxruntime made of it can't be read: {root_cause(error)}") from error
        tensors = [value.const_value for value in made.graph.initializers.values()]
        inside = sum(one.nbytes for one in tensors if one is not None and not isinstance(one, ir.ExternalTensor))
        if self._keeps_files and inside >= MUCH:
            raise SessionError(f"onnxruntime wrote {in_full(inside)} of weights into the model.")
        for value in made.graph.initializers.values() if self._known is not None and not data.is_file() else ():
            tensor, found = value.const_value, (self._known or {}).get(str(value.name))
            if isinstance(tensor, ir.ExternalTensor) and found is not None and _kind(tensor) == _kind(found):
                value.const_value = found
        for value, tensor in sizes_of_parts(made.graph).items():
            value.const_value = in_memory(tensor)
        made.graph.name = model.graph.name
        made.metadata_props.clear()
        made.metadata_props.update(model.metadata_props)
        made.ir_version = max(made.ir_version or 0, model.ir_version or 0)
        before, after = (Counter(operator_name(node) for node in each.graph) for each in (model, made))
        return ir.passes.PassResult(made, modified=before != after)  # its order of nodes can be another each time


def _kind(tensor: ir.TensorProtocol) -> tuple[object, ...]:
    return tensor.dtype, tensor_shape(tensor).numpy()


def forget_below_zero(model: Model) -> bool:
    """A pass: values have no sizes below zero.

    onnxruntime infers them in branches that no run with these sizes takes, as of a `Split` into more parts than there
    are elements, and reads them as open: so would the plan's file.
    """
    values = (value for graph in graphs(model.ir) for node in graph for value in node.outputs)
    impossible = [value for value in values if any(dim < 0 for dim in static_shape(value) or ())]
    for value in impossible:
        value.shape = None
    return bool(impossible)


def settle_reorders(model: Model) -> bool:
    """A pass: where onnxruntime's order of nodes is another each time, they are in one that follows from the graph.

    It inserts the nodes that leave blocked layouts in the order of addresses, counts them so, and where there are
    several lists the branches that they end in that order. So each node goes right behind the last that it reads from,
    depth first from the outputs, and these nodes are named by what they write.
    """
    outputs, unread = list(model.graph.outputs), {str(v.name): v for v in _unread(model.graph)}
    return _settle(model.graph, [*outputs, *(unread[name] for name in sorted(unread))])


def settle_bodies(model: Model) -> bool:
    """A pass: the same for the nodes of bodies, too; what isn't another each time stays as it was written.

    Of what nothing reads, or one node, those come first that leave blocked layouts: the optimizer adds them last.
    """
    settled = []
    for graph in graphs(model.ir):
        place = {
            value: (0, 0, str(value.name)) if _leaves_blocks(node) else (1, step, "")
            for step, node in enumerate(graph)
            for value in node.outputs
        }
        settled.append(_settle(graph, sorted(_unread(graph), key=place.__getitem__), place))
    return any(settled)


def _leaves_blocks(node: ir.Node) -> bool:
    return operator_name(node) == "com.microsoft.nchwc::ReorderOutput"


def _unread(graph: ir.Graph) -> list[ir.Value]:
    return [value for node in graph for value in node.outputs if value.name and not value.consumers()]


def _settle(graph: ir.Graph, ends: Sequence[ir.Value], place: Mapping[ir.Value, Any] | None = None) -> bool:
    """Put nodes in the order in which these values ask for them; those that a node reads by place."""
    nodes = list(graph)
    moved = [node for node in nodes if _leaves_blocks(node)]
    for node in moved:
        node.name = None
    if len(moved) > 1:
        graph.remove(nodes)
        graph.extend(depth_first(nodes, ends, place))
    return len(moved) > 1


def copy_where_nothing_drops(model: Model) -> bool:
    """A pass: a Dropout in inference form is an Identity. The optimizer takes out all but those that write outputs.

    Its kernel makes a mask that nobody reads: a byte for each element, of the process and not of any arena (1.32.0).
    """
    found = False
    for node in model.graph:
        masked = any(value.uses() or value.is_graph_output() for value in node.outputs[1:])
        if operator_name(node) == "Dropout" and in_inference_form(node) and not masked:
            node.op_type = "Identity"
            node.resize_inputs(1)
            node.resize_outputs(1)
            node.attributes.clear()
            found = True
    return found


def order_as_source(model: Model, source: ir.Model) -> bool:
    """A pass: the nodes are in the order of the model they were made from: onnxruntime writes them in another.

    Values keep their names. A node none of whose outputs the source has comes right before its first reader.
    """
    nodes = list(model.graph)
    sources = [sorted(found) for found in sources_of(nodes)]
    # For each node the step of ``source`` that writes the first of its outputs, or else that of its first reader
    written = {value.name: step for step, node in enumerate(source.graph) for value in node.outputs if value.name}
    ranks = [len(written)] * len(nodes)
    for number in reversed(range(len(nodes))):
        own = [written[v.name] for v in nodes[number].outputs if v.name in written]
        if own:
            ranks[number] = min(own)
        for before in sources[number]:
            ranks[before] = min(ranks[before], ranks[number])
    order = topological_order(sources, ranks)
    model.graph.remove(nodes)
    model.graph.extend(nodes[number] for number in order)
    return any(number != place for place, number in enumerate(order))


def _as_written(model: ir.Model, run: calibrate.CalibratingRun) -> bool:
    """Whether each run was of exactly the file's nodes, and had those of the device in the file's order."""
    left_out = floating_names(model) | run.foreign
    written = [str(node.name) for node in model.graph]
    in_order = [name for name in written if name not in left_out]
    return all(
        sorted(written) == sorted(order) and in_order == [name for name in order if name not in left_out]
        for order in run.orders
    )


def _give_sizes(model: ir.Model, run: calibrate.CalibratingRun) -> None:
    """Give values the sizes the run showed, in place; left out where another run could show others."""
    dynamic = run_time_sized(model)
    if dynamic or not all(_is_sized(v, run) for node in model.graph for v in node.outputs if v.name):
        _infer_sizes(model, run)
        dynamic = run_time_sized(model)
    for value in (v for node in model.graph for v in node.outputs):
        seen = run.tensors.get(str(value.name))
        if seen is None or value in dynamic:
            continue
        kind, dims = seen
        dtype = value.dtype if value.dtype is not None else profile.DTYPES.get(kind)
        inferred = static_shape(value)
        if dtype is not None and (inferred is None or inferred == dims):
            value.type, value.shape = value.type or ir.TensorType(ir.DataType(dtype)), ir.Shape(list(dims))
        elif inferred is not None:
            value.shape = None


def _infer_sizes(model: ir.Model, run: calibrate.CalibratingRun) -> None:
    """Give values the sizes that the inputs' tell, in place; of blocks the run shows the channels."""
    try:
        infer_types(Model(model, "the optimized model"))
    except LoadError:
        forget_symbolic(model)  # onnxruntime's own operators can be beyond ONNX's inference
    for node in model.graph:
        if operator_name(node) == "com.microsoft.nchwc::ReorderInput":  # its channels are the processor's
            _, dims = run.tensors.get(str(node.outputs[0].name), ("", ()))
            node.outputs[0].shape = ir.Shape([None, dims[1], None, None]) if len(dims) == 4 else None
    give_sizes(model)


def _agree(model: ir.Model, run: calibrate.CalibratingRun) -> bool:
    """Whether a run that wasn't made has the sizes that are told by the inputs', as far as these are."""
    _infer_sizes(model, run)
    told = {str(value.name): static_shape(value) for node in model.graph for value in node.outputs if value.name}
    return all(told.get(name) in (None, dims) for name, (_, dims) in run.tensors.items())


def _is_sized(value: ir.Value, run: calibrate.CalibratingRun) -> bool:
    """Whether the run showed a value's type and shape, or the model has them."""
    kind, _ = run.tensors.get(str(value.name), ("", ()))
    return kind in profile.DTYPES or (value.type is not None and static_shape(value) is not None)
