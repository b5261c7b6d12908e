"""Sessions that take smaller batches: filled up, cut, and refused where rows of a batch meet."""

from typing import Any

import numpy as np
import onnx
import pytest

import memonger
from memonger.errors import SessionError
from tests.support import training_models
from tests.support.stock import LEVELS, normal, parse, run_stock


def scores(batch: str | int = "b") -> onnx.ModelProto:
    """Each row alone: a product, and a division by the row's norm that is NaN for zeros."""
    model = parse(
        f"g (float[{batch}, 8] x, float[8] scale) => (float[{batch}, 3] y, float[{batch}, 8] unit) {{ h = Mul(x, scale)"
        "  n = ReduceL2 <axes = [1]> (h)  unit = Div(h, n)  y = MatMul(unit, w) }"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(normal(0, 8, 3), "w"))
    return model


def plan(model: onnx.ModelProto, batch: int | None = None, **choices: Any) -> memonger.Plan:
    return memonger.search_plan(model, batch=batch, mode="inference", **{"device": "none", **choices})


def rows(count: int, seed: int = 1) -> dict[str, np.ndarray]:
    return {"x": normal(seed, count, 8), "scale": normal(9, 8)}


def as_stock(found: dict[str, np.ndarray], feeds: dict[str, np.ndarray]) -> None:
    stock = run_stock(scores(), feeds, "ORT_DISABLE_ALL")
    for name, array in stock.items():
        assert found[name].shape == array.shape
        np.testing.assert_allclose(found[name], array, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("count", [1, 3, 4])
@pytest.mark.parametrize("copy", [True, False])
def test_a_smaller_batch_has_the_outputs_of_its_rows(count: int, copy: bool) -> None:
    session = memonger.Session(plan(scores(), 4), pad=True)
    for seed in (1, 2):
        as_stock(session.run(rows(count, seed), copy=copy), rows(count, seed))


def test_the_next_larger_plan_takes_it() -> None:
    session = memonger.Session([plan(scores(), batch) for batch in (8, 2, 4)], pad=True)
    for count in range(1, 9):
        session.arena.fill(0xFF)
        as_stock(session.run(rows(count)), rows(count))
    with pytest.raises(SessionError, match="no plan was made for the input shapes"):
        session.run(rows(9))


def test_outputs_are_written_to_arrays_of_the_rows_given() -> None:
    session, y = memonger.Session(plan(scores(), 4), pad=True), np.zeros((3, 3), np.float32)
    found = session.run(rows(3), {"y": y})
    assert found["y"] is y
    as_stock(found, rows(3))
    with pytest.raises(SessionError, match=r"output 'y' is float32\[3, 3\], what was given for it is float32\[4, 3\]"):
        session.run(rows(3), {"y": np.zeros((4, 3), np.float32)})


def test_rows_of_a_model_with_a_static_batch() -> None:
    session = memonger.Session(plan(scores(4)), pad=True)
    as_stock(session.run(rows(2)), rows(2))


def test_without_padding_the_error_offers_it() -> None:
    with pytest.raises(SessionError, match=r"planned for \[4, 8\].*filled up \(pad=True\)"):
        memonger.Session(plan(scores(), 4)).run(rows(3))
    with pytest.raises(SessionError) as error:
        memonger.Session(plan(scores(), 4)).run(rows(5))
    assert "pad" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "y = Sub(x, m)  m = ReduceMean <axes = [0]> (x)",
        "y = MatMul(p, x)  t = Transpose(x)  s = MatMul(x, t)  p = Softmax(s)",
        "y = Softmax <axis = 0> (x)",
    ],
    ids=["mean", "attention", "softmax"],
)
def test_rows_that_meet_are_found_out_at_the_first_smaller_batch(text: str) -> None:
    body = "  ".join(reversed(text.split("  ")))
    session = memonger.Session(plan(parse(f"g (float[b, 6] x) => (float[b, 6] y) {{ {body} }}"), 4), pad=True)
    session.run({"x": normal(1, 4, 6)})
    for _ in range(2):
        with pytest.raises(SessionError, match=r"output 'y' of a row depends on the other rows.*batch=3"):
            session.run({"x": normal(1, 3, 6)})


def test_zeros_as_the_last_row_do_not_hide_that_rows_meet() -> None:
    model = parse("g (float[b, 6] x) => (float[b, 6] y) { m = ReduceMean <axes = [0]> (x)  y = Sub(x, m) }")
    session, x = memonger.Session(plan(model, 4), pad=True), normal(1, 2, 6)
    x[-1] = 0
    with pytest.raises(SessionError, match="depends on the other rows"):
        session.run({"x": x})


def test_an_output_without_the_batch_is_refused_by_name() -> None:
    model = parse("g (float[b, 6] x) => (float[b, 6] y, float[6] m) { m = ReduceMean <axes = [0], keepdims = 0> (x)"
                  "  y = Sub(x, m) }")  # fmt: skip
    with pytest.raises(SessionError, match=r"output 'm' is \[6\], and so doesn't begin with the batch of 4"):
        memonger.Session(plan(model, 4), pad=True)


def test_inputs_with_different_numbers_of_rows_are_refused() -> None:
    model = parse("g (float[b, 6] x, float[b, 6] z) => (float[b, 6] y) { y = Add(x, z) }")
    session = memonger.Session(plan(model, 4), pad=True)
    with pytest.raises(SessionError, match="'x' has 2, 'z' has 3"):
        session.run({"x": normal(1, 2, 6), "z": normal(1, 3, 6)})


