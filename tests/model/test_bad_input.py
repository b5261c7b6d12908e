"""Bad input, through the command line: each kind has its message and exit status, and leaves no file behind."""

import os
import stat
import struct
import zlib

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.support.bad_input import CHAIN, PLAN, Place, contents, invoke
from tests.support.stock import parse

DEVICES = pytest.mark.parametrize("device", ["none", "cpu"])


def _png() -> bytes:
    chunk = b"IHDR" + struct.pack(">IIBBBBB", 1, 1, 8, 6, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))


NOT_ONNX = {
    "random bytes": ("model.onnx", np.random.default_rng(0).bytes(4000)),
    "text": ("model.onnx", b"a text, and no model\n" * 50),
    "nothing": ("model.onnx", b""),
    "a picture": ("model.onnx", _png()),
    "zeros": ("model.onnx", bytes(100)),
    "other JSON": ("model.json", b'{"graph": 3}'),
    "no JSON": ("model.json", b'{"graph":'),
    "other text format": ("model.textproto", b"garbage <"),
}


@DEVICES
@pytest.mark.parametrize(("name", "content"), NOT_ONNX.values(), ids=NOT_ONNX)
def test_not_onnx(place: Place, name: str, content: bytes, device: str) -> None:
    path = place.write(name, content)
    place.fails(
        *PLAN, path, "-o", place.folder / "out.onnx", "--device", device, words=(str(path), "not an ONNX model")
    )


@pytest.mark.parametrize("command", ["inspect", "verify", "run"])
def test_not_onnx_for_the_other_commands(place: Place, command: str) -> None:
    place.fails(command, place.write("model.onnx", _png()), words=("model.onnx", "not an ONNX model"))


def test_no_such_file_and_a_folder(place: Place) -> None:
    for command in ("plan", "inspect", "verify", "run"):
        place.fails(command, place.folder / "none.onnx", words=("none.onnx", "no such file"))
        place.fails(command, place.folder, words=(str(place.folder), "is a folder"))


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.999])
def test_cut_short(place: Place, part: float) -> None:
    model = parse(CHAIN)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.arange(5000.0), "unused"))
    data = model.SerializeToString()
    path = place.write("model.onnx", data[: int(len(data) * part)])
    place.fails(*PLAN, path, "--batch", 2, "-o", place.folder / "out.onnx", words=("model.onnx", "cut short"))


@DEVICES
def test_external_data_missing(place: Place, device: str) -> None:
    path = place.weighted()
    (place.folder / "weights.bin").unlink()
    words = ("external data of tensor 'w' is missing", "weights.bin")
    place.fails(*PLAN, path, "--device", device, "-o", place.folder / "out.onnx", words=words)


@DEVICES
def test_external_data_cut_short(place: Place, device: str) -> None:
    path = place.weighted()
    os.truncate(place.folder / "weights.bin", 1000)
    words = ("external data of tensor 'w' is cut short", "weights.bin", "1000 bytes", "needs 1024")
    place.fails(*PLAN, path, "--device", device, "-o", place.folder / "out.onnx", words=words)


@pytest.mark.parametrize("key", ["length", "offset"])
def test_external_data_with_a_wrong_extent(place: Place, key: str) -> None:
    path = place.weighted()
    model = onnx.load(path, load_external_data=False)
    entries = {entry.key: entry for entry in model.graph.initializer[0].external_data}
    if "offset" not in entries:
        model.graph.initializer[0].external_data.add(key="offset")
        entries["offset"] = model.graph.initializer[0].external_data[-1]
    entries[key].value = "512"
    place.write("model.onnx", model)
    place.fails(*PLAN, path, words=("tensor 'w' is cut short", "needs 1024"))


@DEVICES
@pytest.mark.parametrize("way", ["above", "absolute", "link", "linked folder"])
def test_external_data_outside_the_models_folder(place: Place, way: str, device: str) -> None:
    path = place.weighted()
    outside = place.folder.parent / "outside"
    outside.mkdir()
    (place.folder / "weights.bin").rename(outside / "weights.bin")
    location = {"above": "../outside/weights.bin", "absolute": str(outside / "weights.bin"), "link": "weights.bin",
                "linked folder": "linked/weights.bin"}[way]  # fmt: skip
    if way == "link":
        (place.folder / "weights.bin").symlink_to(outside / "weights.bin")
    if way == "linked folder":
        (place.folder / "linked").symlink_to(outside)
    model = onnx.load(path, load_external_data=False)
    next(e for e in model.graph.initializer[0].external_data if e.key == "location").value = location
    place.write("model.onnx", model)
    words = ("tensor 'w'", "outside the model's folder", location)
    place.fails(*PLAN, path, "--device", device, "-o", place.folder / "out.onnx", words=words)


def test_external_data_outside_the_models_folder_in_a_constant_node(place: Place) -> None:
    tensor = TensorProto(name="secret", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="../secret.bin")
    (place.folder.parent / "secret.bin").write_bytes(bytes(16))
    model = parse("g (float[4] x) => (float[4] y) { y = Add(x, c) }")
    model.graph.node.insert(0, helper.make_node("Constant", [], ["c"], value=tensor))
    place.fails(*PLAN, place.write("model.onnx", model), words=("outside the model's folder", "../secret.bin"))


