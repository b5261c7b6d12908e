"""Wrong calls of the package and of the command line, and what each is told: what is wrong, and what would work.

The table is ``wrong_calls.txt`` beside this file: a call, and indented below it the message, where ``...`` stands for
whatever differs between machines. ``python -m tests.test_wrong_calls`` writes the table anew: read it aloud.
"""

import fnmatch
import os
import re
import shlex
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

import memonger
from tests.support.command_line import invoke

TABLE = Path(__file__).with_name("wrong_calls.txt")

MODEL = """<ir_version: 8, opset_import: ["" : 17]> g (float[batch, 8] x) => (float[batch, 4] scores)
    {{ h = MatMul (x, weight)  scores = Relu (h) }}"""


class Module:
    """What the package sees of a PyTorch module, which is not imported for it."""


Module.__module__, Module.__qualname__ = "torch.nn.modules.module", "Module"


class Net(Module):
    """A module of a user's."""


def _model(text: str = MODEL) -> onnx.ModelProto:
    model = onnx.parser.parse_model(text.format())
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.full((8, 4), 0.1, np.float32), "weight"))
    model.graph.node[0].name, model.graph.node[1].name = "head/fc", "head/relu"
    return model


def _fill(folder: Path) -> None:
    """The files that the calls name."""
    onnx.save(_model(), folder / "model.onnx")
    onnx.save(_model(MODEL.replace("batch", "4")), folder / "fixed.onnx")
    onnx.save(_model(MODEL.replace("[batch, 8]", "[batch, seq]")), folder / "text.onnx")
    memonger.search_plan(_model(), batch=2, device="none").save(folder / "planned.onnx")
    step = memonger.differentiate(_model(), loss="softmax_cross_entropy", optimizer=memonger.SGD(lr=0.1), batch=2)
    step.save(folder / "training.onnx")
    memonger.search_plan(step, device="none").save(folder / "step.onnx")
    (folder / "notes.txt").write_text("hello")
    (folder / "weights.pt").write_bytes(b"PK\3\4")
    (folder / "problem.csv").write_text("id,lower,upper,size\n1,0,2,64\n2,1,3,64\n")
    (folder / "bad.csv").write_text("id,lower,upper,size\n1,5,2,64\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wrong")
    _fill(path)
    return path


def _told(call: str) -> str:
    """The message of a call; empty if it succeeds."""
    if call.startswith("$ "):
        result = invoke(*shlex.split(call)[2:])
        assert (result.exit_code, "Traceback" in result.output) in ((1, False), (2, False)), call
        last = result.stderr.splitlines()[-1]
        return f"{result.exit_code}: {re.sub('^(memonger|Error): ', '', last)}"
    names: dict[str, Any] = {"memonger": memonger, "np": np, "module": Net(), "device": SimpleNamespace()}
    try:
        eval(call, names)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _table() -> list[tuple[str, str]]:
    lines = TABLE.read_text().splitlines()
    return list(zip(lines[::2], (line.strip() for line in lines[1::2]), strict=True))


def test_there_are_fifty_wrong_calls_of_both_kinds() -> None:
    calls = [call for call, _ in _table()]
    assert len(set(calls)) == len(calls) >= 50
    assert 20 <= sum(call.startswith("$ ") for call in calls) <= len(calls) - 20


@pytest.mark.parametrize(("call", "message"), _table(), ids=[call for call, _ in _table()])
def test_a_wrong_call_is_told_what_is_wrong(folder: Path, call: str, message: str, monkeypatch: Any) -> None:
    if "Session(" in call or "device='cpu'" in message:
        pytest.importorskip("onnxruntime")
    monkeypatch.chdir(folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    told = _told(call)
    assert _fits(told, message), told
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_message_is_a_sentence_in_the_words_of_who_asked() -> None:
    for call, message in _table():
        assert re.search(r"[.?)]$|for example: (memonger plan|dims=).*$", message), (call, message)  # to be pasted
        on_the_command_line = message[0].isdigit()
        others = r"\b(mode|device|loss|budget|dims|batch)=" if on_the_command_line else r"(?<!\w)--\w"
        assert not re.search(others, message), (call, message)


def _fits(told: str, message: str) -> bool:
    return fnmatch.fnmatchcase(told, re.sub(r"([\[?*])", r"[\1]", message).replace("...", "*"))


def _write() -> None:
    """Write the table anew: messages that still fit stay, with what they leave open."""
    with TemporaryDirectory() as folder:
        _fill(Path(folder))
        with chdir(folder):
            now = [(call, message, _told(call)) for call, message in _table()]
    TABLE.write_text("".join(f"{call}\n    {old if _fits(new, old) else new}\n" for call, old, new in now))


if __name__ == "__main__":
    os.environ.setdefault("COLUMNS", "80")
    _write()
