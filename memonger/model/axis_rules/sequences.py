"""Attention and recurrent layers: each sequence of a batch by itself."""

from collections.abc import Mapping

from memonger.model.cutting import Cut, Slicing, axis_rule


def _of_batch(cut: Cut, inputs: Mapping[int, int], outputs: Mapping[int, int], optional: tuple[int, ...]) -> Slicing:
    """Cut along the batch: of ``optional`` inputs those whose first axis is the batch."""
    first = min(index for index in inputs if cut.has(index))
    length = cut.dims(first)[inputs[first]]
    found = {index: axis for index, axis in inputs.items() if cut.has(index)}
    for index in optional:
        dims = cut.dims(index) if cut.has(index) else ()
        if dims and dims[0] == length:
            found[index] = 0
        elif len(dims) == 1 and dims[0] > 1:
            cut.refuse(f"has '{cut.name(index)}' of {list(dims)}, and no rule cuts that")
    if any(found.get(index) != axis for index, axis in cut.axes.items()):
        cut.refuse(f"relates the elements of a sequence, and can't be cut along axis {cut.axis}: along the batch alone")
    return cut.along(found, outputs)


@axis_rule("com.microsoft::Attention")
def _attention(cut: Cut) -> Slicing:
    """Inputs: sequence, weight, bias, mask, past (2, batch, ...), bias of the scores, past length."""
    return _of_batch(cut, {0: 0, 4: 1}, {0: 0, 1: 1}, (3, 5))


@axis_rule("com.microsoft::MultiHeadAttention")
def _multi_head(cut: Cut) -> Slicing:
    """Inputs: query, key, value, bias, mask, bias of the scores, past key and value; others decode step by step."""
    if cut.has(8) or cut.has(9):
        cut.refuse(f"continues a sequence in a cache, and can't be cut along axis {cut.axis}")
    return _of_batch(cut, {0: 0, 1: 0, 2: 0, 6: 0, 7: 0}, dict.fromkeys(range(4), 0), (4, 5))


@axis_rule("Attention")
def _standard_attention(cut: Cut) -> Slicing:
    """Inputs: query, key, value, mask (broadcast to batch, heads, queries, keys), past key and value, key lengths."""
    optional = (3,) if cut.has(3) and len(cut.dims(3)) == 4 else ()
    return _of_batch(cut, {0: 0, 1: 0, 2: 0, 4: 0, 5: 0, 6: 0}, dict.fromkeys(range(4), 0), optional)


@axis_rule("com.microsoft::EmbedLayerNormalization")
def _embedding(cut: Cut) -> Slicing:
    """Inputs: words, segments, three tables, scale, bias, mask, positions; outputs: sequence, mask's sums, sum."""
    return _of_batch(cut, {0: 0, 1: 0, 7: 0}, {0: 0, 1: 0, 2: 0}, (8,))


@axis_rule("RotaryEmbedding")
def _rotary(cut: Cut) -> Slicing:
    """Without positions the tables of cosines and sines have a batch too."""
    tables = {} if cut.has(3) else {1: 0, 2: 0}
    return _of_batch(cut, {0: 0, 3: 0} | tables, {0: 0}, ())


@axis_rule("com.microsoft::RotaryEmbedding")
def _rotary_of_microsoft(cut: Cut) -> Slicing:
    """One position is the first of every sequence."""
    positions = {1: 0} if len(cut.dims(1)) == 2 else {}
    return _of_batch(cut, {0: 0} | positions, {0: 0}, ())


@axis_rule("LSTM GRU RNN")
def _recurrent(cut: Cut) -> Slicing:
    """The batch is axis 1, or in layout 1 axis 0; of states behind the directions, or before them."""
    before = cut.integer("layout", 0) == 1
    state = 0 if before else 1
    inputs = {0: state, 4: 0, 5: state, 6: state}
    return _of_batch(cut, inputs, {0: 0 if before else 2, 1: state, 2: state}, ())
