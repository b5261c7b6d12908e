"""A plan with chunks whose products pack their weights, run: copies of one structure share one onnxruntime session.

The planned model has a copy of each node for every chunk, with addresses of its own. In one session each copy of a
product would prepack its weights again. Where that is little (`memonger.graph.session_memory.shares_sessions`), all
runs in one session nevertheless: each has threads of its own, which have to wake up for each run. Here the schedule is
cut into *stretches*, the nodes of one chunk each. Stretches of one structure run in one session, which is bound once
for each of them. What cuts values into parts, and joins them, is copied by numpy; a part that lies inside its whole
isn't copied at all.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir

from memonger.graph.aliasing import windows
from memonger.graph.session_memory import shares_sessions
from memonger.ir.extract import extract
from memonger.ir.marks import CHUNK, without_slice
from memonger.ir.parts import Part, elements, is_marked, parts_of
from memonger.ir.values import attribute_bytes, static_shape, subgraphs
from memonger.plan import Plan
from memonger.runtime import feeds as feeding
from memonger.runtime import ort
from memonger.runtime.arena import Arena, ArenaTensor
from memonger.runtime.binding import Binding, overwritten, read_output
from memonger.runtime.engine import Engine
from memonger.runtime.program import Program, SessionGroup, program_of

_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Stretch:
    """Nodes that run in one session, one after the other, under the names of the first stretch of their structure.

    Attributes:
        engine: Index of the session among those of the plan.
        program: What it runs; the addresses are this stretch's own.
        received: What it reads of the arena.
        taken: What else it reads: the session's name → the model's.
        kept: What it writes and onnxruntime holds: the session's name → the model's.
    """

    engine: int
    program: Program
    received: tuple[ArenaTensor, ...]
    taken: Mapping[str, str]
    kept: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Copied:
    """A part to copy out of its whole, or into it.

    Attributes:
        whole: A tensor of the arena, or the name of an input.
        part: A tensor of the arena.
        index: The part's elements of the whole.
        is_cut: Whether the whole is read.
    """

    whole: ArenaTensor | str
    part: ArenaTensor
    index: tuple[slice, ...]
    is_cut: bool


@dataclass(frozen=True, slots=True)
class Chunks:
    """A plan cut into stretches, and the copies between them.

    Attributes:
        program: Of the whole plan.
        steps: What runs, in order.
        groups: Of each session a model, and what of the plan its first stretch is.
        constants: Outputs that nothing computes.
    """

    program: Program
    steps: tuple[Stretch | Copied, ...]
    groups: tuple[SessionGroup, ...]
    constants: Mapping[str, np.ndarray]


def is_chunked(plan: Plan) -> bool:
    """Whether a plan has copies that are to share a session, and can: no node has subgraphs, no input a default."""
    graph = plan.model.graph
    if not shares_sessions(plan.model) or any(map(subgraphs, graph)):
        return False
    return not any(value.name in graph.initializers for value in graph.inputs)


def cut_up(plan: Plan) -> Chunks:
    """Cut a plan that is chunked into stretches; those of one structure are to share a session."""
    program = program_of(plan)
    cutter, steps = _Cutter(plan, program), list[Stretch | Copied]()
    for mark, nodes in groupby(plan.model.graph, cutter.mark_of):
        if mark is None:
            steps += [copied for node in nodes for copied in cutter.copied(node)]
        else:
            steps.append(cutter.stretch(list(nodes)))
    fixed = (value for value in plan.model.graph.outputs if value.producer() is None)
    constants = {str(v.name): np.array(v.const_value.numpy()) for v in fixed if v.const_value is not None}
    return Chunks(program, tuple(steps), tuple(cutter.groups), constants)


@dataclass(frozen=True, slots=True)
class _StretchValues:
    """What nodes read and write.

    Attributes:
        outer: What they read of others, and constants that are others for each chunk.
        inner: What they write.
        kept: Of that what onnxruntime keeps for others.
    """

    outer: tuple[ir.Value, ...]
    inner: tuple[ir.Value, ...]
    kept: set[ir.Value]


class _Cutter:
    """Makes the stretches of a plan, and one model for those of one structure."""

    def __init__(self, plan: Plan, program: Program) -> None:
        self.program, self.groups, self._model = program, list[SessionGroup](), plan.model
        self._tensors = {tensor.name: tensor for tensor in program.planned}
        self._inputs = {one.name: one for one in program.inputs}
        self._of_structure: dict[Any, tuple[int, list[str]]] = {}
        self._constants: dict[str, np.ndarray] = {}

    def mark_of(self, node: ir.Node) -> str | None:
        """What tells a node's stretch from its neighbours; None for one that is a copy."""
        parts = parts_of(node) if is_marked(node) else ()
        if parts and all(self._can_copy(part) for part in parts):
            return None
        return node.metadata_props.get(CHUNK, "")

    def _can_copy(self, part: Part) -> bool:
        whole = part.whole.name in self._tensors or (part.is_cut and part.whole.name in self._inputs)
        return (
            whole
            and part.part.name in self._tensors
            and part.whole.dtype is not None
            and part.whole.dtype.bitwidth >= 8
        )

    def copied(self, node: ir.Node) -> Iterator[Copied]:
        """What has to be copied: not the parts that lie inside their whole."""
        inside = {part: byte for part, _, byte in windows(node)}
        for one in parts_of(node):
            whole, part = self._tensors.get(str(one.whole.name), str(one.whole.name)), self._tensors[str(one.part.name)]
            if isinstance(whole, ArenaTensor) and part.offset - whole.offset == inside.get(one.part):
                continue
            yield Copied(whole, part, elements(one.axis, one.begin, one.begin + part.shape[one.axis]), one.is_cut)

    def stretch(self, nodes: Sequence[ir.Node]) -> Stretch:
        """The stretch of these nodes."""
        values = self._values(nodes)
        key = self._structure(nodes, values)
        if key not in self._of_structure:
            self._of_structure[key] = len(self.groups), [str(v.name) for v in (*values.outer, *values.inner)]
            self.groups.append(self._group(nodes, values))
        engine, names = self._of_structure[key]
        name_of = dict(zip((*values.outer, *values.inner), names, strict=True))
        received = (v for v in values.outer if v.name in self._tensors)
        return Stretch(
            engine,
            self._program(nodes, values, name_of),
            tuple(self._tensors[str(v.name)]._replace(name=name_of[v]) for v in received),
            {name_of[v]: str(v.name) for v in values.outer if v.name not in self._tensors and v.const_value is None},
            {name_of[v]: str(v.name) for v in values.inner if v in values.kept},
        )

    def _values(self, nodes: Sequence[ir.Node]) -> _StretchValues:
        own = set(nodes)
        inner = dict.fromkeys(value for node in nodes for value in node.outputs)
        read = dict.fromkeys(v for node in nodes for v in node.inputs if v is not None and v not in inner)
        held = (v for v in inner if v.name and v.name not in self._tensors)
        kept = {v for v in held if v.is_graph_output() or any(user not in own for user, _ in v.uses())}
        return _StretchValues(tuple(v for v in read if not self._is_weight(v)), tuple(inner), kept)

    def _is_weight(self, value: ir.Value) -> bool:
        return value.producer() is None and value.name not in self._inputs and not _is_slice_of_constant(value)

    def _structure(self, nodes: Sequence[ir.Node], values: _StretchValues) -> Any:
        """The same for stretches that one session can run; weights are known by their names."""
        number: dict[ir.Value, int] = {v: index for index, v in enumerate((*values.outer, *values.inner))}
        return (
            tuple((v.dtype, static_shape(v), str(v.type)) for v in values.outer),
            tuple((v.name in self._tensors, v in values.kept, v.dtype, static_shape(v)) for v in values.inner),
            tuple(
                (
                    node.op_identifier(), node.version, len(node.outputs),
                    tuple(None if v is None else number.get(v, v.name) for v in node.inputs),
                    tuple(attribute_bytes(attribute) for _, attribute in sorted(node.attributes.items())),
                )
                for node in nodes
            ),
        )  # fmt: skip

    def _group(self, nodes: Sequence[ir.Node], values: _StretchValues) -> SessionGroup:
        """A model of these nodes alone."""
        exposed = (v for v in values.inner if v.name in self._tensors or v in values.kept)
        program = self._program(nodes, values, {v: str(v.name) for v in (*values.outer, *values.inner)})
        fed = {v for v in values.outer if v.const_value is not None}
        return SessionGroup(extract(self._model, nodes, exposed, fed), (0,), (program,))

    def _program(self, nodes: Sequence[ir.Node], values: _StretchValues, name_of: Mapping[ir.Value, str]) -> Program:
        """What of the plan's program is theirs, under a session's names."""
        fed = (v for v in values.outer if v.name in self._inputs)
        planned = (v for v in values.inner if v.name in self._tensors)
        return replace(
            self.program,
            inputs=tuple(replace(self._inputs[str(v.name)], name=name_of[v]) for v in fed),
            outputs=tuple(name_of[v] for v in values.inner if v in values.kept),
            kinds={name_of[v]: v.type for v in values.kept},
            planned=tuple(self._tensors[str(v.name)]._replace(name=name_of[v]) for v in planned),
            constants={name_of[v]: self._constant(v) for v in values.outer if v.const_value is not None},
            order=tuple(str(node.name) for node in nodes),
            first_update=len(nodes),
        )

    def _constant(self, value: ir.Value) -> np.ndarray:
        """A copy of a constant: one for all stretches that read it."""
        name = str(value.name)
        if name not in self._constants:
            assert value.const_value is not None
            self._constants[name] = np.array(value.const_value.numpy())
        return self._constants[name]


