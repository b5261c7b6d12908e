"""How many samples fit in memory, and which batch to use."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memonger import units
from memonger.errors import FeedError
from memonger.feeding.samples import SampleTensor, tensors_of
from memonger.units import MOST_BATCH, format_size, in_bytes, in_full
from memonger.words import quoted

ORDER_BYTES = 9
"""Of each identity: its place in the order of an epoch, and whether its samples are kept."""

HELD_BATCHES = 2
"""The one that the caller has, and the one that is being made; those read ahead come on top."""

_BATCH = 32
"""The batch where nobody has said one."""


@dataclass(frozen=True, slots=True)
class Room:
    """Where the bytes of a limit go.

    Attributes:
        batch: Samples of a batch.
        read_ahead: Batches that wait, finished.
        cached_samples: Samples that stay in memory from epoch to epoch.
        order_bytes: The order of an epoch's samples.
        reading_bytes: What the reader has just given.
        batch_bytes: All batches: those that wait, the one being made, the one that the caller has.
        cache_bytes: The samples that stay.
    """

    batch: int
    read_ahead: int
    cached_samples: int
    order_bytes: int
    reading_bytes: int
    batch_bytes: int
    cache_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of them: a feeder never holds more."""
        return self.order_bytes + self.reading_bytes + self.batch_bytes + self.cache_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FeederConfig:
    """What a feeder may hold, and what it feeds. All that follows from that is known before anything is read.

    Attributes:
        cpu_limit: Bytes of the host's memory that a `Feeder` may hold, or a text such as ``2GiB``: samples that stay,
            batches read ahead, the one being made and the one that the caller has. What a reader needs to read comes on
            top.
        samples: The tensors of every sample, each with its shape without the batch's axis and its type:
            ``{"image": ((3, 224, 224), "float32"), "labels": ((), "int64")}``.
        sample_count: How many samples there are, every read of an identity counted with all it gives; None: left to
            the feeder, which counts its identities.
        gpu_limit: Bytes that the model may take where it runs: its plan's total, or without a plan at least the batch.
        outputs: Which of ``samples`` the network is to give (labels, targets); the others are its inputs.
        one_read_count: How many samples one read of an identity gives: variants, windows, rows of a file.
        preferred_batch: The batch to use where it fits; None: 32, or with a model the largest with which that fits.
        read_ahead: Batches that are made in the background before they are asked for, where they fit; 0: none, and no
            thread.
        cache: Whether samples stay in memory, as many as fit, so that they are read only once.
        tensors: What ``samples`` describes, as records.

    Raises:
        FeedError: an option has a value it can't take; not even one sample fits in a limit.
    """

    cpu_limit: float | str
    samples: Mapping[str, tuple[Sequence[int], Any]]
    sample_count: int | None = None
    gpu_limit: float | str | None = None
    outputs: Sequence[str] = ()
    one_read_count: int = 1
    preferred_batch: int | None = None
    read_ahead: int = 2
    cache: bool = True
    tensors: tuple[SampleTensor, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "tensors", tensors_of(self.samples))
        set_field(self, "samples", dict(self.samples))
        for option in ("cpu_limit", "gpu_limit"):
            if option == "cpu_limit" or self.gpu_limit is not None:
                set_field(self, option, in_bytes(option, getattr(self, option), FeedError))
        set_field(self, "outputs", (self.outputs,) if isinstance(self.outputs, str) else tuple(self.outputs))
        for option, least in (("one_read_count", 1), ("read_ahead", 0), ("preferred_batch", 1), ("sample_count", 1)):
            if least == 0 or option == "one_read_count" or getattr(self, option) is not None:
                set_field(self, option, whole(option, getattr(self, option), least))
        unknown = [name for name in self.outputs if name not in self.samples]
        if unknown:
            raise FeedError(f"outputs names {quoted(unknown)}, and a sample has {quoted(list(self.samples))}.")
        if self.sample_bytes == 0:
            raise FeedError("every tensor of samples is empty: there is nothing to feed.")
        if self.sample_count is not None and self.sample_count % self.one_read_count:
            raise FeedError(
                f"sample_count is {self.sample_count}, no multiple of one_read_count, {self.one_read_count}: it counts "
                "the samples, and each read of an identity gives one_read_count of them."
            )
        self.room()

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def batch(self) -> int:
        """The batch to use: the preferred one, or the largest below it that the limits and the samples allow."""
        return self.room().batch

    @property
    def fitting_samples(self) -> int:
        """How many samples fit in ``cpu_limit`` at once, wherever they are; at most ``sample_count``."""
        fitting = int(self.cpu_limit) // self.sample_bytes
        return fitting if self.sample_count is None else min(fitting, self.sample_count)

    @property
    def cached_samples(self) -> int:
        """How many of them stay in memory from epoch to epoch, beside the batches; the others are read every time."""
        return self.room().cached_samples

    @property
    def total_bytes(self) -> int:
        """The most that a `Feeder` holds; no more than ``cpu_limit``."""
        return self.room().total_bytes

    def room(self, *, whole_batches: bool = False) -> Room:
        """Where the bytes of ``cpu_limit`` go.

        Args:
            whole_batches: For batches that come as such, from a loader, and not as samples from a reader.

        Raises:
            FeedError: not even one sample fits.
        """
        limit, sample = int(self.cpu_limit), self.sample_bytes
        reads = 0 if whole_batches or self.sample_count is None else self.sample_count // self.one_read_count
        order = ORDER_BYTES * reads
        held = HELD_BATCHES + 1 if whole_batches else HELD_BATCHES
        fixed = order if whole_batches else order + sample
        batch = min(self.preferred_batch or _BATCH, (limit - fixed) // (held * sample), self.sample_count or MOST_BATCH)
        if batch < 1:
            raise FeedError(
                f"cpu_limit is {in_full(limit)}, and feeding takes at least {in_full(fixed + held * sample)}: "
                f"{in_full(sample)} for each of a sample just read, a batch of one being made, and one handed out"
                f"{f'; {in_full(order)} for the order of all samples' if order else ''}. Raise the limit."
            )
        if self.gpu_limit is not None:
            batch = min(batch, int(self.gpu_limit) // sample)
            if batch < 1:
                raise FeedError(
                    f"gpu_limit is {in_full(int(self.gpu_limit))}, and one sample takes {in_full(sample)}. Raise it."
                )
        ahead = min(self.read_ahead, (limit - fixed) // (batch * sample) - held)
        left = limit - fixed - (held + ahead) * batch * sample
        cached = min(reads, left // (self.one_read_count * sample)) if self.cache else 0
        return Room(
            batch=batch,
            read_ahead=ahead,
            cached_samples=cached * self.one_read_count,
            order_bytes=order,
            reading_bytes=batch * sample if whole_batches else sample,
            batch_bytes=(HELD_BATCHES + ahead) * batch * sample,
            cache_bytes=cached * self.one_read_count * sample,
        )

    def for_model(self, model: Any, memory: float | str | None = None, **options: Any) -> "FeederConfig":
        """This configuration with a batch with which the model fits its memory as well.

        Args:
            model: What `memonger.fit` takes, with an open batch: that finds the largest. Or what it has found; or a
                `memonger.Plan`, whose batch is used.
            memory: Bytes for the model, its weights and state included; None: ``gpu_limit``.
            options: Those of `memonger.fit`: ``loss``, ``optimizer``, ``device`` ...

        Raises:
            FeedError: there is no memory said; no batch fits; a plan's batch is more than ``cpu_limit`` holds.
            MemongerError: as `memonger.fit`.
        """
        from memonger.feeding.models import batch_of

        limit = memory if memory is not None else self.gpu_limit
        batch, is_fixed = batch_of(
            model, self.tensors, None if limit is None else in_bytes("memory", limit, FeedError), options
        )
        wanted = batch if is_fixed else min(batch, self.preferred_batch or batch)
        config = dataclasses.replace(self, preferred_batch=wanted)
        if is_fixed and config.batch != batch:
            raise FeedError(
                f"the plan is for batches of {batch}, and the limits and samples allow {config.batch}: raise cpu_limit "
                f"({in_full(int(self.cpu_limit))}), or plan for that batch."
            )
        return dataclasses.replace(config, preferred_batch=config.batch)

    def __str__(self) -> str:
        room, limit = self.room(), format_size(int(self.cpu_limit))
        wanted = "" if self.preferred_batch in (None, room.batch) else f" ({self.preferred_batch} preferred)"
        count, stay = "samples", ""
        if self.sample_count is not None:
            count = f"of {self.sample_count} samples"
            again = self.sample_count - room.cached_samples
            then = f", {again} are read again every epoch" if again else ""
            stay = f"; {room.cached_samples} samples stay in memory{then}"
        return (
            f"{self.fitting_samples} {count} fit in {limit}, at {in_full(self.sample_bytes)} each. Batches of "
            f"{room.batch}{wanted}, {room.read_ahead} read ahead{stay}. At most {in_full(room.total_bytes)} are held."
        )


def whole(option: str, value: Any, least: int) -> int:
    """The option's value: a whole number, or a `FeedError` says what it may be."""
    return units.whole(option, value, least, MOST_BATCH, FeedError)
