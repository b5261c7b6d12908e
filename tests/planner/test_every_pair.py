"""Every pair of options, on two of three small networks: it plans and runs, or docs/OPTIONS.md shows that it can't.

Pairs aren't tried one by one: each case has as many options as go together, so that a few dozen cases have every pair.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import memonger
from memonger.options import EXCLUSIONS, Keywords
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
    "precision": [{"precision": "float16", "loss": LOSS}],
    "device": [{"device": "none"}, {"device": "cpu"}, {"device": "cuda"}],
    "budget": [{"budget": "64MiB"}],
    "weights": [{"weights": "packed"}, {"weights": "mapped"}],
    "strategy": [
        *({"strategy": name} for name in ("none", "cheap", "block", "sqrt", "log", "sweep", "marks")),
        *({"strategy": name, "budget": "64MiB"} for name in ("budget", "exact")),
    ],
    "mirror": [{"mirror": ["act"]}],
    "keep": [{"keep": ["a"]}],
    "trials": [{"trials": 2}],
    "effort": [{"effort": 50}],
    "time_limit": [{"time_limit": 0.2}],
    "chunks": [{"chunks": "off"}, {"chunks": 2, "batch": 2}],
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


def given(name: str, n: int, s: int, seed: int = 0) -> dict[str, np.ndarray]:
    x = normal(seed, *{"convolutions": (n, 3, s, s)}.get(name, (n, s, 6)))
    return {"x": x} | ({"h": normal(seed + 1, n, 8)} if name == "recurrent" else {})


def labels(n: int) -> np.ndarray:
    return np.arange(n) % 4


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


def is_refused(chosen: Sequence[int]) -> bool:
    """Whether options don't go together, or are three that don't: gradients of 16 bits at the runtime's own levels.

    Portable plans in 16 bits don't run on the CPU, which has no kernels for them: with these two no other is tried.
    """
    options = merged(chosen)
    three = options.get("level") == "disable" and "buckets" in options and "precision" in options
    portable = options.get("device") == "none" and "precision" in options
    return three or portable or bool(exclusion(tuple(sorted(chosen))))


def clash(one: int, other: int) -> bool:
    """Whether two values give one option two values."""
    first, second = ALL[one][1], ALL[other][1]
    return ALL[one][0] == ALL[other][0] or any(first[key] != second[key] for key in first.keys() & second.keys())


@cache
def cases() -> tuple[tuple[int, ...], ...]:
    """Sets of values, each as many as go together, in which every pair that goes together is."""
    here = [number for number, (_, value) in enumerate(ALL) if value.get("device") != "cuda"]
    pairs = itertools.combinations(here, 2)
    missing = dict.fromkeys(pair for pair in pairs if not clash(*pair) and not exclusion(pair))
    made = []
    while missing:
        case = list(next(iter(missing)))
        while True:
            gains = {}
            for value in set(here) - set(case):
                gain = sum(tuple(sorted((value, one))) in missing for one in case)
                if gain and not any(clash(value, one) for one in case) and not is_refused((*case, value)):
                    gains[value] = gain
            best = max(sorted(gains), key=gains.__getitem__, default=None)
            if best is None:
                break
            case.append(best)
        for pair in itertools.combinations(sorted(case), 2):
            missing.pop(pair, None)
        made.append(tuple(sorted(case)))
    return tuple(made)


def test_the_page_shows_the_exclusions() -> None:
    rows = [f"| {each.first} | {each.second} | {each.reason} | {each.instead} |" for each in EXCLUSIONS]
    shown = re.sub(r"\[(\w+)\]", r"`\1`", re.sub(r"\[(\w+)=(\w+)\]", r"`\1='\2'`", "\n".join(rows)))
    assert shown in PAGE.read_text(), f"docs/OPTIONS.md has to have these rows:\n{shown}"
    assert len(EXCLUSIONS) <= 8


def test_every_option_has_a_value() -> None:
    assert VALUES.keys() == Keywords.__annotations__.keys() == memonger.Options.__annotations__.keys()


def test_what_does_not_go_together_is_refused_by_one_row_of_the_table() -> None:
    said = {str(each): each for each in EXCLUSIONS}
    refused = [
        pair for pair in itertools.combinations(range(len(ALL)), 2) if not clash(*pair) and exclusion(tuple(pair))
    ]
    assert {exclusion(pair) for pair in refused} == said.keys(), "each row is needed"
    for pair in refused:
        assert not any(exclusion((one,)) for one in pair), "each of the two goes by itself"


BY_TURNS = itertools.cycle(["perceptron", "convolutions"])


@pytest.mark.parametrize(
    ("case", "name"),
    [(case, name) for case in cases() for name in (next(BY_TURNS), "recurrent")],
    ids=lambda one: one if isinstance(one, str) else "-".join(map(str, one)),
)
def test_every_pair_plans_and_runs(case: tuple[int, ...], name: str) -> None:
    """On the network that has a state, and on one of the others by turns. A CUDA device isn't tried here."""
    options = merged(case)
    if name != "recurrent":
        options.pop("state", None)
    sizes = (6, 2, 4) if "dims" in options else (SIZE,)
    options = {"dims": {"s": SIZE}, "device": "cpu" if needs_cpu(options) else "none"} | options
    n = options.get("batch", 1)
    if "inputs" in options:
        options["inputs"] = given(name, n, sizes[0]) | ({"labels": labels(n)} if "loss" in options else {})
    plan = memonger.search_plan(model(name), **options)
    assert plan.budget is None or plan.total_bytes <= plan.budget
    if plan.mode == "training":
        if "precision" in options and options["device"] == "none":
            return  # see `is_refused`
        expected = cross_entropy(run_stock(model(name), given(name, n, SIZE), "ORT_DISABLE_ALL")["y"])
        assert train(plan, name, n) == pytest.approx(expected, rel=0.01 if "precision" in options else 1e-5)
        return
    assert plan.state == options.get("state", {})
    session, kept = memonger.Session(plan), dict[str, Any]()
    for turn, s in enumerate(sizes * 2):
        feeds = given(name, n, s, turn)
        own = {key: feed for key, feed in feeds.items() if key not in plan.state or turn == 0}
        found, stock = session.run(own), run_stock(model(name), feeds | kept, "ORT_DISABLE_ALL")
        np.testing.assert_allclose(found["y"], stock["y"], rtol=1e-4, atol=1e-6)
        kept = {old: stock[new] for old, new in plan.state.items()}


