"""onnx's own light models, planned and run, against stock onnxruntime to the last bit."""

from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import pytest

import memonger
from tests.support import networks
from tests.support.one_node_executor import run_poisoned

DEVICES = {  # both for one that takes a moment; the others by turns. vgg19 and zfnet512 are chains as AlexNet is;
    # tests/planner/test_networks_planned.py has residual and densely connected networks
    "bvlc_alexnet": ("none",),
    "inception_v1": ("cpu",),  # as inception_v2 is
    "shufflenet": ("none", "cpu"),
    "squeezenet": ("none",),
}
LEVELS = {"none": "ORT_DISABLE_ALL", "cpu": "ORT_ENABLE_ALL"}


def _inputs(plan: memonger.Plan, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        str(value.name): rng.standard_normal([int(dim) for dim in value.shape or ()], np.float32)
        for value in plan.model.graph.inputs
    }


_light = lru_cache(3)(networks.light)  # drawing the weights takes as long as a plan


@cache
def _planned(name: str, device: str) -> memonger.Plan:
    return memonger.search_plan(_light(name), device=device, mode="inference", threads=1)


@pytest.mark.parametrize("name", DEVICES)
def test_outputs_equal_stock_bit_for_bit_from_any_arena(name: str) -> None:
    for seed, device in enumerate(DEVICES[name], 1):
        plan = _planned(name, device)
        plan.verify()
        assert plan.chunks or plan.arena_bytes == plan.lower_bound_bytes
        session, stock = memonger.Session(plan), networks.stock(_light(name), LEVELS[device], threads=1)
        feeds = _inputs(plan, seed)
        expected = networks.run_stock(stock, feeds)
        session.arena.fill(0xFF)  # a float of these bytes is a NaN
        assert networks.same_bits(session.run(feeds), expected)
        if seed == 1:
            other = networks.run_stock(stock, _inputs(plan, seed + 1))
            assert not networks.same_bits(expected, other), "a comparison whose output ignores its input proves nothing"


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("inception_v1", "cpu"),
        ("shufflenet", "none"),
        ("squeezenet", "none"),
    ],
)
def test_no_step_reads_a_byte_that_died(name: str, device: str) -> None:
    plan = _planned(name, device)
    feeds = _inputs(plan, 3)
    expected = networks.run_stock(networks.stock(_light(name), LEVELS[device], threads=1), feeds)
    assert networks.same_bits(run_poisoned(plan, feeds), expected)


def test_the_poisoning_executor_catches_a_wrong_plan() -> None:
    plan = _planned("squeezenet", "none")
    feeds = _inputs(plan, 3)
    expected = run_poisoned(plan, feeds)
    conv = next(n for n, op in enumerate(plan.graph.ops) if op == "Concat")
    wrong = dict(plan.offsets)
    first, second = plan.graph.reads[conv][:2]
    wrong[second] = wrong[first]
    bad = memonger.Plan(
        model=plan.model, graph=plan.graph, offsets=wrong, arena_bytes=plan.arena_bytes, alignment=plan.alignment,
        mode=plan.mode, device=plan.device, stamp=None, threads=0, workspace=None,
    )  # fmt: skip
    with pytest.raises(memonger.VerificationError):
        bad.verify()
    assert not networks.same_bits(run_poisoned(bad, feeds), expected)


def test_a_plan_is_the_same_byte_for_byte_each_time(tmp_path: Path) -> None:
    """Of portable ones `tests/planner/test_planning.py` says so, across processes."""
    files = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        plan = memonger.search_plan(_light("squeezenet"), device="cpu", mode="inference")
        plan.save(folder / "planned.onnx")
        files.append({each.name: each.read_bytes() for each in folder.iterdir()})
    assert files[0] == files[1]
