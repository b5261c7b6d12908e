"""A branch that is divided into sections gives what the model gave, in less memory, in stock onnxruntime."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

pytest.importorskip("onnxruntime")

import memonger
from memonger.ir.values import inner_graphs
from memonger.loops import branch, search
from memonger.loops.branch import forms_in_branch, in_branch, with_first_piece
from memonger.loops.candidates import Candidate
from memonger.loops.rows import with_row_loops
from memonger.lowering.as_stock import Expected, expected
from memonger.model.load import load
from memonger.runtime import process_memory
from memonger.runtime.measure import MeasuredSession, RunJob, write_arrays
from memonger.runtime.pairs import Pairs
from memonger.tiling.chunk_times import cores_of
from tests.support.image_networks import rows_of_all
from tests.support.stock import normal, parse, run_stock, same

TOKENS, WIDTH, LAYERS = 1024, 64, 3

LAYER = """
    ln{n} = LayerNormalization <axis = -1> (x{n}, one, zero)  q{n} = MatMul (ln{n}, wq)  k{n} = MatMul (ln{n}, wk)
    v{n} = MatMul (ln{n}, wv)  kt{n} = Transpose <perm = [0, 2, 1]> (k{n})  s{n} = MatMul (q{n}, kt{n})
    p{n} = Softmax <axis = -1> (s{n})  o{n} = MatMul (p{n}, v{n})  h{n} = MatMul (o{n}, wo)  hb{n} = Add (h{n}, zero)
    r{n} = Add (x{n}, hb{n})  m{n} = LayerNormalization <axis = -1> (r{n}, one, zero)  f{n} = MatMul (m{n}, up)
    g{n} = Gelu (f{n})  d{n} = MatMul (g{n}, down)  x{next} = Add (r{n}, d{n})
"""
"""Attention, whose matrix is much larger than what it passes on, and a perceptron, nearly as much so."""


def _transformer(batch: int | str = 1) -> onnx.ModelProto:
    layers = "".join(LAYER.format(n=n, next=n + 1) for n in range(LAYERS))
    size = f"float[{batch}, {TOKENS}, {WIDTH}]"
    model = parse(f"g ({size} x0) => ({size} y) {{ {layers} y = Identity (x{LAYERS}) }}", opset=20)
    shapes = dict.fromkeys(("wq", "wk", "wv", "wo"), (WIDTH, WIDTH))
    shapes |= {"up": (WIDTH, 12 * WIDTH), "down": (12 * WIDTH, WIDTH)}
    weights = {name: normal(n, *shape) / np.float32(WIDTH**0.5) for n, (name, shape) in enumerate(shapes.items())}
    weights |= {"one": np.ones(WIDTH, np.float32), "zero": normal(9, WIDTH)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


def _has_sections(model: ir.Model) -> bool:
    return any(str(graph.name).startswith("section.then") for graph in inner_graphs(model.graph))


def _proto(model: ir.Model) -> onnx.ModelProto:
    made = ir.serde.serialize_model(model)
    onnx.checker.check_model(made, full_check=True)
    return made


def _taken(model: ir.Model, feeds: dict[str, np.ndarray], folder: Path) -> int:
    """Bytes that a run takes in stock onnxruntime, in a process of its own; 0 where the system doesn't say."""
    write_arrays(folder / "inputs.npz", feeds)
    ir.save(model, folder / "made.onnx")
    names = (str(folder / name) for name in ("made.onnx", "inputs.npz", "outputs.npz"))
    with MeasuredSession(RunJob(*names, planned=False), folder, "made") as session:
        return session.loaded["peak_bytes"] or 0


@pytest.mark.parametrize("is_open", [False, True])
def test_layers_that_are_alike_dont_keep_each_others_memory(is_open: bool, tmp_path: Path) -> None:
    model = _transformer("n" if is_open else 1)
    loaded, x = load(model, batch=1).ir, normal(7, 1, TOKENS, WIDTH)
    taken, forecasts = list[int](), list[int]()
    want = run_stock(model, {"x0": x}, "ORT_ENABLE_ALL")["y"]
    for divided in (True, False):
        made = in_branch(loaded, "open" if is_open else "told", divided)
        assert _has_sections(made) == divided
        assert same(run_stock(_proto(made), {"x0": x}, "ORT_ENABLE_ALL")["y"], want)
        forecast = expected(made, {"x0": x.shape}, cores_of(0))
        assert forecast is not None
        forecasts.append(forecast.without_arena)
        taken.append(_taken(made, {"x0": x}, tmp_path))
    assert forecasts[0] < 0.8 * forecasts[1]
    assert not process_memory.is_measurable() or taken[0] < 0.9 * taken[1]


