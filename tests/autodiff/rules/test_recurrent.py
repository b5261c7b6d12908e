"""Gradients of LSTM, GRU and RNN."""

from typing import Any

import numpy as np
import onnx
import pytest
import torch

import memonger
from tests.support import gradient_checks
from tests.support.gradient_checks import parse, run
from tests.support.gradient_half import check_half

T, N, D, H = 4, 2, 3, 5
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
STATES = {"LSTM": 2, "GRU": 1, "RNN": 1}


def check(text: str, function: Any) -> onnx.ModelProto:
    """Against PyTorch alone: no recurrent operator has a float64 kernel."""
    return gradient_checks.check(text, function, differences=False)


def model(
    kind: str, attributes: str = "", inputs: str = "x w r b h c", outputs: str = "y yh yc", directions: int = 1
) -> str:
    """One recurrent node, as text. Inputs and outputs left out are empty."""
    d, g = directions, GATES[kind]
    shapes = {
        "x": f"{T},{N},{D}", "w": f"{d},{g * H},{D}", "r": f"{d},{g * H},{H}", "b": f"{d},{2 * g * H}", "": "",
        "h": f"{d},{N},{H}", "c": f"{d},{N},{H}", "y": f"{T},{d},{N},{H}", "yh": f"{d},{N},{H}", "yc": f"{d},{N},{H}",
    }  # fmt: skip
    given, made = inputs.split(), outputs.split()
    if kind != "LSTM":
        given, made = [n for n in given if n != "c"], [n for n in made if n != "yc"]
    taken = [n if n in given else "" for n in ("x", "w", "r", "b", "", "h", "c")]
    while not taken[-1]:
        taken.pop()
    left = [n if n in made else "" for n in ("y", "yh", "yc")[: 1 + STATES[kind]]]
    return (
        f"g ({', '.join(f'FLOAT[{shapes[n]}] {n}' for n in given)}) => "
        f"({', '.join(f'FLOAT[{shapes[n]}] {n}' for n in made)}) "
        f"{{ {', '.join(left)} = {kind} <hidden_size={H}{attributes}> ({', '.join(taken)}) }}"
    )


def reordered(kind: str, x: torch.Tensor) -> torch.Tensor:
    """ONNX's order of gates as PyTorch's: i, o, f, c as i, f, c, o and z, r, h as r, z, h."""
    order = {"LSTM": [0, 2, 3, 1], "GRU": [1, 0, 2], "RNN": [0]}[kind]
    parts = x.chunk(GATES[kind])
    return torch.cat([parts[k] for k in order])


def by_pytorch(kind: str, names: str, outputs: str, directions: int = 1, nonlinearity: str = "tanh") -> Any:
    """The same by PyTorch's own module."""

    def function(*values: torch.Tensor) -> list[torch.Tensor]:
        given = dict(zip([n for n in names.split() if kind == "LSTM" or n != "c"], values, strict=True))
        extra = {"nonlinearity": nonlinearity} if kind == "RNN" else {}
        module = getattr(torch.nn, kind)(D, H, bidirectional=directions == 2, **extra)
        weights = {}
        for d, suffix in enumerate(["", "_reverse"][:directions]):
            weights[f"weight_ih_l0{suffix}"] = reordered(kind, given["w"][d])
            weights[f"weight_hh_l0{suffix}"] = reordered(kind, given["r"][d])
            bias = given["b"][d] if "b" in given else torch.zeros(2 * GATES[kind] * H)
            for name, half in zip(("bias_ih_l0", "bias_hh_l0"), bias.chunk(2), strict=True):
                weights[name + suffix] = reordered(kind, half)
        h = given.get("h", torch.zeros(directions, N, H))
        c = given.get("c", torch.zeros(directions, N, H))
        y, state = torch.func.functional_call(module, weights, (given["x"], (h, c) if kind == "LSTM" else h))
        results = {"y": y.reshape(T, N, directions, H).transpose(1, 2)}
        results["yh"], results["yc"] = state if kind == "LSTM" else (state, state)
        return [results[n] for n in outputs.split() if kind == "LSTM" or n != "yc"]

    return function


def reset(kind: str) -> str:
    return ", linear_before_reset=1" if kind == "GRU" else ""


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("inputs", ["x w r b h c", "x w r", "x w r b"])
def test_recurrent(kind: str, inputs: str) -> None:
    check(model(kind, reset(kind), inputs), by_pytorch(kind, inputs, "y yh yc"))


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_both_directions(kind: str) -> None:
    text = model(kind, ', direction="bidirectional"' + reset(kind), directions=2)
    check(text, by_pytorch(kind, "x w r b h c", "y yh yc", 2))


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_backwards(kind: str) -> None:
    def function(*values: torch.Tensor) -> list[torch.Tensor]:
        y, *states = by_pytorch(kind, "x w r b h c", "y yh yc")(values[0].flip(0), *values[1:])
        return [y.flip(0), *states]

    check(model(kind, ', direction="reverse"' + reset(kind)), function)


@pytest.mark.parametrize("outputs", ["y", "yh", "yc", "yh yc"])
def test_some_outputs_alone(outputs: str) -> None:
    check(model("LSTM", outputs=outputs), by_pytorch("LSTM", "x w r b h c", outputs))


