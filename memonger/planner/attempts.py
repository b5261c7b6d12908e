"""What a budget is searched with, in turn, until a plan holds it: `within`.

First the job as it is; then with a part of its weights, and of what training updates, in a file; then with values of a
step in one as well, where that is estimated to take fewer seconds or nothing else holds (`memonger.planner.waiting`).
On a CUDA device weights lie in the host's memory in place of a file, and nodes copy them
(`memonger.lowering.cuda.from_host`); where that is asked for, and inference has room for it, ahead of the steps that
read them (`memonger.planner.ahead`).
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import product

from memonger.errors import BudgetError
from memonger.graph.ahead import choose_copies_ahead
from memonger.graph.weight_window import Read, choose_copies, device_reads, largest_at_once, weight_reads, why_kept
from memonger.ir.save import MAPPED_LIMIT
from memonger.plan import Plan
from memonger.planner.ahead import SPARE, copied_ahead
from memonger.planner.job import Job, decided, finish, may_run_in_chunks, with_search
from memonger.runtime.packing import packs_here
from memonger.schedule.solution import total_bytes
from memonger.units import format_size
from memonger.words import option

TOLD = 10
"""Part of a budget from which a refusal says of weights why they can't stay in a file."""

WINDOWS = 3
"""Searches with a part of the weights in a file, each for as many bytes fewer as the window of the one before grew."""


