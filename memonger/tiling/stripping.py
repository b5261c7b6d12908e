"""Strips, an experiment: which bands of a model run for some rows of an image after the other.

One band after the other is chosen, at most `BANDS`: always around the step that needs the most memory, and of
those with which the whole computes at most `OVERLAP` more the one whose layout takes the least. Chunks of the batch or
of rows of tokens don't come on top.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from memonger.devices import CPU, Device
from memonger.errors import PlanError
from memonger.graph.costs import flops
from memonger.graph.liveness import assign_storage, live_bytes
from memonger.graph.schedule import schedule_model
from memonger.ir.marks import STRIP, before_chunks
from memonger.ir.values import nbytes, static_shape
from memonger.lowering import calibrate
from memonger.lowering.cpu_convolutions import block_size
from memonger.lowering.lowered import Lowered
from memonger.plan_file import ROWS, ChunkedBand
from memonger.runtime import feeds as feeding
from memonger.runtime import ort
from memonger.runtime.weights import LEND_ALL
from memonger.schedule import Request
from memonger.schedule.decide import Solution, decide
from memonger.tiling.chunk_times import cores_of, launch_seconds
from memonger.tiling.cutting import Refusal
from memonger.tiling.rewritten import asked_of
from memonger.tiling.strips import ImageBand, images_read, in_strips
from memonger.words import option

OVERLAP = 0.10
"""The most that strips may compute more than the model as it is, of its FLOPs."""

BANDS = 4
"""The most bands of a model."""

NEAR = 8
"""Places where a band may begin, or end, between the step that needs the most memory and the farthest."""

LAYOUTS = 16
"""Bands that are laid out for each that is chosen."""


@dataclass(frozen=True, slots=True)
class Strips:
    """A model with bands that run in strips.

    Attributes:
        lowered: With copies of these nodes, in the order that they run.
        request: What is asked of it: its graph.
        solution: Its layout.
        bands: What runs in strips, for the plan.
        notes: What the user should know.
    """

    lowered: Lowered
    request: Request
    solution: Solution
    bands: tuple[ChunkedBand, ...] = ()
    notes: tuple[str, ...] = ()


def choose(
    lowered: Lowered, request: Request, plain: Solution, device: Device, count: int, threads: int, allow_rounding: bool
) -> Strips:
    """A model with bands in so many strips.

    Args:
        lowered: The model.
        request: What is asked of it.
        plain: Its layout as it is.
        device: The plan's.
        count: Strips of each band.
        threads: Threads within a node; 0 leaves it to onnxruntime.
        allow_rounding: Whether results may differ in their last bits.

    Raises:
        PlanError: no band can, or none saves anything; or results differ in the last bits, and may not.
    """
    ordered = lowered.model.clone()
    schedule_model(ordered, plain.schedule, plain.graph)
    whole = Strips(dataclasses.replace(lowered, model=ordered), request, plain)
    way, chosen = _searched(whole, device, count)
    more = flops_of(way.lowered.model) / max(1, flops_of(ordered)) - 1
    notes = [f"Strips compute {more:.1%} more: rows in which they overlap."]
    most = _difference(ordered, way.lowered.model, threads)
    if most:
        said = f"results differ in their last bits, by up to {most:.1e} on random inputs"
        if not allow_rounding:
            raise PlanError(f"in strips {said}: {option('allow_rounding', True)} takes them.")
        notes.append(f"In strips {said}.")
    way = _with_workspace(way, device, threads)
    bands = tuple(_described(whole, way, names, count, launch_seconds(cores_of(threads))) for names in chosen)
    return dataclasses.replace(way, bands=bands, notes=tuple(notes))


def _searched(whole: Strips, device: Device, count: int) -> tuple[Strips, list[tuple[str, ...]]]:
    """A model with the bands that save the most, one after the other, and the names of their nodes in order.

    Raises:
        PlanError: there are none.
    """
    way, chosen, most = whole, list[tuple[str, ...]](), (1 + OVERLAP) * flops_of(whole.lowered.model)
    while len(chosen) < BANDS:
        search = _StripSearch(way, device, count, most)
        band = search.best()
        if band is None:
            break
        nodes = way.solution.graph.nodes[band.begin : band.end]
        chosen.append(tuple(name for name, images in zip(nodes, band.images, strict=True) if images))
        way = search.written(band)
    if not chosen:
        raise PlanError(f"the model can't run in {count} strips: {_why_not(whole.lowered.model)}.")
    step = {name: number for number, name in enumerate(whole.solution.graph.nodes)}
    return way, sorted(chosen, key=lambda names: step[names[0]])


def flops_of(model: ir.Model) -> int:
    """Operations of the products in one run of a model; see `memonger.graph.costs.flops`."""
    return sum(map(flops, model.graph))


class _StripSearch:
    """The band of a model whose strips save the most, around the step that needs the most memory.

    Args:
        whole: The model, in the order of its plan.
        device: The plan's.
        count: Strips.
        most: FLOPs of the model in strips.
    """

    def __init__(self, whole: Strips, device: Device, count: int, most: float) -> None:
        self.whole, self.device, self.count, self.most = whole, device, count, most
        self.model, graph = whole.lowered.model, whole.solution.graph
        self.read, self.block = images_read(self.model), block_size()
        self.live = live_bytes(assign_storage(graph).buffers, len(graph.nodes))

    def best(self) -> ImageBand | None:
        """The band whose layout takes the least memory; None where none saves anything."""
        best, best_band = self.whole.solution.total_bytes, None
        outside = {band: self._outside(band) for band in self._bands()}
        laid_out = 0
        for band in sorted(outside, key=lambda one: (outside[one], one.end - one.begin)):
            if outside[band] >= best or laid_out == LAYOUTS:
                break
            made = in_strips(self.model, band, self.count, self.block)
            if flops_of(made) > self.most:
                continue
            total, laid_out = self._laid_out(made).solution.total_bytes, laid_out + 1
            if total < best:
                best, best_band = total, band
        return best_band

    def written(self, band: ImageBand) -> Strips:
        """The model with that band in strips."""
        return self._laid_out(in_strips(self.model, band, self.count, self.block))

    def _outside(self, band: ImageBand) -> int:
        """What the other steps need at least."""
        return int(np.concatenate((self.live[: band.begin], self.live[band.end :])).max(initial=0))

    def _bands(self) -> list[ImageBand]:
        """Those around the largest step, as far as nodes can run in strips, whose results have enough rows."""
        largest = int(self.live.argmax())
        first = max((n + 1 for n in range(largest) if isinstance(self.read[n], Refusal)), default=0)
        behind = (n for n in range(largest, len(self.read)) if isinstance(self.read[n], Refusal))
        last = next(behind, len(self.read))
        places = [place for place in self._narrow() if first <= place <= last]
        begins = [first, *[place for place in places if place <= largest][-NEAR:]]
        ends = [*[place for place in places if place > largest][:NEAR], last]
        read = [frozenset[int]() if isinstance(one, Refusal) else one for one in self.read]
        pairs = dict.fromkeys((begin, end) for begin in begins for end in ends if begin < end)
        bands = [ImageBand(begin, end, tuple(read[begin:end])) for begin, end in pairs]
        return [one for one in bands if _fewest_rows(one.exits(self.model)) >= self.count]

    def _narrow(self) -> list[int]:
        """Places in order where no more bytes are handed on than at those beside them."""
        nodes = list(self.model.graph)
        step, change = {node: number for number, node in enumerate(nodes)}, np.zeros(len(nodes) + 2)
        for number, node in enumerate(nodes):
            for value in node.outputs:
                last = len(nodes) if value.is_graph_output() else max((step[n] for n in value.consumers()), default=-1)
                if last > number:
                    change[number + 1] += nbytes(value) or 0
                    change[last + 1] -= nbytes(value) or 0
        size = change.cumsum()
        return [n for n in range(1, len(nodes)) if size[n] <= min(size[n - 1] if n > 1 else np.inf, size[n + 1])]

    def _laid_out(self, made: ir.Model) -> Strips:
        lowered = _shared(self.whole.lowered, made)
        request = asked_of(lowered, self.whole.lowered.model, self.whole.request, None, self.device)
        return Strips(lowered, request, decide(dataclasses.replace(request, budget=None), "none", "file"))


def _fewest_rows(values: Sequence[ir.Value]) -> int:
    return min(((static_shape(value) or (0, 0, 0))[ROWS] for value in values), default=0)


def _shared(lowered: Lowered, made: ir.Model) -> Lowered:
    """The model in strips, with each copy's share of what was measured of its node."""
    measured = lowered.calibration
    assert measured is not None
    height_of = {str(node.name): (static_shape(node.outputs[0]) or ())[ROWS:][:1] for node in lowered.model.graph}
    seconds, workspace = dict[str, float](), dict[str, int]()
    for node in made.graph:
        name, share, own = str(node.name), 1.0, str(node.name)
        mark = node.metadata_props.get(STRIP, "")
        if "." in mark and name not in height_of:
            name, (begin, end) = before_chunks(node), map(int, mark.split("."))
            share = (end - begin) / height_of[name][0]
        seconds[own] = (measured.seconds or {}).get(name, 0.0) * share
        if needed := (measured.workspace or {}).get(name, 0):
            workspace[own] = math.ceil(needed * share)
    return dataclasses.replace(
        lowered, model=made, calibration=dataclasses.replace(measured, seconds=seconds, workspace=workspace)
    )


