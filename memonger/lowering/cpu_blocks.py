"""Images that are joined along their channels where these are in blocks: onnxruntime takes them out of blocks first.

Its optimizer joins images as they lie in blocks where all of them do. What a transposed convolution makes doesn't, so
that each image of a U-Net that waits for such a one is copied out of blocks, joined with it, and all of that copied
into blocks. Once that one alone is put into blocks, what is joined has the same bits: it is only moved, half as often.
"""

import onnx_ir as ir

from memonger.ir.model import Model
from memonger.ir.names import fresh
from memonger.ir.operators import operator_name
from memonger.ir.values import all_values
from memonger.lowering.cpu_convolutions import DOMAIN, block_size

_INTO, _OUT = f"{DOMAIN}::ReorderInput", f"{DOMAIN}::ReorderOutput"


def join_in_blocks(model: Model) -> bool:
    """A pass: images are joined in blocks of channels where one of them was so, and what is joined is read so."""
    graph, done = model.graph, False
    names = {str(value.name) for value in all_values(graph)}
    for node in [node for node in graph if node.op_type == "Concat" and node.attributes.get_int("axis", 0) == 1]:
        readers = list(node.outputs[0].consumers())
        if not readers or node.outputs[0].is_graph_output() or any(not _moves(user, _INTO) for user in readers):
            continue
        producers = [value.producer() if value is not None else None for value in node.inputs]
        if not any(producer is not None and _moves(producer, _OUT) for producer in producers):
            continue
        if any(not _fill_blocks(value) for value in node.inputs):
            continue
        for place, (value, producer) in enumerate(zip(node.inputs, producers, strict=True)):
            assert value is not None
            if producer is not None and _moves(producer, _OUT):
                node.replace_input_with(place, producer.inputs[0])
                if not value.uses() and not value.is_graph_output():
                    graph.remove(producer, safe=True)
                continue
            name = fresh(f"{value.name}.blocks", names)
            blocks = ir.Value(name=name, type=value.type, shape=value.shape)
            graph.insert_before(node, ir.node("ReorderInput", [value], domain=DOMAIN, outputs=[blocks], name=name))
            node.replace_input_with(place, blocks)
        for reader in readers:
            reader.outputs[0].replace_all_uses_with(node.outputs[0])
            graph.remove(reader, safe=True)
        done = True
    return done


def _moves(node: ir.Node, operator: str) -> bool:
    """Whether a node puts an image into blocks, or out of them, whose channels come first."""
    return operator_name(node) == operator and not node.attributes.get_int("channels_last", 0)


def _fill_blocks(value: ir.Value | None) -> bool:
    """Whether an image's channels are whole blocks."""
    shape = None if value is None else value.shape
    channels = shape[1] if shape is not None and len(shape) == 4 else None
    return isinstance(channels, int) and channels % block_size() == 0
