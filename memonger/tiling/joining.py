"""One product in place of several with one weight, in training steps that compute nothing again.

A recurrent network that is written out step by step multiplies the input of each step by the same weight: many
products of few rows, each of which reads the whole weight. Where none of these inputs depends on another of the
products they are rows of one matrix, as in Appleyard et al. 2016, "Optimizing Performance of Recurrent Neural Networks
on GPUs". What that does beside is left out: layers that run at the same time; weights of several gates as one, as the
operators of ONNX have them.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import onnx_ir as ir

from memonger.devices import Device
from memonger.graph.liveness import assign_storage, live_bytes
from memonger.ir import training_roles
from memonger.ir.operators import operator_name
from memonger.ir.values import attribute_bytes, static_shape
from memonger.lowering.lowered import Lowered
from memonger.options import Options
from memonger.schedule import Request
from memonger.schedule.decide import decide
from memonger.schedule.solution import Solution, total_bytes
from memonger.tiling.candidates import asked_of, shared
from memonger.tiling.slice_check import CheckedCopy, Elements, SliceCheck
from memonger.tiling.writer import SliceWriter

OPERATORS = frozenset(["Gemm", "MatMul", "com.microsoft::FusedGemm", "com.microsoft::FusedMatMul"])
"""What writes the product of two matrices, row by row of the first."""

MOST_ROWS = 128
"""Products with more rows take no longer each for itself."""

_ROUNDS = 6
"""Models that are written, each without what took too much memory or gave other bits in the one before."""


@dataclass(frozen=True, slots=True)
class JoinedProduct:
    """One product in place of several.

    Attributes:
        name: Of its node.
        parts: Names of the nodes that it stands for, in the order of its rows.
        rows: Of each of them.
    """

    name: str
    parts: tuple[str, ...]
    rows: tuple[int, ...]


def with_joined_products(
    lowered: Lowered, request: Request, options: Options, device: Device, strategy: str
) -> tuple[Lowered, Request, Solution] | None:
    """A training step with joined products, where it gives the same bits and nothing has to be computed again.

    Where values are dropped, products stay apart: of a joined one all rows are computed again, or none.

    Args:
        lowered: The step; its nodes are timed, so it runs on the CPU.
        request: What is asked of it.
        options: How to plan.
        device: The plan's.
        strategy: What decides what is recomputed.

    Returns: The step, what is asked of it, and its layout; None where it stays as it is: there is nothing to join, or
        it would take more memory then, or more than the budget.
    """
    if strategy != "none" and (request.budget is None or request.recomputes_marked):
        return None
    roles, most = training_roles.read(lowered.model, str(lowered.model.graph.name)), request.budget
    unlimited = dataclasses.replace(request, budget=None)
    apart, check = set[str](), None
    for _ in range(_ROUNDS):
        model, products = joined_products(lowered.model, apart)
        if not products:
            return None
        check = check or SliceCheck(options.threads, lowered.spent)
        dropped = [each for each in products if _differs(lowered.model, model, each, check)]
        if not dropped:
            if most is None:
                most = total_bytes(request, decide(request, "none", options.order))
            made = shared(lowered, model, {each.name: [(name, 1.0) for name in each.parts] for each in products})
            asked = asked_of(made, lowered.model, unlimited, roles, device)
            solution = decide(asked, "none", options.order)
            if total_bytes(asked, solution) <= most:
                return made, dataclasses.replace(asked, budget=request.budget), solution
            live = live_bytes(assign_storage(solution.graph).buffers, len(solution.graph.nodes))
            peak, step = int(live.argmax()), {name: number for number, name in enumerate(solution.graph.nodes)}
            dropped = [min(products, key=lambda each: abs(step[each.name] - peak))]  # the nearest to it
        apart |= {name for each in dropped for name in each.parts}
    return None


def _differs(model: ir.Model, joined: ir.Model, product: JoinedProduct, check: SliceCheck) -> bool:
    """Whether a product gives other bits than those that it stands for."""
    whole, total = joined.graph.node(product.name), sum(product.rows)
    copies, begin = list[CheckedCopy](), 0
    for name, rows in zip(product.parts, product.rows, strict=True):
        part = {0: Elements(0, begin, begin + rows)}
        copies.append(CheckedCopy(model.graph.node(name), product.name, rows / total, rows, part, part))
        begin += rows
    return check.see((joined, whole), model, copies).difference > 0


def joined_products(model: ir.Model, apart: Collection[str] = ()) -> tuple[ir.Model, tuple[JoinedProduct, ...]]:
    """A model with one product in place of those of one weight that don't depend on one another.

    A Concat makes the joined rows, and a Split gives each product's rows their name back.

    Args:
        model: A lowered model: all nodes named, every value with a static shape. Not changed.
        apart: Names of nodes that stay as they are.

    Returns: The model, and what was joined in it; the model itself where nothing is.
    """
    groups = [group for group in _groups(model, apart).values() if len(group) > 1]
    if not groups:
        return model, ()
    copy = model.clone()
    of_name, writer, made = {str(node.name): node for node in copy.graph}, SliceWriter(copy), list[JoinedProduct]()
    for group in groups:
        members = [of_name[str(node.name)] for node in group]
        made += [_joined(writer, part) for part in _independent(copy.graph, members)]
        copy.graph.sort()
    return (copy, tuple(made)) if made else (model, ())


def _groups(model: ir.Model, apart: Collection[str]) -> dict[object, list[ir.Node]]:
    """Products by what they share: all but the matrix whose rows they multiply."""
    groups: dict[object, list[ir.Node]] = defaultdict(list)
    if (model.graph.opset_imports.get("") or 0) < 13:  # whose Split has no input for the rows
        return groups
    for node in model.graph:
        if node.name not in apart and _is_by_rows(node):
            attributes = tuple(attribute_bytes(each) for _, each in sorted(node.attributes.items()))
            groups[node.op_identifier(), attributes, tuple(node.inputs[1:])].append(node)
    return groups


def _is_by_rows(node: ir.Node) -> bool:
    """Whether a node multiplies few rows by a weight, each row for itself."""
    if operator_name(node) not in OPERATORS or len(node.outputs) != 1 or None in node.inputs[:2]:
        return False
    if any(value is not None and value.producer() is not None for value in node.inputs[1:]):
        return False
    rows, matrix = (static_shape(v) or () for v in node.inputs[:2] if v is not None)
    added = node.inputs[2] if len(node.inputs) > 2 else None
    shape = () if added is None else static_shape(added)
    if len(rows) != 2 or len(matrix) != 2 or rows[0] > MOST_ROWS or shape is None or (len(shape) == 2 and shape[0] > 1):
        return False
    return not any(node.attributes.get_int(name, 0) for name in ("transA", "transBatchA", "transBatchB"))


def _independent(graph: ir.Graph, members: list[ir.Node]) -> Iterator[list[ir.Node]]:
    """Products of which none depends on another, several each time: by how many of them are in a row before each."""
    depths, of_depth = dict[ir.Node, int](), defaultdict[int, list[ir.Node]](list)
    group = set(members)
    for node in graph:
        before = (value.producer() for value in node.inputs if value is not None)
        depths[node] = max((depths.get(each, 0) + (each in group) for each in before if each is not None), default=0)
        if node in group:
            of_depth[depths[node]].append(node)
    yield from (each for each in of_depth.values() if len(each) > 1)


def _joined(writer: SliceWriter, parts: list[ir.Node]) -> JoinedProduct:
    """Put one product in the place of these. It may stand before what it reads: the nodes are to be sorted then."""
    first, graph = parts[0], writer.model.graph
    sources = [source for node in parts if (source := node.inputs[0]) is not None]
    rows = [(static_shape(source) or (0,))[0] for source in sources]
    name = writer.fresh(f"{first.name}.joined")
    read = writer.value(sources[0], 0, sum(rows), f"{name}.rows")
    written = writer.value(first.outputs[0], 0, sum(rows), f"{name}.product")
    results = [ir.Value(type=node.outputs[0].type, shape=node.outputs[0].shape) for node in parts]
    told = [writer.integers(rows)] if len(set(rows)) > 1 else []  # even parts need no constant
    counted = {"num_outputs": len(parts)} if not told and (graph.opset_imports.get("") or 0) >= 18 else {}
    made = [
        ir.node("Concat", sources, {"axis": 0}, outputs=[read], name=writer.fresh(f"{name}/Concat")),
        ir.Node(
            first.domain, first.op_type, [read, *first.inputs[1:]], first.attributes.values(), outputs=[written],
            name=name, version=first.version,
        ),
        ir.node("Split", [written, *told], {"axis": 0, **counted}, outputs=results, name=writer.fresh(f"{name}/Split")),
    ]  # fmt: skip
    for node in made:
        node.metadata_props.update(first.metadata_props)
    graph.insert_before(first, made)
    for node, result in zip(parts, results, strict=True):
        old = node.outputs[0]
        result.name, old.name = old.name, None
        old.replace_all_uses_with(result, replace_graph_outputs=True)
    graph.remove(parts, safe=True)
    return JoinedProduct(name, tuple(str(node.name) for node in parts), tuple(rows))
