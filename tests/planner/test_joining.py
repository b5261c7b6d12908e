"""Training steps with joined products: when they are taken, and that nothing else changes."""

import functools
from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper

import memonger
import models

pytest.importorskip("onnxruntime")

from memonger.lowering.lowered import portable
from memonger.tiling import joining
from memonger.tiling.joining import JoinedProduct, joined_products
from tests.support.stock import normal, parse
from tests.support.training_models import trained

BATCH, STEPS = 16, 4
JOINED = ".joined"


@functools.cache
def _training() -> memonger.Model:
    settings = {"seq_len": STEPS, "num_hidden": 32, "num_layers": 1, "vocabulary": 50, "dropout": 0.3, "batch": BATCH}
    model = memonger.load(models.build_ir("lstm", training=True, **settings))
    return memonger.differentiate(model, loss="loss", optimizer=memonger.SGD(lr=0.05, momentum=0.9))


def _search(**options: Any) -> memonger.Plan:
    return memonger.search_plan(_training(), device="cpu", threads=1, chunks="off", **options)


@functools.cache
def _plan(strategy: str = "none") -> memonger.Plan:
    return _search(strategy=strategy)


@functools.cache
def _apart() -> memonger.Plan:
    """The plan with nothing recomputed whose products stay apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joining, "joined_products", lambda model, apart=(): (model, ()))
        return _search(strategy="none")


def _joined(plan: memonger.Plan) -> list[str]:
    return [name for name in plan.graph.nodes if name.endswith(JOINED)]


def _assert_same(one: memonger.Plan, other: memonger.Plan) -> None:
    (losses, state), (expected_losses, expected_state) = trained(one, 3), trained(other, 3)
    assert losses == expected_losses
    assert state.keys() == expected_state.keys()
    for key, array in expected_state.items():
        np.testing.assert_array_equal(state[key], array, err_msg=key)


def test_inputs_of_all_steps_are_one_product_where_nothing_is_recomputed() -> None:
    plan, apart = _plan(), _apart()
    assert _joined(plan)
    assert not _joined(apart)
    assert plan.total_bytes <= apart.total_bytes
    assert len(plan.graph.nodes) < len(apart.graph.nodes)
    _assert_same(plan, apart)


def test_steps_that_are_recomputed_have_the_same_bits_and_products_of_their_own() -> None:
    plan = _plan("sweep")
    assert plan.recomputed
    assert not _joined(plan)
    _assert_same(plan, _plan())


def test_a_budget_that_needs_no_recomputation_takes_joined_products() -> None:
    budget = _plan().total_bytes
    plan = _search(budget=budget, effort=500)
    assert _joined(plan)
    assert plan.total_bytes <= budget
    less = _search(budget=budget - 4096, effort=500)
    assert not _joined(less)


def test_products_that_give_other_bits_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may take another path for another number of rows."""
    refused = list[str]()

    def differs(model: object, joined: object, product: JoinedProduct, check: object) -> bool:
        refused.append(product.name)
        return len(refused) == 1

    monkeypatch.setattr(joining, "_differs", differs)
    plan = _search(strategy="none")
    assert refused[0] not in _joined(plan)
    assert 0 < len(_joined(plan)) < len(_joined(_plan()))


def test_joined_products_that_take_more_memory_are_left() -> None:
    """Towers of one weight that isn't trained: one after the other they need room for one wide value, not for four."""
    towers = "\n".join(
        f"[up{t}] u{t} = MatMul(i{t}, w)\n[bend{t}] r{t} = Relu(u{t})\n[down{t}] d{t} = MatMul(r{t}, v)"
        for t in range(4)
    )
    inputs = ", ".join(f"float[16,8] i{t}" for t in range(4))
    forward = parse(
        f"agraph ({inputs}) => (float[16,4] y) {{\n{towers}\n[sum] d = Sum(d0, d1, d2, d3)\n[scale] y = Mul(d, s)\n}}"
    )
    arrays = {"w": normal(0, 8, 512), "v": normal(1, 512, 4), "s": normal(2, 4)}
    forward.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    step = memonger.differentiate(forward, loss="mean_squared_error", optimizer=memonger.SGD(lr=0.1), wrt=["s"])
    assert [len(each.parts) for each in joined_products(portable(step).model)[1]] == [4, 4]
    plan = memonger.search_plan(step, device="cpu", threads=1, strategy="none")
    assert not _joined(plan)
    roomy = memonger.search_plan(step, device="cpu", threads=1, budget=2 * plan.total_bytes + 16 * 512 * 4 * 4)
    assert _joined(roomy)
