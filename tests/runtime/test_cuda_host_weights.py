"""Weights of a plan for a CUDA device that lie in the host's memory, and are copied ahead of the steps that read them.

On the stand-in copies are real, so that a network of nothing but copies has values there.
"""

import os
import random
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from onnx import helper

import memonger
from memonger.cli.commands import main
from memonger.graph.weight_window import COPY, Read, choose_copies, device_reads
from memonger.ir.values import required_inputs, static_shape
from memonger.runtime.cuda import driver
from tests.models.test_models import small
from tests.support.cuda import CUDA, needs_cuda, random_reads
from tests.support.networks import model_of
from tests.support.stock import normal

KIB, MIB = 1 << 10, 1 << 20
WIDTH, LAYERS = 320, 8
WEIGHT = 4 * WIDTH * WIDTH
OPTIONS = {"mode": "inference", "device": "cuda:0"}


def _copies() -> onnx.ModelProto:
    """Identities of weights of 400 KiB, each of which the model returns."""
    nodes = [helper.make_node("Identity", [f"w{n}"], [f"y{n}"], name=f"identity{n}") for n in range(LAYERS)]
    nodes.append(helper.make_node("Identity", ["x"], ["z"], name="identity"))
    outputs = {f"y{n}": [WIDTH, WIDTH] for n in range(LAYERS)} | {"z": [1, 4]}
    return model_of(nodes, {"x": [1, 4]}, outputs, **_weights())


def _products(batch: int | str = 4) -> onnx.ModelProto:
    nodes = [helper.make_node("MatMul", [f"v{n}", f"w{n}"], [f"v{n + 1}"], name=f"product{n}") for n in range(LAYERS)]
    return model_of(nodes, {"v0": [batch, WIDTH]}, {f"v{LAYERS}": [batch, WIDTH]}, **_weights())


def _weights() -> dict[str, np.ndarray]:
    return {f"w{n}": normal(n, WIDTH, WIDTH) / np.float32(WIDTH**0.5) for n in range(LAYERS)}


def _in_use() -> int:
    room = driver.room(CUDA)
    return room.total - room.free


@needs_cuda
def test_all_weights_that_may_lie_in_the_hosts_memory_where_they_are_mapped() -> None:
    mapped = memonger.search_plan(_copies(), level="disable", weights="mapped", **OPTIONS)
    assert set(mapped.host_weights) == set(_weights())
    with memonger.Session(mapped) as session:
        found = session.run({"x": np.ones((1, 4), np.float32)})
        assert all(np.array_equal(found[f"y{n}"], weight) for n, weight in enumerate(_weights().values()))
    packed = memonger.search_plan(_copies(), level="disable", weights="packed", **OPTIONS)
    assert not packed.host_weights
    with pytest.raises(
        memonger.BudgetError, match="With weights='auto' some of its weights may lie in the host's memory"
    ):
        memonger.search_plan(
            _copies(), level="disable", weights="packed", budget=packed.total_bytes - WEIGHT, **OPTIONS
        )


@needs_cuda
@pytest.mark.parametrize("is_saved", [True, False])
@pytest.mark.parametrize("fewer", [1, 4, 7])
def test_what_reads_a_copy_finds_the_weight_and_no_other(fewer: int, is_saved: bool, tmp_path: Path) -> None:
    """More weights than fit pass through room for one in the arena."""
    model, weights = _copies(), _weights()
    whole = memonger.search_plan(model, level="disable", **OPTIONS)
    assert not whole.host_weights
    budget = whole.total_bytes - fewer * WEIGHT
    plan = memonger.search_plan(model, level="disable", budget=budget, **OPTIONS)
    assert fewer <= len(plan.host_weights) <= fewer + 1
    assert plan.total_bytes <= budget
    assert plan.resident_parameter_bytes == plan.parameter_bytes - len(plan.host_weights) * WEIGHT
    assert plan.read_bytes == len(plan.host_weights) * WEIGHT
    assert plan.arena_bytes <= (LAYERS + 1) * WEIGHT + KIB
    plan.save(tmp_path / "planned.onnx")
    before = _in_use()
    with memonger.Session(tmp_path / "planned.onnx" if is_saved else plan) as session:
        for _ in range(2):
            found = session.run({"x": np.ones((1, 4), np.float32)})
            assert all(np.array_equal(found[f"y{n}"], weights[f"w{n}"]) for n in range(LAYERS))
            assert np.array_equal(found["z"], np.ones((1, 4), np.float32))
        assert _in_use() - before <= plan.total_bytes + 64 * KIB
    assert not session.cuda_graph
    assert "(MemcpyFromHost) copies from the host's memory" in session.why_no_cuda_graph


