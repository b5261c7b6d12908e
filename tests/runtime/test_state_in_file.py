"""What a training step updates in a file: budgets below it, the same bits, what is in memory, and what outlasts it."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import memonger
import models
from memonger.graph.weight_window import weight_reads
from memonger.report.memory_count import count_plan
from memonger.report.summary import plan_figures, window_line
from memonger.runtime.state_file import APART
from memonger.schedule.solution import total_bytes
from tests.support.mapped_files import resident_state
from tests.support.networks import model_of
from tests.support.stock import normal

MIB = 1 << 20
WIDTH, LAYERS, ROWS = 640, 5, 16
FEEDS = {"x": normal(5, ROWS, WIDTH), "target": normal(6, ROWS, WIDTH)}
MOMENTS = "19MiB"  # that leaves moments in the file alone


def _model() -> onnx.ModelProto:
    """Products of 1.6 MiB each, all of them trained."""
    nodes = [helper.make_node("MatMul", [f"v{n}", f"w{n}"], [f"v{n + 1}"], name=f"product{n}") for n in range(LAYERS)]
    weights = {f"w{layer}": normal(layer, WIDTH, WIDTH) / np.float32(WIDTH**0.5) for layer in range(LAYERS)}
    return model_of(nodes, {"v0": [ROWS, WIDTH]}, {f"v{LAYERS}": [ROWS, WIDTH]}, **weights)


def _plan(budget: str | int | None, chunks: str = "off", **options: str) -> memonger.Plan:
    made = memonger.differentiate(
        _model(), loss="mean_squared_error", optimizer=memonger.AdamW(lr=0.01), **options  # type: ignore[arg-type]
    )  # fmt: skip
    return memonger.search_plan(made, device="cpu", threads=1, budget=budget, effort=20, chunks=chunks)


def _feeds(session: memonger.TrainingSession) -> dict[str, np.ndarray]:
    return {value.name: FEEDS["x" if value.name == "v0" else "target"] for value in session.inputs}


@pytest.fixture(scope="module")
def whole() -> memonger.Plan:
    return _plan(None)


@pytest.fixture(scope="module")
def least() -> memonger.Plan:
    """By the smallest budget that is named where one is refused: parameters are in the file as well."""
    with pytest.raises(memonger.BudgetError, match=r"no plan within 1\.00 MiB") as refused:
        _plan("1MiB")
    return _plan(refused.value.smallest)


@pytest.fixture(scope="module", params=["moments", "all"])
def plan(request: pytest.FixtureRequest, least: memonger.Plan) -> memonger.Plan:
    return least if request.param == "all" else _plan(MOMENTS)


@pytest.fixture(scope="module")
def planned(least: memonger.Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "planned.onnx"
    least.save(path)
    return path


def test_a_budget_below_what_persists_counts_what_is_in_memory(
    whole: memonger.Plan, plan: memonger.Plan, least: memonger.Plan
) -> None:
    weight = 4 * WIDTH * WIDTH
    assert plan.window is not None
    assert plan.budget is not None
    assert plan.total_bytes <= plan.budget < whole.parameter_bytes == plan.parameter_bytes
    assert plan.kept_parameter_bytes == plan.parameter_bytes - sum(plan.state_in_file.values())
    assert plan.written_bytes == weight * len(plan.state_in_file)
    assert set(plan.state_in_file) == set(plan.window.weights)
    roles = plan.training
    assert roles is not None
    parameters = {*roles.parameters} & {*plan.window.weights}
    # A moment is read once in a step, a parameter in the forward pass, in the backward pass and by its update
    assert plan.read_bytes - plan.written_bytes == sum(
        weight * (len(read.ranges) - 1) for read in weight_reads(plan.model, plan.graph) if read.name in parameters
    )
    assert bool(parameters) is (plan is least)
    count = count_plan(plan)
    assert count.after is not None
    assert count.after.total == plan.total_bytes
    (line,) = window_line(plan_figures(plan, "model", None))
    assert "of weights and training state" in line
    assert "the others stay in a file of the session's" in line
    assert line.endswith("MiB back.")


def test_a_window_that_grows_is_searched_for_again_with_as_much_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed again reads its weights again, next to others: only a whole plan knows its window."""
    attempts, asked = sys.modules["memonger.planner.attempts"], list[int]()
    finish = attempts.finish  # type: ignore[attr-defined]

    def grown(job: Any, solution: Any, begin: float) -> memonger.Plan:
        if job.request.budget is not None:
            asked.append(job.request.base)
        if len(asked) < 2:
            budget = job.options.budget_bytes  # below what this takes with a window of a page more than was counted
            raise memonger.BudgetError(budget, total_bytes(job.request, solution) + 4096, 0)
        plan: memonger.Plan = finish(job, solution, begin)
        return plan

    monkeypatch.setattr(attempts, "finish", grown)
    plan = _plan(MOMENTS)
    assert asked[1] == asked[0] + 4096
    assert plan.budget is not None
    assert plan.total_bytes <= plan.budget


