"""What every command is: errors as one line, files that are never overwritten unasked, texts escaped."""

import errno
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click

from memonger.cli.options import FORCE, FORCED, Target
from memonger.errors import MemongerError
from memonger.units import shown
from memonger.words import on_the_command_line


class _Escaping(click.Command):
    """Escapes what isn't printable in click's own messages, which repeat the command line."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with _escaped():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with _escaped():
            return super().invoke(ctx)


@contextmanager
def _escaped() -> Iterator[None]:
    try:
        yield
    except click.UsageError as error:
        error.message = shown(error.message)  # type: ignore[misc]
        raise


class Command(_Escaping):
    """Prints an expected error as one line on standard error, and exits with status 1.

    One that writes files has ``--force``: see `_check_targets`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        names = [parameter.name for parameter in self.params]
        if "force" not in names and any(isinstance(parameter.type, Target) for parameter in self.params):
            FORCE(self)

    def invoke(self, ctx: click.Context) -> Any:
        logging.getLogger("onnx_ir").setLevel(logging.ERROR)  # memonger says itself what is wrong with a model
        logger, notes = logging.getLogger("memonger"), _Notes(logging.WARNING)
        logger.addHandler(notes)
        ctx.call_on_close(lambda: logger.removeHandler(notes))
        try:
            with on_the_command_line():
                _check_targets(ctx)
                return super().invoke(ctx)
        except MemongerError as error:
            _fail(str(error))
        except MemoryError:
            _fail("memory ran out. Plan for a smaller batch, or use a larger machine.")
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # the reader of the output has closed it; click ends quietly
            _fail(f"{error.filename or 'the output'}: {error.strerror or error}.")


class Group(_Escaping, click.Group):
    """A command of commands."""

    command_class = Command


class _Notes(logging.Handler):
    """Prints what is logged as the notes of a plan are printed."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(shown(f"memonger: note: {record.getMessage()}"), err=True)


def _fail(message: str) -> NoReturn:
    click.echo(shown(f"memonger: {message}"), err=True)
    sys.exit(1)


def _check_targets(ctx: click.Context) -> None:
    """Before any work is done: no file is written over one that is read, nor without ``--force`` over any other.

    Raises:
        MemongerError: what is to be written is there already, or is read by the command.
        UsageError: two options name the same file to write.
    """
    targets, sources = _paths(ctx, Target), _paths(ctx, click.Path)
    for number, (flag, path) in enumerate(targets):
        for other, written in targets[:number]:
            if _same(path, written):
                raise click.UsageError(f"{other} and {flag} name the same file.")
        for _, source in sources:
            if _same(path, source):
                raise MemongerError(f"{flag} {path} names what is read, which is never overwritten: name another file.")
        if path.is_file() and not ctx.meta.get(FORCED):
            raise MemongerError(f"{path} is there already: name another file, or replace it with --force.")


def _paths(ctx: click.Context, kind: type[click.Path]) -> list[tuple[str, Path]]:
    """The paths given as parameters of exactly this type, with what the parameter is called."""
    found = []
    for parameter in ctx.command.params:
        given = ctx.params.get(str(parameter.name))
        if type(parameter.type) is kind and given is not None:
            paths = given if isinstance(given, tuple) else (given,)
            found += [(parameter.opts[0], Path(path)) for path in paths]
    return found


def _same(one: Path, other: Path) -> bool:
    """Whether both name one file, or will; by whatever links."""
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):  # one of them isn't there, or can't name a file
        return os.path.realpath(one) == os.path.realpath(other)
