"""A loaded model, where it came from, and what it says of itself."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import onnx
import onnx_ir

from memonger.ir import training_roles
from memonger.ir.save import as_proto, save_model
from memonger.ir.training_roles import Training
from memonger.units import shown


@dataclass(frozen=True, slots=True)
class PassRecord:
    """A pass that changed a model; see `memonger.ir.passes`.

    Attributes:
        stage: ``load``, ``differentiate`` or ``lower``.
        name: What it did, a verb first, as ``lift constants``.
        nodes: How many nodes the main graph had after it.
    """

    stage: str
    name: str
    nodes: int


@dataclass(frozen=True, repr=False)
class Model:
    """A loaded model.

    Attributes:
        ir: The model; every graph input has a static shape. Not to be edited: `clone` it.
        name: Where it came from, for messages: a path, or ``<bytes>`` and the like.
        batch: The batch size asked for, or 1 where nobody gave the open batch a size; None where it isn't open.
        notes: What the user should know about how it was loaded, one sentence each.
        path: The file that is planned, where it was named as such; None for a model in memory.
        foreign: Whether it came as a file or as bytes: what could end this process is done in another.
        passes: The passes that changed it on its way here, in order.
    """

    ir: onnx_ir.Model
    name: str
    batch: int | None = None
    foreign: bool = False
    notes: tuple[str, ...] = ()
    path: Path | None = None
    passes: tuple[PassRecord, ...] = ()

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

    @property
    def title(self) -> str:
        """What to call it for short: its file's name without its suffix, else its graph's name."""
        return str(self.graph.name or "model") if self.name.startswith("<") else Path(self.name).stem

    @property
    def proto(self) -> onnx.ModelProto:
        """The model as an ``onnx.ModelProto`` of its own, all weights in it: ``onnx.save(model.proto, path)``.

        Raises:
            PlanFileError: its weights are more than one message holds: `save` has no such limit.
        """
        return as_proto(self.ir, self.name)

    def save(self, path: str | Path) -> None:
        """Write the model; whole or not at all. Large weights go into a file beside it. What is there is replaced.

        Raises:
            PlanFileError: the file can't be written, or holds weights of this model.
        """
        save_model(self.ir.clone(), Path(path))

    def __repr__(self) -> str:
        """As ``<Model resnet18: 69 nodes, batch 1>``."""
        kind = ", training step" if self.is_differentiated else ""
        batch = "" if self.batch is None else f", batch {self.batch}"
        return shown(f"<Model {self.title}: {self.graph.num_nodes()} nodes{batch}{kind}>")

    def clone(self) -> "Model":
        """A copy to edit. Tensors are shared."""
        return dataclasses.replace(self, ir=self.ir.clone())
