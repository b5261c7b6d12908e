"""Names that nothing else has, and patterns of names."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

import onnx_ir as ir

from memonger.ir.model import Model
from memonger.ir.values import graphs


def matches(names: Iterable[str], pattern: str) -> bool:
    """Whether a pattern is one of the names, or fits one as a glob pattern."""
    return any(name == pattern or fnmatchcase(name, pattern) for name in names)


def fresh(base: str, taken: set[str]) -> str:
    """``base``, or where ``taken`` holds that ``base#2`` and so on. The name is added to ``taken``."""
    name, count = base, 1
    while name in taken:
        count += 1
        name = f"{base}#{count}"
    taken.add(name)
    return name


def name_nodes(model: Model) -> bool:
    """A pass: every node, those of subgraphs included, has a name no other node has."""
    used, renamed = set[str](), False
    for graph in graphs(model.ir):
        for node in graph:
            before = node.name
            node.name = fresh(before or f"{node.op_type}_{node.outputs[0].name if node.outputs else len(used)}", used)
            renamed |= node.name != before
    return renamed


def inner_names(model: ir.Model) -> set[str]:
    """Names of the nodes inside subgraphs."""
    return {str(node.name) for graph in graphs(model) if graph is not model.graph for node in graph}
