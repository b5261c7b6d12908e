"""Evaluation at other sizes than planned, and with averages of weights."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import memonger
from memonger.errors import SessionError
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
    planned, x = plan(frozen=["first.weight"]), batch(99)["x"]
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
