"""`memonger run --compare`: what passes, what fails and where, and how far its latencies are to be trusted."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import memonger
from memonger.cli import first_difference, noise
from memonger.cli.compare import _prediction
from memonger.cli.differences import Tolerance, difference
from memonger.devices import CPU
from memonger.ir.save import save_model
from memonger.report.runs import format_seconds
from memonger.runtime.measure import Measured, latency
from tests.support.command_line import invoke
from tests.support.planning_models import chain
from tests.support.stock import normal, parse

LAYERS = 4


def changed(weight: str) -> onnx.ModelProto:
    """`chain` with one number of one weight changed."""
    model = chain(LAYERS)
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == weight)
    array = onnx.numpy_helper.to_array(tensor).copy()
    array[0, 0] += 0.5
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, weight))
    return model


@pytest.mark.parametrize(("more", "own"), [(1.0, False), (1.04, False), (2.0, True)])
def test_what_is_measured_well_above_the_plan_is_said_to_be_the_processs(more: float, own: bool) -> None:
    for sizes, says in ((8, "The plan says"), ((1, 8), "For the largest sizes the plan says")):
        plan = memonger.search_plan(parse("g (float[N, 64] x) => (float[N, 64] y) { a = Exp(x) y = Tanh(a) }"),
                                    mode="inference", dims={"N": sizes})  # fmt: skip
        assert plan.predicted_bytes
        said = _prediction(plan, Measured(1.0, round(more * plan.predicted_bytes), 1.0, (1.0,)))
        assert said.startswith(says)
        assert ("take of their own" in said) is own


def test_another_models_outputs_fail_with_the_first_node_that_differs_and_status_1(tmp_path: Path) -> None:
    onnx.save(chain(LAYERS), tmp_path / "model.onnx")
    onnx.save(changed("w2"), tmp_path / "other.onnx")
    command = ["run", tmp_path / "model.onnx", "--against", tmp_path / "other.onnx", "--compare", "--device", "none"]
    done = invoke(*command, "--runs", "5", "--atol", "1e-4", "--json")
    assert done.exit_code == 1
    record = json.loads(done.stdout)
    assert record["passed"] is False
    assert (record["atol"], record["rtol"], record["runs"], record["warm_up"]) == (1e-4, None, 5, 3)
    first = record["first_difference"]
    assert (first["node"], first["op"], first["value"], first["step"]) == ("fc2", "MatMul", "h2", 5)
    assert record["max_abs_diff"] > 1e-4
    assert record["latency_p95_seconds"] >= record["latency_seconds"]
    low, high = record["latency_ratio_range"]
    assert low <= high
    assert record["noise"]["cores"] >= 1


def test_an_input_that_is_a_dictionary_is_a_table_on_both_sides(tmp_path: Path) -> None:
    model = parse("g (float[1, 2] d) => (float[1, 2] y) { t = Identity(d) a = Exp(t) y = Tanh(a) }")
    kind = onnx.helper.make_map_type_proto(onnx.TensorProto.STRING, onnx.helper.make_tensor_type_proto(1, []))
    model.graph.input[0].type.CopyFrom(kind)
    keys = {"string_vocabulary": ["a", "b"]}
    model.graph.node[0].CopyFrom(onnx.helper.make_node("DictVectorizer", ["d"], ["t"], domain="ai.onnx.ml", **keys))
    model.opset_import.add(domain="ai.onnx.ml", version=1)
    onnx.save(model, tmp_path / "model.onnx")
    done = invoke("run", tmp_path / "model.onnx", "--compare", "--runs", "3", "--json")
    assert json.loads(done.stdout)["passed"] is True


def test_sequences_are_compared_array_by_array(tmp_path: Path) -> None:
    """Each array of one is an array of the file of inputs, and of that of outputs."""
    nodes = "a = SequenceAt(s, i) b = Exp(a) t = SequenceInsert(s, b)"
    text = f"g (seq(float[N]) s, int64 i) => (seq(float[N]) t) {{ {nodes} }}"
    model, given = tmp_path / "model.onnx", tmp_path / "given.npz"
    onnx.save(parse(text), model)
    np.savez(given, **{"i": np.array(1), "s[0]": normal(0, 3), "s[1]": normal(1, 2)})  # type: ignore[arg-type]
    command = ["run", str(model), "--compare", "--runs", "3", "--json", "--quiet"]
    refused = invoke(*command)
    assert "called 's[0]', 's[1]' and so on (--inputs FILE)" in refused.output
    done = invoke(*command, "--inputs", given, "--outputs", f"{tmp_path}/made.npz")
    assert json.loads(done.stdout)["passed"] is True
    with np.load(tmp_path / "made.npz") as made:
        assert {name: made[name].tolist() for name in made} == {
            "t[0]": normal(0, 3).tolist(), "t[1]": normal(1, 2).tolist(),
            "t[2]": memonger.Session(memonger.search_plan(parse("g (float[2] x) => (float[2] y) { y = Exp(x) }"))).run(
                {"x": normal(1, 2)})["y"].tolist(),
        }  # fmt: skip


@pytest.mark.parametrize("rows", [0, 2])
def test_a_sequence_is_the_rows_of_an_array_in_a_file(rows: int, tmp_path: Path) -> None:
    """As numpy.savez writes a list of arrays of one shape, and an empty one; so does ``--outputs`` write that."""
    model, array = tmp_path / "model.onnx", normal(0, rows, 3)
    nodes = "t = Identity(s) n = SequenceLength(s)"
    onnx.save(parse(f"g (seq(float[N]) s) => (seq(float[N]) t, int64 n) {{ {nodes} }}"), model)
    np.savez(tmp_path / "given.npz", s=list(array))  # type: ignore[arg-type]
    files = ["--inputs", f"{tmp_path}/given.npz", "--outputs", f"{tmp_path}/made.npz"]
    done = invoke("run", model, "--runs", "1", "--quiet", *files)
    assert done.exit_code == 0, done.output
    with np.load(tmp_path / "made.npz") as made:
        assert made["n"] == rows
        assert rows == 0 or np.array_equal([made["t[0]"], made["t[1]"]], array)
        assert rows > 0 or made["t"].shape == (0,)


def test_sequences_of_other_lengths_differ() -> None:
    one, two = {"y": [np.zeros(2)]}, {"y": [np.zeros(2), np.ones(3)]}
    assert difference(two, two).bitwise_equal
    for pair in ((one, two), (two, one)):
        gap = difference(*pair)
        assert (gap.passed, gap.bitwise_equal) == (False, False)
        assert "length of y" in gap.names


def test_tolerances_are_for_comparisons(tmp_path: Path) -> None:
    done = invoke("run", tmp_path / "model.onnx", "--atol", "1e-3")
    assert done.exit_code == 2
    assert "--atol and --rtol are for --compare" in done.stderr


@pytest.mark.parametrize(
    ("ours", "theirs", "allowed", "passed"),
    [
        ([1.0, 2.0], [1.0, 2.0], Tolerance(), True),
        ([0.0], [-0.0], Tolerance(), False),
        ([0.0], [-0.0], Tolerance(atol=0.0), True),
        ([1.0, 2.0], [1.0, 2.1], Tolerance(atol=0.2), True),
        ([1.0, 2.0], [1.0, 2.1], Tolerance(atol=0.01), False),
        ([1.0, 200.0], [1.0, 201.0], Tolerance(rtol=0.01), True),
        ([1.0, 200.0], [1.1, 200.0], Tolerance(rtol=0.01), False),
        ([np.nan, 1.0], [np.nan, 1.5], Tolerance(atol=1.0), True),
        ([np.nan, 1.0], [1.0, np.nan], Tolerance(atol=1e9), False),
        ([np.inf], [1.0], Tolerance(atol=1e9), False),
        ([np.inf], [-np.inf], Tolerance(atol=1e9), False),
    ],
)
def test_what_passes(ours: list[float], theirs: list[float], allowed: Tolerance, passed: bool) -> None:
    pair = ({"y": np.array(ours)}, {"y": np.array(theirs)})
    assert difference(*pair, allowed).passed is passed
    if not allowed.is_exact:
        assert np.allclose(ours, theirs, allowed.rtol or 0, allowed.atol or 0, equal_nan=True) is passed


def test_the_largest_differences_and_what_cannot_be_subtracted() -> None:
    gap = difference(
        {"a": np.array([1.0, 4.0]), "b": np.array([0.0])}, {"a": np.array([1.0, 5.0]), "b": np.array([0.0])}
    )
    assert (gap.bitwise_equal, gap.max_abs_diff, gap.max_rel_diff, gap.names) == (False, 1.0, 0.2, ("a",))
    for other in (np.zeros((2, 1)), np.zeros(2, np.float32), np.array([np.nan, 0.0])):
        gap = difference({"a": np.zeros(2)}, {"a": other})
        assert (gap.passed, gap.max_abs_diff) == (False, None)
        assert "'a'" in gap.why


def test_a_value_that_a_wrong_plan_writes_over_is_the_first_that_differs(tmp_path: Path) -> None:
    """Both inputs of the last Add at one address: what the checker refuses, run all the same."""
    model = parse("g (float[64] x) => (float[64] y) { a = Exp(x)  b = Tanh(x)  c = Sigmoid(b)  y = Add(a, c) }")
    plan = memonger.search_plan(model, mode="inference", device="cpu", level="disable")
    names = plan.graph.values
    offsets = {**plan.offsets, names.index("a"): plan.offsets[names.index("c")]}
    wrong = dataclasses.replace(plan, offsets=offsets)
    with pytest.raises(memonger.VerificationError):
        wrong.verify()
    onnx.save(model, tmp_path / "model.onnx")
    feeds = {"x": normal(0, 64)}
    for given, expected in ((plan, None), (wrong, "y")):
        found = first_difference.find(given, tmp_path / "model.onnx", feeds, CPU, 0, Tolerance())
        assert (found and found.value) == expected
    assert "'y'" in first_difference.explain(wrong, found)


def test_recomputed_values_are_compared_with_what_they_are_copies_of(tmp_path: Path) -> None:
    """A forward pass with a budget: its copies have names that the stock model doesn't know."""
    plan = memonger.search_plan(chain(LAYERS), loss="softmax_cross_entropy", strategy="cheap", device="none")
    assert plan.recomputed
    training = memonger.differentiate(chain(LAYERS), loss="softmax_cross_entropy")
    save_model(training.ir, tmp_path / "training.onnx")
    feeds = {"x": normal(0, 64, 16), "labels": np.zeros(64, np.int64)}
    assert first_difference.find(plan, tmp_path / "training.onnx", feeds, CPU, 0, Tolerance()) is None


