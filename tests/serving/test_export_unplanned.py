"""memonger export of models without a plan: planned as the target needs it, an open batch stays open."""

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import memonger
from memonger.errors import LoadError, PlanError
from memonger.options import Options
from memonger.serving import TARGETS, export
from memonger.serving.form import BATCHES, PORTABLE, smaller
from tests.support import networks, triton_stand_in
from tests.support.command_line import invoke
from tests.support.export_models import branched, images, planned
from tests.support.stock import normal, parse, run_stock


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model file with an open batch."""
    onnx.save(branched(), tmp_path / "branched.onnx")
    return tmp_path / "branched.onnx"


def stock(feeds: dict[str, np.ndarray]) -> np.ndarray:
    found: np.ndarray = run_stock(branched(), feeds, "ORT_DISABLE_ALL")["y"]
    return found


def config_of(folder: Path) -> str:
    (path,) = folder.glob("*/config.pbtxt")
    return path.read_text()


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_gets_the_form_it_needs(model: Path, target: str) -> None:
    out = model.parent / "out"
    done = invoke("export", model, "--target", target, "-o", out, "--json", "--quiet", "--batches", "2")
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["name"] == "branched"
    assert any(note.startswith(f"The model had no plan: it was planned for {target}, ") for note in record["notes"])
    for path in out.rglob("*.onnx"):
        nodes = onnx.load(path, load_external_data=False).graph.node
        assert all(node.domain == "" for node in nodes) or target not in PORTABLE
    plans = [memonger.Plan.load(path) for path in out.rglob("*.planned.onnx")]
    assert {plan.device for plan in plans} <= {"none" if target in PORTABLE else "cpu"}


def test_tritons_own_backend_gets_one_file_for_every_batch(model: Path) -> None:
    out = model.parent / "out"
    done = invoke("export", model, "--target", "triton", "-o", out)
    assert done.exit_code == 0, done.output
    text = config_of(out)
    assert "max_batch_size: 8\n" in text
    assert "dynamic_batching" in text
    assert text.split("input {")[1].split("}")[0].count("dims:") == 3
    session = onnxruntime.InferenceSession(out / "branched" / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape == ["batch", 3, 16, 16]
    for batch in (1, 3, 8):
        found = session.run(["y"], images(5, batch))[0]
        np.testing.assert_allclose(found, stock(images(5, batch)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("flags", "batches"), [((), BATCHES["triton-python"]), (("--batches", "1,4"), (1, 4))])
def test_tritons_python_backend_gets_a_plan_for_each_batch(
    model: Path, flags: tuple[str, ...], batches: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = model.parent / "out"
    done = invoke("export", model, "--target", "triton-python", "-o", out, "--name", "m", *flags)
    assert done.exit_code == 0, done.output
    assert f"max_batch_size: {max(batches)}\n" in config_of(out)
    version = out / "m" / "1"
    plans = json.loads((version / "plans.json").read_text())["models"]["m"]
    assert [memonger.Plan.load(version / name).batch for name in plans] == list(batches)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", triton_stand_in.backend_utils())
    served = triton_stand_in.load(version / "model.py")
    requests = [images(seed, rows) for seed, rows in enumerate((1, 3, 5, 2))]
    answers = served.execute([triton_stand_in.request_of(feeds) for feeds in requests])
    for feeds, answer in zip(requests, answers, strict=True):
        assert answer.error is None
        np.testing.assert_allclose(answer.outputs["y"], stock(feeds), rtol=1e-5, atol=1e-5)


def test_options_of_planning_hold(model: Path) -> None:
    out = model.parent / "out"
    own = ("--no-reuse", "--no-inplace", "--no-views")
    done = invoke("export", model, "--target", "ray", "-o", out, "--batch", 2, "--device", "none", *own)
    assert done.exit_code == 0, done.output
    (plan,) = [memonger.Plan.load(path) for path in out.rglob("*.planned.onnx")]
    assert (plan.batch, plan.device) == (2, "none")
    assert plan.arena_bytes >= plan.activation_bytes > memonger.search_plan(branched(2), device="none").arena_bytes


def test_a_model_in_memory_and_one_with_a_fixed_batch(tmp_path: Path) -> None:
    done = export(branched(), "triton", tmp_path / "open", batches=[1, 2])
    assert "preferred_batch_size: 1" in config_of(tmp_path / "open")
    assert done.name == branched().graph.name
    done = export(branched(2), "triton", tmp_path / "fixed")
    assert "max_batch_size: 0\n" in config_of(tmp_path / "fixed")
    assert any("for its own shapes" in note for note in done.notes)


def test_a_model_that_cannot_be_batched_is_planned_for_one(tmp_path: Path) -> None:
    model = parse("g (float[b, 4] x) => (float[b, 4] y, float[4, b] t) { y = Relu(x)  t = Transpose(y) }")
    done = export(model, "triton", tmp_path / "out")
    text = config_of(tmp_path / "out")
    assert "max_batch_size: 0\n" in text
    assert text.split("input {")[1].split("}")[0].split() == ["name:", '"x"', "data_type:", "TYPE_FP32", "dims:", "1",
                                                              "dims:", "4"]  # fmt: skip
    assert any("doesn't begin with the batch" in note for note in done.notes)


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (("--batches", "1,zero"), 2, "no list of batches"),
        (("--batches", "0"), 2, "no list of batches"),
        (("--batches", "1,2", "--batch", "4"), 1, "--batch and --batches contradict each other"),
        (("--dim", "length=3"), 1, "no dimension named 'length'"),
    ],
)
def test_what_contradicts_itself_is_refused(model: Path, flags: tuple[str, ...], status: int, words: str) -> None:
    done = invoke("export", model, "--target", "triton", "-o", model.parent / "out", *flags)
    assert done.exit_code == status
    assert words in done.stderr
    assert not (model.parent / "out").exists()


def test_a_planned_file_is_not_planned_again(tmp_path: Path, model: Path) -> None:
    (path,) = planned(tmp_path, (2,))
    for flags in (("--batches", "1,2"), ("--device", "none"), ("--batch", "2"), ("--threads", "1")):
        done = invoke("export", path, "--target", "ray", "-o", tmp_path / "out", *flags)
        assert done.exit_code == 2
        assert f"has a plan already, which {flags[0]} can't change" in done.stderr
    with pytest.raises(PlanError, match="has a plan already: batches and options"):
        export(path, "ray", tmp_path / "out", batches=[2])
    with pytest.raises(PlanError, match="has no plan in it: several files are plans of one model"):
        export([path, model], "ray", tmp_path / "out")


def test_a_training_model_and_an_open_length_are_refused(tmp_path: Path) -> None:
    training = memonger.differentiate(branched(2), loss="mean_squared_error")
    with pytest.raises(PlanError, match="a plan for training, which can't be served"):
        export(training, "ray", tmp_path / "out")
    model = parse("g (float[b, length, 4] x) => (float[b, length, 4] y) { y = Relu(x) }")
    with pytest.raises(LoadError, match="length"):
        export(model, "triton", tmp_path / "out")
    export(model, "triton", tmp_path / "out", options=memonger.Options(dims={"length": 5}))
    assert "max_batch_size: 8\n" in config_of(tmp_path / "out")


@pytest.mark.parametrize("width", [4, 2048])
def test_plans_of_several_batches_are_in_chunks_only_where_that_outweighs_weights_of_their_own(width: int) -> None:
    """Rows of 512 numbers, twice as many after a product with as many weights as they have, or with far more."""
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["a"], name="rows"),
        helper.make_node("MatMul", ["a", "w"], ["b"], name="product"),
        helper.make_node("Tanh", ["b"], ["c"], name="tanh"),
        helper.make_node("ReduceMax", ["c", "axes"], ["y"], name="most", keepdims=0),
    ]
    weights = {"w": normal(0, width, width), "axes": np.array([1, 2]), "shape": np.array([0, -1, width])}
    model = networks.model_of(nodes, {"x": ["N", 64 * 1024]}, {"y": ["N"]}, **weights)
    chosen = [Options(mode="inference", device="cpu", batch=batch, threads=1) for batch in (2, 4)]
    plans = tuple(memonger.search_plan(model, options=one, chunks=2) for one in chosen)
    assert all(plan.chunks for plan in plans)
    assert all(bool(plan.chunks) is (width == 4) for plan in smaller(model, plans, chosen))


def test_a_name_is_refused_before_anything_is_planned(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("memonger.serving.form.plans_for", lambda *_: pytest.fail("it was planned"))
    model.rename(tmp_path / "My_Net.onnx")
    message = r"'My_Net' can't be the model's name: Kubernetes takes .* Give another \(name\)"
    with pytest.raises(PlanError, match=message):
        export(tmp_path / "My_Net.onnx", "kserve", tmp_path / "out")
