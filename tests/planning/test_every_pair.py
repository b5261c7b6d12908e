"""Every pair of options, on three small networks: it plans and runs, or is one of the exclusions that docs/OPTIONS.md has.

Pairs aren't tried one by one: each case has as many options as go together, so that a few dozen cases have every pair.
"""

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import memonger
from memonger.planning.options import EXCLUSIONS, Keywords
from tests.support.stock import normal, parse, run_stock

Chosen = Mapping[str, Any]

PAGE = Path(__file__).parents[2] / "docs" / "OPTIONS.md"

SIZE = 4
"""Of the dimension ``s`` where it has no range."""

NETWORKS = {
    "perceptron": (
        "(float[n,s,6] x) => (float[n,4] y) { a = MatMul(x, w6) [act] r = Relu(a) p = ReduceMean<keepdims=0>(r, one) "
        "y = MatMul(p, v) }"
    ),
    "convolutions": (
        "(float[n,3,s,s] x) => (float[n,4] y) { a = Conv<pads=[1,1,1,1]>(x, k) [act] r = Relu(a) "
        "p = GlobalAveragePool(r) f = Flatten(p) y = MatMul(f, v) }"
    ),
    "recurrent": (
        "(float[n,s,6] x, float[n,8] h) => (float[n,4] y, float[n,8] next) { p = ReduceMean<keepdims=0>(x, one) "
        "a = MatMul(p, w6) b = MatMul(h, u) c = Add(a, b) [act] next = Tanh(c) y = MatMul(next, v) }"
    ),
}  # fmt: skip
"""Each has scores ``y`` for four classes and a node ``act``; its batch is open, and a dimension ``s``."""

LOSS = memonger.SoftmaxCrossEntropy(output="y")
STEP: Chosen = {"loss": LOSS, "optimizer": memonger.SGD(lr=0.1)}

VALUES: Mapping[str, Sequence[Chosen]] = {
    "mode": [{"mode": "inference"}, {"mode": "training"}],
    "batch": [{"batch": 2}],
    "dims": [{"dims": {"s": (2, 6, 2)}}],
    "loss": [{"loss": LOSS}],
    "optimizer": [STEP],
    "precision": [{"precision": "bfloat16", "loss": LOSS}],
    "device": [{"device": "cpu"}, {"device": "cuda"}],
    "budget": [{"budget": "64MiB"}],
    "strategy": [
        *({"strategy": name} for name in ("none", "cheap", "block", "sqrt", "log", "sweep", "marks")),
        *({"strategy": name, "budget": "64MiB"} for name in ("budget", "exact")),
    ],
    "mirror": [{"mirror": ["act"]}],
    "keep": [{"keep": ["a"]}],
    "trials": [{"trials": 2}],
    "effort": [{"effort": 50}],
    "time_limit": [{"time_limit": 5.0}],
    "chunks": [{"chunks": "off"}, {"chunks": 2, "device": "cpu"}],
    "max_overhead": [{"max_overhead": 0.5}],
    "allow_rounding": [{"allow_rounding": True}],
    "sharing": [
        {"sharing": memonger.Sharing(inplace=False, views=False)},
        {"sharing": memonger.Sharing(reuse=False, windows=False)},
    ],
    "order": [{"order": "file"}, {"order": "peak"}],
    "level": [{"level": "disable"}, {"level": "rewrite"}],
    "threads": [{"threads": 1}],
    "state": [{"state": {"h": "next"}}],
    "buckets": [{"buckets": memonger.Buckets(first=64, rest=128), **STEP}],
    "inputs": [{"inputs": {}}],
    "cuda": [{"cuda": memonger.Cuda(tf32=False)}],
    "progress": [{"progress": lambda _: None}],
}
"""Of each option values other than its default, with what such a value needs beside it. ``inputs`` are filled in."""

ALL = [(name, value) for name, values in VALUES.items() for value in values]


@cache
def model(name: str) -> onnx.ModelProto:
    proto = parse("g " + NETWORKS[name], opset=20, ir_version=10)
    weights = {"w6": (6, 8), "v": (8, 4), "u": (8, 8), "k": (8, 3, 3, 3)}
    read = {one for node in proto.graph.node for one in node.input}
    arrays = {key: normal(len(shape), *shape) / 4 for key, shape in weights.items()} | {"one": np.array([1])}
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(arrays[key], key) for key in sorted(read & set(arrays)))
    next(node for node in proto.graph.node if node.output[0] == "a").name = "a"
    return proto


def feeds(name: str, n: int, s: int, seed: int = 0) -> dict[str, np.ndarray]:
    x = normal(seed, *{"convolutions": (n, 3, s, s)}.get(name, (n, s, 6)))
    return {"x": x} | ({"h": normal(seed + 1, n, 8)} if name == "recurrent" else {})


def merged(chosen: Sequence[int]) -> dict[str, Any]:
    return {key: value for number in chosen for key, value in ALL[number][1].items()}


@cache
def exclusion(chosen: tuple[int, ...]) -> str:
    """What is said of options that don't go together; empty of those that do."""
    try:
        memonger.Options(**merged(chosen))
    except memonger.PlanError as error:
        return str(error)
    return ""


def clash(one: int, other: int) -> bool:
    """Whether two values give one option two values."""
    first, second = ALL[one][1], ALL[other][1]
    return ALL[one][0] == ALL[other][0] or any(first[key] is not second[key] for key in first.keys() & second.keys())


@cache
def cases() -> tuple[tuple[int, ...], ...]:
    """Sets of values, each as many as go together, in which every pair that goes together is."""
    pairs = itertools.combinations(range(len(ALL)), 2)
    missing = dict.fromkeys(pair for pair in pairs if not clash(*pair) and not exclusion(pair))
    made = []
    while missing:
        case = list(next(iter(missing)))
        while True:
            gains = {}
            for value in set(range(len(ALL))) - set(case):
                if not any(clash(value, one) for one in case) and not exclusion((*sorted(case), value)):
                    gains[value] = sum(tuple(sorted((value, one))) in missing for one in case)
            best = max(sorted(gains), key=gains.__getitem__, default=None)
            if best is None or not gains[best]:
                break
            case.append(best)
        for pair in itertools.combinations(sorted(case), 2):
            missing.pop(pair, None)
        made.append(tuple(sorted(case)))
    return tuple(made)


def test_cases() -> None:
    print(len(ALL), len(cases()), [len(c) for c in cases()])
