"""Weights that are copied to a device ahead of the steps that read them, beside kernels; and where a schedule is cut.

A node that copies (`memonger.graph.weight_window.COPY`) takes its turn among the kernels of its session. Within one,
onnxruntime orders streams by values and not by addresses, so that no copy of it may be made beside kernels. But a run
of a session is over when its work is. So the schedule is cut into *partitions*, each of which has a session of its own,
and what the next one reads is copied by somebody else while one runs: nobody but the host orders the two.

In the schedule such a copy is the node that it was, marked with `memonger.ir.marks.AHEAD`, and stands where the
partition begins beside which it may be made. From there until its last reader its bytes are its own: whoever lays out
or checks a plan needs no other rule, and one session may run the whole schedule, copies in order.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from memonger.graph.weight_window import COPY, Read, choose_copies, device_reads, in_order, on_host
from memonger.ir.marks import AHEAD
from memonger.ir.values import nbytes, read_values
from memonger.units import MiB

PARTITIONS = 8
"""The most partitions that a schedule is cut into. With more of them less is copied at a time, so that a budget holds
more weights; each is a session, which costs a launch. No device was asked how long either takes."""

PIECE = 8 * MiB
"""Bytes that are copied at once, at most: one piece is read from the host's memory while the one before is under way.
No device was asked for the best."""


HIDDEN = 0.5
"""Part of what a copy costs that is saved where it is made ahead. No device was asked: kernels may take longer than all
copies beside them, or next to no time."""

PARTS = 16
"""Of the room for values and weights: how many of them are left for copies that begin early is tried, one by one."""

FED_ALIGNMENT = 256
"""Bytes at a multiple of which a weight begins that is fed: what CUDA aligns allocations to."""


class Copy(NamedTuple):
    """A copy that is made ahead.

    Attributes:
        node: What would make it in order.
        begin: Number of the partition before which it may begin, when the one before that is over.
        wait: Number of the partition before which it has to be there.
    """

    node: ir.Node
    begin: int
    wait: int


@dataclass(frozen=True, slots=True)
class CutSchedule:
    """A schedule, cut.

    Attributes:
        spans: Of each partition its first step and the step behind its last. Copies ahead are in none.
        copies: In their order.
        fed: Weights on the device that several partitions read, and that no kernel makes anything of: all read one.
        repeated_bytes: Bytes on the device beside those of the model's weights: of constants that several partitions
            read, each of which has its own; and of what aligns the weights that are fed.
    """

    spans: tuple[tuple[int, int], ...]
    copies: tuple[Copy, ...]
    fed: tuple[ir.Value, ...] = ()
    repeated_bytes: int = 0

    @property
    def staging_bytes(self) -> int:
        """Bytes of the host's memory that copies pass through: one piece that is read, and one under way."""
        return 2 * min(PIECE, max((nbytes(copy.node.outputs[0]) or 0 for copy in self.copies), default=0))


def cut_schedule(model: ir.Model) -> CutSchedule:
    """The partitions of a schedule: one begins behind copies ahead, and where a step reads what the one before has
    begun. Whatever is marked is right: what is read in the partition that it stands before is waited for at once.

    Args:
        model: Its nodes are the schedule.
    """
    spans, copies, pending, begin = list[tuple[int, int]](), dict[ir.Value, Copy](), set[ir.Value](), 0
    step = 0
    for step, node in enumerate(model.graph):
        is_copy = _is_ahead(node)
        reads = () if is_copy else pending.intersection(read_values(node))
        if begin < step and (is_copy or any(copies[value].begin == len(spans) for value in reads)):
            spans.append((begin, step))
            begin = step
        if is_copy:
            begin = step + 1
            copies[node.outputs[0]] = Copy(node, len(spans), len(spans))
            pending.add(node.outputs[0])
        for value in reads:
            copies[value] = copies[value]._replace(wait=len(spans))
            pending.discard(value)
    if begin <= step:
        spans.append((begin, step + 1))
    return CutSchedule(tuple(spans), tuple(copies.values()))


