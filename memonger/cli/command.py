"""What every command is: errors as one line, files never overwritten unasked, help in sections, any terminal will do.

Each option without a file to write takes its default from the environment: ``--device`` from ``MEMONGER_DEVICE``.
"""

import errno
import io
import itertools
import logging
import os
import shlex
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import click
from click.core import ParameterSource

from memonger.cli.options import (
    COMMANDS,
    FORCE,
    FORCED,
    HELP,
    NOT_FROM_ENVIRONMENT,
    SECTIONS,
    Target,
    place_of,
)
from memonger.errors import MemongerError
from memonger.units import shown
from memonger.words import on_the_command_line

_ARGUMENTS = "memonger.arguments"
"""In a context's ``meta``: the command line behind the command's name."""


class _Escaping(click.Command):
    """Escapes what isn't printable in click's own messages, which repeat the command line."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        _print_on_any_terminal()
        ctx.meta[_ARGUMENTS] = tuple(args)
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
        said = shown(error.message)  # again, where a group's own check stands around that of its command
        error.message = said.removesuffix(_origin(error)) + _origin(error)  # type: ignore[misc]
        raise


def _origin(error: click.UsageError) -> str:
    """Where a value that is wrong comes from, if that isn't the command line."""
    if not isinstance(error, click.BadParameter) or error.ctx is None or error.param is None:
        return ""
    if error.ctx.get_parameter_source(str(error.param.name)) is not ParameterSource.ENVIRONMENT:
        return ""
    return f" (It comes from the environment: {error.param.envvar}.)"


def _print_on_any_terminal() -> None:
    """What an output's encoding has no letter for is written as an escape, and raises nothing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


class Command(_Escaping):
    """Prints an expected error as one line on standard error, and exits with status 1.

    One that writes files has ``--force``: see `_check_targets`.

    Args:
        args: Those of a ``click.Command``.
        runs: What it does: ``file.function`` of this folder, imported when it runs.
        examples: Command lines for the help, each as it would be typed.
        kwargs: Those of a ``click.Command``.
    """

    failure = 1

    def __init__(self, *args: Any, runs: str = "", examples: Sequence[str] = (), **kwargs: Any) -> None:
        kwargs.setdefault("context_settings", HELP)
        if runs:
            kwargs["callback"] = partial(_run, *runs.split("."))
        super().__init__(*args, **kwargs)
        self.examples = examples
        names = [parameter.name for parameter in self.params]
        if "force" not in names and any(isinstance(parameter.type, Target) for parameter in self.params):
            FORCE(self)
        for parameter in self.params:
            if isinstance(parameter, click.Option) and parameter.name not in NOT_FROM_ENVIRONMENT:
                parameter.envvar = f"MEMONGER_{parameter.opts[-1].lstrip('-').replace('-', '_').upper()}"

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options in sections, and the examples behind them."""
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option) and not each.hidden]
        options.sort(key=lambda each: place_of(str(each.name)))
        for section, members in itertools.groupby(options, key=lambda each: place_of(str(each.name))[0]):
            with formatter.section(SECTIONS[section]):
                formatter.write_dl(list(filter(None, (each.get_help_record(ctx) for each in members))))
        write_examples(formatter, self.examples)

    def invoke(self, ctx: click.Context) -> Any:
        logging.getLogger("onnx_ir").setLevel(logging.ERROR)  # memonger says itself what is wrong with a model
        logger, notes = logging.getLogger("memonger"), _CommandNotes(logging.WARNING)
        logger.addHandler(notes)
        ctx.call_on_close(lambda: logger.removeHandler(notes))
        try:
            with on_the_command_line(ctx.command_path, ctx.meta.get(_ARGUMENTS, ())):
                _check_targets(ctx)
                return super().invoke(ctx)
        except MemongerError as error:
            _fail(str(error), self.failure)
        except MemoryError:
            _fail("memory ran out. Plan for a smaller batch, or use a larger machine.", self.failure)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # the reader of the output has closed it; click ends quietly
            _fail(f"{error.filename or 'the output'}: {error.strerror or error}.", self.failure)


