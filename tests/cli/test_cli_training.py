"""The command line on models to train: plans with a loss and an optimizer, training models, wrong usage."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import memonger
from tests.support.bad_input import Place
from tests.support.command_line import invoke
from tests.support.training_models import batch, classifier


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(classifier(), tmp_path / "classifier.onnx")
    return tmp_path / "classifier.onnx"


def test_a_planned_training_model_trains(model: Path) -> None:
    out = model.with_name("planned.onnx")
    options = ("--loss", "softmax_cross_entropy", "--optimizer", "sgd", "--lr", "0.2", "--momentum", "0.9")
    done = invoke("plan", model, *options, "-o", out, "--json")
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["mode"] == "training"
    assert record["unplanned_values"] == []
    weights = sum(onnx.numpy_helper.to_array(tensor).nbytes for tensor in classifier().graph.initializer)
    assert record["parameter_bytes"] >= 2 * weights  # momentum is as large again
    trainer = memonger.TrainingSession(out)
    assert trainer.learning_rate == pytest.approx(0.2)
    losses = [trainer.step(batch(step)) for step in range(20)]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])


def test_precision_is_asked_for_by_name(model: Path) -> None:
    options = ("--loss", "softmax_cross_entropy", "--optimizer", "sgd", "--precision", "float16")
    out = model.with_name("planned.onnx")
    planned = invoke("plan", model, *options, "-o", out)
    assert planned.exit_code == 0
    assert "products are rounded to float16" in planned.output
    session = memonger.TrainingSession(out)
    assert session.loss_scale == 2.0**16
    assert np.isfinite(session.step(batch(0)))
    training = model.with_name("training.onnx")
    assert invoke("differentiate", model, *options, "-o", training).exit_code == 0
    assert memonger.load(training).training == memonger.Plan.load(out).training
    wrong = invoke("plan", model, "--precision", "float8")
    assert wrong.exit_code == 2
    assert "'float8' is not one of 'float16', 'bfloat16'" in wrong.output


def test_the_table_names_the_mode_and_what_to_do_next(model: Path) -> None:
    out = model.with_name("planned.onnx")
    done = invoke("plan", model, "--loss", "softmax_cross_entropy", "--optimizer", "adam", "--details", "-o", out)
    assert done.exit_code == 0, done.output
    assert "training, on cpu" in done.stdout
    assert "weights and training state" in done.stdout
    assert "memonger.TrainingSession" in done.stdout
    shown = invoke("inspect", out)
    assert shown.exit_code == 0
    assert "training" in shown.stdout
    assert invoke("verify", out).exit_code == 0


def test_differentiate_writes_a_model_that_can_be_planned(model: Path) -> None:
    out = model.with_name("training.onnx")
    done = invoke("differentiate", model, "--loss", "softmax_cross_entropy", "--frozen", "hidden.*", "-o", out)
    assert done.exit_code == 0, done.output
    written = onnx.load(out)
    onnx.checker.check_model(written, full_check=True)
    names = {output.name for output in written.graph.output}
    assert {"loss", "first.weight.grad", "first.bias.grad", "last.weight.grad"} <= names
    assert "hidden.weight.grad" not in names
    record = json.loads(invoke("plan", out, "--json").stdout)
    assert record["mode"] == "training"
    again = invoke("differentiate", out, "--loss", "loss", "-o", out.with_name("twice.onnx"))
    assert again.exit_code == 1
    assert "differentiated before" in again.output
    assert not out.with_name("twice.onnx").exists()


def test_adapters_alone_are_trained_where_asked_for(model: Path) -> None:
    out = model.with_name("planned.onnx")
    options = ("--loss", "softmax_cross_entropy", "--optimizer", "adam", "--lora", "2:*.weight", "-o", out)
    assert invoke("plan", model, *options).exit_code == 0
    trainer = memonger.TrainingSession(out)
    assert all(".lora_" in name for name in trainer.state_dict())
    trainer.step(batch())
    trainer.export(out, model)
    assert [tensor.name for tensor in onnx.load(out).graph.initializer] == [*memonger.load(model).graph.initializers]
    done = invoke("differentiate", model, "--lora", "two", "-o", out)
    assert done.exit_code == 2
    assert "'two' is not RANK or RANK:PATTERN" in " ".join(done.output.split())


def test_means_of_8_bits_are_for_adam(model: Path) -> None:
    out, options = model.with_name("step.onnx"), ("--loss", "softmax_cross_entropy", "--optimizer-bits", "8")
    assert invoke("differentiate", model, *options, "--optimizer", "adamw", "-o", out).exit_code == 0
    done = invoke("differentiate", model, *options, "--optimizer", "sgd", "-o", out.with_name("other.onnx"))
    assert done.exit_code == 2
    assert "--optimizer-bits is for --optimizer adam or adamw" in " ".join(done.output.split())


def test_recomputation_is_reported(model: Path) -> None:
    kept, again = (
        json.loads(invoke("plan", model, "--loss", "softmax_cross_entropy", "--json", *options).stdout)
        for options in (("--strategy", "none"), ("--strategy", "cheap"))
    )
    assert (kept["recomputed_nodes"], kept["overhead"]) == (0, 0.0)
    assert again["recomputed_nodes"] > 0
    assert again["overhead"] > 0


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (("--loss", "hinge"), 1, ("no loss 'hinge'", "softmax_cross_entropy")),
        (("--optimizer", "adam"), 1, ("an optimizer needs a loss",)),
        (("--loss", "softmax_cross_entropy", "--lr", "0.1"), 2, ("--lr is for an --optimizer",)),
        (("--loss", "softmax_cross_entropy", "--optimizer", "adam", "--momentum", "0.9"), 2, ("--momentum is for",)),
        (("--loss", "softmax_cross_entropy", "--mode", "inference"), 2, ("for training",)),
        (("--loss", "softmax_cross_entropy", "--optimizer", "rprop"), 2, ("'rprop'",)),
        (("--loss", "softmax_cross_entropy", "--optimizer", "sgd", "--lr", "-1"), 2, ("-1",)),
        (("--mode", "training"), 0, ()),
    ],
)
def test_wrong_usage_says_what_would_work(
    place: Place, options: tuple[str, ...], status: int, words: tuple[str, ...]
) -> None:
    path = place.write("classifier.onnx", classifier())
    if status:
        place.fails("plan", path, *options, "-o", place.folder / "out.onnx", words=words, status=status)
    else:
        assert invoke("plan", path, *options).exit_code == 0


def test_integer_parameters_cannot_be_trained(place: Place) -> None:
    path = place.write("classifier.onnx", classifier())
    place.fails(
        "differentiate", path, "--wrt", "labels", "--loss", "softmax_cross_entropy", "-o", place.folder / "out.onnx",
        words=("wrt names 'labels'",),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "number"), [((), 1), (("1000B",), 3), (("1KB,10MB",), 2), (("1000B,1000B,last",), 3), (("last",), 1)]
)
def test_a_plan_for_several_ranks_has_gradients_in_buckets(model: Path, sizes: tuple[str, ...], number: int) -> None:
    out, options = model.with_name("ranks.onnx"), ("--loss", "softmax_cross_entropy", "--optimizer", "sgd", "--quiet")
    done = invoke("plan", model, *options, "-o", out, "--buckets", *sizes)
    assert done.exit_code == 0, done.output
    assert "memonger.DistributedTrainingSession" in done.stdout
    assert len(memonger.Plan.load(out).graph.collectives) == number


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--buckets", "model.onnx"), "write MODEL before it"),
        (("model.onnx", "--buckets", "1MiB,2MiB,3MiB"), "has more than two sizes"),
        (("model.onnx", "--buckets"), "leave --mode out and give a --loss"),
    ],
)
def test_buckets_that_cannot_be_are_refused(model: Path, arguments: tuple[str, ...], words: str) -> None:
    done = invoke("plan", *(str(model) if one == "model.onnx" else one for one in arguments))
    assert done.exit_code != 0
    assert words in " ".join(done.output.split()) + str(done.exception)
