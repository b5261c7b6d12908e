"""The one place that imports onnxruntime."""

import importlib
from functools import cache
from types import ModuleType

from memonger.errors import RuntimeUnavailableError
from memonger.words import option

OLDEST = (1, 23)  # the first release seen to honour everything a plan needs


@cache
def onnxruntime() -> ModuleType:
    """The onnxruntime module.

    Raises:
        RuntimeUnavailableError: it isn't installed, or is too old; the message has the command that installs it.
    """
    try:
        module = importlib.import_module("onnxruntime")
    except ImportError as error:
        raise RuntimeUnavailableError(
            f"onnxruntime isn't installed ({error}). Install it with `pip install 'memonger[cpu]'`, or on a machine "
            "with an NVIDIA GPU with `pip install 'memonger[gpu]'` (one of the two, never both). "
            f"Planning alone works without: {option('device', 'none')}."
        ) from error
    version = tuple(int(part) for part in module.__version__.split(".")[:2])
    if version < OLDEST:
        raise RuntimeUnavailableError(
            f"onnxruntime {module.__version__} is too old: {OLDEST[0]}.{OLDEST[1]} or newer is needed. "
            "Upgrade it with `pip install -U 'memonger[cpu]'`."
        )
    return module


def is_available() -> bool:
    """Whether onnxruntime can be imported."""
    try:
        onnxruntime()
    except RuntimeUnavailableError:
        return False
    return True
