"""Training state on disk: every persistent tensor, and where the training stood.

A safetensors file, whose metadata has one entry, ``memonger``: a JSON header with the step, the random key, the
learning rate, the loss scale if there is one, and by tensor its type, shape and SHA-256 digest. Tensors of types that
safetensors' numpy interface doesn't have are stored as bytes. A state is untrusted input.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import safe_open

from memonger.errors import SessionError
from memonger.files import check_name, write_whole

FORMAT = 2
METADATA = "memonger"
TYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
}  # fmt: skip
"""safetensors' names of the types that its numpy interface reads in every version since 0.5."""


GOOD_STEPS = 2000  # after which it is doubled

LEAST, LARGEST = 2.0**-24, 2.0**126  # both, and their inverses, are normal numbers in float32


@dataclass(frozen=True, slots=True)
class LossScale:
    """The factor that a trainer multiplies the loss by, so that gradients in float16 don't vanish.

    It is doubled after many steps that went well and halved after one whose gradients overflowed, as in Micikevicius et
    al. 2018, "Mixed Precision Training", and ``torch.amp.GradScaler``: powers of two change no digit of a gradient.

    Attributes:
        factor: The factor.
        good_steps: How many steps went well with it.
    """

    factor: float
    good_steps: int = 0

    def __post_init__(self) -> None:
        if not (LEAST <= self.factor <= LARGEST and 0 <= self.good_steps < GOOD_STEPS):
            raise ValueError(f"the loss scale {self.factor} after {self.good_steps} good steps is out of range")

    def after(self, went_well: bool) -> "LossScale":
        """What it is for the next step."""
        if not went_well:
            return LossScale(max(self.factor / 2, LEAST))
        if self.good_steps + 1 == GOOD_STEPS:
            return LossScale(min(self.factor * 2, LARGEST))
        return LossScale(self.factor, self.good_steps + 1)


class Tensors(Mapping[str, np.ndarray]):
    """Tensors that are read when they are asked for: a state may be larger than memory.

    Args:
        names: Theirs, in order.
        read: Reads one.
    """

    def __init__(self, names: Iterable[str], read: Callable[[str], np.ndarray]) -> None:
        self._names, self._read = dict.fromkeys(names), read

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True, slots=True)
class State:
    """What a training session is, apart from its plan.

    Attributes:
        tensors: Parameters, running statistics and optimizer state, by name.
        step: Steps taken.
        random_key: What random numbers derive from.
        learning_rate: The session's own learning rate; None where the optimizer has none.
        loss_scale: What the loss is multiplied by; None where it isn't scaled.
    """

    tensors: Mapping[str, np.ndarray]
    step: int
    random_key: int
    learning_rate: float | None
    loss_scale: LossScale | None = None


def save(state: State, path: Path) -> None:
    """Write the state; whole or not at all.

    Raises:
        SessionError: the file can't be written.
    """
    header: dict[str, Any] = {
        "format": FORMAT,
        "step": state.step,
        "random_key": state.random_key,
        "learning_rate": state.learning_rate,
        "tensors": {
            name: {"dtype": array.dtype.name, "shape": list(array.shape), "sha256": _digest(array)}
            for name, array in state.tensors.items()
        },
    }
    if state.loss_scale is not None:
        header["loss_scale"] = [state.loss_scale.factor, state.loss_scale.good_steps]
    header["sha256"] = _header_digest(header)
    try:
        write_whole(path, lambda target: _write(target, state.tensors, json.dumps(header)))
    except OSError as error:
        raise SessionError(f"{path} can't be written: {error.strerror or error}. Nothing was left behind.") from error


