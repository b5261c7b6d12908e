"""Plans in chunks: the same bits as stock onnxruntime, in less memory; what can't be is said."""

import threading
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import networkx as nx
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import memonger
from memonger.devices import CPU
from memonger.graph import costs, session_memory
from memonger.ir.marks import CHUNK
from memonger.lowering import calibrate
from memonger.model.load import load
from memonger.options import Options
from memonger.planner.search_plan import prepare
from memonger.runtime import onnxruntime as runtime
from memonger.runtime.partition import cut_chunks
from memonger.schedule.decide import decide
from memonger.tiling import chunk_times, chunking, slice_check, stages
from memonger.tiling.axes import axes_of
from memonger.tiling.candidates import Candidate, InSlices, ToSlice
from memonger.tiling.slice_check import SeenAlone, SliceCheck
from memonger.tiling.stages import ranges_in_order, slice_levels
from tests.support import networks
from tests.support.one_node_executor import run_poisoned
from tests.support.stock import normal

BATCH = 8


def convolutions(batch: int = BATCH) -> onnx.ModelProto:
    """Values that shrink: 16 channels of 32×32, of 16×16, and rows of 64 numbers; a sum over a shortcut."""
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["a"], name="first", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"], name="relu"),
        helper.make_node("Conv", ["b", "w1"], ["c"], name="second", pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["b", "c"], ["d"], name="sum"),
        helper.make_node("MaxPool", ["d"], ["e"], name="pool", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Conv", ["e", "w2"], ["f"], name="third", strides=[4, 4]),
        helper.make_node("Flatten", ["f"], ["g"], name="flat"),
        helper.make_node("MatMul", ["g", "w3"], ["y"], name="product"),
    ]
    weights = {
        "w0": normal(0, 16, 3, 3, 3), "w1": normal(1, 16, 16, 3, 3), "w2": normal(2, 16, 16, 1, 1),
        "w3": normal(3, 256, 10),
    }  # fmt: skip
    return networks.model_of(nodes, {"x": [batch, 3, 32, 32]}, {"y": [batch, 10]}, **weights)


def attention(rows: int = 64, width: int = 16) -> onnx.ModelProto:
    """Two layers of attention with a causal mask and a residual sum; the second one's values come late in the file."""
    nodes, weights = [], {"mask": np.triu(np.full((rows, rows), -1e9, np.float32), 1)}
    x = "x"
    for layer in "01":
        for kind in "qkv":
            weights[f"w{kind}{layer}"] = normal(ord(kind) + int(layer), width, width)
        nodes += [
            helper.make_node("MatMul", [x, f"wq{layer}"], [f"q{layer}"], name=f"query{layer}"),
            helper.make_node("MatMul", [x, f"wk{layer}"], [f"k{layer}"], name=f"key{layer}"),
            helper.make_node("Transpose", [f"k{layer}"], [f"t{layer}"], name=f"turned{layer}", perm=[0, 2, 1]),
            helper.make_node("MatMul", [f"q{layer}", f"t{layer}"], [f"s{layer}"], name=f"scores{layer}"),
            helper.make_node("Add", [f"s{layer}", "mask"], [f"m{layer}"], name=f"masked{layer}"),
            helper.make_node("Softmax", [f"m{layer}"], [f"p{layer}"], name=f"softmax{layer}"),
            helper.make_node("MatMul", [x, f"wv{layer}"], [f"v{layer}"], name=f"value{layer}"),
            helper.make_node("MatMul", [f"p{layer}", f"v{layer}"], [f"o{layer}"], name=f"mixed{layer}"),
            helper.make_node("Add", [x, f"o{layer}"], [f"x{layer}"], name=f"residual{layer}"),
        ]
        x = f"x{layer}"
    return networks.model_of(nodes, {"x": [1, rows, width]}, {x: [1, rows, width]}, **weights)


