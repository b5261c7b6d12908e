"""Who carries bytes between ranks, behind the same few functions: torch.distributed on CPUs. See `nccl` and `mpi`."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, Protocol

import numpy as np

from memonger.errors import RuntimeUnavailableError, SessionError
from memonger.runtime.arena import DeviceArray
from memonger.words import option

GRACE = 5.0
"""Seconds that ranks wait for one another's answer, once a collective has failed; less with a short time limit."""


Array = np.ndarray | DeviceArray
"""Numbers of the host, or of the device that a rank runs on."""

_GROUPS = count()  # made in this process, to tell what ranks of one leave in the store from that of another


class Handle:
    """Something under way.

    Args:
        waits: Each returns when a part of it is done; none where all of it is done already.
        future: Gives what tells when the last part is done; None: nobody tells.
    """

    def __init__(self, waits: Sequence[Callable[[], object]] = (), future: Callable[[], Any] | None = None) -> None:
        self._waits, self._future, self._calls = waits, future, list[Callable[[], None]]()

    def when_done(self, call: Callable[[], None]) -> None:
        """Have a function called as soon as it is done, where the engine can tell, else where it is waited for."""
        if not self._waits:
            call()
        elif self._future is None:
            self._calls.append(call)
        else:
            self._future().add_done_callback(lambda _: call())

    def wait(self) -> None:
        """Wait until it is done.

        Raises:
            EngineError: it failed, or took longer than the engine's time limit.
        """
        for wait in self._waits:
            wait()
        for call in self._calls:
            call()


class EngineError(SessionError):
    """Bytes didn't get through: another rank has ended, or doesn't take part."""


class CollectiveEngine(Protocol):
    """A group of ranks. Arrays are written where they lie; all ranks call the same functions in the same order.

    Whoever begins something has written the array: on a device its work is done, or is in the stream that the engine
    works behind. Nobody touches it before `Handle.wait` has returned.

    Attributes:
        rank: This process's number.
        size: How many there are.
    """

    rank: int
    size: int

    def all_reduce(self, array: Array) -> Handle:
        """Begin to replace an array by its mean over the ranks: each divides by their number, then all are added."""

    def reduce_scatter(self, array: Array, ends: Sequence[int]) -> Handle:
        """As `all_reduce`, but a rank gets only its part, which ends at its element of ``ends``; the rest is lost."""

    def broadcast(self, array: Array, source: int) -> Handle:
        """Begin to copy an array from one rank to all."""

    def all_gather(self, text: str) -> list[str]:
        """A text of every rank."""

    def silent(self, said: str) -> dict[int, str]:
        """After a failure: what each rank said of itself within seconds (`GRACE`); those missing have ended or hang.

        The group is closed; nothing else can be asked of the engine.
        """

    def close(self, said: str = "") -> None:
        """Leave the group; ranks that go on are told what is said here."""


class SingleRank:
    """One rank, which needs no engine."""

    rank, size = 0, 1

    def all_reduce(self, array: Array) -> Handle:
        """The mean of one."""
        return Handle()

    def reduce_scatter(self, array: Array, ends: Sequence[int]) -> Handle:
        """All of it."""
        return Handle()

    def broadcast(self, array: Array, source: int) -> Handle:
        """It is there."""
        return Handle()

    def all_gather(self, text: str) -> list[str]:
        """Its own."""
        return [text]

    def silent(self, said: str) -> dict[int, str]:
        """Itself."""
        return {0: said}

    def close(self, said: str = "") -> None:
        """Nothing is to be left."""


