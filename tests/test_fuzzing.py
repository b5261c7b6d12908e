"""Some cases of each fuzzer: no traceback, no crash, no hang, no wrong numbers. More: benchmarks/trust/fuzzing.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fuzzing import BAD, OUTCOMES, Outcome
from tests.support.fuzzing.cases import KINDS

CASES = 7  # of each kind
LEAST = 1  # of them run: a fuzzer whose every case is refused says little


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    """All kinds judged by one program of its own: it forks, which a process with threads had better not."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.trust.fuzzing",
        "--cases",
        str(CASES * len(KINDS)),
        "--processes",
        "1",
        "--json",
    ]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    return [Outcome(**json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_changed_at_random_is_refused_or_gives_the_right_numbers(kind: str, outcomes: list[Outcome]) -> None:
    mine = [outcome for outcome in outcomes if outcome.kind == kind]
    assert sorted(outcome.seed for outcome in mine) == list(range(CASES))
    assert {outcome.result for outcome in mine} <= OUTCOMES.keys()
    assert [outcome for outcome in mine if outcome.result in BAD] == []
    assert sum(outcome.result == "right" for outcome in mine) >= LEAST
