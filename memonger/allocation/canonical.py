"""Depth-first search for a layout within a capacity, over canonical placements.

Moffitt, "MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated Machine Learning" (ASPLOS 2023). If there
is a layout, then there is one in which every buffer rests on another or on the ground, and in which no buffer could be
moved below another. So buffers are placed in the order of their offsets, of equal offsets by rank, each as low as the
placed ones allow: at its *release*. A buffer that could be placed, but whose turn in that order has passed, has to be
raised by one that is still to come. As in the paper, a buffer is not placed where another would fit below it, and what
is left falls into components whose lifetimes don't overlap, each solved by itself. Where a component has no
layout, the last placement that overlaps its lifetime is undone, with all that came after it.

Beyond the paper, every step is bounded like a machine with release times: of the buffers alive there that are left, in
the order of their releases, each begins at its release or at the end of the one before it, whichever is higher. Counted
is how often each step exceeded the capacity: the next attempt ranks the buffers by that.

Left out: lifetimes with holes, and the paper's rule on the lowest floor of all steps, which the bound implies.

The functions run on lists as they stand, and compiled by numba on arrays with the same result: they use nothing but
loops over integers.
"""

from typing import NamedTuple

Ints = list[int]
"""Or an array of 64-bit integers."""

SOLVED, EXHAUSTED, STOPPED = 1, 0, -1
"""What `explore` returns: a layout was found; there is none; the limit was reached."""

_FAR = 1 << 62


class Instance(NamedTuple):
    """Buffers by rank. Steps are counted where the set of buffers alive is not part of another step's.

    Attributes:
        size: Bytes, rounded up to the smallest alignment.
        alignment: Bytes.
        limit: The highest offset within the capacity.
        start: First step at which the bytes are in use.
        stop: First step at which they are free again.
        by_start: The ranks sorted by start.
        first_at: For each step the first index in ``by_start`` of a rank that starts there or later; one entry more.
        overlap_at: Where each rank's overlapping ranks begin in ``overlaps``; one entry more than ranks.
        overlaps: Ranks.
        steps: Number of steps.
        top: The capacity in bytes, rounded up to the smallest alignment.
    """

    size: Ints
    alignment: Ints
    limit: Ints
    start: Ints
    stop: Ints
    by_start: Ints
    first_at: Ints
    overlap_at: Ints
    overlaps: Ints
    steps: int
    top: int


class PlacementState(NamedTuple):
    """Where a search is. The placements so far are numbered by depth.

    Attributes:
        offset: Of each rank, -1 where it isn't placed.
        release: Of each rank the lowest offset that the placed buffers allow.
        tried: For each depth the rank tried last.
        tried_at: Its offset.
        origin: For each depth the placement that is undone where no rank can be placed; -1: there is no layout.
        begin: For each depth the first step of the component from which a rank is placed.
        end: For each depth the step after its last.
        mark: For each depth the number of releases changed before it.
        changed: Ranks whose release was changed.
        before: Their releases before that.
        least: For each rank the lowest offset that the rest of the search allows; set and read by ``_bounded`` only.
        by_least: All ranks, sorted by ``least``.
        height: For each step the bound; set and read by ``_bounded`` only.
        failures: For each step how often its bound exceeded the capacity.
        spent: Placements tried, and loop turns.
    """

    offset: Ints
    release: Ints
    tried: Ints
    tried_at: Ints
    origin: Ints
    begin: Ints
    end: Ints
    mark: Ints
    changed: Ints
    before: Ints
    least: Ints
    by_least: Ints
    height: Ints
    failures: Ints
    spent: Ints


def explore(task: Instance, state: PlacementState, most_placements: int, most_turns: int) -> int:
    """Search from a fresh state until a layout is found, there is none, or a limit is reached.

    Returns:
        ``SOLVED`` (``state.offset`` is the layout), ``EXHAUSTED`` or ``STOPPED``.
    """
    depth, count = 0, len(task.size)
    advanced = True
    while depth < count:
        if advanced:
            _choose_component(task, state, depth)
        rank = _next_rank(task, state, depth)
        if rank >= 0:
            if state.spent[0] >= most_placements or state.spent[1] >= most_turns:
                return STOPPED
            advanced = _place(task, state, depth, rank) and _bounded(task, state, depth, rank)
            back_to = depth + 1 if advanced else depth
            depth += 1
        else:
            back_to = state.origin[depth]
            advanced = False
            if back_to < 0:
                return EXHAUSTED
        while depth > back_to:
            depth -= 1
            _undo(state, depth)
    return SOLVED


def _choose_component(task: Instance, state: PlacementState, depth: int) -> None:
    """Place next from the smallest component of what is left of the last one, or else of everything.

    It follows the last placement that overlaps it.
    """
    has_component = depth > 0 and _smallest_component(task, state, depth, state.begin[depth - 1], state.end[depth - 1])
    if not has_component:
        _smallest_component(task, state, depth, 0, task.steps)
    origin = depth - 1
    while origin >= 0:
        rank = state.tried[origin]
        if task.start[rank] < state.end[depth] and task.stop[rank] > state.begin[depth]:
            break
        origin -= 1
    state.origin[depth] = origin
    state.tried[depth] = state.tried[origin] if origin >= 0 else -1
    state.tried_at[depth] = state.tried_at[origin] if origin >= 0 else 0


