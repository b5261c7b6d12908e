"""memonger's command line, called in this process."""

import click
from click.testing import CliRunner, Result

from memonger.cli import commands


def invoke(*words: object, command: click.Command = commands.main) -> Result:
    """What a command answers to words, as in a shell. An error that it doesn't expect is raised."""
    return CliRunner().invoke(command, [str(word) for word in words], catch_exceptions=False)
