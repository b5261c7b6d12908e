"""Manners of the terminal: help in sections with examples, completion, defaults from the environment, any encoding."""

import json
import re
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import click
import onnx
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from memonger.autodiff.losses import NAMES
from memonger.cli import commands, planning
from memonger.cli.options import LOSSES, SECTIONS, TARGETS
from memonger.devices import PROVIDERS
from memonger.options import Options
from tests.support.planning_models import chain
from tests.support.stock import parse

ALL = sorted(commands.main.commands)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(chain(), "chain.onnx")
    return Path("chain.onnx")


def _invoke(*arguments: object, charset: str = "utf-8", **environment: str) -> Any:
    runner = CliRunner(charset=charset, env=environment)
    return runner.invoke(commands.main, [str(each) for each in arguments], catch_exceptions=False)


def _completed(*words: str) -> list[str]:
    *before, begun = words
    return [item.value for item in ShellComplete(commands.main, {}, "memonger", "_X").get_completions(before, begun)]


# Help


def test_commands_stand_in_sections() -> None:
    text = _invoke("-h").stdout
    assert text == _invoke("--help").stdout
    headings = re.findall(r"^(\w[\w ]*):$", text, re.MULTILINE)
    assert headings[:4] == ["Options", "Plan", "Look", "Run and serve"]
    assert headings[-1] == "Examples"
    assert "MEMONGER_DEVICE" in text
    assert "_MEMONGER_COMPLETE=bash_source memonger" in text
    for name in ALL:
        assert re.search(rf"^  {name} +\S", text, re.MULTILINE), name


@pytest.mark.parametrize("name", ALL)
def test_every_option_stands_under_a_heading_once(name: str) -> None:
    text = _invoke(name, "-h").stdout
    headings = re.findall(r"^(\w[\w ]*):$", text, re.MULTILINE)
    assert headings[-1] == "Examples"
    assert list(dict.fromkeys(headings)) == headings
    assert set(headings) <= {*SECTIONS, "Examples"}
    _, *sections, _ = re.split(r"^\w[\w ]*:$", text, flags=re.MULTILINE)
    assert sections[-1].split("--help")[0].strip() == "-h,"  # all others are known to a section
    for parameter in commands.main.commands[name].params:
        if isinstance(parameter, click.Option):
            assert len(re.findall(rf"^  (?:-\w, )?{parameter.opts[0]}\b(?!-)", "".join(sections), re.M)) == 1


def _examples() -> list[str]:
    found = [*commands.main.examples]
    for command in commands.main.commands.values():
        found += command.examples  # type: ignore[attr-defined]
    return [line for line in found if "COMMAND" not in line]


@pytest.mark.parametrize("line", _examples())
def test_examples_are_commands_that_can_be_given(line: str, model: Path) -> None:
    program, name, *arguments = shlex.split(line, comments=True)
    Path("inputs.npz").touch()
    assert program == "memonger"
    commands.main.commands[name].make_context(name, arguments)


def test_the_program_of_one_command_has_its_help() -> None:
    text = CliRunner().invoke(commands.plan, ["-h"]).stdout
    assert "memonger-plan model.onnx -o planned.onnx" in text
    assert "\nMemory:\n" in text


def test_without_a_command_five_commands_are_shown_that_can_be_given(model: Path) -> None:
    result = _invoke()
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [line for line in result.stdout.splitlines() if line.startswith("  memonger ")]
    assert len(lines) == 5
    Path("planned.onnx").touch()
    for line in lines:
        _, name, *arguments = shlex.split(line.strip().split("  ")[0])
        commands.main.commands[name].make_context(name, arguments)


# Messages


