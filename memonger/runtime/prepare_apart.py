"""Planned files read and checked in a process that ends with it, so that who runs them doesn't keep what that takes.

Reading a planned file takes onnx, protobuf and most of memonger: some 15 MiB of modules that a server would keep for as
long as it lives, and beside a small model that is most of what it takes. So where this process hasn't loaded onnx, a
child does all of it, and hands over what sessions are made from (`memonger.runtime.prepared`). Meanwhile this process
imports onnxruntime, and the child needs none of its own to try onnx's checker in, so that this takes no longer. Who has
loaded onnx already would gain nothing, a plan for ranges of sizes needs it when it runs, and a GPU would be set up in
both: then, and where no child can be started, this process does it itself, by the same function.

What is handed over is pickled: both ends are this package, and the pipe is theirs alone. First comes the record, then,
each when the one before has been read, what each session is made of, with its message apart, which is large and let go
of as soon as the session is made.
"""

import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from memonger import words
from memonger.devices import parse_device
from memonger.errors import MemongerError, PlanError, RuntimeUnavailableError, SessionError
from memonger.ir.fields import plan_in
from memonger.runtime.onnxruntime import onnxruntime
from memonger.runtime.prepared import Message, SessionGroup, SessionRequest

if TYPE_CHECKING:
    import subprocess

    from memonger.plan import Plan

Source: TypeAlias = "Plan | str | Path | Sequence[Plan | str | Path]"

SESSION = "memonger.runtime.prepare:prepare_session"

_READY = b"memonger prepares\n"
"""What the child says first: anything else is no Python with this package in it."""

_CHILD = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from memonger.runtime.prepare_apart import serve; serve()"
)


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error of the child's, to be raised here."""

    kind: type[BaseException]
    arguments: tuple[Any, ...]
    state: dict[str, Any]
    where: str

    @staticmethod
    def of(error: BaseException) -> "_Failure":
        import traceback

        if isinstance(error, MemongerError):
            return _Failure(type(error), error.args, dict(error.__dict__), "")
        arguments = tuple(one for one in error.args if isinstance(one, str | int))
        return _Failure(type(error), arguments, {}, "".join(traceback.format_exception(error)))

    def error(self) -> BaseException:
        """The same again."""
        made = self.kind.__new__(self.kind, *self.arguments)
        made.__dict__.update(self.state)
        if self.where:
            made.__cause__ = RuntimeError(f"in the process that prepares plans:\n{self.where}")
        return made


def prepared_for(
    source: Source, wanted: SessionRequest, by: str = SESSION, preparer: "Preparer | None" = None, *, apart: bool = True
) -> tuple[Any, Iterator[Any]]:
    """What planned files are loaded from: what ``by`` returns of their plans, here or elsewhere.

    Args:
        source: Plans, or paths of planned files.
        wanted: What is asked for.
        by: Module and name of a function like `memonger.runtime.prepare.prepare_session`: of plans and ``wanted`` it
            makes a record, and more of them, each when it is asked for; those are handed over in this order.
        preparer: A process for several, which is taken where it can be; None: one for these alone.
        apart: Whether a process of its own is worth its half second.

    Raises:
        SessionError: as that; the child died.
        PlanFileError, VerificationError, RuntimeUnavailableError: as that.
    """
    paths = None if "onnx" in sys.modules or not apart else _paths(source, wanted)
    child = None if paths is None else _Child.start() if preparer is None else preparer.child()
    if child is not None and paths is not None and child.ask(paths, wanted, by):
        with suppress(RuntimeUnavailableError):
            onnxruntime()  # meanwhile
        first = child.first()
        if first is not None:
            return first, child.rest(ends=preparer is None)
    from memonger.runtime.prepare import plans_of

    return _function(by)(plans_of(source, wanted.check_weights), wanted)


class Preparer:
    """One process for plans that are prepared one after the other; it ends with the ``with`` block."""

    def __init__(self) -> None:
        self._child: _Child | None = None

    def __enter__(self) -> "Preparer":
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.end()

    def child(self) -> "_Child | None":
        """The process, another one where it is gone or has more to say than anybody asked for; None: none starts."""
        if self._child is None or not self._child.is_idle:
            if self._child is not None:
                self._child.end()
            self._child = _Child.start()
        return self._child


def _paths(source: Source, wanted: SessionRequest) -> list[str | Path] | None:
    """The planned files, where a child can prepare them; else None."""
    given = [source] if isinstance(source, str | Path) else source
    if not isinstance(given, Sequence) or not all(isinstance(one, str | Path) for one in given):
        return None
    paths = [one if isinstance(one, Path) else str(one) for one in given]
    plans = [plan_in(path) or {} for path in paths]
    if any(plan.get("ranges") for plan in plans):
        return None  # shapes are computed as they come, by rules that take onnx
    with suppress(PlanError):  # what is no device is said where it is used
        device = parse_device(wanted.device or next((one.get("device") for one in plans), None) or "cpu")
        if not device.is_host:
            return None  # what checks it would set it up in the child as well
    return paths


