"""Notebooks run in this process: code cells one after another in one namespace, with what each prints and gives."""

import ast
import contextlib
import io
import json
from pathlib import Path
from typing import Any

Notebook = dict[str, Any]


def read(path: Path) -> Notebook:
    """A notebook from its file."""
    notebook: Notebook = json.loads(path.read_text("utf-8"))
    return notebook


def code_cells(notebook: Notebook) -> list[dict[str, Any]]:
    """The cells that run."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook: Notebook, folder: Path) -> Notebook:
    """The notebook with the outputs it has now, run in a folder."""
    names: dict[str, Any] = {"__name__": "__main__"}
    made: Notebook = json.loads(json.dumps(notebook))
    with contextlib.chdir(folder):
        for number, cell in enumerate(code_cells(made), start=1):
            cell.update(execution_count=number, outputs=_outputs("".join(cell["source"]), names, number))
    return made


def _outputs(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """What a cell prints, and the value of its last line where that is an expression."""
    *statements, last = ast.parse(source).body
    printed, outputs, value = io.StringIO(), [], None
    with contextlib.redirect_stdout(printed):
        if isinstance(last, ast.Expr):
            exec(compile(ast.Module(statements, []), f"<cell {number}>", "exec"), names)
            value = eval(compile(ast.Expression(last.value), f"<cell {number}>", "eval"), names)
        else:
            exec(compile(source, f"<cell {number}>", "exec"), names)
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(printed.getvalue())})
    if value is not None:
        outputs.append(
            {"data": _shown(value), "execution_count": number, "metadata": {}, "output_type": "execute_result"}
        )
    return outputs


def _shown(value: object) -> dict[str, list[str]]:
    """What Jupyter shows of a value."""
    html = getattr(value, "_repr_html_", None)
    return {**({"text/html": _lines(html())} if html else {}), "text/plain": _lines(repr(value))}


def text(outputs: list[dict[str, Any]]) -> str:
    """What a reader of the plain text sees of a cell's outputs."""
    parts = (each["text"] if each["output_type"] == "stream" else each["data"]["text/plain"] for each in outputs)
    return "\n".join("".join(part) for part in parts)


def written(path: Path, folder: Path) -> str:
    """The text of a notebook's file with the outputs it has now."""
    return json.dumps(run(read(path), folder), indent=1, ensure_ascii=False) + "\n"


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)
