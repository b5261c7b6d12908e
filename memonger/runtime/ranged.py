"""A plan for ranges of sizes, bound at whatever shape comes: smaller views in the same arena.

The shapes of a new size are computed, and the layout is checked for them, before anything is bound. Where it holds,
values move down in the arena as far as those below them have become smaller. Where it doesn't, they get a layout of
their own in the same arena: the same nodes in the same order, at other offsets.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from memonger.errors import SessionError, VerificationError
from memonger.graph.liveness import assign_storage
from memonger.graph.ranged import at_sizes, idle_nodes
from memonger.graph.verify import sharing_pairs, stays_within, verify
from memonger.ir.element_types import ElementType
from memonger.ir.values import static_shape
from memonger.plan import Plan
from memonger.runtime import feeds as feeding
from memonger.runtime.arena import ArenaTensor
from memonger.runtime.prepared import Input, Program, SessionGroup
from memonger.runtime.program import expose, program_of, session_model
from memonger.runtime.weights import Lending, message
from memonger.shapes import open_dims
from memonger.shapes.ranges import Shape, completed, described, in_words, own, place_of, shapes_at, terms_of
from memonger.shapes.sizes import Sizes, SizesError
from memonger.shapes.traced_sizes import TracedSizes
from memonger.units import in_full
from memonger.words import option

if TYPE_CHECKING:
    from memonger.allocation.shrunk import CompactLayout

KEPT, KEPT_VALUES = 16, 2000
"""Shapes that stay bound, those that ran last: so many, or more, up to so many values together, each about half a KiB
of onnxruntime's."""

_NONE: Mapping[str, int] = MappingProxyType({})

Key = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Last:
    """The program that was made last: of the next one only what differs is made.

    Attributes:
        of_value: As `ShapesAt` has it, and by it which others are of the same structure.
        having: Of each distinct shape the planned values that have it.
        distinct: Shapes; of nothing yet ``(-1,)``, which is none.
        own: Bytes of each planned value, by its number.
        fits: Whether the layout holds at these sizes.
        offsets: By number.
        planned: The values.
    """

    of_value: Sequence[int]
    having: Sequence[Sequence[int]]
    distinct: Sequence[Shape | None]
    own: Mapping[int, int]
    fits: bool
    offsets: Mapping[int, int]
    planned: Sequence[ArenaTensor]

    @staticmethod
    def of_nothing(of_value: Sequence[int], planned: int) -> "_Last":
        """Before any was made of this structure."""
        having: list[list[int]] = [[] for _ in range(max(of_value, default=-1) + 1)]
        for value, place in enumerate(of_value[:planned]):
            having[place].append(value)
        nothing = ArenaTensor("", ElementType.UNDEFINED, ())
        return _Last(of_value, having, [(-1,)] * len(having), {}, False, {}, [nothing] * planned)


_AT_SIZES = {"inputs", "planned", "output_shapes"}  # of a program: what differs from size to size

_tensor = partial(tuple.__new__, ArenaTensor)  # thousands a second are made


