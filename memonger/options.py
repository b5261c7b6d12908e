"""The options of a plan: one record that is checked when it is made, and the same as keywords of functions."""

import dataclasses
import functools
import inspect
import math
import numbers
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ParamSpec, TypedDict, TypeVar, get_args

from memonger.devices import Cuda, Device, parse_device
from memonger.errors import PlanError, memory_checked
from memonger.graph.liveness import Sharing
from memonger.option_names import HeldWeights, Level, Mode, Order, Precision, Strategy
from memonger.plan_file import ROWS
from memonger.schedule import EFFORT, STRATEGIES
from memonger.shapes.ranges import MOST_RANGES, DimRange, in_terms_of, own, terms_of
from memonger.units import MOST_BATCH, MOST_BUDGET, MOST_POINTS, MOST_THREADS, MOST_TRIALS, in_bytes, whole
from memonger.words import check_choice, did_you_mean, listed, option

if TYPE_CHECKING:
    from memonger.autodiff.losses import Loss
    from memonger.autodiff.updates import Optimizer
    from memonger.graph.collectives import Buckets

Progress = Callable[[str], None]

Dim = int | tuple[int, int] | tuple[int, int, int] | str
"""The size of a dimension; the smallest and the largest, with a step where not all between them are meant; or the sum
of others that it is."""

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Options:
    """The options of a plan, checked when the record is made. Each is also a keyword of `memonger.search_plan`.

    Attributes:
        mode: ``training`` or ``inference``. None: training for a model that has gradients, is in training form or
            carries marks (``mirror_stage``, ``force_mirroring``), and where a loss, an optimizer, ``mirror`` or a
            strategy of training is given; inference for any other. A note on the plan says which, and why.
        batch: Size of the inputs' open first dimension; see `memonger.load`.
        dims: Sizes of open dimensions by name; see `memonger.load`. ``(1, 16)`` is a range, ``(64, 512, 32)`` one with
            a step: the layout then holds for every size in it, and a session runs them all. For inference on the CPU,
            or for no device. A text is a sum of others, as ``{"total": "past + seq"}``; a
            dimension whose name is such a sum needs none.
        loss: See `memonger.differentiate`; for a model that isn't a training model yet.
        optimizer: See `memonger.differentiate`.
        precision: ``float16`` or ``bfloat16``: train in mixed precision, see `memonger.to_mixed_precision`.
        device: ``none``, ``cpu``, ``cuda:N``; None: the CPU where onnxruntime is installed, else none.
        budget: Bytes (of a fraction the whole part), or a text such as ``4GiB``: search the fastest plan whose total,
            arena with workspace, parameters and inputs, is no more. On the CPU it may be smaller than the parameters,
            and than the optimizer's state: some then stay in the plan's file, and of what is trained in one of the
            session's (`memonger.Plan.resident_parameter_bytes`). On a CUDA device weights then lie in the host's memory
            (`memonger.Plan.host_weights`).
        weights: How many of the weights, and of what a step updates, are in memory all the time: ``auto``, as many as
            the budget has room for, without one all; ``packed``, all, as kernels pack them, and a budget below them is
            refused; ``mapped``, as few as there can be, whatever room there is: of the others each is there while steps
            read it. Where none can stay in a file a note on the plan says why. ``ahead``: as ``auto``, and on a CUDA
            device weights are copied while earlier steps run, in inference, where there is room for that.
        strategy: What decides which nodes are recomputed: ``none``, ``cheap``, ``block``, ``sqrt``, ``log``,
            ``sweep``, ``marks``, ``budget`` or ``exact``. None: ``budget`` where there is a budget; else ``sweep``
            for training, ``none`` for inference.
        mirror: Patterns of nodes (by name, operator or output) to recompute, whatever the strategy decides of the
            others. Nodes that can't run again are kept, and a note on the plan says so; with ``marks`` they are an
            error.
        keep: Patterns of nodes to keep. They overrule ``mirror``.
        trials: Number of thresholds that the strategy ``sweep`` tries.
        effort: How many changes a search may try, each of about 10 µs.
        time_limit: Seconds after which a search improves nothing more, a sweep tries no more thresholds and a frontier
            gets no more points; the plan then depends on the machine's speed.
        chunks: Which nodes run in chunks, on one slice of an axis after the other: ``auto``, on the CPU, as far as
            memory falls at a cost of ``max_overhead``, or as a budget needs; ``off``; or for inference a number, for
            everything that can along the inputs' first axis, with ``1:8`` for eight along the axis after it, or
            ``strips:8`` for bands of nodes by rows of the image, for no device, too.
        max_overhead: Most extra time that ``chunks="auto"`` may take without a budget, as a fraction: by estimate, and
            as measured where that can be told (`memonger.planner.chunk_timing`).
        allow_rounding: Let nodes run in chunks whose results then differ in their last bits.
        sharing: Which values may share an address.
        order: Order of the nodes: ``file``, ``growth``, ``depth``, or ``peak``, searched for the smallest peak.
            ``best`` tries all, for training all but ``peak``, and keeps the one that needs least memory.
        level: onnxruntime's optimization level for device plans: ``disable``, ``basic``, ``extended`` or ``all``; or
            ``rewrite``: ``disable`` with convolutions of training steps in kernels that are faster on the CPU, whose
            sums come in another order than stock onnxruntime's. None: ``all`` for inference; for training, where
            weights change and nothing could be folded into them, ``rewrite`` on the CPU and ``disable`` elsewhere.
        threads: Threads within a node; 0 leaves the number to onnxruntime.
        state: Inputs that a session keeps, and which output each becomes for the next run: ``{"h": "h_next"}``, for
            inference. It is written in place where a kernel may, else two buffers swap; see `memonger.Session`. A cache
            grows along a dimension with a range, of which the largest size counts. ``{"past.*": "present.*"}`` names
            all inputs that begin so.
        buckets: Of training on several ranks, how gradients are put together for the all-reduce (`memonger.Buckets`).
            The plan is the same for any number of ranks; see `memonger.DistributedTrainingSession`. Without chunks.
        inputs: Inputs for the calibrating run, as a session takes them, random numbers if None. Their shapes also give
            the sizes of dimensions that are still open.
        cuda: How onnxruntime's CUDA provider is set up, for a plan on a CUDA device.
        progress: Called with the name of each stage as it begins.

    Raises:
        PlanError: an option has a value it can't take, or two options contradict each other.
    """

    mode: Mode | None = None
    batch: int | None = None
    dims: Mapping[str, Dim] | None = None
    loss: "str | Loss | None" = None
    optimizer: "Optimizer | None" = None
    precision: Precision | None = None
    device: str | Device | None = None
    budget: float | str | None = None
    weights: HeldWeights = "auto"
    strategy: Strategy | None = None
    mirror: Sequence[str] = ()
    keep: Sequence[str] = ()
    trials: int = 6
    effort: int = EFFORT
    time_limit: float | None = None
    chunks: str | int = "auto"
    max_overhead: float = 0.02
    allow_rounding: bool = False
    sharing: Sharing = field(default_factory=Sharing)
    order: Order = "best"
    level: Level | None = None
    threads: int = 0
    state: Mapping[str, str] | None = None
    buckets: "Buckets | None" = None
    inputs: Mapping[str, Any] | None = None
    cuda: Cuda = field(default_factory=Cuda)
    progress: Progress | None = None

    def __post_init__(self) -> None:
        for key, kind in _NAMED:
            value = getattr(self, key)
            if value is not None or key in ("order", "weights"):
                check_choice(key, value, get_args(kind), PlanError)
        for key, kind, words in _KINDS:
            value = getattr(self, key)
            if isinstance(kind, str):
                if value is None or (key == "loss" and isinstance(value, str)):
                    continue
                kind = resolve_name(kind)
            if not isinstance(value, kind):
                raise PlanError(f"{key} must be {words}, not {reprlib.repr(value)}.")
        for key, least, most in _BOUNDS:
            if getattr(self, key) is not None or key != "batch":
                object.__setattr__(self, key, whole(key, getattr(self, key), least, most, PlanError))
        for name, size in (self.dims or {}).items():
            _check_size(name, size, self.dims or {})
        if len(own(self.ranges)) > MOST_RANGES:
            raise PlanError(f"at most {MOST_RANGES} dimensions can have a range of sizes, not {len(own(self.ranges))}.")
        for key in ("mirror", "keep"):
            value = getattr(self, key)
            if not isinstance(value, Sequence) or not all(isinstance(one, str) for one in value):
                raise PlanError(f"{key} must be a pattern or a list of them, as ['conv*'], not {reprlib.repr(value)}.")
        if self.time_limit is not None and not (_is_number(self.time_limit) and 0 <= self.time_limit < math.inf):
            raise PlanError(f"time_limit must be a finite number of seconds, 0 or more, not {self.time_limit!r}.")
        if not (_is_number(self.max_overhead) and 0 <= self.max_overhead < math.inf):
            raise PlanError(f"max_overhead must be a fraction, 0 or more, as 0.02, not {self.max_overhead!r}.")
        if self.progress is not None and not callable(self.progress):
            raise PlanError(f"progress must be a function of one text, not {self.progress!r}.")
        if not all(isinstance(name, str) for pair in (self.state or {}).items() for name in pair):
            raise PlanError(f"state must be names of inputs and outputs, as {{'h': 'h_next'}}, not {self.state!r}.")
        for exclusion in EXCLUSIONS:
            if exclusion.holds(self):
                raise PlanError(str(exclusion))
        if self.budget is not None:
            in_bytes("budget", self.budget, PlanError)

    def for_budgets(self) -> "Options":
        """The options with a budget, as what tries several of its own has them.

        Raises:
            PlanError: the strategy takes none.
        """
        return dataclasses.replace(self, budget=0) if self.budget is None else self

    def check_budget(self) -> None:
        """Check that a strategy that takes a budget has one, for what tries no budgets of its own.

        Raises:
            PlanError: it has none.
        """
        if self.budget is None and STRATEGIES[self.chosen_strategy].takes_budget:
            raise PlanError(f"strategy {self.chosen_strategy!r} needs a budget, as {option('budget', '4GiB')}.")

    def __repr__(self) -> str:
        """What differs from the defaults: ``Options(mode='training', budget='4GiB')``."""
        defaults = _defaults()
        values = {name: getattr(self, name) for name in defaults}
        changed = {name: value for name, value in values.items() if value is not defaults[name]}
        return f"Options({', '.join(f'{k}={reprlib.repr(v)}' for k, v in changed.items() if v != defaults[k])})"

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of open dimensions; of those with a range the largest."""
        return {name: one.most for name, one in _ranges(self.dims or {}).items()}

    @property
    def ranges(self) -> dict[str, DimRange]:
        """The dimensions of which a range of sizes is asked for; their places aren't known yet."""
        dims = self.dims or {}
        free = {name for name, size in dims.items() if _is_range(size)}
        found = _ranges(dims).items()
        return {name: one for name, one in found if name in free or not free.isdisjoint(terms_of(one.equals))}

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes."""
        return None if self.budget is None else in_bytes("budget", self.budget, PlanError)

    @property
    def axis_and_chunks(self) -> tuple[int, int] | None:
        """The axis and the number of chunks asked for; None where that is left to the search, or there are to be none.

        Raises:
            PlanError: it is none of what `chunks` may be.
        """
        match = _CHUNKS.fullmatch(str(self.chunks))
        if match is None or isinstance(self.chunks, bool) or (match[3] and not 2 <= int(match[3]) <= MOST_BATCH):
            raise PlanError(
                "chunks must be 'auto', 'off', a number from 2 on, or one with an axis ('1:8', 'strips:8'), not "
                f"{self.chunks!r}."
            )
        return (_AXES[match[2]], int(match[3])) if match[3] else None

    @property
    def chosen_mode(self) -> Mode:
        """The mode asked for, or what the options alone say of it; see `memonger.planner.search_plan.infer_mode`."""
        return self.mode or ("training" if self.trains or self.recomputes_for_training else "inference")

    @property
    def chosen_strategy(self) -> Strategy:
        """The strategy asked for, or for a model the one that goes with the mode and the budget."""
        if self.strategy is None and self.budget is not None:
            return "budget"
        return self.strategy or ("sweep" if self.chosen_mode == "training" else "none")

    @property
    def recomputes_for_training(self) -> bool:
        """Whether something is asked for that only training plans have: marks, or a strategy without a budget."""
        if self.mirror:
            return True
        return self.strategy not in (None, "none") and not STRATEGIES[self.chosen_strategy].takes_budget

    @property
    def trains(self) -> bool:
        """Whether the model is to be differentiated: a loss or an optimizer is given."""
        return self.loss is not None or self.optimizer is not None


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Two options that don't go together. In its texts ``[dims]`` stands for an option as who asked would write it.

    Attributes:
        first: An option, with its value where that matters.
        second: What it doesn't go with.
        holds: Whether options have both.
        reason: Why: the rest of a sentence.
        instead: What to do: a sentence without its dot.
    """

    first: str
    second: str
    holds: Callable[[Options], bool]
    reason: str
    instead: str

    def __str__(self) -> str:
        """What is said to whom gave both."""
        text = f"{self.first} doesn't go with {self.second}: {self.reason}. {self.instead}."
        return re.sub(r"\[(\w+)(?:=(\w+))?\]", lambda found: option(*filter(None, found.groups())), text)


