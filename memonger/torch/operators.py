"""What is known of a run of one of PyTorch's operators: storages, bytes, cost, whether it may run again."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from memonger.errors import PlanError
from memonger.graph.costs import INTENSITY

_CUDA_PIECE = 512
"""Bytes that PyTorch's allocator for CUDA devices gives at least, and of which it gives multiples."""

_CUDA_STATE = 16
"""Bytes of the state of a CUDA device's generator: seed and offset."""

_DRAWN = 64
"""Bytes that could be moved while the CPU's generator draws a number: on one core (AMD EPYC) PyTorch 2.13 took 6.6 ns
for one of `torch.rand`, 15 of `torch.bernoulli`, 22 in dropout, and 0.13 for each byte that a product moved."""

BITS = (torch.ops.aten.bernoulli_.float, torch.ops.aten.bernoulli_.Tensor)
"""Operators that draw zeros and ones into what they are given: a byte an element keeps them."""

STATISTICS = ("running_mean", "running_var")
"""Arguments that a batch normalization writes into, though its schema may not say so."""

_UNSIZED = ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")
"""Operators whose backward pass reads a workspace: on tensors without memory it is empty."""


_REDUCES_ITS_RESULT = ("mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy")
"""Losses whose kernels write the loss of each element into the result's storage, and reduce it there: that stays as
large, which on tensors without memory it isn't."""


def check_sizes(target: Any, args: Sequence[Any], result: Any) -> None:
    """Check that what an operator keeps can be told from shapes, and have its result take what the kernel's does.

    Raises:
        PlanError: it can't.
    """
    if isinstance(target, torch._ops.OpOverload) and target._opname in _REDUCES_ITS_RESULT:
        result.untyped_storage().resize_(max(expected(result.untyped_storage().nbytes()), _nbytes(args[0])))
    if isinstance(target, torch._ops.OpOverload) and target._opname in _UNSIZED:
        library = "mkldnn" if "mkldnn" in target._opname else "cudnn"
        raise PlanError(
            f"'{target._opname}' keeps a workspace for its backward pass whose size its library alone knows: plan and "
            f"run the module inside torch.backends.{library}.flags(enabled=False)."
        )


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in what an operator takes or returns."""
    return [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]


def _nbytes(tensor: torch.Tensor) -> int:
    return expected(tensor.numel()) * tensor.element_size()


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """What tells the storages of tensors while they are there, and their bytes."""
    found = dict[int, int]()
    for tensor in tensors:
        if tensor.layout is torch.strided:
            size = expected(tensor.untyped_storage().nbytes())
            piece = _CUDA_PIECE if tensor.device.type == "cuda" else 1
            found[tensor.untyped_storage()._cdata] = -(-size // piece) * piece
    return found


def expected(size: Any) -> int:
    """A size; where it is open, what it was when the graph was traced.

    Raises:
        PlanError: numbers decide it, as of what ``nonzero`` returns.
    """
    if not isinstance(size, int) and size.node.hint is None:
        raise PlanError(
            "numbers decide how large a result is (of nonzero, or of an index by booleans): no plan can know that. "
            "torch.where, or a product with the mask, has a fixed size."
        )
    return size if isinstance(size, int) else int(size.node.hint)


def draws(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a run draws random numbers: attention whose probability of dropping is 0 doesn't."""
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    defaults = {one.name: one.default_value for one in target._schema.arguments if one.has_default_value()}
    return (defaults | _by_name(target, args, kwargs)).get("dropout_p") != 0.0


def generator_state(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Bytes of the state of the generator that a run draws from, as a tensor of the CPU; None: none that can be set.

    Set can be that of the CPU and of the current device of CUDA: `torch._prims.rng_prims` knows no others.
    """
    tensors, device = tensors_in(args), kwargs.get("device")
    device = torch.device(device) if device is not None else tensors[0].device if tensors else None
    if device is None or has_own_generator(args, kwargs):
        return None
    if device.type == "cuda":
        current = torch.cuda.current_device() if torch.cuda.is_available() else 0
        return _CUDA_STATE if device.index in (None, current) else None
    return torch.get_rng_state().nbytes if device.type == "cpu" else None


def normalizes_by_its_batch(target: Any, args: Sequence[Any]) -> bool:
    """Whether a run is of a batch normalization that reads no running statistics, but makes new ones."""
    names = [one.name for one in target._schema.arguments] if isinstance(target, torch._ops.OpOverload) else []
    return STATISTICS[0] in names and any(
        name in ("training", "use_input_stats") and given is True for name, given in zip(names, args, strict=False)
    )


@cache
def may_write(target: Any) -> bool:
    """Whether runs of an operator can write into what they are given: schemas are slow to ask."""
    return isinstance(target, torch._ops.OpOverload) and any(
        one.name in STATISTICS or (one.alias_info and one.alias_info.is_write) for one in target._schema.arguments
    )


def written(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Tensors that a run writes into. A batch normalization's schema doesn't say that it does."""
    if not may_write(target):
        return []
    given = _by_name(target, args, kwargs)
    names = {one.name for one in target._schema.arguments if one.alias_info and one.alias_info.is_write}
    if normalizes_by_its_batch(target, args):
        names.update(STATISTICS)
    return tensors_in([given.get(name) for name in sorted(names)])


def has_own_generator(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a run draws from a generator that it is given, whose state it changes."""
    return any(isinstance(one, torch.Generator) for one in (*args, *kwargs.values()))


def can_be_left_out(target: Any) -> bool:
    """Whether what an operator writes into has all that it computes, so that a second run of it may be left out.

    Batch normalizations run again without statistics.
    """
    schema = target._schema
    return STATISTICS[0] in [one.name for one in schema.arguments] or all(
        one.alias_info is not None and one.alias_info.is_write for one in schema.returns
    )


def left_out(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operator that is left out returns: what it would write into, as it is."""
    given, schema = _by_name(target, args, kwargs), target._schema
    written_to = {
        name: given.get(one.name)
        for one in schema.arguments if one.alias_info and one.alias_info.is_write
        for name in one.alias_info.before_set
    }  # fmt: skip
    results = tuple(written_to[name] for one in schema.returns for name in one.alias_info.before_set)
    return None if not results else results[0] if len(results) == 1 else results


def _by_name(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return dict(zip((one.name for one in target._schema.arguments), args, strict=False)) | dict(kwargs)


def runs_once(target: Any) -> bool:
    """Whether an operator must not run twice: it writes into what it is given, or waits for other ranks."""
    if not isinstance(target, torch._ops.OpOverload):
        return isinstance(target, torch._ops.HigherOrderOperator)
    return target._schema.is_mutable or target.namespace.endswith("c10d_functional")


def cost(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
    """What one run costs, in bytes that could be moved meanwhile: see `memonger.graph.costs`."""
    moved = sum(map(_nbytes, tensors_in((args, kwargs, result))))
    count, flops = flop_registry.get(getattr(target, "overloadpacket", None)), 0
    if count is not None:
        flops = expected(count(*args, **kwargs, out_val=result))
    drawn = 0
    if draws(target, args, kwargs) and any(one.device.type == "cpu" for one in tensors_in(result)):
        drawn = max(expected(one.numel()) for one in tensors_in(result))
    return float(max(moved, flops / INTENSITY, drawn * _DRAWN, 1))
