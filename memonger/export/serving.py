"""serving: what an exported program holds, planned models that answer requests of any batch a plan was made for."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from memonger.errors import MemongerError, SessionError
from memonger.plan import Plan
from memonger.runtime.feeds import inputs_of, random_feeds
from memonger.runtime.padding import NoBatchError
from memonger.runtime.session import Session

Arrays = Mapping[str, np.ndarray]

_log = logging.getLogger(__name__)


class PlannedModel:
    """A session of one or several plans of a model. Threads may share it: one run at a time.

    Where outputs begin with the batch, a batch that no plan was made for is filled up to the next larger one.

    Every plan is run once on made-up inputs before the first request: the session checks the executed order then, and
    not on a client's inputs, and the first answer comes as fast as the others.

    Args:
        plans: Planned files, or plans.

    Raises:
        PlanFileError, VerificationError, RuntimeUnavailableError, SessionError: as `memonger.Session`; onnxruntime
            doesn't run the planned order.
    """

    def __init__(self, plans: Sequence[Plan | str | Path]) -> None:
        loaded = [plan if isinstance(plan, Plan) else Plan.load(plan) for plan in plans]
        self.batches = tuple(sorted(_batch(plan) for plan in loaded))
        self.session = _session(loaded)
        self.input_names = tuple(value.name for value in inputs_of(loaded[0].model.graph) if value.required)
        self.output_names = self.session.output_names
        for plan in loaded:
            self._warm(plan)

    def _warm(self, plan: Plan) -> None:
        """Run a plan once. A model that fails on made-up inputs may still run on those of a client."""
        try:
            self.session.run(random_feeds(inputs_of(plan.model.graph)))
        except SessionError as error:
            if any(engine.refused for engine in self.session.engines):
                raise
            _log.warning("no run before the first request: %s", error)

    def run(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """Run inputs of the shapes of a plan, or of a smaller batch.

        Raises:
            SessionError: as `memonger.Session.run`.
        """
        return self.session.run(inputs)

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
        outputs = self._run_rows(joined, sum(sizes))
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

    def _run_rows(self, joined: Arrays, rows: int) -> dict[str, np.ndarray]:
        parts, start = [], 0
        while start < rows:
            left = rows - start
            batch = next((size for size in self.batches if size >= left), self.batches[-1])
            count = min(batch, left)
            parts.append(self.session.run({k: v[start : start + count] for k, v in joined.items()}))
            start += count
        return {name: np.concatenate([part[name] for part in parts]) for name in self.output_names}


def _session(plans: Sequence[Plan]) -> Session:
    """A session that takes smaller batches as well, where outputs begin with the batch."""
    try:
        return Session(plans, pad=True)
    except NoBatchError:
        return Session(plans)


def _batch(plan: Plan) -> int:
    """The first dimension of the plan's inputs; 1 where there is none."""
    graph = plan.model.graph
    firsts = [
        v.shape[0] for v in graph.inputs if v.name not in graph.initializers and v.shape is not None and len(v.shape)
    ]
    return firsts[0] if firsts and isinstance(firsts[0], int) else 1
