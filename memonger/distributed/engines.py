"""Who carries bytes between ranks: torch.distributed or mpi4py, behind the same few functions."""

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from typing import Any, Protocol

import numpy as np

from memonger.errors import RuntimeUnavailableError, SessionError

GRACE = 5.0
"""Seconds that ranks wait for one another's answer, once a collective has failed; less with a short time limit."""


_GROUPS = count()  # made in this process, to tell what ranks of one leave in the store from that of another


class Handle(Protocol):
    """Something under way."""

    def when_done(self, call: Callable[[], None]) -> None:
        """Have a function called as soon as it is done, where the engine can tell, else where it is waited for."""
        ...

    def wait(self) -> None:
        """Wait until it is done.

        Raises:
            EngineError: it failed, or took longer than the engine's time limit.
        """
        ...


class EngineError(SessionError):
    """Bytes didn't get through: another rank has ended, or doesn't take part."""


class Engine(Protocol):
    """A group of ranks. Arrays are written where they lie; all ranks call the same functions in the same order.

    Attributes:
        rank: This process's number.
        size: How many there are.
    """

    rank: int
    size: int

    def all_reduce(self, array: np.ndarray) -> Handle:
        """Begin to replace an array by its mean over the ranks: each divides by their number, then all are added."""
        ...

    def reduce_scatter(self, array: np.ndarray, ends: Sequence[int]) -> Handle:
        """As `all_reduce`, but a rank gets only its part, which ends at its element of ``ends``; the rest is lost."""
        ...

    def broadcast(self, array: np.ndarray, source: int) -> Handle:
        """Begin to copy an array from one rank to all."""
        ...

    def all_gather(self, text: str) -> list[str]:
        """A text of every rank."""
        ...

    def silent(self, said: str) -> dict[int, str]:
        """After a failure: what each rank said of itself within seconds (`GRACE`); those missing have ended or hang.

        The group is closed; nothing else can be asked of the engine.
        """
        ...

    def close(self, said: str = "") -> None:
        """Leave the group; ranks that go on are told what is said here."""
        ...


class Alone:
    """One rank, which needs no engine."""

    rank, size = 0, 1

    def all_reduce(self, array: np.ndarray) -> Handle:
        """The mean of one."""
        return _Done()

    def reduce_scatter(self, array: np.ndarray, ends: Sequence[int]) -> Handle:
        """All of it."""
        return _Done()

    def broadcast(self, array: np.ndarray, source: int) -> Handle:
        """It is there."""
        return _Done()

    def all_gather(self, text: str) -> list[str]:
        """Its own."""
        return [text]

    def silent(self, said: str) -> dict[int, str]:
        """Itself."""
        return {0: said}

    def close(self, said: str = "") -> None:
        """Nothing is to be left."""


class _Done:
    def when_done(self, call: Callable[[], None]) -> None:
        call()

    def wait(self) -> None:
        pass


