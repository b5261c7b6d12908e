"""Models in less memory than their weights take, beside stock onnxruntime: ``python -m benchmarks.inference.larger``.

Writes larger.txt. Each network is planned for 100, 60, 40 and 25 % of its weights and activations (what a plan without
a budget takes). A process of its own loads the planned file and runs it in a memory control group of the kernel's,
whose limit is the budget and what the process takes beside it (`SPARE`, in which modules and pages of libraries are);
where none can be made, without one, and the table says so. Beside it stock onnxruntime, with default options and
without packing (``session.disable_prepacking``), weights in a file beside the model, outside any group; and both in
the same group.

Peaks are of the process's memory, of its own and of pages of files (VmHWM), over a Python with onnxruntime imported;
held is the most that the group had, the system's cache of files included. A cold run finds nothing of the weights in
the system's cache, the warm one is the median of those after it; cached: outside any group, where the system's cache
may keep what it likes. A run of a decoder says a prompt and 8 words, each the likeliest, with caches that grow; its
times are those of a word. busy is the machine's load average when a process began. Rows are kept in larger.json, each
process's figures as soon as it has ended: ``--resume`` takes them and measures what isn't there; ``--minutes N`` begins
no network after so many. ``--files FILE...`` adds rows of other models, as of Stable Diffusion's UNet.
"""

import argparse
import hashlib
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine import MIB, Record, Table, keep, progress, stamp
from benchmarks.process import LARGE, resident

HERE = Path(__file__).parent
NETWORKS = ("resnet50", "vit_b16", "vit_l16", "bert_large", "decoder_int4", "decoder_fp32")
DECODER = {
    "layers": 22, "heads": 32, "kv_heads": 4, "head": 64, "width": 2048, "hidden": 5632, "words": 32000, "longest": 512,
}  # fmt: skip
"""Of 1.1 billion parameters, as TinyLlama has them."""
PROMPT, WORDS, LENGTH = 8, 8, 256
CACHES = {
    "batch_size": 1, "sequence_length": (1, PROMPT), "past_sequence_length": (0, LENGTH),
    "total_sequence_length": "past_sequence_length + sequence_length",
}  # fmt: skip
SHARES = (1.0, 0.6, 0.4, 0.25)
RUNS, ENOUGH = 4, 60.0  # the first one cold; seconds after which no more begin, but for a warm one
SPARE = 80 * MIB
"""Bytes for what a budget doesn't count: modules of Python, onnxruntime's code and its nodes."""
MEMBERS, MEMBER, INPUT = 10, "resnet50", (1, 3, 224, 224)
FLEET = "fleet"
FLEET_SPARE = 160 * MIB
"""The same of a fleet, whose sessions each have nodes."""
LONGEST = 240.0  # seconds of a process in a group: what takes longer thrashes

TABLE = Table(
    "network<14", "what<30", "budget>8.0f", "kept>7.0f", "window>8.0f", "read>7.0f", "peak>8.0f", "held>8.0f",
    "limit>8.0f", "load>8.1f", "cold>8.2f", "warm>8.2f", "cached>8.2f", "busy>6.1f", "bits<9",
)  # fmt: skip

TOKENS = Table("network<14", "budget>9", "limit>8.0f", "planned>9.2f", "cached>9.2f", "stock>9.2f", "packing off>13.2f")


