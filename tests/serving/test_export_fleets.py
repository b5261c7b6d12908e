"""Exports of several models: a folder or a mapping of plans, served as one fleet."""

import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest

import memonger
from memonger.errors import BusyError, MemongerError, PlanError, PlanFileError, SessionError
from memonger.serving import export
from memonger.serving.serving import PlannedFleet, UnknownModelError
from tests.support import triton_stand_in
from tests.support.command_line import invoke
from tests.support.export_models import branched, images, planned
from tests.support.stock import normal, parse, run_stock
from tests.support.triton_stand_in import load, request_of


def rows_model() -> onnx.ModelProto:
    """Rows of a table, through a product: its input is called ``x`` as that of `branched` is, of another type."""
    model = parse("g (int64[N] x) => (float[N, 8] z) { r = Gather(t, x) z = MatMul(r, w) }")
    weights = {"t": normal(3, 5, 16), "w": normal(4, 16, 8)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


def rows(seed: int, batch: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).integers(0, 5, batch)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with plans of `branched` for two batches, and one of `rows_model`."""
    models = tmp_path / "models"
    (models / "branched").mkdir(parents=True)
    planned(models / "branched", (1, 4))
    plan = memonger.search_plan(rows_model(), batch=4, mode="inference", device="none")
    plan.save(models / "rows.planned.onnx")
    return models


MODELS = {"branched": (branched, images, "y"), "rows": (rows_model, rows, "z")}


def stock(name: str, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """What stock onnxruntime says of the original model, for a planned batch."""
    found: np.ndarray = run_stock(MODELS[name][0](), feeds, "ORT_DISABLE_ALL")[MODELS[name][2]]
    return found


@pytest.mark.parametrize("target", ["kserve", "ray", "bentoml", "triton-python"])
def test_a_folder_is_exported_with_all_its_models_and_the_memory_of_a_fleet(folder: Path, target: str) -> None:
    out = folder.parent / "out"
    arguments = ["export", str(folder), "--target", target, "-o", str(out), "--limit", "64MiB", "--wait", "2", "--json"]
    run = invoke(*arguments)
    assert run.exit_code == 0, run.output
    record = json.loads(run.stdout)
    assert (record["name"], record["models"]) == ("models", ["branched", "rows"])
    (settings,) = out.rglob("plans.json" if target == "triton-python" else "memonger.json")
    given = json.loads(settings.read_text())
    assert [len(files) for files in given["models"].values()] == [2, 1]
    assert (given["arenas"], given["limit"], given["wait"]) == (1, 64 << 20, 2)
    with memonger.Fleet(
        {name: [settings.parent / f for f in files] for name, files in given["models"].items()}
    ) as fleet:
        memory = fleet.memory()
    found = [record[f"{part}_bytes"] for part in ("parameter", "activation", "scratch")]
    assert found == [memory.weights, memory.arenas, memory.workspace]


def test_a_limit_bounds_what_is_predicted_and_a_note_says_what_goes(folder: Path) -> None:
    export(folder, "ray", folder.parent / "measured")
    measured = folder.parent / "measured" / "models"
    models = {name: [memonger.Plan.load(one) for one in sorted((measured / name).iterdir())] for name in MODELS}
    with memonger.Fleet(models) as fleet:
        limit = fleet.memory().total - 1
    done = export(models, "ray", folder.parent / "out", limit=limit)
    estimate = done.estimate
    assert estimate.parameters + estimate.activations + estimate.workspace <= limit
    assert any("take turns" in note for note in done.notes)
    everything = export(models, "ray", folder.parent / "all", limit=limit + 1)
    assert not any("take turns" in note for note in everything.notes)


def _empty(folder: Path) -> None:
    for file in folder.rglob("*.onnx"):
        file.unlink()


def _unplanned(folder: Path) -> None:
    onnx.save(rows_model(), folder / "other.onnx")


def _twice(folder: Path) -> None:
    (folder / "rows.onnx").write_bytes((folder / "rows.planned.onnx").read_bytes())


def _named_oddly(folder: Path) -> None:
    (folder / "rows.planned.onnx").rename(folder / "two rows.planned.onnx")


@pytest.mark.parametrize(
    ("change", "choices", "message"),
    [
        (_empty, {}, "holds no models: put planned files"),
        (_unplanned, {}, r"other\.onnx has no plan in it, and several models are served as they were planned"),
        (_twice, {}, r"rows\.onnx and .*rows\.planned\.onnx would both be 'rows'"),
        (_named_oddly, {}, "'two rows' can't be the model's name: it is part of a URL"),
        (None, {"limit": "64KiB"}, r"'branched' alone takes .* and the limit is 64\.0 KiB"),
        (None, {"limit": "much"}, "limit: 'much' is no size"),
        (None, {"arenas": 0}, "arenas must be a whole number from 1 to 1024, not 0"),
        (None, {"wait": -1}, "wait must be seconds from 0 to 86400, not -1"),
        (None, {"batches": [1, 2]}, "has a plan already: batches and options"),
        (None, {"target": "triton"}, "triton takes one model, and there are branched, rows"),
        (None, {"target": "openvino", "limit": "1GiB"}, "openvino runs models without memonger: limit"),
        (None, {"target": "triton-python", "arenas": 2}, "one batch at a time, and so it would use one of 2 arenas"),
        (None, {"target": "triton-python", "name": "rows"}, "'rows' is the name of all models together, and of one"),
    ],
)
def test_what_cannot_be_one_fleet_is_refused(folder: Path, change: Any, choices: Any, message: str) -> None:
    if change is not None:
        change(folder)
    with pytest.raises((PlanError, PlanFileError), match=message):
        export(folder, **{"target": "ray", "output": folder.parent / "out", **choices})
    assert not (folder.parent / "out").exists()


def test_a_plan_for_cuda_beside_one_for_the_cpu_is_refused(folder: Path) -> None:
    plan = memonger.Plan.load(folder / "rows.planned.onnx")
    models = {"rows": plan, "far": dataclasses.replace(plan, device="cuda:0")}
    with pytest.raises(PlanError, match="'far' is planned for cuda:0, and models share memory on the CPU alone"):
        export(models, "ray", folder.parent / "out")


def _served(folder: Path, **choices: Any) -> PlannedFleet:
    export(folder, "ray", folder.parent / "out", **choices)
    return PlannedFleet.load(folder.parent / "out" / "memonger.json")


def test_requests_at_once_to_several_models_get_the_bits_of_stock_onnxruntime(folder: Path) -> None:
    fleet = _served(folder, arenas=2)
    told: dict[tuple[str, str], float] = {}

    def add(figure: Any) -> Any:
        def grow(key: str, value: float, more: float) -> None:
            told[figure.name, key] = told.get((figure.name, key), 0) + more if figure.is_counter else value

        return grow

    fleet.report_to(add)
    asked = [(name, seed) for seed in range(6) for name in MODELS]

    async def ask() -> list[dict[str, np.ndarray]]:
        return await asyncio.gather(*(fleet.run(MODELS[name][1](seed, 4), name) for name, seed in asked))

    for (name, seed), answer in zip(asked, asyncio.run(ask()), strict=True):
        expected = stock(name, MODELS[name][1](seed, 4))
        assert answer[MODELS[name][2]].tobytes() == expected.tobytes()
    assert told["memonger_waiting", ""] == 0
    assert told["memonger_bytes", "arenas"] == fleet.fleet.memory().arenas > 0
    warm = {"branched": 2, "rows": 1}
    assert {name: told["memonger_runs_total", name] for name in MODELS} == {name: 6 + warm[name] for name in MODELS}
    assert all(f'memonger_runs_total{{model="{name}"}} {6 + warm[name]}' in fleet.fleet.metrics() for name in MODELS)


@pytest.mark.parametrize("wait", [0, 0.01])
def test_a_request_whose_turn_does_not_come_is_turned_away_and_the_next_one_is_answered(
    folder: Path, wait: float
) -> None:
    fleet = _served(folder, wait=wait)

    async def ask() -> None:
        await fleet._turns.acquire()
        with pytest.raises(BusyError, match="the server is busy: no turn came"):
            await fleet.run(rows(0, 4), "rows")
        fleet._turns.release()
        answer = await fleet.run(rows(0, 4), "rows")
        assert answer["z"].tobytes() == stock("rows", rows(0, 4)).tobytes()

    asyncio.run(ask())
    assert "memonger_turned_away_total 1\n" in fleet.fleet.metrics()


def test_models_say_what_requests_give_with_open_dimensions(folder: Path) -> None:
    plan = memonger.search_plan(
        parse("g (float[4, 2] x) => (float[2, 4] z) { z = Transpose(x) }"), mode="inference", device="none"
    )
    plan.save(folder / "turned.planned.onnx")
    fleet = _served(folder)
    assert fleet.model("branched").inputs == [{"name": "x", "datatype": "FP32", "shape": [-1, 3, 16, 16]}]
    assert fleet.model("rows").inputs == [{"name": "x", "datatype": "INT64", "shape": [-1]}]  # fewer are filled up
    assert fleet.model("rows").outputs == [{"name": "z", "datatype": "FP32", "shape": [-1, 8]}]
    assert fleet.model("turned").inputs == [{"name": "x", "datatype": "FP32", "shape": [4, 2]}]  # it takes no fewer


def test_bad_requests_are_refused_and_leave_the_others(folder: Path) -> None:
    fleet = _served(folder)
    bad = [
        ("nobody", images(0, 1), UnknownModelError, "there is no model 'nobody'; there are branched, rows"),
        (None, images(0, 1), UnknownModelError, "the request names no model"),
        (7, images(0, 1), UnknownModelError, "there is no model 7"),
        ("rows", images(0, 1), SessionError, r"was planned for \[4\]"),
        ("branched", {"x": np.zeros((1, 3, 8, 8), np.float32)}, SessionError, "no plan was made"),
        ("branched", images(0, 5), SessionError, "no plan was made"),
        ("branched", {"x": np.zeros((1, 3, 16, 16))}, SessionError, "has type float64"),
        ("rows", {"x": np.array([1, 99, 1, 1])}, SessionError, "onnxruntime failed"),
    ]
    for name, feeds, kind, message in bad:
        with pytest.raises(kind, match=message):
            asyncio.run(fleet.run(feeds, name))
    for name, (_, feeds_of, output) in MODELS.items():
        answer = asyncio.run(fleet.run(feeds_of(1, 4), name))
        assert answer[output].tobytes() == stock(name, feeds_of(1, 4)).tobytes()


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Triton's side of its Python backend."""
    module = triton_stand_in.backend_utils()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(triton_stand_in.MetricFamily, "figures", {})
    return module


def test_tritons_python_model_serves_a_folder_and_ensembles_name_its_models(folder: Path, backend: ModuleType) -> None:
    out = folder.parent / "out"
    export(folder, "triton-python", out, name="all", wait=2)
    model = load(out / "all" / "1" / "model.py")
    asked = [("branched", 1), ("rows", 2), ("branched", 2), ("rows", 1), ("nobody", 1), ("rows", 9)]
    feeds = [MODELS.get(name, MODELS["branched"])[1](seed, rows) for seed, (name, rows) in enumerate(asked)]
    feeds[-1] = {"x": np.zeros((1, 2), np.int64)}
    given = [
        {f"{name}/{key}": array for key, array in one.items()} for one, (name, _) in zip(feeds, asked, strict=True)
    ]
    answers = model.execute([request_of(one) for one in given])
    for (name, _), one, answer in zip(asked[:4], feeds[:4], answers[:4], strict=True):
        expected = stock(name, one)
        np.testing.assert_allclose(answer.outputs[f"{name}/{MODELS[name][2]}"], expected, rtol=1e-5, atol=1e-6)
    assert [answer.error.code for answer in answers[4:]] == [triton_stand_in.TritonError.INVALID_ARG] * 2
    assert triton_stand_in.MetricFamily.figures["memonger_runs_total", "rows"] >= 2
    config = (out / "all" / "config.pbtxt").read_text()
    assert config.count("optional: true") == 2
    assert "default_timeout_microseconds: 2000000" in config
    ensemble = (out / "rows" / "config.pbtxt").read_text()
    assert 'key: "rows/x"\n      value: "x"' in ensemble
    assert 'key: "rows/z"\n      value: "z"' in ensemble
    assert "max_batch_size: 4\n" in ensemble


def test_a_plan_for_a_range_of_sizes_is_served_at_each_of_them(folder: Path) -> None:
    plan = memonger.search_plan(rows_model(), dims={"N": (1, 6)}, mode="inference", device="none")
    plan.save(folder / "rows.planned.onnx")
    fleet = _served(folder)
    assert fleet.model("rows").outputs == [{"name": "z", "datatype": "FP32", "shape": [-1, 8]}]
    for batch in (6, 1, 3):
        answer = asyncio.run(fleet.run(rows(2, batch), "rows"))
        assert answer["z"].tobytes() == stock("rows", rows(2, batch)).tobytes()
    with pytest.raises(SessionError, match="1 to 6"):
        asyncio.run(fleet.run(rows(2, 7), "rows"))
    export(folder, "triton-python", folder.parent / "triton", name="all")
    ensemble = (folder.parent / "triton" / "rows" / "config.pbtxt").read_text()
    assert "max_batch_size: 0\n" in ensemble
    assert "dims: -1\n  dims: 8\n" in ensemble


def test_an_exported_folder_of_models_is_exported_again_as_the_same_fleet(folder: Path) -> None:
    export(folder, "ray", folder.parent / "out")
    export(folder.parent / "out" / "models", "ray", folder.parent / "again")
    first, second = (
        {str(one.relative_to(path)): one.read_bytes() for one in path.rglob("*.onnx")}
        for path in (folder.parent / "out", folder.parent / "again")
    )
    assert first == second
    with pytest.raises(MemongerError, match="lies in"):
        export(folder.parent / "out" / "models", "ray", folder.parent / "out", force=True)