def _is_ahead(node: ir.Node) -> bool:
    """Whether a node copies all bytes of a weight, and may do so ahead."""
    weight = node.inputs[0] if AHEAD in node.metadata_props and node.op_type == COPY and node.inputs else None
    if weight is None or weight.const_value is None or weight.producer() is not None or weight.is_graph_input():
        return False
    size = nbytes(node.outputs[0])
    return bool(size) and size == weight.const_value.nbytes


def copies_ahead(model: ir.Model, host: Collection[str]) -> CutSchedule | None:
    """The partitions of a schedule, with what they have in common; None where nothing is copied ahead in it.

    Args:
        model: As of `cut_schedule`.
        host: As of `memonger.graph.weight_window.device_reads`.
    """
    found = cut_schedule(model) if any(AHEAD in node.metadata_props for node in model.graph) else None
    if found is None or not found.copies or len(found.spans) < 2:
        return None
    nodes, hosted = list(model.graph), on_host(model)
    read = ({value for node in nodes[begin:end] for value in read_values(node)} for begin, end in found.spans)
    times, may_be_fed = Counter(chain.from_iterable(read)), {read.name for read in device_reads(model, host)}
    fed, repeated = list[ir.Value](), 0
    for value in model.graph.initializers.values():
        if value.const_value is None or times[value] < 2 or value.name in hosted:
            continue
        if value.name in may_be_fed:
            fed.append(value)
            repeated += -value.const_value.nbytes % FED_ALIGNMENT
        else:
            repeated += value.const_value.nbytes * (times[value] - 1)
    return replace(found, fed=tuple(fed), repeated_bytes=repeated)


def begins(times: Iterable[tuple[int, int]], live: np.ndarray, room: int) -> list[int]:
    """The steps before which some copies may begin, so that they are made while other steps run.

    The steps are cut into parts that copy about as many bytes each, `PARTITIONS` at most, and a copy may begin with the
    part before its own. Where there is no room for it so long it stays in order, and so does what the first part reads
    if that begins with a copy.

    Args:
        times: Of each copy the step at which it would be made in order, and its bytes; by their steps.
        live: Bytes of values at each step, with all copies in order.
        room: Bytes that they may take.
    """
    times, total = list(times), live.astype(np.int64)
    whole, passed, part, cuts, found = sum(size for _, size in times), 0, -1, [0], list[int]()
    for first, size in times:
        number = passed * (PARTITIONS - 1) // whole
        if number > part and first > cuts[-1]:
            cuts.append(first)
            part = number
        passed += size
        begin = cuts[-2] if len(cuts) > 1 else first
        is_ahead = begin < first and int(total[begin:first].max()) + size <= room
        total[begin:first] += size if is_ahead else 0
        found.append(begin if is_ahead else first)
    return found


def cost(copied: int, ahead: int) -> float:
    """What copies are taken to cost in a run, in bytes that are copied in order: see `HIDDEN`."""
    return copied - HIDDEN * ahead


def choose_copies_ahead(reads: Sequence[Read], live: np.ndarray, nbytes: int) -> tuple[list[Read], bool]:
    """As `choose_copies`, with copies that are made ahead, as far as there is room for them.

    Of choices that leave a part of the room for that, none of it at first, the one that costs least is taken.

    Returns: the weights; and whether they are to be copied ahead, as that costs less than the fewest in order.

    Raises:
        ValueError: they can't take so little, in order.
    """
    best, least, usual = list[Read](), math.inf, math.inf
    for part in range(PARTS):
        try:
            chosen = choose_copies(reads, live, nbytes * (PARTS - part) // PARTS)
        except ValueError:
            if not part:
                raise
            break
        total, times = live.astype(np.int64), in_order(chosen)
        total += sum(read.nbytes for read in reads) - sum(read.nbytes for read in chosen)
        for first, last, read in times:
            total[first : last + 1] += read.resident
        early = begins([(first, read.resident) for first, _, read in times], total, nbytes)
        copied = sum(read.resident for *_, read in times)
        hidden = sum(r.resident for (first, _, r), begin in zip(times, early, strict=True) if begin < first)
        usual = copied if not part else usual
        if cost(copied, hidden) < least:
            best, least = chosen, cost(copied, hidden)
    return best, least < usual
