"""Sessions that keep a state: the same outputs as stock onnxruntime that is fed its own, step by step."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import memonger
from memonger.report.view import INPUT, View
from tests.support import networks
from tests.support.stock import LEVELS, normal, parse, run_stock, same

LENGTH, WIDTH = 16, 8
RECURRENT, CACHE = {"h": "h_next"}, {"keys": "keys_next"}


def recurrent() -> onnx.ModelProto:
    """h_next = tanh(x·w + h·u) may be written over h, which is read before; y reads h as well, and comes first."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="in"),
        helper.make_node("MatMul", ["h", "u"], ["b"], name="again"),
        helper.make_node("Add", ["a", "b"], ["c"], name="sum"),
        helper.make_node("Tanh", ["c"], ["h_next"], name="tanh"),
        helper.make_node("Sub", ["h_next", "h"], ["d"], name="change"),
        helper.make_node("MatMul", ["d", "v"], ["y"], name="out"),
    ]
    weights = {"w": normal(0, WIDTH, WIDTH), "u": normal(1, WIDTH, WIDTH), "v": normal(2, WIDTH, 4)}
    shapes = {"x": [2, WIDTH], "h": [2, WIDTH]}
    return networks.model_of(nodes, shapes, {"y": [2, 4], "h_next": [2, WIDTH]}, **weights)


