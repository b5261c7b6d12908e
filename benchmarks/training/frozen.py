"""Training in less memory than weights and optimizer state take: ``python -m benchmarks.training.frozen``.

Writes frozen.txt. A network with adapters of rank 8 beside every product (`memonger.add_lora`), or with all of it
trained, is planned for shares of what its step takes without a budget, both packed copies of each frozen weight
counted. Values that wait in a file for the backward pass (`Plan.values_in_file`) are in the column of that name. A
process of its own loads the planned file and takes steps in a memory control group of the kernel's, whose limit is the
budget and `SPARE`; then again outside any group. Losses and trained tensors are compared with those of the plan without
a budget, by their bits. Of a budget that is refused there is a row for the smallest that the refusal names.

Peaks are of the process's memory over a Python that has imported numpy: of its own, the most at any look (50 a second),
and of all pages, those of files too (VmHWM). Rows are kept in frozen.json: ``--resume`` takes them. ``--files FILE...``
adds rows of other models, ``--limit MiB`` those of one budget.
"""

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors

from benchmarks.inference.larger import run_in_group
from benchmarks.machine import MIB, Record, Table, keep, progress, stamp
from benchmarks.process import resident

HERE = Path(__file__).parent
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2 medium": (
        "gpt2", {"num_layers": 24, "width": 1024, "heads": 16, "seq_len": 64, "dropout": 0.0},
    ),
    "gpt of 1100 M": (
        "gpt", {"num_layers": 22, "width": 2048, "heads": 16, "vocabulary": 8000, "seq_len": 64, "dropout": 0.0},
    ),
    "gpt2, 6 layers": ("gpt2", {"num_layers": 6, "seq_len": 256, "dropout": 0.0}),
    "gpt of 420 M": (
        "gpt", {"num_layers": 8, "width": 2048, "heads": 16, "vocabulary": 8000, "seq_len": 64, "dropout": 0.0},
    ),
}  # fmt: skip
BUDGETS = {"gpt of 420 M": [400 * MIB], "gpt of 1100 M": [1376 * MIB], "gpt2 medium": [3230 * MIB]}
"""Of networks that aren't planned for `SHARES`; the last is 60 % of weights, gradients and moments."""
TRAINED = {"gpt2 medium"}
"""Networks without adapters: all of them is trained."""
SHARES = (1.0, 0.6, 0.4)
STEPS, RANK = 4, 8
SPARE = 160 * MIB
"""Bytes for what a budget doesn't count: modules of Python, onnxruntime's code, its nodes and reading the plan."""
TABLE = Table(
    "network<15", "what<15", "budget>7.0f", "kept>6.0f", "window>8.0f", "read>6.0f", "values>8.0f", "own>6.0f",
    "peak>6.0f", "limit>7.0f", "load>6.1f", "step>7.2f", "bits<9",
)  # fmt: skip


def plan_child(source: str, target: str, budget: int, rank: int) -> None:
    """Plan the step and save it; says its figures."""
    import memonger

    model = memonger.load(source, batch=1)
    model = memonger.add_lora(model, rank, "*") if rank else model
    step = memonger.differentiate(model, loss="softmax_cross_entropy", optimizer=memonger.AdamW(1e-3))
    refused = 0
    try:
        plan = memonger.search_plan(step, device="cpu", budget=budget or None)
    except memonger.BudgetError as error:
        refused = error.smallest
        plan = memonger.search_plan(step, device="cpu", budget=refused)
    plan.save(target)
    window = plan.window.nbytes if plan.window is not None else 0
    sizes = {"total": plan.total_bytes, "kept": plan.kept_parameter_bytes, "window": window, "read": plan.read_bytes}
    sizes |= {"values": sum(plan.values_in_file.values())}
    print(json.dumps(sizes | {"refused": refused, "notes": plan.notes}))


def steps_child(path: str) -> None:
    """Load a planned step and take it some times; says what that took."""
    import numpy as np

    before, most, ended, begin = resident(), [0.0], threading.Event(), time.perf_counter()

    def watch() -> None:
        while not ended.wait(0.02):
            most[0] = max(most[0], resident()["RssAnon"])

    threading.Thread(target=watch, daemon=True).start()
    import memonger
    from memonger.cli.train import random_batch
    from memonger.plan import Plan

    feeds = random_batch(Plan.load(path, check_weights=False), 0)
    session, losses, seconds = memonger.TrainingSession(path), list[float](), list[float]()
    load_seconds = time.perf_counter() - begin
    for _ in range(STEPS):
        begin = time.perf_counter()
        losses.append(session.step(feeds))
        seconds.append(time.perf_counter() - begin)
    digest = hashlib.sha256(np.array(losses).tobytes())
    with tempfile.TemporaryDirectory(dir=Path(path).parent) as folder:
        session.save(Path(folder) / "state")  # a tensor at a time, as all of them may be more than there is room for
        digest.update(json.dumps(safetensors.safe_open(Path(folder) / "state", "np").metadata()).encode())
    ended.set()
    answer = {
        "own": most[0] - before["RssAnon"], "peak": resident()["VmHWM"] - before["VmRSS"], "load": load_seconds,
        "step": statistics.median(seconds[1:]), "losses": losses, "digest": digest.hexdigest(),
        "why_not": [reader.why_not for reader in session.weight_readers],
    }  # fmt: skip
    print(json.dumps(answer))


