"""What all tests of the command line share."""

import pytest

from memonger.cli import output


@pytest.fixture(autouse=True)
def _no_lines_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine commands take long enough to say how far they are."""
    monkeypatch.setattr(output, "LINE_SECONDS", 1e6)
