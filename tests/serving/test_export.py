"""memonger export: what it prints, what it refuses, and that it leaves whole folders or none."""

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

import memonger
from memonger.errors import MemongerError, PlanError, PlanFileError
from memonger.serving import TARGETS, ServingTarget, export
from memonger.serving.package import Estimate, pack
from memonger.serving.triton_config import Name, text_of
from tests.support.command_line import invoke
from tests.support.export_models import branched, planned
from tests.support.networks import model_of
from tests.support.stock import parse


def plan_of(model: onnx.ModelProto, **choices: Any) -> memonger.Plan:
    """A portable plan for inference."""
    return memonger.search_plan(model, **{"mode": "inference", "device": "none", **choices})


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {str(one.relative_to(folder)): one.read_bytes() for one in sorted(folder.rglob("*")) if one.is_file()}


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_prints_the_memory_of_one_instance_and_of_all(tmp_path: Path, target: str) -> None:
    (path,) = planned(tmp_path, (2,))
    out = tmp_path / "out"
    run = invoke("export", path, "--target", target, "--output", out, "--instances", "3", "--json")
    assert run.exit_code == 0, run.output
    record = json.loads(run.stdout)
    plan = memonger.Plan.load(path)
    parts = [record[f"{part}_bytes"] for part in ("parameter", "input", "activation", "scratch")]
    assert record["instance_bytes"] == sum(parts)
    assert parts[:2] == [plan.parameter_bytes, plan.input_bytes]
    assert parts[2] >= plan.peak_bytes
    weights_once = target in ("triton", "openvino")
    assert record["total_bytes"] == 3 * sum(parts) - (2 * parts[0] if weights_once else 0)
    assert sorted(record["files"]) == list(contents(out))
    assert "README.md" in record["files"]
    text = invoke("export", path, "--target", target, "--output", tmp_path / "two")
    assert "Predicted for one instance:" in text.stdout
    assert "In all, 1:" in text.stdout


def test_a_sessions_figures_are_the_plans(tmp_path: Path) -> None:
    (path,) = planned(tmp_path, (2,), device="cpu", level="extended")
    plan = memonger.Plan.load(path)
    assert plan.workspace_bytes
    done = export(path, "ray", tmp_path / "out")
    assert done.estimate == Estimate(
        plan.parameter_bytes, plan.input_bytes, plan.arena_bytes, plan.workspace_bytes, instances=1
    )
    assert any("bound to onnxruntime" in note for note in done.notes)


def test_plans_for_several_batches_share_weights_and_the_largest_arena(tmp_path: Path) -> None:
    plans = [memonger.Plan.load(path) for path in planned(tmp_path, (8, 1, 2))]
    package = pack({"m": plans}, "m", 2)
    assert package.models[0].batches == (1, 2, 8)
    estimate = package.as_planned()
    assert estimate.activations == max(plan.arena_bytes for plan in plans)
    assert estimate.parameters == plans[0].parameter_bytes


def test_plans_of_one_batch_and_several_lengths_all_reach_the_folder(tmp_path: Path) -> None:
    model = model_of([helper.make_node("Relu", ["x"], ["y"], "n")], {"x": ["b", "n", 4]}, {"y": ["b", "n", 4]})
    plans = [plan_of(model, batch=2, dims={"n": size}) for size in (8, 3, 5)]
    export(plans, "triton-python", tmp_path / "out", name="m")
    version = tmp_path / "out" / "m" / "1"
    names = json.loads((version / "plans.json").read_text())["models"]["m"]
    assert [memonger.Plan.load(version / name).input_bytes for name in names] == [4 * 2 * n * 4 for n in (3, 5, 8)]


def test_scratch_of_a_portable_plan_is_measured(tmp_path: Path) -> None:
    (path,) = planned(tmp_path, (2,))
    assert memonger.Plan.load(path).workspace is None
    kernels = plan_of(branched(), batch=2, device="cpu", level="disable")
    assert export(path, "ray", tmp_path / "out").estimate.workspace == kernels.workspace_bytes
    assert kernels.workspace_bytes


def test_an_unknown_target_is_refused_with_those_there_are(tmp_path: Path) -> None:
    run = invoke("export", planned(tmp_path, (1,))[0], "--target", "torchserve", "--output", tmp_path / "o")
    assert run.exit_code == 1
    assert run.stderr == f"memonger: 'torchserve' is no target: there are {', '.join(TARGETS)}.\n"
    assert not (tmp_path / "o").exists()


def training_plan(folder: Path) -> Path:
    model = memonger.differentiate(branched(2), optimizer=memonger.SGD(lr=0.1), loss="mean_squared_error")
    memonger.search_plan(model, device="none").save(folder / "training.onnx")
    return folder / "training.onnx"


