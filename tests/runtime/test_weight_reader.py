"""Weights that stay in a plan's file: what is in memory of them, by the system's own account, and the same bits."""

import ctypes
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import memonger
from memonger.cli import compare
from memonger.plan_file import KEY
from memonger.report.diff import diff_lines, diff_record
from memonger.runtime import disk, process_memory, weight_reader
from memonger.runtime.prepared import FileSpan, ReadSchedule, WeightRead
from models.decoder import Sizes, decoder
from tests.support.command_line import invoke
from tests.support.mapped_files import cached, resident
from tests.support.networks import model_of, stock
from tests.support.stock import normal, run_stock

MIB = 1 << 20
WIDTH, LAYERS, BUDGET = 640, 8, "6MiB"


def _model() -> onnx.ModelProto:
    """Products with a weight of 1.6 MiB each, and as many bytes beside them that an addition reads as they lie."""
    nodes, weights = [], {}
    for layer in range(LAYERS):
        weights[f"w{layer}"] = normal(layer, WIDTH, WIDTH) / np.float32(WIDTH)
        nodes.append(helper.make_node("MatMul", [f"v{layer}", f"w{layer}"], [f"p{layer}"], name=f"product{layer}"))
        weights[f"b{layer}"] = normal(layer + 50, 128, WIDTH)
        nodes.append(helper.make_node("Add", [f"p{layer}", f"b{layer}"], [f"v{layer + 1}"], name=f"sum{layer}"))
    return model_of(nodes, {"v0": [128, WIDTH]}, {f"v{LAYERS}": [128, WIDTH]}, **weights)


def _open() -> onnx.ModelProto:
    """The same products of an open batch."""
    nodes, weights = [], {}
    for layer in range(LAYERS):
        weights[f"w{layer}"] = normal(layer, WIDTH, WIDTH) / np.float32(WIDTH)
        nodes.append(helper.make_node("MatMul", [f"v{layer}", f"w{layer}"], [f"v{layer + 1}"], name=f"product{layer}"))
    return model_of(nodes, {"v0": ["batch", WIDTH]}, {f"v{LAYERS}": ["batch", WIDTH]}, **weights)


FEED = {"v0": normal(5, 128, WIDTH)}
RESULT = f"v{LAYERS}"


@pytest.fixture(scope="module")
def plan() -> memonger.Plan:
    return memonger.search_plan(_model(), device="cpu", mode="inference", budget=BUDGET)


