"""Files for other people's viewers: read as they are read there, they say what the plan says."""

import importlib.util
import json
import pickle
import pickletools
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import memonger
from memonger.cli.options import FORMATS
from memonger.cli.report import NEXT
from memonger.report.view import INPUT, WEIGHT, WORKSPACE, View
from memonger.report.write import VIEWERS

TORCH = importlib.util.find_spec("torch")


def _written(plan: memonger.Plan, format: str, folder: Path) -> Path:
    plan.report(folder / "file", format=format, title="</script>'\"")
    return folder / "file"


@pytest.fixture(scope="module")
def snapshot(training: memonger.Plan, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """PyTorch's snapshot of a plan."""
    return pickle.loads(_written(training, "memory_viz", tmp_path_factory.mktemp("viz")).read_bytes())


def test_blocks_tile_their_segments(snapshot: dict[str, Any], training: memonger.Plan) -> None:
    sizes = {each["frames"][0]["name"]: each["total_size"] for each in snapshot["segments"]}
    assert sizes["memonger's arena"] == training.arena_bytes
    assert sizes["memonger's input"] == training.input_bytes
    assert sizes["memonger's weight"] == training.parameter_bytes
    ends = []
    for segment in snapshot["segments"]:
        at = segment["address"]
        assert all(at >= end for end in ends)
        for block in segment["blocks"]:
            assert block["address"] == at
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]
        ends.append(at)
    assert max(ends) < 2**53


def test_the_trace_replayed_is_the_run(snapshot: dict[str, Any], training: memonger.Plan) -> None:
    """No two allocations overlap; the most that is taken is the peak; what stays is what the blocks say."""
    view = View("chain", training)
    live = dict[int, int]()
    most = now = 0
    for event in snapshot["device_traces"][0]:
        begin, size = event["addr"], event["size"]
        if event["action"] == "alloc":
            assert all(begin + size <= other or begin >= other + length for other, length in live.items())
            live[begin] = size
            most, now = max(most, now + size), now + size
        elif event["action"] == "free_completed":
            assert live.pop(begin) == size
            now -= size
    workspace = np.array([step.workspace for step in view.steps])
    assert most == (view.live + workspace).max()
    blocks = {
        block["address"]: block["size"]
        for segment in snapshot["segments"] for block in segment["blocks"] if block["state"] == "active_allocated"
    }  # fmt: skip
    assert live.items() <= blocks.items()
    assert sum(blocks.values()) - sum(live.values()) == training.input_bytes + training.parameter_bytes
    allocated = sum(event["action"] == "alloc" for event in snapshot["device_traces"][0])
    assert allocated == sum(each.kind not in (INPUT, WEIGHT) for each in view.rectangles)


def test_the_pickle_has_only_what_the_viewer_reads(training: memonger.Plan, tmp_path: Path) -> None:
    """Its own unpickler knows these opcodes, and takes frames apart by file, line and name."""
    read = {
        "APPENDS", "BINGET", "BININT", "BININT1", "BININT2", "EMPTY_DICT", "EMPTY_LIST", "FRAME", "LONG1",
        "LONG_BINGET", "MARK", "MEMOIZE", "PROTO", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE2", "APPEND",
        "NEWFALSE", "BINPUT", "BINUNICODE", "EMPTY_TUPLE", "NEWTRUE", "NONE", "BINFLOAT", "TUPLE", "TUPLE1", "TUPLE3",
        "SETITEM",
    }  # fmt: skip
    content = _written(training, "memory_viz", tmp_path).read_bytes()
    assert {opcode.name for opcode, _, _ in pickletools.genops(content)} <= read
    assert content[1] == 4
    found = pickle.loads(content)
    events = found["device_traces"][0]
    frames = [frame for each in (*events, *found["segments"]) for frame in each["frames"]]
    assert all(type(f["name"]) is type(f["filename"]) is str and type(f["line"]) is int for f in frames)
    first = next(event for event in events if event["action"] == "alloc")
    node = next(frame for frame in first["frames"] if "fx_node_op" in frame)
    assert (node["fx_node_name"], node["fx_node_target"]) == (training.graph.nodes[0], training.graph.ops[0])
    assert "unknown" in {event["category"] for event in events}  # the viewer fails without it where there are others


