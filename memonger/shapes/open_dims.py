"""A lowered model whose inputs have ranges of sizes: its shapes at one size, and as a file has them, symbolic."""

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from memonger.ir.values import static_shape
from memonger.shapes.ranges import MOST_RANGES, DimRange, in_terms_of, own, place_of, points, shapes_at, terms_of
from memonger.shapes.shaping import Shape
from memonger.shapes.sizes import Sizes, SizesError


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
