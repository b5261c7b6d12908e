"""protocol: requests and answers as JSON, in the form of the Open Inference Protocol (v2) that KServe and Triton speak.

A request is ``{"inputs": [{"name": ..., "shape": [...], "datatype": "FP32", "data": [...]}]}``, data flat or nested; an
answer has ``outputs`` of the same form, data flat.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from memonger.errors import SessionError

DATATYPES = {
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64,
    "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64, "FP16": np.float16, "FP32": np.float32,
    "FP64": np.float64, "BYTES": np.object_,
}  # fmt: skip
_NAMES = {np.dtype(kind): name for name, kind in DATATYPES.items()}


def read_inputs(tensors: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """The arrays of a request's ``inputs``.

    Raises:
        SessionError: a field is missing or of the wrong kind; it names the input.
    """
    found = {}
    for tensor in tensors:
        try:
            name, kind = tensor["name"], DATATYPES[tensor["datatype"]]
            found[name] = np.asarray(tensor["data"], kind).reshape(tensor["shape"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            name = tensor.get("name", "?") if isinstance(tensor, Mapping) else "?"
            raise SessionError(
                f"input '{name}' can't be read ({type(error).__name__}: {error}): it needs name, shape, data, and a "
                f"datatype of {', '.join(DATATYPES)}."
            ) from error
    return found


def write_outputs(arrays: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """The ``outputs`` of an answer.

    Raises:
        SessionError: an output of a type the protocol has no name for.
    """
    found = []
    for name, array in arrays.items():
        if array.dtype not in _NAMES:
            raise SessionError(f"output '{name}' is {array.dtype}, which has no name in the protocol.")
        found.append(
            {"name": name, "shape": list(array.shape), "datatype": _NAMES[array.dtype], "data": array.ravel().tolist()}
        )
    return found
