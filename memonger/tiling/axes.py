"""Along which axes a model can be cut into slices: through each node, from seeds through the graph, by rows of images.

Axis 2 of an image ``[batch, channels, height, width]`` is its rows, of a volume its depth, of a sequence that a
convolution reads its time. Behind a transpose or a reshape of such an image they may be another axis. What an
operator's rule doesn't cut along that axis is a barrier: it needs images whole.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import onnx_ir as ir

from memonger.errors import PlanError
from memonger.ir.extract import is_fed
from memonger.ir.marks import STRIP, WINDOW
from memonger.ir.operators import facts, operator_name
from memonger.ir.values import all_values, static_shape, subgraphs
from memonger.plan_file import ROWS
from memonger.shapes import open_dims
from memonger.shapes.ranges import DimRange, points, shapes_at
from memonger.shapes.shaping import Shape
from memonger.shapes.sizes import Sizes
from memonger.tiling import rules as rules  # registers them
from memonger.tiling.cutting import RULES, Cut, NotCutError, Refusal, SliceCopy, Slicing, sentence
from memonger.tiling.slice_check import EXACT

_NONE: Mapping[str, str] = MappingProxyType({})

NEVER_EMPTY = frozenset({"Attention", "GRU", "GroupNormalization", "LSTM", "RNN"})
"""Those whose kernels refuse inputs without elements, or end the process (1.32.0). Slices of others may be empty."""


@dataclass(frozen=True, slots=True)
class Axes:
    """How the nodes of a model can be cut, if some of its values are.

    Attributes:
        size: Parts of the finest cut: each value has a multiple of so many elements along its axis.
        nodes: For each node, in the model's order, how it is cut or why it can't be; None: nothing that it reads is.
        values: The axis of each value that is cut, by name.
    """

    size: int
    nodes: tuple[Slicing | Refusal | None, ...]
    values: Mapping[str, int]


def slicing(
    node: ir.Node, axes: Mapping[int, int], size: int | None = None, *, sums: bool = False, halo: bool = False
) -> Slicing | Refusal:
    """How a node is cut whose inputs are cut along these axes.

    Args:
        node: With static shapes.
        axes: Input → axis, counted from 0, of those inputs that have one; at least one.
        size: Parts of the finest cut; None: as many as all the inputs allow.
        sums: Whether outputs may be summed up slice by slice.
        halo: Whether copies may read other rows than they give.
    """
    try:
        lengths = [Cut(node, axes, 1).dims(index)[axis] for index, axis in axes.items()]
        cut = Cut(node, axes, size or math.gcd(*lengths), sums, halo)
        fact = facts(node)
        is_dropout = node.op_type == "Dropout"  # which draws in training form, and may be that
        may_draw = not is_dropout or (cut.opset >= 12 and cut.has(2) and bool(cut.constant(2).any()))
        if subgraphs(node):
            cut.refuse(f"runs a subgraph, which isn't cut: along axis {cut.axis} of its input")
        if fact.random and may_draw:
            cut.refuse(f"draws random numbers, others for slices of axis {cut.axis}")
        if fact.sized_at_run_time:
            cut.refuse(f"has outputs whose size only the run can tell; its input is cut along axis {cut.axis}")
        if fact.shape_only:
            cut.refuse(f"gives the size of its input, which is cut along axis {cut.axis}")
        rule = RULES.get(cut.operator)
        if rule is None:
            cut.refuse(f"has no rule for running on slices, and depends on axis {cut.axis} of its input")
        return rule(cut)
    except NotCutError as error:
        return sentence(node, str(error))


def axes_of(model: ir.Model, seeds: Mapping[str, int], refused: Mapping[str, str] = _NONE) -> Axes:
    """How a model's nodes can be cut, if some of its values are. Nothing is inferred: values need static shapes.

    Args:
        model: A lowered model.
        seeds: Axis, counted from 0, of values by name: of inputs, or of what nodes write.
        refused: Nodes by name that aren't to be cut, and why. What reads them may be.

    Raises:
        PlanError: no such value, or no such axis of it.
    """
    if not seeds:
        raise PlanError("no value is given along whose axis the model is to be cut.")
    dims_of = {str(v.name): static_shape(v) for v in all_values(model.graph) if v.name in seeds}
    lengths = []
    for name, axis in seeds.items():
        dims = dims_of.get(name)
        if dims is None or not 0 <= axis < len(dims):
            has = "of a known shape" if dims is None else f"with an axis {axis}: its shape is {list(dims)}"
            raise PlanError(f"'{name}' is to be cut along axis {axis}, and is no value of the model {has}.")
        lengths.append(dims[axis])
    size = math.gcd(*lengths)
    axis_of: dict[ir.Value, int] = {v: seeds[str(v.name)] for v in all_values(model.graph) if v.name in seeds}
    answers: list[Slicing | Refusal | None] = []
    for node in model.graph:
        axes = {index: axis_of[v] for index, v in enumerate(node.inputs) if v is not None and v in axis_of}
        answer = slicing(node, axes, size) if axes else None
        if isinstance(answer, Slicing):
            for index, axis in answer.outputs.items():
                axis_of.setdefault(node.outputs[index], axis)
            if str(node.name) in refused:
                answer = sentence(node, refused[str(node.name)])
        answers.append(answer)
    return Axes(size, tuple(answers), {str(value.name): axis for value, axis in axis_of.items()})


def with_repeated(model: ir.Model, seeds: Mapping[str, int]) -> dict[str, int]:
    """These first axes of values, and those of what an ``Expand`` repeats as often and no seed reaches.

    So what is worked out of that, as the mask of an attention, is cut as well. Only the seeds, where something couldn't
    be cut any more then: what has as many elements by chance isn't repeated for them.
    """
    plain = axes_of(model, seeds)
    repeated = dict[str, int]()
    for node, how in zip(model.graph, plain.nodes, strict=True):
        if node.op_type == "Expand" and how is None and node.inputs[0] is not None:
            before, after = static_shape(node.inputs[0]) or (), static_shape(node.outputs[0]) or (0,)
            if after[0] == plain.size and (len(before) < len(after) or before[0] == 1):
                repeated[str(node.outputs[0].name)] = 0
    both = axes_of(model, {**seeds, **repeated})
    refused = [sum(isinstance(how, Refusal) for how in axes.nodes) for axes in (plain, both)]
    return {**seeds, **(repeated if refused[1] <= refused[0] else {})}


def shapes_at_points(model: ir.Model, ranges: Mapping[str, DimRange]) -> list[dict[str, Shape | None]]:
    """The shapes of a model's values at `memonger.shapes.ranges.points`, by name.

    Raises:
        SizesError: they contradict each other.
    """
    sizes, largest = Sizes(model), open_dims.largest(model, ranges)
    constants = {str(v.name): static_shape(v) for v in model.graph.initializers.values()}
    found = []
    for at in points(ranges):
        inputs = shapes_at(largest, ranges, at)
        found.append({**constants, **inputs, **dict(zip(sizes.names, sizes.at(inputs), strict=True))})
    return found


def uneven_nodes(
    model: ir.Model, axes: Axes, seeds: Mapping[str, int], shapes: Sequence[Mapping[str, Shape | None]]
) -> dict[str, str]:
    """Nodes by name that can't be cut where sizes vary, and why: of a value so many elements belong to one of the axis.

    Operators that may give other bits for other shapes may be cut where all but the axis has one size, at which they
    can be compared.

    Args:
        model: A lowered model.
        axes: How its nodes can be cut at the largest sizes.
        seeds: From which values on.
        shapes: Of its values at several sizes, the largest first; see `shapes_at_points`.
    """
    seed, place = next(iter(seeds.items()))
    lengths = [(at[seed] or ())[place] for at in shapes]  # of the axis, in elements of the seed

    def is_even(value: ir.Value | None, axis: int) -> bool:
        own = [None if value is None else at.get(str(value.name)) for at in shapes]
        most = own[0]
        return most is not None and all(
            shape is not None and len(shape) == len(most) and shape[axis] * lengths[0] == most[axis] * length
            for shape, length in zip(own, lengths, strict=True)
        )

    def varies(value: ir.Value, axis: int | None) -> bool:
        own = [at.get(str(value.name)) for at in shapes]
        return len({None if s is None else s if axis is None else (*s[:axis], *s[axis + 1 :]) for s in own}) > 1

    found = {}
    for node, how in zip(model.graph, axes.nodes, strict=True):
        if not isinstance(how, Slicing):
            continue
        if operator_name(node) in NEVER_EMPTY:
            found[str(node.name)] = "takes no slice without elements, as those of a smaller input may be"
            continue
        if operator_name(node) not in EXACT:
            read = [(v, how.inputs.get(i)) for i, v in enumerate(node.inputs) if v is not None]
            read += [(v, how.outputs.get(i)) for i, v in enumerate(node.outputs) if v.name]
            other = next((v for v, axis in read if varies(v, axis)), None)
            if other is not None:
                found[str(node.name)] = (
                    f"has '{other.name}', whose sizes vary along more than one axis: nobody knows whether slices give "
                    "the same bits then"
                )
                continue
        cut = [(node.inputs[i], axis) for i, axis in how.inputs.items()]
        cut += [(node.outputs[i], axis) for i, axis in how.outputs.items()]
        value = next((v for v, axis in cut if not is_even(v, axis)), None)
        if value is not None:
            found[str(node.name)] = (
                f"can't be cut along an axis of '{value.name}': where the input is smaller, that has another part of "
                "its elements"
            )
    return found


def varying_images(model: ir.Model, shapes: Sequence[Mapping[str, Shape | None]]) -> dict[str, str]:
    """Nodes by name that can't be cut along rows of images where sizes vary (see `shapes_at_points`), and why.

    Where the number of images varies, and nothing else, slices of rows are the same at each size.
    """
    found = {}
    for node in model.graph:
        for value in (v for v in (*node.inputs, *node.outputs) if v is not None and v.name):
            own = [at.get(str(value.name)) for at in shapes]
            if len(set(own)) == 1 and own[0] is not None:
                continue
            if None in own or len({shape[1:] for shape in own if shape is not None}) > 1:
                found[str(node.name)] = f"has '{value.name}', of which more than the number of images varies"
            elif operator_name(node) not in EXACT:
                found[str(node.name)] = f"has '{value.name}' of so many images: other bits of slices aren't ruled out"
            elif node.op_type in ("Reshape", "Squeeze"):
                found[str(node.name)] = "is told the number of images"
    return found


BLOCKED = "com.microsoft.nchwc"
"""Domain of the operators on images whose channels lie in blocks."""

_WINDOWS = frozenset(
    ["AveragePool", "Conv", "ConvInteger", "ConvTranspose", "LpPool", "MaxPool", "QLinearConv",
     "com.microsoft::FusedConv", "com.microsoft.nchwc::Conv"]
)  # fmt: skip
"""Operators whose windows slide over images, and over sequences."""


LARGER = frozenset(("Resize", "Upsample"))
"""Operators that make an image larger."""

IN_BLOCKS = frozenset(("Add", "Sum", "Mul", "Concat", "BatchNormalization", "Relu", "LeakyRelu", "Sigmoid", "Tanh"))
"""Operators that work on channels in blocks where all that they read is so."""

WITHIN = (IN_BLOCKS - {"Concat"}) | {"Clip", "HardSigmoid", "HardSwish", "PRelu"}
"""Operators that run within convolutions."""

_READ_IMAGES = _WINDOWS | LARGER | {"com.microsoft.nchwc::ReorderInput"}
"""Operators whose first input is an image, or a sequence."""

_RESHAPES = frozenset(("Reshape", "Flatten", "Squeeze", "Unsqueeze"))
"""Operators that a row of an image may be a stretch of tokens behind, or before."""


def rows_axis(value: ir.Value | None) -> int | None:
    """The axis of a value's rows, if nobody cut what it is made of; None where it is no image of several rows."""
    shape = None if value is None or value.const_value is not None else static_shape(value)
    if value is None or shape is None or not 3 <= len(shape) <= 5:
        return None
    if len(shape) == 3 and not is_slid_over(value):
        return None
    is_grid = any(node.op_type == "GridSample" and index == 1 for node, index in value.uses())
    return (1 if is_grid else ROWS) if shape[1 if is_grid else ROWS] > 1 else None


