"""From a plan to what people and programs read.

A format for another viewer is a file with a function of a `memonger.report.view.View`, and a line in `_write`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memonger.errors import PlanError
from memonger.files import write_whole

if TYPE_CHECKING:
    from memonger.plan import Plan
    from memonger.report.view import View

Draw = Callable[["View"], bytes]


def report(
    plan: "Plan",
    path: str | Path,
    *,
    format: str = "html",
    title: str | None = None,
    frontier: Sequence["Plan"] | Sequence[Mapping[str, Any]] = (),
    measured: Mapping[str, Any] | None = None,
) -> None:
    """What `Plan.report` does; its arguments and errors."""
    from memonger.report.view import View

    view = View(title or str(plan.model.graph.name or "plan"), plan)
    if format == "html":
        from memonger.report.page import page

        drawn = page(view, [each if isinstance(each, Mapping) else _point(each) for each in frontier], measured)
        write_whole(Path(path), lambda target: target.write(drawn))
        return
    if frontier or measured is not None:
        raise PlanError(f"a frontier and measurements are shown by format 'html', not by {format!r}.")
    _write(view, Path(path), format)


def _write(view: "View", path: Path, format: str) -> None:
    from memonger.model.save import save_model
    from memonger.report import memory_viz, netron, perfetto, speedscope

    draws: dict[str, Draw] = {
        "memory_viz": memory_viz.snapshot, "perfetto": perfetto.trace, "speedscope": speedscope.profile
    }  # fmt: skip
    if format == "netron":
        save_model(netron.annotated(view), path)
    elif format in draws:
        content = draws[format](view)
        write_whole(path, lambda target: target.write(content))
    else:
        raise PlanError(f"{format!r} is no format of a report: there are {', '.join(('html', *draws, 'netron'))}.")


def plot(plan: "Plan", path: str | Path, *, title: str | None = None) -> None:
    """What `Plan.plot` does; its arguments and errors."""
    from memonger.report.picture import plot as draw
    from memonger.report.picture import suffix
    from memonger.report.view import View

    view = View(title or str(plan.model.graph.name or "plan"), plan)
    try:
        drawn = draw(view, suffix(Path(path)))
    except ValueError as error:
        raise PlanError(f"{path}: {error}. Name it .svg, .png or .pdf.") from error
    write_whole(Path(path), lambda target: target.write(drawn))


def _point(plan: "Plan") -> dict[str, Any]:
    return {"total_bytes": plan.total_bytes, "peak_bytes": plan.peak_bytes, "overhead": plan.overhead}


__all__ = ["plot", "report"]
