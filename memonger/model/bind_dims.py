"""Sizes for a model's symbolic dimensions, from what the user gives by name, by place or by whole shapes."""

import dataclasses
import numbers
import re
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from memonger.errors import LoadError
from memonger.ir.model import Model
from memonger.ir.values import tensor_shape
from memonger.shapes.ranges import DimRange, in_terms_of, sum_of, terms_of
from memonger.words import FILE, N, again, did_you_mean, listed, option, quoted

Dim = int | ir.SymbolicDim


def bind(
    model: Model,
    batch: int | None,
    dims: Mapping[str, int],
    input_shapes: Mapping[str, Sequence[int]],
) -> Model:
    """Give every input a static shape, in place. The arguments are those of `memonger.load`.

    Returns: the model with its batch; without any size for an open batch that is 1, with a note.

    Raises:
        LoadError: a dimension without a size, a size for a dimension that isn't there or is fixed already.
    """
    name = model.name
    for key, size in (*dims.items(), *([("batch", batch)] if batch is not None else [])):
        if not _is_size(size):
            raise LoadError(f"the size of dimension '{key}' must be a whole number, 0 or more, not {size!r}.")
    tensors = [value for value in model.graph.inputs if isinstance(value.type, ir.TensorType)]
    for value in tensors:
        _give_rank(name, value, input_shapes.get(str(value.name)))
    _check_names(name, tensors, dims)
    # The sizes in ``dims`` and those that whole input shapes give besides, by place
    sizes = dict(dims)
    for value in tensors:
        given = input_shapes.get(str(value.name))
        if given is None:
            continue
        if len(_dims(value)) != len(given):
            raise LoadError(
                f"{name}: input '{value.name}' has {len(_dims(value))} dimensions; {list(given)} was given."
            )
        for axis, (dim, size) in enumerate(zip(_dims(value), given, strict=True)):
            if not isinstance(dim, int) and _symbol(dim) not in dims:
                sizes.setdefault(_key(value, axis), size)
    notes: tuple[str, ...] = ()
    if batch is not None:
        sizes = {**_batch_sizes(tensors, name, batch), **sizes}
    elif left := _open_batch(tensors, sizes):
        batch, sizes = 1, {**dict.fromkeys(left, 1), **sizes}
        notes = (f"the batch ({quoted(left, 3)}) has no size: it is 1, unless {option('batch', N)} says another.",)
    sizes = {**_sums(tensors, sizes), **sizes}
    _check_sizes(name, tensors, sizes)
    bound = [ir.Shape([_size(name, v, axis, dim, sizes) for axis, dim in enumerate(_dims(v))]) for v in tensors]
    for value, shape in zip(tensors, bound, strict=True):
        value.shape = shape
    return dataclasses.replace(model, batch=batch, notes=notes)


def bind_open(
    model: Model,
    batch: int | None,
    dims: Mapping[str, int],
    ranges: Mapping[str, DimRange],
    input_shapes: Mapping[str, Sequence[int]],
) -> tuple[Model, dict[str, DimRange]]:
    """Give every input a shape, in place, in which the dimensions with a range are symbolic, under the range's name.

    Returns: the model with its batch, and the ranges with their places. Among them are dimensions whose names are sums
        of those, as ``past + seq``.

    Raises:
        LoadError: as `bind`; a dimension with a range is fixed.
    """
    tensors = [value for value in model.graph.inputs if isinstance(value.type, ir.TensorType)]
    # Ranges of dimensions whose names are sums of those with ranges, and of sizes
    found = {}
    for name in _open_names(tensors):
        terms = terms_of(name)
        if name not in ranges and name not in dims and len(terms) > 1 and terms.keys() <= {"", *dims, *ranges}:
            try:
                found[name] = in_terms_of(terms, dims, ranges)
            except ValueError as error:
                raise LoadError(f"dimension {name!r} follows from others, and {error}.") from error
    ranges = {**ranges, **{name: one for name, one in found.items() if not terms_of(one.equals).keys() <= {""}}}
    places: dict[str, list[str]] = {name: [] for name in ranges}
    for value in tensors:
        for axis, dim in enumerate(_dims(value)):
            keys = [key for key in _keys(value, axis) if key in ranges]
            if keys and not isinstance(dim, int) and not (_key(value, axis) in dims and keys[0] != _key(value, axis)):
                places[keys[0]].append(_key(value, axis))
    model = bind(model, batch, {**{name: one.most for name, one in ranges.items()}, **dims}, input_shapes)
    fixed = next((name for name, where in places.items() if not where), None)
    if fixed is not None:
        raise LoadError(f"{model.name}: dimension {fixed!r} is fixed in the model, so it can't have a range of sizes.")
    name_of = {place: name for name, where in places.items() for place in where}
    for value in tensors:
        names = [(name_of.get(_key(value, axis)), dim) for axis, dim in enumerate(_dims(value))]
        value.shape = ir.Shape([dim if name is None else ir.SymbolicDim(name) for name, dim in names])
    placed = {name: dataclasses.replace(one, places=tuple(places[name])) for name, one in ranges.items()}
    return model, placed


def _open_names(values: Sequence[ir.Value]) -> list[str]:
    """Names of dimensions without a size, each once."""
    symbols = (_symbol(dim) for value in values for dim in _dims(value) if not isinstance(dim, int))
    return list(dict.fromkeys(symbol for symbol in symbols if symbol))


