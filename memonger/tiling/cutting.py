"""What an axis rule is given, and what it answers; the registry of these rules.

A node is *cut* where it runs on slices of its inputs and gives slices of its outputs, which joined are what it gives
for the whole inputs. A rule says along which axes:

    @axis_rule("Transpose")
    def _transpose(cut):
        perm = cut.integers("perm", reversed(range(len(cut.dims(0)))))
        return cut.along({0: cut.axes[0]}, {0: perm.index(cut.axes[0])})

Axes are counted from 0. All values of one cut have a multiple of ``size`` elements along their axis: the k-th part of
one is made from the k-th parts of the others. Where copies may read other rows than they give (`Cut.halo`), a rule
says which rows of its inputs some rows of its outputs need.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import onnx_ir as ir

from memonger.ir.operators import F, operator_name, rule_of_operators
from memonger.ir.values import static_shape

Interval = tuple[int, int]
"""Parts, or rows, ``[begin, end)``."""


@dataclass(frozen=True, slots=True)
class SliceCopy:
    """What a copy of a node reads and writes that gives a slice of its outputs. Inputs count from 0.

    Attributes:
        rows: What it gives: from the first that was asked for to the last, or further.
        made: What it writes: these, and around them some that are wrong.
        inputs: What it reads of each input that is cut.
        axes: Constants that are cut as the outputs are: input → axis.
        attributes: What it has in place of the node's own; None: nothing.
        constants: Integers that it reads in place of an input.
        without: Inputs of which it needs nothing, of a node that joins them.
    """

    rows: Interval
    made: Interval
    inputs: Mapping[int, Interval]
    axes: Mapping[int, int] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[int, Sequence[int]] = field(default_factory=dict)
    without: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Slicing:
    """How a node is cut. Inputs and outputs are counted from 0.

    Attributes:
        outputs: Output → the axis it is cut along.
        inputs: Input → the axis it is cut along, of all inputs that must be cut: of values that nobody cut so far too.
        whole: Inputs that have an axis, and must be whole nevertheless.
        sums: Outputs that aren't cut: each slice adds to them, to what the slices before it gave.
        height: How many rows its outputs have, where they are cut by rows.
        by_rows: From the rows ``[begin, end)`` that are asked for to the copy that gives them; None: it reads of each
            input that is cut the part that it gives.
    """

    outputs: Mapping[int, int]
    inputs: Mapping[int, int]
    whole: frozenset[int] = frozenset()
    sums: frozenset[int] = frozenset()
    height: int = 0
    by_rows: Callable[[int, int], SliceCopy] | None = None

    def copy(self, begin: int, end: int) -> SliceCopy:
        """The copy that gives the parts, or rows, ``[begin, end)``, or more."""
        if self.by_rows is not None:
            return self.by_rows(begin, end)
        return SliceCopy((begin, end), (begin, end), dict.fromkeys(self.inputs, (begin, end)))


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a node can't be cut: a sentence that names node, operator and axis."""

    reason: str

    def __str__(self) -> str:
        return self.reason