def _smallest_component(task: Instance, state: PlacementState, depth: int, low: int, high: int) -> bool:
    """Find the component with the fewest buffers between two steps; returns whether there is one."""
    by_start, start, stop, offset = task.by_start, task.start, task.stop, state.offset
    fewest, count, begin, end = _FAR, 0, -1, -1
    for index in range(task.first_at[low], task.first_at[high]):
        rank = by_start[index]
        if offset[rank] >= 0:
            continue
        if start[rank] >= end:
            if 0 < count < fewest:
                fewest, state.begin[depth], state.end[depth] = count, begin, end
            count, begin = 0, start[rank]
        count += 1
        if stop[rank] > end:
            end = stop[rank]
    if 0 < count < fewest:
        state.begin[depth], state.end[depth] = begin, end
    state.spent[1] += task.first_at[high] - task.first_at[low]
    return count > 0


def _next_rank(task: Instance, state: PlacementState, depth: int) -> int:
    """The next rank of the component, by offset, then rank, after that tried last; -1 if there is none.

    None is placed so high that another would fit below it.
    """
    tried, tried_at = state.tried[depth], state.tried_at[depth]
    by_start, size, offset, release = task.by_start, task.size, state.offset, state.release
    ceiling, lowest, best = _FAR, _FAR, -1
    first, last = task.first_at[state.begin[depth]], task.first_at[state.end[depth]]
    for index in range(first, last):
        rank = by_start[index]
        if offset[rank] >= 0:
            continue
        at = release[rank]
        if at + size[rank] < ceiling:
            ceiling = at + size[rank]
        if (at > tried_at or (at == tried_at and rank > tried)) and (at < lowest or (at == lowest and rank < best)):
            lowest, best = at, rank
    state.spent[1] += last - first
    return best if lowest < ceiling else -1


def _place(task: Instance, state: PlacementState, depth: int, rank: int) -> bool:
    """Place a rank at its release, and raise those that overlap it; returns whether they stay within their limits."""
    state.spent[0] += 1
    at, changes, good = state.release[rank], state.mark[depth], True
    state.tried[depth], state.tried_at[depth], state.offset[rank] = rank, at, at
    floor = at + task.size[rank]
    for index in range(task.overlap_at[rank], task.overlap_at[rank + 1]):
        other = task.overlaps[index]
        if state.offset[other] < 0 and state.release[other] < floor:
            state.changed[changes], state.before[changes] = other, state.release[other]
            changes += 1
            alignment = task.alignment[other]
            state.release[other] = (floor + alignment - 1) // alignment * alignment
            good = good and state.release[other] <= task.limit[other]
    state.mark[depth + 1] = changes
    state.spent[1] += task.overlap_at[rank + 1] - task.overlap_at[rank]
    return good


def _undo(state: PlacementState, depth: int) -> None:
    """Undo the placement at this depth."""
    for change in range(state.mark[depth + 1] - 1, state.mark[depth] - 1, -1):
        state.release[state.changed[change]] = state.before[change]
    state.offset[state.tried[depth]] = -1


def _bounded(task: Instance, state: PlacementState, depth: int, rank: int) -> bool:
    """Whether the bounds of all steps of the component are within the capacity, after a rank was placed."""
    begin, end, at = state.begin[depth], state.end[depth], state.tried_at[depth]
    by_start, start, stop, top = task.by_start, task.start, task.stop, task.top
    offset, release, leasts, height_of = state.offset, state.release, state.least, state.height
    for index in range(task.first_at[begin], task.first_at[end]):
        other = by_start[index]
        if offset[other] >= 0:
            continue
        least = release[other]
        if least < at or (least == at and other < rank):
            least = _raised(task, state, other, at)
            if least > task.limit[other]:
                return False
        leasts[other] = least
    _sort_by_least(state)
    for step in range(begin, end):
        height_of[step] = 0
    turns = 0
    for other in state.by_least:
        if offset[other] >= 0 or not begin <= start[other] < end:
            continue
        first, last, least, size = start[other], stop[other], leasts[other], task.size[other]
        turns += last - first
        for step in range(first, last):
            height = height_of[step]
            height = (height if height > least else least) + size
            height_of[step] = height
            if height > top:
                state.spent[1] += turns
                state.failures[step] += 1
                return False
    state.spent[1] += turns
    return True


def _sort_by_least(state: PlacementState) -> None:
    """Sort all ranks by insertion, which takes few moves since little has changed."""
    by_least, least = state.by_least, state.least
    before, turns = least[by_least[0]], 0
    for index in range(1, len(by_least)):
        rank = by_least[index]
        own = least[rank]
        if own >= before:
            before = own
            continue
        slot = index
        while slot and least[by_least[slot - 1]] > own:
            by_least[slot] = by_least[slot - 1]
            slot -= 1
        by_least[slot] = rank
        turns += index - slot
    state.spent[1] += turns


def _raised(task: Instance, state: PlacementState, rank: int, at: int) -> int:
    """The least offset of a rank whose turn has passed: the lowest end of one that may still raise it."""
    overlaps, size, offset, release = task.overlaps, task.size, state.offset, state.release
    lowest = _FAR
    for index in range(task.overlap_at[rank], task.overlap_at[rank + 1]):
        other = overlaps[index]
        if offset[other] < 0:
            end = (release[other] if release[other] > at else at) + size[other]
            if end < lowest:
                lowest = end
    state.spent[1] += task.overlap_at[rank + 1] - task.overlap_at[rank]
    return lowest


HELPERS = (_choose_component, _smallest_component, _next_rank, _place, _undo, _bounded, _sort_by_least, _raised)
"""What `explore` calls, for the compiler."""
