"""A training step of an eager module, run once on tensors without memory: its operators, storages and module calls.

What runs is the step itself, PyTorch's autograd included; only its kernels don't. So the bytes that are there at any
operator are those of a real step: what Python's variables hold a little longer is counted, and what checkpoints do.
"""

import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._C._autograd import _get_sequence_nr
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointError

from memonger.errors import PlanError
from memonger.graph.graph import Graph
from memonger.torch import operators

_OF_A_GRADIENT = 2**64 - 1
"""The sequence number of every node of autograd's that adds up a parameter's gradient."""


PLAN = "memonger"
"""The attribute of a module in which its plan stands, and what takes off what was put on it for that."""

_MOST_CONTENTS = 10_000
"""So much of the objects that a part is given is looked at."""

ELSEWHERE = -1
"""In place of a storage: what no storage tells, as the state of a random generator of the module's own."""


@dataclass(frozen=True, slots=True)
class Call:
    """One run of an operator.

    Attributes:
        target: The operator.
        reads: Storages that it is given.
        makes: Storages that it makes.
        changes: Storages of ``reads`` that it writes into; `ELSEWHERE`: it changes what is no storage.
        sequence: The number of the node of autograd's: of the forward pass the next one's, of the backward pass that
            which runs.
        is_backward: Whether it is of the backward pass.
        draws: Whether it draws random numbers.
        bits: How many zeros and ones it draws into what it is given.
        module: The call of a module that it is a part of, as its number in `RecordedStep.modules`; -1: of none.
        cost: See `memonger.torch.operators.cost`; views are free.
        again: The call of the forward pass that it repeats, as its number; -1: none.
    """

    target: Any
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    changes: tuple[int, ...]
    sequence: int
    is_backward: bool
    draws: bool
    bits: int
    module: int
    cost: float
    again: int


@dataclass(slots=True)
class Repeats:
    """What checkpoints and who records their step tell each other.

    Attributes:
        last: The number of the call that was recorded last.
        now: The call that the next one repeats; -1: none.
    """

    last: int = -1
    now: int = -1


@dataclass(slots=True)
class ModuleCall:
    """A call of a module in the forward pass.

    Attributes:
        path: Its name in the whole, empty of that itself.
        turn: Which of its calls it is, from 0 on.
        parent: Number of the call around it; -1: none.
        is_hooked: Whether it has hooks, whose operators are in it, but not in its ``forward``.
        start: The first call of an operator in it.
        stop: One after the last.
        first: The first node of autograd's in it.
        last: One after the last.
        children: Numbers of the calls in it.
        replaced: Storages of tensors that were attributes in the module at its beginning, and that it set others in
            place of; `ELSEWHERE`: an attribute at its beginning isn't there at the forward pass's end otherwise, or
            it changed an object that it was given.
    """

    path: str
    turn: int
    parent: int
    is_hooked: bool
    start: int
    first: int
    stop: int = -1
    last: int = -1
    children: list[int] = field(default_factory=list)
    replaced: frozenset[int] = frozenset()


@dataclass(frozen=True)  # without slots, as it keeps what is derived once it is made
class RecordedStep:
    """A step as it ran.

    Attributes:
        calls: Operators in the order in which they ran.
        sizes: Bytes of each storage.
        tensors: Type and shape of the tensor that each storage was made for.
        given: Storages that were there before: parameters, buffers, inputs; other tensors that are read have no bytes,
            but for such as views are made of.
        buffers: Storages of buffers, and the names of these.
        freed: Storage → the last call before it was freed; one that isn't in it stayed.
        modules: Calls of modules, in the order in which they began.
        gradients: Bytes of the parameters' gradients at the end.
        peak: The most bytes that were there.
        is_late: Whether something reads a parameter after its gradient is applied to it, in the backward pass.
    """

    calls: tuple[Call, ...]
    sizes: tuple[int, ...]
    tensors: tuple[tuple[torch.dtype, torch.Size], ...]
    given: frozenset[int]
    buffers: dict[int, tuple[str, ...]]
    freed: dict[int, int]
    modules: tuple[ModuleCall, ...]
    gradients: int
    peak: int
    is_late: bool

    @property
    def given_bytes(self) -> int:
        """Bytes of what was there before."""
        return sum(self.sizes[one] for one in self.given)

    @cached_property
    def graph(self) -> Graph:
        """The step as a graph to schedule: a node is a call, a value a storage, which is read where it is freed."""
        reads = [dict.fromkeys(call.reads) for call in self.calls]
        for storage, call in self.freed.items():
            if call >= 0:
                reads[call][storage] = None
        made = [set(call.makes) for call in self.calls]
        return Graph(
            nodes=tuple(f"{n}:{call.target}" for n, call in enumerate(self.calls)),
            ops=tuple(str(call.target) for call in self.calls),
            values=tuple(f"s{storage}" for storage in range(len(self.sizes))),
            sizes=self.sizes,
            planned=tuple(size > 0 and storage not in self.given for storage, size in enumerate(self.sizes)),
            reads=tuple(tuple(v for v in read if v not in new) for read, new in zip(reads, made, strict=True)),
            writes=tuple(call.makes for call in self.calls),
            outputs=tuple(v for new in made for v in sorted(new) if v not in self.freed),
            forward=tuple(not call.is_backward for call in self.calls),
            costs=tuple(call.cost for call in self.calls),
            workspace=(0,) * len(self.calls),
        )


