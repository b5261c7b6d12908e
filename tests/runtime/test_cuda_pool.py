"""What onnxruntime's CUDA provider is given when it asks for memory, on a driver that only counts."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memonger
from memonger.devices import parse_device
from memonger.runtime.cuda import driver
from memonger.runtime.cuda.pool import GRAIN, Event, Pool, PoolRegion, workspace_by_node

SIZES = st.integers(0, 5000)


class Memory:
    """Device memory that is only counted: address → bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.taken, self._next = capacity, dict[int, int](), count(1 << 20, 1 << 20)

    def allocate(self, index: int, size: int) -> int:
        if sum(self.taken.values()) + size > self.capacity:
            raise memonger.SessionError(f"{size} bytes can't be allocated on cuda:{index}")
        address = next(self._next)
        self.taken[address] = size
        return address

    def free(self, index: int, address: int) -> None:
        del self.taken[address]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    found = Memory(1 << 20)
    monkeypatch.setattr(driver, "allocate", found.allocate)
    monkeypatch.setattr(driver, "free", found.free)
    return found


@given(st.lists(st.one_of(SIZES, st.integers(-10, -1)), max_size=40), st.integers(0, 40).map(lambda n: n * GRAIN))
def test_a_region_never_gives_a_byte_twice_and_stays_within_its_capacity(steps: list[int], capacity: int) -> None:
    region, taken = PoolRegion(capacity), list[tuple[int, int]]()
    for step in steps:
        if step < 0 and taken:
            begin, _ = taken.pop(step % len(taken))
            assert region.give(begin)
        elif step >= 0:
            begin_or_none = region.take(step)
            if begin_or_none is None:
                continue
            assert begin_or_none % GRAIN == 0
            end = begin_or_none + max(step, 1)
            assert end <= capacity
            assert all(end <= other or begin_or_none >= stop for other, stop in taken)
            taken.append((begin_or_none, end))
    assert not region.give(capacity + 1)


@given(st.lists(SIZES, min_size=1, max_size=20))
def test_what_a_region_has_room_for_alone_it_has_room_for_again(sizes: list[int]) -> None:
    free = PoolRegion()
    offsets = [free.take(size) for size in sizes]
    for offset in offsets:
        assert offset is not None
        assert free.give(offset)
    exact = PoolRegion(free.high)
    assert [exact.take(size) for size in sizes] == offsets
    assert PoolRegion(free.high - GRAIN).take(free.high) is None


def test_weights_are_counted_and_scratch_comes_from_one_region(memory: Memory) -> None:
    pool = Pool(parse_device("cuda:0"))
    weights = [pool._allocate(size) for size in (1000, 2000)]
    pool.loaded()
    pool.reserve(8000)
    assert pool.weight_bytes == 3000
    assert sorted(memory.taken.values()) == [1000, 2000, 8192]
    first, second = pool._allocate(3000), pool._allocate(4000)
    assert first is not None
    assert second is not None
    pool._free(first)
    assert pool._allocate(2000) == first  # where the freed one was
    assert sorted(memory.taken.values()) == [1000, 2000, 8192]
    assert pool.overflow_bytes == 0
    assert None not in weights
    pool.close()
    assert memory.taken == {}


def test_what_does_not_fit_is_taken_and_given_back_until_the_pool_is_capped(memory: Memory) -> None:
    pool = Pool(parse_device("cuda:0"))
    pool.loaded()
    pool.reserve(1024)
    large = pool._allocate(5000)
    assert large is not None
    assert pool.overflow_bytes == 5000
    pool._free(large)
    assert list(memory.taken.values()) == [1024]
    pool.cap()
    assert pool._allocate(5000) is None
    assert pool.refused is not None
    assert "4.88 KiB of workspace on cuda:0" in pool.refused
    assert "plan measured 1.00 KiB" in pool.refused
    assert pool._allocate(1024) is not None


def test_a_device_without_room_is_an_answer_and_no_exception(memory: Memory) -> None:
    pool = Pool(parse_device("cuda:0"))
    assert pool._allocate(1 << 21) is None
    assert pool.refused == "2097152 bytes can't be allocated on cuda:0"


def test_frees_after_the_end_are_ignored(memory: Memory) -> None:
    pool = Pool(parse_device("cuda:0"))
    address = pool._allocate(100)
    pool.close()
    pool._free(address)
    assert memory.taken == {}


def test_scratch_is_what_a_node_takes_and_gives_back_while_it_runs() -> None:
    intervals = {"first": (1000, 1999), "second": (2000, 2999), "third": (3000, 3999)}
    events = [
        Event(1100, 1, 5000),  # an output of the first node, which the third one reads
        Event(1200, 2, 700),
        Event(1300, 3, 300),
        Event(1400, 2, None),
        Event(1500, 3, None),
        Event(2100, 2, 900),  # the same address again
        Event(2200, 2, None),
        Event(3500, 1, None),
    ]
    assert workspace_by_node(events, intervals) == {"first": 1280, "second": 1024}


def test_one_address_used_twice_by_a_node_is_counted_once() -> None:
    events = [Event(10, 7, 1000), Event(11, 7, None), Event(12, 7, 1000), Event(13, 7, None)]
    assert workspace_by_node(events, {"only": (5, 20)}) == {"only": 1024}