_WITHOUT_BUDGET, _OF_BUDGETS = (
    listed(repr(n) for n, one in STRATEGIES.items() if one.takes_budget == takes) for takes in (False, True)
)

EXCLUSIONS = (
    Exclusion(
        "a loss, optimizer, precision or buckets",
        "[mode=inference]",
        lambda it: it.mode == "inference" and (it.trains or it.precision is not None or it.buckets is not None),
        "they are for training",
        "Say [mode=training], or leave [mode] out and give a [loss]",
    ),
    Exclusion(
        "a range of sizes ([dims])",
        "training, nor with a CUDA device",
        lambda it: bool(it.ranges) and (it.chosen_mode == "training" or _is_cuda(it.device)),
        "gradients, and what CUDA runs, are written for the sizes of one run",
        "Give one size, or plan several: a session takes them together",
    ),
    Exclusion(
        "a state ([state])",
        "training",
        lambda it: bool(it.state) and it.chosen_mode == "training",
        "its gradient would be that of all runs before",
        "Leave [state] out: a step is given, and gives, what it names",
    ),
    Exclusion(
        "a number of chunks",
        "training",
        lambda it: it.axis_and_chunks is not None and it.chosen_mode == "training",
        "the nodes of a training step have no axis in common",
        "[chunks=auto] finds those along which they can be cut",
    ),
    Exclusion(
        "a number of chunks",
        "a CUDA device",
        lambda it: it.axis_and_chunks is not None and _is_cuda(it.device),
        "whether slices give the same bits is found out on the CPU",
        "Say [device=cpu] or [device=none], or leave [chunks] out",
    ),
    Exclusion(
        "[budget]",
        f"the strategies {_WITHOUT_BUDGET}",
        lambda it: it.budget is not None and not STRATEGIES[it.chosen_strategy].takes_budget,
        f"they take no budget, {_OF_BUDGETS} do",
        "Leave one of the two out",
    ),
    Exclusion(
        "[mirror]",
        "[mode=inference], nor with [strategy=none]",
        lambda it: bool(it.mirror) and (it.chosen_mode == "inference" or it.chosen_strategy == "none"),
        "nodes run again for a backward pass, and by that strategy none does",
        "Leave one of the two out",
    ),
)
"""All options that don't go together; docs/OPTIONS.md shows them, and `Options` refuses them."""


