"""What the sweep over operators says: the table of operators and types, and the rows drawn from it."""

import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx

from memonger.devices import Device
from tests.facts.device import Wish, driver, open_session
from tests.facts.examples import ALL, EXAMPLES, Example
from tests.facts.fact import Fact, judged
from tests.facts.graphs import host_arithmetic
from tests.facts.operators import Placed, options, placed_at, providers, sweep
from tests.facts.order import one_fallback

OPSETS = tuple(range(17, 27))
HASH = ("Add", "Mul", "Less", "BitShift right", "BitwiseXor", "BitwiseOr")
LEGEND = (
    "CUDA; cpu: falls back, with Memcpy nodes around it; none: no kernel on either, and the session refused; refused: "
    "for another reason; -: not in the standard; fails: placed on CUDA, and an error when it runs; mixed: a function "
    "with parts on both; wrong: runs on CUDA, and its values are not the CPU's; blank: not tried"
)


def check_operators(device: Device) -> Iterator[Fact]:
    """The table, then what stands out in it."""
    real = driver(device).is_real
    found = list(sweep(str(device), compare=real))
    yield Fact(f"operator by element type, at opset 20 unless noted. {LEGEND}", _table(found))
    yield _host_outputs(found)
    yield _host_inputs(found)
    yield _hash(found)
    yield from _failures(found)
    wrong = [f"{p.label} {p.type} ({p.difference:.1e})" for p in found if p.wrong]
    compared = sum(p.difference is not None for p in found)
    seen = f"{compared} compared; not the same: {', '.join(wrong) or 'none'}"
    yield judged("values on CUDA are the CPU provider's, within a tolerance", seen, not wrong, real)


def _mark(placed: Placed) -> str:
    if placed.where == "CUDA" and placed.wrong:
        return "wrong"
    if placed.where == "CUDA" and placed.error:
        return "fails"
    return "cpu" if placed.where == "CPU" else placed.where


def _table(found: Sequence[Placed]) -> str:
    rows: dict[str, dict[str, str]] = {}
    for placed in found:
        rows.setdefault(placed.label, {})[placed.type] = _mark(placed)
    width = max(map(len, rows))
    head = f"{'':{width}} " + " ".join(f"{name:5}" for name in ALL)
    lines = [f"{label:{width}} " + " ".join(f"{row.get(t, '')[:5]:5}" for t in ALL) for label, row in rows.items()]
    return "\n".join(line.rstrip() for line in [head, *lines])


def _host_outputs(found: Sequence[Placed]) -> Fact:
    host = sorted({f"{p.label} output {i}" for p in found if p.where == "CUDA" for i in p.outputs})
    tried = len({p.label for p in found if p.where == "CUDA"})
    return Fact(f"outputs on the host of nodes on CUDA ({tried} examples)", ", ".join(host) or "none")


def _host_inputs(found: Sequence[Placed]) -> Fact:
    host: dict[str, set[int]] = {}
    for placed in (p for p in found if p.where == "CUDA"):
        host.setdefault(EXAMPLES[placed.example].op, set()).update(placed.inputs)
    seen = ", ".join(f"{op} {' '.join(map(str, sorted(i)))}" for op, i in sorted(host.items()) if i)
    return Fact("inputs that nodes on CUDA want on the host (operator, indices)", seen)


def _hash(found: Sequence[Placed]) -> Fact:
    where = {p.label: p.where for p in found if p.type == "u32" and p.label in HASH}
    seen = ", ".join(f"{name} {where.get(name, '?')}" for name in HASH)
    return judged("the uint32 hash that draws masks runs on CUDA", seen, set(where.values()) == {"CUDA"})


def _failures(found: Sequence[Placed]) -> Iterator[Fact]:
    """Kernels that are there and refuse, by their words."""
    groups: dict[str, list[str]] = {}
    for placed in found:
        if placed.where == "refused" or (placed.where in ("CUDA", "mixed") and placed.error):
            groups.setdefault(_words(placed.error), []).append(f"{placed.label} {placed.type}")
        if placed.where == "died":
            groups.setdefault("the process died", []).append(f"{placed.label} {placed.type}")
    for words, labels in groups.items():
        yield Fact(f"placed on CUDA, and refused there: {', '.join(labels)}", words)


def _words(error: str) -> str:
    """The kernel's own words, without what names the node and numbers the type."""
    words = error.rpartition("Status Message: ")[2]
    return re.sub(r"element_type \d+", "element_type N", words.partition(" with T = ")[0])[:300]


def check_opsets(device: Device) -> Iterator[Fact]:
    """Operators that leave the device, or have no kernel left, at a newer opset."""
    moved: dict[str, list[str]] = {}
    for example in EXAMPLES:
        for dtype in (t for t in ("f32", "f16", "bf16") if t in example.types and not example.domain):
            change = _change(example, dtype, device)
            if change:
                moved.setdefault(change, []).append(f"{example.label} {dtype}")
    for change, labels in sorted(moved.items()):
        yield Fact(f"by opset: {change}", ", ".join(labels))


def _change(example: Example, dtype: str, device: Device) -> str:
    """As ``CUDA up to 21, CPU from 22``; empty where nothing changes from opset 20 on."""
    arrays, seen = example.arrays(dtype), []
    for opset in OPSETS:
        where = placed_at(example.model(arrays, opset), options(), providers(device))
        if opset >= 20 and where != "-" and (not seen or seen[-1][1] != where):
            seen.append((opset, where))
    return ", ".join(f"{where} from {opset}" for opset, where in seen) if len(seen) > 1 else ""


def check_host_values(device: Device) -> Iterator[Fact]:
    """Where the values of a model with arithmetic of shapes and a fallback lie."""
    for name, model in (
        ("arithmetic of shapes", host_arithmetic()),
        ("a fallback", _as_written(one_fallback(), device)),
    ):
        given = {value.name for value in model.graph.output}
        names = [value for node in model.graph.node for value in node.output if value not in given]
        model.graph.output.extend(onnx.ValueInfoProto(name=value) for value in names)
        session = open_session(model, device)
        infos = zip(session.get_outputs(), session.get_output_memory_infos(), strict=True)
        where = {value.name: memory.name for value, memory in infos}
        seen = [f"{node.op_type} writes {v} ({where[v]})" for node in model.graph.node for v in node.output]
        yield Fact(f"where values lie, {name}", ", ".join(seen))


def _as_written(model: onnx.ModelProto, device: Device) -> onnx.ModelProto:
    """What onnxruntime makes of a model: with its Memcpy nodes."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.onnx")
        open_session(model, device, Wish(optimized=path))
        return onnx.load(path)
