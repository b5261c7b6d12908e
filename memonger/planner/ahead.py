"""A plan that copies weights from the host in order, made into one that copies them ahead (`memonger.graph.ahead`)."""

import dataclasses

import onnx_ir as ir

from memonger.graph.ahead import begins, cost
from memonger.graph.liveness import Sharing, live_bytes
from memonger.graph.schedule import schedule_model
from memonger.graph.weight_window import COPY
from memonger.ir.marks import AHEAD
from memonger.plan import Plan
from memonger.runtime.partition import may_run_ahead
from memonger.schedule.solution import lay_out
from memonger.schedule.strategy import Outcome, Request

SPARE = 0, 1 / 32, 1 / 8
"""Parts of a budget that are left for gaps of the arena, in turn, where weights lie in the host's memory."""


def copied_ahead(plan: Plan, sharing: Sharing, usual: int) -> Plan | None:
    """The plan with copies ahead, as far as its budget has room for them beside what earlier steps need.

    Args:
        plan: Within its budget, with copies in order. Its own schedule stays, but for these.
        sharing: Which values may share an address.
        usual: Bytes that are copied where all are in order, fewer of them.

    Returns: None where that can't be, or costs no less (`memonger.graph.ahead.cost`).
    """
    weights, graph = plan.host_weights, plan.graph
    if plan.budget is None or plan.recomputed or not weights or not may_run_ahead(plan):
        return None
    nodes = list(plan.model.graph)
    copies = [step for step, node in enumerate(nodes) if node.op_type == COPY and _weight(node) in weights]
    sizes = {step: weights[_weight(nodes[step])] for step in copies}
    live = live_bytes(plan.storage.buffers, len(nodes))
    request = Request(graph, sharing=sharing, alignment=plan.alignment)
    for share in SPARE:
        room = int((1 - share) * (plan.budget - plan.total_bytes + plan.arena_bytes))
        early = zip(copies, begins([(step, sizes[step]) for step in copies], live, room), strict=True)
        moved = {step: begin for step, begin in early if begin < step}
        if cost(sum(sizes.values()), sum(sizes[step] for step in moved)) >= usual:
            return None
        order = sorted(range(len(nodes)), key=lambda step: (moved.get(step, step), step not in moved, step))
        solution = lay_out(request, tuple(order), Outcome(tuple(range(len(nodes)))))
        model = plan.model.clone()
        schedule_model(model, order, solution.graph)
        names = {nodes[step].name for step in moved}
        for node in model.graph:
            node.metadata_props.update({AHEAD: "1"} if node.name in names else {})
        made = dataclasses.replace(
            plan, model=model, graph=solution.graph, offsets=solution.offsets, arena_bytes=solution.arena_bytes
        )
        if made.total_bytes <= plan.budget:
            made.verify()
            return made
    return None


def _weight(node: ir.Node) -> str:
    return "" if node.inputs[0] is None else str(node.inputs[0].name)
