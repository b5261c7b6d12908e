"""docs/OPERATORS.md, made from the registry: every operator's gradient, or why there is none, and what it keeps.

``python -m tests.support.operators_page [--write]`` compares the page with the registry, or writes it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import click
import onnx
import onnx_ir as ir

import memonger
from memonger.autodiff import rules as rules  # registers them
from memonger.autodiff.registry import EXPANSIONS, OPEN, RULES
from memonger.errors import MemongerError
from memonger.ir.checks import RUNTIME_OPERATORS
from memonger.ir.operators import facts_of
from tests.support.fused_cases import fused_cases
from tests.support.node_cases import Case, cases

PAGE = Path(__file__).parents[2] / "docs" / "OPERATORS.md"
FIRST = 13  # the oldest operator set on the page
FLOATS = ("float)", "double)", "float16)")
FUSED = "com.microsoft::"
TABLE = ("| operator | operator sets | gradient | keeps |", "|---|---|---|---|")
Kept = Mapping[str, tuple[tuple[str, ...], int]]

HEAD = """# Operators and their gradients

Made by `python -m tests.support.operators_page --write` from the registry and onnx {version}, operator set {opset}.
Each test of a differentiable operator in onnx's backend suite is compared with finite differences:
[a table](../benchmarks/training/coverage.txt) has how many agree, and the message of each that is refused.

- **rule**: the gradient is written for the operator as it stands.
- **expansion**: the operator is written as others that have rules; those run forward, too.
- **body**: likewise, by the function body that the standard gives.
- **none exists**: outputs or inputs are no floating-point numbers, or outputs change in jumps only.
- **open**: why there is none here. Between loss and parameters it is refused with this sentence.

*Keeps* is what the backward pass reads of the operator's own inputs and outputs, in any test of the suite, if all
floating-point inputs get a gradient; *+ n* are values in between, of expansions and bodies. Constants aren't counted.
"""


def schema_of(name: str) -> onnx.defs.OpSchema | None:
    """The newest schema of a standard operator, None of others and of those that are no more."""
    opset = onnx.defs.onnx_opset_version()
    if "::" in name or not onnx.defs.has(name, opset, ""):
        return None
    return onnx.defs.get_schema(name, opset, "")


def standard() -> dict[str, list[int]]:
    """The standard's operators from set `FIRST` on, with the sets in which they changed since."""
    versions: dict[str, set[int]] = defaultdict(set)
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "":
            versions[schema.name].add(schema.since_version)
    newest = onnx.defs.onnx_opset_version()
    alive = {name for name in versions if onnx.defs.has(name, newest, "") and not onnx.defs.get_schema(name).deprecated}
    return {
        name: [v for v in sorted(found) if v >= FIRST] or [max(found)]
        for name, found in sorted(versions.items())
        if name in alive
    }


def gradient_of(name: str) -> str:
    """How an operator is differentiated, or why it isn't; "" where nothing is said of it."""
    schema = schema_of(name)
    if name in EXPANSIONS and (name in RULES or name in OPEN) and not facts_of(name).without_gradient:
        return f"expansion, else {'rule' if name in RULES else 'open: it ' + OPEN[name]}"
    if schema is not None and not _any_floating(schema.outputs):
        return f"none exists: outputs are {_kinds(schema.outputs)}"
    if name in OPEN:
        return f"open: it {OPEN[name]}"
    if schema is not None and not _any_floating(schema.inputs):
        return "none exists: no floating-point input"
    if facts_of(name).without_gradient:
        return "none exists: outputs don't change with the inputs, or in jumps only"
    if name in EXPANSIONS or name in RULES:
        return "expansion" if name in EXPANSIONS else "rule"
    return "body" if schema is not None and (schema.has_function or schema.has_context_dependent_function) else ""


def _any_floating(formals: Iterable[onnx.defs.OpSchema.FormalParameter]) -> bool:
    return any(kind.endswith(FLOATS) or "(float" in kind for formal in formals for kind in formal.types)