@pytest.mark.parametrize("outputs", ["y", "yh"])
def test_some_outputs_of_a_gru_alone(outputs: str) -> None:
    check(model("GRU", reset("GRU"), outputs=outputs), by_pytorch("GRU", "x w r b h c", outputs))


def gru_reset_before(
    x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, b: torch.Tensor, h: torch.Tensor
) -> list[torch.Tensor]:
    """By the operator's formulas."""
    state, outputs = h[0], []
    wb, rb = b[0].chunk(2)
    for step in x:
        (xz, xr, xn), (rz, rr, rn) = (step @ w[0].T + wb + rb).chunk(3, 1), r[0].chunk(3)
        z, s = torch.sigmoid(xz + state @ rz.T), torch.sigmoid(xr + state @ rr.T)
        n = torch.tanh(xn + (s * state) @ rn.T)
        state = (1 - z) * n + z * state
        outputs.append(state)
    return [torch.stack(outputs)[:, None], state[None]]


def test_gru_that_resets_before_the_product() -> None:
    check(model("GRU"), gru_reset_before)


def test_rnn_with_another_activation() -> None:
    function = by_pytorch("RNN", "x w r b h", "y yh", nonlinearity="relu")
    check(model("RNN", ', activations=["Relu"]'), function)


def test_outputs_stay_what_onnxruntime_computes() -> None:
    text = model("LSTM", ', direction="bidirectional"', directions=2)
    plain = parse(text, "float", 20)
    made = onnx.ModelProto.FromString(check(text, None).SerializeToString())
    assert "LSTM" not in {node.op_type for node in made.graph.node}
    generator = np.random.default_rng(0)
    feeds = {
        v.name: generator.standard_normal([d.dim_value for d in v.type.tensor_type.shape.dim]).astype(np.float32)
        for v in made.graph.input
    }
    found, wanted = run(made, feeds), run(plain, feeds)
    for name, value in wanted.items():
        assert np.allclose(found[name], value, atol=1e-5)


def test_sequence_lengths_that_say_the_whole_length() -> None:
    text = (
        f"g (FLOAT[{T},{N},{D}] x, FLOAT[1,{H},{D}] w, FLOAT[1,{H},{H}] r) => (FLOAT[{T},1,{N},{H}] y) "
        f"<int32[{N}] lengths = {{{T}, {T}}}> {{ y = RNN <hidden_size={H}> (x, w, r, , lengths) }}"
    )
    check(text, by_pytorch("RNN", "x w r", "y"))


@pytest.mark.parametrize(
    ("attribute", "named"), [('activations=["Swish"]', "activation Swish"), ("clip=1.0", "clip has no gradient rule")]
)
def test_what_cannot_be_unrolled_is_refused_where_it_matters(attribute: str, named: str) -> None:
    text = (
        f"g (FLOAT[{T},{N},{D}] x, FLOAT[1,{H},{D}] w, FLOAT[1,{H},{H}] r, FLOAT[{T},1,{N},{H}] s) => "
        f"(FLOAT[{T},1,{N},{H}] z) {{ y = RNN <hidden_size={H}, {attribute}> (x, w, r) z = Mul(y, s) }}"
    )
    with pytest.raises(memonger.PlanError, match=rf"node '\w+' \(RNN\): {named}"):
        memonger.differentiate(parse(text, "float", 20), wrt=["x"])
    memonger.differentiate(parse(text, "float", 20), wrt=["s"])


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_in_float16(kind: str) -> None:
    check_half(model(kind, reset(kind), "x w r b", "y"), wrt=["x", "w", "r", "b"], tolerance=2e-2)


def test_weights_stay_as_pytorch_stores_them() -> None:
    """Its exporter puts their gates into the standard's order: i, f, c, o as i, o, f, c."""
    rows = [f"FLOAT[{4 * H},{D}] p", f"FLOAT[{4 * H},{H}] q"]
    cuts = [
        f"{n}{k} = Slice({n}, c{k}, c{k + 1}, c0) " for n in "pq" for k in range(4)
    ]  # fmt: skip
    joins = [f"{n}w = Concat <axis=0> ({n}0, {n}3, {n}1, {n}2) {n}u = Unsqueeze({n}w, c0) " for n in "pq"]
    numbers = ", ".join(f"int64[1] c{k} = {{{k * H}}}" for k in range(5))
    text = (
        f"g (FLOAT[{T},{N},{D}] x, {', '.join(rows)}) => (FLOAT[{T},1,{N},{H}] y) <{numbers}> "
        f"{{ {''.join(cuts + joins)} y = LSTM <hidden_size={H}> (x, pu, qu) }}"
    )

    def function(x: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        module, zeros = torch.nn.LSTM(D, H), torch.zeros(4 * H)
        names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        return torch.func.functional_call(module, dict(zip(names, (p, q, zeros, zeros), strict=True)), (x,))[0][:, None]

    made = check(text, function)
    written = {name: node for node in made.graph.node for name in node.output}
    assert [written[f"{n}.grad"].op_type for n in "pq"] == ["Gemm", "Gemm"]
