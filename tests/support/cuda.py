"""Whether there is a CUDA device for tests, and whether it is the stand-in."""

import os
import random

import pytest

from memonger.devices import parse_device
from memonger.errors import RuntimeUnavailableError
from memonger.graph.weight_window import Read
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


def random_reads(drawn: random.Random, steps: int, most: int) -> list[Read]:
    """Two weights or more, of 100 to 600 bytes, each of which one or two of so many steps read."""
    reads = list[Read]()
    for n in range(drawn.randint(2, most)):
        at = sorted(drawn.sample(range(steps), drawn.randint(1, 2)))
        size = drawn.randint(100, 600)
        reads.append(Read(f"w{n}", tuple((step, step) for step in at), size, size, None, True))
    return reads
