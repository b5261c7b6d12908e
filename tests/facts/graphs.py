"""Checks of CUDA graphs: what may be captured, several of them, and what a replay reads and writes."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from memonger.devices import Device
from tests.facts.device import Place, Wish, bind, driver, open_session, place, short
from tests.facts.fact import Fact, judged
from tests.facts.memory import External
from tests.facts.order import graph, one_fallback, without_fallback

SHIFTS = 16  # places of the register that counts executions
RUNS = 4  # the provider warms up before it captures
LIKE = np.zeros((64, 64), np.float32)


def _options(number: int) -> Any:
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(number))
    return options


def _value(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(LIKE.shape).astype(np.float32)


def _copying(device: Device) -> Any:
    """y = x by a copy, which is real on a stand-in too."""
    model = graph([helper.make_node("Identity", ["x"], ["y"], name="copy")], ["x"], ["y"])
    return open_session(model, device, Wish(options={"enable_cuda_graph": "1"}))


def _run(session: Any, binding: Any, number: int | None = None, times: int = RUNS) -> None:
    for _ in range(times):
        session.run_with_iobinding(binding, _options(number) if number is not None else None)


def check_replay(device: Device) -> Iterator[Fact]:
    """One graph: fixed addresses, new content, then other addresses."""
    unit, session = driver(device), _copying(device)
    x, y = place(device, LIKE, _value(0)), place(device, LIKE)
    binding = bind(session, device, {"x": x}, {"y": y})
    _run(session, binding)
    unit.write(x.address, _value(1))
    unit.fill(y.address, LIKE.nbytes)
    _run(session, binding, times=1)
    same = np.array_equal(unit.read(y.address, LIKE), _value(1))
    yield judged("a replay reads what then lies at the addresses", f"new content arrived: {same}", same)
    other_x, other_y = place(device, LIKE, _value(2)), place(device, LIKE)
    unit.fill(y.address, LIKE.nbytes)
    _run(session, bind(session, device, {"x": other_x}, {"y": other_y}), times=1)
    moved = np.array_equal(unit.read(other_y.address, LIKE), _value(2))
    stayed = np.array_equal(unit.read(y.address, LIKE), _value(1))
    yield judged(
        "bound to other addresses, a captured graph goes on with the old ones and says nothing",
        f"new output written: {moved}; old output written: {stayed}",
        stayed and not moved,
    )


def check_executions(device: Device) -> Iterator[Fact]:
    """How often a run with capture does its work: a register of values that each execution shifts by one place."""
    names = [f"x{i}" for i in range(SHIFTS)]
    nodes = [helper.make_node("Identity", [source], [f"y{i}"], name=f"shift{i}") for i, source in enumerate(names[1:])]
    model = graph(nodes, names, [f"y{i}" for i in range(SHIFTS - 1)])
    session = open_session(model, device, Wish(options={"enable_cuda_graph": "1"}))
    values = {name: place(device, LIKE, np.full_like(LIKE, i)) for i, name in enumerate(names)}
    outputs = {f"y{i}": values[name] for i, name in enumerate(names[:-1])}
    binding, seen = bind(session, device, values, outputs), [0]
    for _ in range(3):
        _run(session, binding, times=1)
        seen.append(int(driver(device).read(values["x0"].address, LIKE)[0, 0]))
    counts = [after - before for before, after in itertools.pairwise(seen)]
    yield judged(
        "every run executes the model once: an update in place is made once",
        f"executions in the first runs: {', '.join(map(str, counts))}",
        counts == [1, 1, 1],
    )


def check_several_graphs(device: Device) -> Iterator[Fact]:
    """Several gpu_graph_ids in one session, and -1."""
    unit, session = driver(device), _copying(device)
    places = {k: (place(device, LIKE, _value(k)), place(device, LIKE)) for k in (1, 2, 3)}
    bindings = {k: bind(session, device, {"x": x}, {"y": y}) for k, (x, y) in places.items()}
    for number, binding in bindings.items():
        _run(session, binding, number)
    for _, y in places.values():
        unit.fill(y.address, LIKE.nbytes)
    right = []
    for number, binding in bindings.items():
        _run(session, binding, number, times=1)
        right.append(np.array_equal(unit.read(places[number][1].address, LIKE), _value(number)))
    yield judged("several gpu_graph_ids in one session keep their own addresses", f"{sum(right)} of 3", all(right))
    yield _uncaptured(device, session, places)


def _uncaptured(device: Device, session: Any, places: dict[int, tuple[Place, Place]]) -> Fact:
    unit = driver(device)
    x, y = place(device, LIKE, _value(9)), place(device, LIKE)
    _run(session, bind(session, device, {"x": x}, {"y": y}), -1, times=1)
    done = np.array_equal(unit.read(y.address, LIKE), _value(9))
    return judged("gpu_graph_id -1 runs without a graph, at any address, in a session that has some", f"{done}", done)


def _shape_model() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="relu"),
        helper.make_node("Shape", ["a"], ["s"], name="shape"),
        helper.make_node("Reshape", ["a", "s"], ["y"], name="reshape"),
    ]
    return graph(nodes, ["x"], ["y"])


def _all_on_cpu() -> onnx.ModelProto:
    return graph([helper.make_node("Tan", ["x"], ["y"], name="tan")], ["x"], ["y"])


def host_arithmetic() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], name="shape"),
        helper.make_node("Gather", ["s", "zero"], ["n"], name="gather"),
        helper.make_node("Concat", ["n", "minus"], ["target"], name="concat", axis=0),
        helper.make_node("Reshape", ["x", "target"], ["a"], name="reshape"),
        helper.make_node("Relu", ["a"], ["y"], name="relu"),
    ]
    model = graph(nodes, ["x"], ["y"])
    model.graph.initializer.append(helper.make_tensor("zero", TensorProto.INT64, [1], [0]))
    model.graph.initializer.append(helper.make_tensor("minus", TensorProto.INT64, [1], [-1]))
    return model


def _condition() -> onnx.ModelProto:
    bodies = {}
    for name, op in (("then_branch", "Relu"), ("else_branch", "Exp")):
        out = helper.make_tensor_value_info(name, TensorProto.FLOAT, [64, 64])
        bodies[name] = helper.make_graph([helper.make_node(op, ["x"], [name], name=op)], name, [], [out])
    model = graph([helper.make_node("If", ["c"], ["y"], name="if", **bodies)], ["x"], ["y"])
    model.graph.initializer.append(helper.make_tensor("c", TensorProto.BOOL, [], [True]))
    return model


CASES: Sequence[tuple[str, Callable[[], onnx.ModelProto]]] = (
    ("all nodes on CUDA", without_fallback),
    ("one node on the CPU between Memcpy nodes", one_fallback),
    ("nodes on the CPU alone", _all_on_cpu),
    ("a Shape node", _shape_model),
    ("arithmetic of shapes, which onnxruntime puts on the CPU", host_arithmetic),
    ("an If", _condition),
)


def check_refusals(device: Device) -> Iterator[Fact]:
    """Which models a session with enable_cuda_graph takes, and whether its later runs ask for memory."""
    for name, make in CASES:
        yield Fact(f"enable_cuda_graph, {name}", _attempt(make(), device))


def _attempt(model: onnx.ModelProto, device: Device) -> str:
    unit = driver(device)
    try:
        session = open_session(model, device, Wish(options={"enable_cuda_graph": "1"}))
    except Exception as error:  # pybind exceptions share no base class
        return f"refused when the session is made: {short(error, 320)}"
    binding = bind(session, device, {"x": place(device, LIKE, _value(0))}, {"y": place(device, LIKE)})
    try:
        _run(session, binding)
        before = unit.used()
        _run(session, binding, times=1)
    except Exception as error:  # likewise
        return f"made, and fails in a run: {short(error, 320)}"
    return f"made and run; the fifth run takes {unit.used() - before} bytes of the device"


def check_allocation(device: Device) -> Iterator[Fact]:
    """An external allocator under capture: one that asks the driver each time, with and without something to ask."""
    for name, bound in (("all values bound", True), ("an unbound value in the middle", False)):
        external = External(driver(device))
        session = _chain(device, bound, external)
        outputs = {value.name: place(device, LIKE) for value in session.get_outputs()}
        binding = bind(session, device, {"x": place(device, LIKE, _value(0))}, outputs)
        external.asked.clear()
        try:
            _run(session, binding)
            seen = f"runs; asks {sum(size > 0 for size in external.asked)} times in {RUNS} runs"
        except Exception as error:  # likewise
            seen = f"fails in a run: {short(error)}"
        refused = f"; {external.refused} allocations refused while a stream was captured" if external.refused else ""
        yield Fact(f"a capture with an external allocator that calls cuMemAlloc, {name}", seen + refused)


def _chain(device: Device, bound: bool, external: External) -> Any:
    model = without_fallback()
    if bound:
        names = [name for node in model.graph.node for name in node.output if name != "y"]
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return open_session(model, device, Wish(options={"enable_cuda_graph": "1", **external.options()}))


def check_unbound(device: Device) -> Iterator[Fact]:
    """session.run with numpy arrays under enable_cuda_graph."""
    session = _copying(device)
    seen = []
    for seed in range(RUNS + 1):
        try:
            found = session.run(None, {"x": _value(seed)})
        except Exception as error:  # likewise
            seen.append(f"fails: {short(error)}")
            continue
        if not found:
            seen.append("returns no output")
        else:
            seen.append("right" if np.array_equal(found[0], _value(seed)) else "wrong values")
    claim = "session.run with numpy arrays under enable_cuda_graph gives the right values"
    yield judged(claim, f"run by run: {', '.join(seen)}", seen == ["right"] * len(seen))
