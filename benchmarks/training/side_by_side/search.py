"""The largest batch that fits: bisection, with guesses from the straight line that memory nearly is."""

import math
from collections.abc import Callable, Mapping

TRIES, TOLERANCE = 16, 0.02
REACH = 32  # times the largest batch that is known to fit: how far a line is trusted
Need = Callable[[int], float]


def largest_batch(need: Need, limit: float, start: int, tries: int = TRIES) -> tuple[int, dict[int, float]]:
    """The largest batch found whose need is within the limit, to `TOLERANCE` of it; 0 if none.

    Args:
        need: Bytes of a batch; infinite where all that is known is that it doesn't fit. Assumed to grow.
        limit: Bytes.
        start: Where to begin.
        tries: Needs asked for at most; after so many the bracket may be wider.

    Returns: the batch, and every need that was asked for.
    """
    known: dict[int, float] = {}
    low, high, guess, widths = 0, math.inf, max(1, start), [math.inf, math.inf]
    for _ in range(tries):
        known[guess] = need(guess)
        low, high = (guess, high) if known[guess] <= limit else (low, min(high, guess))
        step = max(1, int(low * TOLERANCE))
        if high - low <= step:
            break
        widths.append(high - low)
        slow = widths[-1] > widths[-3] / 2 and math.isfinite(high)
        guess = _middle(low, high) if slow else _next(known, limit, low, high, step)
    return low, known


def _middle(low: int, high: float) -> int:
    return (low + int(high)) // 2


def _next(known: Mapping[int, float], limit: float, low: int, high: float, step: int) -> int:
    """Where a line meets the limit; a step further where that is known to fit, to close the bracket."""
    line = _line(known, low, high)
    if line is None:
        return 2 * low if math.isinf(high) else _middle(low, high)
    target = math.floor((limit - line[0]) / line[1])
    if target >= high:  # the line doesn't know what made it fail
        return _middle(low, high)
    return min(max(target, low + step), REACH * low if math.isinf(high) else int(high) - 1)


def _line(known: Mapping[int, float], low: int, high: float) -> tuple[float, float] | None:
    """Intercept and slope through the bracket's ends, or through the two largest batches that fit."""
    finite = sorted(batch for batch, need in known.items() if batch <= high and math.isfinite(need))[-2:]
    if len(finite) < 2 or low not in finite:
        return None
    a, b = finite
    slope = (known[b] - known[a]) / (b - a)
    return (known[b] - slope * b, slope) if slope > 0 else None