@pytest.fixture(scope="module")
def torch_viewer() -> ModuleType:
    """PyTorch's own reader of snapshots, without PyTorch around it."""
    if TORCH is None or TORCH.origin is None:
        pytest.skip("PyTorch isn't installed")
    path = Path(TORCH.origin).parent / "cuda" / "_memory_viz.py"
    spec = importlib.util.spec_from_file_location("_memory_viz", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pytorch_reads_the_snapshot(
    snapshot: dict[str, Any], training: memonger.Plan, torch_viewer: ModuleType
) -> None:
    summary = torch_viewer.segsum(snapshot)  # it checks that blocks fill their segments
    assert f"segments: {len(snapshot['segments'])}" in summary
    trace = torch_viewer.trace(snapshot)
    rectangles = [each for each in View("chain", training).rectangles if each.kind not in (INPUT, WEIGHT)]
    assert len(re.findall(r"^\w+ = \w+\[\d+:", trace, re.MULTILINE)) == len(rectangles)
    at_end = sum(each.stop == len(training.graph.nodes) and each.kind != WORKSPACE for each in rectangles)
    assert trace.count("del ") == len(rectangles) - at_end
    page = torch_viewer.trace_plot(snapshot)
    assert "Active Memory Timeline" in page


SCRIPTS = [] if TORCH is None or TORCH.origin is None else sorted(Path(TORCH.origin).parent.glob("utils/viz/*.js"))
READING = (
    "version_space", "formatSize", "formatAddr", "elideRepeats", "frameFilter", "format_user_metadata",
    "format_forward_frames", "format_frames", "isPrivatePoolId", "annotate_snapshot", "process_alloc_data",
    "unpickleData", "unpickle",
)  # fmt: skip
"""Functions of the viewer that read a snapshot; earlier versions have fewer."""


@pytest.mark.skipif(not SCRIPTS, reason="this PyTorch comes without its viewer's scripts")
@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js isn't installed")
def test_the_viewers_script_reads_the_snapshot(training: memonger.Plan, tmp_path: Path) -> None:
    text = "\n".join(script.read_text() for script in SCRIPTS)
    bodies = [re.search(rf"^function {name}\(.*?^}}$", text, re.DOTALL | re.MULTILINE) for name in READING]
    (tmp_path / "read.js").write_text(
        "\n".join(body[0] for body in bodies if body) + "const bytes = require('fs').readFileSync(process.argv[2]);"
        "const data = unpickle(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));"
        "annotate_snapshot(data); const drawn = process_alloc_data(data, 0, false, 1e6);"
        "console.log(JSON.stringify([drawn.max_size, drawn.elements_length, drawn.context_for_id(0)]));"
    )
    command = ["node", str(tmp_path / "read.js"), str(_written(training, "memory_viz", tmp_path))]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    most, count, first = json.loads(printed.splitlines()[-1])
    view = View("chain", training)
    workspace = np.array([step.workspace for step in view.steps])
    assert most == (view.live + workspace).max() + training.input_bytes + training.parameter_bytes
    assert count == len(view.rectangles)
    assert view.rectangles[0].name in first


def test_perfetto_gets_steps_counters_and_ranges(training: memonger.Plan, tmp_path: Path) -> None:
    view = View("chain", training)
    trace = json.loads(_written(training, "perfetto", tmp_path).read_text())
    events = trace["traceEvents"]
    of = {phase: [event for event in events if event["ph"] == phase] for phase in "MXCbe"}
    assert sum(map(len, of.values())) == len(events)
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    assert [(event["name"], event["args"]["node"]) for event in of["X"]] == list(
        zip(training.graph.ops, training.graph.nodes, strict=True)
    )
    live = [event["args"]["arena"] for event in of["C"] if event["name"] == "bytes in use"]
    assert live == [*view.live.tolist(), 0]
    begins = {event["id"]: event for event in of["b"]}
    ends = {event["id"]: event["ts"] for event in of["e"]}
    assert begins.keys() == ends.keys()
    assert len(begins) == len(training.storage.buffers)
    summed = np.zeros(len(view.steps) + 1, np.int64)
    for number, event in begins.items():
        summed[event["ts"] : ends[number]] += event["args"]["bytes"]
    assert summed.tolist() == [*view.live.tolist(), 0]
    assert all({"pid", "tid", "ts", "name"} <= event.keys() for event in events)


def test_speedscope_gets_the_bytes_at_the_peak_by_module(training: memonger.Plan, tmp_path: Path) -> None:
    profile = json.loads(_written(training, "speedscope", tmp_path).read_text())
    assert profile["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    frames, (one,) = profile["shared"]["frames"], profile["profiles"]
    assert profile["activeProfileIndex"] == 0
    assert one.keys() == {"type", "name", "unit", "startValue", "endValue", "samples", "weights"}
    assert (one["type"], one["unit"], one["startValue"]) == ("sampled", "bytes", 0)
    assert all(type(frame["name"]) is str for frame in frames)
    assert all(0 <= frame < len(frames) for stack in one["samples"] for frame in stack)
    assert len(one["samples"]) == len(one["weights"])
    view = View("chain", training)
    assert one["endValue"] == sum(one["weights"]) == training.peak_bytes + view.steps[view.peak_step].workspace
    assert len({(frame["name"], frame["file"]) for frame in frames}) == len(frames)


def test_netron_gets_a_valid_model_with_the_plan_in_its_metadata(training: memonger.Plan, tmp_path: Path) -> None:
    path = _written(training, "netron", tmp_path)
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert onnxruntime.InferenceSession(str(path)).get_inputs()
    assert not [entry.key for entry in model.metadata_props if entry.key == "memonger.plan"]
    nodes = [{entry.key: entry.value for entry in node.metadata_props} for node in model.graph.node]
    assert [int(node["memonger.step"]) for node in nodes] == list(range(len(training.graph.nodes)))
    again = {number for number, node in enumerate(nodes) if node["memonger.recomputed"] == "True"}
    assert again == set(training.recomputed)
    values = (*model.graph.value_info, *model.graph.output)
    offsets = {
        value.name: int(entry.value) for value in values for entry in value.metadata_props
        if entry.key == "memonger.offset"
    }  # fmt: skip
    assert offsets == {training.graph.values[value]: offset for value, offset in training.offsets.items()}
    assert not any(value.metadata_props for node in training.model.graph for value in node.outputs)


def test_the_command_line_has_every_format() -> None:
    assert FORMATS == ("html", *VIEWERS, "netron") == tuple(NEXT)


@pytest.mark.parametrize("format", FORMATS)
def test_plans_with_next_to_nothing_in_them_are_written_in_every_format(format: str, tmp_path: Path) -> None:
    weight = numpy_helper.from_array(np.zeros(4, np.float32), "w")
    end = helper.make_tensor_value_info("w", TensorProto.FLOAT, [4])
    empty = helper.make_model(helper.make_graph([], "g", [], [end], [weight]), ir_version=10)
    node = helper.make_node("Relu", ["x"], ["y"], name="relu")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [0]) for name in "xy"]
    nothing = helper.make_model(helper.make_graph([node], "g", ends[:1], ends[1:]), ir_version=10)
    for model in (empty, nothing):
        plan = memonger.search_plan(model, mode="inference", device="none")
        assert _written(plan, format, tmp_path).stat().st_size
