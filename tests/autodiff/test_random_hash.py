"""Random operators as a hash: the numbers' quality, what they hang on, and the operators' own meaning."""

import zlib
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import memonger
from memonger.autodiff.rules import random
from memonger.errors import PlanError
from memonger.ir.emitter import Emitter
from memonger.ir.operators import facts_of
from tests.support import networks

ROWS, COLUMNS = 768, 1024
MASK = 0xFFFFFFFF


class _Hash:
    """The hash of one salt as a model of its own."""

    def __init__(self, dims: tuple[int, ...], salt: int, *, upper: bool = False) -> None:
        self.upper = upper
        graph = ir.Graph([], [], nodes=[], opset_imports={"": 20}, name="hash")
        model = ir.Model(graph, ir_version=10)
        op = Emitter(model)
        bits = random.hashed(op, dims, salt, upper=upper)
        graph.extend(op.nodes)
        graph.outputs.append(bits)
        self._session = networks.stock(ir.to_proto(model), threads=1)

    def __call__(self, key: int, step: int) -> np.ndarray:
        feeds = {"random_key": np.array(key, np.uint32), "step": np.array(step, np.int64)}
        known = {value.name for value in self._session.get_inputs()}
        return self._session.run(None, {name: a for name, a in feeds.items() if name in known})[0]


@pytest.fixture(scope="module", params=[False, True], ids=["all bits", "upper bits"])
def bits(request: pytest.FixtureRequest) -> _Hash:
    return _Hash((ROWS, COLUMNS), 12345, upper=request.param)


def _signs(numbers: np.ndarray) -> np.ndarray:
    """The highest bit, which is what a Dropout of one half sees, as -1 and 1."""
    return (numbers >> 31).astype(np.float64) * 2 - 1


def _mixed(x: int) -> int:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & MASK
    return x ^ (x >> 16)


def _number(start: list[int], place: int, key: int, step: int) -> int:
    """One of the numbers that rows and columns get."""
    return _mixed((_mixed((start[place] + step * 0x9E3779B9) & MASK) + key) & MASK) | 1


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize(("key", "step"), [(0, 0), (7, 3), (2**32 - 1, 2**40 + 5)])
def test_it_is_the_documented_function(key: int, step: int, upper: bool) -> None:
    rows, columns = 6, 8
    start = [int(n) for n in random.counters(99, 2 * (rows + columns))]
    found = _Hash((rows, columns), 99, upper=upper)(key, step)
    for r, c in ((0, 0), (5, 7), (3, 2)):
        a, m = _number(start, r, key, step), _number(start, rows + r, key, step)
        b, n = (_number(start, 2 * rows + k * columns + c, key, step) for k in (0, 1))
        x = ((a + b) * m) & MASK
        assert found[r, c] == ((x if upper else x + (x >> 15)) * n) & MASK


def test_counters_are_splitmix64() -> None:
    """The reference implementation's first numbers from the seed 0, their upper halves."""
    assert [int(n) for n in random.counters(0, 3)] == [0xE220A839, 0x6E789E6A, 0x06C45D18]


def _check_bytes(numbers: np.ndarray, lowest: int) -> None:
    """Chi-square of each byte: 255 degrees of freedom, standard deviation 22.6."""
    for byte in range(lowest, 4):
        counts = np.bincount(((numbers >> (8 * byte)) & 255).ravel().astype(np.int64), minlength=256)
        expected = numbers.size / 256
        assert 140 < float(((counts - expected) ** 2 / expected).sum()) < 400, f"byte {byte}"


def test_bytes_are_uniform(bits: _Hash) -> None:
    lowest = 2 if bits.upper else 0
    _check_bytes(bits(0, 0), lowest)
    _check_bytes(bits(1, 1000), lowest)
    _check_bytes(np.stack([bits(5, step)[:8] for step in range(100)]), lowest)


