"""External data: memory-mapped, referred to where a planned file lies beside it, copied elsewhere."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import memonger
from memonger.runtime.weights import LEND_ALL, message
from tests.support.stock import normal, parse, run_stock

WIDE = 13_400  # three products' weights are just above 2 GiB
LAYERS = 3
SIZE = 4 * WIDE * WIDE

PLAN_AND_SAVE = """
import json, sys
from pathlib import Path
import memonger
plan = memonger.search_plan(sys.argv[1], batch=8, device="none", mode="inference")
plan.save(sys.argv[2])
again = memonger.Plan.load(sys.argv[2])
# Not ru_maxrss: a child begins with its parent's.
peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
print(json.dumps({"peak": peak, "parameters": again.parameter_bytes, "arena": again.arena_bytes}))
"""


def _external(name: str, file: str, dims: list[int], offset: int) -> onnx.TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL)
    size = 4 * int(np.prod(dims))
    for key, value in (("location", file), ("offset", str(offset)), ("length", str(size))):
        tensor.external_data.add(key=key, value=value)
    return tensor


def _huge(folder: Path) -> Path:
    """Products with weights of 2.01 GiB (a message holds 2), whose data file takes no room: it is one hole.

    All weights lie at the same bytes of it: reading a hole for the first time takes most of the time.
    """
    nodes = [helper.make_node("MatMul", [f"v{i}", f"w{i}"], [f"v{i + 1}"], name=f"mul{i}") for i in range(LAYERS)]
    weights = [_external(f"w{i}", "huge.bin", [WIDE, WIDE], 0) for i in range(LAYERS)]
    ends = [helper.make_tensor_value_info(f"v{i}", TensorProto.FLOAT, ["batch", WIDE]) for i in (0, LAYERS)]
    graph = helper.make_graph(nodes, "huge", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "huge.onnx")
    (folder / "huge.bin").touch()
    os.truncate(folder / "huge.bin", SIZE)
    return folder / "huge.onnx"


def test_a_model_of_2_gib_is_planned_and_saved_in_under_1_gb(tmp_path: Path) -> None:
    path, planned = _huge(tmp_path), tmp_path / "planned.onnx"
    command = [sys.executable, "-c", PLAN_AND_SAVE, str(path), str(planned)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert told["parameters"] == LAYERS * SIZE
    assert told["arena"] == 2 * 8 * WIDE * 4
    assert told["peak"] < 1e9
    assert planned.stat().st_size < 100_000
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["huge.bin", "huge.onnx", "planned.onnx"]
    saved = onnx.load(planned, load_external_data=False)
    assert [tensor.external_data[0].value for tensor in saved.graph.initializer] == ["huge.bin"] * LAYERS
    onnx.checker.check_model(str(planned))


def _small(folder: Path, location: str = "weights.bin") -> onnx.ModelProto:
    model = parse("g (float[N, 16] x) => (float[N, 16] y) { a = MatMul(x, w)  b = Relu(a)  y = MatMul(b, v) }")
    for seed, name in enumerate("wv"):
        model.graph.initializer.append(onnx.numpy_helper.from_array(normal(seed, 16, 16), name))
    whole = onnx.ModelProto.FromString(model.SerializeToString())
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location=location, size_threshold=0)
    return whole


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_a_planned_file_in_another_folder_holds_its_weights_itself(tmp_path: Path, device: str) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir()
    away.mkdir()
    whole = _small(home)
    memonger.search_plan(home / "model.onnx", batch=4, device=device, mode="inference").save(away / "planned.onnx")
    for entry in home.iterdir():
        entry.unlink()
    assert [entry.name for entry in away.iterdir()] == ["planned.onnx"]
    if device == "none":
        onnx.checker.check_model(str(away / "planned.onnx"))
    session = memonger.Session(memonger.Plan.load(away / "planned.onnx"))
    level = "ORT_DISABLE_ALL" if device == "none" else "ORT_ENABLE_ALL"
    for seed in (5, 6):
        feed = {"x": normal(seed, 4, 16)}
        assert np.array_equal(session.run(feed)["y"], run_stock(whole, feed, level)["y"])


def test_a_planned_file_beside_the_data_refers_to_it(tmp_path: Path) -> None:
    whole = _small(tmp_path)
    memonger.search_plan(tmp_path / "model.onnx", batch=4, device="none", mode="inference").save(
        tmp_path / "planned.onnx"
    )
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model.onnx", "planned.onnx", "weights.bin"]
    saved = onnx.load(tmp_path / "planned.onnx", load_external_data=False)
    assert all(tensor.data_location == TensorProto.EXTERNAL for tensor in saved.graph.initializer)
    feed = {"x": normal(5, 4, 16)}
    session = memonger.Session(tmp_path / "planned.onnx")
    assert np.array_equal(session.run(feed)["y"], run_stock(whole, feed, "ORT_DISABLE_ALL")["y"])


def test_data_in_a_folder_below_the_model_is_found(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    whole = _small(tmp_path, "data/weights.bin")
    memonger.search_plan(tmp_path / "model.onnx", batch=4, device="none", mode="inference").save(
        tmp_path / "planned.onnx"
    )
    feed = {"x": normal(5, 4, 16)}
    session = memonger.Session(tmp_path / "planned.onnx")
    assert np.array_equal(session.run(feed)["y"], run_stock(whole, feed, "ORT_DISABLE_ALL")["y"])


def test_weights_too_large_for_one_message_go_into_a_file_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memonger.ir.save, "INLINE_LIMIT", 1000)
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir()
    away.mkdir()
    whole = _small(home)
    memonger.search_plan(home / "model.onnx", batch=4, device="none", mode="inference").save(away / "planned.onnx")
    model, data = sorted(entry.name for entry in away.iterdir())
    assert model == "planned.onnx"
    assert re.fullmatch(r"planned\.onnx\.[0-9a-f]{16}\.data", data)
    onnx.checker.check_model(str(away / "planned.onnx"))
    feed = {"x": normal(5, 4, 16)}
    session = memonger.Session(away / "planned.onnx")
    assert np.array_equal(session.run(feed)["y"], run_stock(whole, feed, "ORT_DISABLE_ALL")["y"])


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_sizes_of_many_parts_stay_in_the_model(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Onnxruntime infers shapes from them, and refuses a model where they lie elsewhere."""
    parts = 200
    names = ", ".join(f"p{number}" for number in range(parts))
    model = parse(f"g (float[4, {2 * parts}] x) => (float[4, 2] y) {{ {names} = Split <axis = 1> (x, sizes) "
                  f"s = Sum({names}) w = Mul(s, weights) y = Relu(w) }}")  # fmt: skip
    constants = {"sizes": np.full(parts, 2), "weights": normal(3, 4, 2)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    monkeypatch.setattr(memonger.ir.save, "INLINE_LIMIT", 1000)
    plan, feed = memonger.search_plan(model, device=device), {"x": normal(5, 4, 2 * parts)}
    expected = run_stock(model, feed, "ORT_DISABLE_ALL")["y"]
    assert np.array_equal(memonger.Session(plan).run(feed)["y"], expected)
    plan.save(tmp_path / "planned.onnx")
    assert "lent" not in message(plan.model, LEND_ALL).data.decode("latin-1")
    session = onnxruntime.InferenceSession(tmp_path / "planned.onnx", providers=["CPUExecutionProvider"])
    assert np.array_equal(session.run(["y"], feed)[0], expected)


@pytest.mark.parametrize("in_subgraph", [False, True])
def test_a_constant_node_with_external_data_travels_too(tmp_path: Path, in_subgraph: bool) -> None:
    body = "o = Add(x, c)" if in_subgraph else "o = Identity(x)"
    model = parse(
        f"g (float[64] x, bool b) => (float[64] y) {{ z = If(b) <then_branch = t () => (float[64] o) {{ {body} }}, "
        f"else_branch = e () => (float[64] p) {{ p = Neg(x) }}>  y = Relu(z) }}"
    )
    holder = model.graph.node[0].attribute[0].g if in_subgraph else model.graph
    if not in_subgraph:
        model.graph.node.insert(0, helper.make_node("Add", ["x", "c"], ["k"]))
        model.graph.node[1].attribute[0].g.node[0].input[0] = "k"
    holder.node.insert(0, helper.make_node("Constant", [], ["c"], value=_external("c", "c.bin", [64], 0)))
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir()
    away.mkdir()
    constant = normal(3, 64)
    (home / "c.bin").write_bytes(constant.tobytes())
    (home / "model.onnx").write_bytes(model.SerializeToString())
    memonger.search_plan(home / "model.onnx", device="none", mode="inference").save(away / "planned.onnx")
    (home / "c.bin").unlink()
    x = normal(5, 64)
    y = memonger.Session(away / "planned.onnx").run({"x": x, "b": np.array(True)})["y"]
    assert np.array_equal(y, np.maximum(x + constant, 0))


def test_bytes_with_external_data_are_refused(tmp_path: Path) -> None:
    _small(tmp_path)
    data = (tmp_path / "model.onnx").read_bytes()
    for source in (data, onnx.ModelProto.FromString(data)):
        with pytest.raises(memonger.LoadError, match="not where they lie: give the model's path"):
            memonger.load(source, batch=4)
