"""Images whose rows run in loops give what they gave, in stock onnxruntime with its default options."""

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

pytest.importorskip("onnxruntime")

import memonger
from memonger.errors import PlanError
from memonger.ir.values import subgraphs
from memonger.loops import candidates, search
from memonger.loops.branch import in_branch
from memonger.loops.candidates import MOVING_SECONDS
from memonger.loops.rows import Ends, with_row_loops
from memonger.loops.writer import NotInLoopsError
from memonger.lowering.as_stock import expected
from memonger.model.load import load
from memonger.runtime import process_memory
from memonger.runtime.measure import MeasuredSession, RunJob, write_arrays
from memonger.runtime.onnxruntime import onnxruntime
from memonger.tiling.axes import row_rules
from memonger.tiling.chunk_times import cores_of
from memonger.tiling.cutting import Refusal, Slicing
from memonger.tiling.overlap import with_overlap
from memonger.tiling.slices import Band, row_band
from tests.support.image_networks import ImageNetwork, needs_own, rows_of_all
from tests.support.stock import normal, parse, run_stock, same

RESIDUAL = """
    a = Conv <pads = [1, 1, 1, 1]> (x, w0)  b = Relu (a)  c = Conv <pads = [1, 1, 1, 1]> (b, w1)  d = Relu (c)
    e = Conv <pads = [1, 1, 1, 1]> (d, w2)  f = Add (b, e)  g = Conv <pads = [2, 2, 2, 2]> (f, w3)
    y = DepthToSpace <blocksize = 2> (g)
"""
"""A residual connection, which lags, and twice as many rows at the end."""

LEVELS = """
    a = Conv <pads = [1, 1, 1, 1]> (x, w0)  b = Relu (a)  p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (b)
    c = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (p, w1)  d = Relu (c)
    u = ConvTranspose <strides = [2, 2]> (d, t0)  j = Concat <axis = 1> (u, p)
    e = Conv <pads = [1, 1, 1, 1]> (j, w4)  v = ConvTranspose <strides = [2, 2]> (e, t0)
    f = Add (v, b)  y = Conv <pads = [1, 1, 1, 1]> (f, w5)
"""
"""A U-Net: rows are pooled, strided and made again, and what was there before waits for that."""


WIDE = """
    a = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (x, w0)  b = Conv (a, e0)  c = Clip (b, low, high)
    d = Conv <pads = [1, 1, 1, 1], group = 96> (c, d0)  e = Relu (d)  f = Conv (e, p0)  g = Add (a, f)
    h = Conv (g, n0)  y = Resize <mode = "linear"> (h, , twice)
"""
"""A block that makes channels many for a depthwise convolution, and an image that is made larger."""

PYRAMID = """
    a = Conv <pads = [1, 1, 1, 1]> (x, w0)  b = Relu (a)  c = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (b, w1)
    u = Resize <coordinate_transformation_mode = "asymmetric", mode = "nearest", nearest_mode = "floor"> (c, , twice)
    f = Add (u, b)  y = Conv <pads = [1, 1, 1, 1]> (f, w5)
"""
"""A feature pyramid: an image that is made larger, and what is added to it; rows are asked for from odd ones on."""

ENDS: tuple[Ends, ...] = ("nodes", "apart", "turns")

CONSTANTS = {"low": 0, "high": 6, "twice": (1, 1, 2, 2)}


def _model(body: str, height: int, channels: int = 16, width: int = 24) -> onnx.ModelProto:
    model = parse(
        f"g (float[1, 3, {height}, {width}] x) => (float[1, C, H, W] y) {{ {body} }}",
        opset=17,
    )
    c = channels
    shapes = {
        "w0": (c, 3, 3, 3), "w1": (c, c, 3, 3), "w2": (c, c, 3, 3), "w3": (8, c, 5, 5), "w4": (c, 2 * c, 3, 3),
        "w5": (2, c, 3, 3), "t0": (c, c, 2, 2), "e0": (6 * c, c, 1, 1), "d0": (6 * c, 1, 3, 3), "p0": (c, 6 * c, 1, 1),
        "n0": (9, c, 1, 1),
    }  # fmt: skip
    weights = {name: normal(seed, *dims) / 8 for seed, (name, dims) in enumerate(shapes.items()) if name in body}
    weights |= {name: np.array(value, np.float32) for name, value in CONSTANTS.items() if name in body}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return onnx.shape_inference.infer_shapes(model)


def test_nodes_of_signals_overlap_nothing() -> None:
    model = parse("g (float[1, 4, 32] x) => (float[1, 4, 30] y) { a = Relu(x) y = MaxPool<kernel_shape=[3]>(a) }")
    loaded = load(model).ir
    assert not with_overlap(loaded, row_rules(loaded), {}, MOVING_SECONDS, 4)


