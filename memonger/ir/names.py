"""Names that nothing else has, and patterns of names."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

import onnx_ir as ir

from memonger.ir.model import Model
from memonger.ir.values import all_values, graphs, subgraphs


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


def tell_bodies_apart(model: Model) -> bool:
    """A pass: no value of a body is called as one of the graphs around it, which no file may say.

    onnxruntime's optimizer does call them so where it makes the same of nodes in here and out there, and refuses to
    read what it wrote.
    """
    taken: set[str] | None = None
    renamed, pending = False, [(model.graph, frozenset[str]())]
    while pending:
        graph, around = pending.pop()
        bodies = [body for node in graph for body in subgraphs(node)]
        if bodies and taken is None:
            taken = {str(value.name) for each in graphs(model.ir) for value in all_values(each)}
        for value in [value for value in all_values(graph) if value.name in around]:
            assert taken is not None
            value.name, renamed = fresh(str(value.name), taken), True
        if bodies:
            inside = around.union(str(value.name) for value in all_values(graph))
            pending += [(body, inside) for body in bodies]
    return renamed


def inner_names(model: ir.Model) -> set[str]:
    """Names of the nodes inside subgraphs."""
    return {str(node.name) for graph in graphs(model) if graph is not model.graph for node in graph}
