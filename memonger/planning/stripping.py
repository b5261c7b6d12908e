"""Strips, an experiment: which first nodes of a model run for some rows of an image after the other.

Nothing is searched but where they end: of the ends whose strips compute at most `OVERLAP` more, the one whose layout
takes the least memory. Chunks of the batch or of rows of tokens don't come on top.
"""

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from memonger.devices import CPU, Device
from memonger.errors import PlanError, SessionError
from memonger.graph.costs import flops
from memonger.graph.graph import needed_by
from memonger.graph.liveness import assign_storage, live_bytes
from memonger.graph.schedule import schedule_model
from memonger.lowering import calibrate
from memonger.lowering.cpu_convolutions import block_size
from memonger.lowering.lowered import Calibration, Lowered
from memonger.lowering.strips import in_strips, stretch_of
from memonger.model.extract import extract
from memonger.model.image_rows import ROWS
from memonger.model.marks import STRIP, before_chunks
from memonger.model.values import nbytes, static_shape
from memonger.plan import graph_of, parameter_bytes
from memonger.plan_file import ChunkedBand
from memonger.planning.chunking import LAUNCH_SECONDS
from memonger.planning.decide import Solution, decide
from memonger.remat import Request
from memonger.runtime import feeds as feeding
from memonger.runtime import ort
from memonger.words import option

OVERLAP = 0.10
"""The most that strips may compute more than the model as it is, of its FLOPs."""

ENDS = 16
"""Ends that are laid out."""


@dataclass(frozen=True, slots=True)
class Strips:
    """A model whose first nodes run in strips.

    Attributes:
        lowered: With copies of these nodes, in the order that they run.
        request: What is asked of it: its graph.
        solution: Its layout.
        band: What runs in strips, for the plan.
        notes: What the user should know.
    """

    lowered: Lowered
    request: Request
    solution: Solution
    band: ChunkedBand
    notes: tuple[str, ...]


def choose(
    lowered: Lowered, request: Request, plain: Solution, device: Device, count: int, threads: int, allow_rounding: bool
) -> Strips:
    """The first nodes of a model in so many strips.

    Args:
        lowered: The model.
        request: What is asked of it.
        plain: Its layout as it is.
        device: The plan's.
        count: Strips.
        threads: Threads within a node; 0 leaves it to onnxruntime.
        allow_rounding: Whether results may differ in their last bits.

    Raises:
        PlanError: none can be, or they save nothing; or their results differ in the last bits, and may not.
    """
    ordered = lowered.model.clone()
    schedule_model(ordered, plain.schedule, plain.graph)
    search = _Search(dataclasses.replace(lowered, model=ordered), request, plain, device, count)
    end = search.best_end()
    made, before, after = search.made(end), flops_of(ordered), flops_of(search.made(end))
    most = _difference(ordered, made, search.stretch.exits(ordered, end), threads)
    notes = [f"Strips compute {after / before - 1:.1%} more: rows in which they overlap."]
    if most:
        said = f"results differ in their last bits, by up to {most:.1e} on random inputs"
        if not allow_rounding:
            raise PlanError(f"in strips {said}: {option('allow_rounding', True)} takes them.")
        notes.append(f"In strips {said}.")
    ready = search.shared(made, calibrate.measured(made, threads))
    asked = search.asked(ready)
    solution = dataclasses.replace(search.laid_out(end), graph=asked.graph)
    return Strips(ready, asked, solution, search.described(end), tuple(notes))


