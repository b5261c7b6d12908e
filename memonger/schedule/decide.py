"""From a request to the order of evaluation, what is recomputed and the layout of the arena, on integers alone."""

from memonger.allocation import EFFORT
from memonger.schedule.solution import Solution, lay_out, orders_of, without_recomputation
from memonger.schedule.strategy import Request


def decide(
    request: Request, strategy: str, order: str, effort: int = EFFORT, plain: Solution | None = None
) -> Solution:
    """Order the nodes, choose what is recomputed, and lay out.

    Args:
        request: The graph, the budget and the other settings.
        strategy: One of `STRATEGIES`.
        order: One of `ORDERS`, or ``best``.
        effort: Of layouts that are compared; see `memonger.allocation.allocate`.
        plain: With nothing recomputed, where that was laid out before.

    Raises:
        BudgetError: nothing was found whose arena, workspace, parameters and inputs fit the budget together. Planning
            succeeds with the budget that the error names.
        PlanError: the strategy finds nothing at all.
    """
    names = orders_of(order, request.graph)
    if strategy == "none":
        return without_recomputation(request, names, effort)
    from memonger.schedule.recompute import Budgets, unbudgeted  # here: else none of it is needed

    if request.budget is not None:
        return Budgets(request, strategy, names, effort=effort, plain=plain).cheapest(request.budget)
    _, recomputed, outcome = unbudgeted(request, strategy, names)
    return lay_out(request, recomputed, outcome)
