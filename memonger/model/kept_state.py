"""State of an inference model: inputs that an output becomes for the next run, in the model's metadata."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from memonger.errors import PlanError
from memonger.model.decoding import DecodingError, decode
from memonger.model.values import static_shape
from memonger.words import did_you_mean, option

KEY = "memonger.state"


@dataclass(frozen=True, slots=True)
class _State:
    """What the metadata holds."""

    becomes: Mapping[str, str]


def with_state(model: ir.Model, state: Mapping[str, str], name: str) -> None:
    """Write into the model which output each of these inputs becomes.

    Raises:
        PlanError: a name is no input or output; an output is given twice; types or shapes differ.
    """
    check_state(model, state, name)
    model.metadata_props[KEY] = json.dumps({"becomes": dict(state)}, separators=(",", ":"))


def state_of(model: ir.Model, name: str) -> dict[str, str]:
    """Input → output that is its content in the next run; empty for most models.

    Raises:
        PlanError: what the model says of it is malformed.
    """
    text = model.metadata_props.get(KEY)
    if text is None:
        return {}
    try:
        state = dict(decode(_State, json.loads(text)).becomes)
    except (ValueError, RecursionError, DecodingError) as error:
        raise PlanError(f"{name}: its metadata '{KEY}' is malformed: {error}.") from error
    check_state(model, state, name)
    return state


def check_state(model: ir.Model, state: Mapping[str, str], name: str) -> None:
    """Check that each input can become its output.

    Raises:
        PlanError: a name is no input or output; an output is given twice; types or shapes differ.
    """
    inputs = {str(v.name): v for v in model.graph.inputs if v.name not in model.graph.initializers}
    outputs = {str(v.name): v for v in model.graph.outputs}
    for old, new in state.items():
        for value, known, what in ((old, inputs, "input"), (new, outputs, "output")):
            if value not in known:
                near = did_you_mean(value, list(known))
                raise PlanError(f"{name} has no {what} '{value}', which {option('state')} names.{near}")
        first, second = _described(inputs[old]), _described(outputs[new])
        if first != second:
            raise PlanError(
                f"{name}: output '{new}' is {second} and can't be input '{old}' of the next run, which is {first}. A "
                "state keeps its type and shape: a cache that grows has to be exported at its full length."
            )
    if len(set(state.values())) != len(state):
        raise PlanError(f"{name}: {option('state')} gives one output to two inputs.")


def _described(value: ir.Value) -> str:
    shape = static_shape(value)
    return f"{value.dtype.name if value.dtype else '?'}{list(shape) if shape is not None else ' of no fixed shape'}"
