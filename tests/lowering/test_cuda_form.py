"""BatchNormalization, marks, names and training steps as written out for CUDA: run on the CPU, beside float64."""

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

import memonger
import models
from memonger.ir.marks import COMPOSITE, FORCE, PART, STAGE
from memonger.lowering import cuda
from memonger.lowering.cuda import normalization, rules
from memonger.lowering.lowered import portable
from tests.support.cuda_written import assert_close, written
from tests.support.gradient_checks import Arrays, parse, run
from tests.support.passes import after

# BatchNormalization.

SHAPES = [(4, 3), (1, 2, 5), (2, 3, 4), (2, 3, 4, 5), (1, 3, 4, 5), (2, 3, 2, 3, 4), (3, 2, 1, 1)]


def batch_normalization(shape: tuple[int, ...], outputs: str, settings: str) -> str:
    dims, c = ", ".join(map(str, shape)), shape[1]
    given = outputs.replace("nm", f"FLOAT[{c}] nm").replace("nv", f"FLOAT[{c}] nv").replace("y", f"FLOAT[{dims}] y")
    return (
        f"g (FLOAT[{dims}] x, FLOAT[{c}] s, FLOAT[{c}] b, FLOAT[{c}] m, FLOAT[{c}] v) => ({given}) "
        f"{{ {outputs} = BatchNormalization <training_mode=1, {settings}> (x, s, b, m, v) }}"
    )


def normalization_feeds(shape: tuple[int, ...], dtype: Any = np.float32, ratio: float = 0.0) -> Arrays:
    generator = np.random.default_rng(0)
    feeds = {"x": generator.standard_normal(shape) + ratio}
    feeds |= {name: generator.uniform(0.5, 2.0, shape[1]) for name in "sbmv"}
    return {name: array.astype(dtype) for name, array in feeds.items()}


