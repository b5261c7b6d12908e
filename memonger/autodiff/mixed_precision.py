"""A float32 model → the same in mixed precision: products in 16 bits, parameters and what needs precision in float32.

Micikevicius et al. 2018, "Mixed Precision Training". Parameters stay float32 initializers, the master weights, and are
cast where they are read. Which operator runs in which type follows PyTorch's autocast: products in 16 bits; reductions,
normalizations, softmax, losses, exponentials, logarithms and powers in float32; all others in the widest type of the
computed values that meet there. Beyond autocast, which keeps both, the backward pass reads a value that was rounded for
a product as rounded (`memonger.autodiff.kept_casts`), so that 16 bits of it are kept.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
import onnx
import onnx_ir as ir

from memonger.autodiff.separate import separate_parameters, statistics_of_norms
from memonger.autodiff.transposes import fold_transposes_into_products
from memonger.errors import PlanError
from memonger.ir.emitter import Emitter
from memonger.ir.model import Model
from memonger.ir.names import name_nodes
from memonger.ir.operators import facts
from memonger.ir.passes import run_passes
from memonger.ir.training_roles import Training
from memonger.ir.values import NARROW, all_values, subgraphs
from memonger.model import forward_model, parameters
from memonger.model.load import Source, load
from memonger.model.opset import raise_opset
from memonger.option_names import Precision
from memonger.words import check_choice

logger = logging.getLogger(__name__)


KEY = "memonger.precision"
"""Metadata of a model in mixed precision: the name of its narrow type."""

TYPES: Mapping[str, ir.DataType] = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}

_FLOAT = ir.DataType.FLOAT

_PRODUCTS = frozenset({"Attention", "Conv", "ConvTranspose", "Einsum", "GRU", "Gemm", "LSTM", "MatMul", "RNN"})

_PRECISE = frozenset({
    "Acos", "Asin", "BatchNormalization", "CastLike", "Cosh", "CumProd", "CumSum", "Exp", "GlobalAveragePool",
    "GroupNormalization", "InstanceNormalization", "LRN", "LayerNormalization", "Log", "LogSoftmax", "LpNormalization",
    "MeanVarianceNormalization", "NegativeLogLikelihoodLoss", "Pow", "QuantizeLinear", "RMSNormalization",
    "Reciprocal", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMean", "ReduceProd", "ReduceSum",
    "ReduceSumSquare", "Sinh", "Softmax", "SoftmaxCrossEntropyLoss", "Softplus", "Tan",
})  # fmt: skip


def to_mixed_precision(
    source: Source | Model,
    precision: Precision,
    *,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
) -> Model:
    """Write a forward model in mixed precision, to be differentiated.

    Parameters, inputs and outputs keep their names and are float32. `memonger.differentiate` scales the loss of a
    model in float16, whose gradients would vanish else: see `memonger.TrainingSession`. `TrainingSession.evaluate` and
    ``export`` are of the float32 model. `to_training_mode` goes before or after. ONNX's operator set 20, in which
    models are differentiated, has no convolutions in bfloat16: they stay in float32.

    onnxruntime's CPU has next to no kernels of 16 bits. There a plan at level ``rewrite``, the default of training,
    keeps values in 16 bits and computes in float32. At other levels onnxruntime computes and keeps float16 in float32,
    and refuses bfloat16, which portable plans have: ``onnx.reference`` runs them.

    Args:
        source: What `memonger.load` takes or gives.
        precision: ``float16`` or ``bfloat16``.
        batch: See `memonger.load`.
        dims: See `memonger.load`.

    Raises:
        LoadError: the model can't be read.
        PlanError: there is no such precision; the model is differentiated, is of 16 bits in part already, or has no
            product in float32.
    """
    check_choice("precision", precision, TYPES, PlanError)
    model = load(source, batch=batch, dims=dims)
    if model.is_differentiated:
        raise PlanError(f"{model.name} is differentiated: give the forward model.")
    for value in all_values(model.graph):
        if value.dtype in NARROW:
            assert value.dtype is not None
            raise PlanError(
                f"{model.name}: '{value.name}' is {value.dtype.name.lower()} already: mixed precision is made of a "
                "float32 model, whose parameters stay float32."
            )
    model = separate_parameters(model)
    trained = parameters.trainable(model)
    copy = run_passes(model.clone(), "differentiate", raise_opset, name_nodes)
    work = _Narrowing(copy.ir, Emitter(copy.ir), TYPES[precision], frozenset(trained))
    fold, narrow = partial(fold_transposes_into_products, op=work.op), partial(narrow_products, work=work)
    copy = run_passes(copy, "differentiate", fold, narrow)
    copy.ir.metadata_props[parameters.KEY] = json.dumps(list(trained))
    if forward_model.KEY not in copy.ir.metadata_props:
        updated = statistics_of_norms(model.ir)  # by `to_training_mode`, which may follow
        forward_model.embed(copy.ir, model.ir, Training(parameters=(*trained, *updated)))
    copy.ir.metadata_props[KEY] = precision
    logger.info("%s: %d products in %s.", model.name, work.products, precision)
    return copy


def narrow_products(model: Model, work: "_Narrowing") -> bool:
    """A pass: products are in 16 bits, and what goes with them; the graph's outputs stay float32.

    Raises:
        PlanError: the model has no product of float32 values.
    """
    for node in list(model.graph):
        with work.op.at(str(node.name)):
            _turn(work, node)
    if not work.products:
        precision = next(name for name, dtype in TYPES.items() if dtype == work.narrow)
        none = " (up to operator set 21 ONNX has no convolutions in bfloat16)" if precision == "bfloat16" else ""
        raise PlanError(f"{model.name} has no product of float32 values that ONNX has in {precision}{none}.")
    # Cast the graph's outputs back to float32, under their names
    graph = work.model.graph
    for index, value in enumerate(graph.outputs):
        if value.dtype != work.narrow:
            continue
        name, value.name = value.name, work.op.fresh(f"{value.name}.{work.narrow.name.lower()}")
        wide = work.cast(value, _FLOAT)
        wide.name = name
        graph.outputs[index] = wide
    graph.extend(work.op.nodes)
    work.op.nodes = []
    for value in list(model.graph.initializers.values()):
        if not (value.uses() or value.is_graph_output()):  # constants of 16 bits stand for it
            del model.graph.initializers[str(value.name)]
    return True


def precision_of(model: ir.Model) -> str | None:
    """The narrow type of a model in mixed precision; None for any other."""
    return model.metadata_props.get(KEY)


@dataclass(slots=True)
class _Narrowing:
    """A model being written in mixed precision.

    Attributes:
        model: What is changed.
        op: Where casts go.
        narrow: The type of 16 bits.
        trained: Names of the parameters.
        products: How many nodes run in 16 bits for being products.
        casts: Value and type → the value cast, each made once.
    """

    model: ir.Model
    op: Emitter
    narrow: ir.DataType
    trained: frozenset[str]
    products: int = 0
    casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = field(default_factory=dict)

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """The value in that type. What is no parameter and constant is cast here, not in the graph."""
        if value.dtype == dtype:
            return value
        if (value, dtype) not in self.casts:
            content = None if value.name in self.trained else self.op.content(value)
            made = self.op.Cast(value, to=int(dtype)) if content is None else self.op.constant(content.tolist(), dtype)
            self.casts[value, dtype] = made
            self.casts[made, value.dtype or _FLOAT] = value  # never cast back
        return self.casts[value, dtype]


def _turn(work: _Narrowing, node: ir.Node) -> None:
    """Give a node its type, and cast what it reads. Its inputs are turned already."""
    if facts(node).shape_only:
        return
    narrow = _tensors_of_one_type(work, node)
    if narrow is None:
        # Let a node, with the nodes of its subgraphs, read float32 where it read that before
        for each in _with_inner(node):
            for index, value in enumerate(each.inputs):
                if value is not None and value.dtype == work.narrow:
                    each.replace_input_with(index, work.cast(value, _FLOAT))
        _insert(work, node)
        return
    for index in narrow:
        value = node.inputs[index]
        if value is not None:
            node.replace_input_with(index, work.cast(value, work.narrow))
    _insert(work, node)
    formal = _schema(node.op_type, work.op.opset)
    for value, kind in zip(node.outputs, _kinds(formal.outputs, len(node.outputs)), strict=True):
        if kind == formal.outputs[0].type_str and value.name:
            value.type = ir.TensorType(work.narrow)
    work.products += node.op_type in _PRODUCTS


def _tensors_of_one_type(work: _Narrowing, node: ir.Node) -> list[int] | None:
    """The inputs to be cast for a node that runs in 16 bits; None for one that keeps its types."""
    if node.domain or node.op_type in _PRECISE or subgraphs(node) or not node.outputs[0].name:
        return None
    if node.op_type in ("Cast", "Identity") and node.outputs[0].is_graph_output():
        return None
    is_product = node.op_type in _PRODUCTS
    if not is_product and any(value.is_graph_output() for value in node.outputs):
        return None
    formal = _schema(node.op_type, work.op.opset)
    kind = formal.outputs[0].type_str
    allowed = {one.type_param_str: one.allowed_type_strs for one in formal.type_constraints}.get(kind, ())
    if f"tensor({work.narrow.name.lower()})" not in allowed or node.outputs[0].dtype != _FLOAT:
        return None
    found = [index for index, each in enumerate(_kinds(formal.inputs, len(node.inputs))) if each == kind]
    values = [value for value in (node.inputs[index] for index in found) if value is not None]
    if not all(_fits(work, value) for value in values):
        return None
    computed = [v for v in values if v.is_graph_input() or not v.is_initializer()]  # others take the type they meet
    if is_product:
        return found
    return found if computed and all(value.dtype == work.narrow for value in computed) else None


def _fits(work: _Narrowing, value: ir.Value) -> bool:
    """Whether a value may be cast: what 16 bits can't hold, as -1e38 in a mask or a number such as 1e-12, may not."""
    content = work.op.content(value)
    if content is None:
        return value.dtype in (_FLOAT, work.narrow)
    with np.errstate(over="ignore", under="ignore"):
        rounded = content.astype(work.narrow.numpy()).astype(np.float32)
    is_held = np.isfinite(rounded) == np.isfinite(content)
    if value.name not in work.trained or content.size == 1:  # of a parameter's elements some may well vanish
        is_held &= (rounded == 0) == (content == 0)
    return bool(is_held.all())


def _with_inner(node: ir.Node) -> Iterator[ir.Node]:
    pending = [node]
    while pending:
        each = pending.pop()
        yield each
        pending.extend(inner for graph in subgraphs(each) for inner in graph)


def _insert(work: _Narrowing, node: ir.Node) -> None:
    work.model.graph.insert_before(node, work.op.nodes)
    work.op.nodes = []


@cache
def _schema(op_type: str, opset: int) -> onnx.defs.OpSchema:
    return onnx.defs.get_schema(op_type, opset, "")


def _kinds(formal: Sequence[onnx.defs.OpSchema.FormalParameter], count: int) -> list[str]:
    """The type variable of each input, or output; the last formal one may stand for many."""
    kinds = [each.type_str for each in formal]
    return [*kinds, *kinds[-1:] * (count - len(kinds))][:count]
