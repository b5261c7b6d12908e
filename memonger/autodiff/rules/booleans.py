"""What is kept for the backward pass of a mask: one byte an element."""

from collections.abc import Sequence

import onnx_ir as ir

from memonger.model.emitter import Emitter


def keep_booleans(op: Emitter, nodes: Sequence[ir.Node]) -> None:
    """Where the backward pass reads the Cast of a boolean that a forward node made, let it cast that anew.

    Args:
        op: What the backward pass was emitted to; its nodes are in no graph yet.
        nodes: The forward nodes.
    """
    emitted = {node: place for place, node in enumerate(op.nodes)}
    made: dict[int, list[ir.Node]] = {}
    for node in nodes:
        source = node.inputs[0] if node.op_type == "Cast" and node.domain == "" else None
        if source is None or source.dtype != ir.DataType.BOOL:
            continue
        readers = [(reader, index) for reader, index in node.outputs[0].uses() if reader in emitted]
        if not readers:
            continue
        with op.at(f"grad/{node.name}"):
            again = op.cast(source, node.outputs[0].dtype)
        for reader, index in readers:
            reader.replace_input_with(index, again)
        made.setdefault(min(emitted[reader] for reader, _ in readers), []).append(op.nodes.pop())
    op.nodes = [node for place, old in enumerate(op.nodes) for node in (*made.get(place, ()), old)]
