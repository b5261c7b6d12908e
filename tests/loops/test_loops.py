"""Models in loops give what they gave, in less memory, in stock onnxruntime with its default options."""

import contextlib
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import click.testing
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from onnx import inliner, numpy_helper

pytest.importorskip("onnxruntime")

import memonger
from memonger.cli.commands import main
from memonger.errors import PlanError
from memonger.ir.save import save_model
from memonger.ir.values import graphs
from memonger.loops import search
from memonger.loops.branch import can_be_in_branch, in_branch
from memonger.loops.targets import RUNTIMES
from memonger.loops.writer import NotInLoopsError, settle_scales, with_loops
from memonger.lowering.as_stock import expected
from memonger.model.load import load
from memonger.runtime import process_memory
from memonger.runtime.onnxruntime import onnxruntime
from memonger.runtime.pairs import Pairs
from memonger.tiling.axes import Axes, axes_of, with_repeated
from memonger.tiling.cutting import Slicing
from memonger.tiling.slices import Band, SliceStage
from memonger.tiling.writer import SliceWriter
from tests.support.stock import normal, optimized_operators, parse, run_stock, same


def _network(batch: int | str = 8, channels: int = 8, side: int = 12) -> onnx.ModelProto:
    """Convolutions with a residual connection, a pool, shapes that are told, and a classifier."""
    model = parse(
        f"""g (float[{batch}, 3, {side}, {side}] x) => (float[{batch}, 5] y,
        float[{batch}, {channels}, {side}, {side}] z)
        <int64[2] told = {{0, -1}}> {{
            a = Conv <pads = [1, 1, 1, 1]> (x, w0, b0)  b = Relu (a)  c = Conv <pads = [1, 1, 1, 1]> (b, w1, b0)
            z = Add (c, b)  p = GlobalAveragePool (z)  f = Reshape (p, told)
            shared = Identity (w2)  y = Gemm (f, shared)
        }}""",
        opset=17,
    )
    constants = {
        "w0": normal(0, channels, 3, 3, 3), "w1": normal(1, channels, channels, 3, 3), "b0": normal(2, channels),
        "w2": normal(3, channels, 5),
    }  # fmt: skip
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    return model


TOKENS = """g (float[BATCH, 12, 8] x) => (float[BATCH, 12, 8] y) {
    m = MatMul (x, w)  n = LayerNormalization <axis = -1> (m, s)  e = Relu (n)  o = MatMul (e, w)  y = Add (o, x)
}"""


