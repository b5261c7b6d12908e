"""Several planned models that share arenas, workspace and equal weights, within a limit of memory."""

import dataclasses
import hashlib
import queue
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import onnx_ir as ir

from memonger.devices import CPU
from memonger.errors import BusyError, SessionError
from memonger.model.values import required_inputs, static_shape
from memonger.plan import Plan
from memonger.plan_file import graph_digest, weight_digests
from memonger.runtime import feeds as feeding
from memonger.runtime import ort, process_memory
from memonger.runtime.arena import ArenaTensor
from memonger.runtime.figures import Figure, Waiting, text_of
from memonger.runtime.fleet_memory import FleetMemory, Need, memory_of, need_of
from memonger.runtime.loaded_model import LoadedModel
from memonger.runtime.pipeline import Pipeline, steps_of
from memonger.runtime.places import IdleRelease, Place
from memonger.runtime.session import check_stamp, device_of, plans_of
from memonger.runtime.weights import SharedWeights
from memonger.units import MOST_ARENAS, format_size, in_bytes, in_full, shown, whole
from memonger.words import quoted

Source = Plan | str | Path | Sequence[Plan | str | Path]


@dataclass(slots=True, eq=False)
class _Member:
    """Plans under one or several names, loaded or not.

    Attributes:
        key: The same for plans that are the same.
        source: Where they come from again: paths; None for plans that were given as objects.
        pad: As in `memonger.Session`.
        need: In bytes.
        inputs: Names of the model's inputs.
        outputs: Its outputs by name, with type and shape; None where that isn't one shape.
        checked: Whether an earlier load was seen to run the planned order: what onnxruntime's profiler takes for that
            stays with the process.
        model: Loaded; None where it was let go.
        users: Runs that are under way, or wait for an arena.
        used: Number of the last run.
        runs: How many there were.
    """

    key: str
    source: Source | None
    pad: bool
    need: Need
    inputs: tuple[str, ...]
    outputs: Mapping[str, ArenaTensor | None]
    checked: bool = False
    model: LoadedModel | None = None
    users: int = 0
    used: int = 0
    runs: int = field(default=0)


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
        return self._fleet._member(self.name).inputs

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the model's outputs, each once."""
        return tuple(self._fleet._member(self.name).outputs)

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
        with self._fleet._running([self.name]) as (place, (model,)):
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
            loaded again when they are run. Where that isn't enough it is refused.
        wait: Seconds that a run waits for an arena at most; None: as long as it takes.
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
        self.waiting = Waiting()
        self._loading, self._changed = threading.Lock(), threading.Condition()
        self._places = [Place(CPU, 0) for _ in range(self._count)]
        self._free: queue.LifoQueue[Place] = queue.LifoQueue()
        for place in self._places:
            self._free.put(place)
        self._idle = IdleRelease(self, idle_release)
        for name, plan in (plans or {}).items():
            self.add(name, plan)

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
        if not isinstance(name, str) or not name:
            raise SessionError(f"a model of a fleet needs a name, not {name!r}.")
        with self._loading:
            self._check_open()
            if name in self._members:
                raise SessionError(f"the fleet has a model '{name}' already: take another name, or remove it first.")
            plans = _checked(plan, self._check_weights)
            new = _member_of(plans, plan, pad)
            member = next((one for one in self._members.values() if one.key == new.key), new)
            if member.model is None:
                self._load(member, name, plans)
            with self._changed:
                self._members[name] = member
        return FleetModel(self, name)

    def remove(self, name: str) -> None:
        """Take a model out, once its runs are over; its memory is given back.

        Raises:
            SessionError: there is none of this name.
        """
        with self._changed:
            member = self._member(name)
            del self._members[name]
            if member in self._members.values():
                return
            self._changed.wait_for(lambda: not member.users)
        with self._loading:
            self._let_go(member)
        self.release()

    def pipeline(self, reads: Mapping[str, Mapping[str, str]]) -> Pipeline:
        """Models that run one after the other in one arena; what one computes for another stays beside it.

        Args:
            reads: For each model, in the order in which they run, which of its inputs are outputs of models before it:
                ``{"detector": {}, "classifier": {"image": "crop"}}``. Of several models with such an output the nearest
                one is meant.

        Raises:
            SessionError: there is no such model, input or output; an output has no fixed shape; what is kept between
                the models doesn't fit the limit.
        """
        members = {name: self._member(name) for name in reads}
        if not members:
            raise SessionError("a pipeline needs at least one model.")
        steps, kept = steps_of(
            reads, {n: m.inputs for n, m in members.items()}, {n: m.outputs for n, m in members.items()}
        )
        made = Pipeline(steps, kept, tuple(list(members.values())[-1].outputs), self._running)
        needed = self.memory().total + self._count * made.nbytes
        if self._limit is not None and needed > self._limit:
            raise SessionError(
                f"the pipeline doesn't fit: the fleet would take {in_full(needed)}, and its limit is "
                f"{in_full(self._limit)}."
            )
        self._pipelines.add(made)
        return made

    def memory(self) -> FleetMemory:
        """What the fleet is planned to take with the models that are loaded now."""
        return self._memory([member for member in set(self._members.values()) if member.model is not None])

    def metrics(self) -> str:
        """Figures in Prometheus' text format: bytes, who waits for an arena and for how long, runs of each model."""
        return text_of(self.figures())

    def figures(self) -> list[Figure]:
        """What `metrics` says, each figure apart."""
        members = sorted(self._members.items())
        loaded = {name: int(member.model is not None) for name, member in members}
        return [
            Figure("memonger_bytes", "What the fleet is planned to take.", "of", dataclasses.asdict(self.memory())),
            *self.waiting.figures(),
            Figure("memonger_runs_total", "Runs.", "model", {name: member.runs for name, member in members}),
            Figure("memonger_loaded", "Whether the model is loaded.", "model", loaded),
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
            members = set(self._members.values())
            self._changed.wait_for(lambda: not any(member.users for member in members))
            self._members.clear()
        self._idle.end()
        with self._loading:
            for member in members:
                self._let_go(member)
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

    def _memory(self, members: Sequence[_Member]) -> FleetMemory:
        kept = sum(pipeline.nbytes for pipeline in self._pipelines)
        return memory_of([member.need for member in members], self._count, kept)

    def _load(self, member: _Member, name: str, plans: Sequence[Plan]) -> None:
        """Load a model, within the limit."""
        self._make_room(member, name)
        ort.shrink_host_memory()  # or the workspace that was large enough so far would stay beside a larger one
        member.model = LoadedModel(
            plans, CPU, threads=self._threads or plans[0].threads, pad=member.pad, lending=self._weights,
            at_once=self._count, check_order=self._check_order and not member.checked,
            limit=None if self._limit is None else member.need.own,
        )  # fmt: skip

    def _make_room(self, wanted: _Member, name: str) -> None:
        """Let models go until another fits the limit: none if that wouldn't do.

        Raises:
            SessionError: it doesn't fit, and how many bytes are needed; what could go was running for too long.
        """
        with self._changed:
            self._check_fits(wanted, name)
            if not self._changed.wait_for(lambda: self._to_let_go(wanted) is not None, self._wait):
                raise BusyError(f"there was no room for '{name}' within {self._wait} s: models that run hold it.")
            gone = self._to_let_go(wanted) or []
            models = [member.model for member in gone]
            for member in gone:
                member.checked = member.checked or _is_checked(member)
                member.model = None
        for model in models:
            self._end(model)
        if gone:
            self.release()
            process_memory.give_back()  # pieces that were freed among others add up to megabytes in hundreds of loads

    def _check_fits(self, wanted: _Member, name: str) -> None:
        """Check that a model fits the limit once all is gone that may go."""
        staying = [one for one in set(self._members.values()) if one.model is not None and one.source is None]
        needed = self._memory([*staying, wanted]).total
        if self._limit is not None and needed > self._limit:
            others = f" with {len(staying)} that weren't given as paths, and so stay" if staying else ""
            raise SessionError(
                f"'{name}' doesn't fit: the fleet would take {in_full(needed)}{others}, and its limit is "
                f"{in_full(self._limit)}. Nothing was loaded or let go."
            )

    def _to_let_go(self, wanted: _Member) -> list[_Member] | None:
        """The members to let go for another, the least recently used first; None if that isn't enough now."""
        staying = [*(one for one in set(self._members.values()) if one.model is not None), wanted]
        idle = sorted((m for m in staying[:-1] if m.source is not None and not m.users), key=lambda m: m.used)
        gone = list[_Member]()
        while self._limit is not None and self._memory(staying).total > self._limit:
            if not idle:
                return None
            gone.append(idle.pop(0))
            staying.remove(gone[-1])
        return gone

    def _let_go(self, member: _Member) -> None:
        model, member.model = member.model, None
        self._end(model)

    def _end(self, model: LoadedModel | None) -> None:
        if model is None:
            return
        for place in self._places:
            place.forget(model)
        model.close()

    @contextmanager
    def _used(self, name: str) -> Iterator[LoadedModel]:
        """A model for the time of a run: loaded, and not let go meanwhile."""
        with self._changed:
            member = self._member(name)
            member.users += 1
        try:
            if member.model is None:
                self._load_again(member, name)
            model = member.model
            assert model is not None
            yield model
        finally:
            with self._changed:
                self._runs += 1
                member.users, member.used, member.runs = member.users - 1, self._runs, member.runs + 1
                self._changed.notify_all()

    def _load_again(self, member: _Member, name: str) -> None:
        with self._loading:
            if member.model is None:
                assert member.source is not None
                plans = _checked(member.source, self._check_weights)
                if _key(plans, member.pad) != member.key:
                    raise SessionError(
                        f"the file of '{name}' was changed since it was added: remove it, and add it again."
                    )
                self._load(member, name, plans)

    @contextmanager
    def _place(self) -> Iterator[Place]:
        """An arena that nobody runs in.

        Raises:
            BusyError: there was none in time.
        """
        with self.waiting.counted():
            try:
                place = self._free.get(timeout=self._wait) if self._wait != 0 else self._free.get_nowait()
            except queue.Empty:
                raise BusyError(
                    f"no arena was free within {self._wait} s: {self._count} are in use. Give the fleet more "
                    "(arenas=...), or wait longer (wait=...)."
                ) from None
        try:
            yield place
        finally:
            self._free.put(place)

    @contextmanager
    def _running(self, names: Iterable[str]) -> Iterator[tuple[Place, list[LoadedModel]]]:
        """An arena, and models to run in it."""
        with self._idle, ExitStack() as stack:
            models = [stack.enter_context(self._used(name)) for name in names]
            yield stack.enter_context(self._place()), models


def _checked(source: Source, check_weights: bool) -> list[Plan]:
    """The plans of a model, checked for this machine."""
    plans = plans_of(source, check_weights)
    for plan in plans:
        if plan.state:
            raise SessionError(
                f"{plan.name} keeps a state: a fleet's models don't, as anybody may run them. Make a Session."
            )
        device = device_of(plan, None)
        if not device.is_host:
            raise SessionError(f"{plan.name} is planned for {device}: a fleet runs on the CPU.")
        check_stamp(plan, device)
    return plans


def _member_of(plans: Sequence[Plan], source: Source, pad: bool) -> _Member:
    given = [source] if isinstance(source, Plan | str | Path) else source
    graph, is_fixed = plans[0].model.graph, len(plans) == 1 and not pad and not plans[0].ranges
    return _Member(
        key=_key(plans, pad),
        source=None if any(isinstance(one, Plan) for one in given) else source,
        pad=pad,
        need=need_of(plans),
        inputs=tuple(str(value.name) for value in required_inputs(graph)),
        outputs={str(value.name): _tensor(value) if is_fixed else None for value in graph.outputs},
    )


def _tensor(value: ir.Value) -> ArenaTensor | None:
    shape = static_shape(value)
    return ArenaTensor(str(value.name), value.dtype, shape) if shape is not None and value.dtype is not None else None


def _is_checked(member: _Member) -> bool:
    """Whether what is loaded was seen to run the planned order."""
    engines = member.model.engines if member.model is not None else ()
    return bool(engines) and not any(engine.unchecked or engine.refused for engine in engines)


def _key(plans: Sequence[Plan], pad: bool) -> str:
    """A digest of all that plans do: nodes, weights, addresses, device."""
    digest = hashlib.sha256(f"{pad};{len(plans)};".encode())
    for plan in plans:
        offsets = sorted((plan.graph.values[value], offset) for value, offset in plan.offsets.items())
        weights = sorted(weight_digests(plan.model).items())
        made_for = (plan.stamp, plan.threads, dict(plan.ranges))
        digest.update(repr((graph_digest(plan.model), weights, offsets, *made_for)).encode())
    return digest.hexdigest()
