"""An answer of `memonger.fit` as a file, and its check from the model and the planned file alone.

A certificate is untrusted input: nothing it says is believed. The plan is followed by the independent checker, made
again from the model's own nodes, and counted; the bound of one size more is derived again.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from memonger.autodiff.optimizers import SGD, Adam, AdamW, Lion
from memonger.autodiff.updates import Optimizer
from memonger.devices import Cuda
from memonger.errors import LoadError, PlanError, PlanFileError, VerificationError
from memonger.files import write_whole
from memonger.graph import schedule
from memonger.graph.liveness import Sharing
from memonger.model.decoding import AtLeast, DecodingError, OneOf, decode
from memonger.plan import Plan
from memonger.plan_file import graph_digest, weight_digests
from memonger.planning.at_size import Changes, lower, lower_bound
from memonger.planning.dimension import open_dimension
from memonger.planning.options import Options
from memonger.planning.search_plan import Job
from memonger.units import MOST_BATCH, MOST_THREADS, in_full
from memonger.words import option

KIND = "memonger.fit/1"

_LONGEST = 1 << 20
"""Bytes of the largest certificate that is read."""

_OPTIMIZERS: Mapping[str, Any] = {"SGD": SGD, "Adam": Adam, "AdamW": AdamW, "Lion": Lion}

Size = Annotated[int, AtLeast(0)]


@dataclass(frozen=True, slots=True)
class OptimizerRecord:
    """An optimizer of memonger's: its class, its numbers, and the patterns of parameters without decay."""

    name: Annotated[str, OneOf(tuple(_OPTIMIZERS))]
    settings: Mapping[str, tuple[float, ...]]
    no_decay: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Recipe:
    """The options that decide what is planned, as `Options` has them."""

    mode: Annotated[str, OneOf(("training", "inference"))]
    device: str
    train_mode: bool = False
    rank: Annotated[int, AtLeast(1)] | None = None
    pattern: str = "*"
    batch: Annotated[int, AtLeast(1, MOST_BATCH)] | None = None
    dims: Mapping[str, Annotated[int, AtLeast(0, MOST_BATCH)]] = field(default_factory=dict)
    loss: str | None = None
    optimizer: OptimizerRecord | None = None
    precision: Annotated[str, OneOf(("float16", "bfloat16"))] | None = None
    level: Annotated[str, OneOf(("disable", "basic", "extended", "all"))] | None = None
    threads: Annotated[int, AtLeast(0, MOST_THREADS)] = 0
    inplace: bool = True
    views: bool = True
    reuse: bool = True
    windows: bool = True
    cuda: Cuda = field(default_factory=Cuda)


_SAME = ("batch", "loss", "precision", "level", "threads", "cuda")
"""What a recipe has as `Options` has it."""


