"""A forward model → a training model, forward and backward in one graph of standard operators."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, get_args

import onnx_ir as ir

from memonger.autodiff import backward, losses, training_mode
from memonger.autodiff.expand import expand_operators, write_out_bodies
from memonger.autodiff.kept_casts import keep_smaller
from memonger.autodiff.mixed_precision import TYPES, precision_of
from memonger.autodiff.over_ranks import means_over_ranks
from memonger.autodiff.rules import random
from memonger.autodiff.separate import separate_parameters
from memonger.autodiff.transposes import fold_transposes_into_products, move_transposes_to_products
from memonger.autodiff.updates import Optimizer, Updater, loss_scale
from memonger.errors import PlanError
from memonger.graph.schedule import put_updates_last
from memonger.ir import training_roles
from memonger.ir.emitter import Emitter, collecting_later
from memonger.ir.model import Model
from memonger.ir.names import name_nodes, named_by
from memonger.ir.passes import run_passes
from memonger.ir.rewrite import remove_unused
from memonger.ir.training_roles import Training
from memonger.ir.values import all_values, is_floating
from memonger.model import forward_model, parameters
from memonger.model.load import Source, load
from memonger.model.opset import raise_opset
from memonger.words import NAME, check_choice, either, option, quoted

logger = logging.getLogger(__name__)

Accumulate = Literal["no", "add", "apply"]


def differentiate(
    source: Source | Model,
    *,
    loss: str | losses.Loss | None = None,
    optimizer: Optimizer | None = None,
    wrt: Sequence[str] | None = None,
    frozen: Sequence[str] = (),
    clip_norm: float | None = None,
    ema: float | None = None,
    accumulate: Accumulate = "no",
    keep_random: bool = False,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
) -> Model:
    """Write a model's backward pass, and with an optimizer its whole training step.

    The result's outputs are the forward model's, the loss, and for each parameter ``<parameter>.grad``; with an
    optimizer ``gradient_norm`` where that is clipped or the loss is scaled, and new contents: ``<parameter>.next``, and
    the like of the optimizer's state. Parameters are inputs whose initializers are defaults; one the loss doesn't
    depend on stays an initializer. The model is differentiated as it stands: `to_training_mode` first, where
    BatchNormalization and Dropout are in inference form. With an optimizer the loss of a model that
    `to_mixed_precision` wrote in float16 is scaled by the input ``loss_scale``, and updates scale the gradients back.
    What inputs and outputs there are, and what for, says `memonger.ir.training_roles.Training`.

    Args:
        source: What `memonger.load` takes or gives; for second derivatives what this gives without an optimizer. Then
            gradients are differentiated: inputs ``<gradient>.grad`` are the vector that the Hessian is multiplied by.
        loss: One of `memonger.autodiff.losses`, with the target as a new input, or its name: ``softmax_cross_entropy``,
            ``binary_cross_entropy``, ``mean_squared_error``, ``mean_absolute_error``, ``huber``, ``triplet_margin``; or
            the name of a scalar output of the model. None: the gradients of the outputs are inputs, ``<output>.grad``.
        optimizer: See `memonger.autodiff.optimizers`. None: gradients are outputs.
        wrt: Names or glob patterns of the initializers and inputs to differentiate by. None: the parameters, see
            `memonger.model.parameters.trainable`.
        frozen: Names or glob patterns of parameters to leave as they are.
        clip_norm: The largest global norm of the gradients; more is scaled down to it. It keeps every gradient alive.
        ema: Keep an exponential moving average of each parameter, ``<parameter>.ema``, of which a step keeps this
            share, as 0.999; the first step's is the parameter. `TrainingSession.evaluate` and ``export`` take them.
        accumulate: ``add``: a step that adds its gradients to ``<parameter>.accumulated`` and updates no parameter;
            ``apply``: one that adds its gradients to those, and updates. Where inputs say what the loss is the mean
            over, as labels that count do, gradients are those of the sum, and the update divides by all of them.
        keep_random: Leave random operators as they are, seeded. Else they are a hash of key, step and element index,
            the same whenever they run.
        batch: See `memonger.load`.
        dims: See `memonger.load`.

    Raises:
        LoadError: the model can't be read.
        PlanError: it can't be differentiated: an operator without a gradient, no way from the loss to any parameter, a
            loss that isn't there. The message says what would work.
    """
    model = load(source, batch=batch, dims=dims)
    if not model.is_differentiated:
        model = separate_parameters(model)
    _check_options(model, loss, optimizer, clip_norm, accumulate)
    if ema is not None and not (optimizer is not None and 0 <= ema < 1):
        raise PlanError(f"ema is a share of at least 0 and below 1, and needs an optimizer: not {ema!r}.")
    try:
        with collecting_later():
            return _differentiate(model, loss, optimizer, wrt, frozen, clip_norm, ema, accumulate, keep_random)
    except MemoryError as error:
        raise PlanError(f"{model.name}: there is not enough memory to differentiate it.") from error


def _differentiate(
    model: Model,
    loss: str | losses.Loss | None,
    optimizer: Optimizer | None,
    wrt: Sequence[str] | None,
    frozen: Sequence[str],
    clip_norm: float | None,
    ema: float | None,
    accumulate: Accumulate,
    keep_random: bool,
) -> Model:
    first = model.training if model.is_differentiated else None
    if first is not None and wrt is None:
        wrt = tuple(first.gradients)
    chosen = [str(v.name) for v in parameters.choose(model, wrt, frozen)]
    if optimizer is not None:
        without_decay = {name: [name] for name in chosen}
        named_by(without_decay, optimizer.no_decay, f"{model.name}: no_decay", "trained parameter")
    copy = run_passes(model.clone(), "differentiate", raise_opset, name_nodes)
    if loss is not None and (norms := training_mode.inference_norms(copy.ir)):
        logger.warning(
            "%s: %d BatchNormalization are in inference form, '%s' first, and are trained as that: statistics stay. "
            "%s turns them into training form.", copy.name, len(norms), norms[0],
            either("memonger.to_training_mode", "--train-mode"),
        )  # fmt: skip
    if keep_random:
        random.fix_seeds(copy.ir)
    op = Emitter(copy.ir)
    work = _Differentiation(copy, op)
    work.roles = model.training or training_mode.roles_of_statistics(copy, work.op)
    if first is not None:
        work.take_over(first)
    work.list_inputs([*chosen, *work.roles.statistics])
    scaled = precision_of(copy.ir) == "float16" and (optimizer is not None or accumulate != "no")

    def needed() -> list[ir.Node]:
        nodes = list(copy.graph)
        return backward.needed_nodes(nodes, backward.active_values(nodes, work.values(chosen)), work.seeds())

    def attach_loss(_: Model) -> bool:
        _start(work, loss, scaled, chosen if accumulate != "no" else None)
        return loss is not None

    def check_rules(_: Model) -> None:
        wrt = work.values(chosen)
        backward.check_rules(needed(), wrt, work.model.name)
        active = backward.active_values(list(work.model.graph), wrt)
        if not any(seed in active for seed in work.seeds()):
            raise PlanError(
                f"{work.model.name}: there is no differentiable way from {quoted(work.begin, 5)} to any parameter "
                f"({quoted(chosen, 5)}). Name what to differentiate by (wrt=[...]), or another loss."
            )

    def write_backward_pass(_: Model) -> bool:
        weight = work.output(work.parts[1]) if work.parts else None
        _backward(work, chosen, Updater(op, work.loss, optimizer, clip_norm, accumulate, ema, weight))
        training_roles.write(copy.ir, work.roles)
        return True

    expand = partial(expand_operators, op=op, keep_random=keep_random)
    made = run_passes(
        copy, "differentiate",
        expand, attach_loss, partial(write_out_bodies, op=op, needed=needed), expand, check_rules,
        partial(move_transposes_to_products, op=op), partial(fold_transposes_into_products, op=op),
        write_backward_pass, remove_unused, put_updates_last,
    )  # fmt: skip
    if forward_model.KEY not in made.ir.metadata_props:  # `to_training_mode` puts the inference form there
        forward_model.embed(made.ir, model.ir, work.roles)
    made.ir.metadata_props.pop(parameters.KEY, None)
    return made


@dataclass(slots=True)
class _Differentiation:
    """A model while it is differentiated.

    Values are looked up by name, as writing out function bodies puts others in their place.

    Attributes:
        model: The copy that is changed.
        op: Where nodes go.
        roles: The roles of its inputs and outputs.
        loss_name: The output that is differentiated, if any.
        parts: Names of its sum and its weight, where there are any.
        begin: Name of each value the backward pass begins at → its gradient.
    """

    model: Model
    op: Emitter
    roles: Training = field(default_factory=Training)
    loss_name: str | None = None
    parts: tuple[str, ...] = ()
    begin: dict[str, ir.Value] = field(default_factory=dict)

    @property
    def loss(self) -> ir.Value | None:
        """The output that is differentiated, if any."""
        return self.output(self.loss_name)

    def output(self, name: str | None) -> ir.Value | None:
        """The output of that name, if any."""
        return next((v for v in self.model.graph.outputs if v.name == name), None)

    def seeds(self) -> dict[ir.Value, ir.Value]:
        """The values the backward pass begins at, with their gradients."""
        value_of = {str(v.name): v for v in all_values(self.model.graph) if v.name in self.begin}
        return {value_of[name]: gradient for name, gradient in self.begin.items()}

    def values(self, names: Sequence[str]) -> list[ir.Value]:
        """Inputs and initializers by name, those left out that nothing reads any more."""
        graph = self.model.graph
        value_of = {str(v.name): v for v in (*graph.inputs, *graph.initializers.values())}
        return [value_of[name] for name in names if name in value_of]

    def list_inputs(self, names: Sequence[str]) -> None:
        """Make initializers inputs, before any rule could take their content for a constant."""
        self.model.graph.inputs.extend(v for v in self.values(names) if not v.is_graph_input())

    def take_over(self, first: Training) -> None:
        """Go on from a model that has gradients: they are outputs like others, and its inputs stay what they are."""
        inputs = {str(v.name): v for v in self.model.graph.inputs}
        self.op.scalars.update({role: inputs[name] for role, name in first.scalars.items()})
        self.op.classes.update({name: (count, first.ignored.get(name)) for name, count in first.classes.items()})
        others = [first.loss] if first.loss else []
        self.roles = replace(first, loss=None, outputs=(*first.outputs, *others, *first.gradients.values()))

    def take(self) -> None:
        """Move what was emitted into the graph."""
        self.model.graph.extend(self.op.nodes)
        self.op.nodes = []


def _check_options(model: Model, loss: object, optimizer: object, clip_norm: float | None, accumulate: str) -> None:
    twice = model.training is not None and bool(model.training.gradients) and loss is None
    if not twice and (model.is_differentiated or any(str(v.name).endswith(".grad") for v in model.ir.graph.outputs)):
        why = "has gradients or updates in it already: it was differentiated before"
        raise PlanError(
            f"{model.name} {why}. Give the forward model, or for second derivatives one without an optimizer, and no "
            "loss."
        )
    check_choice("accumulate", accumulate, get_args(Accumulate), PlanError)
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        given = option("optimizer", optimizer)
        raise PlanError(f"{given} is no optimizer: memonger.SGD(...), Adam(...), AdamW(...) or Lion(...).")
    if loss is None and (optimizer is not None or accumulate != "no"):
        names = ", ".join(losses.NAMES)
        raise PlanError(f"{model.name}: an optimizer needs a loss ({option('loss', NAME)}): {names}, or an output.")
    if optimizer is None and (clip_norm is not None or accumulate == "apply"):
        needed = either("optimizer=memonger.SGD()", "--optimizer sgd")
        raise PlanError(f"{model.name}: clip_norm and accumulate='apply' need an optimizer ({needed}).")
    if clip_norm is not None and not 0 < clip_norm < math.inf:
        raise PlanError(f"clip_norm must be a finite number above 0, not {clip_norm}.")


def _start(
    work: _Differentiation, loss: str | losses.Loss | None, scaled: bool, added_up: Sequence[str] | None
) -> None:
    """Set what the backward pass begins at.

    Args:
        work: The model.
        loss: See `differentiate`.
        scaled: The loss's gradient is multiplied by ``loss_scale``.
        added_up: Names of what is trained, where micro-batches' gradients are added up.
    """
    op = work.op
    outputs = [v for v in work.model.graph.outputs if v.name in work.roles.outputs]
    if loss is not None:
        active = None if added_up is None else backward.active_values(list(work.model.graph), work.values(added_up))
        built = losses.attach(op, work.model, loss, work.roles.outputs, active)
        gradients = built.gradients
        if scaled:
            with op.at("loss"):
                scale = loss_scale(op, built.terms)
                gradients = {v: op.Mul(gradient, op.cast(scale, gradient.dtype)) for v, gradient in gradients.items()}
        work.take()
        work.loss_name = str(built.loss.name)
        work.parts = tuple(str(value.name) for value in (built.sum, built.weight) if value is not None)
        work.begin = {str(value.name): gradient for value, gradient in gradients.items()}
        return
    floats = [v for v in outputs if is_floating(v)]
    if work.roles.gradients:
        floats = [v for v in floats if v.name in work.roles.gradients.values()]
    if not floats:
        raise PlanError(f"{work.model.name} has no floating-point output to differentiate.")
    for v in floats:
        backward.check_size(v, work.model.name)
        work.begin[str(v.name)] = op.input(f"{v.name}.grad", v.dtype or ir.DataType.FLOAT, op.dims(v))


def _backward(work: _Differentiation, chosen: Sequence[str], updater: Updater) -> None:
    """Write the backward pass and the updates, and make inputs, outputs and what is said of them."""
    op, graph, nodes = work.op, work.model.graph, list(work.model.graph)
    updates = dict(work.roles.updates)
    gradient_of = backward.backward(op, nodes, work.values(chosen), work.seeds(), updater.finished)
    updater.close()
    keep_smaller(op, nodes, TYPES.get(precision_of(work.model.ir) or ""))
    work.take()
    reached = {str(v.name) for v in gradient_of}
    if left_out := [name for name in chosen if name not in reached]:
        why = "no gradient and no update for what the loss doesn't depend on"
        logger.info("%s: %s: %s.", work.model.name, why, ", ".join(left_out))
    namer = _Namer(work, set(nodes))
    norm = None if updater.norm is None else namer.named(updater.norm, "gradient_norm")
    results = updater.updates if updater.updating else gradient_of
    ending = "next" if updater.updating else "grad"
    named = {str(v.name): namer.named(result, f"{v.name}.{ending}") for v, result in results.items()}
    graph.outputs.extend(v for v in (norm, *named.values()) if v is not None)
    new = {name: str(v.name) for name, v in named.items()}
    trained = [v for v in gradient_of if updater.updating or v.is_initializer()]
    persistent = [*trained, *work.values(work.roles.statistics), *updater.state, *updater.accumulated.values()]
    unchanged = {v for v in work.values(chosen) if v.is_initializer() and v not in gradient_of}
    moved = {*persistent, *unchanged}
    graph.inputs[:] = [*(v for v in graph.inputs if v not in moved), *persistent]
    work.roles = Training(
        loss=work.loss_name,
        outputs=work.roles.outputs,
        parameters=tuple(str(v.name) for v in trained),
        gradients={} if updater.updating else new,
        updates={**updates, **new} if updater.updating else updates,
        statistics=work.roles.statistics,
        state=tuple(str(v.name) for v in updater.state),
        accumulated=_names(updater.accumulated),
        averages=_names(updater.averages),
        scalars={**work.roles.scalars, **{role: str(v.name) for role, v in op.scalars.items()}},
        loss_sum=work.parts[0] if work.parts else None,
        loss_weight=work.parts[1] if work.parts else None,
        output_gradients={} if work.loss_name else {name: str(g.name) for name, g in work.begin.items()},
        whole_gradients=_names(updater.whole),
        means_over_ranks=means_over_ranks(work.model.ir),
        gradient_norm=None if norm is None else str(norm.name),
        classes={name: classes for name, (classes, _) in op.classes.items()},
        ignored={name: number for name, (_, number) in op.classes.items() if number is not None},
    )


def _names(values: Mapping[ir.Value, ir.Value]) -> dict[str, str]:
    return {str(one.name): str(other.name) for one, other in values.items()}


@dataclass(slots=True)
class _Namer:
    """Gives results the names of outputs: each output is one value with one name, and no forward value is renamed."""

    work: _Differentiation
    nodes: set[ir.Node]
    used: set[ir.Value] = field(default_factory=set)

    def named(self, value: ir.Value, name: str) -> ir.Value:
        """The value, or a copy of it, under that name."""
        producer = value.producer()
        if producer is None or producer in self.nodes or value in self.used:
            value = self.work.op.Identity(value)
            self.work.take()
        value.name = self.work.op.fresh(name)
        self.used.add(value)
        return value
