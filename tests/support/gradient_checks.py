"""Checks gradients against PyTorch's autograd in float32, and against finite differences in float64.

A case is an ONNX model as text, with FLOAT where its floating-point type stands, and the same as a PyTorch function:

    check("g (FLOAT[2,3] a, FLOAT[3] b) => (FLOAT[2,3] y) { y = Mul(a, b) }", lambda a, b: a * b)

Float64 runs on onnxruntime, or where it has no kernel on onnx.reference (`reference=True`).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx.reference import ReferenceEvaluator

import memonger
from tests.support import networks
from tests.support.reference_kernels import KERNELS

STEP = 1e-5  # of the finite differences, in float64: their error is about STEP²
Arrays = dict[str, np.ndarray]


def parse(text: str, float_type: str, opset: int) -> onnx.ModelProto:
    """The case's model, with `float`, `double` or `float16` for FLOAT."""
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": {opset}]>\n' + re.sub(r"\bFLOAT\b", float_type, text)
    )


def check(
    text: str,
    function: Callable[..., Any] | None,
    *,
    given: Mapping[str, np.ndarray] | None = None,
    wrt: Sequence[str] | None = None,
    draw: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray] | None = None,
    reference: bool = False,
    differences: bool = True,
    tolerance: float = 1e-4,
    opset: int = 20,
    seed: int = 0,
) -> onnx.ModelProto:
    """Check the gradients of a model's float outputs by its float inputs.

    Args:
        text: The model, see above.
        function: The same on torch tensors, inputs in the model's order; None leaves the comparison with PyTorch out.
        given: Inputs that can't be drawn: indices, masks. Floats among them are cast to the type under test.
        wrt: Inputs to differentiate by; None: all of floating-point type.
        draw: Draws a float input: `draw(generator, shape)`; normal numbers if None.
        reference: Use onnx.reference for float64.
        differences: Compare with finite differences; not where nobody computes the model in float64.
        tolerance: Relative to the largest gradient, in float32.
        opset: The model's.
        seed: Of inputs and output gradients.

    Returns: the float32 training model.
    """
    generator = np.random.default_rng(seed)
    model = parse(text, "double", opset)
    inputs = {v.name: _array(v, given or {}, draw, generator) for v in model.graph.input}
    names = list(wrt) if wrt is not None else [n for n, a in inputs.items() if a.dtype == np.float64]
    if differences:
        _check_differences(model, inputs, names, reference, generator)
    single = parse(text, "float", opset)
    training = _differentiated(single, names)
    if function is not None:
        _check_torch(training, inputs, names, function, tolerance, generator)
    return training


def gradients(
    text: str,
    given: Mapping[str, np.ndarray],
    *,
    wrt: Sequence[str] | None = None,
    float_type: str = "float",
    opset: int = 20,
) -> Arrays:
    """The gradients of the sum of a model's float outputs, by input: at ties and edges, where `check` can't go."""
    model = parse(text, float_type, opset)
    training = _differentiated(model, list(wrt or given))
    inputs = {v.name: v for v in training.graph.input}
    feeds = {k: _array(inputs[k], given, None, np.random.default_rng(0)) for k in given if k in inputs}
    ones = {
        k: np.ones([d.dim_value for d in v.type.tensor_type.shape.dim], _numpy_type(v))
        for k, v in inputs.items()
        if k.endswith(".grad")
    }
    results = run(training, {**feeds, **ones})
    return {k.removesuffix(".grad"): v for k, v in results.items() if k.endswith(".grad")}


def _numpy_type(value: onnx.ValueInfoProto) -> np.dtype:
    return onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)


def _array(
    value: onnx.ValueInfoProto,
    given: Mapping[str, np.ndarray],
    draw: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray] | None,
    generator: np.random.Generator,
) -> np.ndarray:
    dtype = _numpy_type(value)
    if value.name in given:
        return np.asarray(given[value.name], dtype)
    shape = tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
    assert dtype == np.float64, f"give a value for {value.name}"
    return np.asarray(draw(generator, shape) if draw else generator.standard_normal(shape), np.float64)


