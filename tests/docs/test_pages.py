"""The pages hold together without being built: all in the navigation, every public name, no dead links or samples."""

import ast
import json
import re
import shlex
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

import click
import pytest

import memonger
from memonger.cli import commands

ROOT = Path(__file__).parent.parent.parent
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")
PAGES = sorted([*(ROOT / name for name in TOP), *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")])
NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_DESCRIBED = re.compile(r"^::: (memonger\S*)$", re.MULTILINE)
_CALL = re.compile(r"^(?:\$ |.*&& )?(?:\.venv/bin/)?(memonger(?:-plan)? .*)$", re.MULTILINE)


def _text(path: Path) -> str:
    """A page in Markdown."""
    if path.suffix == ".md":
        return path.read_text("utf-8")
    cells = json.loads(path.read_text("utf-8"))["cells"]
    sources = [("".join(cell["source"]), cell["cell_type"]) for cell in cells]
    return "\n\n".join(f"```python\n{text}\n```" if kind == "code" else text for text, kind in sources)


def _prose(path: Path) -> str:
    return _BLOCK.sub("", _text(path))


def _anchors(path: Path) -> set[str]:
    """What a link into a page may point at: headings, and what it describes of the API."""
    headings = re.findall(r"^#+ (.+)$", _prose(path), re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading)) for heading in headings]
    return {"-".join(each.lower().split()) for each in words} | set(_DESCRIBED.findall(_text(path)))


def _blocks(language: str) -> Iterator[tuple[str, str]]:
    """Every block of code of a language, with its page."""
    for name, path in zip(NAMES, PAGES, strict=True):
        for found in _BLOCK.finditer(_text(path)):
            if found[1] == language:
                yield name, found[2]


def test_every_page_is_in_the_navigation_once() -> None:
    configuration = (ROOT / "mkdocs.yml").read_text("utf-8")
    nav = configuration[configuration.index("\nnav:") : configuration.index("\ntheme:")]
    assert sorted(re.findall(r": (\S+\.(?:md|ipynb))$", nav, re.MULTILINE)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for link in _LINK.findall(_prose(page)):
        if re.match(r"(https?|mailto):", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.is_relative_to(ROOT), f"{name}: {link} leads out of the repository"
        assert target.is_file(), f"{name}: {link} leads nowhere"
        if anchor:
            assert anchor in _anchors(target), f"{name}: {link} is no heading there"


def test_every_public_name_is_described_once() -> None:
    described = [name for path in PAGES for name in _DESCRIBED.findall(_text(path))]
    assert len(described) == len(set(described))
    assert {f"memonger.{name}" for name in memonger.__all__} <= set(described)


def test_python_samples_name_what_there_is() -> None:
    seen = 0
    for page, source in _blocks("python"):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "memonger":
                seen += 1
                assert node.attr in {*memonger.__all__, "export", "backend", "torch"}, f"{page}: memonger.{node.attr}"
    assert seen > 20


@pytest.mark.parametrize("language", ["bash", "console"])
def test_commands_in_pages_are_understood(language: str) -> None:
    seen = 0
    for page, block in _blocks(language):
        for line in _CALL.findall(re.sub(r"\\\n", " ", block)):
            seen += 1
            wrong = _misunderstood(shlex.split(line, comments=True))
            assert not wrong, f"{page}: {line}: {wrong}"
    assert seen


def _misunderstood(call: list[str]) -> str:
    """What is wrong with a call; empty if nothing is."""
    arguments = ["plan", *call[1:]] if call[0] == "memonger-plan" else call[1:]
    context = click.Context(commands.main, info_name="memonger")
    try:
        name, command, rest = commands.main.resolve_command(context, arguments)
        assert command is not None
        command.make_context(name, rest, parent=context)
    except click.UsageError as error:
        return error.format_message()
    return ""


def test_the_citation_is_of_this_version_and_licence() -> None:
    citation = dict(re.findall(r"^([\w-]+): (.+)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE))
    settings = ConfigParser()
    settings.read(ROOT / "setup.cfg")
    assert citation["version"] == memonger.__version__ == settings["metadata"]["version"]
    assert citation["license"] == settings["metadata"]["license"]
    assert "Apache License" in (ROOT / "LICENSE").read_text("utf-8")
    assert {"cff-version", "message", "title"} <= set(citation)
