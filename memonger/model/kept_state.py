"""State of an inference model: inputs that an output becomes for the next run, in the model's metadata.

With ranges of sizes a state has in the next run the shape that its output has in this one: a cache grows.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from memonger.errors import PlanError
from memonger.ir.decoding import decode_metadata
from memonger.ir.values import required_inputs, static_shape
from memonger.shapes import open_dims
from memonger.shapes.ranges import DimRange, Shape, completed, in_words, next_sizes, own, places, points, shapes_at
from memonger.shapes.sizes import Sizes, SizesError
from memonger.words import did_you_mean, option

KEY = "memonger.state"


@dataclass(frozen=True, slots=True)
class _StateShapes:
    """What the metadata holds."""

    becomes: Mapping[str, str]


def with_state(model: ir.Model, state: Mapping[str, str], name: str) -> None:
    """Write into the model which output each of these inputs becomes; `check_state` says whether it can.

    Raises:
        PlanError: a name is no input or output; an output is given twice; types differ.
    """
    named = every_name(model, state)
    _check_names(model, named, name)
    model.metadata_props[KEY] = json.dumps({"becomes": named}, separators=(",", ":"))


def every_name(model: ir.Model, state: Mapping[str, str]) -> dict[str, str]:
    """A state with names for patterns: ``past.*: present.*`` stands for all inputs that begin so."""
    named: dict[str, str] = {}
    inputs = [str(value.name) for value in model.graph.inputs]
    for old, new in state.items():
        begin, star, end = old.partition("*")
        matches = [one for one in inputs if one.startswith(begin) and one[len(begin) :].endswith(end)]
        if not star or old in inputs or not matches or new.count("*") != 1:
            named[old] = new
            continue
        named |= {one: new.replace("*", one[len(begin) : len(one) - len(end)]) for one in matches}
    return named


def state_of(model: ir.Model, name: str) -> dict[str, str]:
    """Input → output that is its content in the next run; empty for most models. `check_state` checks the shapes.

    Raises:
        PlanError: what the model says of it is malformed.
    """
    found = decode_metadata(_StateShapes, model.metadata_props, KEY, name)
    state = {} if found is None else dict(found.becomes)
    _check_names(model, state, name)
    return state


def check_state(model: ir.Model, state: Mapping[str, str], ranges: Mapping[str, DimRange], name: str) -> None:
    """Check that each input can become its output.

    Args:
        model: Its ranges are at their largest sizes.
        state: Input → output.
        ranges: Dimensions with a range of sizes, with their places.
        name: What messages call the model.

    Raises:
        PlanError: a name is no input or output; an output is given twice; types or shapes differ, the latter in
            more than dimensions with a range.
    """
    _check_names(model, state, name)
    if ranges and state:
        try:
            _check_shapes(model, state, ranges)
        except (SizesError, ValueError) as error:
            raise PlanError(f"{name}: {error}") from error
        return
    inputs, outputs = ({str(v.name): v for v in values} for values in (model.graph.inputs, model.graph.outputs))
    for old, new in state.items():
        first, second = _described(inputs[old]), _described(outputs[new])
        if first != second:
            raise PlanError(
                f"{name}: output '{new}' is {second} and can't be input '{old}' of the next run, which is {first}. A "
                "state keeps its shape, unless its length is a dimension with a range of sizes "
                f"({option('dims', {'past': (0, 1024)})})."
            )


def _check_shapes(model: ir.Model, state: Mapping[str, str], ranges: Mapping[str, DimRange]) -> None:
    """Check at several sizes that outputs differ from their inputs in dimensions with a range alone."""
    sizes, shapes, axes = Sizes(model), open_dims.largest(model, ranges), places(state, ranges)
    at = {name: number for number, name in enumerate(sizes.names)}
    for point in points(ranges):
        given = shapes_at(shapes, ranges, point)
        found = sizes.at(given)
        of_outputs = {new: found[at[new]] if new in at else given.get(new) for new in state.values()}
        try:
            next_sizes({old: given.get(old) for old in state}, of_outputs, state, axes)
        except ValueError as error:
            raise ValueError(f"at {in_words(point)} {error}") from error


def fullest(model: ir.Model, state: Mapping[str, str], ranges: Mapping[str, DimRange]) -> dict[str, Shape]:
    """The shapes of the inputs, by name, of the run that fills a state, at the largest of all other sizes.

    Args:
        model: At the largest sizes, where the state would be longer after the run than it may be.
        state: Input → output; see `check_state`.
        ranges: With their places.
    """
    shapes = open_dims.largest(model, ranges)
    outputs = {str(value.name): static_shape(value) for value in model.graph.outputs}
    after = next_sizes({old: shapes[old] for old in state}, outputs, state, places(state, ranges))
    sizes = {}
    for name, one in own(ranges).items():
        size = max(one.least, one.most - max(0, after.get(name, one.most) - one.most))
        sizes[name] = size - (size - one.least) % one.step
    return shapes_at(shapes, ranges, completed(ranges, sizes))


def _check_names(model: ir.Model, state: Mapping[str, str], name: str) -> None:
    inputs = {str(v.name): v for v in required_inputs(model.graph)}
    outputs = {str(v.name): v for v in model.graph.outputs}
    for old, new in state.items():
        for value, known, what in ((old, inputs, "input"), (new, outputs, "output")):
            if value not in known:
                near = did_you_mean(value, list(known))
                raise PlanError(f"{name} has no {what} '{value}', which {option('state')} names.{near}")
        if inputs[old].dtype != outputs[new].dtype:
            raise PlanError(
                f"{name}: output '{new}' and input '{old}', which it is to be in the next run, differ in type."
            )
    if len(set(state.values())) != len(state):
        raise PlanError(f"{name}: {option('state')} gives one output to two inputs.")


def _described(value: ir.Value) -> str:
    shape = static_shape(value)
    return f"{value.dtype.name if value.dtype else '?'}{list(shape) if shape is not None else ' of no fixed shape'}"
