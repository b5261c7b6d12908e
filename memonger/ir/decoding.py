"""From JSON, which may be wrong, to frozen dataclasses: each field is checked against its type."""

import dataclasses
import json
import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from memonger.errors import MemongerError, PlanError

T = TypeVar("T")

_MOST = sys.float_info.max

LARGEST = 2**62  # sums of two such sizes still fit 64 bits

Reader = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class AtLeast:
    """``Annotated[int, AtLeast(0)]``: integers from there to below `LARGEST`, or to ``most``."""

    least: int
    most: int = LARGEST - 1

    def read(self, content: Any) -> Any:
        """The integer, checked."""
        if type(content) is int and self.least <= content <= self.most:
            return content
        end = "below 2**62" if self.most == LARGEST - 1 else str(self.most)
        return _refuse(content, f"an integer from {self.least} to {end}")


@dataclass(frozen=True, slots=True)
class OneOf:
    """``Annotated[int, OneOf((1, 2))]``: one of these values."""

    values: tuple[Any, ...]

    def read(self, content: Any) -> Any:
        """The value, checked."""
        if any(type(content) is type(value) and content == value for value in self.values):
            return content
        return _refuse(content, f"one of {', '.join(map(repr, self.values))}")


class DecodingError(ValueError):
    """A value doesn't have the type of its field.

    Attributes:
        where: The field, and the entry in it, as ``'offsets' at 'x'``.
        problem: A sentence without its subject, as ``is 'a', not an integer``.
    """

    def __init__(self, problem: str, where: str = "") -> None:
        super().__init__(f"{where} {problem}".lstrip())
        self.problem, self.where = problem, where

    def inside(self, name: str) -> "DecodingError":
        """The same error, said of the field or entry around the wrong value."""
        return DecodingError(self.problem, f"{name!r} at {self.where}" if self.where else repr(name))


def decode(kind: type[T], content: object, *, ignore_unknown: bool = False) -> T:
    """A dataclass from what `json.loads` gives.

    Fields are strings, integers (also `AtLeast` and `OneOf`), booleans, finite numbers (``float``), ``tuple[X, ...]``,
    ``frozenset[X]``, ``Mapping[str, X]``, dataclasses, or ``X | None``. A field with a default may be missing.

    Args:
        kind: The dataclass.
        content: A dict, if all is well.
        ignore_unknown: Whether entries that are no field are left out, instead of being an error.

    Raises:
        DecodingError: the content doesn't fit; the error names the field.
    """
    value: T = _record(kind, content, ignore_unknown)
    return value


def decode_metadata(
    kind: type[T], metadata: Mapping[str, str], key: str, name: str, wrong: type[MemongerError] = PlanError
) -> T | None:
    """A dataclass from the JSON that a model's metadata has under a key; None where it has none.

    Args:
        kind: The dataclass.
        metadata: The model's.
        key: The key.
        name: What messages call the model.
        wrong: What is raised where the entry is malformed.
    """
    if (text := metadata.get(key)) is None:
        return None
    try:
        return decode(kind, json.loads(text))
    except (ValueError, RecursionError) as error:
        raise wrong(f"{name}: its metadata '{key}' is malformed: {error}.") from error


def _record(kind: Any, content: Any, ignore_unknown: bool = True) -> Any:
    if not isinstance(content, dict):
        raise _wrong(content, "an object")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in content if not ignore_unknown else ():
        if name not in fields:
            raise DecodingError("is unknown").inside(name)
    values = {name: _entry(name, read, content) for name, read in _readers(kind).items() if name in content}
    for name, field in fields.items():
        if name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise DecodingError("is missing").inside(name)
    try:
        return kind(**values)
    except MemongerError as error:
        raise DecodingError(f"is wrong: {error}") from error


def _entry(name: str, read: Reader, content: Mapping[str, Any]) -> Any:
    try:
        return read(content[name])
    except DecodingError as error:
        raise error.inside(name) from error


@cache
def _readers(kind: Any) -> dict[str, Reader]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: _reader(hints[field.name]) for field in dataclasses.fields(kind)}


@cache
def _reader(kind: Any) -> Reader:
    """The function that checks a value against a type; made once, as a field may have a million entries."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        checked: Reader = args[1].read
        return checked
    if origin in (Union, UnionType):
        (inner,) = (each for each in args if each is not NoneType)
        read = _reader(inner)
        return lambda content: None if content is None else read(content)
    if origin in (tuple, frozenset):
        return partial(_list, origin, _reader(args[0]))
    if origin is Mapping:
        return partial(_mapping, _reader(args[1]))
    if kind is float:
        return _number
    return partial(_record if dataclasses.is_dataclass(kind) else _exactly, kind)


_WORDS = {str: "a string", int: "an integer", bool: "true or false"}


def _exactly(kind: type, content: Any) -> Any:
    return content if type(content) is kind else _refuse(content, _WORDS[kind])


def _number(content: Any) -> Any:
    is_number = type(content) in (int, float) and abs(content) <= _MOST  # NaN isn't
    return float(content) if is_number else _refuse(content, "a finite number")


def _list(kind: Callable[[list[Any]], Any], read: Reader, content: Any) -> Any:
    return kind([read(item) for item in content]) if isinstance(content, list) else _refuse(content, "a list")


def _mapping(read: Reader, content: Any) -> Any:
    if not isinstance(content, dict):
        return _refuse(content, "an object")
    return {name: _entry(name, read, content) for name in content}


def _refuse(content: Any, expected: str) -> Any:
    raise _wrong(content, expected)


def _wrong(content: Any, expected: str) -> DecodingError:
    return DecodingError(f"is {reprlib.repr(content)}, and must be {expected}")
