"""Files that nothing checked: operators on images with any attributes give what they gave, by rows and in a branch."""

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("onnxruntime")

import memonger
from memonger.errors import PlanError
from memonger.loops.branch import open_batch
from memonger.loops.rows import with_row_loops
from memonger.loops.writer import NotInLoopsError
from memonger.model.load import load
from memonger.shapes.inference import tell_sizes
from memonger.tiling.axes import row_rules
from memonger.tiling.cutting import Slicing
from tests.support.image_networks import Choose, ImageNetwork, rows_of_all
from tests.support.stock import normal, parse, run_stock, same


class AnyWindow(ImageNetwork):
    """An image through one operator with windows, and heads that are told its size."""

    def __init__(self, choose: Choose) -> None:
        super().__init__(choose, choose(range(20, 60)), choose((1, 4)))
        self.images.append(self.emit("Relu", "x"))
        made = self.pick(self.pool, self.pool, self.convolution, self.transposed, self.resized)(self.images[-1])
        if made:
            self.images.append(made)
            self.head(made)

    def padding(self, kernel: list[int]) -> dict[str, Any]:
        """How much of it, or who finds it."""
        how = self.pick("pads", "SAME_UPPER", "SAME_LOWER", "VALID", "")
        if how == "pads":
            return {"pads": [self.pick(0, min(each - 1, 2)) for each in kernel * 2]}
        return {"auto_pad": how} if how else {}

    def pool(self, x: str) -> str:
        """Any that onnxruntime has for float32."""
        kernel, operator = [self.pick(1, 2, 3, 4), self.pick(1, 2)], self.pick("MaxPool", "AveragePool", "LpPool")
        settings = {"strides": [self.pick(1, 2, 3, 4), self.pick(1, 2)], "ceil_mode": self.pick(0, 1)}
        settings |= {"dilations": [self.pick(1, 1, 2), 1]} | self.padding(kernel)
        if operator == "AveragePool":
            settings["count_include_pad"] = self.pick(0, 1)
        return self.emit(operator, x, kernel_shape=kernel, **settings)

    def convolution(self, x: str) -> str:
        """Of any stride, dilated or not."""
        kernel = [self.pick(1, 2, 3), 2]
        settings = {"strides": [self.pick(1, 2, 3), 1], "dilations": [self.pick(1, 2), 1]}
        return self.emit("Conv", x, self.weight(4, 4, *kernel), **settings, **self.padding(kernel))

    def transposed(self, x: str) -> str:
        """With rows added or not."""
        kernel, stride = [self.pick(1, 2, 3), 2], self.pick(1, 2, 3)
        settings = {"strides": [stride, 1], "output_padding": [self.pick(*range(stride)), 0]}
        return self.emit("ConvTranspose", x, self.weight(4, 4, *kernel), **settings, **self.padding(kernel))

    def resized(self, x: str) -> str:
        """In any way."""
        return self._resize(x, 4)

    def head(self, made: str) -> None:
        """What is made of it: nothing, or what has another size or type."""
        flat = self.pick("", "ArgMax", "Transpose", "Greater", "Cast")
        settings = {"ArgMax": {"axis": 1}, "Transpose": {"perm": [0, 2, 3, 1]}, "Cast": {"to": onnx.TensorProto.DOUBLE}}
        if flat:
            self.emit(flat, made, *([made] if flat == "Greater" else []), **settings.get(flat, {}))


def _by_rows(model: onnx.ModelProto, rows: int) -> onnx.ModelProto | None:
    """The model with all that gives rows in one loop, told sizes as shrink does; None where it can't be."""
    loaded = load(model).ir
    tell_sizes(loaded)
    nodes = [step for step, rule in enumerate(row_rules(loaded)) if isinstance(rule, Slicing)]
    if not nodes or len(nodes) < nodes[-1] - nodes[0] + 1:
        return None
    try:
        made = with_row_loops(loaded, [rows_of_all(loaded, rows, nodes[0], nodes[-1] + 1)])
    except NotInLoopsError:
        return None
    return ir.serde.serialize_model(made)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_windows_of_any_kind_give_what_they_gave(data: st.DataObject) -> None:
    network = AnyWindow(lambda choices: data.draw(st.sampled_from(list(choices))))
    model, rows = network.model(), data.draw(st.sampled_from((1, 2, 3, 5)))
    try:
        want = run_stock(model, network.feeds, "ORT_ENABLE_ALL")
    except Exception:  # pybind exceptions share no base class
        return  # it never ran
    try:
        files = [ir.serde.serialize_model(memonger.shrink(model, check=False).model), _by_rows(model, rows)]
    except PlanError:
        return
    for file in filter(None, files):
        onnx.checker.check_model(file, full_check=True)
        got = run_stock(file, network.feeds, "ORT_ENABLE_ALL")
        assert all(same(got[name], want[name]) for name in want)


GROUPS = """g (float[n, 8, {side}, {side}] x, float[4] s, float[4] b, float[8, 1, 1] f)
    => (float[n, 8, {side}, {side}] y) {{
    c = Relu (x)  grouped = Reshape (c, three)  i = InstanceNormalization (grouped, s, b)  d = Shape (c)
    r = Reshape (i, d)  m = Mul (r, f)  a = Add (m, f)  q = Sigmoid (a)  p = Mul (a, q)  y = Add (p, c)
}}"""
"""A group normalization as it is exported where the batch is open: its shape is computed."""


def _group_norm(side: int) -> onnx.ModelProto:
    model = parse(GROUPS.format(side=side), opset=17)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0, 4, -1], np.int64), "three"))
    return model


