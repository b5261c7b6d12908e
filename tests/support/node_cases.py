"""The node tests of onnx's backend suite as cases for gradients: one operator each, with its inputs.

Floating inputs become double where the operator takes that, and are moved a little: tests like to stand where a
function has a kink. Inputs whose content decides sizes become constants, as exporters write them.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.backend.test.case import node as node_tests

from memonger.ir.operators import facts_of

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
NUMBERS = (*FLOATS, TensorProto.DOUBLE)
MOVED = 1e-2  # by how much floating inputs are moved, times a normal number


@dataclass(frozen=True, slots=True)
class Case:
    """One test.

    Attributes:
        name: onnx's.
        operator: ``type`` of the node under test, or ``domain::type``.
        model: The model, its floating types double where they can be.
        feeds: A value for each input.
        wrt: The floating inputs, which are differentiated by.
        obstacle: What keeps the test from having a gradient; "" where it has one.
        single: The same in float32, as far as it was in any floating type; None for such a case itself.
        own: The same in the types that the suite has, where those have 16 bits.
    """

    name: str
    operator: str
    model: onnx.ModelProto
    feeds: Mapping[str, np.ndarray]
    wrt: tuple[str, ...]
    obstacle: str = ""
    single: "Callable[[], Case] | None" = None
    own: "Callable[[], Case] | None" = None


def modules() -> list[str]:
    """The suite's modules: one an operator."""
    return sorted(m.name for m in pkgutil.iter_modules(node_tests.__path__))


def cases(names: Iterable[str] | None = None) -> Iterator[Case]:
    """The tests of some modules of the suite, of all of them if None; written-out function bodies are left out."""
    for name in modules() if names is None else names:
        importlib.import_module(f"{node_tests.__name__}.{name}")
    for test in sorted(node_tests._NodeTestCases, key=lambda t: t.name):
        if "_expanded" not in test.name and len(test.model.graph.node):
            yield case_of(test.name, test.model, test.data_sets[0][0])


def case_of(
    name: str, model: onnx.ModelProto, values: Sequence[object], widest: int | None = TensorProto.DOUBLE
) -> Case:
    """A test of the suite as a case, its floating types ``widest`` where the operator takes that; None: as they are."""
    made = onnx.ModelProto.FromString(model.SerializeToString())
    node = next((n for n in made.graph.node if n.op_type != "Constant"), made.graph.node[0])
    operator = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    inputs = dict(zip((v.name for v in made.graph.input), values, strict=False))
    inputs = {k: numpy_helper.to_array(v) if isinstance(v, TensorProto) else v for k, v in inputs.items()}
    feeds = {k: np.asarray(v) for k, v in inputs.items() if isinstance(v, np.ndarray | np.generic | float | int)}
    if len(feeds) < len(made.graph.input) or not all(v.type.HasField("tensor_type") for v in made.graph.input):
        return Case(name, operator, made, feeds, (), "its inputs are sequences, optional or strings")
    if widest is not None:
        _widen(made, node, widest)
    for value in made.graph.input:
        feeds[value.name] = _typed(feeds[value.name], value.type.tensor_type.elem_type)
    _fix(made, node, operator, feeds)
    settings = {node.input[k] for k in facts_of(operator).settings if k < len(node.input)}
    wrt = tuple(
        v.name
        for v in made.graph.input
        if v.type.tensor_type.elem_type in NUMBERS
        and feeds[v.name].size
        and not (facts_of(operator).random and v.name in settings)  # what is drawn changes in jumps
    )
    generator = np.random.default_rng(0)
    for value in made.graph.input:
        if value.name in wrt:
            x = feeds[value.name]
            moved = x.astype(np.float64) + MOVED * generator.standard_normal(x.shape)
            feeds[value.name] = _typed(np.where(np.isfinite(moved), moved, 1.0), value.type.tensor_type.elem_type)
    variant = partial(partial, case_of, name, model, values)
    single, own = (variant(TensorProto.FLOAT), variant(None)) if widest == TensorProto.DOUBLE else (None, None)
    halves = any(v.type.tensor_type.elem_type in HALVES for v in model.graph.input)
    return Case(name, operator, made, feeds, wrt, _obstacle(made, operator, wrt), single, own if halves else None)


def _obstacle(model: onnx.ModelProto, operator: str, wrt: tuple[str, ...]) -> str:
    if facts_of(operator).without_gradient:
        return "its outputs don't change with its inputs, or in jumps only"
    if not wrt:
        return "no floating-point input"
    kinds = [v.type.tensor_type.elem_type for v in model.graph.output]
    return "" if any(is_floating(kind) for kind in kinds) else "no floating-point output"


def is_floating(kind: int) -> bool:
    """Whether an element type is one of floating point, of 4 and 8 bits too."""
    return (kind != TensorProto.UNDEFINED and "FLOAT" in TensorProto.DataType.Name(kind)) or kind == TensorProto.DOUBLE


def _typed(x: np.ndarray, kind: int) -> np.ndarray:
    dtype = ml_dtypes.bfloat16 if kind == TensorProto.BFLOAT16 else onnx.helper.tensor_dtype_to_np_dtype(kind)
    return np.asarray(x).astype(dtype) if kind in NUMBERS else np.asarray(x)


def _widen(model: onnx.ModelProto, node: onnx.NodeProto, widest: int) -> None:
    """Floating types double, or float, wherever the operator's schema allows; a Cast's too."""
    opset = next((o.version for o in model.opset_import if o.domain == node.domain), 1)
    if not onnx.defs.has(node.op_type, opset, node.domain) or has_subgraphs(node):
        return
    schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
    free = {f.type_str: f.types for f in (*schema.inputs, *schema.outputs) if "(" not in f.type_str}
    wide = {
        variable: widest if "tensor(double)" in types else TensorProto.FLOAT
        for variable, types in free.items()
        if "tensor(float)" in types
    }
    for formals, names, values in (
        (schema.inputs, node.input, model.graph.input),
        (schema.outputs, node.output, model.graph.output),
    ):
        formal_of = {name: formals[min(k, len(formals) - 1)] for k, name in enumerate(names)}
        for value in values:
            tensor, formal = value.type.tensor_type, formal_of.get(value.name)
            if formal is not None and formal.type_str in wide and tensor.elem_type in FLOATS:
                tensor.elem_type = wide[formal.type_str]
    for attribute in node.attribute:
        if attribute.name == "to" and attribute.i in FLOATS:
            attribute.i = widest


def _fix(model: onnx.ModelProto, node: onnx.NodeProto, operator: str, feeds: dict[str, np.ndarray]) -> None:
    """Make inputs that decide sizes constants, and all whole numbers of one element: axes, counts."""
    sizes = {node.input[k] for k in facts_of(operator).sized_by if k < len(node.input)}
    for value in list(model.graph.input):
        kind = value.type.tensor_type.elem_type
        whole = kind not in NUMBERS and (feeds[value.name].size == 1 or facts_of(operator).sized_at_run_time)
        if (value.name in sizes or whole) and value.name in feeds:
            model.graph.input.remove(value)
            model.graph.initializer.append(numpy_helper.from_array(feeds.pop(value.name), value.name))


def has_subgraphs(node: onnx.NodeProto) -> bool:
    """Whether the node runs subgraphs."""
    return any(a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for a in node.attribute)
