"""Models as other toolchains, hubs and package managers leave them, beside stock onnxruntime on the same files."""

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi import onnxruntime_pybind11_state as native

import memonger
from memonger.errors import LoadError
from memonger.ir.element_types import ElementType
from memonger.runtime import feeds
from memonger.shapes import inference
from tests.support.networks import model_of, run_stock, same_bits, stock
from tests.support.stock import normal, parse

DEVICES = pytest.mark.parametrize("device", ["cpu", "none"])
NODE, INFO, TEXT = helper.make_node, helper.make_tensor_value_info, TensorProto.STRING
X = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)


def _agree(model: onnx.ModelProto, feeds: dict[str, Any], device: str, **options: Any) -> memonger.Plan:
    """Plan a model, run it twice, and compare with stock onnxruntime."""
    plan = memonger.search_plan(model, mode="inference", device=device, **options)
    session, theirs = memonger.Session(plan), run_stock(stock(model), feeds)
    for _ in range(2):
        ours = session.run(feeds)
        assert ours.keys() == theirs.keys()
        for name, array in theirs.items():
            if isinstance(array, np.ndarray) and array.dtype != object:
                assert same_bits({name: ours[name]}, {name: array})
            else:
                assert np.array_equal(ours[name], array)
    return plan


def _model(nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: list[Any], ml: int = 3) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", ml)], ir_version=8
    )


def _numbers(name: str, *content: Any) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(content, np.int64), name)


@DEVICES
def test_a_large_initializer_that_nobody_reads(device: str) -> None:
    model = model_of([NODE("Relu", ["x"], ["y"])], {"x": [8, 64]}, {"y": [8, 64]}, unused=np.zeros(2000, np.float32))
    assert _agree(model, {"x": X}, device).parameter_bytes in (0, 8000)


@DEVICES
@pytest.mark.parametrize("given", [{"batch": 8}, {"dims": {"x[0]": 8}}])
def test_a_size_of_minus_one_is_open(given: dict[str, Any], device: str) -> None:
    model = model_of([NODE("Relu", ["x"], ["y"])], {"x": [-1, 64]}, {"y": [-1, 64]})
    assert _agree(model, {"x": X}, device, **given).batch in (8, None)
    assert memonger.search_plan(model, mode="inference", device=device).batch == 1


@DEVICES
def test_a_size_of_0_that_an_output_declares_says_nothing(device: str) -> None:
    model = model_of([NODE("Relu", ["x"], ["y"])], {"x": [8, 64]}, {"y": [0, 64]})
    assert _agree(model, {"x": X}, device).arena_bytes == X.nbytes


@DEVICES
def test_text_goes_through_any_operator(device: str) -> None:
    words = numpy_helper.from_array(np.array([f"word{k}" for k in range(600)], object), "words")
    nodes = [
        NODE("Gather", ["words", "rows"], ["a"]), NODE("Concat", ["s", "a"], ["b"], axis=0),
        NODE("Split", ["b"], ["c", "d"], num_outputs=2, axis=0), NODE("Concat", ["d", "c"], ["e"], axis=0),
        NODE("Reshape", ["e", "flat"], ["f"]), NODE("Slice", ["f", "zero", "five"], ["g"]),
        NODE("Transpose", ["e"], ["h"]),
        NODE("LabelEncoder", ["e"], ["y"], domain="ai.onnx.ml", keys_strings=["a", "word5"], values_floats=[1.0, 2.0]),
    ]  # fmt: skip
    constants = [
        words,
        _numbers("rows", [5, 599], [7, 5]),
        _numbers("flat", 8),
        _numbers("zero", 0),
        _numbers("five", 5),
    ]
    outputs = [INFO("g", TEXT, None), INFO("h", TEXT, None), INFO("y", TensorProto.FLOAT, None)]
    model = _model(nodes, [INFO("s", TEXT, [2, 2])], outputs, constants)
    _agree(model, {"s": np.array([["a", "x"], ["b", "a"]], object)}, device)


@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 1)])
def test_texts_of_any_shape_are_fed(shape: tuple[int, ...]) -> None:
    given = np.array(["", "a", "ü€"] * 2, object)[: math.prod(shape)].reshape(shape)
    value = feeds.to_ortvalue(given, ElementType.STRING)
    assert value.numpy().tolist() == given.tolist()
    assert tuple(value.shape()) == shape


