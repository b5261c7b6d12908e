"""What other tools write, in a branch: old operator sets, shapes that are computed, weights that are."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click.testing
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

pytest.importorskip("onnxruntime")

import memonger
from memonger.cli.commands import main
from memonger.ir.values import graphs
from memonger.loops import search
from memonger.loops.branch import can_be_in_branch, in_branch
from memonger.model.load import load
from memonger.runtime.measure import write_arrays
from memonger.runtime.onnxruntime import onnxruntime
from tests.support.stock import normal, optimized_operators, parse, run_stock, same


def _with(text: str, constants: Mapping[str, np.ndarray], opset: int) -> onnx.ModelProto:
    model = parse(text, opset=opset)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    return model


def _outputs(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return run_stock(model, dict(feeds), "ORT_ENABLE_ALL")


@pytest.mark.parametrize("opset", [11, 12])
def test_nodes_of_an_old_operator_set_stand_in_a_branch(opset: int) -> None:
    """Two images come out of it, as between sections: what reads their sizes there is in newer operator sets only."""
    model = _with(
        """g (float[n, 8, 12, 12] x) => (float[n, 8, 12, 12] y, float[n, 8, 12, 12] z) {
            a = Conv <pads = [1, 1, 1, 1]> (x, w)  y = Relu (a)  z = Conv <pads = [1, 1, 1, 1]> (y, w)
        }""",
        {"w": normal(0, 8, 8, 3, 3)},
        opset,
    )
    assert can_be_in_branch(ir.serde.deserialize_model(model))
    made = ir.serde.serialize_model(in_branch(ir.serde.deserialize_model(model)))
    onnx.checker.check_model(made, full_check=True)
    assert made.opset_import[0].version == opset
    feeds = {"x": normal(1, 2, 8, 12, 12)}
    want, got = _outputs(model, feeds), _outputs(made, feeds)
    assert all(same(got[name], want[name]) for name in want)


FLATTENED = """g (float[n, 3, 8, 8] x) => (float[n, 6] y) <int64[1] rest = {192}, int64[1] one = {0}> {
    s = Shape (x)  b = Gather (s, one)  t = Concat <axis = 0> (b, rest)  f = Reshape (x, t)
    m = MatMul (f, w)  a = Add (m, v)  r = Relu (a)  y = Mul (r, r)
}"""


def test_what_the_model_knows_no_rank_of_its_file_does_not_tell(tmp_path: Path) -> None:
    """Behind a shape that is computed onnxruntime leaves a product and the sum behind it two nodes."""
    model = _with(FLATTENED, {"w": normal(0, 192, 6), "v": normal(1, 6)}, 13)
    onnx.save(model, tmp_path / "model.onnx")
    unranked = search._unranked(tmp_path / "model.onnx")
    assert "f" in unranked
    assert "s" not in unranked
    loaded = load(tmp_path / "model.onnx", batch=16).ir
    products = [node for node in loaded.graph if node.op_type == "MatMul"]
    assert [search._is_product(node, names) for node in products for names in (unranked, ())] == [True, False]
    feeds = {"x": normal(2, 16, 3, 8, 8)}
    want = _outputs(model, feeds)
    for names, operator in ((unranked, "MatMul"), (frozenset[str](), "Gemm")):
        made = ir.serde.serialize_model(in_branch(loaded, "open", unranked=names))
        assert any(operator in node for node in optimized_operators(made, tmp_path)), operator
        assert operator == "Gemm" or same(_outputs(made, feeds)["y"], want["y"])


COMPUTED = """g (float[n, 64] x, float[n, 16, 8, 8] i) => (float[n, 64] y, float[n, 16, 8, 8] z) {
    v = Cast <to = 1> (halves)  u = Mul (v, scale)  t = Transpose <perm = [1, 0]> (u)  a = MatMul (x, t)
    d = Cast <to = 1> (bytes)  s = Mul (d, scale)  y = MatMul (a, s)
    k = Cast <to = 1> (kernel)  z = Conv <pads = [1, 1, 1, 1]> (i, k)
}"""


def test_weights_that_are_computed_are_computed_outside() -> None:
    """In a branch onnxruntime has them twice; a convolution's are packed only where they are computed beside it."""
    constants = {
        "halves": normal(0, 64, 64).astype(np.float16), "scale": np.array(0.5, np.float32),
        "bytes": np.arange(64 * 64).reshape(64, 64).astype(np.uint8),
        "kernel": normal(2, 16, 16, 3, 3).astype(np.float16),
    }  # fmt: skip
    model = _with(COMPUTED, constants, 17)
    made = in_branch(ir.serde.deserialize_model(model))
    outside = [node.op_type for node in made.graph]
    assert sorted(outside[:5]) == ["Cast", "Cast", "Mul", "Mul", "Transpose"]
    (convolution,) = (node for graph in graphs(made) for node in graph if node.op_type == "Conv")
    kernel = convolution.inputs[1]
    assert kernel is not None
    assert [node.op_type for node in convolution.graph or () if kernel in node.outputs] == ["Cast"]
    feeds = {"x": normal(3, 4, 64), "i": normal(4, 4, 16, 8, 8)}
    want, got = _outputs(model, feeds), _outputs(ir.serde.serialize_model(made), feeds)
    assert all(same(got[name], want[name]) for name in want)


