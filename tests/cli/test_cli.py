"""The commands: what they print, where, and what their options do."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import memonger
from memonger.cli import commands
from memonger.units import format_size
from tests.support.command_line import invoke
from tests.support.stock import normal, parse, run_stock

PLAN_KEYS = {
    "model", "mode", "device", "batch", "nodes", "parameter_bytes", "activation_bytes", "peak_before_bytes",
    "peak_bytes", "lower_bound_bytes", "arena_bytes", "workspace_bytes", "overhead", "segments", "recomputed_nodes",
    "planning_seconds", "output",
}  # fmt: skip
OFF = ("--no-inplace", "--no-views", "--no-reuse")


def _model() -> onnx.ModelProto:
    model = parse(
        "g (float[batch, 32] x) => (float[batch, 32] y) { a = MatMul(x, w)  b = Tanh(a)  c = MatMul(b, w)"
        "  d = Relu(c)  e = Reshape(d, s)  f = Sigmoid(e)  h = Reshape(f, t)  y = Add(h, x) }"
    )
    for name, array in (("w", normal(0, 32, 32)), ("s", np.array([-1, 4, 8])), ("t", np.array([-1, 32]))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model file in the working directory; terminals are 80 columns wide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    path = Path("model.onnx")
    path.write_bytes(_model().SerializeToString())
    return path


@pytest.fixture
def planned(model: Path) -> Path:
    _run("plan", "--mode", "inference", model, "--batch", 4, "--device", "cpu", "-o", "planned.onnx")
    return Path("planned.onnx")


def _run(*arguments: object) -> str:
    """What a command that succeeds prints; it says nothing on standard error where that is no terminal."""
    result = invoke(*arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    assert all(len(line) <= 80 for line in result.stdout.splitlines() if not {"Run", "Keep"}.intersection(line.split()))
    return result.stdout


def _json(*arguments: object) -> Any:
    """The one object that a command with ``--json`` prints."""
    text = _run_wide(*arguments, "--json")
    assert text.endswith("}\n")
    assert text.count("\n") == 1
    return json.loads(text)


def _run_wide(*arguments: object) -> str:
    result = invoke(*arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def test_both_names_of_the_plan_command_do_the_same(model: Path) -> None:
    arguments = ("model.onnx", "--batch", "4", "--device", "none", "-o", "planned.onnx", "--force")
    files, texts = [], []
    for command, extra in ((commands.plan, ()), (commands.main, ("plan",))):
        result = invoke(*extra, *arguments, command=command)
        assert result.exit_code == 0
        texts.append([line for line in result.stdout.splitlines() if not line.startswith("Planned in")])
        files.append(Path("planned.onnx").read_bytes())
    assert texts[0] == texts[1]
    assert files[0] == files[1]
    options = [
        [p.opts for p in command.params if p.name != "version"] for command in (commands.plan, commands.plan_command)
    ]
    assert options[0] == options[1]


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_a_plans_figures_as_json(model: Path, device: str) -> None:
    record = _json("plan", "--mode", "inference", model, "--batch", 4, "--device", device, "-o", "planned.onnx")
    assert record.keys() >= PLAN_KEYS
    assert (record["model"], record["output"], record["batch"]) == ("model.onnx", "planned.onnx", 4)
    assert (record["mode"], record["device"]) == ("inference", device)
    assert record["lower_bound_bytes"] <= record["arena_bytes"] <= record["activation_bytes"]
    assert record["peak_bytes"] <= record["peak_before_bytes"]
    assert record["parameter_bytes"] >= 32 * 32 * 4
    assert (record["workspace_bytes"] is None) == (device == "none")
    assert memonger.Plan.load("planned.onnx").arena_bytes == record["arena_bytes"]
    assert _json("plan", "--mode", "inference", model, "--batch", 4, "--device", device)["output"] is None


def test_a_plans_figures_as_sentences_and_as_a_table(model: Path) -> None:
    text = _run("plan", "--mode", "inference", model, "--batch", 4, "--device", "none", "-o", "planned.onnx")
    for word in ("model.onnx takes", "arena", "without", "not measured", "isn't known", "Planned in",
                 "Wrote planned.onnx", "memonger run planned.onnx"):  # fmt: skip
        assert word.lower() in text.lower()
    assert len(text.splitlines()) < 12
    details = _run("plan", "--mode", "inference", model, "--batch", 4, "--device", "cpu", "--details")
    for word in ("on cpu", "smallest arena", "in file order", "without reuse", "stock onnxruntime", "total"):
        assert word in details


def test_the_headline_adds_up_and_compares_with_stock_onnxruntime(model: Path) -> None:
    arguments = ("plan", "--mode", "inference", model, "--batch", 4, "--device", "cpu")
    record = _json(*arguments, "-o", "planned.onnx")
    assert record["total_bytes"] == sum(
        record[f"{part}_bytes"] for part in ("arena", "workspace", "parameter", "input")
    )  # fmt: skip
    assert record["unplanned_bytes"] == sum(
        record[f"{part}_bytes"] for part in ("activation", "workspace", "parameter", "input")
    )  # fmt: skip
    assert record["stock_bytes"] > record["total_bytes"] - record["arena_bytes"]
    less = round(100 - 100 * record["total_bytes"] / record["stock_bytes"])
    first, second = _run_wide(*arguments, "--force").replace("\n", " ").split(" Stock onnxruntime is ")
    assert first.startswith(f"model.onnx takes {format_size(record['total_bytes'])}: weights ")
    assert second.startswith(f"expected to take about {format_size(record['stock_bytes'])}: this plan takes {less} %")
    assert f"it would take {format_size(record['unplanned_bytes'])}." in second
    read = _json("inspect", "planned.onnx")["plan"]
    assert all(read[key] == record[key] for key in ("stock_bytes", "unplanned_bytes", "total_bytes"))
    assert "Stock onnxruntime is expected to take" in _run("inspect", "planned.onnx").replace("\n", " ")


def test_progress_is_shown_on_a_terminal_only_and_not_when_quiet(model: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "memonger",
        "plan",
        "--mode",
        "inference",
        "model.onnx",
        "--batch",
        "4",
        "--device",
        "none",
        "--json",
    ]
    results = {}
    for quiet in (False, True):
        mine, theirs = os.openpty()
        done = subprocess.run([*command, *["--quiet"] * quiet], stdout=subprocess.PIPE, stderr=theirs, check=True)
        os.set_blocking(mine, False)
        os.close(theirs)
        try:
            results[quiet] = os.read(mine, 100_000)
        except OSError:  # the other end is closed and nothing was written
            results[quiet] = b""
        os.close(mine)
        assert json.loads(done.stdout)["model"] == "model.onnx"
    assert b"Planning" in results[False]
    assert results[True] == b""


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_less_sharing_never_takes_a_smaller_arena(model: Path, device: str) -> None:
    text = (
        "g (float[batch, 32] x) => (float[batch, 32] y) { a = Relu(x)  b = Sigmoid(a)"
        "  s = Constant <value_ints = [-1]> ()  c = Reshape(b, s)  d = Tanh(c)"
        "  t = Constant <value_ints = [-1, 32]> ()  e = Reshape(d, t)  y = Neg(e) }"
    )
    model.write_bytes(parse(text).SerializeToString())
    arenas = {
        flags: _json(
            "plan", "--mode", "inference", model, "--batch", 64, "--device", device, "--level", "disable", *flags
        )["arena_bytes"]
        for flags in ((), ("--no-inplace",), ("--no-views",), ("--no-inplace", "--no-views"), ("--no-reuse",))
    }
    assert all(arenas[()] <= arena for arena in arenas.values())
    assert arenas[("--no-inplace",)] <= arenas[("--no-inplace", "--no-views")]
    assert arenas[()] < arenas[("--no-inplace", "--no-views")]
    assert (
        arenas[()] < _json("plan", "--mode", "inference", model, "--batch", 64, "--device", device, *OFF)["arena_bytes"]
    )


def test_dimensions_by_name_and_by_place(model: Path) -> None:
    by_batch = _json("plan", "--mode", "inference", model, "--batch", 4, "--device", "none")["arena_bytes"]
    assert (
        _json("plan", "--mode", "inference", model, "--dim", "batch=4", "--device", "none")["arena_bytes"] == by_batch
    )
    assert _json("plan", "--mode", "inference", model, "--dim", "x[0]=4", "--device", "none")["arena_bytes"] == by_batch


def test_inspect_a_model_without_a_plan(model: Path) -> None:
    text = _run("inspect", model)
    for word in ("x", "batch, 32", "MatMul", "no plan", "memonger plan model.onnx"):
        assert word in text
    record = _json("inspect", model)
    assert record["plan"] is None
    assert record["inputs"] == [{"name": "x", "type": "FLOAT", "shape": ["batch", 32]}]
    assert record["nodes"] == 8


def test_inspect_shows_the_inputs_a_caller_gives(model: Path) -> None:
    text = "g (float[4] x, float[2] w) => (float[2] y) <float[2] w = {1, 2}> { s = ReduceSum(x)  y = Mul(s, w) }"
    Path("old.onnx").write_bytes(parse(text, opset=9, ir_version=3).SerializeToString())
    assert [value["name"] for value in _json("inspect", "old.onnx")["inputs"]] == ["x"]
    Path("new.onnx").write_bytes(parse(text, opset=9, ir_version=8).SerializeToString())
    assert [value["name"] for value in _json("inspect", "new.onnx")["inputs"]] == ["x", "w"]


def test_inspect_a_model_with_very_many_inputs_stays_short(model: Path) -> None:
    names = [f"x{i}" for i in range(100)]
    text = f"g ({', '.join(f'float[2] {name}' for name in names)}) => (float[2] y) {{ y = Sum({', '.join(names)}) }}"
    Path("many.onnx").write_bytes(parse(text).SerializeToString())
    assert "and 80 more" in _run("inspect", "many.onnx")


def test_inspect_a_planned_model(planned: Path) -> None:
    text = _run("inspect", planned)
    for word in ("planned.onnx", "4, 32", "arena", "Alive at the worst step", "offset"):
        assert word in text
    record = _json("inspect", planned)
    assert record["plan"]["arena_bytes"] == memonger.Plan.load(planned).arena_bytes
    assert record["plan"].keys() >= PLAN_KEYS


def test_names_that_look_like_markup_are_printed_as_they_are(model: Path) -> None:
    text = "g (float[2] x) => (float[2] y) { a = Relu(x)  b = Exp(a)  y = Neg(b) }"
    proto = parse(text)
    for node in proto.graph.node:
        node.name = f"[red]{node.op_type}[/blue]"
    proto.graph.input[0].name = proto.graph.node[0].input[0] = "[/x]"
    Path("[odd].onnx").write_bytes(proto.SerializeToString())
    assert "[odd].onnx" in _run("plan", "--mode", "inference", "[odd].onnx", "-o", "[out].onnx")
    assert "[/x]" in _run("inspect", "[out].onnx")
    assert "y" in _run("run", "[out].onnx")


def test_verify(planned: Path) -> None:
    assert "the plan is correct" in _run_wide("verify", planned)
    record = _json("verify", planned)
    assert record["verified"] is True
    assert record["arena_bytes"] == memonger.Plan.load(planned).arena_bytes


def test_run_with_random_inputs_is_the_same_for_the_same_seed(planned: Path) -> None:
    for seed, name in ((0, "a"), (0, "b"), (1, "c")):
        text = _run("run", planned, "--seed", seed, "--outputs", f"{name}.npz")
        assert "float32" in text
        assert "[4, 32]" in text
    a, b, c = (np.load(f"{name}.npz")["y"] for name in "abc")
    assert np.array_equal(a, b)
    assert not np.array_equal(a, c)


@pytest.mark.parametrize("source", ["planned.onnx", "model.onnx"])
def test_run_with_given_inputs(planned: Path, source: str) -> None:
    x = normal(7, 4, 32)
    np.savez("inputs.npz", x=x)
    flags = ("--mode", "inference") if source == "model.onnx" else ()
    _run("run", source, *flags, "--inputs", "inputs.npz", "--outputs", "outputs.npz")
    stock = run_stock(_model(), {"x": x}, "ORT_ENABLE_ALL")["y"]
    assert np.array_equal(np.load("outputs.npz")["y"], stock)


@pytest.mark.parametrize("source", [("planned.onnx",), ("model.onnx", "--mode", "inference", "--batch", "4")])
def test_run_with_fewer_rows_than_planned(planned: Path, source: tuple[str, ...]) -> None:
    x = normal(7, 3, 32)
    np.savez("inputs.npz", x=x)
    _run("run", *source, "--inputs", "inputs.npz", "--pad", "--runs", 1, "--outputs", "outputs.npz")
    stock = run_stock(_model(), {"x": np.concatenate([x, x[-1:]])}, "ORT_ENABLE_ALL")["y"]
    assert np.array_equal(np.load("outputs.npz")["y"], stock[:3])


def test_padding_is_offered_and_needs_inputs(planned: Path) -> None:
    np.savez("inputs.npz", x=normal(7, 3, 32))
    result = invoke("run", planned, "--inputs", "inputs.npz")
    assert result.exit_code == 1
    assert "--pad" in result.stderr
    assert invoke("run", planned, "--pad").exit_code == 2


def test_run_as_json(planned: Path) -> None:
    record = _json("run", planned)
    assert record["outputs"] == {"y": {"type": "float32", "shape": [4, 32]}}
    assert record["model"] == "planned.onnx"
    assert record["latency_p95_seconds"] >= record["latency_seconds"] > 0
    assert (record["runs"], record["warm_up"]) == (30, 3)


def test_options_of_planning_do_not_fit_a_model_that_is_planned(planned: Path) -> None:
    for flags in (("--batch", 4), ("--dim", "batch=4"), ("--no-views",), ("--level", "basic"), ("--order", "file")):
        result = invoke("run", planned, *flags)
        assert result.exit_code == 2
        assert f"has a plan already, which {flags[0]} can't change" in result.stderr


def test_compare_as_json(model: Path) -> None:
    flags = ("--mode", "inference", "--batch", 4)
    record = _json("run", "model.onnx", "--compare", "--quiet", "--runs", 5, *flags)
    keys = {"bitwise_equal", "max_abs_diff", "latency_ratio", "peak_ratio"}
    assert record.keys() >= keys | {"default_session"}
    assert record["default_session"].keys() >= keys
    assert record["bitwise_equal"] is record["passed"] is True
    assert record["first_difference"] is None
    assert record["max_abs_diff"] == 0
    assert record["latency_ratio"] > 0
    assert record["model"] == "model.onnx"


def test_compare_as_a_table_fits_80_columns(planned: Path) -> None:
    text = _run(
        "run", planned, "--compare", "--quiet", "--runs", 5, "--against", "model.onnx", "--outputs", "outputs.npz"
    )
    for word in ("planned", "stock, same level", "stock, default", "PASSED: outputs are identical", "run", "p95",
                 "planned ÷ stock"):  # fmt: skip
        assert word in " ".join(text.split())
    assert np.load("outputs.npz")["y"].shape == (4, 32)


PROBLEM = "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n"


def test_pack(model: Path) -> None:
    Path("problem.csv").write_text(PROBLEM)
    assert "5 buffers in 12 bytes (lower bound 12)" in _run("pack", "problem.csv")
    record = _json("pack", "problem.csv", "--capacity", 12, "-o", "solution.csv")
    assert record == {
        "problem": "problem.csv", "buffers": 5, "arena_bytes": 12, "lower_bound_bytes": 12, "proven": True,
        "output": "solution.csv",
    }  # fmt: skip
    header, *rows = Path("solution.csv").read_text().splitlines()
    assert header == "id,lower,upper,size,offset"
    assert [row.split(",")[0] for row in rows] == ["b1", "b2", "b3", "b4", "b5"]
    assert all(0 <= int(row.split(",")[-1]) <= 8 for row in rows)


def test_pack_into_too_little(model: Path) -> None:
    Path("problem.csv").write_text(PROBLEM)
    result = invoke("pack", "problem.csv", "--capacity", 11, "-o", "solution.csv")
    assert result.exit_code == 1
    assert result.stderr.startswith("memonger: problem.csv was packed into 12 bytes, 1 over the capacity of 11")
    assert not Path("solution.csv").exists()


def test_version_and_help() -> None:
    for command in (commands.main, commands.plan):
        assert memonger.__version__ in invoke("--version", command=command).stdout
    text = invoke("--help").stdout
    assert text.startswith("Usage: memonger ")
    for name in ("differentiate", "inspect", "pack", "plan", "run", "verify"):
        assert f"\n  {name} " in text
        shown = invoke(name, "--help")
        assert shown.exit_code == 0
        assert f"Usage: memonger {name} " in shown.stdout
    assert "..." not in text.split("Plan:")[1].split("Examples:")[0]


def test_both_programs_are_installed(model: Path) -> None:
    programs = Path(sys.executable).parent
    for name in ("memonger", "memonger-plan"):
        if not (programs / name).exists():
            pytest.skip("memonger isn't installed as a package")
        done = subprocess.run([programs / name, "--version"], capture_output=True, text=True, check=True)
        assert memonger.__version__ in done.stdout
