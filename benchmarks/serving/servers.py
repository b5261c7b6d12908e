"""Servers of Python exports under good and bad requests: ``python -m benchmarks.serving.servers -o FILE``.

Each server is started in the exported folder, on the loopback, by the interpreter given with ``--python`` (all need
memonger and onnxruntime, and each its own package). 10,000 requests come from 8 clients at once, one in ten bad, and so
is the very first: it is answered before any other is sent. Good answers are compared with stock onnxruntime on the
original model. Memory is the anonymous memory of the server's processes (Pss), 1,000 requests in and at the end.
"""

import dataclasses
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import numpy as np

import memonger
from benchmarks.machine import ROOT, machine
from memonger.serving import export
from tests.support import triton_stand_in
from tests.support.serving_requests import BATCHES, Answer, Request, bad_requests, good_requests, judge, model

CLIENTS, BAD_EVERY, WARM = 8, 10, 1000
STARTING, ANSWERING, STOPPING = 120.0, 60.0, 20.0  # seconds that are waited at most
SETTLING = 3.0  # seconds without requests before memory is read
MIB = 1 << 20

KSERVE = """
import runpy, sys, uvicorn
make = uvicorn.Config.__init__
uvicorn.Config.__init__ = lambda self, app, **given: make(self, app, **{{**given, "host": "127.0.0.1"}})
sys.argv = ["server.py", "--model_name", "served", "--http_port", "{port}", "--enable_grpc", "false"]
runpy.run_path("server.py", run_name="__main__")
"""  # ``python server.py``, which listens on every address of the machine and can't be told otherwise
RAY = """
import ray, signal
from ray import serve
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)
serve.start(http_options={{"host": "127.0.0.1", "port": {port}}})
import app
serve.run(app.app)
signal.pause()
"""

BENTOML_ALONE = """
from typing import Any
import bentoml

@bentoml.service(name="served")
class PlannedService:
    @bentoml.api
    def infer(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        rows = inputs[0]["shape"][0]
        return {"outputs": [{"name": "y", "shape": [rows, 10], "datatype": "FP32", "data": [0.0] * 10 * rows}]}
"""  # what BentoML takes without a model and without memonger

Ask = Callable[[Any], Answer]


@dataclass(frozen=True, slots=True)
class Target:
    """How an export is served: the command, the path that says it is ready, and the path of requests.

    ``packages`` are those of the stack, whose versions the table names.
    """

    command: Callable[[int], Sequence[str]]
    ready: str = ""
    path: str = ""
    packages: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


TARGETS = {
    "triton-python": Target(lambda port: ("-m", "tests.support.triton_stand_in", "served/1", str(port))),
    "kserve": Target(
        lambda port: ("-c", KSERVE.format(port=port)), "/v2/health/ready", "/v2/models/served/infer", ("kserve",)
    ),
    "ray": Target(
        lambda port: ("-c", RAY.format(port=port)), "/-/healthz", "/", ("ray",), {"RAY_USAGE_STATS_ENABLED": "0"}
    ),
    "bentoml": Target(
        lambda port: ("-m", "bentoml", "serve", "service:PlannedService", "--host", "127.0.0.1", "--port", str(port)),
        "/readyz",
        "/infer",
        ("bentoml",),
        {"BENTOML_DO_NOT_TRACK": "True"},
    ),
}
TARGETS["bentoml alone"] = TARGETS["bentoml"]


@dataclass(frozen=True, slots=True)
class Row:
    """What came back from one target's server; bytes and seconds. ``otherwise`` counts what isn't as it should be."""

    target: str
    version: str
    counts: Counter[str]
    seconds: float
    warm_bytes: int
    end_bytes: int
    otherwise: Counter[str]

    @property
    def sent(self) -> int:
        """Requests in all."""
        return sum(self.counts.values())


