"""Optimizer steps against torch.optim, and what must change nothing."""

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import memonger
from memonger.autodiff import optimizers
from memonger.cli import commands
from memonger.errors import PlanError
from tests.support.training_steps import (
    BATCH,
    Stock,
    assert_equal,
    batch,
    differentiated,
    model,
    net,
    torch_steps,
    twin,
)

STEPS = 5

PAIRS: dict[str, tuple[Any, Any]] = {
    "plain": (memonger.SGD(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "decay": (memonger.SGD(0.1, weight_decay=0.05), lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.05)),
    "momentum": (memonger.SGD(0.1, momentum=0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "dampening": (
        memonger.SGD(0.1, momentum=0.8, dampening=0.3, weight_decay=0.02),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.8, dampening=0.3, weight_decay=0.02),
    ),
    "dampening without decay": (
        memonger.SGD(0.1, momentum=0.8, dampening=0.3),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.8, dampening=0.3),
    ),
    "nesterov": (
        memonger.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.02),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.02),
    ),
    "adam": (memonger.Adam(0.02), lambda p: torch.optim.Adam(p, 0.02)),
    "adam with penalty": (
        memonger.Adam(0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, 0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    ),
    "adamw": (memonger.AdamW(0.02, weight_decay=0.3), lambda p: torch.optim.AdamW(p, 0.02, weight_decay=0.3)),
    "adamw without decay": (
        memonger.AdamW(0.02, weight_decay=0.0),
        lambda p: torch.optim.AdamW(p, 0.02, weight_decay=0.0),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_five_steps_are_torch_optims(name: str) -> None:
    ours, theirs = PAIRS[name]
    module, forward = twin()
    stock = Stock(differentiated(forward, optimizer=ours))
    assert (stock.roles.state == ()) == (name in ("plain", "decay"))  # without momentum there is nothing to keep
    batches = [batch(k) for k in range(STEPS)]
    losses = [float(stock.step(feeds, k)["loss"]) for k, feeds in enumerate(batches)]
    expected, _ = torch_steps(module, theirs(module.parameters()), batches)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    assert_equal(stock, module)
    assert not np.allclose(stock.state["0.weight"], net().state_dict()["0.weight"].numpy(), atol=1e-3)


@pytest.mark.parametrize("name", ["decay", "nesterov", "adamw", "adam with penalty"])
@pytest.mark.parametrize("clip_norm", [0.05, 100.0])
def test_clipping_is_clip_grad_norm(name: str, clip_norm: float) -> None:
    ours, theirs = PAIRS[name]
    module, forward = twin()
    stock = Stock(differentiated(forward, optimizer=ours, clip_norm=clip_norm))
    batches = [batch(k) for k in range(STEPS)]
    norms = [float(stock.step(feeds, k)["gradient_norm"]) for k, feeds in enumerate(batches)]
    _, expected = torch_steps(module, theirs(module.parameters()), batches, clip_norm=clip_norm)
    np.testing.assert_allclose(norms, expected, rtol=1e-4)
    assert all((norm > clip_norm) == (clip_norm < 1) for norm in norms)
    assert_equal(stock, module)


@pytest.mark.parametrize(
    ("name", "clip_norm"), [("plain", None), ("nesterov", 0.05), ("adam", None), ("adam", 0.05), ("adamw", 0.05)]
)
def test_accumulated_steps_are_torchs(name: str, clip_norm: float | None) -> None:
    ours, theirs = PAIRS[name]
    module, forward = twin()
    options: dict[str, Any] = {"optimizer": ours, "clip_norm": clip_norm}
    add = Stock(differentiated(forward, accumulate="add", **options))
    apply = Stock(differentiated(forward, accumulate="apply", **options))
    batches = [batch(k) for k in range(3 * STEPS)]
    for number in range(STEPS):
        first, second, last = batches[3 * number : 3 * number + 3]
        for feeds in (first, second):
            before = {k: v for k, v in apply.state.items() if k in add.roles.parameters}
            add.state.update({k: v for k, v in apply.state.items() if k in add.state})
            add.step(feeds)
            apply.state.update({k: v for k, v in add.state.items() if k in apply.state})
            assert all(apply.state[k] is v or np.array_equal(apply.state[k], v) for k, v in before.items())
        apply.step(last, number, accumulation_scale=1 / 3)
        for total in apply.roles.accumulated.values():
            apply.state[total] = np.zeros_like(apply.state[total])
    torch_steps(module, theirs(module.parameters()), batches, micro=3, clip_norm=clip_norm)
    assert_equal(apply, module)


def test_accumulation_is_one_large_batch_where_nothing_hangs_on_the_batch() -> None:
    module = net().eval()
    halves = [batch(0), batch(1)]
    whole = {name: np.concatenate([half[name] for half in halves]) for name in halves[0]}
    options: dict[str, Any] = {"loss": "softmax_cross_entropy", "optimizer": memonger.Adam(0.02)}
    one = Stock(memonger.differentiate(model(module, 2 * BATCH), **options))
    add = Stock(memonger.differentiate(model(module), accumulate="add", **options))
    apply = Stock(memonger.differentiate(model(module), accumulate="apply", **options))
    one.step(whole)
    add.step(halves[0])
    apply.state.update(add.state)
    apply.step(halves[1], accumulation_scale=0.5)
    for name in one.roles.parameters:
        np.testing.assert_allclose(apply.state[name], one.state[name], rtol=1e-5, atol=1e-6)


def test_adding_needs_no_optimizer_and_has_no_state() -> None:
    roles = Stock(differentiated(model(net()), accumulate="add")).roles
    assert roles.state == ()
    assert roles.accumulated == {name: f"{name}.accumulated" for name in roles.parameters}
    assert [old for old in roles.updates if old in roles.parameters] == []
    assert set(roles.updates) == {*roles.accumulated.values(), *roles.statistics}


def test_applying_leaves_the_sums_to_who_zeroes_them() -> None:
    roles = Stock(differentiated(model(net()), accumulate="apply", optimizer=memonger.Adam())).roles
    assert roles.scalars["accumulation_scale"] == "accumulation_scale"
    assert set(roles.accumulated) == set(roles.parameters)
    assert set(roles.updates) == {*roles.parameters, *roles.state, *roles.statistics}


_FORWARD = model(net())


def _bits(stock: Stock) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in stock.state.items()}


def test_patterns_name_parameters_without_decay() -> None:
    module, forward = twin()
    ours = memonger.AdamW(0.02, weight_decay=0.5, no_decay=("*.bias", "1.weight"))
    stock = Stock(differentiated(forward, optimizer=ours))
    named = dict(module.named_parameters())
    free = [p for name, p in named.items() if name.endswith("bias") or name == "1.weight"]
    groups = [{"params": free, "weight_decay": 0.0}, {"params": [named["0.weight"], named["3.weight"]]}]
    batches = [batch(k) for k in range(STEPS)]
    for k, feeds in enumerate(batches):
        stock.step(feeds, k)
    torch_steps(module, torch.optim.AdamW(groups, 0.02, weight_decay=0.5), batches)
    assert_equal(stock, module)
    with pytest.raises(PlanError, match=r"no_decay names 'bias', which is no trained parameter; there are '0.weight'"):
        differentiated(forward, optimizer=memonger.SGD(no_decay=["bias"]))


def test_the_learning_rate_is_an_input_with_a_default() -> None:
    stock = Stock(differentiated(_FORWARD, optimizer=memonger.SGD(0.25)))
    name = stock.roles.scalars["learning_rate"]
    defaults = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in stock.model.graph.initializer}
    assert defaults[name] == np.float32(0.25)
    assert defaults[name].shape == ()
    before = dict(stock.state)
    stock.step(batch(0), learning_rate=0.0)
    assert all(np.array_equal(stock.state[k], before[k]) for k in stock.roles.parameters)
    stock.step(batch(0))
    assert not np.array_equal(stock.state["0.weight"], before["0.weight"])