TOKENS = """
    a = Conv <pads = [1, 1, 1, 1]> (x, w0)  b = Reshape (a, flat)  c = Transpose <perm = [0, 2, 1]> (b)
    n = LayerNormalization (c, ones)  m = MatMul (n, m0)  t = Transpose <perm = [0, 2, 1]> (m)
    i = Reshape (t, image)  d = Conv <pads = [1, 1, 1, 1], group = 32> (i, k0)  f = Reshape (d, wide)
    u = Transpose <perm = [0, 2, 1]> (f)  g = Gelu (u)  o = MatMul (g, m1)  r = Add (o, c)
    p = Transpose <perm = [0, 2, 1]> (r)  j = Reshape (p, back)  y = Conv <pads = [1, 1, 1, 1]> (j, w5)
"""
"""A transformer's block whose tokens are an image's elements, with a convolution between its two layers."""


def _tokens(height: int = 40) -> onnx.ModelProto:
    model = parse(f"g (float[1, 3, {height}, 24] x) => (float[1, 2, {height}, 24] y) {{ {TOKENS} }}", opset=20)
    constants: dict[str, np.ndarray] = {
        "w0": normal(0, 16, 3, 3, 3), "m0": normal(1, 16, 32) / 4, "k0": normal(2, 32, 1, 3, 3) / 3,
        "m1": normal(3, 32, 16) / 6, "w5": normal(4, 2, 16, 3, 3), "ones": np.ones(16, np.float32),
        "flat": np.array([1, 16, -1]), "wide": np.array([1, 32, -1]), "image": np.array([1, 32, height, 24]),
        "back": np.array([1, 16, height, 24]),
    }  # fmt: skip
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    return onnx.shape_inference.infer_shapes(model)


@pytest.mark.parametrize("ends", ENDS)
def test_tokens_run_in_the_rows_of_the_image_that_they_are(ends: Ends) -> None:
    """Lines of tokens and of images are carried, each token computed once."""
    model = _tokens()
    made = _in_loops(model, 4, ends=ends)
    feeds = {"x": normal(7, 1, 3, 40, 24)}
    want, got = (run_stock(each, feeds, "ORT_ENABLE_ALL") for each in (model, made))
    np.testing.assert_allclose(got["y"], want["y"], rtol=1e-4, atol=1e-5)
    assert not {"MatMul", "Gelu"}.intersection(node.op_type for node in made.graph.node if ends != "nodes")


CHAIN = """
    a = Conv <pads = [1, 1, 1, 1]> (x, w0)  b = Relu (a)  c = Conv <pads = [1, 1, 1, 1]> (b, w1)  d = Sigmoid (c)
    e = Mul (c, d)  y = Conv <pads = [1, 1, 1, 1]> (e, w5)
"""
"""Convolutions, each with an activation; that of the second is two nodes."""


@pytest.mark.parametrize(
    ("body", "slow", "again"),
    [
        (CHAIN, (), "abcde"),
        (CHAIN, "a", "cde"),
        (CHAIN, "c", "ab"),
        (CHAIN, "ac", ""),
        (RESIDUAL, (), "cd"),  # f would want more of b, of which other nodes read other rows: parts are cut in any case
        (WIDE, (), "bch"),
    ],
)
def test_rows_are_computed_again_where_that_takes_less_than_to_keep_them(
    body: str, slow: Sequence[str], again: str
) -> None:
    loaded = load(_model(body, 40)).ir
    for node in loaded.graph:
        node.name = node.outputs[0].name
    assert (
        "".join(sorted(with_overlap(loaded, row_rules(loaded), dict.fromkeys(slow, 1.0), MOVING_SECONDS, 4))) == again
    )


def _in_loops(model: onnx.ModelProto, rows: int, *, overlap: bool = False, ends: Ends = "nodes") -> onnx.ModelProto:
    """All of a model in slices of so many rows, as a sound message."""
    loaded = load(model).ir
    assert not overlap or with_overlap(loaded, row_rules(loaded), {}, MOVING_SECONDS, 4)
    made = ir.serde.serialize_model(with_row_loops(loaded, [rows_of_all(loaded, rows)], ends))
    onnx.checker.check_model(made, full_check=True)
    return made


def _scans(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == "Scan"]


