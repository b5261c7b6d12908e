"""Evaluation at other sizes than planned, and with averages of weights."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import memonger
from memonger.errors import SessionError
from tests.support import training_steps
from tests.support.training_models import BATCH, FEATURES, batch, classifier, plan


def open_classifier() -> onnx.ModelProto:
    model = classifier()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "N"
    return model


def scores(model: onnx.ModelProto | Path, x: np.ndarray) -> np.ndarray:
    content = model.read_bytes() if isinstance(model, Path) else model.SerializeToString()
    return np.asarray(onnxruntime.InferenceSession(content).run(None, {"x": x})[0])


def test_other_batches_are_evaluated_with_the_weights_as_they_are(tmp_path: Path) -> None:
    trainer, forward = memonger.TrainingSession(plan()), open_classifier()
    onnx.save(forward, tmp_path / "mine.onnx")
    for rows in (3, 4 * BATCH, 3):
        trainer.step(batch(rows))
        x = np.random.default_rng(rows).standard_normal((rows, FEATURES)).astype(np.float32)
        found = [trainer.evaluate({"x": x}, model=each)["y"] for each in (forward, tmp_path / "mine.onnx")]
        trainer.export(tmp_path / "trained.onnx", forward)
        np.testing.assert_allclose(found[0], scores(tmp_path / "trained.onnx", x), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(*found)
    assert len(trainer._evaluations) == 4
    other = open_classifier()
    other.graph.initializer[0].name = other.graph.node[0].input[1] = "renamed"
    with pytest.raises(SessionError, match=r"has no 'first\.weight' of FLOAT\[24, 12\] to evaluate with"):
        trainer.evaluate({"x": x}, model=other)


def test_averages_are_evaluated_exported_and_resumed(tmp_path: Path) -> None:
    planned = plan(ema=0.8)
    trainer, other = memonger.TrainingSession(planned), memonger.TrainingSession(planned)
    x, averages = batch(99)["x"], dict[str, np.ndarray]()
    with pytest.raises(SessionError, match="no averages before the first step"):
        trainer.evaluate({"x": x}, averaged=True)
    for step in range(4):
        trainer.step(batch(step))
        state = trainer.state_dict()
        weights = {name: state[name] for name in trainer._roles[0].parameters}
        averages = {name: w if not averages else 0.8 * averages[name] + 0.2 * w for name, w in weights.items()}
    mine = classifier()
    for tensor in mine.graph.initializer:
        tensor.CopyFrom(onnx.numpy_helper.from_array(averages[tensor.name].astype(np.float32), tensor.name))
    found = trainer.evaluate({"x": x}, averaged=True)["y"]
    np.testing.assert_allclose(found, scores(mine, x), rtol=1e-4, atol=1e-5)
    assert not np.allclose(found, trainer.evaluate({"x": x})["y"], atol=1e-3)
    np.testing.assert_array_equal(found, trainer.evaluate({"x": x}, averaged=True)["y"])
    trainer.export(tmp_path / "averaged.onnx", classifier(), averaged=True)
    np.testing.assert_allclose(scores(tmp_path / "averaged.onnx", x), found, rtol=1e-5, atol=1e-6)
    trainer.save(tmp_path / "state")
    other.load(tmp_path / "state")
    np.testing.assert_array_equal(found, other.evaluate({"x": x}, averaged=True)["y"])
    with pytest.raises(SessionError, match="keeps no averages: differentiate it with ema"):
        memonger.TrainingSession(plan()).evaluate({"x": x}, averaged=True)


@pytest.mark.parametrize("fails", [False, True])
def test_frozen_weights_wait_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    training = memonger.differentiate(classifier(), loss="softmax_cross_entropy", frozen=["first.weight"])
    planned, x = memonger.search_plan(training, device="none"), batch(99)["x"]
    whole = memonger.TrainingSession(planned)
    with monkeypatch.context() as patch:
        patch.setattr("memonger.model.forward_model._MANY", 1)
        if fails:
            patch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "absent"))
        trainer = memonger.TrainingSession(planned, check_order=False)
    assert (whole._frozen, trainer._frozen is None) == (None, fails)
    for step in range(2):
        assert trainer.step(batch(step)) == whole.step(batch(step))
    np.testing.assert_array_equal(trainer.evaluate({"x": x})["y"], whole.evaluate({"x": x})["y"])
    for name, each in (("one.onnx", trainer), ("other.onnx", whole)):
        each.export(tmp_path / name)
    assert (tmp_path / "one.onnx").read_bytes() == (tmp_path / "other.onnx").read_bytes()


def _in_training_form(source: onnx.ModelProto, *, outputs: bool) -> onnx.ModelProto:
    """A network as exporters' training mode writes it: batch statistics, maybe as outputs, and Dropout that is on."""
    norm = next(node for node in source.graph.node if node.op_type == "BatchNormalization")
    norm.attribute.append(onnx.helper.make_attribute("training_mode", 1))
    norm.output.extend(["mean.moved", "variance.moved"])
    if outputs:
        for name in norm.output[1:]:
            source.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [10]))
    last = source.graph.node[-1]
    kept, drops = (onnx.numpy_helper.from_array(np.array(x), n) for x, n in ((np.float32(0.0), "ratio"), (True, "on")))
    source.graph.initializer.extend([kept, drops])
    dropout = onnx.helper.make_node("Dropout", [last.input[0], "ratio", "on"], ["dropped", "mask"], name="dropout")
    last.input[0] = "dropped"
    source.graph.node.insert(len(source.graph.node) - 1, dropout)
    return source