@needs_cuda
@pytest.mark.parametrize("name", ["resnet18", "unet", "mobilenet_v2"])
def test_networks_run_in_the_planned_order_within_the_least_that_holds(name: str, tmp_path: Path) -> None:
    whole = memonger.search_plan(small(name), **OPTIONS)
    with pytest.raises(memonger.BudgetError) as refused:
        memonger.search_plan(small(name), budget=1, **OPTIONS)
    plan = memonger.search_plan(small(name), budget=refused.value.smallest, **OPTIONS)
    assert plan.host_weights
    assert refused.value.lower_bound <= plan.total_bytes <= refused.value.smallest < whole.total_bytes
    plan.save(tmp_path / "planned.onnx")
    with memonger.Session(tmp_path / "planned.onnx") as session:  # which compares the order of the first run
        (given,) = required_inputs(plan.model.graph)
        for _ in range(2):
            session.run({given.name: np.zeros(static_shape(given), np.float32)})


@needs_cuda
def test_a_file_has_what_its_plan_says(tmp_path: Path) -> None:
    plan = memonger.search_plan(_products(), budget=3 * WEIGHT, **OPTIONS)
    planned, again = tmp_path / "planned.onnx", tmp_path / "again" / "planned.onnx"
    plan.save(planned)
    loaded = memonger.Plan.load(planned)
    assert loaded.host_weights == plan.host_weights
    assert (loaded.total_bytes, loaded.read_bytes) == (plan.total_bytes, plan.read_bytes)
    assert loaded.offsets.keys() == plan.offsets.keys()
    again.parent.mkdir()
    memonger.search_plan(_products(), budget=3 * WEIGHT, **OPTIONS).save(again)
    assert again.read_bytes() == planned.read_bytes()


@needs_cuda
def test_what_cannot_be_held_is_refused_with_what_can() -> None:
    with pytest.raises(memonger.BudgetError) as refused:
        memonger.search_plan(_products(), budget=WEIGHT // 2, **OPTIONS)
    smallest = refused.value.smallest
    assert refused.value.lower_bound <= smallest < 2 * WEIGHT
    plan = memonger.search_plan(_products(), budget=smallest, **OPTIONS)
    assert plan.total_bytes <= smallest
    assert len(plan.host_weights) == LAYERS
    with pytest.raises(memonger.SessionError, match="can't be used: node 'copy of w"):
        memonger.Session(plan, cuda_graph="on")


@needs_cuda
def test_a_refusal_says_which_weights_have_to_be_on_the_device_and_why() -> None:
    """Those of an LSTM, which its kernel keeps in cuDNN's form."""
    nodes = [helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=WIDTH, name="lstm")]
    weights = {name: normal(n, 1, 4 * WIDTH, WIDTH) for n, name in enumerate("wr")}
    model = model_of(nodes, {"x": [3, 1, WIDTH]}, {"y": [3, 1, 1, WIDTH]}, **weights)
    with pytest.raises(memonger.BudgetError) as refused:
        memonger.search_plan(model, budget=WEIGHT, **OPTIONS)
    assert "of its weights can't stay in the host's memory, as kernels keep a form of their own" in refused.value.hint
    assert "(LSTM) and 1 more" in refused.value.hint


@needs_cuda
def test_fit_and_pareto_use_it() -> None:
    memory = 4 * WEIGHT
    found = memonger.fit(_products("batch"), memory, **OPTIONS)
    assert found.plan is not None
    assert found.plan.host_weights
    assert memonger.search_plan(_products("batch"), batch=found.size, budget=memory, **OPTIONS).total_bytes <= memory
    with pytest.raises(memonger.BudgetError):
        memonger.search_plan(_products("batch"), batch=found.size + 1, budget=memory, **OPTIONS)
    whole, *others = memonger.pareto(_products(), points=8, **OPTIONS)
    assert not whole.host_weights
    totals = [plan.total_bytes for plan in (whole, *others)]
    assert totals == sorted(totals, reverse=True)
    assert totals[-1] < 2 * WEIGHT
    reads = [plan.read_bytes for plan in others]
    assert reads == sorted(reads)
    assert all(plan.host_weights for plan in others)


