"""What mkdocs is told here: pages have the paths they have in the repository, so that their links work in both places.

A page may link to any file of the repository (a table of figures, an example, the licence); that file comes along.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
from command_line import reference

ROOT = Path(__file__).parent.parent.parent
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
    "docs/**/*.md",
    "docs/**/*.ipynb",
    "docs/**/*.css",
)
COMMANDS = "<!-- the commands -->"
CODE = re.compile(r"<code>.*?</code>", re.DOTALL)
FLAG = re.compile(r"(?<=[\s>])--?[a-z][\w-]*")
LINK = re.compile(r"\]\(([\w./-]+)[)#]")


class Notebook(File):
    """A notebook is a page."""

    def is_documentation_page(self) -> bool:
        """Yes."""
        return True


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The theme's files, the pages, and what the pages link to."""
    theme = [file for file in files if Path(str(file.src_dir)) != Path(config.docs_dir)]
    pages = sorted({path for pattern in PAGES for path in ROOT.glob(pattern)})
    linked = {target for page in pages if page.suffix != ".css" for target in _linked(page)}
    return Files([*theme, *(_file(path, config) for path in [*pages, *sorted(linked - set(pages))])])


def on_page_read_source(page: Page, config: MkDocsConfig) -> str | None:
    """A notebook as the text of a page; other pages are read as they are."""
    path = Path(str(page.file.abs_src_path))
    return notebook_text(json.loads(path.read_text("utf-8"))) if path.suffix == ".ipynb" else None


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts the commands where a page has a place for them."""
    return markdown.replace(COMMANDS, reference()) if COMMANDS in markdown else markdown


def on_page_content(html: str, **_: Any) -> str:
    """Neither flags are broken between lines, behind their hyphens, nor lines of a terminal's tables."""
    return CODE.sub(_unbroken, html)


def _unbroken(code: re.Match[str]) -> str:
    text = FLAG.sub(r'<span class="unbroken">\g<0></span>', code[0])
    return text.replace("<code", '<code class="unbroken"', 1) if "┃" in text else text


def notebook_text(notebook: dict[str, Any]) -> str:
    """The cells of a notebook in Markdown, each followed by what it printed or gave."""
    return "\n\n".join(_cell_text(cell) for cell in notebook["cells"])


def _cell_text(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        return source
    return "\n\n".join([f"```python\n{source}\n```", *map(_output_text, cell["outputs"])])


def _output_text(output: dict[str, Any]) -> str:
    """What was printed as text; a value as HTML where it has that form."""
    if "text/html" in output.get("data", {}):
        return "".join(output["data"]["text/html"])
    text = output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"]
    return f"```text\n{''.join(text).rstrip()}\n```"


def _linked(page: Path) -> set[Path]:
    """Files of the repository that a page links to."""
    targets = {(page.parent / link).resolve() for link in LINK.findall(page.read_text("utf-8"))}
    return {target for target in targets if target.is_file() and target.is_relative_to(ROOT)}


def _file(path: Path, config: MkDocsConfig) -> File:
    kind = Notebook if path.suffix == ".ipynb" else File
    return kind(path.relative_to(ROOT).as_posix(), str(ROOT), config.site_dir, config.use_directory_urls)
