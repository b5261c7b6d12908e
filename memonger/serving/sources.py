"""sources: what there is to export → the plans of each model by its name."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from memonger.errors import PlanError, PlanFileError, system_checked
from memonger.plan import Plan
from memonger.serving.form import has_plan
from memonger.serving.package import Naming
from memonger.words import either

Plans = list[Plan | str | Path]
SUFFIX = ".onnx"

_NAMING = Naming(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", "it is part of a URL, so letters, digits and ._-, 100 at most")


def several_of(given: Any) -> dict[str, Plans] | None:
    """The plans of several models by name, where a mapping or a folder was given; None where a model was.

    Raises:
        PlanError: a name, or what stands under it, can't be served; a file in the folder has no plan.
        PlanFileError: the folder can't be read, holds no model, or two of one name.
    """
    if isinstance(given, Mapping):
        models = {str(name): [one] if isinstance(one, Plan | str | Path) else list(one) for name, one in given.items()}
    elif isinstance(given, str | Path) and Path(given).is_dir():
        models = _models_in(Path(given))
    else:
        return None
    for name, plans in models.items():
        _NAMING.check(name)
        for plan in plans:
            if not has_plan(plan):
                file = plan if isinstance(plan, str | Path) else f"'{name}'"
                how = either("memonger.search_plan(model)", f"memonger plan {file} --mode inference -o PLANNED.onnx")
                raise PlanError(f"{file} has no plan in it, and several models are served as they were planned: {how}.")
    return models


def _models_in(folder: Path) -> dict[str, Plans]:
    """The models of a folder: a file is one, and a folder with plans for several batches is one, by their names."""
    models, origins = dict[str, Plans](), dict[str, Path]()
    with system_checked(PlanFileError, f"{folder} can't be read"):
        entries = [*_files(folder), *(one for one in sorted(folder.iterdir()) if one.is_dir() and any(_files(one)))]
    for one in entries:
        name = one.name if one.is_dir() else one.name.removesuffix(SUFFIX).removesuffix(".planned")
        if name in models:
            raise PlanFileError(
                f"{origins[name]} and {one} would both be '{name}': rename one, or put plans of one model for several "
                f"batches into a folder {folder / name}."
            )
        models[name], origins[name] = list(_files(one)) if one.is_dir() else [one], one
    if not models:
        raise PlanFileError(
            f"{folder} holds no models: put planned files (*{SUFFIX}) there, or a folder of plans for each."
        )
    return dict(sorted(models.items()))


def _files(folder: Path) -> Iterator[Path]:
    """The model files right in a folder."""
    return (one for one in sorted(folder.iterdir()) if one.name.endswith(SUFFIX) and one.is_file())
