"""One product in place of several with one weight, in training steps that compute nothing again."""

import dataclasses
import math
from collections.abc import Sequence

import onnx_ir as ir

from memonger.devices import Device
from memonger.graph.graph import Graph
from memonger.graph.liveness import assign_storage, live_bytes
from memonger.ir import training_roles
from memonger.lowering.lowered import Lowered
from memonger.options import Options
from memonger.schedule import Request
from memonger.schedule.decide import Solution, decide, total_bytes
from memonger.tiling.candidates import asked_of
from memonger.tiling.products import JoinedProduct, joined_products
from memonger.tiling.slice_check import CheckedCopy, Elements, SliceCheck

_ROUNDS = 6
"""Models that are written, each without what took too much memory or gave other bits in the one before."""


def with_joined_products(
    lowered: Lowered, request: Request, options: Options, device: Device, strategy: str
) -> tuple[Lowered, Request, Solution] | None:
    """A training step with joined products, where it gives the same bits and nothing has to be computed again.

    Where values are dropped, products stay apart: of a joined one all rows are computed again, or none.

    Args:
        lowered: The step; its nodes are timed, so it runs on the CPU.
        request: What is asked of it.
        options: How to plan.
        device: The plan's.
        strategy: What decides what is recomputed.

    Returns: The step, what is asked of it, and its layout; None where it stays as it is: there is nothing to join, or
        it would take more memory then, or more than the budget.
    """
    if strategy != "none" and (request.budget is None or request.recomputes_marked):
        return None
    roles, most = training_roles.read(lowered.model, str(lowered.model.graph.name)), request.budget
    unlimited = dataclasses.replace(request, budget=None)
    apart, check = set[str](), None
    for _ in range(_ROUNDS):
        model, products = joined_products(lowered.model, apart)
        if not products:
            return None
        check = check or SliceCheck(options.threads, lowered.spent)
        dropped = [each for each in products if _differs(lowered.model, model, each, check)]
        if not dropped:
            if most is None:
                most = total_bytes(request, decide(request, "none", options.order))
            made = _measured(lowered, model, products)
            asked = asked_of(made, lowered.model, unlimited, roles, device)
            solution = decide(asked, "none", options.order)
            if total_bytes(asked, solution) <= most:
                return made, dataclasses.replace(asked, budget=request.budget), solution
            dropped = [_at_peak(solution.graph, products)]
        apart |= {name for each in dropped for name in each.parts}
    return None


def _at_peak(graph: Graph, products: Sequence[JoinedProduct]) -> JoinedProduct:
    """The product that runs nearest to the step with most bytes alive."""
    live = live_bytes(assign_storage(graph).buffers, len(graph.nodes))
    peak, step = int(live.argmax()), {name: number for number, name in enumerate(graph.nodes)}
    return min(products, key=lambda each: abs(step[each.name] - peak))


def _differs(model: ir.Model, joined: ir.Model, product: JoinedProduct, check: SliceCheck) -> bool:
    """Whether a product gives other bits than those that it stands for."""
    whole, total = joined.graph.node(product.name), sum(product.rows)
    copies, begin = list[CheckedCopy](), 0
    for name, rows in zip(product.parts, product.rows, strict=True):
        part = {0: Elements(0, begin, begin + rows)}
        copies.append(CheckedCopy(model.graph.node(name), product.name, rows / total, rows, part, part))
        begin += rows
    return check.see((joined, whole), model, copies).difference > 0


def _measured(lowered: Lowered, model: ir.Model, products: Sequence[JoinedProduct]) -> Lowered:
    """The model with the sum of what was measured of those that each product stands for."""
    measured = lowered.calibration
    assert measured is not None
    seconds, workspace = dict(measured.seconds or {}), dict(measured.workspace or {})
    for product in products:
        seconds[product.name] = math.fsum(seconds.pop(name, 0.0) for name in product.parts)
        if most := sum(workspace.pop(name, 0) for name in product.parts):
            workspace[product.name] = most
    return dataclasses.replace(
        lowered, model=model, calibration=dataclasses.replace(measured, seconds=seconds, workspace=workspace)
    )
