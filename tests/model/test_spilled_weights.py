"""Large models' files: weights are copied into a temporary file while they are read, and nothing else changes."""

import gc
import os
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import memonger
from memonger.ir import wire
from memonger.ir.tensors import all_tensors
from tests.support.networks import model_of
from tests.support.stock import normal, run_stock

SEED = 7


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SPILLED", 0)


def _model() -> onnx.ModelProto:
    """Weights as raw bytes, as a list of numbers, small ones, in a subgraph, of odd length, and strings."""
    nodes = [
        helper.make_node("Gemm", ["x", "w", "listed"], ["a"], name="a"),
        helper.make_node("Gather", ["bytes", "at"], ["taken"], name="taken"),
        helper.make_node("Cast", ["taken"], ["cast"], name="cast", to=TensorProto.FLOAT),
        helper.make_node("Add", ["a", "cast"], ["y"], name="y"),
    ]
    model = model_of(
        nodes, {"x": [4, 40]}, {"y": [4, 40]},
        w=normal(0, 40, 40), bytes=np.arange(41 * 40, dtype=np.int8).reshape(41, 40), at=np.array(3),
    )  # fmt: skip
    listed = TensorProto(name="listed", data_type=TensorProto.FLOAT, dims=[40, 40][:1])
    listed.float_data.extend(range(40))
    model.graph.initializer.insert(1, listed)
    model.metadata_props.add(key="who", value="me")
    return model


def _written(folder: Path) -> Path:
    onnx.save(_model(), folder / "model.onnx")
    return folder / "model.onnx"


def test_a_model_is_read_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _written(tmp_path)
    spilled = memonger.load(path)
    monkeypatch.setattr(wire, "SPILLED", 1 << 40)
    whole = memonger.load(path)
    assert spilled.proto.SerializeToString(deterministic=True) == whole.proto.SerializeToString(deterministic=True)
    apart = [str(tensor.name) for tensor in all_tensors(spilled.ir) if isinstance(tensor, ir.ExternalTensor)]
    assert apart == ["w", "bytes"]
    assert all(tensor.offset % 4096 == 0 for tensor in all_tensors(spilled.ir) if isinstance(tensor, ir.ExternalTensor))


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_the_file_may_go_once_it_is_read(device: str, tmp_path: Path) -> None:
    path, feed = _written(tmp_path), {"x": normal(1, 4, 40)}
    expected = run_stock(_model(), feed, "ORT_ENABLE_ALL")["y"]
    plan = memonger.search_plan(path, device=device, mode="inference")
    path.unlink()
    gc.collect()
    assert np.array_equal(memonger.Session(plan).run(feed)["y"], expected)
    plan.save(path)
    assert np.array_equal(memonger.Session(path).run(feed)["y"], expected)


def test_the_temporary_file_goes_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _written(tmp_path)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    model = memonger.load(path)
    copy = memonger.load(model.ir)
    assert len(list(scratch.iterdir())) == 1
    del model
    gc.collect()
    assert np.array_equal(copy.ir.graph.initializers["w"].const_value.numpy(), normal(0, 40, 40))  # type: ignore[union-attr]
    del copy
    gc.collect()
    assert list(scratch.iterdir()) == []


def test_without_room_the_weights_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(wire, "ScratchFolder", refuses)
    model = memonger.load(_written(tmp_path))
    assert not any(isinstance(tensor, ir.ExternalTensor) for tensor in all_tensors(model.ir))


def test_files_that_are_no_models_are_refused_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, random = _written(tmp_path).read_bytes(), np.random.default_rng(SEED)
    cuts = [whole[: int(stop)] for stop in random.integers(1, len(whole), 10)]
    flipped = []
    for at in random.integers(0, len(whole), 20):
        data = bytearray(whole)
        data[at] ^= 1 << int(random.integers(8))
        flipped.append(bytes(data))
    path = tmp_path / "broken.onnx"
    for data in (*cuts, *flipped):
        path.write_bytes(data)
        found = []
        for size in (0, 1 << 40):
            monkeypatch.setattr(wire, "SPILLED", size)
            try:
                found.append(memonger.load(path).proto.SerializeToString(deterministic=True))
            except memonger.LoadError:
                found.append(b"refused")
        assert found[0] == found[1]


def test_weights_in_two_files_are_told_apart(tmp_path: Path) -> None:
    """A model with data beside it, and weights inside as well."""
    onnx.save(_model(), tmp_path / "model.onnx", save_as_external_data=True, location="own.bin", size_threshold=1620)
    model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    assert [each.name for each in model.graph.initializer if each.external_data] == ["w", "bytes"]
    model.graph.initializer.append(numpy_helper.from_array(normal(3, 400), "more"))
    model.graph.node.append(helper.make_node("Identity", ["more"], ["z"], name="z"))
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [400]))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    loaded = memonger.load(tmp_path / "model.onnx")
    found = {str(t.name): os.path.dirname(t.path) for t in all_tensors(loaded.ir) if isinstance(t, ir.ExternalTensor)}
    assert found["w"] == found["bytes"] == str(tmp_path)
    assert found["more"] != str(tmp_path)
    plan, feed = memonger.search_plan(loaded, device="none", mode="inference"), {"x": normal(1, 4, 40)}
    plan.save(tmp_path / "planned.onnx")
    for planned in (plan, tmp_path / "planned.onnx"):
        assert np.array_equal(memonger.Session(planned).run(feed)["z"], normal(3, 400))
