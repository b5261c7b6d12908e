"""The PyTorch module that a node comes from, where the exporter left it."""

import ast
import re

import onnx_ir as ir

from memonger.ir.model import Model

SCOPES = "pkg.torch.onnx.name_scopes"
"""Where PyTorch's exporter writes the modules around a node, the outermost first, and the node's own name last."""

_TRACED = "pkg.torch.onnx.fx_node"
"""Where it writes the call that it translated."""

_EMBEDDING = re.compile(r"aten\.embedding\.default\]\(args = \([^,()]+, [^,()]+, (\d+)[,)]")

_FUSED = re.compile(r"_nchwc$|/\w+Fusion/?$")
"""What onnxruntime's optimizer puts behind the name of a node, or of its output, for the node it puts there instead."""


_MADE = re.compile(r"^reorder$|_token_\d+$")
"""Names that onnxruntime's optimizer gives to values that it makes."""


def source_name(name: str) -> str:
    """The name that a node, or its output, had before onnxruntime's optimizer put another node there, where it says."""
    return _FUSED.sub("", name)


def is_optimizers(name: str) -> bool:
    """Whether onnxruntime's optimizer made a value and gave it a name of its own, as ``reorder_token_6``."""
    return _MADE.search(name) is not None


def module_of(node: ir.Node) -> str | None:
    """The path of the PyTorch module a node comes from, as in ``named_modules()``; None where the file doesn't say.

    PyTorch's exporter writes it into the node's metadata, the older one (``dynamo=False``) into its name.
    """
    scopes = node.metadata_props.get(SCOPES)
    if scopes is None:
        # Of ``/layers/layers.0/conv/Conv`` ``layers.0.conv``: a part that repeats the one before it goes on from there.
        name = node.name or ""
        if not name.startswith("/"):
            return None
        path: list[str] = []
        for part in name.split("/")[1:-1]:
            if path and part.startswith(path[-1] + "."):
                path.pop()
            path.append(part)
        return ".".join(path) or None
    try:
        names = ast.literal_eval(scopes)
        return str(names[-2]) or None
    except (ValueError, SyntaxError, TypeError, LookupError, MemoryError, RecursionError):
        return None  # written by another program


def padding_row(node: ir.Node) -> int | None:
    """The row of an embedding that PyTorch trains by no lookup (``padding_idx``); None: there is none, or who knows."""
    call = _EMBEDDING.search(node.metadata_props.get(_TRACED, ""))
    return None if call is None or node.op_type != "Gather" else int(call[1])


def reads_parameter(node: ir.Node) -> bool:
    """Whether PyTorch's exporter says that the call it translated into this node read a parameter."""
    return "%p_" in node.metadata_props.get(_TRACED, "")


def carry_modules(model: Model, source: ir.Model) -> bool:
    """A pass: nodes have the modules of those of the source, of which onnxruntime's optimizer made the model.

    A node is known by its name, or by that of a value it writes or was named after.
    """
    scopes = {node.name: node.metadata_props[SCOPES] for node in source.graph if SCOPES in node.metadata_props}
    if not scopes:
        return False
    of_value = {value.name: scopes[node.name] for node in source.graph if node.name in scopes for value in node.outputs}
    for node in model.graph:
        base = source_name(str(node.name))
        names = (base, *(value.name for value in node.outputs))
        scope = scopes.get(base) or next((of_value[name] for name in names if name in of_value), None)
        if scope is not None:
            node.metadata_props.setdefault(SCOPES, scope)
    return True
