"""Messages in the words of who asked: ``mode='training'`` in Python, ``--mode training`` on the command line."""

import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

Speaker = Callable[[str, object], str]

Manner = tuple[Speaker, tuple[str, str] | None]
"""How an option is written, and what was called on the command line."""


class Placeholder(str):
    """What a reader puts a value of their own for, as ``N`` in ``batch=N``: written without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        """The letters alone."""
        return str(self)


N, SIZE, FILE, NAME = map(Placeholder, ("N", "SIZE", "FILE", "NAME"))

_UNSAID = object()


def option(name: str, value: object = _UNSAID) -> str:
    """An option, with a value where one is given, as who asked would write it.

    Args:
        name: The keyword in Python, as ``dims``.
        value: A text, number, list or dict; a `Placeholder` stands for any.
    """
    return _speaker.get()(name, value)


def either(python: str, command_line: str) -> str:
    """One of two texts, by who asked, for what is no option of the same name in both."""
    return python if _speaker.get() is _in_python else command_line


def quoted(names: Iterable[object], most: int | None = None) -> str:
    """Names in a message: ``'a', 'b' ...`` where there are more than ``most``; ``none`` where there is no name."""
    every = [f"'{name}'" for name in names]
    return (", ".join(every[:most]) or "none") + (" ..." if most is not None and len(every) > most else "")


def listed(names: Iterable[object], last: str = "and") -> str:
    """What belongs together: ``a, b and c``. There is one at least."""
    *rest, end = map(str, names)
    return f"{', '.join(rest)} {last} {end}" if rest else end


def check_choice(name: str, value: object, known: Collection[str], error: type[Exception]) -> None:
    """Check that a value is one of those that there are.

    Args:
        name: What the message calls it.
        value: What was given.
        known: What there is.
        error: Raised if it is none of these.
    """
    if not (isinstance(value, str) and value in known):
        near = did_you_mean(str(value), known)
        raise error(f"{name} must be {listed(map(repr, known), 'or')}, not {value!r}.{near}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'sweep'?``, with the space, for a name that is near a known one; else nothing."""
    import difflib  # here, as nothing is misspelt as a rule

    folded = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.7)
    return f" Did you mean {folded[near[0]]!r}?" if near else ""


def call(name: str, model: str, **options: object) -> str:
    """A call of memonger's on a model, as who asked would write it: ``memonger fit m.onnx --memory 4GiB``.

    Args:
        name: The function, which is the command, too.
        model: What the model is called: a path, or ``<bytes>`` and the like.
        options: Keywords, which are flags, too.
    """
    said = [option(key, value) for key, value in options.items()]
    if _speaker.get() is _in_python:
        return f"memonger.{name}({', '.join(['model' if model.startswith('<') else repr(model), *said])})"
    return " ".join([f"memonger {name} {_quoted(model)}", *said])


def again(name: str, value: object) -> str:
    """What was asked once more with an option besides: the whole command line, or the keyword in Python.

    Args:
        name: As of `option`.
        value: As of `option`.
    """
    command, said = _command.get(), option(name, value)
    if command is None or _speaker.get() is _in_python:
        return said
    return " ".join(filter(None, (command[0], said, command[1])))


@contextmanager
def on_the_command_line(program: str | None = None, arguments: Sequence[str] = ()) -> Iterator[None]:
    """Within it messages name flags.

    Args:
        program: What was called: ``memonger plan``; None where that isn't known.
        arguments: The rest of the command line.
    """
    command = None if program is None else (program, " ".join(map(_quoted, arguments)))
    with speaking((_as_flag, command)):
        yield


def manner() -> Manner:
    """How messages are worded here, to be handed to another process."""
    return _speaker.get(), _command.get()


@contextmanager
def speaking(manner: Manner) -> Iterator[None]:
    """Within it messages are worded as somewhere else."""
    tokens = _speaker.set(manner[0]), _command.set(manner[1])
    try:
        yield
    finally:
        _speaker.reset(tokens[0])
        _command.reset(tokens[1])


def _in_python(name: str, value: object) -> str:
    return name if value is _UNSAID else f"{name}={value!r}"


def _as_flag(name: str, value: object) -> str:
    flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
    if value is _UNSAID or value is True:
        return flag
    if isinstance(value, Mapping):
        ranges = {key: ":".join(map(str, size)) for key, size in value.items() if isinstance(size, tuple)}
        return " ".join(f"{flag} {_quoted(f'{key}={size}')}" for key, size in {**value, **ranges}.items())
    values = value if isinstance(value, list | tuple) else [value]
    return " ".join(f"{flag} {_quoted(str(each))}" for each in values)


def _quoted(text: str) -> str:
    return text if text.isprintable() and not set(text) & _SPECIAL else shlex.quote(text)


_SPECIAL = frozenset(" \t\"'\\$`*?[]{}()<>|&;!#~")

_FLAGS = {"dims": "--dim"}
"""Flags that aren't called as the keyword."""

_command: ContextVar[tuple[str, str] | None] = ContextVar("command", default=None)

_speaker: ContextVar[Speaker] = ContextVar("speaker", default=_in_python)
