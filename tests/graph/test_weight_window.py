"""Which weights stay in the file: within the bytes given, by a count step by step."""

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper

from memonger.graph.weight_window import (
    Read,
    WeightWindow,
    bytes_read,
    bytes_written,
    choose_window,
    largest_at_once,
    resident_bytes,
    weight_reads,
    what_is_wrong,
)
from tests.support.networks import model_of
from tests.support.stock import normal


def _read(name: str, first: int, last: int, nbytes: int) -> Read:
    return Read(name, ((first, last),), nbytes, nbytes, None, True)


def _most_at_once(reads: list[Read]) -> int:
    """The same as `largest_at_once`, step by step: each is there from where the one before it is first read."""
    times = sorted((*piece, read.name, read.resident) for read in reads for piece in read.ranges)
    begins = [0, *(first for first, *_ in times[:-1])]
    return max(
        sum(size for begin, (_, last, _, size) in zip(begins, times, strict=True) if begin <= step <= last)
        for step in range(max(last for _, last, *_ in times) + 1)
    )


@pytest.mark.parametrize("seed", range(12))
def test_kept_weights_and_the_window_take_no_more_than_they_may(seed: int) -> None:
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 12))
    firsts = np.sort(random.choice(40, count, replace=False))
    spans = random.integers(0, 4, count) * random.integers(0, 2, count)
    reads = [
        _read(f"w{n}", int(first), int(first + span), int(size))
        for n, (first, span, size) in enumerate(zip(firsts, spans, random.integers(1, 50, count) * 4096, strict=True))
    ]
    if seed % 3 == 0:  # some are read again later
        reads = [r._replace(ranges=(*r.ranges, (50 + n, 50 + n))[: 1 + n % 2]) for n, r in enumerate(reads)]
    whole, least = sum(read.nbytes for read in reads), largest_at_once(reads)
    assert least == _most_at_once(reads)
    assert choose_window(reads, whole) is None
    for nbytes in {min(least, whole - 1), min((least + whole) // 2, whole - 1), whole - 1}:
        if nbytes < least:  # as where one weight is all there is
            with pytest.raises(ValueError, match=f"below {least}"):
                choose_window(reads, nbytes)
            continue
        window = choose_window(reads, nbytes)
        assert window is not None
        left = [read for read in reads if read.name in window.weights]
        assert [read.name for read in left] == list(window.weights)
        assert window.nbytes == _most_at_once(left)
        assert whole - sum(read.nbytes for read in left) + window.nbytes <= nbytes
        assert not what_is_wrong(reads, window)


@pytest.mark.parametrize("seed", range(6))
def test_what_steps_make_is_in_the_file_whatever_is_kept(seed: int) -> None:
    random = np.random.default_rng(seed)
    weights = [_read(f"w{n}", 4 * n, 4 * n, int(random.integers(1, 9)) * 4096) for n in range(8)]
    made = [
        Read(f"v{n}", ((4 * n + 1, 4 * n + 2), (60 - 2 * n, 60 - 2 * n)), 0, 4096 * (n + 1), None, True, made=True)
        for n in range(5)
    ]
    reads = sorted((*weights, *made), key=lambda read: (read.ranges, read.name))
    whole, names = sum(read.nbytes for read in weights), {read.name for read in made}
    for nbytes in (whole + largest_at_once(made), whole * 3 // 4 + largest_at_once(made)):
        window = choose_window(reads, nbytes)
        assert window is not None
        left = [read for read in reads if read.name in window.weights]
        assert names <= {read.name for read in left}
        assert (len(left) == len(made)) is (nbytes >= whole + largest_at_once(made))
        assert window.nbytes == _most_at_once(left)
        assert resident_bytes(reads, window, whole) <= nbytes
        assert not what_is_wrong(reads, window)
        without = WeightWindow(window.nbytes, tuple(name for name in window.weights if name != "v0"))
        assert "'v0' waits in a file" in what_is_wrong(reads, without)
    assert [(bytes_read(read), bytes_written(read)) for read in made] == [(read.resident,) * 2 for read in made]
    with pytest.raises(ValueError, match=f"below {largest_at_once(reads)}"):
        choose_window(reads, largest_at_once(reads) - 1)


def test_more_memory_keeps_more_and_the_largest_first() -> None:
    reads = [_read(f"w{n}", n, n, 100_000 if n == 7 else 10_000) for n in range(10)]
    # The large one alone takes as much as the window would need for it
    assert "w7" not in (choose_window(reads, 130_000) or WeightWindow(1, ())).weights
    left = [
        len((choose_window(reads, nbytes) or WeightWindow(1, ())).weights) for nbytes in range(120_000, 190_001, 10_000)
    ]
    assert left == sorted(left, reverse=True)
    assert left[-1] == 0


def test_weights_that_may_stay_are_found_with_the_steps_that_read_them() -> None:
    """A product's, a table's whose rows are looked up, one read twice; not a small one, a loop's or an output."""
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"], name="lookup"),
        helper.make_node("MatMul", ["rows", "w"], ["product"], name="product"),
        helper.make_node("Add", ["product", "twice"], ["sum"], name="sum"),
        helper.make_node("Add", ["sum", "small"], ["more"], name="more"),
        helper.make_node("Add", ["more", "twice"], ["y"], name="y"),
        helper.make_node("Identity", ["apart"], ["z"], name="z"),
    ]
    weights = {
        "table": normal(0, 4000, 256), "w": normal(1, 256, 250), "twice": normal(2, 80, 250), "small": normal(3, 250),
        "apart": normal(4, 300, 300),
    }  # fmt: skip
    model = model_of(nodes, {"ids": [80]}, {"y": [80, 250], "z": [300, 300]}, **weights)
    model.graph.input[0].type.tensor_type.elem_type = 7
    loaded = ir.serde.deserialize_model(model)
    loaded.graph[0].outputs[0].shape = ir.Shape([80, 256])
    loaded.graph[0].outputs[0].dtype = ir.DataType.FLOAT
    found = {read.name: read for read in weight_reads(loaded)}
    assert list(found) == ["table", "w", "twice", "apart"]
    assert found["twice"].ranges == ((2, 4),)
    assert found["w"].transposed is False
    assert found["w"].resident == 256 * 256 * 4  # columns in panels of 16
    assert found["table"].whole is False
    assert found["table"].resident == min(4000 * 1024, 80 * 2 * 65536)


def test_what_is_read_in_slices_is_read_again_for_each() -> None:
    nodes, weights = [], {"w0": normal(0, 300, 300), "w1": normal(1, 300, 300)}
    for slice_ in range(2):
        for layer in range(2):
            ends = [f"v{slice_}{layer}", f"w{layer}"], [f"v{slice_}{layer + 1}"]
            nodes.append(helper.make_node("MatMul", *ends, name=f"n{slice_}{layer}"))
    shapes = {"v00": [4, 300], "v10": [4, 300]}, {"v02": [4, 300], "v12": [4, 300]}
    reads = weight_reads(ir.serde.deserialize_model(model_of(nodes, *shapes, **weights)))
    assert [read.ranges for read in reads] == [((0, 0), (2, 2)), ((1, 1), (3, 3))]
    assert largest_at_once(reads) == 2 * reads[0].resident
