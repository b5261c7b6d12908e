"""What a training model says of itself: which inputs persist from step to step, and which outputs replace them.

It stands as JSON in ``metadata_props["memonger.training"]``; all else about the model is in the model.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import onnx_ir as ir

from memonger.errors import PlanError
from memonger.ir.decoding import DecodingError, decode
from memonger.ir.values import nbytes, static_shape

KEY = "memonger.training"
FORMAT = 1
SCALARS = (
    "learning_rate", "step", "random_key", "accumulation_scale", "accumulated_weight", "loss_scale", "ranks",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Training:
    """The roles of a training model's inputs and outputs, by name.

    Attributes:
        loss: The output that was differentiated; None where gradients of outputs are inputs.
        outputs: The forward model's own outputs, new running statistics left out.
        parameters: Inputs that are trained. Their initializers are their defaults.
        gradients: Parameter or input → the output that is its gradient, where the model gives gradients.
        updates: Persistent input → the output that is its new content, and is written over it: parameters, running
            statistics, optimizer state, accumulated gradients.
        statistics: Running statistics: persistent, not trained, saved with the parameters.
        state: The optimizer's tensors, zero before the first step.
        accumulated: Parameter → the input its gradients are accumulated in, zero after each update.
        averages: Parameter → the input, one of ``state``, that is its average over the steps.
        scalars: Role → scalar input that a session feeds: ``learning_rate``, ``step`` (0 at first), ``random_key``,
            ``accumulation_scale`` (1 / the number of micro-batches), or where these have weights ``accumulated_weight``
            (the sum of the earlier ones'), ``loss_scale`` (the loss's gradient is multiplied by it, and the parameters'
            by its inverse before they are used), ``ranks`` (how many there are).
        loss_sum: Where micro-batches are added up and inputs say what the mean is over, as labels that count do: the
            output that is the loss before it is divided. Gradients are those of the sum until they are applied.
        loss_weight: The output that ``loss_sum`` is divided by; there are both or neither.
        output_gradients: Output → the input that is its gradient, where there is no loss.
        whole_gradients: Parameter → the value that its update reads as its gradient, summed over micro-batches, where
            parameters are updated.
        means_over_ranks: Values that are the mean over the ranks of what an Identity node reads: batch statistics.
        gradient_norm: The output that is the gradients' global norm, where they are clipped by it, or the loss is
            scaled: nothing is updated where it isn't finite.
        classes: Input of class numbers → how many classes there are. Its elements are below that, or ``ignored``.
        ignored: Input of class numbers → the number that counts for nothing, where one was asked for.
    """

    loss: str | None = None
    outputs: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    gradients: Mapping[str, str] = field(default_factory=dict)
    updates: Mapping[str, str] = field(default_factory=dict)
    statistics: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    accumulated: Mapping[str, str] = field(default_factory=dict)
    averages: Mapping[str, str] = field(default_factory=dict)
    scalars: Mapping[str, str] = field(default_factory=dict)
    loss_sum: str | None = None
    loss_weight: str | None = None
    output_gradients: Mapping[str, str] = field(default_factory=dict)
    whole_gradients: Mapping[str, str] = field(default_factory=dict)
    means_over_ranks: tuple[str, ...] = ()
    gradient_norm: str | None = None
    classes: Mapping[str, int] = field(default_factory=dict)
    ignored: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_differentiated(self) -> bool:
        """Whether there are gradients or updates; without, it is a forward model in training form."""
        return bool(self.parameters or self.gradients)

    @property
    def persistent(self) -> tuple[str, ...]:
        """Every input that a session keeps from step to step."""
        inputs = (*self.parameters, *self.statistics, *self.state, *self.accumulated.values())
        return tuple(dict.fromkeys(inputs))

    @property
    def verdicts(self) -> tuple[str, ...]:
        """The outputs that say whether a step may update anything: nothing is updated where one isn't finite."""
        return tuple(name for name in (*self.loss_parts, self.gradient_norm) if name is not None)

    @property
    def loss_parts(self) -> tuple[str, ...]:
        """The outputs that tell the loss: it alone, or what is divided and what by."""
        parts = (self.loss,) if self.loss_sum is None else (self.loss_sum, self.loss_weight)
        return tuple(name for name in parts if name is not None)