def is_slid_over(value: ir.Value) -> bool:
    """Whether windows read a value, so that its rows are in order."""
    return _is_read_by(value, _WINDOWS)


def _is_read_by(value: ir.Value, operators: Collection[str]) -> bool:
    """Whether one of these operators has a value for its first input."""
    return any(index == 0 and operator_name(node) in operators for node, index in value.uses())


def _rows_of(node: ir.Node, axes: Mapping[int, int], *, in_order: bool) -> Slicing | Refusal:
    """How a node gives some rows of its outputs.

    Args:
        node: With static shapes.
        axes: Those of its inputs that come in rows, one at least, each with the axis of these.
        in_order: Whether some of these rows are made or read by windows, so that it pays to follow them where they are
            moved to another axis.

    Returns: a sentence where it can't give rows by themselves.
    """
    cut = Cut(node, axes, 1)
    try:
        height = cut.dims(min(axes))[cut.axis]
        made = slicing(node, axes, height, halo=True)
        if isinstance(made, Refusal):
            return made
        if cut.node.op_type in ("Reshape", "Expand", "Transpose") and not in_order:
            cut.refuse("mixes the rows of an image")
        if not made.height:
            # What computes each row of its outputs from the same row of its inputs, and of others maybe all
            images = {index: axis for index, axis in cut.axes.items() if index not in made.whole}
            heights = [cut.dims(index)[axis] for index, axis in images.items()]
            heights += [cut.out(index)[axis] for index, axis in made.outputs.items()]
            if not images or not made.outputs or heights != [height] * len(heights):
                cut.refuse("gives no image with the rows of its input")
            constants = {index: axis for index, axis in made.inputs.items() if index not in images}
            for index in constants:
                cut.constant(index)  # computed ones aren't cut

            def rows(begin: int, end: int) -> SliceCopy:
                return SliceCopy((begin, end), (begin, end), dict.fromkeys(images, (begin, end)), constants)

            made = Slicing(made.outputs, images, made.whole, height=height, by_rows=rows)
        if made.height < 2 or not (in_order or all(rows_axis(v) is not None for v in node.outputs if v.name)):
            cut.refuse("gives what isn't an image of several rows")
        return made
    except NotCutError as error:
        return sentence(node, str(error))


