"""Chunks: which stretches of a model run on one slice of an axis after the other, and in how many slices.

Where nodes are independent along an axis of their values (the batch; the rows of a transformer; of a training step
whatever `chunk_regions` finds around the steps with most bytes), running all of them
on one slice and then on the next takes a fraction of the memory, and computes nothing twice. Values between two stages
of a band exist in slices only: a few fine chunks where values are large, then one coarse chunk of what follows, depth
first.

AutoChunk (Zhao et al. 2024) searches such regions in PyTorch's graphs, MCUNetV2 (Lin et al. 2021) runs the first layers
of a CNN by patches of the image. Here the axis needs no overlap, and the layout of the whole decides.
"""

import dataclasses
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir

from memonger.devices import Device
from memonger.errors import PlanError
from memonger.graph.graph import Graph
from memonger.graph.liveness import assign_storage, live_bytes
from memonger.graph.schedule import schedule_graph, schedule_model
from memonger.graph.session_memory import PACKED, bytes_of, packed_bytes, session_bytes
from memonger.ir import training_roles
from memonger.ir.extract import is_fed
from memonger.ir.marks import CHUNK, WINDOW
from memonger.ir.values import static_shape, subgraphs
from memonger.lowering.lowered import Lowered
from memonger.options import Options
from memonger.plan_file import ROWS
from memonger.runtime import onnxruntime
from memonger.schedule import Request
from memonger.schedule.decide import decide
from memonger.schedule.solution import Solution
from memonger.shapes.ranges import DimRange
from memonger.shapes.shaping import Shape
from memonger.tiling.axes import Axes, axes_of, shapes_at_points, uneven_nodes, varying_images, with_repeated
from memonger.tiling.candidates import (
    MOST_NODES,
    UNSURE,
    WORTH,
    Candidate,
    Candidates,
    InSlices,
    ToSlice,
    asked_of,
    laid_out,
    working_set_bytes,
)
from memonger.tiling.chunk_regions import StepSpan, measured, ranges_in_order, regions_of, stages_for
from memonger.tiling.chunk_times import NodeWork, cores_of, run_seconds, seconds_of, work_of
from memonger.tiling.cutting import Refusal, Slicing
from memonger.tiling.row_search import RowSearch, asked_for
from memonger.tiling.slice_check import EXACT, SeenAlone, SliceCheck
from memonger.tiling.slices import Band, SliceStage, row_rules
from memonger.units import MiB
from memonger.words import option

STEPS = 4
"""Arenas that are tried for each halving of memory."""

SMALL = 2 * MiB
"""Arena and workspace that nobody minds: without a budget a model that takes no more runs as it is."""

ROUNDS = 4
"""Searches, each without the nodes that gave other bits in the one before."""

ROUNDED = "gives other last bits on slices than on whole values"
"""Why a node stays whole."""

FINEST = 3
"""Of candidates along an axis of which none fits, so many are laid out, to name the smallest."""

NEXT_TO = 1.25
"""Plans count that take up to so much more than the least memory, sessions included: of them the smallest is taken."""

SMALLER = 0.99
"""Candidates that take more than so much of the memory of one that was written, and no less time, aren't written."""

SLOWER = 1.5
"""Candidates that by estimate take so many times the time of one that fits aren't faster when they are written."""

SAVED = 0.75
"""Of the time that the fastest of those is estimated to save, so much has to be saved."""


