"""Which module of the network a node belongs to: as the exporter wrote it down, else as the node's name has it."""

import ast
from collections.abc import Iterable, Mapping

import onnx_ir as ir

from memonger.graph import schedule

SCOPES = "pkg.torch.onnx.name_scopes"
"""Where PyTorch's exporter writes a node's modules: a list of paths in Python, outermost first, its own name last."""

Path = tuple[str, ...]


class Modules:
    """The modules of nodes, by the nodes' names.

    What differentiation makes (``grad/<node>/...``, ``update/<parameter>/...``) belongs to the module of the node or
    parameter; a recomputation to that of its node.

    Args:
        models: The planned model and what it was made from. onnxruntime's optimizer drops what exporters write on
            nodes, so that the nodes it made are found by the values they write.
    """

    def __init__(self, models: Iterable[ir.Model]) -> None:
        self._of_name: dict[str, Path] = {}
        for model in models:
            for node in model.graph:
                path = _scopes(node.metadata_props)
                if path:
                    names = (node.name, *(value.name for value in node.outputs))
                    self._of_name.update((name, path) for name in names if name)

    def path(self, node: str, writes: Iterable[str] = ()) -> Path:
        """The modules around a node, outermost first; empty where nothing is known."""
        for name in (node, *writes):
            found = self._of_name.get(schedule.original(name))
            if found:
                return found
        kind, _, rest = schedule.original(node).partition("/")
        if kind not in ("grad", "update", "loss") or not rest:
            return _parts(schedule.original(node))
        around = rest.rpartition("/")[0]
        if kind == "update":
            return _parts(around or rest)[:-1] or (kind,)
        return self._by_prefix(around) or (kind,)

    def _by_prefix(self, name: str) -> Path:
        """The path of the node whose name this one begins with, else the name as a path."""
        parts = name.split("/")
        for end in range(len(parts), 0, -1):
            found = self._of_name.get("/".join(parts[:end]))
            if found:
                return found
        return _parts(name)


def _scopes(metadata: Mapping[str, str]) -> Path:
    """The innermost module's path; its parts are joined by dots."""
    try:
        scopes = ast.literal_eval(metadata.get(SCOPES, "[]"))
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # anyone may have written it
        return ()
    inner = [each for each in scopes[:-1] if isinstance(each, str) and each] if isinstance(scopes, list) else []
    return tuple(inner[-1].split(".")) if inner else ()


def _parts(name: str) -> Path:
    """A name as a path: parts between slashes, else between dots."""
    return tuple(part for part in name.split("/" if "/" in name else ".") if part)
