"""Training on two ranks: this process and one beside it, and what they wrote."""

import json
import os
import shutil
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from ctypes.util import find_library
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file

import memonger
from memonger.devices import CPU, Device
from memonger.distributed import join
from memonger.distributed.join import device_of_rank, engine_of
from memonger.graph.collectives import collectives_of
from tests.support import ranks, training_models

pytest.importorskip("torch", reason="ranks need PyTorch")

BUCKETS = memonger.Buckets(first=1000, rest=1000)


def _model(rows: int, dtype: str) -> onnx.ModelProto:
    """The classifier for so many rows, its numbers of this type."""
    model = training_models.classifier()
    kind = {"float32": onnx.TensorProto.FLOAT, "float64": onnx.TensorProto.DOUBLE}[dtype]
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = kind
        value.type.tensor_type.shape.dim[0].dim_value = rows
    arrays = [(one.name, onnx.numpy_helper.to_array(one)) for one in model.graph.initializer]
    del model.graph.initializer[:]
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array.astype(dtype), name) for name, array in arrays)
    return model


def _normed(rows: int, synchronized: bool) -> memonger.Model:
    """The classifier in float64 with a BatchNormalization of its hidden layer, in training form."""
    model = _model(rows, "float64")
    (relu,) = (node for node in model.graph.node if list(node.output) == ["r"])
    relu.input[0] = "normed"
    names = ["scale", "shift", "mean", "variance"]
    norm = onnx.helper.make_node("BatchNormalization", ["h", *names], ["normed"], name="norm")
    model.graph.node.insert(list(model.graph.node).index(relu), norm)
    for name, number in zip(names, (1.0, 0.0, 0.0, 1.0), strict=True):
        array = np.full(training_models.HIDDEN, number)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return memonger.to_training_mode(model, sync_batch_norm=synchronized)


def _plan_normed(rows: int, synchronized: bool, **options: Any) -> memonger.Plan:
    training = memonger.differentiate(
        _normed(rows, synchronized), loss="softmax_cross_entropy", optimizer=memonger.SGD(lr=0.1, momentum=0.9)
    )
    return memonger.search_plan(training, chunks="off", **options)


def _plan(
    rows: int, dtype: str = "float64", *, buckets: object = None, differ: Any = None, **options: Any
) -> memonger.Plan:
    made = {"optimizer": memonger.Adam(lr=0.02)} | (differ or {})
    training = memonger.differentiate(_model(rows, dtype), **({"loss": "softmax_cross_entropy"} | made))
    return memonger.search_plan(training, buckets=buckets, chunks="off", **({"strategy": "none"} | options))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder in which two ranks ran, this process the first, and what each found."""
    folder = tmp_path_factory.mktemp("ranks")
    rows = training_models.BATCH
    counted = {"loss": memonger.SoftmaxCrossEntropy(ignore_index=-1), "clip_norm": 0.5}
    clipped, apply, add = {"clip_norm": 0.05}, {"accumulate": "apply"}, {"accumulate": "add", "optimizer": None}
    plans = {
        "plain": _plan(rows, buckets=BUCKETS),
        "clipped": _plan(rows, buckets=BUCKETS, differ=clipped),
        "remat": _plan(rows, buckets=memonger.Buckets(first=1000, rest=1000, wait="last"), strategy="cheap"),
        "single": _plan(rows, "float32", buckets=BUCKETS),
        "apply": _plan(rows, buckets=BUCKETS, differ=apply),
        "add": _plan(rows, differ=add),
        "apply counted": _plan(rows, buckets=BUCKETS, differ=apply | counted),
        "add counted": _plan(rows, differ=add | counted | {"clip_norm": None}),
        "alone": _plan(rows),
        "sync": _plan_normed(rows, True, buckets=BUCKETS, strategy="cheap"),
    }
    assert plans["remat"].recomputed
    assert plans["sync"].recomputed
    for name, plan in plans.items():
        plan.save(folder / f"{name}.onnx")
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    ports = [str(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": ports[0], "PORTS": " ".join(ports)}
    beside = subprocess.Popen(
        [sys.executable, "-m", "tests.support.ranks", str(folder)],
        env={**os.environ, **shared, "OMP_NUM_THREADS": "1", "RANK": "1"}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, value in {**shared, "RANK": "0"}.items():
                patch.setenv(name, value)
            ranks.main(folder)
        said = beside.communicate(timeout=300)[1]
    finally:
        beside.kill()
    assert beside.returncode == 9, said
    return folder, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def _alone(differ: Mapping[str, Any] | None, dtype: str, parts: int = 1) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses and state of one rank with the batches of both."""
    session = memonger.TrainingSession(_plan(2 * parts * training_models.BATCH, dtype, differ=differ))
    losses = []
    for step in range(ranks.STEPS):
        given = [ranks.batch(parts * step + part, rank, dtype) for part in range(parts) for rank in range(2)]
        losses.append(session.step({name: np.concatenate([one[name] for one in given]) for name in given[0]}))
    return losses, session.state_dict()


