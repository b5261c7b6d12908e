"""What sessions are made from: plain data, read off plans that were checked.

This is where loading is cut in two. Preparing (`memonger.runtime.prepare`) reads planned files, checks them and writes
down what is here; it needs onnx, and all that memonger knows of graphs. Loading (`memonger.runtime.loaded_model`) makes
onnxruntime's sessions, the arena and bindings of it, and needs no more than is here: neither it, nor anything that it
imports, imports onnx. So the first may happen in a process that ends with it (`memonger.runtime.prepare_apart`).
"""

import hashlib
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from memonger.devices import Cuda, Device
from memonger.ir.element_types import ElementType
from memonger.runtime.arena import ArenaTensor
from memonger.runtime.onnxruntime import onnxruntime
from memonger.shapes.ranges import DimRange, Shape

Kind = Any
"""What a value is: of a tensor its `ElementType`; of a sequence, an optional or a sparse tensor onnx-ir's type."""


@dataclass(frozen=True, slots=True)
class Input:
    """A model's input, apart from the model.

    ``shape`` is None where nothing is known, ``kind`` what it is (None where nothing says), ``numpy`` the type of
    arrays for it (None for text and what is no tensor), ``fill`` what integers are where nobody gives them.
    """

    name: str
    kind: Kind | None
    shape: Shape | None
    required: bool
    numpy: np.dtype[Any] | None = None
    fill: int = 0

    @property
    def dtype(self) -> ElementType | None:
        """Element type of a tensor, else None."""
        return self.kind if isinstance(self.kind, ElementType) else None

    @property
    def is_sequence(self) -> bool:
        """Whether it is a list of tensors."""
        return "Sequence" in type(self.kind).__name__


class Held:
    """A weight in memory of its own, and the runtime's tensor over it.

    Args:
        array: The weight.
        dtype: The type of its elements.
    """

    def __init__(self, array: np.ndarray, dtype: ElementType) -> None:
        self._array, self._dtype = np.require(array, requirements="C"), dtype

    @cached_property
    def value(self) -> Any:
        """An OrtValue over it."""
        return onnxruntime().OrtValue.ortvalue_from_numpy_with_onnx_type(self._array, int(self._dtype))

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for weights of the same bytes, type and shape."""
        return self._dtype, self._array.shape, hashlib.sha256(self._array.reshape(-1).view(np.uint8).data).digest()

    def __reduce__(self) -> tuple[type["Held"], tuple[np.ndarray, ElementType]]:
        """How it is written out for another process: without the runtime's tensor."""
        return Held, (self._array, self._dtype)


@dataclass(frozen=True, slots=True)
class Message:
    """A model as bytes, for the runtime.

    Attributes:
        data: The ``ModelProto``.
        folder: Where external data lies that it refers to; None if it refers to none.
        lent: Weights that a session is given beside it, by name. It doesn't hold on to them: whoever makes it has to,
            for as long as it lives.
        is_shared: Whether they are in the model as well. The session then reads them where they lie, without a copy.
        copies: Where packed copies of large weights lie: of each file first byte and length.
    """

    data: bytes
    folder: str | None = None
    lent: Mapping[str, Held] = field(default_factory=dict)
    is_shared: bool = False
    copies: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)


class SharedWeights:
    """Lent weights that sessions have in common, once. They live as long as one of these does."""

    def __init__(self) -> None:
        self._held: weakref.WeakValueDictionary[tuple[object, ...], Held] = weakref.WeakValueDictionary()

    def in_place(self, model: Message) -> Message:
        """The model with weights that are there already in the place of those that are lent to it."""
        return replace(model, lent={name: self._held.setdefault(one.key, one) for name, one in model.lent.items()})


@dataclass(frozen=True, slots=True)
class Program:
    """All a session keeps of a plan: not the model, whose weights onnxruntime holds by then.

    Attributes:
        inputs: The model's inputs with the shapes planned for.
        outputs: Names of the model's outputs, each once.
        kinds: What the outputs are.
        uncomputed: Outputs that no node computes: inputs and constants.
        planned: Values bound into the arena, and where.
        constants: Small constants fed at each run, because plans that share a session differ in them.
        order: Names of the nodes as planned.
        unordered: Names of nodes whose order the runtime decides.
        has_loop: Whether a node's body may run more than once.
        arena_bytes: Size of the arena.
        workspace_bytes: Most workspace a step takes beside it, and what only a run can size; 0 if never measured.
        limit: Bytes that onnxruntime may take by itself; None: as much as it asks for.
        is_accounted: Whether arena and workspace are all that a run takes: the workspace was measured, and the runtime
            is left no value to hold that could be large.
        replacing: Outputs that are written over persistent inputs.
        growing: Outputs that are persistent inputs with more behind them, and lie where those do.
        output_shapes: The shapes of outputs, as far as they are known.
        first_update: The first step that writes over a persistent input; the number of steps if none does.
        copies_from_host: The first node that no CUDA graph may replay (`cuda.replay`), named; empty if there is none.
    """

    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    kinds: Mapping[str, Kind | None]
    uncomputed: frozenset[str]
    planned: tuple[ArenaTensor, ...]
    constants: Mapping[str, np.ndarray]
    order: tuple[str, ...]
    unordered: frozenset[str]
    has_loop: bool
    arena_bytes: int
    workspace_bytes: int
    limit: int | None
    is_accounted: bool
    replacing: frozenset[str]
    growing: frozenset[str]
    output_shapes: Mapping[str, Shape | None]
    first_update: int
    copies_from_host: str