def ask(*words: object, limit: int | None = None) -> dict[str, Any]:
    """What a process says, in a group of its own if there is a limit; or how it ended."""
    command = [sys.executable, "-m", "benchmarks.training.frozen", "--child", *map(str, words)]
    done, limited, _ = run_in_group(command, limit)
    if done.returncode:
        return {"ended": "killed" if done.returncode in (-9, 137) else done.stderr.strip().splitlines()[-1][:80]}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer | {"limit": limited}


def measured(name: str, source: Path, folder: Path, budgets: list[int], record: Record) -> None:
    """The step without a budget, and within each."""
    planned = folder / "planned.onnx"
    rank = 0 if name in TRAINED else RANK
    whole = ask("plan", source, planned, 0, rank)
    row: dict[str, Any] = {"whole": whole, "free": ask("steps", planned), "budgets": []}
    for budget in budgets or [round(share * whole["total"]) for share in SHARES]:
        plan = ask("plan", source, planned, budget, rank)
        one = {"asked": budget, "budget": (budget := plan["refused"] or budget), "plan": plan}
        one |= {"held": ask("steps", planned, limit=budget + SPARE), "free": ask("steps", planned)}
        row["budgets"].append(one)
    record.add(name, row)


def lines(rows: Mapping[str, Any], command: str) -> Iterator[str]:
    """The table."""
    yield from stamp(command, ("onnxruntime", "onnx", "onnx-ir"))
    yield "MiB and seconds; kept, window: weights and state in memory; read: what a step reads from files; values: what"
    yield "the forward pass leaves in one for the backward pass;"
    yield f"own, peak: what the process grew by; limit: of its control group, the budget and {SPARE // MIB} MiB"
    yield ""
    yield TABLE.heading
    for name, row in rows.items():
        digest = row["free"]["digest"]
        yield _line(name, "no budget", row["whole"]["total"], row["whole"], row["free"], digest)
        for one in row["budgets"]:
            share = f"{one['budget'] / row['whole']['total']:.0%}"
            if one["plan"]["refused"]:
                yield TABLE.row(
                    name, f"{one['asked'] / row['whole']['total']:.0%}", one["asked"] / MIB, *[None] * 9, "refused"
                )
            yield _line(name, f"{share}, in group", one["budget"], one["plan"], one["held"], digest)
            yield _line(name, f"{share}, free", one["budget"], one["plan"], one["free"], digest)
        yield ""


def _line(name: str, what: str, budget: int, plan: Mapping[str, Any], took: Mapping[str, Any], digest: str) -> str:
    sizes = [plan.get(key, 0) / MIB for key in ("kept", "window", "read", "values")]
    if "ended" in took:
        return TABLE.row(name, what, budget / MIB, *sizes, None, None, None, None, None, took["ended"])
    same = "same" if took["digest"] == digest else "differ"
    return TABLE.row(
        name, what, budget / MIB, *sizes, took["own"], took["peak"], took["limit"], took["load"], took["step"], same
    )


def main() -> None:
    """Measure, print the table and keep it."""
    import onnx_ir as ir

    import models

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", nargs="*", default=[], metavar="FILE", help="other models")
    parser.add_argument("--limit", type=float, nargs="*", default=[], metavar="MiB", help="budgets; else shares")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there")
    parser.add_argument("--out", type=Path, default=HERE, metavar="DIR", help="where the table and its rows are kept")
    given = parser.parse_args()
    record, budgets = Record(given.out / "frozen.json", given.resume), [round(one * MIB) for one in given.limit]
    for name in progress([*(given.files or NETWORKS)], record, lambda one: Path(one).stem in record.rows):
        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/tmp")) as folder:
            source = Path(name).absolute()
            if name in NETWORKS:
                network, settings = NETWORKS[name]
                source = Path(folder) / "source.onnx"
                ir.save(models.build_ir(network, batch=1, **settings), source, external_data="source.data")
            measured(Path(name).stem, source, Path(folder), budgets or BUDGETS.get(name, []), record)
    keep(lines(record.rows, "training.frozen"), given.out / "frozen.txt")


if __name__ == "__main__":
    if sys.argv[1:3] == ["--child", "plan"]:
        plan_child(sys.argv[3], sys.argv[4], int(sys.argv[5]), int(sys.argv[6]))
    elif sys.argv[1:3] == ["--child", "steps"]:
        steps_child(sys.argv[3])
    else:
        main()
