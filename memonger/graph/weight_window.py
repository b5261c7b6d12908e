"""Weights that stay in a plan's file: which, and how many bytes of them are in memory at a time.

A weight that isn't always in memory is a buffer with a live range: from where it is read ahead of the first step that
reads it until behind the last one. Computing it costs nothing but its bytes, over the disk's speed. A run reads the
weights in the same order each time, so that of more than fits the oldest pages are the next ones needed: keeping what
was read last, as a system's cache does, would read everything again in each run. So some weights are kept in memory for
good, and what is left passes through a window that is read ahead of the steps, and dropped behind them
(`memonger.runtime.weight_reader`).

A weight that products read both as it is and transposed, as a frozen one in a training step, lies in the file in two
packed copies (`memonger.ir.packed`). Each is a buffer of its own: the one is read in the forward pass, the other in the
backward pass, and no step needs both.

What a training step updates in place may pass through the window as well: an optimizer's state, which one update reads
and writes, and where that isn't enough parameters, which the forward and the backward pass read besides. They lie in a
file of the session's own (`memonger.runtime.state_file`), and each pass of an update is written back behind it.

So may a value that a step computes and that is read much later, as by the backward pass: `memonger.ir.marks.IN_FILE`
marks the node that computes it. It has a place of its own in that file, and none in the arena: it is in memory while
steps write it and read it at first, is written behind them, and is read ahead of each later step that reads it.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import Annotated, NamedTuple

import numpy as np
import onnx_ir as ir

from memonger.graph.graph import Graph
from memonger.graph.session_memory import is_packed_at_load, packer_of
from memonger.ir import training_roles
from memonger.ir.decoding import LARGEST, AtLeast
from memonger.ir.marks import IN_FILE
from memonger.ir.operators import operator_name
from memonger.ir.packed import is_packing, packed_sizes, reads_transposed
from memonger.ir.packing import is_read_once, is_widened, number
from memonger.ir.save import PAGE
from memonger.ir.tensors import UNSIZED, inner_tensors, sizes_of_parts
from memonger.ir.values import dense, nbytes, static_shape
from memonger.units import KiB, format_size

SMALLEST = 64 * KiB
"""Bytes of a weight from which it may stay in the file: as many as the system maps at once around a page."""


@dataclass(frozen=True, slots=True)
class WeightWindow:
    """Weights that stay in the plan's file, and what stays in one of the session's: what a training step updates, and
    what it computes for steps much later.

    Attributes:
        nbytes: The most bytes of their pages that are in memory at a time, those read ahead included, where steps take
            longer than the reader's pause between two looks (`memonger.runtime.weight_reader.PAUSE`).
        weights: Their names, in the order in which steps read them. A plan's training roles say what is updated.
    """

    nbytes: Annotated[int, AtLeast(1, LARGEST)]
    weights: tuple[str, ...]


class Read(NamedTuple):
    """A form in which steps read a weight that may stay in the file: from which step to which, and its bytes.

    Between two of its ``ranges`` steps read other weights that may stay there: it is dropped, and read again, as where
    nodes run slice after slice. ``nbytes`` are what a plan counts for it where no weight stays in the file,
    ``resident`` those of its pages. ``transposed`` says of the file's packed copy which of the two it is, and is None
    of the weight as the model has it. ``whole`` is False of a table of which steps look up rows, and of what kernels
    read when a session is made and never again. ``own`` are bytes that kernels have of it in memory of the process,
    wherever it stays. Of what is ``updated`` steps write the last of the ranges as well. What is ``made`` steps compute
    in the first of them: it is always in the file.
    """

    name: str
    ranges: tuple[tuple[int, int], ...]
    nbytes: int
    resident: int
    transposed: bool | None
    whole: bool
    own: int = 0
    updated: bool = False
    made: bool = False

    @property
    def kept(self) -> int:
        """Bytes of it in memory where it is kept: as kernels read it, which may be more than the initializer has."""
        return self.resident if self.transposed is not None or not self.resident or not self.nbytes else self.nbytes


def weight_reads(model: ir.Model, graph: Graph | None = None) -> list[Read]:
    """The weights that may stay in a file, in each form in which steps read them, in the order in which they do.

    Left out are weights that a kernel packs into memory of its own when a session is made (`why_kept`), those of bodies
    (Loop, If) and outputs, and small ones.

    Args:
        model: Lowered, or planned.
        graph: Its graph, which knows what a training step writes over; None leaves out what is updated.
    """
    steps = {node: step for step, node in enumerate(model.graph)}
    found = [] if graph is None else [*_updated(model, graph), *_made(model, graph)]
    for value, tensor in _large(model):
        sizes = packed_sizes(value)
        if packer_of(value) is not None or (not sizes and is_packed_at_load(value)):
            continue
        by_form = dict[bool | None, list[tuple[ir.Node, int]]]()
        for node, index in value.uses():
            form = reads_transposed(node) if sizes and is_packing(node, index) else None
            by_form.setdefault(form, []).append((node, index))
        for form, readers in by_form.items():
            rows = [_rows_bytes(node, index, value) for node, index in readers] if form is None else [None]
            resident = _pages(tensor.nbytes if form is None else sizes[form])
            if None not in rows:
                resident = min(resident, sum(one for one in rows if one is not None))
            counted = 0 if form is None and sizes else tensor.nbytes
            own = 2 * tensor.nbytes if any(is_widened(node, index) for node, index in readers) else 0
            read = Read(str(value.name), (), counted, resident, form, None in rows, own)
            found.append((read, sorted({steps[node] for node, _ in readers}), LARGEST))
    return _in_ranges(found)


def _large(model: ir.Model) -> Iterator[tuple[ir.Value, ir.TensorProtocol]]:
    """Weights, and their tensors, that are large enough, and that nothing reads but nodes of the graph itself."""
    steps, inside = set(model.graph), sizes_of_parts(model.graph)
    for value in model.graph.initializers.values():
        tensor, readers = value.const_value, value.consumers()
        if tensor is None or tensor.dtype in UNSIZED or tensor.nbytes < SMALLEST or not readers or value in inside:
            continue
        if steps.issuperset(readers) and not (value.is_graph_output() or value.is_graph_input()):
            yield value, tensor


def _in_ranges(found: Iterable[tuple[Read, list[int], int]]) -> list[Read]:
    """Reads with their ranges, in order: of each is given at which steps it is read, and the first that writes it."""
    place = {step: number for number, step in enumerate(sorted({step for _, at, _ in found for step in at}))}
    reads = []
    for read, at, written in found:
        until = bisect_left(at, written)  # what an update reads, writes, and reads again stays for that long
        breaks = [n for n in range(1, len(at)) if n < until and place[at[n]] > place[at[n - 1]] + 1]
        pieces = [at[begin:end] for begin, end in pairwise([0, *breaks, len(at)])]
        reads.append(read._replace(ranges=tuple((piece[0], piece[-1]) for piece in pieces)))
    return sorted(reads, key=lambda read: (read.ranges, read.name))


def device_reads(model: ir.Model, host: Collection[str]) -> list[Read]:
    """The same of a model for a device: the weights that may lie in the host's memory.

    Left out are those of bodies and outputs, small ones, and what kernels keep a copy of their own of, or read on the
    host.

    Args:
        model: Lowered for the device.
        host: Names of values that lie on the host.
    """
    steps, found = {node: step for step, node in enumerate(model.graph)}, []
    for value, tensor in _large(model):
        if all(_reads_device_memory(node, host) for node in value.consumers()):
            read = Read(str(value.name), (), tensor.nbytes, tensor.nbytes, None, True)
            found.append((read, sorted(steps[node] for node in value.consumers()), LARGEST))
    return _in_ranges(found)


def _reads_device_memory(node: ir.Node, host: Collection[str]) -> bool:
    """Whether a node runs on the device, with a kernel that reads a weight as it reads any other value."""
    is_known = node.op_type not in _KEEPING if not node.domain else operator_name(node) in _FUSED
    return is_known and node.op_type != COPY and not any(value.name in host for value in node.outputs)


_KEEPING = {"GRU", "LSTM", "RNN"}
"""Their CUDA kernels keep a constant's copy of their own in cuDNN's form, made once."""

_FUSED = {"com.microsoft::FusedConv", "com.microsoft::FusedMatMul"}
"""Those of onnxruntime's own operators whose CUDA kernels make nothing of a weight when a session is made."""