@pytest.mark.parametrize(
    ("body", "height", "rows"),
    [(RESIDUAL, 40, 8), (RESIDUAL, 37, 6), (RESIDUAL, 37, 2), (LEVELS, 64, 4), (LEVELS, 64, 8), (LEVELS, 84, 4)],
)
def test_rows_in_a_loop_give_the_same_bits(body: str, height: int, rows: int) -> None:
    model = _model(body, height) if body == RESIDUAL else _model(body, height, 8, 72)
    made = _in_loops(model, rows)
    (scan,) = _scans(made)
    inner = next(attribute.g for attribute in scan.attribute if attribute.name == "body")
    assert len(inner.input) > 1, "lines are carried"
    assert {"Conv"} <= {node.op_type for node in inner.node}
    assert [v.name for v in made.graph.output] == ["y"]
    feeds = {"x": normal(7, 1, 3, height, 24 if body == RESIDUAL else 72)}
    want, got = (run_stock(each, feeds, "ORT_ENABLE_ALL") for each in (model, made))
    assert same(got["y"], want["y"])


@pytest.mark.parametrize(("body", "height", "rows"), [(RESIDUAL, 40, 8), (RESIDUAL, 37, 2), (LEVELS, 84, 4)])
def test_what_stands_around_a_loop_runs_apart_with_the_same_bits(body: str, height: int, rows: int) -> None:
    """Three loops one after the other: of one turn, of most slices, of one turn. No other node computes anything."""
    width, channels = (24, 16) if body == RESIDUAL else (72, 8)
    model = _model(body, height, channels, width)
    made = _in_loops(model, rows, ends="apart")
    turns = [next(v for v in made.graph.initializer if v.name == scan.input[-1]).dims[0] for scan in _scans(made)]
    assert (turns[0], turns[2]) == (1, 1)
    assert turns[1] > 1
    assert {node.op_type for node in made.graph.node} <= {"Scan", "Reshape", "Slice", "Concat"}
    feeds = {"x": normal(7, 1, 3, height, width)}
    want, got = (run_stock(each, feeds, "ORT_ENABLE_ALL") for each in (model, made))
    assert same(got["y"], want["y"])


@pytest.mark.parametrize(("body", "height", "rows"), [(RESIDUAL, 40, 8), (RESIDUAL, 37, 2), (LEVELS, 84, 4)])
def test_what_stands_around_a_loop_runs_as_turns_of_it_with_the_same_bits(body: str, height: int, rows: int) -> None:
    """One loop, whose body has a branch for the first turn, one for the last, and one for all others. No other node
    computes anything, lines begin and end without rows, and results are joined once."""
    width, channels = (24, 16) if body == RESIDUAL else (72, 8)
    model = _model(body, height, channels, width)
    made = _in_loops(model, rows, ends="turns")
    assert {node.op_type for node in made.graph.node} == {"SequenceEmpty", "Loop", "ConcatFromSequence"}
    (loop,) = (node for node in made.graph.node if node.op_type == "Loop")
    lines = [v for v in made.graph.initializer if v.name in loop.input[2:]]
    assert lines
    assert all(line.dims[2] == 0 for line in lines)
    graphs = [ir.serde.deserialize_model(made).graph]
    graphs += [each for node in graphs[0].all_nodes() for each in subgraphs(node)]
    assert len([graph for graph in graphs if any(node.op_type == "Conv" for node in graph)]) == 3
    feeds = {"x": normal(7, 1, 3, height, width)}
    want, got = (run_stock(each, feeds, "ORT_ENABLE_ALL") for each in (model, made))
    assert same(got["y"], want["y"])


def test_what_stands_around_a_loop_takes_less_as_turns_of_it_and_both_are_forecast(tmp_path: Path) -> None:
    """What slices before a loop make doesn't wait for those behind it; and lines are there twice, not four times."""
    model, x = _model(LEVELS, 384, 32, 384), normal(7, 1, 3, 384, 384)
    loaded, taken = load(model).ir, list[int]()
    write_arrays(tmp_path / "inputs.npz", {"x": x})
    for ends in ENDS:
        made = in_branch(with_row_loops(loaded, [rows_of_all(loaded, 32)], ends), divided=False)
        ir.save(made, tmp_path / "made.onnx")
        job = RunJob(*(str(tmp_path / name) for name in ("made.onnx", "inputs.npz", "outputs.npz")), planned=False)
        with MeasuredSession(job, tmp_path, "made") as session:
            taken.append(session.loaded["peak_bytes"])
        forecast = expected(made, {"x": x.shape}, cores_of(0))
        assert forecast is not None
        assert not process_memory.is_measurable() or 0.85 < forecast.run_bytes / taken[-1] < 1.15
    assert not process_memory.is_measurable() or max(taken[1:]) < 0.9 * taken[0]


