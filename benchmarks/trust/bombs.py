"""Small files that ask for much, each planned or refused: ``python -m benchmarks.trust.bombs`` writes bombs.txt.

Each file is given to ``memonger plan`` without a device and on the CPU; what was planned is verified and run. Beside it
stands what stock onnxruntime does with the file: a session with its default options, and one run. Every command has a
process of its own, which is ended after `LONGEST` seconds of processors, and gets at most `MEMORY` bytes of addresses.
Memory is the peak resident size of the command's largest process.
"""

import itertools
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click
import onnx
from onnx import TensorProto, helper

from benchmarks.machine import Table, keep, stamp

LONGEST, MEMORY = 100, 6 << 30
SAID = 110  # characters shown of what a command said
STOCK = """
import sys, numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
(x,) = session.get_inputs()
session.run(None, {x.name: numpy.zeros(x.shape, {"tensor(float)": "f4", "tensor(int64)": "i8"}[x.type])})
"""
TABLE = Table("network<28", "command<19", "seconds>8.1f", "CPU s>8.1f", "MiB>7d", "what happened<10")


def _model(
    nodes: Sequence[onnx.NodeProto],
    shape: Sequence[int] | None,
    ends: Sequence[str],
    weights: Sequence[onnx.TensorProto] = (),
    functions: Sequence[onnx.FunctionProto] = (),
    kind: int = TensorProto.FLOAT,
) -> onnx.ModelProto:
    """A model that reads ``x``, of this shape, and returns ``ends``, of any."""
    given = [helper.make_tensor_value_info("x", kind, shape)]
    results = [helper.make_tensor_value_info(end, kind, None) for end in ends]
    graph = helper.make_graph(nodes, "g", given, results, weights)
    opsets = [helper.make_opsetid("", 21), *([helper.make_opsetid("f", 1)] if functions else [])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=functions)


def calls(depth: int = 40) -> onnx.ModelProto:
    """Functions each of which calls the one before twice; the first is Relu."""
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("f", 1)]
    functions = [helper.make_function("f", "f0", ["x"], ["y"], [helper.make_node("Relu", ["x"], ["y"])], opsets)]
    for number in range(1, depth + 1):
        nodes = [helper.make_node(f"f{number - 1}", [a], [b], domain="f") for a, b in (("x", "a"), ("a", "y"))]
        functions.append(helper.make_function("f", f"f{number}", ["x"], ["y"], nodes, opsets))
    return _model([helper.make_node(f"f{depth}", ["x"], ["y"], domain="f")], [4], ["y"], functions=functions)


def doubling(times: int = 40) -> onnx.ModelProto:
    """A vector joined with itself, again and again."""
    wires = ["x", *(f"p{number}" for number in range(times))]
    nodes = [helper.make_node("Concat", [a, a], [b], axis=0) for a, b in itertools.pairwise(wires)]
    return _model(nodes, [1], wires[-1:], kind=TensorProto.INT64)


