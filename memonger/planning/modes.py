"""What a model is planned for where nobody says: training or inference, and one sentence on why."""

import dataclasses

from memonger.model import training_roles
from memonger.model.marks import count_marked
from memonger.model.model import Model
from memonger.planning.options import Options
from memonger.words import option


def settle(model: Model, options: Options) -> tuple[Options, tuple[str, ...]]:
    """The options with a mode, and where nobody gave one a sentence that says which, why, and how to get the other.

    Args:
        model: The user's own model, loaded.
        options: What the user asks for.

    Raises:
        PlanError: the other options don't go with the mode.
    """
    if options.mode is not None:
        return options, ()
    why, other = _reason_to_train(model, options), _the_other(model, options)
    if why:
        return dataclasses.replace(options, mode="training"), (f"planned for training, as {why}: {other}.",)
    note = (
        "planned for inference, as the model has no gradients and no marks (mirror_stage, force_mirroring), and no "
        f"loss is given: {option('mode', 'training')} plans its training step."
    )
    return dataclasses.replace(options, mode="inference"), (note,)


def _reason_to_train(model: Model, options: Options) -> str:
    """Why the model is planned for training; nothing where it isn't."""
    if options.trains:
        return "a loss is given"
    if model.is_differentiated:
        return "the model has gradients already"
    if training_roles.KEY in model.ir.metadata_props:
        return "the model is in training form"
    if options.recomputes_for_training:
        return f"{option('mirror')} is given" if options.mirror else f"strategy {options.strategy!r} is for training"
    marked = count_marked(model.ir)
    if marked:
        return f"{marked} of its nodes carr{'ies' if marked == 1 else 'y'} marks (mirror_stage, force_mirroring)"
    return ""


def _the_other(model: Model, options: Options) -> str:
    """How to plan for inference instead."""
    if options.trains:
        return "without it the model is planned for inference"
    if model.is_differentiated:
        return "for inference, plan the model that it was made from"
    if training_roles.KEY in model.ir.metadata_props:
        return "for inference, plan the model as it was exported"
    if options.recomputes_for_training:
        return "without it the model is planned for inference"
    return f"{option('mode', 'inference')} plans it for inference"
