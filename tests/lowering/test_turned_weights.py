"""Weights that products read transposed are written so before the optimizer sees a model."""

import os
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

import memonger
from memonger.errors import LoadError
from memonger.lowering import device_form, turned_weights
from memonger.lowering.turned_weights import turn_weights
from memonger.model.load import load_twice
from tests.support.networks import model_of, run_stock, same_bits, stock

RNG = np.random.default_rng(0)
X = {"x": RNG.standard_normal((3, 300)).astype(np.float32), "ids": np.array([[5], [2], [299]], np.float32)}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Layers with weights as PyTorch has them, one that an embedding reads too, one that `Gemm` reads, and a bias."""
    monkeypatch.setattr(turned_weights, "MUCH", 1)
    node = helper.make_node
    nodes = [
        node("Transpose", ["w"], ["wt"], perm=[1, 0]), node("MatMul", ["x", "wt"], ["a"]),
        node("Transpose", ["table"], ["columns"]), node("MatMul", ["a", "columns"], ["b"]),
        node("Cast", ["ids"], ["rows"], to=7), node("Gather", ["table", "rows"], ["e"]),
        node("Squeeze", ["e", "one"], ["f"]), node("MatMul", ["f", "wt"], ["g"]),
        node("Transpose", ["cube"], ["turned"], perm=[0, 2, 1]), node("MatMul", ["b", "turned"], ["h"]),
        node("Gemm", ["g", "v"], ["k"], transB=1), node("Add", ["h", "k"], ["l"]), node("Add", ["l", "bias"], ["y"]),
    ]  # fmt: skip
    shapes = {"w": (400, 300), "table": (300, 400), "cube": (1, 300, 300), "v": (300, 400), "bias": (300,)}
    weights = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    nodes[8].input[0], nodes[7].input[1] = "cube", "wt2"
    nodes.insert(7, node("Transpose", ["w2"], ["wt2"]))
    weights |= {"w2": RNG.standard_normal((400, 400)).astype(np.float32), "one": np.array([1])}
    model = model_of(nodes, {"x": ["N", 300], "ids": ["N", 1]}, {"y": None}, **weights)
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=1024)
    return tmp_path / "model.onnx"


def test_matrices_of_products_are_turned_once_for_both_forms(path: Path, tmp_path: Path) -> None:
    fixed, unbound = load_twice(path, batch=3)
    assert unbound is not None
    (folder := tmp_path / "made").mkdir()
    made = turn_weights((fixed, unbound), folder)
    assert made is not None
    for before, after in zip((fixed, unbound), made, strict=True):
        assert [node.op_type for node in before.graph].count("Transpose") == 4
        assert [node.inputs[0].name for node in after.graph if node.op_type == "Transpose"] == ["cube"]
        given = {str(v.name): v.const_value for v in before.graph.initializers.values()}
        found = {str(v.name): v.const_value for v in after.graph.initializers.values() if v.uses()}
        assert set(found) == {"wt", "wt2", "columns", "table", "cube", "v", "bias", "one"}
        sources = {"wt": "w", "wt2": "w2", "columns": "table"}
        for name, tensor in found.items():
            source = given[sources.get(name, name)].numpy()
            np.testing.assert_array_equal(tensor.numpy(), source.T if name in sources else source)
            assert name == "one" or Path(tensor.path) == folder / "weights.data"
    pages = sum(-(-size // 4096) * 4096 for size in (480_000, 640_000, 480_000, 480_000, 360_000, 480_000, 1200))
    assert pages - 4096 < (folder / "weights.data").stat().st_size <= pages


@pytest.mark.parametrize("fits_in_the_model", [True, False])
def test_a_plan_has_the_bits_of_the_file(path: Path, fits_in_the_model: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the optimizer makes anew, as the turned cube, is written beside the model where it is much."""
    monkeypatch.setattr(device_form, "MUCH", (64 << 20) * fits_in_the_model)
    plan = memonger.search_plan(path, mode="inference", device="cpu", batch=3)
    assert not any(node.op_type == "Transpose" for node in plan.model.graph)
    names = {Path(t.path).name for v in plan.model.graph.initializers.values()
             if isinstance(t := v.const_value, ir.ExternalTensor)}  # fmt: skip
    assert names == ({"weights.data"} if fits_in_the_model else {"optimized.onnx.data"})
    assert same_bits(memonger.Session(plan).run(X), run_stock(stock(str(path)), X))
    plan.save(path.with_name("planned.onnx"))
    assert same_bits(memonger.Session(path.with_name("planned.onnx")).run(X), run_stock(stock(str(path)), X))


def test_little_is_left_to_the_optimizer(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turned_weights, "MUCH", 2_000_000)  # three matrices have 1.6 MB
    assert turn_weights([memonger.load(path, batch=3)], tmp_path) is None
    assert not (tmp_path / "weights.data").exists()


def test_a_file_that_is_cut_short_meanwhile_is_named(path: Path, tmp_path: Path) -> None:
    model = memonger.load(path, batch=3)
    os.truncate(path.with_name("weights.bin"), 1_000_000)
    with pytest.raises(LoadError, match=r"weights\.bin ends before the \d+ bytes of '\w+' do"):
        turn_weights([model], tmp_path)