@pytest.mark.parametrize("target", TARGETS)
def test_a_training_plan_is_refused(tmp_path: Path, target: str) -> None:
    with pytest.raises(PlanError, match="a plan for training, which can't be served: plan the forward model"):
        export(training_plan(tmp_path), target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["a/b", "..", "a..b", ".hidden", "", " ", "a b", "a\nb", "x" * 201, "ä"])
@pytest.mark.parametrize("target", ["triton", "triton-python"])
def test_names_triton_refuses_are_refused(tmp_path: Path, target: str, name: str) -> None:
    plan = plan_of(branched(), batch=2)
    with pytest.raises(PlanError, match="can't be the model's name: for Triton"):
        export(plan, target, tmp_path / "out", name=name)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("target", "name"),
    [("kserve", "ResNet"), ("kserve", "r_1"), ("kserve", "r" * 41), ("bentoml", "ResNet"), ("bentoml", "a-")],
)
def test_names_kubernetes_and_bentoml_refuse_are_refused(tmp_path: Path, target: str, name: str) -> None:
    with pytest.raises(PlanError, match=r"can't be the model's name: .* Give another \(name\)"):
        export(plan_of(branched(), batch=2), target, tmp_path / "out", name=name)


def relu(kind: int, dims: list[int], op: str = "Identity") -> onnx.ModelProto:
    """A model of one node from x to y."""
    x, y = (helper.make_tensor_value_info(name, kind, dims) for name in "xy")
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"], "n")], "g", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (relu(TensorProto.FLOAT, []), "input 'x' is a scalar, which Triton refuses"),
        (relu(TensorProto.FLOAT, [0, 4]), r"input 'x' is \[0, 4\]: Triton refuses dimensions of 0"),
        (relu(TensorProto.INT4, [8]), "input 'x' is INT4, which Triton has no type for"),
        (relu(TensorProto.COMPLEX64, [8]), "input 'x' is COMPLEX64, which Triton has no type for"),
    ],
    ids=["scalar", "empty", "int4", "complex"],
)
def test_inputs_triton_refuses_are_refused(tmp_path: Path, model: onnx.ModelProto, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        export(plan_of(model), "triton-python", tmp_path / "out", name="m")


def test_what_isnt_a_tensor_cant_be_served(tmp_path: Path) -> None:
    model = parse("g (seq(float[2]) x) => (seq(float[2]) y) { y = Identity(x) }")
    with pytest.raises(PlanError, match=r"input 'x' is .*: only tensors of known rank can be served"):
        export(plan_of(model), "triton-python", tmp_path / "out", name="m")


@pytest.mark.parametrize("target", ["onnxruntime", "triton", "openvino"])
def test_blocked_layouts_are_refused_where_nothing_would_check_the_processor(tmp_path: Path, target: str) -> None:
    plan = plan_of(branched(), batch=2, device="cpu", level="all")
    if not any(node.domain == "com.microsoft.nchwc" for node in plan.model.graph):
        pytest.skip("onnxruntime has no blocked layouts for this processor")
    with pytest.raises(PlanError, match="can't be relied on to run: plan the model with device='none'"):
        export(plan, target, tmp_path / "out", name="m")


def test_onnxruntimes_own_operators_are_refused_for_openvino_alone(tmp_path: Path) -> None:
    plan = plan_of(branched(), batch=2, device="cpu", level="extended")
    assert any(node.domain == "com.microsoft" for node in plan.model.graph)
    with pytest.raises(PlanError, match="which OpenVINO can't be relied on to run"):
        export(plan, "openvino", tmp_path / "out", name="m")
    done = export(plan, "triton", tmp_path / "out", name="m")
    assert any("that version or newer" in note for note in done.notes)


@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
def test_targets_of_one_plan_refuse_several(tmp_path: Path, target: str) -> None:
    with pytest.raises(PlanError, match="loads one plan: export each batch on its own"):
        export(planned(tmp_path, (1, 2)), target, tmp_path / "out")


def test_plans_of_different_models_are_refused(tmp_path: Path) -> None:
    other = model_of([helper.make_node("Relu", ["z"], ["y"], "n")], {"z": [1, 4]}, {"y": [1, 4]})
    with pytest.raises(PlanError, match="can't be served as one model: plan 1 is of another model"):
        export([plan_of(branched(), batch=1), plan_of(other)], "ray", tmp_path / "out")
    with pytest.raises(PlanError, match="can't be served as one model: plans 0 and 1 are for the same input shapes"):
        export([plan_of(branched(), batch=1)] * 2, "ray", tmp_path / "out")


@pytest.mark.parametrize(("plans", "instances"), [([], 1), (None, 0), (None, -1)])
def test_nothing_and_no_instances_are_refused(tmp_path: Path, plans: list[Any] | None, instances: int) -> None:
    given = planned(tmp_path, (1,)) if plans is None else plans
    with pytest.raises(
        PlanError, match=r"nothing to export|instances must be a whole number from 1 to 100000, not (0|-1)"
    ):
        export(given, "ray", tmp_path / "out", instances=instances)


def test_an_existing_export_is_replaced_only_when_asked(tmp_path: Path) -> None:
    path, out = planned(tmp_path, (1,))[0], tmp_path / "out"
    export(path, "ray", out)
    before = contents(out)
    with pytest.raises(PlanFileError, match="is there already: name another folder, or replace it with force=True"):
        export(path, "bentoml", out, name="m")
    assert contents(out) == before
    export(path, "bentoml", out, name="m", force=True)
    assert "service.py" in contents(out)
    assert "app.py" not in contents(out)


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_is_no_export_is_never_replaced(tmp_path: Path, force: bool) -> None:
    path, out = planned(tmp_path, (1,))[0], tmp_path / "home"
    out.mkdir()
    (out / "thesis.txt").write_text("four years")
    with pytest.raises(PlanFileError, match="wasn't written by memonger"):
        export(path, "ray", out, force=force)
    assert contents(out) == {"thesis.txt": b"four years"}
    with pytest.raises(PlanFileError, match="is no folder"):
        export(path, "ray", out / "thesis.txt", force=force)


def test_a_folder_that_merely_holds_an_export_is_never_replaced(tmp_path: Path) -> None:
    path, out = planned(tmp_path, (1,))[0], tmp_path / "home"
    out.mkdir()
    (out / "thesis.txt").write_text("four years")
    export(path, "ray", out / "model")
    with pytest.raises(PlanFileError, match="wasn't written by memonger"):
        export(path, "ray", out, force=True)
    (out / "model" / "notes.txt").write_text("mine")
    with pytest.raises(PlanFileError, match=r"holds 'notes\.txt', which memonger didn't write"):
        export(path, "ray", out / "model", force=True)
    assert (out / "thesis.txt").exists()
    assert (out / "model" / "notes.txt").exists()


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export(planned(tmp_path, (1,))[0], "ray", tmp_path / "out")
    assert "app.py" in contents(tmp_path / "out")


def test_a_folder_in_a_folder_that_isnt_there_cant_be_written(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match="can't be written: No such file or directory"):
        export(planned(tmp_path, (1,))[0], "ray", tmp_path / "no" / "out")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), PlanError("no")])
