"""`memonger.fit`: the largest size that fits a memory, what is known of one more, and certificates of both."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import memonger
import models
from memonger.errors import BudgetError, LoadError, PlanError, PlanFileError, VerificationError
from memonger.planning import certificate
from memonger.planning.family import Family, structure
from memonger.planning.options import Options
from memonger.planning.search_plan import prepare
from tests.support.open_models import block, layers
from tests.support.planning_models import LOSS

EFFORT = 400


TRAINING = {"loss": LOSS, "optimizer": memonger.SGD(lr=0.1), "device": "none", "effort": EFFORT}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(block(), tmp_path / "block.onnx")
    return tmp_path / "block.onnx"


def _total(size: int, **options: Any) -> int:
    return memonger.search_plan(block(), batch=size, device="none", effort=EFFORT, **options).total_bytes


def test_the_largest_batch_and_the_proof_that_one_more_does_not_fit() -> None:
    memory = 100_000
    found = memonger.fit(block(), memory, mode="inference", device="none", effort=EFFORT)
    assert found.fits
    assert found.total_bytes == found.plan.total_bytes <= memory
    assert found.plan.batch == found.size
    assert _total(found.size, mode="inference", budget=memory) <= memory
    assert (found.beyond.size, found.beyond.status) == (found.size + 1, "proven")
    assert found.beyond.lower_bound_bytes > memory
    with pytest.raises(BudgetError):
        _total(found.size + 1, mode="inference", budget=memory)


def test_a_larger_batch_fits_in_chunks(model: Path, tmp_path: Path) -> None:
    options = {"mode": "inference", "device": "cpu", "threads": 1, "effort": EFFORT}
    whole, found = (memonger.fit(model, 25_000, chunks=chunks, **options) for chunks in ("off", "auto"))
    assert found.size > whole.size
    assert found.plan.chunks
    assert found.plan.batch == found.size
    assert found.total_bytes == found.plan.total_bytes <= 25_000
    assert found.beyond.size == found.size + 1
    assert found.beyond.total_bytes > 25_000
    x = np.random.default_rng(0).standard_normal((found.size, *_shape(model)), np.float32)
    plain = memonger.Session(memonger.search_plan(model, batch=found.size, chunks="off", **options)).run({"x": x})
    for name, value in memonger.Session(found.plan).run({"x": x}).items():
        np.testing.assert_array_equal(value, plain[name])
    with pytest.raises(PlanError, match="no certificates of plans with chunks"):
        found.save_certificate(tmp_path / "fits.json", None)


def _shape(model: Path) -> tuple[int, ...]:
    return tuple(dim.dim_value for dim in onnx.load(model).graph.input[0].type.tensor_type.shape.dim[1:])


@pytest.mark.parametrize("memory", [30_000, 50_001])
def test_without_recomputation_it_is_what_trying_every_size_gives(memory: int) -> None:
    found = memonger.fit(block(), memory, mode="inference", device="none", strategy="none")
    tried = [size for size in range(1, 2 * found.size + 2) if _total(size, mode="inference") <= memory]
    assert found.size == max(tried)
    assert not found.recomputes
    assert found.overhead == 0


def test_training_recomputes_for_a_larger_batch() -> None:
    source, memory = layers(), "256KiB"
    plain = memonger.fit(source, memory, **{**TRAINING, "strategy": "none"})
    found = memonger.fit(source, memory, **TRAINING)
    assert found.size > plain.size
    assert found.overhead > 0
    assert found.total_bytes <= 256 * memonger.KiB
    assert found.lower_bound_bytes <= found.total_bytes
    assert found.beyond.size == found.size + 1
    assert found.beyond.total_bytes > 256 * memonger.KiB
    assert (found.beyond.status == "proven") == (found.beyond.lower_bound_bytes > 256 * memonger.KiB)
    found.plan.verify()
    again = memonger.fit(source, memory, **TRAINING)
    assert (again.size, again.plan.offsets) == (found.size, found.plan.offsets)


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_interpolated_sizes_are_those_of_the_model(mode: str) -> None:
    options = {} if mode == "inference" else {"loss": "loss"}
    source = models.build(
        "gpt", batch=None, training=mode == "training", num_layers=1, width=32, seq_len=8, vocabulary=50
    )

    def request(size: int) -> Any:
        return prepare(source, Options(mode=mode, device="none", batch=size, **options)).request

    family = Family.of({size: request(size) for size in (4, 8, 16)})
    real, made = request(13), family.request(13)
    assert family.has(real.graph)
    assert structure(made.graph) == structure(real.graph)
    written = [value for writes in real.graph.writes for value in writes]
    own = [value for writes in made.graph.writes for value in writes]
    assert [made.graph.sizes[v] for v in own] == [real.graph.sizes[v] for v in written]
    assert abs(made.base - real.base) < 1000  # constants, some of them 1 / batch, are merged where they are equal


def test_another_dimension_may_grow_with_its_square() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]>
        scores (float[n,seq,4] x) => (float[n,seq,4] y) {
            t = Transpose<perm=[0,2,1]>(x)
            s = MatMul(x, t)
            p = Softmax(s)
            y = MatMul(p, x)
        }"""
    )
    found = memonger.fit(model, 4_000_000, "seq", mode="inference", device="none", dims={"n": 2})
    needed = [8 * size**2 + 64 * size for size in (found.size, found.size + 1)]  # p beside y, and x
    assert needed[0] <= found.total_bytes <= 4_000_000 < needed[1]
    assert found.beyond.status == "proven"
    assert len(found.tried) <= 6