def child(kind: str, path: str) -> None:
    """One process: load, run cold, run warm, say what it took.

    Args:
        kind: ``planned``, ``stock`` or ``mapped``: stock onnxruntime without packing; ``fleet``, ``fleet of stock``.
        path: The model; of a fleet a folder with a folder for each.
    """
    import numpy as np
    import onnxruntime

    def feed(shape: Sequence[Any], is_float: bool) -> Any:
        dims = [dim if isinstance(dim, int) else 1 for dim in shape]
        return draw.standard_normal(dims).astype(np.float32) if is_float else draw.integers(0, 100, dims)

    def forget() -> None:
        for data in filter(Path.is_file, Path(path).parent.iterdir()):
            with data.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def said(logits: Callable[[Mapping[str, Any]], Any]) -> list[Any]:
        ids, length, found = np.arange(5, 5 + PROMPT)[None], 0, []
        for _ in range(WORDS):
            length += ids.shape[1]
            found.append(logits({"input_ids": ids, "attention_mask": np.ones((1, length), np.int64)}))
            ids = found[-1][:, -1:].argmax(-1)
        return found

    words = 1  # that a run says
    draw, begin = np.random.default_rng(0), time.perf_counter()
    before = resident()["VmRSS"]
    if kind == "fleet":
        import memonger

        folders = sorted(Path(path).iterdir())
        fleet = memonger.Fleet({one.name: one / "planned.onnx" for one in folders}, check_weights=False)
        feeds = {"x": feed(INPUT, is_float=True)}
        path = str(folders[0])

        def run() -> list[Any]:
            return [
                result
                for name in fleet
                for result in fleet[name].run({fleet[name].input_names[0]: feeds["x"]}).values()
            ]
    elif kind == "fleet of stock":
        folders = sorted(Path(path).iterdir())
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        providers = ["CPUExecutionProvider"]
        sessions = [onnxruntime.InferenceSession(one / "model.onnx", options, providers=providers) for one in folders]
        feeds = {"x": feed(INPUT, is_float=True)}
        path = str(folders[0])

        def run() -> list[Any]:
            return [result for one in sessions for result in one.run(None, {one.get_inputs()[0].name: feeds["x"]})]
    elif kind == "planned":
        import memonger

        session = memonger.Session(path, check_weights=False)
        shapes = {one.name: (one.shape, one.dtype.is_floating_point()) for one in session._model.programs[0].inputs}

        def planned_run() -> list[Any]:
            return list(session.run(feeds).values())

        def planned_words() -> list[Any]:
            session.reset_state()
            return said(lambda given: session.run(given)["logits"])

        run = planned_run
        if "attention_mask" in shapes:
            run, words = planned_words, WORDS
        else:
            feeds = {name: feed(*shape) for name, shape in shapes.items()}
    else:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        if kind == "mapped":
            options.add_session_config_entry("session.disable_prepacking", "1")
        stock = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        feeds = {one.name: feed(one.shape, "float" in one.type) for one in stock.get_inputs()}
        pasts = {one.name: one.shape for one in stock.get_inputs() if one.name.startswith("past")}
        outputs = [one.name for one in stock.get_outputs()]

        def stock_run() -> list[Any]:
            return list(stock.run(None, feeds))

        def stock_words() -> list[Any]:
            caches = {name: np.zeros((1, shape[1], 0, shape[3]), np.float32) for name, shape in pasts.items()}

            def logits(given: Mapping[str, Any]) -> Any:
                found = dict(zip(outputs, stock.run(None, {**given, **caches}), strict=True))
                caches.update({name: found[name.replace("past_key_values", "present")] for name in caches})
                return found["logits"]

            return said(logits)

        run = stock_run
        if pasts:
            run, words = stock_words, WORDS

    loaded, load_seconds, seconds = resident(), time.perf_counter() - begin, []
    forget()
    for number in range(RUNS):
        if number > 1 and sum(seconds) * words > ENOUGH:
            break
        begin = time.perf_counter()
        results = run()
        seconds.append((time.perf_counter() - begin) / words)
    digest = hashlib.sha256(b"".join(f"{one.dtype}{one.shape}".encode() + one.tobytes() for one in results)).hexdigest()
    answer = {
        "peak": resident()["VmHWM"] - before, "loaded": loaded["VmHWM"] - before, "load": load_seconds,
        "cold": seconds[0], "warm": statistics.median(seconds[1:]), "digest": digest, "words": words > 1,
    }  # fmt: skip
    print(json.dumps(answer))


@contextmanager
def group(limit: int | None) -> Iterator[Path | None]:
    """A memory control group of the kernel's with a limit in bytes; None where there is to be none, or can't be."""
    version1 = Path("/sys/fs/cgroup/memory")
    folder = (version1 if version1.is_dir() else Path("/sys/fs/cgroup")) / f"memonger-larger-{os.getpid()}"
    made = False
    if limit is not None:
        with suppress(OSError):
            folder.mkdir()
            made = True
            (folder / ("memory.limit_in_bytes" if version1.is_dir() else "memory.max")).write_text(str(limit))
    try:
        yield folder if made else None
    finally:
        for _ in range(100 if made else 0):  # until the last process in it is gone
            with suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.1)


