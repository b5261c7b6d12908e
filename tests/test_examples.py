"""The examples run as they stand."""

import subprocess
import sys
from pathlib import Path

import pytest

SHORTER = {
    "densenet": ["--depth", "10", "--growth-rate", "8", "--epochs", "1"],
    "digits": ["--epochs", "5"],
    "distributed": ["--epochs", "1", "--batch", "128"],
}
"""Arguments that leave out none of what an example does."""
EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.stem != "digits"], ids=lambda path: path.stem)
def test_an_example_runs(path: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(path), *SHORTER.get(path.stem, ())]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert not list(tmp_path.iterdir()), "an example leaves nothing behind unasked"


def test_digits_are_learned_saved_and_served(tmp_path: Path) -> None:
    path = next(path for path in EXAMPLES if path.stem == "digits")
    command = [sys.executable, str(path), *SHORTER["digits"], "--output", "made"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    accuracy = float(done.stdout.partition("test accuracy ")[2].partition("%")[0])
    assert accuracy > 97
    assert sorted(file.name for file in (tmp_path / "made").iterdir()) == ["digits.onnx", "loss.png", "training.onnx"]
    assert (tmp_path / "made" / "loss.png").read_bytes()[:4] == b"\x89PNG"