def rows_of_tokens(model: ir.Model) -> dict[ir.Value, int]:
    """The axis of rows of what images are made of that windows read, or are made larger: of tokens, of which a row of
    an image is a stretch.

    It goes back from the images by what moves rows, and by what computes each from the same row.
    """
    axis_of, tokens = dict[ir.Value, int](), set[ir.Value]()
    for node in reversed(list(model.graph)):
        value = next(iter(node.outputs), None)
        if value is None:
            continue
        axis = axis_of.get(value, rows_axis(value) if _is_read_by(value, _READ_IMAGES) else None)
        if axis is None:
            continue
        for index, read in enumerate(node.inputs):
            if read is None or not is_fed(read) or read in axis_of:
                continue
            for place, size in enumerate(static_shape(read) or ()):
                made = slicing(node, {index: place}, size, halo=True) if size > 1 else None
                if not isinstance(made, Slicing) or (made.height and node.op_type not in _RESHAPES):
                    continue
                if made.outputs.get(0) == axis and made.inputs.get(index) == place:
                    axis_of[read] = place
                    tokens |= {read} if value in tokens or node.op_type in {"Transpose", *_RESHAPES} else set()
                    break
    return {value: axis_of[value] for value in tokens}


def _is_stretched(node: ir.Node, how: Slicing) -> bool:
    """Whether a row of a node's result is several of its input, or the other way around, and each is moved."""
    read = node.inputs[0] if node.op_type in _RESHAPES else None
    return read is not None and how.height > 0 and (static_shape(read) or ())[how.inputs[0]] != how.height