class TorchEngine:
    """torch.distributed: gloo between CPUs.

    Args:
        group: A process group of the caller's; None: one that is made from what ``torchrun`` says.
        timeout: Seconds after which a collective that isn't done has failed; a group of the caller's has its own.

    Raises:
        RuntimeUnavailableError: PyTorch isn't installed, or is without torch.distributed; the ranks don't find one
            another.
    """

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
        self._grace = min(GRACE, timeout / 4)
        if group is None and dist.is_initialized():
            self._group, self._owns = dist.group.WORLD, False
        elif group is None:
            self._join(timedelta(seconds=timeout))
        self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)

    def _join(self, timeout: timedelta) -> None:
        """Make the group that ``torchrun`` describes in the environment."""
        dist: Any = self._dist
        try:
            store, rank, size = next(iter(dist.rendezvous("env://", timeout=timeout)))
            again = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
            self._store = dist.PrefixStore(f"memonger/{again}/{next(_GROUPS)}", store)
            dist.init_process_group("gloo", store=self._store, rank=rank, world_size=size, timeout=timeout)
        except (RuntimeError, ValueError) as error:
            where = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
            raise RuntimeUnavailableError(
                f"rank {os.environ.get('RANK', '?')} can't join the others at {where} ({_first_line(error)}). Start "
                "all ranks with torchrun; where the port is in use, give another one (torchrun --master-port)."
            ) from error

    def _tensor(self, array: np.ndarray) -> Any:
        if array.dtype.name == "bfloat16":
            return self._torch.from_numpy(array.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(array)

    def all_reduce(self, array: np.ndarray) -> Handle:
        """See `Engine`."""
        tensor = self._tensor(array).div_(self.size)
        return self._begun(lambda: self._dist.all_reduce(tensor, group=self._group, async_op=True))

    def reduce_scatter(self, array: np.ndarray, ends: Sequence[int]) -> Handle:
        """See `Engine`; gloo reduces each part to its rank."""
        tensor = self._tensor(array).div_(self.size)
        parts = [(owner, tensor[begin:end]) for owner, (begin, end) in enumerate(_parts(ends)) if begin < end]
        return _All([
            self._begun(lambda part=part, owner=owner: self._dist.reduce(
                part, group_dst=owner, group=self._group, async_op=True))
            for owner, part in parts
        ])  # fmt: skip

    def broadcast(self, array: np.ndarray, source: int) -> Handle:
        """See `Engine`."""
        tensor = self._tensor(array)
        return self._begun(lambda: self._dist.broadcast(tensor, group_src=source, group=self._group, async_op=True))

    def all_gather(self, text: str) -> list[str]:
        """See `Engine`."""
        found: list[Any] = [None] * self.size
        try:
            self._dist.all_gather_object(found, text, group=self._group)
        except RuntimeError as error:
            raise EngineError(_first_line(error)) from error
        return [str(each) for each in found]

    def _begun(self, begin: Any) -> Handle:
        try:
            return _Work(begin())
        except RuntimeError as error:
            raise EngineError(_first_line(error)) from error

    def silent(self, said: str) -> dict[int, str]:
        """See `Engine`: closed connections tell the other ranks, which answer in the store of the group."""
        store = self._store or self._dist.PrefixStore("memonger", self._dist.distributed_c10d._get_default_store())
        self._leave()
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
        """See `Engine`."""
        if said and self._store is not None:
            self._store.set(f"failed/{self.rank}", said)
        if self._owns:
            self._leave()

    def _leave(self) -> None:
        if self._dist.is_initialized():
            self._dist.destroy_process_group(None if self._owns else self._group)


class _Work:
    """A collective of torch.distributed."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def when_done(self, call: Callable[[], None]) -> None:
        self.work.get_future().add_done_callback(lambda _: call())

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise EngineError(_first_line(error)) from error


class _All:
    """Several of them."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self.handles = handles

    def when_done(self, call: Callable[[], None]) -> None:
        if self.handles:
            self.handles[-1].when_done(call)
        else:
            call()

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()


class MpiEngine:
    """mpi4py. Where a rank dies, MPI itself ends the others; there is no time limit for one that hangs.

    Args:
        communicator: An ``mpi4py.MPI.Comm``.
    """

    def __init__(self, communicator: Any) -> None:
        from mpi4py import MPI

        self._mpi, self._comm = MPI, communicator.Dup()
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()

    def _divided(self, array: np.ndarray) -> np.ndarray:
        if array.dtype not in (np.float32, np.float64):
            raise EngineError(f"mpi4py adds up float32 and float64, not {array.dtype}: take torch.distributed.")
        with np.errstate(all="ignore"):  # between two gradients lie bytes of anything
            array /= self.size
        return array

    def all_reduce(self, array: np.ndarray) -> Handle:
        """See `Engine`."""
        return _Request(self._comm.Iallreduce(self._mpi.IN_PLACE, self._divided(array)))

    def reduce_scatter(self, array: np.ndarray, ends: Sequence[int]) -> Handle:
        """See `Engine`."""
        self._divided(array)
        return _All([
            _Request(self._comm.Ireduce(
                self._mpi.IN_PLACE if owner == self.rank else array[begin:end],
                array[begin:end] if owner == self.rank else None, root=owner))
            for owner, (begin, end) in enumerate(_parts(ends)) if begin < end
        ])  # fmt: skip

    def broadcast(self, array: np.ndarray, source: int) -> Handle:
        """See `Engine`."""
        return _Request(self._comm.Ibcast(array, root=source))

    def all_gather(self, text: str) -> list[str]:
        """See `Engine`."""
        return [str(each) for each in self._comm.allgather(text)]

    def silent(self, said: str) -> dict[int, str]:
        """See `Engine`: MPI doesn't say."""
        return dict.fromkeys(range(self.size), said)

    def close(self, said: str = "") -> None:
        """See `Engine`."""
        self._comm.Free()


class _Request:
    """A collective of mpi4py."""

    def __init__(self, request: Any) -> None:
        self.request, self.calls = request, list[Callable[[], None]]()

    def when_done(self, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def wait(self) -> None:
        self.request.Wait()
        for call in self.calls:
            call()


def _parts(ends: Sequence[int]) -> list[tuple[int, int]]:
    """First element and end of each part."""
    return list(zip((0, *ends), ends, strict=False))


def _first_line(error: Exception) -> str:
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return first.partition(". This is typically")[0]  # what gloo advises


def engine_of(group: Any, timeout: float) -> Engine:
    """The engine for a group as a caller gives it.

    Args:
        group: A process group of torch.distributed, a communicator of mpi4py, or an engine. None: what ``torchrun``
            says; without it one rank alone.
        timeout: See `TorchEngine`.

    Raises:
        RuntimeUnavailableError: see `TorchEngine`.
        SessionError: it is none of these.
    """
    if group is None:
        return TorchEngine(None, timeout) if "WORLD_SIZE" in os.environ else Alone()
    if hasattr(group, "Get_rank") and hasattr(group, "Iallreduce"):
        return MpiEngine(group)
    if hasattr(group, "rank") and hasattr(group, "all_gather"):
        return group  # type: ignore[no-any-return]
    if type(group).__module__.partition(".")[0] == "torch":
        return TorchEngine(group, timeout)
    raise SessionError(
        f"group must be a process group of torch.distributed or a communicator of mpi4py, not {group!r}."
    )
