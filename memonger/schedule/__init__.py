"""Rematerialization: a graph → a schedule in which some nodes run again instead of their values being kept."""

from memonger.schedule.budget import BudgetSearch
from memonger.schedule.effort import EFFORT, Progress
from memonger.schedule.portfolio import search
from memonger.schedule.problem import Problem, ScheduleFigures
from memonger.schedule.staged import mirror_plan
from memonger.schedule.strategies import STRATEGIES
from memonger.schedule.strategy import Candidate, Outcome, Request, Strategy

__all__ = [
    "EFFORT", "STRATEGIES", "BudgetSearch", "Candidate", "Outcome", "Problem", "Progress", "Request", "ScheduleFigures",
    "Strategy", "mirror_plan", "search",
]  # fmt: skip
