"""Models of a fleet that run one after the other, each on what earlier ones computed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from memonger.devices import CPU
from memonger.errors import SessionError
from memonger.runtime import feeds as feeding
from memonger.runtime.arena import ArenaTensor
from memonger.runtime.execution_context import ExecutionContext
from memonger.runtime.loaded_model import LoadedModel
from memonger.runtime.store import Store
from memonger.serving.fleet_memory import PlansOfModel
from memonger.units import shown

Running = Callable[[Iterable[str]], AbstractContextManager[tuple[ExecutionContext, list[LoadedModel]]]]


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """A model of a pipeline.

    Attributes:
        name: Of the model.
        given: Its inputs that the caller gives.
        reads: Its other inputs, and the name of the kept tensor that each is.
        keeps: Its outputs that later models read: name → the kept tensor's.
    """

    name: str
    given: tuple[str, ...]
    reads: Mapping[str, str]
    keeps: Mapping[str, str]


class Pipeline:
    """Models of a fleet that run one after the other in one arena; see `Fleet.pipeline`.

    Attributes:
        input_names: What the caller gives.
        output_names: What comes back: the outputs of the last model.
        nbytes: Bytes of what is kept between the models, for each arena.
    """

    def __init__(
        self, steps: Sequence[PipelineStep], kept: Sequence[ArenaTensor], outputs: tuple[str, ...], running: Running
    ) -> None:
        self._steps, self._kept, self._running = tuple(steps), tuple(kept), running
        self.input_names = tuple(dict.fromkeys(name for step in steps for name in step.given))
        self.output_names = outputs
        self.nbytes = Store(kept).nbytes
        self._stores: WeakKeyDictionary[ExecutionContext, Store] = WeakKeyDictionary()

    def __repr__(self) -> str:
        """As ``<Pipeline detector, classifier>``."""
        return shown(f"<Pipeline {', '.join(step.name for step in self._steps)}>")

    def run(self, inputs: feeding.Feeds) -> dict[str, Any]:
        """Run the models; threads may call it at the same time.

        Args:
            inputs: Of each model those that no earlier one computes. One of a name is given to all that have it.

        Returns: the outputs of the last model by name, in memory of their own.

        Raises:
            SessionError: an input is missing or unknown; as `FleetModel.run`.
        """
        unknown = next((name for name in inputs if name not in self.input_names), None)
        if unknown is not None:
            raise SessionError(f"the pipeline has no input '{unknown}'; it takes {', '.join(self.input_names)}.")
        results: dict[str, Any] = {}
        with self._running(step.name for step in self._steps) as (place, models):
            kept = self._arrays(place)
            for step, model in zip(self._steps, models, strict=True):
                feeds = {name: inputs[name] for name in step.given if name in inputs}
                feeds |= {name: kept[source] for name, source in step.reads.items()}
                targets = {name: kept[target] for name, target in step.keeps.items()}
                results = place.run(model, feeds, targets, copy=step is self._steps[-1])
        return results

    def _arrays(self, place: ExecutionContext) -> dict[str, np.ndarray]:
        """Memory for what is kept, beside a place's arena."""
        if place not in self._stores:
            self._stores[place] = Store(self._kept, CPU)
        return {tensor.name: self._stores[place].array(tensor.name) for tensor in self._kept}


def steps_of(
    reads: Mapping[str, Mapping[str, str]], models: Mapping[str, PlansOfModel]
) -> tuple[list[PipelineStep], list[ArenaTensor]]:
    """The steps of a pipeline, and the tensors that are kept between them.

    Args:
        reads: For each model in order, which of its inputs are outputs of earlier models.
        models: What is known of each.

    Raises:
        SessionError: an input or output isn't there, or has no fixed shape; it is named.
    """
    kept: dict[str, ArenaTensor] = {}
    keeps: dict[str, dict[str, str]] = {name: {} for name in reads}
    earlier: list[str] = []
    sources: dict[str, dict[str, str]] = {}
    for model, own in reads.items():
        sources[model] = {}
        for name, output in own.items():
            if name not in models[model].inputs:
                raise SessionError(f"'{model}' has no input '{name}'; it takes {', '.join(models[model].inputs)}.")
            source = next((one for one in reversed(earlier) if output in models[one].outputs), None)
            if source is None:
                raise SessionError(f"no model before '{model}' has an output '{output}', which '{name}' is to read.")
            tensor = models[source].outputs[output]
            if tensor is None:
                raise SessionError(f"output '{output}' of '{source}' has no fixed shape: a pipeline can't keep it.")
            key = f"{source}/{output}"
            kept[key] = ArenaTensor(key, tensor.dtype, tensor.shape)
            keeps[source][output] = sources[model][name] = key
        earlier.append(model)
    steps = [
        PipelineStep(model, tuple(name for name in models[model].inputs if name not in own), own, keeps[model])
        for model, own in sources.items()
    ]
    return steps, list(kept.values())
