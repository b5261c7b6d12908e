"""Several planned models that share arenas, workspace and equal weights, within a limit of memory.

**Turns.** A run needs its models in memory and an arena; it gets all of it at once, or waits and holds nothing
(`_Turn`). So nobody holds what another waits for. Whoever gives something back serves those who wait: first those whose
models are loaded, as no model is to go while somebody waits for it; then the others. Among these the first one is the
first, and one that isn't served is overtaken a few times at most.

**Locks**, in the order in which they are taken; no thread takes one that stands before another that it holds:

1. ``_adding``: for the whole of an `Fleet.add`, so that one follows the other.
2. ``_loading``: while a model is loaded, after those that were let go have ended.
3. ``_changed`` (``_lock``): all that is counted here, for a few lines at a time. Threads wait on it, or on the
   condition of their turn, which has the same lock; they hold no other meanwhile, but for ``_adding``.
4. The lock of an arena that nobody runs in, to give its pages back.

A run itself holds the locks of its model and arena (`ExecutionContext.run`), and takes none of these.
"""

import dataclasses
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from memonger.devices import CPU
from memonger.errors import BusyError, SessionError
from memonger.runtime import feeds as feeding
from memonger.runtime import ort, process_memory
from memonger.runtime.execution_context import ExecutionContext, IdleRelease
from memonger.runtime.loaded_model import LoadedModel
from memonger.runtime.prepare_apart import Preparer, prepared_for
from memonger.runtime.prepared import Prepared, SessionGroup, SessionRequest, SharedWeights
from memonger.serving.figures import Figure, WaitingTimes, text_of
from memonger.serving.fleet_memory import FleetMemory, PlansOfModel, memory_of
from memonger.serving.pipeline import Pipeline, steps_of
from memonger.units import MOST_ARENAS, format_size, in_bytes, in_full, shown, whole
from memonger.words import quoted

if TYPE_CHECKING:
    from memonger.plan import Plan

Source: TypeAlias = "Plan | str | Path | Sequence[Plan | str | Path]"

_Records = Iterator[Prepared | SessionGroup]
"""What a model is loaded from, as `memonger.serving.fleet_plans.prepare_model` gives it."""

MOST_OVERTAKEN = 16
"""Runs that are served at most before an older one that waits for room."""


@cache
def _loader() -> ThreadPoolExecutor:
    """The thread that loads models; a process that forks from this one has its own."""
    return ThreadPoolExecutor(1, "memonger-load")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_loader.cache_clear)


@dataclass(slots=True, eq=False)
class _Member:
    """Plans under one or several names, loaded or not.

    Attributes:
        plans: What is known of them.
        source: Where they come from again: paths; None for plans that were given as objects.
        pad: As in `memonger.Session`.
        checked: Whether an earlier load was seen to run the planned order: what onnxruntime's profiler takes for that
            stays with the process.
        model: Loaded; None where it was let go.
        is_loading: Whether a thread is loading it.
        users: Turns that have it, and so keep it.
        used: Number of the last run.
        runs: How many there were.
        loads: How often it was loaded.
    """

    plans: PlansOfModel
    source: "Source | None"
    pad: bool
    checked: bool = False
    model: LoadedModel | None = None
    is_loading: bool = False
    users: int = 0
    used: int = 0
    runs: int = 0
    loads: int = 0


@dataclass(slots=True, eq=False)
class _Turn:
    """Models that stay in memory for a while, for a run an arena as well: had at once, or not at all.

    Attributes:
        names: Of the models.
        settled: Notified when the turn is served or refused; None as long as nobody waits.
        added: What the only name will stand for; None for models that are there.
        pipeline: One whose memory is taken with this turn, for good.
        is_run: Whether an arena is needed.
        members: Those that the turn has, by name; empty while it waits.
        place: The arena that it has.
        refusal: Why it can't be served, ever.
        overtaken: How many were served before it that came later.
    """

    names: tuple[str, ...]
    added: _Member | None = None
    pipeline: Pipeline | None = None
    is_run: bool = False
    settled: threading.Condition | None = None
    members: dict[str, _Member] = field(default_factory=dict)
    place: ExecutionContext | None = None
    refusal: SessionError | None = None
    overtaken: int = 0

    @property
    def waits(self) -> bool:
        return not self.members and self.refusal is None


