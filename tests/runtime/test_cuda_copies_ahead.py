"""Weights of a plan for a CUDA device that are copied ahead: while the steps run before those that read them.

On the stand-in copies are real, and those on a stream of the driver's are made when somebody waits for it, not before.
"""

import dataclasses
import gc
import json
import os
import pickle
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import helper

import memonger
from memonger.cli.commands import main
from memonger.errors import SessionError
from memonger.graph.ahead import PARTITIONS, PIECE, cut_schedule
from memonger.graph.weight_window import COPY
from memonger.ir.marks import AHEAD
from memonger.runtime import weight_reader
from memonger.runtime.cuda import driver
from memonger.runtime.cuda.copier import WeightCopier
from memonger.runtime.prepared import HostCopy
from tests.models.test_models import small
from tests.support.cuda import CUDA, needs_cuda, on_stand_in
from tests.support.networks import model_of
from tests.support.stock import normal

pytestmark = needs_cuda

KIB = 1 << 10
WIDTH, LAYERS = 256, 24
WEIGHT = 4 * WIDTH * WIDTH
OPTIONS: dict[str, Any] = {"mode": "inference", "device": "cuda:0", "level": "disable", "weights": "ahead"}
MAPPED = OPTIONS | {"weights": "mapped"}
FEED = {"x": np.arange(4, dtype=np.float32).reshape(1, 4)}


def _model(shared: bool = False) -> onnx.ModelProto:
    """Identities of weights, each of which the model returns, and of a constant in between."""
    names = [f"w{n}" for n in range(LAYERS)]
    nodes = [helper.make_node("Identity", [name], [f"y{n}"], name=f"identity{n}") for n, name in enumerate(names)]
    nodes += [helper.make_node("Identity", ["x"], ["z"], name="identity")]
    outputs = {f"y{n}": [WIDTH, WIDTH] for n in range(LAYERS)} | {"z": [1, 4]}
    constants = {name: normal(n, WIDTH, WIDTH) for n, name in enumerate(names)}
    if shared:
        nodes += [helper.make_node("Identity", ["c"], [f"c{n}"], name=f"constant{n}") for n in range(LAYERS)]
        nodes.sort(key=lambda node: int(node.name.lstrip("identycosa") or LAYERS))
        outputs |= {f"c{n}": [1000] for n in range(LAYERS)}
        constants["c"] = normal(99, 1000)
    return model_of(nodes, {"x": [1, 4]}, outputs, **constants)


def _plan(fewer: int = 16, model: onnx.ModelProto | None = None, **options: Any) -> memonger.Plan:
    """A plan that holds so many weights fewer than there are."""
    model = model or _model()
    whole = memonger.search_plan(model, **OPTIONS)
    return memonger.search_plan(model, **{**OPTIONS, "budget": whole.total_bytes - fewer * WEIGHT, **options})


@pytest.fixture(scope="module")
def plan() -> memonger.Plan:
    return _plan()


def _check(found: dict[str, np.ndarray]) -> None:
    assert [n for n in range(LAYERS) if not np.array_equal(found[f"y{n}"], normal(n, WIDTH, WIDTH))] == []
    assert np.array_equal(found["z"], FEED["x"])


def _in_use() -> int:
    room = driver.room(CUDA)
    return room.total - room.free


def _copying() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("memonger copies")]


def test_a_plan_says_what_it_copies_ahead_and_holds_its_budget(plan: memonger.Plan, tmp_path: Path) -> None:
    assert plan.budget is not None
    assert plan.total_bytes <= plan.budget
    assert 16 * WEIGHT <= plan.ahead_bytes <= plan.read_bytes == sum(plan.host_weights.values())
    assert plan.staging_bytes == 2 * WEIGHT <= 2 * PIECE
    marked = [node for node in plan.model.graph if AHEAD in node.metadata_props]
    assert {node.op_type for node in marked} == {COPY}
    assert len(marked) * WEIGHT == plan.ahead_bytes
    before = _in_use()
    with memonger.Session(plan) as session:
        assert 2 < len(session.engines) <= PARTITIONS
        for _ in range(2):
            _check(session.run(FEED))
        assert _in_use() - before <= plan.total_bytes + 64 * KIB
        assert not any(engine.unchecked for engine in session.engines)
    assert _in_use() == before


