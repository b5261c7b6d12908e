"""Strips of images give what the whole gives: operator by operator, in random chains, and in the blocked layout."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

pytest.importorskip("onnxruntime")

import memonger
from memonger.errors import PlanError
from memonger.ir.marks import STRIP
from memonger.ir.values import static_shape
from memonger.lowering.lowered import portable
from memonger.model.load import load
from memonger.tiling import stripping
from memonger.tiling.cutting import Refusal
from memonger.tiling.strips import ImageBand, images_read, in_strips
from tests.support import networks
from tests.support.one_node_executor import run_poisoned
from tests.support.stock import normal, parse


class _Chain:
    """A random chain of operators on images, with sums and joins across it."""

    def __init__(self, draw: st.DrawFn, height: int) -> None:
        self.draw, self.nodes, self.constants = draw, list[onnx.NodeProto](), dict[str, np.ndarray]()
        self.shapes = {"x": (1, 2, height, 6)}

    def pick(self, *choices: int) -> int:
        return self.draw(st.sampled_from(choices))

    def emit(self, op: str, inputs: Sequence[str], **attributes: object) -> None:
        """Append a node, if onnxruntime's kernels take it and something is left of the image."""
        name = f"v{len(self.nodes)}"
        node = helper.make_node(op, inputs, [name], name=name, **attributes)
        constants = [numpy_helper.from_array(array, key) for key, array in self.constants.items()]
        graph = helper.make_graph(
            [*self.nodes, node], "g", [self.value("x")], [helper.make_empty_tensor_value_info(name)], constants
        )
        try:
            inferred = onnx.shape_inference.infer_shapes(_model(graph), strict_mode=True, data_prop=True)
        except onnx.shape_inference.InferenceError:
            return
        dims = tuple(d.dim_value for d in inferred.graph.output[0].type.tensor_type.shape.dim)
        if len(dims) == 4 and 2 <= dims[2] <= 60 and 1 <= dims[3] <= 60:
            self.nodes.append(node)
            self.shapes[name] = dims

    def value(self, name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, self.shapes[name])

    def weight(self, *dims: int) -> str:
        name = f"w{len(self.constants)}"
        self.constants[name] = normal(len(self.constants), *dims)
        return name

    def grow(self) -> None:
        """Append one of all kinds of nodes to a value drawn from the last few."""
        x = self.draw(st.sampled_from(list(self.shapes)[-3:]))
        channels, kind = self.shapes[x][1], self.pick(*range(9))
        kernel, stride, dilation = self.pick(1, 2, 3, 5), self.pick(1, 1, 2, 3), self.pick(1, 1, 2)
        pads = [
            min(kernel - 1, self.pick(0, 1, 2)),
            self.pick(0, 1),
            min(kernel - 1, self.pick(0, 1, 2)),
            self.pick(0, 1),
        ]
        window = {"kernel_shape": [kernel, 2], "strides": [stride, 1], "pads": pads}
        if kind <= 1:
            auto = self.draw(st.sampled_from([{}, {}, {"auto_pad": "SAME_LOWER"}]))
            attributes = {**window, "dilations": [dilation, 1], **auto}
            if auto:
                attributes = {k: v for k, v in attributes.items() if k != "pads"} | {"dilations": [1, 1]}
            self.emit("Conv", [x, self.weight(3, channels, kernel, 2), self.weight(3)], **attributes)
        elif kind == 2:
            self.emit("MaxPool", [x], **window, dilations=[dilation, 1], ceil_mode=self.pick(0, 1))
        elif kind == 3:
            self.emit("AveragePool", [x], **window, count_include_pad=self.pick(0, 1), ceil_mode=self.pick(0, 1))
        elif kind == 4:
            extra = [self.pick(*range(stride)), 0]
            weight = self.weight(channels, 2, kernel, 2)
            self.emit("ConvTranspose", [x, weight], **window, dilations=[dilation, 1], output_padding=extra)
        elif kind == 5:
            mode, where = (
                self.draw(st.sampled_from(["nearest", "linear"])),
                self.draw(st.sampled_from(["asymmetric", "half_pixel"])),
            )
            nearest = self.draw(st.sampled_from(["floor", "ceil", "round_prefer_floor"]))
            self.constants[scales := f"s{len(self.constants)}"] = np.array([1, 1, self.pick(2, 3), 1], np.float32)
            self.emit("Resize", [x, "", scales], mode=mode, coordinate_transformation_mode=where, nearest_mode=nearest)
        elif kind == 6:
            self.emit("Relu", [x])
        else:
            others = [name for name, dims in self.shapes.items() if dims[2:] == self.shapes[x][2:]]
            other = self.draw(st.sampled_from(others))
            if kind == 7:
                self.emit("Concat", [x, other], axis=1)
            elif self.shapes[x] == self.shapes[other]:
                self.emit("Add", [x, other])
            else:
                self.emit("Mul", [x, self.weight(*self.shapes[x][2:])])

    def model(self) -> ir.Model:
        """What was drawn. Outputs are what nobody reads, and one value more."""
        read = {name for node in self.nodes for name in node.input}
        results = [n.name for n in self.nodes if n.name not in read or n.name == f"v{len(self.nodes) // 2}"]
        constants = [numpy_helper.from_array(array, key) for key, array in self.constants.items()]
        graph = helper.make_graph(self.nodes, "g", [self.value("x")], [self.value(n) for n in results], constants)
        return portable(load(_model(graph))).model


