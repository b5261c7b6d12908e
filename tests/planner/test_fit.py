"""`memonger.fit`: the largest size that fits a memory, and what is known of one more."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

import memonger
import models
from memonger.errors import BudgetError, LoadError, PlanError
from memonger.lowering import calibrate
from memonger.lowering.cpu_convolutions import block_size
from memonger.options import Options
from memonger.planner.interpolate import Interpolation, structure
from memonger.planner.search_plan import prepare
from memonger.report.fit import fit_lines
from memonger.runtime import process_memory
from memonger.schedule.solution import total_lower_bound
from tests.support.networks import model_of, run_stock, same_bits, stock
from tests.support.open_models import block, layers
from tests.support.planning_models import LOSS
from tests.support.stock import normal

EFFORT = 400


WHOLE: dict[str, Any] = {"mode": "inference", "device": "none", "chunks": "off"}

TRAINING = {"loss": LOSS, "optimizer": memonger.SGD(lr=0.1), "device": "none", "effort": EFFORT}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(block(), tmp_path / "block.onnx")
    return tmp_path / "block.onnx"


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch of each calibrating run."""
    found, run = list[int](), calibrate.run

    def seen(lowered: ir.Model, *others: Any) -> Any:
        found.append(lowered.graph.inputs[0].shape[0])
        return run(lowered, *others)

    monkeypatch.setattr(calibrate, "run", seen)
    return found


def _total(size: int, **options: Any) -> int:
    return memonger.search_plan(block(), batch=size, **{"device": "none", "effort": EFFORT, **options}).total_bytes


def test_the_largest_batch_and_the_proof_that_one_more_does_not_fit() -> None:
    memory = 100_000
    found = memonger.fit(block(), memory, **WHOLE, effort=EFFORT)
    assert found.fits
    assert found.total_bytes == found.plan.total_bytes <= memory
    assert found.plan.batch == found.size
    assert _total(found.size, **WHOLE, budget=memory) <= memory
    assert (found.beyond.size, found.beyond.status) == (found.size + 1, "proven")
    assert found.beyond.lower_bound_bytes > memory
    with pytest.raises(BudgetError):
        _total(found.size + 1, **WHOLE, budget=memory)


def test_a_larger_batch_fits_in_chunks(model: Path) -> None:
    options = {"mode": "inference", "device": "cpu", "threads": 1, "effort": EFFORT}
    whole, found = (memonger.fit(model, 11_000, chunks=chunks, **options) for chunks in ("off", "auto"))
    assert found.size > whole.size
    assert found.plan.chunks
    assert found.plan.batch == found.size
    assert found.total_bytes == found.plan.total_bytes <= 11_000
    assert found.beyond.size == found.size + 1
    assert found.beyond.status == "open"  # what is proven without chunks isn't with them
    assert found.beyond.lower_bound_bytes <= 11_000 < min(found.beyond.total_bytes, found.beyond.whole_bound_bytes)
    assert found.lower_bound_bytes <= found.total_bytes
    *_, in_chunks, beyond = fit_lines(found, "block")
    assert "run in chunks" in in_chunks
    assert beyond.startswith(f"batch {found.size + 1} is open: the smallest plan found takes ")
    assert "in chunks or not" in beyond
    assert "without chunks at least" in beyond
    assert whole.beyond.status == "proven"
    x = np.random.default_rng(0).standard_normal((found.size, *_shape(model)), np.float32)
    plain = memonger.Session(memonger.search_plan(model, batch=found.size, chunks="off", **options)).run({"x": x})
    for name, value in memonger.Session(found.plan).run({"x": x}).items():
        np.testing.assert_array_equal(value, plain[name])
    assert whole.bound_holds_for == ("chunks='off'",)
    assert found.bound_holds_for == ()


def _shape(model: Path) -> tuple[int, ...]:
    return tuple(dim.dim_value for dim in onnx.load(model).graph.input[0].type.tensor_type.shape.dim[1:])


@pytest.mark.parametrize("memory", [30_000, 50_001])
def test_without_recomputation_it_is_what_trying_every_size_gives(memory: int) -> None:
    found = memonger.fit(block(), memory, **WHOLE, strategy="none")
    tried = [size for size in range(1, 2 * found.size + 2) if _total(size, **WHOLE) <= memory]
    assert found.size == max(tried)
    assert not found.recomputes
    assert found.overhead == 0
    assert found.bound_holds_for == ("chunks='off'", "strategy='none'")


