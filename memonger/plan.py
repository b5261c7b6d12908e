"""A plan for a model, which is saved as a file, and a plan for a graph without a model, which gives JSON."""

import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir

from memonger import plan_file
from memonger.allocation import lower_bound
from memonger.devices import CPU, Device, parse_device
from memonger.errors import PlanError, PlanFileError
from memonger.files import temporary_folder
from memonger.graph import ahead, aliasing, schedule, session_memory, verify
from memonger.graph.graph import Graph, from_model
from memonger.graph.liveness import Storage, assign_storage, peak_bytes, run_time_bytes
from memonger.graph.ranged import over_ranges
from memonger.graph.weight_window import (
    Read,
    bytes_read,
    bytes_written,
    copied_bytes,
    in_file,
    on_host,
    resident_bytes,
    weight_reads,
    what_is_wrong,
)
from memonger.ir import training_roles
from memonger.ir.model import Model, PassRecord
from memonger.ir.packed import second_copies
from memonger.ir.save import as_proto, check_not_its_weights
from memonger.ir.tensors import inner_bytes
from memonger.ir.training_roles import Training
from memonger.ir.values import nbytes, required_inputs, static_shape, subgraphs
from memonger.model.kept_state import check_state, state_of
from memonger.plan_file import Header, Record
from memonger.plan_records import PlannedBuffer, Shape, Spent, html_table, planned_buffers
from memonger.shapes import open_dims
from memonger.shapes.ranges import DimRange, described
from memonger.shapes.sizes import SizesError
from memonger.units import format_size, shown
from memonger.words import check_choice, option

if TYPE_CHECKING:
    import networkx
    import numpy

    from memonger.schedule.strategy import Outcome


