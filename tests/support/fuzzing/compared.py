"""What cases are compared with: stock onnxruntime, and files that must not be read."""

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

import memonger
from tests.support import networks
from tests.support.fuzzing import corpus, mutate
from tests.support.fuzzing.outcomes import Wrong
from tests.support.stock import parse, same

Tell = Callable[..., None]
SECRET = b"none of a model's" * 4096
"""The content of files that are none of a model's."""


def place(folder: Path, data: bytes) -> Path:
    """A folder with the model, and files that are none of its own around it."""
    home = folder / "home"
    home.mkdir()
    (folder / "sub").mkdir()
    for other in (folder, folder.parent):  # the working directory, and beside it
        (other / mutate.SECRET).write_bytes(SECRET)
    (home / "model.onnx").write_bytes(data)
    return home / "model.onnx"


def check_secret(what: Any) -> None:
    """No byte of a file that is none of the model's in an output or a file.

    Raises:
        Wrong: they are.
    """
    data = what.read_bytes() if isinstance(what, Path) else what.tobytes() if isinstance(what, np.ndarray) else b""
    if SECRET[:16] in data or SECRET[8:24] in data:
        raise Wrong(
            f"reads a file outside the model's folder: {'planned file' if isinstance(what, Path) else 'output'}"
        )


def stock(source: Path | bytes, feeds: Mapping[str, Any], level: str) -> list[dict[str, Any]] | None:
    """What stock onnxruntime gives, twice: what is random differs. None: it refuses."""
    try:
        options = onnxruntime.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 4, 1
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        data = str(source) if isinstance(source, Path) else source
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        return [networks.run_stock(session, dict(feeds)) for _ in range(2)]
    except Exception:  # its errors have no common class
        return None


def compare(mine: Mapping[str, Any], stock: list[dict[str, Any]] | None, about: str = "") -> str:
    if stock is None or not all(_same(stock[0][name], stock[1][name]) for name in stock[0]):
        return "alone"
    for name, expected in stock[0].items():
        if not _same(mine.get(name), expected):
            raise Wrong(f"{about}other numbers than stock onnxruntime")
    return "right"


def _same(mine: Any, stock: Any) -> bool:
    if isinstance(mine, np.ndarray):  # a target of the caller's may be of a subclass
        mine = mine.view(np.ndarray)
    if mine is None or stock is None or type(mine) is not type(stock):
        return mine is stock
    return same(mine, stock) if isinstance(mine, np.ndarray | list) else bool(mine == stock)


_PLANNED: dict[str, tuple[bytes, dict[str, Any]]] = {}
"""Planned files and inputs, by what they are: each process plans them once."""


def planned(name: str) -> tuple[bytes, dict[str, Any]]:
    if name not in _PLANNED:
        device, _, source = name.partition(" ")
        model = corpus.network(source) if source in corpus.NETWORKS else parse(corpus.WRITTEN[int(source)], opset=18)
        batch = {"batch": 4} if source == "4" else {}
        plan = memonger.search_plan(model, mode="inference", device=device, threads=1, **batch)
        file = Path.cwd() / "base.onnx"
        plan.save(file)
        feeds = corpus.feeds_for(random.Random(0), onnx.load(file), {})
        _PLANNED[name] = file.read_bytes(), feeds
    return _PLANNED[name]


PLANS = tuple(f"{device} {source}" for device in ("none", "cpu") for source in ("resnet18", "gpt", "2", "3", "4"))
