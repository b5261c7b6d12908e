"""A model in inference form → the same in training form.

BatchNormalization normalizes by the batch's own statistics and moves the running ones; Dropout drops.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import onnx_ir as ir

from memonger.autodiff.over_ranks import over_ranks
from memonger.autodiff.separate import separate_parameters
from memonger.errors import PlanError
from memonger.ir import training_roles
from memonger.ir.emitter import Emitter
from memonger.ir.model import Model
from memonger.ir.names import name_nodes
from memonger.ir.passes import run_passes
from memonger.ir.rewrite import remove_unused
from memonger.ir.training_roles import Training
from memonger.ir.values import input_at
from memonger.model import forward_model, parameters
from memonger.model.load import Source, load
from memonger.model.opset import raise_opset

logger = logging.getLogger(__name__)

_BN = "BatchNormalization"
_SLOTS = {3: "running_mean", 4: "running_var"}


def to_training_mode(
    source: Source | Model,
    *,
    dropout: bool = True,
    momentum: float | None = None,
    sync_batch_norm: bool = False,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
) -> Model:
    """Turn a model's BatchNormalization and Dropout from inference form into training form.

    BatchNormalization then normalizes by the batch's mean and variance, and its running statistics get new content, the
    outputs ``<running mean>.next`` and ``<running variance>.next``, as PyTorch has it: with n values a channel, the
    variance that is blended in is the batch's times n / (n - 1). Names of parameters and of values stay. What is in
    training form already, and all other operators, stay as they are; but where nothing reads the statistics that such a
    BatchNormalization moves, as PyTorch's exporter writes it, these are outputs too.

    Args:
        source: What `memonger.load` takes or gives.
        dropout: Whether Dropout shall drop.
        momentum: What is kept of the running statistics at each step (PyTorch's ``momentum`` is 1 minus that); None:
            what each node says, 0.9 where it says nothing.
        sync_batch_norm: Normalize by the mean and variance of all ranks' batches together, as PyTorch's SyncBatchNorm
            does: two small collectives for each BatchNormalization, forward and backward. For plans with ``buckets``.
        batch: See `memonger.load`.
        dims: See `memonger.load`.

    Raises:
        LoadError: the model can't be read.
        PlanError: a channel has one value only, whose variance is nothing; statistics that are computed, or that are
            read for something else; the model is a training model already.
    """
    if momentum is not None and not 0 <= momentum <= 1:
        raise PlanError(f"momentum is the share of the old statistics that is kept: it must be 0 to 1, not {momentum}.")
    model = load(source, batch=batch, dims=dims)
    if training_roles.KEY in model.ir.metadata_props:
        raise PlanError(f"{model.name} is in training form already.")
    model = separate_parameters(model)
    trained = parameters.trainable(model)
    copy = run_passes(model.clone(), "differentiate", raise_opset, name_nodes)
    work = _TrainingForm(copy, Emitter(copy.ir), momentum, sync_batch_norm)
    work.updates.update(statistics_of(copy.ir))
    turn = partial(turn_to_training_form, work=work, dropout=dropout)
    give_out = partial(give_out_statistics, work=work, trained=trained)
    copy = run_passes(copy, "differentiate", turn, give_out, remove_unused)
    if forward_model.KEY not in copy.ir.metadata_props:  # `to_mixed_precision` puts the float32 model there
        roles = training_roles.read(copy.ir, copy.name) or Training()
        forward_model.embed(copy.ir, model.ir, replace(roles, parameters=trained))
    return copy


def turn_to_training_form(model: Model, work: "_TrainingForm", *, dropout: bool) -> bool:
    """A pass: BatchNormalization normalizes by the batch and moves its statistics, and Dropout drops where asked to."""
    turned = _turn_norms(work, lambda node: _is_inference_norm(node) or _loses_statistics(node))
    dropped = _turn_dropouts(work) if dropout else 0
    if not turned and not dropped and not work.updates:
        logger.warning(
            "%s has neither BatchNormalization nor Dropout in inference form: it is as it was. Exporters fold the one "
            "into convolutions and leave the other out; memonger.from_torch keeps both.",
            model.name,
        )
    logger.info("%s: %d BatchNormalization and %d Dropout turned into training form.", model.name, turned, dropped)
    return turned + dropped > 0


def give_out_statistics(model: Model, work: "_TrainingForm", trained: Sequence[str]) -> bool:
    """A pass: new running statistics are outputs, and the model says what its inputs and outputs are for."""
    outputs = [str(value.name) for value in model.graph.outputs if value.name not in work.updates.values()]
    before = len(model.graph.outputs)
    _output_statistics(work)
    scalars = {role: str(value.name) for role, value in work.op.scalars.items()}
    roles = Training(outputs=tuple(outputs), updates=work.updates, statistics=tuple(work.updates), scalars=scalars)
    training_roles.write(model.ir, roles)
    model.ir.metadata_props[parameters.KEY] = json.dumps([name for name in trained if name not in work.updates])
    return len(model.graph.outputs) > before


@dataclass(slots=True)
class _TrainingForm:
    """A model being turned.

    Attributes:
        model: The copy that is changed.
        op: Where nodes go.
        momentum: See `to_training_mode`.
        synchronized: Whether statistics are those of all ranks.
        updates: Running statistic → the output that is its new content.
        current: Running statistic → its newest content: nodes may share one.
        owners: Layer and place → its running statistic.
    """

    model: Model
    op: Emitter
    momentum: float | None
    synchronized: bool = False
    updates: dict[str, str] = field(default_factory=dict)
    current: dict[ir.Value, ir.Value] = field(default_factory=dict)
    owners: dict[tuple[object, ...], ir.Value] = field(default_factory=dict)


def _is_norm(node: ir.Node) -> bool:
    return node.op_type == _BN and node.domain == ""


def _is_inference_norm(node: ir.Node) -> bool:
    return _is_norm(node) and not node.attributes.get_int("training_mode", 0)


def inference_norms(model: ir.Model) -> list[str]:
    """Names of the BatchNormalization nodes in inference form, whose statistics no node computes."""
    norms = (node for node in model.graph if _is_inference_norm(node))
    return [str(node.name) for node in norms if node.inputs[3] is None or node.inputs[3].producer() is None]


def statistics_of(model: ir.Model) -> dict[str, str]:
    """Running statistic → the output that is its new content, of BatchNormalization in training form.

    A statistic is an initializer, or an input; its new content is an output of the model that is the second or third of
    the node. One that several nodes read belongs to the last.
    """
    updates = {}
    for node in model.graph:
        if not _is_norm(node) or _is_inference_norm(node):
            continue
        for old, new in zip(node.inputs[3:5], node.outputs[1:3], strict=False):
            if old is not None and old.producer() is None and new.is_graph_output():
                updates[str(old.name)] = str(new.name)
    return updates


def roles_of_statistics(model: Model, op: Emitter) -> Training:
    """The roles in a forward model that says nothing of itself, by its BatchNormalization nodes in training form.

    Where nothing reads the statistics that one moves, they become outputs, as PyTorch moves them: the model is changed.
    """
    work = _TrainingForm(model, op, None, updates=statistics_of(model.ir))
    outputs = tuple(str(value.name) for value in model.graph.outputs if value.name not in work.updates.values())
    _turn_norms(work, _loses_statistics)
    _output_statistics(work)
    return Training(outputs=outputs, updates=work.updates, statistics=tuple(work.updates))


def _loses_statistics(node: ir.Node) -> bool:
    """Whether it is in training form, and what it moves are initializers that stay: nothing reads their new content."""
    return (
        _is_norm(node)
        and not _is_inference_norm(node)
        and not any(new.uses() or new.is_graph_output() for new in node.outputs[1:])
        and all(old is not None and old.producer() is None and old.const_value is not None for old in node.inputs[3:5])
    )


def _turn_norms(work: _TrainingForm, is_turned: Callable[[ir.Node], bool]) -> int:
    """Have BatchNormalization nodes normalize by the batch and move their statistics. Returns how many."""
    turned = [node for node in work.model.graph if is_turned(node)]
    nodes = frozenset(turned)
    held = [[_statistic(work, node, slot, nodes) for slot in _SLOTS] for node in turned]
    for node, statistics in zip(turned, held, strict=True):
        _turn_norm(work, node, statistics)
    return len(turned)


def _turn_norm(work: _TrainingForm, node: ir.Node, held: Sequence[ir.Value]) -> None:
    """Normalize by the batch, and write the new running statistics behind the node."""
    op, name = work.op, str(node.name)
    dims = op.dims(node.inputs[0])
    count = dims[0] * math.prod(dims[2:])
    if count < 2:
        raise PlanError(
            f"{work.model.name}: BatchNormalization '{name}' has one value for each channel ({list(dims)}): a variance "
            "needs more. Load the model with a larger batch (batch=...)."
        )
    kept = work.momentum if work.momentum is not None else node.attributes.get_float("momentum", 0.9)
    with op.at(name):
        if work.synchronized:
            _synchronize(work, node, held, kept, count)
            return
        for slot, unread in zip(_SLOTS, _unread(op, node.inputs[0], held[0]), strict=True):
            node.replace_input_with(slot, unread)
        _insert(work, node, before=True)
        node.attributes.add(ir.AttrInt64("training_mode", 1))
        node.attributes.add(ir.AttrFloat32("momentum", 0.0))
        variance = op.add_output(node, 2, "batch_var")  # first: the node has one output or three
        mean = op.add_output(node, 1, "batch_mean")
        for statistic, fresh, scale in zip(held, (mean, variance), (1.0, count / (count - 1)), strict=True):
            old = work.current.get(statistic, statistic)
            work.current[statistic] = op.Add(op.Mul(old, kept), op.Mul(fresh, (1.0 - kept) * scale))
        _insert(work, node, before=False)


def _synchronize(work: _TrainingForm, node: ir.Node, held: Sequence[ir.Value], kept: float, count: int) -> None:
    """Normalize by mean and variance over the batches of all ranks, each of ``count`` values a channel.

    The variance is the mean of squared distances from the mean of all: what one rank computes from the whole batch.
    """
    op, x = work.op, node.inputs[0]
    assert x is not None
    dims = op.dims(x)
    axes = op.ints(*(axis for axis in range(len(dims)) if axis != 1))
    mean = over_ranks(op, op.ReduceMean(x, axes, keepdims=0))
    away = op.Sub(x, op.reshape(mean, (1, dims[1], *[1] * (len(dims) - 2))))
    variance = over_ranks(op, op.ReduceMean(op.Mul(away, away), axes, keepdims=0))
    for slot, value in zip(_SLOTS, (mean, variance), strict=True):
        node.replace_input_with(slot, op.cast(value, held[0].dtype))
    _insert(work, node, before=True)
    ranks = op.scalar("ranks", ir.DataType.FLOAT, 1.0)
    total = op.Mul(op.cast(ranks, ir.DataType.DOUBLE), float(count))
    unbiased = op.cast(op.Div(total, op.Sub(total, 1.0)), held[0].dtype)
    for statistic, value, scale in zip(held, (mean, variance), (None, unbiased), strict=True):
        fresh = op.cast(value, statistic.dtype)
        moved = op.Mul(fresh if scale is None else op.Mul(fresh, scale), 1.0 - kept)
        old = work.current.get(statistic, statistic)
        work.current[statistic] = op.Add(op.Mul(old, kept), moved)
    _insert(work, node, before=False)


def _unread(op: Emitter, x: ir.Value | None, statistic: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Two vectors for a node to take as old statistics. With momentum 0 what is in them doesn't count.

    onnxruntime's kernel writes the new statistics over the old ones, even over graph inputs and constants (1.31.1): it
    is given what nobody else reads, and what no optimizer takes for a constant.
    """
    assert x is not None
    axes = [axis for axis in range(len(op.dims(x))) if axis != 1]
    first = op.Slice(x, op.ints(*[0] * len(axes)), op.ints(*[1] * len(axes)), op.ints(*axes))
    vector = op.cast(op.reshape(first, op.dims(statistic)), statistic.dtype)
    negative = op.Neg(vector)
    return negative, op.Neg(negative)


def _insert(work: _TrainingForm, node: ir.Node, *, before: bool) -> None:
    """Put what was emitted beside the node."""
    graph, made = work.model.graph, work.op.nodes
    if before:
        graph.insert_before(node, made)
    else:
        graph.insert_after(node, made)
    work.op.nodes = []


def _statistic(work: _TrainingForm, node: ir.Node, slot: int, turned: frozenset[ir.Node]) -> ir.Value:
    """The running statistic at an input, one of the node's own; ``turned`` are all nodes that are being turned.

    Nodes with one scale, bias, mean and variance are one layer that runs several times: they move one statistic, one
    after the other. Otherwise tensors are shared because they were equal, and each layer gets its own.
    """
    value = node.inputs[slot]
    if value is None or value.producer() is not None:
        raise PlanError(
            f"{work.model.name}: the {_SLOTS[slot].replace('_', ' ')} of BatchNormalization '{node.name}' is computed: "
            "a step can't write over it. Make it an initializer."
        )
    layer = (slot, *node.inputs[1:5])
    if layer in work.owners:
        return work.owners[layer]
    is_read_elsewhere = value.is_graph_output() or any(n not in turned or index != slot for n, index in value.uses())
    if value in work.owners.values() or is_read_elsewhere:
        if value.const_value is None:
            raise PlanError(
                f"{work.model.name}: the input '{value.name}' is a running statistic of BatchNormalization "
                f"'{node.name}', and is read for something else too: a step can't write over it."
            )
        name = work.op.fresh(f"{node.name}.{_SLOTS[slot]}")
        own = ir.Value(name=name, type=value.type, shape=value.shape, const_value=value.const_value)
        work.model.graph.register_initializer(own)
        value = own
    work.owners[layer] = value
    return value


def _turn_dropouts(work: _TrainingForm) -> int:
    """Every Dropout that would drop nothing now drops. Returns how many."""
    op, graph, count = work.op, work.model.graph, 0
    for node in [n for n in graph if n.op_type == "Dropout" and n.domain == ""]:
        mode = input_at(node, 2)
        content = op.content(mode)
        if mode is not None and (content is None or content.all()):
            if content is not None:
                continue  # it drops already
            raise PlanError(
                f"{work.model.name}: whether Dropout '{node.name}' drops is the input '{mode.name}': make it a "
                "constant."
            )
        ratio = op.content(input_at(node, 1))
        if ratio is not None and not ratio.any():
            x, y = node.inputs[0], node.outputs[0]
            masks_read = any(mask.uses() or mask.is_graph_output() for mask in node.outputs[1:])
            if x is not None and not y.is_graph_output() and not masks_read:
                y.replace_all_uses_with(x)
                work.model.graph.remove(node, safe=True)
            continue
        node.resize_inputs(3)
        node.replace_input_with(2, op.constant(True, ir.DataType.BOOL))
        count += 1
    return count


def _output_statistics(work: _TrainingForm) -> None:
    """Make new statistics outputs, and note which are whose."""
    for old, new in work.current.items():
        new.name = work.op.fresh(f"{old.name}.next")
        work.model.graph.outputs.append(new)
        work.updates[str(old.name)] = str(new.name)
