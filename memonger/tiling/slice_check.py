"""Nodes alone, whole and on slices: whether the bits are the same, and how much workspace they take.

A kernel may take another path for another shape.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir

from memonger.devices import CPU
from memonger.errors import SessionError
from memonger.files import ScratchFolder
from memonger.graph.costs import flops
from memonger.graph.liveness import ALIGNMENT
from memonger.ir.extract import extract, is_fed
from memonger.ir.parts import elements
from memonger.ir.values import attribute_bytes, dense, nbytes, static_shape
from memonger.plan_records import Spent
from memonger.runtime import ort, profile
from memonger.runtime.weights import LEND_ALL, session_of
from memonger.tiling.cutting import Slicing
from memonger.units import MiB

EXACT = frozenset(
    ["Abs", "Add", "Clip", "Concat", "DepthToSpace", "Flatten", "Identity", "LeakyRelu", "MaxPool", "Mul", "Neg",
     "PRelu", "Pad", "Relu", "Reshape", "Slice", "SpaceToDepth", "Split", "Squeeze", "Sub", "Transpose", "Unsqueeze",
     "com.microsoft.nchwc::Conv", "com.microsoft.nchwc::MaxPool", "com.microsoft.nchwc::ReorderInput",
     "com.microsoft.nchwc::ReorderOutput"]
)  # fmt: skip
"""Operators that copy, compare, or compute one IEEE operation an element, without workspace: the bits are the same on
whatever path of a kernel. So are those of the convolution of blocked channels: by its source (`MlasNchwcConv` in
snchwc.cpp) its algorithm follows from channels and kernel, never from the batch or the rows, and each pixel is a sum in
one order; it was compared on 300 random shapes, on one thread and two."""

_LARGER = 16.0
"""Times the random numbers are other ones: where powers and exponentials of small numbers are the same by chance."""

_DRAWS, _FEW = 16, 1 << 16
"""Draws for nodes that read so many numbers at most: of few sums, and of the few elements behind the last vector that
kernels compute otherwise, the last bits may be the same by chance."""

MOST_BYTES = 64 * MiB
"""Of a node that reads and writes more, as of a very large batch, a beginning is compared that takes about so much: so
large a part takes whatever path of a kernel all of it does."""

_NORMAL = 1 << 20
"""Random numbers that larger arrays repeat: to draw them takes longer than most nodes."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of a node.

    Attributes:
        difference: The largest difference between what it gives for whole values and on slices; 0 for the same bits,
            infinity where one of them can't run alone, or its values are no arrays (text, elements of four bits).
        workspace: Bytes of workspace by length of a slice; none where the node can't run alone.
    """

    difference: float
    workspace: Mapping[Any, int] = dataclasses.field(default_factory=dict)


@dataclass(slots=True)
class SeenAlone:
    """What was seen of a model's nodes alone: those that give other bits, and by how much; and workspace of copies."""

    different: dict[str, float] = dataclasses.field(default_factory=dict)
    workspace: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Elements:
    """Elements ``[begin, end)`` of an axis of an array; of one in onnxruntime's blocked layout, rows of its blocks."""

    axis: int
    begin: int
    end: int
    block: int = 1

    def of(self, array: np.ndarray) -> np.ndarray:
        """These elements, dense, and at an address as values have in an arena: bits of some sums depend on it."""
        if self.block == 1:
            return _aligned(array[elements(self.axis, self.begin, self.end)])
        batch, channels, height, width = array.shape
        view = array.reshape(batch * channels // self.block, height, width * self.block)[:, self.begin : self.end]
        return _aligned(view).reshape(batch, channels, self.end - self.begin, width)


@dataclass(frozen=True, slots=True)
class CheckedCopy:
    """A copy of a node that runs on parts of what the node reads.

    Attributes:
        node: The copy.
        original: Name of the node.
        share: The part of the node's outputs that it gives.
        length: What tells it from others: of those that are alike one is run.
        inputs: What it reads of the node's inputs, of those that are cut.
        outputs: Which elements of the node's outputs it gives.
        given: Which of its own these are; all where nothing is said.
    """

    node: ir.Node
    original: str
    share: float
    length: Any
    inputs: Mapping[int, Elements]
    outputs: Mapping[int, Elements]
    given: Mapping[int, Elements] = dataclasses.field(default_factory=dict)

    @property
    def place(self) -> tuple[int, ...]:
        """Where what it reads begins in the whole, in bytes beyond a multiple of `ALIGNMENT`.

        A slice of its own begins at one: a kernel that adds up vectors may begin otherwise there.
        """
        places = list[int]()
        for index, part in self.inputs.items():
            value = self.node.inputs[index]
            shape, dtype = (None, None) if value is None else (static_shape(value), value.dtype)
            if shape is not None and dtype is not None:
                row = math.prod(shape[part.axis + 1 :]) * part.block * dtype.bitwidth // 8
                places.append(part.begin * row % ALIGNMENT)
        return tuple(places)


@dataclass(frozen=True, slots=True)
class _Whole:
    """What copies of a node are compared with: all that it gives, or the beginning.

    Attributes:
        copies: What they read and give of it.
        inputs: Which elements of the node's inputs there are, of those that are cut; none where it is all.
        outputs: Which elements of its outputs, likewise.
    """

    copies: Sequence[CheckedCopy]
    inputs: Mapping[int, Elements] = dataclasses.field(default_factory=dict)
    outputs: Mapping[int, Elements] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(node: ir.Node, copies: Sequence[CheckedCopy]) -> "_Whole":
        """The beginning that holds these copies, each as far from a multiple of `ALIGNMENT` as it was; or all."""
        values = [v for v in (*node.inputs, *node.outputs) if v is not None and v.name]
        total = sum(nbytes(value) or 0 for value in {value.name: value for value in values}.values())
        if total <= MOST_BYTES:
            return _Whole(copies)

        def size(values: Sequence[ir.Value | None], index: int, part: Elements) -> int:
            value = values[index]
            shape = None if value is None else static_shape(value)
            return 0 if shape is None or part.block != 1 else shape[part.axis]

        read = {i: (part.axis, size(node.inputs, i, part)) for copy in copies for i, part in copy.inputs.items()}
        given = {i: (part.axis, size(node.outputs, i, part)) for copy in copies for i, part in copy.outputs.items()}
        sizes = [of_axis for _, of_axis in (*read.values(), *given.values())]
        count = math.gcd(*sizes)  # elements of the axis, of which a value may have several each
        if not all(sizes):
            return _Whole(copies)

        def ranges(copy: CheckedCopy) -> set[tuple[float, float]]:
            parts = [(part, read[i][1]) for i, part in copy.inputs.items()]
            parts += [(part, given[i][1]) for i, part in copy.outputs.items()]
            return {(part.begin * count / of_axis, part.end * count / of_axis) for part, of_axis in parts}

        ends, moved = [-(-count * MOST_BYTES // total)], list[CheckedCopy]()
        for copy in copies:
            (begin, end), *others = ranges(copy)
            if others or begin % 1 or end % 1:  # it reads more than it gives
                return _Whole(copies)
            first = int(begin) % ALIGNMENT
            ends += [first + int(end - begin), 2 * int(end - begin)]
            by = int(begin) - first

            def earlier(part: Elements, of_axis: int, by: int = by) -> Elements:
                return dataclasses.replace(
                    part, begin=part.begin - by * of_axis // count, end=part.end - by * of_axis // count
                )

            inputs = {i: earlier(part, read[i][1]) for i, part in copy.inputs.items()}
            outputs = {i: earlier(part, given[i][1]) for i, part in copy.outputs.items()}
            moved.append(dataclasses.replace(copy, inputs=inputs, outputs=outputs))
        if max(ends) >= count:
            return _Whole(copies)

        def beginnings(axes: Mapping[int, tuple[int, int]]) -> dict[int, Elements]:
            return {i: Elements(axis, 0, max(ends) * (of_axis // count)) for i, (axis, of_axis) in axes.items()}

        return _Whole(moved, beginnings(read), beginnings(given))


def beginning(node: ir.Node, how: Slicing, length: int, size: int) -> CheckedCopy:
    """A node itself where an axis of ``size`` elements has so many: it gives the beginning of the whole."""

    def part(value: ir.Value | None, axis: int) -> Elements:
        dims = None if value is None else static_shape(value)
        return Elements(axis, 0, length * ((dims or (size,) * (axis + 1))[axis] // size))

    read = {index: part(node.inputs[index], axis) for index, axis in how.inputs.items()}
    given = {index: part(node.outputs[index], axis) for index, axis in how.outputs.items()}
    return CheckedCopy(node, str(node.name), length / size, ("beginning", length), read, given)


def copies_by_node(bands: Iterable[Sequence[CheckedCopy]]) -> dict[str, list[CheckedCopy]]:
    """The copies of each node by its name, those of all bands."""
    found = dict[str, list[CheckedCopy]]()
    for copy in itertools.chain.from_iterable(bands):
        found.setdefault(copy.original, []).append(copy)
    return found


class SliceCheck:
    """Runs single nodes, whole and on slices, on random numbers. What was seen of a node holds for all like it.

    Args:
        threads: Threads within a node; 0 leaves it to onnxruntime.
        spent: Where the time is counted.
    """

    def __init__(self, threads: int, spent: Spent) -> None:
        self._spent = spent
        self._folder = ScratchFolder()
        self._statistics = self._folder.path / "memory.csv"
        self._options = ort.SessionSettings(in_order=True, threads=threads, pattern=False, entries=ort.RUN_ONCE)
        statistics = {"session.collect_node_memory_stats_to_file": str(self._statistics)}
        self._on_slices = dataclasses.replace(self._options, entries={**ort.RUN_ONCE, **statistics})
        self._seen: dict[Any, Seen] = {}
        self._sessions: dict[ir.Node, Any] = {}  # of nodes that are run several times
        self._normal = np.empty(0, np.float32)
        self._whole, self._part = _Memory(), _Memory()

    def see(
        self, whole: tuple[ir.Model, ir.Node], model: ir.Model, copies: Sequence[CheckedCopy],
        sums: Collection[int] = (),
    ) -> Seen:  # fmt: skip
        """What a node gives, and takes, for whole values and on slices: of those that are alike the first is run.

        Args:
            whole: A model and its node.
            model: The model of the copies.
            copies: In their order; the node itself among them has shorter inputs, see `beginning`.
            sums: Outputs that aren't cut: each copy adds to them.
        """
        if not _has_arrays(whole[1]):
            return Seen(math.inf)
        alike = dict.fromkeys((*((i, part.axis) for i, part in c.inputs.items()), c.length, c.place) for c in copies)
        known = _key(whole[1]), tuple(alike)
        if known not in self._seen:
            begin = time.perf_counter()
            try:
                workspace, node = dict[Any, int](), whole[1]
                few = max((math.prod(static_shape(v) or ()) for v in node.inputs if v is not None), default=0) <= _FEW
                self._sessions.clear()
                draws = range(1 if flops(node) else _DRAWS if few else 2)  # larger numbers give products the same bits
                most = max(self._drawn(whole, model, copies, sums, draw, workspace) for draw in draws)
                self._seen[known] = Seen(most, workspace)
            except SessionError:
                self._seen[known] = Seen(math.inf)
            self._spent.alone += time.perf_counter() - begin
        return self._seen[known]

    def _drawn(
        self, whole: tuple[ir.Model, ir.Node], model: ir.Model, copies: Sequence[CheckedCopy], sums: Collection[int],
        draw: int, workspace: dict[Any, int],
    ) -> float:  # fmt: skip
        """The largest difference on the random numbers of one draw; what workspace copies took is added."""
        compared, feeds, results = self._compared(whole, copies, bool(sums), draw)
        most, parts, seen = 0.0, dict[int, np.ndarray](), set[Any]()
        for number, copy in enumerate(compared.copies):
            if (copy.length, copy.place) in seen and not sums:
                continue  # each once
            seen.add((copy.length, copy.place))
            cut = {i: a if i not in copy.inputs else copy.inputs[i].of(a) for i, a in feeds.items()}
            cut = {i: a for i, a in cut.items() if (v := copy.node.inputs[i]) is not None and is_fed(v)}
            if sums and number:
                cut[2] = parts[0].copy()  # the sum so far, which a Gemm adds to
            self._statistics.unlink(missing_ok=True)
            shorter = copy.outputs if copy.node is whole[1] else None
            parts = self._run(model, copy.node, cut, self._part, self._on_slices, shorter)
            workspace[copy.length] = profile.read_workspace(self._statistics).get(str(copy.node.name), 0)
            for index, own in copy.outputs.items():
                given = copy.given[index].of(parts[index]) if index in copy.given else parts[index]
                most = max(most, _largest_difference(given, own.of(results[index])))
        for number in sums:
            most = max(most, _largest_difference(parts[number], results[number]))
        return most

    def _compared(
        self, whole: tuple[ir.Model, ir.Node], copies: Sequence[CheckedCopy], in_all: bool, draw: int
    ) -> tuple[_Whole, dict[int, np.ndarray], dict[int, np.ndarray]]:
        """What copies are compared with, in all or its beginning, and what that is fed and gives."""
        compared = _Whole(copies) if in_all else _Whole.of(whole[1], copies)
        fed = {index: v for index, v in enumerate(whole[1].inputs) if v is not None and is_fed(v)}
        feeds = {index: self._random(v, draw, compared.inputs.get(index)) for index, v in fed.items()}
        try:
            return compared, feeds, self._run(*whole, feeds, self._whole, self._options, compared.outputs or None)
        except SessionError:
            if not compared.outputs:
                raise
        return self._compared(whole, copies, True, draw)  # its attributes or constants are of the size it has

    def _random(self, value: ir.Value, draw: int, part: Elements | None = None) -> np.ndarray:
        """Random numbers of a value's type and shape, or a part's; of integers zeros, which any index may be, but for
        bytes."""
        assert value.dtype is not None
        shape, kind = _shape(value, part), value.dtype.numpy()
        if not value.dtype.is_floating_point() and value.dtype.bitwidth != 8:
            return np.zeros(shape, kind)
        count, begin = math.prod(shape), draw * ALIGNMENT
        if len(self._normal) < begin + count:
            self._normal = _repeated(_normal(), begin + count)
        numbers = self._normal[begin : begin + count].reshape(shape)
        if value.dtype == ir.DataType.BOOL:
            return _aligned(numbers > 0)
        if value.dtype.is_floating_point():
            if draw % 2:
                numbers = np.multiply(
                    numbers, np.float32(_LARGER), out=_bytes(numbers.nbytes).view(np.float32).reshape(shape)
                )
            return _aligned(numbers.astype(kind, copy=False))
        return _aligned((40 * numbers).astype(np.int8).view(kind))

    def _run(
        self, model: ir.Model, node: ir.Node, feeds: Mapping[int, np.ndarray], memory: "_Memory",
        options: ort.SessionSettings, given: Mapping[int, "Elements"] | None = None,
    ) -> dict[int, np.ndarray]:  # fmt: skip
        """The outputs of a node alone, by number, which lie in this memory; of shorter inputs these elements."""
        outputs = {number: v for number, v in enumerate(node.outputs) if v.name}
        fed = {value for value in node.inputs if value is not None and is_fed(value)}  # also where it has a default
        session = None if given is not None else self._sessions.get(node)
        if session is None:
            alone = extract(model, [node], outputs.values(), fed)
            for value in (*alone.graph.inputs, *alone.graph.outputs) if given is not None else ():
                value.shape = None
            session = session_of(alone, CPU, options, LEND_ALL)
        if given is None and not flops(node):
            self._sessions[node] = session
        results, binding = memory.arrays(outputs, given or {}), session.io_binding()
        try:
            for name, array in {_name(node.inputs[index]): array for index, array in feeds.items()}.items():
                binding.bind_cpu_input(name, array)
            for number, array in results.items():
                dtype = outputs[number].dtype
                assert dtype is not None
                ort.bind_outputs(binding, [(_name(outputs[number]), dtype, array.shape, array.ctypes.data)])
            session.run_with_iobinding(binding)
            return results
        except Exception as error:  # pybind exceptions share no base class
            raise SessionError(str(error)) from error


class _Memory:
    """Memory for results, used again: the system takes as long to hand out new memory as many a node to fill it."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def arrays(self, values: Mapping[int, ir.Value], given: Mapping[int, Elements]) -> dict[int, np.ndarray]:
        """Arrays for these values, or for so many elements of an axis. What was there before is lost."""
        shapes = {index: _shape(value, given.get(index)) for index, value in values.items()}
        kinds = {index: value.dtype.numpy() for index, value in values.items() if value.dtype is not None}
        sizes = {index: math.prod(shape) * kinds[index].itemsize for index, shape in shapes.items()}
        if len(self._bytes) < (needed := sum(size + ALIGNMENT for size in sizes.values())):
            self._bytes = _bytes(needed)
        arrays, begin = {}, 0
        for index, size in sizes.items():
            arrays[index] = self._bytes[begin : begin + size].view(kinds[index]).reshape(shapes[index])
            begin += -(-size // ALIGNMENT) * ALIGNMENT
        return arrays


def _shape(value: ir.Value, part: Elements | None) -> tuple[int, ...]:
    """The shape of a value, or of these elements of it."""
    shape = static_shape(value) or ()
    if part is None:
        return shape
    return (*shape[: part.axis], part.end - part.begin, *shape[part.axis + 1 :])


def _aligned(array: np.ndarray) -> np.ndarray:
    """The array, dense, at a multiple of the alignment: itself where it is that."""
    array = np.asarray(array)  # arithmetic on one without axes gives a number
    if array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0:
        return array
    made = _bytes(array.nbytes).view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


def _bytes(count: int) -> np.ndarray:
    """So many bytes of new memory, at a multiple of the alignment."""
    memory = np.empty(count + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + count]


def _name(value: ir.Value | None) -> str:
    return "" if value is None else str(value.name)


def _has_arrays(node: ir.Node) -> bool:
    """Whether what the node reads and gives are arrays whose elements take whole bytes: no text, no four bits."""
    values = (*(v for v in node.inputs if v is not None and is_fed(v)), *(v for v in node.outputs if v.name))
    return all(dense(v) and v.dtype is not None and v.dtype.bitwidth % 8 == 0 for v in values)


def _key(node: ir.Node) -> Any:
    attributes = (attribute_bytes(attribute) for _, attribute in sorted(node.attributes.items()))
    values = ((v.dtype, static_shape(v), is_fed(v)) if v is not None else None for v in (*node.inputs, *node.outputs))
    return node.op_identifier(), node.version, tuple(attributes), tuple(values)


@cache
def _normal() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(_NORMAL, np.float32)


def _repeated(numbers: np.ndarray, count: int) -> np.ndarray:
    """So many elements, written once: `numpy.resize` makes one more copy of them all."""
    result = _bytes(count * numbers.itemsize).view(numbers.dtype)
    for begin in range(0, count, len(numbers)):
        part = result[begin : begin + len(numbers)]
        part[:] = numbers[: len(part)]
    return result


def _largest_difference(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference between elements; where only bits differ, as of zeros with signs, the smallest number."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return float("inf")
    if np.array_equal(_bits(one), _bits(other)):
        return 0.0
    a, b = one.astype(np.float64), other.astype(np.float64)
    with np.errstate(all="ignore"):
        differences = np.where(np.isnan(a) & np.isnan(b), 0.0, np.nan_to_num(np.abs(a - b), nan=np.inf))
    both_nan = bool((np.isnan(a) == np.isnan(b)).all()) and bool((np.signbit(a) == np.signbit(b)).all())
    return max(float(differences.max(initial=0.0)), 0.0 if both_nan else float(np.finfo(np.float64).tiny))


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.itemsize}")
