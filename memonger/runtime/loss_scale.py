"""The factor that a training session multiplies the loss by, so that gradients in float16 don't vanish.

It is doubled after many steps that went well and halved after one whose gradients overflowed, as in Micikevicius et al.
2018, "Mixed Precision Training", and ``torch.amp.GradScaler``: powers of two change no digit of a gradient.
"""

from dataclasses import dataclass

GOOD_STEPS = 2000  # after which it is doubled

LEAST, LARGEST = 2.0**-24, 2.0**126  # both, and their inverses, are normal numbers in float32


@dataclass(frozen=True, slots=True)
class LossScale:
    """The factor, and how many steps went well with it."""

    factor: float
    good_steps: int = 0

    def __post_init__(self) -> None:
        if not (LEAST <= self.factor <= LARGEST and 0 <= self.good_steps < GOOD_STEPS):
            raise ValueError(f"the loss scale {self.factor} after {self.good_steps} good steps is out of range")

    def after(self, went_well: bool) -> "LossScale":
        """What it is for the next step."""
        if not went_well:
            return LossScale(max(self.factor / 2, LEAST))
        if self.good_steps + 1 == GOOD_STEPS:
            return LossScale(min(self.factor * 2, LARGEST))
        return LossScale(self.factor, self.good_steps + 1)
