"""Stands in for Triton around an exported model.py: ``python -m tests.support.triton_stand_in VERSION_FOLDER PORT``.

Triton runs each instance of a Python model in a process of its own, gives it `triton_python_backend_utils`, and hands
`execute` the requests that came in meanwhile, up to the largest batch. So does this, for requests that are pickled
dictionaries of arrays, on the loopback. It leaves out what Triton itself checks before the model sees a request.
"""

import importlib.util
import queue
import sys
import threading
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np

KEY = b"loopback"
TOGETHER = 4  # requests given to the model at once, at most
Given = tuple[dict[str, np.ndarray], Connection]


class Tensor:
    """A named array, as in triton_python_backend_utils."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        """Its name."""
        return self._name

    def as_numpy(self) -> np.ndarray:
        """Its array."""
        return self._array


class TritonError(Exception):
    """What a model answers a request with that it refuses."""

    UNAVAILABLE, INVALID_ARG = 503, 400

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class MetricFamily:
    """Figures of one name; the values that a model gave them, by name and labels, stay in `figures`."""

    COUNTER, GAUGE = "counter", "gauge"
    figures: ClassVar[dict[tuple[str, str], float]] = {}

    def __init__(self, *, name: str, description: str, kind: str) -> None:
        self._name = name

    def Metric(self, labels: dict[str, str]) -> SimpleNamespace:  # noqa: N802  the name Triton gave it
        """One figure."""
        key = (self._name, ",".join(labels.values()))

        def grow(by: float) -> None:
            self.figures[key] = self.figures.get(key, 0) + by

        return SimpleNamespace(set=lambda value: self.figures.update({key: value}), increment=grow)


def backend_utils() -> ModuleType:
    """What models use of triton_python_backend_utils."""
    module = ModuleType("triton_python_backend_utils")

    def response(output_tensors: list[Tensor], error: TritonError | None = None) -> SimpleNamespace:
        return SimpleNamespace(outputs={t.name(): t.as_numpy() for t in output_tensors}, error=error)

    content = {
        "Tensor": Tensor, "TritonError": TritonError, "InferenceResponse": response, "MetricFamily": MetricFamily,
    }  # fmt: skip
    for name, value in content.items():
        setattr(module, name, value)
    return module


def load(path: Path) -> Any:
    """An instance of an exported model.py; ``triton_python_backend_utils`` has to be in `sys.modules`."""
    spec = importlib.util.spec_from_file_location("exported_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.TritonPythonModel()
    model.initialize({})
    return model


def request_of(feeds: dict[str, np.ndarray]) -> SimpleNamespace:
    """A request as models see it."""
    tensors = [Tensor(*item) for item in feeds.items()]
    return SimpleNamespace(inputs=lambda: tensors)


def serve(version: Path, port: int) -> None:
    """Answer every connection's requests until the process is ended."""
    sys.modules["triton_python_backend_utils"] = backend_utils()
    model = load(version / "model.py")
    waiting: queue.SimpleQueue[Given] = queue.SimpleQueue()
    with Listener(("127.0.0.1", port), backlog=16, authkey=KEY) as listener:
        threading.Thread(target=_accept, args=(listener, waiting), daemon=True).start()
        while True:
            given = [waiting.get()]
            while len(given) < TOGETHER and not waiting.empty():
                given.append(waiting.get())
            _answer(model, given)


def _accept(listener: Listener, waiting: "queue.SimpleQueue[Given]") -> None:
    while True:
        connection = listener.accept()
        threading.Thread(target=_read, args=(connection, waiting), daemon=True).start()


def _read(connection: Connection, waiting: "queue.SimpleQueue[Given]") -> None:
    try:
        while True:
            waiting.put((connection.recv(), connection))
    except EOFError:
        connection.close()


def _answer(model: Any, given: list[Given]) -> None:
    """As Triton does, answer every request of an `execute` that raises with an internal error."""
    try:
        answers = model.execute([request_of(feeds) for feeds, _ in given])
        found = [(one.error.code, str(one.error)) if one.error else (200, one.outputs["y"]) for one in answers]
    except Exception as error:
        found = [(500, repr(error))] * len(given)
    for (_, connection), answer in zip(given, found, strict=True):
        connection.send(answer)


def connect(port: int) -> Connection:
    """A client's connection: send arrays, receive a status and the output or what was wrong."""
    return Client(("127.0.0.1", port), authkey=KEY)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
