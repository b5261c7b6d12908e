"""`search_plan`, `pareto`, `make_mirror_plan` and `get_cost` on models: budgets, options, determinism."""

import copy
import math
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memonger
import models
from memonger.errors import BudgetError, PlanError
from memonger.planner.job import decided, finish
from memonger.planner.search_plan import prepare
from tests.support.planning_models import LOSS, chain, network, plan

EFFORT = 1000


def _of_peak(plain: memonger.Plan, part: float) -> int:
    """The budget that leaves this part of the peak to the arena."""
    return plain.total_bytes - plain.arena_bytes + int(plain.peak_bytes * part)


# Budgets


def test_a_budget_is_held_with_all_that_counts() -> None:
    model = memonger.load(network("gpt"))
    plain = plan(model, strategy="none")
    budget = _of_peak(plain, 0.9)
    found = plan(model, budget=budget, effort=EFFORT)
    assert (found.strategy, found.budget) == ("budget", budget)
    assert found.total_bytes == found.arena_bytes + found.parameter_bytes + found.input_bytes <= budget
    assert 0 < found.overhead < 0.5


def test_measured_scratch_counts() -> None:
    pytest.importorskip("onnxruntime")
    model = memonger.load(network("gpt"))
    plain = plan(model, strategy="none", device="cpu")
    workspace = plain.workspace_bytes
    assert workspace == max(plain.graph.workspace) > 0
    assert plain.total_bytes == plain.arena_bytes + workspace + plain.parameter_bytes + plain.input_bytes
    found = plan(model, budget=_of_peak(plain, 0.8), device="cpu", effort=200)
    assert found.total_bytes <= _of_peak(plain, 0.8)


@pytest.mark.parametrize(
    "form", [int, float, np.int64, str, lambda size: f"{size}B", lambda size: f"{size / 1024} KiB"]
)
def test_a_budget_is_a_number_or_a_text(form: Any) -> None:
    found = plan(chain(), budget=form(102400), effort=EFFORT)
    assert found.budget == 102400
    assert isinstance(found.budget, int)


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ("1000.5", "'1000.5' is no size"),
        ("1 parsec", "'1 parsec' is no size"),
        ("-1MiB", "'-1MiB' is negative"),
        (-1, "budget must be at least 0 bytes, not -1"),
        (math.nan, "budget must be a number of bytes .* or a text such as '4GiB', not nan"),
        (math.inf, "budget must be a number of bytes .*, not inf"),
        (True, "budget must be a number of bytes .*, not True"),
        ([1], r"budget must be a number of bytes .*, not \[1\]"),
    ],
)
@pytest.mark.parametrize("strategy", [None, "budget", "exact"])
def test_a_budget_that_is_none_is_refused_at_once(budget: Any, words: str, strategy: str | None) -> None:
    with pytest.raises(PlanError, match=words):
        plan("no such file", budget=budget, strategy=strategy)


@pytest.mark.parametrize(("name", "budget"), [("chain", 0), ("chain", "1 B"), ("gpt", 0)])
def test_planning_with_the_smallest_budget_that_is_named_succeeds(name: str, budget: int | str) -> None:
    model = memonger.load(chain() if name == "chain" else network(name))
    options = {"loss": LOSS if name == "chain" else "loss", "effort": EFFORT}
    with pytest.raises(BudgetError, match=r"smallest budget that was found to work is .* \((\d+) bytes\)") as caught:
        plan(model, budget=budget, **options)
    smallest = caught.value.smallest
    assert f"({smallest} bytes)" in str(caught.value)
    assert caught.value.lower_bound <= smallest
    found = plan(model, budget=smallest, **options)
    assert found.total_bytes <= smallest
    with pytest.raises(BudgetError):
        plan(model, budget=caught.value.lower_bound - 1, **options)


def test_a_budget_above_the_peak_recomputes_nothing() -> None:
    plain = plan(chain(), strategy="none")
    for budget in (plain.total_bytes, "1TiB"):  # no byte less is needed
        found = plan(chain(), budget=budget)
        assert not found.recomputed
        assert found.overhead == 0
        assert found.arena_bytes == plain.arena_bytes


@pytest.mark.parametrize("strategy", ["none", "cheap", "block", "sqrt", "log", "sweep", "marks"])
def test_strategies_without_a_budget_refuse_one(strategy: str) -> None:
    with pytest.raises(
        PlanError, match=f"the strategies .*'{strategy}'.*: they take no budget, 'budget' and 'exact' do"
    ):
        plan(chain(), strategy=strategy, budget="1GiB")