def test_what_is_no_text_is_refused() -> None:
    node = NODE("LabelEncoder", ["s"], ["y"], domain="ai.onnx.ml", keys_strings=["a"], values_floats=[1.0])
    model = _model([node], [INFO("s", TEXT, [2])], [INFO("y", TensorProto.FLOAT, None)], [])
    session = memonger.Session(memonger.search_plan(model, mode="inference"))
    with pytest.raises(memonger.SessionError, match=r"'s' has type int64; .* takes text: an array of strings"):
        session.run({"s": np.zeros(2, np.int64)})
    with pytest.raises(memonger.SessionError, match="can't be fed as STRING: int is among its elements, not text"):
        session.run({"s": np.array(["a", 1], object)})


TREE = {
    "nodes_falsenodeids": [2, 0, 0], "nodes_featureids": [0, 0, 0], "nodes_hitrates": [1.0, 1.0, 1.0],
    "nodes_missing_value_tracks_true": [0, 0, 0], "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
    "nodes_nodeids": [0, 1, 2], "nodes_treeids": [0, 0, 0], "nodes_truenodeids": [1, 0, 0],
    "nodes_values": [0.5, 0.0, 0.0], "post_transform": "NONE",
}  # fmt: skip
CLASSES = {"class_ids": [0, 1], "class_nodeids": [1, 2], "class_treeids": [0, 0], "class_weights": [1.0, 0.75], **TREE}


