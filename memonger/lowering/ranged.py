"""A model with ranges of sizes → the model that will run at any of them, calibrated at several.

Its dimensions stay symbolic while onnxruntime optimizes it, as they do in a stock session: the nodes are stock's own,
and so are the bits. What computes shapes stays in the graph.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir

from memonger.devices import CPU, Cuda
from memonger.errors import LoadError, PlanError, SessionError
from memonger.ir.model import Model
from memonger.lowering import calibrate
from memonger.lowering.lowered import Lowered, portable, write_out_bodies
from memonger.plan_records import Spent
from memonger.runtime import feeds as feeding
from memonger.runtime import profile
from memonger.shapes import open_dims
from memonger.shapes import ranges as ranging
from memonger.shapes.inference import infer_types
from memonger.shapes.ranges import DimRange
from memonger.shapes.sizes import Sizes, SizesError
from memonger.words import Placeholder, either, option


def run(
    model: ir.Model, name: str, ranges: Mapping[str, DimRange], folder: Path, threads: int,
    inputs: feeding.Feeds | None,
    wanted: calibrate.Wanted, spent: Spent,
) -> tuple[calibrate.CalibratingRun, tuple[calibrate.CalibratingRun, ...]]:  # fmt: skip
    """Calibrate a lowered model at each of `memonger.shapes.ranges.points`.

    Args:
        model: Every node named. Its inputs' ranges are symbolic, and are so again afterwards.
        name: What messages call it.
        ranges: The ranges.
        folder: For what the runtime writes.
        threads: Threads within a node.
        inputs: What it is fed at the largest sizes: repeated or cut for the others. Random numbers if None.
        wanted: What for.
        spent: Where runs are counted.

    Returns: one record with the types, shapes and times of the largest sizes, the most workspace of each node, and the
        orders of all runs; and the record of each point.

    Raises:
        PlanError: the model doesn't run at one of these sizes, which the message names.
    """
    shapes, symbolic = open_dims.largest(model, ranges), [value.shape for value in model.graph.inputs]
    points, begun = ranging.points(ranges), [0]

    def at_each() -> Iterator[feeding.Feeds | None]:
        for sizes in points:
            own = ranging.shapes_at(shapes, ranges, sizes)
            open_dims.bind(model, own)
            yield None if inputs is None else {
                name: np.resize(feed, own[name]) if isinstance(feed, np.ndarray) and name in own else feed
                for name, feed in inputs.items()
            }  # fmt: skip
        put_back()

    def put_back() -> None:
        for value, shape in zip(model.graph.inputs, symbolic, strict=True):
            value.shape = shape

    try:
        runs = calibrate.run(
            model, CPU, folder, Cuda(), threads, at_each(), wanted, spent, begins=partial(begun.__setitem__, 0)
        )
    except SessionError as error:
        open_dims.bind(model, shapes)
        raise PlanError(
            f"{name}: it doesn't run at {ranging.in_words(points[begun[0]])}, which is within the ranges: {error} "
            f"{_that_run(model, ranges)}"
        ) from error
    finally:
        put_back()
    orders = frozenset[tuple[str, ...]]().union(*(one.orders for one in runs))
    foreign = frozenset[str]().union(*(one.foreign for one in runs))
    return dataclasses.replace(runs[0], orders=orders, foreign=foreign), runs


def portable_form(model: Model, ranges: Mapping[str, DimRange]) -> Lowered:
    """The portable form of a model whose ranges are symbolic.

    Raises:
        PlanError: the type of a value is unknown, or its size at other sizes of the inputs.
    """
    copy = model.clone()
    _infer_types(copy, ranges)
    write_out_bodies(copy, partial(_infer_types, ranges=ranges))
    lowered = portable(copy)
    _give_sizes(lowered.model, ranges, ())
    return lowered


def with_sizes(model: ir.Model, ranges: Mapping[str, DimRange], seen: Sequence[calibrate.CalibratingRun]) -> None:
    """Give values types, and every shape they have at the largest sizes; None stays for what only a run can tell.

    Args:
        model: Lowered, its ranges symbolic. It is changed.
        ranges: The ranges.
        seen: What runs showed at each of `memonger.shapes.ranges.points`.

    Raises:
        PlanError: an operator without a shape rule; shapes that contradict each other, or what a run showed.
    """
    _infer_types(Model(model, "the optimized model"), ranges)
    for value in (value for node in model.graph for value in node.outputs):
        kind, dims = seen[0].tensors.get(str(value.name), (None, None))
        dtype = profile.DTYPES.get(kind) if value.dtype is None and kind is not None else value.dtype
        if dtype is not None and dims is not None:
            value.type = value.type or ir.TensorType(ir.DataType(dtype))  # an optional's bytes are in a run, too
            value.shape = ir.Shape(list(dims))  # rules may read fixed dimensions
    _give_sizes(model, ranges, seen)


def _that_run(model: ir.Model, ranges: Mapping[str, DimRange]) -> str:
    """Which sizes run, as a sentence."""
    with suppress(PlanError):
        if found := open_dims.sizes_that_run(model, ranges):
            return open_dims.in_words(found)
    step = option("dims", {next(iter(ranges)): Placeholder(either("(64, 512, 32)", "64:512:32"))})
    return f"A range with a step leaves sizes out: {step}."


def not_all_run(model: ir.Model, ranges: Mapping[str, DimRange]) -> tuple[str, ...]:
    """A note where sizes of the ranges don't run that nothing was measured at: onnxruntime refuses them in a run."""
    found = open_dims.sizes_that_run(model, ranges)
    return (f"not all sizes of the ranges run, planned or not. {open_dims.in_words(found)}",) if found else ()


def _infer_types(model: Model, ranges: Mapping[str, DimRange]) -> None:
    """Types of values by inference, as far as it knows their operators; no shapes."""
    shapes = open_dims.largest(model.ir, ranges)
    open_dims.forget(model.ir)
    open_dims.bind(model.ir, shapes)
    with suppress(LoadError):
        infer_types(model)
    open_dims.forget(model.ir)


def _give_sizes(model: ir.Model, ranges: Mapping[str, DimRange], seen: Sequence[calibrate.CalibratingRun]) -> None:
    """Give values their shapes at the largest sizes, once those at every point were compared with what runs showed."""
    shapes, sizes = open_dims.largest(model, ranges), Sizes(model)
    for number, at in enumerate(ranging.points(ranges)):
        try:
            own = sizes.at(ranging.shapes_at(shapes, ranges, at))
        except SizesError as error:
            raise PlanError(
                f"its shapes contradict each other at {ranging.in_words(at)}: {error}. {_that_run(model, ranges)}"
            ) from error
        for name, shape in zip(sizes.names, own, strict=True) if seen else ():
            _, dims = seen[number].tensors.get(name, (None, None))
            if shape is not None and dims is not None and shape != dims:
                raise PlanError(
                    f"value '{name}' has shape {list(shape)} at {ranging.in_words(at)} by its operator's rule, and "
                    f"{list(dims)} in a run. Plan the model for single sizes."
                )
    open_dims.put(model, sizes, shapes)
