"""Worker processes: each judges many cases, and another takes its place when it dies or hangs.

The process that calls `judge` forks: it must have started no thread and opened no session of onnxruntime.
"""

import faulthandler
import gc
import json
import os
import random
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from memonger.errors import MemongerError
from tests.support.fuzzing.cases import KINDS
from tests.support.fuzzing.outcomes import Outcome, Wrong, signature

TIME = 20.0  # seconds of processor time a case may take; three times that by the clock
MEMORY = 6 << 30  # bytes of address space
LIFE = 400  # cases of one process: what one leaves behind can't gather for ever


class _Worker:
    """A forked process and the cases it still has to judge."""

    def __init__(self, kind: str, seeds: Sequence[int], only_stock: bool = False) -> None:
        self.kind, self.seeds, self.only_stock = kind, list(seeds), only_stock
        self.folder = Path(tempfile.mkdtemp(prefix="memonger-fuzzing-"))
        ours, theirs = os.pipe()
        sys.stdout.flush()
        self.process = os.fork()
        if not self.process:
            os.close(ours)
            _work(kind, self.seeds, self.folder, os.fdopen(theirs, "w"), only_stock)
        os.close(theirs)
        self.lines, self.fd = b"", ours
        self.over = False
        self._begin()

    def _begin(self) -> None:
        self.begun, self.used, self.told = time.monotonic(), _seconds(self.process), dict[str, str]()

    @property
    def hangs(self) -> bool:
        """Whether its case takes too long."""
        return time.monotonic() - self.begun > 3 * TIME or _seconds(self.process) - self.used > TIME

    def read(self) -> Iterator[Outcome]:
        """What it said since; empty at its end (`over`)."""
        data = os.read(self.fd, 1 << 16)
        self.over = not data
        *lines, self.lines = (self.lines + data).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "result" in said:
                self.seeds.remove(said["seed"])
                self._begin()
                yield Outcome(**said)
            else:
                self.told |= said

    def end(self) -> int:
        """Kill it if it still runs. Returns: the signal it died by; 0: none."""
        os.kill(self.process, signal.SIGKILL)
        _, status = os.waitpid(self.process, 0)
        os.close(self.fd)
        self.stack = (self.folder / "stack").read_text(errors="replace") if (self.folder / "stack").exists() else ""
        shutil.rmtree(self.folder, ignore_errors=True)
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def _seconds(process: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def judge(kind: str, seeds: Sequence[int], processes: int = 1) -> Iterator[Outcome]:
    """Judge cases, in the order in which they are done."""
    waiting = [list(seeds[begin : begin + LIFE]) for begin in range(0, len(seeds), LIFE)]
    workers: list[_Worker] = []
    try:
        while waiting or workers:
            while waiting and len(workers) < processes:
                workers.append(_Worker(kind, waiting.pop(0)))
            ready, _, _ = select.select([worker.fd for worker in workers], [], [], 0.5)
            for worker in list(workers):
                if worker.fd in ready:
                    yield from worker.read()
                hangs = worker.hangs
                if worker.over or hangs:
                    workers.remove(worker)
                    died = worker.end()
                    if worker.seeds:
                        yield _died(worker, "hang" if hangs else "crash", died)
                        waiting.append(worker.seeds[1:])
                    waiting = [seeds for seeds in waiting if seeds]
    finally:
        for worker in workers:
            worker.end()


def _died(worker: _Worker, result: str, died: int) -> Outcome:
    """How the case ended that ended its process; one that stock onnxruntime dies of too isn't ours to answer for."""
    seed, stage = worker.seeds[0], worker.told.get("stage", "")
    name = signal.Signals(died).name if died else "exit"
    lines = re.findall(r'File "(.*)", line (\d+) in (.*)', worker.stack.rpartition("most recent call first")[2])
    inside = [line for line in lines if "/memonger/" in line[0] and "/tests/" not in line[0]] or lines
    place = "{}:{} {}".format(inside[0][0].rpartition("/memonger/")[2], *inside[0][1:]) if inside else "?"
    told = f"{name if result == 'crash' else f'over {TIME:.0f} s'} in {stage or 'no stage'} at {place}"
    if not worker.only_stock and stage.startswith(("run", "stock", "device")):
        alone = [] if stage == "stock" else list(judge_stock(worker.kind, seed))
        if stage == "stock" or alone:
            result = "stock"
    return Outcome(worker.kind, seed, result, told, worker.told.get("mutation", ""))


def judge_stock(kind: str, seed: int) -> Iterator[Outcome]:
    """The case with stock onnxruntime alone: an outcome if its process dies or hangs, none if it lives."""
    worker = _Worker(kind, [seed], only_stock=True)
    try:
        while not worker.over and not worker.hangs:
            if select.select([worker.fd], [], [], 0.5)[0] and list(worker.read()):
                return
        yield Outcome(kind, seed, "stock")
    finally:
        worker.end()


def _work(kind: str, seeds: Sequence[int], folder: Path, said: IO[str], only_stock: bool) -> None:
    """The forked process: it says what it does and how each case ended, a line of JSON each."""
    tempfile.tempdir = str(folder / "temporary")
    Path(tempfile.tempdir).mkdir()
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2) if not os.environ.get("FUZZING_LOUD") else (0,):
        os.dup2(null, standard)
    stack = (folder / "stack").open("w")
    faulthandler.enable(stack, all_threads=False)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def say(**what: Any) -> None:
        said.write(json.dumps(what) + "\n")
        said.flush()

    gc.freeze()  # what is imported stays: the collections below needn't look through it
    try:
        for seed in list(seeds):
            work = folder / f"case{seed}" / "work"
            work.mkdir(parents=True)
            os.chdir(work)
            faulthandler.dump_traceback_later(TIME * 0.9, repeat=True, file=stack)
            say(**asdict(_outcome(kind, seed, work, say, only_stock)))
            faulthandler.cancel_dump_traceback_later()
            os.chdir(folder)
            shutil.rmtree(work.parent, ignore_errors=True)
            if seed % 8 == 0:
                gc.collect()  # sessions and what refers to them
    finally:
        os._exit(0)  # nothing of the parent's is to be ended here


def _outcome(kind: str, seed: int, folder: Path, say: Callable[..., None], only_stock: bool) -> Outcome:
    told = dict[str, str]()

    def tell(**what: str) -> None:
        told.update(what)
        say(**what)

    result, about = "right", ""
    try:
        tell(stage="draw", mutation="")
        result = KINDS[kind](random.Random(f"{kind} {seed}"), folder, tell, only_stock)
    except MemongerError as error:
        result, about = "refused", type(error).__name__
    except Wrong as error:
        result, about = "wrong", str(error)
    except BaseException as error:  # whatever it is, it is none of memonger's own
        result, about = "traceback", signature(error)
    return Outcome(kind, seed, result, about, told.get("mutation", ""))
