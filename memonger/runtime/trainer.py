"""Trains planned models on onnxruntime: a step's updates are written over what they update."""

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx_ir as ir

from memonger.devices import GRAPHS, Device
from memonger.errors import SessionError
from memonger.files import ScratchFolder
from memonger.ir.training_roles import Training
from memonger.model import forward_model
from memonger.plan import Plan
from memonger.runtime import feeds as feeding
from memonger.runtime import ort, process_memory
from memonger.runtime import state as states
from memonger.runtime.backend import backend
from memonger.runtime.binding import Persistent, input_memory
from memonger.runtime.engine import Engine
from memonger.runtime.executable import Exchange, Executable, LoadedPlan, limit_of_program
from memonger.runtime.interrupts import interrupts_later
from memonger.runtime.prepared import Bucket, CutPlan, Input
from memonger.runtime.state import LossScale
from memonger.runtime.store import Store
from memonger.runtime.training_plans import TrainingPlans, read_plans, with_parts
from memonger.runtime.weight_reader import WeightReader
from memonger.units import format_size, shown
from memonger.words import check_choice, quoted

logger = logging.getLogger(__name__)

Inputs = feeding.Feeds
TYPES = {
    "learning_rate": np.float32, "accumulation_scale": np.float32, "accumulated_weight": np.float64,
    "loss_scale": np.float32, "step": np.int64, "random_key": np.uint32, "ranks": np.float32,
}  # fmt: skip


