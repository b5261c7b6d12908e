"""A fleet's threads in every order in which they can take turns: nobody waits for ever, and the limit is held."""

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import memonger
from memonger.devices import CPU
from memonger.runtime import execution_context
from memonger.runtime.prepared import PlanBytes, Prepared
from memonger.serving import fleet as fleets
from memonger.serving.fleet_memory import Need, PlansOfModel
from tests.support.interleavings import DeadlockError, Stepped, explore

WEIGHTS, ARENAS = {"a": 100, "b": 100, "c": 60, "d": 60}, {"a": 8, "b": 4, "c": 4, "d": 4}
"""Bytes of each model."""

NOTHING: Any = (CPU, 0, (), (), PlanBytes(0, 0, 0, 0), None, None, {}, {}, False)
"""Of what is prepared all but the name."""


class _Loaded:
    """Stands in for a loaded model: counts what is there, and sees that nobody runs what is gone."""

    def __init__(self, prepared: Prepared, *_: object, **__: object) -> None:
        self.key = prepared.name
        self.arena_bytes, self.workspace_bytes, self.engines = ARENAS[self.key], 0, ()
        self.is_closed = False
        self.alive.append(self)

    alive: list["_Loaded"] = []  # noqa: RUF012

    def bind(self, _: object) -> list[object]:
        return []

    def reserve(self) -> None:
        self.check_open()

    def check_open(self) -> None:
        assert not self.is_closed

    def checked(self, *_: object) -> None:
        self.check_open()

    def alone(self, _: object) -> Any:
        return nullcontext()

    def run(self, *_: object) -> str:
        self.check_open()
        return f"{self.key} ran"

    def close(self) -> None:
        self.check_open()
        self.is_closed = True
        self.alive.remove(self)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Callable[..., memonger.Fleet]:
    """Makes fleets whose locks are stepped, and whose models take next to nothing."""
    broken: set[str] = set()

    def read(given: str | list[Path], *_: object, **__: object) -> tuple[PlansOfModel, Any]:
        source = given if isinstance(given, str) else given[0].name
        if source in broken:
            raise memonger.SessionError(f"{source} is broken")
        need = Need(WEIGHTS[source], 0, ARENAS[source], 0)
        return PlansOfModel(source, need, ("x",), {"y": None}), iter([Prepared(source, *NOTHING)])

    def submit(run: Callable[..., Any], *arguments: Any) -> Any:
        result = run(*arguments)  # in the stepped thread itself: it does nothing but wait meanwhile
        return SimpleNamespace(result=lambda: result)

    nothing = SimpleNamespace(shrink_host_memory=lambda: None, settle=lambda: None, give_back=lambda: None)
    for name, stand_in in {
        "prepared_for": read, "LoadedModel": _Loaded,
        "ort": nothing, "process_memory": nothing, "_is_checked": lambda _: True, "wait": lambda _: None,
        "_loader": lambda: SimpleNamespace(submit=submit),
    }.items():  # fmt: skip
        monkeypatch.setattr(fleets, name, stand_in)

    def make(steps: Stepped, *names: str, breaks: str = "", **options: Any) -> memonger.Fleet:
        monkeypatch.setattr(fleets, "threading", steps)
        monkeypatch.setattr(execution_context, "threading", steps)
        _Loaded.alive.clear()
        broken.clear()
        fleet = memonger.Fleet(**options)
        for name in names:
            fleet.add(name, name)
        broken.update(breaks)
        return fleet

    return make


def _describe(program: SimpleNamespace) -> Hashable:
    fleet = program.fleet
    order = sorted(one.used for one in fleet._present)
    return (
        tuple(fleet._members), fleet._is_closed, fleet._served,
        tuple((m.plans.key, m.model is None, m.is_loading, m.users, order.index(m.used)) for m in fleet._present),
        tuple((turn.names, turn.overtaken, turn.settled and turn.settled.number) for turn in fleet._queue),
        tuple(model.key for model in fleet._leaving), tuple(model.key for model in _Loaded.alive),
        tuple(fleet._places.index(one) for one in fleet._free),
        tuple((one.touched, one._is_released, tuple(m.key for m in one._bound)) for one in fleet._places),
    )  # fmt: skip


def _explore(
    make: Callable[[Stepped], memonger.Fleet], works: list[Callable[[memonger.Fleet], Any]], allowed: set[str]
) -> tuple[int, int]:
    """Explore threads over a fleet; each ends with one of some results."""

    def begin(steps: Stepped) -> SimpleNamespace:
        fleet = make(steps)

        def check() -> None:
            if fleet._limit is not None:
                weights = sum(WEIGHTS[model.key] for model in _Loaded.alive)
                assert weights + sum(place.touched for place in fleet._places) <= fleet._limit

        def done(threads: Any) -> None:
            said = [str(one.error or one.result) for one in threads]
            assert all(any(one.startswith(text) for text in allowed) for one in said), said
            assert (fleet._queue, fleet._served, len(fleet._free)) == ([], 0, fleet._count)
            assert not any(one.users for one in fleet._present)
            assert {one.plans.key for one in fleet._present} == {model.key for model in (*_Loaded.alive,)}

        return SimpleNamespace(fleet=fleet, check=check, done=done, works=[lambda w=work: w(fleet) for work in works])

    stepped = ("serving/fleet.py", "runtime/execution_context.py", "test_fleet_interleavings.py")
    return explore(begin, _describe, stepped)


