"""Training steps in a process of their own, measured: ``python -m memonger.cli.measure_steps JOB.json``.

A plan's steps in a `memonger.TrainingSession`, or those of a training model on stock onnxruntime, driven as one would
by hand: what an update gives is the next step's input. The first answer says what the first steps took; then more are
asked for (see `memonger.runtime.worker`), and last that outputs and state be written.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from memonger.devices import Cuda, parse_device
from memonger.errors import MemongerError, SessionError
from memonger.ir import training_roles
from memonger.ir.values import static_shape
from memonger.model.load import load_as_is
from memonger.runtime import feeds as feeding
from memonger.runtime import measure, ort, process_memory
from memonger.runtime.measure import MeasuredSession, device_peak, in_use, read_arrays, write_arrays
from memonger.runtime.onnxruntime import onnxruntime
from memonger.runtime.program import kind_of, without_defaults
from memonger.runtime.state import Tensors
from memonger.runtime.trainer import TYPES, Trainer
from memonger.runtime.weight_reader import Reading
from memonger.runtime.weights import session_of
from memonger.runtime.worker import say, serve

STATE = "state: "
"""Begins the names of what persists in the file of outputs."""


@dataclass(frozen=True, slots=True)
class StepsJob(measure.RunJob):
    """What a measuring process trains: see `measure.Job`. Outputs are what the last step gave and the state after it.

    Attributes:
        untimed: Steps taken before the first answer; the peak is theirs. At least 2: the first allocates.
    """

    untimed: int = 1


class StockTrainer:
    """A training model on stock onnxruntime, with a `Trainer`'s methods as far as they are called here.

    What persists stays on the device; nothing is there twice.

    Raises:
        SessionError: the model has no loss; onnxruntime refuses it.
    """

    def __init__(self, job: StepsJob) -> None:
        model = load_as_is(job.model).ir
        roles = training_roles.read(model, job.model)
        if roles is None or roles.loss is None:
            raise SessionError(f"{job.model} is no training model with a loss.")
        self.roles, self.device, self.steps = roles, parse_device(job.device), 0
        inputs = {str(value.name): value for value in model.graph.inputs}
        self.scalars = {role: _start(inputs[name]).astype(TYPES[role]) for role, name in roles.scalars.items()}
        if "accumulation_scale" in self.scalars:
            self.scalars["accumulation_scale"][...] = 1
        self.state = {name: self._on_device(_start(inputs[name])) for name in roles.persistent}
        lean = without_defaults(model, {*roles.persistent, *roles.scalars.values()})
        cuda = Cuda(**job.cuda) if job.cuda is not None else None
        options = ort.SessionSettings(job.level, threads=job.threads, dims=job.dims, cuda=cuda)
        self.session = session_of(lean, self.device, options)
        self.given = {name: value for name, value in inputs.items() if name not in self.state}
        self.last: dict[str, Any] = {}

    def _on_device(self, array: np.ndarray) -> Any:
        """An OrtValue with a copy of an array there; on the host over the array itself."""
        return onnxruntime().OrtValue.ortvalue_from_numpy(array, self.device.kind, self.device.index)

    def step(self, inputs: feeding.Feeds) -> float:
        """Take a step; returns its loss."""
        roles = self.roles
        if "step" in self.scalars:
            self.scalars["step"][...] = self.steps
        binding = self.session.io_binding()
        scalars = {name: self.scalars[role] for role, name in roles.scalars.items()}
        for name, array in {**inputs, **scalars}.items():
            binding.bind_ortvalue_input(name, feeding.to_ortvalue(array, kind_of(self.given[name].type)))
        for name, value in self.state.items():
            binding.bind_ortvalue_input(name, value)
        assert roles.loss is not None
        norm = [roles.gradient_norm] if roles.gradient_norm else []
        shown = [*dict.fromkeys((roles.loss, *roles.outputs, *roles.gradients.values(), *norm))]
        for name in shown:
            binding.bind_output(name)
        for name in roles.updates.values():
            binding.bind_output(name, self.device.kind, self.device.index)
        self.session.run_with_iobinding(binding)
        outputs = dict(zip([*shown, *roles.updates.values()], binding.get_outputs(), strict=True))
        self.state.update({old: outputs[new] for old, new in roles.updates.items()})
        self.last = {name: outputs[name] for name in shown}
        loss, *others = (float(outputs[name].numpy().reshape(())) for name in (roles.loss, *norm))
        self.steps += int(np.isfinite([loss, *others]).all())  # else the model has updated nothing
        return loss

    def outputs(self) -> dict[str, np.ndarray]:
        """What the last step gave: the model's outputs, and gradients where it gives them."""
        names = (*self.roles.outputs, *self.roles.gradients.values())
        return {name: self.last[name].numpy() for name in names}

    def state_dict(self) -> dict[str, np.ndarray]:
        """What persists, by name."""
        dropped = self.roles.accumulated.values()
        return {name: value.numpy() for name, value in self.state.items() if name not in dropped}

    def load_state_dict(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Take over what `state_dict` gave."""
        self.state.update({name: self._on_device(array.copy()) for name, array in tensors.items()})


Stepper = Trainer | StockTrainer


def _start(value: ir.Value) -> np.ndarray:
    """What a persistent or scalar input is before the first step: its default, else zeros."""
    if value.const_value is not None:
        return np.array(value.const_value.numpy())
    assert value.dtype is not None
    return np.zeros(static_shape(value) or (), value.dtype.numpy())


def _stepper(job: StepsJob, check_order: bool) -> Stepper:
    if not job.planned:
        return StockTrainer(job)
    return Trainer(
        job.model, device=job.device, intra_op_threads=job.threads, check_order=check_order, cuda_graph=job.cuda_graph
    )


def run(job: StepsJob) -> None:
    """Measure in this process.

    Memory is the most that steps take above the loaded session, whose weights and optimizer state are in place by then:
    of a plan its arena and workspace. What the check of the planned order leaves behind isn't in it: another session
    makes it before.
    """
    device, losses, inputs = parse_device(job.device), list[float](), read_arrays(job.inputs)
    if job.planned:
        _stepper(job, check_order=True).step(inputs)
    before = in_use(device)
    stepper = _stepper(job, check_order=False)

    def steps() -> None:
        losses.extend(stepper.step(inputs) for _ in range(job.untimed))

    peak = _peak(steps, stepper) if before is None else device_peak(steps, device, before + job.weight_bytes)
    say({"peak_bytes": peak, "losses": losses})

    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        if "save" in request:
            given = stepper.state_dict() if request["save"] else {}
            state = {f"{STATE}{name}": array for name, array in given.items()}
            write_arrays(job.outputs, stepper.outputs() | state)
            readers = stepper.weight_readers if isinstance(stepper, Trainer) else ()
            said = [one.said for one in readers]
            return {"readings": [(last and asdict(last), *rest) for last, *rest in said]}
        times, found = list[float](), list[float]()
        for _ in range(request["runs"]):
            begin = time.perf_counter()
            found.append(stepper.step(inputs))
            times.append(time.perf_counter() - begin)
        return {"times": times, "losses": found}

    serve(answer)


def _peak(steps: Callable[[], None], stepper: Stepper) -> int | None:
    if not process_memory.is_measurable():
        steps()
        return None
    # Fresh memory takes no room until it is written, and what is copied over itself may not be
    if isinstance(stepper, Trainer):
        stepper.load_state_dict(Tensors(stepper._saved(), stepper._array))
        arena = stepper._state.arena
        if arena.own == arena.size:  # else a part of it lies in a file
            arena.touch()
    else:
        stepper.load_state_dict(stepper.state_dict())
    return process_memory.peak_over(process_memory.settle(), steps)


class MeasuredTrainer(MeasuredSession):
    """The parent's end of a process that takes steps. To be used in a ``with`` statement."""

    def __init__(self, job: StepsJob, folder: Path, name: str) -> None:
        super().__init__(job, folder, name, module="memonger.cli.measure_steps")
        self.losses: list[float] = self.loaded["losses"]
        self.readings: list[tuple[Reading | None, str, float | None]] = []

    def round(self, runs: int) -> None:
        """Time some more steps: one turn."""
        answer = self.ask({"runs": runs})
        self.turns.append(answer["times"])
        self.losses.extend(answer["losses"])

    def save(self, *, with_state: bool) -> None:
        """Have outputs, and the state, written; ``readings`` then says what the last step read of files."""
        found = self.ask({"save": with_state})["readings"]
        self.readings = [(last and Reading(**last), *rest) for last, *rest in found]


if __name__ == "__main__":
    try:
        run(StepsJob(**json.loads(Path(sys.argv[1]).read_text())))
    except MemongerError as error:
        say({"failed": str(error)})
