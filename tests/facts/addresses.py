"""Checks of addresses: bound outputs, views, subgraphs, many bindings."""

import itertools
import time
from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto, helper

from memonger.devices import Device
from tests.facts.device import bind, driver, on_cpu, open_session, place
from tests.facts.fact import HOLDS, Fact, judged
from tests.facts.order import graph, one_fallback, unary, without_fallback

LIKE = np.zeros((64, 64), np.float32)
MANY = 2_000  # bound outputs


def check_bound_outputs(device: Device) -> Iterator[Fact]:
    """Every value an output at an address of ours."""
    model = without_fallback()
    names = [name for node in model.graph.node for name in node.output]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name != "y")
    like = np.zeros((64, 64), np.float32)
    x = np.random.default_rng(0).standard_normal(like.shape).astype(np.float32)
    session = open_session(model, device)
    order = [value.name for value in session.get_outputs()]
    memory = {name: place(device, like) for name in order}
    session_binding = bind(session, device, {"x": place(device, like, x)}, memory)
    session.run_with_iobinding(session_binding)
    addresses = [value.data_ptr() for value in session_binding.get_outputs()]
    yield judged(
        "outputs bound to device addresses are where they were bound",
        f"{sum(a == memory[n].address for a, n in zip(addresses, order, strict=True))} of {len(order)}",
        addresses == [memory[name].address for name in order],
    )
    expected = dict(zip(order, on_cpu(model).run(order, {"x": x}), strict=True))
    found = {name: driver(device).read(at.address, like) for name, at in memory.items()}
    worst = max(float(np.abs(found[name] - expected[name]).max()) for name in order)
    yield judged(
        "and their values are written there",
        f"largest difference from the CPU's {worst:.1e}",
        worst < 1e-4,
        driver(device).is_real,
    )
    yield from _copied(device, like, x)


def _copied(device: Device, like: np.ndarray, x: np.ndarray) -> Iterator[Fact]:
    """Copies are real on a stand-in too: so is where they go."""
    at, target = place(device, like, x), place(device, like)
    session = open_session(graph([unary("Identity", "x", "y")], ["x"], ["y"]), device)
    session.run_with_iobinding(bind(session, device, {"x": at}, {"y": target}))
    same = driver(device).read(target.address, like).tobytes() == x.tobytes()
    yield judged("a copy (Identity) writes its bound output, between two addresses", f"same bytes: {same}", same)
    session.run_with_iobinding(bind(session, device, {"x": at}, {"y": at}))
    kept = driver(device).read(at.address, like).tobytes() == x.tobytes()
    yield judged("a copy onto itself, both ends at one address, is harmless", f"same bytes: {kept}", kept)
    session = open_session(one_fallback(), device)
    session.run_with_iobinding(bind(session, device, {"x": at}, {"y": target}))
    yield Fact("a model with nodes on the CPU runs with inputs and outputs bound to the device", "it does", HOLDS)


