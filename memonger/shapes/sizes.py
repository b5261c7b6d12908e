"""The shape of every value of a lowered model at any sizes of its inputs, in microseconds a node.

Rules of `memonger.shapes.rules` give shapes, `memonger.shapes.contents` the few small contents that shapes are
computed from. Nothing here runs a kernel, and no weight is read but small constants that decide sizes.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from memonger.errors import PlanError
from memonger.ir.operators import facts, operator_name
from memonger.ir.values import SMALL, all_values, dense, static_shape, subgraphs
from memonger.shapes import contents
from memonger.shapes import rules as shape_rules
from memonger.shapes.shaping import CONTRADICTIONS, Compute, NoRuleError, Shape, Site, rule_of

logger = logging.getLogger(__name__)

assert shape_rules  # registered by being imported

_ABSENT = 0  # the number of an input that isn't there


class SizesError(Exception):
    """Shapes that don't go together at these sizes; the message names the node."""


@dataclass(frozen=True, slots=True)
class _NodeSizes:
    """A node: its rule, its values by number, what it needs of contents, and whether its own content is needed."""

    node: str
    compute: Compute
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    decisive: tuple[int, ...]  # for each input that decides sizes its number, else `_ABSENT`; empty: none does
    anyway: tuple[int, ...]  # outputs whose size those don't decide
    evaluate: contents.Evaluate | str | None  # "Shape" and "Size" of the first input
    inside: bool = False  # of a body, which may never run: shapes that don't go together there are unknown
    around: bool = False  # of a node with bodies, and given what is unknown as well


class Sizes:
    """The shapes of a model's values as a function of its inputs' shapes.

    Args:
        model: Every node and value named.
        contents_alone: Leave out the nodes whose content decides no size: for `as_far_as_known`, with all shapes given.

    Attributes:
        names: Of the values that nodes write, in file order.
        computed: Names of those whose content is computed as well, as sizes depend on it.
        open_nodes: Nodes whose sizes no rule tells, by name, with their operator: a run tells them.

    Raises:
        PlanError: a node's attributes are malformed; it names the node.
    """

    def __init__(self, model: ir.Model, *, contents_alone: bool = False) -> None:
        graph, numbers = model.graph, _numbers(model)
        graphs = _graphs(graph)
        self._shapes: list[Shape | None] = [None] * (len(numbers) + 1)
        self._contents: dict[int, np.ndarray] = {numbers[v]: array for v, array in constants(model).items()}
        for value in (value for each in graphs for value in each.initializers.values()):
            tensor = value.const_value
            self._shapes[numbers[value]] = static_shape(value) if tensor is None else tuple(tensor.shape.numpy())
        for value in (value for each in graphs[1:] for value in each.initializers.values()):
            if value.const_value is not None and value.const_value.size <= SMALL:
                self._contents[numbers[value]] = value.const_value.numpy()
        written = [value for node in graph for value in node.outputs if value.name]
        self.names = tuple(str(value.name) for value in written)
        self._written = tuple(numbers[value] for value in written)
        self._numbers = {str(value.name): numbers[value] for value in all_values(graph)}
        # The values whose content decides sizes, and all that it is computed from
        pending = [
            given
            for node in model.graph.all_nodes()
            for place in facts(node).sized_by
            if place < len(node.inputs) and (given := node.inputs[place]) is not None
        ]
        wanted: set[ir.Value] = set()
        while pending:
            source = pending.pop()
            if source in wanted:
                continue
            wanted.add(source)
            writer = source.producer()
            if writer is not None and not facts(writer).shape_only:
                pending.extend(each for each in writer.inputs if each is not None)
        nodes = (node for node in graph if not contents_alone or not wanted.isdisjoint(node.outputs))
        steps = {node: _steps(node, model.opset_imports, numbers, wanted) for node in nodes}
        self._steps = tuple(step for found in steps.values() for step in found or ())
        self.open_nodes = {str(node.name): operator_name(node) for node, found in steps.items() if found is None}
        by_content = {value for step in self._steps if step.evaluate is not None for value in step.writes}
        self.computed = frozenset(n for n, v in zip(self.names, self._written, strict=True) if v in by_content)

    def at(self, inputs: Mapping[str, Shape]) -> tuple[Shape | None, ...]:
        """The shape of each of `names`; None where what the inputs hold decides it, or it is no tensor.

        Args:
            inputs: Shapes of the model's inputs, by name; those left out have their default.

        Raises:
            SizesError: the shapes don't go together.
        """
        shapes, known = list(self._shapes), dict(self._contents)
        for name, shape in inputs.items():
            shapes[self._numbers[name]] = shape
        step = None
        try:
            with np.errstate(all="ignore"):
                for step in self._steps:
                    if step.inside:
                        with suppress(*CONTRADICTIONS):
                            _compute(step, shapes, known)
                    else:
                        _compute(step, shapes, known)
        except CONTRADICTIONS as error:
            raise SizesError(f"node {step.node if step else ''}: {error}") from error
        return tuple([shapes[number] for number in self._written])

    def as_far_as_known(self, values: Mapping[str, Shape]) -> tuple[dict[str, Shape], dict[str, np.ndarray]]:
        """The shapes of values that nodes write, and the contents that decide sizes, both by name, as rules tell them.

        Args:
            values: Shapes of values, by name: where no rule tells one, or shapes contradict each other, they count.
        """
        shapes, known = list(self._shapes), dict(self._contents)
        for name, shape in values.items():
            shapes[self._numbers[name]] = shape
        with np.errstate(all="ignore"):
            for step in self._steps:
                with suppress(*CONTRADICTIONS):
                    _compute(step, shapes, known)
        written = list(zip(self.names, self._written, strict=True))
        found = {name: one for name, number in written if (one := shapes[number]) is not None}
        return found, {name: known[number] for name, number in written if number in known}


