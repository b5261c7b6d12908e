"""Training steps in loops give what stock onnxruntime gives for the step as it was: a loss over many words, its
gradients, and a weight's gradient that is summed up from slice to slice."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

pytest.importorskip("onnxruntime")

import memonger
from memonger.errors import PlanError
from memonger.ir.values import graphs
from memonger.loops import search
from memonger.loops.writer import NotInLoopsError, with_loops
from memonger.model.load import load
from memonger.tiling.axes import Axes, slicing
from memonger.tiling.cutting import Slicing
from memonger.tiling.slices import Band, SliceStage
from tests.support.stock import normal, parse, run_stock, same

WORDS = 512


def _step(words: int = WORDS, vocabulary: int = 2048, width: int = 16) -> onnx.ModelProto:
    """The training step of a language model's last layer."""
    model = parse(
        f"""g (float[{words}, {width}] x, int64[{words}] labels) => (float loss) {{
            h = Relu (x)  scores = Gemm <transB = 1> (h, table)
            loss = SoftmaxCrossEntropyLoss (scores, labels)
        }}"""
    )
    model.graph.initializer.append(numpy_helper.from_array(normal(1, vocabulary, width), "table"))
    made = memonger.differentiate(model, loss="loss", optimizer=memonger.SGD(lr=0.1), wrt=["x", "table"])
    return ir.serde.serialize_model(made.ir)


def _feeds(words: int = WORDS, vocabulary: int = 2048) -> dict[str, np.ndarray]:
    labels = np.random.default_rng(3).integers(0, vocabulary, words)
    return {"x": normal(2, words, 16), "labels": labels, "step": np.array(1, np.int64)}


def _run(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    inputs = {value.name for value in model.graph.input}
    return run_stock(model, {name: array for name, array in _feeds().items() if name in inputs}, "ORT_ENABLE_ALL")


def test_a_loss_over_many_words_runs_in_a_loop_with_the_same_bits() -> None:
    step = _step()
    made = memonger.shrink(step, check=False, max_overhead=10.0)
    assert len(made.loops) == 1
    assert made.loops[0].slices == WORDS // 128
    proto = ir.serde.serialize_model(made.model)
    onnx.checker.check_model(proto, full_check=True)
    (scan,) = (node for graph in graphs(made.model) for node in graph if node.op_type == "Scan")
    body = scan.attributes["body"].as_graph()
    assert len(body.inputs) > scan.attributes["num_scan_inputs"].as_int(), "the weight's gradient is carried"
    whole = {tuple(v.shape or ()) for graph in graphs(made.model) for node in graph for v in node.outputs}
    assert (WORDS, 2048) not in whole, "no logits, nor what is as large"
    was, now = _run(step), _run(proto)
    assert was.keys() == now.keys() >= {"loss", "table.next"}
    assert all(same(now[name], was[name]) for name in was)
    before, after = made.before.expected, made.after.expected
    assert before is not None
    assert after is not None
    assert after.run_bytes < 0.3 * before.run_bytes


def test_a_measured_step_has_its_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory_decides = {"NOISE": 100.0, "TURNS": (1, 1), "TURN_SECONDS": 0.0, "TRIED": 2}
    for name, value in memory_decides.items():
        monkeypatch.setattr(search, name, value)
    path = tmp_path / "step.onnx"
    onnx.save(_step(), path)
    made = memonger.shrink(path, max_overhead=20.0)
    assert made.loops
    assert made.before.run_bytes is not None
    assert made.after.run_bytes is not None
    assert made.after.run_bytes < 0.5 * made.before.run_bytes


def test_a_step_of_few_words_says_that_nothing_is_gained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum over slices keeps its bits where each has 128 words: of 130 there are no two slices."""
    monkeypatch.setattr("memonger.loops.search.can_be_in_branch", lambda model: False)
    with pytest.raises(PlanError, match=r"gains nothing in loops|multiple of 128 elements"):
        memonger.shrink(_step(words=130), check=False)


def _product(text: str) -> tuple[ir.Model, Axes]:
    model = load(parse(f"g (float[256, 4] a, float[256, 6] b, float[4, 6] c) => (float[4, 6] y) {{ {text} }}")).ir
    ways = [slicing(node, {0: 0, 1: 0}, 256, sums=True) for node in model.graph]
    assert all(isinstance(how, Slicing) and how.sums for how in ways)
    return model, Axes(256, tuple(ways), {"a": 0, "b": 0})


def _band(*counts: int) -> Band:
    stages = (SliceStage(0, 1, tuple(range(0, 257, 256 // count))) for count in counts)
    return Band(tuple(stages))


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_a_product_over_what_is_cut_is_carried(alpha: float) -> None:
    model, axes = _product(f"y = Gemm <transA = 1, alpha = {alpha}> (a, b)")
    made = ir.serde.serialize_model(with_loops(model, axes, [_band(2)]))
    onnx.checker.check_model(made, full_check=True)
    assert [node.op_type for node in made.graph.node] == ["Reshape", "Reshape", "ConstantOfShape", "Scan"]
    feeds = {"a": normal(0, 256, 4), "b": normal(1, 256, 6), "c": normal(2, 4, 6)}
    was = run_stock(ir.serde.serialize_model(model), feeds, "ORT_ENABLE_ALL")
    assert same(run_stock(made, feeds, "ORT_ENABLE_ALL")["y"], was["y"])


def test_a_product_that_adds_more_is_refused_by_name() -> None:
    model, axes = _product("y = Gemm <transA = 1> (a, b, c)")
    with pytest.raises(NotInLoopsError, match="sums up 'y'"):
        with_loops(model, axes, [_band(2)])
