"""A temporary folder that lives as long as whoever needs it."""

import shutil
import tempfile
import weakref
from pathlib import Path


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
