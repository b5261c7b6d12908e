"""A training step in segments: nothing is updated before the loss is known, and cutting a model changes no bit."""

import os
import signal
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import memonger
from memonger.errors import SessionError, VerificationError
from memonger.graph.graph import from_model
from memonger.graph.verify import verify
from memonger.runtime.partition import partitions
from memonger.runtime.prepared import Partition
from memonger.runtime.program import program_of
from tests.support.training_steps import batch, differentiated, model, net

OPTIMIZERS: dict[str, Any] = {
    "plain": memonger.SGD(0.1),
    "dampening": memonger.SGD(0.1, momentum=0.8, dampening=0.3, weight_decay=0.02),
    "nesterov": memonger.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.02),
    "adam with penalty": memonger.Adam(0.02, weight_decay=0.1),
    "adamw": memonger.AdamW(0.02, weight_decay=0.3),
}
_FORWARD = model(net())
_NUMBERS = np.where(np.arange(60) % 3 == 0, np.float32(-0.0), np.linspace(-1, 1, 60, dtype=np.float32))


def _trainer(*, micro_batches: bool = False, **options: Any) -> memonger.TrainingSession:
    """A session whose state has zeros of both signs in it, and numbers of both signs."""
    apply = memonger.search_plan(differentiated(_FORWARD, accumulate="apply" if micro_batches else "no", **options))
    add = memonger.search_plan(differentiated(_FORWARD, accumulate="add")) if micro_batches else None
    trainer = memonger.TrainingSession(apply, accumulation=add)
    rng, state = np.random.default_rng(5), {}
    for name, array in trainer.state_dict().items():
        numbers = rng.permutation(np.resize(_NUMBERS, array.size)).reshape(array.shape)
        square = name.endswith(("exp_avg_sq", "running_var"))
        state[name] = (np.abs(numbers) + ("run" in name) if square else numbers).astype(array.dtype)
    trainer.load_state_dict(state)
    return trainer


def _bits(trainer: memonger.TrainingSession) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in trainer.state_dict().items()}


@pytest.mark.parametrize(("name", "clip_norm"), list(zip(OPTIMIZERS, [None, 0.5, None, 0.5, None], strict=True)))
def test_a_loss_that_is_not_finite_changes_no_bit(name: str, clip_norm: float | None) -> None:
    trainer = _trainer(optimizer=OPTIMIZERS[name], clip_norm=clip_norm)
    before = _bits(trainer)
    for bad in (np.nan, np.inf, -np.inf):
        feeds = batch(0)
        feeds["x"][2, 1] = bad
        assert not np.isfinite(trainer.step(feeds))
        assert _bits(trainer) == before
    assert (trainer.steps, trainer.skipped_steps) == (0, 3)
    trainer.step(batch(1))
    after = _bits(trainer)
    assert all(before[name] != after[name] for name in before)
    assert all(np.isfinite(array).all() for array in trainer.state_dict().values())


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_micro_batch_that_is_not_finite_changes_no_bit(bad: int) -> None:
    trainer = _trainer(micro_batches=True, optimizer=memonger.Adam(0.02))
    before = _bits(trainer)
    batches = [batch(number) for number in range(3)]
    batches[bad]["x"][2, 1] = np.nan
    assert not np.isfinite(trainer.step(batches))
    assert _bits(trainer) == before
    assert np.isfinite(trainer.step([batch(number) for number in range(3)]))


