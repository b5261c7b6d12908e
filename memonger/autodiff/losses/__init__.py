"""Losses that are written into a training model. Each adds its target as a graph input, and the scalar output ``loss``.

Values and gradients are those of PyTorch's functions. The gradient is written by the loss itself, in fewer passes over
memory than its nodes' rules would take. Outputs of 16 bits are taken in float32, and so is the loss.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import onnx_ir as ir

from memonger.autodiff.losses import quotient
from memonger.autodiff.losses.classes import BinaryCrossEntropy, SoftmaxCrossEntropy
from memonger.autodiff.losses.common import Built, described
from memonger.autodiff.losses.ctc import CTCLoss
from memonger.autodiff.losses.differences import HuberLoss, MeanAbsoluteError, MeanSquaredError, TripletMarginLoss
from memonger.errors import PlanError
from memonger.ir.emitter import Emitter
from memonger.ir.model import Model
from memonger.ir.values import all_values, is_floating
from memonger.words import did_you_mean, option, quoted

Loss = (
    SoftmaxCrossEntropy
    | BinaryCrossEntropy
    | MeanSquaredError
    | MeanAbsoluteError
    | HuberLoss
    | TripletMarginLoss
    | CTCLoss
)

NAMES: dict[str, Callable[[], Loss]] = {
    "softmax_cross_entropy": SoftmaxCrossEntropy,
    "binary_cross_entropy": BinaryCrossEntropy,
    "mean_squared_error": MeanSquaredError,
    "mean_absolute_error": MeanAbsoluteError,
    "huber": HuberLoss,
    "triplet_margin": TripletMarginLoss,
}

_NEW_INPUTS = ("labels", "target", "sample_weights", "score_lengths", "label_lengths")
"""Fields of losses that name an input to add."""


def attach(
    op: Emitter, model: Model, loss: str | Loss, outputs: Sequence[str], active: Collection[ir.Value] | None = None
) -> Built:
    """The loss to differentiate: an output of the model, or one emitted behind the model, made the output ``loss``.

    Args:
        op: Where it goes.
        model: The forward model.
        loss: See `memonger.differentiate`.
        outputs: The model's outputs that a loss may take.
        active: Where micro-batches are added up: values that change with what is trained. A mean over what inputs say
            is then left undivided, and its sum and weight are outputs of the model too.

    Raises:
        PlanError: no such loss or output; the output isn't a floating-point scalar, or isn't what the loss takes; the
            name of the loss's input is taken.
    """
    name = model.name
    output_of = {str(v.name): v for v in model.graph.outputs if v.name in outputs}
    if isinstance(loss, str) and loss in output_of:
        value = output_of[loss]
        if op.size(value) != 1 or not is_floating(value):
            raise PlanError(
                f"{name}: output '{value.name}' can't be the loss: it is {described(value)}, not one floating-point "
                f"number. A loss of it can be {', '.join(NAMES)}."
            )
        if active is None:
            return quotient.built(op, value)
        return _with_parts(op, model, quotient.taken_apart(op, value, active, name))
    if isinstance(loss, str) and loss not in NAMES:
        numbers = {key: value for key, value in output_of.items() if op.size(value) == 1 and is_floating(value)}
        raise PlanError(
            f"{name}: there is no loss '{loss}': it can be {', '.join(NAMES)}, or an output that is one number "
            f"({quoted(numbers) if numbers else 'it has none'}).{did_you_mean(loss, [*NAMES, *numbers])}"
        )
    chosen = NAMES[loss]() if isinstance(loss, str) else loss
    if not isinstance(chosen, Loss):
        raise PlanError(
            f"{name}: {option('loss', loss)} is no loss: it can be {', '.join(NAMES)}, or one of memonger's classes."
        )
    taken = {str(value.name) for value in all_values(model.graph)}
    for role in _NEW_INPUTS:
        wanted = getattr(chosen, role, None)
        if wanted is None:
            continue
        if not wanted or wanted in taken:
            raise PlanError(
                f"{model.name}: the loss's input can't be called '{wanted}': the model has a value of that name. "
                f"Choose another, memonger.{type(chosen).__name__}({role}=...)."
            )
        taken.add(wanted)
    with op.at("loss"):
        if isinstance(chosen, TripletMarginLoss):
            built = chosen.build(op, _triplet(output_of, chosen, name), name)
        elif isinstance(chosen, SoftmaxCrossEntropy):
            built = chosen.build(op, _output(output_of, chosen, name), name, apart=active is not None)
        else:
            built = chosen.build(op, _output(output_of, chosen, name), name)
    built.loss.name = op.fresh("loss")
    model.graph.outputs.append(built.loss)
    return _with_parts(op, model, built)


def _with_parts(op: Emitter, model: Model, built: Built) -> Built:
    """Make sum and weight outputs, where there are any."""
    for value, part in ((built.sum, "sum"), (built.weight, "weight")):
        if value is not None:
            value.name = op.fresh(f"{built.loss.name}.{part}")
            model.graph.outputs.append(value)
    return built


def _output(known: dict[str, ir.Value], loss: Any, name: str) -> ir.Value:
    """The output that ``loss`` is of."""
    if loss.output is not None:
        return _named(known, loss.output, name)
    floats = {key: v for key, v in known.items() if is_floating(v)}
    if len(floats) != 1:
        which = f"memonger.{type(loss).__name__}(output=...)"
        raise PlanError(f"{name} has {len(floats)} floating-point outputs ({quoted(floats)}): name one, {which}.")
    return next(iter(floats.values()))


def _triplet(known: dict[str, ir.Value], loss: TripletMarginLoss, name: str) -> list[ir.Value]:
    """The three outputs that ``loss`` is of."""
    given = (loss.anchor, loss.positive, loss.negative)
    floats = [key for key, v in known.items() if is_floating(v)]
    if None in given and len(floats) != 3:
        raise PlanError(
            f"{name} has {len(floats)} floating-point outputs: name three, "
            "memonger.TripletMarginLoss(anchor=..., positive=..., negative=...)."
        )
    return [_named(known, which or floats[k], name) for k, which in enumerate(given)]


def _named(known: dict[str, ir.Value], which: str, name: str) -> ir.Value:
    floats = {key: v for key, v in known.items() if is_floating(v)}
    if which not in floats:
        what = "is no floating-point output" if which in known else "is no output"
        near = did_you_mean(which, floats)
        raise PlanError(f"{name}: '{which}' {what}; a loss can be of {quoted(floats)}.{near}")
    return floats[which]
