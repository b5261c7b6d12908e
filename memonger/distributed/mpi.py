"""mpi4py between CPUs."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from memonger.devices import Device
from memonger.distributed.engines import Array, EngineError, Handle, parts_of
from memonger.errors import SessionError


class MpiEngine:
    """mpi4py. Where a rank dies, MPI itself ends the others; there is no time limit for one that hangs.

    Args:
        communicator: An ``mpi4py.MPI.Comm``.
        device: Where the rank runs.

    Raises:
        SessionError: that isn't the host.
    """

    def __init__(self, communicator: Any, device: Device) -> None:
        if not device.is_host:
            raise SessionError(
                f"mpi4py adds up numbers in the memory of CPUs, and this plan runs on {device}: leave group out and "
                "start the ranks with torchrun, which takes NCCL."
            )
        from mpi4py import MPI

        self._mpi, self._comm = MPI, communicator.Dup()
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()

    def _divided(self, array: Any) -> Any:
        if array.dtype not in (np.float32, np.float64):
            raise EngineError(f"mpi4py adds up float32 and float64, not {array.dtype}: take torch.distributed.")
        with np.errstate(all="ignore"):  # between two gradients lie bytes of anything
            array /= self.size
        return array

    def all_reduce(self, array: Array) -> Handle:
        """See `Engine`."""
        return Handle([self._comm.Iallreduce(self._mpi.IN_PLACE, self._divided(array)).Wait])

    def reduce_scatter(self, array: Array, ends: Sequence[int]) -> Handle:
        """See `Engine`."""
        whole = self._divided(array)
        return Handle([
            self._comm.Ireduce(
                self._mpi.IN_PLACE if owner == self.rank else whole[begin:end],
                whole[begin:end] if owner == self.rank else None, root=owner).Wait
            for owner, (begin, end) in enumerate(parts_of(ends)) if begin < end
        ])  # fmt: skip

    def broadcast(self, array: Array, source: int) -> Handle:
        """See `Engine`."""
        return Handle([self._comm.Ibcast(array, root=source).Wait])

    def all_gather(self, text: str) -> list[str]:
        """See `Engine`."""
        return [str(each) for each in self._comm.allgather(text)]

    def silent(self, said: str) -> dict[int, str]:
        """See `Engine`: MPI doesn't say."""
        return dict.fromkeys(range(self.size), said)

    def close(self, said: str = "") -> None:
        """See `Engine`."""
        self._comm.Free()