COPY = "MemcpyFromHost"
"""onnxruntime's operator that copies a value from the host's memory to the device's, as a node like any other."""


def on_host(model: ir.Model) -> dict[str, int]:
    """The weights of a device's model that lie in the host's memory, as nothing but copies reads them: their bytes."""
    weights = model.graph.initializers.values()
    copied = (v for v in weights if v.consumers() and all(node.op_type == COPY for node in v.consumers()))
    return {str(v.name): v.const_value.nbytes for v in copied if v.const_value is not None}


def copied_bytes(model: ir.Model) -> int:
    """Bytes of weights that a run copies from the host's memory."""
    weights = model.graph.initializers
    names = (str(node.inputs[0].name) for node in model.graph if node.op_type == COPY and node.inputs[0] is not None)
    return sum(nbytes(weights[name]) or 0 for name in names if name in weights)


def choose_copies(reads: Sequence[Read], live: np.ndarray, nbytes: int) -> list[Read]:
    """The weights that lie in the host's memory, so that all others, values and copies take no more than ``nbytes``.

    A copy is a value: it is there while steps read it, whatever else is. So a weight that is read at the worst step may
    as well be kept, and the window has no place of its own. Those that are read most often are kept first, then large
    ones.

    Args:
        reads: `device_reads`.
        live: Bytes of values at each step.

    Raises:
        ValueError: they can't take so little.
    """
    total = live.astype(np.int64)
    for first, last, read in in_order(reads):
        total[first : last + 1] += read.resident
    if total.max(initial=0) > nbytes:
        raise ValueError(f"{nbytes} are below {total.max(initial=0)}")
    left = list[Read]()
    for read in sorted(reads, key=lambda read: (-len(read.ranges), -read.resident, read.name)):
        with_it = total + read.resident
        for first, last in read.ranges:
            with_it[first : last + 1] -= read.resident
        if with_it.max() <= nbytes:
            total = with_it
        else:
            left.append(read)
    return sorted(left, key=lambda read: (read.ranges, read.name))