def row_rules(model: ir.Model, refused: Mapping[str, str] = MappingProxyType({})) -> list[Slicing | Refusal | None]:
    """For each node of a model how it gives rows, or why it can't; None: it reads no image.

    Args:
        model: With static shapes.
        refused: Nodes by name that are to have images whole, and why.
    """
    answers: list[Slicing | Refusal | None] = []
    tokens = rows_of_tokens(model)
    axis_of, in_order = dict[ir.Value | None, int](tokens.items()), set[ir.Value | None](tokens)
    for node in model.graph:
        axes = {index: axis_of.get(value, rows_axis(value)) for index, value in enumerate(node.inputs)}
        read = {index: axis for index, axis in axes.items() if axis is not None}
        if STRIP in node.metadata_props or WINDOW in node.metadata_props:
            answers.append(Refusal(f"node '{node.name}' is of a slice already"))
            continue
        images = [value for index in read if (value := node.inputs[index]) is not None]
        is_in_order = any(value in in_order or is_slid_over(value) for value in images)
        answer = _rows_of(node, read, in_order=is_in_order) if read else None
        is_known = node.outputs[0] in tokens or _is_read_by(node.outputs[0], _READ_IMAGES)
        if isinstance(answer, Slicing) and not is_known and _is_stretched(node, answer):
            answer = sentence(node, "gives no image with the rows of its input, nor what one is made of")
        if isinstance(answer, Slicing) and str(node.name) in refused:
            answer = sentence(node, refused[str(node.name)])
        answers.append(answer)
        if isinstance(answer, Slicing):
            axis_of.update((node.outputs[index], axis) for index, axis in answer.outputs.items())
            in_order.update(node.outputs if is_in_order else ())
    return answers
