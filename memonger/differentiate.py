"""differentiate: a forward model → a training model, forward and backward in one graph of standard operators."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import onnx_ir as ir
from onnx_ir.passes import common as passes

from memonger import forward, losses, optimizers, parameters, shapes, training
from memonger.errors import PlanError
from memonger.gradients import driver, prepare
from memonger.gradients.emitter import Emitter
from memonger.load import Model, Source, load
from memonger.lower import name_nodes
from memonger.training import Training

Accumulate = Literal["no", "add", "apply"]

RANDOM = (
    "Dropout", "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike",
)  # fmt: skip


def differentiate(
    source: Source | Model,
    *,
    loss: str | losses.Loss | None = None,
    optimizer: optimizers.Optimizer | None = None,
    wrt: Sequence[str] | None = None,
    frozen: Sequence[str] = (),
    clip_norm: float | None = None,
    accumulate: Accumulate = "no",
    keep_random: bool = False,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
) -> Model:
    """Write a model's backward pass, and with an optimizer its whole training step.

    The result's outputs are the forward model's, the loss, and for each parameter ``<parameter>.grad``; with an optimizer, its new content
    ``<parameter>.next``. Parameters are inputs whose initializers are defaults. It is differentiated as it stands:
    `to_training_mode` first, where BatchNormalization and Dropout are in inference form.

    Args:
        source: What `memonger.load` takes or gives.
        loss: ``softmax_cross_entropy``, ``binary_cross_entropy`` or ``mean_squared_error`` of the model's output, with
            the target as a new input (see `memonger.losses`); or the name of a scalar output of the model. None: the
            gradients of the outputs are inputs, ``<output>.grad``.
        optimizer: See `memonger.optimizers`. None: gradients are outputs.
        wrt: Names or glob patterns of the initializers and inputs to differentiate by. None: the parameters, see
            `memonger.parameters.trainable`.
        frozen: Names or glob patterns of parameters to leave as they are.
        clip_norm: The largest global norm of the gradients; more is scaled down to it. It keeps every gradient alive.
        accumulate: ``add``: a step that adds its gradients to ``<parameter>.accumulated`` and updates no parameter;
            ``apply``: one that adds its gradients to those, and updates.
        keep_random: Leave random operators as they are, seeded. Else they are a hash of key, step and element index, the
            same whenever they run.
        batch: See `memonger.load`.
        dims: See `memonger.load`.

    Raises:
        LoadError: the model can't be read.
        PlanError: it can't be differentiated: an operator without a gradient, no way from the loss to any parameter, a
            loss that isn't there. The message says what would work.
    """
    model = load(source, batch=batch, dims=dims)
    _check_options(model, loss, optimizer, clip_norm, accumulate)
    chosen = [str(v.name) for v in parameters.choose(model.ir, model.name, wrt, frozen)]
    copy = prepare.raise_opset(model.ir.clone(), model.name)
    name_nodes(copy)
    work = _Work(copy, model.name, Emitter(copy), keep=RANDOM if keep_random else ())
    work.known = training.read(copy, model.name) or Training(outputs=tuple(str(v.name) for v in copy.graph.outputs))
    prepare.expand(copy, work.op, work.keep)
    seeds = _seeds(work, loss)
    wrt_values = _values(copy.graph, chosen)
    _write_bodies(work, wrt_values, seeds)
    _backward(work, wrt_values, seeds, optimizer, clip_norm, accumulate)
    return Model(_finish(work, model.ir), model.name, model.batch)


@dataclass(slots=True)
class _Work:
    """A model being differentiated: what is known and made so far."""

    model: ir.Model
    name: str
    op: Emitter
    keep: Sequence[str]
    known: Training = field(default_factory=Training)
    loss: ir.Value | None = None
    finite: ir.Value | None = None


def _check_options(model: Model, loss: object, optimizer: object, clip_norm: float | None, accumulate: str) -> None:
    if any(str(v.name).endswith(".grad") for v in model.ir.graph.outputs):
        raise PlanError(f"{model.name} has gradients among its outputs already: it was differentiated before.")
    if accumulate not in ("no", "add", "apply"):
        raise PlanError(f"accumulate={accumulate!r} can't be: 'no', 'add' or 'apply'.")
    if loss is None and (optimizer is not None or accumulate != "no"):
        raise PlanError(f"{model.name}: an optimizer needs a loss (loss=...): {', '.join(losses.NAMES)}, or an output.")
    if optimizer is None and (clip_norm is not None or accumulate == "apply"):
        raise PlanError(f"{model.name}: clip_norm and accumulate='apply' need an optimizer (optimizer=...).")
    if clip_norm is not None and not clip_norm > 0:
        raise PlanError(f"clip_norm={clip_norm} can't be: a norm above 0.")


def _values(graph: ir.Graph, names: Sequence[str]) -> list[ir.Value]:
    """Inputs and initializers by name, those left out that nothing reads any more."""
    found = {str(v.name): v for v in (*graph.inputs, *graph.initializers.values())}
    return [found[name] for name in names if name in found]


def _seeds(work: _Work, loss: str | losses.Loss | None) -> dict[ir.Value, ir.Value]:
    """The values the backward pass begins at, with their gradients."""
    op, graph = work.op, work.model.graph
    if loss is None:
        outputs = [v for v in graph.outputs if v.dtype is not None and v.dtype.is_floating_point()]
        if not outputs:
            raise PlanError(f"{work.name} has no floating-point output to differentiate.")
        return {v: op.input(f"{v.name}.grad", v.dtype or ir.DataType.FLOAT, op.dims(v)) for v in dict.fromkeys(outputs)}
    work.loss = losses.attach(op, work.model, work.name, loss)
    _take(work)
    return {work.loss: op.constant(1.0, work.loss.dtype or ir.DataType.FLOAT)}


def _take(work: _Work) -> None:
    """Move what was emitted into the graph."""
    work.model.graph.extend(work.op.nodes)
    work.op.nodes = []


def _write_bodies(work: _Work, wrt: Sequence[ir.Value], seeds: Mapping[ir.Value, ir.Value]) -> None:
    """Write out what has a function body and no rule, and see to it that nothing is left without one."""

    def needed() -> list[ir.Node]:
        nodes = list(work.model.graph)
        return driver.needed_nodes(nodes, driver.active_values(nodes, wrt), seeds)

    prepare.write_out_bodies(work.model, work.name, needed)
    work.op.learn_names(work.model)
    prepare.expand(work.model, work.op, work.keep)
    driver.check_rules(needed(), wrt, work.name)
    active = driver.active_values(list(work.model.graph), wrt)
    if not any(seed in active for seed in seeds):
        names = ", ".join(f"'{v.name}'" for v in wrt[:5])
        raise PlanError(
            f"{work.name}: there is no differentiable way from {_quoted(seeds)} to any parameter ({names}). "
            "Name what to differentiate by (wrt=[...]), or another loss."
        )


def _quoted(values: Mapping[ir.Value, ir.Value]) -> str:
    return ", ".join(f"'{v.name}'" for v in values)


def _backward(
    work: _Work,
    wrt: Sequence[ir.Value],
    seeds: Mapping[ir.Value, ir.Value],
    optimizer: optimizers.Optimizer | None,
    clip_norm: float | None,
    accumulate: Accumulate,
) -> None:
    op, nodes = work.op, list(work.model.graph)
    updater = optimizers.Updater(op, work.loss, optimizer, clip_norm, accumulate)
    if optimizer is not None or accumulate != "no":
        updater.statistics(work.model, work.known.updates)
    found = driver.backward(op, nodes, wrt, seeds, updater.finished)
    updater.close()
    _take(work)
    graph = work.model.graph
    trained = [v for v in wrt if v in found and v.name in graph.initializers]
    gradients = {} if updater.updates else {str(v.name): found[v] for v in wrt if v in found}
    for name, gradient in gradients.items():
        gradients[name] = _named(work, gradient, f"{name}.grad")
    updates = {str(v.name): _named(work, new, f"{v.name}.next") for v, new in updater.updates.items()}
    graph.outputs.extend([*gradients.values(), *(v for v in updates.values() if v not in set(graph.outputs))])
    graph.inputs.extend(v for v in (*trained, *_values(graph, work.known.statistics)) if not v.is_graph_input())
    work.known = Training(
        loss=None if work.loss is None else str(work.loss.name),
        outputs=work.known.outputs,
        parameters=tuple(str(v.name) for v in trained),
        gradients={name: str(v.name) for name, v in gradients.items()},
        updates={**work.known.updates, **{name: str(v.name) for name, v in updates.items()}},
        statistics=work.known.statistics,
        state=tuple(str(v.name) for v in updater.state),
        accumulated={str(p.name): str(v.name) for p, v in updater.accumulated.items()},
        scalars={role: str(v.name) for role, v in op.scalars.items()},
        output_gradients={} if work.loss is not None else {str(v.name): str(g.name) for v, g in seeds.items()},
    )


def _named(work: _Work, value: ir.Value, name: str) -> ir.Value:
    """The value under a name of its own: an output has to be one value with one name."""
    producer = value.producer()
    if producer is None or value.is_graph_output() or producer.op_type == "":
        value = work.op.Identity(value)
        _take(work)
    value.name = work.op.fresh(name)
    return value


def _finish(work: _Work, source: ir.Model) -> ir.Model:
    model = work.model
    training.write(model, work.known)
    passes.RemoveUnusedNodesPass()(model)
    _drop_unused(model)
    if forward.KEY not in model.metadata_props:  # `to_training_mode` puts the inference form there
        forward.embed(model, source)
    model.metadata_props.pop(parameters.KEY, None)
    shapes.infer_once(model, work.name)
    return model


def _drop_unused(model: ir.Model) -> None:
    """Take out initializers nobody reads."""
    for name, value in list(model.graph.initializers.items()):
        if not value.uses() and not value.is_graph_output() and not value.is_graph_input():
            del model.graph.initializers[name]
