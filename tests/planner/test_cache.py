"""Plans that ``MEMONGER_CACHE`` keeps: the same as those that are made, and made anew wherever something differs."""

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import memonger
from memonger.errors import BudgetError
from memonger.planner import cache, search_plan
from memonger.words import on_the_command_line
from tests.support.open_models import block
from tests.support.planning_models import LOSS, chain

ASKED: dict[str, dict[str, Any]] = {
    "inference": {"batch": 4, "chunks": 2},
    "any batch": {"dims": {"batch": (1, 8)}},
    "training": {"batch": 4, "loss": LOSS, "optimizer": memonger.SGD(momentum=0.9), "strategy": "sqrt"},
    "portable": {"batch": 4, "device": "none"},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's folder, which isn't there yet."""
    monkeypatch.setenv(cache.FOLDER, str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by one for each plan that isn't taken from the cache."""
    plan, plans = search_plan._search_plan, list[object]()
    monkeypatch.setattr(search_plan, "_search_plan", lambda *given: plans.append(given) or plan(*given))
    return plans


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.onnx"))


@pytest.mark.parametrize("asked", list(ASKED))
def test_a_kept_plan_is_the_one_that_was_made(asked: str, folder: Path, made: list[object], tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(block().SerializeToString())
    plans = [memonger.search_plan(source, **ASKED[asked]) for source in (tmp_path / "model.onnx", block())]
    assert len(made) == len(_entries(folder)) == 1
    for number, plan in enumerate(plans):
        assert plan.source is not None
        in_memory = dataclasses.replace(plan, source=dataclasses.replace(plan.source, path=None))  # files name theirs
        in_memory.save(tmp_path / f"{number}.onnx")
    assert (tmp_path / "0.onnx").read_bytes() == (tmp_path / "1.onnx").read_bytes()
    fresh, kept = plans
    for name in ("budget", "strategy", "outcome", "origins", "notes", "peak_before_bytes", "overhead", "chunks"):
        assert getattr(kept, name) == getattr(fresh, name), name
    for name in ("nodes", "costs", "forward", "workspace"):
        assert getattr(kept.graph, name) == getattr(fresh.graph, name), name
    np.testing.assert_array_equal(kept.live_before, fresh.live_before)
    assert kept.annotated.proto.graph.node == fresh.annotated.proto.graph.node


def test_whatever_decides_makes_another_plan(folder: Path, made: list[object]) -> None:
    def plans(source: onnx.ModelProto, **options: Any) -> int:
        memonger.search_plan(source, device="none", **options)
        return len(made)

    assert [plans(block(), batch=2), plans(block(), batch=2), plans(block(), batch=3)] == [1, 1, 2]
    other = block()
    other.graph.initializer[0].raw_data = other.graph.initializer[0].raw_data[:-1] + b"\1"
    assert plans(other, batch=2) == 3
    other.graph.node[0].metadata_props.add(key="mirror_stage", value="True")
    assert plans(other, batch=2, mode="inference") == 4
    inputs = {"x": np.zeros((2, 3, 8, 8), np.float32)}
    assert [plans(block(), inputs=inputs), plans(block(), inputs={"x": inputs["x"] + 1})] == [5, 6]


def test_a_loss_of_the_callers_own_is_planned_anew(folder: Path, made: list[object]) -> None:
    class Own(memonger.SGD):
        pass

    for _ in range(2):
        memonger.search_plan(chain(2), loss=LOSS, optimizer=Own(), device="none")
    assert len(made) == 2
    assert not _entries(folder)


@pytest.mark.parametrize("damage", ["cut short", "no JSON", "too few costs", "another layout", "another's"])
def test_a_damaged_entry_is_planned_anew_and_replaced(damage: str, folder: Path, made: list[object]) -> None:
    def plan() -> memonger.Plan:
        return memonger.search_plan(block(), batch=2, device="none")

    fresh = plan()
    (entry,) = _entries(folder)
    content = entry.read_bytes()
    if damage == "another's":
        other = block()
        other.graph.node[0].name = "renamed"
        memonger.search_plan(other, batch=2, device="none")
        made.pop()
        (of_other,) = (path for path in _entries(folder) if path != entry)
        of_other.replace(entry)
    elif damage == "cut short":
        entry.write_bytes(content[: len(content) // 2])
    else:
        model = onnx.load(entry)
        texts = {prop.key: prop for prop in model.metadata_props}
        kept, layout = texts[cache.KEY], texts["memonger.plan"]
        if damage == "no JSON":
            kept.value = kept.value[:-1]
        elif damage == "too few costs":
            kept.value = kept.value.replace('"costs":[', '"costs":[],"others":[')
        else:
            layout.value = layout.value.replace('"arena_bytes":', '"arena_bytes":1')
            layout.value = layout.value.replace('"offsets":{', '"offsets":{"x":0,')
        onnx.save(model, entry)
    again = plan()
    assert len(made) == 2
    assert again.offsets == fresh.offsets
    assert entry.read_bytes() == content


def test_what_is_no_file_is_planned_anew(folder: Path, made: list[object], caplog: pytest.LogCaptureFixture) -> None:
    memonger.search_plan(block(), batch=2, device="none")
    (entry,) = _entries(folder)
    entry.unlink()
    os.mkfifo(entry)  # who opens it waits for ever
    memonger.search_plan(block(), batch=2, device="none")
    assert len(made) == 2
    assert "is no file" in caplog.text


def test_a_library_that_is_not_installed_is_no_reason_to_fail(
    folder: Path, made: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "LIBRARIES", (*cache.LIBRARIES, "a-library-that-nobody-has"))
    cache.versions.cache_clear()
    for _ in range(2):
        memonger.search_plan(block(), batch=2, device="none")
    cache.versions.cache_clear()
    assert len(made) == len(_entries(folder)) == 1


def test_a_folder_that_cant_be_written_costs_a_warning(
    folder: Path, made: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_bytes(b"a file")
    with caplog.at_level(logging.WARNING):
        plan = memonger.search_plan(block(), batch=2, device="none")
    assert dataclasses.is_dataclass(plan)
    assert cache.FOLDER in caplog.text
    assert str(folder) in caplog.text


def test_a_refused_budget_is_refused_again_with_the_same_words(
    folder: Path, made: list[object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(block().SerializeToString())

    def refused(source: Any = path, **options: Any) -> BudgetError:
        with pytest.raises(BudgetError) as raised:
            memonger.search_plan(source, batch=4, budget=9000, device="none", chunks="off", **options)
        return raised.value

    first, again = refused(), refused()
    assert len(made) == 1
    assert str(again) == str(first)
    assert "memonger.fit('" in str(first)
    assert (again.budget, again.smallest, again.lower_bound) == (first.budget, first.smallest, first.lower_bound)
    with on_the_command_line():
        assert "memonger fit " in str(refused())
    renamed = tmp_path / "renamed.onnx"
    renamed.write_bytes(path.read_bytes())
    assert "renamed.onnx" in str(refused(renamed))
    for _ in range(2):
        refused(time_limit=100)  # with more time there may be a plan
    assert len(made) == 5
    files = sorted(folder.rglob("*.refused.json"))
    assert len(files) == 3
    for file, text in zip(files, ("{", '{"smallest": "1", "lower_bound": 1, "hint": ""}', "[]"), strict=True):
        file.write_text(text)
    assert str(refused()) == str(first)
    assert len(made) == 6
    assert "is planned anew" in caplog.text
