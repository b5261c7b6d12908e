"""What is said of plans in chunks: by the commands, in records and differences, and on the page."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from onnx import helper

import memonger
from memonger.cli import commands
from memonger.graph import session_memory
from memonger.ir.marks import CHUNK
from memonger.plan_file import ChunkedBand
from memonger.report.chunks import chunks_words
from memonger.report.view import View
from memonger.runtime.partition import cut_chunks
from tests.support import networks
from tests.support.stock import normal


def _model() -> onnx.ModelProto:
    """Rows that widen and become few again, in modules ``wide`` and ``few``; at the end a sum over the batch."""
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["a"], name="wide/product"),
        helper.make_node("Tanh", ["a"], ["b"], name="wide/tanh"),
        helper.make_node("MatMul", ["b", "w1"], ["c"], name="few/product"),
        helper.make_node("Tanh", ["c"], ["d"], name="few/tanh"),
        helper.make_node("ReduceSum", ["d", "axes"], ["y"], name="sum"),
    ]
    weights = {"w0": normal(0, 8, 256), "w1": normal(1, 256, 8), "axes": np.array([0])}
    return networks.model_of(nodes, {"x": [64, 8]}, {"y": [1, 8]}, **weights)


@pytest.fixture(scope="module")
def chunked() -> memonger.Plan:
    return memonger.search_plan(_model(), mode="inference", device="cpu", threads=1, chunks=4)


@pytest.fixture(scope="module")
def whole() -> memonger.Plan:
    return memonger.search_plan(_model(), mode="inference", device="cpu", threads=1, chunks="off")


def test_inspect_and_diff_say_what_runs_in_chunks(chunked: memonger.Plan, whole: memonger.Plan, tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("whole.onnx", "chunked.onnx")]
    for plan, file in zip((whole, chunked), files, strict=True):
        plan.save(file)
    printed = " ".join(_invoke(0, "inspect", files[1]).split())
    assert "4 of 5 nodes run in chunks of the batch, in 4 slices: they need" in printed
    assert "What runs in chunks" in printed
    assert "chunks" not in _invoke(0, "inspect", files[0])
    record = json.loads(_invoke(0, "inspect", files[1], "--json"))["plan"]["chunks"]
    assert [(band["first"], band["last"], band["slices"]) for band in record] == [("wide/product", "few/tanh", [4])]
    assert "runs in chunks: nothing -> 4 nodes along the batch, in 4 slices" in " ".join(
        _invoke(1, "diff", *files).split()
    )


def _invoke(status: int, *arguments: str) -> str:
    result = CliRunner().invoke(commands.main, list(arguments), env={"COLUMNS": "100"})
    assert result.exit_code == status, result.output
    return result.output


@pytest.mark.parametrize(
    ("bands", "words"),
    [
        ([(1, (8,)), (1, (8,))], "6 nodes along axis 1 of the inputs, in 2 bands of 8 slices"),
        ([(0, (16, 4))], "3 nodes along the batch, in 16, then 4 slices"),
        ([(0, (8, 4, 2, 1))], "3 nodes along the batch, in 8, then 4, 2 and 1 slices"),
        ([(0, (16, 4)), (0, (8,))], "6 nodes along the batch, in 2 bands of 4 to 16 slices"),
    ],
)
def test_slices_in_words(bands: list[tuple[int, tuple[int, ...]]], words: str) -> None:
    made = [ChunkedBand(axis, "a", "b", 3, slices, 9, 100, 10, 0.0) for axis, slices in bands]
    assert chunks_words([{key: getattr(one, key) for key in one.__slots__} for one in made]) == words


def test_copies_belong_to_the_module_of_their_node(chunked: memonger.Plan, whole: memonger.Plan) -> None:
    modules = {step.node: step.module for step in View("m", whole).steps}
    for step in View("m", chunked).steps:
        name, found, _ = step.node.partition(".chunk")
        if not found or name in modules:
            assert step.module == modules[name]
        else:
            assert step.module == (name,)


def test_a_chunk_is_counted_once_where_sessions_are_shared(
    chunked: memonger.Plan, whole: memonger.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many nodes as the sessions that are made have; the rest is for addresses, and small."""
    monkeypatch.setattr(session_memory, "PACKED", 0)
    nodes = sum(len(onnx.ModelProto.FromString(group.model.data).graph.node) for group in cut_chunks(chunked).groups)
    assert nodes == len(whole.graph.nodes)
    assert chunked.session_bytes is not None
    assert whole.session_bytes is not None
    per_step = (chunked.session_bytes - whole.session_bytes - 1.5 * 2**20) / len(chunked.graph.nodes)
    assert per_step == pytest.approx(4 * 2**10, abs=1)


def test_without_its_plan_a_chunked_model_runs_as_stock_with_its_copies(chunked: memonger.Plan) -> None:
    model = memonger.unplan(chunked, as_planned=True)
    assert sum(CHUNK in node.metadata_props for node in model.ir.graph) == 16
    feeds = {"x": normal(5, 64, 8)}
    expected = networks.run_stock(networks.stock(_model()), feeds)
    found = networks.run_stock(networks.stock(ir.to_proto(model.ir)), feeds)
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in expected.items()
    }


def test_parts_of_a_joined_value_are_not_counted_beside_it(chunked: memonger.Plan, whole: memonger.Plan) -> None:
    """What joining adds are the slices of the input alone."""
    assert chunked.activation_bytes - whole.activation_bytes == chunked.input_bytes


def test_a_value_of_unknown_size_goes_past_the_chunks() -> None:
    """onnxruntime holds it from one session to another."""
    nodes = [
        helper.make_node("NonZero", ["m"], ["n"], name="found"),
        helper.make_node("Tanh", ["x"], ["a"], name="first"),
        helper.make_node("Sin", ["a"], ["b"], name="second"),
        helper.make_node("Gather", ["b", "n"], ["c"], name="taken"),
        helper.make_node("ReduceSum", ["c", "axes"], ["y"], name="sum", keepdims=0),
    ]
    model = networks.model_of(nodes, {"x": [16, 8], "m": [5]}, {"y": [8]}, axes=np.array([0, 1]))
    plan = memonger.search_plan(model, mode="inference", device="cpu", threads=1, chunks=4, order="file")
    assert plan.chunks
    feeds = {"x": normal(1, 16, 8), "m": np.array([0, 1, 0, 2, 0], np.float32)}
    expected = networks.run_stock(networks.stock(model), feeds)["y"]
    assert memonger.Session(plan).run(feeds)["y"].tobytes() == expected.tobytes()
