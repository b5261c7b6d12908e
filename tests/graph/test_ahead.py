"""Where a schedule is cut for copies that are made ahead, when each begins, and which weights are copied so."""

import random

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper

from memonger.graph.ahead import PARTITIONS, begins, choose_copies_ahead, copies_ahead, cut_schedule
from memonger.graph.weight_window import COPY, Read, choose_copies
from memonger.ir.marks import AHEAD
from tests.support.cuda import random_reads
from tests.support.networks import model_of
from tests.support.stock import normal


def _model(steps: str) -> ir.Model:
    """A schedule of steps by letter: a capital one copies a weight ahead, a small one reads it; "." reads none."""
    nodes = list[object]()
    for step, letter in enumerate(steps):
        if letter.isupper():
            nodes.append(helper.make_node(COPY, [f"w{letter}"], [letter.lower()], name=f"copy{letter}"))
        else:
            read = "x" if letter == "." else letter
            nodes.append(helper.make_node("Add", [read, "constant"], [f"y{step}"], name=f"step{step}"))
    weights = {f"w{letter}": normal(0, 4, 4) for letter in steps if letter.isupper()}
    outputs = {f"y{step}": [4, 4] for step, letter in enumerate(steps) if not letter.isupper()}
    model = ir.from_proto(model_of(nodes, {"x": [4, 4]}, outputs, constant=normal(1, 4, 4), **weights))
    for node in model.graph:
        if node.op_type == COPY:
            node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([4, 4])
            node.metadata_props[AHEAD] = "1"
    return model


@pytest.mark.parametrize(
    ("steps", "spans", "copies"),
    [
        ("A..a..", [(1, 3), (3, 6)], [(0, 1)]),
        ("A..B.a..b", [(1, 3), (4, 8), (8, 9)], [(0, 1), (1, 2)]),
        ("AB..CD.ab.cd.", [(2, 4), (6, 10), (10, 13)], [(0, 1), (0, 1), (1, 2), (1, 2)]),
        ("..A.a", [(0, 2), (3, 4), (4, 5)], [(1, 2)]),
        ("Aa.", [(1, 3)], [(0, 0)]),
        ("..A", [(0, 2)], [(1, 1)]),
        ("A.Ba.b", [(1, 2), (3, 5), (5, 6)], [(0, 1), (1, 2)]),
        ("...", [(0, 3)], []),
    ],
)
def test_a_partition_begins_behind_copies_and_where_they_are_read(
    steps: str, spans: list[tuple[int, int]], copies: list[tuple[int, int]]
) -> None:
    found = cut_schedule(_model(steps))
    assert list(found.spans) == spans
    assert [(copy.begin, copy.wait) for copy in found.copies] == copies


@pytest.mark.parametrize("seed", range(50))
def test_a_copy_is_waited_for_before_its_first_reader_and_begins_behind_all_steps_before_it(seed: int) -> None:
    drawn, letters = random.Random(seed), "abcdefgh"
    steps, there = "", ""
    for _ in range(drawn.randint(4, 40)):
        step = drawn.choice(".." + there + letters[len(there) : len(there) + 2].upper()[:1])
        there += step.lower() if step.isupper() else ""
        steps += step
    found = cut_schedule(_model(steps))
    place = {step: number for number, span in enumerate(found.spans) for step in range(*span)}
    assert sorted(place) == [step for step, letter in enumerate(steps) if not letter.isupper()]
    for copy, letter in zip(found.copies, there, strict=True):
        at = steps.index(letter.upper())
        readers = [place[step] for step, other in enumerate(steps) if other == letter]
        assert all(place[step] < copy.begin for step in range(at) if step in place)
        assert all(place[step] >= copy.begin for step in range(at, len(steps)) if step in place)
        assert copy.begin <= copy.wait <= min(readers, default=copy.begin)
        between = range(at, steps.index(letter) if readers else at)
        assert copy.wait > copy.begin or not any(step in place for step in between)


def test_what_is_no_whole_weight_is_no_copy_ahead() -> None:
    for change in ("shape", "operator", "mark"):
        model = _model("A..a..")
        node = model.graph.node("copyA")
        if change == "shape":
            node.outputs[0].shape = ir.Shape([4, 3])
        elif change == "operator":
            node.op_type = "Identity"
        else:
            del node.metadata_props[AHEAD]
        assert copies_ahead(model, ()) is None
    assert copies_ahead(_model("Aa..."), ()) is None  # there is nothing beside it


def test_constants_count_for_each_partition_that_reads_them() -> None:
    model = _model("A.Ba.b.")
    found = copies_ahead(model, ())
    assert found is not None
    assert len(found.spans) == 3
    assert found.repeated_bytes == 2 * 64  # the constant
    assert found.staging_bytes == 2 * 64


def test_copies_begin_with_the_part_before_their_own() -> None:
    live = np.zeros(40, np.int64)
    times = [(step, 10) for step in range(5, 40, 5)]
    assert begins(times, live, 1000) == [0, 5, 10, 15, 20, 25, 30]
    assert begins([(0, 10), *times], live, 1000)[0] == 0  # in order: there is no part before it
    assert begins(times, live, 9) == [step for step, _ in times]  # there is no room
    live[:3] = 995
    assert begins(times, live, 1000) == [5, 5, 10, 15, 20, 25, 30]
    many = begins([(step, 10) for step in range(1, 40)], np.zeros(40, np.int64), 1000)
    assert len(set(many)) <= PARTITIONS
    assert begins([], live, 0) == []


@pytest.mark.parametrize("seed", range(20))
def test_what_is_chosen_fits_with_copies_ahead_or_in_order(seed: int) -> None:
    drawn = random.Random(seed)
    steps = drawn.randint(4, 30)
    live = np.array([drawn.randint(0, 1000) for _ in range(steps)])
    reads = random_reads(drawn, steps, 12)

    def total(copied: list[Read]) -> np.ndarray:
        names = {read.name for read in copied}
        kept = sum(read.nbytes for read in reads if read.name not in names)
        copies = [sum(r.resident for r in copied if (step, step) in r.ranges) for step in range(steps)]
        return kept + live + np.array(copies)

    least, whole = int(total(reads).max()), int(total([]).max())
    for number in range(6):
        room = least + (max(whole, least) - least) * number // 5
        chosen, _ = choose_copies_ahead(reads, live, room)
        assert total(chosen).max() <= room
    with pytest.raises(ValueError, match=f"are below {least}"):
        choose_copies_ahead(reads, live, least - 1)


def test_copies_are_ahead_where_that_costs_less_than_the_fewest_in_order() -> None:
    def read(name: str, size: int, *steps: int) -> Read:
        return Read(name, tuple((step, step) for step in steps), size, size, None, True)

    reads, live = [read(f"w{n}", 100, n) for n in range(20)], np.zeros(20, np.int64)
    chosen, is_worth_it = choose_copies_ahead(reads, live, 1000)
    assert is_worth_it
    assert len(chosen) > len(choose_copies(reads, live, 1000))
    whole, is_worth_it = choose_copies_ahead(reads, live, 100)  # room for one at a time
    assert (whole, is_worth_it) == (choose_copies(reads, live, 100), False)
    twice = [read("e", 1000, 0, 21), *(read(f"w{n}", 100, n) for n in range(1, 21))]  # which is rather kept
    chosen, is_worth_it = choose_copies_ahead(twice, np.zeros(22, np.int64), 1800)
    assert is_worth_it
    assert "e" not in {one.name for one in chosen}
