"""Element types of tensors, by ONNX's numbers: what runs a plan needs no more of ONNX than these."""

from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np


class ElementType(IntEnum):
    """Type of a tensor's elements, with the number and the name that ONNX has for it (``TensorProto.DataType``)."""

    UNDEFINED = 0
    FLOAT = 1
    UINT8 = 2
    INT8 = 3
    UINT16 = 4
    INT16 = 5
    INT32 = 6
    INT64 = 7
    STRING = 8
    BOOL = 9
    FLOAT16 = 10
    DOUBLE = 11
    UINT32 = 12
    UINT64 = 13
    COMPLEX64 = 14
    COMPLEX128 = 15
    BFLOAT16 = 16
    FLOAT8E4M3FN = 17
    FLOAT8E4M3FNUZ = 18
    FLOAT8E5M2 = 19
    FLOAT8E5M2FNUZ = 20
    UINT4 = 21
    INT4 = 22
    FLOAT4E2M1 = 23
    FLOAT8E8M0 = 24
    UINT2 = 25
    INT2 = 26
    FLOAT6E2M3 = 27
    FLOAT6E3M2 = 28

    @staticmethod
    def from_numpy(dtype: np.dtype[Any]) -> "ElementType":
        """The element type of arrays of a numpy type; of text and other objects ``STRING``.

        Raises:
            TypeError: there is none, as for bytes in another order than the machine's.
        """
        if dtype.kind in "OUS":
            return ElementType.STRING
        name = _NAMES.get(dtype.name) if dtype.isnative else None
        if name is None or ElementType[name].numpy() != dtype:
            raise TypeError(f"ONNX has no element type for numpy's {dtype!r}.")
        return ElementType[name]

    @property
    def bitwidth(self) -> int:
        """Bits of one element.

        Raises:
            TypeError: it has no fixed size.
        """
        bits = _BITS[self.name]
        if bits is None:
            raise TypeError(f"elements of type {self.name} have no fixed size.")
        return bits

    def is_floating_point(self) -> bool:
        """Whether elements are floating-point numbers."""
        return "FLOAT" in self.name or self is ElementType.DOUBLE

    def numpy(self) -> np.dtype[Any]:
        """The type of arrays of such elements. Types that numpy hasn't itself are those of ``ml_dtypes``.

        Raises:
            TypeError: there is none.
        """
        return _dtype(self)

    def __str__(self) -> str:
        return self.name


_OF_NUMPY: dict[str, tuple[str, int | None]] = {
    "FLOAT": ("float32", 32), "UINT8": ("uint8", 8), "INT8": ("int8", 8), "UINT16": ("uint16", 16),
    "INT16": ("int16", 16), "INT32": ("int32", 32), "INT64": ("int64", 64), "STRING": ("object", None),
    "BOOL": ("bool", 8), "FLOAT16": ("float16", 16), "DOUBLE": ("float64", 64), "UINT32": ("uint32", 32),
    "UINT64": ("uint64", 64), "COMPLEX64": ("complex64", 64), "COMPLEX128": ("complex128", 128),
}  # fmt: skip
"""Name of numpy's type, and bits."""

_OF_ML_DTYPES: dict[str, tuple[str, int | None]] = {
    "BFLOAT16": ("bfloat16", 16), "FLOAT8E4M3FN": ("float8_e4m3fn", 8), "FLOAT8E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "FLOAT8E5M2": ("float8_e5m2", 8), "FLOAT8E5M2FNUZ": ("float8_e5m2fnuz", 8), "UINT4": ("uint4", 4),
    "INT4": ("int4", 4), "FLOAT4E2M1": ("float4_e2m1fn", 4), "FLOAT8E8M0": ("float8_e8m0fnu", 8),
    "UINT2": ("uint2", 2), "INT2": ("int2", 2), "FLOAT6E2M3": ("float6_e2m3fn", 6), "FLOAT6E3M2": ("float6_e3m2fn", 6),
}  # fmt: skip
"""Name of the type of ``ml_dtypes``, and bits."""

_BITS = {"UNDEFINED": None, **{name: bits for name, (_, bits) in (_OF_NUMPY | _OF_ML_DTYPES).items()}}
_NAMES = {dtype: name for name, (dtype, _) in (_OF_NUMPY | _OF_ML_DTYPES).items()}


@cache
def _dtype(kind: ElementType) -> np.dtype[Any]:
    if kind.name in _OF_NUMPY:
        return np.dtype(_OF_NUMPY[kind.name][0])
    if kind.name not in _OF_ML_DTYPES:
        raise TypeError(f"numpy has no type for elements of type {kind.name}.")
    import ml_dtypes  # only where a model has such a type

    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, _OF_ML_DTYPES[kind.name][0]))
    return dtype
