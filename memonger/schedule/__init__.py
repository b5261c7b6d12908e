"""Rematerialization: a graph → a schedule in which some nodes run again instead of their values being kept.

To add a strategy, write a file with its `Strategy` record and name the record in `STRATEGIES`.
"""

from collections.abc import Mapping
from types import MappingProxyType

from memonger.schedule.budget import BUDGET, BudgetSearch
from memonger.schedule.cheap import CHEAP
from memonger.schedule.checkpoints import mirror_plan
from memonger.schedule.cp_sat import EXACT
from memonger.schedule.effort import EFFORT, Progress
from memonger.schedule.forced import MARKS
from memonger.schedule.portfolio import search
from memonger.schedule.problem import Problem, ScheduleFigures
from memonger.schedule.segments import BLOCK, LOG, SQRT
from memonger.schedule.strategy import Outcome, Request, Strategy, SweepPoint
from memonger.schedule.sweep import SWEEP

NONE = Strategy("none", "Nothing runs again.", lambda request: Outcome(tuple(range(len(request.graph.nodes)))))

STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {strategy.name: strategy for strategy in (NONE, CHEAP, BLOCK, SQRT, LOG, SWEEP, MARKS, BUDGET, EXACT)}
)
"""Every strategy by name."""

__all__ = [
    "EFFORT",
    "STRATEGIES",
    "BudgetSearch",
    "Outcome",
    "Problem",
    "Progress",
    "Request",
    "ScheduleFigures",
    "Strategy",
    "SweepPoint",
    "mirror_plan",
    "search",
]  # fmt: skip
