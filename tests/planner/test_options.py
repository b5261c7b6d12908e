"""The keywords of the public functions: typed, documented, and checked once."""

import inspect
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

import memonger
from memonger.autodiff.losses import Loss
from memonger.autodiff.updates import Optimizer
from memonger.devices import parse_device
from memonger.errors import PlanError
from memonger.lowering.device_form import LEVELS
from memonger.option_names import Level, Order, Strategy
from memonger.options import Keywords
from memonger.schedule import STRATEGIES
from memonger.schedule.orders import ORDERS
from tests.support.planning_models import LOSS, chain

FUNCTIONS = (memonger.search_plan, memonger.pareto, memonger.make_mirror_plan, memonger.get_cost)

SNIPPET = """
import memonger

plan = memonger.search_plan("model.onnx", budget="4GiB", strategy="budget", options=memonger.Options(threads=1))
print(plan.batch, memonger.pareto("model.onnx", points=3, order="file")[0].model)
print(memonger.make_mirror_plan("model.onnx", 3, keep=["Conv"]).name, memonger.get_cost("model.onnx", loss="loss"))
"""

WRONG = {
    'memonger.search_plan("model.onnx", bugdet=1)': '"bugdet" for overloaded function "search_plan"',
    'memonger.search_plan("model.onnx", strategy="fast")': 'No overload variant of "search_plan"',
    'memonger.pareto("model.onnx", budgt=1)': '"budgt" for overloaded function "pareto"',
    'memonger.make_mirror_plan("model.onnx", 3, trial=1)': '"trial" for "make_mirror_plan"',
    'memonger.get_cost("model.onnx", los="loss")': '"los" for "get_cost"',
    "memonger.Options(bugdet=1)": '"bugdet" for "Options"',
}


def test_the_type_checker_refuses_unknown_keywords_and_names(tmp_path: Path) -> None:
    # Without other packages' types mypy takes seconds instead of a minute.
    pytest.importorskip("mypy")
    path = tmp_path / "snippet.py"
    path.write_text(SNIPPET + "\n".join(WRONG) + "\n")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--follow-imports=silent",
        "--no-site-packages",
        "--ignore-missing-imports",
    ]
    done = subprocess.run([*command, f"--cache-dir={tmp_path}", str(path)], capture_output=True, text=True, check=False)
    first = SNIPPET.count("\n") + 1
    for line, words in enumerate(WRONG.values(), start=first):
        assert any(f"snippet.py:{line}: error: " in each and words in each for each in done.stdout.splitlines()), words
    lines = {int(each.split(":")[1]) for each in done.stdout.splitlines() if ": error: " in each}
    assert lines == set(range(first, first + len(WRONG))), done.stdout


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: memonger.search_plan("m", bugdet=1), "search_plan() has no option 'bugdet'. Did you mean 'budget'?"),
        (lambda: memonger.pareto("m", point=1), "pareto() has no option 'point'. Did you mean 'points'?"),
        (
            lambda: memonger.make_mirror_plan("m", 1, keeps="a"),
            "make_mirror_plan() has no option 'keeps'. Did you mean 'keep'?",
        ),
        (lambda: memonger.get_cost("m", zzz=1), "get_cost() has no option 'zzz'."),
    ],
)
def test_an_unknown_keyword_names_the_nearest_option(call: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert str(caught.value) == message


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: str(function.__name__))
def test_help_documents_every_keyword(function: Any) -> None:
    names = {field.name for field in fields(memonger.Options)}
    signature, text = inspect.signature(function), inspect.getdoc(function)
    assert names < signature.parameters.keys()
    for name, parameter in signature.parameters.items():
        assert text.count(f"\n    {name}: ") == 1, name
        assert parameter.annotation is not parameter.empty
        assert parameter.kind is not parameter.VAR_KEYWORD
    assert "keywords" not in signature.parameters


def test_help_shows_the_options_a_function_starts_from() -> None:
    defaults = {name: p.default for name, p in inspect.signature(memonger.get_cost).parameters.items()}
    assert (defaults["device"], defaults["strategy"], defaults["order"]) == ("none", "marks", "best")


def test_the_keywords_are_the_fields_of_the_record() -> None:
    late = {"Loss": Loss, "Optimizer": Optimizer, "Buckets": memonger.Buckets}
    assert get_type_hints(Keywords, localns=late) == get_type_hints(memonger.Options, localns=late)


