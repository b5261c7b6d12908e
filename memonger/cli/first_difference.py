"""The first node of a plan whose output isn't what stock onnxruntime computes there."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from memonger.cli.differences import Tolerance, difference
from memonger.devices import Device
from memonger.graph.schedule import first_values
from memonger.ir.names import fresh
from memonger.ir.operators import facts, operator_name
from memonger.ir.values import dense
from memonger.lowering.device_form import LEVELS
from memonger.model.load import load_as_is
from memonger.plan import Plan
from memonger.plan_file import is_planned
from memonger.runtime import feeds as feeding
from memonger.runtime import ort
from memonger.runtime.arena import ArenaTensor
from memonger.runtime.backend import backend
from memonger.runtime.binding import input_memory
from memonger.runtime.engine import Engine
from memonger.runtime.executable import Executable, LoadedPlan
from memonger.runtime.prepared import SessionGroup, whole
from memonger.runtime.program import expose, program_of
from memonger.runtime.store import Store
from memonger.runtime.weights import LEND_ALL, message, session_of
from memonger.units import MiB

OWN = "its own model run by stock onnxruntime"
Allowed = Callable[[np.ndarray, np.ndarray], bool]


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Where a planned run first leaves a stock one.

    Attributes:
        node: The node's name.
        op: Its operator.
        value: Its output that differs.
        step: Its place in the plan.
        steps: How many there are.
        max_abs_diff: The largest difference of that value; None where it isn't one of numbers.
        against: What it was compared with, in words.
    """

    node: str
    op: str
    value: str
    step: int
    steps: int
    max_abs_diff: float | None
    against: str

    def __str__(self) -> str:
        apart = (
            "isn't comparable with" if self.max_abs_diff is None else f"differs by up to {self.max_abs_diff:.2g} from"
        )
        return (
            f"The first node that differs is '{self.node}' ({self.op}), step {self.step} of {self.steps}: its output "
            f"'{self.value}' {apart} that of {self.against}."
        )


def explain(plan: Plan, where: FirstDifference | None) -> str:
    """Where the first difference is, and what may be behind it."""
    sentences = ["No value that both compute on the way was seen to differ." if where is None else str(where)]
    level = "disable" if plan.stamp is None else plan.stamp.level
    if LEVELS.get(level) != LEVELS["disable"] and (where is None or where.against != OWN):
        sentences.append("onnxruntime's optimizer merged nodes: --device none, unplanned, compares more of them.")
    drawing = next((node for node in plan.model.graph if facts(node).random), None)
    if drawing is not None:
        sentences.append(
            f"'{drawing.name}' ({operator_name(drawing)}) draws random numbers: sessions agree only if it has a seed."
        )
    if level == "rewrite":
        sentences.append(
            "Convolutions of this plan run in faster kernels than stock's, which add in another order: compare with "
            "--rtol, or plan with --level disable."
        )
    return " ".join(sentences)


def find(
    plan: Plan, stock: Path, feeds: feeding.Feeds, device: Device, threads: int, tolerance: Tolerance
) -> FirstDifference | None:
    """Run both with their intermediate values, and compare these in the planned order.

    A portable plan is compared with the stock model, value by value of the same name. A device plan is compared with
    its own model run by stock onnxruntime; where that agrees, and so the fault isn't in how the plan is run, with the
    stock model, beyond what another optimization level rounds differently.

    Args:
        plan: The plan.
        stock: The model that stock onnxruntime ran.
        feeds: The inputs of both.
        device: Where to run.
        threads: Threads within a node of the planned run.
        tolerance: What values may differ by.

    Returns: the first that differs; None where none of the values that both have does.
    """
    theirs = load_as_is(stock).ir
    is_own = is_planned(theirs)
    words = OWN if is_own else f"{stock.name} run by stock onnxruntime, nothing optimized"
    if plan.stamp is None:
        return _first(plan, theirs, feeds, device, threads, tolerance.takes, words)
    difference = _first(plan, plan.model, feeds, device, threads, tolerance.takes, OWN)
    if difference is not None or is_own:
        return difference
    allowed = _rounding if tolerance.is_exact else tolerance.takes
    return _first(plan, theirs, feeds, device, threads, allowed, words)