@pytest.fixture(scope="module")
def planned(plan: memonger.Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("window") / "planned.onnx"
    plan.save(path)
    return path


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    return run_stock(_model(), FEED, "ORT_ENABLE_ALL")[RESULT]


@pytest.fixture
def own(planned: Path, tmp_path: Path) -> Path:
    """A copy of the planned file and its weights, to be spoiled."""
    for file in planned.parent.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path / planned.name


def test_a_budget_below_the_weights_is_held(plan: memonger.Plan, planned: Path, expected: np.ndarray) -> None:
    assert plan.window is not None
    assert plan.parameter_bytes >= 15 * MIB > 6 * MIB >= plan.total_bytes
    assert memonger.Plan.load(planned).total_bytes == plan.total_bytes
    kept = plan.kept_parameter_bytes
    with memonger.Session(planned) as session:
        for _ in range(3):
            assert np.array_equal(session.run(FEED)[RESULT], expected)
            # What is kept, packed in panels, and at its ends pages that others share
            assert resident(planned) <= kept * 1.05 + 4096 * 2 * LAYERS
        (reader,) = session.weight_readers
        assert not reader.why_not
        assert reader.last is not None
        assert reader.last.nbytes >= plan.parameter_bytes - kept
        assert reader.last.most_bytes > 0
        assert "memonger weights" in {thread.name for thread in threading.enumerate()}
    assert resident(planned) == 0


def test_sessions_of_one_file_run_beside_each_other(planned: Path, expected: np.ndarray) -> None:
    with memonger.Session(planned) as one:
        with memonger.Session(planned) as other:
            threads = [threading.Thread(target=lambda s=each: [s.run(FEED) for _ in range(5)]) for each in (one, other)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert np.array_equal(other.run(FEED)[RESULT], expected)
        assert np.array_equal(one.run(FEED)[RESULT], expected)


def test_the_thread_ends_with_the_session(planned: Path) -> None:
    before = threading.active_count()
    session = memonger.Session(planned)
    session.run(FEED)
    del session
    for thread in threading.enumerate():
        if thread.name == "memonger weights":
            thread.join(10)
    assert threading.active_count() <= before


def test_plans_without_need_have_no_window(planned: Path, tmp_path: Path) -> None:
    for budget in (None, "64MiB"):
        plan = memonger.search_plan(_model(), device="cpu", mode="inference", budget=budget)
        assert plan.window is None
        assert plan.resident_parameter_bytes == plan.parameter_bytes
    plan.save(tmp_path / "planned.onnx")
    with memonger.Session(tmp_path / "planned.onnx") as session:
        assert session.weight_readers == ()
    in_files = memonger.Plan.load(planned)
    names = tmp_path.name, planned.name
    record = diff_record((plan.open_model, in_files.open_model), (plan, in_files), names)
    assert in_files.window is not None
    assert record["in_files"] == {"only_in_first": [], "only_in_second": list(in_files.window.weights)}
    kept = [each.resident_parameter_bytes for each in (plan, in_files)]
    assert record["totals"]["resident_parameter_bytes"] == kept
    assert f"stay in a file only in {planned.name}: {len(in_files.window.weights)} (" in " ".join(diff_lines(record))


def test_weights_are_mapped_or_packed_where_that_is_asked_for(
    plan: memonger.Plan, expected: np.ndarray, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"device": "cpu", "mode": "inference"}
    mapped = memonger.search_plan(_model(), weights="mapped", **options)
    with pytest.raises(memonger.BudgetError) as refused:
        memonger.search_plan(_model(), budget="1MiB", **options)
    assert mapped.total_bytes == refused.value.smallest
    assert mapped.budget is None
    assert memonger.search_plan(_model(), weights="mapped", budget=BUDGET, **options).window == mapped.window
    ahead = memonger.search_plan(_model(), weights="ahead", budget=BUDGET, **options)  # as a reader does in any case
    assert (ahead.window, ahead.offsets) == (plan.window, plan.offsets)
    mapped.save(tmp_path / "planned.onnx")
    with memonger.Session(tmp_path / "planned.onnx") as session:
        assert np.array_equal(session.run(FEED)[RESULT], expected)
        assert len(session.weight_readers) == 1
    for budget in (None, "64MiB"):
        assert memonger.search_plan(_model(), weights="packed", budget=budget, **options).window is None
    with pytest.raises(memonger.BudgetError, match="With weights='auto' some of its weights may stay in a file") as no:
        memonger.search_plan(_model(), weights="packed", budget=BUDGET, **options)
    assert no.value.lower_bound > plan.parameter_bytes
    frontiers = {how: memonger.pareto(_model(), points=2, weights=how, **options) for how in ("mapped", "packed")}
    assert all(each.window is not None for each in frontiers["mapped"])
    assert all(each.window is None for each in frontiers["packed"])


def test_the_largest_batch_with_its_weights_mapped(plan: memonger.Plan) -> None:
    """In a memory that has room for all of them as well: more of it is left for values."""
    options: dict[str, Any] = {"device": "cpu", "mode": "inference", "chunks": "off"}
    usual, mapped = (memonger.fit(_open(), "16MiB", weights=how, **options) for how in ("auto", "mapped"))
    assert usual.plan is not None
    assert usual.plan.window is None
    assert mapped.plan is not None
    assert mapped.plan.window is not None
    assert mapped.size > usual.size
    with pytest.raises(memonger.PlanError, match="weights alone take"):
        memonger.fit(_open(), BUDGET, weights="packed", **options)


def test_a_plan_whose_weights_cannot_be_mapped_says_why() -> None:
    small = model_of([helper.make_node("Add", ["x", "w"], ["y"])], {"x": [4]}, {"y": [4]}, w=normal(1, 4))
    for model, device, words in (
        (_model(), "none", "can stay in a file. With device='cpu', or a CUDA device, some may."),
        (small, "cpu", "They take less than 1.00 MiB, which lies inside the file."),
    ):
        plan = memonger.search_plan(model, device=device, mode="inference", weights="mapped")
        assert plan.window is None
        assert any(note.startswith("weights='mapped': none of its weights can stay") for note in plan.notes)
        assert any(words in note for note in plan.notes)
    with pytest.raises(memonger.PlanError, match="weights must be 'auto', 'packed', 'mapped' or 'ahead', not 'maped'"):
        memonger.search_plan(small, weights="maped")  # type: ignore[arg-type]


def test_the_smallest_budget_that_is_named_works() -> None:
    with pytest.raises(memonger.BudgetError, match=r"no plan within 1\.00 MiB") as refused:
        memonger.search_plan(_model(), device="cpu", mode="inference", budget="1MiB")
    smallest = refused.value.smallest
    assert smallest < 6 * MIB
    assert refused.value.lower_bound <= smallest - WIDTH * 512 * 4  # two weights follow each other in this order
    plan = memonger.search_plan(_model(), device="cpu", mode="inference", budget=smallest)
    assert plan.total_bytes <= smallest


def _looped() -> onnx.ModelProto:
    """Products of 1.6 MiB, two of them in a Loop: with a weight of its body, and with one of the model that no other
    product reads; and sums with many small weights."""
    kind, shape = onnx.TensorProto.FLOAT, [4, WIDTH]
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["s", "inner"], ["s1"]),
            helper.make_node("MatMul", ["s1", "w0"], ["s2"]),
            helper.make_node("Identity", ["on"], ["still"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", onnx.TensorProto.INT64, []),
            helper.make_tensor_value_info("on", onnx.TensorProto.BOOL, []),
            helper.make_tensor_value_info("s", kind, shape),
        ],
        [
            helper.make_tensor_value_info("still", onnx.TensorProto.BOOL, []),
            helper.make_tensor_value_info("s2", kind, shape),
        ],
        [numpy_helper.from_array(normal(9, WIDTH, WIDTH), "inner")],
    )
    nodes = [
        helper.make_node("MatMul", ["v0", "w1"], ["v1"]),
        helper.make_node("Loop", ["count", "", "v1"], ["v2"], body=body),
        helper.make_node("MatMul", ["v2", "w2"], ["a0"]),
    ]
    nodes += [helper.make_node("Add", [f"a{n}", f"b{n}"], [f"a{n + 1}"]) for n in range(80)]
    weights = {f"w{n}": normal(n, WIDTH, WIDTH) / np.float32(WIDTH) for n in range(3)}
    weights |= {f"b{n}": normal(n, 4, WIDTH) for n in range(80)}
    return model_of(nodes, {"v0": shape}, {"a80": shape}, **weights, count=np.array(2, np.int64))


def test_a_refusal_says_why_weights_cannot_stay_in_the_file() -> None:
    with pytest.raises(memonger.BudgetError) as refused:
        memonger.search_plan(_looped(), device="cpu", mode="inference", budget="2MiB")
    assert (
        "3.12 MiB of its weights can't stay in a plan's file, as bodies (If, Loop, Scan) read them: 'w0' and 1 more"
        in (refused.value.hint)
    )
    assert (
        "800 KiB of its weights can't stay in a plan's file, as they are below 64.0 KiB each: 'b0'"
        in refused.value.hint
    )
    with pytest.raises(memonger.BudgetError) as refused:
        memonger.search_plan(_model(), device="cpu", mode="inference", budget="1MiB")
    assert not refused.value.hint


def test_what_bodies_pack_is_in_memory_of_the_process(tmp_path: Path) -> None:
    """A weight of a body, and one that only a body's product reads: no file has a packed copy of these."""
    plan = memonger.search_plan(_looped(), device="cpu", mode="inference")
    plan.save(tmp_path / "planned.onnx")
    saved = memonger.Plan.load(tmp_path / "planned.onnx")
    weight, small = 4 * WIDTH * WIDTH, 80 * 4 * 4 * WIDTH
    for one in (plan, saved):
        assert one._weights_in_process.own == pytest.approx(2 * weight, abs=64)
        assert one.mapped_bytes == pytest.approx(2 * weight + small, abs=64)


def test_a_portable_plan_is_told_what_would_leave_weights_in_the_file() -> None:
    with pytest.raises(memonger.BudgetError, match="device='cpu' weights may stay in the plan's file"):
        memonger.search_plan(_model(), device="none", mode="inference", budget=BUDGET)


def test_the_same_plan_again(plan: memonger.Plan) -> None:
    again = memonger.search_plan(_model(), device="cpu", mode="inference", budget=BUDGET)
    assert again.window == plan.window


def test_a_plan_that_is_in_no_file_is_refused(plan: memonger.Plan) -> None:
    with pytest.raises(memonger.SessionError, match="they stay in the plan's file, and this plan has none"):
        memonger.Session(plan)


def test_what_does_not_go_with_a_window(plan: memonger.Plan, planned: Path, tmp_path: Path) -> None:
    with pytest.raises(memonger.SessionError, match="one run at a time: leave out threads='arena'"):
        memonger.Session(planned, threads="arena")
    with pytest.raises(memonger.PlanFileError, match="leave weights='source' out"):
        plan.save(tmp_path / "planned.onnx", weights="source")


@pytest.mark.parametrize("size", [4096, 1])
def test_a_file_that_was_changed_is_refused_by_name(own: Path, size: int) -> None:
    (data,) = own.parent.glob("*.data")
    with memonger.Session(own) as session:
        session.run(FEED)
        os.truncate(data, data.stat().st_size - size)
        with pytest.raises(memonger.SessionError, match=rf"{data.name} was changed .* it is shorter now"):
            session.run(FEED)


def test_who_cuts_the_file_short_waits_until_the_run_is_over(own: Path) -> None:
    """By then nothing is mapped that could end the process, and the next run says what has changed."""
    (data,) = own.parent.glob("*.data")
    with memonger.Session(own) as session:
        (reader,) = session.weight_readers
        with reader.running():
            cut = subprocess.Popen([sys.executable, "-c", "import os, sys; os.truncate(sys.argv[1], 1)", str(data)])
            with pytest.raises(subprocess.TimeoutExpired):
                cut.wait(1.5)
            assert data.stat().st_size > 1
        assert cut.wait(30) == 0
        with pytest.raises(memonger.SessionError, match=rf"{data.name} was changed .* it is shorter now"):
            session.run(FEED)


def test_a_file_that_is_open_for_writing_is_read_all_the_same(own: Path, expected: np.ndarray) -> None:
    (data,) = own.parent.glob("*.data")
    with memonger.Session(own) as session, data.open("r+b"):
        assert np.array_equal(session.run(FEED)[RESULT], expected)


def test_a_file_that_was_written_to_is_refused(own: Path) -> None:
    (data,) = own.parent.glob("*.data")
    with memonger.Session(own) as session:
        with data.open("r+b") as file:
            file.write(b"x")
        os.utime(data, (1, 1))
        with pytest.raises(memonger.SessionError, match=rf"{data.name} was changed .* it is another now"):
            session.run(FEED)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bytes": 1}, "malformed"),
        ({"nbytes": 1}, "its window of weights has 1 bytes where"),
        ({"nbytes": -1}, "malformed"),
        ({"nbytes": 1 << 40}, "its window of weights has 1099511627776 bytes, and what passes"),
        ({"weights": []}, "a window of weights, and none that stays in the file"),
        ({"weights": ["absent"]}, "'absent' is no weight that can stay in the file"),
        ({"weights": ["w5", "w1"]}, "aren't in the order in which steps read them"),
    ],
)
def test_a_strangers_window_is_checked(own: Path, change: Mapping[str, Any], words: str) -> None:
    model = onnx.load(own, load_external_data=False)
    for entry in model.metadata_props:
        if entry.key == KEY:
            record = json.loads(entry.value)
            window = {**record["window"], **change}
            if "bytes" in change:
                del window["nbytes"]
            entry.value = json.dumps({**record, "window": window})
    own.write_bytes(model.SerializeToString())
    with pytest.raises(memonger.PlanFileError, match=words):
        memonger.Plan.load(own)


