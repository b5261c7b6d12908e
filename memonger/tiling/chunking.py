"""Which stretches of a model run on one slice of an axis after the other, and in how many slices.

Where nodes are independent along an axis of their values, running all of them on one slice and then on the next takes a
fraction of the memory. Ways to do that come from `memonger.tiling.stages` along the batch, the rows of a transformer,
and of the regions that `memonger.tiling.chunk_regions` finds around the steps with most bytes; and along the rows of
images from `memonger.tiling.row_search`, of the whole batch or of each of its elements. Of all of them one is chosen by
memory and time, written, and compared bit by bit with the whole.

AutoChunk (Zhao et al. 2024) searches such regions in PyTorch's graphs, MCUNetV2 (Lin et al. 2021) runs the first layers
of a CNN by patches of the image that overlap. Here little does, and the layout of the whole decides.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import onnx_ir as ir

from memonger.devices import Device
from memonger.errors import PlanError
from memonger.graph.liveness import assign_storage
from memonger.graph.schedule import schedule_model
from memonger.graph.session_memory import PACKED, packed_bytes, session_bytes
from memonger.ir import training_roles
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
from memonger.tiling.axes import Axes, axes_of, row_rules, shapes_at_points, uneven_nodes, varying_images, with_repeated
from memonger.tiling.candidates import (
    MOST_NODES,
    UNSURE,
    WORTH,
    Candidate,
    Candidates,
    InSlices,
    ToSlice,
    asked_of,
    working_set_bytes,
)
from memonger.tiling.chunk_regions import regions_of
from memonger.tiling.chunk_times import MOVING_SECONDS, cores_of, seconds_of, work_of
from memonger.tiling.cutting import Slicing
from memonger.tiling.overlap import overlapping
from memonger.tiling.row_search import BandOfRows, KnownBand, RowSearch, asked_for
from memonger.tiling.slice_check import SeenAlone, SliceCheck
from memonger.tiling.stages import StageSearch
from memonger.units import MiB
from memonger.words import option

SMALL = 2 * MiB
"""Arena and workspace that nobody minds: without a budget a model that takes no more runs as it is."""

MOST_ELEMENTS = 1024
"""Of a larger batch no element is cut by itself: each is a range, with which all that is alive there is compared."""

LITTLE = 1 / 128
"""Where the values of a batch in single elements are less than this part of all, inputs and weights too, the rows of
each element aren't looked at: no more could be saved."""

ROUNDS = 4, 12
"""Searches, each without the nodes that gave other bits in the one before: in so many slices of rows or more; from the
first of these numbers on in half as many or more."""

ROUNDED = "gives other last bits on slices than on whole values"
"""Why a node stays whole."""

FINEST = 3
"""Of candidates along an axis of which none fits, so many are laid out, to name the smallest."""

NEXT_TO = 1.25
"""Plans count that take up to so much more than the least memory, sessions included: of them the smallest is taken."""

SMALLER = 0.99
"""Candidates that take more than so much of the memory of one that was written, and no less time, aren't written."""

ALIKE = 3
"""Of candidates along an axis that by estimate need as much, so many are written in search of one that fits."""

SLOWER = 1.5
"""Candidates that by estimate take so many times the time of one that fits aren't faster when they are written."""

SAVED = 0.75
"""Of the time that the fastest of those is estimated to save, so much has to be saved."""


