"""What is written out for CUDA, checked, and how near it is to what it was made from."""

from collections.abc import Iterator

import numpy as np
import onnx
import onnx_ir as ir

import memonger
from memonger.lowering import cuda
from tests.support.gradient_checks import parse
from tests.support.passes import after

REFUSED = {"BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Celu", "LpNormalization", "Mean"}
"""Operators that onnxruntime's CUDA provider has no kernel for (1.31.1)."""


def written(model: onnx.ModelProto | str) -> onnx.ModelProto:
    """What is written out of a model, checked: a valid one that the provider runs, with the outputs' names."""
    source = parse(model, "float", 20) if isinstance(model, str) else model
    made = ir.to_proto(after(cuda.write_out_for_cuda, memonger.load(source)).ir)
    onnx.checker.check_model(made, full_check=True)
    assert [v.name for v in made.graph.output] == [v.name for v in source.graph.output]
    assert not list(unsupported(made))
    names = [node.name for node in made.graph.node if node.name]
    assert len(names) == len(set(names))
    return made


def unsupported(model: onnx.ModelProto) -> Iterator[str]:
    """The nodes that the CUDA provider would refuse or leave to the CPU."""
    for node in model.graph.node:
        settings = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type in REFUSED or (node.op_type == "BatchNormalization" and settings.get("training_mode")):
            yield node.name
        if node.op_type == "LRN" and settings["size"] % 2 == 0:
            yield node.name
        if node.op_type == "ConvTranspose":
            pads, extra = settings.get("pads", []), settings.get("output_padding", [])
            strides = settings.get("strides", [1] * len(extra))
            if pads[: len(pads) // 2] != pads[len(pads) // 2 :] or "output_shape" in settings:
                yield node.name
            if settings.get("auto_pad", b"NOTSET").startswith(b"SAME") or any(map(int.__ge__, extra, strides)):
                yield node.name


def assert_close(found: np.ndarray, wanted: np.ndarray, tolerance: float) -> None:
    """Relative to the largest number, or to 1 where that is below."""
    assert found.shape == wanted.shape
    error = np.abs(found.astype(np.float64) - wanted).max(initial=0.0) / max(1.0, np.abs(wanted).max(initial=0.0))
    assert error <= tolerance, f"off by {error}"