@pytest.mark.parametrize("system", ["darwin", "without madvise"])
def test_where_nothing_tells_pages_the_plan_runs_and_says_so(
    planned: Path, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    if system == "darwin":
        monkeypatch.setattr(weight_reader.sys, "platform", system)
    else:
        monkeypatch.setattr(weight_reader.process_memory, "libc", lambda: None)
    monkeypatch.setattr(weight_reader, "_maps", None)
    with memonger.Session(planned) as session:
        assert np.array_equal(session.run(FEED)[RESULT], expected)
        assert "nothing tells which pages of a file are in memory" in session.weight_readers[0].why_not
    record = invoke("run", planned, "--json", "--runs", "1")
    assert "nothing tells which pages" in json.loads(record.output)["why_no_window"]


def test_weights_inside_the_file_cannot_stay_in_it(own: Path) -> None:
    whole = onnx.load(own)
    onnx.save(whole, own)
    with pytest.raises(memonger.PlanFileError, match="weight 'w0' lies in the model, where its plan has it in a file"):
        memonger.Session(own, check_weights=False)


def test_a_model_with_its_weights_inside_is_planned_below_them(tmp_path: Path, expected: np.ndarray) -> None:
    onnx.save(_model(), tmp_path / "model.onnx")
    asked = ["plan", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "planned.onnx"), "--mode", "inference"]
    said = invoke(*asked, "--device", "cpu", "--budget", BUDGET)
    assert said.exit_code == 0
    (data,) = tmp_path.glob("planned.onnx.*.data")
    assert ("Reading through the window costs" in said.output) == (disk.speed(str(data)) is not None)
    with memonger.Session(tmp_path / "planned.onnx") as session:
        assert np.array_equal(session.run(FEED)[RESULT], expected)
        assert not session.weight_readers[0].why_not


