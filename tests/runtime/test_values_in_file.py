"""Values of a step that wait in a file for the backward pass: when they are chosen, what is in memory, same bits."""

import json
import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import memonger
from memonger.graph.weight_window import weight_reads
from memonger.plan_file import KEY
from memonger.report.memory_count import count_plan
from memonger.report.summary import plan_figures, unplanned_values, window_line
from memonger.runtime import disk
from tests.support.mapped_files import resident_state
from tests.support.networks import model_of
from tests.support.stock import normal

MIB = 1 << 20
WIDTH, ROWS, LAYERS = 512, 512, 6  # each value has 1 MiB, parameters have 6
BUDGET = "15MiB"


def _model(width: int = WIDTH, rows: int = ROWS) -> onnx.ModelProto:
    nodes, weights = [], {}
    for n in range(LAYERS):
        nodes += [
            helper.make_node("MatMul", [f"v{n}", f"w{n}"], [f"p{n}"], name=f"product{n}"),
            helper.make_node("Tanh", [f"p{n}"], [f"v{n + 1}"], name=f"tanh{n}"),
        ]
        weights[f"w{n}"] = normal(n, width, width) / np.float32(width**0.5)
    return model_of(nodes, {"v0": [rows, width]}, {f"v{LAYERS}": [rows, width]}, **weights)


def _plan(budget: str | int | None, model: onnx.ModelProto | None = None, **options: str) -> memonger.Plan:
    made = memonger.differentiate(
        model or _model(), loss="mean_squared_error", optimizer=memonger.SGD(lr=0.01), **options  # type: ignore[arg-type]
    )  # fmt: skip
    return memonger.search_plan(made, device="cpu", threads=1, budget=budget, effort=20, chunks="off")


def _feeds(session: memonger.TrainingSession) -> dict[str, np.ndarray]:
    return {value.name: normal(5 + n, *value.shape) for n, value in enumerate(session.inputs)}


@pytest.fixture
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "seconds_a_byte", lambda folder: 1e-13)


@pytest.fixture(scope="module")
def whole() -> memonger.Plan:
    return _plan(None)


@pytest.fixture(scope="module")
def plan() -> memonger.Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "seconds_a_byte", lambda folder: 1e-13)
        return _plan(BUDGET)


@pytest.fixture
def planned(plan: memonger.Plan, tmp_path: Path) -> Path:
    plan.save(tmp_path / "planned.onnx")
    return tmp_path / "planned.onnx"


def test_a_fast_disk_takes_what_would_be_computed_again(plan: memonger.Plan, planned: Path) -> None:
    values, again = plan.values_in_file, memonger.Plan.load(planned)
    assert values
    assert plan.window is not None
    assert plan.budget is not None
    assert set(plan.window.weights) == set(values)
    assert not plan.state_in_file
    assert plan.total_bytes <= plan.budget
    assert plan.written_bytes == sum(values.values())  # each once
    times = {read.name: len(read.ranges) - 1 for read in weight_reads(plan.model, plan.graph) if read.made}
    assert min(times.values()) >= 1
    assert plan.read_bytes == sum(values[name] * count for name, count in times.items())
    assert (again.values_in_file, again.total_bytes, again.window) == (values, plan.total_bytes, plan.window)
    number = {name: value for value, name in enumerate(plan.graph.values)}
    assert not {number[name] for name in values} & plan.offsets.keys()
    assert unplanned_values(plan) == unplanned_values(_plan(None))
    count = count_plan(plan)
    assert count.after is not None
    assert count.after.total == plan.total_bytes
    (line,) = window_line(plan_figures(plan, "model", None))
    assert f"{len(values)} values of" in line
    assert "wait in a file of the session's for the backward pass" in plan.notes[-1]
    assert "without that" in plan.notes[-1]


def test_steps_have_the_bits_of_the_plan_that_keeps_all(
    whole: memonger.Plan, plan: memonger.Plan, planned: Path, tmp_path: Path
) -> None:
    usual = memonger.TrainingSession(whole)
    feeds = _feeds(usual)
    losses = [usual.step(feeds) for _ in range(3)]
    for source, folder in ((plan, None), (planned, tmp_path)):
        session = memonger.TrainingSession(source, state_folder=folder)
        (reader,) = session.weight_readers
        for loss in losses:
            assert session.step(feeds) == loss
            assert not reader.why_not
            assert resident_state(session) == 0
        assert reader.last is not None
        assert (reader.last.nbytes, reader.last.written_bytes) == (plan.read_bytes, plan.written_bytes)
        result = session.evaluate({"v0": feeds["v0"]})
        assert all(np.array_equal(array, usual.evaluate({"v0": feeds["v0"]})[name]) for name, array in result.items())
        with session.release_training_state():
            pass
        assert all(np.array_equal(array, usual.state_dict()[name]) for name, array in session.state_dict().items())
    expected = usual.step(feeds)
    assert session.step(feeds) == expected


