"""Training sessions on several ranks: every rank runs the same plan on its own batch, gradients are averaged."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from memonger.devices import CPU, Device
from memonger.distributed.engines import Array, CollectiveEngine, EngineError, Handle
from memonger.distributed.join import device_of_rank, engine_of
from memonger.distributed.trace import Trace
from memonger.errors import SessionError, ShapeError
from memonger.files import write_whole
from memonger.plan import Plan
from memonger.runtime import state as states
from memonger.runtime.arena import Arena
from memonger.runtime.executable import Executable
from memonger.runtime.prepared import Bucket
from memonger.runtime.trainer import Inputs
from memonger.training_session import TrainingSession
from memonger.words import listed, option

LATEST = "latest.json"
"""The file that says which parts of a state by ranks count."""


class DistributedTrainingSession(TrainingSession):
    """A training session that is one of several ranks, started by ``torchrun``.

    Each rank takes its own batch of the size planned for. The gradients of a bucket are averaged over the ranks where
    they lie in the arena, while the partitions behind run. All ranks then update alike: N ranks with batches of B train
    as one with a batch of N·B, up to rounding; where labels say what the loss is the mean over, only in plans made with
    ``accumulate``, else by the mean of the ranks' means, as PyTorch's DDP. Batch statistics are each rank's own; those
    of rank 0 are saved.

    Args:
        plan: As `memonger.TrainingSession` takes it, planned with ``buckets=memonger.Buckets()``: the same on all
            ranks. Plan once and give all ranks the file, since a plan depends on times that were measured. One rank
            alone takes any plan.
        group: A process group of torch.distributed, or a communicator of mpi4py. None: the ranks that ``torchrun``
            started; without it one rank alone, and no engine is needed.
        shard_optimizer: Let each rank keep a part of the optimizer's state, update those parameters, and give them to
            all (ZeRO, stage 1). Parts are whole tensors, so one that is larger than all others together is one rank's.
        timeout: Seconds after which a collective that isn't done counts as failed, where ``group`` is None; on GPUs
            with any group.
        device: See `memonger.TrainingSession`. Of a plan for CUDA left out, or ``cuda``, it is ``cuda:LOCAL_RANK``,
            the rank's number on its machine as ``torchrun`` says it; ``cuda:N`` is that one.
        accumulation, random_key, intra_op_threads, check_order, cuda_graph: See `memonger.TrainingSession`. Gradients
            of micro-batches are averaged over the ranks with the last one. Random numbers differ by rank.

    Attributes:
        rank: This rank's number.
        size: How many ranks there are.
        trace: Set to a `memonger.distributed.trace.Trace`, it notes when partitions and collectives ran.

    Raises:
        SessionError: the ranks' plans, weights or options differ, which names the ranks; the plan has no buckets; a
            rank has ended or hangs; see also `memonger.TrainingSession`.
        RuntimeUnavailableError: no engine is installed; the ranks don't find one another; there are more ranks than
            GPUs on the machine.
    """

    def __init__(
        self,
        plan: Plan | str | Path,
        *,
        group: Any = None,
        shard_optimizer: bool = False,
        timeout: float = 300,
        accumulation: Plan | str | Path | None = None,
        device: str | Device | None = None,
        random_key: int = 0,
        intra_op_threads: int = 0,
        check_order: bool = True,
        cuda_graph: str = "auto",
        state_folder: str | Path | None = None,
    ) -> None:
        self.trace: Trace | None = None
        self._ended = ""
        self._has_begun = False
        where = device_of_rank(plan, device)
        self._engine: CollectiveEngine = engine_of(group, timeout, where if where is not None else CPU)
        self.rank, self.size = self._engine.rank, self._engine.size
        self._share = (self.rank, self.size) if shard_optimizer else None
        super().__init__(
            plan, accumulation=accumulation, device=where, random_key=random_key, intra_op_threads=intra_op_threads,
            check_order=check_order, cuda_graph=cuda_graph, state_folder=state_folder,
        )  # fmt: skip
        if where is None and not self.device.is_host:
            raise SessionError(f"{self._name} is for {self.device}: say so ({option('device', self.device.kind)}).")
        self._between = _Between(self, self._bound[0], self._buckets)
        self._exchange = self._between
        if self.size > 1 and not self._buckets:
            how = "buckets=memonger.Buckets()"
            raise SessionError(f"{self._name} is planned for one rank alone: for {self.size} plan it with {how}.")
        with self._guarded():
            self._compare("another plan", self._digest, "Plan once, save it, and give all ranks that file")
            self._compare_settings(shard_optimizer=shard_optimizer, accumulation=accumulation is not None)
            self._compare_weights()

    def step(self, inputs: Inputs | Sequence[Inputs], *, learning_rate: float | None = None) -> float:
        """Train on one batch of each rank, or on several micro-batches of each: see `memonger.TrainingSession.step`.

        Returns: the mean of the ranks' losses. Where it isn't finite on any rank, none updates anything.

        Raises:
            SessionError: as there; a rank has ended or hangs, or takes no step: it is named, and the session has ended.
        """
        with self._guarded():
            if not self._has_begun:
                rate = self._rate() if learning_rate is None else learning_rate
                self._compare_settings(
                    learning_rate=rate, micro_batches=1 if isinstance(inputs, Mapping) else len(inputs)
                )
                self._has_begun = True
            return super().step(inputs, learning_rate=learning_rate)

    def _checked(self, inputs: Inputs | Sequence[Inputs]) -> list[Inputs]:
        """See `memonger.runtime.trainer.Trainer`; of a batch of another size says what to do with the last rows."""
        try:
            return super()._checked(inputs)
        except ShapeError as error:
            if self.size == 1:
                raise
            raise ShapeError(
                f"rank {self.rank} can't take step {self.steps}: {error.problem}",
                "With several ranks every batch has the planned size, the last one too: leave it out on all ranks, or "
                "fill it up with rows whose sample_weights are 0.",
            ) from error

    def save(self, path: str | Path, *, by_rank: bool = False) -> None:
        """Write the training state, whole or not at all; all ranks have to, and wait for it.

        Any number of ranks continues from a file or a folder, a `memonger.TrainingSession` from a file.

        Args:
            path: A file, which rank 0 writes; or a folder.
            by_rank: Write a folder in which each rank puts what it keeps: no rank needs room for the whole state. The
                file `LATEST` in it is written last, and says which parts count.

        Raises:
            SessionError: it can't be written, on every rank.
        """
        with self._guarded():
            if by_rank:
                self._together(lambda: self._save_part(Path(path)))
                self._together(lambda: self._finish_parts(Path(path)))
            else:
                tensors = self._gathered()
                self._together(lambda: self._save_whole(Path(path), tensors))

    def _together(self, write: Callable[[], None]) -> None:
        """Do something on every rank.

        Raises:
            SessionError: it failed on one.
        """
        said = ""
        try:
            write()
        except (SessionError, OSError) as error:
            said = str(error)
        failed = [each for each in self._engine.all_gather(said) if each]
        if failed:
            raise SessionError(failed[0])

    def _gathered(self) -> dict[str, np.ndarray]:
        """The whole state on rank 0."""
        self._check_not_released()
        found = {}
        for name, tensor in self._whole.items():
            owner = self._owners.get(name, self.rank)
            if self._share is None or name in self._weights:
                found[name] = self._array(name)
                continue
            array = self._array(name).copy() if owner == self.rank else np.empty(tensor.shape, tensor.dtype.numpy())
            self._engine.broadcast(array.reshape(-1).view(np.uint8), owner).wait()
            if self.rank == 0:
                found[name] = array
        return found

    def _save_whole(self, path: Path, tensors: Mapping[str, np.ndarray]) -> None:
        if self.rank == 0:
            states.save(self._as_state(tensors), path)

    def _save_part(self, folder: Path) -> None:
        self._check_not_released()
        folder.mkdir(parents=True, exist_ok=True)
        names = _part_names(self._whole, self._shares.owners(self.size), self.rank)
        tensors = {name: self._array(name) for name in names}
        states.save(self._as_state(tensors), folder / _part(self.steps, self.rank, self.size))

    def _finish_parts(self, folder: Path) -> None:
        """Say which parts count, and remove those of before."""
        if self.rank:
            return
        text = json.dumps({"steps": self.steps, "ranks": self.size}).encode()
        write_whole(folder / LATEST, lambda target: target.write(text))
        kept = {_part(self.steps, rank, self.size) for rank in range(self.size)}
        for file in folder.glob("*-of-*.state"):
            if file.name not in kept:
                file.unlink()

    def load(self, path: str | Path) -> None:
        """Take over a state that any number of ranks saved; all ranks have to. Nothing changes if it is wrong.

        Raises:
            SessionError: see `memonger.TrainingSession.load`; the ranks read different states.
        """
        self._check_not_released(whole=False)
        state = (
            self._read_parts(Path(path)) if Path(path).is_dir() else states.load(Path(path), self._like(self._whole))
        )
        own = {name: array for name, array in state.tensors.items() if name in self._names}
        self._go_on_from(replace(state, tensors=own))
        with self._guarded():
            self._compare_weights()

    def _read_parts(self, folder: Path) -> states.State:
        """What this rank keeps of a state by ranks."""
        try:
            latest = json.loads((folder / LATEST).read_text())
            steps, size = int(latest["steps"]), int(latest["ranks"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise SessionError(f"{folder} holds no whole state by ranks: {LATEST} can't be read ({error}).") from error
        owners, tensors, state = self._shares.owners(size), dict[str, np.ndarray](), None
        for rank in range(size):
            wanted = self._like(_part_names(self._whole, owners, rank))
            state = states.load(folder / _part(steps, rank, size), wanted)
            tensors |= {name: array for name, array in state.tensors.items() if name in self._names}
        if state is None:
            raise SessionError(f"{folder} holds no whole state by ranks: {LATEST} says it has no parts.")
        return replace(state, tensors=tensors)

    def _like(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Arrays of the types and shapes of tensors, without memory of their own."""
        tensors = ((name, self._whole[name]) for name in names)
        return {name: np.broadcast_to(np.zeros((), one.dtype.numpy()), one.shape) for name, one in tensors}

    def load_state_dict(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Take over tensors; all ranks have to, and equal ones. See `memonger.TrainingSession.load_state_dict`."""
        super().load_state_dict(tensors)
        with self._guarded():
            self._compare_weights()

    def close(self) -> None:
        """Leave the ranks, and give everything back. Those that take another step are told that this one doesn't."""
        if not self._ended:
            self._ended = "the session is closed."
            self._engine.close(f"closed its session after {self.steps} steps")
        super().close()

    def _compare(self, what: str, own: str, advice: str) -> None:
        """Check that all ranks have the same.

        Raises:
            SessionError: it names the ranks that differ from rank 0.
        """
        found = self._engine.all_gather(own)
        others = [rank for rank, each in enumerate(found) if each != found[0]]
        if others:
            raise SessionError(
                f"{_ranks(others)} {'has' if len(others) == 1 else 'have'} {what} than rank 0. {advice}."
            )

    def _compare_settings(self, **settings: object) -> None:
        """Check that all ranks were given the same.

        Raises:
            SessionError: it names a rank, what differs from rank 0, and both values.
        """
        first, *others = [json.loads(one) for one in self._engine.all_gather(json.dumps(settings, default=repr))]
        for rank, other in enumerate(others, 1):
            differing = [name for name in settings if other[name] != first[name]]
            if differing:
                listed = ", ".join(f"{name} {other[name]} where rank 0 has {first[name]}" for name in differing)
                raise SessionError(f"rank {rank} has {listed}. Give all ranks the same.")

    def _compare_weights(self) -> None:
        self._compare_settings(
            steps=self.steps, random_key=self.random_key, learning_rate=self.learning_rate, loss_scale=self.loss_scale
        )
        digest = hashlib.sha256()
        for name in self._roles[0].parameters:
            digest.update(np.ascontiguousarray(self._array(name)).view(np.uint8).data)
        self._compare("other weights", digest.hexdigest(), "Load the same state on all ranks")

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Name the rank that a failed collective waited for.

        Raises:
            SessionError: the session has ended, or ends here.
        """
        if self._ended:
            raise SessionError(f"{self._ended} Make a new session and load the last state that was saved.")
        try:
            yield
        except EngineError as error:
            self._between.forget()
            said = self._engine.silent(f"stopped at step {self.steps}")
            self._ended = (
                f"step {self.steps} failed on rank {self.rank}: {_blame(said, self.size, self.steps)} ({error})."
            )
            again = "Start all ranks again and load the last state that was saved."
            raise SessionError(f"{self._ended} {again}") from error

    def _goes_on(self, index: int, numbers: Sequence[float]) -> bool:
        """Of the last micro-batch whether the loss of all ranks is finite; the others say nothing yet."""
        return index > 0 or super()._goes_on(index, numbers[2:])

    def _run(self, index: int, batch: Inputs) -> None:
        """See `Trainer._run`; where each rank has updated a part, all get it."""
        super()._run(index, batch)
        if self._share is not None and index == 0 and self._was_finite:
            self._torn = True  # until all parts are of this step
            self._between.give_parts()
            self._torn = False

    def _loss(self) -> float:
        """The loss of all ranks."""
        return self._between.loss()

    def _key(self) -> int:
        return (super()._key() + self.rank * 0x85EBCA6B) % 2**32

    def own_loss(self) -> tuple[float, float]:
        """What this rank's batch adds to the loss of the step that runs, and what the ranks' sum is divided by.

        Where labels say what the loss is the mean over, that is those of all ranks; else it is the mean of the ranks'.
        """
        part = self._part(0)
        total, weight = (sum((*known[: self._earlier], own)) for known, own in zip(self._parts, part, strict=True))
        return (total / weight, 1.0) if self._roles[0].loss_weight is None else (total, weight)


class _Between:
    """What a rank does between partitions: begin collectives, wait for them, and have the mean loss known in time.

    Args:
        session: Whose.
        bound: Its step.
        buckets: What ranks add up.
    """

    def __init__(self, session: DistributedTrainingSession, bound: Executable, buckets: Sequence[Bucket]) -> None:
        self._session, self._engine = session, session._engine
        self._bound, self._buckets = bound, buckets
        self._after_loss = 1 + max(bound.partition_of(name) for name in session._roles[0].loss_parts)
        self._under_way: dict[int, Handle] = {}
        share = session._share is not None and session._roles[0].gradient_norm is None
        self._ends = {n: self._ends_of(b) for n, b in enumerate(buckets) if share and not b.is_mean}
        self._loss = np.zeros(2)
        self._loss_handle: Handle | None = None
        self._over: Any = None  # of the trace: the segment that runs

    def before(self, partition: int) -> None:
        """See `memonger.runtime.executable.Exchange`."""
        trace = self._session.trace
        if self._over is not None:
            self._over()
            self._over = None
        if partition == 0:
            self._loss_handle = None
        if partition == self._after_loss and self._loss_handle is None:
            self._send_loss()
        for number, bucket in enumerate(self._buckets):
            if bucket.begin == partition:
                content = _elements_of(bucket, self._bound.arena)
                over = trace.begin("collectives", f"bucket {number}, {content.nbytes} bytes") if trace else None
                self._under_way[number] = (
                    self._engine.reduce_scatter(content, self._ends[number])
                    if number in self._ends
                    else self._engine.all_reduce(content)
                )
                if over is not None:
                    self._under_way[number].when_done(over)
        for number, bucket in enumerate(self._buckets):
            if bucket.wait == partition:
                self._under_way.pop(number).wait()
        if trace and partition < len(self._session.engines):
            self._over = trace.begin("segments", f"segment {partition}")

    def _ends_of(self, bucket: Bucket) -> list[int]:
        """The element at which each rank's part of a bucket ends."""
        ends, first = [0] * self._engine.size, bucket.members[0]
        for tensor, owner in zip(
            bucket.members, self._session._shares.of_members(bucket, self._engine.size), strict=True
        ):
            ends[owner] = (tensor.offset + tensor.nbytes - first.offset) // first.dtype.numpy().itemsize
        return list(accumulate(ends, max))

    def give_parts(self) -> None:
        """Give all ranks the parameters that each has updated."""
        store = self._session._weights
        handles = []
        for owner in range(self._engine.size):
            own = [
                store.tensors[n] for n in self._session._roles[0].parameters if self._session._owners.get(n) == owner
            ]
            if own:
                begin, end = min(one.offset for one in own), max(one.offset + one.nbytes for one in own)
                content = store.arena.elements(begin, np.dtype(np.uint8), end - begin)
                handles.append(self._engine.broadcast(content, owner))
        for handle in handles:
            handle.wait()

    def give_up(self) -> None:
        """See `memonger.runtime.executable.Exchange`."""
        self._over = None
        for number in sorted(self._under_way):
            self._under_way.pop(number).wait()

    def forget(self) -> None:
        """Nothing is waited for any more."""
        self._under_way.clear()
        self._over, self._loss_handle = None, None

    def _send_loss(self) -> None:
        self._loss[:] = self._session.own_loss()
        self._loss_handle = self._engine.all_reduce(self._loss)

    def loss(self) -> float:
        """The loss of all ranks in this step."""
        if self._loss_handle is None:
            self._send_loss()
        assert self._loss_handle is not None
        self._loss_handle.wait()
        with np.errstate(invalid="ignore", divide="ignore"):
            return float(self._loss[0] / self._loss[1])


def _elements_of(bucket: Bucket, arena: Arena) -> Array:
    """A bucket's gradients as one array over the arena, with what lies between two of them."""
    first, last = bucket.members[0], bucket.members[-1]
    dtype = first.dtype.numpy()
    return arena.elements(first.offset, dtype, (last.offset + last.nbytes - first.offset) // dtype.itemsize)


def _part(steps: int, rank: int, size: int) -> str:
    """Name of the file with a rank's part of a state."""
    return f"{steps}.{rank}-of-{size}.state"


def _part_names(names: Iterable[str], owners: Mapping[str, int], rank: int) -> list[str]:
    """What a rank writes of a state by ranks: what it owns, and rank 0 all that nobody owns."""
    return [name for name in names if owners.get(name, 0) == rank]


def _ranks(numbers: Sequence[int]) -> str:
    """Ranks in words."""
    return f"rank{'' if len(numbers) == 1 else 's'} {listed(numbers)}"


def _blame(said: Mapping[int, str], size: int, steps: int) -> str:
    """Which rank a collective failed for."""
    missing = [rank for rank in range(size) if rank not in said]
    if missing:
        verb = "has ended or hangs" if len(missing) == 1 else "have ended or hang"
        return f"{_ranks(missing)} {verb}: no answer came"
    others = [f"rank {rank} {each}" for rank, each in sorted(said.items()) if each != f"stopped at step {steps}"]
    if others:
        return f"{', '.join(others)}; ranks have to take equally many steps"
    return "all ranks are there, and didn't call the same functions in the same order"
