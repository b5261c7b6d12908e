"""Training sessions: steps, evaluation in between, and the trained model as a file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from memonger.errors import PlanFileError, SessionError
from memonger.ir.model import Model
from memonger.ir.save import save_model
from memonger.ir.values import static_shape
from memonger.model import forward_model, lora
from memonger.model.load import Source, load, load_as_is
from memonger.planner.search_plan import search_plan
from memonger.runtime.backend import backend
from memonger.runtime.binding import Persistent
from memonger.runtime.engine import Engine
from memonger.runtime.executable import Executable, LoadedPlan, limit_of_program
from memonger.runtime.feeds import Feeds, in_place
from memonger.runtime.padding import Padding
from memonger.runtime.prepared import SessionGroup, whole
from memonger.runtime.program import expose, program_of, without_defaults
from memonger.runtime.trainer import Trainer
from memonger.runtime.weights import message


@dataclass(slots=True)
class _Evaluation:
    """A forward model that was planned for evaluation.

    Attributes:
        executable: What runs it.
        source: The user's own model, if it is one: it is told from others by its identity.
        padding: What fills up smaller batches, made when it is first asked for.
    """

    executable: Executable
    source: Source | Model | None
    padding: Padding | None = None


class TrainingSession(Trainer):
    """A planned training model with its parameters and optimizer state, ready to train.

    Not for several threads at once.

    Args:
        plan: The plan of a model with a loss (see `memonger.differentiate`), or the path of such a planned file.
        accumulation: The plan of the same model differentiated with ``accumulate="add"``: what all micro-batches of a
            step but the last run.
        device: Where to run; the plan's own device if None (the CPU for portable plans).
        random_key: What the model's random numbers derive from, 0 to 2³²−1.
        intra_op_threads: Threads within a node; 0 is the plan's own setting.
        check_order: See `memonger.Session`.
        cuda_graph: Of evaluations, see `memonger.Session`. A step is never captured: its loss is looked at midway.
        state_folder: A folder on a disk for what is trained, and the optimizer's state, as far as the plan leaves them
            in a file (`memonger.Plan.state_in_file`). That file has no name, and is gone when the process ends: `save`
            writes what is to be kept. None: the folder of a plan that is given by its path, else the system's for
            temporary files.

    Attributes:
        learning_rate: Used by each step that isn't given another; the optimizer's own at first.
        schedule: A function of the number of steps taken that gives the learning rate in place of that, as
            `memonger.Schedule`; None: there is none. A saved state has the number, not the function.
        steps: Steps taken, those left out for a loss that wasn't finite not counted.
        skipped_steps: Steps left out because their loss, or their gradients' norm, wasn't finite.
        loss_scale: Of a model in float16: what the next step's loss is multiplied by, and its gradients are divided by.
            2^16 at first; doubled after 2,000 steps in a row that were taken, halved after one left out. It is saved
            with the state. None where the loss isn't scaled.

    Raises:
        SessionError: the plan isn't of a training model with a loss; the two plans are of different models; the
            folder for the state can't be written to, or has no room for it.
        PlanFileError, VerificationError, RuntimeUnavailableError: see `memonger.Session`.
    """

    def evaluate(
        self, inputs: Feeds, *, pad: bool = False, averaged: bool = False, model: Source | Model | None = None
    ) -> dict[str, np.ndarray]:
        """Run the forward model in inference form, with the parameters and running statistics as they are now.

        A model that came in training form, as exporters' training mode writes it, is turned: BatchNormalization reads
        the running statistics, whose new content is no output, and Dropout drops nothing. `export` writes it as it was.

        Args:
            inputs: An array for each input of the forward model, of the batch size planned for.
            pad: Take a smaller batch as well, the last one of a data set: see `memonger.Session`. A step takes none:
                rows that fill up would have a part in its loss and gradients.
            averaged: With the parameters' averages (``ema=`` of `memonger.differentiate`) in their place.
            model: Your own forward model, for other sizes than planned: its open dimensions get those of ``inputs``. It
                is planned at its first use with them, and runs in the step's arena where that is large enough.

        Returns: the forward model's outputs by name.

        Raises:
            SessionError: wrong inputs; the plan holds no forward model; ``model`` lacks a weight, as those of adapters
                where it has none; there are no averages.
        """
        self._check_whole()
        chosen = self._evaluation(model, inputs, averaged)
        evaluation = chosen.executable
        self._has_outputs = False

        def run(given: Feeds) -> dict[str, np.ndarray]:
            evaluation.run(evaluation.checked(given))
            return {name: evaluation.result(name).copy() for name in evaluation.program.outputs}

        if not pad:
            return run(inputs)
        if chosen.padding is None:
            chosen.padding = Padding([replace(evaluation.program, inputs=evaluation.inputs)], [None])
        inputs = in_place(inputs, self.device)
        smaller = chosen.padding.find(inputs)
        return run(inputs) if smaller is None else chosen.padding.run(smaller, inputs, run)

    def _evaluation(self, model: Source | Model | None, inputs: Feeds, averaged: bool) -> "_Evaluation":
        """What evaluates a model at the sizes of inputs, planned once."""
        if averaged:
            self._check_averages()
        shapes = {} if model is None else {name: tuple(np.shape(feed)) for name, feed in inputs.items()}
        key = (model if isinstance(model, str | Path) else id(model), tuple(sorted(shapes.items())), averaged)
        if key not in self._evaluations:
            forward = self._forward if model is None else self._with_open_weights(model, shapes)
            self._evaluations[key] = _Evaluation(self._plan_evaluation(forward, averaged), model)
            self._others.append(self._evaluations[key].executable)
        found: _Evaluation = self._evaluations[key]
        return found

    def _with_open_weights(self, model: Source | Model, shapes: Mapping[str, tuple[int, ...]]) -> ir.Model:
        """A user's model at these sizes, its trained weights inputs."""
        loaded = load(model, input_shapes=shapes).clone()
        named = {str(value.name): value for value in (*loaded.graph.inputs, *loaded.graph.initializers.values())}
        for name, tensor in self._weights.tensors.items():
            value = named.get(name)
            if value is None or static_shape(value) != tensor.shape or value.dtype != ir.DataType(tensor.dtype):
                raise SessionError(
                    f"{loaded.name} has no '{name}' of {tensor.dtype}{list(tensor.shape)} to evaluate with: it isn't "
                    "the model that was differentiated."
                )
            loaded.graph.initializers.pop(name, None)
            value.const_value = None
            if not value.is_graph_input():
                loaded.graph.inputs.append(value)
        return loaded.ir

    def _check_averages(self) -> None:
        if not self._roles[0].averages:
            raise SessionError(f"{self._name} keeps no averages: differentiate it with ema=0.999.")
        if self._released is not None or not self.steps:
            raise SessionError("there are no averages before the first step, nor while the training state is released.")

    def _plan_evaluation(self, forward: ir.Model | None, averaged: bool) -> Executable:
        if forward is None:
            raise SessionError(f"{self._name} holds no forward model to evaluate: differentiate it again.")
        forward_model.to_inference_form(forward)
        plan = search_plan(forward, mode="inference", device=self.device, threads=self._threads, cuda=self._cuda)
        fits = plan.arena_bytes <= self._arena.own and self._arena.address
        arena = self._arena if fits else backend(self.device).arena(plan.arena_bytes)
        inputs = {str(value.name) for value in plan.model.graph.inputs}
        fixed = {name: self._weights for name in self._weights.tensors if name in inputs}
        if averaged:
            tensors = self._state.tensors
            parts = (tensors[a]._replace(name=p) for p, a in self._roles[0].averages.items() if p in inputs)
            averages = self._state.parts(parts)
            fixed |= dict.fromkeys(averages.tensors, averages)
        program = program_of(plan)
        model = without_defaults(plan.model, set(fixed))
        expose(model, program.planned)
        settings = plan.stamp.cuda if plan.stamp is not None else None
        engine = Engine(
            SessionGroup(message(model), (0,), (program,)), arena.device, self._threads, True, settings,
            "off" if self._graphs == "off" else "auto", limit=limit_of_program(program, arena.device),
        )  # fmt: skip
        return Executable(LoadedPlan(whole(program), (engine,)), arena, Persistent(fixed))

    def export(self, path: str | Path, model: Source | Model | None = None, *, averaged: bool = False) -> None:
        """Write the trained weights into a forward model, for any ONNX runtime.

        Adapters (`memonger.add_lora`) are added to the weights they are beside, and aren't in the file.

        Args:
            path: The file to write.
            model: The user's own forward model, in which only the content of its initializers changes; None: the
                forward model the plan holds.
            averaged: Write the parameters' averages (``ema=`` of `memonger.differentiate`) in their place.

        Raises:
            SessionError: the model has none of the trained weights, or other shapes; the file can't be written; there
                are no averages.
        """
        self._check_whole()
        weights = {name: self._weights.array(name) for name in self._weights.tensors}
        if averaged:
            self._check_averages()
            weights |= {name: self._state.array(average) for name, average in self._roles[0].averages.items()}
        own = self._forward
        adapters = () if own is None else lora.adapters_of(own, self._name)
        _export(Path(path), weights, adapters, model if model is not None else own, self._name)