class FleetModel:
    """A model of a fleet, by its name."""

    def __init__(self, fleet: "Fleet", name: str) -> None:
        self._fleet, self.name = fleet, name

    def __repr__(self) -> str:
        """As ``<FleetModel detector>``."""
        return shown(f"<FleetModel {self.name}>")

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the model's inputs."""
        return self._fleet._member(self.name).plans.inputs

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the model's outputs, each once."""
        return tuple(self._fleet._member(self.name).plans.outputs)

    def run(self, inputs: feeding.Feeds, outputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Run the model once; threads may call it at the same time.

        Args:
            inputs: As `memonger.Session.run` takes them.
            outputs: Arrays of yours that outputs are written to, by name.

        Returns: the outputs by name, in memory of their own.

        Raises:
            BusyError: no arena, or no room for the model, was free in time.
            SessionError: as `memonger.Session.run`; the fleet is closed, or has no such model any more; it was let go,
                and its file has changed or its memory isn't there again.
        """
        with self._fleet._running((self.name,)) as (place, (model,)):
            return place.run(model, inputs, outputs)


class Fleet:
    """Planned models that share one arena or several: as large as the largest model needs, not as all together.

    Workspace is shared likewise. Plans that are the same under several names are loaded once. Weights that are equal in
    different models are there once where no kernel packs them: lookup tables of embeddings, convolutions in blocks.
    Packed weights can't be shared: onnxruntime's Python interface has no way to.

    For the CPU. Threads may use a fleet at the same time: as many runs go on at once as there are arenas.

    Args:
        plans: Planned models by name: what `memonger.Session` takes, each.
        arenas: How many runs may go on at once.
        limit: Most bytes that `memory` may come to, such as ``512MiB``; None for no limit. A model that doesn't fit
            makes others go that were given as paths and aren't running, the least recently used ones first; they are
            loaded again when they are run. One that can't fit even so is refused.
        wait: Seconds that a run waits at most for an arena, and for room where others run; None: as long as it takes.
        intra_op_threads: Threads within a node; 0 is each plan's own setting.
        check_order: As in `memonger.Session`.
        check_weights: As in `memonger.Session`.
        idle_release: Seconds after the last run at which `release` is called; None: never.

    Raises:
        SessionError: as `memonger.Session`; the limit is too small, and by how much; an argument is wrong.
        PlanFileError, VerificationError, RuntimeUnavailableError: as `memonger.Session`.
    """

    def __init__(
        self,
        plans: Mapping[str, Source] | None = None,
        *,
        arenas: int = 1,
        limit: str | int | None = None,
        wait: float | None = None,
        intra_op_threads: int = 0,
        check_order: bool = True,
        check_weights: bool = True,
        idle_release: float | None = None,
    ) -> None:
        self._count = whole("arenas", arenas, 1, MOST_ARENAS, SessionError)
        if wait is not None and not (isinstance(wait, int | float) and 0 <= wait <= threading.TIMEOUT_MAX):
            raise SessionError(f"wait={wait!r} must be seconds from 0 on, or None for as long as it takes.")
        self._limit, self._wait = None if limit is None else in_bytes("limit", limit, SessionError), wait
        self._threads, self._check_order, self._check_weights = intra_op_threads, check_order, check_weights
        self._members: dict[str, _Member] = {}
        self._pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()
        self._weights, self._runs, self._is_closed = SharedWeights(), 0, False
        self.waiting = WaitingTimes()
        self._adding, self._loading, self._lock = threading.Lock(), threading.Lock(), threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queue: list[_Turn] = []
        self._served = 0  # turns that have what they need
        self._present: dict[_Member, None] = {}  # loaded, or about to be
        self._largest = 0  # bytes of the arena that one of these needs
        self._leaving: list[LoadedModel] = []  # let go, and not ended yet
        self._places = [ExecutionContext(CPU, 0) for _ in range(self._count)]
        self._free = list(self._places)
        self._idle = IdleRelease(self, idle_release)
        with Preparer() as preparer:
            for name, plan in (plans or {}).items():
                self._add(name, plan, False, preparer)

    def __repr__(self) -> str:
        """As ``<Fleet of 3 models: 120 MiB, 2 arenas>``."""
        arenas = f"{self._count} arena{'' if self._count == 1 else 's'}"
        models = f"{len(self)} model{'' if len(self) == 1 else 's'}"
        return f"<Fleet of {models}: {format_size(self.memory().total)}, {arenas}>"

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._members))

    def __contains__(self, name: object) -> bool:
        return name in self._members

    def __getitem__(self, name: str) -> FleetModel:
        """A model, to be run.

        Raises:
            SessionError: there is none of this name; those that are there are named.
        """
        self._member(name)
        return FleetModel(self, name)

    def __enter__(self) -> Self:
        """The fleet itself; the end of the ``with`` block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, name: str, plan: Source, *, pad: bool = False) -> FleetModel:
        """Add a model, while others run.

        Args:
            name: Not used yet.
            plan: What `memonger.Session` takes. Only models given as paths can be let go for others.
            pad: As in `memonger.Session`.

        Raises:
            SessionError: the name is in use; there isn't room within the limit; as `memonger.Session`.
            PlanFileError, VerificationError, RuntimeUnavailableError: as `memonger.Session`.
        """
        return self._add(name, plan, pad, None)

    def _add(self, name: str, plan: Source, pad: bool, preparer: Preparer | None) -> FleetModel:
        if not isinstance(name, str) or not name:
            raise SessionError(f"a model of a fleet needs a name, not {name!r}.")
        with self._adding:
            self._check_open()
            if name in self._members:
                raise SessionError(f"the fleet has a model '{name}' already: take another name, or remove it first.")
            found, records = self._read(plan, pad, self._check_order, preparer)
            given = [plan] if isinstance(plan, str | Path) or not isinstance(plan, Sequence) else plan
            paths = [Path(one).absolute() for one in given if isinstance(one, str | Path)]
            again = paths if len(paths) == len(given) else None
            new = _Member(found, again, pad)
            with self._changed:
                member = next((one for one in self._members.values() if one.plans.key == found.key), new)
            with self._turn((name,), added=member) as turn:
                self._load(turn, records)
                with self._changed:
                    self._check_open()
                    self._members[name] = member
        return FleetModel(self, name)

    def _read(
        self, plan: Source, pad: bool, check_order: bool, preparer: Preparer | None = None, *, apart: bool = True
    ) -> tuple[PlansOfModel, _Records]:  # fmt: skip
        """What a model needs, and what it is loaded from."""
        wanted = SessionRequest(None, self._check_weights, check_order, None, has_arenas=False, pads=pad)
        return prepared_for(plan, wanted, "memonger.serving.fleet_plans:prepare_model", preparer, apart=apart)

    def remove(self, name: str) -> None:
        """Take a model out, once its runs are over; its memory is given back.

        Raises:
            SessionError: there is none of this name.
        """
        with self._changed:
            member = self._member(name)
            del self._members[name]
            self._serve()  # those who wait for it are told
            self._changed.wait_for(lambda: not member.users or self._is_named(member))
            if self._is_named(member):
                return
            self._let_go(member)
        self._end_leaving()

    def pipeline(self, reads: Mapping[str, Mapping[str, str]]) -> Pipeline:
        """Models that run one after the other in one arena; what one computes for another stays beside it.

        Args:
            reads: For each model, in the order in which they run, which of its inputs are outputs of models before it:
                ``{"detector": {}, "classifier": {"image": "crop"}}``. Of several models with such an output the nearest
                one is meant.

        Raises:
            SessionError: there is no such model, input or output; an output has no fixed shape; the models and what is
                kept between them don't fit the limit together.
            BusyError: there wasn't room in time, as others run.
        """
        models = {name: self._member(name).plans for name in reads}
        if not models:
            raise SessionError("a pipeline needs at least one model.")
        steps, kept = steps_of(reads, models)
        made = Pipeline(steps, kept, tuple(list(models.values())[-1].outputs), self._running)
        with self._turn(tuple(reads), pipeline=made):
            return made

    def memory(self) -> FleetMemory:
        """What the fleet is planned to take with the models that are loaded now."""
        with self._changed:
            return self._memory(self._present)

    def metrics(self) -> str:
        """Figures in Prometheus' text format: bytes, who waits for an arena and for how long, runs of each model."""
        return text_of(self.figures())

    def figures(self) -> list[Figure]:
        """What `metrics` says, each figure apart."""
        with self._changed:
            members = sorted(self._members.items())
        loaded = {name: int(member.model is not None) for name, member in members}
        return [
            Figure("memonger_bytes", "What the fleet is planned to take.", "of", dataclasses.asdict(self.memory())),
            *self.waiting.figures(),
            Figure("memonger_runs_total", "Runs.", "model", {name: member.runs for name, member in members}),
            Figure("memonger_loaded", "Whether the model is loaded.", "model", loaded),
            Figure("memonger_loads_total", "Loads.", "model", {name: member.loads for name, member in members}),
        ]

    def release(self) -> None:
        """Give arenas and workspace back to the system; weights stay. The next runs take them again.

        Waits for the runs that are under way.
        """
        for place in self._places:
            place.release()
        ort.shrink_host_memory()

    def close(self) -> None:
        """Give everything back, once the runs that are under way are over. No model runs any more."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._serve()  # those who wait are told
            self._changed.wait_for(lambda: not self._served)
            self._members.clear()
            for member in tuple(self._present):
                self._let_go(member)
        self._idle.end()
        self._end_leaving()
        self.release()
        process_memory.settle()

    def _check_open(self) -> None:
        if self._is_closed:
            raise SessionError("the fleet is closed: make a new one.")

    def _member(self, name: str) -> _Member:
        self._check_open()
        member = self._members.get(name)
        if member is None:
            raise SessionError(shown(f"the fleet has no model {name!r}; it has {quoted(self._members)}."))
        return member

    def _is_named(self, member: _Member) -> bool:
        return member in self._members.values()

    @contextmanager
    def _running(self, names: Iterable[str]) -> Iterator[tuple[ExecutionContext, list[LoadedModel]]]:
        """An arena, and models to run in it.

        Raises:
            BusyError: no arena was free in time, or there was no room.
            SessionError: a model doesn't fit, isn't there, or can't be loaded again.
        """
        with self._idle, self._turn(tuple(names), is_run=True) as turn:
            self._load(turn)
            assert turn.place is not None
            yield turn.place, [model for one in turn.members.values() if (model := one.model) is not None]

    @contextmanager
    def _turn(
        self,
        names: tuple[str, ...],
        *,
        added: _Member | None = None,
        pipeline: Pipeline | None = None,
        is_run: bool = False,
    ) -> Iterator[_Turn]:
        """A turn that is served, for the time of the block; see `_Turn`."""
        turn = _Turn(names, added, pipeline, is_run)
        try:
            with self.waiting.counted() if is_run else nullcontext(), self._changed:
                self._queue.append(turn)
                try:
                    self._serve()
                    if turn.waits:
                        turn.settled = threading.Condition(self._lock)
                        turn.settled.wait_for(lambda: not turn.waits, self._wait)
                    if turn.waits:
                        self._try(turn)  # nobody is turned away while what it needs is free, whoever waits before it
                    if turn.refusal is not None:
                        raise turn.refusal
                    if turn.waits:
                        raise BusyError(self._why_busy(turn))
                finally:
                    if turn in self._queue:
                        self._queue.remove(turn)  # before the lock is free: nobody serves it any more
            yield turn
        finally:
            with self._changed:
                self._end(turn)

    def _serve(self) -> None:
        """Serve those who wait, as far as there is what they need; see the module's first lines."""
        for is_loading in (False, True):
            before: list[_Turn] = []
            for turn in tuple(self._queue):
                if before and before[0].overtaken >= MOST_OVERTAKEN:
                    break  # nobody else was overtaken more often
                if is_loading or self._is_there(turn):
                    self._try(turn)
                if turn.waits:
                    before.append(turn)
                elif turn.members:
                    for one in before:
                        one.overtaken += 1

    def _is_there(self, turn: _Turn) -> bool:
        """Whether all models of a turn are loaded, or being loaded."""
        members = [self._members.get(name, turn.added) for name in turn.names]
        return all(one in self._present for one in members if one is not None)

    def _try(self, turn: _Turn) -> None:
        """Serve a turn, or refuse it if it can never be served; it waits where neither can be said."""
        try:
            wanted = {n: turn.added if turn.added is not None else self._member(n) for n in turn.names}
            self._check_open()
            gone = self._to_let_go(turn, wanted)
        except SessionError as error:
            turn.refusal = error
        else:
            if gone is None or (turn.is_run and not self._free):
                return
            for member in gone:
                self._let_go(member)
            for member in set(wanted.values()):
                member.users += 1
                self._present[member] = None
                self._largest = max(self._largest, member.plans.need.arena)
            if turn.is_run:
                turn.place = self._free.pop()
            if turn.pipeline is not None:
                self._pipelines.add(turn.pipeline)
            self._served += 1
            turn.members = wanted
        self._queue.remove(turn)
        if turn.settled is not None:
            turn.settled.notify_all()

    def _end(self, turn: _Turn) -> None:
        """Give back what a turn has, to those who wait."""
        if turn.members:
            self._served -= 1
            self._runs += 1
            for member in set(turn.members.values()):
                member.users -= 1
                if turn.is_run:
                    member.used, member.runs = self._runs, member.runs + 1
                if not member.users and (member.model is None or not self._is_named(member)):
                    self._let_go(member)
        if turn.place is not None:
            self._free.append(turn.place)
            if turn.place.touched > self._largest:
                turn.place.release()
        self._serve()
        self._changed.notify_all()

    def _to_let_go(self, turn: _Turn, wanted: Mapping[str, _Member]) -> list[_Member] | None:
        """The members to let go for a turn, the least recently used first; None if that isn't enough now.

        Raises:
            SessionError: it never is, and how many bytes are needed.
        """
        if self._limit is None or (turn.pipeline is None and all(one in self._present for one in wanted.values())):
            return []
        kept = 0 if turn.pipeline is None else turn.pipeline.nbytes
        staying = {**self._present, **dict.fromkeys(wanted.values())}
        idle = [one for one in staying if one.source is not None and not one.users and one not in wanted.values()]
        idle.sort(key=lambda one: one.used)
        gone = list[_Member]()
        while self._memory(staying, kept).total + self._beyond(staying) > self._limit:
            if not idle:
                self._check_fits(turn, wanted, kept)
                return None
            gone.append(idle.pop(0))
            del staying[gone[-1]]
        return gone

    def _check_fits(self, turn: _Turn, wanted: Mapping[str, _Member], kept: int) -> None:
        """Check that models fit the limit once all is gone that may go."""
        staying = [one for one in self._present if one.source is None and one not in wanted.values()]
        needed = self._memory([*staying, *set(wanted.values())], kept).total
        if self._limit is not None and needed > self._limit:
            others = f" with {len(staying)} that weren't given as paths, and so stay" if staying else ""
            together = f"the pipeline of {quoted(wanted)} doesn't" if len(wanted) > 1 else f"{quoted(wanted)} doesn't"
            raise SessionError(
                f"{together} fit: the fleet would take {in_full(needed)}{others}, and its limit is "
                f"{in_full(self._limit)}. Nothing was loaded or let go."
            )

    def _memory(self, members: Iterable[_Member], more: int = 0) -> FleetMemory:
        """What the fleet takes with these members, and pipelines that keep so many more bytes."""
        kept = sum(pipeline.nbytes for pipeline in self._pipelines)
        return memory_of([member.plans.need for member in members], self._count, kept + more)

    def _beyond(self, members: Iterable[_Member]) -> int:
        """Bytes of arenas in use that were touched for models larger than these; they go when those runs end."""
        largest = max((member.plans.need.arena for member in members), default=0)
        return sum(max(0, place.touched - largest) for place in self._places if place not in self._free)

    def _let_go(self, member: _Member) -> None:
        """Let a member's memory go, and what free arenas touched for it alone.

        `_end_leaving` ends what was loaded of it, before anything else is loaded.
        """
        self._present.pop(member, None)
        if member.model is not None:
            member.checked = member.checked or _is_checked(member)
            self._leaving.append(member.model)
            member.model = None
        self._largest = max((one.plans.need.arena for one in self._present), default=0)
        for place in self._free:
            if place.touched > self._largest:
                place.release()

    def _load(self, turn: _Turn, records: _Records | None = None) -> None:
        """Load those of a turn's models that aren't, or wait until the thread has that does it.

        Args:
            turn: It is served: there is room.
            records: Of its only model; None: plans are read again.
        """
        while any(member.model is None for member in turn.members.values()):  # one that is loaded stays for the turn
            with self._changed:
                missing = {n: one for n, one in turn.members.items() if one.model is None}
                name, member = next((pair for pair in missing.items() if not pair[1].is_loading), ("", None))
                if member is None:
                    if missing:
                        self._changed.wait()
                    continue
                member.is_loading, member.loads = True, member.loads + 1
            model = None
            try:
                model = self._loaded(name, member, records)
            finally:
                with self._changed:
                    member.model, member.is_loading = model, False
                    self._changed.notify_all()

    def _loaded(self, name: str, member: _Member, records: _Records | None) -> LoadedModel:
        """A model, loaded in the thread in which all are.

        The C library has pools of memory for threads, and what models that go leave in those of many callers isn't
        given back: of eight models of 12 MiB that took turns in 48, from eight threads, the process kept 70.
        """
        self._end_leaving()
        made = _loader().submit(copy_context().run, self._made, name, member, records)
        try:
            return made.result()
        finally:
            wait([made])  # also where this thread is interrupted: nothing is loaded twice at once

    def _made(self, name: str, member: _Member, records: _Records | None) -> LoadedModel:
        with self._loading:
            checks = self._check_order and not member.checked
            if records is None:
                assert member.source is not None
                found, records = self._read(member.source, member.pad, checks, apart=False)  # in tens of milliseconds
                if found.key != member.plans.key:
                    raise SessionError(
                        f"the file of '{name}' was changed since it was added: remove it, and add it again."
                    )
            ort.shrink_host_memory()  # or the workspace that was large enough so far would stay beside a larger one
            prepared = next(records)
            assert isinstance(prepared, Prepared)
            return LoadedModel(
                prepared, map(self._with_shared_weights, records), threads=self._threads, pad=member.pad,
                at_once=self._count, check_order=checks, limit=None if self._limit is None else member.plans.need.own,
            )  # fmt: skip

    def _with_shared_weights(self, group: Prepared | SessionGroup) -> SessionGroup:
        """What a session is made of, with weights that the fleet has already."""
        assert isinstance(group, SessionGroup)
        return dataclasses.replace(group, model=self._weights.in_place(group.model))

    def _end_leaving(self) -> None:
        """End models that were let go."""
        with self._loading:
            with self._changed:
                leaving, self._leaving = self._leaving, []
            for model in leaving:
                for place in self._places:
                    place.forget(model)
                model.close()
            if leaving:
                ort.shrink_host_memory()
                process_memory.give_back()  # pieces freed among others add up to megabytes in hundreds of loads

    def _why_busy(self, turn: _Turn) -> str:
        if turn.is_run and not self._free:
            return (
                f"no arena was free within {self._wait} s: {self._count} are in use. Give the fleet more "
                "(arenas=...), or wait longer (wait=...)."
            )
        return f"there was no room for {quoted(turn.names)} within {self._wait} s: models that run hold it."


def _is_checked(member: _Member) -> bool:
    """Whether what is loaded was seen to run the planned order."""
    engines = member.model.engines if member.model is not None else ()
    return bool(engines) and not any(engine.unchecked or engine.refused for engine in engines)
