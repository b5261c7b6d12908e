"""Plans that the tests of reports draw."""

import pytest

import memonger
from tests.support.planning_models import chain, plan


@pytest.fixture(scope="package")
def training() -> memonger.Plan:
    """A plan of a small network's training, in which some is computed again; its workspace is measured."""
    made = plan(chain(), device="cpu", strategy="sweep")
    assert made.recomputed
    return made
