"""A plan written as what people or another viewer read.

A format for another viewer is a file with a function of a `memonger.report.view.View`, and a line in `VIEWERS`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from memonger.errors import PlanError
from memonger.files import write_whole
from memonger.ir.emitter import collecting_later
from memonger.ir.save import save_model
from memonger.plan import Plan
from memonger.report import memory_viz, viewers
from memonger.report.page import page
from memonger.report.picture import picture
from memonger.report.view import View

VIEWERS: Mapping[str, Callable[[View], bytes]] = {
    "memory_viz": memory_viz.snapshot,
    "perfetto": viewers.trace,
    "speedscope": viewers.profile,
}


def report(
    plan: Plan,
    path: str | Path,
    *,
    format: str = "html",
    title: str | None = None,
    frontier: Sequence[Plan] | Sequence[Mapping[str, Any]] = (),
    measured: Mapping[str, Any] | None = None,
) -> None:
    """What `Plan.report` does; its arguments and errors."""
    if format not in ("html", *VIEWERS, "netron"):
        known = ", ".join(("html", *VIEWERS, "netron"))
        raise PlanError(f"{format!r} is no format of a report: there are {known}.")
    if format != "html" and (frontier or measured is not None):
        raise PlanError(f"a frontier and measurements are shown by format 'html', not by {format!r}.")
    view = _view(plan, title)
    if format == "netron":
        save_model(viewers.annotated(view), Path(path))
        return
    with collecting_later():
        if format == "html":
            points = [each if isinstance(each, Mapping) else _point(each) for each in frontier]
            content = page(view, points, measured)
        else:
            content = VIEWERS[format](view)
    write_whole(Path(path), lambda target: target.write(content))


def plot(plan: Plan, path: str | Path, *, title: str | None = None) -> None:
    """What `Plan.plot` does; its arguments and errors."""
    kind = Path(path).suffix.lstrip(".").lower()
    try:
        drawn = picture(_view(plan, title), kind)
    except ValueError as error:
        raise PlanError(f"{path}: {error}. Name it .svg, .png or .pdf.") from error
    write_whole(Path(path), lambda target: target.write(drawn))


def _view(plan: Plan, title: str | None) -> View:
    return View(title or str(plan.model.graph.name or "plan"), plan)


def _point(plan: Plan) -> dict[str, Any]:
    return {"total_bytes": plan.total_bytes, "peak_bytes": plan.peak_bytes, "overhead": plan.overhead}
