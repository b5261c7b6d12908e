"""The kinds of cases. Each draws a case from a generator, tries it, and says what to compare with.

A case returns "right" or "alone"; a `MemongerError` is a refusal, `Wrong` a wrong result, any other error a traceback.
"""

import functools
import json
import random
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import onnx_ir as ir
from click.testing import CliRunner

import memonger
from memonger import plan_file
from memonger.cli import commands
from memonger.ir.save import save_model
from memonger.serving import TARGETS
from tests.support import training_models
from tests.support.fuzzing import compared, corpus, fleets, forms, mutate, sessions
from tests.support.fuzzing.compared import Tell
from tests.support.fuzzing.outcomes import Wrong
from tests.support.stock import parse

Case = Callable[[random.Random, Path, Tell, bool], str]


def models(choice: random.Random, folder: Path, tell: Tell, only_stock: bool) -> str:
    """Models changed: planned with or without a device, some differentiated first, run, and compared with stock."""
    model, given, name = corpus.draw(choice)
    data, note = mutate.change(choice, model)
    device = choice.choice(["none", "none", "cpu"])
    level = choice.choice(["disable", "all"]) if device == "cpu" else "disable"
    tell(mutation=f"{name}, {device}: {note}")
    path = compared.place(folder, data)
    try:
        feeds = corpus.feeds_for(choice, onnx.ModelProto.FromString(data), given)
    except Exception:  # no message any more
        feeds = {}
    stock_level = {"disable": "ORT_DISABLE_ALL", "all": "ORT_ENABLE_ALL"}[level]
    if only_stock:
        return compared.compare({}, compared.stock(path, feeds, stock_level))
    if choice.random() < 0.2:
        return _trained(choice, path, tell)
    tell(stage="device plan" if device == "cpu" else "plan")
    options: dict[str, Any] = {"inputs": feeds} if choice.random() < 0.5 else {}
    options |= {"batch": 2} if b"N" in data or choice.random() < 0.05 else {}
    plan = memonger.search_plan(path, mode="inference", device=device, level=level, threads=1, **options)
    if choice.random() < 0.3:
        tell(stage="save")
        plan.save(folder / "planned.onnx")
        compared.check_secret(folder / "planned.onnx")
        plan = memonger.Plan.load(folder / "planned.onnx")
    tell(stage="run")
    mine = memonger.Session(plan).run(feeds)
    for array in mine.values():
        compared.check_secret(array)
    tell(stage="stock")
    return compared.compare(mine, compared.stock(path, feeds, stock_level))


def _trained(choice: random.Random, path: Path, tell: Tell) -> str:
    """The gradients of a model, planned, as stock onnxruntime runs them."""
    tell(stage="differentiate")
    loss = choice.choice([None, "softmax_cross_entropy", "mean_squared_error"])
    turn = memonger.to_training_mode if choice.random() < 0.3 else memonger.load
    training = memonger.differentiate(turn(path), loss=loss)
    tell(stage="plan")
    plan = memonger.search_plan(training, device="none", threads=1, effort=1000)
    proto = ir.to_proto(training.ir)
    feeds = corpus.feeds_for(choice, proto, {})
    tell(stage="run")
    mine = memonger.Session(plan).run(feeds)
    tell(stage="stock")
    return compared.compare(mine, compared.stock(proto.SerializeToString(), feeds, "ORT_DISABLE_ALL"), "gradients: ")


def plans(choice: random.Random, folder: Path, tell: Tell, only_stock: bool) -> str:
    """Planned files whose plan was changed and signed again: refused, or the numbers of stock onnxruntime."""
    name = choice.choice(compared.PLANS)
    tell(mutation=name, stage="device plan")
    data, feeds = compared.planned(name)
    proto = onnx.ModelProto.FromString(data)
    said = []
    if choice.random() < 0.3:  # in the file's nodes as well
        said.append(
            choice.choice([mutate.nodes, mutate.wires, mutate.attribute, mutate.dims, mutate.names])(choice, proto)
        )
    entry = next(entry for entry in proto.metadata_props if entry.key == plan_file.KEY)
    content = json.loads(entry.value)
    said += [_change_plan(choice, content) for _ in range(choice.choice([1, 1, 2, 3]))]
    tell(mutation=f"{name}: {'; '.join(said)}")
    try:
        content["graph_digest"] = plan_file.graph_digest(ir.from_proto(proto))
    except Exception:  # a file that can't be read can't be signed
        said.append("not signed")
    entry.value = json.dumps(content)
    path = compared.place(folder, proto.SerializeToString())
    if only_stock:
        return compared.compare({}, compared.stock(path, feeds, "ORT_DISABLE_ALL"))
    tell(stage="run")
    mine = memonger.Session(path).run(feeds)
    tell(stage="stock")
    return compared.compare(mine, compared.stock(path, feeds, "ORT_DISABLE_ALL"))


