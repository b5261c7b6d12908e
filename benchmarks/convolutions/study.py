"""Gradients of a network's convolutions against PyTorch's: ``python -m benchmarks.convolutions [--network NAME]``.

cuDNN's backward filter, PyTorch's kernel for them on CUDA, is out of reach of standard ONNX operators: what is within
reach is measured here, on the CPU or on ``--device cuda:0``. Forward and input gradients are measured as well, so that
a gain is a share of what the convolutions of a step take. Every contestant's result is compared with float64.

PyTorch (with cudnn.benchmark; on CUDA a second process without) and onnxruntime run in a process each and take turns,
every formulation a turn of its own. Writes convolutions.txt and .json (with _NETWORK unless it is ResNet-50, _cuda and
_tf32 where they apply), the .json after every layer: ``--resume`` goes on from there.
"""

import importlib.metadata
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import click
import numpy as np
import onnx
import torch

from benchmarks.convolutions import formulations
from benchmarks.convolutions.emitted import emitted
from benchmarks.convolutions.emitter import model_of
from benchmarks.convolutions.engines import OPERANDS, Contestant, Engine
from benchmarks.convolutions.layers import Layer
from benchmarks.convolutions.report import EMITTED, HEURISTIC, TORCH, Figure, Measured, Report, Settings, row, table
from benchmarks.machine import machine
from benchmarks.torch_models import BUILDERS
from memonger.cli.worker import WorkerError, reason
from memonger.devices import CPU, Device, parse_device
from memonger.errors import MemongerError
from memonger.runtime.ort import check_device

NETWORKS = ("resnet50", "mobilenet_v2")
IMAGE_CHANNELS = 3  # a layer with so many has the network's input, whose gradient nobody needs
ROUNDS = 7
TURN_SECONDS, MOST_RUNS = {"cpu": 0.07, "cuda": 0.02}, 400
PAUSE = {"cpu": 0.015, "cuda": 0.0}  # seconds before a turn: the last one's threads wait for work a while, and spin
HOPELESS = 8.0  # a formulation so many times slower than PyTorch takes no turns
TIMEOUT, TORCH_TIMEOUT = {"cpu": 60.0, "cuda": 10.0}, 60.0  # seconds for one to begin, cuDNN's search included
LOSSES = 2  # layers in which a formulation may run out of time, or end its process, before it isn't tried any more
LIMIT = {"cpu": float("inf"), "cuda": 480.0}
TOLERANCE, TOLERANCE_TF32 = 1e-4, 1e-2  # of the error against float64: beyond, a formulation is wrong
START = Layer(1, 1, 1, 1, 1)  # nothing to do: what starting the work costs
HERE = Path(__file__).parents[1]

Model = tuple[onnx.ModelProto, str]


def network_layers(batch: int, network: str = NETWORKS[0]) -> dict[Layer, int]:
    """The distinct convolutions of a network on images of 224 × 224, in the order they run, and how many of each."""
    found: Counter[Layer] = Counter()

    def count(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], _: object) -> None:
        assert isinstance(module, torch.nn.Conv2d)
        n, c, side, _ = inputs[0].shape
        layer = Layer(n, c, module.out_channels, side, module.kernel_size[0], module.stride[0], module.groups)
        if module.padding != (layer.pad, layer.pad) or module.dilation != (1, 1):
            raise ValueError(f"{module} is none of the convolutions that {Layer.__name__} describes.")
        found[layer] += 1

    with torch.device("meta"):
        module = BUILDERS[network]()
        for part in module.modules():
            if isinstance(part, torch.nn.Conv2d):
                part.register_forward_hook(count)
        module(torch.empty(batch, IMAGE_CHANNELS, 224, 224))
    return dict(found)


def quantities(layer: Layer) -> list[str]:
    """What a step computes of a layer."""
    return [name for name in OPERANDS if name != "dx" or layer.c != IMAGE_CHANNELS]


def models(layer: Layer, quantity: str, device: Device = CPU) -> Iterator[tuple[str, Callable[[], Model]]]:
    """Every formulation by name, and what memonger emits, as what makes the model."""
    ways = {"dx": formulations.input_gradients, "dw": formulations.weight_gradients}
    found = ways[quantity](layer) if quantity in ways else {"Conv": formulations.forward}
    for name, formulation in found.items():
        yield name, partial(_model, layer, quantity, formulation)
    if quantity != "y":
        yield EMITTED, partial(emitted, layer, quantity, device)


def _model(layer: Layer, quantity: str, formulation: Callable[..., str]) -> Model:
    inputs = {name: np.broadcast_to(np.float32(0), layer.shapes[name]) for name in OPERANDS[quantity]}
    winograd = isinstance(formulation, partial)  # whose own first argument comes before the layer
    bound = partial(formulation.func, *formulation.args, layer) if winograd else partial(formulation, layer)
    return model_of(bound, inputs)


