"""Whether onnxruntime runs a plan's nodes and none beside them, found out before a kernel reads the arena.

Even with every optimization off onnxruntime puts nodes into a model: Casts around kernels that it lacks for 16 bits,
and what a function is made of. They run out of order and read what other values lie over by then: a kernel that takes
such bytes for indices reads memory that is nobody's. A plan for a device was run as it stands before it was laid out; a
portable plan wasn't. So its model is loaded once without its weights (in their place stand zeros of a sparse file,
which take no memory and no room on the disk), and onnxruntime writes down what it would run. Nothing runs.
"""

from collections import Counter
from pathlib import Path

import onnx
import onnx_ir as ir

from memonger.devices import CPU, Device
from memonger.errors import SessionError
from memonger.files import ScratchFolder
from memonger.graph.collectives import expanded
from memonger.ir.tensors import is_large, sizes_of_parts
from memonger.ir.values import NARROW, graphs, tensor_shape
from memonger.plan import Plan
from memonger.runtime import ort
from memonger.runtime.engine import remedy
from memonger.runtime.program import expose, program_of
from memonger.runtime.weights import session_of


def check_as_written(plan: Plan, device: Device) -> None:
    """Check that onnxruntime adds no node to a plan's model, and leaves none out. On CUDA the first run alone shows it.

    Raises:
        SessionError: it does either; the message names one, and what to do.
    """
    if not device.is_host:
        return
    if plan.stamp is not None:
        program = program_of(plan)
        if not program.has_loop and not any(ir.DataType(tensor.dtype) in NARROW for tensor in program.planned):
            return  # a run has shown these nodes as they will run: values that are bound stay, which 16 bits depend on
    try:
        added, left_out = changes(plan)
    except (SessionError, OSError):
        return  # whoever loads the model with its weights is told why it can't be
    if added or left_out:
        names = added or left_out
        which = f"'{names[0]}'" + (f" and {len(names) - 1} more" if names[1:] else "")
        what = f"it leaves out {which}"
        if added:
            what = f"it puts nodes of its own into the model ({which}), as it has no kernels for some of the plan's"
        raise SessionError(f"onnxruntime doesn't run the planned order: {what}. {remedy(device)}")


def changes(plan: Plan) -> tuple[list[str], list[str]]:
    """Names of nodes that onnxruntime runs on the CPU beside the plan's own, and of the plan's that it doesn't run.

    Raises:
        SessionError: onnxruntime doesn't load the model without its weights.
        OSError: there is no room for what it writes.
    """
    model = plan.model.clone()
    _, gone = expanded(model)  # a collective is no node of a session
    expose(model, [tensor for tensor in program_of(plan).planned if tensor.name not in gone])
    written = Counter((str(node.name), node.op_type) for node in model.graph)
    folder = ScratchFolder()
    try:
        _empty_weights(model, folder.path)
        path = folder.path / "as_it_runs.onnx"
        entries = {"session.disable_prepacking": "1"}
        session_of(model, CPU, ort.SessionSettings(threads=1, optimized=path, entries=entries))
        runs = onnx.load(path, load_external_data=False).graph.node
    finally:
        folder.remove()
    running = Counter((node.name, node.op_type) for node in runs)
    added, left_out = sorted(running - written), sorted(written - running)
    return [name or op for name, op in added], [name for name, _ in left_out]


def _empty_weights(model: ir.Model, folder: Path) -> None:
    """Put zeros of a sparse file in the place of every large weight, also of those in branches."""
    path, largest = folder / "zeros", 0
    for graph in graphs(model):
        inside = sizes_of_parts(graph)
        for value in graph.initializers.values():
            tensor = value.const_value
            if tensor is None or value in inside or tensor.dtype == ir.DataType.STRING:
                continue
            if is_large(tensor) or isinstance(tensor, ir.ExternalTensor):
                value.const_value = ir.ExternalTensor(
                    path.name, 0, tensor.nbytes, tensor.dtype, shape=tensor_shape(tensor), name=str(value.name),
                    base_dir=folder,
                )  # fmt: skip
                largest = max(largest, tensor.nbytes)
    with path.open("wb") as file:
        file.truncate(largest)
