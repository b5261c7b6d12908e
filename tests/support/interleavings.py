"""All orders in which threads can take turns: locks that a scheduler hands out by hand, and every choice it has.

The threads are real, but one runs at a time: until it wants a lock, or waits on a condition. Then the scheduler says
who goes on. `explore` runs a program again and again, each time with other choices, until every state that was seen has
been left by every way there is. A state is what locks, conditions and threads are at, and what ``describe`` says of the
program's own data; the same state isn't explored twice.
"""

import sys
import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from types import FrameType, SimpleNamespace
from typing import Any

MOST_STEPS = 400


def _taken() -> threading.Lock:
    """A lock that someone else will let go: who takes it waits for that."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class DeadlockError(AssertionError):
    """No thread can go on, and not all have ended."""


class _AbandonedError(BaseException):
    """Ends the threads of a run whose state was seen before."""


@dataclass(eq=False)
class _Thread:
    """A thread that is stepped."""

    number: int
    work: Callable[[], Any]
    go: threading.Lock = field(default_factory=_taken)
    can_go: Callable[[], bool] = lambda: True
    waits_for: str = "its start"
    result: Any = None
    error: BaseException | None = None
    has_ended: bool = False
    thread: Any = None


class Stepped:
    """One run: stands in for the module ``threading`` where code under test takes it from."""

    TIMEOUT_MAX, Event, Thread = threading.TIMEOUT_MAX, threading.Event, threading.Thread

    def __init__(self) -> None:
        self._back, self._is_abandoned = _taken(), False
        self._threads: dict[int, _Thread] = {}
        self.locks: list[_Lock] = []
        self.conditions: list[_Condition] = []

    def Lock(self) -> "_Lock":  # noqa: N802
        return _Lock(self, again=False)

    def RLock(self) -> "_Lock":  # noqa: N802
        return _Lock(self, again=True)

    def Condition(self, lock: "_Lock | None" = None) -> "_Condition":  # noqa: N802
        return _Condition(self, lock if lock is not None else self.RLock())

    def me(self) -> _Thread | None:
        """The stepped thread that calls; None for the scheduler's own."""
        return self._threads.get(threading.get_ident())

    def park(self, can_go: Callable[[], bool], waits_for: str) -> None:
        """Let the scheduler choose who goes on."""
        me = self.me()
        assert me is not None
        if self._is_abandoned:
            raise _AbandonedError
        me.can_go, me.waits_for = can_go, waits_for
        self._back.release()
        me.go.acquire()
        if self._is_abandoned:
            raise _AbandonedError

    def start(self, works: Iterable[Callable[[], Any]]) -> list[_Thread]:
        """Threads that are about to begin."""
        threads = [_Thread(number, work) for number, work in enumerate(works)]
        for one in threads:
            one.thread = threading.Thread(target=self._run, args=(one,), daemon=True)
            one.thread.start()
            self._back.acquire()
        return threads

    def _run(self, one: _Thread) -> None:
        self._threads[threading.get_ident()] = one
        try:
            self.park(lambda: True, "its start")
            one.result = one.work()
        except Exception as error:
            one.error = error
        except _AbandonedError:
            pass
        one.has_ended = True
        self._back.release()

    def step(self, one: _Thread) -> None:
        """Let a thread go on to where it next wants something."""
        one.go.release()
        self._back.acquire()

    def abandon(self, threads: Iterable[_Thread]) -> None:
        """End those that haven't ended."""
        self._is_abandoned = True
        for one in threads:
            if not one.has_ended:
                self.step(one)
            one.thread.join()

    def state(self) -> Hashable:
        """Who has which lock, and who waits on which condition."""
        owners = tuple(lock.owner.number if lock.owner is not None else None for lock in self.locks)
        waiting = tuple(tuple((who.number, told[0]) for who, told in one.waiting) for one in self.conditions)
        return owners, tuple(one for one in waiting if one)


