"""The modules around a step, as a path: the exporter's where it left them, else as the node's name has them."""

from collections.abc import Iterable

import onnx_ir as ir

from memonger.ir import marks
from memonger.ir.modules import module_of

Path = tuple[str, ...]


class Modules:
    """The modules of nodes, by the nodes' names.

    What differentiation makes (``grad/<node>/...``, ``update/<parameter>/...``) belongs to the module of the node or
    parameter; a recomputation, or a node's copy for a chunk, to that of its node.

    Args:
        model: The planned model.
    """

    def __init__(self, model: ir.Model) -> None:
        self._of_name: dict[str, Path] = {}
        self._own: dict[str, str] = {}
        for node in model.graph:
            own = marks.own_node(node)
            if own != node.name:
                self._own[str(node.name)] = own
            module = module_of(node)
            if module:
                names = (node.name, *(value.name for value in node.outputs))
                self._of_name.update((name, tuple(module.split("."))) for name in names if name)

    def path(self, node: str, writes: Iterable[str] = ()) -> Path:
        """The modules around a node, outermost first; empty where nothing is known."""
        node = self._own.get(node, node)
        for name in (node, *writes):
            modules = self._of_name.get(name)
            if modules:
                return modules
        kind, _, rest = node.partition("/")
        if kind not in ("grad", "update", "loss") or not rest:
            return _parts(node)
        around = rest.rpartition("/")[0]
        if kind == "update":
            return _parts(around or rest)[:-1] or (kind,)
        return self._by_prefix(around) or (kind,)

    def _by_prefix(self, name: str) -> Path:
        """The path of the node whose name this one begins with, else the name as a path."""
        parts = name.split("/")
        for end in range(len(parts), 0, -1):
            modules = self._of_name.get("/".join(parts[:end]))
            if modules:
                return modules
        return _parts(name)


def _parts(name: str) -> Path:
    """A name as a path: parts between slashes, else between dots."""
    return tuple(part for part in name.split("/" if "/" in name else ".") if part)
