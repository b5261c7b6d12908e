"""Two models, or two plans, part by part: what one has that the other hasn't, and by how much they differ."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import onnx_ir as ir
from rich.table import Table

from memonger import plan_file
from memonger.graph.schedule import first_values
from memonger.ir.marks import AGAIN
from memonger.ir.operators import operator_name
from memonger.ir.values import subgraphs
from memonger.plan import Plan
from memonger.report.chunks import chunks_words
from memonger.report.inspection import model_record, operators, shape_text
from memonger.report.summary import plan_figures
from memonger.units import format_size

TOTALS = {
    "parameter_bytes": "weights", "resident_parameter_bytes": "weights in memory", "arena_bytes": "arena",
    "workspace_bytes": "workspace",
    "run_time_bytes": "sized at run time", "limit_bytes": "limit", "input_bytes": "inputs",
    "state_bytes": "state", "total_bytes": "total", "stock_bytes": "stock onnxruntime",
    "unplanned_bytes": "without reuse",
    "lower_bound_bytes": "smallest arena",
}  # fmt: skip
_NAMED = 5  # names of a kind that are printed


def diff_record(
    models: tuple[ir.Model, ir.Model], plans: tuple[Plan | None, Plan | None], names: tuple[str, str]
) -> dict[str, Any]:
    """All differences of two models, and of their plans where both have one; ``same`` says whether there is none.

    Args:
        models: Both models.
        plans: Their plans; a plan's model is the one in ``models``.
        names: What they are called.
    """
    parts = {"facts": _facts(models, plans), **_nodes(models), "weights": _weights(models), "totals": {}}
    if plans[0] is not None and plans[1] is not None:
        parts |= _plans(plans[0], plans[1], names)
    return {"models": list(names), "same": not any(_differs(part) for part in parts.values()), **parts}


def _differs(part: Any) -> bool:
    """Whether a part of the record says of a difference."""
    if isinstance(part, Mapping):
        return any(_differs(each) for each in part.values())
    return bool(part)


def _facts(models: tuple[ir.Model, ir.Model], plans: tuple[Plan | None, Plan | None]) -> dict[str, list[Any]]:
    """Of each fact that differs both sides: versions, producer, inputs, outputs, and what the plans were made for."""
    sides = [_facts_of(model, plan) for model, plan in zip(models, plans, strict=True)]
    keys = dict.fromkeys([*sides[0], *sides[1]])
    return {key: [side.get(key) for side in sides] for key in keys if sides[0].get(key) != sides[1].get(key)}


def _facts_of(model: ir.Model, plan: Plan | None) -> dict[str, Any]:
    record = model_record(model, "")
    facts = {key: record[key] for key in ("ir_version", "producer", "parameters")}
    used = {"ai.onnx", *(op.rpartition("::")[0] for op in record["operators"])}
    facts |= {f"operator set {name}": version for name, version in record["opsets"].items() if name in used}
    for kind in ("input", "output"):
        for value in record[f"{kind}s"]:
            facts[f"{kind} {value['name']}"] = f"{(value['type'] or '?').lower()}{shape_text(value['shape'])}"
    facts["plan"] = plan is not None
    if plan is not None:
        header = plan.header()
        facts |= {key: header[key] for key in ("mode", "device", "batch", "threads")}
        facts |= {} if plan.stamp is None else {f"made for {key}": value for key, value in asdict(plan.stamp).items()}
    return facts


def _nodes(models: tuple[ir.Model, ir.Model]) -> dict[str, Any]:
    """Nodes by name, recomputations left out: those of one model only, those that differ, and where the order does."""
    sides = [{_name(node): node for node in model.graph if AGAIN not in node.metadata_props} for model in models]
    only = [[name for name in sides[i] if name not in sides[1 - i]] for i in (0, 1)]
    both = [name for name in sides[0] if name in sides[1]]
    counts = [operators(model) for model in models]
    firsts = [first_values(model) for model in models]
    pairs = {op: [side.get(op, 0) for side in counts] for op in dict.fromkeys([*counts[0], *counts[1]])}
    return {
        "operators": {op: pair for op, pair in pairs.items() if pair[0] != pair[1]},
        "removed_nodes": only[0],
        "added_nodes": only[1],
        "changed_nodes": [n for n in both if _digest(sides[0][n], firsts[0]) != _digest(sides[1][n], firsts[1])],
        "first_other_step": _first_other_step(models, set(both)),
    }


def _first_other_step(models: tuple[ir.Model, ir.Model], both: set[str]) -> dict[str, list[Any]] | None:
    """Of what both models run, recomputations included, where they first go on differently: both steps and nodes."""
    orders = [
        [(step, _name(node)) for step, node in enumerate(model.graph) if _first_run(node) in both] for model in models
    ]
    for here, there in zip(*orders, strict=False):
        if here[1] != there[1]:
            return {"steps": [here[0], there[0]], "nodes": [here[1], there[1]]}
    return None


def _name(node: ir.Node) -> str:
    return node.name or next((str(value.name) for value in node.outputs if value.name), node.op_type)


def _first_run(node: ir.Node) -> str:
    """The name of the node that this one is, or computes again."""
    return node.metadata_props.get(AGAIN) or _name(node)


def _digest(node: ir.Node, firsts: Mapping[ir.Value, ir.Value]) -> str:
    """Of all that a node computes: its operator, attributes with their bodies, and the names it reads and writes.

    Which copy of a recomputed value it reads doesn't count: ``firsts`` has the one that each is a copy of.
    """
    digest = hashlib.sha256(operator_name(node).encode())
    read = ["" if value is None else str(firsts.get(value, value).name) for value in node.inputs]
    digest.update("\0".join([*read, "->", *(str(value.name) for value in node.outputs)]).encode())
    for name in sorted(node.attributes):
        digest.update(plan_file.attribute_bytes(node.attributes[name]))
    for graph in subgraphs(node):
        for inner in graph:
            digest.update(_digest(inner, firsts).encode())
    return digest.hexdigest()


def _weights(models: tuple[ir.Model, ir.Model]) -> dict[str, list[str]]:
    """Weights of one model only, and those of other content."""
    first, second = (plan_file.weight_digests(model) for model in models)
    return {
        "removed": [name for name in first if name not in second],
        "added": [name for name in second if name not in first],
        "changed": [name for name, digest in first.items() if second.get(name, digest) != digest],
    }


def _plans(first: Plan, second: Plan, names: tuple[str, str]) -> dict[str, Any]:
    records = [plan_figures(plan, name, None) for plan, name in zip((first, second), names, strict=True)]
    again = [[plan.graph.again[step] for step in plan.recomputed] for plan in (first, second)]
    offsets = [{p.graph.values[value]: offset for value, offset in p.offsets.items()} for p in (first, second)]
    both = [name for name in offsets[0] if name in offsets[1]]
    totals = {key: [record[key] for record in records] for key in TOTALS}
    if totals["resident_parameter_bytes"] == totals["parameter_bytes"]:  # all weights of both are in memory
        del totals["resident_parameter_bytes"]
    in_files = [[] if plan.window is None else plan.window.weights for plan in (first, second)]
    before, after = first.workspace or {}, second.workspace or {}
    return {
        "totals": {key: pair for key, pair in totals.items() if pair[0] != pair[1]},
        "overhead": [r["overhead"] for r in records] if records[0]["overhead"] != records[1]["overhead"] else None,
        "chunks": [record["chunks"] for record in records] if first.chunks != second.chunks else None,
        "recomputed": _only(*again),
        "in_files": _only(*in_files),
        "offsets_changed": sum(offsets[0][name] != offsets[1][name] for name in both),
        "workspace_changed": sum(before.get(name) != after.get(name) for name in {**before, **after}),
    }


def _only(first: Sequence[str], second: Sequence[str]) -> dict[str, list[str]]:
    """Of two lists of names what one has that the other hasn't, each once."""
    pairs = {"only_in_first": (first, set(second)), "only_in_second": (second, set(first))}
    return {key: [name for name in dict.fromkeys(own) if name not in other] for key, (own, other) in pairs.items()}


