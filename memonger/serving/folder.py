"""folder: what all targets put into their folder."""

import re
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from memonger.files import SETTINGS, add_json
from memonger.serving.package import Estimate, Package, ServedModel, TensorSpec, describe, inputs_of, outputs_of
from memonger.serving.protocol import datatype_of
from memonger.units import in_full, shown


def add_file(folder: Path, source: str, name: str) -> None:
    """Put one of the files in ``memonger/serving/files`` into a folder."""
    (folder / name).write_text(resources.files("memonger.serving").joinpath("files", source).read_text())


def add_models(package: Package, folder: Path) -> dict[str, Any]:
    """Write the planned files of all models; returns the settings from which `memonger.serving.serving` loads them.

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


def models_table(package: Package) -> str:
    """The models with their inputs and outputs, for README.md: the sizes that requests may have."""
    lines = ["", "## Models", "", "| model | inputs | outputs |", "|---|---|---|"]
    for model in package.models:
        tensors = inputs_of(model.largest), outputs_of(model.largest)
        cells = [", ".join(_described(model, tensor) for tensor in some) for some in tensors]
        lines.append(f"| {model.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _described(model: ServedModel, tensor: TensorSpec) -> str:
    """As ``x: FP32 [1 to 4, 3, 16, 16]``."""
    sizes = [str(size) for size in tensor.sizes]
    if model.batches is not None and max(model.batches) > 1:
        sizes[0] = f"1 to {max(model.batches)}"
    return f"{_code(tensor.name)}: {datatype_of(tensor.dtype)} [{', '.join(sizes)}]"


def _code(name: str) -> str:
    """A name from a model as code in a cell of a Markdown table, whatever is in it."""
    text = shown(name).replace("|", "\\|")
    ticks = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if len(ticks) > 1 else ""
    return f"{ticks}{space}{text}{space}{ticks}"


def _plain(text: str) -> str:
    """A text with names from a model in it as Markdown that says the same: no link, no HTML, one line."""
    return re.sub(r"([\\`*\[\]<>|&!])", r"\\\1", shown(text))


def describe_export(package: Package, folder: Path, estimate: Estimate, text: str, **settings: Any) -> None:
    """Write what the served program reads, with ``settings``, and README.md: the target's own text, and the memory."""
    content = {"name": package.name, "instances": package.instances, **settings, "memory": estimate.record()}
    add_json(folder / SETTINGS, content)
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
    notes = "".join(f"\n{_plain(note)}\n" for note in package.notes)
    (folder / "README.md").write_text(f"# {_plain(package.name)}\n\n{text.strip()}\n\n{memory}{notes}")
