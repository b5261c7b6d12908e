"""What is to run in slices, and the slices that it may run in: written, laid out, and checked."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import onnx_ir as ir

from memonger.allocation import EFFORT
from memonger.devices import Device
from memonger.graph.graph import Graph
from memonger.graph.liveness import Storage, assign_storage, live_bytes
from memonger.graph.schedule import schedule_graph, schedule_model
from memonger.graph.session_memory import session_bytes, shares_sessions
from memonger.ir.marks import AGAIN, STRIP, chunk_of, own_node
from memonger.ir.operators import operator_name
from memonger.ir.training_roles import Training
from memonger.ir.values import static_shape
from memonger.lowering.lowered import Calibration, Lowered
from memonger.model import kept_state
from memonger.plan import graph_of, parameter_bytes, state_bytes
from memonger.plan_file import ROWS, ChunkedBand
from memonger.schedule import Request
from memonger.schedule.decide import decide
from memonger.schedule.solution import Solution
from memonger.shapes.ranges import DimRange
from memonger.shapes.sizes import SizesError
from memonger.tiling.axes import Axes, shapes_at_points
from memonger.tiling.chunk_times import NodeWork, launch_seconds, run_seconds, seconds_of, work_of
from memonger.tiling.cutting import Refusal, Slicing
from memonger.tiling.slice_check import EXACT, CheckedCopy, SeenAlone, SliceCheck, beginning, copies_by_node
from memonger.tiling.slices import Band, axes_of_nodes
from memonger.tiling.writer import in_slices

MOST_NODES = 30_000
"""Nodes that slices may add: more take minutes to plan and load."""

UNSURE = 1.05
"""Estimates of what slices take at least are up to so many times what they take."""

WORTH = 0.95
"""Slices that save less than a twentieth aren't worth a plan that is harder to read."""


FEW = 4
"""Lengths, the smallest, at which nodes are compared where the axis has a range; and the largest, and some between:
for few rows kernels take other paths."""


@dataclass(frozen=True, slots=True)
class ToSlice:
    """What is to run in slices: the model in the order of its plan, what is asked of it, its layout, and the device.

    ``cores`` is how many it runs on, ``works`` what its nodes do, by name, ``training`` the roles of a training step's
    inputs and outputs, ``ranges`` its dimensions with a range of sizes, ``outer`` the slices that it runs in already.
    """

    lowered: Lowered
    request: Request
    plain: Solution
    device: Device
    cores: int
    works: Mapping[str, NodeWork]
    training: Training | None = None
    ranges: Mapping[str, DimRange] = field(default_factory=dict)
    outer: "InSlices | None" = None

    @property
    def product_seconds(self) -> dict[str, float]:
        """About what the products of each node take, by name."""
        return {name: work.product_seconds(self.cores) for name, work in self.works.items()}

    @property
    def runs_in_one(self) -> bool:
        """Whether slices have no sessions to share, as with ranges of sizes or a state."""
        return bool(self.ranges) or kept_state.KEY in self.lowered.model.metadata_props

    def again(self, outer: "InSlices") -> "ToSlice":
        """The model in slices, which are to run in slices themselves."""
        works = {str(node.name): self.works.get(str(node.name)) or work_of(node) for node in outer.lowered.model.graph}
        return dataclasses.replace(
            self, lowered=outer.lowered, request=outer.request, plain=outer.solution, works=works, outer=outer
        )


@dataclass(eq=False)
class Candidate:
    """Slices that a model may run in. They are written and laid out when somebody looks at them.

    Attributes:
        needed: About the bytes of arena and workspace that it takes at least: up to `UNSURE` times as many.
        sessions: About the bytes that sessions take.
        seconds: About how much longer it takes.
        write: Gives the model in these slices, laid out.
    """

    needed: int
    sessions: int
    seconds: float
    write: Callable[[], "InSlices"]

    @property
    def least(self) -> int:
        """About the bytes that it takes at least, sessions included."""
        return self.needed + self.sessions

    @cached_property
    def written(self) -> "InSlices":
        """The model in these slices, laid out."""
        return self.write()