def _write(target: BinaryIO, tensors: Mapping[str, np.ndarray], metadata: str) -> None:
    """Write a safetensors file, one tensor at a time.

    Not by `safetensors.numpy`: its ``save`` holds all tensors a second time, and its ``save_file`` replaces the target,
    be it a device.
    """
    layout: dict[str, Any] = {"__metadata__": {METADATA: metadata}}
    sizes = {name: array.dtype.itemsize for name, array in tensors.items()}
    ordered, end = sorted(sizes, key=lambda name: -sizes[name]), 0  # so all are aligned
    for name in ordered:
        array = tensors[name]
        dtype, shape = _stored(array)
        layout[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(layout).encode()
    text += b" " * (-len(text) % 8)
    target.write(len(text).to_bytes(8, "little") + text)
    for name in ordered:
        target.write(_bytes(tensors[name]).data)


def _stored(array: np.ndarray) -> tuple[str, list[int]]:
    """The type and shape that safetensors has of a tensor."""
    dtype = TYPES.get(array.dtype.name)
    return ("U8", [array.nbytes]) if dtype is None else (dtype, list(array.shape))


def _header_digest(header: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in header.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(_bytes(array).data).hexdigest()


def _bytes(array: np.ndarray) -> np.ndarray:
    """A tensor's content, ``uint8[nbytes]``."""
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1)


def load(path: Path, wanted: Mapping[str, np.ndarray]) -> State:
    """Read a state and check it against the tensors it is for, whose types and shapes count.

    Its tensors are read again, and compared again, when they are asked for.

    Raises:
        SessionError: not a state file, cut short, changed since it was written, or of another model.
    """
    try:
        check_name(path)
        with path.open("rb"), safe_open(path, framework="np") as file:
            header = json.loads((file.metadata() or {}).get(METADATA, "null"))
            return _state(header, file, path, wanted)
    except FileNotFoundError:
        raise SessionError(f"{path}: no such file.") from None
    except SessionError:
        raise
    except Exception as error:  # of a file from outside numpy and safetensors raise nearly everything
        raise SessionError(
            f"{path} is not a training state, or is cut short: {error}. Give a file that `save` wrote."
        ) from error


def _state(header: Any, file: Any, path: Path, wanted: Mapping[str, np.ndarray]) -> State:
    if not isinstance(header, dict) or header.get("format") != FORMAT or not isinstance(header.get("tensors"), dict):
        raise SessionError(f"{path} is not a training state of format {FORMAT}.")
    if header.get("sha256") != _header_digest(header):
        raise SessionError(f"{path}: its header was changed since it was written (its digest differs).")
    _check_names(header["tensors"], path, wanted)
    for name in header["tensors"]:
        _read(file, name, header["tensors"][name]["sha256"], path, wanted[name])

    def again(name: str) -> np.ndarray:
        with safe_open(path, framework="np") as reopened:
            return _read(reopened, name, header["tensors"][name]["sha256"], path, wanted[name])

    tensors = Tensors(header["tensors"], again)
    step, key, rate = header.get("step"), header.get("random_key"), header.get("learning_rate")
    if type(step) is not int or not 0 <= step < 2**62 or type(key) is not int or not 0 <= key < 2**32:
        raise SessionError(f"{path}: its header was changed: its step or random key is out of range.")
    if rate is not None and not (isinstance(rate, float) and 0 <= rate < math.inf):
        raise SessionError(f"{path}: its header was changed: its learning rate is no finite number, 0 or more.")
    try:
        scale = None if header.get("loss_scale") is None else LossScale(*header["loss_scale"])
    except (TypeError, ValueError):
        raise SessionError(f"{path}: its header was changed: its loss scale is out of range.") from None
    return State(tensors, step, key, rate, scale)


def _read(file: Any, name: str, digest: object, path: Path, like: np.ndarray) -> np.ndarray:
    """A tensor of the file."""
    part = file.get_slice(name)
    if (part.get_dtype(), list(part.get_shape())) != _stored(like):
        raise SessionError(f"{path}: '{name}' is stored with another type or shape than its header says.")
    data = _bytes(np.asarray(file.get_tensor(name)))
    if data.nbytes != like.nbytes:
        raise SessionError(f"{path}: '{name}' is cut short or was changed.")
    tensor = data.view(like.dtype).reshape(like.shape)
    if _digest(tensor) != digest:
        raise SessionError(f"{path}: '{name}' was changed since it was written (its digest differs).")
    return tensor


def _check_names(tensors: Mapping[str, Any], path: Path, wanted: Mapping[str, np.ndarray]) -> None:
    for name, array in wanted.items():
        stored = tensors.get(name)
        if stored is None:
            raise SessionError(f"{path} is the state of another model: it has no '{name}'.")
        if (
            not isinstance(stored, dict)
            or stored.get("dtype") != array.dtype.name
            or stored.get("shape") != list(array.shape)
        ):
            raise SessionError(
                f"{path} is the state of another model: its '{name}' isn't {array.dtype.name}{list(array.shape)}."
            )
    unknown = next((name for name in tensors if name not in wanted), None)
    if unknown is not None:
        raise SessionError(
            f"{path} is the state of another model, or of another optimizer: it has '{unknown}' as well."
        )
