"""A loaded model, where it came from, and what it says of itself."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import onnx_ir

from memonger.model import training_roles
from memonger.model.training_roles import Training


@dataclass(frozen=True)
class Model:
    """A loaded model.

    Attributes:
        ir: The model; every graph input has a static shape. Not to be edited: `clone` it.
        name: Where it came from, for messages: a path, or ``<bytes>`` and the like.
        batch: The batch size asked for, or 1 where nobody gave the open batch a size; None where it isn't open.
        notes: What the user should know about how it was loaded, one sentence each.
        foreign: Whether it came as a file or as bytes: what could end this process is done in another.
    """

    ir: onnx_ir.Model
    name: str
    batch: int | None = None
    foreign: bool = False
    notes: tuple[str, ...] = ()

    @property
    def graph(self) -> onnx_ir.Graph:
        """The model's main graph."""
        return self.ir.graph

    @cached_property
    def training(self) -> Training | None:
        """The roles of a training model's inputs and outputs, read once; None for any other model.

        Raises:
            PlanError: what the file says of them is malformed.
        """
        return training_roles.read(self.ir, self.name)

    @property
    def is_differentiated(self) -> bool:
        """Whether there are gradients or updates in it."""
        return self.training is not None and self.training.is_differentiated

    def clone(self) -> "Model":
        """A copy to edit. Tensors are shared."""
        return dataclasses.replace(self, ir=self.ir.clone())
