"""Frozen weights of a training step that stay in the plan's file: budgets below them, the same bits, what is there."""

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import memonger
from memonger.cli.compare import reading_lines
from memonger.graph.weight_window import weight_reads
from memonger.runtime.executable import Executable
from memonger.runtime.weight_reader import Reading
from tests.support.mapped_files import resident
from tests.support.networks import model_of
from tests.support.stock import normal

MIB = 1 << 20
WIDTH, LAYERS, ROWS, BUDGET = 640, 6, 16, "9MiB"
EFFORT = 20
FEEDS = {"x": normal(5, ROWS, WIDTH), "target": normal(6, ROWS, WIDTH)}


def _model() -> onnx.ModelProto:
    """Frozen products of 1.6 MiB each, between which a scale is trained: the backward pass goes through all of them."""
    nodes, weights, x = [], {}, "x"
    for layer in range(LAYERS):
        weights[f"scale{layer}"] = normal(layer + 50, WIDTH)
        weights[f"w{layer}"] = normal(layer, WIDTH, WIDTH) / np.float32(WIDTH**0.5)
        nodes.append(helper.make_node("Mul", [x, f"scale{layer}"], [f"s{layer}"], name=f"scale{layer}"))
        nodes.append(helper.make_node("MatMul", [f"s{layer}", f"w{layer}"], [f"v{layer}"], name=f"product{layer}"))
        x = f"v{layer}"
    return model_of(nodes, {"x": [ROWS, WIDTH]}, {x: [ROWS, WIDTH]}, **weights)


@pytest.fixture(scope="module")
def differentiated() -> memonger.Model:
    return memonger.differentiate(
        _model(), loss="mean_squared_error", optimizer=memonger.AdamW(lr=0.01), wrt=[f"scale{n}" for n in range(LAYERS)]
    )


@pytest.fixture(scope="module")
def whole(differentiated: memonger.Model) -> memonger.Plan:
    return memonger.search_plan(differentiated, device="cpu", threads=1)


@pytest.fixture(scope="module")
def plan(differentiated: memonger.Model) -> memonger.Plan:
    return memonger.search_plan(differentiated, device="cpu", threads=1, budget=BUDGET)


