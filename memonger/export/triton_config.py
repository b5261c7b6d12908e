"""triton_config: what Triton's two backends have in common, the model's configuration.

What Triton refuses is taken from its source: ``ValidateModelName`` and ``ValidateIOShape`` in
``triton-inference-server/core``.
"""

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from memonger.errors import PlanError
from memonger.export.package import Package, Tensor, check_name, inputs_of, outputs_of
from memonger.export.pbtxt import Name

TYPES = {
    ir.DataType.FLOAT: "TYPE_FP32", ir.DataType.DOUBLE: "TYPE_FP64", ir.DataType.FLOAT16: "TYPE_FP16",
    ir.DataType.BFLOAT16: "TYPE_BF16", ir.DataType.BOOL: "TYPE_BOOL", ir.DataType.STRING: "TYPE_STRING",
    ir.DataType.INT8: "TYPE_INT8", ir.DataType.INT16: "TYPE_INT16", ir.DataType.INT32: "TYPE_INT32",
    ir.DataType.INT64: "TYPE_INT64", ir.DataType.UINT8: "TYPE_UINT8", ir.DataType.UINT16: "TYPE_UINT16",
    ir.DataType.UINT32: "TYPE_UINT32", ir.DataType.UINT64: "TYPE_UINT64",
}  # fmt: skip

QUEUE_DELAY = 1000  # microseconds a request waits for others to fill a preferred batch


def check_model_name(name: str) -> None:
    """Triton takes the name, as that of a folder and in a URL.

    Raises:
        PlanError: it doesn't.
    """
    pattern = r"(?!\.)(?!.*\.\.)[A-Za-z0-9._~-]{1,200}"
    words = "for Triton it is a folder and part of a URL, so letters, digits and ._~- without '..' or a dot in front"
    check_name(name, pattern, words)


def config(
    package: Package, backend: str, file: str, batches: Sequence[int] | None, parameters: dict[str, str]
) -> dict[str, Any]:
    """The fields of a ``ModelConfig``.

    Args:
        package: The model.
        backend: Triton's name for what runs it.
        file: What the backend loads from a version folder.
        batches: Batches to form from requests; None: requests are run as they come.
        parameters: The backend's own parameters.

    Raises:
        PlanError: an input or output that Triton has no type for, or a shape that it refuses.
    """
    plan, batched = package.largest, batches is not None
    content: dict[str, Any] = {
        "name": package.name,
        "backend": backend,
        "default_model_filename": file,
        "max_batch_size": max(batches) if batches else 0,
        "input": [_port(one, "input", batched) for one in inputs_of(plan)],
        "output": [_port(one, "output", batched) for one in outputs_of(plan)],
        "instance_group": {"count": package.instances, "kind": Name("KIND_CPU")},
        "version_policy": {"specific": {"versions": 1}},
    }
    if batches:
        content["dynamic_batching"] = {
            "preferred_batch_size": sorted(batches), "max_queue_delay_microseconds": QUEUE_DELAY
        }  # fmt: skip
    content["parameters"] = [{"key": key, "value": {"string_value": text}} for key, text in parameters.items()]
    return content


def _port(tensor: Tensor, kind: str, batched: bool) -> dict[str, Any]:
    if not tensor.name:
        raise PlanError(f"an {kind} of the model has no name, which Triton refuses: name it and plan the model again.")
    if tensor.dtype not in TYPES:
        raise PlanError(f"{kind} '{tensor.name}' is {tensor.dtype.name}, which Triton has no type for.")
    dims = tensor.dims[1:] if batched else tensor.dims
    if not dims and not batched:
        raise PlanError(
            f"{kind} '{tensor.name}' is a scalar, which Triton refuses: give it a dimension of 1 and plan again."
        )
    if any(dim == 0 for dim in dims):
        raise PlanError(f"{kind} '{tensor.name}' is {list(tensor.dims)}: Triton refuses dimensions of 0.")
    port: dict[str, Any] = {"name": tensor.name, "data_type": Name(TYPES[tensor.dtype]), "dims": dims or (1,)}
    if not dims:
        port["reshape"] = {}
    return port
