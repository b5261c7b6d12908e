"""export: planned files as what serving stacks load. One stack a file, all of one signature.

A target writes its files into an empty folder and says what serving them takes. Adding one is adding a file and a line
in `TARGETS`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from memonger.errors import PlanError, PlanFileError
from memonger.export import bentoml, kserve, onnxruntime, openvino, ray, triton, triton_python
from memonger.export.folder import files_in, new_folder
from memonger.export.package import Estimate, Package, pack
from memonger.plan import Plan
from memonger.units import shown

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
    plans: Plan | str | Path | Sequence[Plan | str | Path],
    target: str,
    output: str | Path,
    *,
    name: str | None = None,
    instances: int = 1,
    force: bool = False,
) -> Exported:
    """Write what a serving stack loads; whole or not at all.

    Args:
        plans: A plan for inference, the path of a planned file, or several of one model for different batches.
        target: One of `TARGETS`.
        output: The folder to make.
        name: The model's name for the server; the first file's name if None.
        instances: How many requests are served at a time, each in memory of its own.
        force: Replace the folder if it is an earlier export.

    Raises:
        PlanError: an unknown target; a training plan; plans of different models; a name, type, shape or operator that
            the target doesn't take. The message says what would work.
        PlanFileError: a planned file can't be read, or lies in the folder; the folder exists or can't be written.
        VerificationError: a plan is wrong.
    """
    write = TARGETS.get(target)
    if write is None:
        raise PlanError(f"{target!r} is no target: there are {', '.join(TARGETS)}.")
    given = [plans] if isinstance(plans, Plan | str | Path) else list(plans)
    package = pack(given, name, instances)
    if force:
        _check_outside(given, Path(output))
    with new_folder(Path(output), force) as folder:
        estimate, notes = write(package, folder)
    said = tuple(map(shown, (*package.notes, *notes)))
    return Exported(Path(output), target, package.name, estimate, files_in(Path(output)), said)


def _check_outside(plans: Sequence[Plan | str | Path], folder: Path) -> None:
    """No planned file lies in the folder, which is replaced as a whole."""
    for plan in plans:
        if not isinstance(plan, Plan) and folder.resolve() in Path(plan).resolve().parents:
            raise PlanFileError(f"{plan} lies in {folder}, which would be replaced: name another folder.")


__all__ = ["TARGETS", "Estimate", "Exported", "Package", "Write", "export"]
