"""Console sessions in pages are what the commands print: they are run, compared with the page, and written anew.

    python -m tests.support.transcript [--write] [PAGE ...]      # every page, by the real commands; takes minutes

A block of ``console`` with lines that start with ``$`` and others below them is a session. The sessions of a page run
in its order, in one folder that is empty at first. Above a block may stand

    <!-- numbers vary -->                                   its form is compared, not its numbers
    <!-- numbers vary; in the tests: --time-limit 0.3 -->   and there that is added to its commands

Times are never compared, and numbers of plans for a device only on a machine like the one the page names at its end.
"""

import difflib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, chdir, nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import click
from click.testing import CliRunner

import models.__main__
from memonger.cli import commands, planning
from memonger.runtime.host import HostBackend
from tests.support import notebook

ROOT = Path(__file__).parent.parent.parent
COLUMNS = "80"
EFFORT = 20  # of searches where numbers vary

Printed = Callable[["Command"], str]


@dataclass(frozen=True, slots=True)
class Page:
    """A page with sessions.

    Attributes:
        path: Where it lies in the repository.
        first: Commands that run before the first session, and aren't shown.
        like: A page whose commands, with other file names, stand here too: what takes long here is compared in form
            with what those print. None: the commands run in the tests.
        programs: Whether its blocks of Python are programs, which run in their place among the commands.
    """

    path: str
    first: tuple[str, ...] = ()
    like: str | None = None
    programs: bool = False


TUTORIAL = "docs/tutorial.ipynb"
FIRST_TEN = "docs/first-ten-commands.md"
PAGES = (
    Page(FIRST_TEN),
    Page("docs/INFERENCE.md", ("python -m models densenet121 -o densenet121.onnx",), like=FIRST_TEN),
    *(
        Page(path.relative_to(ROOT).as_posix(), programs=True)
        for path in sorted((ROOT / "docs" / "how-to").glob("*.md"))
    ),
)


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a session and what stands below it.

    Attributes:
        line: The command, as it stands after the ``$``.
        output: Lines below it.
        varies: Whether only the form of the output can be compared.
        added: What the tests add to the command.
    """

    line: str
    output: str
    varies: bool
    added: str

    @property
    def kind(self) -> str:
        """The command whatever files and batch it names: what prints the same form."""
        line = re.sub(r" --batch \d+", "", self.line.replace("memonger-plan", "memonger plan"))
        return re.sub(r"[\w./-]+\.onnx", "MODEL", line)


_SESSION = re.compile(
    r"(?:<!-- (?P<varies>numbers vary)(?:; in the tests: (?P<added>.*?))? -->\n)?```console\n(?P<body>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_COMMAND = re.compile(r"^\$ (?P<line>(?:.*\\\n)*.*)\n(?P<output>(?:(?!\$ ).*\n)*)", re.MULTILINE)
_PROGRAM = re.compile(r"^```python\n(?P<program>.*?)^```$", re.DOTALL | re.MULTILINE)
_MACHINE = re.compile(r"^<!-- printed with .* -->$", re.MULTILINE)


def commands_of(session: re.Match[str]) -> list[Command]:
    """The commands of a session."""
    varies, added = bool(session["varies"]), session["added"] or ""
    return [Command(one["line"], one["output"], varies, added) for one in _COMMAND.finditer(session["body"])]


def _parts(page: Page, text: str) -> list[re.Match[str]]:
    """What runs of a page, in its order: sessions, and programs where they do."""
    found = [*_SESSION.finditer(text), *(_PROGRAM.finditer(text) if page.programs else ())]
    return sorted(found, key=lambda part: part.start())


def _run_program(program: str, folder: Path) -> None:
    with chdir(folder), redirect_stdout(io.StringIO()):
        exec(compile(program, "a program of the page", "exec"), {"__name__": "__main__"})


def run(line: str, folder: Path) -> str:
    """What a command prints, in a folder; memonger and ``python -m models`` run in this process, others in a shell."""
    program, *arguments = shlex.split(line)
    if program == "memonger":
        return _invoke(commands.main, arguments, "memonger", folder)
    if program == "memonger-plan":
        return _invoke(commands.plan, arguments, "memonger-plan", folder)
    if [program, *arguments[:2]] == ["python", "-m", "models"]:
        return _invoke(models.__main__.main, arguments[2:], "python -m models", folder)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        line, shell=True, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False,
    )  # fmt: skip
    return _tidy(done.stdout)


def _invoke(command: click.Command, arguments: list[str], name: str, folder: Path) -> str:
    ours = [key for key in os.environ if key.startswith("MEMONGER_") or key in ("FORCE_COLOR", "TTY_COMPATIBLE")]
    environment: Mapping[str, str | None] = {**dict.fromkeys(ours), "COLUMNS": COLUMNS}
    quiet = ["--quiet"] if _takes_quiet(command, arguments) else []  # progress isn't there to stay
    with chdir(folder):
        result = CliRunner(env=environment).invoke(command, [*arguments, *quiet], prog_name=name)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return _tidy(result.output)


def _takes_quiet(command: click.Command, arguments: list[str]) -> bool:
    chosen = command.commands.get(arguments[0]) if isinstance(command, click.Group) and arguments else command
    return chosen is not None and any("--quiet" in parameter.opts for parameter in chosen.params)


def _tidy(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


_TIME = re.compile(r"\d+(?:\.\d+)? (?:µs|ms|s)\b")
_NUMBER = re.compile(r"[+-]?\d[\d,.]*\d(?:e-?\d+)?|[+-]?\d")
_UNIT = re.compile(r"# (?:B|bytes|[KMG]iB|µs|ms|s)\b")
_NOISE = re.compile(r"^(?:memonger: note: )?The machine is noisy:.*?says\s+more\.\n", re.DOTALL | re.MULTILINE)
_MADE_OF = re.compile(
    r"^Largest at its peak:.*?^Most of it is .*?\.\n(?:(?=Live)|Keep[^\n]*\n)", re.DOTALL | re.MULTILINE
)
_BARS = re.compile("[▁-█]+")


def exact(text: str) -> str:
    """What has to be the same on machines of one kind: all but times."""
    return _TIME.sub("# s", _tidy(text))


def form(text: str) -> str:
    """What has to be the same for other models, too: words, rows and columns; of equal rows one."""
    text = _MADE_OF.sub("", _NOISE.sub("", text))  # what another model is made of has other names
    masked = _BARS.sub("▁", _UNIT.sub("#", _NUMBER.sub("#", re.sub(r"[\w./-]+\.onnx", "MODEL", text))))
    masked = re.sub(r"#(?:, #)+", "#", masked)  # a list of numbers has any length
    lines = [" ".join(re.sub("([━─])+", r"\1", line).split()) for line in masked.splitlines()]
    return " ".join(line for index, line in enumerate(lines) if index == 0 or line != lines[index - 1])


def difference(command: Command, printed: str, same_machine: bool) -> str:
    """How what a command prints differs from its page; empty where it doesn't."""
    alike = form if command.varies or not same_machine else exact
    if alike(command.output) == alike(printed):
        return ""
    shown = difflib.unified_diff(command.output.splitlines(), printed.splitlines(), "page", "printed", lineterm="")
    return "\n".join([f"$ {command.line}", *shown])


