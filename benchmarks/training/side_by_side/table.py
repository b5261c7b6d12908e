"""The record as text."""

from collections.abc import Callable, Sequence

from benchmarks.machine import MIB, Table, geometric_mean
from benchmarks.training.side_by_side.contestants import SHARES, training
from benchmarks.training.side_by_side.job import STEPS, WARM
from benchmarks.training.side_by_side.results import Record, Result, Row

TITLES = {"training": "Training steps", "largest": "Largest batch trained in {memory}"}
NOTES = {
    "largest": (
        "fits: peak less beside is within it (on a GPU less the context, too); to 2 %",
        "PyTorch's batch is found by runs, memonger's from plans alone and confirmed by the run shown",
        "recomputing: the largest batch for which a plan was found, at whatever cost in time",
    )
}
FAR = (
    "ms: of turns in which the cores shared a cache, before and after; far: of those in which they shared none, as the",
    "host of a virtual machine moves its cores about; turns: how many; 0 for ms: none, or not told apart: of all turns",
)
WIDTH = 27  # of a contestant's name


def table(record: Record, cuda: bool) -> str:
    """Head, a table for each kind with rows, geometric means, and what isn't measured."""
    lines = [*record.head, "", *_meaning(cuda), ""]
    for kind, title in TITLES.items():
        rows = [row for row in record.rows if row.kind == kind]
        if rows:
            lines += [
                title.format(memory=f"{record.memory / 1e9:g} GB"),
                *NOTES.get(kind, ()),
                "",
                _columns(kind).heading,
            ]
            for row in rows:
                lines += [*_row(row, cuda), ""]
            lines += [*_means(kind, rows), ""]
            if kind == "training":
                lines += [*_at_equal_memory(rows, far=False), ""]
                if any(result.far for row in rows for result in row.results):
                    lines += ["in turns in which the cores shared no cache", *_at_equal_memory(rows, far=True), ""]
    return "\n".join(line.rstrip() for line in lines).rstrip() + "\n"


def _meaning(cuda: bool) -> list[str]:
    where: tuple[str, ...] = (
        "peak: of the GPU's memory in use, by its driver (nvidia-ml-py, every 5 ms), over what was before the process",
        "beside: a bare CUDA context; net: peak less context, weights and momentum",
    )
    if not cuda:
        where = (
            "peak: a process's own pages over what was resident before the network was made; inputs were there before",
            "beside: of these what no tensor explains: what libraries (compilers, prepacked weights) left resident",
            "weights that the runtime doubles (GPT's tied embedding, transposed) are predicted, and measured as beside",
            "net: peak less beside, weights and momentum; load: the machine's average when the row was done",
        )
    return [
        "MiB, milliseconds; each contestant in a process of its own, they take turns; ÷: over the first contestant's",
        *where,
        *([] if cuda else FAR),
        "predicted: what the plan says of peak less beside; error: measured over predicted",
        "whole: the whole peak over all that the plan says, with what it says of beside",
        f"{WARM} steps to warm up, then the peak of {STEPS}",
        "apart: difference of the first step's loss from the first contestant's, over that;",
        "drift: of all steps' losses: what rounding makes of them after the first updates",
        "torch.compile, 70%: with activation_memory_budget 0.7 in training; without a number 1.0, PyTorch's own",
        "what it compiled for an earlier call may come from its cache: getting ready isn't timed",
        "checkpoint: sqrt(n) segments (U-Net: each level; networks of transformers: its own, a block each)",
        "networks of transformers have random weights, and no dropout",
        f"memonger, {', '.join(f'{share:.0%}' for share in SHARES)}: a budget of that part of the arena and scratch"
        " with nothing recomputed, or the smallest found where that is more",
        "SGD with momentum everywhere",
    ]


def _columns(kind: str) -> Table:
    return Table(
        "network<16", f"contestant<{WIDTH}", "batch>6", "peak>9.1f", "÷>7.3f", "beside>8.1f", "net>9.1f", "÷>7.3f",
        "predicted>10.1f", "error>+8.1%", "whole>+8.1%",
        f"{'ms/sample' if kind == 'largest' else 'ms'}>10.2f", "÷>7.3f", "turns>6",
        "far>10.2f", "÷>7.3f", "turns>6", "samples/s>11.1f",
        "apart>9.1e", "drift>9.1e", "note<1",
    )  # fmt: skip


