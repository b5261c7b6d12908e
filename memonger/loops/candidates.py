"""What may run in loops: candidates, each with an estimate of what it needs and how much longer it takes.

Along an axis of the inputs, ranges of nodes in so many slices, or in a loop with fine slices within one with coarser;
images by rows (`memonger.loops.rows`); regions that are cut along axes of their own (`memonger.tiling.chunk_regions`),
as an image encoder's attention, or the loss over a large vocabulary with its gradients along the words.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import onnx_ir as ir

from memonger.ir.marks import OVERLAP
from memonger.ir.operators import operator_name
from memonger.ir.values import static_shape
from memonger.loops.rows import BLOCK, SEQUENCES_OPSET, Ends, in_steady_slices, with_row_loops
from memonger.loops.writer import NotInLoopsError, with_loops
from memonger.tiling.axes import LARGER, row_rules
from memonger.tiling.candidates import ToSlice
from memonger.tiling.chunk_regions import STRIDE
from memonger.tiling.chunking import ROUNDED, ChunkSearch
from memonger.tiling.cutting import Refusal, Slicing
from memonger.tiling.overlap import overlapping
from memonger.tiling.row_search import RowSearch
from memonger.tiling.slice_check import EXACT, SliceCheck, copies_by_node
from memonger.tiling.slices import Band, SliceStage, row_band
from memonger.tiling.stages import MOST_SLICES, StageSearch, StepSpan
from memonger.tiling.writer import in_slices
from memonger.words import option

ITERATION_SECONDS = 3e-5
"""What a loop does around the nodes of its body, each time."""

MOVING_SECONDS = 2e-10
"""What a body takes for each byte of which it cuts or joins a part: on one core, as it is all copied three times."""

PLACES = 8
"""A loop may end at so many steps of a range, those before which fewest bytes cross."""

_PARTS = 6
"""In so many slices nodes are run alone that may give other last bits of rows."""

APART = 4
"""Slices before and behind a Scan may stand apart where so many times its weights are no more than is needed."""

_FUSED = frozenset(("Conv", "ConvTranspose", "Gemm", "MatMul", "BatchNormalization"))
_HEAVY = frozenset(
    (
        *_FUSED, "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "Flatten", "Reshape", "Transpose",
        "Concat", "ReduceMean", "LayerNormalization", "LSTM", "GRU", "RNN", "Resize", "DepthToSpace", "Split",
    )
) - {"BatchNormalization"}  # fmt: skip
"""Operators that onnxruntime doesn't fuse into what computes their input, as it does activations."""


@dataclass(frozen=True, slots=True)
class Loop:
    """Nodes that run in a loop.

    Attributes:
        first: Name of the first node.
        last: Name of the last.
        nodes: How many.
        slices: In how many slices, of all the surrounding loops together.
    """

    first: str
    last: str
    nodes: int
    slices: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """Bands that run in loops.

    Attributes:
        bytes: What the model is estimated to need then.
        seconds: How much longer it is estimated to take.
        write: Gives the model in loops, or raises a `NotInLoopsError`.
        loops: What runs in them.
        is_nested: Whether one of them stands in another.
        twice: Bytes of weights that it holds beside the model's once loaded: in a loop and in what stands around it.
        forms: Gives forms of the written model, in groups that compute the same way.
    """

    bytes: float
    seconds: float
    write: Callable[[], ir.Model]
    loops: tuple[Loop, ...]
    is_nested: bool = False
    twice: int = 0
    forms: Callable[[ir.Model], Iterator[Sequence[ir.Model]]] = lambda model: iter([[model]])