def _tokens(batch: int = 1) -> onnx.ModelProto:
    model = parse(TOKENS.replace("BATCH", str(batch)), opset=17)
    constants = {"w": normal(4, 8, 8), "s": normal(5, 8)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    return model


def _one_row() -> onnx.ModelProto:
    """No image: nothing of a batch of one can be cut."""
    model = parse("g (float[n, 8] x) => (float[n, 8] y) { m = MatMul (x, w)  y = Softmax (m) }", opset=17)
    model.graph.initializer.append(numpy_helper.from_array(normal(4, 8, 8), "w"))
    return model


def _axes(model: onnx.ModelProto, axis: int) -> tuple[ir.Model, Axes]:
    loaded = load(model).ir
    return loaded, axes_of(loaded, {"x": axis})


def _band(axes: Axes, *stages: tuple[int, int, int]) -> Band:
    bounds = {count: tuple(axes.size * n // count for n in range(count + 1)) for _, _, count in stages}
    return Band(tuple(SliceStage(begin, end, bounds[count]) for begin, end, count in stages))


def _check(model: onnx.ModelProto, made: ir.Model) -> None:
    proto = ir.serde.serialize_model(made)
    onnx.checker.check_model(proto, full_check=True)
    assert [v.name for v in proto.graph.input] == [v.name for v in model.graph.input]
    assert [v.name for v in proto.graph.output] == [v.name for v in model.graph.output]
    feeds = {"x": normal(7, *(d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim))}
    for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"):
        want, got = run_stock(model, feeds, level), run_stock(proto, feeds, level)
        for name in want:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-5)


@settings(max_examples=25, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(data=st.data())
def test_any_stages_in_loops_give_what_the_whole_gives(data: st.DataObject) -> None:
    """Also where slices aren't stretches: those of the tokens of several texts."""
    model, axis = data.draw(st.sampled_from([(_network(), 0), (_tokens(), 1), (_tokens(3), 1)]))
    loaded, axes = _axes(model, axis)
    cut = [step for step, how in enumerate(axes.nodes) if isinstance(how, Slicing)]
    begin, end = cut[0], cut[-1] + 1
    counts = [n for n in range(2, axes.size + 1) if axes.size % n == 0]
    chain = sorted(data.draw(st.sets(st.sampled_from(counts), min_size=1, max_size=3)), reverse=True)
    chain = [n for before, n in itertools.pairwise([0, *chain]) if before % n == 0]
    places = sorted(data.draw(st.sets(st.integers(begin + 1, end), min_size=len(chain), max_size=len(chain))))
    stages = zip([begin, *places], places, chain, strict=False)
    made = with_loops(loaded, axes, [_band(axes, *stages)])
    depth = {node.op_type for node in made.graph}
    assert "Scan" in depth
    _check(model, made)


def test_constants_stand_in_the_body_that_reads_them_and_no_longer_outside() -> None:
    loaded, axes = _axes(_network(), 0)
    made = with_loops(loaded, axes, [_band(axes, (0, len(axes.nodes), 8))])
    (scan,) = (node for node in made.graph if node.op_type == "Scan")
    body = scan.attributes["body"].as_graph()
    assert {"w0", "w1", "w2", "b0"} <= body.initializers.keys()
    assert all(value.dtype == ir.DataType.INT64 for value in made.graph.initializers.values())
    assert [node.op_type for node in made.graph] == ["Reshape", "Scan"], "results are what the loop stacks"


@pytest.mark.parametrize("stages", [[(0, 9, 3)], [(0, 3, 8), (3, 9, 3)]])
def test_what_loops_cannot_run_is_refused(stages: list[tuple[int, int, int]]) -> None:
    loaded, axes = _axes(_network(), 0)
    with pytest.raises(NotInLoopsError, match=r"one size|don't lie in"):
        with_loops(loaded, axes, [_band(axes, *stages)])


def test_an_old_operator_set_is_refused() -> None:
    loaded, axes = _axes(_network(), 0)
    loaded.graph.opset_imports[""] = 8
    with pytest.raises(NotInLoopsError, match="operator set 9 or newer, and the model has 8"):
        with_loops(loaded, axes, [_band(axes, (0, len(axes.nodes), 8))])


@pytest.mark.parametrize("end", [0, 5])
def test_an_open_dimension_stays_open(end: int) -> None:
    model = _network("n")
    loaded = load(model, batch=8).ir
    axes = axes_of(loaded, {"x": 0})
    made = with_loops(loaded, axes, [_band(axes, (0, end or len(axes.nodes), 8))], "n")
    proto = ir.serde.serialize_model(made)
    onnx.checker.check_model(proto, full_check=True)
    assert [v.type.tensor_type.shape.dim[0].dim_param for v in (*proto.graph.input, *proto.graph.output)] == ["n"] * 3
    for size in (1, 3, 8, 11):
        feeds = {"x": normal(size, size, 3, 12, 12)}
        want, got = (run_stock(each, feeds, "ORT_ENABLE_ALL") for each in (model, proto))
        assert all(same(got[name], want[name]) for name in want)
    with pytest.raises(NotInLoopsError, match="one loop, of slices of one"):
        with_loops(loaded, axes, [_band(axes, (0, len(axes.nodes), 4))], "n")


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long runs take decides nothing: the machine may be busy."""
    monkeypatch.setattr(search, "NOISE", 100.0)
    monkeypatch.setattr(search, "TURNS", (1, 1))
    monkeypatch.setattr(search, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(search, "TRIED", 3)


@pytest.fixture
def large(tmp_path: Path, _quick: None) -> Path:
    """A model whose values take megabytes, and its results little."""
    model = _network("n", 16, 64)
    del model.graph.output[1]
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(reversed(nodes))  # onnxruntime takes them in any order
    onnx.save(model, tmp_path / "large.onnx")
    return tmp_path / "large.onnx"


def _session(path: Path) -> Any:
    return onnxruntime().InferenceSession(path, providers=["CPUExecutionProvider"])


def test_a_model_shrinks(large: Path) -> None:
    made = memonger.shrink(large, batch=16)
    made.save(large.with_name("small.onnx"))
    feeds = {"x": normal(0, 16, 3, 64, 64)}
    want, got = (_session(large.with_name(n)).run(None, feeds) for n in ("large.onnx", "small.onnx"))
    assert all(same(a, b) for a, b in zip(got, want, strict=True))
    if process_memory.is_measurable():
        assert made.after.run_bytes < 0.75 * made.before.run_bytes  # type: ignore[operator]
        for one in (made.before, made.after):
            assert one.expected is not None
            assert one.expected.run_bytes == pytest.approx(one.run_bytes, rel=0.15)
    assert max(loop.slices for loop in made.loops) > 1
    assert {name.suffix for name in large.parent.glob("small*")} == {".onnx", ".data"}
    made.save(large.with_name("inside.onnx"), weights="inside")
    inside = _session(large.with_name("inside.onnx")).run(None, feeds)
    assert all(same(a, b) for a, b in zip(inside, want, strict=True))
    assert len(list(large.parent.glob("inside*"))) == 1


def test_the_command_says_what_was_gained_or_writes_nothing(large: Path) -> None:
    small = large.with_name("small.onnx")
    onnx.save(_one_row(), large.with_name("row.onnx"))
    done = click.testing.CliRunner().invoke(main, ["shrink", str(large.with_name("row.onnx")), "-o", str(small)])
    assert done.exit_code == 1
    assert "its batch is one; give it the size that it is to run with (--batch 16)" in done.stderr
    assert not small.exists()
    call = ["shrink", str(large), "-o", str(small), "--quiet"]
    done = click.testing.CliRunner().invoke(main, [*call, "--dim", "n=1:8", "--json", "--max-overhead", "10"])
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["loops"][0]["slices"] == 8
    assert record["after"]["seconds"] > 0
    assert onnx.load(small).graph.input[0].type.tensor_type.shape.dim[0].dim_param == "n"


def test_a_smaller_file_beside_the_data_of_the_model_has_weights_of_its_own(large: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    data = {"save_as_external_data": True, "location": "model.onnx.data", "size_threshold": 0}
    onnx.save(onnx.load(large), there / "model.onnx", **data)
    made = memonger.shrink(there / "model.onnx", batch=8, check=False, max_overhead=10.0)
    made.save(there / "smaller.onnx")
    (there / "model.onnx.data").unlink()
    shutil.move(there, tmp_path / "elsewhere")
    (beside,) = (tmp_path / "elsewhere").glob("smaller.onnx.*.data")
    assert beside.stat().st_size > 0
    x = {"x": normal(0, 8, 3, 64, 64)}
    results = (_session(file).run(None, x) for file in (large, beside.parent / "smaller.onnx"))
    for right, found in zip(*results, strict=True):  # bits weren't checked
        np.testing.assert_allclose(found, right, rtol=1e-3, atol=1e-3)


def test_a_file_that_refers_to_data_of_others_leaves_none_of_its_own(large: Path, tmp_path: Path) -> None:
    data = {"save_as_external_data": True, "location": "large.onnx.data", "size_threshold": 0}
    onnx.save(onnx.load(large), large, **data)
    save_model(ir.load(large), tmp_path / "copy.onnx", limit=0)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["copy.onnx", "large.onnx", "large.onnx.data"]


def test_nothing_is_run_without_the_check(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "MeasuredSession", None)
    made = memonger.shrink(large, batch=8, check=False, max_overhead=10.0)
    assert (made.before.run_bytes, made.after.run_bytes) == (None, None)
    assert made.before.expected is not None
    assert made.after.expected is not None
    assert made.after.expected.run_bytes < made.before.expected.run_bytes
    assert made.after.expected.without_arena < made.before.expected.without_arena
    assert "nothing was run" in made.notes[0]


def test_what_gains_nothing_is_refused_with_the_reason(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match="one dimension may stay open, and n and m are to"):
        memonger.shrink(large, dims={"n": (1, 8), "m": (1, 8)})
    monkeypatch.setattr(search, "NOISE", -2.0)
    monkeypatch.setattr(search, "TRIED", 1)
    monkeypatch.setattr(search, "TURNS", (5, 5))
    with pytest.raises(
        PlanError, match=r"gains nothing in loops: of \d that were tried, .*a run takes \d+\.\d\d of the time"
    ):
        memonger.shrink(large, batch=8)
    no_batch = parse("g (float[8, 4] x) => (float[8, 4] y) { y = Softmax <axis = 0> (x) }")
    with pytest.raises(PlanError, match=r"can't run in loops|gains nothing in loops"):
        memonger.shrink(no_batch)


def test_what_was_too_slow_is_said_of_what_is_taken_in_its_place(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine loops seem slower than they are: half of the memory is taken where a twentieth could be."""
    found = iter([(Pairs(1.08, 1, [1.4]), "a run takes 1.40 of the time"), (Pairs(1.08, 1, [1.02]), "")])

    def compared(_: Any, *processes: Any) -> tuple[Pairs, str]:
        for process in processes[:2]:
            process.round(1)
        return next(found)

    monkeypatch.setattr(search._Contest, "_compared", compared)
    made = memonger.shrink(large, batch=8)
    (note,) = made.notes
    assert made.time_ratio == 1.02
    assert note.startswith("one that was expected to take less isn't taken: a run takes 1.40 of the time. ")
    assert "max_overhead=0.05" in note


@pytest.mark.parametrize("target", ["web", "mobile", "openvino", "tensorrt"])
def test_a_target_gets_a_form_that_it_takes(target: Any, large: Path) -> None:
    made = memonger.shrink(large, batch=8, check=False, max_overhead=10.0, target=target)
    made.save(large.with_name("small.onnx"))
    inside = target in ("web", "mobile")
    assert len(list(large.parent.glob("small*"))) == (1 if inside else 2)
    bodies = [node for graph in graphs(made.model) for node in graph if node.op_type == "Scan"]
    assert len(bodies) == 1 or target != "openvino"
    assert any(note.startswith(RUNTIMES[target].name) for note in made.notes)
    if inside:
        with pytest.raises(PlanError, match=r"needs weights inside \(weights='inside'\): "):
            made.save(large.with_name("other.onnx"), weights="beside")


def test_what_a_target_cannot_run_is_refused() -> None:
    loaded, axes = _axes(_network(), 0)
    nested = with_loops(loaded, axes, [_band(axes, (0, 3, 8), (3, len(axes.nodes), 2))])
    RUNTIMES["tensorrt"].check(nested)
    with pytest.raises(PlanError, match=r"OpenVINO takes no loop in a loop, and '[^']+' is one"):
        RUNTIMES["openvino"].check(nested)
    model = parse("g (int8[8, 4] x) => (int8[8, 4] y) { a = Relu (x)  y = Identity (a) }", opset=17)
    loaded, axes = _axes(model, 0)
    whole = with_loops(loaded, axes, [_band(axes, (0, len(axes.nodes), 8))])
    with pytest.raises(PlanError, match="TensorRT takes no loop over INT8"):
        RUNTIMES["tensorrt"].check(whole)


def test_triton_gets_a_repository(large: Path) -> None:
    call = ["shrink", str(large), "--dim", "n=1:8", "--for", "triton", "--no-check", "--quiet", "--max-overhead", "10"]
    done = click.testing.CliRunner().invoke(main, [*call, "-o", str(large.with_name("small.onnx"))])
    assert done.exit_code == 1
    assert "Triton looks for a model in NAME/1: -o small/1/model.onnx" in done.stderr
    file = large.parent / "net" / "1" / "model.onnx"
    file.parent.mkdir(parents=True)
    done = click.testing.CliRunner().invoke(main, [*call, "-o", str(file)])
    assert done.exit_code == 0, done.output
    config = (large.parent / "net" / "config.pbtxt").read_text()
    for line in (
        'name: "net"',
        'backend: "onnxruntime"',
        "dims: -1",
        "dims: 64",
        'default_model_filename: "model.onnx"',
    ):
        assert line in config
    assert _session(file).get_inputs()[0].shape == ["n", 3, 64, 64]


def test_weights_of_the_same_bytes_lie_once_in_the_file(tmp_path: Path) -> None:
    model = ir.serde.deserialize_model(_tokens())
    for name, array in {"w": normal(4, 64, 64), "other": normal(4, 64, 64), "third": normal(5, 64, 64)}.items():
        value = model.graph.initializers.get(name) or ir.Value(name=name)
        value.const_value = ir.Tensor(array, name=name)
        model.graph.initializers[name] = value
    save_model(model, tmp_path / "model.onnx", limit=0)
    (file,) = tmp_path.glob("*.data")
    assert file.stat().st_size == 2 * 64 * 64 * 4
    there = {each.name: numpy_helper.to_array(each) for each in onnx.load(tmp_path / "model.onnx").graph.initializer}
    assert there["w"].tobytes() == there["other"].tobytes() == normal(4, 64, 64).tobytes()
    assert there["third"].tobytes() == normal(5, 64, 64).tobytes()


def _in_branch(model: onnx.ModelProto) -> onnx.ModelProto:
    made = ir.serde.serialize_model(in_branch(ir.serde.deserialize_model(model)))
    onnx.checker.check_model(made, full_check=True)
    return made


def test_nodes_in_a_branch_give_what_they_gave() -> None:
    """An input and a constant that are results, too, and values of other types."""
    model = parse(
        """g (float[2, 8] x, int64[3] i) => (float[2, 8] y, float[2, 8] z, int64[3] i, float[2] k, bool[2, 8] m)
        <float[2] k = {1, 2}> {
            a = Relu (x)  b = Sin (a)  c = Add (a, b)  d = Cos (c)  e = Add (c, d)  f = Sin (e)  y = Add (f, e)
            z = Identity (y)  m = Greater (y, a)
        }""",
        opset=17,
    )
    made = _in_branch(model)
    assert [[v.name for v in side] for side in (made.graph.input, made.graph.output)] == [
        [v.name for v in side] for side in (model.graph.input, model.graph.output)
    ]
    feeds = {"x": normal(3, 2, 8), "i": np.array([3, 1, 2])}
    want, got = (run_stock(each, feeds, "ORT_ENABLE_ALL") for each in (model, made))
    assert all(same(got[name], want[name]) for name in want)


@pytest.mark.skipif(not process_memory.is_measurable(), reason="the system doesn't say what a process takes")
def test_nodes_in_a_branch_take_no_second_block() -> None:
    values = [f"v{number}" for number in range(9)]
    body = " ".join(f"{b} = Sin ({a})" for a, b in itertools.pairwise(["x", *values]))
    sums = f"s = Sum ({', '.join(values)})  y = ReduceMax <keepdims = 0> (s)"
    model = parse(f"g (float[1048576] x) => (float y) {{ {body} {sums} }}", opset=17)
    feeds = {"x": normal(3, 1048576)}
    branch = _in_branch(model)
    # What other tests have left in the process, and what the system counts late, moves each of them by some MiB
    tries = [(_run_bytes(branch, feeds), _run_bytes(model, feeds)) for _ in "123"]
    assert any(after < 0.6 * before for after, before in tries), tries


def _run_bytes(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> int:
    """The most of two runs in stock onnxruntime, over the loaded model."""
    session = onnxruntime().InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return process_memory.peak_over(process_memory.settle(), lambda: [len(session.run(None, feeds)) for _ in "12"])


def test_bodies_know_that_a_transposed_constant_is_one(tmp_path: Path) -> None:
    """It lies in the file as it is read, and nodes in bodies and branches read it from there."""
    model = parse("g (float[8, 4] x) => (float[8, 6] y) { t = Transpose <perm = [1, 0]> (w)  y = MatMul (x, t) }")
    model.graph.initializer.append(numpy_helper.from_array(normal(4, 6, 4), "w"))
    loaded, axes = _axes(model, 0)
    for made in (with_loops(loaded, axes, [_band(axes, (0, len(axes.nodes), 8))]), in_branch(loaded)):
        inner = [graph for graph in graphs(made) if any(node.op_type == "MatMul" for node in graph)]
        ((weight,),) = [
            [value for value in graph.initializers.values() if len(value.shape or ()) == 2] for graph in inner
        ]
        assert not any(node.op_type == "Transpose" for graph in graphs(made) for node in graph)
        assert weight.const_value is not None
        np.testing.assert_array_equal(weight.const_value.numpy(), normal(4, 6, 4).T)
        _check(model, made)


def test_loops_in_a_branch_give_what_they_gave() -> None:
    loaded, axes = _axes(_network(), 0)
    made = with_loops(loaded, axes, [_band(axes, (0, 3, 8), (3, len(axes.nodes), 2))])
    _check(_network(), in_branch(made))
    nodes = [node.op_type for node in in_branch(made).graph]
    assert nodes == ["SequenceEmpty", "SequenceLength", "Equal", "If"]


def test_only_loops_of_onnx_are_given_the_sequence() -> None:
    """A function may be called Scan; a loop may say in which direction it stacks; an input may be an output."""
    text = """<ir_version: 8, opset_import: ["": 17, "own": 1]>
    g (float[2, 4] x) => (float[2, 4] y, float[2, 4] x) { a = own.Scan (x)  t = Transpose (s)  y = Exp (a) }
    <domain: "own", opset_import: ["": 17]> Scan (a) => (b) { b = Scan <num_scan_inputs = 1, body = h (float[4] i)
        => (float[4] o) { o = Sin (i) }, scan_output_directions = [1], scan_output_axes = [0]> (a) }"""
    model = onnx.parser.parse_model(text)
    strings = onnx.helper.make_tensor("s", onnx.TensorProto.STRING, [1, 2], [b"a", b"b"])
    model.graph.initializer.append(strings)
    inlined = inliner.inline_local_functions(model)
    feeds = {"x": normal(3, 2, 4)}
    for each in (model, inlined):
        made = ir.serde.serialize_model(in_branch(ir.serde.deserialize_model(each)))
        want, got = (run_stock(one, feeds, "ORT_ENABLE_ALL") for one in (each, made))
        assert all(same(got[name], want[name]) for name in want)


def test_a_planned_file_is_not_shrunk(tmp_path: Path) -> None:
    memonger.search_plan(_network(), device="none", mode="inference").save(tmp_path / "planned.onnx")
    with pytest.raises(memonger.PlanError, match="is planned: shrink the model that it was planned from"):
        memonger.shrink(tmp_path / "planned.onnx")


def test_what_a_branch_takes() -> None:
    brief = parse("g (float[2] x) => (bfloat16[2] y) { y = Cast <to = 16> (x) }", opset=17)
    assert not can_be_in_branch(ir.serde.deserialize_model(brief))
    assert can_be_in_branch(load(_network()).ir)
    old = load(_network()).ir
    old.graph.opset_imports[""] = 10
    assert not can_be_in_branch(old)
    listed = parse("g (seq(float[2]) x) => (float[2] y) <int64 n = {0}> { y = SequenceAt (x, n) }", opset=17)
    assert not can_be_in_branch(ir.serde.deserialize_model(listed))


OPEN = """g (float[n, 12, 8] x) => (float[n, 12, 8] y) {
    m = MatMul (x, w)  a = Add (m, b)  e = Gelu (a)  t = Reshape (e, told)  o = MatMul (t, w)  s = Add (o, b)
    y = Add (s, x)
}"""


def test_sizes_that_are_open_stay_unknown_to_the_runtime(tmp_path: Path) -> None:
    """Of a batch whose size it knows it makes other nodes, which round otherwise; in an open one it keeps them."""
    model = parse(OPEN, opset=20)
    constants = {"w": normal(4, 8, 8), "b": normal(5, 8), "told": np.array([-1, 12, 8])}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    loaded = load(model, batch=16).ir
    axes = axes_of(loaded, {"x": 0})
    made = in_branch(with_loops(loaded, axes, [_band(axes, (0, len(axes.nodes), 4))]), "open")
    proto = ir.serde.serialize_model(made)
    onnx.checker.check_model(proto, full_check=True)
    feeds = {"x": normal(7, 16, 12, 8)}
    want, got = (run_stock(each, feeds, "ORT_ENABLE_ALL") for each in (model, proto))
    assert same(got["y"], want["y"])
    assert "Gemm" not in optimized_operators(proto, tmp_path)
    assert "Gemm" in optimized_operators(ir.serde.serialize_model(in_branch(loaded)), tmp_path)
    takes = expected(made, {"x": (16, 12, 8)}, 1)
    assert takes is not None
    assert takes.run_bytes > 0


def test_sizes_that_differ_have_different_names() -> None:
    """onnxruntime writes a value over another of the same names: where heads are merged with the batch, two sizes."""
    model = parse(
        """g (float[N, 6, 8] x) => (float[N, 6, 8] y)
        <int64[3] heads = {-1, 6, 4}, int64[3] turned = {-1, 4, 6}, int64[3] back = {-1, 6, 8}> {
            a = Reshape (x, back)  t = Transpose <perm = [0, 2, 1]> (a)  b = Reshape (t, back)  r = Relu (b)
            h = Reshape (r, heads)  u = Transpose <perm = [0, 2, 1]> (h)  k = Reshape (u, turned)
            v = Transpose <perm = [0, 2, 1]> (k)  y = Reshape (v, back)
        }""",
        opset=17,
    )
    loaded = load(model, batch=1).ir
    sizes_of = {str(v.name): [int(dim) for dim in v.shape or ()] for node in loaded.graph for v in node.outputs}
    made = in_branch(loaded, "open")
    named = dict[str, set[int]]()
    for value in (v for graph in graphs(made) for node in graph for v in node.outputs):
        for dim, size in zip(value.shape or (), sizes_of.get(str(value.name), ()), strict=False):
            if isinstance(dim, ir.SymbolicDim):
                named.setdefault(str(dim.value), set()).add(size)
    assert sorted(map(sorted, named.values())) == [[1], [2]]
    feeds = {"x": normal(3, 1, 6, 8)}
    want, got = (run_stock(each, feeds, "ORT_ENABLE_ALL") for each in (model, ir.serde.serialize_model(made)))
    assert same(got["y"], want["y"])


def test_products_are_scaled_behind_them(tmp_path: Path) -> None:
    """onnxruntime makes all of it one product either way, of the same number: what is scaled is read by others, too;
    sums of whole numbers and of doubles it doesn't scale."""
    model = parse(
        """g (float[2, 5, 7] x, float[2, 7, 5] z, double[3, 3] d)
        => (float[2, 5, 5] y, float[2, 5, 7] s, double[3, 3] e)
        <float third = {0.3}, float[1] three = {3}, double half = {0.3}> {
            s = Mul (third, x)  t = Div (z, three)  y = MatMul (s, t)  u = Mul (d, half)  e = MatMul (u, u)
        }""",
        opset=17,
    )
    settled = ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(model))
    writer = SliceWriter(settled)
    settle_scales(writer)
    writer.drop_unread()
    kinds = [node.op_type for node in settled.graph]
    assert sorted(kinds) == ["MatMul", "MatMul", "Mul", "Mul", "Mul"]
    assert settled.graph.outputs[0].producer().op_type == "Mul"
    made = ir.serde.serialize_model(settled)
    onnx.checker.check_model(made, full_check=True)
    feeds = {"x": normal(1, 2, 5, 7), "z": normal(2, 2, 7, 5), "d": normal(3, 3, 3).astype(np.float64)}
    want, got = (run_stock(each, feeds, "ORT_ENABLE_ALL") for each in (model, made))
    assert all(same(got[name], want[name]) for name in want)
    assert "FusedMatMul" in optimized_operators(model, tmp_path)
    assert "FusedMatMul" in optimized_operators(made, tmp_path)


MASKED = """g (float[8, 4, 6] x) => (float[8, 4, 4] y) <int64[3] sizes = {8, 4, 4}> {
    m = Expand (triangle, sizes)  w = Where (m, zero, low)  t = Transpose <perm = [0, 2, 1]> (x)
    s = MatMul (x, t)  a = Add (s, w)  y = Softmax (a)
}"""


@pytest.mark.parametrize("batch", [8, 4])
def test_a_mask_that_is_repeated_for_each_element_is_cut_with_them(batch: int) -> None:
    """Where rows of it are as many as elements, by chance: the sum still is of whole slices."""
    model = parse(MASKED.replace("8, 4", f"{batch}, 4"), opset=17)
    constants = {"triangle": np.tril(np.ones((4, 4), bool)), "zero": np.float32(0), "low": np.float32(-9)}
    model.graph.initializer.extend(numpy_helper.from_array(np.array(a), name) for name, a in constants.items())
    loaded = load(model).ir
    axes = axes_of(loaded, with_repeated(loaded, {"x": 0}))
    assert axes.values["w"] == 0
    _check(model, with_loops(loaded, axes, [_band(axes, (0, len(axes.nodes), batch))]))


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("a = Concat<axis=1>(x, x) b = Equal(a, a) c = Cast<to=1>(b) d = Exp(c)", "string"),
        ("a = Exp(x) q = QuantizeLinear<output_dtype=22>(a, s) b = DequantizeLinear(q, s) d = Sin(b)", "float"),
    ],
)
@pytest.mark.usefixtures("_quick")
def test_what_is_no_array_is_not_compared_and_stays_whole(body: str, kind: str) -> None:
    """Text, and elements of four bits: nodes that read or give them can't be compared alone on slices."""
    model = parse(
        f"""g ({kind}[n,64] x) => (float[n] y) {{ s = Constant<value=float {{0.5}}>() k = Constant<value_ints=[1]>()
        {body} e = Mul(d, d) y = ReduceSum<keepdims=0>(e, k) }}""",
        opset=21, ir_version=10,
    )  # fmt: skip
    with contextlib.suppress(memonger.PlanError):  # nothing is gained
        made = ir.serde.serialize_model(memonger.shrink(model, batch=256).model)
        feeds = {"x": normal(0, 256, 64) if kind == "float" else np.full((256, 64), "a", object)}
        want, got = (run_stock(each, feeds, "ORT_ENABLE_ALL") for each in (model, made))
        assert same(got["y"], want["y"])


def test_a_model_that_does_not_run_on_random_numbers_says_so() -> None:
    model = parse("""g (float[1,1,4,4] x, int64[4] s) => (float[] y) { a = Resize<mode="linear">(x, , , s)
        b = Exp(a) y = Sin(b) }""")  # fmt: skip
    with pytest.raises(
        memonger.PlanError,
        match=r"doesn't run the model.*where random numbers won't do \(inputs=FILE\).*\(check=False\)",
    ):
        memonger.shrink(model)
    assert memonger.shrink(model, check=False).model


def test_an_output_of_dictionaries_is_said_to_be_a_table_in_the_file() -> None:
    model = parse("""g (float[256,512] x) => (float[256,2] y) { k = Constant<value_ints=[2,510]>() a = Exp(x)
        c = Mul(a, a) s, r = Split<axis=1>(c, k) e = Sin(r) m = ReduceMean<axes=[1]>(e) b = Add(s, m)
        y = Identity(b) }""")  # fmt: skip
    zipped = onnx.helper.make_node("ZipMap", ["b"], ["y"], domain="ai.onnx.ml", classlabels_strings=["no", "yes"])
    model.graph.node[-1].CopyFrom(zipped)
    model.opset_import.add(domain="ai.onnx.ml", version=3)
    row = onnx.helper.make_map_type_proto(onnx.TensorProto.STRING, onnx.helper.make_tensor_type_proto(1, []))
    model.graph.output[0].type.CopyFrom(onnx.helper.make_sequence_type_proto(row))
    assert any(
        note.startswith("'y': a table in the file")
        for note in memonger.shrink(model, max_overhead=9, check=False).notes
    )