def test_a_kernel_that_packs_otherwise_is_named_before_the_file_is_written(
    plan: memonger.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memonger.runtime.packing.packed_buffers", lambda value: {False: (4,)})
    with pytest.raises(memonger.PlanFileError, match=r"can't hold weight 'w\d' as its kernel packs it on this"):
        plan.save(tmp_path / "planned.onnx")
    assert not list(tmp_path.iterdir())


def test_a_slow_disk_is_told(plan: memonger.Plan, tmp_path: Path) -> None:
    """As the system says what a thread does, and with how much of the run that was."""
    states = {b"7 (a) D 1": True, b"7 (b) D) R 1": False, b"7 (c) S 1": False}
    for number, (text, waits) in enumerate(states.items()):
        path = tmp_path / str(number)
        path.write_bytes(text)
        task = os.open(path, os.O_RDONLY)
        assert disk.waits(task) is waits
        os.close(task)
    for waited, lines in ((0.1, 1), (0.5, 2)):
        last = weight_reader.Reading(100 * MIB, 0, 90 * MIB, 1.0, waited, MIB)
        said = list(compare.reading_lines(plan, last, "", 200.0 * MIB))
        assert len(said) == lines
        assert "90.0 MiB from the disk, which gives 200 MiB a second (500 ms for all of it)" in said[0]
    assert "The disk is what the run waits for: 500 ms of 1.00 s" in said[1]


def test_how_fast_a_disk_is_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(3 * MIB + 5))
    speed = disk.speed(str(tmp_path / "file"))
    assert speed is None or speed > 0  # where the folder lies in memory
    assert disk.speed(str(tmp_path / "absent")) is None


