"""Gradients of operators that read and write at indices."""

import numpy as np
import onnx_ir as ir
import pytest
import torch

import memonger
from memonger.autodiff.rules.indexing import FEW_ROWS
from tests.support.gradient_checks import check, gradients, parse, run

MANY = FEW_ROWS + 5


def _indices(shape: tuple[int, ...], size: int, seed: int = 0) -> np.ndarray:
    """Repeated ones and negative ones among them."""
    found = np.random.default_rng(seed).integers(-size, size, shape)
    found.flat[0], found.flat[-1] = -1, size - 1
    return found


@pytest.mark.parametrize("size", [4, MANY])
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("shape", [(6,), (2, 3)])
@pytest.mark.parametrize("kind", ["int64", "int32"])
def test_gather_adds_up_at_repeated_indices(kind: str, shape: tuple[int, ...], axis: int, size: int) -> None:
    dims = [2, 3, 2]
    dims[axis] = size
    taken = [*dims[: axis % 3], *shape, *dims[axis % 3 + 1 :]]
    check(
        f"g (FLOAT[{','.join(map(str, dims))}] x, {kind}[{','.join(map(str, shape))}] i) =>"
        f"(FLOAT[{','.join(map(str, taken))}] y) {{ y = Gather <axis={axis}> (x, i) }}",
        lambda x, i: x.index_select(axis, i.reshape(-1).long() % size).reshape(taken),
        given={"i": _indices(shape, size)},
    )


@pytest.mark.parametrize("numbers", ["2", "-1", "[1] 0", "[2] 1, 2", "[3] 3, 1, 3", "[2] -2, 0"])
def test_gather_at_constant_indices(numbers: str) -> None:
    brackets, _, listed = numbers.rpartition("] ")
    at = [int(n) for n in listed.split(",")]
    shape = f"2,{len(at)},3" if brackets else "2,3"
    training = check(
        f"g (FLOAT[2,4,3] x) => (FLOAT[{shape}] y) <int64{brackets + ']' if brackets else ''} i = {{{listed}}}>"
        "{ y = Gather <axis=1> (x, i) }",
        lambda x: x[:, at] if brackets else x[:, at[0]],
    )
    in_a_row = [n % 4 for n in at] == list(range(at[0] % 4, at[0] % 4 + len(at)))
    assert ("Pad" in [node.op_type for node in training.graph.node]) == in_a_row


def test_an_embedding_gets_the_sums_in_every_run() -> None:
    """onnxruntime's ScatterND adds up wrongly where its threads meet."""
    tokens = np.minimum(np.random.default_rng(0).zipf(1.2, 2048) - 1, 999)
    text = "g (float[1000,64] w, int64[2048] i) => (float[2048,64] y) { y = Gather(w, i) }"
    training = ir.to_proto(memonger.differentiate(parse(text, "float", 20), wrt=["w"]).ir)
    dy = np.random.default_rng(1).standard_normal((2048, 64)).astype(np.float32)
    found = {
        run(training, {"i": tokens, "w": np.zeros((1000, 64), np.float32), "y.grad": dy})["w.grad"].tobytes()
        for _ in range(3)
    }
    wanted = np.zeros((1000, 64))
    np.add.at(wanted, tokens, dy)
    assert len(found) == 1
    np.testing.assert_allclose(np.frombuffer(found.pop(), np.float32).reshape(1000, 64), wanted, atol=1e-3)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather_elements(axis: int) -> None:
    check(
        f"g (FLOAT[3,4] x, int64[3,2] i) => (FLOAT[3,2] y) {{ y = GatherElements <axis={axis}> (x, i) }}",
        lambda x, i: torch.gather(x, axis, i % x.shape[axis]),
        given={"i": _indices((3, 2), (3, 4)[axis])},
    )


