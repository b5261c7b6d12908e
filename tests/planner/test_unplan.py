"""`memonger.unplan` and ``memonger unplan``: the user's own model again, from plans and from files."""

import gc
import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import memonger
from tests.support import planning_models
from tests.support.command_line import invoke
from tests.support.networks import run_stock, stock
from tests.support.training_models import batch, classifier

STAGES = {"relu2": "True", "relu5": "stage"}
FORCED = {"fc3": "True", "relu3": "False"}
LEVEL = "ORT_DISABLE_ALL"


def _source() -> onnx.ModelProto:
    staged = planning_models.marked(planning_models.chain(), "mirror_stage", STAGES)
    return planning_models.marked(staged, "force_mirroring", FORCED)


def _marks(model: memonger.Model) -> list[dict[str | None, str]]:
    """What stands in the metadata of nodes, by their names: stages, decisions, and all else."""
    found: dict[str, dict[str | None, str]] = {"mirror_stage": {}, "force_mirroring": {}}
    for node in model.graph:
        for key, text in node.metadata_props.items():
            found.setdefault(key, {})[node.name] = text
    return list(found.values())


def _outputs(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in run_stock(stock(model, LEVEL), feeds).items()}


def _x() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).standard_normal((planning_models.ROWS, planning_models.WIDTH), np.float32)}


def _saved(plan: memonger.Plan, folder: Path) -> Path:
    plan.save(folder / "planned.onnx")
    return folder / "planned.onnx"


def test_a_portable_inference_file_gives_the_model_back(tmp_path: Path) -> None:
    plan = memonger.search_plan(_source(), mode="inference", device="none")
    model = memonger.unplan(_saved(plan, tmp_path))
    assert "memonger.plan" not in model.ir.metadata_props
    assert _marks(model) == [STAGES, FORCED]
    assert _outputs(ir.to_proto(model.ir), _x()) == _outputs(_source(), _x())


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_a_training_file_gives_the_forward_model_back(tmp_path: Path, device: str) -> None:
    options = {"loss": planning_models.LOSS, "optimizer": memonger.SGD(lr=0.1), "device": device, "strategy": "sqrt"}
    model = memonger.unplan(_saved(memonger.search_plan(_source(), **options), tmp_path))
    assert _marks(model) == [STAGES, FORCED]
    assert [node.name for node in model.graph] == [node.name for node in _source().graph.node]
    assert [value.name for value in model.graph.inputs] == ["x"]
    assert _outputs(ir.to_proto(model.ir), _x()) == _outputs(_source(), _x())


def test_the_training_step_comes_without_copies(tmp_path: Path) -> None:
    training = memonger.differentiate(_source(), loss=planning_models.LOSS)
    plan = memonger.search_plan(training, device="none", strategy="sqrt")
    assert plan.recomputed
    model = memonger.unplan(_saved(plan, tmp_path), as_planned=True)
    assert {node.name for node in model.graph} == {node.name for node in training.graph}
    assert model.graph.num_nodes() == training.graph.num_nodes()
    proto = ir.to_proto(model.ir)
    onnx.checker.check_model(proto)
    feeds = {**_x(), "labels": np.arange(planning_models.ROWS) % 3}
    assert _outputs(proto, feeds) == _outputs(ir.to_proto(training.ir), feeds)
    again = memonger.search_plan(model, device="none", strategy="sqrt")
    assert len(again.recomputed) == len(plan.recomputed)
    assert _marks(again.source) == [STAGES, FORCED]


def test_a_plan_in_memory_gives_its_source() -> None:
    plan = memonger.search_plan(classifier(), device="cpu", mode="inference")
    feeds = {"x": batch()["x"]}
    assert _outputs(ir.to_proto(memonger.unplan(plan).ir), feeds) == _outputs(classifier(), feeds)


def test_what_onnxruntime_made_of_a_model_outlives_the_plan() -> None:
    plan = memonger.search_plan(classifier(), device="cpu", mode="inference")
    feeds = {"x": batch()["x"]}
    made = memonger.unplan(plan, as_planned=True)
    del plan
    gc.collect()
    assert _outputs(ir.to_proto(made.ir), feeds) == _outputs(classifier(), feeds)


def test_a_node_that_is_only_named_like_a_copy_stays(tmp_path: Path) -> None:
    model = classifier()
    names = {"Relu": "act", "Gemm": "act.recompute1"}
    for node in model.graph.node[:2]:
        node.name = names[node.op_type]
    plan = memonger.search_plan(model, mode="inference", device="none")
    assert (plan.recomputed, plan.overhead) == ((), 0.0)
    found = memonger.unplan(_saved(plan, tmp_path))
    assert [node.op_type for node in found.graph] == [node.op_type for node in model.graph.node]


def test_a_file_for_a_device_says_what_it_holds(tmp_path: Path) -> None:
    planned = _saved(memonger.search_plan(classifier(), mode="inference", device="cpu"), tmp_path)
    with pytest.raises(memonger.PlanError, match=r"planned\.onnx holds what onnxruntime .*as_planned=True"):
        memonger.unplan(planned)
    feeds = {"x": batch()["x"]}
    lowered = ir.to_proto(memonger.unplan(planned, as_planned=True).ir)
    assert _outputs(lowered, feeds) == _planned_outputs(planned, feeds)


def _planned_outputs(planned: Path, feeds: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in memonger.Session(planned).run(feeds).items()}


def test_the_command_writes_the_model_and_never_the_file_itself(tmp_path: Path) -> None:
    planned = _saved(memonger.search_plan(_source(), mode="inference", device="none"), tmp_path)
    content, link, out = planned.read_bytes(), tmp_path / "link.onnx", tmp_path / "model.onnx"
    link.symlink_to(planned)
    for same in (planned, link):
        refused = invoke("unplan", planned, "-o", same, "--force")
        assert refused.exit_code == 1
        assert "never overwritten" in refused.stderr
    assert planned.read_bytes() == content
    done = invoke("unplan", planned, "-o", out, "--json")
    assert json.loads(done.stdout)["kind"] == "forward"
    assert _outputs(onnx.load(out), _x()) == _outputs(_source(), _x())
    refused = invoke("unplan", out, "-o", tmp_path / "other.onnx")
    assert (refused.exit_code, (tmp_path / "other.onnx").exists()) == (1, False)
    assert "has no plan in it" in refused.stderr
