"""The shape of every value of a lowered model at any sizes of its inputs, in microseconds a node.

Rules of `memonger.model.shape_rules` give shapes, `memonger.model.contents` the few small contents that shapes are
computed from. Nothing here runs a kernel, and no weight is read but small constants that decide sizes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from memonger.errors import PlanError
from memonger.model import contents, shape_rules
from memonger.model.operators import facts, operator_name
from memonger.model.shape_folding import constants
from memonger.model.shaping import CONTRADICTIONS, Compute, NoRuleError, Shape, Site, rule_of
from memonger.model.values import SMALL, dense, static_shape, subgraphs

assert shape_rules  # registered by being imported

_ABSENT = 0  # the number of an input that isn't there


class SizesError(Exception):
    """Shapes that don't go together at these sizes; the message names the node."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A node: its rule, its values by number, what it needs of contents, and whether its own content is needed."""

    node: str
    compute: Compute
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    decisive: tuple[int, ...]  # for each input that decides sizes its number, else `_ABSENT`; empty: none does
    evaluate: contents.Evaluate | str | None  # "Shape" and "Size" of the first input


class Sizes:
    """The shapes of a model's values as a function of its inputs' shapes.

    Args:
        model: Every node and value named.
        lenient: Leave out what has no rule, in place of an error: its outputs, and what stands behind them.

    Attributes:
        names: Of the values that nodes write, in file order.
        computed: Names of those whose content is computed as well, as sizes depend on it.

    Raises:
        PlanError: an operator has no shape rule; it names the node.
    """

    def __init__(self, model: ir.Model, *, lenient: bool = False) -> None:
        graph = model.graph
        numbers: dict[ir.Value, int] = {}
        for value in (*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs)):
            numbers.setdefault(value, len(numbers) + 1)
        self._inputs = {str(value.name): numbers[value] for value in graph.inputs}
        self._shapes: list[Shape | None] = [None] * (len(numbers) + 1)
        self._contents: dict[int, np.ndarray] = {numbers[v]: array for v, array in constants(model).items()}
        for value in graph.initializers.values():
            self._shapes[numbers[value]] = _shape_of(value)
        written = [value for node in graph for value in node.outputs if value.name]
        self.names = tuple(str(value.name) for value in written)
        self._written = tuple(numbers[value] for value in written)
        wanted = _wanted(model)
        steps = (_step(node, model.opset_imports, numbers, wanted, lenient) for node in graph)
        self._steps = tuple(step for step in steps if step is not None)
        by_content = {step.writes[0] for step in self._steps if step.evaluate is not None}
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
            shapes[self._inputs[name]] = shape
        step = None
        try:
            with np.errstate(all="ignore"):
                for step in self._steps:
                    _take(step, [shapes[number] for number in step.reads], shapes, known)
        except CONTRADICTIONS as error:
            raise SizesError(f"node {step.node if step else ''}: {error}") from error
        return tuple([shapes[number] for number in self._written])


def _take(step: _Step, given: list[Any], shapes: list[Any], known: dict[int, np.ndarray]) -> None:
    if None in given and _is_lacking(step.reads, given):
        return
    deciding: Sequence[Any] = ()
    if step.decisive:
        deciding = [known.get(number) for number in step.decisive]
        if _is_lacking(step.decisive, deciding):
            return
    for number, shape in zip(step.writes, step.compute(given, deciding), strict=True):
        if any(dim < 0 for dim in shape):
            raise ValueError(f"a dimension is below 0: {list(shape)}")
        shapes[number] = shape
    if step.evaluate is not None:
        _evaluate(step, step.evaluate, given, shapes, known)


def _is_lacking(numbers: Sequence[int], facts_of_them: Sequence[Any]) -> bool:
    """Whether of a value that is there nothing is known."""
    return any(fact is None and number != _ABSENT for number, fact in zip(numbers, facts_of_them, strict=True))


def _evaluate(
    step: _Step, how: contents.Evaluate | str, given: Sequence[Any], shapes: list[Any], known: dict[int, np.ndarray]
) -> None:
    target = step.writes[0]
    if math.prod(shapes[target]) > SMALL:
        return
    if isinstance(how, str):
        start, _, end = how.partition(":")
        whole = given[0][int(start) : int(end)] if end else (math.prod(given[0]),)
        known[target] = contents.integers(whole if end else whole[0])
        return
    arrays = [known.get(number) for number in step.reads]
    if _is_lacking(step.reads, arrays):
        return
    known[target] = result = how(arrays)
    if result.shape != shapes[target]:
        raise ValueError(f"its content has shape {list(result.shape)}, by its rule it has {list(shapes[target])}")


def _shape_of(value: ir.Value) -> Shape | None:
    tensor = value.const_value
    return static_shape(value) if tensor is None else tuple(tensor.shape.numpy())


def _step(
    node: ir.Node, opsets: Mapping[str, int], numbers: Mapping[ir.Value, int], wanted: set[ir.Value], lenient: bool
) -> _Step | None:
    """What computes a node's shapes; None where only a run can tell them."""
    if facts(node).sized_at_run_time or subgraphs(node):
        return None
    if any(v is not None and v.type is not None and not _is_tensor(v) for v in (*node.inputs, *node.outputs)):
        return None
    where, rule = f"node '{node.name}' ({operator_name(node)})", rule_of(node)
    instead = "Plan it for single shapes, or at a lower level."
    if rule is None:
        if lenient:
            return None
        raise PlanError(f"{where}: the sizes that this operator gives at other shapes aren't known. {instead}")
    opset = node.version if node.version is not None else opsets.get(node.domain, 1)
    try:
        site = Site.of(node, opset)
        compute = rule(site)
    except NoRuleError as error:
        if lenient:
            return None
        raise PlanError(f"{where}: sizes at other shapes aren't known for {error}. {instead}") from error
    except CONTRADICTIONS as error:
        raise PlanError(f"{where} has malformed attributes: {error}.") from error
    reads = tuple(_ABSENT if value is None else numbers[value] for value in node.inputs)
    places = facts(node).sized_by
    decisive = tuple(number if place in places else _ABSENT for place, number in enumerate(reads))
    return _Step(
        node=f"'{node.name}' ({operator_name(node)})",
        compute=compute,
        reads=reads,
        writes=tuple(numbers[value] for value in node.outputs),
        decisive=decisive if any(decisive) else (),
        evaluate=_how(node, site) if node.outputs and node.outputs[0] in wanted else None,
    )


def _is_tensor(value: ir.Value) -> bool:
    return dense(value) or (isinstance(value.type, ir.TensorType) and value.dtype == ir.DataType.STRING)


def _how(node: ir.Node, site: Site) -> contents.Evaluate | str | None:
    if node.domain != "":
        return None
    if node.op_type == "Shape":
        return f"{site.integer('start', 0)}:{site.integer('end', 1 << 30)}"
    return "size" if node.op_type == "Size" else contents.evaluator(site)


def _wanted(model: ir.Model) -> set[ir.Value]:
    """The values whose content decides sizes, and all that it is computed from."""
    pending = [
        value
        for node in model.graph
        for place in facts(node).sized_by
        if place < len(node.inputs) and (value := node.inputs[place]) is not None
    ]
    sources: set[ir.Value] = set()
    while pending:
        value = pending.pop()
        if value in sources:
            continue
        sources.add(value)
        node = value.producer()
        if node is not None and not facts(node).shape_only:
            pending.extend(each for each in node.inputs if each is not None)
    return sources