def along(axis: StageSearch, open_size: str) -> Iterator[Candidate]:
    """All that can run in so many slices, and of each range two loops, the inner one finer.

    Of an open size slices of one.
    """
    size = axis.axes.size
    if open_size and axis.axis:
        return
    counts = [count for count in range(2, min(size, MOST_SLICES) + 1) if size % count == 0]
    counts = [count for count in counts if not open_size or count == size]
    for count in counts:
        bands = [_band(size, (span.begin, span.end, count)) for span in axis.ranges]
        yield _candidate(axis, bands, open_size)
    nodes = list(axis.lowered.model.graph)
    for number, span in enumerate(axis.ranges):
        for place, fine in itertools.product(_places(nodes, span), counts):
            for coarse in [1, *(count for count in counts if count < fine and fine % count == 0)]:
                stages = [(span.begin, place, fine), *([(place, span.end, coarse)] if coarse > 1 else [])]
                others = [_band(size, (o.begin, o.end, fine)) for n, o in enumerate(axis.ranges) if n != number]
                bands = sorted([*others, _band(size, *stages)], key=lambda band: band.stages[0].begin)
                yield _candidate(axis, bands, open_size)


def in_regions(search: ChunkSearch, check: SliceCheck | None, allow_rounding: bool = False) -> Iterator[Candidate]:
    """Regions in loops, each along an axis of its own: the worst one, some more, or all.

    Args:
        search: Of the model.
        check: Finds nodes that round otherwise on slices: they stay whole. None: none does, or it doesn't matter.
        allow_rounding: Whether products may be summed up in slices finer than the steps that kernels sum up in.
    """
    step = search.regions_without({})
    if check is not None:
        finest = [_region_band(span, levels[-1]) for span in step.ranges if (levels := _equal_levels(span, False))]
        refused = dict.fromkeys(_different(step.lowered.model, finest, step.axes.nodes, check), ROUNDED)
        step = search.regions_without(refused) if refused else step
    spans = [(span, levels) for span in step.ranges if (levels := _equal_levels(span, allow_rounding))]
    spans = [one for one in spans if _can_be_in_loops(step, _region_band(one[0], one[1][0]))]
    needs = {
        span.begin: max(span.needed(n, span.end, 1, 0.0) for n in range(span.begin, span.end)) for span, _ in spans
    }
    spans.sort(key=lambda one: (-needs[one[0].begin], one[0].begin))
    for count in dict.fromkeys((*(1 << power for power in range(len(spans).bit_length())), len(spans))):
        for place in range(max((len(levels) for _, levels in spans[:count]), default=0)):
            bands = [_region_band(span, levels[min(place, len(levels) - 1)]) for span, levels in spans[:count]]
            yield _candidate(step, sorted(bands, key=lambda band: band.begin), "")


def _equal_levels(span: StepSpan, allow_rounding: bool) -> list[tuple[int, ...]]:
    """Bounds of slices of one size, the coarsest first."""
    found = (replace(span, stride=0) if allow_rounding else span).levels[1:]
    return [bounds for bounds in found if len({end - begin for begin, end in itertools.pairwise(bounds)}) == 1]


def _can_be_in_loops(step: StageSearch, band: Band) -> bool:
    """Whether a loop can take a band."""
    try:
        with_loops(step.lowered.model, step.axes, [band])
    except NotInLoopsError:
        return False
    return True


def _region_band(span: StepSpan, bounds: tuple[int, ...]) -> Band:
    return Band((SliceStage(span.begin, span.end, bounds),))


