"""Models, plans and servers that the tests of exports share."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest

import memonger
from tests.support.stock import normal, parse

ROOT = Path(memonger.__file__).parent.parent
STARTING = 90  # seconds a server may take until it answers


def needs(package: str) -> None:
    """Skip the test where a package is missing that it starts in a process of its own.

    It isn't imported here: several packages bring the same protocol buffers, and one process holds them once.
    """
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} isn't installed")


def branched(batch: str | int = "batch") -> onnx.ModelProto:
    """Convolutions in two branches, then a matrix product: rows of a batch don't meet."""
    model = parse(
        f"g (float[{batch}, 3, 16, 16] x) => (float[{batch}, 10] y) {{ a = Conv <pads = [1, 1, 1, 1]> (x, u)"
        "  b = Relu(a)  c = Conv <pads = [1, 1, 1, 1]> (b, v)  d = Sigmoid(b)  e = Mul(c, d)  f = GlobalAveragePool(e)"
        "  h = Flatten(f)  y = MatMul(h, w) }"
    )
    weights = {"u": normal(0, 8, 3, 3, 3), "v": normal(1, 8, 8, 3, 3), "w": normal(2, 8, 10)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


def images(seed: int, batch: int) -> dict[str, np.ndarray]:
    """Inputs for `branched`."""
    return {"x": normal(seed, batch, 3, 16, 16)}


def planned(folder: Path, batches: Sequence[int], **choices: Any) -> list[Path]:
    """Planned files of `branched`, one a batch; portable ones if nothing else is asked for."""
    paths = []
    for batch in batches:
        paths.append(folder / f"branched{batch}.planned.onnx")
        plan = memonger.search_plan(branched(), batch=batch, **{"mode": "inference", "device": "none", **choices})
        plan.save(paths[-1])
    return paths


def loader(folder: Path) -> ModuleType:
    """The exported load.py, as a module."""
    spec = importlib.util.spec_from_file_location("exported_load", folder / "load.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def as_request(feeds: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Inputs as a server reads them."""
    names = {"float32": "FP32", "int64": "INT64"}
    return {
        "inputs": [
            {"name": n, "shape": list(a.shape), "datatype": names[str(a.dtype)], "data": a.ravel().tolist()}
            for n, a in feeds.items()
        ]
    }


def of_answer(answer: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The outputs of a server's answer."""
    return {one["name"]: np.asarray(one["data"], np.float32).reshape(one["shape"]) for one in answer["outputs"]}


def free_port() -> int:
    """A port of the loopback that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def server(command: Sequence[str], folder: Path, ready: str, **environment: str) -> Iterator[None]:
    """A program that serves in a folder, until the block is left; the block begins once ``ready`` answers."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    log = folder / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=folder, stdout=output, stderr=output,
            env={**os.environ, "PYTHONPATH": paths, **environment},
        )  # fmt: skip
    try:
        end = time.monotonic() + STARTING
        while not _answers(ready):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.3)
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def post(url: str, content: Mapping[str, Any]) -> tuple[int, Any]:
    """Post JSON; returns the status and the answer."""
    body = json.dumps(content).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
