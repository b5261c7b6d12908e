"""The command ``report``."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from memonger.cli.output import print_result
from memonger.errors import MemongerError
from memonger.ir.decoding import DecodingError, decode
from memonger.plan import Plan
from memonger.report.write import report as write

T = TypeVar("T")

NEXT = {
    "html": "Open it in a browser; it needs no network.",
    "memory_viz": "Drop it on pytorch.org/memory_viz, or read it with torch.cuda._memory_viz.",
    "perfetto": "Open it at ui.perfetto.dev.",
    "speedscope": "Open it at speedscope.app.",
    "netron": "Open it with Netron: the plan is in the metadata of nodes and values.",
}
"""What to do with a file of each format."""


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """A plan on a frontier, of those that ``memonger pareto --json`` prints."""

    total_bytes: int
    peak_bytes: int
    overhead: float


@dataclass(frozen=True, slots=True)
class Frontier:
    """What ``memonger pareto --json`` prints, under a name."""

    plans: tuple[FrontierPoint, ...]


@dataclass(frozen=True, slots=True)
class SessionFigures:
    """What a session was measured to take."""

    latency_seconds: float | None = None
    peak_bytes: int | None = None
    bitwise_equal: bool | None = None
    max_abs_diff: float | None = None


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """Of what ``memonger run --compare --json`` prints the part that is shown."""

    latency_seconds: float | None = None
    peak_bytes: int | None = None
    stock_session: SessionFigures | None = None
    default_session: SessionFigures | None = None


def report(
    planned: Path, output: Path, format: str, frontier: Path | None, measured: Path | None, as_json: bool
) -> None:
    """Write a page, or a file for another viewer."""
    points = () if frontier is None else _decoded(Frontier, {"plans": _content(frontier)}, frontier).plans
    run = None if measured is None else _decoded(MeasuredRun, _content(measured), measured)
    plan = Plan.load(planned)
    write(
        plan, output, format=format, title=planned.name,
        frontier=[asdict(point) for point in points], measured=None if run is None else asdict(run),
    )  # fmt: skip
    record = {"plan": str(planned), "format": format, "output": str(output), "bytes": output.stat().st_size}
    print_result(as_json, record, f"Wrote {output}. {NEXT[format]}")


def _content(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise MemongerError(f"{path} isn't valid JSON: {error}.") from error


def _decoded(kind: type[T], content: Any, path: Path) -> T:
    """What a command printed into a file.

    Raises:
        MemongerError: the file is something else.
    """
    try:
        return decode(kind, content, ignore_unknown=True)
    except DecodingError as error:
        command = "memonger pareto --json" if kind is Frontier else "memonger run --compare --json"
        raise MemongerError(f"{path} isn't what {command} prints: {error}.") from error