NO_GRADIENT = "nothing in the module needs a gradient: there is no backward pass to plan."

_BY_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
"""What is raised where a number would have to be known."""

_NUMBERS = (
    " What runs mustn't depend on numbers: torch.where does in place of a branch, and .item() has no place in forward; "
    "torch.compile(backend=memonger.torch.backend(...)) plans what lies between such places."
)


_OTHERWISE = (
    " A part of it runs otherwise the second time, as its code reads or changes what lies outside its attributes: "
    "torch.compile(backend=memonger.torch.backend(...)) runs none twice."
)


@contextmanager
def unlogged() -> Iterator[None]:
    """What PyTorch can't run on tensors without memory is raised meanwhile, and not logged beside that."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each operator's run, and what storages there are."""

    def __init__(self, module: nn.Module, inputs: Sequence[torch.Tensor], repeats: Repeats) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls, self.sizes, self.modules = list[Call](), list[int](), list[ModuleCall]()
        self.tensors, self._repeats = list[tuple[torch.dtype, torch.Size]](), repeats
        self.freed, self.applied = dict[int, int](), dict[int, int]()
        self.inside = [-1]
        self.live = self.peak = 0
        self._numbers, self._sequence, self._first = dict[int, int](), 0, _get_sequence_nr()
        self.given = {*self._new([*module.parameters(), *module.buffers(), *operators.tensors_in(list(inputs))])}
        self._uncounted = dict[int, int]()
        self.buffers = dict[int, tuple[str, ...]]()
        for name, buffer in module.named_buffers(remove_duplicate=False):
            for number in self.numbers([buffer]):
                self.buffers[number] = (*self.buffers.get(number, ()), name)

    def __torch_dispatch__(self, target: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = operators.tensors_in((args, kwargs))
        result = target(*args, **kwargs)
        if target in SAC_IGNORED_OPS:
            return result
        operators.check_sizes(target, args, result)
        reads = self.numbers([] if target is torch.ops.aten.lift_fresh.default else read)
        node: Any = torch._C._current_autograd_node()
        if node is None:
            self._sequence = self.sequence
        elif node._sequence_nr() != _OF_A_GRADIENT:
            self._sequence = node._sequence_nr() - self._first
        changes = self.numbers(operators.written(target, args, kwargs))
        if operators.has_own_generator(args, kwargs):
            changes = (*changes, ELSEWHERE)
        makes = self._new(operators.tensors_in(result))
        self._repeats.last = len(self.calls)
        self.calls.append(Call(
            target, reads, makes, changes, self._sequence, node is not None, operators.draws(target, args, kwargs),
            args[0].numel() if target in operators.BITS else 0, self.inside[-1],
            operators.cost(target, args, kwargs, result) if makes or changes else 0.0, self._repeats.now,
        ))  # fmt: skip
        return result

    @property
    def sequence(self) -> int:
        """The number of autograd's next node, counted from the step's beginning."""
        return _get_sequence_nr() - self._first

    def numbers(self, tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
        """Storages of tensors; those that weren't known are of attributes: they were there before, and don't count."""
        found = dict[int, None]()
        for tensor in tensors:
            for key, size in operators.storages([tensor]).items():
                if key not in self._numbers:
                    self._add(key, 0, tensor)
                    self.given.add(self._numbers[key])
                    self._uncounted[self._numbers[key]] = size
                found[self._numbers[key]] = None
        return tuple(found)

    def _new(self, tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
        """Storages that weren't there yet; they are now."""
        made = []
        for tensor in tensors:
            for key, size in operators.storages([tensor]).items():
                if key not in self._numbers:
                    self._add(key, size, tensor)
                    made.append(self._numbers[key])
                elif self._numbers[key] in self._uncounted:
                    number = self._numbers[key]
                    self.sizes[number] = self._uncounted.pop(number)
                    self.live += self.sizes[number]
        self.peak = max(self.peak, self.live)
        return tuple(made)

    def _add(self, key: int, size: int, tensor: torch.Tensor) -> None:
        self._numbers[key] = len(self.sizes)
        self.sizes.append(size)
        self.tensors.append((tensor.dtype, tensor.shape))
        self.live += size
        weakref.finalize(tensor.untyped_storage(), self._free, key).atexit = False

    def _free(self, key: int) -> None:
        storage = self._numbers.pop(key)
        self.freed[storage] = len(self.calls) - 1
        self.live -= self.sizes[storage]

    def apply(self, parameter: torch.Tensor) -> None:
        """Its gradient was applied to a parameter, and is freed."""
        self.applied.update(dict.fromkeys(self.numbers([parameter]), len(self.calls)))
        parameter.grad = None

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Calls of the module's parts are noted meanwhile, and what becomes of the parts' attributes."""
        turns, hooks, parts = dict[str, int](), [], dict(module.named_modules())
        begins, ends = list[_Attributes](), dict[int, _Attributes]()
        given, changed = list[tuple[list[Any], list[Any]]](), set[int]()
        for path, part in module.named_modules():
            is_hooked = bool(part._forward_pre_hooks or part._forward_hooks)

            def enter(part: nn.Module, args: Any, kwargs: Any, path: str = path, is_hooked: bool = is_hooked) -> None:
                turn = turns[path] = turns.get(path, -1) + 1
                self.modules.append(ModuleCall(path, turn, self.inside[-1], is_hooked, len(self.calls), self.sequence))
                number = len(self.modules) - 1
                if self.inside[-1] >= 0:
                    self.modules[self.inside[-1]].children.append(number)
                self.inside.append(number)
                begins.append(self._attributes(part))
                objects = [one for one in (*args, *kwargs.values()) if not isinstance(one, torch.Tensor)]
                given.append((objects, self._contents(objects)))

            def leave(part: nn.Module, __: Any, ___: Any) -> None:
                number = self.inside.pop()
                call = self.modules[number]
                call.stop, call.last = len(self.calls), self.sequence
                ends[number] = self._attributes(part)
                objects, before = given.pop()
                if self._contents(objects) != before:
                    changed.add(number)

            hooks.append(part.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            hooks.append(part.register_forward_hook(leave))
        try:
            yield
            last = {path: self._attributes(parts[path]) for path in turns}
            for number, end in ends.items():
                call = self.modules[number]
                elsewhere = (ELSEWHERE,) if number in changed else ()
                call.replaced = frozenset((*_replaced(begins[number], end, last[call.path]), *elsewhere))
        finally:
            for hook in hooks:
                hook.remove()

    def _contents(self, objects: Sequence[Any]) -> list[Any]:
        """What is in objects that a part is given, as in a cache of keys and values; of tensors their storages."""
        found, seen, stack = list[Any](), set[int](), list(objects)
        while stack and len(found) < _MOST_CONTENTS:
            one = stack.pop()
            if isinstance(one, torch.Tensor):
                found.append(self.numbers([one]))
            elif isinstance(one, int | float | str | None):
                found.append(one)
            elif not isinstance(one, nn.Module | type) and id(one) not in seen:
                seen.add(id(one))
                parts = one if isinstance(one, list | tuple | dict) else getattr(one, "__dict__", ())
                found.append((type(one), len(parts)))
                stack += [*parts.keys(), *parts.values()] if isinstance(parts, dict) else parts
        return found

    def _attributes(self, part: nn.Module) -> "_Attributes":
        """Tensors and numbers that are attributes in a part, without keeping them there."""
        found: _Attributes = {}
        for one in part.modules():
            for name, value in (*vars(one).items(), *one._buffers.items(), *one._parameters.items()):
                if isinstance(value, torch.Tensor):
                    found[id(one), name] = weakref.ref(value), self.numbers([value])
                elif isinstance(value, int | float):
                    found[id(one), name] = value, ()
        return found


_Attributes: TypeAlias = dict[tuple[int, str], tuple[Any, tuple[int, ...]]]
"""Which part's, and its name → a number, or a reference to a tensor and what storages it has."""


def _replaced(begin: _Attributes, end: _Attributes, last: _Attributes) -> Iterator[int]:
    """See `ModuleCall`, of attributes at a call's beginning, its end, and the forward pass's end."""
    nothing: tuple[Any, tuple[int, ...]] = (None, ())
    for key in {**begin, **last}:
        (was, storages), (left, _), (now, _) = (one.get(key, nothing) for one in (begin, end, last))
        if was is now or (isinstance(was, int | float) and isinstance(now, int | float) and was == now):
            continue
        is_set = isinstance(was, weakref.ref) and isinstance(now, weakref.ref) and left is now
        yield from storages if is_set and storages else (ELSEWHERE,)


def recorded(
    module: nn.Module, inputs: Sequence[torch.Tensor], mode: FakeTensorMode, in_backward: bool = False,
    repeats: Repeats | None = None,
) -> RecordedStep:  # fmt: skip
    """Run a step of a module: its forward pass, and the backward pass from ones as the gradients of what it returns.

    The backward pass runs outside ``torch.autocast``, as PyTorch recommends it: what casts of weights it keeps for
    other uses of them is gone by then.

    Args:
        module: Of tensors without memory. Its gradients are taken away.
        inputs: What it is called with.
        mode: What makes these tensors.
        in_backward: Whether each parameter's gradient is applied and freed as soon as it is there.
        repeats: What its checkpoints tell; None: it has none.

    Raises:
        PlanError: it can't run on such tensors; nothing that it returns needs a gradient.
    """
    module.zero_grad(set_to_none=True)
    recorder = _Recorder(module, inputs, repeats or Repeats())
    devices = {"cpu", *(one.device.type for one in module.parameters())}
    torch.clear_autocast_cache()
    with unlogged(), mode, recorder, torch.autograd.set_multithreading_enabled(False), ExitStack() as stack:
        try:
            with recorder.watching(module):
                result = module(*inputs)
            torch.clear_autocast_cache()
            for device in sorted(devices):
                stack.enter_context(torch.autocast(device, enabled=False))
            ends = [one for one in operators.tensors_in(result) if one.requires_grad]
            if not ends:
                raise PlanError(NO_GRADIENT)
            for one in module.parameters() if in_backward else ():
                if one.requires_grad:
                    stack.callback(one.register_post_accumulate_grad_hook(recorder.apply).remove)  # type: ignore[no-untyped-call]
            torch.autograd.backward(ends, [torch.ones_like(one) for one in ends])
        except PlanError:
            raise
        except Exception as error:  # a module is anybody's code
            path = recorder.modules[recorder.inside[-1]].path if recorder.inside[-1] >= 0 else ""
            part = f"the part '{path}' ({type(dict(module.named_modules())[path]).__name__})" if path else "the module"
            hint = _NUMBERS if isinstance(error, _BY_NUMBERS) else " The module itself must run on such an example."
            hint = _OTHERWISE if isinstance(error, CheckpointError) else hint
            raise PlanError(
                f"{part} can't run on tensors without memory, as planning has it do: {type(error).__name__}: "
                f"{' '.join(str(error).partition('Tip:')[0].split()).rstrip('.')}.{hint}"
            ) from error
    held = operators.storages(one.grad for one in module.parameters() if one.grad is not None)
    never = len(recorder.calls)
    is_late = any(
        number >= recorder.applied.get(one, never) for number, call in enumerate(recorder.calls) for one in call.reads
    )
    step = RecordedStep(
        tuple(recorder.calls), tuple(recorder.sizes), tuple(recorder.tensors), frozenset(recorder.given),
        recorder.buffers, dict(recorder.freed), tuple(recorder.modules), sum(held.values()), recorder.peak, is_late,
    )  # fmt: skip
    module.zero_grad(set_to_none=True)
    return step


def take_off(module: nn.Module) -> None:
    """Take away what `memonger.torch.checkpoint` did to a module, where it did."""
    if PLAN in module.__dict__:
        module.__dict__.pop(PLAN)[1].take_off()


def without_memory(module: nn.Module, inputs: Sequence[torch.Tensor]) -> tuple[nn.Module, list[Any], FakeTensorMode]:
    """A copy of a module and its inputs without memory, and the mode that they are of.

    Args:
        module: It isn't changed. Its copy has no checkpoints of `memonger.torch.checkpoint`.
        inputs: Tensors of ``meta`` stand for such of the module's own device.

    Raises:
        PlanError: gradients are off.
    """
    if not torch.is_grad_enabled():
        raise PlanError(
            "gradients are off here (torch.no_grad, torch.inference_mode): there is no backward pass to plan. Plan "
            "outside of it; afterwards a module without gradients runs as it is."
        )
    device = next((one.device for one in module.parameters()), torch.device("cpu"))
    mode = FakeTensorMode()
    with FakeCopyMode(mode):
        copy = deepcopy(module)
    take_off(copy)

    def made(one: torch.Tensor) -> torch.Tensor:
        return torch.empty(one.shape, dtype=one.dtype, device=device if one.is_meta else one.device)

    with mode:
        return copy, tree_map_only(torch.Tensor, made, list(inputs)), mode
