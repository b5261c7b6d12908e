"""The reference of the command line, as each command's own ``--help`` has it, in Markdown."""

import html
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from memonger.cli.commands import main


class Markdown(click.HelpFormatter):
    """Writes what a command says of itself as Markdown: lists of options are tables."""

    _heading = ""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        """The line of usage."""
        self.write(f"\n```text\n{prog} {args}\n```\n\n")

    def write_heading(self, heading: str) -> None:
        """The name of a section: what its list begins with."""
        self._heading = heading

    def write_text(self, text: str) -> None:
        """Paragraphs; those that start with ``\\b`` keep their lines."""
        if self._heading:
            self.write(f"\n**{self._heading}**\n\n")
            self._heading = ""
        for paragraph in text.split("\n\n"):
            lines = paragraph.strip("\n").splitlines()
            kept = bool(lines) and lines[0].strip() == "\b"
            self.write(
                "```console\n" + "\n".join(lines[1:]) + "\n```\n\n" if kept else _escaped(" ".join(lines)) + "\n\n"
            )

    def write_dl(self, rows: Sequence[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """A list of options or commands."""
        self.write(f"\n| {self._heading} | |\n|---|---|\n")
        self._heading = ""
        for name, meaning in rows:
            self.write(f"| <code>{_cell(name)}</code> | {_escaped(_cell(meaning))} |\n")
        self.write("\n")

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """A section with its heading."""
        self.write_heading(name)
        yield

    @contextmanager
    def indentation(self) -> Iterator[None]:
        """Nothing is indented: it would be code."""
        yield


def reference() -> str:
    """The whole page below its heading."""
    group = click.Context(main, info_name="memonger")
    return "\n".join([_described(group), *map(_command, sorted(main.commands.items()), [group] * len(main.commands))])


def _command(named: tuple[str, Any], group: click.Context) -> str:
    name, command = named
    return f"## memonger {name}\n\n{_described(click.Context(command, info_name=name, parent=group))}"


def _described(context: click.Context) -> str:
    page = Markdown()
    context.command.format_help(context, page)
    return page.getvalue()


def _cell(text: str) -> str:
    return html.escape(text, quote=False).replace("|", "&#124;").replace("\n", " ")


def _escaped(text: str) -> str:
    """Words with underlines or stars stay as they are, and so do flags."""
    return re.sub(r"(?<![\w`])(--[\w-]+|\w+(?:_\w+)+|\w+\[\w+\]=\w+)", r"`\1`", text)
