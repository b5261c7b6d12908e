"""Pairs of runs, and when enough of them were run."""

import random

import pytest

from memonger.runtime.pairs import Pairs


def _run(limit: float, ratio: float, spread: float, seed: int, most: int = 400) -> Pairs:
    """Pairs until it is clear, on a machine that is twice as slow at times."""
    rng, pairs = random.Random(seed), Pairs(limit)
    while len(pairs.ratios) < most and not pairs.is_clear:
        phase = rng.choice((1.0, 2.0))
        pairs.add(phase * ratio * rng.lognormvariate(0, spread), phase * rng.lognormvariate(0, spread))
    return pairs


@pytest.mark.parametrize(("seconds", "enough"), [(2.0, 5), (0.5, 3)])
def test_to_be_too_slow_takes_more_pairs_on_one_side(seconds: float, enough: int) -> None:
    pairs = Pairs(1.0)
    for _ in range(enough):
        assert not pairs.is_clear
        pairs.add(seconds, 1.0)
    assert pairs.is_clear
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
    found = [_run(1.05, 1.0, 0.1, seed, 60) for seed in range(400)]
    assert sum(pairs.is_too_slow for pairs in found) <= 20
    assert sum(_run(1.0, 1.0, 0.1, seed, 60).is_too_slow for seed in range(400)) <= 100