class Ended(NamedTuple):
    """A process that has ended, and the limit in MiB of the group that it was in and the most that this held: None
    where there was none."""

    done: "subprocess.CompletedProcess[str]"
    limit: float | None
    held: float | None


def run_in_group(command: Sequence[str], limit: int | None, longest: float | None = None) -> Ended:
    """A process in a group of its own, if there is a limit and one can be made.

    Raises:
        TimeoutExpired: in a group it took more than ``longest`` seconds.
    """
    with group(limit) as folder:
        if folder is None:
            return Ended(subprocess.run(command, capture_output=True, text=True), None, None)
        command = ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh", *command]
        done = subprocess.run(command, capture_output=True, text=True, timeout=longest)
        most = (folder / name for name in ("memory.max_usage_in_bytes", "memory.peak"))
        held = next((int(one.read_text()) / MIB for one in most if one.is_file()), None)
    return Ended(done, (limit or 0) / MIB, held)


def ask(kind: str, path: Path, limit: int | None = None) -> dict[str, Any]:
    """What a process says, in a group of its own if there is a limit; or how it ended."""
    command = [sys.executable, "-m", "benchmarks.inference.larger", "--child", kind, str(path)]
    busy = os.getloadavg()[0]
    try:
        done, limited, held = run_in_group(command, limit, LONGEST)
    except subprocess.TimeoutExpired:
        return {"ended": f"> {LONGEST:.0f} s", "busy": busy}
    if done.returncode and limited is None:
        raise RuntimeError(done.stderr.strip()[-2000:] or f"exit status {done.returncode}")
    if done.returncode:
        killed = done.returncode in (-9, 137) or "ended by SIGKILL" in done.stderr
        return {"ended": "killed" if killed else "failed", "error": done.stderr.strip()[-500:], "busy": busy}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer | {"limit": limited, "held": held, "busy": busy}


def _plan(source: Path, folder: Path, budget: int | None) -> dict[str, Any]:
    """Plan in a process that ends, so that its memory is back; the planned file is ``planned.onnx``."""
    program = (
        "import json, sys, memonger\n"
        "budget, options = int(sys.argv[3]) or None, json.loads(sys.argv[4])\n"
        "plan = memonger.search_plan(sys.argv[1], device='cpu', mode='inference', budget=budget, **options)\n"
        "plan.save(sys.argv[2])\n"
        "window = plan.window.nbytes if plan.window is not None else 0\n"
        "print(json.dumps({'total': plan.total_bytes, 'resident': plan.resident_parameter_bytes, 'window': window,\n"
        "                  'read': plan.read_bytes}))\n"
    )
    target, options = folder / "planned.onnx", json.dumps(OPTIONS.get(source.stem, {}))
    command = [sys.executable, "-c", program, str(source), str(target), str(budget or 0), options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"refused": done.stderr.strip().splitlines()[-1]}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def is_whole(row: Mapping[str, Any]) -> bool:
    """Whether a network's row has all figures."""
    budgets = row.get("budgets", [])
    return len(budgets) == len(SHARES) and all("refused" in one["plan"] or one.keys() >= WITHIN for one in budgets)


def seconds_of(answer: Mapping[str, Any]) -> float:
    """What the two runs took that each process has at least."""
    return (answer["cold"] + answer["warm"]) * (WORDS if answer["words"] else 1) if "cold" in answer else 0.0


def measured(name: str, record: Record) -> None:
    """A network: plans and stock onnxruntime, each in processes of their own; what the record has stays."""
    key = Path(name).stem
    row: dict[str, Any] = record.rows.get(key, {})
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/tmp")) as made:
        folder = Path(made)
        source = Path(name).absolute() if Path(name).suffix else _written(name, folder)
        for kind in ("stock", "mapped"):
            if kind not in row:
                record.add(key, row := row | {kind: ask(kind, source)})
        done: dict[float, dict[str, Any]] = {one["share"]: one for one in row.get("budgets", [])}
        planned = folder / "planned.onnx"
        for share in SHARES:
            one = done.setdefault(share, {"share": share})
            if "plan" not in one or ("refused" not in one["plan"] and not one.keys() >= {"planned", "free"}):
                one["budget"] = round(share * done[1.0]["plan"]["total"]) if share < 1 else 0
                one["plan"] = _plan(source, folder, one["budget"])
                one["budget"] = one["budget"] or one["plan"]["total"]
            limit = one["budget"] + SPARE
            asked: list[tuple[str, str, Path, int | None]] = [
                ("stock", "stock", source, limit), ("mapped", "mapped", source, limit)
            ]  # fmt: skip
            if "refused" not in one["plan"]:
                asked = [("planned", "planned", planned, limit), ("free", "planned", planned, None), *asked]
            for what, kind, path, within in asked:
                if what not in one:
                    is_slow = what == "mapped" and seconds_of(row["mapped"]) > LONGEST  # without any limit
                    one[what] = {"ended": f"> {LONGEST:.0f} s"} if is_slow else ask(kind, path, within)
                    record.add(key, row := row | {"budgets": list(done.values())})


