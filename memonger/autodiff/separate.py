"""One initializer for parameters that only began equal → one for each.

PyTorch's exporter stores equal initializers once: the weights of a fresh network's normalizations, its biases of zeros,
the layers of an ``nn.TransformerEncoder``, which are copies of one. In training they would stay one parameter with one
gradient. What is one by intention, an embedding that the output layer reads as well, must stay one.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir

from memonger.ir.model import Model
from memonger.ir.modules import SCOPES, module_of
from memonger.ir.names import fresh, named_by
from memonger.ir.passes import run_passes
from memonger.ir.values import all_values, is_floating
from memonger.model import parameters
from memonger.model.load import Source, load
from memonger.words import quoted

logger = logging.getLogger(__name__)

_FOLDED = "pkg.onnxscript.optimizer.folded_from"
"""Metadata PyTorch's exporter writes on initializers: what they were computed from."""

_PARAMETERS, _QUOTED = re.compile(r": PARAMETER target='([^']+)'"), re.compile(r"'([^']+)'")

_CORNER = 8
_MANY = 64  # elements: two matrices of fewer may agree by chance

_NORM = "BatchNormalization"
_ROLES: Mapping[str, Sequence[str]] = {
    _NORM: ("", "weight", "bias", "running_mean", "running_var"),
    **dict.fromkeys(
        ("Conv", "ConvTranspose", "Gemm", "GroupNormalization", "InstanceNormalization", "LayerNormalization"),
        ("", "weight", "bias"),
    ),
    "Add": ("bias", "bias"),
    "MatMul": ("weight", "weight"),
}
"""What PyTorch calls an operator's inputs."""


@dataclass(frozen=True, slots=True)
class _Use:
    """As what an initializer is read. Nodes of one module that read it at one input read one parameter.

    Attributes:
        module: The PyTorch module; of a node without one its own name.
        op_type: The node's operator.
        index: The input's.
    """

    module: str
    op_type: str
    index: int

    @property
    def name(self) -> str | None:
        """What PyTorch would call the parameter, where the operator tells."""
        roles = _ROLES.get(self.op_type, ())
        return f"{self.module}.{roles[self.index]}" if self.index < len(roles) else None


def separate_parameters(
    source: Source | Model,
    patterns: Sequence[str] | None = None,
    *,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
) -> Model:
    """Give each use of an initializer that stands for several parameters an initializer of its own.

    `differentiate`, `to_training_mode` and `to_mixed_precision` begin with it, with ``patterns`` left out: then what is
    one number throughout, zeros or ones, and is read by different modules of PyTorch's is separated. Other initializers
    that several modules read stay one parameter, and a warning names them. A model that lists its parameters
    (``metadata_props["memonger.parameters"]``, as `from_torch` writes it) is as it should be, and so is the result.

    New initializers are called by module and role, as ``layers.1.norm2.bias``. `TrainingSession.export` writes them
    into the model that the plan holds; the file that was separated has no place for them. What an exporter left out
    can't come back: PyTorch's drops a linear layer's bias of zeros where it optimizes (``optimize=False`` keeps it,
    `from_torch` keeps all).

    Args:
        source: What `memonger.load` takes or gives.
        patterns: Names or glob patterns of the initializers to separate, by the modules that read them, or without
            such by the nodes; none: ``[]``. None: see above.
        batch: See `memonger.load`.
        dims: See `memonger.load`.

    Raises:
        LoadError: the model can't be read.
        PlanError: a pattern names no initializer that is read more than once.
    """
    model = load(source, batch=batch, dims=dims)
    if patterns is None and parameters.KEY in model.ir.metadata_props:
        return model
    shared = _shared(model)
    chosen = _chosen(model, shared, patterns)
    if patterns is None:
        _warn_of_others(model, {name: uses for name, uses in shared.items() if name not in chosen})
        _warn_of_transposed(model)
        _warn_of_folded(model)
    if not chosen and patterns is None:
        return model
    trained = parameters.trainable(model)
    separate = partial(separate_initializers, uses={name: shared[name] for name in chosen}, trained=trained)
    return run_passes(model.clone(), "differentiate", separate)


def separate_initializers(model: Model, uses: "Mapping[str, Sequence[_Use]]", trained: Sequence[str]) -> bool:
    """A pass: each use of these initializers has its own, and the model lists its parameters."""
    made = {name: _separate(model.ir, name, uses[name]) for name in uses}
    statistics = set(statistics_of_norms(model.ir))
    listed = [each for name in trained for each in made.get(name, [name]) if each not in statistics]
    model.ir.metadata_props[parameters.KEY] = json.dumps(listed)
    if made:
        logger.info("%s: %s stood for several parameters, and were separated.", model.name, ", ".join(made))
    return bool(made)


def _shared(model: Model) -> dict[str, list[_Use]]:
    """Initializers that may stand for several parameters, with the uses of each in the graph's order."""
    trained = {*parameters.trainable(model), *statistics_of_norms(model.ir)}
    place = {node: number for number, node in enumerate(model.graph)}
    shared = {}
    for name, value in model.graph.initializers.items():
        readers = sorted((place.get(node, -1), index) for node, index in value.uses())
        if name not in trained or value.const_value is None or value.const_value.size < 2:
            continue
        if len(readers) < 2 or readers[0][0] < 0 or value.is_graph_output() or value.is_graph_input():
            continue  # read in a subgraph, or by one node alone
        uses = list(dict.fromkeys(_use(node, index) for node, index in sorted(value.uses(), key=lambda u: place[u[0]])))
        if len(uses) > 1:
            shared[name] = uses
    return shared