SHARED = """g (float[n, 64] x, float[n, 16, 8, 8] i) => (float[n, 64] y, float[n, 16, 8, 8] z) {
    k = Cast <to = 1> (kernel)  f = Reshape (k, sizes)  y = MatMul (x, f)  z = Conv <pads = [2, 2, 1, 1]> (i, k)
}"""


def test_what_one_weight_is_computed_for_stays_together() -> None:
    """Inside, where one of those that read it has to have it there."""
    constants = {"kernel": normal(2, 16, 16, 4, 4).astype(np.float16), "sizes": np.array([64, 64])}
    model = _with(SHARED, constants, 17)
    made = in_branch(ir.serde.deserialize_model(model))
    assert not {"Cast", "Reshape"} & {node.op_type for node in made.graph}
    feeds = {"x": normal(3, 4, 64), "i": normal(4, 4, 16, 8, 8)}
    want, got = _outputs(model, feeds), _outputs(ir.serde.serialize_model(made), feeds)
    assert all(same(got[name], want[name]) for name in want)


QUANTIZED = """g (float[n, 64] x) => (float[n, 64] y) {
    q = QuantizeLinear (x, scale, zero)  p = DequantizeLinear (q, scale, zero)
    d = DequantizeLinear (bytes, scale, zero)  m = MatMul (p, d)
    o = QuantizeLinear (m, scale, zero)  y = DequantizeLinear (o, scale, zero)
}"""


def test_weights_that_are_multiplied_as_integers_stay_beside_their_product(tmp_path: Path) -> None:
    constants = {
        "scale": np.array(0.5, np.float32), "zero": np.array(128, np.uint8),
        "bytes": np.arange(64 * 64).reshape(64, 64).astype(np.uint8),
    }  # fmt: skip
    made = in_branch(ir.serde.deserialize_model(_with(QUANTIZED, constants, 17)))
    assert "DequantizeLinear" not in [node.op_type for node in made.graph]
    assert "QLinearMatMul" in optimized_operators(ir.serde.serialize_model(made), tmp_path)


def test_constants_of_a_file_as_it_is_are_initializers_in_its_branch() -> None:
    """Of a node's constant onnxruntime holds a second copy."""
    weight = numpy_helper.from_array(normal(0, 64, 64), "w")
    model = parse("g (float[n, 64] x) => (float[n, 64] y) { y = MatMul (x, w) }", opset=11)
    model.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["w"], value=weight))
    made = in_branch(search._in_order(model))
    assert not any(node.op_type == "Constant" for graph in graphs(made) for node in graph)
    assert "w" in made.graph[-1].attributes["then_branch"].as_graph().initializers


CHOSEN = """g (float[n,64] x, int64 rate) => (float[n,64] y) <int64 known = {16}, int64[1] last = {1}> {
    k = Equal (rate, known)  i = Cast <to=7> (k)  j = Add (last, i)  a = Exp (x)
    b = Gather <axis=0> (weights, j)  c = Mul (a, b)  d = Sin (c)  e = Mul (d, c)  y = Sin (e)
}"""


def test_inputs_of_ones_own_are_compared_and_give_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = parse(CHOSEN, opset=17)
    model.graph.initializer.append(numpy_helper.from_array(normal(0, 3, 64), "weights"))
    onnx.save(model, tmp_path / "model.onnx")
    inputs = {"x": normal(1, 4096, 64), "rate": np.array(16)}
    for name, given in {"NOISE": 100.0, "TURNS": (1, 1), "TURN_SECONDS": 0.0}.items():
        monkeypatch.setattr(search, name, given)  # how long runs take decides nothing
    seen = list[dict[str, Any]]()
    monkeypatch.setattr(search, "write_arrays", lambda path, arrays: seen.append(arrays) or write_arrays(path, arrays))
    made = memonger.shrink(tmp_path / "model.onnx", inputs=inputs, max_overhead=9)
    assert all(same(seen[0][name], array) for name, array in inputs.items())
    assert made.model.graph.inputs[0].shape in ([4096, 64], ["n", 64])
    with pytest.raises(memonger.SessionError, match=r"input 'rate' is missing"):
        memonger.shrink(tmp_path / "model.onnx", inputs={"x": inputs["x"]})
    np.savez(tmp_path / "inputs.npz", **inputs)
    flags = ["--inputs", tmp_path / "inputs.npz", "--max-overhead", "9", "--json", "--quiet"]
    asked = ["shrink", tmp_path / "model.onnx", "-o", tmp_path / "small.onnx", *flags]
    done = click.testing.CliRunner().invoke(main, [*map(str, asked)])
    assert done.exit_code == 0, done.output
    assert same(seen[-1]["x"], inputs["x"])
    session = onnxruntime().InferenceSession(tmp_path / "small.onnx", providers=["CPUExecutionProvider"])
    assert session.run(None, inputs)[0].shape == (4096, 64)
