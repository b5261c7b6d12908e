"""The table of operator facts: rows are for operators that exist, and an operator of another domain has its own."""

import onnx
import onnx_ir as ir
import onnxruntime

from memonger.autodiff.registry import RULES
from memonger.graph import costs
from memonger.ir.model import Model
from memonger.ir.operators import OPERATORS, Operator, facts, facts_of, operator_name
from memonger.model import parameters
from memonger.shapes.inference import input_independent, run_time_sized


def test_every_row_is_of_an_operator_with_these_inputs() -> None:
    known = onnxruntime.capi.onnxruntime_pybind11_state.get_all_operator_schema()
    inputs = {f"{schema.domain}::{schema.name}": len(schema.inputs) for schema in known}
    standard = sorted((len(s.inputs), s.name) for s in onnx.defs.get_all_schemas_with_history() if not s.domain)
    inputs |= {name: count for count, name in standard}  # at most, in any version
    for name, row in OPERATORS.items():
        assert row != Operator(), name
        assert name in inputs
        assert all(0 <= i < inputs[name] for i in (*row.sized_by, *row.settings, *row.once_attributes)), name


def test_no_operator_has_a_gradient_rule_and_is_without_a_gradient() -> None:
    assert not [name for name in RULES if facts_of(name).without_gradient]


def test_an_operator_without_a_row_has_no_facts() -> None:
    assert facts(ir.Node("", "Conv", [])) == Operator()
    assert facts(ir.Node("ai.onnx", "Relu", [])).cheap


def _other(op_type: str, *inputs: ir.Value, outputs: int = 1) -> ir.Node:
    return ir.Node("com.example", op_type, inputs, num_outputs=outputs)


def test_an_operator_of_another_domain_with_the_same_name_has_no_facts() -> None:
    for name in (name for name in OPERATORS if "::" not in name):
        node = _other(name)
        assert operator_name(node) == f"com.example::{name}"
        assert facts(node) == Operator(), name


def test_a_weight_read_by_another_domains_operator_is_trained() -> None:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2]))
    weight = ir.tensor([1.0, 2.0], ir.DataType.FLOAT, name="w")
    w = ir.Value(name="w", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2]), const_value=weight)
    node = _other("Clip", x, w)
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=[w], opset_imports={"": 20, "com.example": 1})
    assert parameters.trainable(Model(ir.Model(graph, ir_version=10), "model")) == ("w",)


def test_sizes_of_another_domains_operators_are_not_taken_for_onnxs() -> None:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2]))
    nodes = [_other("NonZero", x), _other("Reshape", x, x), _other("Shape", x)]
    for number, node in enumerate(nodes):
        node.outputs[0].name = f"y{number}"
    graph = ir.Graph([x], nodes[0].outputs, nodes=nodes, opset_imports={"": 20, "com.example": 1})
    model = ir.Model(graph, ir_version=10)
    assert run_time_sized(model) == set()
    assert input_independent(model) == set()


def test_another_domains_operator_reads_all_of_its_input() -> None:
    assert costs.estimate(ir.node("Slice", []), [1000], [8]) == 16
    assert costs.estimate(_other("Slice"), [1000], [8]) == 1008