def _band(size: int, *stages: tuple[int, int, int]) -> Band:
    return Band(tuple(SliceStage(a, b, tuple(size * n // count for n in range(count + 1))) for a, b, count in stages))


def _places(nodes: Sequence[ir.Node], span: StepSpan) -> list[int]:
    """Steps before which a loop may end: where fewest bytes cross of those that no fusion crosses."""
    clean = _may_end(nodes)
    places = [step for step in range(span.begin + 1, span.end) if clean[step]]
    parts = [places[len(places) * n // PLACES : len(places) * (n + 1) // PLACES] for n in range(PLACES)]
    return [min(part, key=lambda step: (span.crossing[step - span.begin], step)) for part in parts if part]


def _may_end(nodes: Sequence[ir.Node]) -> list[bool]:
    """Before which steps a loop may end: no fusion crosses there."""
    step_of, clean = {node: step for step, node in enumerate(nodes)}, np.ones(len(nodes) + 1, bool)
    for step, node in enumerate(nodes):
        for user in (user for value in node.outputs for user in value.consumers()):
            is_fused = user.op_type not in _HEAVY and not (user.op_type == "Add" and node.op_type not in _FUSED)
            is_fused = is_fused or _is_in_blocks_only_there(node, user)
            if is_fused and user in step_of:
                clean[step + 1 : step_of[user] + 1] = False
    return [bool(one) for one in clean]


def _is_in_blocks_only_there(node: ir.Node, user: ir.Node) -> bool:
    """Whether an image that is made larger is laid out in blocks by the convolution that makes it, and by nothing else.

    Without, that takes three times as long.
    """
    dims = static_shape(node.outputs[0]) or ()
    is_larger = user.op_type in LARGER and node.op_type == "Conv"
    return is_larger and len(dims) == 4 and dims[1] % BLOCK > 0


def _candidate(axis: StageSearch, bands: Sequence[Band], open_size: str) -> Candidate:
    """With what it is estimated to need, and how much longer to take."""
    alive, seconds = np.array(axis.live, float), axis.more_seconds(bands)
    spans = {span.begin: span for span in axis.ranges}
    for band in bands:
        span, end = spans[band.stages[0].begin], band.stages[-1].end
        coarse = len(band.stages[-1].slices) - 1
        for stage in band.stages:
            count = len(stage.slices) - 1
            crossing = span.crossing[stage.end - span.begin] if stage.end < end else 0.0
            seconds += count * ITERATION_SECONDS
            for step in range(stage.begin, stage.end):
                alive[step] = span.needed(step, end, count, crossing / coarse)
    stages, nodes, loops = [one for band in bands for one in band.stages], axis.nodes, list[Loop]()
    for stage in stages:
        own = [step for step in range(stage.begin, stage.end) if isinstance(axis.axes.nodes[step], Slicing)]
        if own:
            first, last = nodes[own[0]].name, nodes[own[-1]].name
            loops.append(Loop(str(first), str(last), len(own), len(stage.slices) - 1))
    write = partial(with_loops, axis.lowered.model, axis.axes, tuple(bands), open_size)
    is_nested = any(len(band.stages) > 1 for band in bands)
    return Candidate(float(alive.max(initial=0.0)), seconds, write, tuple(loops), is_nested)


def in_rows(job: ToSlice, check: SliceCheck | None, in_turns: bool) -> Iterator[Candidate]:
    """Bands whose images run in slices of rows, as they are estimated for a plan, without nodes that round otherwise.

    What slices share is kept; or some rows are computed again, for few slices and for more. A loop has the lines that
    it takes and gives; a Scan those that it began with, too, and those at its end. Either has its results as it took
    them slice by slice, and as the next node reads them.

    Args:
        job: The model.
        check: Finds nodes that round otherwise on slices: they stay whole. None: none does, or it doesn't matter.
        in_turns: Whether slices before and behind those that do the same may be turns of the loop.
    """
    in_turns = in_turns and (job.lowered.model.graph.opset_imports.get("") or 0) >= SEQUENCES_OPSET
    uncut = dict.fromkeys(rounded_rows(job, check) if check is not None else (), ROUNDED)
    rules = row_rules(job.lowered.model, uncut)
    forms = overlapping(job.lowered.model, rules, job.product_seconds, MOVING_SECONDS)
    known = dict[tuple[Band, frozenset[int]], Band | None]()

    def fitted(band: Band, own: Mapping[ir.Node, Slicing]) -> Band | None:
        """The band in slices that a loop can run, worked out once for all forms in which its nodes do the same."""
        key = band, frozenset(number for number, node in enumerate(own) if OVERLAP in node.metadata_props)
        if key not in known:
            known[key] = in_steady_slices(band, own)
        return known[key]

    for model, lines in itertools.product(forms, (4, 2)[: 1 + in_turns]):
        own = replace(job, lowered=replace(job.lowered, model=model))
        search = RowSearch(own, rules, lines=lines, results=2, moving=MOVING_SECONDS, ends=_may_end, fitted=fitted)
        yield from _in_rows(search, is_scan=lines == 4)


def _in_rows(search: RowSearch, is_scan: bool) -> Iterator[Candidate]:
    """The same of one search, in one of both loops."""
    model, nodes, rules = search.lowered.model, search.nodes, search.how
    for bands, parts in search.ways({}, most_copies=math.inf):
        loops, weights = list[Loop](), dict[ir.Value, int]()
        for band in bands:
            own = [nodes[step] for step in range(band.begin, band.end) if isinstance(rules[step], Slicing)]
            loops.append(Loop(str(own[0].name), str(own[-1].name), len(own), band.counts[0]))
            read = (value for node in own for value in node.inputs if value is not None)
            weights |= {value: value.const_value.nbytes for value in read if value.const_value is not None}
        need, twice, seconds = max(p.bytes for p in parts), sum(weights.values()), math.fsum(p.seconds for p in parts)
        forms: list[Ends] = ["nodes", "apart"] if is_scan else ["turns"]
        for ends in forms[: 1 + (APART * twice <= need)]:
            write = partial(with_row_loops, model, bands, ends)
            yield Candidate(need, seconds, write, tuple(loops), twice=twice * (1 + (ends != "nodes")))


def rounded(axis: StageSearch, check: SliceCheck) -> Iterator[str]:
    """Names of nodes that give other last bits on the finest slices than whole, each run alone.

    Of convolutions that is known: their algorithm doesn't depend on the batch.
    """
    count = max(n for n in range(1, min(axis.axes.size, MOST_SLICES) + 1) if axis.axes.size % n == 0)
    if axis.ranges and count > 1:
        bands = [_band(axis.axes.size, (span.begin, span.end, count)) for span in axis.ranges]
        yield from _different(axis.lowered.model, bands, axis.axes.nodes, check)


def rounded_rows(job: ToSlice, check: SliceCheck) -> Iterator[str]:
    """Names of nodes that give other last bits of some rows than of all, each run alone, but for convolutions."""
    model, bands = job.lowered.model, list[Band]()
    rules = row_rules(model)
    for step, (node, rule) in enumerate(zip(model.graph, rules, strict=True)):
        if isinstance(rule, Slicing) and operator_name(node) not in EXACT | {"Conv"}:
            bands.append(row_band(step, step + 1, {node: rule}, -(-rule.height // _PARTS)))
    yield from _different(model, bands, rules, check)


def _different(
    model: ir.Model, bands: Sequence[Band], rules: Sequence[Slicing | Refusal | None], check: SliceCheck
) -> Iterator[str]:
    """Names of a model's nodes that give other last bits in bands."""
    made = in_slices(model, bands, rules)
    copies = copies_by_node(made.copies)
    for node, rule in zip(model.graph, rules, strict=True):
        own = copies.get(str(node.name)) if operator_name(node) not in EXACT | {"Conv"} else None
        sums = () if not isinstance(rule, Slicing) else rule.sums
        if own and check.see((model, node), made.model, own, sums).difference:
            yield str(node.name)


def why_not(model: ir.Model, *, trains: bool) -> str:
    """Why no node can be cut along an axis of an input; of a training step why there is no region."""
    if trains:
        return (
            "no region of its step where most memory is has slices that are alike (sums over slices keep their bits "
            f"where each has a multiple of {STRIDE} elements)"
        )
    sizes = [dim for value in model.graph.inputs for dim in (value.shape or ())]
    if all(not isinstance(dim, int) or dim <= 1 for dim in sizes[:1]):
        rows = next((str(rule) for rule in row_rules(model) if isinstance(rule, Refusal)), "it reads no images")
        return (
            f"its batch is one; give it the size that it is to run with ({option('batch', 16)}); "
            f"and by rows it can't be cut: {rows.rstrip('.')}"
        )
    return "no node that reads an input can run on slices of it"
