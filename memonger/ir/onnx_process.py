"""onnx's own C++ on models from outside, in a process that may die.

onnx's text parser, shape inference and converter end the process on some files: a negative dimension that reaches a
Slice, an input that is left out, text nested thousands deep; they may also take all memory. So for models that come as
a file or as bytes they run in one child process, which is started when it is first needed, and again after it died.
Starting it takes as long as ``import onnx`` (0.2 s), and it holds some 60 MB until this process ends; each call also
sends the model, without its large weights, there and back. Models whose operators all are in `PLAIN`, which is most
convolutional networks, need no child, nor do models that are given as objects.
"""

import atexit
import json
import logging
import os
import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO, Any

import onnx
import onnx.checker
import onnx.parser
import onnx.shape_inference
import onnx.version_converter

logger = logging.getLogger(__name__)

MEMORY = 8 << 30
"""Bytes of memory that the child may take at most; on a small machine a quarter of what that has."""


class DiedError(RuntimeError):
    """The child process died of what it was given."""


def call(what: str, model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    """``infer_shapes`` or ``convert_version`` in the child process.

    Raises:
        RuntimeError: what onnx says of the model; a `DiedError` where it crashed.
        MemoryError: it takes more than there is.
    """
    return onnx.ModelProto.FromString(_ask(what, model.SerializeToString(), options))


def check_nodes(nodes: onnx.ModelProto, *, here: bool, once: bool = False) -> tuple[int, str] | None:
    """Check nodes against their operators' schemas, by onnx's own checker; what they read isn't looked at.

    Args:
        nodes: A model with nothing but nodes and operator sets.
        here: In this process.
        once: A child that is started for it ends with it.

    Returns: the first node that is wrong, by its number, and what is wrong with it.

    Raises:
        RuntimeError, MemoryError: as `call`.
    """
    data = nodes.SerializeToString()
    answer = json.loads(_answer("check_nodes", data, {}) if here else _ask("check_nodes", data, {}, once))
    return None if answer is None else (answer[0], answer[1])


def parse_text(data: bytes) -> onnx.ModelProto:
    """A model in onnx's own text format, parsed in the child process.

    Raises:
        RuntimeError: it can't be parsed.
        MemoryError: parsing takes more than there is.
    """
    return onnx.ModelProto.FromString(_ask("parse_model", data, {}))


IS_EXPENDABLE = False
"""Whether this process may die itself, as it was started for one file: it then asks no other."""

_LOCK = threading.Lock()
_CHILD: tuple[int, subprocess.Popen[bytes]] | None = None
"""The child, and the process that started it: a fork of that must not talk to it."""


def _ask(what: str, data: bytes, options: dict[str, Any], once: bool = False) -> bytes:
    with _LOCK:
        once = once and not _is_running()
        child = _child()
        if child is None:
            return _answer(what, data, options)
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            _send(child.stdin, {"what": what, "options": options}, data)
            head, answer = _receive(child.stdout)
        except (OSError, EOFError) as error:
            _end()
            raise DiedError("onnx crashes on it") from error
        except BaseException:  # Ctrl-C, say: what was asked would be answered later
            _end()
            raise
        if once:
            _end()
    if head["error"] is not None:
        raise MemoryError(head["error"]) if head["memory"] else RuntimeError(head["error"])
    return answer


def _is_running() -> bool:
    """Whether this process has a child already."""
    return _CHILD is not None and _CHILD[0] == os.getpid() and _CHILD[1].poll() is None


def _child() -> subprocess.Popen[bytes] | None:
    """The child process; None where none can be started, or none is needed."""
    global _CHILD
    if IS_EXPENDABLE:
        return None
    if _CHILD is not None and _is_running():
        return _CHILD[1]
    program = "import sys; sys.path[:] = sys.argv[2:]; import runpy; runpy.run_path(sys.argv[1], run_name='__main__')"
    try:
        child = subprocess.Popen(
            [sys.executable, "-c", program, __file__, *sys.path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert child.stdout is not None
        _receive(child.stdout)
    except (OSError, EOFError) as error:
        logger.warning("no process can be started to read a model in, so this one does it: %s", error or "it ended")
        return None
    if _CHILD is None:
        atexit.register(_end)
    _CHILD = os.getpid(), child
    return child


def _end() -> None:
    """Kill the child, if it is this process's own."""
    if _CHILD is None or _CHILD[0] != os.getpid():
        return
    child = _CHILD[1]
    child.kill()
    for stream in (child.stdin, child.stdout):
        try:
            if stream is not None:
                stream.close()
        except OSError:  # what was not sent yet
            pass
    child.wait()


def _send(stream: IO[bytes], head: dict[str, Any], data: bytes) -> None:
    stream.write(json.dumps({**head, "size": len(data)}).encode() + b"\n")
    stream.write(data)
    stream.flush()


def _receive(stream: IO[bytes]) -> tuple[dict[str, Any], bytes]:
    line = stream.readline()
    if not line:
        raise EOFError
    head: dict[str, Any] = json.loads(line)
    data = stream.read(head["size"])
    if len(data) < head["size"]:
        raise EOFError
    return head, data


def _answer(what: str, data: bytes, options: dict[str, Any]) -> bytes:
    if what == "parse_model":
        return onnx.parser.parse_model(data.decode()).SerializeToString()
    model = onnx.ModelProto.FromString(data)
    if what == "check_nodes":
        return json.dumps(_wrong_node(model)).encode()
    if what == "convert_version":
        return onnx.version_converter.convert_version(model, **options).SerializeToString()
    return onnx.shape_inference.infer_shapes(model, **options).SerializeToString()


def _wrong_node(model: onnx.ModelProto) -> tuple[int, str] | None:
    context = onnx.checker.C.CheckerContext()
    context.ir_version = model.ir_version
    context.opset_imports = {one.domain: one.version for one in model.opset_import}
    for number, node in enumerate(model.graph.node):
        try:
            onnx.checker.check_node(node, context)
        except onnx.checker.ValidationError as error:
            opset = context.opset_imports.get(node.domain, 0)
            if onnx.defs.has(node.op_type, opset, node.domain):
                schema: Any = onnx.defs.get_schema(node.op_type, opset, node.domain)  # whose stubs lack what follows
                if schema.deprecated and schema.has_context_dependent_function:  # GroupNormalization 18: run as that
                    continue
            return number, str(error).strip().splitlines()[0]
    return None


def _serve() -> None:
    """In the child: answer until nobody asks any more."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    if sys.platform != "win32":
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_AS)
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        # A quarter of the memory that a container lets its processes take, where it says so
        found = []
        for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
            try:
                with open(path) as file:
                    found.append(int(file.read()) // 4)
            except (OSError, ValueError):  # "max"
                continue
        used = 1 << 30  # address space of the libraries, most of it never touched
        with suppress(OSError), open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        limit = used + min(MEMORY, machine // 4, *found)
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _send(sys.stdout.buffer, {}, b"")  # it has begun
    while True:
        try:
            head, data = _receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer, error, memory = _answer(head["what"], data, head["options"]), None, False
        except Exception as problem:  # onnx's errors have no common class
            answer, error, memory = b"", str(problem) or repr(problem), isinstance(problem, MemoryError)
        _send(sys.stdout.buffer, {"error": error, "memory": memory}, answer)


if __name__ == "__main__":
    _serve()
