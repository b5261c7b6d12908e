"""What runs a model in loops beside onnxruntime on a processor, and which form of the file that takes.

Each restriction was measured, or stands on the page that is named with it in docs/SHRINK.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import onnx_ir as ir

from memonger.errors import PlanError
from memonger.ir.values import graphs
from memonger.option_names import LoopTarget
from memonger.words import option

Weights = Literal["beside", "inside"]


@dataclass(frozen=True, slots=True)
class LoopRuntime:
    """What runs the file.

    Attributes:
        name: In sentences.
        weights: Where they have to lie; None: either.
        why: Why they have to lie there.
        nests: Whether loops may stand in loops.
        branches: Whether all nodes may stand in a branch that reads a sequence.
        types: Of values that loops read and write; None: any.
        note: What there is to know of it.
    """

    name: str
    note: str
    weights: Weights | None = None
    why: str = ""
    nests: bool = True
    branches: bool = False
    types: frozenset[ir.DataType] | None = None

    def weights_or(self, asked: Weights | None) -> Weights:
        """Where weights lie, of a file for which that is asked for, or nothing.

        Raises:
            PlanError: they have to lie elsewhere.
        """
        if asked is not None and self.weights not in (None, asked):
            given = option("weights", self.weights)
            raise PlanError(f"{self.name} needs weights {self.weights} ({given}): {self.why}.")
        return asked or self.weights or "beside"

    def check(self, model: ir.Model) -> None:
        """Check that the file of a model is one that runs there.

        Raises:
            PlanError: it isn't; it names the loop.
        """
        for node in (node for graph in graphs(model) for node in graph if node.op_type == "Scan"):
            types = {v.dtype for v in (*node.inputs, *node.outputs) if v is not None and v.dtype is not None}
            wrong = sorted(dtype.name for dtype in types - self.types) if self.types else []
            if wrong:
                raise PlanError(f"{self.name} takes no loop over {wrong[0]}, and '{node.name}' is one.")
            if not self.nests and node.graph is not model.graph:
                raise PlanError(f"{self.name} takes no loop in a loop, and '{node.name}' is one.")


RUNTIMES: Mapping[LoopTarget, LoopRuntime] = MappingProxyType({
    "web": LoopRuntime(
        "onnxruntime-web", weights="inside", why="it finds no files of weights that bodies of loops read",
        note="run it with WebAssembly (executionProviders: ['wasm']), as its WebGPU provider has no Scan. Weights of "
        "loops are held twice: compare both files where weights are much of the model.",
    ),
    "triton": LoopRuntime(
        "Triton", branches=True, note="its ONNX Runtime backend runs the file on the CPU, as config.pbtxt says.",
    ),
    "openvino": LoopRuntime(
        "OpenVINO", nests=False,
        note="it lays memory out itself: what is said here is onnxruntime's.",
    ),
    "tensorrt": LoopRuntime(
        "TensorRT", types=frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16}),
        note="nothing was run there: it lays memory out itself, and what is said here is onnxruntime's on the CPU.",
    ),
    "mobile": LoopRuntime(
        "onnxruntime in an app", weights="inside",
        why="what is loaded from the bytes of an app's assets finds no file beside it",
        note="the packages onnxruntime-android, onnxruntime-c and onnxruntime-objc run it; reduced builds have to have "
        "Scan.",
    ),
})  # fmt: skip
"""By the name that ``--for`` takes."""