@pytest.mark.parametrize("ratio", [0.02, 0.1, 0.5, 0.9])
def test_thresholds_have_the_mean_and_variance_of_draws(bits: _Hash, ratio: float) -> None:
    threshold = np.uint32(round(ratio * 2**32))
    shares = np.array([(bits(3, step) < threshold).mean() for step in range(40)])
    error = np.sqrt(ratio * (1 - ratio) / (ROWS * COLUMNS))
    assert abs(shares.mean() - ratio) < 4 * error / np.sqrt(len(shares))
    assert 0.6 < shares.std() / error < 1.5
    rows = (bits(3, 0) < threshold).mean(1)
    assert 0.85 < rows.std() / np.sqrt(ratio * (1 - ratio) / COLUMNS) < 1.15
    columns = (bits(3, 0) < threshold).mean(0)
    assert 0.85 < columns.std() / np.sqrt(ratio * (1 - ratio) / ROWS) < 1.15


def _check_uncorrelated(a: np.ndarray, b: np.ndarray, what: str) -> None:
    assert abs((a * b).mean()) < 4.5 / np.sqrt(a.size), what


def test_neighbours_are_uncorrelated(bits: _Hash) -> None:
    for bit in (31, 24, 20 if bits.upper else 0):
        signs = _signs(bits(0, 0) << np.uint32(31 - bit))
        flat = signs.ravel()
        for lag in (1, 2, 3, 4, 8, 16, 64, COLUMNS, 2 * COLUMNS, 64 * COLUMNS):
            _check_uncorrelated(flat[:-lag], flat[lag:], f"serial, {lag}")


def test_no_two_rows_or_columns_are_alike(bits: _Hash) -> None:
    """Of every pair; the largest of half a million correlations of chance is about 5 of their standard deviations."""
    signs = _signs(bits(2, 9))
    for matrix in (signs, signs.T):
        alike = matrix @ matrix.T / np.sqrt(matrix.shape[1])
        np.fill_diagonal(alike, 0)
        assert np.abs(alike).max() < 6.5
        assert abs(alike.var() - 1) < 0.05


def test_rectangles_of_four_are_uncorrelated(bits: _Hash) -> None:
    """What a sum of a row's and a column's number alone would get wrong."""
    signs = _signs(bits(4, 4))
    for down, right in ((1, 1), (1, 7), (16, 1), (200, 300)):
        product = signs[:-down, :-right] * signs[down:, :-right]
        _check_uncorrelated(product, signs[:-down, right:] * signs[down:, right:], f"{down} x {right}")


def test_steps_keys_and_salts_are_unrelated(bits: _Hash) -> None:
    base = bits(0, 0)
    others = {f"step {s}": bits(0, s) for s in (1, 2, 3, 256, 2**31)}
    others |= {f"key {k}": bits(k, 0) for k in (1, 2, 255, 0x9E3779B9)}
    others |= {f"salt {s}": _Hash((ROWS, COLUMNS), s, upper=bits.upper)(0, 0) for s in (12346, 12345 + 2**16, 0)}
    for name, numbers in others.items():
        assert (numbers == base).mean() < 1e-4, name
        _check_uncorrelated(_signs(numbers), _signs(base), name)
        _check_uncorrelated(_signs(numbers)[1:], _signs(base)[:-1], f"{name}, next row")
        _check_uncorrelated(_signs(numbers)[:, 1:], _signs(base)[:, :-1], f"{name}, next column")


@pytest.mark.parametrize("dims", [(), (1,), (5,), (3, 5, 7), (10007,), (65536,), (2, 1, 50000), (4, 0, 3)])
def test_every_shape_has_numbers(dims: tuple[int, ...]) -> None:
    numbers = _Hash(dims, 1)(0, 0)
    assert numbers.shape == dims
    assert len(np.unique(numbers)) >= 0.999 * numbers.size


def test_few_numbers_are_hashed_for_a_large_tensor() -> None:
    for dims in ((32, 64, 56, 56), (1 << 20,), (8, 1, 1 << 17)):
        left, right = random._split(dims)
        size = int(np.prod(dims))
        assert int(np.prod(left)) * int(np.prod(right)) == size
        assert int(np.prod(left)) + int(np.prod(right)) < 4 * np.sqrt(size)


