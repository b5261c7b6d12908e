"""Sessions that take smaller batches: filled up, cut, and refused where rows of a batch meet."""

from typing import Any

import numpy as np
import onnx
import pytest

import memonger
from memonger.errors import SessionError
from tests.support import training_models
from tests.support.stock import normal, parse, run_stock


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
