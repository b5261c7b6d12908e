"""Small models whose recomputation is easy to foresee, for tests of planning."""

import numpy as np
import onnx
import onnx_ir as ir

import memonger
import models

ROWS, WIDTH = 64, 16
LOSS = "softmax_cross_entropy"


def chain(layers: int = 9) -> onnx.ModelProto:
    """Layers ``fc<i>`` (MatMul) and ``relu<i>``: each gradient needs the output of a Relu, and of nothing else."""
    nodes, source = [], "x"
    for i in range(layers):
        nodes.append(onnx.helper.make_node("MatMul", [source, f"w{i}"], [f"h{i}"], name=f"fc{i}"))
        nodes.append(onnx.helper.make_node("Relu", [f"h{i}"], [f"r{i}"], name=f"relu{i}"))
        source = f"r{i}"
    nodes.append(onnx.helper.make_node("MatMul", [source, "last"], ["y"], name="scores"))
    generator = np.random.default_rng(0)
    weights = {f"w{i}": (WIDTH, WIDTH) for i in range(layers)} | {"last": (WIDTH, 3)}
    graph = onnx.helper.make_graph(
        nodes,
        "chain",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, (ROWS, WIDTH))],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, (ROWS, 3))],
        [
            onnx.numpy_helper.from_array(generator.standard_normal(shape).astype(np.float32) * 0.3, name)
            for name, shape in weights.items()
        ],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)


def marked(model: onnx.ModelProto, key: str, marks: dict[str, str]) -> onnx.ModelProto:
    """The model with this metadata on nodes, by their names."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    found = {node.name: node for node in copy.graph.node}
    for name, text in marks.items():
        found[name].metadata_props.add(key=key, value=text)
    return copy


def network(name: str, training: bool = True) -> ir.Model:
    """A small network of `models`, in training form, with a loss; or for inference."""
    options = {
        "resnet18": {"image": 32, "width": 0.25, "batch": 16},
        "unet": {"image": 64, "width": 0.125, "batch": 2},
        "gpt": {"num_layers": 1, "width": 32, "seq_len": 16, "vocabulary": 50, "batch": 2},
    }
    return models.build_ir(name, training=training, **options[name])


def plan(source: object, **options: object) -> memonger.Plan:
    """A portable training plan."""
    if "loss" not in options:
        outputs = source.ir.graph.outputs if isinstance(source, memonger.Model) else []
        own = isinstance(source, ir.Model) or any(v.name == "loss" for v in outputs)
        options["loss"] = "loss" if own else LOSS
    return memonger.search_plan(source, **{"mode": "training", "device": "none", **options})


def again(plan: memonger.Plan) -> list[str]:
    """Names of what runs again, copies each."""
    return [plan.graph.nodes[step].partition(".recompute")[0] for step in plan.recomputed]
