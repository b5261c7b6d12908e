"""Operators that pick or place elements by index."""

from memonger.tiling.cutting import Cut, SliceCopy, Slicing, axis_rule


@axis_rule("Gather")
def _gather(cut: Cut) -> Slicing:
    """By the axes of the indices, with the data whole; else by an axis of the data that nothing is picked from.

    Rows that constant numbers pick are cut, too.
    """
    axis, rank = cut.positive(cut.integer("axis", 0)), len(cut.dims(1))
    if 1 in cut.axes:
        return cut.along({1: cut.axes[1]}, {0: axis + cut.axes[1]}, whole=(0,))
    if cut.axis != axis:
        return cut.along({0: cut.axis}, {0: cut.axis if cut.axis < axis else cut.axis + rank - 1})
    if not cut.halo:
        cut.refuse(f"picks from axis {axis}")
    if rank != 1:
        cut.refuse("picks rows by numbers that aren't a list")
    picked = [int(row) % cut.dims(0)[axis] for row in cut.constant(1)]

    def rows(begin: int, end: int) -> SliceCopy:
        low, high = min(picked[begin:end]), max(picked[begin:end]) + 1
        own = [row - low for row in picked[begin:end]]
        return SliceCopy((begin, end), (begin, end), {0: (low, high)}, constants={1: own})

    return cut.in_rows(rows, axis)


@axis_rule("GatherElements")
def _gather_elements(cut: Cut) -> Slicing:
    """By any axis that nothing is picked from; by that one too where the indices alone are cut, from whole data."""
    axis, working = cut.axes.get(1, cut.axis), cut.positive(cut.integer("axis", 0))
    if axis == working:
        if 1 not in cut.axes:
            cut.refuse(f"picks from axis {axis}")
        return cut.along({1: axis}, {0: axis}, whole=(0,))
    if cut.dims(0)[axis] != cut.dims(1)[axis]:
        cut.refuse(f"reads a part of axis {axis}")
    return cut.all_along(axis, [0, 1])


@axis_rule("GatherND")
def _gather_nd(cut: Cut) -> Slicing:
    """By a batch axis of both; by an axis of the indices; or by one of the data that the indices don't reach."""
    shared, rank = cut.integer("batch_dims", 0), len(cut.dims(1))
    axis = cut.axes.get(1, cut.axis)
    if axis < shared:
        return cut.all_along(axis, [0, 1])
    if 1 in cut.axes:
        if axis == rank - 1:
            cut.refuse(f"reads its indices along axis {axis}")
        return cut.along({1: axis}, {0: axis}, whole=(0,))
    first = shared + cut.dims(1)[-1]
    if axis < first:
        cut.refuse(f"picks from axis {axis}")
    return cut.along({0: axis}, {0: axis - first + rank - 1})


@axis_rule("ScatterElements")
def _scatter_elements(cut: Cut) -> Slicing:
    if cut.axis == cut.positive(cut.integer("axis", 0)):
        cut.refuse(f"writes into axis {cut.axis} by index")
    if len({cut.dims(index)[cut.axis] for index in range(3)}) > 1:
        cut.refuse(f"writes a part of axis {cut.axis}")
    return cut.all_along(cut.axis, range(3))


@axis_rule("OneHot")
def _one_hot(cut: Cut) -> Slicing:
    working = cut.integer("axis", -1)
    working += len(cut.out()) if working < 0 else 0
    return cut.along({0: cut.axis}, {0: cut.axis + (cut.axis >= working)})