def totals_table(record: Mapping[str, Any]) -> Table:
    """The parts of the total that differ, with the difference."""
    table = Table()
    for name in ("", *record["models"], "difference", ""):
        table.add_column(name, justify="left" if not name and not table.columns else "right", overflow="fold")
    for key, (before, after) in record["totals"].items():
        cells = ["not known" if size is None else format_size(size) for size in (before, after)]
        gap, percent = "", ""
        if before is not None and after is not None:
            gap = f"{'+' if after > before else '-'}{format_size(abs(after - before))}"
            percent = f"{(after - before) / before:+.1%}" if before else ""
        table.add_row(TOTALS[key], *cells, gap, percent)
    return table


def diff_lines(record: Mapping[str, Any]) -> Iterator[str]:
    """The differences but the totals, a sentence each."""
    first, second = record["models"]
    for fact, (before, after) in record["facts"].items():
        yield f"{fact}: {_word(before)} -> {_word(after)}"
    for op, (before, after) in record["operators"].items():
        yield f"{op}: {before} -> {after} nodes"
    yield from _listed(f"nodes only in {first}", record["removed_nodes"])
    yield from _listed(f"nodes only in {second}", record["added_nodes"])
    yield from _listed("nodes that differ", record["changed_nodes"])
    if record["first_other_step"]:
        (step, other), (here, there) = record["first_other_step"].values()
        yield f"another order: step {step} of {first} is '{here}', step {other} of {second} is '{there}'"
    for kind, where in (("removed", f"only in {first}"), ("added", f"only in {second}"), ("changed", "that differ")):
        yield from _listed(f"weights {where}", record["weights"][kind])
    for part, what in (("recomputed", "recomputed"), ("in_files", "stay in a file")):
        for name, where in ((first, "first"), (second, "second")):
            yield from _listed(f"{what} only in {name}", record.get(part, {}).get(f"only_in_{where}", ()))
    if record.get("overhead"):
        before, after = record["overhead"]
        yield f"cost of what is recomputed: {before:+.1%} -> {after:+.1%} of one pass"
    if record.get("chunks"):
        yield f"runs in chunks: {' -> '.join(map(chunks_words, record['chunks']))}"
    if record.get("offsets_changed"):
        yield f"values at another place of the arena: {record['offsets_changed']}"
    if record.get("workspace_changed"):
        yield f"nodes with other workspace: {record['workspace_changed']}"


def _word(fact: Any) -> str:
    return "none" if fact is None else ("no", "yes")[fact] if isinstance(fact, bool) else str(fact)


def _listed(what: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        yield f"{what}: {len(names)} ({', '.join(names[:_NAMED])}{more})"
