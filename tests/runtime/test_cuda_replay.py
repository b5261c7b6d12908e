"""Which nodes no CUDA graph may replay: those whose kernels copy from the host (onnxruntime 1.31.1, on a stand-in)."""

import onnx_ir as ir
import pytest

from memonger.runtime.cuda.replay import MANY, copies_from_host


def _value(*dims: int) -> ir.Value:
    return ir.Value(name="x" + "_".join(map(str, dims)), shape=ir.Shape(dims))


def _split(axis: int, *sizes: int) -> ir.Node:
    shape = [2, 6, 4]
    outputs = [_value(*(size if at == axis % 3 else dim for at, dim in enumerate(shape))) for size in sizes]
    return ir.Node("", "Split", [_value(*shape)], [ir.AttrInt64("axis", axis)], outputs=outputs)


@pytest.mark.parametrize(
    ("left", "right", "copies"),
    [
        ((4, 5), (5, 6), False),
        ((4, 5), (3, 5, 6), True),
        ((3, 4, 5), (5, 6), False),
        ((3, 4, 5), (3, 5, 6), False),
        ((1, 4, 5), (3, 5, 6), True),
        ((3, 4, 5), (1, 5, 6), False),
        ((2, 3, 4, 5), (2, 3, 5, 6), False),
        ((2, 1, 4, 5), (2, 3, 5, 6), True),
        ((2, 3, 4, 5), (3, 5, 6), True),
        ((5,), (3, 5, 6), True),
        ((4, 5), (1, 5, 6), True),
        ((1, 4, 5), (1, 5, 6), False),
        ((2, 3, 4, 5), (1, 3, 5, 6), True),
        ((2, 3, 4, 5), (1, 5, 6), False),
    ],
)
def test_products_of_unequal_stacks(left: tuple[int, ...], right: tuple[int, ...], copies: bool) -> None:
    node = ir.Node("", "MatMul", [_value(*left), _value(*right)])
    assert copies_from_host([ir.Node("", "Relu", [_value(3)]), node]) == (node if copies else None)


def test_products_of_unknown_sizes_are_not_trusted() -> None:
    node = ir.Node("", "MatMul", [ir.Value(name="a"), _value(3, 5, 6)])
    assert copies_from_host([node]) is node


def test_unequal_parts_along_any_axis_but_the_last() -> None:
    assert copies_from_host([_split(1, 3, 3), _split(2, 1, 3), _split(-1, 3, 1)]) is None
    unequal = _split(1, 2, 4)
    assert copies_from_host([unequal]) is unequal


def test_recurrent_layers_and_many_parts() -> None:
    lstm = ir.Node("", "LSTM", [_value(3, 1, 2)])
    assert copies_from_host([lstm]) is lstm
    many = ir.Node("", "Concat", [_value(2)] * (MANY + 1), [ir.AttrInt64("axis", 0)])
    assert copies_from_host([many]) is many
    assert copies_from_host([ir.Node("", "Concat", [_value(2)] * MANY, [ir.AttrInt64("axis", 0)])]) is None