def loop(turns: int = 2**62) -> onnx.ModelProto:
    """A Loop that has no end in sight."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("Add", ["s", "one"], ["t"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
            helper.make_tensor_value_info("s", TensorProto.FLOAT, [1]),
        ],
        [
            helper.make_tensor_value_info("d", TensorProto.BOOL, []),
            helper.make_tensor_value_info("t", TensorProto.FLOAT, [1]),
        ],
    )
    weights = [
        helper.make_tensor("n", TensorProto.INT64, [], [turns]),
        helper.make_tensor("go", TensorProto.BOOL, [], [True]),
        helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0]),
    ]
    return _model([helper.make_node("Loop", ["n", "go", "x"], ["y"], body=body)], [1], ["y"], weights)


def chain(length: int = 100_000) -> onnx.ModelProto:
    """One node after the other."""
    wires = ["x", *(f"v{number}" for number in range(length))]
    nodes = [
        helper.make_node(("Relu", "Neg")[number % 2], [wires[number]], [wires[number + 1]]) for number in range(length)
    ]
    return _model(nodes, [4], wires[-1:])


def alive(count: int = 20_000) -> onnx.ModelProto:
    """Values that are all alive at once: a Sum reads them last."""
    nodes = [helper.make_node(("Relu", "Neg")[n % 2], ["x"], [f"v{n}"]) for n in range(count)]
    return _model([*nodes, helper.make_node("Sum", [f"v{n}" for n in range(count)], ["y"])], [16], ["y"])


def summands(count: int = 1_000_000) -> onnx.ModelProto:
    """A Sum of one value, many times."""
    return _model([helper.make_node("Sum", ["x"] * count, ["y"])], [4], ["y"])


def parts(count: int = 50_000) -> onnx.ModelProto:
    """A vector cut into single numbers, which are joined again."""
    names = [f"p{n}" for n in range(count)]
    cut = helper.make_node("Split", ["x"], names, axis=0, num_outputs=count)
    return _model([cut, helper.make_node("Concat", names, ["y"], axis=0)], [count], ["y"])


NETWORKS: dict[str, Callable[[], onnx.ModelProto]] = {
    "40 functions, each calls 2": calls,
    "40 Concat(p, p)": doubling,
    "Loop of 2^62 turns": loop,
    "chain of 100,000 nodes": chain,
    "20,000 values alive at once": alive,
    "Sum of 1,000,000 inputs": summands,
    "Split of 50,000, Concat": parts,
}


def _command(arguments: Sequence[str]) -> tuple[float, float, int, str]:
    """Run Python: seconds by the clock and of processors, MiB at its peak, and what happened."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (LONGEST, LONGEST + 5))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    with tempfile.TemporaryFile() as said:
        begin = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=said, preexec_fn=limit
        )
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.monotonic() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()
    return seconds, used.ru_utime + used.ru_stime, used.ru_maxrss >> 10, _happened(process.returncode, lines)


def _happened(status: int, lines: Sequence[str]) -> str:
    notes = [line for line in lines if not line.startswith("memonger: note: ")]
    last = lines[-1] if lines else ""
    if not status:
        return "done"
    if status == 1 and len(notes) == 1 and last.startswith("memonger: "):
        what = "refused: " + last.removeprefix("memonger: ").removeprefix("error: ")
    elif status < 0:
        name = signal.Signals(-status).name
        return f"still ran after {LONGEST} s of processors" if name == "SIGXCPU" else f"DIED of {name}"
    else:
        what = f"STATUS {status}: {last}"
    return what if len(what) <= SAID else what[: SAID - 4] + " ..."


def _rows(name: str, source: Path, folder: Path) -> Iterator[str]:
    """What each command does with a file."""

    def row(title: str, arguments: Sequence[str]) -> str:
        *figures, happened = _command(arguments)
        return TABLE.row(name, title, *figures, happened.replace(f"{folder}/", ""))

    for device in ("none", "cpu"):
        planned = folder / f"{device}.onnx"
        plan = ["plan", source, "--mode", "inference", "--device", device, "--threads", "1", "-o", planned, "--quiet"]
        yield row(f"plan, device {device}", ["-m", "memonger", *map(str, plan)])
        if planned.is_file():
            yield row("  verify", ["-m", "memonger", "verify", str(planned)])
            yield row("  run", ["-m", "memonger", "run", str(planned), "--runs", "1", "--quiet"])
            planned.unlink()
    if source.is_file():
        yield row("stock onnxruntime", ["-c", STOCK, str(source)])


def _table(names: Sequence[str]) -> Iterator[str]:
    yield from stamp("trust.bombs", ["memonger", "onnx", "onnx-ir", "onnxruntime", "numpy"])
    yield TABLE.heading
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            path = Path(folder) / "model.onnx"
            path.write_bytes(NETWORKS[name]().SerializeToString())
            yield from _rows(name, path, Path(folder))
        yield from _rows("/dev/zero", Path("/dev/zero"), Path(folder))


@click.command()
@click.option("--network", "names", multiple=True, type=click.Choice(list(NETWORKS)), help="All if left out.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the table here.")
def main(names: tuple[str, ...], output: Path | None) -> None:
    """Plan, verify and run."""
    keep(_table(names or tuple(NETWORKS)), output)


if __name__ == "__main__":
    main()
