"""Small files that ask for much."""

from collections.abc import Callable
from itertools import pairwise

import onnx

from tests.support.stock import parse


def calls(depth: int = 40) -> onnx.ModelProto:
    """Functions each of which calls the one before twice; the first is Relu."""
    head = '<domain: "f", opset_import: ["": 21, "f": 1]>'
    functions = [f"{head} f0 (x) => (y) {{ y = Relu(x) }}"]
    functions += [f"{head} f{n + 1} (x) => (y) {{ a = f.f{n}(x) y = f.f{n}(a) }}" for n in range(depth)]
    graph = f"g (float[4] x) => (float[4] y) {{ y = f.f{depth}(x) }}"
    start = '<ir_version: 10, opset_import: ["": 21, "f": 1]>'
    return onnx.parser.parse_model("\n".join([start, graph, *functions]))


def doubling(times: int = 40) -> onnx.ModelProto:
    """A vector joined with itself, again and again."""
    joins = "\n".join(f"p{n + 1} = Concat <axis = 0> (p{n}, p{n})" for n in range(times))
    return parse(f"g (int64[1] p0) => (int64[N] p{times}) {{ {joins} }}", opset=21)


def loop(turns: int = 2**62) -> onnx.ModelProto:
    """A Loop that has no end in sight."""
    return parse(
        f"g (float[1] x) => (float[1] y) <int64 n = {{{turns}}}, bool t = {{1}}, float[1] one = {{1.0}}>"
        " { y = Loop (n, t, x) <body = b (int64 i, bool c, float[1] s) => (bool c2, float[1] s2)"
        " { c2 = Identity(c)\n s2 = Add(s, one) }> }",
        opset=21,
    )


def chain(length: int = 100_000) -> onnx.ModelProto:
    """One node after the other."""
    wires = enumerate(pairwise(["x", *(f"v{n}" for n in range(length))]))
    nodes = "\n".join(f"{b} = {('Relu', 'Neg')[n % 2]}({a})" for n, (a, b) in wires)
    return parse(f"g (float[4] x) => (float[4] v{length - 1}) {{ {nodes} }}", opset=21)


def alive(count: int = 20_000) -> onnx.ModelProto:
    """Values that are all alive at once: a Sum reads them last."""
    nodes = "\n".join(f"v{n} = {('Relu', 'Neg')[n % 2]}(x)" for n in range(count))
    names = ", ".join(f"v{n}" for n in range(count))
    return parse(f"g (float[16] x) => (float[16] y) {{ {nodes}\n y = Sum({names}) }}", opset=21)


def summands(count: int = 1_000_000) -> onnx.ModelProto:
    """A Sum of one value, many times."""
    return parse(f"g (float[4] x) => (float[4] y) {{ y = Sum({', '.join(['x'] * count)}) }}", opset=21)


def parts(count: int = 50_000) -> onnx.ModelProto:
    """A vector cut into single numbers, which are joined again."""
    names = ", ".join(f"p{n}" for n in range(count))
    text = f"{names} = Split <axis = 0, num_outputs = {count}> (x)\n y = Concat <axis = 0> ({names})"
    return parse(f"g (float[{count}] x) => (float[{count}] y) {{ {text} }}", opset=21)


NETWORKS: dict[str, Callable[[], onnx.ModelProto]] = {
    "40 functions, each calls 2": calls,
    "40 Concat(p, p)": doubling,
    "Loop of 2^62 turns": loop,
    "chain of 100,000 nodes": chain,
    "20,000 values alive at once": alive,
    "Sum of 1,000,000 inputs": summands,
    "Split of 50,000, Concat": parts,
}