def test_a_bound_says_what_may_share_bytes_under_it() -> None:
    """Where less may share bytes every plan takes more: the bound is of those plans alone."""
    usual, alone = (
        memonger.fit(block(), 100_000, **WHOLE, effort=EFFORT, sharing=sharing)
        for sharing in (memonger.Sharing(), memonger.Sharing(inplace=False, windows=False))
    )
    assert alone.size < usual.size
    assert alone.bound_holds_for == ("chunks='off'", "Sharing(inplace=False)", "Sharing(windows=False)")


def test_what_the_inputs_decide_is_in_no_bound() -> None:
    request = prepare(block(), Options(mode="inference", device="none", batch=4)).request
    seen = dataclasses.replace(request, base=request.base + 5000, run_time=5000)
    workspace = tuple(100 for _ in request.graph.nodes)
    busy = dataclasses.replace(seen, graph=dataclasses.replace(seen.graph, workspace=workspace))
    assert total_lower_bound(seen) == total_lower_bound(busy) == total_lower_bound(request)
    assert total_lower_bound(seen, whole=False) == total_lower_bound(request, whole=False) <= total_lower_bound(request)
    outputs = sum(request.graph.sizes[value] for value in request.graph.outputs)
    assert total_lower_bound(request, whole=False) == request.base + outputs


def _products() -> onnx.ModelProto:
    """Eight products with a weight of 1.6 MiB each."""
    nodes = [helper.make_node("MatMul", [f"v{n}", f"w{n}"], [f"v{n + 1}"]) for n in range(8)]
    return model_of(nodes, {"v0": ["batch", 640]}, {"v8": ["batch", 640]}, **_weights(8, 640, 640))


def _widening() -> onnx.ModelProto:
    """Pairs of products, wide between them, around sums: what rows need is most of all between two weights."""
    nodes, weights = [], {}
    for n in range(3):
        weights |= {f"u{n}": normal(n, 256, 2048) / np.float32(16), f"d{n}": normal(9 + n, 2048, 256) / np.float32(45)}
        nodes.append(helper.make_node("MatMul", [f"v{n}", f"u{n}"], [f"p{n}"]))
        nodes.append(helper.make_node("Relu", [f"p{n}"], [f"r{n}"]))
        nodes.append(helper.make_node("MatMul", [f"r{n}", f"d{n}"], [f"q{n}"]))
        nodes.append(helper.make_node("Add", [f"q{n}", f"v{n}"], [f"v{n + 1}"]))
    return model_of(nodes, {"v0": ["batch", 256]}, {"v3": ["batch", 256]}, **weights)


def _convolutions() -> onnx.ModelProto:
    """Convolutions of 2.25 MiB of weights each, of images of 8 by 8."""
    nodes = [helper.make_node("Conv", [f"v{n}", f"w{n}"], [f"v{n + 1}"], pads=[1] * 4) for n in range(4)]
    image = ["batch", 256, 8, 8]
    return model_of(nodes, {"v0": image}, {"v4": image}, **_weights(4, 256, 256, 3, 3))


def _weights(count: int, *shape: int) -> dict[str, np.ndarray]:
    return {f"w{n}": normal(n, *shape) / np.float32(np.prod(shape[1:]) ** 0.5) for n in range(count)}