class Clients:
    """Threads that send requests and judge the answers: each has a connection of its own, and all share the count."""

    def __init__(self, connect: Callable[[], Ask], good: Sequence[Request], bad: Sequence[Request]) -> None:
        self._connect, self._good, self._bad = connect, good, bad
        self._lock, self._sent = threading.Lock(), 0
        self.counts: Counter[str] = Counter()
        self.otherwise: Counter[str] = Counter()

    def send(self, count: int, clients: int = CLIENTS) -> None:
        """Send that many more from as many clients."""
        end = self._sent + count
        threads = [threading.Thread(target=self._send_until, args=(end,), daemon=True) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _send_until(self, end: int) -> None:
        ask = self._connect()
        while (number := self._next(end)) is not None:
            request = self._request(number)
            try:
                answer = ask(request.content)
            except (OSError, EOFError, http.client.HTTPException) as error:
                answer, ask = (0, f"{type(error).__name__}: {error}"), self._connect()
            verdict = judge(request, answer)
            with self._lock:
                self.counts[verdict] += 1
                if verdict in ("good wrong", "bad otherwise"):
                    self.otherwise[f"{request.kind}: {answer[0]} {str(answer[1])[:200]!r}"] += 1

    def _next(self, end: int) -> int | None:
        with self._lock:
            if self._sent >= end:
                return None
            self._sent += 1
            return self._sent - 1

    def _request(self, number: int) -> Request:
        rest, turn = number % BAD_EVERY, number // BAD_EVERY
        return self._good[number % len(self._good)] if rest else self._bad[turn % len(self._bad)]


def http_client(port: int, path: str) -> Ask:
    """Asks by HTTP over one connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWERING)

    def ask(content: bytes) -> Answer:
        connection.request("POST", path, content, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()

    return ask


def stand_in_client(port: int) -> Ask:
    """Asks Triton's stand-in over one connection."""
    connection: Connection = triton_stand_in.connect(port)

    def ask(content: Any) -> Answer:
        connection.send(content)
        if not connection.poll(ANSWERING):
            raise TimeoutError
        found: Answer = connection.recv()
        return found

    return ask


@contextmanager
def running(target: Target, python: str, folder: Path, port: int, connect: Callable[[], Ask]) -> Iterator[int]:
    """The id of the server's first process, once the server is ready; it and all it started are ended at last."""
    log = folder.parent / "server.log"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "BENTOML_HOME": str(folder.parent / "home")}
    with log.open("w") as output:
        process = subprocess.Popen(
            [python, *target.command(port)], cwd=folder, stdout=output, stderr=output,
            env={**environment, **target.environment},
        )  # fmt: skip
    try:
        _wait_until_ready(process, target, port, connect, log)
        yield process.pid
    finally:
        _stop(process)