@pytest.mark.parametrize("rows", [4, 8])
def test_rows_of_cheap_nodes_are_computed_again_in_place_of_kept(rows: int) -> None:
    model, feeds = _model(WIDE, 64), {"x": normal(7, 1, 3, 64, 24)}
    made = _in_loops(model, rows, overlap=True)
    (scan,) = _scans(made)
    inner = next(attribute.g for attribute in scan.attribute if attribute.name == "body")
    lines = {v.name.split(".")[0] for v in inner.input}
    assert lines.isdisjoint("bch"), "what they give isn't kept"
    assert "a" in lines
    assert not any(node.metadata_props for node in inner.node)
    want, got = (run_stock(each, feeds, "ORT_ENABLE_ALL") for each in (model, made))
    assert same(got["y"], want["y"])


def test_what_is_made_larger_is_added_in_blocks_without_a_cut() -> None:
    """Nothing stands between an image that is made larger and the sum, which gives as many rows: a multiple of two."""
    model, feeds = _model(PYRAMID, 64), {"x": normal(7, 1, 3, 64, 24)}
    made = _in_loops(model, 8)
    (scan,) = _scans(made)
    inner = next(attribute.g for attribute in scan.attribute if attribute.name == "body")
    maker = {name: node for node in inner.node for name in node.output}
    (added,) = (node for node in inner.node if node.op_type == "Add")
    assert "Resize" in {maker[name].op_type for name in added.input}
    want, got = (run_stock(each, feeds, "ORT_ENABLE_ALL") for each in (model, made))
    assert same(got["y"], want["y"])


def test_a_residual_connection_keeps_its_bits_where_channels_fill_no_blocks() -> None:
    model = _model(RESIDUAL, 40, 24)
    feeds = {"x": normal(7, 1, 3, 40, 24)}
    want, got = (run_stock(each, feeds, "ORT_ENABLE_ALL") for each in (model, _in_loops(model, 8)))
    assert same(got["y"], want["y"])


def test_lines_of_a_deep_network_are_filled_step_by_step() -> None:
    """The first results read 14 rows of the first convolution, of which slices before the loop make a few each."""
    names = ["x", *"abcdefghijklm", "y"]
    pairs = itertools.pairwise(names)
    body = " ".join(f"{b} = Conv <pads = [1, 1, 1, 1]> ({a}, {'w0' if a == 'x' else 'w1'})" for a, b in pairs)
    model = _model(body, 48)
    made = onnx.shape_inference.infer_shapes(_in_loops(model, 2))
    shapes = {v.name: v.type.tensor_type.shape for v in made.graph.value_info}
    convs = [node.output[0] for node in made.graph.node if node.op_type == "Conv"]
    assert max(shapes[name].dim[2].dim_value for name in convs if name.startswith("a.")) <= 5
    feeds = {"x": normal(7, 1, 3, 48, 24)}
    want, got = (run_stock(each, feeds, "ORT_ENABLE_ALL") for each in (model, made))
    assert same(got["y"], want["y"])


def test_no_row_is_computed_twice_and_none_of_padding() -> None:
    """As many rows of each convolution as there are: those of the nodes around the loop, and of its slices."""
    model = _model(RESIDUAL, 40)
    made = onnx.shape_inference.infer_shapes(_in_loops(model, 8))
    (scan,) = _scans(made)
    inner = next(attribute.g for attribute in scan.attribute if attribute.name == "body")
    numbers = next(each for each in made.graph.initializer if each.name == scan.input[-1])
    count, computed = dict.fromkeys("aceg", 0), 0
    shapes = {v.name: v.type.tensor_type.shape for v in [*made.graph.value_info, *inner.value_info]}
    for nodes, times in ((made.graph.node, 1), (inner.node, numbers.dims[0])):
        for node in (each for each in nodes if each.op_type == "Conv"):
            computed += 1
            count[node.output[0].split(".")[0]] += shapes[node.output[0]].dim[2].dim_value * times
    assert count == dict.fromkeys("aceg", 40)
    assert computed > 4


def test_any_network_of_images_gives_what_the_whole_gives() -> None:
    written = 0
    for seed in range(30):
        chance = random.Random(seed)
        network = ImageNetwork(chance.choice, chance.randint(24, 60), chance.choice((1, 1, 2)))
        for _ in range(chance.randint(3, 9)):
            network.grow()
        if not network.nodes:
            continue
        model = network.model()
        made = _random_loops(model, chance.choice((1, 2, 3, 4, 6)), overlap=seed % 2 > 0, ends=ENDS[seed % 3])
        if made is None:
            continue
        onnx.checker.check_model(made, full_check=True)
        want, got = (run_stock(each, network.feeds, "ORT_ENABLE_ALL") for each in (model, made))
        for name in want:
            np.testing.assert_allclose(got[name], want[name], rtol=0.01, atol=0.06, err_msg=f"seed {seed}")
        written += 1
    assert written > 15