@pytest.mark.parametrize(
    ("name", "differ", "dtype", "parts", "tolerance"),
    [
        ("plain", None, "float64", 1, 1e-12),
        ("clipped", {"clip_norm": 0.05}, "float64", 1, 1e-6),  # the norm is computed in float32
        ("single", None, "float32", 1, 1e-5),
        ("apply", None, "float64", 2, 1e-12),
    ],
)
def test_two_ranks_train_as_one_with_both_batches(
    results: Any, name: str, differ: Any, dtype: str, parts: int, tolerance: float
) -> None:
    folder, found = results
    losses, state = _alone(differ, dtype, parts)
    np.testing.assert_allclose(found[0][name], losses, rtol=max(tolerance, 1e-6))
    assert found[0][name] == found[1][name]
    saved = load_file(folder / f"{name}.state")
    assert saved.keys() == state.keys()
    for key, array in state.items():
        np.testing.assert_allclose(
            saved[key], array, rtol=0, atol=tolerance * max(1, float(abs(array).max())), err_msg=key
        )


def test_labels_that_count_are_counted_over_micro_batches_and_ranks(results: Any) -> None:
    """The last step is of one micro-batch on each rank."""
    folder, found = results
    differ = {"loss": memonger.SoftmaxCrossEntropy(ignore_index=-1), "clip_norm": 0.5}
    losses, state = [], None
    for parts, steps in ((2, range(ranks.STEPS - 1)), (1, range(ranks.STEPS - 1, ranks.STEPS))):
        session = memonger.TrainingSession(_plan(2 * parts * training_models.BATCH, differ=differ))
        if state is not None:
            session.load_state_dict(state)
            session.steps = ranks.STEPS - 1
        for step in steps:
            given = [ranks.counted(step, part, rank) for part in range(parts) for rank in range(2)]
            losses.append(session.step({name: np.concatenate([one[name] for one in given]) for name in given[0]}))
        state = session.state_dict()
    assert state is not None
    np.testing.assert_allclose([one["apply counted"] for one in found], [losses, losses], rtol=1e-12)
    saved = load_file(folder / "apply counted.state")
    for name, array in state.items():
        np.testing.assert_allclose(saved[name], array, rtol=1e-6, atol=1e-8, err_msg=name)


@pytest.mark.skipif(
    not (shutil.which("mpirun") and find_library("mpi") and find_spec("mpi4py")), reason="needs MPI and mpi4py"
)
def test_ranks_of_mpi_train_to_the_same_bits(results: Any) -> None:
    folder, found = results
    allowed = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMP_NUM_THREADS"), "1")
    command = ["mpirun", "-n", "2", sys.executable, "-m", "tests.support.ranks", str(folder), "mpi"]
    done = subprocess.run(
        command, env={**os.environ, **allowed}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads((folder / f"mpi.{rank}.json").read_text()) for rank in range(2)] == [found[0]["plain"]] * 2
    mpi, gloo = (load_file(folder / f"{name}.state") for name in ("mpi", "plain"))
    assert all(np.array_equal(mpi[key], gloo[key]) for key in gloo)


