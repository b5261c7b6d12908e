"""What is kept for the backward pass of a value that a Cast made smaller, or made of a smaller one: the smaller one."""

from collections.abc import Sequence

import onnx_ir as ir

from memonger.ir.emitter import Emitter
from memonger.ir.values import is_floating

WIDER = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def keep_smaller(op: Emitter, nodes: Sequence[ir.Node], narrow: ir.DataType | None = None) -> None:
    """Let the backward pass cast anew what it reads of casts in the forward pass.

    Of a boolean made a number one byte an element is kept, of 16 bits made float32 two. In a model in mixed precision
    a parameter is cast again rather than its copy kept; and a float32 value that is also there in 16 bits is read as
    those, rounded.

    Args:
        op: What the backward pass was emitted to; its nodes are in no graph yet.
        nodes: The forward nodes.
        narrow: The type of 16 bits of a model in mixed precision.
    """
    place_of = {node: place for place, node in enumerate(op.nodes)}
    made: dict[int, list[ir.Node]] = {}
    casts = [node for node in nodes if node.op_type == "Cast" and node.domain == ""]
    rounded = {node.inputs[0]: node.outputs[0] for node in casts if node.outputs[0].dtype == narrow}
    # What isn't computed is the exact content of 16 bits
    computed = [(v, narrower) for v, narrower in rounded.items() if v is not None and v.producer() is not None]
    for value, kept in [*computed, *((node.outputs[0], node.inputs[0]) for node in casts)]:
        if kept is None or not _is_smaller(kept, value, narrow):
            continue
        readers = [(reader, index) for reader, index in value.uses() if reader in place_of]
        if not readers:
            continue
        with op.at(f"grad/{value.name}"):
            again = op.cast(kept, value.dtype)
        for reader, index in readers:
            reader.replace_input_with(index, again)
        node = op.nodes.pop()
        place_of[node] = min(place_of[reader] for reader, _ in readers)
        made.setdefault(place_of[node], []).append(node)
    op.nodes = [node for place, old in enumerate(op.nodes) for node in (*made.get(place, ())[::-1], old)]


def _is_smaller(kept: ir.Value, value: ir.Value, narrow: ir.DataType | None) -> bool:
    """Whether to keep the one and cast it to the other: it takes less memory, or is there anyway."""
    if value.dtype == narrow and narrow is not None:
        return kept.producer() is None and is_floating(kept)
    return kept.dtype == ir.DataType.BOOL or (
        value.dtype in WIDER
        and kept.dtype is not None
        and (kept.dtype.is_floating_point() and kept.dtype.bitwidth < value.dtype.bitwidth)
    )