def _dropout(ratio: float | None, *, n: int = 4096, dtype: str = "float") -> onnx.ModelProto:
    given = "" if ratio is None else ", ratio"
    text = f"""<ir_version: 10, opset_import: ["": 20]>
        g ({dtype}[16,{n}] x) => ({dtype}[16,{n}] y) <float ratio = {{{ratio or 0.5}}}, bool on = {{1}}> {{
            y = Dropout(x{given or ", "}, on)
        }}"""
    return onnx.parser.parse_model(text)


def _training(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    made = ir.to_proto(memonger.differentiate(model, wrt=["x"], **options).ir)
    onnx.checker.check_model(made, full_check=True)
    return made


def _run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = networks.stock(model, threads=1)
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


def _scalars(key: int = 0, step: int = 0) -> dict[str, np.ndarray]:
    return {"random_key": np.array(key, np.uint32), "step": np.array(step, np.int64)}


@pytest.mark.parametrize(("dtype", "ratio"), [("float", 0.25), ("float", None), ("float16", 0.5), ("double", 0.1)])
def test_dropout_drops_and_scales_and_so_does_its_gradient(dtype: str, ratio: float | None) -> None:
    kind = {"float": np.float32, "float16": np.float16, "double": np.float64}[dtype]
    generator = np.random.default_rng(0)
    x, dy = (generator.uniform(1, 2, (16, 4096)).astype(kind) for _ in range(2))
    results = _run(_training(_dropout(ratio, dtype=dtype)), {"x": x, "y.grad": dy, **_scalars()})
    kept, share = results["y"] != 0, 1 - (0.5 if ratio is None else ratio)
    assert abs(kept.mean() - share) < 4 * np.sqrt(share * (1 - share) / x.size)
    tolerance = 2e-3 if dtype == "float16" else 1e-6
    np.testing.assert_allclose(results["y"], np.where(kept, x / share, 0), rtol=tolerance)
    np.testing.assert_allclose(results["x.grad"], np.where(kept, dy / share, 0), rtol=tolerance)


def test_dropout_gives_the_same_numbers_in_every_session_and_others_at_every_step_key_and_node() -> None:
    model = _training(_dropout(0.5))
    x = np.ones((16, 4096), np.float32)
    feeds = {"x": x, "y.grad": x}

    def kept(**scalars: int) -> np.ndarray:
        return _run(model, {**feeds, **_scalars(**scalars)})["y"] != 0

    first = kept()
    np.testing.assert_array_equal(first, kept())
    other = _dropout(0.5)
    other.graph.node[0].name = "another"
    elsewhere = _run(_training(other), {**feeds, **_scalars()})["y"] != 0
    for mask in (kept(step=1), kept(key=1), elsewhere):
        assert abs((mask == first).mean() - 0.5) < 0.01


def test_the_backward_pass_of_dropout_keeps_booleans_alone() -> None:
    made = _training(_dropout(0.5))
    producers = {name: node for node in made.graph.node for name in node.output}
    gradient = [node for node in made.graph.node if node.name.startswith("grad/")]
    read = {name for node in gradient for name in node.input} & producers.keys()
    forward = [producers[name] for name in read if not producers[name].name.startswith("grad/")]
    assert [node.op_type for node in forward] == ["GreaterOrEqual"]


def test_the_mask_of_dropout_says_what_is_kept() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> g (float[8,512] x) => (float[8,512] y, bool[8,512] kept)
        <float ratio = {0.5}, bool on = {1}> { y, kept = Dropout(x, ratio, on) }"""
    )
    x = np.ones((8, 512), np.float32)
    results = _run(_training(model), {"x": x, "y.grad": x, **_scalars()})
    np.testing.assert_array_equal(results["kept"], results["y"] != 0)
    assert 0.4 < results["kept"].mean() < 0.6


@pytest.mark.parametrize("form", ["Dropout(x)", "Dropout(x, ratio)", "Dropout(x, ratio, off)", "Dropout(x, none, on)"])
def test_a_dropout_that_drops_nothing_passes_gradients_on(form: str) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]> g (float[4,4] x) => (float[4,4] y)
        <float ratio = {{0.5}}, float none = {{0.0}}, bool on = {{1}}, bool off = {{0}}> {{ y = {form} }}"""
    )
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    results = _run(_training(model), {"x": x, "y.grad": x})
    np.testing.assert_array_equal(results["y"], x)
    np.testing.assert_array_equal(results["x.grad"], x)


