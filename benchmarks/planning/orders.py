"""Evaluation orders: peak of ours beside the file's, onnxruntime's and list schedulers', on branchy networks.

``python -m benchmarks.planning.orders [NAME ...] [--tensorflow PYTHON]`` prints the table, and
writes orders.txt unless rows are named. Nothing is recomputed or runs in chunks, and all orders share
bytes by the same rules, so that only the order differs. SERENITY (Ahn et al. 2020)
reports 1.68 times less peak than TensorFlow Lite on cells of such networks and of others. With a Python that has
TensorFlow, such cells are converted by it, and the order of its file stands beside ours of the same operators.
"""

import argparse
import json
import math
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random

import networkx as nx

import memonger
from benchmarks.machine import MIB, Table, geometric_mean, keep, stamp
from benchmarks.networks import write
from memonger.allocation import allocate
from memonger.graph.graph import Graph
from memonger.graph.liveness import assign_storage, peak_bytes
from memonger.graph.schedule import schedule_graph
from memonger.planner.networkx_graph import from_networkx
from memonger.schedule.every_schedule import least_arena
from memonger.schedule.orders import by_depth, by_growth, by_peak, default_order, file_order
from models.wired import CELL, CHANNELS, SIZE, WIRED, wired

BRANCHY = ("googlenet", "unet", "densenet121", "mobilenet_v2", "resnet50", "vit", "gpt", "pyramid", "swin_tiny")
SEEDS = range(1, 11)
SMALL = range(100)
LARGE = 10_000
COLUMNS = Table(
    "network<24", "nodes>6", "ours MiB>9.2f", "bound>6.3f", "arena>6.3f", "file>7.3f", "breadth>8.3f", "ort>7.3f",
    "lists>7.3f", "seconds>8.2f",
)  # fmt: skip

CELLS = Table("cell<24", "nodes>6", "ours MiB>9.2f", "file>7.3f", "most>7.3f", "breadth>8.3f")


def graph_of(model: object, device: str = "none", batch: int = 1) -> Graph:
    """The planner's graph of a model, in the order of its file."""
    plan = memonger.search_plan(model, mode="inference", device=device, batch=batch, order="file", chunks="off")
    return plan.graph


def breadth_first(graph: Graph) -> tuple[int, ...]:
    """Kahn's order: of the ready nodes the one that was ready first."""
    edges = [(source, node) for node, sources in enumerate(graph.sources) for source in sources]
    whole = nx.DiGraph(edges)
    whole.add_nodes_from(range(len(graph.nodes)))
    return tuple(nx.topological_sort(whole))


def needed(graph: Graph, order: Sequence[int]) -> int:
    """Most bytes alive at any step."""
    return peak_bytes(assign_storage(schedule_graph(graph, order)).buffers, len(order))


def compared(graph: Graph) -> tuple[float, ...]:
    """Nodes, our peak in MiB; the bound, our arena and other orders' peaks over it; seconds."""
    begin = time.process_time()
    order = by_peak(graph)
    seconds = time.process_time() - begin
    ours = needed(graph, order)
    others = [needed(graph, each) for each in (file_order(graph), breadth_first(graph),
                                               default_order(graph.sources, file_order(graph)))]  # fmt: skip
    lists = min(needed(graph, each(graph)) for each in (file_order, by_growth, by_depth))
    arena = allocate(assign_storage(schedule_graph(graph, order)).buffers).size
    bound = least_arena(graph, again=False)
    return len(graph.nodes), ours / MIB, *(each / ours for each in (bound, arena, *others, lists)), seconds


