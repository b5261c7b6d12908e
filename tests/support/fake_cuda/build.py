"""Compiles the stand-in's libraries for one build of onnxruntime's CUDA provider: needs gcc, nm and readelf.

What a library must have is read from the provider itself: the libraries it names and the symbols it leaves undefined,
with their versions; cuDNN, cuFFT and NVRTC, which it opens later, by the names among its strings. What the C sources
here don't define becomes a function that returns 0, so other releases of onnxruntime-gpu (and other CUDA ABIs) build as
well, as long as they want no new answers.
"""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PROVIDER = "onnxruntime/capi/libonnxruntime_providers_cuda.so"
TOOLS = ("gcc", "nm", "readelf")
FLAGS = ("-std=c11", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra")
DEFAULT_MAJOR = 13
DRIVER, MONITOR, RUNTIME = "libcuda.so.1", "libnvidia-ml.so.1", "libcudart.so"
SOURCES: Mapping[str, tuple[str, ...]] = {
    "libcudart": ("cudart.c", "cudart_memory.c", "cudart_copies.c"),
    "libcublas": ("cublas.c",),
    "libcublasLt": ("cublas.c",),
    "libcudnn": ("cudnn.c",),
    "libcuda": ("cuda.c",),
    "libnvidia-ml": ("nvml.c",),
}
OPENED_LATER = {"libcudnn": "cudnn", "libcufft": "cufft", "libnvrtc": "nvrtc"}
LATER_VERSIONS = {12: {"libcufft": "11"}, 13: {"libcufft": "12"}}  # where they aren't the runtime's own; cuDNN: 9
_OURS = ("libcu", "libnv")
_DEFINED = re.compile(r"^[a-z][\w *]*?\b(\w+)\(", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Library:
    """What to build: a soname, the functions it must have, and whether callers ask for versioned symbols."""

    soname: str
    symbols: tuple[str, ...] = ()
    versioned: bool = False

    @property
    def stem(self) -> str:
        return self.soname.partition(".so")[0]


def missing_tools() -> list[str]:
    """The programs a build needs that aren't here."""
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def build(folder: Path, provider: Path | None = None, extra: Sequence[str] = ()) -> list[Path]:
    """Compile all libraries into a folder, replacing it whole.

    Args:
        folder: Where they go.
        provider: ``libonnxruntime_providers_cuda.so``; None: the runtime, driver and monitor alone, for ctypes.
        extra: More flags for gcc.

    Raises:
        subprocess.CalledProcessError: a tool failed; its words are on stderr.
    """
    libraries = [*needed(provider), Library(DRIVER), Library(MONITOR)] if provider else _bare()
    libraries = list({library.soname: library for library in libraries}.values())
    runtime = next(library for library in libraries if library.stem == "libcudart")
    libraries.sort(key=lambda library: library is not runtime)  # the others are linked to it
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "lib"
        made.mkdir()
        for library in libraries:
            compile_library(library, runtime, made, extra)
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    return [folder / library.soname for library in libraries]


def _bare() -> list[Library]:
    return [Library(f"{RUNTIME}.{DEFAULT_MAJOR}", versioned=True), Library(DRIVER), Library(MONITOR)]


def needed(provider: Path) -> list[Library]:
    """The libraries of CUDA that the provider is linked to, and those it opens by name."""
    names = re.findall(r"\(NEEDED\).*\[(.+?)\]", _output("readelf", "-d", str(provider)))
    symbols = _undefined(provider)
    linked = [
        Library(name, tuple(symbols.get(name, ())), versioned=name in symbols)
        for name in names
        if name.startswith(_OURS) and name not in (DRIVER, MONITOR)
    ]
    major = _major(names)
    text = provider.read_bytes()
    later = [
        Library(f"{stem}.so.{_version(stem, major)}", _names_with(prefix, text))
        for stem, prefix in OPENED_LATER.items()
        if not any(library.stem == stem for library in linked)
    ]
    return [*linked, *later]


def _undefined(provider: Path) -> dict[str, list[str]]:
    """Undefined symbols by the library whose version they carry."""
    found: dict[str, list[str]] = {}
    for symbol, library in re.findall(
        r" U (\w+)@+(lib[\w.-]+)", _output("nm", "-D", "--undefined-only", str(provider))
    ):
        found.setdefault(library, []).append(symbol)
    return found


def _names_with(prefix: str, text: bytes) -> tuple[str, ...]:
    """Words in a library's data that begin with a prefix and a capital letter: functions it looks up by name."""
    start, found, word = 0, set(), re.compile(rb"\0" + prefix.encode() + rb"([A-Z]\w+)\0")
    while (start := text.find(prefix.encode(), start)) >= 0:
        match = word.match(text, start - 1)
        start += len(prefix)
        if match:
            found.add(prefix + match.group(1).decode())
    return tuple(sorted(found))


def _major(names: Iterable[str]) -> int:
    """The CUDA release a provider was built for, by its runtime's soname."""
    versions = [name.rpartition(".")[2] for name in names if name.startswith(RUNTIME)]
    return int(versions[0]) if versions else DEFAULT_MAJOR


def _version(stem: str, major: int) -> str:
    return "9" if stem == "libcudnn" else LATER_VERSIONS.get(major, {}).get(stem, str(major))


def compile_library(library: Library, runtime: Library, folder: Path, extra: Sequence[str]) -> None:
    """Compile one library's sources and stubs; `runtime` must lie in the folder already, unless it is this one."""
    sources = [HERE / name for name in SOURCES.get(library.stem, ())]
    stubs = folder / f"{library.stem}_stubs.c"
    stubs.write_text(_stubs(library, "".join(source.read_text() for source in sources)))
    command = ["gcc", *FLAGS, *extra, f"-I{HERE}", f"-DFAKE_MAJOR={_major([runtime.soname])}"]
    command += ["-o", str(folder / library.soname), *map(str, sources), str(stubs), f"-Wl,-soname,{library.soname}"]
    if library.versioned:
        script = folder / f"{library.stem}.map"
        script.write_text(f"{library.soname} {{ global: *; }};\n")
        command.append(f"-Wl,--version-script={script}")
    if library is runtime:
        command.append("-lpthread")
    else:
        command += [f"-L{folder}", f"-l:{runtime.soname}", "-ldl"]
    subprocess.run(command, check=True)


def _stubs(library: Library, own: str) -> str:
    """C of the functions that `own` doesn't define: those that make something give a cleared piece of memory."""
    defined = set(_DEFINED.findall(own))
    lines = ["#include <stdlib.h>", f"int fake_{re.sub(r'[^a-z]', '_', library.stem)};"]
    for name in sorted(set(library.symbols) - defined):
        body = "void **made) { *made = calloc(1, 4096); return 0; }" if "Create" in name else "void) { return 0; }"
        lines.append(f"int {name}({body}")
    return "\n".join(lines) + "\n"


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