def _updated(model: ir.Model, graph: Graph) -> list[tuple[Read, list[int], int]]:
    """What a training step writes over in place, with the steps that read or write it, and the first that writes it.

    Its parts and views are it, and so is its new content, which other nodes of an update read.
    """
    roles = training_roles.read(model, str(model.graph.name))
    names = set() if roles is None else set(roles.updates)
    if not names:
        return []
    whole = {part: value for part, value, _ in graph.kept}
    whole |= {value: value for value in range(len(graph.values)) if graph.values[value] in names}
    new_of = {old: new for pairs in graph.updates for old, new in pairs}
    torn = {new_of[value] for part, value, _ in graph.kept if part in new_of and value in new_of}
    unmoved = torn | {part for part, *_ in graph.kept}  # which no node has to write: they are there
    whole |= {new: whole[old] for old, new in new_of.items() if old in whole}
    steps, firsts = dict[int, set[int]](), dict[int, int]()
    for step, (reads, writes, updates) in enumerate(zip(graph.reads, graph.writes, graph.updates, strict=True)):
        if not unmoved.isdisjoint(writes):
            continue
        for value in {whole[one] for one in (*reads, *writes) if one in whole}:
            steps.setdefault(value, set()).add(step)
        for old, _ in updates:  # one that reads what it writes over may begin a range
            firsts.setdefault(whole.get(old, old), step + (old in reads))
    return [
        (Read(graph.values[value], (), size, _pages(size), None, True, updated=True), sorted(steps[value]), step)
        for value, step in firsts.items()
        if graph.values[value] in names and (size := graph.sizes[value]) >= SMALLEST
    ]


def in_file(model: ir.Model) -> dict[str, int]:
    """The values of a model that wait in a file of the session's for the steps that read them, and their bytes.

    Those are the large outputs of nodes that are marked so (`memonger.ir.marks.IN_FILE`), but what the model returns.
    """
    outputs = set(model.graph.outputs)
    marked = (value for node in model.graph if IN_FILE in node.metadata_props for value in node.outputs)
    sizes = {str(v.name): nbytes(v) or 0 for v in marked if v.name and v not in outputs and dense(v)}
    return {name: size for name, size in sizes.items() if size >= SMALLEST}


def _made(model: ir.Model, graph: Graph) -> list[tuple[Read, list[int], int]]:
    """What a step computes that waits in a file, with the steps that write or read it."""
    sizes = in_file(model)
    return [
        (
            Read(name, (), 0, _pages(sizes[name]), None, True, made=True),
            sorted({graph.producer[value], *graph.readers[value]}),
            LARGEST,
        )
        for value, name in enumerate(graph.values)
        if name in sizes and not graph.planned[value] and value not in graph.persistent
    ]