def _value(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(LIKE.shape).astype(np.float32)


def check_special_outputs(device: Device) -> Iterator[Fact]:
    """Outputs that are inputs, views, or come out of subgraphs. All by copies, which are real on a stand-in too."""
    yield _input_as_output(device)
    yield _unbound_view(device)
    yield from _subgraphs(device)
    yield _many(device)


def _input_as_output(device: Device) -> Fact:
    unit, model = driver(device), graph([unary("Identity", "x", "y")], ["x"], ["y"])
    model.graph.output.add().CopyFrom(model.graph.input[0])
    session = open_session(model, device)
    x, target = place(device, LIKE, _value(0)), place(device, LIKE)
    session.run_with_iobinding(bind(session, device, {"x": x}, {"y": place(device, LIKE), "x": target}))
    written = unit.read(target.address, LIKE).tobytes() == _value(0).tobytes()
    return judged("a graph input that is also an output isn't written to its bound address", f"{written=}", not written)


def _unbound_view(device: Device) -> Fact:
    """A view that nobody bound is read after its source's bytes were overwritten."""
    unit = driver(device)
    nodes = [
        unary("Identity", "x", "a"),
        helper.make_node("Reshape", ["a", "shape"], ["view"], name="reshape"),
        unary("Identity", "other", "b"),
        unary("Identity", "view", "y"),
    ]
    model = graph(nodes, ["x", "other"], ["a", "b", "y"])
    model.graph.initializer.append(helper.make_tensor("shape", TensorProto.INT64, [2], [64, 64]))
    session, at, y = open_session(model, device), place(device, LIKE), place(device, LIKE)
    inputs = {"x": place(device, LIKE, _value(0)), "other": place(device, LIKE, _value(1))}
    session.run_with_iobinding(bind(session, device, inputs, {"a": at, "b": at, "y": y}))
    alias = unit.read(y.address, LIKE).tobytes() == _value(1).tobytes()
    return judged(
        "an unbound Reshape of a bound value is an alias of it", f"it changed with its source: {alias}", alias
    )


def _subgraphs(device: Device) -> Iterator[Fact]:
    unit = driver(device)
    for name, model in (("If", _if_model()), ("Loop", _loop_model())):
        session, y = open_session(model, device), place(device, LIKE)
        binding = bind(session, device, {"x": place(device, LIKE, _value(0))}, {"y": y})
        session.run_with_iobinding(binding)
        written = unit.read(y.address, LIKE).tobytes() == _value(0).tobytes()
        yield judged(f"a bound output of {name} is written to its address", f"{written=}", written)


def _if_model() -> onnx.ModelProto:
    out = helper.make_tensor_value_info("inner", TensorProto.FLOAT, [64, 64])
    body = helper.make_graph([unary("Identity", "x", "inner")], "body", [], [out])
    model = graph([helper.make_node("If", ["c"], ["y"], name="if", then_branch=body, else_branch=body)], ["x"], ["y"])
    model.graph.initializer.append(helper.make_tensor("c", TensorProto.BOOL, [], [True]))
    return model


def _loop_model() -> onnx.ModelProto:
    inputs = [
        helper.make_tensor_value_info("i", TensorProto.INT64, []),
        helper.make_tensor_value_info("go", TensorProto.BOOL, []),
        helper.make_tensor_value_info("v", TensorProto.FLOAT, [64, 64]),
    ]
    outputs = [helper.make_tensor_value_info("on", TensorProto.BOOL, [])]
    outputs.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [64, 64]))
    body = helper.make_graph([unary("Identity", "go", "on"), unary("Identity", "v", "w")], "body", inputs, outputs)
    model = graph([helper.make_node("Loop", ["n", "", "x"], ["y"], name="loop", body=body)], ["x"], ["y"])
    model.graph.initializer.append(helper.make_tensor("n", TensorProto.INT64, [], [3]))
    return model


def _many(device: Device) -> Fact:
    """A chain with every value bound, against the same chain with its end alone."""
    names = ["x", *(f"v{i}" for i in range(MANY - 1)), "y"]
    nodes = [unary("Relu", a, b) for a, b in itertools.pairwise(names)]
    seen = []
    for kept in (names[1:], ["y"]):
        model = graph(nodes, ["x"], kept)
        session, at = open_session(model, device), place(device, LIKE)
        begin = time.perf_counter()
        binding = bind(session, device, {"x": at}, dict.fromkeys(kept, at))
        bound = time.perf_counter() - begin
        session.run_with_iobinding(binding)
        begin = time.perf_counter()
        session.run_with_iobinding(binding)
        driver(device).wait()
        ran = time.perf_counter() - begin
        seen.append(f"{len(kept)} bound: {bound * 1e3:.1f} ms to bind, {ran * 1e3:.1f} ms a run")
    return Fact(f"what binding costs, {MANY} nodes in a row", "\n".join(seen))
