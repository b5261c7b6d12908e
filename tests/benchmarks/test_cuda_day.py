"""The rehearsal of benchmarks.gpu_day on the stand-in for CUDA: every stage with tiny networks, and bad machines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cuda import ON_STAND_IN

pytestmark = pytest.mark.skipif(not ON_STAND_IN, reason="a rehearsal for the stand-in")


def _day(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu_day", *arguments]
    environment = {**os.environ, "FAKE_CUDA_DEVICES": "1", **variables}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=400)


def test_every_stage_runs_to_its_end(tmp_path: Path) -> None:
    from benchmarks.gpu_day import record, stages

    result = _day("--rehearse", "--out", str(tmp_path))
    assert result.returncode == 0, result.stderr
    rows = record.load(tmp_path / "rows.jsonl")
    for stage in stages.STAGES:
        assert [row["item"] for row in record.of(rows, stage.key)] == list(stage.tiny), record.failed(rows, stage.key)
    for row in rows:
        nested = row.get("contestants") or {one["contestant"]: one for one in row.get("row", {}).get("results", ())}
        failed = {key: one["failed"] for key, one in nested.items() if one.get("failed")}
        failed.pop("stock, Loop", None)  # its slices begin where a kernel that isn't run says
        assert not failed, row["item"]
    assert all(
        abs(row["predicted"] / row["contestants"]["planned"]["taken"] - 1) < 0.05
        for row in record.of(rows, "inference")
    )
    assert not record.of(rows, "sessions")[0]["failures"]
    assert "A STAND-IN" in (tmp_path / "table.txt").read_text()
    assert "Nothing was measured on a GPU yet" in result.stdout
    again = _day("--rehearse", "--out", str(tmp_path))
    assert again.returncode == 0
    assert not [line for line in again.stderr.splitlines() if line.startswith("inference ") and " rows of " not in line]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"FAKE_CUDA_DEVICES": "0"}, "CUDA_ERROR_NO_DEVICE"),
        (
            {"FAKE_CUDA_MEMORY": str(2 << 30)},
            "2.00 GiB free of 2.00 GiB, and the largest rows asked for take 16.0 GiB: end",
        ),
        ({"FAKE_CUDA_DRIVER": "12080"}, "the NVIDIA driver here serves CUDA up to 12.8"),
    ],
)
def test_a_machine_that_will_not_do_is_a_sentence(variables: dict[str, str], words: str, tmp_path: Path) -> None:
    result = _day("--out", str(tmp_path), "--stages", "inference", "--no-torch", "--minutes", "0.1", **variables)
    assert result.returncode == 1
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "rows.jsonl").exists()


def test_kernels_built_for_another_gpu_are_found_by_what_they_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu_day import about

    monkeypatch.setattr(about, "ON_STAND_IN", False)  # whose kernels compute nothing, as those of another GPU
    (sentence,) = about._without_kernels("cuda:0")
    assert "runs no kernel on Fake CUDA device (9.0): its kernels were built, or kept in a bundle (--arch)" in sentence