@pytest.mark.parametrize("chunks", ["auto", "off"])
@pytest.mark.parametrize(
    ("network", "memory"), [(_products, "6MiB"), (_widening, "9MiB"), (_convolutions, "8MiB")]
)  # fmt: skip
def test_below_the_weights_it_is_what_planning_every_size_gives(
    network: Callable[[], onnx.ModelProto], memory: str, chunks: str
) -> None:
    pytest.importorskip("onnxruntime")
    source, options = network(), {"mode": "inference", "device": "cpu", "threads": 1, "chunks": chunks}
    found = memonger.fit(source, memory, **options)
    assert found.plan is not None
    assert found.plan.window is not None
    assert found.lower_bound_bytes <= found.plan.total_bytes <= found.memory < found.plan.parameter_bytes
    assert memonger.search_plan(source, batch=found.size, budget=memory, **options).total_bytes <= found.memory
    between = found.beyond.size - found.size - 1  # aren't looked at in slices
    assert 0 <= between <= (found.size // 64 if chunks == "auto" else 0)
    assert ("Sizes between weren't looked at." in list(fit_lines(found, "test"))[-1]) == (between > 0)
    assert found.beyond.lower_bound_bytes <= found.beyond.total_bytes
    with pytest.raises(BudgetError) as refused:
        memonger.search_plan(source, batch=found.beyond.size, budget=memory, **options)
    assert refused.value.smallest == found.beyond.total_bytes
    assert (found.beyond.status == "proven") == (found.beyond.lower_bound_bytes > found.memory)


def test_training_recomputes_for_a_larger_batch() -> None:
    source, memory = layers(), "256KiB"
    plain = memonger.fit(source, memory, **{**TRAINING, "strategy": "none"})
    found = memonger.fit(source, memory, **TRAINING)
    assert found.size > plain.size
    assert found.overhead > 0
    assert found.total_bytes <= 256 * memonger.KiB
    assert found.lower_bound_bytes <= found.total_bytes
    assert found.beyond.size == found.size + 1
    assert found.beyond.total_bytes > 256 * memonger.KiB
    assert (found.beyond.status == "proven") == (found.beyond.lower_bound_bytes > 256 * memonger.KiB)
    found.plan.verify()
    again = memonger.fit(source, memory, **TRAINING)
    assert (again.size, again.plan.offsets) == (found.size, found.plan.offsets)


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_interpolated_sizes_are_those_of_the_model(mode: str) -> None:
    options = {} if mode == "inference" else {"loss": "loss"}
    source = models.build(
        "gpt", batch=None, training=mode == "training", num_layers=1, width=32, seq_len=8, vocabulary=50
    )

    def request(size: int) -> Any:
        return prepare(source, Options(mode=mode, device="none", batch=size, **options)).request

    between = Interpolation.of({size: request(size) for size in (4, 8, 16)})
    real, made = request(13), between.request(13)
    assert between.has(real.graph)
    assert structure(made.graph) == structure(real.graph)
    written = [value for writes in real.graph.writes for value in writes]
    own = [value for writes in made.graph.writes for value in writes]
    assert [made.graph.sizes[v] for v in own] == [real.graph.sizes[v] for v in written]
    assert abs(made.base - real.base) < 1000  # constants, some of them 1 / batch, are merged where they are equal


def test_lengths_that_strides_round_are_interpolated_between_sizes_that_are_rounded_alike(tmp_path: Path) -> None:
    onnx.save(_pyramid("height", 64, 4), tmp_path / "image.onnx")

    def request(height: int) -> Any:
        options = Options(mode="inference", device="none", dims={"height": height})
        return prepare(tmp_path / "image.onnx", options).request

    def sizes(request: Any) -> list[int]:
        return [request.graph.sizes[value] for writes in request.graph.writes for value in writes]

    requests, real = {height: request(height) for height in (64, 128, 192, 250, 251, 252)}, request(512)
    found = Interpolation.of(requests)
    assert found.sizes == (64, 128, 192)
    assert sizes(found.request(512)) == sizes(real)
    del requests[64]
    assert Interpolation.of(requests) is None
    few = Interpolation.of({size: requests[size] for size in (250, 251, 252)})
    assert sizes(few.request(512)) != sizes(real)
    assert Interpolation.of({size: requests[size] for size in (250, 251, 252)}, 4) is None


def test_the_largest_image_is_found_between_sizes_that_strides_round(tmp_path: Path) -> None:
    onnx.save(_pyramid("height", 64, 4), tmp_path / "image.onnx")
    options: dict[str, Any] = {"mode": "inference", "device": "none", "chunks": "off"}
    found = memonger.fit(tmp_path / "image.onnx", "2MiB", vary="height", **options)
    assert found.total_bytes <= 2 << 20
    assert (found.beyond.size, found.beyond.status) == (found.size + 1, "proven")
    assert len(found.tried) <= 6
    planned = memonger.search_plan(tmp_path / "image.onnx", dims={"height": found.size}, budget="2MiB", **options)
    assert planned.total_bytes == found.total_bytes


def test_another_dimension_may_grow_with_its_square() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]>
        scores (float[n,seq,4] x) => (float[n,seq,4] y) {
            t = Transpose<perm=[0,2,1]>(x)
            s = MatMul(x, t)
            p = Softmax(s)
            y = MatMul(p, x)
        }"""
    )
    found = memonger.fit(model, 4_000_000, "seq", **WHOLE, dims={"n": 2})
    needed = [8 * size**2 + 64 * size for size in (found.size, found.size + 1)]  # p beside y, and x
    assert needed[0] <= found.total_bytes <= 4_000_000 < needed[1]
    assert found.beyond.status == "proven"
    assert len(found.tried) <= 6


def test_a_size_that_the_model_itself_cannot_have_ends_the_search() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]>
        rest (float[seq] x, int64[1] most = {24}) => (float[seq] y, float[n] rest) {
            y = Exp(x)
            s = Shape(x)
            d = Sub(most, s)
            rest = ConstantOfShape(d)
        }"""
    )
    del model.graph.input[1]
    found = memonger.fit(model, "1MiB", "seq", **WHOLE)
    assert found.size == 24
    assert (found.beyond.size, found.beyond.status) == (25, "refused")
    assert "contradict each other" in found.beyond.reason


