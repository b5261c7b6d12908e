"""Checks gradients in float16 against those in float32 of the same numbers."""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

import memonger
from tests.support.gradient_checks import parse, run


def check_half(
    text: str, given: Mapping[str, np.ndarray] | None = None, *, wrt: Sequence[str], tolerance: float = 1e-2
) -> None:
    """The gradients by ``wrt`` of a model's outputs are float16, and near those in float32."""
    generator = np.random.default_rng(0)
    feeds, results = dict(given or {}), {}
    for kind, dtype in (("float16", np.float16), ("float", np.float32)):
        training = ir.to_proto(memonger.differentiate(parse(text, kind, 20), wrt=list(wrt)).ir)
        for value in training.graph.input:
            shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            if value.name not in feeds:
                feeds[value.name] = generator.standard_normal(shape).astype(np.float16)
        typed = {k: v.astype(dtype) if v.dtype.kind == "f" else v for k, v in feeds.items()}
        results[kind] = run(training, typed)
    for name in wrt:
        half, single = (results[kind][f"{name}.grad"] for kind in ("float16", "float"))
        assert half.dtype == np.float16
        error = float(np.abs(half.astype(np.float32) - single).max()) / max(1.0, float(np.abs(single).max()))
        assert error < tolerance, f"{name}: float16 differs by {error}"
