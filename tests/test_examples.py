"""The examples run as they stand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SHORTER = {
    "densenet": ["--depth", "10", "--growth-rate", "8", "--epochs", "1"],
    "digits": ["--epochs", "5", "--output", "made"],
    "distributed": ["--epochs", "1", "--batch", "128"],
}
"""Arguments that leave out none of what an example does."""
ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

RUN = """
import contextlib, gc, io, json, os, runpy, sys
from tests.torch import conftest
conftest.shorten(setattr)  # searches: how good a schedule is isn't looked at
path = list(sys.path)
for example, folder, arguments in json.loads(sys.argv[1]):
    os.chdir(folder)
    sys.argv, sys.path = [example, *arguments], [os.path.dirname(example), *path[1:]]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(example, run_name="__main__")
    sys.stdout.write(json.dumps(printed.getvalue()) + "\\n")
    gc.collect()
    gc.freeze()  # what it imported stays: sessions of the next collect garbage as they are made
"""
"""One process runs all, one after the other: most of the time of each is what it imports."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """By the name of an example the folder it ran in, and what it printed."""
    folders = {path.stem: tmp_path_factory.mktemp(path.stem) for path in EXAMPLES}
    asked = [(str(path), str(folders[path.stem]), SHORTER.get(path.stem, [])) for path in EXAMPLES]
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(asked)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    printed = map(json.loads, done.stdout.splitlines())
    return {name: (folder, text) for (name, folder), text in zip(folders.items(), printed, strict=True)}


@pytest.mark.parametrize("name", [path.stem for path in EXAMPLES if path.stem != "digits"])
def test_an_example_runs(name: str, runs: dict[str, tuple[Path, str]]) -> None:
    folder, printed = runs[name]
    assert printed
    assert not list(folder.iterdir()), "an example leaves nothing behind unasked"


def test_digits_are_learned_saved_and_served(runs: dict[str, tuple[Path, str]]) -> None:
    folder, printed = runs["digits"]
    accuracy = float(printed.partition("test accuracy ")[2].partition("%")[0])
    assert accuracy > 97
    assert sorted(file.name for file in (folder / "made").iterdir()) == ["digits.onnx", "loss.png", "training.onnx"]
    assert (folder / "made" / "loss.png").read_bytes()[:4] == b"\x89PNG"
