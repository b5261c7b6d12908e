"""recompute: a graph → a schedule in which nodes run again instead of their values being kept. One strategy a file."""

from memonger.remat.portfolio import EFFORT, Progress, Result, pareto, search, smallest_budget
from memonger.remat.problem import Problem
from memonger.remat.strategies import (
    BUDGETED,
    FRONTIERS,
    MIRRORING,
    STRATEGIES,
    Outcome,
    Request,
    Strategy,
    mirror_plan,
)
from memonger.remat.sweep import Candidate

__all__ = [
    "BUDGETED", "EFFORT", "FRONTIERS", "MIRRORING", "STRATEGIES", "Candidate", "Outcome", "Problem", "Progress",
    "Request", "Result", "Strategy", "mirror_plan", "pareto", "search", "smallest_budget",
]  # fmt: skip
