"""Checks of order: file order, Memcpy nodes, models written and loaded again."""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from memonger.devices import Device
from memonger.runtime.profile import read_profile
from tests.facts.device import CPU, Wish, feeds, open_session, short
from tests.facts.fact import FAILS, HOLDS, Fact, judged
from tests.facts.networks import inference, training

FLOATING = ("Shape", "Size")  # run as soon as they can
NO_KERNEL = "Tan"  # on CUDA
ORDERS = 12  # tried of each model


@dataclass(frozen=True, slots=True)
class Reloaded:
    """A model that onnxruntime has written, and how it ran when it was loaded again.

    `order` holds the names of its nodes as they ran, without those that run as soon as they can.
    """

    nodes: tuple[onnx.NodeProto, ...]
    first: tuple[str, ...]
    order: tuple[str, ...]
    unchanged: bool
    on_cpu: Counter[str]

    @property
    def written(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.nodes if node.op_type not in FLOATING)

    @property
    def memcpy(self) -> int:
        return sum(node.op_type.startswith("Memcpy") for node in self.nodes)


def reload(path: str, device: Device, level: str, folder: Path) -> Reloaded:
    """Write what onnxruntime makes of a model, load that with nothing optimized, and run both once in file order."""
    written, again = str(folder / "written.onnx"), str(folder / "again.onnx")
    first = _ran(path, device, Wish(level, optimized=written, profile=str(folder / "first")))
    model = onnx.load(written)
    for number, node in enumerate(model.graph.node):
        node.name = node.name or f"node{number}"
    onnx.save(model, written)
    order = _ran(written, device, Wish(optimized=again, profile=str(folder / "second")))
    kept = [(n.name, n.op_type, tuple(n.input)) for n in onnx.load(again).graph.node]
    return Reloaded(
        nodes=tuple(model.graph.node),
        first=tuple(name for name, op, _ in first if op not in FLOATING),
        order=tuple(name for name, op, _ in order if op not in FLOATING),
        unchanged=kept == [(n.name, n.op_type, tuple(n.input)) for n in model.graph.node],
        on_cpu=Counter(op for _, op, provider in order if provider == CPU),
    )


def _ran(path: str, device: Device, wish: Wish) -> list[tuple[str, str, str]]:
    session = open_session(path, device, wish)
    session.run(None, feeds(session))
    return [(run.name, run.op, run.provider) for run in read_profile(Path(session.end_profiling()))]


def graph(nodes: Sequence[onnx.NodeProto], inputs: Sequence[str], outputs: Sequence[str]) -> onnx.ModelProto:
    """A model of single-precision values of shape [64, 64]."""
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [64, 64]) for name in (*inputs, *outputs)]
    made = helper.make_graph(list(nodes), "order", info[: len(inputs)], info[len(inputs) :])
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def unary(op: str, source: str, target: str) -> onnx.NodeProto:
    return helper.make_node(op, [source], [target], name=f"{op}_{target}")


def one_fallback() -> onnx.ModelProto:
    """CUDA, CPU, CUDA."""
    return graph([unary("Relu", "x", "a"), unary(NO_KERNEL, "a", "b"), unary("Relu", "b", "y")], ["x"], ["y"])


def branches(interleaved: bool) -> onnx.ModelProto:
    """Five branches that each leave the device and come back, written one after the other or in layers."""
    ops = ("Relu", NO_KERNEL, "Sigmoid", NO_KERNEL, "Exp")
    steps = [[unary(op, "x" if i == 0 else f"v{b}_{i - 1}", f"v{b}_{i}") for i, op in enumerate(ops)] for b in range(5)]
    nodes = [step for layer in zip(*steps, strict=True) for step in layer] if interleaved else list(chain(*steps))
    last = [f"v{b}_{len(ops) - 1}" for b in range(5)]
    return graph([*nodes, helper.make_node("Sum", last, ["y"], name="sum")], ["x"], ["y"])


def shared_fallbacks() -> onnx.ModelProto:
    """One host value read by several nodes on the device, an input read on both sides, device work in between."""
    nodes = [
        unary(NO_KERNEL, "x", "host"),
        unary("Relu", "x", "a"),
        unary("Exp", "a", "b"),
        helper.make_node("Add", ["host", "a"], ["c"], name="add_c"),
        helper.make_node("Mul", ["host", "b"], ["d"], name="mul_d"),
        unary(NO_KERNEL, "d", "e"),
        unary(NO_KERNEL, "host", "f"),
        helper.make_node("Sum", ["c", "e", "f", "a"], ["y"], name="sum"),
    ]
    return graph(nodes, ["x"], ["y"])


def without_fallback() -> onnx.ModelProto:
    nodes = [unary("Relu", "x", "a"), unary("Exp", "x", "b"), unary("Sigmoid", "a", "c")]
    return graph([*nodes, helper.make_node("Sum", ["b", "c"], ["y"], name="sum")], ["x"], ["y"])


SMALL: dict[str, Callable[[], onnx.ModelProto]] = {
    "no fallback": without_fallback,
    "one operator in the middle on the CPU": one_fallback,
    "five branches with two on the CPU each, one after the other": lambda: branches(False),
    "five branches with two on the CPU each, in layers": lambda: branches(True),
    "a host value read by several nodes, and an input on both sides": shared_fallbacks,
}