@DEVICES
@pytest.mark.parametrize("labels", [{"classlabels_int64s": [3, 7]}, {"classlabels_strings": ["no", "yes"]}])
@pytest.mark.parametrize("returns_table", [False, True])
def test_trees_of_the_first_set_and_their_dictionaries(
    labels: dict[str, Any], returns_table: bool, device: str, tmp_path: Path
) -> None:
    """As skl2onnx writes a classifier: scores as a list of dictionaries, and perhaps as a table as well."""
    key = TEXT if "classlabels_strings" in labels else TensorProto.INT64
    scores = onnx.ValueInfoProto(name="scores")
    one = helper.make_map_type_proto(key, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    scores.type.CopyFrom(helper.make_sequence_type_proto(one))
    nodes = [
        NODE("TreeEnsembleClassifier", ["x"], ["label", "table"], domain="ai.onnx.ml", **CLASSES, **labels),
        NODE("ZipMap", ["table"], ["scores"], domain="ai.onnx.ml", **labels),
    ]
    outputs = [INFO("label", key, [None]), scores, *([INFO("table", TensorProto.FLOAT, None)] if returns_table else [])]
    model = _model(nodes, [INFO("x", TensorProto.FLOAT, ["N", 1])], outputs, [], ml=1)
    before, x = model.SerializeToString(), np.array([[0], [1], [0.5], [3]], np.float32)
    plan = _agree(model, {"x": x}, device, batch=4)
    assert model.SerializeToString() == before
    plan.save(tmp_path / "planned.onnx")
    reread = memonger.Session(tmp_path / "planned.onnx").run({"x": x})
    assert reread["scores"] == run_stock(stock(model), {"x": x})["scores"]


def _dictionary(name: str, key: int) -> onnx.ValueInfoProto:
    given = onnx.ValueInfoProto(name=name)
    given.type.CopyFrom(helper.make_map_type_proto(key, helper.make_tensor_type_proto(TensorProto.FLOAT, [])))
    return given


@DEVICES
@pytest.mark.parametrize(
    ("key", "keys", "feed"),  # onnxruntime's Python has dictionaries of other numbers than float for no input
    [
        (TEXT, {"string_vocabulary": ["a", "b", "é"]}, {"é": 0.1, "a": 2, "unknown": 5.0}),
        (TensorProto.INT64, {"int64_vocabulary": [7, -1]}, {-1: 0.1}),
    ],
)
def test_a_dictionary_as_input(
    key: int, keys: dict[str, Any], feed: dict[Any, Any], device: str, tmp_path: Path
) -> None:
    nodes = [NODE("DictVectorizer", ["d"], [name], domain="ai.onnx.ml", **keys) for name in ("t", "y")]
    nodes.append(NODE("Concat", ["t", "y"], ["z"], axis=1))
    outputs = [INFO("y", TensorProto.FLOAT, None), INFO("z", TensorProto.FLOAT, None)]
    model = _model(nodes, [_dictionary("d", key)], outputs, [])
    plan = _agree(model, {"d": feed}, device, inputs={"d": feed})
    plan.save(tmp_path / "planned.onnx")
    session, stock_gives = memonger.Session(tmp_path / "planned.onnx"), run_stock(stock(model), {"d": feed})
    assert all(np.array_equal(session.run({"d": feed})[name], stock_gives[name]) for name in "yz")
    assert np.array_equal(session.run({"d": stock_gives["y"]})["z"], stock_gives["z"])
    with pytest.raises(memonger.SessionError, match="input 'd': its entries have to be of type float"):
        session.run({"d": dict.fromkeys(feed, "text")})
    with pytest.raises(memonger.PlanError, match="input 'd' is a dictionary, and a plain file would take a table"):
        memonger.shrink(model)


def test_a_dictionary_as_input_whose_keys_nothing_names_says_what_to_do() -> None:
    node = NODE("CastMap", ["d"], ["y"], domain="ai.onnx.ml")
    model = _model([node], [_dictionary("d", TensorProto.INT64)], [INFO("y", TensorProto.FLOAT, None)], [])
    with pytest.raises(LoadError, match=r"input 'd' is a dictionary.* cut the nodes before it out"):
        memonger.load(model)


def _branches(size: int) -> onnx.ModelProto:
    def branch(seed: int) -> onnx.GraphProto:
        weight = np.random.default_rng(seed).standard_normal((size, size)).astype(np.float32)
        return helper.make_graph(
            [NODE("MatMul", ["x", "w"], ["o"])], f"branch{seed}", [], [INFO("o", TensorProto.FLOAT, [1, size])],
            [numpy_helper.from_array(weight, "w")],
        )  # fmt: skip

    node = NODE("If", ["c"], ["y"], "if", then_branch=branch(0), else_branch=branch(1))
    inputs = [INFO("c", TensorProto.BOOL, []), INFO("x", TensorProto.FLOAT, [1, size])]
    return _model([node], inputs, [INFO("y", TensorProto.FLOAT, [1, size])], [])


@DEVICES
@pytest.mark.parametrize("size", [4, 64])
def test_weights_of_branches_are_counted(size: int, device: str) -> None:
    model, weights = _branches(size), 2 * 4 * size * size
    feeds = {"c": np.array(True), "x": np.ones((1, size), np.float32)}
    plan = _agree(model, feeds, device)
    assert plan.parameter_bytes == weights
    assert plan.total_bytes >= weights + plan.arena_bytes + 4 * size


@DEVICES
def test_a_branch_for_other_sizes_stays_open(device: str) -> None:
    """The other branch would squeeze an axis that has one element in its own size alone."""

    def branch(rows: int) -> onnx.GraphProto:
        nodes = [
            NODE("Constant", [], ["shape"], value_ints=[-1, rows]), NODE("Reshape", ["x", "shape"], ["a"]),
            NODE("Shape", ["a"], ["s"]), NODE("Gather", ["s", "zero"], ["n"]),
            NODE("Constant", [], ["zero"], value_ints=[0]), NODE("Constant", [], ["one"], value_ints=[1]),
            NODE("Equal", ["n", "one"], ["e"]),
        ]  # fmt: skip
        nodes = [*nodes[4:6], *nodes[:4], nodes[6]]
        squeezed = helper.make_graph([NODE("Squeeze", ["a", "zero"], ["q"])], "t", [], [INFO("q", 1, None)])
        kept = helper.make_graph([NODE("Identity", ["a"], ["k"])], "e", [], [INFO("k", 1, None)])
        nodes += [NODE("If", ["e"], ["b"], then_branch=squeezed, else_branch=kept),
                  NODE("Softmax", ["b"], ["o"], axis=0)]  # fmt: skip
        return helper.make_graph(nodes, f"rows{rows}", [], [INFO("o", TensorProto.FLOAT, None)])

    node = NODE("If", ["c"], ["y"], "if", then_branch=branch(64), else_branch=branch(7))
    inputs = [INFO("c", TensorProto.BOOL, []), INFO("x", TensorProto.FLOAT, ["N"])]
    model = _model([node], inputs, [INFO("y", TensorProto.FLOAT, None)], [])
    feeds = {"c": np.array(True), "x": X[0]}
    _agree(model, feeds, device, dims={"N": 64}, inputs=feeds)


@pytest.fixture
def weighted(tmp_path: Path) -> Path:
    """A folder with a model and its weights in a file of their own."""
    w = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)
    model = model_of(
        [NODE("MatMul", ["x", "w"], ["a"]), NODE("Tanh", ["a"], ["y"])], {"x": [8, 64]}, {"y": [8, 64]}, w=w
    )
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="model.onnx_data", size_threshold=0)
    return tmp_path