def _random_loops(model: onnx.ModelProto, rows: int, *, overlap: bool, ends: Ends) -> onnx.ModelProto | None:
    """A model whose stretches run in slices of so many rows; None where none does."""
    loaded = load(model).ir
    if overlap:
        with_overlap(loaded, row_rules(loaded), {}, MOVING_SECONDS, 4)
    nodes, rules = list(loaded.graph), row_rules(loaded)
    bands = []
    for is_cut, group in itertools.groupby(range(len(nodes)), lambda step: not isinstance(rules[step], Refusal)):
        steps = list(group)
        own = {nodes[step]: rule for step in steps if isinstance(rule := rules[step], Slicing)}
        if is_cut and own and not needs_own(own):
            bands.append(row_band(steps[0], steps[-1] + 1, own, rows))
    ways: Sequence[list[Band]] = [bands, *([band] for band in bands)]
    for way in ways:
        try:
            return ir.serde.serialize_model(with_row_loops(loaded, way, ends)) if way else None
        except NotInLoopsError:
            continue
    return None


@pytest.mark.parametrize(("height", "rows"), [(6, 12), (6, 8), (20, 3)])
def test_images_of_too_few_rows_are_refused(height: int, rows: int) -> None:
    with pytest.raises(NotInLoopsError, match="no two slices of"):
        _in_loops(_model(LEVELS if rows == 3 else RESIDUAL, height), rows)


def test_an_old_operator_set_is_refused() -> None:
    loaded = load(_model(RESIDUAL, 40)).ir
    loaded.graph.opset_imports[""] = 8
    with pytest.raises(NotInLoopsError, match="operator set 9 or newer, and the model has 8"):
        with_row_loops(loaded, [rows_of_all(loaded, 8)])


def test_a_single_image_shrinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How long its runs take decides nothing: the machine may be busy."""
    monkeypatch.setattr(search, "NOISE", 100.0)
    monkeypatch.setattr(search, "TURNS", (1, 1))
    monkeypatch.setattr(search, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(search, "TRIED", 3)
    model = _model(RESIDUAL, 256, 32, 128)
    onnx.save(model, tmp_path / "large.onnx")
    made = memonger.shrink(tmp_path / "large.onnx", max_overhead=2.0)
    made.save(tmp_path / "small.onnx")
    feeds = {"x": normal(7, 1, 3, 256, 128)}
    providers = ["CPUExecutionProvider"]
    (got,) = onnxruntime().InferenceSession(tmp_path / "small.onnx", providers=providers).run(None, feeds)
    assert same(got, run_stock(model, feeds, "ORT_ENABLE_ALL")["y"])
    assert made.before is not None
    assert made.after is not None
    if process_memory.is_measurable():
        assert made.after.run_bytes < 0.75 * made.before.run_bytes  # type: ignore[operator]
    assert made.loops[0].slices > 2


def test_nodes_that_round_otherwise_on_rows_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean of short rows isn't the same of fewer of them, nor is what a kernel computes in vectors of columns."""
    body = """r = Conv <pads = [1, 1, 1, 1]> (x, w0)  m = ReduceMean (r, last)  c = Sub (r, m)  l = LRN <size = 3> (c)
        y = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (l)"""
    model = parse(f"g (float[1, 3, 57, 6] x) => (float[1, 5, 57, 6] y) {{ {body} }}", opset=18)
    constants = {"last": np.array([3], np.int64), "w0": normal(0, 5, 3, 3, 3)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    seen = list[set[str]]()

    def rows(job: candidates.ToSlice, check: candidates.SliceCheck | None, in_turns: bool) -> Iterator[object]:
        assert check is not None
        rounded = set(candidates.rounded_rows(job, check))
        seen.append({node.op_type for node in job.lowered.model.graph if node.name in rounded})
        return iter(())

    monkeypatch.setattr(search, "in_rows", rows)
    monkeypatch.setattr(search, "can_be_in_branch", lambda model: False)
    with pytest.raises(PlanError):
        memonger.shrink(model)
    assert seen == [{"ReduceMean", "LRN"}]


def test_what_gains_nothing_in_rows_says_why() -> None:
    with pytest.raises(PlanError, match=r"gains nothing in loops: all are|can't run in loops"):
        memonger.shrink(_model(RESIDUAL, 6))
