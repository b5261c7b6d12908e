"""A network's training step beside PyTorch eager and torch.compile: whole, and in budgets of 50 and 30 %."""

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.stages import Settings
from benchmarks.training.side_by_side import networks, results, rows, turns
from benchmarks.training.side_by_side.devices import Device

WITHOUT = ("checkpoint", "compile70", "compile50", "compile30", "share70")
TINY: Mapping[str, networks.Size] = {"densenet_bc100": networks.Size(4, (3, 8, 8), {"blocks": (2, 2), "growth": 4})}


def measure(item: str, settings: Settings, seconds: float) -> dict[str, Any]:
    """The row of a network, as `benchmarks.training.side_by_side` has it."""
    without = (*WITHOUT, "compile", "none", "share30") if settings.rehearse else WITHOUT
    return kept(rows.measure("training", item, size(item, settings), how(settings, seconds, without), partly=True))


def kept(row: results.Row) -> dict[str, Any]:
    """The row without those that were left out."""
    found = tuple(result for result in row.results if not result.failed.startswith("left out"))
    return {"row": asdict(replace(row, results=found))}


def size(item: str, settings: Settings) -> networks.Size:
    """The network as it is measured."""
    return TINY[item] if settings.rehearse else networks.size_of(item, settings.device)


def how(settings: Settings, seconds: float, without: tuple[str, ...]) -> turns.Settings:
    """How everything is measured: within the seconds, what isn't ready by then is left."""
    return turns.Settings(
        device=Device(settings.device, (), settings.context, torch="cpu" if settings.rehearse else ""),
        threads=8,
        clock=turns.Clock(time.monotonic() + seconds - 5),
        patience=seconds / 2,
        rounds=2 if settings.rehearse else 5,
        seconds=0.05 if settings.rehearse else 0.3,
        tf32=settings.tf32,
        tuned=False,
        memory=2_000_000 if settings.rehearse else settings.memory,
        without=without,
        folder=Path(settings.folder),
    )