@pytest.mark.parametrize("outputs", [False, True])
def test_a_model_that_came_in_training_form_is_evaluated_in_inference_form(tmp_path: Path, outputs: bool) -> None:
    module = training_steps.net()
    forward = _in_training_form(training_steps.model(module), outputs=outputs)
    batches = [training_steps.batch(k) for k in range(4)]
    training = memonger.differentiate(
        forward, loss=memonger.SoftmaxCrossEntropy(output="y"), optimizer=memonger.SGD(0.1)
    )
    trainer = memonger.TrainingSession(memonger.search_plan(training, device="none", strategy="none"))
    for feeds in batches:
        trainer.step(feeds)
    training_steps.torch_steps(module, torch.optim.SGD(module.parameters(), 0.1), batches)
    x = batches[0]["x"]
    found = trainer.evaluate({"x": x})
    assert list(found) == ["y"]
    if outputs:  # what the node gives as the new variance is of all values, where PyTorch's is of all but one
        with torch.no_grad():
            module[1].running_var.copy_(torch.from_numpy(trainer.state_dict()["1.running_var"]))
    np.testing.assert_allclose(found["y"], module.eval()(torch.from_numpy(x)).detach().numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(trainer.evaluate({"x": x}, model=forward)["y"], found["y"])
    trainer.export(tmp_path / "trained.onnx")
    written = onnx.load(tmp_path / "trained.onnx")
    assert [node.op_type for node in written.graph.node] == [node.op_type for node in forward.graph.node]
    assert [value.name for value in written.graph.output] == [value.name for value in forward.graph.output]
    norm = next(node for node in written.graph.node if node.op_type == "BatchNormalization")
    assert any(a.name == "training_mode" and a.i == 1 for a in norm.attribute)


def test_dropout_that_came_dropping_drops_nothing_in_evaluation() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]>
        g (float[64, 4] x) => (float[64, 4] y, bool[64, 4] mask) {
            half = Constant<value = float {0.5}>()
            on = Constant<value = bool {1}>()
            w = Mul(x, weight)
            y, mask = Dropout(w, half, on)
        }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.full(4, 2, np.float32), "weight"))
    training = memonger.differentiate(model, loss="mean_squared_error", optimizer=memonger.SGD(0.0))
    trainer = memonger.TrainingSession(memonger.search_plan(training, device="none", strategy="none"))
    x = np.ones((64, 4), np.float32)
    trainer.step({"x": x, "target": x})
    assert set(np.unique(trainer.outputs()["y"])) == {0.0, 4.0}
    found = trainer.evaluate({"x": x})
    np.testing.assert_array_equal(found["y"], 2 * x)
    assert found["mask"].all()
    told = onnx.ModelProto()
    told.CopyFrom(model)
    told.graph.node[-1].input[2] = "told"
    told.graph.input.append(onnx.helper.make_tensor_value_info("told", onnx.TensorProto.BOOL, []))
    for drops in (False, True):
        found = trainer.evaluate({"x": x, "told": np.array(drops)}, model=told)
        assert set(np.unique(found["y"])) == ({0.0, 4.0} if drops else {2.0})
