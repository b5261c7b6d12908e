"""What kernels pack: what onnxruntime writes of it into a file, beside what is said of it from the shape alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import memonger
from memonger.graph.weight_window import weight_reads, why_kept
from memonger.ir.packed import packed_buffers
from memonger.runtime.packing import packed_weights
from tests.support.networks import model_of
from tests.support.stock import normal, run_stock

MS = "com.microsoft"
RNG = np.random.default_rng(0)
K, N, BLOCKS = 163, 100, 6  # no multiples of what kernels round to
FLOAT, HALF, U8, S8 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.UINT8, TensorProto.INT8
SCALES = {"s": np.float32(0.1), "zu": np.uint8(3), "zs": np.int8(0)}


def _integers(*shape: int, dtype: type = np.int8) -> np.ndarray:
    return RNG.integers(0, 60, shape).astype(dtype)


def _blocks(bits: int, level: int, dtype: type = np.float32, block: int = 32, **more: np.ndarray) -> Any:
    """A product with a weight of blocks of integers."""
    count = -(-K // block)
    weights = {"w": _integers(N, count, block * bits // 8, dtype=np.uint8), "s": np.abs(normal(1, N * count))}
    given = HALF if dtype is np.float16 else FLOAT
    inputs = ["x", "w", "s", *(("", "g") if "g" in more else (("z",) if "z" in more else ()))]
    attributes = {"K": K, "N": N, "bits": bits, "block_size": block, "accuracy_level": level}
    return "MatMulNBits", inputs, given, [2, K], {**weights, "s": weights["s"].astype(dtype), **more}, attributes


CASES: Mapping[str, Any] = {
    "float": ("MatMul", ["x", "w"], FLOAT, [2, K], {"w": normal(0, K, N)}, {}),
    "float transposed": ("FusedMatMul", ["x", "w"], FLOAT, [2, K], {"w": normal(0, N, K)}, {"transB": 1}),
    "float in batches": ("MatMul", ["x", "w"], FLOAT, [3, 2, K], {"w": normal(0, 3, K, N)}, {}),
    "half": ("MatMul", ["x", "w"], HALF, [2, K], {"w": normal(0, K, N).astype(np.float16)}, {}),
    "integers": ("MatMulInteger", ["x", "w", "zu", "zs"], U8, [2, K], {"w": _integers(K, N)}, {}),
    "signed integers": ("MatMulInteger", ["x", "w", "zs", "zs"], S8, [2, K], {"w": _integers(K, N)}, {}),
    "dynamic": ("DynamicQuantizeMatMul", ["x", "w", "s", "zs"], FLOAT, [2, K], {"w": _integers(K, N)}, {}),
    "to float": (
        "MatMulIntegerToFloat", ["x", "w", "s", "s", "zu", "zs"], U8, [2, K], {"w": _integers(K, N)}, {},
    ),
    "static": (
        "QLinearMatMul", ["x", "s", "zu", "w", "s", "zs", "s", "zu"], U8, [2, K], {"w": _integers(K, N)}, {},
    ),
    "gemm": (
        "QGemm", ["x", "s", "zu", "w", "s", "zs", "", "s", "zu"], U8, [2, K], {"w": _integers(N, K)}, {"transB": 1},
    ),
    "convolution": (
        "QLinearConv", ["x", "s", "zu", "w", "s", "zs", "s", "zu"], U8, [1, 64, 8, 8], {"w": _integers(32, 64, 3, 3)},
        {},
    ),
    **{f"{bits} bits, level {level}": _blocks(bits, level) for bits in (2, 4, 8) for level in (0, 4)},
    "blocks of 128": _blocks(4, 4, block=128),
    "half and 4 bits": _blocks(4, 4, np.float16),
    "zero points": _blocks(4, 4, z=_integers(N, BLOCKS // 2, dtype=np.uint8)),
    "float zero points": _blocks(4, 4, z=normal(3, N, BLOCKS)),
    "another order": _blocks(4, 4, g=np.zeros(BLOCKS * 32, np.int32)),
    "attention": (
        "Attention", ["x", "w", "b"], FLOAT, [1, 4, 96], {"w": normal(0, 96, 288), "b": normal(1, 288)},
        {"num_heads": 4},
    ),
    "narrow queries": (
        "Attention", ["x", "w", "b"], FLOAT, [1, 4, 96], {"w": normal(0, 96, 160), "b": normal(1, 160)},
        {"num_heads": 4, "qkv_hidden_sizes": [32, 32, 96]},
    ),
    "integer attention": (
        "QAttention", ["x", "w", "b", "s", "s", "", "zu", "zs"], U8, [1, 4, 96],
        {"w": _integers(96, 288), "b": normal(1, 288)}, {"num_heads": 4},
    ),
    "transposed convolution": (
        "ConvTranspose", ["x", "w"], FLOAT, [1, 64, 8, 8], {"w": normal(0, 64, 33, 5, 5)}, {"group": 2},
    ),
    "lstm": (
        "LSTM", ["x", "w", "r"], FLOAT, [3, 1, 70], {"w": normal(0, 2, 200, 70), "r": normal(1, 2, 200, 50)},
        {"hidden_size": 50, "direction": "bidirectional"},
    ),
    "gru": (
        "GRU", ["x", "w", "r"], FLOAT, [3, 1, 70], {"w": normal(0, 1, 150, 70), "r": normal(1, 1, 150, 50)},
        {"hidden_size": 50},
    ),
}  # fmt: skip


def _model(name: str) -> onnx.ModelProto:
    op, inputs, kind, shape, weights, attributes = CASES[name]
    arrays = {each: array for each, array in {**SCALES, **weights}.items() if each in inputs}
    domain = "" if onnx.defs.has(op, 20) else MS
    node = helper.make_node(op, inputs, ["y"], op, domain=domain, **attributes)
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_value_info("y", onnx.TypeProto())],
        [numpy_helper.from_array(np.asarray(array), each) for each, array in arrays.items()],
    )  # fmt: skip
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid(MS, 1)], ir_version=10
    )


def _written(model: onnx.ModelProto, folder: Path) -> dict[str, list[list[int]]]:
    """The sizes of buffers that onnxruntime packs each weight into, as it writes them."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.optimized_model_filepath = 4, str(folder / "written.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "written.data")
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    options.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found = dict[str, list[list[int]]]()
    for tensor in onnx.load(folder / "written.onnx", load_external_data=False).graph.initializer:
        for entry in tensor.external_data:
            if entry.key.startswith("prepacked"):
                sizes = [int(part.split(";")[1]) for part in entry.value.split("|")[1:]]
                found.setdefault(tensor.name, []).append(sizes)
    return found


