"""Models and runs that several tests share."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

_Options = onnxruntime.SessionOptions


class _SleepingOptions(_Options):  # type: ignore[misc,valid-type]
    def __init__(self) -> None:
        super().__init__()
        self.add_session_config_entry("session.intra_op.allow_spinning", "0")


def sleep_while_waiting() -> None:
    """Let threads of this process's sessions, planned or not, sleep while they wait: half their processor time else."""
    onnxruntime.SessionOptions = _SleepingOptions


LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def light(name: str, seed: int = 0) -> onnx.ModelProto:
    """One of onnx's light models with seeded random weights in place of its constant ones.

    As they are, every weight of a layer is one number and the output is the same for any input: a comparison on them
    can't fail. Layers of 4096 units, all of them fully connected, are cut to 512: nine tenths of the largest models'
    weights lie there.
    """
    model = onnx.load(LIGHT / f"light_{name}.onnx")
    rng = np.random.default_rng(seed)
    shapes = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    variances = {node.input[4] for node in model.graph.node if node.op_type == "BatchNormalization"}
    kept = []
    for node in model.graph.node:
        if node.op_type != "ConstantOfShape" or node.input[0] not in shapes:
            kept.append(node)
            continue
        dims = tuple(512 if dim == 4096 else int(dim) for dim in shapes[node.input[0]])
        if len(dims) > 1:
            array = rng.standard_normal(dims, np.float32) * np.float32(np.sqrt(2 / np.prod(dims[1:])))
        else:
            # Small scales: deep residual sums else grow until the softmax says the same class for every input.
            low, high = (0.8, 1.2) if node.output[0] in variances else (0.2, 0.5)
            array = rng.uniform(low, high, dims).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, node.output[0]))
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return model


def model_of(
    nodes: list[Any], inputs: dict[str, Any], outputs: dict[str, Any], **weights: np.ndarray
) -> onnx.ModelProto:
    """A float32 model from nodes; ``inputs`` and ``outputs`` map names to shapes."""
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def stock(
    model: onnx.ModelProto | bytes | str, level: str = "ORT_ENABLE_ALL", threads: int = 0
) -> onnxruntime.InferenceSession:
    """A stock session, nothing set but the optimization level and, if not 0, how many threads there are."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run_stock(session: onnxruntime.InferenceSession, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Outputs by name."""
    names = list(dict.fromkeys(output.name for output in session.get_outputs()))
    return dict(zip(names, session.run(names, feeds), strict=True))


def same_bits(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> bool:
    """Whether two runs gave the same outputs to the last bit."""
    return set(ours) == set(theirs) and all(
        ours[name].dtype == array.dtype and ours[name].shape == array.shape and ours[name].tobytes() == array.tobytes()
        for name, array in theirs.items()
    )
