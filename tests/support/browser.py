"""Chromium without a window, spoken to over a pipe in its DevTools protocol: a page with a mouse and a keyboard."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

needs_browser = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed")

_KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


_START = """
import os, sys
hear, speak = os.dup(int(sys.argv[1])), os.dup(int(sys.argv[2]))
os.dup2(hear, 100), os.dup2(speak, 101), os.dup2(100, 3), os.dup2(101, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""The browser hears commands at descriptor 3 and answers at 4."""


class Page:
    """A page in the browser."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._rest, self._number = write, read, b"", 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.errors: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command, with its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            received = os.read(self._read, 1 << 20)
            assert received, "the browser has ended"
            self._rest += received
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(event["params"]["exceptionDetails"]))
        if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.errors.append(event["params"]["entry"]["text"])
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(event["params"]["request"]["url"])

    def open(self, path: Path, width: int = 1200, height: int = 900) -> None:
        """Open a report and wait until it is drawn."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=path.resolve().as_uri())
        until = time.monotonic() + 20
        while self.run("document.documentElement?.dataset.ready && location.href") != path.resolve().as_uri():
            assert time.monotonic() < until, self.text("body")
            time.sleep(0.02)

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def text(self, selector: str) -> str:
        """What stands in an element."""
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def key(self, key: str) -> None:
        """Press a key."""
        text = {} if key in _KEYS else {"text": key}
        code = _KEYS.get(key, ord(key[0].upper()))
        for kind in ("keyDown", "keyUp"):
            extra = text if kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **extra)

    def mouse(self, kind: str, x: float, y: float, **others: Any) -> None:
        """Move, press, release or turn the wheel."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **others)

    def click(self, x: float, y: float) -> None:
        """A click with the left button."""
        self.mouse("mousePressed", x, y, button="left", clickCount=1)
        self.mouse("mouseReleased", x, y, button="left", clickCount=1)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Take a picture of what is in sight, or of the whole page."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A browser with an empty page; it keeps what it writes in the folder, and ends with the block."""
    assert PROGRAM is not None
    (in_read, in_write), (out_read, out_write) = os.pipe(), os.pipe()
    command = [
        sys.executable, "-c", _START, str(in_read), str(out_write), PROGRAM, "--headless", "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-pipe", "--no-first-run", f"--user-data-dir={folder / 'profile'}",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, pass_fds=(in_read, out_write), stderr=subprocess.DEVNULL, start_new_session=True
    )
    os.close(in_read)
    os.close(out_write)
    try:
        yield Page(in_write, out_read)
    finally:
        os.close(in_write)  # it ends when nobody is there to speak to
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(out_read)
