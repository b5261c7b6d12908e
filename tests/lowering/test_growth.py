"""What is known of three sizes, carried on to another."""

import pytest

from memonger.lowering.growth import Growth, smaller


@pytest.mark.parametrize(
    ("sizes", "size", "lengths", "length"),
    [
        ((1, 2, 4), 1000, (7, 14, 28), 7000),  # of a batch
        ((2, 4, 8), 100, (4, 16, 64), 10_000),  # scores of a sequence
        ((8, 16, 32), 96, (1, 2, 4), 12),  # rows of an image, after three steps of two
        ((8, 16, 32), 100, (1, 2, 4), None),  # 12.5: the model decides how it is rounded
        ((1, 2, 4), 16, (7, 6, 4), None),
    ],
)
def test_lengths_are_polynomials(
    sizes: tuple[int, ...], size: int, lengths: tuple[int, ...], length: int | None
) -> None:
    assert Growth(sizes, size).length(lengths) == length


@pytest.mark.parametrize(
    ("taken", "at_64"),
    [
        ((0, 0, 0), 0),
        ((640, 640, 640), 640),  # for each thread
        ((100, 200, 400), 6400),
        ((640, 600, 560), 560),  # less isn't taken to go on
        ((3, 12, 48), 3 * 64**2),  # faster than the size, as its square
        ((100, 100, 400), 400 + 150 * 60),  # a step is no square
        ((1, 2, 1000), 1000 + 499 * 60),
    ],
)
def test_workspace_grows_as_it_did_last(taken: tuple[int, ...], at_64: int) -> None:
    assert Growth((1, 2, 4), 64).measured(taken) == at_64


@pytest.mark.parametrize(
    ("sizes", "most", "told_by"),
    [
        ({"N": 100}, 1.0, [{"N": 1}, {"N": 2}, {"N": 4}]),
        ({"N": 4}, 1.0, []),
        ({"height": 1080, "width": 1920}, 1.0, [{"height": 120, "width": 192}, {"height": 440, "width": 768},
                                                {"height": 760, "width": 1344}]),
        ({"height": 1080, "width": 1920}, 0.1, [{"height": 248, "width": 256}, {"height": 312, "width": 384},
                                                {"height": 376, "width": 512}]),
        ({"batch": 2, "seq": 256}, 0.0, [{"seq": 64}, {"seq": 128}, {"seq": 192}]),
        ({"batch": 200, "side": 100}, 1.0, []),
    ],
)  # fmt: skip
def test_smaller_sizes_lie_on_a_line_with_those_they_tell_of(
    sizes: dict[str, int], most: float, told_by: list[dict[str, int]]
) -> None:
    assert smaller(sizes, most) == told_by
