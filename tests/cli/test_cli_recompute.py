"""The command line on what is kept and what is recomputed: tables, notes, budgets, frontiers, wrong usage."""

import json
import re
from pathlib import Path

import onnx
import pytest
from click.testing import Result

import memonger
from memonger.ir.marks import FORCE, STAGE
from tests.support.command_line import invoke
from tests.support.planning_models import LOSS, chain, marked, plan

TRAIN = ("--loss", LOSS, "--device", "none")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in; terminals are 80 columns wide. Searches are short."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.fixture
def model() -> Path:
    path = Path("chain.onnx")
    onnx.save(marked(chain(), STAGE, {"relu2": "True", "relu5": "True"}), path)
    return path


def _plan(*arguments: object) -> Result:
    result = invoke("plan", *arguments)
    assert result.exit_code == 0, result.output
    return result


def test_the_sweep_is_shown_as_a_table_with_the_best_marked(model: Path) -> None:
    printed = _plan(model, *TRAIN, "--details").stdout
    lines = printed.splitlines()
    assert any(line.startswith("Sweep: ") for line in lines)
    best = [line for line in lines if line.rstrip().endswith("best │")]
    assert len(best) == 1
    assert "marks" in best[0]
    assert re.search(r"\d+ of \d+ steps compute again what was dropped in \d+ segments", " ".join(printed.split()))
    assert "(strategy sweep): +" in " ".join(printed.split())
    assert all(len(line) <= 81 or line.startswith(("Wrote", "Keep")) for line in lines)
    assert "Sweep" not in _plan(model, *TRAIN, "--details", "--strategy", "block").stdout
    assert "Sweep" not in _plan(model, *TRAIN).stdout


def test_a_plan_its_sweep_its_file_and_its_report_say_one_overhead(model: Path) -> None:
    pytest.importorskip("onnxruntime")  # times of nodes are measured then
    options = ("--loss", LOSS, "--device", "cpu", "-o", "planned.onnx")
    made = plan(chain(), loss=LOSS, device="cpu", strategy="sweep")
    assert made.outcome is not None
    assert made.overhead > 0
    assert any(each.overhead == pytest.approx(made.overhead) for each in made.outcome.candidates)
    planned = json.loads(_plan(model, *options, "--json").stdout)
    assert planned["planning_runs"] > 0
    assert planned["overhead"] > 0
    read = memonger.Plan.load("planned.onnx")
    assert read.overhead == planned["overhead"]
    assert read.graph.costs != made.graph.costs


def test_json_has_what_was_asked_for_and_found(model: Path) -> None:
    plain = json.loads(_plan(model, *TRAIN, "--strategy", "none", "--json").stdout)
    assert (plain["strategy"], plain["budget_bytes"], plain["segments"], plain["recomputed_nodes"]) == (
        "none",
        None,
        1,
        0,
    )
    swept = json.loads(_plan(model, *TRAIN, "--json").stdout)
    assert swept["strategy"] == "sweep"
    assert swept["segments"] > 1
    assert swept["recomputed_nodes"] > 0
    assert swept["overhead"] > 0
    assert swept["peak_bytes"] < swept["peak_before_bytes"]
    parts = ("arena_bytes", "parameter_bytes", "input_bytes")
    assert swept["total_bytes"] == sum(swept[part] for part in parts)
    budget = plain["total_bytes"]
    held = json.loads(_plan(model, *TRAIN, "--json", "--budget", f"{budget}B").stdout)
    assert (held["strategy"], held["budget_bytes"]) == ("budget", budget)
    assert held["total_bytes"] <= budget


def test_a_budget_stands_beside_the_total(model: Path) -> None:
    printed = _plan(model, *TRAIN, "--budget", "1GiB", "--details").stdout
    assert "│ budget " in printed
    assert "│ total " in printed
    assert "The budget of 1.00 GiB holds, with 1024 MiB to spare." in printed
    assert "No node runs twice." in printed


def test_a_budget_that_cannot_be_held_names_one_that_can(model: Path) -> None:
    result = invoke("plan", model, *TRAIN, "--budget", "0B", "-o", "out.onnx", "--time-limit", 0)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "The smallest budget that was found to work is" in result.stderr
    smallest = result.stderr.partition("found to work is")[2].partition("(")[2].partition(" bytes")[0]
    assert not Path("out.onnx").exists()
    assert invoke("plan", model, *TRAIN, "--budget", f"{smallest}B", "--time-limit", 0).exit_code == 0


@pytest.mark.parametrize("size", ["100.5", "4 parsecs", "-1GiB", "GiB", ""])
def test_a_budget_that_is_no_size_is_wrong_usage(model: Path, size: str) -> None:
    result = invoke("plan", model, *TRAIN, "--budget", size)
    assert result.exit_code == 2
    assert "--budget" in result.stderr
    assert repr(size) in result.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--strategy", "sweep", "--budget", "1GiB"), "they take no budget, 'budget' and 'exact' do"),
        (("--strategy", "budget"), "strategy 'budget' needs a budget, as --budget 4GiB"),
        (("--strategy", "exact"), "strategy 'exact' needs a budget, as --budget 4GiB"),
        (("--strategy", "quick"), "'quick'"),
        (("--mirror", "Relu", "--strategy", "none"), "nor with --strategy none"),
        (("--trials", "-1"), "-1"),
        (("--time-limit", "-1"), "-1"),
        (("-o", "one.onnx", "--annotated", "one.onnx"), "-o and --annotated name the same file"),
    ],
)
def test_options_that_contradict_each_other_are_wrong_usage(model: Path, options: tuple[str, ...], words: str) -> None:
    result = invoke("plan", model, *TRAIN, *options)
    assert result.exit_code == 2
    assert words in result.stderr
    assert not Path("one.onnx").exists()


