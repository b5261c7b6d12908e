"""PyTorch's training steps in a budget: its compiler's partition function, and a backend without a compiler."""

import hashlib
import inspect
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import ShortenTraceback
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._functorch.partitioners import default_partition
from torch._guards import CompileContext, CompileId
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.graph import _BoxedCodeGen

from memonger.errors import BudgetError, PlanError
from memonger.planner.cache import versions
from memonger.schedule.budget import within_budget
from memonger.schedule.every_schedule import EFFORT as BOUND_EFFORT
from memonger.schedule.solution import total_lower_bound
from memonger.schedule.strategy import Request
from memonger.torch.example import examples_of
from memonger.torch.fused import OPTIONS, held_bytes
from memonger.torch.partition import JointStep, split, step_of
from memonger.torch.recorded import NO_GRADIENT, unlogged, without_memory
from memonger.units import MOST_BATCH, MOST_BUDGET, format_size, in_bytes, whole


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one training step of a module takes.

    Attributes:
        budget: Bytes that it may take; None: as many as it needs.
        peak_bytes: The most that it takes at any time: all that follows, and what both passes compute.
        peak_before_bytes: The same where nothing is computed again.
        given_bytes: Parameters, buffers and inputs.
        gradient_bytes: What the backward pass returns.
        state_bytes: The optimizer's state.
        overhead: Estimated time beyond that of the step without a budget, as a fraction of it.
        nodes: How many operators the step runs once at least.
        recomputed: How many runs of them are repetitions.
        seconds: What planning took.
    """

    budget: int | None
    peak_bytes: int
    peak_before_bytes: int
    given_bytes: int
    gradient_bytes: int
    state_bytes: int
    overhead: float
    nodes: int
    recomputed: int
    seconds: float

    def __str__(self) -> str:
        """As ``267 MiB at its peak in place of 382: 41 of 344 operators run again, about 8.4 % more time``."""
        peak = f"{format_size(self.peak_bytes)} at its peak"
        if not self.recomputed:
            return f"{peak}: nothing runs again"
        return (
            f"{peak} in place of {format_size(self.peak_before_bytes)}: {self.recomputed} runs of {self.nodes} "
            f"operators are repetitions, about {self.overhead:.1%} more time"
        )


class _Unwrapped(ShortenTraceback):
    """An error of ours that PyTorch's compiler raises as it is: others it wraps in a ``BackendCompilerFailed``."""

    def __str__(self) -> str:
        return self.text  # type: ignore[attr-defined, no-any-return]  # to the arguments it adds advice of its own

    @staticmethod
    def of(error: PlanError, frame: FrameType | None) -> "_Unwrapped":
        """The error, also of its own class; what is above the frame isn't in its traceback."""
        kind = type(error)
        made: Any = Exception.__new__(
            type(kind.__name__, (_Unwrapped, kind), {"__module__": kind.__module__}), *error.args
        )
        made.__dict__.update(vars(error), text=str(error), first_useful_frame=frame)
        return cast("_Unwrapped", made)