@pytest.mark.parametrize("strategy", ["budget", "exact"])
def test_strategies_for_a_budget_need_one(strategy: str) -> None:
    with pytest.raises(PlanError, match=f"'{strategy}' needs a budget"):
        plan(chain(), strategy=strategy)


def test_inference_holds_a_budget_too() -> None:
    model = network("resnet18")
    plain = memonger.search_plan(model, mode="inference", device="none")
    assert (plain.strategy, plain.recomputed) == ("none", ())
    found = memonger.search_plan(model, mode="inference", device="none", budget=plain.total_bytes)
    assert found.strategy == "budget"
    assert found.total_bytes <= plain.total_bytes
    with pytest.raises(BudgetError, match="smallest budget"):
        memonger.search_plan(model, mode="inference", device="none", budget=plain.parameter_bytes, effort=EFFORT)


@pytest.mark.parametrize("options", [{"budget": 0.8}, {}, {"strategy": "exact", "budget": 0.8}])
def test_no_time_is_enough_for_a_valid_plan(options: dict[str, Any]) -> None:
    if options.get("strategy") == "exact":
        pytest.importorskip("ortools")
    if "budget" in options:
        options = {**options, "budget": _of_peak(plan(chain(), strategy="none"), options["budget"])}
    found = plan(chain(), time_limit=0, effort=EFFORT, **options)
    found.verify()
    assert found.budget is None or found.total_bytes <= found.budget


def test_the_exact_strategy_is_no_worse_than_the_search() -> None:
    pytest.importorskip("ortools")
    model = chain(5)
    budget = _of_peak(plan(model, strategy="none"), 0.9)
    quick = plan(model, budget=budget, effort=EFFORT)
    exact = plan(model, budget=budget, effort=EFFORT, strategy="exact", time_limit=20)
    assert exact.total_bytes <= budget
    assert 0 < exact.overhead <= quick.overhead
    assert exact.outcome.bound <= exact.overhead + 1e-9


def test_kept_nodes_are_told_where_no_budget_can_be_held() -> None:
    with pytest.raises(BudgetError, match=r"19 nodes are kept because .*force_mirroring 'False', keep\)"):
        plan(chain(), budget=0, keep=["*"], effort=EFFORT)


