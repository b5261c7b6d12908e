"""What a session takes beside the tensors: said on its own, and no part of the total."""

import dataclasses

import numpy as np
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

import memonger
from memonger.graph import session_memory
from memonger.ir.marks import CHUNK
from memonger.report.summary import plan_record
from tests.support.stock import parse

KIB = 1024


def _plan(nodes: int) -> memonger.Plan:
    text = " ".join(f"v{i + 1} = Neg(v{i})" for i in range(nodes))
    return memonger.search_plan(parse(f"g (float[8] v0) => (float[8] v{nodes}) {{ {text} }}"), device="none")


def test_it_grows_with_the_nodes_and_is_no_part_of_the_total() -> None:
    few, many = _plan(10), _plan(40)
    assert few.session_bytes is not None
    assert many.session_bytes is not None
    assert 0 < few.session_bytes < many.session_bytes
    assert few.total_bytes == many.total_bytes == few.arena_bytes + few.input_bytes
    assert plan_record(many, "m", None)["session_bytes"] == many.session_bytes


def test_nothing_is_said_of_a_device_that_is_not_the_host() -> None:
    assert dataclasses.replace(_plan(3), device="cuda:0").session_bytes is None


def test_marks_that_chunks_are_not_written_with_say_nothing() -> None:
    """A file's marks are a stranger's: those that aren't four numbers count as none."""
    plan = _plan(3)
    expected = plan.session_bytes
    for mark in ("", "x", "1.2", "0.0.a.b", "0.0.-1.2", "0.0.1.2.3"):
        for node in plan.model.graph:
            node.metadata_props[CHUNK] = mark
        assert plan.session_bytes == expected


def test_a_process_has_the_results_of_a_run_and_weights_that_each_kernel_packs() -> None:
    """Weights of ConvTranspose, in the model once and on disk once, which two kernels pack."""
    text = (
        "g (float[1,8,16,16] x) => (float[1,8,20,20] y, float[1,8,18,18] z) {"
        " z = ConvTranspose(x, w)  y = ConvTranspose(z, w) }"
    )
    weight = np.ones((8, 8, 3, 3), np.float32)
    model = parse(text)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    plan = memonger.search_plan(model, device="none", mode="inference")
    assert plan.process_bytes is not None
    results = 4 * 8 * (20 * 20 + 18 * 18)
    beside = session_memory.beside_tensors(plan.model, False)
    assert plan.process_bytes == plan.total_bytes - plan.parameter_bytes + results + weight.nbytes + beside
    mapped = ir.ExternalTensor("w.data", 0, weight.nbytes, ir.DataType.FLOAT, shape=ir.Shape(weight.shape), name="w")
    plan.model.graph.initializers["w"].const_value = mapped
    assert session_memory.weights_in_process(plan.model, (), packs=False) == (2 * weight.nbytes, 0)


def test_trees_count_as_they_are_and_as_kernels_hold_them() -> None:
    """8,192 trees of one split and two leaves: of each node five integers and a float, of leaves three and one more."""
    numbers, split = np.arange(3 * 8192), np.arange(3 * 8192) % 3 == 0
    attributes = {
        "n_targets": 1, "nodes_treeids": numbers // 3, "nodes_nodeids": numbers % 3, "nodes_featureids": 0 * numbers,
        "nodes_modes": ["BRANCH_LEQ" if each else "LEAF" for each in split], "nodes_values": numbers * 1.0,
        "nodes_truenodeids": 1 * split, "nodes_falsenodeids": 2 * split, "target_treeids": (numbers // 3)[~split],
        "target_nodeids": (numbers % 3)[~split], "target_ids": 0 * numbers[~split],
        "target_weights": numbers[~split] * 1.0,
    }  # fmt: skip
    lists = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in attributes.items()}
    node = helper.make_node("TreeEnsembleRegressor", ["x"], ["y"], domain="ai.onnx.ml", **lists)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 1]) for name in "xy"]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx.ml", 3)]
    model = helper.make_model(helper.make_graph([node], "trees", ends[:1], ends[1:]), opset_imports=opsets)
    plan = memonger.search_plan(model, device="cpu", mode="inference")
    size = 3 * 8192 * (5 * 8 + 4) + 2 * 8192 * (3 * 8 + 4)
    assert plan.parameter_bytes == size
    assert session_memory.weights_in_process(plan.model, (), packs=True) == (round(2.85 * size), 0)


def test_a_kernel_that_takes_memory_for_each_frame_has_that_of_one_at_once() -> None:
    """A transform of 400 samples takes some 16 KiB, for one of 750 frames after the other."""
    text = (
        "g (float[1,120000] x) => (float[1,748,201,2] y) <float[400] window> {"
        " h = Constant <value_int = 160> ()  y = STFT <onesided = 1> (x, h, window) }"
    )
    model = parse(text)
    model.graph.initializer.append(numpy_helper.from_array(np.ones(400, np.float32), "window"))
    plan = memonger.search_plan(model, device="cpu", mode="inference")
    assert plan.workspace_bytes is not None
    assert 8 * KIB <= plan.workspace_bytes <= 128 * KIB
