"""A network's convolutions measured layer by layer: what was found, as a table and as what it means for a step."""

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.convolutions.layers import Layer
from benchmarks.machine import Table

BOUND = 1.3  # times PyTorch's time, beyond which the standard operators are too slow for weight gradients
TORCH, HEURISTIC, EMITTED = "torch", "torch heuristic", "memonger"  # contestants; any other name is a formulation
COLUMNS = Table(
    "layer<23", "no.>4", "<3", "torch ms>9.3f", "heur.>7.2f", "memo.>7.2f", "best>7.2f", "formulations ÷ torch<1",
    missing="-",
)  # fmt: skip
SUMS = Table(
    "<18", "torch>9.2f", "heuristic>11.2f", "memonger>10.2f", "best>9.2f", "÷torch>8.2f", "best÷torch>12.2f",
    missing="-",
)  # fmt: skip
QUANTITIES = {"y": "forward", "dx": "input gradient", "dw": "weight gradient"}


@dataclass(frozen=True, slots=True)
class Figure:
    """One contestant: the median of its turns in seconds (one guess if ``rough``), its error against float64 as a share
    of the norm; or no time, and why not."""

    name: str
    seconds: float | None = None
    error: float | None = None
    rough: bool = False
    refused: str = ""

    @property
    def is_formulation(self) -> bool:
        """Whether onnxruntime runs it."""
        return self.name not in (TORCH, HEURISTIC)


@dataclass(frozen=True, slots=True)
class Measured:
    """One layer, how often the network has it, and its figures by quantity: y, dx, dw."""

    layer: Layer
    count: int
    figures: Mapping[str, tuple[Figure, ...]]

    def seconds(self, quantity: str, name: str) -> float | None:
        """Of one contestant."""
        return next((f.seconds for f in self.figures.get(quantity, ()) if f.name == name), None)

    def best(self, quantity: str) -> Figure | None:
        """The fastest that onnxruntime ran."""
        ran = [f for f in self.figures.get(quantity, ()) if f.is_formulation and f.seconds is not None]
        return min(ran, key=lambda f: f.seconds or math.inf, default=None)


@dataclass(frozen=True, slots=True)
class Settings:
    """What was measured, and where. ``convolutions``: how many the whole network has."""

    network: str
    device: str
    batch: int
    threads: int
    tf32: bool
    convolutions: int

    @property
    def command(self) -> str:
        """What measures this."""
        where = f"--network {self.network} --device {self.device}"
        options = f"{where} --batch {self.batch} --threads {self.threads}{' --tf32' * self.tf32}"
        return f"python -m benchmarks.convolutions {options}"

    @property
    def clock(self) -> str:
        """What the times are."""
        if self.device != "cpu":
            return f"TF32 {'on' if self.tf32 else 'off'}, wall time of queued runs"
        return "processor time of one thread" if self.threads == 1 else f"wall time with {self.threads} threads"


