"""serving: what an exported program holds, planned models that answer requests of any batch a plan was made for."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from memonger.errors import SessionError
from memonger.plan import Plan
from memonger.runtime.session import Session

Arrays = Mapping[str, np.ndarray]


class PlannedModel:
    """A session of one or several plans of a model. Threads may share it: one run at a time.

    Args:
        plans: Planned files, or plans.

    Raises:
        PlanFileError, VerificationError, RuntimeUnavailableError, SessionError: as `memonger.Session`.
    """

    def __init__(self, plans: Sequence[Plan | str | Path]) -> None:
        loaded = [plan if isinstance(plan, Plan) else Plan.load(plan) for plan in plans]
        self.batches = tuple(sorted(_batch(plan) for plan in loaded))
        self.session = Session(loaded)
        self.input_names, self.output_names = self.session.input_names, self.session.output_names

    def run(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """Run inputs of exactly the shapes of a plan.

        Raises:
            SessionError: as `memonger.Session.run`.
        """
        return self.session.run(inputs)

    def run_together(self, requests: Sequence[Arrays]) -> list[dict[str, np.ndarray]]:
        """Run several requests, as many in one run as the largest plan takes; the batch is filled up with zeros.

        For models that compute each row of a batch alone.

        Args:
            requests: The inputs of each; their first dimension is the batch.

        Returns: the outputs of each.

        Raises:
            SessionError: a request without an input, or of rows of different numbers; or as `memonger.Session.run`.
        """
        sizes = [self._rows(request) for request in requests]
        joined = {name: np.concatenate([request[name] for request in requests]) for name in self.input_names}
        found = self._run_rows(joined, sum(sizes))
        ends = np.cumsum(sizes)
        return [
            {name: array[end - size : end] for name, array in found.items()}
            for size, end in zip(sizes, ends, strict=True)
        ]

    def _rows(self, request: Arrays) -> int:
        missing = [name for name in self.input_names if name not in request]
        if missing:
            raise SessionError(f"input '{missing[0]}' is missing; the model takes {', '.join(self.input_names)}.")
        rows = {request[name].shape[0] if request[name].ndim else 0 for name in self.input_names}
        if len(rows) != 1 or 0 in rows:
            raise SessionError("the inputs of a request have to have one batch as their first dimension.")
        return rows.pop()

    def _run_rows(self, joined: Arrays, rows: int) -> dict[str, np.ndarray]:
        parts, start = [], 0
        while start < rows:
            left = rows - start
            batch = next((size for size in self.batches if size >= left), self.batches[-1])
            taken = min(batch, left)
            outputs = self.session.run({k: _filled(v[start : start + taken], batch) for k, v in joined.items()})
            parts.append({name: array[:taken] for name, array in outputs.items()})
            start += taken
        return {name: np.concatenate([part[name] for part in parts]) for name in self.output_names}


def _filled(rows: np.ndarray, batch: int) -> np.ndarray:
    if len(rows) == batch:
        return rows
    filled = np.zeros((batch, *rows.shape[1:]), rows.dtype)
    filled[: len(rows)] = rows
    return filled


def _batch(plan: Plan) -> int:
    """The first dimension of the plan's inputs; 1 where there is none."""
    graph = plan.model.graph
    firsts = [
        v.shape[0] for v in graph.inputs if v.name not in graph.initializers and v.shape is not None and len(v.shape)
    ]
    return firsts[0] if firsts and isinstance(firsts[0], int) else 1