class RangedProgram:
    """The programs of a plan for ranges of sizes.

    Args:
        plan: With ranges. It isn't kept.

    Attributes:
        base: The program at the largest sizes, whose inputs have no shapes where those are ranges.
        kept: How many shapes stay bound.
        ranges: The plan's.
        offers_filling: Whether the error of a size between those of a range says that it can be filled up.
    """

    def __init__(self, plan: Plan) -> None:
        program = program_of(plan)
        self._graph, self._alignment = plan.graph, plan.alignment
        self.offers_filling = True
        self.ranges, self._shapes = dict(plan.ranges), open_dims.largest(plan.model, plan.ranges)
        self._sums = [name for name, one in plan.ranges.items() if one.equals]
        names, sizes = tuple(tensor.name for tensor in program.planned), Sizes(plan.model)
        self._outputs = tuple(name for name in program.outputs if name in sizes.names)
        self._sizes = TracedSizes(sizes, (*names, *self._outputs), self._shapes, self.ranges)
        self._places = tuple((name, *place_of(text)) for name, one in plan.ranges.items() for text in one.places)
        self._open: dict[str, set[int]] = {}
        for _, where, axis in self._places:
            self._open.setdefault(where, set()).add(axis)
        self._inputs = program.inputs
        inputs = tuple(replace(one, shape=None) if one.name in self._open else one for one in program.inputs)
        self.base = replace(program, inputs=inputs)
        number = {name: value for value, name in enumerate(plan.graph.values)}
        self._numbers = tuple(number[name] for name in names)
        self._bits = tuple(tensor.dtype.bitwidth for tensor in program.planned)
        self._types = tuple((name, tensor.dtype) for name, tensor in zip(names, program.planned, strict=True))
        self._offsets = dict(plan.offsets)
        self._sharing = sharing_pairs(plan.graph, plan.offsets)
        self._idle = idle_nodes(plan.model, plan.ranges)
        self._few = self._without_idle(plan, program) if self._idle else None
        self._windows = tuple(_windows(plan, {name: place for place, name in enumerate(names)}))
        self._of_value, self._shrunk = _shrunk(plan)
        one_of = {storage: value for value, storage in self._of_value.items()}
        self._storage = {value: storage for storage, value in one_of.items()}  # of one value of each
        self.kept = max(KEPT, KEPT_VALUES // max(1, len(names)))
        self._known: OrderedDict[Key, Program] = OrderedDict()
        self._last = _Last.of_nothing((), 0)
        self._rounded, self._moved = [-1] * len(one_of), self._offsets
        same = {field.name: getattr(program, field.name) for field in fields(program)}
        self._program = partial(Program, **{name: same[name] for name in same.keys() - _AT_SIZES})
        self._lock = threading.Lock()

    def groups(self, plan: Plan, lending: Lending | None = None) -> Iterator[SessionGroup]:
        """What its onnxruntime sessions are made of: at small sizes one may run that has no nodes of empty slices.

        Args:
            plan: The plan.
            lending: See `memonger.runtime.weights.message`.
        """
        model = session_model(plan, self.base, any_shape=True)
        # Of inputs without shapes onnxruntime follows the sizes that nodes compute, and wrongly
        open_dims.name_dims(model.graph.inputs, plan.model, plan.ranges)
        yield SessionGroup(message(model, lending), (0,), (self.base,), takes_any_shape=True)
        if self._few is None:
            return
        model = plan.model.clone()
        idle = {value: node for node in model.graph if node.name in self._idle for value in node.outputs}
        for node in model.graph:
            if node.name not in self._idle and not idle.keys().isdisjoint(node.inputs):
                inputs = [value for value in node.inputs if value not in idle]
                node.resize_inputs(len(inputs))
                for index, value in enumerate(inputs):
                    node.replace_input_with(index, value)
        model.graph.remove(list(dict.fromkeys(idle.values())), safe=True)
        expose(model, self._few.program.planned, any_shape=True)
        open_dims.name_dims(model.graph.inputs, plan.model, plan.ranges)
        yield SessionGroup(message(model, lending), (0,), (self._few.program,), takes_any_shape=True)

    def _without_idle(self, plan: Plan, program: Program) -> "_Few":
        """The program of small sizes."""
        dropped = {str(v.name) for node in plan.model.graph if node.name in self._idle for v in node.outputs}
        places = frozenset(place for place, tensor in enumerate(program.planned) if tensor.name in dropped)
        order = tuple(name for name in program.order if name not in self._idle)
        planned = tuple(tensor for tensor in program.planned if tensor.name not in dropped)
        return _Few(replace(self.base, order=order, planned=planned), places)

    def session_of(self, program: Program) -> int:
        """The number of the session that runs a program: of small sizes the second."""
        return int(self._few is not None and program.order is self._few.program.order)

    def largest(self) -> Program:
        """The program at the largest sizes, with the shapes of all inputs."""
        return self.at(tuple(completed(self.ranges, {name: one.most for name, one in self.ranges.items()}).values()))

    def key(self, inputs: feeding.Feeds, kept: Mapping[str, int] = _NONE) -> Key:
        """The sizes that inputs have, in the order of the ranges.

        Args:
            inputs: What a run is given.
            kept: Sizes that a state has, which isn't among them.

        Raises:
            SessionError: one is outside its range; two inputs have different ones; an input has another rank.
        """
        return tuple(self._sizes_of(inputs, kept, self._check_range).values())

    def _check_range(self, name: str, where: str, axis: int, shape: Shape) -> None:
        """Check that a dimension of an input may have the size that it has."""
        one, size = self.ranges[name], shape[axis]
        if size not in one:
            is_below = self.offers_filling and size and not one.equals and one.rounded_up(size) is not None
            instead = f" Or have it filled up ({option('pad', True)})." if is_below else ""
            raise SessionError(
                f"input '{where}' has shape {list(shape)}: dimension {axis}, '{name}', is {size}, and the plan is "
                f"for {described(self.ranges)}. Plan the model for a larger range.{instead}"
            )

    def _sizes_of(
        self, inputs: feeding.Feeds, kept: Mapping[str, int], check: Callable[[str, str, int, Shape], None]
    ) -> dict[str, int]:
        """The sizes that inputs have; ``check`` is told each dimension with a range: its name, input, axis and shape.

        Raises:
            SessionError: as `key`.
        """
        sizes = dict(kept)
        for name, where, axis in self._places:
            shape = feeding.shape_of(inputs.get(where))
            if shape is None:
                continue  # left out: what is missing is said where feeds are checked
            planned, varying = self._shapes[where], self._open[where]
            same = (one in varying or shape[one] == dim for one, dim in enumerate(planned))
            if len(shape) != len(planned) or not all(same):
                raise SessionError(
                    f"input '{where}' has shape {list(shape)}; at the largest sizes of its ranges "
                    f"({described(self.ranges)}) it is {list(planned)}, and of these only dimensions "
                    f"{sorted(varying)} change."
                )
            size = shape[axis]
            if sizes.setdefault(name, size) != size:
                here = "the state that is kept (reset_state() lets go of it)" if name in kept else "one input"
                raise SessionError(f"'{name}' is {sizes[name]} in {here} and {size} in '{where}': they must agree.")
            check(name, where, axis, shape)
        if not self._sums:
            return {name: sizes.get(name, one.most) for name, one in self.ranges.items()}
        free = {name: sizes.get(name, one.most) for name, one in own(self.ranges).items()}
        every = completed(self.ranges, free)
        wrong = next((name for name in self._sums if sizes.get(name, every[name]) != every[name]), None)
        if wrong is not None:
            where, axis = next((where, axis) for name, where, axis in self._places if name == wrong)
            raise SessionError(
                f"dimension {axis} of input '{where}' is {sizes[wrong]}; it has to be {self.ranges[wrong].equals}, "
                f"which is {every[wrong]} at {in_words(free)}."
            )
        return every

    def filled_up(self, inputs: feeding.Feeds) -> tuple[dict[str, Shape], dict[str, Shape]] | None:
        """For inputs of sizes below a range or between its steps: what they are filled up to, and what comes of them.

        Returns: the shapes of the inputs at the next sizes that the ranges have, and the shapes of the outputs of what
            was given, by name; None where there are no such sizes.

        Raises:
            SessionError: inputs contradict each other; an output hasn't a dimension that would be filled up: what fills
                it up would be in it.
        """
        sizes = self._sizes_of(inputs, _NONE, lambda *_: None)
        larger = {name: one.rounded_up(sizes[name]) for name, one in own(self.ranges).items()}
        fitting = {name: size for name, size in larger.items() if size is not None}
        filled = [name for name, size in fitting.items() if size != sizes[name]]
        if len(fitting) < len(larger) or not filled or not all(sizes[name] for name in filled):
            return None
        for name in filled:
            of_it = {each for each in self._sums if name in terms_of(self.ranges[each].equals)} | {name}
            without = next((key for key, axes in self._axes.items() if axes is None or of_it.isdisjoint(axes)), None)
            if without is not None:
                raise SessionError(
                    f"'{name}' is {sizes[name]}, and the plan is for {described(self.ranges)}. It can't be filled up: "
                    f"no dimension of output '{without}' is '{name}', so what fills it up would be in there."
                )
        at = completed(self.ranges, fitting)
        shapes, whole = shapes_at(self._shapes, self.ranges, at), self.at(tuple(at.values())).output_shapes
        outputs = {
            name: tuple(sizes.get(which, dim) for which, dim in zip(axes or (), whole[name] or (), strict=True))
            for name, axes in self._axes.items()
        }
        return {name: shapes[name] for name in self._open if name in inputs}, outputs

    @cached_property
    def _axes(self) -> dict[str, tuple[str, ...] | None]:
        """Which dimension with a range each axis of each output is, by the output's name; empty texts for fixed ones.

        None for an output of which another one varies, as ``2 * n`` does, or that has no known shape.
        """
        most = {name: one.most for name, one in own(self.ranges).items()}
        ends = ({}, *({name: one.least} for name, one in own(self.ranges).items()))
        keys = [completed(self.ranges, most | end) for end in ends]
        dims = {tuple(key[name] for key in keys): name for name in self.ranges}
        found: dict[str, tuple[str, ...] | None] = {}
        of_keys = [self.at(tuple(key.values())).output_shapes for key in keys]
        for name in self.base.outputs:
            shapes = [shape for each in of_keys if (shape := each.get(name)) is not None]
            is_known = len(shapes) == len(keys) and len(set(map(len, shapes))) == 1
            axes = [dims.get(sizes, "" if len(set(sizes)) == 1 else None) for sizes in zip(*shapes, strict=is_known)]
            known = tuple(axis for axis in axes if axis is not None)
            found[name] = known if is_known and len(known) == len(axes) else None
        return found

    def takes(self, inputs: feeding.Feeds) -> bool:
        """Whether inputs have sizes within the ranges, and agree."""
        try:
            self.key(inputs)
        except SessionError:
            return False
        return True

    def at(self, key: Key) -> Program:
        """The program at these sizes.

        Raises:
            SessionError: the model's shapes contradict each other there, or its values need more than the arena.
        """
        with self._lock:
            program = self._known.pop(key, None)
            self._known[key] = program = program if program is not None else self._made(key)
            if len(self._known) > self.kept:
                self._known.popitem(last=False)
            return program

    def _made(self, key: Key) -> Program:
        sizes = dict(zip(self.ranges, key, strict=True))
        try:
            distinct, of_value = self._sizes.at(key)
        except SizesError as error:
            raise SessionError(f"the model doesn't run at {in_words(sizes)}: {error}.") from error
        numbers, bits, types = self._numbers, self._bits, self._types
        last = self._last if self._last.of_value is of_value else _Last.of_nothing(of_value, len(types))
        own, changed = dict(last.own), list[int]()
        for old, shape, values in zip(last.distinct, distinct, last.having, strict=True):
            if shape == old or not values:
                continue
            if shape is None:
                raise SessionError(f"at {in_words(sizes)} the size of '{types[values[0]][0]}' isn't known.")
            elements = math.prod(shape)
            own.update([(numbers[value], -(-bits[value] * elements // 8)) for value in values])
            changed += values
        moved = [numbers[value] for value in changed] if last.fits else None
        lie_inside = all(window.holds(distinct, of_value) for window in self._windows)
        fits = lie_inside and stays_within(self._graph, self._sharing, own, moved)
        offsets = self.moved_down(own, moved) if fits else self._laid_out(sizes, own, lie_inside)
        tensors = list(last.planned)
        for value in changed if offsets is last.offsets else range(len(tensors)):
            tensors[value] = _tensor((*types[value], distinct[of_value[value]], offsets[numbers[value]]))
        self._last = _Last(of_value, last.having, distinct, own, fits, offsets, tensors)
        results = dict(zip(self._outputs, map(distinct.__getitem__, of_value[len(tensors) :]), strict=True))
        shapes = {name: list(self._shapes[name]) for name in self._open}
        for name, where, axis in self._places:
            shapes[where][axis] = sizes[name]
        inputs = tuple(  # those without a range are the same objects each time
            Input(one.name, one.kind, tuple(shapes[one.name]), one.required, one.numpy) if one.name in shapes else one
            for one in self._inputs
        )
        made = self._program(inputs=inputs, planned=tuple(tensors), output_shapes=results)
        few = self._few
        if few is None or not all(0 in (distinct[of_value[place]] or ()) for place in few.dropped):
            return made
        kept = tuple(one for place, one in enumerate(tensors) if place not in few.dropped)
        return replace(made, order=few.program.order, planned=kept)

    def moved_down(self, own: Mapping[int, int], changed: Iterable[int] | None = None) -> Mapping[int, int]:
        """The plan's offsets, each as low as those that it lies on allow at these sizes, rounded up.

        Args:
            own: Bytes of each planned value.
            changed: Values that have other sizes than in the last call; None: all may.

        Returns: What the last call returned where no rounded size differs.
        """
        if self._shrunk is None:
            return self._offsets
        differ = False
        for value in self._storage if changed is None else changed:
            storage = self._storage.get(value)
            if storage is not None:
                size = self._shrunk.rounded(storage, own[value])
                differ |= size != self._rounded[storage]
                self._rounded[storage] = size
        if differ:
            offsets = self._shrunk.offsets(self._rounded)
            moved = {} if offsets is None else {value: offsets[storage] for value, storage in self._of_value.items()}
            self._moved = self._offsets | moved
        return self._moved

    def _laid_out(self, sizes: Mapping[str, int], own: Mapping[int, int], lie_inside: bool) -> Mapping[int, int]:
        """The plan's own offsets where the checker passes them at these sizes, else new ones in its arena.

        Args:
            sizes: Of the dimensions.
            own: Bytes of each planned value.
            lie_inside: Whether parts lie where they do in the plan.
        """
        graph = at_sizes(self._graph, own)
        if not lie_inside:
            graph = graph.with_aliases(subview=[()] * len(graph.nodes))
        try:
            verify(graph, self._offsets, self.base.arena_bytes, self._alignment)
            return self._offsets
        except VerificationError:
            pass
        graph = replace(graph, planned=tuple(p and bool(s) for p, s in zip(graph.planned, graph.sizes, strict=True)))
        storage = assign_storage(graph, alignment=self._alignment)
        from memonger.allocation import allocate  # with all allocators

        layout = allocate(storage.buffers)
        if layout.size > self.base.arena_bytes:
            raise SessionError(
                f"at {in_words(sizes)} the values need an arena of {in_full(layout.size)}, and the plan's has "
                f"{in_full(self.base.arena_bytes)}: a size between those it was measured at takes more than they do. "
                "Plan the model for a smaller range that ends there, or for that shape alone."
            )
        pairs = enumerate(zip(storage.of_value, storage.within, strict=True))
        offsets = {value: layout.offsets[number] + byte for value, (number, byte) in pairs if number >= 0}
        verify(graph, offsets, self.base.arena_bytes, self._alignment)
        return {**dict.fromkeys(own, 0), **offsets}  # empty values lie anywhere


@dataclass(frozen=True, slots=True)
class _Few:
    """What runs at small sizes: the program, and the places of the planned values that have no elements then."""

    program: Program
    dropped: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Window:
    """A part that lies inside its whole; values are places among the planned ones.

    Attributes:
        part: The part.
        whole: The whole.
        axis: The axis that is cut: the outermost one with more than one element.
        begin: The part's first element.
        inner: The dimensions behind that axis.
        before: Of one of several parts the one that ends where it begins, and the first element of that.
    """

    part: int
    whole: int
    axis: int
    begin: int
    inner: Shape
    before: tuple[int, int] | None

    def holds(self, distinct: Sequence[Shape | None], of_value: Sequence[int]) -> bool:
        """Whether it begins at the same byte at other sizes, or is empty."""
        axis, part, whole = self.axis, distinct[of_value[self.part]], distinct[of_value[self.whole]]
        if part is None or whole is None or 0 in part:
            return part is not None and whole is not None
        if part[axis + 1 :] != self.inner or whole[axis + 1 :] != self.inner or set(whole[:axis]) - {1}:
            return False
        if self.before is not None:
            before = distinct[of_value[self.before[0]]]
            if before is None or self.before[1] + before[axis] != self.begin:
                return False
        return self.begin + part[axis] <= whole[axis]


def _windows(plan: Plan, place: Mapping[str, int]) -> Iterator[_Window]:
    """The parts of a plan that lie inside their whole."""
    graph, shapes = plan.graph, {str(v.name): static_shape(v) for node in plan.model.graph for v in node.outputs}
    for parts in graph.subviews:
        before: tuple[int, int] | None = None
        for part, whole, byte in sorted(parts, key=lambda one: one[2]):
            dims = shapes[graph.values[whole]] or ()
            axis = next((axis for axis, size in enumerate(dims) if size != 1), 0)
            begin = byte * dims[axis] // graph.sizes[whole]
            yield _Window(place[graph.values[part]], place[graph.values[whole]], axis, begin, dims[axis + 1 :], before)
            before = place[graph.values[part]], begin


def _shrunk(plan: Plan) -> tuple[dict[int, int], "CompactLayout | None"]:
    """The storage of each value, and what moves storages down; None where values lie inside others."""
    from memonger.allocation.shrunk import CompactLayout

    storage = assign_storage(plan.graph, alignment=plan.alignment, offsets=plan.offsets)
    of_value = {value: number for value, number in enumerate(storage.of_value) if number >= 0}
    if any(storage.within) or any(plan.graph.subviews):
        return of_value, None
    at = {number: plan.offsets[value] for value, number in of_value.items()}
    shrunk = CompactLayout(storage.buffers, [at[number] for number in range(len(storage.buffers))])
    return of_value, shrunk if shrunk.is_quick else None