def write(model: ir.Model, training: Training) -> None:
    """Put it into the model's metadata."""
    model.metadata_props[KEY] = json.dumps({"format": FORMAT, **asdict(training)}, separators=(",", ":"))


def read(model: ir.Model, name: str) -> Training | None:
    """What the model says of itself; None for a model that isn't a training model.

    Raises:
        PlanError: it is malformed, of a newer format, or names values the model doesn't have.
    """
    text = model.metadata_props.get(KEY)
    if text is None:
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{name}: its metadata '{KEY}' is not valid JSON: {error}.") from error
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise PlanError(f"{name}: its metadata '{KEY}' is not in format {FORMAT}: differentiate the model again.")
    try:
        training = decode(Training, content)
    except DecodingError as error:
        problem = f"is malformed at {error.where}, which {error.problem}"
        raise PlanError(f"{name}: its metadata '{KEY}' {problem}: differentiate the model again.") from error
    _check_names(model, training, name)
    # No input has two roles, only what persists is updated, and scalars have roles that a session feeds
    kept = (*training.parameters, *training.statistics, *training.state, *training.accumulated.values())
    counts = Counter(kept)
    wrong = [
        *(f"'{value}' has two roles" for value, count in counts.items() if count > 1),
        *(f"'{value}' is updated, and doesn't persist" for value in training.updates if value not in counts),
        *(f"'{role}' is no role of a scalar" for role in training.scalars if role not in SCALARS),
        *(f"'{value}' is accumulated, and no parameter" for value in training.accumulated if value not in counts),
        *(
            f"'{value}' averages, and is no state"
            for value in training.averages.values()
            if value not in training.state
        ),
        *(f"'{value}' is averaged, and no parameter" for value in training.averages if value not in counts),
        *(
            f"'{value}' ignores a label, and has no classes"
            for value in training.ignored
            if value not in training.classes
        ),
        *(f"'{value}' has {count} classes" for value, count in training.classes.items() if count < 1),
    ]
    if (training.loss_sum is None) != (training.loss_weight is None):
        wrong.append("a loss has a sum without a weight, or a weight without a sum")
    if wrong:
        raise PlanError(f"{name}: its metadata '{KEY}' is malformed: {wrong[0]}. Differentiate the model again.")
    return training


def _check_names(model: ir.Model, training: Training, name: str) -> None:
    inputs = {str(value.name): value for value in (*model.graph.initializers.values(), *model.graph.inputs)}
    outputs = {str(value.name): value for value in model.graph.outputs}
    for wanted in (
        *training.persistent,
        *training.updates,
        *training.scalars.values(),
        *training.output_gradients.values(),
        *training.classes,
        *training.ignored,
    ):
        if wanted not in inputs:
            raise PlanError(f"{name}: its metadata '{KEY}' names the input '{wanted}', which it doesn't have.")
    results = (
        *training.outputs,
        *training.updates.values(),
        *training.gradients.values(),
        training.loss,
        training.loss_sum,
        training.loss_weight,
        training.gradient_norm,
    )
    for wanted in (name for name in results if name is not None):
        if wanted not in outputs:
            raise PlanError(f"{name}: its metadata '{KEY}' names the output '{wanted}', which it doesn't have.")
    numbers = [(role, inputs[each]) for role, each in training.scalars.items()]
    numbers += [
        (role, outputs[each])
        for role, each in (
            ("loss", training.loss),
            ("loss's sum", training.loss_sum),
            ("loss's weight", training.loss_weight),
            ("norm", training.gradient_norm),
        )
        if each
    ]
    for role, value in numbers:
        if nbytes(value) is not None and math.prod(static_shape(value) or ()) != 1:
            raise PlanError(f"{name}: '{value.name}', its {role}, is {static_shape(value)}, not one number.")
    for source, target in training.updates.items():
        if inputs[source].dtype != outputs[target].dtype or inputs[source].shape != outputs[target].shape:
            raise PlanError(f"{name}: '{target}' can't be written over '{source}': their types or shapes differ.")
    if len(set(training.updates.values())) != len(training.updates):
        raise PlanError(f"{name}: its metadata '{KEY}' writes one output over two inputs.")
