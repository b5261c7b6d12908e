"""What stands below a command in the pages is what the command prints."""

import pytest

from tests.support import transcript
from tests.support.transcript import Command

RENEW = "python -m tests.support.transcript --write PAGE writes it anew, if that is what shall be printed."


def test_pages_show_what_their_commands_print() -> None:
    printed = dict[str, dict[str, str]]()
    for page in transcript.PAGES:
        kinds = None if page.like is None else printed[page.like]
        differences, printed[page.path] = transcript.differences(page, kinds)
        assert printed[page.path], f"{page.path} has no session"
        assert not differences, "\n\n".join([page.path, *differences, RENEW])


def _command(output: str, varies: bool = True) -> Command:
    return Command("memonger plan a.onnx", output, varies, "")


@pytest.mark.parametrize(
    ("page", "printed"),
    [
        ("│ arena │ 6.89 MiB │\n│ peak │ 0 B │\n", "│ arena   │  12 KiB │\n│ peak    │ 1.5 GiB │\n"),
        ("┏━━━┳━━┓\n│ 10.4 MiB │ +0.0% │\n│ 4.6 MiB │ +30% │\n", "┏━┳━┓\n│ 3.4 MiB │ -1.5e-07% │\n"),
        ("Wrote a.planned.onnx. It takes\n22.01 ms now.\n", "Wrote b/c.onnx. It takes 1 s\nnow.\n"),
    ],
)
def test_where_numbers_vary_the_form_counts(page: str, printed: str) -> None:
    assert not transcript.difference(_command(page), printed, same_machine=True)


@pytest.mark.parametrize(
    ("page", "printed"),
    [
        ("│ arena │ 6.89 MiB │\n", "│ arena │ 6.89 MiB │ more │\n"),
        ("│ arena │ 1 B │\n│ peak │ 0 B │\n", "│ arena │ 1 B │\n"),
        ("outputs: identical\n", "outputs: 1e-7\n"),
    ],
)
def test_another_form_is_a_difference(page: str, printed: str) -> None:
    assert "+" + printed.splitlines()[0] in transcript.difference(_command(page), printed, True) or "-│ peak" in (
        transcript.difference(_command(page), printed, True)
    )


def test_other_numbers_are_a_difference_and_other_times_are_none() -> None:
    page, other = _command("22 values in 0.44 s.\n", varies=False), "23 values in 0.44 s.\n"
    assert not transcript.difference(page, "22 values in 1.7 s.\n", same_machine=True)
    assert transcript.difference(page, other, same_machine=True)
    assert not transcript.difference(page, other, same_machine=False)
