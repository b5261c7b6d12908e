"""Gradients that a run gave, in a sentence: a model that is differentiated has too many outputs for a table."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from memonger.ir.training_roles import Training


def summary(roles: Training, outputs: Mapping[str, np.ndarray]) -> dict[str, Any] | None:
    """Of gradients that are outputs: how many, their global norm, the largest number and where, those not finite.

    Norm and largest number are those of the finite numbers.
    """
    arrays = {of: outputs[name].astype(np.float64) for of, name in roles.gradients.items() if name in outputs}
    if not arrays:
        return None
    finite = {of: array[np.isfinite(array)] for of, array in arrays.items()}
    largest = {of: float(np.abs(array).max(initial=0.0)) for of, array in finite.items()}
    most = max(largest, key=lambda of: largest[of])
    return {
        "count": len(arrays), "numbers": sum(array.size for array in arrays.values()),
        "norm": float(np.sqrt(sum(float((array * array).sum()) for array in finite.values()))),
        "largest": largest[most], "largest_of": most,
        "not_finite": [of for of, array in arrays.items() if finite[of].size < array.size],
    }  # fmt: skip


def lines(sums: Mapping[str, Any] | None, roles: Training) -> list[str]:
    """Gradients in a sentence; a model that is differentiated has too many for a table."""
    if sums is None:
        return []
    wrong = sums["not_finite"]
    bad = f" Not finite: {', '.join(wrong[:3])}{' and others' if len(wrong) > 3 else ''}." if wrong else ""
    is_fixed = roles.loss is not None and not any(name in roles.updates for name in roles.parameters)
    still = "" if not is_fixed else " No parameter is updated: the model has no optimizer."
    return [
        f"Gradients: {sums['count']} tensors of {sums['numbers']:,} numbers, norm {sums['norm']:.5g}, the largest "
        f"number {sums['largest']:.5g} in that of '{sums['largest_of']}'.{bad}{still}"
    ]