def test_synchronized_statistics_are_those_of_both_batches(results: Any) -> None:
    folder, found = results
    session, losses = memonger.TrainingSession(_plan_normed(2 * training_models.BATCH, False)), []
    for step in range(ranks.STEPS):
        given = [ranks.batch(step, rank, "float64") for rank in range(2)]
        losses.append(session.step({name: np.concatenate([one[name] for one in given]) for name in given[0]}))
    np.testing.assert_allclose(found[0]["sync"], losses, rtol=1e-12)
    saved = load_file(folder / "sync.state")
    for key, array in session.state_dict().items():
        np.testing.assert_allclose(saved[key], array, rtol=0, atol=1e-12, err_msg=key)


def test_what_is_recomputed_and_when_updates_begin_changes_no_bit(results: Any) -> None:
    folder, found = results
    assert found[0]["remat"] == found[0]["plain"]
    kept, remat = (load_file(folder / f"{name}.state") for name in ("plain", "remat"))
    assert all(np.array_equal(kept[key], remat[key]) for key in kept)


def test_ranks_that_share_the_optimizer_train_alike_and_keep_a_part(
    results: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, found = results
    assert [each["shares"][0] for each in found] == [found[0]["plain"]] * 2
    assert [each["shares, clipped"] for each in found] == [found[0]["clipped"]] * 2
    assert all(each["read again"] for each in found)
    states = [{name for name in each["shares"][1] if ".exp_avg" in name} for each in found]
    expected = load_file(folder / "plain.state")
    assert all(states)
    assert not states[0] & states[1]
    assert states[0] | states[1] == {name for name in expected if ".exp_avg" in name}
    whole = load_file(folder / "shares.state")
    assert whole.keys() == expected.keys()
    assert all(np.array_equal(whole[name], expected[name]) for name in expected)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    alone = memonger.DistributedTrainingSession(folder / "plain.onnx")
    alone.load(folder / "shares")  # which two ranks wrote
    assert all(np.array_equal(array, expected[name]) for name, array in alone.state_dict().items())


def test_a_loss_that_is_not_finite_on_one_rank_is_left_out_on_both(results: Any) -> None:
    for name in ("skipped", "skipped there"):
        assert [each[name] for each in results[1]] == [[1, 0, True], [1, 0, True]]


@pytest.mark.parametrize("name", ["clipped", "sync", "apply", "shares"])
def test_ranks_on_a_device_train_as_those_on_the_host_bit_for_bit(results: Any, name: str) -> None:
    folder, found = results
    alike = name.replace("shares", "plain")
    assert [each[f"{name} there"] for each in found] == [found[0][alike]] * 2
    assert all(each["sent there"] for each in found)
    there, expected = (load_file(folder / f"{one}.state") for one in (f"{name} there", alike))
    assert there.keys() == expected.keys()
    assert all(np.array_equal(there[key], array) for key, array in expected.items())


def test_ranks_that_differ_are_named_before_anything_runs(results: Any) -> None:
    for found in results[1]:
        assert found["plans"].startswith("rank 1 has another plan than rank 0. Plan once, save it")
        assert found["weights"].startswith("rank 1 has other weights than rank 0. Load the same state")
        assert found["sharing"].startswith("rank 1 has shard_optimizer True where rank 0 has False. Give all ranks the")
        assert found["key"].startswith("rank 1 has random_key 1 where rank 0 has 0.")
        for name in ("rate", "rate of its own"):
            assert found[name].startswith("rank 1 has learning_rate 0.5 where rank 0 has 0.25.")
        assert "is planned for one rank alone: for 2 plan it with buckets=memonger.Buckets()" in found["one rank"]


def test_a_rank_with_fewer_rows_says_what_to_do_with_them(results: Any) -> None:
    for rank, found in enumerate(results[1]):
        assert found["uneven"].startswith(f"rank {rank} can't take step 0: input '")
        assert "leave it out on all ranks, or fill it up with rows whose sample_weights are 0" in found["uneven"]


def test_a_rank_that_ends_or_hangs_is_named_by_the_others(results: Any) -> None:
    _, (found, _) = results
    assert "rank 1 closed its session after 1 steps; ranks have to take equally many steps" in found["closed"]
    for name in ("gone", "hangs"):
        assert found[name].startswith("step 1 failed on rank 0: rank 1 has ended or hangs: no answer came")
    assert "Make a new session" in found["after gone"]


def test_a_trace_shows_every_collective_beside_the_segments(results: Any) -> None:
    folder, _ = results
    events = json.loads((folder / "0.trace.json").read_text())["traceEvents"]
    graph = memonger.Plan.load(folder / "plain.onnx").graph
    names = [one["name"] for one in events if one["ph"] == "X" and one["tid"] == 1]
    assert len(names) == len(graph.collectives) * ranks.STEPS
    assert {one["name"] for one in events if one["ph"] == "X" and one["tid"] == 0} >= {"segment 0", "segment 1"}


def test_one_rank_alone_takes_any_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    plain, grouped = (_plan(training_models.BATCH, buckets=buckets) for buckets in (None, BUCKETS))
    sessions = [memonger.TrainingSession(plain), *map(memonger.DistributedTrainingSession, (plain, grouped))]
    assert len({tuple(one.step(ranks.batch(step, 0, "float64")) for step in range(2)) for one in sessions}) == 1


def test_nobody_else_touches_a_bucket_between_begin_and_wait() -> None:
    plan = _plan(training_models.BATCH, buckets=BUCKETS)
    graph = plan.graph
    assert len(graph.collectives) == 3
    for each in collectives_of(graph):
        begin = plan.offsets[each.members[0]]
        end = plan.offsets[each.members[-1]] + graph.sizes[each.members[-1]]
        for step in range(each.begin + 1, each.wait):
            if not graph.ops[step].startswith("memonger.ranks::"):
                for value in (v for v in (*graph.reads[step], *graph.writes[step]) if graph.planned[v]):
                    assert plan.offsets[value] >= end or plan.offsets[value] + graph.sizes[value] <= begin


def test_a_plan_whose_nodes_use_the_bytes_of_a_collective_is_refused() -> None:
    plan = _plan(training_models.BATCH, buckets=BUCKETS)
    graph, first = plan.graph, collectives_of(plan.graph)[0]
    between = next(s for s in range(first.begin + 1, first.wait) if "memonger" not in graph.ops[s])
    reads = tuple((*r, first.members[0]) if s == between else r for s, r in enumerate(graph.reads))
    with pytest.raises(memonger.VerificationError, match=r"uses '.*', which has bytes of the collective that node"):
        replace(plan, graph=replace(graph, reads=reads)).verify()
    renamed = tuple("Begin9" if s == first.begin else op for s, op in enumerate(graph.ops))
    with pytest.raises(memonger.VerificationError, match="waits for a collective that no node began"):
        replace(plan, graph=replace(graph, ops=renamed)).verify()


def test_a_gradient_that_the_backward_pass_reads_as_well_is_sent_as_a_copy() -> None:
    model = _model(training_models.BATCH, "float64")
    (relu,) = (node for node in model.graph.node if list(node.output) == ["r"])
    relu.input[0] = "shifted"
    add = onnx.helper.make_node("Add", ["h", "shift"], ["shifted"])
    model.graph.node.insert(list(model.graph.node).index(relu), add)
    shift = np.full((training_models.BATCH, training_models.HIDDEN), 0.1)
    model.graph.initializer.append(onnx.numpy_helper.from_array(shift, "shift"))
    training = memonger.differentiate(model, loss="softmax_cross_entropy", optimizer=memonger.SGD(lr=0.1))
    plain, grouped = (memonger.search_plan(training, buckets=buckets) for buckets in (None, BUCKETS))
    assert any(name.endswith(".sent") for name in grouped.graph.values)
    assert not any(name.endswith(".sent") for name in _plan(training_models.BATCH, buckets=BUCKETS).graph.values)
    sessions = [memonger.TrainingSession(plan) for plan in (plain, grouped)]
    assert len({tuple(one.step(ranks.batch(step, 0, "float64")) for step in range(2)) for one in sessions}) == 1


def test_what_carries_bytes_has_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(
            memonger.RuntimeUnavailableError, match=rf"rank 0 can't join .* 127\.0\.0\.1:{port} .*--master-port"
        ):
            memonger.DistributedTrainingSession("plan.onnx", timeout=1)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(memonger.RuntimeUnavailableError, match=r"pip install 'memonger\[distributed\]'"):
        memonger.DistributedTrainingSession("plan.onnx")
    with pytest.raises(memonger.SessionError, match="group must be a process group"):
        memonger.DistributedTrainingSession("plan.onnx", group=3)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Any]:
    """A group of one rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_group_has_to_carry_what_the_plan_needs(alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    cuda = Device("cuda", 1)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(memonger.RuntimeUnavailableError, match=r"ranks on cuda:1 need a PyTorch with NCCL"):
        engine_of(alone, 1, cuda)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    with pytest.raises(memonger.SessionError, match=r"has no NCCL \(cpu:gloo,cuda:gloo\).*'cpu:gloo,cuda:nccl'"):
        engine_of(alone, 1, cuda)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    with pytest.raises(memonger.SessionError, match=r"for cuda alone \(nccl\), and this plan runs on the CPU"):
        engine_of(alone, 1, CPU)
    beside = engine_of(alone, 1, cuda)
    assert beside.all_gather("by gloo, beside NCCL") == ["by gloo, beside NCCL"]
    assert beside.silent("stopped") == {0: "stopped"}
    assert not dist.is_initialized()  # closed, so that other ranks see it
    mpi = SimpleNamespace(Get_rank=int, Iallreduce=int)
    with pytest.raises(memonger.SessionError, match=r"in the memory of CPUs, and this plan runs on cuda:1.*torchrun"):
        engine_of(mpi, 1, cuda)


def test_each_rank_of_a_machine_takes_a_gpu_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plan(training_models.BATCH, buckets=BUCKETS)
    for device in ("cuda:5", "cpu"):
        replace(plan, device=device).save(tmp_path / f"{device}.onnx")
    (tmp_path / "text").write_text("no model")
    monkeypatch.setattr(join, "check_device", lambda device: None)
    monkeypatch.setattr(join, "backend", lambda device: SimpleNamespace(count=lambda: 2))

    def chosen(name: str, device: Any = None) -> str:
        return str(device_of_rank(tmp_path / name, device))

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert [chosen("cuda:5.onnx"), chosen("cpu.onnx")] == ["cuda:5", "cpu"]
    assert [chosen("text"), chosen("no file")] == ["None", "None"]  # whoever reads the plan says what is wrong
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert [chosen("cuda:5.onnx"), chosen("cpu.onnx"), chosen("text", "cuda")] == ["cuda:1", "cpu", "cuda:1"]
    assert [chosen("cuda:5.onnx", "cuda:0"), chosen("cuda:5.onnx", Device("cuda", 3))] == ["cuda:0", "cuda:3"]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(memonger.RuntimeUnavailableError, match=r"number 2 of its machine .*shows 2 devices of cuda"):
        chosen("cuda:5.onnx")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"first": "none"}, "the first bucket"),
        ({"wait": "soon"}, "wait must be 'next' or 'last', not 'soon'"),
    ],
)
def test_buckets_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(memonger.PlanError, match=words):
        memonger.Buckets(**options)


def test_a_model_that_updates_nothing_has_nothing_to_add_up() -> None:
    with pytest.raises(memonger.PlanError, match="give a loss and an optimizer"):
        _plan(training_models.BATCH, buckets=BUCKETS, differ={"optimizer": None})