def _change_plan(choice: random.Random, content: dict[str, Any]) -> str:
    """One entry of a plan, or of what is in it, is another."""
    offsets = content.get("offsets")
    if choice.random() < 0.5 and isinstance(offsets, dict) and offsets:
        return _change_offsets(choice, offsets, content)
    key = choice.choice([*content, "host"])
    odd = [
        0,
        1,
        -1,
        64,
        2**31,
        2**61,
        2**62,
        2**63,
        2**70,
        1.5,
        float("nan"),
        None,
        True,
        "x",
        "",
        "training",
        "cpu",
        [],
        {},
    ]
    names = sorted(offsets) if isinstance(offsets, dict) and offsets else ["a"]
    named = {name: choice.choice(odd) for name in choice.sample(names, 1)}
    old = content.get(key)
    nudged = old + choice.choice([-64, -1, 1, 64, 4096]) if type(old) is int else None
    if isinstance(old, dict) and old and choice.random() < 0.6:
        inner = choice.choice(sorted(old))
        old[inner] = choice.choice(odd)
        return f"{key}.{inner}={old[inner]!r}"
    content[key] = choice.choice([*odd, nudged, nudged, named, sorted(named), 100_000, "cuda:0", "none"])
    return f"{key}={content[key]!r:.80}"


def _change_offsets(choice: random.Random, offsets: dict[str, Any], content: dict[str, Any]) -> str:
    one, other = choice.choice(sorted(offsets)), choice.choice(sorted(offsets))
    arena = content.get("arena_bytes")
    arena = arena if type(arena) is int else 64
    match choice.randrange(6):
        case 0:
            offsets[one] = offsets[other]
        case 1:
            offsets[one], offsets[other] = offsets[other], offsets[one]
        case 2:
            del offsets[one]
        case 3:
            offsets[mutate.text(choice)] = offsets[one]
        case 4:
            offsets[one] = choice.choice(
                [0, -64, arena, arena - 64, arena + 64, 2**40, 2**62, 2**64, 7, 1.0, None, "0"]
            )
        case _ if type(offsets[one]) is int:
            offsets[one] += choice.choice([-64, 64, 128, -4096, 1])
    return f"offset of {one:.30} is {offsets.get(one)!r}"


_NO_ERROR = re.compile(r"memonger: note: |.*: .*\(\d+ s\)$")
"""Lines on standard error that are none: notes, and how far a command is, which a slow machine shows."""


