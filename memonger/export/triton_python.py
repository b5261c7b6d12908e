"""A Triton model repository for its Python backend: it runs a `memonger.Session`, so the arena itself is served."""

from pathlib import Path

from memonger.export import folder as files
from memonger.export.package import Estimate, Package, binding_notes
from memonger.export.pbtxt import text_of
from memonger.export.triton_config import check_model_name, config

TEXT = """
A Triton model repository: `tritonserver --model-repository=<this folder>`. Triton's Python backend runs
`1/model.py`, which holds a `memonger.Session`: every value at its address in one arena. The backend's Python needs
memonger (`pip install 'memonger[cpu]'`).

Each instance is a process with weights and an arena of its own. {batching}
"""


def write(package: Package, folder: Path) -> tuple[Estimate, tuple[str, ...]]:
    """Write the repository.

    Raises:
        PlanError: a name, type or shape Triton refuses.
    """
    check_model_name(package.name)
    estimate, batches = package.as_planned(), package.batches
    content = config(package, "python", "model.py", batches, {})
    version = folder / package.name / "1"
    version.mkdir(parents=True)
    names = files.add_plans(package, version)
    files.add_file(version, "triton_model.py", "model.py")
    files.add_json(version / "plans.json", {"plans": names, "batched": batches is not None})
    files.add_settings(package, folder, estimate)
    (version.parent / "config.pbtxt").write_text(text_of(content))
    batching = (
        f"Requests are put together to batches of at most {max(batches)}; each is run by the plan of the next larger "
        f"batch ({', '.join(map(str, batches))}), filled up with the last row."
        if batches
        else "Requests are run one by one: the plan was made without a batch, or the model's inputs and outputs don't "
        "all begin with a batch."
    )
    files.add_readme(package, folder, estimate, TEXT.format(batching=batching))
    return estimate, binding_notes(package)