class _Lock:
    """A lock, by the scheduler's leave."""

    def __init__(self, steps: Stepped, again: bool) -> None:
        self._steps, self._again, self.owner, self.count = steps, again, None, 0  # type: Stepped, bool, _Thread | None, int
        self.number = len(steps.locks)
        steps.locks.append(self)

    def acquire(self) -> bool:
        me = self._steps.me()
        if me is not None and not (self._again and self.owner is me):
            self._steps.park(lambda: self.owner is None, f"lock {self.number}")
        assert me is not None or self.owner is None
        self.owner, self.count = me, self.count + 1
        return True

    def release(self) -> None:
        self.count -= 1
        if not self.count:
            self.owner = None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Condition:
    """A condition; one who waits with a time limit may find it over whenever the lock is free."""

    def __init__(self, steps: Stepped, lock: _Lock) -> None:
        self._steps, self._lock = steps, lock
        self.waiting: list[tuple[_Thread, list[bool]]] = []
        self.number = len(steps.conditions)
        steps.conditions.append(self)

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        me, told, lock = self._steps.me(), [False], self._lock
        assert me is not None and lock.owner is me, "waits on a condition without its lock"  # noqa: PT018
        count, lock.count, lock.owner = lock.count, 0, None
        self.waiting.append((me, told))
        try:
            is_due = timeout is not None
            self._steps.park(lambda: (told[0] or is_due) and lock.owner is None, f"condition {self.number}")
        finally:
            self.waiting.remove((me, told))
            lock.count, lock.owner = count, me
        return told[0]

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        while not (found := predicate()) and self.wait(timeout):
            pass
        return found or predicate()

    def notify_all(self) -> None:
        assert self._lock.owner is self._steps.me(), "notifies without the lock"
        for _, told in self.waiting:
            told[0] = True


def explore(
    make: Callable[[Stepped], SimpleNamespace], describe: Callable[[SimpleNamespace], Hashable], files: Iterable[str]
) -> tuple[int, int]:
    """Run a program in every order.

    Args:
        make: Builds it: an object with ``works``, what each thread does; ``check()``, called at every step; and
            ``done(threads)``, called when all have ended.
        describe: What its data is at, without what doesn't matter for what comes.
        files: Ends of the names of the source files whose frames say where a thread is.

    Returns: how many states there are, and in how many runs they were seen.

    Raises:
        DeadlockError: no thread can go on; it says what each waits for.
    """
    names, seen, runs = tuple(files), set[Hashable](), 0
    todo: list[tuple[int, ...]] = [()]
    while todo:
        prefix = todo.pop()
        runs += 1
        steps = Stepped()
        program = make(steps)
        threads = steps.start(program.works)
        choices = list(prefix)
        try:
            for number in range(MOST_STEPS):
                alive = [one for one in threads if not one.has_ended]
                if not alive:
                    program.done(threads)
                    break
                able = [one.number for one in alive if one.can_go()]
                if not able:
                    waits = ", ".join(f"thread {one.number} for {one.waits_for}" for one in alive)
                    raise DeadlockError(f"after {choices} nobody can go on: {waits}")
                if number >= len(prefix):
                    where = tuple(None if one.has_ended else _position(one, names) for one in threads)
                    state = (steps.state(), where, describe(program))
                    if state in seen:
                        break
                    seen.add(state)
                    todo += [(*choices, other) for other in able[1:]]
                    choices.append(able[0])
                steps.step(threads[choices[number]])
                program.check()
            else:
                raise AssertionError(f"{choices} doesn't end")
        finally:
            steps.abandon(threads)
    return len(seen), runs


def _position(one: _Thread, names: tuple[str, ...]) -> Hashable:
    """Where a thread is, and what it has in hand."""
    frame: FrameType | None = sys._current_frames()[one.thread.ident]
    found = []
    while frame is not None:
        if frame.f_code.co_filename.endswith(names):
            held = tuple((name, _plain(value)) for name, value in frame.f_locals.items())
            found.append((frame.f_code.co_name, frame.f_lasti, held))
        frame = frame.f_back
    return one.waits_for, tuple(found)


def _plain(value: object) -> Hashable:
    """A value as something to compare."""
    match value:
        case None | bool() | int() | str():
            return value
        case tuple() | list():
            return tuple(map(_plain, value))
        case dict():
            return tuple((_plain(key), _plain(one)) for key, one in value.items())
    return getattr(value, "key", None) or type(value).__name__
