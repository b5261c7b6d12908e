"""The commands that look at files or lay out buffers: ``inspect``, ``diff``, ``verify``, ``unplan``, ``pack``."""

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import click

from memonger.allocation import allocate, check_layout, lower_bound
from memonger.allocation.minimalloc_csv import read_problem, write_solution
from memonger.cli.output import Screen, print_json, print_line, print_lines, print_result, print_wide
from memonger.devices import Cuda, parse_device
from memonger.errors import LoadError, MemongerError
from memonger.files import temporary_folder
from memonger.ir.model import Model
from memonger.ir.names import name_nodes
from memonger.ir.save import save_model
from memonger.model.load import load, load_as_is
from memonger.plan import Plan
from memonger.plan_file import is_planned
from memonger.planner.unplan import unplan as made_without_plan
from memonger.report import text
from memonger.report.chunks import CHUNKS_NOTE, chunks_lines, chunks_table
from memonger.report.diff import diff_lines, diff_record, totals_table
from memonger.report.inspection import model_lines, model_record, model_table, operator_table
from memonger.report.layers import Layer, layers_of, layers_table
from memonger.report.memory_count import COUNT_NOTE, count_memory
from memonger.report.summary import details_table, headline, plan_figures, plan_record
from memonger.shapes.inference import infer_once


def inspect(
    model: Path, layers: bool, timed: bool, batch: int | None, dims: Mapping[str, int], as_json: bool
) -> None:  # fmt: skip
    """Print what a model holds, node by node if asked, and its plan if it has one."""
    read, planned = _read(model)
    if (timed or batch is not None or dims) and not layers:
        raise click.UsageError("--batch, --dim and --time say what --layers shows: give that, too.")
    if planned is not None and (batch is not None or dims):
        raise click.UsageError(f"{model} has a plan, for sizes that --batch and --dim can't change.")
    record = model_record(read.ir, read.name)
    shown = _layers(model, read, planned, timed, batch, dims) if layers else ()
    if as_json:
        rows = {"layers": [asdict(layer) for layer in shown]} if layers else {}
        plan = None if planned is None else plan_record(planned, read.name, str(model))
        print_json({**record, **rows, "plan": plan})
        return
    console = Screen()
    figures = None if planned is None else plan_figures(planned, read.name, str(model))
    if planned is not None and figures is not None:
        print_lines(console, (*headline(figures), *chunks_lines(planned), *planned.state_notes))
    print_lines(console, tuple(model_lines(record)))
    if layers:
        print_wide(console, layers_table(shown))
        return
    console.print(model_table(record))
    console.print(operator_table(record["operators"]))
    if planned is None or figures is None:
        console.print(f"It has no plan: make one with memonger plan {model} -o PLANNED.onnx")
        return
    console.print(details_table(figures, planned.lower_bound_bytes))
    if planned.chunks:
        console.print(chunks_table(figures["chunks"]))
        console.print(CHUNKS_NOTE)
    print_lines(console, text.memory_picture(planned))
    console.print(text.largest_table(planned))
    console.print(text.memory_count_table(count_memory(planned)))
    console.print(COUNT_NOTE)


def unplan(planned: Path, output: Path, as_planned: bool, as_json: bool) -> None:
    """Write the model of a planned file without its plan."""
    model = made_without_plan(planned, as_planned=as_planned)
    record = {
        "planned": str(planned), "output": str(output), "nodes": model.graph.num_nodes(),
        "kind": "training" if model.is_differentiated else "forward",
    }  # fmt: skip
    save_model(model.ir, output)
    what = f"the {record['kind']} model of {planned}, {record['nodes']} nodes, without the plan"
    print_result(as_json, record, f"Wrote {output}: {what}.")


def _read(model: Path) -> tuple[Model, Plan | None]:
    """A model as it is, and its plan if it has one."""
    read = load_as_is(model)
    return read, Plan.load(model) if is_planned(read.ir) else None


def _layers(
    path: Path, read: Model, planned: Plan | None, timed: bool, batch: int | None, dims: Mapping[str, int]
) -> tuple[Layer, ...]:
    """The nodes as they stand; with sizes, or where they are timed, as they are planned."""
    device = parse_device("cpu" if planned is None or planned.device == "none" else planned.device)
    if planned is None:
        if timed or batch is not None or dims:
            read = load(path, batch=batch, dims=dims)
            name_nodes(read)
        else:
            with suppress(LoadError):  # what can't be inferred is shown as unknown
                infer_once(read)
    graph, seconds = read.ir if planned is None else planned.model, None
    if timed:
        from memonger.lowering import calibrate

        if not device.is_host:
            raise MemongerError(f"--time is for the CPU: on {device} onnxruntime times only how long launches take.")
        with temporary_folder() as folder:  # as planning measures them
            threads = 0 if planned is None else planned.threads
            seconds = calibrate.run(graph, device, folder, Cuda(), threads, (None,))[0].seconds
    return layers_of(graph, planned, seconds or {})


def diff(first: Path, second: Path, as_json: bool) -> None:
    """Print in what two models or plans differ; the exit status is 1 if they do."""
    (one, plan_one), (other, plan_other) = _read(first), _read(second)
    record = diff_record((one.ir, other.ir), (plan_one, plan_other), (str(first), str(second)))
    if as_json:
        print_json(record)
    elif record["same"]:
        kind = "models" if plan_one is None else "plans"
        print_line(f"{first} and {second} are the same {kind}: nodes, order, weights, and all that is planned.")
    else:
        console = Screen()
        if record["totals"]:
            console.print(totals_table(record))
        print_lines(console, tuple(diff_lines(record)))
    if not record["same"]:
        sys.exit(1)


def verify(model: Path, as_json: bool) -> None:
    """Check the plan in a file."""
    planned = Plan.load(model)
    record = {
        "model": str(model), "verified": True, "values": len(planned.offsets), "steps": len(planned.graph.nodes),
        "arena_bytes": planned.arena_bytes, "lower_bound_bytes": planned.lower_bound_bytes,
    }  # fmt: skip
    print_result(
        as_json, record,
        f"{model}: the plan is correct. {record['values']} values over {record['steps']} steps in "
        f"{record['arena_bytes']} bytes (lower bound {record['lower_bound_bytes']}).",
    )  # fmt: skip


_PACKING_EFFORT = 1_000_000_000
"""Turns of the search of ``pack``: two minutes, or a few seconds with numba, where a layout is hard to find."""


def pack(problem: Path, capacity: int | None, output: Path | None, as_json: bool) -> None:
    """Lay out the buffers of a CSV file."""
    buffers = read_problem(problem)
    layout = allocate(buffers.buffers, capacity=capacity, effort=_PACKING_EFFORT)
    check_layout(buffers.buffers, layout)
    bound = lower_bound(buffers.buffers)
    if capacity is not None and layout.size > capacity:
        raise MemongerError(
            f"{problem} was packed into {layout.size} bytes, {layout.size - capacity} over the capacity of {capacity} "
            f"(lower bound {bound})."
        )
    if output is not None:
        write_solution(output, buffers, layout)
    record = {
        "problem": str(problem), "buffers": len(layout.offsets), "arena_bytes": layout.size,
        "lower_bound_bytes": bound, "proven": layout.proven, "output": None if output is None else str(output),
    }  # fmt: skip
    proven = "; no layout is smaller" if layout.proven and layout.size > bound else ""
    said = f"{len(layout.offsets)} buffers in {layout.size} bytes (lower bound {bound}){proven}."
    print_result(as_json, record, said)
