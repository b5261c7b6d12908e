"""serving: what an exported program holds, planned models in one fleet that answer requests of any batch a plan is for.

A single model is a fleet of one.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from memonger.errors import BusyError, MemongerError, SessionError
from memonger.ir.values import required_inputs
from memonger.plan import Plan
from memonger.runtime.engine import EngineRefusedError
from memonger.runtime.feeds import random_feeds
from memonger.runtime.padding import NoBatchError
from memonger.runtime.prepare import device_of
from memonger.runtime.program import inputs_of
from memonger.runtime.session import Session
from memonger.serving import package
from memonger.serving.figures import Figure
from memonger.serving.fleet import Fleet, FleetModel
from memonger.serving.protocol import datatype_of
from memonger.units import shown

Arrays = Mapping[str, np.ndarray]
Made = TypeVar("Made")
Grow = Callable[[str, float, float], None]
"""Takes a label's value, what the figure is now, and by how much it is more than before."""

_log = logging.getLogger(__name__)


class UnknownModelError(SessionError):
    """No model has the name that a request asks for."""


class PlannedModel:
    """A model that answers requests. Threads may share it.

    Where outputs begin with the batch, a batch that no plan was made for is filled up to the next larger one. A plan
    for ranges of sizes runs any size in them as it is, and is filled up between their steps.

    Every plan is run once on made-up inputs before the first request: the session checks the executed order then, and
    not on a client's inputs, and the first answer comes as fast as the others.

    Args:
        fleet: What the model is added to; one for a CUDA device has a session of its own.
        name: Its name there.
        plans: Planned files, or plans.
        reloads: Whether the model may be let go for others, and loaded again from its files.

    Attributes:
        inputs: What requests give, as the Open Inference Protocol describes tensors: ``name``, ``datatype``, ``shape``
            with -1 for a dimension that may differ from request to request.
        outputs: What answers hold, likewise.

    Raises:
        PlanFileError, VerificationError, RuntimeUnavailableError, SessionError: as `memonger.Fleet.add`; onnxruntime
            doesn't run the planned order.
    """

    def __init__(self, fleet: Fleet, name: str, plans: Sequence[Plan | str | Path], *, reloads: bool = False) -> None:
        loaded = [plan if isinstance(plan, Plan) else Plan.load(plan) for plan in plans]
        self.batches = tuple(sorted(_batch(plan) for plan in loaded))
        self.input_names = tuple(value.name for value in inputs_of(loaded[0].model.graph) if value.required)
        self._model: FleetModel | Session
        if device_of(loaded[0], None).is_host:
            source = list(plans) if reloads else loaded
            self._model, pads = _filled_up(lambda pad: fleet.add(name, source, pad=pad))
        else:
            self._model, pads = _filled_up(lambda pad: Session(loaded, pad=pad))
        self.output_names = self._model.output_names
        most = max((_batch(plan) for plan in loaded if not plan.ranges), default=1) if pads else 1
        self.inputs = _described([package.inputs_of(plan) for plan in loaded], most)
        self.outputs = _described([package.outputs_of(plan) for plan in loaded], most)
        for plan in loaded:
            self._warm(plan)

    def _warm(self, plan: Plan) -> None:
        """Run a plan once. A model that fails on made-up inputs may still run on those of a client."""
        try:
            self.run(random_feeds(inputs_of(plan.model.graph)))
        except EngineRefusedError:
            raise
        except SessionError as error:
            _log.warning("no run before the first request: %s", error)

    def run(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """Run inputs of the shapes of a plan, or of a smaller batch.

        Raises:
            SessionError: as `memonger.FleetModel.run`.
        """
        return self._model.run(inputs)

    def answer(self, requests: Sequence[Arrays], *, together: bool) -> list[dict[str, np.ndarray] | MemongerError]:
        """Answer each request on its own: a bad one gets its error, and the others their outputs.

        Args:
            requests: The inputs of each.
            together: Whether as many requests as the largest plan takes share a run, its batch filled up with the
                last row: for models that compute each row of a batch alone. The inputs' first dimension is then the
                batch.

        Returns: the outputs of each request by name, or why there are none.
        """
        answers: dict[int, dict[str, np.ndarray] | MemongerError] = {}
        groups: dict[object, list[int]] = {}
        for number, request in enumerate(requests):
            try:
                groups.setdefault(self._rows(request)[1] if together else number, []).append(number)
            except SessionError as error:
                answers[number] = error
        for numbers in groups.values():
            answers.update(zip(numbers, self._answer_group([requests[n] for n in numbers], together), strict=True))
        return [answers[number] for number in range(len(requests))]

    def _answer_group(
        self, requests: Sequence[Arrays], together: bool
    ) -> Sequence[dict[str, np.ndarray] | MemongerError]:
        """Answers of requests that fit together; where they fail together, of each alone."""
        try:
            return self._run_together(requests) if together else [self.run(requests[0])]
        except MemongerError as error:
            if len(requests) == 1:
                return [error]
        return [self._answer_group([request], together)[0] for request in requests]

    def _run_together(self, requests: Sequence[Arrays]) -> list[dict[str, np.ndarray]]:
        sizes = [self._rows(request)[0] for request in requests]
        joined = {name: np.concatenate([request[name] for request in requests]) for name in self.input_names}
        rows = sum(sizes)
        parts, start = [], 0
        while start < rows:
            left = rows - start
            batch = next((size for size in self.batches if size >= left), self.batches[-1])
            count = min(batch, left)
            parts.append(self.run({k: v[start : start + count] for k, v in joined.items()}))
            start += count
        outputs = {name: np.concatenate([part[name] for part in parts]) for name in self.output_names}
        ends = np.cumsum(sizes)
        return [
            {name: array[end - size : end] for name, array in outputs.items()}
            for size, end in zip(sizes, ends, strict=True)
        ]

    def _rows(self, request: Arrays) -> tuple[int, object]:
        """How many rows a request has, and what it has in common with requests it can share a run with.

        Raises:
            SessionError: an input is missing or unknown, or its first dimension isn't the batch of the others.
        """
        missing = [name for name in self.input_names if name not in request]
        if missing:
            raise SessionError(f"input '{missing[0]}' is missing; the model takes {', '.join(self.input_names)}.")
        unknown = [name for name in request if name not in self.input_names]
        if unknown:
            raise SessionError(f"the model has no input '{unknown[0]}'; it takes {', '.join(self.input_names)}.")
        arrays = {name: np.asarray(request[name]) for name in self.input_names}
        rows = {array.shape[0] if array.ndim else 0 for array in arrays.values()}
        if len(rows) != 1 or 0 in rows:
            raise SessionError("the inputs of a request need one batch size, at least 1, as their first dimension.")
        return rows.pop(), tuple((array.dtype, array.shape[1:]) for array in arrays.values())


class PlannedFleet:
    """The models of a server's process, in one fleet.

    Args:
        models: The plans of each by its name, or planned files.
        arenas: How many requests run at a time.
        limit: Most bytes of the fleet, see `memonger.Fleet`.
        wait: Seconds that a request waits for its turn at most; None: as long as it takes.

    Raises:
        MemongerError: as `memonger.Fleet` and `PlannedModel`.
    """

    def __init__(
        self,
        models: Mapping[str, Sequence[Plan | str | Path]],
        *,
        arenas: int = 1,
        limit: str | int | None = None,
        wait: float | None = None,
    ) -> None:
        self.fleet, self._wait = Fleet(arenas=arenas, limit=limit, wait=wait), wait
        self._turns, self._threads = asyncio.Semaphore(arenas), ThreadPoolExecutor(arenas, "memonger run")
        self._meters = list[_Meter]()
        reloads = limit is not None
        self._models = {name: PlannedModel(self.fleet, name, one, reloads=reloads) for name, one in models.items()}

    @classmethod
    def load(cls, settings: Path) -> Self:
        """The models of an export.

        Args:
            settings: Its settings file; the paths in it are relative to its folder.
        """
        given = json.loads(settings.read_text())
        models = {name: [settings.parent / file for file in files] for name, files in given["models"].items()}
        return cls(models, arenas=given["arenas"], limit=given["limit"], wait=given["wait"])

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the models."""
        return tuple(self._models)

    def model(self, name: object = None) -> PlannedModel:
        """A model by its name; where there is one alone, it needs none.

        Raises:
            UnknownModelError: there is none of this name; those that are there are named.
        """
        if name is None and len(self._models) == 1:
            return next(iter(self._models.values()))
        model = self._models.get(name) if isinstance(name, str) else None
        if model is None:
            asked = "the request names no model" if name is None else f"there is no model {name!r}"
            raise UnknownModelError(shown(f"{asked}; there are {', '.join(self._models)}."))
        return model

    async def run(self, inputs: Arrays, name: object = None) -> dict[str, np.ndarray]:
        """Run a model in its turn, while the server's loop goes on.

        Raises:
            UnknownModelError: as `model`.
            BusyError: its turn didn't come in time.
            SessionError: as `PlannedModel.run`.
        """
        model = self.model(name)
        try:
            with self.fleet.waiting.counted():
                await self._turn()
            try:
                return await asyncio.get_running_loop().run_in_executor(self._threads, model.run, inputs)
            finally:
                self._turns.release()
        finally:
            self._measure()

    async def _turn(self) -> None:
        """Wait until fewer requests run than there are arenas."""
        if not self._turns.locked():
            await self._turns.acquire()
            return
        self._measure()
        try:
            await asyncio.wait_for(self._turns.acquire(), self._wait)
        except TimeoutError:
            raise BusyError(f"the server is busy: no turn came within {self._wait} s. Try again later.") from None

    def answer(self, requests: Sequence[Arrays], *, together: bool) -> list[dict[str, np.ndarray] | MemongerError]:
        """Answer requests as `PlannedModel.answer`; tensors of several models are named ``MODEL/NAME``."""
        answers: dict[int, dict[str, np.ndarray] | MemongerError] = {}
        groups: dict[str | None, list[int]] = {}
        for number, request in enumerate(requests):
            asked = {tensor.partition("/")[0] for tensor in request} if len(self._models) > 1 else set(self._models)
            groups.setdefault(asked.pop() if len(asked) == 1 else None, []).append(number)
        for name, numbers in groups.items():
            prefix = f"{name}/" if len(self._models) > 1 else ""
            given = [{key.removeprefix(prefix): array for key, array in requests[n].items()} for n in numbers]
            try:
                of_model = self.model(name).answer(given, together=together)
            except UnknownModelError as error:
                of_model = [error] * len(numbers)
            for number, answer in zip(numbers, of_model, strict=True):
                outputs = answer if isinstance(answer, Mapping) else {}
                answers[number] = {prefix + key: array for key, array in outputs.items()} or answer
        self._measure()
        return [answers[number] for number in range(len(requests))]

    def figures(self) -> list[Figure]:
        """Figures of the fleet; none where the only model runs on a CUDA device, which no fleet does."""
        return self.fleet.figures() if len(self.fleet) else []

    def report_to(self, add: Callable[[Figure], Grow]) -> None:
        """Pass figures on to a server's own metrics, now and whenever they change.

        Args:
            add: Makes a metric of the server for a figure, and returns what sets it.
        """
        self._meters.append(_Meter(self.figures, add))
        self._measure()

    def _measure(self) -> None:
        for meter in self._meters:
            meter.update()


class _Meter:
    """Tells a server's metrics what changed since it was last told."""

    def __init__(self, figures: Callable[[], list[Figure]], add: Callable[[Figure], Grow]) -> None:
        self._figures, self._told = figures, dict[tuple[str, str], float]()
        self._grow = {figure.name: add(figure) for figure in figures()}

    def update(self) -> None:
        for figure in self._figures():
            for key, value in figure.values.items():
                told = self._told.get((figure.name, key))
                if value != told:
                    self._told[figure.name, key] = value
                    self._grow[figure.name](key, value, value - (told or 0))


def prometheus(figure: Figure) -> Grow:
    """A metric of the package prometheus_client, which counts over all processes of a server; see `report_to`."""
    from prometheus_client import Counter, Gauge

    labels = [figure.label] if figure.label else []
    if figure.is_counter:
        counter = Counter(figure.name, figure.about, labels)
        return lambda key, _, more: (counter.labels(key) if labels else counter).inc(more)
    gauge = Gauge(figure.name, figure.about, labels, multiprocess_mode="livesum")
    return lambda key, value, _: (gauge.labels(key) if labels else gauge).set(value)


def _filled_up(make: Callable[[bool], Made]) -> tuple[Made, bool]:
    """What takes smaller batches as well, where outputs begin with the batch, and whether it does.

    Args:
        make: Makes it, given whether it is to take them.
    """
    try:
        return make(True), True
    except NoBatchError:
        return make(False), False


def _described(of_plans: Sequence[Sequence[package.TensorSpec]], batch: int) -> list[dict[str, Any]]:
    """Tensors as the Open Inference Protocol describes them.

    Args:
        of_plans: Those of each plan.
        batch: The largest, where smaller ones are filled up: a first dimension of that size is open; 1 where none is.
    """
    described = []
    for tensors in zip(*of_plans, strict=True):
        shape = [dims[0] if len(set(dims)) == 1 else -1 for dims in zip(*(one.dims for one in tensors), strict=True)]
        if shape and shape[0] == batch > 1:
            shape[0] = -1
        described.append({"name": tensors[0].name, "datatype": datatype_of(tensors[0].dtype), "shape": shape})
    return described


def _batch(plan: Plan) -> int:
    """The first dimension of the plan's inputs; 1 where there is none."""
    firsts = [v.shape[0] for v in required_inputs(plan.model.graph) if v.shape is not None and len(v.shape)]
    return firsts[0] if firsts and isinstance(firsts[0], int) else 1
