"""stock: the model as stock onnxruntime and others load it, an ordinary ONNX file without a plan in it."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from memonger.devices import CPU
from memonger.graph import schedule
from memonger.plan import Plan
from memonger.plan_file import without_plan
from memonger.runtime import feeds, onnxruntime, ort
from memonger.runtime.program import inputs_of
from memonger.runtime.weights import LEND_ALL, session_of

TOLERANCE = 1e-3  # between a row of a batch and the row alone: kernels block them differently


def model_in_order(plan: Plan, written: Sequence[int]) -> ir.Model:
    """A copy of the model with its nodes in another order. It is no planned model then."""
    model = without_plan(plan.model)
    schedule.schedule_model(model, written, schedule.schedule_graph(plan.graph, written))
    return model


def open_batch(model: ir.Model, batch: int) -> bool:
    """Let the model take any batch up to the one it was planned for, if it can: it is tried on a batch of one.

    Args:
        model: Its inputs' and outputs' first dimension is ``batch``. Changed if it can.
        batch: More than 1.

    Returns: False if the batch is written into the model elsewhere, or there is no onnxruntime to try it with.
    """
    if not onnxruntime.is_available():
        return False
    given = feeds.random_feeds(inputs_of(model.graph))
    whole = _run(model, given)
    opened = model.clone()
    _open(opened)
    try:
        one = _run(opened, {name: feed[:1] for name, feed in given.items()})
    except Exception:  # pybind exceptions share no base class; whatever it is, the batch isn't open
        return False
    for row, rows in zip(one, whole, strict=True):
        if row.shape != (1, *rows.shape[1:]) or not _close(row[0], rows[0]):
            return False
    _open(model)
    return True


def _open(model: ir.Model) -> None:
    graph = model.graph
    kept = {value: value.shape for value in (*graph.inputs, *graph.outputs) if value.name not in graph.initializers}
    for node in graph:
        for value in node.outputs:
            value.shape = None
    for value, shape in kept.items():
        value.shape = ir.Shape(["batch", *(shape[1:] if shape is not None else ())])


def _run(model: ir.Model, given: feeds.Feeds) -> list[np.ndarray]:
    session = session_of(model, CPU, ort.SessionSettings(entries=ort.RUN_ONCE), LEND_ALL)
    return list(feeds.run_bound(session, given).values())


def _close(row: np.ndarray, same: np.ndarray) -> bool:
    if row.dtype.kind == "V":  # bfloat16, say
        row, same = row.astype(np.float32), same.astype(np.float32)
    if row.dtype.kind not in "fc":
        return np.array_equal(row, same)
    scale = float(np.nanmax(np.abs(same), initial=0.0))
    return np.allclose(row, same, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True)
