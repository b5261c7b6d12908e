"""Networks that onnxruntime's own tools quantized, beside stock onnxruntime on the same file."""

import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import memonger
from memonger.lowering.device_form import LEVELS
from memonger.runtime import as_written
from memonger.serving import export
from memonger.serving.serving import PlannedFleet
from tests.support.networks import model_of, run_stock, same_bits, stock

RNG = np.random.default_rng(0)
WAYS = ("qdq", "qoperator", "dynamic", "nbits", "int4")


def _network() -> onnx.ModelProto:
    """Two convolutions whose images are added and joined, and two products: what quantizers have operators for."""
    node, shapes = helper.make_node, {"w1": (8, 3, 3, 3), "w2": (8, 8, 3, 3), "m1": (16, 64), "m2": (64, 32)}
    nodes = [
        node("Conv", ["x", "w1"], ["a"], "first", pads=[1, 1, 1, 1]), node("Relu", ["a"], ["b"], "relu"),
        node("Conv", ["b", "w2"], ["c"], "second", pads=[1, 1, 1, 1]), node("Add", ["b", "c"], ["d"], "sum"),
        node("Concat", ["d", "b"], ["e"], "join", axis=1), node("GlobalAveragePool", ["e"], ["f"], "pool"),
        node("Flatten", ["f"], ["g"], "flat"), node("MatMul", ["g", "m1"], ["h"], "wide"),
        node("Sigmoid", ["h"], ["i"], "gate"), node("MatMul", ["i", "m2"], ["y"], "narrow"),
    ]  # fmt: skip
    weights = {name: RNG.standard_normal(shape, np.float32) * np.float32(0.3) for name, shape in shapes.items()}
    model = model_of(nodes, {"x": [2, 3, 8, 8]}, {"y": [2, 32]}, **weights)
    model.opset_import[0].version = 21
    return model


def _images(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, 3, 8, 8), np.float32)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The network quantized in each of `WAYS`."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_dynamic, quantize_static
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.feeds: Iterator[dict[str, np.ndarray]] = iter([{"x": _images(seed)} for seed in range(2)])

        def get_next(self) -> Any:
            return next(self.feeds, None)

    logging.disable(logging.WARNING)  # it says that the model could be prepared
    folder = tmp_path_factory.mktemp("quantized")
    source, made = folder / "float.onnx", {way: folder / f"{way}.onnx" for way in WAYS}
    onnx.save(_network(), source)
    quantize_static(source, made["qdq"], Reader(), quant_format=QuantFormat.QDQ)
    quantize_static(source, made["qoperator"], Reader(), quant_format=QuantFormat.QOperator)
    quantize_dynamic(source, made["dynamic"])
    for way, form in (("nbits", QuantFormat.QOperator), ("int4", QuantFormat.QDQ)):
        config = DefaultWeightOnlyQuantConfig(block_size=16, is_symmetric=False, quant_format=form)
        quantizer = MatMulNBitsQuantizer(onnx.load(source), algo_config=config)
        quantizer.process()
        quantizer.model.save_model_to_file(str(made[way]))
    logging.disable(logging.NOTSET)
    return made


@pytest.mark.parametrize("device", ["cpu", "none"])
@pytest.mark.parametrize("way", WAYS)
def test_a_quantized_network_has_the_bits_of_stock_onnxruntime(files: dict[str, Path], way: str, device: str) -> None:
    plan = memonger.search_plan(files[way], mode="inference", device=device)
    session, level = memonger.Session(plan), LEVELS["all" if device == "cpu" else "disable"]
    for seed in (5, 6):
        theirs = run_stock(stock(str(files[way]), level), {"x": _images(seed)})
        assert same_bits(session.run({"x": _images(seed)}), theirs)


def test_fusing_quantized_nodes_is_left_to_the_optimizer(files: dict[str, Path], tmp_path: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(str(files["qdq"]), options, providers=["CPUExecutionProvider"])
    theirs = Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node)
    assert {"QLinearMatMul", "QLinearSigmoid"} <= theirs.keys()
    plan = memonger.search_plan(files["qdq"], mode="inference", device="cpu", chunks="off")
    assert Counter(node.op_type for node in plan.model.graph) == theirs


