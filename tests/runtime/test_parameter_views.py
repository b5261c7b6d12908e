"""Parameters under another shape, as a gradient's product reads a convolution's weight: they lie where they are."""

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

import memonger
from memonger.errors import VerificationError
from memonger.graph.graph import Graph, from_model
from memonger.graph.schedule import schedule_graph
from memonger.graph.verify import verify
from memonger.ir.model import Model
from memonger.ir.names import name_nodes
from memonger.ir.training_roles import Training
from memonger.schedule.reduction import deadlines
from tests.support import networks

POINTWISE = """<ir_version: 10, opset_import: ["": 20]> g (float[2,8,5,5] x) => (float l)
    <float[16,8,1,1] v, float[8,16,1,1] w> {
        a = Conv(x, v)
        b = Tanh(a)
        c = Conv(b, w)
        d = Tanh(c)
        l = ReduceSumSquare<keepdims=0>(d) }"""


@pytest.fixture
def model() -> memonger.Model:
    generator, forward = np.random.default_rng(3), onnx.parser.parse_model(POINTWISE)
    for name, shape in (("v", (16, 8, 1, 1)), ("w", (8, 16, 1, 1))):
        forward.graph.initializer.append(onnx.numpy_helper.from_array(_numbers(generator, shape), name))
    return memonger.differentiate(forward, loss="l", optimizer=memonger.SGD(0.1, momentum=0.9))


def _numbers(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return generator.standard_normal(shape).astype(np.float32)


def _views(graph: Graph) -> dict[str, str]:
    return {graph.values[part]: graph.values[whole] for part, whole, _ in graph.kept}


def _named(text: str) -> ir.Model:
    """A model of which all nodes have names."""
    model = ir.from_proto(onnx.parser.parse_model(text))
    name_nodes(Model(model, "test"))
    return model


def _roles(plan: memonger.Plan) -> Training:
    assert plan.training is not None
    return plan.training


@pytest.mark.parametrize("strategy", ["none", "log"])
def test_a_view_of_a_parameter_takes_no_bytes_and_runs_no_node(model: memonger.Model, strategy: str) -> None:
    plan = memonger.search_plan(model, device="cpu", mode="training", strategy=strategy)
    assert "w" in _views(plan.graph).values()
    assert not any(plan.graph.planned[part] for part, *_ in plan.graph.kept)
    trainer = memonger.TrainingSession(plan)
    run = {node.name for engine in trainer.engines for node in engine.session.get_inputs()}
    assert run >= _views(plan.graph).keys()

    stock = networks.stock(ir.to_proto(plan.model), "ORT_DISABLE_ALL")
    inputs = [*stock.get_inputs(), *stock.get_overridable_initializers()]
    generator, updates = np.random.default_rng(0), _roles(plan).updates
    state = {name: array for name, array in trainer.state_dict().items() if name in updates}
    for _ in range(3):
        x = _numbers(generator, (2, 8, 5, 5))
        feeds = {"x": x, **state, "learning_rate": np.array(0.1, np.float32)}
        given = {value.name: feeds[value.name] for value in inputs if value.name in feeds}
        after = dict(zip((v.name for v in stock.get_outputs()), stock.run(None, given), strict=True))
        assert trainer.step({"x": x}) == after[str(_roles(plan).loss)]
        state = {name: after[new] for name, new in updates.items()}
        for name, array in trainer.state_dict().items():
            if name in state:
                np.testing.assert_array_equal(array, state[name], err_msg=name)


def test_who_reads_a_view_comes_before_what_writes_over_the_parameter() -> None:
    text = """<ir_version: 10, opset_import: ["": 20]> g (float[4,1] w, float l)
        => (float[4,1] new, float m, float[4] y) <int64[1] flat = {4}, float[4] a> {
            a = Reshape(w, flat)
            m = Identity(l)
            y = Mul(a, a)
            new = Add(w, w) }"""
    graph = from_model(_named(text), updates={"w": "new"}, after=["m"])
    assert _views(graph) == {"a": "w"}
    assert [graph.values[value] for value in graph.overwritten[3]] == ["w", "a"]
    assert deadlines(graph) == (3, 4, 3, 4)
    offsets = {graph.values.index("m"): 0, graph.values.index("y"): 64}
    verify(graph, offsets, 128, 64)
    for ties in (
        graph.runtime_aliases,
        ((),) * 4,
    ):  # without an alias that the runtime may hold the bytes are lost as well
        wrong = schedule_graph(graph.with_aliases(runtime=ties), [0, 1, 3, 2])
        with pytest.raises(VerificationError, match="whose bytes 'new' has overwritten"):
            verify(wrong, offsets, 128, 64)


def test_an_update_that_reads_a_view_of_what_it_writes_over_goes_elsewhere() -> None:
    text = """<ir_version: 10, opset_import: ["": 20]> g (float[4,1] w, float l) => (float[4,1] new, float l_next)
        <int64[2] column = {4, 1}, float[4,1] a> {
            a = Reshape(w, column)
            l_next = Identity(l)
            new = Add(a, l) }"""
    graph = from_model(_named(text), updates={"w": "new"}, after=["l_next"])
    assert not any(graph.updates)


def test_other_models_than_training_steps_keep_their_views_planned() -> None:
    text = """<ir_version: 10, opset_import: ["": 20]> g (float[4,1] w) => (float[4] y, float[4,1] w_next)
        <int64[1] shape = {4}, float[4] flat> { flat = Reshape(w, shape) y = Mul(flat, flat) w_next = Add(w, w) }"""
    assert not from_model(_named(text), updates={"w": "w_next"}, apart=["w_next"]).kept
