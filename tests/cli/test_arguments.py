"""Arguments and files that no command can use: one message, status 1 or 2, and nothing begun."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.support.bad_input import PLAN, Place


@pytest.mark.parametrize(
    "option",
    [
        ("--threads", 100_000), ("--threads", -1), ("--batch", 10**12), ("--batch", 0), ("--trials", 10**9),
        ("--trials", "9" * 5000), ("--dim", f"N={10**12}"), ("--dim", "N=" + "9" * 5000), ("--dim", "N=\u0663"),
        ("--budget", "9" * 20 + "TiB"), ("--time-limit", "nan"), ("--time-limit", "inf"), ("--device", "cuda:99999999"),
    ],
    ids=str,
)  # fmt: skip
def test_numbers_out_of_range(place: Place, option: tuple[str, object]) -> None:
    status = 1 if option[0] == "--device" else 2
    place.fails(*PLAN, place.model(), "--quiet", *option, words=(), status=status)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("pareto", ("--points", 10**9)), ("run", ("--runs", 10**9)), ("run", ("--seed", -1)),
        ("run", ("--seed", 2**70)), ("run", ("--threads", 100_000)),
    ],
    ids=str,
)  # fmt: skip
def test_numbers_of_other_commands(place: Place, command: str, option: tuple[str, object]) -> None:
    place.fails(command, place.model(), *option, words=("is not in the range",), status=2)


def _npz(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return file.getvalue()


def _encrypted() -> bytes:
    file = io.BytesIO()
    np.savez(file, x=np.zeros((2, 8), np.float32))
    data = bytearray(file.getvalue())
    data[6] |= 1
    data[data.find(b"PK\x01\x02") + 8] |= 1
    return bytes(data)


HEADER = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 1000), }\n"
NPZ = {
    "encrypted": _encrypted(),
    "huge": _npz(x=b"\x93NUMPY\x01\x00" + len(HEADER).to_bytes(2, "little") + HEADER),
    "nested": _npz(x=b"\x93NUMPY\x01\x00" + (9000).to_bytes(2, "little") + b"[" * 9000),
    "no array": _npz(x=b"text"),
    "cut": _encrypted()[:-5],
    "no zip": b"x",
}


@pytest.mark.parametrize("data", NPZ.values(), ids=NPZ.keys())
def test_inputs_that_are_no_arrays(place: Place, data: bytes) -> None:
    inputs = place.write("inputs.npz", data)
    place.fails("run", place.model(), "--quiet", "--inputs", inputs, words=("inputs.npz is not an .npz",))


def test_an_archive_of_something_else(place: Place) -> None:
    inputs = place.folder / "inputs.npz"
    with zipfile.ZipFile(inputs, "w") as archive:
        archive.writestr("notes.txt", "text")
    place.fails("run", place.model(), "--inputs", inputs, words=("'notes.txt' is no array",))


def test_paths_that_name_no_file(place: Place, tmp_path: Path) -> None:
    for path in ("x" * 5000, "\udcff.onnx", "\x1b[2J"):
        place.fails("verify", path, words=())
        place.fails("pack", path, words=("can't be read",))


@pytest.mark.parametrize("field", ["9" * 5000, "nan", "-1", "inf", "1e400", "0x10", "", "\0"])
def test_sizes_of_buffers_that_are_no_sizes(place: Place, field: str) -> None:
    problem = place.write("problem.csv", f"id,lower,upper,size\n1,0,1,{field}\n".encode())
    place.fails("pack", problem, words=("line 2", "size"))
