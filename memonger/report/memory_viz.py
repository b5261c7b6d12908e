"""A plan as the memory snapshot that PyTorch's viewer reads (pytorch.org/memory_viz), and ``torch.cuda._memory_viz``.

The viewer takes what is live from the trace of allocations and reckons addresses anew by going through the blocks,
which therefore tile their segment; what was never allocated in the trace but is there at the end is drawn as live from
the start: weights and inputs. Arena, workspace, inputs and weights are a segment each.
"""

import pickle
from collections.abc import Iterator, Sequence
from typing import Any

from memonger.report.view import INPUT, WEIGHT, WORKSPACE, Rectangle, View

PROTOCOL = 4
"""The newest one the viewer reads, of plain types only."""

_FIRST = 1 << 20
"""The first segment's address; the others begin at multiples of it."""

Event = dict[str, Any]


def snapshot(view: View) -> bytes:
    """The snapshot, pickled."""
    return pickle.dumps(content(view), protocol=PROTOCOL)


def content(view: View) -> dict[str, Any]:
    """The snapshot as PyTorch's ``torch.cuda.memory._snapshot()`` gives it."""
    kinds: dict[str, list[Rectangle]] = {}
    for each in view.rectangles:
        if each.size:
            kinds.setdefault("arena" if each.in_arena else each.kind, []).append(each)
    sizes = {kind: max(each.offset + each.size for each in group) for kind, group in kinds.items()}
    if "arena" in sizes:
        sizes["arena"] = view.plan.arena_bytes
    base = {kind: min(each.offset for each in group) if kind != "arena" else 0 for kind, group in kinds.items()}
    addresses, segments, free = dict[str, int](), [], _FIRST
    for kind, group in kinds.items():
        addresses[kind], length = free - base[kind], sizes[kind] - base[kind]
        at_end = sorted((each for each in group if each.stop == len(view.steps)), key=lambda each: each.offset)
        segments.append(_segment(view, kind, free, length, base[kind], at_end))
        free += -(-length // _FIRST) * _FIRST + _FIRST
    trace = [_event("segment_alloc", each["address"], each["total_size"], [], "unknown") for each in segments]
    trace += _trace(view, kinds, addresses)
    return {"segments": segments, "device_traces": [trace], "allocator_settings": {}}


def _segment(
    view: View, kind: str, address: int, length: int, base: int, blocks: Sequence[Rectangle]
) -> dict[str, Any]:
    """A segment whose blocks tile it: what is there at the end of the run, and gaps."""
    tiles: list[dict[str, Any]] = []
    end = 0
    for each in blocks:
        begin = each.offset - base
        if begin > end:
            tiles.append(_block(address + end, begin - end, "inactive", []))
        tiles.append(_block(address + begin, each.size, "active_allocated", _frames(view, each)))
        end = begin + each.size
    if length > end:
        tiles.append(_block(address + end, length - end, "inactive", []))
    live = sum(each.size for each in blocks)
    return {
        "device": 0, "address": address, "total_size": length, "allocated_size": live, "active_size": live,
        "requested_size": live, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False,
        "frames": [_frame(f"memonger's {kind}", view.title, 0)], "blocks": tiles,
    }  # fmt: skip


def _block(address: int, size: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    requested = size if state == "active_allocated" else 0
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": frames}


def _trace(view: View, kinds: dict[str, list[Rectangle]], addresses: dict[str, int]) -> Iterator[Event]:
    """What is taken and given back, step by step; at each step what ended before is given back first."""
    last = len(view.steps)
    begins: list[list[Event]] = [[] for _ in range(last + 1)]
    ends: list[list[Event]] = [[] for _ in range(last + 1)]
    for kind, group in kinds.items():
        for each in group if kind not in (INPUT, WEIGHT) else ():
            event = _event("alloc", addresses[kind] + each.offset, each.size, _frames(view, each), each.kind)
            begins[each.start].append(event | {"time_us": each.start})
            if each.stop < last or each.kind == WORKSPACE:
                ends[each.stop].append(event | {"time_us": each.stop})
    for step in range(last + 1):
        for event in ends[step]:
            yield event | {"action": "free_requested"}
            yield event | {"action": "free_completed"}
        yield from begins[step]


def _event(action: str, address: int, size: int, frames: list[dict[str, Any]], category: str) -> Event:
    return {
        "action": action, "addr": address, "size": size, "stream": 0, "time_us": 0, "frames": frames,
        "category": category,
    }  # fmt: skip


def _frames(view: View, each: Rectangle) -> list[dict[str, Any]]:
    """What the viewer writes beside a block, as a call stack: the tensor, its node, the modules around it."""
    what = f"{each.name} {each.shape}".rstrip()
    if each.kind in (INPUT, WEIGHT):
        return [_frame(what, each.kind, 0)]
    step = view.steps[each.start]
    node = _frame(f"{step.operator} {step.node}", view.title, each.start)
    node |= {"fx_node_op": "call_function", "fx_node_name": step.node, "fx_node_target": step.operator}
    modules = [_frame(name, "module", 0) for name in reversed(step.module)]
    shared = [_frame(f"in the same place: {name}", each.kind, each.start) for name in each.others]
    return [_frame(what, each.kind, each.start), *shared, node, *modules]


def _frame(name: str, file: str, line: int) -> dict[str, Any]:
    return {"name": name, "filename": file, "line": line}
