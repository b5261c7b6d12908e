"""What all tests of PyTorch's steps have in common."""

from collections.abc import Callable
from functools import partial

import pytest

from memonger.schedule.effort import EFFORT
from memonger.schedule.strategy import Request
from memonger.torch import budget as own


def shorten(set_attribute: Callable[[object, str, object], None]) -> None:
    """Searches end soon: what is tested here doesn't depend on how good a schedule is."""
    set_attribute(own, "Request", partial(Request, effort=EFFORT // 20))


@pytest.fixture(autouse=True)
def short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process that tests run in."""
    shorten(monkeypatch.setattr)
