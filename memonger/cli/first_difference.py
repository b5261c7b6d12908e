"""The first node of a plan whose output isn't what stock onnxruntime computes there."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from memonger.cli.differences import Tolerance, difference
from memonger.devices import Device
from memonger.graph.schedule import first_values
from memonger.ir.operators import facts, operator_name
from memonger.lowering.device_form import LEVELS
from memonger.model.load import load_as_is
from memonger.plan import Plan
from memonger.plan_file import KEY
from memonger.runtime import capture
from memonger.runtime.feeds import Feeds

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
    plan: Plan, stock: Path, feeds: Feeds, device: Device, threads: int, tolerance: Tolerance
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
    is_own = KEY in theirs.metadata_props
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
    plan: Plan, model: ir.Model, feeds: Feeds, device: Device, threads: int, allowed: Allowed, words: str
) -> FirstDifference | None:
    stock_names = capture.values_of(model)
    firsts = {str(copy.name): str(first.name) for copy, first in first_values(plan.model).items()}
    shared = {n for n in capture.values_of(plan.model) if n in stock_names or firsts.get(n, n) in stock_names}
    producer = {value.name: node for node in plan.model.graph for value in node.outputs}
    for part in capture.parts(plan, shared):
        of_stock = {name: name if name in stock_names else firsts[name] for name in part}
        ours = capture.planned_values(plan, part, feeds, device, threads)
        theirs = capture.stock_values(model, list(of_stock.values()), feeds, device)
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
