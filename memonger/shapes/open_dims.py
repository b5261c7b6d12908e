"""A lowered model whose inputs have ranges of sizes: its shapes at one size, and as a file has them, symbolic."""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir

from memonger.ir.operators import operator_name
from memonger.ir.values import SMALL, static_shape, tensor_shape
from memonger.shapes.ranges import (
    MOST_RANGES,
    DimRange,
    completed,
    in_terms_of,
    own,
    place_of,
    points,
    shapes_at,
    terms_of,
)
from memonger.shapes.shaping import Shape
from memonger.shapes.sizes import Sizes, SizesError
from memonger.units import MOST_BATCH
from memonger.words import Placeholder, either, listed, option


def largest(model: ir.Model, ranges: Mapping[str, DimRange]) -> dict[str, Shape]:
    """The shapes of the inputs at the largest sizes, by name; inputs of no known shape are left out.

    Args:
        model: Its ranges are symbolic, or at their largest sizes.
        ranges: With their places.

    Raises:
        ValueError: a place isn't there, or has neither.
    """
    shapes: dict[str, list[int | None]] = {
        str(value.name): [dim if isinstance(dim, int) else None for dim in value.shape]
        for value in model.graph.inputs
        if value.shape is not None
    }
    for name, one in ranges.items():
        for text in one.places:
            where, axis = place_of(text)
            if where not in shapes or axis >= len(shapes[where]) or shapes[where][axis] not in (None, one.most):
                raise ValueError(f"range '{name}' is at {text}, which is no open dimension of an input")
            shapes[where][axis] = one.most
    return {name: tuple(d for d in dims if d is not None) for name, dims in shapes.items() if None not in dims}


def bind(model: ir.Model, shapes: Mapping[str, Shape]) -> None:
    """Give the inputs these shapes, in place."""
    for value in model.graph.inputs:
        if str(value.name) in shapes:
            value.shape = ir.Shape(list(shapes[str(value.name)]))


def forget(model: ir.Model) -> None:
    """Drop the shapes of all values that nodes write, in place: some may be for one size alone."""
    for node in model.graph:
        for value in node.outputs:
            value.shape = None


def put(model: ir.Model, sizes: Sizes, shapes: Mapping[str, Shape]) -> None:
    """Give every value its shape for these shapes of the inputs, in place; None where only a run can tell it.

    Raises:
        SizesError: the shapes contradict each other.
    """
    shape_of = dict(zip(sizes.names, sizes.at(shapes), strict=True))
    bind(model, shapes)
    for value in (value for node in model.graph for value in node.outputs if value.name):
        shape = shape_of[str(value.name)]
        value.shape = None if shape is None else ir.Shape(list(shape))


def opened(model: ir.Model, ranges: Mapping[str, DimRange]) -> ir.Model:
    """A copy as a file has it: the ranges' dimensions have the ranges' names, others that vary with them have none."""
    copy = model.clone()
    shapes, sizes = largest(model, ranges), Sizes(model)
    measured = [sizes.at(shapes_at(shapes, ranges, at)) for at in points(ranges)]
    common: dict[str, ir.Shape | None] = {
        name: _common(each) for name, *each in zip(sizes.names, *measured, strict=True)
    }
    for value in (value for node in copy.graph for value in node.outputs if value.name):
        value.shape = common[str(value.name)]
    name_dims(copy.graph.inputs, model, ranges)
    return copy


def name_dims(inputs: Sequence[ir.Value], model: ir.Model, ranges: Mapping[str, DimRange]) -> None:
    """Give inputs the shapes of a model's, in place, with the ranges' names where those are of the largest sizes."""
    shapes = {str(value.name): value.shape for value in model.graph.inputs}
    by_name = {str(value.name): value for value in inputs}
    for name, value in by_name.items():
        value.shape = shapes.get(name, value.shape)
    for name, one in ranges.items():
        for text in one.places:
            where, axis = place_of(text)
            dims = list(by_name[where].shape or ())
            dims[axis] = ir.SymbolicDim(name)
            by_name[where].shape = ir.Shape(dims)


def _common(shapes: list[Shape | None]) -> ir.Shape | None:
    """The dimensions that all shapes have; None where one isn't known, or they differ in rank."""
    complete = [shape for shape in shapes if shape is not None]
    if len(complete) < len(shapes) or len({len(shape) for shape in complete}) > 1:
        return None
    return ir.Shape([dims[0] if len(set(dims)) == 1 else None for dims in zip(*complete, strict=True)])


MOST_STEP = 128
"""The largest step between sizes that is tried where not all sizes of a range go together."""


