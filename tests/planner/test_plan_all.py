"""Plans of many models: those that `search_plan` makes, in one folder, whatever fails and however many at a time."""

import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest

import memonger
from memonger.errors import PlanError, PlanFileError, RuntimeUnavailableError
from memonger.planner import cache, plan_all, search_plan
from tests.support.open_models import block, layers
from tests.support.planning_models import LOSS

PORTABLE: dict[str, Any] = {"devices": ["none"], "chunks": "off"}


class Deadly:
    """Ends the process that reads it from a pickle."""

    def __reduce__(self) -> tuple[Callable[[int], object], tuple[int]]:
        """Not to be copied."""
        return os._exit, (9,)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two models in files."""
    onnx.save(block(), tmp_path / "block.onnx")
    onnx.save(layers(), tmp_path / "layers.onnx")
    return [tmp_path / "block.onnx", tmp_path / "layers.onnx"]


def test_every_plan_is_that_of_search_plan(files: list[Path], tmp_path: Path) -> None:
    asked: dict[str, Any] = {"budgets": ["100%", 9000], "batches": [2, 4], "strategy": "budget"}
    rows = memonger.plan_all(files, output=tmp_path / "planned", **asked, **PORTABLE)
    assert [(row.name, row.batch, row.budget) for row in rows] == [
        (name, batch, budget) for name in ("block", "layers") for batch in (2, 4) for budget in ("100%", "9000")
    ]
    for row, path in zip(rows, [file for file in files for _ in range(4)], strict=True):
        whole = memonger.search_plan(path, batch=row.batch, device="none", strategy="none", chunks="off")
        assert row.budget_bytes == (whole.total_bytes if row.budget == "100%" else 9000)
        if row.error is not None:
            assert row.budget_bytes < whole.total_bytes
            continue
        plan = memonger.search_plan(path, batch=row.batch, budget=row.budget_bytes, device="none", chunks="off")
        plan.save(tmp_path / "alone.onnx")
        assert row.file is not None
        assert row.file.read_bytes() == (tmp_path / "alone.onnx").read_bytes()
        assert (row.total_bytes, row.arena_bytes, row.overhead) == (plan.total_bytes, plan.arena_bytes, plan.overhead)
    assert {row.error is None for row in rows} == {True, False}
    written = json.loads((tmp_path / "planned" / "memonger.json").read_text())
    assert [one["total_bytes"] for one in written["plans"]] == [row.total_bytes for row in rows]
    files_said = {str(row.file.relative_to(tmp_path / "planned")) for row in rows if row.file is not None}
    assert set(written["files"]) == files_said | {"memonger.json"}


def test_processes_make_the_same_plans_and_one_that_is_killed_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("joblib")
    monkeypatch.setattr(plan_all, "parent_process", object)  # one that multiprocessing started waits for its children
    models: dict[str, Any] = {"loaded": memonger.load(layers(), batch=4), "deadly": Deadly()}
    here = memonger.plan_all({"loaded": models["loaded"]}, output=tmp_path / "here", **PORTABLE)
    rows = memonger.plan_all(models, jobs=2, output=tmp_path / "there", **PORTABLE)
    assert "was ended from outside" in str(rows[1].error)
    assert here[0].file is not None
    assert rows[0].file is not None
    assert here[0].file.read_bytes() == rows[0].file.read_bytes()
    assert not [child for child in multiprocessing.active_children() if "Loky" in type(child).__name__]


def test_a_model_that_fails_stops_no_other(files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.onnx").write_text("none")
    told = list[str]()
    found = memonger.plan_all(
        {"bad": tmp_path / "bad.onnx", "missing": tmp_path / "no.onnx", "none": None, "good": files[1]},  # type: ignore[dict-item]
        budgets=["100%"], loss=LOSS, progress=told.append, **PORTABLE,
    )  # fmt: skip
    errors = [str(row.error) for row in found]
    assert ["is not an ONNX model" in errors[0], "no such file" in errors[1], "not as None" in errors[2]] == [True] * 3
    assert found[3].error is None
    assert found[3].mode == "training"
    assert told[-1] == "8 of 8: good"

    def broken(*_: object, **__: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(plan_all, "search_plan", broken)
    assert memonger.plan_all(files, **PORTABLE)[1].error == "KeyError: 'x'"


def test_what_was_planned_before_is_kept(files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.FOLDER, str(tmp_path / "kept"))
    plan, made = search_plan._search_plan, list[object]()
    monkeypatch.setattr(search_plan, "_search_plan", lambda *given: made.append(given) or plan(*given))
    first, again = (memonger.plan_all(files, batches=[1, 2], **PORTABLE) for _ in range(2))
    assert len(made) == 4
    assert [row.total_bytes for row in first] == [row.total_bytes for row in again]


def test_the_folder_is_there_whole_or_not_at_all(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "planned"
    memonger.plan_all(files[:1], output=folder, **PORTABLE)
    before = (folder / "block.planned.onnx").read_bytes()
    with pytest.raises(PlanFileError, match="is there already: name another folder, or replace it with force=True"):
        memonger.plan_all(files, output=folder, **PORTABLE)
    with pytest.raises(PlanFileError, match=r"wasn't written by memonger"):
        memonger.plan_all(files, output=_other(tmp_path), force=True, **PORTABLE)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_all, "search_plan", interrupted)
    with pytest.raises(KeyboardInterrupt):
        memonger.plan_all(files, output=folder, force=True, **PORTABLE)
    assert [path.name for path in sorted(folder.iterdir())] == ["block.planned.onnx", "memonger.json"]
    assert (folder / "block.planned.onnx").read_bytes() == before
    monkeypatch.undo()
    memonger.plan_all(files[1:], output=folder, force=True, **PORTABLE)
    assert [path.name for path in sorted(folder.iterdir())] == ["layers.planned.onnx", "memonger.json"]
    with pytest.raises(PlanFileError, match="would be replaced"):
        memonger.plan_all([folder / "layers.planned.onnx"], output=folder, force=True, **PORTABLE)


def _other(tmp_path: Path) -> Path:
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").touch()
    return other


@pytest.mark.parametrize(
    ("models", "options", "message"),
    [
        ([], {}, r"models must be files, as \['a.onnx', 'b.onnx'\], or models by name, not \[\]"),
        ("a.onnx", {}, "models must be files"),
        (["x/a.onnx", "y/a.onnx"], {}, r"x/a.onnx and y/a.onnx would both be 'a': rename one. Or give them by name"),
        ([onnx.ModelProto()], {}, r"a model in memory is given with a name, as \{'resnet': model\}, not ModelProto"),
        ({"a/b": "a.onnx"}, {}, "'a/b' can't name a model"),
        (["a.onnx"], {"jobs": 0}, "jobs must be a whole number from 1 to 1024, not 0"),
        (["a.onnx"], {"engine": "jobli"}, "engine must be 'joblib' or 'ray', not 'jobli'. Did you mean 'joblib'?"),
        (["a.onnx"], {"budgets": ["120%"]}, "'120%' is no percentage above 0 and up to 100"),
        (["a.onnx"], {"budgets": ["70 per cent"]}, "'70 per cent' is no size"),
        (["a.onnx"], {"batches": [0]}, "batch must be a whole number from 1"),
        (["a.onnx"], {"budgets": ["70%"], "strategy": "sweep"}, "they take no budget"),
    ],
)
def test_wrong_calls_are_told_before_anything_is_planned(models: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message.replace("?", r"\?")):
        memonger.plan_all(models, **options)


@pytest.mark.parametrize(("engine", "extra"), [("joblib", "jobs"), ("ray", "ray")])
def test_an_engine_that_is_not_installed(engine: Any, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, engine, None)
    with pytest.raises(RuntimeUnavailableError, match=rf"need {engine} .*pip install 'memonger\[{extra}\]'"):
        memonger.plan_all(["a.onnx"], jobs=2, engine=engine)


def test_ray_has_as_many_at_a_time_as_jobs(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    most = list[int]()

    class RayError(Exception):
        pass

    def wait(running: list[Any]) -> tuple[list[Any], list[Any]]:
        most.append(len(running))
        return running[-1:], running[:-1]

    def get(task: tuple[int, Any]) -> Any:
        if task[0] == 2:
            raise RayError
        return plan_all._elsewhere(*task)

    remote = SimpleNamespace(remote=lambda *task: task)
    ray = SimpleNamespace(
        is_initialized=lambda: True, remote=lambda **_: lambda _: remote, wait=wait, get=get,
        exceptions=SimpleNamespace(RayError=RayError),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv(cache.FOLDER, raising=False)
    rows = memonger.plan_all(files, batches=[1, 2], jobs=3, engine="ray", **PORTABLE)
    assert most == [3, 3, 2, 1]
    here = memonger.plan_all(files, batches=[1, 2], **PORTABLE)
    assert [row.total_bytes for row in rows] == [None if n == 2 else row.total_bytes for n, row in enumerate(here)]
    assert "was ended from outside" in str(rows[2].error)
