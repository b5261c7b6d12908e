"""What a node's run costs: FLOPs against published figures and PyTorch's counter, bytes by hand."""

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

import models
from memonger.graph import costs
from memonger.graph.graph import Graph, from_model
from memonger.lowering.lowered import portable
from memonger.model.load import load
from tests.support import networks

Dims = tuple[int | str, ...]


def node_of(
    op: str, inputs: list[Dims | None], output: Dims | None, domain: str = "", **attributes: int | str
) -> ir.Node:
    """A node whose values have these shapes; None: an input left out, an output of unknown shape."""
    values = [None if dims is None else value_of(f"i{k}", dims) for k, dims in enumerate(inputs)]
    made = [ir.AttrInt64(k, v) if isinstance(v, int) else ir.AttrString(k, v) for k, v in attributes.items()]
    node = ir.Node(domain, op, values, made)
    node.outputs[0].shape = None if output is None else ir.Shape(output)
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    return node


def value_of(name: str, dims: Dims) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(dims), type=ir.TensorType(ir.DataType.FLOAT))


# Multiply-adds of one image of 224 by 224 as their papers or torchvision have them, in units of 10^9. He et al. 2015
# leave out ResNets' projections, torchvision doesn't.
PUBLISHED = {
    "alexnet": 0.71,
    "vgg16": 15.47,
    "resnet18": 1.81,
    "resnet50": 4.09,
    "resnet152": 11.51,
    "densenet121": 2.83,
    "mobilenet_v2": 0.301,
    "vit_b16": 17.56,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_networks_have_their_published_flops(name: str) -> None:
    model = load(models.build_ir(name, batch=1)).ir
    counted = sum(costs.flops(node) for node in model.graph)
    assert counted / 2e9 == pytest.approx(PUBLISHED[name], rel=0.01)


def test_flops_grow_with_the_batch() -> None:
    one, four = (
        sum(costs.flops(node) for node in load(models.build_ir("mobilenet_v2", batch=batch, image=64)).ir.graph)
        for batch in (1, 4)
    )
    assert four == 4 * one


@pytest.mark.parametrize("name", ["unet"])
def test_exported_modules_have_the_flops_pytorch_counts(name: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    from torch.utils.flop_counter import FlopCounterMode

    from tests.support import torch_networks

    module, x = torch_networks.build(name).eval(), torch_networks.data(name)[0]
    with FlopCounterMode(display=False) as counter:
        module(x)
    counted = sum(costs.flops(node) for node in torch_networks.exported(name).ir.graph)
    assert counted == counter.get_total_flops()


CONVOLUTIONS: list[dict[str, Any]] = [
    {},
    {"stride": 2},
    {"padding": 1, "dilation": 2},
    {"groups": 4},
    {"groups": 8, "padding": (0, 2)},
]


@pytest.mark.parametrize("settings", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
def test_convolutions_count_as_pytorchs(op: str, settings: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    make = torch.nn.Conv2d if op == "Conv" else torch.nn.ConvTranspose2d
    module = make(8, 16, (3, 5), **settings).to("meta")
    x = torch.empty(2, 8, 17, 19, device="meta")
    with FlopCounterMode(display=False) as counter:
        y = module(x)
    node = node_of(op, [tuple(x.shape), tuple(module.weight.shape), (16,)], tuple(y.shape))
    assert costs.flops(node) == counter.get_total_flops()


EINSUMS = [
    ("bij,bjk->bik", [(2, 3, 4), (2, 4, 5)], 2 * 2 * 3 * 4 * 5),
    ("ij , jk", [(3, 4), (4, 5)], 2 * 3 * 4 * 5),
    ("i,j->ij", [(3,), (4,)], 2 * 3 * 4),
    ("...ij,...jk->...ik", [(7, 1, 3, 4), (6, 4, 5)], 2 * 7 * 6 * 3 * 4 * 5),
    ("ij...,jk->ik...", [(3, 4, 6), (4, 5)], 2 * 3 * 4 * 6 * 5),
    ("bhqd,bhkd->bhqk", [(2, 3, 4, 5), (2, 3, 1, 5)], 2 * 2 * 3 * 4 * 5),
    ("ij->ji", [(3, 4)], 0),
]


@pytest.mark.parametrize(("equation", "inputs", "expected"), EINSUMS, ids=[each[0] for each in EINSUMS])
def test_einsum_runs_over_every_combination_of_indices(equation: str, inputs: list[Dims], expected: int) -> None:
    assert costs.flops(node_of("Einsum", [*inputs], None, equation=equation)) == expected


_MS = "com.microsoft"
BY_HAND = [
    (node_of("MatMul", [(7,), (7,)], ()), 2 * 7),
    (node_of("MatMul", [(5, 2, 3, 4), (4, 6)], (5, 2, 3, 6)), 2 * 5 * 2 * 3 * 4 * 6),
    (node_of("MatMulInteger", [(3, 4), (4, 6)], (3, 6)), 2 * 3 * 4 * 6),
    (node_of("QLinearMatMul", [(3, 4), (), (), (4, 6), (), (), (), ()], (3, 6)), 2 * 3 * 4 * 6),
    (node_of("FusedMatMul", [(2, 4, 3), (2, 4, 6)], (2, 3, 6), _MS, transA=1), 2 * 2 * 3 * 4 * 6),
    (node_of("FusedMatMul", [(2, 3, 4), (2, 6, 4)], (2, 3, 6), _MS, transB=1), 2 * 2 * 3 * 4 * 6),
    (node_of("Gemm", [(3, 4), (4, 6), (6,)], (3, 6)), 2 * 3 * 4 * 6),
    (node_of("Gemm", [(4, 3), (6, 4)], (3, 6), transA=1, transB=1), 2 * 3 * 4 * 6),
    (node_of("FusedGemm", [(4, 3), (4, 6), (3, 6)], (3, 6), _MS, transA=1), 2 * 3 * 4 * 6),
    (node_of("MatMulNBits", [(3, 32), (6, 1, 16), (6,)], (3, 6), _MS, K=32, N=6), 2 * 3 * 32 * 6),
    (node_of("QLinearConv", [(1, 4, 8, 8), (), (), (6, 4, 3, 3)], (1, 6, 6, 6)), 2 * 6 * 36 * 4 * 9),
    (node_of("ConvInteger", [(1, 4, 8), (6, 4, 3)], (1, 6, 6)), 2 * 6 * 6 * 4 * 3),
    (node_of("FusedConv", [(1, 4, 8), (6, 2, 3), (6,)], (1, 6, 6), _MS, group=2), 2 * 6 * 6 * 2 * 3),
    (node_of("Conv", [(1, 16, 8), (32, 16, 3)], (1, 32, 6), "com.microsoft.nchwc"), 2 * 32 * 6 * 16 * 3),
    # 5 steps of 2 sequences; 4 gates, 3 inputs, 6 hidden; both directions
    (node_of("LSTM", [(5, 2, 3), (2, 24, 3), (2, 24, 6)], None), 2 * 5 * 2 * 2 * 24 * (3 + 6)),
    (node_of("GRU", [(5, 2, 3), (1, 18, 3), (1, 18, 6)], None), 2 * 5 * 2 * 18 * (3 + 6)),
    (node_of("RNN", [(2, 5, 3), (1, 6, 3), (1, 6, 6)], None, layout=1), 2 * 5 * 2 * 6 * (3 + 6)),
    # 2 sequences, 4 heads, 8 queries of 16; 10 keys, values of 32, then 20 keys more
    (
        node_of("Attention", [(2, 4, 8, 16), (2, 4, 10, 16), (2, 4, 10, 32)], (2, 4, 8, 32)),
        2 * 2 * 4 * 8 * 10 * (16 + 32),
    ),
    (node_of("Attention", [(2, 8, 64), (2, 10, 64), (2, 10, 64)], (2, 8, 64)), 2 * 2 * 8 * 10 * (64 + 64)),
    (
        node_of("Attention", [(2, 8, 64), (2, 10, 64), (2, 10, 64), None, (2, 4, 20, 16)], (2, 8, 64)),
        2 * 2 * 8 * 30 * (64 + 64),
    ),
    (node_of("MultiHeadAttention", [(2, 8, 64), (2, 10, 64)], (2, 8, 64), _MS), 2 * 2 * 8 * 10 * (64 + 64)),
    (node_of("Attention", [(2, 8, 64), (64, 192)], (2, 8, 64), _MS), 2 * 2 * 8 * 64 * 192 + 4 * 2 * 8 * 8 * 64),
    (node_of("Relu", [(3, 4)], (3, 4)), 0),
    (node_of("Conv", [(1, 4, 8), (6, 4, 3)], (1, 6, 6), "somebody.else"), 0),
]


@pytest.mark.parametrize(("node", "expected"), BY_HAND, ids=[node.op_type for node, _ in BY_HAND])
def test_products_count_as_by_hand(node: ir.Node, expected: int) -> None:
    assert costs.flops(node) == expected


@pytest.mark.parametrize(
    "node",
    [
        node_of("Conv", [(1, 4, 8), (6, 4, 3)], ("batch", 6, 6)),
        node_of("Conv", [(1, 4, 8), (6, 4, 3)], None),
        node_of("MatMul", [("rows", 4), (4, 6)], (3, 6)),
        node_of("MultiHeadAttention", [(2, 8, 64), None], (2, 8, 64), _MS),
        node_of("LSTM", [(5, 2, 3)], None),
    ],
    ids=["symbolic output", "unknown output", "symbolic input", "missing input", "no weights"],
)
def test_without_static_shapes_bytes_decide(node: ir.Node) -> None:
    assert costs.flops(node) == 0
    assert costs.estimate(node, [100, 20], [7]) == 127


def test_the_dearer_of_bytes_and_flops_counts() -> None:
    wide = node_of("MatMul", [(100, 100), (100, 100)], (100, 100))
    assert costs.estimate(wide, [40_000, 40_000], [40_000]) == 2e6 / costs.INTENSITY > 120_000
    narrow = node_of("MatMul", [(1, 100), (100, 100)], (1, 100))
    assert costs.estimate(narrow, [400, 40_000], [400]) == 40_800 > 2e4 / costs.INTENSITY


@pytest.mark.parametrize(
    ("op", "read", "written", "expected"),
    [
        ("Gather", [1_000_000, 80], [400], 880),  # a table, of which some rows are read
        ("Gather", [100, 80], [400], 580),
        ("Slice", [1_000_000, 8, 8], [400], 816),
        ("Shape", [1_000_000], [32], 32),
        ("Relu", [1_000_000], [1_000_000], 2_000_000),
    ],
)
def test_only_what_moves_counts(op: str, read: list[int], written: list[int], expected: int) -> None:
    node = node_of(op, [(1,)] * len(read), (1,))
    assert costs.estimate(node, read, written) == expected


def graph_of(nodes: list[Any], inputs: dict[str, Any], outputs: dict[str, Any], **weights: np.ndarray) -> Graph:
    return from_model(portable(load(networks.model_of(nodes, inputs, outputs, **weights))).model)


def test_views_cost_nothing_and_a_transposition_its_bytes() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Reshape", ["a", "to"], ["b"]),
        helper.make_node("Transpose", ["b"], ["c"], perm=[1, 0]),
        helper.make_node("Split", ["c"], ["y", "z"], axis=0, num_outputs=2),
    ]
    graph = graph_of(nodes, {"x": [256]}, {"y": [8, 16], "z": [8, 16]}, to=np.array([16, 16]))
    assert graph.ops == ("Relu", "Reshape", "Transpose", "Split")
    assert graph.costs == (2048, 0, 2048, 2048)


def test_a_view_that_is_copied_costs_its_bytes() -> None:
    nodes = [helper.make_node("Flatten", ["x"], ["y"], axis=1)]  # of an input, which isn't in the arena
    assert graph_of(nodes, {"x": [16, 16]}, {"y": [16, 16]}).costs == (2048,)


def branches(inner: int) -> ir.Node:
    """An If with a product of these square matrices in each branch, one of them in an If again."""
    product = helper.make_node("MatMul", ["a", "a"], ["b"])
    outputs = [helper.make_tensor_value_info("b", TensorProto.FLOAT, [inner, inner])]
    branch = helper.make_graph([product], "branch", [], outputs)
    both = {"then_branch": branch, "else_branch": branch}
    again = helper.make_graph([helper.make_node("If", ["c"], ["b"], **both)], "again", [], outputs)
    node = helper.make_node("If", ["c"], ["y"], name="choice", then_branch=branch, else_branch=again)
    inputs = [
        helper.make_tensor_value_info("a", TensorProto.FLOAT, [inner, inner]),
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
    ]
    result = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [inner, inner])]
    model = helper.make_model(helper.make_graph([node], "test", inputs, result), ir_version=10)
    return next(iter(ir.from_proto(model).graph))


def test_bodies_count_once_whatever_their_depth() -> None:
    assert costs.flops(branches(8)) == 3 * 2 * 8**3
    assert costs.estimate(branches(256), [1, 1], [1]) == pytest.approx(3 * 2 * 256**3 / costs.INTENSITY)
    assert costs.estimate(branches(8), [9_000], [1]) == 9_001


def test_a_deep_body_is_no_recursion() -> None:
    graph = ir.Graph([], [], nodes=[node_of("MatMul", [(2, 2), (2, 2)], (2, 2))])
    for _ in range(3000):
        graph = ir.Graph([], [], nodes=[ir.Node("", "If", [], [ir.AttrGraph("then_branch", graph)])])
    assert costs.flops(next(iter(graph))) == 16


def test_a_recomputed_convolution_is_dearer_than_what_follows_it() -> None:
    graph = from_model(portable(load(models.build_ir("resnet50", batch=4, image=64))).model)
    cost: dict[str, float] = {}
    for op, each in zip(graph.ops, graph.costs, strict=True):
        cost[op] = cost.get(op, 0.0) + each
    assert cost["Conv"] > 3 * cost["Relu"]
    assert math.isfinite(sum(graph.costs))
    assert all(each >= 0 for each in graph.costs)