def cli(choice: random.Random, folder: Path, tell: Tell, only_stock: bool) -> str:
    """Commands with options and values drawn at random: status 0, or 1 or 2 and a message, and no traceback."""
    for name, data in _cli_files().items():
        (folder / name).write_bytes(data)
    (folder / "folder").mkdir()
    command = choice.choice(sorted(commands.main.commands))
    arguments = [command, *_arguments(choice, commands.main.commands[command])]
    tell(mutation=" ".join(argument[:60] for argument in arguments), stage=f"run {command}")
    if only_stock:
        return "alone"
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    result = CliRunner().invoke(commands.main, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    differs = command == "diff" and result.exit_code == 1  # what it found is no error
    if result.exit_code == 0 or differs:
        return "right"
    if result.exit_code not in (1, 2) or "Traceback" in result.output:
        raise Wrong(f"{command}: status {result.exit_code}, a traceback is shown")
    lines = [line for line in result.stderr.splitlines() if not _NO_ERROR.match(line)]
    if result.exit_code == 1 and not (len(lines) == 1 and lines[0].startswith("memonger: ")):
        raise Wrong(f"{command}: its error is {len(lines)} lines")
    if any((ord(sign) < 32 and sign != "\n") or sign in mutate.HIDDEN for sign in result.output):
        raise Wrong(f"{command}: signs that steer a terminal in what it prints")
    if {path: path.read_bytes() for path in before if path.is_file()} != before:
        raise Wrong(f"{command} failed and changed a file")
    raise memonger.MemongerError(result.stderr)


@functools.cache
def _cli_files() -> dict[str, bytes]:
    """Files to name on a command line: a model, its plan, its training form, inputs, a problem, and none of these."""
    folder = Path(tempfile.mkdtemp())
    model, training = training_models.classifier(), folder / "training.onnx"
    onnx.save(model, folder / "model.onnx")
    onnx.save(parse(corpus.WRITTEN[4], opset=18), folder / "open.onnx")
    memonger.search_plan(model, mode="inference", device="none").save(folder / "planned.onnx")
    memonger.search_plan(model, loss="softmax_cross_entropy", device="none").save(folder / "steps.onnx")
    save_model(
        memonger.differentiate(model, loss="softmax_cross_entropy", optimizer=memonger.SGD()).ir.clone(), training
    )
    np.savez(folder / "inputs.npz", x=training_models.batch()["x"])
    (folder / "problem.csv").write_text("id,lower,upper,size\n1,0,3,64\n2,2,5,128\n")
    (folder / "bad.onnx").write_bytes(b"\x08\x0a:\0")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _arguments(choice: random.Random, command: click.Command) -> list[str]:
    files = [*sorted(_cli_files()), *["model.onnx"] * 6, "planned.onnx", "folder", "no/such", "", *mutate.NAMES[3:6]]
    words = []
    for parameter in command.params:
        wanted = parameter.required or parameter.name in ("model", "problem", "time_limit") or choice.random() < 0.12
        if not wanted or choice.random() < 0.03:
            continue
        name = max(parameter.opts, key=len) if isinstance(parameter, click.Option) else ""
        if getattr(parameter, "is_flag", False):
            words.append(name)
            continue
        for _ in range(choice.choice([1, 1, 2]) if parameter.multiple or parameter.nargs == -1 else 1):
            words += [name] * bool(name) + [_value(choice, parameter, files)]
    return choice.sample(words, len(words)) if choice.random() < 0.03 else words


def _value(choice: random.Random, parameter: click.Parameter, files: list[str]) -> str:
    """What may be meant by it, or no such thing."""
    if choice.random() < 0.1:
        return choice.choice(
            [*mutate.NAMES[3:], "nan", "inf", "-1", "1e39", "9" * 400, "--", "-o", "0x10", "1_0", "\udcff"]
        )
    match parameter.name, parameter.type:
        case "output" | "annotated" | "outputs", _:
            return choice.choice(
                ["new.onnx", "new.onnx", "other.onnx", "folder", "folder/new", "no/such", "new\n.onnx"]
            )
        case "time_limit", _:
            return choice.choice(["0", "0.5", "1"])
        case "runs", _:
            return choice.choice(["1", "2", "0"])
        case (("trials" | "points"), _):
            return choice.choice(["0", "1", "3"])
        case "device", _:
            return choice.choice(["none", "none", "cpu", "cuda", "cuda:99", "cpu:1", "tpu"])
        case "target", _:
            return choice.choice([*TARGETS, "nowhere"])
        case "loss", _:
            return choice.choice(["softmax_cross_entropy", "mean_squared_error", "y", "nothing"])
        case "dims", _:
            return choice.choice(["N=2", "N=0", "x[0]=4", "x[9]=1", "N=" + "9" * 25, "x[-1]=2", "=3", "N=٣"])
        case "budget", _:
            return choice.choice(["1GiB", "20KiB", "8KiB", "1B", "0B", "9" * 40 + "TiB", "1e3B"])
        case _, click.Choice() as kind:
            return str(choice.choice(list(kind.choices)))
        case _, click.types.IntParamType() | click.types.FloatParamType():
            return choice.choice(["0", "1", "2", "7", "0.5", "1e-3", str(2**31), str(2**64)])
        case _, click.Path():
            return choice.choice(files)
        case _:
            return choice.choice(["y", "*", "[", "Gemm", "x", "classifier", "[!"])


KINDS: dict[str, Case] = {
    "models": models, "plans": plans, "cli": cli, **sessions.KINDS, **fleets.KINDS, **forms.KINDS,
}  # fmt: skip
