"""Model files from strangers: no file outside the model's folder is read, no process ends, no traceback is shown."""

import base64
import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import AttributeProto, TensorProto, helper

import memonger
from memonger.errors import LoadError, PlanError
from memonger.graph.graph import from_model
from memonger.ir import onnx_process
from memonger.model import forward_model, load
from tests.support import training_models
from tests.support.stock import parse

SECRET = b"none of a model's" * 4


def _external(location: str, count: int = 16) -> TensorProto:
    tensor = TensorProto(name="t", data_type=TensorProto.FLOAT, dims=[count], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    return tensor


def _function(body: list[onnx.NodeProto]) -> onnx.ModelProto:
    """A model that calls a function without inputs, whose result is ``c``."""
    model = parse("g (float[16] x) => (float[16] y) { y = Add(x, c) }")
    model.graph.node.insert(0, helper.make_node("Called", [], ["c"], domain="own"))
    model.opset_import.add(domain="own", version=1)
    model.functions.append(helper.make_function("own", "Called", [], ["c"], body, [helper.make_opsetid("", 17)]))
    return model


def _in_function(location: str) -> onnx.ModelProto:
    return _function([helper.make_node("Constant", [], ["c"], value=_external(location))])


def _in_branch_of_function(location: str) -> onnx.ModelProto:
    constant = helper.make_node("Constant", [], ["o"], value=_external(location))
    branch = helper.make_graph([constant], "b", [], [helper.make_empty_tensor_value_info("o")])
    flag = helper.make_node("Constant", [], ["f"], value=helper.make_tensor("f", TensorProto.BOOL, [], [True]))
    return _function([flag, helper.make_node("If", ["f"], ["c"], then_branch=branch, else_branch=branch)])


def _in_list(location: str) -> onnx.ModelProto:
    model = parse("g (float[16] x) => (float[16] y) { y = Relu(x) }")
    model.graph.node[0].attribute.add(name="t", type=AttributeProto.TENSORS, tensors=[_external(location)])
    return model


PLACES = {"function": _in_function, "branch of a function": _in_branch_of_function, "list": _in_list}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for models, with a secret beside it and in the working directory."""
    (tmp_path / "home").mkdir()
    (tmp_path / "cwd").mkdir()
    for folder in (tmp_path, tmp_path / "cwd"):
        (folder / "secret.bin").write_bytes(SECRET)
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path / "home"


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize(
    "location", ["secret.bin", "../secret.bin", "/etc/passwd", "/dev/zero", "link", "", ".", "a\0b"]
)
def test_no_file_outside_the_models_folder_is_read(
    home: Path, place: Callable[[str], onnx.ModelProto], location: str
) -> None:
    (home / "link").symlink_to(home.parent / "secret.bin")
    (home / "model.onnx").write_bytes(place(location).SerializeToString())
    with pytest.raises(LoadError, match=r"outside the model's folder|is missing|points to no file"):
        memonger.load(home / "model.onnx")
    for given in ((home / "model.onnx").read_bytes(), onnx.load(home / "model.onnx", load_external_data=False)):
        with pytest.raises(LoadError, match="give the model's path"):
            memonger.load(given)


def test_a_function_body_reads_data_in_the_models_folder(home: Path) -> None:
    content = np.arange(16, dtype=np.float32)
    (home / "data.bin").write_bytes(content.tobytes())
    (home / "model.onnx").write_bytes(_in_function("data.bin").SerializeToString())
    plan = memonger.search_plan(home / "model.onnx", device="none", mode="inference")
    plan.save(home.parent / "planned.onnx")
    x = np.ones(16, np.float32)
    assert np.array_equal(memonger.Session(home.parent / "planned.onnx").run({"x": x})["y"], x + content)


def test_a_model_of_onnx_ir_leaves_open_where_the_data_of_functions_lies(home: Path) -> None:
    (home / "model.onnx").write_bytes(_in_function("secret.bin").SerializeToString())
    with pytest.raises(LoadError, match="give the model's path"):
        memonger.load(ir.load(home / "model.onnx"))


def test_the_forward_model_of_a_training_file_has_no_external_data(home: Path) -> None:
    training = memonger.differentiate(training_models.classifier(), loss="softmax_cross_entropy").ir
    data = zlib.compress(_in_function("secret.bin").SerializeToString())
    training.metadata_props[forward_model.KEY] = base64.b64encode(data).decode()
    with pytest.raises(PlanError, match=r"malformed: .* refers to external data"):
        forward_model.extract(training, "model")


def test_the_forward_model_of_a_training_file_holds_what_lay_beside(home: Path) -> None:
    model = parse("g (float[4, 4] x) => (float[4, 4] y) { a = MatMul(x, w)  y = Add(a, c) }")
    for name, shape in (("w", (4, 4)), ("c", (4,))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), name))
    onnx.save(model, home / "model.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    training = memonger.differentiate(home / "model.onnx", loss="mean_squared_error", wrt=["w"])
    (home / "w.bin").unlink()
    forward = forward_model.extract(training.ir, "model")
    assert forward is not None
    assert np.array_equal(forward.graph.initializers["c"].const_value.numpy(), np.ones(4, np.float32))


NEGATIVE = {
    "a pool over a small image": "g (float[1, 3, 2, 2] x) => (float[1, 3, a, b] y) {"
    " p = MaxPool <kernel_shape = [5, 5]> (x)  y = Relu(p) }",
    "a negative pad": "g (float[3] x) => (float[n] y) <int64[2] p = {-5, -5}> { a = Pad(x, p)  y = Relu(a) }",
    "a pad, then a slice": "g (float[3] x) => (float[n] y) <int64[2] p = {-5, -5}, int64[1] b = {0}, int64[1] e = {1}>"
    " { a = Pad(x, p)  y = Slice(a, b, e, b) }",
    "an input": "g (float[-3] x) => (float[-3] y) { y = Relu(x) }",
    "an input and its shape": "g (float[-3] x) => (float[n] y) { s = Shape(x)  y = ConstantOfShape(s) }",
    "an input left out": 'g (float[3, 3] x) => (float[3, 3] y) { y = EyeLike("") }',
}


def test_a_size_below_zero_that_a_body_declares_says_nothing() -> None:
    text = "g (float[3] x, bool b) => (float[n] y) { y = If(b) <then_branch = t () => (float[-3] o) { o = Neg(x) },"
    model = memonger.load(parse(f"{text} else_branch = e () => (float[-3] p) {{ p = Relu(x) }}> }}", opset=18))
    assert [value.shape.numpy() for value in model.graph.outputs if value.shape is not None] == [(3,)]


@pytest.mark.parametrize("name", NEGATIVE)
def test_what_would_end_the_process_is_refused(tmp_path: Path, name: str) -> None:
    model = parse(NEGATIVE[name].replace('EyeLike("")', "EyeLike(x)"), opset=18)
    if "left out" in name:
        model.graph.node[0].input[0] = ""
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(LoadError):
        memonger.load(path)
    with pytest.raises(LoadError):
        memonger.load(path.read_bytes())


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (".onnxtxt", '<ir_version: 8, opset_import: ["": 18]> g (bool c) => (float[2] y) {'
         + "y = If(c)<then_branch = t () => (float[2] y) {" * 30000),
        (".onnxtxt", '<ir_version: 8, opset_import: ["": 18]> g (' + "seq(" * 100000 + "float" + ")" * 100000 + " x)"),
        (".onnxtxt", "\xff\0"),
        (".textproto", "graph { node { attribute { g {" + "node { attribute { g {" * 5000),
        (".json", '{"graph":{"node":[' + '{"attribute":[{"g":{"node":[' * 5000),
        (".json", "[]"),
        (".json", "7"),
        (".onnx", "\x3a\x7f" * 9000),
    ],
    ids=["text", "types", "bytes", "textproto", "json", "json list", "json number", "protobuf"],
)  # fmt: skip
def test_deep_or_broken_files_of_every_format_are_refused(tmp_path: Path, suffix: str, text: str) -> None:
    path = tmp_path / f"model{suffix}"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(LoadError):
        memonger.load(path)


def test_a_model_in_onnx_text_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.onnxtxt"
    path.write_text('<ir_version: 8, opset_import: ["": 18]> g (float[2] x) => (float[2] y) { y = Relu(x) }')
    assert [node.op_type for node in memonger.load(path).graph] == ["Relu"]


HUGE = {
    "ConstantOfShape": "y = ConstantOfShape <value = int64[1] {1}> (s)",
    "Expand": "y = Expand(one, s)",
    "Tile": "y = Tile(two, s)",
    "Range": "y = Range(zero, many, step)",
    "Pad": "y = Pad(one, pads)",
    "broadcasting": "a = Reshape(v, r)  b = Reshape(v, q)  c = Reshape(v, p)  d = Max(a, b, c)  y = Reshape(d, m)",
    "Split": "y, k = Split <num_outputs = 1000000000> (v)",
    "nested": "t = ConstantOfShape <value = int64[1] {1000}> (three)  u = ConstantOfShape <value = int64[1] {1}> (t)"
    "  y = Reshape(u, m)",
}


def _huge(body: str) -> bytes:
    model = parse(
        "g (float[2] x) => (float[n] z) <int64[2] s = {2000000, 1000}, int64[1] one = {1}, int64[2, 1] two = {1, 2},"
        " int64 zero = {0}, int64 many = {2000000000}, int64 step = {1}, int64[2] pads = {1000000000, 1000000000},"
        " int64[3] r = {1024, 1, 1}, int64[3] q = {1, 1024, 1}, int64[3] p = {1, 1, 1024}, int64[1] m = {-1},"
        f" int64[1] three = {{3}}> {{ {body}  w = ReduceMax <keepdims = 0> (y)  f = Reshape(w, m)  z = Expand(x, f) }}",
        opset=18,
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.arange(1024), "v"))
    return bytes(model.SerializeToString())


def test_nothing_huge_is_evaluated(tmp_path: Path) -> None:
    for name, body in HUGE.items():
        (tmp_path / f"{name}.onnx").write_bytes(_huge(body))
    script = (
        "import sys, resource, memonger\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
        "for path in sys.argv[1:]:\n"
        "    print(path, flush=True)\n"
        "    try:\n        memonger.search_plan(path, mode='inference', device='none')\n"
        "    except memonger.MemongerError as error:\n        print('refused', error)\n"
        "    peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"  # of it alone
        "    print(peak.split()[1])\n"
        "    assert int(peak.split()[1]) < 1 << 20, path\n"  # KiB
    )
    command = [sys.executable, "-c", script, *(f"{name}.onnx" for name in HUGE)]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60 * len(HUGE), env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_model_packed_into_metadata_that_unpacks_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_model, "LARGEST", 1 << 20)
    training = memonger.differentiate(training_models.classifier(), loss="softmax_cross_entropy").ir
    training.metadata_props[forward_model.KEY] = base64.b64encode(zlib.compress(bytes(1 << 26))).decode()
    with pytest.raises(PlanError, match="cut short, or too large"):
        forward_model.extract(training, "model")


def _broken(change: Callable[[onnx.ModelProto], object], text: str = "y = Relu(x)") -> onnx.ModelProto:
    model = parse(f"g (float[2] x) => (float[n] y) {{ {text} }}", opset=18)
    change(model)
    return model


def _dims(*dims: int) -> Callable[[onnx.ModelProto], object]:
    def change(model: onnx.ModelProto) -> None:
        model.graph.initializer.append(TensorProto(name="i", data_type=TensorProto.INT64, dims=dims, raw_data=b""))

    return change


BROKEN: dict[str, Callable[[], onnx.ModelProto]] = {
    "a Constant without a value": lambda: _broken(
        lambda m: m.graph.node.insert(0, helper.make_node("Constant", [], ["c"])), "y = Add(x, c)"
    ),
    "a Constant of two outputs": lambda: _broken(
        lambda m: m.graph.node.insert(0, helper.make_node("Constant", [], ["c", "d"], value_int=1)), "y = Add(x, c)"
    ),
    "a Shape without inputs": lambda: _broken(lambda m: m.graph.node[0].ClearField("input"), "y = Shape(x)"),
    "an attribute of another type": lambda: _broken(
        lambda m: m.graph.node[0].attribute.add(name="start", type=AttributeProto.STRING, s=b"x"), "y = Shape(x)"
    ),
    "an attribute without a type": lambda: _broken(
        lambda m: m.graph.node[0].attribute.add(name="alpha", f=1.0), "y = Elu(x)"
    ),
    "an attribute of a function": lambda: _broken(
        lambda m: m.graph.node[0].attribute.add(name="alpha", type=AttributeProto.FLOAT, ref_attr_name="a"),
        "y = Elu(x)",
    ),
    "a subgraph that isn't there": lambda: _broken(
        lambda m: m.graph.node[0].attribute.add(name="then_branch", type=AttributeProto.GRAPH), "y = If(x)"
    ),
    "a tensor without its elements": lambda: _broken(_dims(2), "y = Expand(x, i)"),
    "a tensor of 10**12 elements": lambda: _broken(_dims(10**12), "y = Expand(x, i)"),
    "a tensor of 2**80 elements": lambda: _broken(_dims(2**40, 2**40), "y = Expand(x, i)"),
    "a tensor of no type": lambda: _broken(
        lambda m: m.graph.initializer.append(TensorProto(name="i", data_type=-1, dims=[1], raw_data=b"1")),  # type: ignore[arg-type]
        "y = Expand(x, i)",
    ),
    "a tensor of -1 elements": lambda: _broken(_dims(-1), "y = Expand(x, i)"),
    "an input of 2**62 bytes": lambda: parse("g (float[4611686018427387904] x) => (float[n] y) { y = Relu(x) }"),
    "an opset past int32": lambda: _broken(lambda m: m.opset_import.add(domain="ai.onnx.ml", version=2**33)),
    "an opset below 0": lambda: _broken(lambda m: m.opset_import.add(domain="ai.onnx.ml", version=-1)),
    "types that contradict": lambda: parse("g (int32[2] x, float[2] z) => (float[n] y) { y = Add(x, z) }"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_models_are_refused(tmp_path: Path, name: str) -> None:
    model = BROKEN[name]()
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    for given in (tmp_path / "model.onnx", model.SerializeToString(), model):
        with pytest.raises(LoadError):
            memonger.load(given)


@pytest.mark.parametrize("name", ["a\0b", "two\nlines", "\x1b[31mred", "x" * 5000, " "])
def test_names_may_be_anything(tmp_path: Path, name: str) -> None:
    model = parse("g (float[2] x) => (float[2] y) { a = Relu(x)  y = Neg(a) }")
    model.graph.node[0].output[0] = model.graph.node[1].input[0] = model.graph.node[0].name = name
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    plan = memonger.search_plan(tmp_path / "model.onnx", mode="inference", device="none")
    assert name in plan.graph.values


def test_sizes_that_cannot_be_added_up_are_refused() -> None:
    text = f"g (float[{2**57}] x) => (float[n] y) {{ {' '.join(f'v{k} = Relu(x)' for k in range(9))} y = Neg(v0) }}"
    with pytest.raises(PlanError, match="at most 2\\*\\*62 can be planned"):
        from_model(memonger.load(parse(text)).ir)


def test_memory_that_runs_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(load, "infer_shapes", full)
    with pytest.raises(LoadError, match="not enough memory"):
        memonger.load(training_models.classifier())


# The process in which onnx reads models from outside.

SLICED = "g (float[8] x) => (float[n] y) <int64[1] b = {0}, int64[1] e = {3}> { y = Slice(x, b, e, b) }"


def _children() -> int:
    assert onnx_process._CHILD is not None
    return onnx_process._CHILD[1].pid


def test_one_process_reads_many_models_and_another_follows_when_it_dies(tmp_path: Path) -> None:
    good = parse(SLICED, opset=18).SerializeToString()
    memonger.load(good)
    first = _children()
    memonger.load(good)
    assert _children() == first
    with pytest.raises(LoadError, match="onnx crashes on it"):
        memonger.load(parse(NEGATIVE["a pad, then a slice"], opset=18).SerializeToString())
    assert memonger.load(good).graph.outputs[0].shape == (3,)
    assert _children() != first


def test_threads_share_the_process() -> None:
    good = parse(SLICED, opset=18).SerializeToString()
    with ThreadPoolExecutor(4) as pool:
        shapes = list(pool.map(lambda _: memonger.load(good).graph.outputs[0].shape, range(12)))
    assert shapes == [(3,)] * 12


def test_where_no_process_can_be_started_this_one_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_process, "_CHILD", None)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert memonger.load(parse(SLICED, opset=18).SerializeToString()).graph.outputs[0].shape == (3,)


def test_plain_networks_and_models_in_memory_need_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_process, "_ask", None)
    memonger.load(training_models.classifier().SerializeToString())
    memonger.load(parse(SLICED, opset=18))
