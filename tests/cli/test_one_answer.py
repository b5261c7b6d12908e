"""One model, one answer: every command that states what a model takes is asked the same, and agrees with the others."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from memonger.cli import planning
from memonger.units import format_size
from tests.support.command_line import invoke
from tests.support.networks import model_of
from tests.support.stock import normal

BATCH = 4
EFFORT = 50  # of each search: networks of a dozen nodes need no more, and what is refused is searched to the end

MODELS = {
    "convolutions": (
        "(float[batch,3,8,8] x) => (float[batch,8] y)",
        'a = Conv<pads=[1,1,1,1]>(x, "w3") b = Relu(a) c = Conv<pads=[1,1,1,1]>(b, "w8") d = Add(b, c) '
        "e = Tanh(d) f = GlobalAveragePool(e) y = Flatten(f)",
        {"w3": (8, 3, 3, 3), "w8": (8, 8, 3, 3)},
    ),
    "inverted bottleneck": (
        "(float[batch,3,8,8] x) => (float[batch,3,8,8] y)",
        'a = Conv(x, "wide") b = Clip(a, "zero", "six") c = Conv<group=16, pads=[1,1,1,1]>(b, "each") '
        'd = Clip(c, "zero", "six") e = Conv(d, "narrow") y = Add(x, e)',
        {"wide": (16, 3, 1, 1), "each": (16, 1, 3, 3), "narrow": (3, 16, 1, 1), "zero": (), "six": ()},
    ),
    "fire": (
        "(float[batch,3,8,8] x) => (float[batch,16,1,1] y)",
        'a = Conv(x, "few") b = Relu(a) c = Conv(b, "one") d = Conv<pads=[1,1,1,1]>(b, "three") '
        "e = Concat<axis=1>(c, d) f = Relu(e) y = GlobalAveragePool(f)",
        {"few": (4, 3, 1, 1), "one": (8, 4, 1, 1), "three": (8, 4, 3, 3)},
    ),
    "layers": (
        "(float[batch,64] x) => (float[batch,4] y)",
        'a = MatMul(x, "up") b = Relu(a) c = MatMul(b, "same") d = Tanh(c) y = MatMul(d, "down")',
        {"up": (64, 512), "same": (512, 512), "down": (512, 4)},
    ),
    "attention": (
        "(float[batch,6,16] x) => (float[batch,6,16] y)",
        'q = MatMul(x, "wq") k = MatMul(x, "wk") v = MatMul(x, "wv") t = Transpose<perm=[0,2,1]>(k) '
        "s = MatMul(q, t) p = Softmax<axis=-1>(s) m = MatMul(p, v) y = Add(x, m)",
        {"wq": (16, 16), "wk": (16, 16), "wv": (16, 16)},
    ),
}


def _written(name: str, folder: Path) -> Path:
    signature, nodes, weights = MODELS[name]
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 17]> g {signature} {{ {nodes} }}')
    for number, (key, shape) in enumerate(weights.items()):
        array = normal(number, *shape) if shape else np.array({"zero": 0, "six": 6}[key], np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, key))
    path = folder / f"{name.replace(' ', '_')}.onnx"
    onnx.save(model, path)
    return path


def _asked(command: str, *arguments: object, status: int = 0) -> Any:
    words = [command, *map(str, arguments), "--threads", "1", "--json", "--quiet"]
    done = invoke(*words)
    assert done.exit_code == status, done.output
    return json.loads(done.stdout) if done.stdout.startswith(("{", "[")) else done.stderr


def _refused(model: Path, batch: int, budget: int) -> tuple[int, int]:
    """The smallest budget that works, and the one below which none does, as the error says."""
    told = _asked("plan", model, "--batch", batch, "--budget", budget, status=1)
    sizes = re.search(r"found to work is (?:[^;]*\()?(\d+) bytes\)?; none below (?:[^)]*\()?(\d+) bytes", told)
    assert sizes is not None, told
    return int(sizes[1]), int(sizes[2])


@pytest.mark.parametrize("name", [name for name in MODELS if name != "convolutions"])  # as the other two with a Conv
def test_all_commands_give_one_answer(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(planning, "Options", partial(planning.Options, effort=EFFORT))
    model, planned = _written(name, tmp_path), tmp_path / "planned.onnx"

    # what it takes by default: plan, the file, plan-all, and a frontier that has nothing worse
    default = _asked("plan", model, "--batch", BATCH, "-o", planned)
    total = default["total_bytes"]
    opened = json.loads(invoke("inspect", planned, "--json").stdout)
    assert opened["plan"]["total_bytes"] == total
    assert opened["plan"]["arena_bytes"] == default["arena_bytes"]
    assert _asked("plan-all", model, "--batches", BATCH)["plans"][0]["total_bytes"] == total
    frontier = _asked("pareto", model, "--batch", BATCH, "--points", 3)
    totals = [one["total_bytes"] for one in frontier]
    assert totals == sorted(totals, reverse=True)
    whole = _asked("plan", model, "--batch", BATCH, "--chunks", "off")
    assert (totals[0], frontier[0]["chunks"]) == (whole["total_bytes"], [])
    assert totals[-1] <= total

    # points of the frontier are budgets that plan and plan-all hold; below the last nothing is found
    middle = totals[len(totals) // 2]
    assert _asked("plan", model, "--batch", BATCH, "--budget", middle)["total_bytes"] <= middle
    last = _asked("plan-all", model, "--batches", BATCH, "--budget", totals[-1])
    assert last["plans"][0]["total_bytes"] <= totals[-1]
    least, _ = _refused(model, BATCH, 1)
    if least > totals[-1]:  # what is laid out for the budget that is named may lie better
        assert _asked("plan", model, "--batch", BATCH, "--budget", least)["total_bytes"] <= totals[-1]

    # what fits a memory: the largest batch holds it as a budget, the next one doesn't, and nothing refutes a bound
    memory = (totals[0] + totals[-1]) // 2
    fitted = _asked("fit", model, "--memory", memory)
    assert fitted["size"] >= BATCH
    assert fitted["lower_bound_bytes"] <= fitted["total_bytes"] <= memory
    assert _asked("plan", model, "--batch", fitted["size"], "--budget", memory)["total_bytes"] <= memory
    beyond = fitted["beyond"]
    assert beyond["size"] == fitted["size"] + 1
    found, bound = _refused(model, beyond["size"], memory)
    assert max(bound, beyond["lower_bound_bytes"]) <= found
    assert (beyond["status"] == "proven") == (beyond["lower_bound_bytes"] > memory)
    without = _asked("fit", model, "--memory", memory, "--chunks", "off")
    assert without["size"] <= fitted["size"]
    assert without["bound_holds_for"] == ["--chunks off"]


def test_weights_in_files_are_in_every_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six products of 512 x 512, 6 MiB of weights: budgets below that hold, and no command calls them impossible."""
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(planning, "Options", partial(planning.Options, effort=EFFORT))
    nodes = [onnx.helper.make_node("MatMul", [f"v{n}", f"w{n}"], [f"v{n + 1}"]) for n in range(6)]
    weights = {f"w{n}": normal(n, 512, 512) for n in range(6)}
    onnx.save(model_of(nodes, {"v0": ["n", 512]}, {"v6": ["n", 512]}, **weights), tmp_path / "products.onnx")
    words, weight_bytes = (tmp_path / "products.onnx", "--mode", "inference"), 6 << 20

    points = _asked("pareto", *words, "--batch", BATCH, "--points", 4)
    below = [point for point in points if point["total_bytes"] < weight_bytes]
    assert len(below) >= 2
    assert all(point["window"] for point in below)
    assert [point["total_bytes"] for point in points] == sorted((p["total_bytes"] for p in points), reverse=True)
    for point in below:
        held = _asked("plan", *words, "--batch", BATCH, "--budget", point["total_bytes"])
        assert held["total_bytes"] <= point["total_bytes"]
    shown = invoke("pareto", *words, "--batch", BATCH, "--quiet").stdout
    assert "files" in shown

    for memory, in_files in ((weight_bytes // 2, True), (weight_bytes + (1 << 20), False)):
        for chunks in ("auto", "off"):
            asked = (*words, "--chunks", chunks)
            fitted = _asked("fit", *asked, "--memory", memory)
            assert bool(fitted["plan"]["window"]) == in_files
            held = _asked("plan", *asked, "--batch", fitted["size"], "--budget", memory)
            assert held["total_bytes"] <= memory
            beyond = fitted["beyond"]
            assert fitted["lower_bound_bytes"] <= fitted["total_bytes"]
            larger = ("--batch", beyond["size"], "--budget", memory)
            if beyond["status"] == "proven":
                _asked("plan", *asked, *larger, status=1)
            elif not in_files:  # with weights in its file that size fits, which with all in memory doesn't
                held = _asked("plan", *asked, *larger)
                assert beyond["lower_bound_bytes"] <= held["total_bytes"] <= memory
                assert held["total_bytes"] < beyond["in_memory_bound_bytes"] <= beyond["total_bytes"]


def test_an_export_without_chunks_says_what_they_would_take(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = _written("convolutions", tmp_path)
    large = "--batch", 4096, "--max-overhead", 0.5  # what slices are estimated to cost differs from AVX2 to AVX-512
    total = _asked("plan", model, *large)
    assert total["chunks"]
    exported = _asked("export", model, *large, "--target", "onnxruntime", "-o", tmp_path / "out")
    (note,) = [note for note in exported["notes"] if "has no chunks" in note]
    sizes = re.findall(r"[\d.]+ [KM]iB", note)
    assert sizes == [format_size(exported["instance_bytes"]), format_size(total["total_bytes"])]
    small = _asked("export", model, "--batch", 1, "--target", "onnxruntime", "-o", tmp_path / "small")
    assert not any("has no chunks" in note for note in small["notes"])


def test_a_state_and_marks_are_asked_of_every_command_alike(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 17]> g (float[n,8] x, float[n,8] h) => (float[n,8] y, float[n,8] next) {
        a = Add(x, h) b = Tanh(a) next = Mul(b, x) c = Mul(b, b) y = MatMul(c, w) }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(normal(0, 8, 8), "w"))
    onnx.save(model, tmp_path / "recurrent.onnx")
    marks = ("--loss", "softmax_cross_entropy", "--mirror", "Tanh")
    for path, asked in (
        (tmp_path / "recurrent.onnx", ("--state", "h=next", "--mode", "inference")),
        (_written("layers", tmp_path), marks),
    ):
        words = (path, *asked, "--device", "none", "--time-limit", 0)
        total = _asked("plan", *words, "--batch", 6)["total_bytes"]
        points = _asked("pareto", *words, "--batch", 6, "--points", 1)
        assert total in [point["total_bytes"] for point in points]
        assert _asked("fit", *words, "--memory", total)["size"] == 6
        assert all(point["recomputed_nodes"] for point in points) == ("--mirror" in asked)