def test_the_names_are_those_of_what_they_choose() -> None:
    assert get_args(Strategy) == tuple(STRATEGIES)
    assert get_args(Order) == ("best", *ORDERS)
    assert get_args(Level) == tuple(LEVELS)


def test_a_record_gives_the_plan_that_its_keywords_give() -> None:
    options = memonger.Options(loss=LOSS, device="none", strategy="log")
    of_record = memonger.search_plan(chain(), options=options)
    of_keywords = memonger.search_plan(chain(), loss=LOSS, device="none", strategy="log")
    assert (of_record.graph.nodes, of_record.offsets) == (of_keywords.graph.nodes, of_keywords.offsets)
    assert of_record.strategy == "log"


def test_a_keyword_replaces_the_field_of_the_record() -> None:
    options = memonger.Options(loss=LOSS, device="none", strategy="log")
    assert memonger.search_plan(chain(), options=options, strategy="none").strategy == "none"
    with pytest.raises(PlanError, match="they take no budget"):
        memonger.search_plan(chain(), options=options, budget="1GiB")


def test_a_record_is_checked_when_it_is_made_and_stays_as_it_is() -> None:
    with pytest.raises(PlanError, match="mode must be 'training' or 'inference', not 'serve'"):
        memonger.Options(mode="serve")  # type: ignore[arg-type]
    options = memonger.Options(budget="4GiB")
    assert (options.budget_bytes, options.chosen_mode, options.chosen_strategy) == (
        4 * memonger.GiB,
        "inference",
        "budget",
    )
    with pytest.raises(FrozenInstanceError):
        options.budget = 3  # type: ignore[misc]


def test_progress_is_told_from_a_record() -> None:
    stages: list[str] = []
    memonger.search_plan(chain(), options=memonger.Options(loss=LOSS, device="none", progress=stages.append))
    assert stages[0] == "load"


MODEL_OPTIONS: list[tuple[str, Any]] = [
    ("batch", "2"), ("batch", True), ("batch", 0), ("batch", 1.0), ("batch", 10**12), ("threads", -1),
    ("threads", 100_000), ("threads", "1"), ("threads", None), ("trials", -1), ("trials", 10**9), ("trials", None),
    ("effort", -1),
    ("effort", 1e9), ("dims", 3), ("dims", {"seq": "3"}), ("dims", {"seq": 10**12}), ("keep", [1]),
    ("mirror", 5), ("loss", 4), ("optimizer", "sgd"), ("device", 4), ("device", "cuda:99999"), ("time_limit", "1"),
    ("time_limit", math.nan), ("time_limit", -1), ("sharing", None), ("cuda", None), ("inputs", [1]), ("mode", ["x"]),
    ("mode", np.zeros(3)), ("order", None), ("budget", 2**70), ("budget", "9" * 20 + "TiB"), ("progress", 3),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), MODEL_OPTIONS, ids=str)
def test_values_an_option_cannot_take(name: str, value: Any) -> None:
    with pytest.raises(PlanError, match="dimension|dims" if name == "dims" else name):
        memonger.search_plan(chain(), **{"mode": "inference", "device": "none", name: value})


@pytest.mark.parametrize("points", [0, -1, 10**9, 2.0, "3", True])
def test_points_that_are_no_number_of_budgets(points: Any) -> None:
    with pytest.raises(PlanError, match="points"):
        memonger.pareto(chain(), points=points, mode="inference", device="none")


def test_devices_are_numbered() -> None:
    named = [str(parse_device(text)) for text in ("none", "cpu", "cuda", "cuda:0", "cuda:12")]
    assert named == ["none", "cpu", "cuda:0", "cuda:0", "cuda:12"]


def test_numbers_of_numpy_are_numbers() -> None:
    options = memonger.Options(batch=np.int64(2), threads=np.int32(1))  # type: ignore[arg-type]
    assert (type(options.batch), type(options.threads)) == (int, int)


@pytest.mark.parametrize("setting", ["max_workspace", "tf32", "deterministic", "convolution_search"])
def test_settings_of_cuda_have_their_types(setting: str) -> None:
    with pytest.raises(PlanError, match=setting):
        memonger.Cuda(**{setting: "yes"})  # type: ignore[arg-type]