def _sums(values: Sequence[ir.Value], sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes of dimensions whose names are sums of others, as ``past + seq``, as far as these have sizes."""
    found = {}
    for name in _open_names(values):
        terms = terms_of(name)
        if len(terms) > 1 and terms.keys() <= {"", *sizes} and (size := sum_of(terms, sizes)) >= 0:
            found[name] = size
    return found


def _is_size(given: object) -> bool:
    return not isinstance(given, bool) and isinstance(given, numbers.Integral) and int(given) >= 0


def has_open_batch(model: ir.Model, dims: Mapping[str, int]) -> bool:
    """Whether the batch of a model has no size yet, with these sizes of dimensions."""
    return bool(_open_batch([value for value in model.graph.inputs if isinstance(value.type, ir.TensorType)], dims))


_BATCH = re.compile(r"batch|^(n|b|bs)$", re.IGNORECASE)


def _open_batch(values: Sequence[ir.Value], sizes: Mapping[str, int]) -> list[str]:
    """First dimensions without a size. Where they have several names, only those that are called as a batch is."""
    first = [value for value in values if _dims(value) and not isinstance(_dims(value)[0], int)]
    keys = [_keys(value, 0) for value in first]
    left = list(dict.fromkeys(each[-1] for each in keys if not any(key in sizes for key in each)))
    symbols = {_symbol(_dims(value)[0]) for value in first}
    return left if len(symbols) == 1 else [key for key in left if key in symbols and _BATCH.search(key)]


def _dims(value: ir.Value) -> tuple[Dim, ...]:
    return tuple(value.shape or ())


def _key(value: ir.Value, axis: int) -> str:
    return f"{value.name}[{axis}]"


def _symbol(dim: Dim) -> str | None:
    return dim.value if isinstance(dim, ir.SymbolicDim) else None


def _keys(value: ir.Value, axis: int) -> list[str]:
    """What the dimension goes by: its place, then its name if it has one."""
    symbol = _symbol(_dims(value)[axis])
    return [_key(value, axis)] if symbol is None else [_key(value, axis), symbol]


def _give_rank(name: str, value: ir.Value, given: Sequence[int] | None) -> None:
    """An input without any shape takes the given one, or that of its default."""
    if value.shape is not None:
        return
    if given is not None:
        value.shape = ir.Shape(list(given))
    elif value.const_value is not None:
        value.shape = tensor_shape(value.const_value)
    else:
        raise LoadError(
            f"{name}: input '{value.name}' has no shape at all. Plans need static shapes: give an array of the shape "
            f"to plan for ({option('inputs', FILE)}), or write its shape into the model."
        )


def _check_names(name: str, values: Sequence[ir.Value], dims: Mapping[str, int]) -> None:
    places = {key for value in values for axis in range(len(_dims(value))) for key in _keys(value, axis)}
    unknown = [key for key in dims if key not in places]
    if not unknown:
        return
    symbolic = [(value, axis) for value in values for axis, dim in enumerate(_dims(value)) if not isinstance(dim, int)]
    open_names = dict.fromkeys(_keys(value, axis)[-1] for value, axis in symbolic)
    raise LoadError(
        f"{name} has no dimension named {quoted(unknown)}; "
        + (f"it has {quoted(open_names)}." if open_names else "all of its dimensions are fixed.")
        + did_you_mean(unknown[0], open_names)
    )


def _batch_sizes(values: Sequence[ir.Value], name: str, batch: int) -> dict[str, int]:
    first = [(value, _dims(value)[0]) for value in values if _dims(value)]
    sizes = {_keys(value, 0)[-1]: batch for value, dim in first if not isinstance(dim, int)}
    if not sizes and all(dim != batch for _, dim in first):
        which = ", ".join(f"'{value.name}' has {dim}" for value, dim in first) or "no input has one"
        raise LoadError(
            f"{name}: the batch can't be {batch}, as its inputs' first dimensions are fixed ({which}). "
            f"Export the model with a dynamic batch dimension, or leave {option('batch')} out."
        )
    return sizes


def _check_sizes(name: str, values: Sequence[ir.Value], sizes: Mapping[str, int]) -> None:
    """Check that every dimension has a size.

    Raises:
        LoadError: it names all that have none, and gives an example of a call that gives each one.
    """
    missing: dict[str, str] = {}
    for value in values:
        for axis, dim in enumerate(_dims(value)):
            keys = _keys(value, axis)
            if not isinstance(dim, int) and not any(key in sizes for key in keys):
                called = f"'{keys[1]}'" if keys[1:] else "without a name"
                missing.setdefault(keys[-1], f"dimension {axis} of input '{value.name}' ({called})")
    if not missing:
        return
    example = {key: 1 if key.endswith("[0]") else _EXAMPLE for key in missing}
    derived = _sums(values, {**sizes, **{key: size for key, size in example.items() if len(terms_of(key)) < 2}})
    needed = {key: size for key, size in example.items() if key not in derived} or example
    have, each = ("have", "each") if len(needed) > 1 else ("has", "it")
    raise LoadError(
        f"{name}: {listed(missing[key] for key in needed)} {have} no size. Plans need static shapes: give {each} one, "
        f"for example: {again('dims', needed)}"
    )


_EXAMPLE = 64
"""The size of a dimension in an example: images, texts and sounds of so many are what most models take."""


def _size(name: str, value: ir.Value, axis: int, dim: Dim, sizes: Mapping[str, int]) -> int:
    keys = [key for key in _keys(value, axis) if key in sizes]
    if not isinstance(dim, int):
        return sizes[keys[0]]
    if keys and sizes[keys[0]] != dim:
        raise LoadError(f"{name}: dimension {keys[0]} is {dim} in the model and can't be set to {sizes[keys[0]]}.")
    return dim
