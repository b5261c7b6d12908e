"""Training state on disk: every persistent tensor, and where the training stood.

A zip of plain ``.npy`` members (numpy's npz; no pickles), with a JSON header of names, types, shapes and SHA-256
digests. It is untrusted input.
"""

import hashlib
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memonger.errors import SessionError
from memonger.files import write_whole

FORMAT = 1
HEADER = "memonger.json"
LARGEST_HEADER = 1 << 28  # bytes


@dataclass(frozen=True, slots=True)
class State:
    """What a training session is, apart from its plan.

    Attributes:
        tensors: Parameters, running statistics and optimizer state, by name.
        step: Steps taken.
        random_key: What random numbers derive from.
        learning_rate: The session's own learning rate; None where the optimizer has none.
    """

    tensors: Mapping[str, np.ndarray]
    step: int
    random_key: int
    learning_rate: float | None


def save(state: State, path: Path) -> None:
    """Write the state; whole or not at all.

    Raises:
        SessionError: the file can't be written.
    """
    described = {name: _described(array) for name, array in state.tensors.items()}
    header: dict[str, Any] = {
        "format": FORMAT,
        "step": state.step,
        "random_key": state.random_key,
        "learning_rate": state.learning_rate,
        "tensors": described,
    }
    header["sha256"] = _header_digest(header)

    def write(target: Any) -> None:
        with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            archive.writestr(_info(HEADER), json.dumps(header))
            for number, array in enumerate(state.tensors.values()):
                with archive.open(_info(_member(number)), "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, _bytes(array), allow_pickle=False)

    try:
        write_whole(path, write)
    except OSError as error:
        raise SessionError(f"{path} can't be written: {error.strerror or error}. Nothing was left behind.") from error


def _info(name: str) -> zipfile.ZipInfo:
    """Without the time of writing: one state is one file, byte for byte."""
    return zipfile.ZipInfo(name)


def _member(number: int) -> str:
    return f"{number}.npy"


def _described(array: np.ndarray) -> dict[str, Any]:
    return {"dtype": array.dtype.name, "shape": list(array.shape), "sha256": _digest(array)}


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

    Raises:
        SessionError: not a state file, cut short, changed since it was written, or of another model.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(archive, path, wanted)
    except FileNotFoundError:
        raise SessionError(f"{path}: no such file.") from None
    except (OSError, zipfile.BadZipFile, EOFError, ValueError, KeyError, NotImplementedError) as error:
        raise SessionError(f"{path} is not a training state, or is cut short: {error}.") from error


def _read(archive: zipfile.ZipFile, path: Path, wanted: Mapping[str, np.ndarray]) -> State:
    if archive.getinfo(HEADER).file_size > LARGEST_HEADER:
        raise SessionError(f"{path} is not a training state: its header is too large.")
    header = json.loads(archive.read(HEADER))
    if not isinstance(header, dict) or header.get("format") != FORMAT or not isinstance(header.get("tensors"), dict):
        raise SessionError(f"{path} is not a training state of format {FORMAT}.")
    if header.get("sha256") != _header_digest(header):
        raise SessionError(f"{path}: its header was changed since it was written (its digest differs).")
    _check_names(header["tensors"], path, wanted)
    tensors = {}
    for number, (name, described) in enumerate(header["tensors"].items()):
        tensors[name] = _tensor(archive, number, name, described, path, wanted[name])
    step, key, rate = header.get("step"), header.get("random_key"), header.get("learning_rate")
    if type(step) is not int or step < 0 or type(key) is not int or not 0 <= key < 2**32:
        raise SessionError(f"{path}: its header was changed: step or random key can't be.")
    if rate is not None and not isinstance(rate, float):
        raise SessionError(f"{path}: its header was changed: the learning rate can't be.")
    return State(tensors, step, key, rate)


def _check_names(tensors: Mapping[str, Any], path: Path, wanted: Mapping[str, np.ndarray]) -> None:
    for name, array in wanted.items():
        found = tensors.get(name)
        if found is None:
            raise SessionError(f"{path} is the state of another model: it has no '{name}'.")
        if (
            not isinstance(found, dict)
            or found.get("dtype") != array.dtype.name
            or found.get("shape") != list(array.shape)
        ):
            raise SessionError(
                f"{path} is the state of another model: its '{name}' isn't {array.dtype.name}{list(array.shape)}."
            )
    unknown = next((name for name in tensors if name not in wanted), None)
    if unknown is not None:
        raise SessionError(
            f"{path} is the state of another model, or of another optimizer: it has '{unknown}' as well."
        )


def _tensor(
    archive: zipfile.ZipFile, number: int, name: str, described: Mapping[str, Any], path: Path, like: np.ndarray
) -> np.ndarray:
    info = archive.getinfo(_member(number))
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > like.nbytes + 4096:
        raise SessionError(f"{path}: '{name}' isn't stored as it was written.")
    with archive.open(info) as member:
        data = np.lib.format.read_array(member, allow_pickle=False)
    if data.dtype != np.uint8 or data.shape != (like.nbytes,):
        raise SessionError(f"{path}: '{name}' is cut short or was changed.")
    array: np.ndarray = data.view(like.dtype).reshape(like.shape)
    if _digest(array) != described.get("sha256"):
        raise SessionError(f"{path}: '{name}' was changed since it was written (its digest differs).")
    return array
