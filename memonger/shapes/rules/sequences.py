"""Shapes of recurrent layers."""

from collections.abc import Sequence
from typing import Any

from memonger.shapes.shaping import Compute, Shape, Site, shape_rule


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
