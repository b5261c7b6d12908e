"""What onnxruntime does with CUDA is still what cuda_facts.txt says it was, with the versions its head names.

Without a GPU: ``python -m tests.support.fake_cuda python -m pytest tests/facts``, on the stand-in for CUDA.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.facts.checks import CHECKS, in_process
from tests.facts.fact import SEEN, UNTOLD, head
from tests.support.cuda import CUDA, needs_cuda

TABLE = (Path(__file__).parent / "cuda_facts.txt").read_text()
MADE_ON = " ".join(TABLE.splitlines()[:2])


@pytest.mark.parametrize("title", [check.title for check in CHECKS.values()])
def test_the_table_has_every_check_and_the_versions_it_held_for(title: str) -> None:
    assert f"\n{title}\n{'-' * len(title)}\n" in TABLE
    assert "onnxruntime-gpu 1." in MADE_ON


@needs_cuda
@pytest.mark.parametrize("name", CHECKS)
def test_a_check_finds_what_the_table_says(name: str) -> None:
    facts = list(in_process(name, CUDA))
    assert facts
    for fact in facts:
        recorded = fact.verdict == SEEN or head(fact) in TABLE or head(replace(fact, verdict=UNTOLD)) in TABLE
        assert recorded, f"{head(fact)}\n    {fact.seen}\nThe table, made on {MADE_ON} says otherwise."
