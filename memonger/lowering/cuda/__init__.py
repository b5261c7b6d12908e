"""The CUDA form: what onnxruntime's CUDA provider can't run, written in operators that it has kernels for.

What it has no kernel for it leaves to the CPU, with copies before and after: each waits for the device, and forbids
CUDA graphs. What it refuses fails the whole session. Both were found by making sessions of onnxruntime-gpu 1.31.1. Some
of what it runs is written out too: what gradient rules write as a convolution for the CPU's sake, and mark as a
composite, and Splits and products that copy from the host. Nothing but standard operators is written, and nothing of it
needs a device: the same model runs on the CPU and gives the same numbers.
"""

import logging
from collections import Counter

import onnx_ir as ir

from memonger.ir.emitter import Emitter
from memonger.ir.marks import forget_composites
from memonger.ir.model import Model
from memonger.ir.rewrite import Replacer
from memonger.ir.values import static_shape
from memonger.lowering.cuda import normalization as normalization  # registers its rules
from memonger.lowering.cuda import others as others
from memonger.lowering.cuda import products as products
from memonger.lowering.cuda import random_bits
from memonger.lowering.cuda.rules import RULES, Written, kind_of
from memonger.model.opset import OPSET, raise_opset

logger = logging.getLogger(__name__)


def write_out_for_cuda(model: Model) -> bool:
    """A pass: a model is such that onnxruntime's CUDA provider runs as much of it as can be.

    Values keep their names, and nodes that stay theirs. The metadata of a node that is replaced goes to the one that
    computes its first output (`marks.spread`). Nodes of unknown shape, and those in subgraphs, stay as they are.

    Raises:
        PlanError: something has to be written out in a newer operator set than the model's, and onnx's converter can't
            raise it.
    """
    if "" not in model.ir.opset_imports:
        return False
    looking = Emitter(model.ir)
    current = looking.opset >= OPSET
    if not any(_applies(looking, node) and (current or RULES[kind_of(node)].raises_opset) for node in model.graph):
        return False
    raise_opset(model)
    into = Replacer(model.graph, Emitter(model.ir))
    random_bits.merge(into)
    counts = Counter[str]()

    def write(op: Emitter, node: ir.Node) -> Written | None:
        if not _applies(op, node):
            return None
        counts[kind_of(node)] += 1
        return RULES[kind_of(node)].write(op, node)

    into.replace_each(write)
    forget_composites(model)
    written = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    logger.info("%s: %s written out for CUDA.", model.name, written)
    return True


def _applies(op: Emitter, node: ir.Node) -> bool:
    """Whether a node is written out."""
    if node.domain != "" or kind_of(node) not in RULES:
        return False
    values = [v for v in (*node.inputs, *node.outputs) if v is not None and v.name]
    described = all(v.dtype is not None and static_shape(v) is not None for v in values)
    return described and RULES[kind_of(node)].when(op, node)