def test_pages_that_were_written_to_stay(tmp_path: Path) -> None:
    """A page of a private mapping that was written to is in no file: dropping it would lose what was written."""
    path = tmp_path / "data"
    path.write_bytes(b"a" * 4 * mmap.PAGESIZE)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as content:
        address = np.frombuffer(content, np.uint8).ctypes.data
        pages = os.open("/proc/self/pagemap", os.O_RDONLY)
        weight_reader._drop(pages, address, len(content))
        assert content[mmap.PAGESIZE] == ord("a")
        content[mmap.PAGESIZE] = ord("b")
        weight_reader._drop(pages, address, len(content))
        assert content[mmap.PAGESIZE] == ord("b")
        os.close(pages)


def test_models_of_a_fleet_share_one_window(plan: memonger.Plan, planned: Path, tmp_path: Path) -> None:
    """What idles has its kept weights alone in memory."""
    model = _model()
    for tensor in model.graph.initializer:
        if tensor.name == "w0":
            tensor.raw_data = normal(77, WIDTH, WIDTH).tobytes()
    expected = run_stock(model, FEED, "ORT_ENABLE_ALL")[RESULT]
    memonger.search_plan(model, device="cpu", mode="inference", budget=BUDGET).save(tmp_path / "planned.onnx")
    assert plan.window is not None
    with memonger.Fleet({"one": planned, "two": tmp_path / "planned.onnx"}) as fleet:
        memory = fleet.memory()
        assert memory.weights == 2 * plan.kept_parameter_bytes + plan.window.nbytes
        assert memory.in_files == 2 * (plan.parameter_bytes - plan.kept_parameter_bytes)
        for _ in range(2):
            fleet["one"].run(FEED)
            assert np.array_equal(fleet["two"].run(FEED)[RESULT], expected)
        both = resident(planned) + resident(tmp_path / "planned.onnx")
        assert both <= 2 * (plan.kept_parameter_bytes * 1.05 + 4096 * 2 * LAYERS)
    assert resident(planned) == 0


def test_fit_says_what_fits_below_the_weights() -> None:
    model = _open()
    answer = memonger.fit(model, BUDGET, device="cpu", mode="inference")
    assert answer.plan is not None
    assert answer.plan.window is not None
    assert answer.size > 1
    assert answer.plan.total_bytes <= 6 * MIB
    largest = memonger.search_plan(model, batch=answer.size, device="cpu", mode="inference", budget=BUDGET)
    assert largest.total_bytes <= 6 * MIB