@dataclass(frozen=True, slots=True)
class Report:
    """Layers measured so far, and the line about the machine."""

    settings: Settings
    machine: str
    layers: tuple[Measured, ...] = ()

    def save(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")

    @staticmethod
    def load(path: Path) -> "Report":
        """What `save` wrote."""
        read = json.loads(path.read_text())
        layers = tuple(
            Measured(
                Layer(**each["layer"]),
                each["count"],
                {quantity: tuple(Figure(**f) for f in figures) for quantity, figures in each["figures"].items()},
            )
            for each in read["layers"]
        )
        return Report(Settings(**read["settings"]), read["machine"], layers)


@dataclass(frozen=True, slots=True)
class Totals:
    """Seconds of one quantity over the network, each layer as often as it is there; None where a layer lacks it."""

    torch: float | None
    heuristic: float | None
    emitted: float | None
    best: float | None


def totals(layers: Sequence[Measured], quantity: str) -> Totals:
    """The sums over the layers that have the quantity: the gradient of the network's input is nobody's."""
    having = [each for each in layers if quantity in each.figures]
    emitted = EMITTED if quantity != "y" else "Conv"

    def total(seconds: Sequence[float | None], counts: Sequence[int]) -> float | None:
        found = [s * count for s, count in zip(seconds, counts, strict=True) if s is not None]
        return sum(found) if len(found) == len(seconds) else None

    counts = [each.count for each in having]
    best = [each.best(quantity) for each in having]
    return Totals(
        *(total([each.seconds(quantity, name) for each in having], counts) for name in (TORCH, HEURISTIC, emitted)),
        total([None if figure is None else figure.seconds for figure in best], counts),
    )


def row(measured: Measured, quantity: str) -> str:
    """PyTorch's milliseconds, then every formulation's time over PyTorch's, fastest first, memonger's in brackets."""
    figures, torch = measured.figures[quantity], measured.seconds(quantity, TORCH)
    head = str(measured.layer), measured.count, quantity
    ran = sorted((f for f in figures if f.seconds is not None), key=lambda f: f.seconds or 0.0)
    if torch is None:
        refused = "  ".join(f"{f.name}: {f.refused}" for f in figures if f.refused)
        return COLUMNS.row(*head, None, None, None, None, refused)
    heuristic, best = measured.seconds(quantity, HEURISTIC), measured.best(quantity)
    emitted = measured.seconds(quantity, EMITTED if quantity != "y" else "Conv")
    ratios = [seconds / torch if seconds else None for seconds in (heuristic, emitted, best and best.seconds)]
    shown = [_shown(f, torch) for f in ran if f.is_formulation] + [f"{f.name} -" for f in figures if f.refused]
    return COLUMNS.row(*head, torch * 1e3, *ratios, "  ".join(shown))


def _shown(figure: Figure, torch: float) -> str:
    ratio = (figure.seconds or math.nan) / torch
    text = f"{figure.name} {'~' if figure.rough else ''}{ratio:.2f}"
    return f"[{text}]" if figure.name == EMITTED else text


def refusals(layers: Sequence[Measured]) -> list[str]:
    """Why contestants have no figure, each reason once with the layers it is of."""
    found: dict[str, list[str]] = {}
    for each in layers:
        for quantity, figures in each.figures.items():
            for figure in figures:
                if figure.refused:
                    found.setdefault(f"{quantity} {figure.name}: {figure.refused}", []).append(str(each.layer))
    return [f"{reason} ({', '.join(where)})" for reason, where in found.items()]


def summary(report: Report) -> list[str]:
    """Sums over the network, and the verdict on weight gradients."""
    layers = [each for each in report.layers if each.count]
    measured, whole = sum(each.count for each in layers), report.settings.convolutions
    partly = "" if measured == whole else f" ({measured} of its {whole} convolutions: the rest is unmeasured)"
    lines = [
        f"over {report.settings.network}{partly}, ms of a step:",
        SUMS.heading,
    ]
    for quantity, name in QUANTITIES.items():
        sums = totals(layers, quantity)
        seconds = (sums.torch, sums.heuristic, sums.emitted, sums.best)
        ratios = (_ratio(sums.emitted, sums.torch), _ratio(sums.best, sums.torch))
        lines.append(SUMS.row(name, *(None if each is None else each * 1e3 for each in seconds), *ratios))
    errors = {kind: _worst(layers, kind) for kind in ("torch's", "formulations'")}
    lines.append(f"largest error against float64: {', '.join(f'{kind} {worst}' for kind, worst in errors.items())}")
    return [*lines, "", *textwrap.wrap(verdict(layers), 116)]


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _worst(layers: Sequence[Measured], kind: str) -> str:
    found = [
        (f.error, f"{f.name} of {quantity} {each.layer}")
        for each in layers
        for quantity, figures in each.figures.items()
        for f in figures
        if f.error is not None and f.seconds is not None and f.is_formulation == (kind != "torch's")
    ]
    return "{:.1e} ({})".format(*max(found)) if found else "-"


def verdict(layers: Sequence[Measured]) -> str:
    """What custom operators for weight gradients would gain, as a share of a step's convolutions."""
    weight, rest = totals(layers, "dw"), [totals(layers, quantity).torch for quantity in ("y", "dx")]
    if weight.torch is None or weight.best is None or not all(seconds is not None for seconds in rest):
        return "No verdict on weight gradients: a layer has no figure of PyTorch, or of any formulation."
    others = sum(seconds or 0.0 for seconds in rest)
    ratio, step = weight.best / weight.torch, others + weight.torch
    share = weight.torch / step
    text = (
        f"The best formulation of each layer's weight gradient takes {ratio:.2f} times PyTorch's time over the "
        f"network. By PyTorch's times a step's convolutions take {step * 1e3:.2f} ms, weight gradients {share:.0%} of "
        "it. "
    )
    if ratio > BOUND:
        text += (
            f"That is more than {BOUND}: a small library of custom operators (PyTorch's kernel, with ONNX function "
            f"bodies as fallback) would take {_gain(weight.best, weight.torch, others):.1%} off the convolutions of a "
            "step whose weight gradients are the best formulations"
        )
        if weight.emitted is not None:
            text += f", {_gain(weight.emitted, weight.torch, others):.1%} off one with those memonger emits today"
    else:
        change = -_gain(weight.best, weight.torch, others)
        text += (
            f"That is within {BOUND}: custom operators aren't needed. With PyTorch's kernel in place of the best "
            f"formulations a step's convolutions would take {abs(change):.1%} {'longer' if change > 0 else 'less'}"
        )
    if weight.emitted is None:
        return text + ". What memonger emits today has no figure in some layer."
    today = _gain(weight.emitted, weight.best, others)
    return text + f". The best formulations in place of today's would take {today:.1%} off."


def _gain(before: float, after: float, others: float) -> float:
    """The share of a step's convolutions that falls away."""
    return (before - after) / (others + before)


def table(report: Report) -> str:
    """The whole report as text."""
    settings = report.settings
    lines = [
        f"Convolutions of {settings.network} in standard ONNX operators (onnxruntime) against PyTorch's own kernels",
        report.machine,
        f"command: {settings.command}",
        f"clock: {settings.clock}",
        "",
        "y: forward; dx, dw: gradient of the input, of the weight; no.: how often the network has the layer",
        "torch ms: the median of turns; then over that: torch without cudnn.benchmark (heur.), what memonger emits",
        "today (memo.; for y the operator), the best formulation; then each formulation, memonger's in brackets;",
        "~: so slow that it took no turns, one guess; -: refused, wrong or not on the device, see below",
        "the layer of no. 0 is next to no work: what starting any costs; memonger's is often one of the formulations",
        "under another name: what lies between the two then is noise",
        COLUMNS.heading,
    ]
    lines += [row(each, quantity) for each in report.layers for quantity in each.figures]
    reasons = refusals(report.layers)
    return "\n".join([*lines, "", *summary(report), *(["", "no figure:", *reasons] if reasons else [])]) + "\n"