def test_what_does_not_depend_on_an_open_batch_is_told_where_it_is_computed() -> None:
    """What follows a shape that is computed runs in place then; the batch stays open. The file says so, with types."""
    model = _group_norm(16)
    made = ir.serde.deserialize_model(ir.serde.serialize_model(memonger.shrink(model, check=False).model))
    (branch,) = (node.attributes["then_branch"].as_graph() for node in made.graph if node.op_type == "If")
    shapes = {str(value.name): str(value.shape) for node in branch for value in node.outputs}
    assert {shapes[name] for name in "rmaqp"} == {"[n,8,16,16]"}
    for batch in (1, 2, 5):
        feeds = {"x": normal(batch, batch, 8, 16, 16), "s": normal(7, 4), "b": normal(8, 4), "f": normal(9, 8, 1, 1)}
        want, got = (run_stock(each, feeds, "ORT_ENABLE_ALL") for each in (model, ir.serde.serialize_model(made)))
        assert same(got["y"], want["y"])


POOLED = """g (float[n, 4, 20, 6] x) => (float[n, 4, k, 6] y) {
    r = Relu (x)
    m = MaxPool <kernel_shape = [2, 1], strides = [3, 1], pads = [0, 0, 1, 0], ceil_mode = 1> (r)
    y = Neg (m)
}"""


def test_no_sizes_are_told_where_those_of_the_runtime_contradict_the_inference() -> None:
    """Of a window that begins in the padding ONNX's inference counts a row more, which onnxruntime leaves out."""
    model = parse(POOLED, opset=17)
    made = ir.serde.serialize_model(memonger.shrink(model, check=False).model)
    onnx.checker.check_model(made, full_check=True)
    for batch in (1, 3):
        feeds = {"x": normal(batch, batch, 4, 20, 6)}
        want, got = (run_stock(each, feeds, "ORT_ENABLE_ALL")["y"] for each in (model, made))
        assert want.shape == (batch, 4, 7, 6)
        assert same(got, want)


@pytest.mark.parametrize(
    ("inputs", "batch"),
    [("float[n, 4] x", "n"), ("float[n, m] x", None), ("float[4, n] x", None), ("float[n, 4] x, float[n, n] z", "n"),
     ("float[2, 4] x", None), ("float[n, 4] x, float[m, 4] z", None)],
)  # fmt: skip
def test_which_dimension_is_the_only_one_that_is_open(inputs: str, batch: str | None) -> None:
    assert open_batch(ir.serde.deserialize_model(parse(f"g ({inputs}) => (float y) {{ y = ReduceSum (x) }}"))) == batch


def _one(operator: str, settings: dict[str, Any], height: int, inputs: tuple[str, ...] = ("a",)) -> AnyWindow:
    network = AnyWindow.__new__(AnyWindow)
    ImageNetwork.__init__(network, lambda choices: choices[0], height)
    network.constants["half"] = np.array([1, 1, 0.5, 1], np.float32)
    relu = network.emit("Relu", "x")
    assert network.emit(operator, *(relu if name == "a" else name for name in inputs), **settings)
    return network


@pytest.mark.parametrize(
    ("operator", "settings"),
    [
        ("MaxPool", {"kernel_shape": [2, 2], "strides": [2, 1], "pads": [0, 0, 1, 0], "ceil_mode": 1}),
        ("AveragePool", {"kernel_shape": [1, 1], "strides": [2, 2], "ceil_mode": 1}),
        ("LpPool", {"kernel_shape": [3, 1], "dilations": [2, 1], "auto_pad": "SAME_LOWER"}),
        ("MaxPool", {"kernel_shape": [3, 2], "strides": [3, 1], "pads": [1, 0, 2, 1], "ceil_mode": 1}),
        ("AveragePool", {"kernel_shape": [2, 2], "strides": [3, 1], "auto_pad": "SAME_UPPER", "dilations": [2, 1]}),
    ],
)
def test_pools_whose_windows_onnx_counts_otherwise_run_in_a_branch(operator: str, settings: dict[str, Any]) -> None:
    """onnxruntime makes room for what a branch gives by ONNX's inference: 21 rows, of which there are 20."""
    network = _one(operator, settings, 40)
    model = network.model()
    declared = model.graph.output[0].type.tensor_type.shape.dim[2].dim_value
    want = run_stock(model, network.feeds, "ORT_ENABLE_ALL")
    name = model.graph.output[0].name
    assert want[name].shape[2:] != (declared, model.graph.output[0].type.tensor_type.shape.dim[3].dim_value)
    file = ir.serde.serialize_model(memonger.shrink(model, check=False).model)
    onnx.checker.check_model(file, full_check=True)
    assert same(run_stock(file, network.feeds, "ORT_ENABLE_ALL")[name], want[name])


def test_a_pool_whose_windows_nothing_tells_is_refused_by_name() -> None:
    settings = {"kernel_shape": [2, 1], "strides": [3, 2], "dilations": [2, 2], "auto_pad": "SAME_UPPER"}
    with pytest.raises(PlanError, match=r"node 'v1' \(LpPool\): no padding gives .*other 'pads'"):
        memonger.shrink(_one("LpPool", settings, 54).model(), check=False)


@pytest.mark.parametrize(("mode", "nearest", "rows"), [("nearest", "ceil", 2), ("linear", "floor", 1)])
def test_a_row_that_is_resized_alone_lies_where_it_lay(mode: str, nearest: str, rows: int) -> None:
    """By ``pytorch_half_pixel`` an image of one row has it in another place: a slice makes two."""
    settings = {"mode": mode, "nearest_mode": nearest, "coordinate_transformation_mode": "pytorch_half_pixel"}
    network = _one("Resize", settings, 54, ("a", "", "half"))
    file = _by_rows(network.model(), rows)
    assert file is not None
    want, got = (run_stock(each, network.feeds, "ORT_ENABLE_ALL") for each in (network.model(), file))
    assert same(got["v1"], want["v1"])
