"""Files that are written whole or not at all, and temporary folders."""

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


class ScratchFolder:
    """A folder under the system's temporary one, removed with this object, or when the process ends.

    Attributes:
        path: The folder.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="memonger-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def remove(self) -> None:
        """Remove the folder now."""
        self._remove()


Write = Callable[[BinaryIO], object]


def write_whole(path: Path, write: Write) -> None:
    """Write a file through a folder beside it: it is there whole, or as it was before.

    A device or pipe can't be replaced; it is written into.

    Raises:
        OSError: it can't be written; nothing is left behind.
    """
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
    folder = Path(tempfile.mkdtemp(prefix=".memonger-", dir=path.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def replace_all(folder: Path, names: Sequence[str], target: Path) -> None:
    """Move files from a folder into another, all or none: what they replace comes back if one of them fails."""
    kept, moved = folder / "replaced", list[str]()
    kept.mkdir()
    try:
        for name in names:
            if (target / name).exists():
                os.replace(target / name, kept / name)
            moved.append(name)
            os.replace(folder / name, target / name)
    except OSError:
        for name in moved:
            (target / name).unlink(missing_ok=True)
            if (kept / name).exists():
                os.replace(kept / name, target / name)
        raise
