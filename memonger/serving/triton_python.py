"""A Triton model repository for its Python backend: it runs a `memonger.Fleet`, so the arena itself is served."""

from pathlib import Path

from memonger.errors import PlanError
from memonger.files import add_json
from memonger.serving import folder as files
from memonger.serving.package import Estimate, Package, binding_notes
from memonger.serving.triton_config import NAMING, ensemble_config, python_config, text_of
from memonger.words import option

TEXT = """
A Triton model repository: `tritonserver --model-repository=<this folder>`. Triton's Python backend runs
`{name}/1/model.py`, which holds a `memonger.Fleet`: every value at its address in one arena. The backend's Python needs
memonger (`pip install 'memonger[cpu]'`).
{models}
Each instance is a process with weights and an arena of its own. {batching} A request that isn't begun within {wait:g}
seconds gets the status 503; figures of the fleet are among Triton's metrics.
"""
SEVERAL = """
`{name}` serves all models from one process. Requests don't ask for it, but for the models by their names: these are
ensembles of one step, which cost neither a process nor a copy.
"""


def write(package: Package, folder: Path) -> tuple[Estimate, tuple[str, ...]]:
    """Write the repository.

    Raises:
        PlanError: a name, type or shape Triton refuses; several arenas.
    """
    _check(package)
    estimate, batches = package.as_planned(), _batches(package)
    version = folder / package.name / "1"
    version.mkdir(parents=True)
    files.add_file(version, "triton_model.py", "model.py")
    add_json(version / "plans.json", {**files.add_models(package, version), "batched": batches is not None})
    (version.parent / "config.pbtxt").write_text(text_of(python_config(package, "model.py", batches)))
    several = package.models if len(package.models) > 1 else ()
    for model in several:
        (folder / model.name / "1").mkdir(parents=True)
        note = "Triton wants this folder, and copies leave out empty ones.\n"
        (folder / model.name / "1" / "ensemble.txt").write_text(note)
        content = ensemble_config(package, model, model.batches if batches else None)
        (folder / model.name / "config.pbtxt").write_text(text_of(content))
    batching = (
        f"Requests are put together to batches of at most {max(batches)}; each is run by the plan of the next larger "
        f"batch ({', '.join(map(str, batches))}), filled up with the last row. A tensor of one number a row "
        "is [batch, 1]."
        if batches
        else "Requests are run one by one: a plan was made without a batch, or a model's inputs and outputs don't "
        "all begin with a batch."
    )
    models = SEVERAL.format(name=package.name) if several else ""
    text = TEXT.format(name=package.name, models=models, batching=batching, wait=package.sharing.wait)
    files.describe_export(package, folder, estimate, text + files.models_table(package))
    return estimate, binding_notes(package)


def _check(package: Package) -> None:
    """Triton takes the names, which are those of folders, and runs one batch at a time."""
    for model in package.models:
        NAMING.check(model.name)
    if len(package.models) > 1 and package.name in {model.name for model in package.models}:
        raise PlanError(
            f"'{package.name}' is the name of all models together, and of one of them: Triton needs another "
            f"({option('name')})."
        )
    if package.sharing.arenas > 1:
        raise PlanError(
            f"Triton gives a process of its Python backend one batch at a time, and so it would use one of "
            f"{package.sharing.arenas} arenas: leave {option('arenas')} out, and have more processes "
            f"({option('instances')}) for more at a time."
        )


def _batches(package: Package) -> tuple[int, ...] | None:
    """The batches Triton forms: those of all models, if each has some."""
    of_models = [model.batches for model in package.models]
    return None if None in of_models else tuple(sorted({batch for batches in of_models for batch in batches or ()}))
