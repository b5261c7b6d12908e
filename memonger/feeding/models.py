"""The batch with which a model fits its memory."""

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from memonger.errors import FeedError
from memonger.feeding.samples import SampleTensor
from memonger.ir.model import Model
from memonger.ir.values import static_shape
from memonger.model.load import Source
from memonger.plan import Plan
from memonger.planner.fit import Fit, fit
from memonger.units import in_full
from memonger.words import quoted


def batch_of(
    model: Source | Model | Plan | Fit, tensors: Sequence[SampleTensor], memory: int | None, options: Mapping[str, Any]
) -> tuple[int, bool]:
    """The largest batch that fits, or a plan's own; and whether it is a plan's, which takes no other.

    Raises:
        FeedError: there is no memory said; none fits; the plan takes more, or other samples.
        LoadError, PlanError, RuntimeUnavailableError: as `memonger.fit`.
    """
    if isinstance(model, Plan):
        return _planned(model, tensors, memory), True
    fit = model if isinstance(model, Fit) else _fitted(model, memory, options)
    if fit.plan is None:
        least = fit.beyond.total_bytes if fit.beyond is not None else None
        takes = f"; the smallest that was found takes {in_full(least)}" if least else ""
        raise FeedError(f"no batch of the model fits {in_full(fit.memory)}{takes}.")
    if _planned(fit.plan, tensors, None) != fit.size:
        raise FeedError(f"the model was fitted by {fit.vary!r}, which isn't its batch: say vary='batch'.")
    return fit.size, False


def _fitted(model: Source | Model, memory: int | None, options: Mapping[str, Any]) -> Fit:
    if memory is None:
        raise FeedError("say how much the model may take: gpu_limit of the configuration, or memory='8GiB' here.")
    return fit(model, memory, **options)


def _planned(plan: Plan, tensors: Sequence[SampleTensor], memory: int | None) -> int:
    if memory is not None and plan.total_bytes > memory:
        raise FeedError(f"the plan takes {in_full(plan.total_bytes)}, and it may take {in_full(memory)}.")
    batches = {tensor.name: _batch(tensor, plan) for tensor in tensors}
    if len(set(batches.values())) > 1:
        each = ", ".join(f"'{name}' {batch}" for name, batch in batches.items())
        raise FeedError(f"the plan takes batches of different sizes: {each}.")
    return batches[tensors[0].name]


def _batch(tensor: SampleTensor, plan: Plan) -> int:
    """The batch that a plan takes of a tensor."""
    inputs: dict[str, ir.Value] = {str(value.name): value for value in plan.model.graph.inputs}
    value = inputs.get(tensor.name)
    if value is None:
        raise FeedError(f"the plan has no input '{tensor.name}'; its inputs are {quoted(list(inputs))}.")
    shape, dtype = static_shape(value) or (), value.dtype.numpy() if value.dtype is not None else None
    if not shape or shape[1:] != tensor.shape or dtype != tensor.dtype:
        raise FeedError(f"'{tensor.name}' of a sample is {tensor}, and the plan takes batches of {dtype}{list(shape)}.")
    return shape[0]
