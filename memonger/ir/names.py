"""Names that nothing else has, and patterns of names."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import onnx_ir as ir

from memonger.errors import PlanError
from memonger.ir.model import Model
from memonger.ir.values import all_values, graphs, subgraphs
from memonger.words import did_you_mean, quoted


def matches(names: Iterable[str], pattern: str) -> bool:
    """Whether a pattern is one of the names, or fits one as a glob pattern."""
    return any(name == pattern or fnmatchcase(name, pattern) for name in names)


def named_by(named: Mapping[str, Iterable[str]], patterns: str | Sequence[str], who: str, what: str) -> list[str]:
    """Those of some things that patterns name, in their order.

    Args:
        named: By its name all that each goes by.
        patterns: Names or glob patterns; a single one may stand alone.
        who: Where they were given, for the message of one that names none: ``model: frozen``.
        what: What they are to name: ``trained parameter``.

    Raises:
        PlanError: a pattern names none.
    """
    patterns = [patterns] if isinstance(patterns, str) else patterns
    for pattern in patterns:
        if not any(matches(names, pattern) for names in named.values()):
            raise PlanError(
                f"{who} names '{pattern}', which is no {what}; there are {quoted(named, 8)}."
                f"{did_you_mean(pattern, named)}"
            )
    return [name for name, names in named.items() if any(matches(names, pattern) for pattern in patterns)]


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
