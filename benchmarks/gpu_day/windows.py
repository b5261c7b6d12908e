"""A network within budgets below its weights: those that don't fit lie in the host's memory, and a run copies them:
in order, among the kernels, and beside that ahead of the steps that read them where it can."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import onnx

import memonger
import models
from benchmarks.gpu_day.contest import Planned, Stock, contest, feeds_of, same_bits
from benchmarks.gpu_day.inference import TOKENS
from benchmarks.gpu_day.stages import INFERENCE, TINY, Settings
from memonger.devices import Cuda
from memonger.option_names import HeldWeights

SHARES = (60, 40, 25)
"""Per cent of what a plan takes that holds all weights on the device."""

AHEAD = ", ahead"
"""Behind the title of a plan that copies ahead, where another's copies take their turn among the kernels."""


def measure(item: str, settings: Settings, seconds: float) -> dict[str, Any]:
    """The row of ``network:batch``. Where a budget can't be held, the least that can is in its place.

    A plan that copies in order has another beside it, within the same budget, that copies ahead, where one can.
    """
    name, batch = item.rsplit(":", 1)
    options = (TINY if settings.rehearse else INFERENCE)[name]
    path = Path(settings.folder) / f"{name}-{batch}-windows.onnx"
    onnx.save(models.build(name, batch=int(batch), **options), path)
    feeds, cuda = feeds_of(path, TOKENS), Cuda(tf32=settings.tf32)

    def planned(budget: int | None, weights: HeldWeights = "auto") -> memonger.Plan:
        given: dict[str, Any] = {"mode": "inference", "device": settings.device, "cuda": cuda, "weights": weights}
        try:
            return memonger.search_plan(path, budget=budget, **given)
        except memonger.BudgetError as error:
            return planned(error.smallest, weights)

    whole = planned(None)
    plans = {"budget 100%": whole}
    for share in SHARES:
        plans[f"budget {share}%"] = planned(whole.total_bytes * share // 100)
        plan = planned(whole.total_bytes * share // 100, "ahead")
        plans |= {f"budget {share}%{AHEAD}": plan} if plan.ahead_bytes else {}
    makers = dict[str, Callable[[], Any]]()
    for number, (title, plan) in enumerate(plans.items()):
        file = path.with_name(f"{path.stem}-{number}.planned.onnx")
        plan.save(file)
        makers[title] = partial(Planned, file, feeds, settings.device, "off")
    makers["stock"] = lambda: Stock(path, feeds, settings.device, cuda=cuda)
    sessions, found = contest(makers, settings.device)
    expected = sessions["stock"].outputs() if "stock" in sessions else None
    for title, plan in plans.items():
        apart = sum(plan.host_weights.values())
        found[title] |= {"total": plan.total_bytes, "on_the_host": apart, "copied": plan.read_bytes}
        found[title]["ahead"] = plan.ahead_bytes
    for key, session in sessions.items():
        if expected is not None:
            found[key]["same_bits"] = same_bits(session.outputs(), expected)
    return {"contestants": found}
