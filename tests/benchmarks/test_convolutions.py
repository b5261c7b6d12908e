"""The benchmark of convolutions: its formulations against float64, what it says of those that fail, its sums."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import click
import onnxruntime
import pytest
from click.testing import CliRunner

from benchmarks.convolutions import formulations as conv
from benchmarks.convolutions import study as benchmark
from benchmarks.convolutions.binding import Memory, bind, foreign_nodes, place, session_of
from benchmarks.convolutions.emitted import emitted
from benchmarks.convolutions.emitter import Emitter
from benchmarks.convolutions.engines import Contestant, error_of
from benchmarks.convolutions.layers import Layer, values
from benchmarks.convolutions.report import Figure, Measured, Report, Settings, summary, table, totals
from memonger.cli.worker import WorkerError
from memonger.devices import CPU, Device

SETTINGS = Settings("resnet50", "cpu", 2, 1, False, 53)


@pytest.fixture(scope="module")
def measurer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[benchmark.Measurer]:
    measurer = benchmark.Measurer(SETTINGS, tmp_path_factory.mktemp("measurer"))
    yield measurer
    measurer.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns as short as can be: what is tested is not time."""
    monkeypatch.setattr(benchmark, "ROUNDS", 2)
    monkeypatch.setattr(benchmark, "TURN_SECONDS", {"cpu": 0.0})
    monkeypatch.setattr(benchmark, "PAUSE", {"cpu": 0.0})
    monkeypatch.setattr(benchmark, "HOPELESS", 1e6)


LAYERS = [
    Layer(2, 3, 8, 20, 7, 2),
    Layer(2, 8, 8, 8, 3, 1),
    Layer(3, 12, 5, 10, 3, 1),
    Layer(2, 6, 8, 12, 3, 2),
    Layer(2, 8, 16, 7, 1, 1),
    Layer(2, 16, 8, 30, 1, 1),
    Layer(2, 6, 8, 8, 1, 2),
    Layer(2, 6, 6, 8, 3, 1, 6),
    Layer(2, 6, 6, 12, 3, 2, 6),
]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_every_formulation_is_right(measurer: benchmark.Measurer, layer: Layer) -> None:
    found = measurer.layer(layer, 1)
    assert list(found.figures) == (["y", "dw"] if layer.c == 3 else ["y", "dx", "dw"])
    for quantity, figures in found.figures.items():
        names = [figure.name for figure in figures]
        assert names[0] == "torch"
        assert names == ["torch", *(name for name, _ in benchmark.models(layer, quantity))]
        for figure in figures:
            assert not figure.refused, (quantity, figure)
            assert figure.seconds is not None
            assert figure.seconds > 0
            assert not figure.rough
            assert figure.error is not None
            assert figure.error < 5e-6, (quantity, figure)


def test_the_layers_are_those_of_resnet50() -> None:
    layers = benchmark.network_layers(4)
    assert sum(layers.values()) == 53
    weights = sum(layer.k * layer.c * layer.kernel**2 * count for layer, count in layers.items())
    assert weights == 25_557_032 - 2_049_000 - 2 * 26_560  # all parameters but the classifier's and BatchNorm's
    assert next(iter(layers)) == Layer(4, 3, 64, 224, 7, 2)
    assert layers[Layer(4, 256, 256, 14, 3, 1)] == 5


def test_a_memonger_contestant_is_what_the_gradient_rules_emit() -> None:
    wide, narrow = (emitted(Layer(2, 24, 24, side, 1, 1), "dw")[0] for side in (28, 5))
    kinds = [[node.op_type for node in model.graph.node] for model in (wide, narrow)]
    assert "Conv" in kinds[0]  # images of 784 elements and more: a product for each, as a convolution
    assert "Conv" not in kinds[1]
    assert "Gemm" in kinds[1]


@pytest.mark.parametrize(("side", "stride", "kernel"), [(12, 2, 3), (11, 2, 3), (8, 1, 3), (9, 2, 1)])
def test_what_is_emitted_for_cuda_gives_the_same(side: int, stride: int, kernel: int) -> None:
    layer = Layer(2, 4, 6, side, kernel, stride)
    x, w, dy = values(layer).values()
    given = {"x": x, "w": w, "dy": dy}
    found = []
    for device in (CPU, Device("cuda", 0)):
        model, name = emitted(layer, "dx", device)
        session = session_of(model, 1)
        found.append(session.run([name], {each.name: given[each.name] for each in session.get_inputs()})[0])
    assert error_of(found[1], found[0]) < 1e-6


