"""Inputs for a session: random ones where the user gives none, and checks of those the user gives."""

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from memonger.devices import CPU, Device
from memonger.errors import SessionError, ShapeError
from memonger.ir.element_types import ElementType
from memonger.runtime import ort
from memonger.runtime.onnxruntime import onnxruntime
from memonger.runtime.prepared import Input, Kind
from memonger.words import FILE, did_you_mean, either, option, quoted

Feed = Any  # numpy array, list of arrays (a sequence), None (an empty optional), OrtValue, or what has __dlpack__
Feeds = Mapping[str, Feed]
Span = tuple[int, int] | None


def random_feeds(inputs: Sequence[Input], seed: int = 0) -> dict[str, np.ndarray]:
    """An array for every input: normal numbers for floats, no text, zeros for integers (a valid index always).

    Masks and lengths have what counts all there is: see `memonger.model.counts`.

    Raises:
        SessionError: an input is no tensor of a static shape; it has to be given.
    """
    rng, feeds = np.random.default_rng(seed), dict[str, np.ndarray]()
    for value in inputs:
        if not value.required:
            continue
        if value.shape is None or value.dtype is None:
            arrays = f"arrays that are called '{value.name}[0]', '{value.name}[1]' and so on"
            what = either("a list of arrays", arrays) if value.is_sequence else "one"
            raise SessionError(
                f"input '{value.name}' is {value.kind}: no random value can be made, give {what} "
                f"({option('inputs', FILE)})."
            )
        try:
            if value.dtype == ElementType.STRING:
                feeds[value.name] = np.full(value.shape, "", dtype=object)
            elif value.dtype.is_floating_point():
                feeds[value.name] = np.asarray(rng.standard_normal(value.shape)).astype(value.dtype.numpy())
            else:
                feeds[value.name] = np.full(value.shape, value.fill, value.dtype.numpy())
        except (ValueError, MemoryError) as error:
            raise SessionError(
                f"no array of {list(value.shape)} can be made for input '{value.name}': {error}."
            ) from error
    return feeds


def to_ortvalue(value: Feed, kind: Kind | None) -> Any:
    """An OrtValue of anything onnxruntime can hold; tensors of numbers share the array's memory.

    Strings, sequences and optionals have no constructor in onnxruntime's Python interface, so models make them.
    """
    module = onnxruntime()
    if isinstance(value, module.OrtValue):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind not in "OUS":
        if isinstance(kind, ElementType):
            return module.OrtValue.ortvalue_from_numpy_with_onnx_type(contiguous(value), int(kind))
        return module.OrtValue.ortvalue_from_numpy(contiguous(value))
    if kind is None:
        raise SessionError("a value without a type can't be fed.")
    if value is None:  # the process ends where one is made and bound
        raise SessionError(
            "onnxruntime's bindings have no empty optional: give a value, or cut the input out of the model."
        )
    try:
        if kind == ElementType.STRING:
            return ort.texts(np.asarray(value))
        from memonger.runtime.sequences import constant

        return constant(value, kind)
    except Exception as error:  # numpy, onnx and onnxruntime each have their own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SessionError(f"{type(value).__name__} can't be fed as {kind}: {reason}") from error


def in_place(feeds: Feeds, device: Device) -> dict[str, Feed]:
    """The feeds, tensors of other libraries as arrays of the host or OrtValues of the device, over the same memory.

    Raises:
        SessionError: not a mapping; a tensor lies on another device, or isn't contiguous there.
    """
    if not isinstance(feeds, Mapping):
        raise SessionError(f"tensors are given by name, as in {{'x': array}}, not as {type(feeds).__name__}.")
    module, found = onnxruntime(), dict[str, Feed]()
    for name, feed in feeds.items():
        if isinstance(feed, np.ndarray):  # of a subclass too, whose own rules for copies and masks don't count here
            found[name] = feed if type(feed) is np.ndarray else feed.view(np.ndarray)
            continue
        known = isinstance(feed, module.OrtValue) or not hasattr(feed, "__dlpack_device__")
        found[name] = one = feed if known else _from_dlpack(name, feed, device)
        if device.is_host and is_on_device(one):
            where = one.device_name().upper()
            raise SessionError(
                f"'{name}' lies on a {where} device, and the session runs on {device}: copy it to the host."
            )
    return found


def _from_dlpack(name: str, feed: Any, device: Device) -> Feed:
    kind, index = map(int, feed.__dlpack_device__())
    if kind == device.facts.dlpack and not device.is_host and index != device.index:
        raise SessionError(f"'{name}' lies on {device.kind}:{index}, and the session runs on {device}: copy it there.")
    detached = feed.detach() if getattr(feed, "requires_grad", False) else feed
    if kind == CPU.facts.dlpack:
        try:
            return np.from_dlpack(detached)
        except (BufferError, TypeError, RuntimeError):
            pass  # a type numpy doesn't know
    try:
        return onnxruntime().OrtValue.from_dlpack(detached)
    except Exception as error:  # pybind exceptions share no base class
        raise SessionError(
            f"'{name}' can't be read where it lies: {str(error).strip().splitlines()[-1]} Make it contiguous, and give "
            "truth values that lie on a device as an array of the host."
        ) from error


