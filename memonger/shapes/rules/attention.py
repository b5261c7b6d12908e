"""Shapes of attention, its caches of keys and values, recurrent layers, and layers that keep a state of their own."""

from collections.abc import Sequence
from typing import Any

from memonger.shapes.shaping import Compute, NoRuleError, Shape, Site, shape_rule

_MS = "com.microsoft::"


@shape_rule("Attention")
def _attention(site: Site) -> Compute:
    """Queries, keys and values are (batch, heads, length, width), or packed: (batch, length, heads · width)."""
    heads, of_keys = site.integer("q_num_heads", 0), site.integer("kv_num_heads", 0)

    def compute(shapes: Sequence[Any], _: Sequence[Any]) -> Sequence[Shape]:
        query, key, value = shapes[:3]
        if len(query) == 3:
            batch, length, number = query[0], query[1], heads
            (kept, key_width), value_width = (of_keys, key[2] // of_keys), value[2] // of_keys
            result: Shape = (batch, length, number * value_width)
            new = key[1]
        else:
            batch, number, length = query[:3]
            kept, new, key_width, value_width = key[1], key[2], key[3], value[3]
            result = (batch, number, length, value_width)
        total = new + (shapes[4][2] if site.has(4) else 0)
        cached = [(batch, kept, total, width) for width in (key_width, value_width)]
        return (result, *cached, (batch, number, length, total))[: site.outputs]

    return compute


@shape_rule(_MS + "Attention", _MS + "QAttention")
def _projecting_attention(site: Site) -> Compute:
    """Attention with its own projection: input (batch, length, width), weight (width, three times the heads' width)."""
    widths, heads = site.integers("qkv_hidden_sizes"), site.integer("num_heads", 1)
    past = 8 if site.op_type == "QAttention" else 4
    is_buffer = site.integer("past_present_share_buffer", 0)

    def compute(shapes: Sequence[Any], _: Sequence[Any]) -> Sequence[Shape]:
        batch, length, _width = shapes[0]
        width = widths[2] if widths is not None else shapes[1][1] // 3
        before = shapes[past][3] if site.has(past) else 0
        total = before if is_buffer and site.has(past) else before + length
        of_keys = widths[1] if widths is not None else width
        return ((batch, length, width), (2, batch, heads, total, of_keys // heads))[: site.outputs]

    return compute


@shape_rule(_MS + "MultiHeadAttention", _MS + "DecoderMaskedMultiHeadAttention")
def _multi_head_attention(site: Site) -> Compute:
    """Queries (batch, length, width), or with keys and values in one (batch, length, heads, 3, width of a head)."""
    heads = site.integer("num_heads", 1)
    decodes = site.op_type == "DecoderMaskedMultiHeadAttention"
    past, length_of_past = (5, 7) if decodes else (6, 8)
    is_buffer = site.has(length_of_past) or site.integer("past_present_share_buffer", 0)

    def compute(shapes: Sequence[Any], _: Sequence[Any]) -> Sequence[Shape]:
        query, key, value = (*shapes, None, None)[:3]
        batch, length = query[:2]
        is_cached = key is not None and len(key) == 4  # keys of another sequence, as their cache has them
        if len(query) == 5:
            width, of_values, new = query[4], query[4], length
        elif key is None:  # a decoder's packed ones
            width = of_values = query[2] // 3 // heads
            new = length
        elif len(key) == 5:
            width, of_values, new = key[4], key[4], key[1]
        elif is_cached:
            width, of_values, new = key[3], value[3], key[2]
        else:
            width, of_values, new = query[2] // heads, value[2] // heads, key[1]
        before = shapes[past][2] if site.has(past) else 0
        total = before if is_buffer and site.has(past) else before + (0 if is_cached and before else new)
        cached = [(batch, heads, total, each) for each in (width, of_values)]
        return ((batch, length, heads * of_values), *cached, (batch, heads, length, total))[: site.outputs]

    return compute


@shape_rule(_MS + "GroupQueryAttention")
def _group_query_attention(site: Site) -> Compute:
    """A cache of so many rows stays as it is where all that is so far fits into it; else it grows to that.

    Queries are (batch, length, width), or with keys and values behind them in one.
    """
    heads, of_keys = site.integer("num_heads", 1), site.integer("kv_num_heads", 1)

    def compute(shapes: Sequence[Any], contents: Sequence[Any]) -> Sequence[Shape]:
        batch, length, width = shapes[0]
        head = width // (heads if site.has(1) else heads + 2 * of_keys)
        before = shapes[3][2] if site.has(3) else 0
        total = before if contents[6] is None else contents[6].item()
        stored = shapes[3][3] if site.has(3) else head  # half of it where two numbers share a byte
        cached = (batch, of_keys, total if total > before else before, stored)
        return ((batch, length, heads * head), cached, cached, (batch, heads, length, total))[: site.outputs]

    return compute


@shape_rule(_MS + "SparseAttention", _MS + "PagedAttention")
def _attention_in_buffers(site: Site) -> Compute:
    """Caches are buffers, written in place; packed queries have keys and values behind them."""
    heads, of_keys, of_values = (site.integer(name, 0) for name in ("num_heads", "kv_num_heads", "v_head_size"))

    def compute(shapes: Sequence[Any], _: Sequence[Any]) -> Sequence[Shape]:
        *first, width = shapes[0]
        head = width // (heads if site.has(1) else heads + 2 * of_keys)
        return ((*first, heads * (of_values or head)), *shapes[3:5])[: site.outputs]

    return compute


@shape_rule("LinearAttention", _MS + "LinearAttention")
def _linear_attention(site: Site) -> Compute:
    """Its state takes the widths of keys and values, and where a window of states is kept, as many of them."""
    heads, of_keys = site.integer("q_num_heads", 1), site.integer("kv_num_heads", 1)
    window = site.integer("state_window", 0)

    def compute(shapes: Sequence[Any], _: Sequence[Any]) -> Sequence[Shape]:
        batch, length, width = shapes[0]
        of_values = shapes[2][2] // of_keys
        state = (batch, of_keys, width // heads, of_values)
        return ((batch, length, max(heads, of_keys) * of_values), (window, *state) if window else state)[: site.outputs]

    return compute


@shape_rule("CausalConvWithState", _MS + "CausalConvWithState")
def _causal_convolution(site: Site) -> Compute:
    """Along one axis; the state is what the next step's first windows reach back to."""
    others = ("channels_last", "input_channels", "state_length", "state_channels_last", "state_update_capacity")
    if site.integer("ndim", 1) != 1 or any(site.integer(name, 0) for name in (*others, "state_window")):
        raise NoRuleError("other axes, windows of states, or channels that are picked")
    dilation = site.integer("dilation", 1)

    def compute(shapes: Sequence[Any], _: Sequence[Any]) -> Sequence[Shape]:
        return (shapes[0], (*shapes[0][:2], dilation * (shapes[1][2] - 1)))[: site.outputs]

    return compute


@shape_rule(_MS + "RelativePositionBias")
def _relative_position_bias(_: Site) -> Compute:
    return lambda shapes, contents: ((1, shapes[0][1], contents[1].item(), contents[2].item()),)


@shape_rule(_MS + "GatedRelativePositionBias")
def _gated_relative_position_bias(_: Site) -> Compute:
    return lambda shapes, _: ((shapes[0][0], *shapes[2][1:]),)


@shape_rule("GRU", "LSTM", "RNN", "com.microsoft::AttnLSTM", "com.microsoft::DynamicQuantizeLSTM")
def _recurrent(site: Site) -> Compute:
    is_batch_first = site.integer("layout", 0)
    recurrence = 2
    both = 2 if site.text("direction", "forward") == "bidirectional" else 1
    fixed, is_quantized = site.integer("hidden_size", 0), site.op_type == "DynamicQuantizeLSTM"

    def compute(shapes: Sequence[Any], _: Sequence[Any]) -> Sequence[Shape]:
        hidden = fixed or shapes[recurrence][1 if is_quantized else 2]
        if is_batch_first:
            batch, steps = shapes[0][:2]
            return ((batch, steps, both, hidden), *[(batch, both, hidden)] * 2)[: site.outputs]
        steps, batch = shapes[0][:2]
        return ((steps, both, batch, hidden), *[(both, batch, hidden)] * 2)[: site.outputs]

    return compute