class TorchEngine:
    """torch.distributed: gloo between CPUs. `memonger.distributed.nccl` is the one for GPUs.

    Args:
        group: A process group of the caller's; None: one that is made from what ``torchrun`` says.
        timeout: Seconds after which a collective that isn't done has failed; a group of the caller's has its own.

    Raises:
        RuntimeUnavailableError: PyTorch isn't installed, or is without torch.distributed; the ranks don't find one
            another.
        SessionError: the group carries no bytes of the host.
    """

    backend = "gloo"

    def __init__(self, group: Any = None, timeout: float = 300) -> None:
        try:
            import torch
            import torch.distributed as dist
        except ImportError as error:
            raise RuntimeUnavailableError(
                "ranks need an engine, and PyTorch isn't installed: pip install 'memonger[distributed]'."
            ) from error
        if not dist.is_available():
            raise RuntimeUnavailableError("this PyTorch is built without torch.distributed, which ranks need.")
        self._torch: Any = torch
        self._dist: Any = dist
        self._group, self._owns = group, group is None
        self._store: Any = None
        self._grace, self._timeout = min(GRACE, timeout / 4), timedelta(seconds=timeout)
        self._check()
        if group is None and dist.is_initialized():
            self._group, self._owns = dist.group.WORLD, False
        elif group is None:
            self._join()
        self._on_host = self._group  # what carries arrays of the host, and texts
        if not self._owns:
            self._adopt(dict(pair.split(":") for pair in dist.get_backend_config(self._group).split(",")))
        self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)

    def _check(self) -> None:
        """Check what this PyTorch can do."""

    def _join(self) -> None:
        """Make the group that ``torchrun`` describes in the environment."""
        dist: Any = self._dist
        try:
            store, rank, size = next(iter(dist.rendezvous("env://", timeout=self._timeout)))
            again = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
            self._store = dist.PrefixStore(f"memonger/{again}/{next(_GROUPS)}", store)
            dist.init_process_group(
                self.backend, store=self._store, rank=rank, world_size=size, timeout=self._timeout, **self._place()
            )
        except (RuntimeError, ValueError) as error:
            where = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
            raise RuntimeUnavailableError(
                f"rank {os.environ.get('RANK', '?')} can't join the others at {where} ({_first_line(error)}). Start "
                "all ranks with torchrun; where the port is in use, give another one (torchrun --master-port)."
            ) from error

    def _place(self) -> dict[str, Any]:
        """What torch.distributed is told of the device, beside the backend."""
        return {}

    def _adopt(self, carriers: dict[str, str]) -> None:
        """Take a group of the caller's.

        Args:
            carriers: What carries bytes in it, by kind of device.
        """
        if "cpu" not in carriers:
            raise SessionError(
                f"the ranks' group is for {', '.join(sorted(carriers))} alone ({', '.join(carriers.values())}), and "
                "this plan runs on the CPU: make the group with init_process_group('gloo'), or plan for the device "
                f"({option('device', 'cuda')})."
            )

    def _tensor(self, array: Any) -> Any:
        """A tensor over an array's own bytes."""
        if array.dtype.name == "bfloat16":
            return self._torch.from_numpy(array.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(array)

    def all_reduce(self, array: Array) -> Handle:
        """See `CollectiveEngine`."""
        return self._begun(array, lambda tensor, group: [
            self._dist.all_reduce(tensor.div_(self.size), group=group, async_op=True)
        ])  # fmt: skip

    def reduce_scatter(self, array: Array, ends: Sequence[int]) -> Handle:
        """See `CollectiveEngine`: each part is reduced to its rank, as parts are of unequal length."""

        def begin(tensor: Any, group: Any) -> list[Any]:
            tensor.div_(self.size)
            return [
                self._dist.reduce(tensor[first:end], group_dst=owner, group=group, async_op=True)
                for owner, (first, end) in enumerate(parts_of(ends)) if first < end
            ]  # fmt: skip

        return self._begun(array, begin)

    def broadcast(self, array: Array, source: int) -> Handle:
        """See `CollectiveEngine`."""
        return self._begun(array, lambda tensor, group: [
            self._dist.broadcast(tensor, group_src=source, group=group, async_op=True)
        ])  # fmt: skip

    def all_gather(self, text: str) -> list[str]:
        """See `CollectiveEngine`."""
        found: list[Any] = [None] * self.size
        with torch_errors():
            self._dist.all_gather_object(found, text, group=self._on_host)
        return [str(each) for each in found]

    def _begun(self, array: Array, begin: Callable[[Any, Any], list[Any]]) -> Handle:
        """What is under way once ``begin`` was called with a tensor over the array and the group that carries it."""
        with torch_errors():
            works = begin(self._tensor(array), self._on_host)
        return Handle([partial(_waited, work) for work in works], works[-1].get_future if works else None)

    def silent(self, said: str) -> dict[int, str]:
        """See `CollectiveEngine`: closed connections tell the other ranks, which answer in the store of the group."""
        store = self._store or self._dist.PrefixStore("memonger", self._dist.distributed_c10d._get_default_store())
        self._break()
        found = {self.rank: said}
        end = time.monotonic() + self._grace
        try:
            store.set(f"failed/{self.rank}", said)
            while len(found) < self.size and time.monotonic() < end:
                for rank in set(range(self.size)) - found.keys():
                    if store.check([f"failed/{rank}"]):
                        found[rank] = store.get(f"failed/{rank}").decode()
                time.sleep(0.05)
        except RuntimeError:  # the store ended with rank 0, which has it where torchrun hasn't
            return dict.fromkeys(range(1, self.size), said)
        return found

    def close(self, said: str = "") -> None:
        """See `CollectiveEngine`."""
        if said and self._store is not None:
            self._store.set(f"failed/{self.rank}", said)
        if self._owns:
            self._leave()

    def _leave(self) -> None:
        if self._dist.is_initialized():
            self._dist.destroy_process_group(None if self._owns else self._group)

    def _break(self) -> None:
        """Leave a group in which something failed."""
        self._leave()


@contextmanager
def torch_errors() -> Iterator[None]:
    """What torch.distributed raises as an error of the engine."""
    try:
        yield
    except RuntimeError as error:
        raise EngineError(_first_line(error)) from error


def _waited(work: Any) -> None:
    """Wait for a collective of torch.distributed."""
    with torch_errors():
        work.wait()


def parts_of(ends: Sequence[int]) -> list[tuple[int, int]]:
    """First element and end of each part."""
    return list(zip((0, *ends), ends, strict=False))


def _first_line(error: Exception) -> str:
    first = (str(error).splitlines() or [type(error).__name__])[0]
    reason = str(error).partition("Last error:")[2].split("\n")  # NCCL's, which comes last
    words = " ".join([first, *filter(None, map(str.strip, reason))])
    return words.partition(". This is typically")[0]  # what gloo advises
