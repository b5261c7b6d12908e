"""Plans that were made before: the folder that ``MEMONGER_CACHE`` names keeps each under a digest of what decides it.

An entry is a planned file, and in its metadata what such a file doesn't say, with the digest that it is kept under: of
the model, the options and all else that decides. It is checked like any file from outside, and what doesn't pass or is
another's is planned anew: entries can be deleted at any time. Where no plan held the budget, the entry is what was said
then.
"""

import dataclasses
import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnx_ir as ir

from memonger.devices import Device
from memonger.errors import BudgetError, MemongerError, PlanFileError
from memonger.files import write_whole
from memonger.ir.decoding import AtLeast, decode
from memonger.ir.model import Model
from memonger.ir.save import MAPPED_LIMIT, save_model
from memonger.ir.tensors import all_tensors
from memonger.model.load import Source, load_as_is
from memonger.options import Options
from memonger.plan import Plan
from memonger.plan_file import tensor_digest, with_record
from memonger.schedule.strategy import Outcome
from memonger.words import either

FOLDER = "MEMONGER_CACHE"
"""The environment variable that names the folder; without it nothing is kept."""

KEY = "memonger.kept"

LIBRARIES = ("numpy", "onnx", "onnx-ir", "ortools", "networkx")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Beside:
    """What a plan says beside its file, see `memonger.Plan`; ``entry`` is the digest that it is kept under."""

    entry: str
    costs: tuple[float, ...]
    forward: tuple[bool, ...]
    budget: int | None
    strategy: str | None
    outcome: Outcome | None
    origins: Mapping[str, str]
    notes: tuple[str, ...]
    peak_before_bytes: int | None
    live_before: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _CachedRefusal:
    """What is said where no plan holds a budget, see `memonger.errors.BudgetError`; ``entry`` as in `_Beside`."""

    entry: str
    smallest: Annotated[int, AtLeast(0)]
    lower_bound: Annotated[int, AtLeast(0)]
    hint: str


@dataclass(frozen=True, slots=True)
class Entry:
    """Where the plan of a model and of options is kept, or that there is none within the budget.

    Attributes:
        path: The planned file, which may not be there.
        refusal: The file that says why there is no plan, which may not be there. Its name depends on the model's name
            as well, and on whether messages name flags.
        budget: Bytes; None: no budget.
    """

    path: Path
    refusal: Path
    budget: int | None

    def read(self) -> Plan | None:
        """The plan without its source; None where none is kept, or what is there can't be used."""
        if not self.path.is_file():
            return None
        try:
            plan = Plan.load(self.path)
            beside = decode(_Beside, json.loads(plan.model.metadata_props.pop(KEY)))
            _check_own(beside.entry, self.path)
            graph = dataclasses.replace(plan.graph, costs=beside.costs, forward=beside.forward)
        except (MemongerError, KeyError, ValueError, RecursionError) as error:
            logger.warning("%s is planned anew: %s", self.path, error)
            return None
        if not len(graph.costs) == len(graph.forward) == len(graph.nodes):
            return None
        fields = {field.name: getattr(beside, field.name) for field in dataclasses.fields(beside)}
        del fields["entry"], fields["costs"], fields["forward"]
        fields["live_before"] = np.array(beside.live_before, np.int64)
        return dataclasses.replace(plan, graph=graph, weight_digests=None, **fields)

    def write(self, plan: Plan) -> None:
        """Keep a plan. Where that can't be done a warning is logged: the plan is good without it."""
        live = [] if plan.live_before is None else plan.live_before.tolist()
        beside = _Beside(
            self.path.stem, plan.graph.costs, plan.graph.forward, plan.budget, plan.strategy, plan.outcome,
            plan.origins, plan.notes, plan.peak_before_bytes, tuple(live),
        )  # fmt: skip
        model = with_record(plan.open_model, plan.record())
        model.metadata_props[KEY] = json.dumps(
            dataclasses.asdict(beside), separators=(",", ":"), default=lambda number: number.item()
        )
        try:
            _check_replaceable(self.path)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            save_model(model, self.path, limit=MAPPED_LIMIT)
        except (OSError, PlanFileError) as error:
            logger.warning("the plan isn't kept in %s (%s): %s", self.path.parent, FOLDER, error)

    def read_refusal(self) -> BudgetError | None:
        """Why there is no plan; None where that isn't kept, or what is there can't be used."""
        if self.budget is None or not self.refusal.is_file():
            return None
        try:
            said = decode(_CachedRefusal, json.loads(self.refusal.read_text()))
            _check_own(said.entry, self.refusal)
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("%s is planned anew: %s", self.refusal, error)
            return None
        if not said.lower_bound <= said.smallest or not self.budget < said.smallest:
            return None
        return BudgetError(self.budget, said.smallest, said.lower_bound, said.hint)

    def write_refusal(self, error: BudgetError) -> None:
        """Keep why there is no plan. Where that can't be done a warning is logged."""
        refusal = _CachedRefusal(self.refusal.stem, error.smallest, error.lower_bound, error.hint)
        said = json.dumps(dataclasses.asdict(refusal)).encode()
        try:
            _check_replaceable(self.refusal)
            write_whole(self.refusal, lambda target: target.write(said))
        except OSError as reason:
            logger.warning("the refusal isn't kept in %s (%s): %s", self.refusal.parent, FOLDER, reason)


