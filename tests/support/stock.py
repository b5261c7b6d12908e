"""Plans run beside stock onnxruntime: the helper that tests of single models share."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir

import memonger
from memonger.ir.values import graphs
from memonger.runtime.onnxruntime import onnxruntime
from tests.support import networks

LEVELS = {"none": "ORT_DISABLE_ALL", "cpu": "ORT_ENABLE_ALL"}  # where a plan for the device runs the same kernels
Feeds = Mapping[str, Any]


def parse(text: str, opset: int = 17, ir_version: int = 8) -> onnx.ModelProto:
    """A model from onnx's text format, its header left out."""
    return onnx.parser.parse_model(f'<ir_version: {ir_version}, opset_import: ["": {opset}]> {text}')


def normal(seed: int, *dims: int) -> np.ndarray:
    """Normal numbers as float32."""
    return _drawn(seed, dims).copy()


@lru_cache(32)
def _drawn(seed: int, dims: tuple[int, ...]) -> np.ndarray:
    """Tests make their models anew from the same weights; drawing takes two hundred times as long as copying."""
    return np.random.default_rng(seed).standard_normal(dims).astype(np.float32)


def run_stock(model: onnx.ModelProto, feeds: Feeds, level: str) -> dict[str, Any]:
    """The outputs of stock onnxruntime by name."""
    return networks.run_stock(networks.stock(model, level), dict(feeds))


def optimized_operators(model: onnx.ModelProto, folder: Path) -> set[str]:
    """Operators of what stock onnxruntime makes of a model, its bodies included."""
    options = onnxruntime().SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    onnxruntime().InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return {node.op_type for graph in graphs(ir.load(folder / "optimized.onnx")) for node in graph}


def same(mine: Any, stock: Any) -> bool:
    """Equal bit for bit: arrays, lists of arrays, text."""
    if isinstance(stock, list):
        return len(mine) == len(stock) and all(same(a, b) for a, b in zip(mine, stock, strict=True))
    if stock.dtype == object:
        return mine.shape == stock.shape and bool((mine == stock).all())
    return (mine.dtype, mine.shape, mine.tobytes()) == (stock.dtype, stock.shape, stock.tobytes())


def planned_as_stock(
    model: onnx.ModelProto,
    feeds: Sequence[Feeds],
    *,
    differs: bool = True,
    devices: Sequence[str] = ("none", "cpu"),
    **choices: Any,
) -> dict[str, memonger.Plan]:
    """Plan a model for each device, and run each plan on every feed: outputs equal stock's bit for bit.

    The arena is full of zeros, then of NaNs, before the runs.

    ``differs``: the first two feeds give different outputs; where they can't, the comparison says little.

    Returns: the plans by device.
    """
    plans = {}
    for device in devices:
        level = LEVELS[device]
        plans[device] = memonger.search_plan(model, device=device, **choices, mode="inference")
        session = memonger.Session(plans[device])
        for fill in (0x00, 0xFF):
            results = []
            for feed in feeds:
                session.arena.fill(fill)
                mine, stock = session.run(feed), run_stock(model, feed, level)
                assert list(mine) == list(stock)
                assert all(same(mine[name], stock[name]) for name in stock), (device, mine, stock)
                results.append(stock)
            if differs:
                assert not all(same(results[0][name], results[1][name]) for name in results[0])
    return plans


def planned_names(plan: memonger.Plan) -> set[str]:
    """Names of the values that lie in the arena."""
    return {plan.graph.values[value] for value in plan.offsets}