def give_shapes(model: ir.Model, inputs: Mapping[str, Shape]) -> bool:
    """Give all values of a model their shapes, those of bodies too, in place; False where one isn't known.

    Args:
        model: Every node and value named.
        inputs: The shape of each input, by name.
    """
    sizes, numbers = Sizes(model), _numbers(model)
    shapes, known = list(sizes._shapes), dict(sizes._contents)
    for value in model.graph.inputs:
        if str(value.name) in inputs:
            shapes[numbers[value]] = inputs[str(value.name)]
    batch = next((shape[0] for shape in inputs.values() if shape), 1)
    for value in _told(model.graph):
        first, *dims = (dim if isinstance(dim, int) else None for dim in value.shape or ())
        if None not in dims:
            shapes[numbers[value]] = (batch if first is None else first, *dims)  # type: ignore[arg-type]
    with np.errstate(all="ignore"):
        for step in sizes._steps:
            with suppress(*CONTRADICTIONS):
                _compute(step, shapes, known)
    for value, number in numbers.items():
        shape = shapes[number]
        if shape is not None:
            value.shape = ir.Shape(shape)
    made = [value for value in numbers if value.name and value.producer() is not None]
    return all(value.type is not None and (not dense(value) or static_shape(value) is not None) for value in made)


def _told(graph: ir.Graph) -> list[ir.Value]:
    """What has the shape that the file says where no rule tells it: what bodies are given, what a Loop leaves, and
    sequences joined."""
    main, *bodies = _graphs(graph)
    made = (v for n in main.all_nodes() if n.op_type in ("ConcatFromSequence", "Loop") for v in n.outputs)
    return [value for value in (*(v for body in bodies for v in body.inputs), *made) if value.shape]


def _graphs(graph: ir.Graph) -> tuple[ir.Graph, ...]:
    return (graph, *(body for node in graph.all_nodes() for body in subgraphs(node)))


def _numbers(model: ir.Model) -> dict[ir.Value, int]:
    """The number of each value, from 1 on."""
    numbers: dict[ir.Value, int] = {}
    for value in (value for each in _graphs(model.graph) for value in all_values(each)):
        numbers.setdefault(value, len(numbers) + 1)
    return numbers


def _compute(step: _NodeSizes, shapes: list[Any], known: dict[int, np.ndarray]) -> None:
    """Write what a node's rule tells: of all its outputs, or where shapes contradict each other of none."""
    given = [shapes[number] for number in step.reads]
    if None in given and not step.around and _is_lacking(step.reads, given):
        return
    deciding: Sequence[Any] = ()
    if step.decisive:
        deciding = [known.get(number) for number in step.decisive]
        if _is_lacking(step.decisive, deciding):
            if step.anyway:
                found = step.compute(given, deciding)
                for output in step.anyway:
                    shapes[step.writes[output]] = found[output]
            return
    found = step.compute(given, deciding)
    for shape in found:
        if shape is not None and any(dim < 0 for dim in shape):
            raise ValueError(f"a dimension is below 0: {list(shape)}")
    content = None if step.evaluate is None else _content(step, step.evaluate, given, found, known)
    for number, shape in zip(step.writes, found, strict=True):
        if shape is not None:
            shapes[number] = shape
    if content is not None:
        known.update(zip(step.writes, content, strict=True))


