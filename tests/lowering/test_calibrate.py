"""What calibration takes from its runs, and what no run shows and is added."""

import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import memonger
from memonger.devices import CPU, Cuda, Device
from memonger.ir.model import Model
from memonger.ir.names import name_nodes
from memonger.lowering import calibrate
from memonger.plan_records import Spent
from memonger.runtime import ort, process_memory, profile
from memonger.runtime.weights import session_of
from tests.support.stock import parse

pytest.importorskip("onnxruntime")

ELEMENTS = 1 << 20
SCATTER = f"""
g (float[{ELEMENTS}] x, int64[{ELEMENTS}] i) => (float[{ELEMENTS}] y)
{{ a = Neg(x)  y = ScatterElements <axis=0> (a, i, x) }}
"""


MEASURED = """
import memonger
from memonger.runtime import feeds as feeding, process_memory
from memonger.runtime.program import inputs_of
from tests.lowering.test_calibrate import ELEMENTS, SCATTER
from tests.support.stock import parse
plan = memonger.search_plan(parse(SCATTER), mode="inference", device="cpu")
session, feeds = memonger.Session(plan), feeding.random_feeds(inputs_of(plan.model.graph))
feeds["i"] %= ELEMENTS
session.run(feeds, copy=False)
print(process_memory.peak_over(process_memory.settle(), lambda: session.run(feeds, copy=False)))
"""


def test_indices_that_are_copied_past_the_allocator_are_workspace() -> None:
    plan = memonger.search_plan(parse(SCATTER), mode="inference", device="cpu")
    assert plan.workspace_bytes == 8 * ELEMENTS
    if not process_memory.is_measurable():
        return
    # in a process of its own: another test's memory, freed and still resident, would take the indices
    told = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True)
    assert int(told.stdout) == pytest.approx(plan.workspace_bytes, rel=0.1)


SMALL = "g (float[8] x) => (float[8] y) { a = Neg(x)  b = Abs(a)  y = Neg(b) }"


def _named(text: str) -> ir.Model:
    model = ir.from_proto(parse(text))
    name_nodes(Model(model, "test"))
    return model


def _calibrated(
    folder: Path, wanted: calibrate.Wanted | None = None, spent: Spent | None = None
) -> calibrate.CalibratingRun:
    return calibrate.run(_named(SMALL), CPU, folder, Cuda(), 1, (None,), wanted, spent)[0]


def test_times_are_the_median_of_the_runs_after_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = profile.read_runs

    def timed(path: Path) -> tuple[tuple[profile.NodeRun, ...], ...]:
        runs = read(path)
        return tuple(
            tuple(replace(node, seconds=seconds) for node in run)
            for run, seconds in zip(runs, (9.0, 1.0, 4.0), strict=True)
        )

    monkeypatch.setattr(profile, "read_runs", timed)
    run = _calibrated(tmp_path)
    assert set(run.seconds.values()) == {2.5}  # type: ignore[union-attr]
    assert len(run.seconds) == 3  # type: ignore[arg-type]


def test_many_nodes_are_timed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "LATER_NODES", 0)
    assert _calibrated(tmp_path, spent=(spent := Spent())).seconds
    assert spent.runs == 2


@pytest.mark.parametrize(("seconds", "of_system", "runs"), [(20.0, 0.5, 1), (20.0, 9.0, 3), (0.5, 0.0, 3)])
def test_a_long_first_run_is_timed_where_little_of_it_is_the_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, of_system: float, runs: int
) -> None:
    clock = iter([(1.0, 2.0, 0.0, 0.0, 3.0), (1.0 + 20 - of_system, 2.0 + of_system, 0.0, 0.0, 3.0 + seconds)])
    monkeypatch.setattr(calibrate.os, "times", lambda: next(clock))
    assert len(_calibrated(tmp_path, spent=(spent := Spent())).seconds or ()) == 3
    assert spent.runs == runs


def test_a_model_runs_no_more_often_than_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "FEW", 0)

    def runs(**wanted: Any) -> tuple[int, calibrate.CalibratingRun]:
        run = _calibrated(tmp_path, calibrate.Wanted(**wanted), spent := Spent())
        assert spent.seconds > 0
        return spent.runs, run

    once, run = runs(times=False, results=True)
    assert once == 1
    assert len(run.seconds or ()) == 3
    assert runs(times=True)[0] == 3
    assert runs(times=True, results=True)[0] == 2  # another form runs, too: four in all
    assert runs(times=True, other=run.results)[0] == 1
    other, found = runs(times=True, other=(("no result of it",),))
    assert other == 2
    assert found.results == run.results


def test_all_sizes_of_a_range_are_measured_in_one_session(monkeypatch: pytest.MonkeyPatch) -> None:
    made, real = list[bool](), calibrate.session

    def session(model: ir.Model, device: Device, options: ort.SessionSettings) -> Any:
        made.append(options.profile is not None)
        return real(model, device, options)

    monkeypatch.setattr(calibrate, "session", session)
    plan = memonger.search_plan(parse(SMALL.replace("8", "N")), mode="inference", device="cpu", dims={"N": (2, 1024)})
    assert plan.spent is not None
    assert (plan.spent.runs, made.count(True)) == (3, 1)


def test_each_run_must_have_the_order_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    read = profile.read_runs
    monkeypatch.setattr(profile, "read_runs", lambda path: (*(runs := read(path))[:-1], runs[-1][::-1]))
    with pytest.raises(memonger.PlanError, match="doesn't run its own optimized model as written"):
        memonger.search_plan(parse(SMALL), mode="inference", device="cpu")


def test_a_profile_is_read_run_by_run(tmp_path: Path) -> None:
    """Those that failed, too: the nodes before the one that failed are a run of their own."""
    model = _named("g (float[4] x, int64[2] i) => (float[2] y) { a = Neg(x)  b = Gather(a, i)  y = Neg(b) }")
    session = session_of(model, CPU, ort.SessionSettings(in_order=True, profile=tmp_path / "profile"))
    x = np.ones(4, np.float32)
    for i in ([0, 1], [0, 99], [1, 0]):
        with suppress(Exception):
            session.run(None, {"x": x, "i": np.array(i)})
    runs = profile.read_runs(Path(session.end_profiling()))
    assert [node.op for node in runs[0]] == [node.op for node in runs[-1]] == ["Neg", "Gather", "Neg"]
    assert all(begin.begin <= end.begin for run in runs for begin, end in pairwise(run))
