"""What is differentiated, and why the rest isn't: docs/OPERATORS.md, and cases beside finite differences."""

import re
from collections.abc import Iterator

import numpy as np
import onnx
import pytest

import memonger
from memonger.autodiff.registry import EXPANSIONS, OPEN, RULES
from tests.support import operators_page as page
from tests.support.fused_cases import TEXTS, fused_cases
from tests.support.node_cases import Case, cases
from tests.support.verdicts import AGREED, judge

T, N, D, H = 3, 2, 4, 3
BOTH = 'direction="bidirectional"'

SAMPLED = (
    "affinegrid", "col2im", "compress", "cumprod", "deformconv", "dequantizelinear", "det", "dft", "gru",
    "linear_attention",
    "lstm", "maxunpool", "meanvariancenormalization", "rnn", "roialign", "scan", "scatterelements", "scatternd", "stft",
    "tensorscatter", "spacetodepth",
)  # fmt: skip
REFUSED = ("adagrad", "adam", "momentum", "optionalgetelement", "unique")


@pytest.fixture(scope="module")
def tests() -> dict[str, Case]:
    """Node tests of onnx's suite, by name: of these modules alone, whatever the process has loaded of the suite."""
    modules = (*SAMPLED, *REFUSED, "quantizelinear")
    operators = {name.replace("_", "") for name in modules}
    return {case.name: case for case in cases(modules) if case.operator.rpartition("::")[2].lower() in operators}


def test_the_page_of_operators_is_as_the_registry_says(tests: dict[str, Case]) -> None:
    text = page.PAGE.read_text("utf-8")
    if f"onnx {onnx.__version__}," not in text:
        pytest.skip("the page was made with another onnx")
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| operator")]
    wanted = [
        line for line in page.page({}).splitlines() if line.startswith("| ") and not line.startswith("| operator")
    ]
    assert [row.split(" | ")[:3] for row in rows] == [row.split(" | ")[:3] for row in wanted], (
        "python -m tests.support.operators_page --write"
    )
    kept = page.kept_by(case for case in tests.values() if case.operator in ("Det", "MaxUnpool", "STFT"))
    assert {page.row(name, versions, kept) for name, versions in page.standard().items() if name in kept} <= set(rows)


def test_something_is_said_of_every_operator() -> None:
    names = [*page.standard(), *EXPANSIONS, *OPEN, *RULES]
    assert not [name for name in names if "::" not in name and page.schema_of(name) and not page.gradient_of(name)]


def test_sampled_tests_of_the_suite_agree_with_finite_differences(tests: dict[str, Case]) -> None:
    seen: dict[str, int] = {}
    for case in tests.values():
        if (
            not case.obstacle
            and case.operator not in OPEN.keys() - EXPANSIONS.keys()
            and seen.get(case.operator, 0) < 2
        ):
            seen[case.operator] = seen.get(case.operator, 0) + 1
            verdict = judge(case)
            refused = verdict.kind == "refused" and case.name == "test_roialign_mode_max"
            assert verdict.kind in AGREED or refused, f"{case.name}: {verdict}"
    assert len(seen) >= len(SAMPLED)


def test_what_is_refused_is_named_with_the_reason(tests: dict[str, Case]) -> None:
    seen = set()
    for case in tests.values():
        if case.obstacle or case.operator not in OPEN.keys() - EXPANSIONS.keys():
            continue
        seen.add(case.operator)
        with pytest.raises(memonger.PlanError) as caught:
            memonger.differentiate(case.model, wrt=list(case.wrt))
        node = case.operator.rpartition("::")[2]
        assert re.search(
            rf"operator {node} \(domain .*node '\w+'\) {re.escape(OPEN[case.operator])}", str(caught.value)
        )
    assert len(seen) >= len(REFUSED)


@pytest.mark.parametrize("name", TEXTS)
def test_operators_of_onnxruntime(name: str) -> None:
    case = next(case for case in fused_cases() if case.name == f"com.microsoft {name}")
    verdict = judge(case)
    if name in ("attention_past", "fused_matmul_batches", "group_query"):
        assert verdict.kind == "refused"
        assert OPEN[case.operator] in verdict.message
    else:
        assert verdict.kind in AGREED, verdict


def _recurrent() -> Iterator[tuple[str, str, str]]:
    for kind in ("LSTM", "GRU", "RNN"):
        yield kind, "", "lengths"
        yield kind, BOTH, "lengths"
    yield "LSTM", "", "lengths peepholes"
    yield "LSTM", "input_forget = 1", ""
    yield "LSTM", "clip = 0.3", ""
    yield "GRU", "linear_before_reset = 1", "lengths"
    yield "RNN", 'activations = ["LeakyRelu"], activation_alpha = [0.3]', ""
    yield "LSTM", 'activations = ["HardSigmoid", "Softsign", "Affine"], activation_alpha = [0.3, 0.5]', ""


@pytest.mark.parametrize(("kind", "attributes", "more"), list(_recurrent()))
def test_options_of_recurrent_layers(kind: str, attributes: str, more: str) -> None:
    """Beside finite differences of onnxruntime's kernels, in float32."""
    ways, gates = 2 if BOTH in attributes else 1, {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    shapes = {"x": (T, N, D), "w": (ways, gates * H, D), "r": (ways, gates * H, H), "b": (ways, 2 * gates * H)}
    given = ["x", "w", "r", "b", "lengths" if "lengths" in more else ""]
    if "peepholes" in more:
        shapes["p"] = (ways, 3 * H)
        given += ["", "", "p"]
    inputs = ", ".join(f"float[{','.join(map(str, shape))}] {name}" for name, shape in shapes.items())
    inputs += f", int32[{N}] lengths" if "lengths" in more else ""
    settings = ", ".join([f"hidden_size = {H}", *([attributes] if attributes else [])])
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 20]> g ({inputs})'
        f"=> (float[{T},{ways},{N},{H}] y, float[{ways},{N},{H}] h)"
        f"{{ y, h = {kind} <{settings}> ({', '.join(given)}) }}"
    )
    generator = np.random.default_rng(0)
    feeds = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    feeds |= {"lengths": np.array([T, T - 2], np.int32)} if "lengths" in more else {}
    verdict = judge(Case(kind, kind, model, feeds, tuple(shapes)))
    assert verdict.kind == "float32", verdict