def decoder() -> onnx.ModelProto:
    """A static cache of keys: this step's are scattered into it, which may happen in place, and attention reads it."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["k"], name="key"),
        helper.make_node("ScatterElements", ["keys", "at", "k"], ["keys_next"], name="scatter", axis=0),
        helper.make_node("Transpose", ["keys_next"], ["turned"], name="turn", perm=[1, 0]),
        helper.make_node("MatMul", ["x", "turned"], ["y"], name="scores"),
    ]
    shapes = {"x": [1, WIDTH], "keys": [LENGTH, WIDTH]}
    made = networks.model_of(nodes, shapes, {"y": [1, LENGTH], "keys_next": [LENGTH, WIDTH]}, w=normal(0, WIDTH, WIDTH))
    made.graph.input.append(helper.make_tensor_value_info("at", TensorProto.INT64, [1, WIDTH]))
    return made


def steps(name: str) -> list[dict[str, np.ndarray]]:
    """What the caller gives, step by step."""
    if name == "recurrent":
        return [{"x": normal(10 + step, 2, WIDTH)} for step in range(5)]
    return [{"x": normal(10 + step, 1, WIDTH), "at": np.full((1, WIDTH), step)} for step in range(5)]


MODELS: dict[str, tuple[Any, dict[str, str]]] = {"recurrent": (recurrent, RECURRENT), "decoder": (decoder, CACHE)}


def as_stock(model: onnx.ModelProto, state: dict[str, str], given: list[dict[str, np.ndarray]]) -> list[Any]:
    """What stock onnxruntime gives whose state is fed back, and the state at last."""
    stock = networks.stock(model)
    shapes = {value.name: value.shape for value in stock.get_inputs()}
    kept = {name: np.zeros(shapes[name], np.float32) for name in state}
    found: list[Any] = []
    for feeds in given:
        results = networks.run_stock(stock, {**feeds, **kept})
        kept = {old: results[new] for old, new in state.items()}
        found.append(results["y"])
    return [*found, kept]


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("planned", [True, False], ids=["planned for it", "kept by the session"])
@pytest.mark.parametrize("device", ["none", "cpu"])
def test_a_kept_state_is_what_stock_is_fed(name: str, planned: bool, device: str, tmp_path: Path) -> None:
    make, state = MODELS[name]
    level = "disable" if device == "none" else "all"
    plan = memonger.search_plan(make(), device=device, state=state if planned else None, mode="inference", level=level)
    plan.save(tmp_path / "planned.onnx")
    session = memonger.Session(tmp_path / "planned.onnx", state=None if planned else state)
    *expected, last = as_stock(make(), state, steps(name))
    for _ in range(2):
        for feeds, y in zip(steps(name), expected, strict=True):
            session.arena.fill(0xFF)
            results = session.run(feeds)
            assert list(results) == ["y"]
            np.testing.assert_array_equal(results["y"], y)
        assert networks.same_bits(session.state_dict(), last)
        session.reset_state()


def test_what_may_is_written_in_place_and_the_rest_swaps() -> None:
    for name, (make, state) in MODELS.items():
        plan = memonger.search_plan(make(), device="cpu", state=state)
        (old,) = state
        size = 2 * WIDTH * 4 if name == "recurrent" else LENGTH * WIDTH * 4
        in_place = any(plan.graph.updates)
        assert in_place == (name == "decoder")  # what h_next is computed for reads h afterwards
        assert plan.state_bytes == (size if in_place else 2 * size)
        assert plan.total_bytes == plan.arena_bytes + plan.parameter_bytes + plan.input_bytes + plan.state_bytes + (
            plan.workspace_bytes or 0
        )
        rectangles = View(name, plan).rectangles
        assert sum(each.size for each in rectangles if each.kind == INPUT) == plan.input_bytes
        assert max(each.offset + each.size for each in rectangles) == plan.total_bytes
        assert plan.graph.values.index(state[old]) not in plan.offsets


def test_a_state_that_is_given_replaces_what_was_kept() -> None:
    session = memonger.Session(memonger.search_plan(recurrent(), state=RECURRENT))
    first = [session.run(feeds)["y"] for feeds in steps("recurrent")]
    saved = session.state_dict()
    zero = {"h": np.zeros((2, WIDTH), np.float32)}
    np.testing.assert_array_equal(session.run({**steps("recurrent")[0], **zero})["y"], first[0])
    session.load_state_dict(saved)
    assert networks.same_bits(session.state_dict(), saved)


def test_a_run_that_fails_leaves_the_state_or_says_that_it_is_lost() -> None:
    for name, (make, state) in MODELS.items():
        session = memonger.Session(memonger.search_plan(make(), device="none", state=state))
        given = steps(name)
        session.run(given[0])
        before = session.state_dict()
        (engine,) = session.engines
        inner = engine.session

        class Failing:
            def run_with_iobinding(self, *_: object) -> None:
                raise RuntimeError("broken")

        engine.session = Failing()
        with pytest.raises(memonger.SessionError, match="broken"):
            session.run(given[1])
        engine.session = inner
        if name == "decoder":
            with pytest.raises(memonger.SessionError, match="the state, which is lost"):
                session.run(given[1])
            session.load_state_dict(before)
        assert networks.same_bits(session.state_dict(), before)
        session.run(given[1])


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"g": "h_next"}, "has no input 'g'"),
        ({"h": "h_nex"}, r"has no output 'h_nex', which state names\. Did you mean 'h_next'\?"),
        ({"h": "y"}, r"output 'y' is FLOAT\[2, 4\] and can't be input 'h'"),
        ({"h": "h_next", "x": "h_next"}, "one output to two inputs"),
    ],
)
def test_a_wrong_state_is_named(state: dict[str, str], said: str) -> None:
    with pytest.raises(memonger.PlanError, match=said):
        memonger.search_plan(recurrent(), state=state)
    plain = memonger.search_plan(recurrent(), mode="inference")
    with pytest.raises(memonger.SessionError, match=said):
        memonger.Session(plain, state=state)


def test_what_a_state_does_not_go_with_is_said() -> None:
    plan = memonger.search_plan(recurrent(), state=RECURRENT)
    session = memonger.Session(plan)
    with pytest.raises(memonger.SessionError, match=r"state 'h' is float32\[2, 8\], what was given is float64\[2, 8\]"):
        session.load_state_dict({"h": np.zeros((2, WIDTH))})
    with pytest.raises(memonger.SessionError, match="'x' is no state"):
        session.load_state_dict({"x": np.zeros((2, WIDTH))})
    with pytest.raises(memonger.SessionError, match="made for the state"):
        memonger.Session(plan, state={})
    with pytest.raises(memonger.SessionError, match="each stream needs a session of its own"):
        memonger.Session(plan, threads="arena")
    with pytest.raises(memonger.SessionError, match="keeps a state"):
        memonger.Fleet({"stream": plan})
    with pytest.raises(memonger.PlanError, match=r"a state \(state\) doesn't go with training"):
        memonger.search_plan(recurrent(), state=RECURRENT, mode="training")
    with pytest.raises(memonger.SessionError, match="this session keeps no state"):
        memonger.Session(memonger.search_plan(recurrent(), mode="inference")).load_state_dict({})


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"becomes": {"h": 1}}', '{"becomes": {"h": "y"}}', '{"becomes": {"q": "y"}}']
)
def test_a_strangers_state_is_checked(text: str, tmp_path: Path) -> None:
    memonger.search_plan(recurrent(), state=RECURRENT).save(tmp_path / "planned.onnx")
    model = onnx.load(tmp_path / "planned.onnx")
    next(entry for entry in model.metadata_props if entry.key == "memonger.state").value = text
    onnx.save(model, tmp_path / "changed.onnx")
    with pytest.raises(memonger.MemongerError):
        memonger.Plan.load(tmp_path / "changed.onnx")


@pytest.mark.parametrize("name", list(MODELS))
def test_a_given_state_replaces_what_was_kept_only_when_the_run_succeeds(name: str) -> None:
    make, state = MODELS[name]
    (key,) = state
    session = memonger.Session(memonger.search_plan(make(), device="cpu", state=state, mode="inference"))
    feeds = steps(name)
    session.run(feeds[0])
    before = session.state_dict()[key]
    given = np.full_like(before, 99)
    wrong: list[dict[str, np.ndarray]] = [
        {**feeds[1], "x": normal(0, 3, 3), key: given},
        {**feeds[1], "other": given, key: given},
        {**feeds[1], key: given[:1, :1]},
        {key: given},
    ]
    for inputs in wrong:
        with pytest.raises(memonger.SessionError):
            session.run(inputs)
        assert (session.state_dict()[key] == before).all()
    if name == "decoder":  # refused by the kernel: the run had begun, and writes in place
        with pytest.raises(memonger.SessionError, match="onnxruntime failed"):
            session.run({**feeds[1], "at": np.full((1, WIDTH), LENGTH), key: given})
        assert (session.state_dict()[key] == before).all()
    answer = session.run({**feeds[1], key: given})["y"]
    stock = networks.stock(make())
    results = networks.run_stock(stock, {**feeds[1], key: given})
    assert (answer == results["y"]).all()
    assert (session.state_dict()[key] == results[state[key]]).all()


@pytest.mark.parametrize("device", ["none", "cpu"])
@pytest.mark.parametrize("dims", [None, {"n": (2, 64)}], ids=["one size", "a range"])
def test_a_budget_recomputes_what_reads_the_state_before_it_is_written(
    device: str, dims: dict[str, tuple[int, int]] | None
) -> None:
    """A value of the state is needed at both ends of what takes most: it runs again, before the state is written."""
    model = parse(
        """g (float[n,64] x, float[64,64] h, int64[1,2] at) => (float[n,64] y, float[64,64] next) {
        e = Relu(h)  s = MatMul(x, e)  b = MatMul(s, w)  c = MatMul(b, w)  d = Transpose<perm=[1,0]>(c)
        f = MatMul(d, c)  g = MatMul(c, f)  l = MatMul(g, e)  y = Tanh(l)
        u = ReduceMax<keepdims=0>(y)  v = Reshape(u, one)  next = ScatterND(h, at, v) }"""
    )
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(array, name)
        for name, array in {"w": normal(9, 64, 64) / 9, "one": np.array([1])}.items()
    )
    asked: dict[str, Any] = {"state": {"h": "next"}, "mode": "inference", "device": device, "effort": 300}
    asked |= {"chunks": "off", **({"dims": dims} if dims else {"batch": 64})}
    plain = memonger.search_plan(model, **asked)
    plan = memonger.search_plan(model, **asked, budget=plain.total_bytes - 4096)
    assert plan.recomputed
    assert plan.total_bytes <= plain.total_bytes - 4096
    session, h = memonger.Session(plan), normal(3, 64, 64)
    session.load_state_dict({"h": h})
    for turn, n in enumerate((64, 2, 33) if dims else (64, 64)):
        given = {"x": normal(turn, n, 64) / 9, "at": np.array([[turn, 2]])}
        session.arena.fill(0xFF)
        expected = run_stock(model, given | {"h": h}, LEVELS[device])
        assert same(session.run(given)["y"], expected["y"])
        h = expected["next"]
    assert same(session.state_dict()["h"], h)