def test_wrong_types_and_missing_inputs_are_told_as_always() -> None:
    session = memonger.Session(plan(scores(), 4), pad=True)
    with pytest.raises(SessionError, match="has type float64"):
        session.run({**rows(3), "x": np.zeros((3, 8))})
    with pytest.raises(SessionError, match="input 'scale' is missing"):
        session.run({"x": normal(1, 3, 8)})
    with pytest.raises(SessionError, match="has shape"):
        session.run({**rows(0)})


def test_evaluation_of_a_training_session_takes_a_smaller_batch() -> None:
    trainer = memonger.TrainingSession(training_models.plan())
    trainer.step(training_models.batch())
    x = training_models.batch(3)["x"]
    whole = trainer.evaluate({"x": x})["y"]
    for count in (1, 5, 16):
        found = trainer.evaluate({"x": x[:count]}, pad=True)["y"]
        assert found.shape == (count, training_models.CLASSES)
        assert np.array_equal(found, whole[:count])
    with pytest.raises(SessionError, match="planned for"):
        trainer.evaluate({"x": x[:5]})


# Ranges of sizes


def causal() -> onnx.ModelProto:
    """Each row alone, and each position of the positions up to it: a sum over them, and a product."""
    model = parse(
        """g (float[b, s, 4] x, int64[b, s] ids) => (float[b, s, 3] y, float[b, s] z) { c = CumSum(x, one)
        e = Gather(w, ids)  m = MatMul(c, e3)  y = Add(m, e)  z = ReduceSum<keepdims=0>(y, two) }"""
    )
    arrays = {"w": normal(0, 5, 3), "e3": normal(1, 4, 3), "one": np.array(1), "two": np.array([2])}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    return model


def positions(b: int, s: int) -> dict[str, np.ndarray]:
    return {"x": normal(b + s, b, s, 4), "ids": np.arange(b * s).reshape(b, s) % 5}


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_sizes_between_the_steps_of_ranges_are_filled_up(device: str) -> None:
    made = plan(causal(), dims={"b": (2, 6, 2), "s": (4, 16, 4)}, device=device)
    session, stock = memonger.Session(made, pad=True), LEVELS[device]
    for b, s in ((6, 16), (5, 16), (6, 9), (1, 1), (3, 7), (4, 8), (5, 13)):
        session.arena.fill(0xFF)
        found, expected = session.run(positions(b, s)), run_stock(causal(), positions(b, s), stock)
        for name, array in expected.items():
            assert found[name].shape == array.shape
            np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6)
    y = np.zeros((3, 7, 3), np.float32)
    assert session.run(positions(3, 7), {"y": y})["y"] is y
    np.testing.assert_array_equal(y, session.run(positions(3, 7))["y"])
    for b, s in ((7, 4), (2, 17), (0, 4)):
        with pytest.raises(SessionError, match="the plan is for b 2 to 6 by 2, s 4 to 16 by 4"):
            session.run(positions(b, s))
    with pytest.raises(SessionError, match=r"'s', is 9, .* Or have it filled up \(pad=True\)"):
        memonger.Session(made).run(positions(6, 9))
    with pytest.raises(SessionError) as error:
        memonger.Session(made).run(positions(6, 20))
    assert "pad" not in str(error.value)


def test_a_sum_of_ranges_is_filled_up_with_its_terms() -> None:
    model = parse("g (float[s, 2] x, float[total, 2] m) => (float[s, 2] y, float[total, 2] z) "
                  "{ y = Exp(x)  z = Neg(m) }")  # fmt: skip
    session = memonger.Session(plan(model, dims={"s": (4, 12, 4), "total": "s + 1"}), pad=True)
    x, m = normal(0, 6, 2), normal(1, 7, 2)
    found = session.run({"x": x, "m": m})
    np.testing.assert_allclose(found["y"], np.exp(x), rtol=1e-6)
    np.testing.assert_array_equal(found["z"], -m)
    with pytest.raises(SessionError, match=r"it has to be s \+ 1, which is 7 at s 6"):
        session.run({"x": x, "m": normal(1, 6, 2)})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("y = Softmax<axis = 1>(x)", "'y' depends on what inputs are filled up with, and the plan is for s 4 to 12"),
        ("m = ReduceMean<axes = [1]>(x)  y = Sub(x, m)", "'y' depends on what inputs are filled up with"),
        ("y = ReduceMean<axes = [1]>(x)", "no dimension of output 'y' is 's'"),
        ("y = Concat<axis = 1>(x, x)", "no dimension of output 'y' is 's'"),
    ],
)
def test_what_would_mix_with_the_filling_is_refused(body: str, said: str) -> None:
    session = memonger.Session(
        plan(parse(f"g (float[2, s] x) => (float[2, t] y) {{ {body} }}"), dims={"s": (4, 12, 4)}), pad=True
    )
    session.run({"x": normal(0, 2, 8)})
    for _ in range(2):
        with pytest.raises(SessionError, match=said):
            session.run({"x": normal(0, 2, 6)})


def test_of_several_plans_the_one_that_fills_up_least_takes_it() -> None:
    model = parse("g (float[b, 6] x) => (float[b, 6] y) { y = Exp(x) }")
    session = memonger.Session([plan(model, 3), plan(model, dims={"b": (4, 16, 4)}), plan(model, 10)], pad=True)
    for rows, wanted in ((3, 3), (2, 3), (4, 4), (5, 8), (9, 10), (10, 10), (11, 12), (16, 16)):
        call = session._model.checked({"x": normal(0, rows, 6)}, None)
        shape = {0: 3, 1: 10}.get(call.plan) or (call.smaller.inputs["x"][0] if call.smaller else rows)
        assert shape == wanted
        np.testing.assert_allclose(session.run({"x": normal(0, rows, 6)})["y"], np.exp(normal(0, rows, 6)), rtol=1e-6)
