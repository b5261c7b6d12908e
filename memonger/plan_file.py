"""file: a planned model on disk. An ordinary ONNX file, its node order the schedule, its layout one metadata string.

A plan file is untrusted input. What is read here is checked for form; `memonger.graph.verify` checks what it means.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from memonger.devices import SEARCHES, Cuda, Stamp
from memonger.errors import LoadError, PlanFileError
from memonger.model.load import load_as_is
from memonger.model.save import save_model
from memonger.model.values import static_shape

KEY = "memonger.plan"

FORMAT = 1

ALIGNMENTS = (64, 128, 256, 512, 1024, 2048, 4096)  # bytes; an arena begins at a page

LARGEST = 2**62  # bytes; sums of two such sizes still fit 64 bits


@dataclass(frozen=True, slots=True)
class Header:
    """What a planned file says beside its model. Sizes are bytes; ``offsets`` are by value name."""

    mode: str
    device: str
    alignment: int
    arena_bytes: int
    offsets: Mapping[str, int]
    stamp: Stamp | None
    threads: int
    workspace: Mapping[str, int] | None
    batch: int | None
    host: frozenset[str] = frozenset()


def graph_digest(model: ir.Model) -> str:
    """A digest of the graph: opsets, nodes, attributes, names, types and shapes; of the weights all but their data."""
    digest = hashlib.sha256()
    digest.update(f"{sorted(model.opset_imports.items())};".encode())
    for graph in model.graphs():
        for value in (*graph.inputs, *graph.outputs, *graph.initializers.values()):
            digest.update(f"{value.name}:{_described(value)};".encode())
        for node in graph:
            digest.update(f"{node.op_identifier()}{node.name}".encode())
            digest.update(",".join(str(v.name) if v is not None else "" for v in node.inputs).encode())
            digest.update(",".join(f"{v.name}:{_described(v)}" for v in node.outputs).encode())
            for name in sorted(node.attributes):
                digest.update(_attribute_bytes(node.attributes[name]))
    return digest.hexdigest()[:32]


def _described(value: ir.Value) -> str:
    tensor = value.const_value
    if tensor is not None:
        return f"{tensor.dtype.name}{list(tensor.shape)}"
    return f"{value.dtype.name if value.dtype is not None else value.type}{static_shape(value)}"


def _attribute_bytes(attribute: ir.Attr) -> bytes:
    if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        return attribute.name.encode()  # its graphs are walked on their own
    return ir.to_proto(attribute).SerializeToString(deterministic=True)


def _to_json(model: ir.Model, header: Header) -> str:
    content: dict[str, Any] = {
        "format": FORMAT,
        "mode": header.mode,
        "device": header.device,
        "alignment": header.alignment,
        "arena_bytes": header.arena_bytes,
        "batch": header.batch,
        "threads": header.threads,
        "graph_digest": graph_digest(model),
        "offsets": dict(header.offsets),
        "workspace": None if header.workspace is None else dict(header.workspace),
        "stamp": None,
    }
    if header.stamp is not None:
        stamp = header.stamp
        content["stamp"] = {
            "runtime": stamp.runtime, "provider": stamp.provider, "machine": stamp.machine, "level": stamp.level
        }  # fmt: skip
        if stamp.cuda is not None:
            content["stamp"]["cuda"] = dataclasses.asdict(stamp.cuda)
    if header.host:
        content["host"] = sorted(header.host)
    return json.dumps(content, separators=(",", ":"))


def load(path: Path) -> tuple[ir.Model, Header]:
    """Read a planned file.

    Raises:
        PlanFileError: no plan in it, a malformed one, a newer format, or a model that isn't the one planned.
    """
    try:
        read = load_as_is(path)
        model, name = read.ir, read.name
    except LoadError as error:
        raise PlanFileError(str(error)) from error
    text = model.metadata_props.get(KEY)
    if text is None:
        raise PlanFileError(f"{path} has no plan in it: make one with `memonger-plan {path} -o PLANNED.onnx`.")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanFileError(f"{name}: its plan is not valid JSON: {error}.") from error
    header = _parse_header(content, name)
    if content["graph_digest"] != graph_digest(model):
        raise PlanFileError(
            f"{name}: its plan was made for another model, or the graph was changed since (the digests differ). "
            "Plan it again."
        )
    return model, header


def _parse_header(content: Any, name: str) -> Header:
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        raise PlanFileError(f"{name}: its plan is malformed: it has no format number.")
    if content["format"] != FORMAT:
        newer = "newer" if content["format"] > FORMAT else "unknown"
        raise PlanFileError(
            f"{name}: its plan is in format {content['format']}, {newer} than this memonger's {FORMAT}. "
            "Upgrade memonger, or plan the model again."
        )
    fields = _Fields(content, name)
    stamp = content.get("stamp")
    if fields.integer("alignment", 1) not in ALIGNMENTS:
        raise PlanFileError(
            f"{name}: its plan is malformed: 'alignment' is {content['alignment']}, and can be one of "
            f"{', '.join(map(str, ALIGNMENTS))} bytes."
        )
    offsets = fields.sizes("offsets", -LARGEST)  # whether they lie in the arena is for the checker to say
    fields.text("graph_digest")
    return Header(
        mode=fields.text("mode"),
        device=fields.text("device"),
        alignment=fields.integer("alignment", 1),
        arena_bytes=fields.integer("arena_bytes", 0),
        offsets=offsets if offsets is not None else {},
        stamp=None if stamp is None else _parse_stamp(_Fields(stamp, name)),
        threads=fields.integer("threads", 0),
        workspace=fields.sizes("workspace"),
        batch=None if content.get("batch") is None else fields.integer("batch", 1),
        host=fields.names("host"),
    )


def _parse_stamp(fields: "_Fields") -> Stamp:
    cuda = fields.content.get("cuda")
    return Stamp(
        runtime=fields.text("runtime"),
        provider=fields.text("provider"),
        machine=fields.text("machine"),
        level=fields.text("level"),
        cuda=None if cuda is None else _parse_cuda(_Fields(cuda, fields.name)),
    )


def _parse_cuda(fields: "_Fields") -> Cuda:
    search = fields.text("convolution_search")
    if search not in SEARCHES:
        _malformed(fields.name, "convolution_search")
    return Cuda(search, fields.flag("max_workspace"), fields.flag("tf32"), fields.flag("deterministic"))


def _malformed(name: str, key: str) -> Any:
    raise PlanFileError(f"{name}: its plan is malformed: '{key}' is missing or of the wrong type.")


class _Fields:
    """Typed reading of untrusted JSON."""

    def __init__(self, content: Any, name: str) -> None:
        self.content: dict[str, Any] = content if isinstance(content, dict) else _malformed(name, "stamp")
        self.name = name

    def text(self, key: str) -> str:
        value = self.content.get(key)
        return value if isinstance(value, str) else _malformed(self.name, key)

    def flag(self, key: str) -> bool:
        value = self.content.get(key)
        return value if isinstance(value, bool) else bool(_malformed(self.name, key))

    def names(self, key: str) -> frozenset[str]:
        value = self.content.get(key, [])
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            _malformed(self.name, key)
        return frozenset(value)

    def integer(self, key: str, least: int) -> int:
        value = self.content.get(key)
        if type(value) is not int or not least <= value < LARGEST:
            return int(_malformed(self.name, key))
        return value

    def sizes(self, key: str, least: int = 0) -> dict[str, int] | None:
        value = self.content.get(key)
        if value is None and key != "offsets":
            return None
        if not isinstance(value, dict) or any(type(v) is not int or not least <= v < LARGEST for v in value.values()):
            return dict(_malformed(self.name, key))
        return value


def save(model: ir.Model, header: Header, path: Path) -> None:
    """Write a planned file.

    Raises:
        PlanFileError: see `save_model`.
    """
    planned = model.clone()
    planned.metadata_props[KEY] = _to_json(model, header)
    save_model(planned, path)


__all__ = ["FORMAT", "KEY", "Header", "PlanFileError", "graph_digest", "load", "save", "save_model"]