def _row(row: Row, cuda: bool) -> list[str]:
    columns, lines = _columns(row.kind), []
    first = next((result for result in row.results if not result.failed), None)
    for index, result in enumerate(row.results):
        name = row.network if not index else ""
        if result.failed or first is None:
            lines.append(columns.row(name, result.title, result.batch or "") + f"  failed: {result.failed}")
            continue
        note = result.note
        if not index and not cuda and row.load:
            note = ", ".join(filter(None, (note, f"load {row.load}")))
        lines.append(columns.row(name, result.title, *_figures(result, first, row.kind), note))
    return lines


def _figures(result: Result, first: Result, kind: str) -> tuple[float | None, ...]:
    each, far = _time(result, kind), _time(result, kind, far=True)
    return (
        result.batch, _mib(result.peak), _ratio(result.peak, first.peak), _mib(result.beside), _mib(result.net),
        _ratio(result.net, first.net), _mib(result.predicted), result.error, result.whole_error,
        each, _ratio(each, _time(first, kind)), result.near, far, _ratio(far, _time(first, kind, far=True)), result.far,
        result.batch / result.seconds if result.seconds else None, result.apart, result.drift,
    )  # fmt: skip


def _time(result: Result, kind: str, far: bool = False) -> float | None:
    """Milliseconds of a step, or of a sample where batches differ."""
    seconds = result.far_seconds if far else result.seconds
    return None if seconds is None else seconds * 1e3 / (result.batch if kind == "largest" else 1)


def _mib(size: int | None) -> float | None:
    return None if size is None else size / MIB


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other or other < 0 else one / other


def ratios(rows: Sequence[Row], key: str, of: Callable[[Result], float | None]) -> list[float]:
    """A figure of one contestant over the first one's, for every row where both have it."""
    found = []
    for row in rows:
        first, mine = row.results[0], next((r for r in row.results if r.contestant == key), None)
        if mine is None or mine.failed or first.failed:
            continue
        one, other = of(mine), of(first)
        if one and other and one > 0 and other > 0:
            found.append(one / other)
    return found


def _at_equal_memory(rows: Sequence[Row], far: bool) -> list[str]:
    """Of each other contestant: the time of the fastest plan that takes no more memory over its time."""
    there = {result.contestant for row in rows for result in row.results}
    titles = {one.key: one.title for one in training("cpu") if one.library != "memonger" and one.key in there}
    columns = Table(
        "network<16", "batch>6", *(f"{title}>{len(title) + 3}.3f" for title in titles.values()), missing="-"
    )
    found = [[_equal(row, key, far) for key in titles] for row in rows]
    means = [[ratio for ratio in column if isinstance(ratio, float)] for column in zip(*found, strict=True)]
    return [
        "at equal memory: time of the fastest memonger whose peak is at most the other's, over the other's time; none:",
        "every plan takes more; geometric means are of the numbers above them",
        columns.heading,
        *(columns.row(row.network, row.batch, *ratios) for row, ratios in zip(rows, found, strict=True)),
        columns.row("geometric mean", "", *(geometric_mean(column) if column else None for column in means)),
    ]


def _equal(row: Row, key: str, far: bool) -> float | str | None:
    """A ratio of times; ``none`` where every plan takes more; None where the other didn't run."""
    times = {r.contestant: r.far_seconds if far else r.seconds for r in row.results if not r.failed}
    peaks = {r.contestant: r.peak for r in row.results if r.peak and times.get(r.contestant)}
    if key not in peaks:
        return None
    ours = {one.key for one in training("cpu") if one.library == "memonger"}
    plans = [times[name] for name, peak in peaks.items() if name in ours and peak <= peaks[key]]
    return min((_ratio(seconds, times[key]) or 0.0 for seconds in plans), default="none")


def _means(kind: str, rows: Sequence[Row]) -> list[str]:
    keys = {result.contestant: result.title for row in rows for result in row.results}
    figures: dict[str, Callable[[Result], float | None]] = {
        "peak": lambda result: result.peak,
        "net": lambda result: result.net,
        "time": lambda result: _time(result, kind),
    }
    if kind == "largest":
        figures = {"batch": lambda result: result.batch, "time per sample": figures["time"]}
    lines = ["geometric means over the first contestant, of the rows where both ran"]
    for key, title in list(keys.items())[1:]:
        means = [(name, ratios(rows, key, of)) for name, of in figures.items()]
        words = [f"{name} {geometric_mean(found):.3f}" for name, found in means if found]
        count = max((len(found) for _, found in means), default=0)
        lines.append(f"  {title:{WIDTH}}{', '.join(words) or 'none'} ({count} rows)")
    return lines
