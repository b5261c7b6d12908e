"""What a shape rule is given, and what it answers; the registry of these rules.

A rule tells the shapes of a node's outputs from those of its inputs, once for every size that a model runs at. It is
called with the node, reads its attributes, and returns a function of shapes and contents:

    @shape_rule("Transpose")
    def _transpose(site):
        perm = site.integers("perm")
        return lambda shapes, _: [tuple(shapes[0][axis] for axis in perm or reversed(range(len(shapes[0]))))]

``shapes`` has one entry for each input of the node, ``contents`` the arrays of those inputs that decide sizes
(`memonger.ir.operators.Operator.sized_by`); None stands for an input that isn't there. A rule may raise what
indexing, conversion and division raise: the sizes then contradict each other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from memonger.ir.operators import F, operator_name, rule_of_operators
from memonger.shapes.ranges import Shape as Shape

Compute = Callable[[Sequence[Any], Sequence[Any]], Sequence[Shape | None]]

CONTRADICTIONS = (ValueError, TypeError, AttributeError, IndexError, KeyError, ArithmeticError, StopIteration)
"""What rules raise for shapes that don't go together, and for a `Dim` where they need a plain number."""


class NoRuleError(Exception):
    """A setting that the operator's rule leaves out; the message names it."""


@dataclass(frozen=True, slots=True)
class Site:
    """What a rule is told of a node. It holds nothing of the model, as what rules return outlives that.

    Attributes:
        op_type: The operator's type.
        attributes: By name; bodies are left out.
        opset: The version of the operator's set.
        inputs: Of each input whether it is there.
        kinds: Of each input its type, None where that isn't known.
        declared: The dimensions of each output as far as the model declares them.
    """

    op_type: str
    attributes: Mapping[str, ir.Attr]
    opset: int
    inputs: tuple[bool, ...]
    kinds: tuple[ir.DataType | None, ...]
    declared: tuple[tuple[int | None, ...], ...]

    @staticmethod
    def of(node: ir.Node, opset: int) -> "Site":
        """What is told of a node."""
        bodies = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
        declared = (tuple(value.shape or ()) for value in node.outputs)
        return Site(
            op_type=node.op_type,
            attributes={name: each for name, each in node.attributes.items() if each.type not in bodies},
            opset=opset,
            inputs=tuple(value is not None for value in node.inputs),
            kinds=tuple(None if value is None else value.dtype for value in node.inputs),
            declared=tuple(tuple(dim if isinstance(dim, int) else None for dim in dims) for dims in declared),
        )

    @property
    def outputs(self) -> int:
        """How many outputs the node has."""
        return len(self.declared)

    def integer(self, name: str, default: int) -> int:
        """An integer attribute."""
        attribute = self.attributes.get(name)
        return default if attribute is None else attribute.as_int()

    def integers(self, name: str) -> tuple[int, ...] | None:
        """An attribute that is a list of integers; None where there is none."""
        attribute = self.attributes.get(name)
        return None if attribute is None else tuple(attribute.as_ints())

    def integers_at(self, name: str, contents: Sequence[Any]) -> tuple[int, ...] | None:
        """A list of integers that is an attribute, or in later opsets the second input; None where there is none."""
        fixed = self.integers(name)
        if fixed is None and len(contents) > 1 and contents[1] is not None:
            fixed = tuple(contents[1].ravel().tolist())
        return fixed

    def floats(self, name: str) -> tuple[float, ...] | None:
        """An attribute that is a list of numbers; None where there is none."""
        attribute = self.attributes.get(name)
        return None if attribute is None else tuple(attribute.as_floats())

    def count(self, *names: str) -> int:
        """How long the first of these attributes is that is there, a list or a tensor; 0 where there is none."""
        attribute = next((self.attributes[name] for name in names if name in self.attributes), None)
        if attribute is None:
            return 0
        value = attribute.value
        return int(value.size) if isinstance(value, ir.TensorProtocol) else len(value)

    def text(self, name: str, default: str) -> str:
        """A text attribute."""
        attribute = self.attributes.get(name)
        return default if attribute is None else attribute.as_string()

    def has(self, index: int) -> bool:
        """Whether the input is there."""
        return index < len(self.inputs) and self.inputs[index]

    def fixed(self, output: int, axis: int) -> int:
        """A dimension of an output that is the same at every size, as the model declares it.

        Raises:
            NoRuleError: it doesn't.
        """
        dim = dict(enumerate(self.declared[output])).get(axis)
        if dim is None:
            raise NoRuleError(f"dimension {axis} of output {output}, which the model doesn't declare")
        return dim


_RULES: dict[str, Callable[[Site], Compute]] = {}


def shape_rule(*operators: str) -> Callable[[F], F]:
    """A decorator: the function is the shape rule of these operators, by `operators.operator_name`."""
    return rule_of_operators(_RULES, "a shape rule", operators)


def shape_rules(rules: Mapping[str, Compute]) -> None:
    """Rules that ask nothing of the node; names of several operators stand in one string."""
    for names, compute in rules.items():
        shape_rule(*names.split())(lambda _, compute=compute: compute)


def rule_of(node: ir.Node) -> Callable[[Site], Compute] | None:
    """The rule of a node's operator, if there is one."""
    return _RULES.get(operator_name(node))