def test_a_ratio_may_be_an_input() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> g (float[16,4096] x, float ratio) => (float[16,4096] y)
        <bool on = {1}> { y = Dropout(x, ratio, on) }"""
    )
    x = np.ones((16, 4096), np.float32)
    made = _training(model)
    for ratio in (0.1, 0.7):
        feeds = {"x": x, "ratio": np.array(ratio, np.float32), "y.grad": x, **_scalars()}
        results = _run(made, feeds)
        assert abs((results["y"] == 0).mean() - ratio) < 0.01
        assert results["y"].max() == pytest.approx(1 / (1 - ratio))
        np.testing.assert_array_equal(results["y"], results["x.grad"])


@pytest.mark.parametrize("keep", [False, True])
def test_whether_dropout_drops_has_to_be_known(keep: bool) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> g (float[4] x, bool on) => (float[4] y)
        <float ratio = {0.5}> { y = Dropout(x, ratio, on) }"""
    )
    with pytest.raises(PlanError, match=r"Dropout \(node 'Dropout_y'\).*training_mode a constant"):
        memonger.differentiate(model, wrt=["x"], keep_random=keep)


def test_a_ratio_out_of_range_is_refused() -> None:
    with pytest.raises(PlanError, match=r"ratio 1.0 must be at least 0"):
        memonger.differentiate(_dropout(1.0), wrt=["x"])


def test_operators_that_are_kept_get_a_seed_and_the_gradient_uses_the_mask() -> None:
    made = _training(_dropout(0.5), keep_random=True)
    dropout = next(node for node in made.graph.node if node.op_type == "Dropout")
    assert {a.name: a.i for a in dropout.attribute}["seed"] == zlib.crc32(b"Dropout_y/0/None") & 0x7FFFFFFF
    assert not {"random_key", "step"} & {v.name for v in made.graph.input}
    x, dy = (np.random.default_rng(k).uniform(1, 2, (16, 4096)).astype(np.float32) for k in (0, 1))
    results = _run(made, {"x": x, "y.grad": dy})
    kept = results["y"] != 0
    assert 0.45 < kept.mean() < 0.55
    np.testing.assert_allclose(results["x.grad"], np.where(kept, 2 * dy, 0))


def test_a_seed_that_is_given_stays() -> None:
    model = _dropout(0.5)
    model.graph.node[0].attribute.append(onnx.helper.make_attribute("seed", 77))
    made = _training(model, keep_random=True)
    dropout = next(node for node in made.graph.node if node.op_type == "Dropout")
    assert [a.i for a in dropout.attribute if a.name == "seed"] == [77]


def _drawn(operator: str, outputs: str, **feeds: np.ndarray) -> np.ndarray:
    """What a random operator gives in a differentiated model; ``w`` is only there to be differentiated by."""
    inputs = "".join(f", float[{','.join(map(str, a.shape))}] {name}" for name, a in feeds.items())
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 20]> g (float[1] w{inputs}) => ({outputs}, float[1] z)'
        f"{{ y = {operator} z = Mul(w, w) }}"
    )
    made = ir.to_proto(memonger.differentiate(model, loss="z", wrt=["w"]).ir)
    onnx.checker.check_model(made, full_check=True)
    assert not [node.op_type for node in made.graph.node if facts_of(node.op_type).random]
    return _run(made, {"w": np.ones(1, np.float32), **feeds, **_scalars(key=5)})["y"]


