"""Copies weights from the host's memory to a CUDA device while kernels run, on a stream and in a thread of its own.

Nothing on the device orders these copies and kernels: the host does (`memonger.graph.ahead`). A copy begins when the
run of the partition before is over, and the one that reads it begins when the copy is there.
"""

import ctypes
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np

from memonger.devices import Device
from memonger.errors import SessionError
from memonger.runtime.cuda import driver
from memonger.runtime.prepared import CopySchedule, HostCopy


class WeightCopier:
    """Makes the copies of a plan, for one run at a time; see `memonger.runtime.executable.Copier`.

    They pass through memory of the host that is locked for the device, in two halves: one is filled by the processor,
    from the file where a weight lies in one, while the other is under way.

    Args:
        schedule: What is copied when.
        device: Where to.

    Raises:
        SessionError: a file can't be read; the host hasn't that much memory to lock.
    """

    def __init__(self, schedule: CopySchedule, device: Device) -> None:
        self._index, self._copies, self._owner = device.index, schedule.copies, os.getpid()
        self._staging, self._half, self._arena = 0, schedule.staging_bytes // 2, 0
        self._stream: Any = None
        self._files = dict[str, BinaryIO]()
        self._begun = dict[int, list[Future[None]]]()  # by the partition that they are waited for before
        for source in (*(copy.source for copy in schedule.copies), *(source for _, source in schedule.fed)):
            if isinstance(source, tuple) and (path := source[0]) not in self._files:
                try:
                    self._files[path] = open(path, "rb", buffering=0)  # noqa: SIM115
                except OSError as error:
                    raise _unreadable(path, error) from error
        self._stream = driver.make_stream(self._index)
        self._staging = driver.allocate_locked(self._index, 2 * self._half)
        whole = np.frombuffer(memoryview((ctypes.c_char * (2 * self._half)).from_address(self._staging)), np.uint8)
        self._halves = whole[: self._half], whole[self._half :]
        self._thread = ThreadPoolExecutor(1, "memonger copies")

    def place(self, copies: Sequence[HostCopy], address: int) -> None:
        """Copy weights at once, to offsets from an address.

        Raises:
            SessionError: a copy failed.
        """
        self._arena = address
        self._thread.submit(self._copy, copies).result()

    @contextmanager
    def running(self, arena: int) -> Iterator["WeightCopier"]:
        """For one run, whose arena has this address: what has begun in it is over when this is, however it ends."""
        if os.getpid() != self._owner:  # in a fork there is no such thread, and the engine refuses to run
            yield self
            return
        self.give_up()  # where the end of the last run was interrupted
        self._arena = arena
        try:
            yield self
        finally:
            self.give_up()

    def before(self, partition: int) -> None:
        """Wait for what a partition reads, then begin what is copied while it runs.

        Raises:
            SessionError: a copy failed.
        """
        due = [copy for copy in self._copies if copy.begin == partition]
        if os.getpid() != self._owner:
            return
        self._wait_before(partition)
        if due:
            driver.wait_for_kernels(self._index)  # of the partition before, which is over when they are
        for awaited in sorted({copy.wait for copy in due}):
            copies = [copy for copy in due if copy.wait == awaited]
            self._begun.setdefault(awaited, []).append(self._thread.submit(self._copy, copies))
        self._wait_before(partition)  # for what it reads of these

    def give_up(self) -> None:
        """Have nothing begin any more, and wait for what has."""
        begun = [future for futures in self._begun.values() for future in futures if not future.cancel()]
        wait(begun)
        self._begun.clear()

    def _wait_before(self, partition: int) -> None:
        for future in self._begun.get(partition, ()):
            future.result()
        self._begun.pop(partition, None)

    def _copy(self, copies: Sequence[HostCopy]) -> None:
        """Copy weights, one after the other: in the thread. Whatever happens, nothing is under way afterwards."""
        turn = 0
        try:
            for copy in copies:
                for begin in range(0, copy.nbytes, self._half):
                    piece = self._halves[turn][: copy.nbytes - begin]
                    self._fill(piece, copy, begin)
                    driver.wait_for_stream(self._index, self._stream)  # then the other half is free
                    target = self._arena + copy.offset + begin
                    driver.to_device_later(self._index, target, piece.ctypes.data, piece.nbytes, self._stream)
                    turn = 1 - turn
        finally:
            driver.wait_for_stream(self._index, self._stream)

    def _fill(self, piece: np.ndarray, copy: HostCopy, begin: int) -> None:
        """Put bytes of a weight, from one of them on, into locked memory."""
        if isinstance(copy.source, np.ndarray):
            np.copyto(piece, copy.source[begin : begin + piece.nbytes])
            return
        path, first = copy.source
        file, filled = self._files[path], 0
        try:
            file.seek(first + begin)
            while filled < piece.nbytes:
                count = file.readinto(piece[filled:])  # type: ignore[attr-defined]
                if not count:
                    raise SessionError(
                        f"{path} was changed since the session was made: it is shorter now, and weights stay in it. "
                        "Save the plan again, and make a new session."
                    )
                filled += count
        except OSError as error:
            raise _unreadable(path, error) from error

    def close(self) -> None:
        """End the thread, and give back the memory. No run may be under way."""
        self._thread.shutdown()
        self._give_back()

    def _give_back(self) -> None:
        for file in self._files.values():
            file.close()
        if self._staging:
            driver.free_locked(self._index, self._staging)
        if self._stream is not None:
            driver.end_stream(self._index, self._stream)
        self._staging, self._stream = 0, None

    def __del__(self) -> None:
        if os.getpid() == self._owner:  # the thread ends with its executor
            self._give_back()


def _unreadable(path: str, error: OSError) -> SessionError:
    return SessionError(f"{path} can't be read, which has weights of the plan: {error.strerror}.")
