"""What stock onnxruntime is expected to take for a graph: which values share memory, and the order nodes run in."""

import random
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper

from memonger.graph import stock
from memonger.graph.schedule import default_order, sources_of
from memonger.runtime.profile import read_profile
from tests.support import networks

MIB = 1 << 20
SIDE = 512  # a square matrix of float32 is 1 MiB


def _taken(nodes: list[onnx.NodeProto], output: str, **workspace: int) -> int:
    """Whole MiB that a model takes beside weights and input."""
    model = networks.model_of(nodes, {"x": [SIDE, SIDE]}, {output: [SIDE, SIDE]}, w=np.zeros((SIDE, SIDE), np.float32))
    inferred = ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(model))
    return stock.allocated_bytes(inferred, workspace, as_written=True) // MIB


def _chain(*ops: str) -> list[onnx.NodeProto]:
    names = ["x", *(f"v{i}" for i in range(1, len(ops) + 1))]
    return [
        helper.make_node(op, [before, "w"] if op in ("MatMul", "Add") else [before], [after], name=after)
        for op, before, after in zip(ops, names, names[1:], strict=False)
    ]


def test_kernels_that_say_so_take_their_inputs_memory_and_others_dont() -> None:
    """One value's memory and the output; or two values', of which the block of the second run hides half, and one."""
    assert _taken(_chain("MatMul", "Relu", "Sigmoid", "Tanh", "MatMul"), "v5") == 2
    assert _taken(_chain("MatMul", "Neg", "Neg", "Neg", "MatMul"), "v5") == 3


def test_a_value_that_is_read_again_keeps_its_memory() -> None:
    again = [*_chain("MatMul", "Relu"), helper.make_node("Mul", ["v1", "v2"], ["y"], name="y")]
    assert _taken(again, "y") > _taken(_chain("MatMul", "Relu", "MatMul"), "v3")


def test_workspace_is_counted_at_its_node() -> None:
    """The output finds room where it was."""
    assert _taken(_chain("MatMul", "Relu"), "v2") == 2
    assert _taken(_chain("MatMul", "Relu"), "v2", v1=8 * MIB) == 9


@pytest.mark.parametrize(("dims", "taken"), [([SIDE, SIDE], 2), (["N", SIDE], 3), ([None, SIDE], 3), (["N", None], 3)])
def test_what_is_made_of_open_lengths_shares_no_memory(dims: list[int | str | None], taken: int) -> None:
    """onnxruntime has no name for what a `Resize` makes of one, so that it takes no two values to be of one size."""
    resize = helper.make_node("Resize", ["x", "", "scales"], ["v1"], name="v1")
    nodes = [resize, *_chain("MatMul", "Relu", "Sigmoid", "MatMul")[1:]]
    model = networks.model_of(
        nodes, {"x": [SIDE, SIDE]}, {"v4": [SIDE, SIDE]}, w=np.zeros((SIDE, SIDE), np.float32),
        scales=np.ones(2, np.float32),
    )  # fmt: skip
    inferred = ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(model))
    assert stock.allocated_bytes(inferred, {}, as_written=True, in_file={"x": dims}) // MIB == taken


def test_dimensions_are_told_as_a_file_has_them() -> None:
    model = ir.serde.deserialize_model(networks.model_of([], {"x": ["N", 3, None]}, {}))
    assert stock.dims_in_file(model.graph) == {"x": ["N", 3, None]}


@pytest.mark.parametrize("seed", range(4))
def test_the_default_order_of_nodes_is_onnxruntimes_own(seed: int, tmp_path: Path) -> None:
    """Random graphs of Add and Neg, in the order that onnxruntime's profiler shows."""
    choice, values, nodes = random.Random(seed), ["x"], []
    for i in range(14):
        inputs = [choice.choice(values) for _ in range(choice.choice((1, 2)))]
        nodes.append(helper.make_node("Neg" if len(inputs) == 1 else "Add", inputs, [f"v{i}"], name=f"n{i}"))
        values.append(f"v{i}")
    unread = [value for value in values[1:] if not any(value in node.input for node in nodes)]
    model = networks.model_of(nodes, {"x": [2]}, {value: [2] for value in unread})
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    session.run(None, {"x": np.ones(2, np.float32)})
    executed = [run.name for run in read_profile(Path(session.end_profiling()))]
    sources = sources_of(list(ir.serde.deserialize_model(model).graph))
    order = default_order([*map(sorted, sources)], range(len(nodes)))
    assert [nodes[number].name for number in order] == executed