@DEVICES
def test_unbound_dimension(place: Place, device: str) -> None:
    text = "g (float[B, S] x) => (float[B, S] y) { y = Relu(x) }"
    path, out = place.model(text), place.folder / "out.onnx"
    common = (*PLAN, path, "-o", out, "--device", device)
    place.fails(*common, words=("dimension 1 of input 'x'", "'S'", "--dim S=64"))
    place.fails(*common, "--batch", 2, words=("dimension 1 of input 'x'", "'S'", "--dim S=64"))


@DEVICES
def test_wrong_dimension_names_and_sizes(place: Place, device: str) -> None:
    path = place.model()
    common = (*PLAN, path, "-o", place.folder / "out.onnx", "--device", device)
    place.fails(*common, "--dim", "M=2", words=("no dimension named 'M'", "it has 'N'"))
    place.fails(*common, "--batch", 2, "--dim", "M=2", words=("no dimension named 'M'", "it has 'N'"))
    place.fails(*common, "--dim", "N=2", "--dim", "x[1]=9", words=("x[1] is 8 in the model", "can't be set to 9"))
    fixed = place.model(CHAIN.replace("[N,", "[4,"), "fixed.onnx")
    place.fails(*PLAN, fixed, "--batch", 2, words=("the batch can't be 2", "'x' has 4"))
    place.fails(*PLAN, fixed, "--dim", "N=2", words=("no dimension named 'N'", "fixed"))


@pytest.mark.parametrize("size", ["N", "N=", "N=-1", "=2"])
def test_a_size_that_is_none_is_wrong_usage(place: Place, size: str) -> None:
    place.fails(*PLAN, place.model(), "--dim", size, words=("--dim", size, "NAME=N"), status=2)


def test_a_sum_of_what_is_no_dimension_is_wrong_usage(place: Place) -> None:
    place.fails(*PLAN, place.model(), "--dim", "N=two", words=("--dim", "'N'", "'two'"), status=2)


def test_wrong_usage(place: Place) -> None:
    path = place.model()
    place.fails(*PLAN, path, "--batch", 0, words=("--batch",), status=2)
    place.fails("plan", words=("MODEL",), status=2)
    place.fails("plan", path, "--mode", "dreaming", words=("--mode", "inference"), status=2)
    place.fails(*PLAN, path, "--device", "abacus", words=("'abacus' is not a device", "none, cpu, cuda"))
    place.fails("dance", words=("dance",), status=2)
    place.fails("run", path, "--inputs", place.folder / "none.npz", words=("--inputs", "none.npz"), status=2)


@DEVICES
def test_unknown_operators_and_domains(place: Place, device: str) -> None:
    common = ("-o", place.folder / "out.onnx", "--device", device)
    op = place.model("g (float[2] x) => (float[2] y) { [the_node] y = Frobnicate(x) }", "op.onnx")
    place.fails(*PLAN, op, *common, words=("'the_node'", "unknown operator", "'Frobnicate'", "opset 17"))
    domain = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17, "acme": 1]> g (float[2] x) => (float[2] y) { y = acme.Frob(x) }'
    )
    path = place.write("domain.onnx", domain)
    place.fails(*PLAN, path, *common, words=("Frob", "domain 'acme'", "neither ONNX nor onnxruntime"))
    newer = place.model("g (float[2] x) => (float[2] y) { y = Gelu(x) }", "newer.onnx")
    place.fails(*PLAN, newer, *common, words=("unknown operator", "'Gelu'", "opset 17"))
    inside = place.model(
        "g (float[2] x, bool c) => (float[2] y) { y = If(c) <then_branch = t () => (float[2] o) { o = Frob(x) }, "
        "else_branch = e () => (float[2] p) { p = Neg(x) }> }",
        "inside.onnx",
    )
    place.fails(*PLAN, inside, *common, words=("unknown operator", "'Frob'"))


def test_an_operator_onnxruntime_does_not_have(place: Place) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> g (float[2] x) => (float[2] y) {'
        " y = com.microsoft.Frobnicate(x) }"
    )
    path = place.write("model.onnx", model)
    place.fails(*PLAN, path, "--device", "cpu", words=("onnxruntime refuses the model", "com.microsoft:Frobnicate"))


@DEVICES
def test_versions_too_new_to_know(place: Place, device: str) -> None:
    common = ("-o", place.folder / "out.onnx", "--device", device)
    newer = place.model("g (float[2] x) => (float[2] y) { y = Relu(x) }", "opset.onnx", opset=99)
    place.fails(*PLAN, newer, *common, words=("opset 99", "Upgrade onnx"))
    newer = place.model("g (float[2] x) => (float[2] y) { y = Relu(x) }", "ir.onnx", ir_version=99)
    place.fails(*PLAN, newer, *common, words=("IR version 99", "Upgrade onnx"))


