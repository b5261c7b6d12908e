"""The commands that look at files or lay out a list of buffers: ``inspect``, ``verify``, ``unplan`` and ``pack``."""

from pathlib import Path
from typing import Any

from memonger.cli.output import Screen, print_json, print_line
from memonger.errors import MemongerError
from memonger.layout import allocate, check_layout, lower_bound
from memonger.layout.minimalloc_csv import read_problem, write_solution
from memonger.model.load import load_as_is
from memonger.model.save import save_model
from memonger.plan import Plan
from memonger.plan_file import KEY
from memonger.planning.unplan import unplan as made_without_plan
from memonger.report import text
from memonger.report.memory_count import count_memory
from memonger.report.summary import plan_record


def inspect(model: Path, as_json: bool) -> None:
    """Print what a model holds, and its plan if it has one."""
    read = load_as_is(model)
    loaded, name = read.ir, read.name
    planned = Plan.load(model) if KEY in loaded.metadata_props else None
    if as_json:
        record: dict[str, Any] = text.model_record(loaded, name)
        record["plan"] = None if planned is None else plan_record(planned, name, str(model))
        print_json(record)
        return
    console = Screen()
    console.print(text.model_table(loaded, name))
    console.print(text.operator_table(loaded))
    if planned is None:
        console.print(f"It has no plan: make one with memonger-plan {model} -o PLANNED.onnx")
        return
    console.print(text.plan_table(plan_record(planned, name, str(model))))
    console.print(f"Live bytes up to the arena: [{text.memory_curve(planned)}]")
    console.print(text.largest_table(planned))
    console.print(text.memory_count_table(count_memory(planned)))
    console.print(text.COUNT_NOTE)


def unplan(planned: Path, output: Path, as_planned: bool, as_json: bool) -> None:
    """Write the model of a planned file without its plan."""
    model = made_without_plan(planned, as_planned=as_planned)
    record = {
        "planned": str(planned), "output": str(output), "nodes": model.graph.num_nodes(),
        "kind": "training" if model.is_differentiated else "forward",
    }  # fmt: skip
    save_model(model.ir, output)
    if as_json:
        print_json(record)
        return
    print_line(f"Wrote {output}: the {record['kind']} model of {planned}, {record['nodes']} nodes, without the plan.")


def verify(model: Path, as_json: bool) -> None:
    """Check the plan in a file."""
    planned = Plan.load(model)
    record = {
        "model": str(model), "verified": True, "values": len(planned.offsets), "steps": len(planned.graph.nodes),
        "arena_bytes": planned.arena_bytes, "lower_bound_bytes": planned.lower_bound_bytes,
    }  # fmt: skip
    if as_json:
        print_json(record)
    else:
        print_line(
            f"{model}: the plan is correct. {record['values']} values over {record['steps']} steps in "
            f"{record['arena_bytes']} bytes (lower bound {record['lower_bound_bytes']})."
        )


def pack(problem: Path, capacity: int | None, output: Path | None, as_json: bool) -> None:
    """Lay out the buffers of a CSV file."""
    buffers = read_problem(problem)
    layout = allocate(buffers.buffers)
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
        "lower_bound_bytes": bound, "output": None if output is None else str(output),
    }  # fmt: skip
    if as_json:
        print_json(record)
    else:
        print_line(f"{len(layout.offsets)} buffers in {layout.size} bytes (lower bound {bound}).")
