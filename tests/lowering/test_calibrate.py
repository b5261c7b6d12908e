"""What the calibrating run can't see, and is added to what it measured."""

import pytest

import memonger
from memonger.runtime import feeds as feeding
from memonger.runtime import process_memory
from tests.support.stock import parse

pytest.importorskip("onnxruntime")

ELEMENTS = 1 << 20
SCATTER = f"""
g (float[{ELEMENTS}] x, int64[{ELEMENTS}] i) => (float[{ELEMENTS}] y)
{{ a = Neg(x)  y = ScatterElements <axis=0> (a, i, x) }}
"""


def test_indices_that_are_copied_past_the_allocator_are_workspace() -> None:
    plan = memonger.search_plan(parse(SCATTER), mode="inference", device="cpu")
    assert plan.workspace_bytes == 8 * ELEMENTS
    if not process_memory.is_measurable():
        return
    session = memonger.Session(plan)
    feeds = feeding.random_feeds(feeding.inputs_of(plan.model.graph))
    feeds["i"] %= ELEMENTS
    session.run(feeds, copy=False)
    taken = process_memory.peak_over(process_memory.settle(), lambda: session.run(feeds, copy=False))
    assert taken == pytest.approx(plan.workspace_bytes, rel=0.1)
