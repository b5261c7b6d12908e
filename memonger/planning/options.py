"""choices: the options of a plan, and whether they go together."""

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memonger.autodiff.losses import Loss
from memonger.autodiff.optimizers import Optimizer
from memonger.devices import Cuda, Device
from memonger.errors import PlanError
from memonger.graph.liveness import Sharing
from memonger.remat import EFFORT, STRATEGIES
from memonger.units import parse_size


@dataclass(frozen=True, slots=True)
class Choices:
    """Keyword options of `search_plan`.

    Attributes:
        mode: ``training`` or ``inference``; None: training.
        loss: See `memonger.differentiate`; for a model that isn't a training model yet.
        optimizer: See `memonger.differentiate`.
        device: ``none``, ``cpu``, ``cuda:N``; None: the CPU where onnxruntime is installed, else none.
        budget: Bytes (of a fraction the whole part), or a text such as ``4GiB``: the fastest plan is searched whose
            live bytes and scratch at the worst step, parameters and inputs take no more.
        strategy: One of `memonger.remat.STRATEGIES`: what decides which nodes are recomputed. None: ``budget``
            where there is a budget; else ``sweep`` for training, ``none`` for inference.
        mirror: Patterns of nodes (by name, operator or output) to recompute, for the strategies that heed marks; what
            can't run again is kept, and a note says so (``marks``: an error).
        keep: Patterns of nodes to keep. They overrule ``mirror``.
        trials: Thresholds in the sweep's grid.
        effort: How many changes a search may try, some 10 µs each.
        time_limit: Seconds after which a search improves nothing more; the plan then depends on the machine's speed.
        sharing: What may share an address.
        order: One of `memonger.remat.orders.ORDERS`, or ``best``: all of them, the one that needs least kept.
        level: onnxruntime's optimization level for device plans: disable, basic, extended or all. None: all for
            inference; disable for training, whose weights aren't constants, so that nothing of weight could be fused.
        threads: Threads within a node; 0 leaves it to onnxruntime.
        inputs: Input arrays for the calibrating run, random numbers if None. Their shapes also give the sizes of
            dimensions that are still open.
        cuda: How onnxruntime's CUDA provider is set up, for a plan on a CUDA device.
    """

    mode: str | None = None
    loss: str | Loss | None = None
    optimizer: Optimizer | None = None
    device: str | Device | None = None
    budget: float | str | None = None
    strategy: str | None = None
    mirror: Sequence[str] = ()
    keep: Sequence[str] = ()
    trials: int = 6
    effort: int = EFFORT
    time_limit: float | None = None
    sharing: Sharing = field(default_factory=Sharing)
    order: str = "best"
    level: str | None = None
    threads: int = 0
    inputs: Mapping[str, Any] | None = None
    cuda: Cuda = field(default_factory=Cuda)


def check(options: Choices) -> int | None:
    """Check the options that stand for themselves; returns the budget in bytes.

    Raises:
        PlanError: one that can't be, or two that contradict each other.
    """
    if options.mode not in (None, "inference", "training"):
        raise PlanError(f"mode {options.mode!r} can't be: training or inference.")
    if options.strategy is not None and options.strategy not in STRATEGIES:
        raise PlanError(f"{options.strategy!r} is not a strategy: there are {', '.join(STRATEGIES)}.")
    if options.trials < 0:
        raise PlanError(f"trials={options.trials} can't be: 0 or more thresholds.")
    if options.time_limit is not None and not 0 <= options.time_limit < math.inf:
        raise PlanError(f"time_limit={options.time_limit} can't be: 0 or more seconds.")
    budget = _budget(options.budget)
    takes_budget = options.strategy is not None and STRATEGIES[options.strategy].takes_budget
    if budget is None and takes_budget:
        raise PlanError(f"strategy {options.strategy!r} needs a budget (budget=memonger.GiB * 4, --budget 4GiB).")
    if budget is not None and options.strategy is not None and not takes_budget:
        raise PlanError(f"strategy {options.strategy!r} takes no budget: 'budget' and 'exact' do.")
    return budget


def _budget(given: float | str | None) -> int | None:
    if given is None or isinstance(given, str):
        try:
            return None if given is None else parse_size(given)
        except ValueError as error:
            raise PlanError(f"budget: {error}") from error
    if not _is_number(given) or not math.isfinite(given):
        raise PlanError(f"budget={given!r} can't be: a number of bytes (memonger.GiB * 4), or a text such as '4GiB'.")
    if given < 0:
        raise PlanError(f"the budget is {given} bytes: it has to be at least 0.")
    return math.floor(given)


def _is_number(given: object) -> bool:
    return isinstance(given, numbers.Real) and not isinstance(given, bool)


def strategy_for(options: Choices, mode: str) -> str:
    """The strategy asked for, or the one for the mode and a budget.

    Raises:
        PlanError: it doesn't heed the options.
    """
    chosen = options.strategy or ("sweep" if mode == "training" else "none")
    if options.strategy is None and options.budget is not None:
        chosen = "budget"
    if options.mirror and not STRATEGIES[chosen].heeds_marks:
        heeding = ", ".join(name for name, strategy in STRATEGIES.items() if strategy.heeds_marks)
        raise PlanError(
            f"strategy {chosen!r} decides by itself what is recomputed: mirror goes with {heeding}; "
            "what to keep can be told to any."
        )
    return chosen


def check_bare(options: Choices, batch: int | None, dims: Mapping[str, int] | None) -> None:
    """Check that the options are for a graph without a model.

    Raises:
        PlanError: an option that only a model has a use for.
    """
    general = {"budget", "strategy", "trials", "effort", "time_limit", "sharing", "order"}
    plain = Choices()
    given = [f.name for f in dataclasses.fields(options) if getattr(options, f.name) != getattr(plain, f.name)]
    given += [name for name, value in (("batch", batch), ("dims", dims)) if value]
    wrong = [name for name in given if name not in general]
    if wrong:
        raise PlanError(f"{wrong[0]} is for models: a graph without one takes {', '.join(sorted(general))}.")
    strategy = STRATEGIES.get(options.strategy or "")
    if strategy is not None and strategy.needs_model:
        raise PlanError(
            f"strategy {options.strategy!r} needs a model: a graph without one has neither operators nor marks."
        )
