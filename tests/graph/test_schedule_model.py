"""A model made to run a schedule reads what the scheduled graph says."""

import onnx
import onnx_ir as ir

from memonger.graph.graph import from_model
from memonger.graph.schedule import schedule_graph, schedule_model


def test_a_node_whose_first_run_read_a_copy_reads_the_latest_when_it_runs_again() -> None:
    text = """<ir_version: 10, opset_import: ["": 20]>
    g (float[4] x) => (float[4] c, float[4] d) { a = Exp(x) b = Neg(a) c = Abs(b) d = Sqrt(b) }"""
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))
    for number, node in enumerate(model.graph):
        node.name = f"n{number}"
    graph = from_model(model)
    schedule = (0, 0, 1, 2, 0, 1, 3)
    scheduled = schedule_graph(graph, schedule)
    schedule_model(model, schedule, scheduled)
    read = [[str(value.name) for value in node.inputs] for node in model.graph]
    assert read == [[scheduled.values[value] for value in reads] for reads in scheduled.reads]
    assert read[5] == ["a.recompute2"]
