"""Mixed precision: which node runs in which type, gradients beside PyTorch's autocast, and loss scaling."""

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

import memonger
from memonger.errors import PlanError
from tests.support.training_steps import Stock, batch, model, net, twin

HALF, SINGLE = ir.DataType.FLOAT16, ir.DataType.FLOAT
NETWORK = """<ir_version: 10, opset_import: ["": 20]>
g (float[2,3,6,6] x, float[1,1,1,1] mask) => (float[2,4] y)
<float[4,3,3,3] w = {WEIGHT}, float[4] s = {1,2,3,4}, float[4] b = {0,0,0,0}, float[4] m = {0,0,0,0},
 float[4] v = {1,1,1,1}, float[4] shift = {1,2,3,4}, float least = {-1e38}, float half = {0.5}> {
    a = Conv(x, w)
    n = BatchNormalization(a, s, b, m, v)
    r = Relu(n)
    t = Transpose<perm = [0,2,3,1]>(a)
    u = Add(t, shift)
    h = Mul(u, half)
    l = Max(h, least)
    e = Exp(h)
    k = MatMul(h, q)
    p = GlobalAveragePool(r)
    i = Flatten(p)
    j = ReduceSum<keepdims=0>(l, axes)
    o = ReduceMean<keepdims=0>(e, axes)
    z = ReduceMean<keepdims=0>(k, axes)
    y = Sum(i, j, o, z)
}"""


def _network() -> onnx.ModelProto:
    text = NETWORK.replace("{WEIGHT}", "{" + ",".join(["0.1"] * 108) + "}")
    made = onnx.parser.parse_model(text)
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32), "q"))
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 2], np.int64), "axes"))
    return made


def test_each_node_has_the_type_that_autocast_would_give_it() -> None:
    mixed = memonger.to_mixed_precision(_network(), "float16")
    onnx.checker.check_model(mixed.proto, full_check=True)
    types = {node.outputs[0].name: node.outputs[0].dtype for node in mixed.graph if node.op_type != "Cast"}
    assert {name for name, dtype in types.items() if dtype == HALF} == {"a", "t", "u", "h", "k"}
    assert {v.dtype for v in mixed.graph.inputs} == {v.dtype for v in mixed.graph.outputs} == {SINGLE}
    weights = {name: v.dtype for name, v in mixed.graph.initializers.items() if name in ("w", "q", "s", "shift")}
    assert weights == dict.fromkeys(("w", "q", "s", "shift"), SINGLE)
    casts = Counter((node.inputs[0], node.outputs[0].dtype) for node in mixed.graph if node.op_type == "Cast")
    assert max(casts.values()) == 1
    assert not any(node.inputs[0].producer() in [c for c in mixed.graph if c.op_type == "Cast"] for node in mixed.graph
                   if node.op_type == "Cast")  # fmt: skip


def test_a_sigmoid_that_is_an_output_stays_one_for_the_loss() -> None:
    text = """<ir_version: 10, opset_import: ["": 20]>
    g (float[2,2] x) => (float[2,2] y) <float[2,2] w = {1,2,3,4}> { a = MatMul(x, w) y = Sigmoid(a) }"""
    training = memonger.differentiate(
        memonger.to_mixed_precision(onnx.parser.parse_model(text), "float16"), loss="binary_cross_entropy"
    )
    x, target = np.array([[1, -1], [2, 0]], np.float32), np.array([[1, 0], [0, 1]], np.float32)
    given = {"x": x, "target": target, "w": np.array([[1, 2], [3, 4]], np.float32)}
    found = dict(zip([v.name for v in training.graph.outputs], ReferenceEvaluator(training.proto).run(None, given),
                     strict=True))  # fmt: skip
    w = torch.tensor([[1.0, 2], [3, 4]], requires_grad=True)
    loss = nn.functional.binary_cross_entropy_with_logits(torch.from_numpy(x) @ w, torch.from_numpy(target))
    loss.backward()
    np.testing.assert_allclose(found["loss"], loss.detach(), rtol=1e-3)
    np.testing.assert_allclose(found["w.grad"], w.grad, rtol=5e-3, atol=1e-3)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.second(torch.softmax(nn.functional.gelu(self.norm(self.first(x))), -1)))


