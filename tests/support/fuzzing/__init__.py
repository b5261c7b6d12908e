"""Fuzzers: cases drawn from (kind, seed), each judged in a process that may die.

A case ends as one of `OUTCOMES`. What a kind attacks, and what it compares with, says `tests.support.fuzzing.cases`.
"""

from tests.support.fuzzing.outcomes import BAD, OUTCOMES, Outcome
from tests.support.fuzzing.workers import judge

__all__ = ["BAD", "OUTCOMES", "Outcome", "judge"]