def _with(monkeypatch: pytest.MonkeyPatch, **extra: Callable[..., str]) -> None:
    """Let the weight gradient have other formulations."""
    monkeypatch.setattr(conv, "weight_gradients", lambda layer: extra)


def test_a_wrong_formulation_has_no_time(measurer: benchmark.Measurer, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(layer: Layer, op: Emitter, dy: str, x: str) -> str:
        return op.scale(conv.dw_batched(layer, op, dy, x), 1.001)

    _with(monkeypatch, wrong=wrong, right=conv.dw_batched)
    layer = Layer(2, 4, 4, 6, 1, 1)
    figures = {figure.name: figure for figure in measurer.quantity(layer, "dw")}
    assert figures["wrong"].refused == "wrong by 1.0e-03"
    assert figures["wrong"].seconds is None
    assert figures["right"].seconds is not None
    assert Measured(layer, 1, {"dw": (figures["wrong"],)}).best("dw") is None


def test_what_onnxruntime_refuses_says_why(measurer: benchmark.Measurer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(layer: Layer, op: Emitter, dy: str, x: str) -> str:
        op("ArrayFeatureExtractor", dy, x)  # of another domain
        return conv.dw_batched(layer, op, dy, x)

    def without_kernel(layer: Layer, op: Emitter, dy: str, x: str) -> str:
        half = op("Cast", conv.dw_batched(layer, op, dy, x), to=16)  # bfloat16
        return op("Cast", op("Sin", half), to=1)

    _with(monkeypatch, refused=refused, without_kernel=without_kernel, right=conv.dw_batched)
    figures = {figure.name: figure for figure in measurer.quantity(Layer(2, 4, 4, 6, 1, 1), "dw")}
    assert figures["refused"].refused == "ValueError: onnx infers no shape of what ArrayFeatureExtractor writes"
    assert "Sin" in figures["without_kernel"].refused
    assert figures["right"].seconds is not None


def test_a_process_that_is_lost_costs_one_figure(measurer: benchmark.Measurer, monkeypatch: pytest.MonkeyPatch) -> None:
    hung = []

    def dies(layer: Layer, op: Emitter, dy: str, x: str) -> str:
        measurer.runtime.close()
        return conv.dw_batched(layer, op, dy, x)

    def hangs(layer: Layer, op: Emitter, dy: str, x: str) -> str:
        if len(hung) < benchmark.LOSSES:  # after that it isn't tried
            hung.append(stop(measurer.runtime))
        return conv.dw_batched(layer, op, dy, x)

    _with(monkeypatch, before=conv.dw_batched, dies=dies, hangs=hangs, after=conv.dw_one_matmul)
    monkeypatch.setattr(measurer, "_timeout", lambda name: 0.2 if name == "hangs" else 60.0)
    reasons = []
    for _ in range(benchmark.LOSSES + 1):
        figures = {figure.name: figure for figure in measurer.quantity(Layer(2, 4, 4, 6, 1, 1), "dw")}
        assert all(figures[name].seconds is not None for name in ("before", "dies", "after", "memonger"))
        reasons.append(figures["hangs"].refused)
    assert reasons == ["no answer within 0.2 s", "no answer within 0.2 s", "not tried: lost in 2 layers before"]
    assert len(set(hung)) == benchmark.LOSSES


def test_a_process_that_hangs_or_ends_is_started_again(measurer: benchmark.Measurer) -> None:
    measurer.runtime.ask({"do": "check"}, 60.0)
    stop(measurer.runtime)
    with pytest.raises(WorkerError, match=r"no answer within 0\.1 s"):
        measurer.runtime.ask({"do": "check"}, 0.1)
    with pytest.raises(WorkerError, match="KeyError: 'layer'"):
        measurer.runtime.ask({"do": "prepare"}, 60.0)
    assert measurer.runtime.ask({"do": "check"}, 60.0) == {}


def stop(contestant: Contestant) -> int:
    """Let a contestant's process hang."""
    assert contestant.worker is not None
    os.kill(contestant.worker.process.pid, signal.SIGSTOP)
    return contestant.worker.process.pid


def test_a_profile_tells_what_ran_elsewhere(tmp_path: Path) -> None:
    model, name = emitted(Layer(2, 16, 16, 4, 1, 1), "dw")
    session, memory = session_of(model, 1, profile=tmp_path / "profile"), Memory()
    given = {key: memory.put(array) for key, array in values(Layer(2, 16, 16, 4, 1, 1)).items() if key != "w"}
    bind(session, model.graph, given, [name], memory).run()
    profile = Path(session.end_profiling())
    assert foreign_nodes(profile, "CPUExecutionProvider") == []
    assert "CPU: Gemm" in foreign_nodes(profile, "CUDAExecutionProvider")
    runs = [("CUDA", "Conv"), ("CUDA", "MemcpyToHost"), ("CPU", "Col2Im")]
    events = [
        {
            "cat": "Node",
            "name": f"{kind}_kernel_time",
            "args": {"provider": f"{where}ExecutionProvider", "op_name": kind},
        }
        for where, kind in runs
    ]
    profile.write_text("[\n" + ",\n".join(map(json.dumps, events)) + "\n]\n")
    assert foreign_nodes(profile, "CUDAExecutionProvider") == ["MemcpyToHost", "CPU: Col2Im"]


def test_no_two_living_values_share_a_block() -> None:
    model, name = emitted(Layer(2, 512, 512, 7, 3, 1), "dw")
    found, blocks = place(model.graph, [name])
    last = {value: step for step, node in enumerate(model.graph.node) for value in node.input}
    holder: dict[str, str] = {}
    for node in model.graph.node:
        if node.op_type == "Reshape":
            assert found[node.output[0]].home == found[node.input[0]].home
            continue
        home = found[node.output[0]].home
        assert home not in {found[value].home for value in node.input if value in found}
        holder[home] = node.output[0]
    assert len(blocks) < sum(node.op_type != "Reshape" for node in model.graph.node)
    assert last
    assert all(found[value].size == size for size, value in ((blocks[home], value) for home, value in holder.items()))


def figures(torch: float, emitted: float | None, other: float | None) -> tuple[Figure, ...]:
    return (
        Figure("torch", torch, 1e-7),
        Figure("Gemm", other, 2e-7) if other else Figure("Gemm", refused="not on the device: CPU: Gemm"),
        Figure("memonger", emitted, 3e-7) if emitted else Figure("memonger", refused="no answer in 10 s"),
    )


def report(other: float | None = 0.003, emitted: float | None = 0.004, convolutions: int = 3) -> Report:
    """Two layers, the second twice in the network: PyTorch's weight gradients take 1 + 2·2 = 5 ms."""
    forward = (Figure("torch", 0.001, 1e-7), Figure("Conv", 0.002, 1e-7))
    first = Measured(Layer(2, 3, 8, 8, 7, 2), 1, {"y": forward, "dw": figures(0.001, 0.002, 0.001)})
    both = {"y": forward, "dx": figures(0.001, 0.001, 0.001), "dw": figures(0.002, emitted, other)}
    layers = (first, Measured(Layer(2, 8, 8, 4, 3, 1), 2, both))
    return Report(replace(SETTINGS, convolutions=convolutions), "a machine", layers)


def test_sums_count_each_layer_as_often_as_it_is_there() -> None:
    found = totals(report().layers, "dw")
    assert found.torch == pytest.approx(0.005)
    assert found.emitted == pytest.approx(0.002 + 2 * 0.004)
    assert found.best == pytest.approx(0.001 + 2 * 0.003)
    assert found.heuristic is None
    assert totals(report().layers, "dx").torch == pytest.approx(0.002)
    assert totals(report(other=None, emitted=None).layers, "dw").best is None


def test_beyond_the_bound_the_verdict_says_what_custom_operators_gain() -> None:
    text = " ".join(summary(report()))
    assert "takes 1.40 times PyTorch's time" in text
    assert "take 10.00 ms, weight gradients 50% of it" in text
    assert "would take 16.7% off the convolutions of a step whose weight gradients are the best" in text  # 2 of 12 ms
    assert "33.3% off one with those memonger emits today" in text  # 5 of 15 ms
    assert "in place of today's would take 20.0% off" in text  # 3 of 15 ms
    assert "unmeasured" not in text


def test_within_the_bound_custom_operators_are_not_needed() -> None:
    text = " ".join(summary(report(other=0.0015)))
    assert "takes 0.80 times PyTorch's time" in text
    assert "custom operators aren't needed" in text
    assert "would take 11.1% longer" in text  # 10 ms for 9


def test_there_is_no_verdict_without_figures() -> None:
    assert "No verdict" in summary(report(other=None, emitted=None))[-1]
    assert "no figure in some layer" in " ".join(summary(report(emitted=None)))
    assert "(3 of its 53 convolutions: the rest is unmeasured)" in summary(report(convolutions=53))[0]


def test_the_table_is_that_of_the_json(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report(emitted=None).save(path)
    found = Report.load(path)
    assert found == report(emitted=None)
    lines = table(found).splitlines()
    row = next(line for line in lines if line.startswith("8>8 3x3/1 @4") and " dw " in line)
    assert row.split() == ["8>8", "3x3/1", "@4", "2", "dw", "2.000", "-", "-", "1.50", "Gemm", "1.50", "memonger", "-"]
    assert lines[-1] == "dw memonger: no answer in 10 s (8>8 3x3/1 @4)"
    assert "[memonger 2.00]" in table(found)


def test_resuming_measures_what_is_missing_only(tmp_path: Path) -> None:
    class Fake:
        def layer(self, layer: Layer, count: int) -> Measured:
            assert layer == fresh
            return Measured(layer, count, {"y": (Figure("torch", 0.001, 1e-7),)})

    path, fresh = tmp_path / "report.json", Layer(2, 8, 16, 4, 1, 1)
    old = report()
    old.save(path)
    begun = benchmark.begun(path, Report(old.settings, old.machine), resume=True)
    assert begun == old
    layers = {each.layer: each.count for each in old.layers} | {fresh: 3}
    found = benchmark.run(begun, layers, Fake(), path, 60.0)  # type: ignore[arg-type]
    assert [each.layer for each in found.layers] == list(layers)
    assert Report.load(path) == found
    assert benchmark.run(begun, layers, Fake(), path, -1.0) == old  # type: ignore[arg-type]
    with pytest.raises(click.UsageError, match="other settings"):
        benchmark.begun(path, Report(replace(old.settings, batch=3), old.machine), resume=True)
    assert benchmark.begun(path, Report(old.settings, old.machine), resume=False).layers == ()


def test_layers_are_chosen_by_their_text() -> None:
    layers = {Layer(2, 8, 16, 4, 1, 1): 1, Layer(2, 8, 8, 4, 3, 1): 2, Layer(2, 8, 8, 7, 3, 1): 3}
    assert list(benchmark.chosen(layers, "").values()) == [1, 2, 3]
    assert list(benchmark.chosen(layers, "8>16, @7").values()) == [1, 3]
    with pytest.raises(click.BadParameter, match="no layer has '9>9'"):
        benchmark.chosen(layers, "8>16,9>9")


def test_the_command_writes_table_and_figures(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    arguments = ["--batch", "1", "--layers", "64>64 1x1", "-o", str(path)]
    result = CliRunner().invoke(benchmark.main, arguments)
    assert result.exit_code == 0, result.output
    assert path.with_suffix(".txt").read_text() in result.output
    found = Report.load(path)
    assert [str(each.layer) for each in found.layers] == ["1>1 1x1/1 @1", "64>64 1x1/1 @56"]
    assert all(figure.error is not None for each in found.layers for f in each.figures.values() for figure in f)
    assert "(1 of its 53 convolutions: the rest is unmeasured)" in path.with_suffix(".txt").read_text()


@pytest.mark.skipif("CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="there is a GPU")
def test_a_device_that_is_not_there_ends_with_what_is_missing(tmp_path: Path) -> None:
    result = CliRunner().invoke(benchmark.main, ["--device", "cuda:0", "-o", str(tmp_path / "found.json")])
    assert result.exit_code == 1
    assert "CUDAExecutionProvider" in result.output
    assert "pip install" in result.output
    assert not list(tmp_path.iterdir())