def _wait_until_ready(
    process: "subprocess.Popen[bytes]", target: Target, port: int, connect: Callable[[], Ask], log: Path
) -> None:
    end = time.monotonic() + STARTING
    while process.poll() is None and time.monotonic() < end:
        try:
            if target.path:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWERING)
                connection.request("GET", target.ready)
                if connection.getresponse().status == 200:
                    return
            else:
                connect()
                return
        except OSError:
            pass
        time.sleep(0.3)
    raise click.ClickException(f"the server didn't start:\n{log.read_text()[-3000:]}")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    started = tree(process.pid)
    process.terminate()
    try:
        process.wait(STOPPING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid, begun in started.items():  # what a server leaves behind
        if _begun(pid) == begun:
            os.kill(pid, signal.SIGKILL)


def tree(root: int) -> dict[int, str]:
    """A process and its descendants: ids, and when each began."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return {pid: begun for pid in found if (begun := _begun(pid))}


def _begun(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def memory_of(root: int) -> int:
    """Anonymous bytes of a process and its descendants, pages that they share counted once."""
    size = 0
    for pid in tree(root):
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        size += sum(int(kib) * 1024 for kib in re.findall(r"^Pss_Anon: +(\d+) kB$", text, re.MULTILINE))
    return size


def measure(name: str, python: str, sent: int, folder: Path) -> Row:
    """Export, serve and ask one target."""
    target, port = TARGETS[name], _free_port()
    plans = [memonger.search_plan(model(), batch=batch, mode="inference", device="none") for batch in BATCHES]
    export(plans, name.split()[0], folder / "out", name="served")
    as_json = bool(target.path)
    good, bad = good_requests(as_json=as_json), bad_requests(as_json=as_json)
    if name == "bentoml alone":
        (folder / "out" / "service.py").write_text(BENTOML_ALONE)
        bad = good = [dataclasses.replace(one, answer=np.zeros_like(one.answer)) for one in good]

    def connect() -> Ask:
        return http_client(port, target.path) if as_json else stand_in_client(port)

    with running(target, python, folder / "out", port, connect) as server:
        if name == "ray":
            _wait_for_route(connect)
        clients = Clients(connect, good, bad)
        clients.send(1, clients=1)  # the first request is bad, and nothing is on its way beside it
        clients.send(min(WARM, sent) - 1)
        time.sleep(SETTLING)
        warm, begin = memory_of(server), time.perf_counter()
        clients.send(sent - min(WARM, sent))
        seconds = time.perf_counter() - begin
        time.sleep(SETTLING)
        end = memory_of(server)
    version = ", ".join(f"{package} {_version(python, package)}" for package in target.packages)
    return Row(name, version, clients.counts, seconds, warm, end, clients.otherwise)


def _wait_for_route(connect: Callable[[], Ask]) -> None:
    """Ray's proxy is ready before it has heard of the application, and answers 404 until then; GET reaches nothing."""
    for _ in range(200):
        if connect()(b"")[0] not in (404, 503):
            return
        time.sleep(0.3)


def _version(python: str, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    lines = [
        f"Exports served on the loopback: {CLIENTS} clients, one request in {BAD_EVERY} bad, the very first among them",
        machine(("onnxruntime", "onnx", "numpy")),
        "; ".join(dict.fromkeys(row.version for row in rows if row.version)),
        "command: python -m benchmarks.serving.servers",
        "",
        "good right: as stock onnxruntime on the original model; bad refused: 4xx and one line; MiB: anonymous memory",
        f"of all processes of the server {WARM} requests in and at the end; requests/s: of the requests after those",
        "bentoml alone: a service of BentoML that answers zeros, without a model or memonger, and only good requests",
        "",
        f"{'target':16}{'sent':>7}{'good right':>12}{'good wrong':>12}{'bad refused':>13}{'bad otherwise':>15}"
        f"{'requests/s':>12}{'MiB at ' + str(WARM):>13}{'MiB at end':>12}",
    ]
    for row in rows:
        kinds = ("good right", "good wrong", "bad refused", "bad otherwise")
        right, wrong, refused, otherwise = (row.counts[kind] for kind in kinds)
        rate = max(0, row.sent - WARM) / row.seconds
        lines.append(
            f"{row.target:16}{row.sent:>7}{right:>12}{wrong:>12}{refused:>13}{otherwise:>15}{rate:>12.0f}"
            f"{row.warm_bytes / MIB:>13.1f}{row.end_bytes / MIB:>12.1f}"
        )
    for row in rows:
        lines += [f"{row.target}, {count} times: {what}" for what, count in row.otherwise.most_common(40)]
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--python", "pythons", multiple=True, help="Interpreter that runs servers: PATH, or TARGET=PATH for one.")
@click.option("--target", "targets", multiple=True, type=click.Choice(list(TARGETS)), help="Targets; all by default.")
@click.option("--requests", "sent", default=10_000, show_default=True, type=click.IntRange(1))
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Where to write the table.")
def main(pythons: Sequence[str], targets: Sequence[str], sent: int, output: Path | None) -> None:
    """Serve every Python export and ask it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # servers are stopped on the way out
    chosen = dict.fromkeys(TARGETS, sys.executable)
    for one in pythons:
        name, _, path = one.rpartition("=")
        chosen.update({name: path} if name else dict.fromkeys(TARGETS, path))
    rows = []
    for name in targets or TARGETS:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(name, chosen[name], sent, Path(folder)))
    text = table(rows)
    click.echo(text, nl=False)
    if output is not None:
        output.write_text(text)


if __name__ == "__main__":
    main()