@pytest.mark.parametrize("name", CASES)
def test_kernels_pack_what_is_said_of_them(name: str, tmp_path: Path) -> None:
    model = _model(name)
    loaded = ir.serde.deserialize_model(model)
    weights = list(loaded.graph.initializers.values())
    said = {str(value.name): [list(buffers) for buffers in packed_buffers(value).values()] for value in weights}
    assert {each: sizes for each, sizes in said.items() if sizes} == _written(model, tmp_path)
    made = {copy.weight.name: [length for _, length in copy.buffers] for copy in packed_weights(loaded, weights)}
    assert made == {each: sizes[0] for each, sizes in said.items() if sizes}
    assert ("kernels pack them" in why_kept(loaded, 1)) is (name == "convolution")


def test_networks_of_integers_pass_through_a_window(tmp_path: Path) -> None:
    """Rows of an int4 table, products of blocks of two widths and levels, of dynamic integers, and of half floats."""
    width, block = 512, 16
    count = width // block
    nodes = [
        helper.make_node(
            "GatherBlockQuantized", ["table", "ids", "table.s"], ["v0"], "rows", domain=MS, bits=4, block_size=block,
            gather_axis=0, quantize_axis=1,
        )
    ]  # fmt: skip
    weights = {"table": _integers(8000, width // 2, dtype=np.uint8), "table.s": normal(0, 8000, count) / 8}
    for layer, (bits, level) in enumerate(((4, 4), (4, 0), (8, 4), (8, 0))):
        weights[f"w{layer}"] = _integers(width, count, block * bits // 8, dtype=np.uint8)
        weights[f"s{layer}"] = np.abs(normal(layer, width * count)) / np.float32(1000)
        ends = [f"v{layer}", f"w{layer}", f"s{layer}"], [f"v{layer + 1}"]
        attributes = {"K": width, "N": width, "bits": bits, "block_size": block, "accuracy_level": level}
        nodes.append(helper.make_node("MatMulNBits", *ends, f"product{layer}", domain=MS, **attributes))
    weights |= {"w": _integers(width, width), "h": normal(9, width, width).astype(np.float16)} | SCALES
    nodes += [
        helper.make_node("DynamicQuantizeLinear", ["v4"], ["q", "q.s", "q.z"], "quantized"),
        helper.make_node("MatMulInteger", ["q", "w", "q.z", "zs"], ["i"], "dynamic"),
        helper.make_node("Cast", ["i"], ["f"], "float", to=TensorProto.FLOAT),
        helper.make_node("Mul", ["f", "q.s"], ["scaled"], "scaled"),
        helper.make_node("Cast", ["scaled"], ["halved"], "half", to=HALF),
        helper.make_node("MatMul", ["halved", "h"], ["y"], "product"),
    ]
    model = model_of(nodes, {"ids": [4]}, {"y": [4, width]}, **weights)
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    model.graph.output[0].type.tensor_type.elem_type = HALF
    model.opset_import.append(helper.make_opsetid(MS, 1))
    feed = {"ids": np.array([3, 7000, 5, 3])}
    expected = run_stock(model, feed, "ORT_ENABLE_ALL")["y"]
    with pytest.raises(memonger.BudgetError) as refused:
        memonger.search_plan(model, device="cpu", mode="inference", budget=200_000)
    plan = memonger.search_plan(model, device="cpu", mode="inference", budget=refused.value.smallest)
    assert plan.window is not None
    assert refused.value.smallest < 0.6 * plan.parameter_bytes
    assert {"table", "w0", "w1", "w2", "w3", "w"} <= {read.name for read in weight_reads(plan.model)}
    assert [read.resident == 0 for read in weight_reads(plan.model) if read.name in "s0 s1"] == [True, False]
    plan.save(tmp_path / "planned.onnx")
    with memonger.Session(tmp_path / "planned.onnx") as session:
        for _ in range(2):
            assert session.run(feed)["y"].tobytes() == expected.tobytes()
        assert not session.weight_readers[0].why_not


def test_what_kernels_pack_for_themselves_is_named_in_the_refusal() -> None:
    nodes, weights = [], dict[str, np.ndarray]()
    for layer in range(2):
        weights[f"w{layer}"] = _integers(256, 256, 3, 3)
        ends = [f"v{layer}", "s", "zu", f"w{layer}", "s", "zs", "s", "zu"], [f"v{layer + 1}"]
        nodes.append(helper.make_node("QLinearConv", *ends, f"conv{layer}", pads=[1, 1, 1, 1]))
    model = model_of(nodes, {"v0": [1, 256, 4, 4]}, {"v2": [1, 256, 4, 4]}, **weights, **SCALES)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = U8
    with pytest.raises(
        memonger.BudgetError, match=r"1\.12 MiB of its weights can't stay .* 'w0' \(com.microsoft::QLinearConv\) and 1"
    ):
        memonger.search_plan(model, device="cpu", mode="inference", budget="600KiB")


def test_weights_behind_sizes_that_only_a_run_tells_are_packed_beside_others() -> None:
    """Rows that aren't zero are multiplied by one weight, all rows by another: both have packed copies."""
    node, rng = onnx.helper.make_node, np.random.default_rng(0)
    nodes = [
        node("MatMul", ["x", "v"], ["a"]), node("ReduceSum", ["a", "one"], ["sums"], keepdims=0),
        node("Greater", ["sums", "zero"], ["is"]), node("Compress", ["a", "is"], ["some"], axis=0),
        node("Relu", ["some"], ["positive"]), node("MatMul", ["positive", "w"], ["y"]),
    ]  # fmt: skip
    model = model_of(
        nodes, {"x": [4, 600]}, {"y": [None, 600]}, one=np.array([1]), zero=np.float32([0]),
        v=rng.standard_normal((600, 600)).astype(np.float32), w=rng.standard_normal((600, 600)).astype(np.float32),
    )  # fmt: skip
    plan = memonger.search_plan(model, device="cpu", mode="inference")
    (reader,) = (use.node for use in plan.model.graph.initializers["w"].uses())
    assert reader.inputs[0] is not None
    reader.inputs[0].type = None  # as where neither an inference nor a run has told it
    packed = {str(copy.weight.name) for copy in packed_weights(plan.model, plan.model.graph.initializers.values())}
    assert packed == {"v", "w"}
