"""The parent's end of a process that says lines of JSON, each of which is waited for no longer than it may take."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PARTING = 3.0  # seconds a process has to end by itself


class Failed(Exception):  # noqa: N818  (what happened to a contestant, not an error of the program)
    """A contestant gave up, or was given up on; the text is its reason."""


class OutOfTime(Exception):  # noqa: N818  (likewise)
    """The time for the whole program is over."""


@dataclass(frozen=True, slots=True)
class Clock:
    """When the program has to end, by `time.monotonic`; None: whenever."""

    end: float | None = None

    def left(self) -> float:
        """Seconds left.

        Raises:
            OutOfTime: none.
        """
        if self.end is None:
            return float("inf")
        left = self.end - time.monotonic()
        if left <= 0:
            raise OutOfTime
        return left


class Process:
    """A process of ``python -m MODULE ARGUMENTS``. To be used in a ``with`` statement, which ends it."""

    def __init__(
        self, module: str, arguments: Sequence[str], errors: Path, clock: Clock, environment: Mapping[str, str]
    ) -> None:
        self.errors, self.clock = errors, clock
        with errors.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True,
                env={**os.environ, **environment}, start_new_session=True,
            )  # fmt: skip
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def ask(self, line: str, seconds: float) -> dict[str, Any]:
        """Say a line, and return the answer; see `read`."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except OSError:
            raise Failed(self._last_words()) from None
        return self.read(seconds)

    def read(self, seconds: float) -> dict[str, Any]:
        """The next line that is JSON; compilers say other things, too.

        Raises:
            Failed: it says so, ended, or took longer than ``seconds``.
            OutOfTime: the clock has run out first.
        """
        until = time.monotonic() + seconds
        while True:
            left = self.clock.left()
            try:
                line = self.lines.get(timeout=max(0.0, min(left, until - time.monotonic())))
            except queue.Empty:
                if time.monotonic() >= until:
                    raise Failed(f"not ready within {seconds:.0f} s") from None
                continue
            if line is None:
                raise Failed(self._last_words())
            answer = _parsed(line)
            if "failed" in answer:
                raise Failed(answer["failed"])
            if answer:
                return answer

    def _last_words(self) -> str:
        status = self.process.wait()
        if status < 0:
            return f"ended by {signal.Signals(-status).name}" + (" (out of memory?)" if status == -9 else "")
        words = [line.strip() for line in self.errors.read_text(errors="replace").splitlines() if line.strip()]
        return words[-1][:300] if words else f"ended with status {status}"

    def end(self) -> None:
        """End it and what it has started, such as compilers: by closing its input, and by force if it lingers."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(OSError):
            self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=PARTING)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its own session: it and its children, nobody else
        self.process.wait()
        self.listener.join()
        self.process.stdout.close()


def _parsed(line: str) -> dict[str, Any]:
    """A line's JSON object; empty where it is none."""
    try:
        answer = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return answer if isinstance(answer, dict) else {}