def batch_statistics(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    axes = tuple(axis for axis in range(x.ndim) if axis != 1)
    wide = x.astype(np.float64)
    return wide.mean(axes), wide.var(axes)


def normalized(feeds: Arrays, epsilon: float) -> np.ndarray:
    x, s, b = (feeds[name].astype(np.float64) for name in "xsb")
    mean, variance = batch_statistics(x)
    column = (-1, *[1] * (x.ndim - 2))
    scale = s / np.sqrt(variance + epsilon)
    return np.asarray((x - mean.reshape(column)) * scale.reshape(column) + b.reshape(column))


@pytest.fixture(params=["two passes", "from images"])
def statistics(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models too by either form of the statistics."""
    monkeypatch.setattr(normalization, "LARGE", 1 if request.param == "from images" else 1 << 40)


@pytest.mark.usefixtures("statistics")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("momentum", [0.0, 0.75, 1.0])
def test_batch_normalization_is_what_the_standard_says(shape: tuple[int, ...], momentum: float) -> None:
    text = batch_normalization(shape, "y, nm, nv", f"momentum={momentum}, epsilon=0.01")
    feeds = normalization_feeds(shape)
    found = run(written(text), feeds)
    mean, variance = batch_statistics(feeds["x"])
    assert_close(found["y"], normalized(feeds, 0.01), 1e-6)
    assert_close(found["nm"], feeds["m"].astype(np.float64) * momentum + mean * (1 - momentum), 1e-6)
    assert_close(found["nv"], feeds["v"].astype(np.float64) * momentum + variance * (1 - momentum), 1e-6)


@pytest.mark.usefixtures("statistics")
def test_batch_normalization_is_what_the_cpu_kernel_gives() -> None:
    text = batch_normalization((4, 3, 6, 6), "y, nm, nv", "momentum=0.5").replace(", FLOAT[3] nm, FLOAT[3] nv)", ")")
    feeds = normalization_feeds((4, 3, 6, 6))
    assert_close(run(written(text), feeds)["y"], run(parse(text, "float", 20), feeds)["y"].astype(np.float64), 1e-6)


@pytest.mark.usefixtures("statistics")
@pytest.mark.parametrize("ratio", [1.0, 100.0, 1000.0])
def test_a_variance_does_not_cancel_against_a_large_mean(ratio: float) -> None:
    text = batch_normalization((4, 8, 16, 16), "y, nm, nv", "momentum=0.0")
    feeds = normalization_feeds((4, 8, 16, 16), ratio=ratio)
    found = run(written(text), feeds)
    _, variance = batch_statistics(feeds["x"])
    assert float(np.abs(found["nv"] / variance - 1).max()) < 2e-6
    assert_close(found["y"], normalized(feeds, 1e-5), 1e-6 * ratio)  # the mean's own rounding


@pytest.mark.usefixtures("statistics")
def test_channels_of_one_number_have_no_variance() -> None:
    text = batch_normalization((2, 3, 4, 4), "y, nm, nv", "momentum=0.0")
    feeds = normalization_feeds((2, 3, 4, 4)) | {"x": np.full((2, 3, 4, 4), 7.3, np.float32)}
    found = run(written(text), feeds)
    assert found["nv"].min() >= 0.0
    assert found["nv"].max() < 1e-10
    assert_close(found["y"], np.broadcast_to(feeds["b"].reshape(1, 3, 1, 1), (2, 3, 4, 4)), 1e-3)


@pytest.mark.usefixtures("statistics")
def test_float64_keeps_its_precision() -> None:
    text = batch_normalization((2, 3, 4, 5), "y, nm, nv", "momentum=0.5")
    feeds = normalization_feeds((2, 3, 4, 5), np.float64, 100.0)
    found = run(written(parse(text, "double", 20)), feeds)
    assert found["nv"].dtype == np.float64
    assert_close(found["y"], normalized(feeds, float(np.float32(1e-5))), 1e-12)


class LayerNormalization(OpRun):
    """In float32 from half precision, as `stash_type` says; onnx.reference gives the statistics in half."""

    op_domain = ""

    def _run(self, x, scale, axis=-1, epsilon=1e-5, stash_type=1):  # type: ignore[no-untyped-def]
        wide = x.astype(np.float32)
        mean = wide.mean(axis, keepdims=True, dtype=np.float64).astype(np.float32)
        inverse = 1 / np.sqrt(np.mean((wide - mean) ** 2, axis, keepdims=True) + np.float32(epsilon))
        return ((wide - mean) * inverse * scale).astype(x.dtype), mean, inverse


@pytest.mark.usefixtures("statistics")
@pytest.mark.parametrize("statistics_type", ["float16", "float"])
@pytest.mark.parametrize("ratio", [0.0, 50.0])
def test_half_precision_is_summed_in_float32(statistics_type: str, ratio: float) -> None:
    """On the reference evaluator: the CPU has no such kernels. At a mean of 50, float16 is in steps of 1/32."""
    shape, wide = (8, 3, 24, 24), np.float16 if statistics_type == "float16" else np.float32
    text = batch_normalization(shape, "y, nm, nv", "momentum=0.0")
    text = text.replace("FLOAT[3]", f"{statistics_type}[3]")
    feeds = normalization_feeds(shape, wide, ratio)
    feeds["x"] = feeds["x"].astype(np.float16)
    model = written(parse(text, "float16", 20))
    y, mean, variance = ReferenceEvaluator(model, new_ops=[LayerNormalization]).run(None, feeds)
    wanted_mean, wanted = batch_statistics(feeds["x"])
    assert (y.dtype, mean.dtype, variance.dtype) == (np.float16, wide, wide)
    assert_close(mean, wanted_mean, 1e-3 if wide is np.float16 else 1e-6)
    assert_close(variance, wanted, 1e-3 if wide is np.float16 else 1e-5)
    assert_close(y, normalized(feeds, 1e-5), 2e-3)


def test_an_inference_form_of_mixed_types_is_brought_to_one() -> None:
    text = (
        "g (float16[2,3,8] x, float[3] s, float[3] b, float[3] m, float[3] v) => (float16[2,3,8] y) "
        "{ y = BatchNormalization <epsilon=0.001> (x, s, b, m, v) }"
    )
    feeds = normalization_feeds((2, 3, 8), ratio=50.0) | {"m": np.array([49.99, 50.01, 50.003], np.float32)}
    feeds["x"] = feeds["x"].astype(np.float16)
    model = written(text)
    (node,) = (n for n in model.graph.node if n.op_type == "BatchNormalization")
    types = {v.name: v.type.tensor_type.elem_type for v in (*model.graph.value_info, *model.graph.input)}
    assert {types.get(name, onnx.TensorProto.FLOAT16) for name in node.input} == {onnx.TensorProto.FLOAT16}
    x, s, b, m, v = (feeds[name].astype(np.float64) for name in "xsbmv")
    wanted = (x - m[:, None]) * (s / np.sqrt(v + 0.001))[:, None] + b[:, None]
    assert_close(ReferenceEvaluator(model).run(None, feeds)[0], wanted, 2e-3)


def test_what_is_in_inference_form_stays() -> None:
    text = (
        "g (FLOAT[2,3,8] x, FLOAT[3] s, FLOAT[3] b, FLOAT[3] m, FLOAT[3] v) => (FLOAT[2,3,8] y) "
        "{ y = BatchNormalization(x, s, b, m, v) }"
    )
    model = memonger.load(parse(text, "float", 20))
    assert after(cuda.write_out_for_cuda, model) is model


def test_an_older_operator_set_is_raised() -> None:
    text = batch_normalization((2, 3, 4), "y, nm, nv", "momentum=0.5")
    feeds = normalization_feeds((2, 3, 4))
    found = run(written(parse(text, "float", 15)), feeds)
    assert_close(found["y"], normalized(feeds, 1e-5), 1e-6)


# The model around.


def marked() -> memonger.Model:
    """BatchNormalization between two nodes, with marks and a name of its own."""
    text = (
        "g (FLOAT[2,3,4] x, FLOAT[3] s, FLOAT[3] b, FLOAT[3] m, FLOAT[3] v) => (FLOAT[2,3,4] z, FLOAT[3] nm) "
        "{ h = Relu(x) y, nm, nv = BatchNormalization <training_mode=1> (h, s, b, m, v) z = Relu(y) }"
    )
    model = memonger.load(parse(text, "float", 20))
    (node,) = (n for n in model.ir.graph if n.op_type == "BatchNormalization")
    node.metadata_props.update({STAGE: "second", FORCE: "True"})
    return model


def test_marks_and_names_survive() -> None:
    model = marked()
    made = after(cuda.write_out_for_cuda, model).ir
    producers = {str(v.name): node for node in made.graph for v in node.outputs}
    assert {"h", "y", "nm", "z"} <= set(producers)
    assert producers["y"].op_type == "BatchNormalization"
    assert producers["y"].metadata_props[STAGE] == "second"
    parts = [node for node in made.graph if node.metadata_props.get(PART) == "y"]
    assert len(parts) > 3
    assert all(node.metadata_props[FORCE] == "True" for node in parts)
    assert not any(STAGE in node.metadata_props for node in parts)


def test_the_model_given_is_not_changed() -> None:
    model = marked()
    before = ir.to_proto(model.ir).SerializeToString(deterministic=True)
    assert after(cuda.write_out_for_cuda, model) is not model
    assert ir.to_proto(model.ir).SerializeToString(deterministic=True) == before


def test_nodes_of_unknown_shape_stay() -> None:
    text = (
        "g (FLOAT[2,3,4] x, FLOAT[3] w) => (FLOAT[N, 3] y) "
        "{ i = NonZero(x) j = Transpose(i) k = Cast <to=1> (j) y = Mean(k, w) }"
    )
    model = memonger.load(parse(text, "float", 20))
    assert after(cuda.write_out_for_cuda, model) is model


def test_a_second_rule_for_an_operator_is_refused() -> None:
    with pytest.raises(ValueError, match="BitShift has a rule already"):
        rules.rule("BitShift")(lambda op, node: None)


# Training steps.

NETWORKS = {
    "mobilenet_v2": {"image": 64, "width": 0.1, "classes": 10},
    "resnet18": {"image": 32, "width": 0.07, "classes": 10},
    "gpt": {"num_layers": 2, "width": 16, "seq_len": 8, "vocabulary": 20, "dropout": 0.2},
    "lstm": {"seq_len": 3, "num_hidden": 8, "vocabulary": 20, "dropout": 0.2},
    "unet": {"image": 32, "width": 0.1},
}


def training_step(name: str) -> memonger.Model:
    model = memonger.load(models.build_ir(name, batch=4, training=True, **NETWORKS[name]))
    return memonger.differentiate(model, loss="loss", optimizer=memonger.SGD(lr=0.01, momentum=0.9), clip_norm=1.0)


def step_feeds(model: onnx.ModelProto) -> Arrays:
    """Data, state and parameters; initializers are defaults."""
    generator, defaults = np.random.default_rng(1), {t.name for t in model.graph.initializer}
    feeds: Arrays = {}
    for value in model.graph.input:
        dims = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        if value.name not in defaults:
            whole = generator.integers(0, 2, dims).astype(dtype)
            feeds[value.name] = generator.standard_normal(dims).astype(dtype) if dtype == np.float32 else whole
    return feeds


@pytest.mark.parametrize("name", NETWORKS)
def test_a_training_step_is_the_same(name: str) -> None:
    """Float32 against float32, whose own error is that large: gradients pass up to 50 normalizations over 4 images."""
    source = ir.to_proto(training_step(name).ir)
    made = written(source)
    feeds = step_feeds(source)
    wanted, found = run(source, feeds), run(made, feeds)
    assert list(found) == list(wanted)
    assert np.isfinite(found["loss"]).all()
    assert_close(found["loss"], wanted["loss"].astype(np.float64), 1e-5)
    for key, array in wanted.items():
        assert_close(found[key], array.astype(np.float64), 1e-3)


@pytest.mark.parametrize("image", [(28, 28), (30,)])
def test_what_rules_write_as_convolutions_for_the_cpu_is_none_here(image: tuple[int, ...]) -> None:
    """Gradients of the weights of a 1x1 and of a depthwise convolution, and a normalization's sums over channels."""
    dims, ones = ",".join(map(str, image)), "1," * (len(image) - 1)
    text = (
        f"g (FLOAT[2,3,{dims}] x, FLOAT[4,3,{ones}1] p, FLOAT[3,1,{ones}3] d, FLOAT[3] s, FLOAT[3] m) => (float l) "
        "{ h, nm, nv = BatchNormalization <training_mode=1> (x, s, m, m, s) a = Conv (h, p) b = Conv <group=3> (h, d) "
        "i = ReduceSumSquare <keepdims=0> (a) j = ReduceSumSquare <keepdims=0> (b) l = Add(i, j) }"
    )
    model = memonger.differentiate(parse(text, "float", 20), loss="l", wrt=["p", "d", "s", "m"])
    made = after(cuda.write_out_for_cuda, model)
    composites = {node.name for node in model.ir.graph if node.metadata_props.get(COMPOSITE) in rules.RULES}
    assert composites
    assert not composites & {node.name for node in made.ir.graph}
    assert not any(COMPOSITE in node.metadata_props for form in (made.ir, portable(model).model) for node in form.graph)
    source = ir.to_proto(model.ir)
    feeds = step_feeds(source) | {"s": np.array([0.5, 1.0, 1.5], np.float32)}
    wanted, found = run(source, feeds), run(ir.to_proto(made.ir), feeds)
    for key, array in wanted.items():
        assert_close(found[key], array.astype(np.float64), 1e-5)


def test_a_plan_is_found_for_what_is_written_out() -> None:
    model = training_step("resnet18")
    plan = memonger.search_plan(after(cuda.write_out_for_cuda, model), device="none", mode="training", strategy="none")
    source = memonger.search_plan(model, device="none", mode="training", strategy="none")
    assert plan.peak_bytes < 1.3 * source.peak_bytes
