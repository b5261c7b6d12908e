"""Connectionist temporal classification (Graves et al. 2006), unrolled over time.

Labels of a sequence are written with blanks between, ``L = 2S + 1`` states. What leads to a state by a time, and from
it to the end, are sums over paths, kept as logarithms; their product says how likely a state is.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from memonger.autodiff.losses.common import FLOAT, Built, Reduction, check_reduction, computed_in, described
from memonger.errors import PlanError
from memonger.ir.emitter import Emitter

_INT = ir.DataType.INT64
_NEVER = -1e30  # logarithm of nothing: sums of a few stay finite


@dataclass(frozen=True, slots=True)
class CTCLoss:
    """How unlikely labels are under scores of longer sequences, whatever their places (PyTorch's ``ctc_loss``).

    Each time takes some thirty nodes: it is meant for up to some hundreds.

    Attributes:
        most_labels: S, how many labels a sequence has at most.
        output: Scores ``[N, T, C]``, before a softmax over the classes or after a LogSoftmax; None: the model's only
            floating-point output.
        labels: Name of the new input ``[N, S]``, int64; behind each sequence's own labels any class.
        score_lengths: Name of the new input ``[N]``, int64: times of each sequence.
        label_lengths: Name of the new input ``[N]``, int64: labels of each sequence.
        blank: The class that stands for no label.
        reduction: ``mean``: of each sequence's loss by its number of labels, over the sequences; or ``sum``.
        zero_infinity: Sequences with more labels than can be said in their time count for nothing; without it their
            loss is infinite.
    """

    most_labels: int
    output: str | None = None
    labels: str = "labels"
    score_lengths: str = "score_lengths"
    label_lengths: str = "label_lengths"
    blank: int = 0
    reduction: Reduction = "mean"
    zero_infinity: bool = False

    def __post_init__(self) -> None:
        check_reduction(self.reduction)
        if type(self.most_labels) is not int or self.most_labels < 1:
            raise PlanError(f"most_labels must be a whole number, 1 or more, not {self.most_labels!r}.")

    def build(self, op: Emitter, output: ir.Value, name: str) -> Built:
        """Emit the loss of ``output``."""
        dims = op.dims(output)
        if len(dims) != 3 or not 0 <= self.blank < dims[2]:
            raise PlanError(
                f"{name}: output '{output.name}' is {described(output)}: CTCLoss takes scores [N, T, C], of classes "
                f"among which is the blank, {self.blank}. Name another output (memonger.CTCLoss(output=...))."
            )
        scores = op.cast(output, computed_in(output))
        steps = _TimeSteps(op, scores, self)
        later = steps.backward()
        start = op.Add(steps.start, op.Add(steps.emitted[0], later[0]))
        likely = op.ReduceLogSumExp(start, op.ints(1), keepdims=1)  # [N, 1]
        possible = op.Greater(likely, _NEVER / 2)
        loss = op.Where(possible, op.Neg(likely), op.constant(0.0 if self.zero_infinity else np.inf, scores.dtype))
        share = self._share(op, steps.label_lengths, dims[0], scores.dtype or FLOAT)
        total = op.ReduceSum(op.Mul(loss, share), keepdims=0)
        each = op.Mul(share, op.cast(possible, scores.dtype))
        gradient = steps.gradient(steps.forward(), later, likely, op.reshape(each, (dims[0], 1, 1)))
        return Built(total, {output: op.cast(gradient, output.dtype)})

    def _share(self, op: Emitter, lengths: ir.Value, count: int, dtype: ir.DataType) -> ir.Value:
        """What each sequence's loss is multiplied by, ``[N, 1]``."""
        if self.reduction == "sum":
            return op.constant(np.ones((count, 1), dtype.numpy()))
        return op.Div(1.0 / count, op.Max(op.cast(lengths, dtype), op.constant(1.0, dtype)))


class _TimeSteps:
    """The recursions over time, with what they share.

    Attributes:
        probabilities: Of classes, ``[N, T, C]``.
        classes: Of the states, ``[N, L]``.
        emitted: Logarithms of the states' probabilities, by time ``[N, L]``.
        skips: 0 where a state is reached from the one two before it, else `_NEVER`.
        start: 0 in states that a path may begin with, else `_NEVER`, ``[1, L]``.
        end: Likewise of those it may end with, ``[N, L]``.
    """

    def __init__(self, op: Emitter, scores: ir.Value, loss: CTCLoss) -> None:
        self.op, self.dtype = op, scores.dtype or FLOAT
        self.count, self.times, classes = op.dims(scores)
        self.states = 2 * loss.most_labels + 1
        labels = op.input(loss.labels, _INT, (self.count, loss.most_labels))
        op.classes[str(labels.name)] = (classes, None)
        times = op.input(loss.score_lengths, _INT, (self.count,))
        lengths = op.input(loss.label_lengths, _INT, (self.count,))
        self.score_lengths, self.label_lengths = (op.reshape(v, (self.count, 1)) for v in (times, lengths))
        logs = op.LogSoftmax(scores, axis=2)
        self.probabilities = op.Exp(logs)
        blanks = op.constant(np.full((self.count, loss.most_labels, 1), loss.blank, np.int64))
        pairs = op.Concat(blanks, op.reshape(labels, (self.count, loss.most_labels, 1)), axis=2)
        flat = op.reshape(pairs, (self.count, self.states - 1))
        self.classes = op.Concat(flat, op.constant(np.full((self.count, 1), loss.blank, np.int64)), axis=1)
        index = op.reshape(self.classes, (self.count, 1, self.states))
        index = op.expand(index, (self.count, self.times, self.states))
        found = op.Max(op.GatherElements(logs, index, axis=2), _NEVER)
        parts = (found,) if self.times == 1 else op.several("Split", self.times, found, num_outputs=self.times, axis=1)
        self.emitted = [op.reshape(part, (self.count, self.states)) for part in parts]
        op, states = self.op, np.arange(self.states)
        before = op.Pad(self.classes, op.ints(0, 2, 0, -2), op.constant(loss.blank, _INT))
        differs = op.And(op.Not(op.Equal(self.classes, before)), op.Not(op.Equal(self.classes, loss.blank)))
        self.skips = self._allowed(op.And(differs, op.constant(states[None] > 1)))
        self.start = op.constant(np.where(states[None] < 2, 0, _NEVER).astype(self.dtype.numpy()))
        last = op.Mul(self.label_lengths, 2)
        numbers = op.constant(states[None])
        self.end = self._allowed(op.Or(op.Equal(numbers, last), op.Equal(numbers, op.Sub(last, 1))))

    def _allowed(self, where: ir.Value) -> ir.Value:
        return self.op.Where(where, self.op.constant(0.0, self.dtype), self.op.constant(_NEVER, self.dtype))

    def _moved(self, x: ir.Value, by: int) -> ir.Value:
        """Every state's value, moved to the state that is ``by`` further."""
        return self.op.Pad(x, self.op.ints(0, by, 0, -by), self.op.constant(_NEVER, self.dtype))

    def _sum(self, *logs: ir.Value) -> ir.Value:
        """Logarithm of a sum."""
        op = self.op
        largest = op.Max(*logs)
        return op.Add(largest, op.Log(op.Sum(*(op.Exp(op.Sub(x, largest)) for x in logs))))

    def forward(self) -> list[ir.Value]:
        """By time, logarithms of what leads to each state, its own emission included."""
        op, reached = self.op, [self.op.Add(self.emitted[0], self.start)]
        for emitted in self.emitted[1:]:
            before = reached[-1]
            moved = self._sum(before, self._moved(before, 1), op.Add(self._moved(before, 2), self.skips))
            reached.append(op.Add(moved, emitted))
        return reached

    def backward(self) -> list[ir.Value]:
        """By time, logarithms of what leads from each state to the end, its own emission left out."""
        op, left = self.op, [self.end]
        for time in range(self.times - 1, 0, -1):
            after = op.Add(left[0], self.emitted[time])
            skipped = self._moved(op.Add(after, self.skips), -2)
            moved = self._sum(after, self._moved(after, -1), skipped)
            left.insert(0, op.Where(op.Greater(self.score_lengths, time), moved, self.end))
        return left

    def gradient(self, reached: list[ir.Value], left: list[ir.Value], likely: ir.Value, share: ir.Value) -> ir.Value:
        """(probabilities - how likely a class is at a time, given the labels) * share, in the sequences' own times."""
        op, classes = self.op, self.op.dims(self.probabilities)[2]
        known = [op.Exp(op.Min(op.Sub(op.Add(a, b), likely), 0.0)) for a, b in zip(reached, left, strict=True)]
        shaped = [op.reshape(x, (self.count, 1, self.states)) for x in known]
        values = op.constant(np.array([0, 1], self.dtype.numpy()))
        one_hot = op.OneHot(self.classes, op.ints(classes), values)
        states = op.MatMul(op.concat(shaped, 1), one_hot)
        numbers = op.constant(np.arange(self.times)[None, :, None])
        counted = op.Less(numbers, op.reshape(self.score_lengths, (self.count, 1, 1)))
        change = op.Mul(op.Sub(self.probabilities, states), share)
        return op.Where(counted, change, op.constant(0.0, self.dtype))