class ChunkSearch:
    """Ways of one model to run in chunks, without the nodes that were seen to give other bits then.

    Args:
        lowered: The model, which can run in chunks: see `why_not`.
        request: What is asked of it.
        options: `Options.chunks` and `Options.max_overhead`.
        device: The plan's.
        batch: Size of the inputs' first dimension, where it is known to be the batch.
        plain: The schedule whose nodes are to run in chunks, recomputations included.
        most_copies: How many copies of nodes chunks may make.
        ranges: Dimensions with a range of sizes, of which the model has the largest.
    """

    def __init__(
        self, lowered: Lowered, request: Request, options: Options, device: Device, batch: int | None, plain: Solution,
        most_copies: int = MOST_NODES, ranges: Mapping[str, DimRange] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.options, self.batch, self.most_copies = options, batch, most_copies
        self._given = ToSlice(lowered, request, plain, device, cores_of(options.threads), {}, None, ranges)
        self._refused, self._refused_rows, self._most = dict[str, str](), dict[str, int](), math.inf
        self._known: dict[Any, list[Candidates]] = {}
        self._axes: dict[frozenset[str], list[AxisGraph]] = {}
        self._priced: dict[Any, Candidate] = {}
        self._rows: dict[Candidate | None, RowSearch] = {}

    @cached_property
    def job(self) -> ToSlice:
        """What is to run in chunks: the model in the order of its schedule."""
        given, model = self._given, self._given.lowered.model.clone()
        schedule_model(model, given.plain.schedule, given.plain.graph)
        for node in model.graph:  # whose marks would be taken for ours
            node.metadata_props.pop(CHUNK, None)
            node.metadata_props.pop(WINDOW, None)
        works = {str(node.name): work_of(node) for node in model.graph}
        roles, lowered = training_roles.read(model, str(model.graph.name)), given.lowered
        return dataclasses.replace(
            given, lowered=dataclasses.replace(lowered, model=model), works=works, training=roles
        )

    @cached_property
    def _check(self) -> SliceCheck:
        return SliceCheck(self.options.threads, self._given.lowered.spent)

    def chosen(self) -> InSlices | None:
        """The model in the slices that the options ask for; None where it stays as it is.

        Raises:
            PlanError: a number of chunks is asked for that can't be.
        """
        given, is_asked = self._given, self.options.axis_and_chunks is not None
        room = None if given.request.budget is None else given.request.budget - given.request.base
        if not is_asked and given.plain.total_bytes <= (SMALL if room is None else room):
            return None
        if is_asked:
            return self.within(math.inf if room is None else float(room))
        return self.quick() if room is None else self.at_most(float(room))

    def within(self, room: float) -> InSlices | None:
        """The cheapest candidate within so many bytes, or the smallest; or the one that was asked for."""
        self._refused, self._refused_rows, self._most, candidate = {}, {}, math.inf, None
        plain = math.inf if self.options.axis_and_chunks is not None else self.job.plain.total_bytes
        for _ in range(ROUNDS):
            candidate = self._same_bits(partial(_cheapest, room, plain))
            if candidate is None or candidate.total <= room or self.options.axis_and_chunks is not None:
                break
            room -= candidate.total - room  # the workspace was more than estimated
        return candidate

    def at_most(self, room: float) -> InSlices | None:
        """`within`, or what no budget gives where that is faster and fits: it is a candidate, too."""
        candidate = self.within(room)
        if candidate is None or candidate.total > room:
            return candidate
        usual = self.quick()
        return usual if usual is not None and usual.total <= room and usual.extra < candidate.extra else candidate

    def quick(self) -> InSlices | None:
        """The smallest candidate that takes no longer than the options allow, by estimate."""
        self._refused, self._refused_rows, self._most = {}, {}, self.options.max_overhead * self.seconds
        sessions = session_bytes(self.job.lowered.model, self.job.training is not None)
        return self._same_bits(partial(_best, self.job.plain.total_bytes, sessions, self._most))

    @cached_property
    def seconds(self) -> float:
        """About how long a run of the model as it is takes."""
        job = self.job
        working_set = working_set_bytes(job.plain.graph, assign_storage(job.plain.graph))
        return seconds_of(job.lowered.model, working_set, job.cores, job.training is not None, job.works)

    def _same_bits(self, pick: Callable[[Sequence[Candidates]], InSlices | None]) -> InSlices | None:
        """The candidate that is picked; where some nodes give other bits, and mayn't, one that leaves them whole."""
        for _ in range(ROUNDS):
            # Candidates along each axis
            key = frozenset(self._refused), frozenset(self._refused_rows.items()), self._most
            if key not in self._known:
                self._known[key] = self._found()
            candidate = pick(self._known[key])
            if candidate is None:
                return None
            if self.job.ranges and (uneven := candidate.uneven(self.job.ranges)):
                self._refused |= dict.fromkeys(uneven, "gives other shapes on slices that are cut short")
                self._refused_rows |= candidate.slices_of(uneven)
                continue
            checked = candidate.seen(self._check, self._lengths(candidate))
            if not checked.different or self.options.allow_rounding:
                candidate = _with_checked(candidate, checked)
                if self.job.ranges:  # laid out for all sizes
                    job, made = self.job, candidate.lowered
                    request = dataclasses.replace(job.request, budget=None)
                    asked = asked_of(made, job.lowered.model, request, job.training, job.device, job.ranges)
                    candidate = dataclasses.replace(candidate, request=asked, solution=decide(asked, "none", "file"))
                is_worth = self.options.axis_and_chunks is not None or candidate.total < self.job.plain.total_bytes
                return candidate if is_worth or not self.job.ranges else None
            rows = candidate.slices_of(checked.different)
            self._refused_rows |= rows
            others = (name for name in checked.different if name not in rows)
            self._refused |= dict.fromkeys(others, ROUNDED)
        return None

    def _found(self) -> list[Candidates]:
        asked = self.options.axis_and_chunks
        if asked is not None and asked[0] == ROWS:
            batch = [a for a in self._of_inputs() if a.number == 0 and a.ranges] if not self.job.ranges else []
            elements = filter(None, (self._elements(axis, axis.all_in_slices(axis.axes.size)) for axis in batch))
            jobs = [*(self.job.again(one.written) for one in elements), self.job]
            return [asked_for(jobs, asked[1], self._refused_rows, self._uncut)]
        if asked is not None:
            seeds = _seeds(self.job.lowered.model, asked[0])
            if not seeds:
                has = f"no input has an axis {asked[0]} of more than one element"
                raise PlanError(f"{has}, along which it could run in chunks.")
            axis = _along(self.job, asked[0], self._cut_along(seeds))
            return [[self._candidate(axis, axis.all_in_slices(asked[1]))]]
        key = frozenset(self._refused)
        if key not in self._axes:
            if self.job.training is None:
                self._axes[key] = self._of_inputs()
            else:
                self._axes[key] = [self.regions_without(self._refused)]
        axes = self._axes[key]
        along = [axis.bands(self._most, self.most_copies) for axis in axes]
        found: list[Candidates] = [
            [self._candidate(axis, one) for one in bands] for axis, bands in zip(axes, along, strict=True)
        ]
        if self.job.training is not None:
            return found
        if len(axes) == 2 and not self.job.ranges and all(axis.ranges for axis in axes):
            found += self._rows_of_elements(*axes)
        batches = [(axis, bands[0]) for axis, bands in zip(axes, along, strict=True) if axis.number == 0 and bands]
        batches = [] if self.job.ranges else batches
        ways = [None, *filter(None, (self._elements(*batch) for batch in batches))]
        for way in ways:
            job = self.job if way is None else self.job.again(way.written)
            self._rows[way] = self._rows.get(way) or RowSearch(job, uncut=self._uncut)
        return found + [self._rows[w].candidates(self._refused_rows, self._most, self.most_copies) for w in ways]

    def _candidate(self, axis: "AxisGraph", bands: tuple[Band, ...]) -> Candidate:
        """The same for the same bands, so that it is written once."""
        stages = tuple(band.stages for band in bands)
        key = frozenset(self._refused), axis.number, axis.job.outer is not None, stages
        if key not in self._priced:
            self._priced[key] = axis.candidate(bands)
        return self._priced[key]

    def axes_without(self, refused: Mapping[str, str]) -> list["AxisGraph"]:
        """The axes of the inputs along which something can be cut, where nodes of these names stay whole.

        What is repeated for each element of a batch, as masks are, is cut, too.
        """
        self._refused = dict(refused)
        return self._of_inputs(also_repeated=not self.job.ranges)

    def regions_without(self, refused: Mapping[str, str]) -> "AxisGraph":
        """A training step, whose ranges are cut along axes of their own, where nodes of these names stay whole."""
        order, graph, cut, ranges = regions_of(self.job.lowered.model, self.job.plain.graph, refused)
        return dataclasses.replace(_in_order(self.job, -1, order, graph, cut), ranges=ranges)

    def _of_inputs(self, also_repeated: bool = False) -> list["AxisGraph"]:
        """The axes of the inputs along which something can be cut."""
        model, found = self.job.lowered.model, list[AxisGraph]()
        for number, size in enumerate((self.batch, None)):  # the batch, and the axis behind it
            seeds = _seeds(model, number, size)
            if seeds and number == 0 and also_repeated:
                seeds = with_repeated(model, seeds)
            cut = self._cut_along(seeds) if seeds else None
            if cut is not None and any(isinstance(how, Slicing) for how in cut.nodes):
                found.append(_along(self.job, number, cut))
        return found

    def _cut_along(self, seeds: Mapping[str, int]) -> Axes:
        """How nodes are cut from these axes of inputs on: with ranges so that slices fit at any size."""
        model, refused = self.job.lowered.model, dict(self._refused)
        if self.job.runs_in_one:
            large = (str(node.name) for node in model.graph if packed_bytes(node) > PACKED)
            refused |= dict.fromkeys(large, "would pack its weights again for each slice")
        axes = axes_of(model, seeds, refused)
        while self.job.ranges:
            uneven = uneven_nodes(model, axes, seeds, self._shapes, EXACT)
            if not uneven:
                break
            refused |= uneven
            axes = axes_of(model, seeds, refused)
        return axes

    @cached_property
    def _shapes(self) -> list[dict[str, Shape | None]]:
        """The shapes of all values at some sizes of the ranges."""
        return shapes_at_points(self.job.lowered.model, self.job.ranges)

    @cached_property
    def _uncut(self) -> Mapping[str, str]:
        """Nodes that can't be cut along rows of images at all sizes of the ranges, and why."""
        return varying_images(self.job.lowered.model, self._shapes, EXACT) if self.job.ranges else {}

    def _lengths(self, candidate: InSlices) -> list[int]:
        """The lengths that the axis of a candidate may have, the largest last; none where it has one."""
        axes = (band.axes for band in candidate.bands if isinstance(band, Band))
        cut = {f"{name}[{axis}]" for own in axes for name, axis in own.items()}
        found = next((one for one in self.job.ranges.values() if not cut.isdisjoint(one.places)), None)
        if found is None:
            return []
        unit = found.most // candidate.size
        return [size // unit for size in range(found.least, found.most + 1, found.step) if size % unit == 0]

    def _elements(self, batch: "AxisGraph", bands: tuple[Band, ...]) -> Candidate | None:
        """The model in chunks of the batch whose images are to run in rows; None where nothing reads images."""
        cuts_rows = any(isinstance(rule, Slicing) for rule in row_rules(self.job.lowered.model))
        candidate = self._candidate(batch, bands)
        return candidate if cuts_rows and candidate.seconds <= self._most else None

    def _rows_of_elements(self, batch: "AxisGraph", rows: "AxisGraph") -> list[Candidates]:
        """Each element of the batch by itself, and of that the rows in chunks."""
        bands = batch.all_in_slices(batch.axes.size)
        candidate = self._candidate(batch, bands)
        if _copies(bands) > self.most_copies or candidate.seconds > self._most:
            return []
        job = self.job.again(candidate.written)
        graph = job.lowered.model.graph
        cut = [node for node in graph if WINDOW in node.metadata_props]
        starts = [node.outputs[0] for node in cut if node.op_type == "Slice" and node.inputs[0] in graph.inputs]
        shapes = {str(value.name): static_shape(value) or () for value in starts}
        seeds = {name: 1 for name, shape in shapes.items() if len(shape) > 1 and shape[1] == rows.axes.size}
        if not seeds:
            return []
        refused = {str(node.name): "cuts or joins chunks" for node in cut} | self._refused
        axis = _along(job, 1, axes_of(job.lowered.model, seeds, refused))
        return [[self._candidate(axis, one) for one in axis.bands(self._most, self.most_copies)]]


def _with_checked(candidate: InSlices, checked: SeenAlone) -> InSlices:
    """The same with workspace as it was seen, and with a note on other bits."""
    replace, different = dataclasses.replace, checked.different
    if different:
        name, most = max(different.items(), key=lambda one: one[1])
        nodes = "1 node gives" if len(different) == 1 else f"{len(different)} nodes give"
        said = f"{nodes} other last bits in chunks, '{name}' most: by up to {most:.1e} on random inputs."
        candidate = replace(candidate, notes=(said,))
    calibration, graph = candidate.lowered.calibration, candidate.request.graph
    if calibration is None:
        return candidate
    workspace = {name: size for name, size in {**calibration.workspace, **checked.workspace}.items() if size}
    graph = replace(graph, workspace=tuple(workspace.get(name, 0) for name in graph.nodes))
    lowered = replace(candidate.lowered, calibration=replace(calibration, workspace=workspace))
    request, solution = replace(candidate.request, graph=graph), replace(candidate.solution, graph=graph)
    return replace(candidate, lowered=lowered, request=request, solution=solution)


def _best(plain: int, sessions: int, most: float, candidates: Sequence[Candidates]) -> InSlices | None:
    """Of the candidates next to the least memory with their sessions the one that takes least without them.

    The model as it is counts among those; None where none takes much less. Candidates are written in the order of what
    they take at least, until none can be next to the least; and only those that may be smaller than what was written,
    or faster.

    Args:
        plain: Bytes that the model takes as it is.
        sessions: About what its session takes then.
        most: Seconds that a candidate may take longer, by estimate.
        candidates: Along each axis.
    """
    written, whole, slowest = list[InSlices](), plain + sessions, most

    def least() -> int:
        return min([whole, *(one.with_sessions for one in written)])

    def counting() -> list[InSlices]:
        return [one for one in written if one.total <= WORTH * plain and one.with_sessions <= NEXT_TO * least()]

    for candidate in sorted(itertools.chain.from_iterable(candidates), key=lambda one: one.least):
        if candidate.least > NEXT_TO * least():
            break
        is_no_better = any(
            candidate.needed > SMALLER * one.total and candidate.seconds >= min(0.0, one.extra) for one in counting()
        )
        if candidate.seconds <= slowest and not is_no_better:
            written.append(candidate.written)
            most_bytes = NEXT_TO * least()
            slowest = most + SAVED * min([0.0, *(one.extra for one in written if one.with_sessions <= most_bytes)])
            written = [one for one in written if one.extra <= slowest]
    return min(counting(), key=lambda one: (one.total, one.with_sessions), default=None)


def _cheapest(room: float, plain: float, candidates: Sequence[Candidates]) -> InSlices | None:
    """The cheapest candidate that fits, or else the smallest, if it takes less than the model as it is.

    Those that by estimate don't fit aren't written, nor those that save nothing, nor those that take much longer than
    one that fits; and if none fits those that aren't smaller than the smallest, of equals the fastest first.
    """
    written: list[InSlices] = []
    most = math.inf
    for along in candidates:
        for candidate in reversed(along):
            if candidate.needed <= UNSURE * room and candidate.needed < plain and candidate.seconds <= most:
                written.append(candidate.written)
                if written[-1].total <= room:
                    most = min(most, SLOWER * max(0.0, written[-1].extra))
                    break
    fitting = [one for one in written if one.total <= room]
    if fitting:
        return min(fitting, key=lambda one: (one.extra, one.total))
    # The finest has most copies, whose rows at the border may take more than slices save
    few = (one for along in candidates for one in along[:FINEST])
    for candidate in sorted(few, key=lambda one: (one.needed, one.seconds)):
        if candidate.needed >= min([plain, *(one.total for one in written)]):
            break
        written.append(candidate.written)
    smaller = (one for one in written if one.total < plain)
    return min(smaller, key=lambda one: (one.total, one.extra), default=None)


def why_not(lowered: Lowered, options: Options, device: Device) -> str:
    """Why a model isn't run in chunks, whatever its nodes compute; empty where nothing speaks against it."""
    graph, is_portable, measured = lowered.model.graph, device.facts.is_portable, lowered.calibration
    is_estimated = is_portable and options.chosen_mode == "inference"
    if not (device.is_host and (is_estimated or (measured is not None and measured.seconds is not None))):
        trained = " and for inference on no device" if device.is_host else ""
        return f"chunks are for plans on the CPU ({option('device', 'cpu')}){trained}"
    if is_portable and not onnxruntime.is_available():
        return "whether slices give the same bits is found out with onnxruntime, which isn't installed"
    if any(map(subgraphs, graph)):
        return "it has nodes with subgraphs (If, Loop, Scan)"
    default = next((value.name for value in graph.inputs if value.name in graph.initializers), None)
    is_refused = default is not None and options.chosen_mode == "inference"
    return f"its input '{default}' has a default" if is_refused else ""


@dataclass(frozen=True, slots=True)
class AxisGraph:
    """A model that is to be cut along an axis: in an order in which the ranges that can be are long.

    A training step's ranges have axes of their own, and ``number`` is -1; ``axes`` says how each node is cut, ``works``
    what each one does, ``alive`` how many bytes are, ``working_set`` those of them that are read again, and ``seconds``
    about how long all nodes take. ``job`` is the model in the order of its plan.
    """

    job: ToSlice
    number: int
    lowered: Lowered
    graph: Graph
    axes: Axes
    ranges: tuple[StepSpan, ...]
    works: tuple[NodeWork, ...]
    alive: np.ndarray
    working_set: Sequence[float]
    seconds: float

    def more_seconds(self, bands: Sequence[Band], cores: int) -> float:
        """About how much longer the nodes of bands take in slices, on so many cores."""
        more = 0.0
        for steps, slices in _stages(bands):
            for step in steps:
                if isinstance(self.axes.nodes[step], Slicing):
                    alive = self.working_set[step]
                    more += self.works[step].more_seconds(cores, alive, alive / slices, slices)
        return more

    def estimated(self, bands: Sequence[Band]) -> float:
        """About how much longer bands take, but for what cuts and joins."""
        runs = sum(sum(band.counts) for band in bands)
        cores = self.job.cores
        return self.more_seconds(bands, cores) + runs * run_seconds(self.packs_again(bands), cores)

    def packs_again(self, bands: Sequence[Band]) -> bool:
        """Whether copies of nodes would pack so much again that chunks share sessions."""
        packed = (
            self.works[step].packed * (slices - 1)
            for steps, slices in _stages(bands)
            for step in steps
            if isinstance(self.axes.nodes[step], Slicing)
        )
        return self.job.training is None and sum(packed) > PACKED

    def candidate(self, bands: Sequence[Band]) -> Candidate:
        """The model with these bands in slices.

        At a step that is cut what it reads whole is alive, and its slice of the rest. What cuts and joins isn't known.
        """
        whole, workspace = np.ones(len(self.alive), bool), np.array(self.graph.workspace, float)
        for band in bands:
            whole[band.begin : band.end] = False
        alive = float(self.alive[whole].max(initial=0))
        steps = nodes = len(self.alive)
        shares, begins = self.packs_again(bands), [one.begin for one in self.ranges]
        for own, slices in _stages(bands):
            part = self.ranges[bisect_right(begins, own.start) - 1]
            cut = part.cut[own.start - part.begin : own.stop - part.begin]
            alive = max(alive, part.fixed + float(cut.max()) / slices)
            workspace[own.start : own.stop] /= slices
            copied = sum(isinstance(how, Slicing) for how in self.axes.nodes[own.start : own.stop])
            steps += copied * (slices - 1)
            nodes += 0 if shares else copied * (slices - 1)
        alive += float(workspace.max(initial=0.0))
        write = partial(laid_out, self.job, self.lowered, self.graph, self.axes.nodes, self.number, bands)
        sessions = bytes_of(nodes, steps, self.number < 0)
        write = partial(write, size=self.axes.size, once=self.seconds)
        return Candidate(round(alive), sessions, self.estimated(bands), write)

    def bands(self, most: float, most_copies: int) -> list[tuple[Band, ...]]:
        """Ways to run the model in chunks, for ever larger arenas.

        Args:
            most: Seconds that they may take longer, by estimate.
            most_copies: How many copies of nodes they may make.
        """
        levels = [one.levels for one in self.ranges]
        slices = [[len(bounds) - 1 for bounds in each] for each in levels]
        least = max((one.least(counts[-1]) for one, counts in zip(self.ranges, slices, strict=True)), default=0.0)
        plain = self.job.plain
        arena, workspace = plain.arena_bytes, max(plain.graph.workspace, default=0)
        seen: dict[tuple[Any, ...], None] = {}
        for step in reversed(range(1, STEPS * len(bin(max((counts[-1] for counts in slices), default=1))))):
            share = 2 ** (-step / STEPS)
            chosen = (
                stages_for(one, counts, max(least, arena * share), workspace * share)
                for one, counts in zip(self.ranges, slices, strict=True)
            )
            seen[tuple(map(tuple, chosen))] = None
        candidates = (
            tuple(
                Band(one.axes.values, tuple(SliceStage(a, b, bounds[level]) for a, b, level in stages))
                for one, stages, bounds in zip(self.ranges, chosen, levels, strict=True)
                if stages
            )
            for chosen in seen
        )
        return [
            bands
            for bands in candidates
            if bands and _copies(bands) <= most_copies and self.estimated(bands) <= most
            if not (self.job.runs_in_one and self.packs_again(bands))
        ]

    def all_in_slices(self, count: int) -> tuple[Band, ...]:
        """All that can be in so many slices.

        Raises:
            PlanError: nothing can; or the axis has fewer elements.
        """
        size = self.axes.size
        if count > size:
            raise PlanError(f"the axis has {size} elements, and so at most as many chunks, not {count}.")
        if not self.ranges:
            refusal = next((str(how) for how in self.axes.nodes if isinstance(how, Refusal)), "no node reads it")
            raise PlanError(f"nothing can run in chunks along that axis: {refusal}.")
        bounds = tuple(size * number // count for number in range(count + 1))
        return tuple(Band(self.axes.values, (SliceStage(one.begin, one.end, bounds),)) for one in self.ranges)


def _stages(bands: Sequence[Band]) -> Iterator[tuple[range, int]]:
    """The steps of each stage, and in how many slices they run."""
    return ((range(one.begin, one.end), len(one.slices) - 1) for band in bands for one in band.stages)


def _copies(bands: Sequence[Band]) -> int:
    """How many nodes bands have, each in all of its slices."""
    return sum(len(steps) * slices for steps, slices in _stages(bands))


def _along(job: ToSlice, number: int, axes: Axes) -> AxisGraph:
    """A model that is cut along an axis of that number."""
    order, ranges = ranges_in_order(job.lowered.model, axes)
    graph = schedule_graph(job.plain.graph, order)
    axes = dataclasses.replace(axes, nodes=tuple(axes.nodes[step] for step in order))
    axis = _in_order(job, number, order, graph, axes)
    storage, waits = assign_storage(graph), [one.waits for one in axis.works]
    return dataclasses.replace(axis, ranges=measured(graph, storage, axes, ranges, waits))


def _in_order(job: ToSlice, number: int, order: Sequence[int], graph: Graph, axes: Axes) -> AxisGraph:
    """A model in an order, with what its nodes do, and how many bytes are alive; without ranges."""
    model, works = job.lowered.model.clone(), list[NodeWork]()
    schedule_model(model, order, graph)
    for node, how in zip(model.graph, axes.nodes, strict=True):
        cut = how.inputs if isinstance(how, Slicing) else {}
        constants = [i for i in cut if (value := node.inputs[i]) is not None and not is_fed(value)]
        known = None if constants else job.works.get(str(node.name))
        works.append(work_of(node, cut) if known is None else known)
    storage = assign_storage(graph)
    alive, working_set = live_bytes(storage.buffers, len(graph.nodes)), working_set_bytes(graph, storage)
    seconds = seconds_of(model, working_set, job.cores, job.training is not None, job.works)
    lowered = dataclasses.replace(job.lowered, model=model)
    return AxisGraph(job, number, lowered, graph, axes, (), tuple(works), alive, working_set, seconds)


def _seeds(model: ir.Model, axis: int, size: int | None = None) -> dict[str, int]:
    """The inputs with so many elements along an axis, or with most of all; none where that is one."""
    shapes = {str(v.name): static_shape(v) or () for v in model.graph.inputs}
    sizes = {name: shape[axis] for name, shape in shapes.items() if len(shape) > axis}
    size = max(sizes.values(), default=1) if size is None else size
    return {name: axis for name, own in sizes.items() if own == size > 1}
