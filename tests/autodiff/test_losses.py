"""Losses: values and gradients against PyTorch's, and what can't be a loss."""

import logging
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import memonger
from memonger.errors import PlanError
from tests.support.gradient_checks import run

Loss = memonger.SoftmaxCrossEntropy | memonger.BinaryCrossEntropy | memonger.MeanSquaredError | memonger.HuberLoss


def _model(dims: tuple[int, ...], body: str = "y = Identity(x)", kind: str = "float") -> onnx.ModelProto:
    shape = ",".join(map(str, dims))
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 20]> g ({kind}[{shape}] x) => ({kind}[{shape}] y) {{ {body} }}'
    )


def _run(
    model: onnx.ModelProto, loss: str | Loss, **feeds: np.ndarray
) -> tuple[dict[str, np.ndarray], onnx.ModelProto]:
    made = ir.to_proto(memonger.differentiate(model, loss=loss, wrt=["x"]).ir)
    onnx.checker.check_model(made, full_check=True)
    return run(made, feeds), made


def _check(
    results: dict[str, np.ndarray], x: np.ndarray, function: Callable[[torch.Tensor], torch.Tensor], tolerance: float
) -> None:
    tensor = torch.from_numpy(x.copy()).requires_grad_()
    expected = function(tensor)
    expected.backward()
    np.testing.assert_allclose(results["loss"], expected.detach().numpy(), rtol=tolerance, atol=tolerance)
    assert results["loss"].shape == ()
    assert tensor.grad is not None
    wanted = tensor.grad.numpy()
    assert results["x.grad"].dtype == x.dtype
    np.testing.assert_allclose(results["x.grad"], wanted, atol=tolerance * max(1e-3, float(np.abs(wanted).max())))


def _scores(dims: tuple[int, ...], scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(0).standard_normal(dims) * scale).astype(np.float32)