def _serves(path: Path, device: str) -> None:
    plan = memonger.search_plan(path, mode="inference", device=device)
    theirs = run_stock(stock(str(path)), {"x": X})
    plan.save(path.parent / "planned.onnx")
    assert same_bits(memonger.Session(plan).run({"x": X}), theirs)
    assert same_bits(memonger.Session(path.parent / "planned.onnx").run({"x": X}), theirs)


@DEVICES
def test_a_hub_caches_links_are_followed(weighted: Path, device: str) -> None:
    blobs, snapshot = weighted / "blobs", weighted / "snapshots" / "0123" / "onnx"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for name, blob in (("model.onnx", "5a1e"), ("model.onnx_data", "77fc")):
        (weighted / name).rename(blobs / blob)
        (snapshot / name).symlink_to(f"../../../blobs/{blob}")
    _serves(snapshot / "model.onnx", device)


def test_a_link_is_followed_only_to_where_the_model_itself_lies(weighted: Path) -> None:
    for folder in ("blobs", "elsewhere", "snapshot"):
        (weighted / folder).mkdir()
    (weighted / "model.onnx").rename(weighted / "blobs" / "a")
    (weighted / "model.onnx_data").rename(weighted / "elsewhere" / "b")
    (weighted / "snapshot" / "model.onnx").symlink_to("../blobs/a")
    (weighted / "snapshot" / "model.onnx_data").symlink_to("../elsewhere/b")
    with pytest.raises(LoadError, match="outside the model's folder"):
        memonger.load(weighted / "snapshot" / "model.onnx")


@DEVICES
def test_weights_with_a_second_hard_link(weighted: Path, device: str) -> None:
    os.link(weighted / "model.onnx_data", weighted / "other")
    _serves(weighted / "model.onnx", device)
    memonger.differentiate(weighted / "model.onnx", loss="mean_squared_error").save(weighted / "training.onnx")


@DEVICES
def test_external_data_given_as_bytes(weighted: Path, device: str) -> None:
    theirs = run_stock(stock(str(weighted / "model.onnx")), {"x": X})
    data = {"model.onnx_data": (weighted / "model.onnx_data").read_bytes()}
    content, proto = (
        (weighted / "model.onnx").read_bytes(),
        onnx.load(weighted / "model.onnx", load_external_data=False),
    )
    for path in weighted.iterdir():
        path.unlink()
    for model in (content, proto):
        plan = memonger.search_plan((model, data), mode="inference", device=device)
        assert same_bits(memonger.Session(plan).run({"x": X}), theirs)
        with pytest.raises(LoadError, match=r"missing: model.onnx_data isn't among the files given \('other'\)"):
            memonger.load((model, {"other": b""}))
        with pytest.raises(LoadError, match=r"cut short: model.onnx_data has 100 bytes, the tensor needs 16384"):
            memonger.load((model, {"model.onnx_data": data["model.onnx_data"][:100]}))
        with pytest.raises(LoadError, match="or their bytes beside it"):
            memonger.load(model)


KINDS = [ir.DataType.FLOAT, ir.DataType.UINT8, ir.DataType.INT8, ir.DataType.FLOAT16, ir.DataType.BOOL,
         ir.DataType.UINT16, ir.DataType.INT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE]  # fmt: skip
FIXED = {"tensor(float)": ir.DataType.FLOAT, "tensor(int64)": ir.DataType.INT64, "tensor(int32)": ir.DataType.INT32}


