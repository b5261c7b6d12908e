"""What a session takes beside the tensors: said on its own, and no part of the total."""

import dataclasses

import memonger
from memonger.report.summary import plan_record
from tests.support.stock import parse


def _plan(nodes: int) -> memonger.Plan:
    text = " ".join(f"v{i + 1} = Neg(v{i})" for i in range(nodes))
    return memonger.search_plan(parse(f"g (float[8] v0) => (float[8] v{nodes}) {{ {text} }}"), device="none")


def test_it_grows_with_the_nodes_and_is_no_part_of_the_total() -> None:
    few, many = _plan(10), _plan(40)
    assert few.session_bytes is not None
    assert many.session_bytes is not None
    assert 0 < few.session_bytes < many.session_bytes
    assert few.total_bytes == many.total_bytes == few.arena_bytes + few.input_bytes
    assert plan_record(many, "m", None)["session_bytes"] == many.session_bytes


def test_nothing_is_said_of_a_device_that_is_not_the_host() -> None:
    assert dataclasses.replace(_plan(3), device="cuda:0").session_bytes is None