def test_a_learning_rate_of_zero_is_no_division_by_zero() -> None:
    stock = Stock(differentiated(_FORWARD, optimizer=memonger.AdamW(0.0)))
    before = _bits(stock)
    stock.step(batch(0))
    assert all(np.isfinite(array).all() for array in stock.state.values())
    assert all(_bits(stock)[name] == before[name] for name in stock.roles.parameters)


@pytest.mark.parametrize("optimizer", [memonger.SGD(0.1, momentum=0.9), memonger.AdamW(0.01)], ids=["sgd", "adamw"])
def test_updates_follow_their_gradient_at_once(optimizer: Any) -> None:
    made = differentiated(_FORWARD, optimizer=optimizer)
    places = {value.name: k for k, node in enumerate(made.ir.graph) for value in node.outputs}
    nodes = list(made.ir.graph)
    last = max(k for k, node in enumerate(nodes) if str(node.name).startswith("grad/"))
    assert places["3.weight.next"] < last
    assert places["1.weight.next"] < last


@pytest.mark.parametrize("optimizer", [v[0] for v in PAIRS.values()], ids=list(PAIRS))
def test_every_update_can_be_written_over_what_it_updates(optimizer: Any) -> None:
    plan = memonger.search_plan(differentiated(_FORWARD, optimizer=optimizer))
    assert plan.training is not None
    updated = [pair for pairs in plan.graph.updates for pair in pairs]
    assert {plan.graph.values[old] for old, _ in updated} == set(plan.training.updates)


