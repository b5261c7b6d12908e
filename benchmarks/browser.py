"""A page in headless Chromium: opened, waited for, asked, photographed.

By the browser's DevTools protocol over a pipe, which needs no package: messages of JSON, each with a zero byte behind.
"""

import base64
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def found() -> str | None:
    """The path of a Chromium, None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of requests."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine; gives the address, without a slash at its end."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


class Page:
    """A page that is open.

    Args:
        asks: File descriptor that takes messages.
        answers: What gives them.
        address: What to open.
    """

    def __init__(self, asks: int, answers: BinaryIO, address: str) -> None:
        self._asks, self._answers, self._number, self._session = asks, answers, 0, None
        target = self._call("Target.createTarget", url=address)["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(
            self._asks, json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode() + b"\0"
        )
        while True:
            text = bytearray()
            while (byte := self._answers.read(1)) != b"\0":
                if not byte:
                    raise RuntimeError("the browser has ended")
                text += byte
            answer = json.loads(text)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return dict(answer["result"])

    def evaluate(self, script: str) -> Any:
        """What an expression gives, as JSON has it."""
        return self._call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def wait(self, condition: str, seconds: float) -> None:
        """Wait until an expression is true.

        Raises:
            TimeoutError: it isn't after so many seconds.
        """
        end = time.monotonic() + seconds
        while not self.evaluate(condition):
            if time.monotonic() > end:
                raise TimeoutError(
                    f"{condition} isn't so after {seconds} seconds: {self.evaluate('document.body.innerText')}"
                )
            time.sleep(0.1)

    def photograph(self, path: Path) -> None:
        """Write a picture of it, a PNG."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))


@contextmanager
def opened(address: str) -> Iterator[Page]:
    """Open a page."""
    browser = found()
    assert browser is not None
    asks, answers = os.pipe(), os.pipe()
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:  # the browser may still write there
        flags = [
            "--headless=new",
            "--window-size=1100,900",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
        ]
        command = f'exec "$@" 3<&{asks[0]} 4>&{answers[1]}'
        process = subprocess.Popen(
            ["bash", "-c", command, "bash", browser, *flags], pass_fds=(asks[0], answers[1]),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(asks[0])
        os.close(answers[1])
        try:
            with os.fdopen(answers[0], "rb") as reader:
                yield Page(asks[1], reader, address)
        finally:
            os.close(asks[1])
            process.terminate()
            process.wait()