def test_updates_stay_for_one_piece_and_chunks_of_them_take_no_time() -> None:
    whole = _plan(None, "auto")
    assert whole.chunks
    for read in weight_reads(whole.model, whole.graph):
        assert read.updated
        if "exp_avg" in read.name:
            ((first, last),) = read.ranges
            assert all(f"update/{read.name.split('.')[0]}/" in whole.graph.nodes[step] for step in (first, last))


def test_a_parameter_is_let_go_between_the_backward_pass_and_its_update(tmp_path: Path) -> None:
    """Where the optimizer keeps nothing, it is all that can pass: what it reads for others comes between."""
    model = models.build("gpt", num_layers=2, width=128, seq_len=16, vocabulary=1000)
    made = memonger.differentiate(model, loss="softmax_cross_entropy", optimizer=memonger.SGD(lr=0.01))
    whole = memonger.search_plan(made, device="cpu", threads=1)
    plan = memonger.search_plan(made, device="cpu", threads=1, budget=whole.total_bytes * 7 // 10, effort=100)
    assert plan.window is not None
    assert plan.window.nbytes < whole.parameter_bytes // 2
    reads = {read.name: read.ranges for read in weight_reads(plan.model, plan.graph)}
    assert len(reads["layer0/mlp/out.weight"]) == 3
    states = []
    for one, name in ((whole, "whole.onnx"), (plan, "planned.onnx")):
        one.save(tmp_path / name)
        session = memonger.TrainingSession(tmp_path / name)
        feeds = {"tokens": np.arange(16)[None], "labels": np.random.default_rng(0).integers(0, 16, (1, 1000))}
        losses = [session.step(feeds) for _ in range(3)]
        states.append((losses, session.state_dict()))
    assert states[0][0] == states[1][0]
    assert all(np.array_equal(states[1][1][name], value) for name, value in states[0][1].items())


def test_steps_have_the_bits_of_the_plan_that_holds_all(
    whole: memonger.Plan, plan: memonger.Plan, tmp_path: Path
) -> None:
    usual, session = memonger.TrainingSession(whole), memonger.TrainingSession(plan, state_folder=tmp_path)
    feeds = _feeds(usual)
    (reader,) = session.weight_readers
    for _ in range(3):
        assert session.step(feeds) == usual.step(feeds)
        assert not reader.why_not
        assert resident_state(session) == 0
    assert reader.last is not None
    assert (reader.last.nbytes, reader.last.written_bytes) == (plan.read_bytes, plan.written_bytes)
    theirs = usual.state_dict()
    for name, array in session.state_dict().items():
        assert np.array_equal(array, theirs[name])
    session.save(tmp_path / "state")
    # One tensor after the other, in each of two files, and what the system maps around it
    assert resident_state(session) <= 2 * (4 * WIDTH * WIDTH + 2 * APART)
    again = memonger.TrainingSession(plan)
    again.load(tmp_path / "state")
    usual.load(tmp_path / "state")  # each reads what the other wrote
    with session.release_training_state():
        result = session.evaluate({"v0": FEEDS["x"]})
    assert all(np.array_equal(array, usual.evaluate({"v0": FEEDS["x"]})[name]) for name, array in result.items())
    expected = usual.step(feeds)
    assert (session.step(feeds), again.step(feeds)) == (expected, expected)
    again.load_state_dict(theirs)
    usual.load_state_dict(theirs)
    assert again.step(feeds) == usual.step(feeds)
    session.export(tmp_path / "trained.onnx")
    trained = onnx.load(tmp_path / "trained.onnx").graph.initializer
    assert {one.name: onnx.numpy_helper.to_array(one).tobytes() for one in trained} == {
        name: session.state_dict()[name].tobytes() for name in (f"w{layer}" for layer in range(LAYERS))
    }


def test_micro_batches_are_added_up_in_a_file(tmp_path: Path) -> None:
    def session(*budgets: str | None) -> memonger.TrainingSession:
        first, other = (_plan(each, accumulate=kind) for each, kind in zip(budgets, ("apply", "add"), strict=True))
        return memonger.TrainingSession(first, accumulation=other, state_folder=tmp_path)

    usual, small = session(None, None), session("18MiB", "15MiB")
    feeds = _feeds(usual)
    second = {**feeds, "v0": normal(9, ROWS, WIDTH)}
    for batches in ([feeds, second, feeds], [second]):
        assert small.step(batches) == usual.step(batches)
    assert len(small.weight_readers) == 2
    assert resident_state(small) <= 4 * WIDTH * WIDTH + 2 * APART  # the sum that was set to zero last
    assert all(np.array_equal(array, usual.state_dict()[name]) for name, array in small.state_dict().items())


def test_a_reader_that_is_misled_changes_no_bit(planned: Path, whole: memonger.Plan) -> None:
    """Told too early that the last update is over it drops all others, which steps write after that."""
    usual, session = memonger.TrainingSession(whole), memonger.TrainingSession(planned)
    feeds, follower = _feeds(usual), session.weight_readers[0]._follower
    follower._newest = lambda *_: len(follower._schedule.reads) - 1  # type: ignore[method-assign]
    for _ in range(2):
        assert session.step(feeds) == usual.step(feeds)


KILLED = """
import os, signal, sys
from pathlib import Path
import memonger
from memonger.runtime.weight_reader import _Follower
from tests.runtime.test_state_in_file import _feeds
session = memonger.TrainingSession(sys.argv[1])
feeds = _feeds(session)
session.step(feeds)
session.save(sys.argv[2])
reads = session.weight_readers[0]._follower._schedule.reads
kill = lambda follower, pages, number: number > len(reads) // 2 and os.kill(os.getpid(), signal.SIGKILL)
_Follower._drop = kill
session.step(feeds)
"""


def test_what_a_killed_process_saved_opens_and_nothing_else_is_left(
    planned: Path, whole: memonger.Plan, tmp_path: Path
) -> None:
    """It ends behind the first updates of a step, by the thread that reads."""
    state, before = tmp_path / "state", sorted(planned.parent.iterdir())
    ended = subprocess.run([sys.executable, "-c", KILLED, str(planned), str(state)], cwd=Path(__file__).parents[2])
    assert ended.returncode == -signal.SIGKILL
    assert sorted(planned.parent.iterdir()) == before
    usual, session = memonger.TrainingSession(whole), memonger.TrainingSession(planned)
    feeds = _feeds(usual)
    usual.step(feeds)
    session.load(state)
    assert session.step(feeds) == usual.step(feeds)


def test_a_state_that_changes_while_it_is_read_is_refused(
    planned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is compared when it is opened, and again where a tensor is taken over; then the state is another part each."""
    session = memonger.TrainingSession(planned)
    feeds = _feeds(session)
    session.step(feeds)
    session.save(tmp_path / "state")
    take_over = memonger.TrainingSession._take_over

    def spoiled(self: memonger.TrainingSession, tensors: dict[str, np.ndarray]) -> None:
        content = bytearray((tmp_path / "state").read_bytes())
        content[-1] ^= 1
        (tmp_path / "state").write_bytes(content)
        take_over(self, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(memonger.TrainingSession, "_take_over", spoiled)
        with pytest.raises(memonger.SessionError, match="was changed since it was written"):
            session.load(tmp_path / "state")
    with pytest.raises(memonger.SessionError, match="Load a saved state"):
        session.step(feeds)


def test_a_folder_that_cannot_have_the_state_is_told(planned: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    hint = r"Say where else \(state_folder='FOLDER'\), or plan with a larger budget\."
    for folder, why in ((tmp_path / "none", "No such file"), (tmp_path / "file", "Not a directory")):
        with pytest.raises(memonger.SessionError, match=rf"{folder} can't have a file for .* MiB .* {why}.*{hint}"):
            memonger.TrainingSession(planned, state_folder=folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))  # as a disk that is full
    try:
        with pytest.raises(memonger.SessionError, match=rf"{planned.parent} can't have .*File too large. {hint}"):
            memonger.TrainingSession(planned)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_the_file_is_beside_the_plan_or_where_it_is_asked_for(planned: Path, tmp_path: Path) -> None:
    for given, folder in ((None, planned.parent), (tmp_path, tmp_path)):
        session = memonger.TrainingSession(planned, state_folder=given)
        (reader,) = session.weight_readers
        links = {os.readlink(file.path) for file in reader._files}
        assert links
        assert all(link.startswith(f"{folder}{os.sep}") and link.endswith("(deleted)") for link in links)
