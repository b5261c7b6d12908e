"""Micro-batches whose loss is a mean over what labels say: a step is PyTorch's of one batch with all of them."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch.nn import functional

import memonger
from memonger.errors import SessionError

ROWS, FEATURES, CLASSES = 6, 5, 4
IGNORED = -100
WEIGHTS = (0.5, 2.0, 1.0, 3.0)
Feeds = dict[str, np.ndarray]


def _model(rows: int, body: str = "", inputs: str = "", outputs: str = "") -> onnx.ModelProto:
    """Two layers, and what is behind them."""
    made = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]>
        g (float[{rows},{FEATURES}] x{inputs}) => (float[{rows},{CLASSES}] y{outputs}) {{
            h = MatMul(x, first) t = Tanh(h) y = MatMul(t, last) {body}
        }}"""
    )
    for name, array in _start().items():
        made.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return made


def _start() -> Feeds:
    generator = np.random.default_rng(3)
    shapes = {"first": (FEATURES, 7), "last": (7, CLASSES)}
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def _batches(step: int, ignored: tuple[int, ...] = (1, 4, ROWS)) -> list[Feeds]:
    """Micro-batches of which so many labels count for nothing; in the last one that is all."""
    generator = np.random.default_rng(step)
    found = []
    for count in ignored:
        labels = generator.integers(0, CLASSES, ROWS)
        labels[:count] = IGNORED
        x = generator.standard_normal((ROWS, FEATURES)).astype(np.float32)
        found.append({"x": x, "labels": labels})
    return found


def _session(make: Any = _model, *, loss: Any, device: str = "none", **options: Any) -> memonger.TrainingSession:
    plans = [
        memonger.search_plan(
            memonger.differentiate(make(ROWS), loss=loss, accumulate=kind, **options), device=device, strategy="none"
        )
        for kind in ("apply", "add")
    ]
    return memonger.TrainingSession(plans[0], accumulation=plans[1])


class _Torch:
    """The same training in PyTorch, on whole batches."""

    def __init__(self, optimizer: Any, **options: Any) -> None:
        self.weights = {name: torch.nn.Parameter(torch.from_numpy(array)) for name, array in _start().items()}
        self.optimizer, self.options = optimizer(self.weights.values()), options

    def step(self, batches: list[Feeds], clip_norm: float | None = None) -> float:
        x, labels = (torch.from_numpy(np.concatenate([one[name] for one in batches])) for name in ("x", "labels"))
        y = torch.tanh(x @ self.weights["first"]) @ self.weights["last"]
        loss = functional.cross_entropy(y, labels, ignore_index=IGNORED, **self.options)
        self.optimizer.zero_grad()
        loss.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.weights.values(), clip_norm)
        self.optimizer.step()
        return float(loss.detach())

    def assert_equal(self, session: memonger.TrainingSession, tolerance: float = 1e-5) -> None:
        state = session.state_dict()
        for name, weight in self.weights.items():
            np.testing.assert_allclose(state[name], weight.detach().numpy(), rtol=tolerance, atol=tolerance)


def _sgd(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, 0.5, momentum=0.9)


SGD = memonger.SGD(lr=0.5, momentum=0.9)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"ignore_index": IGNORED}, {}),
        ({"ignore_index": IGNORED, "class_weights": WEIGHTS}, {"weight": torch.tensor(WEIGHTS)}),
        ({"ignore_index": IGNORED, "class_weights": WEIGHTS, "label_smoothing": 0.2},
         {"weight": torch.tensor(WEIGHTS), "label_smoothing": 0.2}),
    ],
    ids=["ignored", "weighted", "smoothed"],
)  # fmt: skip
@pytest.mark.parametrize("clip_norm", [None, 0.3])
def test_a_step_of_micro_batches_is_pytorchs_step_of_the_whole_batch(ours: Any, theirs: Any, clip_norm: Any) -> None:
    session = _session(loss=memonger.SoftmaxCrossEntropy(**ours), optimizer=SGD, clip_norm=clip_norm)
    reference = _Torch(_sgd, **theirs)
    for step in range(4):
        batches = _batches(step)[: 3 - (step == 3)]
        assert session.step(batches) == pytest.approx(reference.step(batches, clip_norm), rel=1e-5)
    reference.assert_equal(session)
    assert session.skipped_steps == 0


