"""Small objects as one piece of memory.

Python keeps a whole arena (1 MiB) of small objects as long as one in it is alive. What is made while a large model is
there lies strewn among its objects, and each of a few that stay would keep an arena when the model is gone. So they are
written out, and made again from that once the model is gone.
"""

import io
import pickle
from dataclasses import dataclass
from typing import Any

import onnx

from memonger.runtime.prepared import Held

_LARGE = 1 << 10  # bytes: from 512 on Python takes them of the C library


@dataclass(frozen=True, slots=True)
class Detached:
    """Objects written out.

    Attributes:
        data: All but the others.
        apart: Those that are large, or can't be written out.
    """

    data: bytes
    apart: tuple[Any, ...]

    def restored(self) -> Any:
        """The objects that `detach` was given, made anew."""
        apart = self.apart

        class Reader(pickle.Unpickler):
            def persistent_load(self, number: int) -> Any:
                return apart[number]

        return Reader(io.BytesIO(self.data)).load()


def detach(value: Any, *kept: object) -> Detached:
    """Write objects out; large bytes, messages, what is lent to onnxruntime and ``kept`` stay as they are."""
    apart: list[Any] = []
    kept_as_it_is = set(map(id, kept))

    class Writer(pickle.Pickler):
        def persistent_id(self, part: Any) -> int | None:
            stays = isinstance(part, Held | onnx.ModelProto) or id(part) in kept_as_it_is
            if stays or (type(part) is bytes and len(part) >= _LARGE):
                apart.append(part)
                return len(apart) - 1
            return None

    file = io.BytesIO()
    Writer(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return Detached(file.getvalue(), tuple(apart))
