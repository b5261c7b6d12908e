"""Packs weights for the file of a plan: by onnxruntime's own kernels, a few nodes at a time."""

import re
from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import onnx
import onnx_ir as ir

from memonger.devices import CPU, Stamp
from memonger.errors import SessionError
from memonger.files import ScratchFolder, in_small_writes
from memonger.ir.extract import extract
from memonger.ir.packed import AT_ONCE, SMALLEST, Copy, is_packing, packed_buffers, packed_of, reads_transposed
from memonger.runtime import onnxruntime, ort, process_memory
from memonger.runtime.backend import backend
from memonger.runtime.weights import session_of

_ENTRY = re.compile(r"(\w+\+\d+)((?:\|\d+;\d+;\d+)+)")
_FILE = "packed.data"

AHEAD = 4
"""Batches of weights that are packed, or being packed, while others are taken."""


def packs_here(stamp: Stamp | None) -> bool:
    """Whether weights can be packed here for a plan: it is bound to this machine's processor and onnxruntime."""
    if stamp is None or stamp.provider != CPU.provider or not onnxruntime.is_available():
        return False
    return (stamp.runtime, stamp.machine) == (ort.runtime_name(), backend(CPU).machine_name())


def packed_weights(model: ir.Model, among: Collection[ir.Value]) -> Iterator[Copy]:
    """Packed copies of weights among these: those that the model's file has already, and then others in their order.

    A file is gone when the next weight is asked for. Weights that onnxruntime packs otherwise, or not at all, are left
    out: they are packed when a session is made, as ever. A thread of its own packs them, from now on.
    """
    there, batches, size, own = list[Copy](), list[list[ir.Value]](), AT_ONCE, set(model.graph.initializers.values())
    for value in among:
        tensor, packed, sizes = value.const_value, packed_of(value.const_value), packed_buffers(value)
        if tensor is None or value not in own or tensor.nbytes < SMALLEST or not sizes:
            continue
        if len(packed) == len(sizes) and isinstance(tensor, ir.ExternalTensor):
            there += (Copy(value, one.key, Path(tensor.path), tuple(one.buffers())) for one in packed)
            continue
        if size >= AT_ONCE:
            batches.append([])
            size = 0
        batches[-1].append(value)
        size += tensor.nbytes
    packer = ThreadPoolExecutor(1)
    begun, left = deque(packer.submit(_packed, model, batch) for batch in batches[:AHEAD]), iter(batches[AHEAD:])

    def copies() -> Iterator[Copy]:
        while begun:
            packed = begun.popleft().result()
            begun.extend(packer.submit(_packed, model, batch) for batch in islice(left, 1))
            yield from packed.copies
        packer.shutdown()

    return chain(there, copies())


class _Packed(NamedTuple):
    """Copies of a batch of weights, in files that are there as long as this is."""

    copies: list[Copy]
    folder: ScratchFolder


def _packed(model: ir.Model, weights: list[ir.Value]) -> _Packed:
    """Those of these weights: of each as kernels read it that read it as it is, and then as those transposed.

    Two copies of a weight may have the same length, and onnxruntime doesn't say which is which: so they are packed by
    models of their own, of the first node that reads each.
    """
    folder, copies = ScratchFolder(), list[Copy]()
    packed = {way: _packed_one_way(model, weights, way, folder.path / str(way)) for way in (False, True)}
    for value in weights:
        own = [packed[way].get(value) for way in packed_buffers(value)]
        copies += (copy for copy in own if copy is not None and None not in own)
    process_memory.give_back()
    return _Packed(copies, folder)


def _packed_one_way(model: ir.Model, weights: list[ir.Value], way: bool, folder: Path) -> dict[ir.Value, Copy]:
    """Copies of those that kernels read this way: transposed or as they are."""
    wanted = {value for value in weights if way in packed_buffers(value)}
    readers = {
        value: node
        for node in reversed(model.graph)
        for index, value in enumerate(node.inputs)
        if value in wanted and is_packing(node, index) and reads_transposed(node) is way and _has_types(node, value)
    }
    if not readers:
        return {}
    first = set(readers.values())
    nodes = [node for node in model.graph if node in first]
    folder.mkdir()
    path = folder / "packed.onnx"
    entries = {
        **ort.RUN_ONCE,
        "session.optimized_model_external_initializers_file_name": _FILE,
        "session.optimized_model_external_initializers_min_size_in_bytes": str(SMALLEST),
        "session.save_external_prepacked_constant_initializers": "1",
    }
    try:
        part = extract(model, nodes, [node.outputs[0] for node in nodes])
        for value in part.graph.inputs:
            value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
        with in_small_writes(folder / _FILE):
            session_of(part, CPU, ort.SessionSettings(threads=1, optimized=path, entries=entries))
        message = onnx.load(path, load_external_data=False)
    except (SessionError, OSError):
        return {}
    found = {each.name: {e.key: e.value for e in each.external_data} for each in message.graph.initializer}
    copies = dict[ir.Value, Copy]()
    for value in wanted:
        said = found.get(str(value.name), {})
        entry = [_ENTRY.fullmatch(text) for key, text in said.items() if key.startswith("prepacked_")]
        if len(entry) == 1 and entry[0]:
            copy = Copy(value, entry[0][1], folder / _FILE, _buffers(entry[0][2]))
            if tuple(length for _, length in copy.buffers) == packed_buffers(value)[way]:
                copies[value] = copy
    return copies


def _has_types(node: ir.Node, weight: ir.Value) -> bool:
    """Whether the types of what a node reads are known: what only a run can size may have none.

    Beside a weight of float32 kernels read float32.
    """
    is_float = weight.const_value is not None and weight.const_value.dtype == ir.DataType.FLOAT
    return is_float or all(v is None or v.type is not None or v.const_value is not None for v in node.inputs)


def _buffers(text: str) -> tuple[tuple[int, int], ...]:
    """Where buffers lie in a file, and their bytes, of ``|offset;length;0`` of each."""
    entries = (entry.split(";") for entry in text[1:].split("|"))
    return tuple((int(begin), int(length)) for begin, length, _ in entries)