def test_random_numbers_are_named_as_what_may_be_behind_a_difference() -> None:
    model = parse("g (float[4] x) => (float[4] y) { r = RandomNormalLike(x)  y = Add(r, x) }")
    text = first_difference.explain(memonger.search_plan(model, mode="inference", device="none"), None)
    assert "draws random numbers" in text
    assert "RandomNormalLike" in text


def test_a_ratio_is_trusted_as_far_as_the_turns_agree() -> None:
    quiet, busy = noise.Load(0.5, 2), noise.Load(3.9, 2)
    assert noise.ratio_range((1.0, 2.0, 1.0), (1.0, 1.0, 2.0)) == (0.5, 2.0)
    assert noise.warning(1.0, (0.98, 1.01), quiet, "stock") == ""
    assert "from 0.800 to 1.200" in noise.warning(1.0, (0.8, 1.2), quiet, "stock")
    assert "3.9 on 2 cores" in noise.warning(1.0, (0.98, 1.01), busy, "stock")


def test_median_and_p95_of_runs() -> None:
    assert latency([float(n) for n in range(101)]) == (50.0, 95.0)
    shown = {2.0: "2.00 s", 0.0221: "22.1 ms", 0.9999e-3: "1.00 ms", 123e-6: "123 µs", 99.96: "100 s"}
    assert {seconds: format_seconds(seconds) for seconds in shown} == shown


@pytest.mark.parametrize("command", [("run", "--compare", "--runs", "3"), ("shrink", "-o", "small.onnx")])
def test_text_is_compared_as_numbers_are(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = parse("g (string[16] s) => (string[16] y, bool[16] m) { y = StringConcat(s, s)  "
                  "m = RegexFullMatch<pattern = \"t.*\">(s) }", opset=20)  # fmt: skip
    onnx.save(model, "model.onnx")
    done = invoke(command[0], "model.onnx", *command[1:], "--quiet")
    if command[0] == "run":
        assert done.exit_code == 0, done.stderr
        assert "PASSED" in done.stdout
    else:  # it gains nothing, which only running it tells
        assert "memory" in done.stderr
