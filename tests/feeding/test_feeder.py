"""What a feeder gives: every sample once an epoch, in an order of its own, within its limit."""

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memonger
from memonger.runtime import process_memory
from tests.support import training_models

SAMPLES = {"x": ((3,), "float32"), "labels": ((), "int64")}
SAMPLE = 20  # bytes


def config(limit: Any = "1MiB", **options: Any) -> memonger.FeederConfig:
    return memonger.FeederConfig(**{"cpu_limit": limit, "samples": SAMPLES, "preferred_batch": 4, **options})


def sample(identity: int, number: int = 0) -> dict[str, Any]:
    return {"x": np.full(3, identity + number / 8, np.float32), "labels": identity}


class Reader:
    """Gives so many samples an identity, and counts its calls."""

    def __init__(self, each: int = 1) -> None:
        self.each, self.calls = each, list[Any]()

    def __call__(self, identities: Any) -> Iterator[dict[str, Any]]:
        self.calls.append(identities)
        for identity in identities if isinstance(identities, list) else [identities]:
            for number in range(self.each):
                yield sample(identity, number)


def rows(batches: Any) -> list[tuple[float, int, int, int]]:
    """Everything that was given: x, label, identity, batch."""
    found = []
    for batch in batches:
        assert (batch["x"] == batch["x"][:, :1]).all()
        numbers = zip(batch["x"][:, 0].tolist(), batch["labels"].tolist(), batch.identities, strict=True)
        found += [(*row, batch.number) for row in numbers]
    return found


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 17),
    each=st.integers(1, 3),
    together=st.one_of(st.none(), st.integers(1, 5)),
    ahead=st.integers(0, 3),
    room=st.integers(0, 60),
    batch=st.integers(1, 7),
    shuffle=st.booleans(),
)
def test_every_sample_comes_once_an_epoch_and_the_limit_decides_nothing_else(
    count: int, each: int, together: int | None, ahead: int, room: int, batch: int, shuffle: bool
) -> None:
    least = 9 * count + SAMPLE + 2 * min(batch, count * each) * SAMPLE
    order = {"shuffle": shuffle, "seed": 5, "read_together": together}
    made = config(least + room * SAMPLE, one_read_count=each, preferred_batch=batch, read_ahead=ahead)
    roomy = config(preferred_batch=batch, one_read_count=each)
    with memonger.Feeder(made, Reader(each), range(count), **order) as feeder:  # type: ignore[arg-type]
        epochs = [rows(epoch) for epoch in feeder.epochs(3)]
        assert feeder.peak_bytes <= feeder.room.total_bytes <= least + room * SAMPLE
    with memonger.Feeder(roomy, Reader(each), range(count), **order) as feeder:  # type: ignore[arg-type]
        assert [rows(feeder.epoch(number)) for number in range(3)] == epochs
    every = [(identity + number / 8, identity, identity) for identity in range(count) for number in range(each)]
    for epoch in epochs:
        assert sorted(row[:3] for row in epoch) == every
        assert [row[3] for row in epoch] == [number // batch for number in range(count * each)]
    if not shuffle:
        assert [row[:3] for row in epochs[1]] == every


def test_orders_are_those_of_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        feeder = memonger.Feeder(config(), Reader(), range(50), shuffle=True, seed=seed)
        return [identity for batch in feeder.epoch(epoch) for identity in batch.identities]

    assert order(1, 2) == order(1, 2)
    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4


def test_what_fits_is_read_once_and_the_rest_every_epoch() -> None:
    reader = Reader()
    with memonger.Feeder(config(), reader, range(10), shuffle=True) as feeder:
        assert [len(rows(epoch)) for epoch in feeder.epochs(5)] == [10] * 5
    assert sorted(reader.calls) == list(range(10))
    reader = Reader()
    tight = config(9 * 10 + SAMPLE + 4 * 4 * SAMPLE + 6 * SAMPLE)
    with memonger.Feeder(tight, reader, range(10), shuffle=True) as feeder:
        assert [len(rows(epoch)) for epoch in feeder.epochs(5)] == [10] * 5
        assert feeder.room.cached_samples == 6
    assert sorted(reader.calls) == sorted([*range(6), *(5 * [6, 7, 8, 9])])


def test_reads_may_give_several_samples_and_take_several_identities() -> None:
    reader = Reader(each=2)
    feeder = memonger.Feeder(config(one_read_count=2), reader, range(5), read_together=2)
    assert rows(feeder.epoch())[:3] == [(0, 0, 0, 0), (0.125, 0, 0, 0), (1, 1, 1, 0)]
    assert reader.calls == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("last", "padding", "labels"),
    [
        ("keep", None, [[0, 1, 2, 3], [4, 5]]),
        ("drop", None, [[0, 1, 2, 3]]),
        ("pad", None, [[0, 1, 2, 3], [4, 5, 5, 5]]),
        ("pad", {"labels": -100}, [[0, 1, 2, 3], [4, 5, -100, -100]]),
    ],
)
def test_the_last_batch(last: Any, padding: Any, labels: list[list[int]]) -> None:
    feeder = memonger.Feeder(config(), Reader(), range(6), last_batch=last, padding=padding)
    batches = list(feeder.epoch())
    assert [batch["labels"].tolist() for batch in batches] == labels
    assert len(feeder) == len(labels)
    assert [batch.size for batch in batches] == [4, 2][: len(labels)]
    loader = [
        {name: array.copy() for name, array in batch.items()}
        for batch in memonger.Feeder(config(), Reader(), range(6)).epoch()
    ]
    loaded = memonger.Feeder.from_loader(config(), loader, last_batch=last, padding=padding)
    assert [batch["labels"].tolist() for batch in loaded.epoch()] == labels