def test_class_weights_alone_and_weights_of_samples() -> None:
    loss = memonger.SoftmaxCrossEntropy(class_weights=WEIGHTS, sample_weights="of_samples")
    session = _session(loss=loss, optimizer=memonger.SGD(lr=0.5))
    batches = [one | {"of_samples": np.arange(ROWS, dtype=np.float32)} for one in _batches(0, (0, 0))]
    x, labels = (torch.from_numpy(np.concatenate([one[name] for one in batches])) for name in ("x", "labels"))
    weights = {name: torch.nn.Parameter(torch.from_numpy(array)) for name, array in _start().items()}
    y = torch.tanh(x @ weights["first"]) @ weights["last"]
    each = functional.cross_entropy(y, labels, weight=torch.tensor(WEIGHTS), reduction="none")
    expected = (each * torch.arange(ROWS).repeat(2)).sum() / torch.tensor(WEIGHTS)[labels].sum()
    expected.backward()
    assert session.step(batches) == pytest.approx(float(expected.detach()), rel=1e-5)
    for name, weight in weights.items():
        new = (weight - 0.5 * weight.grad).detach().numpy()
        np.testing.assert_allclose(session.state_dict()[name], new, rtol=1e-5, atol=1e-6)


BODIES = {
    "a node": ("loss = SoftmaxCrossEntropyLoss<ignore_index = -100>(y, labels)", f", int64[{ROWS}] labels"),
    "a mask": (
        """label = Clip(labels, zero, top) counted = GreaterOrEqual(labels, zero) mask = Cast<to = 1>(counted)
        axes = Constant<value_ints = [1]>() column = Unsqueeze(label, axes) log = LogSoftmax<axis = 1>(y)
        picked = GatherElements<axis = 1>(log, column) flat = Squeeze(picked, axes) each = Mul(flat, mask)
        total = ReduceSum<keepdims = 0>(each) count = ReduceSum<keepdims = 0>(mask) mean = Div(total, count)
        loss = Neg(mean)""",
        f", int64[{ROWS}] labels",
    ),
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_loss_of_the_models_own_is_the_mean_over_all_labels_too(kind: str) -> None:
    def make(rows: int) -> onnx.ModelProto:
        made = _model(rows, *BODIES[kind], ", float loss")
        for name, number in (("zero", 0), ("top", CLASSES)):
            made.graph.initializer.append(onnx.numpy_helper.from_array(np.array(number), name))
        return made

    session, reference = _session(make, loss="loss", optimizer=SGD, clip_norm=1.0), _Torch(_sgd)
    for step in range(3):
        batches = _batches(step)
        assert session.step(batches) == pytest.approx(reference.step(batches, 1.0), rel=1e-5)
    reference.assert_equal(session)


def test_a_loss_that_is_only_in_part_a_mean_over_labels_is_averaged_and_says_so(caplog: Any) -> None:
    body, inputs = BODIES["a node"]
    made = _model(ROWS, body + " all = Mul(y, y) other = ReduceMean<keepdims = 0>(all) both = Add(loss, other)",
                  inputs, ", float both")  # fmt: skip
    roles = memonger.differentiate(made, loss="both", optimizer=SGD, accumulate="add").training
    assert roles is not None
    assert roles.loss_weight is None
    assert "'both' is more than one mean over what inputs say" in caplog.text


def test_a_step_in_which_nothing_counts_is_left_out_and_the_next_one_is_right() -> None:
    session, reference = _session(loss=memonger.SoftmaxCrossEntropy(ignore_index=IGNORED), optimizer=SGD), _Torch(_sgd)
    for batches in (_batches(0, (ROWS, ROWS)), _batches(0, (ROWS,))):
        before = session.state_dict()
        assert np.isnan(session.step(batches))
        assert all((array == before[name]).all() for name, array in session.state_dict().items())
    assert (session.steps, session.skipped_steps) == (0, 2)
    bad = _batches(1)
    bad[0]["x"][-1] = np.nan
    assert np.isnan(session.step(bad))
    for batches in (_batches(2), _batches(3, (2,)), _batches(4, (ROWS, 1))):
        assert session.step(batches) == pytest.approx(reference.step(batches), rel=1e-5)
    reference.assert_equal(session)


def test_training_goes_on_from_a_saved_state_bit_for_bit_with_averages(tmp_path: Path) -> None:
    options: dict[str, Any] = {"loss": memonger.SoftmaxCrossEntropy(ignore_index=IGNORED), "ema": 0.9}
    session, other = (_session(optimizer=memonger.AdamW(lr=0.1), **options) for _ in range(2))
    reference = _Torch(lambda weights: torch.optim.AdamW(weights, 0.1))
    averages: Feeds = {}
    for step in range(4):
        if step == 2:
            session.save(tmp_path / "state")
            other.load(tmp_path / "state")
        batches = _batches(step)
        loss = session.step(batches)
        assert loss == pytest.approx(reference.step(batches), rel=1e-5)
        assert step < 2 or other.step(batches) == loss
        now = {name: weight.detach().numpy().copy() for name, weight in reference.weights.items()}
        averages = {name: 0.9 * averages[name] + 0.1 * w for name, w in now.items()} if averages else now
    reference.assert_equal(session, 1e-4)
    assert all((array == other.state_dict()[name]).all() for name, array in session.state_dict().items())
    for name, average in averages.items():
        np.testing.assert_allclose(session.state_dict()[f"{name}.ema"], average, rtol=1e-4, atol=1e-4)


def test_float16_begins_with_a_scale_that_the_sum_can_take() -> None:
    def make(rows: int) -> memonger.Model:
        return memonger.to_mixed_precision(_model(rows), "float16")

    loss = memonger.SoftmaxCrossEntropy(ignore_index=IGNORED)
    session = _session(make, loss=loss, device="cpu", optimizer=SGD)
    reference = _Torch(_sgd)
    assert session.loss_scale == 2.0**16 / 8  # the least power of two that six labels stay below
    for step in range(3):
        batches = _batches(step)
        assert session.step(batches) == pytest.approx(reference.step(batches), rel=1e-2)
    assert session.skipped_steps == 0
    reference.assert_equal(session, 2e-2)


def test_what_no_label_divides_is_averaged_as_before() -> None:
    for loss in (memonger.SoftmaxCrossEntropy(), memonger.SoftmaxCrossEntropy(reduction="sum", ignore_index=IGNORED)):
        roles = memonger.differentiate(_model(ROWS), loss=loss, optimizer=SGD, accumulate="apply").training
        assert roles is not None
        assert (roles.loss_parts, "accumulation_scale" in roles.scalars) == ((roles.loss,), True)
    whole = memonger.differentiate(_model(ROWS), loss=memonger.SoftmaxCrossEntropy(ignore_index=0), optimizer=SGD)
    assert whole.training is not None
    assert whole.training.loss_weight is None


def test_plans_of_which_one_leaves_labels_out_do_not_go_together() -> None:
    loss = memonger.SoftmaxCrossEntropy(ignore_index=IGNORED)
    apply, add = (
        memonger.search_plan(
            memonger.differentiate(_model(ROWS), loss=one, optimizer=SGD, accumulate=kind), strategy="none"
        )
        for kind, one in (("apply", loss), ("add", memonger.SoftmaxCrossEntropy()))
    )
    with pytest.raises(SessionError, match="only one has a loss that labels say the mean of"):
        memonger.TrainingSession(apply, accumulation=add)
