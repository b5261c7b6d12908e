"""Every network of models/, cut down: planned at the lower bound, outputs equal to stock onnxruntime's bit for bit."""

from typing import Any

import numpy as np
import pytest

import memonger
import models
from memonger.graph.graph import ALIGNMENT
from tests.models.test_models import SMALL, small
from tests.support import networks


def _feeds(session: Any, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    feeds = {}
    for value in session.get_inputs():
        floating = value.type == "tensor(float)"
        array = rng.standard_normal(value.shape) if floating else rng.integers(0, 20, value.shape)
        feeds[value.name] = array.astype(np.float32 if floating else np.int64)
    return feeds


ALIKE = {
    "vgg11", "vgg16", "resnet34", "resnet101", "resnet152", "resnet200", "resnet110", "densenet201", "densenet_bc100",
    "gpt2",
}  # fmt: skip
"""Networks whose layers are those of one that is here, but for how many there are."""
BOTH = {"mobilenet_v2", "unet", "gpt"}
"""Planned in the portable and in the device form; others in one of them, by turns."""
PLANNED = [name for name in models.NAMES if name not in ALIKE]


@pytest.mark.parametrize(
    ("name", "device"),
    [
        (name, device)
        for number, name in enumerate(PLANNED)
        for device in (("none", "cpu") if name in BOTH else ("none", "cpu")[number % 2 :][:1])
    ],
)
def test_planned_at_the_lower_bound_with_the_same_bits(name: str, device: str) -> None:
    model = small(name)
    if name == "resnet1001":  # deeper than any other, here alone
        model = models.build(name, batch=2, **{**SMALL[name], "depth": 110})
    plan = memonger.search_plan(model, device=device, mode="inference", threads=1)
    assert plan.lower_bound_bytes <= plan.arena_bytes < plan.lower_bound_bytes + ALIGNMENT
    session = memonger.Session(plan)
    stock = networks.stock(model, "ORT_DISABLE_ALL" if device == "none" else "ORT_ENABLE_ALL", threads=1)
    results = []
    for seed in (1, 2):
        feeds = _feeds(stock, seed)
        expected = networks.run_stock(stock, feeds)
        session.arena.fill(0xFF)
        assert networks.same_bits(session.run(feeds), expected)
        results.append(expected)
    assert not networks.same_bits(*results)


def test_every_network_is_here() -> None:
    assert set(SMALL) == set(models.NAMES)
