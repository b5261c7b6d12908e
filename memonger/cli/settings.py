"""What the commands that run a plan are told, and what they have to show."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memonger.cli.differences import Tolerance


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run.

    Attributes:
        runs: Timed runs of each session.
        warm_up: Runs of each session before those.
        tolerance: What outputs may differ by.
        seed: Of random inputs.
        threads: Threads within a node; 0 is the default.
        device: Where to run; None: the plan's own.
        cuda_graph: See `memonger.Session`.
        pad: Whether inputs with fewer rows than planned are filled up.
    """

    runs: int = 30
    warm_up: int = 3
    tolerance: Tolerance = field(default_factory=Tolerance)
    seed: int = 0
    threads: int = 0
    device: str | None = None
    cuda_graph: str = "auto"
    pad: bool = False


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What a command that runs has to show.

    Attributes:
        outputs: By name.
        record: For ``--json``.
        rows: For a table, where there was a comparison.
        lines: To be printed below, one sentence or more each.
        passed: False where a comparison found a difference that isn't allowed.
        saved: What ``--outputs`` writes, where that is more than ``outputs``.
        notes: Warnings.
    """

    outputs: Mapping[str, Any]
    record: Mapping[str, Any]
    rows: tuple[Mapping[str, Any], ...] = ()
    lines: tuple[str, ...] = ()
    passed: bool = True
    saved: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