@dataclass(frozen=True, slots=True)
class SessionGroup:
    """Plans that run in one onnxruntime session: its model, and the plans' numbers and programs.

    Attributes:
        model: The model as the session is given it. Not to be kept.
        members: Numbers of the plans.
        programs: Of each of these; of a partition its own.
        takes_any_shape: Shapes will be many: onnxruntime would remember something of each.
        is_partition: The session is one of several that run one after the other.
    """

    model: Message
    members: tuple[int, ...]
    programs: tuple[Program, ...]
    takes_any_shape: bool = False
    is_partition: bool = False


@dataclass(frozen=True, slots=True)
class Partition:
    """A step span of a schedule, which one onnxruntime session runs.

    Partitions of one structure share a session, under the names that values have in the first of them.

    Attributes:
        program: What of the plan's program is its own, by the session's names.
        borrowed: Planned values of earlier partitions that it reads, where they lie in the arena.
        live_ins: What else it reads, of the caller and of earlier partitions: the session's name → the model's.
        live_outs: What it writes that onnxruntime holds, for later partitions and the caller: likewise.
        session: Number of its session among those of the plan.
    """

    program: Program
    borrowed: tuple[ArenaTensor, ...] = ()
    live_ins: Mapping[str, str] = field(default_factory=dict)
    live_outs: Mapping[str, str] = field(default_factory=dict)
    session: int = 0


@dataclass(frozen=True, slots=True)
class PartCopy:
    """A part to copy out of its whole, or into it.

    Attributes:
        whole: A tensor of the arena, or the name of an input.
        part: A tensor of the arena.
        index: The part's elements of the whole: of each axis where they begin, and the next behind them.
        is_cut: Whether the whole is read.
    """

    whole: ArenaTensor | str
    part: ArenaTensor
    index: tuple[slice, ...]
    is_cut: bool