BROKEN_GRAPHS = {
    "empty": ("g () => () { }", ("empty graph", "no nodes")),
    "empty with an input": ("g (float[2] x) => () { }", ("empty graph",)),
    "no outputs": ("g (float[2] x) => () { y = Relu(x) }", ("no outputs",)),
    "cycle": (
        "g (float[2] x) => (float[2] y) { [one] a = Add(x, b)  [two] b = Relu(a)  y = Neg(b) }",
        ("cycle", "'one'", "'two'"),
    ),
    "cycle of one": ("g (float[2] x) => (float[2] y) { [own] y = Add(x, y) }", ("cycle", "'own'")),
    "cycle through a subgraph": (
        "g (float[2] x, bool c) => (float[2] y) { [cond] a = If(c) <then_branch = t () => (float[2] o) { o = Neg(b) }, "
        "else_branch = e () => (float[2] p) { p = Neg(x) }>  [two] b = Relu(a)  y = Neg(b) }",
        ("cycle", "'cond'", "'two'"),
    ),
    "an input nobody writes": ("g (float[2] x) => (float[2] y) { [it] y = Add(x, ghost) }", ("'it'", "'ghost'")),
    "an output nobody writes": ("g (float[2] x) => (float[2] y) { z = Relu(x) }", ("output 'y'",)),
    "a value written twice": ("g (float[2] x) => (float[2] y) { y = Relu(x)  y = Neg(x) }", ("'y'", "redeclared")),
    "two inputs of one name": ("g (float[2] x, float[2] x) => (float[2] y) { y = Neg(x) }", ("two inputs", "'x'")),
    "shapes that clash": (
        "g (float[2, 8] x, float[3, 9] z) => (float[2, 8] y) { y = Add(x, z) }",
        ("contradict", "Add", "Incompatible dimensions"),
    ),
}


@DEVICES
@pytest.mark.parametrize(("text", "words"), BROKEN_GRAPHS.values(), ids=BROKEN_GRAPHS)
def test_broken_graphs(place: Place, text: str, words: tuple[str, ...], device: str) -> None:
    path = place.model(text)
    place.fails(*PLAN, path, "-o", place.folder / "out.onnx", "--device", device, words=(str(path), *words))


@DEVICES
def test_outputs_that_cannot_be_written(place: Place, device: str) -> None:
    path = place.model()
    place.write("file", b"not a folder")
    common = (*PLAN, path, "--batch", 2, "--device", device, "-o")
    place.fails(*common, place.folder / "no" / "out.onnx", words=("no/out.onnx can't be written", "there is no folder"))
    place.fails(*common, place.folder / "file" / "out.onnx", words=("can't be written", "there is no folder"))
    place.fails(*common, place.folder, words=("can't be written", "Is a directory"))
    place.fails(*common, "/proc/nope", words=("/proc/nope can't be written",))


@DEVICES
def test_a_full_disk_is_told_and_stays_a_device(place: Place, device: str) -> None:
    words = ("/dev/full can't be written", "No space left")
    place.fails(*PLAN, place.model(), "--batch", 2, "--device", device, "-o", "/dev/full", words=words)
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


@DEVICES
def test_a_failed_plan_leaves_the_existing_output_as_it_was(place: Place, device: str) -> None:
    old = place.write("out.onnx", b"something else")
    path = place.model()
    place.fails(*PLAN, path, "--device", device, "-o", old, "--dim", "M=2", "--force", words=("'M'",))
    assert invoke(*PLAN, path, "--device", device, "-o", old, "--force", "--batch", 2)[0] == 0
    before = old.read_bytes()
    place.fails(*PLAN, path, "--device", device, "-o", old, "--dim", "M=2", "--force", words=("'M'",))
    assert old.read_bytes() == before
    assert set(contents(place.folder)) == {"model.onnx", "out.onnx"}


@pytest.mark.parametrize(
    ("name", "content"), [("a.npz", b"junk"), ("b.npz", b""), ("c.npz", b"PK\x03\x04junk"), ("d.npz", b"\x93NUMPY")]
)
def test_inputs_that_are_no_npz(place: Place, name: str, content: bytes) -> None:
    path = place.write(name, content)
    place.fails("run", place.model(), "--batch", 2, "--inputs", path, words=(name, "not an .npz"))


def test_inputs_that_do_not_fit(place: Place) -> None:
    path = place.model()
    cases: list[tuple[dict[str, np.ndarray], tuple[str, ...]]] = [
        ({"z": np.zeros((2, 8), np.float32)}, ("'x' is missing",)),
        ({"x": np.zeros((2, 8))}, ("'x'", "float64", "float32")),
        ({"x": np.zeros((2, 8, 1), np.float32)}, ("'x'", "2 dimensions")),
        ({"x": np.zeros((2, 9), np.float32)}, ("'x'", "[2, 9]", "[2, 8]")),
        ({"x": np.array([{}], object)}, (".npz", "Object arrays")),
    ]
    for number, (arrays, words) in enumerate(cases):
        np.savez(place.folder / f"{number}.npz", **arrays)
        place.fails("run", path, "--dim", "N=2", "--inputs", place.folder / f"{number}.npz", words=words)
