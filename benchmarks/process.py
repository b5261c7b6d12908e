"""What a process takes that loads a model and runs it: ``python -m benchmarks.process``.

Writes process.txt. One process loads the user's own file into stock onnxruntime with its defaults, another the planned
file into `memonger.Session`; each runs three times. What they grow by is the operating system's account, over a Python
that has imported numpy: pages of the process's own (anonymous), pages of files, and the most of all pages together at
any moment (VmHWM), loading included. The prediction is `Plan.process_bytes`, and `Plan.mapped_bytes` for weights in the
plan's file. Training plans have no stock beside them: what their tensors take, and what a process took. Planning is the
most that the process took which planned and saved, whole; the last column is whether both gave the same bits.

Memory isn't disturbed by what else runs; no times are in these tables. Rows are kept in process.json: ``--resume``
takes them, and measures what isn't there. ``--files FILE...`` adds rows of other models, as of large networks that take
minutes to export. Of what has most weights stand seconds, too: of planning, that with saving, of loading, and of the
last of the three runs, one process after the other.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

STATUS = Path("/proc/self/status")
NETWORKS = ("resnet50", "vit_b16", "mobilenet_v2", "densenet121", "googlenet", "alexnet", "unet", "gpt", "lstm")
LARGE = {"vit_l16": ("vit_b16", {"num_layers": 24, "heads": 16, "width": 1024})}
LARGE_STEPS = {"gpt2 medium": ("gpt2", {"num_layers": 24, "heads": 16, "width": 1024})}
EXPORTED = ("torch convnext", "torch encoder", "torch pyramid")
DECODER = "llama, 6 of 22 layers"
WIDTHS = {
    "vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 32,
    "num_key_value_heads": 4, "intermediate_size": 5632,
}  # fmt: skip
TRAINING = {"resnet50": 4, "vit_b16": 1, "gpt": 8, "gpt2 medium": 1}
RUNS, LARGE_MIB = 3, 1000
FACTOR, SPARE = 1.05, 5.0  # what a process may take beside stock's growth; MiB
WITHIN = 0.03, 3.0  # of the prediction, or MiB


def resident() -> dict[str, float]:
    """MiB of this process, by what kind of pages they are."""
    fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines() if ":" in line)
    return {key: int(fields[key].split()[0]) / 1024 for key in ("RssAnon", "RssFile", "RssShmem", "VmRSS", "VmHWM")}


def _grown(before: dict[str, float]) -> dict[str, float]:
    now = resident()
    own = sum(now[key] - before[key] for key in ("RssAnon", "RssShmem"))
    file, whole = now["RssFile"] - before["RssFile"], now["VmRSS"] - before["VmRSS"]
    return {"own": own, "file": file, "all": whole, "peak": now["VmHWM"] - before["VmRSS"]}


def child(kind: str, path: str, given: str = "", results_to: str = "") -> None:
    """One process: load, run, say what it grew by.

    Args:
        kind: ``stock``, ``planned`` or ``train``.
        path: The model.
        given: An npz file of the inputs; without one they are drawn. Growth is then over a Python that has imported
            onnxruntime, too, which took ``runtime`` of the process's own memory.
        results_to: An npz file that the results are written to.
    """
    import numpy as np

    runtime, bare = 0.0, resident()
    if given:
        import onnxruntime

        runtime = _grown(bare)["own"]
    Path("/proc/self/clear_refs").write_text("5")
    before, draw, begin = resident(), np.random.default_rng(0), time.perf_counter()

    def array(shape: Any, is_float: bool) -> Any:
        dims = [dim if isinstance(dim, int) else 1 for dim in shape]
        return draw.standard_normal(dims).astype(np.float32) if is_float else draw.integers(0, 100, dims)

    if kind == "stock":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        loaded, infos, load_seconds = _grown(before), session.get_inputs(), time.perf_counter() - begin
        feeds = _read(given) if given else {each.name: array(each.shape, "float" in each.type) for each in infos}
        results, seconds = _last(lambda: session.run(None, feeds))
    elif kind == "planned":
        import memonger

        planned = memonger.Session(path)
        loaded, inputs, load_seconds = _grown(before), planned._model.programs[0].inputs, time.perf_counter() - begin
        feeds = _read(given) if given else {i.name: array(i.shape, i.dtype.is_floating_point()) for i in inputs}
        results, seconds = _last(lambda: list(planned.run(feeds).values()))
    else:
        import memonger

        trained = memonger.TrainingSession(path)
        loaded, load_seconds = _grown(before), time.perf_counter() - begin
        feeds = {each.name: array(each.shape, each.dtype.is_floating_point()) % 2 for each in trained.inputs}
        losses = list[float]()
        _, seconds = _last(lambda: losses.append(trained.step(feeds)))
        results = [np.array(losses)]
    ran, kinds = _grown(before), [type(each).__name__ for each in results]
    digest = hashlib.sha256(b"".join(_bytes(each) for each in results)).hexdigest()
    if results_to:
        arrays = [each if isinstance(each, np.ndarray) else np.array(repr(each)) for each in results]
        np.savez(results_to, *(each.astype(str) if each.dtype == object else each for each in arrays))  # of strings
    times = {"load": load_seconds, "run": seconds}
    print(json.dumps({"loaded": loaded, "ran": ran, "digest": digest, "kinds": kinds, "runtime": runtime} | times))


def _last(run: Callable[[], Any]) -> tuple[Any, float]:
    """What the last of the runs returns, and its seconds. What one returns is gone before the next."""
    for _ in range(RUNS):
        result, begin = None, time.perf_counter()
        result = run()
    return result, time.perf_counter() - begin


def _read(given: str) -> dict[str, Any]:
    """The arrays of an npz file."""
    import numpy as np

    return dict(np.load(given, allow_pickle=True))


def _bytes(value: Any) -> bytes:
    """A result's bytes, with its type and shape; of what is no tensor of numbers, its text."""
    import numpy as np

    array = np.asarray(value) if not isinstance(value, list) else None
    if array is None or array.dtype == object:
        return repr(value.tolist() if array is not None else value).encode()
    return f"{array.dtype}{array.shape}".encode() + array.tobytes()


