"""Trained weights back into a forward model."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir

from memonger import file, shapes
from memonger.errors import SessionError
from memonger.load import Model, Source, load_as_is


def export(path: Path, weights: Mapping[str, np.ndarray], model: Source | Model | None, name: str) -> None:
    """Write ``model`` with the weights in it; whole or not at all.

    Raises:
        SessionError: there is no model; it has none of the weights, or one of another shape or type; the file can't be
            written.
    """
    if model is None:
        raise SessionError(f"{name} holds no forward model to export: name yours (model=...).")
    copy, source = load_as_is(model.ir if isinstance(model, Model) else model)
    named = {str(v.name): v for v in (*copy.graph.inputs, *copy.graph.initializers.values())}
    missing = [known for known in weights if known not in named]
    if missing:
        raise SessionError(
            f"{source} has no initializer '{missing[0]}' to write the trained weights to: it isn't the model that was "
            "differentiated."
        )
    for known, array in weights.items():
        _put(copy, named[known], array, source)
    try:
        file.save_model(copy, path)
    except file.PlanFileError as error:
        raise SessionError(str(error)) from error


def _put(model: ir.Model, value: ir.Value, array: np.ndarray, source: str) -> None:
    tensor = ir.Tensor(array.copy(), name=value.name)
    dims = shapes.static_shape(value) if value.const_value is None else tuple(value.const_value.shape.numpy())
    if dims != array.shape or value.dtype != tensor.dtype:
        here, trained = f"{value.dtype}{list(dims or ())}", f"{tensor.dtype}{list(array.shape)}"
        raise SessionError(f"{source}: '{value.name}' is {here}, the trained one is {trained}.")
    if value.const_value is None:  # of the forward model that a plan holds: trained weights are inputs there
        model.graph.inputs.remove(value)
        value.const_value = tensor
        model.graph.register_initializer(value)
    value.const_value = tensor