def why_kept(model: ir.Model, least: int, host: Collection[str] | None = None) -> str:
    """Sentences on weights that can't stay in the file, a reason each where that is true of ``least`` bytes of them.

    Args:
        model: As of `weight_reads`, or of `device_reads`.
        least: As said.
        host: As of `device_reads`, whose weights may lie in the host's memory; None: the model isn't for a device.
    """
    steps, packed, in_bodies, small = set(model.graph), dict[str, int](), dict[str, int](), dict[str, int]()
    for value in model.graph.initializers.values():
        size, readers = nbytes(value) or 0, [node for node in value.consumers() if node in steps]
        kept_by = (node for node in readers if host is not None and not _reads_device_memory(node, host))
        if (packer := packer_of(value) if host is None else next(kept_by, None)) is not None:
            packed[f"'{value.name}' ({operator_name(packer)})"] = size
        elif len(readers) < len(value.consumers()):
            in_bodies[f"'{value.name}'"] = size
        elif size < SMALLEST:
            small[f"'{value.name}'"] = size
    in_bodies |= {f"'{one.name}'": one.nbytes for one in inner_tensors(model) if one.dtype != ir.DataType.STRING}
    where, kernels = "a plan's file", "kernels pack them into memory of their own when a session is made"
    if host is not None:
        where, kernels = "the host's memory", "kernels keep a form of their own of them, or read them on the host"
    reasons = {
        kernels: packed,
        "bodies (If, Loop, Scan) read them": in_bodies,
        f"they are below {format_size(SMALLEST)} each": small,
    }
    said = ""
    for reason, sizes in reasons.items():
        if sizes and sum(sizes.values()) >= least:
            others = f" and {len(sizes) - 1} more" if len(sizes) > 1 else ""
            which = f"{max(sizes, key=lambda name: sizes[name])}{others}"
            said += f" {format_size(sum(sizes.values()))} of its weights can't stay in {where}, as {reason}: {which}."
    return said