@pytest.fixture(scope="module")
def planned(plan: memonger.Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("frozen") / "planned.onnx"
    plan.save(path)
    return path


def _feeds(session: memonger.TrainingSession) -> dict[str, np.ndarray]:
    return {value.name: FEEDS.get(value.name, FEEDS["target"]) for value in session.inputs}


def test_both_copies_count_with_and_without_a_window(whole: memonger.Plan, plan: memonger.Plan) -> None:
    weight = 4 * WIDTH * WIDTH
    assert whole.window is None
    persistent = 3 * LAYERS * 4 * WIDTH
    assert persistent + 2 * LAYERS * weight <= whole.parameter_bytes <= persistent + 2 * LAYERS * weight + 4096
    assert whole.resident_parameter_bytes == whole.parameter_bytes == plan.parameter_bytes
    assert plan.window is not None
    assert plan.total_bytes <= 9 * MIB < whole.total_bytes
    reads = [read for read in weight_reads(plan.model) if read.name in plan.window.weights]
    assert {read.transposed for read in reads} == {False, True}
    left = sum(read.nbytes for read in reads)
    assert plan.kept_parameter_bytes == plan.parameter_bytes - left
    products = [node for node in plan.model.graph if len(node.inputs) > 1 and node.inputs[1] is not None]
    times = sum(node.inputs[1].name in plan.window.weights for node in products if node.inputs[1] is not None)
    assert left <= plan.read_bytes <= times * weight  # a product that runs again reads its weight again


def test_weights_of_a_step_are_mapped_where_that_is_asked_for(
    differentiated: memonger.Model, whole: memonger.Plan, plan: memonger.Plan, tmp_path: Path
) -> None:
    mapped = memonger.search_plan(differentiated, device="cpu", threads=1, weights="mapped")
    assert mapped.window is not None
    assert mapped.resident_parameter_bytes < plan.resident_parameter_bytes
    assert {read.name for read in weight_reads(mapped.model, mapped.graph)} == set(mapped.window.weights)
    mapped.save(tmp_path / "mapped.onnx")
    with memonger.TrainingSession(whole) as usual, memonger.TrainingSession(tmp_path / "mapped.onnx") as session:
        for _ in range(3):
            assert session.step(_feeds(session)) == usual.step(_feeds(usual))
        assert "memonger weights" in {thread.name for thread in threading.enumerate()}
    assert "memonger weights" not in {thread.name for thread in threading.enumerate()}
    assert resident(tmp_path / "mapped.onnx") == 0


def test_steps_have_the_bits_of_the_plan_without_a_window(
    whole: memonger.Plan, plan: memonger.Plan, planned: Path, tmp_path: Path
) -> None:
    usual, session = memonger.TrainingSession(whole), memonger.TrainingSession(planned)
    feeds = _feeds(session)
    (reader,) = session.weight_readers
    assert usual.weight_readers == ()
    for _ in range(3):
        assert session.step(feeds) == usual.step(feeds)
        assert not reader.why_not
        # What is kept, and at the ends of weights pages that others share
        assert resident(planned) <= plan.kept_parameter_bytes * 1.05 + 2 * 4096 * 2 * LAYERS
    assert reader.last is not None
    assert reader.last.nbytes == plan.read_bytes
    theirs = usual.state_dict()
    for name, array in session.state_dict().items():
        assert np.array_equal(array, theirs[name])
    session.save(tmp_path / "state")
    again = memonger.TrainingSession(planned)
    again.load(tmp_path / "state")
    expected = usual.step(feeds)
    assert (session.step(feeds), again.step(feeds)) == (expected, expected)
    result = session.evaluate({"x": FEEDS["x"]})
    assert all(np.array_equal(array, usual.evaluate({"x": FEEDS["x"]})[name]) for name, array in result.items())
    assert session.step(feeds) == usual.step(feeds)


def test_loading_takes_no_copy_of_the_frozen_weights(planned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward model that is evaluated refers to the plan's file: no folder is filled with its weights."""
    monkeypatch.setattr("memonger.model.forward_model.ScratchFolder", None)
    session = memonger.TrainingSession(planned)
    assert session._frozen is not None
    assert set(session._frozen.folders.values()) == {str(planned.parent)}


@pytest.fixture
def own(planned: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the planned file and its weights, to be spoiled."""
    for file in planned.parent.iterdir():
        shutil.copyfile(file, tmp_path / file.name)
    return tmp_path / planned.name


def test_a_file_that_was_changed_is_refused_and_leaves_a_whole_state(own: Path) -> None:
    """Though the step before had updated all there is."""
    (data,) = own.parent.glob("*.data")
    session = memonger.TrainingSession(own)
    feeds = _feeds(session)
    session.step(feeds)
    before, status = session.state_dict(), data.stat()
    content = data.read_bytes()
    data.write_bytes(content)
    os.utime(data, ns=(status.st_atime_ns, status.st_mtime_ns))  # time and size are as they were
    with pytest.raises(memonger.SessionError, match=rf"{data.name} was changed since .* it is another now"):
        session.step(feeds)
    assert all(np.array_equal(array, before[name]) for name, array in session.state_dict().items())
    os.truncate(data, len(content) - 1)
    with pytest.raises(memonger.SessionError, match=rf"{data.name} was changed since .* it is shorter now"):
        session.step(feeds)
    with pytest.raises(memonger.SessionError, match=rf"{data.name} was changed since .* evaluate"):
        session.evaluate({"x": FEEDS["x"]})


def test_a_step_that_fails_in_the_middle_is_told(planned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is updated the state stays whole, and the thread waits for the next step."""
    session = memonger.TrainingSession(planned)
    feeds = _feeds(session)
    expected = [session.step(feeds) for _ in range(2)]
    again = memonger.TrainingSession(planned)
    assert again.step(feeds) == expected[0]

    def fail(*_: object) -> float:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Executable, "result", fail)
        with pytest.raises(KeyboardInterrupt):
            again.step(feeds)
    assert again.step(feeds) == expected[1]


def test_the_smallest_budget_that_is_named_works(differentiated: memonger.Model) -> None:
    with pytest.raises(memonger.BudgetError, match=r"no plan within 1\.00 MiB") as refused:
        memonger.search_plan(differentiated, device="cpu", threads=1, budget="1MiB", effort=EFFORT)
    smallest = refused.value.smallest
    assert smallest < 9 * MIB
    made = memonger.search_plan(differentiated, device="cpu", threads=1, budget=smallest, effort=EFFORT)
    assert made.total_bytes <= smallest


def test_a_plan_that_is_in_no_file_is_refused(plan: memonger.Plan) -> None:
    with pytest.raises(memonger.SessionError, match="they stay in the plan's file, and this plan has none"):
        memonger.TrainingSession(plan)


def test_the_thread_ends_with_the_session(planned: Path) -> None:
    before = threading.active_count()
    session = memonger.TrainingSession(planned)
    session.step(_feeds(session))
    del session
    for thread in threading.enumerate():
        if thread.name == "memonger weights":
            thread.join(10)
    assert threading.active_count() <= before


def test_fit_says_what_fits_below_the_frozen_weights() -> None:
    nodes = [helper.make_node("MatMul", [f"v{n}", f"w{n}"], [f"v{n + 1}"], name=f"product{n}") for n in range(LAYERS)]
    weights = {f"w{layer}": normal(layer, WIDTH, WIDTH) / np.float32(WIDTH**0.5) for layer in range(LAYERS)}
    model = model_of(nodes, {"v0": ["batch", WIDTH]}, {f"v{LAYERS}": ["batch", WIDTH]}, **weights)
    answer = memonger.fit(
        model, BUDGET, device="cpu", lora=(4, "*"), loss="mean_squared_error", optimizer=memonger.SGD(lr=0.1),
        effort=EFFORT,
    )  # fmt: skip
    assert answer.plan is not None
    assert answer.plan.window is not None
    assert answer.size > 1
    assert answer.plan.total_bytes <= 9 * MIB < answer.plan.parameter_bytes


def test_a_reader_that_is_misled_leaves_nothing_behind(planned: Path, plan: memonger.Plan) -> None:
    """Told too early that the last weight is read it drops all others, which steps read after that."""
    session = memonger.TrainingSession(planned)
    feeds, follower = _feeds(session), session.weight_readers[0]._follower
    expected = [memonger.TrainingSession(planned).step(feeds)]
    follower._newest = lambda *_: len(follower._schedule.reads) - 1  # type: ignore[method-assign]
    assert [session.step(feeds)] == expected
    assert resident(planned) <= plan.kept_parameter_bytes * 1.05 + 2 * 4096 * 2 * LAYERS


def test_what_a_step_read_is_said(plan: memonger.Plan) -> None:
    assert plan.window is not None
    fast = Reading(plan.read_bytes, 0, 3 * MIB, 2.0, 1.5, 2 * plan.window.nbytes)
    read, waits, outran = reading_lines(plan, fast, "", 2.0 * MIB)
    assert "3.00 MiB from the disk, which gives 2.00 MiB a second" in read
    assert waits.startswith("The disk is what the run waits for: 1.50 s of 2.00 s")
    assert outran.startswith("Steps were faster than what drops weights behind them")
    assert len(list(reading_lines(plan, Reading(1, 0, 0, 1.0, 0.0, 0), "", None))) == 1
    assert list(reading_lines(plan, None, "this is another system", None)) == [
        "How much of the weights is in memory isn't held to the plan's window here: this is another system."
    ]