def test_a_reader_that_is_misled_changes_no_bit(plan: memonger.Plan, whole: memonger.Plan) -> None:
    """Told too early that the last read is over it drops what steps write after that."""
    usual, session = memonger.TrainingSession(whole), memonger.TrainingSession(plan)
    feeds, follower = _feeds(usual), session.weight_readers[0]._follower
    follower._newest = lambda *_: len(follower._schedule.reads) - 1  # type: ignore[method-assign]
    for _ in range(3):
        assert session.step(feeds) == usual.step(feeds)


@pytest.mark.usefixtures("_fast")
def test_values_wait_where_no_parameter_is_worth_a_file() -> None:
    """A plan in memory is finished first, of a model of its own."""
    plan = _plan("16MiB", _model(128, 4096))
    assert plan.total_bytes <= 16 * MIB
    assert plan.values_in_file


@pytest.mark.usefixtures("_fast")
def test_micro_batches_wait_in_one_file() -> None:
    def session(budget: str | None) -> memonger.TrainingSession:
        first, other = (_plan(budget, accumulate=kind) for kind in ("apply", "add"))
        assert all(bool(one.values_in_file) is (budget is not None) for one in (first, other))
        return memonger.TrainingSession(first, accumulation=other)

    usual, small = session(None), session("22MiB")
    feeds = _feeds(usual)
    second = {**feeds, "v0": normal(9, ROWS, WIDTH)}
    for batches in ([feeds, second, feeds], [second]):
        assert small.step(batches) == usual.step(batches)
    assert all(np.array_equal(array, usual.state_dict()[name]) for name, array in small.state_dict().items())


@pytest.mark.parametrize("seconds", [1.0, None])
def test_a_slow_disk_and_one_that_cannot_be_measured_take_nothing(
    seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "seconds_a_byte", lambda folder: seconds)
    plan = _plan(BUDGET)
    assert plan.window is None
    assert not plan.values_in_file


def test_a_disk_is_measured_by_what_is_written_and_read_again(tmp_path: Path) -> None:
    assert disk.seconds_a_byte(str(tmp_path / "none")) is None
    measured = disk.seconds_a_byte(tempfile.gettempdir())
    assert measured is None or 0 < measured < 1e-6
    if Path("/dev/shm").is_dir():
        assert disk.seconds_a_byte("/dev/shm") is None  # a file there is in memory
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_have_the_values_is_told(plan: memonger.Plan, tmp_path: Path) -> None:
    with pytest.raises(memonger.SessionError, match=r"can't have a file for .* of values of a step, .*state_folder"):
        memonger.TrainingSession(plan, state_folder=tmp_path / "none")


@pytest.mark.parametrize(
    ("window", "words"),
    [(None, "waits in a file, and it has no window"), ("less", "waits in a file, and isn't in its window")],
)
def test_a_strangers_window_leaves_no_value_out(planned: Path, window: str | None, words: str) -> None:
    model = onnx.load(planned, load_external_data=False)
    (entry,) = (one for one in model.metadata_props if one.key == KEY)
    content = json.loads(entry.value)
    content["window"] = None if window is None else content["window"] | {"weights": content["window"]["weights"][1:]}
    entry.value = json.dumps(content)
    onnx.save(model, planned)
    with pytest.raises(memonger.PlanFileError, match=words):
        memonger.Plan.load(planned)


def test_a_budget_above_one_that_holds_is_held_by_a_window_that_grew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first schedule that is found for 19 MiB reads a parameter again beside others: its window has 1 MiB more."""
    monkeypatch.setattr(disk, "seconds_a_byte", lambda folder: None)
    for mib in (17, 18, 19, 20):
        assert _plan(mib * MIB).total_bytes <= mib * MIB


@pytest.mark.usefixtures("_fast")
def test_what_nothing_else_holds_is_held_and_a_refusal_names_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(memonger.BudgetError) as refused:
        _plan("9MiB")
    smallest = refused.value.smallest
    assert refused.value.lower_bound <= smallest
    plan = _plan(smallest)
    assert plan.total_bytes <= smallest
    monkeypatch.setattr(disk, "seconds_a_byte", lambda folder: None)
    with pytest.raises(memonger.BudgetError) as without:
        _plan("9MiB")
    assert without.value.smallest >= smallest