class Partitioner(CustomPartitionerFn):
    """A partition function for AOTAutograd; see `partitioner`.

    Attributes:
        plans: Of each joint graph that it was given, in order.
    """

    def __init__(
        self, budget: str | int | None, optimizer: torch.optim.Optimizer | int | None, fuses: bool = True
    ) -> None:
        self._fuses = fuses
        self.budget = None if budget is None else in_bytes("budget", budget, PlanError)
        self.state_bytes = state_bytes(optimizer)
        self.plans: list[StepPlan] = []
        self._compiled: CompileId | None = None

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and the backward pass of a joint graph; ``kwargs``: ``num_fwd_outputs``, and what isn't used.

        Raises:
            BudgetError: nothing was found that holds the budget; it says what would be.
        """
        try:
            step = step_of(gm.graph, kwargs["num_fwd_outputs"], self._fuses)
            plan, schedule = planned(step, self.budget, self.state_bytes)
        except PlanError as error:
            raise _Unwrapped.of(error, inspect.currentframe()) from None
        self.plans.append(plan)
        if self.budget is not None and self._is_cut():
            warnings.warn(
                "memonger: the module was traced as several graphs, of which each holds the budget alone: what others "
                "have saved meanwhile isn't counted, nor what runs between them. torch.compile(fullgraph=True) says "
                "where a graph ends, and why.",
                stacklevel=2,
            )
        return split(gm, step, schedule)

    def _is_cut(self) -> bool:
        """Whether Dynamo began or ended the graph that it compiles now in the middle of a function, or cut it."""
        before, self._compiled = self._compiled, CompileContext.current_compile_id()
        if self._compiled is None:  # something else compiles
            return False
        tracer = InstructionTranslator.current_tx()
        reason = tracer.output.compile_subgraph_reason
        begins = not tracer.f_code.co_name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX)
        return self._compiled == before or not begins or (reason is not None and reason.graph_break)

    @property
    def options(self) -> dict[str, Any]:
        """What ``torch.compile(module, options=...)`` is given so that its peak is the planned one."""
        return {"custom_partitioner_fn": self, **OPTIONS}

    def uuid(self) -> str:
        """What inductor's cache of compiled graphs tells it by: the budget, and memonger's own source and libraries."""
        return hashlib.sha256(repr((versions(), self.budget, self.state_bytes)).encode()).hexdigest()


def partitioner(budget: str | int | None, optimizer: torch.optim.Optimizer | int | None = None) -> Partitioner:
    """A partition function that holds the peak of a training step to a budget, at the least time.

    For ``torch.compile`` with PyTorch's own compiler::

        step = torch.compile(module, options=memonger.torch.partitioner("4GiB", optimizer).options)

    or wherever AOTAutograd takes a ``partition_fn``. What is counted: parameters, buffers, inputs, gradients, the
    optimizer's state, and all that both passes compute, at every operator, views and shared storages once. What is
    computed again has the same bits, so gradients are those without a budget, dropout included. Under PyTorch's own
    compiler what it fuses takes nothing, and the peak is a bound from above. Planning looks at shapes
    alone, allocates nothing and needs no device.

    Args:
        budget: Bytes, as a number or as ``4GiB``; None: nothing is computed again.
        optimizer: The step's, whose state counts whether it is there yet or not; or the bytes of a state.

    Raises:
        PlanError: the budget is no size; the optimizer's state can't be found out.
    """
    return Partitioner(budget, optimizer)


class Backend:
    """A backend for ``torch.compile``; see `backend`.

    Attributes:
        plans: Of each graph with a backward pass that it was given, in order.
    """

    __name__ = "memonger"

    def __init__(self, partition: Partitioner) -> None:
        self.plans = partition.plans
        self._compile = aot_autograd(fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=partition)

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """What runs a graph that Dynamo traced."""
        return self._compile(module, inputs)


def backend(budget: str | int | None, optimizer: torch.optim.Optimizer | int | None = None) -> Backend:
    """A backend for ``torch.compile`` that needs no compiler: PyTorch's own kernels run in the planned order.

    ``torch.compile(module, backend=memonger.torch.backend("4GiB", optimizer))``. The peak of a step is then the planned
    one. See `partitioner` for the arguments and errors.
    """
    return Backend(Partitioner(budget, optimizer, fuses=False))


@dataclass(frozen=True, slots=True)
class StepFit:
    """The largest batch of which a training step holds in some memory.

    Attributes:
        batch: How many rows.
        plan: What its step takes.
    """

    batch: int
    plan: StepPlan


def fit(
    module: torch.nn.Module,
    example: torch.Tensor | Sequence[torch.Tensor],
    memory: str | int,
    optimizer: torch.optim.Optimizer | int | None = None,
    *,
    most: int = 65536,
) -> StepFit:
    """The largest batch of which a training step can be held in some memory; nothing is run or allocated.

    Args:
        module: Gives the loss, or what it is computed from; traced as ``torch.compile(fullgraph=True)`` traces it.
        example: What it is called with: the first size of each tensor is the batch, or has to stay (1, say).
        memory: Bytes, as a number or as ``24GiB``, for all that `partitioner` counts.
        optimizer: See `partitioner`.
        most: No larger batch is looked at.

    Raises:
        BudgetError: not even one row fits, or two where the module needs them.
        PlanError: the module can't be traced as one graph, or doesn't need gradients; a size is none.
    """
    limit, most = in_bytes("memory", memory, PlanError), whole("most", most, 1, MOST_BATCH, PlanError)
    state, inputs = state_bytes(optimizer), examples_of(module, example)
    rows = max((one.shape[0] for one in inputs if one.ndim), default=1)

    def at(batch: int) -> StepPlan | BudgetError:
        step = traced(module, [_with_rows(one, rows, batch) for one in inputs])
        try:
            return planned(step, limit, state)[0]
        except BudgetError as error:
            return error

    least = 1
    try:
        found = at(least)
    except PlanError:
        if most < 2:
            raise
        least = 2  # some modules don't train on one: a batch normalization of rows
        found = at(least)
    if isinstance(found, BudgetError):
        rows_take = "one row takes" if least == 1 else "two rows take, and on one the module can't be traced"
        raise BudgetError(limit, found.smallest, found.lower_bound, f" That is what {rows_take}.")
    fixed, holds, fails, guess, further = found.peak_bytes, least, most + 1, 2 * least, 0
    while holds + 1 < fails:
        batch = min(max(guess, holds + 1), fails - 1)
        plan = at(batch)
        if isinstance(plan, StepPlan):
            holds, found, further = batch, plan, max(1, 2 * further)
            guess = batch + further if fails <= most else batch * max(2, limit // plan.peak_bytes)
        else:  # what a step takes at least grows about evenly with its rows
            above = (plan.smallest - limit) * batch // max(1, plan.smallest - fixed)
            fails, guess, further = batch, batch - 1 - above, 0
    return StepFit(holds, found)


def _with_rows(tensor: torch.Tensor, rows: int, batch: int) -> torch.Tensor:
    """A tensor like this one, of another batch, without memory."""
    shape = (batch, *tensor.shape[1:]) if tensor.ndim and tensor.shape[0] == rows else tensor.shape
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def traced(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> JointStep:
    """The training step of a module, traced on tensors without memory.

    Args:
        module: It isn't changed.
        inputs: What it is called with; tensors of ``meta`` stand for such of the module's own device.

    Raises:
        PlanError: it can't be traced as one graph, or nothing in it needs a gradient.
    """
    found: list[JointStep] = []

    def keep(gm: fx.GraphModule, _: Sequence[object], *, num_fwd_outputs: int, **__: Any) -> Any:
        found.append(step_of(gm.graph, num_fwd_outputs))
        return default_partition(gm, _, num_fwd_outputs=num_fwd_outputs)

    copy, given, mode = without_memory(module, inputs)
    torch.compiler.reset()
    run = torch.compile(
        copy, backend=aot_autograd(fw_compiler=as_it_is, partition_fn=keep), fullgraph=True, dynamic=False
    )
    try:
        with unlogged(), mode:
            run(*given)
    except Exception as error:  # a module is anybody's code
        inner = getattr(error, "inner_exception", error)
        if isinstance(inner, PlanError):
            raise inner from None
        raise PlanError(f"the module can't be traced as one graph: {_in_a_line(inner)}") from error
    finally:
        torch.compiler.reset()
    if not found:
        raise PlanError(NO_GRADIENT)
    return found[0]


def _in_a_line(error: Exception) -> str:
    """What PyTorch's compiler says of what it can't trace, and where, without its advice on how to report that."""
    said, _, rest = f"{error}".partition("\n\n  Developer debug context:")
    _, _, place = rest.partition("from user code:")
    said, place = (" ".join(text.partition("Set TORCHDYNAMO_VERBOSE")[0].split()) for text in (said, place))
    return (said or type(error).__name__) + (f" In {place}" if place else "")


def planned(step: JointStep, budget: int | None, state: int = 0) -> tuple[StepPlan, tuple[int, ...]]:
    """Schedule a step.

    Args:
        step: What to schedule.
        budget: Bytes for everything; None: nothing runs again.
        state: Bytes of the optimizer's state.

    Returns: what it takes, and the schedule as `memonger.torch.partition.split` takes it.

    Raises:
        BudgetError: nothing was found that holds the budget.
    """
    begin, graph = time.perf_counter(), step.graph
    request = Request(graph, base=step.given + state, budget=budget, forced=dict.fromkeys(step.once, False))
    once = tuple(range(len(graph.nodes)))

    def needed(schedule: Sequence[int]) -> int:
        if not step.fuses:
            return request.needed(schedule)
        return request.base + held_bytes(graph, schedule, step.nodes, step.kernels)

    before = needed(once)
    try:
        schedule = once if budget is None or before <= budget else within_budget(request, needed).schedule
    except BudgetError as error:
        bound = total_lower_bound(request, effort=min(BOUND_EFFORT, request.effort))
        closer = BudgetError(error.budget, error.smallest, bound)
        raise refused(closer, step.given, step.gradients, state) from None
    cost = request.cost(once)
    plan = StepPlan(
        budget=budget,
        peak_bytes=needed(schedule),
        peak_before_bytes=before,
        given_bytes=step.given,
        gradient_bytes=step.gradients,
        state_bytes=state,
        overhead=request.cost(schedule) / cost - 1 if cost else 0.0,
        nodes=len(graph.nodes) - 1,
        recomputed=len(schedule) - len(once),
        seconds=time.perf_counter() - begin,
    )
    return plan, schedule


def refused(error: BudgetError, given: int, gradients: int, state: int, hint: str = "") -> BudgetError:
    """The error with what is there whatever runs again, in bytes: what is given, gradients, the optimizer's state."""
    there = given + gradients + state
    parts = f"parameters, buffers and inputs {format_size(given)}, gradients {format_size(gradients)}"
    parts += f", the optimizer's state {format_size(state)}" if state else ""
    floor = f" {format_size(there)} are there whatever runs again: {parts}.{hint}"
    return BudgetError(error.budget, error.smallest, max(error.lower_bound, there), floor)