def within(job: Job, begin: float) -> tuple[Job, Plan]:
    """A plan that holds the job's budget, where there is one.

    Args:
        job: The job, with all weights in memory.
        begin: When planning began (`time.perf_counter`).

    Raises:
        BudgetError: none does. It names the smallest budget that some attempt found to work.
    """
    if job.mode == "inference" and job.options.chunks != "off" and may_run_in_chunks(job):
        job = with_search(job)
    refusals, known = list[BudgetError](), list[BudgetError]()
    found = _fastest(job, begin, refusals)
    if found is not None:
        return found
    has_files, waits, floor = with_window(job) is not None, may_wait(job), least(job)
    named, budget = floor, refusals[0].budget
    if (has_files or waits) and budget > floor:  # what is found for the least bytes is the same whatever the budget
        found = _fastest(job.at(floor), begin, known)
    bound = min(error.lower_bound for error in (*refusals, *known))
    if has_files and job.device.is_host:  # in another order two weights that follow each other may take less
        reads = weight_reads(job.lowered.model, job.request.graph)
        bound += max(read.resident for read in reads) - largest_at_once(reads)
    left = {error.smallest for error in known or refusals} | {refusals[0].smallest}
    most, rounds = max(left), len(left) + WINDOWS
    while found is None:  # read in another order weights may need a larger window: then what that names is tried
        named, rounds = min(left) if rounds else most, rounds - 1
        if named == most and named > budget:
            break
        others = list[BudgetError]()
        found = _fastest(job.at(named), begin, others)
        if named == most:
            break
        left = {size for size in left | {error.smallest for error in others} if named < size <= most}
    if found is not None and found[1].total_bytes <= budget:
        return found[0], dataclasses.replace(found[1], budget=budget)
    hint = next((error.hint for error in refusals if error.hint), "")
    if job.mode == "inference" and (packs_here(job.lowered.stamp) or not job.device.is_host):
        if job.options.weights == "packed":
            free = dataclasses.replace(job, options=dataclasses.replace(job.options, weights="auto"))
            if with_window(free) is not None:
                hint += f" With {option('weights', 'auto')} some of its weights may {_where(job)}."
        else:
            hint += _why_kept(job, max(1, budget // TOLD))
    raise BudgetError(budget, named, floor if waits else max(floor, bound), hint)


def least(job: Job) -> int:
    """Bytes of all that is no value of the job, with as few of its weights in memory as there can be in any order.

    On a CUDA device copies of weights are values.
    """
    if (windowed := with_window(job)) is None:
        return job.request.base
    if not job.device.is_host:
        return windowed.request.base
    reads = weight_reads(job.lowered.model, job.request.graph)
    return job.request.base + sum(read.own - read.nbytes for read in reads) + max(read.resident for read in reads)


def as_asked(job: Job) -> Job:
    """The job without a budget: where its weights are to be mapped, with as few in memory as there can be."""
    return (with_window(job) if job.options.weights == "mapped" else None) or job


def why_all_are_kept(job: Job) -> str:
    """Why none of a job's weights can stay in a file; empty where some can."""
    if with_window(job) is not None:
        return ""
    if job.device.facts.is_portable:
        why = f" With {option('device', 'cpu')}, or a CUDA device, some may."
    elif job.device.is_host and not packs_here(job.lowered.stamp):
        why = " They may on a processor that onnxruntime's kernels are known to pack for as the file has it."
    elif job.device.is_host and _weight_bytes(job) < MAPPED_LIMIT:
        why = f" They take less than {format_size(MAPPED_LIMIT)}, which lies inside the file."
    else:
        why = _why_kept(job, 1)
    return f"{option('weights', job.options.weights)}: none of its weights can {_where(job)}.{why}"


def _where(job: Job) -> str:
    return "stay in a file" if job.device.is_host else "lie in the host's memory"


def _why_kept(job: Job, least: int) -> str:
    return why_kept(job.lowered.model, least, None if job.device.is_host else _on_the_host(job))


def _weight_bytes(job: Job) -> int:
    tensors = (value.const_value for value in job.lowered.model.graph.initializers.values())
    return sum(one.nbytes for one in tensors if one is not None)


def may_wait(job: Job) -> bool:
    """Whether plans of the job are among the attempts that leave values of a step in a file."""
    return next(_with_values(job, None), None) is not None


def _fastest(job: Job, begin: float, refusals: list[BudgetError]) -> tuple[Job, Plan] | None:
    """Of the plans that hold the budget the one that is estimated to take the fewest seconds; None: none does."""
    found = _first(attempts(job), begin, refusals)
    if job.mode != "training" or job.request.budget is None:
        return found
    from memonger.planner import waiting  # here: without a budget for a step none of it is needed

    usual = None if found is None else waiting.seconds_of(job.request, found[1])
    best = math.inf if usual is None else usual
    for group in _with_values(job, usual):
        other = _first(group, begin, refusals)
        if other is not None and other[1].values_in_file:
            made, plan = other
            if (seconds := waiting.seconds_of(job.request, plan)) < best:
                said = waiting.note(job.request, plan, usual)
                found, best = (made, dataclasses.replace(plan, notes=(*plan.notes, said))), seconds
    return found


def _first(jobs: Iterable[Job], begin: float, refusals: list[BudgetError]) -> tuple[Job, Plan] | None:
    """The first that holds the budget; what the others say is added to ``refusals``.

    Only a whole plan knows its window: what is computed again reads weights again, next to others. Where it is larger
    than was counted, a schedule is searched that takes as many bytes fewer. What is to copy ahead and can't says
    nothing: copies in order hold more.
    """
    refused = refusals
    for job in jobs:
        refusals = list[BudgetError]() if job.copies_ahead else refused
        for _ in range(WINDOWS if job.has_window else 1):
            job.report_progress("search")
            try:
                made, solution = decided(job if job.request.budget is None and not job.has_window else job.copy())
            except BudgetError as error:
                refusals.append(error)
                break
            counted = total_bytes(made.request, solution)
            job.report_progress("verify")
            try:
                plan = finish(made, solution, begin)
                found = copied_ahead(plan, made.request.sharing, job.copies_ahead) if job.copies_ahead else plan
                if found is not None:
                    return made, found
                break
            except BudgetError as error:
                refusals.append(error)
                base = job.request.base + error.smallest - counted
                if job.request.budget is None or not job.request.base < base < job.request.budget:
                    break
                job = dataclasses.replace(job, request=dataclasses.replace(job.request, base=base))
    return None


def attempts(job: Job) -> Iterator[Job]:
    """What a budget is searched with, in turn: the job as it is; then with a part of its weights in the plan's file.
    Where they are to be mapped it is never as it is.

    With all else as large as it is without a budget more of the weights are left there, and with all else as small as
    the budget makes it fewer: the first computes nothing again but what is computed again anyway. What a training step
    computes again reads its weights again, next to any other: last there is room for the two largest.
    """
    budget, is_mapped = job.request.budget, job.options.weights == "mapped"
    in_file = None if budget is None else with_window(job)
    if budget is None or in_file is None:
        yield as_asked(job)
        return
    if job.request.base < budget and not is_mapped:
        yield job
    usual = dataclasses.replace(job.options, strategy=None, budget=None).chosen_strategy
    for some in [in_file] if job.device.is_host or is_mapped else _on_host(job):
        yield dataclasses.replace(some, request=dataclasses.replace(some.request, budget=None), strategy=usual)
    yield in_file
    roomy = with_window(job, any_order=True) if job.mode == "training" else None
    if roomy is not None and roomy.request.base > in_file.request.base:
        yield roomy


def _with_values(job: Job, usual: float | None) -> Iterator[Iterator[Job]]:
    """Attempts with values of a step in a file, of each choice of these in turn: with all weights in memory; where no
    other plan holds, with as few of them as there can be.

    Args:
        job: The job, with all values in memory.
        usual: Estimated seconds of a plan that leaves no value in a file; None: none holds the budget.
    """
    measured, options = job.lowered.calibration, job.options
    is_timed = measured is not None and bool(measured.seconds) and packs_here(job.lowered.stamp)
    is_plain = options.buckets is None and options.axis_and_chunks is None and not job.ranges
    if job.mode != "training" or job.request.budget is None or not (is_timed and is_plain):
        return
    if usual is not None and (usual <= 0 or options.time_limit is not None):
        return
    from memonger.planner import waiting  # here: without a budget for a step none of it is needed

    def with_some(nodes: frozenset[str]) -> Iterator[Job]:
        lowered, request = waiting.marked(job.lowered, job.request, job.device, nodes)
        whole = dataclasses.replace(options, chunks="off")
        apart = dataclasses.replace(job, lowered=lowered, request=request, options=whole, has_window=True)
        yield apart
        if usual is None:
            request = dataclasses.replace(request, base=job.request.base)
            yield from filter(None, [with_window(dataclasses.replace(apart, request=request, has_window=False))])

    yield from map(with_some, waiting.choices(job.request, usual))


def _on_host(job: Job) -> Iterator[Job]:
    """The job of a CUDA device with as few weights in the host's memory as its budget needs, by what values take in
    file order; with some room left for gaps, then with more. First, if they are to be, copied ahead."""
    request, tried = job.request, set[tuple[bool, tuple[str, ...]]]()
    assert request.budget is not None
    reads = _copied_reads(job)
    beside = request.base - sum(read.nbytes for read in reads) + max(request.graph.workspace, default=0)
    may_be_ahead = job.options.weights == "ahead" and job.mode == "inference" and not job.ranges
    live, ways = request.live_bytes, [True, False] if may_be_ahead else [False]
    for is_ahead, share in product(ways, SPARE):
        with suppress(ValueError):
            room = int((1 - share) * (request.budget - beside))
            chosen, usual = choose_copies(reads, live, room), 0
            if is_ahead:
                usual = sum(read.resident * len(read.ranges) for read in chosen)
                chosen, is_worth_it = choose_copies_ahead(reads, live, room)
                chosen = chosen if is_worth_it else []
            if chosen and (key := (is_ahead, tuple(read.name for read in chosen))) not in tried:
                tried.add(key)
                yield dataclasses.replace(_copied(job, chosen), copies_ahead=usual)


def _copied_reads(job: Job) -> list[Read]:
    return device_reads(job.lowered.model, _on_the_host(job))


def _on_the_host(job: Job) -> Collection[str]:
    """Values of a CUDA device's model that lie in the host's memory."""
    measured = job.lowered.calibration
    return measured.host if measured is not None else ()


def _copied(job: Job, reads: Sequence[Read]) -> Job:
    """The job of a CUDA device with some weights in the host's memory, and nodes that copy them."""
    from memonger.lowering.cuda.from_host import copy_from_host  # here: for a CUDA device alone

    request, lowered = job.request, dataclasses.replace(job.lowered, model=job.lowered.model.clone())
    copy_from_host(lowered.model, reads)
    graph = lowered.graph_on(job.device, job.ranges)
    number = {name: node for node, name in enumerate(graph.nodes)}
    moved = {node: number[name] for node, name in enumerate(request.graph.nodes)}
    request = request.renumbered(graph, moved)
    request = dataclasses.replace(request, base=request.base - sum(read.nbytes for read in reads))
    return dataclasses.replace(job, lowered=lowered, request=request, solution=None, has_window=True)


def with_window(job: Job, *, any_order: bool = False) -> Job | None:
    """The job with as few weights in memory as there can be; None where it has, or none of them may stay in a file.

    That is on this machine's processor: the file has the weights as its kernels read them. Of a training step those may
    stay there that are frozen; what it updates stays in a file of the session's. On a CUDA device all lie in the host's
    memory that may.

    Args:
        job: The job, with all weights in memory.
        any_order: Whether a training step has room for its two largest, whichever come next to each other.
    """
    model, request = job.lowered.model, job.request
    if job.has_window or job.options.weights == "packed":
        return None
    if not job.device.is_host:
        copied = _copied_reads(job)
        return _copied(job, copied) if copied and not job.options.buckets else None
    if not packs_here(job.lowered.stamp) or _weight_bytes(job) < MAPPED_LIMIT:
        return None
    reads = weight_reads(model, request.graph)
    if not reads:
        return None
    window = largest_at_once(reads)
    if any_order and job.mode == "training":
        window = max(window, sum(sorted(read.resident for read in reads)[-2:]))
    base = request.base + sum(read.own - read.nbytes for read in reads) + window
    return dataclasses.replace(job, has_window=True, request=dataclasses.replace(request, base=base))