def test_batches_that_are_kept_stay_as_they_are() -> None:
    with memonger.Feeder(config(9 * 40 + 7 * 4 * SAMPLE), Reader(), range(40)) as feeder:
        kept = list(feeder.epoch())
        more = [feeder.epoch(number) for number in (1, 2)]
        kept += [next(more[0])]
        assert len(rows(more[1])) == 40
        with pytest.raises(
            memonger.FeedError, match="epoch 1 was ended: the feeder was closed, or another epoch begun"
        ):
            next(more[0])
    assert [label for batch in kept for label in batch["labels"].tolist()] == [*range(40), *range(4)]


def test_inputs_and_outputs_have_readers_and_hooks_of_their_own() -> None:
    feeder = memonger.Feeder(
        config(outputs="labels"),
        lambda identity: sample(identity)["x"],
        range(6),
        output_reader=lambda identity: iter([identity]),
        apply_on_input_batch=lambda feeds: {"x": feeds["x"] * 2, "mask": feeds["x"] > 3},
        apply_on_output_batch=lambda outputs: {"labels": outputs["labels"] % 2},
    )
    first, second = feeder.epoch()
    assert first["x"][:, 0].tolist() == [0, 2, 4, 6]
    assert second["mask"].all()
    assert first["labels"].tolist() == [0, 1, 0, 1]


def test_tensors_of_torch_lie_over_the_same_memory() -> None:
    feeder = memonger.Feeder(config(), Reader(), range(4), tensors="torch")
    (batch,) = feeder.epoch()
    assert isinstance(batch["x"], torch.Tensor)
    assert batch["labels"].tolist() == [0, 1, 2, 3]
    held = feeder.held_bytes
    feeds = dict(batch)
    del batch
    assert feeder.held_bytes == held
    del feeds
    assert feeder.held_bytes == held - 4 * SAMPLE


@pytest.mark.parametrize("size", [3, 1 << 15])
def test_a_part_of_a_batch_holds_its_memory(size: int) -> None:
    made = memonger.FeederConfig(cpu_limit="2MiB", samples={"x": ((size,), "float32")}, preferred_batch=4, cache=False)
    feeder = memonger.Feeder(made, lambda identity: np.full(size, identity, np.float32), range(4))
    (row,) = (batch["x"][2, 1:] for batch in feeder.epoch())
    assert feeder.held_bytes == 4 * 4 * size
    assert (row == 2).all()
    del row
    assert feeder.held_bytes == 0