def converted(kind: str, seed: int, python: str) -> Graph:
    """The operators of one cell as TensorFlow Lite has them, in the order of its file; each tensor is one value."""
    wires = sorted(WIRED[kind](CELL, 100 * seed).edges)
    asked = json.dumps({"wires": wires, "nodes": CELL, "channels": CHANNELS, "size": SIZE})
    command = [python, str(Path(__file__).with_name("tflite_operators.py"))]
    pipes = {"input": asked, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    said = json.loads(subprocess.run(command, text=True, check=True, **pipes).stdout.splitlines()[-1])
    drawn, writer = nx.DiGraph(), dict[int, int]()
    steps = [([], [tensor]) for tensor in said["inputs"]] + list(zip(said["reads"], said["writes"], strict=True))
    for step, (reads, writes) in enumerate(steps):
        drawn.add_node(step, bytes=sum(said["bytes"][tensor] for tensor in writes), cost=1.0)
        drawn.add_edges_from((writer[tensor], step) for tensor in reads if tensor in writer)
        writer.update((tensor, step) for tensor in writes)
    return from_networkx(drawn)[0]


def average(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Geometric means; the mean number of nodes, and the most seconds."""
    columns = list(zip(*rows, strict=True))
    nodes, seconds = round(sum(columns[0]) / len(rows)), max(columns[-1])
    return nodes, *map(geometric_mean, columns[1:-1]), seconds


def of_brute_force() -> str:
    """How often ours is as good as the best of all orders, of random graphs of 4 to 9 nodes."""
    equal, worst = 0, 1.0
    for seed in SMALL:
        rng = Random(seed)
        edges = nx.gnp_random_graph(rng.randint(4, 9), 0.35, seed=seed, directed=True).edges
        drawn = nx.DiGraph((a, b) for a, b in edges if a < b)
        drawn.add_nodes_from(range(4))
        nx.set_node_attributes(drawn, {node: {"bytes": 64 * rng.randint(1, 99), "cost": 1.0} for node in drawn})
        graph, names = from_networkx(drawn)
        number = {name: index for index, name in enumerate(names)}
        best = min(needed(graph, [number[n] for n in order]) for order in nx.all_topological_sorts(drawn))
        ratio = needed(graph, by_peak(graph)) / best
        equal, worst = equal + math.isclose(ratio, 1), max(worst, ratio)
    return f"{len(SMALL)} random graphs of at most 9 nodes: {equal} as brute force, the worst {worst:.3f} times that"


def large(kind: str) -> Graph:
    """About 10,000 nodes."""
    if kind in WIRED:
        return graph_of(wired(kind, [LARGE // 5], 1, channels=16))
    rng, drawn = Random(1), nx.DiGraph()
    drawn.add_nodes_from((node, {"bytes": 64 * rng.randint(1, 100), "cost": 1.0}) for node in range(LARGE))
    drawn.add_edges_from((rng.randrange(max(0, i - 1000), i), i) for i in range(1, LARGE) for _ in range(3))
    return from_networkx(drawn)[0]


def rows() -> Iterator[tuple[str, Callable[[], tuple[float, ...]]]]:
    """Rows by name."""
    for kind in WIRED:
        yield kind, lambda kind=kind: average([compared(graph_of(wired(kind, (CELL,) * 3, s))) for s in SEEDS])
    for name in BRANCHY:
        for device in ("none", "cpu"):
            yield f"{name} {device}", lambda name=name, device=device: network(name, device)
    for kind in (*islice(WIRED, 1), "random"):
        yield f"{kind} {LARGE}", lambda kind=kind: compared(large(kind))


def network(name: str, device: str) -> tuple[float, ...]:
    """The row of one of `benchmarks.networks` at batch 4."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.onnx"
        write(name, path)
        return compared(graph_of(path, device, 4))


def cells(python: str) -> Iterator[str]:
    """Lines of the table of cells that TensorFlow Lite converted."""
    yield ""
    yield f"cells of {CELL} nodes as TensorFlow Lite converts them: geometric means of {len(SEEDS)}, and the largest"
    yield CELLS.heading
    for kind in WIRED:
        rows = [compared(converted(kind, seed, python)) for seed in SEEDS]
        nodes, ours, _, _, file, breadth, *_ = average(rows)
        yield CELLS.row(kind, nodes, ours, file, max(row[4] for row in rows), breadth)


def table(names: Sequence[str], python: str | None) -> Iterator[str]:
    """Lines of the table, as they are measured."""
    command = "planning.orders --tensorflow PYTHON" if python else "planning.orders"
    yield from stamp(command, ["networkx", "numpy", "onnxruntime", "torch"])
    yield "peak of our order, and over it: the bound on all orders, our arena, and the peaks of other orders: the"
    yield "file's, breadth first, onnxruntime's default, the best of the file's and two list schedulers'; cpu seconds"
    yield f"randomly wired: geometric means of {len(SEEDS)} networks; cpu: as onnxruntime's optimizer left it"
    yield ""
    yield of_brute_force()
    yield ""
    yield COLUMNS.heading
    for name, row in rows():
        if not names or name.split()[0] in names:
            yield COLUMNS.row(name, *row())
    yield from cells(python) if python else ()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these; no table is written")
    parser.add_argument("--tensorflow", metavar="PYTHON", help="one that has TensorFlow: its orders, too")
    asked = parser.parse_args()
    keep(table(asked.names, asked.tensorflow), None if asked.names else Path(__file__).with_suffix(".txt"))


if __name__ == "__main__":
    main()
