"""Adam with moments of 8 bits, against bitsandbytes' published algorithm in numpy and against 32 bits."""

from typing import Any

import numpy as np
import onnx
import pytest

import memonger
from memonger.errors import PlanError
from tests.support.training_steps import Stock

BLOCK, ROWS, WIDTH = 2048, 8, 72  # the weight has 5,184 elements: two blocks and a half; the bias is small


def dynamic_map(signed: bool) -> np.ndarray:
    """bitsandbytes.functional.create_dynamic_map with 7 exponent bits of 8, written from its description."""
    numbers = [0.0, 1.0]
    for exponent in range(7):
        edges = np.linspace(0.1, 1, 2**exponent + 1 if signed else 2 ** (exponent + 1) + 1)
        for middle in (edges[:-1] + edges[1:]) / 2:
            numbers += [10.0 ** (exponent - 6) * middle, *([-(10.0 ** (exponent - 6)) * middle] if signed else [])]
    assert len(numbers) == 256
    return np.sort(np.array(numbers, np.float32))


def quantized(x: np.ndarray, signed: bool) -> tuple[np.ndarray, np.ndarray]:
    """The nearest code of each element over its block's largest, and those; a sign is never lost."""
    numbers = dynamic_map(signed)
    largest = np.abs(x).max(1, keepdims=True)
    codes = np.abs((x / np.maximum(largest, 1e-38))[..., None] - numbers).argmin(-1)
    codes -= (x < 0) & (numbers[codes] == 0)
    return codes.astype(np.uint8), largest


