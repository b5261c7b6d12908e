"""Processes that are killed while they save, have no room to save in, or are interrupted: what is left afterwards?

Each kind of file is saved over and over, its content one of two by turns, by a process that is killed at a random
moment; or by one that may write no file beyond a random size, as on a disk that is full. A process that trains or runs
is interrupted (SIGINT) at random moments, and compares itself with one that wasn't.
"""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import onnx
import onnx_ir as ir

import memonger
from memonger.ir import save
from memonger.ir.save import save_model
from memonger.serving import export
from tests.support import training_models

ROOT = Path(__file__).parents[2]
FILLS = (1.0, 2.0)


def model(fill: float, size: int = 1000) -> ir.Model:
    """One weight of that content."""
    text = f'<ir_version: 10, opset_import: ["": 20]> g (float[1,{size}] x) => (float[1,{size}] y) {{ y = Add(x, w) }}'
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.full((1, size), fill, np.float32), "w"))
    return ir.from_proto(proto)


def content(path: Path) -> set[float]:
    """The numbers in the weight of a saved `model`."""
    read = onnx.load(path)
    return set(onnx.numpy_helper.to_array(read.graph.initializer[0]).ravel().tolist())


def _saved_model(path: Path, fill: float) -> None:
    save_model(model(fill, 100_000), path)


def _saved_weights(path: Path, fill: float) -> None:
    with mock.patch.object(save, "INLINE_LIMIT", 100):
        save_model(model(fill, 100_000), path)


def _saved_plan(path: Path, fill: float) -> None:
    memonger.search_plan(model(fill, 100_000), mode="inference", device="none").save(path)


def _plan_content(path: Path) -> set[float]:
    memonger.Plan.load(path)
    return content(path)


_TRAINERS: list[memonger.TrainingSession] = []


def _saved_state(path: Path, fill: float) -> None:
    if not _TRAINERS:
        _TRAINERS.append(memonger.TrainingSession(training_models.plan()))
    (trainer,) = _TRAINERS
    trainer.load_state_dict({name: np.full_like(array, fill) for name, array in trainer.state_dict().items()})
    trainer.save(path)


def _state_content(path: Path) -> set[float]:
    trainer = memonger.TrainingSession(training_models.plan())
    trainer.load(path)
    return {number for array in trainer.state_dict().values() for number in np.unique(array).tolist()}


def _saved_export(path: Path, fill: float) -> None:
    plan = memonger.search_plan(model(fill, 100_000), mode="inference", device="none")
    export(plan, "onnxruntime", path, name="m", force=True)


def _export_content(path: Path) -> set[float]:
    (model_file,) = path.glob("*.planned.onnx")
    return content(model_file)


KINDS: dict[str, tuple[Callable[[Path, float], None], Callable[[Path], set[float]]]] = {
    "model": (_saved_model, content),
    "model and weights": (_saved_weights, content),
    "plan": (_saved_plan, _plan_content),
    "state": (_saved_state, _state_content),
    "export": (_saved_export, _export_content),
}
"""What is saved, and how it is read: each content is one number everywhere."""

_SAVER = """
import sys
from pathlib import Path
from tests.support.interruptions import FILLS, KINDS
write = KINDS[sys.argv[1]][0]
write(Path(sys.argv[2]), FILLS[1])
print("ready", flush=True)
while True:
    for fill in FILLS:
        write(Path(sys.argv[2]), fill)
"""


