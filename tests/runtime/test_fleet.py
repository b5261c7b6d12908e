"""Fleets: models that share arenas, workspace and weights; limits; models that are let go and come back; pipelines."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import memonger
from memonger.serving import fleet as fleets
from tests.support import networks

ROWS, WIDTH = 4, 512


def _model(hidden: int, seed: int = 0) -> onnx.ModelProto:
    """A lookup table that is the same in all models, and two products that aren't."""
    table = np.random.default_rng(0).standard_normal((256, WIDTH)).astype(np.float32)
    rng = np.random.default_rng(seed)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"], name="gather"),
        helper.make_node("MatMul", ["rows", "w"], ["h"], name="up"),
        helper.make_node("Tanh", ["h"], ["a"], name="tanh"),
        helper.make_node("MatMul", ["a", "v"], ["y"], name="down"),
    ]
    w = rng.standard_normal((WIDTH, hidden)).astype(np.float32) / 16
    v = rng.standard_normal((hidden, 8)).astype(np.float32) / 16
    made = networks.model_of(nodes, {"ids": [ROWS]}, {"y": [ROWS, 8]}, table=table, w=w, v=v)
    made.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    return made


def _ids(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, ROWS)


@pytest.fixture(scope="module")
def plans() -> dict[str, memonger.Plan]:
    """Planned models by name, of different sizes."""
    sizes = {"small": 64, "middle": 256, "large": 1024}
    return {n: memonger.search_plan(_model(size), device="cpu", mode="inference") for n, size in sizes.items()}


