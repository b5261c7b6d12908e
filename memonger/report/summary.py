"""The figures of a plan, as one flat record: what ``--json`` prints and tables are made from."""

from dataclasses import asdict
from typing import Any

from memonger.plan import Plan
from memonger.report.chunks import chunk_records
from memonger.report.memory_count import count_memory
from memonger.shapes.ranges import own


def plan_record(plan: Plan, model: str, output: str | None) -> dict[str, Any]:
    """Every figure of a plan, with its memory counted by kind; see `plan_figures`."""
    return {**plan_figures(plan, model, output), "memory": count_memory(plan).to_dict()}


def plan_figures(plan: Plan, model: str, output: str | None) -> dict[str, Any]:
    """The figures of a plan that take no time; sizes are bytes.

    Args:
        plan: The plan.
        model: Where the model came from.
        output: Where the planned model was written, if it was.
    """
    spent = plan.spent
    return {
        "model": model,
        "mode": plan.mode,
        "device": plan.device,
        "batch": plan.batch,
        "nodes": len(plan.graph.nodes),
        **weight_figures(plan),
        "activation_bytes": plan.activation_bytes,
        "peak_before_bytes": plan.peak_before_bytes,
        "peak_bytes": plan.peak_bytes,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "arena_bytes": plan.arena_bytes,
        "workspace_bytes": plan.workspace_bytes,
        "run_time_bytes": plan.run_time_bytes,
        "limit_bytes": plan.limit,
        "predicted_bytes": plan.predicted_bytes,
        "input_bytes": plan.input_bytes,
        "state_bytes": plan.state_bytes,
        "state": [
            {"input": old, "output": new, "why_swapped": plan.why_swapped.get(old)} for old, new in plan.state.items()
        ],
        "total_bytes": plan.total_bytes,
        "session_bytes": plan.session_bytes,
        "process_bytes": plan.process_bytes,
        "mapped_bytes": plan.mapped_bytes,
        "unplanned_bytes": plan.unplanned_bytes,
        "peer": plan.peer,
        "stock_bytes": plan.stock_bytes,
        "budget_bytes": plan.budget,
        "strategy": plan.strategy,
        "overhead": plan.overhead,
        "segments": 1 if plan.outcome is None else plan.outcome.segments,
        "recomputed_nodes": len(plan.recomputed),
        "chunks": chunk_records(plan),
        "ranges": {name: [one.least, one.most, one.step] for name, one in own(plan.ranges).items()},
        "unplanned_values": unplanned_values(plan),
        "notes": list(plan.notes),
        "planning_seconds": plan.planning_seconds,
        "passes": [asdict(each) for each in plan.passes],
        "planning_runs": None if spent is None else spent.runs,
        "planning_run_seconds": None if spent is None else spent.seconds,
        "planning_node_seconds": None if spent is None else spent.alone,
        "chunks_time_ratio": None if spent is None else spent.ratio,
        "output": output,
    }


def weight_figures(plan: Plan) -> dict[str, Any]:
    """How many bytes of weights there are and are in memory, and what passes through memory of those in the file."""
    window = plan.window
    return {
        "parameter_bytes": plan.parameter_bytes,
        "resident_parameter_bytes": plan.resident_parameter_bytes,
        "window": window and {"bytes": window.nbytes, "weights": len(window.weights), "read_bytes": plan.read_bytes},
    }


def unplanned_values(plan: Plan) -> list[str]:
    """Values that the runtime allocates itself: their size is unknown before the run, or their type has none.

    The few elements that shapes are computed from in a plan for ranges of sizes are left out.
    """
    graph = plan.graph
    unplanned = (value for writes in graph.writes for value in writes if not graph.planned[value])
    of_shapes = {value for value, size in enumerate(graph.sizes) if plan.ranges and size > 0}
    return [graph.values[value] for value in unplanned if value not in graph.persistent | of_shapes]
