"""What is changed: models of onnx's node tests and of `models`, with inputs for them."""

import functools
import importlib
import pkgutil
import random
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx.backend.test.case.node as node_tests
from onnx import helper, numpy_helper

import models
from tests.support import backend_cases, planning_models, training_models
from tests.support.stock import parse

Feeds = dict[str, Any]

NETWORKS: dict[str, dict[str, Any]] = {
    "resnet18": {"image": 32, "width": 0.125}, "unet": {"image": 32, "width": 0.0625},
    "gpt": {"num_layers": 1, "width": 16, "seq_len": 8, "vocabulary": 20, "heads": 2},
    "vit": {"image": 16, "patch": 8, "num_layers": 1, "width": 16, "heads": 2, "classes": 4},
    "mobilenet_v2": {"image": 32, "width": 0.125}, "lstm": {"seq_len": 8, "num_hidden": 32, "vocabulary": 50},
}  # fmt: skip
LARGEST = 1 << 20  # elements of a drawn input

WRITTEN = (
    """g (float[2,3,8,8] x) => (float[] y) {
        f = Constant<value_ints=[2,-1]>()  r = Reshape(x, f)  y = ReduceSum<keepdims=0>(r) }""",
    """g (float[2,3,8,8] x) => (float[2,3,n,m] y) {
        a = Relu(x)  b = MaxPool<kernel_shape=[3,3],strides=[2,2]>(a)  y = Sigmoid(b) }""",
    """g (float[2,3,8,8] x) => (float[2,6,8,8] y, float[2,3,8,8] z) {
        a = Relu(x)  b = Neg(a)  c = Concat<axis=1>(a, b)  y = Exp(c)
        p = Constant<value_ints=[0,0,1,1,0,0,1,1]>()  d = Pad(a, p)
        e = AveragePool<kernel_shape=[3,3]>(d)  z = Add(e, a) }""",
    """g (float[2,3,8,8] x) => (float[2,3,8,8] y) {
        k = Constant<value_int=3>()  t = Constant<value_ints=[1]>()  c = Cast<to=9>(t)  s = Squeeze(c)
        y = Loop(k, s, x) <body = b (int64 i, bool p, float[2,3,8,8] a) => (bool q, float[2,3,8,8] n) {
            q = Identity(p)  m = Relu(a)  n = Add(m, a) }> }""",
    """g (float[N,8] x, int64[2] i) => (float[2,8] y, float[k,8] z) {
        y = Gather<axis=0>(x, i)  a, b = Split<axis=1,num_outputs=2>(x)  c = Concat<axis=1>(b, a)  z = Tanh(c) }""",
)


@functools.cache
def _modules() -> tuple[str, ...]:
    folders = [(node_tests.__path__, node_tests.__name__)]
    folders.append(([f"{node_tests.__path__[0]}/ai_onnx_ml"], f"{node_tests.__name__}.ai_onnx_ml"))
    found = [
        f"{name}.{module.name}" for path, name in folders for module in pkgutil.iter_modules(path) if not module.ispkg
    ]
    return tuple(sorted(name for name in found if not name.endswith("_test_case_helper")))


@functools.cache
def _node_tests(module: str) -> tuple[Any, ...]:
    """The tests that a module adds to onnx's list as it is imported.

    Expected outputs of pooling are zeros: nobody looks at them here, and onnx takes seconds to compute them.
    """
    before = len(node_tests._NodeTestCases)
    with backend_cases.made_quickly(pool=_zeros), warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        importlib.import_module(module)
    return tuple(node_tests._NodeTestCases[before:])


def _zeros(
    padded: np.ndarray, x_shape: Sequence[int], kernel: Any, strides: Any, out_shape: Any, *_: Any, **__: Any
) -> Any:
    """What `op_pool_common.pool` returns, but for its numbers."""
    return np.zeros([*x_shape[:2], *out_shape], padded.dtype)


@functools.cache
def network(name: str) -> onnx.ModelProto:
    """A small network of `models`."""
    return models.build(name, batch=2, **NETWORKS[name])


def preload() -> None:
    """Make every model now: forked processes then have them."""
    for module in _modules():
        _node_tests(module)
    for name in NETWORKS:
        network(name)


def draw(choice: random.Random) -> tuple[onnx.ModelProto, Feeds, str]:
    """A model to change, inputs for it where it comes with some, and what it is."""
    kind = choice.random()
    if kind < 0.65:
        cases = ()
        while not cases:
            cases = _node_tests(choice.choice(_modules()))
        case = choice.choice(cases)
        feeds = dict(zip((v.name for v in case.model.graph.input), case.data_sets[0][0], strict=False))
        return copy(case.model), {name: _array(feed) for name, feed in feeds.items()}, case.name
    if kind < 0.75:
        name = choice.choice(list(NETWORKS))
        return copy(network(name)), {}, name
    if kind < 0.8:
        return planning_models.chain(3), {}, "chain"
    if kind < 0.85:
        return training_models.classifier(), {}, "classifier"
    number = choice.randrange(len(WRITTEN))
    return parse(WRITTEN[number], opset=18), {}, f"written {number}"


def copy(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same again."""
    return onnx.ModelProto.FromString(model.SerializeToString())


def _array(feed: Any) -> Any:
    if isinstance(feed, list):
        return [_array(one) for one in feed]
    return numpy_helper.to_array(feed) if isinstance(feed, onnx.TensorProto) else feed


def feeds_for(choice: random.Random, model: onnx.ModelProto, given: Feeds) -> Feeds:
    """Inputs of the types and shapes the model declares; those given where they fit it."""
    inside = {tensor.name for tensor in model.graph.initializer}
    feeds = {}
    for value in model.graph.input:
        feed = given.get(value.name)
        if value.name in inside:
            continue
        kind = value.type.tensor_type
        dims = [dim.dim_value if dim.HasField("dim_value") else 2 for dim in kind.shape.dim]
        fits = isinstance(feed, np.ndarray) and (not kind.HasField("shape") or list(feed.shape) == dims)
        size = np.prod([max(dim, 0) for dim in dims], dtype=object) if dims else 1
        if feed is not None and (fits or not value.type.HasField("tensor_type") or size > LARGEST):
            feeds[value.name] = feed
        elif value.type.HasField("tensor_type") and size <= LARGEST and min(dims, default=0) >= 0:
            feeds[value.name] = _random(choice, kind.elem_type, dims)
    return feeds


def _random(choice: random.Random, kind: int, dims: list[int]) -> np.ndarray:
    generator = np.random.default_rng(choice.randrange(2**32))
    try:
        dtype = helper.tensor_dtype_to_np_dtype(kind)
    except (KeyError, TypeError, ValueError):
        dtype = np.dtype(np.float32)
    if dtype.hasobject:
        return generator.choice(["a", "b"], dims).astype(object)
    if np.issubdtype(dtype, np.floating):
        return generator.standard_normal(dims).astype(dtype)
    return generator.integers(0, 2, dims).astype(dtype)