def test_a_fork_is_told_and_does_not_wait(planned: Path) -> None:
    with memonger.Session(planned) as session:
        session.run(FEED)
        child = os.fork()
        if not child:
            try:
                session.run(FEED)
            except memonger.SessionError as error:
                os._exit(0 if "before the process forked" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0


def test_a_reader_that_fails_says_so_and_the_plan_runs_on(
    planned: Path, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    with memonger.Session(planned) as session:

        def refuse(*_: object) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(weight_reader.os, "posix_fadvise", refuse)
        assert np.array_equal(session.run(FEED)[RESULT], expected)
        assert "Input/output error" in session.weight_readers[0].why_not
        assert np.array_equal(session.run(FEED)[RESULT], expected)


SHORT, MANY = 192, 200


@pytest.fixture(scope="module")
def short_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of 200 products of one row, each of some 50 microseconds: between two looks many of them run."""
    names = [f"w{n}" for n in range(MANY)]
    nodes = [helper.make_node("MatMul", [f"v{n}", name], [f"v{n + 1}"]) for n, name in enumerate(names)]
    weights = {name: normal(n, SHORT, SHORT) / np.float32(SHORT**0.5) for n, name in enumerate(names)}
    model = model_of(nodes, {"v0": [1, SHORT]}, {f"v{MANY}": [1, SHORT]}, **weights)
    path = tmp_path_factory.mktemp("short") / "planned.onnx"
    memonger.search_plan(model, device="cpu", mode="inference", budget="4MiB").save(path)
    return path


def test_where_memory_is_short_what_is_done_with_leaves_the_cache(tmp_path: Path) -> None:
    """The cache holds a file in pieces that weights share: one goes with the last of them."""
    path, size, count = tmp_path / "weights.data", 36 * mmap.PAGESIZE, 100
    path.write_bytes(bytes(range(256)) * (size * count // 256))
    if disk.speed(str(path)) is None:
        pytest.skip("the folder lies in memory, or gives no bytes past the cache")
    spans = [FileSpan(0, n * size, size, ahead=True) for n in range(count)]
    schedule = ReadSchedule(2 * size, (str(path),), tuple(WeightRead(n, n, span, size) for n, span in enumerate(spans)))
    with closing(weight_reader._DataFile(str(path))) as file:
        os.fsync(file.descriptor)
        os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while os.read(file.descriptor, MIB):
            pass
        follower = weight_reader._Follower(schedule, [file])
        follower._is_short = True
        whole = cached(str(path), 0, size * count)
        assert whole >= size * count // 2
        for number in range(count):
            follower._drop(-1, number)
        assert cached(str(path), 0, size * count) <= 2 * size


def test_more_than_the_window_is_told_where_steps_outrun_the_reader(
    short_steps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that looks when all is over finds every weight there, as the system does; then it drops them."""
    plan, before = memonger.Plan.load(short_steps), list[int]()
    with memonger.Session(short_steps) as session:
        (reader,) = session.weight_readers
        follower = reader._follower
        newest, drop = follower._newest, follower._drop

        def late(pages: int, begun: int, among: int) -> int:
            return newest(pages, begun, among) if follower._is_over.is_set() else begun

        def noted(pages: int, number: int) -> None:
            before.extend([] if before else [resident(short_steps)])
            drop(pages, number)

        session.run({"v0": normal(7, 1, SHORT)})
        kept = resident(short_steps)
        monkeypatch.setattr(follower, "_newest", late)
        monkeypatch.setattr(follower, "_drop", noted)
        session.run({"v0": normal(7, 1, SHORT)})
        assert reader.last is not None
        assert reader.last.most_bytes == plan.read_bytes > 5 * plan.window.nbytes
        assert before[0] - kept == pytest.approx(plan.read_bytes, rel=0.05)
        assert resident(short_steps) == pytest.approx(kept, abs=MIB // 4)
        said = list(compare.reading_lines(plan, reader.last, "", None))
        assert "Steps were faster than what drops weights behind them" in said[-1]


def test_a_weight_that_is_read_several_times_is_in_memory_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a reader finds begun that looks too seldom, it says no more of it than there is."""
    nodes, weights = [], {"shared": normal(1, WIDTH, WIDTH)}
    for layer in range(LAYERS):
        weight = "shared" if layer % 2 else f"w{layer}"
        weights[weight] = normal(layer, WIDTH, WIDTH) / np.float32(WIDTH)
        nodes.append(helper.make_node("MatMul", [f"v{layer}", weight], [f"v{layer + 1}"], name=f"product{layer}"))
    model = model_of(nodes, {"v0": [4, WIDTH]}, {RESULT: [4, WIDTH]}, **weights)
    with pytest.raises(memonger.BudgetError) as error:
        memonger.search_plan(model, device="cpu", mode="inference", budget="1MiB")
    plan = memonger.search_plan(model, device="cpu", mode="inference", budget=error.value.smallest)
    assert "shared" in plan.window.weights
    assert plan.read_bytes > plan.parameter_bytes
    plan.save(tmp_path / "planned.onnx")
    with memonger.Session(tmp_path / "planned.onnx") as session:
        (reader,) = session.weight_readers
        newest = reader._follower._newest
        monkeypatch.setattr(
            reader._follower,
            "_newest",
            lambda pages, begun, among: newest(pages, begun, among) if reader._follower._is_over.is_set() else begun,
        )
        session.run({"v0": normal(3, 4, WIDTH)})
        assert plan.parameter_bytes - 4096 < reader.last.most_bytes <= plan.parameter_bytes


def test_equal_weights_are_read_as_one_place_of_the_file(tmp_path: Path) -> None:
    model = _model()
    for tensor in model.graph.initializer[2:]:
        if tensor.name in ("w3", "w6"):
            tensor.raw_data = next(one.raw_data for one in model.graph.initializer if one.name == "w1")
    memonger.search_plan(model, device="cpu", mode="inference", budget=BUDGET).save(tmp_path / "planned.onnx")
    with memonger.Session(tmp_path / "planned.onnx") as session:
        for _ in range(2):
            assert np.array_equal(session.run(FEED)[RESULT], run_stock(model, FEED, "ORT_ENABLE_ALL")[RESULT])
        assert not session.weight_readers[0].why_not


def test_a_step_that_reads_no_page_that_is_looked_at_stops_nothing(
    planned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes behind it is seen all the same."""
    monkeypatch.setattr(weight_reader, "_NEXT", 1)
    with memonger.Session(planned) as session:
        follower, seen = session.weight_readers[0]._follower, set()
        follower._watched[0] = []
        drop = follower._drop

        def noted(pages: int, number: int) -> None:
            seen.add((number, follower._is_over.is_set()))
            drop(pages, number)

        monkeypatch.setattr(follower, "_drop", noted)
        for _ in range(200):
            session.run(FEED)
            if (0, False) in seen:
                return
        raise AssertionError("weight 0 was never dropped during a run")


def test_plans_for_several_batches_share_a_session(tmp_path: Path) -> None:
    paths = []
    for batch in (1, 8):
        plan = memonger.search_plan(_open(), batch=batch, device="cpu", mode="inference", budget=BUDGET)
        paths.append(tmp_path / f"{batch}.onnx")
        plan.save(paths[-1])
    with memonger.Session(paths) as session:
        assert len(session.engines) == 1
        for batch in (8, 1):
            feed = {"v0": normal(batch, batch, WIDTH)}
            assert np.array_equal(session.run(feed)[RESULT], run_stock(_open(), feed, "ORT_ENABLE_ALL")[RESULT])
            assert all(not reader.why_not for reader in session.weight_readers)
            assert resident(paths[0]) < 6 * MIB


def test_ranges_and_chunks_go_with_a_window(tmp_path: Path) -> None:
    """In chunks a weight is read by each slice, and dropped between them."""
    ranged = memonger.search_plan(_open(), dims={"batch": (1, 200)}, device="cpu", mode="inference", budget=BUDGET)
    chunked = memonger.search_plan(_open(), batch=512, chunks=4, device="cpu", mode="inference", budget="7MiB")
    assert chunked.chunks
    assert chunked.read_bytes == 4 * ranged.read_bytes
    for number, (plan, batches) in enumerate(((ranged, (7, 200)), (chunked, (512, 512)))):
        assert plan.window is not None
        assert plan.total_bytes <= 7 * MIB
        plan.save(tmp_path / f"{number}.onnx")
        with memonger.Session(tmp_path / f"{number}.onnx") as session:
            for batch in batches:
                feed = {"v0": normal(batch, batch, WIDTH)}
                assert np.array_equal(session.run(feed)[RESULT], run_stock(_open(), feed, "ORT_ENABLE_ALL")[RESULT])
            assert not session.weight_readers[0].why_not
            assert resident(tmp_path / f"{number}.onnx") < MIB


def test_packed_copies_are_let_go_while_a_session_is_made(tmp_path: Path) -> None:
    """Those that are mapped meanwhile, and no other bytes of the file: 8 MiB of each are read, and read again."""
    path, size = tmp_path / "weights.data", 8 * MIB
    path.write_bytes(bytes(range(256)) * (3 * size // 256))

    def resident(mapped: mmap.mmap) -> int:
        begin = np.frombuffer(mapped, np.uint8).ctypes.data
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            found = np.frombuffer(os.pread(pages.fileno(), size // 4096 * 8, begin // 4096 * 8), np.uint64)
        return int((found >> np.uint64(63)).sum()) * 4096

    with path.open("rb") as file:
        part = partial(mmap.mmap, file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        earlier = part(offset=size)
        total = [sum(earlier[::4096])]
        with weight_reader.dropping({str(path): [(size, size)]}):
            original, copy = part(offset=0), part(offset=size)
            total += [sum(original[::4096]), sum(copy[::4096])]
            for _ in range(1000):
                if not resident(copy):
                    break
                time.sleep(0.01)
            assert resident(copy) == 0
            assert total == [0, 0, 0]
        assert copy[255] == 255
        assert resident(original) == resident(earlier) == size


@pytest.mark.skipif(not hasattr(process_memory.libc(), "malloc_trim"), reason="the C library isn't glibc")
def test_what_kernels_packed_into_is_given_back_while_a_session_is_made(tmp_path: Path) -> None:
    """Blocks with others between them, which are too small for what comes next: the C library keeps them when free."""
    path, libc, size = tmp_path / "weights.data", ctypes.CDLL(None), 5 * MIB
    path.write_bytes(bytes(4096))
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )

    def filled(count: int) -> int:
        block = libc.malloc(count)
        ctypes.memset(block, 1, count)
        return int(block)

    libc.free(libc.malloc(30 * MIB))  # from now on blocks of less come from one region
    before = process_memory.resident().now
    with weight_reader.dropping({str(path): [(0, 4096)]}):
        blocks, between = zip(*((filled(size), filled(4096)) for _ in range(8)), strict=True)
        for block in blocks:
            libc.free(block)
        time.sleep(0.05)
        last = filled(2 * size)
        time.sleep(0.2)
        assert process_memory.resident().now - before < 3 * size
    for block in (*between, last):
        libc.free(block)


@pytest.mark.parametrize("copies", [{}, {"/nowhere/weights.data": [(0, 4096)]}])
def test_without_copies_nothing_is_looked_at(copies: Mapping[str, list[tuple[int, int]]]) -> None:
    before = threading.active_count()
    with suppress(memonger.SessionError), weight_reader.dropping(copies):
        assert threading.active_count() == before
        assert not copies


@pytest.fixture(scope="module")
def decoding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder of int4 products in less than its weights take, whose caches grow."""
    plan = memonger.search_plan(
        decoder(SIZES), device="cpu", mode="inference", dims=GROWS, state=SIZES.state, budget="1.8MiB"
    )
    assert plan.window is not None
    assert plan.parameter_bytes > 2.7 * MIB > 1.8 * MIB >= plan.total_bytes
    path = tmp_path_factory.mktemp("decoding") / "planned.onnx"
    plan.save(path)
    return path


SIZES = Sizes(layers=4, heads=8, kv_heads=4, head=32, width=256, hidden=768, words=800, longest=64)
GROWS: dict[str, Any] = {
    "batch_size": 1, "sequence_length": (1, 4), "past_sequence_length": (0, 28),
    "total_sequence_length": "past_sequence_length + sequence_length",
}  # fmt: skip


def _said(run: Callable[[Mapping[str, np.ndarray]], np.ndarray]) -> list[bytes]:
    """The logits of a prompt and of ten words that follow, each the likeliest."""
    ids, length, found = np.array([[5, 9, 33, 2]]), 0, list[bytes]()
    for _ in range(10):
        length += ids.shape[1]
        logits = run({"input_ids": ids, "attention_mask": np.ones((1, length), np.int64)})
        found.append(logits.tobytes())
        ids = logits[:, -1:].argmax(-1)
    return found


def test_a_decoder_says_what_stock_says_with_its_weights_in_the_file(decoding: Path) -> None:
    other = stock(decoder(SIZES))
    caches = {name: np.zeros((1, 4, 0, 32), np.float32) for name in SIZES.state}

    def by_stock(given: Mapping[str, np.ndarray]) -> np.ndarray:
        found = other.run(None, {**given, **caches})
        named = dict(zip([one.name for one in other.get_outputs()], found, strict=True))
        caches.update({old: named[new] for old, new in SIZES.state.items()})
        logits: np.ndarray = named["logits"]
        return logits

    expected = _said(by_stock)
    with memonger.Session(decoding) as one, memonger.Session(decoding) as two:  # each with caches of its own
        for session in (one, two):
            assert _said(lambda given, session=session: session.run(given)["logits"]) == expected
            assert not session.weight_readers[0].why_not


def test_decoders_of_a_fleet_share_a_window_where_callers_keep_the_caches(decoding: Path, tmp_path: Path) -> None:
    plan = memonger.search_plan(decoder(SIZES), device="cpu", mode="inference", dims=GROWS, budget="1.8MiB")
    assert plan.window is not None
    for name in "ab":
        plan.save(tmp_path / f"{name}.onnx")
    with memonger.Session(decoding) as session:
        expected = _said(lambda given: session.run(given)["logits"])
    with memonger.Fleet({name: tmp_path / f"{name}.onnx" for name in "ab"}) as fleet:
        memory = fleet.memory()  # both are of one model, whose weights they share
        assert memory.weights == plan.resident_parameter_bytes
        assert memory.in_files == plan.parameter_bytes - plan.kept_parameter_bytes

        def by(name: str) -> Callable[[Mapping[str, np.ndarray]], np.ndarray]:
            caches = {cache: np.zeros((1, 4, 0, 32), np.float32) for cache in SIZES.state}

            def run(given: Mapping[str, np.ndarray]) -> np.ndarray:
                found = fleet[name].run({**given, **caches})
                caches.update({old: np.array(found[new]) for old, new in SIZES.state.items()})
                logits: np.ndarray = found["logits"]
                return logits

            return run

        assert _said(by("a")) == _said(by("b")) == expected
