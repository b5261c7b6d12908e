"""Eager modules that train in a budget: which parts are checkpointed, and what is kept in each.

PyTorch's checkpoints run a part of a module again, whole and from its beginning, when the backward pass comes to it;
selective ones keep results of single operators. So what is to be decided is which calls of modules are *regions*, none
within another, and of which calls of operators in them the results stay. For each of some sizes of regions the bytes
at every operator are known from the step's graph; results are kept, and regions left open, by the cost that they save
for each byte, as long as the target holds. The cheapest choice is made on tensors without memory, and what it takes
there corrects the target (`memonger.schedule.budget.cheapest_within`).
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import SAC_IGNORED_OPS
from torch.utils.checkpoint import checkpoint as run_again

from memonger.errors import BudgetError, PlanError
from memonger.graph.liveness import assign_storage, live_bytes
from memonger.graph.schedule import schedule_graph
from memonger.schedule.budget import ATTEMPTS, Allocated, cheapest_within
from memonger.torch import operators
from memonger.torch.budget import StepPlan, planned, refused, state_bytes, traced
from memonger.torch.example import examples_of
from memonger.torch.recorded import (
    ELSEWHERE,
    PLAN,
    ModuleCall,
    RecordedStep,
    Repeats,
    recorded,
    take_off,
    without_memory,
)
from memonger.units import in_bytes, in_full

SHARES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 10**9)
"""Regions save at most this part of what the whole step saves, where modules are small enough."""

_NEVER = 2**62
"""Bytes of what mustn't run: parts that run again after a parameter of theirs has changed."""

PROPOSALS = 4
"""Choices that are run on tensors without memory for one target, at most."""