def _is_cuda(device: str | Device | None) -> bool:
    return device is not None and not parse_device(device).is_host


@functools.cache
def _defaults() -> Mapping[str, Any]:
    plain = Options()
    return {one.name: getattr(plain, one.name) for one in dataclasses.fields(Options)}


class ForGraph(TypedDict, total=False):
    """Keywords for a graph without a model; `Options` documents each."""

    budget: float | str | None
    strategy: Strategy | None
    trials: int
    effort: int
    time_limit: float | None
    sharing: Sharing
    order: Order
    progress: Progress | None


class Keywords(ForGraph, total=False):
    """All fields of `Options` as keywords: those for a model."""

    mode: Mode | None
    batch: int | None
    dims: Mapping[str, Dim] | None
    loss: "str | Loss | None"
    optimizer: "Optimizer | None"
    precision: Precision | None
    device: str | Device | None
    keep: Sequence[str]
    level: Level | None
    weights: HeldWeights
    threads: int
    inputs: Mapping[str, Any] | None
    cuda: Cuda
    chunks: str | int
    max_overhead: float
    allow_rounding: bool
    mirror: Sequence[str]
    state: Mapping[str, str] | None
    buckets: "Buckets | None"


def bytes_of_budgets(budgets: Sequence[float | str]) -> list[int]:
    """Budgets in bytes.

    Raises:
        PlanError: they are no list, too many, or one of them is no size.
    """
    if isinstance(budgets, str) or not isinstance(budgets, Sequence) or len(budgets) > MOST_POINTS:
        raise PlanError(f"budgets must be a list of at most {MOST_POINTS} sizes, as ['1GiB', '2GiB'], not "
                        f"{reprlib.repr(budgets)}.")  # fmt: skip
    return [in_bytes("budget", budget, PlanError) for budget in budgets]