def _runs(*names: str) -> Callable[[memonger.Fleet], str]:
    def work(fleet: memonger.Fleet) -> str:
        for name in names:
            said = fleet[name].run({})
        return str(said)

    return work


def _together(*names: str) -> Callable[[memonger.Fleet], str]:
    """As a pipeline runs."""

    def work(fleet: memonger.Fleet) -> str:
        with fleet._running(names) as (place, models):
            return [str(place.run(model, {})) for model in models][-1]

    return work


RAN = {"a ran", "b ran", "c ran", "d ran"}


@pytest.mark.parametrize(
    ("arenas", "works"),
    [
        (1, [_runs("a", "b"), _runs("b", "a")]),
        (2, [_runs("a", "b"), _runs("b", "a")]),
        (1, [_runs("a"), _runs("b"), _runs("a")]),
        (2, [_runs("a"), _runs("c"), _runs("d")]),
        (2, [_together("c", "d"), _together("d", "c")]),
        (2, [_together("c", "d"), _runs("a")]),
    ],
)
def test_models_that_take_turns_all_run_and_the_limit_is_held(stand_ins: Any, works: Any, arenas: int) -> None:
    def make(steps: Stepped) -> memonger.Fleet:
        return stand_ins(steps, "a", "b", "c", "d", limit=120 + 8 * arenas, arenas=arenas)  # type: ignore[no-any-return]

    states, _ = _explore(make, works, RAN)
    assert states > 50


@pytest.mark.parametrize("other", ["remove", "close", "release", "add", "broken"])
def test_what_else_threads_do_meanwhile(stand_ins: Any, other: str) -> None:
    """A model that is run is taken out, added or can't be loaded again; the fleet is closed, or gives memory back."""

    def work(fleet: memonger.Fleet) -> str:
        if other == "remove":
            fleet.remove("b")
        elif other == "close":
            fleet.close()
        elif other == "release":
            fleet.release()
        elif other == "add":
            fleet.add("d", "d")
        return "a ran"

    def make(steps: Stepped) -> memonger.Fleet:
        breaks = "b" if other == "broken" else ""
        return stand_ins(steps, "b", "a", breaks=breaks, limit=128, arenas=1)  # type: ignore[no-any-return]

    said = {
        "remove": {"the fleet has no model 'b'"}, "close": {"the fleet is closed"}, "broken": {"b is broken"}
    }  # fmt: skip
    _explore(make, [_runs("b"), _runs("b") if other == "broken" else _runs("a"), work], RAN | said.get(other, set()))


@pytest.mark.parametrize("arenas", [1, 2])
def test_nobody_is_turned_away_while_an_arena_and_room_are_free(stand_ins: Any, arenas: int) -> None:
    """A wait may end at any moment: even then the run is served if it can be."""
    limit = 120 + 8 * arenas

    def make(steps: Stepped) -> memonger.Fleet:
        fleet: Any = stand_ins(steps, "a", "b", "c", "d", limit=limit, arenas=arenas, wait=1)
        say = fleet._why_busy

        def why_busy(turn: Any) -> str:
            needed = {one.plans.key for one in fleet._present if one.users} | set(turn.names)
            largest = max(ARENAS[key] for key in needed)
            busy = [max(largest, one.touched) for one in fleet._places if one not in fleet._free]
            arena_bytes = largest * len(fleet._free) + sum(busy)
            assert not fleet._free or sum(WEIGHTS[key] for key in needed) + arena_bytes > limit
            return str(say(turn))

        fleet._why_busy = why_busy
        return fleet  # type: ignore[no-any-return]

    works = [_runs("a"), _runs("c", "d")] if arenas == 1 else [_runs("a", "c"), _runs("c", "d")]
    _explore(make, works, RAN | {"no arena was free within 1 s", "there was no room for"})


def test_an_order_that_deadlocks_is_found() -> None:
    """Two locks that are taken in opposite orders; the checker itself is checked."""

    def begin(steps: Stepped) -> SimpleNamespace:
        one, other = steps.Lock(), steps.Lock()

        def work(first: Any, second: Any) -> None:
            with first, second:
                pass

        works = [lambda: work(one, other), lambda: work(other, one)]
        return SimpleNamespace(works=works, check=lambda: None, done=lambda _: None)

    with pytest.raises(DeadlockError, match=r"thread 0 for lock 1, thread 1 for lock 0"):
        explore(begin, lambda _: (), ("test_fleet_interleavings.py",))