def plan(source: str, target: str, mode: str, sizes: str = "{}", given: str = "") -> None:
    """Another process: plan, save, say what that took, and what is predicted."""
    Path("/proc/self/clear_refs").write_text("5")
    import memonger

    options: dict[str, Any] = {"device": "cpu", "mode": mode}
    if mode == "training":
        options |= {"loss": "loss", "optimizer": memonger.SGD(lr=0.01, momentum=0.9)}
    if given:
        import numpy as np

        options["inputs"] = dict(np.load(given, allow_pickle=True))
    begin = time.perf_counter()
    found = memonger.search_plan(source, dims=json.loads(sizes), **options)
    planned = time.perf_counter() - begin
    found.save(target)
    seconds, peak, made = time.perf_counter() - begin, resident()["VmHWM"], memonger.Plan.load(target)
    predicted, mapped = made.process_bytes or 0, made.mapped_bytes or 0
    print(json.dumps({"peak": peak, "total": made.total_bytes / 2**20, "weights": made.parameter_bytes / 2**20,
                      "predicted": predicted / 2**20, "mapped": mapped / 2**20,
                      "planned": planned, "seconds": seconds}))  # fmt: skip


def ask(*arguments: str, limit: float | None = None) -> dict[str, Any]:
    """What a process of this module says, one of ``stock``, ``planned``, ``train`` or ``plan``, within a limit in s.

    Raises:
        RuntimeError: it failed; the message is the end of what it said.
        subprocess.TimeoutExpired: it took longer.
    """
    command = [sys.executable, "-m", "benchmarks.process", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-2000:] or f"exit status {done.returncode}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _write(name: str, path: Path, batch: int = 1, training: bool = False) -> None:
    """A network's file, weights inside as exporters write them."""
    if name in EXPORTED or name == DECODER:
        from models.torch_exports import export, hub

        export(name, path) if name in EXPORTED else hub("llama", (256,), **WIDTHS)(path)
        return
    import onnx_ir as ir

    import models

    network, settings = (LARGE | LARGE_STEPS).get(name, (name, {}))
    ir.save(models.build_ir(network, batch=batch, training=training, **settings), path)


def _measured(name: str, folder: Path) -> dict[str, Any]:
    """A network in processes of their own."""
    source, target = folder / "model.onnx", folder / "planned.onnx"
    try:
        if name in TRAINING_NAMES:
            network, batch = TRAINING_NAMES[name]
            _write(network, source, batch, training=True)
            return {"plan": ask("plan", str(source), str(target), "training"), "own": ask("train", str(target))}
        if Path(name).suffix:
            source = Path(name)
        else:
            _write(name, source)
        plan_of = ask("plan", str(source), str(target), "inference")
        return {"plan": plan_of, "stock": ask("stock", str(source)), "own": ask("planned", str(target))}
    finally:
        for each in folder.iterdir():
            each.unlink()


TRAINING_NAMES = {f"{network}, batch {batch}": (network, batch) for network, batch in TRAINING.items()}