STRATEGIES = {case: merged(case).get("strategy") for case in cases()}

SOME = [one for one, strategy in STRATEGIES.items() if (len(one) > 15 or strategy == "budget") and strategy != "exact"]
"""Large ones, and the one with marks and a budget; the exact strategy takes seconds for a frontier."""


@pytest.mark.parametrize("case", SOME, ids=lambda case: "-".join(map(str, case)))
def test_a_frontier_and_a_fit_take_what_a_plan_takes(case: tuple[int, ...]) -> None:
    """But for strategies that take no budget, a frontier; and for the batch, which varies, and a number of chunks."""
    options = {"dims": {"s": SIZE}, "effort": 50} | merged(case) | {"device": "none"}
    for name in ("inputs", *(["chunks"] if options.get("chunks") == 2 else [])):
        options.pop(name, None)
    trains = options.get("mode") == "training" or "loss" in options or "mirror" in options
    if options.get("strategy") in ("budget", "exact", None):
        plans = memonger.pareto(model("recurrent"), points=1, **options | {"budget": None})
        assert [each.overhead for each in plans] == sorted(each.overhead for each in plans)
        assert {each.mode for each in plans} == {"training" if trains else "inference"}
    if "mirror" in options:
        return  # tests/schedule/test_marks.py has a fit with marks
    options.pop("batch", None)
    memory = None if "budget" in options else "8KiB"
    found = memonger.fit(model("recurrent"), memory, **options | ({"budget": "8KiB"} if memory is None else {}))
    assert found.plan is not None
    assert found.plan.total_bytes <= found.memory == 8 * memonger.KiB
    assert found.plan.ranges.keys() == ({"s"} if "dims" in merged(case) else set())
    assert found.plan.state == options.get("state", {})


def needs_cpu(options: Chosen) -> bool:
    """Whether a plan of options without a device runs as it was made for the CPU alone."""
    return options.get("chunks") == 2 or "precision" in options


def train(plan: memonger.Plan, name: str, n: int) -> float:
    """The loss of a step, or of the scores that it gives where no loss was planned."""
    roles, feeds = plan.training, given(name, n, SIZE)
    assert roles is not None
    if roles.loss is not None:
        feeds["labels"] = labels(n)
    if roles.updates:
        session = memonger.DistributedTrainingSession if plan.graph.collectives else memonger.TrainingSession
        return session(plan).step(feeds)
    shapes = {str(value.name): tuple(map(int, value.shape or ())) for value in plan.model.graph.inputs}
    feeds |= {one: np.ones(shapes[one], np.float32) for one in roles.output_gradients.values()}
    found = memonger.Session(plan).run(feeds)
    assert all(np.abs(found[gradient]).max() > 0 for gradient in roles.gradients.values())
    return cross_entropy(found["y"]) if roles.loss is None else float(found[roles.loss])


def cross_entropy(scores: np.ndarray) -> float:
    chances = np.exp(scores.astype(np.float64))
    return float(-np.log((chances / chances.sum(1, keepdims=True))[np.arange(len(scores)), labels(len(scores))]).mean())