def plan(model: onnx.ModelProto, **options: Any) -> memonger.Plan:
    return memonger.search_plan(model, mode="inference", device="cpu", threads=1, **options)


def feeds_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    return {name: normal(7, *shape) for name, shape in shapes.items()}


def check_as_stock(made: memonger.Plan, model: onnx.ModelProto) -> None:
    """The same bits as stock: in a session, and node by node with dead bytes poisoned."""
    feeds = feeds_of(model)
    expected = networks.run_stock(networks.stock(model), feeds)
    assert networks.same_bits(memonger.Session(made).run(feeds), expected)
    assert networks.same_bits(run_poisoned(made, feeds), expected)


@pytest.mark.parametrize("chunks", [2, 3, 8, "auto"])
def test_a_batch_in_chunks_is_stocks_to_the_bit_in_less_memory(chunks: int | str) -> None:
    model = convolutions(32 if chunks == "auto" else BATCH)
    made, whole = plan(model, chunks=chunks, max_overhead=1e9), plan(model, chunks="off")
    share = 8 if chunks == "auto" else int(chunks)
    assert made.arena_bytes <= whole.arena_bytes * (1 / share + 0.15)
    assert {slices for band in made.chunks for slices in band.slices} <= {2, 3, 4, 8, 16, 32}
    check_as_stock(made, model)


@pytest.mark.parametrize("chunks", ["1:2", "1:5", "auto"])
def test_rows_of_attention_in_chunks(chunks: str) -> None:
    """Keys and values are read whole: what comes before them is a band of its own."""
    model = attention(1024 if chunks == "auto" else 64)
    made, whole = plan(model, chunks=chunks, max_overhead=1e9), plan(model, chunks="off", order="file")
    assert made.total_bytes < whole.total_bytes * (1 if chunks == "1:2" else 0.9)
    assert {band.axis for band in made.chunks} == {1}
    check_as_stock(made, model)


def test_keys_and_values_come_before_the_rows_that_read_them() -> None:
    model = load(attention()).ir
    names = [node.name for node in model.graph]
    order, ranges = ranges_in_order(model, axes_of(model, {"x": 1}))
    assert sorted(order) == list(range(len(names)))
    ordered = [names[step] for step in order]
    for layer in "01":
        assert ordered.index(f"value{layer}") < ordered.index(f"scores{layer}")
    parts = [ordered[begin:end] for begin, end in ranges]
    assert len(parts) == 3
    assert {"key0", "turned0", "value0"} <= set(parts[0])
    assert {"scores0", "mixed0", "key1", "value1"} <= set(parts[1])
    assert {"scores1", "mixed1"} <= set(parts[2])


@pytest.mark.parametrize("size", [2, 7, 12, 64, 1000])
def test_levels_of_slices_lie_within_each_other(size: int) -> None:
    levels = slice_levels(size)
    assert levels[0] == (0, size)
    assert all(set(coarse) < set(fine) for coarse, fine in pairwise(levels))
    for bounds in levels:
        widths = [b - a for a, b in pairwise(bounds)]
        assert sum(widths) == size
        assert max(widths) <= min(widths) + 1
    assert len(levels[-1]) - 1 <= 64