def test_a_norm_that_is_not_finite_changes_no_bit() -> None:
    """The loss is 1e30, its gradient's square is beyond float32."""
    forward = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> g (float[4] x) => (float l) <float[4] w = {1.0, 2.0, -0.0, 4.0}>
        { p = Mul(x, w) l = ReduceSum<keepdims=0>(p) }"""
    )
    options: dict[str, Any] = {"loss": "l", "optimizer": memonger.SGD(0.1, momentum=0.9)}
    huge = {"x": np.full(4, 1e30, np.float32)}
    trainer = memonger.TrainingSession(memonger.search_plan(memonger.differentiate(forward, clip_norm=1.0, **options)))
    before = _bits(trainer)
    assert np.isfinite(trainer.step(huge))
    assert trainer.skipped_steps == 1
    assert np.isinf(trainer.outputs()["gradient_norm"])
    assert _bits(trainer) == before
    unclipped = memonger.TrainingSession(memonger.search_plan(memonger.differentiate(forward, **options)))
    unclipped.step(huge)
    assert _bits(unclipped) != before


def test_statistics_that_the_loss_needs_are_written_after_it() -> None:
    """The node of a training form gives both, so what it writes is copied over the old statistics after the step."""
    head = '<ir_version: 10, opset_import: ["": 20]>'
    source = onnx.parser.parse_model(
        f"""{head} g (float[8,2] x) => (float l, float[2] m_next, float[2] v_next)
        <float[2] s = {{1.0, 2.0}}, float[2] b = {{0.0, 0.5}}, float[2] m = {{-0.0, 2.0}}, float[2] v = {{1.0, 3.0}}> {{
            y, m_next, v_next = BatchNormalization<training_mode=1, momentum=0.75>(x, s, b, m, v)
            l = ReduceSum<keepdims=0>(y)
        }}"""
    )
    plan = memonger.search_plan(memonger.differentiate(source, loss="l", optimizer=memonger.SGD()))
    trainer = memonger.TrainingSession(plan)
    x = np.random.default_rng(0).standard_normal((8, 2)).astype(np.float32)
    before = _bits(trainer)
    trainer.step({"x": np.where(np.arange(16).reshape(8, 2) == 3, np.float32(np.nan), x)})
    assert _bits(trainer) == before
    trainer.step({"x": x})
    np.testing.assert_allclose(trainer.state_dict()["m"], 0.75 * np.array([0, 2]) + 0.25 * x.mean(0), rtol=1e-5)
    np.testing.assert_allclose(trainer.state_dict()["v"], 0.75 * np.array([1, 3]) + 0.25 * x.var(0), rtol=1e-5)


def test_a_plan_that_updates_before_its_loss_is_known_is_refused() -> None:
    plan = memonger.search_plan(differentiated(_FORWARD, optimizer=memonger.SGD(0.1)))
    graph, training = plan.graph, plan.training
    assert training is not None
    loss = graph.values.index(str(training.loss))
    first = next(step for step, pairs in enumerate(graph.updates) if pairs)
    assert loss in graph.reads[first]
    nodes = list(plan.model.clone().graph)
    moved = [*nodes[: graph.producer[loss]], nodes[first], *nodes[graph.producer[loss] : first], *nodes[first + 1 :]]
    copy = plan.model.clone()
    order = [str(node.name) for node in moved]
    by_name = {str(node.name): node for node in copy.graph}
    copy.graph.remove(list(copy.graph))
    copy.graph.extend(by_name[name] for name in order)
    wrong = from_model(copy, updates=training.updates, after=training.verdicts)
    number = {name: value for value, name in enumerate(wrong.values)}
    offsets = {number[graph.values[value]]: offset for value, offset in plan.offsets.items()}
    with pytest.raises(VerificationError, match=r"before anything has written it|has no offset"):
        verify(wrong, offsets, plan.arena_bytes, plan.alignment)


_CAPTURING = """<ir_version: 10, opset_import: ["": 20]>
g (float[3,4] x, bool c) => (float[3,4] y, int64[2] where) <float[4] w = {1.0, 2.0, -3.0, 4.0}> {
    a = Mul(x, w)
    size = Shape(a)
    b = Relu(a)
    d = If(c) <
        then_branch = t () => (float[3,4] u) { u = Add(b, w) },
        else_branch = e () => (float[3,4] v) { v = Sub(b, a) }
    >
    flat = Reshape(d, size)
    y = Mul(flat, a)
    where = Identity(size)
}"""


@pytest.mark.parametrize("cuts", [(), (1,), (2,), (3,), (4,), (1, 2, 3, 4, 5), (2, 4), (5,)])
@pytest.mark.parametrize("choice", [False, True])
def test_segments_compute_what_the_whole_computes(cuts: tuple[int, ...], choice: bool) -> None:
    """One after the other on stock onnxruntime, each fed what it says it needs, values of subgraphs included."""
    source = onnx.parser.parse_model(_CAPTURING)
    plan = memonger.search_plan(source, mode="inference", device="none")
    program = program_of(plan)
    bounds = sorted({0, *cuts, len(program.order)})
    parts = [*partitions(plan.model, program, pairwise(bounds))]
    assert [name for part, _ in parts for name in part.program.order] == list(program.order)
    known: dict[str, Any] = {
        "x": np.arange(12, dtype=np.float32).reshape(3, 4) - 5,
        "c": np.array(choice),
    }
    for part, cut in parts:
        assert cut is not None
        known |= _run(part, cut, known)
    names = [output.name for output in source.graph.output]
    stock = onnxruntime.InferenceSession(source.SerializeToString()).run(names, {k: known[k] for k in ("x", "c")})
    for name, array in zip(names, stock, strict=True):
        assert known[name].tobytes() == array.tobytes()


def _run(part: Partition, model: ir.Model, known: dict[str, Any]) -> dict[str, Any]:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    needed = [value.name for value in session.get_inputs()]
    assert set(needed) == {tensor.name for tensor in part.borrowed} | set(part.live_ins)
    names = [value.name for value in session.get_outputs()]
    assert set(names) == {tensor.name for tensor in part.program.planned} | set(part.live_outs)
    return dict(zip(names, session.run(names, {name: known[name] for name in needed}), strict=True))


@pytest.mark.parametrize("segment", [0, 1])
@pytest.mark.parametrize("when", ["before", "after"])
def test_ctrl_c_at_a_segment_waits_for_the_whole_step(segment: int, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, sound = (_trainer(optimizer=memonger.Adam(0.02)) for _ in range(2))
    engine = trainer.engines[segment]
    run = engine.run

    def interrupted(*arguments: Any) -> None:
        if when == "before":
            os.kill(os.getpid(), signal.SIGINT)
        run(*arguments)
        if when == "after":
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    with monkeypatch.context() as patched:
        patched.setattr(engine, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.step(batch(0))
    signal.signal(signal.SIGINT, before)
    sound.step(batch(0))
    assert trainer.steps == sound.steps == 1
    assert _bits(trainer) == _bits(sound)


def test_a_second_segment_that_fails_is_told_and_a_first_one_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = _trainer(optimizer=memonger.SGD(0.1))
    before = _bits(trainer)

    def fails(*_: object) -> None:
        raise SessionError("injected")

    for segment in (0, 1):
        with monkeypatch.context() as patched:
            patched.setattr(trainer.engines[segment], "run", fails)
            with pytest.raises(SessionError, match="injected"):
                trainer.step(batch(0))
        if segment == 0:
            assert _bits(trainer) == before
    with pytest.raises(SessionError, match="failed after it had begun to update"):
        trainer.state_dict()
