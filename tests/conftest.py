"""What all tests may use, what they spend on other things than testing, and the counts of the backend suite."""

import functools
import gc
import logging
import math
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before NumPy and PyTorch are imported
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # tests start hundreds of processes: none compiles the package again
sys.dont_write_bytecode = False

import pytest  # noqa: E402

try:  # some tests run where nobody has installed more than the extra [cpu] and pytest
    from hypothesis import settings
    from xdist.scheduler import LoadScopeScheduling
except ModuleNotFoundError:
    settings, LoadScopeScheduling = None, object

from memonger.planner import chunk_timing  # noqa: E402
from tests.support import networks  # noqa: E402
from tests.support.bad_input import Place  # noqa: E402

# No deadline: how long an example takes says nothing on a busy machine.
if settings is not None:
    settings.register_profile("memonger", deadline=None, max_examples=40)
    settings.load_profile("memonger")
networks.sleep_while_waiting()
chunk_timing.SHORTEST = math.inf  # plans that are tested don't depend on the machine's speed


def pytest_runtest_setup() -> None:
    """Let PyTorch's exporter read its operators once: it does for each export anew, most of the time of a small one."""
    imported = sys.modules.get("torch.onnx._internal._lazy_import")
    for place, name in (
        (imported and imported.onnxscript_apis, "get_torchlib_ops"),
        (sys.modules.get("torch._export.utils"), "_materialize_cpp_cia_ops"),
    ):
        read = getattr(place, name, None)
        if read is not None and not hasattr(read, "cache_info"):
            setattr(place, name, functools.cache(read))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A folder to work in and a folder for temporary files, both empty."""
    for name in ("work", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return Place(tmp_path / "work", tmp_path / "temporary")


_ALIKE = {
    "exports from PyTorch": r"(model/test_(from_torch|torch_export)|runtime/test_training_networks|graph/test_costs)",
    "onnx's tests of nodes": r"(model/test_shape_rules|autodiff/test_coverage|serving/test_backend_suite)",
    "reports": r"report/",
    "reference networks": r"(models/test_models|planner/test_networks_planned)",
    "steps of PyTorch": r"(torch/|benchmarks/test_torch_compiled)",
}
"""Files whose tests share what takes long: exports, networks, what PyTorch imports and keeps for its compiler."""


class _Scheduling(LoadScopeScheduling):
    """Tests of a file run in one process, file after file: what they share (fixtures, exports, plans) is made once.

    So are those of `_ALIKE`. Dealing out 6,000 tests by themselves takes 15 seconds more.
    """

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith("tests/facts/"):
            return nodeid  # each check is a process of its own already
        file = nodeid.partition("::")[0]
        return next((name for name, files in _ALIKE.items() if re.match(f"tests/{files}", file)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """How tests are dealt out to processes: as they are collected, not files with many tests first."""
    config.option.loadscopereorder = False
    return _Scheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Processes take the last files first: of those that come last then none takes long, and they end together."""
    if hasattr(config, "workerinput"):
        place = {path: number for number, path in enumerate(dict.fromkeys(item.path for item in items))}
        items.sort(key=lambda item: -place[item.path])


_collections = -1


def pytest_configure() -> None:
    """On the stand-in for CUDA nothing is skipped for want of it: where it can't run, no test does."""
    if os.environ.get("MEMONGER_FAKE_CUDA") == "1":
        from tests.support.cuda import ABSENT

        if ABSENT:
            raise pytest.UsageError(f"the stand-in for CUDA doesn't run: {ABSENT}")


def pytest_collection_finish() -> None:
    """What imports made stays. Loggers hand on what they are told, or pytest attaches to each, thrice a test."""
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):  # PyTorch has fifty that hand on nothing
            logger.propagate = True
    _leave_alone_what_stays()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Any:
    """So does what tests of a file share: sessions collect garbage as they are made, and would look all through it."""
    made = yield
    if fixturedef.scope != "function":
        _leave_alone_what_stays()
    return made


def pytest_runtest_logfinish() -> None:
    """So does what tests imported, PyTorch above all, and what they keep for each other."""
    _leave_alone_what_stays()


def _leave_alone_what_stays() -> None:
    """After a full garbage collection: later ones needn't look through what survives now (half the suite's time)."""
    global _collections
    if gc.get_stats()[2]["collections"] > _collections:
        gc.collect()
        gc.freeze()
        _collections = gc.get_stats()[2]["collections"]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print N of N for onnx's backend test suite."""
    reports = [report for status in ("passed", "failed") for report in terminalreporter.stats.get(status, ())]
    counts = [value for report in reports for key, value in report.user_properties if key == "backend_suite"]
    if counts:
        total = {key: sum(count[key] for count in counts) for key in counts[0]}
        terminalreporter.write_line(
            f"onnx backend suite: of {total['all']} tests stock onnxruntime passes {total['of']}; planned, "
            f"{total['passed']} of {total['of']} pass, {total['arenas']} of them with a non-empty arena"
        )