def state_bytes(optimizer: torch.optim.Optimizer | int | None) -> int:
    """Bytes of an optimizer's state after its first step, found out on tensors without memory; a number is its bytes.

    Raises:
        PlanError: it can't be; the number is none of bytes.
    """
    if optimizer is None:
        return 0
    if isinstance(optimizer, int) or not hasattr(optimizer, "param_groups"):
        return whole("optimizer (itself, or the bytes of its state)", optimizer, 0, MOST_BUDGET, PlanError)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        try:
            groups = []
            for group in optimizer.param_groups:
                parameters = [torch.nn.Parameter(mode.from_tensor(one.detach())) for one in group["params"]]
                for one in parameters:
                    one.grad = torch.empty_like(one)
                groups.append({**group, "params": parameters})
            copy = object.__new__(type(optimizer))
            copy.__dict__.update(vars(optimizer), param_groups=groups, state=defaultdict(dict))
            copy.step()
        except Exception as error:  # an optimizer is anybody's code
            name = type(optimizer).__name__
            raise PlanError(
                f"the state of {name} can't be found out ({type(error).__name__}: {error}): give its bytes as a number."
            ) from error
        states = [one for each in copy.state.values() for one in each.values() if isinstance(one, torch.Tensor)]
        return sum(one.untyped_storage().nbytes() for one in states)


def as_it_is(module: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """A pass as a function that runs its operators one by one, and lets go of each value behind its last reader."""
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    run = module.forward

    def boxed(arguments: list[Any]) -> Any:
        return run(arguments)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed
