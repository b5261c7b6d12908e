"""Plans of models with open sizes have the bits of the user's file on stock onnxruntime, and are compared so."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

import memonger
from memonger import plan_file
from memonger.cli.compare import _source_note, stock_model, symbolic_sizes
from memonger.cli.noise import Load
from memonger.cli.settings import Settings
from memonger.cli.verdicts import Case, Ran, judge
from memonger.devices import CPU, Device
from memonger.lowering import calibrate, turned_weights
from memonger.runtime.measure import Measured, RunJob, _runner, read_arrays, write_arrays
from memonger.runtime.ort import SessionSettings
from tests.support.networks import model_of, run_stock, same_bits, stock

X = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)


def _late_scale(batch: int | str, channels: int = 16) -> onnx.ModelProto:
    """A convolution times a constant whose shape is computed: of fixed sizes the optimizer multiplies the weights."""
    rng, node = np.random.default_rng(1), helper.make_node
    nodes = [
        node("Shape", ["x"], ["s"]), node("Slice", ["s", "zero", "one"], ["n"]), node("Div", ["n", "n"], ["ones"]),
        node("Concat", ["ones", "channels", "ones", "ones"], ["target"], axis=0),
        node("Reshape", ["scale", "target"], ["b"]), node("Conv", ["x", "w"], ["c"]), node("Mul", ["c", "b"], ["y"]),
    ]  # fmt: skip
    return model_of(
        nodes, {"x": [batch, 3, 8, 8]}, {"y": [batch, channels, 4, 4]},
        w=rng.standard_normal((channels, 3, 5, 5)).astype(np.float32),
        scale=rng.standard_normal(channels).astype(np.float32),
        zero=np.array([0]), one=np.array([1]), channels=np.array([channels]),
    )  # fmt: skip


def test_fixing_sizes_changes_no_bits(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(_late_scale("N"), path)
    theirs, fixed = run_stock(stock(str(path)), {"x": X}), run_stock(stock(_late_scale(2)), {"x": X})
    assert not same_bits(theirs, fixed)  # or there is nothing to see here
    plan = memonger.search_plan(path, mode="inference", device="cpu", batch=2)
    assert same_bits(memonger.Session(plan).run({"x": X}), theirs)
    alone = memonger.search_plan(_late_scale(2), mode="inference", device="cpu")
    assert same_bits(memonger.Session(alone).run({"x": X}), fixed)


def test_fixing_some_sizes_beside_a_range_of_others_changes_no_bits(tmp_path: Path) -> None:
    model = _late_scale("N")
    model.graph.input.append(helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, ["M"]))
    model.graph.output.append(helper.make_tensor_value_info("negative", onnx.TensorProto.FLOAT, ["M"]))
    model.graph.node.append(helper.make_node("Neg", ["z"], ["negative"]))
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    session = memonger.Session(memonger.search_plan(path, mode="inference", device="cpu", dims={"N": 2, "M": (1, 4)}))
    for count in (1, 4):
        feed = {"x": X, "z": X[0, 0, 0, :count].copy()}
        assert same_bits(session.run(feed), run_stock(stock(str(path)), feed))


def test_where_random_inputs_give_no_numbers_the_bits_are_those_of_open_sizes(tmp_path: Path) -> None:
    """A mask is false where nobody gives it: softmax over nothing, and NaNs are the same in both forms."""
    model = _late_scale("N")
    model.graph.input.append(helper.make_tensor_value_info("mask", onnx.TensorProto.BOOL, ["N"]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([[np.nan]], np.float32), "nan"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1, 1, 1, 1]), "column"))
    model.graph.node[-1].output[0] = "k"
    model.graph.node.append(helper.make_node("Reshape", ["mask", "column"], ["kept"]))
    model.graph.node.append(helper.make_node("Where", ["kept", "k", "nan"], ["y"]))
    path, feed = tmp_path / "model.onnx", {"x": X, "mask": np.ones(2, bool)}
    onnx.save(model, path)
    plan = memonger.search_plan(path, mode="inference", device="cpu", batch=2)
    assert same_bits(memonger.Session(plan).run(feed), run_stock(stock(str(path)), feed))


@pytest.mark.parametrize(
    "operator", ["ReduceMax", "ReduceMin", "ReduceMean", "ReduceL1", "ReduceL2", "ReduceSumSquare"]
)
def test_one_number_that_is_the_same_by_chance_proves_nothing(operator: str, tmp_path: Path) -> None:
    model = _late_scale("N")
    model.graph.node[-1].output[0] = "all"
    model.graph.node.append(helper.make_node(operator, ["all"], ["y"], keepdims=0))
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    onnx.save(model, tmp_path / "model.onnx")
    plan = memonger.search_plan(tmp_path / "model.onnx", mode="inference", device="cpu", batch=2)
    assert "Mul" in {node.op_type for node in plan.model.graph}  # of fixed sizes the weights have it
    assert same_bits(memonger.Session(plan).run({"x": X}), run_stock(stock(str(tmp_path / "model.onnx")), {"x": X}))


def test_indices_that_are_all_zero_hide_no_bits(tmp_path: Path) -> None:
    """Row 0 of the table has zeros, as that of padding has: what is convolved is nothing then."""
    model, node = _late_scale("N"), helper.make_node
    model.graph.input.append(helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["N", 1, 1, 1]))
    model.graph.output.append(helper.make_tensor_value_info("t", onnx.TensorProto.FLOAT, ["N", 3, 8, 8]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0, 1], np.float32), "table"))
    (first,) = (each for each in model.graph.node if each.op_type == "Conv")
    first.input[0] = "kept"
    at = list(model.graph.node).index(first)
    for made in (node("Mul", ["x", "e"], ["kept"]), node("Gather", ["table", "ids"], ["e"])):
        model.graph.node.insert(at, made)
    model.graph.node[-1].output[0] = "signed"
    model.graph.node.extend([node("Abs", ["signed"], ["y"]), node("Tanh", ["x"], ["t"])])
    path, feed = tmp_path / "model.onnx", {"x": X, "ids": np.ones((2, 1, 1, 1), np.int64)}
    onnx.save(model, path)
    plan = memonger.search_plan(path, mode="inference", device="cpu", batch=2)
    assert same_bits(memonger.Session(plan).run(feed), run_stock(stock(str(path)), feed))


def test_sizes_behind_blocked_convolutions_are_planned_in_the_form_with_open_sizes(tmp_path: Path) -> None:
    """What is read of a convolution's shape is told by rules; the channels of blocks by the run."""
    model, node = _late_scale("N"), helper.make_node
    model.graph.node[-1].output[0] = "scaled"
    model.graph.node.extend([
        node("Softmax", ["scaled"], ["soft"], axis=2), node("Conv", ["soft", "v"], ["again"]),
        node("Shape", ["again"], ["its"]), node("Slice", ["its", "zero", "two"], ["front"]),
        node("Concat", ["front", "rest"], ["flat"], axis=0), node("Reshape", ["again", "flat"], ["rows"]),
        node("Tanh", ["rows"], ["t"]), node("ReduceMax", ["t"], ["y"], keepdims=0),
    ])  # fmt: skip
    weight = np.random.default_rng(2).standard_normal((16, 16, 1, 1)).astype(np.float32)
    for name, array in {"v": weight, "two": np.array([2]), "rest": np.array([-1])}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    plan = memonger.search_plan(path, mode="inference", device="cpu", batch=2)
    assert {"Shape", "Reshape"} <= {each.op_type for each in plan.model.graph}
    assert not plan.run_time
    assert same_bits(memonger.Session(plan).run({"x": X}), run_stock(stock(str(path)), {"x": X}))


def test_both_forms_of_a_model_run_once_each_or_twice_where_times_decide(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(_late_scale("N"), path)

    def runs(source: Path | onnx.ModelProto, **options: Any) -> int:
        plan = memonger.search_plan(source, mode="inference", device="cpu", **options)
        assert plan.spent is not None
        return plan.spent.runs

    assert runs(_late_scale(2)) == 1
    assert runs(path, batch=2) == 2
    assert runs(path, batch=2, budget="1GiB") == 4


def test_forms_that_differ_in_whole_numbers_alone_are_not_both_run(tmp_path: Path) -> None:
    """A causal mask, which is computed beforehand where sizes are fixed, rounds nothing."""
    node = helper.make_node
    nodes = [
        node("Shape", ["x"], ["s"]), node("Slice", ["s", "one", "two"], ["n"]), node("Squeeze", ["n"], ["length"]),
        node("Range", ["nought", "length", "step"], ["columns"]), node("Unsqueeze", ["columns", "one"], ["rows"]),
        node("LessOrEqual", ["columns", "rows"], ["seen"]), node("Where", ["seen", "x", "least"], ["kept"]),
        node("Softmax", ["kept"], ["y"]),
    ]  # fmt: skip
    model = model_of(
        nodes, {"x": ["N", "N"]}, {"y": ["N", "N"]}, one=np.array([1]), two=np.array([2]), nought=np.array(0),
        step=np.array(1), least=np.array(-1e9, np.float32),
    )  # fmt: skip
    path, feed = tmp_path / "model.onnx", {"x": X[0, 0]}
    onnx.save(model, path)
    plan = memonger.search_plan(path, mode="inference", device="cpu", dims={"N": 8})
    assert plan.spent is not None
    assert plan.spent.runs == 1
    assert "LessOrEqual" not in {each.op_type for each in plan.model.graph}
    assert same_bits(memonger.Session(plan).run(feed), run_stock(stock(str(path)), feed))


def test_a_form_with_the_others_weights_runs_once_before_times_are_taken(tmp_path: Path) -> None:
    """Each of three forms runs, and the last, which is planned, once more for times: `_late_scale` has other bits."""
    onnx.save(_late_scale("N", 4096), tmp_path / "model.onnx")
    plan = memonger.search_plan(tmp_path / "model.onnx", mode="inference", device="cpu", batch=2, budget="1GiB")
    assert plan.spent is not None
    assert plan.spent.runs == 4
    assert same_bits(memonger.Session(plan).run({"x": X}), run_stock(stock(str(tmp_path / "model.onnx")), {"x": X}))


@pytest.mark.parametrize(("has_devnull", "forms"), [(True, 3), (False, 2)])
def test_large_weights_are_written_once_where_both_forms_have_them(
    has_devnull: bool, forms: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight of 1.1 MiB that both have, and one that only one has: `_late_scale` computes other bits."""
    written = list[str]()

    def session(model: ir.Model, device: Device, options: SessionSettings) -> Any:
        written.append("" if options.optimized is None else options.optimized.name)
        return real(model, device, options)

    def no_link(*_: object, **__: object) -> None:
        raise OSError("no symbolic links here")

    real = calibrate.session
    monkeypatch.setattr(calibrate, "session", session)
    if not has_devnull:
        monkeypatch.setattr(Path, "symlink_to", no_link)
    path, model = tmp_path / "model.onnx", _late_scale("N", 4096)
    onnx.save(model, path)
    theirs = run_stock(stock(str(path)), {"x": X})
    plan = memonger.search_plan(path, mode="inference", device="cpu", batch=2)
    assert same_bits(memonger.Session(plan).run({"x": X}), theirs)
    assert len([name for name in written if name]) == forms
    # The weight that each form has of its own isn't the other's: it is asked for
    assert ("sizes_open_in_full.onnx" in written) == has_devnull


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_form_with_the_others_weights_is_enough_where_bits_are_the_same(
    is_transposed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fixed sizes the exponential is computed beforehand. The weight of 1.4 MiB is the same in both.

    Where the file has it transposed, it is turned before either is made.
    """
    node, rng, written = helper.make_node, np.random.default_rng(1), dict[str, list[str]]()
    nodes = [
        node("MatMul", ["x", "w"], ["p"]), node("Shape", ["x"], ["s"]), node("Expand", ["c", "s"], ["e"]),
        node("Exp", ["e"], ["b"]), node("Max", ["p", "b"], ["y"]),
    ]  # fmt: skip
    if is_transposed:
        monkeypatch.setattr(turned_weights, "MUCH", 0)
        nodes = [node("Transpose", ["w"], ["turned"]), node("MatMul", ["x", "turned"], ["p"]), *nodes[1:]]
    model = model_of(
        nodes, {"x": ["N", 600]}, {"y": ["N", 600]},
        w=rng.standard_normal((600, 600)).astype(np.float32), c=rng.standard_normal(600).astype(np.float32),
    )  # fmt: skip

    def session(model: ir.Model, device: Device, options: SessionSettings) -> Any:
        if options.optimized is not None:
            written[options.optimized.name] = [each.op_type for each in model.graph]
        return real(model, device, options)

    real = calibrate.session
    monkeypatch.setattr(calibrate, "session", session)
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=1024)
    plan = memonger.search_plan(tmp_path / "model.onnx", mode="inference", device="cpu", batch=2)
    assert list(written) == ["optimized.onnx", "sizes_open.onnx"]
    assert not any("Transpose" in nodes for nodes in written.values())
    assert plan.spent is not None
    assert plan.spent.runs == 2
    assert "Exp" not in {each.op_type for each in plan.model.graph}
    feed = {"x": rng.standard_normal((2, 600)).astype(np.float32)}
    assert same_bits(memonger.Session(plan).run(feed), run_stock(stock(str(tmp_path / "model.onnx")), feed))


def test_where_bits_stay_the_same_sizes_are_fixed_for_the_optimizer(tmp_path: Path) -> None:
    nodes = [helper.make_node("Shape", ["x"], ["s"]), helper.make_node("Reshape", ["x", "s"], ["a"]),
             helper.make_node("Tanh", ["a"], ["y"])]  # fmt: skip
    onnx.save(model_of(nodes, {"x": ["N", 4]}, {"y": ["N", 4]}), tmp_path / "model.onnx")
    plan = memonger.search_plan(tmp_path / "model.onnx", mode="inference", device="cpu", batch=2)
    assert "Shape" not in {node.op_type for node in plan.model.graph}


def test_a_planned_file_is_compared_with_what_was_planned(tmp_path: Path) -> None:
    source, planned = tmp_path / "model.onnx", tmp_path / "plans" / "planned.onnx"
    planned.parent.mkdir()
    onnx.save(_late_scale("N"), source, save_as_external_data=True, location="w.bin", size_threshold=0)
    memonger.search_plan(source, mode="inference", device="cpu", batch=2).save(planned)
    plan = memonger.Plan.load(planned)
    assert plan.source_file is not None
    assert plan.source_file.path == str(source)
    assert stock_model(planned, planned, plan, tmp_path).samefile(source)
    assert _source_note(plan, is_source=True) == ()
    for name in ("model.onnx", "w.bin"):  # to the planned file
        shutil.move(tmp_path / name, planned.parent / name)
    assert stock_model(planned, planned, plan, tmp_path).samefile(planned.parent / "model.onnx")
    with (planned.parent / "w.bin").open("r+b") as file:
        file.write(b"other")
    assert stock_model(planned, planned, plan, tmp_path) == planned
    (note,) = _source_note(plan, is_source=False)
    assert f"the model {source} isn't there, or has changed since" in note
    assert "--against MODEL" in note


def test_a_model_without_external_data_is_not_parsed_for_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was: a third of the time that saving a plan of 100,000 nodes takes."""
    path = tmp_path / "model.onnx"
    onnx.save(_late_scale("N"), path)
    before = plan_file.file_digest(path)
    monkeypatch.setattr(plan_file, "load_as_is", lambda path: pytest.fail(f"{path} is parsed"))
    assert plan_file.file_digest(path) == before
    path.write_bytes(path.read_bytes() + b"\x10\x00")
    assert plan_file.file_digest(path) not in (before, None)
    assert plan_file.file_digest(tmp_path / "none.onnx") is None


def test_a_plan_of_a_model_in_memory_says_that_its_source_is_not_known(tmp_path: Path) -> None:
    plan = memonger.search_plan(_late_scale(2), mode="inference", device="none")
    plan.save(tmp_path / "planned.onnx")
    read = memonger.Plan.load(tmp_path / "planned.onnx")
    assert read.source_file is None
    assert "that was planned isn't known" in _source_note(read, is_source=False)[0]


@pytest.mark.parametrize("is_source", [False, True])
def test_bits_that_stock_onnxruntimes_defaults_do_not_have_fail(is_source: bool, tmp_path: Path) -> None:
    plan = memonger.search_plan(_late_scale(2), mode="inference", device="cpu")
    ran = Ran(Measured(1.0, None, 1.0, (1.0,)), {"y": X})
    other = Ran(ran.measured, {"y": np.nextafter(X, np.float32(np.inf))})
    case = Case(
        plan, tmp_path, {}, CPU, Settings(), "ORT_ENABLE_ALL", Load(0.0, 1), is_source=is_source,
    )  # fmt: skip
    verdict = judge(case, {"planned": ran, "stock": ran, "default": other}, lambda _: None)
    assert verdict.passed is not is_source
    told = "Told the sizes that are planned for, its outputs are the plan's" in verdict.lines[-1]
    assert told is is_source
    as_it_comes = judge(case, {"planned": ran, "stock": other, "default": ran}, lambda _: None) if is_source else None
    assert as_it_comes is None or (as_it_comes.passed and "as it comes" in as_it_comes.lines[-1])


def test_one_name_of_two_sizes_is_none(tmp_path: Path) -> None:
    """Paddle's exporter calls every size that it doesn't know '?'."""
    nodes = [helper.make_node("Add", ["x", "z"], ["y"])]
    model = model_of(nodes, {"x": ["?", "K"], "z": ["?", "K"]}, {"y": ["?", "K"]})
    given = {"x": np.zeros((2, 3), np.float32), "z": np.zeros((1, 3), np.float32)}
    onnx.save(model, tmp_path / "model.onnx")
    assert symbolic_sizes(tmp_path / "model.onnx", given) == {"K": 3}


def test_types_that_numpy_lacks_and_scalars_are_compared(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 20]>
    g (float[2, 4] x, bfloat16[4] k) => (bfloat16[2, 4] y, float z, bfloat16[2, 2] v, float8e4m3fn[2, 4] q) {
        q = Cast<to=17>(x)
        y = Cast<to=16>(x) z = ReduceMean<keepdims=0>(x) s = Constant<value_ints=[2, 2]>() v = Reshape(k, s) }""")
    onnx.save(model, tmp_path / "model.onnx")
    narrow = ir.DataType.BFLOAT16.numpy()
    feeds = {"x": X[0, 0, :2, :4].copy(), "k": np.arange(4).astype(narrow)}
    write_arrays(tmp_path / "inputs.npz", feeds)
    read = read_arrays(tmp_path / "inputs.npz")
    assert same_bits(read, feeds)
    job = RunJob(str(tmp_path / "model.onnx"), str(tmp_path / "inputs.npz"), str(tmp_path / "out.npz"), planned=False)
    theirs = _runner(job, read)()
    ours = memonger.Session(memonger.search_plan(model, mode="inference", device="cpu")).run(feeds)
    assert (theirs["y"].dtype, theirs["z"].shape) == (narrow, ())
    assert same_bits(ours, dict(theirs))