def _rows(found: Mapping[str, Any], table: Any) -> Iterator[str]:
    most, right = 0.0, 0
    for name, row in found.items():
        planned, stock, own = row["plan"], row["stock"], row["own"]
        yield table.row(
            name, planned["weights"],
            *(where[key][kind] for where in (stock, own) for key, kind in (
                ("loaded", "own"), ("ran", "own"), ("ran", "all"), ("ran", "peak"))),
            planned["predicted"], planned["mapped"], planned["peak"],
            "same" if stock["digest"] == own["digest"] else "differ",
        )  # fmt: skip
        for key, kind in (("loaded", "all"), ("ran", "all"), ("ran", "peak")):
            most = max(most, own[key][kind] - FACTOR * stock[key][kind] - SPARE)
        off, allowed = abs(own["ran"]["own"] - planned["predicted"]), max(WITHIN[0] * own["ran"]["own"], WITHIN[1])
        right += off <= allowed
    above = f"above {FACTOR} x stock's growth + {SPARE:.0f} MiB"
    yield ""
    yield f"most that a process took {above}, loaded, run or at its peak: {most:.1f} MiB"
    yield f"memory of its own within {WITHIN[0]:.0%} or {WITHIN[1]:.0f} MiB of the prediction: {right} of {len(found)}"


def _training_rows(found: Mapping[str, Any], table: Any) -> Iterator[str]:
    for name, row in found.items():
        planned, own = row["plan"], row["own"]
        yield table.row(
            name, planned["weights"], planned["total"], own["loaded"]["own"], own["ran"]["own"], own["ran"]["peak"],
            planned["predicted"], planned["peak"],
        )  # fmt: skip


def _seconds(found: Mapping[str, Any], table: Any) -> Iterator[str]:
    """Of what is large: how long it takes to plan, to load and to run."""
    for name, row in found.items():
        if "run" in row["own"] and row["plan"]["weights"] > LARGE_MIB:
            stock = row.get("stock", {})
            times = (stock.get("load"), stock.get("run"), row["own"]["load"], row["own"]["run"])
            yield table.row(name, row["plan"].get("planned"), row["plan"]["seconds"], *times)


def main(resume: bool, files: Sequence[str] = ()) -> None:
    """Measure, print the table and keep it."""
    from benchmarks.machine import HERE, Table, keep, stamp

    rows = HERE / "process.json"
    found: dict[str, Any] = json.loads(rows.read_text()) if resume and rows.is_file() else {}
    for name in (*NETWORKS, *EXPORTED, *LARGE, DECODER, *TRAINING_NAMES, *files):
        row = Path(name).stem
        if row not in found:
            with tempfile.TemporaryDirectory() as folder:
                found[row] = _measured(name, Path(folder))
            rows.write_text(json.dumps(found, indent=1) + "\n")
    table = Table(
        "network<22", "weights>8.1f", "stock loaded>13.1f", "run>7.1f", "all>8.1f", "peak>8.1f", "planned loaded>16.1f",
        "run>7.1f", "all>8.1f", "peak>8.1f", "predicted>10.1f", "mapped>8.1f", "planning>9.0f", "bits<7",
    )  # fmt: skip
    training = Table(
        "training<22", "persists>9.1f", "total>8.1f", "loaded>8.1f", "run>8.1f", "peak>8.1f", "predicted>10.1f",
        "planning>9.0f",
    )  # fmt: skip
    seconds = Table(
        "seconds<22", "plan>8.1f", "and save>10.1f", "stock load>12.2f", "run>8.2f", "planned load>14.2f", "run>8.2f"
    )

    def lines() -> Iterator[str]:
        yield from stamp("process" + (" --files FILE..." if files else ""), ("onnxruntime", "onnx", "onnx-ir"))
        yield "MiB that a process grows by; loaded, run: memory of its own; all: of files, too; peak: the most of all"
        yield ""
        yield table.heading
        yield from _rows({name: row for name, row in found.items() if "stock" in row}, table)
        yield ""
        yield training.heading
        yield from _training_rows({name: row for name, row in found.items() if "stock" not in row}, training)
        yield ""
        yield seconds.heading
        yield from _seconds(found, seconds)

    keep(lines(), HERE / "process.txt")


if __name__ == "__main__":
    asked = sys.argv[1:]
    if asked and asked[0] in ("stock", "planned", "train"):
        child(*asked)
    elif asked and asked[0] == "plan":
        plan(*asked[1:])
    else:
        main("--resume" in asked, asked[asked.index("--files") + 1 :] if "--files" in asked else ())
