"""Exports that stock runtimes load: onnxruntime, Triton's ONNX Runtime backend (by its source's options), OpenVINO."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import memonger
from memonger.ir import save
from memonger.plan_file import KEY
from memonger.runtime.profile import read_profile
from memonger.serving import export, order
from tests.support.export_models import branched, images, loader, planned
from tests.support.networks import model_of
from tests.support.stock import normal, run_stock

# Triton's numbers for onnxruntime's levels.
LEVELS = {-1: "ORT_ENABLE_BASIC", 0: "ORT_ENABLE_ALL", 1: "ORT_ENABLE_EXTENDED", 2: "ORT_DISABLE_ALL"}


def uneven() -> onnx.ModelProto:
    """Two branches from x, the first with much in between: run last it runs beside the other's result."""
    weights = {"a": normal(0, 8, 4096), "b": normal(1, 4096, 8), "c": normal(2, 8, 512)}
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "a"], ["p"], "p"),
        onnx.helper.make_node("Relu", ["p"], ["q"], "q"),
        onnx.helper.make_node("MatMul", ["q", "b"], ["r"], "r"),
        onnx.helper.make_node("MatMul", ["x", "c"], ["s"], "s"),
        onnx.helper.make_node("Concat", ["r", "s"], ["y"], "y", axis=1),
    ]
    return model_of(nodes, {"x": [1, 8]}, {"y": [1, 520]}, **weights)


def stock(seed: int, batch: int) -> np.ndarray:
    """What stock onnxruntime says of the original model."""
    found: np.ndarray = run_stock(branched(), images(seed, batch), "ORT_DISABLE_ALL")["y"]
    return found


def check_outputs(session: onnxruntime.InferenceSession, batch: int) -> None:
    """The session agrees with the original on two inputs."""
    found = []
    for seed in (3, 4):
        found.append(session.run(["y"], images(seed, batch))[0])
        np.testing.assert_allclose(found[-1], stock(seed, batch), rtol=1e-5, atol=1e-5)
    assert np.abs(found[0] - found[1]).max() > 0.01


@pytest.mark.parametrize("choices", [{}, {"device": "cpu", "level": "extended"}], ids=["portable", "extended"])
def test_onnxruntime_runs_the_exported_file_in_the_planned_order(tmp_path: Path, choices: dict[str, Any]) -> None:
    paths = planned(tmp_path, (2,), **choices)
    export(paths, "onnxruntime", tmp_path / "out")
    load = loader(tmp_path / "out")
    check_outputs(load.session(), 2)
    check_outputs(load.session("ORT_ENABLE_ALL"), 2)
    options = load.options()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    session = onnxruntime.InferenceSession(
        tmp_path / "out" / "model.planned.onnx", options, providers=["CPUExecutionProvider"]
    )
    session.run(None, images(0, 2))
    executed = [run.name for run in read_profile(Path(session.end_profiling()))]
    assert executed == list(memonger.Plan.load(paths[0]).graph.nodes)


def test_the_exported_planned_file_is_still_a_plan(tmp_path: Path) -> None:
    export(planned(tmp_path, (2,)), "onnxruntime", tmp_path / "out")
    memonger.Session(tmp_path / "out" / "model.planned.onnx").run(images(0, 2))


def test_where_the_default_order_would_take_more_a_file_for_it_is_written_that_takes_less(tmp_path: Path) -> None:
    memonger.search_plan(uneven(), mode="inference", device="none").save(tmp_path / "uneven.planned.onnx")
    export(tmp_path / "uneven.planned.onnx", "onnxruntime", tmp_path / "out")
    other = tmp_path / "out" / "model.default-order.onnx"
    graph = memonger.Plan.load(tmp_path / "uneven.planned.onnx").graph
    feeds, peaks = {"x": normal(5, 1, 8)}, {}
    for path in (tmp_path / "uneven.planned.onnx", other):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_profiling = True
        options.profile_file_prefix = str(tmp_path / path.stem)
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        found = session.run(None, feeds)[0]
        np.testing.assert_allclose(found, run_stock(uneven(), feeds, "ORT_DISABLE_ALL")["y"], rtol=1e-5)
        executed = [run.name for run in read_profile(Path(session.end_profiling()))]
        peaks[path] = order.stock_bytes(graph, [graph.nodes.index(name) for name in executed])
    assert peaks[other] == 2 * 4 * 4096  # the large branch with nothing beside it
    assert peaks[tmp_path / "uneven.planned.onnx"] == peaks[other] + 4 * 512
    assert f"{peaks[other]} bytes at the worst step" in (tmp_path / "out" / "README.md").read_text()


def config_of(folder: Path) -> Any:
    """An exported configuration, read by Triton's own protobuf."""
    messages = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    from google.protobuf import text_format

    (path,) = folder.glob("*/config.pbtxt")
    return text_format.Parse(path.read_text(), messages.ModelConfig())


def as_triton(folder: Path, config: Any) -> onnxruntime.InferenceSession:
    """A session as Triton's ONNX Runtime backend makes it of a configuration (ModelState in its onnxruntime.cc)."""
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(
        onnxruntime.GraphOptimizationLevel, LEVELS[config.optimization.graph.level]
    )
    options.enable_cpu_mem_arena = parameters["enable_mem_arena"] == "1"
    options.enable_mem_pattern = parameters["enable_mem_pattern"] == "1"
    key = "session.use_device_allocator_for_initializers"
    options.add_session_config_entry(key, parameters[key])
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    path = folder / config.name / "1" / config.default_model_filename
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def test_triton_loads_the_repository_and_runs_the_order_it_was_written_for(tmp_path: Path) -> None:
    paths = planned(tmp_path, (4,), device="cpu", level="extended")
    done = export(paths, "triton", tmp_path / "out", name="branched", instances=3)
    config = config_of(tmp_path / "out")
    assert (config.name, config.backend, config.max_batch_size) == ("branched", "onnxruntime", 4)
    assert [(one.name, list(one.dims)) for one in config.input] == [("x", [3, 16, 16])]
    assert [(one.name, list(one.dims)) for one in config.output] == [("y", [10])]
    assert [(group.count, group.kind) for group in config.instance_group] == [(3, 2)]  # KIND_CPU
    assert list(config.dynamic_batching.preferred_batch_size) == [4]
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    assert parameters["arena_extend_strategy"] == "1"
    assert int(parameters["gpu_mem_limit"]) >= 2 * (done.estimate.activations + done.estimate.workspace)
    assert parameters["share_session_between_instances"] == "true"
    session = as_triton(tmp_path / "out", config)
    assert session.get_inputs()[0].shape == ["batch", 3, 16, 16]
    check_outputs(session, 4)
    check_outputs(session, 1)
    runs = read_profile(Path(session.end_profiling()))
    graph = memonger.Plan.load(paths[0]).graph
    best = order.best_file_order(graph)
    assert [run.name for run in runs[: len(graph.nodes)]] == [graph.nodes[node] for node in best.executed]


def test_triton_gets_a_preferred_batch_for_each_plan(tmp_path: Path) -> None:
    for target in ("triton", "triton-python"):
        export(planned(tmp_path, (1, 2, 8)), target, tmp_path / target, name="branched")
        config = config_of(tmp_path / target)
        assert config.max_batch_size == 8
        assert list(config.dynamic_batching.preferred_batch_size) == [1, 2, 8]
    check_outputs(as_triton(tmp_path / "triton", config_of(tmp_path / "triton")), 8)


