"""Attention and recurrent layers: each sequence of a batch by itself."""

from collections.abc import Mapping

from memonger.tiling.cutting import Cut, Slicing, axis_rule


def _of_batch(
    cut: Cut, inputs: Mapping[int, int], outputs: Mapping[int, int], optional: Mapping[int, int] | None = None
) -> Slicing:
    """Cut along the batch, or the heads: of ``optional`` inputs those that have as many elements there."""
    first = min(index for index in inputs if cut.has(index))
    length = cut.dims(first)[inputs[first]]
    sliced = {index: axis for index, axis in inputs.items() if cut.has(index)}
    for index, axis in (optional or {}).items():
        dims = cut.dims(index) if cut.has(index) else ()
        if len(dims) > axis and dims[axis] == length:
            sliced[index] = axis
        elif len(dims) == 1 and dims[0] > 1:
            cut.refuse(f"has '{cut.name(index)}' of {list(dims)}, and no rule cuts that along the batch")
    if any(sliced.get(index) != axis for index, axis in cut.axes.items()):
        cut.refuse(f"relates the elements of a sequence, and can't be cut along axis {cut.axis}")
    return cut.along(sliced, {index: axis for index, axis in outputs.items() if index in cut.outputs})


def _of_queries(cut: Cut, scores: tuple[int, ...], *, ordered: bool) -> Slicing:
    """Cut along the queries, with all keys and values whole.

    Args:
        cut: The node.
        scores: Inputs that are added to the scores, or mask them: ``[..., queries, keys]``.
        ordered: Whether a query's place in the sequence decides what it sees.
    """
    axis = cut.axes[0]
    if ordered or cut.outputs != [0]:
        cut.refuse(f"counts the places of a sequence, which is cut along axis {axis}")
    added = {i: len(cut.dims(i)) - 2 for i in scores if cut.has(i) and cut.dims(i)[-2:-1] == (cut.dims(0)[axis],)}
    return cut.along({0: axis} | added, {0: axis}, whole=(1, 2))


@axis_rule("com.microsoft::Attention")
def _attention(cut: Cut) -> Slicing:
    """Inputs: sequence, weight, bias, mask, past (2, batch, ...), bias of the scores, past length."""
    return _of_batch(cut, {0: 0, 4: 1}, {0: 0, 1: 1}, {3: 0, 5: 0})


@axis_rule("com.microsoft::MultiHeadAttention")
def _multi_head(cut: Cut) -> Slicing:
    """Inputs: query, key, value, bias, mask of the keys, bias of the scores, past key and value; others are a cache."""
    if any(cut.has(index) for index in range(6, 10)):
        cut.refuse(f"continues a sequence in a cache, and can't be cut along axis {cut.axis}")
    if cut.axes.get(0) == 1 and len(cut.dims(0)) == 3 and cut.has(2) and not (cut.has(4) and len(cut.dims(4)) > 2):
        return _of_queries(cut, (5,), ordered=bool(cut.integer("unidirectional", 0)))
    return _of_batch(cut, {0: 0, 1: 0, 2: 0}, dict.fromkeys(range(4), 0), {4: 0, 5: 0})


@axis_rule("Attention")
def _standard_attention(cut: Cut) -> Slicing:
    """Inputs: query, key, value, mask (broadcast to batch, heads, queries, keys), past key and value, key lengths."""
    rank = len(cut.dims(0))
    if cut.axes.get(0) == rank - 2:
        return _of_queries(cut, (3,), ordered=bool(cut.integer("is_causal", 0)) or cut.has(4) or cut.has(6))
    axis = 1 if rank == 4 and cut.axis == 1 else 0
    mask = {3: axis} if cut.has(3) and len(cut.dims(3)) == 4 else {}
    inputs = dict.fromkeys((0, 1, 2, 4, 5), axis) | ({6: 0} if axis == 0 else {})
    return _of_batch(cut, inputs, dict.fromkeys(range(4), axis), mask)


@axis_rule("com.microsoft::EmbedLayerNormalization")
def _embedding(cut: Cut) -> Slicing:
    """Inputs: words, segments, three tables, scale, bias, mask, positions; outputs: sequence, mask's sums, sum."""
    return _of_batch(cut, {0: 0, 1: 0, 7: 0}, {0: 0, 1: 0, 2: 0}, {8: 0})


@axis_rule("RotaryEmbedding")
def _rotary(cut: Cut) -> Slicing:
    """Without positions the tables of cosines and sines have a batch too."""
    tables = {} if cut.has(3) else {1: 0, 2: 0}
    return _of_batch(cut, {0: 0, 3: 0} | tables, {0: 0})


@axis_rule("com.microsoft::RotaryEmbedding")
def _rotary_of_microsoft(cut: Cut) -> Slicing:
    """One position is the first of every sequence."""
    positions = {1: 0} if len(cut.dims(1)) == 2 else {}
    return _of_batch(cut, {0: 0} | positions, {0: 0})


@axis_rule("LSTM GRU RNN")
def _recurrent(cut: Cut) -> Slicing:
    """The batch is axis 1, or in layout 1 axis 0; of states behind the directions, or before them."""
    before = cut.integer("layout", 0) == 1
    state = 0 if before else 1
    inputs = {0: state, 4: 0, 5: state, 6: state}
    return _of_batch(cut, inputs, {0: 0 if before else 2, 1: state, 2: state})
