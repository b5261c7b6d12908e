"""What is done to a forward model before it is planned, where options ask for it: `Changes`."""

from collections.abc import Mapping
from dataclasses import dataclass

from memonger.ir.model import Model
from memonger.model.load import Source, load
from memonger.options import Dim, Options


@dataclass(frozen=True, slots=True)
class Changes:
    """What is done to a forward model before it is planned.

    Attributes:
        train_mode: BatchNormalization and Dropout are turned into their training form.
        rank: Of the adapters that are added, which alone are trained; None: none are.
        pattern: Beside which weights.
    """

    train_mode: bool = False
    rank: int | None = None
    pattern: str = "*"

    def __bool__(self) -> bool:
        """Whether anything is done."""
        return self.train_mode or self.rank is not None

    def made(self, source: Source | Model, batch: int | None, dims: Mapping[str, Dim] | None) -> Model:
        """The model at these sizes, with adapters and in training form where that is asked for.

        Raises:
            LoadError: as `memonger.load`.
            PlanError: as `Options`: what is done is for training.
        """
        model = load(source, batch=batch, dims=Options(mode="training", batch=batch, dims=dims).sizes)
        if self.rank is not None:
            from memonger.model.lora import add_lora

            model = add_lora(model, self.rank, self.pattern)
        if not self.train_mode:
            return model
        from memonger.autodiff.training_mode import to_training_mode

        return to_training_mode(model)