def statistics_of_norms(model: ir.Model) -> list[str]:
    """Names of the running statistics that BatchNormalization nodes read."""
    norms = (node for node in model.graph if node.op_type == _NORM and not node.domain)
    return [str(v.name) for node in norms for v in node.inputs[3:5] if v is not None and v.is_initializer()]


def _use(node: ir.Node, index: int) -> _Use:
    module = module_of(node) if SCOPES in node.metadata_props else None
    return _Use(module or str(node.name or node.outputs[0].name), node.op_type, index)


def _chosen(model: Model, shared: Mapping[str, Sequence[_Use]], patterns: Sequence[str] | None) -> list[str]:
    if patterns is None:
        return [name for name in shared if _is_of_modules(model.graph.initializers[name]) and _is_fresh(model, name)]
    named = {name: [name] for name in shared}
    return named_by(named, patterns, f"{model.name}: patterns", "parameter that is read more than once")


def _is_of_modules(value: ir.Value) -> bool:
    """Whether the file says of each node that reads it which module it is of."""
    return all(SCOPES in node.metadata_props and module_of(node) is not None for node, _ in value.uses())


def _is_fresh(model: Model, name: str) -> bool:
    """Whether it is one number throughout: so are many parameters before training, and hardly one that is shared."""
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    content = tensor.numpy().reshape(-1)
    return bool(np.all(content == content[0]))


def _warn_of_others(model: Model, shared: Mapping[str, Sequence[_Use]]) -> None:
    """Warn of what is read as one kind of parameter in several places, and may be several."""
    for name, uses in shared.items():
        alike = [use for use in uses if (use.op_type, use.index) == (uses[0].op_type, uses[0].index)]
        known = _is_of_modules(model.graph.initializers[name])
        if len(alike) > 1 and (known or _is_fresh(model, name)):
            logger.warning(
                "%s: '%s' is one parameter with one gradient, read by %s. If the exporter stored equal ones once, "
                "memonger.separate_parameters(model, ['%s']) gives each its own; [] says that none shall be.",
                model.name, name, quoted((use.module for use in uses), 4), name,
            )  # fmt: skip


def _warn_of_transposed(model: Model) -> None:
    """Warn of matrices that are each other's transpose: one parameter that the exporter stored twice, as of tied heads.

    Of each only a corner is read, and all of it where the corners agree.
    """
    trained, corners = set(parameters.trainable(model)), dict[bytes, tuple[str, np.ndarray]]()
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or not is_floating(value) or len(tensor.shape) != 2 or tensor.size < _MANY:
            continue
        matrix = tensor.numpy()
        other, turned = corners.get(matrix[:_CORNER, :_CORNER].T.tobytes(), ("", None))
        if turned is not None and not {name, other}.isdisjoint(trained) and np.array_equal(matrix, turned.T):
            alone = [each for each in (other, name) if each not in trained]
            logger.warning(
                "%s: '%s' and '%s' are each other's transpose, stored twice: what was one parameter in PyTorch (a tied "
                "head, say) becomes two, %s. memonger.from_torch keeps it one, and so does "
                "torch.onnx.export(..., optimize=False).", model.name, other, name,
                f"of which '{alone[0]}' isn't trained" if alone else "each trained on its own",
            )  # fmt: skip
        corner = matrix[:_CORNER, :_CORNER]
        if corner.min() != corner.max():
            corners.setdefault(corner.tobytes(), (name, matrix))


def _warn_of_folded(model: Model) -> None:
    """Warn of parameters that became constants in the export, as of ``x @ w.t()``: nothing says how, so none trains."""
    names = set(_PARAMETERS.findall(model.graph.metadata_props.get(parameters.EXPORTED_SIGNATURE, "")))
    trained = set(parameters.trainable(model))
    for name, value in model.graph.initializers.items():
        made_of = [each for each in _QUOTED.findall(value.metadata_props.get(_FOLDED, "")) if each in names]
        if made_of and name not in trained:
            logger.warning(
                "%s: '%s' isn't trained: PyTorch's exporter computed the constant '%s' from it. memonger.from_torch "
                "keeps it a parameter, and so does torch.onnx.export(..., optimize=False).",
                model.name, "' and '".join(made_of), name,
            )  # fmt: skip


def _separate(model: ir.Model, name: str, uses: Sequence[_Use]) -> list[str]:
    """Give each use its own initializer; returns their names, in the order of the uses."""
    graph, value = model.graph, model.graph.initializers[name]
    taken = {str(v.name) for v in all_values(graph)}
    module = name.rpartition(".")[0]
    kept = next((u for u in uses if u.name == name), next((u for u in uses if u.module == module), uses[0]))
    made = {kept: value}
    for use in uses:
        if use is kept:
            continue
        own = ir.Value(
            name=fresh(use.name or f"{use.module}.{name.rpartition('.')[2]}", taken),
            type=value.type, shape=value.shape, const_value=value.const_value,
        )  # fmt: skip
        own.metadata_props.update(value.metadata_props)
        graph.register_initializer(own)
        made[use] = own
    for node, index in list(value.uses()):
        node.replace_input_with(index, made[_use(node, index)])
    return [str(made[use].name) for use in uses]