def _is_lacking(numbers: Sequence[int], facts_of_them: Sequence[Any]) -> bool:
    """Whether of a value that is there nothing is known."""
    return any(fact is None and number != _ABSENT for number, fact in zip(numbers, facts_of_them, strict=True))


def _content(
    step: _NodeSizes, how: contents.Evaluate | str, given: Sequence[Any], shapes: Sequence[Any],
    known: Mapping[int, np.ndarray],
) -> Sequence[np.ndarray] | None:  # fmt: skip
    """The contents of a node's outputs of those shapes; None where they aren't small, or what they need isn't known."""
    if sum(map(math.prod, shapes)) > SMALL:
        return None
    if isinstance(how, str):
        start, _, end = how.partition(":")
        whole = given[0][int(start) : int(end)] if end else (math.prod(given[0]),)
        return (contents.integers(whole if end else whole[0]),)
    arrays = [known.get(number) for number in step.reads]
    if _is_lacking(step.reads, arrays):
        return None
    found = how(arrays)
    for content, shape in zip(found, shapes, strict=True):
        if content.shape != shape:
            raise ValueError(f"its content has shape {list(content.shape)}, by its rule it has {list(shape)}")
    return found


def constants(model: ir.Model) -> dict[ir.Value, np.ndarray]:
    """Small initializers that no caller may override, with their data."""
    return {
        value: value.const_value.numpy()
        for value in model.graph.initializers.values()
        if value.const_value is not None and value.const_value.size <= SMALL and not value.is_graph_input()
    }


def _steps(
    node: ir.Node, opsets: Mapping[str, int], numbers: Mapping[ir.Value, int], wanted: set[ir.Value]
) -> list[_NodeSizes] | None:
    """What computes a node's shapes, those of its bodies before them; None where only a run can tell them."""
    bodies, opset = subgraphs(node), node.version if node.version is not None else opsets.get(node.domain, 1)
    if not bodies:
        step = _step(node, opsets, numbers, wanted)
        return None if step is None else [step]
    how = _BODIES.get(operator_name(node))
    kinds = [value for value in (*node.inputs, *node.outputs) if value is not None and value.type is not None]
    if how is None or opset < 9 or not all(_is_tensor(v) or isinstance(v.type, ir.SequenceType) for v in kinds):
        return None
    begins, ends = how(node)

    def around(reads: Sequence[ir.Value | None], writes: Sequence[ir.Value], compute: Compute) -> _NodeSizes:
        return _NodeSizes(
            node=f"'{node.name}' ({operator_name(node)})",
            compute=compute,
            reads=tuple(_ABSENT if value is None else numbers[value] for value in reads),
            writes=tuple(numbers[value] for value in writes),
            decisive=(), anyway=(), evaluate=None, inside=True, around=True,
        )  # fmt: skip

    found = [] if begins is None else [around(node.inputs, bodies[0].inputs, begins)]
    for inner in (inner for body in bodies for inner in body):
        found += [dataclasses.replace(step, inside=True) for step in _steps(inner, opsets, numbers, wanted) or ()]
    read = (*node.inputs, *(value for body in bodies for value in body.outputs))
    return [*found, around(read, node.outputs, ends)]


_Around = tuple[Compute | None, Compute]
"""What gives a body's inputs their shapes; and, of a node's inputs and its bodies' outputs, the node's outputs."""


def _branches(node: ir.Node) -> _Around:
    """An output of If has a shape where both branches give it the same."""
    count = len(node.outputs)
    return None, lambda shapes, _: [
        one if one == other else None for one, other in zip(shapes[-2 * count : -count], shapes[-count:], strict=True)
    ]


def _turns(node: ir.Node) -> _Around:
    """What Loop carries has its shape where the body doesn't change it, and what begins empty may grow; how often that
    runs isn't known."""
    given = len(node.inputs)
    carried = given - 2

    def end(shapes: Sequence[Any], _: Sequence[Any]) -> Sequence[Shape | None]:
        after = shapes[given + 1 :]
        kept = [was if was == now else None for was, now in zip(shapes[2 : 2 + carried], after, strict=False)]
        return [*kept, *[None] * (len(after) - carried)]

    def begin(shapes: Sequence[Any], _: Sequence[Any]) -> Sequence[Shape | None]:
        return ((), (), *(None if shape is None or 0 in shape else shape for shape in shapes[2:]))

    return begin, end


