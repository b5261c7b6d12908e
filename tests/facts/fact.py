"""What a check says, and how it is written down."""

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

HOLDS, FAILS, SEEN = "holds", "does not hold", "seen"
UNTOLD = "cannot be told here"
LOST = "check failed"
RAN = "the check runs to its end"
WIDTH = 118


@dataclass(frozen=True, slots=True)
class Fact:
    """One row: a claim, what was seen, and whether that bears it out.

    `verdict` is ``holds``, ``does not hold``, ``seen`` (a question rather than a claim), ``cannot be told here`` (it
    takes kernels that run) or ``check failed``.
    """

    claim: str
    seen: str
    verdict: str = SEEN


def judged(claim: str, seen: str, holds: bool, told: bool = True) -> Fact:
    """A claim and whether `seen` supports it. Without kernels that run, `seen` means nothing and is left out."""
    return Fact(claim, seen, HOLDS if holds else FAILS) if told else Fact(claim, RAN, UNTOLD)


def head(fact: Fact) -> str:
    """Verdict and claim, as they stand in the table."""
    return textwrap.fill(f"[{fact.verdict}] {fact.claim}", WIDTH, subsequent_indent="    ")


def written(facts: Iterable[Fact]) -> str:
    """Rows, one below the other: verdict and claim, then what was seen."""
    rows = []
    for fact in facts:
        seen = (
            textwrap.fill(line, WIDTH, initial_indent="    ", subsequent_indent="    ")
            for line in fact.seen.splitlines()
        )
        rows.append("\n".join([head(fact), *seen]))
    return "\n".join(rows) + "\n"
