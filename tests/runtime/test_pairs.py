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


def test_seven_pairs_on_one_side_are_enough() -> None:
    for seconds in (2.0, 0.5):
        pairs = Pairs(1.0)
        for _ in range(7):
            assert not pairs.is_clear
            pairs.add(seconds, 1.0)
        assert pairs.is_clear
        assert pairs.ratio == seconds


@pytest.mark.parametrize("ratio", [0.9, 1.1])
def test_what_is_clear_is_nearly_always_right(ratio: float) -> None:
    """Runs that spread by 10 %, and a difference of as much."""
    found = [_run(1.0, ratio, 0.1, seed) for seed in range(200)]
    right = [(pairs.ratio > 1) == (ratio > 1) for pairs in found]
    assert sum(right) >= 195
    assert sorted(len(pairs.ratios) for pairs in found)[100] <= 20


def test_next_to_the_limit_it_isnt_clear() -> None:
    found = [_run(1.0, 1.0, 0.1, seed, 60) for seed in range(100)]
    assert sum(not pairs.is_clear for pairs in found) >= 70
    assert sum(0.95 < pairs.ratio < 1.05 for pairs in found if not pairs.is_clear) >= 70