def _block(module: nn.Module) -> onnx.ModelProto:
    made = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 20]>
    g (float[5,3,6] x) => (float[5,3,4] y) {
        w = Transpose("first.weight")  a = MatMul(x, w)  b = Add(a, "first.bias")
        c = LayerNormalization(b, "norm.weight", "norm.bias")  d = Gelu(c)  e = Softmax(d)
        v = Transpose("second.weight")  f = MatMul(e, v)  y = Add(f, "second.bias")
    }""")
    tensors = ((name, p.detach().numpy()) for name, p in module.named_parameters())
    made.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in tensors)
    return made


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_gradients_are_as_near_to_float32_as_those_of_autocast(precision: str) -> None:
    torch.manual_seed(0)
    module, x, labels = _Block(), torch.randn(5, 3, 6), torch.arange(15).reshape(5, 3) % 4
    mixed = memonger.to_mixed_precision(_block(module), precision)  # type: ignore[arg-type]
    loss = memonger.SoftmaxCrossEntropy(axis=-1)
    training = memonger.differentiate(mixed, loss=loss)
    names = {name: str(v.const_value.numpy().dtype) for name, v in training.graph.initializers.items() if v.const_value}
    assert {names[name] for name, _ in module.named_parameters()} == {"float32"}
    given = {"x": x.numpy(), "labels": labels.numpy(), **{n: p.detach().numpy() for n, p in module.named_parameters()}}
    found = dict(zip([v.name for v in training.graph.outputs], ReferenceEvaluator(training.proto).run(None, given),
                     strict=True))  # fmt: skip

    def gradients(enabled: bool) -> dict[str, np.ndarray]:
        module.zero_grad()
        with torch.autocast("cpu", getattr(torch, precision), enabled=enabled):
            y = module(x)
        nn.functional.cross_entropy(y.float().reshape(15, 4), labels.reshape(15)).backward()
        return {name: p.grad.numpy().copy() for name, p in module.named_parameters() if p.grad is not None}

    exact, theirs = gradients(False), gradients(True)

    def error(of: dict[str, np.ndarray], suffix: str = "") -> float:
        return float(np.sqrt(sum(np.sum((of[f"{n}{suffix}"] - g) ** 2) for n, g in exact.items())))

    assert 0 < error(found, ".grad") < 2 * error(theirs)


def test_the_backward_pass_keeps_no_float32_copy_of_16_bits() -> None:
    """A value that is cast up for the forward pass is cast again; one that was rounded is read as rounded."""
    made = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 20]>
    g (float[4,8] x) => (float[4,8] y) {
        a = MatMul(x, w)  b = Exp(a)  c = Softmax(b)  d = MatMul(c, w)  y = Sqrt(d)
    }""")
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.full((8, 8), 0.1, np.float32), "w"))
    graph = memonger.differentiate(memonger.to_mixed_precision(made, "float16")).graph
    forward = {str(node.name) for node in graph if not str(node.name).startswith(("grad/", "update"))}
    for node in graph:
        for value in node.outputs if node.name in forward else ():
            readers = [str(reader.name).startswith("grad/") for reader, _ in value.uses()]
            if value.dtype == SINGLE and any(readers) and not all(readers):
                assert node.outputs[0].name == "b", node  # Exp's output: Softmax reads it in float32


def test_a_step_in_float16_scales_the_loss_and_its_gradients_back() -> None:
    """Whatever the scale, the updates are the same: powers of two change no digit. Without one they would vanish."""
    _, proto = twin()
    made = memonger.differentiate(
        memonger.to_mixed_precision(memonger.to_training_mode(proto), "float16"),
        loss=memonger.SoftmaxCrossEntropy(reduction="sum"), optimizer=memonger.Adam(lr=0.1), clip_norm=1.0,
    )  # fmt: skip
    assert made.training is not None
    assert set(made.training.scalars) == {"learning_rate", "step", "loss_scale"}
    steps = []
    for scale in (2.0**4, 2.0**8):
        stock = Stock(made)
        results = stock.step(batch(0), loss_scale=scale, learning_rate=0.1)
        steps.append((results["gradient_norm"], stock.state["0.weight"]))
    np.testing.assert_allclose(steps[0][0], steps[1][0], rtol=1e-5)
    np.testing.assert_allclose(steps[0][1], steps[1][1], rtol=1e-5, atol=1e-6)
    bfloat = memonger.differentiate(
        memonger.to_mixed_precision(proto, "bfloat16"), loss="softmax_cross_entropy", optimizer=memonger.SGD()
    )
    assert bfloat.training is not None
    assert "loss_scale" not in bfloat.training.scalars


def test_training_form_before_and_after_is_the_same_and_evaluation_is_in_float32() -> None:
    proto = model(net())
    before = memonger.to_mixed_precision(memonger.to_training_mode(proto), "float16")
    after = memonger.to_training_mode(memonger.to_mixed_precision(proto, "float16"))
    results = []
    for each in (before, after):
        made = memonger.differentiate(each, loss="softmax_cross_entropy", optimizer=memonger.SGD(lr=0.1))
        session = memonger.TrainingSession(memonger.search_plan(made, threads=1, chunks="off"))
        losses = [session.step(batch(seed)) for seed in range(3)]
        scores = session.evaluate({"x": batch(5)["x"]})["y"]
        state = session.state_dict()
        assert scores.dtype == np.float32
        module = net().eval()
        module.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()}, strict=False)
        np.testing.assert_allclose(scores, module(torch.from_numpy(batch(5)["x"])).detach(), rtol=1e-4, atol=1e-5)
        results.append(losses)
    np.testing.assert_allclose(*results, rtol=2e-3)


INTEGERS = """<ir_version: 10, opset_import: ["": 20]>
g (int64[2] x) => (int64[2] y) { y = Add(x, x) }"""
HALVES = """<ir_version: 10, opset_import: ["": 20]>
g (float16[2,2] x) => (float16[2,2] y) { y = MatMul(x, x) }"""


@pytest.mark.parametrize(
    ("source", "precision", "message"),
    [
        (HALVES, "float8", "precision must be 'float16' or 'bfloat16', not 'float8'"),
        (HALVES, "float16", "'x' is float16 already"),
        (INTEGERS, "bfloat16", "no product of float32 values that ONNX has in bfloat16"),
    ],
)
def test_what_has_no_mixed_precision_is_refused(source: str, precision: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        memonger.to_mixed_precision(onnx.parser.parse_model(source), precision)  # type: ignore[arg-type]


def test_precision_is_for_training_a_forward_model() -> None:
    proto = model(net())
    made = memonger.differentiate(proto, loss="softmax_cross_entropy")
    with pytest.raises(PlanError, match="is differentiated: give the forward model"):
        memonger.to_mixed_precision(made, "float16")
    with pytest.raises(PlanError, match="is differentiated already: precision='float16' is for training"):
        memonger.search_plan(made, precision="float16")
    with pytest.raises(PlanError, match="precision or buckets doesn't go with mode='inference'"):
        memonger.search_plan(proto, precision="float16")
    with pytest.raises(PlanError, match="precision must be"):
        memonger.search_plan(proto, precision="half")  # type: ignore[call-overload]