@needs_cuda
def test_frozen_weights_of_a_step_are_copied_for_both_passes() -> None:
    optimizer = memonger.SGD(lr=0.1)
    model = memonger.differentiate(
        memonger.add_lora(_products(), 4, "*"), loss="mean_squared_error", optimizer=optimizer
    )
    whole = memonger.search_plan(model, device="cuda:0")
    plan = memonger.search_plan(model, device="cuda:0", budget=whole.total_bytes - 4 * WEIGHT)
    assert plan.host_weights
    assert plan.total_bytes <= whole.total_bytes - 4 * WEIGHT
    copied = [node.inputs[0].name for node in plan.model.graph if node.op_type == COPY]
    assert max(copied.count(name) for name in plan.host_weights) == 2
    session = memonger.TrainingSession(plan)
    given = {name: np.zeros((4, WIDTH), np.float32) for name in ("v0", "target")}
    before = _in_use()
    for _ in range(2):
        session.step(given)
    assert _in_use() == before


@needs_cuda
def test_the_commands_say_so(tmp_path: Path) -> None:
    onnx.save(_products(), tmp_path / "model.onnx")
    run = CliRunner().invoke(
        main,
        ["plan", str(tmp_path / "model.onnx"), "--mode", "inference", "--device", "cuda", "--budget", f"{3 * WEIGHT}B"],
    )
    assert run.exit_code == 0, run.output
    assert "the others lie in the host's" in " ".join(run.output.split())
    frontier = CliRunner().invoke(
        main, ["pareto", str(tmp_path / "model.onnx"), "--mode", "inference", "--device", "cuda"], terminal_width=200
    )
    assert frontier.exit_code == 0, frontier.output
    assert "from the host" in frontier.output


def test_what_kernels_keep_or_read_on_the_host_is_no_copy() -> None:
    """Of recurrent layers cuDNN's form of a weight stays; what a node on the CPU reads is there; small ones aren't."""
    nodes = [
        helper.make_node("MatMul", ["x", "product"], ["a"], name="a"),
        helper.make_node("LSTM", ["s", "wi", "wr"], ["b"], hidden_size=128, name="b"),
        helper.make_node("MatMul", ["x", "hosted"], ["c"], name="c"),
        helper.make_node("MatMul", ["x", "small"], ["d"], name="d"),
        helper.make_node("MatMul", ["x", "both"], ["e"], name="e"),
        helper.make_node("MatMul", ["x", "both"], ["f"], name="f"),
    ]
    weights = {name: normal(0, 256, 256) for name in ("product", "hosted", "both")}
    weights |= {"small": normal(0, 256, 8), "wi": normal(1, 1, 512, 256), "wr": normal(2, 1, 512, 128)}
    shapes = {"a": [4, 256], "b": [2, 1, 4, 128], "c": [4, 256], "d": [4, 8], "e": [4, 256], "f": [4, 256]}
    model = ir.from_proto(model_of(nodes, {"x": [4, 256], "s": [2, 4, 256]}, shapes, **weights))
    assert [read.name for read in device_reads(model, {"c"})] == ["product", "both"]
    assert [read.name for read in device_reads(model, {"c", "f"})] == ["product"]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_chosen_fits_and_no_weight_more_would(seed: int) -> None:
    drawn = random.Random(seed)
    steps = drawn.randint(4, 20)
    live = np.array([drawn.randint(0, 1000) for _ in range(steps)])
    reads = random_reads(drawn, steps, 8)

    def most(copied: list[Read]) -> int:
        names = {read.name for read in copied}
        kept = sum(read.nbytes for read in reads if read.name not in names)
        there = [sum(r.resident for r in copied if (step, step) in r.ranges) for step in range(steps)]
        return max(kept + int(live[step]) + there[step] for step in range(steps))

    least, whole = most(reads), most([])
    for number in range(6):
        room = least + (max(whole, least) - least) * number // 5
        chosen = choose_copies(reads, live, room)
        assert most(chosen) <= room
        for read in chosen:
            assert most([other for other in chosen if other is not read]) > room
    with pytest.raises(ValueError, match=f"are below {least}"):
        choose_copies(reads, live, least - 1)


@needs_cuda
@pytest.mark.parametrize("change", ["shorter", "another"])
def test_a_file_that_changes_under_a_session_is_refused_by_name(change: str, tmp_path: Path) -> None:
    memonger.search_plan(_products(), budget=3 * WEIGHT, **OPTIONS).save(tmp_path / "planned.onnx")
    (data,) = tmp_path.glob("*.data")
    feed = {"v0": np.zeros((4, WIDTH), np.float32)}
    with memonger.Session(tmp_path / "planned.onnx") as session:
        session.run(feed)
        if change == "shorter":
            os.truncate(data, 4096)
        else:
            os.utime(data, (1, 1))
        with pytest.raises(memonger.SessionError, match=rf"{data.name} was changed .* it is {change} now"):
            session.run(feed)
    session = memonger.Session(memonger.search_plan(_products(), budget=3 * WEIGHT, **OPTIONS))  # in no file
    session.run(feed)
    assert session.weight_readers == ()
