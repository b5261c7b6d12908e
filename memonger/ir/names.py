"""Names that nothing else has, and patterns of names."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

import onnx_ir as ir

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


def name_nodes(model: ir.Model) -> None:
    """Give every node, those of subgraphs included, a name no other node has."""
    used: set[str] = set()
    for graph in graphs(model):
        for node in graph:
            base = node.name or f"{node.op_type}_{node.outputs[0].name if node.outputs else len(used)}"
            node.name = fresh(base, used)


def inner_names(model: ir.Model) -> set[str]:
    """Names of the nodes inside subgraphs."""
    return {str(node.name) for graph in graphs(model) if graph is not model.graph for node in graph}