def _differentiated(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    made = ir.to_proto(memonger.differentiate(model, wrt=names).ir)
    onnx.checker.check_model(made, full_check=True)
    assert {node.domain for node in made.graph.node} <= {""}
    return made


def run(model: onnx.ModelProto, feeds: Arrays, reference: bool = False) -> Arrays:
    """All outputs of a model, as written: no optimizer."""
    names = [o.name for o in model.graph.output]
    wanted = {i.name for i in model.graph.input}
    feeds = {k: np.asarray(v) for k, v in feeds.items() if k in wanted}
    if reference:
        return dict(zip(names, ReferenceEvaluator(model, new_ops=KERNELS).run(None, feeds), strict=True))
    return dict(zip(names, networks.stock(model, "ORT_DISABLE_ALL").run(None, feeds), strict=True))


def _seeds(model: onnx.ModelProto, generator: np.random.Generator) -> Arrays:
    """Random gradients for the outputs, by input name."""
    found = {}
    for value in model.graph.input:
        if value.name.endswith(".grad"):
            shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            found[value.name] = np.asarray(generator.standard_normal(shape))
    return found


def _check_differences(
    model: onnx.ModelProto, inputs: Arrays, names: Sequence[str], reference: bool, generator: np.random.Generator
) -> None:
    """⟨gradient, direction⟩ against the change of ⟨output, its gradient⟩ along a random direction."""
    training = _differentiated(model, names)
    seeds = _seeds(training, generator)
    results = run(training, {**inputs, **seeds}, reference)
    assert {f"{n}.grad" for n in names} <= set(results), f"gradients are missing: {sorted(results)}"

    def projected(shifted: Arrays) -> float:
        outputs = run(model, shifted, reference)
        return sum(float(np.sum(outputs[k.removesuffix(".grad")] * seed)) for k, seed in seeds.items())

    for name in names:
        direction = np.asarray(generator.standard_normal(inputs[name].shape))
        up, down = (projected({**inputs, name: inputs[name] + s * direction}) for s in (STEP, -STEP))
        expected, found = (up - down) / (2 * STEP), float(np.sum(results[f"{name}.grad"] * direction))
        scale = max(1.0, abs(expected), float(np.abs(results[f"{name}.grad"]).max(initial=0.0)))
        assert abs(expected - found) < 1e-6 * scale, f"{name}: finite differences give {expected}, the gradient {found}"


def _check_torch(
    training: onnx.ModelProto,
    inputs: Arrays,
    names: Sequence[str],
    function: Callable[..., Any],
    tolerance: float,
    generator: np.random.Generator,
) -> None:
    feeds = {k: v.astype(np.float32) if v.dtype == np.float64 else v for k, v in inputs.items()}
    seeds = {k: v.astype(np.float32) for k, v in _seeds(training, generator).items()}
    results = run(training, {**feeds, **seeds})
    tensors = {k: torch.from_numpy(np.array(v)) for k, v in feeds.items()}
    for name in names:
        tensors[name].requires_grad_()
    outputs = function(*tensors.values())
    outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
    floats = [o for o in outputs if o.is_floating_point()]
    grads = torch.autograd.grad(
        floats, [tensors[n] for n in names], [torch.from_numpy(s) for s in seeds.values()], allow_unused=True
    )
    for name, expected in zip(names, grads, strict=True):
        wanted = np.zeros_like(feeds[name]) if expected is None else expected.numpy()
        found = results[f"{name}.grad"]
        scale = max(1.0, float(np.abs(wanted).max(initial=0.0)))
        error = float(np.abs(found - wanted).max(initial=0.0)) / scale
        assert error < tolerance, f"{name}: differs from PyTorch's gradient by {error} of {scale}"
