"""The search for a budget's cheapest schedule by targets: what a search counts isn't what the budget is of.

A search of the reduced problem holds the live bytes of its worst step. A plan needs an arena, which may have gaps, and
folded nodes need a little more or less than the problem says. So the search is given a target, what it finds is looked
at as it will be, and the next target follows from how far that is from the budget.
"""

from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

ATTEMPTS = 6
"""Targets for one budget."""

Item = TypeVar("Item")


class Tried(NamedTuple, Generic[Item]):
    """What a search found.

    Attributes:
        needed: Bytes, in those of the budget.
        cost: Of all steps.
        item: What it is.
    """

    needed: int
    cost: float
    item: Item


Search = Callable[[int, int], tuple[int, Iterable[Tried[Item]]]]
"""Given a target and the number of the attempt, the bytes that the search counts for the first of what it found, and
what it found within the target, the cheapest first; where that is nothing, the one with the least bytes."""


def cheapest_within(budget: int, search: Search[Item]) -> Item | None:
    """The cheapest that was found within the budget, or None.

    Where the cheapest doesn't fit, the next target is smaller by what it lacks, from the third time on by twice that,
    then four times, and so on; and one halfway back where nothing was found any more. Where the least that there is
    fits, the next target is what that counts and what the budget leaves. The last but one is 0 if nothing fitted.

    Args:
        budget: Bytes.
        search: Its results are looked at one by one, to the first that fits.
    """
    target, too_large, best = budget, 0, None
    for attempt in range(ATTEMPTS):
        target = 0 if attempt == ATTEMPTS - 2 and best is None else target
        counted, results = search(target, attempt)
        first, fitting = _to_the_first_that_fits(budget, results)
        before, best = best, min((each for each in (best, fitting) if each), key=lambda each: each.cost, default=None)
        if counted <= target:
            if best is not None and best.cost <= first.cost:
                break
            too_large = target
            target = min(target - ((first.needed - budget) << max(0, attempt - 1)), counted - 1)
        elif fitting is not None and before is None:
            target = counted + budget - fitting.needed
            if too_large:
                target = min(target, (counted + too_large) // 2)
        elif best is None and too_large and target:
            target = (target + too_large) // 2
        else:
            break
    return best.item if best is not None else None


def _to_the_first_that_fits(budget: int, results: Iterable[Tried[Item]]) -> tuple[Tried[Item], Tried[Item] | None]:
    """The first of all, and the first within the budget."""
    above = list[Tried[Item]]()
    for each in results:
        if each.needed <= budget:
            return (*above, each)[0], each
        above.append(each)
    return above[0], None
