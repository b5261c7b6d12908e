"""memonger as an ONNX backend (`onnx.backend.base`): prepare a model, run it from its arena.

Sizes of symbolic dimensions come from the inputs of the first run; other sizes later are planned anew and kept.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.backend.base import Backend, BackendRep, namedtupledict

from memonger.devices import parse_device
from memonger.errors import PlanError, RuntimeUnavailableError
from memonger.ir.model import Model
from memonger.model.load import Source
from memonger.options import Options
from memonger.plan import Plan
from memonger.planner.search_plan import search_plan
from memonger.runtime import ort
from memonger.runtime.session import Session

Shapes = tuple[tuple[int, ...] | None, ...]


class PreparedModel(BackendRep):
    """A model ready to run; planned once for each set of input shapes.

    Attributes:
        plans: The plans made so far, by input shapes.
    """

    def __init__(self, model: Source | Model, device: str, **keywords: Any) -> None:
        if not isinstance(model, onnx.ModelProto):
            raise TypeError(
                f"a backend takes an onnx.ModelProto, as onnx.load(path) gives, not {type(model).__name__}."
            )
        self._model = model
        self._options = Options(**{"device": device, "mode": "inference", **keywords})
        defaults = {tensor.name for tensor in model.graph.initializer} if model.ir_version < 4 else set()
        self._inputs = [value.name for value in model.graph.input if value.name not in defaults]
        self._sessions: dict[Shapes, Session] = {}
        self.plans: dict[Shapes, Plan] = {}

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Run with a list of inputs in the model's order, a mapping by name, or the only input itself."""
        feeds = self._feeds(inputs)
        key = tuple(tuple(v.shape) if isinstance(v, np.ndarray) else None for v in feeds.values())
        if key not in self._sessions:
            self.plans[key] = search_plan(self._model, options=self._options, inputs=feeds)
            self._sessions[key] = Session(self.plans[key])
        outputs = self._sessions[key].run(feeds)
        return tuple(namedtupledict("Outputs", list(outputs))(*outputs.values()))

    def _feeds(self, inputs: Any) -> dict[str, Any]:
        if isinstance(inputs, Mapping):
            return dict(inputs)
        given = inputs if isinstance(inputs, Sequence) and not isinstance(inputs, str) else [inputs]
        return dict(zip(self._inputs, given, strict=False))


class MemongerBackend(Backend):
    """The backend's functions; `onnx.backend.test` runs its suite through them."""

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """``CPU``; ``CUDA`` and ``CUDA:N`` where that device is there with all it needs."""
        try:
            chosen = parse_device(device.lower())
            ort.check_device(chosen)
        except (PlanError, RuntimeUnavailableError):
            return False
        return not chosen.facts.is_portable

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> PreparedModel:
        """Get a model ready; it is planned at its first run."""
        return PreparedModel(model, str(parse_device(device.lower())), **kwargs)

    @classmethod
    def run_model(cls, model: onnx.ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
        """Plan and run a model once."""
        return cls.prepare(model, device, **kwargs).run(inputs)


prepare = MemongerBackend.prepare
run_model = MemongerBackend.run_model
supports_device = MemongerBackend.supports_device