def _export(
    path: Path,
    weights: Mapping[str, np.ndarray],
    adapters: Sequence[lora.Adapter],
    model: Source | Model | None,
    name: str,
) -> None:
    """Write ``model`` with the weights in it, adapters merged; whole or not at all.

    Raises:
        SessionError: there is no model; it has none of the weights, or one of another shape or type; the file can't be
            written.
    """
    if model is None:
        raise SessionError(f"{name} holds no forward model to export: name yours (model=...).")
    read = load_as_is(model.ir if isinstance(model, Model) else model)
    copy, source = read.ir, read.name
    named = {str(v.name): v for v in (*copy.graph.inputs, *copy.graph.initializers.values())}
    weights = lora.into_weights(adapters, weights, named)
    missing = [name for name in weights if name not in named]
    if missing:
        raise SessionError(
            f"{source} has no initializer '{missing[0]}' to write the trained weights to: it isn't the model that was "
            "differentiated."
        )
    for weight, array in weights.items():
        _put(copy, named[weight], array, source)
    if lora.KEY in copy.metadata_props:
        lora.take_out(copy, source)
    try:
        save_model(copy, path)
    except PlanFileError as error:
        raise SessionError(str(error)) from error


def _put(model: ir.Model, value: ir.Value, array: np.ndarray, source: str) -> None:
    tensor = ir.Tensor(array.copy(), name=value.name)
    dims = static_shape(value) if value.const_value is None else tuple(value.const_value.shape.numpy())
    if dims != array.shape or value.dtype != ir.DataType(tensor.dtype):
        here, trained = f"{value.dtype}{list(dims or ())}", f"{tensor.dtype}{list(array.shape)}"
        raise SessionError(f"{source}: '{value.name}' is {here}, the trained one is {trained}.")
    if value.const_value is None:  # of the forward model that a plan holds: trained weights are inputs there
        model.graph.inputs.remove(value)
        value.const_value = tensor
        model.graph.register_initializer(value)
    value.const_value = tensor
