"""Planned models as what serving stacks load, one stack a file.

A target writes its files into an empty folder and says what serving them takes. Adding one is adding a file and a line
in `TARGETS`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memonger.errors import PlanError
from memonger.files import check_outside, files_in, new_folder
from memonger.ir.model import Model
from memonger.model.load import Source
from memonger.options import Options
from memonger.plan import Plan
from memonger.serving import bentoml, form, kserve, onnxruntime, openvino, ray, triton, triton_config, triton_python
from memonger.serving.package import FLEETS, WAIT, ArenaSharing, Estimate, Naming, Package, check_runs, name_of, pack
from memonger.serving.sources import Plans, several_of
from memonger.units import MOST_ARENAS, format_size, in_bytes, shown, whole
from memonger.words import did_you_mean, option

Write = Callable[[Package, Path], tuple[Estimate, tuple[str, ...]]]


@dataclass(frozen=True, slots=True)
class ServingTarget:
    """A serving stack.

    Attributes:
        write: Writes its files into an empty folder; gives what serving takes, and notes.
        naming: Which names of models it takes; None: any.
    """

    write: Write
    naming: Naming | None = None


TARGETS: Mapping[str, ServingTarget] = {
    "onnxruntime": ServingTarget(onnxruntime.write),
    "triton": ServingTarget(triton.write, triton_config.NAMING),
    "triton-python": ServingTarget(triton_python.write, triton_config.NAMING),
    "kserve": ServingTarget(kserve.write, kserve.NAMING),
    "ray": ServingTarget(ray.write),
    "bentoml": ServingTarget(bentoml.write, bentoml.NAMING),
    "openvino": ServingTarget(openvino.write),
}


@dataclass(frozen=True, slots=True)
class Exported:
    """What was exported.

    Attributes:
        folder: Where to.
        target: For which serving stack.
        name: The name of the whole there, or of the only model.
        models: Names of the models.
        estimate: What serving it takes.
        files: Paths of the files within the folder.
        notes: What the user should know, one sentence each.
    """

    folder: Path
    target: str
    name: str
    models: tuple[str, ...]
    estimate: Estimate
    files: tuple[str, ...]
    notes: tuple[str, ...]


def export(
    plans: Plan | Source | Model | Sequence[Plan | str | Path] | Mapping[str, Any],
    target: str,
    output: str | Path,
    *,
    name: str | None = None,
    instances: int = 1,
    force: bool = False,
    batches: Sequence[int] = (),
    options: Options | None = None,
    arenas: int | None = None,
    limit: str | int | None = None,
    wait: float | None = None,
) -> Exported:
    """Write what a serving stack loads; whole or not at all.

    Args:
        plans: A plan for inference, the path of a planned file, or several of one model for different batches; or a
            model without a plan, which is planned as the target needs it. Several models share the memory of a process
            (`memonger.Fleet`): plans by name (several of one model in a list), or a folder with a planned file, or a
            folder of plans, for each.
        target: One of `TARGETS`.
        output: The folder to make.
        name: The model's name for the server; the first file's name if None. Of several models: the name of the
            whole, the folder's or ``models`` if None.
        instances: How many processes serve, each with memory of its own.
        force: Replace the folder if it is an earlier export.
        batches: For a model without a plan: the batches to plan for. If left out, those of `memonger.serving.form`
            where the model's batch is open.
        options: For a model without a plan: how to plan it. The mode is inference; the device, where it is None, what
            the target needs.
        arenas: How many requests run at a time in one process; 1 if None.
        limit: Most bytes that the models of one process may take, such as ``512MiB``: see `memonger.Fleet`.
        wait: Seconds that a request waits for an arena at most; 30 if None.

    Raises:
        PlanError: an unknown target; a training plan; plans of different models under one name; a name, type, shape or
            operator that the target doesn't take; a model that never fits the limit; arenas, limit or wait for a target
            without memonger. The message says what would work.
        PlanFileError: a planned file can't be read, or lies in the folder; the folder exists or can't be written.
        VerificationError: a plan is wrong.
    """
    if target not in TARGETS:
        raise PlanError(f"{target!r} is no target: there are {', '.join(TARGETS)}.{did_you_mean(str(target), TARGETS)}")
    sharing = _sharing(target, arenas, limit, wait)
    name, models, notes, own = _models(plans, target, name, batches, options)
    if force:
        files = [Path(one) for plans in models.values() for one in plans if isinstance(one, str | Path)]
        check_outside(files, Path(output))
    package = pack(models, name, instances, sharing, ranges=target in FLEETS)
    if target in FLEETS:
        check_runs(package)
    with new_folder(Path(output), force) as folder:
        estimate, written = TARGETS[target].write(package, folder)
    if own is not None:
        batch = "" if own.batch is None else f" at batch {own.batch}"
        beside = (
            f"An export for {target} has no chunks: one instance is predicted to take "
            f"{format_size(estimate.instance_bytes)}{batch}, where a session of memonger on this CPU takes "
            f"{format_size(own.total_bytes)} in chunks."
        )
        notes = (*notes, beside)
    said = tuple(map(shown, dict.fromkeys((*notes, *package.notes, *written))))
    names = tuple(model.name for model in package.models)
    return Exported(Path(output), target, package.name, names, estimate, files_in(Path(output)), said)


def _models(
    given: Any, target: str, name: str | None, batches: Sequence[int], options: Options | None
) -> tuple[str, dict[str, Plans], tuple[str, ...], Plan | None]:
    """What is served: the name of the whole, plans by the models' names, and notes on what was planned.

    The last is the plan that memonger's own sessions would run in chunks, where the target can't.

    Raises:
        PlanError: a name that the target doesn't take; models without a plan beside others; options of planning for
            what has a plan.
    """
    sources: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    several = several_of(sources[0]) if len(sources) == 1 else None
    without = [] if several is not None else [source for source in sources if not form.has_plan(source)]
    if not without and (batches or options is not None):
        raise PlanError("what is exported has a plan already: batches and options are for a model without one.")
    if name is None and several is not None:
        name = "models" if isinstance(given, Mapping) else Path(sources[0]).resolve().name
    elif name is None:
        name = name_of(sources[0]) if sources else "model"
    naming = TARGETS[target].naming
    if naming is not None:
        naming.check(name)
    if several is not None:
        return name, several, (), None
    if not without:
        return name, {name: sources}, (), None
    if len(sources) > 1:
        where = f"{without[0]} has" if isinstance(without[0], str | Path) else "one of the models has"
        raise PlanError(
            f"{where} no plan in it: several files are plans of one model. Name the model alone, with "
            f"{option('batches')} for several batches; or a folder of planned models."
        )
    plans = form.plans_for(target, without[0], batches, options or Options())
    notes = (*form.notes_for(target, plans), *(note for plan in plans for note in plan.notes))
    own = form.own_plan(target, without[0], plans, options or Options())
    return name, {name: list(plans)}, notes, own


def _sharing(target: str, arenas: int | None, limit: str | int | None, wait: float | None) -> ArenaSharing | None:
    """How models share memory; None where nothing was said of it.

    Raises:
        PlanError: a number is wrong, or the target takes none.
    """
    given = {"arenas": arenas, "limit": limit, "wait": wait}
    said = [name for name, value in given.items() if value is not None]
    if not said:
        return None
    if target not in FLEETS:
        raise PlanError(f"{target} runs models without memonger: {option(said[0])} is for {', '.join(FLEETS)}.")
    arenas = 1 if arenas is None else whole(option("arenas"), arenas, 1, MOST_ARENAS, PlanError)
    if wait is not None and not (type(wait) in (int, float) and 0 <= wait <= 86400):
        raise PlanError(f"{option('wait')} must be seconds from 0 to 86400, not {wait!r}.")
    room = None if limit is None else in_bytes(option("limit"), limit, PlanError)
    return ArenaSharing(arenas, room, WAIT if wait is None else wait)
