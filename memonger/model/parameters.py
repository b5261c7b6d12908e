"""Which of a model's tensors are trained."""

import fnmatch
import json
from collections.abc import Sequence

import onnx_ir as ir

from memonger.errors import PlanError
from memonger.ir.model import Model
from memonger.ir.modules import reads_parameter
from memonger.ir.operators import facts
from memonger.ir.values import is_floating
from memonger.words import NAME, did_you_mean, option, quoted

KEY = "memonger.parameters"
"""Metadata of a model: a JSON list of its parameters' names."""

EXPORTED_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
"""Metadata PyTorch's exporter writes on initializers: PARAMETER, BUFFER or CONSTANT_TENSOR."""

EXPORTED_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
"""Metadata PyTorch's exporter writes on the graph: the parameters, among others."""


_WEIGHTS = {
    "MatMul": (0, 1), "Gemm": (0, 1, 2), "Conv": (1, 2), "ConvTranspose": (1, 2), "LSTM": (1, 2, 3), "GRU": (1, 2, 3),
    "RNN": (1, 2, 3),
}  # fmt: skip


def trainable(model: Model) -> tuple[str, ...]:
    """Names of the parameters: what the file says they are, else every float initializer that isn't something else.

    What the file says: the list memonger wrote (`memonger.from_torch`), or what PyTorch's exporter wrote on each
    initializer, and of those it made of parameters on the nodes that read them. Else running statistics, settings such
    as the bounds of Clip, and constants are left out.
    """
    listed = model.ir.metadata_props.get(KEY)
    if listed is not None:
        try:
            names = json.loads(listed)
        except (ValueError, RecursionError):
            names = None
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise PlanError(f"{model.name}: its metadata '{KEY}' is not a JSON list of names.")
        there = {str(v.name) for v in (*model.graph.initializers.values(), *model.graph.inputs)}
        return tuple(n for n in names if n in there)
    values = [v for v in model.graph.initializers.values() if is_floating(v) and not v.meta.get("constant")]
    kinds = {str(v.name): v.metadata_props[EXPORTED_KIND] for v in values if EXPORTED_KIND in v.metadata_props}
    if kinds:
        named = {name for name, kind in kinds.items() if kind.rpartition(".")[2] == "PARAMETER"}
        names = ((str(v.name), v) for v in values)
        return tuple(name for name, v in names if name in named or (name not in kinds and _is_folded(v)))
    return tuple(str(v.name) for v in values if not _is_setting(v))


def _is_folded(value: ir.Value) -> bool:
    """Whether PyTorch's exporter made it of a parameter: a linear layer's weight, turned; an LSTM's, in ONNX's order.

    It writes no kind then, but at the node that reads it the call, which names parameters.
    """
    uses = value.uses()
    return bool(uses) and all(index in _WEIGHTS.get(n.op_type, ()) and reads_parameter(n) for n, index in uses)


def _is_setting(value: ir.Value) -> bool:
    """Whether every node that reads it reads it as a setting, or as a running statistic."""
    uses = value.uses()
    return bool(uses) and all(index in facts(node).settings for node, index in uses)


def choose(model: Model, wrt: Sequence[str] | None, frozen: Sequence[str]) -> tuple[ir.Value, ...]:
    """What to differentiate by, in the model's order.

    Args:
        model: A loaded forward model.
        wrt: Names or glob patterns of initializers and inputs; None: the parameters.
        frozen: Names or glob patterns of what is left out.

    Raises:
        PlanError: a pattern matches nothing; integers are asked for; nothing is left.
    """
    name = model.name
    values = {str(v.name): v for v in (*model.graph.inputs, *model.graph.initializers.values())}
    chosen = dict.fromkeys(trainable(model) if wrt is None else _matching(values, wrt, name, "wrt"))
    for left_out in _matching(values, frozen, name, "frozen"):
        chosen.pop(left_out, None)
    for each in chosen:
        if not is_floating(values[each]):
            kind = values[each].dtype
            raise PlanError(
                f"{name}: '{each}' is {kind.name.lower() if kind else 'no tensor'}: only floating-point tensors have "
                f"gradients. Leave it out of {option('wrt')}, or freeze it ({option('frozen', [each])})."
            )
    if not chosen:
        raise PlanError(
            f"{name} has nothing to differentiate by: no floating-point initializer is left. Name inputs or "
            f"initializers ({option('wrt', [NAME])})."
        )
    return tuple(values[each] for each in chosen)


def _matching(values: dict[str, ir.Value], patterns: Sequence[str], name: str, flag: str) -> list[str]:
    matching: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        names = [pattern] if pattern in values else [n for n in values if fnmatch.fnmatchcase(n, pattern)]
        if not names:
            raise PlanError(
                f"{name}: {option(flag)} names '{pattern}', which is no input or initializer; there are "
                f"{quoted(values, 8)}.{did_you_mean(pattern, values)}"
            )
        matching += names
    return matching
