"""Without onnxruntime planning works, and whoever wants more is told what to install."""

import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from onnx import helper

from tests.support import networks

BLOCKED = "import sys; sys.modules['onnxruntime'] = None; from memonger.cli.commands import main, plan; "


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    nodes = [helper.make_node("Relu", ["x"], ["a"], name="relu"), helper.make_node("Exp", ["a"], ["y"], name="exp")]
    onnx.save(networks.model_of(nodes, {"x": ["n", 4]}, {"y": ["n", 4]}), path)
    return path


def _run(code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", BLOCKED + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_planning_works_and_is_portable_by_default(model: Path) -> None:
    done = _run(
        "plan()",
        str(model),
        "--mode",
        "inference",
        "--batch",
        "2",
        "--json",
        "-o",
        str(model.with_name("planned.onnx")),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["device"] == "none"
    done = _run("main()", "verify", str(model.with_name("planned.onnx")))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments", [["plan", "--mode", "inference", "--batch", "2", "--device", "cpu"], ["run", "--batch", "2"]]
)
def test_what_needs_a_runtime_names_the_extra(model: Path, arguments: list[str]) -> None:
    command, *options = arguments
    done = _run("main()", command, str(model), *options)
    assert done.returncode == 1
    assert "memonger[cpu]" in done.stderr
    assert "memonger[gpu]" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_device_that_is_not_there_is_said() -> None:
    from memonger.devices import parse_device
    from memonger.errors import PlanError, RuntimeUnavailableError
    from memonger.runtime import ort

    with pytest.raises(RuntimeUnavailableError, match=r"cuda:0 needs.*CUDAExecutionProvider.*memonger\[gpu\]"):
        ort.check_device(parse_device("cuda"))
    with pytest.raises(PlanError, match="'tpu' is not a device"):
        parse_device("tpu")
