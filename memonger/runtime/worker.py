"""Processes that measure: the parent asks in lines of JSON, and the worker answers each line with one.

`memonger run --compare` and the benchmarks measure in such processes, so that what one session leaves in memory is not
counted for another, and so that sessions can take turns on a machine that slows down.
"""

import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from memonger.errors import SessionError

PARTING = 3.0  # seconds a worker has to end by itself once its input is closed
LONGEST_WAIT = 60.0  # seconds of one wait on the queue, which takes no infinite timeout


class WorkerError(SessionError):
    """A worker gave up, ended, or did not answer in time; the message is the reason."""


class Worker:
    """The parent's end of ``python -m MODULE ARGUMENTS``. To be used in a ``with`` statement, which ends the process.

    Args:
        module: What to run.
        arguments: Its command line.
        errors: Where its standard error goes; the last line is the reason if it ends.
        environment: Variables to set on top of this process's own.
        left: Seconds that any answer may be waited for; whatever it raises ends the wait.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        errors: Path,
        environment: Mapping[str, str] | None = None,
        left: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self.errors, self.left = errors, left
        with errors.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True,
                env={**os.environ, **(environment or {})}, start_new_session=True,
            )  # fmt: skip
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def ask(self, request: object, seconds: float = math.inf) -> dict[str, Any]:
        """Send a request and return the answer; raises as `read` does."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except OSError:
            raise WorkerError(self._last_words()) from None
        return self.read(seconds)

    def times(self, runs: int, seconds: float = 0.0, timeout: float = math.inf) -> list[float]:
        """Seconds of each of at least ``runs`` runs that take at least ``seconds`` together; see `serve_times`."""
        answer: list[float] = self.ask({"runs": runs, "seconds": seconds}, timeout)["times"]
        return answer

    def read(self, seconds: float = math.inf) -> dict[str, Any]:
        """The next line that is a JSON object; other lines, such as a compiler's, are ignored.

        Raises:
            WorkerError: the worker reports a failure, has ended, or takes longer than ``seconds``.
        """
        until = time.monotonic() + seconds
        while True:
            wait = min(self.left(), until - time.monotonic(), LONGEST_WAIT)
            try:
                line = self.lines.get(timeout=max(0.0, wait))
            except queue.Empty:
                if time.monotonic() >= until:
                    raise WorkerError(f"no answer within {seconds:g} s") from None
                continue
            if line is None:
                raise WorkerError(self._last_words())
            answer = _parsed(line)
            if answer is None:
                continue
            if "failed" in answer:
                raise WorkerError(answer["failed"])
            return answer

    def _last_words(self) -> str:
        status = self.process.wait()
        if status < 0:
            return f"ended by {signal.Signals(-status).name}" + (" (out of memory?)" if status == -9 else "")
        lines = [line.strip() for line in self.errors.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else f"ended with status {status}"

    def end(self, parting: float = PARTING) -> None:
        """End the worker and what it has started, such as compilers: by closing its input, then by force."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(OSError):
            self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=parting)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its own session: it and its children, nobody else
        self.process.wait()
        self.listener.join()
        self.process.stdout.close()


def _parsed(line: str) -> dict[str, Any] | None:
    """A line's JSON object; None where it is none."""
    try:
        answer = json.loads(line)
    except json.JSONDecodeError:
        return None
    return answer if isinstance(answer, dict) else None


def say(answer: Mapping[str, Any]) -> None:
    """Write an answer, in the worker."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def serve(answer: Callable[[Any], Mapping[str, Any]]) -> None:
    """Answer requests, in the worker, until there are no more."""
    for line in sys.stdin:
        say(answer(json.loads(line)))


def serve_times(run: Callable[[], object]) -> None:
    """Answer each `Worker.times` with the seconds of every run."""

    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        until, times = time.perf_counter() + request["seconds"], list[float]()
        while len(times) < request["runs"] or time.perf_counter() < until:
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        return {"times": times}

    serve(answer)


def reason(error: BaseException) -> str:
    """An error in one line: its kind and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else 'no message'}"