class Trainer:
    """Steps of a planned training model, its parameters and optimizer state: `memonger.TrainingSession` is built on it.

    Arguments, attributes and errors are those of `memonger.TrainingSession`.
    """

    size = 1  # ranks
    _share: tuple[int, int] | None = None  # this rank and their number, where each updates a part of the parameters

    def __init__(
        self,
        plan: Plan | str | Path,
        *,
        accumulation: Plan | str | Path | None = None,
        device: str | Device | None = None,
        random_key: int = 0,
        intra_op_threads: int = 0,
        check_order: bool = True,
        cuda_graph: str = "auto",
        state_folder: str | Path | None = None,
    ) -> None:
        check_choice("cuda_graph", cuda_graph, GRAPHS, SessionError)
        self.random_key, self.steps, self.skipped_steps = _checked_key(random_key), 0, 0
        self.schedule: Callable[[int], float] | None = None
        self._others: list[Executable] = []  # of other plans, which run in the same arena between steps
        self._evaluations: dict[object, Any] = {}  # what a subclass knows of those
        self._released: ScratchFolder | None = None
        self._has_outputs, self._was_finite = False, True
        self._parts: tuple[list[float], list[float]] = [], []  # of the step's loss: see `_part`
        self._earlier = 0  # how many of those are of micro-batches before the last one
        self._torn = False  # whether a step failed after it had begun to update
        self._is_closed = False
        self._exchange: Exchange | None = None  # what ranks do between the partitions of a step
        beside = Path(plan).resolve().parent if isinstance(plan, str | Path) else tempfile.gettempdir()
        detached = read_plans(plan, accumulation, device, self._share, check_order, state_folder or beside)
        del plan, accumulation  # with the models, whose weights would be there twice
        process_memory.settle()
        read: TrainingPlans = detached.restored()
        self.device, self._cuda, self._name = read.device, read.cuda, read.name
        self._packed_forward, self._frozen = read.forward, read.frozen
        self.learning_rate, self._roles, self._digest = read.rate, read.roles, read.digest
        self._first_scale = self._scale = None if read.loss_scale is None else LossScale(read.loss_scale)
        self._shares, self._owners, self._whole = read.shares, read.owners, read.whole
        self._threads, self._graphs = intra_op_threads or read.threads, cuda_graph
        self._scalars = {
            role: np.zeros((), TYPES[role]) for role in sorted({r for own in self._roles for r in own.scalars})
        }
        self._arena = read.arena or backend(self.device).arena(read.arena_bytes)
        self._names, self._weights, self._state = read.names, read.weights, read.state
        self._buckets: tuple[Bucket, ...] = read.cuts[0].buckets
        self._bound = [self._bind(one, own, check_order) for one, own in zip(read.cuts, self._roles, strict=True)]
        del read, detached
        process_memory.settle()

    @property
    def _forward(self) -> ir.Model | None:
        """The forward model that the plan holds, made anew."""
        return forward_model.unpacked(self._packed_forward, self._frozen)

    def __repr__(self) -> str:
        """As ``<TrainingSession digits on cpu: 12 steps, arena 1.20 MiB>``."""
        state = "closed" if self._is_closed else f"arena {format_size(self._arena.size)}"
        steps = f"{self.steps} step{'' if self.steps == 1 else 's'}"
        return shown(f"<{type(self).__name__} {self._name} on {self.device}: {steps}, {state}>")

    def step(self, inputs: Inputs | Sequence[Inputs], *, learning_rate: float | None = None) -> float:
        """Train on one batch, or on several micro-batches: the step is that of one batch with all of their samples.

        Where labels say what a loss is the mean over (``ignore_index``, class weights), it is over those of all
        micro-batches: one in which none counts adds nothing. Where none counts in all, the loss is NaN, as PyTorch's.

        Args:
            inputs: An array for each input of the model, labels included, or what `memonger.Session.run` takes
                for it; or a list of such, for a session with an ``accumulation`` plan.
            learning_rate: For this step only.

        Returns: the loss, of all micro-batches. Where it, or the norm the gradients are clipped by, isn't finite,
            parameters, statistics and optimizer state are as they were before, and ``skipped_steps`` is one more.

        Raises:
            SessionError: wrong inputs; the state is released; the runtime failed.
        """
        batches = self._checked(inputs)
        self._parts = [], []
        rate = self._rate() if learning_rate is None else _checked_rate(learning_rate)
        with interrupts_later() as interrupts:
            self._set("learning_rate", rate)
            self._set("accumulation_scale", 1.0 / len(batches))
            self._set("step", self.steps)
            self._set("ranks", self.size)
            self._set("random_key", self._key())
            self._set("loss_scale", self.loss_scale)
            if len(self._bound) > 1:
                self._accumulate(batches, interrupts)
            else:
                self._run(0, batches[0])
            loss = self._loss()
            if self._was_finite:
                self.steps += 1
            else:
                self.skipped_steps += 1
                what = "the gradients' norm" if np.isfinite(loss) else "the loss"
                if self._scale is None:
                    logger.warning("%s: %s of step %d isn't finite: nothing was updated.", self._name, what, self.steps)
                else:
                    logger.info(
                        "%s: %s of step %d isn't finite with the loss scaled by %g: nothing was updated, half of it is "
                        "next.", self._name, what, self.steps, self._scale.factor,
                    )  # fmt: skip
            self._scale = None if self._scale is None else self._scale.after(self._was_finite)
        return loss

    def _checked(self, inputs: Inputs | Sequence[Inputs]) -> list[Inputs]:
        """The batches of a step, each checked before the first one runs.

        Raises:
            SessionError: too many, or one is wrong; the session has no whole state.
        """
        if self._released is not None:
            raise SessionError("the training state is released: leave release_training_state() before the next step.")
        self._check_whole()
        batches: list[Any] = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
        if not batches or (len(batches) > 1 and len(self._bound) == 1):
            raise SessionError(
                f"a step of this session takes one batch, not {len(batches)}: several need an accumulation plan "
                "(differentiate with accumulate='add' and 'apply')."
            )
        last = len(batches) - 1
        checked = [self._bound[0 if number == last else 1].checked(batch) for number, batch in enumerate(batches)]
        for batch in checked:
            check_labels(self._roles[0], batch)
        return checked

    def _accumulate(self, batches: Sequence[Inputs], interrupts: Sequence[object]) -> None:
        """All micro-batches; what the earlier ones did is undone where one fails, or has a loss that isn't finite."""
        before = {name: self._weights.array(name).copy() for name in self._roles[0].statistics}
        is_whole = False
        try:
            for number, batch in enumerate(batches):
                last = number == len(batches) - 1
                self._run(0 if last else 1, batch)
                if not self._was_finite:
                    break
                if interrupts and not last:
                    raise KeyboardInterrupt
                if not last and "random_key" in self._scalars:  # other masks for each micro-batch
                    self._set("random_key", (self._key() + (number + 1) * 0x9E3779B9) % 2**32)
            is_whole = self._was_finite
        finally:
            if not is_whole:
                for name, array in before.items():
                    self._weights.fill(name, array)
            self._forget_accumulated()

    def _forget_accumulated(self) -> None:
        for name in self._roles[0].accumulated.values():
            self._state.fill(name, 0)

    def _run(self, index: int, batch: Inputs) -> None:
        """Run a micro-batch, its updates only where the loss and the gradients' norm are finite."""
        bound, roles = self._bound[index], self._roles[index]

        def goes_on() -> bool:
            part = self._part(index)
            for known, number in zip(self._parts, part, strict=True):
                known.append(number)
            norm = [] if roles.gradient_norm is None else [float(bound.result(roles.gradient_norm).reshape(()))]
            self._was_finite = self._goes_on(index, [*part, *norm])
            return self._was_finite

        self._has_outputs = False
        if index == 0:
            self._earlier = len(self._parts[0])
            self._set("accumulated_weight", sum(self._parts[1]))
        try:
            bound.run(batch, goes_on=goes_on, exchange=self._exchange if index == 0 else None)
        except BaseException:
            self._torn = index == 0 and bound.changes_anything
            raise
        self._has_outputs = index == 0

    def _part(self, index: int) -> tuple[float, ...]:
        """What the micro-batch that runs adds to the step's loss, and what the sum of that is divided by."""
        sums, *weights = (float(self._bound[index].result(name).reshape(())) for name in self._roles[index].loss_parts)
        return sums, *(weights or [1.0])

    def _loss(self) -> float:
        """The loss of all micro-batches that have run in this step; NaN where nothing in them counts."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return float(np.sum(self._parts[0]) / np.sum(self._parts[1]))

    def _goes_on(self, index: int, numbers: Sequence[float]) -> bool:
        """Whether a micro-batch may update anything: its numbers are finite, and behind the last one the loss is."""
        return bool(np.isfinite([*numbers, *([] if index else [self._loss()])]).all())

    def _key(self) -> int:
        """What this step's random numbers derive from."""
        return _checked_key(self.random_key)

    def _rate(self) -> float | None:
        """The learning rate of the next step."""
        return self.learning_rate if self.schedule is None else _checked_rate(self.schedule(self.steps))

    @property
    def learning_rate(self) -> float | None:
        """Used by each step that isn't given another; the optimizer's own at first."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: float | None) -> None:
        self._learning_rate = None if rate is None else _checked_rate(rate)

    @property
    def loss_scale(self) -> float | None:
        """What the next step multiplies its loss by, and divides its gradients by; None where nothing is scaled."""
        return None if self._scale is None else self._scale.factor

    @property
    def inputs(self) -> tuple[Input, ...]:
        """What `step` takes: the model's inputs, labels included."""
        self._check_open()
        return self._bound[0].inputs

    def outputs(self) -> dict[str, np.ndarray]:
        """Copies of what the last step computed: the model's outputs, and gradients where the model gives them.

        Raises:
            SessionError: no step was taken, or `evaluate` has used the memory since.
        """
        if not self._has_outputs:
            raise SessionError("there are no outputs of a step: take one, and read them before evaluate().")
        roles = self._roles[0]
        norm = [roles.gradient_norm] if roles.gradient_norm else []
        return {name: self._bound[0].result(name).copy() for name in (*roles.outputs, *roles.gradients.values(), *norm)}

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of parameters, running statistics and optimizer state, by name."""
        self._check_not_released()
        return {name: self._array(name).copy() for name in self._saved()}

    def load_state_dict(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Take over tensors: all that `state_dict` gives, of the same types and shapes, or none if one is wrong.

        Raises:
            SessionError: it names the first that is missing, unknown or different.
        """
        self._check_not_released(whole=False)
        wanted = self._saved()
        unknown = [name for name in tensors if name not in wanted]
        if unknown:
            raise SessionError(f"'{unknown[0]}' is no tensor of this model; it has {quoted(wanted, 8)}.")
        for name in wanted:
            if name not in tensors:
                raise SessionError(f"'{name}' is missing: give all that state_dict() gives.")
            tensor, given = self._store(name).tensors[name], np.asarray(tensors[name])
            dtype = tensor.dtype.numpy()
            if given.shape != tensor.shape or given.dtype != dtype:
                raise SessionError(
                    f"'{name}' is {dtype}{list(tensor.shape)}, what was given is {given.dtype}{list(given.shape)}."
                )
        self._take_over({name: np.asarray(tensors[name]) for name in wanted})

    def _take_over(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Write the whole state."""
        with interrupts_later():
            self._torn = True  # until all of it is there: reading one may fail
            for name, array in tensors.items():
                self._store(name).fill(name, array)
            self._forget_accumulated()
            self._torn = False

    def save(self, path: str | Path) -> None:
        """Write the training state, whole or not at all: `load` continues from it bit for bit.

        Raises:
            SessionError: the file can't be written.
        """
        self._check_not_released()
        states.save(self._as_state(states.Tensors(self._saved(), self._array)), Path(path))

    def _as_state(self, tensors: Mapping[str, np.ndarray]) -> states.State:
        """These tensors, and where the training stands."""
        return states.State(tensors, self.steps, self.random_key, self.learning_rate, self._scale)

    def load(self, path: str | Path) -> None:
        """Take over a state that `save` wrote. Nothing is changed if it is wrong.

        Raises:
            SessionError: not a state, cut short, changed since it was written, or of another model.
        """
        self._check_not_released(whole=False)
        state = states.load(Path(path), {name: self._array(name) for name in self._saved()})
        self._go_on_from(state)

    def _go_on_from(self, state: states.State) -> None:
        """Take over a state that fits."""
        if state.learning_rate is not None:
            _checked_rate(state.learning_rate)
        with interrupts_later():
            self._take_over(state.tensors)
            self.steps, self.random_key, self.learning_rate = state.step, state.random_key, state.learning_rate
            if self._scale is not None:
                self._scale = state.loss_scale or self._first_scale

    @contextmanager
    def release_training_state(self) -> Iterator["Trainer"]:
        """Give the memory of activations, gradients and optimizer state back to the system, for inference in between.

        The optimizer's state waits in a temporary file, and is back bit for bit at the end of the ``with`` block.
        OptNet's removeGradParams, undone by leaving.
        """
        self._check_not_released()
        folder = ScratchFolder()
        path = folder.path / "state"
        try:
            with interrupts_later():
                self._state.arena.save(path)
                self._released, self._has_outputs = folder, False
                self._state.arena.discard()
                self._arena.discard()
                for other in self._others:
                    if not other.arena.address:  # a CUDA device's memory is gone
                        other.move(backend(self.device).arena(other.program.arena_bytes))
            yield self
        finally:
            with interrupts_later():
                if self._released is not None:
                    self._state.arena.restore(path)
                    self._arena.take_again()
                    if not self.device.is_host:  # where memory lies that was given back is another place now
                        for bound in self._bound:
                            bound.bind()
                        for other in self._others:
                            if other.program.arena_bytes <= self._arena.own:
                                other.move(self._arena)
                    self._released = None
                folder.remove()

    def close(self) -> None:
        """Give everything back: parameters, state, activations. What wasn't saved is lost, and no step follows.

        Raises:
            SessionError: the training state is released.
        """
        if self._is_closed:
            return
        self._check_not_released(whole=False)
        for one in (*self._bound, *self._others):
            one.close()
        self._is_closed, self._has_outputs = True, False
        self._bound, self._others = [], []
        self._evaluations.clear()
        del self._weights, self._state, self._arena, self._packed_forward, self._frozen
        process_memory.settle()

    def __enter__(self) -> Self:
        """The session itself; the end of the ``with`` block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise SessionError("the session is closed: make a new one.")

    def _check_not_released(self, *, whole: bool = True) -> None:
        self._check_open()
        if self._released is not None:
            raise SessionError("the training state is released: leave release_training_state() first.")
        if whole:
            self._check_whole()

    def _check_whole(self) -> None:
        self._check_open()
        if self._torn:
            raise SessionError(
                f"a step of {self._name} failed after it had begun to update: part of the parameters is of this step, "
                "part of the one before. Load a saved state (load, load_state_dict) to go on."
            )

    def _saved(self) -> list[str]:
        accumulated = {name for roles in self._roles for name in roles.accumulated.values()}
        return [name for name in self._names if name not in accumulated]

    def _store(self, name: str) -> Store:
        return self._weights if name in self._weights else self._state

    def _array(self, name: str) -> np.ndarray:
        return self._store(name).array(name)

    @property
    def engines(self) -> tuple[Engine, ...]:
        """What runs a step's partitions, in order."""
        self._check_open()
        return self._bound[0].engines

    @property
    def weight_readers(self) -> tuple[WeightReader, ...]:
        """What holds frozen weights that stay in the plan's file to their window, of each plan that has such.

        What the last step took is in `WeightReader.last`.
        """
        return tuple(reader for bound in self._bound for reader in bound.weight_readers)

    def _set(self, role: str, content: float | None) -> None:
        if role in self._scalars and content is not None:
            self._scalars[role][...] = content

    def _bind(self, plan: CutPlan, roles: Training, check_order: bool) -> Executable:
        kept = [name for name in roles.persistent if name in self._names]
        fixed = {name: self._weights if name in self._weights else self._state for name in kept}
        scalars = {name: self._scalars[role] for role, name in roles.scalars.items()}
        fixed, updates = with_parts(fixed, roles.updates, plan.parts)
        limit, engines = limit_of_program(plan.program, self.device), list[Engine]()
        reader = None if plan.reads is None else WeightReader(plan.reads)
        with ort.making_sessions(), nullcontext() if reader is None else reader.loading():
            for group in plan.groups:
                pool = engines[-1].pool if engines else None
                engines.append(
                    Engine(group, self.device, self._threads, check_order, plan.cuda, pool=pool, limit=limit)
                )
            engines[-1].reserve()
        own = fixed.keys() | scalars.keys()
        fed = replace(plan.program, inputs=tuple(value for value in plan.program.inputs if value.name not in own))
        return Executable(
            LoadedPlan(plan, tuple(engines), reader), self._arena, Persistent(fixed, scalars, updates),
            inputs_at=input_memory([fed], self.device),
        )  # fmt: skip


def check_labels(roles: Training, batch: Inputs) -> None:
    """Class numbers are those of classes: kernels count numbers below zero from the last class, or read anywhere.

    Raises:
        SessionError: it names the input, the number, and where it stands.
    """
    for name, classes in roles.classes.items():
        if name not in batch:
            continue
        feed = batch[name]
        labels = feed if isinstance(feed, np.ndarray) else np.asarray(feeding.copy_of(feed))
        if not labels.size or (labels.min() >= 0 and labels.max() < classes):
            continue
        is_wrong = (labels < 0) | (labels >= classes)
        if name in roles.ignored:
            is_wrong &= labels != roles.ignored[name]
        if is_wrong.any():
            place = [int(index[0]) for index in np.nonzero(is_wrong)]
            extra = (
                f", or {roles.ignored[name]}, which counts for nothing"
                if name in roles.ignored
                else ("; to leave labels out, ask for it by name: memonger.SoftmaxCrossEntropy(ignore_index=...)")
            )
            raise SessionError(
                f"input '{name}' has {labels[is_wrong][0]} at {place}: its numbers are those of the {classes} classes, "
                f"0 to {classes - 1}{extra}."
            )


def _checked_rate(rate: float) -> float:
    """A learning rate.

    Raises:
        SessionError: it isn't a number that float32 can hold, at least 0.
    """
    try:
        is_right = 0 <= float(rate) <= float(np.finfo(np.float32).max)
    except (TypeError, ValueError, OverflowError):
        is_right = False
    if not is_right:
        raise SessionError(f"the learning rate must be a number from 0 to float32's largest, not {rate!r}.")
    return float(rate)


def _checked_key(key: int) -> int:
    """A random key.

    Raises:
        SessionError: it isn't an integer that uint32 can hold.
    """
    if not isinstance(key, int | np.integer) or not 0 <= key < 2**32:
        raise SessionError(f"random_key must be an integer from 0 to {2**32 - 1}, not {key!r}.")
    return int(key)
