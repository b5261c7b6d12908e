"""Rematerialization: a graph → a schedule in which some nodes run again instead of their values being kept."""

from memonger.remat.effort import EFFORT, Progress
from memonger.remat.portfolio import pareto, search, smallest_budget
from memonger.remat.problem import Problem, Result
from memonger.remat.staged import mirror_plan
from memonger.remat.strategies import STRATEGIES
from memonger.remat.strategy import Candidate, Outcome, Request, Strategy

__all__ = [
    "EFFORT", "STRATEGIES", "Candidate", "Outcome", "Problem", "Progress", "Request", "Result", "Strategy",
    "mirror_plan", "pareto", "search", "smallest_budget",
]  # fmt: skip
