"""Updates written over persistent inputs: which are, in which order, and what the checker refuses."""

import dataclasses

import numpy as np
import onnx
import pytest

import memonger
from memonger.errors import VerificationError
from memonger.graph.graph import Graph, from_model
from memonger.graph.verify import verify
from memonger.model.load import load
from memonger.schedule.orders import ORDERS


def _graph(body: str, updates: dict[str, str], results: str = "w_next") -> Graph:
    outputs = ", ".join(f"float[4,4] {name}" for name in results.split())
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 20]> g (float[4,4] x, float[4,4] w) => ({outputs}) {{ {body} }}'
    )
    return from_model(load(model).ir, updates=updates)


STEP = "y = MatMul(x, w) g = Tanh(y) d = MatMul(g, w) s = Add(g, d) w_next = Sub(w, s)"


def test_an_update_has_no_address_of_its_own() -> None:
    graph = _graph(STEP, {"w": "w_next"})
    assert [bool(pairs) for pairs in graph.updates] == [False, False, False, False, True]
    assert not graph.planned[graph.values.index("w_next")]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("w_next = Sub(w, x) y = MatMul(w, x)", "somebody reads the old content later"),
        ("w_next = MatMul(w, x) y = Identity(x)", "the kernel may not run in place"),
        ("a = Transpose(w) w_next = Sub(a, w) y = Identity(w)", "the old content is read after it"),
    ],
)
def test_what_cannot_lie_over_its_input_is_planned_as_any_value(body: str, why: str) -> None:
    graph = _graph(body, {"w": "w_next"}, "w_next y")
    assert not any(graph.updates), why
    assert graph.planned[graph.values.index("w_next")]


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_every_order_puts_updates_behind_all_readers(order: str) -> None:
    body = "g = Tanh(x) " + " ".join(f"r{i} = MatMul(w, x)" for i in range(4))
    sums = " a = Add(r0, r1) b = Add(r2, r3) y = Add(a, b) w_next = Sub(w, g)"
    graph = _graph(body + sums, {"w": "w_next"}, "w_next y")
    schedule = ORDERS[order](graph)
    assert sorted(schedule) == list(range(len(graph.nodes)))
    update = next(node for node, pairs in enumerate(graph.updates) if pairs)
    readers = [n for n, reads in enumerate(graph.reads) if graph.values.index("w") in reads and n != update]
    assert all(schedule.index(reader) < schedule.index(update) for reader in readers)


def _moved(graph: Graph, node: int, to: int) -> Graph:
    order = list(range(len(graph.nodes)))
    order.insert(to, order.pop(node))
    return memonger.graph.schedule.schedule_graph(graph, order)


def test_the_checker_refuses_a_reader_behind_the_update() -> None:
    body = "g = Tanh(x) y = MatMul(x, w) w_next = Sub(w, g)"
    graph = _graph(body, {"w": "w_next"}, "w_next y")
    offsets = {value: 64 * k for k, value in enumerate(v for v, p in enumerate(graph.planned) if p)}
    verify(graph, offsets, 256, 64)
    with pytest.raises(VerificationError, match=r"needs 'w', whose bytes 'w_next' has overwritten"):
        verify(_moved(graph, 2, 1), offsets, 256, 64)


def test_the_checker_refuses_updates_that_cannot_be() -> None:
    graph = _graph("g = Tanh(x) y = MatMul(x, w) w_next = Sub(w, g)", {"w": "w_next"}, "w_next y")
    offsets = {value: 64 * k for k, value in enumerate(v for v, p in enumerate(graph.planned) if p)}
    w, new, g = (graph.values.index(name) for name in ("w", "w_next", "g"))

    def changed(*updates: tuple[tuple[int, int], ...]) -> Graph:
        return graph.with_aliases(update=updates)

    for updates, words in [
        (((), ((w, new),), ((w, new),)), "has overwritten before|needs 'w'"),
        (((), (), ((g, new),)), "isn't a persistent input"),
    ]:
        with pytest.raises(VerificationError, match=words):
            verify(changed(*updates), offsets, 256, 64)
    sizes = tuple(size + (value == w) for value, size in enumerate(graph.sizes))
    with pytest.raises(VerificationError, match="they are 64 and 65 bytes"):
        verify(dataclasses.replace(graph, sizes=sizes), offsets, 256, 64)


def test_a_late_update_reaches_its_parameter_all_the_same() -> None:
    """BatchNormalization computes its statistics in one go: they are copied after the run."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]>
        g (float[8,3,4,4] x) => (float loss, float[3] mean_next, float[3] var_next) {
            y, mean_next, var_next = BatchNormalization<training_mode=1, momentum=0.5>(x, scale, bias, mean, var)
            z = Mul(y, y) loss = ReduceMean<keepdims=0>(z)
        }"""
    )
    for name, content in {"scale": 1.0, "bias": 0.5, "mean": 0.0, "var": 1.0}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.full(3, content, np.float32), name))
    training = memonger.differentiate(model, loss="loss", optimizer=memonger.SGD(lr=0.1))
    trainer = memonger.TrainingSession(memonger.search_plan(training))
    x = np.random.default_rng(0).standard_normal((8, 3, 4, 4)).astype(np.float32) + 2
    trainer.step({"x": x})
    np.testing.assert_allclose(trainer.state_dict()["mean"], 0.5 * x.mean((0, 2, 3)), rtol=1e-5)