def test_the_error_of_a_budget_names_sizes_that_were_left_out(model: Path) -> None:
    with pytest.raises(BudgetError, match=r"The batch \('batch'\) has no size: it is 1, unless batch=N") as refused:
        memonger.search_plan(model, mode="inference", device="none", budget="2KiB", effort=EFFORT)
    assert "fit" not in str(refused.value)  # no batch is smaller


def test_the_error_of_a_training_step_says_that_its_options_go_on(model: Path) -> None:
    options = {"loss": "mean_squared_error", "optimizer": memonger.SGD(lr=0.1), "device": "none", "effort": EFFORT}
    with pytest.raises(BudgetError, match=r"memory='6KiB', device='none'\), with the other options of this plan\."):
        memonger.search_plan(model, batch=9, budget="6KiB", **options)


def test_the_error_of_a_budget_offers_it(model: Path) -> None:
    with pytest.raises(
        BudgetError,
        match=r"The largest batch that fits: memonger\.fit\('.*block\.onnx', memory='5KiB', device='none'\)",
    ):
        memonger.search_plan(model, batch=9, mode="inference", device="none", budget="5KiB", effort=EFFORT)
    with pytest.raises(
        BudgetError, match=r"memonger\.fit\(model, memory='5001B', vary='height', dims=\{'width': 2\}, device='none'\)"
    ):
        memonger.search_plan(
            _named("height,width"),
            dims={"height": 3000, "width": 2},
            mode="inference",
            device="none",
            budget=5001,
            effort=EFFORT,
        )
    with pytest.raises(BudgetError, match=r"can work\.$"):  # not where the weights alone are more: no batch fits
        memonger.search_plan(model, batch=9, mode="inference", device="none", budget=900, effort=EFFORT)


def test_a_strategy_that_takes_a_budget_has_the_memory() -> None:
    usual, asked = (
        memonger.fit(block(), 100_000, **WHOLE, effort=EFFORT, **strategy) for strategy in ({}, {"strategy": "budget"})
    )
    assert (usual.size, usual.tried) == (asked.size, asked.tried)


def test_a_budget_is_the_memory() -> None:
    of_memory, of_budget = (
        memonger.fit(block(), **WHOLE, effort=EFFORT, **room)
        for room in ({"memory": 100_000}, {"options": Options(budget=100_000)})
    )
    assert (of_budget.size, of_budget.memory, of_budget.tried) == (of_memory.size, 100_000, of_memory.tried)


def test_the_largest_batch_for_a_range_of_another_dimension() -> None:
    """It holds at the range's largest size what that size alone holds there, and the plan runs the others."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]>
        g (float[n,s] x) => (float[n,s] y) { a = Exp(x) b = Tanh(a) y = Add(a, b) }"""
    )
    asked: dict[str, Any] = {"memory": 9000, "mode": "inference", "device": "none", "chunks": "off"}
    of_range, of_size = memonger.fit(model, dims={"s": (4, 16)}, **asked), memonger.fit(model, dims={"s": 16}, **asked)
    assert (of_range.size, of_range.total_bytes) == (of_size.size, of_size.total_bytes)
    out = memonger.Session(of_range.plan).run({"x": np.zeros((of_range.size, 7), np.float32)})
    assert np.array_equal(out["y"], 1 + np.tanh(np.ones((of_range.size, 7), np.float32)))


