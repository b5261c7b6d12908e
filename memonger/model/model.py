"""A loaded model, and where it came from."""

from dataclasses import dataclass

import onnx_ir as ir


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model.

    Attributes:
        ir: The model; every graph input has a static shape. Not to be edited: clone it.
        name: Where it came from, for messages: a path, or ``<bytes>`` and the like.
        batch: The batch size asked for, if any.
    """

    ir: ir.Model
    name: str
    batch: int | None = None