class Measurer:
    """Runs all contestants of one layer and quantity after another."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.device, self.folder = parse_device(settings.device), folder
        self.kind = self.device.kind
        self.tolerance = TOLERANCE_TF32 if settings.tf32 else TOLERANCE
        engine = Engine(TORCH, settings.device, settings.threads, settings.tf32)
        self.torch = {TORCH: Contestant(engine, folder / "torch.err")}
        if self.kind == "cuda":
            self.torch[HEURISTIC] = Contestant(replace(engine, search=False), folder / "heuristic.err")
        self.runtime = Contestant(replace(engine, kind="onnxruntime"), folder / "onnxruntime.err")
        self.all = [*self.torch.values(), self.runtime]
        self.losses: Counter[tuple[str, str]] = Counter()

    def check(self) -> str:
        """Every engine finds the device; what PyTorch says it is.

        Raises:
            RuntimeUnavailableError: with what is missing.
        """
        said = [contestant.ask({"do": "check"}, TORCH_TIMEOUT) for contestant in self.all]
        return str(said[0]["device"])

    def close(self) -> None:
        """End the processes."""
        for contestant in self.all:
            contestant.close()

    def layer(self, layer: Layer, count: int) -> Measured:
        """All quantities of a layer."""
        return Measured(layer, count, {quantity: self.quantity(layer, quantity) for quantity in quantities(layer)})

    def quantity(self, layer: Layer, quantity: str) -> tuple[Figure, ...]:
        """Begin every contestant once, then let those that are right and not hopeless take turns."""
        truth = self.folder / "truth.npy"
        about = {"layer": asdict(layer), "quantity": quantity, "truth": str(truth)}
        self.torch[TORCH].ask({"do": "truth", "path": str(truth), **about}, TORCH_TIMEOUT)
        requests = {name: {"do": "prepare", "name": name, **about} for name in self.torch}
        figures = {name: self._begin(request) for name, request in requests.items()}
        for index, (name, make) in enumerate(models(layer, quantity, self.device)):
            try:
                model, output = make()
            except Exception as error:  # a formulation that this shape has none of
                figures[name] = Figure(name, refused=reason(error))
                continue
            path = self.folder / f"{index}.onnx"
            onnx.save(model, path)
            requests[name] = {"do": "prepare", "name": name, "model": str(path), "output": output, **about}
            figures[name] = self._begin(requests[name])
        figures = self._turns(requests, figures)
        for contestant in self.all:
            contestant.ask({"do": "clear"}, TORCH_TIMEOUT)
        return tuple(figures.values())

    def _engine(self, name: str) -> Contestant:
        return self.torch.get(name, self.runtime)

    def _timeout(self, name: str) -> float:
        return TORCH_TIMEOUT if name in self.torch else TIMEOUT[self.kind]

    def _begin(self, request: Mapping[str, object]) -> Figure:
        name, key = str(request["name"]), (str(request["name"]), str(request["quantity"]))
        if self.losses[key] >= LOSSES:
            return Figure(name, refused=f"not tried: lost in {LOSSES} layers before")
        try:
            answer = self._engine(name).ask(request, self._timeout(name))
        except WorkerError as error:
            self.losses[key] += name != EMITTED and name not in self.torch
            return Figure(name, refused=str(error))
        if "refused" in answer:
            return Figure(name, refused=answer["refused"])
        if not answer["error"] < self.tolerance:
            return Figure(name, error=answer["error"], refused=f"wrong by {answer['error']:.1e}")
        return Figure(name, answer["seconds"], answer["error"], rough=True)

    def _turns(self, requests: Mapping[str, Mapping[str, object]], begun: Mapping[str, Figure]) -> dict[str, Figure]:
        limit = HOPELESS * (begun[TORCH].seconds or float("inf"))
        rough = {name: f.seconds for name, f in begun.items() if f.seconds is not None and f.seconds <= limit}
        runs = {name: min(MOST_RUNS, 1 + int(TURN_SECONDS[self.kind] / seconds)) for name, seconds in rough.items()}
        times: dict[str, list[float]] = {name: [] for name in runs}
        lost: dict[str, str] = {}
        for turn in range(ROUNDS):
            for name in self._order(turn, [name for name in runs if name not in lost]):
                try:
                    times[name].append(self._turn(requests[name], runs[name]))
                except WorkerError as error:
                    lost[name] = str(error)
        figures = dict(begun)
        for name, seconds in times.items():
            lone = Figure(name, refused=lost.get(name, ""))
            figures[name] = (
                lone if name in lost else replace(begun[name], seconds=statistics.median(seconds), rough=False)
            )
        return figures

    def _order(self, turn: int, names: list[str]) -> list[str]:
        """Each turn another begins, and every other turn goes backwards: nobody always follows the same."""
        first = turn % max(1, len(names))
        return (names[first:] + names[:first])[:: 1 if turn % 2 else -1]

    def _turn(self, request: Mapping[str, object], runs: int) -> float:
        """One turn's seconds of a run; a process that was lost through another's fault begins again."""
        engine, name = self._engine(str(request["name"])), request["name"]
        time.sleep(PAUSE[self.kind])
        timing = {"do": "time", "name": name, "runs": runs}
        answer = engine.ask(timing, TORCH_TIMEOUT)
        if "missing" in answer:
            engine.ask(request, TORCH_TIMEOUT)
            answer = engine.ask(timing, TORCH_TIMEOUT)
        if "seconds" not in answer:
            raise WorkerError("it didn't begin again after its process was lost")
        return float(answer["seconds"])


def chosen(layers: Mapping[Layer, int], names: str) -> dict[Layer, int]:
    """The layers whose text contains one of the names, separated by commas; all where none is given.

    Raises:
        click.BadParameter: a name that no layer contains.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if not any(name in str(layer) for layer in layers):
            raise click.BadParameter(f"no layer has {name!r}: {', '.join(map(str, layers))}")
    return {layer: count for layer, count in layers.items() if not wanted or any(n in str(layer) for n in wanted)}