def _run(file: str, function: str, **arguments: Any) -> None:
    getattr(import_module(f"memonger.cli.{file}"), function)(**arguments)


class Comparison(Command):
    """A command whose status 1 says that two things differ, as ``diff``'s does: errors have status 2."""

    failure = 2


def write_examples(formatter: click.HelpFormatter, examples: Sequence[str]) -> None:
    """A section of command lines."""
    if examples:
        with formatter.section("Examples"):
            formatter.write_text("\b\n" + "\n".join(examples))


class CommandGroup(_Escaping, click.Group):
    """A command of commands, which its help lists in sections.

    Args:
        args: Those of a ``click.Group``.
        first: What to type first, and what each does; the help has all commands.
        examples: See `Command`.
        kwargs: Those of a ``click.Group``.
    """

    command_class = Command

    def __init__(
        self, *args: Any, first: Sequence[tuple[str, str]] = (), examples: Sequence[str] = (), **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.first, self.examples = first, examples

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Where no command is named, what to type first, with status 0: click's own is an error since 8.2."""
        if not args and not ctx.resilient_parsing:
            _print_on_any_terminal()
            formatter = ctx.make_formatter()
            formatter.write_text(self.help or "")
            with formatter.section("First"):
                formatter.write_dl(self.first, col_max=formatter.width)
            formatter.write_paragraph()
            formatter.write_text(f"All commands: {ctx.command_path} --help.")
            click.echo(formatter.getvalue().rstrip(), color=ctx.color)
            ctx.exit()
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands by what they are for."""
        left = self.list_commands(ctx)
        for section, names in (*COMMANDS.items(), ("More", left)):
            rows = [(name, self.commands[name]) for name in names if name in left]
            left = [name for name in left if name not in names]
            if rows:
                limit = formatter.width - 6 - max(len(name) for name in self.commands)
                with formatter.section(section):
                    formatter.write_dl([(name, command.get_short_help_str(limit)) for name, command in rows])
        write_examples(formatter, self.examples)


class _CommandNotes(logging.Handler):
    """Prints what is logged as the notes of a plan are printed."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(shown(f"memonger: note: {record.getMessage()}"), err=True)


def _fail(message: str, status: int) -> NoReturn:
    click.echo(shown(f"memonger: {message}"), err=True)
    sys.exit(status)


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
        if not path.absolute().parent.is_dir():
            raise MemongerError(f"{path} can't be written: there is no folder {path.parent}.")
        if path.is_file() and not ctx.meta.get(FORCED):
            raise MemongerError(f"{path} is there already: name another file, or replace it with --force.")


def _paths(ctx: click.Context, kind: type[click.Path]) -> list[tuple[str, Path]]:
    """The paths given as parameters of exactly this type, with what the parameter is called."""
    named = []
    for parameter in ctx.command.params:
        given = ctx.params.get(str(parameter.name))
        if type(parameter.type) is kind and given is not None:
            paths = given if isinstance(given, tuple) else (given,)
            named += [(parameter.opts[0], Path(path)) for path in paths]
    return named


def _same(one: Path, other: Path) -> bool:
    """Whether both name one file, or will; by whatever links."""
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):  # one of them isn't there, or can't name a file
        return os.path.realpath(one) == os.path.realpath(other)


def given_again(ctx: click.Context, leave_out: Collection[str]) -> str:
    """The arguments and options of the command line as they were typed, but for some.

    Args:
        ctx: Of the command.
        leave_out: Names of parameters.
    """
    options = {flag: each for each in ctx.command.params if isinstance(each, click.Option) for flag in each.opts}
    words, rest = list[str](), iter(ctx.meta[_ARGUMENTS])
    for word in rest:
        flag, has_value, _ = word.partition("=")
        option = options.get(flag)
        value = [] if option is None or option.is_flag or has_value else [next(rest)]
        if option is None or option.name not in leave_out:
            words += [word, *value]
    return shlex.join(words)
