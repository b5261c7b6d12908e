"""The tutorial runs as it stands, and prints what it shows."""

import re
from pathlib import Path

import pytest

from tests.support import notebook, transcript

pytest.importorskip("torch")
pytest.importorskip("onnxscript")


def test_the_tutorial_prints_what_it_shows(tmp_path: Path) -> None:
    shown = notebook.read(transcript.ROOT / transcript.TUTORIAL)
    made = notebook.run(shown, tmp_path)
    for cell, again in zip(notebook.code_cells(shown), notebook.code_cells(made), strict=True):
        page, printed = notebook.text(cell["outputs"]), notebook.text(again["outputs"])
        assert transcript.form(page) == transcript.form(printed), "".join(cell["source"])
    said = "".join(notebook.text(cell["outputs"]) for cell in notebook.code_cells(made))
    assert 0 < _number(r"total ([\d,]+) bytes", said) < _number(r"recomputed: ([\d,]+) bytes", said)
    assert _number(r"quarters: ([\d,]+) bytes", said) <= 0.75 * _number(r"recomputed: ([\d,]+) bytes", said)
    assert _number(r", (\d+) nodes run again", said) > 0
    assert said.count("True") == 2, "the same bits, and the same losses"
    assert _number(r"accuracy on new images: (\d+)%", said) > 90
    assert said.rstrip().endswith("class 2")


def _number(pattern: str, said: str) -> int:
    found = re.search(pattern, said)
    assert found, said
    return int(found[1].replace(",", ""))