class Reference:
    """The kernel of Dettmers et al.: moments are read from 8 bits, moved, used in full, and written to 8 bits."""

    def __init__(self, p: np.ndarray, lr: float) -> None:
        self.p, self.lr, self.t = p, lr, 0
        blocks = -(-p.size // BLOCK)
        self.codes = [np.zeros((blocks, BLOCK), np.uint8) for _ in range(2)]
        self.largest = [np.zeros((blocks, 1), np.float32) for _ in range(2)]

    def step(self, gradient: np.ndarray) -> None:
        self.t += 1
        g = np.zeros(self.codes[0].size, np.float32)
        g[: gradient.size] = gradient.reshape(-1)
        g = g.reshape(-1, BLOCK)
        m, v = (dynamic_map(k == 0)[self.codes[k]] * self.largest[k] for k in range(2))
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        for k, moment in enumerate((m, v)):
            self.codes[k], self.largest[k] = quantized(moment, k == 0)
        change = (m / (1 - 0.9**self.t)) / (np.sqrt(v / (1 - 0.999**self.t)) + 1e-8)
        self.p = self.p - self.lr * change.reshape(-1)[: gradient.size].reshape(gradient.shape)


def model() -> onnx.ModelProto:
    made = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]>
        g (float[{ROWS},{WIDTH}] x) => (float[{ROWS},{WIDTH}] y) {{ y = Gemm(x, weight, bias) }}"""
    )
    generator = np.random.default_rng(0)
    for name, shape in (("weight", (WIDTH, WIDTH)), ("bias", (WIDTH,))):
        array = generator.standard_normal(shape).astype(np.float32) * 0.1
        made.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return made


def feeds(number: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(number)
    x, target = generator.standard_normal((2, ROWS, WIDTH)).astype(np.float32)
    x[:, ::7] *= 1e-4  # gradients of several magnitudes
    return {"x": x, "target": target}


def test_moments_of_8_bits_are_bitsandbytes() -> None:
    optimizer = memonger.Adam(0.01, bits=8)
    stock = Stock(memonger.differentiate(model(), loss="mean_squared_error", optimizer=optimizer))
    assert {name: (a.dtype.name, a.shape) for name, a in stock.state.items() if "exp" in name} == {
        "weight.exp_avg": ("uint8", (3, BLOCK)),
        "weight.exp_avg.largest": ("float32", (3, 1)),
        "weight.exp_avg_sq": ("uint8", (3, BLOCK)),
        "weight.exp_avg_sq.largest": ("float32", (3, 1)),
        "bias.exp_avg": ("float32", (WIDTH,)),
        "bias.exp_avg_sq": ("float32", (WIDTH,)),
    }
    reference = Reference(stock.state["weight"].copy(), 0.01)
    for number in range(5):
        given, weight, bias = feeds(number), stock.state["weight"], stock.state["bias"]
        slope = 2 * (given["x"] @ weight + bias - given["target"]) / given["target"].size
        reference.p = weight
        for k, name in enumerate(("exp_avg", "exp_avg_sq")):  # one step each from the same state: codes of ties differ
            reference.codes[k], reference.largest[k] = (
                stock.state[f"weight.{name}"],
                stock.state[f"weight.{name}.largest"],
            )
        reference.step(given["x"].T @ slope)
        stock.step(given, number)
        np.testing.assert_allclose(stock.state["weight"], reference.p, rtol=1e-4, atol=2e-5)
        for k, name in enumerate(("exp_avg", "exp_avg_sq")):
            np.testing.assert_allclose(stock.state[f"weight.{name}.largest"], reference.largest[k], rtol=1e-5)
            apart = np.abs(stock.state[f"weight.{name}"].astype(int) - reference.codes[k])
            assert apart.max() <= 1
            assert (apart > 0).mean() < 0.03


@pytest.mark.parametrize("optimizer", [memonger.Adam(0.01, bits=8), memonger.AdamW(0.01, bits=8)], ids=repr)
def test_a_session_keeps_a_quarter_of_the_state_and_its_bits(optimizer: Any) -> None:
    made = memonger.differentiate(model(), loss="mean_squared_error", optimizer=optimizer)
    plan = memonger.search_plan(made)
    trainer, stock = memonger.TrainingSession(plan), Stock(made)
    for number in range(3):
        assert trainer.step(feeds(number)) == float(stock.step(feeds(number), number)["loss"])
    state = trainer.state_dict()
    for name, array in stock.state.items():
        np.testing.assert_array_equal(state[name], array)
    own = sum(array.nbytes for name, array in state.items() if name.startswith("weight.exp"))
    assert own == 3 * (2 * BLOCK + 8)


def test_eight_bits_learn_as_thirty_two_do() -> None:
    ends = []
    for bits in (32, 8):
        made = memonger.differentiate(model(), loss="mean_squared_error", optimizer=memonger.Adam(0.01, bits=bits))
        trainer = memonger.TrainingSession(memonger.search_plan(made))
        losses = [trainer.step(feeds(number % 4)) for number in range(60)]
        ends.append(np.mean(losses[-4:]) / losses[0])
    assert ends[0] < 0.2
    assert ends[1] == pytest.approx(ends[0], rel=0.05)


def test_blocks_without_a_gradient_stay_and_infinite_ones_end_no_step() -> None:
    """A block of zeros has nothing to divide by; what isn't a number must not become an index."""
    optimizer = memonger.Adam(0.01, bits=8)
    stock = Stock(memonger.differentiate(model(), loss="mean_squared_error", optimizer=optimizer))
    before, given = stock.state["weight"], feeds(0)
    given["x"][:, :36] = 0  # more than a block's rows
    stock.step(given, 0)
    np.testing.assert_array_equal(stock.state["weight"][:36], before[:36])
    assert not stock.state["weight.exp_avg.largest"][0].any()
    assert np.isfinite(stock.state["weight"]).all()
    given["x"][0] = np.inf
    stock.step(given, 1)
    assert not np.isfinite(stock.state["weight"]).all()


def test_other_numbers_of_bits_are_refused() -> None:
    with pytest.raises(PlanError, match="bits must be 32 or 8, not 4"):
        memonger.AdamW(bits=4)