def test_types_of_onnxruntimes_operators_are_those_of_its_schemas() -> None:
    """Where a schema gives an output and an input one type, they have one; here each other input has another."""
    schemas = {each.name: each for each in native.get_all_operator_schema() if each.domain == "com.microsoft"}
    checked = 0
    for name in inference.OPERATORS & schemas.keys():
        inputs, outputs = schemas[name].inputs, schemas[name].outputs
        open_kinds = list(dict.fromkeys(each.typeStr for each in inputs if each.typeStr not in FIXED))
        types = {**FIXED, **dict(zip(open_kinds, KINDS, strict=False))}
        for each in schemas[name].type_constraints:
            if len(each.allowed_type_strs) == 1:  # a variable for one type alone
                kind = each.allowed_type_strs[0].removeprefix("tensor(").removesuffix(")").upper()
                types[each.type_param_str] = ir.DataType[kind]
        values = [ir.Value(name=f"x{k}", type=ir.TensorType(types[each.typeStr])) for k, each in enumerate(inputs)]
        node = ir.Node("com.microsoft", name, values, num_outputs=len(outputs))
        for place, output in enumerate(outputs):
            found = inference.output_type(node, place)
            if output.typeStr in types and found is not None:
                assert found == types[output.typeStr], (name, place)
                checked += 1
    assert checked > 80


@DEVICES
def test_a_pipeline_of_operators_that_nothing_infers(device: str) -> None:
    """As skl2onnx writes it: nothing infers the type behind an Imputer, whose input has none at first either."""
    ml = {"domain": "ai.onnx.ml"}
    nodes = [
        NODE("Neg", ["x"], ["v"]), NODE("Imputer", ["v"], ["w"], imputed_value_floats=[0.0], **ml),
        NODE("Mul", ["w", "x"], ["u"]), NODE("Scaler", ["u"], ["a"], offset=[0.5, 0.5], scale=[2.0, 2.0], **ml),
        NODE("Sub", ["a", "x"], ["b"]),
        NODE("Normalizer", ["b"], ["c"], norm="L1", **ml), NODE("Mul", ["c", "a"], ["y"]),
        NODE("ArgMax", ["b"], ["best"], axis=1, keepdims=0),
        NODE("ArrayFeatureExtractor", ["classes", "best"], ["d"], **ml),
        NODE("Cast", ["d"], ["e"], to=TensorProto.FLOAT), NODE("Cast", ["e"], ["f"], to=TensorProto.INT64),
        NODE("Reshape", ["f", "flat"], ["g"]), NODE("Cast", ["g"], ["label"], to=TensorProto.INT64),
    ]  # fmt: skip
    outputs = [INFO("y", TensorProto.FLOAT, None), INFO("label", TensorProto.INT64, None)]
    constants = [_numbers("classes", 3, 7), _numbers("flat", -1)]
    model = _model(nodes, [INFO("x", TensorProto.FLOAT, [8, 2])], outputs, constants)
    model.opset_import[1].version = 1
    _agree(model, {"x": X[:, :2].copy()}, device)


@DEVICES
def test_weights_that_are_declared_in_another_type(device: str) -> None:
    """onnxruntime's converter to float16 writes them so for operators that it is to spare (``op_block_list``)."""
    model = model_of([NODE("Mul", ["x", "w"], ["y"])], {"x": [8, 64]}, {"y": [8, 64]}, w=X[0])
    model.graph.value_info.append(INFO("w", TensorProto.FLOAT16, [64]))
    _agree(model, {"x": X}, device)


@DEVICES
def test_a_file_of_a_node_whose_outputs_are_left_out_in_between(device: str, tmp_path: Path) -> None:
    nodes = [NODE("Unique", ["x"], ["u", "first", "back", "counts"])]
    model = _model(nodes, [INFO("x", TensorProto.FLOAT, [8])], [INFO("counts", TensorProto.INT64, None)], [])
    plan = memonger.search_plan(model, mode="inference", device=device)
    plan.save(tmp_path / "planned.onnx")
    (counts,) = memonger.Session(tmp_path / "planned.onnx").run({"x": X[0, :8].copy()}).values()
    assert counts.tolist() == [1] * 8


@DEVICES
def test_learners_in_a_range_of_sizes(device: str) -> None:
    """Nothing infers the types of trees; what picks columns takes a column of numbers as well."""
    ml = {"domain": "ai.onnx.ml"}
    nodes = [
        NODE("Normalizer", ["x"], ["n"], norm="L2", **ml),
        NODE("Scaler", ["n"], ["s"], offset=[0.5], scale=[2.0], **ml),
        NODE("ArgMax", ["s"], ["best"], axis=1, keepdims=1),
        NODE("ArrayFeatureExtractor", ["classes", "best"], ["label"], **ml),
    ]  # fmt: skip
    outputs = [INFO("s", TensorProto.FLOAT, None), INFO("label", TensorProto.INT64, None)]
    model = _model(nodes, [INFO("x", TensorProto.FLOAT, ["n", 64])], outputs, [_numbers("classes", *range(64))])
    for rows in (1, 8):
        _agree(model, {"x": X[:rows].copy()}, device, dims={"n": (1, 8)})