def test_a_size_that_the_model_itself_cannot_have_ends_the_search() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]>
        rest (float[seq] x, int64[1] most = {24}) => (float[seq] y, float[n] rest) {
            y = Exp(x)
            s = Shape(x)
            d = Sub(most, s)
            rest = ConstantOfShape(d)
        }"""
    )
    del model.graph.input[1]
    found = memonger.fit(model, "1MiB", "seq", mode="inference", device="none")
    assert found.size == 24
    assert (found.beyond.size, found.beyond.status) == (25, "refused")
    assert "contradict each other" in found.beyond.reason


def test_the_error_of_a_budget_offers_it(model: Path) -> None:
    with pytest.raises(
        BudgetError, match=r"The largest batch that fits: memonger\.fit\('.*block\.onnx', memory='5KiB'\)"
    ):
        memonger.search_plan(model, batch=9, mode="inference", device="none", budget="5KiB", effort=EFFORT)
    with pytest.raises(BudgetError, match=r"memonger\.fit\(model, memory='5001B', vary='height'\)"):
        memonger.search_plan(
            _named("height"), dims={"height": 3000}, mode="inference", device="none", budget=5001, effort=EFFORT
        )


def test_a_memory_in_which_nothing_fits() -> None:
    found = memonger.fit(block(), 2_000, mode="inference", device="none")
    assert not found.fits
    assert (found.size, found.plan, found.total_bytes) == (0, None, None)
    assert (found.beyond.size, found.beyond.status) == (1, "proven")
    assert found.beyond.total_bytes == _total(1, mode="inference")


def test_a_device_measures_runs_and_samples(model: Path) -> None:
    pytest.importorskip("onnxruntime")
    told: list[str] = []
    found = memonger.fit(
        model, "256KiB", mode="inference", device="cpu", frontier=3, progress=told.append, effort=EFFORT
    )
    sizes = [point.size for point in found.frontier]
    assert sizes == [found.size // 3, 2 * found.size // 3, found.size]
    assert all(point.total_bytes <= 256 * 1024 for point in found.frontier)
    assert all(p.samples_per_second == pytest.approx(p.size / p.seconds) for p in found.frontier)
    assert found.frontier[-1].total_bytes == found.total_bytes
    assert found.plan.workspace_bytes is not None
    assert told[0] == "fit: batch 1: lowering"
    out = memonger.Session(found.plan).run({"x": np.ones((found.size, 3, 8, 8), np.float32)})
    assert out["y"].shape == (found.size, 4)


WRONG = {
    "fixed": (lambda: memonger.fit(models.build("lstm", batch=2), "1GiB"), "no dimension of its inputs is open"),
    "no such name": (lambda: memonger.fit(block(), "1GiB", "bach"), "Did you mean 'batch'"),
    "no batch": (lambda: memonger.fit(_named("height"), "1GiB"), "vary='x\\[1\\]'|'height'"),
    "given twice": (lambda: memonger.fit(block(), "1GiB", batch=4), "leave batch"),
    "a dimension given twice": (lambda: memonger.fit(_named("height"), "1GiB", "height", dims={"height": 2}), "leave"),
    "weights": (lambda: memonger.fit(block(), 900, mode="inference", device="none"), "weights alone take 1008 bytes"),
    "no size": (lambda: memonger.fit(block(), "8 apples"), "memory: '8 apples' is no size"),
    "budget": (lambda: memonger.fit(block(), "8GiB", options=Options(budget=1)), "leave budget out"),
    "frontier": (lambda: memonger.fit(block(), "8GiB", frontier=-1), "frontier must be"),
    "vary": (lambda: memonger.fit(block(), "8GiB", vary=3), "vary must be"),
}  # fmt: skip


def _named(name: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]>
        g (float[2,{name}] x) => (float[2,{name}] y) {{ y = Exp(x) }}"""
    )


