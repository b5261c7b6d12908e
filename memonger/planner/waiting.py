"""Values of a training step that wait in a file for the backward pass: the choice beside computing them again.

What is dropped to be computed again costs its nodes' seconds; what waits in a file costs its bytes, written once and
read once, over the speed of the disk (`memonger.runtime.disk.seconds_a_byte`). So a value whose node takes longer than
that for each byte is marked (`memonger.ir.marks.IN_FILE`): it takes no place in the arena, and the search decides about
all others as ever, with as many bytes fewer to save. Of several such jobs the plan that is estimated to take the fewest
seconds is taken, with nothing in a file among them.

The estimate adds the disk's seconds to those of the nodes, though it works beside them: a plan with values in a file is
chosen where it takes less even so, or where there is no other.
"""

import dataclasses
import math
import tempfile
from collections.abc import Collection, Iterator

import numpy as np

from memonger.devices import Device
from memonger.graph.graph import Graph
from memonger.graph.weight_window import largest_at_once, weight_reads
from memonger.ir.marks import IN_FILE
from memonger.lowering.lowered import Lowered
from memonger.plan import Plan
from memonger.runtime import disk
from memonger.schedule import Request
from memonger.units import MiB, format_size

LEAST = 1 * MiB
"""Bytes of a value from which it may wait in a file."""

EARLY = 8
"""Steps behind the one that makes a value in which the forward pass reads it: then it leaves memory soon."""

SHARES = (1.0, 0.6, 0.3)
"""Of the bytes that are lacking, as many are left in the file; the search finds the others."""

WORTH = 0.25
"""Where computing again takes less than this share of what the disk takes for all that is lacking, nothing is tried."""


def choices(request: Request, seconds: float | None) -> Iterator[frozenset[str]]:
    """Nodes whose outputs may wait in a file so that a step holds its budget: of each choice their names.

    Args:
        request: The step's, measured on this machine, with a budget.
        seconds: What a plan takes that leaves none there, beyond its nodes once; None: no plan was found.
    """
    graph = request.graph
    assert request.budget is not None
    lacking = request.needed(range(len(graph.nodes))) - request.budget
    if lacking <= 0 or not (values := _candidates(graph, request.live_bytes)):
        return
    a_byte = disk.seconds_a_byte(tempfile.gettempdir())
    if a_byte is None or (seconds is not None and seconds < WORTH * lacking * a_byte):
        return
    if seconds is not None:
        values = [value for value in values if graph.costs[graph.producer[value]] > a_byte * graph.sizes[value]]
    tried = set[int]()
    for share in SHARES:
        count, size = 0, 0
        window = 3 * max((graph.sizes[value] for value in values), default=0)
        while count < len(values) and size < share * lacking + window:
            size += graph.sizes[values[count]]
            count += 1
        if count and count not in tried:
            tried.add(count)
            yield frozenset(graph.nodes[graph.producer[value]] for value in values[:count])


def seconds_of(request: Request, plan: Plan) -> float:
    """Estimated seconds of a step beyond those of its nodes, each once: computed again, in chunks, and of the disk."""
    again = math.fsum(plan.graph.costs) - math.fsum(request.graph.costs)
    moved = plan.read_bytes + plan.written_bytes
    a_byte = (disk.seconds_a_byte(tempfile.gettempdir()) or 0.0) if moved else 0.0
    return again + math.fsum(band.seconds for band in plan.chunks) + moved * a_byte / 2


def note(request: Request, plan: Plan, seconds: float | None) -> str:
    """What a plan says of what waits in a file, where something else would have taken ``seconds``."""
    size, count = sum(plan.values_in_file.values()), len(plan.values_in_file)
    instead = "no plan without that was found" if seconds is None else f"without that {seconds:.2g} s"
    which = f"{count} values of {format_size(size)} wait" if count > 1 else f"a value of {format_size(size)} waits"
    return (
        f"{which} in a file of the session's for the backward pass: with what is computed again that is estimated to "
        f"take {seconds_of(request, plan):.2g} s a step, {instead}."
    )


def _candidates(graph: Graph, live: np.ndarray) -> list[int]:
    """Values that may wait in a file, those first whose nodes take longest for a byte."""
    worst = int(live.argmax()) if live.size else 0
    aliased = {value for own in graph.aliases for one in own if one.kind not in _APART for value in one[1:3]}
    aliased |= {value for members in graph.groups for value in members} | {*graph.outputs}
    found = [value for value, size in enumerate(graph.sizes) if size >= LEAST and graph.planned[value]]
    chosen = []
    for value in found:
        made, readers = graph.producer[value], graph.readers[value]
        early = [node for node in readers if graph.forward[node]]
        late = [node for node in readers if not graph.forward[node]]
        if value in aliased or not late or not graph.forward[made] or len(graph.writes[made]) > 1:
            continue
        if made < worst < late[-1] and all(node <= made + EARLY for node in early):
            chosen.append(value)
    return sorted(chosen, key=lambda value: (-graph.costs[graph.producer[value]] / graph.sizes[value], value))


_APART = {"inplace"}
"""Sharing that a value may do without: it has a place of its own instead."""


def marked(lowered: Lowered, request: Request, device: Device, nodes: Collection[str]) -> tuple[Lowered, Request]:
    """The step with outputs of some nodes in a file, and what is asked of it: room for what is in memory of them."""
    lowered = dataclasses.replace(lowered, model=lowered.model.clone())
    for node in lowered.model.graph:
        if node.name in nodes:
            node.metadata_props[IN_FILE] = "1"
    graph = lowered.graph_on(device)
    made = [read for read in weight_reads(lowered.model, graph) if read.made]
    window = max(largest_at_once(made), sum(sorted(read.resident for read in made)[-2:]))
    return lowered, dataclasses.replace(request, graph=graph, base=request.base + window)
