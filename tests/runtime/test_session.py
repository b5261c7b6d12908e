"""Sessions: inputs and outputs, threads, refusals."""

import dataclasses
import sys
import threading
import time
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper

import memonger
from memonger.devices import Stamp
from memonger.graph.graph import from_model
from memonger.runtime import ort, profile, sequences
from tests.support import networks, stock

WIDTH = 64


def _mlp(layers: int = 6, batch: int | str = "batch") -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    nodes, weights, value = [], {}, "x"
    for i in range(layers):
        weights[f"w{i}"] = rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8
        nodes += [
            helper.make_node("MatMul", [value, f"w{i}"], [f"m{i}"], name=f"mul{i}"),
            helper.make_node("Tanh", [f"m{i}"], [f"t{i}"], name=f"tanh{i}"),
        ]
        value = f"t{i}"
    nodes.append(helper.make_node("Add", [value, "x"], ["y"], name="add"))
    return networks.model_of(nodes, {"x": [batch, WIDTH]}, {"y": [batch, WIDTH]}, **weights)


def _x(seed: int, batch: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((batch, WIDTH)).astype(np.float32)


@pytest.fixture(scope="module")
def plan() -> memonger.Plan:
    return memonger.search_plan(_mlp(), batch=8, device="cpu", mode="inference")


@pytest.fixture(scope="module")
def expected() -> dict[int, np.ndarray]:
    stock = networks.stock(_mlp())
    return {seed: stock.run(None, {"x": _x(seed)})[0] for seed in range(20)}


def test_results_survive_the_next_run(plan: memonger.Plan, expected: dict[int, np.ndarray]) -> None:
    session = memonger.Session(plan)
    first = session.run({"x": _x(0)})["y"]
    second = session.run({"x": _x(1)})["y"]
    assert np.array_equal(first, expected[0])
    assert np.array_equal(second, expected[1])


def test_results_without_a_copy_lie_in_the_arena(plan: memonger.Plan, expected: dict[int, np.ndarray]) -> None:
    session = memonger.Session(plan)
    y = session.run({"x": _x(0)}, copy=False)["y"]
    start = session.arena.address
    assert start <= y.ctypes.data < start + session.arena.size
    assert np.array_equal(y, expected[0])
    session.run({"x": _x(1)})
    assert np.array_equal(y, expected[1])


def test_outputs_go_straight_into_given_arrays(plan: memonger.Plan, expected: dict[int, np.ndarray]) -> None:
    session = memonger.Session(plan)
    mine = np.zeros((8, WIDTH), np.float32)
    assert session.run({"x": _x(0)}, {"y": mine})["y"] is mine
    assert np.array_equal(mine, expected[0])
    assert np.array_equal(session.run({"x": _x(1)})["y"], expected[1])
    assert np.array_equal(mine, expected[0]), "a later run without the array leaves it alone"


def test_inputs_may_be_strided_or_ortvalues(plan: memonger.Plan, expected: dict[int, np.ndarray]) -> None:
    session = memonger.Session(plan)
    strided = np.asfortranarray(_x(0))
    assert np.array_equal(session.run({"x": strided})["y"], expected[0])
    value = onnxruntime.OrtValue.ortvalue_from_numpy(_x(1))
    assert np.array_equal(session.run({"x": value})["y"], expected[1])


@pytest.mark.parametrize(("threads", "check", "times"), [(2, True, 3), (1, True, 0), (2, False, 0)])
def test_what_a_profiled_pool_notes_of_later_runs_is_emptied(
    plan: memonger.Plan, monkeypatch: pytest.MonkeyPatch, threads: int, check: bool, times: int
) -> None:
    emptied, real = list[int](), ort.empty_notes
    monkeypatch.setattr(ort, "MOST_NOTES", 4 * len(plan.graph.nodes))
    monkeypatch.setattr(ort, "empty_notes", lambda: emptied.append(0) or real())
    monkeypatch.setattr(ort, "_NOTES", ort.ThreadNotes())
    session = memonger.Session(plan, intra_op_threads=threads, check_order=check)
    for _ in range(16):
        session.run({"x": _x(0)})
    assert len(emptied) == times


def test_repeated_runs_take_inputs_of_every_kind_and_hold_none() -> None:
    nodes = [
        helper.make_node("MatMul", ["large", "small"], ["m"], name="mul"),
        helper.make_node("Tanh", ["m"], ["y"], name="tanh"),
        helper.make_node("Neg", ["large"], ["z"], name="neg"),
    ]
    model = networks.model_of(nodes, {"small": [40, 2], "large": [40, 40]}, {"y": [40, 2], "z": [40, 40]})
    stock, session = networks.stock(model), memonger.Session(memonger.search_plan(model, device="cpu"))

    def feeds(seed: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        return {
            name: rng.standard_normal(shape, np.float32) for name, shape in (("large", (40, 40)), ("small", (40, 2)))
        }

    def check(given: dict[str, Any], plain: dict[str, np.ndarray], **options: Any) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = session.run(given, **options)
        assert networks.same_bits({n: found[n] for n in "yz"}, networks.run_stock(stock, plain))
        return found

    for seed in range(3):
        check(feeds(seed), feeds(seed))
    strided = {name: np.asfortranarray(array) for name, array in feeds(3).items()}
    check(strided, feeds(3))
    check(dict(reversed(feeds(4).items())), feeds(4))
    mine = np.zeros((40, 2), np.float32)
    assert check(feeds(5), feeds(5), outputs={"y": mine})["y"] is mine
    kept = mine.copy()
    results = check(feeds(6), feeds(6), copy=False)
    again = {"large": results["z"], "small": results["y"]}
    check(again, {name: array.copy() for name, array in again.items()})
    with pytest.raises(memonger.SessionError, match="'small' has type float64"):
        session.run({**feeds(7), "small": np.zeros((40, 2))})
    given = feeds(8)
    check(given, feeds(8))
    counts = [sys.getrefcount(array) for array in given.values()]
    check(feeds(9), feeds(9))
    assert [sys.getrefcount(array) for array in given.values()] == counts
    assert np.array_equal(mine, kept), "runs that aren't given it leave it alone"


@pytest.mark.parametrize("threads", ["lock", "arena"])
def test_threads_never_mix_results(plan: memonger.Plan, expected: dict[int, np.ndarray], threads: str) -> None:
    session = memonger.Session(plan, threads=threads)  # type: ignore[arg-type]
    wrong: list[int] = []

    def work(seed: int) -> None:
        results = (session.run({"x": _x(seed)})["y"] for _ in range(30))
        wrong.extend(seed for y in results if not np.array_equal(y, expected[seed]))

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_an_arena_a_thread_is_one_each(plan: memonger.Plan) -> None:
    session = memonger.Session(plan, threads="arena")
    session.run({"x": _x(0)})
    addresses = [session.arena.address]

    def work() -> None:
        session.run({"x": _x(0)})
        addresses.append(session.arena.address)

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert len(set(addresses)) == 2


@pytest.mark.parametrize(
    ("feeds", "words"),
    [
        ({}, "'x' is missing"),
        ({"x": _x(0), "z": _x(0)}, "no input 'z'"),
        ({"x": _x(0, batch=4)}, r"shape \[4, 64\].*planned for \[8, 64\].*batch"),
        ({"x": _x(0).astype(np.float64)}, "type float64.*float32"),
    ],
)
def test_wrong_inputs_are_named(plan: memonger.Plan, feeds: dict[str, np.ndarray], words: str) -> None:
    session = memonger.Session(plan)
    with pytest.raises(memonger.SessionError, match=words):
        session.run(feeds)


class _Lent:
    """A tensor of another library: nothing but DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def test_tensors_of_other_libraries_are_read_and_written_where_they_lie(plan: memonger.Plan) -> None:
    session, x = memonger.Session(plan), _x(0)
    expected = session.run({"x": x})["y"]
    mine = np.zeros_like(expected)
    target = _Lent(mine)
    assert session.run({"x": _Lent(x)}, {"y": target})["y"] is target
    assert mine.tobytes() == expected.tobytes()
    with pytest.raises(memonger.SessionError, match="'x' has type float64"):
        session.run({"x": _Lent(x.astype(np.float64))})


def test_ortvalues_are_taken_and_checked(plan: memonger.Plan) -> None:
    from onnxruntime import OrtValue

    session, x = memonger.Session(plan), _x(0)
    found = session.run({"x": OrtValue.ortvalue_from_numpy(x)})["y"]
    assert found.tobytes() == session.run({"x": x})["y"].tobytes()
    with pytest.raises(memonger.SessionError, match=r"'x' has shape \[1, 64\]"):
        session.run({"x": OrtValue.ortvalue_from_numpy(x[:1])})


def test_wrong_output_arrays_are_named(plan: memonger.Plan) -> None:
    session = memonger.Session(plan)
    with pytest.raises(memonger.SessionError, match="no output 'q'"):
        session.run({"x": _x(0)}, {"q": np.zeros(1, np.float32)})
    with pytest.raises(memonger.SessionError, match="'y' is float32"):
        session.run({"x": _x(0)}, {"y": np.zeros((8, WIDTH))})
    with pytest.raises(memonger.SessionError, match="contiguous"):
        session.run({"x": _x(0)}, {"y": np.zeros((WIDTH, 8), np.float32).T})


@pytest.mark.parametrize(
    ("field", "value"), [("runtime", "onnxruntime 1.0.0"), ("machine", "0123"), ("provider", "OtherExecutionProvider")]
)
def test_a_plan_for_elsewhere_is_refused(plan: memonger.Plan, field: str, value: str) -> None:
    assert plan.stamp is not None
    foreign = dataclasses.replace(plan, stamp=dataclasses.replace(plan.stamp, **{field: value}))
    with pytest.raises(memonger.PlanFileError, match=f"another {field}.*{value}"):
        memonger.Session(foreign)


def test_a_wrong_layout_never_reaches_the_runtime(plan: memonger.Plan) -> None:
    first, second = list(plan.offsets)[:2]
    bad = dataclasses.replace(plan, offsets={**plan.offsets, second: plan.offsets[first]})
    if bad.offsets == dict(plan.offsets):
        bad = dataclasses.replace(plan, arena_bytes=plan.arena_bytes - 1)
    with pytest.raises(memonger.VerificationError):
        memonger.Session(bad)


def test_an_order_the_runtime_does_not_follow_is_refused() -> None:
    """On the CPU onnxruntime puts Cast nodes around float16 kernels it lacks: not the planned order any more."""
    half = helper.make_graph(
        [
            helper.make_node("LeakyRelu", ["x"], ["a"], name="leaky"),
            helper.make_node("Neg", ["a"], ["b"], name="neg"),
            helper.make_node("LeakyRelu", ["b"], ["y"], name="leaky2"),
        ],
        "half",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT16, [16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, [16])],
    )
    model = helper.make_model(half, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    x = np.arange(-8, 8).astype(np.float16)
    with pytest.raises(memonger.SessionError, match="doesn't run the planned order: it puts nodes of its own"):
        memonger.Session(memonger.search_plan(model, device="none", mode="inference"))
    lowered = memonger.Session(memonger.search_plan(model, device="cpu", mode="inference"))
    assert np.array_equal(lowered.run({"x": x})["y"], networks.stock(model).run(None, {"x": x})[0])


def test_the_order_is_checked_against_what_ran(plan: memonger.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    read = profile.read_profile

    def swapped(path: object, **options: bool) -> tuple[profile.NodeRun, ...]:
        runs = list(read(path, **options))  # type: ignore[arg-type]
        runs[1], runs[2] = runs[2], runs[1]
        return tuple(runs)

    monkeypatch.setattr(profile, "read_profile", swapped)
    with pytest.raises(memonger.SessionError, match="at step 1"):
        memonger.Session(plan).run({"x": _x(0)})


def test_a_session_keeps_no_model(plan: memonger.Plan) -> None:
    """onnxruntime holds the weights; a second copy in Python would double them."""
    import gc
    import weakref

    own = memonger.search_plan(_mlp(), batch=8, device="none", mode="inference")
    model = weakref.ref(own.model)
    session = memonger.Session(own)
    del own
    gc.collect()
    assert model() is None
    assert session.run({"x": _x(0)})["y"].shape == (8, WIDTH)


def test_a_portable_plan_runs_too(expected: dict[int, np.ndarray]) -> None:
    session = memonger.Session(memonger.search_plan(_mlp(), batch=8, device="none", mode="inference"))
    stock = networks.stock(_mlp(), "ORT_DISABLE_ALL")
    assert np.array_equal(session.run({"x": _x(0)})["y"], stock.run(None, {"x": _x(0)})[0])


@pytest.mark.parametrize("level", ["disable", "basic", "extended", "all"])
def test_each_level_equals_stock_at_that_level(level: str) -> None:
    plan = memonger.search_plan(_mlp(), batch=8, device="cpu", level=level, mode="inference")
    stock = networks.stock(_mlp(), "ORT_DISABLE_ALL" if level == "disable" else f"ORT_ENABLE_{level.upper()}")
    assert np.array_equal(memonger.Session(plan).run({"x": _x(0)})["y"], stock.run(None, {"x": _x(0)})[0])


def test_stamp_names_what_the_plan_is_bound_to(plan: memonger.Plan) -> None:
    assert isinstance(plan.stamp, Stamp)
    assert plan.stamp.runtime == f"onnxruntime {onnxruntime.__version__}"
    assert plan.stamp.level == "all"


@pytest.mark.parametrize("lie", [{"shape": ir.Shape([1])}, {"type": ir.TensorType(ir.DataType.FLOAT16)}])
def test_a_file_that_lies_about_a_size_is_refused_before_a_byte_too_many_is_written(lie: dict[str, object]) -> None:
    """The checker believes the sizes the model states; onnxruntime compares them with what its kernels ask for."""
    sound = memonger.search_plan(
        _mlp(),
        batch=8,
        device="none",
        sharing=memonger.Sharing(inplace=False, views=False, reuse=False),
        mode="inference",
    )
    model = sound.model.clone()
    value = next(value for node in model.graph for value in node.outputs if value.name == "t2")
    for field, told in lie.items():
        setattr(value, field, told)
    graph = from_model(model)
    lying = dataclasses.replace(sound, model=model, graph=graph)
    lying.verify()
    with pytest.raises(memonger.SessionError, match="tanh2"):
        memonger.Session(lying).run({"x": _x(0)})


def test_threads_that_run_while_a_session_closes_are_told() -> None:
    """Each run ends as it should or is refused, whatever moment the session is closed at."""
    model = networks.model_of([helper.make_node("Relu", ["x"], ["y"], name="relu")], {"x": [64, 64]}, {"y": [64, 64]})
    plan = memonger.search_plan(model, mode="inference", device="cpu", threads=1)
    x = np.ones((64, 64), np.float32)
    for turn in range(20):
        session = memonger.Session(plan, threads="arena", check_order=False)
        said: list[str] = []

        def work(session: memonger.Session = session, said: list[str] = said) -> None:
            try:
                while True:
                    assert (session.run({"x": x})["y"] == x).all()
            except BaseException as error:  # what isn't the session's own is seen below
                said.append(f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.002 * (turn % 5))
        session.close()
        for thread in threads:
            thread.join(30)
        assert said == ["SessionError: the session is closed: make a new one."] * 3


def test_bytes_in_another_order_are_refused() -> None:
    model = networks.model_of([helper.make_node("Relu", ["x"], ["y"], name="relu")], {"x": [4]}, {"y": [4]})
    session = memonger.Session(memonger.search_plan(model, mode="inference", device="cpu"))
    x = np.ones(4, np.float32)
    with pytest.raises(memonger.SessionError, match="has type >f4; the model takes float32"):
        session.run({"x": x.astype(">f4")})
    with pytest.raises(memonger.SessionError, match=r"'y' is float32\[4\], what was given for it is >f4\[4\]"):
        session.run({"x": x}, {"y": np.zeros(4, ">f4")})


def test_a_sequence_of_a_known_length_takes_no_session_of_its_own() -> None:
    """Made anew for each run it takes ten times as long as the run."""
    nodes = "a = SequenceAt(s, i) b = Exp(a) t = SequenceInsert(s, b)"
    text = f"g (seq(float[N]) s, int64 i) => (seq(float[N]) t) {{ {nodes} }}"
    numbers = [np.arange(6, dtype=np.float32)[::2], np.ones(2, np.float32)]  # the first isn't in one piece
    feeds = {"s": numbers, "i": np.array(1)}
    session = memonger.Session(memonger.search_plan(stock.parse(text), inputs=feeds))
    session.run(feeds)
    before = sequences._making.cache_info(), sequences._reading.cache_info()
    made = session.run(feeds | {"s": [array + 1 for array in numbers]})["t"]
    after = sequences._making.cache_info(), sequences._reading.cache_info()
    assert [(now.misses, now.hits) for now in after] == [(old.misses, old.hits + 1) for old in before]
    assert [array.tolist() for array in made[:2]] == [[1, 3, 5], [2, 2]]
    assert len(session.run(feeds | {"s": [*numbers, numbers[0]]})["t"]) == 4
    with pytest.raises(memonger.SessionError, match="input 's' is a sequence: give a list of arrays"):
        session.run(feeds | {"s": np.ones((2, 3), np.float32)})