def _scanned(node: ir.Node) -> _Around:
    """Scan's body gets an element of each sequence, and the node joins what it writes for each."""
    sequences = node.attributes.get_int("num_scan_inputs", 0)
    given = len(node.inputs)
    states = given - sequences
    joined = len(node.outputs) - states
    at, to = (
        list(node.attributes.get_ints(name) or [0] * count)
        for name, count in (("scan_input_axes", sequences), ("scan_output_axes", joined))
    )

    def begin(shapes: Sequence[Any], _: Sequence[Any]) -> Sequence[Shape]:
        parts = [
            (*shape[: axis % len(shape)], *shape[axis % len(shape) + 1 :])
            for shape, axis in zip(shapes[states:], at, strict=True)
        ]
        return [*shapes[:states], *parts]

    def end(shapes: Sequence[Any], _: Sequence[Any]) -> Sequence[Shape | None]:
        length, after = shapes[states][at[0]], shapes[given:]
        kept = [was if was == now else None for was, now in zip(shapes[:states], after, strict=False)]
        places = [axis % (len(shape) + 1) for shape, axis in zip(after[states:], to, strict=True)]
        lists = [(*s[:place], length, *s[place:]) for s, place in zip(after[states:], places, strict=True)]
        return [*kept, *lists]

    return begin, end


_BODIES: Mapping[str, Callable[[ir.Node], _Around]] = {"If": _branches, "Loop": _turns, "Scan": _scanned}


def _step(
    node: ir.Node, opsets: Mapping[str, int], numbers: Mapping[ir.Value, int], wanted: set[ir.Value]
) -> _NodeSizes | None:
    """What computes the shapes of a node without bodies; None where a run tells them, or no rule knows the operator."""
    if operator_name(node) == "SequenceLength":  # a number, whatever the sequence is
        given = node.inputs[0].producer() if node.inputs[0] is not None else None
        is_empty = given is not None and given.op_type == "SequenceEmpty"
        length = tuple(numbers[value] for value in node.outputs)
        return _NodeSizes(
            node=f"'{node.name}' (SequenceLength)", compute=lambda shapes, _: ((),), reads=(), writes=length,
            decisive=(), anyway=(), evaluate=(lambda _: (contents.integers(0),)) if is_empty else None,
        )  # fmt: skip
    if facts(node).sized_at_run_time:
        return None
    if any(v is not None and v.type is not None and not _is_tensor(v) for v in (*node.inputs, *node.outputs)):
        return None
    rule = rule_of(node)
    if rule is None:
        return None
    opset = node.version if node.version is not None else opsets.get(node.domain, 1)
    try:
        site = Site.of(node, opset)
        compute = rule(site)
    except NoRuleError as error:
        logger.debug("node %s: no rule for %s", node.name, error)
        return None
    except CONTRADICTIONS as error:
        where = f"node '{node.name}' ({operator_name(node)})"
        raise PlanError(f"{where} has malformed attributes: {error}.") from error
    reads = tuple(_ABSENT if value is None else numbers[value] for value in node.inputs)
    places = facts(node).sized_by
    decisive = tuple(number if place in places else _ABSENT for place, number in enumerate(reads))
    return _NodeSizes(
        node=f"'{node.name}' ({operator_name(node)})",
        compute=compute,
        reads=reads,
        writes=tuple(numbers[value] for value in node.outputs),
        decisive=decisive if any(decisive) else (),
        anyway=facts(node).sized_anyway,
        evaluate=_how(node, site) if not wanted.isdisjoint(node.outputs) else None,
    )


def _is_tensor(value: ir.Value) -> bool:
    return dense(value) or (isinstance(value.type, ir.TensorType) and value.dtype == ir.DataType.STRING)


def _how(node: ir.Node, site: Site) -> contents.Evaluate | str | None:
    if node.domain != "":
        return None
    if node.op_type == "Shape":
        return f"{site.integer('start', 0)}:{site.integer('end', 1 << 30)}"
    return "size" if node.op_type == "Size" else contents.evaluator(site)