def in_order(reads: Iterable[Read]) -> list[tuple[int, int, Read]]:
    """Every time that a weight is read: the first step, the last one, and the weight; in the order of the steps."""
    times = ((first, last, read) for read in reads for first, last in read.ranges)
    return sorted(times, key=lambda time: (time[0], time[1], time[2].name))


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _rows_bytes(node: ir.Node, index: int, value: ir.Value) -> int | None:
    """Bytes of pages that a node touches which looks up rows of a table; None of any other node."""
    if is_read_once(node, index):
        return 0
    tables, axis = _TABLES.get(operator_name(node), ((), ""))
    indices = node.inputs[1] if index in tables and number(node, axis, 0) == 0 else None
    given, rows = None if indices is None else static_shape(indices), 0 if value.shape is None else value.shape[0]
    if given is None or not isinstance(rows, int) or not rows:
        return None
    row = max(1, (nbytes(value) or 0) // rows)
    return prod(given) * (-(-row // SMALLEST) + 1) * SMALLEST


_TABLES = {"Gather": ((0,), "axis"), "com.microsoft::GatherBlockQuantized": ((0, 2, 3), "gather_axis")}
"""Of operators that look up rows: which inputs they look them up in, and the attribute that names the axis."""


def largest_at_once(reads: Sequence[Read]) -> int:
    """The most bytes that are in memory at once where nothing is kept: each weight from the read before it on, while
    which it is read ahead, until the last step that reads it.

    That also holds what a step has read and the next one has, where it is seen late that the step is over.
    """
    changes, begin = dict[int, int](), 0
    for first, last, read in in_order(reads):
        changes[begin] = changes.get(begin, 0) + read.resident
        changes[last + 1] = changes.get(last + 1, 0) - read.resident
        begin = first
    most = now = 0
    for step in sorted(changes):
        now += changes[step]
        most = max(most, now)
    return most


def least_bytes(reads: Sequence[Read]) -> int:
    """The most bytes of weights in memory at once where nothing is kept, what kernels make of them included."""
    return sum(read.own for read in reads) + largest_at_once(reads)


def choose_window(reads: Sequence[Read], nbytes: int) -> WeightWindow | None:
    """The weights that stay in the file, so that those kept in memory and the window take no more than ``nbytes``.

    Of all choices that are tried it is the one that reads and writes the fewest bytes in a run. A choice keeps all
    weights above some size, as these make the window large, and all that are read more often than some number of times;
    and of the others as many as there is room for, spread evenly over the steps, so that reading doesn't fall behind in
    one place and wait in another. A weight is kept in all of its forms or in none.

    What steps compute for later ones (`Read.made`) is in the file whatever is chosen.

    Returns: None where all fit.

    Raises:
        ValueError: they can't take so little; it is below `largest_at_once`.
    """
    made, reads = [read for read in reads if read.made], [read for read in reads if not read.made]
    weights, passing = _by_weight(reads), largest_at_once(made)
    if max(sum(read.nbytes for read in reads), sum(read.kept + read.own for read in reads)) + passing <= nbytes:
        return WeightWindow(passing, tuple(_by_weight(made))) if made else None
    whole, nbytes = sum(read.kept for read in reads), nbytes - sum(read.own for read in reads)
    best: tuple[int, list[Read]] | None = None
    sizes = sorted({read.resident for read in reads}, reverse=True)
    times = {name: sum(len(read.ranges) for read in forms) for name, forms in weights.items()}
    for most, often in product(sizes, sorted(set(times.values()), reverse=True)):
        smaller = [
            forms
            for name, forms in weights.items()
            if max(read.resident for read in forms) <= most and times[name] <= often
        ]
        inside = _reads_of([*smaller, made])
        spare = nbytes - whole + sum(read.kept for read in inside if not read.made)
        least = largest_at_once(inside)
        if spare < least:
            continue
        # Without some of them others come next to each other: that much the window grows at most
        for room in {spare - least, max(0, spare - least - most)}:
            left = _reads_of([*_spread(smaller, room), made])
            held = whole - sum(read.kept for read in left if not read.made) + largest_at_once(left)
            moved = sum(bytes_read(read) + bytes_written(read) for read in left)
            if left and held <= nbytes and (best is None or moved < best[0]):
                best = moved, left
    if best is None:
        raise ValueError(f"{nbytes} are below {largest_at_once(_reads_of([reads, made]))}")
    return WeightWindow(max(1, largest_at_once(best[1])), tuple(_by_weight(best[1])))


def _by_weight(reads: Iterable[Read]) -> dict[str, list[Read]]:
    """The forms of each weight, by its name."""
    found = dict[str, list[Read]]()
    for read in reads:
        found.setdefault(read.name, []).append(read)
    return found


def _reads_of(weights: Iterable[Sequence[Read]]) -> list[Read]:
    """All forms of some weights, in the order of `weight_reads`."""
    return sorted((read for forms in weights for read in forms), key=lambda read: (read.ranges, read.name))


def bytes_read(read: Read) -> int:
    """Bytes of a form of a weight that a run reads from the file: of what steps compute each time but the first."""
    return read.resident * (len(read.ranges) - read.made)


def bytes_written(read: Read) -> int:
    """Bytes of it that a run writes to the file: of an update what it has read, and what steps compute."""
    return read.resident if read.updated or read.made else 0


def _spread(weights: Sequence[list[Read]], room: int) -> list[list[Read]]:
    """Those that aren't kept, where ``room`` bytes of them are, evenly along the steps."""
    sizes = [sum(read.kept for read in forms) for forms in weights]
    whole, due, left = sum(sizes), 0, list[list[Read]]()
    for forms, size in zip(weights, sizes, strict=True):
        due += size * room
        if due >= size * whole > 0:
            due -= size * whole
        else:
            left.append(forms)
    return left


def resident_bytes(reads: Sequence[Read], window: WeightWindow, parameters: int) -> int:
    """Bytes of a model's weights that are in memory at most, of ``parameters`` bytes in all."""
    named = set(window.weights)
    kept = sum(read.kept for read in reads if read.name not in named and not read.made)
    return parameters + sum(read.own - read.nbytes for read in reads) + kept + window.nbytes


def what_is_wrong(reads: Sequence[Read], window: WeightWindow) -> str:
    """Why a window can't be of a model; empty where it can."""
    known, named = _by_weight(reads), set(window.weights)
    unknown = next((name for name in window.weights if name not in known), None)
    if unknown is not None:
        return f"'{unknown}' is no weight that can stay in the file"
    if not named:
        return "it has a window of weights, and none that stays in the file"
    left_out = next((read.name for read in reads if read.made and read.name not in named), None)
    if left_out is not None:
        return f"'{left_out}' waits in a file, and isn't in its window"
    if [name for name in known if name in named] != list(window.weights):
        return "the weights of its window aren't in the order in which steps read them"
    inside = [read for read in reads if read.name in named]
    needed, most = largest_at_once(inside), sum(read.resident for read in inside)
    if needed > window.nbytes:
        return f"its window of weights has {window.nbytes} bytes where {needed} are read"
    too_large = window.nbytes > max(1, most)
    return f"its window of weights has {window.nbytes} bytes, and what passes {most}" if too_large else ""
