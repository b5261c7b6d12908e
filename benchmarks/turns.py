"""Contestants in processes of their own that take turns, so that a machine that slows down slows all of them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from memonger.cli.measure_steps import MeasuredTrainer, StepsJob
from memonger.runtime.measure import MeasuredSession, RunJob, take_turns
from memonger.runtime.worker import Worker


@contextmanager
def contest(jobs: Mapping[str, RunJob], folder: Path) -> Iterator[dict[str, MeasuredSession]]:
    """Sessions, or trainers, by name; their processes end with the block."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(session_of(job, folder, name)) for name, job in jobs.items()}


def session_of(job: RunJob, folder: Path, name: str) -> MeasuredSession:
    """A session, or a trainer, in a process of its own that has run once."""
    return (MeasuredTrainer if isinstance(job, StepsJob) else MeasuredSession)(job, folder, name)


def race(workers: Sequence[MeasuredSession], rounds: int, seconds: float, *, fewest: int = 0) -> None:
    """Let workers take turns of about so many seconds for all of them together; what they did before is forgotten.

    Args:
        workers: Sessions that have run.
        rounds: Turns.
        seconds: Of one turn of all; a run of each at least.
        fewest: Where a run of each takes longer than that, there are fewer turns, but so many; 0: never fewer.
    """
    take_turns(workers, 1, 1)
    once = sum(worker.seconds[-1] for worker in workers)
    for worker in workers:
        worker.turns.clear()
    if fewest and once > seconds:
        rounds = max(fewest, min(rounds, int(rounds * seconds / once)))
    take_turns(workers, rounds, max(1, int(seconds / once)))


@contextmanager
def contestants(
    module: str, arguments: Mapping[str, Sequence[str]], folder: Path
) -> Iterator[tuple[dict[str, Worker], dict[str, dict[str, Any]]]]:
    """Processes of a module by name, each with its own arguments, that end with the block; and what each said first.

    They are started one after the other: none begins before the one before it has said it.
    """
    with ExitStack() as stack:
        workers, first = dict[str, Worker](), {}
        for number, (name, words) in enumerate(arguments.items()):
            workers[name] = stack.enter_context(Worker(module, words, folder / f"{number}.err"))
            first[name] = workers[name].read()
        yield workers, first


def answers(workers: Mapping[str, Worker], requests: Sequence[object]) -> dict[str, list[dict[str, Any]]]:
    """What each worker says to each request: all of them answer one before the next is asked."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    for request in requests:
        for name, worker in workers.items():
            found[name].append(worker.ask(request))
    return found