def combine(options: Options | None, keywords: Mapping[str, Any]) -> Options:
    """The options with the fields that keywords give replaced."""
    return Options(**keywords) if options is None else dataclasses.replace(options, **keywords)


def check_graph_options(options: Options) -> None:
    """Check that the options make sense for a graph without a model.

    Raises:
        PlanError: an option that only a model has a use for.
    """
    plain, general = Options(), sorted(ForGraph.__annotations__)
    for name in (f.name for f in dataclasses.fields(Options) if f.name not in general):
        if getattr(options, name) != getattr(plain, name):
            raise PlanError(f"{name} is for models: a graph without one takes {', '.join(general)}.")
    if options.strategy is not None and STRATEGIES[options.strategy].needs_model:
        raise PlanError(
            f"strategy {options.strategy!r} needs a model: a graph without one has neither operators nor marks."
        )


_LESS_MEMORY = "Plan for a smaller batch, keep large weights in a file beside the model, or use a larger machine."


def takes_options(*left_out: str, **defaults: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for a function with ``**keywords: Unpack[Keywords]``: ``help()`` then shows every option.

    A keyword that is no option raises a TypeError that suggests the nearest name.

    Args:
        left_out: Options the function doesn't have.
        defaults: What options are if the function is given neither them nor a record of options.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = getattr(function, "__name__", "")
        own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
        names = [*(p.name for p in own), *Keywords.__annotations__]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for unknown in (key for key in kwargs if key not in names):
                raise TypeError(f"{name}() has no option '{unknown}'.{did_you_mean(unknown, names)}")
            if kwargs.get("options") is None:
                kwargs.update({key: value for key, value in defaults.items() if key not in kwargs})
            with memory_checked(PlanError, "the model can't be planned", _LESS_MEMORY):
                return function(*args, **kwargs)

        shown = [p for p in inspect.signature(Options).parameters.values() if p.name not in left_out]
        given = [p.replace(default=defaults.get(p.name, getattr(Options(), p.name))) for p in shown]
        checked.__signature__ = inspect.signature(function).replace(parameters=[*own, *given])  # type: ignore[attr-defined]
        # The docstring's line for ``keywords`` is replaced by what `Options` says of each option
        described = re.findall(r"^    (\w+): ((?:.+\n)(?:^     +.+\n)*)", inspect.getdoc(Options) or "", re.MULTILINE)
        lines = "".join(f"    {name}: {text}" for name, text in described if name in {p.name for p in shown})
        given_doc = inspect.getdoc(function) or ""
        checked.__doc__ = re.sub(r"^    keywords: .*\n(?:^     +.+\n)*", lambda _: lines, given_doc, flags=re.MULTILINE)
        return checked

    return decorate


_CHUNKS = re.compile(r"auto|off|((0|1|strips):)?([0-9]{1,10})")

_AXES = {None: 0, "0": 0, "1": 1, "strips": ROWS}
"""Axes of inputs by how they are asked for."""

_KINDS: tuple[tuple[str, Any, str], ...] = (
    ("dims", Mapping | None, "sizes by name, as {'seq': 128} or {'seq': (1, 512)}"),
    ("loss", "memonger.autodiff.losses:Loss", "a name or a loss of memonger's (memonger.SoftmaxCrossEntropy())"),
    ("optimizer", "memonger.autodiff.updates:Optimizer", "an optimizer of memonger's (memonger.SGD())"),
    ("device", str | Device | None, "a text such as 'cpu' or 'cuda:0'"),
    ("state", Mapping | None, "names of inputs and outputs, as {'h': 'h_next'}"),
    ("buckets", "memonger.graph.collectives:Buckets", "a memonger.Buckets"),
    ("inputs", Mapping | None, "arrays by name"),
    ("sharing", Sharing, "a memonger.Sharing"),
    ("cuda", Cuda, "a memonger.Cuda"),
    ("allow_rounding", bool, "True or False"),
)
"""What the values of options are, in words. Types of training are named, and imported where there is such a value."""

_NAMED: tuple[tuple[str, Any], ...] = (
    ("mode", Mode), ("strategy", Strategy), ("order", Order), ("level", Level), ("precision", Precision),
    ("weights", HeldWeights),
)  # fmt: skip
"""Options that are names."""

_BOUNDS = (
    ("batch", 1, MOST_BATCH), ("trials", 0, MOST_TRIALS), ("effort", 0, MOST_BUDGET), ("threads", 0, MOST_THREADS),
)  # fmt: skip
"""Least and largest of the options that are whole numbers."""


def _check_size(name: str, size: object, dims: Mapping[str, object]) -> None:
    """Check the size of a dimension, the range of its sizes, or the sum that it is."""
    which = f"the size of dimension {name!r}"
    if isinstance(size, str):
        _check_sum(name, size, dims)
        return
    if not isinstance(size, Sequence):
        whole(which, size, 0, MOST_BATCH, PlanError)
        return
    if len(size) not in (2, 3):
        raise PlanError(f"{which} must be a number, or the smallest and the largest (with a step), not {size!r}.")
    for one, least in zip(size, (0, 1, 1), strict=False):
        whole(which, one, least, MOST_BATCH, PlanError)
    if size[0] > size[1]:
        raise PlanError(f"{which} has a range that ends before it begins: {size[0]} to {size[1]}.")


def _check_sum(name: str, text: str, dims: Mapping[str, object]) -> None:
    which, others = (
        f"the size of dimension {name!r}",
        {k: size for k, size in dims.items() if not isinstance(size, str)},
    )
    terms = terms_of(text)
    unknown = next((one for one in terms if one and one not in others), None)
    if terms.keys() <= {""} or unknown is not None:
        lacks = "is no sum of others" if unknown is None else f"{unknown!r} has no size there"
        raise PlanError(
            f"{which} must be a number, a range as (1, 512), or a sum of others as {option('dims', _SUM_EXAMPLE)}, "
            f"not {text!r}, {'which ' if unknown is None else 'as '}{lacks}."
        )
    try:
        _ranges(dict(others) | {name: text})
    except ValueError as error:
        raise PlanError(f"{which} is to be {text!r}: {error}.") from error


_SUM_EXAMPLE = {"total": "past + seq"}


def _is_range(size: object) -> bool:
    return isinstance(size, Sequence) and not isinstance(size, str)


def _ranges(dims: Mapping[str, Any]) -> dict[str, DimRange]:
    """The range of each dimension, in the order given; of a single size that size alone.

    Raises:
        ValueError: a sum can be below 0.
    """
    free = {name: _range(size) for name, size in dims.items() if _is_range(size)}
    single = {name: int(size) for name, size in dims.items() if isinstance(size, numbers.Integral)}
    return {
        name: in_terms_of(terms_of(size), single, free) if isinstance(size, str) else _range(size)
        for name, size in dims.items()
    }


def _range(size: "int | Sequence[int]") -> DimRange:
    """The range that is asked for; of a single size that size alone."""
    if not isinstance(size, Sequence):
        return DimRange(int(size), int(size))
    least, most, step = (*map(int, size), 1)[:3]
    return DimRange(least, most - (most - least) % step, step)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
