"""The dimension of a model whose largest size is asked for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from memonger.errors import PlanError
from memonger.ir.model import Model
from memonger.ir.values import required_inputs
from memonger.model.load import Source, load_as_is
from memonger.options import Dim, Options
from memonger.words import NAME, SIZE, N, did_you_mean, option, quoted


@dataclass(frozen=True, slots=True)
class Dimension:
    """An open dimension.

    Attributes:
        name: As it is given to ``dims``; None: the inputs' open first dimension, given as ``batch``.
    """

    name: str | None

    @property
    def is_batch(self) -> bool:
        """Whether it is the batch."""
        return self.name is None

    def at(self, size: int, options: Options) -> tuple[int | None, Mapping[str, Dim] | None]:
        """The options ``batch`` and ``dims`` with this size."""
        if self.name is None:
            return size, options.dims
        return options.batch, {**(options.dims or {}), self.name: size}


def open_dimension(source: Source | Model, vary: str, options: Options) -> Dimension:
    """The dimension that a user calls ``vary``.

    Raises:
        LoadError: the model can't be read.
        PlanError: there is none of that name that is open, or the options give it a size.
    """
    if not isinstance(vary, str):
        raise PlanError(f"vary must be 'batch' or the name of a dimension, not {vary!r}.")
    model = source if isinstance(source, Model) else load_as_is(source)
    inputs = required_inputs(model.graph)
    places = [(v, axis) for v in inputs for axis, dim in enumerate(v.shape or ()) if not isinstance(dim, int)]
    names = [_name(value, axis) for value, axis in places]
    open_names = list(dict.fromkeys([*(name for name in names if name), *(f"{v.name}[{axis}]" for v, axis in places)]))
    if vary == "batch" and any(axis == 0 for _, axis in places):
        if options.batch is not None:
            other = f"vary another dimension ({option('vary', NAME)})"
            raise PlanError(f"the batch is what varies: leave {option('batch')} out, or {other}.")
        return Dimension(None)
    if vary in open_names:
        if vary in (options.dims or {}):
            raise PlanError(f"dimension '{vary}' is what varies: leave its size ({option('dims', {vary: N})}) out.")
        return Dimension(vary)
    raise PlanError(_nothing_to_vary(model.name, vary, inputs, open_names))


def _name(value: ir.Value, axis: int) -> str | None:
    dim = (value.shape or ())[axis]
    return dim.value if isinstance(dim, ir.SymbolicDim) else None


def _nothing_to_vary(model: str, vary: str, inputs: Sequence[ir.Value], known: Sequence[str]) -> str:
    listed = (
        ", ".join(f"'{v.name}' is [{', '.join(map(_shown, v.shape or ()))}]" for v in inputs) or "there is no input"
    )
    if not known:
        return (
            f"{model}: no dimension of its inputs is open, so none can vary ({listed}). Export it with a dynamic "
            f"dimension; whether it fits as it is, a plan with that budget says ({option('budget', SIZE)})."
        )
    near = did_you_mean(vary, known)
    what = "open first dimension to be its batch" if vary == "batch" else f"open dimension '{vary}'"
    hint = near or f" {option('vary')} takes {quoted(known)}."
    return f"{model} has no {what} ({listed}).{hint}"


def _shown(dim: object) -> str:
    return str(dim) if isinstance(dim, int) else str(getattr(dim, "value", None) or "?")