@DEVICES
def test_an_optional_input(device: str) -> None:
    """An empty one ends the process in onnxruntime's bindings, and is refused."""
    kind = helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [8]))
    nodes = [NODE("OptionalGetElement", ["o"], ["e"]), NODE("Neg", ["e"], ["y"])]
    model = _model(nodes, [helper.make_value_info("o", kind)], [INFO("y", TensorProto.FLOAT, [8])], [])
    feed = {"o": X[0, :8].copy()}
    plan = _agree(model, feed, device, inputs=feed)
    with pytest.raises(memonger.SessionError, match="no empty optional: give a value"):
        memonger.Session(plan).run({"o": None})


@DEVICES
def test_an_optional_value_in_a_range_of_sizes(device: str) -> None:
    """A run shows the bytes that an optional holds, and it stays one."""
    nodes = [NODE("Optional", ["x"], ["o"]), NODE("OptionalHasElement", ["o"], ["h"])]
    nodes.append(NODE("OptionalGetElement", ["o"], ["y"]))
    outputs = [INFO("y", TensorProto.FLOAT, ["n", 64]), INFO("h", TensorProto.BOOL, [])]
    model = _model(nodes, [INFO("x", TensorProto.FLOAT, ["n", 64])], outputs, [])
    for rows in (1, 8):
        _agree(model, {"x": X[:rows].copy()}, device, dims={"n": (1, 8)})


def test_a_file_that_onnxruntimes_optimizer_saved_is_planned_without_a_device(tmp_path: Path) -> None:
    """Its blocked convolutions are onnxruntime's own, and nothing infers their types."""
    weight = np.random.default_rng(1).standard_normal((16, 3, 3, 3)).astype(np.float32)
    nodes = [NODE("Conv", ["x", "w"], ["a"]), NODE("Relu", ["a"], ["y"])]
    model, feed = model_of(nodes, {"x": [1, 3, 8, 8]}, {"y": [1, 16, 6, 6]}, w=weight), {"x": X[:3].reshape(1, 3, 8, 8)}
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "optimized.onnx"), 4
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    saved = onnx.load(tmp_path / "optimized.onnx")
    assert any(node.domain == "com.microsoft.nchwc" for node in saved.graph.node)
    _agree(saved, feed, "none")


def test_onnxruntimes_own_format_is_named(tmp_path: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "model.ort"), 4
    options.add_session_config_entry("session.save_model_format", "ORT")
    model = model_of([NODE("Relu", ["x"], ["y"])], {"x": [8, 64]}, {"y": [8, 64]})
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    with pytest.raises(LoadError, match=r"in onnxruntime's own format: .* writes it as ONNX"):
        memonger.load(tmp_path / "model.ort")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "pointer of Git LFS: git lfs pull puts"),
        (b"\x1f\x8b\x08\0", "compressed: gunzip unpacks it"),
        (b"<!DOCTYPE html><html>404</html>", "web page: download the file itself"),
    ],
    ids=["pointer", "compressed", "page"],
)
def test_what_is_there_in_place_of_a_model_or_its_weights(content: bytes, words: str, tmp_path: Path) -> None:
    """As clones without Git LFS and failed downloads leave them."""
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(LoadError, match=rf"model\.onnx is not an ONNX model.* It is (a )?{words}"):
        memonger.load(tmp_path / "model.onnx")
    model = model_of([NODE("Mul", ["x", "w"], ["y"])], {"x": [8, 64]}, {"y": [8, 64]}, w=X)
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="model.onnx_data", size_threshold=0)
    (tmp_path / "model.onnx_data").write_bytes(content)
    with pytest.raises(LoadError, match=rf"external data of tensor 'w' is cut short: .* It is (a )?{words}"):
        memonger.load(tmp_path / "model.onnx")


