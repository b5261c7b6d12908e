"""pbtxt: messages in protobuf's text format, from plain Python values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


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
