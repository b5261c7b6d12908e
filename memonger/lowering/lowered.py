"""A loaded model → the model that will run, every node named and every size known.

The portable form, here, holds standard operators only and is bound to no machine. The device form is made by
`memonger.lowering.device_form`: it is what onnxruntime's own optimizer makes of the model for one machine.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir

from memonger.devices import Device, Stamp
from memonger.errors import PlanError
from memonger.graph.graph import Graph
from memonger.graph.schedule import put_updates_last
from memonger.ir import training_roles
from memonger.ir.marks import forget_composites
from memonger.ir.model import Model, PassRecord
from memonger.ir.names import name_nodes
from memonger.ir.passes import run_passes
from memonger.ir.rewrite import remove_unused
from memonger.ir.training_roles import Training
from memonger.ir.values import NARROW, graphs
from memonger.model.bodies import write_loop, write_out
from memonger.plan import graph_of
from memonger.plan_records import Spent
from memonger.shapes.inference import infer_shapes
from memonger.shapes.ranges import DimRange
from memonger.words import option

if TYPE_CHECKING:
    from memonger.lowering.calibrate import CalibratingRun


@dataclass(frozen=True, slots=True)
class Calibration:
    """What one run showed.

    Attributes:
        seconds: Of each node, by name; None where the runtime doesn't tell: on a CUDA device it times launches alone.
        workspace: Workspace bytes of each node by name, where above zero.
        host: Names of values that lie in the host's memory although the model runs on another device.
        run_time: Bytes that values had whose size only a run can tell, by name; the most of several runs.
    """

    seconds: Mapping[str, float] | None
    workspace: Mapping[str, int]
    host: frozenset[str] = frozenset()
    run_time: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lowered:
    """A model as it will run.

    Attributes:
        model: Named through, with sizes. Not to be edited.
        stamp: What it is bound to; None for the portable form.
        calibration: What was measured; None without a device.
        files: Keeps temporary files alive that the model's tensors lie in.
        spent: What was run so far; planning goes on counting.
        passes: The passes that changed the model on the way from its source.
        run: What the run showed that it was calibrated by; None without a device, and with a range of sizes.
    """

    model: ir.Model
    stamp: Stamp | None = None
    calibration: Calibration | None = None
    files: object = None
    spent: Spent = field(default_factory=Spent)
    passes: tuple[PassRecord, ...] = ()
    run: "CalibratingRun | None" = None

    @property
    def roles(self) -> Training | None:
        """What a training model says of itself; None for any other."""
        return training_roles.read(self.model, str(self.model.graph.name))

    def graph_on(self, device: Device, ranges: Mapping[str, DimRange] = MappingProxyType({})) -> Graph:
        """The graph, with what was measured; see `memonger.plan.graph_of`."""
        measured = self.calibration or Calibration(None, {})
        return graph_of(self.model, self.roles, measured.seconds, measured.workspace, measured.host, device, ranges)


_WITHOUT_KERNEL: Mapping[str, int] = {
    **dict.fromkeys(
        ["Bernoulli", "CastLike", "CausalConvWithState", "CenterCropPad", "GroupNormalization", "HardSwish",
         "LinearAttention", "Mish", "NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss", "SwiGLU", "Swish"], 1,
    ),
    "Attention": 25, "ReduceLogSum": 28, "ReduceLogSumExp": 28,
}  # fmt: skip
"""Standard operators that onnxruntime has no kernel for, on the CPU: it runs their function bodies. By operator the
first of its versions of which that is so: a kernel without a last version is for the one alone that it begins with."""


def write_out_bodies(model: Model, infer: Callable[[Model], object] = infer_shapes) -> bool:
    """A pass: operators that onnxruntime runs as their function bodies are these: it runs no others as planned.

    Args:
        model: The model. It is changed.
        infer: What tells the types and shapes of what is written.
    """
    opset, found = model.ir.opset_imports.get("", 0), False
    for node in [node for node in model.graph if node.domain == "" and node.op_type == "SequenceMap"]:
        write_loop(model, node)
        found = True

    def is_without_kernel(node: ir.Node) -> bool:
        first = _WITHOUT_KERNEL.get(node.op_type) if node.domain == "" else None
        return first is not None and (
            first == 1 or onnx.defs.get_schema(node.op_type, opset, "").since_version >= first
        )

    def without_kernel() -> Iterator[ir.Node]:  # onnxruntime writes out what branches have, too, and gives it names
        return (node for graph in graphs(model.ir) for node in graph if is_without_kernel(node))

    return write_out(model, without_kernel, infer) or found


def portable(model: Model) -> Lowered:
    """The portable form: without nodes or outputs nobody uses.

    Raises:
        PlanError: the type of a value is unknown; it names the value.
    """
    made = run_passes(
        model.clone(),
        "lower",
        forget_composites,
        write_out_bodies,
        remove_unused,
        name_nodes,
        put_updates_last,
        check_types,
    )
    return Lowered(made.ir, passes=made.passes)


def check_types(model: Model) -> None:
    """Check that the type of every value is known.

    Raises:
        PlanError: that of one isn't; it names the value.
    """
    for node in model.graph:
        unknown = next((value for value in node.outputs if value.name and value.type is None), None)
        if unknown is not None:
            raise PlanError(
                f"{model.name}: the type of value '{unknown.name}' (node '{node.name}', {node.op_type}) is unknown: "
                f"ONNX's inference can't tell it. Plan for a device ({option('device', 'cpu')}), or write it into the "
                "model's value_info."
            )


_MOVING = frozenset([
    "Cast", "Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose",
    "Unsqueeze",
])  # fmt: skip
"""Operators that have kernels for all types on the CPU, as they compute nothing."""


def in_16_bits(model: ir.Model) -> tuple[str, ...]:
    """A note on a portable plan that computes in 16 bits, of which onnxruntime has few kernels for the CPU."""
    computing = (node for node in model.graph if node.op_type not in _MOVING)
    node = next((node for node in computing if any(value.dtype in NARROW for value in node.outputs)), None)
    if node is None:
        return ()
    return (
        f"'{node.name}' ({node.op_type}) computes in 16 bits: on a CPU onnxruntime casts what such nodes read and "
        f"write, and doesn't run this plan. {option('device', 'cpu')} plans the model for there, casts included.",
    )