def measured_fleet(record: Record) -> None:
    """Networks of different weights in one process, in a fleet, whose models share one window."""
    import onnx_ir as ir

    import models

    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/tmp")) as made:
        kept, window, rest, whole = 0, 0, 0, 0
        for seed in range(MEMBERS):
            folder = Path(made) / f"{seed:02}"
            folder.mkdir()
            ir.save(models.build_ir(MEMBER, batch=1, seed=seed), folder / "model.onnx", external_data="model.data")
            size = (folder / "model.data").stat().st_size
            plan = _plan(folder / "model.onnx", folder, size * 3 // 10)
            kept, window = kept + plan["resident"] - plan["window"], max(window, plan["window"])
            rest, whole = max(rest, plan["total"] - plan["resident"]), whole + size
        limit = kept + window + rest + FLEET_SPARE
        row = {kind: ask(kind, Path(made)) for kind in ("fleet of stock", "fleet")}
        row |= {"weights": {"bytes": whole}}
        row |= {f"{kind}, limited": ask(kind, Path(made), limit) for kind in ("fleet of stock", "fleet")}
        record.add(FLEET, row)


DECODERS = ("decoder_int4", "decoder_fp32")
OPTIONS: dict[str, dict[str, Any]] = {
    name: {"dims": CACHES, "state": {"past_key_values.*": "present.*"}} for name in DECODERS
}
"""What planning is told of a network."""
WITHIN = {"planned", "free", "stock", "mapped"}
"""What is measured at each budget; free: the plan outside any group."""


def _written(name: str, folder: Path) -> Path:
    """A network's file with its weights beside it, written in a process that ends."""
    (folder / "source").mkdir()
    path = folder / "source" / f"{name}.onnx"
    subprocess.run([sys.executable, "-m", "benchmarks.inference.larger", "--write", name, str(path)], check=True)
    return path


def write(name: str, path: Path) -> None:
    """Write a network."""
    import onnx_ir as ir

    import models

    if name in DECODERS:
        from models.decoder import Sizes, decoder

        is_int4 = name == "decoder_int4"
        ir.save(ir.from_proto(decoder(Sizes(**DECODER, is_int4=is_int4))), path, external_data="model.data")
    else:
        network, settings = LARGE.get(name, (name, {}))
        ir.save(models.build_ir(network, batch=1, **settings), path, external_data="model.data")


def lines(rows: Mapping[str, Any], command: str) -> Iterator[str]:
    """The table."""
    yield from stamp(command, ("onnxruntime", "onnx", "onnx-ir"))
    yield "MiB and seconds; kept, window: weights in memory; read: weights that a run reads from the file; peak: all"
    yield "that the process grew by; held: the most that its control group had; limit: of that group, the budget and"
    yield f"{SPARE // MIB} MiB; busy: the machine's load average when the process began, where it was noted"
    yield ""
    yield TABLE.heading
    for name, row in rows.items():
        if name == FLEET:
            yield from fleet_lines(row)
            continue
        for kind, what in (("stock", "stock"), ("mapped", "stock, packing off")):
            yield TABLE.row(name, what, *[None] * 4, *_figures(row[kind], row["stock"]["digest"]))
        for one in row.get("budgets", []):
            plan, budget = one["plan"], one["budget"] / MIB
            if "refused" in plan:
                smallest, bound = (int(size) / MIB for size in re.findall(r"\((\d+) bytes\)", plan["refused"])[1:])
                said = f"refused: {smallest:.0f} was found to work, none below {bound:.0f} can"
                yield TABLE.row(name, f"planned, {one['share']:.0%}", budget) + f"  {said}"
            elif one.keys() >= {"planned", "free"}:
                sizes = [plan["resident"] - plan["window"], plan["window"], plan["read"]]
                figures = _figures(one["planned"], row["stock"]["digest"], one["free"]["warm"])
                yield TABLE.row(name, f"planned, {one['share']:.0%}", budget, *(s / MIB for s in sizes), *figures)
            for kind, what in (("stock", "stock, same limit"), ("mapped", "stock, packing off, same limit")):
                if kind in one:
                    figures = _figures(one[kind], row["stock"]["digest"])
                    yield TABLE.row(name, what, budget, *[None] * 3, *figures)
        yield ""
    yield from decoder_lines(rows)


def decoder_lines(rows: Mapping[str, Any]) -> Iterator[str]:
    """What decoders say in a second at the same memory, by the rows of `lines`."""
    decoders = {name: row for name, row in rows.items() if name != FLEET and row["stock"].get("words")}
    if not decoders:
        return
    yield f"Tokens a second that a decoder says, one after the other ({WORDS}, and the prompt is read in their time),"
    yield "in a control group of so many MiB (limit): planned for its budget; stock onnxruntime; stock without packing,"
    yield "which has other bits. Cached: planned for the same budget, outside any group, its file in the system's cache"
    yield TOKENS.heading

    def rate(answer: Mapping[str, Any] | None) -> float | str | None:
        return None if answer is None else answer.get("ended") or 1 / answer["warm"]

    for name, row in decoders.items():
        yield TOKENS.row(name, "no limit", *[None] * 3, rate(row["stock"]), rate(row["mapped"]))
        for one in row.get("budgets", []):
            if one.keys() >= {"planned", "free"}:
                rates = [rate(one[kind]) for kind in ("planned", "free")] + [
                    rate(one.get(k)) for k in ("stock", "mapped")
                ]
                yield TOKENS.row(name, f"{one['share']:.0%}", one["planned"].get("limit"), *rates)
    yield ""


def fleet_lines(row: Mapping[str, Any]) -> Iterator[str]:
    """The table of the fleet."""
    weights = row["weights"]["bytes"] / MIB
    yield f"{MEMBERS} {MEMBER}s of {weights:.0f} MiB of weights, in one process"
    yield TABLE.heading
    for kind, what in (("fleet of stock", "stock"), ("fleet", "planned")):
        for name, where in ((kind, what), (f"{kind}, limited", f"{what}, limited")):
            answer = row[name]
            figures = _figures(answer, row["fleet of stock"].get("digest", ""))
            yield TABLE.row(f"{MEMBERS} {MEMBER}", where, *[None] * 4, *figures)


def _figures(answer: Mapping[str, Any], digest: str, cached: float | None = None) -> list[Any]:
    if "ended" in answer:
        return [*[None] * 7, answer.get("busy"), answer["ended"]]
    same = "same" if answer["digest"] == digest else "differ"
    sizes = [answer["peak"], answer.get("held"), answer.get("limit")]
    times = [answer["load"], answer["cold"], answer["warm"], cached]
    return [*sizes, *times, answer.get("busy"), same]


def main() -> None:
    """Measure, print the table and keep it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NETWORKS)}; all where there is none")
    parser.add_argument("--files", nargs="*", default=[], metavar="FILE", help="other models")
    parser.add_argument("--fleet", action="store_true", help="the fleet alone")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there")
    parser.add_argument("--out", type=Path, default=HERE, metavar="DIR", help="where the table and its rows are kept")
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="N", help="begin no network after so many")
    given = parser.parse_args()
    record = Record(given.out / "larger.json", given.resume, given.minutes)
    names = [*(given.names or ([] if given.files or given.fleet else NETWORKS)), *given.files]
    if not (given.names or given.files) and FLEET not in record.rows:
        measured_fleet(record)
    for name in progress(names, record, lambda one: is_whole(record.rows.get(Path(one).stem, {}))):
        measured(name, record)
    keep(lines(record.rows, "inference.larger --files FILE..."), given.out / "larger.txt")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    elif sys.argv[1:2] == ["--write"]:
        write(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
