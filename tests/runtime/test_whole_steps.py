"""A step happens whole or not at all, and a failing run leaves a session as good as it was."""

import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import memonger
from memonger.errors import SessionError
from memonger.runtime import profile
from tests.support.interruptions import INTERRUPTED, interrupt
from tests.support.training_models import BATCH, CLASSES, FEATURES, batch, classifier, plan

ROOT = Path(__file__).parents[2]


_plan = functools.cache(plan)


def _gather() -> memonger.Plan:
    """Picks from a table: an index that isn't in it fails in the runtime."""
    text = """<ir_version: 10, opset_import: ["": 20]>
    g (int64[4] x) => (float[4] y) <float[3] table = {1.0, 2.0, 3.0}> {
        a = Identity(x) b = Gather(table, a) y = Neg(b)
    }"""
    return memonger.search_plan(onnx.parser.parse_model(text), mode="inference", device="none")


@functools.cache
def _accumulating_plans() -> tuple[memonger.Plan, ...]:
    """Plans for several micro-batches, with running statistics."""
    text = f"""<ir_version: 10, opset_import: ["": 20]>
    g (float[{BATCH},{FEATURES}] x) => (float[{BATCH},{CLASSES}] y) {{
        h = BatchNormalization(x, scale, bias, mean, variance)
        y = Gemm<transB=1>(h, weight)
    }}"""
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    arrays = {
        "scale": np.ones(FEATURES), "bias": np.zeros(FEATURES), "mean": np.zeros(FEATURES),
        "variance": np.ones(FEATURES), "weight": rng.standard_normal((CLASSES, FEATURES)),
    }  # fmt: skip
    for name, array in arrays.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    forward = memonger.to_training_mode(model)
    options: dict[str, Any] = {"loss": "softmax_cross_entropy", "optimizer": memonger.SGD(lr=0.1, momentum=0.9)}
    return tuple(
        memonger.search_plan(memonger.differentiate(forward, accumulate=kind, **options), device="none")
        for kind in ("apply", "add")
    )


def _accumulating() -> memonger.TrainingSession:
    apply, add = _accumulating_plans()
    return memonger.TrainingSession(apply, accumulation=add)


def _assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)


def _bad_batches() -> dict[str, dict[str, Any]]:
    short, wrong = batch(3), batch(3)
    short["x"] = short["x"][:-1]
    wrong["labels"] = np.full(BATCH, CLASSES + 3)
    return {"a wrong shape": short, "a label out of range": wrong, "no labels": {"x": batch(3)["x"]}}


@pytest.mark.parametrize("bad", _bad_batches().values(), ids=_bad_batches())
@pytest.mark.parametrize("place", [0, 1])
def test_a_failed_micro_batch_leaves_no_gradient_behind(bad: dict[str, Any], place: int) -> None:
    failing, sound = _accumulating(), _accumulating()
    before = failing.state_dict()
    batches = [batch(1), batch(2)]
    batches[place] = bad
    with pytest.raises(SessionError):
        failing.step(batches)
    assert (failing.steps, failing.skipped_steps) == (0, 0)
    _assert_same(failing.state_dict(), before)
    losses = [trainer.step([batch(4), batch(5)]) for trainer in (failing, sound)]
    assert losses[0] == losses[1]
    _assert_same(failing.state_dict(), sound.state_dict())


def test_a_failed_first_step_is_as_if_it_never_was() -> None:
    failing, sound = (memonger.TrainingSession(_plan()) for _ in range(2))
    for bad in _bad_batches().values():
        with pytest.raises(SessionError):
            failing.step(bad)
    assert [failing.step(batch(k)) for k in range(3)] == [sound.step(batch(k)) for k in range(3)]
    _assert_same(failing.state_dict(), sound.state_dict())


def test_a_failing_first_run_does_not_end_a_session() -> None:
    session = memonger.Session(_gather())
    for _ in range(3):
        with pytest.raises(SessionError, match="out of data bounds"):
            session.run({"x": np.array([0, 1, 99, 2])})
    for _ in range(2):
        assert session.run({"x": np.array([0, 1, 2, 0])})["y"].tolist() == [-1.0, -2.0, -3.0, -1.0]


def test_the_order_of_the_run_that_succeeded_is_what_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    session = memonger.Session(_gather())
    with pytest.raises(SessionError, match="out of data bounds"):
        session.run({"x": np.array([99, 1, 1, 2])})
    read = profile.read_profile
    monkeypatch.setattr(profile, "read_profile", lambda path, **options: read(path, **options)[::-1])
    with pytest.raises(SessionError, match="didn't run the planned order"):
        session.run({"x": np.array([0, 1, 2, 0])})


def test_a_profile_that_is_cut_short_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    session = memonger.Session(_gather())
    inner = session.engines[0].session
    end = inner.end_profiling

    def cut() -> str:
        path = Path(end())
        path.write_bytes(path.read_bytes()[:-40])
        return str(path)

    monkeypatch.setattr(inner, "end_profiling", cut, raising=False)
    for _ in range(2):
        with pytest.raises(SessionError, match=r"cut short: is .* full"):
            session.run({"x": np.array([0, 1, 2, 0])})