def _with_workspace(way: Strips, device: Device, threads: int) -> Strips:
    """The same with the workspace measured, where it can be run on random inputs."""
    workspace, calibration = calibrate.measured(way.lowered.model, threads), way.lowered.calibration
    if workspace is None or calibration is None:
        return way
    lowered = dataclasses.replace(way.lowered, calibration=dataclasses.replace(calibration, workspace=workspace))
    request = asked_of(lowered, lowered.model, way.request, None, device)
    solution = dataclasses.replace(way.solution, graph=request.graph)
    return dataclasses.replace(way, lowered=lowered, request=request, solution=solution)


def _described(whole: Strips, way: Strips, names: Sequence[str], count: int, each: float) -> ChunkedBand:
    """What a band is, saves and costs for the plan, where each node costs so many seconds."""
    chosen, nodes = set(names), list(way.lowered.model.graph)
    copies = [n for n, node in enumerate(nodes) if "." in node.metadata_props.get(STRIP, "")]
    after = [n for n in copies if before_chunks(nodes[n]) in chosen]
    before = [n for n, name in enumerate(whole.solution.graph.nodes) if name in chosen]
    most = []
    for graph, own in ((whole.solution.graph, before), (way.solution.graph, after)):
        live = live_bytes(assign_storage(graph).buffers, len(graph.nodes))
        most.append(int(live[own[0] : own[-1] + 1].max()))
    added = [n for n in range(after[0], after[-1]) if STRIP in nodes[n].metadata_props]
    return ChunkedBand(
        axis=ROWS, first=names[0], last=names[-1], nodes=len(names), slices=(count,), runs=len(after),
        bytes_before=most[0], bytes_after=most[1], seconds=(len(added) - len(names)) * each,
    )  # fmt: skip


def _why_not(model: ir.Model) -> str:
    """Why no band runs in strips."""
    read = images_read(model)
    if any(isinstance(one, frozenset) and one for one in read):
        return (
            f"around the step that needs the most memory nothing is saved by what computes at most {OVERLAP:.0%} more"
        )
    return next((str(one).rstrip(".") for one in read if isinstance(one, Refusal)), "it reads no images")


def _difference(whole: ir.Model, made: ir.Model, threads: int) -> float:
    """The largest difference between what both give for random inputs; 0 for the same bits."""
    feeds, results = feeding.random_feeds(feeding.inputs_of(whole.graph)), []
    for model in (whole, made):
        options = ort.SessionSettings(in_order=True, threads=threads, lending=LEND_ALL, entries=ort.RUN_ONCE)
        session = ort.make_session(model, CPU, options)
        try:
            results.append(session.run(None, feeds))
        except Exception as error:  # pybind exceptions share no base class
            raise PlanError(f"strips can't be compared with the whole: {error}") from error
    differences = [0.0]
    for one, other in zip(*results, strict=True):
        if one.tobytes() != other.tobytes():
            differences.append(float(np.abs(one.astype(np.float64) - other).max()) or float(np.finfo(np.float64).tiny))
    return max(differences)
