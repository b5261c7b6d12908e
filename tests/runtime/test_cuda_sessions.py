"""Sessions on a CUDA device. Without one: ``python -m tests.support.fake_cuda python -m pytest
tests/runtime/test_cuda_sessions.py`` runs what doesn't hang on values on a stand-in, whose kernels do nothing."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import memonger
from memonger.runtime.cuda import driver
from tests.support import training_models
from tests.support.cuda import CUDA, ON_STAND_IN, needs_cuda, needs_values, on_stand_in
from tests.support.networks import model_of
from tests.support.planning_models import network

TOLERANCE = 2e-3  # TF32 is off: what is left is the order of sums


pytestmark = needs_cuda


def _convolutions(batch: int = 2, layers: int = 4, middle: str = "Relu") -> onnx.ModelProto:
    """Convolutions with something between them, and a product at the end."""
    rng = np.random.default_rng(0)
    nodes, weights, last = [], [], "x"
    for layer in range(layers):
        weight = (rng.standard_normal((8, 8, 3, 3)) / 9).astype(np.float32)
        weights.append(numpy_helper.from_array(weight, f"w{layer}"))
        nodes.append(
            helper.make_node("Conv", [last, f"w{layer}"], [f"c{layer}"], pads=[1, 1, 1, 1], name=f"conv{layer}")
        )
        nodes.append(helper.make_node(middle, [f"c{layer}"], [f"r{layer}"], name=f"act{layer}"))
        last = f"r{layer}"
    nodes.append(helper.make_node("GlobalAveragePool", [last], ["y"], name="pool"))
    shape: list[Any] = ["n", 8, 16, 16]
    graph = helper.make_graph(
        nodes, "convolutions", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8, 1, 1])], weights,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def _plan(model: Any = None, batch: int = 2, **choices: Any) -> memonger.Plan:
    source = _convolutions() if model is None else model
    settings = {"mode": "inference", "device": "cuda:0", "cuda": memonger.Cuda(tf32=False), "batch": batch}
    plan: memonger.Plan = memonger.search_plan(source, **{**settings, **choices})
    return plan


def _x(batch: int = 2, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((batch, 8, 16, 16)).astype(np.float32)


def _on_device(array: np.ndarray) -> Any:
    from onnxruntime import OrtValue

    return OrtValue.ortvalue_from_numpy(array, "cuda", 0)


def _expected(x: np.ndarray, model: onnx.ModelProto | None = None) -> np.ndarray:
    plan = memonger.search_plan(model or _convolutions(), mode="inference", device="cpu", batch=len(x))
    found: np.ndarray = memonger.Session(plan).run({"x": x})["y"]
    return found


def _in_use() -> int:
    room = driver.room(CUDA)
    return room.total - room.free


@pytest.mark.parametrize("graphs", ["auto", "on", "off"])
def test_a_plan_runs_on_the_device_and_says_whether_it_is_replayed(graphs: str) -> None:
    session = memonger.Session(_plan(), cuda_graph=graphs)
    assert str(session.device) == "cuda:0"
    assert session.cuda_graph == (graphs != "off")
    assert session.why_no_cuda_graph == ("they were turned off" if graphs == "off" else "")
    for seed in range(4):
        found = session.run({"x": _x(seed=seed)})["y"]
        assert found.shape == (2, 8, 1, 1)
        if not ON_STAND_IN:
            np.testing.assert_allclose(found, _expected(_x(seed=seed)), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_tensors_of_the_device_go_in_and_out_without_the_host(graphs: str) -> None:
    session = memonger.Session(_plan(), cuda_graph=graphs)
    x, y = _x(), _on_device(np.full((2, 8, 1, 1), 7, np.float32))
    session.run({"x": _x(seed=1)})
    found = session.run({"x": _on_device(x)}, {"y": y})["y"]
    assert found is y
    inside = session.run({"x": x}, copy=False)["y"]
    assert inside.device_name() == "cuda"
    assert inside.shape() == [2, 8, 1, 1]
    begin = session.arena.address
    assert begin <= inside.data_ptr() < begin + session.arena.size
    if not ON_STAND_IN:
        np.testing.assert_allclose(y.numpy(), _expected(x), rtol=TOLERANCE, atol=TOLERANCE)
        assert y.numpy().tobytes() == inside.numpy().tobytes() == session.run({"x": x})["y"].tobytes()


def test_arrays_of_the_host_are_written_to(tmp_path: Path) -> None:
    plan = _plan()
    plan.save(tmp_path / "plan.onnx")
    session, mine = memonger.Session(tmp_path / "plan.onnx"), np.full((2, 8, 1, 1), 7, np.float32)
    assert session.run({"x": _x()}, {"y": mine})["y"] is mine
    assert not (mine == 7).any()


def test_what_a_session_takes_is_what_the_plan_says_and_is_given_back() -> None:
    plan = _plan(batch=64)
    before = _in_use()
    session = memonger.Session(plan, cuda_graph="off")
    for _ in range(3):
        session.run({"x": _x(64)})
    assert plan.predicted_bytes is not None
    taken, told = _in_use() - before, plan.predicted_bytes + plan.parameter_bytes
    slack = 8192 if ON_STAND_IN else 256 << 20  # a real device's context, libraries and the driver's own pages
    assert told <= taken <= told + slack
    del session
    assert _in_use() - before < (1 if ON_STAND_IN else slack)


@on_stand_in
def test_scratch_is_measured_for_each_node_counted_and_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDNN_WORKSPACE", "300000")
    plan = _plan()
    assert plan.workspace_bytes == 300032  # as CUDA aligns it
    assert {name for name, size in (plan.workspace or {}).items() if size > 200_000} >= {"conv0", "conv3"}
    session = memonger.Session(plan, cuda_graph="off")
    session.run({"x": _x()})
    needed = plan.total_bytes
    with pytest.raises(memonger.BudgetError):
        _plan(budget=needed - 300_000)
    monkeypatch.setenv("FAKE_CUDNN_WORKSPACE", "900000")
    other = memonger.Session(plan, cuda_graph="off", check_order=False)
    other.run({"x": _x()})  # the first run may take more, as a search for algorithms does
    with pytest.raises(memonger.SessionError, match=r"879 KiB of workspace on cuda:0.*measured 293 KiB.*plan the"):
        other.run({"x": _x()})


@on_stand_in
def test_too_little_memory_is_told_before_anything_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plan(batch=64)
    before = _in_use()
    monkeypatch.setenv("FAKE_CUDA_MEMORY", str(before + plan.arena_bytes))
    with pytest.raises(memonger.SessionError, match=r"needed .*for the arena.*are free. Nothing was allocated"):
        memonger.Session(plan)
    assert _in_use() == before


def test_values_on_the_host_stay_with_the_runtime_and_forbid_graphs(tmp_path: Path) -> None:
    plan = _plan(_convolutions(middle="Atan"))  # which has no CUDA kernel
    planned = {plan.graph.values[value] for value in plan.offsets}
    assert planned.isdisjoint(plan.host)
    by_op = {plan.graph.ops[step]: writes for step, writes in enumerate(plan.graph.writes)}
    assert plan.graph.values[by_op["Atan"][0]] in plan.host
    assert plan.graph.values[by_op["MemcpyToHost"][0]] in plan.host
    assert plan.graph.values[by_op["MemcpyFromHost"][0]] in planned
    assert plan.graph.values[by_op["Conv"][0]] in planned
    plan.save(tmp_path / "plan.onnx")
    loaded = memonger.Plan.load(tmp_path / "plan.onnx")
    assert loaded.host == plan.host
    session = memonger.Session(loaded)
    assert not session.cuda_graph
    assert session.why_no_cuda_graph
    found = session.run({"x": _x()})["y"]
    if not ON_STAND_IN:
        expected = _expected(_x(), _convolutions(middle="Atan"))
        np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    with pytest.raises(memonger.SessionError, match="CUDA graphs can't be used"):
        memonger.Session(loaded, cuda_graph="on")


def test_a_portable_plan_runs_where_it_can() -> None:
    plan = memonger.search_plan(_convolutions(), mode="inference", device="none", batch=2)
    session = memonger.Session(plan, device="cuda:0")
    assert session.run({"x": _x()})["y"].shape == (2, 8, 1, 1)
    assert "workspace wasn't measured" in session.why_no_cuda_graph


def test_a_portable_plan_with_values_on_the_host_is_refused() -> None:
    plan = memonger.search_plan(_convolutions(middle="Atan"), mode="inference", device="none", batch=2)
    with pytest.raises(memonger.SessionError, match=r"computed on the host.*device='cuda:0'"):
        memonger.Session(plan, device="cuda:0")


def test_a_portable_plan_that_overwrites_as_no_cuda_kernel_may_is_refused() -> None:
    plan = memonger.search_plan(_convolutions(middle="LpNormalization"), mode="inference", device="none", batch=2)
    assert any(plan.graph.inplace)
    with pytest.raises(memonger.PlanFileError, match=r"portable plan can't run on cuda:0.*device='cuda:0'"):
        memonger.Session(plan, device="cuda:0")


@pytest.mark.parametrize(("field", "value"), [("machine", "NVIDIA Other (1.0)"), ("runtime", "onnxruntime 1.0.0")])
def test_a_plan_for_another_gpu_or_runtime_is_refused(field: str, value: str) -> None:
    plan = _plan()
    assert plan.stamp is not None
    foreign = dataclasses.replace(plan, stamp=dataclasses.replace(plan.stamp, **{field: value}))
    with pytest.raises(memonger.PlanFileError, match=rf"another {field}.*{value.split('(')[0]}.*device='cuda:0'"):
        memonger.Session(foreign)
    with pytest.raises(memonger.PlanFileError, match="another provider"):
        memonger.Session(plan, device="cpu")


def test_several_plans_share_one_arena_and_each_has_its_graph() -> None:
    session = memonger.Session([_plan(batch=n) for n in (1, 4, 2)])
    assert session.cuda_graph
    for batch in (1, 4, 2, 1):
        found = session.run({"x": _x(batch)})["y"]
        assert found.shape == (batch, 8, 1, 1)
        if not ON_STAND_IN:
            np.testing.assert_allclose(found, _expected(_x(batch)), rtol=TOLERANCE, atol=TOLERANCE)


def test_arenas_for_threads_are_for_the_cpu() -> None:
    with pytest.raises(memonger.SessionError, match="a session for each thread"):
        memonger.Session(_plan(), threads="arena")


def test_tensors_of_the_device_are_refused_on_the_cpu() -> None:
    session = memonger.Session(memonger.search_plan(_convolutions(), mode="inference", device="cpu", batch=2))
    with pytest.raises(memonger.SessionError, match="'x' lies on a CUDA device"):
        session.run({"x": _on_device(_x())})


def test_a_tensor_of_another_device_is_refused() -> None:
    class Elsewhere:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 1

        def __dlpack__(self) -> Any:
            raise AssertionError("it isn't to be read")

    with pytest.raises(memonger.SessionError, match="'x' lies on cuda:1, and the session runs on cuda:0"):
        memonger.Session(_plan()).run({"x": Elsewhere()})


def test_numbers_that_nodes_read_on_the_host_are_read_there() -> None:
    """Those of a node without a CUDA kernel."""
    nodes = [
        helper.make_node("BitwiseNot", ["i"], ["n"], name="not"),
        helper.make_node("Identity", ["x"], ["y"], name="identity"),
    ]
    model = model_of(nodes, {"x": [1, 4]}, {"y": [1, 4]})
    model.graph.input.append(helper.make_tensor_value_info("i", TensorProto.INT32, [100]))
    model.graph.output.append(helper.make_tensor_value_info("n", TensorProto.INT32, [100]))
    given = np.arange(100, dtype=np.int32)
    session = memonger.Session(memonger.search_plan(model, mode="inference", device="cuda:0", level="disable"))
    for _ in range(2):
        found = session.run({"x": np.ones((1, 4), np.float32), "i": given})
        assert np.array_equal(found["n"], ~given)


def test_a_second_device_is_its_own() -> None:
    if driver.device_count() < 2:
        pytest.skip("there is one device")
    plan = _plan(device="cuda:1")
    session = memonger.Session(plan)
    assert str(session.device) == "cuda:1"
    before = _in_use()
    session.run({"x": _x()})
    assert _in_use() == before
    elsewhere = memonger.Session(plan, device="cuda:0")  # the same kind of device
    assert elsewhere.run({"x": _x()})["y"].shape == (2, 8, 1, 1)


def _training_plan(device: str) -> memonger.Plan:
    settings: dict[str, Any] = {"loss": "loss", "optimizer": memonger.SGD(lr=0.1, momentum=0.9)}
    plan: memonger.Plan = memonger.search_plan(
        network("resnet18"), device=device, cuda=memonger.Cuda(tf32=False), **settings
    )
    return plan


def _batch(trainer: memonger.TrainingSession) -> dict[str, np.ndarray]:
    rng, feeds = np.random.default_rng(1), {}
    for value in trainer.inputs:
        assert value.shape is not None
        assert value.numpy is not None
        is_label = value.numpy.kind == "i"
        drawn = rng.integers(0, 10, value.shape) if is_label else rng.standard_normal(value.shape)
        feeds[value.name] = drawn.astype(value.numpy)
    return feeds


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_a_training_step_runs_wholly_on_the_device(graphs: str, tmp_path: Path) -> None:
    trainer = memonger.TrainingSession(_training_plan("cuda:0"), cuda_graph=graphs)
    batch = _batch(trainer)
    first_engine, second_engine = trainer.engines
    assert not first_engine.captures
    assert not second_engine.captures
    assert first_engine.pool is second_engine.pool
    first = trainer.step(batch)
    trainer.step({name: _on_device(array) for name, array in batch.items()})
    state = trainer.state_dict()
    trainer.save(tmp_path / "state")
    after = [trainer.step(batch) for _ in range(2)]
    before_release = trainer.evaluate(batch)
    with trainer.release_training_state():
        inside = trainer.evaluate(batch)
    after_release = trainer.evaluate(batch)
    for name, array in before_release.items():
        assert array.shape == inside[name].shape == after_release[name].shape
        if not ON_STAND_IN:
            assert array.tobytes() == inside[name].tobytes() == after_release[name].tobytes()
    trainer.load(tmp_path / "state")
    assert all(array.tobytes() == state[name].tobytes() for name, array in trainer.state_dict().items())
    assert trainer.steps == 2
    if not ON_STAND_IN:
        np.testing.assert_allclose([trainer.step(batch) for _ in range(2)], after, rtol=TOLERANCE)
        assert after[-1] < first


@needs_values
def test_training_agrees_with_the_cpu() -> None:
    trainer = memonger.TrainingSession(_training_plan("cuda:0"))
    reference = memonger.TrainingSession(_training_plan("cpu"))
    batch = _batch(trainer)
    for _ in range(3):
        np.testing.assert_allclose(trainer.step(batch), reference.step(batch), rtol=TOLERANCE)
    mine, theirs = trainer.state_dict(), reference.state_dict()
    for name, array in theirs.items():
        np.testing.assert_allclose(mine[name], array, rtol=5e-2, atol=TOLERANCE, err_msg=name)


def _ranks_plan() -> memonger.Plan:
    training = memonger.differentiate(
        training_models.classifier(), loss="softmax_cross_entropy", optimizer=memonger.Adam(lr=0.02)
    )
    plan: memonger.Plan = memonger.search_plan(
        training, device="cuda:0", cuda=memonger.Cuda(tf32=False), buckets=memonger.Buckets(first=1000, rest=1000)
    )
    return plan


def _free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return str(one.getsockname()[1])


@on_stand_in
def test_two_ranks_average_what_lies_on_their_devices(tmp_path: Path) -> None:
    _ranks_plan().save(tmp_path / "plan.onnx")
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port(), "FAKE_CUDA_DEVICES": "2"}
    command = [sys.executable, "-m", "tests.support.cuda_ranks", str(tmp_path)]
    started = [
        subprocess.Popen(command, env={**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank}) for rank in ("0", "1")
    ]
    assert [process.wait(600) for process in started] == [0, 0]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [each["device"] for each in found] == ["cuda:0", "cuda:1"]
    for each in found:
        assert each["loss"] == 1.5
        assert 1.5 in each["gradients"]  # the mean of what lay in the arenas, 1 and 2, where nothing was written since
        assert not {1.0, 2.0} & {*each["gradients"]}
        assert each["gradients"] == found[0]["gradients"]
        assert each["skipped"] == [1, 1]
        assert set(each["parameters"]) == {10.0, 11.0}  # each of its owner's
        assert each["parameters"] == found[0]["parameters"]


@needs_values
def test_one_rank_with_nccl_trains_as_one_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_nccl_available():
        pytest.skip("this PyTorch has no NCCL")
    _ranks_plan().save(tmp_path / "plan.onnx")
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (variables | {"MASTER_PORT": _free_port()}).items():
        monkeypatch.setenv(name, value)
    plain = memonger.TrainingSession(tmp_path / "plan.onnx")
    for shards in (False, True):
        plain.load_state_dict(memonger.TrainingSession(tmp_path / "plan.onnx").state_dict())
        plain.steps = 0
        with memonger.DistributedTrainingSession(tmp_path / "plan.onnx", shard_optimizer=shards, timeout=60) as session:
            assert str(session.device) == "cuda:0"
            for step in range(3):
                batch = training_models.batch(step)
                assert session.step(batch) == plain.step(batch)
            state = session.state_dict()
        assert all(array.tobytes() == state[name].tobytes() for name, array in plain.state_dict().items())


@needs_values
@pytest.mark.parametrize("name", ["resnet18", "gpt", "unet"])
def test_networks_agree_with_the_cpu(name: str) -> None:
    model = network(name, training=False)
    plan = memonger.search_plan(model, mode="inference", device="cuda:0", cuda=memonger.Cuda(tf32=False))
    reference = memonger.search_plan(model, mode="inference", device="cpu")
    session, rng = memonger.Session(plan), np.random.default_rng(0)
    feeds = {
        str(value.name): rng.integers(0, 50, value.shape.numpy()).astype(np.int64)
        if value.dtype == ir.DataType.INT64
        else rng.standard_normal(value.shape.numpy()).astype(np.float32)
        for value in plan.model.graph.inputs
        if value.shape is not None
    }
    session.arena.fill(0xFF)
    found, expected = session.run(feeds), memonger.Session(reference).run(feeds)
    for output, array in expected.items():
        np.testing.assert_allclose(found[output], array, rtol=1e-2, atol=TOLERANCE)
