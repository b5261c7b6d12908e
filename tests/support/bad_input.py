"""Runs commands that have to fail, and checks what every failure has in common."""

import gc
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx

from tests.support import command_line
from tests.support.stock import normal, parse

KEY = "memonger.plan"
PLAN = ("plan", "--mode", "inference")
CHAIN = "g (float[N, 8] x) => (float[N, 8] y) { a = Relu(x)  b = Sigmoid(a)  y = Neg(b) }"


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder, hidden ones included, with its bytes; None for folders and what isn't a file."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() and not path.is_symlink() else None
        for path in sorted(folder.rglob("*"))
    }


class Place:
    """A folder to work in, and the temporary folder the program is given, which has to be empty afterwards."""

    def __init__(self, folder: Path, temporary: Path) -> None:
        self.folder, self.temporary = folder, temporary

    def write(self, name: str, content: bytes | onnx.ModelProto) -> Path:
        """A file in the folder."""
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.SerializeToString())
        return path

    def model(self, text: str = CHAIN, name: str = "model.onnx", **versions: int) -> Path:
        """A model in onnx's text format, written as a file."""
        return self.write(name, parse(text, **versions))

    def weighted(self, name: str = "model.onnx") -> Path:
        """A model whose weights lie in ``weights.bin`` beside it."""
        model = parse("g (float[4, 16] x) => (float[4, 16] y) { a = MatMul(x, w)  y = Relu(a) }")
        model.graph.initializer.append(onnx.numpy_helper.from_array(normal(0, 16, 16), "w"))
        onnx.save(model, self.folder / name, save_as_external_data=True, location="weights.bin", size_threshold=0)
        return self.folder / name

    def fails(self, *arguments: object, words: tuple[str, ...], status: int = 1) -> str:
        """Run a command: it fails with the status, all words in its message, and leaves no file behind or changed.

        Returns: the message.
        """
        before = contents(self.folder)
        failed, message = invoke(*arguments)
        assert (failed, message) == (status, message)
        for word in words:
            assert word in message
        assert "Traceback" not in message
        if status == 1:
            assert message.startswith("memonger: ")
            assert message.count("\n") == 1, message
        if self.leftovers():  # what a cycle of objects still holds
            gc.collect()
        assert contents(self.folder) == before
        assert self.leftovers() == []
        return message

    def leftovers(self) -> list[str]:
        """What lies in the temporary folder; a file by which onnxruntime recognizes a machine left out."""
        return [entry.name for entry in self.temporary.iterdir() if entry.name != ".ses"]


def invoke(*arguments: object) -> tuple[int, str]:
    """The exit status of a command, run in this process, and what it wrote to standard error."""
    result = command_line.invoke(*arguments)
    return result.exit_code, result.stderr


def plan_of(path: Path) -> dict[str, Any]:
    """The plan in a planned file."""
    model = onnx.load(path, load_external_data=False)
    content: dict[str, Any] = json.loads(next(e.value for e in model.metadata_props if e.key == KEY))
    return content


def with_plan(path: Path, change: Mapping[str, Any] | str) -> Path:
    """A copy of a planned file whose plan has some entries replaced (None: removed), or is replaced by a text."""
    model = onnx.load(path, load_external_data=False)
    entry = next(entry for entry in model.metadata_props if entry.key == KEY)
    if isinstance(change, str):
        entry.value = change
    else:
        content = json.loads(entry.value)
        content.update(change)
        entry.value = json.dumps({name: value for name, value in content.items() if value is not None})
    changed = path.with_name("changed.onnx")
    changed.write_bytes(model.SerializeToString())
    return changed