@pytest.mark.parametrize("old", [False, True])
def test_what_fails_leaves_nothing_new_and_everything_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, old: bool
) -> None:
    path, work = planned(tmp_path, (1,))[0], tmp_path / "work"
    work.mkdir()
    if old:
        export(path, "ray", work / "out")
    before = contents(work)

    def fail(package: Any, folder: Path) -> Any:
        (folder / "half").write_text("written")
        raise error

    monkeypatch.setitem(TARGETS, "ray", ServingTarget(fail))
    with pytest.raises(MemongerError):
        export(path, "ray", work / "out", force=True)
    assert contents(work) == before


def test_without_onnxruntime_the_scratch_is_said_to_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memonger.runtime.onnxruntime.is_available", lambda: False)
    done = export(planned(tmp_path, (4,))[0], "triton", tmp_path / "out", name="m")
    assert done.estimate.workspace == 0
    assert any("Workspace is not in the figures" in note for note in done.notes)
    assert any("planned batch" in note for note in done.notes)


@pytest.mark.parametrize("target", TARGETS)
def test_the_same_plan_gives_the_same_files(tmp_path: Path, target: str) -> None:
    (path,) = planned(tmp_path, (2,))
    for name in ("one", "two"):
        export(path, target, tmp_path / name)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_text_messages_nest_repeat_and_quote() -> None:
    text = text_of({"a": 1, "b": [True, False], "c": {"d": Name("KIND")}, "e": 'q"\\\n', "f": [{"g": "x"}, {}]})
    assert text == ('a: 1\nb: true\nb: false\nc {\n  d: KIND\n}\ne: "q\\"\\\\\\012"\nf {\n  g: "x"\n}\nf {\n}\n')
    with pytest.raises(TypeError, match=r"1\.5 has no place"):
        text_of({"a": 1.5})


@pytest.mark.parametrize("instances", [1, 2, 5])
def test_shared_weights_count_once(instances: int) -> None:
    own, shared = (Estimate(100, 1, 20, 3, instances, shared=shared) for shared in (False, True))
    assert own.total_bytes == instances * 124
    assert shared.total_bytes == 100 + instances * 24