class ChunkSearch:
    """Ways of one model to run in chunks, without the nodes that were seen to give other bits then.

    Args:
        lowered: The model, which can run in chunks: see `why_not`.
        request: What is asked of it; its budget counts in `chosen` alone.
        options: `Options.chunks` and `Options.max_overhead`.
        device: The plan's.
        batch: Size of the inputs' first dimension, where it is known to be the batch.
        plain: The schedule whose nodes are to run in chunks, recomputations included.
        ranges: Dimensions with a range of sizes, of which the model has the largest.

    Attributes:
        plain: As given.
        base: Bytes of all that is no value, as the request has it, and those of candidates.
        most_copies: How many copies of nodes chunks may make; to ask for fewer costs little once all were looked for.
    """

    def __init__(
        self, lowered: Lowered, request: Request, options: Options, device: Device, batch: int | None, plain: Solution,
        ranges: Mapping[str, DimRange] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.options, self.batch, self.most_copies = options, batch, MOST_NODES
        self.plain, self.base = plain, request.base
        self._given = ToSlice(lowered, request, plain, device, cores_of(options.threads), {}, None, ranges)
        self._refused, self._refused_rows, self._most = dict[str, str](), dict[str, int](), math.inf
        self._known: dict[Any, list[Candidates]] = {}
        self._smallest: tuple[float, InSlices | None] | None = None
        """Bytes that nothing fits in, and what is smallest then."""
        self._stages: dict[frozenset[str], tuple[list[StageSearch], list[StageSearch]]] = {}
        """Along axes of the inputs, and of what regions read or write; by what is refused."""
        self._rows: dict[Candidate | None, list[RowSearch]] = {}

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

    def chosen(self, room: int | None) -> InSlices | None:
        """The model in the slices that the options ask for; None where it stays as it is.

        Args:
            room: Bytes that a budget leaves for values; None: there is no budget.

        Raises:
            PlanError: a number of chunks is asked for that can't be.
        """
        is_asked = self.options.axis_and_chunks is not None
        if not is_asked and self.plain.total_bytes <= (SMALL if room is None else room):
            return None
        if is_asked:
            return self.within(math.inf if room is None else float(room))
        return self.quick() if room is None else self.at_most(float(room))

    def within(self, room: float) -> InSlices | None:
        """The cheapest candidate within so many bytes, or the smallest; or the one that was asked for."""
        if self._smallest is not None and room <= self._smallest[0]:
            return self._smallest[1]
        self._refused, self._refused_rows, self._most, candidate, left = {}, {}, math.inf, None, room
        plain = math.inf if self.options.axis_and_chunks is not None else self.job.plain.total_bytes
        for _ in range(ROUNDS[0]):
            candidate = self._same_bits(partial(_cheapest, left, plain))
            if candidate is None or not 0 <= left < candidate.total or self.options.axis_and_chunks is not None:
                break
            left -= candidate.total - left  # the workspace was more than estimated
        if self._key in self._known and (candidate is None or candidate.total > room):  # else rounds ran out
            needed = (one.needed for along in self._known[self._key] for one in along)
            self._smallest = max(room, min(needed, default=math.inf) / UNSURE - 1), candidate
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
        for number in range(ROUNDS[1]):
            # Candidates along each axis
            if self._key not in self._known:
                self._known[self._key] = self._found()
            candidate = pick(self._known[self._key])
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
            if number >= ROUNDS[0] - 1:
                rows = {name: min(count, max(3, count // 2)) for name, count in rows.items()}
            self._refused_rows |= rows
            others = (name for name in checked.different if name not in rows)
            self._refused |= dict.fromkeys(others, ROUNDED)
        return None

    @property
    def _key(self) -> tuple[object, ...]:
        """What candidates depend on."""
        return frozenset(self._refused), frozenset(self._refused_rows.items()), self._most, self.most_copies

    def _found(self) -> list[Candidates]:
        """Candidates along each axis; of those along rows once more for each element of the batch."""
        if self.options.axis_and_chunks is not None:
            return [self._asked(*self.options.axis_and_chunks)]
        most, copies, replace = self._most, self.most_copies, dataclasses.replace
        key = frozenset(self._refused)
        if key not in self._stages:
            is_step = self.job.training is not None
            regions = [self.regions_without(self._refused)] if is_step or not self.job.ranges else []
            self._stages[key] = [] if is_step else self._of_inputs(), regions
        searches, regions = self._stages[key]
        found: list[Candidates] = [search.candidates(most, copies) for search in (*searches, *regions)]
        if self.job.training is not None:
            return found
        elements: list[Candidate | None] = [None]
        if searches and searches[0].axis == 0 and not self.job.ranges:
            if len(searches) == 2 and all(search.ranges for search in searches):
                found += self._rows_of_elements(*searches)
            elements += [each for each in found[0][:1] if self._has_images(each)]
        for each in elements:
            if each not in self._rows:
                job = self.job if each is None else self.job.again(each.written)
                rules = row_rules(job.lowered.model, self._uncut)
                forms = overlapping(job.lowered.model, rules, job.product_seconds, MOVING_SECONDS)
                own = (replace(job, lowered=replace(job.lowered, model=model)) for model in forms)
                known = dict[KnownBand, list[tuple[int, BandOfRows]]]()
                self._rows[each] = [RowSearch(one, rules, known=known) for one in own]
            found += [search.candidates(self._refused_rows, most, copies) for search in self._rows[each]]
        return found

    def _asked(self, number: int, count: int) -> Candidates:
        """All that can run in so many slices of an axis; of rows the smallest, of each element of the batch if can be.

        Raises:
            PlanError: none can.
        """
        if number == ROWS:
            batch = [one for one in self._of_inputs() if one.axis == 0 and one.ranges] if not self.job.ranges else []
            elements = filter(self._has_images, (one.all_in_slices(one.axes.size) for one in batch))
            jobs = [*(self.job.again(each.written) for each in elements), self.job]
            return asked_for(jobs, count, self._refused_rows, self._uncut)
        seeds = _seeds(self.job.lowered.model, number)
        if not seeds:
            has = f"no input has an axis {number} of more than one element"
            raise PlanError(f"{has}, along which it could run in chunks.")
        return [StageSearch(self.job, number, self._cut_along(seeds)).all_in_slices(count)]

    def _has_images(self, elements: Candidate) -> bool:
        """Whether of the model in slices of the batch that many take not too long, and something reads images."""
        cuts_rows = any(isinstance(rule, Slicing) for rule in row_rules(self.job.lowered.model))
        return cuts_rows and elements.seconds <= self._most

    def axes_without(self, refused: Mapping[str, str]) -> list[StageSearch]:
        """The axes of the inputs along which something can be cut, where nodes of these names stay whole.

        What is repeated for each element of a batch, as masks are, is cut, too.
        """
        self._refused = dict(refused)
        return self._of_inputs(also_repeated=not self.job.ranges)

    def regions_without(self, refused: Mapping[str, str]) -> StageSearch:
        """Regions that are cut along axes of their own, where nodes of these names stay whole."""
        order, axes, spans = regions_of(self.job.lowered.model, self.job.plain.graph, refused)
        return StageSearch(self.job, -1, axes, order, spans)

    def _of_inputs(self, also_repeated: bool = False) -> list[StageSearch]:
        """The axes of the inputs along which something can be cut."""
        model, found = self.job.lowered.model, list[StageSearch]()
        for number, size in enumerate((self.batch, None)):  # the batch, and the axis behind it
            seeds = _seeds(model, number, size)
            if seeds and number == 0 and also_repeated:
                seeds = with_repeated(model, seeds)
            cut = self._cut_along(seeds) if seeds else None
            if cut is not None and any(isinstance(how, Slicing) for how in cut.nodes):
                found.append(StageSearch(self.job, number, cut))
        return found

    def _cut_along(self, seeds: Mapping[str, int]) -> Axes:
        """How nodes are cut from these axes of inputs on: with ranges so that slices fit at any size."""
        model, refused = self.job.lowered.model, dict(self._refused)
        if self.job.runs_in_one:
            large = (str(node.name) for node in model.graph if packed_bytes(node) > PACKED)
            refused |= dict.fromkeys(large, "would pack its weights again for each slice")
        axes = axes_of(model, seeds, refused)
        while self.job.ranges:
            uneven = uneven_nodes(model, axes, seeds, self._shapes)
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
        return varying_images(self.job.lowered.model, self._shapes) if self.job.ranges else {}

    def _lengths(self, candidate: InSlices) -> list[int]:
        """The lengths that the axis of a candidate may have, the largest last; none where it has one."""
        cut = {f"{name}[{axis}]" for name, axis in candidate.cut.axes.values.items()}
        found = next((one for one in self.job.ranges.values() if not cut.isdisjoint(one.places)), None)
        if found is None:
            return []
        unit = found.most // candidate.cut.axes.size
        return [size // unit for size in range(found.least, found.most + 1, found.step) if size % unit == 0]

    def _rows_of_elements(self, batch: StageSearch, rows: StageSearch) -> list[Candidates]:
        """Each element of the batch by itself, and of that the axis behind it in chunks."""
        element = batch.all_in_slices(batch.axes.size)
        copies = sum(one.end - one.begin for one in batch.ranges) * batch.axes.size
        if copies > self.most_copies or element.seconds > self._most or batch.axes.size > MOST_ELEMENTS:
            return []
        if element.needed < LITTLE * (self.base + element.needed):
            return []
        job = self.job.again(element.written)
        graph = job.lowered.model.graph
        cut = [node for node in graph if WINDOW in node.metadata_props]
        starts = [node.outputs[0] for node in cut if node.op_type == "Slice" and node.inputs[0] in graph.inputs]
        shapes = {str(value.name): static_shape(value) or () for value in starts}
        seeds = {name: 1 for name, shape in shapes.items() if len(shape) > 1 and shape[1] == rows.axes.size}
        if not seeds:
            return []
        refused = {str(node.name): "cuts or joins chunks" for node in cut} | self._refused
        search = StageSearch(job, 1, axes_of(job.lowered.model, seeds, refused))
        return [search.candidates(self._most, self.most_copies)]


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
    written, whole, slowest = list[Candidate](), plain + sessions, most

    def least() -> int:
        return min([whole, *(one.written.with_sessions for one in written)])

    def counting() -> list[Candidate]:
        limit = NEXT_TO * least()
        return [one for one in written if one.written.total <= WORTH * plain and one.written.with_sessions <= limit]

    def is_no_better(candidate: Candidate, than: Candidate) -> bool:
        """Whether it isn't smaller than one that was written, nor saves more time than that, estimated or written."""
        is_faster = candidate.seconds < min(0.0, than.seconds, than.written.extra)
        return candidate.needed > SMALLER * than.written.total and not is_faster

    for candidate in sorted(itertools.chain.from_iterable(candidates), key=lambda one: one.least):
        if candidate.least > NEXT_TO * least():
            break
        if candidate.seconds <= slowest and not any(is_no_better(candidate, than) for than in counting()):
            written.append(candidate)
            most_bytes = NEXT_TO * least()
            saved = (one.written.extra for one in written if one.written.with_sessions <= most_bytes)
            slowest = most + SAVED * min([0.0, *saved])
            written = [one for one in written if one.written.extra <= slowest]
    return min((one.written for one in counting()), key=lambda one: (one.total, one.with_sessions), default=None)


def _cheapest(room: float, plain: float, candidates: Sequence[Candidates]) -> InSlices | None:
    """The cheapest candidate that fits, or else the smallest, if it takes less than the model as it is.

    Those that by estimate don't fit aren't written, nor those that save nothing, nor those that take much longer than
    one that fits; and if none fits those that aren't next to the smallest, of equals the fastest first.
    """
    written: list[InSlices] = []
    most = math.inf
    for along in candidates:
        beyond = list[int]()  # what those needed, by estimate, that don't fit
        for candidate in reversed(along):
            alike = sum(SMALLER * needed <= candidate.needed for needed in beyond)
            if candidate.needed > UNSURE * room or alike >= ALIKE:
                continue
            if candidate.needed < plain and candidate.seconds <= most:
                written.append(candidate.written)
                if written[-1].total <= room:
                    most = min(most, SLOWER * max(0.0, written[-1].extra))
                    break
                beyond.append(candidate.needed)
    fitting = [one for one in written if one.total <= room]
    if fitting:
        return min(fitting, key=lambda one: (one.extra, one.total))
    # The finest has most copies, whose rows at the border may take more than slices save
    few = (one for along in candidates for one in along[:FINEST])
    for candidate in sorted(few, key=lambda one: (one.needed, one.seconds)):
        if candidate.needed >= min([plain, *(NEXT_TO * one.total for one in written)]):
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


def _seeds(model: ir.Model, axis: int, size: int | None = None) -> dict[str, int]:
    """The inputs with so many elements along an axis, or with most of all; none where that is one."""
    shapes = {str(v.name): static_shape(v) or () for v in model.graph.inputs}
    sizes = {name: shape[axis] for name, shape in shapes.items() if len(shape) > axis}
    size = max(sizes.values(), default=1) if size is None else size
    return {name: axis for name, own in sizes.items() if own == size > 1}
