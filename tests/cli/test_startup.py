"""The command line and the package start without the libraries that only some commands need."""

import os
import subprocess
import sys

import pytest

import memonger
from memonger.cli.options import TARGETS
from memonger.serving import TARGETS as WRITERS

HEAVY = ("numpy", "onnx", "onnx_ir", "sympy", "onnxruntime", "networkx", "rich")

COMMANDS = (
    "differentiate", "draw", "export", "fit", "inspect", "pack", "pareto", "plan", "plan-all", "run", "shrink",
    "unplan",
    "verify",
)  # fmt: skip

RUN = """
import sys
from memonger.cli.commands import main
try:
    main(sys.argv[1:], prog_name="memonger")
finally:
    print("LOADED", *(name for name in {heavy!r} if name in sys.modules), file=sys.stderr)
"""


def _loaded(code: str, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", code.format(heavy=HEAVY), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **environment})


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], *([name, "--help"] for name in COMMANDS)], ids=" ".join
)
def test_help_needs_no_heavy_library(arguments: list[str]) -> None:
    done = _loaded(RUN, *arguments)
    assert done.stderr == "LOADED\n"
    assert done.stdout.startswith("memonger, version " if arguments == ["--version"] else "Usage: memonger")


def test_completion_needs_no_heavy_library() -> None:
    environment = {"_MEMONGER_COMPLETE": "bash_complete", "COMP_WORDS": "memonger plan --strategy s", "COMP_CWORD": "3"}
    done = _loaded(RUN, **environment)
    assert done.stdout.split() == ["plain,sqrt", "plain,sweep"]
    assert done.stderr == "LOADED\n"


def test_importing_the_package_needs_no_heavy_library() -> None:
    done = _loaded("import sys, memonger; print(*(name for name in {heavy!r} if name in sys.modules))")
    assert done.stdout == "\n"


def test_a_plan_needs_no_sympy_and_dimensions_with_symbols_have_it() -> None:
    done = _loaded("""
import sys
import memonger
import onnx_ir as ir
from tests.support import training_models
memonger.Session(memonger.search_plan(training_models.classifier(), mode="inference", device="none"))
print(*(name for name in ("sympy", "onnx_ir._symbolic_shapes") if name in sys.modules))
print(ir.SymbolicDim("N") + 1, (ir.SymbolicDim("2*N") // 2).simplify())
import sympy
print(ir.SymbolicDim(sympy.Symbol("M") * 2), ir.__spec__.loader is ir.__loader__)
""")
    assert done.stdout.split("\n") == ["", "N + 1 N", "2*M True", ""]


def test_every_public_name_is_there() -> None:
    for name in memonger.__all__:
        assert getattr(memonger, name) is getattr(memonger, name)
        assert name in dir(memonger)
    with pytest.raises(AttributeError, match="module 'memonger' has no attribute 'allocate'"):
        _ = memonger.allocate  # type: ignore[attr-defined]


def test_the_targets_in_the_help_are_those_there_are() -> None:
    assert tuple(WRITERS) == TARGETS
