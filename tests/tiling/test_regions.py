"""Regions along axes of their own: what reads no image, and can't be cut along an axis of its inputs."""

import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

pytest.importorskip("onnxruntime")

import memonger
from tests.support.stock import normal, run_stock
from tests.tiling.test_chunking import plan


def image_attention(side: int = 24) -> onnx.ModelProto:
    """An image encoder's attention (Li et al. 2022): to queries times keys is added what depends on rows and columns.

    The sum has rows and columns as axes of their own, behind a view: only in so many parts can it be cut with them.
    """
    tokens = side * side
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 17]> g (float[1, {tokens}, 64] x) => (float[1, {tokens}, 64] y)
        <int64[4] heads = {{1, {tokens}, 4, 16}}, int64[4] grid = {{4, {side}, {side}, 16}},
        int64[1] last = {{4}}, int64[1] third = {{3}}, int64[4] flat = {{1, 4, {tokens}, {tokens}}},
        int64[3] rows = {{1, {tokens}, 64}}> {{
            m = MatMul (x, w)  h = Reshape (m, heads)  q = Transpose <perm = [0, 2, 1, 3]> (h)
            k = Transpose <perm = [0, 2, 3, 1]> (h)  s = MatMul (q, k)  v = Reshape (q, grid)
            a = Einsum <equation = "bhwc,hkc->bhwk"> (v, along)  b = Einsum <equation = "bhwc,wkc->bhwk"> (v, across)
            c = Unsqueeze (a, last)  d = Unsqueeze (b, third)  e = Add (c, d)  f = Reshape (e, flat)
            t = Add (s, f)  p = Softmax (t)  o = MatMul (p, q)  z = Transpose <perm = [0, 2, 1, 3]> (o)
            y = Reshape (z, rows)
        }}"""
    )
    weights = {"w": normal(1, 64, 64), "along": normal(2, side, side, 16), "across": normal(3, side, side, 16)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


def test_an_image_encoders_attention_runs_in_slices_of_its_queries() -> None:
    """It reads no image, and no axis of its input can be followed through it: what has most bytes says along which."""
    model = image_attention()
    whole, made = plan(model, chunks="off"), plan(model, max_overhead=10.0)
    assert made.chunks
    assert made.arena_bytes < 0.4 * whole.arena_bytes
    feeds = {"x": normal(4, 1, 576, 64)}
    (want,), (got,) = (list(memonger.Session(one).run(feeds).values()) for one in (whole, made))
    assert want.tobytes() == got.tobytes()


def test_an_image_encoders_attention_shrinks_by_regions() -> None:
    model = image_attention()
    made = memonger.shrink(model, check=False, max_overhead=10.0)
    assert made.loops
    feeds = {"x": normal(4, 1, 576, 64)}
    want, got = (run_stock(one, feeds, "ORT_ENABLE_ALL") for one in (model, ir.serde.serialize_model(made.model)))
    assert want["y"].tobytes() == got["y"].tobytes()
