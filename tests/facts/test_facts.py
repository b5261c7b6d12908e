"""What onnxruntime does with CUDA is still what cuda_facts.txt says it was, with the versions its head names.

Without a GPU: ``python -m tests.support.fake_cuda python -m pytest tests/facts``, on the stand-in for CUDA.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from memonger.devices import parse_device
from memonger.errors import RuntimeUnavailableError
from memonger.runtime.cuda import missing
from tests.facts.checks import CHECKS, in_process
from tests.facts.fact import SEEN, UNTOLD, head

DEVICE = parse_device("cuda:0")
TABLE = (Path(__file__).parent / "cuda_facts.txt").read_text()
MADE_ON = " ".join(TABLE.splitlines()[:2])


def _absent() -> str:
    try:
        missing.check(DEVICE)
    except RuntimeUnavailableError as error:
        return str(error)
    return ""


ABSENT = _absent()


@pytest.mark.parametrize("title", [check.title for check in CHECKS.values()])
def test_the_table_has_every_check_and_the_versions_it_held_for(title: str) -> None:
    assert f"\n{title}\n{'-' * len(title)}\n" in TABLE
    assert "onnxruntime-gpu 1." in MADE_ON


@pytest.mark.skipif(bool(ABSENT), reason=ABSENT)
@pytest.mark.parametrize("name", CHECKS)
def test_a_check_finds_what_the_table_says(name: str) -> None:
    facts = list(in_process(name, DEVICE))
    assert facts
    for fact in facts:
        recorded = fact.verdict == SEEN or head(fact) in TABLE or head(replace(fact, verdict=UNTOLD)) in TABLE
        assert recorded, f"{head(fact)}\n    {fact.seen}\nThe table, made on {MADE_ON} says otherwise."