@dataclass(frozen=True, slots=True)
class PersistentPart:
    """Bytes of what persists that are read, and may be written over, where they lie: no node cuts or joins them.

    Attributes:
        tensor: Their name and shape; the offset is the first byte in the whole.
        whole: Name of the input that they are a part of.
        new: Name of the output that is written over them; None where none is.
    """

    tensor: ArenaTensor
    whole: str
    new: str | None


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that lie side by side in the arena, and that ranks add up together.

    Attributes:
        members: Their places, in that order.
        begin: Number of the partition before which the collective begins: the gradients are whole then.
        wait: Number of the partition that reads the sums.
        is_mean: Whether it is no gradients, but a mean that all ranks need.
    """

    members: tuple[ArenaTensor, ...]
    begin: int
    wait: int
    is_mean: bool


@dataclass(frozen=True, slots=True)
class FileSpan:
    """Bytes of a file.

    Attributes:
        file: Number of the file.
        begin: The first one.
        length: How many.
        ahead: Whether they are read ahead: all of them will be needed.
    """

    file: int
    begin: int
    length: int
    ahead: bool


@dataclass(frozen=True, slots=True)
class WeightRead:
    """A time that steps read a weight that stays in the file.

    Attributes:
        first: The first step that reads it.
        last: The last one.
        span: Where it lies in the form in which they read it.
        resident: Bytes of it that are in memory meanwhile.
        is_own: Whether it is in a file of the session's, and steps write it at one time or another.
        is_made: Whether steps write it before they read it: nothing of it is read ahead.
    """

    first: int
    last: int
    span: FileSpan
    resident: int
    is_own: bool = False
    is_made: bool = False


@dataclass(frozen=True, slots=True)
class ReadSchedule:
    """How the weights of a plan that stay in its file are read: see `memonger.runtime.weight_reader`.

    Attributes:
        nbytes: The most bytes of them that are to be in memory at once.
        files: The files that they lie in.
        reads: The times that steps read one, in their order. Empty where nodes copy them to a device.
    """

    nbytes: int
    files: tuple[str, ...]
    reads: tuple[WeightRead, ...]


HostBytes = tuple[str, int] | np.ndarray
"""Where bytes lie in the host's memory: the file, and the first byte there; or an array of them."""


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A weight that a session copies to a device while another partition runs; see `memonger.graph.ahead`.

    Attributes:
        name: The weight's.
        offset: Its first byte in the arena.
        nbytes: How many there are.
        source: The weight.
        begin: Number of the partition before which the copy may begin, when the one before that is over.
        wait: Number of the partition before which it has to be there.
    """

    name: str
    offset: int
    nbytes: int
    source: HostBytes
    begin: int
    wait: int


@dataclass(frozen=True, slots=True)
class CopySchedule:
    """How the weights of a plan are copied that a session copies to a device itself.

    Attributes:
        staging_bytes: Bytes of the host's memory that they pass through, two pieces.
        copies: In their order.
        fed: Weights that stay on the device, and that several partitions read under these names; and where they lie in
            the host's memory.
    """

    staging_bytes: int
    copies: tuple[HostCopy, ...]
    fed: tuple[tuple[ArenaTensor, HostBytes], ...] = ()


class Ranged(Protocol):
    """The programs of a plan for ranges of sizes: see `memonger.runtime.ranged.RangedProgram`, which is one.

    It computes shapes when a size comes, by rules that need onnx: what has one isn't plain data.
    """

    base: Program
    kept: int
    offers_filling: bool

    @property
    def ranges(self) -> Mapping[str, DimRange]: ...

    def at(self, key: tuple[int, ...]) -> Program: ...

    def key(self, inputs: Mapping[str, Any], kept: Mapping[str, int] = ...) -> tuple[int, ...]: ...

    def takes(self, inputs: Mapping[str, Any]) -> bool: ...

    def largest(self) -> Program: ...

    def session_of(self, program: Program) -> int: ...

    def filled_up(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Shape], dict[str, Shape]] | None: ...


@dataclass(frozen=True, slots=True)
class PreparedPlan:
    """How a plan runs.

    Attributes:
        program: Of the whole plan; with ranges of sizes that of the largest, whose open inputs have no shapes.
        steps: What runs, in order.
        batch: The batch it was planned for; None where that isn't open, and of a training step.
        ranged: The programs of a plan for ranges of sizes: of these the only partition is one. Small sizes may have a
            session of their own, the second.
        reads: How weights that stay in the file are read; None where all are in memory.
        gate: Number of the partitions of a training step that run before anything is updated.
        ahead: What is copied to the device while other partitions run; None where nothing is.
    """

    program: Program
    steps: tuple[Partition | PartCopy, ...]
    batch: int | None = None
    ranged: Ranged | None = None
    reads: ReadSchedule | None = None
    gate: int = 0
    ahead: CopySchedule | None = None


def whole(program: Program, batch: int | None = None, ranged: Ranged | None = None) -> PreparedPlan:
    """A plan that runs all its steps in one partition."""
    planned = {tensor.name for tensor in program.planned}
    outputs = {name: name for name in program.outputs if name not in planned}
    return PreparedPlan(program, (Partition(program, live_outs=outputs),), batch, ranged)


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPlan(PreparedPlan):
    """A plan cut into partitions.

    Attributes:
        groups: Of each session what it is made of; not to be kept.
        parts: Of what persists in training: see `PersistentPart`.
        buckets: What ranks add up, in the order in which that begins.
        cuda: How the CUDA provider is set up.
    """

    groups: Iterable[SessionGroup]
    parts: tuple[PersistentPart, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    cuda: Cuda | None = None


@dataclass(frozen=True, slots=True)
class PlanBytes:
    """Bytes that plans need of a device, the most of any: for messages and for what is free.

    Attributes:
        arena: Of an arena.
        workspace: Beside it.
        parameters: Of weights.
        inputs: Of inputs.
    """

    arena: int
    workspace: int
    parameters: int
    inputs: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """Plans of one model, checked, ready to be loaded.

    Attributes:
        name: What the model is called.
        device: Where it is to run.
        threads: Threads within a node that it was planned with.
        sizes: What the plans are for, in words: ``batches 1, 4``.
        plans: Of those that take the shapes of a run the first runs it, plans for ranges of sizes after all others.
        room: What they need.
        cuda: How the CUDA provider is set up.
        limit: Bytes that onnxruntime may take by itself for one run; None: as much as it asks for.
        state: Inputs that are kept, and which output each becomes for the next run.
        maps: Inputs that may be dictionaries, outputs that are lists of them, and the columns of their tables.
        draws: Whether random numbers are drawn.
    """

    name: str
    device: Device
    threads: int
    sizes: tuple[str, ...]
    plans: tuple[PreparedPlan, ...]
    room: PlanBytes
    cuda: Cuda | None
    limit: int | None
    state: Mapping[str, str]
    maps: Mapping[str, Sequence[int | str]]
    draws: bool


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """What a session is asked to be, as far as preparing its plans depends on it; see `memonger.Session`.

    Attributes:
        device: Where to run; None: where the plans say.
        check_weights: Whether weights are compared with their digests.
        check_order: Whether what onnxruntime makes of the models is looked at.
        state: Inputs to keep, and the output that each becomes; None: what the plan was made for.
        has_arenas: Whether each thread has an arena.
        pads: Whether smaller batches are filled up.
    """

    device: str | Device | None
    check_weights: bool
    check_order: bool
    state: Mapping[str, str] | None
    has_arenas: bool
    pads: bool