@DEVICES
def test_a_classifier_of_a_model_without_standard_operators(device: str) -> None:
    """As CatBoost writes it: an ensemble, and a dictionary of its scores."""
    ml = {"domain": "ai.onnx.ml"}
    nodes = [
        NODE("LinearClassifier", ["x"], ["label", "scores"], coefficients=[0.5] * 64 + [-0.5] * 64,
             intercepts=[0.0, 0.1], classlabels_ints=[0, 1], multi_class=0, post_transform="SOFTMAX", **ml),
        NODE("ZipMap", ["scores"], ["probabilities"], classlabels_int64s=[0, 1], **ml),
    ]  # fmt: skip
    kind = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    outputs = [INFO("label", TensorProto.INT64, [8]),
               helper.make_value_info("probabilities", helper.make_sequence_type_proto(kind))]  # fmt: skip
    model = _model(nodes, [INFO("x", TensorProto.FLOAT, [8, 64])], outputs, [])
    del model.opset_import[0]
    _agree(model, {"x": X}, device)


def test_a_type_that_onnx_leaves_out_is_the_inputs_of_the_same_kind() -> None:
    """Statistics that old versions of BatchNormalization give have no type by ONNX's inference."""
    model = parse(
        "g (float[N, 4, 3, 3] x, float[4] s, float[4] t, float[4] m, float[4] v) => (float[N, 4, 3, 3] y) "
        "{ y, a, b, c, d = BatchNormalization (x, s, t, m, v) }",
        opset=9,
    )
    plan = memonger.search_plan(model, mode="inference", device="none", dims={"N": 2})

    def feed() -> dict[str, np.ndarray]:  # the kernel updates what it is given
        return {"x": normal(0, 2, 4, 3, 3), **{name: np.ones(4, np.float32) for name in "stmv"}}

    assert same_bits(memonger.Session(plan).run(feed()), run_stock(stock(model, "ORT_DISABLE_ALL"), feed()))


@pytest.mark.parametrize("sizes", [2, (1, 3)])
def test_operators_newer_than_the_models_set_have_types(sizes: Any) -> None:
    """onnxruntime's tool for transformers writes LayerNormalization into models of any operator set."""
    model = model_of(
        [
            helper.make_node("LayerNormalization", ["x", "s", "s"], ["a"], axis=-1),
            helper.make_node("Mul", ["a", "s"], ["y"]),
        ],
        {"x": ["N", 8]}, {"y": ["N", 8]}, s=np.ones(8, np.float32),
    )  # fmt: skip
    model.opset_import[0].version = 16
    plan = memonger.search_plan(model, mode="inference", device="none", dims={"N": sizes})
    feed = {"x": normal(0, 2, 8)}
    assert same_bits(memonger.Session(plan).run(feed), run_stock(stock(model, "ORT_DISABLE_ALL"), feed))


def test_nodes_of_functions_run_in_the_models_operator_set() -> None:
    """As in onnxruntime, whatever set a function imports. Softmax was over all behind an axis before 13."""
    nodes = [
        helper.make_node("Constant", [], ["s"], value_ints=[-1, 4, 4]), helper.make_node("Reshape", ["x", "s"], ["r"]),
        helper.make_node("Softmax", ["r"], ["y"], axis=1),
    ]  # fmt: skip
    model = model_of([helper.make_node("Old", ["x"], ["y"], domain="own")], {"x": ["N", 16]}, {"y": ["N", 4, 4]})
    model.functions.append(helper.make_function("own", "Old", ["x"], ["y"], nodes, [helper.make_opsetid("", 12)]))
    model.opset_import.append(helper.make_opsetid("own", 1))
    feed = {"x": normal(0, 3, 16)}
    for device in ("cpu", "none"):
        plan = memonger.search_plan(model, mode="inference", device=device, batch=3)
        assert same_bits(memonger.Session(plan).run(feed), run_stock(stock(model), feed))


def test_a_loop_that_carries_nothing_stays_a_loop_in_a_portable_file(tmp_path: Path) -> None:
    """Its condition is left out, and written so all the same: fewer than two inputs are no loop's."""
    model = parse(
        "g (float[N, 4] x) => (float[N, 4] y) { s = Shape <start = 0, end = 1> (x) z = Constant <value_int = 0> () "
        "t = Gather(s, z) y = Loop <body = b (int64 i, bool c) => (bool d, float[4] r) "
        '{ d = Identity(c) r = Gather(x, i) }> (t, "") }',
        opset=18,
    )
    memonger.search_plan(model, mode="inference", device="none", batch=3).save(tmp_path / "planned.onnx")
    feed = {"x": normal(0, 3, 4)}
    assert same_bits(memonger.Session(tmp_path / "planned.onnx").run(feed), run_stock(stock(model), feed))
