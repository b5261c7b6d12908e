"""What stands below a command in the pages is what the command prints."""

import importlib
from pathlib import Path

import pytest

from memonger.loops import search
from tests.support import transcript
from tests.support.transcript import Command, Page

RENEW = "python -m tests.support.transcript --write PAGE writes it anew, if that is what shall be printed."


def test_pages_show_what_their_commands_print() -> None:
    printed = dict[str, dict[str, str]]()
    for page in [page for page in transcript.PAGES if not page.programs]:
        kinds = None if page.like is None else printed[page.like]
        differences, printed[page.path] = transcript.differences(page, kinds)
        assert printed[page.path], f"{page.path} has no session"
        assert not differences, "\n\n".join([page.path, *differences, RENEW])


@pytest.mark.parametrize("page", [page for page in transcript.PAGES if page.programs], ids=lambda page: page.path)
def test_what_a_page_has_one_do_works_and_prints_what_it_says(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    if "import torch" in (transcript.ROOT / page.path).read_text("utf-8"):
        pytest.importorskip("torch.nn")  # tests/torch may be found as a package of that name
        importlib.import_module("tests.torch.conftest").shorten(monkeypatch.setattr)
    monkeypatch.setattr(search, "TURN_SECONDS", 0.0)  # times that are measured aren't compared
    differences, printed = transcript.differences(page)
    assert printed, f"{page.path} has no session"
    assert not differences, "\n\n".join([page.path, *differences, RENEW])


def _command(output: str, varies: bool = True) -> Command:
    return Command("memonger plan a.onnx", output, varies, "")


@pytest.mark.parametrize(
    ("page", "printed"),
    [
        ("│ arena │ 6.89 MiB │\n│ peak │ 0 B │\n", "│ arena   │  12 KiB │\n│ peak    │ 1.5 GiB │\n"),
        ("┏━━━┳━━┓\n│ 10.4 MiB │ +0.0% │\n│ 4.6 MiB │ +30% │\n", "┏━┳━┓\n│ 3.4 MiB │ -1.5e-07% │\n"),
        (
            "It holds.\nmemonger: note: The machine is noisy: load 6. Trust\nit not; --runs 2 says\nmore.\nPASSED\n",
            "It holds.\nPASSED\n",
        ),
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


def test_a_page_is_written_anew(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    untouched = "# Page\n\n```console\n$ echo never run > made\n```\n\n<!-- numbers vary -->\n"
    page.write_text(
        f"{untouched}```console\n$ printf 'id,lower,upper,size\\n0,0,3,4096\\n' > a.csv\n$ memonger pack a.csv\n...\n"
        "$ ls\nold\n```\n\nText.\n\n<!-- printed with nothing yet -->\n"
    )
    assert transcript.written(Page(str(page))) == (
        f"{untouched}```console\n$ printf 'id,lower,upper,size\\n0,0,3,4096\\n' > a.csv\n$ memonger pack a.csv\n"
        "1 buffers in 4096 bytes (lower bound 4096).\n$ ls\na.csv\n```\n\nText.\n\n"
        f"{transcript.machine()}\n"
    )


def test_a_page_like_another_has_no_command_that_the_other_lacks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```console\n$ memonger-plan a/b.onnx --batch 4 -o c.onnx\nWrote c.onnx in 2 s.\n```\n")
    like = Page(str(page), like="other.md")
    found, printed = transcript.differences(like, {"memonger plan MODEL -o MODEL": "Wrote x.onnx in 7 s.\n"})
    assert not found
    assert list(printed) == ["memonger plan MODEL -o MODEL"]
    with pytest.raises(AssertionError, match=r"page\.md: no command like 'memonger-plan a/b\.onnx"):
        transcript.differences(like, {"memonger plan MODEL": "Wrote x.onnx in 7 s.\n"})