@dataclass(frozen=True, slots=True)
class Region:
    """What is checkpointed: a call of a module, or of some that follow one another in an ``nn.Sequential``.

    Attributes:
        path: The name of the module.
        turn: Which of its calls.
        children: Of the children of an ``nn.Sequential`` the first, and one after the last; None: all of a module.
        calls: The operators in it: the first, and one after the last.
        nodes: The nodes of autograd's in it, likewise.
    """

    path: str
    turn: int
    children: tuple[int, int] | None
    calls: tuple[int, int]
    nodes: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A region, and what is kept in it.

    Attributes:
        region: Where.
        kept: Calls of operators whose results stay: operator → which of its calls in the region.
        draws: Whether random numbers are drawn in it when it runs again.
        writes: Whether it writes into buffers.
    """

    region: Region
    kept: Mapping[Any, frozenset[int]]
    draws: bool
    writes: bool

    def __reduce__(self) -> tuple[Any, ...]:
        """PyTorch's operators can't be pickled: their names are."""
        names = {str(target): turns for target, turns in self.kept.items()}
        return _checkpoint_of, (self.region, names, self.draws, self.writes)


def _checkpoint_of(region: Region, kept: Mapping[str, frozenset[int]], draws: bool, writes: bool) -> Checkpoint:
    """As it was pickled: operators by their names, as ``aten.mm.default``."""
    return Checkpoint(region, {attrgetter(name)(torch.ops): one for name, one in kept.items()}, draws, writes)


@dataclass(frozen=True, slots=True)
class Choice:
    """Checkpoints of a step.

    Attributes:
        checkpoints: In the order of the forward pass.
        bytes: The most that is estimated to be there, everything counted.
        cost: Estimated cost of the repetitions.
    """

    checkpoints: tuple[Checkpoint, ...]
    bytes: int
    cost: float


class Checkpoints:
    """What may be checkpointed of a step.

    Args:
        step: The step as it is.
        module: What it is of.
        base: Bytes that are there beside the step's own.
    """

    def __init__(self, step: RecordedStep, module: nn.Module, base: int) -> None:
        self.step, self.base = step, base
        self._parts = dict(module.named_modules())
        self._forward = sum(not call.is_backward for call in step.calls)
        behind = {storage for call in step.calls[self._forward :] for storage in call.reads}
        self._saved = [
            sum(step.sizes[one] for one in call.makes if one in behind) for call in step.calls[: self._forward]
        ]
        self._writers = dict[int, list[int]]()
        for number, call in enumerate(step.calls[: self._forward]):
            for storage in call.changes:
                self._writers.setdefault(storage, []).append(number)
        self._shared = self._shared_casts()

    def within(self, target: int) -> list[Choice]:
        """Choices within so many bytes, the cheapest first; where there is none, others, that with the fewest first."""
        each = [choice for draft in self._drafts for choice in draft.within(target)]
        found = list({(one.bytes, one.cost, len(one.checkpoints)): one for one in each}.values())
        fitting = [one for one in found if one.bytes <= target]
        by_bytes = sorted(found, key=lambda one: (one.bytes, one.cost))
        return sorted(fitting, key=lambda one: (one.cost, one.bytes)) or by_bytes

    @cached_property
    def _drafts(self) -> "list[_Draft]":
        """One for each way to cut the step into regions."""
        keepable = frozenset(
            number for number, call in enumerate(self.step.calls[: self._forward])
            if call.makes and not call.changes and not call.draws
            and not any(one in self._writers for one in call.makes)
        )  # fmt: skip
        total = sum(self._saved)
        ways = dict.fromkeys(tuple(self._regions(0, total // share)) for share in SHARES)
        return [_Draft(self.step, regions, self.base, keepable) for regions in ways]

    def _regions(self, number: int, most: int) -> Iterator[Region]:
        """The regions within a call of a module, each of at most so many saved bytes where modules are small enough."""
        module, part = self.step.modules[number], self._parts[self.step.modules[number].path]
        children = [self.step.modules[child] for child in module.children]
        is_plain = isinstance(part, nn.Sequential) and type(part).forward is nn.Sequential.forward
        if not is_plain or len(children) != len(part._modules):
            for child in module.children:
                yield from self._of_child(child, most)
            return
        begin, ends = 0, self._ends(children)
        for end, following in zip(ends, [*ends[1:], None], strict=True):
            if following is not None and self._bytes(children[begin], children[following - 1]) <= most:
                continue
            has_hooks = children[begin].is_hooked and self._bytes(children[begin], children[begin]) <= most
            if (end - begin == 1 and not has_hooks) or not self._stands_alone(*children[begin:end]):
                for child in module.children[begin:end]:
                    yield from self._of_child(child, most)
            elif self._bytes(children[begin], children[end - 1]):
                yield _region(module, children[begin:end], (begin, end))
            begin = end

    def _of_child(self, number: int, most: int) -> Iterator[Region]:
        module = self.step.modules[number]
        size = self._bytes(module, module)
        inner = list(self._regions(number, most)) if size > most else []
        if inner or not size or module.is_hooked or not self._stands_alone(module):
            yield from inner
        else:
            yield _region(module, [module], None)

    def _ends(self, children: Sequence[ModuleCall]) -> list[int]:
        """Where a region among the children of an ``nn.Sequential`` may end: before one that stands alone."""
        alone = [number for number, child in enumerate(children) if self._stands_alone(child)]
        return sorted({*alone, len(children)} - {0})

    def _bytes(self, first: ModuleCall, last: ModuleCall) -> int:
        return sum(self._saved[first.start : last.stop])

    def _shared_casts(self) -> frozenset[int]:
        """Casts of weights that are read several times, as ``torch.autocast`` keeps them: in a region each is read
        once, since gradients of several casts add up with other roundings than those of one.
        """
        calls = self.step.calls[: self._forward]
        casts = {
            one: 0 for call in calls if call.target is torch.ops.aten._to_copy.default
            if self.step.given.issuperset(call.reads) for one in call.makes
        }  # fmt: skip
        for call in calls:
            for one in casts.keys() & call.reads if call.makes else ():
                casts[one] += 1
        return frozenset(one for one, times in casts.items() if times > 1)

    def _stands_alone(self, *parts: ModuleCall) -> bool:
        """Whether calls compute the same when they run again: of what they don't make they write into their own buffers
        alone, by operators that may be left out then, and read nothing that is written into or replaced afterwards.
        """
        start, stop = parts[0].start, parts[-1].stop
        calls, paths = self.step.calls, tuple(f"{part.path}." if part.path else "" for part in parts)
        own = {storage for call in calls[start:stop] for storage in call.makes}
        read = {storage for call in calls[start:stop] for storage in call.reads}
        replaced = {storage for part in parts for storage in part.replaced}
        if ELSEWHERE in replaced or replaced & read or self._shared & (own | read):
            return False
        for number in range(start, stop):
            call = calls[number]
            if not own.issuperset(call.changes):
                names = [self.step.buffers.get(one, ()) for one in call.changes]
                is_own = all(any(name.startswith(paths) for name in of_one) for of_one in names)
                if not is_own or not operators.can_be_left_out(call.target):
                    return False
            runs = call.makes or own.intersection(call.changes)
            old = {*call.reads} - own - {*call.changes} if runs else set()
            if any(writer > number for one in old for writer in self._writers.get(one, ())):
                return False
        return True


def _region(module: ModuleCall, parts: Sequence[ModuleCall], children: tuple[int, int] | None) -> Region:
    calls, nodes = (parts[0].start, parts[-1].stop), (parts[0].first, parts[-1].last)
    return Region(module.path, module.turn, children, calls, nodes)


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes that are there in further steps of a draft's schedule, from one to another, if a result is kept."""

    storage: int
    size: int
    start: int
    stop: int