def kill_while_saving(kind: str, path: Path, times: int, seed: int = 0) -> Counter[str]:
    """Kill a process that saves, several times over; what was there afterwards: ``old or new``, or what was wrong."""
    write, read = KINDS[kind]
    write(path, FILLS[0])
    rng, results = np.random.default_rng(seed), Counter[str]()
    for _ in range(times):
        with subprocess.Popen(
            [sys.executable, "-c", _SAVER, kind, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(float(rng.uniform(0, 0.1)))
            process.send_signal(signal.SIGKILL)
        try:
            numbers = read(path)
            results["old or new" if len(numbers) == 1 and numbers <= set(FILLS) else f"a mix: {numbers}"] += 1
        except Exception as error:
            results[f"{type(error).__name__}: {error}"] += 1
    return results


_NO_ROOM = """
import resource, sys
from collections import Counter
from pathlib import Path
import numpy as np
import memonger
from tests.support.interruptions import FILLS, KINDS
(write, read), path, times = KINDS[sys.argv[1]], Path(sys.argv[2]), int(sys.argv[3])
files = lambda: sorted(each for each in path.parent.rglob("*"))
write(path, FILLS[0])
before, largest = files(), max(each.stat().st_size for each in path.parent.rglob("*") if each.is_file())
rng, results = np.random.default_rng(0), Counter()
for _ in range(times):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(rng.integers(0, largest)), resource.RLIM_INFINITY))
    try:
        write(path, FILLS[1])
        result = "written beyond the limit"
    except memonger.MemongerError as error:
        result = "refused, all as before"
    except BaseException as error:
        result = f"{type(error).__name__}: {error}"
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    try:
        changed = "" if files() == before and read(path) == {FILLS[0]} else ", and other files are there"
    except Exception as error:
        changed = f", and what was there can't be read: {error}"
    results[result + changed] += 1
for result, count in results.items():
    print(count, result)
"""


def fill_while_saving(kind: str, path: Path, times: int) -> Counter[str]:
    """Have no room for all that is saved, several times over; how it ended, with what was there afterwards."""
    ran = subprocess.run(
        [sys.executable, "-c", _NO_ROOM, kind, str(path), str(times)], capture_output=True, text=True, cwd=ROOT,
        check=False,
    )  # fmt: skip
    if ran.returncode:
        raise AssertionError(ran.stderr)
    lines = (line.partition(" ") for line in ran.stdout.splitlines())
    return Counter({result: int(count) for count, _, result in lines})


_STEPS = """
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts it in the background ignores it
import numpy as np
import memonger
from tests.support.training_models import batch, plan
trainer, sound = (memonger.TrainingSession(plan()) for _ in range(2))
rng, caught = np.random.default_rng(0), 0
while caught < int(sys.argv[1]):
    timer = threading.Timer(rng.uniform(0, 0.01), os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        while True:
            trainer.step(batch(trainer.steps))
    except KeyboardInterrupt:
        caught += 1
    while sound.steps < trainer.steps:
        sound.step(batch(sound.steps))
    state, expected = trainer.state_dict(), sound.state_dict()
    assert all((state[name] == expected[name]).all() for name in state), trainer.steps
print(trainer.steps)
"""

_RUNS = """
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts it in the background ignores it
import numpy as np
import memonger
from tests.support.planning_models import network
made = memonger.search_plan(network("gpt", training=False), mode="inference", device="none")
session = memonger.Session(made)
values = made.model.graph.inputs
inputs = [{str(v.name): np.full(v.shape.numpy(), k, v.dtype.numpy()) for v in values} for k in range(2)]
expected = [session.run(feeds) for feeds in inputs]
target = {name: np.empty_like(array) for name, array in expected[0].items()}
rng, caught, runs = np.random.default_rng(0), 0, 0
while caught < int(sys.argv[1]):
    timer = threading.Timer(rng.uniform(0, 0.01), os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        while True:
            session.run(inputs[runs % 2], target if runs % 3 else None)
            runs += 1
    except KeyboardInterrupt:
        caught += 1
    for feeds, outputs in zip(inputs, expected):
        again = session.run(feeds)
        assert all((again[name] == outputs[name]).all() for name in outputs), runs
print(runs)
"""

INTERRUPTED = {"training step": _STEPS, "run": _RUNS}


def interrupt(kind: str, times: int) -> int:
    """Interrupt a process that trains or runs, which checks itself; returns how many steps or runs it made."""
    ran = subprocess.run(
        [sys.executable, "-c", INTERRUPTED[kind], str(times)], capture_output=True, text=True, cwd=ROOT, check=False,
        env={**os.environ},
    )  # fmt: skip
    if ran.returncode:
        raise AssertionError(ran.stderr)
    return int(ran.stdout)
