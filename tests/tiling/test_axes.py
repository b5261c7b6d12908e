"""Each operator, cut along every axis that its rule allows, gives what it gives for the whole; the rest is refused."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest

pytest.importorskip("onnxruntime")

from memonger.errors import PlanError
from memonger.ir.operators import operator_name
from memonger.ir.parts import elements
from memonger.tiling.axes import NEVER_EMPTY, axes_of, slicing
from memonger.tiling.cutting import RULES, Refusal, Slicing
from memonger.tiling.slices import Band, SliceStage
from memonger.tiling.writer import in_slices
from tests.support import networks
from tests.support.axis_examples import CASES, Case
from tests.support.stock import parse


def _described(case: Case) -> tuple[ir.Model, dict[str, np.ndarray]]:
    """The case's model with the shapes that a run shows, and what it is fed."""
    model = ir.from_proto(case.model)
    feeds = {str(v.name): np.asarray(case.inputs[int(str(v.name)[1:])]) for v in model.graph.inputs}
    whole = networks.stock(case.model, "ORT_DISABLE_ALL").run(None, feeds)
    node = model.graph.node(0)
    node.name = "whole"
    for value, array in zip((v for v in node.outputs if v.name), whole, strict=True):
        value.shape, value.type = ir.Shape(array.shape), ir.TensorType(ir.DataType.from_numpy(array.dtype))
    return model, feeds