def _kinds(formals: Iterable[onnx.defs.OpSchema.FormalParameter]) -> str:
    kinds = {kind for formal in formals for kind in formal.types}
    words = [("boolean", "bool"), ("whole numbers", "int"), ("text", "string")]
    return " or ".join(word for word, part in words if any(part in kind for kind in kinds)) or "absent"


def kept_by(tests: Iterable[Case]) -> Kept:
    """For each operator the names of inputs and outputs its backward pass reads, and how many values in between."""
    names: dict[str, set[str]] = {}
    between: dict[str, int] = defaultdict(int)
    for case in tests:
        if case.obstacle:
            continue
        try:
            training = memonger.differentiate(case.model, wrt=list(case.wrt))
        except MemongerError:
            continue
        own, others = _read(case, training.ir)
        names.setdefault(case.operator, set()).update(own)
        between[case.operator] = max(between[case.operator], others)
    return {name: (tuple(sorted(found)), between[name]) for name, found in names.items()}


def _read(case: Case, model: ir.Model) -> tuple[set[str], int]:
    formal = _formal_names(case)
    forward = {v for node in model.graph if not str(node.name).startswith("grad/") for v in node.outputs}
    sources = {v for v in model.graph.inputs if not str(v.name).endswith(".grad") or v.name in case.feeds}
    read = {v for node in model.graph if str(node.name).startswith("grad/") for v in node.inputs if v is not None}
    kept = {str(v.name) for v in read & (forward | sources)}
    return {formal[name] for name in kept if name in formal}, len([n for n in kept if n not in formal])


def _formal_names(case: Case) -> dict[str, str]:
    node = next(n for n in case.model.graph.node if n.op_type == case.operator.rpartition("::")[2])
    schema = schema_of(case.operator)
    found = {}
    inputs, outputs = (schema.inputs, schema.outputs) if schema else ((), ())
    for given, formals in ((node.input, inputs), (node.output, outputs)):
        for k, name in enumerate(given):
            found[name] = formals[min(k, len(formals) - 1)].name if formals else name
    return found


def row(name: str, versions: Iterable[int], kept: Kept) -> str:
    """The operator's line of the table."""
    own, between = kept.get(name, ((), 0))
    parts = [", ".join(f"`{n}`" for n in own)] if own else []
    parts += [f"+ {between}"] if between else []
    keeps = " ".join(parts) or ("nothing" if name in kept else "")
    return f"| {name.removeprefix(FUSED)} | {', '.join(map(str, versions))} | {gradient_of(name)} | {keeps} |"


def _of_runtime() -> set[str]:
    """Operators that onnxruntime adds, in its own domain or in the standard's."""
    own = {name for name in (*EXPANSIONS, *OPEN) if name.startswith(FUSED)}
    return own | {name for name in RUNTIME_OPERATORS if schema_of(name) is None}


def page(kept: Kept) -> str:
    """The page."""
    lines = [HEAD.format(version=onnx.__version__, opset=onnx.defs.onnx_opset_version())]
    lines += ["## ai.onnx\n", *TABLE]
    lines += [row(name, versions, kept) for name, versions in standard().items()]
    lines += ["\n## com.microsoft, and what onnxruntime writes into ai.onnx\n", *TABLE]
    lines += [row(name, (1,), kept) for name in sorted(_of_runtime(), key=lambda name: name.removeprefix(FUSED))]
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--write", is_flag=True, help="Write the page; else it is compared.")
def main(write: bool) -> None:
    """Compare the page, or write it."""
    made = page(kept_by((*cases(), *fused_cases())))
    if write:
        PAGE.write_text(made, "utf-8")
    click.echo("as it is" if PAGE.read_text("utf-8") == made else "the page has to be written anew: --write")


if __name__ == "__main__":
    main()
