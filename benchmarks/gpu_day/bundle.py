"""Pack what a GPU machine without a network lacks: ``python -m benchmarks.gpu_day.bundle OUT [--arch 90]``.

onnxruntime-gpu's CUDA provider holds machine code for six architectures; that of all but ``--arch`` (90: H100 and H200)
is overwritten with zeros, so that everything packs into some 58 MiB in place of 240. Writes OUT/part0, OUT/part1 ...:
folders with a piece of the bundle and join.py in each. On the other machine, with all pieces below one folder:

    python3 join.py FOLDER SITE && export PYTHONPATH=SITE:$PWD && python3 -m benchmarks.gpu_day

PyTorch, onnx, NumPy, cuda-bindings, nvidia-ml-py, onnxscript, matplotlib, pytest, pytest-xdist, hypothesis have to be
there; `import torch` brings CUDA's libraries. Where the rest is there, too, ``--packages onnxruntime-gpu,onnx-ir``
makes it one piece of 57 MiB (with ``--part 64000000``).
"""

import argparse
import hashlib
import lzma
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

PACKAGES = (
    "onnxruntime-gpu", "click", "onnx-ir", "rich", "markdown-it-py", "mdurl", "pygments", "networkx", "safetensors",
    "ml-dtypes", "flatbuffers", "packaging",
)  # fmt: skip
PROVIDER = Path("onnxruntime/capi/libonnxruntime_providers_cuda.so")
DROPPED = (
    "onnxruntime/capi/libonnxruntime_providers_tensorrt.so", "onnxruntime/transformers", "onnxruntime/tools",
    "onnxruntime/datasets", "onnxruntime/backend", "onnxruntime/quantization",
)  # fmt: skip
PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 27, 28, 31, 34, 35)))
FATBIN_MAGIC, ENTRY_ARCH = 0xBA55ED50, 28  # of .nv_fatbin's containers; where an entry says its architecture


def section(data: bytes, name: str) -> tuple[int, int]:
    """Offset and size of a section of a 64-bit little-endian ELF file.

    Raises:
        ValueError: it has none of that name.
    """
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    rows = [struct.unpack_from("<IIQQQQ", data, table + index * size) for index in range(count)]
    for row in rows:
        begin = rows[names][4] + row[0]
        if data[begin : data.index(0, begin)].decode() == name:
            return row[4], row[5]
    raise ValueError(f"there is no section {name}")


def keep_architecture(path: Path, arch: int) -> tuple[int, int]:
    """Overwrite the machine code of all other architectures with zeros; bytes kept, and bytes that are zeros now.

    Raises:
        ValueError: there is no machine code for this one.
    """
    data = bytearray(path.read_bytes())
    at, size = section(data, ".nv_fatbin")
    end, kept, dropped = at + size, 0, 0
    while at < end:
        if struct.unpack_from("<I", data, at)[0] != FATBIN_MAGIC:
            at += 8
            continue
        header, length = struct.unpack_from("<HQ", data, at + 6)
        entry, at = at + header, (at + header + length + 7) & ~7
        while entry < at and entry + 32 <= end:
            begin, content = struct.unpack_from("<IQ", data, entry + 4)
            if not begin:
                break
            if struct.unpack_from("<I", data, entry + ENTRY_ARCH)[0] == arch:
                kept += content
            else:
                data[entry + begin : entry + begin + content] = bytes(content)
                dropped += content
            entry += begin + content
    if not kept:
        raise ValueError(f"{path.name} has no machine code for sm_{arch}")
    path.write_bytes(data)
    return kept, dropped


def fill(site: Path, python: str, arch: int, packages: Sequence[str] = PACKAGES) -> None:
    """Download packages for another Python and unpack them, without what isn't needed."""
    with tempfile.TemporaryDirectory() as wheels:
        platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", wheels]
        command += ["--python-version", python, "--implementation", "cp", *platforms]
        subprocess.run([*command, *packages], check=True)
        for wheel in sorted(Path(wheels).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
    for name in DROPPED:
        path = site / name
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    for library in site.glob("onnxruntime/capi/libonnxruntime.so.*"):
        library.unlink()
    kept, dropped = keep_architecture(site / PROVIDER, arch)
    print(f"machine code for sm_{arch}: {kept / 1e6:.0f} MB; of others, now zeros: {dropped / 1e6:.0f} MB")


def pack(site: Path, out: Path, part: int) -> list[Path]:
    """Compress a folder into pieces of at most ``part`` bytes, named by place, count and digest."""
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "bundle.tar"
        with tarfile.open(whole, "w") as archive:
            archive.add(site, ".")
        if shutil.which("xz"):
            subprocess.run(["xz", "-9e", "-T0", str(whole)], check=True)
            data = whole.with_suffix(".tar.xz").read_bytes()
        else:
            data = lzma.compress(whole.read_bytes())
    pieces = [data[begin : begin + part] for begin in range(0, len(data), part)]
    digest, found = hashlib.sha256(data).hexdigest()[:16], []
    for index, piece in enumerate(pieces):
        folder = out / f"part{index}"
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("bundle.*"):
            old.unlink()
        found.append(folder / f"bundle.{index}-of-{len(pieces)}.{digest}")
        found[-1].write_bytes(piece)
        shutil.copy(__file__.replace("bundle.py", "join.py"), folder / "join.py")
    return found


def main() -> None:
    """Pack."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--arch", type=int, default=90, help="compute capability without its dot: 90 is an H100's")
    parser.add_argument("--python", default="3.12", help="of the other machine")
    parser.add_argument("--part", type=int, default=40 << 20, help="bytes of a piece")
    parser.add_argument(
        "--packages", default=",".join(PACKAGES), help="what to pack: onnxruntime-gpu and what is missing"
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        site = Path(scratch) / "site"
        fill(site, asked.python, asked.arch, asked.packages.split(","))
        for piece in pack(site, asked.out, asked.part):
            print(piece, piece.stat().st_size)


if __name__ == "__main__":
    main()