def sizes_that_run(model: ir.Model, ranges: Mapping[str, DimRange]) -> dict[str, DimRange] | None:
    """The sizes of a model at which its shapes go together, as far as its rules tell that.

    Detectors join what was halved with what wasn't: only sides that can be halved so often are the same again.
    Exporters name dimensions one by one that have to be the same, as those of each layer's past keys, or the sum of
    two others, as a mask's. And some leave a dimension open that constants of the model have a size for.

    Args:
        model: Its inputs at any sizes of these ranges.
        ranges: With their places.

    Returns: the dimensions that have to be multiples of a power of two, with the ranges that are left of theirs, that
        have to be as another or a sum, which `DimRange.equals` names, or of one size; empty where all sizes run, and
        None where none of that makes them go together.
    """
    sizes, shapes, free = Sizes(model), largest(model, ranges), own(ranges)

    def runs(changed: Mapping[str, DimRange]) -> bool:
        every = {**ranges, **changed}
        fitted = own(every)
        least = {name: one.least for name, one in fitted.items()}
        further = [
            {name: min(fitted[name].least + count * fitted[name].step, fitted[name].most) for name in names}
            for count in (1, 3)
            for names in (*([name] for name in fitted), list(fitted))
        ]
        try:
            for at in (*points(every), *(completed(every, {**least, **each}) for each in further)):
                sizes.at(shapes_at(shapes, every, at))
        except SizesError:
            return False
        return True

    first = {(one.least, one.most, one.step): name for name, one in reversed(free.items())}
    alike = {name: first[one.least, one.most, one.step] for name, one in free.items()}
    tied = {name: replace(free[name], equals=other) for name, other in alike.items() if name != other}
    steps = [2**power for power in range(1, MOST_STEP.bit_length())]
    together = {name: replace(one, equals=next(iter(free))) for name, one in list(free.items())[1:]}
    sums = [
        {name: replace(one, equals=f"{first} + {second}")}
        for name, one in free.items()
        for first, second in itertools.combinations([other for other in free if other != name], 2)
    ]
    fixed = [{n: replace(one, least=size, most=size, step=1)} for n, one in free.items() for size in _written(model)]
    multiples = ({n: _multiples(one, step) for n, one in free.items()} for step in steps)
    found = next(filter(runs, itertools.chain(({}, tied), multiples, (together,), sums, fixed)), None)
    left = list(found or ())
    while left and found is not None:
        name = left.pop(0)
        apart = {each: one for each, one in found.items() if each != name}
        led = {each: replace(found[each], equals=name) for each in left if each in found and found[each].equals}
        found = next((each for each in (apart, {**apart, **led}) if runs(each)), found)
    return found


def in_words(found: Mapping[str, DimRange]) -> str:
    """What `sizes_that_run` found, as a sentence with the options that say it."""
    steps, ties = defaultdict[int, list[str]](list), defaultdict[str, list[str]](list)
    said: dict[str, str] = {}
    for name, one in found.items():
        if one.equals:
            ties[one.equals].append(name)
            said[name] = one.equals
        else:
            if one.step > 1:
                steps[one.step].append(name)
            else:
                ties[str(one.least)].append(name)
            size = (one.least, one.most, one.step) if one.least < one.most else (one.least,)
            in_python = str(size if len(size) > 1 else one.least)
            said[name] = Placeholder(either(in_python, ":".join(map(str, size))))
    parts = [f"{listed(names)} {'is' if len(names) == 1 else 'are'} {other}" for other, names in ties.items()]
    parts += [f"{listed(names)} can be divided by {step}" for step, names in steps.items()]
    return f"It runs where {', and '.join(parts)}: {option('dims', said)}."


MOST_WRITTEN = 64
"""Sizes out of a model's constants that are tried for a dimension."""


def _written(model: ir.Model) -> list[int]:
    """The sizes that stand in a model, by size: of inputs and of constants, and what short ones of integers say."""
    constants = [value.const_value for value in model.graph.initializers.values()]
    told = [node.attributes.get("value") for node in model.graph if operator_name(node) == "Constant"]
    constants += [attribute.as_tensor() for attribute in told if attribute is not None]
    found = {dim for value in model.graph.inputs for dim in value.shape or () if isinstance(dim, int)}
    for tensor in constants:
        if tensor is not None:
            found.update(tensor_shape(tensor).numpy())
            if tensor.dtype.is_integer() and tensor.size <= SMALL:
                found.update(tensor.numpy().flatten().tolist())
    return sorted(size for size in found if 0 < size <= MOST_BATCH)[:MOST_WRITTEN]


def _multiples(one: DimRange, step: int) -> DimRange:
    """Of the sizes of a range those that are multiples of a step; the range itself where none is."""
    step = math.lcm(step, one.step)
    least, most = -(-one.least // step) * step, one.most // step * step
    return replace(one, least=least, most=most, step=step if least < most else 1) if 0 < least <= most else one


def at_largest(model: ir.Model, ranges: Mapping[str, DimRange]) -> None:
    """Give a model from a file the shapes of the largest sizes, in place.

    Raises:
        ValueError: the ranges aren't the model's, or its shapes contradict each other.
        PlanError: an operator has no shape rule.
    """
    open_places = {
        f"{value.name}[{axis}]": str(dim.value)
        for value in model.graph.inputs
        for axis, dim in enumerate(value.shape or ())
        if isinstance(dim, ir.SymbolicDim)
    }
    placed = {text: name for name, one in ranges.items() for text in one.places}
    if placed != open_places:
        raise ValueError(f"its ranges are at {placed}, the model's open dimensions are {open_places}")
    if len(own(ranges)) > MOST_RANGES:
        raise ValueError(f"it has {len(own(ranges))} ranges, and at most {MOST_RANGES} can be")
    for name, one in ranges.items():
        if one.most not in one or not one.places:
            raise ValueError(f"range '{name}' is {one}, at {len(one.places)} places")
        if one.equals:
            terms = terms_of(one.equals)
            if not terms or not terms.keys() <= {"", *own(ranges)}:
                raise ValueError(f"range '{name}' is {one.equals!r}, which is no sum of others")
            wanted = in_terms_of(terms, {}, own(ranges))
            if (one.least, one.most, one.step) != (wanted.least, wanted.most, 1):
                raise ValueError(
                    f"range '{name}' is {one.least} to {one.most}, and its sum is {wanted.least} to {wanted.most}"
                )
    try:
        put(model, Sizes(model), largest(model, ranges))
    except SizesError as error:
        raise ValueError(str(error)) from error


def unknown(model: ir.Model) -> list[str]:
    """Names of tensors whose size only a run can tell: onnxruntime holds them."""
    return [
        str(value.name)
        for node in model.graph
        for value in node.outputs
        if value.name and isinstance(value.type, ir.TensorType | None) and static_shape(value) is None
    ]
