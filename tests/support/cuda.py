"""Whether there is a CUDA device for tests, and whether it is the stand-in."""

import os

import pytest

from memonger.devices import parse_device
from memonger.errors import RuntimeUnavailableError
from memonger.runtime.cuda import missing

CUDA = parse_device("cuda:0")
ON_STAND_IN = os.environ.get("MEMONGER_FAKE_CUDA") == "1"


def absent() -> str:
    """Why there is none; empty where there is one."""
    try:
        missing.check(CUDA)
    except RuntimeUnavailableError as error:
        return str(error)
    return ""


ABSENT = absent()
needs_cuda = pytest.mark.skipif(bool(ABSENT), reason=ABSENT)
needs_values = pytest.mark.skipif(ON_STAND_IN, reason="the stand-in computes nothing")
on_stand_in = pytest.mark.skipif(not ON_STAND_IN, reason="needs what only the stand-in can be told")
