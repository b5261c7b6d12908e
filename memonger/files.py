"""Files and folders that are written whole or not at all, and temporary folders."""

import ctypes
import json
import os
import select
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from memonger.errors import PlanFileError
from memonger.words import option

if sys.platform != "win32":
    import fcntl

_ABANDONED = 60.0
"""Seconds after which a temporary folder that nobody holds is removed by the next process that makes one beside it. So
often each process looks for such."""

_PIECE = 1 << 17  # bytes copied at a time: the processor's own cache holds them

_LOOKED = dict[tuple[Path, str], float]()
"""When this process has looked for abandoned folders, by where and by what their names begin with."""


class ScratchFolder:
    """A temporary folder, removed with this object, or when the process that made it ends; not when a fork of it does.

    Folders that processes left which were killed are removed when the next process makes one beside them, and every
    minute that it makes more.

    Args:
        parent: Where; None is the system's folder for temporary files.
        prefix: What its name begins with.

    Attributes:
        path: The folder.

    Raises:
        OSError: it can't be made.
    """

    def __init__(self, parent: Path | None = None, prefix: str = "memonger-tmp-") -> None:
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        _sweep(parent, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        lock = _lock(self.path / _HELD, os.O_CREAT)  # the system lets go of it however the process ends
        self._remove = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def remove(self) -> None:
        """Remove the folder now."""
        self._remove()


def _remove(folder: Path, lock: int | None, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        os.close(lock)


_HELD = ".held"
"""In a temporary folder what its owner locks: the folder itself is locked by who saves a model in it (`locked`)."""


def _lock(path: Path, flags: int = 0, *, wait: bool = False) -> int | None:
    """A descriptor that holds the lock of a file or folder; None where another holds it or there are no locks."""
    if sys.platform == "win32":  # nothing is locked there, and what killed processes leave isn't removed
        return None
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_RDONLY | flags, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        if descriptor >= 0:
            os.close(descriptor)
        return None
    return descriptor


def _sweep(parent: Path, prefix: str) -> None:
    """Remove the temporary folders of processes that were killed."""
    now = time.monotonic()
    if now - _LOOKED.get((parent, prefix), -_ABANDONED) < _ABANDONED:
        return
    _LOOKED[parent, prefix] = now
    try:
        with os.scandir(parent) as entries:
            folders = [Path(entry.path) for entry in entries if entry.name.startswith(prefix)]
    except OSError:  # where nothing can be listed nothing is removed
        return
    for folder in folders:
        try:
            is_old = time.time() - folder.stat().st_mtime > _ABANDONED
        except OSError:  # its owner just removed it
            continue
        lock = _lock(folder / _HELD, os.O_CREAT) if is_old else None
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


Write = Callable[[BinaryIO], object]


def write_whole(path: Path, write: Write) -> None:
    """Write a file through a folder beside it: it is there whole, or as it was before.

    A device or pipe can't be replaced; it is written into.

    Raises:
        OSError: it can't be written; nothing is left behind.
    """
    check_name(path)
    if path.is_dir():
        raise IsADirectoryError(21, "Is a directory")
    if path.exists() and not path.is_file():
        with path.open("wb") as target:
            write(target)
        return
    with folder_beside(path) as folder:
        fresh = folder / path.name
        with fresh.open("wb") as target:
            write(target)
            target.flush()
            os.fsync(target.fileno())
        os.replace(fresh, path)


@contextmanager
def folder_beside(path: Path) -> Iterator[Path]:
    """A hidden folder on the path's own file system, gone afterwards."""
    with temporary_folder(path.parent, ".memonger-tmp-") as folder:
        yield folder


@contextmanager
def temporary_folder(parent: Path | None = None, prefix: str = "memonger-tmp-") -> Iterator[Path]:
    """A `ScratchFolder`, gone afterwards."""
    folder = ScratchFolder(parent, prefix)
    try:
        yield folder.path
    finally:
        folder.remove()


def copy_part(source: BinaryIO, begin: int, length: int, target: BinaryIO) -> int:
    """Copy a part of a file to where another is written; returns how many bytes there were.

    Linux copies within its cache: a third of the time of reading and writing.
    """
    done = 0
    with suppress(AttributeError, OSError):  # another system, or files that it can't copy so
        target.flush()
        while done < length:
            copied = os.copy_file_range(source.fileno(), target.fileno(), length - done, begin + done)
            if not copied:
                break
            done += copied
    target.seek(0, os.SEEK_END)
    source.seek(begin + done)
    while done < length and (piece := source.read(min(length - done, _PIECE))):
        done += target.write(piece)
    return done


@contextmanager
def in_small_writes(path: Path) -> Iterator[None]:
    """Has what is written to a path go through a pipe there, in small pieces: it is a file when this ends.

    Linux takes five times as long for tens of megabytes in one call (6.18, ext4), as it looks for pages that lie
    together. Where nothing is written there is no file; where there are no pipes with names it is written as always.

    Raises:
        OSError: the file can't be written.
    """
    try:
        os.mkfifo(path)
    except (AttributeError, OSError):
        yield
        return
    content, ended = path.with_name(path.name + ".content"), threading.Event()
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(path, os.O_WRONLY)  # a pipe that nobody has open to write is at its end
    with suppress(AttributeError, OSError):
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 8 * _PIECE)
    try:
        with ThreadPoolExecutor(1) as pump:
            written = pump.submit(_pump, reader, content, ended)
            try:
                yield
            finally:
                ended.set()
                os.close(writer)
                failed = written.exception()
                path.unlink(missing_ok=True)
        if failed is not None:
            raise failed
        if written.result():
            os.replace(content, path)
    finally:
        content.unlink(missing_ok=True)


def _pump(reader: int, path: Path, ended: threading.Event) -> int:
    """Write to a file what comes out of a pipe; returns how many bytes.

    After an error it is read all the same: who writes would wait for ever.
    """
    piece, count, failed, poll = memoryview(bytearray(2 * _PIECE)), 0, None, select.poll()
    poll.register(reader, select.POLLIN)
    try:
        with path.open("wb", buffering=0) as target:
            while True:
                is_last = ended.is_set()  # what was written before is there
                length = os.readv(reader, [piece]) if poll.poll(0 if is_last else 50) else 0
                if is_last and not length:
                    break
                count += length
                left = piece[:length]
                while left and failed is None:
                    try:
                        left = left[target.write(left) :]
                    except OSError as error:
                        failed = error
    finally:
        os.close(reader)  # who still writes gets an error
    if failed is not None:
        raise failed
    return count


_BEGINNINGS = {
    b"version https://git-lfs": "a pointer of Git LFS: git lfs pull puts the file itself in its place",
    b"\x1f\x8b": "compressed: gunzip unpacks it",
    b"<!doctype html": "a web page: download the file itself",
    b"<html": "a web page: download the file itself",
}
"""What files are in place of what they should be, and what to do, by how they begin."""


def instead(path: Path) -> str:
    """What a file is in place of what it should be, as a sentence with a space before it; empty where nothing tells."""
    with suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                begin = file.read(max(map(len, _BEGINNINGS))).lower()
            return next((f" It is {what}." for each, what in _BEGINNINGS.items() if begin.startswith(each)), "")
    return ""


def check_name(path: Path) -> None:
    """Check that a path can name a file at all.

    Raises:
        OSError: it can't.
    """
    if "\0" in str(path):
        raise OSError(22, "a file's name can't contain the character NUL")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Meanwhile no other process that asks for it is in here; where the file system has no locks, others may be."""
    lock = _lock(folder, wait=True)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2): two names swap what they name, in one step
_HERE = -100  # AT_FDCWD


def put_folder(fresh: Path, path: Path) -> None:
    """Move a folder to its place. What it replaces is where it was before; at no moment is neither of them there.

    Where the system can't exchange two folders in one step, what is replaced comes back if the second step fails.

    Raises:
        OSError: it can't be moved.
    """
    if not path.exists():
        os.replace(fresh, path)
        return
    exchange = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    if exchange is None or exchange(_HERE, os.fsencode(fresh), _HERE, os.fsencode(path), _EXCHANGE):
        aside = fresh.with_name("replaced")
        os.replace(path, aside)
        try:
            os.replace(fresh, path)
        except OSError:
            os.replace(aside, path)
            raise


SETTINGS = "memonger.json"
"""In every folder that memonger writes: what it holds. It also tells such a folder from any other."""


@contextmanager
def new_folder(path: Path, force: bool) -> Iterator[Path]:
    """An empty folder that becomes ``path`` if nothing is raised. What ``path`` was stays as it was until then.

    Raises:
        PlanFileError: there is a file of that name, or a folder that isn't empty and may not be replaced, or holds
            anything but what memonger wrote; or it can't be written.
    """
    _check_free(path, force)
    try:
        with folder_beside(path.absolute()) as beside:
            fresh = beside / "fresh"
            fresh.mkdir()
            yield fresh
            settings = fresh / SETTINGS  # it notes what the folder consists of: nothing else is ever replaced
            add_json(settings, {**json.loads(settings.read_text()), "files": files_in(fresh)})
            for file in fresh.rglob("*"):  # they are on the disk before the folder gets its name
                if file.is_file():
                    with file.open("rb") as handle:
                        os.fsync(handle.fileno())
            put_folder(fresh, path)
    except OSError as error:
        raise PlanFileError(f"{path} can't be written: {error.strerror or error}. Nothing was left behind.") from error


def _check_free(path: Path, force: bool) -> None:
    if path.is_dir() and not path.is_symlink():
        if not any(path.iterdir()):
            return
        # Nothing is in the folder but what memonger wrote, and what Python left of running it
        try:
            written = set(json.loads((path / SETTINGS).read_text())["files"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PlanFileError(
                f"{path} is there already and wasn't written by memonger: name another folder."
            ) from error
        present = (one.relative_to(path) for one in sorted(path.rglob("*")) if not one.is_dir())
        strange = [one for one in present if "__pycache__" not in one.parts and str(one) not in written]
        if strange:
            raise PlanFileError(
                f"{path} is there already and holds '{strange[0]}', which memonger didn't write: name another folder."
            )
        if not force:
            replaced = option("force", True)
            raise PlanFileError(f"{path} is there already: name another folder, or replace it with {replaced}.")
    elif path.exists() or path.is_symlink():
        raise PlanFileError(f"{path} is there already and is no folder: name another one.")


def check_outside(files: Iterable[Path], folder: Path) -> None:
    """Check that no file that is read lies in a folder, which is replaced as a whole.

    Raises:
        PlanFileError: one does.
    """
    for file in files:
        if folder.resolve() in file.resolve().parents:
            raise PlanFileError(f"{file} lies in {folder}, which would be replaced: name another folder.")


def files_in(folder: Path) -> tuple[str, ...]:
    """Paths of the files within a folder, sorted."""
    return tuple(sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file()))


def add_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file for people to read, too."""
    path.write_text(json.dumps(content, indent=2) + "\n")
