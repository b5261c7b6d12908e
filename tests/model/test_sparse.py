"""Sparse initializers and constants, as stock onnxruntime reads them."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

import memonger

X = np.arange(8, dtype=np.float32).reshape(2, 4)


def _sparse(
    name: str, indices: list[int], shape: tuple[int, ...], dims: tuple[int, ...] = (4, 4)
) -> onnx.SparseTensorProto:
    made = onnx.SparseTensorProto(dims=dims)
    count = shape[0]
    made.values.CopyFrom(helper.make_tensor(name, TensorProto.FLOAT, [count], [1.5 * (at + 1) for at in range(count)]))
    made.indices.CopyFrom(helper.make_tensor(f"{name}_at", TensorProto.INT64, shape, indices))
    return made


def _model(sparse: onnx.SparseTensorProto, form: str) -> onnx.ModelProto:
    product = helper.make_node("MatMul", ["x", "w"], ["y"], "product")
    nodes, weights = [product], [sparse]
    if form == "constant":
        nodes, weights = [helper.make_node("Constant", [], ["w"], sparse_value=sparse), product], []
    if form == "branch":
        inner = helper.make_graph([product], "then", [], [_value("y")], [], sparse_initializer=weights)
        other = helper.make_graph([helper.make_node("Identity", ["x"], ["z"])], "else", [], [_value("z")])
        choice = helper.make_node("If", ["on"], ["y_of"], "choice", then_branch=inner, else_branch=other)
        on = helper.make_tensor("on", TensorProto.BOOL, [], [True])
        graph = helper.make_graph([choice], "g", [_value("x")], [_value("y_of")], [on])
    else:
        graph = helper.make_graph(nodes, "g", [_value("x")], [_value("y")], [], sparse_initializer=weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def _value(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4])


@pytest.mark.parametrize("form", ["initializer", "constant", "branch"])
@pytest.mark.parametrize(
    ("indices", "shape"),
    [([3, 5, 14], (3,)), ([0, 3, 1, 1, 3, 2], (3, 2)), ([], (0,))],
    ids=["flat", "by axis", "none"],
)
@pytest.mark.parametrize("device", ["cpu", "none"])
def test_the_outputs_are_stock_onnxruntimes(
    form: str, indices: list[int], shape: tuple[int, ...], device: str, tmp_path: Path
) -> None:
    model, path = _model(_sparse("w", indices, shape), form), tmp_path / "planned.onnx"
    before = model.SerializeToString()
    expected = onnxruntime.InferenceSession(before).run(None, {"x": X})[0]
    memonger.search_plan(model, mode="inference", device=device).save(path)
    (found,) = memonger.Session(path).run({"x": X}).values()
    assert np.array_equal(found, expected)
    assert model.SerializeToString() == before


@pytest.mark.parametrize(
    ("sparse", "words"),
    [
        (_sparse("w", [3, 16], (2,)), "has an index outside of it"),
        (_sparse("w", [0, 4, 1, 1], (2, 2)), "has an index outside of it"),
        (_sparse("w", [0, -1, 1, 1], (2, 2)), "has an index outside of it"),
        (_sparse("w", [3, 5, 6], (1, 3)), r"has 1 values, and indices of shape \[1, 3\]"),
        (_sparse("w", [3], (1,), (1 << 20, 1 << 20)), "takes 4096 GiB .* when it is dense"),
        (_sparse("w", [3], (1,), (-4, 4)), "needs sizes, numbers"),
    ],
)
def test_what_is_no_sparse_tensor_is_named(sparse: onnx.SparseTensorProto, words: str) -> None:
    with pytest.raises(memonger.LoadError, match=rf"<onnx.ModelProto>: sparse tensor 'w' of shape .*{words}"):
        memonger.search_plan(_model(sparse, "initializer"), mode="inference", device="none")