class CutModel:
    """A model in an order, how its nodes are cut in that, and what it needs as it is.

    Args:
        job: What is to run in slices, in the order of its plan.
        axis: The number of the axis: of inputs; `ROWS`; -1: each band has axes of its own.
        order: Steps of the job in the order in which bands count them.
        axes: How its nodes are cut, in the job's order; of size 0 by rows.

    Attributes:
        lowered: The model in that order.
        nodes: Its nodes.
        how: How each of them is cut.
        graph: Of the model.
        storage: Of the graph's values.
        live: Bytes alive at each step.
        working_set: Those of them that are read again.
        workspace: Bytes of workspace of each step.
    """

    def __init__(self, job: ToSlice, axis: int, order: Sequence[int], axes: Axes) -> None:
        self.job, self.axis, self.lowered, self.graph = job, axis, job.lowered, job.plain.graph
        if list(order) != list(range(len(order))):
            self.graph = schedule_graph(self.graph, order)
            self.lowered = dataclasses.replace(job.lowered, model=job.lowered.model.clone())
            schedule_model(self.lowered.model, order, self.graph)
        self.nodes = list(self.lowered.model.graph)
        self.axes = dataclasses.replace(axes, nodes=tuple(axes.nodes[step] for step in order))
        self.how: Sequence[Slicing | Refusal | None] = self.axes.nodes
        self.storage = assign_storage(self.graph)
        self.live = live_bytes(self.storage.buffers, len(self.nodes))
        self.working_set = working_set_bytes(self.graph, self.storage)
        self.workspace = np.array(self.graph.workspace, float)
        self.made = dict[tuple[Band, ...], Candidate]()

    def in_slices(
        self, bands: Sequence[Band], extra: float | None = None, packed: int = 0, effort: int = EFFORT
    ) -> "InSlices":
        """The model with these bands in slices, laid out in its written order.

        Args:
            bands: What is to run in slices.
            extra: About how much longer it takes; None: what that is by its copies.
            packed: Bytes of weights that sessions pack again.
            effort: Of the layout.
        """
        job, before = self.job, self.lowered
        written = in_slices(before.model, bands, self.how, bool(job.ranges))
        trains = job.training is not None
        shares = {str(copy.node.name): copy.share for copies in written.copies for copy in copies}
        nodes = [node for node in written.model.graph if str(node.name) in shares or AGAIN in node.metadata_props]
        parts = {str(node.name): [(own_node(node), shares.get(str(node.name), 1.0))] for node in nodes}
        made = shared(before, written.model, parts)
        ranges = job.ranges if kept_state.KEY in made.model.metadata_props else None  # a state may grow in place
        request = dataclasses.replace(job.request, budget=None)
        asked = asked_of(made, before.model, request, job.training, job.device, ranges)
        solution = decide(asked, "none", "file", effort)
        if extra is None:
            working_set = working_set_bytes(solution.graph, assign_storage(solution.graph))
            extra = seconds_of(made.model, working_set, job.cores, trains, job.works) - self.seconds
        outer_constants, outer_extra = (0, 0.0) if job.outer is None else (job.outer.constants, job.outer.extra)
        return InSlices(
            cut=self, bands=bands, copies=written.copies, lowered=made, request=asked, solution=solution,
            constants=asked.base - job.request.base + outer_constants, extra=extra + outer_extra,
            sessions=session_bytes(made.model, trains) + packed,
        )  # fmt: skip

    def axes_in(self, begin: int, end: int) -> dict[ir.Value, int]:
        """The axis of what these steps read and write in slices."""
        own = zip(self.nodes[begin:end], self.how[begin:end], strict=True)
        return axes_of_nodes({node: how for node, how in own if isinstance(how, Slicing)})

    @cached_property
    def seconds(self) -> float:
        """About how long all nodes take as they are."""
        job = self.job
        return seconds_of(self.lowered.model, self.working_set, job.cores, job.training is not None, job.works)