def machine() -> str:
    """What numbers of plans for the CPU depend on."""
    return (
        f"<!-- printed with onnxruntime {version('onnxruntime')}, {os.cpu_count()} cores, "
        f"processor {HostBackend().machine_name()[:8]} -->"
    )


def differences(page: Page, kinds: Mapping[str, str] | None = None) -> tuple[list[str], dict[str, str]]:
    """Where a page differs from what its commands print, and what each of them printed, by kind.

    Args:
        page: The page.
        kinds: What commands of each kind print, for a page that is `Page.like` another; its own don't run then.
    """
    text = (ROOT / page.path).read_text("utf-8")
    found, printed, same_machine = [], dict[str, str](), machine() in text
    with tempfile.TemporaryDirectory() as folder:
        for command in _commands(page, text, Path(folder)):
            if kinds is None:
                with _less_effort() if command.varies else nullcontext():
                    output = _without(command.added, run(f"{command.line} {command.added}", Path(folder)))
            elif command.kind in kinds:
                output = kinds[command.kind]
            else:
                raise AssertionError(f"{page.path}: no command like '{command.line}' stands in {page.like}.")
            printed[command.kind] = output
            found.append(difference(command, output, same_machine and kinds is None))
    return [each for each in found if each], printed


def _less_effort() -> AbstractContextManager[object]:
    """Searches end soon, where only the form of what is printed is compared."""
    return mock.patch.object(planning, "Options", partial(planning.Options, effort=EFFORT))


def _commands(page: Page, text: str, folder: Path) -> Iterator[Command]:
    """The commands of a page; programs between them run when it is their turn."""
    for part in _parts(page, text):
        if "program" in part.re.groupindex:
            _run_program(part["program"], folder)
        elif page.programs or any(one.output for one in commands_of(part)):
            yield from commands_of(part)


def _without(added: str, output: str) -> str:
    """Commands that are suggested repeat the options of the one that was given."""
    return output.replace(f" {added}", "") if added else output


def written(page: Page) -> str:
    """The page with what its commands print now."""
    text = (ROOT / page.path).read_text("utf-8")
    with tempfile.TemporaryDirectory() as folder:
        for line in page.first:
            run(line, Path(folder))

        for part in _parts(page, text):
            if "program" in part.re.groupindex:
                _run_program(part["program"], Path(folder))
                continue
            shown = commands_of(part)
            if page.programs or any(command.output for command in shown):
                body = "".join(f"$ {command.line}\n{run(command.line, Path(folder))}" for command in shown)
                text = text.replace(part[0], part[0].replace(part["body"], body), 1)
    return _MACHINE.sub(machine(), text)


@click.command()
@click.option("--write", is_flag=True, help="Write what is printed now; else pages are compared with it.")
@click.argument("paths", nargs=-1)
def main(write: bool, paths: tuple[str, ...]) -> None:
    """Run the commands of PATHS, pages with sessions, and the cells of the tutorial; all of them if none is named."""
    makers = {page.path: partial(written, page) for page in PAGES} | {TUTORIAL: _written_tutorial}
    for path in [path for path in makers if path in paths or not paths]:
        before, after = (ROOT / path).read_text("utf-8"), makers[path]()
        changed = list(difflib.unified_diff(before.splitlines(), after.splitlines(), path, "printed", lineterm=""))
        click.echo("\n".join(changed) or f"{path}: as it is.")
        if write and changed:
            (ROOT / path).write_text(after, "utf-8")


def _written_tutorial() -> str:
    with tempfile.TemporaryDirectory() as folder:
        return notebook.written(ROOT / TUTORIAL, Path(folder))


if __name__ == "__main__":
    main()