def test_parameters_of_sixteen_bits_are_updated_in_their_own_type() -> None:
    forward = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]>
        g (float16[4] x, float16[4] w) => (float16[4] y) { y = Mul(x, w) }"""
    )
    loss = memonger.MeanSquaredError()
    x, target = np.arange(1, 5, dtype=np.float16), np.zeros(4, np.float16)
    for ours, theirs in (
        PAIRS["nesterov"],
        (memonger.Adam(0.02, eps=1e-3), lambda p: torch.optim.Adam(p, 0.02, eps=1e-3)),
    ):
        w = torch.linspace(-1, 1, 4).requires_grad_()
        stock = Stock(
            memonger.differentiate(forward, wrt=["w"], loss=loss, optimizer=ours),
            {"w": w.detach().numpy().astype(np.float16)},
        )
        optimizer = theirs([w])
        for number in range(3):
            stock.step({"x": x, "target": target}, number)
            optimizer.zero_grad()
            (torch.from_numpy(x.astype(np.float32)) * w).square().mean().backward()
            optimizer.step()
        assert stock.state["w"].dtype == np.float16
        np.testing.assert_allclose(stock.state["w"], w.detach().numpy(), atol=4e-3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: memonger.SGD(-0.1), r"SGD: lr must be a number from 0 to float32's largest, not -0\.1"),
        (lambda: memonger.SGD(1e39), r"SGD: lr must be a number from 0 to float32's largest, not 1e\+39"),
        (lambda: memonger.Adam(float("nan")), r"Adam: lr must be a number"),
        (lambda: memonger.SGD(float("nan")), r"SGD: lr must be .*not nan"),
        (lambda: memonger.SGD(0.1, nesterov=True), r"nesterov=True\) needs a momentum"),
        (lambda: memonger.SGD(0.1, momentum=0.9, dampening=0.1, nesterov=True), r"no dampening"),
        (lambda: memonger.Adam(betas=(0.9, 1.0)), r"betas must be two numbers.*not \(0\.9, 1\.0\)"),
        (lambda: memonger.AdamW(eps=-1.0), r"AdamW: eps must be .*not -1\.0"),
    ],
)
def test_settings_that_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": memonger.SGD()}, "needs a loss"),
        ({"loss": "softmax_cross_entropy", "clip_norm": 1.0}, "need an optimizer"),
        ({"loss": "softmax_cross_entropy", "accumulate": "apply"}, "need an optimizer"),
        ({"loss": "softmax_cross_entropy", "accumulate": "sum"}, "accumulate must be .*not 'sum'"),
        ({"loss": "softmax_cross_entropy", "optimizer": "sgd"}, "optimizer='sgd' is no optimizer"),
        (
            {"loss": "softmax_cross_entropy", "optimizer": memonger.SGD(), "clip_norm": 0.0},
            "clip_norm must be .*not 0.0",
        ),
        (
            {"loss": "softmax_cross_entropy", "optimizer": memonger.SGD(), "clip_norm": np.inf},
            "clip_norm must be .*not inf",
        ),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        memonger.differentiate(_FORWARD, **options)


def test_the_same_model_gives_the_same_bytes() -> None:
    made = [ir.to_proto(differentiated(_FORWARD, optimizer=memonger.AdamW()).ir) for _ in range(2)]
    assert made[0].SerializeToString(deterministic=True) == made[1].SerializeToString(deterministic=True)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            memonger.SGD(0.1, momentum=0.9, weight_decay=0.02, maximize=True),
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.02, maximize=True),
        ),
        (
            memonger.Adam(0.02, amsgrad=True, maximize=True, weight_decay=0.1),
            lambda p: torch.optim.Adam(p, 0.02, amsgrad=True, maximize=True, weight_decay=0.1),
        ),
        (memonger.AdamW(0.02, amsgrad=True), lambda p: torch.optim.AdamW(p, 0.02, amsgrad=True)),
        (memonger.AdamW(0.02, maximize=True), lambda p: torch.optim.AdamW(p, 0.02, maximize=True)),
    ],
    ids=["sgd", "adam", "adamw with amsgrad", "adamw"],
)
def test_amsgrad_and_maximize_are_torch_optims(ours: Any, theirs: Any) -> None:
    module, forward = twin()
    stock = Stock(differentiated(forward, optimizer=ours))
    batches = [batch(k % 2) for k in range(2 * STEPS)]
    for k, feeds in enumerate(batches):
        stock.step(feeds, k)
    torch_steps(module, theirs(module.parameters()), batches)
    assert_equal(stock, module, 1e-4)


def test_lion_is_as_published() -> None:
    _, forward = twin()
    optimizer = memonger.Lion(0.01, betas=(0.8, 0.95), weight_decay=0.1)
    stock = Stock(differentiated(forward, optimizer=optimizer))
    plain = Stock(differentiated(forward))  # gives gradients
    means = {name: np.zeros_like(stock.state[name]) for name in stock.roles.parameters}
    for number in range(STEPS):
        plain.state.update({name: stock.state[name] for name in plain.state})
        before = dict(stock.state)
        results = plain.step(batch(number), number)
        stock.step(batch(number), number)
        for name, mean in means.items():
            gradient = results[plain.roles.gradients[name]]
            change = np.sign(0.8 * mean + 0.2 * gradient)
            means[name] = 0.95 * mean + 0.05 * gradient
            expected = before[name] - 0.01 * (change + 0.1 * before[name])
            np.testing.assert_allclose(stock.state[name], expected, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(stock.state[f"{name}.exp_avg"], means[name], rtol=1e-4, atol=1e-7)


def test_averages_of_parameters_are_torchs() -> None:
    module, forward = twin()
    stock = Stock(differentiated(forward, optimizer=memonger.SGD(0.1), ema=0.9))
    average = torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for k in range(STEPS):
        stock.step(batch(k), k)
        torch_steps(module, optimizer, [batch(k)])
        average.update_parameters(module)
    for name, tensor in average.module.named_parameters():
        found = stock.state[stock.roles.averages[name]]
        np.testing.assert_allclose(found, tensor.detach(), rtol=2e-5, atol=2e-6)
        assert not np.allclose(found, stock.state[name], atol=1e-4)
    with pytest.raises(PlanError, match="ema is a share of at least 0 and below 1, and needs an optimizer: not 1"):
        differentiated(forward, optimizer=memonger.SGD(0.1), ema=1)
    with pytest.raises(PlanError, match="amsgrad needs bits=32"):
        memonger.Adam(amsgrad=True, bits=8)


def test_the_command_line_has_the_names() -> None:
    (option,) = [each for each in commands.plan_command.params if each.name == "optimizer"]
    assert tuple(option.type.choices) == tuple(optimizers.NAMES)