def is_on_device(feed: Feed) -> bool:
    """Whether it is a tensor in memory that isn't the host's."""
    if not isinstance(feed, onnxruntime().OrtValue) or not feed.has_value() or not feed.is_tensor():
        return False
    return bool(feed.device_name().lower() != CPU.kind)


def address_of(feed: Feed) -> int:
    """Where a tensor lies on its device."""
    return int(feed.ctypes.data) if isinstance(feed, np.ndarray) else int(feed.data_ptr())


def span_of(feed: Feed, device: Device) -> Span:
    """The addresses ``(first, after the last)`` of a tensor on the device; None if it lies elsewhere or in pieces."""
    if isinstance(feed, np.ndarray):
        if not device.is_host or feed.dtype.kind in "OUS" or not feed.flags.c_contiguous:
            return None
        address = feed.__array_interface__["data"][0]
        return address, address + feed.nbytes
    if shape_of(feed) is None or is_on_device(feed) == device.is_host or feed.element_type() == ElementType.STRING:
        return None
    return feed.data_ptr(), feed.data_ptr() + feed.tensor_size_in_bytes()


def copy_of(feed: Feed) -> Feed:
    """The content of a tensor on the host, elsewhere.

    Raises:
        SessionError: numpy has no type for it.
    """
    if isinstance(feed, np.ndarray):
        return feed.copy()
    try:
        return feed.numpy()
    except RuntimeError as error:
        raise SessionError(f"an input lies where the run writes, and can't be copied: {str(error).strip()}") from error


def as_bytes(feed: Feed) -> np.ndarray:
    """A tensor on the host as a row of bytes."""
    if isinstance(feed, np.ndarray):
        return contiguous(feed).reshape(-1).view(np.uint8)
    size = feed.tensor_size_in_bytes()
    return np.frombuffer((ctypes.c_char * size).from_address(feed.data_ptr()), np.uint8)


def shape_of(feed: Feed) -> tuple[int, ...] | None:
    """Its shape; None of what is no tensor."""
    if isinstance(feed, np.ndarray):
        return tuple(feed.shape)
    if isinstance(feed, onnxruntime().OrtValue) and feed.has_value() and feed.is_tensor():
        return tuple(feed.shape())
    return None


def described(feed: Feed) -> tuple[ElementType | None, tuple[int, ...] | None]:
    """Element type and shape of a tensor; no type of an array that is of none of ONNX's, or has its bytes swapped."""
    if isinstance(feed, np.ndarray):
        try:
            dtype = None if feed.dtype.kind in "OUS" else ElementType.from_numpy(feed.dtype)
        except TypeError:
            dtype = None
        return dtype, tuple(feed.shape)
    shape = shape_of(feed)
    return (None, None) if shape is None else (ElementType(feed.element_type()), shape)


def contiguous(array: np.ndarray) -> np.ndarray:
    """The array itself where its bytes lie in one row, else a copy. Scalars stay scalars."""
    return array if array.flags.c_contiguous else array.copy(order="C")


def to_python(value: Any, kind: Kind | None) -> Any:
    """What an OrtValue holds: an array, a list of arrays, or None for an empty optional."""
    if not value.has_value():
        return None
    if value.is_tensor():
        try:
            array, dtype = value.numpy(), ElementType(value.element_type())
            as_bytes = array.dtype.kind == "u" and dtype.is_floating_point()  # float8, in onnxruntime's Python
            return array.view(dtype.numpy()) if as_bytes and dtype.bitwidth == 8 else array
        except RuntimeError as error:  # a type that onnxruntime's Python has no array for, such as bfloat16
            dtype, shape = ElementType(value.element_type()), tuple(value.shape())
            if value.device_name() != "cpu" or dtype == ElementType.STRING or dtype.bitwidth < 8:
                raise SessionError(f"an output can't be read as an array: {str(error).strip()}") from error
            size = math.prod(shape) * dtype.bitwidth // 8
            data = ctypes.string_at(value.data_ptr(), size) if size else b""
            return np.frombuffer(bytearray(data), dtype.numpy()).reshape(shape)
    if kind is None:
        raise SessionError("a value without a type can't be read.")
    from memonger.runtime.sequences import read

    return read(value, kind)


def run_bound(session: Any, feeds: Feeds) -> dict[str, Any]:
    """The outputs of a run of stock onnxruntime, of types too that its Python knows no arrays for."""
    binding = session.io_binding()
    given = {name: to_ortvalue(feed, ElementType.from_numpy(feed.dtype)) for name, feed in feeds.items()}
    for name, value in given.items():  # the binding doesn't hold the arrays that these are over
        binding.bind_ortvalue_input(name, value)
    names = list(dict.fromkeys(output.name for output in session.get_outputs()))
    for name in names:
        binding.bind_output(name)
    session.run_with_iobinding(binding)
    return {name: to_python(value, None) for name, value in zip(names, binding.get_outputs(), strict=True)}


