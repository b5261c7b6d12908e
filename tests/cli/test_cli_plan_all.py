"""`memonger plan-all` on the command line: a table, planned files, and what failed in the exit status."""

import json
from pathlib import Path

import onnx
import pytest

import memonger
from tests.support.command_line import invoke
from tests.support.open_models import block, layers

PORTABLE = ("--mode", "inference", "--device", "none", "--quiet")


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.chdir(tmp_path)
    onnx.save(block(), "block.onnx")
    onnx.save(layers(), "layers.onnx")
    return [Path("block.onnx"), Path("layers.onnx")]


def test_a_folder_and_a_table(models: list[Path]) -> None:
    done = invoke("plan-all", *models, "--batches", "2,4", *PORTABLE, "-o", "planned")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("│ block ") == done.stdout.count("│ layers ") == 2
    assert "Wrote planned: 4 planned files" in done.stdout
    assert [memonger.Plan.load(f"planned/block/batch{n}.planned.onnx").batch for n in (2, 4)] == [2, 4]


def test_what_fails_is_a_row_and_the_exit_status_is_1(models: list[Path]) -> None:
    flags = ("--budget", "100%", "--budget", "1KiB", "--strategy", "exact", *PORTABLE)
    done = invoke("plan-all", *models, "missing.onnx", *flags)
    assert done.exit_code == 1, done.output
    assert done.stdout.count("no plan │") == 4
    assert "No plan of missing, none, 100% (and 1 more): missing.onnx: no such file." in done.stdout
    record = json.loads(invoke("plan-all", *models, "missing.onnx", *flags, "--json").stdout)
    assert record["failed"] == 4
    assert [row["total_bytes"] is None for row in record["plans"]] == [False, True, False, True, True, True]
    assert "missing.onnx" in record["plans"][-1]["error"]