class _Draft:
    """Regions of a step, and what of them may be kept.

    Args:
        step: The step as it is.
        regions: In the order of the forward pass, none within another.
        base: Bytes that are there beside the step's own.
        keepable: Calls whose results may be kept.
    """

    def __init__(self, step: RecordedStep, regions: Sequence[Region], base: int, keepable: Collection[int]) -> None:
        self.step, self.regions = step, list[Region]()
        starts, behind = [region.nodes[0] for region in regions], dict[int, list[int]]()
        for number, call in enumerate(step.calls):
            at = bisect_right(starts, call.sequence) - 1
            if call.is_backward and at >= 0 and call.sequence < regions[at].nodes[1]:
                behind.setdefault(at, []).append(number)
        reads = [dict.fromkeys(one) for one in step.graph.reads]
        self.again, runs, saved = list[range](), dict[int, int](), list[set[int]]()
        for index, region in enumerate(regions):
            own = {one: n for n in range(*region.calls) for one in step.calls[n].makes}
            read = {one for number in behind.get(index, ()) for one in step.calls[number].reads if one in own}
            if not read:
                continue
            for n in range(*region.calls):
                for one in step.calls[n].reads:
                    if one not in own and one not in step.given:
                        reads[behind[index][-1]][one] = None  # the region's inputs stay until it is done
            runs[behind[index][0]] = len(self.regions)
            self.regions.append(region)
            ends = [
                n for n in range(*region.calls) if not read.isdisjoint((*step.calls[n].makes, *step.calls[n].changes))
            ]
            self.again.append(range(region.calls[0], ends[-1] + 1))
            saved.append(read)
        schedule, latest = list[int](), dict[int, int]()
        self._spans: list[dict[int, list[_Span]]] = [{} for _ in self.regions]
        drawn = dict[int, int]()
        for number, call in enumerate(step.calls):
            if number in runs:
                again = self.again[runs[number]]
                for place, one in enumerate(again, len(schedule)):
                    self._spans[runs[number]][one] = [
                        _Span(made, step.sizes[made], latest[made] + 1, place) for made in step.calls[one].makes
                    ]
                    if one in drawn:
                        self._spans[runs[number]][one] = [_Span(-1, step.calls[one].bits, drawn[one], place + 1)]
                for one in again:
                    latest.update(dict.fromkeys((*reads[one], *step.calls[one].makes), len(schedule)))
                    schedule.append(one)
            latest.update(dict.fromkeys((*reads[number], *call.makes), len(schedule)))
            if call.bits and not call.is_backward:
                drawn[number] = len(schedule)
            schedule.append(number)
        self._saved = saved
        graph = schedule_graph(replace(step.graph, reads=tuple(map(tuple, reads))), schedule)
        buffers = assign_storage(graph, alignment=1).buffers
        self._live = live_bytes(buffers, len(schedule)) + base + step.given_bytes
        # all draws of a region or none: those behind one that is left out would draw other numbers
        draws = [[one for one in range(*region.calls) if step.calls[one].draws] for region in self.regions]
        draws = [
            ones if all(step.calls[one].bits and one in again for one in ones) else []
            for ones, again in zip(draws, self.again, strict=True)
        ]
        self._keepable = [
            [*([tuple(ones)] if ones else []), *((one,) for one in again if one in keepable)]
            for ones, again in zip(draws, self.again, strict=True)
        ]

    def within(self, target: int) -> list[Choice]:
        """Choices within so many bytes; where there is none, that which keeps nothing."""
        return [self._chosen(target, opens, keeps) for opens, keeps in ((True, True), (True, False), (False, True))]

    def _chosen(self, target: int, opens: bool, keeps: bool) -> Choice:
        """Results are kept, and whole regions left open, by the cost that this saves for each byte."""
        live, calls = self._live.copy(), self.step.calls
        kept: list[set[int]] = [set() for _ in self.regions]
        opened = set[int]()
        items = list[tuple[float, int, tuple[int, ...], list[_Span]]]()
        for index, again in enumerate(self.again):
            of_call = self._spans[index]
            if opens:
                needed = [span for each in of_call.values() for span in each if span.storage in self._saved[index]]
                cost = sum(calls[one].cost for one in again)
                items.append((cost / max(1, sum(span.size for span in needed)), index, (), needed))
            for ones in self._keepable[index] if keeps else ():
                spans = [span for one in ones for span in of_call[one]]
                cost = sum(calls[one].cost for one in ones)
                items.append((cost / max(1, sum(span.size for span in spans)), index, ones, spans))
        for _, index, ones, spans in sorted(items, key=lambda item: -item[0]):
            if index in opened:
                continue
            changed = [span for span in spans if span.stop > span.start]
            if not ones:
                there = {made for each in kept[index] for made in calls[each].makes}
                changed = [span for span in changed if span.storage not in there]
            before = [live[span.start : span.stop].copy() for span in changed]
            for span in changed:
                live[span.start : span.stop] += span.size
            if any(live[span.start : span.stop].max() > target for span in changed):
                for span, old in reversed(list(zip(changed, before, strict=True))):
                    live[span.start : span.stop] = old
            elif not ones:
                opened.add(index)
            else:
                kept[index].update(ones)
        left = [index for index in range(len(self.regions)) if index not in opened]
        return Choice(
            tuple(self._checkpoint(index, kept[index]) for index in left), int(live.max()),
            sum(calls[one].cost for index in left for one in self.again[index] if one not in kept[index]),
        )  # fmt: skip

    def _checkpoint(self, index: int, kept: Collection[int]) -> Checkpoint:
        region, counts, names = self.regions[index], dict[Any, int](), dict[Any, set[int]]()
        calls = self.step.calls[slice(*region.calls)]
        for number, call in enumerate(calls, region.calls[0]):
            turn = counts[call.target] = counts.get(call.target, -1) + 1
            if number in kept:
                names.setdefault(call.target, set()).add(turn)
        return Checkpoint(
            region, {target: frozenset(turns) for target, turns in names.items()},
            draws=any(call.draws and number not in kept for number, call in enumerate(calls, region.calls[0])),
            writes=any(one in self.step.given for call in calls for one in call.changes),
        )  # fmt: skip


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operator of a region, which costs its time in Python: as little as can be.

    Args:
        kept: See `Checkpoint`.
        results: Kept ones, by operator and which of its calls, with the version that they had.
    """

    def __init__(self, kept: Mapping[Any, frozenset[int]], results: dict[tuple[Any, int], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._results, self._counts = kept, results, dict[Any, int]()

    def __enter__(self) -> Any:
        self._counts = dict.fromkeys(self._kept, -1)
        return super().__enter__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no compiler is told at each operator to leave this alone

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As PyTorch's own modes of selective checkpoints."""
        return True

    def _is_kept(self, target: Any) -> bool:
        """Whether a run's result is; each run is asked about once."""
        turns = self._kept.get(target)
        if turns is None:
            return False
        self._counts[target] += 1
        return self._counts[target] in turns