def test_a_training_session_learns_from_it_as_from_arrays() -> None:
    plan = training_models.plan()
    batches = [training_models.batch(seed) for seed in range(3)]
    directly = memonger.TrainingSession(plan)
    losses = [directly.step(feeds) for _ in range(2) for feeds in batches]

    def read(identity: tuple[int, int]) -> Iterator[dict[str, Any]]:
        yield {name: array[identity[1]] for name, array in batches[identity[0]].items()}

    samples = {"x": ((training_models.FEATURES,), "float32"), "labels": ((), "int64")}
    identities = [(batch, row) for batch in range(3) for row in range(training_models.BATCH)]
    made = memonger.FeederConfig(cpu_limit="1MiB", samples=samples, sample_count=len(identities)).for_model(plan)
    for form in ("numpy", "torch"):
        trainer, feeder = memonger.TrainingSession(plan), memonger.Feeder(made, read, identities, tensors=form)
        assert [trainer.step(feeds) for epoch in feeder.epochs(2) for feeds in epoch] == losses


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return torch.full((3,), float(index)), index


def test_a_loader_is_wrapped() -> None:
    loader = torch.utils.data.DataLoader(Rows(), batch_size=4)
    with memonger.Feeder.from_loader(config(), loader, tensors="torch") as feeder:
        for epoch in feeder.epochs(2):
            batches = list(epoch)
            assert [batch["labels"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
            assert all((batch["x"][:, 0] == batch["labels"]).all() for batch in batches)
        assert len(feeder) == 3
        assert feeder.peak_bytes <= feeder.room.total_bytes
    sampler = torch.utils.data.DistributedSampler(Rows(), num_replicas=1, rank=0)
    feeder = memonger.Feeder.from_loader(config(), torch.utils.data.DataLoader(Rows(), 4, sampler=sampler))
    first, second = ([label for b in feeder.epoch(number) for label in b["labels"].tolist()] for number in (0, 1))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


@pytest.mark.skipif(not process_memory.is_measurable(), reason="the system doesn't say what a process takes")
def test_the_process_takes_what_was_said_and_gives_it_back() -> None:
    limit, size = 24 << 20, 1 << 18
    made = memonger.FeederConfig(cpu_limit=limit, samples={"x": ((size,), "uint8")}, preferred_batch=8)
    made_of = np.arange(size, dtype=np.uint8)
    feeder = memonger.Feeder(made, lambda identity: made_of + np.uint8(identity), range(160))

    def feed() -> None:
        for epoch in feeder.epochs(2):
            for batch in epoch:
                assert batch["x"][0, 5] == (batch.identities[0] + 5) % 256

    before = process_memory.settle()
    taken = process_memory.peak_over(before, feed)
    assert 0.8 * limit < taken < limit + (2 << 20), f"{taken / 2**20:.1f} MiB"
    assert 0.8 * limit < feeder.peak_bytes <= feeder.room.total_bytes <= limit
    feeder.close()
    assert process_memory.settle() - before < 2 << 20
    assert feeder.held_bytes == 0
    assert repr(feeder) == "<Feeder of batches of 8: 0 B of 23.8 MiB held, closed>"


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_feeder_that_is_dropped_is_gone(ahead: int) -> None:
    feeder = memonger.Feeder(config(read_ahead=ahead), Reader(), range(9))
    gc.disable()
    try:
        assert [len(rows(epoch)) for epoch in feeder.epochs(2)] == [9, 9]
        next(feeder.epoch())
        gone = weakref.ref(feeder)
        del feeder
        assert gone() is None
    finally:
        gc.enable()


def test_a_thousand_epochs_leave_nothing_behind() -> None:
    with memonger.Feeder(config(9 * 8 + 9 * 4 * SAMPLE, cache=False), Reader(), range(8), shuffle=True) as feeder:
        assert sum(batch.size for batch in feeder.epoch(0)) == 8
        held, threads = feeder.held_bytes, threading.active_count()
        seen = sum(batch.size for epoch in feeder.epochs(500) for batch in epoch)
        for number in range(500):  # left early
            next(feeder.epoch(number))
        assert seen == 500 * 8
        for thread in threading.enumerate():
            if thread.name == "memonger feeder":
                thread.join(10)
        assert threading.active_count() == threads
        assert feeder.held_bytes == held
        assert feeder.peak_bytes <= feeder.room.total_bytes