class NotCutError(Exception):
    """Raised by rules, and caught where they are called: the rest of a sentence whose subject is the node."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A node, and how its inputs are cut.

    Attributes:
        axes: Input → the axis along which it is cut, of those that are.
        size: Parts of the finest cut.
        sums: Whether an output may be summed up slice by slice.
        halo: Whether slices are rows, of which a copy may read others than it gives, and more; else each slice reads
            the part that it gives.
    """

    node: ir.Node
    axes: Mapping[int, int]
    size: int
    sums: bool = False
    halo: bool = False

    @property
    def operator(self) -> str:
        """The operator's name in the registry."""
        return operator_name(self.node)

    def has(self, index: int) -> bool:
        """Whether the input exists."""
        return index < len(self.node.inputs) and self.node.inputs[index] is not None

    def dims(self, index: int) -> tuple[int, ...]:
        """The shape of an input."""
        return self._shape(self.node.inputs[index])

    def out(self, index: int = 0) -> tuple[int, ...]:
        """The shape of an output."""
        return self._shape(self.node.outputs[index])

    def _shape(self, value: ir.Value | None) -> tuple[int, ...]:
        dims = None if value is None else static_shape(value)
        if dims is None:
            self.refuse(f"has a value ('{'' if value is None else value.name}') whose shape only the run can tell")
        return dims

    @property
    def inputs(self) -> list[int]:
        """The inputs that exist."""
        return [index for index, value in enumerate(self.node.inputs) if value is not None]

    @property
    def outputs(self) -> list[int]:
        """The outputs that exist."""
        return [index for index, value in enumerate(self.node.outputs) if value.name]

    @property
    def axis(self) -> int:
        """The axis of the first input that is cut."""
        return self.axes[min(self.axes)]

    @property
    def opset(self) -> int:
        """The version of the node's operator set; the newest where nobody says."""
        if self.node.version is not None:
            return self.node.version
        graph = self.node.graph
        return (graph.opset_imports.get(self.node.domain) if graph is not None else None) or 1000

    def integer(self, name: str, default: int) -> int:
        """An attribute."""
        return self.node.attributes.get_int(name, default)

    def integers(self, name: str, default: Iterable[int] | None = None) -> list[int] | None:
        """An attribute."""
        found = self.node.attributes.get_ints(name, default)
        return None if found is None else list(found)

    def text(self, name: str, default: str) -> str:
        """An attribute."""
        return self.node.attributes.get_string(name, default)

    def positive(self, axis: int, index: int = 0) -> int:
        """An axis of an input, counted from the front."""
        return axis + len(self.dims(index)) if axis < 0 else axis

    def constant(self, index: int) -> np.ndarray:
        """What an input holds; a refusal where only the run can tell."""
        value = self.node.inputs[index]
        assert value is not None
        if value.const_value is None or value.is_graph_input():
            self.refuse(f"takes '{value.name}', which decides what it does along each axis and is no constant")
        return value.const_value.numpy()

    def setting(self, name: str, index: int, since: int) -> list[int] | None:
        """What was an attribute before operator set ``since`` and is an input from there on; None where it isn't."""
        if self.opset < since:
            return self.integers(name)
        return [int(each) for each in self.constant(index).reshape(-1)] if self.has(index) else None

    def refuse(self, why: str) -> NoReturn:
        """Refuse to cut the node: the rest of a sentence whose subject is the node."""
        raise NotCutError(why)

    def along(
        self, inputs: Mapping[int, int], outputs: Mapping[int, int], whole: Collection[int] = (),
        sums: Collection[int] = (),
    ) -> Slicing:  # fmt: skip
        """The answer of a rule.

        Args:
            inputs: Input → axis, of all that must be cut.
            outputs: Output → axis; those that don't exist are left out.
            whole: Inputs that may have an axis and must be whole.
            sums: Outputs that each slice adds to.
        """
        for index, axis in self.axes.items():
            if index not in whole and inputs.get(index) != axis:
                self.refuse(f"can't be cut where its input '{self.name(index)}' is cut along axis {axis}")
        present = {index: axis for index, axis in outputs.items() if index in self.outputs}
        if len(present) + len(sums) < len(self.outputs):
            self.refuse(f"has an output that nobody knows how to cut; its input is cut along axis {self.axis}")
        for index, axis in inputs.items():
            self._check(self.dims(index), axis)
        for index, axis in present.items():
            self._check(self.out(index), axis)
        return Slicing(present, dict(inputs), frozenset(whole).intersection(self.axes), frozenset(sums))

    def all_along(self, axis: int, inputs: Iterable[int], outputs: Iterable[int] | None = None) -> Slicing:
        """These inputs that exist, and these outputs or all, are cut along one axis."""
        chosen = self.outputs if outputs is None else outputs
        return self.along({index: axis for index in inputs if self.has(index)}, dict.fromkeys(chosen, axis))

    def in_rows(self, rows: Callable[[int, int], SliceCopy], axis: int, whole: Collection[int] = ()) -> Slicing:
        """The answer of a rule whose copies read other rows than they give.

        Args:
            rows: From the rows ``[begin, end)`` of the outputs that are asked for to the copy that gives them.
            axis: Of these rows in all outputs.
            whole: Inputs that are read whole.
        """
        images = {index: own for index, own in self.axes.items() if index not in whole}
        outputs = dict.fromkeys(self.outputs, axis)
        return Slicing(outputs, images, frozenset(whole), height=self.out()[axis], by_rows=rows)

    def _check(self, dims: tuple[int, ...], axis: int) -> None:
        if not 0 <= axis < len(dims) or dims[axis] % self.size:
            self.refuse(f"can't be cut along axis {axis} of {list(dims)} into {self.size} equal parts")

    def name(self, index: int) -> str:
        """The name of an input."""
        value = self.node.inputs[index]
        return "" if value is None else str(value.name)


Rule = Callable[[Cut], Slicing]

RULES: dict[str, Rule] = {}
"""The rule of each operator, by `memonger.ir.operators.operator_name`."""


def axis_rule(*names: str) -> Callable[[F], F]:
    """Register a rule for operators; names may stand together in one string. A second rule for one operator raises."""
    return rule_of_operators(RULES, "an axis rule", " ".join(names).split())


def axis_rules(rules: Mapping[str, Rule]) -> None:
    """Register rules that one expression says."""
    for names, rule in rules.items():
        axis_rule(names)(rule)


def sentence(node: ir.Node, why: str) -> Refusal:
    """A refusal: what the rest of a sentence says of a node."""
    return Refusal(f"node '{node.name}' ({operator_name(node)}) {why}")
