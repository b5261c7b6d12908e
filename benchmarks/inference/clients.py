"""Models in loops in other languages: ``python -m benchmarks.inference.clients [NAME...]``.

Writes clients.txt. Networks of `benchmarks.networks` at batch 16, and files out of packages (``--cache FOLDER``, see
`benchmarks.packages`), as they were and as ``memonger shrink`` writes them, in each client of examples/clients/ that is
here: a C++ program, onnxruntime-node, onnxruntime-web. The clients run them in processes of their own. Memory is what
each says that it took: of the process once loaded and the most of a run beyond that, and of onnxruntime-web
WebAssembly's. Outputs are compared with what the same client gives for the model as it was.
"""

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import memonger
from benchmarks.inference.loops_packages import open_dims, sizes_of
from benchmarks.machine import MIB, ROOT, Table, keep, stamp
from benchmarks.networks import write
from benchmarks.packages import files
from memonger.errors import PlanError
from memonger.runtime.feeds import random_feeds
from memonger.runtime.program import inputs_of

PROGRAMS = ROOT / "examples" / "clients"
NETWORKS = ("mobilenet_v2", "resnet18", "densenet_bc100")
PACKAGED = ("vietcombank", "PP-OCRv6_det", "magika", "dnsmos_models/sig.onnx", "tf2onnx mobilenet")
BATCH = 16
OVERHEAD = 1.0  # more than shrink allows by default: on a busy machine it tells little
TABLE = Table(
    "file<46", "client<24", "loaded>8.1f", "after>7.1f", "run>9.1f", "after>8.1f", "ratio>6.3f", "all>6.3f",
    "time>5.2f", "bits<10",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Client:
    """A program that runs models.

    Attributes:
        name: Of the client.
        command: What runs it, before its arguments.
        environment: Of the process.
        weights: Where its models have them: beside or inside.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    weights: str = "beside"

    def run(self, model: Path, feeds: Mapping[str, np.ndarray], folder: Path) -> tuple[dict[str, Any], list[bytes]]:
        """Run a model; gives what the program says of memory and time, and its outputs.

        Raises:
            RuntimeError: it fails; with what it says.
        """
        folder.mkdir(parents=True, exist_ok=True)
        told = []
        for number, (name, array) in enumerate(feeds.items()):
            array.tofile(folder / f"in.{number}")
            told.append(f"{name}:{array.dtype}:{'x'.join(map(str, array.shape))}:{folder / f'in.{number}'}")
        command = [*self.command, str(model), str(folder / "out"), *told]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **self.environment}, timeout=600, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{self.name}: {done.stderr.strip() or done.returncode}")
        outputs = sorted(folder.glob("out.*.bin"), key=lambda path: int(path.suffixes[-2][1:]))
        return json.loads(done.stdout.splitlines()[-1]), [path.read_bytes() for path in outputs]


def cpp(folder: Path) -> Client | str:
    """The C++ program, built into a folder; or why there is none."""
    home = os.environ.get("ONNXRUNTIME_HOME")
    if home is None or shutil.which("g++") is None:
        return "needs g++, and ONNXRUNTIME_HOME: the folder of onnxruntime's include/ and lib/"
    library = next(iter(sorted(Path(home, "lib").glob("libonnxruntime.so*"))), None)
    if library is None or not Path(home, "include", "onnxruntime_c_api.h").is_file():
        return f"{home} has no include/onnxruntime_c_api.h or no lib/libonnxruntime.so"
    target = folder / "run"
    link = [f"-L{library.parent}", f"-l:{library.name}", f"-Wl,-rpath,{library.parent}"]
    flags = ["-O2", "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{home}/include"]
    subprocess.run(["g++", *flags, str(PROGRAMS / "run.cpp"), *link, "-o", str(target)], check=True)
    return Client("C++", (str(target),), {})


def node(folder: Path, package: str) -> Client | str:
    """onnxruntime-node or onnxruntime-web in Node.js, with the program in a folder; or why there is none."""
    places = [*os.environ.get("NODE_PATH", "").split(os.pathsep), str(PROGRAMS / "node_modules")]
    modules = next((Path(place) for place in places if place and Path(place, package).is_dir()), None)
    if shutil.which("node") is None or modules is None:
        return f"needs node and {package}: npm install {package} in {PROGRAMS.relative_to(ROOT)}, or NODE_PATH"
    shutil.copy(PROGRAMS / "node.js", folder / "node.js")  # modules are found beside a program
    if not (folder / "node_modules").exists():
        (folder / "node_modules").symlink_to(modules.resolve())
    is_web = package == "onnxruntime-web"
    command = ("node", str(folder / "node.js"), *(["--web"] if is_web else []))
    return Client(package, command, {}, "inside" if is_web else "beside")


CLIENTS: tuple[Callable[[Path], Client | str], ...] = (
    cpp,
    lambda folder: node(folder, "onnxruntime-node"),
    lambda folder: node(folder, "onnxruntime-web"),
)


def models(cache: Path, names: Sequence[str], folder: Path) -> Iterator[tuple[str, Path, dict[str, int]]]:
    """The files, with their names and sizes of open dimensions beside the batch."""
    for name in NETWORKS:
        if not names or name in names:
            write(name, folder / f"{name}.onnx")
            yield name, folder / f"{name}.onnx", {}
    for name, made in files(cache):
        if any(word in name for word in names or PACKAGED):
            path = made()
            dims = open_dims(path)
            sizes = sizes_of(path, dims) if dims is not None else "its batch is written in"
            if not isinstance(sizes, str):
                yield f"{name.split()[1]} {name.split('/')[-1]}" if "/" in name else name, path, sizes


def compared(client: Client, before: Path, after: Path, feeds: Mapping[str, np.ndarray], folder: Path) -> list[object]:
    """Cells of a row: what a client takes for two models, and whether outputs are the same."""
    (was, want), (now, got) = (
        client.run(path, feeds, folder / str(place)) for place, path in enumerate((before, after))
    )
    sizes = [each[kind] / MIB for kind in ("loaded_bytes", "run_bytes") for each in (was, now)]
    ratios = [
        sum(now[kind] for kind in kinds) / max(1, sum(was[kind] for kind in kinds))
        for kinds in (("run_bytes",), ("loaded_bytes", "run_bytes"))
    ]
    return [*sizes, *ratios, now["seconds"] / was["seconds"], "same" if want == got else "differ"]


def lines(cache: Path, names: Sequence[str]) -> Iterator[str]:
    """The lines of the table."""
    yield from stamp(" ".join(["inference.clients", *names]), ("onnxruntime", "onnx", "numpy"))
    yield ""
    yield f"batch {BATCH}, at most {OVERHEAD} more time in Python's onnxruntime"
    yield "MiB of memory, of a run over the loaded model; ratio: of a run; all: of both together"
    yield "onnxruntime-web: WebAssembly's, which never shrinks, so that runs find what loading took; one thread"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        clients = []
        for make in CLIENTS:
            client = make(folder)
            if isinstance(client, str):
                yield f"left out: {client}"
            else:
                clients.append(client)
        yield ""
        yield TABLE.heading
        for label, path, dims in models(cache, names, folder):
            try:
                made = memonger.shrink(path, batch=BATCH, dims=dims, max_overhead=OVERHEAD)
            except PlanError as error:
                yield f"{label:46}{str(error).split(': ', 1)[-1]}"
                continue
            made.save(folder / "beside.onnx")
            made.save(folder / "inside.onnx", weights="inside")
            feeds = random_feeds(inputs_of(made.model.graph))
            for client in clients:
                try:
                    cells = compared(client, path, folder / f"{client.weights}.onnx", feeds, folder / "run.files")
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    yield f"{label:46}{client.name:24}{str(error)[:120]}"
                    continue
                yield TABLE.row(label, client.name, *cells)


def main() -> None:
    """Measure, print and keep the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/memonger/packages"), metavar="FOLDER")
    parser.add_argument("names", nargs="*", help="only these networks and files, and no table is kept")
    asked = parser.parse_args()
    keep(lines(asked.cache.expanduser(), asked.names), None if asked.names else Path(__file__).with_suffix(".txt"))


if __name__ == "__main__":
    main()