class _First(_Mode):  # type: ignore[no-untyped-call]
    """In the forward pass what is to be kept is."""

    def __torch_dispatch__(self, target: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = target(*args, **(kwargs or {}))
        if self._is_kept(target):
            if target in operators.BITS:
                kept = result.to(torch.bool)
            else:  # apart from what autograd attaches to it, but with its version: below views, as PyTorch does it
                with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                    kept = tree_map_only(torch.Tensor, torch.Tensor.detach, result)
            versions = [one._version for one in operators.tensors_in(kept)]
            self._results[target, self._counts[target]] = kept, versions
        return result


class _Again(_Mode):  # type: ignore[no-untyped-call]
    """What runs again takes what is kept, and leaves the module's buffers as the forward pass has written them."""

    def __init__(
        self, kept: Mapping[Any, frozenset[int]], results: dict[tuple[Any, int], Any], module: nn.Module | None
    ) -> None:
        super().__init__(kept, results)
        self._module, self._buffers = module, frozenset[int]()

    def __enter__(self) -> Any:
        self._buffers = frozenset(operators.storages(self._module.buffers())) if self._module else frozenset()
        return super().__enter__()

    def __torch_dispatch__(self, target: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_kept(target):
            if (target, self._counts[target]) not in self._results:
                raise RuntimeError(
                    "memonger: gradients are taken a second time of one forward pass, of which single results were "
                    "kept for the first alone: run the forward pass again."
                )
            result, versions = self._results.pop((target, self._counts[target]))
            if versions != [one._version for one in operators.tensors_in(result)]:
                raise RuntimeError(f"memonger: the result of '{target}', kept for the backward pass, was written into.")
            return args[0].copy_(result) if target in operators.BITS else result
        if self._buffers and operators.may_write(target):
            if operators.normalizes_by_its_batch(target, args):
                names = [one.name for one in target._schema.arguments]
                args = [None if name in operators.STATISTICS else one for name, one in zip(names, args, strict=False)]
            else:
                written = operators.storages(operators.written(target, args, kwargs))
                if written and self._buffers.issuperset(written):
                    return operators.left_out(target, args, kwargs)
        return target(*args, **kwargs)


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the calls of a region's first run.

    Args:
        repeats: What is told to who records the step.
        calls: Their numbers, in order.
    """

    def __init__(self, repeats: Repeats, calls: list[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._repeats, self._calls = repeats, calls

    def __torch_dispatch__(self, target: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._repeats.last
        result = target(*args, **(kwargs or {}))
        if target not in SAC_IGNORED_OPS:
            self._calls.append(before + 1)
        return result


class _Repeating(_Noting):  # type: ignore[no-untyped-call]
    """Tells of each operator of a region's repetition which call it repeats: they come in the same order."""

    def __enter__(self) -> Any:
        self._next = iter(self._calls)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, target: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if target not in SAC_IGNORED_OPS:
            self._repeats.now = next(self._next, -1)
        try:
            return target(*args, **(kwargs or {}))
        finally:
            self._repeats.now = -1


@contextmanager
def _both(around: AbstractContextManager[Any], inside: AbstractContextManager[Any]) -> Iterator[None]:
    with around, inside:
        yield


class Checkpointed:
    """The ``forward`` of a module some of whose calls are checkpointed, whole or in parts.

    Args:
        part: The module.
        inner: Its own ``forward``, where that isn't its class's.
        checkpoints: By the number of the call.
        step: Of which the module is a part.
        repeats: See `PutOn`.
    """

    def __init__(
        self, part: nn.Module, inner: Any, checkpoints: Mapping[int, Sequence[Checkpoint]], step: "_Step",
        repeats: Repeats | None,
    ) -> None:  # fmt: skip
        self.inner = inner
        self._part, self._checkpoints, self._step, self._repeats = part, checkpoints, step, repeats
        (self._path, *_) = {one.region.path for ones in checkpoints.values() for one in ones}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        turns = self._step.turns
        turn = turns[self._path] = turns.get(self._path, -1) + 1
        whole = self.inner or partial(type(self._part).forward, self._part)
        checkpoints = self._checkpoints.get(turn, ())
        if not checkpoints or not self._step.is_as_planned(self._part, self._path):
            return whole(*args, **kwargs)
        if checkpoints[0].region.children is None:
            return self._run(checkpoints[0], whole, *args, **kwargs)
        parts = list(self._part._modules.values())  # children() leaves repetitions out
        (value,), place = (*args, *kwargs.values()), 0
        for one in checkpoints:
            start, stop = one.region.children or (0, 0)
            value = _in_turn(parts[place:start], value)
            value = self._run(one, partial(_in_turn, parts[start:stop]), value)
            place = stop
        return _in_turn(parts[place:], value)

    def _run(self, checkpoint: Checkpoint, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        draws = checkpoint.draws and self._repeats is None
        contexts = partial(self._contexts, checkpoint)
        # PyTorch keeps the states of generators of the devices that arguments by position are on: those of all, then
        of_devices = self._one_of_each_device(args, kwargs) if draws else []
        caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # what it holds decides which operators run: others the second time
        try:
            return run_again(
                lambda *given, **named: run(*given[len(of_devices) :], **named), *of_devices, *args,
                use_reentrant=False, preserve_rng_state=draws, context_fn=contexts, **kwargs,
            )  # fmt: skip
        finally:
            torch.set_autocast_cache_enabled(caches)

    def _one_of_each_device(self, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """Tensors without elements on the devices that a call computes on, other than the CPU."""
        devices = dict.fromkeys(one.device for one in (*operators.tensors_in((args, kwargs)), *self._part.parameters()))
        return [torch.empty(0, device=device) for device in devices if device.type != "cpu"]

    def _contexts(self, checkpoint: Checkpoint) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        results = dict[tuple[Any, int], Any]()
        first = _First(checkpoint.kept, results) if checkpoint.kept else nullcontext()
        is_seen = checkpoint.kept or checkpoint.writes
        again = _Again(checkpoint.kept, results, self._part if checkpoint.writes else None) if is_seen else None
        if self._repeats is None:
            return first, again or nullcontext()
        calls = list[int]()
        return (
            _both(first, _Noting(self._repeats, calls)),
            _both(again or nullcontext(), _Repeating(self._repeats, calls)),
        )


def _in_turn(parts: Sequence[Any], value: Any) -> Any:
    for part in parts:
        value = part(value)
    return value


class _Step:
    """What the checkpointed parts of a module have in common: before it runs, counts of calls begin anew.

    Args:
        modes: Which modules were in training mode when the step was planned, by their names.
    """

    def __init__(self, modes: Mapping[str, bool]) -> None:
        self.turns, self._modes = dict[str, int](), modes

    def __call__(self, module: nn.Module, *_: Any) -> None:
        self.turns.clear()
        self.is_as_planned(module, "")

    def is_as_planned(self, part: nn.Module, path: str) -> bool:
        """Whether checkpoints are for what runs now: not without gradients, nor for evaluation alone.

        Raises:
            PlanError: modes are others than those of the plan: draws and buffers may be, too.
        """
        if not torch.is_grad_enabled():
            return False
        now = {name: one.training for name, one in part.named_modules(prefix=path)}
        others = [name for name, trains in now.items() if self._modes.get(name, trains) != trains]
        if others and any(now.values()):
            modes = ("training", "evaluation") if now[others[0]] else ("evaluation", "training")
            what = f"part '{others[0]}'" if others[0] else "module"
            raise PlanError(
                f"the {what} is in {modes[0]} mode, and was in {modes[1]} mode when memonger.torch.checkpoint planned "
                "its step: set the mode (module.train(), module.eval()) as it was, or call checkpoint again."
            )
        return not others


class PutOn:
    """Has a module checkpoint parts of itself.

    Args:
        module: Calls of it are changed, its parameters and their names aren't.
        checkpoints: What is checkpointed.
        repeats: Who records the step, on tensors without memory, is told by this what runs again; no states of random
            generators are kept then.

    Attributes:
        checkpoints: What is checkpointed.
    """

    def __init__(self, module: nn.Module, checkpoints: Sequence[Checkpoint], repeats: Repeats | None = None) -> None:
        self.checkpoints = tuple(checkpoints)
        parts = dict(module.named_modules())
        step = _Step({path: part.training for path, part in parts.items()})
        by_path: dict[str, dict[int, list[Checkpoint]]] = {}
        for one in checkpoints:
            by_path.setdefault(one.region.path, {}).setdefault(one.region.turn, []).append(one)
        self._hook = module.register_forward_pre_hook(step)
        self._parts = [parts[path] for path in by_path]
        for part, of_turns in zip(self._parts, by_path.values(), strict=True):
            inner = part.__dict__.get("forward")
            part.__dict__["forward"] = Checkpointed(part, inner, of_turns, step, repeats)

    def take_off(self) -> None:
        """The module is as it was."""
        self._hook.remove()
        for part in self._parts:
            part.__dict__["forward"] = part.__dict__["forward"].inner
            if part.__dict__["forward"] is None:
                del part.__dict__["forward"]


def checkpoint(
    module: nn.Module,
    example: torch.Tensor | Sequence[torch.Tensor],
    budget: str | int,
    optimizer: torch.optim.Optimizer | int | None = None,
    *,
    in_backward: bool = False,
) -> nn.Module:
    """Have a module's training step hold a budget in eager PyTorch, without a compiler.

    ``module = memonger.torch.checkpoint(module, images, "4GiB", optimizer)``. Calls of its parts are checkpointed by
    `torch.utils.checkpoint`, with a policy that says of every operator's every call in them what is kept; parameters,
    their names and hooks stay as they are, so ``DistributedDataParallel`` and ``fully_shard`` go around it as before.
    Gradients, buffers and random numbers are those of the module as it was, bit for bit.

    Planned is the step that was looked at: the same operators, on inputs as large as the example; inside
    ``torch.autocast`` where it is called inside it. Smaller inputs take less. Without gradients the module runs as
    before. Planning looks at shapes alone, allocates nothing and needs no device.

    Args:
        module: Gives the loss, or what it is computed from. It is changed in place; what an earlier call did is undone,
            but for where an error is raised.
        example: What it is called with; tensors of ``meta`` stand for such of the module's own device.
        budget: Bytes for all that `memonger.torch.partitioner` counts, as a number or as ``4GiB``.
        optimizer: Whose state counts, or the bytes of a state.
        in_backward: Whether each parameter has a hook (``register_post_accumulate_grad_hook``) that applies its
            gradient and frees it (``parameter.grad = None``): gradients then aren't there together.

    Returns: the module; `plan_of` says what its step takes.

    Raises:
        BudgetError: checkpoints that hold the budget weren't found; it says what does.
        PlanError: a size is none; the module can't run on tensors without memory, or needs no gradient; a parameter
            has no such hook, or is read after its gradient is applied.
    """
    limit, state, inputs = in_bytes("budget", budget, PlanError), state_bytes(optimizer), examples_of(module, example)
    bare = [
        name for name, one in module.named_parameters() if one.requires_grad and not one._post_accumulate_grad_hooks
    ]
    if in_backward and bare:
        raise PlanError(
            f"in_backward: the parameter '{bare[0]}' has no hook that applies its gradient and frees it: give it one, "
            "by its register_post_accumulate_grad_hook, before this call."
        )
    try:
        plan, checkpoints = chosen(*without_memory(module, inputs), limit, state, in_backward)
    except BudgetError as error:
        would = _what_would(module, inputs, limit, state)
        would += "" if in_backward else " With in_backward=True gradients aren't there together."
        raise BudgetError(limit, error.smallest, error.lower_bound, error.hint + would) from None
    take_off(module)
    module.__dict__[PLAN] = plan, PutOn(module, checkpoints), in_backward
    return module


def _what_would(module: nn.Module, inputs: Sequence[torch.Tensor], limit: int, state: int) -> str:
    """Whether another order and repetitions within the backward pass would hold a budget that checkpoints can't."""
    try:
        held = planned(traced(module, inputs), limit, state)[0].peak_bytes
    except BudgetError as error:
        return f" torch.compile(backend=memonger.torch.backend(...)) can hold {in_full(error.smallest)}."
    except PlanError:
        return ""
    return f" torch.compile(backend=memonger.torch.backend(...)) holds it, with {in_full(held)}."


def plan_of(module: nn.Module) -> StepPlan:
    """What the step of a module takes that `checkpoint` returned.

    Raises:
        PlanError: it didn't return this one.
    """
    if PLAN not in module.__dict__:
        raise PlanError(f"this {type(module).__name__} isn't what memonger.torch.checkpoint returned: it has no plan.")
    plan: StepPlan = module.__dict__[PLAN][0]
    return plan


def chosen(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    mode: FakeTensorMode,
    budget: int | None,
    state: int,
    in_backward: bool = False,
) -> tuple[StepPlan, tuple[Checkpoint, ...]]:
    """The cheapest checkpoints that were found to hold a budget.

    Args:
        module: Of tensors without memory.
        inputs: What it is called with.
        mode: What makes these tensors.
        budget: Bytes for everything; None: nothing is checkpointed.
        state: Bytes of the optimizer's state.
        in_backward: See `checkpoint`.

    Returns: what the step takes, and the checkpoints.

    Raises:
        BudgetError: none were found.
        PlanError: see `memonger.torch.recorded.recorded`; a parameter is read after its gradient is applied.
    """
    begin = time.perf_counter()
    whole = recorded(module, inputs, mode, in_backward)
    if whole.is_late:
        raise PlanError(
            "in_backward: the step reads a parameter after its gradient is applied to it: let the optimizer step "
            "behind the backward pass."
        )
    found = Allocated(whole.peak + state, 0.0, (whole, Choice((), whole.peak + state, 0.0)))
    if budget is not None and found.bytes > budget:
        candidates, tried = Checkpoints(whole, module, state), list[Allocated[tuple[RecordedStep, Choice]]]()

        def ran(choice: Choice) -> Allocated[tuple[RecordedStep, Choice]]:
            for one in tried:
                if one.item[1].checkpoints == choice.checkpoints:
                    return one
            step = checkpointed(module, inputs, mode, choice.checkpoints, in_backward)
            tried.append(Allocated(_NEVER if step.is_late else step.peak + state, choice.cost, (step, choice)))
            return tried[-1]

        def proposed(target: int, _: int) -> tuple[int, list[Choice]]:
            choices = candidates.within(target)
            return choices[0].bytes, choices[:PROPOSALS]

        best = cheapest_within(budget, proposed, ran)
        if best is None:  # estimates of the fewest bytes may be off; what is found now is the same for any budget
            best = min([found, *map(ran, candidates.within(0)[:PROPOSALS])], key=lambda one: one.bytes)
            for _ in range(ATTEMPTS):
                lower = min(
                    map(ran, candidates.within(best.bytes)[:PROPOSALS]), key=lambda one: one.bytes, default=best
                )
                if lower.bytes >= best.bytes:
                    break
                best = lower
        if best.bytes > budget:
            smallest = BudgetError(budget, best.bytes, 0)
            raise refused(smallest, whole.given_bytes, whole.gradients, state)
        found = best
    step, choice = found.item
    return step_plan(whole, step, budget, state, time.perf_counter() - begin), choice.checkpoints


def checkpointed(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    mode: FakeTensorMode,
    checkpoints: Sequence[Checkpoint],
    in_backward: bool = False,
) -> RecordedStep:
    """A step of a module with checkpoints put on meanwhile; see `memonger.torch.recorded.recorded`."""
    repeats = Repeats()
    made = PutOn(module, checkpoints, repeats)
    try:
        return recorded(module, inputs, mode, in_backward, repeats)
    finally:
        made.take_off()


def step_plan(whole: RecordedStep, step: RecordedStep, budget: int | None, state: int, seconds: float) -> StepPlan:
    """What a step with checkpoints takes.

    Args:
        whole: The step without.
        step: With them.
        budget: See `StepPlan`.
        state: Bytes of the optimizer's state.
        seconds: See `StepPlan`.
    """
    once = [call for call in whole.calls if call.makes or call.changes]
    again = [call for call in step.calls if call.again >= 0 and (call.makes or call.changes)]
    cost = sum(call.cost for call in once)
    return StepPlan(
        budget=budget, peak_bytes=step.peak + state, peak_before_bytes=whole.peak + state,
        given_bytes=whole.given_bytes, gradient_bytes=whole.gradients, state_bytes=state,
        overhead=sum(call.cost for call in again) / cost if cost else 0.0, nodes=len(once), recomputed=len(again),
        seconds=seconds,
    )  # fmt: skip
