"""The command that writes a smaller plain model: ``shrink``."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import onnx_ir as ir

from memonger.cli.options import FORCED
from memonger.cli.output import Screen, print_json, print_lines, print_notes, progress_bar, read_inputs
from memonger.errors import PlanError
from memonger.ir.values import required_inputs
from memonger.loops.candidates import Loop
from memonger.loops.search import Shrunk
from memonger.loops.search import shrink as shrunk
from memonger.loops.targets import RUNTIMES
from memonger.serving.package import TensorSpec
from memonger.serving.triton_config import NAMING, plain_config, text_of
from memonger.units import format_size
from memonger.words import listed


def shrink(model: Path, output: Path, weights: Any, no_check: bool, as_json: bool, quiet: bool, **flags: Any) -> None:
    """Write a model in loops, and print what it takes."""
    if flags["target"] is not None:
        weights = RUNTIMES[flags["target"]].weights_or(weights)
    if flags["target"] == "triton":
        if output.parent.name != "1" or not output.parent.parent.name:
            raise PlanError(f"Triton looks for a model in NAME/1: -o {output.stem}/1/model.onnx, not -o {output}.")
        NAMING.check(output.parent.parent.name)
        config = output.parent.parent / "config.pbtxt"
        if config.is_file() and not click.get_current_context().meta.get(FORCED):
            raise PlanError(f"{config} is there already: name another folder, or replace it with --force.")
    with progress_bar(quiet, f"Shrinking {model.name}") as report_progress:
        flags["inputs"] = read_inputs(flags["inputs"], model)
        made = shrunk(model, check=not no_check, progress=report_progress, **flags)
    if made.target == "triton":
        sides = (required_inputs(made.model.graph), list(dict.fromkeys(made.model.graph.outputs)))
        inputs, outputs = ([_port(value) for value in values] for values in sides)
        content = plain_config(output.parent.parent.name, inputs, outputs, output.name)
        (output.parent.parent / "config.pbtxt").write_text(text_of(content))
    made.save(output, weights=weights)
    print_notes(made.notes)
    if as_json:
        record = {"model": str(model), "output": str(output), "loops": [asdict(loop) for loop in made.loops]}
        footprints = {"before": asdict(made.before), "after": asdict(made.after)}
        print_json(record | footprints | {"notes": list(made.notes)})
        return
    console = Screen()
    print_lines(console, [*_footprint(made, bool(flags["allow_rounding"])), _loops(made.loops)])
    beside = "" if weights == "inside" else f", and its weights beside it ({output.name}.*.data)"
    runs = "Any onnxruntime" if made.target is None else RUNTIMES[made.target].name
    console.print(f"Wrote {output}{beside}. {runs} runs it.", soft_wrap=True)


def _port(value: ir.Value) -> TensorSpec:
    dims = tuple(dim if isinstance(dim, int) else -1 for dim in value.shape or ())
    return TensorSpec(str(value.name), value.dtype or ir.DataType.UNDEFINED, dims, dims)


def _footprint(made: Shrunk, allow_rounding: bool) -> list[str]:
    before, after = made.before, made.after
    if made.time_ratio is None:
        return _expectation(made)
    outputs = "outputs that may differ in their last bits" if allow_rounding else "the same outputs bit for bit"
    took = f"{made.time_ratio:.2f} of the time, with {outputs}"
    if before.run_bytes is None or after.run_bytes is None:
        return [f"In stock onnxruntime a run takes {took}.", *_expectation(made)]
    less = 1 - after.run_bytes / max(1, before.run_bytes)
    lines = [
        f"In stock onnxruntime a run takes {format_size(after.run_bytes)} beside the loaded model, "
        f"{format_size(before.run_bytes)} before: {less:.0%} less, in {took}."
    ]
    if before.loaded_bytes is not None and after.loaded_bytes is not None:
        lines.append(f"Loaded it takes {format_size(after.loaded_bytes)}, {format_size(before.loaded_bytes)} before.")
    return [*lines, *_expectation(made)]


def _expectation(made: Shrunk) -> list[str]:
    """What runs were expected to take."""
    before, after = made.before.expected, made.after.expected
    if before is None or after is None:
        return []
    return [
        f"By its allocator's rules a run is expected to take {format_size(after.run_bytes)}, "
        f"{format_size(before.run_bytes)} before; without its arena {format_size(after.without_arena)} and "
        f"{format_size(before.without_arena)}."
    ]


def _loops(loops: tuple[Loop, ...]) -> str:
    if not loops:
        why = "where onnxruntime doesn't take twice what they need"
        return f"Nothing runs in a loop: all nodes stand in a branch (If), {why}."
    return f"In loops run {listed(f'{loop.nodes} nodes in {loop.slices} slices' for loop in loops)}."