def test_the_same_plan_twice_and_from_its_file(plan: memonger.Plan, tmp_path: Path) -> None:
    for folder, made in (("a", plan), ("b", _plan())):
        (tmp_path / folder).mkdir()
        made.save(tmp_path / folder / "planned.onnx")
    first, again = (tmp_path / folder / "planned.onnx" for folder in "ab")
    assert first.read_bytes() == again.read_bytes()
    for loaded in (memonger.Plan.load(first), pickle.loads(pickle.dumps(plan))):
        figures = loaded.total_bytes, loaded.ahead_bytes, loaded.staging_bytes, loaded.read_bytes
        assert figures == (plan.total_bytes, plan.ahead_bytes, plan.staging_bytes, plan.read_bytes)
        with memonger.Session(loaded) as session:
            _check(session.run(FEED))
    with memonger.Session(first) as one, memonger.Session(first) as other:
        _check(one.run(FEED))
        _check(other.run(FEED))


@pytest.fixture(params=["early", "late"])
def whenever(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are made as soon as they may begin, before any step beside them runs; or when they are waited for."""
    before, copy, due = WeightCopier.before, WeightCopier._copy, threading.Event()

    def at_once(self: WeightCopier, partition: int) -> None:
        before(self, partition)
        for futures in self._begun.values():
            for future in futures:
                future.result()

    def at_last(self: WeightCopier, partition: int) -> None:
        due.set()
        before(self, partition)
        due.clear()

    def waiting(self: WeightCopier, copies: list[HostCopy]) -> None:
        if copies[0].wait:  # else it is when the session is made
            due.wait()
        copy(self, copies)

    monkeypatch.setattr(WeightCopier, "before", at_once if request.param == "early" else at_last)
    if request.param == "late":
        monkeypatch.setattr(WeightCopier, "_copy", waiting)


@pytest.mark.usefixtures("whenever")
def test_values_are_right_whenever_copies_are_made(plan: memonger.Plan) -> None:
    with memonger.Session(plan) as session:
        for _ in range(3):
            _check(session.run(FEED))


@pytest.mark.usefixtures("whenever")
@pytest.mark.parametrize("seed", range(5))
def test_networks_of_copies_have_their_values_within_the_budget(seed: int) -> None:
    """Weights of many sizes, read once or more, in chains and by outputs; budgets from the least to the most."""
    drawn = random.Random(seed)
    content = {f"w{n}": normal(n, drawn.choice([16_500, 30_000, 65_536, 100_000])) for n in range(drawn.randint(4, 12))}
    content["c"] = normal(99, drawn.randint(1, 4000))
    weights, nodes, made = dict(content), list[onnx.NodeProto](), list[str]()
    for n in range(drawn.randint(1, 3) * len(weights)):
        source = drawn.choice([*weights, f"w{n % (len(weights) - 1)}", *made[-3:]])
        nodes.append(helper.make_node("Identity", [source], [f"t{n}"], name=f"n{n}"))
        content[f"t{n}"] = content[source]
        made.append(f"t{n}")
    outputs = {name: list(content[name].shape) for name in made if drawn.random() < 0.5 or name == made[-1]}
    nodes.append(helper.make_node("Identity", ["x"], ["z"], name="identity"))
    model = model_of(nodes, {"x": [1, 4]}, outputs | {"z": [1, 4]}, **weights)
    whole, least = memonger.search_plan(model, **OPTIONS), memonger.search_plan(model, **MAPPED)
    for share in (0.1, 0.4, 0.7, 0.95):
        budget = int(least.total_bytes + share * (whole.total_bytes - least.total_bytes))
        plan = memonger.search_plan(model, budget=budget, **OPTIONS)
        assert plan.total_bytes <= budget
        before = _in_use()
        with memonger.Session(plan) as session:
            for _ in range(2):
                found = session.run(FEED)
                assert all(np.array_equal(found[name], content[name]) for name in outputs)
            assert _in_use() - before <= plan.total_bytes + 64 * KIB


@on_stand_in
@pytest.mark.parametrize("forgotten", ["the copy", "the stream"])
def test_nobody_would_be_right_without_waiting(
    forgotten: str, plan: memonger.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tests above rest on: a wait that is left out shows in values."""
    if forgotten == "the stream":
        monkeypatch.setattr(driver, "wait_for_stream", lambda index, stream: None)
    else:
        copy, give_up, over = WeightCopier._copy, WeightCopier.give_up, threading.Event()

        def slow(self: WeightCopier, copies: list[HostCopy]) -> None:
            over.wait()
            copy(self, copies)

        def end(self: WeightCopier) -> None:
            if self._begun:  # at the end of the run
                over.set()
            give_up(self)

        monkeypatch.setattr(WeightCopier, "_copy", slow)
        monkeypatch.setattr(WeightCopier, "give_up", end)
        monkeypatch.setattr(WeightCopier, "_wait_before", lambda self, partition: None)
    with memonger.Session(plan) as session, pytest.raises(AssertionError):
        _check(session.run(FEED))
    monkeypatch.undo()
    with memonger.Session(plan) as session:
        _check(session.run(FEED))


def test_a_weight_of_several_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("memonger.graph.ahead.PIECE", 100_000)
    plan = _plan()
    assert plan.staging_bytes == 200_000
    plan.save(tmp_path / "planned.onnx")
    for source in (plan, tmp_path / "planned.onnx"):
        with memonger.Session(source) as session:
            _check(session.run(FEED))


def test_a_copy_that_fails_ends_the_run_with_its_error(plan: memonger.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, calls = driver.to_device_later, list[int]()

    def fails(index: int, target: int, source: int, size: int, stream: object) -> None:
        calls.append(size)
        if len(calls) == 5:
            raise SessionError("copying 262144 bytes to cuda:0 failed: no luck.")
        copy(index, target, source, size, stream)

    monkeypatch.setattr(driver, "to_device_later", fails)
    with memonger.Session(plan) as session:
        with pytest.raises(memonger.SessionError, match="copying 262144 bytes to cuda:0 failed: no luck"):
            session.run(FEED)
        _check(session.run(FEED))


def test_a_run_that_is_interrupted_leaves_no_copy_under_way(
    plan: memonger.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = WeightCopier._wait_before

    def interrupted(self: WeightCopier, partition: int) -> None:
        if partition == 2:
            raise KeyboardInterrupt
        wait(self, partition)

    with memonger.Session(plan) as session:
        monkeypatch.setattr(WeightCopier, "_wait_before", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.run(FEED)
        copier = session._model._loaded[0].copier
        assert isinstance(copier, WeightCopier)
        assert not copier._begun
        monkeypatch.undo()
        _check(session.run(FEED))


def test_a_file_that_is_cut_short_during_a_run(
    plan: memonger.Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan.save(tmp_path / "planned.onnx")
    (data,) = tmp_path.glob("*.data")
    content = data.read_bytes()
    with memonger.Session(tmp_path / "planned.onnx") as session:
        _check(session.run(FEED))
        os.truncate(data, 4096)
        with pytest.raises(memonger.SessionError, match=rf"{data.name} was changed .* it is shorter now"):
            session.run(FEED)
        monkeypatch.setattr(weight_reader._DataFile, "check", lambda self: None)  # as if it had come later
        with pytest.raises(memonger.SessionError, match=rf"{data.name} was changed .* it is shorter now"):
            session.run(FEED)
        data.write_bytes(content)
        _check(session.run(FEED))


@pytest.mark.parametrize("is_closed", [True, False])
def test_the_thread_and_its_memory_end_with_the_session(is_closed: bool, plan: memonger.Plan) -> None:
    before, threads = _in_use(), len(_copying())
    session = memonger.Session(plan)
    _check(session.run(FEED))
    assert len(_copying()) == threads + 1
    thread = _copying()[-1]
    if is_closed:
        session.close()
        session.close()
        assert not thread.is_alive()
        with pytest.raises(memonger.SessionError, match="closed"):
            session.run(FEED)
    del session
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    assert _in_use() == before


def test_an_arena_that_moves_an_input_in_it_and_targets(plan: memonger.Plan) -> None:
    with memonger.Session(plan) as session:
        inside = session.run(FEED, copy=False)
        assert np.array_equal(inside["y20"].numpy(), normal(20, WIDTH, WIDTH))
        _check(session.run({"x": inside["z"]}))
        target = np.empty((WIDTH, WIDTH), np.float32)
        assert session.run(FEED, {"y23": target})["y23"] is target
        assert np.array_equal(target, normal(23, WIDTH, WIDTH))
        session.release()
        _check(session.run(FEED))


def test_constants_of_several_partitions_count_for_each() -> None:
    plan = _plan(model=_model(shared=True))
    assert plan.ahead_bytes
    assert plan.resident_parameter_bytes > plan.parameter_bytes - sum(plan.host_weights.values())
    before = _in_use()
    with memonger.Session(plan) as session:
        found = session.run(FEED)
        _check(found)
        assert all(np.array_equal(found[f"c{n}"], normal(99, 1000)) for n in range(LAYERS))
        assert _in_use() - before <= plan.total_bytes + 64 * KIB


def test_a_large_weight_of_several_partitions_lies_on_the_device_once(tmp_path: Path) -> None:
    """As an embedding that is the last product as well."""
    names = ["e", *(f"w{n}" for n in range(LAYERS)), "e"]
    nodes = [helper.make_node("Identity", [w], [f"t{n}"], name=f"identity{n}") for n, w in enumerate(names)]
    nodes.append(helper.make_node("Identity", ["x"], ["z"], name="identity"))
    outputs = {f"t{n}": [1000, 256] if name == "e" else [WIDTH, WIDTH] for n, name in enumerate(names)} | {"z": [1, 4]}
    weights = {f"w{n}": normal(n, WIDTH, WIDTH) for n in range(LAYERS)} | {"e": normal(99, 1000, 256)}
    plan = _plan(model=model_of(nodes, {"x": [1, 4]}, outputs, **weights))
    assert plan.ahead_bytes
    assert "e" not in plan.host_weights
    assert plan.resident_parameter_bytes == plan.parameter_bytes - sum(plan.host_weights.values())
    plan.save(tmp_path / "planned.onnx")
    before = _in_use()
    for source in (plan, tmp_path / "planned.onnx"):
        with memonger.Session(source) as session:
            for _ in range(2):
                found = session.run(FEED)
                assert all(np.array_equal(found[f"t{n}"], weights[name]) for n, name in enumerate(names))
                session.release()
            session.run(FEED)
            assert _in_use() - before <= plan.total_bytes + 64 * KIB
        assert _in_use() == before


def test_no_cuda_graph_replays_it(plan: memonger.Plan) -> None:
    with memonger.Session(plan) as session:
        assert "(MemcpyFromHost) copies from the host's memory" in session.why_no_cuda_graph
    with pytest.raises(memonger.SessionError, match="can't be used: node 'copy of w"):
        memonger.Session(plan, cuda_graph="on")


def test_the_command_says_so(plan: memonger.Plan, tmp_path: Path) -> None:
    onnx.save(_model(), tmp_path / "model.onnx")
    command = f"plan {tmp_path / 'model.onnx'} --mode inference --device cuda --level disable --weights ahead "
    command += f"--budget {plan.budget}B"
    run = CliRunner().invoke(main, [*command.split(), "--json"])
    assert run.exit_code == 0, run.output
    said = json.loads(run.stdout)["host_weights"]
    assert said["ahead_bytes"] == plan.ahead_bytes
    assert said["staging_bytes"] == plan.staging_bytes
    run = CliRunner().invoke(main, command.split())
    assert "are copied while the steps before run, through 512 KiB of the host's memory" in " ".join(run.output.split())


def test_on_another_device(plan: memonger.Plan) -> None:
    if driver.device_count() < 2:
        pytest.skip("needs two devices")
    with memonger.Session(plan) as one, memonger.Session(plan, device="cuda:1") as other:
        for session in (one, other, one):
            _check(session.run(FEED))


@pytest.fixture
def engines() -> Callable[[object], int]:
    def run(source: object, **options: object) -> int:
        with memonger.Session(source, **options) as session:  # type: ignore[arg-type]
            _check(session.run(FEED))
            return len(session.engines)

    return run


def test_where_it_does_not_apply_nodes_copy_in_order(engines: Callable[..., int], plan: memonger.Plan) -> None:
    mapped = memonger.search_plan(_model(), **MAPPED)
    assert len(mapped.host_weights) == LAYERS
    assert not mapped.ahead_bytes
    assert engines(mapped) == 1
    least = memonger.search_plan(_model(), budget=mapped.total_bytes, **OPTIONS)
    assert not least.ahead_bytes
    assert engines(least) == 1
    optimizer = memonger.SGD(lr=0.1)
    nodes = [helper.make_node("MatMul", [f"v{n}", f"w{n}"], [f"v{n + 1}"], name=f"product{n}") for n in range(8)]
    weights = {f"w{n}": normal(n, WIDTH, WIDTH) for n in range(8)}
    model = model_of(nodes, {"v0": [4, WIDTH]}, {"v8": [4, WIDTH]}, **weights)
    step = memonger.differentiate(memonger.add_lora(model, 4, "*"), loss="mean_squared_error", optimizer=optimizer)
    whole = memonger.search_plan(step, device="cuda:0")
    trained = memonger.search_plan(step, device="cuda:0", budget=whole.total_bytes - 4 * WEIGHT, weights="ahead")
    assert trained.host_weights
    assert not trained.ahead_bytes


def test_weights_are_read_from_the_files_of_the_model_that_was_planned(tmp_path: Path) -> None:
    onnx.save(_model(), tmp_path / "model.onnx", save_as_external_data=True, location="model.data")
    whole = memonger.search_plan(tmp_path / "model.onnx", **OPTIONS)
    budget = whole.total_bytes - 16 * WEIGHT
    plan = memonger.search_plan(tmp_path / "model.onnx", **OPTIONS, budget=budget)
    assert plan.ahead_bytes
    plan.save(tmp_path / "planned.onnx", weights="source")
    for source in (plan, tmp_path / "planned.onnx"):
        with memonger.Session(source) as session:
            _check(session.run(FEED))


def test_plans_of_several_batches_run_marked_copies_in_order() -> None:
    nodes = [helper.make_node("Identity", ["x"], ["z"], name="identity")]
    nodes += [helper.make_node("Identity", [f"w{n}"], [f"y{n}"], name=f"identity{n}") for n in range(LAYERS)]
    outputs = {"z": ["batch", 4]} | {f"y{n}": [WIDTH, WIDTH] for n in range(LAYERS)}
    weights = {f"w{n}": normal(n, WIDTH, WIDTH) for n in range(LAYERS)}
    plans = [_plan(model=model_of(nodes, {"x": ["batch", 4]}, outputs, **weights), batch=batch) for batch in (1, 2)]
    assert all(plan.ahead_bytes for plan in plans)
    with memonger.Session(plans) as session:
        _check(session.run(FEED))
        assert not _copying()


def test_whatever_is_marked_is_right(engines: Callable[..., int]) -> None:
    """As in a file that somebody else wrote: copies right before the steps that read them are waited for at once."""
    mapped = memonger.search_plan(_model(), **MAPPED)
    model = mapped.model.clone()
    for node in model.graph:
        node.metadata_props[AHEAD] = "1"
    marked = dataclasses.replace(mapped, model=model)
    assert marked.ahead_bytes == LAYERS * WEIGHT
    assert engines(marked) == len(cut_schedule(model).spans) >= LAYERS


def test_values_of_the_host_are_handed_from_partition_to_partition() -> None:
    """What a node without a CUDA kernel computes before the first cut, and others read behind the last."""
    names, kind, size = [f"w{n}" for n in range(LAYERS)], onnx.TensorProto.INT32, WIDTH * WIDTH
    nodes = [
        helper.make_node("BitwiseNot", ["i"], ["n"], name="not"),
        helper.make_node("BitwiseXor", ["n", "v"], ["late"], name="late"),
        helper.make_node("Identity", ["x"], ["z"], name="identity"),
        *(helper.make_node("Identity", [name], [f"y{n}"], name=f"identity{n}") for n, name in enumerate(names)),
        helper.make_node("BitwiseAnd", ["n", "v"], ["early"], name="early"),  # which onnxruntime runs first
    ]
    outputs = {f"y{n}": [WIDTH, WIDTH] for n in range(LAYERS)} | {"z": [1, 4]}
    weights = {name: normal(n, WIDTH, WIDTH) for n, name in enumerate(names)}
    v, given = np.arange(size, dtype=np.int32), np.arange(0, 3 * size, 3, dtype=np.int32)
    model = model_of(nodes, {"x": [1, 4]}, outputs, v=v, **weights)
    model.graph.input.append(helper.make_tensor_value_info("i", kind, [size]))
    model.graph.output.extend(helper.make_tensor_value_info(name, kind, [size]) for name in ("early", "late"))
    plan = _plan(model=model)
    spans, order = cut_schedule(plan.model).spans, [node.name for node in plan.model.graph]
    assert plan.ahead_bytes
    assert order.index("not") < spans[0][1] <= spans[-1][0] <= order.index("late")
    with memonger.Session(plan) as session:
        found = session.run(FEED | {"i": given})
        _check(found)
        assert np.array_equal(found["early"], ~given & v)
        assert np.array_equal(found["late"], ~given ^ v)


@pytest.mark.parametrize("name", ["resnet18", "unet"])
def test_networks_run_in_the_planned_order(name: str, tmp_path: Path) -> None:
    whole = memonger.search_plan(small(name), mode="inference", device="cuda:0")
    budget, options = whole.total_bytes * 4 // 5, {"mode": "inference", "device": "cuda:0"}
    assert not memonger.search_plan(small(name), budget=budget, **options).ahead_bytes
    plan = memonger.search_plan(small(name), budget=budget, weights="ahead", **options)
    assert plan.ahead_bytes
    plan.save(tmp_path / "planned.onnx")
    with memonger.Session(tmp_path / "planned.onnx") as session:  # which compares the order of the first run
        for _ in range(2):
            session.run({v.name: np.zeros(v.shape, v.numpy) for v in session._model.programs[0].inputs})
