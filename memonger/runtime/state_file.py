"""Memory of a training step of which a part lies in a file: what passes through a plan's window, and is written back.

The file is mapped shared at the addresses that kernels are bound to: they read and write it there, and an update is
written over what it updates, as where all is in memory. `memonger.runtime.weight_reader` has it read ahead of the steps
and drops pages behind them, which loses nothing: the system has what was written, and writes it to the disk before it
lets go of it. So nothing here knows of steps, and no result depends on when a page is dropped.

It is the session's memory, as the arena is, and no saved state: the file has no name, and is gone with the process
however that ends. What outlasts it is what `memonger.TrainingSession.save` writes.
"""

import ctypes
import mmap
import os
import tempfile
import weakref
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from memonger.devices import Device
from memonger.errors import SessionError
from memonger.runtime import process_memory
from memonger.runtime.arena import Arena, ArenaTensor, one_after_another
from memonger.runtime.store import Store
from memonger.units import ALIGNMENT, KiB, format_size
from memonger.words import option

APART = 64 * KiB
"""What a tensor of the file begins at a multiple of: as many bytes as the system maps at once around a page."""

PAGE = mmap.PAGESIZE

_FIXED = 0x10  # of mmap(2)


class FileArena(Arena):
    """An arena whose bytes from one on lie in a file: where windows are held, on Linux.

    Args:
        size: Bytes of all.
        begin: The first byte that lies in the file, a multiple of a page.
        folder: Where the file is made.
        content: What lies in the file, for messages.

    Attributes:
        begin: As given.
        path: How the file can be opened as long as this object lives.

    Raises:
        SessionError: the file can't be made there, or the disk has no room for it.
    """

    def __init__(self, size: int, begin: int, folder: str | Path, content: str) -> None:
        super().__init__(size)
        self.begin, self.own, length = begin, begin, size - begin
        what = f"{folder} can't have a file for {format_size(length)} of {content}, which the plan leaves on disk"
        hint = f"Say where else ({option('state_folder', 'FOLDER')}), or plan with a larger {option('budget')}."
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, length)  # no room later would end the process (SIGBUS)
                self._file = os.dup(file.fileno())
        except OSError as error:
            raise SessionError(f"{what}: {error.strerror or error}. {hint}") from error
        weakref.finalize(self, os.close, self._file)
        self.path = f"/proc/self/fd/{self._file}"
        map_at = process_memory.libc().mmap
        map_at.restype = ctypes.c_void_p
        map_at.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED
        if map_at(self.address + begin, length, access, flags, self._file, 0) != self.address + begin:
            raise SessionError(f"{what}: it can't be mapped. {hint}")

    def places(self, tensors: Iterable[ArenaTensor]) -> dict[str, tuple[str, int, int]]:
        """Of those that lie in the file: the file, the first byte there, and bytes of pages."""
        return {
            one.name: (self.path, one.offset - self.begin, -(-one.nbytes // PAGE) * PAGE)
            for one in tensors
            if one.offset >= self.begin and one.nbytes
        }

    def read(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], *, copy: bool = True) -> np.ndarray:
        """See `Arena.read`. Of the file no more than what is read is in memory then."""
        if offset >= self.begin:
            self._map.madvise(mmap.MADV_DONTNEED, self.begin)
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        return super().read(offset, dtype, shape, copy=copy)


def store_of(tensors: Iterable[ArenaTensor], in_file: Collection[str], device: Device, folder: str | Path) -> Store:
    """A store of which some tensors lie in a file, in the order of ``in_file``; see `FileArena`.

    Raises:
        SessionError: see there.
    """
    given = {tensor.name: tensor for tensor in tensors}
    apart = [given[name] for name in in_file if name in given]
    if not apart or not hasattr(process_memory.libc(), "mmap"):  # else no window is held here
        return Store(given.values(), device)
    kept, size = one_after_another((one for name, one in given.items() if name not in in_file), ALIGNMENT)
    arena, (laid,) = file_arena(size, [apart], folder, "training state")
    store = Store((), device, arena=arena)
    store.tensors, store.nbytes = kept | laid, arena.size
    return store


def file_arena(
    size: int, tensors: Sequence[Iterable[ArenaTensor]], folder: str | Path, content: str
) -> tuple[FileArena, list[dict[str, ArenaTensor]]]:
    """An arena of which a part lies in a file; and where tensors lie there.

    Args:
        size: Bytes of the arena in memory.
        tensors: What lies in the file, in groups: of a training state all, of values that wait for later steps those of
            each step. Their own offsets don't count. Groups have the same places, as steps run one after the other.
        folder: Where the file is made.
        content: See `FileArena`.

    Raises:
        SessionError: see `FileArena`.
    """
    begin = -(-size // APART) * APART
    laid = [one_after_another(each, APART) for each in tensors]
    length = max(end for _, end in laid)
    arena = FileArena(begin + length, begin, folder, content)
    return arena, [{name: one._replace(offset=begin + one.offset) for name, one in of.items()} for of, _ in laid]


def in_files(*stores: Store) -> dict[str, tuple[str, int, int]]:
    """What of stores lies in files: of each tensor the file, its first byte there, and bytes of its pages."""
    return {
        name: place
        for store in stores
        if isinstance(store.arena, FileArena)
        for name, place in store.arena.places(store.tensors.values()).items()
    }