def test_a_memory_in_which_nothing_fits() -> None:
    found = memonger.fit(block(), 2_000, **WHOLE)
    assert not found.fits
    assert (found.size, found.plan, found.total_bytes) == (0, None, None)
    assert (found.beyond.size, found.beyond.status) == (1, "proven")
    assert found.beyond.total_bytes == _total(1, mode="inference")


def test_a_device_measures_runs_and_samples(model: Path) -> None:
    pytest.importorskip("onnxruntime")
    told: list[str] = []
    found = memonger.fit(
        model, "24KiB", mode="inference", device="cpu", chunks="off", frontier=3, progress=told.append, effort=EFFORT
    )
    sizes = [point.size for point in found.frontier]
    assert sizes == [found.size // 3, 2 * found.size // 3, found.size]
    assert all(point.total_bytes <= 24 * 1024 for point in found.frontier)
    assert all(p.samples_per_second == pytest.approx(p.size / p.seconds) for p in found.frontier)
    assert found.frontier[-1].total_bytes == found.total_bytes
    assert found.plan.workspace_bytes is not None
    assert told[0] == "fit: batch 1: lowering"
    out = memonger.Session(found.plan).run({"x": np.ones((found.size, 3, 8, 8), np.float32)})
    assert out["y"].shape == (found.size, 4)


def test_a_size_that_this_machine_cannot_measure_ends_the_search(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    stock = memonger.search_plan(model, batch=8, mode="inference", device="cpu", chunks="off").stock_bytes
    monkeypatch.setattr(process_memory, "room", lambda: stock)
    found = memonger.fit(model, "1GiB", mode="inference", device="cpu", chunks="off", effort=EFFORT)
    assert found.fits
    assert (found.beyond.size, found.beyond.status) == (found.size + 1, "refused")
    assert "measuring it on cpu takes a run without a plan" in found.beyond.reason
    assert max(found.tried) == found.size <= 6  # a fifth of what is available is left to others


@pytest.mark.parametrize(("chunks", "memory"), [("off", "24KiB"), ("auto", 11_000 if block_size() == 8 else 18_000)])
def test_a_size_that_would_take_long_to_measure_is_told_from_smaller_ones(
    model: Path, monkeypatch: pytest.MonkeyPatch, ran: list[int], chunks: str, memory: int | str
) -> None:
    """The plan is the one that measuring every size gives, and runs with stock's bits; nothing runs from 8 on."""
    pytest.importorskip("onnxruntime")
    options: dict[str, Any] = {
        "mode": "inference", "device": "cpu", "threads": 1, "chunks": chunks, "strategy": "none", "effort": EFFORT
    }  # fmt: skip
    measured = memonger.fit(model, memory, **options)
    monkeypatch.setattr("memonger.planner.fit._RUN_BYTES", 0)
    monkeypatch.setattr("memonger.planner.fit._RUN_SECONDS", 0.0)
    ran.clear()
    told = memonger.fit(model, memory, **options)
    assert sorted(set(ran)) == [1, 2, 4]
    assert (told.size, told.total_bytes, told.tried) == (measured.size, measured.total_bytes, measured.tried)
    assert told.plan.workspace == measured.plan.workspace
    assert "didn't run: its times and workspace follow from runs at 1, 2 and 4" in " ".join(told.plan.notes)
    assert "didn't run" not in " ".join(measured.plan.notes)
    x = np.random.default_rng(0).standard_normal((told.size, 3, 8, 8), np.float32)
    stock = memonger.Session(memonger.search_plan(model, batch=told.size, chunks="off", device="cpu")).run({"x": x})
    np.testing.assert_array_equal(memonger.Session(told.plan).run({"x": x})["y"], stock["y"])


@pytest.mark.parametrize("given", [{"batch": 16}, {"dims": {"batch": 16}}])
def test_a_batch_whose_run_takes_more_than_there_is_is_told_from_small_ones(
    model: Path, monkeypatch: pytest.MonkeyPatch, ran: list[int], given: dict[str, Any]
) -> None:
    """A model that doesn't fit is planned where it doesn't, and its plan is the one that a larger machine makes."""
    pytest.importorskip("onnxruntime")
    options: dict[str, Any] = {"mode": "inference", "device": "cpu", "threads": 1, "chunks": 4, **given}
    measured = memonger.search_plan(model, **options)
    ran.clear()
    monkeypatch.setattr(process_memory, "room", lambda: measured.total_bytes)
    told = memonger.search_plan(model, **options)
    assert sorted(set(ran)) == [1, 2, 4]
    assert (told.workspace, told.offsets, told.total_bytes) == (
        measured.workspace,
        measured.offsets,
        measured.total_bytes,
    )
    assert "batch 16 didn't run: its times and workspace follow from runs at 1, 2 and 4." in told.notes
    x = {"x": np.random.default_rng(0).standard_normal((16, 3, 8, 8), np.float32)}
    np.testing.assert_array_equal(memonger.Session(told).run(x)["y"], memonger.Session(measured).run(x)["y"])


def _pyramid(height: int | str, width: int | str, strides: int) -> onnx.ModelProto:
    """Convolutions that halve an image so often, one of its size, and a product of what is left with itself."""
    rng, node = np.random.default_rng(3), helper.make_node
    weights = {f"w{number}": rng.standard_normal((4, 4, 3, 3)).astype(np.float32) for number in range(strides + 1)}
    conv = {"pads": [1, 1, 1, 1], "kernel_shape": [3, 3]}
    nodes = [
        node("Conv", [f"x{number}", f"w{number}"], [f"x{number + 1}"], strides=[2, 2], **conv)
        for number in range(strides)
    ]
    nodes += [
        node("Conv", ["x0", f"w{strides}"], ["same"], **conv), node("Sigmoid", ["same"], ["y"]),
        node("Flatten", [f"x{strides}"], ["rows"], axis=2), node("Transpose", ["rows"], ["columns"]),
        node("MatMul", ["rows", "columns"], ["z"]),
    ]  # fmt: skip
    images = {"x0": [1, 4, height, width]}, {"y": [1, 4, height, width], "z": None}
    return model_of(nodes, *images, **weights)


@pytest.mark.parametrize("is_open", [True, False])
def test_an_image_whose_run_takes_more_than_there_is_is_told_from_small_ones(
    is_open: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: list[int]
) -> None:
    pytest.importorskip("onnxruntime")
    height, width = ("height", "width") if is_open else (300, 461)
    onnx.save(_pyramid(height, width, 3), tmp_path / "image.onnx")
    options: dict[str, Any] = {"mode": "inference", "device": "cpu", "threads": 1, "chunks": "off"}
    if is_open:
        options["dims"] = {"height": 300, "width": 461}
    measured = memonger.search_plan(tmp_path / "image.onnx", **options)
    ran.clear()
    monkeypatch.setattr(process_memory, "room", lambda: 19 << 18)  # 4.75 MiB, where values take 6.3 at once
    told = memonger.search_plan(tmp_path / "image.onnx", **options)
    names = ("height", "width") if is_open else ("x0[2]", "x0[3]")
    size = " and ".join(f"{name} {size}" for name, size in zip(names, (300, 461), strict=True))
    runs = "its times and workspace follow from runs at 108 x 77, 172 x 205 and 236 x 333"
    assert f"{size} didn't run: {runs}." in told.notes
    assert (told.workspace, told.offsets, told.total_bytes) == (
        measured.workspace,
        measured.offsets,
        measured.total_bytes,
    )
    x = {"x0": np.random.default_rng(0).standard_normal((1, 4, 300, 461), np.float32)}
    theirs = run_stock(stock(str(tmp_path / "image.onnx"), threads=1), x)
    assert same_bits(memonger.Session(told).run(x), theirs)


@pytest.mark.parametrize("height", ["height", 300])
def test_an_image_that_small_ones_do_not_tell_of_is_refused_where_it_does_not_fit(
    height: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: list[int]
) -> None:
    """All sides grow by multiples of 64: what strides of 128 in all give is rounded."""
    pytest.importorskip("onnxruntime")
    onnx.save(_pyramid(height, 461, 7), tmp_path / "image.onnx")
    options: dict[str, Any] = {"mode": "inference", "device": "cpu", "chunks": "off"}
    options |= {"dims": {"height": 300}} if height == "height" else {}
    monkeypatch.setattr(process_memory, "room", lambda: 1 << 20)
    told = r"measuring it takes a run, of about (\d+\.\d+) MiB, and this machine has 1\.00 MiB available"
    with pytest.raises(PlanError, match=told) as refused:
        memonger.search_plan(tmp_path / "image.onnx", **options)
    needed = re.search(told, str(refused.value))
    assert needed is not None
    room = int(1.1 * float(needed[1]) * 2**20)  # as it is, but not with onnxruntime's own arena
    monkeypatch.setattr(process_memory, "room", lambda: room)
    ran.clear()
    assert memonger.search_plan(tmp_path / "image.onnx", **options).spent.runs == 1


def test_ctrl_c_ends_the_search_with_what_was_found(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def progress(stage: str) -> None:
        if stage.startswith("fit: batch 4:"):
            raise KeyboardInterrupt

    found = memonger.fit(model, "24KiB", mode="inference", device="none", progress=progress)
    assert found.is_stopped
    assert (found.size, found.plan.batch, found.beyond) == (1, 1, None)
    assert "may fit, too. In slices" in list(fit_lines(found, "block"))[-1]
    with pytest.raises(KeyboardInterrupt):  # nothing was found by then
        memonger.fit(model, "1KiB", mode="inference", device="none", progress=_interrupted)


def _interrupted(stage: str) -> None:
    raise KeyboardInterrupt


def test_what_inputs_decide_varies_and_no_size_is_told_from_that() -> None:
    """Of random scores another number is kept at each size; a polynomial through these leads anywhere."""
    pytest.importorskip("onnxruntime")
    nodes = """f = Slice(boxes, zero, one, zero) row = Squeeze(f, zero) c = Greater(scores, half) i = NonZero(c)
        t = Transpose<perm=[1,0]>(i) k = Squeeze(t, one) rows = Gather(row, k) kept = Gather(scores, k)"""
    text = '<ir_version: 9, opset_import: ["": 17]> g (float[n,20,4] boxes, float[20] scores) => (rows, kept)'
    model = onnx.parser.parse_model(f"{text} {{ {nodes} }}")
    numbers = {"zero": np.array([0]), "one": np.array([1]), "half": np.array(0.5, np.float32)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(each, name) for name, each in numbers.items())
    found = memonger.fit(model, "3MiB", vary="n", mode="inference", device="cpu")
    assert found.beyond is not None
    assert found.beyond.size == found.size + 1
    assert len(found.tried) <= 6
    assert max(found.tried) == found.beyond.size


WRONG = {
    "fixed": (lambda: memonger.fit(models.build("lstm", batch=2), "1GiB"), "no dimension of its inputs is open"),
    "no such name": (lambda: memonger.fit(block(), "1GiB", "bach"), "Did you mean 'batch'"),
    "no batch": (lambda: memonger.fit(_named("height"), "1GiB"), "vary='x\\[1\\]'|'height'"),
    "given twice": (lambda: memonger.fit(block(), "1GiB", batch=4), "leave batch"),
    "a dimension given twice": (lambda: memonger.fit(_named("height"), "1GiB", "height", dims={"height": 2}), "leave"),
    "weights": (lambda: memonger.fit(block(), 900, **WHOLE), "weights alone take 1008 bytes"),
    "no size": (lambda: memonger.fit(block(), "8 apples"), "memory: '8 apples' is no size"),
    "budget": (lambda: memonger.fit(block(), "8GiB", options=Options(budget=1)), "memory is '8GiB', budget 1"),
    "frontier": (lambda: memonger.fit(block(), "8GiB", frontier=-1), "frontier must be"),
    "vary": (lambda: memonger.fit(block(), "8GiB", vary=3), "vary must be"),
}  # fmt: skip


def _named(name: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]>
        g (float[2,{name}] x) => (float[2,{name}] y) {{ y = Exp(x) }}"""
    )


@pytest.mark.parametrize("call", WRONG)
def test_wrong_calls_say_what_would_work(call: str) -> None:
    make, message = WRONG[call]
    with pytest.raises((PlanError, LoadError), match=message):
        make()
