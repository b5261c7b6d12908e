"""folder: a folder of files that is there whole or not at all, and what all targets put into theirs."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from memonger.errors import PlanFileError
from memonger.export.package import Estimate, Package, ServedModel, Tensor, describe, inputs_of, outputs_of
from memonger.export.protocol import datatype_of
from memonger.files import folder_beside, put_folder
from memonger.units import in_full
from memonger.words import option

SETTINGS = "memonger.json"  # also tells an export from any other folder


@contextmanager
def new_folder(path: Path, force: bool) -> Iterator[Path]:
    """An empty folder that becomes ``path`` if nothing is raised. What ``path`` was stays as it was until then.

    Raises:
        PlanFileError: there is a file of that name, or a folder that isn't empty and may not be replaced, or holds
            anything but an earlier export; or it can't be written.
    """
    _check_free(path, force)
    try:
        with folder_beside(path.absolute()) as beside:
            fresh = beside / "fresh"
            fresh.mkdir()
            yield fresh
            _list_files(fresh)
            _sync(fresh)
            put_folder(fresh, path)
    except OSError as error:
        raise PlanFileError(f"{path} can't be written: {error.strerror or error}. Nothing was left behind.") from error


def _check_free(path: Path, force: bool) -> None:
    if path.is_dir() and not path.is_symlink():
        if not any(path.iterdir()):
            return
        _check_export(path)
        if not force:
            replaced = option("force", True)
            raise PlanFileError(f"{path} is there already: name another folder, or replace it with {replaced}.")
    elif path.exists() or path.is_symlink():
        raise PlanFileError(f"{path} is there already and is no folder: name another one.")


def _check_export(path: Path) -> None:
    """Nothing is in the folder but what an export wrote, and what Python left of running it."""
    try:
        written = set(json.loads((path / SETTINGS).read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanFileError(f"{path} is there already and is no export of memonger: name another folder.") from error
    present = (one.relative_to(path) for one in sorted(path.rglob("*")) if not one.is_dir())
    strange = [one for one in present if "__pycache__" not in one.parts and str(one) not in written]
    if strange:
        raise PlanFileError(
            f"{path} is there already and holds '{strange[0]}', which memonger didn't write: name another folder."
        )


def files_in(folder: Path) -> tuple[str, ...]:
    """Paths of the files within a folder, sorted."""
    return tuple(sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file()))


def _list_files(folder: Path) -> None:
    """Note in the settings what the export consists of: nothing else is ever replaced."""
    path = folder / SETTINGS
    add_json(path, {**json.loads(path.read_text()), "files": files_in(folder)})


def _sync(folder: Path) -> None:
    """Have the files on the disk before the folder gets its name."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())


def add_file(folder: Path, source: str, name: str) -> None:
    """Put one of the files in ``memonger/export/files`` into a folder."""
    (folder / name).write_text(resources.files("memonger.export").joinpath("files", source).read_text())


def add_models(package: Package, folder: Path) -> dict[str, Any]:
    """Write the planned files of all models; returns the settings from which `memonger.export.serving` loads them.

    Those of a single model lie in the folder itself, and of several in ``models/NAME``.
    """
    files = dict[str, list[str]]()
    for model in package.models:
        own = Path(".") if len(package.models) == 1 else Path("models", model.name)
        (folder / own).mkdir(parents=True, exist_ok=True)
        marks = [f".{batch}" for batch in model.batches or range(len(model.plans))] if len(model.plans) > 1 else [""]
        files[model.name] = [str(own / f"model{mark}.planned.onnx") for mark in marks]
        for plan, name in zip(model.plans, files[model.name], strict=True):
            plan.save(folder / name)
    return {"models": files, **asdict(package.sharing)}


def add_settings(package: Package, folder: Path, estimate: Estimate, **settings: Any) -> None:
    """Write what the served program reads, and what the export says of itself."""
    content = {
        "name": package.name, "instances": package.instances, **settings,
        "memory": {
            "parameter_bytes": estimate.parameters, "input_bytes": estimate.inputs,
            "activation_bytes": estimate.activations, "scratch_bytes": estimate.workspace,
            "instance_bytes": estimate.instance_bytes, "total_bytes": estimate.total_bytes,
        },
    }  # fmt: skip
    add_json(folder / SETTINGS, content)


def add_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file for people to read, too."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def models_table(package: Package) -> str:
    """The models with their inputs and outputs, for README.md: the sizes that requests may have."""
    lines = ["", "## Models", "", "| model | inputs | outputs |", "|---|---|---|"]
    for model in package.models:
        tensors = inputs_of(model.largest), outputs_of(model.largest)
        cells = [", ".join(_described(model, tensor) for tensor in some) for some in tensors]
        lines.append(f"| {model.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _described(model: ServedModel, tensor: Tensor) -> str:
    """As ``x: FP32 [1 to 4, 3, 16, 16]``."""
    sizes = [str(size) for size in tensor.sizes]
    if model.batches is not None and max(model.batches) > 1:
        sizes[0] = f"1 to {max(model.batches)}"
    return f"`{tensor.name}`: {datatype_of(tensor.dtype)} [{', '.join(sizes)}]"


def add_readme(package: Package, folder: Path, estimate: Estimate, text: str) -> None:
    """Write README.md: the target's own text, and the memory."""
    limit = package.sharing.limit
    memory = (
        f"## Memory\n\nPredicted for one instance: {in_full(estimate.instance_bytes)} beside the process itself "
        f"({describe(estimate)}). For {estimate.instances}: {in_full(estimate.total_bytes)}"
        f"{', the weights once' if estimate.shared and estimate.instances > 1 else ''}.\n"
    )
    if limit is not None:
        memory += (
            f"\nA fleet takes {in_full(limit)} at most: models that haven't run for longest go, and are loaded again "
            "for the next request that asks for them.\n"
        )
    notes = "".join(f"\n{note}\n" for note in package.notes)
    (folder / "README.md").write_text(f"# {package.name}\n\n{text.strip()}\n\n{memory}{notes}")