@pytest.fixture(scope="module")
def paths(plans: dict[str, memonger.Plan], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("fleet")
    for name, plan in plans.items():
        plan.save(folder / f"{name}.onnx")
    return {name: folder / f"{name}.onnx" for name in plans}


@pytest.fixture(scope="module")
def expected(plans: dict[str, memonger.Plan]) -> dict[tuple[str, int], np.ndarray]:
    """What stock onnxruntime gives, by model and seed."""
    stock = {name: networks.stock(_model({"small": 64, "middle": 256, "large": 1024}[name])) for name in plans}
    return {(n, seed): networks.run_stock(stock[n], {"ids": _ids(seed)})["y"] for n in plans for seed in range(8)}


def test_models_share_an_arena_as_large_as_the_largest_needs(
    plans: dict[str, memonger.Plan], expected: dict[tuple[str, int], np.ndarray]
) -> None:
    with memonger.Fleet(plans) as fleet:
        assert list(fleet) == list(plans)
        for seed in range(8):
            for name in ("small", "large", "middle", "small"):
                assert (fleet[name].run({"ids": _ids(seed)})["y"] == expected[name, seed]).all()
        memory = fleet.memory()
        assert memory.arenas == max(plan.arena_bytes for plan in plans.values())
        assert memory.weights == sum(plan.parameter_bytes for plan in plans.values())
        assert fleet._places[0].arena.size == memory.arenas


def test_equal_plans_are_loaded_once_and_equal_tables_lie_once(plans: dict[str, memonger.Plan]) -> None:
    again = memonger.search_plan(_model(64), device="cpu", mode="inference")
    with memonger.Fleet({"a": plans["small"], "b": again, "c": plans["middle"]}) as fleet:
        assert fleet._members["a"].model is fleet._members["b"].model
        assert fleet.memory().weights == plans["small"].parameter_bytes + plans["middle"].parameter_bytes
        one, other = (fleet._members[name].model.engines[0].session.memonger_lent for name in ("a", "c"))  # type: ignore[union-attr]
        assert one["table"] is other["table"]
        fleet.remove("a")
        assert fleet["b"].run({"ids": _ids(0)})["y"].shape == (ROWS, 8)


def test_threads_run_at_once_in_arenas_of_their_own(
    plans: dict[str, memonger.Plan], expected: dict[tuple[str, int], np.ndarray]
) -> None:
    with memonger.Fleet(plans, arenas=2) as fleet, ThreadPoolExecutor(4) as pool:
        asked = [(name, seed) for seed in range(8) for name in plans] * 4
        answers = pool.map(lambda key: fleet[key[0]].run({"ids": _ids(key[1])})["y"], asked)
        assert all((answer == expected[key]).all() for key, answer in zip(asked, answers, strict=True))
        assert fleet.memory().arenas == 2 * max(plan.arena_bytes for plan in plans.values())
        assert 'memonger_runs_total{model="small"} 32' in fleet.metrics()


def test_a_run_waits_for_an_arena_no_longer_than_it_was_told(plans: dict[str, memonger.Plan]) -> None:
    with memonger.Fleet(plans, wait=0.01) as fleet:
        held = fleet._free.pop()
        with pytest.raises(memonger.SessionError, match=r"no arena was free within 0\.01 s"):
            fleet["small"].run({"ids": _ids(0)})
        fleet._free.append(held)
        fleet["small"].run({"ids": _ids(0)})


def _need(*plans: memonger.Plan) -> int:
    """What a fleet of these takes, computed here."""
    own = sum(plan.parameter_bytes + (plan.session_bytes or 0) for plan in plans)
    return own + max(p.arena_bytes for p in plans) + max(p.workspace_bytes or 0 for p in plans)


def test_a_limit_lets_the_least_recently_used_go_and_they_come_back(
    plans: dict[str, memonger.Plan], paths: dict[str, Path], expected: dict[tuple[str, int], np.ndarray]
) -> None:
    limit = _need(plans["middle"], plans["large"])
    with memonger.Fleet({"small": paths["small"], "middle": paths["middle"]}, limit=limit) as fleet:
        fleet["small"].run({"ids": _ids(0)})
        fleet.add("large", paths["large"])
        loaded = {name for name in fleet if f'memonger_loaded{{model="{name}"}} 1' in fleet.metrics()}
        assert loaded == {"small", "large"}  # the one that never ran went
        for seed in range(3):
            for name in ("middle", "large", "small"):
                assert (fleet[name].run({"ids": _ids(seed)})["y"] == expected[name, seed]).all()
                assert fleet.memory().total <= limit
        for name in fleet:  # each has gone for the next one
            assert f'memonger_loads_total{{model="{name}"}} 4' in fleet.metrics()
        again = fleet._members["small"].model
        assert again is not None
        assert not again.engines[0].unchecked  # its order was looked at when it was loaded first
        assert fleet._members["small"].checked


def test_models_are_loaded_in_one_thread(plans: dict[str, memonger.Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    """What models that go leave free in the memory of many threads isn't given back to the system."""
    threads, load = set[int](), fleets.LoadedModel

    def loaded(*given: Any, **options: Any) -> Any:
        threads.add(threading.get_ident())
        return load(*given, **options)

    monkeypatch.setattr(fleets, "LoadedModel", loaded)
    callers = [threading.Thread(target=memonger.Fleet, args=({name: plan},)) for name, plan in plans.items()]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(callers) > 1 == len(threads)
    assert threads.isdisjoint({caller.ident for caller in callers})


def test_who_waits_for_a_loaded_model_comes_first_but_for_a_while(
    plans: dict[str, memonger.Plan], paths: dict[str, Path]
) -> None:
    with memonger.Fleet({n: paths[n] for n in ("large", "small")}, limit=_need(plans["large"])) as fleet:
        turns = [fleets._Turn((name,), is_run=True) for name in ("large", *["small"] * 40, "large")]
        with fleet._changed:
            fleet._queue.extend(turns)
            fleet._serve()
            served = list[str]()
            while fleet._queue or fleet._served:
                (turn,) = (one for one in turns if one.members)
                fleet._load(turn)
                served += turn.names
                fleet._end(turn)
                turns.remove(turn)
    most = fleets.MOST_OVERTAKEN
    assert served == ["small"] * most + ["large"] * 2 + ["small"] * (40 - most)


def test_a_file_comes_back_from_where_it_was_when_it_was_added(
    plans: dict[str, memonger.Plan], paths: dict[str, Path], expected: dict[tuple[str, int], np.ndarray],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(paths["large"].parent)
    with memonger.Fleet({n: paths[n].name for n in ("large", "small")}, limit=_need(plans["large"])) as fleet:
        monkeypatch.chdir(tmp_path)
        for name in ("large", "small"):
            assert (fleet[name].run({"ids": _ids(0)})["y"] == expected[name, 0]).all()


def test_what_can_never_fit_is_refused_with_the_bytes(plans: dict[str, memonger.Plan], paths: dict[str, Path]) -> None:
    need = _need(plans["large"])
    with pytest.raises(memonger.SessionError, match=f"'large' doesn't fit: .*{need} bytes.*{need - 1} bytes"):
        memonger.Fleet({"large": paths["large"]}, limit=need - 1)
    with memonger.Fleet({"large": plans["large"]}, limit=need) as fleet:
        with pytest.raises(memonger.SessionError, match="with 1 that weren't given as paths"):
            fleet.add("small", paths["small"])
        assert list(fleet) == ["large"]
        fleet["large"].run({"ids": _ids(0)})


def test_runs_that_need_each_others_room_take_turns(
    plans: dict[str, memonger.Plan], paths: dict[str, Path], expected: dict[tuple[str, int], np.ndarray]
) -> None:
    """Each model alone fits: threads that run both make the other go, and none of them fails or waits forever."""
    with memonger.Fleet(limit=_need(plans["large"]), arenas=1) as fleet:
        fleet.add("middle", paths["middle"])
        fleet.add("large", paths["large"])
        wrong: list[str] = []

        def call(name: str) -> None:
            answers = [fleet[name].run({"ids": _ids(seed)})["y"] for seed in range(3)]
            wrong.extend(name for seed in range(3) if (answers[seed] != expected[name, seed]).any())

        threads = [threading.Thread(target=call, args=(name,)) for name in ("middle", "large")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong
        assert not any(thread.is_alive() for thread in threads)


def test_a_name_more_for_a_model_that_was_let_go_is_no_model_more(
    plans: dict[str, memonger.Plan], paths: dict[str, Path]
) -> None:
    with memonger.Fleet({"small": paths["small"]}, limit=_need(plans["large"])) as fleet:
        fleet.add("large", paths["large"])
        assert fleet._members["small"].model is None
        fleet.add("again", paths["small"])
        assert fleet._members["small"] is fleet._members["again"]
        assert fleet.memory().weights == plans["small"].parameter_bytes


def test_a_pipeline_that_does_not_fit_the_limit_is_refused_when_it_is_made(
    plans: dict[str, memonger.Plan], paths: dict[str, Path]
) -> None:
    middle = networks.model_of(
        [
            helper.make_node("Softmax", ["y"], ["p"], name="softmax"),
            helper.make_node("MatMul", ["p", "w"], ["q"], name="q"),
        ],
        {"y": [ROWS, 8]}, {"q": [ROWS, 8192]}, w=np.ones((8, 8192), np.float32),
    )  # fmt: skip
    after = memonger.search_plan(middle, device="cpu", mode="inference")
    both = _need(plans["small"], after)
    kept = ROWS * 8 * 4
    for limit in (both, both + kept):
        with memonger.Fleet({"small": paths["small"]}, limit=limit, wait=0) as fleet:
            after.save(paths["small"].parent / "after.onnx")
            fleet.add("after", paths["small"].parent / "after.onnx")
            reads = {"small": {}, "after": {"y": "y"}}
            if limit == both:
                with pytest.raises(
                    memonger.SessionError, match=f"pipeline of 'small', 'after' doesn't fit: .*{limit} b"
                ):
                    fleet.pipeline(reads)
                assert fleet.memory().total <= limit
            else:
                chain = fleet.pipeline(reads)
                assert chain.run({"ids": _ids(0)})["q"].shape == (ROWS, 8192)
                assert fleet.memory().total == limit


def test_a_file_that_was_changed_does_not_come_back_as_another_model(
    plans: dict[str, memonger.Plan], paths: dict[str, Path], tmp_path: Path
) -> None:
    own = tmp_path / "own.onnx"
    plans["small"].save(own)
    with memonger.Fleet({"own": own}, limit=_need(plans["large"])) as fleet:
        fleet.add("large", paths["large"])
        plans["middle"].save(own)
        with pytest.raises(memonger.SessionError, match="was changed since it was added"):
            fleet["own"].run({"ids": _ids(0)})


def test_a_pipeline_keeps_what_one_model_computes_for_the_next() -> None:
    first = networks.model_of(
        [helper.make_node("Relu", ["x"], ["crop"], name="relu"), helper.make_node("Neg", ["x"], ["score"], name="neg")],
        {"x": [2, 64]}, {"crop": [2, 64], "score": [2, 64]},
    )  # fmt: skip
    second = networks.model_of(
        [helper.make_node("Mul", ["image", "scale"], ["y"], name="mul")],
        {"image": [2, 64], "scale": [1]},
        {"y": [2, 64]},
    )
    plans = {n: memonger.search_plan(m, mode="inference") for n, m in {"detector": first, "classifier": second}.items()}
    x, scale = np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64), np.array([3], np.float32)
    with memonger.Fleet(plans, arenas=2) as fleet:
        before = fleet.memory()
        chain = fleet.pipeline({"detector": {}, "classifier": {"image": "crop"}})
        assert (chain.input_names, chain.output_names) == (("x", "scale"), ("y",))
        assert (chain.run({"x": x, "scale": scale})["y"] == np.maximum(x, 0) * 3).all()
        assert fleet.memory().total == before.total + 2 * 2 * 64 * 4
        for wrong, said in (
            ({"detector": {}, "classifier": {"picture": "crop"}}, "'classifier' has no input 'picture'"),
            ({"detector": {}, "classifier": {"image": "box"}}, "no model before 'classifier' has an output 'box'"),
            ({"classifier": {"image": "crop"}, "detector": {}}, "no model before 'classifier'"),
            ({"other": {}}, "the fleet has no model 'other'"),
        ):
            with pytest.raises(memonger.SessionError, match=said):
                fleet.pipeline(wrong)
        with pytest.raises(memonger.SessionError, match="the pipeline has no input 'y'"):
            chain.run({"x": x, "scale": scale, "y": x})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"arenas": 0}, "arenas must be a whole number from 1 to 1024, not 0"),
        ({"wait": -1}, "wait=-1"),
        ({"limit": "much"}, "limit: 'much' is no size"),
        ({"idle_release": 0}, "idle_release=0"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(memonger.SessionError, match=said):
        memonger.Fleet(**arguments)  # type: ignore[arg-type]


def test_names_are_used_once_and_known(plans: dict[str, memonger.Plan]) -> None:
    fleet = memonger.Fleet({"small": plans["small"]})
    with pytest.raises(memonger.SessionError, match="has a model 'small' already"):
        fleet.add("small", plans["large"])
    with pytest.raises(memonger.SessionError, match="no model 'large'; it has 'small'"):
        fleet["large"]
    fleet.close()
    with pytest.raises(memonger.SessionError, match="the fleet is closed"):
        fleet["small"]
