"""Which tensors are trained: what the file says, and what is left out where it says nothing."""

import json
from collections.abc import Sequence

import onnx
import pytest

import memonger
from memonger.errors import PlanError
from memonger.model import parameters

HEAD = '<ir_version: 10, opset_import: ["": 20]>'
TEXT = f"""{HEAD} g (float[2,4] x, int64[2] i) => (float[2,4] y)
<float[4] w = {{1.0, 2.0, 3.0, 4.0}}, float[4] b = {{0.0, 0.0, 0.0, 0.0}}, float low = {{0.0}}, float high = {{6.0}},
 int64[1] axis = {{1}}, float[4] twice = {{1.0, 1.0, 1.0, 1.0}}> {{
    one = Constant<value_float=1.0>()
    p = Mul(x, w)
    q = Add(p, b)
    r = Clip(q, low, high)
    s = Mul(r, one)
    t = Mul(s, twice)
    m = ReduceSum(t, axis)
    y = Add(t, m)
}}"""


def _loaded(text: str = TEXT, **metadata: str) -> memonger.Model:
    model = onnx.parser.parse_model(text)
    for key, value in metadata.items():
        model.metadata_props.add(key=key.replace("_", "."), value=value)
    return memonger.load(model)


def _trainable(model: memonger.Model) -> tuple[str, ...]:
    return parameters.trainable(model)


def _chosen(wrt: Sequence[str] | None = None, frozen: Sequence[str] = ()) -> list[str]:
    model = _loaded()
    return [str(value.name) for value in parameters.choose(model, wrt, frozen)]


def test_settings_constants_and_integers_are_no_parameters() -> None:
    assert _trainable(_loaded()) == ("w", "b", "twice")


def test_a_tensor_that_is_a_setting_and_more_is_a_parameter() -> None:
    assert "high" in _trainable(_loaded(TEXT.replace("Mul(s, twice)", "Mul(s, high)")))


VECTORS = ", ".join(f"float[4] {name} = {{1.0, 1.0, 1.0, 1.0}}" for name in "abcd")


@pytest.mark.parametrize(
    ("node", "given", "left"),
    [
        ("y = BatchNormalization(x, a, b, c, d)", VECTORS, ("a", "b")),
        ("y = Pad(x, none, c)", "float c = {0.5}, int64[4] none = {0, 0, 0, 0}", ()),
        ("o = Dropout(x, c) y = Mul(o, a)", "float c = {0.5}, float[4] a = {1.0, 1.0, 1.0, 1.0}", ("a",)),
    ],
)
def test_statistics_and_other_settings(node: str, given: str, left: tuple[str, ...]) -> None:
    assert _trainable(_loaded(f"{HEAD} g (float[2,4] x) => (float[2,4] y) <{given}> {{ {node} }}")) == left


def test_what_the_file_lists_counts() -> None:
    assert _trainable(_loaded(memonger_parameters=json.dumps(["b", "x", "gone"]))) == ("b", "x")


@pytest.mark.parametrize("text", ["b", "{}", "[1]"])
def test_a_malformed_list_is_an_error(text: str) -> None:
    with pytest.raises(PlanError, match=r"'memonger.parameters' is not a JSON list of names"):
        _trainable(_loaded(memonger_parameters=text))


def test_kinds_that_pytorchs_exporter_writes_count() -> None:
    model = onnx.parser.parse_model(TEXT)
    kinds = {"w": "PARAMETER", "b": "BUFFER", "twice": "CONSTANT_TENSOR"}
    for name, kind in kinds.items():
        described = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4])
        described.metadata_props.add(key=parameters.EXPORTED_KIND, value=kind)
        model.graph.value_info.append(described)
    assert _trainable(memonger.load(model)) == ("w",)


def test_names_and_patterns_choose() -> None:
    assert _chosen() == ["w", "b", "twice"]
    assert _chosen(["x", "b"]) == ["x", "b"]
    assert _chosen(["tw*", "?"], ["x", "i"]) == ["twice", "w", "b"]
    assert _chosen("low") == ["low"]  # type: ignore[arg-type]
    assert _chosen(None, ["t*"]) == ["w", "b"]
    assert _chosen(["w"], ["b"]) == ["w"]


@pytest.mark.parametrize(
    ("wrt", "frozen", "message"),
    [
        (["nobody"], (), r"wrt names 'nobody', which is no input or initializer; there are 'x', 'i'"),
        (None, ["no*"], r"frozen names 'no\*'"),
        (["i"], (), r"'i' is int64: only floating-point tensors have gradients"),
        (None, ["*"], "nothing to differentiate by"),
        ((), (), "nothing to differentiate by"),
    ],
)
def test_choices_that_cannot_be(wrt: Sequence[str] | None, frozen: Sequence[str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        _chosen(wrt, frozen)
