"""`memonger fit` on the command line."""

import json
from pathlib import Path

import onnx
import pytest

import memonger
from tests.support.command_line import invoke
from tests.support.open_models import block, layers

PORTABLE = ("--mode", "inference", "--device", "none", "--quiet")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(block(), tmp_path / "block.onnx")
    return tmp_path / "block.onnx"


def test_an_answer_and_its_plan(model: Path) -> None:
    planned = model.with_name("planned.onnx")
    flags = ("--memory", "64KiB", *PORTABLE, "--chunks", "off", "--strategy", "none", "--no-inplace")
    done = invoke("fit", model, *flags, "-o", planned)
    assert done.exit_code == 0, done.output
    assert "fits 64.0 KiB (inference, portable, workspace not counted)" in done.stdout
    assert "doesn't, proven: every plan with --chunks off, --strategy none, --no-inplace, in any order" in done.stdout
    plan = memonger.Plan.load(planned)
    assert plan.total_bytes <= 64 * 1024
    checked = invoke("verify", planned)
    assert checked.exit_code == 0, checked.output
    assert json.loads(invoke("verify", planned, "--json").stdout)["arena_bytes"] == plan.arena_bytes


def test_json_has_every_figure(model: Path) -> None:
    done = invoke("fit", model, "--memory", "64KiB", *PORTABLE, "--strategy", "none", "--frontier", "2", "--json")
    record = json.loads(done.stdout)
    assert record["fits"]
    assert record["size"] == record["plan"]["batch"] == record["frontier"][-1]["size"]
    assert record["total_bytes"] == record["plan"]["total_bytes"] <= record["memory"] == 64 * 1024
    assert record["beyond"]["size"] == record["size"] + 1
    assert record["bound_holds_for"] == ["--strategy none"]
    assert record["frontier"][0]["samples_per_second"] is None


def test_status_1_where_nothing_fits(model: Path) -> None:
    done = invoke("fit", model, "--memory", "2KiB", *PORTABLE, "--chunks", "off")
    assert done.exit_code == 1
    assert "doesn't fit 2.00 KiB" in done.stdout
    assert "batch 1 doesn't, proven" in done.stdout


def test_training_flags(tmp_path: Path) -> None:
    onnx.save(layers(), tmp_path / "layers.onnx")
    flags = ("--loss", "softmax_cross_entropy", "--optimizer", "sgd", "--train-mode", "--device", "none", "--quiet")
    done = invoke("fit", tmp_path / "layers.onnx", "--memory", "64KiB", *flags, "--strategy", "none", "--json")
    record = json.loads(done.stdout)
    assert (record["plan"]["mode"], record["strategy"]) == ("training", "none")


def test_the_largest_batch_with_adapters_alone(tmp_path: Path) -> None:
    model = tmp_path / "layers.onnx"
    onnx.save(layers(1), model)
    flags = ("--loss", "softmax_cross_entropy", "--optimizer", "adam", "--device", "none", "--strategy", "none")
    flags = (*flags, "--lora", "1:last", "--quiet", "--json")
    done = invoke("fit", model, "--memory", "8KiB", *flags, "-o", tmp_path / "planned.onnx")
    assert done.exit_code == 0, done.output
    size = json.loads(done.stdout)["size"]
    totals = [json.loads(invoke("plan", model, "--batch", n, *flags).stdout)["total_bytes"] for n in (size, size + 1)]
    assert totals[0] <= 8 * 1024 < totals[1]
    training = memonger.Plan.load(tmp_path / "planned.onnx").training
    assert training is not None
    assert all(".lora_" in name for name in training.parameters)


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (("--memory", "8.5"), 2, "is no size"),
        (("--vary", "bach"), 1, "Did you mean 'batch'"),
        (("--batch", "4"), 1, "leave --batch out"),
        (("--certificate", "fit.json"), 2, "No such option"),
    ],
)
def test_wrong_usage(model: Path, flags: tuple[str, ...], status: int, message: str) -> None:
    done = invoke("fit", model, *flags, *PORTABLE)
    assert done.exit_code == status
    assert message in done.stderr