def test_a_step_that_fails_among_its_updates_is_told_until_a_state_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = memonger.TrainingSession(_plan())
    trainer.step(batch(0))
    trainer.save(tmp_path / "state")
    before = trainer.state_dict()
    run = trainer.engines[-1].run

    def fails_afterwards(*arguments: Any) -> None:
        run(*arguments)
        raise SessionError("injected")

    monkeypatch.setattr(trainer.engines[-1], "run", fails_afterwards)
    with pytest.raises(SessionError, match="injected"):
        trainer.step(batch(1))
    monkeypatch.undo()
    assert trainer.steps == 1
    uses: list[Callable[[], Any]] = [
        lambda: trainer.step(batch(1)), trainer.state_dict, lambda: trainer.save(tmp_path / "x"),
        lambda: trainer.export(tmp_path / "x.onnx"), lambda: trainer.evaluate({"x": batch(1)["x"]}),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(SessionError, match="failed after it had begun to update"):
            use()
    trainer.load(tmp_path / "state")
    _assert_same(trainer.state_dict(), before)
    other = memonger.TrainingSession(_plan())
    other.step(batch(0))
    assert trainer.step(batch(1)) == other.step(batch(1))


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -0.1, 1e39, "fast", None])
def test_a_learning_rate_that_would_destroy_the_parameters_is_refused(rate: Any) -> None:
    trainer = memonger.TrainingSession(_plan())
    before = trainer.state_dict()
    if rate is not None:
        with pytest.raises(SessionError, match="learning rate"):
            trainer.step(batch(0), learning_rate=rate)
        with pytest.raises(SessionError, match="learning rate"):
            trainer.learning_rate = rate
    assert trainer.steps == 0
    _assert_same(trainer.state_dict(), before)
    assert trainer.learning_rate == pytest.approx(0.2)


@pytest.mark.parametrize("kind", INTERRUPTED)
def test_ctrl_c_leaves_state_and_counter_in_step(kind: str) -> None:
    assert interrupt(kind, times=15) > 0


def test_ctrl_c_between_micro_batches_ends_the_step_undone() -> None:
    trainer, sound = _accumulating(), _accumulating()
    run = trainer._run

    def interrupted(index: int, inputs: Any) -> float:
        os.kill(os.getpid(), signal.SIGINT)
        return run(index, inputs)

    trainer._run = interrupted  # type: ignore[method-assign]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    with pytest.raises(KeyboardInterrupt):
        trainer.step([batch(1), batch(2)])
    signal.signal(signal.SIGINT, before)
    trainer._run = run  # type: ignore[method-assign]
    assert trainer.steps == 0
    assert trainer.step([batch(1), batch(2)]) == sound.step([batch(1), batch(2)])
    _assert_same(trainer.state_dict(), sound.state_dict())


def test_steps_in_other_threads_need_no_signal() -> None:
    trainer, losses = memonger.TrainingSession(_plan()), list[float]()
    thread = threading.Thread(target=lambda: losses.append(trainer.step(batch(0))))
    thread.start()
    thread.join()
    assert np.isfinite(losses).all()


def _chain() -> memonger.Session:
    """Reads ``x`` at its last step as well."""
    text = """<ir_version: 10, opset_import: ["": 20]>
    g (float[64] x) => (float[64] y, float[64] z) { a = Neg(x) b = Exp(a) y = Add(b, x) c = Mul(y, y) z = Add(c, x) }"""
    return memonger.Session(memonger.search_plan(onnx.parser.parse_model(text), mode="inference", device="none"))


def _expected(x: np.ndarray) -> dict[str, np.ndarray]:
    return _chain().run({"x": x.copy()})


def test_results_in_the_arena_can_be_fed_back() -> None:
    session, x = _chain(), np.linspace(-1, 0.5, 64, dtype=np.float32)
    expected = x
    for _ in range(3):
        x = session.run({"x": x}, copy=False)["y"]
        expected = _expected(expected)["y"]
        np.testing.assert_array_equal(x, expected)
        x, expected = x * np.float32(0) + x, expected.copy()
        view = session.run({"x": x}, copy=False)["z"]
        result = session.run({"x": view}, copy=False)["z"]
        np.testing.assert_array_equal(result, _expected(_expected(expected)["z"])["z"])


@pytest.mark.parametrize("target", ["y", "z"])
def test_an_input_may_be_where_an_output_goes(target: str) -> None:
    session, x = _chain(), np.linspace(-1, 0.5, 64, dtype=np.float32)
    expected = _expected(x)
    results = session.run({"x": x}, {target: x})
    np.testing.assert_array_equal(x, expected[target])
    for name, array in results.items():
        np.testing.assert_array_equal(array, expected[name])


