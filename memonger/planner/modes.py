"""What a model is planned for where nobody says: training or inference, and one sentence on why."""

import dataclasses

from memonger.ir import training_roles
from memonger.ir.marks import count_marked
from memonger.ir.model import Model
from memonger.options import Options
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
    training = _reason_to_train(model, options)
    if training is not None:
        why, other = training
        return dataclasses.replace(options, mode="training"), (f"planned for training, as {why}: {other}.",)
    note = (
        "planned for inference, as the model has no gradients and no marks (mirror_stage, force_mirroring), and no "
        f"loss is given: {option('mode', 'training')} plans its training step."
    )
    return dataclasses.replace(options, mode="inference"), (note,)


def _reason_to_train(model: Model, options: Options) -> tuple[str, str] | None:
    """Why the model is planned for training, and how to plan for inference instead; None where it isn't."""
    without = "without it the model is planned for inference"
    if options.trains:
        return "a loss is given", without
    if model.is_differentiated:
        return "the model has gradients already", "for inference, plan the model that it was made from"
    if training_roles.KEY in model.ir.metadata_props:
        return "the model is in training form", "for inference, plan the model as it was exported"
    if options.recomputes_for_training:
        why = f"{option('mirror')} is given" if options.mirror else f"strategy {options.strategy!r} is for training"
        return why, without
    marked = count_marked(model.ir)
    if marked:
        carry = "carries" if marked == 1 else "carry"
        why = f"{marked} of its nodes {carry} marks (mirror_stage, force_mirroring)"
        return why, f"{option('mode', 'inference')} plans it for inference"
    return None