def _model(graph: onnx.GraphProto) -> onnx.ModelProto:
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def _run(model: ir.Model, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return networks.run_stock(networks.stock(ir.to_proto(model)), feeds)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_strips_of_random_chains_give_what_the_whole_gives(data: st.DataObject) -> None:
    chain = _Chain(data.draw, data.draw(st.integers(5, 16)))
    for _ in range(data.draw(st.integers(1, 7))):
        chain.grow()
    if not chain.nodes:
        return
    model = chain.model()
    read = images_read(model)
    begin = data.draw(st.integers(0, len(read) - 1))
    most = next((n for n in range(begin, len(read)) if isinstance(read[n], Refusal)), len(read))
    end = data.draw(st.integers(begin, most))
    band = ImageBand(begin, end, tuple(one for one in read[begin:end] if not isinstance(one, Refusal)))
    exits = band.exits(model)
    if not exits:
        return
    rows = min((static_shape(value) or (0, 0, 0))[2] for value in exits)
    made = in_strips(model, band, data.draw(st.integers(2, min(5, rows))), 1)
    onnx.checker.check_model(ir.to_proto(made), full_check=True)
    feeds = {"x": normal(9, *chain.shapes["x"])}
    whole, strips = _run(model, feeds), _run(made, feeds)
    for name in whole:
        np.testing.assert_allclose(strips[name], whole[name], rtol=1e-4, atol=1e-4)


def _unet() -> onnx.ModelProto:
    """Two levels, whose larger one is read again at the end: the peak is in the last nodes."""
    text = """g (float[1, 3, 32, 32] x) => (float[1, 2, 32, 32] y) {
        a = Conv <pads = [1, 1, 1, 1]> (x, w0) ra = Relu (a) p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (ra)
        b = Conv <pads = [1, 1, 1, 1]> (p, w1) rb = Relu (b) u = ConvTranspose <strides = [2, 2]> (rb, w2)
        j = Concat <axis = 1> (ra, u) c = Conv <pads = [1, 1, 1, 1]> (j, w3) rc = Relu (c) y = Conv (rc, w4) }"""
    model = parse(text, opset=20, ir_version=10)
    shapes = ((16, 3, 3, 3), (32, 16, 3, 3), (32, 16, 2, 2), (16, 32, 3, 3), (2, 16, 1, 1))
    for number, shape in enumerate(shapes):
        model.graph.initializer.append(numpy_helper.from_array(normal(number, *shape), f"w{number}"))
    return model


def _plan(model: onnx.ModelProto, **options: Any) -> memonger.Plan:
    return memonger.search_plan(model, mode="inference", device="cpu", threads=1, **options)


def test_a_plan_in_strips_is_stocks_to_the_bit_in_less_memory() -> None:
    model = _unet()
    made, whole = _plan(model, chunks="strips:5"), _plan(model, chunks="off")
    assert made.arena_bytes < 0.8 * whole.arena_bytes
    assert {(band.axis, band.slices) for band in made.chunks} == {(2, (5,))}
    assert any(node.domain == "com.microsoft.nchwc" and STRIP in node.metadata_props for node in made.model.graph)
    assert "% more" in made.notes[-1]
    feeds = {"x": normal(7, 1, 3, 32, 32)}
    expected = networks.run_stock(networks.stock(model), feeds)
    assert networks.same_bits(memonger.Session(made).run(feeds), expected)
    assert networks.same_bits(run_poisoned(made, feeds), expected)


def test_what_cannot_run_in_strips_says_why() -> None:
    text = "g (float[4, 300] x) => (float[4, 300] y) { y = Relu (x) }"
    with pytest.raises(PlanError, match="can't run in 4 strips: it reads no images"):
        _plan(parse(text, opset=20, ir_version=10), chunks="strips:4")
    with pytest.raises(PlanError, match="can't run in 33 strips: around the step"):
        _plan(_unet(), chunks="strips:33")
    with pytest.raises(PlanError, match="pareto takes chunks='auto' or chunks='off'"):
        memonger.pareto(_unet(), chunks="strips:2", mode="inference")  # type: ignore[call-arg]


def test_other_bits_in_strips_are_refused_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stripping, "_difference", lambda *_: 1e-7)
    with pytest.raises(PlanError, match=r"differ in their last bits, by up to 1\.0e-07 .*allow_rounding=True"):
        _plan(_unet(), chunks="strips:4")
    assert "by up to 1.0e-07" in _plan(_unet(), chunks="strips:4", allow_rounding=True).notes[-1]
