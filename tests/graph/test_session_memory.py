"""What a session takes beside the tensors: said on its own, and no part of the total."""

import dataclasses

import memonger
from memonger.ir.marks import CHUNK
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


def test_marks_that_chunks_are_not_written_with_say_nothing() -> None:
    """A file's marks are a stranger's: those that aren't four numbers count as none."""
    plan = _plan(3)
    expected = plan.session_bytes
    for mark in ("", "x", "1.2", "0.0.a.b", "0.0.-1.2", "0.0.1.2.3"):
        for node in plan.model.graph:
            node.metadata_props[CHUNK] = mark
        assert plan.session_bytes == expected
