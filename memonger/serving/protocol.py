"""protocol: requests and answers as JSON, in the form of the Open Inference Protocol (v2) that KServe and Triton speak.

A request is ``{"inputs": [{"name": ..., "shape": [...], "datatype": "FP32", "data": [...]}]}``, data flat or nested; an
answer has ``outputs`` of the same form, data flat.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from memonger.errors import SessionError

DATATYPES: dict[str, Any] = {
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64,
    "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64, "FP16": np.float16, "FP32": np.float32,
    "FP64": np.float64, "BF16": ir.DataType.BFLOAT16.numpy(), "BYTES": np.object_,
}  # fmt: skip
LONGEST_MESSAGE = 500
_NAMES = {np.dtype(kind): name for name, kind in DATATYPES.items()}


def datatype_of(kind: ir.DataType) -> str:
    """The protocol's name for a type; onnx's own where it has none."""
    return _NAMES.get(kind.numpy(), kind.name)


def read_request(body: bytes) -> dict[str, np.ndarray]:
    """The arrays of a request, from the JSON that was sent.

    Raises:
        SessionError: it is no JSON, or as `read_inputs`.
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise SessionError(f"the request is no JSON that can be read: {error}.") from error
    return read_inputs(content.get("inputs") if isinstance(content, dict) else None)


def read_inputs(tensors: object) -> dict[str, np.ndarray]:
    """The arrays of a request's ``inputs``.

    Raises:
        SessionError: there is no such list, a field is missing or of the wrong kind, numbers don't fit the datatype, or
            an input comes twice; it names the input.
    """
    if not isinstance(tensors, list):
        raise SessionError("a request is a JSON object with 'inputs', a list of tensors.")
    arrays: dict[str, np.ndarray] = {}
    for tensor in tensors:
        if not isinstance(tensor, Mapping):
            raise SessionError("each of a request's inputs is a JSON object with name, shape, datatype and data.")
        name = tensor.get("name", "?")
        try:
            if (name := tensor["name"]) in arrays:
                raise ValueError("it is given twice")
            arrays[name] = _shaped(_array(tensor["data"], tensor["datatype"]), tensor["shape"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise SessionError(
                f"input '{name}' can't be read ({type(error).__name__}: {error}): it needs name, shape, data, and a "
                f"datatype of {', '.join(DATATYPES)}."
            ) from error
    return arrays


def _array(data: object, datatype: str) -> np.ndarray:
    """The data as an array of the datatype, every value as it was sent: none becomes an integer or infinite."""
    kind = np.dtype(DATATYPES[datatype])
    if isinstance(data, np.ndarray):
        return data.astype(kind, casting="safe", copy=False)
    if kind.kind == "O":
        texts = np.asarray(data, object)
        if not all(isinstance(text, str) for text in texts.flat):
            raise TypeError("BYTES takes text")
        return texts
    sent, is_real = np.asarray(data), kind.kind in "fV"
    if sent.size and sent.dtype.kind not in ("biuf" if is_real else "biu"):
        raise TypeError(f"{datatype} doesn't take {sent.dtype.type.__name__}")
    with np.errstate(over="ignore"):
        array = sent.astype(kind)
    if not (np.isfinite(array.astype(np.float64)).all() if is_real else np.array_equal(array, sent)):
        raise ValueError(f"a value doesn't fit {datatype}")
    return array


def _shaped(array: np.ndarray, shape: object) -> np.ndarray:
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise TypeError("a shape is a list of integers from 0 on")
    return array.reshape(shape)


def write_outputs(arrays: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """The ``outputs`` of an answer.

    Raises:
        SessionError: an output of a type the protocol has no name for.
    """
    outputs = []
    for name, array in arrays.items():
        if array.dtype not in _NAMES:
            raise SessionError(f"output '{name}' is {array.dtype}, which has no name in the protocol.")
        outputs.append(
            {"name": name, "shape": list(array.shape), "datatype": _NAMES[array.dtype], "data": array.ravel().tolist()}
        )
    return outputs


def write_body(arrays: Mapping[str, np.ndarray]) -> bytes:
    """An answer as it is sent. JSON has neither NaN nor infinity: null stands for them.

    Raises:
        SessionError: as `write_outputs`.
    """
    outputs = write_outputs(arrays)
    for output in outputs:
        if output["datatype"].startswith(("FP", "BF")):
            output["data"] = [number if math.isfinite(number) else None for number in output["data"]]
    return json.dumps({"outputs": outputs}).encode()


def message(error: Exception) -> str:
    """What to tell a client: one line of at most 500 characters, whatever the names in its request were."""
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in str(error)).split())
    return text if len(text) <= LONGEST_MESSAGE else f"{text[: LONGEST_MESSAGE - 1]}…"
