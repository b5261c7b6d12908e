"""What onnxruntime's profiler and memory statistics say of one run."""

import json
import re
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from memonger.errors import SessionError
from memonger.ir.element_types import ElementType

if TYPE_CHECKING:
    from memonger.runtime.cuda.pool import Event


# Element types as the profiler writes them.
DTYPES = {
    "float": ElementType.FLOAT, "double": ElementType.DOUBLE, "float16": ElementType.FLOAT16,
    "bfloat16": ElementType.BFLOAT16, "bool": ElementType.BOOL, "string": ElementType.STRING,
    "int8": ElementType.INT8, "int16": ElementType.INT16, "int32": ElementType.INT32, "int64": ElementType.INT64,
    "uint8": ElementType.UINT8, "uint16": ElementType.UINT16, "uint32": ElementType.UINT32,
    "uint64": ElementType.UINT64,
}  # fmt: skip

SUFFIX = "_kernel_time"

_STATISTICS = re.compile(r"(.*?)_[0-9]+(?:,[0-9]+){3},([0-9]+)\n", re.DOTALL)
"""A row: a node's name as it is, line breaks and commas included, a hash, and four numbers; the last is workspace."""


@dataclass(frozen=True, slots=True)
class NodeRun:
    """One execution of a node.

    Attributes:
        name: The node's.
        op: Its operator.
        seconds: How long it ran; on a CUDA device how long its launch took.
        outputs: Type and shape of each tensor it wrote.
        provider: The execution provider that ran it.
        begin: When it began: microseconds since the profile did.
        in_use: Bytes that the session had of its allocator when the node ended; 0 where onnxruntime doesn't say.
        grown: How much more that was than when it began.
    """

    name: str
    op: str
    seconds: float
    outputs: tuple[tuple[str, tuple[int, ...]], ...]
    provider: str = ""
    begin: int = 0
    in_use: int = 0
    grown: int = 0


def read_profile(path: Path, *, last_run: bool = False) -> tuple[NodeRun, ...]:
    """The node executions of a profile, in the order they began; those in subgraphs included.

    Args:
        path: What onnxruntime wrote when the profile ended.
        last_run: Leave out what belongs to earlier runs of the session, also to those that failed.

    Raises:
        SessionError: the file is cut short, as where the disk is full.
    """
    runs = read_runs(path)
    return runs[-1] if last_run else tuple(node for run in runs for node in run)


def read_runs(path: Path) -> tuple[tuple[NodeRun, ...], ...]:
    """The node executions of each run of the session, as `read_profile` gives them.

    Raises:
        SessionError: the file is cut short, as where the disk is full, or shows no run.
    """
    begins, nodes = list[int](), list[NodeRun]()
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for event in (json.loads(line.rstrip().rstrip(",")) for line in file if line.startswith("{")):
                if event["name"] == "model_run":
                    begins.append(event["ts"])
                elif event.get("cat") == "Node" and event["name"].endswith(SUFFIX):
                    said = event["args"]
                    tensors = (pair for tensor in said.get("output_type_shape", ()) for pair in tensor.items())
                    nodes.append(
                        NodeRun(
                            name=event["name"][: -len(SUFFIX)],
                            op=said.get("op_name", ""),
                            seconds=event["dur"] / 1e6,
                            outputs=tuple((kind, tuple(map(int, dims))) for kind, dims in tensors),
                            provider=said.get("provider", ""),
                            begin=event["ts"],
                            in_use=int(said.get("mem_bytes_in_use", 0)),
                            grown=int(said.get("mem_in_use_delta", 0)),
                        )
                    )
        if not begins:
            raise ValueError("no run")
    except (OSError, ValueError, KeyError) as error:
        raise SessionError(
            f"onnxruntime's profile of a run, {path}, is missing or cut short: is {path.parent} full? ({error})"
        ) from error
    begins.sort()
    nodes.sort(key=lambda node: node.begin)  # stable: equal stamps stay in the order they were written
    bounds = [0, *(bisect_left(nodes, begin, key=lambda node: node.begin) for begin in begins[1:]), len(nodes)]
    return tuple(tuple(nodes[start:stop]) for start, stop in pairwise(bounds))


def read_workspace(path: Path) -> dict[str, int]:
    """Bytes of workspace each node's kernel took, by node name, from a node memory statistics file."""
    _, _, text = path.read_bytes().decode(errors="replace").partition("\n")  # after the names of the columns
    rows = sorted((name, int(size)) for name, size in _STATISTICS.findall(text))
    return {name: size for name, size in rows if size > 0}


def workspace_of(runs: Sequence[NodeRun], start: int, events: "Sequence[Event]") -> dict[str, int]:
    """Bytes of workspace each node took on a CUDA device, where above zero.

    Args:
        runs: One execution of each node.
        start: When the profile began, by the profiler's clock.
        events: The session's requests for memory meanwhile.
    """
    from memonger.runtime.cuda.pool import workspace_by_node

    now, since_start = time.time_ns(), time.monotonic_ns()  # some platforms' profilers count from the machine's start
    begin = start if abs(start - now) < abs(start - since_start) else start + now - since_start
    spans = {}
    for run in runs:
        at = begin + run.begin * 1000
        spans[run.name] = (at, at + round(run.seconds * 1e9) + 999)
    return workspace_by_node(events, spans)
