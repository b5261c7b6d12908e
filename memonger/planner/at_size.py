"""A model at one size of a dimension, lowered for the search."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from memonger.autodiff.training_mode import to_training_mode
from memonger.ir.model import Model
from memonger.model.load import Source, load
from memonger.model.lora import add_lora
from memonger.options import Dim, Options
from memonger.planner.dimension import Dimension
from memonger.planner.search_plan import Job, prepare


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
            model = add_lora(model, self.rank, self.pattern)
        return to_training_mode(model) if self.train_mode else model


def lower(source: Source | Model, dimension: Dimension, size: int, options: Options, changes: Changes) -> Job:
    """The model with this size of the dimension, lowered for the search.

    Raises:
        LoadError, PlanError, RuntimeUnavailableError: as `memonger.search_plan`.
    """
    batch, dims = dimension.at(size, options)
    options = dataclasses.replace(options, batch=batch, dims=dims, progress=None)
    if changes:
        source = changes.made(source, batch, dims)
        options = dataclasses.replace(options, batch=None, dims=None)
    job = prepare(source, options, times=True)
    return dataclasses.replace(job, request=dataclasses.replace(job.request, progress=None))