def test_targets_that_overlap_are_refused() -> None:
    session, x = _chain(), np.linspace(-1, 0.5, 64, dtype=np.float32)
    memory = np.zeros(96, np.float32)
    with pytest.raises(SessionError, match=r"'z' lies in that for output 'y'"):
        session.run({"x": x}, {"y": memory[:64], "z": memory[32:]})
    inside = session.run({"x": x}, copy=False)["y"]
    with pytest.raises(SessionError, match="own arena"):
        session.run({"x": x}, {"z": inside})
    np.testing.assert_array_equal(session.run({"x": x})["z"], _expected(x)["z"])


@pytest.mark.parametrize("feeds", [[np.zeros(64, np.float32)], "x", 3])
def test_feeds_that_are_not_a_mapping_are_refused(feeds: Any) -> None:
    with pytest.raises(SessionError, match="given by name"):
        _chain().run(feeds)
    with pytest.raises(SessionError):
        memonger.TrainingSession(_plan()).step(feeds)


def test_a_forked_child_is_told_to_make_a_session_of_its_own() -> None:
    script = (
        "import os, sys; import numpy as np\n"
        "from memonger import SessionError; from tests.runtime.test_whole_steps import _chain\n"
        "session = _chain(); x = np.zeros(64, np.float32); session.run({'x': x})\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n        session.run({'x': x})\n"
        "    except SessionError as error:\n        os._exit(7 if 'forked' in str(error) else 8)\n"
        "    os._exit(9)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "session.run({'x': x})\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True, timeout=60
    )
    assert ran.stdout.strip() == "7"


def _own_loss(ignore: str = "") -> memonger.Model:
    """A model that computes its loss itself."""
    text = f"""<ir_version: 10, opset_import: ["": 20]>
    g (float[4,3] x, int64[4] classes) => (float loss) {{
        s = MatMul(x, w)
        loss = SoftmaxCrossEntropyLoss{ignore}(s, classes)
    }}"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(3, dtype=np.float32), "w"))
    return memonger.differentiate(model, loss="loss", optimizer=memonger.SGD(lr=0.1))


@pytest.mark.parametrize("label", [-1, -CLASSES, CLASSES, -(2**62)])
def test_a_label_that_is_no_class_is_an_error_and_changes_nothing(label: int) -> None:
    trainer = memonger.TrainingSession(_plan())
    before, bad = trainer.state_dict(), batch(0)
    bad["labels"][5] = label
    with pytest.raises(SessionError, match=rf"'labels' has {label} at \[5\].*0 to {CLASSES - 1}; to leave"):
        trainer.step(bad)
    assert trainer.steps == 0
    _assert_same(trainer.state_dict(), before)


def test_the_label_that_is_ignored_is_the_one_asked_for() -> None:
    loss = memonger.SoftmaxCrossEntropy(ignore_index=-100)
    made = memonger.differentiate(classifier(), loss=loss, optimizer=memonger.SGD(lr=0.1))
    trainer = memonger.TrainingSession(memonger.search_plan(made, device="none"))
    labels = batch(0)
    labels["labels"][2] = -100
    assert np.isfinite(trainer.step(labels))
    labels["labels"][3] = -1
    with pytest.raises(SessionError, match=r"has -1 at \[3\].*, or -100, which counts for nothing"):
        trainer.step(labels)


@pytest.mark.parametrize(("ignore", "good", "bad"), [("", 2, -1), ("<ignore_index=-1>", -1, -2), ("", 0, 3)])
def test_labels_of_a_models_own_loss_are_checked(ignore: str, good: int, bad: int) -> None:
    trainer = memonger.TrainingSession(memonger.search_plan(_own_loss(ignore), device="none"))
    x = np.ones((4, 3), np.float32)
    assert np.isfinite(trainer.step({"x": x, "classes": np.array([0, 1, good, 2])}))
    with pytest.raises(SessionError, match=rf"'classes' has {bad} at \[2\]"):
        trainer.step({"x": x, "classes": np.array([0, 1, bad, 2])})


def test_a_negative_label_fails_in_stock_onnxruntime_as_well() -> None:
    session = onnxruntime.InferenceSession(ir.to_proto(_own_loss().ir).SerializeToString())
    feeds: dict[str, Any] = {"x": np.ones((4, 3), np.float32), "classes": np.array([0, 1, -1, 2])}
    needed = {value.name for value in session.get_inputs()} - feeds.keys()
    assert not needed - {"w", "learning_rate", "step"}
    with pytest.raises(Exception, match=r"out of data bounds|within bounds|GatherElements"):
        session.run(None, feeds)


@pytest.mark.parametrize("key", ["x", -1, 2**32, 0.5, None])
def test_a_random_key_is_an_integer_of_32_bits(key: Any) -> None:
    with pytest.raises(SessionError, match="random_key must be an integer"):
        memonger.TrainingSession(_plan(), random_key=key)
    trainer = memonger.TrainingSession(_plan())
    trainer.random_key = key
    with pytest.raises(SessionError, match="random_key must be an integer"):
        trainer.step(batch(0))
    assert trainer.steps == 0
