"""What a sample consists of, and what a reader gave checked against it."""

import math
import numbers
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memonger.errors import FeedError
from memonger.words import quoted

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class SampleTensor:
    """One of the tensors of every sample: its name, and its shape without the batch's axis."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of it in one sample."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def tensors_of(samples: Mapping[str, tuple[Sequence[int], Any]]) -> tuple[SampleTensor, ...]:
    """The tensors that ``{"image": ((3, 224, 224), "float32")}`` describes.

    Raises:
        FeedError: it is described in another way; a size is no number from 0 on; there is no such type of numbers.
    """
    if not isinstance(samples, Mapping) or not samples:
        raise FeedError(
            "samples must give the shape and type of each tensor of a sample, as in {'image': ((3, 224, 224), "
            f"'float32')}}, not {samples!r}."
        )
    return tuple(_tensor(name, described) for name, described in samples.items())


def _tensor(name: str, described: Any) -> SampleTensor:
    if not isinstance(described, tuple | list) or len(described) != 2 or not isinstance(described[0], tuple | list):
        raise FeedError(
            f"samples[{name!r}] must be a shape without the batch's axis and a type, as ((3, 224, 224), 'float32') or "
            f"((), 'int64'), not {described!r}."
        )
    shape, dtype = described
    if not isinstance(name, str) or any(
        isinstance(size, bool) or not isinstance(size, numbers.Integral) or size < 0 for size in shape
    ):
        raise FeedError(f"samples[{name!r}] has shape {shape!r}: sizes are whole numbers from 0 on, known beforehand.")
    text = str(dtype).removeprefix("torch.") if not isinstance(dtype, type) else dtype
    try:
        kind = np.dtype(text)
    except TypeError:
        import ml_dtypes

        scalar = getattr(ml_dtypes, str(text), None)
        if not isinstance(scalar, type) or not issubclass(scalar, np.generic):
            raise FeedError(
                f"samples[{name!r}] has type {dtype!r}, which is none: write 'float32', 'int64' ..."
            ) from None
        kind = np.dtype(scalar)
    if kind.kind in "OSU" or kind.itemsize == 0:
        raise FeedError(
            f"samples[{name!r}] has type {dtype!r}, whose elements have no size of their own: give numbers."
        )
    return SampleTensor(name, tuple(map(int, shape)), kind)


def checked(given: Any, tensors: Sequence[SampleTensor]) -> Arrays:
    """A sample as the reader gave it, as arrays by name, without a copy.

    Args:
        given: Arrays (of numpy, of torch on the CPU, or Python numbers) by name; a tuple of them in the order of
            ``tensors``; of a single tensor, the array itself.
        tensors: What has to be there.

    Raises:
        FeedError: names are missing or unknown; a shape or type is another.
    """
    named = by_name(given, tensors)
    return {tensor.name: _array(named[tensor.name], tensor) for tensor in tensors}


def by_name(given: Any, tensors: Sequence[SampleTensor]) -> Mapping[str, Any]:
    """What was given for each tensor.

    Raises:
        FeedError: names are missing or unknown.
    """
    names = [tensor.name for tensor in tensors]
    if isinstance(given, tuple | list):
        if len(given) != len(names):
            raise FeedError(f"{len(given)} tensors were given, and a sample has {len(names)}: {quoted(names)}.")
        return dict(zip(names, given, strict=True))
    if not isinstance(given, Mapping):
        if len(names) == 1:
            return {names[0]: given}
        what = f"{given.dtype}{list(given.shape)}" if isinstance(given, np.ndarray) else reprlib.repr(given)
        raise FeedError(f"{what} was given instead of arrays by name: {quoted(names)}.")
    missing, unknown = [name for name in names if name not in given], [name for name in given if name not in names]
    if missing or unknown:
        problem = f"{quoted(missing)} is missing" if missing else f"{quoted(unknown)} is none of its tensors"
        raise FeedError(f"{problem}; a sample has {quoted(names)}.")
    return given


def _array(value: Any, tensor: SampleTensor) -> np.ndarray:
    array = _number(value, tensor)
    if array.shape != tensor.shape or array.dtype != tensor.dtype:
        raise FeedError(f"'{tensor.name}' is {array.dtype}{list(array.shape)}, and the configuration says {tensor}.")
    return array


def _number(value: Any, tensor: SampleTensor) -> np.ndarray:
    """An array of anything; Python's own numbers get the tensor's type where it can hold them."""
    fits = isinstance(value, bool | int) or (isinstance(value, float) and tensor.dtype.kind not in "biu")
    return np.asarray(value, tensor.dtype) if fits else np.asarray(value)


def filling(value: Any, tensor: SampleTensor) -> np.ndarray:
    """What fills up a tensor of a batch: a number, or an array as in a sample.

    Raises:
        FeedError: it is of another type or shape.
    """
    try:
        array = _number(value, tensor)
    except (TypeError, ValueError, OverflowError) as error:
        raise FeedError(f"padding of '{tensor.name}' must be {tensor} or a number: {error}.") from error
    if array.dtype != tensor.dtype or array.shape not in ((), tensor.shape):
        raise FeedError(
            f"padding of '{tensor.name}' must be {tensor} or a number, not {array.dtype}{list(array.shape)}."
        )
    return array