@pytest.mark.parametrize("call", WRONG)
def test_wrong_calls_say_what_would_work(call: str) -> None:
    make, message = WRONG[call]
    with pytest.raises((PlanError, LoadError), match=message):
        make()


# Certificates


@pytest.fixture
def certified(model: Path) -> Path:
    found = memonger.fit(model, 100_000, mode="inference", device="none", effort=EFFORT)
    found.plan.save(model.with_name("planned.onnx"))
    found.save_certificate(model.with_name("fit.json"), model.with_name("planned.onnx"))
    return model.with_name("fit.json")


def test_a_certificate_is_checked_by_itself(certified: Path) -> None:
    assert certificate.is_certificate(certified)
    checked = certificate.verify(certified)
    assert checked.beyond.status == "proven"
    assert checked.memory == 100_000


def _set(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.update(values)


def _beyond(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["beyond"].update(values)


FORGED = {
    "memory smaller": (_set(memory=90_000), VerificationError, "more than"),
    "memory larger": (_set(memory=2_000_000), VerificationError, "the lower bound is only"),
    "total": (_set(total_bytes=1), VerificationError, "where the certificate says 1"),
    "another size": (lambda c: c.update(size=c["size"] - 1), VerificationError, "types or shapes differ"),
    "bound": (_beyond(lower_bound_bytes=10**9), VerificationError, "the lower bound is"),
    "gap": (_beyond(size=1000), VerificationError, "what it should say of"),
    "refused": (_beyond(status="refused"), VerificationError, "and isn't"),
    "no plan": (_set(planned=None), VerificationError, "names no plan"),
    "digest": (_set(planned_digest="0"), VerificationError, "was changed since"),
    "model digest": (_set(model_digest="0"), VerificationError, "was changed since"),
    "elsewhere": (_set(model="nowhere.onnx"), VerificationError, "isn't there"),
    "malformed": (_set(size="7"), PlanFileError, "malformed: 'size' is '7'"),
    "recomputes": (_set(memory=-1), PlanFileError, "malformed: 'memory'"),
    "vary": (_set(vary="seq"), PlanError, "no open dimension"),
}


@pytest.mark.parametrize("forgery", FORGED)
def test_a_forged_certificate_is_refused(certified: Path, forgery: str) -> None:
    change, kind, message = FORGED[forgery]
    content = json.loads(certified.read_text())
    change(content)
    certified.write_text(json.dumps(content))
    with pytest.raises(kind, match=message):
        certificate.verify(certified)


def test_a_plan_of_another_model_is_refused(certified: Path, model: Path) -> None:
    """With the digests of what lies there, so that only the model's own nodes tell."""
    other = block()
    other.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.zeros((4, 3, 3, 3), np.float32), "first"))
    onnx.save(other, model)
    content = json.loads(certified.read_text())
    content["model_digest"] = certificate._digest(model)
    certified.write_text(json.dumps(content))
    with pytest.raises(VerificationError, match="other weights"):
        certificate.verify(certified)


def test_certificates_hold_training_options_and_what_may_share_bytes(tmp_path: Path) -> None:
    path = tmp_path / "layers.onnx"
    onnx.save(layers(), path)
    sharing = memonger.Sharing(windows=False)
    adam = memonger.AdamW(lr=0.01, betas=(0.8, 0.9), no_decay=["last"])
    found = memonger.fit(path, "128KiB", **{**TRAINING, "optimizer": adam, "sharing": sharing})
    found.plan.save(tmp_path / "planned.onnx")
    found.save_certificate(tmp_path / "fit.json", tmp_path / "planned.onnx")
    checked = certificate.verify(tmp_path / "fit.json")
    assert checked.recipe.optimizer.settings["betas"] == (0.8, 0.9)
    assert (checked.recipe.views, checked.recipe.windows) == (True, False)
    assert checked.size == found.size


def test_what_a_certificate_cannot_hold_is_said(model: Path) -> None:
    found = memonger.fit(block(), 100_000, mode="inference", device="none", effort=EFFORT)
    with pytest.raises(PlanError, match="a certificate names the model"):
        found.save_certificate("fit.json", "planned.onnx")
    none = memonger.fit(model, 2_000, mode="inference", device="none", effort=EFFORT)
    none.save_certificate(model.with_name("none.json"), None)
    assert certificate.verify(model.with_name("none.json")).size == 0
    with pytest.raises(PlanError, match="names the planned file"):
        none.save_certificate(model.with_name("none.json"), "planned.onnx")