def begun(path: Path, fresh: Report, resume: bool) -> Report:
    """The report to go on with.

    Raises:
        click.UsageError: the one in the file was measured with other settings, or on another machine.
    """
    if not (resume and path.exists()):
        return fresh
    found = Report.load(path)
    if (found.settings, found.machine) != (fresh.settings, fresh.machine):
        raise click.UsageError(f"{path} has other settings: {found.settings}, {found.machine}. Leave out --resume.")
    return found


def run(report: Report, layers: Mapping[Layer, int], measurer: Measurer, path: Path, limit: float) -> Report:
    """Measure the layers that the report lacks, for about so many seconds; the report is saved after each."""
    stop = time.monotonic() + limit
    for layer, count in layers.items():
        if any(each.layer == layer for each in report.layers):
            continue
        if time.monotonic() > stop:
            print(f"stopped after {limit:.0f} s: --resume goes on with {layer}", file=sys.stderr)
            break
        report = replace(report, layers=(*report.layers, measurer.layer(layer, count)))
        report.save(path)
        for quantity in report.layers[-1].figures:
            print(row(report.layers[-1], quantity), file=sys.stderr)
    return report


def versions() -> str:
    """What this runs on. onnxruntime for CUDA is a package of another name."""
    names = {distribution.name for distribution in importlib.metadata.distributions()}
    runtime = next((name for name in ("onnxruntime-gpu", "onnxruntime") if name in names), "onnxruntime")
    return machine((runtime, "torch", "onnx", "numpy"))


@click.command()
@click.option("--network", type=click.Choice(NETWORKS), default=NETWORKS[0], show_default=True)
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda:N.")
@click.option("--batch", type=int, help="Images; 4 on the CPU and 32 on CUDA where not given.")
@click.option("--layers", default="", help="Only layers whose text (as in the table) contains one of these: a,b.")
@click.option("--threads", default=1, show_default=True, help="CPU: of each. The clock is the processor's for 1.")
@click.option("--tf32", is_flag=True, help="CUDA: let both round factors to 10 bits.")
@click.option("--resume", is_flag=True, help="Go on with what the .json has.")
@click.option("--limit", type=float, help="Begin no layer after so many seconds; 480 on CUDA where not given.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The .json, the .txt beside it.")
def main(
    network: str, device: str, batch: int | None, layers: str, threads: int, tf32: bool, resume: bool,
    limit: float | None, output: Path | None,
) -> None:  # fmt: skip
    """Measure a network's convolutions in standard operators against PyTorch's."""
    try:
        kind = parse_device(device).kind
        if kind == "none":
            raise click.UsageError("there is nothing to measure without a device: --device cpu, or cuda:N.")
        check_device(parse_device(device))
        every = network_layers(batch or {"cuda": 32}.get(kind, 4), network)
        settings = Settings(network, device, next(iter(every)).n, threads, tf32, sum(every.values()))
        marks = {network: network != NETWORKS[0], "cuda": kind == "cuda", "tf32": tf32}
        stem = "_".join(["convolutions", *(mark for mark, applies in marks.items() if applies)])
        path = output or HERE / f"{stem}{'_part' if layers else ''}.json"
        with tempfile.TemporaryDirectory() as folder:
            measurer = Measurer(settings, Path(folder))
            try:
                where = measurer.check()
                report = begun(path, Report(settings, f"{versions()}, {where}"), resume)
                report = run(report, {START: 0, **chosen(every, layers)}, measurer, path, limit or LIMIT[kind])
            finally:
                measurer.close()
    except WorkerError as error:
        raise click.ClickException(f"PyTorch or onnxruntime was lost: {error}. --resume goes on.") from error
    except MemongerError as error:
        raise click.ClickException(str(error)) from error
    text = table(report)
    path.with_suffix(".txt").write_text(text)
    print(text, end="")
