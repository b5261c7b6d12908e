"""Execution contexts: arenas that loaded models run in, one run at a time, given back to the system in idle times."""

import threading
import time
import weakref
from collections.abc import Mapping
from itertools import chain
from typing import Any, Protocol

from memonger.devices import Device
from memonger.errors import SessionError
from memonger.runtime import feeds as feeding
from memonger.runtime.backend import backend
from memonger.runtime.executable import Executable
from memonger.runtime.loaded_model import LoadedModel


class ExecutionContext:
    """An arena and the models bound in it: one run at a time.

    Args:
        device: Where.
        size: Bytes of the arena; it is replaced by a larger one when a model needs that.

    Attributes:
        arena: The arena.
        touched: Bytes of it that runs may have touched since it was last given back.

    Raises:
        SessionError: there isn't as much memory.
    """

    def __init__(self, device: Device, size: int) -> None:
        self.touched = 0
        self.arena = backend(device).arena(size)
        self._bound: dict[LoadedModel, list[Executable]] = {}
        self._lock = threading.Lock()
        self._is_released = False

    def _bindings(self, model: LoadedModel) -> list[Executable]:
        if self._is_released:
            self.arena.take_again()
            max([model, *tuple(self._bound)], key=lambda one: one.workspace_bytes).reserve()
            self._is_released = False
        if model.arena_bytes > self.arena.size:
            self.arena = backend(self.arena.device).arena(model.arena_bytes)
            self._bound.clear()
        if model not in self._bound:
            self._bound[model] = model.bind(self.arena)
        return self._bound[model]

    def run(
        self, model: LoadedModel, inputs: feeding.Feeds, outputs: Mapping[str, Any] | None = None, copy: bool = True
    ) -> dict[str, Any]:
        """Run a model here; see `memonger.Session.run`."""
        if not outputs:
            with self._lock:
                for executable in () if self._is_released or model.is_closed else self._bound.get(model, ()):
                    found = executable.run_fast(inputs, copy)
                    if found is not None:
                        return found
        call = model.checked(inputs, outputs)
        with model.alone(call), self._lock:
            model.check_open()  # it may have been closed since the call was checked
            self.touched = max(self.touched, model.arena_bytes)
            return model.run(call, self._bindings(model), copy)

    def bind(self, model: LoadedModel) -> None:
        """Bind a model before its first run."""
        with self._lock:
            self._bindings(model)

    def forget(self, model: LoadedModel) -> None:
        """Drop what was bound of a model that doesn't run any more, whatever runs here meanwhile."""
        self._bound.pop(model, None)

    def release(self) -> None:
        """Give the arena's memory back to the system, once no run is under way; the next run takes it again."""
        with self._lock:
            if not self._is_released:
                for executable in chain.from_iterable(tuple(self._bound.values())):
                    executable.forget_results()
                self.arena.discard()
                self._is_released, self.touched = True, 0
                if not self.arena.device.is_host:
                    self._bound.clear()  # it will lie elsewhere


class Releasing(Protocol):
    """What has memory to give back."""

    def release(self) -> None: ...


class IdleRelease:
    """A thread that calls ``owner.release()`` when nothing has run for a while. It ends with the owner.

    A run is a ``with`` block of it.

    Args:
        owner: Isn't kept alive.
        seconds: How long nothing has to run; None: there is no such thread.

    Raises:
        SessionError: the time isn't above 0.
    """

    def __init__(self, owner: Releasing, seconds: float | None) -> None:
        self._ended, self._is_watching = threading.Event(), seconds is not None
        if seconds is None:
            return
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds < threading.TIMEOUT_MAX:
            raise SessionError(f"idle_release={seconds!r} must be seconds above 0, or None for never.")
        self._touch()
        known = weakref.ref(owner, lambda _: self._ended.set())
        threading.Thread(target=self._watch, args=(known, seconds), name="memonger idle release", daemon=True).start()

    def __enter__(self) -> None:
        """A run begins."""
        if self._is_watching:
            self._touch()

    def __exit__(self, *_: object) -> None:
        if self._is_watching:
            self._touch()

    def _touch(self) -> None:
        self._used_at, self._is_used = time.monotonic(), True

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()

    def _watch(self, known: "weakref.ref[Releasing]", seconds: float) -> None:
        pause = seconds
        while not self._ended.wait(pause):
            idle = time.monotonic() - self._used_at
            pause = seconds - idle if idle < seconds else seconds
            owner = known()
            if owner is not None and idle >= seconds and self._is_used:
                self._is_used = False
                owner.release()
            del owner