@pytest.mark.parametrize("name", ["plan --device none", "draw", "fit --vary height --memory 64MiB --device none"])
def test_every_size_that_is_missing_is_named_with_a_command_that_works(name: str, tmp_path: Path) -> None:
    path = tmp_path / "two images.onnx"
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (float[batch, 3, height, width] x, float[batch, 5, length, n, both] z) => (y, q) {
            y = Relu (x)  q = Relu (z)
        }"""
    proto = onnx.parser.parse_model(text)
    proto.graph.input[1].type.tensor_type.shape.dim[4].dim_param = "n + length"  # which follows from the others
    onnx.save(proto, path)
    result = _invoke(*name.split(), path)
    assert result.exit_code == 1
    named, _, command = result.stderr.partition(" have no size. Plans need static shapes: give each one, for example: ")
    missing = {"height", "width", "length", "n"} - ({"height"} if "height" in name else set())
    assert set(re.findall(r"input '[xz]' \('([^']*)'\)", named)) == missing
    _, *words = shlex.split(command)
    assert _invoke(*words).exit_code == 0


def test_a_size_may_be_plain_bytes(model: Path) -> None:
    result = _invoke("plan", model, "--device", "none", "--budget", "84768208", "--json")
    assert json.loads(result.stdout)["budget_bytes"] == 84768208
    assert _invoke("plan-all", model, "--device", "none", "--budget", "84768208").exit_code == 0


def test_no_message_sends_to_a_device_that_may_have_sent_here(model: Path) -> None:
    """What can't run on this machine is planned with --device none: that then mustn't name --device cpu."""
    assert "--device cpu" not in _invoke("plan", model, "--device", "none").stdout


# Completion


def test_names_are_completed() -> None:
    assert _completed("pl") == ["plan", "plan-all"]
    assert _completed("plan", "--loss", "soft") == ["softmax_cross_entropy"]
    assert _completed("plan", "--device", "cu") == ["cuda", "cuda:0", "cuda:1"]
    assert _completed("export", "--target", "triton") == ["triton", "triton-python"]
    assert _completed("plan", "--strategy", "s") == ["sqrt", "sweep"]
    assert _completed("plan", "--optimizer", "ad") == ["adam", "adamw"]
    assert "--budget" in _completed("plan", "--b")
    assert [item.type for item in _items("plan", "mod")] == ["file"]


def _items(*words: str) -> Any:
    *before, begun = words
    return ShellComplete(commands.main, {}, "memonger", "_X").get_completions(before, begun)


def test_what_is_completed_is_what_there_is() -> None:
    assert tuple(NAMES) == LOSSES
    assert _completed("plan", "--loss", "") == list(LOSSES)
    assert _completed("export", "--target", "") == list(TARGETS)
    assert {name.partition(":")[0] for name in _completed("plan", "--device", "")} == set(PROVIDERS)


# The environment


def test_defaults_come_from_the_environment(model: Path) -> None:
    shown = _invoke("plan", model, "--quiet", "--details", MEMONGER_DEVICE="none", MEMONGER_MODE="inference")
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert "inference, portable" in shown.stdout
    record = json.loads(_invoke("plan", model, "--mode", "training", MEMONGER_DEVICE="none", MEMONGER_JSON="1").stdout)
    assert (record["mode"], record["device"]) == ("training", "none")
    shown = _invoke("plan", model, MEMONGER_DEVICE="none", MEMONGER_KEEP="relu1 relu2", MEMONGER_DIM="x[0]=64")
    assert shown.exit_code == 0
    shown = _invoke("plan", model, MEMONGER_OUTPUT="written.onnx", MEMONGER_DEVICE="none")
    assert (shown.exit_code, Path("written.onnx").exists()) == (0, False)


def test_what_is_wrong_in_the_environment_is_named(model: Path) -> None:
    shown = _invoke("plan", model, MEMONGER_THREADS="many")
    assert shown.exit_code == 2
    assert shown.stderr.count("It comes from the environment: MEMONGER_THREADS.") == 1
    assert "environment" not in _invoke("plan", model, "--threads", "many").stderr


# Encodings


@pytest.mark.parametrize("charset", ["ascii", "latin-1", "utf-8"])
def test_any_encoding_will_do(model: Path, charset: str) -> None:
    name = "n\N{LATIN SMALL LETTER E WITH ACUTE}t\N{SNOWMAN}.onnx"
    Path(name).write_bytes(model.read_bytes())
    arguments = (name, "--device", "none", "--mode", "inference", "--details", "-o", "o.onnx")
    shown = _invoke("plan", *arguments, charset=charset)
    assert (shown.exit_code, shown.stderr) == (0, "")
    text = shown.stdout_bytes.decode(charset)
    curve = re.search(r"^\[(.*)\]$", text, re.MULTILINE)
    assert curve is not None
    if charset == "utf-8":
        assert name in text
        assert "\N{FULL BLOCK}" in curve[1]
    else:
        assert "t\\u2603.onnx" in text
        assert set(curve[1]) <= set(" _.:-=+*#")
        assert "#" in curve[1]
        assert "+--" in text
    failed = _invoke("plan", f"{name}.not", charset=charset)
    assert (failed.exit_code, b"no such file" in failed.stderr_bytes) == (1, True)


# Suggestions


def test_the_command_that_a_frontier_suggests_can_be_pasted(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "Options", partial(Options, effort=2000))
    flags = ("--loss", "softmax_cross_entropy", "--optimizer", "sgd", "--lr", "0.5", "--keep", "relu1", "--quiet")
    shown = _invoke("pareto", model, "--points", 3, "--device", "none", *flags)
    line = shown.stdout.splitlines()[-1].removeprefix("Make one of them: ")
    program, *arguments = shlex.split(line)
    assert program == "memonger"
    assert "--budget" in arguments
    for flag in ("--loss", "--optimizer", "--lr", "--keep", "--device"):
        assert flag in arguments
    done = _invoke(*arguments)
    assert (done.exit_code, Path("chain.planned.onnx").exists()) == (0, True), done.output


def test_the_command_suggested_for_sizes_that_only_a_run_tells_leaves_room_for_them(model: Path) -> None:
    """A budget keeps some bytes for what onnxruntime allocates by itself, a frontier's totals don't."""
    nodes = "a = Exp(x) b = Tanh(a) c = Add(a, b) d = Tanh(c) s = ReduceMax <axes=[1], keepdims=0> (d) z = NonZero(s)"
    onnx.save(parse(f"g (float[64, 64] x) => (int64[1, n] z) {{ {nodes} }}"), model)
    shown = _invoke("pareto", model, "--points", 2, "--device", "none", "--mode", "inference", "--quiet")
    _, *arguments = shlex.split(shown.stdout.splitlines()[-1].removeprefix("Make one of them: "))
    assert "--budget" in arguments
    done = _invoke(*arguments)
    assert done.exit_code == 0, done.output


def test_a_frontier_of_one_plan_suggests_no_budget(model: Path) -> None:
    whole = ("--device", "none", "--mode", "inference", "--chunks", "off")
    shown = _invoke("pareto", model, "--points", 1, *whole, "--dim", "x[0]=64")
    line = shown.stdout.splitlines()[-1]
    command = (
        "memonger plan chain.onnx --device none --mode inference --chunks off --dim 'x[0]=64' -o chain.planned.onnx"
    )
    assert line == f"Make one of them: {command}"