def _function(name: str) -> Callable[..., tuple[Any, Iterator[Any]]]:
    from pkgutil import resolve_name  # here: who loads planned files calls none of these itself

    found: Callable[..., tuple[Any, Iterator[Any]]] = resolve_name(name)
    return found


class _Child:
    """The parent's end of a process that prepares plans.

    Attributes:
        is_idle: Whether it may be asked: it lives, and has handed over all that it was asked for before.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process, self._paths, self.is_idle = process, list[str | Path](), True
        assert process.stdout is not None
        self._pipe = process.stdout

    @staticmethod
    def start() -> "_Child | None":
        """A child; None where none can be started."""
        if "py" not in Path(sys.executable or "").name.lower() or getattr(sys, "frozen", False):
            return None  # a program with Python inside takes no ``-c``
        import subprocess

        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError:
            return None
        child = _Child(process)
        return child if child._told(sys.path) else None

    def ask(self, paths: list[str | Path], wanted: SessionRequest, by: str) -> bool:
        """Have it prepare planned files; returns whether it could be told."""
        self._paths, self.is_idle = paths, False
        self._records = pickle.Unpickler(_exactly(self._pipe))
        return self._told((paths, wanted, by, words.manner()))

    def _told(self, what: object) -> bool:
        assert self._process.stdin is not None
        try:
            pickle.dump(what, self._process.stdin)
            self._process.stdin.flush()
        except (OSError, pickle.PicklingError, TypeError, AttributeError):  # of what was given: said where it is used
            self.end()
            return False
        return True

    def first(self) -> Any:
        """The first record; None where the child is none of ours.

        Raises:
            MemongerError: what the child found wrong; it died.
        """
        found = self._next() if self._pipe.readline() == _READY else None
        if found is None:
            self.end()
        return found

    def rest(self, *, ends: bool) -> Iterator[Any]:
        """The other records, and whether the child ends behind them. Raises as `first`."""
        while (record := self._next()) is not None:
            if isinstance(record, SessionGroup):
                record = replace(record, model=self._loaded(pickle.Unpickler(_exactly(self._pipe))))
            yield record
            del record  # of a session it has the model
        self.is_idle = not ends
        if ends:  # all sessions are made: what it had in temporary files for them may go
            self._close()
            self._process.wait()

    def _next(self) -> Any:
        record = self._loaded(self._records)
        if isinstance(record, _Failure):
            self.end()
            raise record.error()
        return record

    def _loaded(self, unpickler: pickle.Unpickler) -> Any:
        try:
            return unpickler.load()
        except (EOFError, pickle.UnpicklingError):
            raise SessionError(self._death()) from None
        except BaseException:
            self.end()
            raise

    def _death(self) -> str:
        """What to say of a child that ended before it was done."""
        self._close()
        names, status = ", ".join(map(str, self._paths)), self._process.wait()
        how, why = f"ended with status {status}", ""
        if status < 0:
            import signal

            how = f"was ended by {signal.Signals(-status).name}"
            why = " Memory may have run out." if status == -signal.SIGKILL else " Is the file sound?"
        return (
            f"{names}: the process that reads and checks planned files {how}.{why} It takes some 70 MiB and what the "
            "file has; where `import onnx` comes before the session, this process does that itself."
        )

    def end(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._close()
        self._process.wait()

    def _close(self) -> None:
        for stream in (self._process.stdin, self._pipe):
            with suppress(OSError):  # what was not sent yet
                if stream is not None:
                    stream.close()

    def __del__(self) -> None:
        """Whoever lost interest, as where a session can't be made, ends it as well."""
        if self._process.returncode is None:
            self.end()


def _exactly(pipe: IO[bytes]) -> Any:
    """The same without ``peek``: pickles that are read by turns mustn't be read ahead."""
    return SimpleNamespace(read=pipe.read, readline=pipe.readline)


def serve() -> None:
    """The child: prepare what the standard input says, and hand it over by the standard output, until that ends."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print isn't for the parent
    while True:
        try:  # by then the parent has made its sessions, which may read temporary files of the plans before
            paths, wanted, by, manner = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pipe.write(_READY)
        pipe.flush()
        records = pickle.Pickler(pipe, pickle.HIGHEST_PROTOCOL)
        try:
            with words.speaking(manner):
                from memonger.ir import onnx_process
                from memonger.runtime.prepare import plans_of

                onnx_process.IS_EXPENDABLE = True
                plans = plans_of(paths, wanted.check_weights)  # kept until the next, with files that weights are in
                first, rest = _function(by)(plans, wanted)
                records.dump(first)
                pipe.flush()
                for record in rest:
                    if isinstance(record, SessionGroup):
                        records.dump(replace(record, model=_NO_MESSAGE))
                        pickle.dump(record.model, pipe, pickle.HIGHEST_PROTOCOL)
                    else:
                        records.dump(record)
                    pipe.flush()
                records.dump(None)
        except BrokenPipeError:
            pass
        except BaseException as error:
            records.dump(_Failure.of(error))
        with suppress(BrokenPipeError):
            pipe.flush()


_NO_MESSAGE = Message(b"")
