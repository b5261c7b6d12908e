"""What all tests of PyTorch's steps have in common."""

from functools import partial

import pytest

from memonger.schedule.effort import EFFORT
from memonger.schedule.strategy import Request
from memonger.torch import budget as own


@pytest.fixture(autouse=True)
def short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches end soon: what is tested here doesn't depend on how good a schedule is."""
    monkeypatch.setattr(own, "Request", partial(Request, effort=EFFORT // 20))