def _image(batch: int | str, side: int) -> onnx.ModelProto:
    """Two results, one of an image that is made larger; convolutions that onnxruntime has in blocks of channels."""
    body = """
        a = Conv <pads = [1, 1, 1, 1]> (x, w0)  b = Relu (a)  c = Conv <pads = [1, 1, 1, 1]> (b, w1)  d = Relu (c)
        e = Conv <pads = [1, 1, 1, 1]> (d, w1)  s = Add (e, b)
        y = MaxPool <kernel_shape = [4, 4], strides = [4, 4]> (s)  u = Resize <mode = "nearest"> (y, , twice)
        f = Conv <pads = [1, 1, 1, 1]> (u, w1)  z = Relu (f)
    """
    small, large = (f"float[{batch}, 32, {side // n}, {side // n}]" for n in (4, 2))
    model = parse(f"g (float[{batch}, 3, {side}, {side}] x) => ({small} y, {large} z) {{ {body} }}", opset=20)
    weights = {"w0": normal(0, 32, 3, 3, 3), "w1": normal(1, 32, 32, 3, 3), "twice": np.array([1, 1, 2, 2], np.float32)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


@pytest.mark.parametrize("batch", ["n", 2])
def test_what_a_branch_takes_is_forecast_whether_sizes_are_open_or_told(batch: int | str, tmp_path: Path) -> None:
    """Results of an open size have no memory before they are made, and what is made larger has a size of no name."""
    model, feeds = _image(batch, 192), {"x": normal(7, 2, 3, 192, 192)}
    made = in_branch(ir.serde.deserialize_model(model))
    forecast = expected(made, {"x": feeds["x"].shape}, cores_of(0))
    want, got = (run_stock(each, feeds, "ORT_ENABLE_ALL") for each in (model, _proto(made)))
    assert all(same(got[name], want[name]) for name in want)
    taken = _taken(made, feeds, tmp_path)
    assert forecast is not None
    assert not process_memory.is_measurable() or forecast.run_bytes == pytest.approx(taken, rel=0.05)


def test_a_piece_that_is_asked_for_first_is_given_back(tmp_path: Path) -> None:
    """Outputs are the same, a run takes what is forecast, and that is less."""
    model, feeds = _image(2, 128), {"x": normal(7, 2, 3, 128, 128)}
    whole = in_branch(ir.serde.deserialize_model(model))
    known = expected(whole, {"x": feeds["x"].shape}, cores_of(0), with_piece=True)
    assert known is not None
    assert known.first_piece > 0
    assert known.with_first_piece < 0.95 * known.run_bytes
    made = with_first_piece(whole, known.first_piece)
    want, got = (run_stock(each, feeds, "ORT_ENABLE_ALL") for each in (model, _proto(made)))
    assert all(same(got[name], want[name]) for name in want)
    forecast = expected(made, {"x": feeds["x"].shape}, cores_of(0))
    assert forecast is not None
    assert forecast.run_bytes == pytest.approx(known.with_first_piece, rel=0.01)
    taken = _taken(made, feeds, tmp_path)
    assert not process_memory.is_measurable() or forecast.run_bytes == pytest.approx(taken, rel=0.05)


def test_sections_end_where_an_image_in_blocks_is_read_otherwise() -> None:
    """What slices before a loop of rows make isn't kept for those behind it."""
    model, feeds = _image(1, 256), {"x": normal(7, 1, 3, 256, 256)}
    del model.graph.output[1], model.graph.node[-3:]
    loaded = load(model).ir
    in_rows = with_row_loops(loaded, [rows_of_all(loaded, 8)])
    made, whole = (in_branch(in_rows, divided=divided) for divided in (True, False))
    assert _has_sections(made)
    want, got = (run_stock(each, feeds, "ORT_ENABLE_ALL") for each in (model, _proto(made)))
    assert all(same(got[name], want[name]) for name in want)
    forecasts = [expected(each, {"x": feeds["x"].shape}, cores_of(0)) for each in (made, whole)]
    assert forecasts[0] is not None
    assert forecasts[1] is not None
    assert forecasts[0].without_arena < 0.8 * forecasts[1].without_arena


def test_sections_end_where_nothing_is_made_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever they may end, in random networks."""
    monkeypatch.setattr(branch, "LESS", 0)
    monkeypatch.setattr(branch, "MUCH", 1e9)
    divided = 0
    for seed in range(24):
        chance, nodes, values = random.Random(seed), list[str](), ["x"]
        for number in range(chance.randint(6, 18)):
            read = chance.choice(values[-3:])
            other = chance.choice(values)
            nodes.append(f"v{number} = " + chance.choice([
                f"Add ({read}, {other})", f"Mul ({read}, {other})", f"MatMul ({read}, w)", f"Gelu ({read})",
                f"LayerNormalization <axis = -1> ({read}, b, b)", f"Add ({read}, b)", f"Softmax ({read})",
                f"Transpose <perm = [0, 2, 1]> ({read})", f"Sigmoid ({read})",
            ]))  # fmt: skip
            values.append(f"v{number}")
        size = "float[2, 16, 16]"
        text = f"g ({size} x) => ({size} {values[-1]}) {{ {'  '.join(nodes)} }}"
        model = parse(text, opset=20)
        model.graph.initializer.append(numpy_helper.from_array(normal(1, 16, 16) / np.float32(4), "w"))
        model.graph.initializer.append(numpy_helper.from_array(normal(2, 16), "b"))
        made = in_branch(load(model).ir)
        divided += _has_sections(made)
        feeds = {"x": normal(3, 2, 16, 16)}
        want, got = (run_stock(each, feeds, "ORT_ENABLE_ALL") for each in (model, _proto(made)))
        assert same(got[values[-1]], want[values[-1]]), f"seed {seed}"
    assert divided >= 16


def test_a_model_that_rounds_otherwise_in_sections_is_written_without(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[bool]()

    def compared(_: Any, *processes: Any) -> tuple[Pairs | None, str]:
        for process in processes[:2]:
            process.round(1)
        tried.append(True)
        return (None, search.DIFFER) if len(tried) == 1 else (Pairs(1.08, 1, [1.0]), "")

    def forms(model: ir.Model, **_: Any) -> Iterator[list[ir.Model]]:
        yield [in_branch(model, divided=divided) for divided in (True, False)]

    monkeypatch.setattr(search._Contest, "_compared", compared)
    monkeypatch.setattr(search, "forms_in_branch", forms)
    monkeypatch.setattr(search, "WORTH_PIECE", 0.0)
    made = memonger.shrink(_transformer(), max_overhead=10.0)
    assert len(tried) == 2
    assert not _has_sections(made.model)
    assert made.notes[0].startswith(f"one that was expected to take less isn't taken: {search.DIFFER}")
    assert _has_sections(memonger.shrink(_transformer(), max_overhead=10.0).model)


def test_what_takes_more_than_was_expected_is_tried_without_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece that is asked for first, and isn't the region that all lies in."""
    forms = list[ir.Model]()

    def asks_for_all(model: ir.Model, size: int) -> ir.Model:
        forms.append(with_first_piece(model, 4 * size))
        return forms[-1]

    monkeypatch.setattr(search, "NOISE", 100.0)
    monkeypatch.setattr(search, "WORTH_PIECE", 1.0)
    monkeypatch.setattr(search, "with_first_piece", asks_for_all)
    made = memonger.shrink(_image(2, 128), max_overhead=10.0)
    assert forms
    if process_memory.is_measurable():
        assert made.model not in forms
        assert made.after.expected is not None
        assert made.after.run_bytes == pytest.approx(made.after.expected.run_bytes, rel=0.1)


def test_a_batch_that_was_given_is_told_where_that_takes_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an upsampling makes of an open batch has a size of no name, and no sum is written into its memory."""
    monkeypatch.setattr(search, "in_rows", lambda *_: [])
    monkeypatch.setattr(search, "NOISE", 100.0)
    monkeypatch.setattr(search, "WORTH_PIECE", 0.0)
    monkeypatch.setattr(search, "forms_in_branch", lambda model, **_: iter([[in_branch(model)]]))
    monkeypatch.setattr(search, "add_sizes", lambda *_: None)
    body = """
        a = Conv <pads = [1, 1, 1, 1]> (x, w0)  b = MaxPool <kernel_shape = [4, 4], strides = [4, 4]> (a)
        u = Resize <mode = "nearest"> (b, , times)  v = Conv <pads = [1, 1, 1, 1]> (a, w1)  s = Add (v, u)
        y = GlobalAveragePool (s)
    """
    model = parse(f"g (float[n, 3, 256, 256] x) => (float[n, 32, 1, 1] y) {{ {body} }}", opset=20)
    weights = {"w0": normal(0, 32, 3, 3, 3), "w1": normal(1, 32, 32, 3, 3), "times": np.array([1, 1, 4, 4], np.float32)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    made = [memonger.shrink(model, batch=batch, max_overhead=10.0) for batch in (None, 1)]
    assert not any(each.loops for each in made)
    sizes = [each.model.graph.inputs[0].shape[0] for each in made]  # type: ignore[index]
    assert sizes[1] == 1
    assert isinstance(sizes[0], ir.SymbolicDim)
    taken = [each.after.expected.run_bytes for each in made if each.after.expected is not None]
    assert taken[1] < taken[0]


HEADS = """
    a = Conv <pads = [1, 1, 1, 1]> (x, w0)  b = Sigmoid (a)  c = Mul (a, b)
    p = MaxPool <kernel_shape = [4, 4], strides = [4, 4]> (c)  d = Conv (p, w1)  e = Sigmoid (d)  f = Mul (d, e)
    g = Conv (f, w2)
    u = Resize <mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"> (g, , times)
    k = Conv (u, w3)  s = Relu (k)  y = GlobalAveragePool (s)
"""
"""Large images, many channels of small ones, and large images again."""


def test_what_has_no_name_waits_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = parse(f"g (float[1, 3, 256, 256] x) => (float[1, 32, 1, 1] y) {{ {HEADS} }}", opset=13)
    weights = {
        "w0": normal(0, 32, 3, 3, 3), "w1": normal(1, 1024, 32, 1, 1), "w2": normal(2, 32, 1024, 1, 1),
        "w3": normal(3, 32, 32, 1, 1), "times": np.array([1, 1, 4, 4], np.float32),
    }  # fmt: skip
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    feeds, shapes = {"x": normal(4, 1, 3, 256, 256)}, {"x": (1, 3, 256, 256)}
    loaded = load(model).ir
    forecast = search._Forecast([Candidate(0, 0, lambda: loaded, (), forms=forms_in_branch)], shapes, 1, False)
    forms = [model for model, _ in forecast._forms(forecast.left[0])]
    want = run_stock(model, feeds, "ORT_ENABLE_ALL")
    taken = list[int]()
    for made in forms:
        proto = ir.serde.serialize_model(made)
        got = run_stock(proto, feeds, "ORT_ENABLE_ALL")
        assert all(same(got[name], want[name]) for name in want)
        known = expected(made, shapes, 1)
        assert known is not None
        taken.append(known.without_arena)
        if process_memory.is_measurable():
            assert _taken(made, feeds, tmp_path) == pytest.approx(known.run_bytes, rel=0.1)
    assert min(taken) < 0.8 * taken[0]

    def rounds_otherwise(*args: Any, **options: Any) -> Expected | None:
        known = expected(*args, **options)
        taken.append(0)
        return known and replace(known, sums=len(taken))

    monkeypatch.setattr(search, "expected", rounds_otherwise)
    assert len([*forecast._forms(forecast.left[0])]) == 1


@pytest.mark.parametrize(("ratio", "timed"), [(1.15, 2), (1.5, 1)])
def test_a_second_form_is_timed_where_the_first_is_nearly_fast_enough(
    ratio: float, timed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = list[bool]()

    def compared(*_: Any) -> tuple[Pairs | None, str]:
        tried.append(True)
        return Pairs(1.08, 1, [ratio]), f"a run takes {ratio} of the time"

    monkeypatch.setattr(search._Contest, "_compared", compared)
    monkeypatch.setattr(search, "TRIED", 1)
    monkeypatch.setattr(search, "UNEXPECTED", 1e9)
    monkeypatch.setattr(search, "WORTH_PIECE", 0.0)
    with pytest.raises(memonger.PlanError, match=f"a run takes {ratio} of the time"):
        memonger.shrink(_transformer(), max_overhead=0.05)
    assert len(tried) == timed
