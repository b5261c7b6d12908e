"""Objects people hold: what they say of themselves, and how they go into other tools."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import memonger
from memonger.units import format_size
from tests.support import training_models
from tests.support.planning_models import LOSS, ROWS, WIDTH, chain
from tests.support.stock import parse, run_stock


@pytest.fixture(scope="module")
def recomputing() -> memonger.Plan:
    """A training plan in which activations are computed again."""
    return memonger.search_plan(chain(), loss=LOSS, strategy="cheap", device="none")


def test_plans_and_models_say_what_they_are_in_one_line(tmp_path: Path) -> None:
    onnx.save(chain(), tmp_path / "net.onnx")
    plan = memonger.search_plan(tmp_path / "net.onnx", device="none")
    assert repr(plan) == str(plan) == f"<Plan net: inference, portable, {format_size(plan.total_bytes)}>"
    plan.save(tmp_path / "planned.onnx")
    assert repr(memonger.Plan.load(tmp_path / "planned.onnx")) == repr(plan).replace("net", "chain")
    assert repr(memonger.load(chain())) == "<Model chain: 19 nodes>"
    assert repr(memonger.load(tmp_path / "net.onnx")) == "<Model net: 19 nodes>"
    text = "g (float[N, 4] x) => (float[N, 4] y) { y = Relu(x) }"
    assert repr(memonger.load(parse(text), batch=3)) == "<Model g: 1 nodes, batch 3>"
    assert "batch 3, " in repr(memonger.search_plan(parse(text), batch=3, device="none"))
    assert "training step" in repr(memonger.differentiate(chain(), loss=LOSS))


def test_layouts_options_and_graph_plans_do_too(recomputing: memonger.Plan) -> None:
    assert repr(memonger.pack([memonger.Buffer(0, 4096, 0, 1)])) == "<Layout: 1 buffer in 4.00 KiB>"
    assert repr(memonger.Options()) == "Options()"
    options = memonger.Options(budget="4GiB", inputs={"x": np.zeros(10_000)})
    assert repr(options).startswith("Options(budget='4GiB', inputs={'x': ")
    assert len(repr(options)) < 200
    plan = memonger.search_plan(recomputing.to_networkx(), strategy="none")
    assert repr(plan) == f"<GraphPlan: {len(plan.schedule)} steps, arena {format_size(plan.arena_bytes)}>"


def test_sessions_do_too() -> None:
    pytest.importorskip("onnxruntime")
    text = "g (float[N, 4] x) => (float[N, 4] y) { y = Relu(x) }"
    plans = [memonger.search_plan(parse(text), batch=batch, device="none") for batch in (1, 8)]
    assert repr(memonger.Session(plans)) == "<Session g on cpu: batches 1, 8, arena 128 B>"
    training = memonger.differentiate(training_models.classifier(), loss=LOSS, optimizer=memonger.SGD())
    plan = memonger.search_plan(training, device="none")
    trainer, size = memonger.TrainingSession(plan), format_size(plan.arena_bytes)
    trainer.step(training_models.batch())
    assert repr(trainer) == f"<TrainingSession classifier on cpu: 1 step, arena {size}>"


def test_the_parts_of_a_total_name_what_takes_something() -> None:
    plan = memonger.search_plan(chain(), device="none")
    assert list(plan.parts) == ["weights", "arena", "workspace", "inputs"]
    assert plan.parts["workspace"] is None
    assert "not measured" in plan._repr_html_()
    assert plan.total_bytes == plan.parameter_bytes + plan.arena_bytes + plan.input_bytes
    trained = training_models.plan()
    assert next(iter(trained.parts)) == "weights and training state"


def test_names_of_strangers_are_escaped_for_people_and_for_html() -> None:
    model = chain()
    model.graph.name = "<b>\x1b[31m"
    plan = memonger.search_plan(model, device="none")
    assert "\x1b" not in repr(plan)
    assert "\\x1b" in repr(plan)
    table = plan._repr_html_()
    assert "<b>" not in table
    assert "&lt;b&gt;\\x1b[31m: inference" in table
    assert format_size(plan.total_bytes) in table
    assert "planned for inference" in table


def test_a_plan_goes_into_onnx_save_as_it_saves_itself(tmp_path: Path) -> None:
    plan = memonger.search_plan(chain(), device="none")
    onnx.save(plan.proto, tmp_path / "proto.onnx")
    plan.save(tmp_path / "saved.onnx")
    assert (tmp_path / "proto.onnx").read_bytes() == (tmp_path / "saved.onnx").read_bytes()
    assert memonger.Plan.load(tmp_path / "proto.onnx").arena_bytes == plan.arena_bytes


def test_models_go_into_onnx_save_weights_of_other_files_too(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    onnx.save(chain(), tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    model = memonger.load(tmp_path / "m.onnx")
    (tmp_path / "elsewhere").mkdir()
    onnx.save(model.proto, tmp_path / "elsewhere" / "proto.onnx")
    model.save(tmp_path / "elsewhere" / "saved.onnx")
    x = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)
    expected = run_stock(chain(), {"x": x}, "ORT_DISABLE_ALL")["y"]
    for name in ("proto.onnx", "saved.onnx"):
        assert np.array_equal(
            run_stock(onnx.load(tmp_path / "elsewhere" / name), {"x": x}, "ORT_DISABLE_ALL")["y"], expected
        )
    with pytest.raises(memonger.PlanFileError, match="holds weights of the model"):
        model.save(tmp_path / "w.bin")


def test_what_is_annotated_is_a_model(recomputing: memonger.Plan, tmp_path: Path) -> None:
    recomputing.annotated.save(tmp_path / "annotated.onnx")
    onnx.save(recomputing.annotated.proto, tmp_path / "proto.onnx")
    assert (tmp_path / "annotated.onnx").read_bytes() == (tmp_path / "proto.onnx").read_bytes()
    again = memonger.search_plan(tmp_path / "proto.onnx", loss=LOSS, strategy="marks", device="none")
    assert again.peak_bytes == recomputing.peak_bytes


def test_buffers_are_what_the_plan_holds(recomputing: memonger.Plan) -> None:
    plan = recomputing
    buffers = list(plan.buffers())
    assert len(buffers) == len(plan.offsets)
    values = {value.name: value for node in plan.model.graph for value in node.outputs}
    for one in buffers:
        assert one.node == plan.graph.nodes[one.first_step]
        assert one.operator == plan.graph.ops[one.first_step]
        value = values[one.name]
        assert one.shape == tuple(value.shape or ())
        assert value.dtype is not None
        assert one.bytes == value.dtype.itemsize * int(np.prod(one.shape or ()))
        assert 0 <= one.offset <= plan.arena_bytes - one.bytes
        assert one.first_step <= one.last_step < len(plan.graph.nodes)
        assert one.recomputed == (".recompute" in one.name)
    at = {one.name: one for one in buffers}
    readers = [step for step, node in enumerate(plan.model.graph) if "r3" in {v.name for v in node.inputs if v}]
    assert (at["r3"].first_step, at["r3"].last_step, at["r3"].kept) == (7, max(readers), False)
    copy = next(one for one in buffers if one.name.startswith("r3.recompute"))
    assert copy.recomputed
    assert copy.first_step > at["r3"].last_step
    assert at["h3"].kept != at["r3"].kept


def test_no_two_live_buffers_overlap_but_by_sharing(recomputing: memonger.Plan) -> None:
    """Bytes in use at a step by the records are never more than the arena: each byte once."""
    for step in range(len(recomputing.graph.nodes)):
        live = sorted(
            {(one.offset, one.bytes) for one in recomputing.buffers() if one.first_step < step < one.last_step}
        )
        ends = [offset + size for offset, size in live]
        assert all(end <= following for end, (following, _) in zip(ends, live[1:], strict=False))


def test_the_package_has_its_modules_and_loads_them_late() -> None:
    code = (
        "import sys, memonger; early = 'memonger.export' in sys.modules; "
        "print(early, memonger.export.export.__name__, memonger.backend.prepare.__name__, 'backend' in dir(memonger))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False export prepare True\n"
