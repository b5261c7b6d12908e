"""Rematerialization: a graph → a schedule in which some nodes run again instead of their values being kept."""

from memonger.schedule.effort import EFFORT
from memonger.schedule.strategy import STRATEGIES, Outcome, Request, Strategy, SweepPoint

__all__ = ["EFFORT", "STRATEGIES", "Outcome", "Request", "Strategy", "SweepPoint"]
