"""triton_config: what Triton's two backends have in common, the model's configuration, in protobuf's text format.

What Triton refuses is taken from its source: ``ValidateModelName`` and ``ValidateIOShape`` in
``triton-inference-server/core``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memonger.errors import PlanError
from memonger.ir.element_types import ElementType
from memonger.serving.package import Naming, Package, ServedModel, TensorSpec, inputs_of, outputs_of
from memonger.serving.protocol import DATATYPES


@dataclass(frozen=True, slots=True)
class Name:
    """A name of an enumeration: written without quotes."""

    text: str


def text_of(message: Mapping[str, object], indent: str = "") -> str:
    """A message, a field a line. Sequences are repeated fields.

    Raises:
        TypeError: a value that isn't a mapping, sequence, `Name`, text, integer or truth value.
    """
    lines = []
    for key, value in message.items():
        several = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
        lines += [_field(key, one, indent) for one in several]
    return "".join(lines)


def _field(key: str, value: object, indent: str) -> str:
    if isinstance(value, Mapping):
        return f"{indent}{key} {{\n{text_of(value, indent + '  ')}{indent}}}\n"
    return f"{indent}{key}: {_scalar(value)}\n"


def _scalar(value: object) -> str:
    match value:
        case Name():
            return value.text
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case str():
            return '"' + "".join(_escaped(byte) for byte in value.encode()) + '"'
    raise TypeError(f"{value!r} has no place in a text message.")


def _escaped(byte: int) -> str:
    """A byte of a text, as C writes it: every tool reads that the same."""
    if chr(byte) in '"\\':
        return "\\" + chr(byte)
    return chr(byte) if 32 <= byte < 127 else f"\\{byte:03o}"


TYPES = {
    ElementType.from_numpy(np.dtype(kind)): f"TYPE_{'STRING' if name == 'BYTES' else name}"
    for name, kind in DATATYPES.items()
}
"""Triton's names of types are those of the protocol, but for text."""

NAMING = Naming(
    r"(?!\.)(?!.*\.\.)[A-Za-z0-9._~-]{1,200}",
    "for Triton it is a folder and part of a URL, so letters, digits and ._~- without '..' or a dot in front",
)

QUEUE_DELAY = 1000  # microseconds a request waits for others to fill a preferred batch


def config(
    package: Package, model: ServedModel, file: str, batches: Sequence[int] | None, parameters: Mapping[str, str]
) -> dict[str, Any]:
    """The fields of a ``ModelConfig`` for Triton's ONNX Runtime backend.

    Args:
        package: What is exported.
        model: Its model.
        file: What the backend loads from a version folder.
        batches: Batches to form from requests; None: requests are run as they come.
        parameters: The backend's own parameters.

    Raises:
        PlanError: an input or output that Triton has no type for, or a shape that it refuses.
    """
    return {
        **_interface(model.name, [model], batches, is_open=False),
        **_backend("onnxruntime", file, package.instances),
        **({"dynamic_batching": _batching(batches)} if batches else {}),
        "parameters": [{"key": key, "value": {"string_value": text}} for key, text in parameters.items()],
    }


def plain_config(name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], file: str) -> dict[str, Any]:
    """The same for a model without a plan, whose requests run as they come.

    Raises:
        PlanError: a name, type or shape that Triton refuses.
    """
    NAMING.check(name)
    ports = {kind: [_port(one, kind, False) for one in own] for kind, own in (("input", inputs), ("output", outputs))}
    return {"name": name, "max_batch_size": 0, **ports, **_backend("onnxruntime", file, 1)}


def python_config(package: Package, file: str, batches: Sequence[int] | None) -> dict[str, Any]:
    """The same for its Python backend: several models are one there, their tensors optional and named ``MODEL/NAME``.

    A request that isn't begun in time is rejected: Triton's own status for that is 503.
    """
    wait = {"timeout_action": Name("REJECT"), "default_timeout_microseconds": round(package.sharing.wait * 1e6)}
    return {
        **_interface(package.name, package.models, batches),
        **_backend("python", file, package.instances),
        "dynamic_batching": {**(_batching(batches) if batches else {}), "default_queue_policy": wait},
    }


def ensemble_config(package: Package, model: ServedModel, batches: Sequence[int] | None) -> dict[str, Any]:
    """The configuration under which requests ask for one of several models: it costs neither a process nor a copy."""
    plan = model.largest
    maps = {
        f"{kind}_map": [{"key": f"{model.name}/{one.name}", "value": one.name} for one in tensors]
        for kind, tensors in (("input", inputs_of(plan)), ("output", outputs_of(plan)))
    }
    interface = _interface(model.name, [model], batches)
    for port in (*interface["input"], *interface["output"]):
        port.pop("reshape", None)  # the model of all does that: twice, and Triton finds other shapes there
    return {
        **interface,
        "platform": "ensemble",
        "ensemble_scheduling": {"step": [{"model_name": package.name, "model_version": -1, **maps}]},
    }


def _interface(
    name: str, models: Sequence[ServedModel], batches: Sequence[int] | None, *, is_open: bool = True
) -> dict[str, Any]:
    """Name, largest batch, inputs and outputs; ``is_open``: smaller batches are taken where Triton knows of none."""
    content: dict[str, Any] = {"name": name, "max_batch_size": max(batches) if batches else 0}
    for kind, tensors_of in (("input", inputs_of), ("output", outputs_of)):
        content[kind] = []
        for model in models:
            for tensor in tensors_of(model.largest):
                port = _port(tensor, kind, batches is not None)
                if batches is None and is_open and model.batches is not None:
                    port["dims"] = (-1, *tensor.dims[1:])
                if len(models) > 1:
                    port |= {"name": f"{model.name}/{tensor.name}", **({"optional": True} if kind == "input" else {})}
                content[kind].append(port)
    return content


def _backend(backend: str, file: str, instances: int) -> dict[str, Any]:
    return {
        "backend": backend,
        "default_model_filename": file,
        "instance_group": {"count": instances, "kind": Name("KIND_CPU")},
        "version_policy": {"specific": {"versions": 1}},
    }


def _batching(batches: Sequence[int]) -> dict[str, Any]:
    return {"preferred_batch_size": sorted(batches), "max_queue_delay_microseconds": QUEUE_DELAY}


def _port(tensor: TensorSpec, kind: str, batched: bool) -> dict[str, Any]:
    if not tensor.name:
        raise PlanError(f"an {kind} of the model has no name, which Triton refuses: name it and plan the model again.")
    if (data_type := TYPES.get(ElementType(tensor.dtype))) is None:
        raise PlanError(f"{kind} '{tensor.name}' is {tensor.dtype.name}, which Triton has no type for.")
    dims = tensor.dims[1:] if batched else tensor.dims
    if not dims and not batched:
        raise PlanError(
            f"{kind} '{tensor.name}' is a scalar, which Triton refuses: give it a dimension of 1 and plan again."
        )
    if any(dim == 0 for dim in dims):
        raise PlanError(f"{kind} '{tensor.name}' is {list(tensor.dims)}: Triton refuses dimensions of 0.")
    port: dict[str, Any] = {"name": tensor.name, "data_type": Name(data_type), "dims": dims or (1,)}
    if not dims:
        port["reshape"] = {}
    return port