@dataclass(frozen=True, slots=True)
class Beyond:
    """What is known of the smallest size that wasn't found to fit.

    Attributes:
        size: The size.
        status: ``proven``: it doesn't fit, whatever the schedule. ``open``: no plan that fits was found. ``refused``:
            the model can't have this size, or this machine can't measure it, whatever the memory.
        total_bytes: The smallest total of a plan that was found; None if refused.
        lower_bound_bytes: No plan of this size takes less; None if refused.
        reason: Why it is refused, in words.
    """

    size: Annotated[int, AtLeast(1, MOST_BATCH)]
    status: Annotated[Literal["proven", "open", "refused"], OneOf(("proven", "open", "refused"))]
    total_bytes: Size | None = None
    lower_bound_bytes: Size | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer of `memonger.fit` without its plan.

    Attributes:
        memory: Bytes for everything.
        vary: The dimension.
        size: The largest size found to fit; 0 if none was.
        recomputes: Whether the bounds are for plans in which nodes may run again, too.
        total_bytes: The plan's total.
        beyond: What is said of one size more.
        recipe: The options.
    """

    memory: Size
    vary: str
    size: Annotated[int, AtLeast(0, MOST_BATCH)]
    recomputes: bool
    total_bytes: Size | None
    beyond: Beyond | None
    recipe: Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate(Answer):
    """An answer, and the files it is about. Paths are relative to the certificate's folder; digests are SHA-256.

    Attributes:
        certificate: What this file is.
        model: The model's file.
        model_digest: Of its bytes.
        planned: The planned file; None if nothing fits.
        planned_digest: Of its bytes.
    """

    certificate: Annotated[str, OneOf((KIND,))] = KIND
    model: str
    model_digest: str
    planned: str | None
    planned_digest: str | None


def write(path: Path, answer: Answer, model: Path, planned: Path | None) -> None:
    """Write the certificate of an answer.

    Raises:
        PlanError: there is a plan and no planned file, or the other way round.
        PlanFileError: the planned file is another plan.
        OSError: it can't be written.
    """
    if (planned is None) != (answer.total_bytes is None):
        raise PlanError("a certificate names the planned file: save Fit.plan, and give its path.")
    if planned is not None and Plan.load(planned, check_weights=False).total_bytes != answer.total_bytes:
        raise PlanFileError(f"{planned} is another plan than the one that was found.")
    fields = {each.name: getattr(answer, each.name) for each in dataclasses.fields(answer)}
    certificate = Certificate(
        **fields,
        model=_relative(model, path),
        model_digest=_digest(model),
        planned=None if planned is None else _relative(planned, path),
        planned_digest=None if planned is None else _digest(planned),
    )
    text = json.dumps(dataclasses.asdict(certificate), indent=1) + "\n"
    write_whole(path, lambda file: file.write(text.encode()))


def recipe(options: Options, changes: Changes) -> Recipe:
    """The options as a certificate holds them.

    Raises:
        PlanError: one of them can't be written down.
    """
    if options.loss is not None and not isinstance(options.loss, str):
        raise PlanError("a certificate holds a loss by its name: give loss='softmax_cross_entropy', not an object.")
    if options.inputs is not None:
        raise PlanError(f"a certificate holds no arrays: leave {option('inputs')} out.")
    return Recipe(
        mode=options.chosen_mode,
        device=str(options.device),
        **dataclasses.asdict(changes),
        **{name: getattr(options, name) for name in _SAME},
        dims=options.sizes,
        optimizer=None if options.optimizer is None else _optimizer_record(options.optimizer),
        **dataclasses.asdict(options.sharing),
    )


def _optimizer_record(optimizer: Optimizer) -> OptimizerRecord:
    name = type(optimizer).__name__
    if _OPTIMIZERS.get(name) is not type(optimizer):
        raise PlanError(f"a certificate holds an optimizer of memonger's ({', '.join(_OPTIMIZERS)}), not a {name}.")
    values = {each.name: getattr(optimizer, each.name) for each in dataclasses.fields(optimizer)}  # type: ignore[arg-type]
    patterns = values.pop("no_decay")
    patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    settings = {
        key: tuple(map(float, value if isinstance(value, tuple) else (value,))) for key, value in values.items()
    }
    return OptimizerRecord(name, settings, patterns)


def _optimizer_of(record: OptimizerRecord) -> Optimizer:
    kind = _OPTIMIZERS[record.name]
    default = kind()
    values: dict[str, Any] = {"no_decay": record.no_decay}
    for name, numbers in record.settings.items():
        usual = getattr(default, name, None)
        if name == "no_decay" or usual is None or not numbers:
            raise VerificationError(f"an optimizer {record.name} has no setting '{name}'.")
        values[name] = tuple(numbers) if isinstance(usual, tuple) else type(usual)(numbers[0])
    made: Optimizer = kind(**values)
    return made


def _relative(file: Path, certificate: Path) -> str:
    return Path(os.path.relpath(file.resolve(), certificate.resolve().parent)).as_posix()


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def is_certificate(path: Path) -> bool:
    """Whether a file is a certificate, well-formed or not."""
    try:
        if not path.is_file() or path.stat().st_size > _LONGEST:
            return False
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "certificate" in content


def read(path: Path) -> Certificate:
    """Read a certificate; what it says is not checked.

    Raises:
        PlanFileError: it is malformed, or of a newer format.
    """
    try:
        return decode(Certificate, json.loads(path.read_bytes()))
    except DecodingError as error:
        raise PlanFileError(f"{path}: the certificate is malformed: {error}.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise PlanFileError(f"{path} can't be read as a certificate: {error}.") from error


def verify(path: Path) -> Certificate:
    """Check a certificate: every statement is derived again from the model and the planned file.

    Raises:
        VerificationError: a statement doesn't hold; the message says which.
        PlanFileError: the certificate or the planned file is malformed.
        LoadError, PlanError, RuntimeUnavailableError: the model can't be lowered here as it was.
    """
    certificate = read(path)
    model = _file(path, certificate.model, certificate.model_digest, "model")
    recipe = certificate.recipe
    options, changes = _options(recipe), Changes(recipe.train_mode, recipe.rank, recipe.pattern)
    dimension = open_dimension(model, certificate.vary, options)

    def at(size: int) -> Job:
        return lower(model, dimension, size, options, changes)

    if (certificate.planned is None) != (certificate.size == 0):
        raise VerificationError(f"{path}: it says that size {certificate.size} fits, and names no plan of that size.")
    if certificate.planned is not None:
        planned = _file(path, certificate.planned, certificate.planned_digest, "planned file")
        _check_plan(certificate, Plan.load(planned), at(certificate.size), planned)
    if certificate.beyond is not None:
        _check_beyond(path, certificate, certificate.beyond, at)
    return certificate


def _file(certificate: Path, name: str, digest: str | None, what: str) -> Path:
    path = certificate.parent / name
    if not path.is_file():
        raise VerificationError(f"{certificate}: the {what} {path} isn't there.")
    if _digest(path) != digest:
        raise VerificationError(f"{certificate}: the {what} {path} was changed since (its digest differs).")
    return path


def _options(recipe: Recipe) -> Options:
    return Options(
        mode=recipe.mode,  # type: ignore[arg-type]  # checked when it was decoded
        device=recipe.device,
        **{name: getattr(recipe, name) for name in _SAME},
        dims=recipe.dims,
        optimizer=None if recipe.optimizer is None else _optimizer_of(recipe.optimizer),
        sharing=Sharing(**{each.name: getattr(recipe, each.name) for each in dataclasses.fields(Sharing)}),
    )


def _check_plan(certificate: Certificate, plan: Plan, job: Job, planned: Path) -> None:
    """That a plan, which the checker found correct, is one of the model at the size, and within the memory."""
    if plan.total_bytes != certificate.total_bytes:
        raise VerificationError(
            f"{planned} takes {plan.total_bytes} bytes, where the certificate says {certificate.total_bytes}."
        )
    if plan.total_bytes > certificate.memory:
        raise VerificationError(
            f"{planned} takes {in_full(plan.total_bytes)}: more than {in_full(certificate.memory)}."
        )
    graph, model = job.request.graph, job.lowered.model
    number = {name: node for node, name in enumerate(graph.nodes)}
    steps = [schedule.original(name) for name in plan.graph.nodes]
    of_size = f"the model at {certificate.vary} {certificate.size}"
    strange = next((name for name in steps if name not in number), None)
    if strange is not None:
        raise VerificationError(f"{planned} is no plan of {of_size}: that has no node '{strange}'.")
    order = tuple(number[name] for name in steps)
    schedule.schedule_model(model, order, schedule.schedule_graph(graph, order))
    if graph_digest(model) != graph_digest(plan.model):
        raise VerificationError(f"{planned} is no plan of {of_size}: its nodes, types or shapes differ.")
    if plan.weight_digests is not None and weight_digests(model) != plan.weight_digests:
        raise VerificationError(f"{planned} has other weights than the model.")
    if not certificate.recomputes and plan.recomputed:
        raise VerificationError(f"{planned} computes nodes again, which the certificate rules out.")


def _check_beyond(path: Path, certificate: Certificate, claim: Beyond, at: Callable[[int], Job]) -> None:
    """That one size more doesn't fit, where that is claimed; and the bound, where it is given."""
    if certificate.size and claim.size != certificate.size + 1:
        raise VerificationError(f"{path}: it says of size {claim.size} what it should say of {certificate.size + 1}.")
    what = f"{path}: {certificate.vary} {claim.size}"
    try:
        request = at(claim.size).request
    except (LoadError, PlanError) as error:
        if claim.status == "refused":
            return
        raise VerificationError(f"{what} can't be lowered: {error}") from error
    if claim.status == "refused":
        raise VerificationError(f"{what} is said to be refused by the model, and isn't.")
    bound = lower_bound(request, recomputes=certificate.recomputes)
    if claim.status == "proven" and bound <= certificate.memory:
        raise VerificationError(
            f"{what} is said not to fit {in_full(certificate.memory)}, but the lower bound is only {in_full(bound)}."
        )
    if claim.lower_bound_bytes is not None and bound < claim.lower_bound_bytes:
        raise VerificationError(
            f"{what} is said to need at least {claim.lower_bound_bytes} bytes, but the lower bound is {bound}."
        )