class _Search:
    """Ends of the strips of one model, which is in the order of its plan."""

    def __init__(self, lowered: Lowered, request: Request, plain: Solution, device: Device, count: int) -> None:
        self.lowered, self.request, self.plain, self.device, self.count = lowered, request, plain, device, count
        self.stretch, self._block = stretch_of(lowered.model), block_size()
        self._made: dict[int, ir.Model] = {}

    def made(self, end: int) -> ir.Model:
        """The model with strips that end there."""
        if end not in self._made:
            self._made[end] = in_strips(self.lowered.model, self.stretch, end, self.count, self._block)
        return self._made[end]

    def laid_out(self, end: int) -> Solution:
        """Its layout."""
        return decide(self.asked(self.shared(self.made(end), None)), "none", "file")

    def best_end(self) -> int:
        """The end whose layout takes the least memory.

        Raises:
            PlanError: there is none, or it saves nothing.
        """
        most = (1 + OVERLAP) * flops_of(self.lowered.model)
        ends = self._ends()
        ends = ends[: bisect.bisect_right(ends, most, key=lambda end: flops_of(self.made(end)))]  # it grows
        live = live_bytes(assign_storage(self.plain.graph).buffers, len(self.plain.graph.nodes))
        least = {end: int(live[end:].max(initial=0)) for end in ends}
        best, found = self.plain.total_bytes, 0
        for end in sorted(ends, key=lambda end: (least[end], end))[:ENDS]:
            if least[end] >= best:
                break
            total = self.laid_out(end).total_bytes
            if total < best:
                best, found = total, end
        if not found:
            why = "they save nothing" if ends else self.stretch.why or f"no image has {self.count} rows to its end"
            raise PlanError(f"the model can't run in {self.count} strips: {why.rstrip('.')}.")
        return found

    def _ends(self) -> list[int]:
        """Places in order where fewer bytes of images are handed on than at those beside them."""
        model, reached = self.lowered.model, len(self.stretch.images)
        nodes = list(model.graph)
        step, change = {node: number for number, node in enumerate(nodes)}, np.zeros(len(nodes) + 2)
        for number, (node, images) in enumerate(zip(nodes, self.stretch.images, strict=False)):
            for value in node.outputs if images else ():
                readers = [step.get(reader, len(nodes)) for reader in value.consumers()]
                last = len(nodes) if value.is_graph_output() else max(readers, default=number)
                change[number + 1] += nbytes(value) or 0
                change[last + 1] -= nbytes(value) or 0
        size = change.cumsum()
        found = [
            end for end in range(1, reached + 1)
            if size[end] > 0 and (end == reached or size[end] < size[end + 1]) and not 0 < size[end - 1] < size[end]
        ]  # fmt: skip
        return [end for end in found if _fewest_rows(self.stretch.exits(model, end)) >= self.count]

    def shared(self, made: ir.Model, workspace: Mapping[str, int] | None) -> Lowered:
        """The model in strips, with each copy's share of what was measured of its node."""
        calibration = self.lowered.calibration
        assert calibration is not None
        height_of = {str(n.name): (static_shape(n.outputs[0]) or ())[ROWS:][:1] for n in self.lowered.model.graph}
        seconds, shares = dict[str, float](), dict[str, int]()
        for node in made.graph:
            name, mark, share = str(node.name), node.metadata_props.get(STRIP, ""), 1.0
            if "." in mark:
                name, (begin, end) = before_chunks(node), map(int, mark.split("."))
                share = (end - begin) / height_of[name][0]
            seconds[str(node.name)] = (calibration.seconds or {}).get(name, 0.0) * share
            shares[str(node.name)] = math.ceil((calibration.workspace or {}).get(name, 0) * share)
        known = {name: size for name, size in shares.items() if size} if workspace is None else workspace
        return dataclasses.replace(self.lowered, model=made, calibration=Calibration(seconds, known, calibration.host))

    def asked(self, made: Lowered) -> Request:
        """What is asked of the model in strips."""
        assert made.calibration is not None
        graph = graph_of(made.model, None, made.calibration.seconds, made.calibration.workspace, (), self.device)
        base = self.request.base + parameter_bytes(made.model, None) - parameter_bytes(self.lowered.model, None)
        return dataclasses.replace(self.request, graph=graph, base=base, stages={}, forced={}, parts=frozenset())

    def described(self, end: int) -> ChunkedBand:
        """What runs in strips, for the plan."""
        cut = [step for step, images in enumerate(self.stretch.images[:end]) if images]
        nodes, graph = list(self.made(end).graph), self.plain.graph
        own = [step for step, node in enumerate(nodes) if "." in node.metadata_props.get(STRIP, "")]
        after = self.laid_out(end).graph
        live = [live_bytes(assign_storage(one).buffers, len(one.nodes)) for one in (graph, after)]
        return ChunkedBand(
            axis=ROWS, first=graph.nodes[cut[0]], last=graph.nodes[cut[-1]], nodes=len(cut), slices=(self.count,),
            runs=len(own), bytes_before=int(live[0][: cut[-1] + 1].max()),
            bytes_after=int(live[1][: own[-1] + 1].max()), seconds=(len(nodes) - len(graph.nodes)) * LAUNCH_SECONDS,
        )  # fmt: skip


def _fewest_rows(values: Sequence[ir.Value]) -> int:
    return min(((static_shape(value) or (0, 0, 0))[ROWS] for value in values), default=0)


def flops_of(model: ir.Model) -> int:
    """Operations of the products in one run of a model; see `memonger.graph.costs.flops`."""
    return sum(map(flops, model.graph))


def _difference(whole: ir.Model, made: ir.Model, exits: Sequence[ir.Value], threads: int) -> float:
    """The largest difference between what both compute of random inputs for the nodes behind; 0 for the same bits."""
    names = [str(value.name) for value in exits]
    results = []
    feeds = feeding.random_feeds(feeding.inputs_of(whole.graph))
    for model in (whole, made):
        written = {str(v.name): v for node in model.graph for v in node.outputs}
        needed = needed_by(written[name] for name in names)
        alone = extract(model, [n for n in model.graph if n in needed], [written[name] for name in names])
        session = ort.make_session(alone, CPU, ort.Options(in_order=True, threads=threads, lend_weights=True))
        given = {str(value.name): feeds[str(value.name)] for value in alone.graph.inputs}
        try:
            results.append(session.run(None, given))
        except Exception as error:  # pybind exceptions share no base class
            raise SessionError(f"strips can't be compared with the whole: {error}") from error
    differences = [0.0]
    for one, other in zip(*results, strict=True):
        if one.tobytes() != other.tobytes():
            differences.append(float(np.abs(one.astype(np.float64) - other).max()) or float(np.finfo(np.float64).tiny))
    return max(differences)
