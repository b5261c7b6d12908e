"""The tests of sessions and plans on the device: how many passed, and which failed with what words."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.stages import Settings

FILES = {"runtime": "tests/runtime/test_cuda_sessions.py", "planning": "tests/planner/test_cuda_plans.py"}
START = """
import sys
from benchmarks.training.side_by_side.job import load_cuda_libraries
load_cuda_libraries()
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""
REHEARSED = ("-k", "tensors_of_the_device or another_gpu")


def measure(item: str, settings: Settings, seconds: float) -> dict[str, Any]:
    """One file of tests."""
    report = Path(settings.folder) / f"{item}.xml"
    command = [sys.executable, "-c", START, "-q", "-p", "no:cacheprovider", f"--junitxml={report}", FILES[item]]
    command += ["-o", "filterwarnings=default"]  # of whichever versions there are
    command += [*REHEARSED] if settings.rehearse else []
    result = subprocess.run(command, capture_output=True, text=True, timeout=max(1.0, seconds - 2), check=False)
    if not report.is_file():
        last = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()][-1:]
        return {"failed": f"pytest ended with status {result.returncode}: {' '.join(last)[:300]}"}
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failures = {
        str(case.get("name")): " ".join(str(found[0].get("message")).split())[:300]
        for case in cases
        if (found := [*case.iter("failure"), *case.iter("error")])
    }
    skipped = sum(1 for case in cases if case.find("skipped") is not None)
    return {"passed": len(cases) - skipped - len(failures), "skipped": skipped, "failures": failures}