def _again(model: ir.Model, name: str) -> None:
    """Add the model's first node once more."""
    node = model.graph.node(0)
    outputs = [ir.Value(name=v.name and f"{v.name}.{name}", type=v.type, shape=v.shape) for v in node.outputs]
    attributes = list(node.attributes.values())
    model.graph.append(ir.Node(node.domain, node.op_type, node.inputs, attributes, outputs=outputs, name=name))
    model.graph.outputs.extend(v for v in outputs if v.name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_slices_joined_are_the_whole_along_each_axis_of_each_input(case: Case) -> None:
    model, feeds = _described(case)
    node = model.graph.node(0)
    bands, rules = [], list[Slicing | Refusal | None]([None])
    for index, value in enumerate(node.inputs):
        dims = feeds[str(value.name)].shape if value is not None and str(value.name) in feeds else ()
        answers = [slicing(node, {index: axis}) for axis in range(len(dims))]
        found = {axis for axis, answer in enumerate(answers) if dims[axis] > 1 and isinstance(answer, Slicing)}
        assert found == case.accepts(index), (index, [str(answer) for answer in answers])
        for axis in sorted(found):
            _again(model, f"{index}.{axis}")
            bounds = tuple(sorted({0, 1, dims[axis] // 2, dims[axis]}))
            bands.append(Band((SliceStage(len(bands) + 1, len(bands) + 2, bounds),)))
            rules.append(answers[axis])
    results = networks.stock(ir.to_proto(in_slices(model, bands, rules).model), "ORT_DISABLE_ALL").run(None, feeds)
    wholes = results[: len(case.outputs)] * len(bands)
    for joined, whole in zip(results[len(case.outputs) :], wholes, strict=True):
        assert (joined.shape, joined.dtype) == (whole.shape, whole.dtype)
        if case.rounded:
            np.testing.assert_allclose(joined, whole, rtol=1e-5, atol=1e-5)
        else:
            assert joined.tobytes() == whole.tobytes()


def has_fixed_sizes(case: Case) -> bool:
    """Whether it takes no empty slice, or is told all sizes of what it gives, so that its plan leaves it whole."""
    return case.op in NEVER_EMPTY or (case.op == "Resize" and len(case.inputs) > 3 and not case.attributes.get("axes"))


def test_slices_end_with_an_axis_that_is_shorter_than_planned() -> None:
    """One element is left, so that the first of two slices is cut short, and the second is empty."""
    tried = [_ends_shorter(case) for case in CASES if case.axes and not has_fixed_sizes(case)]
    assert sum(tried) > 100


def _ends_shorter(case: Case) -> bool:
    """Whether the case can be tried; it is."""
    model, feeds = _described(case)
    node = model.graph.node(0)
    index = next(index for index, axes in enumerate(case.axes.split("/")) if axes)
    axis = min(case.accepts(index))
    how = slicing(node, {index: axis})
    assert isinstance(how, Slicing)
    cut = {str(value.name): axis for i, axis in how.inputs.items() if (value := node.inputs[i]) is not None}
    units = {name: feeds[name].shape[axis] for name, axis in cut.items() if name in feeds}
    if units.keys() != cut.keys() or len(set(units.values())) > 1 or max(units.values()) < 3:
        return False
    shorter = {n: feed[elements(cut[n], 0, 1)] if n in cut else feed for n, feed in feeds.items()}
    size = max(units.values())
    if node.op_type in ("Reshape", "Expand", "Squeeze"):  # which the whole is told for the whole
        (of_all,), place = _run(model, feeds, None), how.outputs[0]
        expected = [of_all[elements(place, 0, of_all.shape[place] // size)]]
    else:
        expected = _run(model, shorter, None)
    ended = _run(model, shorter, Band((SliceStage(0, 1, (0, 2, size)),)), how)
    for joined, whole in zip(ended, expected, strict=True):
        assert (joined.shape, joined.dtype) == (whole.shape, whole.dtype), case
        np.testing.assert_allclose(joined, whole, rtol=1e-5, atol=1e-5, err_msg=str(case))
    return True


def _run(
    model: ir.Model, feeds: dict[str, np.ndarray], band: Band | None, how: Slicing | None = None
) -> list[np.ndarray]:
    made = model.clone() if band is None else in_slices(model, [band], [how], is_ranged=True).model
    for value in (*made.graph.inputs, *made.graph.outputs, *(v for node in made.graph for v in node.outputs)):
        value.shape = None
    return networks.stock(ir.to_proto(made), "ORT_DISABLE_ALL").run(None, feeds)


def test_every_rule_has_a_case() -> None:
    seen = {operator_name(ir.from_proto(case.model).graph.node(0)) for case in CASES}
    assert sorted(seen ^ set(RULES)) == []


def _model(text: str) -> ir.Model:
    """A model in text, its header left out; a node is named by its operator."""
    model = ir.from_proto(onnx.shape_inference.infer_shapes(parse(text, opset=20, ir_version=10)))
    for node in model.graph:
        node.name = f"the {node.op_type}"
    return model


REFUSED = {
    "y = Softmax <axis = 1> (x)": "node 'the Softmax' (Softmax) reduces over axis 1",
    "y = MatMul (x, x)": "node 'the MatMul' (MatMul) sums over axis 1 of 'x'",
    "y = ReduceMean (x)": "node 'the ReduceMean' (ReduceMean) reduces over axis 1",
    "y, mean, var = BatchNormalization <training_mode = 1> (x, c, c, c, c)": "takes statistics over its input",
    "y = RandomNormalLike (x)": "draws random numbers, others for slices of axis 1",
    "y, mask = Dropout (x, ratio, yes)": "draws random numbers",
    "y = NonZero (x)": "has outputs whose size only the run can tell",
    "y = Shape (x)": "gives the size of its input, which is cut along axis 1",
    "y = Scan <num_scan_inputs = 1, body = b (float[4] i) => (float[4] o) {o = Relu (i)}> (x)": "runs a subgraph",
    "y = ConvTranspose (x4, x4)": "can't be cut where its input 'x4' is cut along axis 0",
    "y = Det (x)": "node 'the Det' (Det) has no rule for running on slices, and depends on axis 1",
    "y = CumSum (x, one)": "adds up along axis 1",
    "y = Gather <axis = 1> (x, one)": "picks from axis 1",
    "y = Slice (x, shape, shape, one)": "takes 'shape', which decides what it does along each axis and is no constant",
    "y = Reshape (x, shape)": "has a value ('y') whose shape only the run can tell",
    "t = Transpose (x) y = Add (x, t)": "reads values that are cut along different axes: [0, 1] of its output",
    "r = Unsqueeze (x, zero) y = Reshape (r, to28)": "in which slices of axis 2 aren't slices of one axis",
    "y = Concat <axis = 1> (x, x)": "joins its inputs along axis 1",
    "y, z = MaxPool <kernel_shape = [1, 1]> (x4)": "numbers the elements of its input",
}


@pytest.mark.parametrize(("nodes", "reason"), REFUSED.items())
def test_what_cannot_be_cut_is_refused_with_a_sentence(nodes: str, reason: str) -> None:
    text = f"""g (float[4, 4] x, float[4, 4, 4, 4] x4, float[4] c, int64[2] shape) => (float[] y)
        <int64[1] zero = {{0}}, int64[1] one = {{1}}, float ratio = {{0.5}}, bool yes = {{1}}, int64[2] to28 = {{2, 8}}>
        {{ {nodes} }}"""
    found = [each for each in axes_of(_model(text), {"x": 1, "x4": 0}).nodes if isinstance(each, Refusal)]
    assert len(found) == 1
    assert reason in str(found[0])


def test_axes_follow_the_graph_up_to_what_refuses() -> None:
    text = """g (float[6, 4] x, float[4, 4] w) => (float[24] y, float[4, 4] v)
        <int64[3] split = {6, 2, 2}, int64[1] flat = {24}>
        { v = Relu (w) a = MatMul (x, w) b = Reshape (a, split) c = Softmax <axis = 0> (b) y = Reshape (b, flat)
          d = Abs (c) }"""
    axes = axes_of(_model(text), {"x": 0})
    assert axes.size == 6
    assert axes.values == {"x": 0, "a": 0, "b": 0, "y": 0}
    assert [type(each) for each in axes.nodes] == [type(None), Slicing, Slicing, Refusal, Slicing, type(None)]


def test_keys_and_values_of_attention_by_rows_are_needed_whole() -> None:
    text = """g (float[2, 6, 4] q, float[2, 6, 4] k) => (float[2, 6, 6] y)
        { t = Transpose <perm = [0, 2, 1]> (k) s = MatMul (q, t) p = Softmax <axis = -1> (s) y = MatMul (p, k) }"""
    axes = axes_of(_model(text), {"q": 1, "k": 1})
    assert axes.nodes[1] == Slicing({0: 1}, {0: 1}, frozenset({1}))
    assert axes.nodes[3] == Slicing({0: 1}, {0: 1}, frozenset({1}))
    assert axes.values["t"] == 2


@pytest.mark.parametrize("seeds", [{}, {"other": 0}, {"x": 2}])
def test_bad_seeds_are_named(seeds: dict[str, int]) -> None:
    with pytest.raises(PlanError, match="|".join(map(repr, seeds)) or "no value"):
        axes_of(_model("g (float[6, 4] x) => (float[6, 4] y) { y = Relu (x) }"), seeds)
