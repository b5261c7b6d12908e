"""Sizes as people write and read them."""

import pytest

from memonger import GiB, KiB, MiB
from memonger.units import format_size, in_full, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 * GiB),
        ("4 gib", 4 * GiB),
        (" 1.5 GB ", 1_500_000_000),
        (".5KiB", 512),
        ("2.MiB", 2 * MiB),
        ("0B", 0),
        ("65537b", 65537),
        ("84768208", 84768208),
        (" 4 ", 4),
        ("1TiB", 1024 * GiB),
        ("3TB", 3 * 10**12),
        ("9007199254740993B", 9007199254740993),  # one that float64 can't hold
        ("0.3MB", 300_000),  # 299,999 where it is rounded down from float64
    ],
)
def test_a_size_is_a_number_of_bytes_or_a_number_and_a_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "4.5", "GiB", "4 XiB", "4GiB2", "1e3MiB", "four GiB", "nan B", "infGiB", "1,5GiB", "9" * 500 + "GiB"]
)
def test_a_text_that_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="as in 4GiB") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["-1B", "-4 GiB", "-.5KiB"])
def test_a_negative_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="negative"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KiB, "1.00 KiB"),
        (15 * MiB, "15.0 MiB"),
        (500 * MiB, "500 MiB"),
        (-KiB, "-1.00 KiB"),
    ],
)
def test_a_size_is_shown_with_three_digits(size: int, text: str) -> None:
    assert format_size(size) == text


def test_a_size_in_full_is_exact() -> None:
    assert in_full(436743697) == "417 MiB (436743697 bytes)"
    assert in_full(1000) == "1000 bytes"
