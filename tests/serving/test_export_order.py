"""The order stock onnxruntime takes by itself, as its profiler shows it, and the file that makes the best of it."""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

import memonger
import models
from memonger.graph.graph import Graph
from memonger.runtime.profile import read_profile
from memonger.serving import order
from tests.support.networks import model_of


def executed_by_default(path: Path, folder: Path) -> list[str]:
    """The nodes of a model in the order stock onnxruntime runs them in without being told, by its profiler."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    session.run(None, {i.name: np.ones([d or 1 for d in i.shape], np.float32) for i in session.get_inputs()})
    return [run.name for run in read_profile(Path(session.end_profiling()))]


def random_model(seed: int) -> onnx.ModelProto:
    """Sums of one to three earlier values; what nobody reads is an output."""
    rng = random.Random(seed)
    nodes, values = [], ["x"]
    for number in range(rng.randint(5, 40)):
        read = rng.choices(values[-8:], k=rng.randint(1, 3))
        nodes.append(helper.make_node("Sum", read, [f"v{number}"], f"n{number}"))
        values.append(f"v{number}")
    inner = {name for node in nodes for name in node.input}
    return model_of(nodes, {"x": [4]}, {name: [4] for name in values if name not in inner})


@pytest.mark.parametrize("seed", range(12))
def test_the_order_is_the_one_the_profiler_shows(tmp_path: Path, seed: int) -> None:
    plan = memonger.search_plan(random_model(seed), mode="inference", device="none", order="file")
    plan.save(tmp_path / "model.onnx")
    own = order.written_as_is(plan.graph)
    assert executed_by_default(tmp_path / "model.onnx", tmp_path) == [plan.graph.nodes[node] for node in own.executed]


def test_of_two_branches_the_later_in_the_file_runs_first() -> None:
    assert order.default_order([(), (0,), (0,), (1, 2)], (0, 1, 2, 3)) == (0, 2, 1, 3)
    assert order.default_order([(), (0,), (0,), (1, 2)], (0, 2, 1, 3)) == (0, 1, 2, 3)


def graph_of(sources: Sequence[Sequence[int]], sizes: Sequence[int]) -> Graph:
    """A graph of nodes with one value each; the last one's is the output."""
    count = len(sources)
    return Graph(
        nodes=tuple(f"n{i}" for i in range(count)), ops=("Sum",) * count, values=tuple(f"v{i}" for i in range(count)),
        sizes=tuple(sizes), planned=(True,) * count, reads=tuple(tuple(found) for found in sources),
        writes=tuple((i,) for i in range(count)), outputs=(count - 1,),
        forward=(True,) * count, costs=(1.0,) * count, workspace=(0,) * count,
    )  # fmt: skip


def best_by_brute_force(graph: Graph) -> int:
    """The least peak of ``DEFAULT`` order over all files, every topological order tried."""
    sources = graph.sources
    files = (
        one
        for one in itertools.permutations(range(len(sources)))
        if all(one.index(source) < one.index(node) for node, found in enumerate(sources) for source in found)
    )
    return min(order.stock_bytes(graph, order.default_order(sources, one)) for one in files)


@st.composite
def trees(draw: st.DrawFn) -> Graph:
    """Every node but the last is read by one later node."""
    count = draw(st.integers(2, 7))
    sources: list[list[int]] = [[] for _ in range(count)]
    for node in range(count - 1):
        sources[draw(st.integers(node + 1, count - 1))].append(node)
    return graph_of(sources, draw(st.lists(st.integers(1, 100), min_size=count, max_size=count)))


@given(trees())
def test_no_file_of_a_tree_does_better(graph: Graph) -> None:
    assert order.best_file_order(graph).peak_bytes == best_by_brute_force(graph)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Nodes that read up to three earlier ones."""
    count = draw(st.integers(2, 6))
    sources = [sorted(draw(st.sets(st.integers(0, node - 1), max_size=3))) if node else [] for node in range(count)]
    return graph_of(sources, draw(st.lists(st.integers(1, 100), min_size=count, max_size=count)))


@given(graphs())
def test_the_file_is_a_topological_order_and_no_worse_than_the_graphs_own(graph: Graph) -> None:
    best, sources = order.best_file_order(graph), graph.sources
    for sequence in (best.written, best.executed):
        assert sorted(sequence) == list(range(len(sources)))
        assert all(sequence.index(s) < sequence.index(node) for node, found in enumerate(sources) for s in found)
    assert best.executed == order.default_order(sources, best.written)
    assert best.peak_bytes == order.stock_bytes(graph, best.executed)
    assert best_by_brute_force(graph) <= best.peak_bytes <= order.written_as_is(graph).peak_bytes


@pytest.mark.parametrize("network", ["densenet_bc100", "unet", "gpt", "lstm", "googlenet"])
def test_peaks_of_networks_are_no_less_than_with_values_written_in_place(network: str) -> None:
    settings = {"lstm": {"seq_len": 8, "num_hidden": 64}, "unet": {"image": 64}}.get(network, {})
    plan = memonger.search_plan(models.build(network, batch=1, **settings), mode="inference", device="none")
    best = order.best_file_order(plan.graph)
    assert best.peak_bytes >= plan.peak_bytes


def test_a_chain_deeper_than_the_interpreters_stack_is_ordered() -> None:
    sources = [[node - 1] if node else [] for node in range(5000)]
    assert order.best_file_order(graph_of(sources, [8] * 5000)).executed == tuple(range(5000))