def test_nodes_are_mirrored_and_kept_by_pattern(model: Path) -> None:
    def again(*options: str) -> int:
        return json.loads(_plan(model, *TRAIN, "--strategy", "marks", "--json", *options).stdout)["recomputed_nodes"]

    assert again() == 0
    assert again("--mirror", "Relu") == 9
    assert again("--mirror", "Relu", "--keep", "relu0", "--keep", "r1") == 7
    assert again("--mirror", "relu[0-2]", "--mirror", "h1") == 4


@pytest.mark.parametrize("option", ["--mirror", "--keep"])
def test_a_pattern_that_names_no_node_fails(model: Path, option: str) -> None:
    result = invoke("plan", model, *TRAIN, option, "Gelu")
    assert result.exit_code == 1
    assert "'Gelu' names no node" in result.stderr


def test_a_mark_that_is_no_decision_fails(model: Path) -> None:
    onnx.save(marked(chain(), FORCE, {"relu3": "perhaps"}), model)
    result = invoke("plan", model, *TRAIN)
    assert result.exit_code == 1
    assert "'relu3'" in result.stderr
    assert "force_mirroring='perhaps'" in result.stderr


def test_notes_go_to_standard_error(model: Path) -> None:
    result = _plan(model, *TRAIN, "--budget", "1GiB", "--json")
    json.loads(result.stdout)
    assert result.stderr.startswith("memonger: note: planned for training, as a loss is given")
    assert result.stderr.count("\n") == 1


def test_the_annotated_model_gives_the_plan_again(model: Path) -> None:
    first = _plan(model, *TRAIN, "--annotated", "annotated.onnx", "--json")
    onnx.checker.check_model("annotated.onnx", full_check=True)
    found = onnx.load("annotated.onnx")
    assert [node.name for node in found.graph.node] == [node.name for node in chain().graph.node]
    assert all({p.key: p.value for p in node.metadata_props}[FORCE] in ("True", "False") for node in found.graph.node)
    second = json.loads(_plan("annotated.onnx", *TRAIN, "--strategy", "marks", "--json").stdout)
    assert second["peak_bytes"] == json.loads(first.stdout)["peak_bytes"]
    assert "Wrote annotated.onnx" in _plan(model, *TRAIN, "--annotated", "annotated.onnx", "--force").stdout


def test_the_annotated_model_is_written_whole_or_not_at_all(model: Path) -> None:
    result = invoke("plan", model, *TRAIN, "--annotated", "nowhere/annotated.onnx")
    assert result.exit_code == 1
    assert "nowhere" in result.stderr
    failed = invoke("plan", model, *TRAIN, "--annotated", "annotated.onnx", "--budget", "0B", "--time-limit", 0)
    assert failed.exit_code == 1
    assert sorted(path.name for path in Path().iterdir()) == ["chain.onnx"]


def test_no_time_still_gives_a_plan_that_holds(model: Path) -> None:
    _plan(model, *TRAIN, "--time-limit", 0, "-o", "planned.onnx")
    plain = plan(chain(), strategy="none")
    budget = plain.total_bytes - plain.peak_bytes // 10
    record = json.loads(_plan(model, *TRAIN, "--time-limit", 0, "--budget", f"{budget}B", "--json").stdout)
    assert record["total_bytes"] <= budget
    assert invoke("verify", "planned.onnx").exit_code == 0


def test_the_frontier_is_shown_a_plan_a_line(model: Path) -> None:
    options = (*TRAIN, "--points", 2, "--time-limit", 0.2)
    records = json.loads(invoke("pareto", model, *options, "--json").stdout)
    assert len(records) > 1
    assert records[0]["overhead"] == 0
    totals = [record["total_bytes"] for record in records]
    assert totals == sorted(set(totals), reverse=True)
    overheads = [record["overhead"] for record in records]
    assert overheads == sorted(set(overheads))
    shown = invoke("pareto", model, *options)
    assert shown.exit_code == 0
    assert "Make one of them: memonger plan chain.onnx --loss softmax_cross_entropy --device none" in shown.stdout
    assert "100%" in shown.stdout
    assert all(len(line) <= 80 for line in shown.stdout.splitlines() if "memonger plan" not in line)


@pytest.mark.parametrize(
    ("options", "status"), [(("--points", "0"), 2), (("--budget", "1 parsec"), 2), (("--loss", "x"), 1)]
)
def test_a_frontier_that_cannot_be_is_refused(model: Path, options: tuple[str, ...], status: int) -> None:
    assert invoke("pareto", model, "--device", "none", *options).exit_code == status


def test_a_planned_file_with_copies_runs_and_shows_them(model: Path) -> None:
    _plan(model, *TRAIN, "-o", "planned.onnx")
    names = [node.name for node in onnx.load("planned.onnx").graph.node]
    assert sum(".recompute1" in name for name in names) > 0
    record = json.loads(invoke("inspect", "planned.onnx", "--json").stdout)["plan"]
    assert record["recomputed_nodes"] == sum(".recompute" in name for name in names)
    assert record["strategy"] is None
    assert memonger.Plan.load("planned.onnx").overhead > 0
