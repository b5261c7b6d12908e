"""Learning rates by the number of steps taken."""

import math
from dataclasses import dataclass
from typing import Literal

from memonger.errors import SessionError
from memonger.words import check_choice


@dataclass(frozen=True, slots=True)
class Schedule:
    """A learning rate for each step: a warm-up, then a decay. A function of the step alone, so training resumes in it.

    ``trainer.schedule = memonger.Schedule(1e-3, steps=10_000, warmup=500)``. Any function of the number of steps taken
    that returns the rate may stand in its place.

    Attributes:
        lr: The rate at the end of the warm-up.
        steps: Steps of the decay; with ``decay="steps"`` from one fall to the next.
        decay: ``cosine`` or ``linear``, down to ``end`` and there from then on; ``steps``: multiplied by ``factor``
            every so many steps; ``none``. PyTorch's CosineAnnealingLR (up to its end), LinearLR and StepLR.
        warmup: Steps before that, in which the rate grows evenly: ``lr / warmup`` first.
        end: The rate at the end of the decay.
        factor: Of each fall.
    """

    lr: float
    steps: int = 1
    decay: Literal["cosine", "linear", "steps", "none"] = "cosine"
    warmup: int = 0
    end: float = 0.0
    factor: float = 0.1

    def __post_init__(self) -> None:
        check_choice("decay", self.decay, ("cosine", "linear", "steps", "none"), SessionError)
        if not (type(self.steps) is int and self.steps >= 1 and type(self.warmup) is int and self.warmup >= 0):
            raise SessionError(f"steps must be at least 1 and warmup at least 0, not {self.steps!r}, {self.warmup!r}.")
        if not all(0 <= number < math.inf for number in (self.lr, self.end, self.factor)):
            raise SessionError("lr, end and factor of a schedule must be finite numbers, 0 or more.")

    def __call__(self, step: int) -> float:
        """The learning rate of the step before which that many were taken."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        step -= self.warmup
        if self.decay == "none":
            return self.lr
        if self.decay == "steps":
            return self.lr * self.factor ** (step // self.steps)
        part = min(step / self.steps, 1.0)
        left = (1 + math.cos(math.pi * part)) / 2 if self.decay == "cosine" else 1 - part
        return self.end + (self.lr - self.end) * left
