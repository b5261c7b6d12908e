"""States that grow: a cache of keys and values, to the bits of stock onnxruntime that is fed its own, run by run."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner

import memonger
from memonger.cli.commands import main
from memonger.errors import VerificationError
from memonger.graph.verify import verify
from memonger.shapes.ranges import terms_of
from tests.support import networks
from tests.support.stock import normal

WIDTH, HEADS, MOST = 8, 2, 12
STATE = {"past.k": "present.k", "past.v": "present.v"}
DIMS: dict[str, Any] = {"past": (0, MOST), "seq": (1, 4)}

FRONT = """k = MatMul(x, wk) v = MatMul(x, wv) q = MatMul(x, wq)
    "present.k" = Concat<axis=0>("past.k", k) "present.v" = Concat<axis=0>("past.v", v)
    kh = Reshape("present.k", heads) vh = Reshape("present.v", heads) qh = Reshape(q, heads)
    kt = Transpose<perm=[1,2,3,0]>(kh) vt = Transpose<perm=[1,2,0,3]>(vh) qt = Transpose<perm=[1,2,0,3]>(qh)"""
"""Tokens in front: what is appended lies behind what is there."""

BEHIND = """k = MatMul(x, wk) v = MatMul(x, wv) q = MatMul(x, wq)
    kh = Reshape(k, heads) vh = Reshape(v, heads) qh = Reshape(q, heads)
    kr = Transpose<perm=[1,2,0,3]>(kh) vr = Transpose<perm=[1,2,0,3]>(vh) qt = Transpose<perm=[1,2,0,3]>(qh)
    "present.k" = Concat<axis=2>("past.k", kr) "present.v" = Concat<axis=2>("past.v", vr)
    kt = Transpose<perm=[0,1,3,2]>("present.k") vt = Identity("present.v")"""
"""Heads in front, as exporters write it."""

ATTENTION = "s = MatMul(qt, kt) m = Add(s, mask) p = Softmax(m) o = MatMul(p, vt) y = Transpose<perm=[2,0,1,3]>(o)"


def decoder(is_front: bool, total: str = "past + seq") -> onnx.ModelProto:
    """Attention of ``seq`` new tokens over all there are; its mask has a column for each of these."""
    cache = "{},1," + str(WIDTH) if is_front else f"1,{HEADS},{{}},{WIDTH // HEADS}"
    caches = ", ".join(f'float[{cache.format("past")}] "{name}"' for name in STATE)
    grown = ", ".join(f'float[{cache.format("grown")}] "{name}"' for name in STATE.values())
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]> g (float[seq,1,{WIDTH}] x, float[1,1,1,total] mask, {caches})
            => (float[seq,1,{HEADS},{WIDTH // HEADS}] y, {grown}) {{ {FRONT if is_front else BEHIND} {ATTENTION} }}"""
    )
    model.graph.input[1].type.tensor_type.shape.dim[3].dim_param = total
    arrays = {name: normal(number, WIDTH, WIDTH) for number, name in enumerate(("wk", "wv", "wq"))}
    arrays["heads"] = np.array([-1, 1, HEADS, WIDTH // HEADS])
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    return model


def runs(lengths: Sequence[int], seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """What the caller gives, for so many tokens a run."""
    for number, (tokens, total) in enumerate(zip(lengths, itertools.accumulate(lengths), strict=True)):
        yield {"x": normal(seed + number, tokens, 1, WIDTH), "mask": normal(seed + number, 1, 1, 1, total)}


def as_stock(model: onnx.ModelProto, given: Sequence[Mapping[str, Any]], level: str) -> Iterator[dict[str, Any]]:
    """All outputs of stock onnxruntime that is fed its outputs."""
    stock = networks.stock(model, level)
    shapes = {value.name: value.shape for value in stock.get_inputs() if value.name in STATE}
    kept = {old: np.zeros([0 if dim == "past" else dim for dim in dims], np.float32) for old, dims in shapes.items()}
    for feeds in given:
        found = networks.run_stock(stock, {**kept, **feeds})
        kept = {old: found[new] for old, new in STATE.items()}
        yield found


def planned(is_front: bool, device: str = "none", **keywords: Any) -> memonger.Plan:
    return memonger.search_plan(
        decoder(is_front), mode="inference", device=device, **{"dims": DIMS, "state": STATE, **keywords}
    )


@pytest.fixture(scope="module")
def plans() -> dict[bool, memonger.Plan]:
    return {is_front: planned(is_front) for is_front in (True, False)}


@pytest.mark.parametrize("device", ["none", "cpu"])
@pytest.mark.parametrize("is_front", [True, False], ids=["in place", "swapped"])
def test_a_cache_grows_to_the_bits_of_stock(is_front: bool, device: str, tmp_path: Path) -> None:
    planned(is_front, device, state={"past.*": "present.*"}).save(tmp_path / "planned.onnx")
    session = memonger.Session(tmp_path / "planned.onnx")
    lengths = (3, 1, 1, 4, 1, 2)  # the last fills it
    level = "ORT_DISABLE_ALL" if device == "none" else "ORT_ENABLE_ALL"
    for seed in (0, 50):
        given = list(runs(lengths, seed))
        for feeds, expected in zip(given, as_stock(decoder(is_front), given, level), strict=True):
            session.arena.fill(0xFF)
            found = session.run(feeds)
            assert list(found) == ["y"]
            assert networks.same_bits(found, {"y": expected["y"]})
            assert networks.same_bits(session.state_dict(), {old: expected[new] for old, new in STATE.items()})
        session.reset_state()
        assert [array.size for array in session.state_dict().values()] == [0, 0]


def test_where_the_layout_allows_it_the_cache_lies_once(plans: dict[bool, memonger.Plan]) -> None:
    size = 2 * MOST * WIDTH * 4
    assert (plans[True].state_bytes, plans[False].state_bytes) == (size, 2 * size)
    assert plans[True].why_swapped == {}
    assert not plans[True].notes or "swap" not in plans[True].notes[-1]
    assert "appends along axis 2, behind axis 1 of 2 elements" in plans[False].why_swapped["past.k"]
    assert "'past.k' and 1 more of the state take two buffers that swap: node " in plans[False].notes[-1]


def test_a_batch_in_front_of_the_length_decides_where_the_cache_lies() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> g (float[b,past,3] a, float[b,n,3] x) => (float[b,all,3] a2,
           float[b,all,3] y) { a2 = Concat<axis=1>(a, x) y = Relu(a2) }"""
    )
    for batch, buffers in ((1, 1), ((1, 2), 2)):
        dims: Any = {"b": batch, "past": (0, 8), "n": (1, 2)}
        plan = memonger.search_plan(model, mode="inference", device="none", dims=dims, state={"a": "a2"})
        most = batch if isinstance(batch, int) else batch[1]
        assert plan.state_bytes == buffers * most * 8 * 3 * 4
        assert ("behind axis 0 of 2 elements" in str(plan.why_swapped)) == (buffers == 2)
        session, x = memonger.Session(plan), normal(0, most, 2, 3)
        for length in (2, 4):
            assert session.run({"x": x})["y"].shape == (most, length, 3)
        np.testing.assert_array_equal(session.state_dict()["a"], np.concatenate([x, x], 1))


def test_the_checker_knows_what_may_be_written_behind_a_state(plans: dict[bool, memonger.Plan]) -> None:
    plan = plans[True]
    graph, (step, other) = plan.graph, [at for at, pairs in enumerate(plan.graph.appends) if pairs]
    ((old, new),) = graph.appends[step]

    def refused(pairs: tuple[tuple[int, int], ...], match: str) -> None:
        changed = graph.with_aliases(append=(*graph.appends[:step], pairs, *graph.appends[step + 1 :]))
        with pytest.raises(VerificationError, match=match):
            verify(changed, plan.offsets, plan.arena_bytes, plan.alignment)

    refused(((old, new), (old, new)), "another node writes as well")
    refused(((graph.appends[other][0][0], new),), "isn't a persistent input that it reads")
    refused(((new, old),), "isn't a persistent input that it reads")
    refused(((old, next(iter(plan.offsets))),), "isn't a persistent input that it reads")
    updates = (*graph.updates[:step], ((old, old),), *graph.updates[step + 1 :])
    with pytest.raises(VerificationError, match="another node writes as well"):
        verify(graph.with_aliases(update=updates), plan.offsets, plan.arena_bytes, plan.alignment)


def test_stock_copies_a_cache_onto_itself() -> None:
    """What appending in place rests on: Concat's first input lies where its output does."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> g (float[p,3] a, float[n,3] b) => (float[q,3] y)
           { y = Concat<axis=0>(a, b) }"""
    )
    for threads in (1, 3):
        session, rng = networks.stock(model, threads=threads), np.random.default_rng(0)
        for rows, more in itertools.product((0, 1, 2, 5, 16, 63, 1000, 40001), (0, 1, 3, 64, 7000)):
            cache = rng.standard_normal((rows + more, 3)).astype(np.float32)
            new, expected = cache[rows:].copy(), cache.copy()
            cache[rows:] = np.nan
            binding = session.io_binding()
            for name, shape, where in (("a", (rows, 3), cache), ("b", (more, 3), new)):
                binding.bind_input(name, "cpu", 0, np.float32, shape, where.ctypes.data)
            binding.bind_output("y", "cpu", 0, np.float32, (rows + more, 3), cache.ctypes.data)
            session.run_with_iobinding(binding)
            assert cache.tobytes() == expected.tobytes(), (threads, rows, more)


@pytest.mark.parametrize("is_front", [True, False], ids=["in place", "swapped"])
def test_what_is_too_long_or_fails_leaves_the_state(is_front: bool, plans: dict[bool, memonger.Plan]) -> None:
    session = memonger.Session(plans[is_front])
    given = list(runs((4, 4, 1, 4, 1)))
    for feeds in given[:3]:
        session.run(feeds)
    before = session.state_dict()
    with pytest.raises(memonger.SessionError, match=r"'past' of the state would be 13, and the plan is for 0 to 12"):
        session.run(given[3])
    with pytest.raises(memonger.SessionError, match=r"'mask' is 14; it has to be past \+ seq, which is 10 at past 9"):
        session.run(given[4])
    (engine,) = session.engines
    inner = engine.session

    class Failing:
        def io_binding(self) -> Any:
            return inner.io_binding()

        def run_with_iobinding(self, binding: Any, *_: object) -> None:
            inner.run_with_iobinding(binding)
            raise RuntimeError("broken")  # when all is written

        def get_inputs(self) -> Any:
            return inner.get_inputs()

    one = {"x": given[4]["x"], "mask": given[4]["mask"][..., :10]}
    engine.session = Failing()
    with pytest.raises(memonger.SessionError, match="broken"):
        session.run(one)
    engine.session = inner
    assert networks.same_bits(session.state_dict(), before)
    again = memonger.Session(plans[is_front])
    again.load_state_dict(before)
    assert networks.same_bits(session.run(one), again.run(one))
    assert networks.same_bits(session.state_dict(), again.state_dict())


def test_a_state_of_any_length_is_taken(plans: dict[bool, memonger.Plan]) -> None:
    session = memonger.Session(plans[False])
    cache = normal(3, 1, HEADS, 5, WIDTH // HEADS)
    given = {**next(runs((1,))), "mask": normal(4, 1, 1, 1, 6)}
    first = session.run({**given, "past.k": cache, "past.v": cache})
    assert session.state_dict()["past.k"].shape == (1, HEADS, 6, WIDTH // HEADS)
    session.load_state_dict({"past.k": cache, "past.v": cache})
    assert networks.same_bits(session.run(given), first)
    with pytest.raises(memonger.SessionError, match=r"'past.k' is float32\[1, 2, past 0 to 12, 4\], what was given"):
        session.load_state_dict({"past.k": normal(0, 1, HEADS, 13, WIDTH // HEADS)})
    with pytest.raises(memonger.SessionError, match=r"'past' is 5 in one state and 4 in 'past.v'"):
        session.load_state_dict({"past.k": cache, "past.v": cache[:, :, :4]})
    with pytest.raises(memonger.SessionError, match=r"'past' would be another in 'past.v', which isn't given"):
        session.load_state_dict({"past.k": cache[:, :, :4]})
    assert session.state_dict()["past.v"].shape[2] == 6


def test_a_session_keeps_a_state_that_its_plan_does_not_know() -> None:
    plan = planned(True, state=None)
    session, given = memonger.Session(plan, state={"past.*": "present.*"}), list(runs((2, 3)))
    for feeds, expected in zip(given, as_stock(decoder(True), given, "ORT_DISABLE_ALL"), strict=True):
        assert networks.same_bits(session.run(feeds), {"y": expected["y"]})


def test_sizes_that_follow_from_others_are_given_as_sums() -> None:
    model = decoder(True, total="total")
    plan = memonger.search_plan(model, mode="inference", device="none", state=STATE, dims={**DIMS, "total": "past+seq"})
    assert str(plan.ranges["total"]) == "past + seq"
    assert networks.same_bits(*(memonger.Session(one).run(next(runs((3,)))) for one in (plan, planned(True))))
    static = memonger.search_plan(decoder(True), mode="inference", device="none", dims={"past": 3, "seq": 1})
    assert [tuple(value.shape) for value in static.model.graph.inputs][1] == (1, 1, 1, 4)
    assert terms_of("2*past_sequence_length + s0*3 - 1") == {"past_sequence_length": 2, "s0": 3, "": -1}
    assert [dict(terms_of(text)) for text in ("", "past +", "a//b", "--a", "max(a, b)", "a b", "1.5*a")] == [{}] * 7
    for total, said in (("past + sq", "'sq' has no size there"), ("past - seq", "subtracts"), ("3x", "no sum")):
        with pytest.raises(memonger.PlanError, match=said):
            memonger.search_plan(model, mode="inference", device="none", dims={**DIMS, "total": total})


def test_a_state_that_only_keeps_its_shape_takes_ranges_as_well() -> None:
    """A batch of any size, which the state then has until it is reset; each run takes some more steps."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> g (float[n,t,4] x, float[n,4] h) => (float[n,4] y, float[n,4] h2)
           { s = ReduceSum<keepdims=0>(x, one) h2 = Add(h, s) y = Tanh(h2) }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "one"))
    dims: Any = {"n": (1, 3), "t": (1, 5)}
    plan = memonger.search_plan(model, mode="inference", device="none", dims=dims, state={"h": "h2"})
    assert any(plan.graph.updates)
    assert plan.state_bytes == 3 * 4 * 4
    session = memonger.Session(plan)
    for n in (2, 3):
        kept = np.zeros((n, 4), np.float32)
        for t in (1, 5, 2):
            x = normal(t, n, t, 4)
            kept = kept + x.sum(1)
            np.testing.assert_allclose(session.run({"x": x})["y"], np.tanh(kept), rtol=1e-6)
        with pytest.raises(memonger.SessionError, match=r"in the state that is kept \(reset_state\(\) lets go of it\)"):
            session.run({"x": normal(0, 1, 1, 4)})
        session.reset_state()


def test_outputs_that_cannot_become_inputs_at_some_size_are_refused(tmp_path: Path) -> None:
    with pytest.raises(memonger.PlanError, match="only dimensions with a range may change"):
        planned(True, state={"past.k": "y"})
    with pytest.raises(memonger.PlanError, match=r"unless its length is a dimension with a range of sizes \(dims="):
        planned(True, dims={"past": 3, "seq": 1})
    planned(True).save(tmp_path / "planned.onnx")
    model = onnx.load(tmp_path / "planned.onnx")
    entry = next(entry for entry in model.metadata_props if entry.key == "memonger.state")
    for becomes in ('{"past.k": "y"}', '{"x": "present.k"}', '{"mask": "present.v"}', '{"past.k": "past.k"}'):
        entry.value = f'{{"becomes": {becomes}}}'
        onnx.save(model, tmp_path / "changed.onnx")
        with pytest.raises(memonger.MemongerError, match=r"only dimensions with a range may change|is a sum|has no"):
            memonger.Plan.load(tmp_path / "changed.onnx")


def test_the_command_line_plans_runs_and_shows_it(tmp_path: Path) -> None:
    onnx.save(decoder(False, total="total"), tmp_path / "decoder.onnx")
    path, runner = tmp_path / "planned.onnx", CliRunner()
    sizes = ["--dim", "past=0:12", "--dim", "seq=1:2", "--dim", "total=past+seq"]
    arguments = ["plan", str(tmp_path / "decoder.onnx"), *sizes, "--state", "past.*=present.*", "-o", str(path)]
    made = runner.invoke(main, arguments)
    assert made.exit_code == 0, made.output
    assert "two buffers that swap" in made.output
    assert "two buffers that swap" in runner.invoke(main, ["inspect", str(path)]).output
    ran = runner.invoke(main, ["run", str(path)])
    assert ran.exit_code == 0, ran.output
    with pytest.raises(memonger.SessionError, match="keeps a state"):
        memonger.Fleet({"stream": path})
    assert onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).get_inputs()[1].shape[3] == "total"