def entry(source: Source | Model, options: Options, device: Device) -> Entry | None:
    """Where the plan of a model is kept; None where no folder is named, or what decides the plan has no digest.

    Raises:
        LoadError: the model can't be read.
        RuntimeUnavailableError: the device isn't there.
    """
    folder = os.environ.get(FOLDER)
    said = _options(options) if folder else None
    if not folder or said is None:
        return None
    digest = hashlib.sha256()
    for part in (versions(), _machine(device), str(device), said):
        digest.update(f"{part}\n".encode())
    model = source if isinstance(source, Model) else load_as_is(source)
    for content in _model(model.ir):
        digest.update(content)
    name = digest.hexdigest()
    digest.update(repr((model.name, either("keywords", "flags"))).encode())
    parent = Path(folder).expanduser() / name[:2]
    return Entry(parent / f"{name}.onnx", parent / f"{digest.hexdigest()}.refused.json", options.budget_bytes)


def _check_own(digest: str, path: Path) -> None:
    if digest != path.stem:
        raise ValueError("it was kept for another model, or for other options")


def _check_replaceable(path: Path) -> None:
    """Check that an entry may be written, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # a pipe, say: writing would wait for who reads it
        raise OSError(f"{path.name} is there, and is no file")


def _options(options: Options) -> str | None:
    """All options but who is told of progress; None with a loss or an optimizer of the caller's own."""
    for own in (options.loss, options.optimizer):
        if own is not None and not isinstance(own, str) and type(own).__module__.partition(".")[0] != "memonger":
            return None
    said = {field.name: repr(getattr(options, field.name)) for field in dataclasses.fields(options)}
    inputs = [(name, _described(given)) for name, given in (options.inputs or {}).items()]
    return repr({**said, "progress": None, "device": None, "inputs": inputs})


def _described(given: Any) -> Any:
    """An input's type, shape and content; of a sequence those of its elements."""
    if isinstance(given, list | tuple):
        return [_described(each) for each in given]
    array = np.asarray(given)
    content = repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
    return array.dtype.str, array.shape, hashlib.sha256(content).hexdigest()


@cache
def versions() -> str:
    """Of all that plans: this package's own source, Python and the libraries."""
    digest, folder = hashlib.sha256(), Path(__file__).parent.parent
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return " ".join((digest.hexdigest(), sys.version, *map(_version, LIBRARIES)))


def _version(library: str) -> str:
    try:
        return f"{library} {metadata.version(library)}"
    except metadata.PackageNotFoundError:  # an extra
        return f"no {library}"


def _machine(device: Device) -> str:
    """Of a device that models are lowered for: the runtime and the machine; where none is meant, nothing."""
    if device.facts.is_portable:
        return ""
    from memonger.runtime import ort
    from memonger.runtime.backend import backend

    ort.check_device(device)
    return f"{ort.runtime_name()} {backend(device).machine_name()} {os.cpu_count()}"


def _model(model: ir.Model) -> Iterator[bytes]:
    """All that a model says, its weights included."""
    graph = model.graph
    yield repr((model.ir_version, sorted(model.opset_imports.items()), graph.name)).encode()
    yield repr((sorted(model.metadata_props.items()), sorted(graph.metadata_props.items()))).encode()
    for value in (*graph.inputs, *graph.outputs):
        yield ir.serde.serialize_value(value).SerializeToString(deterministic=True)
    for name, value in graph.initializers.items():
        yield repr((name, value.dtype, value.shape)).encode()
    for node in graph:
        yield ir.serde.serialize_node(node).SerializeToString(deterministic=True)
        for value in node.outputs:
            yield repr((value.name, value.type, value.shape, sorted(value.metadata_props.items()))).encode()
    for function in model.functions.values():
        yield ir.serde.serialize_function(function).SerializeToString(deterministic=True)
    for tensor in all_tensors(model):
        yield tensor_digest(tensor).encode()