def check_order(device: Device) -> Iterator[Fact]:
    """File order, with and without Memcpy nodes, at first load and reloaded."""
    for name, make in SMALL.items():
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "model.onnx")
            onnx.save(make(), path)
            yield from _order_facts(name, reload(path, device, "ORT_DISABLE_ALL", Path(folder)), list(_names(path)))


def check_any_order(device: Device) -> Iterator[Fact]:
    """What onnxruntime wrote, put into other orders that are as valid, runs in those."""
    small = ((name, lambda folder, make=make: _saved(make(), folder)) for name, make in SMALL.items())
    for name, save in chain(small, training(iter(["gpt"]))):
        with tempfile.TemporaryDirectory() as folder:
            reload(save(Path(folder)), device, "ORT_DISABLE_ALL", Path(folder))
            model = onnx.load(str(Path(folder) / "written.onnx"))
            orders = ORDERS if len(model.graph.node) < 100 else 2
            ran = [_in_order(model, seed, device, Path(folder)) for seed in range(orders)]
        for which, claim in enumerate(
            ("each provider's nodes keep the file's order among themselves", "all nodes run in the file's order")
        ):
            kept = sum(result[which] for result in ran)
            yield judged(
                f"{name}: put into other valid orders by hand, {claim} (Memcpy nodes are CUDA's)",
                f"{kept} of {len(ran)} orders of {len(model.graph.node)} nodes",
                kept == len(ran),
            )


def _saved(model: onnx.ModelProto, folder: Path) -> str:
    path = str(folder / "model.onnx")
    onnx.save(model, path)
    return path


def _shuffle(model: onnx.ModelProto, seed: int) -> tuple[str, ...]:
    """Names of the nodes in a random order in which every value is written before it is read."""
    random = np.random.default_rng(seed)
    left = {node.name: node for node in model.graph.node}
    order: list[str] = []
    while left:
        missing = {name for node in left.values() for name in node.output}
        ready = [name for name, node in left.items() if not missing.intersection(node.input)]
        order.append(ready[int(random.integers(len(ready)))])
        del left[order[-1]]
    return tuple(order)


def _in_order(model: onnx.ModelProto, seed: int, device: Device, folder: Path) -> tuple[bool, bool]:
    """Whether each provider's nodes ran in a random order's own order, and whether all of them did."""
    by_name, order = {node.name: node for node in model.graph.node}, _shuffle(model, seed)
    shuffled = onnx.ModelProto()
    shuffled.CopyFrom(model)
    del shuffled.graph.node[:]
    shuffled.graph.node.extend(by_name[name] for name in order)
    path = str(folder / "shuffled.onnx")
    onnx.save(shuffled, path)
    ran = _ran(path, device, Wish(profile=str(folder / "shuffled")))
    where = {name: provider for name, _, provider in ran}
    lanes = [[name for name in order if where[name] == provider] for provider in sorted(set(where.values()))]
    kept = [[name for name, _, _ in ran if name in lane] == lane for lane in lanes]
    return all(kept), [name for name, _, _ in ran] == list(order)


def _names(path: str) -> Iterator[str]:
    return (node.name for node in onnx.load(path).graph.node)


def _order_facts(name: str, found: Reloaded, source: list[str]) -> Iterator[Fact]:
    kept = [n for n in found.first if n in source] == source
    yield judged(
        f"{name}: at first load the given nodes run in file order, whatever is inserted",
        f"{len(source)} nodes, {found.memcpy} Memcpy nodes inserted; ran {_first_steps(found.first)}",
        kept,
    )
    yield judged(
        f"{name}: what onnxruntime wrote runs in file order at ORT_DISABLE_ALL, Memcpy nodes included",
        f"{len(found.nodes)} nodes written, {len(found.order)} ran; {_break(found)}",
        found.written == found.order and found.unchanged,
    )


def _first_steps(names: Sequence[str]) -> str:
    return " ".join(names[:14]) + (" ..." if len(names) > 14 else "")


def _break(found: Reloaded) -> str:
    if not found.unchanged:
        return "the third load changed it again"
    for step, (a, b) in enumerate(zip(found.written, found.order, strict=False)):
        if a != b:
            return f"order breaks at step {step}: {a} in the file, {b} ran"
    return "same nodes, same order" if found.written == found.order else "not the same nodes"


def check_reload_inference(device: Device) -> Iterator[Fact]:
    """Each family of models/, optimized and reloaded."""
    yield from _reloads(inference(), device, "ORT_ENABLE_ALL", "optimized at ORT_ENABLE_ALL")


def check_reload_training(device: Device) -> Iterator[Fact]:
    """Training steps, reloaded."""
    yield from _reloads(training(), device, "ORT_DISABLE_ALL", "training step at ORT_DISABLE_ALL")


def _reloads(
    models: Iterator[tuple[str, Callable[[Path], str]]], device: Device, level: str, what: str
) -> Iterator[Fact]:
    for name, save in models:
        claim = f"{name}, {what}: reloads node for node and runs in file order"
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = reload(save(Path(folder)), device, level, Path(folder))
            except Exception as error:  # pybind exceptions share no base class
                yield Fact(claim, short(error), FAILS)
                continue
        cpu = ", ".join(f"{count} {op}" for op, count in sorted(found.on_cpu.items())) or "none"
        seen = f"{len(found.nodes)} nodes, {found.memcpy} Memcpy; on the CPU: {cpu}; {_break(found)}"
        yield Fact(claim, seen, HOLDS if found.written == found.order and found.unchanged else FAILS)