def _gather_nd(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return x[tuple(i[..., k] for k in range(i.shape[-1]))]


@pytest.mark.parametrize("size", [3, MANY])
@pytest.mark.parametrize("shape", [(5, 1), (2, 3, 2), (4, 3), (2,)])
def test_gather_nd(shape: tuple[int, ...], size: int) -> None:
    dims = (size, 2, 4)
    taken = (*shape[:-1], *dims[shape[-1] :])
    out = f"FLOAT[{','.join(map(str, taken))}]" if taken else "FLOAT"
    indices = np.stack([_indices(shape[:-1], n, n) if shape[:-1] else np.array(-1) for n in dims[: shape[-1]]], -1)
    check(
        f"g (FLOAT[{size},2,4] x, int64[{','.join(map(str, shape))}] i) => ({out} y) {{ y = GatherND(x, i) }}",
        _gather_nd,
        given={"i": indices},
    )


@pytest.mark.parametrize("depth", [1, 2])
def test_gather_nd_in_batches(depth: int) -> None:
    indices = np.stack([_indices((2, 4), n, n) for n in (3, 5)[:depth]], -1)
    out = "2,4,5" if depth == 1 else "2,4"
    check(
        f"g (FLOAT[2,3,5] x, int64[2,4,{depth}] i) => (FLOAT[{out}] y) {{ y = GatherND <batch_dims=1> (x, i) }}",
        lambda x, i: torch.stack([_gather_nd(x[k], i[k]) for k in range(2)]),
        given={"i": indices},
    )


@pytest.mark.parametrize("wrt", [["x", "u"], ["x"], ["u"]])
@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("reduction", ["none", "add"])
def test_scatter_elements(reduction: str, axis: int, wrt: list[str]) -> None:
    indices = np.array([[2, 0], [0, 1], [1, 2]]) if axis == 0 else np.array([[2, 0], [3, -3], [1, 2]])
    repeated = indices if reduction == "none" else np.abs(indices) // 2

    def function(x: torch.Tensor, i: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        i = i % x.shape[axis]
        return x.scatter(axis, i, u) if reduction == "none" else x.scatter_add(axis, i, u)

    check(
        "g (FLOAT[3,4] x, int64[3,2] i, FLOAT[3,2] u) => (FLOAT[3,4] y)"
        f'{{ y = ScatterElements <axis={axis}, reduction="{reduction}"> (x, i, u) }}',
        function,
        given={"i": repeated},
        wrt=wrt,
    )


@pytest.mark.parametrize("wrt", [["x", "u"], ["x"], ["u"]])
@pytest.mark.parametrize("reduction", ["none", "add"])
def test_scatter_nd(reduction: str, wrt: list[str]) -> None:
    indices = np.array([[0, 1], [2, -1]]) if reduction == "none" else np.array([[1, 1], [1, 1]])
    check(
        "g (FLOAT[3,4,2] x, int64[2,2] i, FLOAT[2,2] u) => (FLOAT[3,4,2] y)"
        f'{{ y = ScatterND <reduction="{reduction}"> (x, i, u) }}',
        lambda x, i, u: x.index_put(tuple(i.T), u, accumulate=reduction == "add"),
        given={"i": indices},
        wrt=wrt,
    )


@pytest.mark.parametrize("wrt", [["x", "u"], ["u"]])
@pytest.mark.parametrize(("reduction", "name"), [("mul", "prod"), ("max", "amax"), ("min", "amin")])
def test_scattered_products_and_extrema(reduction: str, name: str, wrt: list[str]) -> None:
    check(
        "g (FLOAT[3,4] x, int64[3,2] i, FLOAT[3,2] u) => (FLOAT[3,4] y)"
        f'{{ y = ScatterElements <axis=1, reduction="{reduction}"> (x, i, u) }}',
        lambda x, i, u: x.scatter_reduce(1, i, u, name),
        given={"i": np.array([[2, 2], [3, 0], [1, 1]])},
        wrt=wrt,
    )
    check(
        "g (FLOAT[4,2] x, int64[3,1] i, FLOAT[3,2] u) => (FLOAT[4,2] y)"
        f'{{ y = ScatterND <reduction="{reduction}"> (x, i, u) }}',
        lambda x, i, u: x.scatter_reduce(0, i.expand(3, 2), u, name),
        given={"i": np.array([[2], [0], [2]])},
        wrt=wrt,
    )


def test_scattered_products_with_zeros() -> None:
    """Of one zero among the factors the gradient is the product of the others; of two there is none."""
    found = gradients(
        'g (FLOAT[3] x, int64[4] i, FLOAT[4] u) => (FLOAT[3] y) { y = ScatterElements <reduction="mul"> (x, i, u) }',
        {"x": np.array([2.0, 0.0, 3.0]), "i": np.array([0, 1, 1, 2]), "u": np.array([0.0, 5.0, 7.0, 0.0])},
        wrt=["x", "u"],
    )
    assert found["x"].tolist() == [0, 35, 0]
    assert found["u"].tolist() == [2, 0, 0, 3]


@pytest.mark.parametrize(("attributes", "axis"), [("", 1), ("<axis=0>", 0), ("<largest=0, sorted=0>", 1)])
def test_top_k_gives_the_gradient_to_what_was_taken(attributes: str, axis: int) -> None:
    out = "1,5" if axis == 0 else "4,1"
    training = check(  # summed: the order of unsorted ones is anyone's
        f"g (FLOAT[4,5] x) => (FLOAT[{out}] y) <int64[1] k = {{2}}, int64[1] axis = {{{axis}}}>"
        f"{{ v, at = TopK {attributes} (x, k) w = Mul(v, v) y = ReduceSum(w, axis) }}",
        lambda x: torch.topk(x, 2, axis, largest="largest" not in attributes).values.square().sum(axis, keepdim=True),
    )
    assert [node.op_type for node in training.graph.node].count("TopK") == 1


@pytest.mark.parametrize("op", ["Gather(x, i)", "GatherElements(x, i)"])
def test_half_precision_gives_what_single_precision_does(op: str) -> None:
    text = f"g (FLOAT[4] x) => (FLOAT[3] y) <int64[3] i = {{1, 1, 3}}> {{ y = {op} }}"
    x = {"x": np.array([-0.75, -0.25, 0.5, 2.0])}
    half, single = (gradients(text, x, float_type=kind)["x"] for kind in ("float16", "float"))
    assert half.dtype == np.float16
    np.testing.assert_array_equal(half.astype(np.float32), single)
