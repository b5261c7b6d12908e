"""export: plans, and models without one, as what serving stacks load. One stack a file, all of one signature.

A target writes its files into an empty folder and says what serving them takes. Adding one is adding a file and a line
in `TARGETS`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memonger.errors import PlanError, PlanFileError
from memonger.export import bentoml, form, kserve, onnxruntime, openvino, ray, triton, triton_python
from memonger.export.folder import files_in, new_folder
from memonger.export.package import Estimate, Package, name_of, pack
from memonger.model.load import Source
from memonger.model.model import Model
from memonger.plan import Plan
from memonger.planning.options import Options
from memonger.units import shown
from memonger.words import did_you_mean, option

Write = Callable[[Package, Path], tuple[Estimate, tuple[str, ...]]]

TARGETS: Mapping[str, Write] = {
    "onnxruntime": onnxruntime.write,
    "triton": triton.write,
    "triton-python": triton_python.write,
    "kserve": kserve.write,
    "ray": ray.write,
    "bentoml": bentoml.write,
    "openvino": openvino.write,
}


@dataclass(frozen=True, slots=True)
class Exported:
    """What was exported.

    Attributes:
        folder: Where to.
        target: For which serving stack.
        name: The model's name there.
        estimate: What serving it takes.
        files: Paths of the files within the folder.
        notes: What the user should know, one sentence each.
    """

    folder: Path
    target: str
    name: str
    estimate: Estimate
    files: tuple[str, ...]
    notes: tuple[str, ...]


def export(
    plans: Plan | Source | Model | Sequence[Plan | str | Path],
    target: str,
    output: str | Path,
    *,
    name: str | None = None,
    instances: int = 1,
    force: bool = False,
    batches: Sequence[int] = (),
    options: Options | None = None,
) -> Exported:
    """Write what a serving stack loads; whole or not at all.

    Args:
        plans: A plan for inference, the path of a planned file, or several of one model for different batches; or a
            model without a plan, which is planned as the target needs it.
        target: One of `TARGETS`.
        output: The folder to make.
        name: The model's name for the server; the first file's name if None.
        instances: How many requests are served at a time, each in memory of its own.
        force: Replace the folder if it is an earlier export.
        batches: For a model without a plan: the batches to plan for. If left out, those of `memonger.export.form` where
            the model's batch is open.
        options: For a model without a plan: how to plan it. The mode is inference; the device, where it is None, what
            the target needs.

    Raises:
        PlanError: an unknown target; a training plan; plans of different models; a name, type, shape or operator that
            the target doesn't take. The message says what would work.
        PlanFileError: a planned file can't be read, or lies in the folder; the folder exists or can't be written.
        VerificationError: a plan is wrong.
    """
    write = TARGETS.get(target)
    if write is None:
        raise PlanError(f"{target!r} is no target: there are {', '.join(TARGETS)}.{did_you_mean(str(target), TARGETS)}")
    sources: list[Any] = list(plans) if isinstance(plans, list | tuple) else [plans]
    if force:
        _check_outside(sources, Path(output))
    given, planned = _planned(sources, target, batches, options)
    named = name if name is not None or not planned else name_of(sources[0])
    package = pack(given, named, instances)
    with new_folder(Path(output), force) as folder:
        estimate, notes = write(package, folder)
    said = tuple(map(shown, dict.fromkeys((*planned, *package.notes, *notes))))
    return Exported(Path(output), target, package.name, estimate, files_in(Path(output)), said)


def _planned(
    sources: Sequence[Any], target: str, batches: Sequence[int], options: Options | None
) -> tuple[Sequence[Plan | str | Path], tuple[str, ...]]:
    """What is served, and notes on what was planned for that.

    Raises:
        PlanError: models without a plan beside others; options of planning for what has a plan.
    """
    without = [source for source in sources if not form.has_plan(source)]
    if not without:
        if batches or options is not None:
            raise PlanError("what is exported has a plan already: batches and options are for a model without one.")
        return sources, ()
    if len(sources) > 1:
        where = f"{without[0]} has" if isinstance(without[0], str | Path) else "one of the models has"
        raise PlanError(
            f"{where} no plan in it: several files are plans of one model. Name the model alone, with "
            f"{option('batches')} for several batches."
        )
    plans = form.plans_for(target, without[0], batches, options or Options())
    return plans, (*form.notes_for(target, plans), *(note for plan in plans for note in plan.notes))


def _check_outside(sources: Sequence[Any], folder: Path) -> None:
    """No file that is read lies in the folder, which is replaced as a whole."""
    for plan in sources:
        if isinstance(plan, str | Path) and folder.resolve() in Path(plan).resolve().parents:
            raise PlanFileError(f"{plan} lies in {folder}, which would be replaced: name another folder.")


__all__ = ["TARGETS", "Estimate", "Exported", "Package", "Write", "export"]