def shapes_of(feeds: Feeds | None) -> dict[str, tuple[int, ...]]:
    """The shapes of inputs that are arrays."""
    return {name: tuple(feed.shape) for name, feed in (feeds or {}).items() if hasattr(feed, "shape")}


def check_feeds(inputs: Sequence[Input], feeds: Feeds, where: str) -> None:
    """Every required input is there, none is unknown, and tensors have the type and shape planned for.

    Raises:
        SessionError: it names the input, what it is and what it should be.
    """
    for value in inputs:  # the way of all sound runs: nothing is built
        feed = feeds.get(value.name)
        if not isinstance(feed, np.ndarray) or value.numpy is None or feed.dtype != value.numpy:
            break
        if value.shape is not None and feed.shape != value.shape:
            break
    else:
        if len(feeds) == len(inputs):
            return
    by_name = {value.name: value for value in inputs}
    missing = [value.name for value in inputs if value.required and value.name not in feeds]
    unknown = [name for name in feeds if name not in by_name]
    if missing:
        instead = f", and it has no input {quoted(unknown)}" if unknown else ""
        raise SessionError(f"{where}: input {quoted(missing)} is missing{instead}; the inputs are {quoted(by_name)}.")
    if unknown:
        raise SessionError(
            f"{where} has no input {quoted(unknown)}; the inputs are {quoted(by_name)}."
            f"{did_you_mean(str(unknown[0]), by_name)}"
        )
    for name, feed in feeds.items():
        value, (dtype, shape) = by_name[name], described(feed)
        if shape is None:
            if isinstance(value.kind, ElementType):
                raise SessionError(
                    f"input '{name}' is a tensor, and {type(feed).__name__} was given: make it an array "
                    f"(numpy.asarray) of {value.numpy or 'text'}."
                )
            continue
        if value.is_sequence:
            raise SessionError(f"input '{name}' is a sequence: give a list of arrays; list(array) is one of its rows.")
        if value.shape is not None and shape != value.shape:
            raise ShapeError(
                f"input '{name}' has shape {list(shape)}; {where} was planned for {list(value.shape)}.",
                f"Plan the model for that shape as well ({option('batch')}, {option('dims')}).",
            )
        if not isinstance(feed, np.ndarray):
            if value.dtype is not None and dtype != value.dtype:
                given = dtype.name if dtype is not None else "unknown"
                raise SessionError(f"input '{name}' has type {given}; {where} takes {value.dtype.name}.")
        elif value.dtype == ElementType.STRING and feed.dtype.kind not in "OUS":
            raise SessionError(
                f"input '{name}' has type {feed.dtype}; {where} takes text: an array of strings (dtype=object)."
            )
        elif value.numpy is not None and feed.dtype != value.numpy:
            advice = f"array.astype('{value.numpy}') makes it one"
            raise SessionError(f"input '{name}' has type {feed.dtype}; {where} takes {value.numpy}: {advice}.")


def with_tables(feeds: Feeds, maps: Mapping[str, Sequence[int | str]], inputs: Sequence[Input]) -> Feeds:
    """The feeds with a table in place of each dictionary that stock onnxruntime takes.

    Args:
        feeds: What a model is fed.
        maps: What the columns of such inputs are called.
        inputs: The model's.

    Raises:
        SessionError: an entry is of another type.
    """
    given = {name for name, feed in feeds.items() if isinstance(feed, Mapping) and name in maps}
    kinds = {value.name: value.numpy or np.dtype(object) for value in inputs if value.name in given}
    return {**feeds, **{name: _as_table(name, feeds[name], maps[name], kind) for name, kind in kinds.items()}}


def _as_table(name: str, given: Mapping[Any, Any], keys: Sequence[int | str], kind: np.dtype[Any]) -> np.ndarray:
    """The row that onnxruntime makes of a dictionary (``DictVectorizer``): what has no entry is zero, or no text.

    Raises:
        SessionError: an entry is of another type.
    """
    nothing = "" if kind.hasobject else 0
    try:
        return np.array([[given.get(key, nothing) for key in keys]], kind)
    except (TypeError, ValueError, OverflowError) as error:
        raise SessionError(f"input '{name}': its entries have to be of type {kind}: {error}.") from error


def as_maps(table: np.ndarray, keys: Sequence[int | str]) -> list[dict[int | str, Any]]:
    """A dictionary for each row of a table of scores, as onnxruntime gives them."""
    rows = table if table.ndim > 1 else table[np.newaxis]
    return [dict(zip(keys, row.tolist(), strict=False)) for row in rows]
