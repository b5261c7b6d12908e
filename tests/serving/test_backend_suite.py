"""onnx's own backend test suite through `memonger.serving.onnx_backend`: every test stock onnxruntime passes, passes
planned; of the tests whose functions are written out as their bodies, every sixth, and of those that differ in nothing
but element types every third. Its real models are those of tests/models/test_light_models.py, which compares them bit
for bit."""

import os
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import onnx
import onnxruntime
import pytest
from onnx.backend.base import Backend, BackendRep

from memonger.serving.onnx_backend import MemongerBackend, PreparedModel
from tests.support import backend_cases, networks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the suite's own arithmetic overflows on purpose
    from onnx.backend.test.loader import load_model_tests
    from onnx.backend.test.runner import Runner

PARTS = 4  # the node tests, in turns
EXPANDED = 6  # of function bodies written out, variants of a few functions each, every sixth
TYPED = 3  # of tests that differ in element types
TYPE = re.compile(r"(?<=_)(?:u?int\d+|b?float\d*(?:e\dm\d\w*)?|e8m0|double|bool|string)(?=_|$)", re.IGNORECASE)


class _StockModel(BackendRep):
    def __init__(self, model: onnx.ModelProto) -> None:
        self.session = networks.stock(model, threads=1)

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        names = [value.name for value in self.session.get_inputs()]
        return tuple(self.session.run(None, dict(zip(names, inputs, strict=False))))


class _Stock(Backend):
    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device == "CPU"

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> _StockModel:
        return _StockModel(model)


class _Planned(MemongerBackend):
    made: ClassVar[list[PreparedModel]] = []

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device == "CPU"  # it is asked some thousand times, and the answer for CUDA looks for packages

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> PreparedModel:
        cls.made.append(super().prepare(model, device, threads=1, **kwargs))
        return cls.made[-1]


@pytest.fixture(scope="module")
def runners() -> Iterator[tuple[Runner, Runner, set[str]]]:
    """The suite for stock onnxruntime and for memonger, and the tests whose model would have to be downloaded."""
    onnxruntime.set_default_logger_severity(4)
    with warnings.catch_warnings(), backend_cases.made_quickly():
        warnings.simplefilter("ignore")
        remote = {t.name for t in load_model_tests(kind="real") if (t.url or "").startswith("http")}
        yield Runner(_Stock), Runner(_Planned), remote
    onnxruntime.set_default_logger_severity(2)


def _passes(test: Any) -> bool:
    try:
        test.func(None)
    except Exception:  # whatever way a test of the suite fails
        return False
    return True


def _chosen(names: list[str]) -> list[str]:
    """Those that are tried, sorted."""
    expanded = [name for name in names if "_expanded" in name]
    alike = defaultdict[str, list[str]](list)
    for name in names:
        if "_expanded" not in name:
            alike[TYPE.sub("TYPE", name)].append(name)
    own = (name for each in alike.values() for name in (each[::TYPED] if len(each) > 2 else each))
    return sorted([*own, *expanded[::EXPANDED]])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("category", "part"),
    [
        *(("NodeModel", part) for part in range(PARTS)),
        ("SimpleModel", None),
        ("PyTorchConvertedModel", None),
        ("PyTorchOperatorModel", None),
    ],
)
def test_what_stock_onnxruntime_passes_passes_planned(
    category: str, part: int | None, runners: tuple[Runner, Runner, set[str]], tmp_path: Path,
    record_property: Callable[[str, object], None], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(os.environ, "ONNX_HOME", str(tmp_path))
    stock, planned, remote = runners
    names = [name for name in sorted(stock._test_items[category]) if name.endswith("_cpu")]
    names = [name for name in names if name.removesuffix("_cpu") not in remote]
    names = _chosen(names)
    if part is not None:
        names = names[part::PARTS]
    passed, arenas, failed = 0, 0, []
    for name in names:
        if not _passes(stock._test_items[category][name]):
            continue
        _Planned.made.clear()
        if _passes(planned._test_items[category][name]):
            passed += 1
        else:
            failed.append(name)
        arenas += any(plan.arena_bytes for model in _Planned.made for plan in model.plans.values())
    record_property(
        "backend_suite", {"passed": passed, "of": passed + len(failed), "arenas": arenas, "all": len(names)}
    )
    assert not failed
    assert passed > 0
    assert arenas >= passed // 2
