"""Training states on disk."""

import json
import os
import stat
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import memonger
from memonger.errors import SessionError
from memonger.runtime import state as states
from tests.support.training_models import batch, plan

NARROW = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz")
PLAIN = ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)), "float16", "float32")
OTHER = ("float64", "complex64", "complex128")


def _tensor(dtype: np.dtype) -> np.ndarray:
    return np.arange(24).reshape(2, 3, 4).astype(np.uint8).astype(dtype)


@pytest.mark.parametrize("name", [*PLAIN, "bfloat16", *NARROW, *OTHER])
def test_every_type_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    tensors = {
        "whole": _tensor(dtype),
        "scalar": _tensor(dtype)[1, 1, 1].reshape(()),
        "empty": np.zeros((0, 3), dtype),
        "transposed": _tensor(dtype).T,
        "odd one": np.arange(3, dtype=np.int8),
    }
    path = tmp_path / "state"
    states.save(states.State(tensors, 3, 7, None), path)
    like = {key: np.zeros(array.shape, array.dtype) for key, array in tensors.items()}
    read = states.load(path, like)
    assert (read.step, read.random_key, read.learning_rate) == (3, 7, None)
    for key, array in tensors.items():
        assert (read.tensors[key].dtype, read.tensors[key].shape) == (array.dtype, array.shape)
        assert read.tensors[key].tobytes() == array.tobytes(), key
    by_library = safetensors.numpy.load_file(path)
    assert by_library.keys() == tensors.keys()
    for key, array in tensors.items():
        assert by_library[key].tobytes() == array.tobytes(), key
        assert name not in (*PLAIN, "bfloat16", "float64") or by_library[key].dtype == array.dtype


def test_a_state_is_a_file_for_safetensors(tmp_path: Path) -> None:
    trainer = memonger.TrainingSession(plan(), random_key=5)
    trainer.step(batch())
    trainer.save(tmp_path / "state.safetensors")
    read = safetensors.numpy.load_file(tmp_path / "state.safetensors")
    assert read.keys() == trainer.state_dict().keys()
    for name, array in trainer.state_dict().items():
        np.testing.assert_array_equal(read[name], array, err_msg=name)
    with safetensors.safe_open(tmp_path / "state.safetensors", framework="np") as file:
        header = json.loads(file.metadata()["memonger"])
    assert (header["format"], header["step"], header["random_key"]) == (2, 1, 5)
    assert header["learning_rate"] == pytest.approx(0.2)
    assert all(len(tensor["sha256"]) == 64 for tensor in header["tensors"].values())


def _saved(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """A small state's tensors as stored, and its metadata."""
    tensors = {"a": np.arange(4, dtype=np.float32), "b": np.ones(3, np.int64)}
    states.save(states.State(tensors, 1, 2, 0.5), path)
    with safetensors.safe_open(path, framework="np") as file:
        return tensors, file.metadata()


def test_tensors_that_are_not_as_the_header_says_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    wanted, metadata = _saved(path)
    wrong = [
        ({**wanted, "a": wanted["a"].view(np.int32)}, "'a' is stored with another type or shape"),
        ({**wanted, "a": wanted["a"].reshape(2, 2)}, "'a' is stored with another type or shape"),
        ({**wanted, "a": wanted["a"] + 1}, "'a' was changed since it was written"),
        ({"a": wanted["a"]}, "not a training state, or is cut short: .*b"),
    ]
    for tensors, words in wrong:
        safetensors.numpy.save_file(tensors, path, metadata)
        with pytest.raises(SessionError, match=words):
            states.load(path, wanted)
    for other in (None, {"format": "pt"}, {"memonger": "[]"}, {"memonger": '{"format": 3, "tensors": {}}'}):
        safetensors.numpy.save_file(wanted, path, other)
        with pytest.raises(SessionError, match="is not a training state of format 2"):
            states.load(path, wanted)
    safetensors.numpy.save_file(wanted, path, {"memonger": metadata["memonger"].replace('"step": 1', '"step": 2')})
    with pytest.raises(SessionError, match="its header was changed"):
        states.load(path, wanted)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    tensors = {"a": np.ones(1 << 16, np.float32)}
    with pytest.raises(SessionError, match="/dev/full can't be written: No space left"):
        states.save(states.State(tensors, 1, 2, 0.5), Path("/dev/full"))
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)
    with pytest.raises(SessionError, match="Nothing was left behind"):
        states.save(states.State(tensors, 1, 2, 0.5), tmp_path / "no folder" / "state")
    with pytest.raises(SessionError, match="can't be written: Is a directory"):
        states.save(states.State(tensors, 1, 2, 0.5), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_path_that_names_no_file() -> None:
    trainer = memonger.TrainingSession(plan())
    for call in (trainer.load, trainer.save):
        with pytest.raises(SessionError, match="NUL"):
            call("a\0b")


@pytest.mark.parametrize(
    ("key", "value"), [("learning_rate", np.nan), ("learning_rate", -1.0), ("learning_rate", np.inf), ("step", 2**63)]
)
def test_numbers_out_of_range_in_a_signed_header(key: str, value: float, tmp_path: Path) -> None:
    path = tmp_path / "state"
    tensors, metadata = _saved(path)
    header = {**json.loads(metadata["memonger"]), key: value}
    header["sha256"] = states._header_digest(header)
    safetensors.numpy.save_file(tensors, path, {"memonger": json.dumps(header)})
    with pytest.raises(SessionError, match=r"out of range|finite"):
        states.load(path, tensors)
