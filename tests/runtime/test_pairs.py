"""Pairs of runs, and when enough of them were run."""

import random

import pytest

from memonger.runtime.pairs import Pairs


def _run(limit: float, ratio: float, spread: float, seed: int, most: int = 400) -> Pairs:
    """Pairs until they are enough, on a machine that is twice as slow at times."""
    rng, pairs = random.Random(seed), Pairs(limit, most)
    while not pairs.are_enough:
        phase = rng.choice((1.0, 2.0))
        pairs.add(phase * ratio * rng.lognormvariate(0, spread), phase * rng.lognormvariate(0, spread))
    return pairs


@pytest.mark.parametrize(("seconds", "enough"), [(2.0, 5), (0.5, 3)])
def test_to_be_too_slow_takes_more_pairs_on_one_side(seconds: float, enough: int) -> None:
    pairs = Pairs(1.0, 60)
    for _ in range(enough):
        assert not pairs.are_enough
        pairs.add(seconds, 1.0)
    assert pairs.are_enough
    assert pairs.is_too_slow == (seconds > 1)
    assert pairs.ratio == seconds


@pytest.mark.parametrize("ratio", [0.9, 1.1])
def test_what_is_clear_is_nearly_always_right(ratio: float) -> None:
    """Runs that spread by 10 %, and a difference of as much."""
    found = [_run(1.0, ratio, 0.1, seed) for seed in range(400)]
    right = [pairs.is_too_slow == (ratio > 1) for pairs in found]
    assert sum(right) >= 350
    assert sorted(len(pairs.ratios) for pairs in found)[200] <= 12


def test_what_takes_as_long_as_it_may_is_hardly_ever_too_slow() -> None:
    """With 5 % of room: of many pairs of runs that spread by 10 %, and of five that spread by 5."""
    for most, spread, at_most in ((60, 0.1, 20), (5, 0.05, 60)):
        assert sum(_run(1.05, 1.0, spread, seed, most).is_too_slow for seed in range(400)) <= at_most


def test_of_few_pairs_most_decide() -> None:
    pairs = Pairs(1.0, 3)
    for seconds in (2.0, 0.5, 3.0):
        assert not pairs.are_enough
        pairs.add(seconds, 1.0)
    assert pairs.are_enough
    assert pairs.is_too_slow
