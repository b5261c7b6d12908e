"""The examples run as they stand."""

import contextlib
import gc
import io
import os
import runpy
import sys
import warnings
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


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """By the name of an example the folder it ran in, and what it printed.

    They run in this process, one after the other: most of the time of each is what it imports.
    """
    pytest.importorskip("torch.nn")  # tests/torch may be found as a package of that name
    from tests.torch import conftest

    done, modules = dict[str, tuple[Path, str]](), set(sys.modules)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        conftest.shorten(patch.setattr)  # searches: how good a schedule is isn't looked at
        patch.setenv("MPLBACKEND", "agg")
        path = list(sys.path)
        for example in EXAMPLES:
            folder = tmp_path_factory.mktemp(example.stem)
            patch.chdir(folder)
            patch.setattr(sys, "argv", [str(example), *SHORTER.get(example.stem, [])])
            patch.setattr(sys, "path", [str(example.parent), *path])
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                runpy.run_path(str(example), run_name="__main__")
            done[example.stem] = folder, printed.getvalue()
            gc.collect()
            gc.freeze()  # what it imported stays: sessions of the next collect garbage as they are made
    for name in {*sys.modules} - modules:
        if Path(getattr(sys.modules[name], "__file__", None) or os.devnull).parent == ROOT / "examples":
            del sys.modules[name]  # whose folder isn't on the path any more
    return done


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