def _labels(dims: tuple[int, ...], classes: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, classes, dims)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignore", [None, 2, -100])
@pytest.mark.parametrize("dims", [(7, 5), (3, 5, 4), (2, 5, 3, 2)])
def test_softmax_cross_entropy_is_pytorchs(
    dims: tuple[int, ...], ignore: int | None, smoothing: float, reduction: str
) -> None:
    x, labels = _scores(dims), _labels((dims[0], *dims[2:]), dims[1])
    if ignore is not None:
        labels.reshape(-1)[::3] = ignore
    loss = memonger.SoftmaxCrossEntropy(reduction=reduction, ignore_index=ignore, label_smoothing=smoothing)
    results, _ = _run(_model(dims), loss, x=x, labels=labels)
    options = {} if ignore is None else {"ignore_index": ignore}
    _check(
        results,
        x,
        lambda t: F.cross_entropy(
            t, torch.from_numpy(labels), reduction=reduction, label_smoothing=smoothing, **options
        ),
        1e-5,
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignore", [None, 2])
def test_class_weights_are_pytorchs(ignore: int | None, smoothing: float, reduction: str) -> None:
    x, labels, weights = _scores((3, 5, 4)), _labels((3, 4), 5), [0.5, 2.0, 0.0, 1.0, 3.0]
    loss = memonger.SoftmaxCrossEntropy(
        reduction=reduction, ignore_index=ignore, label_smoothing=smoothing, class_weights=weights
    )
    results, _ = _run(_model((3, 5, 4)), loss, x=x, labels=labels)
    options = {"reduction": reduction, "label_smoothing": smoothing, "weight": torch.tensor(weights)}
    if ignore is not None:
        options["ignore_index"] = ignore
    _check(results, x, lambda t: F.cross_entropy(t, torch.from_numpy(labels), **options), 1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("loss", "function"),
    [
        (memonger.SoftmaxCrossEntropy, F.cross_entropy),
        (memonger.BinaryCrossEntropy, F.binary_cross_entropy_with_logits),
        (memonger.MeanSquaredError, F.mse_loss),
        (memonger.MeanAbsoluteError, F.l1_loss),
        (memonger.HuberLoss, F.huber_loss),
    ],
)
def test_weights_of_samples_multiply_their_losses(
    loss: Callable[..., Loss], function: Callable[..., torch.Tensor], reduction: str
) -> None:
    x, weights = _scores((6, 5)), np.array([0, 1, 2, 0.5, 1, 3], np.float32)
    labels = loss is memonger.SoftmaxCrossEntropy
    target = _labels((6,), 5) if labels else np.random.default_rng(2).random((6, 5)).astype(np.float32)
    built = loss(reduction=reduction, sample_weights="weights")
    results, _ = _run(_model((6, 5)), built, x=x, weights=weights, **{"labels" if labels else "target": target})

    def expected(t: torch.Tensor) -> torch.Tensor:
        each = function(t, torch.from_numpy(target), reduction="none")
        weighted = each * torch.from_numpy(weights if labels else weights[:, None])
        return weighted.mean() if reduction == "mean" else weighted.sum()

    _check(results, x, expected, 1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_of_differences_are_pytorchs(reduction: str) -> None:
    x, t = _scores((5, 4, 3)), _scores((5, 4, 3))[::-1].copy()
    x[0] = t[0]
    for loss, function in (
        (memonger.MeanAbsoluteError(reduction=reduction), F.l1_loss),
        (memonger.HuberLoss(delta=0.7, reduction=reduction), lambda *a, **k: F.huber_loss(*a, delta=0.7, **k)),
        (
            memonger.HuberLoss(delta=2.5, smooth_l1=True, reduction=reduction),
            lambda *a, **k: F.smooth_l1_loss(*a, beta=2.5, **k),
        ),
    ):
        results, _ = _run(_model((5, 4, 3)), loss, x=x, target=t)
        _check(results, x, lambda s, f=function: f(s, torch.from_numpy(t), reduction=reduction), 1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_triplet_loss_is_pytorchs(reduction: str) -> None:
    body = "a = Mul(x, x) b = Sin(x) c = Neg(x)"
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> g (float[7,5] x) => (float[7,5] c, float[7,5] b, float[7,5] a) '
        f"{{ {body} }}"
    )
    x = _scores((7, 5), 1.0)
    loss = memonger.TripletMarginLoss(anchor="a", positive="b", negative="c", margin=0.8, reduction=reduction)
    results, _ = _run(model, loss, x=x)
    _check(results, x, lambda t: F.triplet_margin_loss(t * t, t.sin(), -t, 0.8, reduction=reduction), 1e-5)
    results, _ = _run(model, "triplet_margin", x=x)
    _check(results, x, lambda t: F.triplet_margin_loss(-t, t.sin(), t * t), 1e-5)
    with pytest.raises(PlanError, match="has 1 floating-point outputs: name three"):
        memonger.differentiate(_model((4, 3)), loss="triplet_margin", wrt=["x"])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_ctc_is_pytorchs(zero_infinity: bool, reduction: str) -> None:
    """Labels that repeat, sequences shorter than the longest, none at all, and one with no time for its labels."""
    count, times, classes, most = 5, 6, 4, 3
    x = _scores((count, times, classes))
    labels = np.array([[1, 2, 3], [2, 2, 1], [3, 0, 0], [1, 1, 0], [1, 1, 1]])
    lengths, label_lengths = np.array([6, 5, 4, 3, 2]), np.array([3, 3, 1, 0, 2])
    kept = slice(0, count if zero_infinity else count - 1)
    x, labels, lengths, label_lengths = x[kept], labels[kept], lengths[kept], label_lengths[kept]
    loss = memonger.CTCLoss(most, reduction=reduction, zero_infinity=zero_infinity)
    feeds = {"labels": labels, "score_lengths": lengths, "label_lengths": label_lengths}
    results, _ = _run(_model(x.shape), loss, x=x, **feeds)

    def expected(t: torch.Tensor) -> torch.Tensor:
        arrays = [torch.from_numpy(array) for array in (labels, lengths, label_lengths)]
        logs = t.log_softmax(2).transpose(0, 1)
        return F.ctc_loss(logs, *arrays, reduction=reduction, zero_infinity=zero_infinity)

    _check(results, x, expected, 2e-5)


def test_labels_without_time_have_an_infinite_loss() -> None:
    x = _scores((1, 2, 3))
    feeds = {"labels": np.array([[1, 1]]), "score_lengths": np.array([2]), "label_lengths": np.array([2])}
    results, _ = _run(_model((1, 2, 3)), memonger.CTCLoss(2), x=x, **feeds)
    assert np.isposinf(results["loss"])
    assert not np.isnan(results["x.grad"]).any()


@pytest.mark.parametrize("axis", [-1, 2])
def test_classes_may_stand_on_the_last_axis(axis: int) -> None:
    x, labels = _scores((2, 6, 5)), _labels((2, 6), 5)
    results, _ = _run(_model((2, 6, 5)), memonger.SoftmaxCrossEntropy(axis=axis), x=x, labels=labels)
    _check(results, x, lambda t: F.cross_entropy(t.reshape(12, 5), torch.from_numpy(labels.reshape(12))), 1e-5)


def test_large_scores_give_no_infinity() -> None:
    x, labels = _scores((6, 5), 300.0), _labels((6,), 5)
    x[0] = [200, -1e30, -np.inf, 3, 200]
    labels[0] = 0
    results, _ = _run(_model((6, 5)), "softmax_cross_entropy", x=x, labels=labels)
    assert np.isfinite(results["loss"])
    _check(results, x, lambda t: F.cross_entropy(t, torch.from_numpy(labels)), 1e-5)


def test_an_infinite_loss_at_an_ignored_place_counts_for_nothing() -> None:
    x, labels = _scores((4, 3)), np.array([0, 1, -1, 2])
    x[2, 0] = -np.inf
    results, _ = _run(_model((4, 3)), memonger.SoftmaxCrossEntropy(ignore_index=-1), x=x, labels=labels)
    _check(results, x, lambda t: F.cross_entropy(t, torch.from_numpy(labels), ignore_index=-1), 1e-5)


def test_a_mean_over_nothing_is_no_number() -> None:
    results, _ = _run(
        _model((2, 3)), memonger.SoftmaxCrossEntropy(ignore_index=1), x=_scores((2, 3)), labels=np.array([1, 1])
    )
    assert np.isnan(results["loss"])


@pytest.mark.parametrize(
    ("body", "function"),
    [
        ("y = Softmax<axis=1>(x)", lambda t, n: F.cross_entropy(t, n)),
        ("y = Softmax<axis=-1>(x)", lambda t, n: F.cross_entropy(t, n)),
        ("y = LogSoftmax<axis=1>(x)", lambda t, n: F.cross_entropy(t, n)),
        ("y = Softmax<axis=0>(x)", lambda t, n: F.cross_entropy(torch.softmax(t, 0), n)),
    ],
)
def test_scores_are_taken_before_a_softmax_over_the_classes(
    body: str, function: Callable[..., torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    x, labels = _scores((6, 5)), _labels((6,), 5)
    with caplog.at_level(logging.INFO):
        results, _ = _run(_model((6, 5), body), "softmax_cross_entropy", x=x, labels=labels)
    _check(results, x, lambda t: function(t, torch.from_numpy(labels)), 1e-5)
    assert ("the loss is of 'x'" in caplog.text) == ("axis=0" not in body)


def test_a_certain_softmax_is_differentiated_through_its_scores() -> None:
    """Its probabilities are 0 and 1, where a logarithm has no gradient any more."""
    x = np.array([[200.0, 0.0], [0.0, 200.0]], np.float32)
    labels = np.array([1, 1])
    results, _ = _run(_model((2, 2), "y = Softmax<axis=1>(x)"), "softmax_cross_entropy", x=x, labels=labels)
    assert results["loss"] == pytest.approx(100.0)
    np.testing.assert_allclose(results["x.grad"], [[0.5, -0.5], [0, 0]], atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("logits", [None, True])
def test_binary_cross_entropy_of_scores_is_pytorchs(reduction: str, logits: bool | None) -> None:
    x, t = _scores((5, 4), 40.0), np.random.default_rng(2).random((5, 4)).astype(np.float32)
    x[0, :2] = [-1000.0, 1000.0]
    loss = memonger.BinaryCrossEntropy(reduction=reduction, logits=logits)
    results, _ = _run(_model((5, 4)), loss, x=x, target=t)
    _check(results, x, lambda s: F.binary_cross_entropy_with_logits(s, torch.from_numpy(t), reduction=reduction), 1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_binary_cross_entropy_of_probabilities_is_pytorchs(reduction: str) -> None:
    generator = np.random.default_rng(3)
    x, t = (generator.random((5, 4)).astype(np.float32) for _ in range(2))
    x[0], t[0] = [0.0, 1.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]
    loss = memonger.BinaryCrossEntropy(reduction=reduction, logits=False)
    results, _ = _run(_model((5, 4)), loss, x=x, target=t)
    _check(results, x, lambda p: F.binary_cross_entropy(p, torch.from_numpy(t), reduction=reduction), 1e-5)


@pytest.mark.parametrize("logits", [None, False, True])
def test_scores_are_taken_before_a_sigmoid_unless_it_is_said_to_give_scores(logits: bool | None) -> None:
    x, t = _scores((5, 4)), np.random.default_rng(2).random((5, 4)).astype(np.float32)
    results, _ = _run(_model((5, 4), "y = Sigmoid(x)"), memonger.BinaryCrossEntropy(logits=logits), x=x, target=t)
    of = torch.sigmoid if logits else torch.clone
    _check(results, x, lambda s: F.binary_cross_entropy_with_logits(of(s), torch.from_numpy(t)), 1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_mean_squared_error_is_pytorchs(reduction: str) -> None:
    x, t = _scores((5, 4, 3)), _scores((5, 4, 3))[::-1].copy()
    results, _ = _run(_model((5, 4, 3)), memonger.MeanSquaredError(reduction=reduction), x=x, target=t)
    _check(results, x, lambda s: F.mse_loss(s, torch.from_numpy(t), reduction=reduction), 1e-5)


@pytest.mark.parametrize(
    ("loss", "function"),
    [
        ("softmax_cross_entropy", F.cross_entropy),
        ("binary_cross_entropy", F.binary_cross_entropy_with_logits),
        ("mean_squared_error", F.mse_loss),
    ],
)
@pytest.mark.parametrize(("kind", "dtype"), [("float16", np.float16), ("double", np.float64)])
def test_losses_of_other_types(loss: str, function: Callable[..., torch.Tensor], kind: str, dtype: type) -> None:
    x = _scores((6, 5)).astype(dtype)
    softmax = loss.startswith("softmax")
    target = _labels((6,), 5) if softmax else np.random.default_rng(2).random((6, 5)).astype(dtype)
    results, made = _run(_model((6, 5), kind=kind), loss, x=x, **{"labels" if softmax else "target": target})
    tolerance = 2e-3 if dtype is np.float16 else 1e-12
    _check(results, x, lambda t: function(t, torch.from_numpy(target)), tolerance)
    assert results["loss"].dtype == (np.float32 if dtype is np.float16 else np.float64)
    assert [o.name for o in made.graph.output] == ["y", "loss", "x.grad"]


def test_a_gradient_of_the_scores_takes_few_passes() -> None:
    made = _run(_model((6, 5)), "softmax_cross_entropy", x=_scores((6, 5)), labels=_labels((6,), 5))[1]
    loss = [node for node in made.graph.node if node.name.startswith("loss/")]
    whole = {v.name for v in made.graph.value_info if [d.dim_value for d in v.type.tensor_type.shape.dim] == [6, 5]}
    passes = [node.op_type for node in loss if {*node.output} & whole]
    assert passes == ["Sub", "Exp", "Mul", "ScatterElements"]


def test_a_scalar_output_can_be_the_loss() -> None:
    for text in ("float l", "float[1] l", "float[1,1] l"):
        keep = "keepdims=0" if text == "float l" else "keepdims=1"
        squeeze = "s = ReduceSum<keepdims=0>(q)" if keep == "keepdims=0" else "s = ReduceSum(q)"
        shape = text.removeprefix("float").removesuffix(" l")
        body = {
            "": "l = Identity(s)",
            "[1]": "o = Constant<value_ints=[1]>() l = Reshape(s, o)",
            "[1,1]": "l = Identity(s)",
        }
        model = onnx.parser.parse_model(
            f'<ir_version: 10, opset_import: ["": 20]> g (float[2,3] x) => ({text}, float[2,3] q) '
            f"{{ q = Mul(x, x) {squeeze} {body[shape]} }}"
        )
        x = _scores((2, 3))
        results, made = _run(model, "l", x=x)
        np.testing.assert_allclose(results["x.grad"], 2 * x, rtol=1e-6)
        assert [o.name for o in made.graph.output] == ["l", "q", "x.grad"]


TWO = """<ir_version: 10, opset_import: ["": 20]> g (float[4,3] x) => (float[4,3] a, float[4,3] b, int64[4,1] i)
{ a = Exp(x) b = Mul(x, x) i = ArgMax<axis=1>(x) }"""


def test_one_of_several_outputs_is_named() -> None:
    x, labels = _scores((4, 3), 1.0), _labels((4,), 3)
    loss = memonger.SoftmaxCrossEntropy(output="b", labels="classes")
    results, made = _run(onnx.parser.parse_model(TWO), loss, x=x, classes=labels)
    _check(results, x, lambda t: F.cross_entropy(t * t, torch.from_numpy(labels)), 1e-5)
    assert [v.name for v in made.graph.input] == ["x", "classes"]
    assert made.graph.input[1].type.tensor_type.elem_type == onnx.TensorProto.INT64


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            "softmax",
            r"no loss 'softmax': it can be .*an output that is one number \(it has none\)",
        ),
        ("softmax_cross_entropy", r"2 floating-point outputs \('a', 'b'\): name one"),
        (memonger.MeanSquaredError(output="c"), r"'c' is no output; a loss can be of 'a', 'b'"),
        (memonger.MeanSquaredError(output="i"), r"'i' is no floating-point output; a loss can be of 'a', 'b'"),
        (memonger.MeanSquaredError(output="a", target="x"), r"can't be called 'x'.*MeanSquaredError\(target="),
        (memonger.SoftmaxCrossEntropy(output="a", labels="b"), r"can't be called 'b'.*SoftmaxCrossEntropy\(labels="),
        (memonger.SoftmaxCrossEntropy(output="a", class_weights=[1, 2]), r"class_weights are 2, the classes 3"),
        (memonger.MeanSquaredError(output="a", sample_weights="target"), r"can't be called 'target'"),
        (memonger.CTCLoss(2, output="a"), r"'a' is float\[4, 3\]: CTCLoss takes scores \[N, T, C\]"),
        (memonger.TripletMarginLoss(anchor="c"), r"2 floating-point outputs: name three"),
        (memonger.SoftmaxCrossEntropy(output="a", axis=2), r"'a' is float\[4, 3\].*classes on axis 2"),
        ("a", r"'a' can't be the loss: it is float\[4, 3\], not one floating-point number"),
        ("i", r"'i' can't be the loss: it is int64\[4, 1\]"),
        (3, r"loss=3 is no loss"),
    ],
)
def test_what_cannot_be_the_loss_is_said(loss: str | Loss, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        memonger.differentiate(onnx.parser.parse_model(TWO), loss=loss, wrt=["x"])


def test_scores_of_wrong_rank_are_refused() -> None:
    with pytest.raises(PlanError, match=r"'y' is float\[4\]: softmax_cross_entropy takes class scores"):
        memonger.differentiate(_model((4,)), loss="softmax_cross_entropy", wrt=["x"])


def test_settings_that_cannot_be() -> None:
    with pytest.raises(PlanError, match=r"reduction must be .*not 'none'"):
        memonger.MeanSquaredError(reduction="none")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"label_smoothing must be .*not 1\.5"):
        memonger.SoftmaxCrossEntropy(label_smoothing=1.5)
    with pytest.raises(PlanError, match=r"class_weights must be finite numbers"):
        memonger.SoftmaxCrossEntropy(class_weights=[1, -1])
    with pytest.raises(PlanError, match=r"delta must be a finite number above 0, not 0"):
        memonger.HuberLoss(delta=0)
    with pytest.raises(PlanError, match=r"most_labels must be a whole number, 1 or more, not 0"):
        memonger.CTCLoss(0)
