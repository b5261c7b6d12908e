"""Learning rates by the step, against PyTorch's schedulers, and sessions that follow them."""

from pathlib import Path
from typing import Any

import pytest
import torch

import memonger
from memonger.errors import SessionError
from tests.support.training_models import batch, plan

SCHEDULERS = {
    "cosine": (
        memonger.Schedule(0.3, 8, end=0.01),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 8, eta_min=0.01),
    ),
    "linear": (
        memonger.Schedule(0.3, 8, "linear", end=0.03),
        lambda o: torch.optim.lr_scheduler.LinearLR(o, 1, 0.1, 8),
    ),
    "steps": (memonger.Schedule(0.3, 3, "steps", factor=0.5), lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5)),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedules_are_pytorchs(name: str) -> None:
    ours, theirs = SCHEDULERS[name]
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.3)
    scheduler: Any = theirs(optimizer)
    for step in range(9):
        assert ours(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6)
        optimizer.step()
        scheduler.step()
    assert name == "steps" or ours(100) == pytest.approx(ours(8))


def test_a_warm_up_comes_before() -> None:
    rates = [memonger.Schedule(0.4, 2, "linear", warmup=4)(step) for step in range(7)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.2, 0.0])
    assert memonger.Schedule(0.4, decay="none")(99) == 0.4


def test_a_session_follows_its_schedule_and_resumes_in_it(tmp_path: Path) -> None:
    planned, schedule = plan(), memonger.Schedule(0.3, 6, warmup=2)
    by_hand, trainer, resumed = (memonger.TrainingSession(planned) for _ in range(3))
    trainer.schedule = resumed.schedule = schedule
    for step in range(3):
        assert trainer.step(batch(step)) == by_hand.step(batch(step), learning_rate=schedule(step))
    trainer.save(tmp_path / "state")
    resumed.load(tmp_path / "state")
    assert resumed.step(batch(3)) == trainer.step(batch(3)) == by_hand.step(batch(3), learning_rate=schedule(3))
    assert resumed.step(batch(4)) == by_hand.step(batch(4), learning_rate=schedule(4))
    trainer.schedule = lambda step: -1.0
    with pytest.raises(SessionError, match="learning rate must be a number from 0"):
        trainer.step(batch())
    with pytest.raises(SessionError, match="decay must be 'cosine'"):
        memonger.Schedule(0.1, decay="cosines")  # type: ignore[arg-type]
