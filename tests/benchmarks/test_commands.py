"""Every command of benchmarks/ that a page names is there, and takes the flags that the page gives it."""

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *(ROOT / "docs").rglob("*.md"),
]
_CALL = re.compile(r"(?:python3? -m )?benchmarks((?:\.[a-z_]+)+)(?![\w.])((?:\s+(?!#)[^\s`]+)*)")
ELSEWHERE = {"process"}  # a program without a parser: its flags are words


def _calls() -> dict[str, set[str]]:
    """The flags that pages give each program, by its name; those that the table of figures implies have none."""
    found: dict[str, set[str]] = {}
    for page in PAGES:
        text = page.read_text("utf-8")
        spans = [*re.findall(r"`([^`\n]*(?:\n[^`\n]+)?)`", text), *re.findall(r"^python3? -m .*$", text, re.MULTILINE)]
        for span in spans:
            for call in _CALL.finditer(span):
                flags = re.findall(r"(?<=\s)--?[a-z][a-z_-]*", call[2])
                found.setdefault(call[1][1:], set()).update(flags)
    tables = (ROOT / "benchmarks" / "README.md").read_text("utf-8")
    for table, text in re.findall(r"^\| \[[^]]*\]\((\w+/\w+)\.txt\)(.*)", tables, re.MULTILINE):
        if "python -m benchmarks" not in text:  # a table that another program writes says which
            found.setdefault(table.replace("/", "."), set())
    return found


CALLS = _calls()


def test_the_pages_name_programs() -> None:
    assert {"chunks", "gpu_day", "gpu_day.bundle", "packages", "process", "training.peers"} <= set(CALLS)
    assert "--budgets" in CALLS["chunks"]
    assert "--record" in CALLS["inference.shapes"]
    assert len(CALLS) > 25


@pytest.mark.parametrize("name", CALLS)
def test_a_program_that_a_page_names_takes_its_flags(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = ROOT / "benchmarks" / name.replace(".", "/")
    file = file / "__main__.py" if file.is_dir() else file.with_suffix(".py")
    assert _runs_main(file), f"{file} does nothing when it is run"
    dotted = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    program = importlib.import_module(dotted)
    if name in ELSEWHERE:
        return
    monkeypatch.setattr(sys, "argv", [str(file), "--help"])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert not ended.value.code
    said = capsys.readouterr().out
    assert "usage" in said.lower()
    assert {flag for flag in CALLS[name] if not re.search(rf"(?<!\w){flag}\b", said)} == set()


def _runs_main(file: Path) -> bool:
    """Whether a file has something to do as a program."""
    last = ast.parse(file.read_text("utf-8")).body[-1]
    return isinstance(last, ast.If) and "__main__" in ast.unparse(last.test)
