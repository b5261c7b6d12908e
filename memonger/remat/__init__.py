"""Rematerialization: a graph → a schedule in which some nodes run again instead of their values being kept."""

from memonger.remat.budget import BudgetSearch
from memonger.remat.effort import EFFORT, Progress
from memonger.remat.portfolio import search, smallest_budget
from memonger.remat.problem import Problem, Result
from memonger.remat.staged import mirror_plan
from memonger.remat.strategies import STRATEGIES
from memonger.remat.strategy import Candidate, Outcome, Request, Strategy

__all__ = [
    "EFFORT", "STRATEGIES", "BudgetSearch", "Candidate", "Outcome", "Problem", "Progress", "Request", "Result",
    "Strategy", "mirror_plan", "search", "smallest_budget",
]  # fmt: skip