@dataclass(frozen=True, slots=True, kw_only=True)
class InSlices:
    """A model in slices.

    Attributes:
        cut: The model as it was, and how its nodes are cut.
        bands: What of it runs in slices.
        copies: Of each band the copies of nodes.
        lowered: The model with a copy of each node for every slice, in the order that they run.
        request: What is asked of it: its graph.
        solution: Its layout.
        constants: Bytes of slices of constants, and of the numbers that cut.
        extra: Seconds beyond those of the model as it was, by the constants of `memonger.tiling.chunk_times`.
        sessions: About the bytes that sessions take of the process: each copy of a node is one more.
        notes: What the user should know.
    """

    cut: CutModel
    bands: Sequence[Band]
    copies: tuple[tuple[CheckedCopy, ...], ...]
    lowered: Lowered
    request: Request
    solution: Solution
    constants: int
    extra: float
    sessions: int
    notes: tuple[str, ...] = ()

    def described(self) -> tuple[ChunkedBand, ...]:
        """What runs in slices, for the plan."""
        cut, job, graph = self.cut, self.cut.job, self.cut.graph
        before, after = (
            live_bytes(assign_storage(each).buffers, len(each.nodes)) for each in (graph, self.solution.graph)
        )
        outer, most = () if job.outer is None else job.outer.described(), int(after.max(initial=0))
        records = [dataclasses.replace(band, bytes_after=min(band.bytes_after, most)) for band in outer]
        nodes, by_rows, trains = list(self.lowered.model.graph), cut.axis == ROWS, job.training is not None
        step_of = {node: step for step, node in enumerate(nodes)}
        each_run = run_seconds(not by_rows and not trains and shares_sessions(self.lowered.model), job.cores)
        for band, copies in zip(self.bands, self.copies, strict=True):
            if not copies:
                continue
            steps, own = sorted(step_of[copy.node] for copy in copies), {copy.original for copy in copies}
            names = [name for name in graph.nodes[band.begin : band.end] if name in own]
            runs = sum(1 for _ in itertools.groupby(chunk_of(nodes[step]) for step in steps))
            if by_rows:  # what cuts and joins for later slices stands between the copies
                steps = [n for n in range(steps[0], steps[-1] + 1) if STRIP in nodes[n].metadata_props]
            axis, value = cut.axis, ""
            if axis < 0:  # it is named by a parameter that it cuts, or its largest value
                size_of = dict(zip(graph.values, graph.sizes, strict=True))
                updated = {graph.values[old] for pairs in graph.updates for old, _ in pairs}
                axis_of = {str(v.name): number for v, number in cut.axes_in(band.begin, band.end).items()}
                value = max(axis_of, key=lambda name: (name in updated, size_of.get(name, 0)))
                axis = axis_of[value]
            records.append(
                ChunkedBand(
                    axis=axis, value=value, first=names[0], last=names[-1], nodes=len(names), slices=band.counts,
                    runs=len(copies), bytes_before=int(before[band.begin : band.end].max()),
                    bytes_after=int(after[steps].max()),
                    seconds=(len(steps) - len(names)) * launch_seconds(job.cores) + runs * each_run,
                )
            )  # fmt: skip
        return tuple(records)

    def seen(self, check: SliceCheck, lengths: Sequence[int] = ()) -> SeenAlone:
        """What was seen of its nodes whole and on slices; at some lengths of the axis, where it may have several."""
        cut, outer = self.cut, self.cut.job.outer
        seen = SeenAlone() if outer is None else outer.seen(check)
        copies, model = copies_by_node(self.copies), cut.lowered.model
        for node, how in zip(cut.nodes, cut.how, strict=True):
            own = copies.get(str(node.name), ())
            if not own or not isinstance(how, Slicing) or operator_name(node) in EXACT:
                continue
            result = check.see((model, node), self.lowered.model, own, how.sums)
            difference = result.difference
            if lengths and not difference:
                slices = [(chunk.begin, chunk.end) for copy in own if (chunk := chunk_of(copy.node)) is not None]
                rests = sorted({length - begin for length in lengths for begin, end in slices if begin < length < end})
                least = min(end - begin for begin, end in slices)
                wholes = [length for length in lengths[:-1] if length > least]
                ends = (one for found in (rests, wholes) for one in (found[len(found) // 2 :][:1], found[-1:]))
                tried = sorted({*rests[:FEW], *wholes[:1], *itertools.chain.from_iterable(ends)})
                shorter = [beginning(node, how, length, cut.axes.size) for length in tried]
                difference = check.see((model, node), model, shorter).difference if shorter else 0.0
            if difference:
                seen.different[str(node.name)] = difference
            if result.workspace:
                seen.workspace.update({str(copy.node.name): result.workspace[copy.length] for copy in own})
        return seen

    def uneven(self, ranges: Mapping[str, DimRange]) -> set[str]:
        """Nodes whose copies, by rules, don't give their slice of the whole at some size; all where nothing is told."""
        copies = list(itertools.chain.from_iterable(self.copies))
        whole, found = shapes_at_points(self.cut.lowered.model, ranges), set[str]()
        try:
            made = shapes_at_points(self.lowered.model, ranges)
        except SizesError:
            return {copy.original for copy in copies}
        of_name = {str(node.name): node for node in self.cut.nodes}
        for copy in copies:
            for index, part in copy.outputs.items():
                value = of_name[copy.original].outputs[index].name
                written = copy.node.outputs[index]
                for own, of_all in zip(made, whole, strict=True):
                    shape, given, axis = of_all[str(value)], own[str(written.name)], part.axis
                    length = 0 if shape is None else shape[axis]
                    wanted = min(length, part.end) - min(length, part.begin)
                    if self.cut.axis == ROWS:  # of which a copy may write more than it gives
                        wanted = (static_shape(written) or ())[axis]
                    if shape is None or given != (*shape[:axis], wanted, *shape[axis + 1 :]):
                        found.add(copy.original)
        return found

    def slices_of(self, names: Iterable[str]) -> dict[str, int]:
        """In how many slices of rows those of these nodes run that do."""
        if self.cut.axis != ROWS:
            return {}
        bands = zip(self.bands, self.copies, strict=True)
        count_of = {copy.original: band.counts[0] for band, copies in bands for copy in copies}
        return {name: count_of[name] for name in names if name in count_of}

    @property
    def recomputed(self) -> float:
        """Estimated seconds of what runs again."""
        return math.fsum(cost for again, cost in zip(self.cut.graph.again, self.cut.graph.costs, strict=True) if again)

    @property
    def total(self) -> int:
        """Bytes of arena and workspace, and of what is added to the constants."""
        return self.solution.total_bytes + self.constants

    @property
    def with_sessions(self) -> int:
        """The same with sessions."""
        return self.total + self.sessions


Candidates = Sequence[Candidate]
"""Along one axis of a model, the finest first."""


def working_set_bytes(graph: Graph, storage: Storage) -> list[float]:
    """Bytes alive at each step that nodes may read again: an output that nobody reads takes no room in the cache."""
    moves = zip(graph.reads, graph.subviews, graph.views, strict=True)
    read = {storage.of_value[value] for reads, windows, views in moves if not (windows or views) for value in reads}
    unread = {storage.of_value[value] for value in graph.outputs} - read
    buffers = [buffer for number, buffer in enumerate(storage.buffers) if number not in unread]
    return [float(size) for size in live_bytes(buffers, len(graph.nodes))]


def shared(lowered: Lowered, made: ir.Model, parts: Mapping[str, Sequence[tuple[str, float]]]) -> Lowered:
    """A model that was made of another, with each node's share of what was measured of that.

    Args:
        lowered: The other.
        made: The model.
        parts: Of its nodes, by name, those whose work they do, and which part of it: of a copy one, in part; of a
            joined product several. All other nodes are the same.
    """
    measured = lowered.calibration
    if measured is None:
        return dataclasses.replace(lowered, model=made)
    seconds, workspace = dict[str, float](), dict[str, int]()
    for node in made.graph:
        name = str(node.name)
        own = parts.get(name, [(name, 1.0)])
        seconds[name] = math.fsum((measured.seconds or {}).get(each, 0.0) * part for each, part in own)
        if needed := sum(math.ceil(measured.workspace.get(each, 0) * part) for each, part in own):
            workspace[name] = needed
    calibration = dataclasses.replace(measured, seconds=seconds, workspace=workspace)
    return dataclasses.replace(lowered, model=made, calibration=calibration)


def asked_of(
    made: Lowered, before: ir.Model, request: Request, roles: Training | None, device: Device,
    ranges: Mapping[str, DimRange] | None = None,
) -> Request:  # fmt: skip
    """The same as was asked of the model before, without its marks: what they name may be there no more.

    Args:
        made: The model, with what was measured of its nodes.
        before: The model that the request is of.
        request: What is asked of that.
        roles: A training step's.
        device: The plan's.
        ranges: Sizes that it is asked for; none: the largest alone, which the model has.
    """
    measured = made.calibration or Calibration(None, {})
    graph = graph_of(made.model, roles, measured.seconds, measured.workspace, measured.host, device, ranges or {})
    base = request.base + parameter_bytes(made.model, roles, device) - parameter_bytes(before, roles, device)
    base += state_bytes(made.model, graph) - state_bytes(before, request.graph)  # in place it takes one buffer, not two
    return dataclasses.replace(request, graph=graph, base=base, stages={}, forced={}, parts=frozenset(), estimates=None)
