"""TrainingSession: steps, state, saving and resuming, evaluation, export."""

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import memonger
from memonger.errors import PlanError, SessionError
from memonger.ir import training_roles as training_metadata
from tests.support import networks
from tests.support.training_models import BATCH, CLASSES, FEATURES, batch, classifier, plan

OPTIMIZERS = [
    memonger.SGD(lr=0.2),
    memonger.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    memonger.Adam(lr=0.01),
    memonger.AdamW(lr=0.01),
]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "classifier.onnx"
    plan().save(path)
    return path


def _stock_steps(model: onnx.ModelProto, count: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """The same steps on a stock session: every output fed back as the next step's input."""
    training = training_metadata.read(memonger.load(model).ir, "model")
    assert training is not None
    assert training.loss is not None
    session = networks.stock(model)
    names = [output.name for output in session.get_outputs()]
    defaults = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    kept = {n: defaults.get(n, np.zeros(shapes[n], np.float32)) for n in training.persistent}
    losses = []
    for step in range(count):
        feeds = {**batch(step), **kept}
        if "step" in training.scalars:
            feeds[training.scalars["step"]] = np.array(step, np.int64)
        results = dict(zip(names, session.run(None, feeds), strict=True))
        losses.append(float(results[training.loss]))
        kept = {name: results[training.updates[name]] for name in training.persistent}
    return losses, kept


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_steps_in_place_equal_a_stock_session_bit_for_bit(optimizer: object) -> None:
    made = memonger.differentiate(classifier(), loss="softmax_cross_entropy", optimizer=optimizer)
    trainer = memonger.TrainingSession(memonger.search_plan(made))
    losses = [trainer.step(batch(step)) for step in range(6)]
    expected, kept = _stock_steps(ir.to_proto(made.ir), 6)
    assert losses == expected
    assert losses[-1] < losses[0]
    state = trainer.state_dict()
    assert state.keys() == kept.keys()
    for name, array in kept.items():
        np.testing.assert_array_equal(state[name], array, err_msg=name)


def test_updates_are_written_over_their_parameters_and_checked() -> None:
    made = plan()
    graph = made.graph
    pairs = [pair for pairs in graph.updates for pair in pairs]
    assert len(pairs) == 8  # four parameters and their momentum
    assert not any(graph.planned[new] for _, new in pairs)
    assert made.training is not None
    weights = [v.const_value for n, v in made.model.graph.initializers.items() if n in made.training.parameters]
    assert made.parameter_bytes >= 2 * sum(tensor.nbytes for tensor in weights)


def test_the_learning_rate_is_the_optimizers_unless_a_step_is_given_one(planned: Path) -> None:
    trainer = memonger.TrainingSession(planned)
    assert trainer.learning_rate == pytest.approx(0.2)
    before = trainer.state_dict()
    trainer.step(batch(), learning_rate=0.0)
    after = trainer.state_dict()
    np.testing.assert_array_equal(before["last.weight"], after["last.weight"])
    trainer.step(batch())
    assert not np.array_equal(after["last.weight"], trainer.state_dict()["last.weight"])


def test_a_closed_session_has_given_everything_back_and_says_so(planned: Path, tmp_path: Path) -> None:
    with memonger.TrainingSession(planned) as trainer:
        trainer.step(batch())
        trainer.evaluate({"x": batch()["x"]})
        kept = trainer.state_dict()
        arenas = [weakref.ref(one) for one in (trainer._arena, trainer._state.arena, trainer._weights.arena)]
        with trainer.release_training_state(), pytest.raises(SessionError, match="leave release_training_state"):
            trainer.close()
    assert [one() for one in arenas] == [None] * 3
    assert kept["last.weight"].any()
    for use in (
        lambda: trainer.step(batch()),
        lambda: trainer.evaluate({"x": batch()["x"]}),
        lambda: trainer.save(tmp_path / "state"),
        lambda: trainer.load_state_dict(kept),
        lambda: trainer.export(tmp_path / "trained.onnx"),
        lambda: trainer.inputs,
        trainer.state_dict,
    ):
        with pytest.raises(SessionError, match="the session is closed: make a new one"):
            use()
    assert "1 step, closed" in repr(trainer)
    trainer.close()


def test_a_loss_that_is_not_finite_changes_nothing_and_is_reported(
    planned: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = memonger.TrainingSession(planned)
    trainer.step(batch(0))
    before = trainer.state_dict()
    bad = batch(1)
    bad["x"][3, 3] = np.inf
    assert not np.isfinite(trainer.step(bad))
    assert (trainer.steps, trainer.skipped_steps) == (1, 1)
    assert "nothing was updated" in caplog.text
    for name, array in trainer.state_dict().items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    assert np.isfinite(trainer.step(batch(1)))


def test_a_saved_state_continues_bit_for_bit_in_a_new_process(planned: Path, tmp_path: Path) -> None:
    trainer = memonger.TrainingSession(planned, random_key=7)
    for step in range(3):
        trainer.step(batch(step))
    trainer.save(tmp_path / "state")
    losses = [trainer.step(batch(step)) for step in range(3, 6)]
    program = (
        "import sys, memonger\n"
        "from tests.support.training_models import batch\n"
        "trainer = memonger.TrainingSession(sys.argv[1]); trainer.load(sys.argv[2])\n"
        "print([trainer.step(batch(step)).hex() for step in range(3, 6)], trainer.steps, trainer.random_key)\n"
        "trainer.save(sys.argv[3])\n"
    )
    command = [sys.executable, "-c", program, str(planned), str(tmp_path / "state"), str(tmp_path / "later")]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert ran.stdout.strip() == f"{[loss.hex() for loss in losses]} 6 7"
    trainer.save(tmp_path / "here")
    assert (tmp_path / "later").read_bytes() == (tmp_path / "here").read_bytes()


def test_a_state_cut_short_or_changed_or_of_another_model_is_refused(planned: Path, tmp_path: Path) -> None:
    trainer = memonger.TrainingSession(planned)
    trainer.step(batch())
    path = tmp_path / "state"
    trainer.save(path)
    data = path.read_bytes()
    before = trainer.state_dict()
    for length in (0, 10, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(SessionError, match=r"state.*is not a training state|cut short"):
            trainer.load(path)
    refused = 0
    for place in range(0, len(data), 37):  # a flipped bit anywhere is found, or is in bytes that say nothing
        changed = bytearray(data)
        changed[place] ^= 0x10
        path.write_bytes(bytes(changed))
        try:
            trainer.load(path)
        except SessionError:
            refused += 1
            for name, array in trainer.state_dict().items():
                np.testing.assert_array_equal(array, before[name], err_msg=name)
    assert refused > 0.9 * len(data) / 37
    path.write_bytes(data)
    other = memonger.TrainingSession(plan(memonger.Adam(lr=0.1)))
    with pytest.raises(SessionError, match=r"another model.*momentum|another optimizer|has no '"):
        other.load(path)
    with pytest.raises(SessionError, match="no such file"):
        trainer.load(tmp_path / "nothing")
    trainer.load(path)
    assert trainer.steps == 1


def test_state_dicts_are_taken_over_whole_or_not_at_all(planned: Path) -> None:
    trainer, other = memonger.TrainingSession(planned), memonger.TrainingSession(planned)
    for step in range(3):
        trainer.step(batch(step))
    state = trainer.state_dict()
    fresh = other.state_dict()
    for wrong, words in [
        ({**state, "nobody": state["first.bias"]}, "'nobody' is no tensor"),
        ({k: v for k, v in state.items() if k != "first.bias"}, "'first.bias' is missing"),
        ({**state, "first.bias": state["first.bias"][:-1]}, "'first.bias' is float32"),
        ({**state, "first.bias": state["first.bias"].astype(np.float64)}, "float64"),
    ]:
        with pytest.raises(SessionError, match=words):
            other.load_state_dict(wrong)
        for name, array in other.state_dict().items():
            np.testing.assert_array_equal(array, fresh[name], err_msg=name)
    other.load_state_dict(state)
    other.steps = trainer.steps
    assert other.step(batch(9)) == trainer.step(batch(9))


def test_evaluation_and_export_use_the_trained_weights(planned: Path, tmp_path: Path) -> None:
    trainer = memonger.TrainingSession(planned)
    for step in range(30):
        trainer.step(batch(step))
    x = batch(99)["x"]
    scores = trainer.evaluate({"x": x})["y"]
    model = classifier()
    trainer.export(tmp_path / "mine.onnx", model)
    trainer.export(tmp_path / "held.onnx")
    onnx.save(model, tmp_path / "before.onnx")
    trainer.export(tmp_path / "from_file.onnx", tmp_path / "before.onnx")
    for name in ("mine", "held", "from_file"):
        stock = onnxruntime.InferenceSession(tmp_path / f"{name}.onnx").run(None, {"x": x})[0]
        np.testing.assert_allclose(stock, scores, rtol=1e-5, atol=1e-6)
    assert not np.allclose(
        onnxruntime.InferenceSession(tmp_path / "before.onnx").run(None, {"x": x})[0], scores, atol=0.1
    )
    exported = onnx.load(tmp_path / "mine.onnx")
    for mine, theirs in zip(exported.graph.node, model.graph.node, strict=True):
        assert (mine.op_type, mine.input, mine.output, mine.attribute) == (
            theirs.op_type,
            theirs.input,
            theirs.output,
            theirs.attribute,
        )
    assert [t.name for t in exported.graph.initializer] == [t.name for t in model.graph.initializer]


def test_export_into_another_model_is_refused(planned: Path, tmp_path: Path) -> None:
    model = classifier()
    model.graph.initializer[0].name = "renamed"
    model.graph.node[0].input[1] = "renamed"
    trainer = memonger.TrainingSession(planned)
    with pytest.raises(SessionError, match=r"has no initializer 'first\.weight'"):
        trainer.export(tmp_path / "out.onnx", model)
    assert not (tmp_path / "out.onnx").exists()


def test_released_state_comes_back_bit_for_bit(planned: Path) -> None:
    trainer, other = memonger.TrainingSession(planned), memonger.TrainingSession(planned)
    for step in range(2):
        assert trainer.step(batch(step)) == other.step(batch(step))
    before = trainer.evaluate({"x": batch()["x"]})["y"]
    with trainer.release_training_state() as released:
        np.testing.assert_array_equal(released.evaluate({"x": batch()["x"]})["y"], before)
        with pytest.raises(SessionError, match="released"):
            released.step(batch())
        with pytest.raises(SessionError, match="released"):
            released.save("nowhere")
        assert not trainer._state.array("first.weight.momentum").any()  # its memory is given back
    for step in range(2, 5):
        assert trainer.step(batch(step)) == other.step(batch(step))


def test_micro_batches_make_one_step(planned: Path) -> None:
    apply = plan(memonger.SGD(lr=0.1, momentum=0.9), accumulate="apply")
    add = plan(memonger.SGD(lr=0.1, momentum=0.9), accumulate="add")
    trainer = memonger.TrainingSession(apply, accumulation=add)
    whole = memonger.TrainingSession(plan(memonger.SGD(lr=0.1, momentum=0.9)))
    for _ in range(3):
        loss = trainer.step([batch(1), batch(1), batch(1), batch(1)])
        assert loss == pytest.approx(whole.step(batch(1)), rel=1e-6)
    for name, array in whole.state_dict().items():
        np.testing.assert_allclose(trainer.state_dict()[name], array, rtol=1e-4, atol=1e-6, err_msg=name)
    losses = [trainer.step([batch(s), batch(s + 50)]) for s in range(3)]
    assert len(set(losses)) == 3
    before = trainer.state_dict()
    bad = batch(3)
    bad["x"][:] = np.nan
    assert not np.isfinite(trainer.step([batch(2), bad]))
    for name, array in trainer.state_dict().items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    with pytest.raises(SessionError, match="accumulation plan"):
        whole.step([batch(1), batch(2)])


def test_wrong_labels_and_inputs_are_named(planned: Path) -> None:
    trainer = memonger.TrainingSession(planned)
    given = batch()
    with pytest.raises(SessionError, match=r"'labels' has type float32; .* takes int64"):
        trainer.step({**given, "labels": given["labels"].astype(np.float32)})
    with pytest.raises(SessionError, match=r"'labels' has shape \[15\]"):
        trainer.step({**given, "labels": given["labels"][1:]})
    with pytest.raises(SessionError, match="'labels' is missing"):
        trainer.step({"x": given["x"]})
    with pytest.raises(SessionError, match=r"has no input 'first\.weight'"):
        trainer.step({**given, "first.weight": given["x"]})
    assert trainer.steps == 0


def test_outputs_are_those_of_the_last_step(planned: Path) -> None:
    trainer = memonger.TrainingSession(planned)
    with pytest.raises(SessionError, match="no outputs of a step"):
        trainer.outputs()
    trainer.step(batch(), learning_rate=0.0)
    assert trainer.outputs()["y"].shape == (BATCH, CLASSES)
    trainer.evaluate({"x": np.zeros((BATCH, FEATURES), np.float32)})
    with pytest.raises(SessionError, match="no outputs of a step"):
        trainer.outputs()


def test_an_input_that_is_not_fed_any_more_has_its_default_again() -> None:
    model = classifier()
    model.graph.node[0].input[0] = "scaled"
    model.graph.node.insert(0, onnx.helper.make_node("Mul", ["x", "factor"], ["scaled"]))
    model.graph.node.insert(0, onnx.helper.make_node("Cast", ["switch"], ["factor"], to=onnx.TensorProto.FLOAT))
    model.graph.input.append(onnx.helper.make_tensor_value_info("switch", onnx.TensorProto.INT64, []))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1), "switch"))
    training = memonger.differentiate(model, loss="softmax_cross_entropy", optimizer=memonger.SGD(lr=0.0))
    trainer = memonger.TrainingSession(memonger.search_plan(training))
    loss = trainer.step(batch())
    assert trainer.step({**batch(), "switch": np.array(0)}) != loss
    assert trainer.step(batch()) == loss