# Other options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "fast"}, "strategy must be 'none', 'cheap', .* 'budget' or 'exact', not 'fast'"),
        ({"mode": "serve"}, "mode must be 'training' or 'inference', not 'serve'"),
        ({"order": "random"}, "order must be 'best', 'file', 'growth', 'depth' or 'peak', not 'random'"),
        ({"level": "most"}, "level must be 'disable', 'basic', 'extended', 'all' or 'rewrite', not 'most'"),
        ({"trials": -1}, "trials must be a whole number from 0 to 10000, not -1"),
        ({"time_limit": -1}, "time_limit must be a finite number of seconds, 0 or more, not -1"),
        ({"time_limit": math.nan}, "time_limit must be .* not nan"),
        ({"mode": "inference", "loss": None, "mirror": ["Relu"]}, "nor with strategy='none'"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan(chain(), **options)


def test_an_option_nobody_knows_is_an_error() -> None:
    with pytest.raises(TypeError, match="bugdet"):
        plan(chain(), bugdet=1)


def test_the_sweep_says_what_it_tried() -> None:
    found = plan(network("resnet18"))
    tried = found.outcome.candidates
    assert tried[0].overhead == 0
    best = min(one.peak for one in tried)
    assert best == pytest.approx(found.peak_bytes, rel=1e-3)  # small nodes are folded there
    assert tried[0].peak == pytest.approx(found.peak_before_bytes, rel=1e-3)
    assert best < tried[0].peak
    assert any(one.segments == found.outcome.segments and one.peak == best for one in tried)


def test_progress_names_the_stages_in_turn() -> None:
    stages: list[str] = []
    plan(chain(), progress=stages.append)
    first = list(dict.fromkeys(stage.partition(":")[0] for stage in stages))
    assert first == ["load", "differentiate", "lower", "graph", "search", "verify"]
    assert any(stage.startswith("search: ") for stage in stages)


# Frontiers


def test_a_frontier_falls_in_total_and_rises_in_cost() -> None:
    model = memonger.load(chain())
    plans = memonger.pareto(model, points=3, device="none", loss=LOSS, effort=EFFORT)
    assert len(plans) > 2
    totals = [found.total_bytes for found in plans]
    overheads = [found.overhead for found in plans]
    assert totals == sorted(set(totals), reverse=True)
    assert overheads == sorted(set(overheads))
    assert overheads[0] == 0
    for found in plans:
        found.verify()
        assert found.model is not plans[0].model or found is plans[0]
        budget = int(found.total_bytes * 1.002)  # a search counts a little more, where small nodes are folded
        same = plan(model, budget=budget, loss=LOSS, effort=EFFORT)
        assert same.total_bytes <= budget
        assert same.overhead <= found.overhead + 0.01


def test_a_frontier_of_given_budgets_is_monotone() -> None:
    model = memonger.load(network("gpt"))
    plain = plan(model, strategy="none", loss="loss")
    budgets = [_of_peak(plain, part) for part in (0.9, 0.75, 0.6, 0.05)]
    plans = memonger.pareto(model, budgets=budgets, device="none", loss="loss", effort=EFFORT)
    assert plans[0].total_bytes == plain.total_bytes
    chosen = [next(each for each in plans if each.total_bytes <= budget) for budget in budgets[:3]]
    assert [each.overhead for each in chosen] == sorted(each.overhead for each in chosen)
    assert chosen[0].overhead > 0
    assert plans[-1].total_bytes > budgets[3]  # nothing fits that one: the smallest total found stands for it


@pytest.mark.parametrize(("budgets", "words"), [("1GiB", "must be a list"), (["1 parsec"], "'1 parsec' is no size")])
def test_budgets_of_a_frontier_that_are_none_are_refused(budgets: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        memonger.pareto("no such file", budgets=budgets)


def test_no_plan_is_above_its_budget() -> None:
    """The arena counts with its gaps: where live bytes fit and no layout does, the error says what fits."""
    model = chain(8)
    plain = plan(model, strategy="none")
    cases = [(part, memonger.Sharing(reuse=reuse)) for part in (0.3, 0.7, 0.99) for reuse in (True, False)]
    held = 0
    for part, sharing in cases:
        budget = _of_peak(plain, part)
        try:
            found = plan(model, budget=budget, effort=EFFORT, sharing=sharing)
            held += 1
        except BudgetError as error:
            budget = error.smallest
            found = plan(model, budget=budget, effort=EFFORT, sharing=sharing)
        assert found.total_bytes <= budget
    assert 0 < held < len(cases)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"points": 0}, "points must be a whole number from 1 to 1000, not 0"),
        ({"strategy": "sweep"}, "they take no budget, 'budget' and 'exact' do"),
    ],
)
def test_a_frontier_tries_budgets(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        memonger.pareto(chain(), loss=LOSS, **options)


def test_a_budget_of_a_frontier_is_one_of_its_budgets() -> None:
    asked: dict[str, Any] = {"loss": LOSS, "device": "none", "effort": EFFORT}
    budget = _of_peak(plan(chain(), strategy="none"), 0.7)
    one, other = memonger.pareto(chain(), budgets=[budget], **asked), memonger.pareto(chain(), budget=budget, **asked)
    assert [(each.total_bytes, each.overhead) for each in one] == [(each.total_bytes, each.overhead) for each in other]
    assert any(each.total_bytes <= budget for each in one)


# MXNet memonger's two functions


def test_a_threshold_trades_memory_for_computation() -> None:
    model = memonger.load(chain(16))
    before = memonger.get_cost(model, loss=LOSS)
    assert before == plan(model, strategy="none").peak_bytes
    thresholds = (0, 20_000, math.inf)
    costs = [memonger.get_cost(memonger.make_mirror_plan(model, t, loss=LOSS), loss=LOSS) for t in thresholds]
    assert costs[0] == before  # in a chain every node is a candidate
    assert costs[1] < before
    assert costs[2] != costs[1]


@pytest.mark.parametrize("name", ["gpt"])
def test_mirroring_all_between_the_stages_costs_less(name: str) -> None:
    model = memonger.load(network(name))
    mirrored = memonger.make_mirror_plan(model, 0, loss="loss")
    decisions = {node.metadata_props["force_mirroring"] for node in mirrored.ir.graph}
    assert decisions == {"True", "False"}
    assert memonger.get_cost(mirrored, loss="loss") < memonger.get_cost(model, loss="loss")
    assert not any("force_mirroring" in node.metadata_props for node in model.ir.graph)


@pytest.mark.parametrize("threshold", [-1, -0.5, math.nan])
def test_a_threshold_below_nothing_is_refused(threshold: float) -> None:
    with pytest.raises(PlanError, match=r"threshold is .*at least 0"):
        memonger.make_mirror_plan(chain(), threshold, loss=LOSS)


# Determinism


def _file(folder: Path, name: str, **options: Any) -> bytes:
    plan(chain(), **options).save(folder / name)
    return (folder / name).read_bytes()


@pytest.mark.parametrize(
    "options", [{}, {"budget": 102400, "effort": EFFORT}, {"strategy": "log"}, {"strategy": "cheap"}]
)
def test_the_same_input_gives_the_same_file(options: dict[str, Any], tmp_path: Path) -> None:
    assert _file(tmp_path, "a.onnx", **options) == _file(tmp_path, "b.onnx", **options)


def test_the_same_input_gives_the_same_file_in_another_process(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.planner.test_planning import _file;"
        f"folder = Path(sys.argv[1]); _file(folder, 'budget.onnx', budget=102400, effort={EFFORT});"
        "_file(folder, 'sweep.onnx')"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "11"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True, capture_output=True)
    there = {name: (tmp_path / name).read_bytes() for name in ("budget.onnx", "sweep.onnx")}
    assert there["budget.onnx"] == _file(tmp_path, "here.onnx", budget=102400, effort=EFFORT)
    assert there["sweep.onnx"] == _file(tmp_path, "here.onnx")


def test_a_device_plan_of_training_keeps_the_models_order() -> None:
    pytest.importorskip("onnxruntime")
    model = models.build_ir("resnet18", image=16, width=0.125, batch=2, training=True)
    training = memonger.differentiate(model, loss="loss", optimizer=memonger.SGD(lr=0.1))
    plan = memonger.search_plan(training, device="cpu", strategy="none", order="file")
    step = {str(node.outputs[0].name): number for number, node in enumerate(training.ir.graph)}
    steps = [step[str(node.outputs[0].name)] for node in plan.model.graph if node.outputs[0].name in step]
    assert len(steps) > len(step) / 2
    assert steps == sorted(steps)


def test_what_no_budget_gives_is_taken_where_the_search_for_a_budget_finds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = plan(chain())
    assert usual.recomputed
    monkeypatch.setattr("memonger.schedule.recompute.cheapest_within", lambda *_: None)
    found = plan(chain(), budget=usual.total_bytes, effort=EFFORT)
    assert (found.total_bytes, found.graph.nodes, found.overhead) == (
        usual.total_bytes, usual.graph.nodes, usual.overhead,
    )  # fmt: skip
    with pytest.raises(BudgetError):
        plan(chain(), budget=usual.total_bytes - 1, effort=EFFORT)


def test_workspace_of_a_node_that_was_cut_again_does_not_count() -> None:
    """Chunks of chunks: the copies that were cut are in what was measured, and run no more."""
    pytest.importorskip("onnxruntime")
    job, solution = decided(prepare(chain(), memonger.Options(mode="inference", device="cpu", threads=1)))
    measured = job.lowered.calibration
    assert measured is not None
    calibration = replace(measured, workspace={**(measured.workspace or {}), "a copy that was cut": 2**30})
    made = finish(replace(job, lowered=replace(job.lowered, calibration=calibration)), solution, 0.0)
    assert "a copy that was cut" not in (made.workspace or {})
    assert made.total_bytes < 2**30


def test_a_plan_of_many_nodes_is_pickled_and_copied(tmp_path: Path) -> None:
    """Models of onnx-ir's aren't: each value knows its node, and each node its values."""
    made = memonger.search_plan(chain(400), device="none", mode="inference")
    assert copy.copy(made) is copy.deepcopy([made])[0] is made
    found = pickle.loads(pickle.dumps(made))
    assert found.total_bytes == made.total_bytes
    for number, each in enumerate((made, found)):
        each.save(tmp_path / f"{number}.onnx")
    assert (tmp_path / "0.onnx").read_bytes() == (tmp_path / "1.onnx").read_bytes()
