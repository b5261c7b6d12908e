"""How far two sets of outputs are apart, and whether that is near enough."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What outputs may differ by: ``|planned − stock| ≤ atol + rtol · |stock|``, as `numpy.isclose` has it.

    One that is None is 0 where the other is given. Without either nothing may differ, in any bit.
    """

    atol: float | None = None
    rtol: float | None = None

    @property
    def is_exact(self) -> bool:
        """Whether every bit has to be the same."""
        return self.atol is None and self.rtol is None

    def takes(self, ours: np.ndarray, theirs: np.ndarray) -> bool:
        """Whether two arrays of one type and shape are near enough. Equal bits always are, NaNs at equal places too."""
        if ours.tobytes() == theirs.tobytes():
            return True
        if self.is_exact or ours.dtype.kind not in "biufc":
            return False
        mine, stock = _wide(ours), _wide(theirs)
        return bool(np.isclose(mine, stock, rtol=self.rtol or 0.0, atol=self.atol or 0.0, equal_nan=True).all())

    def __str__(self) -> str:
        given = {"atol": self.atol, "rtol": self.rtol}
        return " and ".join(f"{name} {value:g}" for name, value in given.items() if value is not None)


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two sets of outputs are apart.

    Attributes:
        passed: Whether all are near enough.
        bitwise_equal: Whether every bit is the same (NaNs with the same bits are).
        max_abs_diff: The largest difference of two numbers; None where types, shapes, NaNs or infinities differ.
        max_rel_diff: The largest one as a part of stock's number, zeros left out; None as above.
        names: Outputs that aren't near enough.
        why: What stands against a comparison of numbers, of the first such output; empty if nothing does.
    """

    passed: bool
    bitwise_equal: bool
    max_abs_diff: float | None
    max_rel_diff: float | None
    names: tuple[str, ...] = ()
    why: str = ""


def each_array(outputs: Mapping[str, Any], *, lengths: bool = False) -> dict[str, Any]:
    """Outputs by name, the arrays of a sequence ``y`` as ``y[0]`` and so on; with ``lengths`` also their number.

    An empty sequence is an array without rows.
    """
    found = dict[str, Any]()
    for name, value in outputs.items():
        if not isinstance(value, list):
            found[name] = value
            continue
        found |= {f"length of {name}": np.array(len(value))} if lengths else {}
        found |= {f"{name}[{number}]": one for number, one in enumerate(value)} if value else {name: np.array([])}
    return found


def difference(mine: Mapping[str, Any], stock: Mapping[str, Any], tolerance: Tolerance | None = None) -> Difference:
    """How far outputs are from stock onnxruntime's, by name. What stock doesn't have isn't compared.

    Args:
        mine: Arrays, and lists of arrays for sequences.
        stock: The same.
        tolerance: What they may differ by; None: in no bit.
    """
    mine, stock = each_array(mine, lengths=True), each_array(stock, lengths=True)
    allowed, names, gaps, why, equal = tolerance or Tolerance(), list[str](), [], "", True
    for name, theirs in stock.items():
        ours = mine.get(name)
        if ours is not None and _same(ours, theirs):
            continue
        equal = False
        reason = "isn't there" if ours is None else _incomparable(ours, theirs)
        if reason or ours is None:
            why = why or f"'{name}' {reason}"
            names.append(name)
            continue
        gaps.append(largest(ours, theirs))
        if not allowed.takes(ours, theirs):
            names.append(name)
    largest_gaps = [max(parts, default=0.0) for parts in ([a for a, _ in gaps], [r for _, r in gaps])]
    absolute, relative = (None, None) if why else largest_gaps
    return Difference(not names, equal, absolute, relative, tuple(names), why)


def _same(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return (ours.shape, ours.dtype, ours.tobytes()) == (theirs.shape, theirs.dtype, theirs.tobytes())


def _incomparable(ours: np.ndarray, theirs: np.ndarray) -> str:
    """Why the numbers of two arrays can't be subtracted; empty where they can."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return f"is {ours.dtype}{list(ours.shape)}, stock has {theirs.dtype}{list(theirs.shape)}"
    if ours.dtype.kind not in "biufc":
        return "has other bits"
    mine, stock = _wide(ours), _wide(theirs)
    if not np.array_equal(np.isnan(mine), np.isnan(stock)):
        return "has NaNs elsewhere"
    if not np.array_equal(np.where(np.isinf(mine), mine, 0), np.where(np.isinf(stock), stock, 0)):
        return "has infinities elsewhere"
    return ""


def largest(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    """The largest difference of two arrays' numbers, and the largest as a part of theirs; those not finite left out."""
    mine, stock = _wide(ours), _wide(theirs)
    finite = np.isfinite(mine) & np.isfinite(stock)
    mine, stock = mine[finite], stock[finite]
    with np.errstate(over="ignore"):
        gap, size = np.abs(mine - stock), np.abs(stock)
        parts = gap[size > 0] / size[size > 0]
    return tuple(float(np.nan_to_num(each.max(initial=0.0))) for each in (gap, parts))  # type: ignore[return-value]


def _wide(array: np.ndarray) -> np.ndarray[Any, np.dtype[Any]]:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