@pytest.mark.parametrize("way", ["qdq", "nbits"])
def test_a_quantized_network_in_chunks(files: dict[str, Path], way: str) -> None:
    plan = memonger.search_plan(files[way], mode="inference", device="cpu", chunks=2)
    assert plan.chunks
    theirs = run_stock(stock(str(files[way])), {"x": _images(5)})
    assert same_bits(memonger.Session(plan).run({"x": _images(5)}), theirs)


@pytest.mark.parametrize("way", ["qdq", "qoperator", "dynamic"])
def test_an_export_of_a_quantized_network_serves_it(files: dict[str, Path], way: str, tmp_path: Path) -> None:
    export(files[way], "kserve", tmp_path / "out", name="m")
    (settings,) = tmp_path.rglob("memonger.json")
    planned = [settings.parent / name for name in json.loads(settings.read_text())["models"]["m"]]
    theirs = run_stock(stock(str(files[way]), LEVELS["disable"]), {"x": _images(5)})
    assert same_bits(PlannedFleet({"m": planned}).model().run({"x": _images(5)}), theirs)


def test_a_server_that_would_refuse_every_request_is_not_exported(tmp_path: Path) -> None:
    half = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 20]>
    half (float16[4] x) => (float16[4] y) { a = LeakyRelu(x) y = LeakyRelu(a) }""")
    with pytest.raises(memonger.PlanError, match=r"'m' can't be served: .* puts nodes of its own .*device='cpu'"):
        export(half, "kserve", tmp_path / "out", name="m")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("op", ["Conv", "MatMul"])
@pytest.mark.parametrize("quantizes_image", [False, True])
def test_a_dequantized_weight_is_not_computed_twice(op: str, quantizes_image: bool) -> None:
    w = RNG.integers(-100, 100, (8, 8, 3, 3) if op == "Conv" else (8, 8)).astype(np.int8)
    scale, zero = ["s", "z"], []
    if quantizes_image:
        zero = [helper.make_node("QuantizeLinear", ["x", *scale], ["xq"]),
                helper.make_node("DequantizeLinear", ["xq", *scale], ["xd"])]  # fmt: skip
    pads = {"pads": [1, 1, 1, 1]} if op == "Conv" else {}
    nodes = [
        *zero, helper.make_node("DequantizeLinear", ["wq", *scale], ["w"]),
        helper.make_node(op, ["xd" if quantizes_image else "x", "w"], ["a"], **pads),
        helper.make_node("Relu", ["a"], ["y"]),
    ]  # fmt: skip
    shape = [1, 8, 8, 8]
    model = model_of(nodes, {"x": shape}, {"y": shape}, wq=w, s=np.array(0.02, np.float32), z=np.array(0, np.int8))
    feeds = {"x": np.random.default_rng(1).standard_normal(shape).astype(np.float32)}
    for device, level in (("cpu", "all"), ("none", "disable")):
        plan = memonger.search_plan(model, mode="inference", device=device)
        assert same_bits(memonger.Session(plan).run(feeds), run_stock(stock(model, LEVELS[level]), feeds))


def test_nodes_that_the_runtime_adds_are_found_without_weights_and_without_a_run() -> None:
    """The indices are computed in 16 bits: out of order, Gather would read whatever lies there by then."""
    nodes = [
        helper.make_node("LeakyRelu", ["x"], ["a"], name="first"),
        helper.make_node("Cast", ["a"], ["i"], name="indices", to=TensorProto.INT64),
        helper.make_node("Gather", ["table", "i"], ["y"], name="rows"),
    ]
    table = numpy_helper.from_array(np.ones((1000, 4), np.float32), "table")
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT16, [3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 4])], [table],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    plan = memonger.search_plan(model, mode="inference", device="none")
    assert plan.model.graph.initializers["table"].const_value.nbytes == 16000
    added, left_out = as_written.changes(plan)
    assert added
    assert left_out == []
    assert all("Cast" in name for name in added)
    with pytest.raises(memonger.SessionError, match=r"puts nodes of its own into the model \('Inserted"):
        memonger.Session(plan)
    assert as_written.changes(memonger.search_plan(model, mode="inference", device="cpu")) == ([], [])