@pytest.mark.parametrize(
    "operator",
    ["RandomNormal<shape=[300,400], mean=3.0, scale=2.0>()", "RandomNormalLike<mean=3.0, scale=2.0>(x)"],
)
def test_normal_numbers_have_their_moments(operator: str) -> None:
    feeds = {"x": np.zeros((300, 400), np.float32)} if "(x)" in operator else {}
    z = (_drawn(operator, "float[300,400] y", **feeds).astype(np.float64) - 3) / 2
    moments = [float((z**k).mean()) for k in (1, 2, 3, 4)]
    error = 1 / np.sqrt(z.size)
    for found, expected, scale in zip(moments, (0, 1, 0, 3), (1, 2**0.5, 15**0.5, 96**0.5), strict=True):
        assert abs(found - expected) < 4.5 * scale * error
    assert 4.0 < np.abs(z).max() < 6.0
    assert abs((z[:, 1:] * z[:, :-1]).mean()) < 4.5 * error


@pytest.mark.parametrize(("kind", "dtype"), [("double", 11), ("float16", 10), ("float", 1)])
def test_uniform_numbers_fill_their_range(kind: str, dtype: int) -> None:
    y = _drawn(f"RandomUniform<shape=[300,400], low=-1.0, high=3.0, dtype={dtype}>()", f"{kind}[300,400] y")
    assert y.dtype == {"double": np.float64, "float16": np.float16, "float": np.float32}[kind]
    counts = np.bincount(np.clip((y.astype(np.float64) + 1) * 16, 0, 63).astype(int).ravel(), minlength=64)
    assert float(((counts - y.size / 64) ** 2 / (y.size / 64)).sum()) < 120  # 63 degrees of freedom
    assert y.min() >= -1
    assert y.max() <= 3


def test_uniform_like_takes_shape_and_type() -> None:
    y = _drawn("RandomUniformLike(x)", "float[50,60] y", x=np.zeros((50, 60), np.float32))
    assert (y.dtype, y.shape) == (np.dtype(np.float32), (50, 60))
    assert abs(y.mean() - 0.5) < 0.03
    assert y.max() < 1


def test_bernoulli_draws_with_the_given_probabilities() -> None:
    p = np.repeat(np.array([[0.0], [0.2], [0.7], [1.0]], np.float32), 20000, 1)
    y = _drawn("Bernoulli<dtype=7>(x)", "int64[4,20000] y", x=p)
    assert y.dtype == np.int64
    np.testing.assert_allclose(y.mean(1), p[:, 0], atol=0.012)
    assert (y[0] == 0).all()
    assert (y[3] == 1).all()


def test_multinomial_draws_classes_by_their_probabilities() -> None:
    p = np.array([[0.1, 0.2, 0.3, 0.4], [1.0, 0.0, 0.0, 0.0]], np.float32)
    with np.errstate(divide="ignore"):
        y = _drawn("Multinomial<sample_size=30000>(x)", "int32[2,30000] y", x=np.log(p))
    np.testing.assert_allclose(np.bincount(y[0], minlength=4) / 30000, p[0], atol=0.015)
    assert (y[1] == 0).all()


def test_dropout_regularizes_as_torch_does() -> None:
    """The variance of a sum of what is kept, against the formula and against PyTorch's own masks."""
    x = np.ones((16, 4096), np.float32)
    made = _training(_dropout(0.3))
    session = networks.stock(made, threads=1)
    sums = []
    for step in range(30):
        y = session.run(["y"], {"x": x, "y.grad": x, **_scalars(step=step)})[0]
        sums.append(y.sum(1))
    torch.manual_seed(0)
    theirs = torch.stack([torch.nn.functional.dropout(torch.ones(16, 4096), 0.3).sum(1) for _ in range(30)])
    expected = np.sqrt(4096 * 0.3 / 0.7)
    assert np.std(sums) == pytest.approx(expected, rel=0.1)
    assert float(theirs.std()) == pytest.approx(expected, rel=0.1)