@pytest.fixture
def _sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that pack any weights again share a session."""
    monkeypatch.setattr(session_memory, "PACKED", 0)


@pytest.mark.usefixtures("_sharing")
def test_chunks_of_one_structure_share_a_session() -> None:
    made = plan(convolutions(), chunks=BATCH)
    assert "in chunks" in made._repr_html_()
    session = memonger.Session(made)
    assert len(session.engines) == len(list(cut_chunks(made).groups)) < BATCH
    check_as_stock(made, convolutions())


def test_chunks_that_pack_little_again_run_in_one_session() -> None:
    made, feeds = plan(convolutions(), chunks=BATCH), feeds_of(convolutions())
    one = memonger.Session(made)
    assert len(one.engines) == 1
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(session_memory, "PACKED", 0)
        np.testing.assert_array_equal(one.run(feeds)["y"], memonger.Session(made).run(feeds)["y"])
        assert session_memory.shares_sessions(made.model)


def test_a_budget_is_held_by_as_few_chunks_as_it_needs() -> None:
    model = convolutions()
    whole = plan(model, chunks="off")
    base = whole.total_bytes - whole.arena_bytes
    half, tenth = (plan(model, budget=base + whole.arena_bytes // share) for share in (2, 5))
    assert half.total_bytes <= base + whole.arena_bytes // 2
    assert tenth.total_bytes <= base + whole.arena_bytes // 5
    assert len(half.graph.nodes) < len(tenth.graph.nodes)
    assert not plan(model, budget=whole.total_bytes).chunks, "what fits as it is stays as it is"
    check_as_stock(tenth, model)
    model = convolutions(2)
    whole = plan(model, chunks="off")
    with pytest.raises(memonger.BudgetError) as error:
        plan(model, budget=whole.total_bytes - whole.arena_bytes + 1000, effort=400)
    assert plan(model, budget=error.value.smallest, effort=400).total_bytes <= error.value.smallest


def test_a_planned_file_with_chunks_runs_again(tmp_path: Path) -> None:
    model = convolutions()
    made = plan(model, chunks=4)
    made.save(tmp_path / "planned.onnx")
    read = memonger.Plan.load(tmp_path / "planned.onnx")
    assert read.chunks == made.chunks
    assert read.workspace == made.workspace
    check_as_stock(read, model)
    feeds = feeds_of(model)
    file = onnxruntime.InferenceSession(str(tmp_path / "planned.onnx"), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(file.run(None, feeds)[0], memonger.Session(read).run(feeds)["y"])


@pytest.mark.usefixtures("_sharing")
def test_sessions_of_chunks_take_and_give_what_others_do() -> None:
    """Tensors of onnxruntime, outputs where they lie and elsewhere, results as inputs, an arena for each thread."""
    model = convolutions()
    session, feeds = memonger.Session(plan(model, chunks=4), threads="arena"), feeds_of(model)
    expected = session.run(feeds)["y"]
    given = {"x": onnxruntime.OrtValue.ortvalue_from_numpy(feeds["x"])}
    np.testing.assert_array_equal(session.run(given)["y"], expected)
    target = np.zeros_like(expected)
    assert session.run(feeds, {"y": target})["y"] is target
    np.testing.assert_array_equal(target, expected)
    np.testing.assert_array_equal(session.run(feeds, copy=False)["y"], expected)
    inside = (
        session.arena.read(0, np.dtype(np.float32), feeds["x"].shape, copy=False)
        if (session.arena.size >= feeds["x"].nbytes)
        else feeds["x"]
    )
    inside[...] = feeds["x"]
    np.testing.assert_array_equal(session.run({"x": inside})["y"], expected)
    found: list[np.ndarray] = []
    thread = threading.Thread(target=lambda: found.append(session.run(feeds)["y"]))
    thread.start()
    thread.join()
    np.testing.assert_array_equal(found[0], expected)
    with pytest.raises(memonger.SessionError, match="input 'x' has shape"):
        session.run({"x": feeds["x"][:3]})


@pytest.mark.usefixtures("_sharing")
def test_outputs_that_nothing_computes_come_as_well() -> None:
    """Constants, and inputs that are outputs, in memory of their own: of plans with chunks as of others."""
    model = convolutions()
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.arange(3, dtype=np.float32), "labels"))
    model.graph.output.append(helper.make_tensor_value_info("labels", onnx.TensorProto.FLOAT, [3]))
    model.graph.output.append(model.graph.input[0])
    feeds = feeds_of(model)
    for chunks in (4, "off"):
        session = memonger.Session(plan(model, chunks=chunks))
        for _ in range(2):
            results = session.run(feeds)
            assert networks.same_bits(results, networks.run_stock(networks.stock(model), feeds))
            assert not np.shares_memory(results["x"], feeds["x"])
            results["labels"][...] = 7


def test_nodes_that_round_otherwise_on_slices_stay_whole() -> None:
    """Some kernels compute the last few elements of a value another way: of a small slice all."""
    nodes = [
        helper.make_node("Add", ["x", "x"], ["a"], name="twice"),
        helper.make_node("Softplus", ["a"], ["b"], name="softplus"),
        helper.make_node("Mul", ["b", "b"], ["y"], name="square"),
    ]
    model = networks.model_of(nodes, {"x": [64, 33]}, {"y": [64, 33]})
    made = plan(model, chunks=64)
    cut = {node.name.partition(".chunk")[0] for node in made.model.graph if "memonger.chunk" in node.metadata_props}
    assert "softplus" not in cut
    check_as_stock(made, model)
    allowed = plan(model, chunks=64, allow_rounding=True)
    assert any("'softplus'" in note and "last bits" in note for note in allowed.notes)
    ours = memonger.Session(allowed).run(feeds_of(model))["y"]
    np.testing.assert_allclose(ours, memonger.Session(made).run(feeds_of(model))["y"], rtol=1e-5)


def test_of_large_values_slices_are_compared_with_a_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of a node on a whole batch of thousands would take more memory than the plan and minutes: what it is
    compared with is shorter, and what was found of it is the same."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="product"),
        helper.make_node("Softplus", ["a"], ["b"], name="softplus"),
        helper.make_node("Softmax", ["b"], ["y"], name="softmax"),
    ]
    model = networks.model_of(nodes, {"x": [504, 16]}, {"y": [504, 33]}, w=normal(0, 16, 33))
    run, wholes, cut = SliceCheck._run, list[int](), list[set[str]]()

    def seen(self: SliceCheck, model: Any, node: Any, feeds: Any, memory: Any, *others: Any) -> Any:
        if memory is self._whole:
            wholes.append(len(feeds[0]))
        return run(self, model, node, feeds, memory, *others)

    monkeypatch.setattr(SliceCheck, "_run", seen)
    for most in (slice_check.MOST_BYTES, 1 << 13):
        monkeypatch.setattr(slice_check, "MOST_BYTES", most)
        made = plan(model, chunks=72, max_overhead=1e9)
        cut.append({node.name.partition(".chunk")[0] for node in made.model.graph if CHUNK in node.metadata_props})
        check_as_stock(made, model)
    count = len(wholes) // 2
    assert cut[0] == cut[1] == {"product", "softmax"}
    assert wholes[:count] == [504] * count
    assert all(length < 128 for length in wholes[count:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunks": 9}, "the axis has 8 elements, and so at most as many chunks, not 9"),
        ({"chunks": "2:4"}, "chunks must be 'auto', 'off', a number"),
        ({"chunks": 1}, "chunks must be 'auto', 'off', a number"),
        ({"chunks": True}, "chunks must be 'auto', 'off', a number"),
        ({"chunks": "1:3"}, r"can run in chunks along that axis: node '.*' \(.*Conv\) works on whole images"),
        ({"max_overhead": -1}, "max_overhead must be a fraction"),
        ({"allow_rounding": "yes"}, "allow_rounding must be True or False"),
    ],
)
def test_what_cant_be_is_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(memonger.PlanError, match=message):
        plan(convolutions(), **options)


def test_a_number_of_chunks_is_for_inference_of_a_model() -> None:
    with pytest.raises(memonger.PlanError, match="a number of chunks doesn't go with training"):
        memonger.search_plan(convolutions(), mode="training", loss="y", chunks=2)
    with pytest.raises(memonger.PlanError, match="a number of chunks doesn't go with a CUDA device"):
        memonger.search_plan(convolutions(), mode="inference", device="cuda", chunks=2)
    graph = nx.DiGraph()
    graph.add_node("a", bytes=1, cost=1)
    with pytest.raises((memonger.PlanError, TypeError), match="chunks"):
        memonger.search_plan(graph, chunks=2)  # type: ignore[call-overload]


def test_what_was_measured_of_times_changes_no_byte_of_a_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = []
    for number, unit in enumerate((1e-9, 1.0)):

        def seconds(runs: Any, _inner: Any, unit: float = unit) -> dict[str, float]:
            return {run.name: unit * (1 + place % 7) for one in runs for place, run in enumerate(one)}

        monkeypatch.setattr(calibrate, "_seconds", seconds)
        made = plan(convolutions(128), max_overhead=0.5)
        assert made.chunks
        made.save(tmp_path / f"{number}.onnx")
        files.append((tmp_path / f"{number}.onnx").read_bytes())
    assert files[0] == files[1]


def test_a_budget_gives_nothing_slower_than_no_budget_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_times, "CACHE", 1 << 18)  # the values of fine slices lie there, so they are the faster
    options = Options(mode="inference", device="cpu", threads=1, max_overhead=10.0)
    job = prepare(load(convolutions(128)), options)
    plain = decide(job.request, "none", "best")
    search = chunking.ChunkSearch(job.lowered, job.request, options, CPU, 128, plain)
    usual = search.quick()
    assert usual is not None
    faster = 0
    for part in (0.9, 0.7, 0.5, 0.3):
        room = part * plain.total_bytes
        coarse, made = search.within(room), search.at_most(room)
        assert coarse is not None
        assert made is not None
        assert max(coarse.total, made.total, usual.total) <= room
        assert made.extra == min(coarse.extra, usual.extra)
        faster += usual.extra < coarse.extra
    assert faster


def test_chunks_whose_sessions_take_more_than_they_save_are_left_out() -> None:
    """150 nodes of 2 MiB: halves would save half of it, and their copies take some 3 MiB of the process."""
    names = ["x", *(f"v{number}" for number in range(150))]
    nodes = [helper.make_node("Sigmoid", [a], [b], name=b) for a, b in pairwise(names)]
    nodes.append(helper.make_node("ReduceMax", [names[-1]], ["y"], name="y", axes=[1]))
    dims = {"x": 2 << 15, "y": 1}
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [BATCH, size]) for name, size in dims.items())
    graph = helper.make_graph(nodes, "chain", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    made, asked = plan(model, max_overhead=10.0), plan(model, chunks=2)
    assert asked.arena_bytes < 0.8 * made.arena_bytes
    assert not made.chunks
    assert made.total_bytes + made.session_bytes < asked.total_bytes + asked.session_bytes


def test_no_way_takes_less_than_what_says_that_it_need_not_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = list[Candidate]()

    def noted(*given: Any) -> Candidate:
        ways.append(Candidate(*given))
        return ways[-1]

    monkeypatch.setattr(stages, "Candidate", noted)
    monkeypatch.setattr(chunking, "NEXT_TO", 100.0)
    assert plan(convolutions(24), max_overhead=10.0).chunks
    written = [way for way in ways if "written" in vars(way)]
    assert len(written) > 3
    assert all(way.least <= way.written.with_sessions for way in written)


@pytest.mark.parametrize(
    ("room", "chosen", "written"),
    [
        (100, "coarse", {"coarse"}),  # the slow ones take much longer than what fits
        (60, "fine", {"fine"}),  # nor those that by estimate don't fit
        (35, "slow", {"slow"}),
        (10, "slow", {"slow"}),  # nothing fits: the smallest, and none that can't be smaller
    ],
)
def test_only_candidates_that_may_be_chosen_are_written(room: int, chosen: str, written: set[str]) -> None:
    made = list[str]()

    def candidate(name: str, total: int, seconds: float) -> Candidate:
        def write() -> Any:
            made.append(name)
            return SimpleNamespace(name=name, total=total, extra=seconds)

        return Candidate(total - 5, 0, seconds, write)

    along = [
        [candidate("fine", 50, 2.0), candidate("coarse", 90, 1.0)],
        [candidate("slow", 30, 9.0), candidate("slower", 80, 8.0)],
    ]
    picked: Any = chunking._cheapest(room, 1000, along)
    assert picked.name == chosen
    assert set(made) == written
    made.clear()
    assert chunking._cheapest(room, 25, along) is None  # the model takes no more as it is: none saves anything
    assert not made


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (["X86_V3", "X86_V4"], costs.WITH_AVX512),
        (["AVX2", "AVX512F", "AVX512CD"], costs.WITH_AVX512),
        (["X86_V3", "AVX2"], costs.WITHOUT_AVX512),
        (["NEON", "ASIMD"], costs.WITHOUT_AVX512),
        (None, costs.WITHOUT_AVX512),
    ],
)
def test_rates_are_the_processors(
    found: list[str] | None, expected: costs.Rates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """numpy lists what the processor has that it uses, by names that changed with its version 2.4."""
    config = {} if found is None else {"SIMD Extensions": {"baseline": ["SSE"], "found": found}}
    monkeypatch.setattr(np, "show_config", lambda mode: config)
    assert costs.rates.__wrapped__() == expected


def test_without_a_device_slices_are_chosen_by_what_operators_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = convolutions(32)
    options: dict[str, Any] = {"mode": "inference", "device": "none", "max_overhead": 1e9}
    path = tmp_path / "model.onnx"  # of which even small weights lie in another file
    onnx.save(convolutions(32), path, save_as_external_data=True, location="weights", size_threshold=0)
    whole, made = (memonger.search_plan(path, chunks=chunks, **options) for chunks in ("off", "auto"))
    assert made.chunks
    assert made.arena_bytes < whole.arena_bytes / 2
    feeds = feeds_of(model)
    assert networks.same_bits(memonger.Session(made).run(feeds), memonger.Session(whole).run(feeds))
    made.save(tmp_path / "plan.onnx")
    undone = memonger.unplan(tmp_path / "plan.onnx").ir.graph
    assert [node.op_type for node in undone] == [node.op_type for node in model.graph.node]
    for weight in model.graph.initializer:
        tensor = undone.initializers[weight.name].const_value
        assert tensor is not None
        assert np.array_equal(tensor.numpy(), onnx.numpy_helper.to_array(weight))
    assert not memonger.search_plan(model, budget=whole.total_bytes, **options).chunks
    monkeypatch.setattr(runtime, "is_available", lambda: False)
    assert not memonger.search_plan(model, **options).chunks
    with pytest.raises(memonger.PlanError, match="found out with onnxruntime, which isn't installed"):
        memonger.search_plan(model, chunks=4, **options)


def recurrent(width: int = 8) -> onnx.ModelProto:
    """What is kept is read by a product and added up; what becomes of it is read again."""
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["a"], name="first"),
        helper.make_node("MatMul", ["h", "w1"], ["b"], name="before"),
        helper.make_node("Add", ["a", "b"], ["c"], name="sum"),
        helper.make_node("Tanh", ["c"], ["next"], name="next"),
        helper.make_node("MatMul", ["next", "w1"], ["d"], name="second"),
        helper.make_node("Mul", ["d", "h"], ["y"], name="gate"),
        helper.make_node("Add", ["total", "y"], ["sums"], name="sums"),
    ]
    shape, weights = [BATCH, 16, width], {f"w{n}": normal(n, width, width) / 8 for n in range(2)}
    results = dict.fromkeys(("y", "next", "sums"), shape)
    return networks.model_of(nodes, dict.fromkeys(("x", "h", "total"), shape), results, **weights)


@pytest.mark.parametrize("width", [8, 512])
def test_a_state_goes_with_chunks(width: int, tmp_path: Path) -> None:
    """Wide products would pack their weights again: they share sessions, but where a state is kept."""
    model, state = recurrent(width), {"h": "next", "total": "sums"}
    made, stateless = plan(model, chunks=4, state=state), plan(model, chunks=4)
    assert made.chunks
    made.save(tmp_path / "plan.onnx")
    session, stock = memonger.Session(tmp_path / "plan.onnx"), networks.stock(model)
    kept = {name: np.zeros((BATCH, 16, width), np.float32) for name in state}
    for run in range(3):
        x = {"x": normal(run, BATCH, 16, width)}
        results, expected = session.run(x), networks.run_stock(stock, {**x, **kept})
        assert networks.same_bits(results, {name: expected[name] for name in results})
        kept = {old: expected[new] for old, new in state.items()}
    assert networks.same_bits(session.state_dict(), kept)
    if width > 8:
        with pytest.raises(memonger.SessionError, match=r"share sessions, which keep no state: make the plan with it"):
            memonger.Session(stateless, state=state)


def test_a_budget_is_refused_where_nodes_give_other_bits_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last round ends with nodes that no candidates were looked for without."""

    def seen(chunked: InSlices, *_: object) -> SeenAlone:
        nodes = [str(node.name) for node in chunked.lowered.model.graph]
        return SeenAlone({name: 1.0 for name in nodes if name.split(".")[0] in ("first", "second", "third")}, {})

    monkeypatch.setattr(InSlices, "seen", seen)
    monkeypatch.setattr(chunking, "ROUNDS", (1, 1))
    model = convolutions(64)
    whole = memonger.search_plan(model, device="none", mode="inference", chunks="off")
    with pytest.raises(memonger.BudgetError) as refused:
        memonger.search_plan(model, device="none", mode="inference", budget=whole.total_bytes // 2)
    assert refused.value.smallest <= whole.total_bytes


def test_elements_of_a_huge_batch_are_not_cut_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a range with which all others are compared: of 24,577 that took five minutes, and a run a millisecond."""
    counts, real = list[int](), stages.measured

    def measured(*arguments: Any) -> Any:
        counts.append(len(arguments[3]))
        return real(*arguments)

    monkeypatch.setattr(stages, "measured", measured)
    model = networks.model_of([helper.make_node("Relu", ["x"], ["y"])], {"x": ["N", 16]}, {"y": ["N", 16]})
    batch = chunking.MOST_ELEMENTS + 1
    with pytest.raises(memonger.BudgetError):
        memonger.search_plan(model, mode="inference", batch=batch, budget=batch * 16 * 4 + 64)
    assert counts
    assert max(counts) < batch


@pytest.mark.parametrize(("rows", "is_looked_at"), [(2, False), (4096, True)])
def test_rows_of_single_elements_are_looked_at_where_they_could_save_something(
    rows: int, is_looked_at: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a weight of 1 MiB, which no slice makes less."""

    class LookedAtError(Exception):
        """Planning ends there: the rest of the search takes seconds."""

    def again(job: ToSlice, outer: object) -> None:
        raise LookedAtError

    monkeypatch.setattr(ToSlice, "again", again)
    nodes = [helper.make_node("Exp", ["x"], ["a"]), helper.make_node("Exp", ["a"], ["b"])]
    nodes += [helper.make_node("Gather", ["table", "b8"], ["c"]), helper.make_node("ReduceSum", ["c", "last"], ["y"])]
    nodes.insert(2, helper.make_node("Cast", ["b"], ["b8"], to=onnx.TensorProto.INT32))
    table = np.zeros((1024, 256), np.float32)
    model = networks.model_of(nodes, {"x": [64, rows]}, {"y": [64, rows, 1]}, table=table, last=np.array([2]))
    with pytest.raises(LookedAtError) if is_looked_at else nullcontext():
        memonger.search_plan(model, mode="inference", device="none", budget=table.nbytes + 64 * rows * 9 + 8000)