@dataclass(frozen=True, eq=False, kw_only=True)
class BasePlan:
    """The order nodes run in and the byte of one arena at which every planned value lies.

    Attributes:
        graph: One node a step, recomputed ones as copies.
        offsets: Byte offset of each planned value, by value number of ``graph``.
        arena_bytes: Size of the arena.
        alignment: Every offset is a multiple of it.
        peak_before_bytes: The peak in the given order with nothing recomputed; None for a plan from a file.
        planning_seconds: Wall time planning took; None for a plan from a file.
    """

    graph: Graph
    offsets: Mapping[int, int]
    arena_bytes: int
    alignment: int
    peak_before_bytes: int | None = None
    planning_seconds: float | None = None

    @cached_property
    def storage(self) -> Storage:
        """The buffers behind the offsets, read off the offsets themselves."""
        return assign_storage(self.graph, alignment=self.alignment, offsets=self.offsets)

    @cached_property
    def peak_bytes(self) -> int:
        """Live bytes of the arena at the worst step."""
        return peak_bytes(self.storage.buffers, len(self.graph.nodes))

    @cached_property
    def lower_bound_bytes(self) -> int:
        """No layout of this order and sharing is smaller, alignment counted."""
        return lower_bound(self.storage.buffers)

    @property
    def activation_bytes(self) -> int:
        """All planned values at once, each once: of one that chunks are parts of, no part beside it."""
        graph = self.graph
        parts = graph.parts
        return sum(
            size
            for value, (size, planned) in enumerate(zip(graph.sizes, graph.planned, strict=True))
            if planned and value not in parts and value not in graph.copies
        )

    @property
    def overhead(self) -> float:
        """Cost of what is recomputed over the cost of one pass with nothing recomputed."""
        return schedule.overhead(self.graph.again, self.graph.costs)

    @cached_property
    def recomputed(self) -> tuple[int, ...]:
        """Steps that compute something again."""
        return tuple(step for step, again in enumerate(self.graph.again) if again)

    @property
    def source_nodes(self) -> tuple[object, ...]:
        """For each step the node it runs: a recomputed node occurs again."""
        return self.graph.runs

    def to_networkx(self) -> "networkx.DiGraph[str]":
        """The planned steps as a ``networkx.DiGraph``; `memonger.search_plan` takes it as a graph without a model.

        There is one node for each step, in the planned order, under a name of its own: that of the model's node, with
        ``.recompute<k>`` behind it where the step is a recomputation. Edges lead from the step that writes a value to
        the steps that read it. Attributes:

        - of the graph: ``arena_bytes``, ``alignment``, ``peak_bytes``;
        - of a node: ``node`` (what the step runs: the same for a recomputation), ``step``, ``op``, ``cost``,
          ``workspace`` (bytes), ``forward``, ``recomputed``, and as of an edge ``values``, ``bytes``, ``offsets`` of
          what it writes;
        - of an edge: ``values`` (names), ``bytes`` (their total in the arena), ``offsets`` (one for each value; None
          for one that the runtime keeps, which counts no bytes).
        """
        import networkx

        graph, writer = self.graph, dict[int, str]()
        steps: networkx.DiGraph[str] = networkx.DiGraph(
            arena_bytes=self.arena_bytes, alignment=self.alignment, peak_bytes=self.peak_bytes
        )
        for step, (name, source) in enumerate(zip(graph.nodes, self.source_nodes, strict=True)):
            steps.add_node(
                name, node=source, step=step, op=graph.ops[step], cost=graph.costs[step],
                workspace=graph.workspace[step], forward=graph.forward[step],
                recomputed=bool(graph.again[step]), **self._described(graph.writes[step]),
            )  # fmt: skip
            writer.update(dict.fromkeys(graph.writes[step], name))
            by_writer: dict[str, list[int]] = {}
            for value in graph.reads[step]:
                if value in writer:
                    by_writer.setdefault(writer[value], []).append(value)
            for origin, values in by_writer.items():
                steps.add_edge(origin, name, **self._described(values))
        return steps

    def _described(self, values: Sequence[int]) -> dict[str, object]:
        graph = self.graph
        return {
            "values": tuple(graph.values[value] for value in values),
            "bytes": sum(graph.sizes[value] for value in values if value in self.offsets),
            "offsets": tuple(self.offsets.get(value) for value in values),
        }

    def buffers(self) -> Iterator[PlannedBuffer]:
        """A record for each value in the arena, in the order in which they are computed; see `PlannedBuffer`."""
        return planned_buffers(self.graph, self.offsets, self._shapes())

    def _shapes(self) -> Mapping[str, Shape]:
        return {}

    def verify(self) -> None:
        """Run the independent checker.

        Raises:
            VerificationError: the plan is wrong.
        """
        verify.verify(self.graph, self.offsets, self.arena_bytes, self.alignment)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Plan(BasePlan, Header):
    """The order a model's nodes run in and the byte of one arena at which every planned value lies.

    It also has the fields of `memonger.plan_file.Header`, which say what it was made for.

    Attributes:
        model: The model, its nodes in the planned order. Not to be edited.
        budget: Bytes the plan was to fit, if any.
        strategy: The strategy that decided what is recomputed; None for a plan from a file.
        outcome: What the strategy returned; None for a plan from a file.
        source: The user's own model, loaded; None for a plan from a file.
        origins: Values of parts, each with the output of the source's node it is a part of; see `memonger.ir.marks`.
        notes: What the user should know about the plan, one sentence each.
        live_before: Live bytes at each step of the given order with nothing recomputed, ``int64[steps]``; None for a
            plan from a file.
        files: Keeps temporary files alive that the model's tensors lie in.
        weight_digests: Digests of the weights in the file that the plan is from, if any; None where there are none.
        spent: What of the model was run to plan it; None for a plan from a file.
        passes: The passes that changed the model on the way from its source; none are known of a plan from a file.
    """

    model: ir.Model
    budget: int | None = None
    strategy: str | None = None
    outcome: "Outcome | None" = None
    source: Model | None = None
    origins: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    live_before: "numpy.ndarray | None" = None
    files: object = None
    weight_digests: Mapping[str, str] | None = None
    spent: Spent | None = None
    passes: tuple[PassRecord, ...] = ()

    @cached_property
    def overhead(self) -> float:
        """Cost of what is recomputed over the cost of one pass with nothing recomputed: by estimate.

        That follows from the model alone (`memonger.graph.costs`): whatever was measured, the plan's file says the
        same.
        """
        if not self.recomputed:
            return 0.0
        device = parse_device(self.device)
        costs = estimated_costs(self.model, self.training, device, self.host, self.ranges)
        return schedule.overhead(self.graph.again, costs)

    @cached_property
    def training(self) -> Training | None:
        """What a training model says of itself; None for any other."""
        return training_roles.read(self.model, str(self.model.graph.name))

    @cached_property
    def parameter_bytes(self) -> int:
        """Weights of the model, those of branches and trees too; of a training model all that persists, with the
        optimizer's state. What is frozen counts twice on the CPU, where kernels of the forward and of the backward pass
        read packed copies of their own."""
        return parameter_bytes(self.model, self.training, parse_device(self.device))

    @cached_property
    def resident_parameter_bytes(self) -> int:
        """The most of `parameter_bytes` that is in memory at once: with a `window` others stay in the plan's file. Of a
        CUDA device's memory it is what isn't in the host's (`host_weights`): copies lie in the arena. Small
        constants that several partitions read (`ahead_bytes`) count for each."""
        if self.window is None:
            again = 0 if self._cut is None else self._cut.repeated_bytes
            return self.parameter_bytes - sum(self.host_weights.values()) + again
        return resident_bytes(weight_reads(self.model, self.graph), self.window, self.parameter_bytes)

    @property
    def kept_parameter_bytes(self) -> int:
        """Those of `parameter_bytes` that are in memory all the time: all of them where there is no `window`."""
        return self.resident_parameter_bytes - (0 if self.window is None else self.window.nbytes)

    @property
    def read_bytes(self) -> int:
        """Bytes that a run reads from files through its `window`: weights of the plan's, state of the session's. On a
        CUDA device what it copies of `host_weights`."""
        return copied_bytes(self.model) if self.host_weights else sum(map(bytes_read, self._reads_in_window))

    @cached_property
    def host_weights(self) -> Mapping[str, int]:
        """The weights of a plan for a CUDA device that lie in the host's memory, from where each is copied to the arena
        right before the steps that read it, or while earlier ones run (`ahead_bytes`). Their bytes."""
        return {} if parse_device(self.device).is_host else on_host(self.model)

    @cached_property
    def ahead_bytes(self) -> int:
        """How many bytes of `host_weights` a run copies while other steps run, see `memonger.graph.ahead`."""
        return 0 if self._cut is None else sum(nbytes(c.node.outputs[0]) or 0 for c in self._cut.copies)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the host's memory, locked for the device, that these pass through: no budget counts them."""
        return 0 if self._cut is None else self._cut.staging_bytes

    @cached_property
    def _cut(self) -> "ahead.CutSchedule | None":
        return None if parse_device(self.device).is_host else ahead.copies_ahead(self.model, self.host)

    @property
    def written_bytes(self) -> int:
        """Bytes that a training step writes to the session's file, behind the `window`: of what it updates, and of
        `values_in_file`."""
        return sum(map(bytes_written, self._reads_in_window))

    @cached_property
    def state_in_file(self) -> Mapping[str, int]:
        """What a training step updates that lies in a file of the session's, in the order of the updates: its bytes."""
        return {read.name: read.nbytes for read in self._reads_in_window if read.updated}

    @cached_property
    def values_in_file(self) -> Mapping[str, int]:
        """What a training step computes that waits in a file of the session's for later steps: bytes, in their order.

        It has no place in the arena: of it there is in memory what is in the `window`."""
        made, sizes = [read.name for read in self._reads_in_window if read.made], in_file(self.model)
        return {name: sizes[name] for name in made}

    @cached_property
    def _reads_in_window(self) -> "tuple[Read, ...]":
        named = set() if self.window is None else set(self.window.weights)
        return tuple(read for read in weight_reads(self.model, self.graph) if read.name in named) if named else ()

    @property
    def input_bytes(self) -> int:
        """Inputs that a caller gives for each run."""
        return input_bytes(self.model, self.training)

    @cached_property
    def state(self) -> Mapping[str, str]:
        """Inputs that a session keeps, and which output each becomes for the next run."""
        return state_of(self.model, str(self.model.graph.name))

    @property
    def state_bytes(self) -> int:
        """What that takes: once where a kernel writes it in place or behind what is there, else twice."""
        return state_bytes(self.model, self.graph)

    @cached_property
    def why_swapped(self) -> Mapping[str, str]:
        """Inputs of the state that grow and yet take two buffers, which swap: why new rows can't go behind the old."""
        in_place = _written_in_place(self.graph)
        inputs, outputs = ({str(v.name): v for v in vs} for vs in (self.model.graph.inputs, self.model.graph.outputs))
        grown = {old: new for old, new in self.state.items() if nbytes(inputs[old]) != nbytes(outputs[new])}
        provider = parse_device(self.device).provider
        return {
            old: aliasing.why_not_appended(inputs[old], outputs[new], provider)
            for old, new in grown.items() if old not in in_place
        }  # fmt: skip

    @property
    def state_notes(self) -> tuple[str, ...]:
        """What to say of a state that swaps where it could lie once."""
        if not self.why_swapped:
            return ()
        (first, why), *others = self.why_swapped.items()
        more = f" and {len(others)} more of the state take" if others else " takes"
        hint = "" if "full length" in why else " With nothing but 1 in front of its length it would lie once."
        return (f"'{first}'{more} two buffers that swap: {why}.{hint}",)

    @property
    def workspace_bytes(self) -> int | None:
        """Most workspace any step takes beside the arena; None if never measured."""
        return None if self.workspace is None else max(self.workspace.values(), default=0)

    @property
    def peer(self) -> str:
        """Who would run the model without a plan: `stock_bytes` are what that takes."""
        return "stock onnxruntime"

    @property
    def predicted_bytes(self) -> int | None:
        """Bytes a run takes beside the loaded model: arena, workspace, values that only the run can size.

        On a CUDA device copies of its inputs are among them. None if the workspace was never measured.
        """
        if self.workspace_bytes is None:
            return None
        copied = 0 if parse_device(self.device).is_host else self.input_bytes
        return self.arena_bytes + self.workspace_bytes + self.run_time_bytes + copied

    @cached_property
    def run_time_bytes(self) -> int:
        """Most bytes at one step of values whose size only a run can tell, as the calibrating run showed them.

        onnxruntime allocates them beside the arena. Other inputs may make them larger, up to `limit` where that is set.
        """
        return run_time_bytes(self.graph, self.run_time)

    @property
    def total_bytes(self) -> int:
        """All that the plan's memory comes to, and what a budget holds: arena, workspace, parameters, inputs and state.

        Values that only a run can size count as the calibrating run showed them (`run_time_bytes`). A workspace that
        was never measured counts as none. Of weights that stay in the plan's file those count that are in memory at
        once (`resident_parameter_bytes`).
        """
        return sum(size or 0 for size in self.parts.values())

    @property
    def parts(self) -> Mapping[str, int | None]:
        """What `total_bytes` is the sum of, by what takes it; a workspace that was never measured is None."""
        parts = {
            "weights and training state" if self.mode == "training" else "weights": self.resident_parameter_bytes,
            "arena": self.arena_bytes,
            "workspace": self.workspace_bytes,
            "sized at run time": self.run_time_bytes,
            "inputs": self.input_bytes,
            "state": self.state_bytes,
        }
        return {name: size for name, size in parts.items() if size != 0}

    @property
    def session_bytes(self) -> int | None:
        """About what a session takes of the process's memory beside `total_bytes`: onnxruntime's own and Python's.

        It grows with the number of nodes, and is known to some MiB only: a budget doesn't hold it. None on a device
        that isn't the host.
        """
        facts = parse_device(self.device)
        if not facts.is_host:
            return None
        return session_memory.session_bytes(self.model, self.mode == "training", self.ranges)

    @property
    def process_bytes(self) -> int | None:
        """About what a process takes in memory of its own that loads the saved plan and runs it, modules included.

        Arena, workspace, inputs, state, the results that a run returns, which are copies, weights that no file is
        mapped for, and what sessions take for their nodes.
        Weights that are mapped from the plan's file are `mapped_bytes`: pages that processes share, and that the system
        takes back when memory is short. None on a device that isn't the host.
        """
        if self.session_bytes is None:
            return None
        tensors = self.total_bytes - self.resident_parameter_bytes + self._weights_in_process.own
        if self.training is not None:
            tensors += sum(self._persistent_sizes.values()) - sum(self.state_in_file.values())
        else:
            results = {value for value in self.model.graph.outputs if value.name not in self.state.values()}
            tensors += sum(nbytes(value) or 0 for value in results)
        return tensors + session_memory.beside_tensors(self.model, self.mode == "training", self.ranges)

    @property
    def mapped_bytes(self) -> int | None:
        """Bytes of weights that a process maps from the saved plan's file; see `process_bytes`."""
        return None if self.session_bytes is None else self._weights_in_process.mapped

    @cached_property
    def _weights_in_process(self) -> session_memory.Weights:
        persistent = self.training.persistent if self.training is not None else ()
        packs = self.stamp is not None and self.weight_digests is None
        return session_memory.weights_in_process(self.model, persistent, packs=packs, digests=self.weight_digests)

    @property
    def _persistent_sizes(self) -> Mapping[str, int]:
        """Bytes of what persists of a training model, by name."""
        persistent = set(self.training.persistent) if self.training is not None else set()
        sizes = parameter_sizes(self.model, self.training, parse_device(self.device))
        return {name: size for name, size in sizes.items() if name in persistent}

    @property
    def unplanned_bytes(self) -> int:
        """The total with memory of its own for every value: `total_bytes` with all values in place of the arena."""
        left_out = self.parameter_bytes - self.resident_parameter_bytes
        return self.total_bytes + left_out - self.arena_bytes + self.activation_bytes

    @property
    def name(self) -> str:
        """What the model is called: its file's name without its suffix, else its graph's name."""
        return str(self.model.graph.name or "model") if self.source is None else self.source.title

    @property
    def proto(self) -> onnx.ModelProto:
        """The planned model as an ``onnx.ModelProto``, as `save` writes it: ``onnx.save(plan.proto, path)``.

        Raises:
            PlanFileError: its weights are more than one message holds: `save` has no such limit.
        """
        self.verify()
        return as_proto(plan_file.with_record(self.open_model, self.record()), self.name)

    def __copy__(self) -> "Plan":
        """The plan itself, of which nothing is edited."""
        return self

    def __deepcopy__(self, _: object) -> "Plan":
        """The plan itself, of which nothing is edited."""
        return self

    def __reduce__(self) -> "tuple[Callable[[bytes], Plan], tuple[bytes]]":
        """Pickled it is the bytes of its `proto`, and afterwards what `load` makes of these.

        Raises:
            PlanFileError: its weights are more than one message holds: another process may `load` what `save` wrote.
        """
        return _unpickled, (self.proto.SerializeToString(),)

    def __repr__(self) -> str:
        """As ``<Plan densenet121: inference on cpu, batch 1, 37.9 MiB>``."""
        return shown(f"<Plan {self._title()}, {format_size(self.total_bytes)}>")

    def _title(self) -> str:
        where = f" on {self.device}" if self.device != "none" else ", portable"
        batch = "" if self.batch is None else f", batch {self.batch}"
        sizes = f", {described(self.ranges)}" if self.ranges else ""
        return f"{self.name}: {self.mode}{where}{batch}{sizes}"

    def _repr_html_(self) -> str:
        """A small table for notebooks."""
        rows = [
            ("total", format_size(self.total_bytes)),
            *((name, "not measured" if size is None else format_size(size)) for name, size in self.parts.items()),
            ("steps", str(len(self.graph.nodes))),
            *([("in chunks", f"{sum(band.nodes for band in self.chunks)} nodes")] if self.chunks else []),
            *([("stock onnxruntime, expected", format_size(self.stock_bytes))] if self.stock_bytes else []),
        ]
        if self.recomputed:
            rows.append(("recomputed", f"{len(self.recomputed)} steps, {self.overhead:+.1%} cost"))
        return html_table(self._title(), rows, self.notes)

    def _shapes(self) -> Mapping[str, Shape]:
        return {str(value.name): static_shape(value) for node in self.model.graph for value in node.outputs}

    @property
    def annotated(self) -> Model:
        """The user's own model with ``force_mirroring`` on every node: "True" where it is recomputed, else "False".

        All parts of a node that differentiation writes out as several are marked alike: see `memonger.ir.marks`.
        Its ``proto`` goes into ``onnx.save``.

        Raises:
            PlanError: the plan came from a file, which doesn't contain that model.
        """
        if self.source is None:
            raise PlanError(
                "the plan was read from a file, which doesn't contain the model it was made from: plan again."
            )
        from memonger.schedule.marks import annotate  # with the whole search, which who runs a plan has no use for

        marked = annotate(self.source.ir, self.graph, self.recomputed, self.origins)
        return dataclasses.replace(self.source, ir=marked)

    def verify(self, *, check_weights: bool = True) -> None:
        """Run the independent checker, and compare the weights of a plan from a file with their digests.

        Args:
            check_weights: False leaves the weights out: reading them all takes about a second for each gigabyte.

        Raises:
            VerificationError: the plan is wrong.
            PlanFileError: a weight isn't what it was when the plan was saved.
        """
        super().verify()
        if check_weights and self.weight_digests is not None:
            found = plan_file.weight_digests(self.model)
            name = str(self.model.graph.name)
            changed = [key for key, digest in found.items() if self.weight_digests.get(key) != digest]
            if changed or len(self.weight_digests) != len(found):
                what = f"its weight '{changed[0]}' was" if changed else "its weights were"
                raise PlanFileError(
                    f"{name}: {what} changed since the plan was saved (the digests differ). Plan it again."
                )
            plan_file.check_packed(self.model, str(self.model.graph.name))

    def save(self, path: str | Path, *, weights: str = "own") -> None:
        """Write the planned model; whole or not at all, checked first. A file that is there is replaced.

        Weights of 1 MiB and more together lie in a file beside it, ``<name>.<digest>.data``, which a session maps: its
        pages are shared by all processes that run it. In a plan for this machine's processor that file also holds
        weights of products as onnxruntime's kernels pack them, so that no session has such copies of its own.

        Args:
            path: The file.
            weights: ``own``; or ``source``: weights that are as in the model that was planned, which has them in files
                of the same folder, are read from there, and take no room a second time. They aren't packed. A file that
                was changed or moved since is an error when the plan is loaded.

        Raises:
            PlanFileError: the file can't be written, or holds weights of the model that was planned; memory ran out;
                there is nothing of the source to refer to.
        """
        from memonger.ir.emitter import collecting_later  # with what writes nodes, which no run of a plan needs
        from memonger.runtime.packing import packed_weights, packs_here

        check_choice(option("weights"), weights, ("own", "source"), PlanFileError)
        of_session = len(self.state_in_file) + len(self.values_in_file)
        if weights == "source" and self.window is not None and len(self.window.weights) > of_session:
            raise PlanFileError(
                "weights of this plan stay in its file, in the order in which steps read them, packed as kernels "
                f"read them, which the source's aren't: leave {option('weights', 'source')} out."
            )
        if weights == "source" and self.source is None:
            raise PlanFileError("the plan was read from a file, which doesn't say where its source is: plan again.")
        with collecting_later():
            self.verify()
            record, path = self.record(), Path(path)
            if self.source is not None:
                check_not_its_weights(self.source.ir, path)
                if self.source.path is not None:
                    record = dataclasses.replace(record, source_file=plan_file.SourceFile.of(self.source.path))
            packs = packs_here(self.stamp)
            source = (self.source.ir, self.source.name) if self.source is not None and weights == "source" else None
            plan_file.save(self.open_model, record, path, packed_weights if packs else None, source)

    @property
    def open_model(self) -> ir.Model:
        """The model as its file has it: in a plan for ranges of sizes those dimensions are symbolic."""
        return open_dims.opened(self.model, self.ranges) if self.ranges else self.model

    def record(self) -> Record:
        """What the plan's file says of it, but for the digests of weights."""
        offsets = {self.graph.values[value]: offset for value, offset in self.offsets.items()}
        return Record(
            **self.header(),
            alignment=self.alignment,
            arena_bytes=self.arena_bytes,
            graph_digest=plan_file.graph_digest(self.open_model),
            offsets=offsets,
        )

    def report(
        self,
        path: str | Path,
        *,
        format: str = "html",
        title: str | None = None,
        frontier: "Sequence[Plan] | Sequence[Mapping[str, Any]]" = (),
        measured: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a page that shows the plan, or a file for another viewer; whole or not at all.

        Args:
            path: The file to write.
            format: ``html``, a page; or for other viewers ``memory_viz`` (PyTorch's), ``perfetto``, ``speedscope``,
                ``netron``.
            title: What to call the plan; None: the model's name.
            frontier: Other plans of the model, for the page, as `memonger.pareto` gives them; or their records.
            measured: What a run was measured to take, for the page: the record of ``memonger run --compare --json``.

        Raises:
            PlanError: there is no such format, or ``frontier`` or ``measured`` is given for one that doesn't show them.
            PlanFileError: a model for Netron can't be written.
            OSError: another file can't be written.
        """
        from memonger.report.write import report

        report(self, path, format=format, title=title, frontier=frontier, measured=measured)

    def plot(self, path: str | Path, *, title: str | None = None) -> None:
        """Write a picture of the plan, by matplotlib: the map of the arena over the curve of live bytes.

        Args:
            path: The file to write; its ending says what it is: ``.svg``, ``.png``, ``.pdf``.
            title: What to call the plan; None: the model's name.

        Raises:
            RuntimeUnavailableError: matplotlib isn't installed.
            PlanError: it doesn't write files with such an ending.
            OSError: the file can't be written.
        """
        from memonger.report.write import plot

        plot(self, path, title=title)

    @staticmethod
    def load(path: str | Path, *, check_weights: bool = True) -> "Plan":
        """Read a planned model and check it.

        Args:
            path: The file.
            check_weights: See `verify`.

        Raises:
            PlanFileError: not a planned model, malformed, of a newer format, or its graph or weights were changed.
            VerificationError: its layout is wrong.
        """
        model, record = plan_file.load(Path(path))
        if record.ranges:
            # Give the model of a file the shapes of its largest sizes
            try:
                open_dims.at_largest(model, record.ranges)
            except (PlanError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                raise PlanFileError(f"{path}: its plan is malformed: {error}.") from error
        roles = training_roles.read(model, str(model.graph.name))
        check_state(model, state_of(model, str(model.graph.name)), record.ranges, str(path))
        try:
            device = parse_device(record.device)
        except PlanError as error:
            raise PlanFileError(f"{path}: its plan is malformed: {error}") from error
        try:
            graph = graph_of(model, roles, None, record.workspace, record.host, device, record.ranges)
        except SizesError as error:
            raise PlanFileError(f"{path}: its shapes contradict each other: {error}.") from error
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # No inference has seen this model: its attributes can be of any type and out of range.
            raise PlanFileError(f"{path}: its graph is malformed: {error}.") from error
        reads = weight_reads(model, graph)
        wrong = "" if record.window is None else what_is_wrong(reads, record.window)
        waiting = next((read.name for read in reads if read.made and record.window is None), None)
        wrong = wrong if waiting is None else f"'{waiting}' waits in a file, and it has no window"
        if wrong:
            raise PlanFileError(f"{path}: its plan is malformed: {wrong}.")
        number = {name: value for value, name in enumerate(graph.values)}
        unknown = [name for name in record.offsets if name not in number]
        if unknown:
            raise PlanFileError(f"{path}: the plan gives '{unknown[0]}' an offset, but the model has no such value.")
        plan = Plan(
            **record.header(),
            model=model,
            graph=graph,
            offsets={number[name]: offset for name, offset in record.offsets.items()},
            arena_bytes=record.arena_bytes,
            alignment=record.alignment,
            weight_digests=record.weight_digests,
        )
        plan.verify(check_weights=check_weights)
        return plan


def _unpickled(content: bytes) -> Plan:
    with temporary_folder() as folder:
        path = folder / "plan.onnx"
        path.write_bytes(content)
        return Plan.load(path)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class GraphPlan(BasePlan):
    """A plan for a graph without a model: a schedule and a layout.

    Attributes:
        schedule: The graph's own names of the nodes, one a step; one that occurs again is a recomputation.
        budget: Bytes the plan was to fit, if any.
        strategy: The strategy that decided what is recomputed.
        outcome: What the strategy returned.
    """

    schedule: tuple[object, ...]
    budget: int | None = None
    strategy: str | None = None
    outcome: "Outcome | None" = None

    def __repr__(self) -> str:
        """As ``<GraphPlan: 12 steps, 3 recomputed, arena 1.20 MiB>``."""
        again = f", {len(self.recomputed)} recomputed" if self.recomputed else ""
        return f"<GraphPlan: {len(self.schedule)} steps{again}, arena {format_size(self.arena_bytes)}>"

    @property
    def source_nodes(self) -> tuple[object, ...]:
        """For each step the node it runs, by the graph's own name."""
        return self.schedule

    def to_json(self) -> str:
        """The plan as one JSON object: ``schedule`` (names), ``steps`` (name, offset, bytes of each), figures.

        Names that JSON has no form for are written as `str` gives them; the offset of what has no bytes is null.
        """
        steps = [
            {"node": name, "offset": self.offsets.get(writes[0]), "bytes": self.graph.sizes[writes[0]]}
            for name, writes in zip(self.schedule, self.graph.writes, strict=True)
        ]
        record = {
            "schedule": list(self.schedule),
            "steps": steps,
            "strategy": self.strategy,
            "budget_bytes": self.budget,
            "arena_bytes": self.arena_bytes,
            "alignment": self.alignment,
            "peak_before_bytes": self.peak_before_bytes,
            "peak_bytes": self.peak_bytes,
            "lower_bound_bytes": self.lower_bound_bytes,
            "overhead": self.overhead,
            "recomputed_nodes": len(self.recomputed),
        }
        return json.dumps(record, default=str)


def estimated_costs(
    model: ir.Model,
    training: Training | None,
    device: Device,
    host: Collection[str] = (),
    ranges: Mapping[str, DimRange] = MappingProxyType({}),
) -> tuple[float, ...]:
    """The estimated cost of each node of a lowered model, see `memonger.graph.costs`."""
    return graph_of(model, training, None, None, host, device, ranges).costs


LIMIT_MARGIN = (1 << 16) + 512
"""Bytes of a plan's limit that nothing was measured for: what sessions take as they are made, and rounding."""


def is_sized_at_run_time(model: ir.Model) -> bool:
    """Whether the inputs decide how much memory a run takes: by the sizes of values, or by bodies (Loop, If)."""
    return bool(open_dims.unknown(model)) or any(subgraphs(node) for node in model.graph)


def limit_of(plans: Sequence[Plan]) -> int | None:
    """What onnxruntime may take by itself so that the budget of each plan holds; None where one has no limit."""
    if any(plan.limit is None for plan in plans):
        return None
    arena = max(plan.arena_bytes for plan in plans)
    return max(0, min(plan.arena_bytes + (plan.limit or 0) - arena for plan in plans))


def parameter_bytes(model: ir.Model, training: Training | None, device: Device) -> int:
    """Bytes of the weights, wherever they stand; of a training model all that persists, optimizer state included.

    A weight that products read both as it is and transposed counts twice where kernels read packed copies of it: on
    the CPU. In training these are the frozen ones.
    """
    return sum(parameter_sizes(model, training, device).values()) + inner_bytes(model)


def parameter_sizes(model: ir.Model, training: Training | None, device: Device) -> dict[str, int]:
    """The same of the initializers, of each by its name."""
    persistent = set(training.persistent) if training else set()
    tensors = ((name, value.const_value) for name, value in model.graph.initializers.items())
    constants = {name: tensor.nbytes for name, tensor in tensors if tensor is not None}
    if device.is_host:
        constants |= {name: constants[name] + size for name, size in second_copies(model).items()}
    stateful = (value for value in required_inputs(model.graph) if value.name in persistent)
    return constants | {str(value.name): nbytes(value) or 0 for value in stateful}


def input_bytes(model: ir.Model, training: Training | None) -> int:
    """Bytes of the inputs that a caller gives: they don't persist and have no default."""
    return sum(input_sizes(model, training).values())


def input_sizes(model: ir.Model, training: Training | None) -> dict[str, int]:
    """The same, of each by its name."""
    persistent = set(training.persistent if training else state_of(model, str(model.graph.name)))
    given = (value for value in required_inputs(model.graph) if value.name not in persistent)
    return {str(value.name): nbytes(value) or 0 for value in given}


def state_bytes(model: ir.Model, graph: Graph) -> int:
    """Bytes of what an inference session keeps between runs: see `state_sizes`."""
    return sum(state_sizes(model, graph).values())


def state_sizes(model: ir.Model, graph: Graph) -> dict[str, int]:
    """What an inference session keeps between runs, with its bytes: once where it is written in place, else twice.

    A cache that grows counts with its largest length.
    """
    in_place = _written_in_place(graph)
    state = state_of(model, str(model.graph.name))
    kept = (value for value in model.graph.inputs if value.name in state)
    return {str(value.name): (nbytes(value) or 0) * (1 if value.name in in_place else 2) for value in kept}


def _written_in_place(graph: Graph) -> set[str]:
    """Names of persistent inputs that a run writes over, or behind."""
    return {graph.values[old] for pairs in (*graph.updates, *graph.appends) for old, _ in pairs}


def graph_of(
    model: ir.Model,
    training: Training | None,
    seconds: Mapping[str, float] | None,
    workspace: Mapping[str, int] | None,
    host: Collection[str] = (),
    device: Device = CPU,
    ranges: Mapping[str, DimRange] = MappingProxyType({}),
) -> Graph:
    """The graph of a lowered model, with the roles a training model gives its inputs and outputs.

    With ``ranges`` it is that of every size in them, see `memonger.graph.ranged`.
    """
    results = {*training.outputs, *([training.loss] if training.loss else [])} if training else None
    waiting = in_file(model) if training is not None and training.loss is not None else ()
    state = state_of(model, str(model.graph.name))
    make = partial(
        from_model,
        model,
        seconds=seconds,
        workspace=workspace,
        updates=training.updates if training else state,
        apart={*state.values(), *waiting},
        after=training.verdicts if training else (),
        results=results,
        provider=device.provider,
    )
    if not ranges:
        return make(host=host)
    return over_ranges(model, ranges, lambda left_out: make(host={*host, *left_out}))
