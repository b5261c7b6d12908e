"""Products of matrices: rows of the left operand, columns of the right one, or whole products of a batch."""

import math
from dataclasses import dataclass

from memonger.tiling.cutting import Cut, Slicing, axis_rule, axis_rules


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand as a stack of matrices.

    Attributes:
        index: Of the input.
        order: Its axes in the order ``batch..., rows, columns``; -1: a vector's second axis, which it hasn't.
    """

    index: int
    order: tuple[int, ...]

    def role(self, axis: int) -> int:
        """Where an axis of the input stands, from the back: -1 columns, -2 rows, smaller numbers the batch."""
        return self.order.index(axis) - len(self.order)

    def axis(self, role: int) -> int:
        """The axis of the input that stands there; -1: none."""
        return self.order[role] if -role <= len(self.order) else -1


def operand(cut: Cut, index: int) -> Operand:
    """An operand of a product: with ``transBatch`` its rows are axis 0, before the batch; ``trans`` then swaps them."""
    rank, name = len(cut.dims(index)), "AB"[index : index + 1]
    order = list(range(rank))
    if rank == 1:
        order = [-1, 0] if index == 0 else [0, -1]
    elif cut.integer(f"transBatch{name}", 0):
        order = [*range(1, rank - 1), 0, rank - 1]
    if cut.integer(f"trans{name}", 0) and rank > 1:
        order[-2:] = order[:-3:-1]
    return Operand(index, tuple(order))


def product(
    cut: Cut, a: Operand, b: Operand, *, of_rows: tuple[int, ...] = (), of_columns: tuple[int, ...] = ()
) -> Slicing:
    """How the product of two operands is cut: along the first one's axis, if that is cut, with the second one whole.

    Where both are a batch, both are cut.

    Args:
        cut: The node.
        a: The left operand.
        b: The right one.
        of_rows: Inputs that hold one number, or one for each of the result's rows; where these are cut it must be one.
        of_columns: Likewise of columns.
    """
    cut_one, other, summed = (a, b, -1) if a.index in cut.axes else (b, a, -2)
    if cut_one.index not in cut.axes:
        cut.refuse(f"has only settings that are cut, along axis {cut.axis}")
    axis = cut.axes[cut_one.index]
    role = cut_one.role(axis)
    if role == summed:
        cut.refuse(f"sums over axis {axis} of '{cut.name(cut_one.index)}'")
    for index in of_columns if role == -1 else of_rows:
        if cut.has(index) and math.prod(cut.dims(index)) != 1:
            cut.refuse(f"has numbers in '{cut.name(index)}' for each part of axis {axis}")
    inputs = {cut_one.index: axis}
    aligned = other.axis(role) if role < -2 else -1
    if aligned >= 0 and cut.dims(other.index)[aligned] == cut.dims(cut_one.index)[axis]:
        inputs[other.index] = aligned
    # The output's axis, where vectors are no matrices of one row or column
    order = [*range(-max(len(a.order), len(b.order)), -2), -2, -1]
    order = [each for each in order if not (each == -2 and a.axis(-2) < 0) and not (each == -1 and b.axis(-1) < 0)]
    result = order.index(role)
    return cut.along(inputs, {0: result}, whole=() if other.index in inputs else (other.index,))


@axis_rule("com.microsoft::MatMulNBits")
def _packed_weight(cut: Cut) -> Slicing:
    """Packed weights at the right: what is cut are rows, of all the left operand's axes but the last."""
    if cut.axis == len(cut.dims(0)) - 1:
        cut.refuse(f"sums over axis {cut.axis} of its first input")
    return cut.all_along(cut.axis, [0])


@axis_rule("Gemm com.microsoft::FusedGemm")
def _gemm(cut: Cut) -> Slicing:
    """As a product, with a third operand that is added: broadcast to rows and columns. Sums are added to by that."""
    a, b = operand(cut, 0), operand(cut, 1)
    contracted = {a.index: a.axis(-1), b.index: b.axis(-2)}
    if cut.sums and all(contracted.get(index) == axis for index, axis in cut.axes.items()):
        return cut.along(contracted, {}, sums=(0,))
    added = cut.axes.get(2)
    if added is not None and len(cut.axes) == 1:
        cut.refuse(f"adds a value that is cut along axis {added} to a product of whole operands")
    operands = Cut(cut.node, {index: axis for index, axis in cut.axes.items() if index != 2}, cut.size)
    answer = product(operands, a, b)
    result = answer.outputs[0]
    inputs = dict(answer.inputs)
    if cut.has(2):
        dims = cut.dims(2)
        place = result - 2 + len(dims)
        if place >= 0 and dims[place] == cut.out()[result]:
            inputs[2] = place
    return cut.along(inputs, answer.outputs, answer.whole)


@axis_rule("Einsum")
def _einsum(cut: Cut) -> Slicing:
    """The letter of the axis that is cut must be in the output; every input that has it is cut."""
    equation = cut.text("equation", "").replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if "." in equation or not arrow:
        cut.refuse(f"is written as '{equation}', and no rule reads that; it can't be cut along axis {cut.axis}")
    letters = {terms[index][axis] for index, axis in cut.axes.items()}
    if len(letters) > 1:
        cut.refuse(f"reads values that are cut along different axes: {sorted(letters)} of '{equation}'")
    letter = letters.pop()
    if right.count(letter) != 1 or any(term.count(letter) > 1 for term in terms):
        cut.refuse(f"sums over axis {cut.axis}, '{letter}' of '{equation}'")
    inputs = {index: term.index(letter) for index, term in enumerate(terms) if letter in term}
    return cut.along(inputs, {0: right.index(letter)})


axis_rules({
    "MatMul com.microsoft::FusedMatMul": lambda cut: product(cut, operand(cut, 0), operand(cut, 1)),
    "MatMulInteger": lambda cut: product(cut, operand(cut, 0), operand(cut, 1), of_rows=(2,), of_columns=(3,)),
    "com.microsoft::MatMulIntegerToFloat": lambda cut: product(
        cut, operand(cut, 0), operand(cut, 1), of_rows=(2, 4), of_columns=(3, 5, 6)
    ),
    "QLinearMatMul": lambda cut: product(
        cut, operand(cut, 0), operand(cut, 3), of_rows=(1, 2, 6, 7), of_columns=(4, 5, 6, 7)
    ),
})  # fmt: skip
