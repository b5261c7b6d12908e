"""Cases on fleets: threads that run, add and remove models, pipelines and limits, all at once."""

import functools
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import memonger
from tests.support.fuzzing import compared
from tests.support.fuzzing.compared import Tell
from tests.support.fuzzing.outcomes import Wrong
from tests.support.stock import parse

MODELS = {
    "small": "small (float[4,8] x) => (float[4,8] y) { y = Tanh(x) }",
    "wide": "wide (float[4,8] x) => (float[4,8] y) { a = MatMul(x, w)\n b = Relu(a)\n y = MatMul(b, v) }",
    "deep": "deep (float[4,8] x) => (float[4,8] y) { a = MatMul(x, w)\n b = Sigmoid(a)\n y = MatMul(b, v) }",
    "two": "two (float[4,8] x) => (float[4,8] y, float[4,8] z) { z = Neg(x)\n y = Exp(z) }",
    "any": "any (float[N,8] x) => (float[N,8] y) { a = MatMul(x, w)\n y = MatMul(a, v) }",
}
"""Graphs in onnx's text format. Of ``wide``, ``deep`` and ``any`` weights take some 100 KiB."""

SECONDS = 40.0
"""After which threads that haven't ended hang."""

_FILES: dict[str, Path] = {}
"""Planned files that this process has made."""


def _model(name: str) -> onnx.ModelProto:
    model = parse(MODELS[name], opset=18)
    rng = np.random.default_rng(len(name))
    for weight, shape in (("w", (8, 1600)), ("v", (1600, 8))):
        if any(weight in node.input for node in model.graph.node):
            array = rng.standard_normal(shape).astype(np.float32) / 8
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, weight))
    return model


def _files() -> dict[str, Path]:
    if not _FILES:
        folder = Path.cwd().parent.parent
        for name in MODELS:
            sizes: dict[str, Any] = {"dims": {"N": (1, 6)}} if name == "any" else {}
            plan = memonger.search_plan(_model(name), mode="inference", device="cpu", threads=1, effort=500, **sizes)
            plan.save(folder / f"{name}.onnx")
            _FILES[name] = folder / f"{name}.onnx"
    return _FILES


@functools.cache
def _plan(name: str) -> memonger.Plan:
    return memonger.Plan.load(_files()[name])


@functools.cache
def _expected(name: str, seed: int, rows: int) -> dict[str, np.ndarray]:
    found = compared.stock(_model(name).SerializeToString(), {"x": _feed(seed, rows)}, "ORT_ENABLE_ALL")
    assert found is not None
    return dict(found[0])


def _feed(seed: int, rows: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, 8)).astype(np.float32)


def fleets(choice: random.Random, folder: Path, tell: Tell, only_stock: bool) -> str:
    """Threads over one fleet: each answer is stock's, the limit is held, and all of them end."""
    tell(stage="device plan")
    files = _files()
    for name in MODELS:
        for seed in range(3):
            _expected(name, seed, 4)
    if only_stock:
        return "alone"
    arenas, wait = choice.choice([1, 1, 2, 3]), choice.choice([None, None, 0, 0.02, 5])
    sizes = [memonger.Fleet({name: files[name]}, arenas=arenas).memory().total for name in MODELS]
    limit = choice.choice([None, int(max(sizes) * choice.uniform(1.0, 2.5)), int(sum(sizes) * choice.uniform(0.3, 1))])
    threads, count = choice.choice([1, 2, 3, 5]), choice.choice([4, 8])
    tell(mutation=f"{arenas} arenas, wait {wait}, limit {limit} of {sum(sizes)}, {threads} threads", stage="run")
    fleet = memonger.Fleet(arenas=arenas, limit=limit, wait=wait, check_order=choice.random() < 0.3)
    said: list[object] = []
    works = [_Work(random.Random(choice.random()), fleet, said, limit) for _ in range(threads)]
    running = [threading.Thread(target=work.run, args=(count,), daemon=True) for work in works]
    for one in running:
        one.start()
    if choice.random() < 0.1:
        fleet.close()
    for one in running:
        one.join(SECONDS)
    if any(one.is_alive() for one in running):
        raise Wrong("threads hang")
    for error in said:
        if isinstance(error, BaseException) and not isinstance(error, memonger.MemongerError):
            raise error
        if isinstance(error, memonger.BusyError) and wait is None:
            raise Wrong("turned away without a time to wait")
    fleet.close()
    refused = [error for error in said if isinstance(error, memonger.MemongerError)]
    if len(refused) == len(said):
        raise memonger.SessionError(str(refused[:1]))
    return "right"


class _Work:
    """What a thread does with a fleet."""

    def __init__(self, choice: random.Random, fleet: memonger.Fleet, said: list[object], limit: int | None) -> None:
        self.choice, self.fleet, self.said, self.limit = choice, fleet, said, limit

    def run(self, count: int) -> None:
        acts: list[Callable[[], object]] = [self._run] * 8 + [self._add] * 4
        acts += [self._remove, self._pipeline, self._look, self.fleet.release]
        for number in range(count):
            try:
                (self._add if number == 0 else self.choice.choice(acts))()
                self.said.append("done")
            except BaseException as error:  # the thread that waits for this one raises it
                self.said.append(error)

    def _add(self) -> None:
        name = self.choice.choice(sorted(MODELS))
        source = _plan(name) if self.choice.random() < 0.2 else _files()[name]
        self.fleet.add(f"{name}.{self.choice.randrange(2)}", source)

    def _remove(self) -> None:
        self.fleet.remove(self._name())

    def _name(self) -> str:
        names = list(self.fleet)
        return self.choice.choice(names) if names else "none"

    def _run(self) -> None:
        name = self._name()
        kind, seed, rows = name.partition(".")[0], self.choice.randrange(3), 4
        if kind == "any" and self.choice.random() < 0.5:
            rows = self.choice.choice([1, 3, 6, 7])
        if self.choice.random() < 0.05:
            self.fleet[name].run({"x": self.choice.choice([None, np.zeros(3), _feed(0).astype(">f4")])})
            raise Wrong("a wrong input was taken")
        answer = self.fleet[name].run({"x": _feed(seed, rows)})
        for output, array in _expected(kind, seed, rows).items():
            if answer[output].tobytes() != array.tobytes():
                raise Wrong(f"{kind} gives other numbers")

    def _pipeline(self) -> None:
        names = list(self.fleet)
        if len(names) < 2:
            return
        first, second = self.choice.sample(names, 2)
        chain, seed = self.fleet.pipeline({first: {}, second: {"x": "y"}}), self.choice.randrange(3)
        answer = chain.run({"x": _feed(seed)})
        between = self.fleet[first].run({"x": _feed(seed)})["y"]
        if answer["y"].tobytes() != self.fleet[second].run({"x": between})["y"].tobytes():
            raise Wrong("a pipeline gives other numbers than its models")

    def _look(self) -> None:
        total = self.fleet.memory().total
        if self.limit is not None and total > self.limit:
            raise Wrong(f"the fleet takes {total}, and its limit is {self.limit}")
        self.fleet.metrics()


KINDS = {"fleets": fleets}
