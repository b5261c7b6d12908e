"""Passes: what a stage does to a model, as a list.

A pass is a function of a `Model`, named by a verb, that changes ``model.ir`` in place and returns whether it did; or a
pass of onnx-ir's. A check is one that changes nothing. What a pass needs besides the model is bound by
``functools.partial``.
"""

import dataclasses
import re
from collections.abc import Callable
from functools import partial

from onnx_ir.passes import PassBase

from memonger.ir.model import Model, PassRecord

Pass = Callable[[Model], bool | None] | PassBase


def run_passes(model: Model, stage: str, *passes: Pass) -> Model:
    """Run passes on a model, in order.

    Returns: the model with a record of each pass that changed it; where none did, the very same.
    """
    for each in passes:
        if isinstance(each, PassBase):
            result = each(model.ir)
            model, modified = dataclasses.replace(model, ir=result.model), result.modified
        else:
            modified = bool(each(model))
        if modified:
            record = PassRecord(stage, name_of(each), len(model.graph))
            model = dataclasses.replace(model, passes=(*model.passes, record))
    return model


def name_of(each: Pass) -> str:
    """What a pass does, in words: ``lift constants`` of ``lift_constants`` and of ``LiftConstantsPass``."""
    if isinstance(each, PassBase):
        return re.sub(r"(?<=.)(?=[A-Z])", " ", type(each).__name__.removesuffix("Pass")).lower()
    function = each.func if isinstance(each, partial) else each
    return function.__name__.replace("_", " ")