def _rounding(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Whether two arrays of one shape are as near as those of two optimization levels: half of their digits."""
    if ours.dtype.kind not in "fc":
        return np.array_equal(ours, theirs)
    scale = float(np.nanmax(np.abs(theirs), initial=0.0))
    return np.allclose(ours, theirs, rtol=0.0, atol=scale * float(np.finfo(ours.dtype).eps) ** 0.5, equal_nan=True)


def _first(
    plan: Plan, model: ir.Model, feeds: feeding.Feeds, device: Device, threads: int, allowed: Allowed, words: str
) -> FirstDifference | None:
    stock_names = _values_of(model)
    firsts = {str(copy.name): str(first.name) for copy, first in first_values(plan.model).items()}
    shared = {n for n in _values_of(plan.model) if n in stock_names or firsts.get(n, n) in stock_names}
    producer = {value.name: node for node in plan.model.graph for value in node.outputs}
    for part in _parts(plan, shared):
        of_stock = {name: name if name in stock_names else firsts[name] for name in part}
        ours = _planned_values(plan, part, feeds, device, threads)
        theirs = _stock_values(model, list(of_stock.values()), feeds, device)
        for name in part:
            mine, stock = ours[name], theirs[of_stock[name]]
            if mine.shape != stock.shape or mine.dtype != stock.dtype or allowed(mine, stock):
                continue  # of another shape or type: a value of another layout that has the name
            gap, node = difference({name: mine}, {name: stock}), producer[name]
            step = plan.graph.nodes.index(str(node.name)) + 1
            return FirstDifference(
                str(node.name), operator_name(node), name, step, len(plan.graph.nodes), gap.max_abs_diff, words
            )  # fmt: skip
    return None


AT_ONCE = 256 * MiB
"""Bytes of values that are kept beside one run. Where there are more, the model runs again for the next ones."""


def _parts(plan: Plan, names: Collection[str]) -> Iterator[list[str]]:
    """Planned values among ``names`` in the order they are written, as many at a time as `AT_ONCE` takes."""
    graph, part, size = plan.graph, list[str](), 0
    for value in (value for writes in graph.writes for value in writes):
        if value not in plan.offsets or graph.values[value] not in names:
            continue
        if part and size + graph.sizes[value] > AT_ONCE:
            yield part
            part, size = [], 0
        part.append(graph.values[value])
        size += graph.sizes[value]
    if part:
        yield part


def _planned_values(
    plan: Plan, names: Sequence[str], feeds: feeding.Feeds, device: Device, threads: int
) -> dict[str, np.ndarray]:
    """Run a plan, and copy values right after they were written: others may be written over them in the arena.

    The copies are made by a node behind each of these, and lie behind the arena. Inputs that persist in a training
    session are ordinary inputs here, with their defaults.

    Args:
        plan: Not verified: whoever looks for a fault may have one.
        names: Planned values.
        feeds: The inputs, as of `memonger.Session`.
        device: Where to run.
        threads: Threads within a node; 0 is the plan's own.

    Raises:
        SessionError: as `memonger.Session.run`.
    """
    program, model = program_of(plan), plan.model.clone()
    copies = _copies(model, names)
    store = Store((tensor for tensor in program.planned if tensor.name in copies), device)
    end = -(-plan.arena_bytes // plan.alignment) * plan.alignment
    arena = backend(device).arena(end + store.nbytes)
    kept = tuple(
        ArenaTensor(copies[name], tensor.dtype, tensor.shape, end + tensor.offset)
        for name, tensor in store.tensors.items()
    )
    program = replace(program, outputs=tuple(copies.values()), planned=(*program.planned, *kept))
    expose(model, program.planned)
    group = SessionGroup(message(model), (0,), (program,))
    cuda = plan.stamp.cuda if plan.stamp is not None else None
    engine = Engine(group, device, threads or plan.threads, False, cuda)
    executable = Executable(LoadedPlan(whole(program), (engine,)), arena, inputs_at=input_memory([program], device))
    executable.run(executable.checked(feeds))
    found = executable.results({}, copy=True)
    return {name: found[copy] for name, copy in copies.items()}


def _copies(model: ir.Model, names: Sequence[str]) -> dict[str, str]:
    """Put a copying node behind each value, in place; the name of each copy."""
    graph, wanted, copies = model.graph, set(names), dict[str, str]()
    taken = {str(value.name) for node in graph for value in node.outputs} | {str(v.name) for v in graph.inputs}
    taken |= set(graph.initializers) | {str(node.name) for node in graph}
    model.opset_imports.setdefault("", 20)
    for node in list(graph):
        for value in node.outputs:
            if value.name not in wanted:
                continue
            name = fresh(f"{value.name}.seen", taken)
            copying = ir.Node("", "Identity", [value], name=name)
            copying.outputs[0].name, copying.outputs[0].type, copying.outputs[0].shape = name, value.type, value.shape
            graph.insert_after(node, copying)
            copies[str(value.name)] = name
    return copies


def _stock_values(model: ir.Model, names: Sequence[str], feeds: feeding.Feeds, device: Device) -> dict[str, np.ndarray]:
    """Run a model on stock onnxruntime with nothing optimized, these values among its outputs.

    Raises:
        SessionError: onnxruntime refuses the model, or the run fails.
    """
    copy = model.clone()
    copy.metadata_props.clear()
    wanted = set(names)
    found = [value for node in copy.graph for value in node.outputs if value.name in wanted]
    copy.graph.outputs[:] = found
    session = session_of(copy, device, ort.SessionSettings(entries=ort.RUN_ONCE), LEND_ALL)
    fetched = [str(value.name) for value in found]
    return dict(zip(fetched, session.run(fetched, dict(feeds)), strict=True))


def _values_of(model: ir.Model) -> set[str]:
    """Names of the values that nodes of a model write, ordinary tensors of whole bytes."""
    return {
        str(value.name)
        for node in model.graph
        for value in node.outputs
        if value.name
        and (value.type is None or (dense(value) and value.dtype is not None and value.dtype.bitwidth >= 8))
    }
