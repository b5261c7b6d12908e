"""What goes wrong is told with the sample's name, ends in time, and leaves a feeder that goes on."""

import _thread
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memonger

SAMPLES = {"x": ((3,), "float32"), "labels": ((), "int64")}


def config(**options: Any) -> memonger.FeederConfig:
    return memonger.FeederConfig(**{"cpu_limit": "64KiB", "samples": SAMPLES, "preferred_batch": 4, **options})


def good(identity: str) -> Iterator[Any]:
    yield {"x": np.zeros(3, np.float32), "labels": int(identity[1:])}


def names(count: int = 10) -> list[str]:
    return [f"s{number}" for number in range(count)]


def at(identity: str, bad: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda each: bad(each) if each == identity else good(each)


def _raises(_: str) -> Iterator[Any]:
    raise OSError("no such <file>\x1b[2J")
    yield


def _nothing(_: str) -> Iterator[Any]:
    yield from ()


def _twice(identity: str) -> Iterator[Any]:
    yield from good(identity)
    yield from good(identity)


def _sample(**changes: Any) -> Callable[[str], Any]:
    feeds = {"x": np.zeros(3, np.float32), "labels": 1} | changes
    return lambda _: {name: value for name, value in feeds.items() if value is not None}


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (_raises, r"sample 's5' can't be read: OSError: no such <file>\\x1b"),
        (_nothing, "sample 's5': the reader gave 0 samples, and one_read_count is 1"),
        (_twice, "sample 's5': the reader gave more samples than one_read_count, 1"),
        (lambda _: None, "sample 's5': the reader returned None; it has to yield samples"),
        (lambda _: iter([3]), "sample 's5': 3 was given instead of arrays by name: 'x', 'labels'"),
        (lambda _: np.zeros(3), r"sample 's5': float64\[3\] was given instead of arrays by name: 'x', 'labels'"),
        (lambda _: iter([(1, 2, 3)]), "sample 's5': 3 tensors were given, and a sample has 2"),
        (_sample(x=np.zeros((3, 1), np.float32)), r"sample 's5': 'x' is float32\[3, 1\], .* says float32\[3\]"),
        (_sample(x=np.zeros(3)), r"sample 's5': 'x' is float64\[3\], and the configuration says float32\[3\]"),
        (_sample(x=1.0), r"sample 's5': 'x' is float32\[\], and the configuration says float32\[3\]"),
        (_sample(labels=1.5), r"sample 's5': 'labels' is float64\[\]"),
        (_sample(labels=2**70), "sample 's5' can't be read: OverflowError"),
        (_sample(labels=None), "sample 's5': 'labels' is missing; a sample has 'x', 'labels'"),
        (_sample(mask=1), "sample 's5': 'mask' is none of its tensors"),
    ],
)
def test_a_bad_sample_is_named_and_the_next_epoch_goes_on(bad: Any, message: str, ahead: int) -> None:
    is_bad = True
    feeder = memonger.Feeder(config(read_ahead=ahead), lambda each: (at("s5", bad) if is_bad else good)(each), names())
    for number in range(5):  # more often than there are batches of memory
        seen = list[str]()
        with pytest.raises(memonger.FeedError, match=message) as raised:
            seen.extend(identity for batch in feeder.epoch(number) for identity in batch.identities)
        assert seen == names(4)
        assert raised.value.identity == "s5"
        assert isinstance(raised.value.__cause__, OSError) or bad is not _raises
    is_bad = False
    assert [batch["labels"].tolist() for batch in feeder.epoch(9)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert feeder.peak_bytes <= feeder.room.total_bytes
    assert _all_ended()


def _feeding() -> list[threading.Thread]:
    """Threads of feeders."""
    return [thread for thread in threading.enumerate() if thread.name == "memonger feeder"]


def _all_ended() -> bool:
    """Whether they end, on a machine that may have more to do."""
    for thread in _feeding():
        thread.join(10)
    return not _feeding()


def test_paths_are_named_in_full() -> None:
    path = Path("data", *(f"folder-{number}" for number in range(9)), "<b>image</b>.png")
    with pytest.raises(memonger.FeedError, match=rf"^sample '{path}' can't be read: OSError") as raised:
        next(memonger.Feeder(config(), _raises, [path]).epoch())
    assert raised.value.identity is path


def test_an_error_that_was_handled_keeps_no_memory() -> None:
    feeder = memonger.Feeder(config(), at("s5", _raises), names())
    gc.disable()
    try:
        held = [_first_batch_before_the_error(feeder)() for _ in range(3)]
    finally:
        gc.enable()
    assert held == [None] * 3


def _first_batch_before_the_error(feeder: memonger.Feeder) -> Callable[[], object]:
    try:
        for batch in feeder.epoch():
            first = weakref.ref(batch["x"])
    except memonger.FeedError:
        return first
    raise AssertionError


def test_a_slow_reader_is_waited_for_and_one_that_never_comes_back_is_not() -> None:
    release = threading.Event()

    def stuck(_: str) -> Iterator[Any]:
        release.wait(20)
        yield from good("s0")

    def slow(identity: str) -> Iterator[Any]:
        time.sleep(0.002)
        yield from good(identity)

    assert sum(batch.size for batch in memonger.Feeder(config(), slow, names(), timeout=5).epoch()) == 10
    for ahead in (0, 2):
        release.clear()
        feeder = memonger.Feeder(config(read_ahead=ahead), at("s5", stuck), names(), timeout=0.5)
        seen, begin = list[int](), time.monotonic()
        for _ in range(2):  # the second time the first one's reader is still at it
            with pytest.raises(memonger.FeedError, match=r"sample 's5' has been read for .* s, and timeout is 0\.5 s"):
                seen.extend(batch.number for batch in feeder.epoch())
        assert time.monotonic() - begin < 10
        assert seen == [0]
        release.set()
        assert _all_ended()
        assert [batch.number for batch in feeder.epoch()] == [0, 1, 2]
        feeder.close()


def test_epochs_left_early_end_their_threads() -> None:
    closed = []

    def reader(identity: str) -> Iterator[Any]:
        try:
            yield from good(identity)
        finally:
            closed.append(identity)

    feeder = memonger.Feeder(config(cpu_limit=9 * 100 + 20 + 20 * 4 * 5, cache=False), reader, names(100))
    for batch in feeder.epoch():
        assert batch.number == 0
        break
    for number, epoch in enumerate(feeder.epochs()):
        assert next(epoch).number == 0
        assert _feeding()
        if number == 3:
            break
    gc.collect()
    assert _all_ended()
    assert len(closed) < 5 * 100 / 4
    dropped = feeder.epoch()
    next(dropped)
    assert _feeding()
    del dropped
    assert _all_ended()
    lazy = list(feeder.epochs(2))
    assert sum(batch.size for batch in lazy[1]) == 100
    assert _all_ended()
    feeder.close()
    with pytest.raises(memonger.FeedError, match="the feeder is closed"):
        next(feeder.epoch())


def test_ctrl_c_ends_a_wait() -> None:
    release = threading.Event()

    def stuck(identity: str) -> Iterator[Any]:
        threading.Timer(0.05, _thread.interrupt_main).start()
        release.wait(20)
        yield from good(identity)

    feeder, begin = memonger.Feeder(config(), stuck, names(1)), time.monotonic()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            list(feeder.epoch())
    finally:
        signal.signal(signal.SIGINT, before)
    release.set()
    assert time.monotonic() - begin < 10


def test_a_hook_that_fails_ends_the_epoch_with_its_own_error() -> None:
    feeder = memonger.Feeder(config(), good, names(), apply_on_input_batch=lambda feeds: {}["y"])  # type: ignore[index]
    with pytest.raises(KeyError, match="y"):
        next(feeder.epoch())
    assert _all_ended()
    feeder = memonger.Feeder(config(), good, names(), apply_on_input_batch=lambda feeds: feeds["x"])
    with pytest.raises(
        memonger.FeedError, match="apply_on_input_batch gave a ndarray; it has to give the arrays by name"
    ):
        next(feeder.epoch())


def _loader(*batches: Any) -> Any:
    class Loader:
        def __iter__(self) -> Iterator[Any]:
            for batch in batches:
                if isinstance(batch, Exception):
                    raise batch
                yield batch

    return Loader()


OKAY = {"x": np.zeros((4, 3), np.float32), "labels": np.zeros(4, np.int64)}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (ValueError("broken"), "the loader's batch 1 can't be read: ValueError: broken"),
        ((OKAY["x"],), "the loader's batch 1: 1 tensors were given, and a sample has 2"),
        (
            {"x": OKAY["x"], "labels": np.zeros(3, np.int64)},
            r"the loader's batch 1: 'labels' is int64\[3\], .* int64\[4\]",
        ),
        (
            {name: np.repeat(array, 2, 0) for name, array in OKAY.items()},
            "has 8 samples, and 4 are allowed: raise preferred_batch or cpu_limit",
        ),
    ],
)
def test_a_bad_batch_of_a_loader_is_named(batch: Any, message: str) -> None:
    feeder = memonger.Feeder.from_loader(config(), _loader(OKAY, batch))
    seen = []
    with pytest.raises(memonger.FeedError, match=message):
        seen.extend(batch.number for batch in feeder.epoch())
    assert seen == [0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"identities": "abc"}, "identities must be in an order, as a list of file names, not a str"),
        ({"identities": {1, 2}}, "not a set. Sort it"),
        ({"identities": []}, "there are no identities"),
        ({"config": config(sample_count=7)}, "sample_count is 7, and 10 identities give 10 samples"),
        ({"reader": 3}, "reader must be a function of an identity"),
        ({"output_reader": good}, "output_reader reads the configuration's outputs"),
        ({"seed": -1}, "seed must be a whole number"),
        ({"last_batch": "skip"}, "last_batch must be 'keep', 'drop' or 'pad', not 'skip'"),
        ({"padding": {"labels": 0}}, "padding is for last_batch='pad'"),
        ({"last_batch": "pad", "padding": {"y": 0}}, "padding names 'y'; a sample has 'x', 'labels'"),
        (
            {"last_batch": "pad", "padding": {"labels": 0.5}},
            r"padding of 'labels' must be int64\[\] or a number, not float64",
        ),
        (
            {"last_batch": "pad", "padding": {"x": [1, 2]}},
            r"padding of 'x' must be float32\[3\] or a number, not int64\[2\]",
        ),
        ({"tensors": "jax"}, "tensors must be 'numpy' or 'torch', not 'jax'"),
        ({"timeout": 0}, "timeout must be a number of seconds above 0"),
        ({"read_together": 0}, "read_together must be a whole number"),
        ({"apply_on_input_batch": 1}, "apply_on_input_batch must be a function"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(memonger.FeedError, match=message):
        memonger.Feeder(**{"config": config(), "reader": good, "identities": names(), **arguments})
    with pytest.raises(memonger.FeedError, match="can't be gone through once an epoch"):
        memonger.Feeder.from_loader(config(), iter([OKAY]))


def test_a_fork_while_an_epoch_is_read_is_told_to_make_its_own() -> None:
    """The thread that reads isn't there, and nobody lets go of what it holds."""
    feeder = memonger.Feeder(config(), good, names() * 50)
    first = feeder.epoch()
    next(first)
    child = os.fork()
    if child == 0:
        said = 1
        try:
            next(feeder.epoch(1))
        except memonger.FeedError as error:
            said = 0 if "make a feeder in each process" in str(error) else 2
        finally:
            os._exit(said)
    assert _status(child) == 0
    first.close()


def test_a_fork_of_a_feeder_at_rest_reads_by_itself() -> None:
    feeder = memonger.Feeder(config(), good, names())
    count = len(list(feeder.epoch()))
    child = os.fork()
    if child == 0:
        said = 1
        try:
            said = 0 if len(list(feeder.epoch(1))) == count else 2
        finally:
            os._exit(said)
    assert _status(child) == 0


def _status(child: int) -> int | None:
    """How a process ended; None if it hangs, and was killed."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None