_ELEMENTWISE = frozenset(
    {"Add", "And", "Div", "Equal", "Expand", "Max", "Min", "Mul", "Or", "Pow", "ScatterND", "Sub", "Where"}
)
"""Operators whose kernels do the same for a constant input as for a computed one: nothing is packed beforehand."""


def _is_slice_of_constant(value: ir.Value) -> bool:
    """Whether it is a constant that was cut for its chunk, and may be fed: so that chunks can share a session."""
    name = str(value.name)
    if value.const_value is None or without_slice(name) == name or value.const_value.dtype not in _PLAIN:
        return False
    return all(not user.domain and user.op_type in _ELEMENTWISE for user, _ in value.uses())


_PLAIN = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL})


class ChunkedBinding:
    """A plan with chunks bound to addresses, ready to run: what `Binding` is to a plan that runs in one session.

    Args:
        program: Of the whole plan.
        steps: What runs, in order.
        engines: The sessions.
        arena: Where planned values lie, on the host.
        constants: Outputs that nothing computes.
    """

    def __init__(
        self,
        program: Program,
        steps: Sequence[Stretch | Copied],
        engines: Sequence[Engine],
        arena: Arena,
        constants: Mapping[str, np.ndarray] = _NONE,
    ) -> None:
        self.program, self.arena, self._held = program, arena, dict[str, Any]()
        self._constants = constants
        self._passed = {i.name: i.kind for i in program.inputs if i.name in program.outputs}
        self._planned = {tensor.name: tensor for tensor in program.planned}
        self._bindings: list[Binding] = []
        self._steps = [self._step(step, engines) for step in steps]

    def _step(self, step: Stretch | Copied, engines: Sequence[Engine]) -> Callable[[feeding.Feeds], None]:
        if isinstance(step, Copied):
            return self._copy(step)
        binding = Binding(step.program, engines[step.engine], self.arena, received=step.received)
        self._bindings.append(binding)
        fed = {i.name: step.taken[i.name] for i in step.program.inputs}
        handed = {name: own for name, own in step.taken.items() if name not in fed}

        def run(inputs: feeding.Feeds) -> None:
            given = {name: inputs[own] for name, own in fed.items() if own in inputs}
            binding.run(given, handed={name: self._held[own] for name, own in handed.items()})
            self._held.update((step.kept[name], value) for name, value in binding.held(step.kept).items())

        return run

    def _copy(self, step: Copied) -> Callable[[feeding.Feeds], None]:
        part = self._array(step.part)
        if isinstance(step.whole, str):
            name, index = step.whole, step.index
            return lambda inputs: np.copyto(part, _on_host(inputs[name])[index])
        window = self._array(step.whole)[step.index]
        target, source = (part, window) if step.is_cut else (window, part)
        return lambda inputs: np.copyto(target, source)

    def _array(self, tensor: ArenaTensor) -> np.ndarray:
        return self.arena.read(tensor.offset, tensor.dtype.numpy(), tensor.shape, copy=False)

    def run(self, inputs: feeding.Feeds, targets: Mapping[str, Any] = _NONE) -> None:
        """Run once; `results` gives what came out.

        Args:
            inputs: Checked by the caller.
            targets: Tensors that outputs are written to, by the outputs' names.

        Raises:
            SessionError: the runtime failed, or didn't follow the planned order; targets overlap.
        """
        lost = overwritten(self.arena, inputs, targets)
        inputs = {name: feeding.copy_of(feed) if name in lost else feed for name, feed in inputs.items()}
        self._held.clear()
        for name, kind in self._passed.items():
            self._held[name] = feeding.to_ortvalue(feeding.copy_of(inputs[name]), kind)
        for step in self._steps:
            step(inputs)
        for name, target in targets.items():
            tensor = self._planned[name]
            self.arena.copy_out(tensor.offset, feeding.address_of(target), tensor.nbytes)

    def run_plain(self, inputs: feeding.Feeds, copy: bool) -> None:
        """Nothing: stretches hand values to each other, see `memonger.runtime.binding.Binding.run_plain`."""

    def forget_results(self) -> None:
        """Let go what the last run left that onnxruntime allocated."""
        self._held.clear()
        for binding in self._bindings:
            binding.forget_results()

    def results(self, targets: Mapping[str, Any], copy: bool) -> dict[str, Any]:
        """The outputs of the last run by name, as `memonger.Session.run` returns them."""
        return {name: targets[name] if name in targets else self._result(name, copy) for name in self.program.outputs}

    def _result(self, name: str, copy: bool) -> Any:
        if name in self._constants:
            return self._constants[name].copy()
        if name not in self._planned:
            return feeding.to_python(ort.wrap(self._held[name]), self.program.kinds.get(name))
        return read_output(self.arena, self._planned[name], copy)


def _on_host(feed: feeding.Feed) -> np.ndarray:
    """An array over a tensor of the host."""
    if isinstance(feed, np.ndarray):
        return feed
    dtype, shape = feeding.described(feed)
    assert dtype is not None
    assert shape is not None
    return feeding.as_bytes(feed).view(dtype.numpy()).reshape(shape)
