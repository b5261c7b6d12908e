"""`memonger run` on plans of training: losses, gradients, steps beside those of stock onnxruntime."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import memonger
from memonger.cli import gradients, train
from memonger.cli.compare import stock_model
from memonger.cli.measure_steps import StepsJob, StockTrainer
from memonger.graph.schedule import drop_copies
from memonger.ir.save import save_model
from memonger.model.load import load_as_is
from memonger.runtime import process_memory
from tests.support import training_models
from tests.support.command_line import invoke
from tests.support.planning_models import chain
from tests.support.stock import normal, parse
from tests.support.training_models import batch, classifier

LOSS = "softmax_cross_entropy"


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    """A planned file of `classifier` with momentum."""
    training_models.plan().save(tmp_path / "planned.onnx")
    return tmp_path / "planned.onnx"


def test_a_training_plan_is_trained_and_compared_with_stock_onnxruntime(planned: Path) -> None:
    np.savez(planned.with_name("batch.npz"), **batch())
    flags = ("--compare", "--steps", "5", "--inputs", str(planned.with_name("batch.npz")), "--json")
    done = invoke("run", planned, *flags)
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["passed"] is record["bitwise_equal"] is True
    trainer = memonger.TrainingSession(planned)
    assert record["losses"] == record["stock_losses"] == [trainer.step(batch()) for _ in range(5)]
    assert record["losses"][-1] < record["losses"][0]
    assert record["total_bytes"] == memonger.Plan.load(planned).total_bytes
    assert record["latency_ratio"] > 0
    assert record["gradients"] is None


@pytest.mark.skipif(not process_memory.is_measurable(), reason="this system doesn't say what a process takes")
def test_state_is_no_part_of_what_steps_take(tmp_path: Path) -> None:
    """Of state that is zero the system gives no pages until the first step writes it: that isn't arena or workspace."""
    model = parse("g (float[1, 1024] x) => (float[1, 1024] y) { y = MatMul (x, w) }")
    model.graph.initializer.append(onnx.numpy_helper.from_array(normal(0, 1024, 1024), "w"))
    options = {"loss": "mean_squared_error", "optimizer": memonger.Adam(lr=0.01), "device": "cpu"}
    plan = memonger.search_plan(model, **options)
    plan.save(tmp_path / "planned.onnx")
    done = invoke("run", tmp_path / "planned.onnx", "--steps", "3", "--json")
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["peak_bytes"] <= plan.arena_bytes + plan.workspace_bytes + 4 * memonger.MiB  # state takes 8


@pytest.mark.parametrize("optimizer", [memonger.SGD(lr=0.2, momentum=0.9), memonger.Adam(lr=0.01)], ids=["sgd", "adam"])
def test_stock_onnxruntime_is_driven_as_a_training_session_is(tmp_path: Path, optimizer: object) -> None:
    plan = training_models.plan(optimizer)
    plan.save(tmp_path / "planned.onnx")
    stock = StockTrainer(StepsJob(str(tmp_path / "planned.onnx"), "", "", False, level="ORT_DISABLE_ALL"))
    trainer = memonger.TrainingSession(plan)
    for step in range(3):
        assert stock.step(batch(step)) == trainer.step(batch(step))
    ours, theirs = trainer.state_dict(), stock.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert all(np.array_equal(array, stock.outputs()[name]) for name, array in trainer.outputs().items())


def test_stock_onnxruntime_runs_every_node_of_a_planned_file_once(tmp_path: Path) -> None:
    training = memonger.differentiate(chain(), loss=LOSS)
    plan = memonger.search_plan(training, strategy="cheap", device="none")
    assert plan.recomputed
    plan.save(tmp_path / "planned.onnx")
    model = load_as_is(tmp_path / "planned.onnx").ir
    drop_copies(model)
    assert model.graph.num_nodes() == len(plan.graph.nodes) - len(plan.recomputed)
    path = stock_model(tmp_path / "planned.onnx", tmp_path / "planned.onnx", plan, tmp_path)
    assert load_as_is(path).ir.graph.num_nodes() == model.graph.num_nodes()
    feeds = {"x": np.ones((64, 16), np.float32), "labels": np.zeros(64, np.int64)}
    stock = StockTrainer(StepsJob(str(path), "", "", False, level="ORT_DISABLE_ALL"))
    trainer = memonger.TrainingSession(plan)
    assert stock.step(feeds) == trainer.step(feeds)


def test_stock_onnxruntime_runs_what_was_differentiated_to_be_planned(tmp_path: Path) -> None:
    forward, planned = tmp_path / "forward.onnx", tmp_path / "planned.onnx"
    onnx.save(classifier(), forward)
    plan = memonger.search_plan(classifier(), mode="training", device="none")
    plan.save(planned)
    assert stock_model(forward, planned, plan, tmp_path) != forward
    inference = memonger.search_plan(classifier(), mode="inference", device="none")
    assert stock_model(forward, planned, inference, tmp_path) == forward


def test_gradients_are_summed_up_in_a_sentence(tmp_path: Path) -> None:
    plan = memonger.search_plan(memonger.differentiate(classifier(), loss=LOSS), device="none")
    trainer = memonger.TrainingSession(plan)
    trainer.step(batch())
    assert plan.training is not None
    outputs = trainer.outputs()
    found = gradients.summary(plan.training, outputs)
    assert found is not None
    arrays = {name: outputs[f"{name}.grad"].astype(np.float64) for name in plan.training.parameters}
    flat = np.concatenate([array.ravel() for array in arrays.values()])
    assert (found["count"], found["numbers"], found["not_finite"]) == (4, flat.size, [])
    assert found["norm"] == pytest.approx(np.linalg.norm(flat))
    assert found["largest"] == np.abs(flat).max() == np.abs(arrays[found["largest_of"]]).max()
    (line,) = gradients.lines(found, plan.training)
    assert "4 tensors" in line
    assert "no optimizer" in line
    outputs["last.weight.grad"] = np.full_like(outputs["last.weight.grad"], np.nan)
    (line,) = gradients.lines(gradients.summary(plan.training, outputs), plan.training)
    assert "Not finite: last.weight" in line


def test_inputs_of_a_training_model_without_a_plan_are_those_of_a_step(tmp_path: Path) -> None:
    adam = memonger.differentiate(classifier(), loss=LOSS, optimizer=memonger.Adam(lr=0.01))
    save_model(adam.ir, tmp_path / "training.onnx")
    np.savez(tmp_path / "batch.npz", **{**batch(), "labels": np.full(training_models.BATCH, 9)})
    done = invoke("run", tmp_path / "training.onnx", "--inputs", tmp_path / "batch.npz", "--quiet")
    assert done.exit_code == 1
    assert "input 'labels' has 9 at [0]: its numbers are those of the 5 classes" in done.stderr


def test_random_labels_are_of_the_classes(planned: Path) -> None:
    labels = train.random_batch(memonger.Plan.load(planned), seed=1)["labels"]
    assert labels.dtype == np.int64
    assert set(labels) <= set(range(training_models.CLASSES))
    assert len(set(labels)) > 1


def test_a_backward_pass_without_a_loss_runs_as_a_model_and_shows_no_table_of_gradients(tmp_path: Path) -> None:
    save_model(memonger.differentiate(classifier()).ir, tmp_path / "backward.onnx")
    done = invoke("run", tmp_path / "backward.onnx", "--device", "none", "--runs", "1")
    assert done.exit_code == 0, done.output
    assert "Gradients: 4 tensors" in done.stdout
    assert "first.weight.grad" not in done.stdout.split("Gradients:")[0]
