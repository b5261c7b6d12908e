"""What users give for a module's inputs."""

from collections.abc import Sequence

import torch
from torch import nn

from memonger.errors import LoadError


def examples_of(module: object, example: object) -> tuple[torch.Tensor, ...]:
    """Tensors of the shapes and types of a module's inputs; a single one may stand alone.

    Raises:
        LoadError: it isn't a module; they aren't tensors, or there are none.
    """
    if not isinstance(module, nn.Module):
        kind = f"The class {module.__name__}" if isinstance(module, type) else f"A {type(module).__name__}"
        raise LoadError(f"{kind} is not a torch.nn.Module: give the module itself, not its class or its output.")
    for way, is_so in (
        ("torch.jit made", isinstance(module, torch.jit.ScriptModule)),
        ("torch.compile returned", hasattr(module, "_orig_mod")),
    ):
        if is_so:
            raise LoadError(f"this module is what {way} of another: give that, as it was before.")
    name, single = type(module).__name__, isinstance(example, torch.Tensor)
    examples = (example,) if single else tuple(example) if isinstance(example, Sequence) else None
    if not examples:
        what = "none was given" if example is None or examples == () else f"not a {type(example).__name__}"
        raise LoadError(f"{name} needs example inputs: a tensor, or a sequence with one for each input; {what}.")
    for index, tensor in enumerate(examples):
        if not isinstance(tensor, torch.Tensor):
            raise LoadError(f"{name}: example {index} is a {type(tensor).__name__}: give a torch.Tensor.")
    return examples
