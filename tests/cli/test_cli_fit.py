"""`memonger fit` and the certificates that `memonger verify` checks, on the command line."""

import json
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner, Result

import memonger
from memonger.cli import commands
from tests.support.open_models import block, layers

PORTABLE = ("--mode", "inference", "--device", "none", "--quiet")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(block(), tmp_path / "block.onnx")
    return tmp_path / "block.onnx"


def _invoke(*arguments: object) -> Result:
    return CliRunner().invoke(commands.main, [str(argument) for argument in arguments])


def test_an_answer_its_plan_and_its_certificate(model: Path) -> None:
    planned, written = model.with_name("planned.onnx"), model.with_name("fit.json")
    flags = ("--memory", "64KiB", *PORTABLE, "--strategy", "none")
    done = _invoke("fit", model, *flags, "-o", planned, "--certificate", written)
    assert done.exit_code == 0, done.output
    assert "fits 64.0 KiB (inference, portable, workspace not counted)" in done.stdout
    assert "doesn't, proven: every plan that recomputes nothing takes at least" in done.stdout
    assert f"memonger verify {written}" in done.stdout
    plan = memonger.Plan.load(planned)
    assert plan.total_bytes <= 64 * 1024
    checked = _invoke("verify", written)
    assert checked.exit_code == 0, checked.output
    assert f"batch {plan.batch} fits" in checked.stdout
    assert json.loads(_invoke("verify", written, "--json").stdout)["beyond"]["status"] == "proven"
    planned.write_bytes(planned.read_bytes()[:-1])
    refused = _invoke("verify", written)
    assert refused.exit_code == 1
    assert "its digest differs" in refused.stderr


def test_json_has_every_figure(model: Path) -> None:
    done = _invoke("fit", model, "--memory", "64KiB", *PORTABLE, "--strategy", "none", "--frontier", "2", "--json")
    record = json.loads(done.stdout)
    assert record["fits"]
    assert record["size"] == record["plan"]["batch"] == record["frontier"][-1]["size"]
    assert record["total_bytes"] == record["plan"]["total_bytes"] <= record["memory"] == 64 * 1024
    assert record["beyond"]["size"] == record["size"] + 1
    assert record["frontier"][0]["samples_per_second"] is None


def test_status_1_where_nothing_fits(model: Path) -> None:
    done = _invoke("fit", model, "--memory", "2KiB", *PORTABLE)
    assert done.exit_code == 1
    assert "doesn't fit 2.00 KiB" in done.stdout
    assert "batch 1 doesn't, proven" in done.stdout


def test_training_flags(tmp_path: Path) -> None:
    onnx.save(layers(), tmp_path / "layers.onnx")
    flags = ("--loss", "softmax_cross_entropy", "--optimizer", "sgd", "--train-mode", "--device", "none", "--quiet")
    done = _invoke("fit", tmp_path / "layers.onnx", "--memory", "64KiB", *flags, "--strategy", "none", "--json")
    record = json.loads(done.stdout)
    assert (record["plan"]["mode"], record["strategy"]) == ("training", "none")


def test_the_largest_batch_with_adapters_alone(tmp_path: Path) -> None:
    model, written = tmp_path / "layers.onnx", tmp_path / "fit.json"
    onnx.save(layers(1), model)
    flags = ("--loss", "softmax_cross_entropy", "--optimizer", "adam", "--device", "none", "--strategy", "none")
    flags = (*flags, "--lora", "1:last", "--quiet", "--json")
    done = _invoke("fit", model, "--memory", "8KiB", *flags, "-o", tmp_path / "planned.onnx", "--certificate", written)
    assert done.exit_code == 0, done.output
    size = json.loads(done.stdout)["size"]
    totals = [json.loads(_invoke("plan", model, "--batch", n, *flags).stdout)["total_bytes"] for n in (size, size + 1)]
    assert totals[0] <= 8 * 1024 < totals[1]
    checked = _invoke("verify", written)
    assert checked.exit_code == 0, checked.output
    training = memonger.Plan.load(tmp_path / "planned.onnx").training
    assert training is not None
    assert all(".lora_" in name for name in training.parameters)


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (("--memory", "8"), 2, "is no size"),
        (("--vary", "bach"), 1, "Did you mean 'batch'"),
        (("--batch", "4"), 1, "leave --batch out"),
        (("--certificate", "fit.json"), 2, "say with -o"),
    ],
)
def test_wrong_usage(model: Path, flags: tuple[str, ...], status: int, message: str) -> None:
    done = _invoke("fit", model, *flags, *PORTABLE)
    assert done.exit_code == status
    assert message in done.stderr