def test_a_batch_that_is_written_into_the_model_is_served_as_it_is(tmp_path: Path) -> None:
    shape = np.array([2, 24], np.int64)
    nodes = [
        onnx.helper.make_node("Reshape", ["x", "shape"], ["r"], "r"),
        onnx.helper.make_node("Relu", ["r"], ["y"], "y"),
    ]
    model = model_of(nodes, {"x": ["b", 4, 6]}, {"y": ["b", 24]}, shape=shape)
    memonger.search_plan(model, batch=2, mode="inference", device="none").save(tmp_path / "fixed.onnx")
    done = export(tmp_path / "fixed.onnx", "triton", tmp_path / "out")
    config = config_of(tmp_path / "out")
    assert (config.max_batch_size, list(config.input[0].dims)) == (0, [2, 4, 6])
    assert not config.HasField("dynamic_batching")
    assert any("planned batch" in note for note in done.notes)
    found = as_triton(tmp_path / "out", config).run(None, {"x": normal(0, 2, 4, 6)})[0]
    np.testing.assert_array_equal(found, np.maximum(normal(0, 2, 4, 6), 0).reshape(2, 24))


def test_names_that_need_quoting_survive_tritons_parser(tmp_path: Path) -> None:
    name = 'x"\\ü\n'
    model = model_of([onnx.helper.make_node("Relu", [name], ["y"], "y")], {name: [1, 4]}, {"y": [1, 4]})
    memonger.search_plan(model, mode="inference", device="none").save(tmp_path / "m.onnx")
    export(tmp_path / "m.onnx", "triton", tmp_path / "out")
    assert config_of(tmp_path / "out").input[0].name == name


def test_large_weights_lie_in_a_file_beside_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = planned(tmp_path, (4,))
    monkeypatch.setattr(save, "INLINE_LIMIT", 100)
    for target in ("onnxruntime", "triton", "triton-python"):
        export(paths, target, tmp_path / target, name="branched")
    version = tmp_path / "triton" / "branched" / "1"
    assert sorted(one.suffix for one in version.iterdir()) == [".data", ".onnx"]
    tensors = onnx.load(version / "model.onnx", load_external_data=False).graph.initializer
    assert {one.data_location for one in tensors if len(one.dims) > 1} == {onnx.TensorProto.EXTERNAL}
    check_outputs(onnxruntime.InferenceSession(version / "model.onnx", providers=["CPUExecutionProvider"]), 4)
    check_outputs(loader(tmp_path / "onnxruntime").session(), 4)
    planned_file = tmp_path / "triton-python" / "branched" / "1" / "model.planned.onnx"
    np.testing.assert_array_equal(memonger.Session(planned_file).run(images(0, 4))["y"], stock(0, 4))


def test_openvino_agrees_with_the_original(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    export(planned(tmp_path, (2,)), "openvino", tmp_path / "out", instances=2)
    compiled = loader(tmp_path / "out").compiled()
    found = []
    for seed in (3, 4):
        found.append(compiled(images(seed, 2))["y"].copy())
        np.testing.assert_allclose(found[-1], stock(seed, 2), rtol=1e-4, atol=1e-4)
    assert np.abs(found[0] - found[1]).max() > 0.01
    assert compiled.get_property("NUM_STREAMS") == 2


def test_the_openvino_file_holds_the_planned_order_and_no_plan(tmp_path: Path) -> None:
    (path,) = planned(tmp_path, (2,))
    export(path, "openvino", tmp_path / "out")
    model = onnx.load(tmp_path / "out" / "model.onnx")
    assert [node.name for node in model.graph.node] == list(memonger.Plan.load(path).graph.nodes)
    assert not [prop.key for prop in model.metadata_props if prop.key == KEY]


def test_settings_hold_the_figures(tmp_path: Path) -> None:
    done = export(planned(tmp_path, (4,)), "onnxruntime", tmp_path / "out", instances=3)
    memory = json.loads((tmp_path / "out" / "memonger.json").read_text())["memory"]
    assert memory["total_bytes"] == done.estimate.total_bytes == 3 * done.estimate.instance_bytes