def test_only_plans_with_a_loss_are_trained() -> None:
    with pytest.raises(SessionError, match="not of a training model"):
        memonger.TrainingSession(memonger.search_plan(classifier()))
    with pytest.raises(PlanError, match="for training"):
        memonger.search_plan(classifier(), loss="softmax_cross_entropy", mode="inference")


def test_a_clipped_step_reports_its_norm_and_skips_what_is_not_finite() -> None:
    trainer = memonger.TrainingSession(plan(memonger.SGD(lr=0.1), clip_norm=0.5))
    trainer.step(batch())
    assert trainer.outputs()["gradient_norm"] > 0
    state = trainer.state_dict()
    state["first.weight"][:, 0] = 0.0
    trainer.load_state_dict(state)
    huge = batch(1)
    huge["x"][:, 0] = 1e30  # the loss doesn't see it; the weights' gradients do, and can't be squared
    assert np.isfinite(trainer.step(huge))
    assert trainer.skipped_steps == 1
    for name, array in trainer.state_dict().items():
        np.testing.assert_array_equal(array, state[name], err_msg=name)


def test_a_session_of_a_file_keeps_no_model(planned: Path) -> None:
    """Neither the planned one nor the forward one, which a small part of would keep whole in memory."""

    def nodes() -> int:
        gc.collect()
        return sum(isinstance(each, ir.Node) for each in gc.get_objects())

    before = nodes()
    trainer = memonger.TrainingSession(planned)
    assert nodes() <= before
    trainer.step(batch())
    assert nodes() <= before
